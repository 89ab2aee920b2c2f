"""benchmarks/preflight.py: a faulty set-up is named in a sentence, and a sound one is not."""

import fcntl
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from conftest import ROOT, make_model, toy_rows, write_rows
from datasets import Dataset, DatasetDict
from transformers import AutoModelForCausalLM, PhimoeConfig

sys.path.insert(0, str(ROOT / "benchmarks"))
import preflight

REWARD = "def reward(responses, answers{}):\n    return {}\n"
SOUND = REWARD.format("", "[float(a.strip('# ') in r) for a, r in zip(answers, responses)]")


@pytest.fixture
def check(tmp_path, monkeypatch, capsys):
    """check(flags) -> (exit code, what was said) about a small model, data and a reward in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["preflight.py"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(preflight, "STOPS", [])
    monkeypatch.setattr(preflight, "default_config_file", str(tmp_path / "accelerate.yaml"))
    make_model(tmp_path / "model", "llama")
    write_rows(tmp_path / "train.jsonl", toy_rows(8))
    write_rows(tmp_path / "test.jsonl", toy_rows(4, 100))
    (tmp_path / "sound.py").write_text(SOUND)
    flags = "--model model --dataset train.jsonl --eval-dataset test.jsonl --reward sound.py:reward --track none"
    flags = [*flags.split(), "--max-response-length", "10"]

    def run(words=()):
        monkeypatch.delitem(sys.modules, "sound", raising=False)
        monkeypatch.delitem(sys.modules, "mine", raising=False)
        code = preflight.main([*flags, *words])  # of a flag that comes twice, the last one counts
        return code, capsys.readouterr().out

    return run


@pytest.mark.parametrize("script", ["ppo_llm", "grpo_llm", "ppo_llm_fsdp"])
def test_a_sound_set_up(check, script):
    code, said = check(["--script", str(ROOT / f"{script}.py")])
    assert code == 0 and "stop:" not in said and "skip:" not in said, said
    assert said.count("ok ") >= 6 and not Path("runs").exists(), said


def change(file, **values):
    content = json.loads(Path(file).read_text())
    Path(file).write_text(json.dumps(content | values))


def rows(**columns):
    write_rows(Path("train.jsonl"), [row | columns for row in toy_rows(8)])


def mine(body, names=""):
    Path("mine.py").write_text(REWARD.format(names, body))
    return ["--reward", "mine.py:reward"]


def splits():
    DatasetDict({name: Dataset.from_list(toy_rows(4)) for name in ("math", "code")}).save_to_disk("saved")
    return ["--dataset", "saved"]


def template(text):
    Path("t.jinja").write_text(text)
    return ["--chat-template", "t.jinja"]


def phimoe():
    config = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 2, "vocab_size": 64, "initializer_range": 0.2, "router_jitter_noise": 0.3}
    config |= {"num_local_experts": 4, "num_experts_per_tok": 2, "bos_token_id": 0, "eos_token_id": 1}
    AutoModelForCausalLM.from_config(PhimoeConfig(**config)).save_pretrained("model")


def pre_tokenizer():
    change("model/tokenizer.json", pre_tokenizer={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True})
    change("model/tokenizer_config.json", tokenizer_class="Qwen2Tokenizer")


def locked():
    Path("runs/one").mkdir(parents=True)
    Path("runs/one/lock").write_text("process 7 on here")
    if os.fork() == 0:  # holds the lock until its parent has looked
        with open("runs/one/lock", "r+") as file, open("ready", "w"):
            fcntl.lockf(file, fcntl.LOCK_EX)
            os.read(os.open("/dev/null", os.O_RDONLY), 1)
            __import__("time").sleep(5)
            os._exit(0)
    return ["--run-name", "one", "--resume"]


# Each: what is changed in the folder, or flags; words that must be said. A trailing "look" does not fail.
CASES = {
    "model": (["--model", "./none"], "stop: --model ./none is not there"),
    "data": (["--dataset", "./none.jsonl"], "stop: --dataset ./none.jsonl is not there"),
    "tsv": (lambda: shutil.copy("train.jsonl", "a.tsv") and ["--dataset", "a.tsv"], "stop: --dataset a.tsv: only"),
    "reward file": (["--reward", "none.py:f"], "stop: --reward none.py:f"),
    "adapter": (lambda: Path("model/adapter_config.json").write_text("{}") and [], "stop: model is an adapter"),
    "splits": (splits, "['math', 'code'], only `train` is read"),
    "template row": (lambda: template("{{ raise_exception('no') }}"), "train.jsonl, row 1"),
    "no test data": (lambda: Path("test.jsonl").unlink(), "stop: --eval_dataset test.jsonl is not there"),
    "float": (lambda: rows(answer=72) or write_rows(Path("train.jsonl"), [{"question": "a", "answer": x} for x in (72, 0.5)]) and [], "look: `datasets` has changed 1 answers, (from, to) [(72, 72.0)]"),
    "hidden": (lambda: rows(messages="a"), "look: a reward gets the script's own {'messages'}"),
    "no tokenizer": (lambda: [x.unlink() for x in Path("model").glob("token*")] and [], "stop: model has no tokenizer"),
    "pre-tokenizer": (pre_tokenizer, "texts otherwise than tokenizer.json"),
    "no EOS": (lambda: [change(f"model/{x}.json", eos_token_id=None, eos_token=None) for x in ("config", "generation_config", "tokenizer_config")] and [], "stop: there is no EOS id"),
    "positions": (["--max-response-length", "999"], "exceed 256 positions"),
    "embedding": (lambda: make_model(Path("model"), vocab_size=20) and [], "but model has 20 embeddings"),
    "phimoe": (phimoe, "stop: phimoe cannot be trained"),
    "phimoe's log-probs": (phimoe, "from those of model loaded without the script"),
    "quantized": (lambda: change("model/config.json", quantization_config={"quant_method": "fp8"}), "is quantized"),
    "needs": (lambda: mine("[1.0] * len(answers)", ", level"), "stop: the reward needs {'level'}"),
    "exit": (lambda: mine("exit()"), "stop: the reward function has ended the program"),
    "dictionary": (lambda: mine("{0: 6.0}"), "stop: TypeError"),
    "none": (lambda: mine("[None] * len(answers)"), "stop: the reward must be finite numbers"),
    "equal": (lambda: mine("[1.0] * len(answers)"), "look: the reward cannot tell right"),
    "batch": (["--batch-size", "7"], "stop: 7 responses on 1 process(es) make no minibatches of 64: nearest are --batch-size 7 --minibatch-size 7"),
    "processes": (["--num-processes", "3"], "--batch-size 252 --minibatch-size 63"),
    "temperature": (["--temperature", "0"], "stop: --temperature 0 divides by zero"),
    "fsdp": (lambda: Path("accelerate.yaml").write_text("distributed_type: FSDP") and [], "asks for ['FSDP']"),
    "run folder": (lambda: os.makedirs("runs/one") or ["--run-name", "one"], "stop: the run folder runs/one exists"),
    "lock": (locked, "stop: runs/one is in use by process 7 on here"),
    "rate": (["--lr", "1e-3"], "look: --lr 0.001 is for the embedded model"),
    "embedded": (lambda: ["--model", f"{ROOT}/benchmarks/tiny/model"], "settings off: {"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_fault_is_named(check, name):
    given, expected = CASES[name]
    code, said = check((given() or []) if callable(given) else given)
    assert expected in said, said
    assert code == any(line.startswith("stop:") for line in said.splitlines())
    assert "look:" in expected or code == 1 or name == "embedded", said
