"""ppo_llm_fsdp.py on several ranks: rollouts, folders, checkpoints, memory. What it computes: test_ranks.py."""

import gc
import os
import shutil
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from conftest import make_model, path_of, read_metrics, toy_rows, untimed, write_rows
from ranks import load_script, run_ranks, train, whole
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

SCRIPT = "ppo_llm_fsdp"
PATH = str(path_of(SCRIPT))


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)


@contextmanager
def joined():
    """The script, an accelerator, and what `shard` wants besides a module, for all ranks."""
    algo = load_script(PATH)
    if not dist.is_initialized():
        alone = {} if "WORLD_SIZE" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group("gloo", **alone)
    yield algo, Accelerator(cpu=True), (init_device_mesh("cpu", (dist.get_world_size(),)), False, False)
    dist.barrier()
    AcceleratorState._reset_state(True)


def load_policy(algo, name, sharding):
    return algo.shard(algo.Policy(algo.load_model(name, AutoModelForCausalLM), 1.0).train(), *sharding)


def load_critic(algo, name, sharding):
    return algo.shard(algo.Critic(algo.load_critic(name, 0)).train(), *sharding)


# --------------------------------------------------------------------------------------------------------- rollouts


def prompts_of(algo, rank):
    """Prompts of this rank, of its own number and lengths, and their noise."""
    lengths = [2 + 3 * rank, 5, 3][: 1 + rank % 3]
    shape, stream = (len(lengths), 12), algo.random_stream("noise", rank)
    return [[5 + rank + i] * n for i, n in enumerate(lengths)], torch.rand(shape, generator=stream, dtype=torch.float64)


def sample(folder):
    """Both ways to sample from a sharded policy, each rank with prompts of its own; with a rank that stops at once, and
    with one that samples twice while others do once or not at all."""

    def all_end(logits, *args):
        return torch.ones(len(logits), dtype=torch.long), torch.zeros(len(logits))

    with joined() as (algo, _, sharding):
        policy, rank, found = load_policy(algo, folder, sharding), dist.get_rank(), {}
        prompts, noise = prompts_of(algo, rank)
        for gathered in (True, False):
            for temperature in (0, 1.0):
                with algo.generating(policy, gathered):
                    found[gathered, temperature] = algo.generate(policy.model, prompts, noise, [1], temperature)
            ends = mock.patch.object(algo, "sample_tokens", all_end) if rank == 1 else nullcontext()
            with algo.generating(policy, gathered), ends:
                found[gathered, "rank 1 stops"] = algo.generate(policy.model, prompts, noise, [1], 0)
            with algo.generating(policy, gathered):
                for _ in range((2, 0, 1, 1)[rank]):
                    found[gathered, "twice"] = algo.generate(policy.model, prompts, noise, [1], 0)
        assert all(isinstance(p, DTensor) for p in policy.parameters())  # sharded again
    return found


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_gathered_and_sharded_rollouts_give_the_tokens_of_the_whole_model(algo, tied, world):
    model, lengths = AutoModelForCausalLM.from_pretrained(tied), set()
    for rank, found in enumerate(run_ranks(world, sample, tied)):
        prompts, noise = prompts_of(algo, rank)
        for temperature in (0, 1.0):
            expected = algo.generate(model, prompts, noise, [1], temperature)
            lengths |= {len(response.ids) for response in expected}
            for gathered in (True, False):
                for ours, theirs in zip(found[gathered, temperature], expected, strict=True):
                    assert ours.ids == theirs.ids and ours.truncated == theirs.truncated
                    assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
        greedy = [response.ids for response in found[True, 0]]
        for gathered in (True, False):
            stopped = [response.ids for response in found[gathered, "rank 1 stops"]]
            assert stopped == ([[1]] * len(prompts) if rank == 1 else greedy)
            assert rank == 1 or [response.ids for response in found[gathered, "twice"]] == greedy
    assert len(lengths) > 1  # ranks do end at different times


# ---------------------------------------------------------------------------------------------------------- folders


def step_and_save(folder, place):
    """Trains tied models for a step and saves them."""
    with joined() as (algo, accelerator, sharding):
        policy = load_policy(algo, folder, sharding)
        critic = load_critic(algo, folder, sharding)
        tokens = torch.arange(3, 15).view(2, 6)
        for module in (policy, critic):
            output = module(tokens, tokens < 20)
            (output[0] if module is policy else (output + 1).square()).sum().backward()
            torch.optim.SGD(module.parameters(), lr=0.1).step()
        found = {"tied": policy.model.get_output_embeddings().weight is policy.model.get_input_embeddings().weight}
        found["parameters"] = {name: whole(p) for name, p in policy.model.named_parameters()}
        with torch.no_grad():
            found["logprobs"], found["values"] = policy(tokens, tokens < 20)[0], critic(tokens, tokens < 20)
        trainees = {"policy": (policy.model, None), "critic": (critic.model, None)}
        algo.save_models(Path(place), trainees, AutoTokenizer.from_pretrained(folder), accelerator)
    return found


def test_tied_models_learn_as_whole_ones_and_reload_with_plain_transformers(algo, tied, tmp_path):
    found = run_ranks(2, step_and_save, tied, str(tmp_path / "saved"))
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert (
        not info["missing_keys"] and not info["unexpected_keys"] and AutoTokenizer.from_pretrained(tmp_path / "saved")
    )
    assert "lm_head.weight" not in load_file(tmp_path / "saved" / "model.safetensors")  # tied: once
    critic = AutoModelForTokenClassification.from_pretrained(tmp_path / "saved" / "critic")
    assert critic.config.num_labels == 1
    # The shared weight gets the gradients of both its uses, once. Both ranks had the same rows: their mean is one's.
    tokens, alone = torch.arange(3, 15).view(2, 6), algo.Policy(AutoModelForCausalLM.from_pretrained(tied), 1.0)
    alone(tokens, tokens < 20)[0].sum().backward()
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    for rank in found:
        assert rank["tied"] and rank["values"].abs().max() > 1e-3
        with torch.no_grad():
            assert torch.allclose(algo.Policy(model, 1.0)(tokens, tokens < 20)[0], rank["logprobs"], atol=1e-5)
            assert torch.allclose(critic(tokens).logits[..., 0], rank["values"], atol=1e-5)
        for (name, saved), expected in zip(model.named_parameters(), alone.model.parameters()):
            assert torch.equal(saved, rank["parameters"][name]) and torch.allclose(saved, expected, atol=1e-6), name


# ------------------------------------------------------------------------------------------------------ checkpoints


@pytest.fixture(scope="module")
def run_of_two(tmp_path_factory, tiny_model, toy_data, toy_reward):
    """(fields of Args, run folder) of four iterations on two ranks, with a checkpoint at every second."""
    folder = tmp_path_factory.mktemp("two")
    flags = {"model": tiny_model, "dataset": toy_data, "reward": toy_reward, "track": "none", "batch_size": 4}
    flags |= {"minibatch_size": 4, "microbatch_tokens": 60, "max_response_length": 8, "lr": 1e-3, "critic_lr": 1e-3}
    flags |= {"total_iterations": 4, "save_every": 2, "eval_every": 4, "eval_rows": 1}
    flags |= {"output_dir": str(folder), "run_name": "two"}
    run_ranks(2, train, PATH, [(flags, {})])
    return flags, folder / "two"


@pytest.mark.parametrize("world", [1, 4])
def test_a_checkpoint_of_two_goes_on_with_any_number(run_of_two, tmp_path, world):
    flags, run_dir = run_of_two
    copy = shutil.copytree(run_dir, tmp_path / "two")
    shutil.rmtree(copy / "checkpoints" / "step_000004")
    results = run_ranks(world, train, PATH, [(flags | {"output_dir": str(tmp_path), "resume": "auto"}, {})])
    expected, found = untimed(read_metrics(run_dir)), untimed(results[0][0]["metrics"])
    assert found[:3] == expected[:3] and len(found) == 5
    for a, b in zip(found, expected):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-4)
    weights = load_file(run_dir / "final" / "model.safetensors")
    for rank in results:
        for name, x in rank[0]["weights"]["policy"].items():
            assert (x - weights[name]).abs().max() < 1e-3, name


@pytest.mark.parametrize("world", [1, 4])
def test_a_checkpoint_is_read_bit_by_bit(run_of_two, tmp_path, world):
    """Loaded and saved at once: the weights and moments that two ranks had written."""
    flags, run_dir = run_of_two
    found = run_ranks(
        world, read_again, flags["model"], str(run_dir / "checkpoints" / "step_000004"), str(tmp_path / "x")
    )
    final = load_file(run_dir / "final" / "model.safetensors")
    best_score = max(m["eval/score"] for m in read_metrics(run_dir) if "eval/score" in m)
    for weights, moments, state in found:
        assert weights.keys() == final.keys() and all(torch.equal(x, final[name]) for name, x in weights.items())
        assert state == {"iteration": 4, "prompts": 16, "best_score": best_score}
        assert all(set(x) == {"step", "exp_avg", "exp_avg_sq"} and x["step"] == 4 for x in moments)
        assert all(torch.equal(a, b) for x, y in zip(moments, found[0][1]) for a, b in zip(x.values(), y.values()))
        assert max(x["exp_avg"].abs().max() for x in moments) > 0


def read_again(model, path, place):
    with joined() as (algo, accelerator, sharding):
        policy, critic = load_policy(algo, model, sharding), load_critic(algo, model, sharding)
        trainees = {
            name: (m.model, torch.optim.AdamW(m.parameters()))
            for name, m in {"policy": policy, "critic": critic}.items()
        }
        state = algo.load_checkpoint(Path(path), trainees)
        algo.save_checkpoint(Path(place), trainees, state, 0, accelerator)
        dist.barrier()
        state = algo.load_checkpoint(Path(place), trainees)
        weights = {name: whole(p) for name, p in policy.model.named_parameters()}
        optimizer = trainees["policy"][1]
        moments = [{k: whole(x) for k, x in optimizer.state[p].items()} for p in policy.parameters()]
    return weights, [dict(sorted(x.items())) for x in moments], state


def test_a_checkpoint_is_safetensors_and_a_state(run_of_two):
    for path in sorted((run_of_two[1] / "checkpoints").iterdir()):
        shards = sorted(path.glob("*.safetensors"))
        assert len(shards) == 2 and {x.name for x in path.iterdir()} - {x.name for x in shards} == {"state.pt"}
        keys = set().union(*(load_file(shard).keys() for shard in shards))
        for end in ("", "/step", "/exp_avg", "/exp_avg_sq"):
            assert f"critic/score.weight{end}" in keys and f"policy/lm_head.weight{end}" in keys


def test_a_hole_in_a_checkpoint_is_seen(run_of_two, tmp_path):
    """Without its first shard the sizes of all tensors still look right: the reader would leave their first rows."""
    flags, run_dir = run_of_two
    copy = shutil.copytree(run_dir / "checkpoints" / "step_000004", tmp_path / "step_000004")
    min(copy.glob("*.safetensors")).unlink()
    (refusal,) = run_ranks(1, refused_checkpoint, flags["model"], str(copy))
    assert refusal.startswith("error: the checkpoint") and "is incomplete, or of another model" in refusal


@pytest.mark.parametrize("other", ["larger", "lora"])
def test_a_checkpoint_of_another_model(run_of_two, tmp_path, other):
    flags, run_dir = run_of_two
    model = make_model(tmp_path / "larger", hidden_size=64) if other == "larger" else flags["model"]
    path = str(run_dir / "checkpoints" / "step_000004")
    (refusal,) = run_ranks(1, refused_checkpoint, model, path, 4 if other == "lora" else 0)
    assert refusal.startswith(f"error: the checkpoint {path} is incomplete, or of another model")


def refused_checkpoint(model, path, lora_rank=0):
    with joined() as (algo, _, sharding):
        bare = algo.add_lora(algo.load_model(model, AutoModelForCausalLM), lora_rank, task_type="CAUSAL_LM")
        policy = algo.shard(algo.Policy(bare, 1.0), *sharding)
        critic = load_critic(algo, model, sharding)
        said = []
        with mock.patch("builtins.print", lambda *words, **_: said.append(" ".join(words))), pytest.raises(SystemExit):
            algo.load_checkpoint(Path(path), {"policy": (policy.model, None), "critic": (critic.model, None)})
    return said[0].strip()


# ----------------------------------------------------------------------------------------------------------- memory


def live_bytes():
    """Bytes of all tensors of this process that Python knows of, shared storage counted once."""
    with torch.no_grad():
        tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and not isinstance(x, DTensor)]
        storages = {s.data_ptr(): s.nbytes() for s in (x.untyped_storage() for x in tensors if x.device.type == "cpu")}
    return sum(storages.values())


def largest_state(script, flags):
    """Largest number of bytes right after an optimizer step: parameters, gradients, optimizer state."""
    found = []
    register_optimizer_step_post_hook(lambda *_: found.append(live_bytes()))
    algo = load_script(script)
    algo.main(algo.Args(**flags))
    return max(found)


@pytest.mark.slow
def test_model_state_is_shared_out(tmp_path, toy_reward):
    """Everything alive after an optimizer step, against the script that replicates."""
    wide = {"hidden_size": 192, "intermediate_size": 384, "num_hidden_layers": 3, "initializer_range": 0.02}
    flags = {"model": make_model(tmp_path / "wide", **wide), "dataset": write_rows(tmp_path / "d.jsonl", toy_rows(24))}
    flags |= {"reward": toy_reward, "track": "none", "output_dir": str(tmp_path), "batch_size": 8, "minibatch_size": 8}
    flags |= {"max_response_length": 10, "total_iterations": 2, "eval_rows": 0}
    replicated = run_ranks(2, largest_state, str(path_of("ppo_llm")), flags | {"run_name": "whole"})
    size = sum(weight.numel() for weight in load_file(tmp_path / "wide" / "model.safetensors").values())
    assert size > 1e6 and min(replicated) > 27.9 * size  # after a step of one: 16 and 12 bytes, and 4 for the reference
    for world, share in ((2, 0.52), (4, 0.28)):
        for rank in run_ranks(world, largest_state, PATH, flags | {"run_name": f"sharded{world}"}):
            print(f"{world} processes: {rank / replicated[0]:.3f} of the model state")
            assert rank < share * replicated[0]


def peak_memory():
    """VmHWM of this process in bytes: unlike ru_maxrss it does not begin with the parent's."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def growth_while_loading(small, large):
    """By how much the largest memory use of this process has grown after a model was loaded, in the model's sizes."""
    with joined() as (algo, _, sharding):
        first = load_policy(algo, small, sharding)
        before = peak_memory()
        policy = load_policy(algo, large, sharding)
        peak = peak_memory() - before
    return peak / (4 * sum(p.numel() for p in policy.parameters())), len(list(first.parameters()))


def test_no_rank_but_the_first_ever_holds_a_whole_model(tied, tmp_path):
    if not Path("/proc/self/status").is_file():
        pytest.skip("needs /proc")
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 24, "initializer_range": 0.02}
    large = make_model(tmp_path / "large", **sizes)
    (first, _), (other, _) = run_ranks(2, growth_while_loading, tied, large)
    print(f"largest memory while loading: {first:.2f} of the model on the first rank, {other:.2f} on the other")
    assert 0.4 < other < 0.75  # its half, and one tensor or block at a time
    assert first < 2.2  # the whole, its half, and on a CPU its half once more


def test_shard_groups_of_equal_size(toy_run, capsys):
    with pytest.raises(SystemExit):
        toy_run(shard_group_size=3)
    assert "error: --shard-group-size 3 must divide the 1 processes" in capsys.readouterr().err
