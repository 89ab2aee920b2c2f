"""What test_sharding.py needs several processes for: runs the functions named, one after the other, as one rank.

python sharding_worker.py SCRIPT FOLDER FUNCTION...        RANK, WORLD_SIZE, ... in the environment make it a rank
"""

import faulthandler
import gc
import sys
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from ranks_worker import ALL_TERMS, FOLDER, RANK, SAVED, WORLD, algo, record, whole
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import AutoTokenizer


def parity():
    """Five iterations, on fixed and uneven responses but for `sampled`: sharding must not matter."""
    sizes = {"microbatch_tokens": 40, "total_iterations": 5, **ALL_TERMS}
    adam = {"sgd": False, "lr": 1e-3, "critic_lr": 1e-3}
    sampled = adam | {"generate": None, "eval_every": 1, "eval_dataset": str(FOLDER / "eval1.jsonl")}
    record("sgd", **sizes)
    record("sampled", **sizes, **sampled)
    record("lora", **sizes, lora_rank=4)
    if WORLD > 1:
        record("sharded rollout", **sizes, **sampled, rollout_params="sharded")
        record("offload", **sizes, offload=True)
        record("copies over 1", **sizes, shard_group_size=1)
        record("bfloat16", **sizes, **sampled, dtype="bfloat16")


@contextmanager
def joined():
    """An accelerator and, where models are sharded, the mesh of all ranks."""
    if not dist.is_initialized() and WORLD == 1:
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    yield Accelerator(cpu=True), init_device_mesh("cpu", (WORLD,))
    AcceleratorState._reset_state(True)


def prompts():
    """Left-padded queries of this rank, of its own number and lengths, and their noise."""
    lengths = [2 + 3 * RANK, 5, 3][: 1 + RANK % 3]
    queries, query_mask = algo.left_pad([[5 + RANK + i] * n for i, n in enumerate(lengths)], 0, "cpu")
    shape = (len(lengths), 12)
    return queries, query_mask, torch.rand(shape, generator=algo.generator("noise", RANK), dtype=torch.float64)


def rollouts():
    """Both ways to sample from a sharded policy, each rank with prompts of its own; and one rank that stops at once."""
    found, sample_tokens = {}, algo.sample_tokens

    def all_end(logits, *args):
        return torch.ones(len(logits), dtype=torch.long), torch.zeros(len(logits))

    with joined() as (_, mesh):
        policy = algo.shard(algo.Policy(algo.load_causal_lm(str(FOLDER / "tied"))).train(), mesh, False, False)
        for gathered in (True, False):
            for temperature in (0.0, 1.0):
                with algo.generating(policy, gathered) as model:
                    found[gathered, temperature] = algo.generate(model, *prompts(), [1], 0, temperature)
            with algo.generating(policy, gathered) as model, mock.patch.object(algo, "sample_tokens") as sample:
                sample.side_effect = all_end if RANK == 1 else sample_tokens
                found[gathered, "rank 1 stops"] = algo.generate(model, *prompts(), [1], 0, 0.0)
            if RANK != 0:  # rank 0 samples twice, the others once or not at all
                with algo.generating(policy, gathered) as model:
                    found[gathered, "twice"] = None if RANK == 1 else algo.generate(model, *prompts(), [1], 0, 0.0)
            else:
                with algo.generating(policy, gathered) as model:
                    algo.generate(model, *prompts(), [1], 0, 1.0)
                    found[gathered, "twice"] = algo.generate(model, *prompts(), [1], 0, 0.0)
        assert all(isinstance(p, DTensor) for p in policy.parameters())  # sharded again
    torch.save(found, SAVED / "rollouts.pt")


def folders():
    """Trains tied models for a step and saves them; the test reloads what was saved."""
    found = {}
    with joined() as (accelerator, mesh):
        policy = algo.shard(algo.Policy(algo.load_causal_lm(str(FOLDER / "tied"))).train(), mesh, False, False)
        critic = algo.shard(algo.Critic(str(FOLDER / "tied")).train(), mesh, False, False)
        ids = torch.arange(3, 15).view(2, 6)
        inputs = ids, torch.ones_like(ids), 4
        for model, extra in ((policy, [1.0]), (critic, [])):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            output = model(*inputs, *extra)
            (output[0] if extra else (output + 1).square()).sum().backward()
            optimizer.step()
        head, embedding = policy.model.get_output_embeddings(), policy.model.get_input_embeddings()
        found["still tied"] = head.weight is embedding.weight
        found["parameters"] = {n: whole(p.detach()) for n, p in policy.named_parameters()}
        with torch.no_grad():
            found["logprobs"], found["values"] = policy(*inputs, 1.0)[0], critic(*inputs)
            with algo.generating(policy, True) as model:
                found["logits"] = model(ids).logits
        tokenizer = AutoTokenizer.from_pretrained(FOLDER / "tied")
        algo.save_models(FOLDER / f"saved-{WORLD}", {".": policy, "critic": critic}, tokenizer, accelerator)
    torch.save(found, SAVED / "folders.pt")


def live_bytes():
    """Bytes of all tensors of this process that Python knows of, shared storage counted once."""
    with torch.no_grad():
        tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and not isinstance(x, DTensor)]
        storages = {s.data_ptr(): s.nbytes() for s in (x.untyped_storage() for x in tensors if x.device.type == "cpu")}
    return sum(storages.values())


def memory():
    """Largest number of bytes right after an optimizer step: parameters, gradients, optimizer state."""
    found = []
    hook = register_optimizer_step_post_hook(lambda *_: found.append(live_bytes()))
    files = {"model": FOLDER / "wide", "dataset": FOLDER / "train.jsonl", "output_dir": FOLDER / "runs-memory"}
    sizes = {"batch_size": 8, "minibatch_size": 8, "max_response_length": 10, "total_iterations": 2}
    args = algo.Args(**{k: str(v) for k, v in files.items()}, **sizes, reward=f"{FOLDER}/reward.py:early")
    algo.main(args)
    hook.remove()
    torch.save(max(found), SAVED / "memory.pt")


def peak_memory():
    """VmHWM of this process in bytes: unlike ru_maxrss it does not begin with the parent's."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def loading():
    """By how much the largest memory use of this process has grown after a model was loaded, in its own sizes."""
    with joined() as (_, mesh):
        small = algo.shard(algo.Policy(algo.load_causal_lm(str(FOLDER / "tied"))), mesh, False, False)
        before = peak_memory()
        policy = algo.shard(algo.Policy(algo.load_causal_lm(str(FOLDER / "large"))), mesh, False, False)
        peak = peak_memory() - before
        size = 4 * sum(p.numel() for p in policy.parameters())
        torch.save((peak / size, size, len(list(small.parameters()))), SAVED / "loading.pt")


def resumed():
    """Goes on from the checkpoint that FOLDER/resume names, or begins."""
    parts = (FOLDER / "resume").read_text().split()
    changes = {"resume": parts[1]} if len(parts) > 1 else {}
    steps = {"total_iterations": int(parts[0]), "save_every": 1, "keep_checkpoints": 9, "microbatch_tokens": 40}
    kl = {"kl_controller": "adaptive", "kl_horizon": 100.0, "lr_schedule": "constant"}
    adam = {"sgd": False, "lr": 1e-3, "critic_lr": 1e-3, "generate": None}
    files = FOLDER.parent / "files"  # every world has a copy, and one run must not change these
    changes |= {"model": str(files / "model"), "reward": f"{files}/reward.py:early"}
    record("run", **steps | ALL_TERMS | kl | adam | changes, eval_every=1, eval_dataset=str(FOLDER / "eval1.jsonl"))


def fails_in_evaluation():
    record("fails", reward=f"{FOLDER}/reward.py:nan_on_rank_1", rollout_params="sharded", generate=None)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(280)  # the test gives up after 300 seconds: where does it hang?
    SAVED.mkdir(exist_ok=True)
    for name in sys.argv[3:]:
        globals()[name]()
    (SAVED / "done").touch()
