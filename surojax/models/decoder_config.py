"""The options of the decoder; surojax/families declares which options a family of models has."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from surojax.declared import AT_LEAST_0, AT_LEAST_1, POSITIVE, Facts, computed, declare, section_of
from surojax.models.channels import EMBEDDING, NORM, TOKEN, TOKEN_CHANNELS, Channels, names_of_keys
from surojax.models.kinds.experts import SCORING
from surojax.models.lora import Lora
from surojax.models.model import Variant
from surojax.models.operations import ACTIVATIONS, RELU2
from surojax.models.rotary import NO_ROTATION, PROPORTIONAL, RopeScaling
from surojax.numerics.recipes import Precision

BLOCKS = "blocks"  # the segment of layers with attention
SCORE = "score"  # the head of a model that computes numbers instead of logits
DENSE = "dense"  # likewise, of the first layers without experts, if others have experts
DELTA = "linear_attention"  # the mixer of gated delta nets, as config.json calls it
OF_EXPERTS = ("num_experts", "n_shared_experts", "moe_shared_intermediate_size", "shared_expert_intermediate_size")
OF_EXPERTS += ("first_k_dense_replace",)
MAMBA = "mamba2"  # the mixer of state spaces (Granite-4-H, Nemotron-H)
LATENT = "latent_attention"  # the mixer of keys and values that are expanded from a latent (DeepSeek)
ATTENTION = "full_attention"  # the mixer of layers whose segments have no other name
MLP, EXPERTS = "mlp", "experts"  # layers of one_purpose models without a mixer
SLIDING = "sliding_attention"  # the mixer of attention within the window, in models with GLOBAL beside it
GLOBAL = "global_attention"  # the mixer of attention to all positions, with heads of its own number and size
# The same two with the keys and values of an earlier layer.
SLIDING_SHARED, GLOBAL_SHARED = "sliding_shared", "global_shared"
SHARED = {SLIDING: SLIDING_SHARED, GLOBAL: GLOBAL_SHARED}


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """The decoder's architecture: the `model` fields of the config.

    Fields have the names of Hugging Face's `config.json` if one exists. A head_dim of 0 becomes the heads' share of
    hidden_size. num_labels: numbers that the head computes of a token, by a matrix of its own ("score"), as models for
    sequence classification have it.
    """

    # rows of the embedding; at least the tokenizer's vocabulary
    vocab_size: int = declare(32000, AT_LEAST_1)
    # width of the residual stream
    hidden_size: int = declare(768, AT_LEAST_1)
    # width inside the MLP
    intermediate_size: int = declare(2048, AT_LEAST_1)
    # experts of each MLP, of which every token chooses some; 0 = one MLP for all tokens
    num_experts: int = declare(0, AT_LEAST_0)
    # experts that a token chooses
    num_experts_per_tok: int = declare(0, AT_LEAST_0)
    # width inside an expert; 0 = intermediate_size
    moe_intermediate_size: int = declare(0, AT_LEAST_0)
    # weights of the chosen experts are divided by their sum
    norm_topk_prob: bool = False
    # what a router makes of its logits: "softmax", or "sigmoid" with a bias for the choice that is not trained
    scoring_func: str = declare("softmax", choices=SCORING)
    # weights of the chosen experts are multiplied by this
    routed_scaling_factor: float = declare(1.0, POSITIVE)
    # the first two matrices of MLPs for all tokens are one, gate's rows before up's (Granite-4)
    mlp_joined: bool = False
    # experts that every token uses, as one MLP of so many times moe_intermediate_size
    n_shared_experts: int = declare(0, AT_LEAST_0)
    # likewise, as one MLP of this width (Granite-4); 0 = there is none
    moe_shared_intermediate_size: int = declare(0, AT_LEAST_0)
    # width of one more expert that every token uses, times the sigmoid of a gate (Qwen3.5); 0 = there is none
    shared_expert_intermediate_size: int = declare(0, AT_LEAST_0)
    # first layers with one MLP of intermediate_size instead of experts
    first_k_dense_replace: int = declare(0, AT_LEAST_0)
    # groups of the experts, of which a token chooses in the best topk_group
    n_group: int = declare(1, AT_LEAST_1)
    # see n_group
    topk_group: int = declare(1, AT_LEAST_1)
    # layers with experts have an MLP of intermediate_size beside them, and norms of both (Gemma 4 26B-A4B)
    experts_beside_mlp: bool = False
    # biases on the router's logits and on the experts' products (gpt-oss)
    expert_bias: bool = False
    # decoder blocks
    num_hidden_layers: int = declare(12, AT_LEAST_1)
    # their mixers in turn, repeated: "conv,conv,full_attention"; "" = all have attention
    layer_types: str = ""
    # each layer is a mixer or an MLP, which layer_types then has too: "mlp", or "experts" (Nemotron-H)
    one_purpose: bool = False
    # key heads of mixers "linear_attention" (gated delta nets)
    linear_num_key_heads: int = declare(16, AT_LEAST_1)
    # their value heads, a multiple of the key heads; each has a state
    linear_num_value_heads: int = declare(32, AT_LEAST_1)
    # channels of their keys
    linear_key_head_dim: int = declare(128, AT_LEAST_1)
    # channels of their values
    linear_value_head_dim: int = declare(128, AT_LEAST_1)
    # latest tokens that their convolutions see
    linear_conv_kernel_dim: int = declare(4, AT_LEAST_1)
    # their projections are two matrices with the rows of one key head after those of another (Qwen3-Next)
    linear_fused_projections: bool = False
    # heads of mixers "mamba2", a multiple of the groups; each has a state
    mamba_n_heads: int = declare(128, AT_LEAST_1)
    # channels of such a head
    mamba_d_head: int = declare(64, AT_LEAST_1)
    # channels of their states
    mamba_d_state: int = declare(128, AT_LEAST_1)
    # groups of their heads, which share the inputs and outputs of states, and whose channels are normed together
    mamba_n_groups: int = declare(1, AT_LEAST_1)
    # latest tokens that their convolutions see
    mamba_d_conv: int = declare(4, AT_LEAST_1)
    # bias of their convolutions
    mamba_conv_bias: bool = True
    # their time steps are at least this
    mamba_dt_min: float = declare(0.0, AT_LEAST_0)
    # and at most this; 0 = without a limit
    mamba_dt_max: float = declare(0.0, AT_LEAST_0)
    # query heads
    num_attention_heads: int = declare(12, AT_LEAST_1)
    # key/value heads; fewer than query heads = grouped-query attention
    num_key_value_heads: int = declare(12, AT_LEAST_1)
    # channels of a head; 0 = hidden_size / num_attention_heads
    head_dim: int = declare(0, AT_LEAST_0)
    # mixers "global_attention": channels of a head; 0 = head_dim
    global_head_dim: int = declare(0, AT_LEAST_0)
    # their key/value heads; 0 = num_key_value_heads
    num_global_key_value_heads: int = declare(0, AT_LEAST_0)
    # their values are the products that their keys are made of, before norm and rotary embedding
    attention_k_eq_v: bool = False
    # last layers whose attention reads keys and values of the last earlier layer of the same mixer (Gemma 4 E2B, E4B)
    num_kv_shared_layers: int = declare(0, AT_LEAST_0)
    # the MLPs of those layers have twice the intermediate_size
    use_double_wide_mlp: bool = False
    # channels of an input that each layer has of each token, by tables of its own (Gemma 4 E2B, E4B); 0 = none
    hidden_size_per_layer_input: int = declare(0, AT_LEAST_0)
    # rows of those tables; 0 = vocab_size
    vocab_size_per_layer_input: int = declare(0, AT_LEAST_0)
    # mixers "latent_attention": rank of the queries; 0 = their matrix is one
    q_lora_rank: int = declare(0, AT_LEAST_0)
    # numbers of a token that its keys and values follow from
    kv_lora_rank: int = declare(512, AT_LEAST_1)
    # channels of a head's queries and keys without rotary embedding
    qk_nope_head_dim: int = declare(128, AT_LEAST_1)
    # channels of a head's queries and keys with rotary embedding; the keys of all heads share them
    qk_rope_head_dim: int = declare(64, AT_LEAST_1)
    # channels of a head's values
    v_head_dim: int = declare(128, AT_LEAST_1)
    # neighbouring channels rotate together; False: the first half with the second
    rope_interleave: bool = True
    # added to the mean square in RMSNorm
    rms_norm_eps: float = declare(1e-5, POSITIVE)
    # base of the rotary frequencies
    rope_theta: float = declare(10000.0, POSITIVE)
    rope_scaling: RopeScaling = section_of(RopeScaling, "rope_")
    # base of the layers with a window, unscaled (Gemma 3); 0 = as the other layers
    rope_local_base_freq: float = declare(0.0, AT_LEAST_0)
    # every n-th layer has no rotary embedding (SmolLM3: 4); 0 = all have it
    no_rope_layer_interval: int = declare(0, AT_LEAST_0)
    # the head shares the embedding's weights
    tie_word_embeddings: bool = False
    # bias on queries, keys and values (Qwen2)
    attention_bias: bool = False
    # bias on the output of attention (gpt-oss)
    attention_out_bias: bool = False
    # attention's output is multiplied by sigmoid(gate); the rows of each head's gate follow its query's (Qwen3.5)
    attn_output_gate: bool = False
    # each head's softmax has one more logit, which is learned and belongs to no position (gpt-oss)
    attention_sinks: bool = False
    # likewise, by a gate with a matrix of its own (Muse-Glimmer)
    attn_gate_proj: bool = False
    # RMSNorm on each head's queries and keys (Qwen3, Gemma 3)
    qk_norm: bool = False
    # RMSNorm on queries and keys, of the channels of all heads together (OLMoE)
    qk_norm_whole: bool = False
    # RMSNorm without weights on each head's queries and keys (Muse-Glimmer)
    qk_norm_weightless: bool = False
    # RMSNorm without weights on each head's values (Gemma 4)
    v_norm_weightless: bool = False
    # RMSNorm on the inputs of attention and MLP; False: on their outputs alone (OLMo 2, 3)
    input_norms: bool = True
    # RMSNorm multiplies by 1 + its weights, which start at 0 (Gemma)
    norm_plus_one: bool = False
    # the last norm multiplies by its weights even with norm_plus_one (Muse-Glimmer)
    plain_final_norm: bool = False
    # RMSNorm also on what attention and MLP add to the residual stream (Gemma 2, 3)
    sandwich_norms: bool = False
    # added to the mean square in those norms; 0 = rms_norm_eps
    post_norm_eps: float = declare(0.0, AT_LEAST_0)
    # of the MLP's gate: "silu", "gelu_pytorch_tanh" (Gemma) or "clamped_swiglu" (gpt-oss); "relu2": there is no gate
    hidden_act: str = declare("silu", choices=(*ACTIVATIONS, RELU2))
    # RMSNorm without weights on the embedding (Muse-Glimmer)
    embedding_norm: bool = False
    # each layer's output is multiplied by a number of its own, which is not trained (Gemma 4)
    layer_scalar: bool = False
    # the embedding is multiplied by sqrt(hidden_size) (Gemma)
    scale_embedding: bool = False
    # the embedding is multiplied by this (Granite: 12)
    embedding_multiplier: float = declare(1.0, POSITIVE)
    # what attention and MLP add to the residual stream is multiplied by this (Granite: 0.22)
    residual_multiplier: float = declare(1.0, POSITIVE)
    # the logits are divided by this (Granite: 6)
    logits_scaling: float = declare(1.0, POSITIVE)
    # attention scores are divided by its square root; 0 = head_dim
    query_pre_attn_scalar: float = declare(0.0, AT_LEAST_0)
    # attention scores become cap x tanh(score / cap) (Gemma 2: 50); 0 = not
    attn_logit_softcapping: float = declare(0.0, AT_LEAST_0)
    # likewise the logits (Gemma 2: 30); 0 = not
    final_logit_softcapping: float = declare(0.0, AT_LEAST_0)
    # latest positions that a token attends to (Mistral: 4096); 0 = all of them
    sliding_window: int = declare(0, AT_LEAST_0)
    # every n-th layer attends to all positions (Gemma 3: 6, gpt-oss: 2); 0 = none
    sliding_window_pattern: int = declare(0, AT_LEAST_0)
    # every n-th layer of sliding_window_pattern and no_rope_layer_interval is counted from the last one, which is one
    layers_from_last: bool = False
    # 1: a reward model, whose head computes one number; 0: a language model. With model_path the objective decides
    num_labels: int = declare(0, choices=(0, 1))
    # standard deviation of the initial weights
    initializer_range: float = declare(0.02, POSITIVE, facts=Facts.IDENTITY)
    lora: Lora | None = computed(None)  # adapters, which are trained in place of all else; None: there are none

    def __post_init__(self):
        """Computes head_dim if it is 0."""
        if not self.head_dim:
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)

    def variants(self, precision: Precision) -> tuple[Variant, ...]:
        """The `Variant` of each layer: whether the recipe is enabled, the attention window, the rotary embedding."""

        def is_nth(l: int, n: int) -> bool:
            return n > 0 and (self.num_hidden_layers - 1 - l if self.layers_from_last else l + 1) % n == 0

        def window(l: int) -> int:
            return 0 if is_nth(l, self.sliding_window_pattern) else self.sliding_window

        def rotary(l: int) -> str:
            if is_nth(l, self.no_rope_layer_interval):
                return "none"
            return "local" if self.rope_local_base_freq and window(l) else "global"

        def variant(l: int, mixer: str) -> Variant:
            enabled = precision.enabled(l, self.num_hidden_layers)
            if mixer in (SLIDING, SLIDING_SHARED):
                return Variant(enabled, self.sliding_window, "local" if self.rope_local_base_freq else "global")
            return Variant(enabled, window(l), rotary(l)) if mixer == ATTENTION else Variant(enabled)

        return tuple(variant(l, mixer) for l, mixer in enumerate(self.mixers()))

    def mixers(self) -> tuple[str, ...]:
        """The mixer of each layer: a key of `decoder.MIXERS`; with one_purpose also "mlp" or "experts"."""
        types = [name.strip() for name in self.layer_types.split(",")] if self.layer_types else [ATTENTION]
        names = [types[l % len(types)] for l in range(self.num_hidden_layers)]
        own = self.num_hidden_layers - self.num_kv_shared_layers
        return tuple([*names[:own], *(SHARED.get(name, name) for name in names[own:])])

    @property
    def channels(self) -> Channels:
        """The channels of what layers hand on."""
        sizes: dict[str, int] = {}
        if P := self.hidden_size_per_layer_input:
            sizes = {EMBEDDING: self.hidden_size, NORM: P, TOKEN: TOKEN_CHANNELS}
        if self.num_kv_shared_layers:
            heads = self.num_global_key_value_heads or self.num_key_value_heads
            of_kinds = {"sliding": self.num_key_value_heads * self.head_dim}
            of_kinds |= {"global": heads * (self.global_head_dim or self.head_dim)}
            sizes |= {name: size for kind, size in of_kinds.items() for name in names_of_keys(kind)}
        return Channels(self.hidden_size, sizes)

    def segments(self) -> "dict[str, LayersOf]":
        """The layers of each segment by its name, in the order of their first layers.

        Layers of a segment have equal parameters. Attention has the names "dense" and "blocks", another mixer its own,
        with "_dense" before layers with experts. Layers without a mixer are "mlp" and "experts".
        """
        dense = self.first_k_dense_replace
        numbers: dict[tuple[str, bool], list[int]] = {}
        for l, mixer in enumerate(self.mixers()):
            numbers.setdefault((mixer, l < dense), []).append(l)

        def of_layers(mixer: str, is_dense: bool) -> DecoderConfig:
            changes: dict[str, Any] = {"layer_types": mixer} if self.layer_types else {}
            is_dense = is_dense or (self.one_purpose and mixer != EXPERTS)
            if dense or (self.one_purpose and self.num_experts):
                changes["lora"] = self.lora and self.lora.of_layers(with_experts=not is_dense)
            if is_dense:
                changes |= dict.fromkeys(OF_EXPERTS, 0)
            if self.use_double_wide_mlp and mixer in SHARED.values():
                changes["intermediate_size"] = 2 * self.intermediate_size
            return dataclasses.replace(self, **changes) if changes else self

        def name(mixer: str, is_dense: bool) -> str:
            if mixer == ATTENTION:
                return DENSE if is_dense else BLOCKS
            return f"{mixer}_{DENSE}" if is_dense else mixer

        return {name(*kind): LayersOf(of_layers(*kind), _range_of(own)) for kind, own in numbers.items()}

    def rotary(self, variant: Variant) -> tuple[float, RopeScaling]:
        """Returns (base, `RopeScaling`) of the rotary embedding in a layer of this variant."""
        scaled = self.rope_scaling
        fraction = 1.0 if scaled.kind == PROPORTIONAL else scaled.partial_rotary_factor
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
    def final_norm_plus_one(self) -> bool:
        """True if the last norm multiplies by 1 + its weights."""
        return self.norm_plus_one and not self.plain_final_norm

    @property
    def embedding_scale(self) -> float:
        """The factor that embeddings are multiplied by."""
        return self.embedding_multiplier * (math.sqrt(self.hidden_size) if self.scale_embedding else 1.0)


class LayersOf(NamedTuple):
    """The layers of a segment: their architecture, and their numbers in the model."""

    config: DecoderConfig
    numbers: Sequence[int]


def _range_of(numbers: list[int]) -> Sequence[int]:
    """Ascending numbers as a range if they follow each other, else as a tuple."""
    whole = range(numbers[0], numbers[-1] + 1)
    return whole if len(whole) == len(numbers) else tuple(numbers)


def channels(settings: Mapping[str, Any]) -> int:
    """The channels of an attention head. settings: `model` fields of a config, or keys of a config.json."""
    return settings.get("head_dim") or settings["hidden_size"] // settings["num_attention_heads"]
