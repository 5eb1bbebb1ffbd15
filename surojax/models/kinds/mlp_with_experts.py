"""An MLP with experts beside it, which read the residual stream (Gemma 4 26B-A4B).

    y = norm_1(mlp(norm(x))) + norm_2(experts(norm_3(x)))

x is the residual stream, and norm the layer's own norm before its MLP. The router reads x / rms(x) times a scale of
each channel and D^-1/2. The weights of the chosen experts, divided by their sum, are multiplied by a scale of each
expert.

Shape suffixes: B batch, S sequence, D hidden size, E experts, k choices of a token.
"""

from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from surojax.models.kinds.experts import Experts, scores_of_chosen
from surojax.models.kinds.gated_mlp import SwiGLU
from surojax.models.kinds.sublayer import FileNames, Width, undivided
from surojax.models.layers import norm_weight, vector
from surojax.models.model import ROUTES, Routed, Routing
from surojax.models.operations import Operations
from surojax.models.router_losses import RouterStatistics
from surojax.placement.param import ROUTED

NORMS = ("mlp_out_norm", "experts_norm", "experts_out_norm")


class ScaledExperts(Experts):
    """Experts of whose router the inputs have scales, and whose weights in the sum have one each."""

    def __init__(self, config, *, rngs: nnx.Rngs | None = None):
        super().__init__(config, rngs=rngs)
        if rngs is None:
            return
        self.router_scale = vector(rngs, config.hidden_size, "embed", nnx.initializers.ones)
        self.expert_scale = vector(rngs, config.num_experts, ROUTED, nnx.initializers.ones)

    def scaled(self, x_BSD: jax.Array, ops: Operations) -> jax.Array:
        """The router's input of the residual stream x."""
        factor = self.config.hidden_size**-0.5
        return ops.norm(x_BSD, self.router_scale[...], self.config.rms_norm_eps) * jnp.asarray(factor, x_BSD.dtype)

    def route(self, x_BSD: jax.Array, routing: Routing) -> tuple[jax.Array, jax.Array, RouterStatistics]:
        chosen_BSk, weights_BSk, statistics = super().route(x_BSD, routing)
        scale_11E = self.expert_scale[...].astype(weights_BSk.dtype)[None, None]
        scale_BSE = jnp.broadcast_to(scale_11E, (*chosen_BSk.shape[:2], self.config.num_experts))
        return chosen_BSk, weights_BSk * scores_of_chosen(scale_BSE, chosen_BSk), statistics


class MlpWithExperts(SwiGLU):
    """The MLP of all tokens, and experts of which each token chooses some, with norms of their own."""

    has_experts = True
    reads_residual = True
    tensors: ClassVar = dict(SwiGLU.tensors) | {
        "experts.router": FileNames("router.proj.weight"),
        "experts.router_scale": FileNames("router.scale"),
        "experts.expert_scale": FileNames("router.per_expert_scale"),
        "experts.w_gate": FileNames("mlp.experts.gate_proj.weight"),
        "experts.w_up": FileNames("mlp.experts.up_proj.weight"),
        "experts.w_down": FileNames("mlp.experts.down_proj.weight"),
        "mlp_out_norm": FileNames("post_feedforward_layernorm_1.weight"),
        "experts_norm": FileNames("pre_feedforward_layernorm_2.weight"),
        "experts_out_norm": FileNames("post_feedforward_layernorm_2.weight"),
    }

    def __init__(self, config, *, rngs: nnx.Rngs | None = None):
        super().__init__(config, rngs=rngs)
        if rngs is None:
            return
        self.experts = ScaledExperts(config, rngs=rngs)
        for name in NORMS:
            setattr(self, name, norm_weight(rngs, config.norm_plus_one, config.hidden_size, "embed"))

    def __call__(
        self, x_BSD: jax.Array, ops: Operations, norm: Callable | None = None, routing: Routing = ROUTES
    ) -> tuple[jax.Array, Routed]:
        """Returns (the sum of both parts of the residual stream x, of which the MLP reads norm(x); `Routed`)."""
        c = self.config
        mlp_out, experts_in, experts_out = (getattr(self, name)[...] for name in NORMS)
        how = c.rms_norm_eps, c.norm_plus_one
        y_BSD, _ = super().__call__(x_BSD, ops, norm)
        mixed_BSD, routed = self.experts.of_inputs(
            x_BSD, ops, routing, lambda x: (ops.norm(x, experts_in, *how), self.experts.scaled(x, ops))
        )
        return ops.norm(y_BSD, mlp_out, *how) + ops.norm(mixed_BSD, experts_out, *how), routed

    def widths(self) -> list[Width]:
        return [*super().widths(), undivided("model.moe_intermediate_size", self.config.moe_intermediate_size)]

    def targets(self):
        """Those of the MLP; adapters of the experts are not built."""
        (width, _) = self.widths()
        return [self.target(matrix, width) for matrix in SwiGLU.tensors]
