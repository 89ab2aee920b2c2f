"""Reward: right, and as long as it should be (the length reward of L1, 2503.04697, eq. 1, with one length for all).
Group: the reward, as a file

    LENGTH_TARGET=100 accelerate launch grpo_llm.py --reward notes/variants/length_control.py:length_control ...

A right answer (the number after the last ####) scores 1, minus LENGTH_WEIGHT (default .5) times the distance of its
length in characters from LENGTH_TARGET (default 100), as a share of the target, at most 1. A wrong answer loses as
much, so right ones are always worth more than wrong ones of the same length. But the right length pays by itself (a
wrong answer scores 0 instead of -.5), so a policy that never finds a right answer still learns to be that long.

Measured: three seeds each from `benchmarks/tasks.py lengths`, 60 iterations: with targets of 80 and 100 characters, the
sampled test answers have 79.7-81.0 and 100.7-101.9 characters. With 80, 89%, 55% and 91% of them are right, with 100,
90%, 89% and 89%. Without the length reward they have 50.5-51.3, and 89-94% are right. The seed with 55% went far from
the start, to a KL of 0.25 nats per token.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where grpo_llm.py is
from grpo_llm import gsm8k


def length_control(responses, answers):
    target, weight = int(os.environ.get("LENGTH_TARGET", "100")), float(os.environ.get("LENGTH_WEIGHT", ".5"))
    if target < 1:
        raise ValueError(f"LENGTH_TARGET must be at least 1 character, but is {target}")
    distances = [min(1.0, abs(len(response) - target) / target) for response in responses]
    return [score - weight * far for score, far in zip(gsm8k(responses, answers), distances)]
