"""Short convolution: LFM2's mixer of layers without attention (Liquid AI 2025).

    B, C, x = u Wb^T, u Wc^T, u Wx^T
    y[t]    = (C[t] * sum over j of k[:, J - 1 - j] (B * x)[t - j]) Wo^T        j = 0 .. J - 1, within a document

Its state is B * x of the latest J - 1 tokens, which each next token replaces: of two tokens for J = 3. Products before
the first token of a document are zeros, so no document and no padding reaches into another one.

Files have Wb, Wc and Wx as the rows of one matrix, `in_proj`; here they are three, each of whose rows `tp` divides.

Shape suffixes: B batch, S sequence, N, t, u: see row_pieces.py, D hidden size, J taps, P = J - 1 earlier tokens.
"""

import math
from collections.abc import Callable, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from surojax.models.kinds.sublayer import ContextNumbers, FileNames, Mixer, Target, Width, undivided
from surojax.models.layers import parameter, projection
from surojax.models.linear import Product
from surojax.models.model import Cache
from surojax.models.operations import Operations
from surojax.models.recompute import save_inputs_only
from surojax.models.row_pieces import RowPieces
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
        pieces = RowPieces(ops.compute.cp_method, 0 if cache is None else cache.start)
        projected = ops.linears(x_BSD, [projection(self, f"w{name}") for name in "bcx"], norm)
        b_NtD, c_NtD, x_NtD = map(pieces.split, projected)
        tails_NuD = b_NtD[:, 1 - TAPS :] * x_NtD[:, 1 - TAPS :]
        before_NPD, state_BPD = pieces.halo(tails_NuD, TAPS - 1, None if cache is None else cache.state)
        mixed_NtD = gated_convolution(b_NtD, c_NtD, x_NtD, self.taps[...], before_NPD, pieces.starts(ops.starts))
        y_BSD = ops.linear(pieces.join(mixed_NtD), projection(self, "wo"))
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

    def context_numbers(self, tp: int, cp: int) -> ContextNumbers:
        return ContextNumbers(halo=(TAPS - 1) * self.config.hidden_size // tp)

    def flops(self, sequence_len: int, window: int) -> float:
        return 2.0 * TAPS * self.config.hidden_size


@save_inputs_only
def gated_convolution(
    b_BSD: jax.Array,
    c_BSD: jax.Array,
    x_BSD: jax.Array,
    taps_DJ: jax.Array,
    before_BPD: jax.Array | None,
    starts_BS: jax.Array | None,
) -> jax.Array:
    """Returns c * causal convolution of b * x, see `causal_convolution`."""
    return c_BSD * causal_convolution(b_BSD * x_BSD, taps_DJ, before_BPD, starts_BS).astype(x_BSD.dtype)


def causal_convolution(
    x_BSD: jax.Array, taps_DJ: jax.Array, before_BPD: jax.Array | None, starts_BS: jax.Array | None
) -> jax.Array:
    """Returns the convolution of each channel with its taps, in float32 at least.

    before: the inputs before the first token; None: zeros. starts: int32 `[B, S]`, index among these tokens at which
    each token's document starts, negative if before them; None: all are of one document. No tap reaches into another
    document.
    """
    B, S, D = x_BSD.shape
    P = taps_DJ.shape[1] - 1
    before_BPD = jnp.zeros((B, P, D), x_BSD.dtype) if before_BPD is None else before_BPD
    all_BTD = jnp.concatenate([before_BPD, x_BSD], axis=1)
    dtype = jnp.promote_types(x_BSD.dtype, jnp.float32)
    total_BSD = jnp.zeros((B, S, D), dtype)
    for j in range(P + 1):
        shifted_BSD = jax.lax.slice_in_dim(all_BTD, P - j, P - j + S, axis=1).astype(dtype)
        if starts_BS is not None:
            is_own_BS1 = (jnp.arange(S)[None] - j >= starts_BS)[..., None]
            shifted_BSD = jnp.where(is_own_BS1, shifted_BSD, 0)
        total_BSD = total_BSD + shifted_BSD * taps_DJ[:, P - j].astype(dtype)[None, None]
    return total_BSD
