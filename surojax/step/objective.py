"""What training minimises, as a function of the last hidden states and of a batch's arrays beside its inputs.

An objective names these arrays and computes loss and gradients for a slice of tokens, so that the logits of one slice
are in memory at a time (outer.py has the loop). Nothing else in a step knows what a label is. To add an objective, add
a class with the members of `Objective`, and make it in assembly.py.

The head's matrix is replicated, or its rows are sharded over mesh axes, see outer.py. Shape suffixes: N tokens of a
slice on this device, M tokens of a slice on all devices of the vocabulary's axes, D hidden size, V vocabulary, v rows
of the vocabulary on one device.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp

from pallas_kernels import cross_entropy as kernel
from surojax.models.linear import linear
from surojax.models.loss import sharded_cross_entropy
from surojax.models.model import Model
from surojax.models.operations import softcapped
from surojax.parallel.collectives import device_number

type Axes = tuple[str, ...]  # mesh axes over which the vocabulary is sharded; () if every device has all of it
type Targets = dict[str, jax.Array]  # an objective's arrays by name, int32, an entry for each token


class Objective(Protocol):
    """A loss that is a sum over tokens, divided by the number of its terms."""

    @property
    def targets(self) -> tuple[str, ...]:
        """The names of the arrays `[A, B, S]` of a batch that the loss reads."""
        ...

    def counted(self, targets: Targets) -> jax.Array:
        """Whether each token has a term, bool, of the arrays' shape."""
        ...

    def count(self, targets: Targets) -> jax.Array:
        """The number of terms, int32 []."""
        ...

    def loss_and_gradients(
        self, model: Model, used: dict, trained: Sequence[str], x_ND: jax.Array, targets: Targets, scale, axes: Axes
    ) -> tuple[jax.Array, dict, jax.Array]:
        """(summed loss that is reported, gradients of `trained`, gradient of x) of a slice of tokens.

        used: the outer parameters that the head reads, of which `trained` are trained. scale: the gradients are of this
        times the loss. If the vocabulary is sharded, the loss is this device's term of the sum over all devices.
        """
        ...

    def loss(self, model: Model, outer: dict, x_ND: jax.Array, targets: Targets, axes: Axes) -> jax.Array:
        """The summed loss of `loss_and_gradients`, forward only."""
        ...


@dataclasses.dataclass(frozen=True)
class CrossEntropy:
    """Cross-entropy of the next token, in nats. Labels < 0 are ignored and not counted.

    z_loss: weight of logsumexp(logits)^2 per token, in the gradients and not in the reported loss (PaLM).
    """

    z_loss: float = 0.0
    targets: tuple[str, ...] = ("labels",)

    def counted(self, targets: Targets) -> jax.Array:
        """See `Objective`."""
        return targets["labels"] >= 0

    def count(self, targets: Targets) -> jax.Array:
        """See `Objective`."""
        return jnp.sum(self.counted(targets), dtype=jnp.int32)

    def loss_and_gradients(
        self, model: Model, used: dict, trained: Sequence[str], x_ND: jax.Array, targets: Targets, scale, axes: Axes
    ) -> tuple[jax.Array, dict, jax.Array]:
        """See `Objective`."""
        of_slice = self._sharded if axes else self._replicated
        return of_slice(model, used, trained, x_ND, targets["labels"], scale, axes)

    def loss(self, model: Model, outer: dict, x_ND: jax.Array, targets: Targets, axes: Axes) -> jax.Array:
        """See `Objective`."""
        y_ND = model.final(outer, x_ND)
        labels_N = targets["labels"]
        if axes:
            y_MD, labels_M, mine_M = _gather_slice(axes, y_ND, labels_N)
            logits_Mv, _ = _logits(model, y_MD, outer[model.head])
            return sharded_cross_entropy(logits_Mv, labels_M, mine_M, axes)[0]
        logits_NV, _ = _logits(model, y_ND, outer[model.head])
        return -jnp.sum(kernel.logprob(logits_NV, labels_N, implementation=model.precision.implementation))

    def _replicated(self, model: Model, used: dict, trained: Sequence[str], x_ND, labels_N, scale, _: Axes):
        y_ND, final_vjp, table_VD = _final(model, used, x_ND)
        logits_NV, capped_vjp = _logits(model, y_ND, table_VD)
        out = kernel.loss_and_gradient(
            logits_NV, labels_N, scale, z_loss=self.z_loss, in_place=True, implementation=model.precision.implementation
        )
        d_table, dy_ND = _products(model, trained, capped_vjp(out.d_logits), y_ND, table_VD)
        d_others, dx_ND = final_vjp(dy_ND)
        grads = d_others | d_table
        return -jnp.sum(out.logprob), {name: grads[name] for name in trained}, dx_ND

    def _sharded(self, model: Model, used: dict, trained: Sequence[str], x_ND, labels_N, scale, axes: Axes):
        y_ND, final_vjp, table_vD = _final(model, used, x_ND)
        y_MD, labels_M, mine_M = _gather_slice(axes, y_ND, labels_N)
        logits_Mv, capped_vjp = _logits(model, y_MD, table_vD)
        value, d_logits_Mv = sharded_cross_entropy(logits_Mv, labels_M, mine_M, axes, self.z_loss)
        d_logits_Mv = capped_vjp((d_logits_Mv * scale).astype(table_vD.dtype))
        d_table, dy_MD = _products(model, trained, d_logits_Mv, y_MD, table_vD)
        dy_ND = jax.lax.psum_scatter(dy_MD, axes, scatter_dimension=0, tiled=True)
        d_others, dx_ND = final_vjp(dy_ND)
        grads = d_others | d_table
        return value, {name: grads[name] for name in trained}, dx_ND


@dataclasses.dataclass(frozen=True)
class LossOfLogits:
    """A loss of the logits of each token, which JAX differentiates. Labels < 0 are not counted, and their loss is 0.

    of_tokens: (float32 logits `[N, V]`, labels `[N]`, at least 0) -> losses `[N]`. The vocabulary is not sharded.
    """

    of_tokens: Callable[[jax.Array, jax.Array], jax.Array]
    targets: tuple[str, ...] = ("labels",)

    def counted(self, targets: Targets) -> jax.Array:
        """See `Objective`."""
        return targets["labels"] >= 0

    def count(self, targets: Targets) -> jax.Array:
        """See `Objective`."""
        return jnp.sum(self.counted(targets), dtype=jnp.int32)

    def loss_and_gradients(
        self, model: Model, used: dict, trained: Sequence[str], x_ND: jax.Array, targets: Targets, scale, axes: Axes
    ) -> tuple[jax.Array, dict, jax.Array]:
        """See `Objective`."""
        loss, vjp = jax.vjp(lambda used, x_ND: self.loss(model, used, x_ND, targets, axes), used, x_ND)
        d_used, dx_ND = vjp(scale + jnp.zeros_like(loss))
        return loss, {name: d_used[name] for name in trained}, dx_ND

    def loss(self, model: Model, outer: dict, x_ND: jax.Array, targets: Targets, axes: Axes) -> jax.Array:
        """See `Objective`."""
        assert not axes, "a sharded vocabulary is refused by assembly.check_objective"
        labels_N = targets["labels"]
        logits_NV, _ = _logits(model, model.final(outer, x_ND), outer[model.head])
        losses_N = self.of_tokens(logits_NV.astype(jnp.float32), jnp.maximum(labels_N, 0))
        return jnp.sum(jnp.where(labels_N >= 0, losses_N, 0.0))


def _final(model: Model, used: dict, x_ND):
    """(x after the final norm, the norm's vjp, the head's matrix)."""
    others = {name: w for name, w in used.items() if name != model.head}
    return *jax.vjp(model.final, others, x_ND), used[model.head]


def _logits(model: Model, y_ND: jax.Array, table_VD: jax.Array) -> tuple[jax.Array, Callable]:
    """(logits `[N, V]`, a function from their gradient to that of the product of y and the head's matrix)."""
    product_NV = linear(y_ND, table_VD)
    if not model.logit_softcap:
        return product_NV, lambda d_logits_NV: d_logits_NV
    logits_NV, vjp = jax.vjp(lambda z_NV: softcapped(z_NV, model.logit_softcap), product_NV)
    return logits_NV, lambda d_logits_NV: vjp(d_logits_NV)[0]


def _products(model: Model, trained: Sequence[str], d_logits_Mv, y_MD, table_vD) -> tuple[dict, jax.Array]:
    """(gradient of the head's matrix by its name, if it is trained; gradient of y) from these of the logits."""
    d_table = {}
    if model.head in trained:
        d_table[model.head] = jax.lax.dot_general(d_logits_Mv, y_MD, (((0,), (0,)), ((), ())))
    return d_table, d_logits_Mv @ table_vD


def _gather_slice(axes: Axes, y_ND, labels_N):
    """(activations of all devices, their labels, whether a token is from this device)."""
    y_MD, labels_M = (jax.lax.all_gather(v, axes, axis=0, tiled=True) for v in (y_ND, labels_N))
    owner_M = jnp.arange(labels_M.size) // labels_N.size
    return y_MD, labels_M, owner_M == device_number(*axes)[0]
