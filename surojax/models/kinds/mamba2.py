"""Mamba2: the mixer of Granite-4-H's and Nemotron-H's layers without attention (Dao and Gu 2024, arXiv:2405.21060).

    z, x, b, c, d = u Win^T, the rows of one matrix
    x, b, c = silu(conv(x, b, c) + bias)                           causal, of each channel
    dt      = softplus(d + dt_bias), at least dt_min, at most dt_max, of each head
    h <- e^(-exp(A_log) dt) h + dt b x^T;   o = c^T h + D x         of each head; heads of a group share b and c
    y       = (RMSNorm(o * silu(z)) * w) Wout^T                     norm of each group's channels

The recurrence is the gated delta rule's without its correction (models/delta_rule.py), of which b is the key, c the
query and dt the strength. The gate comes before the norm here, and behind it in a delta net.

Its state is a matrix for each head, and the latest inputs of the convolution. Neither crosses a border between
documents. A_log, dt_bias, D and all that follows from them are float32 at least, whatever the model's dtype.

`tp` divides heads, and groups with their heads; GPUs that are more than the groups have the same b and c, and add up
the squares in the norm of a group. It does not divide Win, whose parts have one adapter and one set of scales: every
GPU computes all of its rows, and goes on with its own.

Shape suffixes: B batch, S sequence, N, t: see row_pieces.py, D hidden size, G groups, r heads of a group, H = G r
heads, n channels of the state, p channels of a head, C channels of the convolution, J taps, P = J - 1 earlier tokens.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from surojax.models.delta_pieces import rule_of_pieces
from surojax.models.delta_rule import CHUNK, CHUNKS, Tokens, chosen_sizes, moved_bytes
from surojax.models.kinds.gated_delta import convolved_silu, own_channels
from surojax.models.kinds.sublayer import ContextNumbers, FileNames, KernelBytes, Mixer, OnGpu, Target, Width
from surojax.models.layers import parameter, projection
from surojax.models.linear import Product
from surojax.models.model import Cache
from surojax.models.operations import Operations
from surojax.models.recompute import save_inputs_only
from surojax.models.row_pieces import RowPieces
from surojax.parallel.collectives import add_up, device_number
from surojax.parallel.context import pieces_per_device
from surojax.placement.mesh import TENSOR
from surojax.placement.param import Kind


class Mamba2(Mixer):
    """A recurrence with a state `[n, p]` for each head, which decays by one number a token."""

    name = "mamba"
    input = "mamba_input"
    tensors: ClassVar = {
        "w_in": FileNames("mamba.in_proj.weight", "ssm_in.weight"),
        "w_out": FileNames("mamba.out_proj.weight", "ssm_out.weight"),
        "taps": FileNames("mamba.conv1d.weight", "ssm_conv1d.weight"),
        "bias": FileNames("mamba.conv1d.bias", "ssm_conv1d.bias"),
        "A_log": FileNames("mamba.A_log", "ssm_a"),
        "dt_bias": FileNames("mamba.dt_bias", "ssm_dt.bias"),
        "D": FileNames("mamba.D", "ssm_d"),
        "norm": FileNames("mamba.norm.weight", "ssm_norm.weight"),
    }

    def __init__(self, config, *, rngs: nnx.Rngs | None = None):
        c = config
        self.config = c
        if rngs is None:
            return
        H, D, J, values = c.mamba_n_heads, c.hidden_size, c.mamba_d_conv, self.convolved[0]
        normal = nnx.initializers.normal(c.initializer_range)
        out = nnx.initializers.normal(c.initializer_range / math.sqrt(2 * c.num_hidden_layers))
        # Numbers of products from 4 to 6 are the MLP's.
        product = Product(0, self.input, "d_mamba_in")
        self.w_in = parameter(rngs, (sum(self.projected), D), ("mixed", "embed"), normal, product=product)
        product = Product(3, "mamba_output", "d_mamba")
        self.w_out = parameter(rngs, (D, values), ("embed", "heads"), out, product=product)
        mixed = sum(self.convolved)
        taps = nnx.initializers.normal(J**-0.5)
        self.taps = parameter(rngs, (mixed, 1, J), ("mixed", "channels", "taps"), taps, Kind.VECTOR)
        if c.mamba_conv_bias:
            self.bias = parameter(rngs, (mixed,), ("mixed",), nnx.initializers.zeros, Kind.VECTOR)
        of_heads: Any = {"kind": Kind.VECTOR, "dtype": "float32"}
        self.A_log = parameter(rngs, (H,), ("heads",), _logarithms, **of_heads)
        self.dt_bias = parameter(rngs, (H,), ("heads",), _biases, **of_heads)
        self.D = parameter(rngs, (H,), ("heads",), nnx.initializers.ones, **of_heads)
        self.norm = parameter(rngs, (values,), ("heads",), nnx.initializers.ones, Kind.VECTOR)

    def __call__(
        self, x_BSD: jax.Array, ops: Operations, norm: Callable | None = None, cache: Cache | None = None
    ) -> tuple[jax.Array, Cache | None]:
        """Returns (the mixer of x `[B, S, D]` or norm(x), the cache with the states after the last token)."""
        c = self.config
        pieces = RowPieces(ops.compute.cp_method, 0 if cache is None else cache.start)
        state, latest = (None, None) if cache is None or cache.state is None else cache.state
        (projected,) = ops.linears(x_BSD, [projection(self, "w_in")], norm)
        heads, groups = c.mamba_n_heads, c.mamba_n_groups
        own = pieces.split(own_channels(projected, self.projected, 2, (heads, heads, groups, groups, heads)))
        N, t, width = own.shape
        _, devices = device_number(*TENSOR)
        H, G = heads // devices, max(groups // devices, 1)  # of this GPU
        X = H * c.mamba_d_head
        z, mixed, d = jnp.split(own, [X, width - H], axis=-1)
        of_heads = heads, groups, groups
        taps_CJ = own_channels(self.taps[...], self.convolved, 0, of_heads)[:, 0]
        bias_C = own_channels(self.bias[...], self.convolved, 0, of_heads) if c.mamba_conv_bias else None
        starts = pieces.starts(ops.starts)
        earlier = taps_CJ.shape[1] - 1
        before, latest = pieces.halo(mixed[:, max(mixed.shape[1] - earlier, 0) :], earlier, latest)
        mixed = convolved_silu(mixed, taps_CJ, before, starts, bias_C)
        x, b, c_ = jnp.split(mixed, [X, X + G * c.mamba_d_state], axis=-1)
        g, dt = steps(d, self.A_log[...], self.dt_bias[...], (c.mamba_dt_min, c.mamba_dt_max))
        keys = (y.reshape(N, t, G, -1) for y in (c_, b))
        tokens = Tokens(*keys, *(y.reshape(N, t, G, H // G, *rest) for y, rest in ((x, (-1,)), (g, ()), (dt, ()))))
        sizes = chosen_sizes(tokens, None, corrects=False)
        out, state = rule_of_pieces(ops.compute.cp_method, tokens, starts, state, sizes)
        z = z.reshape(N, t, G, -1)
        y = gated_norm(out, tokens.v, z, self.D[...], self.norm[...], c.rms_norm_eps, groups)
        y_BSD = ops.linear(pieces.join(y), projection(self, "w_out"))
        return y_BSD, None if cache is None else cache._replace(state=(state, latest))

    @property
    def convolved(self) -> tuple[int, int, int]:
        """Channels of x, b and c."""
        values, keys = self.widths()
        return values.size, keys.size, keys.size

    @property
    def projected(self) -> tuple[int, int, int, int, int]:
        """Rows of z, x, b, c and d in the matrix of all."""
        return self.convolved[0], *self.convolved, self.config.mamba_n_heads

    # -- declarations --------------------------------------------------------------------------------------------------

    def widths(self) -> Sequence[Width]:
        c = self.config
        heads, groups = "model.mamba_n_heads", "model.mamba_n_groups"
        size, of_keys = c.mamba_n_heads * c.mamba_d_head, c.mamba_n_groups * c.mamba_d_state
        return [
            Width(f"{heads} x model.mamba_d_head", size, heads, c.mamba_n_heads),
            Width(f"{groups} x model.mamba_d_state", of_keys, groups, c.mamba_n_groups, copied=True),
        ]

    def targets(self) -> Sequence[Target]:
        """PEFT refuses adapters of `out_proj` in nemotron_h, whose kernels pass it by."""
        values, _ = self.widths()
        targets = [self.target("w_in", values._replace(size=sum(self.projected))), self.target("w_out", values)]
        return targets[:1] if self.config.one_purpose else targets

    def decode_state(self, rows: int, positions: int, dtype) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """Shapes of the heads' states `[B, G, r, n, p]`, and of the convolution's latest inputs `[B, P, C]`."""
        c = self.config
        heads = (c.mamba_n_groups, c.mamba_n_heads // c.mamba_n_groups)
        wide = jnp.promote_types(dtype, jnp.float32)
        inputs = (rows, c.mamba_d_conv - 1, sum(self.convolved))
        return (
            jax.ShapeDtypeStruct((rows, *heads, c.mamba_d_state, c.mamba_d_head), wide),
            jax.ShapeDtypeStruct(inputs, dtype),
        )

    def decode_bytes(self, queries: int, positions: int) -> int:
        return self._group_bytes(queries, self.config.mamba_n_heads)

    def flops(self, sequence_len: int, window: int) -> float:
        """FLOPs per token of a chunk's products and of its map of the state; earlier tokens add none."""
        c = self.config
        n, p, C = c.mamba_d_state, c.mamba_d_head, CHUNK
        return c.mamba_n_heads * (2 * C * p + 4 * n * p) + c.mamba_n_groups * 2 * C * n

    def context_numbers(self, tp: int, cp: int) -> ContextNumbers:
        c = self.config
        values, keys = (width.part(tp).size for width in self.widths())
        halo = (c.mamba_d_conv - 1) * (values + 2 * keys)
        return ContextNumbers(halo=halo, maps=c.mamba_n_heads // tp * c.mamba_d_state * (1 + c.mamba_d_head))

    def space(self, compute, x: OnGpu, *, gpu: bool, packed: bool, window: bool) -> KernelBytes:
        """A row's group of chunks at a time, and over `cp` the maps of all pieces."""
        devices = x.per_sequence // x.tensor
        pieces = pieces_per_device(compute.cp_method) if devices > 1 else 1
        tokens, heads = x.tokens * x.tensor // pieces, self.config.mamba_n_heads // x.tensor
        maps = 4 * devices * self.context_numbers(x.tensor, devices).maps if devices > 1 else 0
        working = x.rows * pieces * (self._group_bytes(tokens, heads) + maps)
        # Compiled for an RTX 4090: 4.0 GB forward and 12.7 backward of 8,192 tokens of Nemotron-3 Nano.
        size = x.rows * pieces * tokens * heads * self._token_bytes
        return KernelBytes(working=working, moved=moved_bytes(size, tokens, 6, 19))

    def _group_bytes(self, tokens: int, heads: int) -> int:
        """Bytes of the float32 values of a row's group of chunks.

        Compiled for an RTX 4090, forward and backward: 345 MiB of 2,048 tokens of Nemotron-3 Nano, 510 MiB of 8,192,
        and 361 MiB of Granite-4-H-Tiny: 3 times what the pairs of a chunk's tokens, a state's row and a value take.
        """
        return 3 * self._token_bytes * heads * min(tokens, CHUNK * CHUNKS)

    @property
    def _token_bytes(self) -> int:
        """Bytes of a head's pairs of a token with those of its chunk, a state's row and a value, in float32."""
        return 4 * (CHUNK + self.config.mamba_d_state + self.config.mamba_d_head)


def _logarithms(key, shape, dtype=jnp.float32) -> jax.Array:
    """Draws logarithms of numbers between 1 and 16."""
    return jnp.log(jax.random.uniform(key, shape, dtype, 1.0, 16.0))


def _biases(key, shape, dtype=jnp.float32) -> jax.Array:
    """Draws numbers whose softplus is between 0.001 and 0.1, evenly in their logarithms."""
    dt = jnp.exp(jax.random.uniform(key, shape, dtype, math.log(1e-3), math.log(0.1)))
    return dt + jnp.log(-jnp.expm1(-dt))


@functools.partial(save_inputs_only, static_argnums=3)
def steps(
    d_BSH: jax.Array, A_log_H: jax.Array, dt_bias_H: jax.Array, limits: tuple[float, float]
) -> tuple[jax.Array, jax.Array]:
    """Returns (g, the logarithm of the decay; dt), in float32 at least. limits: of dt; an upper one of 0 is none."""
    dtype = jnp.promote_types(d_BSH.dtype, jnp.float32)
    d, A_log, dt_bias = (x.astype(dtype) for x in (d_BSH, A_log_H, dt_bias_H))
    least, most = limits
    dt = jnp.maximum(jax.nn.softplus(d + dt_bias[None, None]), least)
    dt = jnp.minimum(dt, most) if most else dt
    return -jnp.exp(A_log)[None, None] * dt, dt


@functools.partial(save_inputs_only, static_argnums=(5, 6))
def gated_norm(
    out_BSGrp: jax.Array,
    x_BSGrp: jax.Array,
    z_BSGk: jax.Array,
    D_H: jax.Array,
    weight_X: jax.Array,
    eps: float,
    groups: int,
) -> jax.Array:
    """Returns RMSNorm((out + D x) * silu(z)) * weight `[B, S, X]`, of each group's k = r p channels.

    groups: of all devices.
    """
    dtype = jnp.promote_types(x_BSGrp.dtype, jnp.float32)
    out, x, z, D, weight = (y.astype(dtype) for y in (out_BSGrp, x_BSGrp, z_BSGk, D_H, weight_X))
    _, _, G, r, _ = x.shape
    total = (out + D.reshape(1, 1, G, r, 1) * x).reshape(z.shape) * jax.nn.silu(z)
    squares = mean_of_group(jnp.mean(total * total, axis=-1, keepdims=True), groups)
    normed = total * jax.lax.rsqrt(squares + eps)
    return (normed.reshape(*z.shape[:2], -1) * weight[None, None]).astype(z_BSGk.dtype)


def mean_of_group(x_BSG1: jax.Array, groups: int) -> jax.Array:
    """Returns the mean over the devices that have the same group; with as many groups as devices x itself."""
    number, devices = device_number(*TENSOR)
    if devices <= groups:
        return x_BSG1
    is_own_g = jax.nn.one_hot(number * groups // devices, groups, dtype=x_BSG1.dtype)
    of_groups = add_up(x_BSG1 * is_own_g[None, None, None], *TENSOR)
    return jnp.sum(of_groups * is_own_g[None, None, None], axis=-1, keepdims=True) * (groups / devices)
