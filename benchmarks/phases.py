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
    advantages  `kl_penalty` begins, after the last of these passes

So time/iteration, which the scripts measure themselves, is the sum of all but eval, up to a few milliseconds. What
comes after `log` is not covered: checkpoints, and the end of a run. time/clock says when a line was logged. Waiting for
another process counts for the phase in which this one waits. On a GPU, the clock waits at the end of a phase until
everything that the phase has started is done.

`measure` is for speed.py: it runs a script in processes of its own, watched by a Clock, and counts tokens.
"""

import functools
import importlib
import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

import common
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

OUTSIDE = "outside"  # of an iteration
FROM_OUTSIDE = "rollout", "eval"  # what an iteration, or the evaluation before training, begins with


class Clock:
    """Watches a script, imported as the module `algo`, from before its `main` is called."""

    def __init__(self, algo):
        self.phase = OUTSIDE
        self.began = time.perf_counter()
        self.seconds = {}  # of the phases since the last line of the log
        self.wrap(algo, "draw_prompts", before="rollout")
        self.wrap(algo, "to_batch", after="reward")
        self.wrap(algo, "pack", before="logprobs")
        self.wrap_rewards(algo)
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
        self.seconds[self.phase] = self.seconds.get(self.phase, 0.0) + now - self.began
        self.phase = phase
        self.began = now

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

    def wrap_rewards(self, algo):
        """The rewards begin with their KL; the passes go on after that of the sampler's check, which is none."""
        kl_penalty = algo.kl_penalty

        def penalty(*args, **kwargs):
            if self.phase in ("logprobs", "values"):
                self.enter("advantages")
            return kl_penalty(*args, **kwargs)

        algo.kl_penalty = penalty

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


def count_tokens(algo):
    """A list that gets the number of tokens of each iteration, prompts included, when its line is logged."""
    counts, found = [0], []
    to_batch, log = algo.to_batch, algo.log

    def count(rows, responses, *rest):
        counts[0] += sum(len(row["input_ids"]) + len(said.ids) for row, said in zip(rows, responses))
        return to_batch(rows, responses, *rest)

    def note(*args):
        found.append(counts[0])
        counts[0] = 0
        return log(*args)

    algo.to_batch, algo.log = count, note
    return found


def largest():
    """The most bytes that this process ever held."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure(script, flags, processes=1):
    """Runs a script, watched: the lines of metrics.jsonl; of each process the tokens of every line, and its peak.

    Nothing is evaluated or saved.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = [script, folder, "--output-dir", folder, "--run-name", "run", "--track", "none"]
        words += ["--eval-every", "0", "--eval-rows", "0", "--save-every", "0", *flags]
        common.run(common.launcher(processes, Path(__file__).resolve(), *words))
        found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(processes)]
        return common.read_lines(Path(folder, "run", "metrics.jsonl")), found


def main():
    """A process of `measure`."""
    script, folder, *flags = sys.argv[1:]
    sys.path.insert(0, str(Path(script).parent))
    algo = importlib.import_module(Path(script).stem)
    algo.save_models = lambda *args: None
    Clock(algo)
    tokens = count_tokens(algo)
    sys.argv = [script, *flags]
    algo.main(algo.parse_args())
    found = {"tokens": tokens, "peak": largest()}
    Path(folder, f"{os.environ.get('RANK', 0)}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
