"""Short convolution: LFM2's mixer of layers without attention (Liquid AI 2025).

    B, C, x = u Wb^T, u Wc^T, u Wx^T
    y[t]    = (C[t] * sum over j of k[:, J - 1 - j] (B * x)[t - j]) Wo^T        j = 0 .. J - 1, within a document

Its state is B * x of the latest J - 1 tokens, which each next token replaces: of two tokens for J = 3. Products before
the first token of a document are zeros, so no document and no padding reaches into another one.

Files have Wb, Wc and Wx as the rows of one matrix, `in_proj`; here they are three, each of whose rows `tp` divides.

Shape suffixes: B batch, S sequence, D hidden size, J taps, P = J - 1 earlier tokens.
"""

import math
from collections.abc import Callable, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from surojax.errors import need
from surojax.models.kinds.sublayer import FileNames, Mixer, Target, Width, undivided
from surojax.models.layers import parameter, projection
from surojax.models.linear import Product
from surojax.models.model import Cache
from surojax.models.operations import Operations
from surojax.models.recompute import save_inputs_only
from surojax.placement.param import Kind

TAPS = 3  # of every published model


class ShortConv(Mixer):
    """A gated depthwise causal convolution over a few tokens."""

    name = "conv"
    input = "conv_input"
    tensors: ClassVar = {
        **{
            f"w{name}": FileNames(f"conv.in_proj.weight[{part}/3]", f"shortconv.in_proj.weight[{part}/3]")
            for part, name in enumerate("bcx")
        },
        "taps": FileNames("conv.conv.weight[0/1]", "shortconv.conv.weight[0/1]"),
        "wo": FileNames("conv.out_proj.weight", "shortconv.out_proj.weight"),
    }

    def __init__(self, config, *, rngs: nnx.Rngs | None = None):
        c = config
        self.config = c
        if rngs is None:
            return
        D = c.hidden_size
        normal = nnx.initializers.normal(c.initializer_range)
        out = nnx.initializers.normal(c.initializer_range / math.sqrt(2 * c.num_hidden_layers))
        for number, name in enumerate("bcx"):
            product = Product(number, self.input, f"d_conv_{name}")
            setattr(self, f"w{name}", parameter(rngs, (D, D), ("conv", "embed"), normal, product=product))
        self.wo = parameter(rngs, (D, D), ("embed", "conv"), out, product=Product(3, "conv_output", "d_conv"))
        self.taps = parameter(rngs, (D, TAPS), ("conv", "taps"), nnx.initializers.normal(TAPS**-0.5), Kind.VECTOR)

    def __call__(
        self, x_BSD: jax.Array, ops: Operations, norm: Callable | None = None, cache: Cache | None = None
    ) -> tuple[jax.Array, Cache | None]:
        """Returns (the convolution of x `[B, S, D]` or norm(x), the cache with the state after the last token)."""
        b_BSD, c_BSD, x_BSD = ops.linears(x_BSD, [projection(self, f"w{name}") for name in "bcx"], norm)
        first = 0 if cache is None else cache.start
        before_BPD = None if cache is None else cache.state
        mixed_BSD, state_BPD = gated_convolution(b_BSD, c_BSD, x_BSD, self.taps[...], before_BPD, first, ops.starts)
        y_BSD = ops.linear(mixed_BSD, projection(self, "wo"))
        return y_BSD, None if cache is None else cache._replace(state=state_BPD)

    # -- declarations --------------------------------------------------------------------------------------------------

    def targets(self) -> Sequence[Target]:
        """Of `out_proj` alone: PEFT has one adapter of all of `in_proj`, here it is three matrices."""
        return [self.target("wo", self.widths()[0])]

    def widths(self) -> Sequence[Width]:
        return [undivided("model.hidden_size", self.config.hidden_size)]

    def decode_state(self, rows: int, positions: int, dtype) -> jax.ShapeDtypeStruct:
        """Shape of B * x of the latest tokens `[B, P, D]`, however many positions there are."""
        return jax.ShapeDtypeStruct((rows, TAPS - 1, self.config.hidden_size), dtype)

    def flops(self, sequence_len: int, window: int) -> float:
        return 2.0 * TAPS * self.config.hidden_size

    def check_context(self, c) -> None:
        change = "leave it out; tokens before a GPU's own are not sent yet"
        need(c.cp_size == 1, "cp_size", "1 with layers of short convolutions", c.cp_size, change)


@save_inputs_only
def gated_convolution(
    b_BSD: jax.Array,
    c_BSD: jax.Array,
    x_BSD: jax.Array,
    taps_DJ: jax.Array,
    before_BPD: jax.Array | None,
    first: jax.Array | int,
    starts_BS: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Returns (c * causal convolution of b * x, b * x of the latest tokens `[B, P, D]`); see `causal_convolution`."""
    total_BSD, latest_BPD = causal_convolution(b_BSD * x_BSD, taps_DJ, before_BPD, first, starts_BS)
    return c_BSD * total_BSD.astype(x_BSD.dtype), latest_BPD


def causal_convolution(
    x_BSD: jax.Array,
    taps_DJ: jax.Array,
    before_BPD: jax.Array | None,
    first: jax.Array | int,
    starts_BS: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Returns (convolution of each channel with its taps, in float32 at least; the latest inputs `[B, P, D]`).

    before: the inputs before the first token, whose position is `first`; None: zeros. starts: int32 `[B, S]`, the
    position at which each token's document starts; None: 0. No tap reaches into another document.
    """
    B, S, D = x_BSD.shape
    P = taps_DJ.shape[1] - 1
    before_BPD = jnp.zeros((B, P, D), x_BSD.dtype) if before_BPD is None else before_BPD
    all_BTD = jnp.concatenate([before_BPD, x_BSD], axis=1)
    position_1S = (first + jnp.arange(S))[None]
    start_BS = jnp.zeros_like(position_1S) if starts_BS is None else starts_BS
    dtype = jnp.promote_types(x_BSD.dtype, jnp.float32)
    total_BSD = jnp.zeros((B, S, D), dtype)
    for j in range(P + 1):
        shifted_BSD = jax.lax.slice_in_dim(all_BTD, P - j, P - j + S, axis=1).astype(dtype)
        is_own_BS1 = (position_1S - j >= start_BS)[..., None]
        total_BSD = total_BSD + jnp.where(is_own_BS1, shifted_BSD, 0) * taps_DJ[:, P - j].astype(dtype)[None, None]
    return total_BSD, all_BTD[:, S:]
