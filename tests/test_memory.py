"""The numbers of chapter 14: formulas against what torch holds, and its tables against the formulas."""

import re

import memory
import pytest
import torch
from conftest import ROOT, load_script
from memory import GIB, SHAPES, Shape, budget
from peft import LoraConfig
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, Qwen2Config

PAGE = (ROOT / "notes" / "14-memory.md").read_text()
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300}
WIDE = Shape(420, 512, 2048, 12, 8, 8, False)  # 50.8 million parameters
MIB = 2**20


def cells(name):
    """The cells after the first of the row of the page that begins with `name`, the last such."""
    return [cell.strip() for cell in re.findall(rf"(?m)^\| {re.escape(name)} \| (.*) \|$", PAGE)[-1].split("|")]


def off(ratio):
    """How far a ratio is from 1, as the page has it."""
    return f"{ratio - 1:+.0%}".replace("-0%", "0%")


@pytest.mark.parametrize("bf16, fused", [(False, True), (True, True), (False, False)])
def test_a_block_saves_the_activations_of_the_formula(bf16, fused):
    """Exactly, and under autocast the copies of its weights besides; not fused: as on a GPU in float32."""
    shape = Shape(300, 64, 200, 2, 4, 2, True)

    def saved_bytes(num_layers):
        config = Qwen2Config(num_hidden_layers=num_layers, intermediate_size=200, **SIZES)
        model, found = AutoModelForCausalLM.from_config(config).model.train(), {}
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

        def keep(x):
            found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        ids = torch.ones(2, 80, dtype=torch.long)
        kernels = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION][: 1 + fused]
        autocast = torch.autocast("cpu", torch.bfloat16, bf16)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), autocast, sdpa_kernel(kernels):
            output = model(ids, use_cache=False).last_hidden_state
        del output
        return sum(size for place, size in found.items() if place not in weights)

    copies = 2 * sum(a * b for a, b in memory.linear_sizes(shape)) * bf16
    activations = memory.activations(shape, 160, bf16, plain_length=0 if fused else 80)
    assert saved_bytes(2) - saved_bytes(1) == activations / 2 + copies


class Peak(TorchDispatchMode):
    """The most bytes held at once in all storages that operations returned."""

    def __enter__(self):
        self.bytes, self.held = 0, {}
        return super().__enter__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        storages = [x.untyped_storage() for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        self.held |= {x._cdata: (StorageWeakRef(x), x.nbytes()) for x in storages}
        self.held = {key: (x, size) for key, (x, size) in self.held.items() if not x.expired()}
        self.bytes = max(self.bytes, sum(size for _, size in self.held.values()))
        return result


def test_reading_the_prompts_holds_what_the_formula_says():
    """In `generate` itself. The difference of eight rows leaves out what does not grow with them."""
    generate, shape = load_script(ROOT / "ppo_llm.py").generate, Shape(300, 64, 340, 4, 4, 2, True)
    ways = (False, False), (True, False), (True, True)  # bf16, sharded

    def peak(rows, bf16, sharded, lora_rank):
        model = AutoModelForCausalLM.from_config(Qwen2Config(num_hidden_layers=4, intermediate_size=340, **SIZES))
        if lora_rank:
            model.add_adapter(LoraConfig(r=lora_rank, target_modules="all-linear"))
        model = model.to(torch.bfloat16 if bf16 and sharded else torch.float32)
        prompts, uniforms = [[1] * 99] + [[1] * 100] * (rows - 1), torch.zeros(rows, 1)  # the first is padded
        with Peak() as found, torch.autocast("cpu", torch.bfloat16, bf16 and not sharded):
            generate(model, prompts, uniforms, [300], 1.0)
        return found.bytes

    for lora_rank, name in (0, "all weights trained"), (8, "LoRA"):
        for way, cell in zip(ways, cells(f"{name}, counted")):
            counted = memory.prefill(shape, 8, 100, *way, lora_rank) + memory.kv_cache(shape, 8, 100, *way)
            assert f"{counted / 800:,.0f}" == cell
            assert f"{(peak(16, *way, lora_rank) - peak(8, *way, lora_rank)) / 800:,.0f}" == cell


def test_the_tables_of_what_comes_and_goes():
    assert f"{memory.count_trained(SHAPES['Qwen2.5-7B'], 16):,} parameters, which take " in PAGE
    assert f"take {16 * memory.count_trained(SHAPES['Qwen2.5-7B'], 16) / GIB:.2f} GiB" in PAGE
    for name, shape in SHAPES.items():
        kept = [memory.activations(shape, 8192, True, True, less) for less in (False, True)]
        first = memory.kv_cache(shape, 128, 512, bf16=True), memory.prefill(shape, 128, 512, bf16=True)
        last = memory.kv_cache(shape, 128, 1024, bf16=True), memory.decoding(shape, 128, 1024, bf16=True)
        assert f"| {name} | " + " | ".join(f"{size / GIB:.1f}" for size in kept) + " |\n" in PAGE
        assert f"| {name} | " + " | ".join(f"{a / GIB:.1f} + {b / GIB:.1f}" for a, b in (first, last)) + " |\n" in PAGE


def test_the_table_of_cards():
    shown = {name: SHAPES[name] for name in ("Qwen2.5-0.5B", "Qwen2.5-7B")}
    assert all(line in PAGE for line in memory.table(shown).splitlines())


def test_the_model_state_is_what_processes_held():
    small = {"bf16": False, "microbatches": 1}
    runs = budget(WIDE, 2, **small), budget(WIDE, 2, True, **small), budget(WIDE, 4, True, **small)
    state = "weights", "reference", "adam", "gradients"
    found = [sum(terms[name] for name in state) / MIB for terms in runs]
    shape = Shape(8192, 512, 2048, 11, 8, 8, True)
    for rank in (0, 8):
        found.append(16 * sum(memory.count_trained(shape, rank, critic) for critic in (False, True)) / MIB)
    results = ROOT / "benchmarks" / "results"
    table, lora = ((results / name).read_text() for name in ("footprint/sharded.md", "footprint/lora.md"))
    measured = re.findall(r"(?m)^\| (?:replicated|gathered) \| \d \| (\d+) ", table)
    measured += re.findall(r"ppo_llm.py \| ([\d,]+) MiB \| (\d+) MiB", lora)[0]
    names = "replicated on two", "sharded over two", "sharded over four", "trained in full", "trained with LoRA"
    for name, formula, taken in zip(names, found, measured, strict=True):
        assert [cell.replace(",", "") for cell in cells(name)] == [f"{formula:.0f}", taken.replace(",", "")]
    assert f"{memory.count(WIDE):,}" == "50,792,960"


def test_whole_processes_are_near_the_formulas():
    """A process holds Python and its libraries besides: 0.38 GiB of Qwen2.5-0.5B's, 390 MiB of the small model's."""

    def check(name, size, digits):
        """formula, measured, and by how much they differ."""
        formula, measured, difference = cells(name)
        assert formula == f"{size:,.{digits}f}" and difference == off(size / float(measured.replace(",", "")))

    workload = {"bf16": False, "checkpointing": True, "length": 72, "response_length": 32, "microbatches": 1}
    cases = {
        "`ppo_llm.py`": {"tokens": 288, "rows": 4},
        "`grpo_llm.py`": {"tokens": 288, "rows": 4, "critic": False},
        "`ppo_llm_fsdp.py`": {"tokens": 288, "rows": 4, "sharded": True},
        "the same on two": {"tokens": 144, "rows": 2, "sharded": True, "processes": 2, "gathered": False},
    }
    for name, options in cases.items():
        check(name, budget(SHAPES["Qwen2.5-0.5B"], **workload, **options)["peak"] / GIB + 0.38, 1)
    workload = {"bf16": False, "length": 56, "response_length": 16, "microbatches": 1}
    processes = {"2 processes": (2, False), "2 processes, sharded": (2, True), "4 processes, sharded": (4, True)}
    for name, (n, sharded) in processes.items():
        check(name, budget(WIDE, n, sharded, tokens=16 // n * 56, rows=16 // n, **workload)["peak"] / MIB + 390, 0)


def test_a_real_run_is_within_five_per_cent_of_the_forecast():
    """Of each process, and the page has the rows of the committed table."""
    table = (ROOT / "benchmarks" / "results" / "footprint" / "real.md").read_text()
    rows = re.findall(r"(?m)^\| (\S*) ?\S* ?\| (\d) \| [\d, ]+ \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", table)
    assert len(rows) == 5
    for lora, processes, forecast, taken, ratio in rows:
        assert abs(float(ratio) - 1) < 0.05
        name = f"SmolLM2, {processes} process{'es' * (processes == '2')}" + ", LoRA 16" * bool(lora)
        assert cells(name) == [forecast, taken, off(float(ratio))]
