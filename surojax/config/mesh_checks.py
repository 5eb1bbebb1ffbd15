"""Checks that the mesh's sizes divide model, batch and sequences evenly."""

import math

from pallas_kernels.mma import ROWS
from surojax.config.fields import Config, gpus_per_sequence, head_dim, mlp_widths, tokens_of_piece
from surojax.declared import built
from surojax.errors import need
from surojax.families.registry import ARCHITECTURES
from surojax.numerics.blockscaled import WIDTHS
from surojax.numerics.recipes import BLOCK_SCALED, Precision
from surojax.parallel.schedule import check_lockstep, check_stages


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
        _check_heads(c)


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


def _check_heads(c: Config) -> None:
    """Raises ConfigError if tp_size does not divide the heads or widths that it shards in the blocks."""
    m = c.model
    n = c.tp_size
    for name in ("num_attention_heads", "intermediate_size"):
        need(
            m[name] % n == 0,
            f"model.{name}",
            f"a multiple of tp_size={n}, whose GPUs divide it",
            m[name],
            "lower tp_size",
        )
    kv = m.num_key_value_heads
    expected = f"a multiple or a divisor of tp_size={n}"
    need(kv % n == 0 or n % kv == 0, "model.num_key_value_heads", expected, kv, "lower tp_size")
    if c.recipe != "bf16":
        _check_widths(c)


def _check_widths(c: Config) -> None:
    """Raises ConfigError if a GPU's part of a matrix has a width that the recipe's products do not take."""
    m = c.model
    n = c.tp_size
    kv = m.num_key_value_heads
    multiple = WIDTHS if c.recipe in BLOCK_SCALED else 16  # 16: of float8 products
    widths = {
        "model.num_attention_heads x model.head_dim": m.num_attention_heads // n * head_dim(c),
        "model.num_key_value_heads x model.head_dim": max(kv // n, 1) * head_dim(c),
    } | {name: width // n for name, width in mlp_widths(c).values()}
    for name, width in widths.items():
        expected = f"a multiple of {multiple} on each GPU with tp_size={n} and recipe={c.recipe!r}"
        need(width % multiple == 0, name, expected, width, "lower tp_size")


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
    if method != "ulysses":
        _check_pieces(c)
        return
    heads = c.model.num_attention_heads
    expected = f"a multiple of cp_size x tp_size = {n * c.tp_size} with cp_method='ulysses', which divides the heads"
    change = "lower cp_size, or set cp_method='ring'"
    need(heads % (n * c.tp_size) == 0, "model.num_attention_heads", expected, heads, change)
    group_heads = max(c.model.num_key_value_heads // c.tp_size, 1)
    expected = f"a multiple or a divisor of cp_size = {n} on the GPUs of a tensor-parallel group"
    need(group_heads % n == 0 or n % group_heads == 0, "model.num_key_value_heads", expected, group_heads, change)


def _check_pieces(c: Config) -> None:
    """Raises ConfigError if the attention implementation cannot compute cp_method's pairs of pieces."""
    tokens = tokens_of_piece(c)
    whose = f"with cp_method={c.cp_method!r} and attention={c.attention!r}"
    if c.attention == "mosaic":
        expected = f"a multiple of {ROWS} {whose}"
        change = f"use a sequence_len of a multiple of {2 * ROWS * c.cp_size}, or attention='auto'"
        need(tokens % ROWS == 0, "sequence_len / (2 x cp_size)", expected, tokens, change)
    if c.attention == "cudnn":
        size = head_dim(c)
        need(size <= 128, "model.head_dim", f"at most 128 {whose}", size, "use attention='auto' or cp_method='ulysses'")
        expected = f"an even number {whose}"
        need(tokens % 2 == 0, "sequence_len / (2 x cp_size)", expected, tokens, "use attention='auto'")


def _check_stages(c: Config) -> None:
    """Raises ConfigError if the layers cannot be divided into pp_size stages."""
    check_stages(c.model.num_hidden_layers, c.pp_size)
    if c.pp_size == 1:
        return
    if c.cp_method == "ring":
        check_lockstep(_variants(c), c.pp_size)


def _variants(c: Config) -> tuple:
    """The `Variant` of each layer of a config's model."""
    return ARCHITECTURES[c.model.model_type].sizes(c.model.to_dict()).variants(built(Precision, c))
