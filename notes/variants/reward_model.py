"""Reward: the score that a reward model, a sequence classifier with one label, gives to a response.
Group: the reward, as a file

    REWARD_MODEL=FOLDER_OR_HUB_ID accelerate launch ppo_llm.py --reward notes/variants/reward_model.py:reward_model ...

The classifier reads the prompt's messages and the response as a chat through the template of its own tokenizer or, if
that has none, prompt and response as one text. The score is the raw logit, so choose the KL coefficient for its scale.
transformers takes it from the last token that isn't the padding token, even where the text ends in that. The run keeps
SETTINGS in args.json.
REWARD_BATCH (default: 16) rows of similar length are read together; a classifier whose configuration names no padding
token reads row by row. Every process has a copy in float32 on its device; on a GPU, everything but the head computes in
bfloat16. If your data has no reference answers, pass --answer-column None.
"""

import functools
import math
import os
import sys

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForSequenceClassification, AutoTokenizer

NAME = os.environ.get("REWARD_MODEL")
SETTINGS = {"REWARD_MODEL": NAME}
if not NAME:
    sys.exit("error: say which model scores: REWARD_MODEL=FOLDER_OR_HUB_ID in front of the command")


@functools.cache
def load():
    """(classifier, its tokenizer, device of this process)"""
    options = {"dtype": torch.float32, "use_safetensors": True, "output_loading_info": True}
    model, info = AutoModelForSequenceClassification.from_pretrained(NAME, **options)
    if info["missing_keys"] or model.config.num_labels != 1:
        lacks = f"labels: {model.config.num_labels}, missing weights: {sorted(info['missing_keys'])}"
        raise ValueError(f"REWARD_MODEL {NAME} is no sequence classifier with one label ({lacks})")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_bf16_supported(including_emulation=False):
            use_bfloat16(model, "cuda")
    return model.to(device).eval().requires_grad_(False), AutoTokenizer.from_pretrained(NAME), device


def use_bfloat16(model, device_type):
    """Autocast for the backbone alone: in bfloat16 a score would have two or three digits."""
    model.base_model.forward = torch.autocast(device_type, torch.bfloat16)(model.base_model.forward)
    head = model.score if hasattr(model, "score") else model.classifier
    head.register_forward_pre_hook(lambda _, inputs: inputs[0].float())


@torch.no_grad()
def reward_model(prompts, responses, answers, messages):
    """The classifier's score of each response."""
    model, tokenizer, device = load()
    texts = [prompt + response for prompt, response in zip(prompts, responses)]
    if tokenizer.chat_template:  # it writes the BOS itself
        chats = [[*chat, {"role": "assistant", "content": text}] for chat, text in zip(messages, responses)]
        texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
    # Each text once, so that equal responses have equal scores: in another batch a score differs by rounding.
    rows = {text: tokenizer(text, add_special_tokens=not tokenizer.chat_template)["input_ids"] for text in texts}
    order = sorted(rows, key=lambda text: len(rows[text]))
    longest = max(map(len, rows.values()), default=0)
    limit = min(tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", math.inf))
    if longest > limit:
        raise ValueError(f"REWARD_MODEL {NAME} reads {limit} tokens, a prompt with its response has {longest}")
    pad = model.config.get_text_config().pad_token_id  # what the classifier itself takes for padding
    size = 1 if pad is None else int(os.environ.get("REWARD_BATCH", "16"))
    scores = {}
    for first in range(0, len(order), size):
        part = order[first : first + size]
        tokens = [torch.tensor(rows[text], device=device) for text in part]
        mask = [torch.ones_like(row) for row in tokens]  # not `!= pad`: a text may end in that token, too
        tokens = pad_sequence(tokens, batch_first=True, padding_value=pad or 0)  # (b,L)
        mask = pad_sequence(mask, batch_first=True)
        logits = model(tokens, attention_mask=mask).logits  # (b,1)
        scores |= zip(part, logits[:, 0].tolist())
    return [scores[text] for text in texts]
