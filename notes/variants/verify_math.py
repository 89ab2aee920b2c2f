"""Reward: 1 if the response's answer equals the data's as mathematics, by the library math-verify.

    pip install -e '.[tasks]'
    accelerate launch grpo_llm.py --reward notes/variants/verify_math.py:verify_math ...

.75, 75% and \\frac{6}{8} are 3/4, and x^2+2x+1 is (x+1)^2. Of a response, what is in \\boxed{} or $...$ counts first,
then the last number of the text. Of the data's answer, what follows "####", or all of it: a number, LaTeX with or
without $, a solution with \\boxed{}. Names and words are not for it: letters are factors, so AB is BA.

Measured: the embedded task, one seed, 20 iterations: greedy .002 to .992, sampled .308 to .942.

The file may not be called math_verify.py: Python would then find it where it looks for the library.
"""

import logging
import sys

try:
    from math_verify import parse, verify
except ImportError:
    sys.exit("verify_math.py needs math-verify: pip install -e '.[tasks]'")

SECONDS = 2  # each for reading and comparing: 9^{9^{9^9}} can be written, and would be computed
logging.getLogger("math_verify").setLevel(logging.ERROR)  # else a line for each that took longer


def gold(answer):
    text = answer.rpartition("####")[2].strip()
    if "$" not in text and "\\boxed" not in text:
        text = f"\\boxed{{{text}}}"  # x+1 is only read where LaTeX is expected
    parsed = parse(text, parsing_timeout=SECONDS)
    if not parsed:
        raise ValueError(f"verify_math cannot read the answer {answer!r} of the data: correct it, or leave its row out")
    return parsed


def verify_math(prompts, responses, answers):
    """1.0 or 0.0 each; what cannot be read, or takes too long to compare, scores 0."""
    golds = {answer: gold(answer) for answer in set(answers)}
    parsed = [parse(response, parsing_timeout=SECONDS) for response in responses]
    pairs = zip(answers, parsed)
    return [float(verify(golds[answer], found, timeout_seconds=SECONDS)) for answer, found in pairs]
