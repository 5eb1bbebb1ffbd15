"""Expert parallelism: tokens go to the devices that have the experts they chose, and the experts' sums come back.

The devices of a group along `ep` have E / n experts each. A token is sent once to each device that has an expert it
chose, however many it chose there (DeepSeek-V3, arXiv:2412.19437, 3.2.2, does this by nodes), and each device returns
the weighted sum of its experts. What the routers chose and its weights are small, and every device gathers them from
all: so all know who sends what to whom, and no counts are exchanged.

No token is dropped, and shapes do not depend on choices. An all-to-all has room for an eighth of a device's tokens on
the way to each other device, and there are as many of them, one after another, as the longest of these ways needs: a
number that all devices of a group compute from the same choices, so that none waits for another in vain. If all tokens
go everywhere that is what an all-gather of them sends; the buffer that receives them has always the size for it, n N D.

The reverse of `dispatch` is `combine`, and the other way round: a gradient takes the way of its value back.

Shape suffixes: N tokens of a device, n devices of a group, k choices of a token, E experts, D hidden size, P tokens
that one device may send to one other, T = n P tokens that a device may receive.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.manual_axes import mark_varying, own_zeros, varying_axes
from surojax.parallel.collectives import active
from surojax.placement.mesh import EXPERT

ROUNDS = 8  # all-to-alls that send all tokens of a device everywhere
SCOPE = "tokens_to_experts"  # the named scope of their loop, by which the planner knows it


class Routes(NamedTuple):
    """Which devices of the group each token is sent to.

    sent_nP: the tokens of this device that each device needs, in order, and N or more behind the last.
    received_nP: the tokens of each device that this one needs, likewise. rounds: all-to-alls that send them, int32 [].
    """

    sent_nP: jax.Array
    received_nP: jax.Array
    rounds: jax.Array


def rows_of_round(tokens: int) -> int:
    """The tokens that an all-to-all takes from one device to one other."""
    return -(-tokens // ROUNDS)


def even_rounds(experts: int, chosen: int, devices: int, tokens: int) -> int:
    """The all-to-alls that send so many tokens of a device where they are needed, if they choose experts evenly."""
    own = experts // devices
    without = math.comb(experts - own, chosen) / math.comb(experts, chosen)  # of tokens, that a device does not need
    return math.ceil(tokens * (1 - without) / rows_of_round(tokens))


def in_group() -> bool:
    """True if devices share the experts."""
    return bool(active(EXPERT))


def gathered(x: jax.Array) -> jax.Array:
    """All-gathers an array over the group, `[n, ...]`."""
    return jax.lax.all_gather(x, EXPERT)


def routes(chosen_nNk: jax.Array, experts: int) -> Routes:
    """The routes of the tokens of a group. chosen_nNk: numbers of the experts that they chose, of so many."""
    n, N, _ = chosen_nNk.shape
    rows = rows_of_round(N)
    owner_nNk = chosen_nNk.astype(jnp.int32) // (experts // n)
    needed_nNn = jnp.any(jax.nn.one_hot(owner_nNk, n, dtype=bool), axis=2)  # by source, token, destination
    counts_nn = jnp.sum(needed_nNn, axis=1, dtype=jnp.int32)
    own = jax.lax.axis_index(EXPERT)
    sent_Nn = jax.lax.dynamic_index_in_dim(needed_nNn, own, 0, keepdims=False)
    received_nN = jax.lax.dynamic_index_in_dim(needed_nNn, own, 2, keepdims=False)
    listed = jax.vmap(functools.partial(_listed, places=-(-N // rows) * rows))
    return Routes(listed(sent_Nn.T), listed(received_nN), -(-jnp.max(counts_nn) // rows))


def _listed(needed_N: jax.Array, places: int) -> jax.Array:
    """The tokens that are needed, in order; N and numbers above it in the places that are left."""
    N = needed_N.size
    token_N = jnp.arange(N, dtype=jnp.int32)
    place_N = jnp.where(needed_N, jnp.cumsum(needed_N, dtype=jnp.int32) - 1, places + token_N)
    none_P = mark_varying(N + jnp.arange(places, dtype=jnp.int32), varying_axes(needed_N))
    return none_P.at[place_N].set(token_N, mode="drop", unique_indices=True)


def received(values_nNk: jax.Array, way: Routes, nothing) -> jax.Array:
    """`[T, k]`: values of the tokens of a group in the order of the received ones; `nothing` in the places left."""

    def take(x_Nk: jax.Array, token_P: jax.Array) -> jax.Array:
        return x_Nk.at[token_P].get(mode="fill", fill_value=nothing, unique_indices=True)

    return jax.vmap(take)(values_nNk, way.received_nP).reshape(-1, values_nNk.shape[-1])


@jax.custom_vjp
def dispatch(x_ND: jax.Array, way: Routes) -> jax.Array:
    """`[T, D]`: the tokens of the group that this device needs; zeros in the places that are left."""
    rows = rows_of_round(len(x_ND))
    n, P = way.sent_nP.shape

    def exchange(i: jax.Array, x_nPD: jax.Array) -> jax.Array:
        token_nR = jax.lax.dynamic_slice_in_dim(way.sent_nP, i * rows, rows, 1)
        arrived_nRD = _all_to_all(x_ND.at[token_nR].get(mode="fill", fill_value=0))
        return jax.lax.dynamic_update_slice_in_dim(x_nPD, arrived_nRD, i * rows, 1)

    return _in_rounds(way, exchange, _zeros((n, P, x_ND.shape[1]), x_ND.dtype, x_ND)).reshape(n * P, -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def combine(tokens: int, y_TD: jax.Array, way: Routes) -> jax.Array:
    """`[N, D]`: for each of this device's tokens the sum of its rows on all devices, added in float32."""
    rows = rows_of_round(tokens)
    n, P = way.sent_nP.shape
    y_nPD = y_TD.reshape(n, P, -1)

    def exchange(i: jax.Array, sum_ND: jax.Array) -> jax.Array:
        arrived_nRD = _all_to_all(jax.lax.dynamic_slice_in_dim(y_nPD, i * rows, rows, 1))
        token_nR = jax.lax.dynamic_slice_in_dim(way.sent_nP, i * rows, rows, 1)
        for token_R, arrived_RD in zip(token_nR, arrived_nRD, strict=True):  # in which no token is twice
            sum_ND = sum_ND.at[token_R].add(arrived_RD, mode="drop", unique_indices=True)
        return sum_ND

    zeros = _zeros((tokens, y_TD.shape[1]), jnp.float32, y_TD)
    return _in_rounds(way, exchange, zeros).astype(y_TD.dtype)


def _in_rounds(way: Routes, exchange: Callable, carry: jax.Array) -> jax.Array:
    """carry = exchange(round, carry) for each round: a loop whose length the choices decide."""
    with jax.named_scope(SCOPE):
        return jax.lax.fori_loop(0, way.rounds, exchange, carry)


def _all_to_all(x_nRD: jax.Array) -> jax.Array:
    return jax.lax.all_to_all(x_nRD, EXPERT, split_axis=0, concat_axis=0, tiled=True)


def _zeros(shape: tuple[int, ...], dtype, after: jax.Array) -> jax.Array:
    return own_zeros(shape, dtype, after, varying_axes(after))


dispatch.defvjp(
    lambda x_ND, way: (dispatch(x_ND, way), (way, len(x_ND))),
    lambda saved, dx_TD: (combine(saved[1], dx_TD, saved[0]), None),
)
combine.defvjp(
    lambda tokens, y_TD, way: (combine(tokens, y_TD, way), way),
    lambda tokens, way, dy_ND: (dispatch(dy_ND, way), None),
)
