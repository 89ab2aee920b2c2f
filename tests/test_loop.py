"""The loop as a whole, in one process: identities, invariances, every flag, what a researcher's change would meet."""

import dataclasses
import importlib.util
import math
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from conftest import (
    ROOT,
    TOY_REWARD,
    copies,
    each_script,
    make_model,
    make_tokenizer,
    read_metrics,
    read_rows,
    toy_rows,
    untimed,
    write_rows,
)
from ranks import load_script
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Gemma2Config


def same(a, b, tolerance):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name] == pytest.approx(b[name], rel=tolerance, abs=tolerance), name


@pytest.fixture
def spy(monkeypatch):
    """spy(owner, "name") -> list that grows by (positional arguments, result) with every call of owner.name."""

    def install(owner, name):
        real, calls = getattr(owner, name), []

        def wrapper(*args, **kwargs):
            result = real(*args, **kwargs)
            calls.append((args, result))
            return result

        monkeypatch.setattr(owner, name, wrapper)
        return calls

    return install


# ------------------------------------------------------------------------------------------------------- identities


@copies("ppo_llm", "ppo_llm_fsdp")
@pytest.mark.parametrize("flags", [{}, {"temperature": 0.5}, {"lora_rank": 4}])
def test_nothing_moves_without_a_learning_rate(toy_run, flags):
    _, metrics = toy_run(lr=0.0, critic_lr=0.0, ppo_epochs=2, **flags)
    for m in metrics[1:]:
        assert m["actor/ratio_mean"] == m["actor/ratio_max"] == 1 and m["actor/clipfrac"] == m["actor/approx_kl"] == 0
        assert m["rollout/logprob_diff"] < 1e-5 and m["actor/grad_norm"] > 0 and m["critic/grad_norm"] > 0
        assert m["kl/mean"] == 0  # the reference is the policy, by the same passes


@copies("ppo_llm", "ppo_llm_fsdp")
@pytest.mark.parametrize("loss_agg", ["token-mean", "seq-mean-token-mean"])
def test_gradients_do_not_depend_on_micro_batches(toy_run, loss_agg):
    flags = {"lr": 0.0, "critic_lr": 0.0, "loss_agg": loss_agg, "entropy_coef": 0.1, "kl_loss_coef": 0.1}
    runs = [toy_run(microbatch_tokens=n, **flags)[1] for n in (1, 64, 10_000)]
    for other in runs[1:]:
        for a, b in zip(untimed(runs[0]), untimed(other)):
            same(a, b, 2e-6)


@copies("ppo_llm", "ppo_llm_fsdp")
def test_rewards_sum_to_score_minus_kl(toy_run, spy, algo):
    """Of every row over its mask; the metric is their mean. A response without an EOS has lost its penalty."""
    judged, passes, credited = (spy(algo, name) for name in ("compute_scores", "forward_all", "gae"))
    _, metrics = toy_run(kl_reward_coef=0.3, missing_eos_penalty=0.7, total_iterations=3, max_response_length=30)
    for i, m in enumerate(metrics[1:]):
        (_, _, _, responses), (_, plain) = judged[i]
        (policy, old), (reference, ref), _ = passes[3 * i : 3 * i + 3]  # the third is the critic's
        (rewards, _, mask, *_), _ = credited[i]
        assert isinstance(policy[0], algo.Policy) and reference[0] is not policy[0]
        truncated = torch.tensor([response.truncated for response in responses])
        scores = torch.tensor(plain) - 0.7 * truncated
        totals = scores - 0.3 * torch.where(mask, old - ref, 0).sum(1)
        assert torch.where(mask, rewards, 0).sum(1).tolist() == pytest.approx(totals.tolist(), abs=1e-5)
        assert m["reward/total_mean"] == pytest.approx(totals.mean().item(), abs=1e-6)
        assert m["reward/mean"] == pytest.approx(scores.mean().item(), abs=1e-6) and 0 < truncated.sum() < 8
    assert (scores - totals).abs().min() > 1e-4  # the policy has moved


@copies("ppo_llm", "ppo_llm_fsdp")
def test_optimizer_steps_are_epochs_times_minibatches(toy_run, spy):
    steps = spy(torch.optim.AdamW, "step")
    toy_run(ppo_epochs=3, total_iterations=1)
    assert len(steps) == 2 * 3 * 2  # actor and critic, epochs, minibatches


@each_script()
def test_the_same_seed_gives_the_same_run(toy_run):
    first, second, other = (untimed(toy_run(seed=seed)[1]) for seed in (1, 1, 2))
    assert first == second != other


def test_sampling_noise_belongs_to_the_row_and_the_iteration(toy_run, spy, algo):
    calls = spy(algo, "generate")
    toy_run(total_iterations=2, rollout_batch_size=3)
    noise = [args[2] for args, _ in calls]
    assert [len(x) for x in noise] == [3, 3, 2, 3, 3, 2]
    first, second = torch.cat(noise[:3]), torch.cat(noise[3:])
    assert first.shape == (8, 10) and len(torch.cat([first, second]).unique()) == 160
    stream = algo.random_stream("rollout", 1, 1)
    assert torch.equal(first, torch.rand(8, 10, generator=stream, dtype=torch.float64))


@copies("ppo_llm", "ppo_llm_fsdp")
def test_only_the_critic_learns_while_it_warms_up(toy_run, spy):
    steps = spy(torch.optim.AdamW, "step")
    _, metrics = toy_run(critic_warmup_iterations=2, total_iterations=3)
    assert len(steps) == 2 + 2 + 4
    assert all("actor/grad_norm" not in m and "rollout/logprob_diff" not in m for m in metrics[1:3])
    assert metrics[3]["actor/ratio_mean"] > 0 and metrics[3]["rollout/logprob_diff"] < 1e-5


@copies("ppo_llm")
def test_without_a_kl_there_is_no_reference(toy_run, spy, algo):
    loads, passes = spy(algo, "load_model"), spy(algo, "forward_all")
    _, metrics = toy_run(kl_reward_coef=0.0, total_iterations=1)
    assert len(loads) == 2 and [type(module) for (module, *_), _ in passes] == [algo.Policy, algo.Critic]
    assert metrics[1]["kl/mean"] == 0
    toy_run(kl_reward_coef=0.0, kl_loss_coef=0.1, total_iterations=1)
    assert len(loads) == 2 + 3 and len(passes) == 2 + 3


@each_script()
def test_rates_rise_in_every_parameter_group_while_it_warms_up(algo, toy_run, monkeypatch):
    class InTwoGroups(torch.optim.AdamW):
        """As a researcher has it who gives some weights another decay."""

        def __init__(self, parameters, **options):
            first, *others = parameters
            super().__init__([{"params": [first]}, {"params": others}], **options)

    rates, flags = {}, {"lr": 3e-3, "warmup_iterations": 3, "total_iterations": 5}
    flags |= {"critic_lr": 6e-3} if hasattr(algo, "Critic") else {}

    def look(optimizer, *_):
        rates.setdefault(id(optimizer), []).append([group["lr"] for group in optimizer.param_groups])

    monkeypatch.setattr(torch.optim, "AdamW", InTwoGroups)
    hook = register_optimizer_step_pre_hook(look)
    toy_run(**flags)
    hook.remove()
    rising = [1e-3, 1e-3, 2e-3, 2e-3, *[3e-3] * 6]  # two minibatches in each iteration
    actor, *critic = rates.values()
    assert actor == [[pytest.approx(rate)] * 2 for rate in rising]
    assert critic == [[[pytest.approx(2 * rate)] * 2 for rate in rising]] * hasattr(algo, "Critic")


def test_padding_takes_no_part_in_metrics(toy_run, algo, monkeypatch):
    """Wider batches, with junk in what is no token: the same metrics."""
    plain = untimed(toy_run()[1])
    real = algo.to_batch

    def wider(rows, responses, device):
        tokens, mask, logprobs, lengths = real(rows, responses, device)
        junk = torch.full((len(rows), 5), 7)
        return (
            torch.cat([tokens, junk], 1),
            torch.nn.functional.pad(mask, (0, 5)),
            *(
                torch.nn.functional.pad(logprobs, (0, 5)),
                lengths,
            ),
        )

    monkeypatch.setattr(algo, "to_batch", wider)
    for a, b in zip(plain, untimed(toy_run()[1])):
        same(a, b, 1e-6)


# ------------------------------------------------------------------------------------------------------- every flag

# What to set besides, and the change; both runs of 2 iterations must differ in a metric.
CHANGES = {
    "critic_model": ({}, None),
    "dtype": ({}, "bfloat16"),
    "lora_rank": ({}, 4),
    "dataset": ({}, None),
    "prompt_column": ({}, "answer"),
    "chat_template": ({}, None),
    "prompt_suffix": ({}, " quick"),
    "max_prompt_length": ({}, 17),
    "max_response_length": ({}, 9),
    "reward": ({}, f"{ROOT}/benchmarks/rewards.py:exact"),
    "batch_size": ({}, 4),
    "temperature": ({}, 0.7),
    "missing_eos_penalty": ({}, 1.0),
    "ppo_epochs": ({}, 2),
    "minibatch_size": ({}, 8),
    "lr": ({}, 1e-4),
    "critic_lr": ({}, 1e-4),
    "warmup_iterations": ({}, 2),
    "critic_warmup_iterations": ({}, 1),
    "weight_decay": ({}, 0.5),
    "max_grad_norm": ({}, 1e-9),
    "clip_low": ({"ppo_epochs": 3, "lr": 1e-2}, 0.01),
    "clip_high": ({"ppo_epochs": 3, "lr": 1e-2}, 0.01),
    "entropy_coef": ({}, 0.1),
    "loss_agg": ({"max_response_length": 30}, "seq-mean-token-mean"),
    "gamma": ({}, 0.9),
    "lam": ({}, 0.5),
    "whiten_advantages": ({}, False),
    "kl_reward_coef": ({}, 0.5),
    "kl_reward_kind": ({"kl_reward_coef": 0.5}, "k3"),
    "kl_loss_coef": ({}, 0.5),
    "kl_loss_kind": ({"kl_loss_coef": 0.5, "lr": 1e-2}, "k2"),
    "seed": ({}, 2),
    "eval_rows": ({}, 3),
    "eval_every": ({"eval_rows": 3}, 1),
    "eval_dataset": ({"eval_rows": 7}, None),
    "model": ({}, None),
}
OF_PPO = "critic_model", "critic_lr", "critic_warmup_iterations", "gamma", "lam", "whiten_advantages"
# Flags that change no metric are tested elsewhere.
FILES = {
    "answer_column",
    "total_iterations",
    "track",
    "output_dir",
    "run_name",
    "save_every",
    "keep_checkpoints",
    "resume",
}
COMMON = FILES | {"gradient_checkpointing", "microbatch_tokens", "rollout_batch_size"}
ELSEWHERE = {"ppo_llm": COMMON, "grpo_llm": COMMON}
ELSEWHERE["ppo_llm_fsdp"] = COMMON | {"rollout_params", "shard_group_size", "offload"}


def changes(script):
    """{flag: (what to set besides, the change)} for every flag of a script that changes metrics."""
    if script != "grpo_llm":
        return CHANGES
    own = {"group_size": ({}, 4), "estimator": ({}, "rloo"), "batch_size": ({}, 2)}
    own |= {"loss_agg": ({"max_response_length": 30}, "token-mean")}
    return {name: case for name, case in CHANGES.items() if name not in OF_PPO} | own


@each_script()
def test_the_table_of_flags_is_complete(script, algo):
    known = {field.name for field in dataclasses.fields(algo.Args)}
    assert known == changes(script.stem).keys() | ELSEWHERE[script.stem]


@pytest.fixture(scope="module")
def before():
    """Metrics of the runs that others are compared with, by their flags: made once."""
    return {}


CASES = [("ppo_llm", name) for name in changes("ppo_llm")]
for flag, change in changes("grpo_llm").items():  # those that both have, where nothing differs, among the slow tests
    slow = pytest.mark.slow if CHANGES.get(flag) == change else ()
    CASES.append(pytest.param("grpo_llm", flag, marks=slow))


@pytest.mark.parametrize("script, name", CASES, indirect=["script"], scope="module")
def test_every_flag_changes_something(script, toy_run, tmp_path, before, name):
    besides, value = changes(script.stem)[name]
    if name in ("model", "critic_model"):
        value = make_model(tmp_path / "other", seed=5)
    if name in ("dataset", "eval_dataset"):
        value = write_rows(tmp_path / "other.jsonl", toy_rows(9, 500))
    if name == "chat_template":
        value = str(tmp_path / "template.jinja")
        Path(value).write_text("{% for m in messages %}user {{ m.content }}{% endfor %}")
    key = script.stem, repr(besides)
    before[key] = before.get(key) or untimed(toy_run(**besides)[1])
    assert before[key] != untimed(toy_run(**besides | {name: value})[1])


@each_script()
def test_memory_flags_change_no_result(toy_run):
    plain = untimed(toy_run(ppo_epochs=2)[1])
    for a, b in zip(plain, untimed(toy_run(ppo_epochs=2, gradient_checkpointing=True)[1])):
        same(a, b, 1e-5)


# ------------------------------------------------------------------------------------------- evaluation and files


def test_evaluation_scores_every_chosen_row_once(toy_run, spy, algo):
    calls = spy(algo, "evaluate")
    run_dir, metrics = toy_run(eval_rows=5, total_iterations=4, eval_every=2)
    assert len(calls) == 3 and [("eval/score" in m) for m in metrics] == [True, False, True, False, True]
    rows = read_rows(run_dir / "completions" / "eval_000004.jsonl")
    assert len(rows) == 5 == len({row["prompt"] for row in rows})
    for name in ("score", "score_sampled"):
        assert metrics[-1][f"eval/{name}"] == pytest.approx(sum(row[name] for row in rows) / 5, abs=1e-6)
    assert {"prompt", "response", "score", "kl", "truncated"} & set(
        read_rows(run_dir / "completions" / "step_000004.jsonl")[0]
    ) >= {"prompt", "response", "score"}


@pytest.mark.parametrize("eval_rows, steps", [(0, []), (2, [0, 2])])
def test_evaluation_never_or_before_and_after(toy_run, eval_rows, steps):
    run_dir, metrics = toy_run(eval_rows=eval_rows, eval_every=0)
    assert [m["step"] for m in metrics if any(name.startswith("eval/") for name in m)] == steps
    names = sorted(path.name for path in run_dir.glob("completions/eval_*"))
    assert names == [f"eval_{step:06d}.jsonl" for step in steps]


@each_script()
@pytest.mark.parametrize("flags", [{"eval_rows": 0}, {"eval_rows": 5, "dataset": None, "eval_dataset": None}])
def test_what_the_policy_writes_in_training_is_kept_without_test_data(toy_run, tmp_path, flags):
    """Whenever an evaluation would be due: reward hacking shows there first."""
    if "dataset" in flags:
        flags = flags | {"dataset": write_rows(tmp_path / "train.jsonl", toy_rows(8))}
    run_dir, metrics = toy_run(total_iterations=3, eval_every=2, **flags)
    assert sorted(path.name for path in run_dir.glob("completions/*")) == ["step_000002.jsonl", "step_000003.jsonl"]
    for step in (2, 3):
        rows = read_rows(run_dir / f"completions/step_{step:06d}.jsonl")
        assert len(rows) == 8 and all(row.keys() == {"prompt", "response", "score"} for row in rows)
        assert sum(row["score"] for row in rows) / 8 == pytest.approx(metrics[step]["reward/mean"], abs=1e-6)
    assert metrics[0] == {"step": 0} and not any(name.startswith("eval/") for m in metrics for name in m)


@each_script()
def test_only_evaluating(toy_run):
    run_dir, metrics = toy_run(total_iterations=0, eval_rows=7)
    assert [m["step"] for m in metrics] == [0] and metrics[0]["eval/length_mean"] > 0
    assert not (run_dir / "final").exists() and not list(run_dir.glob("best*"))


@each_script()
def test_checkpoints_are_pruned_and_complete(toy_run):
    run_dir, _ = toy_run(total_iterations=5, save_every=1, keep_checkpoints=2)
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["step_000004", "step_000005"]
    assert not list(run_dir.rglob(".*"))
    run_dir, _ = toy_run(total_iterations=2, save_every=0)
    assert not (run_dir / "checkpoints").exists()


@pytest.fixture
def scripted(algo, monkeypatch):
    """scripted([0.3, 0.9]) -> the greedy scores that the next evaluations find, whatever the model answers."""
    real = algo.evaluate

    def install(found):
        scores = iter(found)
        monkeypatch.setattr(algo, "evaluate", lambda *args: real(*args) | {"eval/score": next(scores)})

    return install


def best_of(run_dir):
    return sorted(path.name for path in run_dir.glob("best*"))


BEST = {"eval_rows": 2, "eval_every": 1, "lr": 1e-2}


@each_script()
def test_the_best_is_kept(toy_run, algo, monkeypatch, scripted):
    """One at a time, with its iteration in the name; the one before goes when the new one is complete. Better is what
    is better than before training, and than all since; what is as good is not."""
    scripted([0.3, 0.2, 0.4, 0.4, 0.9, 0.8])
    saved, gone = [], []
    real_save, real_remove = algo.save_models, algo.remove

    def save_models(path, *rest):
        saved.append((path.name, best_of(path.parent)))
        real_save(path, *rest)

    def remove(folder):
        if folder.name.startswith("best") and folder.exists():
            complete = [path.parent.name for path in sorted(folder.parent.glob("best*/model.safetensors"))]
            gone.append((folder.name, complete))
        real_remove(folder)

    monkeypatch.setattr(algo, "save_models", save_models)
    monkeypatch.setattr(algo, "remove", remove)
    run_dir, _ = toy_run(total_iterations=5, **BEST)
    assert saved == [("best_000002", []), ("best_000004", ["best_000002"]), ("final", ["best_000004"])]
    assert gone == [("best_000002", ["best_000002", "best_000004"])]
    assert best_of(run_dir) == ["best_000004"] and not list(run_dir.glob(".*"))
    AutoModelForCausalLM.from_pretrained(run_dir / "best_000004")
    best, final = (run_dir / name / "model.safetensors" for name in ("best_000004", "final"))
    assert best.read_bytes() != final.read_bytes()


@each_script()
def test_what_is_never_better_than_before_training_is_not_kept(toy_run, scripted):
    scripted([0.5, 0.5, 0.4, 0.1])
    run_dir, _ = toy_run(total_iterations=3, **BEST)
    assert best_of(run_dir) == [] and (run_dir / "final").exists()


@each_script()
def test_what_was_best_before_a_restart_still_counts(toy_run, scripted):
    """And what a run that was killed has left under the name of a best model is replaced, whole or not."""
    scripted([0.3, 0.2, 0.6])
    run_dir, _ = toy_run(total_iterations=2, save_every=1, run_name="mine", **BEST)
    for name in ("best_000002", "best_000004", ".best_000004.tmp", ".best_000004.old"):
        (run_dir / name).mkdir(exist_ok=True)
        (run_dir / name / "left").write_text("by a run that got further, and was killed")
    scripted([0.5, 0.7])
    toy_run(total_iterations=4, run_name="mine", resume="auto", **BEST)
    assert best_of(run_dir) == ["best_000004"] and not (run_dir / "best_000004" / "left").exists()
    AutoModelForCausalLM.from_pretrained(run_dir / "best_000004")
    assert not list(run_dir.glob(".*"))


def everyone(is_main_process=True):
    """In place of the accelerator: one rank, that waits for nobody."""
    return SimpleNamespace(is_main_process=is_main_process, wait_for_everyone=lambda: None)


def test_what_has_a_name_is_complete(algo, tmp_path):
    path = tmp_path / "step_000001"

    def write(text, error=None):
        with algo.written_whole(path, everyone()) as folder:
            (folder / "weights").write_text(text)
            assert not path.exists() or (path / "weights").read_text() == "one"
            if error:
                raise error

    write("one")
    with pytest.raises(OSError):
        write("two", OSError("disk full"))
    assert (path / "weights").read_text() == "one"
    write("two")  # what was left of the last attempt is in nobody's way
    assert (path / "weights").read_text() == "two" and [p.name for p in tmp_path.iterdir()] == ["step_000001"]
    with algo.written_whole(path, everyone(is_main_process=False)) as folder:
        assert not folder.exists()  # the other ranks make nothing, and take nothing away
    assert (path / "weights").read_text() == "two" and [p.name for p in tmp_path.iterdir()] == ["step_000001"]


@pytest.mark.parametrize("killed_in", ["removal", "renaming"])
def test_a_kill_while_a_folder_is_replaced_leaves_no_half_of_it(algo, tmp_path, monkeypatch, killed_in):
    path = tmp_path / "best_000002"
    path.mkdir()
    (path / "weights").write_text("one")

    def rename(self, target, real=Path.rename):
        if self.name == ".best_000002.tmp":
            raise KeyboardInterrupt
        return real(self, target)

    def rmtree(folder, ignore_errors=False):
        if not ignore_errors:
            raise KeyboardInterrupt

    if killed_in == "removal":
        monkeypatch.setattr(algo.shutil, "rmtree", rmtree)
    else:
        monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(KeyboardInterrupt), algo.written_whole(path, everyone()) as folder:
        (folder / "weights").write_text("two")
    monkeypatch.undo()
    assert not path.exists()
    with algo.written_whole(path, everyone()) as folder:
        (folder / "weights").write_text("three")
    assert (path / "weights").read_text() == "three" and [p.name for p in tmp_path.iterdir()] == ["best_000002"]


# ------------------------------------------------------------------------- a researcher's copy, and import-and-patch


@pytest.fixture
def changed(script, tmp_path):
    """changed(old, new) -> a copy of the script with one text replaced, as a module."""

    def make(old, new):
        source = script.read_text()
        assert source.count(old) == 1, old
        path = tmp_path / "my_ppo.py"
        path.write_text(source.replace(old, new))
        spec = importlib.util.spec_from_file_location("my_ppo", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return make


def run_changed(module, toy_flags, tmp_path, **flags):
    with mock.patch.object(time, "sleep"):  # the pause at the end is for gloo's threads
        run_dir = module.main(
            module.Args(**toy_flags | {"output_dir": str(tmp_path / "out"), "run_name": "run"} | flags)
        )
    return run_dir, read_metrics(run_dir)


@each_script()
def test_a_metric_of_any_name_is_logged(changed, toy_flags, tmp_path):
    module = changed(
        '"reward/mean": mean(scores),', '"reward/mean": mean(scores),\n            "longest": max(row_lengths),'
    )
    run_dir, metrics = run_changed(module, toy_flags, tmp_path, track="tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (file,) = run_dir.rglob("events.out.tfevents*")
    events = EventAccumulator(str(file)).Reload()
    assert [e.value for e in events.Scalars("longest")] == [m["longest"] for m in metrics[1:]] != []


def test_credit_lost_off_the_end_is_seen(changed, toy_flags, tmp_path):
    """The score one position too late: `gae` masks it, and so must the metric."""
    module = changed(
        "last = mask.cumsum(1).argmax(1, keepdim=True)", "last = mask.cumsum(1).argmax(1, keepdim=True) + 1"
    )
    _, metrics = run_changed(module, toy_flags, tmp_path, total_iterations=1)
    assert metrics[1]["reward/mean"] > 0 and metrics[1]["reward/total_mean"] == 0


@each_script()
def test_a_wrong_shift_is_refused_in_the_first_iteration(changed, toy_flags, tmp_path, capsys):
    module = changed("labels = tokens.roll(-1, 1)[actions]", "labels = tokens[actions]")
    with pytest.raises(SystemExit) as stop:
        run_changed(module, toy_flags, tmp_path)
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert stop.value.code == 1 and len(error) == 1 and "sampler and training pass differ" in error[0]


@each_script()
@pytest.mark.parametrize("first_wrong", [1, 3])
@pytest.mark.parametrize("wrong", ["mask", "NaN"])
def test_a_wrong_mask_is_refused_in_any_iteration(algo, toy_run, monkeypatch, capsys, first_wrong, wrong):
    """And log-probs of the sampler that are no numbers, which are not less than any limit."""
    calls, real = [], algo.to_batch

    def shifted(*args):
        calls.append(args)
        tokens, mask, logprobs, lengths = real(*args)
        if len(calls) < first_wrong:
            return tokens, mask, logprobs, lengths
        if wrong == "NaN":
            return tokens, mask, logprobs * math.nan, lengths
        return tokens, mask.roll(1, 1), logprobs.roll(1, 1), lengths

    monkeypatch.setattr(algo, "to_batch", shifted)
    with pytest.raises(SystemExit) as stop:
        toy_run(total_iterations=4)
    assert stop.value.code == 1 and len(calls) == first_wrong
    sentence = f"error: iteration {first_wrong}: sampler and training pass differ by"
    assert capsys.readouterr().err.count(sentence) == 1


@copies("ppo_llm", "ppo_llm_fsdp")
def test_a_wrong_mask_is_refused_once_the_actor_trains(algo, toy_run, monkeypatch):
    """Not while the critic warms up: then nothing that is sampled is compared."""
    real, calls = algo.to_batch, []

    def shifted(*args):
        calls.append(args)
        tokens, mask, logprobs, lengths = real(*args)
        return tokens, mask.roll(1, 1), logprobs.roll(1, 1), lengths

    monkeypatch.setattr(algo, "to_batch", shifted)
    with pytest.raises(SystemExit):
        toy_run(critic_warmup_iterations=1, total_iterations=3)
    assert len(calls) == 2


@each_script()
def test_the_clip_metric_follows_the_loss(algo, toy_run, monkeypatch):
    real = algo.policy_loss
    monkeypatch.setattr(algo, "policy_loss", lambda *a: (real(*a)[0], torch.ones_like(a[0], dtype=torch.bool)))
    assert toy_run(total_iterations=1)[1][1]["actor/clipfrac"] == 1


@each_script()
def test_training_and_evaluation_share_one_rollout(algo, toy_run, monkeypatch):
    real = algo.generate

    def with_environment(model, prompts, uniforms, eos_ids, *rest):
        """After the answer the environment says something, which is no action."""
        said = [5, 6, 7]
        responses = real(model, prompts, uniforms, eos_ids, *rest)
        return [algo.Response(r.ids + said, r.logprobs + [algo.NOT_SAMPLED] * 3, r.truncated) for r in responses]

    seen = []
    real_forward = algo.Policy.forward
    monkeypatch.setattr(algo.Policy, "forward", lambda self, t, m: (seen.append((t, m)), real_forward(self, t, m))[1])
    plain = toy_run(total_iterations=1)[1][1]
    batches = len(seen)
    monkeypatch.setattr(algo, "generate", with_environment)
    run_dir, metrics = toy_run(total_iterations=1, eval_rows=2)
    for kind in ("eval_000001", "step_000001"):
        rows = read_rows(run_dir / "completions" / f"{kind}.jsonl")
        assert all(row["response"].endswith("cde") for row in rows)  # ids 5, 6, 7
    assert metrics[1]["rollout/logprob_diff"] < 1e-5  # in `tokens`, so later tokens are conditioned on it
    assert metrics[1]["response/length_mean"] == plain["response/length_mean"]  # and not in `mask`
    inserted = 0
    for tokens, mask in seen[batches:]:
        following = tokens.roll(-1, 1)
        three = torch.stack([following[:, :-2], following[:, 1:-1], following[:, 2:]], -1)
        at = (three == torch.tensor([5, 6, 7])).all(-1)
        inserted += int(at.sum())
        ends = mask.sum(1) > 0
        assert ends.all() and not (mask[:, :-2] & at & ~mask[:, 1:-1] & ~mask[:, 2:]).any()
    assert inserted > 0


@each_script()
def test_what_is_added_to_the_state_survives(changed, toy_flags, tmp_path):
    """An old checkpoint without it still loads, a new one brings it back: by name."""
    plain = changed('state = {"iteration": 0,', 'state = {"iteration": 0, ')
    run_dir, _ = run_changed(plain, toy_flags, tmp_path, total_iterations=1, save_every=1)
    mine = changed('state = {"iteration": 0,', 'state = {"seen": [], "iteration": 0,')
    source = Path(mine.__file__).read_text()
    source = source.replace(
        '        state["iteration"] = iteration\n',
        '        state["iteration"] = iteration\n        state["seen"].append(iteration)\n',
    )
    Path(mine.__file__).write_text(source)
    spec = importlib.util.spec_from_file_location("my_ppo", mine.__file__)
    mine = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mine)
    for total in (2, 4):
        run_changed(mine, toy_flags, tmp_path, total_iterations=total, save_every=1, resume="auto")
    path = run_dir / "checkpoints" / "step_000004"
    if (path / "state.pt").exists():
        saved = torch.load(path / "state.pt", weights_only=True)
    else:
        saved = torch.load(path / "checkpoint.pt", weights_only=True)["state"]
    assert saved["seen"] == [2, 3, 4]


@each_script()
def test_a_run_that_has_no_checkpoint_yet_begins_anew(algo, toy_flags, tmp_path):
    """As one that was killed early and is started again by its queue: no step stands twice in its metrics."""
    run_changed(algo, toy_flags, tmp_path, total_iterations=1)
    _, metrics = run_changed(algo, toy_flags, tmp_path, total_iterations=2, resume="auto", save_every=1)
    assert [m["step"] for m in metrics] == [0, 1, 2]
    _, metrics = run_changed(algo, toy_flags, tmp_path, total_iterations=3, resume="auto")
    assert [m["step"] for m in metrics] == [0, 1, 2, 3]


# ---------------------------------------------------------------------------------------------------------- refusals


def refused(capsys, run, *words):
    """Exactly one sentence that begins with error:, and exit code 1."""
    with pytest.raises(SystemExit) as stop:
        run()
    lines = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert stop.value.code == 1 and len(lines) == 1 and lines[0].startswith("error: "), lines
    assert all(word in lines[0] for word in words), lines[0]


# Least values: of these, and 0 of every other number.
LEAST = dict.fromkeys(("batch_size", "group_size", "minibatch_size", "rollout_batch_size", "microbatch_tokens"), 1)
LEAST |= {"ppo_epochs": 1, "max_response_length": 1, "temperature": 0.01, "entropy_coef": -math.inf}


def numbers_of(algo):
    """{flag that is a number: its least value}"""
    fields = [field for field in dataclasses.fields(algo.Args) if field.type in (int, float)]
    return {field.name: LEAST.get(field.name, 0) for field in fields}


@each_script()
def test_a_number_below_its_least_value(algo, toy_run, capsys, monkeypatch, tmp_path):
    """And one that is none. It is refused before a model is loaded or a folder made."""
    monkeypatch.setattr(algo, "load_model", lambda *args, **kwargs: pytest.fail("a model was loaded"))
    for name, least in numbers_of(algo).items():
        flag = name.replace("_", "-")
        below = (least - 1, -7) if isinstance(least, int) else (least / 2, 0.0, -1.0)
        for value in (*below, math.inf, math.nan) if name != "entropy_coef" else (math.inf, math.nan):
            sentence = f"--{flag} is {value}, not finite or below its least value {least}"
            refused(capsys, lambda n=name, v=value: toy_run(**{n: v}), sentence)
    assert list(tmp_path.iterdir()) == [] and len(numbers_of(algo)) > 20


@each_script()
def test_the_least_values_train(algo, toy_run):
    """All of them at once, and an entropy coefficient that asks for less entropy."""
    least = numbers_of(algo) | {"total_iterations": 1, "entropy_coef": -0.1, "max_prompt_length": 30}
    _, metrics = toy_run(**least, **({"estimator": "reinforce_pp"} if "group_size" in least else {}))
    assert [m["step"] for m in metrics] == [0, 1] and metrics[1]["response/length_mean"] == 1
    assert all(math.isfinite(value) for value in metrics[1].values())


@each_script()
def test_a_largest_gradient_norm_of_0_scales_nothing_down(toy_run):
    """Two steps to the bit as under a limit that is never reached, and not as under one that is."""
    free, far, near = (toy_run(max_grad_norm=limit, weight_decay=0.1) for limit in (0.0, 1e9, 1e-9))
    assert untimed(free[1]) == untimed(far[1]) != untimed(near[1])
    weights = [(run_dir / "final" / "model.safetensors").read_bytes() for run_dir, _ in (free, far, near)]
    assert weights[0] == weights[1] != weights[2] and free[1][2]["kl/mean"] != 0


@each_script()
def test_an_adapter_is_no_model(algo, toy_run, tmp_path, capsys):
    """What a run with LoRA saves: as --model, and what it saves of its critic as --critic-model."""
    run_dir, _ = toy_run(lora_rank=2, total_iterations=1)
    capsys.readouterr()
    roles = {"model": run_dir / "final"} | (
        {"critic_model": run_dir / "final/critic"} if hasattr(algo, "Critic") else {}
    )
    for flag, folder in roles.items():
        refused(capsys, lambda f=flag, d=folder: toy_run(**{f: str(d)}), f"{folder} is an adapter", "merge it")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [run_dir.name]


@each_script("ppo_llm", "ppo_llm_fsdp")
def test_a_critic_that_reads_other_tokens(toy_run, tmp_path, capsys):
    other = make_model(tmp_path / "other")
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["one more"])
    tokenizer.save_pretrained(other)
    refused(capsys, lambda: toy_run(critic_model=other), f"--critic-model {other} has another tokenizer than --model")


UNSAVED = {  # what an optimizer trains that no checkpoint would hold, or leaves out that it should train
    "a head in the wrapper": (
        "self.inverse_temperature = ",
        "self.bonus = nn.Linear(4, 1)\n        self.inverse_temperature = ",
    ),
    "a parameter too few": ("AdamW(policy.parameters(), ", "AdamW([*policy.parameters()][1:], "),
    "another model's": ("AdamW(policy.parameters(), ", "AdamW([*policy.parameters(), nn.Parameter(torch.ones(1))], "),
    "a frozen model, and the optimizer of another": (
        'trainees = {"policy": (policy_model, policy_optimizer)}\n',
        'trainees = {"policy": (policy_model, policy_optimizer)}\n'
        "    frozen = load_model(args.model, AutoModelForCausalLM)\n"
        '    trainees["sampler"] = (frozen, policy_optimizer)\n',
    ),
}


@each_script()
@pytest.mark.parametrize("what", UNSAVED)
def test_an_optimizer_that_trains_something_else_than_its_model(changed, toy_flags, tmp_path, capsys, what):
    module = changed(*UNSAVED[what])
    run = lambda: run_changed(module, toy_flags, tmp_path, total_iterations=1)  # noqa: E731
    name = "sampler" if "frozen" in what else "policy"
    refused(capsys, run, "trainees: ", f"optimizer of {name} ", "exactly the trained parameters")
    assert not (tmp_path / "out").exists()


@copies("ppo_llm", "ppo_llm_fsdp")
@pytest.mark.parametrize("sizes", [{"batch_size": 10}, {"minibatch_size": 3}, {"minibatch_size": 16}])
def test_sizes_that_do_not_divide(toy_run, capsys, sizes):
    refused(capsys, lambda: toy_run(**sizes), "--batch-size", "--minibatch-size", "1 processes")


@each_script()
def test_an_existing_run_folder(toy_run, tmp_path, capsys):
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    refused(capsys, lambda: toy_run(run_name="mine"), "runs/mine exists", "--resume auto")


@each_script()
def test_more_processes_than_gpus(toy_run, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    refused(capsys, toy_run, "more processes than GPUs", "--num_processes to 2")


@each_script()
@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED"])
def test_an_accelerate_configuration_that_shards(algo, toy_run, capsys, monkeypatch, kind):
    real = algo.Accelerator

    def accelerator(**options):
        """As where what the configuration asks for is installed."""
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv(f"ACCELERATE_USE_{kind}")
            return real(**options)

    monkeypatch.setenv(f"ACCELERATE_USE_{kind}", "true")
    monkeypatch.setattr(algo, "Accelerator", accelerator)
    refused(capsys, toy_run, "asks for FSDP or DeepSpeed")


@each_script()
def test_a_gradient_that_is_not_finite(algo, toy_run, capsys, monkeypatch):
    real = algo.policy_loss

    def spoilt(logprobs, *rest):
        losses, clipped = real(logprobs, *rest)
        return losses * (math.nan if len(steps) == 3 and logprobs.requires_grad else 1), clipped

    steps = []
    real_step = torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, *a: (steps.append(1), real_step(self, *a))[1])
    monkeypatch.setattr(algo, "policy_loss", spoilt)
    refused(capsys, lambda: toy_run(ppo_epochs=2), "iteration 1, step 4 of the policy", "nan")
    assert len(steps) == 3


@each_script()
def test_a_checkpoint_of_another_model(toy_run, tmp_path, capsys):
    _run_dir, _ = toy_run(total_iterations=1, save_every=1, run_name="mine")
    other = make_model(tmp_path / "other", hidden_size=48)
    flags = {"run_name": "mine", "resume": "auto"}
    refused(capsys, lambda: toy_run(model=other, **flags), "step_000001", "another model")
    refused(capsys, lambda: toy_run(lora_rank=2, **flags), "--lora-rank")


@each_script("ppo_llm", "grpo_llm")
def test_a_checkpoint_of_the_other_algorithm(script, toy_run, toy_flags, tmp_path, capsys):
    run_dir, _ = toy_run(total_iterations=1, save_every=1)
    other = load_script(ROOT / ("ppo_llm.py" if script.stem == "grpo_llm" else "grpo_llm.py"))
    known = {field.name for field in dataclasses.fields(other.Args)}
    flags = {name: value for name, value in (toy_flags | {"group_size": 2}).items() if name in known}
    args = other.Args(**flags | {"output_dir": str(tmp_path / "runs"), "run_name": run_dir.name, "resume": "auto"})
    begun = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    capsys.readouterr()
    its = "policy, critic" if script.stem == "ppo_llm" else "policy"
    refused(capsys, lambda: other.main(args), f"step_000001 is of another script: it has state, {its}")
    assert begun == {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}


@each_script()
def test_a_classifier_is_no_policy(toy_run, tmp_path, capsys):
    folder = make_model(tmp_path / "judge", auto_class=AutoModelForSequenceClassification, num_labels=1)
    capsys.readouterr()
    refused(capsys, lambda: toy_run(model=folder), f"{folder} is no AutoModelForCausalLM, it lacks the weights lm_head")


@each_script()
def test_a_model_that_changes_its_logits_after_the_head(toy_run, tmp_path, capsys):
    tokenizer = make_tokenizer()
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 8,
    }
    config = Gemma2Config(**sizes, num_key_value_heads=2, vocab_size=len(tokenizer), eos_token_id=1, pad_token_id=0,
                          bos_token_id=None, final_logit_softcapping=1.0, initializer_range=0.5)  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "gemma")
    tokenizer.save_pretrained(tmp_path / "gemma")
    refused(capsys, lambda: toy_run(model=str(tmp_path / "gemma")), "sampler and training pass differ")


def test_reward_functions_may_be_patched_and_keep_their_errors(algo, toy_run, tmp_path):
    (tmp_path / "keyed_reward.py").write_text(
        TOY_REWARD + "\ndef bad(prompts, responses, answers):\n    return {}[4]\n"
    )
    with pytest.raises(KeyError) as error:
        toy_run(reward=f"{tmp_path}/keyed_reward.py:bad")
    assert "keyed_reward.py" in str(error.traceback[-1].path)
