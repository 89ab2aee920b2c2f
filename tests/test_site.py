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
from conftest import ROOT, SCRIPTS, load_script

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
    assert pages["02-gae.html"].count("<math") > 50 and not any("arithmatex" in text for text in pages.values())
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
    assert tabs == ["Learn", "Run", "Scripts", "Change", "Results"]
    assert pages["variant-gspo.html"].count('href="variant-') >= len(list((ROOT / "notes/variants").glob("*.patch")))
    index = json.loads((folder / "search" / "search_index.json").read_text())["docs"]
    weights = {entry["location"].partition("#")[0]: entry.get("boost", 1) for entry in index}
    assert weights["02-gae.html"] > weights["ppo_llm.html"] > weights["variant-gspo.html"] == weights["CHANGELOG.html"]
    assert "benchmarks-results-symptoms.html" in pages and "benchmarks-results-symptoms.html" not in weights
    assert 'href="#docstring-imports-flags">To the top' in pages["grpo_llm.html"]


@pytest.mark.skipif(not shutil.which("node"), reason="no node")
def test_the_search_takes_flags_and_other_words():
    program = """
        globalThis.window = globalThis; globalThis.location = {protocol: "https:"}
        globalThis.Worker = class { postMessage(message) { console.log(message.data) } }\n"""
    program += (ROOT / "notes" / "web" / "search.js").read_text()
    program += 'for (const data of ["--lam", "OOM", "multi-node", "k-1"]) new Worker("").postMessage({type: 2, data})'
    shown = subprocess.run(["node", "-e", program], check=True, capture_output=True, text=True).stdout
    assert shown.split("\n") == ["lam lam^9", "memory", "machines", "k-1", ""]


def test_the_address_of_the_repository_has_one_setting():
    from mkdocs.config import load_config

    settings = (ROOT / "mkdocs.yml").read_text()
    address = re.search(r"(?m)^repo_url: (\S+)", settings)[1]
    for wanted in address, "https://github.com/somebody/something":
        config = load_config(str(ROOT / "mkdocs.yml"), repo_url=wanted)
        config = config.plugins.run_event("config", config)
        assert (config.repo_url, config.edit_uri) == ((None, None) if "/OWNER/" in wanted else (wanted, "edit/main/"))
    cloned = re.findall(r"git clone (\S+?)(?:\.git)?\s", (ROOT / "README.md").read_text())
    assert set(cloned) <= {address}
    workflow = (ROOT / ".github" / "workflows" / "pages.yml").read_text()
    assert "python notes/build.py\n" in workflow and "path: site\n" in workflow and "OWNER/clean-llm-rl" in workflow


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_whole_and_has_the_notes_of_its_tags(site, name):
    lines, page = (ROOT / f"{name}.py").read_text().splitlines(), site[0][f"{name}.html"]
    numbers = [int(number) for number in re.findall(r'data-linenos=" *(\d+) *"', page)]
    assert not [line for number, line in enumerate(lines, 1) if line and number not in numbers]
    for tag in {tag for line in lines for tag in re.findall(r"# \[(\d+\.\d+)\]", line)}:
        assert f"<summary>{tag} " in page, tag
    assert "<!-- notes" not in page and "1. Rollout" in page


@pytest.mark.skipif(not shutil.which("node"), reason="no node")
def test_the_sliders_compute_what_ppo_llm_does():
    ppo_llm, web = load_script(ROOT / "ppo_llm.py"), ROOT / "notes" / "web"
    program = (web / "response.js").read_text() + (web / "sliders.js").read_text()
    program += """
        const {advantages, returns} = gae(response.rewards, response.values, 0.9, 0.5)
        const losses = response.ratios[3].map((ratio, t) => policyLoss(ratio, advantages[t], 0.1).loss)
        console.log(JSON.stringify([response, [advantages, returns, losses]]))"""
    numbers, shown = json.loads(subprocess.run(["node", "-e", program], check=True, capture_output=True).stdout)
    rewards, values, ratio = (torch.tensor([x]) for x in (numbers["rewards"], numbers["values"], numbers["ratios"][3]))
    advantages, returns = ppo_llm.gae(rewards, values, torch.ones_like(rewards).bool(), 0.9, 0.5)
    args = ppo_llm.Args(model="", clip_low=0.1, clip_high=0.1)
    losses, _ = ppo_llm.policy_loss(ratio.log(), torch.zeros_like(ratio), advantages, None, args)
    assert torch.allclose(torch.tensor(shown), torch.cat([advantages, returns, losses]), atol=1e-5)
