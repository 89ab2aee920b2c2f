"""The web site: it builds strictly, its links resolve, nothing comes from the network, and scripts have their notes."""

import html
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from urllib.parse import unquote

import pytest
import torch
from helpers import ROOT, SCRIPTS, load_script, run_lines

pytestmark = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("mkdocs", "material", "math_core", "pymdownx"))),
    reason="the site needs its packages: pip install -e '.[notes]'",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """{name of a page: its HTML} of the site, and its folder. mkdocs.yml is strict: a broken link is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, str(ROOT / "notes" / "build.py"), "--output", str(folder)]
    subprocess.run(command, check=True, timeout=900, cwd=folder, capture_output=True)
    return {path.name: path.read_text() for path in folder.glob("*.html") if path.stem != "404"}, folder


@pytest.mark.slow
def test_links_resolve_formulas_are_mathml_and_nothing_is_loaded_from_the_network(site):
    pages, folder = site
    ids = {name: re.findall(r'<[^>]* id="([^"]+)"', text) for name, text in pages.items()}
    assert pages["04-gae.html"].count("<math") > 50 and not any("arithmatex" in text for text in pages.values())
    for name, text in pages.items():
        loads = re.findall(r'<(?!a )[^>]* (?:src|href)="([^"]+)"', text)
        assert not [address for address in loads if re.match(r"(https?:)?//", address)], name
        for address in re.findall(r' (?:src|href)="([^"]+)"', text):
            path, _, anchor = unquote(html.unescape(address)).partition("#")
            if not re.match(r"\w+:|//", path):
                path = path.partition("?")[0] or name
                assert (folder / path).exists(), f"{name} -> {address}"
                assert not anchor or path not in pages or anchor in ids[path], f"{name} -> {address}"


@pytest.mark.slow
def test_five_tabs_and_chapters_before_variants_and_results_in_the_search(site):
    pages, folder = site
    tabs = re.findall(r'class="md-tabs__link">\s*(\w+)', pages["index.html"])
    assert tabs == ["Learn", "Run", "Change", "Background", "Results"]
    differences = re.sub("<[^>]*>", "", pages["differences.html"])
    assert "def constant_groups" in differences and "def shard" in differences
    assert pages["variant-gspo.html"].count('href="variant-') >= len(list((ROOT / "notes/variants").glob("*.patch")))
    index = json.loads((folder / "search" / "search_index.json").read_text())["docs"]
    weights = {entry["location"].partition("#")[0]: entry.get("boost", 1) for entry in index}
    assert weights["04-gae.html"] > weights["ppo_llm.html"] > weights["variant-gspo.html"] == weights["CHANGELOG.html"]
    assert "benchmarks-results-symptoms.html" in pages and "benchmarks-results-symptoms.html" not in weights
    assert 'href="#docstring-imports-flags">To the top' in pages["grpo_llm.html"]


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_whole_and_has_the_notes_of_its_tags(site, name):
    lines, page = (ROOT / f"{name}.py").read_text().splitlines(), site[0][f"{name}.html"]
    numbers = [int(number) for number in re.findall(r'data-linenos=" *(\d+) *"', page)]
    assert not [line for number, line in enumerate(lines, 1) if line and number not in numbers]
    for tag in {tag for line in lines for tag in re.findall(r"# \[(\d+\.\d+)\]", line)}:
        assert f"<summary>{tag} " in page, tag
    assert "<!-- notes" not in page and "1. Rollout" in page


def computed(at, shift=0.0):
    """iteration() of notes/web/sliders.js for these positions of the sliders, with other values, and response.js."""
    web = ROOT / "notes" / "web"
    program = (web / "response.js").read_text() + (web / "sliders.js").read_text()
    program += f"""
        const at = {{...DEFAULTS, ...{json.dumps(at)}}}
        const values = response.batch[response.shown[at.which].row].values.map((x, t) => x + {shift} * (t % 3))
        console.log(JSON.stringify([iteration(at, values), response]))"""
    return json.loads(subprocess.run(["node", "-e", program], check=True, capture_output=True).stdout)


@pytest.mark.skipif(not shutil.which("node"), reason="no node")
@pytest.mark.parametrize(
    "at",
    [
        {},
        {"which": 1, "step": 16},  # the first token is stopped
        {"which": 2, "step": 16, "price": 0.3, "gamma": 0.9, "lam": 0.5, "low": 0.05, "high": 0.1, "size": 3},
        {"source": "group", "step": 9, "low": 0.1, "size": 5},
        {"source": "group", "size": 2},  # a group without a difference
    ],
)
def test_the_sliders_compute_what_the_scripts_do(at):
    """Rewards with KL, deltas, advantages, returns, whitening, ratio, loss, its gradient, what is clipped, a group."""
    ppo_llm, grpo_llm = load_script(ROOT / "ppo_llm.py"), load_script(ROOT / "grpo_llm.py")
    (shown, response), defaults = computed(at, 0.1), {"lam": 0.95, "gamma": 1.0, "price": 0.001, "step": 4}
    at = defaults | {"which": 0, "low": 0.2, "high": 0.2, "size": 8, "source": "critic"} | at
    chosen = response["shown"][at["which"]]
    columns = {name: torch.tensor(x, dtype=torch.float) for name, x in shown["columns"].items()}
    batch, row = response["batch"], chosen["row"]
    batch[row]["values"] = columns["value"].tolist()
    torch.testing.assert_close(columns["kl"], columns["logprob"] - columns["ref"], rtol=0, atol=1e-6)
    longest = max(len(x["kl"]) for x in batch)
    pad = lambda name: torch.tensor([x[name] + [0.0] * (longest - len(x[name])) for x in batch]).float()  # noqa: E731
    mask = torch.tensor([[t < len(x["kl"]) for t in range(longest)] for x in batch])
    kl = ppo_llm.kl_penalty(pad("kl"), torch.zeros(mask.shape), "k1")
    rewards = ppo_llm.place_scores(torch.tensor([x["score"] for x in batch]).float(), mask) - at["price"] * kl
    given = {"rewards": rewards, "values": pad("values"), "mask": mask}
    by_delta, by_lam = (
        run_lines(ppo_llm, "raw_advantages", "advantages", args={"gamma": at["gamma"], "lam": lam}, **given)
        for lam in (0.0, at["lam"])
    )
    scores = torch.tensor([batch[row]["score"], *(score for _, score in chosen["group"])]).float()[: at["size"]]
    given = {"rewards": scores, "mask": torch.ones(at["size"], 1) > 0, "args": {"group_size": at["size"]}}
    group = run_lines(grpo_llm, "groups", "advantages", **given).advantages[:, 0]
    expected = {"reward": rewards, "delta": by_delta.raw_advantages, "advantage": by_lam.raw_advantages}
    expected |= {"return": by_lam.returns, "whitened": by_lam.advantages}
    expected = {name: x[row][mask[row]].float() for name, x in expected.items()}
    expected["grouped"] = group[:1].expand_as(columns["kl"])
    expected["used"] = expected["grouped" if at["source"] == "group" else "whitened"]
    expected["ratio"] = torch.tensor(chosen["ratios"][at["step"] - 1]).float()
    logprobs = expected["ratio"].log().requires_grad_()
    given = {"mb_logprobs": logprobs, "old_logprobs": torch.zeros_like(logprobs), "advantages": expected["used"]}
    given |= {"mb": slice(None), "epoch": 0, "clipped": torch.zeros(1, len(logprobs))}
    stepped = run_lines(ppo_llm, "mb_ratio", "clipped", args={"clip_low": at["low"], "clip_high": at["high"]}, **given)
    push = -torch.autograd.grad(stepped.mb_losses.sum(), logprobs)[0]
    expected |= {"loss": stepped.mb_losses.detach(), "push": push}
    for name, numbers in expected.items():
        torch.testing.assert_close(columns[name], numbers, rtol=0, atol=1e-5, msg=name)
    torch.testing.assert_close(torch.tensor(shown["group"]).float(), group)
    assert shown["clipped"] == stepped.clipped[0].bool().tolist() and any(shown["clipped"]) == (at["size"] != 2)
