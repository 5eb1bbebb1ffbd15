"""A config.json that transformers 4 and 5 read: made from a model's fields, or the source model's own, completed.

`huggingface.settings` is the only reader of these files here, so it is also the proof: what is written reads back as
the fields that the model was trained with, or is refused.
"""

from typing import Any

from surojax.config.fields import default_config
from surojax.errors import ConfigError
from surojax.exchange.huggingface import settings
from surojax.models.operations import ROPE_USES

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
MADE = ("llama", "mistral", "qwen2", "qwen3")  # the families of which a config.json is made without a source
COPIED = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads rms_norm_eps "
    "rope_theta tie_word_embeddings initializer_range"
).split()


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
    for family in MADE:
        candidate = _candidate(family, fields) | {"max_position_embeddings": max_positions} | tokens
        found = _normal(settings(candidate))
        if found == wanted:
            return candidate
        differences[family] = [key for key in wanted if wanted[key] != found.get(key)]
    nearest = min(differences, key=lambda family: len(differences[family]))
    what = ", ".join(f"{key}={wanted[key]!r}" for key in differences[nearest])
    raise ConfigError(
        f"export: expected fields of a family of Hugging Face ({', '.join(MADE)}), got a model that is none: "
        f"{nearest} does not have {what}"
    )


def agrees(config: dict[str, Any], fields: dict[str, Any]) -> bool:
    """True if a config.json describes the model of these `model` fields. Raises ConfigError if it cannot be read."""
    return _normal(settings(config)) == _normal(fields)


def _normal(fields: dict[str, Any]) -> dict[str, Any]:
    """All `model` fields, with their defaults and the heads' channels filled in."""
    found = default_config().model.to_dict() | fields
    return found | {"head_dim": found["head_dim"] or found["hidden_size"] // found["num_attention_heads"]}


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
    if family in ("llama", "qwen3"):
        found["attention_bias"] = False  # of all four projections; ours is qwen2's, of three
    if family == "llama":
        found["mlp_bias"] = False
    window = fields["sliding_window"] or None
    if family == "mistral":
        found["sliding_window"] = window
    if family.startswith("qwen") and window:
        pattern = fields["sliding_window_pattern"]
        full = [pattern > 1 and (l + 1) % pattern == 0 for l in range(fields["num_hidden_layers"])]
        types = ["full_attention" if x else "sliding_attention" for x in full]
        found |= {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0, "layer_types": types}
    kind = fields["rope_scaling"]
    scaling = {"rope_type": kind} | {name: fields[f"rope_{name}"] for name in ROPE_USES.get(kind, ())}
    if not scaling.get("attention_factor", 1):
        del scaling["attention_factor"]  # it follows from the factor
    found["rope_scaling"] = None if kind == "none" else scaling
    return _with_both_ropes(found) | {"architectures": [ARCHITECTURES[family]]}
