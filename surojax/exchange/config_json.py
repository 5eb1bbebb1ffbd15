"""A config.json that transformers 4 and 5 read: made from a model's fields, or the source model's own, completed.

`huggingface.settings` is the only reader of these files here, so it is also the proof: what is written reads back as
the fields that the model was trained with, or is refused.
"""

from typing import Any

from surojax.config.fields import default_config
from surojax.errors import ConfigError
from surojax.exchange.huggingface import settings
from surojax.models.rotary import ROPE_USES

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
COPIED = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads rms_norm_eps "
    "rope_theta tie_word_embeddings initializer_range"
).split()


GEMMA = ("gemma2", "gemma3_text")
BY_LAYER_TYPES = ("qwen2", "qwen3", "smollm3", *GEMMA)  # the families whose windows are said of each layer


def completed(source: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The config.json of a source model, for weights of this dtype, with what either version of transformers reads."""
    found = {key: value for key, value in source.items() if key != "quantization_config"}
    if found.get("model_type") in ARCHITECTURES:
        found.setdefault("architectures", [ARCHITECTURES[found["model_type"]]])
    return _with_both_ropes(found) | {"dtype": dtype, "torch_dtype": dtype}


def _with_both_ropes(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json with its rotary embedding in both spellings, of transformers 5 and of transformers 4.

    5 reads `rope_parameters`; 4 reads `rope_theta`, `rope_scaling`, and for Gemma 3 `rope_local_base_freq`.
    """
    parameters = config.get("rope_parameters")
    beside = {key: config[key] for key in ("rope_theta", "partial_rotary_factor") if config.get(key) is not None}
    local = config.get("rope_local_base_freq")
    if parameters is None:
        scaling = dict(config.get("rope_scaling") or {})
        kind = scaling.pop("type", "default")
        both = {"rope_type": kind} | scaling | beside
        if local is not None:
            of_windows = {"rope_type": "default", "rope_theta": local}
            return config | {"rope_parameters": {"full_attention": both, "sliding_attention": of_windows}}
        return config | ({"rope_parameters": both} if scaling or beside else {})
    scaling = dict(parameters.get("full_attention", parameters))
    beside |= {key: scaling.pop(key) for key in ("rope_theta", "partial_rotary_factor") if key in scaling}
    if "rope_theta" in parameters.get("sliding_attention", {}):
        beside["rope_local_base_freq"] = parameters["sliding_attention"]["rope_theta"]
    return config | beside | {"rope_scaling": scaling if scaling.get("rope_type", "default") != "default" else None}


def made(fields: dict[str, Any], max_positions: int, tokens: dict[str, int | None]) -> dict[str, Any]:
    """A config.json of the first family that computes a model with these `model` fields.

    tokens: values of keys like eos_token_id, for which the families' classes have defaults of their own. Raises
    ConfigError if no family computes it.
    """
    wanted = _normal(fields)
    differences: dict[str, list[str]] = {}
    for family in ARCHITECTURES:
        candidate = _candidate(family, fields) | {"max_position_embeddings": max_positions} | tokens
        try:
            found = _normal(settings(candidate))
        except ConfigError:  # the family's class does not compute it either
            continue
        if found == wanted:
            return candidate
        differences[family] = [key for key in wanted if wanted[key] != found.get(key)]
    nearest = min(differences, key=lambda family: len(differences[family]))
    what = ", ".join(f"{key}={wanted[key]!r}" for key in differences[nearest])
    raise ConfigError(
        f"export: expected fields of a family of Hugging Face ({', '.join(ARCHITECTURES)}), got a model that is none: "
        f"{nearest} does not have {what}"
    )


def agrees(config: dict[str, Any], fields: dict[str, Any]) -> bool:
    """True if a config.json describes the model of these `model` fields. Raises ConfigError if it cannot be read."""
    return _normal(settings(config)) == _normal(fields)


def _normal(fields: dict[str, Any]) -> dict[str, Any]:
    """All `model` fields, with their defaults, the heads' channels and the scale of scores filled in."""
    found = default_config().model.to_dict() | fields
    channels = found["head_dim"] or found["hidden_size"] // found["num_attention_heads"]
    return found | {"head_dim": channels, "query_pre_attn_scalar": found["query_pre_attn_scalar"] or channels}


def _candidate(family: str, fields: dict[str, Any]) -> dict[str, Any]:
    """A config.json of this family, as near to the fields as it comes."""
    fields = _normal(fields)
    found = {key: fields[key] for key in COPIED} | {
        "model_type": family,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
    }
    if family != "qwen2":  # its class has no such key
        found["head_dim"] = fields["head_dim"]
    if family in ("llama", "qwen3", "smollm3", *GEMMA):
        found["attention_bias"] = False  # of all four projections; ours is qwen2's, of three
    if family in ("llama", "smollm3"):
        found["mlp_bias"] = False
    if family in ("smollm3", "ministral3", *GEMMA):
        found["pad_token_id"] = None  # their classes' own may be beyond the vocabulary
    if family == "smollm3":
        interval = fields["no_rope_layer_interval"]
        layers = range(1, fields["num_hidden_layers"] + 1)
        found["no_rope_layers"] = [0 if interval and n % interval == 0 else 1 for n in layers]
        found["no_rope_layer_interval"] = interval
    if family in GEMMA:
        act = "gelu_pytorch_tanh"
        found |= {"hidden_act": act, "hidden_activation": act, "query_pre_attn_scalar": fields["query_pre_attn_scalar"]}
        found["final_logit_softcapping"] = fields["final_logit_softcapping"] or None
    if family == "gemma2":
        found["attn_logit_softcapping"] = fields["attn_logit_softcapping"] or None
    return _with_both_ropes(found | _windows(family, fields) | _rope(family, fields)) | {
        "architectures": [ARCHITECTURES[family]]
    }


def _windows(family: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The keys of the sliding window; none if there is no window and the family's class has none either."""
    window = fields["sliding_window"] or None
    unused = 4096 if family in GEMMA else None  # transformers makes a mask of it even if no layer has one
    if family in ("mistral", "ministral3"):
        return {"sliding_window": window}
    if family not in BY_LAYER_TYPES or not (window or family in GEMMA):
        return {}
    pattern = fields["sliding_window_pattern"]
    layers = range(1, fields["num_hidden_layers"] + 1)
    full = [not window or (pattern > 1 and n % pattern == 0) for n in layers]
    types = ["full_attention" if x else "sliding_attention" for x in full]
    used = {} if family in GEMMA else {"use_sliding_window": True}
    first = {"max_window_layers": 0} if family in ("qwen2", "qwen3") else {}
    return used | {"sliding_window": window or unused} | first | {"layer_types": types}


def _rope(family: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The keys of the rotary embedding, as transformers 4 spells them."""
    kind = fields["rope_scaling"]
    scaling = {"rope_type": kind} | {name: fields[f"rope_{name}"] for name in ROPE_USES.get(kind, ())}
    if not scaling.get("attention_factor", 1):
        del scaling["attention_factor"]  # it follows from the factor
    if family == "ministral3" and fields["rope_llama_4_scaling_beta"]:
        scaling["llama_4_scaling_beta"] = fields["rope_llama_4_scaling_beta"]
    found: dict[str, Any] = {"rope_scaling": None if kind == "none" else scaling}
    if family == "gemma3_text":
        found["rope_local_base_freq"] = fields["rope_local_base_freq"] or fields["rope_theta"]
    return found
