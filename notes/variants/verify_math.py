"""Reward: 1 if the response's answer equals the data's as mathematics, by the library math-verify.

    pip install -e '.[tasks]'
    accelerate launch grpo_llm.py --reward notes/variants/verify_math.py:verify_math ...

.75, 75% and \\frac{6}{8} are 3/4, and x^2+2x+1 is (x+1)^2. Of a response, what is in \\boxed{} or $...$ counts first,
then the last number of the text. Of the data's answer, what follows "####", or all of it: a number, LaTeX with or
without $, a solution with \\boxed{}. Names and words are not for it: letters are factors, so AB is BA.

Measured: the embedded task, one seed, 20 iterations: greedy .002 to .992, sampled .308 to .942.

An answer of the data that the library cannot read is reported once, and every response to it scores 0: one odd row does
not end a run in its third hour.

The file may not be called math_verify.py: Python would then find it where it looks for the library.
"""

import functools
import logging
import sys

try:
    from math_verify import parse, verify
except ImportError:
    sys.exit("verify_math.py needs math-verify: pip install -e '.[tasks]'")

SECONDS = 2  # each for reading and comparing: 9^{9^{9^9}} can be written, and would be computed
logging.getLogger("math_verify").setLevel(logging.ERROR)  # else a line for each that took longer


@functools.cache
def gold(text):
    """What the library reads in a reference answer; empty, and a line on stderr, if it is nothing."""
    text = text.rpartition("####")[2].strip().replace("\\$", "")  # an escaped dollar is a currency, not LaTeX's mark
    if "$" not in text and "\\boxed" not in text:
        text = f"\\boxed{{{text}}}"  # x+1 is only read where LaTeX is expected
    parsed = parse(text, parsing_timeout=SECONDS)
    if not parsed:
        print(f"verify_math cannot read the answer {text!r} of the data, so it scores 0", file=sys.stderr)
    return parsed


def verify_math(prompts, responses, answers):
    """1.0 or 0.0 each; what cannot be read, or takes too long to compare, scores 0."""
    scores = []
    for response, answer in zip(responses, answers):
        if isinstance(answer, list) and len(answer) == 1:  # as some data sets write it
            (answer,) = answer
        found = parse(response, parsing_timeout=SECONDS)
        scores.append(float(verify(gold(str(answer)), found, timeout_seconds=SECONDS)))
    return scores
