"""Makes a config.json that transformers 4 and 5 read, from `model` fields or from the source model's config.json.

`huggingface.model_fields` is the only reader of these files here, so it is also the proof: what is written reads back
as the fields that the model was trained with, or is refused.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from surojax.config.fields import default_config
from surojax.errors import ConfigError
from surojax.exchange import compressed
from surojax.exchange.huggingface import labels_of, model_fields
from surojax.families import rope_keys
from surojax.families.family import LAYER, ModelFamily
from surojax.families.registry import FAMILIES
from surojax.models.decoder_config import channels

COPIED = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads rms_norm_eps "
    "rope_theta tie_word_embeddings initializer_range"
).split()

GATE = "mlp.shared_expert_gate"  # experts of every family have a name for it
WHOLE = (
    "mlp.router",
    "mlp.experts.router",
    GATE,
    "delta.wb",
    "delta.wa",
    "delta.wba",
)  # matrices that no format quantises: those of `Kind.ROUTER`


def completed(source: dict[str, Any], dtype: str, kept: Sequence[str] = ()) -> dict[str, Any]:
    """Adds to a source model's config.json the weights' dtype and the keys that either version of transformers reads.

    dtype: as in `export`. kept: starts of the names of modules that are written as they are.
    """
    # Of the source's files; auto_map names Python files beside it.
    config = {key: value for key, value in source.items() if key not in ("quantization_config", "auto_map")}
    family = FAMILIES[config["model_type"]]
    if family.transformers_class:
        config.setdefault("architectures", [family.transformers_class])
    quantised = compressed.FORMATS.get(dtype)
    others = compressed.OTHERS if quantised else dtype
    has_gate = "shared_expert_intermediate_size" in family.defaults
    named = [name for name in WHOLE if name in family.tensors and (name != GATE or has_gate)]
    whole = [family.tensors[name].removesuffix(".weight").removeprefix(LAYER) for name in named]
    patterns = [f".*{re.escape(name)}$" for name in whole] + [rf"^{re.escape(name)}\..*" for name in kept]
    said = {"quantization_config": compressed.config_of(dtype, patterns)} if quantised else {}
    rope = rope_keys.parameters(config, family.defaults)
    # Without rope_parameters transformers takes its class's, also beside rope_theta: the file says them.
    if rope is not None and family.both_ropes is rope_keys.both_spellings:
        config["rope_parameters"] = rope
    return family.both_ropes(config) | {"dtype": others, "torch_dtype": others} | said


def made(
    fields: dict[str, Any],
    max_positions: int,
    tokens: dict[str, int | None],
    families: Mapping[str, ModelFamily] = FAMILIES,
    *,
    with_class: bool = True,
) -> dict[str, Any]:
    """Makes a config.json for these `model` fields, of the first family that computes the model.

    with_class: only families of which transformers has a class without an image encoder. tokens: values of keys like
    eos_token_id, for which the families' classes have defaults of their own. Raises ConfigError if no family computes
    it.
    """
    wanted = normal(fields)
    differences: dict[str, list[str]] = {}
    for name, family in families.items():
        if with_class and not family.transformers_class:
            continue
        try:
            candidate = _candidate(family, fields) | {"max_position_embeddings": max_positions} | tokens
            computed = normal(model_fields(candidate))
        except ConfigError:  # the family's class does not compute it either
            continue
        if computed == wanted:
            return candidate
        differences[name] = [key for key in wanted if wanted[key] != computed.get(key)]
    known = [name for name, family in families.items() if family.transformers_class]
    nearest = min(differences, key=lambda name: len(differences[name]), default="")
    missing = ", ".join(f"{key}={wanted[key]!r}" for key in differences.get(nearest, ()))
    raise ConfigError(
        f"export: expected fields of a family that Hugging Face has as a text model ({', '.join(known)}), got a model "
        f"that is none" + (f": {nearest} does not have {missing}" if missing else "")
    )


def with_labels(config: dict[str, Any], num_labels: int) -> dict[str, Any]:
    """Turns a language model's config.json into one for a head with this many labels; 0: returns it unchanged.

    Raises ConfigError if transformers has no such models of its family.
    """
    if not num_labels or labels_of(config):
        return config
    family = FAMILIES.get(str(config.get("model_type")))  # one that is not known is refused when it is read
    if family and family.classifier is None:
        known = ", ".join(name for name, family in FAMILIES.items() if family.classifier)
        raise ConfigError(
            f"model.num_labels: expected 0 for a {family.model_type}, of which transformers has no models for sequence "
            f"classification, got {num_labels}; give a model of {known}"
        )
    names = {str(i): f"LABEL_{i}" for i in range(num_labels)}
    numbers = {name: int(i) for i, name in names.items()}
    classifier = family.classifier if family else "ForSequenceClassification"
    return config | {"architectures": [classifier], "id2label": names, "label2id": numbers}


def agrees(config: dict[str, Any], fields: dict[str, Any]) -> bool:
    """True if a config.json describes the model with these `model` fields. Raises ConfigError if it cannot be read."""
    return normal(model_fields(config)) == normal(fields)


def normal(fields: dict[str, Any]) -> dict[str, Any]:
    """Completes `model` fields: defaults, and computed values of head_dim, the scores' scale and the experts' width."""
    complete = default_config().model.to_dict() | fields
    h = channels(complete)
    filled = {"head_dim": h, "query_pre_attn_scalar": complete["query_pre_attn_scalar"] or h}
    beside = complete["first_k_dense_replace"] or complete["experts_beside_mlp"]
    if complete["num_experts"] and not beside:  # all layers have them: there is one width
        width = complete["moe_intermediate_size"] or complete["intermediate_size"]
        filled |= {"intermediate_size": width, "moe_intermediate_size": width}
    return complete | filled


def _candidate(family: ModelFamily, fields: dict[str, Any]) -> dict[str, Any]:
    """Makes this family's config.json from `model` fields, which it may not describe exactly."""
    fields = normal(fields)
    config = {key: fields[key] for key in COPIED} | {
        "model_type": family.model_type,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
    }
    made = family.both_ropes(config | family.write(fields)) | {"architectures": [family.transformers_class]}
    return with_labels(made, fields["num_labels"])
