"""What does a run spend, phase by phase and process by process? Seen from outside, by wrapping what a script calls.

    import phases
    import ppo_llm as algo
    phases.Clock(algo)            then metrics.jsonl has time/PHASE, too
    algo.main(algo.parse_args())

A phase lasts until another begins, so together they fill the iteration, from drawing the prompts to the log:

    rollout     `draw_prompts` begins         actor    a Policy is called with gradients
    reward      `to_batch` has ended          critic   a Critic is called with gradients
    logprobs    `pack` cuts the batch         log      an optimizer has stepped, and no other phase begins
    values      a Critic is called without    eval     `evaluate` begins; with what is saved after it
    advantages  `place_scores` begins

So time/iteration, which the scripts measure themselves, is the sum of all but eval, up to a few milliseconds. What
comes after `log` is not covered: checkpoints, and the end of a run. time/clock says when a line was logged. Waiting for
another process counts for the phase in which this one waits. On a GPU, the clock waits at the end of a phase until
everything that the phase has started is done.

`measure` is for the other benchmarks: it runs a script like that in processes of its own, watched by a Clock or by one
of its subclasses, which also note what a process exchanges, how much memory it takes, or which operators it runs.
"""

import functools
import gc
import importlib
import json
import os
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

import common
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

PHASES = "rollout", "reward", "logprobs", "values", "advantages", "actor", "critic", "log"
OUTSIDE = "outside"  # of an iteration
FROM_OUTSIDE = "rollout", "eval"  # what an iteration, or the evaluation before training, begins with
# Their names depend on torch's version.
COLLECTIVES = "all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single"
COLLECTIVES += "all_reduce", "all_gather", "broadcast", "scatter"
# Kinds of torch's operators, by parts of their names.
KINDS = {
    "matrix products": ("mm", "bmm", "linear"),
    "attention": ("attention",),
    "sampling, log-softmax": ("softmax", "cumsum", "searchsorted"),
    "copies": ("copy_", "cat", "index", "gather", "scatter", "repeat_interleave", "sort", "clone"),
    "AdamW": ("adam",),
    "the rest": ("",),
}


class Clock:
    """Watches a script, imported as the module `algo`, from before its `main` is called."""

    def __init__(self, algo):
        self.phase = OUTSIDE
        self.began = time.perf_counter()
        self.seconds = {}  # of the phases since the last line of the log
        self.found = {}  # what `measure` returns of this process
        self.wrap(algo, "draw_prompts", before="rollout")
        self.wrap(algo, "to_batch", after="reward")
        self.wrap(algo, "pack", before="logprobs")
        self.wrap(algo, "place_scores", before="advantages")
        self.wrap(algo, "evaluate", before="eval")
        self.wrap_calls(algo.Policy, "logprobs", "actor")
        if hasattr(algo, "Critic"):
            self.wrap_calls(algo.Critic, "values", "critic")
        register_optimizer_step_post_hook(lambda *_: self.enter("log"))
        self.wrap_log(algo)

    def enter(self, phase):
        """Ends the phase that is on, unless it is the same."""
        if phase == self.phase:
            return
        if self.phase == OUTSIDE and phase not in FROM_OUTSIDE:  # for example while models are loaded
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.ended(self.phase, now - self.began)
        self.phase = phase
        self.began = now

    def ended(self, phase, seconds):
        """A phase has ended, perhaps not for the last time in this iteration."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    def wrap(self, owner, name, before=None, after=None):
        """A phase begins before the function is called, or after."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def call(*args, **kwargs):
            if before is not None:
                self.enter(before)
            result = function(*args, **kwargs)
            if after is not None:
                self.enter(after)
            return result

        setattr(owner, name, call)

    def wrap_calls(self, module_class, without, training):
        """A phase begins where a module of this class is called: `without` gradients, or `training`.

        Not in `forward`: what gathers the shards of a module comes before that.
        """
        function = module_class.__call__

        def call(module, *args, **kwargs):
            self.enter(training if torch.is_grad_enabled() else without)
            return function(module, *args, **kwargs)

        module_class.__call__ = call

    def wrap_log(self, algo):
        """The iteration ends where its line is logged, which gets the seconds."""
        function = algo.log

        @functools.wraps(function)
        def call(step, metrics, *rest):
            self.enter(OUTSIDE)
            self.seconds.pop(OUTSIDE, None)
            times = {f"time/{phase}": seconds for phase, seconds in self.seconds.items()}
            times["time/clock"] = self.began
            self.seconds = {}
            return function(step, metrics | times, *rest)

        algo.log = call


class Exchange(Clock):
    """Notes the tokens of each iteration, prompts included, and the seconds in collectives.

    That is: in transfers, in waiting for the others and, where a script has `sum_gradients`, in copying for it.
    """

    def __init__(self, algo):
        super().__init__(algo)
        self.tokens = 0
        self.waited = 0.0
        self.found |= {"tokens": [], "collectives": []}  # an item for each line of the log
        for name in COLLECTIVES:
            if hasattr(dist, name):
                self.time_calls(dist, name)
        if hasattr(algo, "sum_gradients"):
            self.time_calls(algo, "sum_gradients")
        to_batch, log = algo.to_batch, algo.log

        def count(rows, responses, *rest):
            self.tokens += sum(len(row["input_ids"]) + len(said.ids) for row, said in zip(rows, responses))
            return to_batch(rows, responses, *rest)

        def note(*args):
            self.found["tokens"].append(self.tokens)
            self.found["collectives"].append(self.waited)
            self.tokens = 0
            self.waited = 0.0
            return log(*args)

        algo.to_batch = count
        algo.log = note

    def time_calls(self, owner, name):
        function = getattr(owner, name)

        def call(*args, **kwargs):
            begin = time.perf_counter()
            waited = self.waited
            result = function(*args, **kwargs)
            self.waited = waited + time.perf_counter() - begin  # one may call another
            return result

        setattr(owner, name, call)


class Memory(Clock):
    """Notes what a process holds after an optimizer step, and how large the micro-batches were."""

    def __init__(self, algo):
        super().__init__(algo)
        self.trained = {}  # bytes, by optimizer
        self.found |= {"libraries": resident("VmRSS"), "trained": 0, "held": 0, "microbatches": []}
        register_optimizer_step_post_hook(self.weigh)
        pack = algo.pack

        def note(*args):
            parts = pack(*args)
            self.found["microbatches"].append([len(rows) * columns.stop for rows, columns in parts])
            return parts

        algo.pack = note

    def weigh(self, optimizer, *_):
        """trained: parameters with their gradients and moments; held: all tensors. Of sharded ones, this process's."""
        tensors = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        tensors += [p.grad for p in tensors]
        for moments in optimizer.state.values():
            tensors += [x for x in moments.values() if x.dim()]
        self.trained[id(optimizer)] = sum(getattr(x, "_local_tensor", x).nbytes for x in tensors)
        self.found["trained"] = sum(self.trained.values())
        tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and not isinstance(x, DTensor)]
        storages = [x.untyped_storage() for x in tensors if x.device.type == "cpu"]
        sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}  # shared storage counts once
        self.found["held"] = max(self.found["held"], sum(sizes.values()))


class Profile(Clock):
    """Notes the seconds of each kind of operator in each phase: means of iterations 3 to 5.

    What no operator takes is Python's. The profiler runs through: stopping it inside of an optimizer's step crashes.
    """

    def __init__(self, algo):
        super().__init__(algo)
        self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        self.num_lines = 0
        log = algo.log

        def count(*args):  # called once before training and once an iteration
            log(*args)
            self.num_lines += 1
            if self.num_lines == 3:
                self.profiler.start()
            if self.num_lines == 6:
                self.profiler.stop()
                self.found |= self.split()

        algo.log = count

    def ended(self, phase, seconds):
        super().ended(phase, seconds)
        with torch.profiler.record_function(f"phase:{phase}"):
            pass  # a mark among the operators

    def split(self):
        """{phase: {kind: seconds}}"""
        phases, kinds, began = defaultdict(Counter), Counter(), None
        for event in sorted(self.profiler.events(), key=lambda event: event.time_range.start):
            if not event.name.startswith("phase:"):
                kind = next(kind for kind, names in KINDS.items() if any(name in event.name for name in names))
                kinds[kind] += event.self_cpu_time_total / 1e6 / 3
                continue
            now = event.time_range.start
            if began is not None:
                kinds["between operators"] = (now - began) / 1e6 / 3 - kinds.total()
                phases[event.name.removeprefix("phase:")].update(kinds)
            kinds, began = Counter(), now
        return phases


def resident(what):
    """Bytes: VmRSS is the size of this process, VmHWM the largest it ever had."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return 1024 * int(line.split()[1])


def measure(clock, script, flags, processes=1, **environment):
    """Runs a script, watched: the lines of metrics.jsonl, and what its processes found. Nothing is evaluated or saved.

    clock: Clock or one of its subclasses.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = [clock.__name__, script, folder, "--output-dir", folder, "--run-name", "run", "--track", "none"]
        words += ["--eval-every", "0", "--eval-rows", "0", "--save-every", "0", *flags]
        common.run(common.launcher(processes, Path(__file__).resolve(), *words), **environment)
        found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(processes)]
        return common.read_lines(Path(folder, "run", "metrics.jsonl")), found


def main():
    """A process of `measure`."""
    clock, script, folder, *flags = sys.argv[1:]
    sys.path.insert(0, str(Path(script).parent))
    algo = importlib.import_module(Path(script).stem)
    algo.save_models = lambda *args: None
    found = globals()[clock](algo).found
    sys.argv = [script, *flags]
    algo.main(algo.parse_args())
    found["peak"] = resident("VmHWM")
    Path(folder, f"{os.environ.get('RANK', 0)}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
