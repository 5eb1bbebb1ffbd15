"""Gemma 4: layers with a window, and every few layers one without, whose heads have another size and number.

There are two families of one arithmetic: of models whose images pass through an encoder, and of models without one
("unified", 12B).

Of the layers without a window keys and values may be of one product (`attention_k_eq_v`). Each layer's output is
multiplied by a number that is not trained. Of the smaller models (E2B, E4B) each layer has an input of its own, and the
last ones take the keys and values of earlier ones.
"""

from typing import Any

from surojax.errors import ConfigError
from surojax.families import gemma4_gguf, mixer_keys, rope_keys, window_keys
from surojax.families.family import (
    EXPERTS,
    LAYER,
    LLAMA_DEFAULTS,
    SIZES,
    ExpertFiles,
    ImageTextFamily,
    ModelFamily,
    in_safetensors,
)
from surojax.families.gemma import ACTIVATION, OPTIONS, TENSORS, check_caps
from surojax.families.rope_keys import PARTIAL
from surojax.families.window_keys import FULL, SLIDING
from surojax.models.decoder_config import GLOBAL
from surojax.models.kinds.gated_mlp import SwiGLU
from surojax.models.kinds.layer_input import LayerInput
from surojax.models.kinds.mlp_with_experts import MlpWithExperts
from surojax.models.rotary import PROPORTIONAL

HEAD_DIM, HEADS = "global_head_dim", "num_global_key_value_heads"  # of layers without a window
IN_LAYER = {HEAD_DIM: "head_dim", HEADS: "num_key_value_heads"}
BY_LAYER = "per_layer_config"  # where transformers writes the two, by the number of a layer
NOT_SAID = ()  # null says that heads of all layers are equal
SHARED, CAP, LOCAL_BASE = "attention_k_eq_v", "final_logit_softcapping", "rope_local_base_freq"
EMBEDDINGS, TABLE_ROWS = "hidden_size_per_layer_input", "vocab_size_per_layer_input"
SHARED_LAYERS, DOUBLE = "num_kv_shared_layers", "use_double_wide_mlp"
PERIOD = 6  # one layer of so many has no window, unless config.json says which
ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    FULL: {"rope_type": PROPORTIONAL, PARTIAL: 0.25, "rope_theta": 1000000.0},
}


def _read_layer_types(given: dict[str, Any], window: int) -> list[str]:
    types = window_keys.said_layer_types(given, window) or window_keys.every_nth_full(
        given["num_hidden_layers"], PERIOD
    )
    return [*types[:-1], FULL]  # as transformers' class does


def _read_heads(given: dict[str, Any], full: list[int]) -> dict[str, Any]:
    """Reads channels and number of the key/value heads of layers without a window. full: their numbers.

    0: as in the other layers.
    """
    if given[BY_LAYER] == NOT_SAID:
        heads = given[HEADS] if given[SHARED] else None  # else transformers' class does not read it
        if not given[HEAD_DIM] or heads == 0:
            raise ConfigError(
                f"model_path: config.json: {HEAD_DIM}, {HEADS}: expected more than 0, got {given[HEAD_DIM]!r}, "
                f"{given[HEADS]!r}; fetch it again"
            )
        of_full = {"head_dim": given[HEAD_DIM], "num_key_value_heads": heads}
    else:
        by_layer = given[BY_LAYER] or {}
        said = {int(l): layer for l, layer in by_layer.items() if str(l).isdecimal()}
        of_full = said.get(full[0], {})
        is_known = isinstance(of_full, dict) and of_full.keys() <= {*IN_LAYER.values()}
        of_layers = dict.fromkeys(full, of_full) if of_full else {}
        if said != of_layers or len(said) != len(by_layer) or not is_known:
            raise ConfigError(
                f"model_path: config.json: {BY_LAYER}: expected the same head_dim and num_key_value_heads for each "
                f"layer with full_attention ({', '.join(map(str, full))}) and for no other, got {str(by_layer)[:200]}; "
                "fetch it again"
            )
    found = {ours: of_full.get(theirs) or 0 for ours, theirs in IN_LAYER.items()}
    return {ours: 0 if size == given[IN_LAYER[ours]] else size for ours, size in found.items()}


def _read_rope(given: dict[str, Any], types: set[str]) -> dict[str, Any]:
    """Reads the rotary embeddings of both types of layers. types: that the model has."""
    rope = given["rope_parameters"]
    for kind in sorted(types):
        if not isinstance(rope.get(kind, {}), dict) or "rope_theta" not in (rope.get(kind) or {}):
            raise ConfigError(
                f"model_path: config.json: rope_parameters: expected {kind} with rope_theta, without which "
                f"transformers does not compute {given['model_type']}, got {str(rope)[:200]}; fetch it again"
            )
    base, full = rope_keys.by_layer_type(given, ROPES[SLIDING]["rope_theta"])
    if full.get("rope_type") != PROPORTIONAL:
        return {LOCAL_BASE: float(base)} | rope_keys.rope_fields(given, full)
    fraction = full.pop(PARTIAL, 1.0)
    fields = rope_keys.rope_fields(given, {"factor": 1.0} | full)
    return {LOCAL_BASE: float(base), f"rope_{PARTIAL}": float(fraction)} | fields


def _read(given: dict[str, Any]) -> dict[str, Any]:
    check_caps(given, CAP)
    window = window_keys.need_window(given, window_keys.said_window(given))
    types = _read_layer_types(given, window)
    full = [l for l, kind in enumerate(types) if kind == FULL]
    fields = {"sliding_window": window} | _read_heads(given, full) | _read_rope(given, {*types})
    if SLIDING not in types:
        fields |= {"sliding_window": 0, LOCAL_BASE: 0.0}
    return fields | {"layer_types": mixer_keys.as_field([GLOBAL if kind == FULL else SLIDING for kind in types])}


def _read_inputs(given: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """Reads inputs of each layer, and the layers that share keys and values. fields: those that `_read` returns."""
    layers, shared, rows = given["num_hidden_layers"], given[SHARED_LAYERS], given[TABLE_ROWS]
    for key in (EMBEDDINGS, SHARED_LAYERS):
        if type(given[key]) is not int or given[key] < 0:
            raise ConfigError(f"model_path: config.json: {key}: expected 0 or more, got {given[key]!r}; fetch it again")
    if given[EMBEDDINGS] and (type(rows) is not int or rows < given["vocab_size"]):
        raise ConfigError(
            f"model_path: config.json: {TABLE_ROWS}: expected vocab_size={given['vocab_size']} or more, a row of each "
            f"token, got {rows!r}; fetch it again"
        )
    if shared and not given[EMBEDDINGS]:
        raise ConfigError(
            f"model_path: config.json: {SHARED_LAYERS}: expected 0 with {EMBEDDINGS} 0, without which transformers "
            f"does not compute it, got {shared}; fetch it again"
        )
    types = mixer_keys.types_of(fields | {"num_hidden_layers": layers})
    if shared and not {*types[: max(layers - shared, 0)]} >= {*types}:
        raise ConfigError(
            f"model_path: config.json: {SHARED_LAYERS}: expected fewer layers, so that each layer_types has one before "
            f"them whose keys and values they read, got {shared} of {layers}; fetch it again"
        )
    inputs = {EMBEDDINGS: given[EMBEDDINGS], TABLE_ROWS: rows if given[EMBEDDINGS] else 0}
    return fields | inputs | {SHARED_LAYERS: shared, DOUBLE: given[DOUBLE] if shared else False}


def _read_with_experts(given: dict[str, Any]) -> dict[str, Any]:
    """Reads a model that may have experts, and inputs of each layer."""
    fields = _read_inputs(given, _read(given))
    if not given["enable_moe_block"]:
        return fields
    sizes = {name: given[theirs] for name, theirs in SIZES_OF_EXPERTS.items()}
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise ConfigError(
                f"model_path: config.json: {SIZES_OF_EXPERTS[name]}: expected more than 0 with enable_moe_block, got "
                f"{size!r}; fetch it again"
            )
    return fields | sizes | {"experts_beside_mlp": True, "norm_topk_prob": True}


def _is_unread(l: int, name: str, given: dict[str, Any]) -> bool:
    """True for keys and values of layers that read those of earlier ones, which published files have all the same."""
    shared = given[SHARED_LAYERS]
    is_shared = type(shared) is int and l >= given["num_hidden_layers"] - shared
    return is_shared and name.startswith(("self_attn.k_", "self_attn.v_"))


def _write(fields: dict[str, Any]) -> dict[str, Any]:
    types = [FULL if name == GLOBAL else name for name in mixer_keys.types_of(fields)]
    full = {"rope_type": fields["rope_scaling"], "rope_theta": fields["rope_theta"]}
    full |= {PARTIAL: fields[f"rope_{PARTIAL}"], "factor": fields["rope_factor"]}
    by_layer: dict[str, Any] = {}
    if fields[HEADS] and not fields[SHARED]:  # which is read of no other key
        of_full = {"head_dim": fields[HEAD_DIM] or fields["head_dim"], "num_key_value_heads": fields[HEADS]}
        by_layer = {BY_LAYER: {str(l): of_full for l, kind in enumerate(types) if kind == FULL}}
    return by_layer | {
        "head_dim": fields["head_dim"],
        HEAD_DIM: fields[HEAD_DIM] or fields["head_dim"],
        HEADS: fields[HEADS] or None,
        SHARED: fields[SHARED],
        "attention_bias": False,
        "pad_token_id": None,
        "hidden_act": ACTIVATION,
        "hidden_activation": ACTIVATION,
        CAP: fields[CAP] or None,
        "sliding_window": fields["sliding_window"] or 512,
        "layer_types": types,
        "rope_parameters": {FULL: full, SLIDING: ROPES[SLIDING] | {"rope_theta": fields[LOCAL_BASE] or 1e4}},
    }


def _write_with_experts(fields: dict[str, Any]) -> dict[str, Any]:
    has_experts = fields["num_experts"] > 0
    sizes = {theirs: fields[name] if has_experts else None for name, theirs in SIZES_OF_EXPERTS.items()}
    inputs = {name: fields[name] for name in (EMBEDDINGS, SHARED_LAYERS, DOUBLE)}
    inputs |= {TABLE_ROWS: fields[TABLE_ROWS] or fields["vocab_size"]}
    return _write(fields) | sizes | inputs | {"enable_moe_block": has_experts}


# In a config here, and in a config.json.
SIZES_OF_EXPERTS = {
    "num_experts": "num_experts",
    "num_experts_per_tok": "top_k_experts",
    "moe_intermediate_size": "moe_intermediate_size",
}
OF_INPUTS = in_safetensors(LayerInput) | {f"{LayerInput.name}.{x}": y for x, y in LayerInput.of_all_layers.items()}
OF_EXPERTS = in_safetensors(MlpWithExperts)
IN_FILES = {
    f"mlp.experts.{ours}": OF_EXPERTS[f"mlp.experts.{ours}"].replace(EXPERTS, "experts.") for ours in SwiGLU.tensors
}
DEFAULTS: dict[str, Any] = LLAMA_DEFAULTS | {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    CAP: None,
    HEAD_DIM: 512,
    HEADS: None,
    SHARED: False,
    "rope_parameters": ROPES,
    BY_LAYER: NOT_SAID,
    DOUBLE: False,  # says nothing without layers that share keys and values
}
REQUIRED: dict[str, tuple] = {
    "rope_scaling": (None,),
    "hidden_act": (ACTIVATION,),
    "hidden_activation": (ACTIVATION,),
    "use_bidirectional_attention": (None, "vision"),  # images see what follows in them
}
OF_FAMILY: dict[str, Any] = {
    "sizes": (*SIZES, CAP, SHARED),
    "options": OPTIONS
    | {
        "norm_plus_one": False,
        "qk_norm": True,
        "v_norm_weightless": True,
        "layer_scalar": True,
        "query_pre_attn_scalar": 1.0,
    },
    "both_ropes": dict,
    "tensors": TENSORS | {"layer_scalar": LAYER + "layer_scalar"},
    "gguf": gemma4_gguf.OF_GEMMA4,
}

GEMMA4 = ModelFamily(
    model_type="gemma4_text",
    transformers_class="Gemma4ForCausalLM",
    defaults=DEFAULTS
    | {
        "sliding_window": 512,
        EMBEDDINGS: 256,
        TABLE_ROWS: 262144,
        SHARED_LAYERS: 0,
        "enable_moe_block": False,
        # Without experts these say nothing.
        "num_experts": None,
        "top_k_experts": None,
        "moe_intermediate_size": None,
    },
    required=REQUIRED,
    read=_read_with_experts,
    write=_write_with_experts,
    is_unread=_is_unread,
    canonical=OF_FAMILY["tensors"] | OF_INPUTS | OF_EXPERTS,
    expert_files=ExpertFiles("experts.gate_up_proj", "experts.down_proj", only=True, module="experts"),
    **OF_FAMILY | {"tensors": OF_FAMILY["tensors"] | OF_INPUTS | OF_EXPERTS | IN_FILES},
)
GEMMA4_IMAGES = ImageTextFamily(model_type="gemma4", text_types=("gemma4_text",))
GEMMA4_UNIFIED = ModelFamily(
    model_type="gemma4_unified_text",
    transformers_class="Gemma4UnifiedForCausalLM",
    # Its class reads none of the other family's keys.
    defaults=DEFAULTS | {"sliding_window": 1024, TABLE_ROWS: None},
    required=REQUIRED | {EMBEDDINGS: (0, None), SHARED_LAYERS: (0,), "enable_moe_block": (False, None)},
    read=_read,
    write=_write,
    **OF_FAMILY,
)
GEMMA4_UNIFIED_IMAGES = ImageTextFamily(model_type="gemma4_unified", text_types=("gemma4_unified_text",))
