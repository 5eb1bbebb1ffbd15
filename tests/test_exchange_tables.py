"""Tables of keys and names in others' files, each row by what it does.

The rows are written here again, from those who publish them: a test that takes its cases from the table itself does not
notice a row that is missing.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from test_config_keys import LEAST

from surojax import ConfigError, default_config
from surojax.assembly.from_config import model as model_of
from surojax.exchange import (
    adapter_config,
    config_json,
    gguf_metadata,
    huggingface,
    missing,
    parts,
    small_files,
    sources,
)
from surojax.exchange.beside import tensors_beside
from surojax.exchange.huggingface import model_fields
from surojax.exchange.model_tensors import SINGLE, Weights
from surojax.exchange.naming import Naming, is_no_part
from surojax.families import registry, rope_keys
from surojax.families.registry import FAMILIES
from surojax.models.lora import Lora

# adapter_config.json as PEFT 0.21 writes it, and keys of earlier versions.
PEFT: dict = {
    "alora_invocation_tokens": None,
    "alpha_pattern": {},
    "arrow_config": None,
    "auto_mapping": {"base_model_class": "LlamaForCausalLM", "parent_library": "transformers.models.llama"},
    "base_model_name_or_path": "a/b",
    "bias": "none",
    "corda_config": {"a": 1},
    "ensure_weight_tying": False,
    "eva_config": {"rho": 2.0},
    "exclude_modules": None,
    "fan_in_fan_out": True,
    "inference_mode": True,
    "init_lora_weights": True,
    "kasa_config": None,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {"loftq_bits": 4},
    "lora_alpha": 8,
    "lora_bias": False,
    "lora_dropout": 0.1,
    "lora_ga_config": {"a": 1},
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "monteclora_config": None,
    "peft_type": "LORA",
    "peft_version": "0.21.2",
    "qalora_group_size": 16,
    "r": 4,
    "rank_pattern": {},
    "revision": "main",
    "runtime_config": {"ephemeral_gpu_offload": False},
    "target_modules": ["q_proj", "down_proj"],
    "target_parameters": None,
    "task_type": "CAUSAL_LM",
    "trainable_token_indices": None,
    "use_bdlora": None,
    "use_dora": False,
    "use_qalora": False,
    "use_rslora": False,
    "velora_config": None,
}


def _model(layers: int = 2):
    c = default_config()
    c.model.update({"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": layers, "vocab_size": 64})
    c.model.update({"num_attention_heads": 2, "num_key_value_heads": 2})
    return model_of(c)


def _read_adapter_config(folder, **changes):
    content = {key: value for key, value in (PEFT | changes).items() if value != "left out"}
    (folder / "adapter_config.json").write_text(json.dumps(content))
    return adapter_config.read_adapter_config(folder, _model(), Naming())[0]


def test_an_adapter_config_with_all_that_peft_writes(tmp_path):
    found = _read_adapter_config(tmp_path)
    assert (found.rank, found.alpha, found.targets) == (4, 8.0, ("attention.wq", "mlp.w_down"))
    assert not (found.saved or found.rank_stabilised or found.magnitudes)


# Odd shapes of one, with the settings that change; None: it is refused by the key's name.
ODD = {
    "no base": ({"base_model_name_or_path": None}, {}),
    "no key of a base": ({"base_model_name_or_path": "left out"}, {}),
    "nothing saved": ({"modules_to_save": []}, {}),
    "no key of what is saved": ({"modules_to_save": "left out"}, {}),
    "a head": ({"modules_to_save": ["lm_head"]}, {"saved": ("head",)}),
    "a regular expression": ({"target_modules": r".*\.(q_proj|v_proj)"}, {"targets": ("attention.wq", "attention.wv")}),
    "all layers": ({"target_modules": "all-linear"}, {"targets": None}),
    "a wrong expression": ({"target_modules": r".*\.(q_proj"}, None),
    "an expression without a match": ({"target_modules": r"nothing"}, None),
    "no targets": ({"target_modules": None}, None),
    "one layer": ({"target_modules": r"model\.layers\.1\.self_attn\.q_proj"}, None),
    "ranks by module": ({"rank_pattern": {"q_proj": 8}}, None),
    "alphas by module": ({"alpha_pattern": {"q_proj": 16}}, None),
    "ranks and alphas by module that are those of all": (
        {"rank_pattern": {"q_proj": 4, "k_proj": 4}, "alpha_pattern": {"q_proj": 8}},
        {},
    ),
    "patterns of null": ({"rank_pattern": None, "alpha_pattern": None}, {}),
    "no patterns": ({"rank_pattern": "left out", "alpha_pattern": "left out"}, {}),
    "some layers": ({"layers_to_transform": [0]}, None),
    "left out modules": ({"exclude_modules": ["down_proj"]}, None),
    "a bias": ({"bias": "all"}, None),
    "no bias": ({"bias": None}, {}),
    "all layers in a list": ({"target_modules": ["all-linear"]}, None),  # PEFT looks for a module of that name then
    "targets in a list of their own": ({"target_modules": [["q_proj"]]}, None),
    "a head as an object": ({"modules_to_save": {"lm_head": True}}, None),
    "what is saved as a number": ({"modules_to_save": 1}, None),
    "parameters of a model without experts": ({"target_parameters": ["q_proj.weight"]}, None),
    "drawn by pissa": ({"init_lora_weights": "pissa"}, None),
    "drawn by a gaussian": ({"init_lora_weights": "gaussian"}, {}),
    "orthogonal": ({"init_lora_weights": "orthogonal"}, {}),
    "drawn by eva": ({"init_lora_weights": "eva"}, {}),
    "DoRA": ({"use_dora": True}, {"magnitudes": True}),
    "rsLoRA": ({"use_rslora": True}, {"rank_stabilised": True}),
    "QA-LoRA": ({"use_qalora": True}, None),
    "rank as a text": ({"r": "4"}, None),
    "a rank of 0": ({"r": 0}, None),
    "the largest rank": ({"r": 2**16}, {"rank": 2**16}),
    "a rank too large": ({"r": 2**16 + 1}, None),
    "half an alpha": ({"lora_alpha": 0.5}, {"alpha": 0.5}),
    "no alpha": ({"lora_alpha": 0}, None),
    "an alpha too large": ({"lora_alpha": 2**31}, None),
    "another kind": ({"peft_type": "LOHA"}, None),
    "a later key": ({"some_later_key": 1}, None),
}


@pytest.mark.parametrize("case", ODD)
def test_adapter_configs_of_odd_shapes(tmp_path, case):
    changes, settings = ODD[case]
    if settings is None:
        with pytest.raises(ConfigError, match=rf"adapter_config\.json: {next(iter(changes))}: expected ") as error:
            _read_adapter_config(tmp_path, **changes)
        assert "\n" not in str(error.value)
        return
    plain = {"rank": 4, "alpha": 8.0, "targets": ("attention.wq", "mlp.w_down"), "saved": ()}
    plain |= {"rank_stabilised": False, "magnitudes": False}
    found = _read_adapter_config(tmp_path, **changes)
    for name, value in (plain | settings).items():
        if value is not None:
            assert getattr(found, name) == value, name
    assert settings.get("targets", 1) or len(found.targets) == 7


@pytest.mark.parametrize("layers", (1, 3))
def test_a_target_module_is_named_once_for_all_layers(layers):
    adapted = Lora(4, 8.5, ("attention.wq", "mlp.w_down"))
    content = adapter_config.adapter_config_of(adapted, _model(layers), "a/b", Naming())
    assert content["target_modules"] == ["q_proj", "down_proj"] and content["lora_alpha"] == 8.5


def test_tensors_that_no_family_has_keep_our_names():
    """Those of each layer apart; the others are called as in the family that has most of them."""
    found = registry.tensor_names({"attention.wq", "mlp.own", "norm"})
    assert found["attention.wq"] == "model.layers.{l}.self_attn.q_proj.weight" and found["norm"] == "model.norm.weight"
    assert found["mlp.own"] == "model.layers.{l}.mlp.own"
    assert "mlp.own" not in registry.tensor_names({"attention.wq", "norm"})


def test_names_of_tensors_in_image_text_models():
    """In files (transformers 4), and as the modules of transformers 5 are called."""
    assert parts.alone("language_model.model.layers.0.mlp.up_proj.weight") == "model.layers.0.mlp.up_proj.weight"
    assert parts.alone("language_model.lm_head.weight") == "lm_head.weight"
    assert parts.alone("model.language_model.norm.weight") == "model.norm.weight"
    assert parts.alone("lm_head.weight") == "lm_head.weight"
    assert parts.in_whole("model.norm.weight") == "model.language_model.norm.weight"
    assert parts.in_whole("lm_head.weight") == "lm_head.weight"
    for start in ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."):
        assert parts.is_of_images(f"{start}a.weight")
    assert not parts.is_of_images("language_model.model.norm.weight")


GEMMA_IMAGES = {  # config.json of google/gemma-3-4b-it, and keys that other versions write
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "image_token_id": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "multimodal_projector_bias": True,
    "projector_hidden_act": "gelu",
    "spatial_merge_size": 2,
    "text_config": {"hidden_size": 2560, "model_type": "gemma3_text", "architectures": None, "num_hidden_layers": 34},
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "vision_config": {"hidden_size": 1152},
    "vision_feature_layer": -1,
}


def test_the_language_model_of_an_image_text_model():
    found = parts.text_config(GEMMA_IMAGES)
    assert found == {
        "hidden_size": 2560,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "torch_dtype": "bfloat16",
        "eos_token_id": [1, 106],
    }
    beside = {"bos_token_id": 2, "pad_token_id": 0, "dtype": "float32", "quantization_config": {"quant_method": "x"}}
    assert parts.text_config(GEMMA_IMAGES | beside) == found | beside
    assert parts.text_config(GEMMA_IMAGES | dict.fromkeys(beside)) == found
    assert parts.text_config(GEMMA_IMAGES | {"tie_word_embeddings": True}) == found
    assert parts.text_config(GEMMA_IMAGES | {"tie_word_embeddings": False})["tie_word_embeddings"] is False
    assert parts.text_config(GEMMA_IMAGES | {"rope_interleaved": False, "some_later_key": None}) == found
    for key, value in {"some_later_key": 1, "rope_interleaved": True}.items():
        with pytest.raises(ConfigError, match=f"config.json has {key}, which may change what the model computes"):
            parts.text_config(GEMMA_IMAGES | {key: value})
    with pytest.raises(ConfigError, match="expected model_type gemma3_text in text_config of gemma3, got 'llama'"):
        parts.text_config(GEMMA_IMAGES | {"text_config": {"model_type": "llama"}})
    with pytest.raises(ConfigError, match="expected an object as text_config of gemma3, got None"):
        parts.text_config({"model_type": "gemma3"})


def test_what_is_beside_a_language_model(tmp_path):
    """Scales are those of a matrix in float8 alone; codes mean nothing without their settings."""

    def beside(folder: str, **tensors: np.ndarray):
        (tmp_path / folder).mkdir()
        quantised = {"quant_method": "fp8", "weight_block_size": [2, 2]}
        (tmp_path / folder / "config.json").write_text(json.dumps(GEMMA_IMAGES | {"quantization_config": quantised}))
        images = {f"vision_tower.{name}": x for name, x in tensors.items()}
        norm = {"language_model.model.norm.weight": np.ones(2, np.float32)}
        safetensors.numpy.save_file(norm | images, tmp_path / folder / SINGLE)
        found = tensors_beside(Weights(tmp_path / folder))
        assert found is not None and found.config is not None and found.config["mm_tokens_per_image"] == 256
        assert found.planned(np.dtype("float32")).keys() == images.keys()

    one = np.ones((1, 1), np.float32)
    beside("nothing")
    beside("scales", a=one, a_scale_inv=one, b_scale_inv=one)
    with pytest.raises(
        ConfigError, match=r"expected vision_tower\.a, which is kept as it is, as numbers, got codes; fetch"
    ):
        beside("codes", a=one.astype(np.uint8))


NAME = "model.norm.weight"


@pytest.mark.parametrize(
    "start, advice",
    [
        ("_orig_mod.", "save the model that torch.compile wraps"),
        ("module.", "save the model that DistributedDataParallel wraps"),
        ("base_model.model.", r"merge the adapter before saving \(merge_and_unload\)"),
        ("_fsdp_wrapped_module.", "save the full state dict of the model that FSDP wraps"),
        ("other.", "save the model by itself"),
    ],
)
def test_names_with_a_wrappers_beginning(start, advice):
    text = missing.named_instead(NAME, [start + NAME], "fetch it again")
    assert re.fullmatch(
        rf"got '{re.escape(start + NAME)}'; {advice}, or remove '{re.escape(start)}' from the names", text
    )


def test_names_that_files_have_instead():
    assert missing.named_instead(NAME, [], "fetch it again") == "got no tensors at all; fetch it again"
    text = missing.named_instead(NAME, ["a", "model.norm.wight", "b" * 9], "fetch it again")
    assert text == "got no such tensor among 3, the most similar being 'model.norm.wight'; fetch it again"
    many = [f"a.{i}" for i in range(3000)]
    assert missing.named_instead(NAME, many, "x").startswith("got no such tensor among 3,000, the most similar being ")


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin.index.json", "pytorch_model.bin", "consolidated.00.pth", "model.pt", "model.pth"]
)
def test_folders_of_pickled_weights(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    assert missing.held_instead(tmp_path).startswith(f"{name}, which may run code and is not read; save the model ")


def test_the_folder_of_a_run(tmp_path):
    """And what it keeps of the model that it began with: neither is the folder of a model."""
    (tmp_path / "checkpoints/3").mkdir(parents=True)
    (tmp_path / "model").mkdir()
    for file in ("config.json", missing.SOURCE):
        (tmp_path / "model" / file).write_text("{}")
    for folder in (tmp_path, tmp_path / "model", tmp_path / "checkpoints"):
        run = tmp_path if folder.name == "model" else folder
        assert missing.held_instead(folder).startswith(
            f"checkpoints of a run; surojax convert --checkpoint {run} --out"
        )


def test_the_folder_of_a_run_that_ended_before_its_first_checkpoint(tmp_path):
    """What it keeps of its model has no weights either."""
    (tmp_path / "model").mkdir()
    for file in ("model/config.json", f"model/{missing.SOURCE}", "starts.jsonl"):
        (tmp_path / file).write_text("{}")
    for folder in (tmp_path, tmp_path / "model"):
        assert missing.held_instead(folder).startswith("a run that has no checkpoint yet; start it again")


def test_folders_of_something_else(tmp_path):
    assert missing.held_instead(tmp_path) == "" == missing.adapter_instead(tmp_path)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        expected = "one in the folder a in it; give that folder" if name == "a" else ""  # none of two is meant
        assert missing.held_instead(tmp_path) == expected
    assert missing.misnamed(tmp_path, "i.json") == ""
    for number in (1, 2):
        (tmp_path / f"model-0000{number}-of-00002.safetensors").write_bytes(b"")
    assert missing.misnamed(tmp_path, "i.json").startswith("model-00001-of-00002.safetensors; fetch i.json too, or ")
    (tmp_path / "b/adapter_config.json").write_text("{}")
    assert missing.adapter_instead(tmp_path) == ", such as the one in its folder b"
    (tmp_path / "m.gguf").write_bytes(b"")
    assert missing.held_instead(tmp_path) == "m.gguf; give this file"
    (tmp_path / "adapter_config.json").write_text("{}")
    assert missing.held_instead(tmp_path).startswith("an adapter in PEFT's format; surojax convert merge BASE /")
    assert missing.adapter_instead(tmp_path) == ""
    (tmp_path / "config.json").write_text("{}")
    assert missing.adapter_instead(tmp_path) == "; it has a whole model, for model_path"
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    assert missing.adapter_instead(tmp_path).startswith(
        "; it has adapter_model.bin, which may run code and is not read"
    )


SMALL = (
    "config.json generation_config.json tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json "
    "tokenizer.model vocab.json merges.txt chat_template.jinja chat_template.json LICENSE LICENSE.txt LICENSE.md "
    "NOTICE NOTICE.txt"
).split()


def test_small_files_of_a_folder(tmp_path):
    for name in (*SMALL, "model.safetensors", "README.md"):
        (tmp_path / name).write_text(name)
    (tmp_path / "additional_chat_templates").mkdir()
    for name in ("tool_use.jinja", "notes.txt"):
        (tmp_path / "additional_chat_templates" / name).write_text(name)
    assert small_files.read_small_files(tmp_path, small_files.SMALL_FILES) == {n: n.encode() for n in SMALL}
    of_tokenizer = small_files.read_tokenizer_files(tmp_path)
    assert set(of_tokenizer) == {*SMALL[2:11], "additional_chat_templates/tool_use.jinja"}
    for name in "hbdfacge":
        (tmp_path / f"additional_chat_templates/{name}.jinja").write_text(name)
    named = [*small_files.read_tokenizer_files(tmp_path)][len(SMALL[2:11]) :]
    assert named == [f"additional_chat_templates/{name}.jinja" for name in (*"abcdefgh", "tool_use")]
    out = tmp_path / "out"
    out.mkdir()
    of_tokenizer = small_files.read_tokenizer_files(tmp_path)
    small_files.write_small_files(out, of_tokenizer)
    assert small_files.read_tokenizer_files(out) == of_tokenizer


def test_metadata_of_gguf_files():
    """The keys of llama.cpp's `convert_hf_to_gguf.py`, and theirs in config.json."""
    assert gguf_metadata.SIZES == {
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "feed_forward_length": "intermediate_size",
        "block_count": "num_hidden_layers",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.layer_norm_rms_epsilon": "rms_norm_eps",
        "rope.freq_base": "rope_theta",
    }
    heads = {"attention.key_length", "attention.value_length", "rope.dimension_count"}
    scaling = {"rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"}
    others = {"rope.scaling.finetuned", "vocab_size", "expert_count", "expert_used_count"}
    scaling |= {"rope.scaling.attn_factor"} | {f"rope.scaling.yarn_{x}" for x in ("attn_factor", "ext_factor")}
    others |= {"rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"}
    assert heads | scaling | others == gguf_metadata.OTHERS and set(gguf_metadata.HEAD_DIM) == heads


# The fields of `model` that are the same in all models of a family, as its code in transformers has them.
GEMMA = {"norm_plus_one": True, "sandwich_norms": True, "scale_embedding": True, "hidden_act": "gelu_pytorch_tanh"}
QWEN3_5 = {"qk_norm": True, "norm_plus_one": True, "attn_output_gate": True}
GEMMA4 = GEMMA | {"norm_plus_one": False, "qk_norm": True, "v_norm_weightless": True, "layer_scalar": True}
GEMMA4 |= {"query_pre_attn_scalar": 1.0}
OLMO = {"input_norms": False, "sandwich_norms": True, "qk_norm_whole": True}
OF_FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"layer_types": "latent_attention"},
    "deepseek_v3": {"layer_types": "latent_attention", "scoring_func": "sigmoid"},
    "gemma2": GEMMA,
    "gemma3_text": GEMMA | {"qk_norm": True},
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": GEMMA4,
    "glm4_moe": {"scoring_func": "sigmoid"},
    "glm4_moe_lite": {"layer_types": "latent_attention", "scoring_func": "sigmoid"},
    "gpt_oss": {
        "attention_bias": True,
        "attention_out_bias": True,
        "attention_sinks": True,
        "expert_bias": True,
        "hidden_act": "clamped_swiglu",
        "norm_topk_prob": True,
    },
    "granitemoe": {"norm_topk_prob": True},
    "granitemoehybrid": {"mlp_joined": True},
    "lfm2": {"qk_norm": True},
    "lfm2_moe": {"qk_norm": True, "scoring_func": "sigmoid"},
    "mistral4": {"layer_types": "latent_attention"},
    "mixtral": {"norm_topk_prob": True},
    "muse_glimmer_text": {
        "attn_gate_proj": True,
        "embedding_norm": True,
        "norm_plus_one": True,
        "plain_final_norm": True,
        "qk_norm_weightless": True,
        "sandwich_norms": True,
    },
    "nemotron_h": {"one_purpose": True, "hidden_act": "relu2", "no_rope_layer_interval": 1},
    "olmo2": OLMO,
    "olmo3": OLMO,
    "olmoe": {"qk_norm_whole": True},
    "qwen2": {"attention_bias": True},
    "qwen3": {"qk_norm": True},
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_moe_text": QWEN3_5 | {"norm_topk_prob": True},
    "qwen3_next": QWEN3_5,
    "qwen3_moe": {"qk_norm": True},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_options_of_a_family(family):
    expected = OF_FAMILIES.get(family, {})
    assert FAMILIES[family].options == expected
    assert {name: type(value) for name, value in FAMILIES[family].options.items()} == {
        name: type(default_config().model[name]) for name in expected
    }


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("used", [True, False])
def test_layers_with_a_window_of_no_size(family, used):
    """The message names what leaves it out: a switch of some families' configs, or no number."""
    types = ["sliding_attention", "full_attention"]
    config = {"model_type": family, "num_hidden_layers": 2, "layer_types": types, "sliding_window": None}
    config |= LEAST.get(family, {})
    if family in (
        "gemma2",
        "gemma3_text",
        "gpt_oss",
        "olmo3",
        "muse_glimmer_text",
        "gemma4_text",
        "gemma4_unified_text",
    ):
        got = "None; leave it out, or say full_attention of every layer"
    elif family in ("qwen2", "qwen3", "qwen3_moe", "smollm3") and not used:
        got = "use_sliding_window false; fetch it again"
    else:
        got = "no such number; fetch it again"
    message = rf"sliding_window: expected a number, .*, got {got}"
    if family == "granitemoehybrid":
        message = "layer_types: expected mamba, linear_attention, attention, full_attention of each layer, got 'slid"
    if family == "nemotron_h":
        message = "layers_block_type: expected mamba, linear_attention, attention, full_attention, moe, mlp of each"
    if family in (
        "lfm2",
        "lfm2_moe",
        "qwen3_5_text",
        "qwen3_5_moe_text",
        "qwen3_next",
    ):  # whose layers have other mixers
        message = "layer_types: expected full_attention or "
    with pytest.raises(ConfigError, match=rf"config\.json: {message}"):
        huggingface.model_fields(config | {"use_sliding_window": used})


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("exists", [False, True])
def test_files_of_a_run_whose_originals_are_gone(tmp_path, monkeypatch, exists, is_kept):
    """The run's copy is read then; a chat template's is read in any case, since the original may have changed."""
    monkeypatch.setenv("HOME", str(tmp_path))
    kept = sources.kept_in(tmp_path / "run")
    kept.mkdir(parents=True)
    for name in ("tokenizer.json", "chat_template.jinja") if is_kept else ():
        (kept / name).write_text("{}")
    if exists:
        (tmp_path / "own").mkdir()
    c = default_config()
    for own in (str(tmp_path / "own"), "~/own"):
        c.update({"tokenizer": own, "chat_template": own})
        assert sources.tokenizer_of(c, tmp_path / "run") == (str(kept) if is_kept and not exists else own)
        assert sources.template_of(c, tmp_path / "run") == (str(kept / "chat_template.jinja") if is_kept else own)
    c.update({"tokenizer": "bytes", "chat_template": ""})
    assert sources.tokenizer_of(c, tmp_path / "run") == "bytes" and sources.template_of(c, tmp_path / "run") == ""


@pytest.mark.parametrize("has_tokenizer", [False, True])
@pytest.mark.parametrize("is_gone", [False, True])
def test_the_tokenizer_of_a_model_that_may_be_gone(tmp_path, is_gone, has_tokenizer):
    """None set: the model's own, or the run's copy of it. One that is gone is replaced only with the model gone."""
    model, run = tmp_path / "model", tmp_path / "run"
    folder = sources.kept_in(run) if is_gone else model
    folder.mkdir(parents=True)
    if not is_gone:  # the run's copy is of the model as it was
        sources.kept_in(run).mkdir(parents=True)
        (sources.kept_in(run) / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 32}))
        (sources.kept_in(run) / sources.SOURCE).write_text(json.dumps({"model_path": str(model)}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 64}))
    (folder / missing.SOURCE).write_text(json.dumps({"model_path": str(model)}))
    if has_tokenizer:
        (folder / "tokenizer.json").write_text("{}")
    (tmp_path / "other").mkdir()
    c = default_config()
    for tokenizer, replaced in (("bytes", True), (str(tmp_path / "gone"), is_gone), (str(tmp_path / "other"), False)):
        c.update({"model_path": str(model), "output_dir": str(run), "tokenizer": tokenizer})
        found = sources.resolved(c)
        assert found.model.hidden_size == 64 and c.model.hidden_size != 64
        assert found.tokenizer == (str(folder) if replaced and has_tokenizer else tokenizer), tokenizer


def _kept(run: Path, model_path: str, **config: Any) -> Path:
    """A run's copy of the small files of a Llama."""
    kept = sources.kept_in(run)
    kept.mkdir(parents=True)
    (kept / sources.SOURCE).write_text(json.dumps({"model_path": model_path}))
    (kept / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    return kept


def test_a_head_that_a_run_untied_is_untied_in_its_copy(tmp_path):
    """As the original is gone, the settings are those of the copy, which says so already."""
    _kept(tmp_path / "run", str(tmp_path / "gone"), tie_word_embeddings=False)
    c = default_config()
    c.update({"model_path": str(tmp_path / "gone"), "output_dir": str(tmp_path / "run"), "untied_head": True})
    assert sources.resolved(c).model.tie_word_embeddings is False


def test_names_of_an_image_text_model_that_is_gone(tmp_path):
    """The copy's config.json is the language model's, and another file says that it was part of a model."""
    kept = _kept(tmp_path / "run", str(tmp_path / "model"))
    c = default_config()
    assert sources.naming(c) == Naming()
    c.update({"model_path": str(tmp_path / "model"), "output_dir": str(tmp_path / "run")})
    assert not sources.naming(c).in_whole
    (kept / sources.WHOLE).write_text(json.dumps(GEMMA_IMAGES))
    assert sources.naming(c).in_whole
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps({"model_type": "llama"}))
    assert not sources.naming(c).in_whole  # it is there again
    c.model_path = str(tmp_path / "x.gguf")
    assert sources.naming(c) == Naming()


@pytest.mark.parametrize(
    "said, labels",
    [
        ({}, 2),  # transformers' default, of which it writes no names
        ({"num_labels": 5}, 5),
        ({"id2label": {"0": "a", "1": "b", "2": "c"}}, 3),
        ({"architectures": ["LlamaForCausalLM"], "num_labels": 5}, 0),
        ({"architectures": None}, 0),
    ],
)
def test_the_labels_of_a_classifier(said, labels):
    assert huggingface.labels_of({"architectures": ["LlamaForSequenceClassification"]} | said) == labels


def test_a_scorer_of_a_family_that_nobody_knows_is_refused_by_its_name(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    c = default_config()
    c.update({"model_path": str(tmp_path), "objective": "reward"})
    with pytest.raises(ConfigError, match=r"^model_path: expected model_type llama, .*, got 'gpt2'"):
        sources.resolved(c)


@pytest.mark.parametrize("said, length", [(512, 512), (0, None), (None, None), ("512", None), (-1, None)])
def test_the_length_of_a_model(tmp_path, said, length):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": said}))
    assert sources.length_of(tmp_path) == length


@pytest.mark.parametrize(
    "changes, length",
    [
        ({}, 512),
        ({"sequence_len": 1024}, 1024),
        ({"from_scratch": True}, 64),
        ({"model_path": "other"}, 64),
        ({"model_path": ""}, 64),
    ],
)
def test_the_length_of_a_run_is_that_of_the_model_that_it_starts_from(tmp_path, changes, length):
    _kept(tmp_path, "model", max_position_embeddings=512)
    c = default_config()
    c.update({"model_path": "model", "sequence_len": 64} | changes)
    assert sources.length_of_run(c, tmp_path) == length


@pytest.mark.parametrize(
    "said, dtype",
    [
        ({"dtype": "float32", "torch_dtype": "bfloat16"}, "float32"),  # the newer key
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "bfloat16"),
        ({}, "float32"),
    ],
)
def test_the_dtype_of_a_model_in_use(tmp_path, said, dtype):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | said))
    found = sources.for_inference(default_config(), tmp_path, "bytes")
    assert (found.model_dtype, found.tokenizer) == (dtype, "bytes")


@pytest.mark.parametrize(
    "config, layers",
    [
        ({"model_type": "glm4_moe", "num_nextn_predict_layers": 1}, [2]),
        ({"model_type": "glm4_moe", "num_nextn_predict_layers": 2}, [2, 3]),
        ({"model_type": "glm4_moe", "num_nextn_predict_layers": None}, []),
        ({"model_type": "llama"}, []),
        ({"model_type": "of nobody"}, []),
    ],
)
def test_layers_behind_the_last_are_no_part_of_a_model_that_says_so(config, layers):
    found = [
        l for l in range(5) if is_no_part(f"model.layers.{l}.mlp.up_proj.weight", {"num_hidden_layers": 2} | config)
    ]
    assert found == layers and not is_no_part("model.norm.weight", config)


def test_the_scale_of_scores_is_that_of_a_head_unless_it_is_said():
    h = default_config().model.hidden_size // default_config().model.num_attention_heads
    assert config_json.normal({})["query_pre_attn_scalar"] == h
    assert config_json.normal({"query_pre_attn_scalar": h + 1.0})["query_pre_attn_scalar"] == h + 1


def test_models_with_experts_in_all_layers_have_one_width():
    """Whichever of the two keys has it; with dense layers before them each key has its own."""
    experts = {"num_experts": 4, "intermediate_size": 64, "moe_intermediate_size": 0}
    assert config_json.normal(experts) == config_json.normal(experts | {"moe_intermediate_size": 64})
    narrow = config_json.normal(experts | {"moe_intermediate_size": 32})
    assert narrow["intermediate_size"] == narrow["moe_intermediate_size"] == 32
    for other in ({"first_k_dense_replace": 1}, {"experts_beside_mlp": True}, {"num_experts": 0}):
        both = config_json.normal(experts | {"moe_intermediate_size": 32} | other)
        assert (both["intermediate_size"], both["moe_intermediate_size"]) == (64, 32)


OTHERWISE = {  # not what the class has, and what comes to the same or is not read
    **{(name, "sliding_window"): 4096 for name in ("qwen2", "qwen3", "qwen3_moe")},  # null if use_sliding_window is off
    **{(name, "router_aux_loss_coef"): 0.01 for name in ("qwen3_moe", "mixtral", "gpt_oss", "granitemoe")},
    ("ministral3", "rope_theta"): 10000.0,  # the one of rope_parameters counts
    ("granitemoehybrid", "position_embedding_type"): "nope",
    ("granitemoehybrid", "mamba_d_head"): "auto",
    ("granitemoehybrid", "time_step_limit"): [0.0, {"__float__": "Infinity"}],
    ("nemotron_h", "time_step_limit"): [0.0, {"__float__": "Infinity"}],
    ("gemma4_text", "per_layer_config"): (),
    ("gemma4_unified_text", "per_layer_config"): (),
}


def test_keys_that_a_config_leaves_out_are_those_of_transformers():
    """fixtures/make_family_defaults.py has them of its classes. Where we have None, the value follows from others."""
    stored = json.loads((Path(__file__).parent / "fixtures" / "family_defaults.json").read_text())
    assert stored.keys() == FAMILIES.keys() and sum(map(len, stored.values())) > 540
    different = {}
    for name, family in FAMILIES.items():
        assert stored[name].keys() <= family.defaults.keys()
        for key, theirs in stored[name].items():
            ours = family.defaults[key]
            same = theirs.items() >= ours.items() if isinstance(ours, dict) else ours in (None, theirs)
            different |= {} if same else {(name, key): ours}
    assert different == OTHERWISE


def test_architectures_that_rotate_neighbouring_channels():
    """LLAMA_ROPE_TYPE_NORM of llama.cpp; deepseek2 is one, too, whose rows its own transform brings into order.

    A file that is written and read by one table cannot tell.
    """
    all_formats = {name: (family.gguf, *family.further_gguf) for name, family in FAMILIES.items()}
    formats = [(name, form) for name, of_family in all_formats.items() for form in of_family if form]
    found = {form.architecture or name for name, form in formats if form.neighbours}
    assert found == {*"llama mistral3 smollm3 granite granitemoe granitehybrid muse-glimmer".split()}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rotary_embedding_that_a_config_leaves_out_is_written_as_that_of_its_class(family):
    """transformers takes its class's; a file with `rope_theta` alone would have another one once that was joined."""
    source = {"model_type": family} | LEAST.get(family, {})
    for given in (source, source | {"rope_theta": 5e5}):
        out = config_json.completed(given, "bfloat16")
        assert model_fields(out) == model_fields(given)
        of_class = FAMILIES[family].defaults.get("rope_parameters", {})
        assert out.get("rope_parameters", of_class).items() >= of_class.items()


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
GIVEN = {"model_type": "llama", "rope_theta": 1e4, "max_position_embeddings": 256}


@pytest.mark.parametrize(
    "rope, magnitude",
    [
        ({}, 0.0),
        ({"mscale": 1.0}, 0.0),
        ({"mscale_all_dim": 1.0}, 0.0),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"mscale": 1.0, "mscale_all_dim": 0.5}, (0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1)),
        ({"mscale": 1.0, "mscale_all_dim": 0.5, "attention_factor": 1.5}, 1.5),
        ({"attention_factor": 0.1 * math.log(4) + 1}, 0.0),  # which the factor implies
        ({"factor": None, "mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),  # of the lengths, 256 / 64
    ],
)
def test_the_magnitude_of_yarn(rope, magnitude):
    """As `_compute_yarn_parameters` of transformers has it; 0: what the factor implies."""
    fields = rope_keys.rope_fields(GIVEN, YARN | rope)
    assert fields["rope_attention_factor"] == pytest.approx(magnitude) and fields["rope_factor"] == 4


def test_yarn_without_a_factor():
    given = GIVEN | {"max_position_embeddings": None}
    with pytest.raises(ConfigError, match=r"rope_type yarn: expected .*'factor'"):
        rope_keys.rope_fields(given, YARN | {"factor": None, "mscale": 1.0, "mscale_all_dim": 1.0})


def test_modules_of_experts():
    """Those of transformers 5, by which PEFT names adapters; files may have other names (Mixtral)."""
    found = {name: family.expert_files.module for name, family in FAMILIES.items()}
    assert {name: module for name, module in found.items() if module != "mlp.experts"} == {
        "gemma4_text": "experts",
        "granitemoe": "block_sparse_moe.experts",
        "granitemoehybrid": "block_sparse_moe.experts",
        "lfm2_moe": "feed_forward.experts",
        "nemotron_h": "mixer.experts",
    }
