"""Reward: how likely another language model finds the answer "Yes" when it is asked whether a response is good.
Group: the reward, as a file

    JUDGE_MODEL=Qwen/Qwen2.5-1.5B-Instruct accelerate launch ppo_llm.py --reward notes/variants/judge.py:judge ...

The score is the log-probability of " Yes" after the rubric. A frozen model on the rank's device computes it, for a
whole batch together. JUDGE_MODEL is a transformers folder or hub id (default: the bundled model, which knows nothing
of judging), JUDGE_RUBRIC a text with {prompt}, {response} and {answer}, JUDGE_BATCH the rows of one forward pass
(default: 16). Use it if you have a rubric but no rule, and expect the policy to find out what else the judge likes
(length, praise).

A response can talk to its judge. SmolLM2-135M (4-bit weights) gives six right sums -1.83 on average and six wrong ones
-1.85, so it cannot tell them apart; a wrong one that continues with the rubric's last line and "Answer: Yes" gets
-1.58. Try such texts on your judge before you train with it, and keep a rule or another judge for the evaluation.
"""

import functools
import os
import re
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

EMBEDDED = Path(__file__).resolve().parents[2] / "benchmarks" / "tiny" / "model"
RUBRIC = (
    "Question: {prompt}\nA right answer: {answer}\nAn answer to be judged: {response}\n"
    "Is the judged answer right, and is every step of it? Answer Yes or No.\nAnswer:"
)


@functools.cache
def load():
    name = os.environ.get("JUDGE_MODEL", str(EMBEDDED))
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, use_safetensors=True)
    return model.to(device).eval().requires_grad_(False), AutoTokenizer.from_pretrained(name), device


@torch.no_grad()
def judge(prompts, responses, answers):
    """Sum of the log-probs of the tokens of " Yes", a number of at most 0 for each response."""
    model, tokenizer, device = load()
    rubric = os.environ.get("JUDGE_RUBRIC", RUBRIC)
    yes = tokenizer(" Yes", add_special_tokens=False)["input_ids"]
    asked = []
    for columns in zip(prompts, responses, answers):
        texts = dict(zip(("{prompt}", "{response}", "{answer}"), map(str, columns)))
        asked.append(re.sub("|".join(map(re.escape, texts)), lambda found: texts[found[0]], rubric))  # in one pass
    scores = []
    for part in torch.arange(len(asked)).split(int(os.environ.get("JUDGE_BATCH", "16"))):
        rows = [torch.tensor(tokenizer(asked[i])["input_ids"] + yes, device=device) for i in part]
        tokens = pad_sequence(rows, batch_first=True)  # padded at the end, where causal attention does not look
        ends = torch.tensor([len(row) for row in rows], device=device)
        states = (ends[:, None] - len(yes) - 1) + torch.arange(len(yes), device=device)  # (b,y) that predict " Yes"
        hidden = model.base_model(tokens, use_cache=False).last_hidden_state
        hidden = hidden.gather(1, states[..., None].expand(-1, -1, hidden.shape[-1]))  # (b,y,H)
        logprobs = model.get_output_embeddings()(hidden).float().log_softmax(-1)
        scores += logprobs[..., range(len(yes)), yes].sum(-1).tolist()
    return scores
