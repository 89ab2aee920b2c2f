"""notes/tiny_ppo.py, the core alone: it computes what ppo_llm.py computes, and learns."""

import ast
import re
import sys
from unittest import mock

import pytest
import torch
from conftest import ROOT, load_script, read_metrics

sys.path.append(str(ROOT / "notes"))
import tiny_ppo

BATCH, MINIBATCH, ITERATIONS = 16, 4, 2
SIZES = {"batch_size": BATCH, "minibatch_size": MINIBATCH, "total_iterations": ITERATIONS, "eval_rows": 0}
SIZES |= {"save_every": 0, "track": "none", "run_name": "run", "max_response_length": 40}


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Per iteration, by the same rollouts: ppo_llm.py's advantages and metrics; tiny_ppo's advantages, losses, norms.

    tiny_ppo is handed the rows in the order in which ppo_llm.py takes its minibatches.
    """
    ppo = load_script(ROOT / "ppo_llm.py")
    folder = tmp_path_factory.mktemp("tiny")
    batches, scored, credited = [], [], []

    def keep(kept, function):
        def wrapper(*args):
            kept.append(function(*args))
            return kept[-1]

        return wrapper

    with mock.patch.multiple(
        ppo,
        to_batch=keep(batches, ppo.to_batch),
        compute_scores=keep(scored, ppo.compute_scores),
        masked_whiten=keep(credited, ppo.masked_whiten),
    ):
        embedded = {"output_dir": str(folder), "seed": 1}
        ppo.main(ppo.Args(**ppo.EMBEDDED | SIZES | embedded))
    orders = []
    for iteration in range(1, ITERATIONS + 1):
        stream = ppo.random_stream("minibatches", 1, iteration)
        order = torch.rand(BATCH // MINIBATCH, generator=stream).argsort()
        orders.append(torch.cat([torch.arange(BATCH).split(MINIBATCH)[k] for k in order]))

    queue = iter(zip(orders, batches, scored))
    now, steps, advantages = [], [], []

    def sample(model, rows):
        now[:] = next(queue)
        order, (tokens, mask, _, _), _ = now
        return tokens[order], mask[order][:, :-1]

    def score(tokens, mask, rows):
        return torch.tensor(now[2][1])[now[0]]

    def step(optimizer, loss, take=tiny_ppo.step):
        steps.append((loss.item(), take(optimizer, loss).item()))

    patched = {"sample": sample, "score": score, "step": step, "evaluate": lambda *_: 0.0}
    patched |= {"BATCH_SIZE": BATCH, "MINIBATCH_SIZE": MINIBATCH, "whiten": keep(advantages, tiny_ppo.whiten)}
    with mock.patch.multiple(tiny_ppo, **patched):
        tiny_ppo.main(seed=1, iterations=ITERATIONS)
    metrics = read_metrics(folder / "run")[-ITERATIONS:]
    per_step = torch.tensor(steps).reshape(ITERATIONS, BATCH // MINIBATCH, 2, 2).mean(1)  # (iterations, network, 2)
    return [
        (credited[i][orders[i]], batches[i][1][orders[i]], metrics[i], advantages[i], per_step[i])
        for i in range(ITERATIONS)
    ]


@pytest.mark.parametrize("iteration", range(ITERATIONS))
def test_the_core_computes_what_ppo_llm_does(both, iteration):
    """In the second iteration actor and reference differ, so that the KL counts, and the values are not 0."""
    theirs, mask, metrics, ours, ((actor_loss, actor_norm), (critic_loss, critic_norm)) = both[iteration]
    assert mask.any(1).all() and (theirs[mask].std() > 0.5)
    assert torch.allclose(ours[mask[:, :-1]], theirs[mask], atol=1e-4)
    assert actor_loss.item() == pytest.approx(metrics["actor/loss"], abs=1e-4)
    assert critic_loss.item() == pytest.approx(metrics["critic/loss"], rel=1e-4)
    assert actor_norm.item() == pytest.approx(metrics["actor/grad_norm"], rel=1e-4)
    assert critic_norm.item() == pytest.approx(metrics["critic/grad_norm"], rel=1e-4)


def test_it_learns(capsys, monkeypatch):
    """By its own sampler: answers get longer, because they show their work, and right."""
    read_rows = tiny_ppo.read_rows
    monkeypatch.setattr(
        tiny_ppo, "read_rows", lambda name: read_rows(name)[:100] if "test" in name else read_rows(name)
    )
    tiny_ppo.main(seed=1, iterations=3)
    before, *lines, after = capsys.readouterr().out.splitlines()
    assert before.startswith("before: 0.00") and len(lines) == 3
    lengths = [float(line.split()[-1]) for line in lines]
    assert lengths[-1] > lengths[0] + 2 and float(after.split()[1]) > 0.5, (lengths, after)


def test_the_sampler_draws_from_the_whole_distribution():
    """At temperature 1 and without top-k: frequencies of the first token are its probabilities."""
    torch.manual_seed(0)
    model = tiny_ppo.AutoModelForCausalLM.from_pretrained(tiny_ppo.TINY / "model").eval()
    model.lm_head.weight.data.mul_(0.05)  # nearly flat: 50 of 420 tokens would be far from all
    rows = [tiny_ppo.read_rows("test.jsonl")[0]] * 400
    with mock.patch.object(tiny_ppo, "MAX_RESPONSE_LENGTH", 1):
        tokens, _ = tiny_ppo.sample(model, rows)
    assert len({*tokens[:, -1].tolist()}) > 150


# --- chapter 1, which builds the file


CHAPTER = (ROOT / "notes" / "01-ppo.md").read_text()


def test_the_pieces_of_the_chapter_are_those_of_the_file():
    pieces = re.findall(r"(?ms)^```python\n(.*?)^```$", CHAPTER)
    source = (ROOT / "notes" / "tiny_ppo.py").read_text()
    assert len(pieces) >= 5
    for piece in pieces:
        assert piece in source, piece


def functions(path):
    tree = ast.parse(path.read_text())
    return {x.name: x for x in ast.walk(tree) if isinstance(x, ast.FunctionDef | ast.ClassDef)}


def test_the_table_of_what_a_real_run_adds_counts_right():
    found = functions(ROOT / "ppo_llm.py")
    rows = re.findall(r"(?m)^\| ((?:`\w+`(?:, )?)+) \| (\d+) \|", CHAPTER)
    assert len(rows) >= 8
    for names, lines in rows:
        nodes = [found[name] for name in re.findall(r"`(\w+)`", names)]
        assert sum(node.end_lineno - node.lineno + 1 for node in nodes) == int(lines), names


def test_it_is_as_short_as_it_says():
    path = ROOT / "notes" / "tiny_ppo.py"
    documentation = set()
    for node in [ast.parse(path.read_text()), *functions(path).values()]:
        if ast.get_docstring(node):
            documentation |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = enumerate(path.read_text().splitlines(), 1)
    code = [line for i, line in lines if line.strip() and not line.strip().startswith("#") and i not in documentation]
    assert len(code) <= 150
    said = re.findall(r"(\d+) lines", CHAPTER[:1500] + (ROOT / "notes" / "web" / "home.md").read_text())
    assert {*said} == {str(len(code))}
