"""What does sharding cost and save? ppo_llm.py and ppo_llm_fsdp.py do the same work in turns on one machine.

    python benchmarks/campaigns/sharding.py        about half an hour on two cores; writes benchmarks/results/sharding/

Memory is measured with a model of 50 million random weights on 2 and 4 processes: all tensors that a process holds
right after an optimizer step (parameters, gradients, optimizer state of all models), and the largest size the process
ever had. Time is measured with the embedded task and with that model on 2 processes: seconds per phase (phases.py), and
the share of them that a process spends in collectives, that is on transfers, on waiting for the others and, in
ppo_llm.py's `sum_gradients`, on copying. All numbers are medians over iterations and repetitions.
"""

import argparse
import gc
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

sys.path.append(str(Path(__file__).resolve().parents[1]))
import common
import phases

COLLECTIVES = "all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single"
COLLECTIVES += "all_reduce", "all_gather", "broadcast", "scatter"
WAYS = {"replicated": ("ppo_llm", []), "gathered": ("ppo_llm_fsdp", ["--rollout-params", "gathered"])}
WAYS |= {"sharded": ("ppo_llm_fsdp", ["--rollout-params", "sharded"])}
WIDE = {"vocab_size": 420, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12}
WIDE |= {"num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 512}
PHASES = "rollout", "logprobs", "values", "actor", "critic", "iteration"


def live_bytes():
    """Bytes of all tensors that this process holds, shared storage counted once."""
    tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and not isinstance(x, DTensor)]
    storages = (x.untyped_storage() for x in tensors if x.device.type == "cpu")
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def largest_size():
    """VmHWM of this process in bytes."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def worker(script, output, flags):
    """One rank: runs the script with timers around the collectives and writes what it found to output-RANK.json."""
    spec = importlib.util.spec_from_file_location(script, common.ROOT / f"{script}.py")
    algo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(algo)
    spent, seconds, sizes, log = [0.0], [], [], Accelerator.log

    def timed(function):
        def call(*args, **kwargs):
            begin, inner = time.perf_counter(), spent[0]
            result = function(*args, **kwargs)
            spent[0] = inner + time.perf_counter() - begin  # one may call another
            return result

        return call

    def log_and_note(*args, **kwargs):  # at the end of every iteration
        seconds.append(spent[0])
        spent[0] = 0.0
        return log(*args, **kwargs)

    for name in (name for name in COLLECTIVES if hasattr(dist, name)):  # their names depend on torch's version
        setattr(dist, name, timed(getattr(dist, name)))
    if hasattr(algo, "sum_gradients"):  # which does not wait inside the collective
        algo.sum_gradients = timed(algo.sum_gradients)
    Accelerator.log = log_and_note
    phases.Clock(algo)
    measure = "--memory" in flags
    flags = [flag for flag in flags if flag != "--memory"]
    if measure:
        register_optimizer_step_post_hook(lambda *_: sizes.append(live_bytes()))
    sys.argv[1:] = flags
    run_dir = algo.main(algo.parse_args())
    found = {"communication": seconds, "bytes": max(sizes, default=0), "largest": largest_size()}
    found["rows"] = common.read_lines(run_dir / "metrics.jsonl")
    Path(f"{output}-{os.environ['RANK']}.json").write_text(json.dumps(found))


def launch(folder, way, num_processes, flags):
    """Runs one way to do the work: the list of what its ranks found."""
    script, own = WAYS[way]
    name = f"{way}-{num_processes}-{len(list(folder.iterdir()))}"
    words = ["--worker", script, folder / name, "--", *flags, *own, "--eval-every", "0"]
    words += ["--output-dir", folder, "--run-name", name]
    # What is freed goes back to the system: slow, but the size of a process is what it needs.
    env = {"MALLOC_MMAP_THRESHOLD_": "65536"} if "--memory" in flags else {}
    common.run(common.launcher(num_processes, Path(__file__).resolve(), *words), **env)
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(num_processes)]


def median(runs, name):
    """Of a metric over the iterations that are not evaluated, all runs together."""
    return statistics.median(row[f"time/{name}"] for ranks in runs for row in ranks[0]["rows"][1:-1])


def communication(runs):
    """Median share of an iteration that a rank is in collectives, the mean over ranks."""
    shares = []
    for ranks in runs:
        for i, row in list(enumerate(ranks[0]["rows"]))[1:-1]:
            shares.append(statistics.mean(rank["communication"][i] for rank in ranks) / row["time/iteration"])
    return statistics.median(shares)


def compare_times(folder, flags, repetitions):
    """Table of the seconds per phase, the ways taken in turns."""
    runs = {way: [] for way in WAYS}
    for _ in range(repetitions):
        for way in WAYS:
            runs[way].append(launch(folder, way, 2, flags))
    lines = []
    for way in WAYS:
        cells = []
        for phase in PHASES:
            seconds = median(runs[way], phase)
            ratio = "" if way == "replicated" else f" ({seconds / median(runs['replicated'], phase):.2f}x)"
            cells.append(f"{seconds:.2f} s{ratio}")
        lines.append([way, *cells, f"{communication(runs[way]):.0%}"])
    return common.markdown(["", *PHASES, "communication"], lines)


def compare_memory(folder, flags):
    """Table of the bytes per process."""
    lines = []
    replicated = None
    for way, num_processes in (("replicated", 2), ("gathered", 2), ("gathered", 4)):
        ranks = launch(folder, way, num_processes, [*flags, "--memory"])
        held, largest = (max(rank[name] for rank in ranks) / 2**20 for name in ("bytes", "largest"))
        replicated = replicated or held
        lines.append([way, num_processes, f"{held:.0f}", f"{held / replicated:.3f}", f"{largest:.0f}"])
    head = ["", "processes", "model state, MiB", "of replicated", "largest size, MiB"]
    return common.markdown(head, lines)


def main():
    if "--worker" in sys.argv:
        place = sys.argv.index("--worker")
        return worker(*sys.argv[place + 1 : place + 3], sys.argv[place + 4 :])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=4)
    args = parser.parse_args()
    results = common.RESULTS / "sharding"
    results.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        size = f"{common.make_model(folder / 'wide', WIDE):,} parameters"
        steps = ["--total-iterations", str(args.iterations)]
        wide = ["--model", str(folder / "wide"), "--batch-size", "16", "--minibatch-size", "16"]
        wide += ["--max-response-length", "16", "--lr", "1e-6", "--critic-lr", "1e-6"]
        common.write_lines(folder / "eval.jsonl", common.read_lines(common.TINY / "test.jsonl")[:8])
        wide += ["--dataset", str(common.TINY / "train.jsonl"), "--eval-dataset", str(folder / "eval.jsonl")]
        wide += ["--prompt-suffix", ""]  # the prompts as they are
        memory = compare_memory(folder, [*wide, "--total-iterations", "1"])
        print(memory)
        default = compare_times(folder, steps, args.repetitions)
        print(default)
        larger = compare_times(folder, [*wide, "--microbatch-tokens", "1024", *steps], args.repetitions)
        print(larger)
    text = f"Memory per process, {size} per model.\n\n{memory}\n\nEmbedded task, two processes:\n\n{default}"
    (results / "table.md").write_text(f"{text}\n\nThe model of {size}, two processes:\n\n{larger}\n")


if __name__ == "__main__":
    main()
