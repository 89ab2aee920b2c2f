"""The loop as a whole, in one process: identities, invariances, what it writes, what a researcher's change would meet.

What the scripts share to the byte is tried with the first; grpo_llm.py's own: test_groups.py; ranks: test_ranks.py.
"""

import math
import re
import shutil
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from accelerate import tracking
from helpers import KL_LIMITS, each_script, make_model, read_metrics, read_rows, refusal, untimed
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

PPO = "ppo_llm", "ppo_llm_fsdp"


@each_script()
@pytest.mark.parametrize("flags", [{"temperature": 0.5}, {"lora_rank": 4}])
def test_nothing_moves_without_a_learning_rate(algo, toy_run, flags):
    rates = {"lr": 0.0} | ({"critic_lr": 0.0} if hasattr(algo, "Critic") else {})
    _, (_, m) = toy_run(total_iterations=1, ppo_epochs=2, **rates, **flags)
    assert m["actor/ratio_mean"] == m["actor/ratio_max"] == 1 and m["actor/clipfrac"] == m["actor/approx_kl"] == 0
    assert m["rollout/kl"] < 1e-11 and all(m[name] > 0 for name in m if name.endswith("grad_norm"))
    assert m["kl/mean"] == 0  # the reference is the policy, by the same passes


@each_script("ppo_llm")
def test_sampling_noise_belongs_to_the_row_and_the_iteration(toy_run, spy, algo):
    calls = spy(algo, "generate")
    toy_run(total_iterations=2, rollout_batch_size=3)
    noise = [args[2] for args, _ in calls]
    assert [len(x) for x in noise] == [3, 3, 2, 3, 3, 2]
    first, second = torch.cat(noise[:3]), torch.cat(noise[3:])
    assert first.shape == (8, 10) and len(torch.cat([first, second]).unique()) == 160
    stream = algo.random_stream("rollout", 1, 1)
    assert torch.equal(first, torch.rand(8, 10, generator=stream, dtype=torch.float64))


@each_script("ppo_llm")
def test_without_a_kl_there_is_no_reference(toy_run, toy_flags, spy, algo, tmp_path):
    """The critic may be another model."""
    loads, passes = spy(algo, "load_model"), spy(algo, "forward_all")
    policy, critic = toy_flags["model"], make_model(tmp_path / "other")
    _, metrics = toy_run(kl_reward_coef=0.0, total_iterations=1, critic_model=critic)
    assert [args[0] for args, _ in loads] == [policy, critic] and metrics[1]["kl/mean"] == 0
    assert [type(module) for (module, *_), _ in passes] == [algo.Policy, algo.Critic]
    toy_run(kl_reward_coef=0.0, kl_loss_coef=0.1, total_iterations=1)
    assert [args[0] for args, _ in loads[2:]] == [policy] * 3 and len(passes) == 2 + 3


@each_script("ppo_llm", "grpo_llm")
def test_gradient_checkpointing_changes_no_result(algo, toy_run, spy):
    """It works in train mode alone, which `generate` must come back to."""
    plain = untimed(toy_run(ppo_epochs=2)[1])
    passes = spy(algo.Policy, "forward", lambda policy, *_: policy)
    for a, b in zip(plain, untimed(toy_run(ppo_epochs=2, gradient_checkpointing=True)[1])):
        assert a == pytest.approx(b, rel=1e-5, abs=1e-5)
    assert all(policy.model.is_gradient_checkpointing and policy.model.training for policy in passes)


KEPT = ["prompt", "answer", "response", "score", "parts", "length", "truncated", "row"]


@each_script("ppo_llm")
def test_evaluations_and_the_completions_that_are_kept(toy_run, spy, algo, capsys):
    """Evaluated greedily and at temperature 1. What is written in training shows reward hacking first."""
    calls = spy(algo, "generate")
    flags = {"eval_rows": 5, "max_response_length": 24, "temperature": 0.5}
    run_dir, metrics = toy_run(total_iterations=3, eval_every=2, **flags)
    assert [args[4] for args, _ in calls] == [0, 1, 0.5, 0.5, 0, 1, 0.5, 0, 1]
    assert torch.equal(calls[1][0][2], calls[8][0][2])  # with the same noise each time
    assert all(0 < m["time/rollout"] < m["time/iteration"] < 60 for m in metrics[1:])
    assert [("eval/score" in m) for m in metrics] == [True, False, True, True]
    kinds = ("eval", "eval/score", 5), ("eval_sampled", "eval/score_sampled", 5), ("step", "reward/mean", 8)
    for name, score, number in kinds:
        rows = read_rows(run_dir / "completions" / f"{name}_000003.jsonl")
        assert len(rows) == number == len({row["prompt"] for row in rows})
        for row in rows:
            assert row.keys() == {*KEPT, *(["batch"] if name == "step" else [])} and row["parts"] == {}
            assert row["row"] == {"question": row["prompt"], "answer": row["answer"]}
        assert metrics[3][score] == pytest.approx(sum(row["score"] for row in rows) / number, abs=1e-6)
        if name == "eval_sampled":
            assert metrics[3]["eval/length_mean"] == sum(row["length"] for row in rows) / 5
            assert metrics[3]["eval/truncated_frac"] == sum(row["truncated"] for row in rows) / 5
            assert 0 < metrics[3]["eval/truncated_frac"] < 1
    kept = sorted(path.name for path in run_dir.glob("completions/step*"))
    assert kept == [f"step_{iteration:06d}.jsonl" for iteration in (1, 2, 3)]
    run_dir, _ = toy_run(eval_every=1, eval_rows=0)  # without an evaluation, too
    assert sorted(path.name for path in run_dir.glob("completions/*")) == kept[:2]
    *_, line, model, view = capsys.readouterr().out.splitlines()  # and none is the best
    assert line.startswith("iteration 2/2") and model.endswith("/final") and "/view.py " in view


@each_script("ppo_llm", "grpo_llm")
def test_the_first_64_responses_are_kept_token_by_token(algo, toy_run, spy):
    """In whole groups: as a viewer shows them, who looks for a mask that is one off."""
    batches, passes = spy(algo, "to_batch"), spy(algo, "forward_all")
    rewarded = spy(algo, "compute_scores")
    grpo = "grpo" in algo.__name__
    sizes = {"batch_size": 22, "group_size": 3} if grpo else {"batch_size": 66}
    run_dir, _ = toy_run(total_iterations=1, minibatch_size=66, **sizes)
    (_, (tokens, mask, _, lengths)), (_, (logprobs, *_)) = batches[0], passes[0]
    ((_, _, _, responses), results) = rewarded[0]
    kept = 63 if grpo else 64
    expected = {str(tokens[i, : lengths[i]].tolist()): i for i in range(kept)}
    rows = [row for row in read_rows(run_dir / "completions" / "step_000001.jsonl") if "batch" in row]
    assert len(rows) == kept
    for row in rows:
        batch, i = row["batch"], expected.pop(str(row["batch"]["tokens"]))
        columns = {"tokens", "mask", "logprobs", "ratio", "kl", "advantages"} | ({"values"} if not grpo else set())
        assert batch.keys() == columns and {len(column) for column in batch.values()} == {lengths[i]}
        assert batch["mask"] == mask[i, : lengths[i]].tolist()
        sampled = [batch["tokens"][t + 1] for t, acted in enumerate(batch["mask"]) if acted]
        assert sampled == responses[i].ids and row["length"] == len(sampled)
        assert row["truncated"] == responses[i].truncated and row["score"] == results[i]["score"]
        assert batch["logprobs"] == pytest.approx([*map(float, logprobs[i, : lengths[i]])], abs=1e-6)
        assert all(any(batch[name]) for name in ("ratio", "advantages")) and batch["kl"][-1] == 0
    assert not expected


@pytest.fixture
def scripted(algo, monkeypatch):
    """scripted([0.3, 0.9]) -> the greedy scores that the next evaluations find, whatever the model answers."""
    real = algo.evaluate

    def install(found):
        scores = iter(found)
        monkeypatch.setattr(algo, "evaluate", lambda *args: real(*args) | {"eval/score": next(scores)})

    return install


BEST = {"eval_rows": 2, "eval_every": 1, "lr": 1e-2}


def test_the_best_is_kept(toy_run, algo, spy, scripted, capsys, toy_reward, toy_data, tmp_path):
    """Better than before training and than all since by this reward, also before a restart. A tie is no improvement."""
    flags = BEST | {"run_name": "mine", "resume": True, "save_every": 1}
    saves = spy(algo, "save_models", lambda path, *rest: (path.name, len(read_metrics(path.parent))))
    removals = spy(algo.shutil, "rmtree", lambda folder, **options: sorted(p.name for p in folder.parent.glob("[bu]*")))
    scripted([0.3, 0.2, 0.6])
    run_dir, _ = toy_run(total_iterations=2, **flags)
    assert saves == [("best", 2), ("final", 3)]  # when so many iterations had been logged
    best = (run_dir / "best" / "model.safetensors").read_bytes()
    (run_dir / "best" / "left").write_text("by a run that got further, and was killed")
    scripted([0.5, 0.6])
    toy_run(total_iterations=4, **flags)
    assert (run_dir / "best" / "model.safetensors").read_bytes() == best
    said = "the best greedy score was that of iteration {}: " + f"{run_dir}/best\n"
    assert capsys.readouterr().out.count(said.format(2)) == 2
    removals.clear()  # until the new one is complete, the one before stays
    scripted([0.7, 0.65])
    toy_run(total_iterations=6, **flags)
    assert removals[:2] == [["best"], ["best", "unfinished"]] and not list(run_dir.rglob("unfinished"))
    last, final = ((run_dir / name / "model.safetensors").read_bytes() for name in ("best", "final"))
    assert len({best, last, final}) == 3 and not (run_dir / "best" / "left").exists()
    assert said.format(5) in capsys.readouterr().out
    flags |= {"reward": toy_reward.replace("toy_r", "./toy_r"), "dataset": f"{toy_data}/."}  # the same, from elsewhere
    scripted([0.6])
    toy_run(total_iterations=7, **flags)
    # With a reward or test data of other names the run is evaluated before it goes on, and its model is to be beaten.
    others = {"reward": f"{tmp_path}/other_reward.py:early", "eval_dataset": str(tmp_path / "other")}
    shutil.copy(toy_reward.rpartition(":")[0], tmp_path / "other_reward.py")
    (tmp_path / "other").symlink_to(toy_data)
    for iteration, name in enumerate(others, 8):
        flags[name] = others[name]
        best = (run_dir / "best" / "model.safetensors").read_bytes()
        scripted([0.4, 0.3])
        toy_run(total_iterations=2 * iteration - 8, **flags)
        assert (run_dir / "best" / "model.safetensors").read_bytes() == best
        scripted([0.5])
        toy_run(total_iterations=2 * iteration - 7, **flags)
        assert said.format(2 * iteration - 7) in capsys.readouterr().out


def test_credit_lost_off_the_end_is_seen(algo, toy_run, monkeypatch):
    """The score one position too late: GAE masks it, and so must the metric."""
    real = algo.place_scores
    monkeypatch.setattr(algo, "place_scores", lambda *args: real(*args).roll(1, 1))
    _, (_, m) = toy_run(total_iterations=1)
    assert m["reward/mean"] > 0 and m["reward/total_mean"] == 0


def mislead(algo, monkeypatch, wrong, first=1):
    """From this batch on, `wrong` changes the mask and the sampler's log-probs."""
    batches, real = [], algo.to_batch

    def to_batch(*args):
        batches.append(args)
        tokens, mask, logprobs, lengths = real(*args)
        if len(batches) >= first:
            mask, logprobs = wrong(mask, logprobs)
        return tokens, mask, logprobs, lengths

    monkeypatch.setattr(algo, "to_batch", to_batch)


def shifted(mask, logprobs):
    return mask.roll(1, 1), logprobs.roll(1, 1)


def no_numbers(mask, logprobs):
    return mask, logprobs * math.nan


GUARD = "sampler and training pass have a KL of "


def refused(run, *words):
    """In one sentence with these words."""
    sentence = refusal(run)
    assert "\n" not in sentence and all(word in sentence for word in words), sentence


@pytest.mark.parametrize(
    "wrong, first, words",
    [
        (shifted, 1, ()),
        (no_numbers, 2, ("a KL of nan (limit ",)),  # not above any limit, but refused, too
    ],
)
def test_a_sampler_that_disagrees_ends_the_run_before_a_step(
    algo, toy_run, monkeypatch, tmp_path, spy, wrong, first, words
):
    steps = spy(torch.optim.AdamW, "step", lambda optimizer: optimizer)
    mislead(algo, monkeypatch, wrong, first)
    refused(toy_run, f"iteration {first}: {GUARD}", "wrong mask, weights or sampler (notes, 12.6)", *words)
    assert len(read_metrics(tmp_path / "runs" / "run0")) == first
    assert len(steps) == (first - 1) * 2 * len({*steps})  # two minibatches


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("dtype", KL_LIMITS)
def test_how_far_the_sampler_may_be_off(algo, toy_run, monkeypatch, dtype, alone):
    """In all responses by as much, or in one of 64, of ten tokens. A sum is divided by 16 tokens at least."""

    def off(share):
        def wrong(mask, logprobs):
            lengths = mask.sum(1)
            rows = (lengths == 10).cumsum(0) * (lengths == 10) == 1 if alone else lengths > 0
            k3 = share * KL_LIMITS[dtype] / 0.7 * 16 / (10 / 40 if alone else lengths.float().mean().item())
            x = math.sqrt(2 * k3)
            for _ in range(20):  # Newton: exp(x) - 1 - x = k3
                x -= (math.expm1(x) - x - k3) / math.expm1(x)
            return mask, torch.where(mask & rows[:, None], logprobs - x, logprobs)

        with monkeypatch.context() as patch:
            mislead(algo, patch, wrong)
            flags = {"batch_size": 64, "minibatch_size": 64, "dtype": dtype, "temperature": 0.7}
            return toy_run(total_iterations=1, **flags)[1][1]

    if dtype == "float32":  # has one limit for all temperatures
        monkeypatch.setitem(KL_LIMITS, dtype, 0.7 * KL_LIMITS[dtype])
    expected = 0.8 * KL_LIMITS[dtype] / 0.7 * (40 / 64 if alone else 1)
    assert off(0.8)["rollout/kl"] == pytest.approx(expected, rel=1e-3 if dtype == "float32" else 0.1)
    refused(lambda: off(1.25), f"iteration 1: {GUARD}")


@each_script("ppo_llm")
def test_while_the_critic_warms_up_the_policy_is_logged_unchanged(algo, toy_run, monkeypatch):
    """Its sampler is compared with the training pass all the same. What only its steps compute is left out."""
    _, (_, warm, trained) = toy_run(critic_warmup_iterations=1)
    assert {*trained} - {*warm} == {"actor/loss", "actor/grad_norm", "actor/lr"}
    assert warm["actor/ratio_mean"] == warm["actor/ratio_max"] == 1 and warm["actor/approx_kl"] == 0
    assert warm["rollout/kl"] < 1e-11 and warm["critic/grad_norm"] > 0 and trained["actor/grad_norm"] > 0
    mislead(algo, monkeypatch, shifted)
    refused(lambda: toy_run(critic_warmup_iterations=1), f"iteration 1: {GUARD}")


@each_script()
def test_training_and_evaluation_share_one_rollout(algo, toy_run, monkeypatch):
    """After the answer the environment says something, which is no action."""
    plain = toy_run(total_iterations=1)[1][1]
    real = algo.generate

    def with_environment(*args):
        return [algo.Response(r.ids + [5, 6, 7], r.logprobs + [algo.NOT_SAMPLED] * 3, r.truncated) for r in real(*args)]

    monkeypatch.setattr(algo, "generate", with_environment)
    run_dir, metrics = toy_run(eval_rows=2)
    assert [m["step"] for m in metrics if "eval/score" in m] == [0, 2]  # eval_every is 0: before and after alone
    for kind in ("eval_000000", "eval_sampled_000002", "step_000002"):
        rows = read_rows(run_dir / "completions" / f"{kind}.jsonl")
        assert all(row["response"].endswith("cde") for row in rows)  # ids 5, 6, 7
    assert metrics[1]["rollout/kl"] < 1e-11
    assert metrics[1]["response/length_mean"] == plain["response/length_mean"]


SIZES = "batch_size group_size minibatch_size ppo_epochs microbatch_tokens rollout_batch_size max_response_length"
SIZES = SIZES.split()


def numbers_of(algo):
    """{flag that is a number: its least value}; the entropy bonus may be a penalty, too."""
    numbers = [field.name for field in fields(algo.Args) if field.type in (int, float)]
    numbers.remove("entropy_coef")
    return dict.fromkeys(numbers, 0) | dict.fromkeys({*SIZES} & {*numbers}, 1)


@each_script("ppo_llm", "grpo_llm")
def test_a_number_below_its_least_value(algo, toy_run, monkeypatch, tmp_path):
    """Or one that is none. It is refused before a model is loaded or a folder made: of a size 0, too."""
    monkeypatch.setattr(algo, "load_model", lambda *args, **kwargs: pytest.fail("a model was loaded"))
    numbers = numbers_of(algo)
    assert len(numbers) > 20 and {"lr", "max_grad_norm", "keep_checkpoints", "lora_rank"} < numbers.keys()
    for name, least in numbers.items():
        for value in (-1, math.nan, 0) if least else (-1, math.nan):
            sentence = f"error: --{name} must be at least {least}, but is {value}"
            assert refusal(lambda n=name, v=value: toy_run(**{n: v})) == sentence
    assert [*numbers.values()].count(1) == len(SIZES) - ("group_size" not in numbers) and not [*tmp_path.iterdir()]


@each_script(*PPO)
def test_flags_that_do_not_go_together(script, toy_run, monkeypatch, tmp_path):
    """Or with what is installed: nothing has been made."""
    refused(lambda: toy_run(batch_size=10), "--batch-size", "--minibatch-size", "1 processes")
    refused(lambda: toy_run(minibatch_size=3), "--batch-size", "--minibatch-size", "1 processes")
    if script.stem == "ppo_llm_fsdp":
        refused(lambda: toy_run(shard_group_size=3), "error: --shard-group-size 3 must divide the 1 processes")
    monkeypatch.setattr(tracking, "_available_trackers", ["tensorboard"])
    refused(lambda: toy_run(track="wandb"), "--track wandb needs a package", "pip install wandb")
    assert list(tmp_path.iterdir()) == []


def test_wandb_gets_a_run_and_its_metrics(toy_run, spy, monkeypatch, tmp_path):
    """By the name of the folder, with the flags. Offline."""
    wandb = pytest.importorskip("wandb")
    for name, value in {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    started = spy(wandb, "init")
    logged = spy(wandb.Run, "log", lambda run, values, step=None: (step, values))
    run_dir, metrics = toy_run(track="wandb")
    ((_, run),) = started
    assert run.project == "ppo_llm" and run.name == run_dir.name and run.config["lr"] == 1e-3
    # The flags as text come first.
    assert logged[1:] == [(m["step"], {k: x for k, x in m.items() if k != "step"}) for m in metrics]
    assert [*tmp_path.glob("wandb/offline-run-*/*.wandb")]


def test_models_that_cannot_be_trained(toy_run, tmp_path):
    """A classifier; weights that would be dropped; an untied head."""
    folder = make_model(tmp_path / "judge", auto_class=AutoModelForSequenceClassification, num_labels=1)
    sentence = f"{folder} cannot be loaded as AutoModelForCausalLM: it has no weights lm_head.weight"
    refused(lambda: toy_run(model=folder), sentence)
    folder = make_model(tmp_path / "biased")
    bias = {"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}
    save_file(load_file(f"{folder}/model.safetensors") | bias, f"{folder}/model.safetensors", {"format": "pt"})
    refused(
        lambda: toy_run(model=folder), f"{folder} has weights that its config has no place for, such as {min(bias)}"
    )
    folder = make_model(tmp_path / "untied", tie_word_embeddings=False)
    config = Path(folder, "config.json")
    config.write_text(config.read_text().replace('"tie_word_embeddings": false', '"tie_word_embeddings": true'))
    refused(lambda: toy_run(model=folder), f"{folder} has a head of its own, but its config says tie_word_embeddings")
    assert not (tmp_path / "runs").exists()


@each_script(*PPO)
def test_a_gradient_that_is_not_finite(algo, toy_run, spy, monkeypatch):
    steps = spy(torch.optim.AdamW, "step")

    def spoilt(policy, *args, real=algo.Policy.forward):
        return real(policy, *args) * (math.nan if len(steps) == 3 and torch.is_grad_enabled() else 1)

    monkeypatch.setattr(algo.Policy, "forward", spoilt)
    refused(lambda: toy_run(ppo_epochs=2), "error: iteration 1: the gradient norm of the policy is nan")
    assert len(steps) == 3


def test_prompts_that_do_not_fit_the_positions_are_refused(toy_run):
    """The longest prompt kept and the longest response, together: exactly as many as there are will do."""
    sentence = refusal(lambda: toy_run(total_iterations=0, max_response_length=256))
    longest = int(re.search(r"a prompt of (\d+) tokens and .* the 256 positions", sentence)[1])
    refusal(lambda: toy_run(total_iterations=0, max_response_length=257 - longest))
    run_dir, _ = toy_run(total_iterations=0, max_response_length=256 - longest)
    assert not (run_dir / "final").exists()  # without training there is no trained model
