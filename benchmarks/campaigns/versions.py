"""Do the scripts still compute the same numbers? Today's working tree against an earlier commit, bit for bit.

    python benchmarks/campaigns/versions.py                     all cases of the scripts, against version 0.3
    python benchmarks/campaigns/versions.py ppo rloo            some of them
    python benchmarks/campaigns/versions.py variants            every variant, from each side's own script and patch
    python benchmarks/campaigns/versions.py bypass              one of them
    python benchmarks/campaigns/versions.py --rounds 9 ppo-two  seconds of an iteration as well, both sides in turns
    python benchmarks/campaigns/versions.py --rounds 9 --large ppo-two    with a model of 19.5 million parameters

Each case runs for three iterations on both sides. We compare every metric that both of them log (except times and
memory) and every character of the completions, and list the metrics that only one side has. The earlier scripts come
from the repository's history; they and their runs stay in --folder for the next comparison.

Seconds are wall-clock time of an iteration: the median over iterations 3 to 8 of a longer run with four times as many
responses (with --large 3 to 5, and as many). The two sides take turns, so that a busy machine slows both. The ratio is
taken within each round. We show its median, lowest and highest value, for an iteration and for all that follows the
rollout, which is the update.
"""

import argparse
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1]))
import common
import variants
from common import ROOT, TINY, launcher, read_lines

SCRIPTS = "ppo_llm", "grpo_llm", "ppo_llm_fsdp"
COMPOSED = "grpo_llm_fsdp"
VERSION = "68ab617"  # 0.3
# Nothing is left to a version's defaults or guesses.
COMMON = "--total-iterations 3 --eval-every 2 --eval-rows 16 --save-every 0 --track none --max-response-length 32"
COMMON += " --microbatch-tokens 512 --prompt-column question --answer-column answer"
DATA = f" --dataset {TINY}/train.jsonl --eval-dataset {TINY}/test.jsonl"
PPO = " --batch-size 32 --minibatch-size 16"
GRPO = " --batch-size 8 --group-size 4 --minibatch-size 16"
# In 0.3 these three are taken from returns - values, now from the advantages themselves: equal up to rounding.
ROUNDED = {"advantage/mean": 1e-6, "advantage/std": 1e-6, "critic/explained_variance": 1e-5}
# Shard groups exchange gradients in every backward pass, in 0.3 in the last one of a step: equal up to rounding.
ROUNDED_CASES = {"sharded-groups": 1e-5}


class Case(NamedTuple):
    script: str
    processes: int
    flags: str  # besides COMMON
    variant: str | None = None  # patch; each side applies its own


CASES = {
    "ppo": Case("ppo_llm", 1, PPO),
    "ppo-warmup": Case(
        "ppo_llm", 1, PPO + " --critic-warmup-iterations 1 --warmup-iterations 3 --no-whiten-advantages"
    ),
    "ppo-two": Case("ppo_llm", 2, PPO + " --missing-eos-penalty 0.5 --critic-model {chat}"),
    "ppo-two-warmup": Case(
        "ppo_llm", 2, PPO + " --dtype bfloat16 --critic-warmup-iterations 1 --gradient-checkpointing"
    ),
    "grpo": Case("grpo_llm", 1, GRPO),
    "grpo-two": Case("grpo_llm", 2, GRPO + " --dtype bfloat16"),
    "rloo": Case("grpo_llm", 1, GRPO + " --estimator rloo --kl-reward-coef 0.05 --loss-agg seq-mean-token-sum"),
    "dr_grpo": Case("grpo_llm", 1, GRPO + " --estimator dr_grpo --loss-agg seq-mean-token-sum-norm --kl-loss-coef 0"),
    "reinforce_pp": Case("grpo_llm", 2, GRPO + " --estimator reinforce_pp --kl-reward-coef 0.01 --kl-reward-kind k2"),
    "sharded": Case("ppo_llm_fsdp", 2, PPO),
    "sharded-half": Case("ppo_llm_fsdp", 2, PPO + " --dtype bfloat16 --gradient-checkpointing"),
    "sharded-rollout": Case("ppo_llm_fsdp", 2, PPO + " --rollout-params sharded --offload"),
    "sharded-groups": Case("ppo_llm_fsdp", 2, PPO + " --shard-group-size 1"),
    "composed": Case(COMPOSED, 2, GRPO),
    "lora": Case("ppo_llm", 2, PPO + " --lora-rank 4 --lr 1e-3"),
    "sharded-lora": Case("ppo_llm_fsdp", 2, PPO + " --lora-rank 4 --lr 1e-3"),
    "chat": Case("grpo_llm", 1, GRPO + " --model {chat} --lr 1e-4 --temperature 0.8" + DATA),
    "epochs": Case("ppo_llm", 1, PPO + " --ppo-epochs 2 --gradient-checkpointing --max-grad-norm 0.05"),
    "losses": Case("ppo_llm", 1, PPO + " --entropy-coef 0.01 --kl-loss-coef 0.1 --kl-loss-kind k3 --clip-high 0.01"),
}
# Flags that make a variant do something in three short iterations. vllm is left out: it needs its own environment.
VARIANT_FLAGS = {
    "adaptive_kl": "--kl-reward-coef 0.05 --kl-target 0.001 --kl-horizon 40",
    "anneal": "--lr-schedule cosine --warmup-iterations 1",
    "bypass": "--old-logprobs corrected --is-cap 1.001 --dtype bfloat16",
    "dual_clip": "--ppo-epochs 3 --lr 3e-3 --dual-clip 1.05",
    "fp16": "--dtype float16",
    "kl_gradient": "--kl-reward-kind abs --kl-loss-coef 0.1 --kl-loss-kind k3+",
    "lora_bf16": "--dtype bfloat16 --lora-rank 4",
    "target_kl": "--ppo-epochs 3 --target-kl 3e-4",
    "top_p": "--top-p 0.9 --top-k 3 --temperature 1.3",
    "value_clip": "--ppo-epochs 3 --value-clip 0.02",
    "vc_ppo": "--critic-warmup-iterations 1",
}


def variant_cases():
    """{name: its Case}, on two processes if that is possible."""
    cases = {}
    for name in variants.names():
        script = Path(variants.read_patch(name)[1]).stem
        sizes = PPO if script == "ppo_llm" else GRPO
        if name != "vllm":
            processes = 1 if name == "fp16" else 2  # 0.3 scaled its loss by the number of processes as well
            cases[name] = Case(script, processes, f"{sizes} {VARIANT_FLAGS.get(name, '')}", name)
    return cases


ALL = CASES | variant_cases()

TIMED = " --total-iterations 8 --eval-rows 0 --max-response-length 64"  # last, so these win
TIMED += " --microbatch-tokens 1024 --minibatch-size 32 --batch-size {batch_size}"
LARGE = " --total-iterations 5 --max-response-length 32 --minibatch-size 16"  # the same for 19.5 million parameters
SHAPE = {"vocab_size": 420, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6}
SHAPE |= {"num_attention_heads": 8, "num_key_value_heads": 8, "tie_word_embeddings": True}
# Runs a script, and notes the processor time whenever an iteration is logged.
RUN = """
import os, sys, time
sys.path.insert(0, {folder!r})
from accelerate import Accelerator
import {script} as algo

def note_times(self, metrics, **kwargs):
    if os.environ.get("RANK", "0") == "0" and "time/iteration" in metrics:
        with open({notes!r}, "a") as file:
            file.write(f"{{metrics['time/iteration']}} {{metrics['time/rollout']}}\\n")

Accelerator.log = note_times
algo.main(algo.parse_args())
"""


def make_chat_model(folder):
    """The embedded model with a chat template of its own."""
    shutil.copytree(TINY / "model", folder, dirs_exist_ok=True)
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}answer: "
    (folder / "chat_template.jinja").write_text(template)


def compose(folder):
    """Sharded GRPO, out of the three scripts in the folder."""
    files = [f"{name}.py" for name in ("grpo_llm", "ppo_llm", "ppo_llm_fsdp")]
    done = subprocess.run(["git", "merge-file", "-p", *files], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"the scripts in {folder} do not compose: {done.returncode} conflict(s)")
    (folder / f"{COMPOSED}.py").write_text(done.stdout)


def show(version, path):
    """The text of a file at a commit, or in the working tree if version is None."""
    if version is None:
        return (ROOT / path).read_text()
    command = ["git", "show", f"{version}:{path}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def lay_out(folder, version, names=()):
    """The scripts of a commit, or of the working tree, next to the embedded task, and the variants `names`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in SCRIPTS:
        (folder / f"{name}.py").write_text(show(version, f"{name}.py"))
    compose(folder)
    for name in names:
        script = f"{ALL[name].script}.py"
        patch = show(version, f"notes/variants/{name}.patch")
        with tempfile.TemporaryDirectory() as temporary:
            shutil.copy(folder / script, temporary)
            subprocess.run(["git", "apply", "-"], input=patch, text=True, cwd=temporary, check=True)
            shutil.move(Path(temporary, script), folder / f"{name}_{script}")
    if not (folder / "benchmarks").exists():
        (folder / "benchmarks").mkdir()
        (folder / "benchmarks" / "tiny").symlink_to(TINY)


def script_of(case):
    script, variant = ALL[case].script, ALL[case].variant
    return f"{variant}_{script}" if variant else script


def command_of(case, scripts, runs, program=None, more=""):
    """The command of a case on a side. program: runs in place of the script."""
    processes = ALL[case].processes
    words = shlex.split((COMMON + ALL[case].flags + more).format(chat=scripts.parent / "chat"))
    program = program or scripts / f"{script_of(case)}.py"
    words += ["--output-dir", str(runs), "--run-name", case]
    return launcher(processes, program, *words) if processes > 1 else [sys.executable, str(program), *words]


def call(command):
    """Runs a command to its end, without a GPU."""
    return common.run(command, CUDA_VISIBLE_DEVICES="")


def train(case, scripts, runs, again):
    """Trains. Not again: only if it has not run so."""
    command = command_of(case, scripts, runs)
    done = runs / f"{case}.txt"
    if not again and done.exists() and done.read_text() == shlex.join(command):
        return
    runs.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(runs / case, ignore_errors=True)
    done.unlink(missing_ok=True)
    call(command)
    done.write_text(shlex.join(command))


def seconds_of(case, scripts, model):
    """(of an iteration, of it without the rollout) on rank 0: medians over all but the first two."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        notes = folder / "times.txt"
        program = folder / "run.py"
        program.write_text(RUN.format(folder=str(scripts), script=script_of(case), notes=str(notes)))
        batch_size = 32 if "--group-size" in ALL[case].flags else 128
        flags = TIMED.format(batch_size=batch_size)
        if model:
            flags = TIMED.format(batch_size=batch_size // 4) + LARGE + f"{DATA} --model {model} --lr 1e-4"
        call(command_of(case, scripts, folder, program, flags))
        rows = [[float(word) for word in line.split()] for line in notes.read_text().splitlines()][2:]
    return statistics.median(row[0] for row in rows), statistics.median(row[0] - row[1] for row in rows)


def answers_of(row, kind):
    """[prompt, response, score] of a row of 0.3, where pass_at_k has lists and multi_reward a column a score."""
    responses, scores = row.get(f"response{kind}"), row.get(f"score{kind}")
    names = [name for name in row if name.startswith("score/") and name.endswith("_sampled") == bool(kind)]
    if names:
        scores = {name.removeprefix("score/").removesuffix("_sampled"): row[name] for name in names}
    if not isinstance(responses, list):
        responses, scores = [responses], [scores]
    return [[row["prompt"], response, score] for response, score in zip(responses, scores)]


def compare(old, new, most=0.0):
    """(what differs by more than `most`, names that only the old side has, names that only the new one has)."""
    differences, gone, added = [], set(), set()
    for before, after in zip(read_lines(old / "metrics.jsonl"), read_lines(new / "metrics.jsonl"), strict=True):
        timed = {name for name in before.keys() | after.keys() if name.startswith(("time/", "memory/"))}
        gone |= before.keys() - after.keys() - timed
        added |= after.keys() - before.keys() - timed
        for name in sorted((before.keys() & after.keys()) - timed):
            if abs(before[name] - after[name]) > max(most, ROUNDED.get(name, 0)) * max(1, abs(before[name])):
                differences.append(f"step {before['step']} {name}: {before[name]!r} became {after[name]!r}")
    for path in sorted((old / "completions").iterdir()):
        for kind in "", "_sampled":  # in 0.3, one file has both the greedy and the sampled responses of an evaluation
            other = new / "completions" / path.name.replace("eval", f"eval{kind}")
            before = sorted(str(answer) for row in read_lines(path) for answer in answers_of(row, kind))
            after = sorted(str([row[name] for name in ("prompt", "response", "score")]) for row in read_lines(other))
            if (not kind or path.name.startswith("eval")) and before != after:
                differences.append(f"{other.name} has other completions")
    return differences, sorted(gone), sorted(added)


def show_ratios(title, old, new):
    ratios = sorted(after / before for before, after in zip(old, new))
    middles = f"{statistics.median(old):.2f} and {statistics.median(new):.2f} s"
    ends = f"{ratios[0]:.3f} to {ratios[-1]:.3f}, {len(ratios)} rounds"
    print(f"    {title}: {middles}, ratio {statistics.median(ratios):.3f} ({ends})", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"{', '.join(CASES)} (default: all of these); a variant; variants")
    parser.add_argument("--version", default=VERSION, help="commit to compare with")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "versions")
    parser.add_argument("--rounds", type=int, default=0, help="measure seconds as well, in this many turns of both")
    parser.add_argument("--large", action="store_true", help="measure them with a model of 19.5 million parameters")
    args = parser.parse_args()
    chosen = []
    for name in args.cases or CASES:
        if name not in [*ALL, "variants"]:
            parser.error(f"no case {name}; there are {', '.join(ALL)}, variants")
        chosen += [case for case in ALL if ALL[case].variant] if name == "variants" else [name]
    folder = args.folder.resolve()
    sides = {"old": folder / args.version, "new": folder / "today"}
    make_chat_model(folder / "chat")
    model = folder / "large" if args.large else None
    if model:
        common.make_model(model, SHAPE)
    patches = {case for case in chosen if ALL[case].variant}
    lay_out(sides["old"], args.version, patches)
    lay_out(sides["new"], None, patches)
    failed, gone, added = False, set(), set()
    for case in chosen:
        for side, scripts in sides.items():
            train(case, scripts, scripts / "runs", again=side == "new")
        both = [scripts / "runs" / case for scripts in sides.values()]
        differences, case_gone, case_added = compare(*both, ROUNDED_CASES.get(case, 0.0))
        gone |= set(case_gone)
        added |= set(case_added)
        failed |= bool(differences)
        print(f"{case}: {'the same' if not differences else f'{len(differences)} differences'}", flush=True)
        for line in differences[:10]:
            print(f"    {line}")
        rounds = [[seconds_of(case, scripts, model) for scripts in sides.values()] for _ in range(args.rounds)]
        if rounds:
            show_ratios("iteration", [old[0] for old, _ in rounds], [new[0] for _, new in rounds])
            show_ratios("update", [old[1] for old, _ in rounds], [new[1] for _, new in rounds])
    print(f"only the earlier version logs: {', '.join(sorted(gone)) or 'nothing'}")
    print(f"only today's logs: {', '.join(sorted(added)) or 'nothing'}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
