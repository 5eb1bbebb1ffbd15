"""Latent attention: keys and values of all heads follow from a few numbers of a token (DeepSeek-V2, arXiv:2405.04434).

    q       = RMSNorm(u Wqa^T) Wqb^T, or u Wq^T      of each head n channels, and r that rotate
    c, k    = u Wkva^T                               the latent of L numbers; r channels of the keys of all heads
    K, V    = RMSNorm(c) Wkvb^T                      of each head n channels of a key and v of a value
    y       = softmax(scale [q_n, rope(q_r)] [K, rope(k)]^T) V Wo^T

RMSNorm(c) and rope(k), L + r numbers of a token, stand for its keys and values, which are H (n + v) + r numbers: they
are what the backward pass, the chunks of a sequence, the GPUs of `cp` and the sampler's cache have. Whoever attends
expands them, and the backward pass does so again, with the attention. A token that is sampled attends to the latents
themselves: its queries are multiplied with Wkvb in place of all latents.

Both inner norms add 1e-6, whatever the model's norms add. `tp` divides the heads; Wqa, Wkva and the inner norms are on
every GPU.

Shape suffixes: B batch, S sequence, T its tokens up to the last one of S, D hidden size, H heads, h = n + r channels of
a query and a key, n those that do not rotate, r those that do, v channels of a value, L numbers of a latent.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels.flash_attention import repeated_products
from surojax.errors import need
from surojax.models.attention import attend, chosen_here, chosen_implementation, on_hopper
from surojax.models.kinds.sublayer import ContextNumbers, FileNames, KernelBytes, Mixer, OnGpu, Target, Width
from surojax.models.layers import parameter, projection, vector
from surojax.models.linear import Product
from surojax.models.model import Cache, Earlier
from surojax.models.operations import Operations, Projection
from surojax.models.recompute import recomputed
from surojax.parallel import context

EPS = 1e-6  # added to the mean square in both inner norms


class Latents(NamedTuple):
    """The numbers of tokens that keys and values are expanded from: latents `[B, T, L]`, rotated keys `[B, T, r]`."""

    latent: jax.Array
    key: jax.Array


class LatentAttention(Mixer):
    """Causal self-attention whose keys and values are expanded from a latent, with a rotary key of all heads."""

    name = "latent"
    input = "latent_input"
    appends = True
    tensors: ClassVar = {
        "wq": FileNames("self_attn.q_proj.weight", "attn_q.weight"),
        "wq_a": FileNames("self_attn.q_a_proj.weight", "attn_q_a.weight"),
        "wq_b": FileNames("self_attn.q_b_proj.weight", "attn_q_b.weight"),
        "wkv_a": FileNames("self_attn.kv_a_proj_with_mqa.weight", "attn_kv_a_mqa.weight"),
        "wkv_b": FileNames("self_attn.kv_b_proj.weight", "attn_kv_b.weight"),
        "wo": FileNames("self_attn.o_proj.weight", "attn_output.weight"),
        "q_norm": FileNames("self_attn.q_a_layernorm.weight", "attn_q_a_norm.weight"),
        "kv_norm": FileNames("self_attn.kv_a_layernorm.weight", "attn_kv_a_norm.weight"),
        "bq_a": FileNames("self_attn.q_a_proj.bias"),
        "bkv_a": FileNames("self_attn.kv_a_proj_with_mqa.bias"),
        "bo": FileNames("self_attn.o_proj.bias"),
    }

    def __init__(self, config, *, rngs: nnx.Rngs | None = None):
        c = config
        self.config = c
        if rngs is None:
            return
        D, H, L, v = c.hidden_size, c.num_attention_heads, c.kv_lora_rank, c.v_head_dim
        normal = nnx.initializers.normal(c.initializer_range)
        out = nnx.initializers.normal(c.initializer_range / math.sqrt(2 * c.num_hidden_layers))
        rank = c.q_lora_rank
        rows = H * self.channels
        # Numbers of products from 4 to 6 are the MLP's.
        if rank:
            q_a, q_b = Product(0, self.input, "d_q_a"), Product(2, "query_latent", "d_q")
            self.wq_a = parameter(rngs, (rank, D), ("latent", "embed"), normal, product=q_a)
            self.q_norm = vector(rngs, rank, "latent", nnx.initializers.ones)
            self.wq_b = parameter(rngs, (rows, rank), ("heads", "latent"), normal, product=q_b)
        else:
            self.wq = parameter(rngs, (rows, D), ("heads", "embed"), normal, product=Product(0, self.input, "d_q"))
        kv_a, kv_b = Product(1, self.input, "d_kv_a"), Product(7, "latent", "d_kv")
        self.wkv_a = parameter(rngs, (L + c.qk_rope_head_dim, D), ("latent", "embed"), normal, product=kv_a)
        self.kv_norm = vector(rngs, L, "latent", nnx.initializers.ones)
        rows = H * (c.qk_nope_head_dim + v)
        self.wkv_b = parameter(rngs, (rows, L), ("heads", "latent"), normal, product=kv_b)
        self.wo = parameter(rngs, (D, H * v), ("embed", "heads"), out, product=Product(3, "latent_output", "d_latent"))
        zeros = nnx.initializers.zeros
        if c.attention_bias:
            if rank:
                self.bq_a = vector(rngs, rank, "latent", zeros)
            self.bkv_a = vector(rngs, L + c.qk_rope_head_dim, "latent", zeros)
        if c.attention_out_bias:
            self.bo = vector(rngs, D, "embed", zeros)

    @property
    def channels(self) -> int:
        """Channels of a head's queries and keys: n + r."""
        return self.config.qk_nope_head_dim + self.config.qk_rope_head_dim

    def project(
        self, x_BSD: jax.Array, ops: Operations, norm: Callable | None, first: jax.Array | int
    ) -> tuple[jax.Array, Latents]:
        """Computes queries `[B, S, H, h]` and the latents of x or norm(x).

        first: index of the first token in its row.
        """
        c = self.config
        names = ("q_a" if c.q_lora_rank else "q", "kv_a")
        q, kv = ops.linears(x_BSD, [projection(self, f"w{name}", f"b{name}") for name in names], norm)
        if c.q_lora_rank:
            q = ops.linear(ops.norm(q, self.q_norm[...], EPS), projection(self, "wq_b"), gathers=False)
        B, S, _ = q.shape
        q_BSHh = q.reshape(B, S, -1, self.channels)
        latent_BSL = ops.norm(kv[..., : c.kv_lora_rank], self.kv_norm[...], EPS)
        q_BSHr, k_BS1r = q_BSHh[..., c.qk_nope_head_dim :], kv[:, :, None, c.kv_lora_rank :]
        if c.rope_interleave:
            q_BSHr, k_BS1r = pairs_as_halves(q_BSHr), pairs_as_halves(k_BS1r)
        base, scaling = c.rotary(ops.variant)
        q_BSHr, k_BS1r = ops.rotate(q_BSHr, k_BS1r, first, base, dataclasses.replace(scaling, llama_4_scaling_beta=0.0))
        q_BSHh = jnp.concatenate([q_BSHh[..., : c.qk_nope_head_dim], q_BSHr], axis=-1)
        return ops.grown(q_BSHh, first, scaling), Latents(latent_BSL, k_BS1r[:, :, 0])

    def earlier(self, x_BSD: jax.Array, ops: Operations, norm: Callable | None, first: int) -> Earlier:
        """The `Latents` of a chunk x or norm(x), which later chunks attend to."""
        return Earlier(*of_all_tokens(self.project(x_BSD, ops, norm, first)[1]))

    def __call__(
        self, x_BSD: jax.Array, ops: Operations, norm: Callable | None = None, cache: Cache | Earlier | None = None
    ) -> tuple[jax.Array, Cache | Earlier | None]:
        """Returns (attention of x `[B, S, D]` or norm(x), the extended cache, or the chunk's own `Earlier`)."""
        q_BSHh, own = self.project(x_BSD, ops, norm, 0 if cache is None else cache.start)
        if isinstance(cache, Cache):
            y_BSHv, cache = self.attend_cached(q_BSHh, own, cache, ops)
        elif isinstance(cache, Earlier):
            own = of_all_tokens(own)
            y_BSHv = self.attend(q_BSHh, Latents(*cache.with_own(*own)), ops)
            cache = Earlier(*own)
        else:
            y_BSHv = self.attend(q_BSHh, own, ops, gathers=True)
        return ops.linear(y_BSHv.reshape(*y_BSHv.shape[:2], -1), projection(self, "wo", "bo")), cache

    def attend(self, q_BSHh: jax.Array, known: Latents, ops: Operations, *, gathers: bool = False) -> jax.Array:
        """Attention `[B, S, H, v]` to keys and values that are expanded here, and again in the backward pass.

        gathers: `known` are of this GPU's tokens, where the GPUs of `cp` divide the sequence. Each GPU has whole
        sequences of a part of the heads meanwhile, as with ulysses.
        """
        kv_b = projection(self, "wkv_b")

        def attended(q_BSHh: jax.Array, known: Latents):
            known = of_all_tokens(known) if gathers else known
            is_divided = context.is_divided()
            (q_BSHh,) = context.scatter_heads(q_BSHh) if is_divided else (q_BSHh,)
            k_BTHh, v_BTHv = self.expand(known, ops, of_own_heads(kv_b) if is_divided else kv_b)
            how: Any = {"starts": ops.starts, "scale": self.scale, "implementation": ops.compute.attention}
            y_BSHv = attend(q_BSHh, k_BTHh, v_BTHv, **how)
            return context.gather_heads(y_BSHv) if is_divided else y_BSHv

        return recomputed(attended)(q_BSHh, known)

    def expand(self, known: Latents, ops: Operations, kv_b: Projection) -> tuple[jax.Array, jax.Array]:
        """Computes keys `[B, T, H, h]` and values `[B, T, H, v]`."""
        latent_BTL, k_BTr = known
        B, T, _ = latent_BTL.shape
        kv_BTHx = ops.linear(latent_BTL, kv_b, gathers=False).reshape(B, T, -1, self.expanded)
        n = self.config.qk_nope_head_dim
        k_BTHr = jnp.broadcast_to(k_BTr[:, :, None], (*kv_BTHx.shape[:3], k_BTr.shape[-1]))
        return jnp.concatenate([kv_BTHx[..., :n], k_BTHr], axis=-1), kv_BTHx[..., n:]

    def attend_cached(self, q_BSHh: jax.Array, own: Latents, cache: Cache, ops: Operations) -> tuple[jax.Array, Cache]:
        """Returns (attention `[B, S, H, v]` to the cache's positions and its own, the extended cache), by XLA.

        The way with fewer operations: the cache's latents are expanded, or one head of L + r channels, which all
        queries share, has them as keys and as values.
        """
        pairs = zip(cache.state, own, strict=True)
        state = Latents(*(jax.lax.dynamic_update_slice_in_dim(kept, new, cache.start, 1) for kept, new in pairs))
        latent_BTL, k_BTr = state
        c = self.config
        S, T, n = q_BSHh.shape[1], latent_BTL.shape[1], c.qk_nope_head_dim
        kv_b = projection(self, "wkv_b")
        places: Any = {"start": cache.start, "starts": ops.starts, "scale": self.scale, "implementation": "xla"}
        per_pair = 2 * c.kv_lora_rank + c.qk_rope_head_dim - self.channels - c.v_head_dim
        if S * T * per_pair > (T - S) * c.kv_lora_rank * self.expanded:
            y_BSHv = attend(q_BSHh, *self.expand(state, ops, kv_b), **places)
            return y_BSHv, cache._replace(state=tuple(state))
        w_HxL = self.expansion(ops, kv_b)
        q_BSHL = jnp.einsum("BSHn,HnL->BSHL", q_BSHh[..., :n], w_HxL[:, :n])
        q_BSHx = jnp.concatenate([q_BSHL, q_BSHh[..., n:]], axis=-1)
        k_BT1x = jnp.concatenate([latent_BTL, k_BTr], axis=-1)[:, :, None]
        mixed_BSHL = attend(q_BSHx, k_BT1x, latent_BTL[:, :, None], **places)
        return jnp.einsum("BSHL,HvL->BSHv", mixed_BSHL, w_HxL[:, n:]), cache._replace(state=tuple(state))

    def expansion(self, ops: Operations, kv_b: Projection) -> jax.Array:
        """The matrix that expands latents, with its adapter, `[H, n + v, L]`."""
        w_oL = kv_b.weight[...]
        if kv_b.adapter is not None:
            w_oL = ops.linear(jnp.eye(w_oL.shape[1], dtype=w_oL.dtype)[None], kv_b)[0].T
        return w_oL.reshape(-1, self.expanded, w_oL.shape[1])

    @property
    def expanded(self) -> int:
        """Numbers of a head that follow from a latent: n + v."""
        return self.config.qk_nope_head_dim + self.config.v_head_dim

    @property
    def scale(self) -> float:
        """The factor of the scores."""
        return self.channels**-0.5 * self.config.rope_scaling.score_factor

    # -- declarations --------------------------------------------------------------------------------------------------

    def widths(self) -> Sequence[Width]:
        c = self.config
        H = c.num_attention_heads
        heads = "model.num_attention_heads"
        of_heads = {
            "(model.qk_nope_head_dim + model.qk_rope_head_dim)": self.channels,
            "(model.qk_nope_head_dim + model.v_head_dim)": self.expanded,
            "model.v_head_dim": c.v_head_dim,
        }
        ranks = {
            "model.q_lora_rank": c.q_lora_rank,
            "model.kv_lora_rank": c.kv_lora_rank,
            "model.kv_lora_rank + model.qk_rope_head_dim": c.kv_lora_rank + c.qk_rope_head_dim,
        }
        divided = [Width(f"{heads} x {name}", H * size, heads, H) for name, size in of_heads.items()]
        return divided + [Width(name, size, name, 1, shared=True) for name, size in ranks.items() if size]

    def targets(self) -> Sequence[Target]:
        c = self.config
        queries, expanded, values, *ranks = self.widths()
        latent, with_key = ranks[-2:]
        targets = [self.target("wq", queries)]
        if c.q_lora_rank:
            rank = ranks[0]
            targets = [self.target("wq_a", rank), self.target("wq_b", min(queries, rank, key=lambda x: x.size))]
        targets.append(self.target("wkv_a", with_key))
        targets.append(self.target("wkv_b", min(expanded, latent, key=lambda x: x.size)))
        return [*targets, self.target("wo", values)]

    def decode_state(self, rows: int, positions: int, dtype) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """Shapes of latents `[B, T, L]` and rotated keys `[B, T, r]`."""
        sizes = self.config.kv_lora_rank, self.config.qk_rope_head_dim
        latents, keys = (jax.ShapeDtypeStruct((rows, positions, size), dtype) for size in sizes)
        return latents, keys

    def decode_bytes(self, queries: int, positions: int) -> int:
        """Bytes of float32 scores, of their softmax, and of expanded keys and values."""
        expanded = 4 * positions * (self.channels + self.expanded) if queries > 1 else 0
        return self.config.num_attention_heads * (queries * positions * 8 + expanded)

    def flops(self, sequence_len: int, window: int) -> float:
        """FLOPs of a token: two products with half of the positions."""
        return float(self.config.num_attention_heads * (self.channels + self.config.v_head_dim) * sequence_len)

    def space(self, compute, x: OnGpu, *, gpu: bool, packed: bool, window: bool) -> KernelBytes:
        """Counts keys, values, their gradients and those of the attention; with XLA also the scores."""
        h, v = self.channels, self.config.v_head_dim
        heads = x.rows * x.tokens * self.config.num_attention_heads  # whole sequences with a part of the heads
        keys = heads * x.chunks * (h + v) * x.itemsize
        flash = self.implementation(compute.attention, x.dtype, gpu=gpu, packed=packed)
        if flash != "xla":
            copied = (2 * h + v) * x.itemsize if flash == "mosaic" else 0  # transposed, of our kernel
            repeated = repeated_products(h, v) if flash == "mosaic" else (1.0, 1.0)
            return KernelBytes(0, 2 * keys + heads * (2 * v * x.itemsize + 4 + copied), repeated=repeated)
        scores = (2 if gpu else 4) * heads * x.tokens * x.chunks * x.per_sequence * 4
        return KernelBytes(working=2 * keys + scores, scores=scores)

    def bytes_between_chunks(self, x: OnGpu) -> int:
        """Counts latents and rotated keys of whole sequences, which every GPU has."""
        return x.itemsize * x.rows * x.tokens * x.chunks * x.per_sequence * self._latents

    @property
    def _latents(self) -> int:
        """Numbers of a token's latent and rotated key."""
        return self.config.kv_lora_rank + self.config.qk_rope_head_dim

    def context_numbers(self, tp: int, cp: int) -> ContextNumbers:
        heads = self.config.num_attention_heads // tp
        latents = self._latents
        return ContextNumbers(heads * (self.channels + self.config.v_head_dim), cp * latents, latents)

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
        sizes = self.channels, self.config.v_head_dim
        if gpu is None:
            return chosen_here(asked, dtype, *sizes, packed=packed)
        hopper = gpu and on_hopper() if hopper is None else hopper
        return chosen_implementation(asked, dtype, *sizes, gpu=gpu, hopper=hopper, packed=packed)

    def exchanges_heads(self, tp: int, cp: int) -> bool:
        return self.config.num_attention_heads % (cp * tp) == 0

    def check_context(self, c) -> None:
        n = c.cp_size * c.tp_size
        expected = f"a multiple of cp_size x tp_size = {n}, whose GPUs divide the heads"
        heads = self.config.num_attention_heads
        need(heads % n == 0, "model.num_attention_heads", expected, heads, "lower cp_size")


def pairs_as_halves(x: jax.Array) -> jax.Array:
    """Reorders channels whose neighbours rotate together, so that those of a pair are half of them apart."""
    *lead, r = x.shape
    return x.reshape(*lead, r // 2, 2).swapaxes(-1, -2).reshape(x.shape)


def of_all_tokens(known: Latents) -> Latents:
    """All-gathers the latents of a whole sequence or chunk from the GPUs of `cp`."""
    return Latents(*(context.gather_tokens(x) for x in known)) if context.is_divided() else known


def of_own_heads(kv_b: Projection) -> Projection:
    """Slices the rows of this GPU's heads, as `context.scatter_heads` gives them, out of matrix and adapter."""

    def own(param) -> Any:
        is_row = param.get_metadata("out_sharding")[0] == "heads"
        return param.replace(context.own_heads(param[...])) if is_row else param

    adapter: Any = kv_b.adapter
    if adapter is not None:
        graph, params = nnx.split(adapter)
        adapter = nnx.merge(graph, jax.tree.map(own, params, is_leaf=lambda x: isinstance(x, nnx.Variable)))
    return Projection(own(kv_b.weight), None, adapter)
