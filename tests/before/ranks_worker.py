"""Runs every scenario of test_ranks.py one after the other, as one of two ranks or alone, and saves what happened.

    python ranks_worker.py SCRIPT FOLDER [FUNCTION]      RANK, WORLD_SIZE, ... in the environment make it a rank

SCRIPT is grpo_llm or ppo_llm_fsdp; FOLDER holds the model, data and rewards. FUNCTION runs other scenarios.
"""

import os
import sys
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import helpers_before
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from helpers_before import LOSS_AGGS, MICROBATCH_TOKENS
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

SCRIPT, FOLDER = sys.argv[1], Path(sys.argv[2])
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
SAVED = FOLDER / f"{WORLD}-{RANK}"
algo = helpers_before.load_script(SCRIPT)


GROUP_SIZE = 2


def global_prompt(row):
    """Place in the global batch of the prompt of this rank's response `row`: prompts are dealt like cards."""
    return RANK + row // GROUP_SIZE * WORLD


def fixed_responses(model, queries, query_mask, uniforms, eos_ids, pad_id, *sampling):
    """In place of `generate`: made from the place in the global batch alone, and as uneven as can be.

    Odd prompts, which are rank 1's, get one or two tokens; the others up to all, some without an EOS.
    """
    num_rows, width = uniforms.shape
    responses = torch.full((num_rows, width), pad_id)
    for i in range(num_rows):
        prompt = global_prompt(i)
        noise = algo.generator("fixed", prompt, i % GROUP_SIZE)
        length = 1 + int(torch.randint(2 if prompt % 2 else width + 2, (), generator=noise))
        responses[i, :length] = torch.randint(3, model.config.vocab_size, (width,), generator=noise)[:length]
        if length <= width:
            responses[i, length - 1] = eos_ids[0]
    return responses, torch.zeros(num_rows, width)


def whole(tensor):
    """The tensor of which every rank has a shard."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def drifted(has_drifted):
    """In place of `forward_all`: old log-probs 1.5 too high in responses to prompts for which has_drifted(place)."""
    forward_all = algo.forward_all

    def patched(model, minibatches, response_mask, *extra):
        result = forward_all(model, minibatches, response_mask, *extra)
        if extra:  # a policy: its temperature
            drift = torch.tensor([has_drifted(global_prompt(i)) for i in range(len(result))])
            result = torch.where(response_mask & drift[:, None], result + 1.5, result)
        return result

    return patched


class SGD(torch.optim.SGD):
    """In place of AdamW, which turns the rounding error of a gradient near 0 into a full step."""

    def __init__(self, parameters, lr, weight_decay, fused):
        super().__init__(parameters, lr=lr)


def record(name, sgd=True, generate=fixed_responses, forward_all=None, **changes):
    """Runs `main` and saves rows of every minibatch, micro-batch sizes, optimizer steps and final weights."""
    found = {"minibatches": [], "sizes": [], "steps": [], "weights": {}}
    pack, save_models = algo.pack, algo.save_models

    def spy_pack(queries, query_mask, responses, response_mask, rows, *limits):
        result = pack(queries, query_mask, responses, response_mask, rows, *limits)
        pairs = [(queries[i][query_mask[i]].tolist(), responses[i][response_mask[i]].tolist()) for i in rows]
        found["minibatches"].append(pairs)
        found["sizes"].append([len(mb.inputs[0]) for mb in result])
        return result

    def spy_save(path, models, tokenizer, accelerator):
        for key, model in zip(("actor", "critic"), models.values()):
            parameters = accelerator.unwrap_model(model).named_parameters()
            found["weights"][key] = {n: whole(p.detach()).clone() for n, p in parameters}
        save_models(path, models, tokenizer, accelerator)

    def spy_step(optimizer, args, kwargs):
        (group,) = optimizer.param_groups
        parts = [torch.zeros(p.numel()) if p.grad is None else whole(p.grad).flatten() for p in group["params"]]
        gradient = torch.cat(parts)
        found["steps"].append({"lr": group["lr"], "gradient": gradient})

    files = {"model": FOLDER / "model", "dataset": FOLDER / "train.jsonl", "output_dir": FOLDER / f"runs-{WORLD}"}
    base = {k: str(v) for k, v in files.items()} | {"reward": f"{FOLDER}/reward.py:early", "run_name": name}
    base |= {
        "batch_size": 8,
        "group_size": GROUP_SIZE,
        "minibatch_size": 8,
        "max_response_length": 10,
        "total_iterations": 1,
    }
    base |= {
        "eval_every": 0,
        "lr": 0.01,
        "critic_lr": 0.01,
        "ppo_epochs": 2,
        "max_grad_norm": 1e9,
        "kl_reward_coef": 0.0,
        "kl_loss_coef": 0.0,
    }
    with ExitStack() as stack:
        patches = [
            (algo, "pack", spy_pack),
            (algo, "save_models", spy_save),
            (algo, "generate", generate or algo.generate),
        ]
        patches += [(algo, "forward_all", forward_all or algo.forward_all)]
        patches += [(torch.optim, "AdamW", SGD)] if sgd else []
        patches += [(PartialState, "destroy_process_group", lambda *a: None)]  # the next run needs it
        for patch in patches:
            stack.enter_context(mock.patch.object(*patch))
        hook = register_optimizer_step_pre_hook(spy_step)
        stack.callback(hook.remove)
        stack.callback(AcceleratorState._reset_state, True)
        algo.main(helpers_before.make_args(algo, **base | changes))
    torch.save(found, SAVED / f"{name}.pt")


# Every term of the losses, so that each needs the right denominator.
ALL_TERMS = {"kl_reward_coef": 0.1, "kl_loss_coef": 0.1, "entropy_coef": 0.05, "value_clip": 0.05, "dual_clip": 3.0}
MOMENTS = {  # per rank: a row of values, and which of them count
    "unequal": (([1.0, 2, 4, 50], [1, 1, 1, 0]), ([-3.0, 8, 8, 8], [1, 0, 0, 0])),
    "empty rank": (([1.0, 2, 4, 9], [1, 1, 1, 1]), ([5.0, 5, 5, 5], [0, 0, 0, 0])),
    "one each": (([1.0, 7], [1, 0]), ([4.0, 7], [1, 0])),
    "one token": (([3.0, 7], [1, 0]), ([4.0, 7], [0, 0])),
    "no token": (([3.0, 7], [0, 0]), ([4.0, 7], [0, 0])),
    "large offset": (([1e6 + 1, 1e6 + 2], [1, 1]), ([1e6 + 3, 1e6 + 5], [1, 1])),
}


def moments():
    Accelerator(cpu=True)  # joins the ranks
    result = {}
    for name, shards in MOMENTS.items():
        x, mask = (torch.tensor(part) for part in zip(*(shards[RANK : RANK + 1] if WORLD > 1 else shards)))
        x = torch.where(mask.bool(), x, torch.nan)
        result[name] = algo.masked_whiten(x, mask.bool()), algo.global_moments(x, mask.bool())
    torch.save(result, SAVED / "moments.pt")
    AcceleratorState._reset_state(True)


def scenarios():
    moments()
    for mode in LOSS_AGGS:
        for tokens in MICROBATCH_TOKENS:
            record(
                f"gradients {mode} {tokens}",
                lr=1e-3,
                critic_lr=1e-3,
                microbatch_tokens=tokens,
                loss_agg=mode,
                **ALL_TERMS,
            )
    record("fixed", total_iterations=3, minibatch_size=4, **ALL_TERMS)
    own = {"estimator": "reinforce_pp", "importance_level": "sequence"}  # advantages that span the ranks
    if helpers_before.has_critic(algo):
        own = {"whiten_advantages": False, "gamma": 0.9, "critic_warmup_iterations": 1}
    record("own", total_iterations=2, **ALL_TERMS, **own)
    corrected = {"old_logprobs": "corrected", "is_level": "sequence", "is_cap": 1.1, "top_p": 0.8}
    record("lora", generate=None, total_iterations=3, lora_rank=4, **ALL_TERMS, **corrected)
    evaluation = {"eval_dataset": str(FOLDER / "eval5.jsonl"), "eval_every": 1}
    schedule = {"lr_schedule": "linear", "warmup_iterations": 2, "lr": 1e-3, "critic_lr": 1e-3}
    adaptive = {"kl_controller": "adaptive", "kl_horizon": 100.0, "missing_eos_penalty": 0.3, "max_grad_norm": 0.5}
    whole = ALL_TERMS | evaluation | schedule | adaptive | {"total_iterations": 4, "temperature": 0.8}
    record("sampled", sgd=False, generate=None, **whole)
    record("same prompt", generate=None, dataset=str(FOLDER / "same.jsonl"), max_response_length=16)
    for n in (5, 1):  # in batches of four rows, two per rank
        sizes = {"batch_size": 2, "minibatch_size": 4, "total_iterations": 0}
        record(f"eval {n}", generate=None, eval_dataset=str(FOLDER / f"eval{n}.jsonl"), **sizes)
    # Rank 1's rows alone have drifted, and those of the last minibatch alone: it stops there, without rank 0's help.
    drift = {"minibatch_size": 4, "lr": 0.0}
    record("drift of one rank", target_kl=0.01, forward_all=drifted(lambda i: i % 2 == 1 and i >= 6), **drift)
    # All have: the KL of the batch is 0.72, of which rank 0 has most and rank 1 the rest.
    record("drift of all", target_kl=0.7, forward_all=drifted(lambda i: True), **drift)
    (SAVED / "done").touch()
    if WORLD > 1:  # ends this process
        record("nan", reward=f"{FOLDER}/reward.py:nan_on_rank_1")


if __name__ == "__main__":
    SAVED.mkdir()
    scenarios()
