"""Tokens and the experts that they chose: every choice is computed, none is dropped, in blocks of one expert each.

Choices are sorted by expert, the rows of each expert are padded to whole blocks, and a scan goes over the blocks with
one expert's matrices at a time. The number of blocks does not depend on what was chosen, so it is a shape. This is the
same program on every GPU and takes a few MiB; XLA's `ragged_dot` is a dense product with all experts on CUDA (jax 0.12:
8 GiB of temporaries at the sizes of Qwen3-30B-A3B).

The backward pass computes a block again from the token's activations and adds the gradients of an expert's matrices up
over its blocks in float32. An expert without a token has gradients of exactly zero. What weighs a choice belongs inside
`mlp`, before its last product: then the gradient of the weight needs no product of its own, and XLA leaves the last
product out when the block is computed again.

If devices share the experts (parallel/expert_dispatch.py), a device has room for the choices of all of them, and most
of its blocks have none. Then results are added up in place, block by block, and a loop over pieces of the blocks ends
with the last one that has a choice.

Shape suffixes: N tokens, k choices of a token, C = N k choices, E experts, M blocks, R rows of a block, D hidden size.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import grouped_matmul
from pallas_kernels.manual_axes import mark_varying, own_zeros, varying_axes
from surojax.numerics.fp8 import E4M3
from surojax.numerics.recipes import Precision

# Rows. A GPU copies an expert's matrices before a block multiplies them, so that larger blocks are faster, though more
# of their rows are empty: Qwen3-30B-A3B in NF4 on an RTX 4090, 16,384 tokens a step, with at most 128 rows 1,081
# tokens/s, 256: 1,315; in one microbatch 2,004 with 256 and 2,402 with 512 (predicted).
LARGEST_BLOCK = 512
IN_PIECES = "blocks_in_pieces"  # named scope of loops whose length the choices decide: the planner knows it by that


class ExpertBlocks(NamedTuple):
    """Choices (pairs of a token and an expert) sorted into blocks of one expert each. Choice c is of token c // k.

    choice_MR: the choice in each row, C in rows that pad a block. expert_M: of each block. place_Nk: the row of each
    choice, counted through all blocks.
    """

    choice_MR: jax.Array
    expert_M: jax.Array
    place_Nk: jax.Array


def rows_of_block(choices: int, experts: int) -> int:
    """Chooses the rows of a block: a power of two, at most `LARGEST_BLOCK`, near the average choices of an expert."""
    each = -(-choices // experts)
    return min(LARGEST_BLOCK, 1 << max(each - 1, 7).bit_length())


def number_of_blocks(choices: int, experts: int, rows: int) -> int:
    """The largest number of blocks that this many choices fill, however they are distributed over experts."""
    chosen = min(choices, experts)
    return (choices + chosen * (rows - 1)) // rows


def why_by_loop(
    precision: Precision,
    recipe_enabled: bool,
    dtype,
    shape: Sequence[int],
    *,
    adapted: bool = False,
    sent: bool = False,
) -> str:
    """The reason why experts are computed by a scan over blocks and not by a GPU kernel; "" if the kernel serves them.

    dtype, shape `[E, out, in]`: of the matrices; the kernel takes transposed ones too. adapted: these have adapters.
    sent: tokens are sent to the experts of other devices.
    """
    if precision.kernels == "xla":
        return "kernels='xla'"
    if sent:
        return "tokens are sent to them (ep_size)"
    if adapted:
        return "they have adapters"
    in_float8 = precision.fp8 and recipe_enabled
    if precision.recipe != "bf16" and recipe_enabled and not in_float8:
        return f"recipe={precision.recipe!r}"
    if not in_float8 and (precision.matmul_dtype or precision.gradient_dtype):
        return "their products have another dtype than the weights"
    if not grouped_matmul.fits(E4M3 if in_float8 else dtype, *shape[1:]):
        sizes = "float8 matrices of multiples of 32" if in_float8 else "16-bit matrices of multiples of 16"
        return f"the kernel takes {sizes}, 64 or more, and these are {dtype} {' x '.join(map(str, shape[1:]))} on a GPU"
    return ""


def choice_pieces(choices: int, experts: int) -> int:
    """The number of pieces for this many choices, an even share of a device if devices divide the experts."""
    blocks = number_of_blocks(choices, experts, rows_of_block(choices, experts))
    return -(-blocks // blocks_in_piece(choices, experts))


def blocks_in_piece(choices: int, experts: int) -> int:
    """Returns the blocks of a piece if devices divide the experts: an eighth of the blocks of an even share."""
    return -(-number_of_blocks(choices, experts, rows_of_block(choices, experts)) // 8)


def blocks_of(experts_Nk: jax.Array, experts: int, rows: int = 0, devices: int = 1) -> ExpertBlocks:
    """Sorts choices, given as numbers of experts, into blocks of one expert each.

    rows: of a block; 0: `rows_of_block`. devices: that compute them together, each a part of the experts; larger
    numbers than its own have no block. There are blocks for all choices nevertheless, in pieces (`blocks_in_piece`).
    """
    expert_C = experts_Nk.reshape(-1).astype(jnp.int32)
    C = expert_C.size
    R = rows or rows_of_block(C // devices, experts)
    M = number_of_blocks(C, experts, R)
    if devices > 1:
        piece = blocks_in_piece(C // devices, experts)
        M = -(-number_of_blocks(len(experts_Nk) * min(experts_Nk.shape[1], experts), experts, R) // piece) * piece
    order_C = jnp.argsort(expert_C, stable=True)
    counts_E = jnp.sum(jax.nn.one_hot(expert_C, experts, dtype=jnp.int32), axis=0)
    padded_E = -(-counts_E // R) * R
    sorted_C = expert_C[order_C]
    first_row_E, first_E = jnp.cumsum(padded_E) - padded_E, jnp.cumsum(counts_E) - counts_E
    row_C = first_row_E[sorted_C] + jnp.arange(C, dtype=jnp.int32) - first_E[sorted_C]
    if devices > 1:
        row_C = jnp.where(sorted_C < experts, row_C, M * R + jnp.arange(C, dtype=jnp.int32))
    # What is left of the blocks has no choices, and belongs to the last expert.
    ends_before = jnp.cumsum(padded_E)[None, :] <= R * jnp.arange(M, dtype=jnp.int32)[:, None]
    expert_M = jnp.minimum(jnp.sum(ends_before, axis=1, dtype=jnp.int32), experts - 1)
    empty = mark_varying(jnp.full(M * R, C, jnp.int32), varying_axes(expert_C))
    choice_MR = empty.at[row_C].set(order_C.astype(jnp.int32), unique_indices=True).reshape(M, R)
    place_C = jnp.zeros_like(expert_C).at[order_C].set(row_C.astype(expert_C.dtype), unique_indices=True)
    return ExpertBlocks(choice_MR, expert_M, place_C.reshape(experts_Nk.shape))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 6))
def sum_of_experts(
    mlp: Callable,
    trained: Any,
    fixed: Any,
    x_ND: jax.Array,
    weights_Nk: jax.Array,
    blocks: ExpertBlocks,
    piece: int = 0,
) -> jax.Array:
    """`[N, D]`: for each token the sum over its choices of mlp(trained, fixed, x, weights, number of the block).

    mlp: a function of one expert's part of `trained` and `fixed`, trees of arrays `[E, ...]`, of x `[R, D]` and of
    float32 weights `[R]`, to `[R, D]`; a row of zeros with weight 0 yields zeros. fixed has no gradient.
    piece: `blocks_in_piece` if devices share the experts: blocks without choices are not computed then.
    """

    def block(_, each):
        choice_R, expert, number = each
        x_RD, weight_R = _rows(x_ND, weights_Nk, choice_R)
        return _, (mlp(*_of_expert((trained, fixed), expert), x_RD, weight_R, number), None)

    axes = _varying((trained, fixed, x_ND, weights_Nk))
    return _over_blocks(block, None, blocks, x_ND, axes, piece)[1]


def _forward(mlp, trained, fixed, x_ND, weights_Nk, blocks: ExpertBlocks, piece: int):
    y_ND = sum_of_experts(mlp, trained, fixed, x_ND, weights_Nk, blocks, piece)
    return y_ND, (trained, fixed, x_ND, weights_Nk, blocks)


def _backward(mlp, piece: int, saved, dy_ND: jax.Array):
    trained, fixed, x_ND, weights_Nk, blocks = saved
    k = weights_Nk.shape[1]
    axes = _varying((trained, fixed, x_ND, dy_ND))

    def zeros(operand, shape, dtype) -> jax.Array:
        return own_zeros(shape, dtype, (operand, dy_ND), axes)

    def block(carry, each):
        d_trained, expert_sums, before = carry
        choice_R, expert, number = each
        trained_e, fixed_e = _of_expert((trained, fixed), expert)

        def expert_rows(trained_e, x_RD, weight_R):
            return mlp(trained_e, fixed_e, x_RD, weight_R, number)

        _, vjp = jax.vjp(expert_rows, trained_e, *_rows(x_ND, weights_Nk, choice_R))
        more, dx_RD, d_weight_R = vjp(dy_ND.at[choice_R // k].get(mode="fill", fill_value=0))
        continues = expert == before

        def added(sums, more):
            return jnp.where(continues, sums, 0) + more

        expert_sums = jax.tree.map(added, expert_sums, more)
        d_trained = jax.tree.map(lambda d, sums: d.at[expert].set(sums.astype(d.dtype)), d_trained, expert_sums)
        return (d_trained, expert_sums, expert), (dx_RD, d_weight_R)

    expert_sums = jax.tree.map(lambda w: zeros(w, w.shape[1:], jnp.float32), trained)
    d_trained = jax.tree.map(lambda w: zeros(w, w.shape, w.dtype), trained)
    nobody = mark_varying(jnp.int32(-1), varying_axes(blocks.expert_M))
    begin = d_trained, expert_sums, nobody
    (d_trained, _, _), dx_ND, d_weights_Nk = _over_blocks(block, begin, blocks, x_ND, axes, piece)
    return d_trained, None, dx_ND, d_weights_Nk, None


sum_of_experts.defvjp(_forward, _backward)


@jax.custom_vjp
def rows_of_choices(x_ND: jax.Array, weights_Nk: jax.Array, blocks: ExpertBlocks) -> tuple[jax.Array, jax.Array]:
    """Returns (activations `[M R, D]`, float32 weights `[M R]`) of all blocks' rows; zeros in padding rows."""
    return _rows(x_ND, weights_Nk, blocks.choice_MR.reshape(-1))


def _rows_backward(place_Nk, cotangents):
    dx_rows, d_weight_rows = cotangents
    return _sum_of_choices(dx_rows, place_Nk), d_weight_rows[place_Nk], None


rows_of_choices.defvjp(
    lambda x, weights, blocks: (rows_of_choices(x, weights, blocks), blocks.place_Nk), _rows_backward
)


@jax.custom_vjp
def sum_of_rows(y_rows: jax.Array, blocks: ExpertBlocks) -> jax.Array:
    """Sums for each token the rows `[M R, D]` of its choices: `[N, D]`."""
    return _sum_of_choices(y_rows, blocks.place_Nk)


def _sum_backward(blocks, dy_ND):
    token_rows = blocks.choice_MR.reshape(-1) // blocks.place_Nk.shape[1]
    return dy_ND.at[token_rows].get(mode="fill", fill_value=0), None


sum_of_rows.defvjp(lambda y, blocks: (sum_of_rows(y, blocks), blocks), _sum_backward)


def _over_blocks(block: Callable, carry, blocks: ExpertBlocks, x_ND: jax.Array, axes: frozenset[str], piece: int):
    """Calls `block` for all blocks; returns (carry, sums of tokens `[N, D]`, numbers of choices `[N, k]`, else zeros).

    block: (carry, (choice_R, expert, number)) -> (carry, (y `[R, D]` to be added up, numbers `[R]` or None)).
    axes: mesh axes that y varies over.
    """
    rows = (blocks.choice_MR, blocks.expert_M, jnp.arange(len(blocks.expert_M)))
    k = blocks.place_Nk.shape[1]
    N, D = x_ND.shape
    if not piece:
        return _over_all(block, carry, rows, blocks, x_ND, axes)
    axes = axes | _varying((carry, blocks))

    def step(state, each):
        carry, sum_ND, number_C = state
        choice_R = each[0]
        carry, (y_RD, number_R) = block(carry, each)
        # A token chooses an expert once, so no row of a block is twice, but for padding.
        beyond_R = jnp.arange(len(choice_R), dtype=choice_R.dtype)
        row_R = jnp.where(choice_R < N * k, choice_R // k, N + beyond_R)
        sum_ND = sum_ND.at[row_R].add(y_RD, mode="drop", unique_indices=True)
        if number_R is not None:
            choice_R = jnp.where(choice_R < N * k, choice_R, N * k + beyond_R)
            number_C = number_C.at[choice_R].set(number_R, mode="drop", unique_indices=True)
        return (carry, sum_ND, number_C), None

    def run_piece(i, state):
        each = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, i * piece, piece), rows)
        return jax.lax.scan(step, state, each)[0]

    sum_ND, number_C = (own_zeros(shape, jnp.float32, x_ND, axes) for shape in ((N, D), (N * k,)))
    used = jnp.sum(blocks.choice_MR[:, 0] < N * k, dtype=jnp.int32)  # others begin without a choice
    with jax.named_scope(IN_PIECES):
        carry, sum_ND, number_C = jax.lax.fori_loop(0, -(-used // piece), run_piece, (carry, sum_ND, number_C))
    return carry, sum_ND.astype(x_ND.dtype), number_C.reshape(N, k)


def _over_all(block: Callable, carry, rows, blocks: ExpertBlocks, x_ND: jax.Array, axes: frozenset[str]):
    """Computes `_over_blocks` by one loop over all blocks. rows: `block`'s arguments for each block, stacked."""
    M, R = blocks.choice_MR.shape

    def step(state):
        m, carry, y_MRD, number_MR = state
        carry, (y_RD, number_R) = block(carry, _of_expert(rows, m))
        y_MRD = jax.lax.dynamic_update_index_in_dim(y_MRD, mark_varying(y_RD, axes), m, 0)
        if number_R is not None:
            number_MR = jax.lax.dynamic_update_index_in_dim(number_MR, mark_varying(number_R, axes), m, 0)
        return m + 1, carry, y_MRD, number_MR

    y_MRD = own_zeros((M, R, x_ND.shape[1]), x_ND.dtype, x_ND, axes)
    number_MR = own_zeros((M, R), jnp.float32, x_ND, axes)
    # Not a scan, whose stack of results begins with zeros that all loops share.
    begin = jnp.int32(0), carry, y_MRD, number_MR
    _, carry, y_MRD, number_MR = jax.lax.while_loop(lambda state: state[0] < M, step, begin)
    return carry, _sum_of_choices(y_MRD, blocks.place_Nk), number_MR.reshape(-1)[blocks.place_Nk]


def _varying(tree) -> frozenset[str]:
    """The mesh axes that any of a tree's arrays varies over."""
    return frozenset[str]().union(*map(varying_axes, jax.tree.leaves(tree)))


def _of_expert(tree, expert: jax.Array):
    """Slices one expert out of arrays `[E, ...]`, or one block out of `[M, ...]`."""
    return jax.tree.map(lambda w: jax.lax.dynamic_index_in_dim(w, expert, keepdims=False), tree)


def _rows(x_ND: jax.Array, weights_Nk: jax.Array, choice_R: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (activations `[R, D]`, weights `[R]`) of a block's choices; zeros in padding rows."""
    x_RD = x_ND.at[choice_R // weights_Nk.shape[1]].get(mode="fill", fill_value=0)
    return x_RD, weights_Nk.reshape(-1).at[choice_R].get(mode="fill", fill_value=0)


def _sum_of_choices(y_MRD: jax.Array, place_Nk: jax.Array) -> jax.Array:
    """Sums each token's rows in float32: `[N, D]`."""
    rows = y_MRD.reshape(-1, y_MRD.shape[-1])
    total = sum(rows[place_Nk[:, j]].astype(jnp.float32) for j in range(place_Nk.shape[1]))
    return jnp.asarray(total).astype(y_MRD.dtype)
