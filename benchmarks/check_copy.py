"""Does a copy of a script compute the same on one process and on two, and after a restart? In two to five minutes.

    python benchmarks/check_copy.py my_grpo.py --flags "--staleness 2" --shards

It trains for three small iterations, with the bundled model unless --flags names another: on `one` process; on `two`;
`resumed` on one from the checkpoint of those after two iterations; in bfloat16, where the script itself stops a sampler
that is off; with --shards merged with the sharded script. Two that print nothing for a minute are ended. Last, the
script itself: if it logs the same, --flags don't make the change act, and nothing of it was checked.
"""

import argparse
import os
import re
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

from common import ROOT, find_script, launcher, read_lines, run, variants
from compare import compare_runs

FLAGS = "--batch-size 8 --minibatch-size 8 --total-iterations 3 --max-response-length 40 --eval-rows 4 --eval-every 1"
FLAGS += " --save-every 1 --track none --dtype float32 --resume "
HALF = "--dtype", "bfloat16", "--total-iterations", "2", "--eval-rows", "0"  # on most CPUs it is slow


def check(name, processes, script, flags):
    """Trains in the folder of the script, and compares with the run `one`. Prints a line: did it fail?"""
    print(f"{name}, {processes} process(es): ", end="", flush=True)
    words = launcher(processes, script, *flags, "--output-dir", script.parent, "--run-name", name)
    try:
        run(words, limit=60 if processes > 1 else 600, CUDA_VISIBLE_DEVICES="")
    except SystemExit as error:
        lines = sorted(set(re.findall(rf"{script.name}\", line (\d+),? in main\n", str(error))))
        errors = re.findall(r"(?m)^(?:error: |[\w.]+Error: ).*", str(error))
        still = f"stood still in main, line {' and '.join(lines)}: does a rank take no part in a sum?"
        print(still if "Fatal Python error: Aborted" in str(error) else (errors or [error])[0])
        return True
    if name in ("one", "bfloat16"):
        kl = max(row.get("rollout/kl", 0) for row in read_lines(script.parent / name / "metrics.jsonl"))
        print(f"it runs, KL of sampler and training pass {kl:.0e} at most")
        return False
    if name == "plain":
        rows, others = (read_lines(script.parent / run / "metrics.jsonl") for run in ("one", name))
        both = {k for k in rows[-1].keys() & others[-1].keys() if not k.startswith(("time/", "memory/"))}
        acts = any(a.get(k) != b.get(k) for a, b in zip(rows, others) for k in both)
        still = [k for k in rows[-1].keys() - others[-1].keys() if len({row[k] for row in rows if k in row}) == 1]
        said = "other numbers: the change acts" if acts else "the same: with these flags, the change does nothing"
        print(said, *(f"{k} never changed" for k in still), sep="; ")
        return False
    differs = compare_runs(script.parent / "one", script.parent / name, 1e-4) == 1
    hint = "is something missing in `state`?" if name == "resumed" else "is something taken over one process's rows?"
    print(f"    {hint}\n" * differs, end="")
    return differs


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("copy", type=Path)
    parser.add_argument("--flags", default="", help="of the copy, as one string")
    parser.add_argument("--shards", action="store_true")
    args = parser.parse_args()
    text = args.copy.read_text()
    base = variants.nearest(text)
    flags = shlex.split(FLAGS + "--group-size 4 " * ("group_size:" in text) + args.flags)
    os.environ["PYTHONPATH"] = str(args.copy.resolve().parent)  # what it imports
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, args.copy.name)
        script.write_text(text)
        Path(folder, "benchmarks").symlink_to(ROOT / "benchmarks")  # the bundled model
        failed = check("one", 1, script, flags) or check("two", 2, script, flags)
        if not failed:
            resumed = Path(folder, "two").rename(Path(folder, "resumed"))
            max(resumed.glob("checkpoints/step_*")).rename(Path(folder, "last"))
            failed = check("resumed", 1, script, flags)
        failed |= check("bfloat16", 1, script, [*flags, *HALF])
        if args.shards:
            on = find_script(base.replace(".py", "_fsdp"), script.parent).read_text()
            text, _ = variants.merged(on, (ROOT / base).read_text(), text)
            script.write_text(variants.keep_insertions(text)[0])
            failed |= check("sharded", 2, script, flags)
        if base:  # it isn't a file that imports the script
            plain, words = Path(shutil.copy(ROOT / base, Path(folder, f"plain_{base}"))), []
            for word in flags:  # those that this script has, too
                if word.startswith("--"):
                    flag = word[2:].partition("=")[0].removeprefix("no-").replace("-", "_")
                    known = f"\n    {flag}: " in plain.read_text()
                words += [word] * known
            check("plain", 1, plain, words)
    sys.exit(failed)
