"""AdamW with the moments of matrices and tables in 8 bits (pallas_kernels/adamw8bit_update.py)."""

from typing import Any, NamedTuple

import jax

from pallas_kernels import adamw8bit_update as kernel
from surojax.optim.adamw import ADAM, MOMENTS, adamw
from surojax.optim.learning_rate import Schedule
from surojax.optim.optimizer import COMMON, Optimizer, OptimizerChoice, Scalars, TensorContext, UpdateRule
from surojax.placement.layout import Layout


class Moments8bit(NamedTuple):
    """State of a matrix under `adamw8bit`; pallas_kernels/adamw8bit_update.py defines the codes."""

    m: Any  # int8, the shape of the matrix
    m_scale: Any  # float32 [..., n / block]
    v: Any  # uint8, the shape of the matrix
    v_scale: Any  # float32 [..., n / block]


def adamw8bit(
    schedule: Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    max_grad_norm: float = 1.0,
    implementation: Any = "xla",
    **vectors,
) -> Optimizer:
    """AdamW with the moments of matrices and tables in 8 bits; vectors: m_dtype and v_dtype of all other moments.

    A block never spans two shards: its size divides the length of a shard's row.
    """
    plain = adamw(schedule, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, max_grad_norm=max_grad_norm, **vectors)

    def init(shape, shards):
        return Moments8bit(*kernel.zero_moments(shape, kernel.moment_block_size(shape[-1] // shards)))

    def state_layout(layout: Layout) -> Moments8bit:
        return Moments8bit(layout, layout, layout, layout)

    def apply(p, g, state: Moments8bit, tensor: TensorContext, dtype):
        how = {"work_dtype": dtype, "in_place": True, "implementation": implementation}
        new = kernel.adamw8bit(p, g, *state, tensor.scalars["hyper"], tensor.seed, **how)
        return new.work, new.p, Moments8bit(new.m, new.m_scale, new.v, new.v_scale)

    def apply_to_stack(p, state: Moments8bit):
        # XLA's reference needs memory for a second stack; the kernel updates the stack in place.
        return apply if kernel.serves(p.size // state.m_scale.size, implementation) else None

    def scalars(done: jax.Array, grad_norm: jax.Array) -> Scalars:
        shared = plain.scalars(done, grad_norm)
        lr, c1, c2, clip = (shared[name] for name in ("lr", "c1", "c2", "clip"))
        return shared | {"hyper": kernel.Hyper(lr, b1, b2, eps, weight_decay, c1, c2, clip).vector()}

    layer_by_layer = UpdateRule(init, state_layout, apply)
    in_one_pass = layer_by_layer._replace(apply_to_stack=apply_to_stack)
    return plain._replace(matrices=in_one_pass, tables=layer_by_layer, scalars=scalars)


ADAMW8BIT = OptimizerChoice(
    adamw8bit,
    COMMON | ADAM | MOMENTS | {"implementation": "implementation"},
    summary="8-bit moments of matrices",
)
