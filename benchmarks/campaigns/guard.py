"""What the check of the sampler measures when all is well, and when it isn't: the KL by which a run is refused, and the
surprise, which needs nothing from the sampler.

    python benchmarks/campaigns/guard.py families [NAME ...]    random models, those of tests/test_architectures.py
    python benchmarks/campaigns/guard.py MODEL[:LATER[:ADAPTER]] ...    models in folders, by the bundled questions;
                                                                a name that ends in ,bfloat16: in that alone

Writes results/guard/families.csv and models.csv. The KL is that of phase 3: per token by k3, of each response, counted
as at least 16 tokens; `mean` over responses and `worst` of them. `surprise` and `z` are the metrics, `variance` is what
the sum of surprises should have for a square. Families sample 96 responses of at most 1, 2, 3 and 48 tokens with three
seeds; a row has the largest KLs and the z that is furthest from 0. `ties` has the weights of all routers times 1e-3, so
that experts are nearly tied. Of a model, a sampler is spoilt in many ways; `uncut` is the mean KL if it reports the
log-probs that it would have had. LATER has the weights after an iteration, ADAPTER is a LoRA run's folder.
"""

import itertools
import math
import sys
from pathlib import Path

sys.path += [str(Path(__file__).resolve().parents[2] / folder) for folder in ("benchmarks", "tests", "notes")]
import ranks
import torch
from common import ROOT, TINY, write_csv
from transformers import AutoModelForCausalLM, AutoTokenizer

FOLDER = ROOT / "benchmarks" / "results" / "guard"
script = ranks.load_script(ROOT / "ppo_llm.py")


def load(folder, lora_rank, ties=False):
    model = script.load_model(str(folder), AutoModelForCausalLM, lora_rank, task_type="CAUSAL_LM")
    for name, parameter in model.named_parameters():
        if ties and parameter.dim() == 2 and ("router" in name or ".gate." in name):
            parameter.data *= 1e-3
    return model


def check(sampled, passed, mask):
    """(KL of each response, its metrics) of what the sampler reports and a training pass (3,B,L)."""
    found = script.check_sampler(sampled, *passed, mask, math.inf, 0)
    found["variance"] = passed[2].double().sum().item()
    return script.kl_penalty(sampled, passed[0], "k3").sum(1) / mask.sum(1).clamp(min=16), found


def row_kl(model, rows, length, seed, half, eos_ids):
    """Of a response to each row."""
    stream = torch.Generator().manual_seed(seed)
    uniforms = torch.rand(len(rows), length, generator=stream, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        responses = script.generate(model, [row["input_ids"] for row in rows], uniforms, eos_ids, 1.0)
        tokens, mask, sampled, lengths = script.to_batch(rows, responses, "cpu")
        batches = [script.pack(lengths, range(len(rows)), 256, "cpu")]
        return check(sampled, script.forward_all(script.Policy(model, 1.0).train(), batches, tokens, mask), mask)


def family(name, folder):
    """Rows of families.csv."""
    import test_architectures

    if not folder.exists():
        test_architectures.make_family(name, folder)
    stream = torch.Generator().manual_seed(5)
    lengths = torch.randint(3, 40, (96,), generator=stream).tolist()
    rows = [{"input_ids": torch.randint(9, 300, (length,), generator=stream).tolist()} for length in lengths]
    names = [key for key, _ in load(folder, 0).named_parameters()]
    experts = any("router" in key or ".gate." in key for key in names)
    for half, rank, ties in itertools.product((False, True), (0, 4), (False, True) if experts else (False,)):
        model, found = load(folder, rank, ties), []
        for length, seed in itertools.product((1, 2, 3, 48), (1, 2, 3) if half else (1,)):
            found.append(row_kl(model, rows, length, seed, half, test_architectures.EOS))
        row = {"family": name, "dtype": "bfloat16" if half else "float32", "lora": rank, "ties": int(ties)}
        row |= {"mean": max(kl.mean().item() for kl, _ in found), "worst": max(kl.max().item() for kl, _ in found)}
        yield row | surprise_of(max((m for _, m in found), key=lambda m: abs(m["rollout/surprise_z"])))


def surprise_of(metrics):
    names = {"surprise": "rollout/surprise", "variance": "variance", "z": "rollout/surprise_z"}
    return {name: metrics[key] for name, key in names.items()}


def keep(logits, kept):
    return logits.masked_fill(~kept, -math.inf)


def top_p(logits, share):
    probs, order = logits.softmax(-1).sort(-1, descending=True)
    return keep(logits, torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, probs.cumsum(-1) - probs < share))


def penalise(logits, seen):
    """A repetition penalty of 1.1 on what the response already has."""
    for row, ids in enumerate(seen.tolist()):
        picked = logits[row, ids]
        logits[row, ids] = torch.where(picked > 0, picked / 1.1, picked * 1.1)
    return logits


def faults(eos_ids):
    """{name: what it makes of the logits (B,V), with the tokens sampled before (B,t)}"""
    found = {"right": lambda x, seen: x}
    found |= {f"at {at}": lambda x, seen, at=at: x / at for at in (0.9, 0.7)}
    found |= {f"top-p {share}": lambda x, seen, share=share: top_p(x, share) for share in (0.9, 0.6)}
    found |= {f"top-k {k}": lambda x, seen, k=k: keep(x, x >= x.topk(k).values[:, -1:]) for k in (5, 50)}
    found["min-p 0.1"] = lambda x, seen: keep(x, x.softmax(-1) >= 0.1 * x.softmax(-1).amax(-1, keepdim=True))
    found["repetition penalty"] = penalise
    found["EOS masked"] = lambda x, seen: x.index_fill(1, torch.tensor(eos_ids), -math.inf)
    return found


def spoilt(sampler, trainer, rows, eos_ids, change, temperature, half, length):
    """A row of models.csv: what the check says of this sampler."""
    seen, uncut, real = [], [], script.sample_tokens
    noise = torch.rand(len(rows), length, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def sample_tokens(logits, uniforms, temperature):
        logits = logits.float() / temperature
        so_far = torch.stack(seen, 1) if seen else torch.zeros(len(rows), 0, dtype=torch.long)
        tokens, logprobs = real(change(logits.clone(), so_far), uniforms, 1.0)
        seen.append(tokens)
        uncut.append(logits.log_softmax(-1).gather(1, tokens[:, None]).squeeze(1))
        return tokens, logprobs

    script.sample_tokens = sample_tokens
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        prompts = [row["input_ids"] for row in rows]
        found = sampler(lambda model: script.generate(model, prompts, noise, [-1], temperature))  # no row leaves
        script.sample_tokens = real
        ids, reported = (torch.tensor([list(x) for x in zip(*found)][i]) for i in (0, 1))
        kinds = [script.cut_responses(ids, logprobs, eos_ids) for logprobs in (reported, torch.stack(uncut, 1))]
        tokens, mask, sampled, lengths = script.to_batch(rows, kinds[0], "cpu")
        claimed = script.to_batch(rows, kinds[1], "cpu")[2]
        batches = [script.pack(lengths, range(len(rows)), 2048, "cpu")]
        passed = script.forward_all(script.Policy(trainer, temperature).train(), batches, tokens, mask)
    kl, metrics = check(sampled, passed, mask)
    row = {"tokens": int(mask.sum()), "mean": kl.mean().item(), "worst": kl.max().item()}
    return row | {"uncut": check(claimed, passed, mask)[0].mean().item()} | surprise_of(metrics)


def model_rows(folders, count=200, length=40):
    """Rows of models.csv."""
    folders, alone, _ = folders.partition(",bfloat16")
    folder, later, adapter = [*folders.split(":"), None, None][:3]
    tokenizer, model = AutoTokenizer.from_pretrained(folder), load(folder, 0)
    args = script.Args(model="", eval_dataset=f"{TINY}/test.jsonl", dataset=f"{TINY}/train.jsonl", prompt_suffix="")
    rows = script.load_prompts("test", script.read_data(args)[1], args, tokenizer)[0][:count]
    eos_ids = script.collect_eos_ids(model, tokenizer)
    same = faults(eos_ids)["right"]
    cases = [(name, model, lambda sample: sample(model), change, 1.0) for name, change in faults(eos_ids).items()]
    cases += [("right", model, lambda sample: sample(model), same, temperature) for temperature in (1.5, 0.5, 0.1)]
    if later:
        cases.append(("an iteration old", load(later, 0), lambda sample: sample(model), same, 1.0))
    if adapter:
        tuned = AutoModelForCausalLM.from_pretrained(adapter, dtype=torch.float32)

        def without(sample):
            tuned.disable_adapters()
            responses = sample(tuned)
            tuned.enable_adapters()
            return responses

        cases.append(("right, LoRA", tuned, lambda sample: sample(tuned), same, 1.0))
        cases.append(("without its adapter", tuned, without, same, 1.0))
    halves = (True,) if alone else (False, True)
    for half, (name, trainer, sampler, change, temperature) in itertools.product(halves, cases):
        row = {"model": Path(folder).name, "dtype": "bfloat16" if half else "float32", "sampler": name}
        row |= {"temperature": temperature}
        row |= spoilt(sampler, trainer, rows, eos_ids, change, temperature, half, length)
        print(row, flush=True)
        yield row


def write(name, rows):
    write_csv(FOLDER / name, [{k: f"{v:.2g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows])


if __name__ == "__main__":
    if sys.argv[1] == "families":
        from test_architectures import FAMILIES, REFUSED

        rows = []
        for name in sys.argv[2:] or [name for name in FAMILIES if name not in REFUSED]:
            rows += family(name, ROOT / "runs" / "guard" / name.replace(", ", "-").replace(" ", "-"))
            write("families.csv", rows)
            print(name, flush=True)
    else:
        write("models.csv", [row for folder in sys.argv[1:] for row in model_rows(folder)])
