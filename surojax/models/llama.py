"""The Llama family (Llama 1-3, Mistral, Qwen2, Qwen3) as one Flax NNX module, and as a `Model` for the engine.

Shape suffixes: B batch, S sequence, D hidden size, V vocabulary, L layers.

Two ways to run the same parameters. `Llama.__call__` is the plain model: autodiff goes through all of it, which is the
reference the engine must equal. `build` gives the pieces of it as pure functions of arrays, so that the engine can hold
one layer at a time. Both compute `Block`. Parameters are `{"blocks": stacked [L, ...], "outer": {embed, norm, head}}`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from surojax.models import llama_fp8
from surojax.models.layers import Attention, SwiGLU, parameter, vector
from surojax.models.model import DEFAULT, PLAIN, Cache, Compute, Heads, Model, Segment, Variant, collect_params
from surojax.models.operations import Operations, RopeScaling, linear, recomputed
from surojax.numerics import fp8
from surojax.numerics.recipes import Precision
from surojax.placement.param import OUTER, Kind

BLOCKS = "blocks"  # the one segment


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """The architecture, named as in a Hugging Face `config.json`; `qk_norm` is what makes a Qwen3.

    sliding_window: the number of latest positions that a token attends to, its own included; 0: all of them.
    sliding_window_pattern: n, if every n-th layer attends to all positions (Gemma 3: 6, gpt-oss: 2); 0: none does
    (Mistral).
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
    qk_norm: bool = False
    sliding_window: int = 0
    sliding_window_pattern: int = 0
    initializer_range: float = 0.02

    def variants(self, precision: Precision) -> tuple[Variant, ...]:
        """The `Variant` of each layer: whether the recipe is enabled, and the attention window."""

        def window(l: int) -> int:
            pattern = self.sliding_window_pattern
            attends_to_all = pattern and (l + 1) % pattern == 0
            return 0 if attends_to_all else self.sliding_window

        L = self.num_hidden_layers
        return tuple(Variant(precision.enabled(l, L), window(l)) for l in range(L))


def from_settings(settings: dict[str, Any]) -> LlamaConfig:
    """The architecture of a config's `model` fields. The fields rope_NAME, except rope_theta, are of the scaling."""
    sizes = dict(settings)
    kind = sizes.pop("rope_scaling")
    names = [field.name for field in dataclasses.fields(RopeScaling) if field.name != "kind"]
    scaling = RopeScaling(kind, **{name: sizes.pop(f"rope_{name}") for name in names})
    return LlamaConfig(**sizes, rope_scaling=scaling)


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): the one definition, for training, sampling and the reference."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.eps = config.rms_norm_eps
        self.attention_norm = vector(rngs, config.hidden_size, "embed", nnx.initializers.ones)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = vector(rngs, config.hidden_size, "embed", nnx.initializers.ones)
        self.mlp = SwiGLU(config, rngs=rngs)

    def __call__(self, x_BSD: jax.Array, ops: Operations, cache: Cache | None = None) -> tuple[jax.Array, Cache | None]:
        """(the block of x `[B, S, D]`, the cache extended by S positions)."""
        again = ops.compute.recompute

        def attention(y_BSD, norm=None):
            return self.attention(y_BSD, ops, norm, cache)

        def mlp(y_BSD, norm=None):
            return self.mlp(y_BSD, ops, norm)

        def attention_norm(x_BSD):
            return ops.norm(x_BSD, self.attention_norm[...], self.eps)

        def mlp_norm(x_BSD):
            return ops.norm(x_BSD, self.mlp_norm[...], self.eps)

        if again.norm:
            attended_BSD, cache = recomputed(lambda x_BSD: attention(x_BSD, attention_norm), again.att)(x_BSD)
            x_BSD = x_BSD + attended_BSD
            return x_BSD + recomputed(lambda x_BSD: mlp(x_BSD, mlp_norm), again.ffn)(x_BSD), cache
        attended_BSD, cache = recomputed(attention, again.att)(attention_norm(x_BSD))
        y_BSD, x_BSD = ops.add_and_norm(x_BSD, attended_BSD, self.mlp_norm[...], self.eps)
        return x_BSD + recomputed(mlp, again.ffn)(y_BSD), cache


class Outer(nnx.Module):
    """The parameters outside of the blocks: embedding, final norm, and a head of its own unless it is tied."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        normal = nnx.initializers.normal(config.initializer_range)
        shape = (config.vocab_size, config.hidden_size)
        self.embed = parameter(rngs, shape, ("vocab", "embed"), normal, Kind.TABLE)
        self.norm = vector(rngs, config.hidden_size, "embed", nnx.initializers.ones)
        if not config.tie_word_embeddings:
            self.head = parameter(rngs, shape, ("vocab", "embed"), normal, Kind.TABLE)


class Llama(nnx.Module):
    """tokens `[B, S]` -> logits `[B, S, V]`: the plain model."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=config.num_hidden_layers)
        @nnx.vmap(
            axis_size=config.num_hidden_layers,
            transform_metadata={nnx.PARTITION_NAME: "layers"},  # type: ignore[arg-type]
        )
        def stack(rngs):
            return Block(config, rngs=rngs)

        self.config = config
        self.outer = Outer(config, rngs=rngs)
        self.blocks = stack(rngs)

    def __call__(self, tokens_BS: jax.Array, *, recompute_block: bool = False) -> jax.Array:
        variants = self.config.variants(DEFAULT.precision)
        graph, weights = nnx.split(self.blocks)

        def block(x_BSD, w, variant: Variant):
            return nnx.merge(graph, w)(x_BSD, Operations(variant=variant))

        def layer(variant: Variant) -> Callable:
            one = functools.partial(block, variant=variant)
            return jax.checkpoint(one) if recompute_block else one

        x_BSD = self.outer.embed[...][tokens_BS]
        if len(set(variants)) == 1:
            x_BSD, _ = jax.lax.scan(layer(variants[0]), x_BSD, weights)
        else:
            for l, variant in enumerate(variants):
                x_BSD, _ = layer(variant)(x_BSD, jax.tree.map(lambda w, l=l: w[l], weights))
        x_BSD = Operations().norm(x_BSD, self.outer.norm[...], self.config.rms_norm_eps)
        return linear(x_BSD, (self.outer.embed if self.config.tie_word_embeddings else self.outer.head)[...])


def init_layer(config: LlamaConfig, seed: int | jax.Array, l: int | jax.Array) -> dict:
    """Random float32 parameters of layer l, drawn alone; l may be traced, so that a loop can build layer after layer.

    They are those that `Llama` with `nnx.Rngs(jax.random.key(seed))` has: the stream's next key after the draws of
    `Outer`, one for each of its arrays, split into one key for each layer.
    """
    draws = len(jax.tree.leaves(jax.eval_shape(lambda: init_outer(config, 0))))
    keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), draws), config.num_hidden_layers)
    return _arrays(Block(config, rngs=nnx.Rngs(keys[l])))


def init_outer(config: LlamaConfig, seed: int | jax.Array) -> dict:
    """Random float32 parameters of the outer layers."""
    return _arrays(Outer(config, rngs=nnx.Rngs(jax.random.key(seed))))


def _arrays(module: nnx.Module) -> dict:
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def build(config: LlamaConfig, compute: Compute = DEFAULT) -> Model:
    """The model with these sizes, computed so; the same object for equal arguments. No array is built."""
    return _build(config, compute)


@functools.cache
def _build(config: LlamaConfig, compute: Compute) -> Model:

    def abstract(module) -> Any:
        return nnx.eval_shape(lambda: module(config, rngs=nnx.Rngs(0)))

    params = collect_params({BLOCKS: abstract(Block), OUTER: abstract(Outer)})
    head = "embed" if config.tie_word_embeddings else "head"
    graph = nnx.graphdef(abstract(Block))
    # For sampling: a token at a time leaves the kernels' threads nothing to share.
    by_xla = Compute(attention="xla")

    def normed(compute: Compute, outer, x):
        return Operations(compute).norm(x, outer["norm"], config.rms_norm_eps)

    def logits(outer, x):
        return linear(normed(by_xla, outer, x), outer[head]).astype(jnp.float32)

    def cached_block(w, x_BSD, cache: Cache, variant: Variant):
        return nnx.merge(graph, w)(x_BSD, Operations(by_xla, variant), cache)

    block, block_forward, block_backward = _block_functions(config, compute, graph)
    segment = Segment(
        name=BLOCKS,
        start=0,
        params=params[BLOCKS],
        variants=config.variants(compute.precision),
        heads=Heads(config.num_attention_heads, config.num_key_value_heads, config.head_dim),
        init=functools.partial(init_layer, config),
        block=block,
        block_forward=block_forward,
        block_backward=block_backward,
        cached_block=cached_block,
        last_products=(params[BLOCKS]["mlp"]["w_down"],),
    )
    return Model(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        compute=compute,
        segments=(segment,),
        outer_params=params[OUTER],
        head=head,
        head_uses=("norm", head),
        sites=llama_fp8.SITES,
        init_outer=functools.partial(init_outer, config),
        final=functools.partial(normed, compute),
        logits=logits,
        rebuild=functools.partial(_build, config),
    )


def _block_functions(config: LlamaConfig, compute: Compute, graph) -> tuple[Callable, Callable, Callable]:
    """`block`, `block_forward` and `block_backward` of a `Segment`: in float8 written out, else by reverse mode."""
    precision = compute.precision

    def in_fp8(variant: Variant) -> bool:
        return variant.recipe_enabled and precision.fp8

    def block(w, x_BSD, recipe_inputs=None, variant: Variant = PLAIN):
        if in_fp8(variant):
            return llama_fp8.block(config, Operations(compute, variant), w, x_BSD, recipe_inputs), None
        seed = recipe_inputs if precision.recipe == "nvfp4" else None
        x_BSD, _ = nnx.merge(graph, w)(x_BSD, Operations(compute, variant, seed))
        return x_BSD, None

    def block_forward(w, x_BSD, recipe_inputs=None, variant: Variant = PLAIN):
        if in_fp8(variant):
            x_BSD, saved = llama_fp8.forward(config, Operations(compute, variant), w, x_BSD, recipe_inputs)
            return (x_BSD, None), saved

        def run(w, x_BSD):
            return block(w, x_BSD, recipe_inputs, variant)

        return jax.vjp(run, w, x_BSD, saveable_args=(False, True))

    def block_backward(w, saved, d_result, recipe_inputs=None, variant: Variant = PLAIN):
        if in_fp8(variant):
            dy_BSD, _ = d_result
            dw, dx_BSD, observed = llama_fp8.backward(
                config, Operations(compute, variant), w, saved, dy_BSD, recipe_inputs
            )
            return dw, dx_BSD, observed if precision.delayed else None
        # As `saveable_args` asks for: weights are not among what is saved, they are fetched again.
        saved.args_res = [w, saved.args_res[1]]
        dw, dx_BSD = saved(d_result)
        return dw, dx_BSD, fp8.unobserved(llama_fp8.SITES) if precision.delayed else None

    return block, block_forward, block_backward
