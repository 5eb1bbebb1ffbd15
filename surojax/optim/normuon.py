"""NorMuon: orthogonalised momentum of a matrix, its rows scaled to equal size (Li et al. 2025, arXiv:2510.05491).

    M' = b1 M + (1 - b1) g                    O = U V^T of M' = U S V^T, by `orthogonalised`
    v' = b2 v + (1 - b2) mean of O^2 over each row (neuron)         O' = O / (sqrt(v') + eps)
    W' = W - lr (0.2 sqrt(m k) / |O'| O'  +  decay W where O' W > 0)

for matrices W `[m, k]` of the blocks. 0.2 is the root mean square of AdamW's updates, so that AdamW's learning rates
and decay fit (Liu et al. 2025, arXiv:2502.16982). As in the paper, there is no Nesterov momentum and no bias correction
(the norm of O' cancels it). The decay is cautious: it applies only to weights that the update makes smaller too (Chen
et al. 2025, arXiv:2510.12402). Embedding, head and vectors have AdamW's rule, with AdamW's learning rate.

**Sharded.** Master weights and momentum are sharded over n devices (those of a tensor-parallel group included), but
the orthogonalisation needs the full matrix. So as many layers are updated together: an all-to-all sends device i the
momentum of the i-th of them, in the dtype of the products (`model_dtype`: bfloat16 on GPUs, to which they would round
it anyway), and another one sends back what it has computed, in float32. That costs each device per step, for P
parameters in the blocks:

    (n - 1) / n x P / n x (2 + 4) bytes sent, where ZeRO-1's all-gather after the update sends (n - 1) / n x P x 2, and
    steps x (4 min(m, k)^2 max(m, k) + 2 min(m, k)^3) / n FLOPs for each matrix.

If n does not divide the number of layers, fewer are updated together: as many as the largest divisor below n, and some
devices have nothing to do. A layer that is updated alone (in a file, or of a prime number of them) is all-gathered, and
every device computes all of O. For Llama-7B (5 steps) O takes 6.8e14 FLOPs, as many as 17 thousand tokens.

The second moment of the rows is replicated (4 bytes a row), so that no norm has to be summed over devices.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from surojax.declared import AT_LEAST_0, BELOW_1, Facts, Range, declare
from surojax.numerics.rounding import materialised, mix
from surojax.optim.adamw import ADAM, MOMENTS, adamw
from surojax.optim.learning_rate import Schedule
from surojax.optim.optimizer import COMMON, Optimizer, OptimizerChoice, Scalars, TensorContext, UpdateRule, rounded
from surojax.parallel.collectives import active, device_number
from surojax.placement.layout import Layout, mesh_axes

RMS = 0.2  # of an update
# (a, b, c) of x -> a x + b x^3 + c x^5 for each step: Polar Express (Amsel et al. 2025, arXiv:2505.16932, Algorithm 1),
# the best composition for singular values from 1e-3 to 1. Steps beyond the table use its last row.
POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
SAFETY = 1.01  # singular values that rounding makes larger than 1 must not diverge (the same paper, Section 3.4)


def coefficients(steps: int) -> list[tuple[float, float, float]]:
    """(a, b, c) of each step, with the safety factor in all rows of the table except the last."""
    safe = [(a / SAFETY, b / SAFETY**3, c / SAFETY**5) for a, b, c in POLAR_EXPRESS[:-1]]
    return [*safe, *[POLAR_EXPRESS[-1]] * steps][:steps]


def reciprocal(size: jax.Array) -> jax.Array:
    """1 / size; 0 if size is 0, so that zeros stay zeros. XLA computes the scalar before a matrix times it."""
    return materialised(jnp.where(size > 0, 1 / jnp.maximum(size, jnp.finfo(jnp.float32).tiny), 0))


def orthogonalised(x: jax.Array, steps: int = 5) -> jax.Array:
    """Approximates U V^T of the matrix x = U S V^T `[m, k]`: singular values from 1e-3 of the norm on become near 1.

    Factors of the products have x's dtype and sums are float32 (float32 factors are multiplied at full precision). The
    result is float32. Zeros stay zeros.
    """
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None

    def dot(a, b):
        return jnp.dot(a.astype(x.dtype), b.astype(x.dtype), precision=precision, preferred_element_type="float32")

    tall = x.shape[0] > x.shape[1]
    y = (x.T if tall else x).astype(jnp.float32)
    y = y * reciprocal(jnp.max(jnp.abs(y)))  # its squares must not underflow
    y = y * materialised(1 / jnp.maximum(SAFETY * jnp.linalg.norm(y), 1))
    for a, b, c in coefficients(steps):
        gram = dot(y, y.T)
        y = a * y + dot(b * gram + c * dot(gram, gram), y)
    return y.T if tall else y


STEPS = Range("1 to 10", "5 is usual; the result is exact to bfloat16 from 6 on", least=1, most=10)


@dataclasses.dataclass(frozen=True)
class NormuonSettings:
    """The options of NorMuon."""

    # normuon: the peak for the blocks' matrices; 0 = learning_rate
    muon_learning_rate: float = declare(0.0, AT_LEAST_0, facts=Facts.NOTHING)
    # normuon: decay of the momentum of the blocks' matrices
    muon_momentum: float = declare(0.95, BELOW_1, facts=Facts.NOTHING)
    # normuon: decay of the mean squares of their rows
    muon_beta2: float = declare(0.95, BELOW_1, facts=Facts.NOTHING)
    # normuon: steps of the orthogonalisation, 1 to 10
    muon_ns_steps: int = declare(5, STEPS, facts=Facts.COST)


class Momentum(NamedTuple):
    """NorMuon's state of a matrix `[m, k]`, or of a matrix of each expert, `[experts, m, k]`."""

    m: Any  # [..., m, k], float32 or bfloat16
    rows: Any  # float32 [..., m]: moving averages of the mean squares of the rows of O


def normuon(
    schedule: Schedule,
    *,
    matrices: Schedule | None = None,
    momentum: float = 0.95,
    beta2: float = 0.95,
    steps: int = 5,
    weight_decay: float = 0.1,
    m_dtype: str = "float32",
    **adam,
) -> Optimizer:
    """NorMuon for the blocks' matrices, AdamW for all other tensors.

    matrices: learning rate of the blocks' matrices, `schedule` if None. m_dtype: of the momentum and of AdamW's first
    moments. adam: the other options of `optim.adamw`.
    """
    rate = schedule if matrices is None else matrices

    def init(shape, shards):
        return Momentum(jnp.zeros(shape, m_dtype), jnp.zeros(shape[:-1], jnp.float32))

    def state_layout(layout: Layout) -> Momentum:
        return Momentum(layout, Layout(jax.P(), jax.P(), layers=layout.layers))

    def averaged(g, m, tensor: TensorContext):
        """The momentum with this gradient, float32."""
        return mix(momentum, m, g * tensor.scalars["clip"])

    def direction(m, old_rows):
        """`of_matrix`, of each expert's by itself."""
        has_experts = m.ndim == 3
        return jax.vmap(of_matrix)(m, old_rows) if has_experts else of_matrix(m, old_rows)

    def of_matrix(m, old_rows):
        """(O' of a whole matrix's momentum, of the size of AdamW's updates, and the new second moment of the rows)."""
        o = orthogonalised(materialised(m), steps)
        o, old_rows = materialised((o, old_rows))
        squares = materialised(jnp.mean(o * o, axis=1))
        rows = materialised(mix(beta2, old_rows, squares))
        o = o * materialised(1 / (jnp.sqrt(rows) + 1e-8))[:, None]
        return o * (RMS * o.size**0.5 * reciprocal(jnp.linalg.norm(o))), rows

    def moved(p, o, tensor: TensorContext):
        """Moves the weights in direction -o, with cautious weight decay."""
        old = p.astype(jnp.float32)
        new = old - tensor.scalars["matrices_lr"] * (o + jnp.where(o * old > 0, weight_decay * old, 0))
        return rounded(new, p.dtype, tensor)

    def apply(p, g, state: Momentum, tensor: TensorContext, dtype):
        m = averaged(g, state.m, tensor)
        o, rows = direction(_gathered(m.astype(dtype), tensor.layout), state.rows)
        new = moved(p, _own(o, tensor.layout), tensor)
        return new.astype(dtype), new, Momentum(m.astype(m_dtype), rows)

    def apply_to_group(p, g, state: Momentum, tensor: TensorContext, dtype):
        m = averaged(g, state.m, tensor)
        whole, old_rows = _one_for_each_device(m.astype(dtype), state.rows, tensor.layout)
        o, rows = _shards_of_each(*direction(whole, old_rows), tensor.layout, len(p))
        new = jax.vmap(lambda p, o, seed: moved(p, o, tensor._replace(seed=seed)))(p, o, tensor.seed)
        return new.astype(dtype), new, Momentum(m.astype(m_dtype), rows)

    def scalars(done: jax.Array, grad_norm: jax.Array) -> Scalars:
        return plain.scalars(done, grad_norm) | {"matrices_lr": jnp.float32(rate(done))}

    plain = adamw(schedule, weight_decay=weight_decay, m_dtype=m_dtype, **adam)
    return plain._replace(
        matrices=UpdateRule(init, state_layout, apply, apply_to_group=apply_to_group),
        scalars=scalars,
    )


OF_MATRICES = {"momentum": "muon_momentum", "beta2": "muon_beta2", "steps": "muon_ns_steps"}
NORMUON = OptimizerChoice(
    normuon,
    COMMON | ADAM | MOMENTS | OF_MATRICES,
    peaks={"matrices": "muon_learning_rate"},
    options=NormuonSettings,
    summary="blocks' matrices; others: adamw",
    whole_matrices=True,
)


def _divided(layout: Layout) -> list[tuple[int, tuple[str, ...]]]:
    """The dimensions of a matrix that are sharded, and the mesh axes of each."""
    entries = ((dim, active(*mesh_axes(entry))) for dim, entry in enumerate(layout.stored))
    return [(dim, axes) for dim, axes in entries if axes]


def _gathered(x: jax.Array, layout: Layout) -> jax.Array:
    """All-gathers the matrix that x is a shard of, typed as equal on all devices."""
    for dim, axes in _divided(layout):
        x = jax.lax.all_gather(x, axes, axis=dim, tiled=True, to="invarying")
    return x


def _own(x: jax.Array, layout: Layout) -> jax.Array:
    """This device's shard of a matrix that all devices have."""
    for dim, axes in _divided(layout):
        number, devices = device_number(*axes)
        size = x.shape[dim] // devices
        x = jax.lax.dynamic_slice_in_dim(x, number * size, size, dim)
    return x


def _one_for_each_device(x: jax.Array, rows: jax.Array, layout: Layout) -> tuple[jax.Array, jax.Array]:
    """All-to-all: gives each device one whole matrix of a group and its rows' second moment, or zeros.

    x: shards of the group's matrices; rows `[layers, m]`.
    """
    number, devices = device_number(*layout.stored_axes)
    missing = devices - len(x)
    x, rows = (jnp.pad(v, [(0, missing), *[(0, 0)] * (v.ndim - 1)]) for v in (x, rows))
    for dim, axes in _divided(layout):
        x = jax.lax.all_to_all(x, axes, split_axis=0, concat_axis=dim + 1, tiled=True)
    return x[0], jax.lax.dynamic_index_in_dim(rows, number, keepdims=False)


def _shards_of_each(o: jax.Array, rows: jax.Array, layout: Layout, layers: int) -> tuple[jax.Array, jax.Array]:
    """This device's shards of a group's matrices: the inverse of `_one_for_each_device`; rows equal on all devices."""
    o, rows = o[None], rows[None]
    for dim, axes in reversed(_divided(layout)):
        o = jax.lax.all_to_all(o, axes, split_axis=dim + 1, concat_axis=0, tiled=True)
        rows = jax.lax.all_gather(rows, axes, axis=0, tiled=True, to="invarying")
    return o[:layers], rows[:layers]
