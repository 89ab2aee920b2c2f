"""Log-probs, values and sampling against the plainest computation there is: one unpadded prefix at a time."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, DynamicCache, GenerationConfig

from .helpers_before import has_critic, load_script, make_model, make_tokenizer, only_ppo

EOS, EOS2, PAD, FIRST_CHAR = 1, 2, 0, 3


@pytest.fixture(scope="module", params=["grpo_llm"])
def algo(request):
    """One script: both have this in the same words. The critic's tests use the fixture `ppo`."""
    return load_script(request.param)


@pytest.fixture(scope="module", params=["llama", "gpt2"])  # rotary and absolute positions
def folder(request, tmp_path_factory):
    return make_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture
def model(algo, folder):
    return algo.load_causal_lm(folder)


@pytest.fixture
def critic(ppo, folder):
    """A critic whose head is not zero, or every value would agree with every other."""
    critic = ppo.Critic(folder)
    torch.manual_seed(1)
    for parameter in getattr(critic.model, critic.head_name).parameters():
        torch.nn.init.normal_(parameter)
    return critic


class Batch:
    """Rows of (prompt, response) lengths; prompts padded on the left, responses on the right, EOS ends the short ones.

    `inputs` are the first arguments of Policy and Critic; what stands on padding can be chosen."""

    def __init__(self, lengths=((3, 6), (7, 2), (5, 1), (1, 4), (7, 6)), filler=PAD, seed=0):
        gen = torch.Generator().manual_seed(seed)
        self.width = max(t for _, t in lengths)
        width = max(p for p, _ in lengths)
        self.prompts, self.answers = [], []
        self.queries = torch.full((len(lengths), width), filler)
        self.responses = torch.full((len(lengths), self.width), filler)
        for i, (p, t) in enumerate(lengths):
            prompt = torch.randint(FIRST_CHAR, len(make_tokenizer()), (p,), generator=gen)
            answer = torch.randint(FIRST_CHAR, len(make_tokenizer()), (t,), generator=gen)
            if 0 < t < self.width:
                answer[-1] = EOS
            self.queries[i, width - p :], self.responses[i, :t] = prompt, answer
            self.prompts, self.answers = self.prompts + [prompt.tolist()], self.answers + [answer.tolist()]
        self.query_mask = torch.arange(width) >= width - torch.tensor([[p] for p, _ in lengths])
        self.mask = torch.arange(self.width) < torch.tensor([[t] for _, t in lengths])
        self.tensors = self.queries, self.query_mask, self.responses, self.mask
        ids, attention = torch.cat([self.queries, self.responses], 1), torch.cat([self.query_mask, self.mask], 1).long()
        self.inputs = ids, attention, self.width


def random_queries(algo, lengths=(3, 7, 5), seed=3):
    gen = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(FIRST_CHAR, len(make_tokenizer()), (n,), generator=gen).tolist() for n in lengths]
    return prompts, algo.left_pad(prompts, PAD, "cpu")


def noise(rows, steps, seed=5):
    return torch.rand(rows, steps, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- Policy and Critic -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_logprobs_equal_bare_prefixes(algo, model, temperature):
    batch = Batch()
    with torch.no_grad():
        logprobs, entropy = algo.Policy(model)(*batch.inputs, temperature)
        for i, (prompt, answer) in enumerate(zip(batch.prompts, batch.answers)):
            for t, token in enumerate(answer):
                expected = (model(torch.tensor([prompt + answer[:t]])).logits[0, -1] / temperature).log_softmax(-1)
                assert logprobs[i, t] == pytest.approx(expected[token].item(), abs=2e-5)
                assert entropy[i, t] == pytest.approx(-(expected.exp() * expected).sum().item(), abs=2e-5)
    assert logprobs.dtype == entropy.dtype == torch.float32


def test_values_equal_bare_prefixes(critic):
    batch = Batch()
    critic.model.eval()  # the plain class has a dropout of its own before the head
    with torch.no_grad():
        values = critic(*batch.inputs)
        for i, (prompt, answer) in enumerate(zip(batch.prompts, batch.answers)):
            for t in range(len(answer)):  # the state before token t: the prompt and t tokens
                expected = critic.model(torch.tensor([prompt + answer[:t]])).logits[0, -1, 0]
                assert values[i, t] == pytest.approx(expected.item(), abs=2e-5)


def test_what_stands_on_padding_does_not_matter(algo, model):
    one, other = Batch(filler=PAD), Batch(filler=FIRST_CHAR + 4)
    logprobs = [algo.Policy(model)(*batch.inputs, 1.0)[0][one.mask] for batch in (one, other)]
    assert torch.allclose(*logprobs, atol=1e-6)


def test_what_stands_on_padding_does_not_matter_to_values(critic):
    one, other = Batch(filler=PAD), Batch(filler=FIRST_CHAR + 4)
    assert torch.allclose(critic(*one.inputs)[one.mask], critic(*other.inputs)[one.mask], atol=1e-6)


def test_chunks_change_neither_logprobs_nor_gradients(algo, model):
    batch, policy, sizes = Batch(), algo.Policy(model, entropy_needs_grad=True).train(), []
    weight = torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(0)) * batch.mask
    model.get_output_embeddings().register_forward_hook(lambda m, i, logits: sizes.append(logits.shape[0]))

    def run(chunk_elements):
        policy.chunk_elements, sizes[:] = chunk_elements, []
        logprobs, entropy = policy(*batch.inputs, 0.7)
        policy.zero_grad()
        (weight * (logprobs + 0.3 * entropy)).sum().backward()
        return logprobs, entropy, *(p.grad.clone() for p in policy.parameters())

    whole, most_tokens = run(2**26), max(sizes)
    chunked = run(5 * model.config.vocab_size)
    assert most_tokens == batch.mask.sum() and max(sizes) == 5  # padding has no logits
    assert all(torch.allclose(a, b, atol=1e-4, rtol=1e-4) for a, b in zip(whole, chunked, strict=True))


def test_uniform_model_has_entropy_log_vocabulary(algo, tiny_model):
    policy, batch = algo.Policy(algo.load_causal_lm(tiny_model)), Batch()
    torch.nn.init.zeros_(policy.model.get_output_embeddings().weight)
    logprobs, entropy = policy(*batch.inputs, 0.5)
    log_v = math.log(policy.model.config.vocab_size)
    logprobs, entropy = logprobs[batch.mask], entropy[batch.mask]
    assert torch.allclose(logprobs, torch.tensor(-log_v)) and torch.allclose(entropy, torch.tensor(log_v))
    assert logprobs.requires_grad and not entropy.requires_grad  # no bonus: nothing of the entropy is kept


@only_ppo
@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_dropout_of_the_checkpoint_is_off_in_train_mode(algo, tmp_path, arch):
    folder, batch = make_model(tmp_path, arch, dropout=0.5), Batch()
    plain = AutoModelForCausalLM.from_pretrained(folder).train()
    assert not torch.equal(plain(batch.inputs[0]).logits, plain(batch.inputs[0]).logits)  # it would be on
    policy = algo.Policy(algo.load_causal_lm(folder)).train()
    assert torch.equal(policy(*batch.inputs, 1.0)[0], policy(*batch.inputs, 1.0)[0])
    if has_critic(algo):
        critic = algo.Critic(folder).train()
        torch.nn.init.normal_(getattr(critic.model, critic.head_name).weight)
        assert torch.equal(critic(*batch.inputs), critic(*batch.inputs))


def test_new_critic_values_everything_at_zero_and_its_head_learns(ppo, folder):
    critic, batch = ppo.Critic(folder), Batch()
    values = critic(*batch.inputs)
    assert values.shape == batch.mask.shape and values.dtype == torch.float32 and not values.any()
    (values - 1).square().sum().backward()
    assert getattr(critic.model, critic.head_name).weight.grad.abs().sum() > 0


def test_critic_keeps_the_head_its_checkpoint_brings(ppo, folder, tmp_path):
    saved = AutoModelForTokenClassification.from_pretrained(folder, num_labels=1)
    head = getattr(saved, "score" if hasattr(saved, "score") else "classifier")
    torch.nn.init.normal_(head.weight)
    torch.nn.init.constant_(head.bias, 0.5)
    saved.save_pretrained(tmp_path / "critic")
    critic = ppo.Critic(str(tmp_path / "critic"))
    loaded = getattr(critic.model, critic.head_name)
    assert torch.equal(loaded.weight, head.weight) and torch.equal(loaded.bias, head.bias)


def test_saved_critic_reloads_with_the_plain_class(critic, tmp_path):
    batch = Batch()
    critic.model.save_pretrained(tmp_path)
    plain = AutoModelForTokenClassification.from_pretrained(tmp_path).eval()
    prompt, answer = batch.prompts[0], batch.answers[0]
    with torch.no_grad():
        expected = plain(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1, 0]
        assert torch.allclose(critic(*batch.inputs)[0], expected, atol=2e-5)


# --- generate --------------------------------------------------------------------------------------------------------


def test_greedy_equals_transformers_on_unpadded_prompts(algo, model):
    prompts, queries = random_queries(algo)
    steps, eos_ids = 12, [EOS]
    for _ in range(2):  # the second time the third token of the first answer is an EOS
        responses, _ = algo.generate(model, *queries, noise(3, steps), eos_ids, PAD, 0.0)
        for prompt, response in zip(prompts, responses.tolist()):
            ids = torch.tensor([prompt])
            options = {"max_new_tokens": steps, "do_sample": False, "eos_token_id": eos_ids, "pad_token_id": PAD}
            expected = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()
            assert response == expected + [PAD] * (steps - len(expected))
        eos_ids = [EOS, responses[0, 2].item()]
    assert responses[0, 3:].eq(PAD).all()


def test_checkpointing_and_train_mode_keep_the_cache_and_the_tokens(algo, model):
    _, queries = random_queries(algo)
    expected = algo.generate(model.eval(), *queries, noise(6, 8), [EOS], PAD)
    assert not model.training
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    widths = []
    spy = lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1])  # noqa: E731
    model.register_forward_pre_hook(spy, with_kwargs=True)
    responses, logprobs = algo.generate(model, *queries, noise(6, 8), [EOS], PAD)
    assert torch.equal(responses, expected[0]) and torch.equal(logprobs, expected[1])
    assert widths[0] == queries[0].shape[1] and set(widths[1:]) == {1}  # one token a step: the rest is in the cache
    assert model.training and model.is_gradient_checkpointing


def test_the_cache_is_as_attention_computes(algo, model, spy, monkeypatch):
    """In bfloat16 under autocast, where transformers would take float32; not a bit of the result changes."""
    (_, queries), task = random_queries(algo), ([EOS], PAD)
    updates = spy(algo.KVCache, "update")
    with torch.autocast("cpu", torch.bfloat16):
        ours = algo.generate(model, *queries, noise(6, 8), *task)
        monkeypatch.setattr(algo, "KVCache", DynamicCache)
        theirs = algo.generate(model, *queries, noise(6, 8), *task)
    assert {x.dtype for _, states in updates for x in states} == {torch.bfloat16}
    assert all(torch.equal(x, y) for x, y in zip(ours, theirs))


@pytest.mark.parametrize("group_size", [1, 3])
def test_groups_equal_repeated_prompts(algo, model, group_size):
    _, (queries, query_mask) = random_queries(algo)
    uniforms = noise(3 * group_size, 8)
    shared = algo.generate(model, queries, query_mask, uniforms, [EOS], PAD)
    repeated = (x.repeat_interleave(group_size, 0) for x in (queries, query_mask))
    alone = algo.generate(model, *repeated, uniforms, [EOS], PAD)
    assert torch.equal(shared[0], alone[0]) and torch.allclose(shared[1], alone[1], atol=1e-5)
    assert len({tuple(r) for r in shared[0].tolist()}) == 3 * group_size  # every row has noise of its own


def test_rows_that_finish_do_not_change_the_others(algo, model):
    prompts, queries = random_queries(algo)
    uniforms, eos_ids, sizes = noise(12, 16), list(range(FIRST_CHAR, FIRST_CHAR + 4)), []
    spy = lambda module, args, kwargs: sizes.append(len(kwargs["input_ids"]))  # noqa: E731
    hook = model.register_forward_pre_hook(spy, with_kwargs=True)
    responses, logprobs = algo.generate(model, *queries, uniforms, eos_ids, PAD)
    hook.remove()
    lengths = algo.make_response_mask(responses, eos_ids).sum(1)
    assert len(lengths.unique()) > 3 and min(sizes[1:]) < 6  # rows did finish early and leave
    for i in range(12):
        query = algo.left_pad([prompts[i // 4]], PAD, "cpu")
        alone = algo.generate(model, *query, uniforms[i : i + 1], eos_ids, PAD)
        assert torch.equal(alone[0][0], responses[i]) and torch.allclose(alone[1][0], logprobs[i], atol=2e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_sampling_logprobs_equal_policy_logprobs(algo, model, temperature):
    _, (queries, query_mask) = random_queries(algo)
    responses, logprobs = algo.generate(model, queries, query_mask, noise(6, 10), [EOS, 5, 6], PAD, temperature)
    mask = algo.make_response_mask(responses, [EOS, 5, 6])
    queries, query_mask = (x.repeat_interleave(2, 0) for x in (queries, query_mask))
    ids, attention = torch.cat([queries, responses], 1), torch.cat([query_mask, mask], 1).long()
    with torch.no_grad():
        expected = algo.Policy(model)(ids, attention, 10, temperature)[0]
    assert torch.allclose(logprobs, torch.where(mask, expected, 0), atol=2e-5)  # and 0 after the EOS


def test_generation_config_of_the_checkpoint_does_not_sample(algo, tmp_path):
    folder = make_model(tmp_path)
    options = {"do_sample": True, "top_k": 1, "top_p": 0.1, "repetition_penalty": 1.5, "temperature": 0.1}
    GenerationConfig(**options, eos_token_id=EOS, pad_token_id=PAD).save_pretrained(folder)
    model = algo.load_causal_lm(folder)
    assert model.generation_config.top_k == 1
    prompts, queries = random_queries(algo, (6,))
    rows = 2000
    uniforms = (torch.arange(rows, dtype=torch.float64)[:, None] + 0.5) / rows  # even noise: counts have no variance
    counts = algo.generate(model, *queries, uniforms, [EOS], PAD)[0][:, 0].bincount(minlength=len(make_tokenizer()))
    with torch.no_grad():
        probs = model(torch.tensor(prompts)).logits[0, -1].softmax(-1)
    assert (counts - rows * probs).abs().max() < 1.01


def test_every_eos_id_of_the_union_ends_a_response(algo, tmp_path):
    folder = make_model(tmp_path)  # EOS by tokenizer and config
    GenerationConfig(eos_token_id=[EOS2], pad_token_id=PAD).save_pretrained(folder)
    model, tokenizer = algo.load_causal_lm(folder), make_tokenizer()
    eos_ids = algo.collect_eos_ids(model, tokenizer)
    assert eos_ids == [EOS, EOS2]
    _, queries = random_queries(algo, (6,))
    uniforms = noise(500, 3)
    uniforms[:, 0] = (torch.arange(500) + 0.5) / 500
    responses, logprobs = algo.generate(model, *queries, uniforms, eos_ids, PAD)
    for eos in eos_ids:
        ended = responses[:, 0] == eos
        assert ended.any() and responses[ended, 1:].eq(PAD).all() and logprobs[ended, 1:].eq(0).all()
    assert responses[(responses[:, 0] != EOS) & (responses[:, 0] != EOS2), 1].ne(PAD).any()


@pytest.mark.parametrize(
    "sources, union", [((1, 1, 1), [1]), ((None, 2, [5, 1]), [1, 2, 5]), ((3, [7], None), [3, 7]), ((None,) * 3, [])]
)
def test_collect_eos_ids(algo, model, sources, union):
    tokenizer = make_tokenizer(eos=None)
    tokenizer.eos_token = None if sources[0] is None else tokenizer.convert_ids_to_tokens(sources[0])
    model.config.eos_token_id, model.generation_config.eos_token_id = sources[1:]
    assert algo.collect_eos_ids(model, tokenizer) == union


# --- pack and forward_all --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [1, 20, 45, 10_000])
def test_pack_and_forward_all_put_everything_back(algo, max_tokens):
    batch = Batch(((3, 6), (7, 2), (5, 1), (1, 4), (7, 6), (2, 2), (4, 3)))
    minibatches = [algo.pack(*batch.tensors, rows, max_tokens) for rows in (range(4), range(4, 7))]
    packed = [mb for minibatch in minibatches for mb in minibatch]
    for rows, minibatch in zip((range(4), range(4, 7)), minibatches):
        assert sorted(i for mb in minibatch for i in mb.at[0].tolist()) == list(rows)
    for mb in packed:
        ids, attention, steps = mb.inputs
        assert len(ids) * attention.sum(1).max() <= max_tokens or len(ids) == 1
        prompt_columns = attention[:, : ids.shape[1] - steps]
        assert prompt_columns[:, 0].any() and attention[:, -1].any()  # no column is padding in every row
    assert len(packed) == (2 if max_tokens == 10_000 else len(batch.mask) if max_tokens == 1 else len(packed))

    def tokens_seen(ids, attention, steps, *extra, group_size=1):
        return ids[:, -steps:].float() + (0 if not extra else extra[0])

    expected = torch.where(batch.mask, batch.responses, 0).float()
    assert torch.equal(algo.forward_all(tokens_seen, minibatches, batch.mask), expected)
    shifted = algo.forward_all(lambda *a, **k: (tokens_seen(*a, **k), None), minibatches, batch.mask, 2.0)
    assert torch.equal(shifted, torch.where(batch.mask, expected + 2, 0))


def test_forward_all_equals_one_forward(algo, model):
    batch, policy = Batch(), algo.Policy(model)
    minibatches = [algo.pack(*batch.tensors, range(len(batch.mask)), 20)]
    with torch.no_grad():
        expected = torch.where(batch.mask, policy(*batch.inputs, 0.5)[0], 0)
    assert torch.allclose(algo.forward_all(policy, minibatches, batch.mask, 0.5), expected, atol=2e-5)


def test_forward_all_equals_one_forward_of_the_critic(ppo, critic):
    batch = Batch()
    minibatches = [ppo.pack(*batch.tensors, range(len(batch.mask)), 20)]
    with torch.no_grad():
        expected = torch.where(batch.mask, critic(*batch.inputs), 0)
    assert torch.allclose(ppo.forward_all(critic, minibatches, batch.mask), expected, atol=2e-5)


def test_noise_alone_decides_and_temperature_zero_needs_none(algo, model):
    _, queries = random_queries(algo)
    runs = [algo.generate(model, *queries, noise(3, 8, seed), [EOS], PAD, t)[0] for seed, t in ((1, 1), (1, 1), (2, 1))]
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])
    greedy = [algo.generate(model, *queries, noise(3, 8, seed), [EOS], PAD, 0.0)[0] for seed in (1, 2)]
    assert torch.equal(*greedy)


@pytest.mark.parametrize("top_p, top_k", [(0.5, 0), (1.0, 3), (0.8, 5)])
def test_truncated_sampling_is_the_renormalised_softmax(algo, top_p, top_k):
    logits, rows = torch.tensor([0.5, 2.0, -1.0, 1.0, 1.5, -0.5]), 5000
    uniforms = (torch.arange(rows, dtype=torch.float64) + 0.5) / rows
    tokens, logprobs = algo.sample_tokens(logits.repeat(rows, 1), uniforms, 0.7, top_p, top_k)
    probs = (logits / 0.7).softmax(-1).tolist()
    order = sorted(range(6), key=lambda i: -probs[i])[: top_k or 6]
    total, kept = sum(probs[i] for i in order), []
    for i in order:  # the smallest set with probability top_p (of what top_k left)
        if sum(probs[j] / total for j in kept) < top_p:
            kept.append(i)
    share = {i: probs[i] / sum(probs[j] for j in kept) for i in kept}
    assert sorted(share) == tokens.unique().tolist() and len(share) < 6
    for i, p in share.items():
        assert (tokens == i).sum() == pytest.approx(rows * p, abs=1.01)
        assert logprobs[tokens == i][0] == pytest.approx(math.log(p), abs=1e-5)
