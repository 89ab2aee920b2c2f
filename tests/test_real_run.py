"""The pages of notes/run/: their named runs are legal, their memory is computed, and the main one runs."""

import re
import shlex
import subprocess
import sys
from types import SimpleNamespace

import memory
import pytest
from helpers import ROOT, read_metrics
from ranks import load_script, run_script
from test_project import check_flags

PAGE = "\n".join(path.read_text() for path in sorted((ROOT / "notes" / "run").glob("*.md")))
# The sizes of a run here, in place of the page's: of a flag that comes twice the last one counts.
SMALL = "--batch-size 4 --group-size 4 --minibatch-size 8 --rollout-batch-size 8 --max-prompt-length 400 --track none"
SMALL += " --max-response-length 6 --total-iterations 2 --eval-every 1 --eval-rows 3 --save-every 1"
# All lines of the pages' shell blocks, continued ones in one.
COMMANDS = "".join(re.findall(r"(?ms)^```bash\n(.*?)^```$", PAGE)).replace("\\\n", " ").splitlines()
COMMANDS = [" ".join(line.split()) for line in COMMANDS]
# {name of a run: (script, processes, words)}
LINE = r"\S+ launch (?:--multi_gpu --num_processes (\d+) )?(?:\S+/cuda_graphs\.py )?(\w+)\.py (.* --run-name (\S+).*)"
RUNS = {m[4]: (m[2], int(m[1] or 1), shlex.split(m[3])) for m in map(re.compile(LINE).fullmatch, COMMANDS) if m}


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A folder that looks like a clone, in which the page's lines that make scripts were run, as they stand."""
    folder = tmp_path_factory.mktemp("clone")
    for name in "ppo_llm.py", "grpo_llm.py", "ppo_llm_fsdp.py", "notes", "benchmarks":
        (folder / name).symlink_to(ROOT / name)
    for line in COMMANDS:
        if line.startswith("python notes/variants.py"):
            line = line.partition(" && ")[0].replace("python ", f"{sys.executable} ", 1)
            subprocess.run(line, shell=True, cwd=folder, check=True, capture_output=True)
    return folder


def forecast(script, processes, args):
    """Terms of notes/memory.py."""
    shape = memory.SHAPES[args.model.removeprefix("Qwen/").removesuffix("-Instruct")]
    options = {"critic": False, "sharded": "fsdp" in script, "checkpointing": args.gradient_checkpointing}
    options |= {"lora_rank": args.lora_rank, "tokens": args.microbatch_tokens}
    options |= {"rows": min(args.rollout_batch_size, args.batch_size * args.group_size // processes)}
    return memory.budget(shape, processes, **options)


def test_commands_of_the_page_are_legal_and_fit_the_card_it_names(clone):
    """vLLM brings its weights and its cache, so of its lines we only parse the flags; an empty module stands in."""
    rows = {m[1]: m for m in re.finditer(r"\| `([\w.-]+)` \| (?:one|two) of (\d+) GB \| (\S+) GB \|", PAGE)}
    assert len(RUNS) == 9 and len(rows) == 5
    for name, (script, processes, words) in RUNS.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=None, SamplingParams=None, TokensPrompt=None))
            args = check_flags(load_script(clone / f"{script}.py"), shlex.join(words), processes)
        if name in rows and "vllm" not in script:
            size = forecast(script, processes, args)["peak"] / 1e9
            assert f"{size:.1f}" == rows[name][3] and size <= 0.9 * float(rows[name][2]), name


@pytest.mark.slow
def test_the_main_command_runs(clone, tiny_model, toy_data):
    script, processes, words = RUNS["gsm8k"]
    sizes = ["--model", tiny_model, "--dataset", toy_data, "--chat-template", "none", *shlex.split(SMALL)]
    words = [str(clone / f"{script}.py"), *words, *sizes]
    code, console = run_script(clone / "notes" / "variants" / "cuda_graphs.py", words, processes, clone)
    metrics = read_metrics(clone / "runs" / "gsm8k")
    assert code == 0 and [line["step"] for line in metrics] == [0, 1, 2], console
    shown = set(re.findall(r"`((?:actor|eval|group|kl|memory|response|reward|rollout|time)/\w+)`", PAGE))
    assert len(shown) >= 10 and shown <= {*metrics[-1], "rollout/ess", "rollout/weight_mean"}
