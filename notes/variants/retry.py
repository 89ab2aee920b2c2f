"""Environment for environment.patch: a question of reasoning-gym, and one more try if its verifier says no.

    pip install -e '.[tasks]' && python notes/variants.py apply environment
    python notes/variants/gym_tasks.py chain_sum --folder runs/sums --train 5000 --test 300 --config '{"max_terms": 2}'
    accelerate launch environment_llm.py --environment notes/variants/retry.py:Retry --dataset runs/sums/train.jsonl
        --eval-dataset runs/sums/test.jsonl --prompt-suffix ' End with "####" and the answer.' ...

The file is one to copy for another library whose tasks score a text: a column of the row names the task (here
`entry`, which gym_tasks.py writes), and `step` asks its verifier. A right answer counts half in the second try. A part
of one counts nothing, or chain_sum would pay .5 for 16 where 6 is right.

Measured: sums of two numbers with the bundled model, one seed, 20 iterations: 98% of the games have a second try,
rollout/logprob_diff stays below 5e-7, and nothing is learned. The model never learned to answer such questions: 1 or 2%
of its games are won, and greedily it says "#### 1" in both tries.
"""

from gym_tasks import gym_tasks

TRIES = 2


class Retry:
    def reset(self, entry, **row):
        self._entry = entry
        self._tries = 0
        self._right = False

    def step(self, text):
        (score,) = gym_tasks([""], [text], [""], [self._entry])
        self._right = score == 1
        self._tries += 1
        if self._right or self._tries == TRIES:
            return None
        return "\nThat is wrong, try again.\n"

    def get_reward(self):
        return self._right / self._tries if self._right else 0.0
