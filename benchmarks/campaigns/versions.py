"""Do the scripts still compute the same numbers? The working tree against an earlier commit, up to rounding.

    python benchmarks/campaigns/versions.py                     all cases of the scripts, against the last commit
    python benchmarks/campaigns/versions.py ppo rloo            some of them
    python benchmarks/campaigns/versions.py variants            every variant, from each side's own script and patch
    python benchmarks/campaigns/versions.py bypass              one of them
    python benchmarks/campaigns/versions.py --commit v0.5 ppo   against another commit
    python benchmarks/campaigns/versions.py --tolerance 0       bit for bit, where every sum runs in its old order

Each case runs for three iterations on both sides. We compare every metric that both of them log (except times and
memory), and of the completions every field that both have, and list what only one side has. The tolerance is relative,
near 0 a hundredth of it, and ten times as much for a single token's numbers. What a version means to change is left out
(OTHER), so that the rest must agree. The earlier scripts come from the repository's history; they and all runs are in
runs/versions/.
"""

import argparse
import shlex
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1]))
import common
import variants
from common import ROOT, TINY, find_script, launcher, read_lines
from compare import same as compare_numbers

FOLDER = ROOT / "runs" / "versions"
CHAT = FOLDER / "chat"  # the bundled model with a chat template
# Nothing is left to a commit's defaults or guesses.
COMMON = "--total-iterations 3 --eval-every 2 --eval-rows 16 --save-every 0 --track none --max-response-length 32"
COMMON += " --microbatch-tokens 512 --rollout-batch-size 128 --prompt-column question --answer-column answer"
DATA = f" --dataset {TINY}/train.jsonl --eval-dataset {TINY}/test.jsonl"
PPO = " --batch-size 32 --minibatch-size 16"
WARMUP = PPO + " --critic-warmup-iterations 1"
GRPO = " --batch-size 8 --group-size 4 --minibatch-size 16"
# What version 0.7 changes on purpose: entropies are those of the policy that sampled. And what is rounding itself.
OTHER = "time/", "memory/", "actor/entropy", "rollout/kl"


class Case(NamedTuple):
    script: str  # or a variant, NAME_llm
    processes: int
    flags: str  # besides COMMON


CASES = {
    "ppo": Case("ppo_llm", 1, PPO),
    "ppo-warmup": Case("ppo_llm", 1, WARMUP + " --warmup-iterations 3"),
    "ppo-two": Case("ppo_llm", 2, PPO + f" --critic-model {CHAT}"),
    "ppo-two-warmup": Case("ppo_llm", 2, WARMUP + " --dtype bfloat16 --gradient-checkpointing"),
    "grpo": Case("grpo_llm", 1, GRPO),
    "grpo-two": Case("grpo_llm", 2, GRPO + " --dtype bfloat16"),
    "rloo": Case("grpo_llm", 1, GRPO + " --estimator rloo --kl-reward-coef 0.05 --loss-agg seq-mean-token-sum"),
    "dr_grpo": Case("grpo_llm", 1, GRPO + " --estimator dr_grpo --loss-agg seq-mean-token-sum-norm --kl-loss-coef 0"),
    "reinforce_pp": Case("grpo_llm", 2, GRPO + " --estimator reinforce_pp --kl-reward-coef 0.01 --kl-reward-kind k2"),
    "sharded": Case("ppo_llm_fsdp", 2, PPO),
    "sharded-half": Case("ppo_llm_fsdp", 2, PPO + " --dtype bfloat16 --gradient-checkpointing"),
    "sharded-rollout": Case("ppo_llm_fsdp", 2, PPO + " --rollout-params sharded --offload"),
    "sharded-groups": Case("ppo_llm_fsdp", 2, PPO + " --shard-group-size 1"),
    "composed": Case("grpo_llm_fsdp", 2, GRPO),
    "lora": Case("ppo_llm", 2, PPO + " --lora-rank 4 --lr 1e-3"),
    "lora-half": Case("ppo_llm", 2, PPO + " --lora-rank 4 --lr 1e-3 --dtype bfloat16"),
    "sharded-lora": Case("ppo_llm_fsdp", 2, PPO + " --lora-rank 4 --lr 1e-3"),
    "chat": Case("grpo_llm", 1, GRPO + f" --model {CHAT} --lr 1e-4 --temperature 0.8" + DATA),
    "epochs": Case("ppo_llm", 1, PPO + " --ppo-epochs 2 --gradient-checkpointing --max-grad-norm 0.05"),
    "losses": Case("ppo_llm", 1, PPO + " --entropy-coef 0.01 --kl-loss-coef 0.1 --kl-loss-kind k3 --clip-high 0.01"),
}
# Flags that make a variant do something in three short iterations. vllm is left out: it needs its own environment.
VARIANT_FLAGS = {
    "adaptive_kl": " --kl-reward-coef 0.05 --kl-target 0.001 --kl-horizon 40",
    "bypass": " --old-logprobs corrected --is-cap 1.001 --dtype bfloat16",
    "dual_clip": " --ppo-epochs 3 --lr 3e-3 --dual-clip 1.05",
    "fp16": " --dtype float16",
    "kl_gradient": " --kl-reward-kind abs --kl-loss-coef 0.1 --kl-loss-kind k3+",
    "target_kl": " --ppo-epochs 3 --target-kl 3e-4",
    "top_p": " --top-p 0.9 --top-k 3 --temperature 1.3",
    "value_clip": " --ppo-epochs 3 --value-clip 0.02",
}
VARIANTS = {}
for variant in [name for name in variants.names() if name != "vllm"]:
    sizes = PPO if variants.read_patch(variant)[1] == "ppo_llm.py" else GRPO
    VARIANTS[variant] = Case(f"{variant}_llm", 2, sizes + VARIANT_FLAGS.get(variant, ""))


def check_out(commit):
    """All files of a commit, in a folder of their own."""
    commit = variants.git("rev-parse", "--short", commit, cwd=ROOT).stdout.strip()
    archive = FOLDER / f"{commit}.tar"
    variants.git("archive", f"--output={archive}", commit, cwd=ROOT)
    shutil.unpack_archive(archive, FOLDER / commit, filter="data")
    return FOLDER / commit


def train(case, tree, folder):
    """The folder of a run with the script of this tree."""
    shutil.rmtree(folder, ignore_errors=True)
    path = find_script(case.script, folder, tree)
    text = path.read_text()
    path = folder / path.name
    path.write_text(text)
    words = [path, *shlex.split(COMMON + case.flags), "--output-dir", folder, "--run-name", "run"]
    common.run(launcher(case.processes, *words), CUDA_VISIBLE_DEVICES="")
    return folder / "run"


def same(one, other, tolerance):
    """Numbers up to the tolerance, in lists and dictionaries, too; all else as it is."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name], tolerance) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(same(*pair, tolerance) for pair in zip(one, other))
    return compare_numbers(one, other, tolerance)


def compare(old, new, tolerance):
    """(what differs, names of metrics and fields that only the old run has, those that only the new one has)."""
    differences, gone, added = [], set(), set()
    for before, after in zip(read_lines(old / "metrics.jsonl"), read_lines(new / "metrics.jsonl"), strict=True):
        gone |= before.keys() - after.keys()
        added |= after.keys() - before.keys()
        for name in sorted(before.keys() & after.keys()):
            if not name.startswith(OTHER) and not same(before[name], after[name], tolerance):
                differences.append(f"step {before['step']} {name}: {before[name]!r} became {after[name]!r}")
    for path in sorted((old / "completions").iterdir()):
        for before, after in zip(read_lines(path), read_lines(new / "completions" / path.name), strict=True):
            gone |= before.keys() - after.keys()
            added |= after.keys() - before.keys()
            both = before.keys() & after.keys()
            if not all(same(before[name], after[name], tolerance * (10 if name == "batch" else 1)) for name in both):
                differences.append(f"{path.name}: {before} became {after}"[:300])
    return differences, gone, added


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [*CASES, *VARIANTS, "variants"]
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(known))
    parser.add_argument("--commit", default="HEAD", help="what to compare with (default: the last commit)")
    parser.add_argument("--tolerance", type=float, default=1e-4)
    args = parser.parse_args()
    if unknown := set(args.cases).difference(known):  # Python 3.11 refuses `choices` where none is given
        parser.error(f"no case {', '.join(unknown)}")
    chosen = {}
    for name in args.cases or CASES:
        chosen |= VARIANTS if name == "variants" else {name: (CASES | VARIANTS)[name]}
    shutil.copytree(TINY / "model", CHAT, dirs_exist_ok=True)
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}answer: "
    (CHAT / "chat_template.jinja").write_text(template)
    earlier = check_out(args.commit)
    failed, gone, added = False, set(), set()
    for name, case in chosen.items():
        old = train(case, earlier, FOLDER / f"{earlier.name}-{name}")
        new = train(case, ROOT, FOLDER / f"today-{name}")
        differences, case_gone, case_added = compare(old, new, args.tolerance)
        gone |= case_gone
        added |= case_added
        failed |= bool(differences)
        print(f"{name}: {f'{len(differences)} differences' if differences else 'the same'}", flush=True)
        for line in differences[:10]:
            print(f"    {line}")
    print(f"only the earlier commit writes: {', '.join(sorted(gone)) or 'nothing'}")
    print(f"only today's scripts write: {', '.join(sorted(added)) or 'nothing'}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
