"""The same numbers as an earlier version: its scripts and today's with the same flags, every metric to the bit.

    python benchmarks/versions.py                      all cases of the scripts against version 0.2
    python benchmarks/versions.py ppo rloo             some of them
    python benchmarks/versions.py bypass top_p         variants (VARIANTS below): each against the flag that 0.2 had
    python benchmarks/versions.py --rounds 5 ppo grpo  processor seconds of an iteration as well, both in turns

Three iterations of each case. Compared are all metrics that both log (times and memory aside) and the completions, to
the letter. What only one side logs is listed. The earlier scripts come from the history of the repository and lie with
their runs in --folder, where the next comparison finds them again.

Processor seconds are those of rank 0, without start and evaluation: the median over iterations 3 to 8 of a longer run
with four times as many responses.
Of every round the ratio is taken; shown are its median, lowest and highest.
"""

import argparse
import itertools
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "benchmarks" / "tiny"
SCRIPTS = "ppo_llm", "grpo_llm", "ppo_llm_fsdp"
COMPOSED = "grpo_llm_fsdp"
sys.path.insert(0, str(ROOT / "notes"))
import variants  # noqa: E402

VERSION = "c9bdd21"  # 0.2
# Nothing is left to what a version has for a default or guesses.
COMMON = "--total-iterations 3 --eval-every 2 --eval-rows 16 --save-every 0 --track none --max-response-length 32"
COMMON += " --microbatch-tokens 512 --prompt-column question --answer-column answer"
DATA = f" --dataset {TINY}/train.jsonl --eval-dataset {TINY}/test.jsonl"
PPO = " --batch-size 32 --minibatch-size 16"
GRPO = " --batch-size 8 --group-size 4 --minibatch-size 16"


class Case(NamedTuple):
    script: str
    processes: int
    flags: str  # besides COMMON
    variant: str | None = None  # patch for today's side, merged into the script if made of another
    old: str = ""  # flags of the earlier version alone
    new: str = ""  # flags of today's side alone
    mended: tuple = ()  # metrics that were wrong in the earlier version


CASES = {
    "ppo": Case("ppo_llm", 1, PPO),
    "ppo-warmup": Case(
        "ppo_llm", 1, PPO + " --critic-warmup-iterations 1 --warmup-iterations 3 --no-whiten-advantages"
    ),
    "ppo-two": Case("ppo_llm", 2, PPO + " --missing-eos-penalty 0.5 --critic-model {chat}"),
    "grpo": Case("grpo_llm", 1, GRPO),
    "grpo-two": Case("grpo_llm", 2, GRPO + " --dtype bfloat16"),
    "rloo": Case("grpo_llm", 1, GRPO + " --estimator rloo --kl-reward-coef 0.05 --loss-agg seq-mean-token-sum"),
    "dr_grpo": Case("grpo_llm", 1, GRPO + " --estimator dr_grpo --loss-agg seq-mean-token-sum-norm --kl-loss-coef 0"),
    "reinforce_pp": Case("grpo_llm", 2, GRPO + " --estimator reinforce_pp --kl-reward-coef 0.01 --kl-reward-kind k2"),
    "sharded": Case("ppo_llm_fsdp", 2, PPO),
    "sharded-rollout": Case("ppo_llm_fsdp", 2, PPO + " --rollout-params sharded --offload"),
    "composed": Case(COMPOSED, 2, GRPO),
    "lora": Case("ppo_llm", 2, PPO + " --lora-rank 4 --lr 1e-3"),
    "sharded-lora": Case("ppo_llm_fsdp", 2, PPO + " --lora-rank 4 --lr 1e-3"),
    "chat": Case("grpo_llm", 1, GRPO + " --model {chat} --lr 1e-4 --temperature 0.8" + DATA),
    "epochs": Case("ppo_llm", 1, PPO + " --ppo-epochs 2 --gradient-checkpointing --max-grad-norm 0.05"),
    "losses": Case("ppo_llm", 1, PPO + " --entropy-coef 0.01 --kl-loss-coef 0.1 --kl-loss-kind k3 --clip-high 0.01"),
}
# What left the scripts, in 0.2 a flag and now a variant. They run only if named, one by one or all of a variant. A line
# adds a case: script and flags of both sides, the patch of today's side, flags of the old side alone (`old`) and of
# today's alone (`new`; a reward file has no patch, but `new=" --reward {root}/notes/variants/NAME.py:FUNCTION"`).
CLASSIFIED = " --reward {root}/notes/variants/reward_model.py:reward_model"
VARIANTS = {
    "bypass-rollout": Case("ppo_llm", 1, PPO + " --old-logprobs rollout --ppo-epochs 2", "bypass"),
    "bypass-half": Case("ppo_llm", 1, PPO + " --old-logprobs rollout --dtype bfloat16", "bypass"),
    "bypass-token": Case(
        "ppo_llm",
        1,
        PPO + " --old-logprobs corrected --is-cap 1.001 --dtype bfloat16 --critic-warmup-iterations 1",
        "bypass",
    ),
    "bypass-sequence": Case(
        "ppo_llm", 1, PPO + " --old-logprobs corrected --is-level sequence --dtype bfloat16", "bypass"
    ),
    "bypass-grpo": Case(
        "grpo_llm", 1, GRPO + " --old-logprobs corrected --is-level sequence --dtype bfloat16", "bypass"
    ),
    "adaptive_kl": Case(
        "ppo_llm",
        1,
        PPO + " --kl-reward-coef 0.05 --kl-target 0.001 --kl-horizon 40",
        "adaptive_kl",
        old=" --kl-controller adaptive",
    ),
    "adaptive_kl-warmup": Case(
        "ppo_llm", 1, PPO + " --critic-warmup-iterations 1", "adaptive_kl", old=" --kl-controller adaptive"
    ),
    "top_p": Case("ppo_llm", 1, PPO + " --top-p 0.8", "top_p"),
    "top_p-top_k": Case("ppo_llm", 1, PPO + " --top-p 0.9 --top-k 3 --temperature 1.3", "top_p"),
    "anneal-linear": Case("ppo_llm", 1, PPO + " --lr-schedule linear", "anneal"),
    "anneal-cosine": Case("ppo_llm", 1, PPO + " --lr-schedule cosine --warmup-iterations 1", "anneal"),
    "anneal-grpo": Case("grpo_llm", 1, GRPO + " --lr-schedule cosine", "anneal"),
    "anneal-constant": Case("ppo_llm", 1, PPO + " --lr-schedule constant --warmup-iterations 2", "anneal"),
    "kl_gradient-grpo": Case("grpo_llm", 1, GRPO + " --kl-loss-coef 0.1 --kl-loss-kind k3+", "kl_gradient"),
    "kl_gradient-abs": Case(
        "ppo_llm", 1, PPO + " --kl-reward-kind abs --kl-loss-coef 0.1 --kl-loss-kind k3+", "kl_gradient"
    ),
    "kl_gradient-k1": Case(
        "ppo_llm", 1, PPO + " --kl-reward-kind k3+ --kl-loss-coef 0.1 --kl-loss-kind k1+", "kl_gradient"
    ),
    "kl_gradient-loss": Case(
        "ppo_llm", 1, PPO + " --kl-reward-kind k1+ --kl-loss-coef 0.1 --kl-loss-kind abs", "kl_gradient"
    ),
    "dual_clip": Case("ppo_llm", 1, PPO + " --ppo-epochs 3 --lr 3e-3 --dual-clip 1.05", "dual_clip"),
    "value_clip": Case("ppo_llm", 1, PPO + " --ppo-epochs 3 --value-clip 0.02", "value_clip"),
    # The earlier version counted the loss of the minibatch at which it stopped.
    "target_kl": Case("ppo_llm", 1, PPO + " --ppo-epochs 3 --target-kl 3e-4", "target_kl", mended=("actor/loss",)),
    "target_kl-never": Case("ppo_llm", 1, PPO + " --ppo-epochs 3 --target-kl 100", "target_kl"),
    "reward_model": Case("ppo_llm", 1, PPO, old=" --reward-model {classifier}", new=CLASSIFIED),
}
ALL = CASES | VARIANTS

TIMED = " --total-iterations 8 --eval-rows 0 --max-response-length 64"  # last, so that these hold
TIMED += " --microbatch-tokens 1024 --minibatch-size 32 --batch-size {batch_size}"
# Runs a script, and notes the processor time whenever an iteration is logged.
RUN = """
import os, sys, time
sys.path.insert(0, {folder!r})
from accelerate import Accelerator
import {script} as algo

def note_time(*args, **kwargs):
    if os.environ.get("RANK", "0") == "0":
        with open({notes!r}, "a") as file:
            file.write(f"{{time.process_time()}}\\n")

Accelerator.log = note_time
algo.main(algo.parse_args())
"""


def make_chat_model(folder):
    """The embedded model with a chat template of its own."""
    shutil.copytree(TINY / "model", folder, dirs_exist_ok=True)
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}answer: "
    (folder / "chat_template.jinja").write_text(template)


def make_classifier(folder, chat):
    """The same as a reward model, for the flag of the earlier version and for today's reward file."""
    from transformers import AutoModelForSequenceClassification, set_seed

    set_seed(1)  # for the head
    shutil.copytree(chat, folder, dirs_exist_ok=True)
    AutoModelForSequenceClassification.from_pretrained(chat, num_labels=1).save_pretrained(folder)
    os.environ |= {"REWARD_MODEL": str(folder), "REWARD_BATCH": "1"}


def compose(folder):
    """Sharded GRPO, out of the three scripts in the folder."""
    files = [f"{name}.py" for name in ("grpo_llm", "ppo_llm", "ppo_llm_fsdp")]
    done = subprocess.run(["git", "merge-file", "-p", *files], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"the scripts in {folder} do not compose: {done.returncode} conflict(s)")
    (folder / f"{COMPOSED}.py").write_text(done.stdout)


def lay_out(folder, version, patches=()):
    """The scripts of a commit, or of the working tree, beside the embedded task. patches: (variant, script) pairs."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in SCRIPTS:
        if version is None:
            text = (ROOT / f"{name}.py").read_text()
        else:
            command = ["git", "show", f"{version}:{name}.py"]
            text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        (folder / f"{name}.py").write_text(text)
    compose(folder)
    for name, script in patches:
        text, base = variants.patched(name), (ROOT / variants.read_patch(name)[1]).read_text()
        text, conflicts = variants.merged((folder / f"{script}.py").read_text(), base, text)
        if conflicts:
            sys.exit(f"{name} and {script} change the same lines, in {conflicts} place(s)")
        (folder / f"{name}_{script}.py").write_text(text)
    if not (folder / "benchmarks").exists():
        (folder / "benchmarks").mkdir()
        (folder / "benchmarks" / "tiny").symlink_to(TINY)


def script_of(case, side):
    """Name of the script that a case runs on a side, "old" or "new"."""
    script, variant = ALL[case].script, ALL[case].variant
    return f"{variant}_{script}" if variant and side == "new" else script


def command_of(case, side, scripts, runs, program=None, more=""):
    """The command of a case on a side. program: runs in place of the script."""
    processes, flags = ALL[case].processes, ALL[case].flags
    flags += getattr(ALL[case], side)
    places = {name: scripts.parent / name for name in ("chat", "classifier")}
    words = shlex.split((COMMON + flags + more).format(**places, root=ROOT))
    launcher = [str(Path(sys.executable).with_name("accelerate")), "launch", "--num_machines", "1"]
    launcher += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    launcher += ["--num_processes", str(processes)] + ["--multi_gpu"] * (processes > 1)
    start = launcher if processes > 1 else [sys.executable]
    program = program or scripts / f"{script_of(case, side)}.py"
    return [*start, str(program), *words, "--output-dir", str(runs), "--run-name", case]


def call(command, log):
    """Runs a command to its end, its console in the file `log`."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
    with open(log, "w") as console:
        code = subprocess.run(command, stdout=console, stderr=subprocess.STDOUT, env=env).returncode
    if code:
        sys.exit(f"{shlex.join(command)}: exit code {code}\n{log.read_text()[-3000:]}")


def run(case, side, scripts, runs, again):
    """Trains. Not again: only if it has not run so."""
    command = command_of(case, side, scripts, runs)
    done = runs / f"{case}.txt"
    if not again and done.exists() and done.read_text() == shlex.join(command):
        return
    runs.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(runs / case, ignore_errors=True)
    done.unlink(missing_ok=True)
    call(command, runs / f"{case}.log")
    done.write_text(shlex.join(command))


def processor_seconds(case, side, scripts):
    """Of an iteration on rank 0: the median over all but the first two."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        notes = folder / "times.txt"
        program = folder / "run.py"
        program.write_text(RUN.format(folder=str(scripts), script=script_of(case, side), notes=str(notes)))
        batch_size = 32 if "--group-size" in ALL[case].flags else 128
        flags = TIMED.format(batch_size=batch_size)
        call(command_of(case, side, scripts, folder, program, flags), folder / "console.txt")
        times = [float(line) for line in notes.read_text().split()]  # the first is from before training
    seconds = [end - begin for begin, end in itertools.pairwise(times)]
    return statistics.median(seconds[2:])


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def compare(old, new, mended=()):
    """(what differs, names that only the old side has, names that only the new one has). mended: what may differ."""
    differences, gone, added = [], set(), set()
    for before, after in zip(read_lines(old / "metrics.jsonl"), read_lines(new / "metrics.jsonl"), strict=True):
        timed = {name for name in before.keys() | after.keys() if name.startswith(("time/", "memory/"))}
        gone |= before.keys() - after.keys() - timed
        added |= after.keys() - before.keys() - timed
        for name in sorted((before.keys() & after.keys()) - timed - {*mended}):
            if before[name] != after[name]:
                differences.append(f"step {before['step']} {name}: {before[name]!r} became {after[name]!r}")
    for path in sorted((old / "completions").iterdir()):
        if read_lines(path) != read_lines(new / "completions" / path.name):
            differences.append(f"{path.name} has other completions")
    return differences, sorted(gone), sorted(added)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)} (default: these); {', '.join(VARIANTS)}")
    parser.add_argument("--version", default=VERSION, help="commit to compare with")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "versions")
    parser.add_argument("--rounds", type=int, default=0, help="so many turns of both, for their processor seconds")
    args = parser.parse_args()
    chosen = []
    for name in args.cases or CASES:
        cases = [case for case in ALL if name in (case, ALL[case].variant)]
        if not cases:
            parser.error(f"no case {name}; there are {', '.join(ALL)}")
        chosen += cases
    folder = args.folder.resolve()
    sides = {"old": folder / args.version, "new": folder / "today"}
    make_chat_model(folder / "chat")
    if "reward_model" in chosen:
        make_classifier(folder / "classifier", folder / "chat")
    lay_out(sides["old"], args.version)
    lay_out(sides["new"], None, {(ALL[case].variant, ALL[case].script) for case in chosen if ALL[case].variant})
    failed, gone, added = False, set(), set()
    for case in chosen:
        for side, scripts in sides.items():
            run(case, side, scripts, scripts / "runs", again=side == "new")
        both = [scripts / "runs" / case for scripts in sides.values()]
        mended = ALL[case].mended
        differences, case_gone, case_added = compare(*both, mended)
        gone |= set(case_gone)
        added |= set(case_added)
        failed |= bool(differences)
        but = f" but for {', '.join(mended)}, mended since" if mended else ""
        print(f"{case}: {'the same' if not differences else f'{len(differences)} differences'}{but}", flush=True)
        for line in differences[:10]:
            print(f"    {line}")
        seconds = {side: [] for side in sides}
        for _ in range(args.rounds):
            for side, scripts in sides.items():
                seconds[side].append(processor_seconds(case, side, scripts))
        if args.rounds:
            ratios = sorted(new / old for old, new in zip(seconds["old"], seconds["new"]))
            ends = f"{ratios[0]:.3f} to {ratios[-1]:.3f}"
            middle = " and ".join(f"{statistics.median(seconds[side]):.2f}" for side in sides)
            print(
                f"    processor seconds of an iteration {middle}: {statistics.median(ratios):.3f} ({ends})", flush=True
            )
    print(f"only the earlier version logs: {', '.join(sorted(gone)) or 'nothing'}")
    print(f"only today's logs: {', '.join(sorted(added)) or 'nothing'}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
