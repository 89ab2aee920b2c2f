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
def seen(variant, spy):
    """A list that gets of each rollout the Responses, and what is left of the engine after it."""
    algo = variant("paged")
    models = spy(algo, "load_model")  # the policy comes first

    def look(reward, tokenizer, rows, responses):
        (_, model), *_ = models
        caches = [thing for thing in gc.get_objects() if isinstance(thing, PagedAttentionCache)]
        return responses, (model.config._attn_implementation, model.training, engines(), caches)

    return spy(algo, "compute_scores", look)


def diffs(metrics):
    return [m["rollout/logprob_diff"] for m in metrics if "rollout/logprob_diff" in m]


@pytest.mark.parametrize("flags", [{}, {"lora_rank": 2, "gradient_checkpointing": True}], ids=["whole", "lora"])
def test_the_engine_samples_with_the_weights_of_the_moment(train, seen, flags):
    metrics = train("paged", lr=0.02, **flags)
    assert max(diffs(metrics)) < 1e-6
    assert all(abs(m["kl/mean"]) > 1e-4 for m in metrics[-2:])  # stale weights, an adapter asleep: they would differ so
    assert all(left == ("sdpa", True, 0, []) for _, left in seen)  # nothing of the engine is left for the update


def test_a_response_ends_with_the_first_eos_or_is_truncated(train, seen, tmp_path):
    """A model's own sampling settings are ignored; each EOS id of its ends a response, and is trained on."""
    model = make_model(tmp_path / "model", initializer_range=0.1, eos_token_id=[1, 2])
    settings = {"eos_token_id": [1, 2], "do_sample": True, "top_k": 2, "repetition_penalty": 5.0, "temperature": 0.1}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(settings))
    metrics = train("paged", model=model, temperature=0.7, batch_size=16, minibatch_size=64, total_iterations=1)
    assert max(diffs(metrics)) < 1e-6  # log-probs are those after the temperature
    ((responses, _),) = seen
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
        answers = []
        for name, script in ("paged", None), ("plain", script_of("paged")):
            train("paged", run_name=name, on=script, eval_rows=5, total_iterations=0, **flags)
            answers.append(read_rows(tmp_path / name / "completions" / "eval_000000.jsonl"))
        assert len(answers[1]) == 5 and answers[0] == answers[1]

    return check


def test_greedy_answers_are_those_of_generate(check_greedy_answers):
    """Also where prompts are read in pieces, and responses take the places of those that have ended."""
    check_greedy_answers(microbatch_tokens=16, rollout_batch_size=2)


def test_rows_that_lose_their_pages_are_read_again(variant, train, check_greedy_answers, seen, monkeypatch, spy):
    """In a cache for two rows. Prompts share pages, but none with those of older weights."""
    library = variant("paged").transformers  # transformers runs its __init__ twice, so ours may be another module
    config, small = library.ContinuousBatchingConfig, {"page_size": 4, "num_blocks": 14}
    monkeypatch.setattr(library, "ContinuousBatchingConfig", lambda **options: config(**options | small))
    lost = spy(RequestState, "create_equivalent_initial_request", lambda row: row.generated_len())
    assert max(diffs(train("paged", lr=0.02, total_iterations=2))) < 1e-6
    assert max(lost) > 1  # rows that had begun to answer
    assert all(len(r.ids) == len(r.logprobs) <= 12 for responses, _ in seen for r in responses)
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
    flags = {"dtype": "bfloat16", "total_iterations": 1, "batch_size": 16, "minibatch_size": 64}
    (ours,) = diffs(train("paged", **flags))
    assert types == {(True, torch.bfloat16), (False, torch.bfloat16)}
    (plain,) = diffs(train("paged", on=script_of("paged"), **flags))
    assert 1e-5 < ours < 2 * plain


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
