"""Checks of the mesh's sizes: what is divided must divide evenly, and what is not built for a size is refused."""

import math

from surojax.config.fields import Config, default_config, gpus_per_sequence, head_dim
from surojax.errors import ConfigError, need
from surojax.numerics.blockscaled import WIDTHS
from surojax.numerics.recipes import BLOCK_SCALED

NOT_BUILT = ("pp_size",)

# Not tested with tensor parallelism, for which they take GPUs: each has its default if tp_size is above 1.
NOT_WITH_TP = ("memcpy_all_gather", "memcpy_send_recv")

# Likewise for context parallelism.
NOT_WITH_CP = (
    "recipe",
    "optimizer",
    "zero_quantized_weights",
    "zero_quantized_gradients",
    "memcpy_all_gather",
    "memcpy_send_recv",
    "nvme_path",
    "microbatches_per_fetch",
)


def check_mesh(c: Config) -> None:
    """Raises ConfigError for the first size that does not fit the model, the batch or another setting."""
    for name in NOT_BUILT:
        if c[name] != 1:
            raise ConfigError(f"{name}: expected 1, since more is not built yet, got {c[name]}; leave it out")
    _check_context(c)
    n = c.tp_size
    if n == 1:
        return
    _need_defaults(c, NOT_WITH_TP, "tp_size")
    expected = f"one of bf16, fp8_hybrid, fp8_current, mxfp8 with tp_size={n}, for which nvfp4 is not built yet"
    need(c.recipe != "nvfp4", "recipe", expected, c.recipe, "choose one, or set tp_size=1")
    m = c.model
    sizes = {
        "model.num_attention_heads": m.num_attention_heads,
        "model.intermediate_size": m.intermediate_size,
        "model.vocab_size": m.vocab_size,
        "sequence_len": c.sequence_len,
    }
    for name, size in sizes.items():
        change = f"use {size + -size % n}" if name in ("model.vocab_size", "sequence_len") else "lower tp_size"
        need(size % n == 0, name, f"a multiple of tp_size={n}, whose GPUs divide it", size, change)
    kv = m.num_key_value_heads
    expected = f"a multiple or a divisor of tp_size={n}"
    need(kv % n == 0 or n % kv == 0, "model.num_key_value_heads", expected, kv, "lower tp_size")
    if c.recipe in BLOCK_SCALED:
        _check_block_scaled(c)
    _check_head_chunks(c, "tp_size")


def _check_block_scaled(c: Config) -> None:
    """Raises ConfigError if a GPU's part of a matrix does not consist of whole blocks of one scale."""
    m = c.model
    n = c.tp_size
    kv = m.num_key_value_heads
    expected = f"at least tp_size={n} with recipe={c.recipe!r}: GPUs that share a head would round parts of its sums"
    need(kv >= n, "model.num_key_value_heads", expected, kv, "lower tp_size, or use recipe='fp8_current'")
    widths = {
        "model.num_attention_heads x model.head_dim": m.num_attention_heads * head_dim(c) // n,
        "model.num_key_value_heads x model.head_dim": kv * head_dim(c) // n,
        "model.intermediate_size": m.intermediate_size // n,
    }
    for name, width in widths.items():
        expected = f"a multiple of {WIDTHS} on each GPU with tp_size={n} and recipe={c.recipe!r}"
        need(width % WIDTHS == 0, name, expected, width, "lower tp_size")


def _need_defaults(c: Config, names: tuple[str, ...], size: str) -> None:
    """Raises ConfigError for the first of these fields that has not its default."""
    defaults = default_config()
    for name in names:
        expected = f"{defaults[name]!r} with {size}={c[size]}, for which it is not built yet"
        need(c[name] == defaults[name], name, expected, c[name], f"leave it out, or set {size}=1")


def _check_head_chunks(c: Config, sizes: str) -> None:
    """Raises ConfigError if the head's chunks do not divide the tokens of a GPU. sizes: the fields that divide them."""
    tokens = c.per_device_batch_size * c.sequence_len // gpus_per_sequence(c)
    expected = f"a divisor of per_device_batch_size x sequence_len / {sizes} = {tokens}"
    need(tokens % c.lmhead_chunks == 0, "lmhead_chunks", expected, c.lmhead_chunks, "lower it")


def _check_context(c: Config) -> None:
    """Raises ConfigError for the first field that does not fit cp_size and cp_method."""
    n = c.cp_size
    method = c.cp_method
    if n == 1:
        default = default_config().cp_method
        expected = f"{default!r} with cp_size=1, which does not use it"
        need(method == default, "cp_method", expected, method, "leave it out, or raise cp_size")
        return
    _need_defaults(c, NOT_WITH_CP, "cp_size")
    pieces = n * c.tp_size if method == "ulysses" else math.lcm(2 * n, n * c.tp_size)
    length = c.sequence_len
    whose = "cp_size x tp_size GPUs divide it" if method == "ulysses" else f"{method} cuts it into pieces"
    need(
        length % pieces == 0,
        "sequence_len",
        f"a multiple of {pieces}, as {whose}",
        length,
        f"use {length + -length % pieces}",
    )
    if method == "ulysses":
        heads = c.model.num_attention_heads
        expected = (
            f"a multiple of cp_size x tp_size = {n * c.tp_size} with cp_method='ulysses', which divides the heads"
        )
        change = "lower cp_size, or set cp_method='ring'"
        need(heads % (n * c.tp_size) == 0, "model.num_attention_heads", expected, heads, change)
        kv = c.model.num_key_value_heads
        of_group = max(kv // c.tp_size, 1)
        expected = f"a multiple or a divisor of cp_size = {n} on the GPUs of a tensor-parallel group"
        need(of_group % n == 0 or n % of_group == 0, "model.num_key_value_heads", expected, of_group, change)
    else:
        expected = f"'xla' with cp_method={method!r}, whose scores [s/2, s/2] of s = {length // n} tokens are in memory"
        need(c.attention == "xla", "attention", expected, c.attention, "set it, or cp_method='ulysses'")
    _check_head_chunks(c, "cp_size" if c.tp_size == 1 else "(cp_size x tp_size)")
