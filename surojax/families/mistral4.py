"""Mistral 4 (Mistral Small 4, in Mistral 3): latent attention with queries that grow, and routers by softmax.

transformers computes groups of experts by the sum of their two best, also after a softmax; published models have one
group. Files have a layer's experts in one tensor, and transformers reads no others. Its class always
scales rotary positions. It rotates the fraction `partial_rotary_factor` of a head's channels, which has to equal
`qk_rope_head_dim` / head size. If the key is missing, transformers computes this fraction, but not if config.json has
`rope_scaling`: then it rotates all channels.
"""

from typing import Any

from surojax.errors import ConfigError
from surojax.families import deepseek, deepseek_gguf, mistral, rope_keys
from surojax.families.deepseek import DENSE, OF_ALL, REQUIRED, refuse_key
from surojax.families.family import LLAMA_DEFAULTS, ExpertFiles, ModelFamily
from surojax.families.mistral import BETA, ORIGINAL, TEMPERATURE
from surojax.families.rope_keys import PARTIAL
from surojax.models.decoder_config import LATENT

OF_ROUTERS = ("norm_topk_prob", "rope_interleave", DENSE)


def _head_dim(config: dict[str, Any]) -> int:
    return config["qk_nope_head_dim"] + config["qk_rope_head_dim"]


def _fraction(config: dict[str, Any]) -> dict[str, float]:
    """Returns `partial_rotary_factor`: the fraction of a head's channels that rotate."""
    return {PARTIAL: config["qk_rope_head_dim"] / _head_dim(config)}


def _read(given: dict[str, Any]) -> dict[str, Any]:
    rotating, h = given["qk_rope_head_dim"], _head_dim(given)
    for key in ("head_dim", "qk_head_dim"):
        if given[key] not in (None, h):
            refuse_key(key, f"qk_nope_head_dim + qk_rope_head_dim = {h}", given[key], "remove it")
    rope, scaling = rope_keys.said(given), given.get("rope_scaling")
    beside = given.get(PARTIAL)
    implied = rotating / h if not scaling else 1.0 if beside is None else beside
    fraction = (scaling or rope).get(PARTIAL, implied)
    rope.pop(PARTIAL, None)
    if int(h * fraction) != rotating:
        refuse_key(PARTIAL, f"qk_rope_head_dim / {h} = {rotating / h}", fraction, "correct it in rope_parameters")
    without = {key: value for key, value in given.items() if key != PARTIAL}
    fields = mistral.read_growing(without, rope)
    if fields["rope_scaling"] == "none":
        refuse_key("rope_type", "yarn, linear or llama3", "default", "transformers computes no other for mistral4")
    return deepseek.read_latent(given, fields)


def _write(fields: dict[str, Any]) -> dict[str, Any]:
    keys = deepseek.write(fields) | {name: fields[name] for name in OF_ROUTERS}
    scaling = {ORIGINAL: fields[f"rope_{ORIGINAL}"]} | (keys["rope_scaling"] or {"rope_type": "default"})
    keys["rope_scaling"] = scaling | {BETA: fields[f"rope_{BETA}"]}
    return keys | {"pad_token_id": None}  # the class's own may be beyond the vocabulary


def _both_ropes(config: dict[str, Any]) -> dict[str, Any]:
    """Adds both spellings of the rotary embedding, with `partial_rotary_factor`, which the class needs there."""
    rope = rope_keys.said(config | {"rope_parameters": rope_keys.parameters(config, DEFAULTS)})
    base = {"rope_theta": config.get("rope_theta", DEFAULTS["rope_theta"])}
    return rope_keys.both_spellings(config | {"rope_parameters": base | rope | _fraction(DEFAULTS | config)})


LENGTH = "temperature_length"  # a key of GGUF files, not of config.json
OF_GROWTH = {"attention.temperature_scale": TEMPERATURE, "attention.temperature_length": LENGTH}


def _before_writing(config: dict[str, Any]) -> dict[str, Any]:
    """Adds what files say apart from the rotary embedding; llama.cpp ends at a length of 0."""
    rope = config["rope_scaling"]
    grow = {TEMPERATURE: rope[BETA], LENGTH: rope[ORIGINAL]} if rope[BETA] else dict.fromkeys((TEMPERATURE, LENGTH))
    return deepseek_gguf.before_writing(config) | grow


def _after_reading(config: dict[str, Any]) -> dict[str, Any]:
    without = {key: value for key, value in config.items() if key not in (TEMPERATURE, LENGTH)}
    read = deepseek_gguf.after_reading(without)
    scaling = read["rope_scaling"] or {"rope_type": "none"}
    if scaling["rope_type"] != "yarn" or read.pop("topk_method") != "greedy":
        raise ConfigError(
            "model_path: expected rope.scaling.type yarn and expert_gating_func 1 (softmax) in files of mistral4, got "
            f"{scaling['rope_type']} and {config[deepseek_gguf.GATING]}; fetch the model as safetensors"
        )
    beta, length = config[TEMPERATURE], config[LENGTH]
    if beta and length != scaling[ORIGINAL]:
        raise ConfigError(
            f"model_path: attention.temperature_length: expected rope.scaling.original_context_length = "
            f"{scaling[ORIGINAL]}, by which queries of mistral4 grow, got {length}; fetch the model as safetensors"
        )
    rope = {"rope_scaling": scaling | {BETA: beta}} | _fraction(read)
    return read | rope | {"model_type": "mistral4"}


DEFAULTS: dict[str, Any] = LLAMA_DEFAULTS | {
    "vocab_size": 131072,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 36,
    "num_key_value_heads": 32,
    "n_shared_experts": 1,
    "n_routed_experts": 128,
    "routed_scaling_factor": 1.0,
    "kv_lora_rank": 256,
    "q_lora_rank": 1024,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "qk_head_dim": None,
    "v_head_dim": 128,
    "num_experts_per_tok": 4,
    DENSE: 0,
    "norm_topk_prob": True,
    "rope_interleave": True,
    "attention_bias": False,
    "output_router_logits": False,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 128.0,
        ORIGINAL: 8192,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale_all_dim": 1.0,
        "mscale": 1.0,
        BETA: 0.1,
    },
}
MISTRAL4 = ModelFamily(
    model_type="mistral4",
    transformers_class="Mistral4ForCausalLM",
    classifier="Mistral4ForSequenceClassification",
    defaults=DEFAULTS,
    sizes=(*OF_ALL, *OF_ROUTERS),
    required=REQUIRED | {"n_group": (1,), "topk_group": (1,)},
    options={"layer_types": LATENT},
    read=_read,
    write=_write,
    both_ropes=_both_ropes,
    tensors=deepseek.TENSORS,
    expert_files=ExpertFiles(only=True),
    gguf=deepseek_gguf.LATENT._replace(
        architecture="mistral4",
        sizes={**deepseek_gguf.LATENT.sizes, **OF_GROWTH},
        defaults={**deepseek_gguf.LATENT.defaults, **dict.fromkeys(OF_GROWTH, 0)},
        before_writing=_before_writing,
        after_reading=_after_reading,
    ),
)
