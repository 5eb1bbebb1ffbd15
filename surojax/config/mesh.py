"""Checks of the mesh's sizes: what is divided must divide evenly, and what is not built for a size is refused."""

from surojax.config.fields import Config, default_config, head_dim
from surojax.errors import ConfigError, need
from surojax.numerics.blockscaled import WIDTHS
from surojax.numerics.recipes import BLOCK_SCALED

NOT_BUILT = ("cp_size", "pp_size")

# Not tested with tensor parallelism, for which they take GPUs: each has its default if tp_size is above 1.
NOT_WITH_TP = ("memcpy_all_gather", "memcpy_send_recv")


def check_mesh(c: Config) -> None:
    """Raises ConfigError for the first size that does not fit the model, the batch or another setting."""
    for name in NOT_BUILT:
        if c[name] != 1:
            raise ConfigError(f"{name}: expected 1, since more is not built yet, got {c[name]}; leave it out")
    n = c.tp_size
    if n == 1:
        return
    defaults = default_config()
    for name in NOT_WITH_TP:
        expected = f"{defaults[name]!r} with tp_size={n}, for which it is not built yet"
        need(c[name] == defaults[name], name, expected, c[name], "leave it out, or set tp_size=1")
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
        expected = (
            f"at least tp_size={n} with recipe={c.recipe!r}: GPUs that share a head would round parts of its sums"
        )
        need(kv >= n, "model.num_key_value_heads", expected, kv, "lower tp_size, or use recipe='fp8_current'")
        heads = m.num_attention_heads * head_dim(c) // n
        widths = {
            "model.num_attention_heads x model.head_dim": heads,
            "model.num_key_value_heads x model.head_dim": kv * head_dim(c) // n,
            "model.intermediate_size": m.intermediate_size // n,
        }
        for name, width in widths.items():
            expected = f"a multiple of {WIDTHS} on each GPU with tp_size={n} and recipe={c.recipe!r}"
            need(width % WIDTHS == 0, name, expected, width, "lower tp_size")
    tokens = c.per_device_batch_size * c.sequence_len // n
    expected = f"a divisor of per_device_batch_size x sequence_len / tp_size = {tokens}"
    need(tokens % c.lmhead_chunks == 0, "lmhead_chunks", expected, c.lmhead_chunks, "lower it")
