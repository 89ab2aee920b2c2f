"""Launches of two processes, as the README has them: console, files, agreement with one process, one's own bug."""

import json
import math
import re

import pytest
from conftest import (
    ROOT,
    TINY,
    TOY_REWARD,
    each_script,
    forked,
    launch,
    make_model,
    read_metrics,
    read_rows,
    toy_rows,
    write_rows,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

pytestmark = each_script()
ONE = "ppo_llm"  # the launcher itself is tried with this script; with the others in the slow tests


@pytest.fixture(scope="module")
def launched(script, tmp_path_factory):
    """One iteration of the embedded task by two processes, from another folder; for ppo_llm.py under the launcher."""
    if not (script.parent / "benchmarks" / "tiny").exists():
        pytest.skip("a copy outside the repository has no embedded model")
    elsewhere, out = tmp_path_factory.mktemp("elsewhere"), tmp_path_factory.mktemp("out")
    flags = {"total_iterations": 1, "eval_rows": 60, "output_dir": out, "run_name": "run", "save_every": 1}
    flags |= {"batch_size": 8 if script.stem == "grpo_llm" else 64, "minibatch_size": 32}
    if script.stem == ONE:
        code, console = launch(script, flags, cwd=elsewhere)
    else:
        code, console = forked(script, flags, folder=elsewhere)
    assert code == 0, console
    assert not any(elsewhere.iterdir())  # nothing is written where one happens to stand
    return out / "run", console


def test_the_console_says_what_runs(script, launched):
    run_dir, console = launched
    assert json.loads((run_dir / "args.json").read_text())["num_processes"] == 2
    start = console[console.index(f"{script.name}: 2 process(es) on cpu, float32") :]
    block = start[: start.index("run folder")].splitlines()
    assert len(block) <= 10
    assert "EOS ids [1]" in start and "4000 rows, 0 left out; the first ends in '" in start
    assert "  batch      64 responses, minibatches of 32, 1 epoch(s)\n" in start
    coefficients = "0.0 in the reward, 0.001" if script.stem == "grpo_llm" else "0.001 in the reward, 0.0"
    assert f"KL         to the start: {coefficients} in the loss\n" in start
    assert f"run folder {run_dir}, from iteration 1\n" in start
    assert ("sharding   over 2 of 2 process(es), gathered" in start) == (script.stem == "ppo_llm_fsdp")
    assert console.count(f"{script.name}: ") == 1  # one process speaks
    assert len(re.findall(r"iteration [01]: eval 0\.\d+ greedy, 0\.\d+ sampled, length", console)) == 2
    for shown in ("reward/mean=", "kl/mean=", "response/length_mean=", "rollout/logprob_diff=", "time/iteration="):
        assert shown in console
    assert f"plot  python benchmarks/plot.py {run_dir}" in console
    for noise in ("Warning", "WARNING", "Traceback", "deprecated", "were not used", "newly initialized"):
        assert noise not in console, console


def test_the_run_folder_is_complete(script, launched):
    run_dir, _ = launched
    before, after = (m["eval/score"] for m in read_metrics(run_dir))
    best = ["best_000001"] if after > before else []  # nothing is kept that is no better than before training
    files = "args.json", script.name, "metrics.jsonl", "completions", "checkpoints", "final", script.stem
    assert {path.name for path in run_dir.iterdir()} == {*files, *best}
    assert (run_dir / script.name).read_text() == script.read_text()
    for name in ("final", *best):
        assert AutoTokenizer.from_pretrained(run_dir / name).eos_token
        AutoModelForCausalLM.from_pretrained(run_dir / name)
        if script.stem != "grpo_llm":
            critic = AutoModelForTokenClassification.from_pretrained(run_dir / name / "critic")
            assert critic.config.num_labels == 1
    completions = {path.name: read_rows(path) for path in (run_dir / "completions").iterdir()}
    assert {name: len(rows) for name, rows in completions.items()} == {
        **{"eval_000000.jsonl": 60, "eval_000001.jsonl": 60, "step_000001.jsonl": 64}
    }
    assert {"prompt", "response", "score"} <= completions["step_000001.jsonl"][0].keys()


def test_tensorboard_has_the_same_metrics(launched):
    run_dir, _ = launched
    (event_file,) = run_dir.rglob("events.out.tfevents*")
    events = EventAccumulator(str(event_file)).Reload()
    metrics = read_metrics(run_dir)
    assert [m["step"] for m in metrics] == [0, 1]
    scalars = {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}
    assert scalars.keys() == set().union(*metrics) - {"step"}
    for m in metrics:
        for name in m.keys() - {"step"}:
            assert scalars[name][m["step"]] == pytest.approx(m[name], rel=1e-5, abs=1e-6), name


def test_every_metric_of_the_contract_is_there(script, launched):
    groups = {
        "reward": "mean std total_mean",
        "eval": "score score_sampled length_mean",
        "advantage": "mean std",
        "actor": "loss clipfrac approx_kl ratio_mean ratio_max entropy grad_norm",
        "critic": "loss explained_variance grad_norm",
        "kl": "mean",
        "response": "length_mean truncated_frac",
        "rollout": "logprob_diff",
        "time": "rollout iteration",
        "memory": "peak_gib",
    }
    if script.stem == "grpo_llm":
        groups = {name: rest for name, rest in groups.items() if name != "critic"} | {"group": "zero_std_frac"}
    names = {f"{group}/{name}" for group, rest in groups.items() for name in rest.split()}
    assert read_metrics(launched[0])[1].keys() == {"step"} | names


def test_the_saved_policy_scores_what_was_logged(algo, launched):
    """With transformers' own generate, which must agree with ours token by token."""
    run_dir, _ = launched
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "final", padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(run_dir / "final").eval()
    logged = read_rows(run_dir / "completions" / "eval_000001.jsonl")
    questions = [row["question"] for row in read_rows(TINY / "test.jsonl")[:60]]
    prompts = [row["prompt"] for row in logged]
    assert sorted(prompts) == sorted(questions)
    batch = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
    output = model.generate(**batch, do_sample=False, max_new_tokens=64)
    texts = tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    assert sum(row["response"] != text for row, text in zip(logged, texts)) <= 1  # rounding may decide a tie
    score = sum(algo.gsm8k(prompts, texts, [row["answer"] for row in logged])) / 60
    assert read_metrics(run_dir)[1]["eval/score"] == pytest.approx(score, abs=1 / 60 + 1e-6)


# ----------------------------------------------------------------------------------- two processes, a caller's file

# A researcher's file, which imports the script and changes a part.
MINE = """
import sys
sys.path.insert(0, {folder!r})
import {name} as algo

algo.place_scores = lambda scores, mask, real=algo.place_scores: real(scores / 2, mask)
if __name__ == "__main__":
    algo.main(algo.parse_args())
"""


@pytest.fixture(scope="module")
def one_and_two(script, toy_flags, tmp_path_factory):
    """The run folders of a caller's file on one process and on two."""
    folder = tmp_path_factory.mktemp("callers")
    (folder / "mine.py").write_text(MINE.format(folder=str(script.parent), name=script.stem))
    flags = toy_flags | {"eval_rows": 7, "output_dir": folder, "eval_every": 2}
    for processes in (1, 2):
        code, console = forked(folder / "mine.py", flags | {"run_name": f"run{processes}"}, processes)
        assert code == 0, console
    return folder / "run1", folder / "run2"


@pytest.mark.once
def test_completions_are_those_of_one_process(one_and_two):
    for name in ("eval_000002.jsonl", "step_000002.jsonl", "eval_000000.jsonl"):
        one, two = (read_rows(run_dir / "completions" / name) for run_dir in one_and_two)
        assert [row["response"] for row in one] == [row["response"] for row in two]


@pytest.mark.once
def test_the_run_folder_keeps_the_callers_file(one_and_two, script):
    for run_dir in one_and_two:
        kept, mine = (run_dir / script.name).read_text(), (run_dir / "mine.py").read_text()
        assert kept == script.read_text() and "algo.place_scores = " in mine
        assert json.loads((run_dir / "args.json").read_text())["script"] == "mine.py"
        m = read_metrics(run_dir)[1]  # of the first iteration, in which the KL is still 0
        assert m["reward/total_mean"] == pytest.approx(m["reward/mean"] / 2, rel=1e-5) and m["reward/mean"] > 0


# ------------------------------------------------------------------------------------------------------ your own bug

BUGS = {
    "a wrong shape in the loss": (
        "mb_losses, _ = policy_loss(mb_logprobs, ",
        "mb_losses, _ = policy_loss(mb_logprobs[:, :-1], ",
        r"must match the size",
    ),
    "an error in the loop": (
        "        minibatch_rows = ",
        "        if iteration == 2 and rank == 1:\n"
        '            raise RuntimeError("timed out")\n        minibatch_rows = ',
        "RuntimeError: timed out",
    ),
    "a tensor among the metrics": (
        '"reward/mean": mean(scores),',
        '"reward/mean": scores.mean(),',
        "Tensor is not JSON",
    ),
}


@pytest.mark.once
@pytest.mark.parametrize("bug", BUGS)
def test_ones_own_bug_shows_file_and_line(script, toy_flags, tmp_path, bug):
    old, new, message = BUGS[bug]
    source = script.read_text()
    assert source.count(old) == 1
    mine = tmp_path / "my_ppo.py"
    mine.write_text(source.replace(old, new))
    code, console = forked(mine, toy_flags | {"output_dir": tmp_path}, timeout=200)
    assert code != 0 and re.search(message, console), console
    assert re.search(rf'File "{mine}", line \d+, in main', console), console


@pytest.mark.once
def test_an_error_in_a_reward_file_shows_file_and_line(script, toy_flags, tmp_path):
    (tmp_path / "broken_reward.py").write_text("def reward(prompts, responses, answers):\n    return {}[4]\n")
    flags = toy_flags | {"reward": f"{tmp_path}/broken_reward.py:reward", "output_dir": tmp_path}
    code, console = forked(script, flags, timeout=200)
    assert code != 0 and (
        f'File "{tmp_path}/broken_reward.py", line 2, in reward' in console and "KeyError: 4" in console
    )


@pytest.mark.once
def test_nan_in_the_loss_names_iteration_and_step(script, toy_flags, tmp_path):
    source, old = script.read_text(), "return torch.maximum(unclipped, bounded), bounded > unclipped"
    assert source.count(old) == 1
    mine = tmp_path / "my_ppo.py"
    mine.write_text(source.replace(old, "return unclipped / 0 * 0, bounded > unclipped"))
    code, console = forked(mine, toy_flags | {"output_dir": tmp_path}, timeout=200)
    errors = [line for line in console.splitlines() if line.startswith("error: ")]
    assert code != 0 and len(errors) == 1, console
    assert "iteration 1, step 1 of the policy" in errors[0] and "nan" in errors[0]


# ---------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.once
def test_what_every_rank_finds_is_printed_once(script, toy_flags, tmp_path):
    code, console = forked(script, toy_flags | {"output_dir": tmp_path, "minibatch_size": 1}, timeout=200)
    assert code != 0 and console.count("error: ") == 1 and "2 processes" in console, console
    assert "Traceback" not in console[: console.index("error: ")] and not list(tmp_path.iterdir())


@pytest.mark.once
def test_what_one_rank_finds_that_rank_prints(script, toy_flags, tmp_path):
    (tmp_path / "one_reward.py").write_text(
        "import os\n\n\ndef reward(prompts, responses, answers):\n"
        "    return [float('inf') if os.environ['RANK'] == '1' else 0.0] * len(prompts)\n"
    )
    flags = toy_flags | {"reward": f"{tmp_path}/one_reward.py:reward", "output_dir": tmp_path}
    code, console = forked(script, flags, timeout=200)
    assert code != 0 and len(re.findall("(?m)^error: the reward should give 4 finite numbers", console)) == 1, console


def test_ranks_without_a_row_to_evaluate(script, toy_flags, tmp_path):
    flags = toy_flags | {"output_dir": tmp_path, "run_name": "run", "eval_rows": 1, "total_iterations": 1}
    code, console = forked(script, flags)
    assert code == 0, console
    metrics = read_metrics(tmp_path / "run")
    assert len(read_rows(tmp_path / "run" / "completions" / "eval_000001.jsonl")) == 1
    assert all(math.isfinite(value) for m in metrics for value in m.values())


def test_the_defaults_are_for_a_real_model_and_the_embedded_settings_for_ours(algo, monkeypatch):
    def parsed(*words):
        monkeypatch.setattr("sys.argv", ["script.py", *words])
        args = algo.parse_args()
        wanted = "lr", "max_prompt_length", "max_response_length", "microbatch_tokens", "critic_lr", "lam"
        return args, [getattr(args, name) for name in wanted if hasattr(args, name)]

    critics = hasattr(algo, "Critic")
    real, numbers = parsed("--model", "some/model")
    assert numbers == [1e-6, 512, 512, 2048, *([1e-5, 1.0] if critics else [])] and real.model == "some/model"
    ours, numbers = parsed("--lr", "0.5")
    assert numbers == [0.5, 512, 64, 1024, *([1e-3, 0.95] if critics else [])] and ours.total_iterations == 40
    assert (real.prompt_suffix, ours.prompt_suffix) == (None, "")
    assert ours.model == f"{ROOT}/benchmarks/tiny/model" or algo.TINY.parent.parent != ROOT
    # The word alone counts: no value that ends like it, no flag that ends like it.
    others = [("--run-name", "x--model"), ("--run-name=--model-7",)]
    others += [("--critic-model", "some/model")] if critics else []
    assert {parsed(*words)[0].model for words in others} == {ours.model}
    assert parsed("--model=some/model")[1] == parsed("--model", "some/model")[1] != parsed()[1]


def test_bfloat16_learns_too(script, tmp_path, toy_flags):
    model = make_model(tmp_path / "model")
    data = write_rows(tmp_path / "train.jsonl", toy_rows(24))
    (tmp_path / "bf16_reward.py").write_text(TOY_REWARD)
    flags = toy_flags | {"model": model, "dataset": data, "reward": f"{tmp_path}/bf16_reward.py:early"}
    code, console = forked(script, flags | {"output_dir": tmp_path, "run_name": "run", "dtype": "bfloat16"})
    assert code == 0 and "on cpu, bfloat16" in console, console
    m = read_metrics(tmp_path / "run")[1]
    assert 0 < m["rollout/logprob_diff"] < 0.1 and m["actor/ratio_mean"] == pytest.approx(1, abs=0.05)
