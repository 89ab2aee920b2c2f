"""PPO with one advantage for a whole response, its score minus one forecast, instead of GAE (section 1.7): a script.

    python benchmarks/learning.py one-advantage-first --flags="--total-iterations 40" \\
        --script benchmarks/campaigns/one_advantage.py --seeds 1 2 3

The forecast is the value of the prompt. Only that value has a target: the score, less the KL penalties. So
critic/explained_variance, which covers all tokens, says nothing here. Everything else is that of ppo_llm.py.
"""

import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[2]))
import ppo_llm


def one_per_response(rewards, values, mask, gamma, lam):
    """In place of `gae`: (advantages, returns), (B,T), not whitened, 0 if masked; only one value per row is trained."""
    total = torch.where(mask, rewards, 0).sum(1, keepdim=True)  # (B,1)
    place = mask.int().argmax(1, keepdim=True)
    trained = torch.arange(mask.shape[1], device=mask.device) == place  # (B,T)
    returns = torch.where(trained, total, values)  # the others are to stay as they were
    return torch.where(mask, total - values.gather(1, place), 0), torch.where(mask, returns, 0)


if __name__ == "__main__":
    ppo_llm.gae = one_per_response
    ppo_llm.main(ppo_llm.parse_args())
