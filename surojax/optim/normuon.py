"""NorMuon: orthogonalised momentum of a matrix, its rows scaled to equal size (Li et al. 2025, arXiv:2510.05491).

    M' = b1 M + (1 - b1) g                    O = U V^T of M' = U S V^T, by `orthogonalised`
    v' = b2 v + (1 - b2) mean of O^2 over each row (neuron)         O' = O / (sqrt(v') + eps)
    W' = W - lr (0.2 sqrt(m k) / |O'| O'  +  decay W where O' W > 0)

for matrices W `[m, k]` of the blocks. 0.2 is the root mean square of AdamW's updates, so that AdamW's learning rates
and decay fit (Liu et al. 2025, arXiv:2502.16982). As in the paper, there is no Nesterov momentum and no bias correction
(the norm of O' cancels it). The decay is cautious: it applies only to weights that the update makes smaller too (Chen
et al. 2025, arXiv:2510.12402). Embedding, head and vectors have AdamW's rule, with AdamW's learning rate.

**Sharded.** Master weights and momentum are sharded, but the orthogonalisation needs the full matrix. So momentum is
all-gathered over the shards, and over the devices of a tensor-parallel group that divide the matrix, in the dtype of
the products (`model_dtype`: bfloat16 on GPUs, to which they would round it anyway). Every device computes all of O and
keeps its own shard. That costs each device per step, for P parameters in the blocks and n devices:

    (n - 1) / n x P x 2 bytes received, as many as ZeRO-1's all-gather after the update, and
    steps x (4 min(m, k)^2 max(m, k) + 2 min(m, k)^3) FLOPs for each matrix, not divided by n.

For Llama-7B (5 steps): 13 GB and 6.8e14 FLOPs on every device, as many as 17 thousand tokens take. Sending each layer
to one device (an all-to-all there and one back) would divide the bytes by n / 2 and the FLOPs by n; not built.

The second moment of the rows is replicated (4 bytes a row), so that no norm has to be summed over devices.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from surojax.numerics.rounding import materialised, mix
from surojax.optim.optimizer import Optimizer, Rule, Scalars, Schedule, TensorContext, adamw, rounded
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


class Momentum(NamedTuple):
    """NorMuon's state of a matrix `[m, k]`."""

    m: Any  # [m, k], float32 or bfloat16
    rows: Any  # float32 [m]: moving averages of the mean squares of the rows of O


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
        return Momentum(jnp.zeros(shape, m_dtype), jnp.zeros(shape[:1], jnp.float32))

    def state_layout(layout: Layout) -> Momentum:
        return Momentum(layout, Layout(jax.P(), jax.P(), layers=layout.layers))

    def apply(p, g, state: Momentum, tensor: TensorContext, dtype):
        g = g.astype(jnp.float32) * tensor.scalars["clip"]
        m = mix(momentum, state.m.astype(jnp.float32), g)
        o = orthogonalised(_gathered(m.astype(dtype), tensor.layout), steps)
        o, old_rows = materialised((o, state.rows))
        squares = materialised(jnp.mean(o * o, axis=1))
        rows = materialised(mix(beta2, old_rows, squares))
        o = o * materialised(1 / (jnp.sqrt(rows) + 1e-8))[:, None]
        o = o * (RMS * o.size**0.5 * reciprocal(jnp.linalg.norm(o)))
        o = _own(o, tensor.layout)
        lr = tensor.scalars["matrices_lr"]
        old = p.astype(jnp.float32)
        new = old - lr * (o + jnp.where(o * old > 0, weight_decay * old, 0))
        new = rounded(new, p.dtype, tensor)
        return new.astype(dtype), new, Momentum(m.astype(m_dtype), rows)

    def scalars(done: jax.Array, grad_norm: jax.Array) -> Scalars:
        return plain.scalars(done, grad_norm) | {"matrices_lr": jnp.float32(rate(done))}

    plain = adamw(schedule, weight_decay=weight_decay, m_dtype=m_dtype, **adam)
    return plain._replace(
        matrices=Rule(init, state_layout, apply, gathers=True, flops=functools.partial(flops, steps=steps)),
        scalars=scalars,
    )


def flops(matrices, num_layers: int, steps: int) -> int:
    """FLOPs of `orthogonalised` in a step, for matrices of these shapes `(m, k)` in each layer."""
    of_matrix = (4 * min(m, k) ** 2 * max(m, k) + 2 * min(m, k) ** 3 for m, k in matrices)
    return steps * num_layers * sum(of_matrix)


def _gathered(x: jax.Array, layout: Layout) -> jax.Array:
    """The matrix of which x is a shard, all-gathered and typed as equal on all devices."""
    for dim, entry in enumerate(layout.stored):
        if axes := active(*mesh_axes(entry)):
            x = jax.lax.all_gather(x, axes, axis=dim, tiled=True, to="invarying")
    return x


def _own(x: jax.Array, layout: Layout) -> jax.Array:
    """This device's shard of a matrix that all devices have."""
    for dim, entry in enumerate(layout.stored):
        number, devices = device_number(*mesh_axes(entry))
        if devices > 1:
            size = x.shape[dim] // devices
            x = jax.lax.dynamic_slice_in_dim(x, number * size, size, dim)
    return x
