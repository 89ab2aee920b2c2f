"""CISPO (2506.13585) by import and patch: the whole change in one file, which the run folder keeps next to the script.

    accelerate launch notes/variants/cispo.py --clip-low 1 --clip-high 2

This does the same as cispo.patch, whose head has the numbers. A file like this is enough if your change fits into one
function. For a flag of its own: `class Args(grpo_llm.Args)`, and `grpo_llm.Args = Args`. If it needs a line in `main`,
copy the script.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where grpo_llm.py is
import grpo_llm


def policy_loss(logprobs, old_logprobs, advantages, mask, args):
    """(losses to be minimised, where the weight is cut): `main` logs the second as actor/clipfrac."""
    ratio = (logprobs - old_logprobs).clamp(-20.0, 20.0).exp().detach()
    weight = ratio.clamp(1 - args.clip_low, 1 + args.clip_high)
    return -advantages * weight * logprobs, weight != ratio


grpo_llm.policy_loss = policy_loss

if __name__ == "__main__":
    grpo_llm.main(grpo_llm.parse_args())
