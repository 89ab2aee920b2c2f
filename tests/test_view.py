"""benchmarks/view.py: the page in a real browser (the extra `browser`, and a Chromium of the system)."""

import json
import random
import re
import shutil
from unittest import mock

import pytest
from helpers import TINY, each_script, write_rows
from test_project import load_benchmark
from transformers import AutoTokenizer

view = load_benchmark("view")
EVIL = "</script><img src=x onerror=alert(1)><!--<script>"
ODD = [
    EVIL,
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd abc",
    "👩‍👩‍👧‍👦 🏳️‍🌈\u2028é\ufeff",
    "x y " * 25_000,
    "",
    "${alert(1)} &lt;b&gt;",
]


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
    if path is None:
        pytest.skip("no Chromium on the path")
    with playwright.sync_playwright() as running:
        yield running.chromium.launch(executable_path=path)


@pytest.fixture
def show(browser):
    """show(folders, words): the page of these runs, open. In the end, nothing was executed, loaded or went wrong."""
    pages, trouble = [], []

    def opened(*folders, words=(), width=1280):
        output = folders[0].parent / "page.html"
        view.main([*map(str, folders), "--output", str(output), *words])
        page = browser.new_page(viewport={"width": width, "height": 900})
        page.on("dialog", lambda dialog: trouble.append(dialog.message) or dialog.dismiss())
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.on("console", lambda message: trouble.append(message.text))
        page.on("request", lambda request: trouble.append(request.url) if request.url != output.as_uri() else None)
        pages.append(page)
        page.goto(output.as_uri())
        page.wait_for_selector("#now:not(:empty)")
        return page

    yield opened
    assert trouble == [] and all(page.evaluate("document.images.length") == 0 for page in pages)
    assert all(page.evaluate("document.documentElement.scrollWidth <= innerWidth") for page in pages)


def make_run(folder, steps=(0, 1, 2), texts=("a", "b"), parts=(), ids=(), flags=(), prompt="why?"):
    """A run folder as the scripts write it, with a number of tokens in the first 64 responses of a batch."""
    (folder / "completions").mkdir(parents=True)
    args = {"model": str(TINY / "model"), "lr": 0.1, "script": EVIL} | dict(flags)
    (folder / "args.json").write_text(json.dumps(args))
    numbers = random.Random(0)
    rows = [{"step": step, "reward/mean": step / 7, "odd": float("nan")} for step in steps]
    write_rows(folder / "metrics.jsonl", [row | {f"part/{name}": 0.5 for name in parts} for row in rows])
    for step in steps:
        lines = []
        for i, text in enumerate(texts):
            line = {"prompt": f"{prompt} {i}", "answer": EVIL, "response": text, "score": float(i), "length": len(text)}
            line |= {"truncated": i == 0, "parts": {name: i * 0.5 for name in parts}, "row": {"topic": EVIL}}
            lines.append(line)
        write_rows(folder / f"completions/eval_{step:06d}.jsonl", lines)
        for i, line in enumerate(lines[:64] if ids else []):
            tokens = [5, 6, *numbers.choices(ids, k=len(ids))] if i else [5, 6, *ids]
            columns = {name: [0.0, *(numbers.gauss(0, 1) for _ in ids), 0.0] for name in view.COLUMNS}
            line["batch"] = {"tokens": tokens, "mask": [False, *[True] * len(ids), False]} | columns
        if step:
            write_rows(folder / f"completions/step_{step:06d}.jsonl", lines)
    return folder


def numbers_of(page):
    """{name: what is shown} of the chosen token."""
    parts = page.locator("#numbers div").all_inner_texts()
    return dict(part.split(" ", 1) for part in parts)


@each_script("ppo_llm", "grpo_llm")
def test_the_numbers_are_those_of_metrics_and_tensors(script, algo, toy_run, spy, show):
    batches, penalties, passes = (spy(algo, name) for name in ("to_batch", "kl_penalty", "forward_all"))
    whitened, spreads = spy(algo, "masked_whiten"), spy(algo, "global_std")
    run_dir, metrics = toy_run(eval_rows=4)
    (old, new, _), _ = penalties[-1]  # for the log: all epochs of the whole batch, (epochs,B,L)
    tokens, mask = batches[-1][1][:2]
    columns = {"log-prob": old, "ratio": (new[-1] - old).exp()}
    columns["KL"] = next(kl for args, kl in penalties if args[0] is old)
    columns["advantage"] = whitened[-1][1] if whitened else spreads[-1][0][0]  # GRPO's are logged as they are
    values = [values for (module, *_), values in passes if isinstance(module, getattr(algo, "Critic", ()))]
    columns |= {"value": values[-1]} if values else {}
    responses = [row.roll(-1)[chosen].tolist() for row, chosen in zip(tokens, mask)]

    page = show(run_dir)
    for metric in "reward/mean", "kl/mean", "actor/grad_norm", "eval/score":
        shown = page.locator(f'.key [data-metric="{metric}"] b').inner_text()
        assert float(shown) == pytest.approx(metrics[-1][metric], rel=1e-3), metric
    for number in 0, 3, 6:
        page.locator("#list .row").nth(number).click()
        page.focus("#tokens")
        shown = [numbers_of(page)]
        for _ in range(int(shown[0]["token"].split()[-1]) - 1):
            page.keyboard.press("ArrowRight")
            shown.append(numbers_of(page))
        row = responses.index([int(token["id"]) for token in shown])
        for t in 0, len(shown) // 2, len(shown) - 1:
            assert shown[t].keys() - {"token", "id", "text"} == columns.keys()
            for name, column in columns.items():
                expected = column[row][mask[row]][t].item()
                assert float(shown[t][name]) == pytest.approx(expected, rel=1e-4), name
    shown = page.locator("#list .row").first.inner_text()
    assert "advantage\u00a0" in shown and page.locator('.key [data-metric="distinct/greedy"]').count() == 1
    page.locator(".panel svg").first.click(position={"x": 50, "y": 50})
    assert page.locator("#now").inner_text() == "Iteration 0 of 2"  # where the curve was clicked
    page.keyboard.press("ArrowRight")
    assert page.locator("#now").inner_text() == "Iteration 1 of 2"


@pytest.mark.parametrize("width", [390, 1440])
def test_no_text_is_executed_and_all_are_shown(show, tmp_path, width):
    ids = AutoTokenizer.from_pretrained(TINY / "model")(EVIL + "🙂\n")["input_ids"]
    run = make_run(tmp_path / "a<b>run", texts=ODD, parts=["<i>", "b"], ids=ids, flags={"reward": EVIL}, prompt=EVIL)
    page = show(run, make_run(tmp_path / "other", ids=ids), width=width)
    page.select_option("#sort", "lowest score")
    clips = page.locator("#list .clip").evaluate_all("all => all.map(x => x.textContent)")
    assert [clip.removesuffix("…") for clip in clips] == [text[:500] or "(empty)" for text in ODD]
    assert page.locator("#tokens span").evaluate_all("all => all.map(x => x.textContent).join('')").startswith(EVIL)
    page.select_option("#set", "greedy")
    for text in ODD:
        page.select_option("#prompt", label=page.locator("#prompt option").nth(ODD.index(text)).inner_text())
        assert page.locator("#over .text:not(.aside)").first.evaluate("x => x.firstChild?.data ?? ''") in text
    page.select_option("#sort", "highest part <i>")
    page.fill("#search", "ALERT")
    assert page.locator("#count").inner_text().startswith("2 of 6 responses")
    page.select_option("#cut", "1")
    assert page.locator("#list .row").count() == 1
    page.locator("#runs input").first.uncheck()
    assert page.locator(".key").first.inner_text().count("other") == 1


@pytest.mark.parametrize("steps", [(), (0,)])
def test_a_run_that_has_just_begun(show, tmp_path, steps):
    page = show(make_run(tmp_path / "run", steps))
    assert page.locator("#now").inner_text() == "Iteration 0 of 0"


def test_a_page_that_would_be_too_large_says_what_it_lacks(tmp_path):
    run = make_run(tmp_path / "run", range(41), [f"{i} " * 500 for i in range(64)])
    view.main([str(run), "--megabytes", "0.1"])
    text = (run / "view.html").read_text()
    assert len(text) <= 1e5 and re.search(r"the texts of \d+ of 41 iterations, at most \d+ responses of each", text)


def test_what_cannot_be_read_is_left_out_and_named(tmp_path):
    """A run that is being written, and what somebody else has put into its folder."""
    run = make_run(tmp_path / "run", texts=["a", "a", "b"])
    torn = {"metrics.jsonl": '{"step": 3, "word": "text"}\n{"step": 4, "rew', "args.json": "{"}
    torn |= {"completions/eval_000002.jsonl": '{"prompt": "wh', "completions/eval_000002 (copy).jsonl": ""}
    for file, more in torn.items():
        with open(run / file, "a") as stream:
            stream.write(more)
    found = view.read_run(run, "run", None)
    assert len(found["notes"]) == 5 and found["steps"] == [0, 1, 2, 3] and "word" not in found["metrics"]
    assert found["metrics"]["distinct/greedy"] == [2 / 3, 2 / 3, 2 / 3, None]


def test_tokens_that_share_a_character_have_its_text_once():
    speller = view.load_speller(TINY, {"model": "/elsewhere/benchmarks/tiny/model"}, None)
    text = " a🙂é 👩‍👧\n\n€"
    ids = AutoTokenizer.from_pretrained(TINY / "model")(text)["input_ids"]
    pieces = view.pieces_of(ids, speller)
    assert len(pieces) == len(ids) > len(text) and "".join(pieces) == text and pieces[0]
    assert view.pieces_of([ids[2]] * 3, None) == [f"{ids[2]} "] * 3
    half = [AutoTokenizer.from_pretrained(TINY / "model")(text)["input_ids"][0] for text in "éa"]
    assert view.pieces_of(half, speller) == ["\ufffd", "a"]  # a character that is cut off has the text to itself


@each_script("ppo_llm")
def test_a_resume_is_marked_with_what_it_changed(script, toy_run, toy_data, request, capsys):
    run_dir, _ = toy_run(save_every=1, track="tensorboard", run_name="run")
    changes = {"total_iterations": 4, "eval_dataset": toy_data, "batch_size": 16}
    toy_run(save_every=1, track="tensorboard", run_name="run", resume=True, **changes)
    ((step, changed),) = view.read_resumes(run_dir)
    assert step == 3 and changed.keys() == changes.keys() and changed["total_iterations"] == "2 to 4"
    assert view.read_run(run_dir, "run", None)["best_since"] == 3  # best/ starts anew with other test data
    plot, (axis,) = load_benchmark("plot"), [mock.Mock()]
    plot.mark_resumes([run_dir], [axis])
    assert axis.axvline.call_args.args == (3,) and "batch_size 8 to 16" in capsys.readouterr().out
    assert [row["responses"] for row in load_benchmark("plot").read_run(run_dir)] == [0, 8, 16, 32, 48]
    page = request.getfixturevalue("show")(run_dir)  # skips what follows without a browser
    assert page.locator("#notes").inner_text().startswith("run: resumed at iteration 3. Flags changed: ")
    assert page.locator(".panel .resume").count() > 5
