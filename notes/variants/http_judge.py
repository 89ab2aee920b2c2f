"""Reward: the grade from 0 to 10 that a judge behind an OpenAI-compatible server (vLLM, SGLang, ...) gives, over 10.
Group: the reward, as a file

    JUDGE_URL=http://localhost:8000/v1 JUDGE_MODEL=Qwen/Qwen2.5-7B-Instruct \\
        accelerate launch grpo_llm.py --reward notes/variants/http_judge.py:http_judge ...

JUDGE_RUBRIC is a text with {prompt}, {response} and {answer} (other braces doubled), JUDGE_KEY the server's key,
JUDGE_AT_ONCE how many requests a process has open (16), JUDGE_SECONDS how long the server may be silent (60),
JUDGE_TRIES how often a failing request is made (3, with pauses). A reply must be a grade, `7` or `Grade: 7`, and no
more. A response without one gets the mean of its group, or of the batch; if fewer than half have one, the run ends.
"""

import json
import os
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

RUBRIC = "Question: {prompt}\nRight answer: {answer}\nJudge this: {response}\nReply with a grade, 0 to 10, and no more."
SETTINGS = {"URL": "", "MODEL": "", "KEY": "", "RUBRIC": RUBRIC, "AT_ONCE": "16", "SECONDS": "60", "TRIES": "3"}


def http_judge(prompts, responses, answers):
    url, model, key, rubric, *numbers = (os.environ.get(f"JUDGE_{name}", value) for name, value in SETTINGS.items())
    at_once, seconds, tries = map(int, numbers)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    grades, faults = {}, []  # by the number of the response; what came instead of the others

    def grade(i):
        asked = rubric.format(prompt=prompts[i], response=responses[i], answer=answers[i])
        body = {"model": model, "messages": [{"role": "user", "content": asked}], "temperature": 0, "max_tokens": 16}
        request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode(), headers)
        for attempt in range(tries):
            if len(faults) >= at_once and not grades:
                return  # nothing works, so don't wait for all the others
            time.sleep(2**attempt - 1)
            try:
                with urllib.request.urlopen(request, timeout=seconds) as answer:
                    reply = json.load(answer)["choices"][0]["message"]["content"]
                break
            except Exception as error:  # no connection, no JSON, another JSON: it is counted and shown
                reply = f"{type(error).__name__}: {error}"
        reply = str(reply).strip().removeprefix("Grade:").strip()
        if reply in map(str, range(11)):
            grades[i] = int(reply) / 10
        else:
            faults.append(reply)

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(grade, range(len(prompts))))
    if faults:
        told = f"http_judge: {url} graded {len(grades)} of {len(prompts)} responses; instead of a grade: {faults[-1]!r}"
        if len(grades) < len(prompts) / 2:
            raise RuntimeError(told)
        print(told)
    scores = []
    for i, prompt in enumerate(prompts):
        known = [grades[j] for j in grades if prompts[j] == prompt] or [*grades.values()]
        scores.append(grades.get(i, sum(known) / len(known)))
    return scores
