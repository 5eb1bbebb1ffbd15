"""The Llama family (Llama 1-3, Mistral, Qwen2, Qwen3) as one Flax NNX module, and its pure functions for the engine.

Shape suffixes: B batch, S sequence, D hidden size, V vocabulary, L layers, N tokens, T cached positions, K key/value
heads, h head dimension.

Two ways to run the same parameters. `Llama.__call__` is the plain model: autodiff goes through all of it, which is the
reference the engine must equal. `functions` gives the pieces of it as pure functions of arrays, so that the engine can
hold one layer at a time. Parameters are `{"blocks": stacked [L, ...], "outer": {embed, norm, head}}`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from surojax.models import llama_fp8
from surojax.models.layers import (
    Attention,
    Recompute,
    RopeScaling,
    SwiGLU,
    added_and_normed,
    computed_again,
    linear,
    normed,
    parameter,
    products,
    rms_norm,
    times,
    vector,
)
from surojax.numerics import fp8
from surojax.numerics.recipes import Precision
from surojax.placement.param import Kind, Param


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a model, named as in a Hugging Face `config.json`; `qk_norm` is what makes a Qwen3."""

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
    initializer_range: float = 0.02
    attention: str = "auto"
    recompute: Recompute = dataclasses.field(default_factory=Recompute)
    precision: Precision = dataclasses.field(default_factory=Precision)

    @property
    def num_matmul_params(self) -> int:
        """Parameters that take part in matrix products once per token: the blocks' matrices and the head."""
        heads = self.head_dim * (2 * self.num_attention_heads + 2 * self.num_key_value_heads)
        block = self.hidden_size * (heads + 3 * self.intermediate_size)
        return self.num_hidden_layers * block + self.vocab_size * self.hidden_size


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.attention_norm = vector(rngs, config.hidden_size, "embed", nnx.initializers.ones)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = vector(rngs, config.hidden_size, "embed", nnx.initializers.ones)
        self.mlp = SwiGLU(config, rngs=rngs)

    def __call__(self, x_BSD: jax.Array, product: Callable = lambda name: times) -> jax.Array:
        """product: how the recipe computes products, see `layers.products`."""
        again = self.config.recompute
        attended_BSD = self.normed(self.attention, x_BSD, self.attention_norm, product, again.att)
        if again.norm:
            x_BSD = x_BSD + attended_BSD
            return x_BSD + self.normed(self.mlp, x_BSD, self.mlp_norm, product, again.ffn)
        y_BSD, x_BSD = added_and_normed(x_BSD, attended_BSD, self.mlp_norm[...], self.config)
        return x_BSD + computed_again(again.ffn, lambda y_BSD: self.mlp(y_BSD, product))(y_BSD)

    def normed(self, layer: Callable, x_BSD: jax.Array, scale: nnx.Param, product: Callable, again: bool) -> jax.Array:
        """layer(norm(x)); what the layer saves is computed again where `again` is set."""
        norm = lambda x_BSD: normed(x_BSD, scale[...], self.config)
        if self.config.recompute.norm:
            return computed_again(again, lambda x_BSD: layer(x_BSD, product, norm))(x_BSD)
        return computed_again(again, lambda y_BSD: layer(y_BSD, product))(norm(x_BSD))

    def cached(self, x_BSD: jax.Array, cache, start: jax.Array):
        """The same with keys and values kept in `cache`; see `Attention.cached`."""
        eps = self.config.rms_norm_eps
        y_BSD, cache = self.attention.cached(rms_norm(x_BSD, self.attention_norm[...], eps), cache, start)
        x_BSD = x_BSD + y_BSD
        return x_BSD + self.mlp(rms_norm(x_BSD, self.mlp_norm[...], eps), lambda name: times), cache


class Outer(nnx.Module):
    """What stands around the blocks: embedding, final norm, and a head of its own unless tied to the embedding."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        normal, shape = nnx.initializers.normal(config.initializer_range), (config.vocab_size, config.hidden_size)
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
        graph, weights = nnx.split(self.blocks)

        def block(x_BSD, w):
            return nnx.merge(graph, w)(x_BSD), None

        x_BSD = self.outer.embed[...][tokens_BS]
        x_BSD, _ = jax.lax.scan(jax.checkpoint(block) if recompute_block else block, x_BSD, weights)
        x_BSD = rms_norm(x_BSD, self.outer.norm[...], self.config.rms_norm_eps)
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


def init_params(config: LlamaConfig, seed: int | jax.Array) -> dict:
    """Random float32 parameters `{"blocks", "outer"}`, all at once; `state.init_state` builds them layer by layer."""
    blocks = jax.vmap(lambda l: init_layer(config, seed, l))(jnp.arange(config.num_hidden_layers))
    return {"blocks": blocks, "outer": init_outer(config, seed)}


def _arrays(module: nnx.Module) -> dict:
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


@functools.cache
def declared_params(config: LlamaConfig) -> dict:
    """The model's `Param`s `{"blocks", "outer"}`, collected from what its modules declare; no array is built."""

    def of_module(module, number: int) -> dict:
        state = nnx.state(nnx.eval_shape(lambda: module(config, rngs=nnx.Rngs(0))), nnx.Param)
        variables = nnx.to_pure_dict(state, extract_fn=lambda variable: variable)
        is_variable = lambda x: isinstance(x, nnx.Variable)
        leaves, structure = jax.tree_util.tree_flatten_with_path(variables, is_leaf=is_variable)
        params = [
            Param(
                name=jax.tree_util.keystr(path, simple=True, separator="."),
                shape=variable.get_value().shape,
                axes=tuple(variable.get_metadata("out_sharding")),
                kind=variable.get_metadata("kind"),
                stream=2 * i + number,
            )
            for i, (path, variable) in enumerate(leaves)
        ]
        return structure.unflatten(params)

    return {"blocks": of_module(Block, 0), "outer": of_module(Outer, 1)}


def abstract_params(config: LlamaConfig) -> dict:
    """Shapes and dtypes of `init_params`, without building any array."""
    params = declared_params(config)
    float32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    return {
        "blocks": jax.tree.map(lambda p: float32(config.num_hidden_layers, *p.shape), params["blocks"]),
        "outer": jax.tree.map(lambda p: float32(*p.shape), params["outer"]),
    }


class ModelFunctions(NamedTuple):
    """What the engine needs of a model, as pure functions of arrays.

    block: (weights of one layer, x `[B, S, D]`, given, on) -> x. given: what the recipe wants to know of this layer in
    this microbatch: scales `[sites]` (fp8_hybrid), a seed (nvfp4), else None, which is enough where there is no
    backward pass. on: whether the recipe holds in this layer (static); if not, it computes as recipe bf16 does.
    block_forward: the same -> (x, saved), with what the backward pass needs beside the weights.
    block_backward: (weights, saved, dx, given, on) -> (gradients of the weights, dx, observed: largest magnitudes
    `[sites]` of fp8_hybrid, else None).
    final: (outer, x) -> x normed for the head.
    head: the name of the head's matrix `[V, D]`; the embedding's is "embed".
    head_uses: names of the outer parameters that `final` and the head read.
    cached_block: (weights, x, (keys, values), start) -> (x, (keys, values)), for sampling, as recipe bf16.
    logits: (outer, x `[..., D]`) -> `[..., V]` float32.
    """

    num_layers: int
    precision: Precision
    block: Callable
    block_forward: Callable
    block_backward: Callable
    final: Callable
    head: str
    head_uses: tuple[str, ...]
    cached_block: Callable
    logits: Callable


@functools.cache
def functions(config: LlamaConfig) -> ModelFunctions:
    """The pure functions of a Llama with these sizes."""
    graph = nnx.graphdef(nnx.eval_shape(lambda: Block(config, rngs=nnx.Rngs(0))))
    table = "embed" if config.tie_word_embeddings else "head"
    # For sampling: a token at a time leaves the kernels' threads nothing to share.
    plain = dataclasses.replace(config, precision=dataclasses.replace(config.precision, kernels="xla"))
    plain_graph = nnx.graphdef(nnx.eval_shape(lambda: Block(plain, rngs=nnx.Rngs(0))))

    def cached_block(w, x_BSD, cache, start):
        return nnx.merge(plain_graph, w).cached(x_BSD, cache, start)

    def final(outer, x):
        return normed(x, outer["norm"], config)

    def logits(outer, x):
        return linear(normed(x, outer["norm"], plain), outer[table]).astype(jnp.float32)

    block, block_forward, block_backward = _block_functions(config, graph)
    return ModelFunctions(
        num_layers=config.num_hidden_layers,
        precision=config.precision,
        block=block,
        block_forward=block_forward,
        block_backward=block_backward,
        final=final,
        head=table,
        head_uses=("norm", table),
        cached_block=cached_block,
        logits=logits,
    )


def _block_functions(config: LlamaConfig, graph) -> tuple[Callable, Callable, Callable]:
    """`block`, `block_forward` and `block_backward` of ModelFunctions: in float8 written out, else by reverse mode."""
    precision = config.precision
    in_fp8 = lambda on: on and precision.fp8

    def block(w, x_BSD, given=None, on: bool = True):
        if in_fp8(on):
            return llama_fp8.block(config, w, x_BSD, given)
        recipe = precision if on else dataclasses.replace(precision, recipe="bf16")
        return nnx.merge(graph, w)(x_BSD, products(recipe, given if precision.recipe == "nvfp4" else None))

    def block_forward(w, x_BSD, given=None, on: bool = True):
        if in_fp8(on):
            return llama_fp8.forward(config, w, x_BSD, given)
        return jax.vjp(lambda w, x_BSD: block(w, x_BSD, given, on), w, x_BSD, saveable_args=(False, True))

    def block_backward(w, saved, dy_BSD, given=None, on: bool = True):
        if in_fp8(on):
            dw, dx_BSD, observed = llama_fp8.backward(config, w, saved, dy_BSD, given)
            return dw, dx_BSD, observed if precision.delayed else None
        saved.args_res = [w, saved.args_res[1]]
        return *saved(dy_BSD), fp8.unobserved() if precision.delayed else None

    return block, block_forward, block_backward
