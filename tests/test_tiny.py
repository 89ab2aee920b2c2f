"""notes/tiny_ppo.py, the core alone: it computes what ppo_llm.py computes, and learns."""

import ast
import re
import statistics
from unittest import mock

import pytest
import tiny_ppo
import torch
from conftest import ROOT, load_script, read_metrics
from test_project import code_numbers, load_benchmark

BATCH, MINIBATCH, ITERATIONS = 16, 4, 2
SIZES = {"batch_size": BATCH, "minibatch_size": MINIBATCH, "total_iterations": ITERATIONS, "eval_rows": 0}
SIZES |= {"save_every": 0, "track": "none", "run_name": "run", "max_response_length": 40}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return tiny_ppo.AutoModelForCausalLM.from_pretrained(tiny_ppo.TINY / "model").eval()


def test_the_core_computes_what_ppo_llm_does(tmp_path, capsys, spy):
    """By the same rollouts, in the order in which ppo_llm.py takes its minibatches. In the second iteration actor and
    reference differ, so that the KL counts, and the values are not 0."""
    ppo = load_script(ROOT / "ppo_llm.py")
    batches, scored, samples, scores, steps = spy(ppo, "to_batch"), spy(ppo, "compute_scores"), [], [], []
    ppo.main(ppo.Args(**ppo.EMBEDDED | SIZES | {"output_dir": str(tmp_path)}))
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


def test_the_sampler_draws_from_the_whole_distribution(model):
    """At temperature 1 and without top-k: frequencies of the first token are its probabilities."""
    model.lm_head.weight.data.mul_(0.05)  # nearly flat: 50 of 420 tokens would be far from all
    rows = [tiny_ppo.read_rows("test.jsonl")[0]] * 400
    with mock.patch.object(tiny_ppo, "MAX_RESPONSE_LENGTH", 1):
        tokens, _ = tiny_ppo.sample(model, rows)
    assert len({*tokens[:, -1].tolist()}) > 150


def test_the_mask_is_the_response_up_to_its_eos(model):
    """And nothing of the prompt, which is padded at its beginning."""
    rows, tokenizer = tiny_ppo.read_rows("test.jsonl")[:4], tiny_ppo.tokenizer
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
common, read_runs = load_benchmark("common"), load_benchmark("plot").read_runs
NOISES = {  # baseline in noise.csv, digits
    "none, scores 10 and 11": ("none, scores 10 and 11", 0),
    "none, scores 0 and 1": ("none", 1),
    "mean of the batch (the unit)": ("batch mean", 0),
    "mean of the group": ("group mean", 1),
    "mean of the batch, over tokens": ("token mean", 1),
}


def test_the_pieces_of_the_chapter_are_those_of_the_file():
    pieces = re.findall(r"(?ms)^```python\n(.*?)^```$", CHAPTER)
    source = (ROOT / "notes" / "tiny_ppo.py").read_text()
    assert len(pieces) >= 5
    for piece in pieces:
        assert piece in source, piece


def cells_of(words):
    """Of the row of a table that begins with these words."""
    (cells,) = re.findall(rf"(?m)^\| {re.escape(words)} \| (.*) \|$", CHAPTER)
    return cells.split(" | ")


def test_the_tables_of_scores_are_what_the_runs_say():
    """Sampled test scores of each seed; of three algorithms the mean, the lowest and the highest."""
    rows = re.findall(r"(?m)^\| .* \(`([\w-]+)`\) \| (.*) \|$", CHAPTER)
    assert len(rows) == 14
    for name, cells in rows:
        runs = read_runs(common.RESULTS / name)[:3] if "(" in cells else read_runs(common.RESULTS / "variants" / name)
        zero = 10 * ("ten" in name)
        said = []
        for step in (0, 10, 20, 40) if cells.count("|") == 3 else (10, 20, 40):
            scores = [run[step]["eval/score_sampled"] - zero for run in runs]
            said.append(common.spread(scores) if "(" in cells else ", ".join(f"{score:.2f}" for score in scores))
        assert cells.endswith(" | ".join(said)), name
    for words in "ratio only (`ppo-epochs4-ratio`)", "ratio and clip (`ppo-epochs4`)":
        runs = read_runs(common.RESULTS / "variants" / words.split("`")[1])
        largest = [[row["actor/ratio_max"] for row in run[1:]] for run in runs]
        said = [", ".join(f"{max(x):.0f}" for x in largest), ", ".join(f"{statistics.median(x):.1f}" for x in largest)]
        assert cells_of(words)[:2] == said
    ten, _, forty = [re.sub(r"(.*),", r"\1 and", cell) for cell in cells_of("ratio only (`ppo-epochs4-ratio`)")[2:]]
    text = " ".join(CHAPTER.split())
    assert f"after 10 iterations the three seeds are at {ten}, after 40 at {forty}" in text
    for path in sorted((common.RESULTS / "walls").glob("tiny_*.csv")):
        before, *_, after = common.read_csv(path)
        assert f"from {before['greedy']} to {after['greedy']} in 40 iterations" in text


def test_the_table_of_noise_is_what_was_measured():
    rows = common.grouped(common.read_csv(common.RESULTS / "walls" / "noise.csv"), "policy", "baseline")
    for words, (baseline, digits) in NOISES.items():
        said = []
        for policy in "start", "later":
            pairs = zip(rows[policy, baseline], rows[policy, "batch mean"])
            values = [float(row["variance"]) / float(unit["variance"]) for row, unit in pairs]
            ends = [f"{end(values):.{digits}f}" for end in (min, max)]
            said.append(" to ".join(dict.fromkeys(ends)))  # one, if they are the same
        assert cells_of(words) == said


def test_the_table_of_prices_is_what_the_story_runs_say():
    """Of each seed: rise in standard deviations, KL at the end, change of the distinct bigrams."""
    table = (common.RESULTS / "stories" / "table.md").read_text().splitlines()
    for price in "0", "0.003", "0.01", "0.03", "0.1", "0.3":
        name = "ppo-kl-off" if price == "0" else f"ppo-kl-{price}"
        runs = [line.strip("| ").split(" | ") for line in table if line.startswith(f"| {name} |")]
        said = [", ".join(run[column] for run in runs) for column in (5, 6, 9)]
        assert cells_of(price) == [cell.replace("-", "\N{MINUS SIGN}") for cell in said]


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
