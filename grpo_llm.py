"""GRPO and its family for language models in one file: no critic, groups of responses are each other's baseline.

The model answers every prompt group_size times, a reward function scores the answers, and the policy is pushed towards
those that scored better than the others of their group. With the answer's tokens as actions a_t, the text before each
as state s_t, and r_i the score of answer i:

    reward          R_i   = r_i - beta*sum_t KL(pi_old || pi_ref)_t                   (beta, --kl-reward-coef, may be 0)
    advantage       A_i   = (R_i - mean of the group) / std of the group     GRPO         (DeepSeekMath, 2402.03300)
                          = R_i - mean of the group                          Dr.GRPO      (2503.20783)
                          = R_i - mean of the others of the group            RLOO         (2402.14740)
                          = R_i, whitened over the batch                     REINFORCE++  (2501.03262; groups of one)
                          = R_i - mean of the group, then whitened           REINFORCE++ with baseline
    ratio           rho_t = pi(a_t|s_t) / pi_old(a_t|s_t), or its geometric mean over the answer      (GSPO, 2507.18071)
    loss                  = mean of max(-A*rho, -A*clip(rho, 1-lo, 1+hi)) - c_H*H + c_KL*KL

An estimator alone is not yet its paper's algorithm: the kind of mean (--loss-agg) and the place of the KL differ too,
and DAPO (2503.14476) is GRPO with --clip-high, --dynamic-sampling, --loss-agg token-mean and --overlong-buffer, without
KL. The README has the line of flags for each name.

`main` is the algorithm: the numbered phases of ppo_llm.py without those of the critic (4 and 7), then logging,
evaluation and saving. Everything above it is what a phase needs: data and reward, the model, the mathematics, sampling.
Departures from the papers: the reference is never moved; a KL in the reward counts for the whole answer, not from each
token on; REINFORCE++ is whitened over answers, not tokens; dynamic sampling fills each process's share by itself.
One denominator per optimizer step: a token or answer weighs the same whatever the micro-batch or process count.

Launch (the default model and data lie in benchmarks/tiny/):
  accelerate launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no grpo_llm.py
  python grpo_llm.py --help

Shapes in comments: N prompts and B = N*group_size responses on this process, P prompt tokens, T response tokens.
A comment that begins with [2.3] is explained in notes/, section 2.3.
"""

import copy
import fcntl
import hashlib
import inspect
import json
import math
import mmap
import os
import re
import resource
import runpy
import select
import shlex
import shutil
import signal
import socket
import sys
import threading
import time
import warnings
from collections import defaultdict
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, make_dataclass
from datetime import timedelta
from decimal import Decimal
from importlib.util import find_spec
from itertools import compress
from pathlib import Path
from typing import Literal, NamedTuple

import accelerate
import datasets
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
import tyro
from accelerate import Accelerator
from accelerate.utils import (
    DistributedDataParallelKwargs,
    InitProcessGroupKwargs,
    broadcast_object_list,
    gather_object,
    set_seed,
    tqdm,
)
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import cached_file, find_adapter_config_file

TINY = Path(__file__).resolve().parent / "benchmarks" / "tiny"
KLKind = Literal["k1", "abs", "k2", "k3", "k1+", "k3+"]
HANG_MINUTES = 30  # a process that the others wait for so long is given up, and the run with it
LossAgg = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


@dataclass
class ModelArgs:
    """what is trained, and how"""

    model: str = str(TINY / "model")
    """policy to train: a transformers folder or hub id, or a LoRA adapter, which is then trained further"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """autocast precision of forward and backward; auto is bfloat16 where a GPU supports it. Weights stay float32"""
    lora_rank: int = 0
    """train low-rank matrices beside the frozen weights (2106.09685); 0: train all weights"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass: less memory, about a third more time per update"""


@dataclass
class DataArgs:
    """prompts, and what scores the responses to them"""

    dataset: str = str(TINY / "train.jsonl")  # [8.12]
    """.jsonl/.json/.parquet/.csv file, or folder saved by `datasets` or hub id: `name`, `name:config:split`"""
    eval_dataset: str | None = None
    """test data, same forms; default: the `test` split of the same source, or the file with `train` -> `test`"""
    prompt_column: str | None = None
    """column with the prompt, text or a chat; default: `question`, `prompt`, or `chosen` up to the last answer"""
    answer_column: str | None = None
    """column with the reference answer; default: `answer`, `solution` or `reward_model` (its ground truth), if any"""
    prompt_template: str = "{prompt}"
    r"""what becomes of a text prompt: {prompt} is replaced by it, \n by a line break"""
    chat_template: str | None = None
    """file with a Jinja chat template, or none: prompts stay text; default: that of the tokenizer, if it has one"""
    max_prompt_length: int = 256
    """longest prompt in tokens"""
    overlong_prompts: Literal["filter", "truncate", "error"] = "filter"
    """what becomes of longer ones: left out, only their end is kept, or the run stops"""
    max_response_length: int = 64
    """tokens a response may have; one without an EOS by then is truncated"""
    reward: str = "gsm8k"
    """gsm8k (number after the last ####), exact, or path/to/file.py:function"""
    reward_model: str | None = None
    """sequence classifier with one label whose score is the reward, in place of --reward"""


@dataclass
class RolloutArgs:
    """how responses are sampled"""

    batch_size: int = 32
    """prompts per iteration"""
    group_size: int = 8  # [5.10]
    """responses per prompt"""
    rollout_batch_size: int = 256
    """responses sampled at a time on each device: lower it when the KV cache is too large, nothing else changes"""
    temperature: float = 1.0
    """divides the logits in sampling and in every log-prob"""
    top_p: float = 1.0
    """sample from the smallest set of tokens with this probability; below 1 the ratio is biased"""
    top_k: int = 0
    """sample from the k likeliest tokens (0: all); otherwise the ratio is biased"""
    missing_eos_penalty: float = 0.0
    """subtracted from the score of a truncated response"""
    overlong_buffer: int = 0
    """last tokens of --max-response-length in which the score falls, linearly, by --overlong-penalty (DAPO; 0: off)"""
    overlong_penalty: float = 1.0
    """what a response of the full length loses, with --overlong-buffer"""
    dynamic_sampling: bool = False
    """drop groups whose responses the reward function scores alike, and sample other prompts in their place (DAPO)"""
    max_resamples: int = 3
    """rollouts that --dynamic-sampling may add to an iteration; then it trains on what every process has found"""
    old_logprobs: Literal["recompute", "rollout", "corrected"] = "recompute"
    """what the ratio is to: log-probs of a pass as in training, or of the sampler; corrected: recompute, and losses
    weighted by recomputed over sampler's probability"""
    is_level: Literal["token", "sequence"] = "token"
    """these weights are of single tokens, or of whole responses"""
    is_cap: float = 2.0
    """and never above this"""


@dataclass
class UpdateArgs:
    """the optimizer steps of an iteration"""

    total_iterations: int = 40
    """iterations of rollout and update; 0: evaluate only"""
    ppo_epochs: int = 1  # [3.8]
    """passes over each batch"""
    minibatch_size: int = 64
    """responses per optimizer step"""
    microbatch_tokens: int = 8192
    """padded tokens per forward pass on each device: lower it when memory runs out, nothing else changes"""
    lr: float = 1.5e-4
    """actor learning rate (1e-6 is usual for a 0.5B to 7B model)"""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """how the learning rate falls to 0 over the run"""
    warmup_iterations: int = 0
    """iterations in which the learning rate rises from 0"""
    weight_decay: float = 0.0
    """AdamW weight decay"""
    max_grad_norm: float = 1.0
    """the gradient is scaled down to this global norm"""
    clip_low: float = 0.2
    """the ratio is clipped below 1 - this"""
    clip_high: float = 0.2  # [3.10]
    """the ratio is clipped above 1 + this"""
    dual_clip: float | None = None
    """caps the loss of a bad token at this (> 1) times |A|, however much its ratio has grown; 3 is usual"""
    entropy_coef: float = 0.0
    """weight of the entropy bonus"""
    loss_agg: LossAgg = "seq-mean-token-mean"
    """how token losses become one number; -norm divides each response's sum by --max-response-length"""
    importance_level: Literal["token", "sequence"] = "token"
    """one ratio per token, or per response (GSPO, with --loss-agg seq-mean-token-mean and clips of 3e-4 and 4e-4)"""
    target_kl: float | None = None
    """stop this iteration's actor updates before a step whose approximate KL to the old policy is above this"""


@dataclass
class AdvantagesArgs:
    """from rewards to advantages"""

    estimator: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp"] = "grpo"  # [5.13]
    """score - group mean (dr_grpo), over group std (grpo), whitened over all (reinforce_pp); rloo: - mean of others"""


@dataclass
class KLArgs:
    """KL to the reference, the model as it was at the start"""

    kl_reward_coef: float = 0.0
    """weight of the KL penalty in the reward of a response"""
    kl_reward_kind: KLKind = "k1"
    """its estimator"""
    kl_controller: Literal["fixed", "adaptive"] = "fixed"
    """adaptive: move --kl-reward-coef so that the KL stays near --kl-target"""
    kl_target: float = 0.05
    """token mean of the KL that the adaptive controller aims at"""
    kl_horizon: float = 1000.0
    """responses over which the adaptive controller acts"""
    kl_loss_coef: float = 0.001
    """weight of the KL in the loss; with this and --kl-reward-coef 0 no reference is loaded"""
    kl_loss_kind: KLKind = "k3"
    """its estimator (k1 has zero expected gradient here)"""


@dataclass
class RunArgs:
    """files, seed, evaluation"""

    output_dir: str = "runs"
    """folder of all runs"""
    run_name: str | None = None
    """folder of this run inside it; default: script-seed-time. It must not exist, unless resumed"""
    seed: int = 1
    """seed of data order and sampling"""
    eval_every: int = 10
    """iterations between evaluations (0: only before and after training)"""
    track: Literal["tensorboard", "wandb", "none"] = "tensorboard"
    """where metrics go besides metrics.jsonl (wandb: pip install wandb)"""
    save_every: int = 10
    """iterations between checkpoints (0: only the one that SIGTERM or Ctrl-C leaves)"""
    keep_checkpoints: int = 2
    """so many of the newest are kept"""
    resume: str | None = None
    """go on from a checkpoint, runs/NAME/checkpoints/step_N, in its run folder, with any number of processes; auto:
    from the newest of --run-name, or from the beginning if there is none"""


@dataclass
class Args(RunArgs, KLArgs, AdvantagesArgs, UpdateArgs, RolloutArgs, DataArgs, ModelArgs):
    """GRPO and its family for language models. All batch sizes are global: they count over all processes together."""


class UserError(Exception):
    """Something the user can mend; its message is one sentence that says how."""


def leave(accelerator):
    """Closes the trackers and the process group, the last thing that a rank does.

    torch waits for gloo's threads while it holds the lock (GIL) that they need to let go of their last tensors
    (pytorch issue 56297): without the pause a run that had saved everything now and then never ended.
    """
    time.sleep(0.5)
    accelerator.end_training()


@contextmanager
def errors_agreed(accelerator):
    """Runs a block on every rank; if it raised UserError on any, all ranks stop with that message and exit code 1."""
    message = None
    try:
        yield
    except UserError as error:
        message = str(error)
    messages = [f"error: {m}" for m in gather_object([message]) if m is not None]
    if messages and accelerator.num_processes > 1:
        # The launcher kills all ranks once one has gone: print first, then leave together.
        accelerator.print(messages[0], file=sys.stderr, flush=True)
        accelerator.wait_for_everyone()
        leave(accelerator)
        sys.exit(1)
    if messages:
        sys.exit(messages[0])


@contextmanager
def batch_kept(path, rows, responses, scores=None):
    """Writes the batch to `path` if the block raises UserError, and says so."""
    try:
        yield
    except UserError as error:
        scores = [None] * len(rows) if scores is None else scores.tolist()
        batch = [{"query": r["prompt"], "response": t, "score": s} for r, t, s in zip(rows, responses, scores)]
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in batch))
        raise UserError(f"{error}; the batch is in {path}") from error


def check_finite(**numbers):  # [12.8]
    """Raises UserError if one of the tensors has a NaN or an infinity."""
    if bad := [name.replace("_", " ") for name, x in numbers.items() if not x.isfinite().all()]:
        what = f"not finite: {', '.join(bad)}; no step was taken with them"
        raise UserError(f"{what}. Try a lower --lr or --max-grad-norm, or --dtype float32")


@contextmanager
def blamed_on(what):
    """Turns whatever a library raises about the user's input into a UserError that begins with `what`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # the libraries raise a dozen types
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"{what} ({type(error).__name__}: {reason})") from error


def stop_on_signals(seconds=15):
    """Event that a SIGTERM or SIGINT sets. The process ends `seconds` after it, or at a second signal, or when its
    launcher has died. A thread looks after this, because the main one can be in a collective or a kernel for long."""
    stop, parent = threading.Event(), os.getppid()
    died = "error: the launcher has died, so does this process; go on with --resume"
    launched = not {"TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION"}.isdisjoint(os.environ)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # it may have died while torch was being imported
        try:
            socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), 60).close()
        except OSError:
            sys.exit(died)
    incoming, outgoing = os.pipe()
    os.set_blocking(outgoing, False)
    signal.set_wakeup_fd(outgoing, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # the byte in the pipe says it

    def watch():
        deadline = math.inf
        while time.monotonic() < deadline:
            if select.select([incoming], [], [], 0.2)[0]:
                os.read(incoming, 1)
                if stop.is_set():
                    os._exit(1)
                deadline = time.monotonic() + seconds
                stop.set()
            elif launched and not stop.is_set() and os.getppid() != parent:
                print(died, file=sys.stderr)
                os._exit(1)
        print(f"stopped: {seconds} s were not enough to save; go on from the newest checkpoint", file=sys.stderr)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
    return stop


@contextmanager
def others_answer():
    """Ends the process with one sentence if another one is lost or has not answered for HANG_MINUTES."""
    try:
        yield
    except RuntimeError as error:  # of gloo or NCCL; there are no types to tell them by
        if not dist.is_initialized() or not re.search("(?i)timed? ?out|connection|peer|socket", str(error)):
            raise
        reason = str(error).strip().splitlines()[0]
        print(f"error: another process has died or hangs, see its own message ({reason})", file=sys.stderr, flush=True)
        os._exit(1)  # tidying up would wait for it


def generator(*key):
    """CPU random stream of its own for every key, e.g. ("rollout", seed, iteration)."""
    return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:7], "little"))


# ---------------------------------------------------------------------------------------------------------------------
# Data and reward
# ---------------------------------------------------------------------------------------------------------------------

FILE_READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
ROLES = "system", "developer", "user", "assistant", "tool"


def read_table(source, split):
    """Rows of a file, a folder saved by `datasets` or a hub id; None if it has splits and not this one."""
    path = Path(source)
    with blamed_on(f"dataset {source}: cannot be read as a file, a saved folder or a hub id"):
        if path.suffix in FILE_READERS:
            if not path.is_file() or path.stat().st_size == 0:
                raise UserError(f"dataset {source}: the file is {'empty' if path.is_file() else 'missing'}")
            return datasets.load_dataset(FILE_READERS[path.suffix], data_files=str(path), split="train")
        name, config, own_split = (source.split(":") + ["", ""])[:3]
        table = datasets.load_from_disk(name) if Path(name).is_dir() else datasets.load_dataset(name, config or None)
    has_splits = isinstance(table, datasets.DatasetDict)
    if own_split and not (has_splits and own_split in table):
        raise UserError(f"dataset {source}: it has {f'the splits {list(table)}' if has_splits else 'no splits'}")
    return table.get(own_split or split) if has_splits else table


def default_eval_source(dataset):
    """Where test data are when not given: the file with `train` -> `test` in its name, or a source that has splits."""
    path = Path(dataset)
    if path.is_dir():
        return dataset if (path / "dataset_dict.json").is_file() else None
    if path.suffix not in FILE_READERS:
        return ":".join(dataset.split(":")[:2])
    sibling = path.with_name(path.name.replace("train", "test"))
    return str(sibling) if sibling != path and sibling.is_file() else None


def as_prompt(value, column, where):
    """A data row's prompt: text, or a chat [{"role", "content"}, ...] in which it is the assistant's turn."""
    if isinstance(value, str) and value and column != "chosen":
        return value
    if not isinstance(value, list) or not value:
        kinds = "a chat (of texts the prompts should have a column)" if column == "chosen" else "text or a chat"
        raise UserError(f"{where}: column {column} should hold {kinds}, not {str(value)[:60]!r}")
    for message in value:
        parts = message if isinstance(message, dict) else {}
        if parts.get("role") not in ROLES or not isinstance(parts.get("content"), str):
            expected = f"a chat message has a role ({', '.join(ROLES)}) and text as its content"
            raise UserError(f"{where}: column {column}: {expected}, not {str(message)[:80]}")
    roles = [message["role"] for message in value]
    if column == "chosen" and "assistant" in roles:  # a preference pair: what its answers were given to
        value = value[: len(roles) - 1 - roles[::-1].index("assistant")]
    if not value or value[-1]["role"] == "assistant":
        raise UserError(f"{where}: column {column}: the chat should end with the message to be answered")
    return [{"role": message["role"], "content": message["content"]} for message in value]


def load_prompts(source, split, args, tokenizer):
    """List of rows {prompt, input_ids, answer, columns}, and a sentence about them for the start-up block.

    `columns` are those of the data, and `messages`, the prompt as a chat. Prompts longer than --max-prompt-length fare
    as --overlong-prompts says. Raises UserError naming the file and the row.
    """
    table = None if source is None else read_table(source, split)
    if table is None:
        return [], "none" if source is None else f"{source} has no {split} split"
    if len(table) == 0:
        raise UserError(f"dataset {source}: it has no rows")
    names = table.column_names
    prompts_of = "verl" if "reward_model" in names else "TRL"
    formats = {"question": "GSM8K raw", "prompt": prompts_of, "chosen": "preference pairs"}  # [8.8]
    prompt_column = args.prompt_column or next((c for c in formats if c in names), "question, prompt or chosen")
    answer_column = args.answer_column or next((c for c in ("answer", "solution", "reward_model") if c in names), None)
    for flag, column in (("--prompt-column", prompt_column), ("--answer-column", answer_column)):
        if column not in names and column is not None:
            raise UserError(f"{flag}: {source} has no column {column}; it has {', '.join(names)}")
    wants_chat, needs_answer = args.chat_template != "none", args.reward in REWARDS and args.reward_model is None
    use_chat, rows, answer_type = wants_chat and tokenizer.chat_template is not None, [], None
    for number, columns in enumerate(table.to_list(), 1):
        where = f"{source} row {number}"
        prompt, answer = as_prompt(columns[prompt_column], prompt_column, where), columns.get(answer_column)
        answer = answer.get("ground_truth") if isinstance(answer, dict) else answer  # verl's column reward_model
        if needs_answer and answer is None:
            raise UserError(f"{where}: --reward {args.reward} needs an answer; name its column with --answer-column")
        if needs_answer and args.reward == "gsm8k" and gsm8k_gold(answer) is None:
            raise UserError(f"{where}: the answer has no number, after '####' or alone: {str(answer)[-60:]!r}")
        own_type = "number" if isinstance(answer, int | float) else type(answer).__name__
        answer_type = own_type if answer_type is None and answer is not None else answer_type
        if answer is not None and own_type != answer_type:
            raise UserError(f"{where}: the answer is a {own_type}, {str(answer)[:60]!r}, and a {answer_type} before it")
        is_chat = isinstance(prompt, list)
        if is_chat and wants_chat and not use_chat:
            what = f"{where}: the prompt is a chat and the tokenizer of --model has no chat template"
            raise UserError(f"{what}; give --chat-template FILE, or none to join the messages to a text")
        text = "\n".join(message["content"] for message in prompt) if is_chat else prompt
        text = args.prompt_template.replace("\\n", "\n").replace("{prompt}", text)
        messages = prompt if is_chat else [{"role": "user", "content": text}]
        if use_chat:
            with blamed_on(f"{where}: the chat template refuses it"):
                text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        rows.append({"prompt": text, "answer": answer, "columns": columns | {"messages": messages}})
    # A chat template writes the BOS itself.
    encoded = tokenizer([row["prompt"] for row in rows], add_special_tokens=not use_chat)["input_ids"]  # [8.9]
    limit, lengths = args.max_prompt_length, [len(ids) for ids in encoded]
    for number, (row, ids) in enumerate(zip(rows, encoded), 1):
        if len(ids) > limit and args.overlong_prompts == "error":
            raise UserError(f"{source} row {number}: {len(ids)} tokens, more than --max-prompt-length {limit}")
        if len(ids) > limit and args.overlong_prompts == "truncate":  # [8.10] the end stays, and the BOS
            bos = ids[: ids[0] == tokenizer.bos_token_id]
            ids = bos + ids[len(ids) - limit + len(bos) :]
            row["prompt"] = tokenizer.decode(ids[len(bos) :])
        row["input_ids"] = ids
    kept = [row for row in rows if len(row["input_ids"]) <= limit]
    if not kept:
        raise UserError(
            f"{source}: no prompt within --max-prompt-length {limit}, the shortest has {min(lengths)} tokens"
        )
    kind = f"{formats.get(prompt_column, prompt_column)}, {'chat' if is_chat else 'text'}"
    kind += ", chat template" if use_chat else ""
    fate = {"truncate": "truncated"}.get(args.overlong_prompts, "left out")
    fate = f"{sum(length > limit for length in lengths)} too long {fate}"
    return kept, f"{source} ({kind}): {len(kept)} rows, {fate}"


def draw_prompts(rows, start, count, seed):
    """Rows number start to start + count of the endless stream in which every epoch is a permutation of its own."""
    epochs = range(start // len(rows), (start + count - 1) // len(rows) + 1)
    orders = [torch.randperm(len(rows), generator=generator("epoch", seed, epoch)) for epoch in epochs]
    first = start - epochs[0] * len(rows)
    return [rows[i] for i in torch.cat(orders)[first : first + count].tolist()]


def gsm8k_number(text):
    """The number after the last '####' as a Decimal; None if there is none. '#### $-1,234.' is -1234."""
    if "####" not in text:
        return None
    match = re.match(r"([-+]?) ?[$€£]? ?([-+]?)((?:\d[\d,]*)?\.?\d+)", text.rsplit("####", 1)[1].lstrip())  # [8.2]
    return Decimal(f"{match[1] or match[2]}{match[3].replace(',', '')}") if match else None


def gsm8k_gold(answer):
    """The number of a reference answer, which may be a solution with '####' or the bare number."""
    return gsm8k_number(answer if "####" in str(answer) else f"####{answer}")


def gsm8k(prompts, responses, answers):
    """1 if the number after the response's last '####' equals the reference answer's, else 0."""
    found = [(gsm8k_number(response), gsm8k_gold(answer)) for response, answer in zip(responses, answers)]
    return [float(number is not None and number == gold) for number, gold in found]


def exact(prompts, responses, answers):
    """1 if the response is the answer, surrounding white space aside, else 0."""
    return [float(response.strip() == str(answer).strip()) for response, answer in zip(responses, answers)]


REWARDS = {"gsm8k": gsm8k, "exact": exact}


def load_reward(spec):
    """--reward as a function f(prompts, responses, answers, **columns) -> list of floats."""
    if spec in REWARDS:
        return REWARDS[spec]
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py"):
        raise UserError(f"--reward {spec}: it should be one of {', '.join(REWARDS)} or path/to/file.py:function")
    if not Path(path).is_file():
        raise UserError(f"--reward {spec}: there is no file {path}")
    with blamed_on(f"--reward {spec}: running the file failed"):
        names = runpy.run_path(path)
    if not callable(names.get(name)):
        raise UserError(f"--reward {spec}: {path} has no function {name}")
    return names[name]


def compute_scores(reward_function, rows, responses):
    """One finite float per response; rows: the data row of each. Raises UserError that shows the row at fault.

    Dataset columns are passed to the function only when it names them.
    """
    names = inspect.signature(reward_function).parameters  # [8.3]
    columns = {name: [row["columns"][name] for row in rows] for name in rows[0]["columns"] if name in names}
    columns = {name: values for name, values in columns.items() if name not in ("prompts", "responses", "answers")}
    with blamed_on(f"the reward failed on the batch beginning {rows[0]['prompt'][-80:]!r} -> {responses[0][:80]!r}"):
        scores = reward_function([r["prompt"] for r in rows], responses, [r["answer"] for r in rows], **columns)
        scores = [float(score) for score in scores]
    if len(scores) != len(rows):
        raise UserError(f"the reward returned {len(scores)} scores for {len(rows)} responses")
    for row, response, score in zip(rows, responses, scores):
        if not math.isfinite(score):
            raise UserError(f"the reward returned {score} for {row['prompt'][-80:]!r} -> {response[:80]!r}")
    return scores


# ---------------------------------------------------------------------------------------------------------------------
# Model
# ---------------------------------------------------------------------------------------------------------------------


def load_model(flag, name, auto_class, **kwargs):
    """(model in fp32 without dropout, transformers' loading info). Only safetensors, no remote code."""
    with blamed_on(f"{flag} {name}: no folder or hub id that {auto_class.__name__} can load"):
        config = AutoConfig.from_pretrained(name, **kwargs)
        # Dropout would make two forward passes of the same weights differ, and the ratio with them.
        for key, value in config.to_dict().items():
            if "drop" in key and isinstance(value, float):
                setattr(config, key, 0.0)
        options = {"dtype": torch.float32, "use_safetensors": True, "output_loading_info": True}
        model, info = auto_class.from_pretrained(name, config=config, **options)
        return model, info


def add_lora(model, adapter, rank, names=("default",), **options):
    """Freezes `model` and puts trainable low-rank matrices beside its linear layers (2106.09685), if rank or adapter.

    They are new ones of this rank, or those of a saved adapter, loaded under each of `names`, the last of them active.
    """
    if not rank and adapter is None:
        return
    if find_spec("peft") is None:
        raise UserError("--lora-rank and adapters need peft: pip install peft")
    from peft import LoraConfig, PeftConfig, set_peft_model_state_dict

    if Path(model.name_or_path).is_dir():  # the adapter's folder will name it, and may be loaded from anywhere
        model.name_or_path = str(Path(model.name_or_path).absolute())
    if adapter is None:
        model.add_adapter(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", **options))
        return
    with blamed_on(f"adapter {adapter}: damaged, or not made for its base model"):
        weights = load_file(cached_file(adapter, "adapter_model.safetensors"))
        weights = {key.removeprefix("base_model.model."): weight for key, weight in weights.items()}
        for name in names:
            config = PeftConfig.from_pretrained(adapter)
            if config.peft_type != "LORA":
                raise UserError(f"adapter {adapter}: it is of the kind {config.peft_type}, only LoRA is supported")
            config.inference_mode, config.lora_dropout = False, 0.0
            model.add_adapter(config, name)
            loaded = set_peft_model_state_dict(model, weights, name)
            if wrong := loaded.unexpected_keys + [key for key in loaded.missing_keys if f".{name}." in key]:
                raise UserError(f"adapter {adapter}: not made for its base model, {wrong[0]} is in one of them only")


def find_base(flag, name):
    """(model, adapter): an adapter's base and itself; (name, None) for an ordinary model."""
    with blamed_on(f"{flag} {name}: no folder or hub id with a model"):
        file = find_adapter_config_file(name)
        return (json.loads(Path(file).read_text())["base_model_name_or_path"], name) if file else (name, None)


@contextmanager
def as_it_began(model):
    """In this block a model trained by LoRA is what it was at the start: with the adapter it came with, or none."""
    adapters = getattr(model, "peft_config", {})
    if "reference" in adapters:
        model.set_adapter("reference")
    elif adapters:
        model.disable_adapters()  # [4.11]
    yield
    if adapters:
        model.enable_adapters()
        model.set_adapter("default")


def load_causal_lm(name, lora_rank=0):
    """A causal language model whose logits are lm_head(hidden states), which `Policy` relies on."""
    name, adapter = find_base("--model", name)
    flag = "--model" if adapter is None else f"--model {adapter}, an adapter, its base"
    model, info = load_model(flag, name, AutoModelForCausalLM)
    add_lora(model, adapter, lora_rank, ("reference", "default"), task_type="CAUSAL_LM")
    # A classifier lacks the language model's head, unless that is tied to the embeddings, and has its own.
    wrong = [f"lack {key}" for key in info["missing_keys"]]
    wrong += [f"hold {key}" for key in info["unexpected_keys"] if key.startswith(("score.", "classifier."))]
    if wrong:
        raise UserError(f"--model {name}: not a causal language model, its weights {sorted(wrong)[0]}")
    with torch.no_grad():
        probe = torch.tensor([[0, 1, 2]])
        logits = model.get_output_embeddings()(model.base_model(probe).last_hidden_state)
        if not torch.allclose(logits, model(probe).logits, atol=1e-4):
            raise UserError(f"--model {name}: {type(model).__name__} changes its logits after lm_head, not supported")
    return model


def to_sequences(input_ids, attention_mask, num_response_tokens, group_size):  # [11.4]
    """What goes through a model for rows (B,P+T): sequences (N,S) without padding before their ends.

    Every group_size rows answer one prompt and become one sequence: prompt, response, response ... A response sees the
    prompt and itself, and counts its positions from the prompt, so that to the model nothing has changed. Returns the
    model's inputs, and for each response token (B,T) the index (sequence, position) of the token before it.
    """
    num_rows, num_prompt_tokens = len(input_ids), input_ids.shape[1] - num_response_tokens
    number = torch.arange(num_rows, device=input_ids.device)[:, None]  # (B,1)

    def join(x):  # (B,P+T) -> (N,P+group_size*T)
        responses = x[:, num_prompt_tokens:].reshape(-1, group_size * num_response_tokens)
        return torch.cat([x[::group_size, :num_prompt_tokens], responses], 1)

    valid, position_ids = join(attention_mask), (attention_mask.cumsum(1) - 1).clamp(min=0)
    length = int(valid.sum(1).max())
    order = valid.sort(dim=1, descending=True, stable=True).indices[:, :length]  # padding goes to the end, and is cut
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
    inputs = {name: join(x).gather(1, order) for name, x in inputs.items()}  # (N,S)
    if group_size > 1:
        owner = (number % group_size + 1).repeat(1, input_ids.shape[1])  # which response of its group a token is of
        owner[:, :num_prompt_tokens] = 0  # the prompt is of all
        owner = join(owner).gather(1, order)
        sees = (owner[:, None, :] == 0) | (owner[:, None, :] == owner[:, :, None])  # (N,S,S): query, key
        inputs["attention_mask"] = (sees.tril() & inputs["attention_mask"].bool()[:, None, :])[:, None]
    places = (valid.cumsum(1) - 1).clamp(min=0)  # where each token has gone
    prompt_end = places[:, num_prompt_tokens - 1].repeat_interleave(group_size)[:, None]
    places = torch.cat([prompt_end, places[:, num_prompt_tokens:].reshape(num_rows, -1)[:, :-1]], 1)  # (B,T)
    return inputs, ((number // group_size).expand_as(places), places)


def response_states(backbone, input_ids, attention_mask, num_response_tokens, group_size=1):  # [1.7]
    """Hidden states (n,H) from which the n response tokens that are no padding are predicted, row by row.

    The one shift: the state at position t knows the tokens up to t and predicts token t+1. Padding may be anywhere.
    With group_size > 1 the prompt that so many rows share goes through the backbone once.
    """
    inputs, before = to_sequences(input_ids, attention_mask, num_response_tokens, group_size)
    valid = attention_mask[:, -num_response_tokens:].bool()
    return backbone(**inputs, use_cache=False).last_hidden_state[before[0][valid], before[1][valid]]


def can_join(model):
    """Whether the model gives the same in the joined form; not with attention in windows, for example."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or getattr(config, "sliding_window", None):
        return False
    probe = torch.tensor([[0, 1, 2, 3, 4], [0, 1, 4, 3, 2]], device=model.device)
    with torch.no_grad():
        alone, joined = (response_states(model.base_model, probe, torch.ones_like(probe), 3, size) for size in (1, 2))
    return bool((alone - joined).abs().max() < 1e-4 * alone.abs().max())


class Policy(nn.Module):
    """Log-probs of response tokens under a causal language model. DDP, FSDP wrap it: gradients go through forward."""

    def __init__(self, model, entropy_needs_grad=False):
        super().__init__()
        self.model = model
        self.entropy_needs_grad = entropy_needs_grad
        self.chunk_elements = 2**26  # [7.13] logits at a time: 256 MiB in fp32, 1 GiB with what is made of them

    def forward(self, input_ids, attention_mask, num_response_tokens, temperature, group_size=1):
        """input_ids, attention_mask (B,L) -> logprobs, entropy (B,T) in fp32 of the last T = num_response_tokens.

        0 on padding. group_size: so many rows at a time answer one prompt, see `to_sequences`.
        """
        task = input_ids, attention_mask, num_response_tokens, group_size
        hidden = response_states(self.model.base_model, *task)  # (n,H): there are no logits of padding
        valid = attention_mask[:, -num_response_tokens:].bool()  # (B,T)
        labels = input_ids[:, -num_response_tokens:][valid]  # (n,)
        head = self.model.get_output_embeddings()

        def chunk_forward(hidden, labels):
            logits = head(hidden).float() / temperature  # [6.10] (n,V): exists for some tokens only, never leaves
            all_logprobs = logits.log_softmax(-1)
            logprobs = all_logprobs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
            with nullcontext() if self.entropy_needs_grad else torch.no_grad():
                entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
            return logprobs, entropy

        size = max(1, self.chunk_elements // self.model.config.vocab_size)
        if size >= len(labels):
            results = chunk_forward(hidden, labels)
        else:  # several chunks: their logits are recomputed in the backward pass instead of kept
            chunks = zip(hidden.split(size), labels.split(size))
            parts = [checkpoint(chunk_forward, h, y, use_reentrant=False) for h, y in chunks]
            results = (torch.cat(part) for part in zip(*parts))
        return tuple(torch.zeros(valid.shape, device=x.device).masked_scatter(valid, x) for x in results)


class RewardModel:
    """--reward-model as a reward function: the score that a sequence classifier with one label gives to a response.

    It sees the chat through the chat template of its own tokenizer or, if that has none, prompt and response as text.
    """

    def __init__(self, name, device):
        with blamed_on(f"--reward-model {name}: no folder or hub id with a tokenizer"):
            self.tokenizer = AutoTokenizer.from_pretrained(name, padding_side="right")
        model, info = load_model("--reward-model", name, transformers.AutoModelForSequenceClassification)
        wrong = [f"no sequence classifier, it lacks {key}" for key in sorted(info["missing_keys"])]
        if model.config.num_labels != 1:
            wrong.append(f"it tells {model.config.num_labels} classes apart, and a reward is one number: one label")
        if wrong:
            raise UserError(f"--reward-model {name}: {wrong[0]}")
        model.eval().requires_grad_(False)
        self.pipeline = transformers.pipeline("text-classification", model, tokenizer=self.tokenizer, device=device)

    def __call__(self, prompts, responses, answers, messages):
        use_chat = self.tokenizer.chat_template is not None  # [8.4]
        texts = [prompt + response for prompt, response in zip(prompts, responses)]
        if use_chat:
            chats = [[*chat, {"role": "assistant", "content": text}] for chat, text in zip(messages, responses)]
            texts = [self.tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
        lengths = [len(ids) for ids in self.tokenizer(texts, add_special_tokens=not use_chat)["input_ids"]]
        limit = getattr(self.pipeline.model.config, "max_position_embeddings", None) or max(lengths)
        if max(lengths) > limit:
            raise UserError(f"--reward-model: it has {limit} positions, prompt and response are {max(lengths)} tokens")
        order = sorted(range(len(texts)), key=lengths.__getitem__)  # similar lengths together
        # Decoders find the last token of a row by the padding behind it; without padding, rows go one by one.
        pads = self.tokenizer.pad_token_id, self.pipeline.model.config.pad_token_id
        size = 16 if pads[0] is not None and pads[0] == pads[1] else 1
        options = {"function_to_apply": "none", "add_special_tokens": not use_chat, "batch_size": size}
        scores = {i: y["score"] for i, y in zip(order, self.pipeline([texts[i] for i in order], **options))}
        return [scores[i] for i in range(len(texts))]


def collect_eos_ids(model, tokenizer):
    """Sorted union of the EOS ids of tokenizer, config and generation config: any of them ends a response."""
    sources = (tokenizer.eos_token_id, model.config.eos_token_id, model.generation_config.eos_token_id)
    return sorted({i for ids in sources if ids is not None for i in (ids if isinstance(ids, list) else [ids])})


# ---------------------------------------------------------------------------------------------------------------------
# Math
# ---------------------------------------------------------------------------------------------------------------------


def all_reduce(tensor, op=dist.ReduceOp.SUM):
    """Reduces `tensor` in place over all ranks, if there are several; returns it."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(tensor, op)
    return tensor


def make_response_mask(responses, eos_ids):  # [1.6]
    """responses (B,T) -> (B,T) bool: true up to and including the first EOS id; all true in a row that has none."""
    is_eos = torch.isin(responses, torch.tensor(eos_ids, device=responses.device, dtype=responses.dtype))
    return is_eos.cumsum(1) - is_eos.long() == 0


def masked_mean(x, mask, dim=None):
    """Mean of x where mask is true, over all of it or along dim, whatever (NaN too) stands elsewhere; 0 if empty."""
    return torch.where(mask, x, 0).sum(dim) / mask.sum(dim).clamp(min=1)


def global_moments(x, mask):
    """(mean, unbiased variance, count) of x where mask is true, over all ranks; every rank must call it.

    Two passes (E[x^2] - E[x]^2 cancels in floating point); variance 0 for fewer than two entries.
    """
    x = torch.where(mask, x, 0).double()
    total = all_reduce(torch.stack([x.sum(), mask.sum().double()]))
    mean = total[0] / total[1].clamp(min=1)
    squares = all_reduce(torch.where(mask, x - mean, 0).square().sum())
    return mean, squares / (total[1] - 1).clamp(min=1), total[1]


def masked_whiten(x, mask):  # [2.7]
    """x (B,T) shifted and scaled to mean 0, variance 1 over the mask on all ranks; 0 outside. Every rank must call it.

    Unbiased variance, eps 1e-8; all zeros when fewer than two tokens are valid.
    """
    mean, variance, count = global_moments(x, mask)
    whitened = (torch.where(mask, x, 0) - mean) * torch.rsqrt(variance + 1e-8)
    return torch.where(mask & (count > 1), whitened, 0).to(x.dtype)


def constant_groups(scores, group_size):
    """scores (B,), groups contiguous -> (N,) bool: the responses of the group all score the same, rounding aside."""
    groups = scores.view(-1, group_size)
    spread = groups.amax(1) - groups.amin(1)
    return spread <= 1e-6 * groups.abs().amax(1).clamp(min=1)  # [5.4]


def group_advantages(scores, group_size, estimator):
    """Advantages (B,) of responses with these scores (B,), groups contiguous; exactly 0 in a constant group.

    grpo: (s - mean) / (std + 1e-6), mean and unbiased std those of the group. dr_grpo: s - mean. rloo: s - mean of the
    others. reinforce_pp: s - mean, or s in groups of one, whitened over the responses of all ranks (every rank must
    call it; verl whitens over tokens). Raises ValueError for groups of one where there is nothing to compare with.
    """
    if group_size == 1 and estimator != "reinforce_pp":
        raise ValueError(f"{estimator} needs groups of two or more")
    groups = scores.view(-1, group_size)  # (N,G)
    advantages = groups - groups.mean(1, keepdim=True)  # [5.1]
    if estimator == "grpo":
        advantages = advantages / (groups.std(1, keepdim=True) + 1e-6)  # [5.3]
    elif estimator == "rloo":  # s - (sum - s) / (G - 1)
        advantages = advantages * group_size / (group_size - 1)
    elif estimator == "reinforce_pp":
        advantages = groups if group_size == 1 else advantages  # [5.5]
        advantages = masked_whiten(advantages, torch.ones_like(advantages, dtype=torch.bool))
    elif estimator != "dr_grpo":
        raise ValueError(f"unknown estimator {estimator!r}")
    if group_size > 1:
        advantages = torch.where(constant_groups(scores, group_size)[:, None], 0, advantages)
    return advantages.flatten()


def overlong_penalties(lengths, max_response_length, buffer, penalty):
    """DAPO's soft overlong punishment (2503.14476, eq. 13) of lengths (B,), to be subtracted from the scores.

    0 until the last `buffer` tokens, then rising linearly to `penalty` at the full length; always 0 without a buffer.
    """
    return penalty * (lengths - (max_response_length - buffer)).clamp(min=0) / max(buffer, 1)  # [8.5]


def sequence_level(logprobs, old_logprobs, mask):
    """Log-probs (B,T) whose ratio to old_logprobs is, at every token, its geometric mean over the response.

    GSPO (2507.18071, eq. 7). In `policy_loss`, with one advantage per response and the mean of means over sequences
    (seq-mean-token-mean), it gives the paper's loss and gradient.
    """
    mean_log_ratio = masked_mean(logprobs - old_logprobs, mask, 1)  # [5.8] (B,)
    return torch.where(mask, old_logprobs + mean_log_ratio[:, None], 0)


def kl_penalty(logprobs, ref_logprobs, kind):  # [4.1]
    """Per-token estimate of KL(pi || pi_ref) from tokens sampled by pi (Schulman, "Approximating KL Divergence").

    With d = logprobs - ref_logprobs: k1 = d, abs = |d|, k2 = d^2/2, k3 = exp(-d) - 1 + d. A `+` keeps the value and
    takes the gradient of k2, the one whose expectation is the gradient of the KL. k3 goes on as its tangent beyond
    -d = 5: finite, with the right sign, never flat (a clamp would kill the gradient just where the policy is far off).
    """
    d = logprobs - ref_logprobs
    if kind in ("k1+", "k3+"):
        k2 = d.square() / 2  # [4.4]
        return kl_penalty(logprobs, ref_logprobs, kind[:2]).detach() + (k2 - k2.detach())
    if kind == "k1":
        return d
    if kind == "abs":
        return d.abs()
    if kind == "k2":
        return d.square() / 2
    if kind == "k3":
        x = (-d).clamp(max=5.0)  # [4.3]
        return x.exp() - x - 1 + (math.exp(5.0) - 1) * (-d - x)
    raise ValueError(f"unknown KL kind {kind!r}")


def policy_loss(logprobs, old_logprobs, advantages, clip_low, clip_high, dual_clip=None):
    """Per-token clipped surrogate (1707.06347, eq. 7), to be minimised; (B,T) or any shape.

    dual_clip c > 1 (1912.09729): where the advantage is negative the loss is at most c*|A|. The log-ratio is clamped to
    +-20 so that exp stays finite.
    """
    ratio = (logprobs - old_logprobs).clamp(-20.0, 20.0).exp()  # [3.12]
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))  # [3.3]
    if dual_clip is not None:
        losses = torch.where(advantages < 0, torch.minimum(losses, -advantages * dual_clip), losses)  # [3.11]
    return losses


def aggregate(losses, mask, mode, num_tokens, num_sequences, max_response_length):
    """Token losses (B,T) of one micro-batch -> its share of the optimizer step's loss, a scalar.

    num_tokens and num_sequences (rows with at least one valid token) are those of the whole step, all micro-batches and
    ranks: the shares add up to the same loss however the step is cut. A step without tokens gives 0.
    """
    losses = torch.where(mask, losses, 0)
    if mode == "token-mean":  # [5.6]
        return losses.sum() / max(num_tokens, 1)
    per_sequence = losses.sum(1)  # (B,)
    if mode == "seq-mean-token-mean":
        per_sequence = masked_mean(losses, mask, 1)
    elif mode == "seq-mean-token-sum-norm":
        per_sequence = per_sequence / max_response_length
    elif mode != "seq-mean-token-sum":
        raise ValueError(f"unknown aggregation {mode!r}")
    return per_sequence.sum() / max(num_sequences, 1)


def rollout_weights(old_logprobs, rollout_logprobs, mask, level, cap):
    """Truncated importance weights pi_old / pi_rollout (B,T), at most `cap`, for a sampler that is not quite pi_old.

    level token: of every token; sequence: of the whole response, at each of its tokens. Detached, 0 outside the mask.
    """
    log_ratio = torch.where(mask, old_logprobs - rollout_logprobs, 0).detach()
    if level == "sequence":
        log_ratio = log_ratio.sum(1, keepdim=True).expand_as(log_ratio)  # [6.5]
    elif level != "token":
        raise ValueError(f"unknown level {level!r}")
    return torch.where(mask, log_ratio.clamp(-20, 20).exp().clamp(max=cap), 0)  # [6.6]


class AdaptiveKL:
    """Proportional controller of the KL coefficient (1909.08593, section 2.2): up when the KL is above the target."""

    def __init__(self, coef, target, horizon):
        if target <= 0 or horizon <= 0:
            raise ValueError("target and horizon must be positive")
        self.coef, self.target, self.horizon = coef, target, horizon

    def update(self, kl, n):
        """kl: token mean of the batch that used `coef`; n: its number of responses, 0.2*n below the horizon."""
        if 0.2 * n >= self.horizon:
            raise ValueError("horizon must be more than 0.2 times the responses per update")
        self.coef *= 1 + max(-0.2, min(0.2, kl / self.target - 1)) * n / self.horizon  # [4.8]


def schedule(kind, iteration, total_iterations, warmup_iterations):
    """Factor on the learning rates in iteration 1, 2, ...: linear warm-up, then constant or falling towards 0."""
    if iteration <= warmup_iterations:
        return iteration / warmup_iterations
    progress = (iteration - 1 - warmup_iterations) / max(1, total_iterations - warmup_iterations)
    return {"constant": 1.0, "linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress))}[kind]


# ---------------------------------------------------------------------------------------------------------------------
# Generate and forward
# ---------------------------------------------------------------------------------------------------------------------


def left_pad(sequences, pad_id, device):
    """Token lists -> queries (N,P) and their mask (N,P) bool, padded on the left."""
    width = max(len(s) for s in sequences)
    queries = torch.tensor([[pad_id] * (width - len(s)) + s for s in sequences], device=device)
    query_mask = torch.tensor([[False] * (width - len(s)) + [True] * len(s) for s in sequences], device=device)
    return queries, query_mask


def decode(tokenizer, responses, response_mask):
    """Texts of responses (B,T) without special tokens; what follows the EOS is no text, whatever fills it."""
    rows = [row[:n] for row, n in zip(responses.tolist(), response_mask.sum(1).tolist())]
    return tokenizer.batch_decode(rows, skip_special_tokens=True)


def sample_tokens(logits, uniforms, temperature, top_p, top_k):
    """logits (B,V), uniforms (B,) in [0,1) -> tokens (B,), logprobs (B,): the inverse of the cumulative distribution.

    logprobs are of the distribution sampled from, top-p and top-k included; temperature 0 takes the likeliest token.
    """
    logits = logits.float()
    if temperature == 0:
        return logits.argmax(-1), logits.log_softmax(-1).amax(-1)
    logits = logits / temperature
    if top_k > 0:
        logits = logits.masked_fill(logits < logits.topk(min(top_k, logits.shape[-1])).values[:, -1:], -torch.inf)
    if top_p < 1:
        probs, order = logits.softmax(-1).sort(-1, descending=True)
        beyond = probs.cumsum(-1) - probs >= top_p  # the likeliest token always stays
        logits = logits.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), -torch.inf)
    logprobs = logits.log_softmax(-1)
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)  # fp32 would lose the rare tokens of a large vocabulary
    tokens = torch.searchsorted(cumulative, (uniforms * cumulative[:, -1])[:, None], right=True)
    tokens = tokens.clamp(max=logits.shape[-1] - 1)  # (B,1)
    return tokens.squeeze(1), logprobs.gather(-1, tokens).squeeze(1)


class KVCache(transformers.DynamicCache):  # [11.4]
    """As attention computes: under autocast rotary embeddings make keys float32, and the cache twice as large."""

    def update(self, key_states, value_states, *args, **kwargs):
        return super().update(key_states.to(value_states.dtype), value_states, *args, **kwargs)


@torch.no_grad()
def generate(model, queries, query_mask, uniforms, eos_ids, pad_id, temperature=1.0, top_p=1.0, top_k=0):
    """Samples responses (B,T) with a KV cache, and their sampling log-probs (B,T); after its EOS a row is pad_id and 0.

    queries, query_mask (N,P), left-padded; uniforms (B,T) in [0,1), one per row and step: what a row becomes depends on
    its own noise alone, not on the process or the batch it is in. B is a multiple of N: the rows of one prompt are
    contiguous and share its prefill. The checkpoint's generation_config plays no part.
    """
    num_rows, max_new_tokens = uniforms.shape
    group_size = num_rows // len(queries)
    responses = queries.new_full((num_rows, max_new_tokens), pad_id)
    logprobs = torch.zeros(num_rows, max_new_tokens, device=queries.device)
    eos = torch.tensor(eos_ids, device=queries.device, dtype=torch.long)
    was_training = model.training
    model.eval()  # in train mode, gradient checkpointing would switch the KV cache off
    inputs = {"input_ids": queries, "attention_mask": query_mask.long(), "logits_to_keep": 1}
    cache = KVCache(config=model.config)
    position_ids = (query_mask.cumsum(1) - 1).clamp(min=0)
    output = model(**inputs, position_ids=position_ids, past_key_values=cache, use_cache=True)
    cache.batch_repeat_interleave(group_size)
    logits = output.logits[:, -1].repeat_interleave(group_size, 0)  # (B,V)
    mask = query_mask.long().repeat_interleave(group_size, 0)
    rows = torch.arange(num_rows, device=queries.device)  # which response each row of the shrinking batch writes
    alive = torch.ones_like(rows, dtype=torch.bool)
    for t in range(max_new_tokens):
        tokens, token_logprobs = sample_tokens(logits, uniforms[rows, t], temperature, top_p, top_k)
        responses[rows, t] = torch.where(alive, tokens, pad_id)
        logprobs[rows, t] = torch.where(alive, token_logprobs, 0)
        alive = alive & ~torch.isin(tokens, eos)
        num_alive = int(alive.sum())
        if num_alive == 0 or t == max_new_tokens - 1:
            break
        # [6.11] Finished rows leave, many at a time: dropping each at once would copy the cache in every step.
        if num_alive <= 0.9 * len(rows):
            kept = alive.nonzero().squeeze(1)
            cache.batch_select_indices(kept)
            rows, alive, tokens, mask = rows[kept], alive[kept], tokens[kept], mask[kept]
        mask = torch.cat([mask, mask.new_ones(len(rows), 1)], 1)
        inputs = {"input_ids": tokens[:, None], "attention_mask": mask, "position_ids": mask.sum(1, keepdim=True) - 1}
        output = model(**inputs, past_key_values=cache, use_cache=True)
        logits = output.logits[:, -1]
    model.train(was_training)
    return responses, logprobs


class MicroBatch(NamedTuple):
    """Rows that go through a model together, cut to their own widths; `x[mb.at]` is their part of a (B,T) tensor x."""

    at: tuple  # (rows (b,), slice of t response columns)
    inputs: tuple  # input_ids (b,p+t), attention_mask (b,p+t), t
    group_size: int  # so many rows at a time become one sequence, see to_sequences


def best_join(query_mask, response_mask, group_size, max_tokens, hidden_size):
    """How many responses to one prompt should share a sequence: the divisor of group_size with the least work.

    A token costs 24*hidden_size^2 operations in the linear parts of a layer, and 4*hidden_size in attention for every
    token of its sequence: as 6*hidden_size to the length. So long responses to short prompts stay apart. Every rank
    must call it.
    """
    prompts, responses = query_mask.sum(1), response_mask.sum(1)
    works, sizes = [], [size for size in range(1, group_size + 1) if group_size % size == 0]
    for size in sizes:
        lengths = prompts[::size] + responses.view(-1, size).sum(1)
        fits = size == 1 or lengths.max() <= max_tokens
        works.append((lengths * (6 * hidden_size + lengths)).sum().item() if fits else math.inf)
    works = all_reduce(torch.tensor(works, device=query_mask.device, dtype=torch.float64)).tolist()
    return min(zip(works, sizes))[1]


def pack(queries, query_mask, responses, response_mask, rows, max_tokens, group_size=1, max_padding=math.inf):
    """Deals `rows` out to micro-batches of at most max_tokens tokens, max_padding of them padding, longest first.

    Every group_size rows answer one prompt and are one sequence; one that is longer has a micro-batch of its own. Made
    once per iteration and used by every pass: log-probs change by up to 3e-6 with the rows beside them, and the
    ratio of an unchanged policy must be exactly 1.
    """
    prompts, answers = query_mask.sum(1).tolist(), response_mask.sum(1).tolist()
    groups = [list(rows[i : i + group_size]) for i in range(0, len(rows), group_size)]
    groups = [(prompts[group[0]] + sum(answers[row] for row in group), group) for group in groups]
    parts, width, padding = [], 0, 0
    for length, group in sorted(groups, key=lambda group: (-group[0], group[1])):
        padding += max(0, width - length)
        if parts and (len(parts[-1]) // group_size + 1) * width <= max_tokens and padding <= max_padding:
            parts[-1] += group
        else:
            parts.append(group)
            width, padding = length, 0
    microbatches = []
    for part in parts:  # at least one column: rows without a valid token take part as well
        p, t = max(1, *(prompts[row] for row in part)), max(1, *(answers[row] for row in part))
        index = torch.tensor(part, device=queries.device)
        prompt, response = (index, slice(queries.shape[1] - p, None)), (index, slice(t))
        input_ids = torch.cat([queries[prompt], responses[response]], 1)
        attention_mask = torch.cat([query_mask[prompt], response_mask[response]], 1).long()
        microbatches.append(MicroBatch(response, (input_ids, attention_mask, t), group_size))
    return microbatches


@torch.no_grad()
def forward_all(model, minibatches, response_mask, *extra):
    """What the model says of each token (a Policy: log-probs) for every micro-batch, as one (B,T); 0 if masked."""
    result = torch.zeros(response_mask.shape, device=response_mask.device)
    for mb in (mb for microbatches in minibatches for mb in microbatches):
        output = model(*mb.inputs, *extra, group_size=mb.group_size)
        result[mb.at] = output[0] if isinstance(output, tuple) else output
    return torch.where(response_mask, result, 0)


class Moments:
    """Means and standard deviations over masked entries: summed over micro-batches by `add`, over ranks by `reduce`."""

    def __init__(self, device):
        self.sums = defaultdict(lambda: torch.zeros(3, dtype=torch.float64, device=device))

    def add(self, name, x, mask=None):
        """x: any shape; mask: the same shape, bool, or None for all of x."""
        x = x.detach().double()
        mask = torch.ones_like(x, dtype=torch.bool) if mask is None else mask
        x = torch.where(mask, x, 0)
        self.sums[name] += torch.stack([mask.sum(), x.sum(), x.square().sum()])

    def reduce(self):
        """({name: mean}, {name: unbiased std}); every rank must call it, having added the same names."""
        names = sorted(self.sums)
        totals = all_reduce(torch.stack([self.sums[name] for name in names])).tolist()
        means = {name: total / max(n, 1) for name, (n, total, _) in zip(names, totals)}
        stds = {k: math.sqrt(max(0, sq - n * means[k] ** 2) / max(n - 1, 1)) for k, (n, _, sq) in zip(names, totals)}
        return means, stds


# ---------------------------------------------------------------------------------------------------------------------
# Evaluate and save
# ---------------------------------------------------------------------------------------------------------------------


def evaluate(model, tokenizer, rows, reward_function, args, accelerator, eos_ids, pad_id):
    """Scores every row once greedily and once sampled at temperature 1: (`Moments`, completions), this rank's share.

    The sampling noise of a row is the same in every evaluation, so that two evaluations differ by the model alone.
    """
    device, world_size = accelerator.device, accelerator.num_processes
    noise = torch.rand(len(rows), args.max_response_length, generator=generator("eval", args.seed), dtype=torch.float64)
    # Rows of similar length together: less padding. Dealt out, every row is scored exactly once.
    local = sorted(range(len(rows)), key=lambda i: len(rows[i]["input_ids"]))[accelerator.process_index :: world_size]
    moments, completions = Moments(device), []
    for name in ("eval/score", "eval/score_sampled", "eval/length_mean"):
        moments.add(name, torch.zeros(0, device=device))  # a rank may have no row, yet takes part in the sum
    for i in range(0, len(local), args.rollout_batch_size):
        index = local[i : i + args.rollout_batch_size]
        chunk = [rows[i] for i in index]
        queries, query_mask = left_pad([row["input_ids"] for row in chunk], pad_id, device)
        result = [{"prompt": row["prompt"], "answer": row["answer"]} for row in chunk]
        for name, temperature in (("score", 0.0), ("score_sampled", 1.0)):  # [8.13]
            uniforms = noise[index].to(device)
            with accelerator.autocast():
                responses, _ = generate(model, queries, query_mask, uniforms, eos_ids, pad_id, temperature)
            response_mask = make_response_mask(responses, eos_ids)
            texts = decode(tokenizer, responses, response_mask)
            scores = compute_scores(reward_function, chunk, texts)
            moments.add(f"eval/{name}", torch.tensor(scores, device=device))
            for entry, text, score in zip(result, texts, scores):
                entry.update({name.replace("score", "response"): text, name: score})
        moments.add("eval/length_mean", response_mask.sum(1))
        completions += result
    return moments, completions


def remove(path):
    """A file or a folder; a complete folder loses its name first, so that a killed process leaves none half removed."""
    if path.is_dir():
        shutil.rmtree(path if path.suffix == ".tmp" else path.rename(path.with_name(f".{path.name}.tmp")))
    else:
        path.unlink(missing_ok=True)


def flush(*paths):
    """Waits until files and folders are on the disk: after a power cut, too, what has a name is complete."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


@contextmanager
def written_whole(path):
    """Yields a temporary path that takes the name `path` once the block is done: what has the name is complete."""
    temporary, old = (path.with_name(f".{path.name}.{end}") for end in ("tmp", "old"))
    remove(temporary)  # of a run that was killed
    try:
        yield temporary
        flush(*temporary.rglob("*"), temporary)
        if path.is_dir():  # a folder cannot be renamed over a full one
            path.rename(old)
            temporary.rename(path)
            shutil.rmtree(old)
        else:
            temporary.replace(path)
        flush(path.parent)
    except BaseException:
        remove(temporary)  # a full disk gets its room back
        raise


def tidy(run_dir):
    """Removes what a killed run has left half written; what it was about to replace is there again."""
    for path in [*run_dir.rglob(".*.tmp"), *run_dir.rglob(".*.old")]:
        whole = path.with_name(path.name[1:-4])
        if path.suffix == ".old" and not whole.exists():
            path.rename(whole)
        else:
            remove(path)


def lock(run_dir):
    """Keeps other processes from writing into the run folder as long as this one holds what is returned."""
    file = open(run_dir / ".lock", "a+")  # noqa: SIM115 it stays open as long as it is locked
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.seek(0)
        owner = file.read() or "another process"
        raise UserError(f"the run folder {run_dir} is being written by {owner}: wait for it or stop it") from None
    file.truncate(0)
    print(f"process {os.getpid()} on {socket.gethostname()}", end="", file=file, flush=True)
    return file


def save_models(path, models, tokenizer, accelerator):
    """Plain transformers folders with the tokenizer: `models` maps a place inside `path` to the model saved there."""
    if accelerator.is_main_process:
        with written_whole(path) as folder:
            for place, model in models.items():
                accelerator.unwrap_model(model).model.save_pretrained(folder / place)
                tokenizer.save_pretrained(folder / place)


def trained_state(trainees):
    """{name: tensor} of weights and optimizer state in `trainees`, {name: (model, optimizer)}: shards, no copies."""
    state, options = {}, StateDictOptions(flatten_optimizer_state_dict=True)
    for name, (model, optimizer) in trainees.items():
        untouched = not optimizer.state
        tensors = get_optimizer_state_dict(model, optimizer, options=options)
        for slots in optimizer.state.values() if untouched else ():
            slots["step"].zero_()  # torch has made them by a step without gradients
        trained = {key: p.detach() for key, p in model.named_parameters() if p.requires_grad}  # tied weights come once
        state |= {f"{name}.{key}": value for key, value in (tensors | trained).items() if torch.is_tensor(value)}
    return state


@contextmanager
def checkpoint_errors():
    """Raises what a rank raised; torch wraps it in a class that is no Exception."""
    try:
        yield
    except dcp.CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None


def digest(x):
    """Fingerprint of a file, or of what can be written as JSON."""
    if not isinstance(x, Path):
        return hashlib.sha256(json.dumps(x, default=str).encode()).hexdigest()
    with open(x, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return hashlib.sha256(content).hexdigest()


def save_checkpoint(path, trainees, about, keep, accelerator):  # [7.16]
    """Each rank writes its part as safetensors, rank 0 the dictionary `about` as JSON; the newest `keep` stay."""
    with written_whole(path) if accelerator.is_main_process else nullcontext() as folder:
        folder = broadcast_object_list([folder])[0]
        with checkpoint_errors():
            writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
            dcp.save(trained_state(trainees), storage_writer=writer, no_dist=not dist.is_initialized())
        names = sorted(os.listdir(folder))[accelerator.process_index :: accelerator.num_processes]
        digests = gather_object([(name, digest(Path(folder, name))) for name in names])
        if accelerator.is_main_process:
            about = about | {"files": dict(digests)}
            (folder / "progress.json").write_text(json.dumps({"sha256": digest(about)} | about) + "\n")
    if accelerator.is_main_process:
        for old in sorted(path.parent.glob("step_*"))[:-keep]:
            remove(old)


def read_progress(path, record, data, accelerator):
    """How far the run had come, and a list of the flags in `record` that have changed since.

    Raises UserError where the run would not go on as the one that it was: data, or flags that made the weights.
    """
    with blamed_on(f"--resume {path}: its progress.json is damaged"):
        about = json.loads((path / "progress.json").read_text())
        if about.pop("sha256") != digest(about):
            raise ValueError("not as it was written")
    reached, saved, last = about["reached"], about["record"], about["reached"]["next_iteration"] - 1
    names = sorted(about["files"])[accelerator.process_index :: accelerator.num_processes]
    for name in names:  # of a missing file the reader would leave a hole, a changed one it would take
        with blamed_on(f"--resume {path}: its file {name} is missing or damaged"):
            if digest(path / name) != about["files"][name]:
                raise ValueError("not as it was written")
    own = {"resume", "output_dir", "run_name"}
    changed = {name: value for name, value in record.items() if value != saved.get(name) and name not in own}
    for name in changed:
        if name in ("model", "critic_model", "lora_rank", "reward", "reward_model", "seed"):
            flag, words = f"--{name.replace('_', '-')}", f"it was {saved.get(name)} and cannot become {changed[name]}"
            raise UserError(f"{flag}: {words} in one run; begin a new one with --model set to final/ or best/")
    if about["data"] != data:
        what = "prompts and answers are not those the run was trained and tested on"
        raise UserError(f"--resume {path}: {what}; the data, the tokenizer or a flag of the data has changed")
    if last > (limit := record["total_iterations"]):
        raise UserError(f"--total-iterations {limit}: the checkpoint {path} is of iteration {last}")
    return reached, [f"--{k.replace('_', '-')} {saved.get(k)} -> {v}" for k, v in changed.items()]


def load_checkpoint(path, trainees):
    """Reads a checkpoint, written by any number of processes, into the models and optimizers."""
    with checkpoint_errors():
        reader = dcp.HuggingFaceStorageReader(str(path))
        dcp.load(trained_state(trainees), storage_reader=reader, no_dist=not dist.is_initialized())


def save_completions(path, completions, accelerator):
    """Gathers the rows of all ranks and writes them as one .jsonl file."""
    completions = gather_object(completions)
    if accelerator.is_main_process:
        with written_whole(path) as file:
            file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in completions))


# ---------------------------------------------------------------------------------------------------------------------
# Main
# ---------------------------------------------------------------------------------------------------------------------


def check_args(args, world_size):
    """Raises UserError for flags that make no sense, alone or together."""
    sizes = "batch_size group_size minibatch_size microbatch_tokens ppo_epochs max_prompt_length max_response_length"
    sizes = f"{sizes} keep_checkpoints rollout_batch_size"
    positive = f"{sizes} is_cap temperature top_p max_grad_norm target_kl kl_target kl_horizon"
    counts = (
        "seed lora_rank total_iterations eval_every save_every warmup_iterations top_k max_resamples overlong_buffer"
    )
    coefs = "lr weight_decay clip_low clip_high entropy_coef kl_reward_coef kl_loss_coef overlong_penalty"
    checks = (
        (positive, "more than 0", lambda x: 0 < x < math.inf),
        (f"{counts} {coefs} missing_eos_penalty", "0 or more", lambda x: 0 <= x < math.inf),
        ("top_p", "at most 1", lambda x: x <= 1),
        ("dual_clip", "more than 1", lambda x: 1 < x < math.inf),
    )
    for names, words, holds in checks:
        for name in names.split():
            if getattr(args, name) is not None and not holds(getattr(args, name)):
                raise UserError(f"--{name.replace('_', '-')} is {getattr(args, name)}, it must be {words}")
    if args.chat_template not in (None, "none") and not Path(args.chat_template).is_file():
        raise UserError(f"--chat-template {args.chat_template}: there is no such file; give one, or none")
    if args.track == "wandb" and find_spec("wandb") is None:
        raise UserError("--track wandb needs wandb: pip install wandb")
    if "{prompt}" not in args.prompt_template:
        raise UserError(f"--prompt-template {args.prompt_template!r} lacks {{prompt}}: all prompts would be equal")
    if args.run_name is not None and (Path(args.run_name).name != args.run_name or args.run_name in ("", "..")):
        raise UserError(f"--run-name {args.run_name!r} must be a plain folder name; set the place with --output-dir")
    if args.resume is not None and args.total_iterations == 0:
        raise UserError(f"--resume {args.resume} goes on training: leave it out with --total-iterations 0")
    if args.resume == "auto" and args.run_name is None:
        raise UserError("--resume auto needs --run-name, the run to go on with")
    if args.resume not in (None, "auto") and not (Path(args.resume) / "progress.json").is_file():
        raise UserError(f"--resume {args.resume}: no checkpoint, a folder like runs/NAME/checkpoints/step_000010")
    if args.group_size == 1 and (args.estimator != "reinforce_pp" or args.dynamic_sampling):
        what = "--dynamic-sampling" if args.estimator == "reinforce_pp" else f"--estimator {args.estimator}"
        raise UserError(f"--group-size 1: {what} compares the responses to a prompt, it needs 2 or more (8 is usual)")
    if args.overlong_buffer > args.max_response_length:
        limit = f"--max-response-length {args.max_response_length}"
        raise UserError(f"--overlong-buffer {args.overlong_buffer} is the end of {limit}, it cannot be longer")
    unit, total = args.group_size * world_size, args.batch_size * args.group_size
    if args.minibatch_size % unit or total % args.minibatch_size:
        batch_size = max(1, round(args.batch_size / world_size)) * world_size
        num_responses = batch_size * args.group_size
        legal = [size for size in range(unit, num_responses + 1, unit) if num_responses % size == 0]
        nearest = min(legal, key=lambda size: abs(size - args.minibatch_size))
        what = f"--batch-size {args.batch_size} x --group-size {args.group_size} = {total} responses are not divisible"
        what += f" into minibatches of --minibatch-size {args.minibatch_size} shared by {world_size} processes"
        raise UserError(f"{what}; the nearest sizes that are: --batch-size {batch_size} --minibatch-size {nearest}")
    if args.kl_controller == "adaptive" and (args.kl_reward_coef == 0 or args.kl_horizon <= 0.2 * total):
        needs = f"a --kl-reward-coef above 0 and a --kl-horizon above 0.2 x {total} responses"
        raise UserError(f"--kl-controller adaptive needs {needs}, not {args.kl_reward_coef} and {args.kl_horizon}")


def main(args: Args, stop=None):
    """Trains, and returns the run folder. When the event `stop` is set it saves a checkpoint and returns early."""
    start_time, stop = time.time(), stop or threading.Event()
    num_local, num_gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
    if torch.cuda.is_available() and num_local > num_gpus:
        sys.exit(f"error: {num_local} processes for {num_gpus} GPUs; launch with --num_processes {num_gpus}")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    warnings.filterwarnings("ignore", message=".*(broadcast_buffers|gradient_checkpointing_enable).*")  # new names

    bf16_works = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    bf16 = args.dtype == "bfloat16" or (args.dtype == "auto" and bf16_works)
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),  # without this, two launched CPU processes would each believe to be alone
        mixed_precision="bf16" if bf16 else "no",
        log_with=None if args.track == "none" else args.track,
        project_dir=args.output_dir,  # the tracker is pointed at the run folder once all ranks know its name
        # Ranks run different numbers of forward passes, so none of them may send buffers around. Gradients lie where
        # they are exchanged: a copy would be 4 bytes per trained parameter.
        kwargs_handlers=[
            DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True),
            InitProcessGroupKwargs(timeout=timedelta(minutes=HANG_MINUTES)),
        ],
    )
    rank, world_size, device = accelerator.process_index, accelerator.num_processes, accelerator.device
    say = accelerator.print
    script = Path(__file__)
    run_name = args.run_name or f"{script.stem}-{args.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    run_dir = Path(args.output_dir) / broadcast_object_list([run_name])[0]

    # Everything that can be wrong with the input is found here, the cheap checks first.
    with errors_agreed(accelerator):
        check_args(args, world_size)
        resumed_from = Path(args.resume).absolute() if args.resume not in (None, "auto") else None
        run_dir = resumed_from.parents[1] if resumed_from else run_dir
        set_seed(args.seed)  # our own draws have their own streams; this is for reward files
        if run_dir.exists() and args.resume is None:
            raise UserError(f"the run folder {run_dir} exists; choose another --run-name, or --resume auto")
        with blamed_on(f"the run folder {run_dir} cannot be written"):
            held = lock(run_dir) if run_dir.exists() and accelerator.is_main_process else None
            if held is not None:
                tidy(run_dir)
    with errors_agreed(accelerator):
        if args.resume == "auto":
            resumed_from = max((run_dir / "checkpoints").glob("step_*"), default=None)
            if resumed_from is None and (run_dir / "final").exists():
                raise UserError(f"--resume auto: {run_dir} is finished and without checkpoints; name another run")
        base, adapter = find_base("--model", args.model)
        with blamed_on(f"--model {args.model}: no folder or hub id with a tokenizer"):
            own = cached_file(args.model, "tokenizer_config.json", _raise_exceptions_for_missing_entries=False)
            tokenizer = AutoTokenizer.from_pretrained(args.model if own or adapter is None else base)
        if args.chat_template not in (None, "none"):
            tokenizer.chat_template = Path(args.chat_template).read_text()
        only_evaluates = args.total_iterations == 0
        train_rows, train_summary = load_prompts(None if only_evaluates else args.dataset, "train", args, tokenizer)
        if not train_rows and not only_evaluates:
            raise UserError(f"dataset {train_summary}")
        eval_source = args.eval_dataset or default_eval_source(args.dataset)
        eval_source = args.dataset if only_evaluates and eval_source is None else eval_source
        eval_rows, eval_summary = load_prompts(eval_source, "test", args, tokenizer)
        if not eval_rows and (only_evaluates or args.eval_dataset):
            raise UserError(f"--eval-dataset {eval_summary}")
        reward_function = RewardModel(args.reward_model, device) if args.reward_model else load_reward(args.reward)
        sample = (train_rows or eval_rows)[:2]
        compute_scores(reward_function, sample, [""] * len(sample))  # [8.14] fails now rather than later
        model = load_causal_lm(args.model, args.lora_rank)
        lora = getattr(model, "peft_config", {}).get("default")
        if lora and args.lora_rank not in (0, lora.r):
            raise UserError(f"--lora-rank {args.lora_rank}: --model {args.model} is an adapter and has rank {lora.r}")
        if len(tokenizer) > (size := model.get_input_embeddings().weight.shape[0]):
            raise UserError(f"--model: it knows {size} tokens, its tokenizer has {len(tokenizer)}")
        longest = max(len(row["input_ids"]) for row in train_rows + eval_rows) + args.max_response_length
        limit = getattr(model.config, "max_position_embeddings", None) or longest
        if longest > limit:
            what = f"the longest prompt and --max-response-length {args.max_response_length} are {longest} tokens"
            raise UserError(f"{what}, --model {args.model} has {limit} positions: lower it or --max-prompt-length")
        record = asdict(args) | {"num_processes": world_size}
        data = digest([[(row["input_ids"], row["answer"]) for row in rows] for rows in (train_rows, eval_rows)])
        reached = {"next_iteration": 0, "num_drawn": 0, "best_score": -math.inf, "kl_coef": args.kl_reward_coef}
        changes = []
        if resumed_from is not None:
            reached, changes = read_progress(resumed_from, record, data, accelerator)
    eos_ids = collect_eos_ids(model, tokenizer)
    hidden_size, joins = model.config.get_text_config().hidden_size, args.group_size > 1 and can_join(model)
    # The pad id only fills: masks say what counts.
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0

    use_reference = args.total_iterations > 0 and (args.kl_reward_coef > 0 or args.kl_loss_coef > 0)  # [1.3]
    if use_reference and not lora:  # as the actor is now, never trained
        reference = Policy(copy.deepcopy(model)).requires_grad_(False)  # [4.11]
        for part in reference.modules() if bf16 else ():  # autocast computes these in bfloat16: so they are kept in it
            if isinstance(part, nn.Linear) and part.weight is not reference.model.get_input_embeddings().weight:
                part.to(torch.bfloat16)
        reference = accelerator.prepare_model(reference, evaluation_mode=True)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy = accelerator.prepare(Policy(model, args.entropy_coef > 0).train())
    if lora:  # the frozen weights are shared, see as_it_began
        reference = policy
    adamw = {"weight_decay": args.weight_decay, "fused": True}  # [11.4] fused: one kernel for all weights
    actor_optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, **adamw)
    kl_controller = AdaptiveKL(args.kl_reward_coef, args.kl_target, args.kl_horizon)
    trainees = {"actor": (accelerator.unwrap_model(policy), actor_optimizer)}
    if resumed_from is not None:
        what = f"--resume {resumed_from}: it does not fit the models or is damaged"
        with errors_agreed(accelerator), blamed_on(what):
            load_checkpoint(resumed_from, trainees)
    first, num_drawn, best_score, kl_controller.coef = reached.values()

    # Batch arithmetic. Prompts are dealt to the ranks like cards, so that minibatch k is the same set of rows, k*M to
    # (k+1)*M of the global batch, at any process count (of those each rank kept, with --dynamic-sampling).
    num_responses = args.batch_size * args.group_size
    num_minibatches = num_responses // args.minibatch_size
    local_size, local_groups = args.minibatch_size // world_size, args.batch_size // world_size
    num_steps = num_minibatches * args.ppo_epochs
    # With a single step and no reference, the forward pass of the update gives the old log-probs.
    on_policy = num_steps == 1 and not use_reference and args.old_logprobs == "recompute"  # [6.8]
    need_old_pass = not on_policy and args.old_logprobs != "rollout"

    with errors_agreed(accelerator), blamed_on(f"the run folder {run_dir} cannot be written"):
        if accelerator.is_main_process:
            (run_dir / "completions").mkdir(parents=True, exist_ok=True)
            held = held or lock(run_dir)
            if script.resolve().parent != run_dir.resolve():
                shutil.copy(script, run_dir)
            versions = {m.__name__: m.__version__ for m in (torch, transformers, accelerate, datasets)}
            (run_dir / "args.json").write_text(json.dumps(record | {"versions": versions}, indent=1) + "\n")
            # What came after the checkpoint is done once more. metrics.jsonl has a line per iteration.
            for later in (run_dir / "checkpoints").glob("step_*"):
                if resumed_from is None or later > resumed_from:
                    remove(later)
            lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)[:first] if first else []
            if len(lines) < first:
                raise UserError(f"{run_dir}/metrics.jsonl has {len(lines)} lines, the checkpoint is after {first}")
            with written_whole(run_dir / "metrics.jsonl") as file:
                file.write_text("".join(lines))
    accelerator.project_configuration.logging_dir = str(run_dir)
    wandb = {"name": run_dir.name, "dir": str(run_dir), "config": asdict(args), "id": run_dir.name, "resume": "allow"}
    with errors_agreed(accelerator), blamed_on(f"--track {args.track} cannot start"):
        project = "tensorboard" if args.track == "tensorboard" else script.stem
        accelerator.init_trackers(project, None, {"wandb": wandb, "tensorboard": {"purge_step": first}})

    actor_size = sum(p.numel() for p in policy.parameters())
    num_trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    copied = sum(p.numel() * p.element_size() for p in reference.parameters()) if use_reference and not lora else 0
    gib = (4 * actor_size + copied + 12 * num_trained) / 2**30
    say(f"{script.name}: {world_size} process(es) on {device.type}, {'bfloat16 autocast' if bf16 else 'float32'}")
    say(f"  actor      {args.model}: {actor_size:,} parameters, EOS ids {eos_ids or 'none, responses never end'}")
    kind = f"the actor with {'the adapter it began with' if adapter else 'its adapter switched off'}"
    kind = kind if lora else "frozen copy of the actor"
    say(f"  reference  {kind if use_reference else 'none, no KL is asked for'}")
    say(f"  memory     {gib:.2f} GiB of model state per device: 16 bytes for each of {num_trained:,} trained", end="")
    say(f" parameters{f' (LoRA, rank {lora.r})' if lora else ''}, {'2 or ' if bf16 else ''}4 for a frozen one")
    say(f"  train      {train_summary}")
    say(f"  eval       {eval_summary}{'' if eval_rows else ', name some by --eval-dataset'}")
    say(f"  reward     {args.reward_model or args.reward}")
    say(f"  batch      {args.batch_size} prompts x {args.group_size} = {num_responses} responses per iteration")
    say(f"  loss       {args.estimator}, {args.loss_agg}, {args.importance_level} ratio, ", end="")
    say(f"clip -{args.clip_low} +{args.clip_high}, dynamic sampling {'on' if args.dynamic_sampling else 'off'}")
    say(f"  steps      {num_minibatches} minibatches of {args.minibatch_size} ({local_size} per process)", end="")
    say(f" x {args.ppo_epochs} epoch(s) = {num_steps} optimizer steps per iteration")
    if num_steps == 1 and args.old_logprobs != "rollout":
        say("  note       one minibatch, one epoch: the ratio is always 1 and clipping cannot fire")  # [12.3]
    if args.group_size > 1 and not joins:
        say("  note       attention of this kind of model: a prompt is computed anew for each of its responses")
    if args.top_p < 1 or args.top_k > 0:  # [6.9]
        # [12.10]
        say("  warning    top-p/top-k truncate what is sampled but not the log-probs: ratio or KL are biased")
    if args.kl_reward_coef > 0 and args.estimator == "grpo":  # [5.9]
        say("  warning    grpo divides by the group's std: where scores tie, the KL in the reward decides, however")
        say("             small its coefficient; prefer --kl-loss-coef, or --estimator dr_grpo or rloo")
    if args.kl_loss_coef > 0 and args.kl_loss_kind == "k1":
        say("  warning    k1 in the loss has zero expected gradient: noise, and no pull to the reference")
    if args.kl_reward_coef > 0 and args.kl_reward_kind not in ("k1", "k1+"):
        say("  warning    in the reward only k1 pulls to the reference: others vanish near it or lose the sign")
    if args.save_every:
        say(f"  save       every {args.save_every} iterations {12 * num_trained / 2**30:.2f} GiB", end="")
        say(f", the newest {args.keep_checkpoints} checkpoints are kept")
    if resumed_from is not None:
        say(f"  resume     {resumed_from}; changed: {', '.join(changes) or 'no flag'}")
    elif args.resume is not None:
        say(f"  resume     {run_dir} has no checkpoint: from the beginning")
    say(f"  run folder {run_dir}", flush=True)

    @contextmanager
    def phase(name):
        begin = time.perf_counter()
        yield
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds[f"time/{name}"] += time.perf_counter() - begin

    def should_stop():
        return all_reduce(torch.tensor(float(stop.is_set()), device=device)).item() > 0

    @contextmanager
    def writing(path):
        with errors_agreed(accelerator), blamed_on(f"{path} cannot be written, mend it and go on with --resume"):
            yield path

    def save():
        path, begin = run_dir / "checkpoints" / f"step_{reached['next_iteration'] - 1:06d}", time.perf_counter()
        with writing(path):
            if accelerator.is_main_process:
                flush(run_dir / "metrics.jsonl")
            about = {"reached": reached, "record": record, "data": data}
            save_checkpoint(path, trainees, about, args.keep_checkpoints, accelerator)
        if accelerator.is_main_process:
            size = sum(file.stat().st_size for file in path.iterdir()) / 2**20
            progress.write(f"saved {path} ({size:.0f} MiB in {time.perf_counter() - begin:.1f} s)")

    finished = False
    progress = tqdm(total=args.total_iterations, initial=max(0, first - 1), dynamic_ncols=True, file=sys.stdout)
    for iteration in range(first, args.total_iterations + 1):  # iteration 0 only evaluates
        seconds, metrics, moments = defaultdict(float), {}, Moments(device)
        # Only a reward file can draw from the global streams; they begin anew, so that no checkpoint has to hold them.
        set_seed(generator("global", args.seed, iteration, rank).initial_seed() % 2**32)
        debug = run_dir / "debug" / f"step_{iteration:06d}_rank_{rank}.jsonl"
        evaluating = iteration in (0, args.total_iterations) or (args.eval_every and iteration % args.eval_every == 0)

        if iteration > 0:
            # Phases 1 and 2 once, or with --dynamic-sampling until every rank has its share of groups with a signal.
            rows, texts, parts = [], [], []
            noise = generator("rollout", args.seed, iteration)  # goes on from one rollout to the next
            for _ in range(1 + args.max_resamples if args.dynamic_sampling else 1):
                # 1. Rollout: this rank's prompts, group_size responses each.
                with phase("rollout"):
                    batch = draw_prompts(train_rows, num_drawn, args.batch_size, args.seed)[rank::world_size]  # [7.2]
                    num_drawn += args.batch_size
                    drawn = [row for row in batch for _ in range(args.group_size)]
                    queries, query_mask = left_pad([row["input_ids"] for row in batch], pad_id, device)  # [1.10] (N,P)
                    # Noise of the whole global batch, of which each rank takes its rows: the same at any process count.
                    shape = (args.batch_size, args.group_size, args.max_response_length)
                    uniforms = torch.rand(shape, generator=noise, dtype=torch.float64)
                    uniforms = uniforms[rank::world_size].to(device)  # [7.3] (N,G,T)
                    actor = accelerator.unwrap_model(policy).model
                    size = max(1, args.rollout_batch_size // args.group_size)  # prompts at a time
                    options = eos_ids, pad_id, args.temperature, args.top_p, args.top_k
                    chunks = zip(queries.split(size), query_mask.split(size), uniforms.split(size))
                    with accelerator.autocast():
                        rollouts = [generate(actor, q, m, u.flatten(0, 1), *options) for q, m, u in chunks]
                    responses, rollout_logprobs = (torch.cat(part) for part in zip(*rollouts))  # (B,T)
                    response_mask = make_response_mask(responses, eos_ids)  # (B,T)
                    lengths = response_mask.sum(1)  # (B,)
                    ended = torch.isin(responses, torch.tensor(eos_ids, device=device, dtype=torch.long)).any(1)  # (B,)

                # 2. Reward: one score per response.
                drawn_texts = decode(tokenizer, responses, response_mask)
                with phase("reward"), errors_agreed(accelerator), batch_kept(debug, drawn, drawn_texts):
                    # [8.1]
                    scores = torch.tensor(compute_scores(reward_function, drawn, drawn_texts), device=device)  # (B,)
                    # [5.7]
                    constant = constant_groups(scores, args.group_size)  # (N,) by the task alone: length is no signal
                    scores = scores - args.missing_eos_penalty * ~ended
                    overlong = args.max_response_length, args.overlong_buffer, args.overlong_penalty
                    scores = scores - overlong_penalties(lengths, *overlong)
                # What the policy does is told by all it sampled, whatever is kept.
                moments.add("reward/mean", scores)
                moments.add("response/length_mean", lengths)
                moments.add("response/truncated_frac", ~ended)
                if args.group_size > 1:
                    moments.add("group/zero_std_frac", constant)
                kept = ~(constant & args.dynamic_sampling).repeat_interleave(args.group_size)  # [8.7] (B,)
                rows += compress(drawn, kept.tolist())
                texts += compress(drawn_texts, kept.tolist())
                parts.append([x[kept] for x in (responses, response_mask, ended, rollout_logprobs, scores)])
                # All ranks go by the one that has fewest groups, so that each takes the same number of steps.
                num_found = len(rows) // args.group_size
                num_groups = all_reduce(torch.tensor(num_found, device=device), dist.ReduceOp.MIN).item()
                if num_groups >= local_groups:
                    break
            if num_groups == 0:
                with writing(run_dir / "final") as path:
                    save_models(path, {".": policy}, tokenizer, accelerator)
                what = f"iteration {iteration}: {len(parts)} rollouts of {args.batch_size} prompts left a process"
                what += f" without a group whose responses score differently; the model so far is in {run_dir}/final"
                with errors_agreed(accelerator):
                    raise UserError(f"{what}; change reward, data or --temperature, or raise --max-resamples")
            # From here on B, and every name, is of what is kept; the surplus goes.
            num_groups = min(num_groups, local_groups)
            num_rows = num_groups * args.group_size
            rows, texts = rows[:num_rows], texts[:num_rows]
            responses, response_mask, ended, rollout_logprobs, scores = (torch.cat(p)[:num_rows] for p in zip(*parts))
            metrics |= {"group/generated": len(parts) * args.batch_size, "group/used": num_groups * world_size}
            metrics["group/surplus"] = all_reduce(torch.tensor(num_found - num_groups, device=device)).item()

            # 3. Log-probs of the policy that sampled and of the reference, by the same forward pass as in training.
            with phase("logprobs"):
                queries, query_mask = left_pad([row["input_ids"] for row in rows], pad_id, device)  # (B,P)
                lengths = response_mask.sum(1)  # (B,)
                tokens = queries, query_mask, responses, response_mask
                shares = [range(len(rows))[i : i + local_size] for i in range(0, len(rows), local_size)]
                # On a CPU 128 tokens of padding cost about as much as a pass, on a GPU a pass costs thousands.
                max_padding = 128 if device.type == "cpu" else math.inf  # [11.4]
                sizes = args.group_size if joins else 1, args.microbatch_tokens, hidden_size
                joined = best_join(query_mask, response_mask, *sizes)
                # [3.2]
                minibatches = [pack(*tokens, share, args.microbatch_tokens, joined, max_padding) for share in shares]
                # Responses and tokens of every optimizer step, over all ranks: the denominators of the losses.
                step_sequences = [len(share) * world_size for share in shares]
                step_tokens = all_reduce(torch.stack([lengths[share].sum() for share in shares])).tolist()  # [7.4]
                old_logprobs = rollout_logprobs  # [6.2] (B,T)
                if need_old_pass:
                    old_logprobs = forward_all(policy, minibatches, response_mask, args.temperature)  # [3.1]
                ref_logprobs = old_logprobs  # without a reference every KL is 0
                if use_reference:
                    with as_it_began(accelerator.unwrap_model(reference).model):
                        ref_logprobs = forward_all(reference, minibatches, response_mask, args.temperature)
                if args.old_logprobs == "corrected":
                    correction = rollout_logprobs, response_mask, args.is_level, args.is_cap
                    weights = rollout_weights(old_logprobs, *correction)  # (B,T)
                    moments.add("rollout/weight_mean", weights, response_mask)
                    moments.add("squared weights", weights.square(), response_mask)

            # 5. Token rewards, and one advantage for all tokens of a response.
            with phase("advantages"):
                # [4.5]
                rewards = -kl_controller.coef * kl_penalty(old_logprobs, ref_logprobs, args.kl_reward_kind)  # (B,T)
                rewards[range(len(rows)), lengths - 1] += scores  # [4.7] on the last valid token, EOS or not
                advantages = group_advantages(rewards.sum(1), args.group_size, args.estimator)[:, None]
                advantages = torch.where(response_mask, advantages, 0)  # [5.2] (B,T)
                moments.add("advantage/mean", advantages, response_mask)

            with errors_agreed(accelerator), batch_kept(debug, rows, texts, scores):
                check_finite(old_logprobs=old_logprobs, ref_logprobs=ref_logprobs, advantages=advantages)
            if should_stop():  # the iteration is abandoned: no weight has moved in it
                break

            # The optimizer steps: every epoch shuffles the minibatches, alike on all ranks, and never their rows.
            stream = generator("minibatches", args.seed, iteration)
            shuffles = [torch.randperm(len(minibatches), generator=stream).tolist() for _ in range(args.ppo_epochs)]
            steps = [k for shuffle in shuffles for k in shuffle]  # [3.7]
            factor = schedule(args.lr_schedule, iteration, args.total_iterations, args.warmup_iterations)
            actor_optimizer.param_groups[0]["lr"] = args.lr * factor

            # 6. Actor update.
            ratio_max = torch.zeros((), device=device)
            with phase("actor"):
                for number, k in enumerate(steps):
                    step_loss, step_kl = torch.zeros(2, device=device)
                    for i, mb in enumerate(minibatches[k]):
                        mb_mask, mb_advantages = response_mask[mb.at], advantages[mb.at]  # (b,t)
                        last = i == len(minibatches[k]) - 1  # ranks exchange gradients once per step
                        with nullcontext() if last else accelerator.no_sync(policy):  # [7.5]
                            mb_logprobs, mb_entropy = policy(*mb.inputs, args.temperature, mb.group_size)
                            mb_logprobs, mb_entropy = (torch.where(mb_mask, x, 0) for x in (mb_logprobs, mb_entropy))
                            mb_old_logprobs = mb_logprobs.detach() if on_policy else old_logprobs[mb.at]  # [6.8]
                            mb_ratio_logprobs = mb_logprobs
                            if args.importance_level == "sequence":
                                mb_ratio_logprobs = sequence_level(mb_logprobs, mb_old_logprobs, mb_mask)
                            clips = args.clip_low, args.clip_high, args.dual_clip
                            mb_losses = policy_loss(mb_ratio_logprobs, mb_old_logprobs, mb_advantages, *clips)
                            if args.old_logprobs == "corrected":
                                mb_losses = mb_losses * weights[mb.at]  # [6.2]
                            if args.entropy_coef > 0:
                                mb_losses = mb_losses - args.entropy_coef * mb_entropy  # [1.8]
                            if args.kl_loss_coef > 0:
                                mb_kl = kl_penalty(mb_logprobs, ref_logprobs[mb.at], args.kl_loss_kind)  # [4.4]
                                mb_losses = mb_losses + args.kl_loss_coef * mb_kl
                            counts = step_tokens[k], step_sequences[k], args.max_response_length
                            loss = aggregate(mb_losses, mb_mask, args.loss_agg, *counts)
                            # [7.4] DDP averages over ranks, `loss` is a share of a sum.
                            accelerator.backward(loss * world_size)
                        with torch.no_grad():
                            log_ratio = (mb_logprobs - mb_old_logprobs).clamp(-20, 20)
                            approx_kl = log_ratio.exp() - 1 - log_ratio  # k3: never negative, little variance
                            log_ratio = (mb_ratio_logprobs - mb_old_logprobs).clamp(-20, 20)
                            ratio, good, bad = log_ratio.exp(), mb_advantages > 0, mb_advantages < 0
                            # [3.13]
                            clipped = (good & (ratio > 1 + args.clip_high)) | (bad & (ratio < 1 - args.clip_low))
                            step_loss += loss
                            step_kl += approx_kl.sum() / step_tokens[k]
                            ratio_max = torch.maximum(ratio_max, torch.where(mb_mask, ratio, 0).max())
                            moments.add("actor/clipfrac", clipped, mb_mask)
                            moments.add("actor/approx_kl", approx_kl, mb_mask)
                            moments.add("actor/ratio_mean", ratio, mb_mask)
                            moments.add("actor/entropy", mb_entropy, mb_mask)
                            if number == 0 and not need_old_pass:  # nothing has moved: sampler against training
                                gap = (mb_logprobs - rollout_logprobs[mb.at]).abs()
                                moments.add("rollout/logprob_diff", gap, mb_mask)
                            if args.dual_clip is not None:
                                moments.add("actor/clipfrac_dual", bad & (ratio > args.dual_clip), mb_mask)
                    # [7.6] Decided on the KL of all ranks together: one that stops alone leaves the others waiting.
                    if args.target_kl is not None and all_reduce(step_kl) > args.target_kl:  # [3.9]
                        actor_optimizer.zero_grad()
                        break
                    grad_norm = accelerator.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
                    with errors_agreed(accelerator), batch_kept(debug, rows, texts, scores):
                        check_finite(actor_loss=step_loss, actor_gradient=grad_norm)
                    moments.add("actor/grad_norm", grad_norm)
                    moments.add("actor/loss", step_loss * world_size)  # the mean over ranks of shares of a sum
                    actor_optimizer.step()
                    actor_optimizer.zero_grad()

            # Log. Every number covers the valid tokens, or the rows, of all ranks.
            row_kl = (old_logprobs - ref_logprobs).sum(1)  # [4.12] (B,)
            moments.add("reward/total_mean", rewards.sum(1))
            if use_reference:
                moments.add("kl/mean", old_logprobs - ref_logprobs, response_mask)
                moments.add("kl/sequence", row_kl)
                metrics["kl/coef"] = kl_controller.coef
            if need_old_pass:  # sampling and training should agree; precision and kernels make them differ
                moments.add("rollout/logprob_diff", (old_logprobs - rollout_logprobs).abs(), response_mask)  # [6.7]
            means, stds = moments.reduce()
            if args.old_logprobs == "corrected":  # share of the tokens that as many equal weights would amount to
                metrics["rollout/ess"] = means["rollout/weight_mean"] ** 2 / means["squared weights"]  # [6.7]
            metrics |= {name: mean for name, mean in means.items() if "/" in name}
            metrics |= {f"{name}/std": stds[f"{name}/mean"] for name in ("reward", "advantage")}
            metrics["actor/lr"] = args.lr * factor
            metrics["actor/ratio_max"] = all_reduce(ratio_max, dist.ReduceOp.MAX).item()
            if args.kl_controller == "adaptive":
                kl_controller.update(metrics["kl/mean"], num_rows * world_size)
            num_tokens = all_reduce(query_mask.sum() + response_mask.sum()).item()
            seconds["time/iteration"] = sum(seconds.values())
            metrics |= seconds | {"throughput/tokens_per_second": num_tokens / seconds["time/iteration"]}
            peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            peak = torch.tensor(torch.cuda.max_memory_allocated() if device.type == "cuda" else peak, device=device)
            metrics["memory/peak_gib"] = all_reduce(peak, dist.ReduceOp.MAX).item() / 2**30
            if evaluating:
                columns = zip(rows, texts, scores.tolist(), row_kl.tolist(), (~ended).tolist())
                names = "query", "response", "score", "kl", "truncated"
                dump = [dict(zip(names, (row["prompt"], *rest))) for row, *rest in columns]
                with writing(run_dir / "completions" / f"step_{iteration:06d}.jsonl") as path:
                    save_completions(path, dump, accelerator)

        # Evaluate, keep the best.
        if evaluating and eval_rows:
            if iteration == 0:
                say(f"evaluation before training begins {time.time() - start_time:.1f} s after the start", flush=True)
            with phase("eval"), errors_agreed(accelerator):
                actor = accelerator.unwrap_model(policy).model
                task = tokenizer, eval_rows, reward_function, args
                scored, dump = evaluate(actor, *task, accelerator, eos_ids, pad_id)
            results, _ = scored.reduce()
            with writing(run_dir / "completions" / f"eval_{iteration:06d}.jsonl") as path:
                save_completions(path, dump, accelerator)
            metrics |= results | {"time/eval": seconds["time/eval"]}
            score, sampled, length = (results[f"eval/{name}"] for name in ("score", "score_sampled", "length_mean"))
            if accelerator.is_main_process:
                line = f"iteration {iteration:4d}: eval {score:.3f} greedy, {sampled:.3f} sampled, length {length:.1f}"
                progress.write(f"{line}  ({time.time() - start_time:.0f} s)")
            if score > best_score and args.total_iterations > 0:
                best_score = score
                with writing(run_dir / "best") as path:
                    save_models(path, {".": policy}, tokenizer, accelerator)

        metrics["time/elapsed"] = time.time() - start_time
        with writing(run_dir / "metrics.jsonl") as path:
            if accelerator.is_main_process:
                for needed in [path] + [run_dir / "tensorboard"] * (args.track == "tensorboard"):
                    if not needed.exists():
                        raise UserError(f"{needed} is gone: something other than this run has removed it")
                with open(path, "a") as file:
                    file.write(json.dumps({"step": iteration} | metrics) + "\n")
            accelerator.log(metrics, step=iteration)
        reached = dict(zip(reached, (iteration + 1, num_drawn, best_score, kl_controller.coef)))
        if args.save_every and iteration > 0 and iteration % args.save_every == 0:
            save()
        if iteration > 0:
            shown = {"reward": "reward/mean", "kl": "kl/mean", "length": "response/length_mean", "H": "actor/entropy"}
            shown = [f"{label} {metrics[name]:.3g}" for label, name in shown.items() if name in metrics]
            split = [f"{name[5:9]} {s:.2f}" for name, s in seconds.items() if name != "time/eval"]
            progress.set_postfix_str(f"{', '.join(shown)} | {' '.join(split)} s")
            progress.update()
        if iteration < args.total_iterations and should_stop():
            break
    else:
        finished = True

    progress.close()
    if not finished:
        if reached["next_iteration"] > first:  # of this run
            save()
        say(f"stopped after iteration {reached['next_iteration'] - 1}; --resume auto --run-name {run_dir.name} goes on")
        leave(accelerator)
        return run_dir
    if args.total_iterations > 0:
        with writing(run_dir / "final") as path:
            save_models(path, {".": policy}, tokenizer, accelerator)
        say(f"saved {run_dir}/final{' and best' if eval_rows else ''}: transformers folders")
        say(f"  load  AutoModelForCausalLM.from_pretrained('{run_dir}/final')")
        command = ["python", *sys.argv, "--model", f"{run_dir}/final", "--total-iterations", "0", "--resume", "None"]
        command += ["--run-name", f"{run_dir.name}-score"]
        say(f"  score {shlex.join(command)}")
        say(f"  plot  python benchmarks/plot.py {run_dir}")
    leave(accelerator)
    return run_dir


def parse_args():
    """Args from the command line, whose --help shows the groups of flags that Args is made of."""
    groups = [(g.__name__[:-4].lower(), g, field(default_factory=g)) for g in reversed(Args.__bases__)]
    parsed = tyro.cli(tyro.conf.OmitArgPrefixes[make_dataclass("Groups", groups)], description=Args.__doc__)
    return Args(**{name: value for group in vars(parsed).values() for name, value in vars(group).items()})


if __name__ == "__main__":
    with others_answer():
        main(parse_args(), stop_on_signals())
