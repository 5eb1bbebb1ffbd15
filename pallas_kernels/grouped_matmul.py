"""Products of rows with the matrix of their own expert: a grouped matrix product, and its two gradients.

Rows are in tiles of ROWS, each of one expert, and the experts of the tiles never decrease. So a program reads which
expert its tile has, and multiplies with that expert's matrix where it lies: nothing is copied, and no product is of a
matrix that no row needs.

    y[r] = x[r] w[e]^T                     a program for a tile of rows and one of columns
    dx[r] = dy[r] w[e]                     the same product, with the matrices transposed
    dw[e] = sum over its rows of dy^T x    a program for a tile of an expert's matrix goes through its rows

Operands have 16 bits; or, since sm_89, 8 bits and a scale for each expert: e4m3, and e5m2 for gradients of results.
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
from pallas_kernels.mma import FLOAT8, ROWS, WITHOUT_BARRIERS, Products
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
    in_float8 = jnp.dtype(dtype) in FLOAT8
    multiple = 32 if in_float8 else 16
    served = in_float8 or jnp.dtype(dtype) in DTYPES
    return served and inputs % multiple == outputs % multiple == 0 and min(inputs, outputs) >= ROWS


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


def _product_mosaic(x_RK, w_ENK, expert_T, interpret: bool, scale_T=None, dtype=None) -> jax.Array:
    """x[r] w[e]^T `[R, N]`, times the tiles' scales if there are any. dtype: of the result, x's if None."""
    (R, K), N = x_RK.shape, w_ENK.shape[1]
    width, depth = _width(N), _depth(K, x_RK.dtype)
    products = Products(x_RK.dtype, interpret, w_ENK.dtype)

    def kernel(x_ref, w_ref, expert_ref, *refs):
        *scale_refs, y_ref = refs
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
        for scale_ref in scale_refs:
            total = total * scale_ref[tile]
        tiles.store(y_ref, (rows, columns), total.astype(y_ref.dtype))

    out = jax.ShapeDtypeStruct((R, N), dtype or x_RK.dtype)
    operands = (x_RK, w_ENK, expert_T, *([] if scale_T is None else [scale_T]))
    return _launch(kernel, operands, out, (pl.cdiv(N, width), R // ROWS), interpret)


def _sums_mosaic(dy_NR, x_KR, expert_T, experts: int, interpret: bool, scale_E=None, dtype=None) -> jax.Array:
    """dy x^T over the rows of each expert, `[E, N, K]`, times the experts' scales if there are any.

    dtype: of the result, x's if None.
    """
    N, K = len(dy_NR), len(x_KR)
    width, depth = _width(K), _depth(ROWS, x_KR.dtype)
    products = Products(dy_NR.dtype, interpret, x_KR.dtype)
    number_E1 = jnp.arange(experts, dtype=i32)[:, None]
    first_E = jnp.sum(expert_T[None, :] < number_E1, axis=1, dtype=i32)  # the first tile of each expert
    end_E = jnp.sum(expert_T[None, :] <= number_E1, axis=1, dtype=i32)  # the tile behind its last one

    def kernel(dy_ref, x_ref, first_ref, end_ref, *refs):
        *scale_refs, dw_ref = refs
        expert = jax.lax.axis_index("expert")
        _, outputs = tiles.tile_at(jax.lax.axis_index("rows"), ROWS, N)
        _, inputs = tiles.tile_at(jax.lax.axis_index("columns"), width, K)

        def step(i, total):
            rows = pl.ds(i * depth, depth)
            return products.plus(total, products.rows(dy_ref, (outputs, rows)), products.columns(x_ref, (inputs, rows)))

        each = ROWS // depth
        start, stop = first_ref[expert] * each, end_ref[expert] * each
        total = jax.lax.fori_loop(start, stop, step, products.filled(0, ROWS, width))
        for scale_ref in scale_refs:
            total = total * scale_ref[expert]
        tiles.store(dw_ref, (expert, outputs, inputs), total.astype(dw_ref.dtype))

    out = jax.ShapeDtypeStruct((experts, N, K), dtype or x_KR.dtype)
    grid = pl.cdiv(K, width), pl.cdiv(N, ROWS), experts
    operands = (dy_NR, x_KR, first_E, end_E, *([] if scale_E is None else [scale_E]))
    return _launch(kernel, operands, out, grid, interpret)


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
    _check_product(op, x, w, experts)
    expect(w.dtype == x.dtype, op, "dtype of w", x.dtype, w.dtype)
    _, N, K = w.shape
    expected = f"expected 16-bit matrices of multiples of 16, at least {ROWS}"
    if dispatch.runs_kernel(op, implementation, fits(x.dtype, K, N), expected, f"{x.dtype} {(N, K)}"):
        return _grouped_matmul(x, w, experts, interpret)
    return reference(x, w, experts)


def _check_product(op: str, x: jax.Array, w: jax.Array, experts: jax.Array) -> None:
    """Raises ValueError unless x is `[R, K]` in tiles of ROWS rows, w `[E, N, K]`, and each tile has an expert."""
    expect(
        x.ndim == 2 and len(x) > 0 and len(x) % ROWS == 0, op, "x", f"[R, K], R a multiple of {ROWS}, not 0", x.shape
    )
    expect(w.ndim == 3 and w.shape[2] == x.shape[1], op, "w", ("E", "N", x.shape[1]), w.shape)
    _check_experts(op, len(x), experts)


def _check_experts(op: str, rows: int, experts: jax.Array) -> None:
    """Raises ValueError unless each tile of so many rows has an expert."""
    shaped = experts.shape == (rows // ROWS,) and experts.dtype == i32
    expect(shaped, op, "experts", f"int32 {(rows // ROWS,)}", f"{experts.dtype} {experts.shape}")


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _grouped_matmul(x_RK, w_ENK, expert_T, interpret: bool):
    return _product_mosaic(x_RK, w_ENK, expert_T, interpret)


def _backward(interpret: bool, saved, dy_RN):
    x_RK, w_ENK, expert_T = saved
    dx_RK = _product_mosaic(dy_RN, w_ENK.swapaxes(1, 2), expert_T, interpret)
    return dx_RK, _sums_mosaic(dy_RN.T, x_RK.T, expert_T, len(w_ENK), interpret), None


_grouped_matmul.defvjp(lambda x, w, experts, how: (_grouped_matmul(x, w, experts, how), (x, w, experts)), _backward)


def scaled_product(
    x: Float[Array, "R K"],
    w: Float[Array, "E N K"],
    experts: Int[Array, " T"],
    scales: Float[Array, " T"],
    *,
    dtype,
    implementation: Implementation = None,
    interpret: bool = False,
) -> Float[Array, "R N"]:
    """x w[e]^T of float8 operands, times the scale of the row's tile; `[R, N]` in `dtype`. Not differentiable.

    experts: see `grouped_matmul`. scales: float32, the product of what the tile's rows and its expert's matrix were
    divided by. Raises ValueError for other shapes and dtypes, and dispatch.Unserved as `grouped_matmul` does: float8
    matrices are multiples of 32.
    """
    op = "scaled_product"
    _check_product(op, x, w, experts)
    expect(scales.shape == experts.shape, op, "scales", experts.shape, scales.shape)
    if _multiplies_float8(op, x, w, w.shape[1:], implementation):
        return _product_mosaic(x, w, experts, interpret, scales, dtype)
    return (reference(x.astype(f32), w.astype(f32), experts) * jnp.repeat(scales, ROWS)[:, None]).astype(dtype)


def scaled_sums(
    dy: Float[Array, "N R"],
    x: Float[Array, "K R"],
    experts: Int[Array, " T"],
    scales: Float[Array, " E"],
    *,
    dtype,
    implementation: Implementation = None,
    interpret: bool = False,
) -> Float[Array, "E N K"]:
    """Sums of dy x^T of float8 operands over each expert's rows, times its scale; `[E, N, K]` in `dtype`.

    Not differentiable. experts: of each tile of ROWS rows, see `grouped_matmul`. scales: float32, the product of what
    an expert's rows of dy and of x were divided by. Raises as `scaled_product` does.
    """
    op = "scaled_sums"
    expect(dy.ndim == 2 and dy.shape[1] > 0 and dy.shape[1] % ROWS == 0, op, "dy", f"[N, R], R as {ROWS} n", dy.shape)
    expect(x.ndim == 2 and x.shape[1] == dy.shape[1], op, "x", ("K", dy.shape[1]), x.shape)
    _check_experts(op, dy.shape[1], experts)
    if _multiplies_float8(op, dy, x, (len(dy), len(x)), implementation):
        return _sums_mosaic(dy, x, experts, len(scales), interpret, scales, dtype)
    w_ENK = jnp.zeros((len(scales), len(dy), len(x)), f32)
    _, vjp = jax.vjp(lambda w: reference(x.T.astype(f32), w, experts), w_ENK)
    return (vjp(dy.T.astype(f32))[0] * scales[:, None, None]).astype(dtype)


def _multiplies_float8(
    op: str, left: jax.Array, right: jax.Array, matrix: tuple[int, ...], implementation: Implementation
) -> bool:
    """True if the kernel runs. matrix: (outputs, inputs). Raises ValueError for operands that are not float8."""
    for name, x in (("left", left), ("right", right)):
        expect(
            jnp.dtype(x.dtype) in FLOAT8, op, f"dtype of the {name} operand", "float8_e4m3fn or float8_e5m2", x.dtype
        )
    outputs, inputs = matrix
    expected = f"expected float8 matrices of multiples of 32, at least {ROWS}"
    return dispatch.runs_kernel(op, implementation, fits(left.dtype, inputs, outputs), expected, matrix)


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
    e4m3 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float8_e4m3fn)
    e5m2 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float8_e5m2)

    def in_float8(x_RK, w_ENK, **how):
        ones = jnp.ones(R // ROWS, f32)
        return scaled_product(x_RK, w_ENK, evenly(), ones, dtype=jnp.bfloat16, **how)

    def gradient_in_float8(dy_NR, x_KR, **how):
        return scaled_sums(dy_NR, x_KR, evenly(), jnp.ones(E, f32), dtype=jnp.bfloat16, **how)

    in_8_bits = R * K + E * N * K + R * N
    return [
        Case("product", product, (half((R, K)), half((E, N, K))), moved),
        Case("gradient", gradient, (half((N, R)), half((K, R))), moved),
        Case("float8", in_float8, (e4m3((R, K)), e4m3((E, N, K))), in_8_bits + R * N),
        Case("float8 e5m2", in_float8, (e5m2((R, K)), e4m3((E, N, K))), in_8_bits + R * N),
        Case("float8 gradient", gradient_in_float8, (e5m2((N, R)), e4m3((K, R))), in_8_bits + E * N * K),
    ]
