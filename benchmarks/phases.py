"""Time the phases of an iteration from outside, by wrapping the functions that a script calls where a phase begins.

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
"""

import functools
import time

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

PHASES = "rollout", "reward", "logprobs", "values", "advantages", "actor", "critic", "log"
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
