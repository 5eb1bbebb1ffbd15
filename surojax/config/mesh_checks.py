"""Checks that the mesh's sizes divide model, batch and sequences evenly."""

import math

from surojax.config.fields import Config, base_architecture, gpus_per_sequence, kinds, widths
from surojax.errors import need
from surojax.numerics.blockscaled import WIDTHS
from surojax.numerics.recipes import BLOCK_SCALED
from surojax.parallel.schedule import check_counts, check_stages


def check_mesh(c: Config) -> None:
    """Raises ConfigError for the first size that does not fit the model, the batch or another setting."""
    _check_context(c)
    _check_stages(c)
    _check_parts(c)
    experts = c.model.num_experts
    if experts:
        near = math.gcd(experts, c.ep_size)
        need(experts % c.ep_size == 0, "ep_size", f"a divisor of model.num_experts={experts}", c.ep_size, f"use {near}")
    if c.tp_size > 1:
        _check_widths(c)


def _check_parts(c: Config) -> None:
    """Raises ConfigError if vocabulary, sequences and tokens cannot be divided over the GPUs that share them."""
    sizes = {name: c[name] for name in ("cp_size", "tp_size", "pp_size") if c[name] > 1}
    for name, among in (
        ("model.vocab_size", {"tp_size", "pp_size"}),
        ("sequence_len", set(sizes)),
    ):
        n = math.prod(c[size] for size in among)
        whose = " x ".join(size for size in sizes if size in among)
        size = c.model.vocab_size if name == "model.vocab_size" else c.sequence_len
        need(size % n == 0, name, f"a multiple of {whose}={n}, whose GPUs divide it", size, f"use {size + -size % n}")
    tokens = c.per_device_batch_size * c.sequence_len // gpus_per_sequence(c)
    expected = f"a divisor of per_device_batch_size x sequence_len / {' / '.join(sizes)} = {tokens}"
    need(not sizes or tokens % c.lmhead_chunks == 0, "lmhead_chunks", expected, c.lmhead_chunks, "lower it")


def _check_widths(c: Config) -> None:
    """Raises ConfigError if tp_size does not divide a sublayer, or leaves a width that the recipe does not take."""
    n = c.tp_size
    divided = widths(c)
    for width in divided:
        may_be_fewer = width.shared or width.copied
        kind = "multiple or a divisor" if may_be_fewer else "multiple"
        expected = f"a {kind} of tp_size={n}" + ("" if may_be_fewer else ", whose GPUs divide it")
        need(width.is_divided(n), width.field, expected, width.parts, "lower tp_size")
    shared = [width for width in divided if width.shared]
    fewest = min((width.parts for width in shared), default=n)
    for width in shared:  # GPUs share heads as in the layers with the fewest, whose number the mesh has
        change = f"use tp_size={fewest}" + (" or less" if fewest > 1 else "")
        need(
            n <= fewest or width.parts == fewest,
            "tp_size",
            f"at most {fewest}, the key/value heads of some layers of a model with {width.parts} in others",
            n,
            change,
        )
    multiple = WIDTHS if c.recipe in BLOCK_SCALED else 16  # 16: of float8 products
    for width in divided if c.recipe != "bf16" else ():
        expected = f"a multiple of {multiple} on each GPU with tp_size={n} and recipe={c.recipe!r}"
        need(width.part(n).size % multiple == 0, width.name, expected, width.part(n).size, "lower tp_size")


def _check_context(c: Config) -> None:
    """Raises ConfigError for the first field that does not fit cp_size and cp_method."""
    n = c.cp_size
    method = c.cp_method
    if n == 1:
        return
    pieces = n * c.tp_size if method == "ulysses" else math.lcm(2 * n, n * c.tp_size)
    length = c.sequence_len
    whose = "cp_size x tp_size GPUs divide it" if method == "ulysses" else f"{method} cuts it into pieces"
    expected = f"a multiple of {pieces}, as {whose}"
    need(length % pieces == 0, "sequence_len", expected, length, f"use {length + -length % pieces}")
    for layer in kinds(c).values():
        layer.mixer.check_context(c)


def _check_stages(c: Config) -> None:
    """Raises ConfigError if the layers cannot be divided into pp_size stages."""
    check_stages(c.model.num_hidden_layers, c.pp_size)
    if c.pp_size == 1:
        return
    sizes = base_architecture(c)
    mixers = sizes.mixers()
    check_counts(mixers, c.pp_size)
