"""Reward: the verifier of a task from the library reasoning-gym, which has over 100 kinds. Make the data first:
Group: the reward, as a file

    pip install -e '.[tasks]'
    python notes/variants/gym_tasks.py chain_sum --folder runs/sums --train 5000 --test 300 --config '{"max_terms": 3}'
    accelerate launch grpo_llm.py --dataset runs/sums/train.jsonl --eval-dataset runs/sums/test.jsonl
        --reward notes/variants/gym_tasks.py:gym_tasks --prompt-suffix ' End with "####" and the answer.' ...

A row's column `entry` is what the verifier needs, as text: entries hold what a table cannot. An answer is what follows
the last "####". Several verifiers give partial scores, some of them to any answer of the right form, and the one of
game_of_life_halting (0.1.25) gives 1 to any answer. So read a task before you believe its curve. We answered all 105
with the question itself, the numbers from 0 to 99, the alphabet, and "0", "1" and "[]": nine more tasks pay 15% or more
on average, for the constant that happens to be right most often (coin_flip 88%, circuit_logic 50%).

At least nine tasks run an answer as Python, or let sympy do so (binary_matrix, n_queens, spiral_matrix,
string_insertion; countdown, puzzle24, polynomials and integrals): train on them only where a model's code can do no
harm.

Measured: letter_counting with the bundled model, one seed, 40 iterations: sampled rises from 10.8% to 29.7%, because
the model says 1.

The file may not be called reasoning_gym.py: Python would then find it where it looks for the library.
"""

import functools
import json
import sys
from pathlib import Path

import tyro

try:
    from math_verify.utils import TimeoutException, timeout
    from reasoning_gym import create_dataset
except ImportError:
    sys.exit("gym_tasks.py needs reasoning-gym and math-verify: pip install -e '.[tasks]'")


def marked(value):
    """With JSON's lists for their tuples, the verifiers of arc_agi and rearc would find no answer right."""
    if isinstance(value, dict):
        return {key: marked(x) for key, x in value.items()}
    if isinstance(value, tuple):
        return {"tuple": [marked(x) for x in value]}
    return [marked(x) for x in value] if isinstance(value, list) else value


@functools.cache
def dataset(task, options):
    return create_dataset(task, **json.loads(options))


@timeout(2)  # seconds: 9**9**9**9 would be computed
def verified(response, entry, verifier):
    _, mark, answer = response.rpartition("####")
    return float(verifier.score_answer(answer.strip(), entry=entry)) if mark else 0.0


def gym_tasks(prompts, responses, answers, entry):
    scores = []
    for response, text in zip(responses, entry):
        unmarked = json.loads(text, object_hook=lambda value: tuple(value["tuple"]) if "tuple" in value else value)
        verifier = dataset(unmarked["metadata"]["source_dataset"], unmarked["options"])  # made once: may take longer
        try:
            scores.append(verified(response, unmarked, verifier))
        except (Exception, TimeoutException):  # a hundred verifiers, not all of which can read whatever a model writes
            scores.append(0.0)
    return scores


def write(task: tyro.conf.Positional[str], folder: Path, train: int = 5000, test: int = 300, config: str = "{}"):
    """Writes `folder`/train.jsonl and test.jsonl. config: options of the task as JSON, {"seed": 1} among them."""
    options = {"seed": 1} | json.loads(config) | {"size": train + test}
    rows = {}  # by their questions, so that train and test share none
    for entry in create_dataset(task, **options):
        text = json.dumps(marked(entry | {"options": json.dumps(options)}))
        rows[entry["question"]] = {"question": entry["question"], "answer": entry["answer"], "entry": text}
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in ("test", [*rows.values()][:test]), ("train", [*rows.values()][test:]):
        folder.joinpath(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
        print(f"{folder}/{name}.jsonl: {len(part)} rows")


if __name__ == "__main__":
    tyro.cli(write)
