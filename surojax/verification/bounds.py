"""Bounds on the differences in losses and gradient norms between a row and its reference, with reasons."""

import math
from typing import NamedTuple

import numpy as np

from surojax.config import Config

type Curve = list[tuple[float, float]]  # (loss, gradient norm) of each step


class Bound(NamedTuple):
    """The largest allowed difference between a row and its reference: relative, over all steps; and the reason for it.

    approximate: the setting computes with rounded numbers, so no difference at all means that it had no effect.
    first_norm: gradient norms are compared in the first step only. Rounding to 8 bits may change the sign of small
      gradients. AdamW turns them into updates of full size, so from the second step on the weights differ, and near a
      minimum the gradient norm depends on that difference more than on the error of the rounding.
    """

    loss: float
    grad_norm: float
    reason: str
    approximate: bool = False
    first_norm: bool = False


def expected_bounds(c: Config) -> dict[str, Bound]:
    """Returns {name in `Setting.expect`: bound}, for the dtypes and the recipe of a config."""
    same = Bound(0.0, 0.0, "no arithmetic changes, so the results must be bit-exact")
    mean = "; the errors are independent and average out (gradient norm: first step only)"
    amplified = "AdamW divides by the root of the second moment, which is tiny in the first steps and amplifies this"
    exact = c.model_dtype == c.accum_dtype == "float32"
    if c.recipe != "bf16":
        order = _quantised_again(c.recipe, amplified)
    elif exact:
        sums = "sums are in another order: float32 rounds them by 6e-8, so gradients differ by 2e-6 at most"
        order = Bound(1e-4, 1e-4, f"{sums}; {amplified}")
    else:
        sums = "sums are in another order: bfloat16 rounds each number of a gradient by 2e-3"
        order = Bound(1e-3, 5e-2, f"{sums}; {amplified} (measured: 6e-5 and 8e-3)")
    rounded = "saved residuals are rounded to bfloat16, recomputed ones XLA may keep in float32"
    rounded += "" if c.recipe == "bf16" else f"; {order.reason}"
    # With an 8-bit or 4-bit recipe, any difference grows as much as one from another order of sums.
    drift = order if order.first_norm else same

    def approximate(loss: float, grad_norm: float, error: str) -> Bound:
        return Bound(loss + drift.loss, grad_norm + drift.grad_norm, error + mean, approximate=True, first_norm=True)

    return {
        "same": same,
        "saved": same if exact else order._replace(reason=rounded),
        # A head that is also the embedding gets the gradients of a group's heads before those of its embeddings, and
        # with stages in the order of their schedule.
        "grouped": order if c.model.tie_word_embeddings else same,
        "order": order,
        "nf4": approximate(1e-2, 1e-1, "weights in NF4, each off by up to 0.152 of its block's largest"),
        "fp4": approximate(1e-2, 1e-1, "weights in NVFP4 or MXFP4, each off by up to 1/4 of its block's largest"),
        "adapters": Bound(1.0, 1e2, "other parameters are trained", approximate=True),
        "another": Bound(1.0, 1e2, "it is another model", approximate=True),
        "documents": Bound(1.0, 1.0, "no token sees the documents before its own", approximate=True),
        "sent_int8": approximate(1e-2, 1e-2, "gradients sent in int8, each off by up to 1/254 of its block's largest"),
        "int8": approximate(1e-2, 1e-2, "weights in int8, each off by up to 1/254 of its block's largest"),
        "fp8": approximate(2e-2, 3e-2, "weights in fp8, each off by up to 1/16 of itself"),
    }


def _quantised_again(recipe: str, amplified: str) -> Bound:
    """Returns the bound for rows that change the order of sums, with a recipe that rounds to 8 or 4 bits.

    Another order of a sum changes its last bit, and rounding to 8 or 4 bits may then give the neighbouring number. This
    happens to few numbers in the first step. From then on the weights differ, and it happens to more in every step.
    """
    borders = "sums are in another order: a few of the changed operands are rounded to the neighbouring number of"
    if recipe == "nvfp4":
        random = (
            "random numbers depend on the microbatch and on the devices with other tokens, and change the gradients"
        )
        reason = f"{borders} 4 bits, a quarter away; {random}; {amplified} (measured: 6e-3 and 1e-2)"
        return Bound(2e-2, 5e-2, f"{reason}; gradient norm: first step only", first_norm=True)
    reason = f"{borders} 8 bits, an eighth or a quarter away; {amplified} (measured: 8e-4 and 6e-4)"
    return Bound(5e-3, 5e-3, f"{reason}; gradient norm: first step only", first_norm=True)


def judge(actual: Curve, expected: Curve, bound: Bound) -> tuple[str, float, float, str]:
    """Returns (status, largest relative difference of the loss, of the gradient norm, reason of a failure or "")."""
    a = np.array(actual)
    b = np.array(expected)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return "FAIL", math.nan, math.nan, "a loss or gradient norm is not finite"
    differences = np.abs(a - b) / np.maximum(np.abs(b), 1e-30)
    if bound.approximate and not differences.any():
        return "FAIL", 0.0, 0.0, "no difference at all: the setting did nothing"
    loss = float(differences[:, 0].max())
    grad_norm = float(differences[: 1 if bound.first_norm else None, 1].max())
    compared = (("loss", loss, bound.loss), ("gradient norm", grad_norm, bound.grad_norm))
    too_far = [name for name, x, most in compared if x > most]
    first = next((i for i, same in enumerate((a == b).all(axis=1)) if not same), 0)
    why = f"{' and '.join(too_far)} too far; the first difference is in step {first + 1}" if too_far else ""
    return "FAIL" if too_far else "pass", loss, grad_norm, why
