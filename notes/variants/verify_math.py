"""Reward: 1 if the response's answer equals the data's as mathematics, by the library math-verify.
Group: the reward, as a file

    pip install -e '.[tasks]'
    accelerate launch grpo_llm.py --reward notes/variants/verify_math.py:verify_math ...

.75, 75% and \\frac{6}{8} equal 3/4, and x^2+2x+1 equals (x+1)^2. In a response, what is in \\boxed{} or $...$ counts
first, then the last number of the text. In the data's answer, what follows "####" counts, or all of it: a number, LaTeX
with or without $, or a solution with \\boxed{}. Don't use it for names and words: it reads letters as factors, so AB
equals BA.

A formula is not an answer. Until version 0.4, "11 + 72" was paid where 83 is right, and within ten iterations a model
of 135M parameters had learned to repeat the question (notes, chapter 8). Where the data's answer is a number, the
response must now state a number: 83, 83.0, or a fraction if it isn't a whole number. If it ends in a formula, its last
number counts instead. Where the data's answer is a formula, another formula may be right, but not one from the prompt.
One hole is left: asked to simplify a formula, a model may write it in another way that is no simpler.

Measured: the bundled task, one seed, 20 iterations: greedy rises from 0.2% to 99.2%, sampled from 30.8% to 94.2%.

If the library cannot read an answer in the data, we report it once, and every response to it scores 0: one odd row
shouldn't end a run in its third hour.

The file may not be called math_verify.py: Python would then find it where it looks for the library.
"""

import functools
import logging
import re
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


NUMBER = re.compile(r"[-+]?(\d[\d,]*\.?\d*|\.\d+)%?")
FRACTION = re.compile(r"[-+]?\d+/\d+")


def typed(text):
    """With a typographer's minus as -, and LaTeX's \\% as %: the library does not read these in plain text."""
    return text.replace("\u2212", "-").replace("\\%", "%")


def bare(text):
    """Without spaces, dollars and the LaTeX that only moves or sizes things, and with fractions as 3/4."""
    text = re.sub(r"[\s$]|\\[,;!]|\\(?:left|right|text\{[^}]*\})", "", text)
    return re.sub(r"\\[dt]?frac\{(\d+)\}\{(\d+)\}", r"\1/\2", text)


def is_answer(text, right, prompt):
    """Whether `text`, whose value is that of `right`, states an answer. Both are what the library has read."""
    text, right = bare(text), bare(right)
    if text == right or NUMBER.fullmatch(text):
        return True
    if NUMBER.fullmatch(right) and "." not in right and "%" not in right:
        return False  # 11+72, or 84/12, for a whole number
    if NUMBER.fullmatch(right) or FRACTION.fullmatch(right):
        return FRACTION.fullmatch(text) is not None and text not in bare(prompt)
    return text not in bare(prompt)


def last_number(text):
    return ([""] + [match[0] for match in NUMBER.finditer(text)])[-1]


def verify_math(prompts, responses, answers):
    """1.0 or 0.0 each; what cannot be read, or takes too long to compare, scores 0."""
    scores = []
    for prompt, response, answer in zip(prompts, responses, answers):
        if isinstance(answer, list) and len(answer) == 1:  # as some data sets write it
            (answer,) = answer
        prompt, response, right = typed(prompt), typed(response), gold(typed(str(answer)))
        found = parse(response, parsing_timeout=SECONDS)
        if found and right and not is_answer(found[-1], right[-1], prompt):
            found = parse(last_number(response), parsing_timeout=SECONDS)
        scores.append(float(verify(right, found, timeout_seconds=SECONDS)))
    return scores
