"""Adds rows into a table, repeated ones in a fixed order.

`table.at[rows].add(values)` becomes atomic additions on a GPU: rows that occur several times are added in the order in
which thread blocks happen to run, each addition rounded to the table's dtype, so that two runs of one program differ.
Here the rows are sorted, those of equal numbers are summed in float32 by a segmented scan (Hillis and Steele 1986:
log2 N passes, each adding pairs that are 1, 2, 4, ... apart), and each row of the table is written once.
"""

import jax
import jax.numpy as jnp

from surojax.numerics.rounding import materialised

PIECE_BYTES = 32 << 20  # float32 values that are scanned at a time; an H100 caches 50 MB
MIN_COLUMNS = 32  # of a piece: fewer are read in transactions of which a part is not used


def add_rows(table_VD: jax.Array, rows_N: jax.Array, values_ND: jax.Array) -> jax.Array:
    """Returns `table.at[rows].add(values)` with sums in float32, each row rounded to the table's dtype once.

    Sums of a float64 table are in float64.

    rows: int32 row numbers; values of rows that are not in 0 ... V - 1 are left out.
    """
    return jax.lax.platform_dependent(table_VD, rows_N, values_ND, cpu=_add_one_by_one, default=_add_sorted)


def _add_one_by_one(table_VD: jax.Array, rows_N: jax.Array, values_ND: jax.Array) -> jax.Array:
    """As `add_rows`, on a processor, where XLA adds rows one after another."""
    rows_N = jnp.where(rows_N < 0, len(table_VD), rows_N)  # else they count from the end
    wide = jnp.promote_types(table_VD.dtype, jnp.float32)
    sums_VD = table_VD.astype(wide).at[rows_N].add(values_ND, mode="drop")
    # Without the barrier XLA adds what is added next, the gradient of a tied head, before the rows, if it sees both.
    return materialised(sums_VD.astype(table_VD.dtype))


def _add_sorted(table_VD: jax.Array, rows_N: jax.Array, values_ND: jax.Array) -> jax.Array:
    """As `add_rows`, without atomic additions."""
    (V, D), N = table_VD.shape, rows_N.size
    order_N = jnp.argsort(rows_N, stable=True)
    sorted_N = rows_N[order_N]
    changes_N = sorted_N[1:] != sorted_N[:-1]
    place_N = jnp.arange(N, dtype=jnp.int32)
    start_N = jax.lax.cummax(jnp.where(jnp.append(True, changes_N), place_N, 0))
    # The sum of a row is complete at its last place. All other places get numbers beyond the table, each its own.
    is_last_N = jnp.append(changes_N, True) & (sorted_N >= 0) & (sorted_N < V)
    target_N = jnp.where(is_last_N, sorted_N, V + place_N)

    width = _columns_of_piece(N, D)

    def piece(i: jax.Array | int, x_ND: jax.Array) -> jax.Array:
        """Replaces some columns of the values by those of the table's new rows."""
        values_Nd, old_Vd = (jax.lax.dynamic_slice_in_dim(x, i * width, width, 1) for x in (x_ND, table_VD))
        wide = jnp.promote_types(table_VD.dtype, jnp.float32)
        sums_Nd = _segment_sums(values_Nd.at[order_N].get(unique_indices=True).astype(wide), start_N)
        old_Nd = old_Vd.at[target_N].get(mode="fill", fill_value=0, unique_indices=True)
        return jax.lax.dynamic_update_slice_in_dim(x_ND, (old_Nd + sums_Nd).astype(x_ND.dtype), i * width, 1)

    x_ND = values_ND.astype(jnp.promote_types(table_VD.dtype, values_ND.dtype))
    new_ND = jax.lax.fori_loop(0, D // width, piece, x_ND) if width < D else piece(0, x_ND)
    return table_VD.at[target_N].set(new_ND.astype(table_VD.dtype), mode="drop", unique_indices=True)


def _segment_sums(x_Nd: jax.Array, start_N: jax.Array) -> jax.Array:
    """Cumulative sums `[N, d]` along N within segments; start_N: the place at which each place's segment starts."""
    N = len(x_Nd)
    length_N1 = (jnp.arange(N, dtype=jnp.int32) - start_N)[:, None]  # number of earlier places in the segment
    distance = 1
    while distance < N:
        earlier_Nd = jax.lax.pad(x_Nd, jnp.zeros((), x_Nd.dtype), ((distance, -distance, 0), (0, 0, 0)))
        x_Nd = jnp.where(length_N1 >= distance, x_Nd + earlier_Nd, x_Nd)
        distance *= 2
    return x_Nd


def _columns_of_piece(N: int, D: int) -> int:
    """Returns the largest divisor of D whose columns are at most PIECE_BYTES, at least MIN_COLUMNS if D has these."""
    most = max(PIECE_BYTES // (4 * N), MIN_COLUMNS)
    return max(width for width in range(1, D + 1) if D % width == 0 and width <= most)
