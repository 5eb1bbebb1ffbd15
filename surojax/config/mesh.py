"""Checks of the mesh's sizes: what is divided must divide evenly, and what is not built for a size is refused."""

from surojax.config.fields import Config, default_config
from surojax.errors import ConfigError, need
from surojax.parallel.schedule import SCHEDULES, check_stages

NOT_BUILT = ("cp_size",)

# What is not built for tensor parallelism, or not tested with it: each has its default if tp_size is above 1.
NOT_WITH_TP = (
    "recipe",
    "optimizer",
    "zero_quantized_weights",
    "zero_quantized_gradients",
    "memcpy_all_gather",
    "memcpy_send_recv",
    "nvme_path",
    "microbatches_per_fetch",
)


# The same for pipeline parallelism.
NOT_WITH_PP = (
    "recipe",
    "optimizer",
    "zero_quantized_weights",
    "zero_quantized_gradients",
    "memcpy_all_gather",
    "memcpy_send_recv",
    "nvme_path",
    "resident_layers",
    "microbatches_per_fetch",
)


def check_mesh(c: Config) -> None:
    """Raises ConfigError for the first size that does not fit the model, the batch or another setting."""
    for name in NOT_BUILT:
        if c[name] != 1:
            raise ConfigError(f"{name}: expected 1, since more is not built yet, got {c[name]}; leave it out")
    _check_defaults(c, "tp_size", NOT_WITH_TP)
    _check_defaults(c, "pp_size", NOT_WITH_PP)
    expected = f"one of {', '.join(SCHEDULES)}"
    need(c.pp_schedule in SCHEDULES, "pp_schedule", expected, c.pp_schedule, "choose one of them")
    default = default_config().pp_schedule
    expected = f"{default!r} with pp_size=1, which has no schedule"
    used = c.pp_size > 1 or c.pp_schedule == default
    need(used, "pp_schedule", expected, c.pp_schedule, "leave it out, or raise pp_size")
    check_stages(c.model.num_hidden_layers, c.pp_size)
    if c.tp_size > 1:
        _check_heads(c)
    _check_parts(c)


def _check_defaults(c: Config, size: str, fields: tuple[str, ...]) -> None:
    """Raises ConfigError for the first of these fields that is set although this size is above 1."""
    defaults = default_config()
    for name in fields if c[size] > 1 else ():
        expected = f"{defaults[name]!r} with {size}={c[size]}, for which it is not built yet"
        need(c[name] == defaults[name], name, expected, c[name], f"leave it out, or set {size}=1")


def _check_heads(c: Config) -> None:
    """Raises ConfigError if tp_size does not divide what it shards in the blocks."""
    n = c.tp_size
    m = c.model
    sizes = {
        "model.num_attention_heads": m.num_attention_heads,
        "model.intermediate_size": m.intermediate_size,
    }
    for name, size in sizes.items():
        need(size % n == 0, name, f"a multiple of tp_size={n}, whose GPUs divide it", size, "lower tp_size")
    kv = m.num_key_value_heads
    expected = f"a multiple or a divisor of tp_size={n}"
    need(kv % n == 0 or n % kv == 0, "model.num_key_value_heads", expected, kv, "lower tp_size")


def _check_parts(c: Config) -> None:
    """Raises ConfigError if vocabulary, sequences and tokens cannot be divided over the GPUs that share them."""
    n = c.tp_size * c.pp_size
    if n == 1:
        return
    sizes = {"tp_size": c.tp_size, "pp_size": c.pp_size}
    product = " x ".join(name for name, size in sizes.items() if size > 1)
    for name, size in {"model.vocab_size": c.model.vocab_size, "sequence_len": c.sequence_len}.items():
        expected = f"a multiple of {product}={n}, whose GPUs divide it"
        need(size % n == 0, name, expected, size, f"use {size + -size % n}")
    tokens = c.per_device_batch_size * c.sequence_len // n
    expected = f"a divisor of per_device_batch_size x sequence_len / {product.replace(' x ', ' / ')} = {tokens}"
    need(tokens % c.lmhead_chunks == 0, "lmhead_chunks", expected, c.lmhead_chunks, "lower it")
