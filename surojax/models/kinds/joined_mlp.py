"""The MLP with a gate whose first two matrices are one, as in Granite-4's files: gate's rows, then up's.

One adapter and one set of scales belong to both. So `tp` does not divide that matrix: every GPU computes all of it, and
goes on with its own channels.
"""

import math
from collections.abc import Callable, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from surojax.models.kinds.gated_delta import own_channels
from surojax.models.kinds.gated_mlp import DOWN, GATE
from surojax.models.kinds.sublayer import FileNames, Mlp, Target, Width, undivided
from surojax.models.layers import parameter, projection
from surojax.models.linear import Product
from surojax.models.model import ROUTES, Routing
from surojax.models.operations import Operations
from surojax.models.recompute import recomputed


class JoinedMlp(Mlp):
    """(silu(g) * u) Wo^T of g, u = x Wi^T."""

    tensors: ClassVar = {
        "w_in": FileNames("shared_mlp.input_linear.weight"),
        "w_out": FileNames("shared_mlp.output_linear.weight"),
    }

    def __init__(self, config, *, rngs: nnx.Rngs | None = None):
        c = config
        self.config = c
        if rngs is None:
            return
        D, F = c.hidden_size, c.intermediate_size
        normal = nnx.initializers.normal(c.initializer_range)
        out = nnx.initializers.normal(c.initializer_range / math.sqrt(2 * c.num_hidden_layers))
        both = Product(GATE.number, self.input, "d_gate_and_up")
        self.w_in = parameter(rngs, (2 * F, D), ("mixed", "embed"), normal, product=both)
        self.w_out = parameter(rngs, (D, F), ("embed", "mlp"), out, product=DOWN)

    def __call__(
        self, x_BSD: jax.Array, ops: Operations, norm: Callable | None = None, routing: Routing = ROUTES
    ) -> tuple[jax.Array, None]:
        """Returns (the MLP of x `[B, S, D]` or norm(x), which is recomputed; None in place of a router's `Routed`)."""
        F = self.config.intermediate_size
        (both_BSX,) = ops.linears(x_BSD, [projection(self, "w_in")], norm)

        def down(both_BSX):
            gate_BSF, up_BSF = jnp.split(own_channels(both_BSX, (F, F), axis=2), 2, axis=-1)
            hidden_BSF = ops.gated(gate_BSF, up_BSF, self.config.hidden_act, DOWN.input)
            return ops.linear(hidden_BSF, projection(self, "w_out"))

        return recomputed(down, ops.compute.recompute.swiglu)(both_BSX), None

    def widths(self) -> Sequence[Width]:
        return [undivided("model.intermediate_size", self.config.intermediate_size)]

    def targets(self) -> Sequence[Target]:
        (width,) = self.widths()
        return [self.target("w_in", width._replace(size=2 * width.size)), self.target("w_out", width)]
