"""Arithmetic that is rounded alike in two programs, so that a setting which changes no arithmetic changes no bit.

The same expression may be rounded differently in two programs. In each kernel (fusion) the compiler decides which
products and sums become a fused multiply-add (are contracted), which rounds once instead of twice. The following was
read from programs and object code of XLA:CPU (jax 0.12). LLVM contracts in GPU kernels as well; they were not examined.

* a x + b is contracted if both operations are in one basic block of one kernel. It is not if the product is computed
  in another kernel, or if the loop of a reduction is between the two.
* In a x + b y one product is contracted. Which one depends on what else is in the kernel: a reduction fused into it, or
  a second result (with new moments and new weights in one kernel, the other product was contracted than with new
  moments alone).
* Of two arrays x / y and g / y, where y is the same broadcast array, XLA multiplies one with 1 / y and divides the
  other, whichever it finds first. A softmax and its gradient are such a pair.
* The order of a sum over a small array is LLVM's choice for each function. A loop over layers whose arrays are small is
  one function (`sums_in_place` in step/gradients.py says what follows).
* rsqrt is an estimate that is refined, of 12 bits in 8 numbers at once and of 14 in 16 (AVX-512). How many there are
  depends on the kernel: 8 in a plain one, 16 in one that transposes or copies. 1 / sqrt(x) becomes rsqrt(x).
* x / a / y with a scalar a is rewritten by XLA to x / (a y) or to x (1 / a) / y, whichever rule matches first.

XLA fuses a value from host memory or from a gather with other operations than a value in device memory. It also inlines
a loop over one layer into the code around it. What several kernels read, it writes to memory in one program and
computes again in each of them in another. So:

* a sum of two products is rewritten with one product (`mix`, and `silu` in its derivative);
* matrices are multiplied with the reciprocals of scalars, and of sums along an axis (`quotient`);
* values that other arithmetic uses get a barrier (`materialised`) if that costs nothing: scalars, vectors, and arrays
  that are written to memory anyway.
"""

import jax


def materialised(tree):
    """The same values behind a barrier, which writes them to memory: no kernel both computes and uses them."""
    return jax.lax.optimization_barrier(tree)


def mix(decay: float, old: jax.Array, new: jax.Array) -> jax.Array:
    """The moving average decay x old + (1 - decay) x new, with a single product in the sum.

    `old` must not be a product and `new` must not be a sum. (In adamw8bit `old` is a product; its kernel says what it
    does instead.)
    """
    return decay * (old + (1 - decay) / decay * new) if decay else new


@jax.custom_jvp
def quotient(x: jax.Array, y: jax.Array) -> jax.Array:
    """x / y as x times 1 / y, in its derivatives too. y has the size 1 along an axis of x at least."""
    return x * (1 / y)


@quotient.defjvp
def _quotient_jvp(primals, tangents):
    x, y = primals
    dx, dy = tangents
    return quotient(x, y), dx * (1 / y) + -dy * x * (1 / (y * y))


@jax.custom_jvp
def silu(x: jax.Array) -> jax.Array:
    """x sigmoid(x), whose derivative has a single product in its sum; that of `jax.nn.silu` has two."""
    return x * jax.nn.sigmoid(x)


@silu.defjvp
def _silu_jvp(primals, tangents):
    (x,), (dx,) = primals, tangents
    s = jax.nn.sigmoid(x)
    return x * s, dx * (s * (1 + x * (1 - s)))
