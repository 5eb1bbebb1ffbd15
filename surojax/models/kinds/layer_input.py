"""A layer's own input: of each token a row of the layer's own table, and a product of the token's embedding (Gemma 4).

    input = (norm(embedding Wm^T / sqrt(D)) + sqrt(P) table[token]) / sqrt(2)
    y     = x + norm((act(x Wg^T) * input) Wp^T)

x is the residual stream after the MLP. The first norm has the same weights in all layers. In files the tables of all
layers are one tensor, and so are the matrices Wm: here each is a layer's own, so that it moves with the layer's other
weights, from host memory or a file, and so do its gradient and the optimizer's state.

Shape suffixes: B batch, S sequence, D hidden size, P channels of the input, V rows of a table, N tokens.
"""

import math
from collections.abc import Callable, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels.manual_axes import mark_varying, varying_axes
from surojax.models.channels import EMBEDDING, NORM, TOKEN, tokens_in
from surojax.models.kinds.sublayer import FileNames, Sublayer, Target, Width, undivided
from surojax.models.layers import norm_weight, parameter, projection
from surojax.models.linear import Product, times
from surojax.models.operations import Operations
from surojax.models.recompute import recomputed
from surojax.numerics.ordered_sums import add_rows
from surojax.numerics.rounding import materialised
from surojax.placement.param import Kind

GATE = Product(9, "layer_input_gate", "d_layer_input_gate")
OUT = Product(10, "layer_input", "d_layer_input")


@jax.custom_vjp
def rows_of(table_VP: jax.Array, tokens_BS: jax.Array) -> jax.Array:
    """The tokens' rows `[B, S, P]` of a table. Rows of the gradient are added as in `add_rows`."""
    return table_VP[tokens_BS]


def _rows_of_forward(table_VP, tokens_BS):
    return rows_of(table_VP, tokens_BS), (tokens_BS, jnp.zeros((0, len(table_VP)), table_VP.dtype))


def _rows_of_backward(saved, d_rows_BSP):
    tokens_BS, like_0V = saved
    zeros_VP = jnp.zeros((like_0V.shape[1], d_rows_BSP.shape[-1]), like_0V.dtype)
    zeros_VP = mark_varying(zeros_VP, varying_axes(d_rows_BSP))
    return add_rows(zeros_VP, tokens_BS.reshape(-1), d_rows_BSP.reshape(-1, d_rows_BSP.shape[-1])), None


rows_of.defvjp(_rows_of_forward, _rows_of_backward)


class LayerInput(Sublayer):
    """Adds to the residual stream what a layer's own input of each token says.

    tensors: those in the layers; of_all_layers: those of which files have one tensor of all layers.
    """

    name = "layer_input"
    input = "layer_input_gate"
    tensors: ClassVar = {
        "gate": FileNames("per_layer_input_gate.weight"),
        "projection": FileNames("per_layer_projection.weight"),
        "norm": FileNames("post_per_layer_input_norm.weight"),
    }
    of_all_layers: ClassVar = {
        "table": "model.embed_tokens_per_layer.weight[:, layer {l}]",
        "model_projection": "model.per_layer_model_projection.weight[layer {l}]",
    }

    def __init__(self, config, *, rngs: nnx.Rngs | None = None):
        super().__init__(config)
        if rngs is None:
            return
        c = config
        D, P = c.hidden_size, c.hidden_size_per_layer_input
        normal = nnx.initializers.normal(c.initializer_range)
        out = nnx.initializers.normal(c.initializer_range / math.sqrt(2 * c.num_hidden_layers))
        table = (c.vocab_size_per_layer_input or c.vocab_size, P)
        self.table = parameter(rngs, table, ("rows", "channels"), normal, Kind.TABLE)
        self.model_projection = parameter(rngs, (P, D), ("channels", "embed"), normal, Kind.ROUTER)
        self.gate = parameter(rngs, (P, D), ("channels", "embed"), normal, product=GATE)
        self.projection = parameter(rngs, (D, P), ("embed", "channels"), out, product=OUT)
        self.norm = norm_weight(rngs, c.norm_plus_one, D, "embed")

    def of_tokens(self, ops: Operations) -> jax.Array:
        """The layer's own input `[B, S, P]`."""
        c = self.config
        P = c.hidden_size_per_layer_input

        def of(embedding_BSD, norm_BSP, token_BSn):
            context_BSP = times(embedding_BSD, self.model_projection[...]) * jnp.asarray(
                c.hidden_size**-0.5, embedding_BSD.dtype
            )
            context_BSP = ops.norm(context_BSP, jnp.ones(P, context_BSP.dtype), c.rms_norm_eps) * norm_BSP
            table_VP = mark_varying(self.table[...], varying_axes(token_BSn))
            rows_BSP = rows_of(table_VP, tokens_in(token_BSn))
            rows_BSP = rows_BSP * jnp.asarray(math.sqrt(P), rows_BSP.dtype)
            # No kernel contracts these products into their sum.
            context_BSP, rows_BSP = materialised((context_BSP, rows_BSP))
            return (context_BSP + rows_BSP) * jnp.asarray(2**-0.5, rows_BSP.dtype)

        return recomputed(of)(*(ops.beside[name] for name in (EMBEDDING, NORM, TOKEN)))

    def __call__(self, x_BSD: jax.Array, ops: Operations, norm: Callable) -> jax.Array:
        """Returns the sum of the residual stream x `[B, S, D]` and of what is added to it. norm: after the products."""
        gate_BSP = ops.linear(x_BSD, projection(self, "gate"))
        hidden_BSP = ops.gated(gate_BSP, self.of_tokens(ops), self.config.hidden_act, OUT.input)
        y_BSD = ops.linear(hidden_BSP, projection(self, "projection"))
        return x_BSD + norm(y_BSD, self.norm[...])

    def widths(self) -> Sequence[Width]:
        name = "model.hidden_size_per_layer_input"
        return [undivided(name, self.config.hidden_size_per_layer_input)]

    def targets(self) -> Sequence[Target]:
        """Those in the layers; an adapter of `per_layer_model_projection`, which is of all layers, is not built."""
        (width,) = self.widths()
        return [self.target(matrix, width) for matrix in ("gate", "projection")]
