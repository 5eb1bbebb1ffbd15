"""Softmax cross-entropy of a language model's head: loss and gradient of rows of logits (z-loss: PaLM, section 5).

    lse_n    = log(sum_v exp(x_nv))
    logprob  = x_n,label - lse_n                          natural logarithms, so nats
    loss_n   = -logprob + z_loss * lse_n^2
    d_x_nv   = weight_n * (softmax(x)_nv * (1 + 2 z_loss lse_n) - [v = label])

Labels < 0 are ignored: loss, logprob and gradient are 0. A label >= V is nobody's word: nothing is read for it, loss
and logprob are NaN, which training shows, and the gradient is the softmax's alone.

Dtypes: everything is computed in float32; loss, lse and logprob are float32, gradients have the logits' dtype, rounded
once. Shape suffixes: N tokens, V vocabulary.

How the kernel passes over a row. One program per row, of several warp groups where the row is long: then few rows are on
their way at once, and what the first pass (logsumexp) read is still in the second-level cache when the second
(gradient) reads it again, last part first. Every thread keeps its own maximum and sum of exponentials over 16-byte
vectors (Milakov and Gimelshein 2018, arXiv 1805.02867) and nothing is exchanged before the end of the row. 16-byte
loads fault where they are not aligned, and rows of 50257 bfloat16 are not: vectors begin at the first aligned word of
the row, and its two ends, less than a round of vectors, go in single words, masked where they overlap the rest. Those
stay in registers, and their gradient is written last, since in place nobody may read what is already a gradient.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import LANES, Implementation, choose, launch, need
from pallas_kernels.shapes import Case, Sizes

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

OP = "cross_entropy"
f32 = jnp.float32


class Loss(NamedTuple):
    """What is known of each row; ignored labels: loss, logprob and gradient 0, lse that of the row.

    d_logits: weight * d loss / d logits, None where it was not asked for.
    """

    loss: jax.Array
    lse: jax.Array
    logprob: jax.Array
    d_logits: jax.Array | None = None


# ---- Reference --------------------------------------------------------------------------------------------------


def _reference_forward(logits_NV, labels_N, z_loss: float) -> Loss:
    logits32_NV, V = logits_NV.astype(f32), logits_NV.shape[1]
    lse_N = jax.nn.logsumexp(logits32_NV, axis=-1)
    label_N = jnp.clip(labels_N, 0, V - 1)[:, None]
    label_logit_N = jnp.take_along_axis(logits32_NV, label_N, axis=1, mode="promise_in_bounds")[:, 0]
    nll_N = jnp.where(labels_N < V, lse_N - label_logit_N, jnp.nan)
    nll_N = jnp.where(labels_N >= 0, nll_N, 0.0)
    penalty_N = jnp.where(labels_N >= 0, z_loss * lse_N * lse_N, 0.0) if z_loss else 0.0
    return Loss(nll_N + penalty_N, lse_N, -nll_N)


def _reference_gradient(logits_NV, labels_N, lse_N, weight, z_loss: float):
    """weight: [] or [N]. The gradient is written out: reverse mode would scatter into a zeroed `[N, V]` array."""
    softmax_NV = jnp.exp(logits_NV.astype(f32) - lse_N[:, None])
    if z_loss:
        softmax_NV = softmax_NV * (1.0 + 2.0 * z_loss * lse_N)[:, None]
    onehot_NV = jax.lax.broadcasted_iota(jnp.int32, logits_NV.shape, 1) == labels_N[:, None]
    weight_N = jnp.where(labels_N >= 0, weight, 0.0)
    return ((softmax_NV - onehot_NV) * weight_N[:, None]).astype(logits_NV.dtype)


# ---- Kernel -----------------------------------------------------------------------------------------------------

GROUPS, MANY = 4, 16384  # warp groups of a program, for rows of so many words; shorter ones: one
UNROLL = 4  # vectors that a thread has on their way at once
LOWEST = -1e30  # what masked words count as: their exponential is 0
LOG2E = 1.4426950408889634


class Cut(NamedTuple):
    """How a row is cut: `rounds` of aligned vectors, one for each thread, and `edges` of single words for the rest."""

    V: int
    vec: int  # words of a vector, 16 bytes
    groups: int
    rounds: int
    edges: int
    shift: int  # words by which each row's beginning is off a multiple of vec, compared with the row before

    @property
    def span(self) -> int:
        """Words of a round."""
        return self.groups * LANES * self.vec


def cut(V: int, itemsize: int) -> Cut:
    """The cut of rows of V >= LANES words."""
    vec, groups = 16 // itemsize, GROUPS if V >= MANY else 1
    shift = V % vec
    rounds = (V - (vec - 1 if shift else 0)) // (groups * LANES * vec)
    edges = -(-(V - rounds * groups * LANES * vec) // (groups * LANES))
    return Cut(V, vec, groups, rounds, edges, shift if rounds else 0)


def _exp(x):
    return jnp.exp2(x * LOG2E)  # one instruction of the GPU and a multiplication


class _Row:
    """A row of logits within a program: loads its parts, in float32."""

    def __init__(self, c: Cut, x_ref):
        self.c, self.x_ref = c, x_ref
        self.r, self.group = jax.lax.axis_index("rows"), jax.lax.axis_index("group")
        self.begin = -(self.r * c.shift) & (c.vec - 1)  # the first aligned word

    def round(self, j):
        """(first word of this group's part of round j, its length, its layout)."""
        n = LANES * self.c.vec
        layout = plgpu.Layout.WG_STRIDED((n,), vec_size=self.c.vec)
        return self.begin + j * self.c.span + self.group * n, n, layout

    def edge(self, start):
        """The same of single words, one for each thread of all groups, from `start`."""
        return start + self.group * LANES, LANES, plgpu.Layout.WG_STRIDED((LANES,), vec_size=1)

    def load(self, part):
        start, n, layout = part
        return plgpu.layout_cast(self.x_ref[self.r, pl.ds(start, n)], layout).astype(f32)

    def edges(self):
        """[(part, values, which of its words no other part has)]: both ends of the row."""
        c, found = self.c, []
        words = c.groups * LANES
        end = self.begin + c.rounds * c.span
        for k in range(c.edges):
            part = self.edge(jnp.minimum(end + k * words, c.V - words))
            found.append((part, self.load(part), columns(part) >= end + k * words))
        if c.shift:
            part = self.edge(0)
            found.append((part, self.load(part), columns(part) < self.begin))
        return found

    def over_rounds(self, body, carry, *, backwards: bool = False):
        """carry = body(parts, carry) over all rounds, UNROLL at a time."""
        c = self.c
        full, rest = divmod(c.rounds, UNROLL)
        parts = lambda j, n: [self.round(j + k) for k in range(n)]
        some = lambda i, carry: body(parts((full - 1 - i if backwards else i) * UNROLL, UNROLL), carry)
        last = lambda carry: body(parts(full * UNROLL, rest), carry) if rest else carry
        carry = last(carry) if backwards else carry
        carry = jax.lax.fori_loop(0, full, some, carry) if full else carry
        return carry if backwards else last(carry)


def columns(part):
    start, n, layout = part
    return start + plgpu.broadcasted_iota(jnp.int32, (n,), 0, layout=layout)


def _online(xs, carry):
    """(maximum, sum of exponentials less it) of every place of a vector, with vectors xs added."""
    top, total = carry
    new = functools.reduce(jnp.maximum, xs, top)
    return new, functools.reduce(lambda total, x: total + _exp(x - new), xs, total * _exp(top - new))


def _both(a, b):
    """(maximum, sum) of two such pairs of numbers."""
    top = jnp.maximum(a[0], b[0])
    return top, a[1] * _exp(a[0] - top) + b[1] * _exp(b[0] - top)


def _logsumexp(row: _Row, edges, tops, sums, barrier):
    """The logarithm of the row's sum of exponentials; afterwards all groups have read the edges."""
    none = lambda n, layout: tuple(plgpu.layout_cast(jnp.full((n,), v, f32), layout) for v in (LOWEST, 0.0))
    vectors, pairs = lambda parts, carry: _online([row.load(part) for part in parts], carry), []
    if row.c.rounds:
        _, *like = row.round(0)
        pairs.append(row.over_rounds(vectors, none(*like)))
    if edges:
        (_, *like), *_ = edges[0]
        pairs.append(_online([jnp.where(mine, x, LOWEST) for _, x, mine in edges], none(*like)))
    whole = []
    for top, total in pairs:
        most = jnp.max(top)
        whole.append((most, jnp.sum(total * _exp(top - most))))
    tops[row.group], sums[row.group] = functools.reduce(_both, whole)
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)
    top, total = functools.reduce(_both, [(tops[g], sums[g]) for g in range(row.c.groups)])
    return top + jnp.log(total)


def _write_gradient(row: _Row, edges, d_ref, label, lse, weight, factor, barrier):
    """weight * (softmax * factor - onehot) into the row of d_ref; the last read is read again first."""

    def store(part, x):
        start, n, _ = part
        softmax = _exp(x - lse) * factor
        gradient = softmax - jnp.where(columns(part) == label, f32(1), f32(0))
        d_ref[row.r, pl.ds(start, n)] = (gradient * weight).astype(d_ref.dtype)

    def vectors(parts, carry):
        for part, x in [(part, row.load(part)) for part in reversed(parts)]:
            store(part, x)
        return carry

    row.over_rounds(vectors, 0, backwards=True)
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)  # nobody reads any more
    for part, x, _ in edges:
        store(part, x)


def _body(c: Cut, z_loss: float, forward: bool, gradient: bool, in_place: bool):
    def kernel(x_ref, label_ref, weight_ref, *refs):
        lse_ref, refs = (None, refs) if forward else (refs[0], refs[1:])
        *results, tops, sums, barrier = refs
        row = _Row(c, x_ref)
        r, label = row.r, label_ref[row.r]
        label_logit = x_ref[r, jnp.clip(label, 0, c.V - 1)].astype(f32)
        edges = row.edges()
        lse = lse_ref[r] if lse_ref is not None else _logsumexp(row, edges, tops, sums, barrier)
        valid = jnp.where(label >= 0, f32(1), f32(0))
        if forward:
            nll = jnp.where(label < c.V, (lse - label_logit), f32(jnp.nan))
            nll = jnp.where(label >= 0, nll, f32(0))

            @pl.when(row.group == 0)
            def _():
                results[0][r] = nll + valid * z_loss * lse * lse
                results[1][r] = lse
                results[2][r] = -nll

        if gradient:
            d_ref = x_ref if in_place else results[-1]
            weight = weight_ref[r if weight_ref.shape[0] > 1 else 0] * valid
            _write_gradient(row, edges, d_ref, label, lse, weight, 1.0 + 2.0 * z_loss * lse, barrier)

    return kernel


def _run(logits_NV, labels_N, weight, lse_N, *, z_loss=0.0, forward=True, gradient=True, in_place=False, interpret=False):
    """The kernel: Loss of rows; without `forward` only d_logits, from their lse. weight: [1] or [N]."""
    (N, V), c = logits_NV.shape, cut(logits_NV.shape[1], logits_NV.dtype.itemsize)
    out = [jax.ShapeDtypeStruct((N,), f32)] * 3 if forward else []
    if gradient and not in_place:
        out.append(jax.ShapeDtypeStruct((N, V), logits_NV.dtype))
    x = jax.new_ref(logits_NV) if in_place else logits_NV
    results = launch(
        _body(c, z_loss, forward, gradient, in_place),
        (x, labels_N, weight) if forward else (x, labels_N, weight, lse_N),
        out=out,
        grid=(N,),
        names=("rows",),
        interpret=interpret,
        num_threads=c.groups,
        thread_name="group",
        scratch_types=[plgpu.SMEM((c.groups,), f32), plgpu.SMEM((c.groups,), f32), plgpu.Barrier(num_arrivals=c.groups)],
    )
    *numbers, d_logits = [*results, x[...]] if in_place else results if gradient else [*results, None]
    return Loss(*numbers, d_logits) if forward else d_logits


# ---- Public functions -------------------------------------------------------------------------------------------


def loss_and_gradient(
    logits: Float[Array, "*N V"],
    labels: Int[Array, "*N"],
    weight: Float[Array, ""],
    *,
    z_loss: float = 0.0,
    in_place: bool = False,
    implementation: Implementation = None,
    interpret: bool = False,
) -> Loss:
    """Loss of every row and weight * its gradient, in one kernel.

    logits: float32 or bfloat16. labels: int32, < 0 = ignored. weight: [], float32, what the gradient is multiplied by.
    z_loss: weight of lse^2 in the loss. in_place: the gradient is written over the logits, which saves memory where the
    caller needs them no more (in `jax.jit` they should be an intermediate value or a donated argument); refused in
    `jax.shard_map(check_vma=True)`, where JAX takes no references. Returns Loss with [*N] float32 and d_logits
    [*N, V] of the logits' dtype. Not differentiable itself: `cross_entropy` is. Raises ValueError.
    """
    _check(logits, labels, z_loss)
    need(jnp.shape(weight) == (), OP, "weight", "one number, shape ()", jnp.shape(weight))
    x_NV, labels_N = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    choose(OP, implementation)
    out = _reference_forward(x_NV, labels_N, z_loss)
    out = out._replace(d_logits=_reference_gradient(x_NV, labels_N, out.lse, weight, z_loss))
    return _shaped(out, logits)


def _shaped(out: Loss, logits) -> Loss:
    d_logits = None if out.d_logits is None else out.d_logits.reshape(logits.shape)
    return Loss(*(x.reshape(logits.shape[:-1]) for x in out[:3]), d_logits)


def _check(logits, labels, z_loss) -> None:
    need(logits.ndim >= 1 and logits.shape[-1] >= 1, OP, "logits", "shape [..., V] with V >= 1", logits.shape)
    need(logits.dtype in (f32, jnp.bfloat16), OP, "dtype of logits", "float32 or bfloat16", logits.dtype)
    need(labels.dtype == jnp.int32, OP, "dtype of labels", "int32", labels.dtype)
    need(labels.shape == logits.shape[:-1], OP, "labels", f"shape {logits.shape[:-1]} as logits {logits.shape}", labels.shape)
    need(isinstance(z_loss, int | float) and z_loss >= 0, OP, "z_loss", "a number, 0 or more", z_loss)
