"""The decoder as a `Model`: pure functions of arrays, so that the engine can hold one layer at a time.

They compute the modules of decoder.py.

Shape suffixes: B batch, S sequence, C chunk of it, D hidden size.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels.manual_axes import mark_varying, varying_axes
from surojax.declared import built
from surojax.models import chunked, decoder_checks, decoder_refusals
from surojax.models.decoder import Block, Outer, declarations, init_layer, init_outer, sublayer_types, times
from surojax.models.decoder_config import SCORE, DecoderConfig
from surojax.models.kinds.experts import SHARED
from surojax.models.linear import Product, linear
from surojax.models.linear_fp8 import InFloat8, sites_of
from surojax.models.lora import frozen, with_adapters
from surojax.models.model import (
    DEFAULT,
    NO_INPUTS,
    PLAIN,
    ROUTES,
    Cache,
    Compute,
    Earlier,
    Model,
    ModelArchitecture,
    RecipeInputs,
    Routed,
    Routing,
    Segment,
    Variant,
    collect_params,
)
from surojax.models.operations import Operations, softcapped
from surojax.models.recompute import with_arguments
from surojax.models.router_losses import planned_statistics
from surojax.numerics.fp8 import Sites
from surojax.numerics.quantized import Quantized, dequantise_all, is_quantized
from surojax.placement.param import OUTER, part_of, trainable, with_part

LAST = ("w_down", "w_out")  # names of the matrices whose products are an MLP's result


def build(config: DecoderConfig, compute: Compute = DEFAULT, block: type[Block] = Block) -> Model:
    """Makes the decoder's `Model`, without building arrays; the same object for equal arguments.

    block: a subclass of `Block` that computes something else.
    """
    return _build(config, compute, block)


class SegmentDeclarations(NamedTuple):
    """Declarations of a segment that do not depend on `Compute`.

    params: by section, of all segments. graph: of a block. products: the product of which each of its parameters is the
    matrix, or None. sites: of all segments' products.
    """

    params: dict
    graph: nnx.GraphDef
    products: dict
    sites: Sites


@functools.cache
def _declared(config: DecoderConfig, block_type: type[Block]) -> dict[str, SegmentDeclarations]:
    """Builds abstract modules of this architecture, and collects each segment's `SegmentDeclarations`."""

    def abstract(module, config: DecoderConfig) -> Any:
        return nnx.eval_shape(lambda: module(config, rngs=nnx.Rngs(0)))

    def product(variable) -> Product | None:
        return variable.get_metadata("product")

    def products(block) -> dict:
        return nnx.to_pure_dict(nnx.state(block, nnx.Param), extract_fn=product)

    blocks = {name: abstract(block_type, layers.config) for name, layers in config.segments().items()}
    params = frozen(collect_params(blocks | {OUTER: abstract(Outer, config)}), config.lora)
    sites = sites_of(product for block in blocks.values() for product in jax.tree.leaves(products(block)))
    return {
        name: SegmentDeclarations(params, nnx.graphdef(block), products(block), sites) for name, block in blocks.items()
    }


@functools.cache
def _build(config: DecoderConfig, compute: Compute, block_type: type[Block]) -> Model:
    declared = _declared(config, block_type)
    any_segment = next(iter(declared.values()))
    params = any_segment.params
    head = config.head
    # Labels' numbers are neither scaled nor capped, unlike logits, as in transformers.
    scaling, softcap = (1.0, 0.0) if head == SCORE else (config.logits_scaling, config.final_logit_softcapping)
    # For sampling: a token at a time leaves the kernels' threads nothing to share.
    by_xla = Compute(attention="xla")

    def normed(compute: Compute, outer, x):
        x = config.channels.stream(x)
        y = Operations(compute).norm(x, outer["norm"], config.rms_norm_eps, config.final_norm_plus_one)
        return times(1 / scaling, y)

    def logits(outer, x):
        z = linear(normed(by_xla, outer, x), outer[head]).astype(jnp.float32)
        return softcapped(z, softcap) if softcap else z

    segments = (_segment(config, compute, name, declarations, block_type) for name, declarations in declared.items())
    return Model(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        compute=compute,
        segments=tuple(segments),
        outer_params=params[OUTER],
        head=head,
        head_uses=("norm", head),
        sites=any_segment.sites,
        init_outer=functools.partial(init_outer, config),
        final=functools.partial(normed, compute),
        logits=logits,
        rebuild=lambda compute: _build(config, compute, block_type),
        embedding_norm_eps=config.rms_norm_eps if config.embedding_norm else None,
        embedding_scale=config.embedding_scale,
        logit_softcap=softcap,
        draws=_draws(config, compute),
        beside=config.channels.sizes,
    )


def _segment(
    config: DecoderConfig, compute: Compute, name: str, declared: SegmentDeclarations, block_type: type[Block]
) -> Segment:
    """Makes the `Segment` of this name."""
    params, graph = declared.params[name], declared.graph
    segments = config.segments()
    layer_config, numbers = segments[name]
    start = sum(len(segments[other].numbers) for other in itertools.takewhile(lambda other: other != name, segments))
    variants = config.variants(compute.precision)
    by_xla = Compute(attention="xla")
    trained = trainable(params)

    def cached_block(w, x_BSD, cache: Cache, variant: Variant):
        starts_BS = None if cache.first is None else jnp.broadcast_to(cache.first[:, None], x_BSD.shape[:2])
        ops = Operations(by_xla, variant, starts=starts_BS)
        x_BSD, after, routed = nnx.merge(graph, w)(x_BSD, ops, cache, ROUTES)
        return x_BSD, after if routed is None else after._replace(decided=routed.decided)

    def with_new_adapters(base, seed, l, numbers):
        return with_adapters(base, part_of(init_layer(config, name, seed, l, block_type), trained), numbers)

    block, block_forward, block_backward = _block_functions(layer_config, compute, declared, trained)
    last_products = ()
    if not config.sandwich_norms and block_type is Block:  # a block of one's own may do anything with them
        mlp = params.get("mlp", {})
        last_products = tuple(part[key] for part in (mlp, mlp.get(SHARED, {})) for key in LAST if key in part)
    kinds = declarations(config)[name]
    return Segment(
        name=name,
        numbers=numbers,
        start=start,
        params=params,
        variants=tuple(variants[number] for number in numbers),
        mixer=kinds.mixer,
        targets=frozenset(target.matrix for kind in kinds.all for target in kind.targets()),
        init=functools.partial(init_layer, config, name, block=block_type),
        block=block,
        block_forward=block_forward,
        block_backward=block_backward,
        cached_block=cached_block,
        last_products=last_products,
        with_adapters=with_new_adapters if config.lora else None,
        statistics=planned_statistics(layer_config.num_experts) if layer_config.num_experts else None,
        choices=layer_config.num_experts_per_tok if layer_config.num_experts else 0,
    )


def _draws(config: DecoderConfig, compute: Compute) -> bool:
    """True if training draws random numbers in the blocks."""
    return compute.precision.recipe == "nvfp4" or (config.lora is not None and config.lora.dropout > 0)


def _block_functions(
    config: DecoderConfig, compute: Compute, declared: SegmentDeclarations, trained
) -> tuple[Callable, Callable, Callable]:
    """Makes `block`, `block_forward` and `block_backward` of a `Segment` by JAX' reverse mode.

    trained: the `Param`s of which gradients are computed.
    """
    _, graph, products, sites = declared
    frozen = config.lora is not None
    if compute.sequence_chunks > 1:
        between = chunked.Appended if sublayer_types(config)[0].appends else chunked.Replaced
        functions = _chunk_functions(compute, graph, frozen)
        return chunked.block_functions(*functions, compute.sequence_chunks, trained, between)

    def applied(w, quantized, x_BSD, recipe_inputs, probes, variant: Variant, starts_BS, routing: Routing):
        """Returns (x, Routed).

        w: weights in the model's dtype. quantized: float8 weights by their product.
        """
        scales, seed, _ = recipe_inputs or NO_INPUTS
        in_float8 = InFloat8(quantized, sites, scales, probes) if quantized else None
        ops = Operations(compute, variant, seed, starts_BS, frozen, in_float8)
        x_BSD, _, routed = nnx.merge(graph, w)(x_BSD, ops, None, routing)
        return x_BSD, routed

    def block(
        w,
        x_BSD,
        recipe_inputs: RecipeInputs | None = None,
        variant: Variant = PLAIN,
        starts_BS=None,
        routing: Routing = ROUTES,
    ):
        inputs = x_BSD, recipe_inputs, None, variant, starts_BS, routing
        return applied(dequantise_all(w, x_BSD.dtype), by_product(w, products), *inputs)

    def block_forward(
        w,
        x_BSD,
        recipe_inputs: RecipeInputs | None = None,
        variant: Variant = PLAIN,
        starts_BS=None,
        routing: Routing = ROUTES,
    ):
        def run(w_trained, w, x_BSD, starts_BS, counted_BS, probes):
            whole = with_part(dequantise_all(w, x_BSD.dtype), w_trained)
            token_arrays = starts_BS, routing._replace(counted=counted_BS)
            inputs = x_BSD, recipe_inputs, probes, variant, *token_arrays
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
        w,
        saved,
        d_result,
        recipe_inputs: RecipeInputs | None = None,
        variant: Variant = PLAIN,
        starts_BS=None,
        routing: Routing = ROUTES,
    ):
        dx_BSD, d_statistics = d_result
        # As `saveable_args` asks for: neither weights nor starts are among what is saved. Weights are fetched again.
        again = _trained_part(w, dx_BSD), w, starts_BS, routing.counted, _probes(dx_BSD, recipe_inputs)
        saved = with_arguments(saved, dict(zip((0, 1, 3, 4, 5), again, strict=True)))
        if config.num_experts and d_statistics is None:
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), planned_statistics(config.num_experts))
            d_statistics = jax.tree.map(lambda x: mark_varying(x, varying_axes(dx_BSD)), zeros)
        dw, _, dx_BSD, _, _, observed = saved((dx_BSD, d_statistics))
        return dw, dx_BSD, None if observed is None else jnp.stack(observed)

    def _trained_part(w, x_BSD):
        return dequantise_all(part_of(w, trained), x_BSD.dtype)

    def _probes(x_BSD, recipe_inputs):
        """Zeros whose gradients are the largest magnitudes of a block's tensors; None without delayed scales."""
        if recipe_inputs is None or recipe_inputs.scales is None:
            return None
        return tuple(mark_varying(jnp.float32(0), varying_axes(x_BSD)) for _ in range(sites.number))

    return block, block_forward, block_backward


def by_product(w: dict, products: dict) -> dict[Product, Quantized]:
    """Selects the float8 weights of a layer, by their product."""
    declared = jax.tree.leaves(products, is_leaf=lambda product: product is None)
    pairs = zip(jax.tree.leaves(w, is_leaf=is_quantized), declared, strict=True)
    return {product: matrix for matrix, product in pairs if is_quantized(matrix)}


def _chunk_functions(compute: Compute, graph, frozen: bool) -> tuple[Callable, Callable]:
    """Makes `body` and `handed_on` for `chunked.block_functions`. frozen: see `Operations`."""

    def body(w, x_BCD, before: Cache | Earlier, variant: Variant, starts_BC, routing: Routing):
        ops = Operations(compute, variant, starts=starts_BC, frozen=frozen)
        return nnx.merge(graph, w)(x_BCD, ops, before, routing)

    def handed_on(w, x_BCD, before: Cache | Earlier, variant: Variant, starts_BC):
        ops = Operations(compute, variant, starts=starts_BC)
        return nnx.merge(graph, w).handed_on(x_BCD, ops, before)

    return body, handed_on


ARCHITECTURE = ModelArchitecture(
    "llama",
    functools.partial(built, DecoderConfig),
    build,
    Block,
    declarations,
    decoder_checks.check_decoder,
    decoder_refusals.REFUSALS,
)
