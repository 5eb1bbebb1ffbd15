"""This device's tokens of each sequence as rows of consecutive tokens, for mixers that compute one after another.

Over the devices of `cp` a device has one piece of consecutive tokens of each sequence, or two in zig-zag order
(parallel/context.py). For a convolution and for a recurrence each piece is a row of its own, which goes on from the
state that the piece before it leaves, on whatever device that is. Without `cp` a row is one piece.

Shape suffixes: B batch, s this device's tokens of a sequence or of a chunk of it, N rows of pieces: B times the pieces
of a device, t tokens of a piece, P earlier tokens that a convolution reads, C channels.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from surojax.parallel import context
from surojax.parallel.context import Method


class RowPieces(NamedTuple):
    """This device's pieces of the sequences. method: of `cp`. first: position in its row of the first token of all."""

    method: Method
    first: jax.Array | int

    @property
    def per_row(self) -> int:
        """The number of pieces that this device has of a row."""
        return len(context.own_pieces(self.method))

    def split(self, x_Bs: jax.Array) -> jax.Array:
        """Splits tokens `[B, s, ...]` into `[N, t, ...]`."""
        B, s = x_Bs.shape[:2]
        return x_Bs.reshape(B * self.per_row, s // self.per_row, *x_Bs.shape[2:])

    def join(self, x_Nt: jax.Array) -> jax.Array:
        """Joins pieces to `[B, s, ...]`: the reverse of `split`."""
        N, t = x_Nt.shape[:2]
        return x_Nt.reshape(N // self.per_row, t * self.per_row, *x_Nt.shape[2:])

    def starts(self, starts_BS: jax.Array | None) -> jax.Array | None:
        """Returns document starts `[N, t]`, counted from the first token of each piece: negative if before it.

        starts_BS: positions, of the tokens of all devices.
        """
        if starts_BS is None:
            return None
        starts_Bs = context.own_tokens(starts_BS, self.method)
        B, s = starts_Bs.shape
        first_p = context.own_index(s, self.method)[:: s // self.per_row]
        return self.split(starts_Bs) - (self.first + jnp.tile(first_p, B))[:, None]

    def by_text(self, x_N: jax.Array) -> jax.Array:
        """Gathers the arrays of all pieces in the order of the text: `[N, ...]` -> `[pieces of a row, B, ...]`."""
        x_Bp = x_N.reshape(len(x_N) // self.per_row, self.per_row, *x_N.shape[1:])
        return context.all_pieces(jnp.moveaxis(x_Bp, 1, 0), self.method)

    def own(self, x_mB: jax.Array) -> jax.Array:
        """Selects the arrays of this device's pieces: the reverse of `by_text`."""
        own = [context.of_device(x_mB, number) for number in context.own_pieces(self.method)]
        return jnp.stack(own, axis=1).reshape(-1, *x_mB.shape[2:])

    def halo(
        self, tails_NuC: jax.Array, earlier: int, before_BPC: jax.Array | None
    ) -> tuple[jax.Array | None, jax.Array]:
        """Returns (the P inputs before each piece `[N, P, C]`, the latest P of all tokens `[B, P, C]`).

        tails: the latest inputs of each piece, P of them, or all of a shorter piece. earlier: P. before: those before
        all tokens; None: zeros, and so is the first result if there is one piece.
        """
        N, u, C = tails_NuC.shape
        is_first = before_BPC is None and not context.is_divided()
        if before_BPC is None:
            before_BPC = jnp.zeros((N // self.per_row, earlier, C), tails_NuC.dtype)
        later_BTC = jnp.moveaxis(self.by_text(tails_NuC), 0, 1).reshape(len(before_BPC), -1, C)
        all_BTC = jnp.concatenate([before_BPC, later_BTC], axis=1)
        latest_BPC = all_BTC[:, later_BTC.shape[1] :]
        if is_first:
            return None, latest_BPC
        numbers = context.own_pieces(self.method)
        own = [jax.lax.dynamic_slice_in_dim(all_BTC, number * u, earlier, 1) for number in numbers]
        return jnp.stack(own, axis=1).reshape(N, earlier, C), latest_BPC
