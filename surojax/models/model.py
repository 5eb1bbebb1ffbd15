"""The interface of a model for step, state, planner and sampler: segments of equal layers between embedding and head.

A model is a value: `Param`s, and pure functions of arrays. Nothing in it depends on where a tensor is stored. An
`ModelArchitecture` builds it from sizes and a `Compute` (decoder_model.py); families name theirs (surojax/families).

    embedding -> layer 0, 1, ... -> final norm -> head

Layers of a segment have the same parameters, so these are stacked `[layers, ...]` and a loop goes over them. Segments
follow each other, or alternate: layers of convolution with layers of attention (`Model.stretches`, order.py). What is
static about a single layer, such as its attention window, is its `Variant`: layers of one segment may alternate.

Shape suffixes: B batch, S sequence, D hidden size, V vocabulary, T earlier positions, K key/value heads, h head
dimension.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from surojax.declared import AT_LEAST_1, Facts, declare, section_of
from surojax.models.attention import IMPLEMENTATIONS
from surojax.models.channels import Channels
from surojax.models.kinds.sublayer import LayerKinds, Mixer
from surojax.models.order import LayerRef
from surojax.numerics.fp8 import Sites
from surojax.numerics.recipes import Precision
from surojax.parallel.context import METHODS, Method
from surojax.placement.param import OUTER, Param, base, trainable


@dataclasses.dataclass(frozen=True)
class Recompute:
    """The values that a block's backward pass recomputes instead of reading them from the residuals.

    Only `ffn` and `att` repeat products with weights.
    """

    # recompute_block=False: recompute the norms' outputs instead of saving them
    norm: bool = declare(False, facts=Facts.COST)
    # recompute_block=False: recompute silu(gate) * up
    swiglu: bool = declare(False, facts=Facts.COST)
    # recompute_block=False: recompute silu(gate) * up, gate and up
    ffn: bool = declare(False, facts=Facts.COST)
    # recompute_block=False: recompute queries, keys, values and attention
    att: bool = declare(False, facts=Facts.COST)


@dataclasses.dataclass(frozen=True)
class Compute:
    """Settings of a model's computation that change neither its parameters nor its architecture."""

    # "auto", "xla", or flash attention (NVIDIA, 16-bit): "cudnn", or "mosaic" for sample_packing
    attention: str = declare("auto", choices=IMPLEMENTATIONS, facts=Facts.COST)
    # attention with cp_size: "ulysses" (divides the heads), "allgather" or "ring"
    cp_method: Method = declare("ulysses", choices=METHODS, facts=Facts.COST)
    recompute: Recompute = section_of(Recompute, "recompute_")
    precision: Precision = section_of(Precision)
    # chunks of the sequence that a block computes one after another, exactly; for long sequences
    sequence_chunks: int = declare(1, AT_LEAST_1, facts=Facts.COST)


class Variant(NamedTuple):
    """Properties of one layer that are static: they are known when the program is compiled.

    recipe_enabled: the recipe's numbers are used; if not, the layer computes as recipe bf16 does. window: latest
    positions that a token attends to, its own included; 0: all of them. rotary: which of the model's rotary embeddings
    turns queries and keys: "global", "local" (of layers with a window, if they have their own), or "none".
    """

    recipe_enabled: bool = True
    window: int = 0
    rotary: str = "global"


PLAIN = Variant()
DEFAULT = Compute()


class Cache(NamedTuple):
    """A mixer's state of a layer's earlier positions, see `Mixer.decode_state`; the next position is `start`.

    first: int32 `[B]`, where the texts of the rows begin, if they are padded on the left; None: at 0. decided: of a
    layer that was computed, `Routed.decided` of its new positions; None without a router.
    """

    state: Any
    start: jax.Array | int
    first: jax.Array | None = None
    decided: Any = None


class Earlier(NamedTuple):
    """Keys and values `[B, T, K, h]` of all positions before a chunk of the sequence; None before the first chunk."""

    keys: jax.Array | None = None
    values: jax.Array | None = None

    @property
    def start(self) -> int:
        """Index in its row of the chunk's first token."""
        return 0 if self.keys is None else self.keys.shape[1]

    def with_own(self, keys: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns (keys, values) up to the chunk's last token: earlier positions, then the chunk's own."""
        if self.keys is None:
            return keys, values
        assert self.values is not None
        return jnp.concatenate([self.keys, keys], axis=1), jnp.concatenate([self.values, values], axis=1)


class RecipeInputs(NamedTuple):
    """Arguments of a block that its recipe or its place in a pipeline asks for.

    scales: float32 `[sites]`, of fp8_hybrid. seed: uint32 [], of the block's random numbers, if the model draws.
    computes: bool [], False for an entry of a stack that is no layer (step/padding.py). A pass without gradients needs
    neither scales nor seed.
    """

    scales: jax.Array | None = None
    seed: jax.Array | None = None
    computes: jax.Array | None = None


NO_INPUTS = RecipeInputs()


class Routing(NamedTuple):
    """Arguments of a block that only its router reads.

    counted: bool `[B, S]`, the tokens of its statistics; None: all. decided: `Routed.decided` of the pass that this one
    repeats, or of the program that sampled the tokens; None: the block decides.
    """

    counted: Any = None
    decided: Any = None


ROUTES = Routing()


class Routed(NamedTuple):
    """A router's results: statistics and decisions.

    statistics: float32 arrays, sums over the tokens that count. decided: integers `[B, S, ...]`, which a recomputation
    takes as they are: computed again, they could be others.
    """

    statistics: Any
    decided: Any = None


@dataclasses.dataclass(frozen=True, eq=False)
class Segment:
    """The layers of a model with equal parameters.

    name: of its section in a tree of parameters. numbers: of its layers in the model, ascending. start: layers of all
    segments before it, which is where its layers begin in files. params: the `Param`s of one layer. variants: of each
    layer. mixer: what the layers' mixer declares; `Mixer()` declares nothing. targets: names of the matrices that may
    have adapters, besides those of `Kind.MATRIX`.

    init: (seed, number of a layer in the segment; may be traced) -> its new float32 arrays.
    block: (weights of a layer, x `[B, S, D]`, RecipeInputs or None, Variant, starts, Routing) -> (x, Routed, or None
    without a router). starts: int32 `[B, S]`, the index in its row at which each token's document starts, or None if a
    row is one document. Blocks without a router may have no last argument.
    block_forward: the same arguments -> ((x, Routed), saved), where saved is what the backward pass reads in
    addition to the weights and starts.
    block_backward: (weights, saved, (dx, gradient of the statistics or None), RecipeInputs or None, Variant,
    starts, Routing) -> (gradients of the weights that are trained, dx, observed: largest magnitudes `[sites]` of
    fp8_hybrid, else None).
    statistics: shapes and dtypes of a layer's `Routed.statistics`; None: the blocks have no router. choices: how many
    experts a router sends a token to.
    cached_block: (weights, x, Cache, Variant) -> (x, Cache), for sampling; as recipe bf16, by XLA.
    last_products: the matrices whose products are only added to the block's result. No gradient needs these products,
    so a recomputed block leaves them out.
    with_adapters: (arrays of a layer without its adapters, seed, number of the layer, these arrays as products read
    them) -> the arrays with new ones; None if there are none.
    """

    name: str
    numbers: Sequence[int]
    start: int
    params: Any
    variants: tuple[Variant, ...]
    mixer: Mixer
    init: Callable
    block: Callable
    block_forward: Callable
    block_backward: Callable
    cached_block: Callable
    targets: frozenset[str] = frozenset()
    statistics: Any = None
    choices: int = 0
    last_products: tuple[Param, ...] = ()
    with_adapters: Callable | None = None

    @property
    def trained_params(self) -> Any:
        """The `Param`s of one layer that are trained."""
        return trainable(self.params)

    @property
    def num_layers(self) -> int:
        return len(self.variants)

    @property
    def size(self) -> int:
        """The number of parameters in one layer."""
        return sum(math.prod(p.shape) for p in jax.tree.leaves(self.params))

    def mixing_flops(self, sequence_len: int) -> float:
        """Forward FLOPs per token of all layers' products that are not with weights, see `Mixer.flops`."""
        return sum(self.mixer.flops(sequence_len, variant.window) for variant in self.variants)


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """The interface of a model for step, state, planner and sampler, the same for all families.

    outer_params: `Param`s of embedding ("embed"), final norm and head. head: name of the head's matrix `[V, D]`,
    "embed" if it is the embedding's; `[labels, D]` of a model for sequence classification. head_uses: names of the
    outer parameters that `final` and the head read. sites: of recipe fp8_hybrid.

    init_outer: seed -> new float32 arrays. final: (outer, x) -> x normed for the head. logits: (outer, x `[..., D]`) ->
    `[..., V]` float32, by XLA. rebuild: Compute -> this model computed so.

    beside: channels that layers hand on beside the residual stream, by name (channels.py). outer_params has the weights
    LAYER_INPUT_NORM of what is beside, if the layers have inputs of their own.

    embedding_norm_eps: of an RMSNorm without weights on the embedding; None: there is none. embedding_scale: what the
    embedding is multiplied by then, rounded to its dtype first. logit_softcap: the head's products
    z become cap tanh(z / cap); 0: they are the logits. draws: training draws random numbers in the blocks.
    """

    vocab_size: int
    hidden_size: int
    compute: Compute
    segments: tuple[Segment, ...]
    outer_params: dict
    head: str
    head_uses: tuple[str, ...]
    sites: Sites
    init_outer: Callable
    final: Callable
    logits: Callable
    rebuild: Callable
    embedding_norm_eps: float | None = None
    embedding_scale: float = 1.0
    logit_softcap: float = 0.0
    draws: bool = False
    beside: Mapping[str, int] = MappingProxyType({})

    @property
    def channels(self) -> Channels:
        """The channels of what layers hand on."""
        return Channels(self.hidden_size, self.beside)

    @property
    def precision(self) -> Precision:
        return self.compute.precision

    @property
    def has_logits(self) -> bool:
        """True if the head computes logits of the vocabulary, and not numbers of labels."""
        return "vocab" in self.outer_params[self.head].axes

    @property
    def head_rows(self) -> int:
        """The number of logits, or of labels' numbers, that the head computes for a token."""
        return self.outer_params[self.head].shape[0]

    @property
    def num_layers(self) -> int:
        return sum(segment.num_layers for segment in self.segments)

    @property
    def layers_with_experts(self) -> list[int]:
        """The indices of the layers whose blocks have a router."""
        routed = (s for s in self.segments if s.statistics is not None)
        return sorted(number for s in routed for number in s.numbers)

    @property
    def order(self) -> tuple[LayerRef, ...]:
        """The layers in the order of the model; their kinds are the names of segments."""
        layers = {
            number: LayerRef(segment.name, index, variant)
            for segment in self.segments
            for index, (number, variant) in enumerate(zip(segment.numbers, segment.variants, strict=True))
        }
        return tuple(layers[number] for number in sorted(layers))

    @property
    def stretches(self) -> tuple[tuple[Segment, ...], ...]:
        """The segments in the order of the model's layers; those whose layers alternate are together."""
        stretches: list[list[Segment]] = []
        last = -1  # the number of the last layer so far
        for segment in sorted(self.segments, key=lambda segment: segment.numbers[0]):
            if segment.numbers[0] < last:
                stretches[-1].append(segment)
            else:
                stretches.append([segment])
            last = max(last, segment.numbers[-1])
        return tuple(map(tuple, stretches))

    @property
    def params(self) -> dict:
        """The `Param`s by section: one layer's for each segment, and the outer parameters."""
        return {segment.name: segment.params for segment in self.segments} | {OUTER: self.outer_params}

    @property
    def trained_params(self) -> dict:
        """The `Param`s by section that are trained."""
        return {name: trainable(section) for name, section in self.params.items()}

    @property
    def num_parameters(self) -> int:
        """The number of parameters of the model, without the head of a teacher."""
        outer = sum(math.prod(p.shape) for p in jax.tree.leaves(base(self.outer_params)))
        return outer + sum(segment.num_layers * segment.size for segment in self.segments)

    @property
    def num_trained_parameters(self) -> int:
        """The number of parameters that are trained, with those outside of the layers."""
        sizes = {name: sum(math.prod(p.shape) for p in jax.tree.leaves(x)) for name, x in self.trained_params.items()}
        return sizes[OUTER] + sum(segment.num_layers * sizes[segment.name] for segment in self.segments)

    def init(self, seed: int | jax.Array) -> dict:
        """Random float32 parameters by section, all at once; `first_state.init_state` builds them layer by layer."""

        def stack(segment: Segment):
            return jax.vmap(lambda l: segment.init(seed, l))(jnp.arange(segment.num_layers))

        return {segment.name: stack(segment) for segment in self.segments} | {OUTER: self.init_outer(seed)}

    def abstract_params(self, dtype="float32") -> dict:
        """Shapes and dtypes of `init`'s results, without building arrays. dtype: for parameters that declare none."""

        def stack(layers: tuple[int, ...], params):
            return jax.tree.map(lambda p: jax.ShapeDtypeStruct((*layers, *p.shape), p.dtype or dtype), params)

        stacks = {segment.name: stack((segment.num_layers,), segment.params) for segment in self.segments}
        return stacks | {OUTER: stack((), self.outer_params)}


class ModelArchitecture(NamedTuple):
    """A registered architecture: its config's fields, and the functions that build and check its models.

    name: the value of `model.model_type` in a config. sizes: the `model` fields of a config -> frozen sizes, such as
    `DecoderConfig`. build: (sizes, Compute, class of a block) -> Model. block: this class, which a caller's block is
    derived from. kinds: sizes -> the sublayers of each segment's layers, by its name. check: raises ConfigError for
    `model` fields of a config that do not go together, or not with its other fields, as far as `refusals`, rows of a
    table (refusals/), do not say it.
    """

    name: str
    sizes: Callable[[dict[str, Any]], Any]
    build: Callable[[Any, Compute, type], Model]
    block: type
    kinds: Callable[[Any], dict[str, LayerKinds]]
    check: Callable[[Any], None]
    refusals: tuple = ()


def collect_params(modules: dict[str, Any]) -> dict[str, Any]:
    """Collects the `Param`s by section that modules declare with their weights (`layers.parameter`).

    modules: by section, abstract, from `nnx.eval_shape`. No array is built.
    """

    def variables(module) -> dict:
        return nnx.to_pure_dict(nnx.state(module, nnx.Param), extract_fn=lambda variable: variable)

    def is_variable(x) -> bool:
        return isinstance(x, nnx.Variable)

    by_section: dict[str, Any] = {}
    streams = {False: 0, True: 1}  # even numbers are for layers, odd ones for the outer parameters
    for section, module in modules.items():
        leaves, structure = jax.tree_util.tree_flatten_with_path(variables(module), is_leaf=is_variable)
        params = []
        for path, variable in leaves:
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            kind = variable.get_metadata("kind")
            axes = tuple(variable.get_metadata("out_sharding"))
            declared = variable.get_metadata("declared")
            params.append(Param(name, variable.get_value().shape, axes, kind, streams[section == OUTER], **declared))
            streams[section == OUTER] += 2
        by_section[section] = structure.unflatten(params)
    return by_section
