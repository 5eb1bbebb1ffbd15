"""The options of the decoder; surojax/families declares which options a family of models has."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from surojax.models.lora import Lora
from surojax.models.model import Variant
from surojax.models.rotary import NO_ROTATION, RopeScaling
from surojax.numerics.recipes import Precision

BLOCKS = "blocks"  # the segment
SCORE = "score"  # the head of a model that computes numbers instead of logits
DENSE = "dense"  # the one before it, if the first layers have no experts


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """The decoder's architecture; fields have the names of Hugging Face's `config.json` if one exists.

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

    num_labels: numbers that the head computes of a token, a matrix of its own ("score"), as models for sequence
    classification have it; 0: the head computes logits of the vocabulary.

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
    num_labels: int = 0
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
        if not dense:
            return {BLOCKS: LayersOf(self, range(self.num_hidden_layers))}

        def of_layers(with_experts: bool, **changes: int) -> DecoderConfig:
            lora = self.lora and self.lora.of_layers(with_experts=with_experts)
            return dataclasses.replace(self, lora=lora, **changes)

        without = of_layers(False, num_experts=0, n_shared_experts=0, first_k_dense_replace=0)
        return {
            DENSE: LayersOf(without, range(dense)),
            BLOCKS: LayersOf(of_layers(True), range(dense, self.num_hidden_layers)),
        }

    def rotary(self, variant: Variant) -> tuple[float, RopeScaling]:
        """Returns (base, `RopeScaling`) of the rotary embedding in a layer of this variant."""
        fraction = self.rope_scaling.partial_rotary_factor
        by_type = {
            "global": (self.rope_theta, self.rope_scaling),
            "local": (self.rope_local_base_freq, RopeScaling(partial_rotary_factor=fraction)),
            "none": (self.rope_theta, NO_ROTATION),
        }
        return by_type[variant.rotary]

    @property
    def head(self) -> str:
        """The name of the outer parameter that is the head's matrix."""
        if self.num_labels:
            return SCORE
        return "embed" if self.tie_word_embeddings else "head"

    @property
    def embedding_scale(self) -> float:
        """The factor that embeddings are multiplied by."""
        return self.embedding_multiplier * (math.sqrt(self.hidden_size) if self.scale_embedding else 1.0)


class LayersOf(NamedTuple):
    """The layers of a segment: their architecture, and their numbers in the model."""

    config: DecoderConfig
    numbers: range


def channels(settings: Mapping[str, Any]) -> int:
    """The channels of an attention head. settings: `model` fields of a config, or keys of a config.json."""
    return settings.get("head_dim") or settings["hidden_size"] // settings["num_attention_heads"]


def from_settings(settings: dict[str, Any]) -> DecoderConfig:
    """Makes the architecture from a config's `model` fields.

    The fields rope_NAME, except rope_theta, are of the scaling.
    """
    sizes = settings | {"head_dim": channels(settings)}
    kind = sizes.pop("rope_scaling")
    names = [field.name for field in dataclasses.fields(RopeScaling) if field.name != "kind"]
    scaling = RopeScaling(kind, **{name: sizes.pop(f"rope_{name}") for name in names})
    return DecoderConfig(**sizes, rope_scaling=scaling)
