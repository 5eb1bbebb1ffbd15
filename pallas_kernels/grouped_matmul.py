"""Products of rows with the matrix of their own expert: a grouped matrix product, and its two gradients.

Rows are in tiles of ROWS, each of one expert, and the experts of the tiles never decrease. So a program reads which
expert its tile has, and multiplies with that expert's matrix where it lies: nothing is copied, and no product is of a
matrix that no row needs.

    y[r] = x[r] w[e]^T                     a program for a tile of rows and one of columns
    dx[r] = dy[r] w[e]                     the same product, with the matrices transposed
    dw[e] = sum over its rows of dy^T x    a program for a tile of an expert's matrix goes through its rows

An expert without rows has a gradient of zeros. Products are summed in float32. Operands are transposed by XLA where the
sum is over rows (mma.py). MegaBlocks (Gale et al. 2022, arXiv:2211.15841) divides the work alike.

Shape suffixes: R rows, T tiles of ROWS rows, E experts, N outputs, K inputs.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import dispatch, tiles
from pallas_kernels.dispatch import Implementation, expect
from pallas_kernels.mma import ROWS, WITHOUT_BARRIERS, Products
from pallas_kernels.shapes import Case, Sizes

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

f32 = jnp.float32
i32 = jnp.int32
DTYPES = (jnp.bfloat16, jnp.float16)
COLUMNS = 128  # of a tile at most: 64 sums in each thread
DEPTH = 64  # bytes of a row that are multiplied at a time: whole sectors of memory
LEAST = 8  # columns that an instruction multiplies with


def fits(dtype, inputs: int, outputs: int) -> bool:
    """True if the kernels take matrices `[outputs, inputs]` of this dtype, for the product and both gradients."""
    return jnp.dtype(dtype) in DTYPES and inputs % 16 == outputs % 16 == 0 and min(inputs, outputs) >= ROWS


def _width(columns: int) -> int:
    """The columns of a tile."""
    return next(size for size in (COLUMNS, 64, 32, 16, LEAST) if size <= columns)


def _depth(summed: int, dtype) -> int:
    """The length that is multiplied at a time, of a sum over so many elements."""
    return math.gcd(summed, DEPTH // jnp.dtype(dtype).itemsize)


def _launch(kernel, operands, out, grid, interpret: bool) -> Any:
    names = ("columns", "rows", "expert")[: len(grid)]
    return dispatch.launch(
        kernel,
        operands,
        op="grouped_matmul",
        out=out,
        grid=grid,
        names=names,
        interpret=interpret,
        compiler_params=WITHOUT_BARRIERS,
    )


def _product_mosaic(x_RK, w_ENK, expert_T, interpret: bool) -> jax.Array:
    """x[r] w[e]^T `[R, N]`."""
    (R, K), N = x_RK.shape, w_ENK.shape[1]
    width, depth = _width(N), _depth(K, x_RK.dtype)
    products = Products(x_RK.dtype, interpret)

    def kernel(x_ref, w_ref, expert_ref, y_ref):
        tile = jax.lax.axis_index("rows")
        _, columns = tiles.tile_at(jax.lax.axis_index("columns"), width, N)
        rows = pl.ds(tile * ROWS, ROWS)
        expert = expert_ref[tile]

        def step(i, total):
            inputs = pl.ds(i * depth, depth)
            return products.plus(
                total, products.rows(x_ref, (rows, inputs)), products.columns(w_ref, (expert, columns, inputs))
            )

        total = jax.lax.fori_loop(0, K // depth, step, products.filled(0, ROWS, width))
        tiles.store(y_ref, (rows, columns), total.astype(y_ref.dtype))

    out = jax.ShapeDtypeStruct((R, N), x_RK.dtype)
    return _launch(kernel, (x_RK, w_ENK, expert_T), out, (pl.cdiv(N, width), R // ROWS), interpret)


def _sums_mosaic(dy_NR, x_KR, expert_T, experts: int, interpret: bool) -> jax.Array:
    """dy x^T over the rows of each expert, `[E, N, K]`."""
    N, K = len(dy_NR), len(x_KR)
    width, depth = _width(K), _depth(ROWS, x_KR.dtype)
    products = Products(x_KR.dtype, interpret)
    number_E1 = jnp.arange(experts, dtype=i32)[:, None]
    first_E = jnp.sum(expert_T[None, :] < number_E1, axis=1, dtype=i32)  # the first tile of each expert
    end_E = jnp.sum(expert_T[None, :] <= number_E1, axis=1, dtype=i32)  # the tile behind its last one

    def kernel(dy_ref, x_ref, first_ref, end_ref, dw_ref):
        expert = jax.lax.axis_index("expert")
        _, outputs = tiles.tile_at(jax.lax.axis_index("rows"), ROWS, N)
        _, inputs = tiles.tile_at(jax.lax.axis_index("columns"), width, K)

        def step(i, total):
            rows = pl.ds(i * depth, depth)
            return products.plus(total, products.rows(dy_ref, (outputs, rows)), products.columns(x_ref, (inputs, rows)))

        each = ROWS // depth
        start, stop = first_ref[expert] * each, end_ref[expert] * each
        total = jax.lax.fori_loop(start, stop, step, products.filled(0, ROWS, width))
        tiles.store(dw_ref, (expert, outputs, inputs), total.astype(dw_ref.dtype))

    out = jax.ShapeDtypeStruct((experts, N, K), x_KR.dtype)
    grid = pl.cdiv(K, width), pl.cdiv(N, ROWS), experts
    return _launch(kernel, (dy_NR, x_KR, first_E, end_E), out, grid, interpret)


def reference(x_RK, w_ENK, expert_T) -> jax.Array:
    """Returns x[r] w[e]^T `[R, N]` by `jax.lax.ragged_dot`: on CUDA all rows times all experts (jax 0.12)."""
    rows_E = ROWS * jnp.sum(jax.nn.one_hot(expert_T, len(w_ENK), dtype=i32), axis=0)
    y_RN = jax.lax.ragged_dot(x_RK, w_ENK.swapaxes(1, 2), rows_E, preferred_element_type=f32)
    return y_RN.astype(x_RK.dtype)


# --- public -----------------------------------------------------------------------------------------------------------


def grouped_matmul(
    x: Float[Array, "R K"],
    w: Float[Array, "E N K"],
    experts: Int[Array, " T"],
    *,
    implementation: Implementation = None,
    interpret: bool = False,
) -> Float[Array, "R N"]:
    """x w[e]^T for rows in tiles of ROWS, each of one expert e; differentiable in x and w.

    experts: int32, of each tile, not decreasing. Raises ValueError for other shapes and dtypes, and dispatch.Unserved
    if implementation="mosaic" and the kernels do not take the matrices: 16-bit, inputs and outputs multiples of 16 and
    at least ROWS.
    """
    op = "grouped_matmul"
    expect(
        x.ndim == 2 and len(x) > 0 and len(x) % ROWS == 0, op, "x", f"[R, K], R a multiple of {ROWS}, not 0", x.shape
    )
    expect(w.ndim == 3 and w.shape[2] == x.shape[1], op, "w", ("E", "N", x.shape[1]), w.shape)
    expect(w.dtype == x.dtype, op, "dtype of w", x.dtype, w.dtype)
    shaped = experts.shape == (len(x) // ROWS,) and experts.dtype == i32
    expect(shaped, op, "experts", f"int32 {(len(x) // ROWS,)}", f"{experts.dtype} {experts.shape}")
    _, N, K = w.shape
    expected = f"expected 16-bit matrices of multiples of 16, at least {ROWS}"
    if dispatch.runs_kernel(op, implementation, fits(x.dtype, K, N), expected, f"{x.dtype} {(N, K)}"):
        return _grouped_matmul(x, w, experts, interpret)
    return reference(x, w, experts)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _grouped_matmul(x_RK, w_ENK, expert_T, interpret: bool):
    return _product_mosaic(x_RK, w_ENK, expert_T, interpret)


def _backward(interpret: bool, saved, dy_RN):
    x_RK, w_ENK, expert_T = saved
    dx_RK = _product_mosaic(dy_RN, w_ENK.swapaxes(1, 2), expert_T, interpret)
    return dx_RK, _sums_mosaic(dy_RN.T, x_RK.T, expert_T, len(w_ENK), interpret), None


_grouped_matmul.defvjp(lambda x, w, experts, how: (_grouped_matmul(x, w, experts, how), (x, w, experts)), _backward)


def cases(sizes: Sizes, tokens: int) -> list[Case]:
    """The product and the gradient of its matrices for 16 experts of an eighth of the MLP's width, 2 for each token."""
    E, R, K, N = 16, 2 * tokens, sizes.hidden, sizes.intermediate // 8
    half = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)

    def evenly() -> jax.Array:
        return jnp.arange(R // ROWS, dtype=i32) * E // (R // ROWS)

    def product(x_RK, w_ENK, **how):
        return grouped_matmul(x_RK, w_ENK, evenly(), **how)

    def gradient(dy_NR, x_KR, *, implementation: Implementation, interpret: bool = False):
        if dispatch.choose("grouped_matmul", implementation) == "mosaic":
            return _sums_mosaic(dy_NR, x_KR, evenly(), E, interpret)
        w_ENK = jnp.zeros((E, N, K), x_KR.dtype)
        _, vjp = jax.vjp(lambda w: reference(x_KR.T, w, evenly()), w_ENK)
        return vjp(dy_NR.T)[0]

    moved = 2 * (R * K + E * N * K + R * N)
    return [
        Case("product", product, (half((R, K)), half((E, N, K))), moved),
        Case("gradient", gradient, (half((N, R)), half((K, R))), moved),
    ]
