"""The variant `paged`: transformers' own engine in the place of `generate`."""

import gc
import json
import threading

import pytest
import torch
from conftest import make_model, read_rows, refusal
from test_variants import flags_of, folder, resumed, script_of, sharded, train, train_by_two, variant  # noqa: F401
from torch import nn
from transformers.generation.continuous_batching import PagedAttentionCache
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.requests import RequestState

# ruff: noqa: F811


def engines():
    """How many threads are sampling."""
    return sum("_run_generation_loop" in thread.name for thread in threading.enumerate())


@pytest.fixture
def seen(variant, monkeypatch):
    """What happened in a run: `batches`, lists of Responses; `models`, the policy first; and after each rollout what is
    left of the engine, in `left`."""
    algo, found = variant("paged"), {"batches": [], "models": [], "left": []}
    scores, load = algo.compute_scores, algo.load_model

    def compute_scores(reward, tokenizer, rows, responses):
        model = found["models"][0]
        caches = [thing for thing in gc.get_objects() if isinstance(thing, PagedAttentionCache)]
        found["left"].append((model.config._attn_implementation, model.training, engines(), caches))
        found["batches"].append(responses)
        return scores(reward, tokenizer, rows, responses)

    monkeypatch.setattr(algo, "compute_scores", compute_scores)
    monkeypatch.setattr(
        algo, "load_model", lambda *a, **k: found["models"].append(load(*a, **k)) or found["models"][-1]
    )
    return found


def diffs(metrics):
    return [m["rollout/logprob_diff"] for m in metrics if "rollout/logprob_diff" in m]


@pytest.mark.parametrize("flags", [{}, {"lora_rank": 2, "gradient_checkpointing": True}], ids=["whole", "lora"])
def test_the_engine_samples_with_the_weights_of_the_moment(train, seen, flags):
    metrics = train("paged", lr=0.02, **flags)
    assert max(diffs(metrics)) < 1e-6
    assert all(abs(m["kl/mean"]) > 1e-4 for m in metrics[-2:])  # stale weights, an adapter asleep: they would differ so
    assert all(left == ("sdpa", True, 0, []) for left in seen["left"])  # nothing of the engine is left for the update


def test_a_response_ends_with_the_first_eos_or_is_truncated(train, seen, tmp_path):
    """A model's own sampling settings are ignored; each EOS id of its ends a response, and is trained on."""
    model = make_model(tmp_path / "model", initializer_range=0.1, eos_token_id=[1, 2])
    settings = {"eos_token_id": [1, 2], "do_sample": True, "top_k": 2, "repetition_penalty": 5.0, "temperature": 0.1}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(settings))
    metrics = train("paged", model=model, temperature=0.7, batch_size=16, minibatch_size=64, total_iterations=1)
    assert max(diffs(metrics)) < 1e-6  # log-probs are those after the temperature
    (responses,) = seen["batches"]
    for ids, logprobs, truncated in responses:
        assert len(ids) == len(logprobs) <= 12 and not {1, 2}.intersection(ids[:-1])
        assert truncated == (ids[-1] not in (1, 2)) and (not truncated or len(ids) == 12)
    assert {ids[-1] for ids, _, truncated in responses if not truncated} == {1, 2}
    assert 0 < metrics[-1]["response/truncated_frac"] < 1
    assert len({ids[0] for ids, _, _ in responses}) > 10  # of 45: no top_k


@pytest.fixture
def check_greedy_answers(train, tmp_path):
    """They have to be those of `generate`."""

    def check(**flags):
        flags |= {"eval_rows": 5, "total_iterations": 0}
        train("paged", run_name="paged", **flags)
        train("paged", run_name="plain", on=script_of("paged"), **flags)
        paged, plain = (read_rows(tmp_path / name / "completions" / "eval_000000.jsonl") for name in ("paged", "plain"))
        assert len(plain) == 5 and paged == plain

    return check


@pytest.mark.parametrize(
    "sizes", [{}, {"microbatch_tokens": 16, "rollout_batch_size": 2}], ids=["at once", "in pieces"]
)
def test_greedy_answers_are_those_of_generate(check_greedy_answers, sizes):
    """Also where prompts are read in pieces, and responses take the places of those that have ended."""
    check_greedy_answers(**sizes)


@pytest.mark.parametrize("sharing", [True, False])
def test_rows_that_lose_their_pages_are_read_again(variant, train, check_greedy_answers, seen, monkeypatch, sharing):
    """In a cache for two rows. Prompts share pages, but none with those of older weights."""
    library = variant("paged").transformers  # transformers runs its __init__ twice, so ours may be another module
    config, again, lost = library.ContinuousBatchingConfig, RequestState.create_equivalent_initial_request, []
    small = {"page_size": 4, "num_blocks": 14, "allow_block_sharing": sharing}
    monkeypatch.setattr(library, "ContinuousBatchingConfig", lambda **options: config(**options | small))
    monkeypatch.setattr(
        RequestState, "create_equivalent_initial_request", lambda row: lost.append(row.generated_len()) or again(row)
    )
    assert max(diffs(train("paged", lr=0.02))) < 1e-6
    assert max(lost) > 1  # rows that had begun to answer
    assert all(len(r.ids) == len(r.logprobs) <= 12 for batch in seen["batches"] for r in batch)
    lost.clear()
    check_greedy_answers()
    assert max(lost) > 1


def test_the_engine_has_our_autocast(train, monkeypatch):
    """It runs in a thread of its own, where autocast has to be switched on again."""
    types, forward = set(), nn.Linear.forward

    def linear(module, x):
        output = forward(module, x)
        types.add((threading.current_thread() is threading.main_thread(), output.dtype))
        return output

    monkeypatch.setattr(nn.Linear, "forward", linear)
    flags = {"dtype": "bfloat16", "total_iterations": 2, "batch_size": 16, "minibatch_size": 64}
    metrics = train("paged", **flags)
    assert types == {(True, torch.bfloat16), (False, torch.bfloat16)}
    plain = train("paged", on=script_of("paged"), **flags)
    assert all(1e-5 < a < 2 * b for a, b in zip(diffs(metrics), diffs(plain), strict=True))


def test_a_run_repeats_and_resumes_to_the_bit(train):
    resumed(train, "paged", 1, total_iterations=2, save_every=1)


def test_an_error_in_the_engine_ends_the_run(train, monkeypatch):
    def fail(*_):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(ModelRunner, "_sample", fail)
    assert refusal(lambda: train("paged")) == "error: the engine: no kernel"
    assert engines() == 0


@pytest.mark.slow
def test_two_processes_answer_alike_when_greedy(train, folder, tmp_path):
    """Sampled responses are others: a rank has one generator for all its rows. One rank has fewer rows, or none."""
    for rows in 5, 1:
        flags = {"total_iterations": 0, "eval_rows": rows}
        by_two = flags_of("paged", folder, **flags, output_dir=tmp_path, run_name=f"two{rows}")
        train_by_two(folder / "paged_llm.py", by_two)
        train("paged", run_name=f"one{rows}", **flags)
        two, one = (read_rows(tmp_path / f"{n}{rows}" / "completions" / "eval_000000.jsonl") for n in ("two", "one"))
        assert two == one and len(one) == rows


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sharded_policy_is_sampled_from(sharded, folder, tmp_path, dtype):
    """Where a device has gathered it."""
    path = folder / "paged_fsdp.py"
    path.write_text(sharded("paged")[0])
    flags = {"lr": 0.02, "dtype": dtype, "rollout_params": "gathered", "output_dir": tmp_path, "run_name": "run"}
    found = diffs(train_by_two(path, flags_of("paged", folder, **flags)))
    assert len(found) == 3 and max(found) < (1e-6 if dtype == "float32" else 0.02)
