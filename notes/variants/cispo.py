"""CISPO (2506.13585) by import and patch: the whole change in one file, which the run folder keeps beside the script.

    accelerate launch notes/variants/cispo.py --clip-low 1 --clip-high 2

The same as cispo.patch, whose head has the figures. A file like this suits what one function decides; what needs a flag
of its own, or a line in `main`, is a copy of the script.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where grpo_llm.py is
import grpo_llm


def policy_loss(logprobs, old_logprobs, advantages, clip_low, clip_high):
    """(losses to be minimised, where the weight is cut): `main` logs the second as actor/clipfrac."""
    ratio = (logprobs - old_logprobs).clamp(-20.0, 20.0).exp().detach()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -advantages * weight * logprobs, weight != ratio


grpo_llm.policy_loss = policy_loss

if __name__ == "__main__":
    grpo_llm.main(grpo_llm.parse_args())
