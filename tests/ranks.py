"""Several ranks without a launcher, each a fork of the process of the tests.

`run_ranks(2, train, script, [run, ...])` trains with the script on two ranks and brings back what happened;
`run_script(script, words)` runs it as `python script.py words` would, on two ranks: exit code, console.
"""

import importlib.util
import json
import multiprocessing
import os
import random
import runpy
import socket
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

# A fork has the libraries loaded and starts in no time; where it isn't safe, on macOS, each rank loads them itself.
FORKS = multiprocessing.get_context("fork" if sys.platform == "linux" else "forkserver")


def load_script(path):
    """A script as a module, by the name of its file; importing it must have no side effects."""
    path = Path(path)
    if path.stem not in sys.modules or sys.modules[path.stem].__file__ != str(path):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        sys.modules[path.stem] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[path.stem]


def be_rank(rank, world, port, function, args, folder):
    log = os.open(f"{folder}/{rank}.txt", os.O_WRONLY | os.O_CREAT)
    for stream in 1, 2, sys.stdout.fileno(), sys.stderr.fileno():  # pytest's, to which loggers hold on, too
        os.dup2(log, stream)
    if world > 1:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ |= {name: str(value) for name, value in place.items()}
    AcceleratorState._reset_state(True)  # of the process of the tests
    code = 0
    try:
        torch.save(function(*args), f"{folder}/{rank}.pt")
    except SystemExit as leaving:
        code = leaving.code or 0
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # nothing of the tests' is to be tidied


def free_port():
    """None of those that the system gives to connections, from 32768 on: one of them might take it meanwhile."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with suppress(OSError), socket.socket() as free:
            free.bind(("127.0.0.1", port))
            return port


def fork_ranks(world, function, *args, timeout=500, meanwhile=None):
    """function(*args), of a module that can be imported, on each of `world` ranks: exit codes, consoles, results.
    All end when one has failed, as under a launcher. meanwhile: called with the processes while they run."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(world):
            processes.append(FORKS.Process(target=be_rank, args=(rank, world, port, function, args, folder)))
            processes[-1].start()
        deadline = time.monotonic() + timeout
        while any(p.is_alive() for p in processes) and time.monotonic() < deadline:
            if any(p.exitcode for p in processes):  # the others may have something to say, too
                deadline = min(deadline, time.monotonic() + 1)
            if meanwhile:
                meanwhile(processes)
            time.sleep(0.02)
        codes = [p.exitcode for p in processes]
        for process in processes:
            process.kill()
            process.join()
        consoles = [Path(folder, f"{rank}.txt").read_text() for rank in range(world)]
        files = [Path(folder, f"{rank}.pt") for rank in range(world)]
        return codes, consoles, [torch.load(f, weights_only=False) if f.exists() else None for f in files]


def run_ranks(world, function, *args, **options):
    """What function(*args) returns on each of `world` ranks: a list."""
    codes, consoles, results = fork_ranks(world, function, *args, **options)
    if any(code != 0 for code in codes):
        parts = zip(range(world), codes, consoles)
        pytest.fail("\n\n".join(f"rank {rank}: exit code {code}\n{text[-3000:]}" for rank, code, text in parts))
    return results


def be_program(script, words, folder):
    os.chdir(folder)
    sys.argv = [script, *words]
    sys.path.insert(0, os.path.dirname(script))
    sys.stdout = os.fdopen(os.dup(1), "w")  # buffered as that of any program whose output goes to a file
    runpy.run_path(script, run_name="__main__")


def run_script(script, words, processes=2, folder=".", **options):
    """(exit code, console) of `python script words` as `processes` ranks, from `folder`."""
    codes, consoles, _ = fork_ranks(processes, be_program, str(script), words, str(folder), **options)
    return next((code for code in codes if code != 0), 0), "".join(consoles)


# -------------------------------------------------------------------------------------------------- what ranks may do


def whole(tensor):
    """The tensor of which every rank has a shard."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


class SGD(torch.optim.SGD):
    """In place of AdamW, which turns the rounding error of a gradient near 0 into a full step."""

    def __init__(self, parameters, weight_decay, fused):
        super().__init__(parameters, lr=0.0)


def fixed_responses(algo, group_size):
    """In place of `generate`: made from the place in the global batch alone, and as uneven as can be: odd prompts,
    which are rank 1's, get one or two tokens; the others up to all, some without an EOS. With the model's log-probs."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

    def generate(model, prompts, uniforms, eos_ids, temperature):
        responses, width = [], uniforms.shape[1]
        for i in range(len(prompts)):
            place = rank + i // group_size * world
            noise = algo.random_stream("fixed", place, i % group_size)
            length = 1 + int(torch.randint(2 if place % 2 else width + 2, (), generator=noise))
            ids = torch.randint(3, model.config.vocab_size, (width,), generator=noise)[:length].tolist()
            if length <= width:
                ids[-1] = eos_ids[0]
            before, sampled = len(prompts[i]) - 1, torch.tensor(ids)[:, None]
            with torch.no_grad():
                logits = model(torch.tensor([prompts[i] + ids]), use_cache=False).logits[0, before:-1]
            logprobs = (logits / temperature).log_softmax(-1).gather(1, sampled)[:, 0]
            responses.append(algo.Response(ids, logprobs.tolist(), length > width))
        return responses

    return generate


class BrokenOff(Exception):
    pass


def train(script, runs):
    """One run of `main` after the other: a list of {metrics, weights, gradients, sizes}. runs: of (fields of Args,
    options). Options: sgd; fixed: made-up responses; dies: the iteration that never begins."""
    algo, results = load_script(script), []
    for flags, options in runs:
        found, dies = {"gradients": [], "sizes": [], "weights": {}}, options.get("dies", 0)

        def spy_save(path, trainees, *rest, found=found, real=algo.save_models):
            for name, (model, _) in trainees.items() if path.name == "final" else []:
                found["weights"][name] = {key: whole(p) for key, p in model.named_parameters()}
            real(path, trainees, *rest)

        def spy_pack(*args, found=found, real=algo.pack):
            result = real(*args)
            found["sizes"].append([len(rows) for rows, _ in result])
            return result

        def spy_draw(rows, start, count, seed, dies=dies, real=algo.draw_prompts):
            if start == (dies - 1) * count:  # as if killed when this iteration begins
                raise BrokenOff
            return real(rows, start, count, seed)

        def spy_step(optimizer, args, kwargs, found=found):
            parts = [whole(p.grad).flatten() for p in optimizer.param_groups[0]["params"] if p.grad is not None]
            found["gradients"].append(torch.cat(parts))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PartialState, "destroy_process_group", lambda *args: None)  # the next run needs it
            patch.setattr(algo.time, "sleep", lambda seconds: None)  # the pause before that
            for name, spy in {"save_models": spy_save, "pack": spy_pack, "draw_prompts": spy_draw}.items():
                patch.setattr(algo, name, spy)
            if "sgd" in options:
                patch.setattr(torch.optim, "AdamW", SGD)
            if "fixed" in options:
                patch.setattr(algo, "generate", fixed_responses(algo, flags.get("group_size", 1)))
            hook = register_optimizer_step_pre_hook(spy_step)
            with suppress(BrokenOff):
                algo.main(algo.Args(**flags))
            hook.remove()
        AcceleratorState._reset_state(True)
        lines = Path(flags["output_dir"], flags["run_name"], "metrics.jsonl").read_text().splitlines()
        results.append(found | {"metrics": [json.loads(line) for line in lines]})
    if dist.is_initialized():
        dist.barrier()
    return results
