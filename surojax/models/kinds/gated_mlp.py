"""The MLP with a gate.

Shape suffixes: B batch, S sequence, D hidden size, F intermediate size.
"""

import math
from collections.abc import Callable, Sequence
from typing import ClassVar

import jax
from flax import nnx

from surojax.models.kinds.sublayer import FileNames, Mlp, Target, Width, undivided
from surojax.models.layers import parameter, projection
from surojax.models.linear import Product
from surojax.models.model import ROUTES, Routing
from surojax.models.operations import Operations
from surojax.models.recompute import recomputed

GATE = Product(4, Mlp.input, "d_gate")
UP = Product(5, Mlp.input, "d_up")
DOWN = Product(6, "mlp_hidden", "d_mlp")


class SwiGLU(Mlp):
    """(silu(x Wg^T) * x Wu^T) Wd^T (Shazeer 2020), or with another activation in place of silu."""

    tensors: ClassVar = {
        "w_gate": FileNames("mlp.gate_proj.weight", "ffn_gate.weight"),
        "w_up": FileNames("mlp.up_proj.weight", "ffn_up.weight"),
        "w_down": FileNames("mlp.down_proj.weight", "ffn_down.weight"),
    }

    def __init__(self, config, *, rngs: nnx.Rngs | None = None):
        c = config
        self.config = c
        if rngs is None:
            return
        D = c.hidden_size
        F = c.intermediate_size
        normal = nnx.initializers.normal(c.initializer_range)
        out = nnx.initializers.normal(c.initializer_range / math.sqrt(2 * c.num_hidden_layers))
        self.w_gate = parameter(rngs, (F, D), ("mlp", "embed"), normal, product=GATE)
        self.w_up = parameter(rngs, (F, D), ("mlp", "embed"), normal, product=UP)
        self.w_down = parameter(rngs, (D, F), ("embed", "mlp"), out, product=DOWN)

    def __call__(
        self, x_BSD: jax.Array, ops: Operations, norm: Callable | None = None, routing: Routing = ROUTES
    ) -> tuple[jax.Array, None]:
        """Returns (the MLP of x `[B, S, D]` or norm(x), which is recomputed; None in place of a router's `Routed`)."""
        gate_BSF, up_BSF = ops.linears(x_BSD, [projection(self, name) for name in ("w_gate", "w_up")], norm)

        def down(gate_BSF, up_BSF):
            hidden_BSF = ops.gated(gate_BSF, up_BSF, self.config.hidden_act, DOWN.input)
            return ops.linear(hidden_BSF, projection(self, "w_down"))

        return recomputed(down, ops.compute.recompute.swiglu)(gate_BSF, up_BSF), None

    def widths(self) -> Sequence[Width]:
        return [undivided("model.intermediate_size", self.config.intermediate_size)]

    def targets(self) -> Sequence[Target]:
        (width,) = self.widths()
        return [self.target(matrix, width) for matrix in self.tensors]
