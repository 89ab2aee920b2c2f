"""Run another project iteration by iteration, for benchmarks/speed.py, which launches this file in its environment.

    accelerate launch ... peers.py TASK.json

TASK.json says which trainer and how much work. Rank 0 writes a line per iteration. Of TRL's: seconds, those of the
rollout, tokens of prompts and responses, responses and optimizer steps; of rlhfbook.com's code: seconds, and the score.
The last line is the peak memory of the largest process.
"""

import itertools
import json
import os
import resource
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

TASK = json.loads(Path(sys.argv[1]).read_text())
COMMON = {
    "output_dir": TASK["folder"],
    "learning_rate": 1e-5,
    "report_to": "none",
    "save_strategy": "no",
    "use_cpu": True,
    "bf16": False,  # TRL's default is True
    "gradient_checkpointing": False,
    "disable_tqdm": True,
    "logging_steps": 10_000,
    "seed": 1,
}


class Record:
    """Times of one process, sums of work over all."""

    def __init__(self):
        self.rollout, self.tokens, self.responses, self.last = 0.0, 0, 0, time.perf_counter()
        self.lines, self.steps = [], 0

    def timed(self, function):
        def run(*args, **kwargs):
            begin = time.perf_counter()
            result = function(*args, **kwargs)
            self.rollout += time.perf_counter() - begin
            return result

        return run

    def add(self, tokens, responses):
        self.tokens, self.responses = self.tokens + tokens, self.responses + responses

    def end_iteration(self):
        work = torch.tensor([self.tokens, self.responses], dtype=torch.long)
        if dist.is_initialized():
            dist.all_reduce(work)
        now = time.perf_counter()
        names = "seconds", "rollout", "tokens", "responses", "optimizer_steps"
        self.lines.append(dict(zip(names, (now - self.last, self.rollout, *work.tolist(), self.steps))))
        self.rollout, self.tokens, self.responses, self.steps = 0.0, 0, 0, 0
        self.last = time.perf_counter()

    def write(self):
        peak = torch.tensor(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        if dist.is_initialized():
            dist.all_reduce(peak, dist.ReduceOp.MAX)
        if int(os.environ.get("RANK", 0)) == 0:
            self.lines.append({"peak_bytes": peak.item()})
            Path(TASK["result"]).write_text("".join(json.dumps(line) + "\n" for line in self.lines))


RECORD = Record()


class Clock(transformers.TrainerCallback):
    """An iteration is the optimizer steps on what was sampled once."""

    def on_step_end(self, args, state, control, **kwargs):
        if TASK["trainer"] == "PPO":  # calls back once per iteration
            RECORD.end_iteration()
            return
        RECORD.steps += 1
        if state.global_step % TASK["steps"] == 0:
            RECORD.end_iteration()


def rule(completions, answer):
    """The rule of --reward gsm8k, on tidy numbers."""
    return [float(c.rsplit("####", 1)[-1].strip() == str(a)) for c, a in zip(completions, answer)]


def grpo():
    """GRPOTrainer: TASK["prompts"] prompts x TASK["group_size"] responses."""
    import trl

    def reward(prompts, completions, completion_ids, answer, **kwargs):
        inputs = tokenizer(prompts)["input_ids"]
        RECORD.add(sum(map(len, inputs)) + sum(map(len, completion_ids)), len(completions))
        return rule(completions, answer)

    tokenizer = AutoTokenizer.from_pretrained(TASK["model"], padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(TASK["model"], dtype=torch.float32)
    config = trl.GRPOConfig(
        per_device_train_batch_size=TASK["prompts"] * TASK["group_size"] // TASK["steps"] // TASK["processes"],
        steps_per_generation=TASK["steps"],
        num_generations=TASK["group_size"],
        max_completion_length=TASK["length"],
        max_steps=TASK["steps"] * TASK["iterations"],
        beta=TASK["beta"],
        temperature=1.0,
        loss_type="grpo",
        **COMMON,
    )
    data = Dataset.from_list(TASK["rows"])
    trainer = trl.GRPOTrainer(
        model, reward_funcs=reward, args=config, train_dataset=data, processing_class=tokenizer, callbacks=[Clock()]
    )
    assert trainer.accelerator.num_processes == TASK["processes"]
    trainer._generate_single_turn = RECORD.timed(trainer._generate_single_turn)
    RECORD.last = time.perf_counter()
    trainer.train()


class RuleReward(torch.nn.Module):
    """The rule as PPOTrainer wants a reward: a backbone whose last hidden state is the score, and an identity."""

    base_model_prefix = "backbone"

    def __init__(self, tokenizer, answers):
        super().__init__()
        self.width = min(map(len, answers))  # prompts are told apart by their first characters
        self.answers = {prompt[: self.width]: answer for prompt, answer in answers.items()}
        self.tokenizer, self.score = tokenizer, torch.nn.Identity()

    def backbone(self, input_ids, attention_mask, **kwargs):
        RECORD.add(int(attention_mask.sum()), len(input_ids))
        texts = [self.tokenizer.decode(row[mask.bool()]) for row, mask in zip(input_ids, attention_mask)]
        scores = rule(texts, [self.answers.get(text[: self.width], "") for text in texts])
        scores = torch.tensor(scores, device=input_ids.device)[:, None, None].expand(*input_ids.shape, 1)
        return type("Output", (), {"hidden_states": [scores]})()


def ppo():
    """PPOTrainer of TRL 1.12.0, the last release that has it."""
    from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

    prompts = TASK["prompts"] * TASK["group_size"]  # with one response to each

    tokenizer = AutoTokenizer.from_pretrained(TASK["model"], padding_side="left")
    load = {"pretrained_model_name_or_path": TASK["model"], "dtype": torch.float32}
    policy, reference = (AutoModelForCausalLM.from_pretrained(**load) for _ in range(2))
    value = AutoModelForSequenceClassification.from_pretrained(**load, num_labels=1)
    ppo_trainer.batch_generation = RECORD.timed(ppo_trainer.batch_generation)
    local = prompts // TASK["processes"]
    config = PPOConfig(
        per_device_train_batch_size=local,
        gradient_accumulation_steps=1,
        num_mini_batches=TASK["steps"],
        num_ppo_epochs=1,
        total_episodes=prompts * TASK["iterations"],
        local_rollout_forward_batch_size=local,
        response_length=TASK["length"],
        stop_token="eos",
        kl_coef=TASK["beta"],
        temperature=1.0,
        num_sample_generations=0,
        **COMMON,
    )
    rows = [{"input_ids": tokenizer(row["prompt"])["input_ids"]} for row in TASK["rows"]]
    answers = {row["prompt"]: row["answer"] for row in TASK["rows"]}
    trainer = PPOTrainer(
        config,
        tokenizer,
        policy,
        reference,
        RuleReward(tokenizer, answers),
        Dataset.from_list(rows),
        value,
        eval_dataset=Dataset.from_list(rows[:64]),
        callbacks=[Clock()],
    )
    assert trainer.accelerator.num_processes == TASK["processes"]
    step = trainer.optimizer.step

    def counted(*args, **kwargs):
        RECORD.steps += 1
        return step(*args, **kwargs)

    trainer.optimizer.step = counted
    RECORD.last = time.perf_counter()
    trainer.train()


def book():
    """The code of rlhfbook.com, in one process. What it is given, and what stays as it is, is said in speed.py."""
    sys.path.insert(0, TASK["code"])
    from policy_gradients import train, utils
    from policy_gradients.config import Config

    torch.set_num_threads(1)
    utils.console.quiet = True
    load = AutoModelForCausalLM.from_pretrained
    utils.AutoModelForCausalLM.from_pretrained = lambda *a, **k: load(*a, **k | {"torch_dtype": torch.float32})
    real, real_values = utils.load_model, utils.get_val_model

    def load_model(*args, **kwargs):
        model, tokenizer = real(*args, **kwargs)
        tokenizer.chat_template = (
            "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
        )
        return model, tokenizer

    def get_val_model(*args):
        model = real_values(*args)
        return model and model.float()  # its new head

    times = []

    def log(values):
        if "avg_correctness" in values:  # the responses of an iteration are there; the one before has ended
            times.append((time.perf_counter(), values["avg_correctness"]))

    train.load_model, train.get_val_model = load_model, get_val_model
    train.create_dataset = lambda cfg: [{"question": row["prompt"], "answer": row["answer"]} for row in TASK["rows"]]
    train.wandb.init, train.wandb.log = lambda **kwargs: None, log
    utils._correctness_reward = lambda dataset, texts, rows: rule(texts, [row["answer"] for row in rows])
    sizes = {"prompts_per_step": TASK["prompts"], "num_rollouts": TASK["group_size"], "train_batch_size": 64}
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 64}
    losses = {"loss": TASK["algorithm"], "lr": 1.5e-4, "gamma": 1.0, "lam": 0.95, "vf_coef": 0.5, "clip_eps_val": 0.4}
    more = {"data": {"specs": [], "size": 0}, "batch_acc": 1, "format_weight": 0.0, "device": "cpu"}
    config = sizes | sampling | losses | more
    train.main(Config(model_name=TASK["model"], seed=TASK["seed"], **config))
    times.append((time.perf_counter(), None))
    RECORD.lines = [{"seconds": now - last, "score": score} for (last, score), (now, _) in itertools.pairwise(times)]


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    {"GRPO": grpo, "PPO": ppo, "book": book}[TASK["trainer"]]()
    RECORD.write()
