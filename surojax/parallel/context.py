"""Context parallelism: every sequence is divided over the devices of `cp`, and so are all activations of a block.

Products with weights, norms and the loss treat tokens one by one, so only attention communicates. Three methods:

* ulysses (Jacobs et al. 2023, arXiv:2309.14509): each device has consecutive tokens. One all-to-all gives it whole
  sequences of a part of the heads, attention is as on one device, and one all-to-all gives it its tokens back.
* allgather (Grattafiori et al. 2024, Llama 3, section 3.3.2): keys and values are gathered, queries stay.
* ring (Liu et al. 2023, arXiv:2310.01889): queries stay, keys and values go from device to device
  (models/ring_attention.py).

A token attends to those before it, so with consecutive tokens the last device of allgather and ring would have almost
twice the work of the mean. Their sequences are therefore cut into 2n pieces, of which device i of n has numbers i and
2n - 1 - i (zig-zag order). The order is that of a step's activations only: batches, labels and the starts of documents
come in the order of the text. With `sequence_chunks` each chunk is cut so, instead of the sequence.

Outside of a mesh with this axis nothing is communicated. Shape suffixes: B batch, S sequence, s this device's tokens of
it, H query heads, K key/value heads, h head dimension, n devices.
"""

import itertools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from surojax.parallel.collectives import active, device_number
from surojax.placement.mesh import CONTEXT

Method = Literal["ulysses", "allgather", "ring"]
METHODS: tuple[Method, ...] = ("ulysses", "allgather", "ring")


def is_divided() -> bool:
    """True if each device has a part of every sequence."""
    return bool(active(CONTEXT))


def pieces_per_device(method: Method) -> int:
    """Number of pieces of consecutive tokens that a device has of each sequence."""
    return 1 if method == "ulysses" else 2


def own_tokens(x_BS: jax.Array, method: Method) -> jax.Array:
    """The columns `[B, s]` of this device's tokens, of an array that all devices have."""
    number, devices = device_number(CONTEXT)
    if devices == 1:
        return x_BS
    if pieces_per_device(method) == 1:
        return _piece(x_BS, number, devices)
    mirrored = 2 * devices - 1 - number
    return jnp.concatenate([_piece(x_BS, number, 2 * devices), _piece(x_BS, mirrored, 2 * devices)], axis=1)


def _piece(x_BS: jax.Array, number: jax.Array | int, count: int) -> jax.Array:
    """A piece of consecutive columns, of `count` pieces."""
    length = x_BS.shape[1] // count
    return jax.lax.dynamic_slice_in_dim(x_BS, number * length, length, 1)


def of_each_chunk(part: Callable, x_BS: jax.Array, chunks: int) -> jax.Array:
    """Applies `part`, which selects columns of a chunk of the sequence, to each of several equal chunks."""
    if chunks == 1:
        return part(x_BS)
    rows, length, *width = x_BS.shape
    columns = part(x_BS.reshape(rows * chunks, length // chunks, *width))  # a chunk's columns are one row
    return columns.reshape(rows, -1, *width)


def own_index(tokens: int, method: Method) -> jax.Array:
    """The indices in their sequence, or in their chunk, int32 `[s]`, of this device's tokens. tokens: s."""
    _, devices = device_number(CONTEXT)
    return own_tokens(jnp.arange(tokens * devices, dtype=jnp.int32)[None, :], method)[0]


def scatter_heads(*xs_BsHh: jax.Array) -> list[jax.Array]:
    """All-to-all from tokens to heads: whole sequences of this device's heads, `[B, S, H / n, h]`; ulysses.

    With fewer key/value heads than devices, several devices get the same one: it is sent to each of them, and reverse
    mode adds up the gradients that come back.
    """
    _, devices = device_number(CONTEXT)

    def for_each_device(x_BsHh: jax.Array) -> jax.Array:
        """`[B, s, n, H / n, h]`."""
        B, s, H, h = x_BsHh.shape
        x_BsHh = x_BsHh if devices <= H else jnp.repeat(x_BsHh, devices // H, axis=2)
        return x_BsHh.reshape(B, s, devices, -1, h)

    parts = [for_each_device(x) for x in xs_BsHh]
    ends = list(itertools.accumulate(part.shape[3] for part in parts[:-1]))
    joined = jnp.concatenate(parts, axis=3)  # one collective for all
    whole = jax.lax.all_to_all(joined, CONTEXT, split_axis=2, concat_axis=1, tiled=True)[:, :, 0]
    return jnp.split(whole, ends, axis=2)


def own_heads(x_H: jax.Array) -> jax.Array:
    """Slices an array with as many rows for each head to the heads that `scatter_heads` gives this device; ulysses."""
    number, devices = device_number(CONTEXT)
    length = x_H.shape[0] // devices
    return jax.lax.dynamic_slice_in_dim(x_H, number * length, length)


def gather_tokens(x_Bs: jax.Array) -> jax.Array:
    """All-gathers arrays `[B, s, ...]` of consecutive tokens to those of whole sequences, on every device; ulysses."""
    return jax.lax.all_gather(x_Bs, CONTEXT, axis=1, tiled=True)


def gather_heads(y_BSHh: jax.Array) -> jax.Array:
    """All-to-all back from heads to tokens: all heads of this device's tokens, `[B, s, H, h]`; ulysses."""
    return jax.lax.all_to_all(y_BSHh, CONTEXT, split_axis=1, concat_axis=2, tiled=True)


def device() -> tuple[jax.Array | int, int]:
    """(index of this device in its context-parallel group, number of devices in the group)."""
    return device_number(CONTEXT)


def all_gather(x: jax.Array) -> jax.Array:
    """The arrays of all devices, `[n, ...]`; allgather."""
    return jax.lax.all_gather(x, CONTEXT)


def of_device(x: jax.Array, number: jax.Array | int) -> jax.Array:
    """The array of one device, from what `all_gather` returns."""
    return jax.lax.dynamic_index_in_dim(x, number, keepdims=False)


def all_pieces(x_pX: jax.Array, method: Method) -> jax.Array:
    """All-gathers the arrays of all pieces, in the order of the text. x_pX: of this device's pieces."""
    _, devices = device_number(CONTEXT)
    if devices == 1:
        return x_pX
    gathered = all_gather(x_pX)
    if pieces_per_device(method) == 1:
        return gathered[:, 0]
    return jnp.concatenate([gathered[:, 0], gathered[::-1, 1]])


def own_pieces(method: Method) -> list[jax.Array | int]:
    """The numbers of this device's pieces in the order of the text."""
    number, devices = device_number(CONTEXT)
    return [number] if devices == 1 or pieces_per_device(method) == 1 else [number, 2 * devices - 1 - number]


def to_next_device(x: jax.Array) -> jax.Array:
    """The array of the device before this one: every device sends its array to the next one; ring."""
    _, devices = device()
    pairs = [(i, (i + 1) % devices) for i in range(devices)]
    return jax.lax.ppermute(x, CONTEXT, pairs)


class Collected:
    """A sum over devices for each device's array: device i adds to its own, then, hop by hop, to the arrays of devices
    i - 1, i - 2 and so on.

    ring: a sum travels with the block that it belongs to, while the next device computes what it adds. allgather: all
    terms are kept and reduce-scattered at the end.
    """

    def __init__(self, own: jax.Array, method: Method):
        self.method = method
        self.terms = [own]

    def add(self, term: jax.Array) -> None:
        """Adds to the sum of the device of this hop."""
        if self.method == "ring":
            self.terms = [to_next_device(self.terms[0]) + term]
        else:
            self.terms.append(term)

    def sums(self, dtype) -> jax.Array:
        """This device's sum, rounded to a dtype; with ring it is rounded before the last hop."""
        if self.method == "ring":
            return to_next_device(self.terms[0].astype(dtype))
        number, devices = device()
        hops = (number - jnp.arange(devices)) % devices  # hop of each device
        terms = jnp.stack(self.terms)[hops]
        return jax.lax.psum_scatter(terms, CONTEXT, scatter_dimension=0, tiled=False).astype(dtype)
