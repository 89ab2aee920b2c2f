"""notes/tiny_ppo.py, the core alone: it computes what ppo_llm.py computes, and learns."""

import ast
import re
import sys
from unittest import mock

import pytest
import torch
from conftest import ROOT, load_script, read_metrics
from test_project import code_numbers, load_benchmark

sys.path.append(str(ROOT / "notes"))
import tiny_ppo

BATCH, MINIBATCH, ITERATIONS = 16, 4, 2
SIZES = {"batch_size": BATCH, "minibatch_size": MINIBATCH, "total_iterations": ITERATIONS, "eval_rows": 0}
SIZES |= {"save_every": 0, "track": "none", "run_name": "run", "max_response_length": 40}


def keep(kept, function):
    def wrapper(*args):
        kept.append(function(*args))
        return kept[-1]

    return wrapper


def test_the_core_computes_what_ppo_llm_does(tmp_path, capsys):
    """By the same rollouts, in the order in which ppo_llm.py takes its minibatches. In the second iteration actor and
    reference differ, so that the KL counts, and the values are not 0."""
    ppo = load_script(ROOT / "ppo_llm.py")
    batches, scored, samples, scores, steps = [], [], [], [], []
    kept = {"to_batch": keep(batches, ppo.to_batch), "compute_scores": keep(scored, ppo.compute_scores)}
    with mock.patch.multiple(ppo, **kept):
        ppo.main(ppo.Args(**ppo.EMBEDDED | SIZES | {"output_dir": str(tmp_path)}))
    for iteration, ((tokens, mask, _, _), (_, plain_scores)) in enumerate(zip(batches, scored), 1):
        stream = ppo.random_stream("minibatches", 1, iteration)
        order = torch.rand(BATCH // MINIBATCH, generator=stream).argsort()
        rows = torch.arange(BATCH).view(-1, MINIBATCH)[order].flatten()
        samples.append((tokens[rows], mask[rows, :-1]))
        scores.append(torch.tensor(plain_scores)[rows])

    def step(optimizer, loss, take=tiny_ppo.step):
        steps.append((loss.item(), take(optimizer, loss).item()))

    patched = {"sample": lambda *_: samples.pop(0), "score": lambda *_: scores.pop(0), "evaluate": lambda *_: 0.0}
    patched |= {"step": step, "BATCH_SIZE": BATCH, "MINIBATCH_SIZE": MINIBATCH}
    capsys.readouterr()
    with mock.patch.multiple(tiny_ppo, **patched):
        tiny_ppo.main(seed=1, iterations=ITERATIONS)
    printed = [float(kl) for kl in re.findall(r" KL (\S+) ", capsys.readouterr().out)]
    per_step = torch.tensor(steps).reshape(ITERATIONS, BATCH // MINIBATCH, 2, 2).mean(1)  # (iterations, network, 2)
    logged = read_metrics(tmp_path / "run")[1:]
    assert printed == pytest.approx([metrics["kl/mean"] for metrics in logged], abs=2e-4) and printed[-1] > 5e-4
    for metrics, ((actor_loss, actor_norm), (critic_loss, critic_norm)) in zip(logged, per_step.tolist(), strict=True):
        assert actor_loss == pytest.approx(metrics["actor/loss"], abs=1e-4)
        assert critic_loss == pytest.approx(metrics["critic/loss"], rel=1e-4)
        assert actor_norm == pytest.approx(metrics["actor/grad_norm"], rel=1e-4)
        assert critic_norm == pytest.approx(metrics["critic/grad_norm"], rel=1e-4)


def test_it_learns(capsys, monkeypatch):
    """By its own sampler: answers get longer, because they show their work, and right."""
    monkeypatch.setattr(tiny_ppo, "BATCH_SIZE", 128)
    real = tiny_ppo.evaluate
    monkeypatch.setattr(tiny_ppo, "evaluate", lambda model, rows: real(model, rows[:40]))
    tiny_ppo.main(seed=1, iterations=3)
    before, *lines, after = capsys.readouterr().out.splitlines()
    assert before.startswith("before: 0.00") and len(lines) == 3
    lengths = [float(line.split()[-1]) for line in lines]
    assert lengths[0] + 2 < max(lengths) <= tiny_ppo.MAX_RESPONSE_LENGTH
    assert float(after.split()[1]) > 0.5


def test_the_sampler_draws_from_the_whole_distribution():
    """At temperature 1 and without top-k: frequencies of the first token are its probabilities."""
    torch.manual_seed(0)
    model = tiny_ppo.AutoModelForCausalLM.from_pretrained(tiny_ppo.TINY / "model").eval()
    model.lm_head.weight.data.mul_(0.05)  # nearly flat: 50 of 420 tokens would be far from all
    rows = [tiny_ppo.read_rows("test.jsonl")[0]] * 400
    with mock.patch.object(tiny_ppo, "MAX_RESPONSE_LENGTH", 1):
        tokens, _ = tiny_ppo.sample(model, rows)
    assert len({*tokens[:, -1].tolist()}) > 150


def test_the_mask_is_the_response_up_to_its_eos():
    """And nothing of the prompt, which is padded at its beginning."""
    rows, tokenizer = tiny_ppo.read_rows("test.jsonl")[:4], tiny_ppo.tokenizer
    torch.manual_seed(0)
    model = tiny_ppo.AutoModelForCausalLM.from_pretrained(tiny_ppo.TINY / "model").eval()
    tokens, mask = tiny_ppo.sample(model, rows)
    prompts = [tokenizer(row["question"])["input_ids"] for row in rows]
    width = max(map(len, prompts))
    assert len({*map(len, prompts)}) > 1
    for row, chosen in zip(tokens.tolist(), mask.tolist()):
        response = row[width:]
        end = response.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in response else len(response)
        assert [i + 1 for i, is_action in enumerate(chosen) if is_action] == [*range(width, width + end)]


# --- chapter 1, which builds the file

CHAPTER = (ROOT / "notes" / "01-ppo.md").read_text()


def test_the_pieces_of_the_chapter_are_those_of_the_file():
    pieces = re.findall(r"(?ms)^```python\n(.*?)^```$", CHAPTER)
    source = (ROOT / "notes" / "tiny_ppo.py").read_text()
    assert len(pieces) >= 5
    for piece in pieces:
        assert piece in source, piece


def test_the_tables_of_results_are_what_the_runs_say():
    """As `python benchmarks/campaigns/walls.py tables` prints them; and scores that stand in the text."""
    walls = load_benchmark("walls")
    found = walls.tables()
    assert len(found) >= 8 and [table for table in found if table not in CHAPTER] == []
    text = " ".join(CHAPTER.split())
    (*_, best) = walls.score_rows(("", "ppo-epochs4-ratio"))
    ten, _, forty = [re.sub(r"(.*),", r"\1 and", cell) for cell in best[1:]]
    assert f"after 10 iterations the three seeds are at {ten}, after 40 at {forty}" in text
    for path in sorted(walls.RESULTS.glob("tiny_*.csv")):
        lines = path.read_text().splitlines()
        assert f"from {lines[1].split(',')[-1]} to {lines[-1].split(',')[-1]} in 40 iterations" in text


def test_the_table_of_what_a_real_run_adds_counts_right():
    source = (ROOT / "ppo_llm.py").read_text()
    code = code_numbers(source)
    found = {x.name: x for x in ast.walk(ast.parse(source)) if isinstance(x, ast.FunctionDef | ast.ClassDef)}
    rows = re.findall(r"(?m)^\| ((?:`\w+`(?:, )?)+) \| (\d+) \|", CHAPTER)
    assert len(rows) >= 8
    for names, lines in rows:
        nodes = [found[name] for name in re.findall(r"`(\w+)`", names)]
        assert sum(node.lineno <= i <= node.end_lineno for node in nodes for i in code) == int(lines), names


def test_it_is_as_short_as_it_says():
    lines = len(code_numbers((ROOT / "notes" / "tiny_ppo.py").read_text()))
    assert lines <= 150
    said = re.findall(r"(\d+) lines", CHAPTER[:1500] + (ROOT / "notes" / "web" / "home.md").read_text())
    assert {*said} == {str(lines)}
