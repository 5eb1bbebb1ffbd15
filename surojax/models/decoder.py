"""The decoder with its options as one Flax NNX module, and as a `Model` for the engine.

surojax/families declares which options a family of models has.

Shape suffixes: B batch, S sequence, D hidden size, V vocabulary, L layers.

Two ways to run the same parameters. `Decoder.__call__` is the plain model: autodiff goes through all of it, which is
the reference the engine must equal. `build` gives the pieces of it as pure functions of arrays, so that the engine can
hold one layer at a time. Both compute `Block`. Parameters are
`{"blocks": stacked [L, ...], "outer": {embed, norm, head}}`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels.manual_axes import mark_varying, varying_axes
from surojax.models import chunked, decoder_checks
from surojax.models.experts import SHARED, Experts, planned_statistics
from surojax.models.layers import Attention, SwiGLU, norm_weight, parameter
from surojax.models.linear import linear
from surojax.models.linear_fp8 import SITES, InFloat8
from surojax.models.lora import Lora, add_adapters, frozen, with_adapters
from surojax.models.model import (
    DEFAULT,
    PLAIN,
    ROUTES,
    Cache,
    Compute,
    Earlier,
    Heads,
    Model,
    ModelArchitecture,
    Routed,
    Routing,
    Segment,
    Variant,
    collect_params,
)
from surojax.models.operations import Operations, softcapped
from surojax.models.recompute import recomputed
from surojax.models.rotary import NO_ROTATION, RopeScaling
from surojax.numerics.quantize import Quantized, dequantise_all, is_quantized
from surojax.numerics.recipes import Precision
from surojax.placement.param import OUTER, Kind, part_of, trainable, with_part

BLOCKS = "blocks"  # the segment
DENSE = "dense"  # the one before it, if the first layers have no experts
ATTENTION, MLP = 0, 4  # numbers of the first products of the inputs that norms make


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """The architecture, named as in a Hugging Face `config.json` if that has a name for it.

    sliding_window: the number of latest positions that a token attends to, its own included; 0: all of them.
    sliding_window_pattern: n, if every n-th layer attends to all positions; 0: none does. rope_local_base_freq: the
    base of rotary embeddings in layers with a window, whose frequencies are not stretched; 0: as in the other layers.
    no_rope_layer_interval: n, if every n-th layer has no rotary embedding; 0: all have it.

    qk_norm: RMSNorm on each head's queries and keys. norm_plus_one: norms scale by 1 + weight. sandwich_norms: norms
    also on what attention and MLP add to the residual stream. scale_embedding: by sqrt(hidden_size),
    beside embedding_multiplier. residual_multiplier: of what attention and MLP add. logits_scaling: logits are divided
    by it, as activations of the head.
    query_pre_attn_scalar: attention scores are divided by its square root; 0: head_dim. attn_logit_softcapping,
    final_logit_softcapping: caps of attention scores and logits, see `operations.softcapped`; 0: none.
    qk_norm_whole: RMSNorm on queries and keys, of the channels of all heads together; not with qk_norm.
    attention_bias: of queries, keys and values; attention_out_bias: of the output. attention_sinks: the softmax of each
    head has one more logit, of no key, see `attention.attend`.

    num_experts: of each MLP, see experts.py; 0: the MLP is one. num_experts_per_tok: that a token chooses.
    moe_intermediate_size: width of an expert; 0: intermediate_size. norm_topk_prob: the weights of the chosen ones add
    up to 1. scoring_func, routed_scaling_factor: see experts.py. n_shared_experts: that every token uses.
    first_k_dense_replace: first layers whose MLP is one. expert_bias: on the router's logits and the experts' products.

    lora: adapters, which are trained in place of all else; None: there are none.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = dataclasses.field(default_factory=RopeScaling)
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_out_bias: bool = False
    attention_sinks: bool = False
    qk_norm: bool = False
    qk_norm_whole: bool = False
    norm_plus_one: bool = False
    sandwich_norms: bool = False
    hidden_act: str = "silu"
    scale_embedding: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    query_pre_attn_scalar: float = 0.0
    attn_logit_softcapping: float = 0.0
    final_logit_softcapping: float = 0.0
    rope_local_base_freq: float = 0.0
    sliding_window: int = 0
    sliding_window_pattern: int = 0
    no_rope_layer_interval: int = 0
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    scoring_func: str = "softmax"
    routed_scaling_factor: float = 1.0
    n_shared_experts: int = 0
    first_k_dense_replace: int = 0
    expert_bias: bool = False
    initializer_range: float = 0.02
    lora: Lora | None = None

    def variants(self, precision: Precision) -> tuple[Variant, ...]:
        """The `Variant` of each layer: whether the recipe is enabled, the attention window, the rotary embedding."""

        def window(l: int) -> int:
            pattern = self.sliding_window_pattern
            attends_to_all = pattern and (l + 1) % pattern == 0
            return 0 if attends_to_all else self.sliding_window

        def rotary(l: int) -> str:
            interval = self.no_rope_layer_interval
            if interval and (l + 1) % interval == 0:
                return "none"
            return "local" if self.rope_local_base_freq and window(l) else "global"

        L = self.num_hidden_layers
        return tuple(Variant(precision.enabled(l, L), window(l), rotary(l)) for l in range(L))

    def segments(self) -> "dict[str, LayersOf]":
        """The layers of each segment by its name; layers of a segment have the same parameters."""
        dense = self.first_k_dense_replace
        found = {BLOCKS: LayersOf(self, range(dense, self.num_hidden_layers))}
        if not dense:
            return found
        without = {"num_experts": 0, "n_shared_experts": 0, "first_k_dense_replace": 0}
        return {DENSE: LayersOf(dataclasses.replace(self, **without), range(dense))} | found

    def rotary(self, variant: Variant) -> tuple[float, RopeScaling]:
        """(base, `RopeScaling`) of a layer's rotary embedding."""
        fraction = self.rope_scaling.partial_rotary_factor
        by_type = {
            "global": (self.rope_theta, self.rope_scaling),
            "local": (self.rope_local_base_freq, RopeScaling(partial_rotary_factor=fraction)),
            "none": (self.rope_theta, NO_ROTATION),
        }
        return by_type[variant.rotary]

    @property
    def embedding_scale(self) -> float:
        """The factor that embeddings are multiplied by."""
        return self.embedding_multiplier * (math.sqrt(self.hidden_size) if self.scale_embedding else 1.0)


def times(factor: float, x: jax.Array) -> jax.Array:
    """factor x; the same array if the factor is 1."""
    return x if factor == 1 else factor * x


class LayersOf(NamedTuple):
    """The layers of a segment: their options, and their numbers in the model."""

    config: DecoderConfig
    numbers: range


def from_settings(settings: dict[str, Any]) -> DecoderConfig:
    """The architecture of a config's `model` fields. The fields rope_NAME, except rope_theta, are of the scaling."""
    sizes = dict(settings)
    kind = sizes.pop("rope_scaling")
    names = [field.name for field in dataclasses.fields(RopeScaling) if field.name != "kind"]
    scaling = RopeScaling(kind, **{name: sizes.pop(f"rope_{name}") for name in names})
    return DecoderConfig(**sizes, rope_scaling=scaling)


class Block(nnx.Module):
    """Computes a decoder layer: x + attention(norm(x)), then x + mlp(norm(x)).

    Training, sampling and the plain `Decoder` share this definition. With sandwich norms it is
    x + norm(attention(norm(x))), then x + norm(mlp(norm(x))).

    A subclass computes something else: `__call__` has to use `ops`, `cache` and `routing` as here, `__init__` may add
    parameters (`layers.parameter`), and `keys_values` returns what attention reads, if `sequence_chunks` divides the
    sequence.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config = config

        def norm() -> nnx.Param:
            return norm_weight(rngs, config, config.hidden_size, "embed")

        self.attention_norm = norm()
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = norm()
        self.mlp = Experts(config, rngs=rngs) if config.num_experts else SwiGLU(config, rngs=rngs)
        if config.sandwich_norms:
            self.attention_out_norm = norm()
            self.mlp_out_norm = norm()
        add_adapters(self, config.lora, rngs=rngs)

    def keys_values(self, x_BSD: jax.Array, ops: Operations, first: int) -> Earlier:
        """Keys and values that attention makes of a chunk x. first: index in its row of the chunk's first token."""
        how = self.config.rms_norm_eps, self.config.norm_plus_one
        normed_BSD = ops.norm(x_BSD, self.attention_norm[...], *how)
        _, k_BSKh, v_BSKh = self.attention.heads(normed_BSD, ops, None, first)
        return Earlier(*ops.of_whole_chunk(k_BSKh, v_BSKh))

    def __call__(
        self, x_BSD: jax.Array, ops: Operations, cache: Cache | Earlier | None = None, routing: Routing = ROUTES
    ) -> tuple[jax.Array, Cache | Earlier | None, Routed | None]:
        """(the block of x `[B, S, D]`, the second result of `Operations.attend`, what a router returns)."""
        again = ops.compute.recompute
        how = self.config.rms_norm_eps, self.config.norm_plus_one

        def attention(y_BSD, norm=None):
            attended_BSD, extended = self.attention(y_BSD, ops, norm, cache)
            if self.config.sandwich_norms:
                attended_BSD = ops.norm(attended_BSD, self.attention_out_norm[...], *how)
            return times(self.config.residual_multiplier, attended_BSD), extended

        def mlp(y_BSD, norm=None):
            y_BSD, routed = self.mlp(y_BSD, ops, norm, routing)
            y_BSD = ops.norm(y_BSD, self.mlp_out_norm[...], *how) if self.config.sandwich_norms else y_BSD
            return times(self.config.residual_multiplier, y_BSD), routed

        def attention_norm(x_BSD):
            return ops.add_and_norm(x_BSD, None, self.attention_norm[...], *how, ATTENTION)

        def mlp_norm(x_BSD, residual_BSD=None):
            return ops.add_and_norm(x_BSD, residual_BSD, self.mlp_norm[...], *how, MLP)

        if again.norm:
            attended_BSD, cache = recomputed(lambda x: attention(x, lambda x: attention_norm(x)[0]), again.att)(x_BSD)
            x_BSD = x_BSD + attended_BSD
            y_BSD, routed = recomputed(lambda x: mlp(x, lambda x: mlp_norm(x)[0]), again.ffn)(x_BSD)
            return x_BSD + y_BSD, cache, routed
        y_BSD, x_BSD = attention_norm(x_BSD)
        attended_BSD, cache = recomputed(attention, again.att)(y_BSD)
        y_BSD, x_BSD = mlp_norm(x_BSD, attended_BSD)
        y_BSD, routed = recomputed(mlp, again.ffn)(y_BSD)
        return x_BSD + y_BSD, cache, routed


class Outer(nnx.Module):
    """The parameters outside of the blocks: embedding, final norm, and a head of its own unless it is tied."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        normal = nnx.initializers.normal(config.initializer_range)
        shape = (config.vocab_size, config.hidden_size)
        self.embed = parameter(rngs, shape, ("vocab", "embed"), normal, Kind.TABLE)
        self.norm = norm_weight(rngs, config, config.hidden_size, "embed")
        if not config.tie_word_embeddings:
            self.head = parameter(rngs, shape, ("vocab", "embed"), normal, Kind.TABLE)


class Decoder(nnx.Module):
    """The plain model, one Flax module that autodiff goes through: token ids `[B, S]` -> logits `[B, S, V]`.

    starts: of documents, see `Operations`.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        def stacked(config: DecoderConfig, layers: int) -> Block:
            @nnx.split_rngs(splits=layers)
            @nnx.vmap(
                axis_size=layers,
                transform_metadata={nnx.PARTITION_NAME: "layers"},  # type: ignore[arg-type]
            )
            def stack(rngs):
                return Block(config, rngs=rngs)

            return stack(rngs)

        self.config = config
        self.outer = Outer(config, rngs=rngs)
        for name, layers in config.segments().items():
            setattr(self, name, stacked(layers.config, len(layers.numbers)))

    def __call__(
        self, tokens_BS: jax.Array, starts_BS: jax.Array | None = None, *, recompute_block: bool = False
    ) -> jax.Array:
        def block(x_BSD, w, variant: Variant, graph):
            return nnx.merge(graph, w)(x_BSD, Operations(variant=variant, starts=starts_BS))[0], None

        def layer(variant: Variant, graph) -> Callable:
            with_variant = functools.partial(block, variant=variant, graph=graph)
            return jax.checkpoint(with_variant) if recompute_block else with_variant

        c = self.config
        x_BSD = self.outer.embed[...][tokens_BS]
        x_BSD = times(c.embedding_scale, x_BSD)
        for name, layers in c.segments().items():
            graph, weights = nnx.split(getattr(self, name))
            variants = [c.variants(DEFAULT.precision)[l] for l in layers.numbers]
            if len(set(variants)) == 1:
                x_BSD, _ = jax.lax.scan(layer(variants[0], graph), x_BSD, weights)
            else:
                for l, variant in enumerate(variants):
                    x_BSD, _ = layer(variant, graph)(x_BSD, jax.tree.map(lambda w, l=l: w[l], weights))
        x_BSD = Operations().norm(x_BSD, self.outer.norm[...], c.rms_norm_eps, c.norm_plus_one)
        x_BSD = times(1 / c.logits_scaling, x_BSD)
        logits_BSV = linear(x_BSD, (self.outer.embed if c.tie_word_embeddings else self.outer.head)[...])
        return softcapped(logits_BSV, c.final_logit_softcapping) if c.final_logit_softcapping else logits_BSV


def init_layer(
    config: DecoderConfig, segment: str, seed: int | jax.Array, l: int | jax.Array, block: type[Block] = Block
) -> dict:
    """Random float32 parameters of layer l of a segment, drawn alone; l may be traced, so that a loop can build layer
    after layer.

    They are those that `Decoder` with `nnx.Rngs(jax.random.key(seed))` has: the stream's next key after the draws of
    `Outer`, one for each of its arrays, and of the segments before, split into one key for each layer.
    """
    segments = config.segments()
    draws = len(jax.tree.leaves(jax.eval_shape(lambda: init_outer(config, 0)))) + list(segments).index(segment)
    layers = segments[segment]
    keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), draws), len(layers.numbers))
    return _arrays(block(layers.config, rngs=nnx.Rngs(keys[l])))


def init_outer(config: DecoderConfig, seed: int | jax.Array) -> dict:
    """Random float32 parameters of the outer layers."""
    return _arrays(Outer(config, rngs=nnx.Rngs(jax.random.key(seed))))


def _arrays(module: nnx.Module) -> dict:
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def build(config: DecoderConfig, compute: Compute = DEFAULT, block: type[Block] = Block) -> Model:
    """The model with these sizes, computed so; the same object for equal arguments. No array is built.

    block: a subclass of `Block` that computes something else.
    """
    return _build(config, compute, block)


class Declared(NamedTuple):
    """Declarations of a segment that are equal for every `Compute`.

    params: by section, of all segments. graph: of a block. products: the number of the product that each of its
    parameters feeds, or None.
    """

    params: dict
    graph: nnx.GraphDef
    products: dict


@functools.cache
def _declared(config: DecoderConfig, block_type: type[Block]) -> dict[str, Declared]:
    """Builds abstract modules of these sizes, and collects what they declare."""

    def abstract(module, config: DecoderConfig) -> Any:
        return nnx.eval_shape(lambda: module(config, rngs=nnx.Rngs(0)))

    def number(variable) -> int | None:
        return variable.get_metadata("product")

    def products(block) -> dict:
        return nnx.to_pure_dict(nnx.state(block, nnx.Param), extract_fn=number)

    blocks = {name: abstract(block_type, layers.config) for name, layers in config.segments().items()}
    params = frozen(collect_params(blocks | {OUTER: abstract(Outer, config)}), config.lora)
    return {name: Declared(params, nnx.graphdef(block), products(block)) for name, block in blocks.items()}


@functools.cache
def _build(config: DecoderConfig, compute: Compute, block_type: type[Block]) -> Model:
    declared = _declared(config, block_type)
    params = declared[BLOCKS].params
    head = "embed" if config.tie_word_embeddings else "head"
    # For sampling: a token at a time leaves the kernels' threads nothing to share.
    by_xla = Compute(attention="xla")

    def normed(compute: Compute, outer, x):
        y = Operations(compute).norm(x, outer["norm"], config.rms_norm_eps, config.norm_plus_one)
        return times(1 / config.logits_scaling, y)

    def logits(outer, x):
        z = linear(normed(by_xla, outer, x), outer[head]).astype(jnp.float32)
        return softcapped(z, config.final_logit_softcapping) if config.final_logit_softcapping else z

    segments = (_segment(config, compute, name, of_segment, block_type) for name, of_segment in declared.items())
    return Model(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        compute=compute,
        segments=tuple(segments),
        outer_params=params[OUTER],
        head=head,
        head_uses=("norm", head),
        sites=SITES,
        init_outer=functools.partial(init_outer, config),
        final=functools.partial(normed, compute),
        logits=logits,
        rebuild=lambda compute: _build(config, compute, block_type),
        embedding_scale=config.embedding_scale,
        logit_softcap=config.final_logit_softcapping,
        draws=_draws(config, compute),
    )


def _segment(
    config: DecoderConfig, compute: Compute, name: str, declared: Declared, block_type: type[Block]
) -> Segment:
    """A segment of the model with these sizes."""
    params, graph = declared.params[name], declared.graph
    of_layers, numbers = config.segments()[name]
    by_xla = Compute(attention="xla")
    trained = trainable(params)

    def cached_block(w, x_BSD, cache: Cache, variant: Variant):
        starts_BS = None if cache.first is None else jnp.broadcast_to(cache.first[:, None], x_BSD.shape[:2])
        return nnx.merge(graph, w)(x_BSD, Operations(by_xla, variant, starts=starts_BS), cache, ROUTES)[:2]

    def with_new_adapters(base, seed, l, numbers):
        return with_adapters(base, part_of(init_layer(config, name, seed, l, block_type), trained), numbers)

    block, block_forward, block_backward = _block_functions(of_layers, compute, graph, declared.products, trained)
    last_products = ()
    if not config.sandwich_norms and block_type is Block:  # a block of one's own may do anything with them
        mlp = params["mlp"]
        last_products = (mlp["w_down"], *(mlp[key]["w_down"] for key in mlp if key == SHARED))
    return Segment(
        name=name,
        start=numbers.start,
        params=params,
        variants=config.variants(compute.precision)[numbers.start : numbers.stop],
        heads=Heads(
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            softcapped=config.attn_logit_softcapping > 0,
            sinks=config.attention_sinks,
        ),
        init=functools.partial(init_layer, config, name, block=block_type),
        block=block,
        block_forward=block_forward,
        block_backward=block_backward,
        cached_block=cached_block,
        last_products=last_products,
        with_adapters=with_new_adapters if config.lora else None,
        statistics=planned_statistics(of_layers.num_experts) if of_layers.num_experts else None,
    )


def _draws(config: DecoderConfig, compute: Compute) -> bool:
    """True if training draws random numbers in the blocks."""
    return compute.precision.recipe == "nvfp4" or (config.lora is not None and config.lora.dropout > 0)


def _block_functions(
    config: DecoderConfig, compute: Compute, graph, products: dict, trained
) -> tuple[Callable, Callable, Callable]:
    """`block`, `block_forward` and `block_backward` of a `Segment`, by reverse mode.

    products: numbers of the products of the block's matrices. trained: the `Param`s of which gradients are computed.
    """
    precision = compute.precision
    draws = _draws(config, compute)
    frozen = config.lora is not None
    if compute.sequence_chunks > 1:
        return chunked.block_functions(*_chunk_functions(compute, graph, frozen), compute.sequence_chunks, trained)

    def applied(w, quantized, x_BSD, recipe_inputs, probes, variant: Variant, starts_BS, routing: Routing):
        """(x, Routed). w: weights in the model's dtype. quantized: those in float8, by the number of their product."""
        seed = recipe_inputs if draws else None
        in_float8 = None
        if quantized:
            in_float8 = InFloat8(quantized, recipe_inputs if precision.delayed else None, probes)
        ops = Operations(compute, variant, seed, starts_BS, frozen, in_float8)
        x_BSD, _, routed = nnx.merge(graph, w)(x_BSD, ops, None, routing)
        return x_BSD, routed

    def block(w, x_BSD, recipe_inputs=None, variant: Variant = PLAIN, starts_BS=None, routing: Routing = ROUTES):
        inputs = x_BSD, recipe_inputs, None, variant, starts_BS, routing
        return applied(dequantise_all(w, x_BSD.dtype), by_product(w, products), *inputs)

    def block_forward(
        w, x_BSD, recipe_inputs=None, variant: Variant = PLAIN, starts_BS=None, routing: Routing = ROUTES
    ):
        def run(w_trained, w, x_BSD, starts_BS, counted_BS, probes):
            whole = with_part(dequantise_all(w, x_BSD.dtype), w_trained)
            of_tokens = starts_BS, routing._replace(counted=counted_BS)
            inputs = x_BSD, recipe_inputs, probes, variant, *of_tokens
            x_BSD, routed = applied(whole, by_product(w, products), *inputs)
            statistics, decided = routed or (None, None)
            return (x_BSD, statistics), decided

        # Without a tangent, reverse mode computes no gradient of what is not trained.
        how: Any = {
            "saveable_args": (False, False, True, False, False, False),
            "in_nzs": (True, False, True, True, True, True),
        }
        arguments = _trained_part(w, x_BSD), w, x_BSD, starts_BS, routing.counted, _probes(x_BSD, recipe_inputs)
        (x_BSD, statistics), vjp, decided = jax.vjp(run, *arguments, has_aux=True, **how)
        return (x_BSD, Routed(statistics, decided) if config.num_experts else None), vjp

    def block_backward(
        w, saved, d_result, recipe_inputs=None, variant: Variant = PLAIN, starts_BS=None, routing: Routing = ROUTES
    ):
        dx_BSD, d_statistics = d_result
        # As `saveable_args` asks for: neither weights nor starts are among what is saved. Weights are fetched again.
        of_tokens = saved.args_res[2], starts_BS, routing.counted
        saved.args_res = [_trained_part(w, dx_BSD), w, *of_tokens, _probes(dx_BSD, recipe_inputs)]
        if config.num_experts and d_statistics is None:
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), planned_statistics(config.num_experts))
            d_statistics = jax.tree.map(lambda x: mark_varying(x, varying_axes(dx_BSD)), zeros)
        dw, _, dx_BSD, _, _, observed = saved((dx_BSD, d_statistics))
        return dw, dx_BSD, None if observed is None else jnp.stack(observed)

    def _trained_part(w, x_BSD):
        return dequantise_all(part_of(w, trained), x_BSD.dtype)

    def _probes(x_BSD, recipe_inputs):
        """Zeros whose gradients are the largest magnitudes of a block with delayed scales; None for other blocks."""
        if not precision.delayed or recipe_inputs is None:
            return None
        return tuple(mark_varying(jnp.float32(0), varying_axes(x_BSD)) for _ in range(SITES.number))

    return block, block_forward, block_backward


def by_product(w: dict, products: dict) -> dict[int, Quantized]:
    """The weights in float8 among those of a layer, by the number of their product."""
    numbers = jax.tree.leaves(products, is_leaf=lambda number: number is None)
    pairs = zip(jax.tree.leaves(w, is_leaf=is_quantized), numbers, strict=True)
    return {number: matrix for matrix, number in pairs if is_quantized(matrix)}


def _chunk_functions(compute: Compute, graph, frozen: bool) -> tuple[Callable, Callable]:
    """`body` and `keys_values` of `chunked.block_functions`. frozen: see `Operations`."""

    def body(w, x_BCD, earlier: Earlier, variant: Variant, starts_BC, routing: Routing):
        ops = Operations(compute, variant, starts=starts_BC, frozen=frozen)
        return nnx.merge(graph, w)(x_BCD, ops, earlier, routing)

    def keys_values(w, x_BCD, first: int, variant: Variant, starts_BC):
        return nnx.merge(graph, w).keys_values(x_BCD, Operations(compute, variant, starts=starts_BC), first)

    return body, keys_values


ARCHITECTURE = ModelArchitecture(
    "llama", from_settings, build, Block, decoder_checks.check_decoder, decoder_checks.REFUSALS
)
