"""Runs the two-rank scenarios of test_groups.py one after the other, as the rank that the environment says.

python groups_worker.py FOLDER        FOLDER holds the model, data and rewards
"""

import os
import sys
from pathlib import Path
from unittest import mock

import helpers_before
import torch
from accelerate.state import AcceleratorState, PartialState

FOLDER, RANK = Path(sys.argv[1]), int(os.environ["RANK"])
grpo = helpers_before.load_script("grpo_llm")


def run(name, data, reward, **changes):
    """One run of `main`; the final weights of this rank are saved as NAME-RANK.pt."""
    save_models = grpo.save_models

    def spy(path, models, tokenizer, accelerator):
        torch.save(accelerator.unwrap_model(models["."]).state_dict(), FOLDER / f"{name}-{RANK}.pt")
        save_models(path, models, tokenizer, accelerator)

    base = {"model": str(FOLDER / "model"), "dataset": str(FOLDER / data), "reward": f"{FOLDER}/{reward}"}
    base |= {"output_dir": str(FOLDER / "runs"), "run_name": name, "eval_every": 0, "total_iterations": 1, "lr": 1e-3}
    base |= {"batch_size": 4, "group_size": 2, "minibatch_size": 4, "max_response_length": 10, "ppo_epochs": 2}
    with mock.patch.object(grpo, "save_models", spy):
        grpo.main(grpo.Args(**base | changes))
    AcceleratorState._reset_state(True)


def mask_of_rank_1_is_empty(responses, eos_ids, real=grpo.make_response_mask):
    return real(responses, eos_ids) & (RANK == 0)


with mock.patch.object(PartialState, "destroy_process_group", lambda *args: None):  # the next run needs it
    run("start", "uneven.jsonl", "early.py:early", lr=0.0)
    run("uneven", "uneven.jsonl", "keep.py:by_keep", dynamic_sampling=True, max_resamples=1)
    with mock.patch.object(grpo, "make_response_mask", mask_of_rank_1_is_empty):
        run("empty", "uneven.jsonl", "early.py:early", microbatch_tokens=30)
run("none", "none.jsonl", "keep.py:by_keep", dynamic_sampling=True, max_resamples=1)  # ends this process
