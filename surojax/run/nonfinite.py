"""Stops a run whose loss or gradient norm is not finite, and names the process in which that began.

Loss and norm are sums over all devices, so all processes see the same NaN at the same step. Each asks its own devices
whether their values were finite before any sum (step/totals.py), and they tell each other. A NaN in a shard of
the weights is in the values of all devices that all-gather it, and one in an activation in those of all that it is sent
to: then several processes, or all, are named. One that begins in the gradient of a weight reaches none of these values.
"""

import math
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils


class NonFiniteLoss(FloatingPointError):
    """Raised when the loss or the gradient norm becomes NaN or infinite; the run stops."""


def check_finite(
    step: int, loss: float, grad_norm: float, last_checkpoint: Path | None, finite: jax.Array | None = None
) -> None:
    """Raises NonFiniteLoss if the loss or the gradient norm is NaN or infinite, in every process.

    finite: bool `[devices, 2]` of the step's metrics; None with one process, which need not be named.
    """
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return
    saved = f"the last checkpoint is {last_checkpoint}" if last_checkpoint else "there is no checkpoint yet"
    began = "" if finite is None else f" {_where(_of_processes(finite))}."
    raise NonFiniteLoss(
        f"step {step}: loss {loss}, gradient norm {grad_norm}; expected finite numbers, so the run stops here and "
        f"{saved}.{began} Try a lower learning_rate, a longer warmup_steps, a smaller max_grad_norm, or "
        "model_dtype='float32'."
    )


def _of_processes(finite: jax.Array) -> np.ndarray:
    """Gathers bool `[processes, 2]`: whether all of a process' devices had finite activations, and gradients."""
    own = np.concatenate([np.asarray(shard.data) for shard in finite.addressable_shards]).all(axis=0)
    return multihost_utils.process_allgather(own)


def _where(finite: np.ndarray) -> str:
    """Names the processes, and activations or gradients, where values were first not finite, from `[processes, 2]`."""
    for which, kind in enumerate(("activations", "gradients")):
        bad = np.flatnonzero(~finite[:, which])
        if len(bad) == 1:
            return f"It began in the {kind} of process {bad[0]}"
        if len(bad) == len(finite):
            shared = "what they share, as weights, or in activations that they exchange"
            return f"The {kind} of all processes at once are not finite: it began in {shared}"
        if len(bad):
            return f"It began in the {kind} of processes {', '.join(map(str, bad))}, which share values before any sum"
    finite_here = "activations and the embeddings' gradients were finite in each"
    return f"It began in gradients of weights, or in a sum over the processes: {finite_here}"
