"""Holds the planner's model of time against published rows: prints predicted against published tokens/s of each row.

    python benchmarks/calibrate.py [--only rtx4090]

The rows are LLMQ's (https://github.com/IST-DASLab/llmq, README.md and benchmarks/*.md; Qwen2.5 in bf16, sequences of
1024 tokens, 524,288 tokens a step). Its list of operations is written out below; `costs.product_time`, the attention's
rates and the bandwidths of gpus.csv give their times. `Rates.products` of a GPU is fitted to its rows of one GPU
in bf16 (`ROWS`): one constant for each GPU. `ELSEWHERE` are rows to which nothing is fitted: several GPUs, which send
over links of other kinds, and FP8, whose quantising passes are part of the list. Beside their error is what the rate of
the link, at its ends, would make of it.

The last rows are steps that surojax compiles with LLMQ's settings, simulated by planner/timeline.py; nothing is fitted
to them either. They need the compiler for GPUs, and `--compile`: a minute or two each.

What a mean error says of other rows: leaving one row out of the fit of its GPU moves its error to 3 % on average and 11
at most. Fitting to the rows of the other GPUs alone, errors are 8 to 17 % (RTX 4090), 20 to 32 % (H100), 46 to 61 %
(L40S), so a GPU without rows has ends as wide as rates.py says.

Exits with 1 if the mean error of the fitted rows is more than 5 %.
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
from surojax.planner.gpus import GPUS, Gpu
from surojax.planner.run_plan import plan

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

    @property
    def parameters(self) -> int:
        matrices = (2 * self.heads + 2 * self.key_value_heads) * self.channels + 3 * self.intermediate
        return self.hidden * (self.layers * matrices + self.vocabulary * (1 if self.tied else 2))


MODELS = {
    "0.5B": Sizes(896, 4864, 24, 14, 2, 151936, True),
    "1.5B": Sizes(1536, 8960, 28, 12, 2, 151936, True),
    "3B": Sizes(2048, 11008, 36, 16, 2, 151936, True),
    "7B": Sizes(3584, 18944, 28, 28, 4, 152064, False),
    "8B": Sizes(4096, 12288, 36, 32, 8, 151936, False),  # Qwen3
    "14B": Sizes(5120, 13824, 48, 40, 8, 152064, False),
    "32B": Sizes(5120, 27648, 64, 40, 8, 152064, False),
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


# Passes of FP8 in bytes of a token for each layer: operands are read in 16 bits, written in 8, and turned round for the
# backward pass, inputs of products and gradients of their outputs alike. Weights likewise, for each microbatch.
QUANTISE, TURN = 3, 2


@dataclasses.dataclass(frozen=True)
class Row:
    """A published row. chunks: of the head. offloaded: bytes per parameter and step over PCI Express, each way, of all
    GPUs together. sharded: "" (ZeRO-1), "weights", or "weights, gradients", which are sent in each microbatch.
    residuals: each block's input goes to host memory and back. kept: quantised weights are stored for the step.
    adapters: of rank 16 on all matrices of a frozen base, sequences of 2048; compiled only.
    """

    gpu: str
    model: str
    sequences: int
    microbatches: int
    recomputed: str
    chunks: int
    offloaded: int
    published: float  # tokens/s, of all GPUs
    gpus: int = 1
    sharded: str = ""
    fp8: bool = False
    residuals: bool = False
    kept: bool = False
    adapters: bool = False


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
    Row("rtxpro6000", "0.5B", 32, 16, "", 1, 0, 86200),
    Row("rtxpro6000", "1.5B", 32, 16, "", 1, 0, 32410),
    Row("rtxpro6000", "3B", 16, 32, "", 1, 0, 17186),
    Row("rtxpro6000", "7B", 8, 64, "", 2, 0, 8079),
    Row("rtxpro6000", "14B", 4, 128, "", 2, 4, 4036),
)


# benchmarks/{4090x4,H100x8,Pro6000x1,Pro6000x4,4090x1,H100x1,5060Ti}.md of LLMQ, commit b77d969 of 2026-05-25.
ELSEWHERE = (
    Row("rtx4090", "0.5B", 16, 8, "", 2, 0, 154_000, 4),
    Row("rtx4090", "1.5B", 8, 16, "", 4, 0, 52_420, 4, residuals=True),
    Row("rtx4090", "3B", 4, 32, "swiglu", 4, 2, 26_000, 4),
    Row("rtx4090", "7B", 16, 8, "ffn", 8, 6, 10_897, 4, "weights, gradients", residuals=True),
    Row("rtx4090", "14B", 32, 4, "block", 8, 6, 5_264, 4, "weights, gradients", residuals=True),
    Row("rtx4090", "32B", 32, 4, "block", 8, 8, 2_206, 4, "weights, gradients", residuals=True),
    Row("h100", "0.5B", 32, 2, "", 1, 0, 1_150_000, 8),
    Row("h100", "1.5B", 32, 2, "", 4, 0, 457_000, 8),
    Row("h100", "3B", 16, 4, "", 1, 0, 239_500, 8),
    Row("h100", "7B", 8, 8, "", 2, 0, 112_000, 8),
    Row("h100", "14B", 16, 4, "ffn", 2, 0, 48_850, 8, "weights", residuals=True),
    Row("rtxpro6000", "1.5B", 32, 4, "", 1, 0, 128_500, 4),
    Row("rtxpro6000", "7B", 8, 16, "", 1, 0, 31_985, 4),
    Row("rtxpro6000", "14B", 4, 32, "", 2, 2, 15_865, 4),
    Row("rtxpro6000", "32B", 16, 8, "block", 2, 6, 5_868, 4, "weights"),
    Row("rtx4090", "0.5B", 16, 32, "", 16, 0, 47_640, fp8=True),
    Row("rtx4090", "1.5B", 4, 128, "", 4, 0, 20_330, fp8=True),
    Row("rtx4090", "3B", 4, 128, "", 4, 6, 10_667, fp8=True),
    Row("rtx4090", "7B", 16, 32, "block", 16, 6, 4_332, fp8=True, residuals=True, kept=True),
    Row("rtx4090", "14B", 32, 16, "block", 32, 8, 2_001, fp8=True, residuals=True, kept=True),
    Row("h100", "0.5B", 32, 16, "", 1, 0, 164_000, fp8=True),
    Row("h100", "1.5B", 32, 16, "", 1, 0, 72_990, fp8=True),
    Row("h100", "3B", 16, 32, "", 1, 0, 40_390, fp8=True),
    Row("h100", "7B", 16, 32, "ffn", 4, 0, 19_150, fp8=True, residuals=True),
    Row("h100", "14B", 16, 32, "ffn", 2, 6, 9_364, fp8=True, residuals=True),
    Row("rtx5060ti_16gb", "0.5B", 12, 42, "", 6, 0, 16_590, fp8=True),
    Row("rtx5060ti_16gb", "1.5B", 8, 64, "block", 4, 0, 5_768, fp8=True, residuals=True),
    Row("rtx5060ti_16gb", "3B", 16, 32, "ffn, att", 8, 6, 3_129, fp8=True, residuals=True),
    Row("rtxpro6000", "1.5B", 32, 16, "", 1, 0, 40_300, fp8=True),
    Row("rtxpro6000", "7B", 8, 64, "", 2, 0, 11_530, fp8=True),
)


def predicted(row: Row, **ends: float) -> float:
    """Tokens/s of all GPUs that the model of time predicts for LLMQ's operations.

    ends: rates at an end, as multiples of their values.
    """
    gpu = GPUS[row.gpu]
    rates = gpu.rates
    for name, end in ends.items():
        rates = rates.with_end(name, end)
    gpu = dataclasses.replace(gpu, rates=rates)
    sizes = MODELS[row.model]
    tokens = row.sequences * SEQUENCE_LEN
    layer_s = layer_time(gpu, sizes, tokens, row.recomputed, fp8=row.fp8, kept=row.kept)
    computed = sizes.layers * layer_s + head_time(gpu, sizes, tokens, row.chunks)
    # What crosses links in a microbatch, and once in the last one; a microbatch computes or waits for it.
    sent = ITEMSIZE * sizes.parameters * (row.gpus - 1) / row.gpus / (gpu.link_bandwidth * rates.link)
    per_microbatch = sent * (2 * ("weights" in row.sharded) + ("gradients" in row.sharded))
    once = sent * (("weights" not in row.sharded) + ("gradients" not in row.sharded))
    written = row.residuals * sizes.layers * tokens * sizes.hidden * ITEMSIZE
    host = 2 * written / min(2 * gpu.pcie_bandwidth * rates.host * rates.duplex, gpu.host_memory(row.gpus) * rates.dram)
    if gpu.shares_pcie:  # both cross it
        per_microbatch += host
        host = 0.0
    steps = (row.microbatches - 1) * max(computed, per_microbatch, host) + max(computed, per_microbatch + once, host)
    update = update_time(gpu, sizes, row.offloaded, row.gpus)
    return row.gpus * row.microbatches * tokens / (steps + update)


def layer_time(gpu: Gpu, sizes: Sizes, tokens: int, recomputed: str, *, fp8: bool = False, kept: bool = False) -> float:
    """Seconds of a layer, forward and backward. fp8, kept: see `Row`."""
    products = {  # (n, k) of each product with a matrix
        "qkv": ((sizes.heads + 2 * sizes.key_value_heads) * sizes.channels, sizes.hidden),
        "out": (sizes.hidden, sizes.hidden),
        "up": (2 * sizes.intermediate, sizes.hidden),
        "down": (sizes.hidden, sizes.intermediate),
    }

    def product(m: int, n: int, k: int) -> float:
        return product_time(gpu, m, n, k, dtype="f8e4m3fn" if fp8 else "bf16") + gpu.rates.launch

    flops = 2.0 * SEQUENCE_LEN * sizes.hidden * tokens  # causal
    attention = attention_time(gpu, flops, backward=False)
    again = RECOMPUTED[recomputed]
    seconds = attention + attention_time(gpu, BACKWARD_FLOPS * flops, backward=True)
    seconds += sum(product(tokens, n, k) + product(tokens, k, n) + product(n, k, tokens) for n, k in products.values())
    seconds += sum(attention if name == "attention" else product(tokens, *products[name]) for name in again)
    hidden, intermediate = (x + y for x, y in zip(PASSES, PASSES_AGAIN[recomputed], strict=True))
    moved = tokens * (hidden * sizes.hidden + intermediate * sizes.intermediate)
    if fp8:
        moved += sum((QUANTISE + TURN) * (tokens * (n + k) + (not kept) * n * k) for n, k in products.values())
    return seconds + moved / (gpu.memory_bandwidth * gpu.rates.memory) + 20 * gpu.rates.launch


def head_time(gpu: Gpu, sizes: Sizes, tokens: int, chunks: int) -> float:
    """Seconds of the head and the loss, forward and backward, in slices of the tokens."""
    m = tokens // chunks
    shapes = (
        (m, sizes.vocabulary, sizes.hidden),
        (m, sizes.hidden, sizes.vocabulary),
        (sizes.vocabulary, sizes.hidden, m),
    )
    products = chunks * sum(product_time(gpu, *shape) + gpu.rates.launch for shape in shapes)
    return products + 2 * ITEMSIZE * tokens * sizes.vocabulary / (gpu.memory_bandwidth * gpu.rates.memory)


def update_time(gpu: Gpu, sizes: Sizes, offloaded: int, gpus: int = 1) -> float:
    """Seconds of AdamW, by device memory traffic or, for offloaded bytes, by PCI Express and host memory."""
    parameters = sizes.parameters / gpus
    in_memory = 16 * parameters / (gpu.memory_bandwidth * gpu.rates.memory)
    both_ways = min(2 * gpu.pcie_bandwidth * gpu.rates.host * gpu.rates.duplex, gpu.host_memory(gpus) * gpu.rates.dram)
    return max(in_memory, 2 * offloaded * parameters / both_ways)


# Rows whose settings surojax has as well. Adapters: Surogate's (github.com/invergent-ai/surogate, commit 524fb77 of
# 2026-08-03, docs/reference/benchmarks.md, Qwen3 8B in bf16).
COMPILED = (
    Row("h100", "7B", 8, 8, "", 2, 0, 112_000, 8),
    Row("rtx4090", "0.5B", 16, 8, "", 2, 0, 154_000, 4),
    Row("rtx4090", "14B", 32, 4, "block", 8, 6, 5_264, 4, "weights, gradients", residuals=True),
    Row("rtx4090", "1.5B", 4, 128, "", 4, 0, 20_330, fp8=True),
    Row("h100", "1.5B", 32, 16, "", 1, 0, 72_990, fp8=True),
    Row("rtx5090", "8B", 2, 4, "block", 16, 0, 3_800, adapters=True),
    Row("rtx5090", "8B", 2, 4, "block", 16, 0, 14_600, 4, adapters=True),
    Row("h100", "8B", 2, 4, "block", 16, 0, 10_200, adapters=True),
)


def compiled_config(row: Row) -> Config:
    """Our config with the settings of a row."""
    sizes = MODELS[row.model]
    name = "llama7b_lora.py" if row.adapters else "llama7b.py"
    c = flags.load_config(str(Path(__file__).parents[1] / "configs" / name))
    c.model.hidden_size = sizes.hidden
    c.model.intermediate_size = sizes.intermediate
    c.model.num_hidden_layers = sizes.layers
    c.model.num_attention_heads = sizes.heads
    c.model.num_key_value_heads = sizes.key_value_heads
    c.model.vocab_size = sizes.vocabulary
    c.model.tie_word_embeddings = sizes.tied
    c.model.attention_bias = not row.adapters
    c.model.qk_norm = row.adapters
    c.gpus = row.gpus
    c.zero_level = 3 if row.sharded else 1
    c.recipe = "fp8_current" if row.fp8 else "bf16"
    c.offload_residual = row.residuals
    c.offload_optimizer = c.offload_master = row.offloaded > 0
    c.sequence_len = 2048 if row.adapters else SEQUENCE_LEN
    c.per_device_batch_size = row.sequences
    c.gradient_accumulation_steps = row.microbatches
    c.lmhead_chunks = row.chunks
    c.recompute_block = bool(row.recomputed)
    c.master_dtype = "bfloat16"
    return c


def line(row: Row, predicted_rate: float, what: str = "") -> float:
    """Prints a row; returns its relative error. what: printed behind it."""
    error = predicted_rate / row.published - 1
    several = f"{row.gpus} x " if row.gpus > 1 else ""
    name = f"{several}{row.gpu} {row.model}{' fp8' if row.fp8 else ''}{' adapters' if row.adapters else ''}"
    print(f"{name:<28}{predicted_rate:>12,.0f}{row.published:>12,.0f}{100 * error:>+9.1f} %{what}")
    return abs(error)


def summary(errors: list[float]) -> float:
    """Prints the mean of errors; returns it."""
    mean = sum(errors) / len(errors)
    print(f"mean error of {len(errors)} rows: {100 * mean:.1f} %, worst {100 * max(errors):.1f} %")
    return mean


def at_ends(row: Row) -> str:
    """The errors of a row with the link's rate at its ends; "" if they are the same."""
    span = GPUS[row.gpu].spans()["link"]
    slow, fast = (100 * (predicted(row, link=end) / row.published - 1) for end in (span.slow, span.fast))
    return f"   {slow:+.1f} to {fast:+.1f} with the link" if fast - slow > 0.1 else ""


def main(argv: list[str] | None = None) -> int:
    """Print all rows; returns the exit code."""
    jax.config.update("jax_platforms", "cpu")
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", metavar="GPU", choices=GPUS, help="rows of this GPU")
    parser.add_argument("--compile", action="store_true", help="also the steps that surojax compiles")
    args = parser.parse_args(argv)

    def chosen(rows: tuple[Row, ...]) -> list[Row]:
        return [row for row in rows if args.only in (None, row.gpu)]

    print(f"{'tokens/s':<28}{'predicted':>12}{'published':>12}{'error':>11}")
    errors = [line(row, predicted(row)) for row in chosen(ROWS)]
    mean = summary(errors) if errors else 0.0
    if elsewhere := chosen(ELSEWHERE):
        print("nothing is fitted to these:")
        summary([line(row, predicted(row), at_ends(row)) for row in elsewhere])
    if args.compile and aot.available():
        for row in chosen(COMPILED):
            planned = plan(compiled_config(row), row.gpu, advise=False)
            assert planned.tokens_per_s_per_gpu is not None and planned.predicted_range_s is not None
            assert planned.predicted_step_s is not None
            rate = row.gpus * planned.tokens_per_s_per_gpu
            ends = (rate * planned.predicted_step_s / s for s in reversed(planned.predicted_range_s))
            line(row, rate, f"   compiled, range {' to '.join(f'{end:,.0f}' for end in ends)}")
    return int(mean > MOST or math.isnan(mean))


if __name__ == "__main__":
    sys.exit(main())
