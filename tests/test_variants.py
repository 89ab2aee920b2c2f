"""Variants: every patch applies as it stands, is linted, trains, and does what its head says."""

import json
import re
import statistics
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, forked, make_model, read_metrics, toy_rows, untimed, write_rows
from ranks import load_script

sys.path.insert(0, str(ROOT / "notes"))
sys.path.insert(0, str(ROOT / "notes" / "variants"))
import variants

grpo = load_script(ROOT / "grpo_llm.py")
NAMES = variants.names()
ON_PPO = [name for name in NAMES if variants.read_patch(name)[1] == "ppo_llm.py"]
LONG = {"shared_prompt": (100, 10), "shared_critic": (140, 18)}  # those that may be longer: lines and hunks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Every variant as a whole file, and a small model with data."""
    folder = tmp_path_factory.mktemp("variants")
    for name in NAMES:
        (folder / f"{name}_llm.py").write_text(variants.patched(name))
    make_model(folder / "model", initializer_range=0.1)
    write_rows(folder / "train.jsonl", toy_rows(24))
    write_rows(folder / "test.jsonl", toy_rows(5, 100))
    (folder / "toy.py").write_text(
        "def early(prompts, responses, answers):\n"
        "    return [sum(c < 'm' for c in r) / max(1, len(r)) + 0.01 * len(r) for r in responses]\n\n\n"
        "def binary(prompts, responses, answers):\n"
        "    return [float(bool(r) and r[0] < '5') for r in responses]\n\n\n"
        "def pieces(prompts, responses, answers):\n"
        "    return [[(i + 1, 0.1) for i, c in enumerate(r) if c < 'm'] for r in responses]\n"
    )
    return folder


@pytest.fixture(scope="module")
def variant(folder):
    """variant(name): the patched script as a module."""
    return lambda name: load_script(folder / f"{name}_llm.py")


@pytest.fixture
def train(folder, variant, tmp_path):
    """train(name, **flags): metrics of a run on one process; its folder is tmp_path/NUMBER."""
    from accelerate.state import AcceleratorState

    def run(name, **changes):
        AcceleratorState._reset_state(True)
        flags = flags_of(name, folder) | {"output_dir": str(tmp_path), "run_name": str(len(list(tmp_path.iterdir())))}
        algo = variant(name)
        return read_metrics(algo.main(algo.Args(**flags | changes)))

    return run


def flags_of(name, folder):
    on_ppo = name in ON_PPO
    flags = {"model": str(folder / "model"), "dataset": str(folder / "train.jsonl"), "track": "none", "lr": 1e-3}
    flags |= {"reward": f"{folder}/toy.py:early", "microbatch_tokens": 128, "max_response_length": 12}
    flags |= {"total_iterations": 3, "eval_every": 0, "eval_rows": 0, "save_every": 0, "minibatch_size": 8}
    flags |= {"batch_size": 8, "critic_lr": 1e-3} if on_ppo else {"batch_size": 4, "group_size": 4}
    return flags | ({"critic_warmup_iterations": 1} if name == "vc_ppo" else {})


# ------------------------------------------------------------------------------------------------- patches as patches


@pytest.mark.parametrize("name", NAMES)
def test_a_patch_is_of_todays_script(name):
    """Made of the very file that is there: whoever edits a script rebases."""
    head, script, blob, _ = variants.read_patch(name)
    assert blob == variants.git("hash-object", ROOT / script).stdout.strip(), "python notes/variants.py rebase"
    assert re.match(r"What: .+\nIdea: .+\nRun:  .+\nMeasured: ", re.sub(r"\n +", " ", head)), head
    assert "(the change" not in head and "(numbers" not in head
    removed, added, hunks = variants.changes(name)
    most_lines, most_hunks = LONG.get(name, (60, 10))
    assert 5 <= removed + added <= most_lines and hunks <= most_hunks


def test_patches_are_small():
    sizes = [variants.changes(name) for name in NAMES]
    assert statistics.median(removed + added for removed, added, _ in sizes) <= 28
    assert statistics.median(hunks for *_, hunks in sizes) <= 5


def test_variants_are_linted_and_formatted(folder):
    files = [str(folder / f"{name}_llm.py") for name in NAMES]
    for words in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *words, "--config", str(ROOT / "pyproject.toml"), *files],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout


def test_a_stale_patch_names_its_hunk():
    script = variants.read_patch("cispo")[1]
    changed = (ROOT / script).read_text().replace("unclipped = -advantages", "unclipped  = -advantages")
    with pytest.raises(SystemExit, match=rf"(?s)cispo.patch does not fit {script}.*patch failed: {script}:\d+"):
        variants.patched("cispo", changed)


def test_a_changed_script_is_merged_three_ways(monkeypatch, tmp_path, capsys):
    """`rebase` and `make` in a small repository: a change elsewhere passes, one of the same place is a person's."""
    (tmp_path / "notes" / "variants").mkdir(parents=True)
    monkeypatch.setattr(variants, "ROOT", tmp_path)
    monkeypatch.setattr(variants, "FOLDER", tmp_path / "notes" / "variants")
    monkeypatch.chdir(tmp_path)
    lines = [f"line_{i} = {i}\n" for i in range(20)]
    script = tmp_path / "grpo_llm.py"

    def commit(**changed):
        for place, text in changed.items():
            lines[int(place[1:])] = text
        script.write_text("".join(lines))
        for words in (["init", "-q"], ["add", "grpo_llm.py"], ["-c", "user.name=a", "-c", "user.email=a", "commit"]):
            variants.git(*words, *(["-qm", "x"] if "commit" in words else []), cwd=tmp_path)

    commit()
    variants.make("mine", "".join(lines).replace("line_10 = 10", "line_10 = -10"), "grpo_llm.py", "What: mine\n\n")
    assert variants.changes("mine") == (1, 1, 1)
    commit(p9="line_9 = 'other'\n", p0="line_0 = 'first'\n")
    with pytest.raises(SystemExit, match=r"mine\.patch does not fit"):
        variants.patched("mine")
    with pytest.raises(SystemExit) as conflict:  # neighbouring lines are a conflict, too
        variants.rebase()
    assert "mine_llm.py has 1 conflict" in str(conflict.value) and "<<<<<<<" in (tmp_path / "mine_llm.py").read_text()
    commit(p9="line_9 = 9\n")
    with pytest.raises(SystemExit) as done:
        variants.rebase()
    assert done.value.code is None
    text = variants.patched("mine")
    assert "line_10 = -10" in text and "line_0 = 'first'" in text
    assert variants.read_patch("mine")[0] == "What: mine\n\n"


# ------------------------------------------------------------------------------------------------------ they train


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_two_processes_train(name, folder, tmp_path):
    flags = flags_of(name, folder) | {"output_dir": tmp_path, "run_name": "run", "eval_rows": 3}
    code, console = forked(folder / f"{name}_llm.py", flags)
    assert code == 0 and "2 process(es)" in console, console
    metrics = read_metrics(tmp_path / "run")
    assert len(metrics) == 4 and all(torch.tensor(list(m.values())).isfinite().all() for m in metrics)
    trained = [m for m in metrics if "rollout/logprob_diff" in m]
    assert len(trained) >= 2 and all(m["rollout/logprob_diff"] < 1e-5 for m in trained)


COMPOSED = [(name, "ppo_llm_fsdp") for name in ON_PPO] + [
    (name, "grpo_llm_fsdp") for name in NAMES if name not in ON_PPO
]


@pytest.fixture(scope="module")
def sharded(folder):
    parts = [str(ROOT / f"{name}.py") for name in ("grpo_llm", "ppo_llm", "ppo_llm_fsdp")]
    (folder / "grpo_llm_fsdp.py").write_text(
        subprocess.run(["git", "merge-file", "-p", *parts], capture_output=True, text=True, check=True).stdout
    )
    (folder / "ppo_llm_fsdp.py").write_text((ROOT / "ppo_llm_fsdp.py").read_text())
    return folder


def shard(name, on, sharded):
    base = (ROOT / variants.read_patch(name)[1]).read_text()
    return variants.merged((sharded / f"{on}.py").read_text(), base, variants.patched(name))


@pytest.mark.parametrize("name, on", COMPOSED)
def test_a_variant_can_be_sharded(name, on, sharded):
    """Without a change, by a merge. Those that cannot are named here."""
    text, conflicts = shard(name, on, sharded)
    assert conflicts == 0
    compile(text, name, "exec")


@pytest.mark.slow
@pytest.mark.parametrize("name, on", [("cispo", "grpo_llm_fsdp"), ("process_reward", "ppo_llm_fsdp")])
def test_a_sharded_variant_gives_its_metrics(name, on, sharded, train, tmp_path):
    (sharded / f"{name}_{on}.py").write_text(shard(name, on, sharded)[0])
    reward = {"reward": f"{sharded}/toy.py:pieces"} if name == "process_reward" else {}
    flags = flags_of(name, sharded) | {"output_dir": tmp_path, "run_name": "sharded"} | reward
    code, console = forked(sharded / f"{name}_{on}.py", flags)
    assert code == 0, console
    for a, b in zip(untimed(read_metrics(tmp_path / "sharded")), untimed(train(name, **reward)), strict=True):
        for metric in a.keys() - {"rollout/logprob_diff"}:
            assert a[metric] == pytest.approx(b[metric], rel=2e-3, abs=2e-5), metric


# ---------------------------------------------------------------------------------------- what each one says it does


def example(seed=0, rows=4, width=6):
    stream = torch.Generator().manual_seed(seed)
    old = -torch.rand(rows, width, generator=stream, dtype=torch.float64)
    new = (old + 0.5 * torch.randn(rows, width, generator=stream, dtype=torch.float64)).requires_grad_()
    advantages = torch.randn(rows, 1, generator=stream, dtype=torch.float64).expand(rows, width)
    mask = torch.arange(width) < torch.tensor([6, 3, 5, 1])[:, None]
    return new, old, advantages, mask


def test_cispo_has_the_papers_gradient(variant, monkeypatch):
    monkeypatch.setattr(grpo, "policy_loss", grpo.policy_loss)  # is put back: the file replaces it where it is imported
    monkeypatch.delitem(sys.modules, "cispo", raising=False)
    import cispo

    new, old, advantages, _ = example()
    for algo in (variant("cispo"), cispo):
        losses, cut = algo.policy_loss(new, old, advantages, 0.3, 0.4)
        (found,) = torch.autograd.grad(losses.sum(), new)
        ratio = (new - old).exp().detach()
        assert torch.allclose(found, -advantages * ratio.clamp(0.7, 1.4))  # cut, never gone
        assert torch.equal(cut, (ratio < 0.7) | (ratio > 1.4)) and 0 < cut.sum() < cut.numel()
    assert grpo.policy_loss is cispo.policy_loss


def test_gspo_has_the_papers_gradient(variant):
    """2507.18071, eq. 5 and 7, written out response by response."""
    algo, (new, old, advantages, mask) = variant("gspo"), example(seed=2)
    losses, clipped = algo.policy_loss(new, old, advantages, mask, 0.02, 0.03)
    loss = algo.aggregate(losses, mask, "seq-mean-token-mean", int(mask.sum()), 4, 6)
    (found,) = torch.autograd.grad(loss, new)
    objective, outside = 0, []
    for b in range(4):
        ratio = ((new - old)[b][mask[b]].sum() / mask[b].sum()).exp()
        a = advantages[b, 0]
        bounded = ratio.clamp(0.98, 1.03) * a
        objective = objective + torch.minimum(ratio * a, bounded) / 4
        outside.append(bool(ratio * a > bounded))
    (expected,) = torch.autograd.grad(-objective, new)
    assert torch.allclose(found, expected, atol=1e-12) and expected.abs().max() > 0.01
    assert clipped.any(1).tolist() == outside and 0 < sum(outside) < 4


def test_plain_pg_is_the_policy_gradient(variant):
    new, _, advantages, _ = example()
    (found,) = torch.autograd.grad(variant("plain_pg").policy_loss(new, advantages).sum(), new)
    assert torch.equal(found, -advantages)


def test_vc_ppo_has_two_lambdas(train, variant, monkeypatch):
    algo, calls = variant("vc_ppo"), []
    real = algo.gae
    monkeypatch.setattr(algo, "gae", lambda *args: calls.append((args, real(*args))) or calls[-1][1])
    metrics = train("vc_ppo", total_iterations=2, kl_reward_coef=0.0)
    assert [args[4] for args, _ in calls] == [0.95, 1.0] * 2
    assert "actor/loss" not in metrics[1] and "actor/loss" in metrics[2]  # pretraining of the values, then both
    (rewards, _, mask, *_), (_, returns) = calls[1]
    totals = torch.where(mask, rewards, 0).sum(1, keepdim=True)
    assert torch.allclose(returns[mask], totals.expand_as(mask)[mask], atol=1e-5)  # Monte Carlo: the score everywhere


def test_credit_goes_to_the_token_that_ends_the_piece(variant):
    credit = variant("process_reward").credit
    texts = ["ab", "abc", "abc", "abcde", "abcde"]  # the third token is half a character or nothing, the last the EOS
    assert credit(texts, [(2, 1.0), (3, 2.0), (4, 0.5), (5, 0.25)]) == [1.0, 2.0, 0.0, 0.75, 0.0]
    assert credit(texts, [(1, 1.0), (0, 2.0)]) == [3.0, 0, 0, 0, 0] and credit(texts, []) == [0.0] * 5
    assert credit(["a\ufffd", "a\ufffd", "aé"], [(2, 1.0)]) == [0, 0, 1.0]  # a character of three tokens
    assert credit(texts, 3) == [0, 0, 0, 0, 3.0]  # a number is the last token's, as ever
    with pytest.raises(SystemExit):
        credit(texts, [(6, 1.0)])


def test_process_rewards_stand_at_their_tokens(variant, train, folder, monkeypatch):
    algo, calls = variant("process_reward"), []
    real, real_batch, batches = algo.gae, algo.to_batch, []
    monkeypatch.setattr(algo, "gae", lambda *args: calls.append(args) or real(*args))
    monkeypatch.setattr(algo, "to_batch", lambda *args: batches.append(args) or real_batch(*args))
    flags = {"total_iterations": 1, "kl_reward_coef": 0.0, "missing_eos_penalty": 0.5}
    metrics = train("process_reward", reward=f"{folder}/toy.py:pieces", **flags)
    rewards, _, mask, *_ = calls[0]
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    for row, valid, response in zip(rewards, mask, batches[0][1]):
        expected = [0.1 * (i > 2 and tokenizer.decode([i]) < "m") for i in response.ids]
        expected[-1] -= 0.5 * response.truncated
        assert torch.allclose(row[valid], torch.tensor(expected), atol=1e-6)
    assert metrics[1]["reward/total_mean"] == pytest.approx(metrics[1]["reward/mean"], abs=1e-6)


def test_a_number_is_a_number_with_process_reward(train, folder):
    plain, (name, changed) = load_script(ROOT / "ppo_llm.py"), ("process_reward", train("process_reward"))
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    flags = flags_of(name, folder) | {"output_dir": str(folder), "run_name": "plain"}
    assert untimed(changed) == untimed(read_metrics(plain.main(plain.Args(**flags))))


def test_dapo_trains_on_mixed_groups_only(variant, train, folder, monkeypatch):
    algo, batches = variant("dapo"), []
    real = algo.group_advantages
    monkeypatch.setattr(algo, "group_advantages", lambda *args: batches.append(args[0].clone()) or real(*args))
    metrics = train("dapo", reward=f"{folder}/toy.py:binary", max_draws=8, group_size=4, missing_eos_penalty=0.3)
    for scores, m in zip(batches, metrics[1:], strict=True):
        assert len(scores) == 16 == 4 * m["group/trained"] and 0 < m["reward/sampled_mean"] < 1
    assert max(m["group/generated"] for m in metrics[1:]) > 4 and max(m["group/zero_std_frac"] for m in metrics[1:]) > 0
    # Filtered before the penalties: without them every group has both scores.
    assert all({round(x, 1) % 1 for x in scores.tolist()} <= {0.0, 0.7} for scores in batches)


def test_dapo_without_a_group_takes_no_step(variant, train, folder, monkeypatch):
    steps, real = [], torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, *args: steps.append(1) or real(self, *args))
    (folder / "constant.py").write_text("def reward(prompts, responses, answers):\n    return [1.0] * len(prompts)\n")
    # With a penalty that differs, which the filter does not see, and a KL loss that would train.
    flags = {"missing_eos_penalty": 0.5, "kl_loss_coef": 0.1, "max_draws": 2}
    metrics = train("dapo", reward=f"{folder}/constant.py:reward", **flags)
    assert not steps and [m["step"] for m in metrics] == [0, 1, 2, 3]
    for m in metrics[1:]:
        assert m["group/trained"] == 0 and m["group/generated"] == 8 and m["group/zero_std_frac"] == 1
        assert m["actor/loss"] == m["actor/grad_norm"] == 0 and m["reward/sampled_mean"] == 1


def test_dapos_length_punishment(variant, train, monkeypatch):
    algo = variant("dapo")

    def scores(buffer, limit):
        found, real = [], algo.group_advantages
        with monkeypatch.context() as patch:
            patch.setattr(algo, "group_advantages", lambda *args: found.append(args[0].clone()) or real(*args))
            real_batch, lengths = algo.to_batch, []
            patch.setattr(algo, "to_batch", lambda rows, r, d: lengths.append(r) or real_batch(rows, r, d))
            train("dapo", overlong_buffer=buffer, max_response_length=limit, total_iterations=1)
        return found[0], torch.tensor([len(x.ids) for x in lengths[0]])

    (off, lengths), (on, same) = scores(0, 40), scores(25, 40)
    assert torch.equal(lengths, same) and lengths.max() == 40 and len(lengths.unique()) >= 3
    assert torch.allclose(off - on, ((lengths - 15) / 25).clamp(0, 1), atol=1e-6)  # eq. 13
    assert off.min() >= 0  # nothing is subtracted where it is off


@pytest.mark.slow
def test_dapo_by_two_is_dapo_by_one(train, folder, tmp_path):
    flags = {"reward": f"{folder}/toy.py:binary", "max_draws": 8, "minibatch_size": 8}
    one = untimed(train("dapo", **flags))
    code, console = forked(
        folder / "dapo_llm.py", flags_of("dapo", folder) | flags | {"output_dir": tmp_path, "run_name": "two"}
    )
    assert code == 0, console
    for a, b in zip(one, untimed(read_metrics(tmp_path / "two")), strict=True):
        for metric in a.keys() - {"rollout/logprob_diff"}:
            assert a[metric] == pytest.approx(b[metric], rel=2e-3, abs=2e-5), metric


def test_two_turns_train_on_what_was_sampled(variant, train, folder, monkeypatch):
    algo, batches, passes = variant("two_turns"), [], []
    real, real_pass = algo.to_batch, algo.forward_all
    monkeypatch.setattr(
        algo, "to_batch", lambda *args: batches.append((args[0], args[1], real(*args))) or batches[-1][2]
    )
    monkeypatch.setattr(algo, "forward_all", lambda *args: passes.append(args) or real_pass(*args))
    metrics = train("two_turns", reward=f"{folder}/toy.py:binary", max_response_length=16, total_iterations=2)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    turn = tokenizer("\nThat is wrong, try again.\n", add_special_tokens=False)["input_ids"]
    rows, responses, (tokens, mask, _, _) = batches[0]
    two = 0
    for row, response, valid in zip(rows, responses, mask):
        inserted = [i for i, x in enumerate(response.logprobs) if x == algo.NOT_SAMPLED]
        prompt = len(row["input_ids"])
        assert [i for i in range(len(response.ids)) if not valid[prompt - 1 + i]] == inserted
        assert valid.sum() == len(response.ids) - len(inserted)
        if inserted:
            two += 1
            assert [response.ids[i] for i in inserted] == turn + row["input_ids"] and 1 <= inserted[0] <= 8
        first = tokenizer.decode(response.ids[: inserted[0] if inserted else None], skip_special_tokens=True)
        assert bool(inserted) == (not first or first[0] >= "5")  # asked again if wrong
    assert 0 < two < len(rows) and metrics[1]["response/two_turns_frac"] == two / len(rows)
    assert all(m["rollout/logprob_diff"] < 1e-5 for m in metrics[1:])
    # Inserted tokens get no gradient: their log-probs are no part of the loss.
    policy = passes[0][0]
    embeddings = []
    hook = policy.register_forward_hook(lambda _, args, output: embeddings.append(output[0]))
    logprobs, _ = policy(tokens, mask)
    hook.remove()
    assert (logprobs[~mask] == 0).all() and (logprobs[mask] != 0).all()


def test_replay_asks_again_and_resumes(train, folder, tmp_path, variant, monkeypatch):
    algo, asked = variant("replay"), []
    real = algo.compute_scores
    monkeypatch.setattr(
        algo,
        "compute_scores",
        lambda f, t, rows, r: (asked.append([row["prompt"] for row in rows][::4]), real(f, t, rows, r))[1],
    )
    flags = {"reward": f"{folder}/toy.py:binary", "total_iterations": 6, "save_every": 3, "batch_size": 8}
    whole = train("replay", **flags, run_name="whole")
    assert any(m["group/replayed"] for m in whole[1:]) and any(m["group/failed"] for m in whole[1:])
    for before, after, m in zip(asked, asked[1:], whole[2:]):
        again = int(m["group/replayed"])
        assert again <= 4 and set(after[:again]) <= set(before)
    train("replay", **flags | {"total_iterations": 3}, run_name="part")
    resumed = train("replay", **flags, run_name="part", resume="auto")
    assert untimed(resumed) == untimed(whole)


def test_distillation_rewards_each_token_with_the_teachers_surprise(variant, train, folder, monkeypatch):
    algo, calls = variant("distill"), []
    real = algo.kl_penalty
    monkeypatch.setattr(algo, "kl_penalty", lambda *args: calls.append((args, real(*args))) or calls[-1][1])
    teacher = make_model(folder / "teacher", seed=7, hidden_size=48, num_attention_heads=4, head_dim=12)
    used, real_loss = [], algo.policy_loss
    monkeypatch.setattr(algo, "policy_loss", lambda *args: used.append(args) or real_loss(*args))
    metrics = train("distill", ref_model=teacher, total_iterations=12, lr=1e-2)
    (student, other, kind), kl = calls[0]
    assert kind == "k1" and torch.equal(kl, student - other) and kl.abs().max() > 0.1
    _, _, advantages, *_ = used[0]
    assert set(advantages.flatten().tolist()) <= set((-kl).flatten().tolist())
    assert metrics[-1]["kl/mean"] < 0.8 * metrics[1]["kl/mean"]  # it learns from its own samples
    make_model(folder / "stranger", pad=None)
    path = folder / "stranger" / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()), ensure_ascii=True).replace('"q"', '"Q"'))
    with pytest.raises(SystemExit):
        train("distill", ref_model=str(folder / "stranger"))


def test_calculate(variant):
    calculate = variant("tool_call").calculate
    right = {"12*7": "84", "1/3": "0.333333", "+5": "5", "-(3+4)*2": "-14", " 3 + 4 ": "7", "1.5*2": "3", "6/-3": "-2"}
    assert {text: calculate(text) for text in right} == right
    wrong = "2**3", "9**9**9", "1//2", "2(3)", "...", "5..", "()", "", "1e9", "9" * 65, "2/0", "007", "1_0", "abs(1)"
    wrong += "__import__('os')", "1 if 1 else 2", "[1]", "1,2", "1<2", "~1", "٣+٤", "(" * 40 + "1"
    assert [calculate(text) for text in wrong] == ["error"] * len(wrong)
    assert calculate("*".join(["999999999"] * 6)).startswith("9999")


def scripted(algo, tokenizer, legs):
    """In place of `generate`: row by row what `legs` says, cut off at a stop id, as sampled with log-prob 0."""

    def generate(model, prompts, uniforms, eos_ids, temperature):
        responses = []
        for ids in prompts:
            text = tokenizer.decode(ids)
            rest = next(full[len(text) :] for full in legs if full.startswith(text))
            new = tokenizer(rest, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
            new = new[: uniforms.shape[1]]
            stop = next((i for i, token in enumerate(new) if token in eos_ids), len(new) - 1)
            responses.append(algo.Response(new[: stop + 1], [0.0] * (stop + 1), new[stop] not in eos_ids))
        return responses

    return generate


def test_a_tools_results_are_inserted(variant, train, folder, monkeypatch, tmp_path):
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    make_model(folder / "tool_model")
    path = folder / "tool_model" / "tokenizer.json"
    content = json.loads(path.read_text())
    for old, new in (("q", "<"), ("w", ">"), ("v", "*"), ("z", "/")):  # characters that calls need
        content["model"]["vocab"][new] = content["model"]["vocab"].pop(old)
    path.write_text(json.dumps(content))
    assert Tokenizer.from_file(str(path))
    tokenizer, algo = AutoTokenizer.from_pretrained(folder / "tool_model"), variant("tool_call")
    call, question = "<calc>12*7</calc>", "the sum of 3 and 4?"
    answers = [
        f"a{call}84b",
        f"{call}84{call}84{call}84{call}99",  # the fourth gets no answer
        "no <b> call",
        "x<calc>7**7</calc>error.",
    ]
    data = write_rows(tmp_path / "one.jsonl", [{"question": question, "answer": "#### 1"}])
    batches = []
    real = algo.to_batch
    monkeypatch.setattr(algo, "to_batch", lambda *args: batches.append(args[1]) or real(*args))
    monkeypatch.setattr(algo, "fail", lambda sentence: None)  # what is scripted is not what the model would sample
    for answer in answers:
        monkeypatch.setattr(algo, "generate", scripted(algo, tokenizer, [question + answer]))
        flags = {"model": str(folder / "tool_model"), "dataset": data, "total_iterations": 1}
        metrics = train("tool_call", **flags, max_response_length=80, batch_size=2)
        response = batches[-1][0]
        inserted = [x == algo.NOT_SAMPLED for x in response.logprobs]
        assert tokenizer.decode(response.ids[:-1]) == answer and not response.truncated
        parts = re.split(r"(?<=</calc>)(84|error)", answer) if "</calc>" in answer else [answer]
        expected = [i % 2 == 1 for i, part in enumerate(parts) for _ in part]
        assert inserted == [*expected, False]
        assert metrics[1]["response/calls_mean"] == len(parts) // 2
    monkeypatch.setattr(algo, "generate", scripted(algo, tokenizer, [question + answers[1]]))
    train("tool_call", **flags, max_response_length=30, batch_size=2)  # sampled tokens count, inserted ones do not
    response = batches[-1][0]
    assert response.truncated and sum(x != algo.NOT_SAMPLED for x in response.logprobs) == 30


def test_shared_prompts_give_the_same_gradients(variant, train, folder):
    from transformers import AutoModelForCausalLM

    stream = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 40, (n,), generator=stream).tolist() for n in (7, 7, 1, 12)]
    prompts[1][:6] = prompts[0][:6]  # equal but for the last token
    rows, responses = [], []
    for prompt in prompts:
        for length in (1, 5, 9, 3):
            rows.append({"input_ids": prompt})
            ids = torch.randint(3, 40, (length,), generator=stream).tolist()
            responses.append(grpo.Response(ids, [0.0] * length, False))
    tokens, mask, _, _ = grpo.to_batch(rows, responses, "cpu")
    found = []
    for algo in (grpo, variant("shared_prompt")):
        model = AutoModelForCausalLM.from_pretrained(folder / "model")
        policy = algo.Policy(model, 0.9)
        widths = []
        model.base_model.register_forward_pre_hook(lambda _, args, w=widths: w.append(args[0].shape))
        logprobs, entropy = policy(tokens, mask)
        weights = torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(1))
        ((logprobs * weights).sum() + entropy.sum()).backward()
        found.append((logprobs.detach(), entropy.detach(), *(p.grad for p in model.parameters()), widths[0]))
    *ours, narrow = found[1]
    *theirs, wide = found[0]
    assert wide == (16, 21) and narrow == (4, 12 + 14)  # the last token of a response is no state
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() <= 1e-6 * max(1, b.abs().max())
    for m in train("shared_prompt", lr=0.0)[1:]:
        assert m["rollout/logprob_diff"] < 1e-5 and m["actor/ratio_max"] == m["actor/ratio_mean"] == 1


def test_a_judge_reads_the_rubric(folder, monkeypatch):
    import judge
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setenv("JUDGE_MODEL", str(folder / "model"))
    monkeypatch.setenv("JUDGE_RUBRIC", "q {prompt} r {response} a {answer}?")
    monkeypatch.setenv("JUDGE_BATCH", "2")
    judge.load.cache_clear()
    found = judge.judge(["what", "is", "x"], ["one", "two two", "y"], ["1", "2", "3"])
    tokenizer, model = (
        AutoTokenizer.from_pretrained(folder / "model"),
        AutoModelForCausalLM.from_pretrained(folder / "model"),
    )
    for score, text in zip(found, ("q what r one a 1?", "q is r two two a 2?", "q x r y a 3?"), strict=True):
        asked = tokenizer(text)["input_ids"]
        yes = tokenizer(" Yes", add_special_tokens=False)["input_ids"]
        logprobs = model(torch.tensor([asked + yes])).logits[0].log_softmax(-1)
        expected = sum(logprobs[len(asked) - 1 + i, token].item() for i, token in enumerate(yes))
        assert score == pytest.approx(expected, abs=1e-4)
    monkeypatch.setenv("JUDGE_RUBRIC", "the same whatever was said")
    scores = torch.tensor(judge.judge(["a"] * 8, list("bcdefghi"), ["1"] * 8))
    assert grpo.group_advantages(scores, 4, "grpo").tolist() == [0] * 8
    judge.load.cache_clear()


def test_length_control(monkeypatch):
    import length_control

    monkeypatch.setenv("LENGTH_TARGET", "10")
    responses = ["#### 5" + " " * 4, "#### 5", "#### 4" + " " * 4, "#### 5" + " " * 94]
    assert length_control.length_control([""] * 4, responses, ["5"] * 4) == pytest.approx([1, 0.8, 0, 0.5])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["judge", "length_control", "cispo"])
def test_files_of_their_own_run_on_two_processes(name, folder, tmp_path):
    """With their defaults: the embedded model is the judge."""
    place = ROOT / "notes" / "variants" / f"{name}.py"
    flags = flags_of("replay", folder) | {"output_dir": tmp_path, "run_name": "run"}
    flags |= {} if name == "cispo" else {"reward": f"{place}:{name}"}
    code, console = forked(place if name == "cispo" else ROOT / "grpo_llm.py", flags)
    assert code == 0, console
    metrics = read_metrics(tmp_path / "run")
    assert len(metrics) == 4 and metrics[1]["reward/std"] > 0
    assert (tmp_path / "run" / (f"{name}.py" if name == "cispo" else "grpo_llm.py")).exists()


def test_the_list_of_variants_is_complete():
    """The README names each patch and file."""
    readme = (ROOT / "README.md").read_text()
    for path in sorted((ROOT / "notes" / "variants").iterdir()):
        assert path.suffix in (".patch", ".py") or path.name == "__pycache__"
        assert path.name == "__pycache__" or f"`{path.stem}`" in readme, path


# --- multi_reward

# Of four groups of four: the scores named `wide` and `narrow`. The first group differs in one alone, the second in the
# other alone, the third in both alike, the fourth in none.
WIDE = [5.0, 5.0, 5.0, 5.0] + [0.0, 90.0, 30.0, 0.0] + [0.0, 0.0, 1.0, 1.0] + [2.0] * 4
NARROW = [0.0, 0.0, 1.0, 1.0] + [0.1] * 4 + [0.0, 0.0, 1.0, 1.0] + [0.0] * 4


@pytest.fixture
def named(folder):
    """named(body): `--reward` of a function with this body; WIDE and NARROW are there."""

    def write(name, body):
        lines = f"WIDE, NARROW = {WIDE}, {NARROW}\n\n\ndef reward(prompts, responses, answers):\n    return {body}\n"
        (folder / f"{name}.py").write_text(lines)
        return f"{folder}/{name}.py:reward"

    return write


LETTERS = '{"early": [sum(c < "m" for c in r) / 9 for r in responses], "size": [len(r) / 99 for r in responses]}'


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
@pytest.mark.parametrize("weights", [(), (2.0, 0.5)])
def test_each_reward_is_normalised_in_its_group_then_they_are_summed(
    weights, estimator, variant, train, named, monkeypatch
):
    algo, calls = variant("multi_reward"), []
    real = algo.policy_loss
    monkeypatch.setattr(algo, "policy_loss", lambda *args: calls.append(args[2]) or real(*args))
    reward = named("tabled", '{"wide": WIDE, "narrow": NARROW}')
    flags = {"reward": reward, "reward_weights": weights, "estimator": estimator, "total_iterations": 1}
    metrics = train("multi_reward", **flags)
    used = calls[-1].sum(1) / (calls[-1] != 0).sum(1).clamp(min=1)  # of the whole batch, for the log: (B,L) -> (B,)
    a, b = weights or (1.0, 1.0)
    wide, narrow = (grpo.group_advantages(torch.tensor(s), 4, estimator) for s in (WIDE, NARROW))
    summed = a * wide + b * narrow
    assert torch.allclose(used, summed / (summed.std() + 1e-6), atol=1e-6)
    assert used.std() == pytest.approx(1, abs=1e-5) and metrics[1]["advantage/mean"] == pytest.approx(0, abs=2)
    # A score that is the same in a whole group is not heard, a group that differs in both speaks of both.
    assert torch.equal(summed[:4], b * narrow[:4]) and torch.equal(summed[4:8], a * wide[4:8])
    assert torch.allclose(summed[8:12], (a + b) * narrow[:4]) and summed[12:].count_nonzero() == 0
    assert metrics[1]["group/zero_std_frac"] == 0.25


def test_scores_summed_first_would_lose_what_this_keeps(variant, train, named, monkeypatch):
    """A wide score hides a narrow one, and a group that differs in two counts as one that differs in one."""
    wide, narrow = torch.tensor([0.0, 100.0, 0.0, 100.0]), torch.tensor([0.0, 0.0, 1.0, 1.0])
    first = grpo.group_advantages(wide + narrow, 4, "grpo")
    assert first[2] - first[0] < 0.02  # the narrow one is hardly heard
    algo, calls = variant("multi_reward"), []
    real = algo.policy_loss
    monkeypatch.setattr(algo, "policy_loss", lambda *args: calls.append(args[2]) or real(*args))
    body = '{"wide": [0.0, 100.0] * 8, "narrow": [0.0, 0.0, 1.0, 1.0] * 4}'
    train("multi_reward", reward=named("wide", body), total_iterations=1, scale_advantages=False)
    used = calls[-1].sum(1)[:4] / (calls[-1] != 0).sum(1)[:4].clamp(min=1)
    assert used.tolist() == pytest.approx([-1.732, 0, 0, 1.732], abs=1e-3)  # both count the same
    alone, both = [torch.tensor(s) for s in (NARROW[:4], [0.0, 0.0, 2.0, 2.0])]
    assert torch.allclose(*(grpo.group_advantages(s, 4, "grpo") for s in (alone, both)), atol=1e-5)


def test_a_plain_list_is_grpo(train, folder):
    """To the bit, but for the metrics of its name; with the scale of the sum it is not."""
    from accelerate.state import AcceleratorState

    flags = {"missing_eos_penalty": 0.3, "eval_rows": 3, "eval_dataset": f"{folder}/test.jsonl"}
    changed = untimed(train("multi_reward", scale_advantages=False, **flags))
    AcceleratorState._reset_state(True)
    plain = flags_of("multi_reward", folder) | flags | {"output_dir": str(folder), "run_name": "plain-grpo"}
    for ours, theirs in zip(changed, untimed(read_metrics(grpo.main(grpo.Args(**plain)))), strict=True):
        assert {name: ours[name] for name in theirs} == theirs
        assert ours.keys() - theirs.keys() <= {"reward/score"}


def test_every_score_is_logged_evaluated_and_written(train, named, folder, tmp_path):
    flags = {"missing_eos_penalty": 0.25, "eval_rows": 3, "kl_reward_coef": 0.1}
    flags |= {"eval_dataset": f"{folder}/test.jsonl"}
    metrics = train("multi_reward", reward=named("letters", LETTERS), run_name="run", **flags)
    for m in metrics[1:]:
        assert m["reward/early"] + m["reward/size"] == pytest.approx(m["reward/mean"], abs=1e-6)
    for m in (metrics[0], metrics[3]):
        for kind in ("", "_sampled"):
            parts = [m[f"eval/{name}{kind}"] for name in ("early", "size")]
            assert sum(parts) == pytest.approx(m[f"eval/score{kind}"], abs=1e-6) and min(parts) > 0
    rows = [json.loads(line) for line in (tmp_path / "run/completions/eval_000003.jsonl").read_text().splitlines()]
    for row in rows:
        for kind in ("", "_sampled"):
            text = row[f"response{kind}"]
            found = [row[f"score/{name}{kind}"] for name in ("early", "size")]
            assert found == [sum(c < "m" for c in text) / 9, len(text) / 99]
            assert row[f"score{kind}"] == sum(found)
    lines = (tmp_path / "run/completions/step_000003.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    for name in ("early", "size"):
        scores = [row[f"score/{name}"] for row in rows]
        assert statistics.mean(scores) == pytest.approx(metrics[3][f"reward/{name}"], abs=1e-6)
        penalty = [row[f"score/{name}"] - len(row["response"]) / 99 for row in rows]
        assert name == "early" or {round(p, 4) for p in penalty} == {0.0, -0.25}  # of a truncated one each loses it
    assert all(row["score"] == pytest.approx(row["score/early"] + row["score/size"], abs=1e-6) for row in rows)


@pytest.mark.parametrize("body", ["[0.5] * (len(prompts) - 1)", "[float('nan')] * len(prompts)", "[]"])
def test_a_bad_score_is_refused_by_its_name(body, train, named, capsys):
    with pytest.raises(SystemExit):
        train("multi_reward", reward=named("bad", f'{{"good": [1.0] * len(prompts), "bad": {body}}}'))
    assert "the reward bad should give 16 finite numbers" in capsys.readouterr().err
    with pytest.raises(ValueError, match="zip"):
        train("multi_reward", reward=named("good", '{"good": [1.0] * len(prompts)}'), reward_weights=(1.0, 2.0))


@pytest.mark.slow
def test_multi_reward_by_two_is_multi_reward_by_one(folder, named, tmp_path):
    """One test row: the second process has none, and knows no name of a score from it."""
    flags = flags_of("multi_reward", folder) | {"reward": named("letters", LETTERS), "output_dir": tmp_path}
    flags |= {"eval_rows": 1, "eval_every": 1, "eval_dataset": f"{folder}/test.jsonl"}
    for processes in (1, 2):
        script = folder / "multi_reward_llm.py"
        code, console = forked(script, flags | {"run_name": f"by-{processes}"}, processes=processes)
        assert code == 0, console
    one, two = (untimed(read_metrics(tmp_path / f"by-{processes}")) for processes in (1, 2))
    for a, b in zip(one, two, strict=True):
        for metric in a.keys() - {"rollout/logprob_diff"}:
            assert a[metric] == pytest.approx(b[metric], rel=2e-3, abs=2e-5), metric
    for name in ("eval_000003", "step_000001"):
        files = [(tmp_path / f"by-{processes}/completions/{name}.jsonl").read_text() for processes in (1, 2)]
        assert files[0] == files[1]


# --- shared_critic


def head_of(weights):
    return torch.cat([p.detach().flatten() for name, p in weights.items() if "score." in name or "classifier." in name])


def checkpoint_of(path):
    (weights, optimizer) = torch.load(path / "checkpoint.pt", weights_only=True)["policy"]
    return weights, optimizer


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_the_value_head_is_trained_saved_and_resumed_to_the_bit(lora_rank, train, tmp_path):
    """A head that no checkpoint holds begins at zero again; with LoRA peft switches it off, and transformers not on."""
    flags = {"lora_rank": lora_rank, "total_iterations": 4, "save_every": 2, "lr": 1e-2, "critic_lr": 1e-2}
    whole = train("shared_critic", **flags, run_name="whole")
    heads = []
    for step in (2, 4):
        weights, optimizer = checkpoint_of(tmp_path / f"whole/checkpoints/step_{step:06d}")
        heads.append(head_of(weights))
        assert len(optimizer["state"]) == len(weights)  # every trained tensor has its moments
    assert heads[0].count_nonzero() == 33 and heads[0].abs().max() > 1e-3 and (heads[0] != heads[1]).all()
    assert sum(m["critic/explained_variance"] != 0 for m in whole[2:]) == 3
    train("shared_critic", **flags | {"total_iterations": 2}, run_name="part")
    resumed = train("shared_critic", **flags, run_name="part", resume="auto")
    assert untimed(resumed) == untimed(whole)
    ends = [checkpoint_of(tmp_path / name / "checkpoints/step_000004")[0] for name in ("whole", "part")]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_the_value_head_is_clipped_with_the_rest(train, monkeypatch):
    norms, heads = [], []
    real = torch.optim.AdamW.step

    def step(optimizer, *args):
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        norms.append(torch.cat([g.flatten() for g in gradients]).norm().item())
        heads.append(sum(g.norm().item() for g in gradients if g.shape in ((1, 32), (1,))))
        return real(optimizer, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    metrics = train("shared_critic", max_grad_norm=0.01, value_coef=5.0)
    assert norms == pytest.approx([0.01] * 3, rel=1e-3) and min(heads) > 1e-3
    assert all(m["actor/grad_norm"] > 0.1 for m in metrics[1:])


def test_the_loss_is_the_actors_and_a_share_of_the_critics(train, tmp_path, monkeypatch):
    """The gradient of one step is linear in --value-coef, in the backbone, too."""
    train("shared_critic", critic_lr=1e-1, run_name="start")  # at its start the head is zero and passes no gradient on
    gradients, real = [], torch.optim.AdamW.step

    def step(optimizer, *args):
        gradients.append([p.grad.clone() for group in optimizer.param_groups for p in group["params"]])
        return real(optimizer, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    start = {"model": f"{tmp_path}/start/final", "max_grad_norm": 0.0, "total_iterations": 1}
    for value_coef in (0.0, 1.0, 3.0):
        metrics = train("shared_critic", value_coef=value_coef, **start)
        assert metrics[1]["critic/loss"] > 0
    for none, one, three in zip(*gradients, strict=True):
        assert torch.allclose(three - none, 3 * (one - none), rtol=1e-3, atol=1e-5)
    changed = [(one - none).abs().max().item() > 1e-6 for none, one, _ in zip(*gradients, strict=True)]
    assert sum(changed) > 15 and (gradients[0][-2] == 0).all()  # the backbone; and the head alone is not the actor's


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_final_is_a_language_model_and_a_token_classifier(arch, variant, train, tmp_path, folder):
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

    model = make_model(tmp_path / "model", arch)
    train("shared_critic", model=model, critic_lr=1e-2, run_name="run")
    final = tmp_path / "run" / "final"
    assert not (final / "critic").exists()
    algo = variant("shared_critic")
    policy = algo.Policy(algo.load_policy(str(final), 0), temperature=1.0)
    tokens = torch.randint(3, 40, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[:, -1] = False
    with torch.no_grad():
        logprobs, _, values = policy(tokens, mask)
        plain = AutoModelForCausalLM.from_pretrained(final)(tokens).logits.log_softmax(-1)
        classifier = AutoModelForTokenClassification.from_pretrained(final, num_labels=1).eval()
        plain_values = classifier(tokens).logits.squeeze(-1)
    assert torch.allclose(logprobs[:, :-1], plain[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1), atol=1e-5)
    assert torch.allclose(values[:, :-1], plain_values[:, :-1], atol=1e-5) and values[:, :-1].abs().min() > 1e-4


def test_each_head_has_its_learning_rate(train, variant, monkeypatch):
    """--critic-lr is the value head's, --lr all the others'; both are warmed up. Flags of a critic alone are gone."""
    rates, real = [], torch.optim.AdamW.step

    def step(optimizer, *args):
        rates.append([(len(group["params"]), group["lr"]) for group in optimizer.param_groups])
        return real(optimizer, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    train("shared_critic", lr=1e-3, critic_lr=1e-2, warmup_iterations=2, total_iterations=2)
    (_, first), (count, head) = rates[0]
    assert (first, count, head) == (5e-4, 2, 5e-3) and [lr for _, lr in rates[1]] == [1e-3, 1e-2]
    flags = vars(variant("shared_critic").Args)["__dataclass_fields__"].keys()
    assert "value_coef" in flags and not flags & {"critic_model", "critic_warmup_iterations"}


@pytest.mark.slow
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_shared_critic_by_two_is_shared_critic_by_one(lora_rank, folder, tmp_path):
    flags = flags_of("shared_critic", folder) | {"output_dir": tmp_path, "lora_rank": lora_rank}
    for processes in (1, 2):
        run = {"run_name": f"by-{processes}"}
        code, console = forked(folder / "shared_critic_llm.py", flags | run, processes=processes)
        assert code == 0, console
    one, two = (untimed(read_metrics(tmp_path / f"by-{processes}")) for processes in (1, 2))
    for a, b in zip(one, two, strict=True):
        for metric in a.keys() - {"rollout/logprob_diff"}:
            assert a[metric] == pytest.approx(b[metric], rel=2e-3, abs=2e-5), metric
