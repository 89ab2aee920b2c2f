"""Environments for environment.patch: guess a number from 1 to 7 in three turns, told "higher" or "lower" after each.

    python benchmarks/tasks.py guess runs/tasks/guess && python notes/variants.py apply environment
    accelerate launch environment_llm.py --environment notes/variants/guess.py:GuessInText
        --model runs/tasks/guess/model --dataset runs/tasks/guess/train.jsonl --eval-dataset runs/tasks/guess/test.jsonl
        --max-response-length 24 --lr 1e-3 --kl-loss-coef 0 --total-iterations 150

`Guess` has a tool, for chat models: `guess` is described to the model by the chat template, and a turn that does not
call it ends the game. `GuessInText` has a `step`: a turn is the number, and nothing else. The number to guess is the
column `answer`, because whatever differs between games must come from the data: all responses to a prompt play the same
game, and a run that is resumed plays those of the unbroken one.
"""

NUMBERS = 7
TURNS = 3


class Guess:
    def reset(self, answer, **row):
        """Begins a game. It may return a text, which would be appended to the prompt."""
        self._number = int(answer)
        self._left = TURNS
        self._right = False

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: a number from 1 to 7
        """
        if self._right or self._left == 0:
            raise ValueError("the game is over")
        self._left -= 1
        self._right = number == self._number
        if self._right:
            return "right"
        return "higher" if number < self._number else "lower"

    def get_reward(self):
        return float(self._right)


class GuessInText(Guess):
    def step(self, text):
        """Plays a turn. Returns what the environment says to it, or None if the game is over."""
        try:
            said = self.guess(int(text))
        except ValueError:  # that was no number
            self._left -= 1
            said = "what?"
        if self._right or self._left == 0:
            return None
        return f"\n{said}\n"
