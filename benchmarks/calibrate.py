"""Holds the planner's model of time against published rows: prints predicted against published tokens/s of each row.

    python benchmarks/calibrate.py [--only rtx4090]

The rows are LLMQ's (https://github.com/IST-DASLab/llmq, README.md and benchmarks/*.md; Qwen2.5 in bf16, sequences of
1024 tokens, 524,288 tokens a step). Its list of operations is written out below; `costs.product_time`, the attention's
rates and the bandwidths of planner/gpus.py give their times. `Rates.products` of a GPU is fitted to its rows: one
constant for each GPU. The last row is out of sample: a step that surojax compiles for eight H100 with LLMQ's settings
of the same model, simulated by planner/timeline.py; nothing is fitted to it. It needs the compiler for GPUs.

Exits with 1 if the mean error of the rows is more than 5 %.
"""

import argparse
import dataclasses
import math
import sys
from pathlib import Path

import jax

from surojax.config import flags
from surojax.config.fields import Config
from surojax.planner import aot
from surojax.planner.costs import BACKWARD_FLOPS, attention_time, product_time
from surojax.planner.gpus import GPUS, Gpu, Rates
from surojax.planner.plan import plan

MOST = 0.05
SEQUENCE_LEN = 1024
ITEMSIZE = 2  # of weights, gradients, moments and activations


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a Qwen2.5 model; `channels` is the width of a head."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    vocabulary: int
    tied: bool

    @property
    def channels(self) -> int:
        return self.hidden // self.heads


MODELS = {
    "0.5B": Sizes(896, 4864, 24, 14, 2, 151936, True),
    "1.5B": Sizes(1536, 8960, 28, 12, 2, 151936, True),
    "3B": Sizes(2048, 11008, 36, 16, 2, 151936, True),
    "7B": Sizes(3584, 18944, 28, 28, 4, 152064, False),
    "14B": Sizes(5120, 13824, 48, 40, 8, 152064, False),
}
# Computed again in the backward pass, by LLMQ's options, and what is computed again of a layer.
RECOMPUTED = {
    "": (),
    "swiglu": (),
    "ffn": ("up",),
    "ffn, qkv": ("qkv", "up"),
    "ffn, att": ("qkv", "attention", "up"),
    "block": ("qkv", "attention", "out", "up"),
}
# Bytes of a token's passes through device memory for each layer: (times the hidden size, times the intermediate size).
# Norms, rotations, residual sums, SwiGLU and their gradients; and what is computed again.
PASSES = 46, 16
PASSES_AGAIN = {"": (0, 0), "swiglu": (0, 6), "ffn": (0, 6), "ffn, qkv": (10, 6), "ffn, att": (10, 6), "block": (20, 6)}


@dataclasses.dataclass(frozen=True)
class Row:
    """A published row. chunks: of the head. offloaded: bytes per parameter and step over PCI Express, each way."""

    gpu: str
    model: str
    sequences: int
    microbatches: int
    recomputed: str
    chunks: int
    offloaded: int
    published: float  # tokens/s


ROWS = (
    Row("rtx4090", "0.5B", 16, 32, "", 16, 0, 39842),
    Row("rtx4090", "1.5B", 4, 128, "", 4, 0, 14070),
    Row("rtx4090", "3B", 4, 128, "swiglu", 4, 4, 7003),
    Row("rtx4090", "7B", 16, 32, "block", 16, 6, 2777),
    Row("rtx4090", "14B", 32, 16, "block", 32, 6, 1349),
    Row("h100", "0.5B", 32, 16, "", 1, 0, 149700),
    Row("h100", "1.5B", 32, 16, "", 4, 0, 58850),
    Row("h100", "3B", 16, 32, "", 1, 0, 30915),
    Row("h100", "7B", 4, 128, "", 2, 0, 13840),
    Row("h100", "14B", 8, 64, "ffn", 2, 6, 6325),
    Row("rtx5060ti_16gb", "0.5B", 10, 51, "", 5, 0, 13020),
    Row("rtx5060ti_16gb", "1.5B", 8, 64, "ffn, att", 4, 0, 3899),
    Row("rtx5060ti_16gb", "3B", 16, 32, "ffn, qkv", 8, 6, 2013),
    Row("rtx5060ti_16gb", "7B", 32, 16, "block", 32, 6, 889),
    Row("rtx5090", "0.5B", 16, 32, "", 4, 0, 55000),
    Row("rtx5090", "1.5B", 8, 64, "ffn, att", 4, 0, 17000),
    Row("l40s", "0.5B", 16, 32, "", 4, 0, 42000),
    Row("l40s", "1.5B", 8, 64, "", 4, 0, 17000),
    Row("l40s", "3B", 4, 128, "", 4, 0, 8900),
    Row("l40s", "7B", 4, 128, "swiglu", 4, 4, 3900),
)


def predicted(row: Row) -> float:
    """Tokens/s that the model of time predicts for LLMQ's operations."""
    gpu = GPUS[row.gpu]
    assert gpu.rates is not None
    sizes = MODELS[row.model]
    tokens = row.sequences * SEQUENCE_LEN
    of_layer = layer_time(gpu, gpu.rates, sizes, tokens, row.recomputed)
    of_head = head_time(gpu, gpu.rates, sizes, tokens, row.chunks)
    update = update_time(gpu, gpu.rates, sizes, row.offloaded)
    return row.microbatches * tokens / (row.microbatches * (sizes.layers * of_layer + of_head) + update)


def layer_time(gpu: Gpu, rates: Rates, sizes: Sizes, tokens: int, recomputed: str) -> float:
    """Seconds of a layer, forward and backward."""
    products = {  # (n, k) of each product with a matrix
        "qkv": ((sizes.heads + 2 * sizes.key_value_heads) * sizes.channels, sizes.hidden),
        "out": (sizes.hidden, sizes.hidden),
        "up": (2 * sizes.intermediate, sizes.hidden),
        "down": (sizes.hidden, sizes.intermediate),
    }

    def product(m: int, n: int, k: int) -> float:
        return product_time(gpu, rates, m, n, k) + rates.launch

    flops = 2.0 * SEQUENCE_LEN * sizes.hidden * tokens  # causal
    attention = attention_time(gpu, rates, flops, backward=False)
    again = RECOMPUTED[recomputed]
    seconds = attention + attention_time(gpu, rates, BACKWARD_FLOPS * flops, backward=True)
    seconds += sum(product(tokens, n, k) + product(tokens, k, n) + product(n, k, tokens) for n, k in products.values())
    seconds += sum(attention if name == "attention" else product(tokens, *products[name]) for name in again)
    hidden, intermediate = (x + y for x, y in zip(PASSES, PASSES_AGAIN[recomputed], strict=True))
    moved = tokens * (hidden * sizes.hidden + intermediate * sizes.intermediate)
    return seconds + moved / (gpu.memory_bandwidth * rates.memory) + 20 * rates.launch


def head_time(gpu: Gpu, rates: Rates, sizes: Sizes, tokens: int, chunks: int) -> float:
    """Seconds of the head and the loss, forward and backward, in slices of the tokens."""
    m = tokens // chunks
    shapes = (
        (m, sizes.vocabulary, sizes.hidden),
        (m, sizes.hidden, sizes.vocabulary),
        (sizes.vocabulary, sizes.hidden, m),
    )
    products = chunks * sum(product_time(gpu, rates, *shape) + rates.launch for shape in shapes)
    return products + 2 * ITEMSIZE * tokens * sizes.vocabulary / (gpu.memory_bandwidth * rates.memory)


def update_time(gpu: Gpu, rates: Rates, sizes: Sizes, offloaded: int) -> float:
    """Seconds of AdamW: weights, gradients and moments, or what of them crosses PCI Express."""
    matrices = (2 * sizes.heads + 2 * sizes.key_value_heads) * sizes.channels + 3 * sizes.intermediate
    tables = sizes.vocabulary * (1 if sizes.tied else 2)
    parameters = sizes.hidden * (sizes.layers * matrices + tables)
    in_memory = 16 * parameters / (gpu.memory_bandwidth * rates.memory)
    return max(in_memory, offloaded * parameters / (gpu.pcie_bandwidth * rates.host * rates.duplex))


OUT_OF_SAMPLE = Row("h100", "7B", 8, 8, "", 2, 0, 112000)  # on eight; benchmarks/H100x8.md


def compiled_config(row: Row, gpus: int) -> Config:
    """Our config with the settings of a row."""
    sizes = MODELS[row.model]
    c = flags.load(str(Path(__file__).parents[1] / "configs" / "llama7b.py"))
    c.model.hidden_size = sizes.hidden
    c.model.intermediate_size = sizes.intermediate
    c.model.num_hidden_layers = sizes.layers
    c.model.num_attention_heads = sizes.heads
    c.model.num_key_value_heads = sizes.key_value_heads
    c.model.vocab_size = sizes.vocabulary
    c.model.tie_word_embeddings = sizes.tied
    c.model.attention_bias = True
    c.gpus = gpus
    c.sequence_len = SEQUENCE_LEN
    c.per_device_batch_size = row.sequences
    c.gradient_accumulation_steps = row.microbatches
    c.lmhead_chunks = row.chunks
    c.recompute_block = bool(row.recomputed)
    c.master_dtype = "bfloat16"
    return c


def line(name: str, found: float, published: float) -> float:
    """Prints a row; returns its relative error."""
    error = found / published - 1
    print(f"{name:<24}{found:>12,.0f}{published:>12,.0f}{100 * error:>+9.1f} %")
    return abs(error)


def main(argv: list[str] | None = None) -> int:
    """Print all rows; returns the exit code."""
    jax.config.update("jax_platforms", "cpu")
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", metavar="GPU", choices=[*GPUS, "compiled"], help="rows of this GPU, or the last row")
    only = parser.parse_args(argv).only
    print(f"{'tokens/s':<24}{'predicted':>12}{'published':>12}{'error':>11}")
    rows = [row for row in ROWS if only in (None, row.gpu)]
    errors = [line(f"{row.gpu} {row.model}", predicted(row), row.published) for row in rows]
    if only in (None, "compiled") and aot.available():
        found = plan(compiled_config(OUT_OF_SAMPLE, 8), OUT_OF_SAMPLE.gpu)
        assert found.tokens_per_s_per_gpu is not None
        line("8 x h100 7B, compiled", 8 * found.tokens_per_s_per_gpu, OUT_OF_SAMPLE.published)
    if not errors:
        return 0
    mean = sum(errors) / len(errors)
    print(f"mean error of {len(errors)} rows: {100 * mean:.1f} %, worst {100 * max(errors):.1f} %")
    return int(mean > MOST or math.isnan(mean))


if __name__ == "__main__":
    sys.exit(main())
