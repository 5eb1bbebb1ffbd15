"""The declaration of a family of models, and the defaults that most families share.

A family is a file beside this one and a row in registry.py. The file says which options of the decoder the family has,
how these are written in Hugging Face's `config.json` and read from it, and how its tensors are called. Nothing else in
the package knows a family by its name.

A key of config.json that would change the arithmetic and is not known is refused with its name, so that a model is
never computed with less than its config says. A family therefore declares every key: in `defaults` or in `required`;
keys that change nothing in any family are in neutral.py.
"""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from surojax.families import rope_keys, window_keys
from surojax.models import decoder_model
from surojax.models.channels import LAYER_INPUT_NORM
from surojax.models.kinds.experts import Experts
from surojax.models.kinds.gated_mlp import SwiGLU
from surojax.models.kinds.self_attention import Attention
from surojax.models.kinds.sublayer import Sublayer
from surojax.models.kinds.targets import WITHOUT_EXPERTS
from surojax.models.model import ModelArchitecture

# The values that transformers' class for Llama gives to keys that config.json leaves out; others differ in some.
LLAMA_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,  # as many as query heads
    "head_dim": None,  # hidden_size / num_attention_heads
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "sliding_window": None,
}
# Keys that are `model` fields with the same name and meaning in every family.
SIZES = tuple(name for name in LLAMA_DEFAULTS if name not in ("rope_theta", "sliding_window"))
# Keys that must have one of these values in every family, since nothing else is computed here.
REQUIRED: dict[str, tuple] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0, None),
}
WITHOUT_WINDOW: dict[str, tuple] = {"sliding_window": (None,)}  # of families in which transformers computes none
# Our names of tensors, and theirs; `{l}` is the number of the layer.
LAYER = "model.layers.{l}."
GGUF_LAYER = "blk.{l}."


def in_safetensors(kind: type[Sublayer], *names: str) -> dict[str, str]:
    """Our names and theirs of these parameters of a sublayer, or of all of them."""
    return {f"{kind.name}.{ours}": LAYER + kind.tensors[ours].safetensors for ours in names or kind.tensors}


def in_gguf(kind: type[Sublayer], *names: str) -> dict[str, str]:
    """Our names and theirs in GGUF files of these parameters of a sublayer, or of all of them."""
    theirs = {ours: kind.tensors[ours].gguf for ours in names or kind.tensors}
    return {f"{kind.name}.{ours}": GGUF_LAYER + name for ours, name in theirs.items() if name}


TENSOR_NAMES = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
    "score": "score.weight",
    LAYER_INPUT_NORM: "model.per_layer_projection_norm.weight",
    "attention_norm": LAYER + "input_layernorm.weight",
    "mlp_norm": LAYER + "post_attention_layernorm.weight",
    **in_safetensors(Attention),
    **in_safetensors(SwiGLU),
}
# Matrices of experts [experts, out, in] are one tensor here; files may have one for each (exchange/expert_tensors.py).
EXPERTS = "mlp.experts."
OF_EXPERTS = ("router", *SwiGLU.tensors)
EXPERT_TENSOR_NAMES = TENSOR_NAMES | in_safetensors(Experts, *OF_EXPERTS)
# Of layers without experts, if others have experts, and of all layers with routers that have a bias for the choice, or
# with shared experts.
SHARED_EXPERT_TENSOR_NAMES = (
    TENSOR_NAMES
    | in_safetensors(Experts)
    | {WITHOUT_EXPERTS + ours: theirs for ours, theirs in in_safetensors(SwiGLU).items()}
)
GGUF_NAMES = {
    "embed": "token_embd.weight",
    "norm": "output_norm.weight",
    "head": "output.weight",
    "attention_norm": GGUF_LAYER + "attn_norm.weight",
    "mlp_norm": GGUF_LAYER + "ffn_norm.weight",
    **in_gguf(Attention),
    **in_gguf(SwiGLU),
}
EXPERT_GGUF_SIZES = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
EXPERT_GGUF_NAMES = GGUF_NAMES | in_gguf(Experts, *OF_EXPERTS)
SHARED_EXPERT_GGUF_NAMES = (
    GGUF_NAMES | in_gguf(Experts) | {WITHOUT_EXPERTS + ours: theirs for ours, theirs in in_gguf(SwiGLU).items()}
)
# Of families with norms after attention and MLP.
NORMS_AFTER = {
    "attention_out_norm": GGUF_LAYER + "post_attention_norm.weight",
    "mlp_out_norm": GGUF_LAYER + "post_ffw_norm.weight",
}
# Of families in whose files the norm before the MLP has the name of what follows the attention.
NORM_AFTER_ATTENTION = {"mlp_norm": GGUF_LAYER + "post_attention_norm.weight"}


class ExpertFiles(NamedTuple):
    """The layout of a layer's experts in files that store all experts in one tensor.

    gate_up, down: names of the tensors after the layer's: gate and up in one, [experts, 2 x out, in], and down. Biases
    have these names with "_bias".

    only: files have no others; else each expert may have its own tensors, and is written so unless `convert` is asked.
    transposed: matrices are [experts, in, out]. interleaved: outputs of gate and up alternate; else gate's come first.
    module: that has them in transformers 5, by which PEFT names their adapters.
    """

    gate_up: str = EXPERTS + "gate_up_proj"
    down: str = EXPERTS + "down_proj"
    only: bool = False
    transposed: bool = False
    interleaved: bool = False
    module: str = EXPERTS.removesuffix(".")


BY_EXPERT = ExpertFiles()


class GgufTransform(NamedTuple):
    """How GGUF files have a tensor in other numbers, another order, or another shape.

    change, back: (float32 array, config.json) -> array of the same shape; inverse, except for rounding. axis: one of
    size 1 that files leave out; None: they leave out none. dimensions: of our tensor, with that axis.
    """

    change: Callable[[np.ndarray, dict[str, Any]], np.ndarray]
    back: Callable[[np.ndarray, dict[str, Any]], np.ndarray]
    axis: int | None = None
    dimensions: int = 0

    def shape_in_file(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that is written of a tensor of ours."""
        return shape if self.axis is None else (*shape[: self.axis], *shape[self.axis + 1 :])

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Our shape of a file's tensor, which may have the axis that most leave out."""
        if self.axis is None or len(stored) == self.dimensions:
            return stored
        return (*stored[: self.axis], 1, *stored[self.axis :])

    def to_file(self, x: np.ndarray, config: dict[str, Any]) -> np.ndarray:
        """Makes the file's tensor of ours."""
        return self.change(x.reshape(self.shape_in_file(x.shape)), config)

    def from_file(self, x: np.ndarray, config: dict[str, Any]) -> np.ndarray:
        """Makes our tensor of the file's."""
        ours = self.shape(x.shape)
        return self.back(x.reshape(self.shape_in_file(ours)), config).reshape(ours)


# Of the norms of (1 + w), of which files have that sum.
PLUS_ONE = GgufTransform(lambda x, config: x + np.float32(1), lambda x, config: x - np.float32(1))


class GgufParts(NamedTuple):
    """How GGUF files have one tensor of ours as several.

    names: theirs, with `{l}` for the number of the layer. shape: config.json -> our shape. shapes: config.json -> that
    of each part. divide, join: (arrays, config.json) -> arrays: our one -> the parts, and back.
    """

    names: tuple[str, ...]
    shape: Callable[[dict[str, Any]], tuple[int, ...]]
    shapes: Callable[[dict[str, Any]], list[tuple[int, ...]]]
    divide: Callable[[np.ndarray, dict[str, Any]], list[np.ndarray]]
    join: Callable[[list[np.ndarray], dict[str, Any]], np.ndarray]


class Gguf(NamedTuple):
    """The names, metadata keys and layouts of a family's GGUF files.

    architecture: their `general.architecture`; "": the family's model_type. describes: config.json -> True if files of
    this architecture have such models.

    neighbours: rows of queries and keys are in the order that rotates neighbouring channels of a head, see gguf.py.
    llama3_rope: the parameters, without the factor, of all models of the family whose rotary embedding is of the type
    llama3: files have what these and the factor make of the frequencies; None: the family has no such models. divisors:
    config.json -> what files of the family have there `[h / 2]`, or None for nothing; read_divisors: its inverse, as
    rope_scaling, which raises ConfigError for other numbers.
    names: our names of tensors, and theirs. sizes: keys of the metadata after the architecture's name, and theirs in
    config.json, in addition to those of every family. fixed: such keys that say nothing here, with their only value.
    implied: keys of config.json that no file says, with the value that llama.cpp takes for them; implied_rope: likewise
    of rope_scaling. present: keys of config.json that are true if files have this tensor (our name) of any layer.
    layers_with: keys that only before_writing and after_reading have: the numbers of the layers with this tensor.
    partial_rotary: the number of channels that rotate says partial_rotary_factor. by_layer: keys of the metadata that
    may have a number for each layer; between before_writing and after_reading config.json has these lists too, all as
    long as the layers when they are read. window_period: n if
    each n-th layer has no window in files without a key for it; 0: the format has no such key. defaults: values of keys
    that files may leave out. further_layers: files may count layers that predict further tokens in block_count, and
    have them; they are left aside. unread: keys that say nothing else, with the values that are written, or functions
    (config.json as `write` makes it, the model's own) -> these. transforms: by our name of a parameter. parts:
    likewise, of parameters that are written in parts; files that have them whole, by `names`, are read too. filled:
    names of vectors of a head's channels, with `{l}`, in which all numbers are the value of this key of config.json;
    "": 1. before_writing, after_reading: config.json -> the same with, or without, keys that only `sizes` has.
    """

    architecture: str = ""
    describes: Callable[[dict[str, Any]], bool] = lambda config: True

    neighbours: bool = False
    llama3_rope: Mapping[str, float] | None = None
    divisors: Callable[[dict[str, Any]], np.ndarray | None] | None = None
    read_divisors: Callable[[np.ndarray], dict[str, Any]] | None = None
    names: Mapping[str, str] = GGUF_NAMES
    sizes: Mapping[str, str] = MappingProxyType({})
    fixed: Mapping[str, Any] = MappingProxyType({})
    implied: Mapping[str, Any] = MappingProxyType({})
    implied_rope: Mapping[str, Any] = MappingProxyType({})
    present: Mapping[str, str] = MappingProxyType({})
    layers_with: Mapping[str, str] = MappingProxyType({})
    partial_rotary: bool = False
    by_layer: tuple[str, ...] = ()
    window_period: int = 0
    defaults: Mapping[str, Any] = MappingProxyType({})
    further_layers: bool = False
    unread: Mapping[str, Any] = MappingProxyType({})
    transforms: Mapping[str, GgufTransform] = MappingProxyType({})
    parts: Mapping[str, GgufParts] = MappingProxyType({})
    filled: Mapping[str, str] = MappingProxyType({})
    before_writing: Callable[[dict[str, Any]], dict[str, Any]] = dict
    after_reading: Callable[[dict[str, Any]], dict[str, Any]] = dict


def read_keys(given: dict[str, Any]) -> dict[str, Any]:
    """Reads window and rotary embedding of a family whose layers are alike."""
    return window_keys.read_everywhere(given) | rope_keys.read_rope(given)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """A family of Hugging Face models: its keys in config.json, its names of tensors, and its code.

    model_type: its name in config.json. transformers_class: the class that loads its models; "": there is none without
    an image encoder, so that no config.json is made of `model` fields alone. classifier: the class of
    such models for sequence classification; None: transformers has none. architecture: what computes them.

    defaults: {key of config.json: the value of transformers' config class, if the key is left out}. sizes: those of
    these keys that are `model` fields with the same name and meaning; null means 0. required: {key: the values that it
    may have}, in addition to `REQUIRED` or in place of a row there. options: the `model` fields that are the same in
    all models of the family.

    read: (config.json with the defaults) -> the other `model` fields. Raises ConfigError for what transformers computes
    otherwise, or not at all. write: (all `model` fields) -> keys of config.json in addition to those that
    config_json.py writes for every family, as transformers 4 spells them. both_ropes: config.json -> the same with the
    rotary embedding in the spellings of transformers 4 and 5.

    tensors: our names of tensors, and theirs in safetensors files. canonical: our names, and those that the tensors
    have outside of these files; None: the files' own. spellings: {end of a tensor's name in the modules of
    transformers 5: its end in files}, of tensors whose names differ there from most families' too. root: the start of
    names in files, for which modules, and so adapters, have "model." expert_files: how
    files have experts. gguf: None if its GGUF files are not read. further_gguf: other architectures, of models that it
    does not describe. further_layers: the key of config.json that counts
    layers behind the last one, which predict further tokens; their tensors are left aside; "": there are none.
    further_tensors: the start of the names of tensors that predict further tokens, which are left aside; "": none.
    is_unread: (number of a layer, the end of a name in it, config.json with the defaults) -> whether it is a tensor of
    published files that transformers does not read, which is left aside; None: there are none.
    """

    model_type: str
    transformers_class: str
    classifier: str | None = None
    write: Callable[[dict[str, Any]], dict[str, Any]]
    architecture: ModelArchitecture = decoder_model.ARCHITECTURE
    defaults: dict[str, Any]
    sizes: tuple[str, ...] = SIZES
    required: dict[str, tuple] = dataclasses.field(default_factory=dict)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    read: Callable[[dict[str, Any]], dict[str, Any]] = read_keys
    both_ropes: Callable[[dict[str, Any]], dict[str, Any]] = rope_keys.both_spellings
    tensors: Mapping[str, str] = dataclasses.field(default_factory=lambda: TENSOR_NAMES)
    canonical: Mapping[str, str] | None = None
    spellings: Mapping[str, str] = MappingProxyType({})
    root: str = "model."
    expert_files: ExpertFiles = BY_EXPERT
    gguf: Gguf | None = None
    further_gguf: tuple[Gguf, ...] = ()
    further_layers: str = ""
    further_tensors: str = ""
    is_unread: Callable[[int, str, dict[str, Any]], bool] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageTextFamily:
    """A family of models with an image encoder; only the language model is used.

    model_type: its name in config.json. text_types: those of its language models; the first one if config.json does not
    say. check_text: (text_config) raises ConfigError for what transformers computes otherwise in such a model.
    """

    model_type: str
    text_types: tuple[str, ...]
    check_text: Callable[[dict[str, Any]], None] = lambda text: None
