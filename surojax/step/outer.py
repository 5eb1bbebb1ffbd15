"""The outer layers: embedding, final norm and head, with the objective; replicated, or parallel over the vocabulary.

Replicated (the default): every device has all rows of the embedding and of the head. The gradients are summed over the
devices once per step.

Sharded (`shard_outer`: over `dp_shard x cp`; tensor parallelism: over `tp`; or both): each of the n devices has V / n
rows of the embedding and of the head, and of their accumulators. Each has tokens of its own: of other sequences, or of
another part of the same sequences. Weights are never all-gathered; tokens are communicated instead:

* The embedding all-gathers the token ids, looks up the rows that this device has, and reduce-scatters the result.
* The head all-gathers a slice of activations and computes this device's part of the logits. Only the maximum and the
  sum of exponentials are reduced over the devices, as in Megatron-LM (Shoeybi et al. 2019).

All-gathering the weights would send V rows three times per microbatch; this sends as many rows as there are tokens. For
Qwen's vocabulary of 152k and 4 x 2048 tokens that is 18 times less, and the unsharded 1.5 GB matrix and its gradient
are never in memory. The gradient of a shard needs no reduction.

Shape suffixes: B batch, S this
device's part of the sequence, D hidden size, C slices of tokens, N tokens of a slice on this device, M tokens of a
slice on all devices of `axes`, V vocabulary, v rows of the vocabulary on one device.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from surojax.models.channels import LAYER_INPUT_NORM
from surojax.models.model import Model
from surojax.models.operations import normalised
from surojax.numerics.ordered_sums import add_rows
from surojax.objectives.distillation import Labelling
from surojax.objectives.objective import (
    LABELS,
    REFERENCE,
    WEIGHTS,
    Axes,
    CrossEntropy,
    Objective,
    OfLogProbabilities,
    OfTokens,
    Sums,
)
from surojax.parallel.collectives import device_number, varying
from surojax.placement.mesh import AXES
from surojax.placement.param import OUTER
from surojax.step.gradients import add
from surojax.step.spec import Engine


@dataclasses.dataclass(frozen=True)
class OuterLayers:
    """Embedding, final norm and head on this device, with the objective.

    chunks: slices of tokens in head and loss. axes: the mesh axes over which the vocabulary is sharded; () if it is
    replicated.
    """

    model: Model
    objective: Objective | OfLogProbabilities | Labelling
    chunks: int
    axes: Axes
    weights: dict[str, jax.Array]

    @classmethod
    def of(cls, engine: Engine, weights: dict) -> "OuterLayers":
        """Makes the outer layers of an engine. weights: work weights by section."""
        outer = varying(weights[OUTER])
        return cls(engine.model, engine.objective, engine.lmhead_chunks, engine.vocabulary_axes, outer)

    def embed(self, tokens_BS: jax.Array) -> jax.Array:
        """Returns the first layer's input `[B, S, W]`: embeddings of the tokens, and what is beside them."""
        return first_input(self.model, self.weights, tokens_BS, self.axes)

    def push_embed(self, grads: dict, tokens_BS: jax.Array, dx_BSD: jax.Array) -> dict:
        """The accumulators of the outer layers plus the gradients of `embed`, of what is trained."""
        dx_BSD, d_norm = self._without_beside(tokens_BS, dx_BSD)
        if LAYER_INPUT_NORM in grads:
            grads = grads | {LAYER_INPUT_NORM: grads[LAYER_INPUT_NORM] + d_norm.astype(grads[LAYER_INPUT_NORM].dtype)}
        if "embed" not in grads:
            return grads
        table = grads["embed"]
        dx_BSD = self._into_table(tokens_BS, dx_BSD)
        rows = tokens_BS
        if self.axes:
            tokens, dx_BSD = (jax.lax.all_gather(v, self.axes, axis=0, tiled=True) for v in (tokens_BS, dx_BSD))
            rows, here = local_rows(table, tokens, self.axes)
            rows = jnp.where(here, rows, table.shape[0])  # a row out of bounds is dropped
        return grads | {"embed": add_rows(table, rows.reshape(-1), dx_BSD.reshape(-1, dx_BSD.shape[-1]))}

    def _without_beside(self, tokens_BS: jax.Array, dx_BSW: jax.Array) -> tuple[jax.Array, Any]:
        """Returns the gradients of embeddings `[B, S, D]`, and of the norm of layers' own inputs, if there is one."""
        if not self.model.channels.sizes:
            return dx_BSW, None
        zeros_BSD = varying(jnp.zeros((*tokens_BS.shape, self.model.hidden_size), dx_BSW.dtype), AXES)
        norm_P = self.weights.get(LAYER_INPUT_NORM)
        _, vjp = jax.vjp(lambda x, norm: self.model.channels.first(x, norm, tokens_BS), zeros_BSD, norm_P)
        return vjp(dx_BSW)

    def _into_table(self, tokens_BS: jax.Array, dx_BSD: jax.Array) -> jax.Array:
        """Returns the gradient of the tokens' rows of the table, from that of `embed`'s result."""
        if self.model.embedding_norm_eps is None:
            return scaled(self.model, dx_BSD)
        x_BSD = table_rows(self.weights["embed"], tokens_BS, self.axes)
        return jax.vjp(lambda x: scaled(self.model, x), x_BSD)[1](dx_BSD)[0]

    @jax.named_scope("head")
    def head(
        self, grads: dict, x_BSD: jax.Array, targets: dict[str, jax.Array], scale: jax.Array
    ) -> tuple[Sums, jax.Array, dict]:
        """(the summed loss, and other sums; d (scale * loss) / dx; outer accumulators plus the head's gradients).

        targets: the objective's arrays `[B, S]`, or `[B, S, width]`, by name. Loss and gradient of a slice of tokens
        are computed together, so the logits of one slice are in memory at a time. They are never recomputed, except for
        an `OfLogProbabilities`, whose weights follow from all slices. dx is written over x. No gradient is
        computed of what has no accumulator in `grads`.
        """
        if isinstance(self.objective, OfLogProbabilities):
            of_tokens = self.objective.of_tokens
            sums, weights_BS = self.objective.sums_and_weights(self.values(of_tokens, x_BSD, targets), targets)
            targets = {LABELS: targets[LABELS], WEIGHTS: weights_BS}
            _, x_BSD, grads = self._gradients(of_tokens, grads, x_BSD, targets, scale)
            return sums, x_BSD, grads
        assert not isinstance(self.objective, Labelling), "labels of a teacher have no gradients"
        loss, x_BSD, grads = self._gradients(self.objective, grads, x_BSD, targets, scale)
        return {"loss": loss}, x_BSD, grads

    def _gradients(
        self,
        objective: Objective | OfTokens,
        grads: dict,
        x_BSD: jax.Array,
        targets: dict[str, jax.Array],
        scale: jax.Array,
    ) -> tuple[jax.Array, jax.Array, dict]:
        """Like `head`, for an objective that is a sum over tokens."""
        x_ND = x_BSD.reshape(-1, x_BSD.shape[-1])
        targets_N = {name: array.reshape(-1, *array.shape[2:]) for name, array in targets.items()}
        used = {name: self.weights[name] for name in self.model.head_uses}
        n = len(x_ND) // self.chunks
        trained = [name for name in used if name in grads]

        def chunk(c, carry):
            x_ND, grads, total = carry
            x, slice_targets = jax.tree.map(lambda v: jax.lax.dynamic_slice_in_dim(v, c * n, n), (x_ND, targets_N))
            loss, d_used, dx = objective.loss_and_gradients(
                self.model, used, trained, x, slice_targets, scale, self.axes
            )
            grads = grads | add({name: grads[name] for name in trained}, d_used)
            return jax.lax.dynamic_update_slice_in_dim(x_ND, dx, c * n, 0), grads, total + loss

        x_ND, grads, total = jax.lax.fori_loop(0, self.chunks, chunk, (x_ND, grads, varying(jnp.float32(0), AXES)))
        return total, x_ND.reshape(x_BSD.shape), grads

    def loss(self, x_BSD: jax.Array, targets: dict[str, jax.Array]) -> Sums:
        """Computes the summed loss, and other sums, forward only: this device's terms of the sums over devices."""
        objective = self.objective
        if isinstance(objective, OfLogProbabilities):
            return objective.sums(self.values(objective.of_tokens, x_BSD, targets), targets)
        if isinstance(objective, Labelling):
            return objective.sums(self.model, self.weights, x_BSD, self.chunks)
        x_CND, targets_CN = self._slices(x_BSD, targets)

        def chunk(c, total):
            slice_targets, x_ND = jax.tree.map(lambda v: v[c], (targets_CN, x_CND))
            return total + objective.loss(self.model, self.weights, x_ND, slice_targets, self.axes)

        return {"loss": jax.lax.fori_loop(0, self.chunks, chunk, varying(jnp.float32(0), AXES))}

    def with_reference(self, targets: dict[str, jax.Array], x_BSD: jax.Array | None = None) -> dict[str, jax.Array]:
        """Adds the log-probabilities of a reference to the targets. x_BSD: its last hidden states; None without one."""
        return targets if x_BSD is None else targets | {REFERENCE: self.values(CrossEntropy(), x_BSD, targets)}

    def values(self, of_tokens: OfTokens, x_BSD: jax.Array, targets: dict[str, jax.Array]) -> jax.Array:
        """Computes one number per token of this device, float32 `[B, S]`, in slices as the loss."""
        x_CND, labels_CN = self._slices(x_BSD, targets[LABELS])

        def chunk(c, value_CN):
            value_N = of_tokens.value(self.model, self.weights, x_CND[c], {LABELS: labels_CN[c]}, self.axes)
            return value_CN.at[c].set(varying(value_N, AXES))

        zeros = varying(jnp.zeros(labels_CN.shape, jnp.float32), AXES)
        return jax.lax.fori_loop(0, self.chunks, chunk, zeros).reshape(targets[LABELS].shape)

    def _slices(self, *of_tokens: Any) -> Any:
        """Divides trees of arrays `[B, S, ...]` into slices of tokens, `[C, N, ...]`."""
        return jax.tree.map(lambda v: v.reshape(self.chunks, -1, *v.shape[2:]), of_tokens)


def embed(model: Model, table_vD: jax.Array, tokens_BS: jax.Array, axes: Axes = ()) -> jax.Array:
    """Embeddings `[B, S, D]` of the tokens, normed and scaled as in the model. axes: see `OuterLayers`."""
    return scaled(model, table_rows(table_vD, tokens_BS, axes))


def first_input(model: Model, outer: Mapping[str, jax.Array], tokens_BS: jax.Array, axes: Axes = ()) -> jax.Array:
    """Makes the first layer's input `[B, S, W]` of the tokens. outer: the outer weights. axes: see `OuterLayers`."""
    x_BSD = embed(model, outer["embed"], tokens_BS, axes)
    return model.channels.first(x_BSD, outer.get(LAYER_INPUT_NORM), tokens_BS) if model.channels.sizes else x_BSD


def table_rows(table_vD: jax.Array, tokens_BS: jax.Array, axes: Axes = ()) -> jax.Array:
    """The tokens' rows `[B, S, D]` of the table. axes: see `OuterLayers`."""
    if not axes:
        return table_vD[tokens_BS]
    tokens = jax.lax.all_gather(tokens_BS, axes, axis=0, tiled=True)
    rows, here = local_rows(table_vD, tokens, axes)
    x = jnp.where(here[..., None], table_vD[jnp.where(here, rows, 0)], 0)
    return jax.lax.psum_scatter(x, axes, scatter_dimension=0, tiled=True)


def scaled(model: Model, x_BSD: jax.Array) -> jax.Array:
    """Norms and scales rows of the table as the model does.

    The scale is rounded to x's dtype first, as transformers rounds it.
    """
    x_BSD = x_BSD if model.embedding_norm_eps is None else normalised(x_BSD, model.embedding_norm_eps)
    scale = model.embedding_scale
    return x_BSD if scale == 1 else x_BSD * jnp.asarray(scale, x_BSD.dtype)


def local_rows(table_vD: jax.Array, ids: jax.Array, axes: Axes) -> tuple[jax.Array, jax.Array]:
    """Returns (row of each id in this device's shard of a table, whether the shard has that row)."""
    rows = ids - device_number(*axes)[0] * table_vD.shape[0]
    return rows, (rows >= 0) & (rows < table_vD.shape[0])
