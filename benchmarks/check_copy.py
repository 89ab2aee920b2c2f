"""Does a copy of a script compute the same on one process and on two, and after a restart? In two to five minutes.

    python benchmarks/check_copy.py my_grpo.py --flags "--staleness 2" --shards

It trains for three small iterations, with the bundled model unless --flags names another: on `one` process; `still`,
with a rate of 0, where old, new and reference log-probs are equal; on `two`, where both must step with one gradient;
`resumed` on one from the checkpoint of those after two iterations; in bfloat16, where the script itself stops a sampler
that is off; with --shards merged with the sharded script, and resumed. Processes that neither print nor compute for a
minute are ended. After the first, the script itself: if it logs the same, nothing of the change was checked.
Exit code 1: not all is well.
"""

import argparse
import os
import re
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

from common import ROOT, launcher, read_lines, run, variants
from compare import compare_runs

FLAGS = "--batch-size 8 --minibatch-size 8 --total-iterations 3 --max-response-length 40 --eval-rows 4 --eval-every 1"
FLAGS += " --save-every 1 --track none --dtype float32 --resume "
STILL = "--lr", "0", "--total-iterations", "2", "--eval-rows", "0"
HALF = "--dtype", "bfloat16", "--total-iterations", "2", "--eval-rows", "0"  # on most CPUs it is slow
# Runs a script on several ranks. All of them take every step with the same gradients, or each trains its own policy.
WATCH = """import runpy, sys
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

def compare(optimizer, *_):
    given = [p.grad.norm().item() for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, given)
    apart = [max(x) - min(x) for x in zip(*found)]
    if len({*map(len, found)}) > 1 or max(apart, default=0) > 1e-4 * max(map(max, found), default=0):
        raise RuntimeError("the ranks take a step with different gradients: does one of them not add up?")

register_optimizer_step_pre_hook(compare)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def train(name, processes, script, flags):
    """What went wrong in a run of this name, in the folder of the script, or None."""
    words = [script, *flags, "--output-dir", script.parent, "--run-name", name]
    if name == "two" and "fully_shard(" not in script.read_text():  # of shards each rank has its own
        words.insert(0, script.with_name("watch.py"))
        words[0].write_text(WATCH)
    try:
        run(launcher(processes, *words), limit=60, CUDA_VISIBLE_DEVICES="")
    except SystemExit as error:
        said = str(error).partition(": exit code ")[2]
        lines = sorted({int(line) for line in re.findall(rf"{script.name}\", line (\d+),? in main\n", said)})
        if "Fatal Python error: Aborted" not in said:
            box = " ".join(re.findall("(?m)^│ (.*?) *│$", said))  # of tyro
            errors = re.findall(r"(?m)^(?:\[rank\d+\]: ?)?((?:error: |[\w.]+Error: ).*)", said)
            return box or next(iter(errors), said)  # the last error is the launcher's
        before_loop, *_ = script.read_text().partition("\n    for iteration in ")
        if not lines or lines[0] <= before_loop.count("\n"):
            return f"still loading when it was ended, in main, line {lines[:1] or 'none yet'}"
        return f"stood still in main, line {' and '.join(map(str, lines))}: does a rank take no part in a sum?"


def check(name, processes, script, flags):
    """Trains, and compares with the run `one`. Prints a line: did it fail?"""
    print(f"{name}, {processes} process(es): ", end="", flush=True)
    if wrong := train(name, processes, script, flags):
        print(wrong)
        return True
    rows = read_lines(script.parent / name / "metrics.jsonl")
    if name in ("one", "bfloat16"):
        print(f"it runs, KL of sampler and training pass {max(row.get('rollout/kl', 0) for row in rows):.0e} at most")
        return False
    if name == "still":
        kinds = ["actor/approx_kl"] + ["kl/mean"] * ("--ref-model" not in flags)
        moved = [(kind, row) for row in rows for kind in kinds if abs(row.get(kind, 0)) > 1e-6]
        print("with --lr 0 ", "nothing has moved" if not moved else "", sep="", end="" if moved else "\n")
        for kind, row in moved[:1]:
            print(f"{kind} is {row[kind]:.1e} in iteration {row['step']}: are two log-probs of one token apart?")
        return bool(moved)
    differs = compare_runs(script.parent / "one", script.parent / name, 1e-4) == 1
    hint = "is something missing in `state`?" if "resumed" in name else "is something taken over one process's rows?"
    print(f"    {hint}\n" * differs, end="")
    return differs


def resume(name, as_name, processes, script, flags):
    """Takes the last checkpoint of a run away, and checks what becomes of it under another name."""
    folder = Path(script.parent / name).rename(script.parent / as_name)
    last = max(folder.glob("checkpoints/step_*"))
    last.rename(script.parent / f"{as_name}-{last.name}")
    return check(as_name, processes, script, flags)


def acts(script, flags, given):
    """Whether the script, without the change, logs something else than the run `one`. Prints a line.

    given: the user's flags. One that it doesn't have, or of which it complains, is left out.
    """
    print(f"plain, {script.name.removeprefix('plain_')} itself", end="", flush=True)
    known = re.findall(r"(?m)^    (\w+): .*  # ", script.read_text())
    flags = split(flags)
    left = [flag for flag in flags if flag[2:].removeprefix("no-").replace("-", "_") not in known]
    while True:
        words = [word for flag, values in flags.items() if flag not in left for word in [flag, *values]]
        wrong = train("plain", 1, script, words)
        blamed = [flag for flag in split(given) if wrong and re.search(rf"{flag}(?![-\w])", wrong) and flag not in left]
        if not blamed:
            break
        left += blamed
    print(f" without {' '.join(left)}" * bool(left), end=": ")
    if wrong:
        print(f"{wrong}\n    so nobody knows whether the change acts")
        return False
    rows, others = (read_lines(script.parent / run / "metrics.jsonl") for run in ("one", "plain"))
    both = {k for k in rows[-1].keys() & others[-1].keys() if not k.startswith(("time/", "memory/"))}
    found = any(a.get(k) != b.get(k) for a, b in zip(rows, others) for k in both)
    still = [k for k in rows[-1].keys() - others[-1].keys() if len({row[k] for row in rows if k in row}) == 1]
    said = "the same, so with these flags the change does nothing, and nothing of it was checked"
    print("other numbers: the change acts" if found else said, *(f"{k} never changed" for k in still), sep="; ")
    return found


def split(words):
    """{flag: its values} of words of a command line; of a flag that comes twice the last counts."""
    found = {}
    for word in words:
        if word.startswith("--"):
            flag, mark, value = word.partition("=")
            found.pop(flag, None)
            found[flag] = [value] if mark else []
        else:
            found[flag].append(word)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("copy", type=Path)
    parser.add_argument("--flags", default="", help="of the copy, as one string")
    parser.add_argument("--shards", action="store_true")
    args = parser.parse_args()
    text = args.copy.read_text()
    base = variants.nearest(text)
    if args.shards and (base is None or "fully_shard(" in text):
        parser.error(f"--shards: {args.copy} is no copy of ppo_llm.py or grpo_llm.py")
    given = shlex.split(args.flags)
    flags = shlex.split(FLAGS + "--group-size 4 " * ("\n    group_size:" in text)) + given
    print(f"flags: {shlex.join(flags)}")
    os.environ["PYTHONPATH"] = str(args.copy.resolve().parent)  # what it imports
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, args.copy.name)
        script.write_text(text)
        Path(folder, "benchmarks").symlink_to(ROOT / "benchmarks")  # the bundled model
        failed = stuck = check("one", 1, script, flags)
        if base and variants.PARENTS.sub("", text) == (ROOT / base).read_text():
            print(f"it is {base} as it stands")
        elif base and not stuck:  # it isn't a file that imports the script
            failed |= not acts(Path(shutil.copy(ROOT / base, Path(folder, f"plain_{base}"))), flags, given)
        if not stuck:
            failed |= check("still", 1, script, [*flags, *STILL])
            failed |= check("two", 2, script, flags) or resume("two", "resumed", 1, script, flags)
        failed |= check("bfloat16", 1, script, [*flags, *HALF])
        if args.shards:
            script.write_text(variants.keep_insertions(variants.sharded(text, base)[0])[0])
            sharded = check("sharded", 2, script, flags)
            failed |= sharded or resume("sharded", "sharded-resumed", 2, script, flags)
    print("it failed" if failed else "it passed")
    sys.exit(failed)
