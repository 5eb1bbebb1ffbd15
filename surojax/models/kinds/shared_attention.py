"""Attention to the keys and values of an earlier layer (Gemma 4 E2B and E4B): of its own it has queries alone.

They are those of the last layer of the same kind that computes its own, see models/channels.py. While sampling, each
layer has a copy of them in its cache.

Shape suffixes: B batch, S sequence, D hidden size, K key/value heads, h head dimension.
"""

from collections.abc import Callable, Sequence

import jax

from surojax.models.channels import names_of_keys
from surojax.models.kinds.global_attention import GlobalAttention
from surojax.models.kinds.self_attention import Attention
from surojax.models.kinds.sublayer import Target
from surojax.models.layers import projection
from surojax.models.operations import Operations


class SharedAttention(Attention):
    """Attention within the window to keys and values of an earlier layer."""

    has_keys = False

    def heads(
        self, x_BSD: jax.Array, ops: Operations, norm: Callable | None, first: jax.Array | int
    ) -> tuple[jax.Array, jax.Array, jax.Array, None]:
        """Computes queries of x or norm(x); returns them, and the earlier layer's keys and values of the same tokens.

        first: index of the first token in its row.
        """
        c = self.config
        (q,) = ops.linears(x_BSD, [projection(self, "wq", "bq")], norm)
        q = self.normed_queries(q.reshape(*q.shape[:2], -1, c.head_dim), ops)
        q, _ = ops.rotate(q, q[:, :, :1], first, *c.rotary(ops.variant))  # one head in place of keys
        k, v = (ops.beside[name].reshape(*q.shape[:2], -1, c.head_dim) for name in names_of_keys(self.kept_as))
        return q, k, v, None

    def targets(self) -> Sequence[Target]:
        return [target for target in super().targets() if target.matrix not in ("attention.wk", "attention.wv")]


class SharedGlobalAttention(SharedAttention, GlobalAttention):
    """`GlobalAttention` to keys and values of an earlier layer."""
