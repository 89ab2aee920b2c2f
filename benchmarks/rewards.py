"""Reward functions to point --reward at: benchmarks/rewards.py:exact

A reward file is code you chose to run. Its functions take lists of equal length and return one number per response:
    f(prompts, responses, answers, **columns) -> list[float]
`answers` holds None where the data has none; further dataset columns are passed when the function names them.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
from grpo_llm import gsm8k


def exact(prompts, responses, answers):
    """1 if the response is the answer, ignoring surrounding white space, else 0. Answers are texts or whole numbers."""
    for answer in answers:
        # What a file of data says as 5, a date or true may have become 5.0, a datetime or True: no model writes that.
        if isinstance(answer, bool) or not isinstance(answer, str | int):
            kind = type(answer).__name__
            raise TypeError(f"exact compares texts: the answer {answer!r}, a {kind}, should be a text in the data")
    return [float(response.strip() == str(answer).strip()) for response, answer in zip(responses, answers)]


def ten_or_eleven(responses, answers):
    """gsm8k's 0 and 1 with another zero: what a policy gradient without a baseline makes of that (chapter 1)."""
    return [10 + score for score in gsm8k(responses, answers)]
