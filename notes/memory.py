"""Memory arithmetic of the scripts, term by term, in bytes per device: python notes/memory.py prints the tables.

The functions are the terms of notes/run/speed.md and of section 15.5. Shapes are those of Qwen2, with heads of any
width, or with experts as in Qwen3-MoE. `bf16` means --dtype bfloat16; `sharded` means ppo_llm_fsdp.py, which casts
weights where ppo_llm.py and grpo_llm.py use autocast.
"""

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Shape:
    """What the config of a model says. With experts, `intermediate` is the width of one."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    tied: bool  # the output head is the embedding
    head_dim: int = 0  # 0: hidden / heads
    experts: int = 0  # in each block; 0: it has one MLP
    active: int = 0  # of them for a token

    @property
    def head_width(self):
        return self.head_dim or self.hidden // self.heads

    @property
    def q_width(self):
        return self.head_width * self.heads

    @property
    def kv_width(self):
        return self.head_width * self.kv_heads


SHAPES = {
    "Qwen2.5-0.5B": Shape(151_936, 896, 4864, 24, 14, 2, True),
    "Qwen2.5-1.5B": Shape(151_936, 1536, 8960, 28, 12, 2, True),
    "Qwen2.5-7B": Shape(152_064, 3584, 18_944, 28, 28, 4, False),
}


# Parameters


def linear_sizes(shape):
    """(in, out) of the linear layers of one block: q, k, v, o, gate, up, down. Experts are none in transformers."""
    h, q, k, m = shape.hidden, shape.q_width, shape.kv_width, shape.intermediate
    mlp = [] if shape.experts else [(h, m), (h, m), (m, h)]
    return [(h, q), (h, k), (h, k), (q, h), *mlp]


def count_linear(shape):
    """Parameters of the linear layers of one block, with the biases of q, k and v."""
    return sum(a * b for a, b in linear_sizes(shape)) + shape.q_width + 2 * shape.kv_width


def count_block(shape):
    """Parameters of one block: its linear layers, two norms, experts and what chooses them."""
    h, m = shape.hidden, shape.intermediate
    return count_linear(shape) + 2 * h + shape.experts * (3 * h * m + h)


def count_root(shape, critic=False):
    """Parameters outside the blocks: embedding, last norm, output head unless tied (or the critic's, a vector)."""
    head = shape.hidden + 1 if critic else 0 if shape.tied else shape.vocab * shape.hidden
    return shape.vocab * shape.hidden + shape.hidden + head


def count(shape, critic=False):
    """Parameters of an actor, or of a critic."""
    return shape.layers * count_block(shape) + count_root(shape, critic)


def count_cast(shape, critic=False):
    """Parameters, biases included, of the linear layers that `wrap` casts to bfloat16 if they are frozen.

    A head that is tied to the embedding stays in float32. Of the critic's, peft keeps a frozen copy.
    """
    head = shape.hidden + 1 if critic else 0 if shape.tied else shape.vocab * shape.hidden
    return shape.layers * count_linear(shape) + head


def count_trained(shape, lora_rank=0, critic=False):
    """Parameters that have a gradient: all, or rank * (in + out) per linear layer, and the critic's head."""
    if not lora_rank:
        return count(shape, critic)
    return shape.layers * sum(lora_rank * (a + b) for a, b in linear_sizes(shape)) + (shape.hidden + 1) * critic


# What is there all the time


def state(shape, lora_rank=0, critic=True, cast=False):
    """In float32: weights, the reference (with LoRA none), Adam's two moments per trained parameter, and gradients.

    Gradients are those of one model at a time: zero_grad frees the actor's before the critic makes its own. cast:
    frozen linear layers are in bfloat16, as in the scripts that don't shard.
    """
    models = (False, True) if critic else (False,)
    trained = [count_trained(shape, lora_rank, c) for c in models]
    weights = 4 * sum(count(shape, c) for c in models)
    if lora_rank:
        weights += 4 * sum(trained) - 2 * cast * sum(count_cast(shape, c) for c in models)
    return {
        "weights": weights,
        "reference": 0 if lora_rank else 4 * count(shape) - 2 * cast * count_cast(shape),
        "adam": 8 * sum(trained),
        "gradients": 4 * max(trained),
    }


# What comes and goes


def exchange(shape, lora_rank=0):
    """`sum_gradients` copies 16 gradients at a time, at most the embedding's and those of two blocks."""
    if lora_rank:
        return 4 * 2 * count_trained(shape, lora_rank) // shape.layers
    return 4 * (shape.vocab * shape.hidden + 2 * count_block(shape))


def autocast_copies(shape, lora_rank=0):
    """Weights of the linear layers in bfloat16, which autocast makes at their first use in a pass and then keeps.

    With LoRA they are in bfloat16 already, except for a tied head, whose copy the backward pass keeps.
    """
    if lora_rank:
        return 2 * shape.vocab * shape.hidden * shape.tied
    return 2 * (count_linear(shape) * shape.layers + shape.vocab * shape.hidden)  # neither norms nor experts


def activations(shape, tokens, bf16=False, sharded=False, checkpointing=False, plain_length=0):
    """What the blocks keep for the backward pass, for so many tokens, padding included.

    With checkpointing that is the input of every block, and all of one, which is computed again. plain_length: of a
    row, where no fused kernel runs: keys and values repeated for every head, and the probabilities, are kept as well.
    Autocast leaves experts in float32 (seen on a CPU). Of each that a token has, input and output are kept, too.
    """
    h, m, small = shape.hidden, 0 if shape.experts else shape.intermediate, 4 * (shape.heads + 2)
    attention = 2 * shape.q_width + 2 * shape.kv_width  # q, k, v and what comes of them
    if not bf16:
        block, stream = 4 * (6 * h + attention + 4 * m) + small, 4 * h
    elif sharded:
        block, stream = 4 * 2 * h + 2 * (4 * h + attention + 4 * m) + small, 2 * h
    else:
        block, stream = 4 * 4 * h + 2 * (5 * h + attention + 4 * m) + small, 4 * h
    block += shape.active * (2 if bf16 and sharded else 4) * (4 * shape.intermediate + 2 * h)
    if plain_length:
        block += 4 * (shape.heads * plain_length + 2 * (shape.q_width - shape.kv_width) - shape.heads)
    return tokens * (shape.layers * stream + block if checkpointing else shape.layers * block)


def logits(shape, response_tokens):
    """Four float32 tensors: logits, log-probs, and for the entropy their exponentials and the products.

    `Policy.forward` holds at most 2**26 elements of each at a time.
    """
    return 4 * 4 * min(response_tokens * shape.vocab, max(2**26, shape.vocab))


def embedding_gradient(shape, response_tokens, microbatches=2):
    """(at the end of the backward pass, while the head runs backward, beside the activations), beyond `gradients`.

    At the end there is that of a micro-batch before it is added; of a tied weight both uses' and their sum. In the
    first micro-batch of a step what results is the gradient itself: one less. While the head runs there is the head's
    own, or all of it, if the logits come in parts (`logits`).
    """
    one = 4 * shape.vocab * shape.hidden
    end = one * ((3 if shape.tied else 1) - (microbatches == 1))
    return end, end if response_tokens * shape.vocab > 2**26 else one


def gathered_units(shape, bf16=True, lora_rank=0):
    """(while blocks run, at the end of the backward pass) of a sharded model, as FSDP2 gathers it.

    Embedding and head are whole all the time, and the head's gradient from the beginning of the backward pass; of the
    blocks two are whole, and one has its gradient, whole and as it is sent. At the end there is the gradient of
    embedding and head: as it is sent in float32, or, when tied, as two uses and their sum.
    """
    w, block, root = 2 if bf16 else 4, count_block(shape), count_root(shape)
    if lora_rank:  # what is frozen has no gradient
        return w * root + 2 * w * block, 0
    head_gradient = w * shape.vocab * shape.hidden
    running = w * root + head_gradient + 2 * w * block + (w + 4) * block
    return running, w * root + max(w + 4, 3 * w if shape.tied else 0) * root


def kv_cache(shape, rows, length, bf16=False, sharded=False, graphs=False):
    """Keys and values of `rows` rows: bfloat16 if weights are cast or cuda_graphs.py samples, else float32."""
    return rows * length * shape.layers * 2 * shape.kv_width * (2 if bf16 and (sharded or graphs) else 4)


def prefill(shape, rows, prompt, bf16=False, sharded=False, lora_rank=0):
    """Beside the keys and values: what is there at once while `rows` prompts, padded to `prompt` tokens, are read.

    Nothing is kept, so the widest moment of one block counts. In its MLP the activated gate, up and their product stand
    beside four tensors as wide as the stream: the embedding, the block's input, what attention made of it, and its
    norm. LoRA has a fourth product; under autocast peft casts its widest input, down's, to float32, and autocast back.
    The rest: cosine and sine, the causal mask of padded rows, and five whole numbers (ids, mask, positions, ...).
    """
    h, m = shape.hidden, shape.intermediate * max(1, shape.active)
    stream, number = 2 if bf16 and sharded else 4, 2 if bf16 else 4
    if lora_rank and stream > number:
        inside = (2 + 4 + 2) * m + 2 * (h + lora_rank)
    else:
        inside = number * (4 if lora_rank else 3) * m
    rest = 2 * stream * shape.head_width + prompt + 5 * 8
    return rows * prompt * (4 * stream * h + inside + rest)


def decoding(shape, rows, length, bf16=False, sharded=False, lora_rank=0):
    """Beside the keys and values, in the last step: the largest of three that are not there together.

    They are one layer's old keys, while the longer ones are made (or what autocast makes of that layer's keys and
    values); with LoRA a tied head, cast for this step; and `sample_tokens`: the model's logits, log-probs 4,
    probabilities 4, in float64 8, their sum 8.
    """
    longer = kv_cache(shape, rows, length, bf16, sharded) // (2 * shape.layers)
    cast = lora_rank and shape.tied and bf16 and not sharded
    head = 2 * shape.vocab * (shape.hidden + rows) if cast else 0
    return max(longer, head, rows * shape.vocab * ((2 if bf16 else 4) + 24))


def budget(
    shape,
    processes=1,
    sharded=False,
    bf16=True,
    lora_rank=0,
    critic=True,
    use_reference=True,
    checkpointing=False,
    offload=False,
    gathered=True,
    tokens=4096,
    length=1024,
    response_length=512,
    rows=256,
    microbatches=2,
    fused=True,
    graphs=False,
):
    """{term: bytes on one device}, and the sums "rollout", "update" and "peak"; "host" with offload, all processes.

    The defaults are the scripts'. tokens: of a micro-batch; rows: responses sampled at a time; microbatches: of an
    optimizer step (gradients are made by the first, so they do not stand beside its activations). fused: False on a GPU
    in float32, where none of torch's fused attention kernels takes fewer heads of keys than of queries. graphs: True
    with notes/variants/cuda_graphs.py, whose cache has its full length from the start, in bfloat16 under autocast; with
    LoRA the copy of a tied head stays until the rollout ends.
    """
    shards, kind = processes if sharded else 1, {"bf16": bf16, "sharded": sharded}
    prompt = length - response_length
    autocast = bf16 and not sharded
    held = state(shape, lora_rank, critic, cast=autocast)
    if not use_reference:
        held["reference"] = 0
    held = {name: size // shards for name, size in held.items()}
    grads, kept = held["gradients"], sum(held.values()) - held["gradients"]
    copies = autocast_copies(shape, lora_rank) if autocast else 0
    copies_sampling = copies if graphs or not lora_rank else 0
    running, ending = gathered_units(shape, bf16, lora_rank) if sharded else (0, 0)
    plain_length = 0 if fused or shape.heads == shape.kv_heads else length
    saved = activations(shape, tokens, checkpointing=checkpointing, plain_length=plain_length, **kind)
    response_tokens = tokens * response_length // length
    head, extra, head_extra = logits(shape, response_tokens), 0, 0
    if not (lora_rank or sharded):
        extra, head_extra = embedding_gradient(shape, response_tokens, microbatches)
    whole = (2 if bf16 else 4) * count(shape) if gathered else running  # --rollout-params
    terms = held | {
        "copies": copies,
        "units": max(running, ending),
        "activations": saved,
        "logits": head,
        "embedding gradient": extra,
        "exchange": exchange(shape, lora_rank) if processes > 1 and not sharded else 0,
        "policy": whole if sharded else 0,
        "kv cache": kv_cache(shape, rows, length, graphs=graphs, **kind),
        "prefill": prefill(shape, rows, prompt, lora_rank=lora_rank, **kind),
        "decoding": decoding(shape, rows, length, lora_rank=lora_rank, **kind),
    }
    always = 0 if offload else kept
    first = terms["kv cache"] if graphs else kv_cache(shape, rows, prompt, **kind)
    first += terms["prefill"]  # step of `generate`
    last = terms["kv cache"] + terms["decoding"]
    terms["rollout"] = always + copies_sampling + terms["policy"] + max(first, last)
    grads = 0 if offload else grads
    passes = copies + running + saved + max(head, 3 * head // 4 + head_extra)
    passes += grads if microbatches > 1 else 0
    terms["update"] = always + max(passes, grads + max(ending, extra, terms["exchange"]))
    terms["peak"] = max(terms["rollout"], terms["update"])
    terms["host"] = (kept + terms["gradients"]) * shards if offload else 0
    return terms


def shape_of(config):
    """The Shape that a config tells of, whatever its model is."""

    def first(*names, default=0):
        return next((x for name in names if (x := getattr(config, name, None))), default)

    heads = first("num_attention_heads", default=1)
    experts = first("num_experts", "num_local_experts", "n_routed_experts")
    width = first(*["moe_intermediate_size"] * bool(experts), "intermediate_size", default=4 * config.hidden_size)
    return Shape(
        config.vocab_size,
        config.hidden_size,
        width,
        config.num_hidden_layers,
        heads,
        first("num_key_value_heads", default=heads),
        bool(config.tie_word_embeddings),
        first("head_dim"),
        experts,
        first("num_experts_per_tok") if experts else 0,
    )


def of_run(args, config, parameters, prompt, processes=1):
    """GiB of a run on one device: its Args, the config of its text model, the number of parameters that this has, the
    tokens of its longest prompt. None if we count other parameters, by 3% or more: it's built in another way.

    The script is known by its flags.
    """
    shape = shape_of(config)
    if abs(count(shape) / parameters - 1) >= 0.03:
        return None
    length = prompt + args.max_response_length
    share = args.minibatch_size // processes * length  # tokens of a step
    tokens = min(share, max(args.microbatch_tokens, length))
    terms = budget(
        shape,
        processes,
        sharded=hasattr(args, "offload"),
        bf16=args.dtype != "float32",
        lora_rank=args.lora_rank,
        critic=hasattr(args, "critic_lr"),
        use_reference=bool(args.kl_reward_coef or args.kl_loss_coef),
        checkpointing=args.gradient_checkpointing,
        offload=getattr(args, "offload", False),
        gathered=getattr(args, "rollout_params", "gathered") == "gathered",
        tokens=tokens,
        length=length,
        response_length=args.max_response_length,
        rows=min(args.rollout_batch_size, args.batch_size * getattr(args, "group_size", 1) // processes),
        microbatches=max(1, share // tokens),
    )
    return terms["peak"] / GIB


WAYS = {  # rows: a process's share of an evaluation of 512 rows, in which it samples more than of a batch of 256
    "replicated": {},
    "replicated, LoRA 16": {"lora_rank": 16},
    "2 sharded": {"processes": 2, "sharded": True},
    "2 sharded, LoRA 16": {"processes": 2, "sharded": True, "lora_rank": 16},
    "2 sharded, offload": {"processes": 2, "sharded": True, "offload": True},
    "4 sharded": {"processes": 4, "rows": 128, "sharded": True},
    "8 sharded": {"processes": 8, "rows": 64, "sharded": True},
}
CARDS = 24, 40, 80, 141  # GB, taken as 10**9 bytes: what is left of a card is for CUDA and the allocator


def card(size):
    """The smallest card that has so many bytes."""
    return next((str(card) for card in CARDS if size <= card * 1e9), "none")


def table(shapes=SHAPES, ways=WAYS):
    """Markdown: what one device needs in the workload of `budget`'s defaults; "kept": without checkpointing."""
    names = "| model | | state | rollout | update | update, kept | card | card, kept | host |"
    lines = [names, "|" + " --- |" * 9]
    for model, shape in shapes.items():
        for way, options in ways.items():
            less, more = (budget(shape, checkpointing=checkpointing, **options) for checkpointing in (True, False))
            state = sum(less[name] for name in ("weights", "reference", "adam", "gradients"))
            sizes = 0 if options.get("offload") else state, less["rollout"], less["update"], more["update"]
            cells = [model, way, *(f"{size / GIB:.1f}" for size in sizes), card(less["peak"]), card(more["peak"])]
            lines.append(f"| {' | '.join(cells)} | {less['host'] / GIB:.0f} |".replace(" 0 |", " |"))
    return "\n".join(lines)


# What to set on which card

SCRIPTS = {
    "`ppo_llm.py`": {},
    "`grpo_llm.py`": {"critic": False},
    "`ppo_llm.py --lora-rank 16`": {"lora_rank": 16},
    "`grpo_llm.py --lora-rank 16`": {"critic": False, "lora_rank": 16},
    "`ppo_llm_fsdp.py`, 2 GPUs": {"processes": 2, "sharded": True},
    "`ppo_llm_fsdp.py`, 4 GPUs": {"processes": 4, "sharded": True},
    "`ppo_llm_fsdp.py`, 8 GPUs": {"processes": 8, "sharded": True},
    "`grpo_llm_fsdp.py`, 4 GPUs": {"processes": 4, "critic": False, "sharded": True},
}
USABLE = 0.9  # of a card: the rest is for CUDA, for the allocator, and for what is not in the formulas


def settings(shape, gigabytes, processes=1, **options):
    """(--rollout-batch-size, --microbatch-tokens, --gradient-checkpointing) for a card, or None if nothing fits.

    Powers of two, the largest that fit, each for itself: rollout and update are not in memory at the same time. Rows
    have 512 + 512 tokens. Responses: at most a process's share of a batch of 256. Tokens: at most 16,384 and a
    process's share of a minibatch of 64 rows; 4,096 or more without checkpointing, else with it, a row or more.
    """
    room = USABLE * gigabytes * 1e9
    most_rows = 256 // processes
    most_tokens = min(16_384, 64 // processes * 1024)
    rows = [2**k for k in range(8, -1, -1) if 2**k <= most_rows]
    ways = [(2**k, False) for k in range(14, 11, -1)] + [(2**k, True) for k in range(14, 9, -1)]
    ways = [(tokens, checkpointing) for tokens, checkpointing in ways if tokens <= most_tokens]

    def peak(name, **sizes):
        return budget(shape, processes, **options, **sizes)[name]

    rows = next((n for n in rows if peak("rollout", rows=n) <= room), None)
    way = next(((t, less) for t, less in ways if peak("update", tokens=t, checkpointing=less) <= room), None)
    return (rows, *way) if rows and way else None


def settings_table(shape, scripts=SCRIPTS, cards=CARDS):
    """Markdown: `settings` of a model by script and card; "gc": with --gradient-checkpointing."""
    lines = ["| | " + " | ".join(f"{card} GB" for card in cards) + " |", "|" + " --- |" * (len(cards) + 1)]
    for script, options in scripts.items():
        cells = []
        for card in cards:
            rows, tokens, checkpointing = settings(shape, card, **options) or (0, 0, False)
            cells.append(f"{rows} / {tokens}{' gc' * checkpointing}" if rows else "-")
        lines.append(f"| {script} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main():
    print(
        "GiB per device with the defaults: rows of 512 + 512 tokens, 4096 tokens per micro-batch, 256 rows sampled.\n"
    )
    for model, shape in SHAPES.items():
        print(f"{model}: {count(shape):,} parameters, critic {count(shape, critic=True):,}")
    print(f"\n{table()}\n\n--rollout-batch-size / --microbatch-tokens by card, gc: --gradient-checkpointing.")
    for model, shape in SHAPES.items():
        print(f"\n{model}\n\n{settings_table(shape)}")


if __name__ == "__main__":
    main()
