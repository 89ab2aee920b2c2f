"""Log-probs, values and sampling against the plainest computation there is: one unpadded prefix at a time."""

import itertools
import random

import pytest
import torch
from helpers import each_script, make_model, make_tokenizer, untimed
from ranks import load_script
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing import assert_close
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForTokenClassification

SCRIPT = "ppo_llm", "grpo_llm"  # one text in all; the sharded script samples and loads with the ranks of a group
of_critics = each_script("ppo_llm")
EOS, EOS2, FIRST_CHAR = 1, 2, 3
VOCAB = len(make_tokenizer())
# Lengths of prompts and responses: ragged, a response of one token, a prompt of one.
LENGTHS = (3, 6), (7, 2), (5, 1), (1, 4), (7, 6)


@pytest.fixture(scope="module", params=["llama", "gpt2"])  # rotary and absolute positions
def folder(request, tmp_path_factory):
    return make_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture
def model(algo, folder):
    return algo.load_model(folder, AutoModelForCausalLM)


@pytest.fixture
def critic(algo, folder):
    return with_a_head(load_critic(algo, folder))


def load_critic(algo, folder, lora_rank=0):
    return algo.Critic(algo.load_critic(folder, lora_rank))


def with_a_head(critic):
    """A new head is zero, and every value would agree with every other."""
    torch.manual_seed(1)
    for p in critic.model.score.parameters():
        torch.nn.init.normal_(p)
    return critic


def make_rows(algo, lengths=LENGTHS):
    """Rows of data and Responses of these lengths; of the first response, the tokens 2 and 3 are an environment's."""
    rng, rows, responses = random.Random(0), [], []
    for p, n in lengths:
        prompt, ids = ([rng.randrange(FIRST_CHAR, VOCAB) for _ in range(k)] for k in (p, n))
        logprobs = [-rng.random() for _ in ids]
        if not responses and n > 4:
            logprobs[2:4] = [algo.NOT_SAMPLED] * 2
        rows.append({"input_ids": prompt})
        responses.append(algo.Response(ids, logprobs, False))
    return rows, responses


def make_batch(algo):
    """tokens, mask (B,L)."""
    return algo.to_batch(*make_rows(algo), "cpu")[:2]


def prompts_of(*lengths):
    rng = random.Random(3)
    prompts = [[rng.randrange(FIRST_CHAR, VOCAB) for _ in range(n)] for n in lengths]
    prompts[0][1] = 0  # an id like any other
    return prompts


def noise(rows, steps, seed=5):
    return torch.rand(rows, steps, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sample(algo, model, prompts, uniforms, eos_ids=(EOS,), temperature=1.0):
    return algo.generate(model, prompts, uniforms, list(eos_ids), temperature)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_logprobs_equal_bare_prefixes(algo, model, temperature):
    tokens, mask = make_batch(algo)
    policy = algo.Policy(model, temperature)
    logprobs, entropy, variance = policy(tokens, mask)
    same, *none = policy(tokens, mask, False)
    assert torch.equal(same, logprobs) and not none[0].any() and not none[1].any()  # only where they are asked for
    for i, t in mask.nonzero().tolist():
        expected = (model(tokens[i : i + 1, : t + 1]).logits[0, -1] / temperature).log_softmax(-1)
        assert logprobs[i, t].item() == pytest.approx(expected[tokens[i, t + 1]].item(), abs=2e-5)
        mean = -(expected.exp() * expected).sum().item()
        assert entropy[i, t].item() == pytest.approx(mean, abs=2e-5)
        assert variance[i, t].item() == pytest.approx((expected.exp() * (expected + mean) ** 2).sum().item(), abs=2e-4)
    assert logprobs.dtype == entropy.dtype == torch.float32 and mask.sum() == 17
    assert not any(x[~mask].any() for x in (logprobs, entropy, variance)) and variance[mask].min() > 0.01


def test_chunks_change_neither_results_nor_gradients(algo, model, spy):
    """Logits exist only for the 17 actions, a chunk of them at a time, and the backward pass computes them again."""
    tokens, mask = make_batch(algo)
    policy = algo.Policy(model, 0.7).train()
    assert policy.chunk_elements == 2**26  # 256 MiB, as section 15.5 reckons
    weight = torch.randn(mask.shape, generator=torch.Generator().manual_seed(0))
    rows = spy(model.get_output_embeddings(), "forward", lambda hidden: hidden.shape[1])
    whole = None
    # The last is a vocabulary larger than a chunk.
    for chunk_elements, sizes in (2**26, [17]), (5 * VOCAB, [5, 5, 5, 2]), (1, [1] * 17):
        rows.clear()
        policy.zero_grad()
        policy.chunk_elements = chunk_elements
        logprobs, entropy, variance = policy(tokens, mask)
        assert rows == sizes
        (weight * (logprobs + 0.3 * entropy)).sum().backward()
        assert len(rows) == 2 * len(sizes)
        found = [logprobs, entropy, variance, *(p.grad.clone() for p in policy.parameters())]
        whole = whole or found
        for a, b in zip(whole, found, strict=True):
            assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_one_chunk_of_logits_at_a_time(algo, toy_run, monkeypatch):
    """In the update, too: the graph of an entropy that no loss uses would hold what is computed again for it."""
    made, alive, log_softmax = [], [], torch.Tensor.log_softmax

    def watched(logits, dim):
        result = log_softmax(logits, dim)
        made.append(StorageWeakRef(result.untyped_storage()))
        alive.append(sum(not storage.expired() for storage in made))
        return result

    monkeypatch.setattr(torch.Tensor, "log_softmax", watched)
    monkeypatch.setattr(algo.Policy, "chunk_elements", property(lambda _: 1, lambda *_: None), raising=False)
    toy_run(total_iterations=1)
    assert len(alive) > 200 and max(alive) == 1


@of_critics
def test_a_training_pass_keeps_no_cache(algo, model, critic):
    """Keys and values are for sampling: here they would only hold memory."""
    passes, batch = [], make_batch(algo)
    for network in model, critic.model:
        network.base_model.register_forward_hook(lambda module, inputs, output: passes.append(output))
    algo.Policy(model, 1.0)(*batch), critic(*batch)
    # Of the policy twice, as its head is the model's own pass over what the backbone has returned.
    assert [output.past_key_values for output in passes] == [None, None, None]


@of_critics
def test_loaded_without_dropout_and_in_float32(algo, tmp_path, folder):
    """Whatever the checkpoint says, also in train mode."""
    arch = AutoConfig.from_pretrained(folder).model_type
    folder, batch = make_model(tmp_path, arch, dropout=0.5), make_batch(algo)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).train()
    assert not torch.equal(plain(batch[0]).logits, plain(batch[0]).logits)  # it would be on
    plain.save_pretrained(folder)
    policy = algo.Policy(algo.load_model(folder, AutoModelForCausalLM), 1.0).train()
    critic = with_a_head(load_critic(algo, folder)).train()
    assert torch.equal(policy(*batch)[0], policy(*batch)[0]) and torch.equal(critic(*batch), critic(*batch))
    assert {p.dtype for module in (policy, critic) for p in module.parameters()} == {torch.float32}


@of_critics
def test_bfloat16_autocast_returns_float32(algo, model, critic):
    """The passes are in bfloat16, what comes out is float32 and has more digits than bfloat16."""
    batch, policy = make_batch(algo), algo.Policy(model, 1.0)

    def passes():
        return *policy(*batch), critic(*batch)

    with torch.autocast("cpu", torch.bfloat16):
        found = passes()
    for x, exact in zip(found, passes()):
        assert x.dtype == torch.float32 and not torch.equal(x, exact) and (x - exact).abs().max() < 0.3
        assert (x.bfloat16().float() != x)[batch[1]].float().mean() > 0.5


@pytest.mark.parametrize("lora_rank, tied", [(0, False), (2, False), (2, True)])
def test_frozen_layers_are_cast_once_and_no_bit_changes(script, algo, lora_rank, tied, toy_run, spy, tmp_path):
    """Against a copy that leaves it to autocast. Without LoRA it is the reference that is frozen; a tied head stays."""
    copy, found = tmp_path / "plain_llm.py", []
    copy.write_text(script.read_text().replace("if bf16 and (args.lora_rank", "if False and (args.lora_rank"))
    flags = {"model": make_model(tmp_path / "model", tie_word_embeddings=tied), "lora_rank": lora_rank}
    for one in algo, load_script(copy):
        passes, models = spy(one, "forward_all"), spy(one.Policy, "__init__", lambda policy, model, *_: model)
        gradients = spy(one, "sum_gradients", lambda parameters: [p.grad.clone() for p in parameters])
        metrics = untimed(toy_run(one, **flags, dtype="bfloat16", kl_reward_coef=0.1)[1])
        dtypes = {name: p.dtype for name, p in models[-1].named_parameters()}  # of the reference, or what is its own
        found.append(([*(output for _, output in passes), *itertools.chain(*gradients)], metrics, dtypes))
    (ours, logged, dtypes), (theirs, expected, plain) = found
    assert len(ours) > 100 and all(map(torch.equal, ours, theirs)) and logged == expected
    cast = {name for name in dtypes if name.endswith("proj.base_layer.weight" if lora_rank else "proj.weight")}
    cast |= set() if tied else {"lm_head.weight"}
    assert {name for name in dtypes if dtypes[name] == torch.bfloat16} == cast and len(cast) >= 14
    assert {*plain.values()} == {torch.float32}


@of_critics
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_a_trained_critic_is_what_is_saved(algo, folder, tmp_path, lora_rank):
    """With LoRA the head is trained whole; the folder reloads as run/after.md says, without the script."""
    critic, (tokens, mask) = load_critic(algo, folder, lora_rank), make_batch(algo)
    assert not critic(tokens, mask).any()  # a new head is zero
    start = {name: p.clone() for name, p in critic.model.named_parameters()}
    trained = {name: p for name, p in critic.model.named_parameters() if p.requires_grad}
    assert lora_rank == 0 or all("lora_" in name or "score." in name for name in trained)
    optimizer = torch.optim.SGD(trained.values(), lr=0.1)
    for _ in range(3):  # the head moves first, then B, then A
        optimizer.zero_grad()
        (critic(tokens, mask) - 1)[mask].square().mean().backward()
        optimizer.step()
    assert trained.keys() == {n for n, p in critic.model.named_parameters() if not torch.equal(p, start[n])}
    critic.model.save_pretrained(tmp_path)
    if lora_rank:
        plain = AutoModel.from_pretrained(folder).eval()
        plain.score = torch.nn.Linear(plain.get_input_embeddings().embedding_dim, 1)
        plain.load_adapter(tmp_path)
    else:
        plain = load_critic(algo, str(tmp_path)).model  # as the next critic
        assert AutoConfig.from_pretrained(tmp_path).architectures == [AutoModel.from_pretrained(folder)._get_name()]
    with torch.no_grad():
        expected = torch.where(mask, plain.score(plain(tokens).last_hidden_state)[..., 0], 0)
        values = critic(tokens, mask)
    assert values.abs().max() > 0.1 and torch.allclose(values, expected, atol=2e-5)


@of_critics
def test_a_critic_begins_with_the_head_of_a_classifier(algo, folder, tmp_path):
    """As of a reward model. transformers calls it score, or for GPT-2 classifier."""
    torch.manual_seed(2)
    plain = AutoModelForTokenClassification.from_config(AutoConfig.from_pretrained(folder, num_labels=1))
    plain.save_pretrained(tmp_path)
    head = plain.score if hasattr(plain, "score") else plain.classifier
    critic = load_critic(algo, str(tmp_path))
    assert torch.equal(critic.model.score.weight, head.weight) and torch.equal(critic.model.score.bias, head.bias)
    backbone = dict(plain.base_model.named_parameters())
    assert all(torch.equal(p, backbone[name]) for name, p in critic.model.named_parameters() if "score" not in name)


@pytest.mark.parametrize(
    "sources, union", [((1, 1, 1), [1]), ((None, 2, [5, 1]), [1, 2, 5]), ((3, [7], None), [3, 7]), ((None,) * 3, [])]
)
def test_collect_eos_ids(algo, model, sources, union):
    tokenizer = make_tokenizer(eos=None)
    tokenizer.eos_token = None if sources[0] is None else tokenizer.convert_ids_to_tokens(sources[0])
    model.config.eos_token_id, model.generation_config.eos_token_id = sources[1:]
    assert algo.collect_eos_ids(model, tokenizer) == union


def test_lora_trains_all_linear_layers_but_the_head(algo, folder):
    model = algo.load_model(folder, AutoModelForCausalLM, 4, task_type="CAUSAL_LM")
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    layers = {name.split(".lora_")[0].rsplit(".", 1)[1] for name in trained}
    llama = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert layers == (llama if "llama" in folder else {"c_attn", "c_proj", "c_fc"})
    algo.Policy(model, 1.0)(*make_batch(algo))[0].sum().backward()
    for name, p in model.named_parameters():  # B is zero, so that only it has a gradient yet
        assert (p.grad is not None and p.grad.any()) == ("lora_B" in name), name
        assert (name in trained) == ("lora_" in name)


@pytest.mark.parametrize("pad_token", ["<pad>", "<eos>", None])
@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_greedy_equals_transformers(algo, tmp_path, arch, pad_token):
    """One prompt at a time there, ragged prompts together here; pad==EOS and no pad token are no special cases."""
    model = algo.load_model(make_model(tmp_path, arch, pad=pad_token), AutoModelForCausalLM)
    prompts, steps, eos_ids = prompts_of(3, 7, 5), 12, [EOS]
    for _ in range(2):  # the second time the third token of the first answer is one of two EOS ids
        responses = sample(algo, model, prompts, noise(3, steps), eos_ids, temperature=0)
        for prompt, response in zip(prompts, responses):
            ids = torch.tensor([prompt])
            options = {"max_new_tokens": steps, "do_sample": False, "eos_token_id": eos_ids, "pad_token_id": 0}
            expected = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()
            assert response.ids == expected and response.truncated == (expected[-1] not in eos_ids)
            assert response.logprobs == [0.0] * len(expected)  # of the distribution sampled from: that token alone
        eos_ids = [EOS, responses[0].ids[2]]
    assert len(responses[0].ids) <= 3 and not responses[0].truncated


def test_cut_responses(algo):
    """Each up to and with its first EOS, of whichever kind; one that never comes to it is truncated."""
    tokens = torch.tensor([[5, EOS, 6, EOS], [5, 6, 7, EOS], [5, 6, 7, 8], [EOS2, EOS, 5, 6], [5, 6, EOS2, 0]])
    logprobs = -torch.arange(20.0).view(5, 4)
    found = algo.cut_responses(tokens, logprobs, [EOS, EOS2])
    assert [response.ids for response in found] == [[5, EOS], [5, 6, 7, EOS], [5, 6, 7, 8], [EOS2], [5, 6, EOS2]]
    assert [response.truncated for response in found] == [False, False, True, False, False]
    for row, response in zip(logprobs.tolist(), found):
        assert response.logprobs == row[: len(response.ids)]
    for ids, response in zip(tokens.tolist(), algo.cut_responses(tokens, logprobs, [])):
        assert response.ids == ids and response.truncated


def test_a_response_does_not_depend_on_the_rows_beside_it(algo, model, spy):
    """Finished rows leave the batch; each row alone gives the same tokens, and so does any other company."""
    prompts, uniforms = prompts_of(*[3, 7, 5] * 4), noise(12, 16)
    eos_ids = range(FIRST_CHAR, FIRST_CHAR + 4)
    sizes = spy(model, "forward", lambda inputs, **options: len(inputs))
    together = sample(algo, model, prompts, uniforms, eos_ids)
    sizes = sizes.copy()
    steps = [len(response.ids) for response in together]
    assert len(set(steps)) > 3 and len(sizes) == max(steps)
    for t, size in enumerate(sizes):  # at most a tenth of a batch has finished
        assert 0.9 * size < sum(n > t for n in steps) <= size
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0)).tolist()
    for part in *([i] for i in range(12)), order[:7], order[7:]:
        found = sample(algo, model, [prompts[i] for i in part], uniforms[part], eos_ids)
        for response, i in zip(found, part):
            assert response.ids == together[i].ids and response.truncated == together[i].truncated
            assert response.logprobs == pytest.approx(together[i].logprobs, abs=2e-5)


def test_draw_prompts_is_one_stream(algo):
    rows = list(range(10))
    stream = algo.draw_prompts(rows, 0, 40, 3)
    assert all(sorted(stream[i : i + 10]) == rows for i in range(0, 40, 10))
    assert len({tuple(stream[i : i + 10]) for i in range(0, 40, 10)}) == 4
    assert [x for i in range(0, 40, 4) for x in algo.draw_prompts(rows, i, 4, 3)] == stream
    assert algo.draw_prompts(rows, 0, 40, 4) != stream and algo.draw_prompts(rows, 7, 25, 3) == stream[7:32]


def test_to_batch(algo):
    """By hand. What an environment wrote is in `tokens`, not in `mask`; an EOS is an action like any other."""
    rows = [{"input_ids": [5, 6, 7]}, {"input_ids": [8]}]
    other = algo.NOT_SAMPLED
    responses = [algo.Response([9, EOS], [-0.5, 0.0], False)]
    responses += [algo.Response([10, 11, 12, 13, 14], [-1.0, other, other, -2.0, other], True)]
    tokens, mask, logprobs, lengths = algo.to_batch(rows, responses, "cpu")
    assert tokens[0, :5].tolist() == [5, 6, 7, 9, EOS] and tokens[1].tolist() == [8, 10, 11, 12, 13, 14]
    assert mask.dtype == torch.bool and mask.tolist() == [[0, 0, 1, 1, 0, 0], [1, 0, 0, 1, 0, 0]]
    assert logprobs.tolist() == [[0, 0, -0.5, 0, 0, 0], [-1, 0, 0, -2, 0, 0]]
    assert lengths == [5, 6]


@pytest.mark.parametrize("max_tokens", [1, 20, 45, 10**6])
def test_pack(algo, max_tokens):
    """Every row once, longest first, within the budget unless one row alone is longer, and as few as that allows."""
    rng = random.Random(0)
    lengths, chosen = [rng.randint(2, 17) for _ in range(14)], range(2, 13)
    microbatches = algo.pack(lengths, chosen, max_tokens, "cpu")
    parts = [rows.tolist() for rows, _ in microbatches]
    order = [row for part in parts for row in part]
    assert sorted(order) == list(chosen)
    assert [lengths[row] for row in order] == sorted((lengths[row] for row in chosen), reverse=True)
    for part, (_, columns) in zip(parts, microbatches):
        assert columns == slice(lengths[part[0]])  # cut to the longest
        assert len(part) * lengths[part[0]] <= max_tokens or len(part) == 1
    for part in parts[:-1]:  # none is closed while the next row would have fitted
        assert (len(part) + 1) * lengths[part[0]] > max_tokens
