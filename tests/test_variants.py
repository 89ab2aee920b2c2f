"""Variants: every patch applies as it stands, is linted, and trains on two ranks. Their effects: test_variants_*.py."""

import json
import re
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import variants
from accelerate.state import PartialState
from helpers import ROOT, TOY_REWARD, make_model, read_metrics, read_rows, refusal, ruff, run_lines, run_main, untimed
from ranks import load_script, run_ranks
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForSequenceClassification, AutoTokenizer

FILES = ROOT / "notes" / "variants"
sys.path.insert(0, str(FILES))
NAMES = variants.names()
SOME_END = {"temperature": 5.0, "max_response_length": 32}  # about half of the responses: EOS is one of 46 tokens
# Rewards that a random model gets signal from, and an environment.
TOY = f"""{TOY_REWARD}
def binary(prompts, responses, answers):
    return [float(bool(r) and r[0] < "5") for r in responses]

def half(responses):  # in groups of four, every other one is mixed
    return [float(i % 8 == 1) for i in range(len(responses))]

def letters(prompts, responses, answers):
    return {{"early": [sum(c < "m" for c in r) / 9 for r in responses], "size": [len(r) / 99 for r in responses]}}

def pieces(prompts, responses, answers, truncated):
    found = [[(i + 1, 0.1) for i, c in enumerate(r) if c < "m"] for r in responses]
    return {{"pieces": found, "cut": [-0.5 * cut for cut in truncated]}}

class Echo:
    def reset(self, **row):
        self.heard, self.file = [], open(__file__)  # a file, which cannot be copied
    def step(self, text):
        self.heard.append(text)
        return "-" if len(self.heard) < 3 else None
    def get_reward(self):
        return sum(c < "m" for text in self.heard for c in text) / 10
"""


def script_of(name):
    """The script that a variant is made of."""
    return ROOT / variants.read_patch(name)[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, toy_data):
    """What variants train with, and a place for them."""
    folder = tmp_path_factory.mktemp("variants")
    make_model(folder / "model", initializer_range=0.1)
    (folder / "data").symlink_to(toy_data)
    (folder / "toy.py").write_text(TOY)
    sys.modules.pop("toy", None)  # that of another file's folder
    return folder


@pytest.fixture(scope="module")
def variant(folder):
    """variant(name): the patched script as a module."""

    def load(name):
        path = folder / f"{name}_llm.py"
        if not path.exists():
            path.write_text(variants.patched(name))
        return load_script(path)

    return load


@pytest.fixture
def train(folder, variant, tmp_path):
    """train(name, **flags): metrics of a run on one process; its folder is tmp_path/NUMBER.

    on: a script to run in place of the variant, with those of the flags that it knows.
    """

    def run(name, on=None, **changes):
        algo = load_script(on) if on else variant(name)
        place = {"output_dir": str(tmp_path), "run_name": str(len(list(tmp_path.iterdir())))}
        flags = flags_of(folder, name, **place | changes).items()
        return read_metrics(run_main(algo, {f: x for f, x in flags if not on or f in algo.Args.__annotations__}))

    return run


def resumed(train, name, at, **flags):
    """Metrics of a run, after a check that one which ends after the iteration `at` and is resumed has the same."""
    whole = train(name, **flags, run_name="whole")
    train(name, **flags | {"total_iterations": at}, run_name="part")
    assert untimed(train(name, **flags, run_name="part", resume=True)) == untimed(whole)
    return whole


OWN_FLAGS = {
    "target_kl": {"ppo_epochs": 3, "target_kl": 1e-9},  # after the first step
    "process_reward": {"reward": "pieces"},
    "multi_reward": {"reward": "letters"},
    "mask_truncated": SOME_END,  # or no response ends, and nothing trains
    "fp16": {"dtype": "float16"},
    "environment": {"environment": "toy.py:Echo", "reward": "environment", "max_response_length": 24},
}


def flags_of(folder, name, **changes):
    """Flags of a short run of a variant. reward: one of those in TOY, by its name, or what --reward says."""
    flags = {"model": str(folder / "model"), "dataset": str(folder / "data"), "track": "none", "lr": 1e-3}
    flags |= {"reward": "early", "microbatch_tokens": 128, "max_response_length": 12, "minibatch_size": 8}
    flags |= {"total_iterations": 3, "eval_every": 0, "eval_rows": 0, "save_every": 0}
    on_ppo = script_of(name).stem == "ppo_llm"
    flags |= {"batch_size": 8, "critic_lr": 1e-3} if on_ppo else {"batch_size": 4, "group_size": 4}
    flags |= OWN_FLAGS.get(name, {}) | changes
    if f"def {flags['reward']}(" in TOY:
        flags["reward"] = f"{folder}/toy.py:{flags['reward']}"
    if "environment" in flags:
        flags["environment"] = str(folder / flags["environment"])  # which leaves a whole path as it is
    return flags


def losses_of(algo, new, old, advantages, flags, **given):
    """(losses, clipped) by the loop of a variant, of tokens (B,L) to which its policy gives the log-probs `new`."""
    policy = lambda _, mask, *options: torch.stack([torch.where(mask, x, 0) for x in (new, old, old)])  # noqa: E731
    given = {"mask": torch.ones_like(new, dtype=torch.bool), "old_logprobs": old, "advantages": advantages} | given
    given |= {"tokens": new, "loss_weights": torch.ones_like(new), "mb": ..., "epoch": 0, "clipped": [{}]}
    found = run_lines(algo, "mb_logprobs", "loss", policy=policy, args={"kl_loss_coef": 0.0} | flags, **given)
    return found.mb_losses, found.clipped[0].get(...)


def batches_of(calls):
    """The batches in calls of write_completions; `plain` are grpo_llm.py's advantages by the same scores."""
    for (_, name, _, results, _), _ in calls:
        if name.startswith("step"):
            found = {key: torch.tensor([r[key] for r in results]) for key in ("score", "length", "truncated")}
            for key in "advantages", "mask":
                found[key] = pad_sequence([torch.tensor(r["batch"][key]) for r in results], batch_first=True)
            given = {"scores": found["score"], "kl": torch.zeros(len(results), 1), "args": {"group_size": 4}}
            grpo = run_lines(load_script(ROOT / "grpo_llm.py"), "rewards", "advantages", mask=found["mask"], **given)
            yield SimpleNamespace(**found, plain=grpo.advantages)


def told_otherwise(algo, monkeypatch, *gaps):
    """From now on the sampler claims log-probs that are lower by so much: a number a token, of responses in turn."""
    real = algo.generate

    def generate(*args):
        claims = [(r, gaps[i % len(gaps)]) for i, r in enumerate(real(*args))]
        return [r._replace(logprobs=[x - gap for x, gap in zip(r.logprobs, row)]) for r, row in claims]

    monkeypatch.setattr(algo, "generate", generate)


# ------------------------------------------------------------------------------------------------ every one of them


def test_patches_apply_and_are_linted(tmp_path):
    """None of their context differs. Each has a head, and can be sharded."""
    for name in NAMES:
        (tmp_path / f"{name}_llm.py").write_text(variants.patched(name))
        head = re.sub(r"\n +", " ", variants.read_patch(name)[0])
        assert re.match(r"What: .+\nGroup: .+\nIdea: .+\nRun:  .+\nMeasured: ", head), head
        assert "(the change" not in head, head
        text, conflicts = variants.sharded(variants.patched(name), script_of(name).name)
        assert conflicts == 0, name
        (tmp_path / f"{name}_fsdp.py").write_text(text)
    ruff("check", tmp_path)
    ruff("format", "--check", *tmp_path.glob("*_llm.py"))


def train_all(runs):
    """On each of two ranks: folders of runs, one after the other, of (script, fields of Args)."""
    with mock.patch.object(PartialState, "destroy_process_group", lambda *_: None):  # the next run needs it
        return [run_main(load_script(path), flags) for path, flags in runs]


def train_by_two(texts, flags, folder):
    """{name: metrics} of scripts (texts by their names) on two ranks, with these flags by their names."""
    runs = []
    for name, text in texts.items():
        path = folder / f"{name}_by_two.py"
        path.write_text(text)
        runs.append((str(path), flags[name] | {"output_dir": str(folder), "run_name": f"{name}_by_two"}))
    run_dirs, _ = run_ranks(2, train_all, runs)
    return dict(zip(texts, map(read_metrics, run_dirs)))


@pytest.mark.slow
@pytest.mark.parametrize("script", ["ppo_llm.py", "grpo_llm.py"])
def test_each_variant_trains_on_two_ranks(script, folder):
    """An iteration with an evaluation before and after it, of all variants but `vllm` (test_vllm.py), in bfloat16. In
    float32 each one's own test trains it."""
    names = [name for name in NAMES if script_of(name).name == script and name != "vllm"]
    flags = {name: {"dtype": "bfloat16"} | flags_of(folder, name, total_iterations=1, eval_rows=3) for name in names}
    for name, metrics in train_by_two({name: variants.patched(name) for name in names}, flags, folder).items():
        assert len(metrics) == 2 and all(torch.tensor(list(m.values())).isfinite().all() for m in metrics), name
        assert "actor/grad_norm" in metrics[1] and metrics[1]["rollout/kl"] < 2e-3, name


# Those whose change crosses ranks or deals out rows, and how far metrics may be apart. Of one test row rank 1 has none.
BY_TWO = [
    ("dapo", 2e-3, {"reward": "binary", "max_draws": 8}),
    ("adaptive_kl", 2e-3, {"kl_reward_coef": 0.5, "kl_target": 1e-4, "kl_horizon": 20.0, "lr": 1e-2}),
    ("target_kl", 1e-4, {"batch_size": 16, "minibatch_size": 4, "target_kl": 3e-3, "lr": 3e-4}),
    ("replay", 2e-3, {"reward": "binary"}),
    ("multi_reward", 2e-3, {"eval_rows": 1, "eval_every": 1}),
    ("pass_at_k", 1e-5, {"eval_rows": 1, "eval_samples": 3}),
    ("stale", 1e-5, {"staleness": 1}),
    ("environment", 2e-3, {"eval_rows": 5}),
    ("bypass", 1e-5, {"is_cap": 1.0, "off_policy_delta": 1e-3}),
    ("mask_truncated", 1e-5, {"entropy_coef": 0.05, "batch_size": 8, "minibatch_size": 16}),
    ("top_p", 1e-4, {"top_p": 0.7, "entropy_coef": 0.01}),
    ("distill", 1e-5, {"kl_reward_coef": 0.0, "kl_loss_coef": 9.0, "kl_loss_kind": "full", "entropy_coef": 0.05}),
]
SHARDED = ["dapo", "distill", "top_p", "target_kl", "stale"]
CASES = [(*case, "replicated") for case in BY_TWO] + [(*case, "sharded") for case in BY_TWO if case[0] in SHARDED]


@pytest.mark.slow
@pytest.mark.parametrize("name, rel, flags, kind", CASES)
def test_two_processes_log_the_same_numbers_as_one(name, rel, flags, kind, train, folder, tmp_path):
    text = variants.patched(name)
    if kind == "sharded":
        text, _ = variants.sharded(text, script_of(name).name)
    ones = untimed(train(name, **flags, run_name="one"))
    twos = untimed(train_by_two({name: text}, {name: flags_of(folder, name, **flags)}, tmp_path)[name])
    for one, two in zip(ones, twos, strict=True):
        assert two == pytest.approx(one, rel=rel, abs=max(1e-5, rel / 100))
    for path in (tmp_path / "one" / "completions").glob("eval_*"):
        assert read_rows(path) == read_rows(tmp_path / f"{name}_by_two" / "completions" / path.name)


@pytest.mark.parametrize("name", ["dppo", "bypass", "top_p", "stale"])
def test_a_sampler_that_disagrees_is_refused(name, variant, train, monkeypatch, spy):
    """Before the first step, also where a variant takes the sampler's log-probs for the old ones."""
    told_otherwise(variant(name), monkeypatch, [0.02] * 12)
    steps = spy(torch.optim.AdamW, "step")
    assert "training pass have a KL of 0.000" in refusal(lambda: train(name)) and not steps


def test_rank_prefers_short_right_answers_of_a_group():
    texts = ["#### 5", "so #### 5", "well so #### 5", "#### 6", "#### 5", "#### 6", "so #### 7"]
    prompts = ["a"] * 4 + ["b"] * 3
    rank = load_script(FILES / "rank.py").rank
    found = rank(prompts, texts, ["5"] * 4 + ["6"] * 3, tokens=texts)
    assert found == {"right": [1, 1, 1, 0, 0, 1, 0], "behind": [0, -0.25, -0.5, 0, 0, 0, 0]}
    assert rank(["a"], ["#### 5"], ["5"], tokens=["long"]) == {"right": [1], "behind": [0]}


def test_http_judge_grades_or_says_why_not(monkeypatch, capsys):
    """By a server that knows some answers, thinks, says junk, is too slow, has an error, and then is down."""
    says = {"one": "7", "two": "<think>1 or 2?</think> Grade: 10\n", "junk": "7 or 8", "none": None}

    class Server(BaseHTTPRequestHandler):
        def do_POST(self):
            (message,) = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"]
            time.sleep(1.5 if message["content"] == "slow {}" else 0)
            self.send_response(500 if message["content"] == "large" else 200)
            self.end_headers()
            reply = {"choices": [{"message": {"content": says.get(message["content"], "11")}}]}
            self.wfile.write(b"CUDA out of memory" if message["content"] == "large" else json.dumps(reply).encode())

    server = ThreadingHTTPServer(("localhost", 0), Server)
    server.daemon_threads = False  # `server_close` waits for the slow one
    threading.Thread(target=server.serve_forever, daemon=True).start()
    values = {"URL": f"http://localhost:{server.server_port}/v1", "RUBRIC": "{response}", "SECONDS": "1", "TRIES": "1"}
    for wrong, said in (
        ({"RUBRIC": '{"grade": 1}'}, "double its other braces"),
        ({"URL": ""}, "say where the judge is"),
        ({}, ""),
    ):
        monkeypatch.delitem(sys.modules, "http_judge", raising=False)
        for name, value in (values | wrong).items():
            monkeypatch.setenv(f"JUDGE_{name}", value)
        if said:
            assert said in refusal(lambda: load_script(FILES / "http_judge.py"))
    judge, settings = load_script(FILES / "http_judge.py").http_judge, sys.modules["http_judge"].SETTINGS
    assert settings["JUDGE_URL"] == values["URL"] and "JUDGE_KEY" not in settings
    found = judge("aaabbc", ["one", "two", "junk", "one", "none", "slow {}"], "123456")
    assert found["graded"] == [0.7, 1, 0, 0.7, 0, 0] and found["missed"] == pytest.approx([0, 0, 0.85, 0, 0.7, 0.8])
    assert "graded 3 of 6 responses; instead of a grade: 'TimeoutError: timed out'" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match=r"graded 0 of 1 .*'HTTP 500: CUDA out of memory'"):
        judge("a", ["large"], "a")
    server.shutdown()
    server.server_close()
    with pytest.raises(RuntimeError, match=r"graded 0 of 40 .*Connection refused"):
        judge("a" * 40, ["one"] * 40, "a" * 40)


CHAT = "{% for m in messages %}{{ m.role[0] }}#{{ m.content }}\n{% endfor %}"


@pytest.mark.parametrize("template, asked", [(None, "ask{}"), (CHAT, "u#ask\na#{}\n")])
def test_reward_model_scores_as_row_by_row(template, asked, tmp_path, monkeypatch):
    """In batches, padded; a text may end in the padding token. On a GPU, only the head is in float32."""
    name = make_model(tmp_path / "rm", auto_class=AutoModelForSequenceClassification, num_labels=1, seed=3)
    tokenizer = AutoTokenizer.from_pretrained(name)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(name)
    monkeypatch.setenv("REWARD_MODEL", name)
    monkeypatch.setenv("REWARD_BATCH", "3")
    rewards = load_script(FILES / "reward_model.py")
    monkeypatch.setattr(rewards, "NAME", name)
    rewards.load.cache_clear()
    texts = ["", "a", "ab c", "one two three four", "what is it?", "x" * 33, "then<pad>", "then<eos>", "a"]
    columns = {"prompts": ["ask"] * 9, "responses": texts, "answers": texts}
    columns["messages"] = [[{"role": "user", "content": "ask"}]] * 9
    model = AutoModelForSequenceClassification.from_pretrained(name).eval()
    rows = [torch.tensor([tokenizer(asked.format(text))["input_ids"]]) for text in texts]
    expected = [model(row).logits.item() for row in rows]
    found = rewards.reward_model(**columns)
    assert found == pytest.approx(expected, abs=1e-5) and found[1] == found[-1] and max(found) - min(found) > 0.1
    inside = rewards.load()[0]
    inside.model.norm.register_forward_hook(lambda *call: call[2].bfloat16())  # as some return it
    rewards.use_bfloat16(inside, "cpu")
    near = torch.tensor(rewards.reward_model(**columns))
    assert 1e-5 < (near - torch.tensor(expected)).abs().max() < 0.1 and not near.bfloat16().float().equal(near)
