"""Responses to one prompt that share a sequence: the same numbers as apart, and nothing seen that should not be."""

import random

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig

from .helpers_before import has_critic, load_script, make_model, only_ppo, untimed
from .test_forward import Batch

# Groups of four; within one the prompt is the same. A response without a valid token, one that fills the width.
LENGTHS = ((3, 6), (3, 2), (3, 1), (3, 4), (7, 6), (7, 0), (7, 3), (7, 2))


@pytest.fixture(scope="module", params=["ppo_llm_fsdp"])
def algo(request):
    """One script: both have this in the same words, and this one has a critic."""
    return load_script(request.param)


@pytest.fixture(scope="module", params=["llama", "gpt2"])  # rotary and absolute positions
def folder(request, tmp_path_factory):
    return make_model(tmp_path_factory.mktemp(request.param), request.param)


def make_batch(lengths=LENGTHS, group_size=4):
    batch = Batch(lengths)
    for i in range(len(lengths)):
        batch.queries[i] = batch.queries[i // group_size * group_size]
    ids = torch.cat([batch.queries, batch.responses], 1)
    batch.inputs = ids, batch.inputs[1], batch.width
    return batch


def make_modules(algo, folder):
    modules = [(algo.Policy(algo.load_causal_lm(folder), entropy_needs_grad=True), [0.7])]
    if has_critic(algo):
        critic = algo.Critic(folder)
        torch.manual_seed(1)
        torch.nn.init.normal_(getattr(critic.model, critic.head_name).weight)
        modules.append((critic, []))
    return modules


@pytest.mark.parametrize("group_size", [2, 4])
def test_joined_is_as_apart(algo, folder, group_size):
    batch = make_batch()
    weight = torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(0)) / batch.mask.sum()
    for module, extra in make_modules(algo, folder):
        results = []
        for size in (1, group_size):
            module.zero_grad()
            output = module(*batch.inputs, *extra, group_size=size)
            output = output[0] + 0.3 * output[1] if isinstance(output, tuple) else output
            output = torch.where(batch.mask, output, 0)
            (weight * output).sum().backward()
            results.append([output.detach(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)])
        (apart, *gradients), (joined, *others) = results
        assert torch.allclose(apart, joined, atol=1e-5)
        assert len(gradients) > 10
        for a, b in zip(gradients, others, strict=True):
            assert (a - b).abs().max() < 1e-6 * max(1, a.abs().max())


def test_a_response_sees_the_prompt_and_itself_only(algo, folder):
    batch = make_batch()
    for module, extra in make_modules(algo, folder):
        ids, *rest = batch.inputs

        def run(ids):
            with torch.no_grad():
                output = module(ids, *rest, *extra, group_size=4)
            return torch.where(batch.mask, output[0] if isinstance(output, tuple) else output, 0)

        before, changed = run(ids), ids.clone()
        changed[1, -batch.width] += 1  # the first token of the second response
        after = run(changed)
        others = [row for row in range(len(ids)) if row != 1]
        assert torch.equal(before[others], after[others]) and (before[1] != after[1]).any()
        changed = ids.clone()
        changed[:4, batch.queries.shape[1] - 1] += 1  # the last of the first prompt
        after = run(changed)
        assert (before[:4] != after[:4]).any(1).all() and torch.equal(before[4:], after[4:])


def test_the_prompt_goes_through_the_model_once(algo, folder):
    batch, sizes = make_batch(), []
    policy = algo.Policy(algo.load_causal_lm(folder))
    policy.model.get_input_embeddings().register_forward_hook(lambda m, inputs, y: sizes.append(inputs[0].shape))
    for group_size in (1, 2, 4):
        policy(*batch.inputs, 1.0, group_size=group_size)
    # The longest sequences: 7 + 6; 7 + 6 + 0, 7 + 3 + 2, 3 + 6 + 2; 7 + 6 + 0 + 3 + 2.
    assert sizes == [(8, 7 + 6), (4, 13), (2, 18)]


def test_can_join(algo, folder, tmp_path, monkeypatch):
    model = algo.load_causal_lm(folder)
    assert algo.can_join(model)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MistralConfig(vocab_size=40, num_key_value_heads=2, sliding_window=4, **sizes)
    assert not algo.can_join(AutoModelForCausalLM.from_config(config))  # it could not make its own mask
    assert algo.can_join(AutoModelForCausalLM.from_config(MistralConfig(**config.to_dict() | {"sliding_window": None})))
    # A model that makes its own mask, whatever it is given.
    real = model.base_model.forward
    monkeypatch.setattr(model.base_model, "forward", lambda **kwargs: real(**kwargs | {"attention_mask": None}))
    assert not algo.can_join(model)


@pytest.mark.parametrize("seed", range(5))
def test_best_join_has_the_least_work(algo, seed):
    rng = random.Random(seed)
    group_size, hidden = rng.choice([1, 4, 6, 8]), rng.choice([8, 32, 128])
    limit = rng.choice([60, 200, 10**6])
    prompts = [rng.randint(1, 40) for _ in range(5)]
    answers = [rng.randint(0, 50) for _ in range(5 * group_size)]
    query_mask = torch.arange(40) >= 40 - torch.tensor(prompts).repeat_interleave(group_size)[:, None]
    response_mask = torch.arange(50) < torch.tensor(answers)[:, None]

    def work(size):
        lengths = [prompts[i // group_size] + sum(answers[i : i + size]) for i in range(0, len(answers), size)]
        return sum(n * (6 * hidden + n) for n in lengths) if size == 1 or max(lengths) <= limit else float("inf")

    best = algo.best_join(query_mask, response_mask, group_size, limit, hidden)
    sizes = [size for size in range(1, group_size + 1) if group_size % size == 0]
    assert best in sizes and work(best) == min(map(work, sizes))


def test_long_responses_stay_apart(algo):
    mask = torch.ones(8, 20, dtype=torch.bool)
    long, short = torch.ones(8, 900, dtype=torch.bool), torch.ones(8, 10, dtype=torch.bool)
    assert algo.best_join(mask, short, 8, 8192, 128) == 8
    assert algo.best_join(mask, long, 8, 8192, 128) == 1
    assert algo.best_join(mask, short, 8, 65, 128) == 4  # 8 would be 100 tokens


@pytest.mark.parametrize("max_tokens", [1, 30, 60, 10**6])
@pytest.mark.parametrize("group_size", [2, 4])
def test_pack_keeps_groups_together(algo, max_tokens, group_size):
    rng = random.Random(max_tokens)
    lengths = [(p, rng.randint(0, 8)) for p in (3, 7, 5, 7, 2, 4) for _ in range(4)]
    batch = make_batch(lengths)
    rows = range(4, 20)
    microbatches = algo.pack(*batch.tensors, rows, max_tokens, group_size)
    found = [i for mb in microbatches for i in mb.at[0].tolist()]
    assert sorted(found) == list(rows)
    groups = [found[i : i + group_size] for i in range(0, len(found), group_size)]
    assert all(g == list(range(g[0], g[0] + group_size)) and g[0] % group_size == 0 for g in groups)
    for mb in microbatches:
        members = mb.at[0].tolist()
        sequences = [members[i : i + group_size] for i in range(0, len(members), group_size)]
        widest = max(lengths[s[0]][0] + sum(lengths[i][1] for i in s) for s in sequences)
        assert len(sequences) * widest <= max_tokens or len(sequences) == 1
        assert mb.group_size == group_size
        ids, attention, t = mb.inputs
        assert torch.equal(ids[:, ids.shape[1] - t :], batch.responses[mb.at])
        assert torch.equal(attention[:, attention.shape[1] - t :].bool(), batch.mask[mb.at])


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_a_run_is_the_same(algo, toy_run, monkeypatch, spy, lora_rank):
    """With every term of the loss on; and a run with groups does join them."""
    flags = {"batch_size": 4, "group_size": 4, "minibatch_size": 8, "total_iterations": 2, "lora_rank": lora_rank}
    flags |= {"kl_loss_coef": 0.1, "entropy_coef": 0.01, "eval_every": 0, "lr": 1e-4}
    calls = spy(algo, "to_sequences")
    _, joined = toy_run(run_name="joined", **flags)
    assert 4 in {args[3] for args, _ in calls}
    calls.clear()
    monkeypatch.setattr(algo, "can_join", lambda model: False)
    _, apart = toy_run(run_name="apart", **flags)
    assert {args[3] for args, _ in calls} == {1}
    for a, b in zip(untimed(joined), untimed(apart), strict=True):
        assert a.keys() == b.keys()
        assert all(a[name] == pytest.approx(b[name], abs=2e-5, rel=1e-3) for name in a)


def test_a_first_step_has_ratio_one_when_joined(algo, toy_run):
    metrics = toy_run(batch_size=4, group_size=4, minibatch_size=8, total_iterations=1, lr=0.0)[1][-1]
    assert metrics["actor/ratio_mean"] == metrics["actor/ratio_max"] == 1
    assert metrics["actor/approx_kl"] == metrics["actor/clipfrac"] == 0


def test_models_that_cannot_are_told(toy_run, algo, monkeypatch, capsys):
    monkeypatch.setattr(algo, "can_join", lambda model: False)
    toy_run(run_name="a", group_size=2, total_iterations=1)
    assert "a prompt is computed anew for each of its responses" in capsys.readouterr().out


@only_ppo
def test_a_critic_that_cannot_join_keeps_all_apart(algo, toy_run, monkeypatch, spy):
    monkeypatch.setattr(algo, "can_join", lambda model: "Causal" in type(model).__name__)
    calls = spy(algo, "to_sequences")
    toy_run(group_size=2, total_iterations=1)
    assert {args[3] for args, _ in calls} == {1}
