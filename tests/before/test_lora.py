"""LoRA: what is trained, what the reference is, what is saved, and adapters as --model."""

import json

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from .helpers_before import has_critic, make_model, only_grpo, only_ppo, read_metrics, untimed

peft = pytest.importorskip("peft")
KL = {"kl_reward_coef": 0.01, "total_iterations": 3, "lr": 0.02}


@pytest.fixture
def trained(algo, toy_run, spy):
    """(run folder, metrics, models) of a run with rank 4; models: what save_models was given at the end, by place."""
    calls = spy(algo, "save_models")
    run_dir, metrics = toy_run(lora_rank=4, **KL)
    return run_dir, metrics, {place: model.model for place, model in calls[-1][0][1].items()}


def weights(model):
    return {name: getattr(p, "_local_tensor", p).detach() for name, p in model.named_parameters()}


@only_ppo
def test_only_the_matrices_are_trained(algo, trained, tiny_model):
    _, _, models = trained
    base, found = weights(AutoModelForCausalLM.from_pretrained(tiny_model)), weights(models["."])
    changed = {name for name in found if "lora_" in name}
    assert {name.replace(".base_layer", "") for name in found.keys() - changed} == base.keys()
    assert all(torch.equal(found[name], base[name.replace(".base_layer", "")]) for name in found.keys() - changed)
    assert any(found[name].abs().max() > 0 for name in changed if "lora_B" in name)
    assert not any("lm_head" in name or "embed" in name for name in changed)  # linear layers but the head
    trainable = {name for name, p in models["."].named_parameters() if p.requires_grad}
    assert trainable == changed and {"q_proj", "down_proj"} <= {name.split(".")[-4] for name in changed}
    if has_critic(algo):
        found = {name: p for name, p in models["critic"].named_parameters() if p.requires_grad}
        heads = {name for name in found if "lora_" not in name}
        assert heads and all("modules_to_save" in name for name in heads)  # the value head is trained whole
        assert any(weights(models["critic"])[name].abs().max() > 0 for name in heads)


@only_ppo
def test_the_reference_is_the_actor_without_its_adapter(algo, toy_args, spy, tiny_model):
    """No second copy, KL exactly 0 at first; later that to the base model, as a separate copy gives it."""
    policies, passes = spy(algo, "Policy"), spy(algo, "forward_all")
    run_dir = algo.main(toy_args(lora_rank=4, **KL))
    metrics = read_metrics(run_dir)
    assert len(policies) == 1
    assert metrics[1]["kl/mean"] == metrics[1]["kl/sequence"] == 0 != metrics[2]["kl/mean"]
    assert metrics[1]["actor/ratio_max"] > 1 and metrics[1]["rollout/logprob_diff"] < 1e-5
    passes = [(args, result) for args, result in passes if len(args) == 4]  # of the policy: old, reference, old, ...
    (_, minibatches, mask, temperature), ref_logprobs = passes[-1]
    base = algo.Policy(AutoModelForCausalLM.from_pretrained(tiny_model))
    expected = algo.forward_all(base, minibatches, mask, temperature)
    assert torch.equal(ref_logprobs, expected) and not torch.equal(passes[-2][1], expected)


@only_grpo
def test_adapters_are_back_after_the_reference_pass(algo, tiny_model):
    model = algo.load_causal_lm(tiny_model, 4)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p)
    ids, trainable = torch.arange(3, 9)[None], {n for n, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        before, base = model(ids).logits, AutoModelForCausalLM.from_pretrained(tiny_model)(ids).logits
        with algo.as_it_began(model):
            assert torch.equal(model(ids).logits, base) and not torch.equal(before, base)
        assert torch.equal(model(ids).logits, before)
    assert {n for n, p in model.named_parameters() if p.requires_grad} == trainable
    plain = AutoModelForCausalLM.from_pretrained(tiny_model)
    with algo.as_it_began(plain):  # a model without adapters is left alone
        pass
    assert all(p.requires_grad for p in plain.parameters())


def logits(model, ids):
    with torch.no_grad():
        return model.eval()(ids).logits


def test_what_is_saved_loads_in_plain_transformers_and_merges(algo, trained, tmp_path):
    run_dir, _, models = trained
    assert not (run_dir / "final" / "model.safetensors").exists()
    assert (run_dir / "final" / "adapter_model.safetensors").stat().st_size < 60_000
    ids = torch.arange(3, 13)[None]
    if algo.__name__ != "ppo_llm_fsdp":  # there the models are shards
        expected = logits(models["."], ids)
        assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(run_dir / "final"), ids), expected)
        if has_critic(algo):
            critic = AutoModelForTokenClassification.from_pretrained(run_dir / "final" / "critic", num_labels=1)
            assert torch.allclose(logits(critic, ids), logits(models["critic"], ids), atol=1e-6)
            assert logits(critic, ids).abs().max() > 0.01
    # The README's line.
    merged = peft.AutoPeftModelForCausalLM.from_pretrained(run_dir / "final").merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    found = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), ids)
    assert torch.allclose(found, logits(AutoModelForCausalLM.from_pretrained(run_dir / "final"), ids), atol=1e-4)


@only_grpo
def test_an_adapter_of_others_has_no_dropout_and_may_lack_a_tokenizer(algo, toy_args, tmp_path, tiny_model):
    config = peft.LoraConfig(r=2, lora_dropout=0.5, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model), config).save_pretrained(tmp_path / "theirs")
    assert json.loads((tmp_path / "theirs" / "adapter_config.json").read_text())["inference_mode"]
    run_dir = algo.main(toy_args(model=str(tmp_path / "theirs"), **KL, minibatch_size=8))
    metrics = read_metrics(run_dir)
    assert metrics[1]["kl/mean"] == 0 and metrics[1]["actor/ratio_max"] == 1 and metrics[2]["kl/mean"] != 0
    assert metrics[1]["rollout/logprob_diff"] < 1e-5  # sampled in eval mode, trained in train mode
    saved = json.loads((run_dir / "final" / "adapter_config.json").read_text())
    assert not saved["inference_mode"] and sorted(saved["target_modules"]) == ["down_proj", "q_proj"]


@only_grpo
def test_an_adapter_finds_its_base_from_anywhere(algo, toy_args, tmp_path, monkeypatch):
    make_model(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    run_dir = algo.main(toy_args(model="model", lora_rank=2, total_iterations=1))
    monkeypatch.chdir("/")
    AutoModelForCausalLM.from_pretrained(run_dir / "final")


@only_ppo
def test_an_adapter_as_model_is_trained_further_from_where_it_is(algo, toy_args, trained, spy, capsys):
    """The reference is the adapter as it came: KL 0 at first, and the same adapter again in the end."""
    first, metrics, _ = trained
    AcceleratorState._reset_state(True)
    critic = {"critic_model": str(first / "final" / "critic")} if has_critic(algo) else {}
    run_dir = algo.main(toy_args(model=str(first / "final"), run_name="again", **KL, **critic))
    again = read_metrics(run_dir)
    assert "the actor with the adapter it began with" in capsys.readouterr().out
    assert again[0]["eval/score"] == metrics[-1]["eval/score"]
    assert again[0]["eval/score_sampled"] == metrics[-1]["eval/score_sampled"]
    assert again[1]["kl/mean"] == 0 != again[2]["kl/mean"]
    old, new = (load_file(folder / "final" / "adapter_model.safetensors") for folder in (first, run_dir))
    assert old.keys() == new.keys() and any(not torch.equal(old[key], new[key]) for key in old)
    config = json.loads((run_dir / "final" / "adapter_config.json").read_text())
    assert config["r"] == 4 and not config["inference_mode"]
    if has_critic(algo):
        assert abs(again[1]["critic/value_mean"]) > 1e-3  # its value head came along


@only_grpo
@pytest.mark.parametrize("flags", [{"gradient_checkpointing": True}, {"microbatch_tokens": 40}, {"kl_loss_coef": 0.1}])
def test_lora_goes_with(toy_run, flags):
    _, metrics = toy_run(lora_rank=2, **KL | flags)
    _, plain = toy_run(lora_rank=2, **KL | {"kl_loss_coef": flags.get("kl_loss_coef", 0.0)})
    assert metrics[-1]["reward/mean"] == pytest.approx(plain[-1]["reward/mean"], abs=1e-5)
    assert metrics[-1]["actor/grad_norm"] == pytest.approx(plain[-1]["actor/grad_norm"], rel=1e-3)


@only_ppo
def test_the_trainable_state_is_small(algo, trained, capsys):
    _, _, models = trained
    for model in models.values():
        trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert 0 < trainable < 0.2 * sum(p.numel() for p in model.parameters())  # 128 times smaller than real ones


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.fixture
def adapter(algo, toy_run):
    run_dir, _ = toy_run(lora_rank=4, total_iterations=1)
    return run_dir / "final"


def refused(algo, toy_args, *parts, **flags):
    with pytest.raises(SystemExit) as error:
        AcceleratorState._reset_state(True)
        algo.main(toy_args(run_name="refused", **flags))
    message = error.value.code
    assert message.startswith("error: ") and "\n" not in message
    assert [part for part in parts if str(part) not in message] == [], message


@only_grpo
def test_bad_adapters(algo, toy_args, adapter, tmp_path):
    refused(algo, toy_args, "--lora-rank 8", "is an adapter", "rank 4", model=str(adapter), lora_rank=8)
    config = adapter / "adapter_config.json"
    good = json.loads(config.read_text())
    config.write_text(json.dumps(good | {"base_model_name_or_path": str(tmp_path / "gone")}))
    refused(algo, toy_args, f"--model {adapter}", "an adapter", f"base {tmp_path / 'gone'}", model=str(adapter))
    other = make_model(tmp_path / "other", hidden_size=16, intermediate_size=24)
    config.write_text(json.dumps(good | {"base_model_name_or_path": other}))
    refused(algo, toy_args, f"adapter {adapter}", "not made for its base", model=str(adapter))
    other = make_model(tmp_path / "one layer", num_hidden_layers=1)
    config.write_text(json.dumps(good | {"base_model_name_or_path": other}))
    refused(algo, toy_args, f"adapter {adapter}: not made for its base", "layers.1.", model=str(adapter))
    config.write_text(json.dumps({"peft_type": "IA3", "base_model_name_or_path": good["base_model_name_or_path"]}))
    refused(algo, toy_args, f"adapter {adapter}", "only LoRA", model=str(adapter))
    config.write_text(json.dumps(good))
    (adapter / "adapter_model.safetensors").write_bytes(b"\0" * 100)
    refused(algo, toy_args, f"adapter {adapter}", "damaged", model=str(adapter))
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")  # pickles are not read
    refused(algo, toy_args, f"adapter {adapter}", "adapter_model.safetensors", model=str(adapter))


@only_grpo
def test_lora_without_peft_says_what_to_install(algo, toy_args, monkeypatch):
    monkeypatch.setattr(algo, "find_spec", lambda name: None)
    refused(algo, toy_args, "pip install peft", lora_rank=4)


@only_ppo
def test_a_checkpoint_has_what_is_trained_and_goes_on(algo, toy_args):
    flags = {"lora_rank": 4, "save_every": 1, "keep_checkpoints": 9, **KL}
    run_dir = algo.main(toy_args(run_name="whole", **flags))
    names = [
        name for file in (run_dir / "checkpoints" / "step_000001").glob("*.safetensors") for name in load_file(file)
    ]
    assert names and not [name for name in names if "lora_" not in name and "modules_to_save" not in name]
    whole = read_metrics(run_dir)
    AcceleratorState._reset_state(True)
    algo.main(toy_args(resume=str(run_dir / "checkpoints" / "step_000001"), **flags))
    assert untimed(read_metrics(run_dir)) == untimed(whole)
