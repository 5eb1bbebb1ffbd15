"""Softmax cross-entropy of a language model's head: loss and gradient of rows of logits (z-loss: PaLM, section 5).

    lse_n    = log(sum_v exp(x_nv))
    logprob  = x_n,label - lse_n                          natural logarithms, so nats
    loss_n   = -logprob + z_loss * lse_n^2
    d_x_nv   = weight_n * (softmax(x)_nv * (1 + 2 z_loss lse_n) - [v = label])

Labels < 0 are ignored: loss, logprob and gradient are 0. A label >= V is not in the vocabulary: no logit is read for
it, loss and logprob are NaN, so that training shows the error, and the gradient is that of the softmax alone.

Dtypes: everything is computed in float32; loss, lse and logprob are float32, gradients have the logits' dtype, rounded
once. Shape suffixes: N tokens, V vocabulary.

The kernel: one program per row, split as in `long_rows`. The first pass keeps a maximum and a sum of exponentials for
every position of a vector (Milakov and Gimelshein 2018, arXiv 1805.02867); threads exchange nothing before the end of
the row. The second pass reads the row again, last part first, as far as possible from the second-level cache, and
writes the gradient. The ends of the row stay in registers between the passes and are written last: in place, no thread
may read a logit where a gradient has been written.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import LANES, Implementation, choose, expect, launch, runs_kernel
from pallas_kernels.long_rows import Cut, ProgramRow, columns, cut
from pallas_kernels.shapes import Case, Sizes

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

OP = "cross_entropy"
f32 = jnp.float32


class Loss(NamedTuple):
    """Loss, lse and logprob of each row, float32; d_logits = weight * d loss / d logits, in the logits' dtype."""

    loss: jax.Array
    lse: jax.Array
    logprob: jax.Array
    d_logits: jax.Array


# ---- Reference --------------------------------------------------------------------------------------------------


def _reference_forward(logits_NV, labels_N, z_loss: float):
    """[loss, lse, logprob] of each row."""
    logits32_NV = logits_NV.astype(f32)
    V = logits_NV.shape[1]
    lse_N = jax.nn.logsumexp(logits32_NV, axis=-1)
    label_N = jnp.clip(labels_N, 0, V - 1)[:, None]
    label_logit_N = jnp.take_along_axis(logits_NV, label_N, axis=1, mode="promise_in_bounds")[:, 0]
    nll_N = jnp.where(labels_N < V, lse_N - label_logit_N, jnp.nan)
    nll_N = jnp.where(labels_N >= 0, nll_N, 0.0)
    penalty_N = jnp.where(labels_N >= 0, z_loss * lse_N * lse_N, 0.0) if z_loss else 0.0
    return [nll_N + penalty_N, lse_N, -nll_N]


def _reference_gradient(logits_NV, labels_N, lse_N, weight, z_loss: float):
    """d_logits by jnp. weight: [] or [N]. Not by reverse mode, which would scatter into an `[N, V]` array of zeros."""
    softmax_NV = jnp.exp(logits_NV - lse_N[:, None])
    if z_loss:
        softmax_NV = softmax_NV * (1.0 + 2.0 * z_loss * lse_N)[:, None]
    onehot_NV = jax.lax.broadcasted_iota(jnp.int32, logits_NV.shape, 1) == labels_N[:, None]
    weight_N = jnp.where(labels_N >= 0, weight, 0.0)
    return ((softmax_NV - onehot_NV) * weight_N[:, None]).astype(logits_NV.dtype)


# ---- Kernel -----------------------------------------------------------------------------------------------------

LOWEST = -1e30  # the logit of masked words: its exponential is 0
LOG2E = 1.4426950408889634


def _exp(x):
    """The exponential: a multiplication and one instruction of the GPU."""
    return jnp.exp2(x * LOG2E)


def _add_numbers(xs, carry):
    """Adds vectors xs to the carry: (maximum, sum of exp(x - maximum)) for every position of a vector."""
    top, total = carry
    new = functools.reduce(jnp.maximum, xs, top)
    return new, functools.reduce(lambda total, x: total + _exp(x - new), xs, total * _exp(top - new))


def _merge(a, b):
    """Merges two pairs (maximum, sum of exp(x - maximum)) into the pair of both sets of numbers."""
    top = jnp.maximum(a[0], b[0])
    return top, a[1] * _exp(a[0] - top) + b[1] * _exp(b[0] - top)


def _pairs(row: ProgramRow, edges) -> list:
    """This group's (maxima, sums of exp(x - maximum)) for every position of a vector: of its rounds, of its edges."""

    def empty(n, layout):
        return tuple(plgpu.layout_cast(jnp.full((n,), v, f32), layout) for v in (LOWEST, 0.0))

    def add_parts(parts, carry):
        return _add_numbers([row.load(part) for part in parts], carry)

    pairs = []
    if row.c.rounds:
        _, *like = row.round(0)
        pairs.append(row.over_rounds(add_parts, empty(*like)))
    if edges:
        (_, *like), *_ = edges[0]
        pairs.append(_add_numbers([jnp.where(mine, x, LOWEST) for _, x, mine in edges], empty(*like)))
    return pairs


def _logarithm(pairs):
    """The logarithm of the sum of exponentials of all numbers in vectors of pairs."""
    numbers = []
    for top, total in pairs:
        most = jnp.max(top)
        numbers.append((most, jnp.sum(total * _exp(top - most))))
    top, total = functools.reduce(_merge, numbers)
    return top + jnp.log(total)


def _logsumexp(row: ProgramRow, edges, shared, barrier):
    """The logarithm of the row's sum of exponentials. When it returns, all groups have read the edges.

    shared: memory that groups share: one number, then for rounds and edges as `_pairs` has them (maxima [groups, n],
    sums [groups, n]); empty with one group. The first group alone takes maxima and sums over vectors: for those Mosaic
    exchanges numbers between warps in one place for all groups, without a barrier between them.
    """
    pairs = _pairs(row, edges)
    if not shared:
        return _logarithm(pairs)
    result, *refs = shared
    vectors = list(zip(refs[::2], refs[1::2], strict=True))
    for (tops, sums), (top, total) in zip(vectors, pairs, strict=True):
        tops[row.group], sums[row.group] = top, total
    _meet(barrier)

    @pl.when(row.group == 0)
    def _():
        everyone = [[(tops[g], sums[g]) for g in range(row.c.groups)] for tops, sums in vectors]
        result[0] = _logarithm([functools.reduce(_merge, of_groups) for of_groups in everyone])

    _meet(barrier)
    return result[0]


def _meet(barrier) -> None:
    """Returns in each group when all have come here."""
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


def _write_gradient(row: ProgramRow, edges, d_ref, label, lse, weight, factor, barrier):
    """Writes weight * (softmax * factor - onehot) to the row of d_ref; the parts that were read last go first."""
    label += row.first

    def store(part, x):
        start, n, _ = part
        softmax = _exp(x - lse) * factor
        gradient = softmax - jnp.where(columns(part) == label, f32(1), f32(0))
        d_ref[row.line, pl.ds(start, n)] = (gradient * weight).astype(d_ref.dtype)

    def store_parts(parts, carry):
        for part, x in [(part, row.load(part)) for part in reversed(parts)]:
            store(part, x)
        return carry

    row.over_rounds(store_parts, 0, backwards=True)
    _meet(barrier)  # all groups have read all logits
    for part, x, _ in edges:
        store(part, x)


def _body(c: Cut, words: int, z_loss: float, forward: bool, gradient: bool, in_place: bool):
    """The kernel; words: number of words of the vocabulary at the start of a row, the rest is padding."""

    def kernel(x_ref, label_ref, weight_ref, *refs):
        lse_ref, refs = (None, refs) if forward else (refs[0], refs[1:])
        outputs = 3 * forward + (gradient and not in_place)
        results, (barrier, *shared) = refs[:outputs], refs[outputs:]
        row = ProgramRow(c, x_ref)
        r = row.r
        label = label_ref[r]
        label_logit = x_ref[row.line, row.first + jnp.clip(label, 0, words - 1)].astype(f32)
        edges = row.edges()
        lse = lse_ref[r] if lse_ref is not None else _logsumexp(row, edges, shared, barrier)
        valid = jnp.where(label >= 0, f32(1), f32(0))
        if forward:
            nll = jnp.where(label < words, lse - label_logit, f32(jnp.nan))
            nll = jnp.where(label >= 0, nll, f32(0))

            @pl.when(row.group == 0)
            def _():
                results[0][r], results[1][r], results[2][r] = nll + valid * z_loss * lse * lse, lse, -nll

        if gradient:
            d_ref = x_ref if in_place else results[-1]
            weight = weight_ref[r if weight_ref.shape[0] > 1 else 0] * valid
            _write_gradient(row, edges, d_ref, label, lse, weight, 1.0 + 2.0 * z_loss * lse, barrier)

    return kernel


def _shared(c: Cut) -> list:
    """The `shared` of `_logsumexp`."""
    widths = [LANES * c.vec] * bool(c.rounds) + [LANES] * bool(c.edges or c.rows > 1)
    if c.groups == 1:
        return []
    return [plgpu.SMEM((1,), f32), *(plgpu.SMEM((c.groups, n), f32) for n in widths for _ in range(2))]


def _run(
    logits_NV, labels_N, weight, lse_N=None, *, z_loss, forward=True, gradient=True, in_place=False, interpret=False
) -> tuple[list, Any]:
    """Runs the kernel: ([loss, lse, logprob] if `forward` else [], d_logits if `gradient` else None).

    weight: [1] or [N]. lse_N: input of the gradient without `forward`.
    """
    N, words = logits_NV.shape
    padding = max(0, LANES - words)
    if padding:
        logits_NV = jnp.pad(logits_NV, ((0, 0), (0, padding)), constant_values=LOWEST)
    V = words + padding
    c = cut(N, V, logits_NV.dtype.itemsize)
    lines = logits_NV.reshape(N // c.rows, c.rows * V)
    out = [jax.ShapeDtypeStruct((N,), f32)] * 3 if forward else []
    if gradient and not in_place:
        out.append(jax.ShapeDtypeStruct(lines.shape, lines.dtype))
    results = launch(
        _body(c, words, z_loss, forward, gradient, in_place),
        (lines, labels_N, weight) if forward else (lines, labels_N, weight, lse_N),
        over=(0,) if in_place else (),
        op=OP,
        out=out,
        grid=(N,),
        names=("rows",),
        interpret=interpret,
        num_threads=c.groups,
        thread_name="group",
        scratch_types=[plgpu.Barrier(num_arrivals=c.groups), *(_shared(c) if forward else [])],
    )
    if not gradient:
        return results, None
    d = results.pop(0 if in_place else -1)
    return results, jnp.reshape(d, (N, V))[:, :words]


# ---- Public functions -------------------------------------------------------------------------------------------


def loss_and_gradient(
    logits: Float[Array, "*N V"],
    labels: Int[Array, "*N"],
    weight: Float[Array, ""] | float,
    *,
    z_loss: float = 0.0,
    in_place: bool = False,
    implementation: Implementation = None,
    interpret: bool = False,
) -> Loss:
    """Loss of every row and weight * its gradient, in one kernel.

    logits: float32 or bfloat16. labels: int32, < 0 = ignored. weight: one number, a factor of the gradient.
    z_loss: weight of lse^2 in the loss. in_place: write the gradient over the logits, which saves memory if the caller
    does not use them again (in `jax.jit` they should be an intermediate value or a donated argument). Returns Loss with
    float32 [*N] and d_logits [*N, V] in the logits' dtype. It has no derivative; `cross_entropy` has one. Raises
    ValueError for wrong shapes and dtypes.
    """
    _check(logits, labels, z_loss)
    expect(jnp.shape(weight) == (), OP, "weight", "one number, shape ()", jnp.shape(weight))
    weight = jnp.asarray(weight, f32)
    x_NV, labels_N = _flat(logits, labels)
    if _mosaic(x_NV, implementation):
        rows, d_NV = _run(x_NV, labels_N, weight[None], z_loss=z_loss, in_place=in_place, interpret=interpret)
    else:
        rows = _reference_forward(x_NV, labels_N, z_loss)
        d_NV = _reference_gradient(x_NV, labels_N, rows[1], weight, z_loss)
    loss, lse, logprob = (row.reshape(labels.shape) for row in rows)
    return Loss(loss, lse, logprob, jnp.reshape(d_NV, logits.shape))


def cross_entropy(
    logits: Float[Array, "*N V"],
    labels: Int[Array, "*N"],
    *,
    z_loss: float = 0.0,
    implementation: Implementation = None,
    interpret: bool = False,
) -> Float[Array, "*N"]:
    """Loss of every row, float32; differentiable with respect to the logits.

    Arguments and errors are those of `loss_and_gradient`, which needs one pass less but must know the weight of the
    gradient before.
    """
    _check(logits, labels, z_loss)
    return _loss(*_flat(logits, labels), z_loss, implementation, interpret).reshape(labels.shape)


def logprob(
    logits: Float[Array, "*N V"],
    labels: Int[Array, "*N"],
    *,
    implementation: Implementation = None,
    interpret: bool = False,
) -> Float[Array, "*N"]:
    """log softmax(logits)[label] of every row in nats, float32, 0 for ignored labels; without gradient."""
    _check(logits, labels, 0.0)
    rows = _flat(jax.lax.stop_gradient(logits), labels)
    return _forward(*rows, 0.0, implementation, interpret)[2].reshape(labels.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _loss(logits_NV, labels_N, z_loss, implementation, interpret):
    return _forward(logits_NV, labels_N, z_loss, implementation, interpret)[0]


def _loss_saving(logits_NV, labels_N, z_loss, implementation, interpret):
    loss_N, lse_N, _ = _forward(logits_NV, labels_N, z_loss, implementation, interpret)
    return loss_N, (logits_NV, labels_N, lse_N)


def _loss_transposed(z_loss, implementation, interpret, saved, d_loss_N):
    logits_NV, labels_N, lse_N = saved
    if not _mosaic(logits_NV, implementation):
        return _reference_gradient(logits_NV, labels_N, lse_N, d_loss_N, z_loss), None
    how = dict(z_loss=z_loss, forward=False, interpret=interpret)
    return _run(logits_NV, labels_N, d_loss_N, lse_N, **how)[1], None


_loss.defvjp(_loss_saving, _loss_transposed)


def _forward(logits_NV, labels_N, z_loss, implementation, interpret):
    """[loss, lse, logprob] of each row."""
    if not _mosaic(logits_NV, implementation):
        return _reference_forward(logits_NV, labels_N, z_loss)
    return _run(logits_NV, labels_N, jnp.ones(1, f32), z_loss=z_loss, gradient=False, interpret=interpret)[0]


def _flat(logits, labels):
    """(logits [N, V], labels [N])."""
    return logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)


def _mosaic(logits_NV, implementation: Implementation) -> bool:
    """Whether the kernel runs; if not, warns or raises: see `dispatch.runs_kernel`."""
    if choose(OP, implementation) == "xla" or logits_NV.size == 0:
        return False
    N, V = logits_NV.shape
    itemsize = logits_NV.dtype.itemsize
    vec = 16 // itemsize
    fits = cut(N, max(V, LANES), itemsize).rows * V < 2**31
    expected = (
        f"expected fewer than 2^31 logits, since in rows that {vec} does not divide they are found with 32-bit numbers "
        f"(make the number of rows a multiple of {vec}, or take fewer)"
    )
    return runs_kernel(OP, implementation, fits, expected, f"{N} rows of {V}")


def _check(logits, labels, z_loss) -> None:
    """Raises ValueError for wrong shapes and dtypes."""
    expect(logits.ndim >= 1 and logits.shape[-1] >= 1, OP, "logits", "shape [..., V] with V >= 1", logits.shape)
    expect(logits.dtype in (f32, jnp.bfloat16), OP, "dtype of logits", "float32 or bfloat16", logits.dtype)
    expect(labels.dtype == jnp.int32, OP, "dtype of labels", "int32", labels.dtype)
    expected = f"shape {logits.shape[:-1]}, since logits are {logits.shape}"
    expect(labels.shape == logits.shape[:-1], OP, "labels", expected, labels.shape)
    expect(isinstance(z_loss, int | float) and z_loss >= 0, OP, "z_loss", "a number, 0 or more", z_loss)


# ---- Cases ------------------------------------------------------------------------------------------------------


def cases(sizes: Sizes, tokens: int) -> list[Case]:
    """Loss and gradient in one kernel, in place and not; log-probabilities; both kernels of a differentiated loss."""
    x = jax.ShapeDtypeStruct((tokens, sizes.vocab), jnp.bfloat16)
    labels = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    number = jax.ShapeDtypeStruct((), f32)
    size = 2 * tokens * sizes.vocab  # bytes of the logits
    rows = 4 * tokens

    def backward(logits, labels, d_loss, **how):
        return jax.vjp(functools.partial(cross_entropy, labels=labels, **how), logits)[1](d_loss)

    return [
        Case("in_place", functools.partial(loss_and_gradient, in_place=True), (x, labels, number), 2 * size, (0,)),
        Case("out_of_place", loss_and_gradient, (x, labels, number), 2 * size),
        Case("logprob", logprob, (x, labels), size),
        Case("forward_and_backward", backward, (x, labels, jax.ShapeDtypeStruct((tokens,), f32)), 3 * size + rows),
    ]
