"""Reward: among the right answers to a prompt, the shorter the better; only the order counts.
Group: the reward, as a file

    accelerate launch grpo_llm.py --reward notes/variants/rank.py:rank ...

A wrong answer (to `gsm8k`) scores 0, the shortest right one 1 and the longest .5, with the others evenly in between, by
how many are shorter. An example of a reward that compares the answers of a group with each other, as a judge could that
is asked for an order (RULER of OpenPipe's ART; users of TRL asked for it in issue 4707). A reward of grpo_llm.py gets
whole groups, and the answers of a group are neighbours with the same prompt. If two neighbouring groups have the same
prompt, they are compared as one.

ppo_llm.py and every evaluation ask with one answer per prompt, which has no rival. Then `right` is all that there is,
so eval/score and `best/` go by the share of right answers and say nothing about length, and you can't compare them with
reward/mean. So say something useful about an answer without a rival, and return it as a part: part/right and
eval_part/right can be compared. A reward of the order alone is the same number in every evaluation.

Measured: three seeds of the bundled task, 20 iterations: 95.0-95.6% of the sampled answers are right, and 35.5-35.9
tokens long (with gsm8k 94.2-95.8% and 35.5-35.9): no difference here, as right answers are all of about one length.
"""

import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where grpo_llm.py is
from grpo_llm import gsm8k


def rank(prompts, responses, answers, tokens):
    right = gsm8k(responses, answers)
    behind = [0.0] * len(prompts)
    for _, group in itertools.groupby(range(len(prompts)), key=lambda i: prompts[i]):  # neighbours
        winners = [i for i in group if right[i]]
        for i in winners:
            shorter = sum(len(tokens[j]) < len(tokens[i]) for j in winners)
            behind[i] = -0.5 * shorter / max(1, len(winners) - 1)
    return {"right": right, "behind": behind}
