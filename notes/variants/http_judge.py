"""Reward: the grade from 0 to 10 that a judge behind an OpenAI-compatible server (vLLM, SGLang, ...) gives, over 10.
Group: the reward, as a file

    JUDGE_URL=http://localhost:8000/v1 JUDGE_MODEL=Qwen/Qwen2.5-7B-Instruct \\
        accelerate launch grpo_llm.py --reward notes/variants/http_judge.py:http_judge ...

JUDGE_RUBRIC is a text with {prompt}, {response} and {answer} (other braces doubled), JUDGE_KEY the server's key,
JUDGE_TOKENS how long a reply may be (16; a judge that thinks needs a thousand or more), JUDGE_AT_ONCE how many requests
a process has open (16), JUDGE_SECONDS how long the server may be silent (60), JUDGE_TRIES how often a failing request
is made (3, with pauses). A reply must be a grade, `7` or `Grade: 7`, and no more, except for thoughts before </think>.

The score has two parts. `graded` is the grade. A response without one gets the mean of its group, or of the batch, as
`missed`, so this part is 0 while no grade is missing. If fewer than half have one, the run ends.
"""

import json
import os
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

RUBRIC = "Question: {prompt}\nRight answer: {answer}\nJudge this: {response}\nReply with a grade, 0 to 10, and no more."
DEFAULTS = {"JUDGE_URL": "", "JUDGE_MODEL": "", "JUDGE_RUBRIC": RUBRIC, "JUDGE_TOKENS": "16"}
SETTINGS = {name: os.environ.get(name, value) for name, value in DEFAULTS.items()}  # what a run keeps: no key
URL, MODEL, ASK, TOKENS = SETTINGS.values()
KEY = os.environ.get("JUDGE_KEY", "")
AT_ONCE = int(os.environ.get("JUDGE_AT_ONCE", "16"))
SECONDS = int(os.environ.get("JUDGE_SECONDS", "60"))
TRIES = int(os.environ.get("JUDGE_TRIES", "3"))
if not URL:
    sys.exit("error: say where the judge is: JUDGE_URL=http://localhost:8000/v1 in front of the command")
try:
    ASK.format(prompt="", response="", answer="")
except (LookupError, ValueError, AttributeError) as error:
    sys.exit(f"error: JUDGE_RUBRIC may have {{prompt}}, {{response}}, {{answer}}; double its other braces ({error!r})")


def request(text):
    """(whether the judge replied, its reply or what came instead, why it may be no grade)"""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": int(TOKENS),
    }
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    asked = urllib.request.Request(f"{URL}/chat/completions", json.dumps(body).encode(), headers)
    came = ""
    try:
        with urllib.request.urlopen(asked, timeout=SECONDS) as answer:
            came = answer.read().decode(errors="replace")
        choice = json.loads(came)["choices"][0]
        cut_off = f" (cut off: JUDGE_TOKENS is {TOKENS})" if choice.get("finish_reason") == "length" else ""
        return True, str(choice["message"]["content"]), cut_off
    except urllib.error.HTTPError as error:  # the server says why
        return False, f"HTTP {error.code}: {error.read().decode(errors='replace')[:300]}", ""
    except Exception as error:  # no connection, no JSON, another JSON
        return False, f"{type(error).__name__}: {error} {came[:300]}".strip(), ""


def http_judge(prompts, responses, answers):
    grades, faults = {}, []  # by the number of the response; what came instead of the others

    def grade(i):
        for attempt in range(TRIES):
            if len(faults) >= AT_ONCE and not grades:
                return  # nothing works, so don't wait for all the others
            time.sleep(2**attempt - 1)
            replied, reply, why = request(ASK.format(prompt=prompts[i], response=responses[i], answer=answers[i]))
            if replied:
                break
        said = reply.rpartition("</think>")[2].strip().removeprefix("Grade:").strip()
        if said in map(str, range(11)):
            grades[i] = int(said) / 10
        else:
            faults.append(reply + why)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(grade, range(len(prompts))))
    if faults:
        told = f"http_judge: {URL} graded {len(grades)} of {len(prompts)} responses; instead of a grade: {faults[-1]!r}"
        if len(grades) < len(prompts) / 2:
            raise RuntimeError(told)
        print(told)
    missed = []
    for i, prompt in enumerate(prompts):
        known = [grades[j] for j in grades if prompts[j] == prompt] or [*grades.values()]
        missed.append(0.0 if i in grades else sum(known) / len(known))
    return {"graded": [grades.get(i, 0.0) for i in range(len(prompts))], "missed": missed}
