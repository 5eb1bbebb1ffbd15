"""Arithmetic that is rounded alike in two programs, so that a setting which changes no arithmetic changes no bit.

The same expression may be rounded differently in two programs, because the compiler decides in each kernel (fusion)
what becomes a fused multiply-add, which rounds once where a product and a sum round twice. Read from programs and from
object code of XLA:CPU (jax 0.12); kernels of GPUs are contracted by LLVM as well, and were not looked at:

* a x + b is contracted if both operations are in one basic block of one kernel. A kernel that only reads the product,
  or a reduction whose loop stands between the two, prevents it.
* of a x + b y one product is contracted. Which one depends on what else is in the kernel: a reduction fused into it,
  or a second result (new moments in the kernel of the new weights contracted the other product than in their own).
* x / a / y by a scalar a is rewritten by XLA to x / (a y) or to x (1 / a) / y, in the order in which it finds them.

XLA fuses other neighbours where a value comes from host memory or a gather than where it rests on the device, and
dissolves a loop over one layer into what is around it. So:

* sums of two products are written with one (`mix`);
* matrices are multiplied with the reciprocals of scalars;
* values that feed other arithmetic are ended by a barrier (`materialised`) where that costs nothing: scalars, vectors,
  what is in memory anyway.
"""

import jax


def materialised(tree):
    """The values, written to memory: no kernel both produces and uses them, in any program."""
    return jax.lax.optimization_barrier(tree)


def mix(decay: float, old: jax.Array, new: jax.Array) -> jax.Array:
    """decay x old + (1 - decay) x new, the moving average, with a single product in the sum.

    `old` must not be a product (those of adamw8bit are, and its kernel says what it does about that), `new` no sum.
    """
    return decay * (old + (1 - decay) / decay * new) if decay else new
