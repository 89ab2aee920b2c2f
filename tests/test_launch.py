"""Launches of two processes, as the README has them: console, files, agreement with one process, one's own bug."""

import json
import math
import re

import pytest
import torch
from conftest import ROOT, TINY, TOY_REWARD, launch, make_model, read_metrics, read_rows, toy_rows, untimed, write_rows
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer


@pytest.fixture(scope="module")
def launched(script, tmp_path_factory):
    """One iteration of the embedded task by two processes, from another folder."""
    if not (script.parent / "benchmarks" / "tiny").exists():
        pytest.skip("a copy outside the repository has no embedded model")
    elsewhere, out = tmp_path_factory.mktemp("elsewhere"), tmp_path_factory.mktemp("out")
    flags = {"total_iterations": 1, "eval_rows": 60, "output_dir": out, "run_name": "run", "save_every": 1}
    code, console = launch(script, flags, cwd=elsewhere)
    assert code == 0, console
    assert not any(elsewhere.iterdir())  # nothing is written where one happens to stand
    return out / "run", console


def test_the_console_says_what_runs(script, launched):
    run_dir, console = launched
    assert json.loads((run_dir / "args.json").read_text())["num_processes"] == 2
    start = console[console.index(f"{script.name}: 2 process(es) on cpu, float32") :]
    block = start[: start.index("run folder")].splitlines()
    assert len(block) <= 10
    assert "EOS ids [1]" in start and "4000 rows, 0 left out" in start and "1 iterations are 0.064 passes" in start
    assert "256 responses = 4 minibatches of 64 (32 per process) x 1 epoch(s)" in start
    assert console.count(f"{script.name}: ") == 1  # one process speaks
    assert len(re.findall(r"iteration [01]: eval 0\.\d+ greedy, 0\.\d+ sampled, length", console)) == 2
    for shown in ("reward/mean=", "kl/mean=", "response/length_mean=", "rollout/logprob_diff=", "time/iteration="):
        assert shown in console
    assert f"plot  python benchmarks/plot.py {run_dir}" in console
    for noise in ("Warning", "WARNING", "Traceback", "deprecated", "were not used", "newly initialized"):
        assert noise not in console, console


def test_the_run_folder_is_complete(script, launched):
    run_dir, _ = launched
    assert {path.name for path in run_dir.iterdir()} == {
        *("args.json", script.name, "metrics.jsonl", "completions", "checkpoints", "final", "best", script.stem)
    }
    assert (run_dir / script.name).read_text() == script.read_text()
    for name in ("final", "best"):
        assert AutoTokenizer.from_pretrained(run_dir / name).eos_token
        critic = AutoModelForTokenClassification.from_pretrained(run_dir / name / "critic")
        assert critic.config.num_labels == 1
    completions = {path.name: read_rows(path) for path in (run_dir / "completions").iterdir()}
    assert {name: len(rows) for name, rows in completions.items()} == {
        **{"eval_000000.jsonl": 60, "eval_000001.jsonl": 60, "step_000001.jsonl": 256}
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


def test_every_metric_of_the_contract_is_there(launched):
    groups = {
        "reward": "mean std total_mean",
        "eval": "score score_sampled length_mean",
        "advantage": "mean std",
        "actor": "loss clipfrac approx_kl ratio_mean ratio_max entropy grad_norm lr",
        "critic": "loss value_mean explained_variance grad_norm lr",
        "kl": "mean sequence coef",
        "response": "length_mean truncated_frac",
        "rollout": "logprob_diff",
        "time": "rollout reward logprobs values advantages actor critic eval iteration",
        "memory": "peak_gib",
    }
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


# ----------------------------------------------------------------------------------------- two processes against one

# A researcher's file: plain SGD (AdamW turns rounding into steps), and the parameters that every rank ends with.
SGD = """
import sys
sys.path.insert(0, {folder!r})
import torch
import {name} as algo

torch.optim.AdamW = lambda parameters, weight_decay, fused: torch.optim.SGD(parameters, lr=0.0)
real, wrapped = algo.Accelerator.prepare_model, []


def keep(self, module, **options):
    wrapped.append(real(self, module, **options))
    return wrapped[-1]


algo.Accelerator.prepare_model = keep
if __name__ == "__main__":
    args = algo.parse_args()
    run_dir = algo.main(args)
    import os
    torch.save([dict(m.named_parameters()) for m in wrapped], f"{{run_dir}}-rank{{os.environ.get('RANK', 0)}}.pt")
"""


@pytest.fixture(scope="module")
def one_and_two(script, toy_flags, tmp_path_factory):
    """The same run by one process and by two: {processes: (run folder, parameters of each rank)}."""
    folder = tmp_path_factory.mktemp("parity")
    mine = folder / "mine.py"
    mine.write_text(SGD.format(folder=str(script.parent), name=script.stem))
    flags = toy_flags | {"total_iterations": 3, "lr": 0.05, "critic_lr": 0.05, "entropy_coef": 0.01, "eval_rows": 7}
    flags |= {"loss_agg": "seq-mean-token-mean", "kl_loss_coef": 0.1, "output_dir": folder, "eval_every": 3}
    results = {}
    for processes in (1, 2):
        code, console = launch(mine, flags | {"run_name": f"run{processes}"}, processes)
        assert code == 0, console
        files = [folder / f"run{processes}-rank{rank}.pt" for rank in range(processes)]
        results[processes] = folder / f"run{processes}", [torch.load(file, weights_only=False) for file in files]
    return results


def test_metrics_are_those_of_one_process(one_and_two):
    one, two = (untimed(read_metrics(one_and_two[n][0])) for n in (1, 2))
    assert len(one) == 4
    for a, b in zip(one, two):
        assert a.keys() == b.keys()
        for name in a:
            assert b[name] == pytest.approx(a[name], rel=1e-4, abs=2e-5), (a["step"], name)


def test_completions_are_those_of_one_process(one_and_two):
    for name in ("eval_000003.jsonl", "step_000003.jsonl", "eval_000000.jsonl"):
        one, two = (read_rows(one_and_two[n][0] / "completions" / name) for n in (1, 2))
        assert [row["response"] for row in one] == [row["response"] for row in two]


def test_parameters_are_alike_on_all_ranks_and_those_of_one_process(one_and_two):
    (single,), (first, second) = one_and_two[1][1], one_and_two[2][1]
    assert len(single) == len(first) == 3  # policy, critic, reference
    moved = 0
    for module, ours, theirs in zip(single, first, second):
        ours, theirs = ({k.removeprefix("module."): p for k, p in m.items()} for m in (ours, theirs))
        assert module.keys() == ours.keys() == theirs.keys()
        for name, parameter in module.items():
            assert torch.equal(ours[name], theirs[name])
            assert torch.allclose(ours[name], parameter, atol=1e-5), name
            moved += int(not torch.equal(parameter, single[2].get(name, parameter)))
    assert moved > 10


def test_the_run_folder_keeps_the_callers_file(one_and_two, script):
    run_dir, _ = one_and_two[2]
    assert (run_dir / script.name).exists() and "SGD" in (run_dir / "mine.py").read_text()
    assert json.loads((run_dir / "args.json").read_text())["script"] == "mine.py"


# ------------------------------------------------------------------------------------------------------ your own bug

BUGS = {
    "a wrong shape in the loss": (
        "mb_losses, _ = policy_loss(mb_logprobs, ",
        "mb_losses, _ = policy_loss(mb_logprobs[:, :-1], ",
        r"must match the size",
    ),
    "an error in the loop": (
        "        masks = [mask[part] for part in minibatch_rows]\n",
        "        masks = [mask[part] for part in minibatch_rows]\n        if iteration == 2 and rank == 1:\n"
        '            raise RuntimeError("timed out")\n',
        "RuntimeError: timed out",
    ),
    "a tensor among the metrics": (
        '"reward/mean": mean(scores),',
        '"reward/mean": scores.mean(),',
        "Tensor is not JSON",
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_ones_own_bug_shows_file_and_line(script, toy_flags, tmp_path, bug):
    old, new, message = BUGS[bug]
    source = script.read_text()
    assert source.count(old) == 1
    mine = tmp_path / "my_ppo.py"
    mine.write_text(source.replace(old, new))
    code, console = launch(mine, toy_flags | {"output_dir": tmp_path}, timeout=60)
    assert code != 0 and re.search(message, console), console
    assert re.search(rf'File "{mine}", line \d+, in main', console), console


def test_an_error_in_a_reward_file_shows_file_and_line(script, toy_flags, tmp_path):
    (tmp_path / "broken_reward.py").write_text("def reward(prompts, responses, answers):\n    return {}[4]\n")
    flags = toy_flags | {"reward": f"{tmp_path}/broken_reward.py:reward", "output_dir": tmp_path}
    code, console = launch(script, flags, timeout=60)
    assert (
        code != 0 and f'File "{tmp_path}/broken_reward.py", line 2, in reward' in console and "KeyError: 4" in console
    )


POOL = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor


def grade(response):
    return float(len(response))


def reward(prompts, responses, answers):
    with multiprocessing.get_context("fork").Pool(2) as pool, ProcessPoolExecutor(2) as executor:
        return [a + b for a, b in zip(pool.map(grade, responses), executor.map(grade, responses))]
"""


def test_a_reward_file_may_use_process_pools(script, toy_flags, tmp_path):
    """Pools are ended by SIGTERM, which the run itself answers by finishing its iteration."""
    (tmp_path / "pool_reward.py").write_text(POOL)
    flags = toy_flags | {"reward": f"{tmp_path}/pool_reward.py:reward", "output_dir": tmp_path, "run_name": "run"}
    code, console = launch(script, flags, timeout=100)
    assert code == 0, console
    m = read_metrics(tmp_path / "run")[1]
    assert m["reward/mean"] > 0 and m["reward/mean"] <= 2 * m["response/length_mean"]


def test_nan_in_the_loss_names_iteration_and_step(script, toy_flags, tmp_path):
    source, old = script.read_text(), "    losses, clipped = torch.maximum(unclipped, bounded), bounded > unclipped"
    assert source.count(old) == 1
    mine = tmp_path / "my_ppo.py"
    mine.write_text(source.replace(old, old.replace("torch.maximum(unclipped, bounded)", "unclipped / 0 * 0")))
    code, console = launch(mine, toy_flags | {"output_dir": tmp_path}, timeout=60)
    errors = [line for line in console.splitlines() if line.startswith("error: ")]
    assert code != 0 and len(errors) == 1, console
    assert "iteration 1, step 1 of the policy" in errors[0] and "nan" in errors[0]


# ---------------------------------------------------------------------------------------------------------- refusals


def test_what_every_rank_finds_is_printed_once(script, toy_flags, tmp_path):
    code, console = launch(script, toy_flags | {"output_dir": tmp_path, "minibatch_size": 1}, timeout=60)
    assert code != 0 and console.count("error: ") == 1 and "2 processes" in console, console
    assert "Traceback" not in console[: console.index("error: ")] and not list(tmp_path.iterdir())


def test_what_one_rank_finds_that_rank_prints(script, toy_flags, tmp_path):
    (tmp_path / "one_reward.py").write_text(
        "import os\n\n\ndef reward(prompts, responses, answers):\n"
        "    return [float('inf') if os.environ['RANK'] == '1' else 0.0] * len(prompts)\n"
    )
    flags = toy_flags | {"reward": f"{tmp_path}/one_reward.py:reward", "output_dir": tmp_path}
    code, console = launch(script, flags, timeout=90)
    assert code != 0 and len(re.findall("(?m)^error: the reward should give 4 finite numbers", console)) == 1, console


def test_ranks_without_a_row_to_evaluate(script, toy_flags, tmp_path):
    flags = toy_flags | {"output_dir": tmp_path, "run_name": "run", "eval_rows": 1, "total_iterations": 1}
    code, console = launch(script, flags)
    assert code == 0, console
    metrics = read_metrics(tmp_path / "run")
    assert len(read_rows(tmp_path / "run" / "completions" / "eval_000001.jsonl")) == 1
    assert all(math.isfinite(value) for m in metrics for value in m.values())


def test_the_defaults_are_for_a_real_model_and_the_embedded_settings_for_ours(algo, monkeypatch):
    monkeypatch.setattr("sys.argv", ["ppo_llm.py", "--model", "some/model"])
    real = algo.parse_args()
    assert (real.lr, real.critic_lr, real.lam) == (1e-6, 1e-5, 1.0)
    assert (real.max_prompt_length, real.max_response_length) == (512, 512)
    monkeypatch.setattr("sys.argv", ["ppo_llm.py", "--lr", "0.5"])
    ours = algo.parse_args()
    assert (ours.lr, ours.critic_lr, ours.lam, ours.total_iterations) == (0.5, 1e-3, 0.95, 40)
    monkeypatch.setattr("sys.argv", ["ppo_llm.py", "--critic-model", "some/model"])
    assert algo.parse_args().model == f"{ROOT}/benchmarks/tiny/model" or algo.TINY.parent.parent != ROOT


def test_bfloat16_learns_too(script, tmp_path, toy_flags):
    model = make_model(tmp_path / "model")
    data = write_rows(tmp_path / "train.jsonl", toy_rows(24))
    (tmp_path / "bf16_reward.py").write_text(TOY_REWARD)
    flags = toy_flags | {"model": model, "dataset": data, "reward": f"{tmp_path}/bf16_reward.py:early"}
    code, console = launch(script, flags | {"output_dir": tmp_path, "run_name": "run", "dtype": "bfloat16"})
    assert code == 0 and "on cpu, bfloat16" in console, console
    m = read_metrics(tmp_path / "run")[1]
    assert 0 < m["rollout/logprob_diff"] < 0.1 and m["actor/ratio_mean"] == pytest.approx(1, abs=0.05)
