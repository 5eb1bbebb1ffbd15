"""Values that layers hand on beside the residual stream x (Gemma 4 E2B and E4B): further channels of the same array.

    [ x D | embedding D | norm P | id 8 | keys and values of the last layer of each type that has its own ]

So whatever runs the layers (a loop, stages, programs of one layer) hands on one array [B, S, W] and its gradient, and
knows nothing of these values. Each layer replaces x. The embedding, the norm's weights and the token's id are what
`LayerInput` (kinds/layer_input.py) computes a layer's own input from, and stay as they are. A layer with keys of its
own replaces those of its type; layers that share keys read them (kinds/shared_attention.py). In the backward pass their
gradients are added up on the way, until the layer that computed the keys takes them.

Shape suffixes: B batch, S sequence, D hidden size, P channels of a layer's own input, W all channels.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

LAYER_INPUT_NORM = "layer_input_norm"  # the outer parameter that NORM has of each token
EMBEDDING, NORM, TOKEN = "embedding", "norm", "token"
BYTES = 3  # a token's id has a channel for each byte, since bfloat16 has all whole numbers up to 256
TOKEN_CHANNELS = 8  # with those that are zeros, for rows of whole 16 bytes


def names_of_keys(kind: str) -> tuple[str, str]:
    """The names of keys and values of layers of this kind."""
    return f"{kind} keys", f"{kind} values"


class Kept(NamedTuple):
    """The result of attention whose keys and values later layers share.

    new: what attention without them returns beside its output. beside: keys and values `[B, S, K, h]` by name.
    """

    new: Any
    beside: dict[str, jax.Array]


class Channels(NamedTuple):
    """The channels of the array that layers hand on.

    hidden: of the residual stream. sizes: of what is beside it, by name, in order; {}: nothing.
    """

    hidden: int
    sizes: Mapping[str, int]

    @property
    def all(self) -> int:
        """The number of all channels."""
        return self.hidden + sum(self.sizes.values())

    def stream(self, x_BSW: jax.Array) -> jax.Array:
        """The residual stream `[..., D]` alone."""
        return x_BSW[..., : self.hidden] if self.sizes else x_BSW

    def split(self, x_BSW: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Splits the array into (x `[B, S, D]`, what is beside it by name)."""
        found, start = {}, self.hidden
        for name, size in self.sizes.items():
            found[name] = x_BSW[..., start : start + size]
            start += size
        return x_BSW[..., : self.hidden], found

    def joined(self, x_BSD: jax.Array, beside: Mapping[str, jax.Array]) -> jax.Array:
        """Joins x and what is beside it: the reverse of `split`. Keys and values may be `[B, S, K, h]`."""
        parts = [beside[name].reshape(*x_BSD.shape[:-1], size) for name, size in self.sizes.items()]
        return jnp.concatenate([x_BSD, *parts], axis=-1)

    def first(self, x_BSD: jax.Array, norm_P: jax.Array | None, tokens_BS: jax.Array) -> jax.Array:
        """Makes the first layer's input `[B, S, W]` of the tokens' embeddings, the norm's weights and the tokens' ids.

        Keys and values are zeros.
        """
        beside = {name: jnp.zeros((*x_BSD.shape[:-1], size), x_BSD.dtype) for name, size in self.sizes.items()}
        if norm_P is not None:
            norm_BSP = jnp.broadcast_to(norm_P, beside[NORM].shape)
            token_BSn = in_channels(tokens_BS, x_BSD.dtype)
            beside |= {EMBEDDING: x_BSD, NORM: norm_BSP, TOKEN: token_BSn}
        return self.joined(x_BSD, beside)


def in_channels(tokens_BS: jax.Array, dtype) -> jax.Array:
    """Writes ids below 2^24 as bytes `[B, S, TOKEN_CHANNELS]`, the lowest first."""
    in_bytes = [(tokens_BS >> 8 * i) & 255 for i in range(BYTES)]
    zeros = [jnp.zeros_like(tokens_BS)] * (TOKEN_CHANNELS - BYTES)
    return jnp.stack([*in_bytes, *zeros], axis=-1).astype(dtype)


def tokens_in(token_BSn: jax.Array) -> jax.Array:
    """Reads the ids, int32 `[B, S]`: the reverse of `in_channels`."""
    in_bytes = token_BSn[..., :BYTES].astype(jnp.int32)
    return functools.reduce(jnp.bitwise_or, [in_bytes[..., i] << 8 * i for i in range(BYTES)])
