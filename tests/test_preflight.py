"""benchmarks/preflight.py: a faulty set-up is named in a sentence, and a sound one is not."""

import json
import os
import sys
from pathlib import Path

import pytest
from helpers import ROOT, SCRIPTS, make_model, toy_rows, write_rows
from transformers import AutoModelForCausalLM, PhimoeConfig

sys.path.insert(0, str(ROOT / "benchmarks"))
import preflight

REWARD = "def reward(responses, answers{}):\n    return {}\n"
SOUND = REWARD.format("", "[float(r == a) + 0.01 * ('7' in r) for a, r in zip(answers, responses)]")


@pytest.fixture
def check(tmp_path, monkeypatch, capsys):
    """check(flags) -> (exit code, what was said) about a small model, data and a reward in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["preflight.py"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(preflight, "STOPS", [])
    monkeypatch.setattr(preflight.time, "sleep", lambda _: Path("slept").touch())
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    monkeypatch.setattr(preflight, "default_config_file", str(tmp_path / "accelerate.yaml"))
    make_model(tmp_path / "model", "llama")
    write_rows(tmp_path / "train.jsonl", toy_rows(8))
    write_rows(tmp_path / "test.jsonl", toy_rows(4, 100))
    (tmp_path / "sound.py").write_text(SOUND)
    flags = "--model model --dataset train.jsonl --eval-dataset test.jsonl --reward sound.py:reward --track none"
    flags = [*flags.split(), "--max-response-length", "100"]

    def run(words=()):
        monkeypatch.delitem(sys.modules, "sound", raising=False)
        monkeypatch.delitem(sys.modules, "mine", raising=False)
        code = preflight.main([*flags, *words])  # of a flag that comes twice, the last one counts
        return code, capsys.readouterr().out

    return run


TRUNCATION = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
PADDING = {"strategy": {"Fixed": 40}, "direction": "Right", "pad_to_multiple_of": None}
PADS = {"truncation": TRUNCATION, "padding": PADDING | {"pad_id": 0, "pad_type_id": 0, "pad_token": "<pad>"}}


@pytest.mark.parametrize("name", [*SCRIPTS, "notes/variants/sft"])
def test_a_sound_set_up(check, name):
    change("model/tokenizer.json", **PADS)  # by themselves, tokenizers would cut the texts and fill them up
    code, said = check(["--script", str(ROOT / f"{name}.py")])
    assert code == 0 and not any(word in said for word in ("stop:", "look:", "skip:")), said
    assert said.count("ok ") >= 5 and not Path("runs").exists(), said


def change(file, **values):
    content = json.loads(Path(file).read_text())
    Path(file).write_text(json.dumps(content | values))


def write(file, text):
    Path(file).write_text(text)


def no_eos():
    for name in "config", "generation_config", "tokenizer_config":
        change(f"model/{name}.json", eos_token_id=None, eos_token=None)


def phimoe():
    config = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 2, "vocab_size": 64, "initializer_range": 0.2, "router_jitter_noise": 0.3}
    config |= {"num_local_experts": 4, "num_experts_per_tok": 2, "bos_token_id": 0, "eos_token_id": 1}
    AutoModelForCausalLM.from_config(PhimoeConfig(**config)).save_pretrained("model")


def normalizer():
    change("model/tokenizer.json", normalizer={"type": "Replace", "pattern": {"String": "w"}, "content": "v"})
    change("model/tokenizer_config.json", tokenizer_class="Qwen2Tokenizer")


def resumed():
    Path("runs/one/checkpoints/step_000001").mkdir(parents=True)
    write("runs/one/args.json", '{"model": "other", "reward_settings": {"RM": "one"}}')


def mine(body, names=""):
    return lambda: write("mine.py", REWARD.format(names, body))


def with_bos():
    change("model/tokenizer_config.json", bos_token="<eos2>")
    begin = [{"SpecialToken": {"id": "<eos2>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    tokens = {"<eos2>": {"id": "<eos2>", "ids": [2], "tokens": ["<eos2>"]}}
    single = {"type": "TemplateProcessing", "single": begin, "pair": begin, "special_tokens": tokens}
    change("model/tokenizer.json", post_processor=single)
    write("t.jinja", "{{ messages[0].content }}")


def rows(count, **columns):
    """Rows of test data with columns of their own."""
    return lambda: write_rows(
        Path("test.jsonl"), [x | columns | {"level": i // 4} for i, x in enumerate(toy_rows(count, 100))]
    )


NUMBERS = '{"question": "a", "answer": 72}\n{"question": "a", "answer": 0.5}\n'
CHAT = '[{"question": [{"role": "user", "content": "a"}], "answer": 7}]'
TURNS = "{% for m in messages if m.role != 'system' %}{{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}"
NO_TURN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}"
SFT = ROOT / "notes" / "variants" / "sft.py"
BITS, T, MINE = {"quant_method": "bitsandbytes"}, "--chat-template t.jinja", "--reward mine.py:reward"
CASES = {  # what is changed in the folder, flags, words that must be said
    "model": (None, "--model ./none", "stop: --model ./none is not there"),
    "template": (lambda: write("t.jinja", "{{ raise_exception('no') }}"), T, "train.jsonl, row 1"),
    "open end": (lambda: write("t.jinja", "{{ messages[-1].content }}<eos2>"), T, "look: the template ends turns with"),
    "numbers": (lambda: write("train.jsonl", NUMBERS), "", "look: `datasets` has changed 1 answers"),
    "normalizer": (normalizer, "", "stop: tokenizer.json has other ids for ['what is"),
    "no EOS": (no_eos, "", "stop: there is no EOS id"),
    "positions": (None, "--max-response-length 999", "can exceed 256 positions"),
    "embedding": (lambda: make_model(Path("model"), vocab_size=20), "", "but model has 20 embeddings"),
    "phimoe": (phimoe, "", "stop: phimoe cannot be trained"),
    "changed": (phimoe, "", "from those of model loaded without the script"),
    "needs": (mine("[1.0] * len(answers)", ", level"), MINE, "stop: the reward needs {'level'}"),
    "equal": (mine("[1.0] * len(answers)"), MINE, "look: the reward cannot tell right"),
    "alike": (mine("[1.0] * len(answers)"), f"{MINE} --answer-column None", "look: all of them score alike"),
    "answers": (
        lambda: write("train.jsonl", '{"question": "a: 7", "answer": 7}'),
        "",
        "look: prompts end in their own",
    ),
    "no turn": (lambda: write("t.jinja", NO_TURN), T, "look: the template ignores add_generation_prompt: prompts lack"),
    "in it": (mine("[float(str(a) in r) for a, r in zip(answers, responses)]"), MINE, "look: many answers in one"),
    "long": (
        mine("[len(r) + float(r == a) for a, r in zip(answers, responses)]"),
        MINE,
        "look: the reward cannot tell right",
    ),
    "rivals": (
        mine("[float(r == a) / len(answers) for a, r in zip(answers, responses)]"),
        MINE,
        "look: `right` scores 1 alone",
    ),
    "resumed": (resumed, "--run-name one --resume", "look: changed since the run was last started: model other"),
    "judge": (
        lambda: (resumed(), write("mine.py", "SETTINGS = {'RM': 'two'}\n" + SOUND)),
        f"--run-name one --resume {MINE}",
        "look: the reward was {'RM': 'one'} when the run was last started, and is {'RM': 'two'}",
    ),
    "batch": (None, "--num-processes 3", "stop: --minibatch-size must be a multiple of"),
    "empty": (mine("[-r.count('q') for r in responses]"), MINE, "look: an empty answer scores as much as the best"),
    "LoRA": (None, "--lora-rank 2", "look: --lora-rank with --lr 1e-06"),
    "sft": (None, f"--script {SFT} --max-response-length 3", "stop: an answer has 7 tokens with its EOS"),
    "preferences": (None, f"--script {ROOT}/notes/variants/preferences.py", "stop: preferences.py doesn't sample"),
    "comma": (lambda: write("c.csv", "question,answer\na, b?,72\nc,3\n"), "--dataset c.csv", "c.csv has 2 columns"),
    "no template": (lambda: write("c.json", CHAT), "--dataset c.json", "look: no chat template: the prompts' messages"),
    "leak": (None, "--eval-dataset train.jsonl", "look: 8 of the test prompts are training prompts"),
    "left out": (None, "--max-prompt-length 13", "look: most rows of train.jsonl are left out"),
    "4 bits": (lambda: change("model/config.json", quantization_config=BITS), "", "stop: model is quantised"),
    "special": (lambda: write("c.json", CHAT.replace('"a"', '"<eos>a"')), "--dataset c.json", "look: prompts contain"),
    "penalty": (lambda: change("model/generation_config.json", repetition_penalty=1.1), "", "look: final/ will bring"),
    "digit": (lambda: change("model/generation_config.json", eos_token_id=[1, 9]), "", "look: EOS ids [9] are ordin"),
    "next row": (
        mine("[float(r == answers[(i + 1) % len(answers)]) for i, r in enumerate(responses)]"),
        MINE,
        "look: `right` scores 1 alone, 0 in a list",
    ),
    "later": (
        mine("[float(r == a) - __import__('os').path.exists('slept') for a, r in zip(answers, responses)]"),
        MINE,
        "look: `right` scores something else a second later",
    ),
    "repeated": (
        lambda: write_rows(Path("train.jsonl"), toy_rows(1) * 8),
        "",
        "look: each distinct prompt is there four",
    ),
    "cut off": (None, "--max-response-length 3", "look: most answers would be cut off"),
    "think": (lambda: write("t.jinja", TURNS + "<think>\n{% endif %}"), T, "look: prompts open '<think>"),
    "system": (
        lambda: (
            write("t.jinja", TURNS + "{% endif %}"),
            write("c.json", CHAT.replace('[{"role"', '[{"role": "system", "content": "b"}, {"role"')),
        ),
        f"--dataset c.json {T}",
        "look: the template drops messages, by role: {'system': 1}",
    ),
    "BOS": (with_bos, T, "look: the tokenizer begins texts with '<eos2>', prompts lack it"),
    "tools": (
        lambda: write_rows(Path("train.jsonl"), [x | {"tools": "[]"} for x in toy_rows(8)]),
        "",
        "look: no template gets tools",
    ),
    "space": (
        lambda: write_rows(Path("train.jsonl"), [x | {"answer": f"b{i} "} for i, x in enumerate(toy_rows(8))]),
        "",
        "look: 8 right answers, as ['b",
    ),
    "part": (
        mine("{'sum': ['7' in r for r in responses], 'mark': ['####' in r for r in responses]}"),
        MINE,
        "look: mark is 0 in all of 32, and at most 1 in answers that we made up",
    ),
    "never": (
        mine("{'sum': ['7' in r for r in responses], 'no': ['+!' in r for r in responses]}"),
        MINE,
        "look: no is 0 in all of 32, and at most 0 in answers that we made up",
    ),
    "other task": (rows(8, question="zzkk"), "", "look: test prompts have other words"),
    "sorted": (rows(12), "--eval-rows 4", "look: test data are sorted by level: the first --eval-rows lack 2 of its"),
    "srun": (lambda: os.environ.update(SLURM_STEP_NUM_TASKS="2"), "", "stop: srun has started several tasks"),
    "fsdp": (lambda: write("accelerate.yaml", "distributed_type: FSDP"), "", "asks for ['FSDP']"),
}


ASKED = "changed", "alike", "empty", "cut off", "part", "never"  # what only the model's answers show


@pytest.mark.parametrize("name", CASES)
def test_a_fault_is_named(check, name):
    change_folder, flags, expected = CASES[name]
    if change_folder:
        change_folder()
    code, said = check([*flags.split(), *["--no-model"] * (name not in ASKED)])
    assert expected in said, said
    assert code == ("stop:" in said) and (code or "look:" in expected), said
