"""Gated delta net: the mixer of Qwen3.5's and Qwen3-Next's layers without attention (Yang et al. 2024).

    q, k, v = silu(conv(u Wq^T)), silu(conv(u Wk^T)), silu(conv(u Wv^T))      causal, of each channel
    beta    = sigmoid(u Wb^T);  g = -exp(A_log) softplus(u Wa^T + dt_bias)    of each value head
    o       = the gated delta rule of these (models/delta_rule.py)
    y       = (RMSNorm(o) * w * silu(u Wz^T)) Wo^T                            norm of each value head

Its state is a matrix for each value head, and the latest inputs of the convolution. Neither crosses a border between
documents. Decays are powers: A_log, dt_bias and all that follows from them are float32 at least, whatever the model's
dtype, and no recipe rounds Wa and Wb.

Wq, Wk and Wv are the rows of one matrix, as in files, where they have one adapter and one set of scales; likewise their
taps. So `tp` does not divide it: every GPU computes all of them, and goes on with its own heads. The (1 + w) of Qwen's
other norms is not in this one.

Qwen3-Next has two matrices in place of these five, as its files and adapters do: Wqkvz, with the rows q, k, the values
and the gates z of one key head after those of another, and Wba likewise. `tp` divides both.

Shape suffixes: B batch, S sequence, N, t: see row_pieces.py, D hidden size, K key heads, r value heads of a key head,
V = K r value heads, k channels of a key, v channels of a value, C channels of the convolution, J taps, P = J - 1
earlier tokens.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels import gated_delta_chunks
from surojax.models.delta_pieces import rule_of_pieces
from surojax.models.delta_rule import CHUNK, CHUNKS, KERNEL_CHUNKS, Tokens, moved_bytes
from surojax.models.kinds.short_conv import causal_convolution
from surojax.models.kinds.sublayer import ContextNumbers, FileNames, KernelBytes, Mixer, OnGpu, Target, Width
from surojax.models.layers import parameter, projection, vector
from surojax.models.linear import Product
from surojax.models.model import Cache
from surojax.models.operations import Operations
from surojax.models.recompute import save_inputs_only
from surojax.models.row_pieces import RowPieces
from surojax.numerics.rounding import materialised, silu
from surojax.parallel.collectives import device_number
from surojax.parallel.context import pieces_per_device
from surojax.placement.mesh import TENSOR
from surojax.placement.param import Kind

PROJECTIONS = ("qkv", "z", "b", "a")
FUSED = ("qkvz", "ba")


class GatedDelta(Mixer):
    """A recurrence with a state `[k, v]` for each value head; several value heads share the keys of one key head."""

    name = "delta"
    input = "delta_input"
    tensors: ClassVar = {
        "wqkv": FileNames("linear_attn.in_proj_qkv.weight", "attn_qkv.weight"),
        "wz": FileNames("linear_attn.in_proj_z.weight", "attn_gate.weight"),
        "wb": FileNames("linear_attn.in_proj_b.weight", "ssm_beta.weight"),
        "wa": FileNames("linear_attn.in_proj_a.weight", "ssm_alpha.weight"),
        "wqkvz": FileNames("linear_attn.in_proj_qkvz.weight", "ssm_in.weight"),
        "wba": FileNames("linear_attn.in_proj_ba.weight", "ssm_ba.weight"),
        "wo": FileNames("linear_attn.out_proj.weight", "ssm_out.weight"),
        "taps": FileNames("linear_attn.conv1d.weight", "ssm_conv1d.weight"),
        "A_log": FileNames("linear_attn.A_log", "ssm_a"),
        "dt_bias": FileNames("linear_attn.dt_bias", "ssm_dt.bias"),
        "norm": FileNames("linear_attn.norm.weight", "ssm_norm.weight"),
    }

    def __init__(self, config, *, rngs: nnx.Rngs | None = None):
        c = config
        self.config = c
        if rngs is None:
            return
        V, D, J = c.linear_num_value_heads, c.hidden_size, c.linear_conv_kernel_dim
        mixed, values = sum(self.convolved), self.convolved[-1]
        normal = nnx.initializers.normal(c.initializer_range)
        out = nnx.initializers.normal(c.initializer_range / math.sqrt(2 * c.num_hidden_layers))
        # Numbers of products from 4 to 6 are the MLP's.
        matrices = [(0, "qkv", mixed, "mixed"), (1, "z", values, "heads")]
        gates = [(2, "b", V), (7, "a", V)]
        if c.linear_fused_projections:
            matrices, gates = [(0, "qkvz", mixed + values, "heads")], [(2, "ba", 2 * V)]
        for number, name, size, axis in matrices:
            product = Product(number, self.input, f"d_delta_{name}")
            setattr(self, f"w{name}", parameter(rngs, (size, D), (axis, "embed"), normal, product=product))
        for number, name, size in gates:
            of_router: Any = {"kind": Kind.ROUTER, "product": Product(number)}
            setattr(self, f"w{name}", parameter(rngs, (size, D), ("heads", "embed"), normal, **of_router))
        wo = Product(3, "delta_output", "d_delta")
        self.wo = parameter(rngs, (D, values), ("embed", "heads"), out, product=wo)
        taps = nnx.initializers.normal(J**-0.5)
        self.taps = parameter(rngs, (mixed, 1, J), ("mixed", "channels", "taps"), taps, Kind.VECTOR)
        self.A_log = parameter(rngs, (V,), ("heads",), log_of_uniform, Kind.VECTOR, dtype="float32")
        self.dt_bias = parameter(rngs, (V,), ("heads",), nnx.initializers.ones, Kind.VECTOR, dtype="float32")
        self.norm = vector(rngs, c.linear_value_head_dim, "channels", nnx.initializers.ones)

    def __call__(
        self, x_BSD: jax.Array, ops: Operations, norm: Callable | None = None, cache: Cache | None = None
    ) -> tuple[jax.Array, Cache | None]:
        """Returns (the mixer of x `[B, S, D]` or norm(x), the cache with the states after the last token)."""
        c = self.config
        pieces = RowPieces(ops.compute.cp_method, 0 if cache is None else cache.start)
        state, latest = (None, None) if cache is None or cache.state is None else cache.state
        qkv, z, b, a = map(pieces.split, self._projected(x_BSD, ops, norm))
        taps_CJ = own_channels(self.taps[...], self.convolved, axis=0)[:, 0]
        starts = pieces.starts(ops.starts)
        earlier = taps_CJ.shape[1] - 1
        before, latest = pieces.halo(qkv[:, max(qkv.shape[1] - earlier, 0) :], earlier, latest)
        mixed = convolved_silu(qkv, taps_CJ, before, starts)
        N, t, V = b.shape
        K = V * c.linear_num_key_heads // c.linear_num_value_heads
        parts = materialised(jnp.split(mixed, [K * c.linear_key_head_dim, 2 * K * c.linear_key_head_dim], axis=-1))
        q, k, v = (x.reshape(N, t, heads, -1) for x, heads in zip(parts, (K, K, V), strict=True))
        g, beta = gates(a, b, self.A_log[...], self.dt_bias[...])
        tokens = Tokens(q, k, *(x.reshape(N, t, K, V // K, *x.shape[3:]) for x in (v, g, beta)))
        out, state = rule_of_pieces(ops.compute.cp_method, tokens, starts, state, **ops.kernel_options)
        out = out.reshape(v.shape).astype(z.dtype)
        y = gated_norm(out, z.reshape(v.shape), self.norm[...], c.rms_norm_eps)
        y_BSD = ops.linear(pieces.join(y.reshape(N, t, -1)), projection(self, "wo"))
        return y_BSD, None if cache is None else cache._replace(state=(state, latest))

    def _projected(self, x_BSD: jax.Array, ops: Operations, norm: Callable | None) -> list[jax.Array]:
        """Computes the inputs of the convolution `[B, S, C]`, z, b and a, of this GPU's heads."""
        c = self.config
        names = FUSED if c.linear_fused_projections else PROJECTIONS
        projected = ops.linears(x_BSD, [projection(self, f"w{name}") for name in names], norm)
        if not c.linear_fused_projections:
            return [own_channels(projected[0], self.convolved, axis=2), *projected[1:]]
        k, r = c.linear_key_head_dim, c.linear_num_value_heads // c.linear_num_key_heads
        sizes = ([k, k, r * c.linear_value_head_dim, r * c.linear_value_head_dim], [r, r])
        (q, k, v, z), (b, a) = (_of_key_heads(y, parts) for y, parts in zip(projected, sizes, strict=True))
        return [jnp.concatenate([q, k, v], axis=-1), z, b, a]

    @property
    def convolved(self) -> tuple[int, int, int]:
        """Rows of queries, keys and values in the whole matrix."""
        keys, values = self.widths()
        return keys.size, keys.size, values.size

    # -- declarations --------------------------------------------------------------------------------------------------

    def widths(self) -> Sequence[Width]:
        c = self.config

        def width(kind: str, heads: int, channels: int) -> Width:
            field = f"model.linear_num_{kind}_heads"
            return Width(f"{field} x model.linear_{kind}_head_dim", heads * channels, field, heads)

        return [
            width("key", c.linear_num_key_heads, c.linear_key_head_dim),
            width("value", c.linear_num_value_heads, c.linear_value_head_dim),
        ]

    def targets(self) -> Sequence[Target]:
        _, values = self.widths()
        mixed = values._replace(size=sum(self.convolved))
        heads = values._replace(size=values.parts)
        widths = {"wqkv": mixed, "wz": values, "wb": heads, "wa": heads, "wo": values}
        if self.config.linear_fused_projections:
            both, gates = (
                width._replace(size=width.size + more.size) for width, more in ((mixed, values), (heads, heads))
            )
            widths = {"wqkvz": both, "wba": gates, "wo": values}
        return [self.target(matrix, width) for matrix, width in widths.items()]

    def decode_state(self, rows: int, positions: int, dtype) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """Shapes of the heads' states `[B, K, r, k, v]`, and of the convolution's latest inputs `[B, P, C]`."""
        c = self.config
        K, r = c.linear_num_key_heads, c.linear_num_value_heads // c.linear_num_key_heads
        state = (rows, K, r, c.linear_key_head_dim, c.linear_value_head_dim)
        inputs = (rows, c.linear_conv_kernel_dim - 1, sum(self.convolved))
        wide = jnp.promote_types(dtype, jnp.float32)
        return jax.ShapeDtypeStruct(state, wide), jax.ShapeDtypeStruct(inputs, dtype)

    def decode_bytes(self, queries: int, positions: int) -> int:
        return self._group_bytes(queries, self.config.linear_num_value_heads)

    def flops(self, sequence_len: int, window: int) -> float:
        """FLOPs per token of a chunk's products and of its map of the state; earlier tokens add none."""
        c = self.config
        k, v, C = c.linear_key_head_dim, c.linear_value_head_dim, CHUNK
        of_value_head = 4 * C * (k + v) + 2 * k * (k + v) + 2 * k * v + 2 * k * k * v / C + C * C
        return c.linear_num_value_heads * of_value_head + c.linear_num_key_heads * 4 * C * k

    def context_numbers(self, tp: int, cp: int) -> ContextNumbers:
        c = self.config
        of_head = c.linear_key_head_dim * (c.linear_key_head_dim + c.linear_value_head_dim)
        halo = (c.linear_conv_kernel_dim - 1) * sum(self.convolved) // tp
        return ContextNumbers(halo=halo, maps=c.linear_num_value_heads // tp * of_head)

    def space(self, compute, x: OnGpu, *, gpu: bool, packed: bool, window: bool) -> KernelBytes:
        """A row's group of chunks at a time, and over `cp` the maps of all pieces."""
        c = self.config
        heads = c.linear_num_value_heads // x.tensor
        devices = x.per_sequence // x.tensor
        pieces = pieces_per_device(compute.cp_method) if devices > 1 else 1
        served = gated_delta_chunks.fits(x.dtype, c.linear_key_head_dim, c.linear_value_head_dim)
        by_kernels = gpu and served and compute.precision.kernels != "xla"
        of_group = self._kernel_bytes if by_kernels else self._group_bytes
        tokens = x.tokens * x.tensor // pieces
        maps = 4 * devices * self.context_numbers(x.tensor, devices).maps if devices > 1 else 0
        working = x.rows * pieces * (of_group(tokens, heads) + maps)
        # Compiled for an RTX 4090: 3.97 GB forward and 10.4 backward of 4,096 tokens of Qwen3.5 9B.
        size = x.rows * pieces * tokens * heads * self._token_bytes
        return KernelBytes(working=working, moved=None if by_kernels else moved_bytes(size, tokens, 20, 51))

    def _kernel_bytes(self, tokens: int, heads: int) -> int:
        """Bytes between the kernels of a row's group of chunks. heads: for values.

        In 16 bits the pairs of a chunk's tokens twice, two states for a chunk, and two values; vectors in float32.
        """
        c = self.config
        C, k, v = gated_delta_chunks.CHUNK, c.linear_key_head_dim, c.linear_value_head_dim
        return (2 * (2 * C + 2 * k * v // C + 2 * v) + 4 * 8) * heads * min(tokens, C * KERNEL_CHUNKS)

    def _group_bytes(self, tokens: int, heads: int) -> int:
        """Bytes of the float32 values of a row's group of chunks. heads: for values.

        Compiled for an H100, 281 KB for each token of a group of Qwen3.5 9B, forward and backward: 6 times what the
        pairs of a chunk's tokens, a key and a value take.
        """
        return 6 * self._token_bytes * heads * min(tokens, CHUNK * CHUNKS)

    @property
    def _token_bytes(self) -> int:
        """Bytes of a head's pairs of a token with those of its chunk, a key and a value, in float32."""
        return 4 * (CHUNK + self.config.linear_key_head_dim + self.config.linear_value_head_dim)


def own_channels(x: jax.Array, sizes: Sequence[int], axis: int, groups: Sequence[int] = ()) -> jax.Array:
    """Slices the channels of this GPU's heads out of those of all. sizes: of parts that each GPU has a share of.

    groups: of each part, the number of its groups, of which GPUs that are more have the same ones; (): they are more.
    """
    number, devices = device_number(*TENSOR)
    if devices == 1:
        return x
    own, start = [], 0
    for size, number_of_groups in zip(sizes, groups or [devices] * len(sizes), strict=True):
        shares = min(devices, number_of_groups)
        share = size // shares
        own_share = number if shares == devices else number * shares // devices
        own.append(jax.lax.dynamic_slice_in_dim(x, start + own_share * share, share, axis))
        start += size
    return jnp.concatenate(own, axis)


def _of_key_heads(y_BSX: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
    """Splits the rows of each key head into parts of these sizes, and joins the parts of all heads."""
    of_heads = y_BSX.reshape(*y_BSX.shape[:2], -1, sum(sizes))
    parts = jnp.split(of_heads, list(itertools.accumulate(sizes))[:-1], axis=-1)
    return [part.reshape(*part.shape[:2], -1) for part in parts]


def log_of_uniform(key, shape, dtype=jnp.float32) -> jax.Array:
    """Draws logarithms of numbers between 0.01 and 16."""
    return jnp.log(jax.random.uniform(key, shape, dtype, 0.01, 16.0))


@save_inputs_only
def convolved_silu(x, taps, before, starts, bias=None) -> jax.Array:
    """Returns silu of `causal_convolution`, plus a bias of each channel, in the dtype of x."""
    y = causal_convolution(x, taps, before, starts)
    return silu(y if bias is None else y + bias.astype(y.dtype)[None, None]).astype(x.dtype)


@save_inputs_only
def gates(a_BSV: jax.Array, b_BSV: jax.Array, A_log_V: jax.Array, dt_bias_V: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (g, the logarithm of the decay; beta), in float32 at least."""
    dtype = jnp.promote_types(a_BSV.dtype, jnp.float32)
    a, b, A_log, dt_bias = (x.astype(dtype) for x in (a_BSV, b_BSV, A_log_V, dt_bias_V))
    return -jnp.exp(A_log)[None, None] * jax.nn.softplus(a + dt_bias[None, None]), jax.nn.sigmoid(b)


@functools.partial(save_inputs_only, static_argnums=3)
def gated_norm(x_BSVv: jax.Array, z_BSVv: jax.Array, weight_v: jax.Array, eps: float) -> jax.Array:
    """Returns RMSNorm(x) * weight * silu(z), of each head, computed in float32 at least."""
    dtype = jnp.promote_types(x_BSVv.dtype, jnp.float32)
    x, z, weight = (y.astype(dtype) for y in (x_BSVv, z_BSVv, weight_v))
    normed = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return (normed * weight[None, None, None] * jax.nn.silu(z)).astype(x_BSVv.dtype)
