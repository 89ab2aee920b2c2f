"""The KL of sampler and training pass, by which a run is refused: how large is it when all is well, and when it isn't?

    python benchmarks/campaigns/guard.py families [NAME ...]    random models, those of tests/test_architectures.py
    python benchmarks/campaigns/guard.py MODEL ...              models in folders, by the bundled questions

Writes results/guard/families.csv and models.csv. The KL is that of phase 3: per token by k3, of each response, counted
as at least 16 tokens; `mean` over responses and `worst` of them, the largest of all runs of a row. Families sample 96
responses of at most 1, 2, 3 and 48 tokens with three seeds. `ties` has the weights of all routers times 1e-3, so that
experts are nearly tied. Of a model, the logits of both passes are kept after sampling at temperature 1, and k3 is its
expectation: this gives every temperature and cut from the same two passes. float32 is exact enough to need no table.
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


def row_kl(model, rows, length, seed, half, eos_ids):
    """Of a response to each row, (B,)."""
    stream = torch.Generator().manual_seed(seed)
    uniforms = torch.rand(len(rows), length, generator=stream, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        responses = script.generate(model, [row["input_ids"] for row in rows], uniforms, eos_ids, 1.0)
        tokens, mask, sampled, lengths = script.to_batch(rows, responses, "cpu")
        batches = [script.pack(lengths, range(len(rows)), 256, "cpu")]
        trained = script.forward_all(script.Policy(model, 1.0).train(), batches, tokens, mask, False)[0]
    return script.kl_penalty(sampled, trained, "k3").sum(1) / mask.sum(1).clamp(min=16)


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
            kl = row_kl(model, rows, length, seed, half, test_architectures.EOS)
            found.append((kl.mean().item(), kl.max().item()))
        mean, worst = map(max, zip(*found))
        row = {"family": name, "dtype": "bfloat16" if half else "float32", "lora": rank, "ties": int(ties)}
        yield row | {"mean": mean, "worst": worst}


def logits_of_both(folder, count=12, length=16):
    """The logits of sampler and training pass in bfloat16, a (T,V) tensor for each response."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), load(folder, 0)
    args = script.Args(model="", eval_dataset=f"{TINY}/test.jsonl", dataset=f"{TINY}/train.jsonl", prompt_suffix="")
    rows = script.load_prompts("test", script.read_data(args)[1], args, tokenizer)[0][:count]
    steps, real = [], script.sample_tokens
    script.sample_tokens = lambda logits, *rest: (steps.append(logits.float()), real(logits, *rest))[1]
    uniforms = torch.rand(count, length, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        responses = script.generate(model, [row["input_ids"] for row in rows], uniforms, [-1], 1.0)  # none ends early
        tokens, mask, _, _ = script.to_batch(rows, responses, "cpu")
        hidden = model.train().get_decoder()(tokens, use_cache=False).last_hidden_state
        trained = [model.get_output_embeddings()(hidden[i][mask[i]]).float() for i in range(count)]
    script.sample_tokens = real
    return list(torch.stack(steps).unbind(1)), trained


def cut(logprobs, top_p):
    ordered, order = logprobs.sort(-1, descending=True)
    ordered[ordered.exp().cumsum(-1) - ordered.exp() >= top_p] = -math.inf
    return torch.full_like(logprobs, -math.inf).scatter(-1, order, ordered).log_softmax(-1)


def expected_k3(p, q):
    """Of sampler p against training pass q, log-probs (T,V), per token: KL minus what q has where p is 0."""
    kept = p > -math.inf
    return (torch.where(kept, p.exp() * (p - q), 0).sum(-1) - 1 + (q.exp() * kept).sum(-1)).mean()


def model_rows(folder):
    """Rows of models.csv."""
    pairs = list(zip(*logits_of_both(folder)))

    def row(what, temperature, change):
        found = torch.stack([expected_k3(change(a), (b / temperature).log_softmax(-1)) for a, b in pairs])
        names = {"model": Path(folder).name, "sampler": what, "temperature": temperature}
        return names | {"mean": found.mean().item(), "worst": found.max().item()}

    for temperature in (1.5, 1.0, 0.7, 0.5, 0.3, 0.1):
        yield row("right", temperature, lambda x, t=temperature: (x / t).log_softmax(-1))
    for wrong in (0.95, 0.9, 0.7):
        yield row(f"at {wrong}", 1.0, lambda x, t=wrong: (x / t).log_softmax(-1))
    for top_p in (0.99, 0.9, 0.6):
        yield row(f"top-p {top_p}", 1.0, lambda x, top_p=top_p: cut(x.log_softmax(-1), top_p))


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
