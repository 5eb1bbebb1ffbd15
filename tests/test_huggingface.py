"""Hugging Face models in: settings, names, files, and refusals. Logits are compared in test_parity.py."""

import dataclasses
import importlib
import json
import re
import time
import weakref
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import pytest
import safetensors.numpy
import tokenizers
from small import needs, quick_at
from test_config_keys import LEAST
from test_parity import CASES as ALL_CASES, REFERENCE, load_config, load_tree

from surojax import ConfigError, default_config, train
from surojax.assembly.from_config import architecture, from_config
from surojax.config.checks import check, check_tokenizer
from surojax.errors import Refused
from surojax.exchange import model_tensors as files
from surojax.exchange.huggingface import model_fields, read_config
from surojax.exchange.sources import open_weights, replaced_fields, resolved
from surojax.families.registry import FAMILIES
from surojax.models.decoder_config import DecoderConfig
from surojax.placement.mesh import make_mesh

DEFAULTS = json.loads(str(REFERENCE["defaults.json"]))
for name in ("experts", "glm", "lfm2", "qwen3_5", "qwen3_5_experts", "deepseek", "olmo", "mamba2", "gemma4"):
    with np.load(Path(__file__).parent / "fixtures" / f"{name}_reference.npz") as arrays:
        DEFAULTS |= json.loads(str(arrays["defaults.json"]))
# transformers ignores partial_rotary's factor for our families; models with an image encoder are in test_parts.py.
CASES = [case for case in ALL_CASES if case != "partial_rotary" and not case.endswith("_images")]


def stored(case: str) -> dict[str, np.ndarray]:
    """The tensors of a case by Hugging Face name."""
    start = f"{case}/weight/"
    return {name.removeprefix(start): array for name, array in REFERENCE.items() if name.startswith(start)}


def hf_config(case: str, **changes) -> dict[str, Any]:
    """The config.json of a case as transformers writes it."""
    found = json.loads(str(REFERENCE[f"{case}/config.json"])) | changes
    return {key: value for key, value in found.items() if value != "absent"}


def write(folder: Path, case: str, *, shards: int = 1, tensors: dict | None = None, **changes) -> Path:
    """A Hugging Face model's folder, in so many files."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(hf_config(case, **changes)))
    tensors = stored(case) if tensors is None else tensors
    if shards == 1:
        safetensors.numpy.save_file(tensors, folder / files.SINGLE)
        return folder
    index = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(index.values()):
        part = {name: array for name, array in tensors.items() if index[name] == file}
        safetensors.numpy.save_file(part, folder / file)
    (folder / files.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def config(folder: Path | str, **changes):
    c = default_config()
    c.update({"model_path": str(folder), "model_dtype": "float32"})
    c.update_from_flattened_dict(changes)
    c = resolved(c)
    check(c)
    return c


@pytest.mark.parametrize("case", CASES)
def test_settings_are_those_of_the_case(case):
    """As transformers 5 writes them, and as versions before it did."""
    c = default_config()
    for found in (hf_config(case), before_5(hf_config(case))):
        c.model.update(default_config().model.to_dict() | model_fields(found))
        check(c)
        assert rounded(architecture(c)) == rounded(load_config(case))


def rounded(config: DecoderConfig) -> DecoderConfig:
    """With an attention factor that is the same however it was computed."""
    factor = round(config.rope_scaling.attention_factor, 12)
    return dataclasses.replace(config, rope_scaling=dataclasses.replace(config.rope_scaling, attention_factor=factor))


def before_5(found: dict[str, Any]) -> dict[str, Any]:
    rope = found.pop("rope_parameters")
    if "sliding_attention" in rope:
        found["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    found["rope_theta"] = rope.pop("rope_theta")
    found["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    found["torch_dtype"] = "float32"
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_that_are_left_out_have_the_values_of_transformers(family):
    """Its config class without arguments, as the fixture has it."""
    of_class = model_fields(DEFAULTS[family] | LEAST.get(family, {}))
    found = model_fields({"model_type": family} | LEAST.get(family, {}))
    for fields in (found, of_class):
        fields["head_dim"] = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
    assert found == of_class


def test_keys_that_are_left_out_have_the_values_of_the_class():
    found = model_fields({"model_type": "mistral", "num_hidden_layers": 2})
    assert (found["num_key_value_heads"], found["sliding_window"], found["rms_norm_eps"]) == (8, 4096, 1e-6)
    found = model_fields({"model_type": "llama", "num_attention_heads": 16})
    assert (found["num_key_value_heads"], found["sliding_window"]) == (16, 0) and "attention_bias" not in found
    assert model_fields({"model_type": "qwen2"})["attention_bias"] and model_fields({"model_type": "qwen3"})["qk_norm"]
    assert model_fields({"model_type": "qwen3"})["head_dim"] == 128


GEMMA2 = {"model_type": "gemma2", "hidden_act": "absent"}
GEMMA3 = {"model_type": "gemma3_text", "hidden_act": "absent"}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_type": "gpt2"}, r"expected model_type llama, mistral, .*, gemma3_text, .*mixtral.*, got 'gpt2'"),
        (
            {"model_type": "llava", "text_config": {}},
            r"model_type gemma3, mistral3, qwen3_5, qwen3_5_moe, muse_glimmer, gemma4, gemma4_unified with a text_",
        ),
        (GEMMA2 | {"hidden_activation": "silu"}, r"hidden_activation: expected 'gelu_pytorch_tanh'"),
        (GEMMA3 | {"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping: expected None"),
        (
            GEMMA3 | {"use_bidirectional_attention": True},
            r"use_bidirectional_attention: expected F",
        ),
        ({"attn_logit_softcapping": 50.0}, r"config.json has attn_logit_softcapping, which may change"),
        ({"model_type": "smollm3", "no_rope_layers": [0, 1]}, r"no_rope_layers: expected 0 for every n-th layer and 1"),
        ({"logit_softcap": 30.0}, r"config.json has logit_softcap, which may change what the model computes"),
        ({"hidden_act": "gelu"}, r"hidden_act: expected 'silu', got 'gelu'"),
        ({"sliding_window": 7}, r"sliding_window: expected None, got 7; nothing else is computed for llama$"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor: expected 1, got 0\.5, which transformers does not "),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            r"partial_rotary_factor: expected 1, got 0\.5",
        ),
        ({"attention_bias": True}, r"attention_bias: expected False, got True"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            r"quantization_config: expected none, .*'bitsandbytes' with bnb_4bit_quant_type 'nf4', .*got 'gptq'; fetch",
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, r"with weight_block_size, .*got 'fp8' without it"),
        *(
            ({"quantization_config": {"quant_method": "fp8", "weight_block_size": size}}, rf"got 'fp8' with \[{got}\]")
            for size, got in (([128], "128"), ([1, 2, 3], "1, 2, 3"), ([128, 0], "128, 0"), ([8.0, 8], r"8\.0, 8"))
        ),
        ({"quantization_config": "gptq"}, r"quantization_config: expected none, .*got 'gptq'; fetch"),
        ({"quantization_config": NF4 | {"bnb_4bit_quant_type": "fp4"}}, r"got 'bitsandbytes' in fp4 or 8 bits; fetch"),
        ({"quantization_config": NF4 | {"load_in_4bit": False}}, r"got 'bitsandbytes' in fp4 or 8 bits; fetch"),
        ({"quantization_config": NF4 | {"quant_method": "hqq"}}, r"got 'hqq'; fetch"),
        (
            {"rope_parameters": {"rope_type": "ntk"}},
            r"rope_type: expected default, linear, llama3, yarn, proportional, got 'ntk'",
        ),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, r"got 'dynamic', whose frequencies follow"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, r"got 'longrope', which has other frequencies"),
        ({"rope_parameters": {"rope_type": "linear"}}, r"rope_type linear: expected \('factor',\), got \[\]"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "llama_4_scaling_beta": 0.1}},
            r"rope_type linear: .*llama_4_scaling_beta",
        ),
        (
            GEMMA3 | {"rope_parameters": {"sliding_attention": {"rope_type": "yarn"}}},
            r"expected rope_type default for sliding_attention, .*'yarn'",
        ),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "beta": 1}}, r"got \['beta', 'factor'\]"),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path, changes, message):
    folder = write(tmp_path / "model", "llama", **changes)
    with pytest.raises(ConfigError, match=rf"^model_path: .*{message}"):
        config(folder)


HYBRID = {"model_type": "granitemoehybrid"}
FULL, SLIDING = "full_attention", "sliding_attention"
LINEAR = {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    "config, message",
    [
        ({"model_type": "ministral3", "sliding_window": 7, "layer_types": [SLIDING, FULL]}, r"layer_types: .*every"),
        (
            {"model_type": "ministral3", "sliding_window": 7, "layer_types": [FULL] * 2},
            r"layer_types: .*not read for m",
        ),
        ({"model_type": "gemma2", "sliding_window_pattern": 3}, r"sliding_window_pattern: expected 2, got 3, which"),
        ({"model_type": "gemma2", "sliding_window_pattern": None}, r"sliding_window_pattern: expected 2, got None"),
        (
            {"model_type": "gemma3_text", "sliding_window_pattern": 0},
            r"sliding_window_pattern: expected 1 or more, got 0",
        ),
        (
            {"model_type": "gemma3_text", "rope_parameters": LINEAR},
            r"rope_parameters: expected full_attention and slid",
        ),
        (
            {"model_type": "gemma3_text", "rope_scaling": {"type": "linear", "factor": 4.0}},
            r"rope_scaling: expected rope_type, got type, factor, which transformers does not read",
        ),
        ({"model_type": "gemma2", "final_logit_softcapping": 0}, r"final_logit_softcapping: expected more than 0, or"),
        ({"model_type": "gemma3_text", "final_logit_softcapping": 0.0}, r"final_logit_softcapping: expected more than"),
        ({"model_type": "gemma2", "attn_logit_softcapping": 0.0}, r"attn_logit_softcapping: .*; set it to null if"),
        (
            {"model_type": "mistral", "sliding_window": 0},
            r"sliding_window: expected more than 0, or null for none, got",
        ),
        ({"model_type": "llama", "layer_types": [SLIDING] * 2}, r"sliding_window: expected a number, .*got no such"),
        ({"model_type": "llama", "layer_types": ["chunked_attention"] * 2}, r"layer_types: .*got 'chunked_attention'"),
        ({"model_type": "mistral", "layer_types": [SLIDING] * 3}, r"layer_types: .*num_hidden_layers=2, got 3; fetch"),
        (
            {"model_type": "qwen3", "use_sliding_window": True, "layer_types": [FULL]},
            r"layer_types: expected one for each of num_hidden_layers=2, got 1; fetch it again",
        ),
        (
            {"model_type": "qwen2", "sliding_window": 7, "use_sliding_window": False, "layer_types": [FULL, SLIDING]},
            r"sliding_window: expected a number, since layer_types has sliding_attention, got use_sliding_window false",
        ),
        (
            {"model_type": "llama", "rope_scaling": LINEAR, "rope_parameters": LINEAR | {"rope_theta": 100.0}},
            r"rope_theta: expected the same with rope_scaling as in rope_parameters, got 10000\.0 and 100\.0",
        ),
        (
            {"model_type": "llama", "rope_parameters": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 0.0}},
            r"attention_factor: expected more than 0, or null, .*got 0\.0; remove it",
        ),
        (
            {"model_type": "mistral3", "text_config": {"model_type": "mistral", "layer_types": [FULL] * 2}},
            r"layer_types: expected sliding_attention in every layer, .*not read for mistral",
        ),
        (
            {"model_type": "lfm2", "theta": 1e4},
            r"theta: expected rope_theta=1000000\.0, which transformers 5 reads in it",
        ),
        (HYBRID | {"mamba_chunk_size": -1}, r"mamba_chunk_size: expected a whole number from 1 on, got -1"),
        (HYBRID | {"position_embedding_type": 1}, r"position_embedding_type: expected rope, nope or null, got 1"),
        ({"model_type": "nemotron_h", "chunk_size": 0}, r"chunk_size: expected a whole number from 1 on, got 0"),
        (
            {"model_type": "gemma4_unified_text", "per_layer_config": {"a": 1}},
            r"per_layer_config: expected the same head_dim and num_key_value_heads for each layer with full_attention",
        ),
        ({"model_type": "lfm2", "rope_theta": None}, r"rope_theta: expected a number, got null"),
        ({"model_type": "olmoe", "num_attention_heads": 0}, r"num_attention_heads: expected more than 0, got 0"),
        ({"model_type": "gemma4_unified_text", "per_layer_config": 0}, r"per_layer_config: expected an object, got 0"),
        ({"model_type": "qwen3_next", "rope_parameters": False}, r"rope_parameters: expected an object, got False"),
        ({"model_type": "olmo2", "pad_token_id": "default"}, r"pad_token_id: expected a whole number, got 'default'"),
        (
            {"model_type": "gemma3", "tie_word_embeddings": "false", "text_config": {"model_type": "gemma3_text"}},
            r"tie_word_embeddings: expected true or false beside text_config, got 'false'",
        ),
    ],
)
def test_what_transformers_computes_otherwise_is_refused(tmp_path, config, message):
    """As 5.23 computes it: other logits, or an error where these would be computed."""
    sizes = {"num_hidden_layers": 2, "max_position_embeddings": 64}
    text = config.get("text_config")
    said = config | {"text_config": sizes | text} if text else sizes | config
    (tmp_path / "config.json").write_text(json.dumps(said))
    with pytest.raises(ConfigError, match=rf"^model_path: config\.json: {message}"):
        model_fields(read_config(tmp_path))


def test_a_base_that_lfm2_says_twice_is_one():
    """As LFM2-1.2B has it; transformers 4 reads `theta`, transformers 5 the other."""
    found = [{"rope_theta": 1e4}, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}]
    assert [model_fields({"model_type": "lfm2", "theta": 1e4} | x)["rope_theta"] for x in found] == [1e4, 1e4]


def test_what_is_not_said_is_that_of_the_class():
    """`rope_parameters` null are those of the class; a base in both spellings is one."""
    yarn = model_fields({"model_type": "ministral3", "rope_parameters": None})
    assert (yarn["rope_scaling"], yarn["rope_theta"]) == ("yarn", 1e6)
    both = {"rope_scaling": LINEAR, "rope_theta": 100.0, "rope_parameters": LINEAR | {"rope_theta": 100.0}}
    assert model_fields({"model_type": "llama"} | both)["rope_theta"] == 100.0
    assert model_fields({"model_type": "gemma2", "final_logit_softcapping": None})["final_logit_softcapping"] == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": ["llama"]},
        {"rope_parameters": "absent", "rope_scaling": "linear"},
        {"rope_parameters": [1]},
        {"rope_parameters": {"rope_type": ["x"]}},
        {"rope_parameters": {"rope_theta": "x"}},
        {"model_type": "qwen3", "use_sliding_window": True, "layer_types": 5},
        {"model_type": "smollm3", "no_rope_layers": 5},
        {"model_type": "qwen3", "use_sliding_window": "false"},
        {"model_type": "mistral", "sliding_window": True},
        {"num_hidden_layers": "2"},
        {"hidden_size": [32]},
    ],
)
def test_values_of_other_types_are_refused_in_one_line(tmp_path, changes):
    folder = write(tmp_path / "model", "llama", **changes)
    with pytest.raises(ConfigError, match=r"^model_path: [^\n]*$"):
        config(folder)


def test_integers_are_no_weights(tmp_path):
    whole = stored("llama")["model.norm.weight"].astype(np.int32)
    folder = write(tmp_path / "model", "llama", tensors=stored("llama") | {"model.norm.weight": whole})
    with pytest.raises(
        ConfigError, match=r"^model_path: .*: expected model\.norm\.weight in a float dtype, got int32; "
    ):
        files.Weights(folder)


def test_windows_by_layer():
    window = lambda types: model_fields(
        {"model_type": "qwen3", "use_sliding_window": True, "num_hidden_layers": 4, "layer_types": types}
    )
    full, sliding = "full_attention", "sliding_attention"
    assert window([sliding, sliding, full, sliding])["sliding_window_pattern"] == 3
    assert window([sliding] * 4)["sliding_window_pattern"] == 0 and window([full] * 4)["sliding_window"] == 0
    with pytest.raises(ConfigError, match="layer_types: expected every n-th layer with full_attention"):
        window([full, sliding, sliding, sliding])
    first = {"model_type": "qwen2", "use_sliding_window": True, "num_hidden_layers": 4, "max_window_layers": 2}
    with pytest.raises(ConfigError, match="layer_types"):
        model_fields(first)


def test_windows_of_smollm3():
    """Without layer_types, transformers gives the window to the layers without rotary embedding, and only to them."""
    windows = {"model_type": "smollm3", "num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 8}
    of = lambda **keys: model_fields(windows | keys)
    assert of(no_rope_layers=[1] * 4)["sliding_window"] == 0
    everywhere = of(no_rope_layers=[0] * 4)
    assert (everywhere["sliding_window"], everywhere["sliding_window_pattern"]) == (8, 0)
    for keys in ({}, {"no_rope_layer_interval": 2}, {"no_rope_layers": [1, 0, 1, 0]}):
        with pytest.raises(ConfigError, match="layer_types: expected every n-th layer with full_attention"):
            of(**keys)
    types = ["sliding_attention"] * 4
    assert of(layer_types=types)["sliding_window"] == 8 and of(sliding_window=None)
    assert of(layer_types=types, use_sliding_window=False)["sliding_window"] == 8  # and its masks have the window
    assert of(layer_types=["full_attention"] * 4, use_sliding_window=False)["sliding_window"] == 0
    with pytest.raises(ConfigError, match="sliding_window: expected a number, since layer_types has sliding_attention"):
        of(layer_types=types, sliding_window=None)


def test_layers_without_rotary_embedding():
    """As a list, which may be longer than the layers, or every n-th layer; n beyond the layers is none."""
    of = lambda **keys: model_fields({"model_type": "smollm3", "num_hidden_layers": 5} | keys)["no_rope_layer_interval"]
    assert of() == 4 and of(no_rope_layers=[1, 1, 0, 1, 1, 0]) == 3 and of(no_rope_layers=[1] * 5) == 0
    assert of(no_rope_layer_interval=9) == 0 and of(no_rope_layers=[0] * 5) == 1


def test_keys_of_published_models():
    """Those of gemma-2-9b, SmolLM3-3B and Devstral 2 that say nothing new."""
    of = lambda family, **keys: model_fields({"model_type": family} | keys)
    said_again = {"cache_implementation": "hybrid", "hidden_act": "gelu_pytorch_tanh", "sliding_window_size": 4096}
    assert of("gemma2", **said_again) == of("gemma2")
    assert of("smollm3", max_window_layers=28, pretraining_tp=2, use_sliding_window=False) == of("smollm3")
    rope = {"type": "yarn", "rope_type": "yarn", "rope_theta": 1e6, "factor": 64.0, "beta_fast": 4.0, "beta_slow": 1.0}
    rope |= {"mscale": 1.0, "mscale_all_dim": 0.0, "llama_4_scaling_beta": 0.0}
    found = of("ministral3", rope_parameters=rope | {"original_max_position_embeddings": 4096})
    assert (found["rope_factor"], found["rope_attention_factor"]) == (64.0, 0.0)  # 0: 0.1 ln(factor) + 1
    assert found["rope_beta_fast"] == 4.0 and "rope_llama_4_scaling_beta" not in found


# Sizes and keys as their authors published them, without tokens, dropout and versions.
LLAMA_32_1B = {
    "model_type": "llama", "attention_bias": False, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048,
    "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False, "num_attention_heads": 32,
    "num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0, "tie_word_embeddings": True, "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
MISTRAL_7B = {
    "model_type": "mistral", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
    "vocab_size": 32000,
}  # fmt: skip
QWEN25_7B = {
    "model_type": "qwen2", "hidden_act": "silu", "hidden_size": 3584, "intermediate_size": 18944,
    "max_position_embeddings": 131072, "max_window_layers": 28, "num_attention_heads": 28, "num_hidden_layers": 28,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 131072,
    "tie_word_embeddings": False, "use_mrope": False, "use_sliding_window": False, "vocab_size": 152064,
}  # fmt: skip
QWEN3_06B = {
    "model_type": "qwen3", "attention_bias": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
    "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28, "num_attention_heads": 16,
    "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
SMOLLM3_3B = {
    "model_type": "smollm3", "attention_bias": False, "hidden_act": "silu", "hidden_size": 2048,
    "intermediate_size": 11008, "layer_types": ["full_attention"] * 36, "max_position_embeddings": 65536,
    "max_window_layers": 28, "mlp_bias": False, "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9,
    "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 4, "pretraining_tp": 2,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None,
    "use_sliding_window": False, "vocab_size": 128256,
}  # fmt: skip
GEMMA_2_2B = {
    "model_type": "gemma2", "attention_bias": False, "attn_logit_softcapping": 50.0, "cache_implementation": "hybrid",
    "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304, "intermediate_size": 9216,
    "max_position_embeddings": 8192, "num_attention_heads": 8, "num_hidden_layers": 26, "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096,
    "vocab_size": 256000,
}  # fmt: skip
GEMMA_3_1B = {
    "model_type": "gemma3_text", "attention_bias": False, "attn_logit_softcapping": None,
    "cache_implementation": "hybrid", "final_logit_softcapping": None, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "intermediate_size": 6912,
    "max_position_embeddings": 32768, "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": None,
    "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6, "vocab_size": 262144,
}  # fmt: skip


@pytest.mark.parametrize(
    "config, expected",
    [
        (LLAMA_32_1B, {"rope_scaling": "llama3", "rope_factor": 32.0, "tie_word_embeddings": True, "head_dim": 64}),
        (MISTRAL_7B, {"sliding_window": 4096, "sliding_window_pattern": 0, "rope_theta": 1e4}),
        (MISTRAL_7B | {"sliding_window": None, "rope_theta": 1e6, "vocab_size": 32768}, {"sliding_window": 0}),
        (QWEN25_7B, {"sliding_window": 0, "attention_bias": True, "vocab_size": 152064}),
        (QWEN3_06B, {"sliding_window": 0, "qk_norm": True, "head_dim": 128, "rope_theta": 1e6}),
        (SMOLLM3_3B, {"sliding_window": 0, "no_rope_layer_interval": 4, "tie_word_embeddings": True}),
        (GEMMA_2_2B, {"sliding_window_pattern": 2, "attn_logit_softcapping": 50.0, "norm_plus_one": True}),
        (GEMMA_3_1B, {"sliding_window_pattern": 6, "rope_local_base_freq": 1e4, "rope_theta": 1e6, "qk_norm": True}),
    ],
)
def test_published_models_are_read(config, expected):
    said_by_tools = {"_attn_implementation_autoset": True, "unsloth_version": "2025.3.19", "unsloth_fixed": True}
    found = model_fields(config | said_by_tools)
    assert expected.items() <= found.items()
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    assert {name: found[name] for name in sizes} == {name: config[name] for name in sizes}
    with pytest.raises(ConfigError, match=r"config\.json has use_mrope|use_mrope: expected False, got True"):
        model_fields(config | {"use_mrope": True})


def test_windows_of_gemma():
    """Every second layer of Gemma 2 and every sixth of Gemma 3 is without one, and has the global base."""
    pattern = lambda family, **keys: model_fields({"model_type": family} | keys)["sliding_window_pattern"]
    assert pattern("gemma2") == 2 and pattern("gemma3_text") == 6
    assert pattern("gemma3_text", sliding_window_pattern=3) == 3
    full = {"num_hidden_layers": 2, "layer_types": [FULL] * 2}
    found = model_fields({"model_type": "gemma3_text"} | full)
    assert (found["sliding_window"], found["rope_local_base_freq"]) == (0, 0.0)


def test_model_fields_beside_a_model_path_give_way_unless_they_are_fixed(tmp_path):
    """Those of a config file give way; those of flags are fixed, also to a field's default."""
    folder = write(tmp_path / "model", "gemma2")
    again = resolved(config(folder))
    assert again == config(folder) and again.model.sandwich_norms
    c = config(folder)
    c.model.num_hidden_layers, c.model.qk_norm, c.model.final_logit_softcapping = 9, True, 20.0
    assert resolved(c) == again
    assert set(replaced_fields(c, again)) == {"num_hidden_layers", "qk_norm", "final_logit_softcapping"}
    assert resolved(again, fixed=["num_hidden_layers", "vocab_size"]) == again
    for name, value in (("num_hidden_layers", 9), ("qk_norm", True), ("final_logit_softcapping", 20.0)):
        with pytest.raises(ConfigError, match=rf"^model\.{name}: expected .*, as the model at .*, got {value}; leave"):
            resolved(c, fixed=[name])
    c.model.num_hidden_layers = default_config().model.num_hidden_layers
    with pytest.raises(ConfigError, match=r"^model\.num_hidden_layers: expected 4, .*, got 12; leave it out$"):
        resolved(c, fixed=["num_hidden_layers"])


PLACED: dict[str, dict[str, Any]] = {
    "1": {},
    "4": {"gpus": 4, "zero_level": 3, "offload_master": True, "offload_weights": True},
    "nvme": {"offload_master": "nvme", "offload_optimizer": "nvme"},
}


def not_aligned(array: np.ndarray) -> np.ndarray:
    """Copies an array to where a virtual CPU device's cannot be: those take over numpy's memory if it is aligned."""
    memory = np.empty(array.nbytes + 128, np.uint8)
    first = -memory.ctypes.data % 64 + array.itemsize
    copied = memory[first : first + array.nbytes].view(array.dtype).reshape(array.shape)
    copied[...] = array
    return copied


@needs(4)
@pytest.mark.parametrize(
    "case, placed",
    quick_at([(case, placed) for case in ("llama3_rope", "qwen2", "gemma3") for placed in PLACED], 3, 5, 7),
)
def test_weights_arrive_to_the_bit_under_every_placement(tmp_path, case, placed):
    """A tied head and biases; read from three files, one layer in memory at a time."""
    changes = PLACED[placed] | ({"nvme_path": str(tmp_path)} if placed == "nvme" else {})
    c = config(write(tmp_path / "model", case, shards=3), **changes)
    run = from_config(c, make_mesh(jax.devices()[: c.gpus]), total_steps=1)
    weights = open_weights(c, run.model)
    assert weights is not None
    alive: list[tuple[str, weakref.ref]] = []
    most = 0
    read = weights.read

    def released_to(layers: int) -> int:
        """The number of layers alive, once it is this one or 5 s are over: XLA's threads release what was copied."""
        for _ in range(100):
            found = len({layer for layer, reference in alive if reference() is not None})
            if found <= layers:
                break
            time.sleep(0.05)
        return found

    def counted(name: str) -> np.ndarray:
        nonlocal most
        array = not_aligned(read(name))
        if ".layers." in name:
            alive.append((name.split(".layers.")[1].split(".")[0], weakref.ref(array.base)))
        most = max(most, released_to(2))
        return array

    weights.read = counted
    state = run.load_state(*files.readers(weights))
    expected = load_tree(case, "weight", c.model.num_hidden_layers)
    chex.assert_trees_all_equal(jax.device_get(state.weights), expected)
    if placed != "nvme":
        chex.assert_trees_all_equal(jax.device_get(state.master), expected)
    assert most <= 2


def test_other_dtypes_are_cast(tmp_path):
    halves = {name: array.astype(jax.numpy.bfloat16) for name, array in stored("llama").items()}
    c = config(write(tmp_path / "model", "llama", tensors=halves))
    run = from_config(c, make_mesh(jax.devices()[:1]), total_steps=1)
    state = run.load_state(*files.readers(files.Weights(c.model_path)))
    expected = jax.tree.map(lambda x: x.astype(jax.numpy.bfloat16).astype(np.float32), load_tree("llama", "weight", 2))
    chex.assert_trees_all_equal(jax.device_get(state.master), expected)


def without(name: str) -> dict[str, np.ndarray]:
    return {key: array for key, array in stored("llama").items() if key != name}


@pytest.mark.parametrize(
    "tensors, message",
    [
        (without("model.norm.weight"), r"expected model\.norm\.weight in .*, got no such tensor"),
        (stored("llama") | {"model.extra": np.zeros(2)}, r"has model\.extra, which a model with this config\.json"),
        (stored("llama") | {"vision_tower.x": np.zeros(2)}, r"has vision_tower\.x, which a model with this config"),
        (
            stored("llama") | {"model.norm.weight": np.zeros(33, np.float32)},
            r"model\.norm\.weight: expected \[32\], as config\.json says, got \[33\]",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path, tensors, message):
    c = config(write(tmp_path / "model", "llama", tensors=tensors))
    model = from_config(c, make_mesh(jax.devices()[:1]), total_steps=1).model
    with pytest.raises(ConfigError, match=rf"^model_path: .*{message}"):
        open_weights(c, model)


def test_damaged_folders_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"^model_path: expected a folder with config\.json, got .*nowhere"):
        read_config(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"^model_path: cannot read .*config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"^model_path: expected an object"):
        read_config(tmp_path)
    with pytest.raises(ConfigError, match=r"^model_path: expected model\.safetensors or model\.safetensors\.index"):
        files.Weights(tmp_path)
    folder = write(tmp_path / "model", "llama", shards=2)
    shard = next(folder.glob("model-00001*"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=rf"^model_path: cannot read .*{shard.name}.*; fetch the model again$"):
        files.Weights(folder)
    shard.unlink()
    with pytest.raises(ConfigError, match=rf"^model_path: cannot read .*{shard.name}"):
        files.Weights(folder)
    shard.write_bytes(next(folder.glob("model-00002*")).read_bytes())
    with pytest.raises(ConfigError, match=r"names .* in model-00001.*, which does not have it"):
        files.Weights(folder)
    for content in ("{}", '{"weight_map": {"x": 5}}', '{"weight_map": {"x": ["y"]}}', '{"weight_map": [1]}'):
        (folder / files.INDEX).write_text(content)
        with pytest.raises(ConfigError, match=r"^model_path: cannot read .*index\.json"):
            files.Weights(folder)


def save_tokenizer(path: Path, words: int = 62) -> None:
    """A small vocabulary of so many words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = ["</s>", "<unk>", *(f"w{i}" for i in range(words - 2))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path))


@pytest.mark.full
def test_a_run_starts_from_the_model(tmp_path, capsys):
    """With a rate of nearly 0 the weights after a step are the model's; its tokenizer is used; and it resumes."""
    folder = write(tmp_path / "model", "qwen2", max_position_embeddings=8)
    text = " ".join(f"w{i * i % 60}" for i in range(3000))
    (tmp_path / "text.txt").write_text("\n\n".join([text] * 3))
    c = default_config()
    c.update({"model_path": str(folder), "model_dtype": "float32", "data": str(tmp_path / "text.txt")})
    c.update({"output_dir": str(tmp_path / "run"), "sequence_len": 16, "max_steps": 1, "learning_rate": 1e-30})
    c.update({"sample_tokens": 0, "weight_decay": 0.0, "eval_batches": 1})
    with pytest.raises(ConfigError, match="expected at most 96 tokens"):  # bytes need more rows than the embedding has
        train(c)
    assert not (tmp_path / "run").exists()
    save_tokenizer(folder / "tokenizer.json")
    c.model.num_hidden_layers, c.model.qk_norm = 9, True  # of a config file: they give way, which is said
    result = train(c)
    printed = capsys.readouterr().out
    assert f"model: as {folder} says, in place of the config's num_hidden_layers, qk_norm\n" in printed
    assert "note: rows of sequence_len 16 are longer than the 8 positions that" in printed
    chex.assert_trees_all_equal(jax.device_get(result.state.master), load_tree("qwen2", "weight", 2))
    c.max_steps = 2
    again = train(c)
    assert int(again.state.step) == 2
    chex.assert_trees_all_equal(jax.device_get(again.state.master), load_tree("qwen2", "weight", 2))


def test_from_scratch_takes_sizes_only(tmp_path):
    folder = write(tmp_path / "model", "qwen2")
    c = config(folder, from_scratch=True)
    run = from_config(c, make_mesh(jax.devices()[:1]), total_steps=1)
    assert open_weights(c, run.model) is None and run.model.vocab_size == 96
    c = default_config()
    assert resolved(c) is c
    c.from_scratch = True
    with pytest.raises(
        ConfigError, match=r"^from_scratch: expected false without a model_path, got True; leave it out"
    ):
        resolved(c)


def test_a_single_file_is_read_before_an_index(tmp_path):
    """As transformers does: the shards beside it may be of another save."""
    folder = write(tmp_path / "model", "llama", shards=2, tensors={n: 0.5 * x for n, x in stored("llama").items()})
    safetensors.numpy.save_file(stored("llama"), folder / files.SINGLE)
    weights = files.Weights(folder)
    for name, array in stored("llama").items():
        np.testing.assert_array_equal(weights.read(name), array)
    said = rf"^{folder}/model.safetensors, and not the files that model.safetensors.index.json beside it names"
    assert re.match(said, files.describe_source(weights))
    (folder / files.INDEX).unlink()
    assert files.describe_source(files.Weights(folder)) == str(folder)


@pytest.mark.parametrize(
    "before, advice",
    [
        ("_orig_mod.", "save the model that torch.compile wraps, or remove '_orig_mod.' from the names"),
        ("module.", "save the model that DistributedDataParallel wraps, or remove"),
        ("base_model.model.", r"merge the adapter before saving \(merge_and_unload\)"),
        ("my.own.", "save the model by itself, or remove 'my.own.' from the names"),
    ],
)
def test_names_with_something_before_them_are_told(tmp_path, before, advice):
    tensors = {before + name: array for name, array in stored("llama").items()}
    c = config(write(tmp_path / "model", "llama", tensors=tensors))
    with pytest.raises(ConfigError, match=rf"expected \S+ in \S+, got '{before}\S+'; {advice}") as error:
        open_weights(c, from_config(c, make_mesh(jax.devices()[:1]), 1).model)
    assert "\n" not in str(error.value) and "fetch" not in str(error.value)


@pytest.mark.parametrize(
    "file, got",
    [
        ("adapter_config.json", "an adapter in PEFT's format; surojax convert merge BASE "),
        ("pytorch_model.bin", "pytorch_model.bin, which may run code and is not read; save the model with save_pretr"),
        ("pytorch_model.bin.index.json", "pytorch_model.bin.index.json, which may run"),
        ("consolidated.00.pth", "consolidated.00.pth, which may"),
        ("tiny-Q4_K_M.gguf", "tiny-Q4_K_M.gguf; give this file"),
        ("checkpoint-5/config.json", "one in the folder checkpoint-5 in it; give that folder"),
    ],
)
def test_folders_of_something_else_are_told(tmp_path, file, got):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("{}")
    with pytest.raises(ConfigError, match=rf"expected a folder with config\.json, got .* with {re.escape(got)}"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(hf_config("llama")))
    with pytest.raises(ConfigError, match=rf"expected {files.SINGLE} or {files.INDEX} in .*, got {re.escape(got)}"):
        files.Weights(tmp_path)


def test_a_folder_without_a_fast_tokenizer_is_told(tmp_path):
    """And not to train on bytes; a model of bytes, which has no tokenizer's file, is trained on them."""
    folder = write(tmp_path / "model", "llama")
    check_tokenizer(config(folder), 96, "bytes")
    for name in ("tokenizer.model", "spiece.model", "vocab.json", "tekken.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
        message = rf"^tokenizer: expected tokenizer.json in {folder}, got '{name}'; save a fast tokenizer there "
        with pytest.raises(ConfigError, match=message):
            check_tokenizer(config(folder), 96, "bytes")
        (folder / name).unlink()
    larger = write(tmp_path / "larger", "llama", vocab_size=32000)
    with pytest.raises(
        ConfigError, match=rf"^tokenizer: expected tokenizer.json in {larger}, got 'no such file'; save"
    ):
        check_tokenizer(config(larger), 257, "bytes")
    with pytest.raises(
        ConfigError, match=r"got 97; give the model's own tokenizer, or .* resize_token_embeddings\(97\)"
    ):
        check_tokenizer(config(folder), 97, "tokenizer.json:ab")


@pytest.mark.parametrize("where", ["tokenizer.json", "tokenizer_config.json"])
def test_tokens_without_rows_end_the_command_with_one_line(tmp_path, where, capsys):
    """Added by `add_tokens` of transformers 5, or of 4, whose settings have them too; nothing is written."""
    folder = write(tmp_path / "model", "llama")  # of 96 rows
    save_tokenizer(folder / "tokenizer.json", 96)
    if where == "tokenizer.json":
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / where))
        tokenizer.add_tokens(["<new>", "<newer>"])
        tokenizer.save(str(folder / where))
    else:
        added = {str(96 + i): {"content": text, "special": False} for i, text in enumerate(("<new>", "<newer>"))}
        (folder / where).write_text(json.dumps({"added_tokens_decoder": added}))
    (tmp_path / "text.txt").write_text("w1 w2 <new>\n" * 100)
    given = {"model_path": folder, "data": tmp_path / "text.txt", "output_dir": tmp_path / "run", "max_steps": 1}
    main = importlib.import_module("surojax.train").main
    with pytest.raises(Refused) as raised:
        main([f"--config.{name}={value}" for name, value in given.items()])
    assert capsys.readouterr().out == ""
    assert raised.value.code == (
        f"surojax.train: error: tokenizer: expected at most 96 tokens, as many as {folder} has rows, got 98; give the "
        "model's own tokenizer, or add the rows with transformers: resize_token_embeddings(98), then save_pretrained, "
        "and that folder as model_path"
    )
    assert not (tmp_path / "run").exists()
