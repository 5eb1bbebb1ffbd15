"""The decoder with its options as one Flax NNX module: the plain model, differentiated as a whole by JAX.

It is the reference that the engine must equal. decoder_model.py gives the engine its pieces as pure functions of
arrays; both compute `Block`. Parameters are `{"blocks": stacked [L, ...], "outer": {embed, norm, head}}`.

Shape suffixes: B batch, S sequence, D hidden size, V vocabulary, L layers.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from surojax.models.channels import Kept
from surojax.models.decoder_config import (
    ATTENTION,
    DELTA,
    EXPERTS,
    GLOBAL,
    GLOBAL_SHARED,
    LATENT,
    MAMBA,
    MLP,
    SCORE,
    SLIDING,
    SLIDING_SHARED,
    DecoderConfig,
)
from surojax.models.kinds.experts import Experts
from surojax.models.kinds.gated_delta import GatedDelta
from surojax.models.kinds.gated_mlp import SwiGLU
from surojax.models.kinds.global_attention import GlobalAttention
from surojax.models.kinds.joined_mlp import JoinedMlp
from surojax.models.kinds.latent_attention import LatentAttention
from surojax.models.kinds.layer_input import LayerInput
from surojax.models.kinds.mamba2 import Mamba2
from surojax.models.kinds.mlp_with_experts import MlpWithExperts
from surojax.models.kinds.relu_mlp import ReluMlp
from surojax.models.kinds.self_attention import Attention
from surojax.models.kinds.shared_attention import SharedAttention, SharedGlobalAttention
from surojax.models.kinds.short_conv import ShortConv
from surojax.models.kinds.sublayer import LayerKinds, Mixer, Mlp, NoMixer, NoMlp
from surojax.models.layers import norm_weight, parameter
from surojax.models.linear import linear
from surojax.models.lora import add_adapters
from surojax.models.model import DEFAULT, ROUTES, Cache, Earlier, Routed, Routing, Variant
from surojax.models.operations import RELU2, Operations, normalised, softcapped
from surojax.models.recompute import recomputed
from surojax.numerics.rounding import materialised
from surojax.placement.param import VOCABULARY, Kind


def times(factor: float, x: jax.Array) -> jax.Array:
    """Returns factor x; x itself if the factor is 1."""
    return x if factor == 1 else factor * x


@jax.custom_vjp
def times_layer_scalar(x_BSD: jax.Array, factor_1: jax.Array) -> jax.Array:
    """Returns x times a number `[1]` that is not trained: its gradient is 0.

    The result and x's gradient are written to memory, so that no kernel contracts them into a sum that follows.
    """
    return materialised(x_BSD * factor_1[None, None])


times_layer_scalar.defvjp(
    lambda x_BSD, factor_1: (times_layer_scalar(x_BSD, factor_1), factor_1),
    lambda factor_1, dx_BSD: (materialised(dx_BSD * factor_1[None, None]), jnp.zeros_like(factor_1)),
)


# By their names in layer_types; the last two are those of layers that `num_kv_shared_layers` counts.
MIXERS: dict[str, type[Mixer]] = {
    ATTENTION: Attention,
    "conv": ShortConv,
    DELTA: GatedDelta,
    LATENT: LatentAttention,
    MAMBA: Mamba2,
    SLIDING: Attention,
    GLOBAL: GlobalAttention,
    SLIDING_SHARED: SharedAttention,
    GLOBAL_SHARED: SharedGlobalAttention,
}


def sublayer_types(config: DecoderConfig) -> tuple[type[Mixer], type[Mlp]]:
    """The classes of a layer's mixer and MLP. config: of layers that are alike, see `DecoderConfig.segments`."""
    gated = JoinedMlp if config.mlp_joined else SwiGLU
    experts = MlpWithExperts if config.experts_beside_mlp else Experts
    mlp = experts if config.num_experts else ReluMlp if config.hidden_act == RELU2 else gated
    if config.layer_types in (MLP, EXPERTS):
        return NoMixer, mlp
    return MIXERS[config.layer_types or ATTENTION], NoMlp if config.one_purpose else mlp


def declarations(config: DecoderConfig) -> dict[str, LayerKinds]:
    """The sublayers of each segment's layers, without parameters."""

    def of_layers(config: DecoderConfig) -> LayerKinds:
        mixer, mlp = sublayer_types(config)
        return LayerKinds(
            mixer(config), mlp(config), LayerInput(config) if config.hidden_size_per_layer_input else None
        )

    return {name: of_layers(layers.config) for name, layers in config.segments().items()}


class Block(nnx.Module):
    """Computes a decoder layer: x + mixer(norm(x)), then x + mlp(norm(x)).

    Training, sampling and the plain `Decoder` share this definition. With sandwich norms it is
    x + norm(mixer(norm(x))), then x + norm(mlp(norm(x))); without input norms the inner ones are left out. Layers of
    one purpose have the mixer or the MLP alone, and the first norm. With `hidden_size_per_layer_input` a `LayerInput`
    follows the MLP. With `layer_scalar` the result is multiplied by that number, which has no gradient.

    Its input and output may have channels beside the residual stream, see channels.py.

    A subclass computes something else: `__call__` has to use `ops`, `cache` and `routing` as here, `__init__` may add
    parameters (`layers.parameter`), and `handed_on` returns what a chunk hands on, if `sequence_chunks` divides the
    sequence.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config = config

        def norm() -> nnx.Param:
            return norm_weight(rngs, config.norm_plus_one, config.hidden_size, "embed")

        mixer, mlp = sublayer_types(config)
        if config.input_norms:
            self.attention_norm = norm()
        self.mixer_name = mixer.name
        if mixer is not NoMixer:
            setattr(self, mixer.name, mixer(config, rngs=rngs))
        if config.input_norms and not config.one_purpose:
            self.mlp_norm = norm()
        if mlp is not NoMlp:
            self.mlp: Any = mlp(config, rngs=rngs)
        if config.sandwich_norms:
            self.attention_out_norm = norm()
            self.mlp_out_norm = norm()
        if config.hidden_size_per_layer_input:
            self.layer_input = LayerInput(config, rngs=rngs)
        if config.layer_scalar:
            ones = nnx.initializers.ones
            self.layer_scalar = parameter(rngs, (1,), ("scalar",), ones, Kind.VECTOR, learning_rate_factor=0.0)
        add_adapters(self, config.lora, rngs=rngs)

    @property
    def mixer(self) -> Any:
        """The mixer, a module that has its own name: `attention`, `conv`."""
        return getattr(self, self.mixer_name)

    def handed_on(self, x_BSD: jax.Array, ops: Operations, before: Cache | Earlier) -> Cache | Earlier:
        """Computes what later chunks read of a chunk x `[B, C, D]`: its keys and values, or the state after it."""
        if not self.mixer_name and isinstance(before, Cache):
            return before
        x_BSD, ops = self._split(x_BSD, ops)
        normed_BSD = x_BSD
        if self.config.input_norms:
            how = self.config.rms_norm_eps, self.config.norm_plus_one
            normed_BSD = ops.norm(x_BSD, self.attention_norm[...], *how)
        if isinstance(before, Cache):
            return self.mixer(normed_BSD, ops, None, before)[1]
        return self.mixer.earlier(normed_BSD, ops, None, before.start)

    def __call__(
        self, x_BSD: jax.Array, ops: Operations, cache: Cache | Earlier | None = None, routing: Routing = ROUTES
    ) -> tuple[jax.Array, Cache | Earlier | None, Routed | None]:
        """Returns (output `[B, S, D]`, extended cache or the chunk's own keys and values, a router's `Routed`)."""
        x_BSD, ops = self._split(x_BSD, ops)
        x_BSD, new, routed = self._of_stream(x_BSD, ops, cache, routing)
        beside = ops.beside
        if isinstance(new, Kept):
            beside, new = {**beside, **new.beside}, new.new
        return (self.config.channels.joined(x_BSD, beside) if beside else x_BSD), new, routed

    def _split(self, x_BSD: jax.Array, ops: Operations) -> tuple[jax.Array, Operations]:
        """Splits the input into (the residual stream, operations with what is beside it)."""
        channels = self.config.channels
        if not channels.sizes:
            return x_BSD, ops
        x_BSD, beside = channels.split(x_BSD)
        return x_BSD, dataclasses.replace(ops, beside=beside)

    def _of_stream(
        self, x_BSD: jax.Array, ops: Operations, cache: Cache | Earlier | None, routing: Routing
    ) -> tuple[jax.Array, Any, Routed | None]:
        """Computes the block of the residual stream x; see `__call__`."""
        c = self.config
        again = ops.compute.recompute
        how = c.rms_norm_eps, c.norm_plus_one
        of_outputs = c.post_norm_eps or c.rms_norm_eps, c.norm_plus_one

        def attention(y_BSD, norm=None):
            attended_BSD, extended = self.mixer(y_BSD, ops, norm, cache)
            if c.sandwich_norms:
                attended_BSD = ops.norm(attended_BSD, self.attention_out_norm[...], *of_outputs)
            return times(c.residual_multiplier, attended_BSD), extended

        def mlp(y_BSD, norm=None):
            y_BSD, routed = self.mlp(y_BSD, ops, norm, routing)
            y_BSD = ops.norm(y_BSD, self.mlp_out_norm[...], *of_outputs) if c.sandwich_norms else y_BSD
            return times(c.residual_multiplier, y_BSD), routed

        def attention_norm(x_BSD):
            if not c.input_norms:
                return x_BSD, x_BSD
            return ops.add_and_norm(x_BSD, None, self.attention_norm[...], *how, self.mixer.input)

        def mlp_norm(x_BSD, residual_BSD=None):
            if not c.input_norms:
                total_BSD = x_BSD if residual_BSD is None else x_BSD + residual_BSD
                return total_BSD, total_BSD
            return ops.add_and_norm(x_BSD, residual_BSD, self.mlp_norm[...], *how, self.mlp.input)

        if c.one_purpose:
            only, site = (attention, self.mixer.input) if self.mixer_name else (mlp, self.mlp.input)

            def first(x_BSD):
                return ops.add_and_norm(x_BSD, None, self.attention_norm[...], *how, site)

            enabled = again.att if self.mixer_name else again.ffn
            if again.norm:
                y_BSD, result = recomputed(lambda x: only(x, lambda x: first(x)[0]), enabled)(x_BSD)
            else:
                y_BSD, x_BSD = first(x_BSD)
                y_BSD, result = recomputed(only, enabled)(y_BSD)
            return (x_BSD + y_BSD, result, None) if self.mixer_name else (x_BSD + y_BSD, cache, result)
        if again.norm:
            attended_BSD, cache = recomputed(lambda x: attention(x, lambda x: attention_norm(x)[0]), again.att)(x_BSD)
            return self._with_mlp(x_BSD + attended_BSD, ops, mlp, mlp_norm, cache)
        y_BSD, x_BSD = attention_norm(x_BSD)
        attended_BSD, cache = recomputed(attention, again.att)(y_BSD)
        if self.mlp.reads_residual:
            return self._with_mlp(x_BSD + attended_BSD, ops, mlp, mlp_norm, cache)
        y_BSD, x_BSD = mlp_norm(x_BSD, attended_BSD)
        y_BSD, routed = recomputed(mlp, again.ffn)(y_BSD)
        return self._finished(x_BSD + y_BSD, ops), cache, routed

    def _with_mlp(self, x_BSD: jax.Array, ops: Operations, mlp: Callable, mlp_norm: Callable, cache: Any) -> tuple:
        """Adds the MLP of the residual stream x, which is normed in it, and returns the block's results."""
        again = ops.compute.recompute.ffn
        y_BSD, routed = recomputed(lambda x: mlp(x, lambda x: mlp_norm(x)[0]), again)(x_BSD)
        return self._finished(x_BSD + y_BSD, ops), cache, routed

    def _finished(self, x_BSD: jax.Array, ops: Operations) -> jax.Array:
        """Adds the `LayerInput` and multiplies by `layer_scalar`, if there are any."""
        c = self.config
        if c.hidden_size_per_layer_input:
            eps = c.post_norm_eps or c.rms_norm_eps
            x_BSD = self.layer_input(x_BSD, ops, lambda y, weight: ops.norm(y, weight, eps, c.norm_plus_one))
        if not c.layer_scalar:
            return x_BSD
        return times_layer_scalar(x_BSD, self.layer_scalar[...])


class Outer(nnx.Module):
    """The parameters outside of the blocks: embedding, final norm, and the head's matrix unless tied."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        normal = nnx.initializers.normal(config.initializer_range)
        shape = (config.vocab_size, config.hidden_size)
        self.embed = parameter(rngs, shape, (VOCABULARY, "embed"), normal, Kind.TABLE)
        self.norm = norm_weight(rngs, config.final_norm_plus_one, config.hidden_size, "embed")
        if config.head == SCORE:
            self.score = parameter(rngs, (config.num_labels, shape[1]), ("labels", "embed"), normal, Kind.ROUTER)
        elif config.head != "embed":
            self.head = parameter(rngs, shape, (VOCABULARY, "embed"), normal, Kind.TABLE)
        if P := config.hidden_size_per_layer_input:
            self.layer_input_norm = norm_weight(rngs, False, P, "channels")


class Decoder(nnx.Module):
    """The plain model as one Flax module: token ids `[B, S]` -> logits `[B, S, V]` or `[B, S, labels]`.

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
        x_BSD = normalised(x_BSD, c.rms_norm_eps) if c.embedding_norm else x_BSD
        x_BSD = times(c.embedding_scale, x_BSD)
        if c.channels.sizes:
            norm = self.outer.layer_input_norm[...] if c.hidden_size_per_layer_input else None
            x_BSD = c.channels.first(x_BSD, norm, tokens_BS)
        variants = c.variants(DEFAULT.precision)
        segments = {name: (*nnx.split(getattr(self, name)), layers.numbers) for name, layers in c.segments().items()}
        if len(set(variants)) == 1 and all(isinstance(numbers, range) for *_, numbers in segments.values()):
            for graph, weights, _ in segments.values():
                x_BSD, _ = jax.lax.scan(layer(variants[0], graph), x_BSD, weights)
        else:
            places = {number: (name, l) for name, (*_, own) in segments.items() for l, number in enumerate(own)}
            for number, variant in enumerate(variants):
                name, l = places[number]
                graph, weights, _ = segments[name]
                x_BSD, _ = layer(variant, graph)(x_BSD, jax.tree.map(lambda w, l=l: w[l], weights))
        x_BSD = Operations().norm(c.channels.stream(x_BSD), self.outer.norm[...], c.rms_norm_eps, c.final_norm_plus_one)
        if c.head == SCORE:
            return linear(x_BSD, self.outer.score[...])
        x_BSD = times(1 / c.logits_scaling, x_BSD)
        logits_BSV = linear(x_BSD, getattr(self.outer, c.head)[...])
        return softcapped(logits_BSV, c.final_logit_softcapping) if c.final_logit_softcapping else logits_BSV


def init_layer(
    config: DecoderConfig, segment: str, seed: int | jax.Array, l: int | jax.Array, block: type[Block] = Block
) -> dict:
    """Draws random float32 parameters of layer l of a segment, without the other layers; l may be traced.

    They equal layer l of `Decoder` with `nnx.Rngs(jax.random.key(seed))`: the stream's next key after the draws of
    `Outer`, one for each of its arrays, and of the segments before, split into one key for each layer.
    """
    segments = config.segments()
    draws = len(jax.tree.leaves(jax.eval_shape(lambda: init_outer(config, 0)))) + list(segments).index(segment)
    layers = segments[segment]
    keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), draws), len(layers.numbers))
    return _arrays(block(layers.config, rngs=nnx.Rngs(keys[l])))


def init_outer(config: DecoderConfig, seed: int | jax.Array) -> dict:
    """Draws random float32 parameters of embedding, final norm and head."""
    return _arrays(Outer(config, rngs=nnx.Rngs(jax.random.key(seed))))


def _arrays(module: nnx.Module) -> dict:
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))
