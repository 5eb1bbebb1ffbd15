"""A mixture of experts in place of the MLP: a router chooses for each token the few experts that compute it.

    logits  = x r^T                         r [E, D], the products' results in float32
    chosen  = the k largest                 ties: the expert with the lower number
    weight  = softmax(logits) of the chosen, divided by their sum with `norm_topk_prob`, x `routed_scaling_factor`
    y       = sum over the chosen of weight (silu(x Wg^T) * x Wu^T) Wd^T      or of weight relu(x Wu^T)^2 Wd^T

With `scoring_func` "sigmoid" the weight is of sigmoid(logits), and the k largest of sigmoid(logits) + bias are chosen
(DeepSeek-V3, arXiv:2412.19437, eq. 12 to 16). That bias decides and weighs nothing, so it has no gradient; no update
changes it. Of experts in groups a token chooses in its `topk_group` best groups only: those with the largest sum of
their two best experts, or with a softmax those of the best expert. Shared experts are one more MLP, which every token
uses, beside the sum. A gated one (Qwen3.5) is multiplied by sigmoid(x g^T), a number for each token, g [1, D].

Every choice is computed (grouped.py). Each device routes its own tokens; in a tensor-parallel group, which divides the
experts' width, the choices are gathered with the activations.

What a router decides is saved for the backward pass (`Routed.decided`): computed again, other rounding could choose
other experts. The weights follow from the choice and are computed again.

Losses that keep the experts in use follow from sums over tokens, which a block returns (router_losses.py).

Shape suffixes: B batch, S sequence, D hidden size, F width of an expert, E experts, k choices of a token, N tokens,
R rows of a block, T tokens that devices of `ep` have sent.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.manual_axes import mark_varying, varying_axes
from pallas_kernels.mma import ROWS
from surojax.models.grouped import (
    ExpertBlocks,
    blocks_in_piece,
    blocks_of,
    rows_of_choices,
    sum_of_experts,
    sum_of_rows,
)
from surojax.models.kinds.gated_mlp import DOWN, GATE, UP, SwiGLU
from surojax.models.kinds.joined_mlp import JoinedMlp
from surojax.models.kinds.relu_mlp import ReluMlp
from surojax.models.kinds.self_attention import times_sigmoid
from surojax.models.kinds.sublayer import FileNames, Mlp, Target, Width, undivided
from surojax.models.layers import ADAPTER, parameter, projection, vector
from surojax.models.linear import Product, router_product
from surojax.models.linear_fp8 import products_with_experts, whole_input
from surojax.models.lora import low_rank
from surojax.models.model import ROUTES, Routed, Routing, Segment
from surojax.models.operations import RELU2, Operations, gated, squared_relu
from surojax.models.recompute import DECIDED, recomputed, save_inputs_only
from surojax.models.router_losses import RouterStatistics
from surojax.parallel import expert_dispatch
from surojax.parallel.collectives import device_number
from surojax.parallel.tensor import all_gather_sequence, is_divided, reduce_scatter_sequence
from surojax.placement.mesh import EXPERT
from surojax.placement.param import EXPERTS, ROUTED, Kind

SCORING = ("softmax", SIGMOID := "sigmoid")
SHARED = "shared"  # the module of shared experts
GATED_SHARED = "shared_expert"  # the module of a gated one
SHARED_GATE = Product(8)
SEED = "seed"  # the name of the seed of random numbers among the arrays of experts


class OfExperts(NamedTuple):
    """The experts' arrays by name. arrays: matrices and biases. factors: (a, b) of each adapter."""

    arrays: dict[str, jax.Array]
    factors: dict[str, tuple[jax.Array, jax.Array]]


class Experts(Mlp):
    """Experts with SwiGLU, or with another activation in place of silu, and their router."""

    has_experts = True
    adapted_together = ("w_gate", "w_up")  # in PEFT, by one adapter, of experts with a gate
    tensors: ClassVar = {
        "router": FileNames("mlp.gate.weight", "ffn_gate_inp.weight"),
        "w_gate": FileNames("mlp.experts.gate_proj.weight", "ffn_gate_exps.weight"),
        "w_up": FileNames("mlp.experts.up_proj.weight", "ffn_up_exps.weight"),
        "w_down": FileNames("mlp.experts.down_proj.weight", "ffn_down_exps.weight"),
        "b_choice": FileNames("mlp.gate.e_score_correction_bias", "exp_probs_b.bias"),
        "shared.w_gate": FileNames("mlp.shared_experts.gate_proj.weight", "ffn_gate_shexp.weight"),
        "shared.w_up": FileNames("mlp.shared_experts.up_proj.weight", "ffn_up_shexp.weight"),
        "shared.w_down": FileNames("mlp.shared_experts.down_proj.weight", "ffn_down_shexp.weight"),
        "shared.w_in": JoinedMlp.tensors["w_in"],
        "shared.w_out": JoinedMlp.tensors["w_out"],
        "shared_expert.w_gate": FileNames("mlp.shared_expert.gate_proj.weight", "ffn_gate_shexp.weight"),
        "shared_expert.w_up": FileNames("mlp.shared_expert.up_proj.weight", "ffn_up_shexp.weight"),
        "shared_expert.w_down": FileNames("mlp.shared_expert.down_proj.weight", "ffn_down_shexp.weight"),
        "shared_expert_gate": FileNames("mlp.shared_expert_gate.weight", "ffn_gate_inp_shexp.weight"),
    }

    def __init__(self, config, *, rngs: nnx.Rngs | None = None):
        c = config
        self.config = c
        if rngs is None:
            return
        E, F, D = c.num_experts, self.width, c.hidden_size
        normal = nnx.initializers.normal(c.initializer_range)
        out = nnx.initializers.normal(c.initializer_range / math.sqrt(2 * c.num_hidden_layers))
        if c.scoring_func == SIGMOID:
            constant: Any = {"learning_rate_factor": 0.0, "dtype": "float32"}
            self.b_choice = parameter(rngs, (E,), (ROUTED,), nnx.initializers.zeros, Kind.VECTOR, **constant)
        if self.shared_width:
            setattr(self, SHARED, self.shared_type(self.config_of_shared, rngs=rngs))
        if width := c.shared_expert_intermediate_size:
            setattr(self, GATED_SHARED, SwiGLU(dataclasses.replace(c, intermediate_size=width), rngs=rngs))
            gate: Any = {"kind": Kind.ROUTER, "product": SHARED_GATE}
            self.shared_expert_gate = parameter(rngs, (1, D), ("labels", "embed"), normal, **gate)
        used: Any = {"used": c.num_experts_per_tok / E}
        self.router = parameter(rngs, (E, D), (ROUTED, "embed"), normal, Kind.ROUTER)
        if c.hidden_act != RELU2:
            self.w_gate = parameter(rngs, (E, F, D), (EXPERTS, "mlp", "embed"), normal, product=GATE, **used)
        self.w_up = parameter(rngs, (E, F, D), (EXPERTS, "mlp", "embed"), normal, product=UP, **used)
        self.w_down = parameter(rngs, (E, D, F), (EXPERTS, "embed", "mlp"), out, product=DOWN, **used)
        if c.expert_bias:
            zeros = nnx.initializers.zeros
            self.b_router = vector(rngs, E, ROUTED, zeros)
            self.b_gate = parameter(rngs, (E, F), (EXPERTS, "mlp"), zeros, Kind.VECTOR)
            self.b_up = parameter(rngs, (E, F), (EXPERTS, "mlp"), zeros, Kind.VECTOR)
            self.b_down = parameter(rngs, (E, D), (ROUTED, "embed"), zeros, Kind.VECTOR)

    @property
    def width(self) -> int:
        """The width of an expert."""
        return self.config.moe_intermediate_size or self.config.intermediate_size

    @property
    def shared_width(self) -> Width | None:
        """The width of the experts that every token uses, without a gate; None: there are none."""
        c = self.config
        if c.moe_shared_intermediate_size:
            return undivided("model.moe_shared_intermediate_size", c.moe_shared_intermediate_size)
        field = f"model.n_shared_experts x {self.width_field}"
        return undivided(field, c.n_shared_experts * self.width) if c.n_shared_experts else None

    @property
    def config_of_shared(self) -> Any:
        """The architecture with these experts' width."""
        width = self.shared_width
        return dataclasses.replace(self.config, intermediate_size=width.size) if width else self.config

    @property
    def width_field(self) -> str:
        """The field that says the width of an expert."""
        return "model.moe_intermediate_size" if self.config.moe_intermediate_size else "model.intermediate_size"

    @property
    def shared_type(self) -> type[Mlp]:
        """The class of experts that every token uses."""
        gated = JoinedMlp if self.config.mlp_joined else SwiGLU
        return ReluMlp if self.config.hidden_act == RELU2 else gated

    @property
    def matrices(self) -> tuple[str, ...]:
        """The names of an expert's matrices."""
        return ("w_up", "w_down") if self.config.hidden_act == RELU2 else ("w_gate", "w_up", "w_down")

    def __call__(
        self, x_BSD: jax.Array, ops: Operations, norm=None, routing: Routing = ROUTES
    ) -> tuple[jax.Array, Routed]:
        """Returns (weighted sum of the chosen experts' outputs for x or norm(x), which is recomputed; `Routed`)."""

        def inputs(x_BSD):
            operand = norm(x_BSD) if norm else x_BSD
            return operand, whole_input(operand)

        return self.of_inputs(x_BSD, ops, routing, inputs, again=norm is not None)

    def of_inputs(
        self, x_BSD: jax.Array, ops: Operations, routing: Routing, inputs: Callable, *, again: bool = True
    ) -> tuple[jax.Array, Routed]:
        """Computes the experts of inputs(x) = (the experts' input as an operand of products, the router's input).

        again: the backward pass computes it again.
        """

        def experts(x_BSD):
            operand, routed_BSD = inputs(x_BSD)
            y_BSD = whole_input(operand)
            chosen_BSk, weights_BSk, statistics = self.route(routed_BSD, routing)
            gathered = [all_gather_sequence(a) for a in (y_BSD, chosen_BSk.astype(jnp.int32), weights_BSk)]
            mixed_BSD = self.mix(*gathered, ops=ops)
            mixed_BSD = reduce_scatter_sequence(mixed_BSD) if is_divided("mlp") else mixed_BSD
            if self.config.expert_bias:
                mixed_BSD = mixed_BSD + mixed_biases(self.b_down[...], chosen_BSk, weights_BSk).astype(mixed_BSD.dtype)
            if self.shared_width:
                mixed_BSD = mixed_BSD + getattr(self, SHARED)(operand, ops)[0]
            if self.config.shared_expert_intermediate_size:
                shared_BSD, _ = getattr(self, GATED_SHARED)(operand, ops)
                gate_BS1 = ops.linear(y_BSD, projection(self, "shared_expert_gate"))
                mixed_BSD = mixed_BSD + times_sigmoid(shared_BSD, gate_BS1)
            return mixed_BSD, Routed(statistics, chosen_BSk)

        return recomputed(experts, again)(x_BSD)

    def route(self, x_BSD: jax.Array, routing: Routing) -> tuple[jax.Array, jax.Array, RouterStatistics]:
        """Returns (chosen experts' numbers `[B, S, k]`, their float32 weights, statistics of the counted tokens)."""
        c = self.config
        logits_BSE = router_product(x_BSD, self.router[...])
        if c.expert_bias:
            logits_BSE = logits_BSE + self.b_router[...][None, None]
        if c.scoring_func == SIGMOID:
            score_BSE = jax.nn.sigmoid(logits_BSE)
            ranked_BSE = score_BSE + self.b_choice[...][None, None]
            probability_BSE = score_BSE / jnp.sum(score_BSE, axis=-1, keepdims=True)
        else:
            score_BSE = probability_BSE = jax.nn.softmax(logits_BSE)
            ranked_BSE = logits_BSE
        chosen_BSk = routing.decided
        if chosen_BSk is None:
            if c.n_group > 1:
                ranked_BSE = in_best_groups(ranked_BSE, c.n_group, c.topk_group, 2 if c.scoring_func == SIGMOID else 1)
            _, chosen_BSk = jax.lax.top_k(jax.lax.stop_gradient(ranked_BSE), c.num_experts_per_tok)
        chosen_BSk = checkpoint_name(chosen_BSk.astype(smallest_dtype(c.num_experts)), DECIDED)
        weights_BSk = scores_of_chosen(score_BSE, chosen_BSk)
        if c.norm_topk_prob:
            least = 1e-20 if c.scoring_func == SIGMOID else 0.0  # of a sum that may be 0
            weights_BSk = weights_BSk / (jnp.sum(weights_BSk, axis=-1, keepdims=True) + least)
        if c.routed_scaling_factor != 1:
            weights_BSk = weights_BSk * c.routed_scaling_factor
        counted_BS1 = jnp.float32(1) if routing.counted is None else routing.counted[..., None]
        squared_BS1 = jnp.square(jax.nn.logsumexp(logits_BSE, axis=-1, keepdims=True))
        statistics = RouterStatistics(
            chosen_E=jnp.sum(counted_BS1 * times_chosen(chosen_BSk, c.num_experts), axis=(0, 1)),
            probability_E=jnp.sum(counted_BS1 * probability_BSE, axis=(0, 1)),
            squared_logsumexp=jnp.sum(counted_BS1 * squared_BS1),
        )
        return chosen_BSk, weights_BSk, statistics

    def mix(self, x_BSD: jax.Array, chosen_BSk: jax.Array, weights_BSk: jax.Array, ops: Operations) -> jax.Array:
        """Sums the chosen experts' outputs times their weights; a partial sum if devices divide the experts' width."""
        weights = self._of_experts(x_BSD)
        x_ND, chosen_Nk, weights_Nk = (a.reshape(-1, a.shape[-1]) for a in (x_BSD, chosen_BSk, weights_BSk))
        if expert_dispatch.in_group():
            y_ND = self.sum_over_devices(x_ND, chosen_Nk, weights_Nk, weights, ops)
        elif ops.groups_products(weights.arrays["w_up"], adapted=bool(weights.factors)):
            y_ND = self.sum_by_kernel(x_ND, chosen_Nk, weights_Nk, weights, ops)
        else:
            y_ND = self.sum_by_loop(x_ND, weights_Nk, blocks_of(chosen_Nk, self.config.num_experts), weights, ops)
        return y_ND.reshape(x_BSD.shape)

    def sum_by_loop(
        self,
        x_ND: jax.Array,
        weights_Nk: jax.Array,
        blocks: ExpertBlocks,
        weights: OfExperts,
        ops: Operations,
        piece: int = 0,
    ) -> jax.Array:
        """Computes each token's weighted sum `[N, D]` by a loop over blocks of one expert each.

        piece: see `sum_of_experts`.
        """
        arrays, factors = weights
        trained, fixed = (factors, arrays) if ops.frozen else (arrays | factors, {})
        if ops.seed is not None:  # an argument: a function with a backward pass of its own may not close over arrays
            fixed = fixed | {SEED: jnp.broadcast_to(ops.seed, len(arrays["w_up"]))}

        def mlp_of_block(trained, fixed, x_RD, weight_R, number):
            w = fixed | trained
            block_ops = dataclasses.replace(ops, seed=w.get(SEED)).of_block(number)

            def product(x, name):
                y = block_ops.product(x, w[name], getattr(self, name))
                if name + ADAPTER in factors:
                    a_ri, b_or = w[name + ADAPTER]
                    y = y + low_rank(x, a_ri, b_or, self.config.lora.scale).astype(y.dtype)
                bias = w.get(name.replace("w_", "b_"))
                return y if bias is None else y + bias[None]

            return self._mlp(product, x_RD, weight_R)

        return sum_of_experts(mlp_of_block, trained, fixed, x_ND, weights_Nk, blocks, piece)

    def sum_by_kernel(
        self, x_ND: jax.Array, chosen_Nk: jax.Array, weights_Nk: jax.Array, weights: OfExperts, ops: Operations
    ) -> jax.Array:
        """Computes each token's weighted sum `[N, D]` by a GPU kernel for all experts at once; without adapters."""
        blocks = blocks_of(chosen_Nk, self.config.num_experts, ROWS)

        def all_rows(x_ND, weights_Nk, arrays):
            multiplied = grouped_matmul if ops.in_float8 is None else products_with_experts

            def product(x, name):
                y = multiplied(x, arrays[name], blocks.expert_M, **ops.kernel_options)
                bias = arrays.get(name.replace("w_", "b_"))
                return y if bias is None else y + jnp.repeat(bias[blocks.expert_M], ROWS, axis=0)

            return sum_of_rows(self._mlp(product, *rows_of_choices(x_ND, weights_Nk, blocks)), blocks)

        return recomputed(all_rows)(x_ND, weights_Nk, weights.arrays)

    def sum_over_devices(
        self, x_ND: jax.Array, chosen_Nk: jax.Array, weights_Nk: jax.Array, weights: OfExperts, ops: Operations
    ) -> jax.Array:
        """Computes each token's weighted sum `[N, D]` on the devices of `ep`, which divide the experts.

        Each device receives the tokens of its experts (parallel/expert_dispatch.py).
        """
        E = self.config.num_experts
        chosen_nNk = expert_dispatch.gathered(chosen_Nk)
        number, devices = device_number(EXPERT)
        own = E // devices
        way = expert_dispatch.routes(chosen_nNk, E)
        own_Tk = expert_dispatch.received(chosen_nNk, way, 2 * E) - number * own
        own_Tk = jnp.where((own_Tk >= 0) & (own_Tk < own), own_Tk, own)
        weights_Tk = expert_dispatch.received(expert_dispatch.gathered(weights_Nk), way, 0)
        x_TD = expert_dispatch.dispatch(x_ND, way)
        piece = blocks_in_piece(own_Tk.size // devices, own)
        blocks = blocks_of(own_Tk, own, devices=devices)
        y_TD = self.sum_by_loop(x_TD, weights_Tk, blocks, weights, ops, piece)
        return expert_dispatch.combine(len(x_ND), y_TD, way)

    def _of_experts(self, x_BSD: jax.Array) -> OfExperts:
        """The experts' arrays, typed so that reverse mode sums their gradients over devices.

        These are the devices with other tokens x, or with other parts of the width.
        """
        names = self.matrices
        biases = ("b_gate", "b_up") if self.config.expert_bias else ()
        adapters = {name: adapter for name in names if (adapter := getattr(self, name + ADAPTER, None))}
        arrays: Any = {name: getattr(self, name)[...] for name in (*names, *biases)}
        factors: Any = {name + ADAPTER: (adapter.a[...], adapter.b[...]) for name, adapter in adapters.items()}
        axes = frozenset[str]().union(*map(varying_axes, jax.tree.leaves((x_BSD, arrays, factors))))
        return OfExperts(*jax.tree.map(lambda w: mark_varying(w, axes), (arrays, factors)))

    def _mlp(self, product: Callable, x_RD: jax.Array, weight_R: jax.Array) -> jax.Array:
        """Computes the MLP of rows, times the rows' weights. product: (rows, name of a matrix) -> rows."""
        if self.config.hidden_act == RELU2:
            h_RF = squared_relu(product(x_RD, "w_up"))
        else:
            h_RF = gated(product(x_RD, "w_gate"), product(x_RD, "w_up"), self.config.hidden_act)
        return product((h_RF * weight_R[:, None]).astype(h_RF.dtype), "w_down")

    # -- declarations --------------------------------------------------------------------------------------------------

    def widths(self) -> Sequence[Width]:
        c = self.config
        widths = [undivided(self.width_field, self.width)]
        if self.shared_width:
            widths.append(self.shared_width)
        if c.shared_expert_intermediate_size:
            widths.append(undivided("model.shared_expert_intermediate_size", c.shared_expert_intermediate_size))
        return widths

    def targets(self) -> Sequence[Target]:
        own, *shared = self.widths()
        targets = [self.target(matrix, own, of_experts=True) for matrix in self.matrices]
        if self.shared_width:
            for target in self.shared_type(self.config_of_shared).targets():
                matrix = f"{SHARED}.{target.matrix.rpartition('.')[2]}"
                targets.append(self.target(matrix, self.shared_width._replace(size=target.width)))
        if self.config.shared_expert_intermediate_size:
            targets += [self.target(f"{GATED_SHARED}.{matrix}", shared[0]) for matrix in SwiGLU.tensors]
            targets.append(self.target(f"{GATED_SHARED}_gate", Width("", 1, "", 1)))
        return targets


@save_inputs_only
def scores_of_chosen(score_BSE: jax.Array, chosen_BSk: jax.Array) -> jax.Array:
    """Returns the chosen experts' scores `[B, S, k]`: sums with one score each, for which nothing of k x E is saved.

    Not a gather, whose gradient would be added into place row by row.
    """
    is_chosen_BSkE = jax.nn.one_hot(chosen_BSk, score_BSE.shape[-1], dtype=bool)
    return jnp.sum(jnp.where(is_chosen_BSkE, score_BSE[..., None, :], 0), axis=-1)


def in_best_groups(ranked_BSE: jax.Array, groups: int, chosen: int, best: int) -> jax.Array:
    """Replaces the ranks of experts outside of each token's `chosen` best groups by -inf.

    best: how many of a group's largest ranks are added up to its own: two with sigmoids, one with a softmax.
    """
    *lead, E = ranked_BSE.shape
    of_groups = ranked_BSE.reshape(*lead, groups, E // groups)
    _, kept = jax.lax.top_k(jnp.sum(jax.lax.top_k(of_groups, best)[0], axis=-1), chosen)
    is_kept = jnp.any(jax.nn.one_hot(kept, groups, dtype=bool), axis=-2)
    return jnp.where(is_kept[..., None], of_groups, -jnp.inf).reshape(ranked_BSE.shape)


def times_chosen(chosen_BSk: jax.Array, experts: int) -> jax.Array:
    """Counts how often each token chose each expert, float32 `[B, S, E]` of 0 and 1."""
    return jnp.sum(jax.nn.one_hot(chosen_BSk, experts, dtype=bool), axis=2, dtype=jnp.float32)


@save_inputs_only
def mixed_biases(b_ED: jax.Array, chosen_BSk: jax.Array, weights_BSk: jax.Array) -> jax.Array:
    """Sums the chosen experts' output biases times the choices' weights, float32 `[B, S, D]`.

    A product with all experts: it is small beside one expert's, and its gradients are products too.
    """
    is_chosen_BSkE = jax.nn.one_hot(chosen_BSk, len(b_ED), dtype=jnp.float32)
    weights_BSE = jnp.sum(is_chosen_BSkE * weights_BSk[..., None], axis=2)
    return jnp.einsum("BSE,ED->BSD", weights_BSE, b_ED.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)


def choices_of(segment: Segment) -> tuple[int, int]:
    """Returns (number of experts, experts per token) of a segment whose layers have experts."""
    matrix = next(param for param in jax.tree.leaves(segment.params) if param.of_experts)
    return matrix.shape[0], round(matrix.used * matrix.shape[0])


def smallest_dtype(experts: int):
    """The smallest unsigned dtype that holds the numbers of this many experts."""
    return jnp.uint8 if experts <= 1 << 8 else jnp.uint16
