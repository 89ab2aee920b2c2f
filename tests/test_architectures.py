"""Families of models, tiny and random, go through every script: benchmarks/campaigns/families.py, whose table the guide
has. Each pass is compared with each row alone, by eager attention, and greedy answers with transformers' own."""

import json
import shutil

import pytest
import torch
from conftest import ROOT, each_script, forked, make_tokenizer, read_metrics
from ranks import load_script
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

families = load_script(ROOT / "benchmarks" / "campaigns" / "families.py")
# One of each kind: plain, learned positions, tied, a cap, scales, a window, experts, and hybrids with linear attention,
# convolutions, Mamba; two that read images, too; and one whose decoder has another name.
CHOSEN = ["llama", "gpt2", "gpt_neox", "gemma2", "granite", "mistral", "gpt_oss", "qwen3_5", "lfm2", "falcon_h1"]
CHOSEN += ["gemma3", "opt", "llama4_text"]
# What transformers does differently for a row alone, or by eager attention, and why.
APART = {
    "falcon, alibi": "eager attention adds the bias twice, once of it in the mask",
    "zamba2": "the decoding step of its Mamba layers, 1e-4 for one row alone as well",
    "nemotron_h": "the same, 3e-5",
}
# Why a family cannot be trained.
DIFFER = "sampler and training pass differ"
REFUSED = {"mamba": DIFFER, "mamba2": DIFFER, "recurrent_gemma": DIFFER, "minimax": "cache of its own"}
REFUSED["llama4_text"] = "no attribute 'last_hidden_state'"  # transformers looks for its decoder under a wrong name
SHARDED_REFUSED = REFUSED | dict.fromkeys(("mamba", "zamba2"), "RuntimeError")  # by fully_shard
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in families.FAMILIES if name not in CHOSEN]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """folder_of(name) -> a folder with a random model of the family."""
    folders = {}

    def make(name):
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp("family") / "model"
            families.make_model(name, folders[name])
        return folders[name]

    return make


def batch():
    """Tokens of two rows, and a mask of all but the last."""
    tokens = torch.randint(9, 300, (2, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(12) < 11
    return tokens, mask.expand_as(tokens)


def change_config(folder, **changes):
    """Of the model in the folder, and of the part of it that reads text."""
    config = json.loads((folder / "config.json").read_text())
    for part in config, config.get("text_config", {}):
        part.update(changes)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("name", [*CHOSEN, *SLOW])
def test_a_family_is_right_or_refused(name, folder_of):
    columns = ("GRPO", "PPO") if name in CHOSEN else families.MODES
    found = families.try_family(name, folder_of(name), columns)
    difference = found.pop("pass")
    assert name in {*APART, *REFUSED} or float(difference) < 2e-5, difference
    alike, _, total = found.pop("greedy").partition("/")
    assert alike == total or name in REFUSED, (alike, total)
    assert found.pop("reload") == ("-" if name in REFUSED else "yes")
    for column, value in found.items():
        refused = SHARDED_REFUSED if column == "sharded" else REFUSED
        float32 = 1e-3 if name in APART else 2e-5 if name.startswith("qwen3_5") else 1e-5
        if name in refused:
            assert refused[name] in value, (column, value)
        else:
            assert float(value) < (0.1 if column == "bfloat16" else float32), (column, value)


TOWERS = ["llama", "gemma3", "qwen3_5", "opt"]  # what stands beside a decoder, or has it elsewhere
OTHERS = [
    pytest.param(name, marks=pytest.mark.slow) for name in families.FAMILIES if name not in [*TOWERS, "llama4_text"]
]


@pytest.mark.parametrize("name", [*TOWERS, *OTHERS])
def test_what_takes_part_is_trained(algo, name, folder_of):
    """What gets a gradient from text, when everything may have one, is what is trained, and a critic's head."""
    folder = str(folder_of(name))
    policy = algo.load_model(folder, AutoModelForCausalLM)
    wrapped = [(policy, algo.Policy(policy, 1.0))]
    if hasattr(algo, "load_critic"):
        critic = algo.load_critic(folder, 0)
        wrapped.append((critic, algo.Critic(critic)))
    for model, wrapper in wrapped:
        trained = set(algo.trained_parameters(model))
        if model is not policy:
            torch.nn.init.normal_(model.score.weight)  # at zero, nothing behind it would get a gradient
        model.requires_grad_(True)
        output = wrapper(*batch())
        (output[0] if isinstance(output, tuple) else output).sum().backward()
        takes_part = {key for key, p in model.named_parameters() if p.grad is not None}
        assert len(takes_part) > 2
        assert trained == takes_part, trained ^ takes_part


def test_two_passes_of_training_are_the_same(algo, folder_of, tmp_path):
    """Without dropout, and without the noise that some routers add while they train."""
    shutil.copytree(folder_of("mixtral"), tmp_path / "model")
    change_config(tmp_path / "model", router_jitter_noise=0.5, attention_dropout=0.5)
    policy = algo.Policy(algo.load_model(str(tmp_path / "model"), AutoModelForCausalLM), 1.0).train()
    first, second = (policy(*batch())[0] for _ in range(2))
    assert torch.equal(first, second)


class Bent(LlamaForCausalLM):
    """Does what no model does: to the hidden state before its head, and to the logits behind it."""

    def forward(self, *args, **kwargs):
        output = self.model(*args, **{name: x for name, x in kwargs.items() if name != "logits_to_keep"})
        output.logits = (self.lm_head(output.last_hidden_state * 0.5) * 3).sin() + 1
        return output


def test_logits_are_those_of_the_model_whatever_it_does_to_them(algo, folder_of):
    model = Bent.from_pretrained(folder_of("llama")).eval()
    tokens, mask = batch()
    policy = algo.Policy(model, 1.0)
    policy.chunk_elements = 420 * 5
    logprobs, _ = policy(tokens, mask)
    expected = model(tokens).logits.log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1)
    assert (logprobs[:, :-1] - expected).abs().max() < 1e-5
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    parameters = list(model.parameters())
    ours = torch.autograd.grad((logprobs[:, :-1] * weights).sum(), parameters)
    theirs = torch.autograd.grad((expected * weights).sum(), parameters)
    assert all(torch.allclose(a, b, atol=1e-4, rtol=1e-3) for a, b in zip(ours, theirs))


def tower(weights):
    return {name: weight for name, weight in weights.items() if "vision" in name or "projector" in name}


@pytest.mark.once
@each_script()
def test_what_reads_images_is_saved_unchanged(script, folder_of, toy_flags, tmp_path):
    """One process and two agree, though no pass uses it."""
    folder = tmp_path / "model"
    families.make_model("gemma3", folder)
    make_tokenizer().save_pretrained(folder)  # that of the toy data
    change_config(folder, eos_token_id=1)
    flags = toy_flags | {"model": str(folder), "output_dir": tmp_path, "total_iterations": 2}
    runs = []
    for processes in (1, 2) if script.stem != "ppo_llm_fsdp" else (2,):
        code, console = forked(script, flags | {"run_name": f"by-{processes}"}, processes)
        assert code == 0, console
        runs.append(read_metrics(tmp_path / f"by-{processes}"))
        before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / f"by-{processes}/final"))
        assert before.keys() == after.keys() and len(tower(before)) > 5
        changed = {key for key in before if not torch.equal(before[key], after[key])}
        assert not changed & tower(before).keys() and len(changed) > 10
        AutoConfig.from_pretrained(tmp_path / f"by-{processes}" / "final")
    for one, two in zip(runs[0], runs[-1], strict=True):
        for metric in ("reward/mean", "actor/grad_norm", "kl/mean"):
            if metric in one:
                assert two[metric] == pytest.approx(one[metric], rel=1e-3, abs=1e-6), metric


def test_the_guide_has_the_table_of_all():
    guide = (ROOT / "notes" / "guide.md").read_text()
    rows = [line.split(" | ")[0].strip("| ") for line in guide.splitlines() if line.startswith("| ")]
    assert [name for name in families.FAMILIES if name in rows] == [*families.FAMILIES]
