"""Attention with grouped key/value heads.

Shape suffixes: B batch, S sequence, D hidden size, K key/value heads, h head dimension.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels.flash_attention import repeated_products
from pallas_kernels.mma import ROWS
from surojax.errors import need
from surojax.models.attention import chosen_here, chosen_implementation, on_hopper
from surojax.models.channels import Kept, names_of_keys
from surojax.models.kinds.sublayer import ContextNumbers, FileNames, KernelBytes, Mixer, OnGpu, Target, Width
from surojax.models.layers import norm_weight, parameter, projection, vector
from surojax.models.linear import Product
from surojax.models.model import Cache, Earlier
from surojax.models.operations import Operations
from surojax.models.recompute import save_inputs_only
from surojax.models.rotary import gradient_in_one_pass

OUT = Product(3, "attention_output", "d_attention")


@save_inputs_only
def times_sigmoid(x: jax.Array, gate: jax.Array) -> jax.Array:
    """Returns x * sigmoid(gate)."""
    return x * jax.nn.sigmoid(gate)


class Attention(Mixer):
    """Causal self-attention with grouped key/value heads; optional: biases, norms of queries, keys, sinks, a gate.

    fields: of a head's channels and of the number of key/value heads, for messages. has_keys: it computes keys and
    values; if not, it reads those of an earlier layer. kept_as: the kind of layers that share them, see channels.py.
    """

    name = "attention"
    input = "attention_input"
    appends = True
    has_keys: ClassVar = True
    kept_as: ClassVar = "sliding"
    fields: ClassVar = ("model.head_dim", "model.num_key_value_heads")
    tensors: ClassVar = {
        "wq": FileNames("self_attn.q_proj.weight", "attn_q.weight"),
        "wk": FileNames("self_attn.k_proj.weight", "attn_k.weight"),
        "wv": FileNames("self_attn.v_proj.weight", "attn_v.weight"),
        "wo": FileNames("self_attn.o_proj.weight", "attn_output.weight"),
        "bq": FileNames("self_attn.q_proj.bias", "attn_q.bias"),
        "bk": FileNames("self_attn.k_proj.bias", "attn_k.bias"),
        "bv": FileNames("self_attn.v_proj.bias", "attn_v.bias"),
        "q_norm": FileNames("self_attn.q_norm.weight", "attn_q_norm.weight"),
        "k_norm": FileNames("self_attn.k_norm.weight", "attn_k_norm.weight"),
        "wg": FileNames("self_attn.gate_proj.weight"),
    }

    def __init__(self, config, *, rngs: nnx.Rngs | None = None):
        c = config
        self.config = c
        if rngs is None:
            return
        D = c.hidden_size
        q = c.num_attention_heads * c.head_dim
        kv = c.num_key_value_heads * c.head_dim
        normal = nnx.initializers.normal(c.initializer_range)
        out = nnx.initializers.normal(c.initializer_range / math.sqrt(2 * c.num_hidden_layers))
        with_gate = q * (2 if c.attn_output_gate else 1)
        self.wq = parameter(rngs, (with_gate, D), ("heads", "embed"), normal, product=Product(0, self.input, "d_q"))
        if self.has_keys:
            self.wk = parameter(rngs, (kv, D), ("kv_heads", "embed"), normal, product=Product(1, self.input, "d_k"))
        if self.has_keys and not self.values_are_keys:
            self.wv = parameter(rngs, (kv, D), ("kv_heads", "embed"), normal, product=Product(2, self.input, "d_v"))
        self.wo = parameter(rngs, (D, q), ("embed", "heads"), out, product=OUT)
        if c.attn_gate_proj:
            gate = Product(7, self.input, "d_attention_gate")  # numbers from 4 to 6 are the MLP's
            self.wg = parameter(rngs, (q, D), ("heads", "embed"), normal, product=gate)
        if c.attention_bias:
            self.bq = vector(rngs, with_gate, "heads", nnx.initializers.zeros)
            if self.has_keys:
                self.bk = vector(rngs, kv, "kv_heads", nnx.initializers.zeros)
            if self.has_keys and not self.values_are_keys:
                self.bv = vector(rngs, kv, "kv_heads", nnx.initializers.zeros)
        if c.attention_out_bias:
            self.bo = vector(rngs, D, "embed", nnx.initializers.zeros)
        if c.attention_sinks:
            self.sinks = vector(rngs, c.num_attention_heads, "heads", normal)
        if c.qk_norm_whole:
            self.q_norm = norm_weight(rngs, c.norm_plus_one, q, "heads")
            self.k_norm = norm_weight(rngs, c.norm_plus_one, kv, "kv_heads")
        if c.qk_norm:
            self.q_norm = norm_weight(rngs, c.norm_plus_one, c.head_dim, "channels")
            if self.has_keys:
                self.k_norm = norm_weight(rngs, c.norm_plus_one, c.head_dim, "channels")

    @property
    def values_are_keys(self) -> bool:
        """True if keys and values are made of one product."""
        return False

    def heads(
        self, x_BSD: jax.Array, ops: Operations, norm: Callable | None, first: jax.Array | int
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        """Computes queries, keys, values and the output's gate `[B, S, heads, h]` of x or norm(x); None: no gate.

        first: index of the first token in its row.
        """
        c = self.config
        names = ("qk" if self.values_are_keys else "qkv") + ("g" if c.attn_gate_proj else "")
        projections = [projection(self, f"w{name}", f"b{name}") for name in names]
        q, k, *others = ops.linears(x_BSD, projections, norm)
        if self.values_are_keys:  # the sum of their gradients has no product in it, which a kernel could contract
            others = [gradient_in_one_pass(k), *others]
            k = gradient_in_one_pass(k)
        v, *gate = others
        if c.qk_norm_whole:
            q = ops.norm_of_all_heads(q, self.q_norm[...], "heads", c.rms_norm_eps)
            k = ops.norm_of_all_heads(k, self.k_norm[...], "kv_heads", c.rms_norm_eps)
        B, S, _ = q.shape
        if c.attn_output_gate:
            q, *gate = jnp.split(q.reshape(B, S, -1, 2 * c.head_dim), 2, axis=-1)
        q, k, v, *gate = (y.reshape(B, S, -1, c.head_dim) for y in (q, k, v, *gate))
        q = self.normed_queries(q, ops)
        if c.qk_norm:
            k = ops.norm(k, self.k_norm[...], c.rms_norm_eps, c.norm_plus_one)
        if c.qk_norm_weightless:
            k = ops.norm(k, jnp.ones(c.head_dim, k.dtype), c.rms_norm_eps)
        if c.v_norm_weightless:
            v = ops.norm(v, jnp.ones(c.head_dim, v.dtype), c.rms_norm_eps)
        return *ops.rotate(q, k, first, *c.rotary(ops.variant)), v, gate[0] if gate else None

    def normed_queries(self, q_BSHh: jax.Array, ops: Operations) -> jax.Array:
        """Norms queries by head, if the model does."""
        c = self.config
        if c.qk_norm:
            q_BSHh = ops.norm(q_BSHh, self.q_norm[...], c.rms_norm_eps, c.norm_plus_one)
        if c.qk_norm_weightless:
            q_BSHh = ops.norm(q_BSHh, jnp.ones(c.head_dim, q_BSHh.dtype), c.rms_norm_eps)
        return q_BSHh

    def earlier(self, x_BSD: jax.Array, ops: Operations, norm: Callable | None, first: int) -> Earlier:
        """Keys and values of a chunk x or norm(x), which later chunks attend to."""
        _, k_BSKh, v_BSKh, _ = self.heads(x_BSD, ops, norm, first)
        return Earlier(*ops.of_whole_chunk(k_BSKh, v_BSKh))

    def __call__(
        self, x_BSD: jax.Array, ops: Operations, norm: Callable | None = None, cache: Cache | Earlier | None = None
    ) -> tuple[jax.Array, Any]:
        """Returns (attention of x `[B, S, D]` or norm(x), which is recomputed; `new` of `Operations.attend`).

        `Kept` in place of the latter if later layers share keys and values.
        """
        c = self.config
        q, k, v, gate = self.heads(x_BSD, ops, norm, 0 if cache is None else cache.start)
        shared = self.has_keys and c.num_kv_shared_layers > 0
        if shared:  # the sum of their gradients has no product in it, which a kernel could contract
            k, v = gradient_in_one_pass(k), gradient_in_one_pass(v)
        scale = c.query_pre_attn_scalar**-0.5 if c.query_pre_attn_scalar else None
        sinks = self.sinks[...] if c.attention_sinks else None
        y_BSHh, cache = ops.attend(q, k, v, cache, scale=scale, softcap=c.attn_logit_softcapping, sinks=sinks)
        y_BSHh = y_BSHh if gate is None else times_sigmoid(y_BSHh, gate)
        new = Kept(cache, dict(zip(names_of_keys(self.kept_as), (k, v), strict=True))) if shared else cache
        return ops.linear(y_BSHh.reshape(*y_BSHh.shape[:2], -1), projection(self, "wo", "bo")), new

    # -- declarations --------------------------------------------------------------------------------------------------

    def widths(self) -> Sequence[Width]:
        c = self.config
        of_head, of_keys = self.fields
        rows = {"model.num_attention_heads": c.num_attention_heads, of_keys: c.num_key_value_heads}
        queries, keys = (Width(f"{field} x {of_head}", n * c.head_dim, field, n) for field, n in rows.items())
        return [queries, keys._replace(shared=True)]

    def targets(self) -> Sequence[Target]:
        queries, keys = self.widths()
        with_gate = queries._replace(size=2 * queries.size) if self.config.attn_output_gate else queries
        widths = {"wq": with_gate, "wk": keys} | ({} if self.values_are_keys else {"wv": keys}) | {"wo": queries}
        widths |= {"wg": queries} if self.config.attn_gate_proj else {}
        return [self.target(matrix, width) for matrix, width in widths.items()]

    def decode_state(self, rows: int, positions: int, dtype) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """Shapes of keys and values `[B, T, K, h]`."""
        shape = rows, positions, self.config.num_key_value_heads, self.config.head_dim
        return jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(shape, dtype)

    def decode_bytes(self, queries: int, positions: int) -> int:
        """Bytes of float32 scores, and of their softmax."""
        return self.config.num_attention_heads * queries * positions * 8

    def flops(self, sequence_len: int, window: int) -> float:
        """Those of two products with half of the square of positions, or with the window's band."""
        seen = sequence_len / 2
        if 0 < window < sequence_len:
            seen = window - window * (window - 1) / (2 * sequence_len)  # the first ones see fewer
        return 4.0 * self.config.num_attention_heads * self.config.head_dim * seen

    def space(self, compute, x: OnGpu, *, gpu: bool, packed: bool, window: bool) -> KernelBytes:
        c = self.config
        H, K, h = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        tokens = x.rows * x.tokens
        heads = tokens * H  # in a group: of whole sequences, a part of the heads
        in_pieces = x.per_sequence > x.tensor and compute.cp_method != "ulysses"
        piece = x.tokens * x.tensor // 2 if in_pieces else 0
        how: Any = {"gpu": gpu, "packed": packed, "window": window, "piece": piece}
        flash = self.implementation(compute.attention, x.dtype, **how)
        repeated = repeated_products(h, h) if flash == "mosaic" else (1.0, 1.0)
        if flash != "xla" and in_pieces:
            # Sums of results and of gradients are float32; a block of keys and values comes while one is computed with.
            # Our kernel also has float32 gradients of a pair, and reads transposed copies.
            keys = max(K, x.tensor)
            more = 2 * (H + keys) * (x.itemsize + 4) if flash == "mosaic" else 0
            sums = 2 * H * 4 + 4 * keys * (x.itemsize + 4)
            return KernelBytes(working=tokens * (sums + more) * h, repeated=repeated)
        if flash != "xla":
            # Flash attention saves its output and one float32 sum per row, and no scores. Ours reads transposed copies
            # of queries, keys and the gradient of its output.
            keys = x.chunks * max(K, x.tensor if x.chunks == 1 else x.per_sequence)
            copied = (2 * H + keys) * h if flash == "mosaic" else 0
            saved = 0 if compute.recompute.att else heads * (h * x.itemsize + 4)
            return KernelBytes(saved, tokens * copied * x.itemsize, repeated=repeated)
        keys = x.tokens * x.chunks * x.per_sequence
        if in_pieces:
            keys = 2 * x.tokens * x.tensor  # scores of four pairs, four pieces each (compiled for an H100: 16 to 17)
        scores = (2 if gpu else 4) * heads * keys * 4
        return KernelBytes(working=scores, scores=scores)

    def bytes_between_chunks(self, x: OnGpu) -> int:
        """Counts keys and values; devices that share a head have it each."""
        numbers = 2 * max(self.config.num_key_value_heads, x.per_sequence) * self.config.head_dim
        return x.itemsize * x.rows * x.tokens * x.chunks * numbers

    def context_numbers(self, tp: int, cp: int) -> ContextNumbers:
        queries, keys = self.widths()
        of_group = keys.part(tp)
        return ContextNumbers(
            exchanged=2 * queries.size // tp,
            keys=2 * max(of_group.parts, cp) * self.config.head_dim,
            pieces=2 * of_group.size,
        )

    def implementation(
        self,
        asked: str,
        dtype,
        *,
        packed: bool,
        gpu: bool | None = None,
        hopper: bool | None = None,
        window: bool = False,
        piece: int = 0,
    ) -> str:
        c = self.config
        scores: Any = {"softcap": c.attn_logit_softcapping > 0, "sinks": c.attention_sinks}
        scores |= {"packed": packed, "window": window, "piece": piece}
        if gpu is None:
            return chosen_here(asked, dtype, c.head_dim, **scores)
        hopper = gpu and on_hopper() if hopper is None else hopper
        return chosen_implementation(asked, dtype, c.head_dim, gpu=gpu, hopper=hopper, **scores)

    def exchanges_heads(self, tp: int, cp: int) -> bool:
        queries, keys = self.widths()
        return queries.is_divided(cp * tp) and keys.part(tp).is_divided(cp)

    def check_context(self, c) -> None:
        if c.cp_method != "ulysses":
            self._check_pieces(c)
            return
        queries, keys = self.widths()
        n = c.cp_size
        expected = (
            f"a multiple of cp_size x tp_size = {n * c.tp_size} with cp_method='ulysses', which divides the heads"
        )
        change = "lower cp_size, or set cp_method='ring'"
        need(queries.is_divided(n * c.tp_size), queries.field, expected, queries.parts, change)
        of_group = keys.part(c.tp_size)
        expected = f"a multiple or a divisor of cp_size = {n} on the GPUs of a tensor-parallel group"
        need(of_group.is_divided(n), keys.field, expected, of_group.parts, change)

    def _check_pieces(self, c) -> None:
        """Raises ConfigError if the attention implementation cannot compute cp_method's pairs of pieces."""
        tokens = c.sequence_len // (2 * c.cp_size)
        whose = f"with cp_method={c.cp_method!r} and attention={c.attention!r}"
        if c.attention == "mosaic":
            expected = f"a multiple of {ROWS} {whose}"
            change = f"use a sequence_len of a multiple of {2 * ROWS * c.cp_size}, or attention='auto'"
            need(tokens % ROWS == 0, "sequence_len / (2 x cp_size)", expected, tokens, change)
        if c.attention == "cudnn":
            h = self.config.head_dim
            change = "use attention='auto' or cp_method='ulysses'"
            need(h <= 128, self.fields[0], f"at most 128 {whose}", h, change)
            expected = f"an even number {whose}"
            need(tokens % 2 == 0, "sequence_len / (2 x cp_size)", expected, tokens, "use attention='auto'")
