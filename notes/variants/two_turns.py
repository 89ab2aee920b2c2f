"""Environment for environment.patch: asks again if the first answer is wrong, and the model answers a second time.
Group: sampling, turns, tools

    python benchmarks/tasks.py boxes runs/tasks/boxes && python notes/variants.py apply environment
    accelerate launch environment_llm.py --environment notes/variants/two_turns.py:TwoTurns
        --reward notes/variants/two_turns.py:turns --model runs/tasks/boxes/model
        --dataset runs/tasks/boxes/train.jsonl --eval-dataset runs/tasks/boxes/test.jsonl --prompt-suffix ""
        --max-response-length 96 --lr 1e-3 --kl-loss-coef 0 --total-iterations 40

Several turns in their smallest form (as in SCoRe, 2409.12917). Both answers are trained, and not what is said between
them. The parts of the score tell which answer was right. Questions and answers are texts.

Measured: three seeds of that task: one takes the other box after 25 iterations, and all its second answers are right.
In the other two, half of them are, as at first.
"""


class TwoTurns:
    def reset(self, question, answer, **row):
        self._question = question
        self._answer = answer
        self.right = []  # for each answer so far, whether it was

    def step(self, text):
        self.right.append(text.strip() == self._answer)  # a lost form is wrong, too, or "#### #### 1" would be paid
        if self.right[-1] or len(self.right) == 2:
            return None
        return f"\nThat is wrong, try again.\n{self._question}"

    def get_reward(self):
        return float(self.right[-1:] == [True])


def turns(environments):
    """Parts of the score: 1 for a right first answer, or for a right second one."""
    games = [game.right for game in environments]
    return {
        "first": [float(right[:1] == [True]) for right in games],
        "second": [float(right[1:] == [True]) for right in games],
    }
