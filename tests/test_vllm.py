"""The variant `vllm` with the real engine, on CPUs, in an environment of its own (the guide says how to make one):

pytest tests/test_vllm.py -n 0
"""

import re
from importlib.metadata import packages_distributions

import pytest
from conftest import ROOT, compose, launch, read_metrics, read_rows, untimed, variants
from ranks import load_script, run_script

# A response has 16 tokens at most, which cuts some off; the learning rate is so large that stale weights would be seen.
FLAGS = {"batch_size": 8, "minibatch_size": 32, "eval_rows": 33, "max_response_length": 16, "lr": 2e-3, "track": "none"}
FLAGS |= {"total_iterations": 4, "eval_every": 0, "save_every": 2, "cache_gib": 0.25}


def test_without_vllm_one_sentence_says_what_to_install(tmp_path):
    path = tmp_path / "vllm_llm.py"
    path.write_text(variants.patched("vllm"))
    (tmp_path / "vllm.py").write_text("raise ModuleNotFoundError('No module named vllm')")
    code, console = run_script(path, ["--help"], 1)
    assert code != 0 and re.fullmatch(r"No module named vllm: .* pip install vllm .*\n", console), console


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """{name: (metrics, completions of the training batches, evaluations)}"""
    if "vllm" not in packages_distributions():  # find_spec would find a folder of that name, too
        pytest.skip("vLLM is not installed here: the guide's environment for it")
    folder, text = tmp_path_factory.mktemp("vllm"), variants.patched("vllm")
    (folder / "benchmarks").symlink_to(ROOT / "benchmarks")  # a copy of a script looks for the embedded model there
    (folder / "reward.py").write_text(
        "def digits(responses, truncated):\n"
        "    return [sum(map(str.isdigit, r)) / max(1, len(r)) - 2 * cut for r, cut in zip(responses, truncated)]\n"
    )
    sharded, conflicts = variants.merged(compose(folder).read_text(), (ROOT / "grpo_llm.py").read_text(), text)
    assert conflicts == 0
    (folder / "vllm_llm.py").write_text(text)
    (folder / "sharded_llm.py").write_text(sharded)
    found = {}
    for name, script, processes, flags in (
        ("one", "vllm", 1, {}),
        ("two", "vllm", 2, {}),
        ("sharded", "sharded", 2, {}),
        ("resumed", "vllm", 1, {"total_iterations": 2}),
        ("resumed", "vllm", 1, {"resume": True}),
        ("half", "vllm", 1, {"dtype": "bfloat16", "is_cap": 1.0, "total_iterations": 2}),
    ):
        fields = FLAGS | {"output_dir": folder, "run_name": name, "reward": f"{folder}/reward.py:digits"} | flags
        code, console = launch(folder / f"{script}_llm.py", fields, processes, cwd=folder)
        assert code == 0 and f"{processes} process(es)" in console, console
        files = {path.stem: read_rows(path) for path in sorted((folder / name / "completions").glob("*.jsonl"))}
        found[name] = read_metrics(folder / name), files
    return found


def column(metrics, name):
    return [m[name] for m in metrics if name in m]


def test_the_engine_has_the_weights_of_the_moment(runs):
    for name in "one", "two", "sharded", "resumed":
        diffs = column(runs[name][0], "rollout/logprob_diff")
        assert len(diffs) == 4 and max(diffs) < 1e-5, (name, diffs)
        assert all(abs(w - 1) < 1e-5 for w in column(runs[name][0], "rollout/weight_mean"))
        assert all(abs(share - 1) < 1e-6 for share in column(runs[name][0], "rollout/ess"))


def test_greedy_answers_are_those_of_generate(runs, tmp_path):
    """Before training, 33 answers to the letter, cut off at the same place."""
    flags = {name: value for name, value in FLAGS.items() if name != "cache_gib"} | {"total_iterations": 1}
    code, console = launch(ROOT / "grpo_llm.py", flags | {"output_dir": tmp_path, "run_name": "plain"}, 1)
    assert code == 0, console
    plain = read_rows(tmp_path / "plain" / "completions" / "eval_000000.jsonl")
    engine = runs["one"][1]["eval_000000"]
    assert len(plain) == 33 and [row["response"] for row in plain] == [row["response"] for row in engine]
    sampled = read_rows(tmp_path / "plain" / "completions" / "eval_sampled_000000.jsonl")
    other = next(rows for name, rows in runs["one"][1].items() if name.startswith("eval_sampled"))
    assert [row["response"] for row in sampled] != [row["response"] for row in other]  # other noise


def test_what_is_cut_off_is_truncated(runs):
    """The reward takes 2 from what would be 0 to 1: the rows below 0 are those that the metric counts."""
    metrics, files = runs["one"]
    (*_, batch) = (rows for name, rows in files.items() if name.startswith("step"))
    cut = [row["score"] < 0 for row in batch]
    fractions = column(metrics, "response/truncated_frac")
    assert fractions[-1] == pytest.approx(sum(cut) / len(cut)) and sum(cut) > 0 and max(fractions) < 1
    assert max(column(metrics, "response/length_mean")) <= 16


def test_two_processes_are_one_and_shards_are_both(runs):
    """The same rewards and answers; metrics agree as they do with `generate`."""
    one, files = runs["one"]
    for name in "two", "sharded":
        metrics, others = runs[name]
        assert column(metrics, "reward/mean") == column(one, "reward/mean")
        for rows, same in zip(others.values(), files.values(), strict=True):
            assert [row["response"] for row in rows] == [row["response"] for row in same]
        for a, b in zip(untimed(metrics), untimed(one), strict=True):
            for metric in a.keys() - {"rollout/logprob_diff"}:
                assert a[metric] == pytest.approx(b[metric], rel=2e-3, abs=2e-5), (name, metric)


def test_a_run_resumes_to_the_bit(runs):
    for a, b in zip(untimed(runs["resumed"][0]), untimed(runs["one"][0]), strict=True):
        assert {name: a[name] for name in b} == b  # and the evaluation at the end of its first part


def test_bfloat16_differs_and_is_weighed(runs):
    metrics = runs["half"][0]
    assert all(1e-5 < diff < 0.02 for diff in column(metrics, "rollout/logprob_diff"))
    assert all(0.99 < share < 1 for share in column(metrics, "rollout/ess"))
    # Weights above 1 are cut down to 1 in this run.
    assert all(1e-5 < 1 - weight < 1e-2 for weight in column(metrics, "rollout/weight_mean"))


def test_lora_is_refused(tmp_path, runs):
    path = tmp_path / "vllm_llm.py"
    path.write_text(variants.patched("vllm"))
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    script = load_script(path)
    with pytest.raises(SystemExit):
        script.main(script.Args(**script.EMBEDDED | {"lora_rank": 4, "output_dir": str(tmp_path), "track": "none"}))
