"""Values that are rounded alike in two programs, so that a setting which changes no arithmetic changes no bit.

The same expression may be rounded differently in two programs, because the compiler decides per kernel (fusion) how to
compute it. Read from programs compiled by XLA:CPU (jax 0.12); LLVM makes GPU kernels by the same rules:

* a x + b becomes one fused multiply-add, rounded once, if the product and the sum are in one basic block of one kernel,
  else it is rounded twice. In a x + b y one of the two products is contracted; which one depends on the rest of the
  kernel: a reduction fused into it puts one product in front of the loop, out of the sum's reach.
* a reduction adds in another order in a kernel of its own than fused with what produces or uses it.

What rests in host memory, or comes from a gather, is read and written by other operations than what rests on the
device, so XLA fuses other neighbours. A barrier ends a kernel in every program. It costs a write and a read of the
value, so it stands around scalars, vectors, and what is in memory anyway; not around elementwise expressions of whole
matrices, which are one fusion with the same expression in every program.
"""

import jax


def materialised(tree):
    """The values, written to memory: no kernel both produces and uses them, in any program."""
    return jax.lax.optimization_barrier(tree)
