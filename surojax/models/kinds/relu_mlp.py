"""The MLP without a gate, of Nemotron-H.

Shape suffixes: B batch, S sequence, D hidden size, F intermediate size.
"""

import math
from collections.abc import Callable, Sequence
from typing import ClassVar

import jax
from flax import nnx

from surojax.models.kinds.gated_mlp import DOWN, UP, SwiGLU
from surojax.models.kinds.sublayer import FileNames, Mlp, Target, Width, undivided
from surojax.models.layers import parameter, projection
from surojax.models.model import ROUTES, Routing
from surojax.models.operations import Operations, squared_relu
from surojax.models.recompute import recomputed


class ReluMlp(Mlp):
    """relu(x Wu^T)^2 Wd^T (So et al. 2021)."""

    tensors: ClassVar[dict[str, FileNames]] = {name: SwiGLU.tensors[name] for name in ("w_up", "w_down")}

    def __init__(self, config, *, rngs: nnx.Rngs | None = None):
        c = config
        self.config = c
        if rngs is None:
            return
        D, F = c.hidden_size, c.intermediate_size
        normal = nnx.initializers.normal(c.initializer_range)
        out = nnx.initializers.normal(c.initializer_range / math.sqrt(2 * c.num_hidden_layers))
        self.w_up = parameter(rngs, (F, D), ("mlp", "embed"), normal, product=UP)
        self.w_down = parameter(rngs, (D, F), ("embed", "mlp"), out, product=DOWN)

    def __call__(
        self, x_BSD: jax.Array, ops: Operations, norm: Callable | None = None, routing: Routing = ROUTES
    ) -> tuple[jax.Array, None]:
        """Returns (the MLP of x `[B, S, D]` or norm(x), which is recomputed; None in place of a router's `Routed`)."""
        (up_BSF,) = ops.linears(x_BSD, [projection(self, "w_up")], norm)

        def down(up_BSF):
            return ops.linear(squared_relu(up_BSF), projection(self, "w_down"))

        return recomputed(down, ops.compute.recompute.swiglu)(up_BSF), None

    def widths(self) -> Sequence[Width]:
        return [undivided("model.intermediate_size", self.config.intermediate_size)]

    def targets(self) -> Sequence[Target]:
        (width,) = self.widths()
        return [self.target(matrix, width) for matrix in self.tensors]
