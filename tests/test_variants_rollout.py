"""Variants of sampling, turns and tools, and of speed, memory and precision: each does what its head says."""

import itertools
import json
import math
import re
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from helpers import ROOT, read_rows, refusal, untimed, write_rows
from ranks import load_script
from test_variants import FILES, batches_of, folder, resumed, script_of, told_otherwise, train, variant  # noqa: F401
from transformers import AutoModelForCausalLM, AutoTokenizer, MistralConfig

# ruff: noqa: F811 (fixtures)


# --- turns and tools


@pytest.fixture
def scripted(variant, folder, monkeypatch):
    """scripted(name, policy): turns of the variant are policy(all text so far) from now on, up to a stop id."""

    def use(name, policy, model="model"):
        algo, tokenizer = variant(name), AutoTokenizer.from_pretrained(folder / model)

        def generate(model, prompts, uniforms, eos_ids, temperature):
            responses = []
            for prompt in prompts:
                ids = tokenizer(policy(tokenizer.decode(prompt)), add_special_tokens=False)["input_ids"]
                ids = [*ids, tokenizer.eos_token_id][: uniforms.shape[1]]
                stop = next((i for i, token in enumerate(ids) if token in eos_ids), len(ids) - 1)
                responses.append(algo.Response(ids[: stop + 1], [0.0] * (stop + 1), ids[stop] not in eos_ids))
            return responses

        monkeypatch.setattr(algo, "generate", generate)
        monkeypatch.setattr(algo, "fail", lambda sentence: None)  # the model would not sample what is scripted

    return use


def turns_of(algo, response):
    """[(whether sampled, ids)] of a Response, in runs."""
    runs = []
    for token, logprob in zip(response.ids, response.logprobs):
        if not runs or runs[-1][0] != (logprob != algo.NOT_SAMPLED):
            runs.append((logprob != algo.NOT_SAMPLED, []))
        runs[-1][1].append(token)
    return runs


def bisect(text):
    """Halves what is left. `text` is the question, and of each turn the number and what was said to it."""
    low, high = 1, 7
    for number, said in re.findall(r"(\d)<eos>\n(\w+)\n", text):
        low, high = (int(number) + 1, high) if said == "higher" else (low, int(number) - 1)
    return str((low + high) // 2)


PLAYED = [  # policy, flags, rewards of the numbers 1 to 7 and 7 again, how many of these games are cut off
    (bisect, {}, [1] * 8, 0),
    (lambda text: "5", {}, [0, 0, 0, 0, 1, 0, 0, 0], 0),  # the game is lost, not cut off
    (bisect, {"max_turns": 2}, [0, 1, 0, 1, 0, 1, 0, 0], 5),
    (bisect, {"max_response_length": 10}, [0, 0, 0, 1, 0, 0, 0, 0], 7),  # no room for a token after "higher"
    (lambda text: "5" * 99, {}, [0] * 8, 8),  # a turn that does not end is not played
]


@pytest.mark.parametrize("policy, flags, rewards, cut", PLAYED)
def test_environment_plays_guess(train, scripted, tmp_path, policy, flags, rewards, cut):
    scripted("environment", policy)
    rows = [{"question": "which?", "answer": str(number)} for number in [1, 2, 3, 4, 5, 6, 7, 7]]
    data = write_rows(tmp_path / "numbers.jsonl", rows)
    place = {"environment": f"{FILES}/guess.py:GuessInText", "dataset": data, "eval_dataset": data}
    sizes = {"batch_size": 8, "group_size": 2, "max_response_length": 60, "total_iterations": 1, "eval_rows": 8}
    metrics = train("environment", **place | sizes | flags)
    assert metrics[1]["reward/mean"] == sum(rewards) / 8 and metrics[1]["response/truncated_frac"] == cut / 8
    assert [m["eval/score"] for m in metrics] == [sum(rewards) / 8] * 2


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


CALLS = [  # a turn of the model, and what it is told
    ("I need nothing.", []),
    (f"Two: {call('guess', number=2)}\n{call('guess', number=6)}.", ["higher", "lower"]),
    (f"<think>{call('guess', number=5)}</think>No.", []),
    (call("guess", number="5"), ["error: TypeError"]),  # a fault of the model is told to it
    *[(call(name), ["error: KeyError"]) for name in ("steal", "_number", "reset", "__init__")],
    ("<tool_call>guess 5</tool_call>", ["error: JSONDecodeError"]),
    ('<tool_call>{"name": "guess"}</tool_call>', ["error: KeyError('arguments')"]),
    (f"<tool_call>{'[' * 100_000}</tool_call>", ["error: RecursionError"]),
]


def test_environment_pays_only_what_the_model_wrote(train, scripted, tmp_path):
    """Not the words of the host, which end in "er"."""
    scripted("environment", bisect)
    data = write_rows(tmp_path / "numbers.jsonl", [{"question": "which?", "answer": str(number)} for number in (1, 2)])
    (tmp_path / "said.py").write_text("def f(responses): return [9 * ('er' in r) + r.count('4') for r in responses]\n")
    flags = {"environment": f"{FILES}/guess.py:GuessInText", "dataset": data, "reward": f"{tmp_path}/said.py:f"}
    flags |= {"batch_size": 2, "group_size": 2, "minibatch_size": 4, "max_response_length": 60, "total_iterations": 1}
    assert train("environment", **flags)[1]["reward/mean"] == 1  # they begin with 4


def test_a_calculator_in_text():
    game = load_script(FILES / "calculator.py").CalculatorInText()
    game.reset(question="which?", answer="so #### 7")
    right = {"12*7": "84", "1/3": "0.333333", "-(3+4)*2": "-14", " 3 + 4 ": "7", "1.5*2": "3", "6/-3": "-2"}
    assert {text: game.calculate(text) for text in right} == right
    wrong = "2**3", "9**9**9", "1//2", "2(3)", "...", "()", "", "1e9", "9" * 65, "2/0", "abs(1)", "1,2", "٣+٤", "(" * 40
    assert {game.calculate(text) for text in wrong} == {"error"}
    said = [game.step(text) for text in ("First <calc>12*7</calc>", "<calc>7**7</calc> ", "#### 84")]
    assert said == ["84", "error", None]


def test_two_turns_asks_again_if_the_first_answer_is_wrong():
    algo = load_script(FILES / "two_turns.py")
    games = [algo.TwoTurns() for _ in range(3)]
    for game, answers in zip(games, (["7"], ["6", "7"], ["6", "5"])):
        game.reset(question="which?", answer="#### 7")
        said = [game.step(f" #### {answer}") for answer in answers]
        assert said == ["\nThat is wrong, try again.\nwhich?", None][-len(answers) :]
    assert algo.turns(games) == {"first": [1.0, 0.0, 0.0], "second": [0.0, 1.0, 0.0]}
    assert [game.get_reward() for game in games] == [1.0, 1.0, 0.0]


def test_environment_calls_tools(variant):
    for text, said in CALLS:
        game = load_script(FILES / "guess.py").Guess()
        game.reset(answer="5")
        messages = variant("environment").answer(game, text)
        assert len(messages) == len(said) and {message["role"] for message in messages} <= {"tool"}
        assert all(message["content"].startswith(start) for message, start in zip(messages, said)), (text, messages)


TEMPLATE = (
    "{% if tools %}tools: {{ tools | map(attribute='function') | map(attribute='name') | join(' ') }}. {% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}|{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if quick %}quick: {% endif %}{% endif %}"
)


def test_environment_keeps_the_chat_that_the_template_makes(variant, tmp_path):
    """Prompt, turns and what is said in between are the chat as a whole; sampled ids stay as they are."""
    algo, tokenizer = variant("environment"), AutoTokenizer.from_pretrained(ROOT / "benchmarks/tiny/model")
    tokenizer.chat_template = TEMPLATE
    data = write_rows(tmp_path / "one.jsonl", [{"question": "Which number?", "answer": "7"}])
    flags = {"dataset": data, "eval_dataset": data, "chat_template_args": '{"quick": true}', "max_prompt_length": 500}
    args = algo.Args(**algo.BUNDLED | flags | {"environment": f"{FILES}/guess.py:Guess"})
    (row,), _ = algo.load_prompts(data, algo.read_data(args)[0], args, tokenizer)
    text = "tools: guess. <user>Which number?|<assistant>quick: "
    assert row["prompts"] == text
    game = algo.load_reward(args.environment)()
    game.reset(**row)
    games = [algo.Response([], [], True, game)]
    for turn, said in (call("guess", number=4) * 2, ["higher"] * 2), (call("guess", number=6), ["higher"]):
        ids = [i for c in turn for i in tokenizer(c)["input_ids"]] + [tokenizer.eos_token_id]  # letter by letter
        start = len(games[0].ids)
        assert algo.play(games, [0], [algo.Response(ids, [-1.0] * len(ids), False)], 900, tokenizer, args) == [0]
        assert games[0].ids[start : start + len(ids)] == ids
        text += f"{turn}{tokenizer.eos_token}|" + "".join(f"<tool>{x}|" for x in said) + "<assistant>quick: "
        assert tokenizer.decode(row["input_ids"] + games[0].ids) == text
    assert [was for was, _ in turns_of(algo, games[0])] == [True, False] * 2


def column(metrics, name):
    return [m[name] for m in metrics[1:]]


# --- sampling, and engines


def test_stale_weighs_each_batch_for_the_policy_that_sampled_it(variant, train, spy):
    """Two iterations earlier. Without staleness it's GRPO, bit for bit."""
    algo, flags = variant("stale"), {"kl_loss_coef": 0.0, "lr": 5e-3, "is_cap": 1.1, "total_iterations": 4}
    now, grpo = untimed(train("stale", **flags, staleness=0)), untimed(train("stale", on=script_of("stale"), **flags))
    assert [{name: m[name] for name in plain} for m, plain in zip(now, grpo, strict=True)] == grpo
    passes, written = spy(algo, "forward_all"), spy(algo, "write_completions")
    metrics = train("stale", **flags, staleness=2, eval_every=1)
    sampled, old = passes[:3] + passes[4::2], passes[3::2]  # the first iteration samples three batches
    for i, ((_, (before, *_)), ((*_, mask), (after, *_)), batch) in enumerate(zip(sampled, old, batches_of(written))):
        weights = (after - before).exp()
        weights = torch.where(weights <= 1.1, weights, 0)
        assert torch.allclose(batch.advantages, batch.plain * weights, atol=1e-6)
        assert metrics[i + 1]["rollout/weight_mean"] == pytest.approx(weights[mask].mean().item(), abs=1e-5)
        assert (weights[mask] == 1).all() == (i == 0) and (weights[mask] == 0).any() == (i > 0)


def test_stale_resumes_with_its_queue(train):
    resumed(train, "stale", 2, total_iterations=4, save_every=2, lora_rank=4)


def test_bypass_takes_the_samplers_log_probs_or_weighs_the_losses(variant, train, monkeypatch, spy):
    """Half of the tokens are claimed to be less likely by 0.004."""
    algo = variant("bypass")
    told_otherwise(algo, monkeypatch, [0.004] * 12, [0] * 12)
    flags = {
        "total_iterations": 1,
        "temperature": 0.9,
        "kl_loss_coef": 0.0,
        "minibatch_size": 16,
        "max_response_length": 6,
    }
    by_token, mask = math.exp(0.004), {"is_mode": "mask"}
    cases = [({"old_logprobs": "rollout"}, 1, 1), ({}, by_token, 1), ({"is_level": "sequence"}, math.exp(0.024), 1)]
    cases += [({"is_cap": 1.0}, 1, 1), (mask | {"is_cap": 1.002}, 0, 1), ({"is_low": 1.002}, by_token, 0)]
    cases += [(mask | {"is_cap": 1.02, "is_level": "sequence"}, 0, 1)]
    rollout, token, *_ = found = [train("bypass", **flags | own)[1] for own, *_ in cases]
    for m, (_, weight, other) in zip(found, cases):
        assert m["rollout/weight_mean"] == pytest.approx((weight + other) / 2, rel=1e-5)
        assert m["rollout/zero_weight_frac"] == ((weight == 0) + (other == 0)) / 2
        assert m["rollout/kl"] == pytest.approx((math.exp(0.004) - 1.004) * 6 / 16 / 2, rel=1e-3)  # 16 count at least
    assert rollout["actor/ratio_mean"] == pytest.approx((1 + math.exp(0.004)) / 2) and token["actor/ratio_mean"] == 1
    assert rollout["actor/grad_norm"] == pytest.approx(token["actor/grad_norm"], rel=1e-5)
    (plain,) = train("bypass", on=script_of("bypass"), **flags)[1:]
    assert token["actor/grad_norm"] != pytest.approx(plain["actor/grad_norm"], rel=1e-4)


def test_top_p_cuts_the_tail_in_training_only(variant, train):
    probs, uniforms = torch.tensor([0.15, 0.4, 0.05, 0.3, 0.1]), (torch.arange(1000) + 0.5) / 1000
    cases = [(0.69, 0, [1, 3]), (0.71, 0, [0, 1, 3]), (0.01, 0, [1]), (1.0, 2, [1, 3]), (1.0, 99, [0, 1, 2, 3, 4])]
    cases += [(0.5, 3, [1, 3]), (0.45, 3, [1])]  # of the three that are left 0.47 is not enough
    for top_p, top_k, kept in cases:
        logits = probs.log().expand(1000, 5)
        tokens, logprobs, inside = variant("top_p").sample_tokens(logits, uniforms.double(), 1.0, top_p, top_k)
        expected = torch.zeros(5).index_copy(0, torch.tensor(kept), probs[kept] / probs[kept].sum())
        assert torch.allclose(torch.bincount(tokens, minlength=5) / 1000, expected, atol=2e-3), (top_p, top_k)
        assert torch.allclose(logprobs.exp(), expected[tokens], atol=1e-5)  # those of what is sampled from
        assert torch.equal(inside, (expected > 0).expand(1000, 5))
    whole, cut = (untimed(train("top_p", eval_rows=5, total_iterations=1, top_p=top_p)) for top_p in (1.0, 0.6))
    assert whole[0] == cut[0] and 0 < cut[1]["actor/entropy"] < 0.8 * whole[1]["actor/entropy"]


def test_top_p_trains_over_the_tokens_that_were_left_to_draw_from(variant, folder):
    """By hand, and after a change of weights the same tokens, where a new cut would leave others."""
    algo, prompts = variant("top_p"), [[5, 6, 7], [9]] * 4
    model = algo.load_model(folder / "model", AutoModelForCausalLM)
    responses = algo.generate(model, prompts, torch.rand(8, 10, dtype=torch.float64), [1], 1.0, 0.8, 0)
    tokens, mask, said, _ = algo.to_batch([{"input_ids": ids} for ids in prompts], responses, "cpu")
    sets = algo.sets_of([r.kept for r in responses], (torch.arange(8), ...))
    policy = algo.Policy(model, 1.0)
    policy.chunk_elements = 3 * model.config.vocab_size
    for change in 1.0, 0.5:
        model.lm_head.weight.data *= change
        logprobs, *_ = policy(tokens, mask, False, sets)
        logits, labels = model(tokens).logits.detach()[mask], tokens.roll(-1, 1)[mask]
        by_hand = [x[a] - x[ids].logsumexp(0) for x, a, ids in zip(logits, labels, sets, strict=True)]
        assert torch.allclose(logprobs[mask], torch.stack(by_hand), atol=1e-5)
        assert torch.allclose(logprobs, said, atol=1e-5) == (change == 1)
    assert len({len(ids) for ids in sets}) > 3


def test_pass_at_k_is_the_expected_best_of_k_and_a_vote(variant, train, tmp_path):
    """Against all choices of k of the samples in a run's completions."""
    algo = variant("pass_at_k")

    def best(scores, k):
        return torch.stack([scores[:, list(choice)].amax(1) for choice in itertools.combinations(range(6), k)]).mean(0)

    texts = ["#### 7", "so #### 1,234", "well #### 1234.0", "#### $1234"]  # three of the same number
    votes = [{"response": text, "score": score} for text, score in zip(texts, [0.0, 1.0, 1.0, 1.0])]
    assert algo.majority_score(votes) == 1
    (_, m) = train("pass_at_k", eval_rows=5, eval_samples=6, total_iterations=1, run_name="run")
    rows = read_rows(tmp_path / "run" / "completions" / "eval_sampled_000001.jsonl")
    groups = [[row for row in rows if row["prompt"] == prompt] for prompt in sorted({row["prompt"] for row in rows})]
    assert len(groups) == 5 and all(len({row["response"] for row in group}) > 3 for group in groups)
    scores = torch.tensor([[row["score"] for row in group] for group in groups])
    assert m["eval/score_sampled"] == pytest.approx(scores.mean().item(), abs=1e-6)
    for k in 2, 4:
        assert m[f"eval/pass@{k}"] == pytest.approx(best(scores, k).mean().item(), abs=1e-6)


class Engine:
    """In place of vLLM's: answers with the weights it was last given, and claims log-probs that are lower by 0.003."""

    def __init__(self, name, **options):
        self.model, self.llm_engine = AutoModelForCausalLM.from_pretrained(name), mock.Mock()
        self.model.apply(self.model._init_weights)  # of load_format="dummy"
        self.reset_prefix_cache = mock.Mock()

    def collective_rpc(self, method, kwargs):
        assert method == "reload_weights" and not self.model.load_state_dict(dict(kwargs["weights_iterator"]))[1]

    def generate(self, prompts, params, use_tqdm):
        for prompt, own in zip(prompts, params):
            noise = torch.rand(1, own.max_tokens, generator=torch.Generator().manual_seed(own.seed))
            rows = [prompt.prompt_token_ids], noise, own.stop_token_ids, own.temperature
            (response,) = sys.modules["vllm_llm"].generate(self.model, *rows)
            logprobs = [{i: SimpleNamespace(logprob=x - 0.003)} for i, x in zip(response.ids, response.logprobs)]
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=response.ids, logprobs=logprobs)])


def test_vllm_gets_the_newest_weights(variant, train, monkeypatch):
    """With an engine of our own; the real one: test_vllm.py."""
    fake = SimpleNamespace(LLM=Engine, SamplingParams=SimpleNamespace, TokensPrompt=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "vllm", fake)
    metrics = train("vllm", lr=0.02)
    kls = [(math.exp(0.003) - 1.003) * n / 16 for n in column(metrics, "response/length_mean")]  # 16 count at least
    assert column(metrics, "rollout/kl") == pytest.approx(kls, rel=1e-3)
    assert metrics[3]["kl/mean"] > 1e-4  # older weights would differ


# --- speed, memory and precision


def test_shared_prompt_gives_the_same_gradients(variant, folder):
    """In rows of a prompt and all its responses; two prompts are equal but for the last token."""
    algo, plain = variant("shared_prompt"), load_script(ROOT / "grpo_llm.py")
    prompts = [5, 6, 7, 8, 9, 10, 11], [5, 6, 7, 8, 9, 10, 12], [9], [*range(20, 32)]
    rows = [{"input_ids": prompt} for prompt in prompts for _ in range(4)]
    responses = [plain.Response([*range(3 + i, 3 + i + n)], [0.0] * n, False) for i, n in enumerate((1, 5, 9, 3) * 4)]
    tokens, mask, _, _ = plain.to_batch(rows, responses, "cpu")
    found = []
    for script in plain, algo:
        model, widths = AutoModelForCausalLM.from_pretrained(folder / "model"), []
        model.base_model.register_forward_pre_hook(lambda _, args, w=widths: w.extend(x.shape for x in args))
        logprobs, entropy, _ = script.Policy(model, 0.9)(tokens, mask)
        ((logprobs * torch.arange(21)).sum() + entropy.sum()).backward()
        found.append((widths[0], [logprobs.detach(), entropy.detach(), *(p.grad for p in model.parameters())]))
    (wide, theirs), (narrow, ours) = found
    assert wide == (16, 21) and narrow == (4, 12 + 14)  # the last token of a response is no state
    assert all((a - b).abs().max() <= 1e-6 * max(1, b.abs().max()) for a, b in zip(ours, theirs, strict=True))
    window = SimpleNamespace(config=MistralConfig(sliding_window=4))  # there, siblings would read each other
    assert "needs full attention in every layer" in refusal(lambda: algo.Policy(window, 1.0))


def test_fp32_head_narrows_the_gap_of_bfloat16(variant, train, spy):
    """With the bundled model, whose head is tied. With LoRA, an untied one isn't cast like other frozen layers."""
    kinds = spy(variant("fp32_head").Float32Head, "forward", lambda head, _: head.weight.dtype)
    train("fp32_head", dtype="bfloat16", lora_rank=4, total_iterations=1)
    assert {*kinds} == {torch.float32}
    tiny, gaps = ROOT / "benchmarks" / "tiny", []
    questions = [row["question"] for row in read_rows(tiny / "test.jsonl")[:16]]
    ids = AutoTokenizer.from_pretrained(tiny / "model")(questions)["input_ids"]
    uniforms = torch.rand(16, 6, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    for algo in load_script(ROOT / "grpo_llm.py"), variant("fp32_head"):
        model = algo.load_model(tiny / "model", AutoModelForCausalLM)
        with torch.autocast("cpu", torch.bfloat16):
            responses = algo.generate(model, ids, uniforms, [1], 1.0)
            tokens, mask, said, _ = algo.to_batch([{"input_ids": prompt} for prompt in ids], responses, "cpu")
            logprobs, *_ = algo.Policy(model, 1.0)(tokens, mask)
        gaps.append((logprobs - said)[mask].square().mean())
    assert 0 < gaps[1] < gaps[0] / 4


def test_fp16_has_the_gradients_of_float32(train):
    half, whole, bfloat = (train("fp16", dtype=x, total_iterations=1)[1] for x in ("float16", "float32", "bfloat16"))
    assert whole["actor/grad_norm"] != half["actor/grad_norm"] == pytest.approx(whole["actor/grad_norm"], rel=0.05)
    assert (half["loss_scale"], whole["loss_scale"], half["overflows"]) == (2.0**16, 1, 0)
    assert 5e-13 < half["rollout/kl"] < bfloat["rollout/kl"] / 4
