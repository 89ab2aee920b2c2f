"""The command of the README, launched from another folder: console, files, and that what was saved scores the same."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from .helpers_before import ROOT, TOY_REWARD, has_critic, make_model, read_metrics, toy_rows, write_rows

pytestmark = pytest.mark.slow


def launch(script, folder, *flags):
    """Runs a script as two processes, as the README does, from `folder`: (exit code, console)."""
    accelerate = Path(sys.executable).with_name("accelerate")
    command = [str(accelerate), "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
    command += ["--mixed_precision", "no", "--dynamo_backend", "no"]
    command += ["--main_process_port", "0"]  # the launcher warns when another run has taken its usual port
    command += [str(ROOT / f"{script}.py"), *map(str, flags)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # two processes need no two GPUs here
    run = subprocess.run(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240
    )
    return run.returncode, run.stdout


@pytest.fixture(scope="module")
def launched(algo, tmp_path_factory):
    """Two iterations of a random toy model."""
    folder = tmp_path_factory.mktemp("launch")
    make_model(folder / "model")
    write_rows(folder / "train.jsonl", toy_rows(24))
    rows = Path(write_rows(folder / "test.jsonl", toy_rows(7, 100)))
    (folder / "reward.py").write_text(TOY_REWARD)
    reward = f"{folder}/reward.py:early"
    flags = ["--total-iterations", 2, "--eval-every", 0, "--output-dir", folder / "out", "--run-name", "run"]
    flags += ["--model", folder / "model", "--dataset", folder / "train.jsonl", "--reward", reward]
    flags += ["--batch-size", 8, "--group-size", 2, "--minibatch-size", 4, "--max-response-length", 10]
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    exit_code, console = launch(algo.__name__, elsewhere, *flags)
    assert exit_code == 0, console
    assert not any(elsewhere.iterdir())  # nothing is written where one happens to stand
    return folder / "out" / "run", console, rows, reward


def test_the_console_says_what_runs(algo, launched):
    run_dir, console, _, _ = launched
    args = json.loads((run_dir / "args.json").read_text())
    assert args["num_processes"] == 2
    assert "2 process(es) on cpu" in console and re.search(r"EOS ids \[\d+", console)
    total, minibatch = args["batch_size"] * args["group_size"], args["minibatch_size"]
    count = total // minibatch
    assert f"{args['batch_size']} prompts x {args['group_size']} = {total} responses per iteration" in console
    assert f"{count} minibatches of {minibatch} ({minibatch // 2} per process)" in console
    assert f"{count * args['ppo_epochs']} optimizer steps per iteration" in console
    assert console.count(f"{algo.__name__}.py: ") == console.count("iteration    0: eval") == 1  # one process speaks
    assert "iteration    2: eval" in console and "2/2" in console
    for noise in ("Warning", "WARNING", "Traceback", "deprecated", "were not used", "newly initialized"):
        assert noise not in console, console


def test_the_run_folder_is_complete(algo, launched):
    run_dir, _, rows, _ = launched
    script = f"{algo.__name__}.py"
    names = {path.name for path in run_dir.iterdir()}
    assert {"args.json", script, "metrics.jsonl", "completions", "final", "best"} <= names
    assert [name for name in names if name.startswith(".")] == [".lock"]  # nothing half-written
    assert (run_dir / script).read_text() == (ROOT / script).read_text()
    for name in ("final", "best"):
        assert AutoTokenizer.from_pretrained(run_dir / name).eos_token
        if has_critic(algo):
            critic = AutoModelForTokenClassification.from_pretrained(run_dir / name / "critic")
            assert critic.config.num_labels == 1
    completions = {path.name: path.read_text().splitlines() for path in (run_dir / "completions").iterdir()}
    assert set(completions) == {"eval_000000.jsonl", "eval_000002.jsonl", "step_000002.jsonl"}
    args, num_rows = json.loads((run_dir / "args.json").read_text()), len(rows.read_text().splitlines())
    assert len(completions["step_000002.jsonl"]) == args["batch_size"] * args["group_size"]
    assert len(completions["eval_000002.jsonl"]) == num_rows
    assert {"query", "response", "score", "kl", "truncated"} <= json.loads(completions["step_000002.jsonl"][0]).keys()


def test_tensorboard_has_the_same_metrics(launched):
    run_dir = launched[0]
    (event_file,) = run_dir.rglob("events.out.tfevents*")
    events = EventAccumulator(str(event_file)).Reload()
    metrics = read_metrics(run_dir)
    assert [m["step"] for m in metrics] == [0, 1, 2]
    scalars = {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}
    assert scalars.keys() == set().union(*metrics) - {"step"}
    for m in metrics:
        for name in m.keys() - {"step"}:
            assert scalars[name][m["step"]] == pytest.approx(m[name], rel=1e-5, abs=1e-6), name


def test_the_saved_policy_scores_what_was_logged(algo, launched):
    """With transformers' own generate, which must agree with ours token by token."""
    run_dir, _, rows, reward = launched
    args = json.loads((run_dir / "args.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "final", padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(run_dir / "final").eval()
    dump = run_dir / "completions" / "eval_000002.jsonl"
    logged = [json.loads(line) for line in dump.read_text().splitlines()]
    questions = [json.loads(line)["question"] for line in rows.read_text().splitlines()]
    prompts, texts = [row["prompt"] for row in logged], []
    assert sorted(prompts) == sorted(questions)
    for i in range(0, len(prompts), 100):
        batch = tokenizer(prompts[i : i + 100], return_tensors="pt", padding=True, return_token_type_ids=False)
        output = model.generate(**batch, do_sample=False, max_new_tokens=args["max_response_length"])
        texts += tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    differing = sum(row["response"] != text for row, text in zip(logged, texts))
    assert differing <= 0.01 * len(texts)  # padding moves logits by rounding errors, which may decide a tie
    score = sum(algo.load_reward(reward)(prompts, texts, [row["answer"] for row in logged])) / len(texts)
    assert read_metrics(run_dir)[-1]["eval/score"] == pytest.approx(score, abs=1e-6 + differing / len(texts))
    assert len(set(texts)) > 1
