"""Every flag does what its help says: a base run and one that differs in this flag alone.

`CASES` has an entry for every field of each script's `Args`, and a test fails when a new flag has none.
"""

import contextlib
import dataclasses
import io
import json
import math
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from .helpers_before import (
    has_critic,
    load_script,
    make_args,
    make_model,
    read_metrics,
    read_rows,
    toy_rows,
    untimed,
    write_rows,
)

# Every value that a case looks at is set here, so that the defaults of the script may change.
BASE = {"minibatch_size": 4, "ppo_epochs": 2, "total_iterations": 2, "eval_every": 0}
BASE |= {"max_response_length": 10, "max_prompt_length": 64, "microbatch_tokens": 4096, "seed": 1, "dtype": "float32"}
BASE |= {"lr": 1e-2, "critic_lr": 1e-2, "lr_schedule": "constant", "warmup_iterations": 0, "weight_decay": 0.0}
BASE |= {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "gamma": 1.0, "lam": 0.95, "clip_low": 0.2, "clip_high": 0.2}
BASE |= {"critic_warmup_iterations": 0, "whiten_advantages": True, "kl_reward_coef": 0.0, "kl_loss_coef": 0.0}
BASE |= {"max_grad_norm": 1.0, "missing_eos_penalty": 0.0, "entropy_coef": 0.0, "loss_agg": "token-mean"}
BASES = {"ppo_llm_fsdp": BASE | {"batch_size": 8, "group_size": 1}}
BASES["grpo_llm"] = BASE | {"batch_size": 4, "group_size": 2}
BASES["grpo_llm"] |= {"estimator": "grpo", "importance_level": "token", "dynamic_sampling": False}

# Whatever is answered to a prompt of even length scores 0.
REWARD_ODD = """
def odd(prompts, responses, answers):
    return [len(p) % 2 * (1 + sum(map(ord, r)) % 89) for p, r in zip(prompts, responses)]
"""


class Run(SimpleNamespace):
    """What a run left: folder, metrics (those of its time left out), output, steps (optimizer steps by kind), forwards
    (of the policy), sampled (responses of each call), rows and eval_rows (completions of the last iteration), model and
    critic (weights of final/)."""

    def __getitem__(self, name):
        """A metric in every iteration that has it."""
        return [m[name] for m in self.metrics if name in m]

    def distance(self, other, part="model"):
        """How far apart the weights of two runs are."""
        a, b = getattr(self, part), getattr(other, part)
        return math.sqrt(sum((a[k] - b[k]).square().sum().item() for k in a))


@pytest.fixture(scope="module")
def paths(tmp_path_factory, tiny_model, toy_data, toy_reward):
    """Values of flags that are files."""
    folder = tmp_path_factory.mktemp("flags")
    (folder / "odd.py").write_text(REWARD_ODD)
    columns = [row | {"other": f"ask {i}", "gold": f"#### {i + 50}"} for i, row in enumerate(toy_rows(16))]
    (folder / "test").mkdir()
    return SimpleNamespace(
        folder=folder,
        model=tiny_model,
        other_model=make_model(folder / "model", seed=5),
        data=toy_data,
        other_data=write_rows(folder / "other.jsonl", toy_rows(12, 500)),
        columns=write_rows(folder / "columns.jsonl", columns),
        reward=toy_reward,
        reward_odd=f"{folder / 'odd.py'}:odd",
        chat_template=write_text(folder / "chat.jinja", "{% for m in messages %}#{{ m.content }}{% endfor %}"),
        reward_model=make_model(folder / "reward", auto_class=AutoModelForSequenceClassification, num_labels=1),
    )


def write_text(path, text):
    path.write_text(text)
    return str(path)


@pytest.fixture(scope="module")
def cache():
    return {}


@pytest.fixture
def execute(algo, paths, cache):
    """execute(changes) -> Run, from memory when the same run has been made before."""

    def run(changes):
        key = algo.__name__, repr(sorted(changes.items()))
        if key in cache:
            return cache[key]
        AcceleratorState._reset_state(True)
        options = {"model": paths.model, "dataset": paths.data, "reward": paths.reward} | BASES[algo.__name__]
        options |= {"output_dir": str(paths.folder / algo.__name__), "run_name": f"run{len(cache)}"}
        steps, forwards, sampled, checkpointing, output = Counter(), [], [], [], io.StringIO()
        generate = algo.generate
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output):

            def counted(owner, name, count):
                real = getattr(owner, name)
                patch.setattr(owner, name, lambda self, *a, **k: (count(self, *a), real(self, *a, **k))[1])

            def count_step(optimizer, *args):
                actor = optimizer.param_groups[0]["params"][-1].dim() == 2  # lm_head; the critic's last is a bias
                steps["actor" if actor else "critic"] += 1

            counted(torch.optim.AdamW, "step", count_step)
            patch.setattr(algo, "generate", lambda *a: (sampled.append(len(a[3])), generate(*a))[1])
            counted(algo.Policy, "forward", lambda self, ids, *a: forwards.append(ids.numel()))
            counted(PreTrainedModel, "gradient_checkpointing_enable", lambda self, *a: checkpointing.append(self))
            run_dir = algo.main(make_args(algo, **options | changes))
        last = {path.name[:4]: read_rows(path) for path in sorted((run_dir / "completions").iterdir())}
        result = Run(folder=run_dir, metrics=untimed(read_metrics(run_dir)), output=output.getvalue(), steps=steps)
        result.has_critic = has_critic(algo)
        result.forwards, result.checkpointing, result.rows = forwards, len(checkpointing), last.get("step", [])
        result.sampled = sampled
        result.eval_rows = last.get("eval", [])
        if (run_dir / "final" / "model.safetensors").exists():
            result.model = load_file(run_dir / "final" / "model.safetensors")
            result.critic = load_file(run_dir / "final" / "critic" / "model.safetensors") if has_critic(algo) else {}
        cache[key] = result
        return result

    return run


def same_start(a, b):
    """The first rollout is the same: the flag acts on what is learned from it."""
    return a["reward/mean"][0] == b["reward/mean"][0] and a["response/length_mean"][0] == b["response/length_mean"][0]


def learns_differently(a, b):
    return same_start(a, b) and a.distance(b) > 1e-6


def num_steps(run):
    """Optimizer steps of the actor, and as many of the critic."""
    assert run.steps["critic"] == run.steps["actor"] * run.has_critic
    return run.steps["actor"]


def rates(run):
    """Learning rates of the actor, and here of the critic."""
    assert run["critic/lr"] == run["actor/lr"] * run.has_critic
    return run["actor/lr"]


def halves_the_batch(a, b):
    return (len(a.rows), len(b.rows)) == (8, 4) and num_steps(b) == 4


def groups_of(size):
    def holds(a, b):
        groups = [{row["query"] for row in b.rows[i : i + size]} for i in range(0, 16, size)]
        return (len(a.rows), len(b.rows)) == (8, 16) and all(len(queries) == 1 for queries in groups)

    return holds


KL = {"kl_reward_coef": 0.1}
ADAPTIVE = KL | {"kl_controller": "adaptive", "kl_target": 1e-3, "kl_horizon": 20.0, "total_iterations": 3}
KL_LOSS = {"kl_loss_coef": 0.5, "kl_loss_kind": "k2"}
ODD_PROMPTS = {"reward": lambda p: p.reward_odd}
ONE_STEP = {"minibatch_size": 8, "ppo_epochs": 1, "total_iterations": 1}


def make_checkpoint(paths):
    """That of the first iteration of the base run."""
    algo = load_script(paths.script)
    options = {"model": paths.model, "dataset": paths.data, "reward": paths.reward, "output_dir": str(paths.folder)}
    AcceleratorState._reset_state(True)
    changes = {"run_name": f"{paths.script} to resume", "save_every": 1}
    with contextlib.redirect_stdout(io.StringIO()):
        run_dir = algo.main(make_args(algo, **BASES[paths.script] | options | changes))
    return str(run_dir / "checkpoints" / "step_000001")


def checkpoints(run):
    return [path.name for path in sorted(run.folder.glob("checkpoints/*"))]


# Field: (changed value, what must hold of the base run a and the changed run b[, changes that both runs have]).
# A value that is a function is given `paths`.
CORRECTED = {"old_logprobs": "corrected", "top_p": 0.7}
SHARED_CASES = {
    "save_every": (
        1,
        lambda a, b: (checkpoints(a), checkpoints(b)) == ([], ["step_000001", "step_000002"]) and a.distance(b) == 0,
    ),
    "keep_checkpoints": (
        1,
        lambda a, b: (
            (checkpoints(a), checkpoints(b)) == (["step_000001", "step_000002"], ["step_000002"]) and a.distance(b) == 0
        ),
        {"save_every": 1},
    ),
    "resume": (
        make_checkpoint,
        lambda a, b: b.folder.name.endswith("to resume") and b.metrics == a.metrics and a.distance(b) == 0,
    ),
    "model": (lambda p: p.other_model, lambda a, b: a["eval/score"][0] != b["eval/score"][0] and a.distance(b) > 1),
    "dtype": (
        "bfloat16",
        lambda a, b: (
            "bfloat16" in b.output
            and 1e-5 < abs(a["actor/entropy"][0] - b["actor/entropy"][0]) < 0.3
            and {x.dtype for x in b.model.values()} == {torch.float32}
        ),
    ),
    "gradient_checkpointing": (
        True,
        lambda a, b: (a.checkpointing, b.checkpointing) == (0, 1 + b.has_critic) and a.distance(b) < 1e-3,
    ),
    "dataset": (
        lambda p: p.other_data,
        lambda a, b: {r["query"] for r in b.rows} <= {r["question"] for r in toy_rows(12, 500)} and not b.eval_rows,
    ),
    "eval_dataset": (
        lambda p: p.other_data,
        lambda a, b: (len(a.eval_rows), len(b.eval_rows)) == (6, 12) and a.distance(b) == 0,
    ),
    "prompt_column": (
        "other",
        lambda a, b: "GSM8K" in a.output and all(r["query"].startswith("ask ") for r in b.rows),
        {"dataset": lambda p: p.columns},
    ),
    "answer_column": (
        "gold",
        lambda a, b: (
            {r["answer"] for r in a.eval_rows} != {f"#### {i + 50}" for i in range(16)}
            and {r["answer"] for r in b.eval_rows} == {f"#### {i + 50}" for i in range(16)}
        ),
        {"dataset": lambda p: p.columns, "eval_dataset": lambda p: p.columns},
    ),
    "prompt_template": ("Q {prompt} A", lambda a, b: all(r["query"][:2] + r["query"][-2:] == "Q  A" for r in b.rows)),
    "max_prompt_length": (15, lambda a, b: " 0 too long" in a.output and " 0 too long" not in b.output),
    "max_response_length": (
        4,
        lambda a, b: (
            max(b["response/length_mean"]) <= 4 < a["response/length_mean"][0] and b["eval/length_mean"][0] <= 4
        ),
    ),
    "reward": ("exact", lambda a, b: a["reward/mean"][0] > 0 and set(b["reward/mean"]) == {0.0}),
    "temperature": (0.5, lambda a, b: b["actor/entropy"][0] < 0.9 * a["actor/entropy"][0]),
    "top_p": (
        0.3,
        lambda a, b: (
            b["rollout/logprob_diff"][0] > 0.1 > a["rollout/logprob_diff"][0] and "ratio or KL are biased" in b.output
        ),
    ),
    "top_k": (  # the likeliest token: the response is the greedy one, with probability 1
        1,
        lambda a, b: (
            all(x["response"] == y["response"] for x, y in zip(b.rows[::2], b.rows[1::2]))
            and "ratio or KL are biased" in b.output
        ),
        {"group_size": 2, "lr": 0.0},
    ),
    "missing_eos_penalty": (
        2.0,
        lambda a, b: (
            b["reward/mean"][0] == pytest.approx(a["reward/mean"][0] - 2 * a["response/truncated_frac"][0])
            and a["response/truncated_frac"][0] > 0
            and b["eval/score"][0] == a["eval/score"][0]
        ),
    ),
    "total_iterations": (3, lambda a, b: [m["step"] for m in b.metrics] == [0, 1, 2, 3]),
    "ppo_epochs": (1, lambda a, b: learns_differently(a, b) and (a.steps["actor"], b.steps["actor"]) == (8, 4)),
    "minibatch_size": (2, lambda a, b: learns_differently(a, b) and (num_steps(a), num_steps(b)) == (8, 16)),
    "rollout_batch_size": (  # nothing else changes
        4,
        lambda a, b: (
            max(a.sampled) >= 8 > 4 == max(b.sampled)
            and sum(a.sampled) == sum(b.sampled)
            and all(x == pytest.approx(y, rel=1e-3, abs=1e-4) for x, y in zip(a.metrics, b.metrics))
        ),
        {"lr": 1e-4, "total_iterations": 1},
    ),
    "microbatch_tokens": (  # nothing else changes
        60,
        lambda a, b: (
            max(a.forwards) > 60 >= max(b.forwards)
            and all(x == pytest.approx(y, rel=1e-3, abs=1e-4) for x, y in zip(a.metrics, b.metrics))
            and a.steps == b.steps
        ),
        {"lr": 1e-4, "total_iterations": 1},
    ),
    "lr": (
        1e-3,
        lambda a, b: (
            learns_differently(a, b) and b["actor/lr"] == [1e-3] * 2 and b["critic/lr"] == [1e-2] * 2 * b.has_critic
        ),
    ),
    "lr_schedule": (
        "linear",
        lambda a, b: learns_differently(a, b) and rates(b) == [0.01, 0.005],
    ),
    "warmup_iterations": (
        2,
        lambda a, b: learns_differently(a, b) and rates(b) == [0.005, 0.01],
    ),
    "weight_decay": (
        10.0,
        lambda a, b: (
            same_start(a, b)
            and all(  # 8 steps of lr*weight_decay = 0.1 leave 0.43 of a weight; actor and critic alike
                sum(x.square().sum() for x in b_part.values()) < 0.4 * sum(x.square().sum() for x in a_part.values())
                for a_part, b_part in ((a.model, b.model), (a.critic, b.critic))[: 1 + a.has_critic]
            )
        ),
    ),
    "max_grad_norm": (  # Adam does not feel the scale, except where the gradient is next to its epsilon
        1e-9,
        lambda a, b: (
            same_start(a, b)
            and a["actor/grad_norm"][0] == pytest.approx(b["actor/grad_norm"][0], rel=1e-5)  # before it is cut
            and a.distance(b) > 0.5
            # Of the critic only the head: behind one of zeros no gradient comes.
            and (not a.has_critic or a.distance(b, "critic") > 0.05)
        ),
        ONE_STEP,
    ),
    "clip_low": (1e-3, lambda a, b: learns_differently(a, b) and b["actor/clipfrac"][0] > a["actor/clipfrac"][0]),
    "clip_high": (1e-3, lambda a, b: learns_differently(a, b) and b["actor/clipfrac"][0] > a["actor/clipfrac"][0]),
    "dual_clip": (
        1.01,
        lambda a, b: learns_differently(a, b) and b["actor/clipfrac_dual"][0] > 0 and not a["actor/clipfrac_dual"],
    ),
    "entropy_coef": (
        0.5,
        lambda a, b: (
            b["actor/loss"][0] == pytest.approx(a["actor/loss"][0] - 0.5 * a["actor/entropy"][0], abs=1e-5)
            and a.distance(b) > 1e-3
        ),
        ONE_STEP,
    ),
    "loss_agg": ("seq-mean-token-sum", lambda a, b: learns_differently(a, b) and a["actor/loss"] != b["actor/loss"]),
    "target_kl": (
        1e-9,
        lambda a, b: same_start(a, b) and (b.steps["actor"], b.steps["critic"]) == (2, 8 * b.has_critic),
    ),
    "kl_reward_coef": (
        0.1,
        lambda a, b: (
            same_start(a, b)
            and a["reward/total_mean"] == pytest.approx(a["reward/mean"], abs=1e-6)
            and b["reward/total_mean"][1] == pytest.approx(b["reward/mean"][1] - 0.1 * b["kl/sequence"][1], abs=1e-5)
            and abs(b["kl/sequence"][1]) > 0.01
            and not a["kl/mean"]
        ),
    ),
    "kl_reward_kind": (
        "k2",
        lambda a, b: (
            a["kl/sequence"] == b["kl/sequence"]
            and a["reward/total_mean"][1] != b["reward/total_mean"][1]
            and "only k1 pulls" in b.output
            and "only k1 pulls" not in a.output
        ),
        KL,
    ),
    "kl_controller": (
        "adaptive",
        lambda a, b: set(a["kl/coef"]) == {0.1} and b["kl/coef"][1] == pytest.approx(0.1 * (1 - 0.2 * 8 / 20)),
        {k: v for k, v in ADAPTIVE.items() if k != "kl_controller"},
    ),
    "kl_target": (1e3, lambda a, b: a["kl/coef"][2] > a["kl/coef"][1] and b["kl/coef"][2] < b["kl/coef"][1], ADAPTIVE),
    "kl_horizon": (
        2000.0,
        lambda a, b: a["kl/coef"][1] == pytest.approx(0.092) and b["kl/coef"][1] == pytest.approx(0.09992),
        ADAPTIVE,
    ),
    "kl_loss_coef": (
        0.5,
        lambda a, b: learns_differently(a, b) and b["kl/mean"][0] == 0 != b["kl/mean"][1] and not a["kl/mean"],
    ),
    "kl_loss_kind": ("abs", lambda a, b: learns_differently(a, b), KL_LOSS),
    "lora_rank": (
        4,
        lambda a, b: (
            not (a.folder / "final" / "adapter_config.json").exists()
            and json.loads((b.folder / "final" / "adapter_config.json").read_text())["r"] == 4
            and not (b.folder / "final" / "model.safetensors").exists()
            and same_start(a, b)
        ),
    ),
    "chat_template": (
        lambda p: p.chat_template,
        lambda a, b: all(r["query"][0] != "#" for r in a.rows) and all(r["query"][0] == "#" for r in b.rows),
    ),
    "overlong_prompts": (
        "truncate",
        lambda a, b: (
            "22 rows, 2 too long left out" in a.output
            and "24 rows, 2 too long truncated" in b.output
            and {r["prompt"][:7] == "what is" for r in a.eval_rows} == {True}
            and {r["prompt"][:7] == "what is" for r in b.eval_rows} == {True, False}
            and all(r["prompt"][-1] == "?" for r in b.eval_rows)  # the end stays
        ),
        {"max_prompt_length": 17},
    ),
    "reward_model": (
        lambda p: p.reward_model,
        lambda a, b: a["reward/mean"][0] != b["reward/mean"][0] and "reward     /" in b.output and "flags" in b.output,
    ),
    "old_logprobs": (
        "rollout",
        lambda a, b: (
            sum(b.forwards) < 0.8 * sum(a.forwards)
            and a["rollout/logprob_diff"][0] < 1e-5
            and b["rollout/logprob_diff"][0] < 1e-5
            and a.distance(b) < 1e-2
        ),
    ),
    "is_level": (
        "sequence",
        lambda a, b: same_start(a, b) and b["rollout/weight_mean"][0] < 0.5 * a["rollout/weight_mean"][0],
        CORRECTED,
    ),
    "is_cap": (
        0.5,
        lambda a, b: same_start(a, b) and b["rollout/weight_mean"][0] <= 0.5 < a["rollout/weight_mean"][0],
        CORRECTED,
    ),
    "track": (
        "none",
        lambda a, b: any(a.folder.rglob("*tfevents*")) and not any(b.folder.rglob("*tfevents*")) and a.distance(b) == 0,
    ),
    "output_dir": (lambda p: str(p.folder / "elsewhere"), lambda a, b: b.folder.parent.name == "elsewhere"),
    "run_name": ("my run", lambda a, b: b.folder.name == "my run" and b.folder.parent == a.folder.parent),
    "seed": (
        2,
        lambda a, b: (
            [r["query"] for r in a.rows] != [r["query"] for r in b.rows]
            and a["eval/score"][0] == b["eval/score"][0]
            and a["eval/score_sampled"][0] != b["eval/score_sampled"][0]
        ),
    ),
    "eval_every": (1, lambda a, b: (len(a["eval/score"]), len(b["eval/score"])) == (2, 3) and a.distance(b) == 0),
}

PPO_CASES = {
    "batch_size": (4, halves_the_batch),
    "group_size": (2, groups_of(2)),
    "critic_model": (
        lambda p: p.other_model,
        lambda a, b: same_start(a, b) and a.distance(b, "critic") > 1 and b.distance(a) < 1,
    ),
    "critic_lr": (
        1e-3,
        lambda a, b: (
            same_start(a, b)
            and b["critic/lr"] == [1e-3] * 2
            and a["reward/mean"][1] == b["reward/mean"][1]
            and a.distance(b, "critic") > 1e-3
        ),
    ),
    "critic_warmup_iterations": (
        1,
        lambda a, b: same_start(a, b) and (b.steps["actor"], b.steps["critic"]) == (4, 8) and len(b["actor/loss"]) == 1,
    ),
    "value_clip": (
        1e-3,
        lambda a, b: (
            same_start(a, b)
            and a["actor/loss"][0] == b["actor/loss"][0]
            and b["critic/loss"][0] > a["critic/loss"][0]
            and b["critic/clipfrac"][0] > 0
            and not a["critic/clipfrac"]
        ),
    ),
    "gamma": (0.5, lambda a, b: learns_differently(a, b) and a["advantage/mean"][0] != b["advantage/mean"][0]),
    "lam": (0.5, lambda a, b: learns_differently(a, b) and a["advantage/mean"][0] != b["advantage/mean"][0]),
    "whiten_advantages": (  # the loss of an unchanged policy is minus the mean advantage
        False,
        lambda a, b: (
            b["actor/loss"][0] == pytest.approx(-b["advantage/mean"][0], abs=1e-5)
            and a["actor/loss"][0] == pytest.approx(0, abs=1e-5) != b["actor/loss"][0]
            and a["advantage/mean"] == b["advantage/mean"]
        ),
        ONE_STEP,
    ),
}

GRPO_CASES = {
    "batch_size": (2, halves_the_batch),
    "group_size": (4, groups_of(4)),
    "estimator": (  # in pairs, grpo makes every advantage 0.71; here it is half the difference of scores below 1
        "dr_grpo",
        lambda a, b: learns_differently(a, b) and b["advantage/std"][0] < 0.5 < a["advantage/std"][0] < 0.8,
    ),
    "importance_level": (  # the geometric mean of the token ratios is less extreme
        "sequence",
        lambda a, b: learns_differently(a, b) and 1.001 < b["actor/ratio_max"][0] < a["actor/ratio_max"][0],
    ),
    "dynamic_sampling": (
        True,
        lambda a, b: (
            a["group/generated"] == [4, 4]
            and b["group/generated"][0] > 4
            and a["group/used"] == b["group/used"] == [4, 4]
            and a["group/zero_std_frac"][0] > 0
            and {len(r["query"]) % 2 for r in a.rows} == {0, 1}
            and {len(r["query"]) % 2 for r in b.rows} == {1}
        ),
        ODD_PROMPTS | {"max_resamples": 9},
    ),
    "max_resamples": (
        0,
        lambda a, b: (
            a["group/generated"][0] > 4 == a["group/used"][0]
            and b["group/generated"] == [4, 4]
            and 0 < b["group/used"][0] < 4
        ),
        ODD_PROMPTS | {"dynamic_sampling": True, "max_resamples": 9},
    ),
    "overlong_buffer": (
        10,
        lambda a, b: b["reward/mean"][0] == pytest.approx(a["reward/mean"][0] - a["response/length_mean"][0] / 10),
        {"overlong_penalty": 1.0},
    ),
    "overlong_penalty": (
        3.0,
        lambda a, b: (
            b["reward/mean"][0] == pytest.approx(a["reward/mean"][0] - 2 * a["response/length_mean"][0] / 10)
            and b["eval/score"][0] == a["eval/score"][0]
        ),
        {"overlong_buffer": 10, "overlong_penalty": 1.0},
    ),
}


# What sharding does takes several processes: test_sharding.py. Here the flags reach it.
FSDP_CASES = {
    "rollout_params": (
        "sharded",
        lambda a, b: "rollout    gathered" in a.output and "rollout    sharded" in b.output and a.distance(b) == 0,
    ),
    "shard_group_size": (1, lambda a, b: "frozen one, over 1\n" in b.output and a.distance(b) == 0),
    "offload": (
        True,
        lambda a, b: "(host memory)" not in a.output and "(host memory)" in b.output and a.distance(b) == 0,
    ),
}
CASES = {"grpo_llm": SHARED_CASES | GRPO_CASES, "ppo_llm_fsdp": SHARED_CASES | PPO_CASES | FSDP_CASES}


def test_every_flag_has_a_case(algo):
    fields = [field.name for field in dataclasses.fields(algo.Args)]
    assert set(CASES[algo.__name__]) == set(fields) and len(fields) <= 70


# What both scripts have is tried on one of them, but for what concerns the critic too.
CRITIC_TOO = ["gradient_checkpointing", "minibatch_size", "lr", "lr_schedule", "weight_decay", "max_grad_norm"]
CRITIC_TOO += ["target_kl"]
TRIED = {"grpo_llm": list(CASES["grpo_llm"]), "ppo_llm_fsdp": CRITIC_TOO}
TRIED["ppo_llm_fsdp"] += [field for field in CASES["ppo_llm_fsdp"] if field not in CASES["grpo_llm"]]


@pytest.mark.parametrize("algo, field", [(s, f) for s, fields in TRIED.items() for f in fields], indirect=["algo"])
def test_flag(algo, execute, paths, field):
    value, holds, shared = (*CASES[algo.__name__][field], {})[:3]
    paths.script = algo.__name__
    shared, changed = ({k: v(paths) if callable(v) else v for k, v in d.items()} for d in (shared, {field: value}))
    base, other = execute(shared), execute(shared | changed)
    assert holds(base, other), (base.metrics, other.metrics)
