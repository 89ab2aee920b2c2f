"""notes/tiny_ppo.py, the core alone: it computes what ppo_llm.py computes, and learns."""

import re
from unittest import mock

import pytest
import tiny_ppo
import torch
from helpers import ROOT, load_script, read_metrics
from test_project import code_numbers

BATCH, MINIBATCH, ITERATIONS = 8, 2, 2
FLAGS = {"batch_size": BATCH, "minibatch_size": MINIBATCH, "total_iterations": ITERATIONS, "max_response_length": 40}
FLAGS |= {"eval_rows": 0, "save_every": 0, "track": "none", "run_name": "run"}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return tiny_ppo.AutoModelForCausalLM.from_pretrained(tiny_ppo.TINY / "model").eval()


def test_the_core_computes_what_ppo_llm_does(tmp_path, capsys, spy):
    """By the same rollouts, in the order in which ppo_llm.py takes its minibatches. In the second iteration actor and
    reference differ, so that the KL counts, and the values are not 0."""
    ppo = load_script(ROOT / "ppo_llm.py")
    batches, scored, samples, scores, steps = spy(ppo, "to_batch"), spy(ppo, "compute_scores"), [], [], []
    ppo.main(ppo.Args(**ppo.BUNDLED | FLAGS | {"output_dir": str(tmp_path)}))
    for iteration, ((_, (tokens, mask, *_)), (_, results)) in enumerate(zip(batches, scored), 1):
        stream = ppo.random_stream("minibatches", 1, iteration)
        order = torch.rand(BATCH // MINIBATCH, generator=stream).argsort()
        rows = torch.arange(BATCH).view(-1, MINIBATCH)[order].flatten()
        samples.append((tokens[rows], mask[rows, :-1]))
        scores.append(torch.tensor([result["score"] for result in results])[rows])

    def step(optimizer, loss, take=tiny_ppo.step):
        steps.append((loss.item(), take(optimizer, loss).item()))

    patched = {"sample": lambda *_: samples.pop(0), "score": lambda *_: scores.pop(0), "evaluate": lambda *_: 0.0}
    patched |= {"step": step, "BATCH_SIZE": BATCH, "MINIBATCH_SIZE": MINIBATCH}
    capsys.readouterr()
    with mock.patch.multiple(tiny_ppo, **patched):
        tiny_ppo.main(seed=1, iterations=ITERATIONS)
    printed = [float(kl) for kl in re.findall(r" KL (\S+) ", capsys.readouterr().out)]
    logged = read_metrics(tmp_path / "run")[1:]
    assert printed == pytest.approx([metrics["kl/mean"] for metrics in logged], abs=2e-4) and printed[-1] > 5e-4
    names = "actor/loss", "actor/grad_norm", "critic/loss", "critic/grad_norm"
    expected = torch.tensor([[metrics[name] for name in names] for metrics in logged])
    found = torch.tensor(steps).reshape(ITERATIONS, BATCH // MINIBATCH, 4).mean(1)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4), (found, expected)


@pytest.mark.slow
def test_it_learns(capsys):
    """By its own sampler and rewards."""
    few = {"BATCH_SIZE": 128, "evaluate": lambda model, rows, real=tiny_ppo.evaluate: real(model, rows[:40])}
    with mock.patch.multiple(tiny_ppo, **few):
        tiny_ppo.main(seed=1, iterations=3)
    before, *_, after = capsys.readouterr().out.splitlines()
    assert before.startswith("before: 0.00") and float(after.split()[1]) > 0.5


def test_the_sampler_draws_from_the_whole_distribution(model):
    """At temperature 1 and without top-k: frequencies of the first token are its probabilities."""
    model.lm_head.weight.data.mul_(0.05)  # nearly flat: 50 of 420 tokens would be far from all
    rows = [tiny_ppo.read_rows("test.jsonl")[0]] * 400
    with mock.patch.object(tiny_ppo, "MAX_RESPONSE_LENGTH", 1):
        tokens, _ = tiny_ppo.sample(model, rows)
    assert len({*tokens[:, -1].tolist()}) > 150


def test_the_mask_is_the_response_up_to_its_eos(model):
    """And nothing of the prompt, which is padded at its beginning."""
    rows, eos = tiny_ppo.read_rows("test.jsonl")[:4], tiny_ppo.tokenizer.eos_token_id
    tokens, mask = tiny_ppo.sample(model, rows)
    first = max(len(tiny_ppo.tokenizer(row["question"])["input_ids"]) for row in rows)
    for row, chosen in zip(tokens.tolist(), mask):
        end = row.index(eos, first) + 1 if eos in row[first:] else len(row)
        assert [i + 1 for i in chosen.nonzero().flatten().tolist()] == [*range(first, end)]


def test_the_chapter_shows_the_file_and_how_short_it_is():
    chapter, source = ((ROOT / "notes" / name).read_text() for name in ("01-ppo.md", "tiny_ppo.py"))
    pieces = re.findall(r"(?ms)^```python\n(.*?)^```$", chapter)
    assert len(pieces) >= 5 and [piece for piece in pieces if piece not in source] == []
    lines = len(code_numbers(source))
    said = re.findall(r"(\d+) lines", chapter[:1500] + (ROOT / "notes" / "web" / "home.md").read_text())
    assert {*said} == {str(lines)} and lines <= 150
