"""Adapters beside the float8 products of a block that is written out (models/decoder_fp8.py).

    y = x8 w8^T + scale (x a^T) b^T

The adapters' products read x before it is rounded to float8, and have operands in the adapters' dtype. Their backward
pass is reverse mode, which computes x a^T again: nothing of an adapter is saved.

In a tensor-parallel group only numbers between a and b are sent, `rank` of each token. If the group divides the outputs
of w (column products: wq, wk, wv, w_gate, w_up), x a^T is gathered, and every device has its rows of b. If it divides
the inputs (row products: wo, w_down), x a^T is a term of a sum, which is reduce-scattered.

Shape suffixes: N tokens (B x S), n this device's part of them, i inputs, o outputs, r rank.
"""

from typing import Any, NamedTuple

import jax

from surojax.models.layers import ADAPTER
from surojax.models.linear import times
from surojax.models.lora import Lora
from surojax.parallel.tensor import all_gather_alike, reduce_scatter_tokens

OF_ROWS = ("wo", "w_down")  # matrices whose inputs a tensor-parallel group divides


class Branches(NamedTuple):
    """The adapters of a module of a block.

    lora: None if there are none. module: weights of the module by name, its adapters among them. sequences: B.
    """

    lora: Lora | None
    module: dict
    sequences: int

    def has(self, matrix: str) -> bool:
        """True if this matrix has an adapter."""
        return self.lora is not None and matrix + ADAPTER in self.module

    def has_any(self, *matrices: str) -> bool:
        """True if one of these matrices has an adapter."""
        return any(map(self.has, matrices))

    def added(self, y: jax.Array, matrix: str, x: jax.Array | None) -> jax.Array:
        """y plus the product of x, the matrix' input, with the matrix' adapter; y without an adapter."""
        if not self.has(matrix):
            return y
        return y + self._product(matrix, self.module[matrix + ADAPTER], x).astype(y.dtype)

    def backward(self, matrix: str, x: jax.Array | None, dy: jax.Array, *, plus: Any = None) -> tuple[dict, Any]:
        """(gradients of the adapter of a matrix, plus + the gradient of its input): ({}, plus) if it has none.

        x: its input, in the dtype of dy, the gradient of its result. plus: an array like x; None: zeros.
        """
        if not self.has(matrix):
            return {}, plus

        def branch(adapter, x):
            return self._product(matrix, adapter, x).astype(dy.dtype)

        _, vjp = jax.vjp(branch, self.module[matrix + ADAPTER], x)
        d_adapter, dx = vjp(dy)
        return {matrix + ADAPTER: d_adapter}, dx if plus is None else plus + dx

    def _product(self, matrix: str, adapter: dict, x) -> jax.Array:
        """scale (x a^T) b^T: `[n, i]` -> `[N, o]` of column products, `[N, i]` -> `[n, o]` of row products."""
        assert self.lora is not None
        low = times(x.astype(adapter["a"].dtype), adapter["a"])
        gathered = reduce_scatter_tokens if matrix in OF_ROWS else all_gather_alike
        return self.lora.scale * times(gathered(low, self.sequences), adapter["b"])
