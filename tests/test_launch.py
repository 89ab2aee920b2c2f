"""Launches of two processes: console, files, agreement with one process; the defaults; what is asked of GPUs."""

import json
import re

import pytest
from helpers import ROOT, TINY, each_script, forked, launch, read_metrics, read_rows, refusal
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModel, AutoModelForCausalLM

# ------------------------------------------------------------------------------- one iteration of the embedded task


@pytest.fixture(scope="module")
def launched(script, algo, tmp_path_factory):
    """By two processes, from another folder; for ppo_llm.py under the launcher."""
    for split in "train", "test":  # `datasets` shows bars, where and when they please, unless it has read a file before
        algo.read_splits(f"{TINY}/{split}.jsonl")
    elsewhere, out = tmp_path_factory.mktemp("elsewhere"), tmp_path_factory.mktemp("out")
    flags = {"total_iterations": 1, "eval_rows": 8, "output_dir": out, "run_name": "run", "save_every": 1}
    flags |= {"track": "tensorboard", "batch_size": 2 if script.stem == "grpo_llm" else 16, "minibatch_size": 16}
    if script.stem == "ppo_llm":
        code, console = launch(script, flags, cwd=elsewhere)
    else:
        code, console = forked(script, flags, folder=elsewhere)
    assert code == 0, console
    assert not any(elsewhere.iterdir())  # nothing is written where one happens to stand
    return out / "run", console


@each_script()
def test_the_console_says_what_runs(script, launched):
    """A start-up block, a line for each iteration and each evaluation, and where things are. One process speaks."""
    run_dir, console = launched
    console = re.sub(r"(?m)^(\[Gloo\].*|.*TypedStorage is deprecated.*\n.*)\n", "", console)  # torch 2.9, of itself
    block, _, after = console[console.index(f"{script.name}: 2 process(es) on cpu, float32") :].partition("run folder ")
    assert len(block.splitlines()) <= 10 and console.count(f"{script.name}: ") == 1 and " gsm8k; KL " in block
    assert "EOS ids [1]" in block and "4000 rows, 4000 distinct, 0 left out; the first ends in '" in block
    m = read_metrics(run_dir)[1]
    line = f"iteration 1/1: reward {m['reward/mean']:.3f}, KL {m['kl/mean']:.4f}, "
    assert after.count("\niteration 1/1: ") == 1 == after.count(line) and after.count("greedy and sampled") == 2, (
        console
    )
    for noise in ("Warning", "WARNING", "Traceback", "were not used", "newly initialized", "\r", "%"):
        assert noise not in console, console


@each_script()
def test_the_run_folder_is_complete(script, launched):
    run_dir, _ = launched
    assert json.loads((run_dir / "args.json").read_text())["num_processes"] == 2
    before, after = (m["eval/score"] for m in read_metrics(run_dir))
    best = ["best"] if after > before else []  # nothing is kept that is no better than before training
    files = "args.json", script.name, "metrics.jsonl", "lock", "completions", "checkpoints", "final"
    found = {path.name for path in run_dir.iterdir() if "events.out.tfevents" not in path.name}
    assert found == {*files, *best}
    assert (run_dir / script.name).read_text() == script.read_text()
    for name in ("final", *best):
        AutoModelForCausalLM.from_pretrained(run_dir / name)
        assert "lm_head.weight" not in load_file(run_dir / name / "model.safetensors")  # tied: once
        if script.stem != "grpo_llm":
            AutoModel.from_pretrained(run_dir / name / "critic")
            assert load_file(run_dir / name / "critic" / "model.safetensors")["score.weight"].shape[0] == 1
    completions = {path.stem: len(read_rows(path)) for path in (run_dir / "completions").iterdir()}
    evaluations = dict.fromkeys(("eval_000000", "eval_sampled_000000", "eval_000001", "eval_sampled_000001"), 8)
    assert completions == {"step_000001": 16} | evaluations
    assert all("batch" in row for row in read_rows(run_dir / "completions" / "step_000001.jsonl"))  # of both ranks


@each_script()
def test_the_metrics_are_those_of_the_table_and_on_tensorboard(script, launched):
    """A new metric gets a row in the table of notes/run/watch.md, and stands nowhere else."""
    run_dir, _ = launched
    section = re.search(r"(?s)\n## Every metric (.*?)\n## ", (ROOT / "notes" / "run" / "watch.md").read_text())[1]
    named = set(re.findall(r"(?m)^\| `(\w+/\w+)` \|", section)) | {"time/rollout", "time/iteration", "memory/peak_gib"}
    foreign = "critic/" if script.stem == "grpo_llm" else "group/"
    names = {name for name in named if not name.startswith(foreign)}
    before, after = metrics = read_metrics(run_dir)
    assert before.keys() == {"step", *(name for name in names if name.startswith("eval/"))}
    assert after.keys() == names | {"step"}
    events = EventAccumulator(str(run_dir)).Reload()
    assert set(events.Tags()["scalars"]) == names
    for name in names:
        logged = [(m["step"], pytest.approx(m[name], rel=1e-5, abs=1e-6)) for m in metrics if name in m]
        assert [(event.step, event.value) for event in events.Scalars(name)] == logged, name
    (text,) = events.Tensors("args/text_summary")
    assert text.tensor_proto.string_val[0].decode() == f"```\n{(run_dir / 'args.json').read_text()}\n```"


# ------------------------------------------------------------------------------------------------ runs of the toy task

# A researcher's file, which imports the script and changes a part.
MINE = """
import sys
sys.path.insert(0, {folder!r})
import {name} as algo

algo.kl_penalty = lambda logprobs, ref_logprobs, kind, real=algo.kl_penalty: real(logprobs, ref_logprobs, kind) / 2
if __name__ == "__main__":
    algo.main(algo.parse_args())
"""


def test_a_callers_file_by_two_processes_is_that_by_one_and_is_kept(script, toy_flags, tmp_path):
    (tmp_path / "mine.py").write_text(MINE.format(folder=str(script.parent), name=script.stem))
    texts = []
    for processes in (1, 2):
        run_dir = tmp_path / f"run{processes}"
        flags = toy_flags | {"eval_rows": 7, "output_dir": tmp_path, "run_name": run_dir.name, "kl_reward_coef": 1.0}
        code, console = forked(tmp_path / "mine.py", flags, processes)
        assert code == 0, console
        completions = sorted(run_dir.glob("completions/*"))
        texts.append([row["response"] for file in completions for row in read_rows(file)])
        assert (run_dir / script.name).read_text() == script.read_text()
        assert "algo.kl_penalty = " in (run_dir / "mine.py").read_text()
        assert json.loads((run_dir / "args.json").read_text())["script"] == "mine.py"
        m = read_metrics(run_dir)[2]
        taken = m["kl/mean"] / 2 * m["response/length_mean"]
        assert m["reward/mean"] - m["reward/total_mean"] == pytest.approx(taken, rel=1e-3) and taken > 1e-4
    assert texts[0] == texts[1] and len(texts[0]) == 4 * 7 + 2 * 8


FINDS = [("[float('inf')] * len(prompts)", r"the reward must be numbers below 1e15, not \[inf\], of ", 1)]
FINDS += [("{'other': [0.0] * len(prompts)}", r"the reward must return the same parts .*'other'", 2)]  # both ranks


@pytest.mark.parametrize("returned, sentence, times", FINDS)
def test_what_one_rank_finds_that_rank_prints(script, toy_flags, tmp_path, returned, sentence, times):
    reward = f"import os\ndef f(prompts): return {returned} if os.environ['RANK'] == '1' else [0.0] * len(prompts)\n"
    (tmp_path / "one_reward.py").write_text(reward)
    flags = toy_flags | {"reward": f"{tmp_path}/one_reward.py:f", "output_dir": tmp_path}
    code, console = forked(script, flags, timeout=200)
    assert code == 1 and len(re.findall(f"(?m)^error: {sentence}", console)) == times, console


@each_script()
def test_a_flag_wins_and_only_a_model_makes_the_defaults_real(script, algo, monkeypatch, tmp_path):
    def parsed(*words):
        monkeypatch.setattr("sys.argv", ["script.py", *words])
        return vars(algo.parse_args())

    real, ours = parsed("--model", "some/model"), parsed()
    assert real["lr"] == 1e-6 and ours["lr"] == 1.5e-4
    # A flag wins. The word --model alone counts: no value that ends like it, no flag that ends like it.
    assert parsed("--lr", "0.5") == ours | {"lr": 0.5}
    assert parsed("--run-name", "x--model") == ours | {"run_name": "x--model"}
    assert parsed("--run-name=--model-7") == ours | {"run_name": "--model-7"}
    assert parsed("--model=some/model") == real
    monkeypatch.setattr(algo, "TINY", tmp_path / "tiny")  # as of a copy in another folder
    sentence = "error: --model is needed: the bundled one is not beside this copy of the script"
    assert refusal(parsed) == f"{sentence} ({tmp_path}/tiny)" and parsed("--model", "some/model") == real
