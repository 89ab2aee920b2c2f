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
response must now state a number: 83, 83.0, 10^3 unless the prompt has it, or a fraction if it isn't a whole number. If
it ends in a formula, its last number counts instead, unless the formula has a factorial. Where the data's answer is a
formula, another formula may be right, but not one from the prompt.

Some holes are left. A response that ends in "not 83" or "84 or 83" gets nothing, but "perhaps 83" and "83 or more" are
paid. Asked to simplify a formula, a model may write it in another way that is no simpler.

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

SECONDS = 2  # each for reading a response and comparing: 9^{9^{9^9}} can be written, and would be computed
logging.getLogger("math_verify").setLevel(logging.ERROR)  # else a line for each that took longer
parse("\\boxed{1}", parsing_timeout=None)  # loads the grammar, which on a busy machine takes longer than SECONDS


@functools.cache
def gold(text):
    """What the library reads in a reference answer; empty, and a line on stderr, if it is nothing.

    It is kept for the whole run, so a busy machine must not make it empty: there is no time limit.
    """
    text = text.rpartition("####")[2].strip().replace("\\$", "")  # an escaped dollar is a currency, not LaTeX's mark
    if "$" not in text and "\\boxed" not in text:
        text = f"\\boxed{{{text}}}"  # x+1 is only read where LaTeX is expected
    parsed = parse(text, parsing_timeout=None)
    if not parsed:
        print(f"verify_math cannot read the answer {text!r} of the data, so it scores 0", file=sys.stderr)
    return parsed


NUMBER = re.compile(r"[-+]?(\d[\d,]*\.?\d*|\.\d+)%?")
FRACTION = re.compile(r"[-+]?\d+/\d+")
POWER_OF_TEN = re.compile(r"[-+]?10\^\d+")
DENIED = re.compile(rf"\b(?:not|or) +{NUMBER.pattern}[\s.]*$")


def typed(text):
    """With a typographer's minus as -, LaTeX's \\% as %, 1{,}234 as 1,234, and nothing in bold: the library does not
    read these in plain text."""
    text = re.sub(r"\\(?:text|math)bf\{([^{}]*)\}", r"\1", text)
    return text.replace("\u2212", "-").replace("\\%", "%").replace("{,}", ",")


def bare(text):
    """Without spaces, dollars and the LaTeX that only moves or sizes things; fractions as 3/4, powers as 10^3."""
    text = re.sub(r"[\s$]|\\[,;!]|\\(?:left|right|text\{[^}]*\})", "", text)
    text = re.sub(r"\^\{(\d+)\}", r"^\1", text)
    return re.sub(r"\\[dt]?frac\{(\d+)\}\{(\d+)\}", r"\1/\2", text)


def is_answer(text, right, prompt):
    """Whether `text`, whose value is that of `right`, states an answer. Both are what the library has read."""
    text, right = bare(text), bare(right)
    if text == right or NUMBER.fullmatch(text):
        return True
    if POWER_OF_TEN.fullmatch(text):
        return text not in bare(prompt)
    if NUMBER.fullmatch(right) and "." not in right and "%" not in right:
        return False  # 11+72, or 84/12, for a whole number
    if NUMBER.fullmatch(right) or FRACTION.fullmatch(right):
        return FRACTION.fullmatch(text) is not None and text not in bare(prompt)
    return text not in bare(prompt)


def last_number(text):
    return ([""] + [match[0] for match in NUMBER.finditer(text)])[-1]


def denied(text, found):
    """Whether the answer, what is in \\boxed{} or $...$ or else the end of the text, is "not 83" or "84 or 83"."""
    stated = found[-1] if found and re.search(r"\\boxed|\$", text) else text
    return DENIED.search(str(stated)) is not None


def verify_math(prompts, responses, answers):
    """1.0 or 0.0 each; what cannot be read, or takes too long to compare, scores 0."""
    scores = []
    for prompt, response, answer in zip(prompts, responses, answers):
        if isinstance(answer, list) and len(answer) == 1:  # as some data sets write it
            (answer,) = answer
        prompt, response, right = typed(prompt), typed(response), gold(typed(str(answer)))
        found = parse(response, parsing_timeout=SECONDS)
        wrong = denied(response, found)
        if found and right and not is_answer(found[-1], right[-1], prompt):
            found = [] if "!" in found[-1] else parse(last_number(response), parsing_timeout=SECONDS)
        scores.append(float(not wrong and verify(right, found, timeout_seconds=SECONDS)))
    return scores
