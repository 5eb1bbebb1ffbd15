"""Families against transformers in float64: latent attention, OLMo, Muse-Glimmer, Granite-4, Nemotron-H and Gemma 4.

Their references: `fixtures/make_deepseek_reference.py`, and those of olmo, mamba2 and gemma4.
"""

import dataclasses
import functools
import itertools
import json
import re
from pathlib import Path
from typing import Any

import chex
import gguf as gguf_package
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from commands import convert
from exports import of_each
from small import (
    CONFIG,
    Small,
    needs,
    plain_loss,
    quick_at,
    target_names,
    tokens,
    vectors_drawn,
    worst_relative,
)
from test_config_keys import TOLERANCE, architecture_of, computed, in_files as in_files_of, weight
from test_engine import ORDER_OF_SUMS, engine_gradients
from test_experts import ALL, apart, check_gguf_and_back
from test_qwen3_5 import GROWN, ByLayer, assert_close, in_float64, mean_loss  # noqa: F401

from surojax import ConfigError, default_config
from surojax.assembly.from_config import architecture
from surojax.config.checks import check
from surojax.exchange import adapter_config, config_json, expert_tensors, joined_rows, peft
from surojax.exchange.gguf import GgufTensors
from surojax.exchange.gguf_export import gguf_metadata
from surojax.exchange.gguf_file import open_file, read_numbers
from surojax.exchange.gguf_metadata import metadata_config
from surojax.exchange.huggingface import model_fields, read_config
from surojax.exchange.model_tensors import SINGLE, Weights, check_tensors, describe_source, tensor_name
from surojax.exchange.naming import naming_of, number_of_layers
from surojax.families.registry import FAMILIES
from surojax.models import decoder_model
from surojax.models.channels import in_channels, tokens_in
from surojax.models.decoder_config import LATENT, DecoderConfig
from surojax.models.kinds.latent_attention import LatentAttention
from surojax.models.lora import Lora
from surojax.models.model import Compute, Model
from surojax.models.rotary import RopeScaling
from surojax.optim.adamw import adamw
from surojax.optim.optimizer import TensorContext, scalars
from surojax.placement.layout import Layout
from surojax.verification.settings import NVME_ALL

REFERENCE: dict[str, np.ndarray] = {}
KEYS: dict[str, dict[str, Any]] = {}  # by family
for name in ("deepseek", "olmo", "mamba2", "gemma4"):
    with np.load(Path(__file__).parent / "fixtures" / f"{name}_reference.npz") as arrays:
        REFERENCE |= dict(arrays)
        for file in (file for file in arrays if file.startswith("keys.")):
            said = json.loads(str(arrays[file]))
            KEYS |= {family: said[family] | {"changes": said["changes"]} for family in said if family != "changes"}
CASES = ("glm", "glm_tied", "glm_groups", "v2", "v2_lite", "v2_tied", "v3", "v3_half", "v3_tied")
CASES += ("olmo2", "olmo2_tied", "olmo2_yarn", "olmo3", "olmo3_tied", "olmo3_full", "muse", "muse_tied", "muse_turned")
CASES += ("granite4", "granite4_tied", "granite4_moe", "granite4_moe_tied", "granite4_attention")
CASES += ("nemotron", "nemotron_groups", "nemotron_dense")
CASES += ("gemma4", "gemma4_plain", "gemma4_full", "gemma4_unified", "gemma4_moe", "gemma4_moe_two", "gemma4_moe_all")
CASES += ("gemma4_e", "gemma4_e_untied", "gemma4_e_shared", "gemma4_e_inputs", "gemma4_e_moe")
CASES += ("mistral4", "mistral4_half", "mistral4_tied", "v3_kimi")
NOT_TRAINED = ("gate.e_score_correction_bias", "layer_scalar")


def stored(case: str, what: str) -> dict[str, np.ndarray]:
    """The arrays of a case, by name."""
    start = f"{case}/{what}/"
    return {name.removeprefix(start): x for name, x in REFERENCE.items() if name.startswith(start)}


def given(case: str) -> dict[str, Any]:
    return json.loads(str(REFERENCE[f"{case}/config.json"]))


def config_of(case: str, **changes) -> DecoderConfig:
    c = default_config()
    c.model.update(model_fields(given(case) | changes))
    check(c)
    return architecture(c)


@functools.cache
def model_of(case: str) -> Model:
    return decoder_model.build(config_of(case))


def in_files(case: str, what: str) -> dict[str, np.ndarray]:
    """The arrays of a case by names in files, if these are others than the modules'; experts together."""
    family = FAMILIES[given(case)["model_type"]]
    found = {}
    for name, x in stored(case, what).items():
        for of_module, of_file in family.spellings.items():
            name = name.replace(f".{of_module}", f".{of_file}") if name.endswith(of_module) else name
        if name.startswith("model."):
            name = family.root + name.removeprefix("model.")
        of_no_gate = case.startswith("nemotron") and name.endswith(("experts.up_proj", "experts.down_proj"))
        found[f"{name}.weight" if of_no_gate else name] = x
    return found


def together(case: str, what: str) -> dict[str, np.ndarray]:
    """Tensors of transformers 5's modules under our names: gate and up of experts apart, and each layer's own parts."""
    naming = naming_of(given(case))
    found = {naming.ours(name): x for name, x in in_files(case, what).items()}
    parts: dict[str, Any] = {**expert_tensors.parts_in(found, naming.expert_files)}
    if case.startswith("gemma4_e"):
        parts |= joined_rows.parts_in(found, naming.canonical, number_of_layers(given(case)))
    others = {name: x for name, x in found.items() if not any(name in part.names for part in parts.values())}
    return others | {name: part.tensor([found[part.names[0]]]) for name, part in parts.items()}


def params_of(layers: ByLayer, case: str) -> dict:
    return layers.named({name: x.astype(np.float64) for name, x in together(case, "weight").items()})


def loss_and_gradients(layers: ByLayer, case: str):
    """The function of parameters."""
    tokens, labels = (jnp.asarray(REFERENCE[f"{case}/{name}"]) for name in ("tokens", "labels"))
    return jax.value_and_grad(lambda params: mean_loss(layers.logits(params, tokens), labels))


def check_logits(case: str) -> None:
    layers = ByLayer(model_of(case))
    found = layers.logits(params_of(layers, case), jnp.asarray(REFERENCE[f"{case}/tokens"]))
    assert_close(np.asarray(found), REFERENCE[f"{case}/logits"], "logits")


@pytest.mark.parametrize("case", quick_at([(case,) for case in CASES], 2, 5, 8, 9, 16, 19, 25, 31, 35, 36, 40))
def test_logits_are_those_of_transformers(in_float64, case):  # noqa: F811
    check_logits(case)


@pytest.mark.parametrize("case", quick_at([(case,) for case in CASES], 8, 25, 35))
def test_loss_and_gradients_are_those_of_transformers(in_float64, case):  # noqa: F811
    """Of all parameters; the bias of the choice and a layer's factor have none."""
    layers = ByLayer(model_of(case))
    loss, grads = loss_and_gradients(layers, case)(params_of(layers, case))
    assert_close(np.asarray(loss), REFERENCE[f"{case}/loss"], "loss")
    expected = together(case, "grad")
    names = layers.of_each(lambda param, segment, l: tensor_name(param, segment, l), lambda param: tensor_name(param))
    found = dict(zip(jax.tree.leaves(names), map(np.asarray, jax.tree.leaves(grads)), strict=True))
    others = {name: found.pop(name) for name in [*found] if name.endswith(NOT_TRAINED)}
    has_others = case.startswith(("glm", "v3", "nemotron", "gemma4")) and case != "nemotron_dense"
    assert bool(others) == has_others and not any(x.any() for x in others.values())
    assert found.keys() == expected.keys()
    for name, x in found.items():  # of which the reference has float32
        assert_close(x, expected[name].astype(np.float64), name, 1e-7)


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_steps_of_adamw_are_those_of_torch(in_float64, case):  # noqa: F811
    """Twenty."""
    layers = ByLayer(model_of(case))
    params, both = params_of(layers, case), loss_and_gradients(layers, case)
    optimizer = adamw(lambda done: jnp.float64(1e-3), max_grad_norm=0, m_dtype="float64", v_dtype="float64")
    declared, structure = jax.tree.flatten(layers.of_each(lambda param, segment, l: param, lambda param: param))
    states = [optimizer.rule(param).init(param.shape, 1) for param in declared]

    @jax.jit
    def update(params, grads, states, step):
        context = TensorContext(scalars(optimizer, step, 1.0), Layout(jax.P(), jax.P()), jnp.zeros(2, jnp.uint32))
        arrays = zip(declared, structure.flatten_up_to(params), structure.flatten_up_to(grads), states, strict=True)
        updated = [optimizer.rule(p).apply(x, g, state, context, None)[1:] for p, x, g, state in arrays]
        params, states = zip(*updated, strict=True)
        return structure.unflatten(params), list(states)

    losses = []
    for step in range(len(REFERENCE[f"{case}/losses"])):
        loss, grads = both(params)
        losses.append(loss)
        params, states = update(params, grads, states, jnp.int32(step))
    assert_close(np.asarray(losses), REFERENCE[f"{case}/losses"], "losses of steps", GROWN)


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_answers_are_those_of_transformers(in_float64, case):  # noqa: F811
    """Token by token with a cache of latents; behind padding, which is not seen."""
    layers = ByLayer(model_of(case))
    params = params_of(layers, case)
    prompt, answer = REFERENCE[f"{case}/tokens"][:, :5], REFERENCE[f"{case}/answer"]
    padding, length = 2, 7 + answer.shape[1]
    tokens = np.pad(prompt, ((0, 0), (padding, 0)), constant_values=1)
    caches, first = layers.empty_caches(len(prompt), length), jnp.full(len(prompt), padding)
    found = []
    for start in (0, *range(padding + 5, length - 1)):
        tokens = np.asarray(layers.next_logits(params, tokens, caches, start, first)).argmax(axis=-1)[:, None]
        found.append(tokens)
    np.testing.assert_array_equal(np.concatenate(found, axis=1), answer)


# --- files ------------------------------------------------------------------------------------------------------------


def written(folder: Path, case: str, weights: dict[str, np.ndarray], **changes) -> Path:
    """A model's folder."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(given(case) | changes))
    safetensors.numpy.save_file(weights, folder / SINGLE)
    return folder


@pytest.mark.parametrize("case", quick_at([(case,) for case in CASES], 5, 9, 16, 19, 33, 37))
def test_models_come_out_as_they_went_in(tmp_path, case):
    """To the bit, from files with a tensor for each expert and of all; the same config.json."""
    weights = in_files(case, "weight")
    has_experts = any(".experts." in name for name in weights)
    of_all = has_experts and FAMILIES[given(case)["model_type"]].expert_files.only
    separate = of_each(weights) if case.startswith("nemotron") else weights if of_all else apart(weights)
    if case.startswith("nemotron") and has_experts:  # without a gate they are in no file together
        weights = separate
    for i, files in enumerate((weights, separate)[: 2 if has_experts and not of_all else 1]):
        folder = written(tmp_path / f"in{i}", case, files)
        out = convert.convert(folder, tmp_path / f"out{i}", dtype="float32")
        chex.assert_trees_all_equal(safetensors.numpy.load_file(out / SINGLE), separate)
        assert model_fields(read_config(out)) == model_fields(given(case))
    joined = has_experts and not of_all
    if weights is separate and not of_all:
        with pytest.raises(ConfigError, match=r"^--experts-together: expected experts with a gate, got .*up_proj"):
            convert.convert(folder, tmp_path / "together", dtype="float32", experts_together=True)
        joined = False
    out = convert.convert(folder, tmp_path / "together", dtype="float32", experts_together=joined)
    chex.assert_trees_all_equal(safetensors.numpy.load_file(out / SINGLE), weights)
    fields = model_fields(given(case))
    if case.startswith("muse"):
        with pytest.raises(
            ConfigError, match=r"^export: expected fields of a family that Hugging Face has as a text mo"
        ):
            config_json.made(fields, 64, {})
        return
    made = config_json.made(fields, 64, {})
    own = {name: FAMILIES[name] for name in (given(case)["model_type"],)}
    for config in (made, config_json.made(fields, 64, {}, own)):
        assert config_json.agrees(config, fields)


def test_what_images_pass_through_is_kept(tmp_path):
    """Of Muse-Glimmer, to the bit; and its text model's names are those of the whole."""
    whole = {"model_type": "muse_glimmer", "text_config": given("muse"), "vision_config": {"patch_size": 2}}
    whole |= {"out_hidden_size": 8, "projector_hidden_size": 8, "projector_hidden_act": "gelu", "image_token_id": 1}
    whole |= {"video_token_id": 2, "tie_word_embeddings": False}
    weights = {name.replace("model.", "model.language_model."): x for name, x in stored("muse", "weight").items()}
    parts = ("vision_tower.layers.0.attn.q_proj", "vision_adapter.fc1", "vision_projection")
    others = {f"model.{part}.weight": np.full((2, 2), i, np.float16) for i, part in enumerate(parts)}
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(whole))
    safetensors.numpy.save_file(weights | others, folder / SINGLE)
    check_tensors(Weights(folder), model_of("muse"))
    out = convert.convert(folder, tmp_path / "out", dtype="float32")
    chex.assert_trees_all_equal(safetensors.numpy.load_file(out / SINGLE), weights | others)
    said = json.loads((out / "config.json").read_text())
    assert said["model_type"] == "muse_glimmer" and model_fields(read_config(out)) == model_fields(given("muse"))


def test_kimi_k2_comes_out_as_the_deepseek_v3_that_it_is(tmp_path):
    """Its weights to the bit; transformers, too, computes text models of this model_type as deepseek_v3."""
    weights = {name: x.astype(np.float32) for name, x in apart(in_files("v3_kimi", "weight")).items()}
    classes = {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}
    folder = written(tmp_path / "in", "v3_kimi", weights, model_type="kimi_k2", auto_map=classes)
    assert model_fields(read_config(folder)) == model_fields(given("v3_kimi"))
    out = convert.convert(folder, tmp_path / "out", dtype="float32")
    said = json.loads((out / "config.json").read_text())
    assert (said["model_type"], said["architectures"]) == ("deepseek_v3", ["DeepseekV3ForCausalLM"])
    assert "auto_map" not in said and model_fields(said) == model_fields(given("v3_kimi"))
    chex.assert_trees_all_equal(safetensors.numpy.load_file(out / SINGLE), weights)


def test_layers_that_predict_further_tokens_are_left_aside(tmp_path):
    """Published files have one behind the last layer."""
    further = {"model.layers.3.eh_proj.weight": np.zeros((16, 32), np.float32)}
    for case in ("glm", "v3"):
        folder = written(tmp_path / case, case, stored(case, "weight") | further, num_nextn_predict_layers=1)
        tensors = Weights(folder)
        check_tensors(tensors, model_of(case))
        assert describe_source(tensors).endswith("1 tensors of layers are left aside")


def test_keys_of_layers_that_share_them_are_left_aside(tmp_path):
    """As transformers does: published files have them. They are kept, and a table that lacks is named."""
    weights, layer = in_files("gemma4_e", "weight"), "model.layers.5.self_attn."
    unread = {f"{layer}{name}.weight": np.full((6, 18), i, np.float32) for i, name in enumerate(("k_proj", "v_proj"))}
    unread |= {f"{layer}k_norm.weight": np.ones(6, np.float32)}
    folder = written(tmp_path / "in", "gemma4_e", weights | unread)
    check_tensors(Weights(folder), model_of("gemma4_e"))
    out = convert.convert(folder, tmp_path / "out", dtype="float32")
    chex.assert_trees_all_equal(safetensors.numpy.load_file(out / SINGLE), weights | unread)
    for l, name in ((3, "k_proj"), (5, "o_proj")):
        rest = {x: y for x, y in weights.items() if x != f"model.layers.{l}.self_attn.{name}.weight"}
        with pytest.raises(ConfigError, match=rf"expected model\.layers\.{l}\.self_attn\.{name}\.weight in"):
            check_tensors(Weights(written(tmp_path / name, "gemma4_e", rest)), model_of("gemma4_e"))
    table = "model.embed_tokens_per_layer.weight"
    rest = {x: y for x, y in weights.items() if x != table}
    with pytest.raises(ConfigError, match=rf"expected {re.escape(table)} in .*, got no such tensor"):
        check_tensors(Weights(written(tmp_path / "none", "gemma4_e", rest)), model_of("gemma4_e"))
    rest = weights | {table: weights[table][:, :-1]}
    with pytest.raises(
        ConfigError, match=r"embed_tokens_per_layer.*: expected 7 equal parts along axis 1, got \[40, 27\]"
    ):
        check_tensors(Weights(written(tmp_path / "narrow", "gemma4_e", rest)), model_of("gemma4_e"))


def test_adapters_of_what_all_layers_share_are_refused(tmp_path):
    """PEFT's all-linear has them; those of the layers are read."""
    model, naming = model_of("gemma4_e"), naming_of(given("gemma4_e"))
    lora = Lora(2, 4.0, target_names("per_layer_input_gate,per_layer_projection", config_of("gemma4_e")))
    shapes = peft.tensor_shapes(lora, model)
    assert len(shapes) == 2 * 2 * 7
    config = adapter_config.adapter_config_of(lora, model, "base", naming)
    assert config["target_modules"] == ["per_layer_input_gate", "per_layer_projection"]
    files = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    safetensors.numpy.save_file(files, tmp_path / peft.TENSORS)
    (tmp_path / adapter_config.CONFIG).write_text(json.dumps(config))
    assert set(peft.read_adapter(tmp_path, model, naming).matrices) == {"layer_input.gate", "layer_input.projection"}
    names = [*config["target_modules"], "per_layer_model_projection"]
    (tmp_path / adapter_config.CONFIG).write_text(json.dumps(config | {"target_modules": names}))
    with pytest.raises(ConfigError, match=r"target_modules: expected modules among .*, got 'per_layer_model_projecti"):
        peft.read_adapter(tmp_path, model, naming)


def test_ids_pass_layers_as_they_are():
    ids = jnp.asarray([[0, 1, 255, 256, 257, 65535, 65536, 262143, 2**24 - 1]])
    np.testing.assert_array_equal(tokens_in(in_channels(ids, "bfloat16")), ids)


@pytest.mark.parametrize("case", ("v3", "v2_lite"))
def test_float8_in_blocks_is_read_as_numbers(tmp_path, case):
    """As DeepSeek publishes it: matrices in e4m3 with a scale for each block, the last ones of which are smaller."""
    weights, numbers = apart(stored(case, "weight")), {}
    files: dict[str, np.ndarray] = {}
    for name, x in weights.items():
        numbers[name] = files[name] = x
        if x.ndim == 2 and "_proj" in name:
            codes = x.astype(ml_dtypes.float8_e4m3fn)
            rows, columns = (-(-size // 4) for size in x.shape)
            scales = np.linspace(0.5, 2, rows * columns, dtype=np.float32).reshape(rows, columns)
            files |= {name: codes, f"{name}_scale_inv": scales}
            spread = np.repeat(np.repeat(scales, 4, axis=0), 4, axis=1)[: x.shape[0], : x.shape[1]]
            numbers[name] = codes.astype(np.float32) * spread
    entry = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [4, 4]}
    folder = written(tmp_path / "in", case, files, quantization_config=entry)
    out = convert.convert(folder, tmp_path / "out", dtype="float32")
    chex.assert_trees_all_equal(safetensors.numpy.load_file(out / SINGLE), numbers)


def test_float8_with_one_scale_is_read_as_numbers(tmp_path):
    """As Mistral publishes it, in Mistral 3: of a matrix, and of each expert in a tensor of all; not of inputs."""
    weights, files, numbers = in_files("mistral4", "weight"), {}, {}
    for name, x in weights.items():
        numbers[name] = files[name] = x
        if "_proj" not in name:
            continue
        files[name] = codes = x.astype(ml_dtypes.float8_e4m3fn)
        scale = (
            np.array(0.75, np.float32) if x.ndim == 2 else np.linspace(0.5, 2, len(x), dtype=np.float32)[:, None, None]
        )
        inputs = "activation_scale" if x.ndim == 2 else "_activation_scale"
        files |= {f"{name}_scale_inv": scale, name.removesuffix("weight") + inputs: np.array(3, np.float32)}
        numbers[name] = codes.astype(np.float32) * scale
    entry = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    folder = written(tmp_path / "in", "mistral4", files, quantization_config=entry)
    whole = {"model_type": "mistral3", "text_config": given("mistral4"), "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(whole | {"quantization_config": entry}))
    image = {"vision_tower.ln_pre.weight": np.ones(2, np.float16)}
    published = {f"language_model.{name}": x for name, x in files.items()} | image
    safetensors.numpy.save_file(published, folder / SINGLE)
    name = "model.layers.0.mlp.experts.down_proj.weight"
    assert Weights(folder).format_of(name) == "float8_e4m3fn with one scale"
    out = convert.convert(folder, tmp_path / "out", dtype="float32")
    expected = {name.replace("model.", "model.language_model.", 1): x for name, x in numbers.items()} | image
    chex.assert_trees_all_equal(safetensors.numpy.load_file(out / SINGLE), expected)
    assert model_fields(read_config(out)) == model_fields(given("mistral4"))
    name = "model.layers.1.mlp.experts.gate_up_proj_scale_inv"
    wrong = files | {name: files[name][1:]}
    with pytest.raises(
        ConfigError, match=rf"{name}: expected one scale of each matrix for \[7, 12, 16\], got \[6, 1, "
    ):
        Weights(written(tmp_path / "wrong", "mistral4", wrong, quantization_config=entry))


# --- keys of config.json ----------------------------------------------------------------------------------------------

OF_MUSE = {i: "qk_scale_factor" for i in (11, 12, 13)} | {14: "output_multiplier", 15: "output_multiplier"}
OF_MUSE |= {16: "post_norm_eps", 17: "post_norm_eps"} | dict.fromkeys((*range(18, 25), 27), "layer_rope_theta")
# Changes that transformers computes and that are refused here, by the key that the message names.
REFUSED: dict[str, dict[int, str]] = {
    "nemotron_h": {
        5: "layers_block_type",
        10: "layers_block_type",
        31: "use_bias",
        33: "mlp_bias",
        47: "moe_latent_size",
    }
    | {42: "layer_norm_epsilon", 44: "moe_shared_expert", 49: "mlp_hidden_act", 50: "mlp_hidden_act"}
    | {52: "mamba_hidden_act", 64: "tie_word_embeddings"},
    "granitemoehybrid": {31: "mamba_proj_bias", 37: "time_step_limit", 42: "shared_intermediate_size"},
    "glm4_moe_lite": {
        2: "q_lora_rank",
        5: "n_group",
        9: "topk_method",
        12: "scoring_func",
        15: "moe_layer_freq",
        21: "mlp_layer",
    }
    | {22: "first_k_dense", 27: "rope_mscale_all_dim", 29: "rope_factor", 30: "rope_type linear"},
    "deepseek_v2": {2: "q_lora_rank", 3: "rope_interleave", 5: "n_group", 11: "scoring_func", 15: "moe_layer_freq"}
    | {i: "mlp_layer_types" for i in range(19, 25)}
    | {27: "rope_mscale_all_dim", 29: "rope_factor", 30: "rope_type linear"},
    "mistral4": {2: "q_lora_rank", 4: "n_group", 5: "n_group", 8: "head_dim", 13: "expected original_max_position"}
    | {17: "rope_factor", 21: "rope_type linear", 35: "aux_loss_alpha", 36: "scoring_func", 37: "moe_layer_freq"}
    | {38: "mlp_layer_types"},
    "olmo2": dict.fromkeys((2, 3, 4), "rope_type none: expected") | {9: "clip_qkv", 10: "norm_after"} | OF_MUSE,
    "olmo3": {4: "rope_parameters", 7: "layer_types", 8: "layer_types", 9: "clip_qkv", 10: "norm_after"}
    | OF_MUSE
    | dict.fromkeys((25, 26, 27), "layer_rope_theta"),
    "muse_glimmer_text": {7: "layer_types", 8: "layer_types", 9: "clip_qkv", 10: "norm_after", 12: "qk_scale_factor"}
    | {13: "qk_scale_factor", 15: "output_multiplier", 17: "post_norm_eps"}
    | dict.fromkeys((18, 22, 24, 25), "layer_rope_theta"),
    "gemma4_text": {28: "rope_partial", 33: "rope_factor", 37: "partial_rotary", 39: "rope_type default"}
    | {52: "use_bidirectional", 67: "vocab_size_per_layer_input: expected vocab_size=16 or more"},
    "gemma4_unified_text": {28: "rope_partial", 33: "rope_factor", 37: "partial_rotary", 39: "rope_type default"}
    | {50: "moe", 51: "moe", 52: "use_bidir", 55: "num_kv_shared_layers: expected 0, got 2"}
    | dict.fromkeys((43, *range(56, 69)), "hidden_size_per_layer_input: expected 0"),
    "deepseek_v3": {2: "q_lora_rank", 5: "n_group", 9: "topk_method", 12: "scoring_func", 15: "moe_layer_freq"}
    | {i: "mlp_layer_types" for i in range(19, 25)}
    | {27: "rope_mscale_all_dim", 29: "rope_factor", 30: "rope_type linear"},
}


YARN_OF_V3 = {"type": "yarn", "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}
MISTRALS_ROPE = {"rope_type": "yarn", "type": "yarn", "rope_theta": 10000.0, "factor": 128.0, "beta_fast": 32.0}
MISTRALS_ROPE |= {"beta_slow": 1.0, "original_max_position_embeddings": 8192, "max_position_embeddings": 2**20}
MISTRALS_ROPE |= {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1, "partial_rotary_factor": 0.5}
PUBLISHED: dict[str, dict[str, Any]] = {  # keys of config.json beside those that every family has
    "GLM-4.7-Flash": {"model_type": "glm4_moe_lite", "topk_method": "noaux_tc", "n_group": 1, "topk_group": 1}
    | {"first_k_dense_replace": 1, "num_nextn_predict_layers": 1, "partial_rotary_factor": 1.0, "rope_scaling": None}
    | {"rope_theta": 1000000, "q_lora_rank": 768, "v_head_dim": 256, "routed_scaling_factor": 1.8},
    "DeepSeek-V2-Lite": {"model_type": "deepseek_v2", "topk_method": "greedy", "n_group": 1, "topk_group": 1}
    | {"auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"}, "aux_loss_alpha": 0.001, "seq_aux": True}
    | {"first_k_dense_replace": 1, "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16}
    | {"q_lora_rank": None, "moe_layer_freq": 1, "scoring_func": "softmax", "norm_topk_prob": False}
    | {"num_experts_per_tok": 6, "num_hidden_layers": 27, "rope_theta": 10000}
    | {"rope_scaling": YARN_OF_V3 | {"factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707}},
    "Kimi-K2": {"model_type": "kimi_k2", "topk_method": "noaux_tc", "scoring_func": "sigmoid", "n_group": 1}
    | {"auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "aux_loss_alpha": 0.001, "seq_aux": True}
    | {"topk_group": 1, "ep_size": 1, "moe_layer_freq": 1, "n_routed_experts": 384, "num_attention_heads": 64}
    | {"num_key_value_heads": 64, "first_k_dense_replace": 1, "routed_scaling_factor": 2.827, "rope_theta": 50000.0}
    | {
        "num_nextn_predict_layers": 0,
        "rope_scaling": YARN_OF_V3 | {"beta_fast": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    }
    | {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}},
    "Mistral-Small-4": {
        "model_type": "mistral3",
        "vision_config": {"model_type": "pixtral"},
        "text_config": {"model_type": "mistral4", "head_dim": 128, "qk_head_dim": 128, "max_position_embeddings": 2**20}
        | {"rope_parameters": MISTRALS_ROPE, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0},
        "quantization_config": {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    config = read_config(tmp_path)
    read = architecture_of(config)
    factor = {"GLM-4.7-Flash": 1, "DeepSeek-V2-Lite": 1.5896, "Kimi-K2": 1.8133, "Mistral-Small-4": 2.2058}[name]
    assert LatentAttention(read).scale == pytest.approx(factor * LatentAttention(read).channels ** -0.5, rel=1e-4)
    assert (read.rope_scaling.score_factor, read.rope_scaling.magnitude) == pytest.approx((factor, 1), rel=1e-4)
    completed = config_json.completed(config, "float32")
    assert completed["model_type"] in FAMILIES and "auto_map" not in completed and model_fields(completed)


@pytest.mark.parametrize("family", REFUSED)
def test_keys_that_are_not_computed_are_refused(family):
    """And all that transformers does not compute."""
    config = KEYS[family]["config"]
    for i, (change, result) in enumerate(zip(KEYS[family]["changes"], KEYS[family]["results"], strict=True)):
        if "error" in result or i in REFUSED[family]:
            with pytest.raises(ConfigError, match=REFUSED[family].get(i)):
                architecture_of(config | change)
        else:
            architecture_of(config | change)


@pytest.mark.full
@pytest.mark.parametrize("family", REFUSED)
def test_keys_are_computed_as_by_transformers(tmp_path, family):
    config, logits = KEYS[family]["config"], REFERENCE[f"keys/{family}"]
    seen = set()
    for i, (change, result) in enumerate(zip(KEYS[family]["changes"], KEYS[family]["results"], strict=True)):
        if "error" in result or i in REFUSED[family]:
            continue
        folder = tmp_path / str(i)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config | change))
        tensors = {name: weight(name, tuple(shape)) for name, shape in result["shapes"].items()}
        safetensors.numpy.save_file(in_files_of(family, tensors), folder / SINGLE)
        found, expected = computed(architecture_of(config | change), Weights(folder)), logits[result["row"]]
        assert np.abs(found - expected).max() < TOLERANCE * np.abs(expected).max(), change
        seen.add(expected.tobytes())
    assert len(seen) >= {"olmo2": 4, "olmo3": 6}.get(family, 7)


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"model.kv_lora_rank": 64, "model.layer_types": ""},
            r"^model\.kv_lora_rank: expected 512 with layer_types=''",
        ),
        ({"model.rope_interleave": False, "model.layer_types": ""}, r"^model\.rope_interleave: expected True with"),
        ({"model.rope_mscale_all_dim": 1.0}, r"^model\.rope_mscale_all_dim: expected 0\.0 with rope_scaling='none'"),
        ({"model.sliding_window": 8}, r"^model\.sliding_window: expected 0 with layer_types='latent_attention'"),
        ({"model.qk_norm": True}, r"^model\.qk_norm: expected False with layer_types='latent_attention'"),
        ({"model.qk_rope_head_dim": 5}, r"^model\.qk_rope_head_dim: expected an even number"),
        (
            {"attention": "cudnn", "model.v_head_dim": 64},
            r"and model\.v_head_dim: expected sizes that attention='cudnn'",
        ),
        (
            {"cp_size": 2, "gpus": 2, "cp_method": "ring"},
            r"^cp_method: expected 'ulysses' with latent_attention and cp_size=2, whose latents",
        ),
        ({"cp_size": 2, "gpus": 2, "recipe": "mxfp8"}, r"^recipe: expected 'bf16' with latent_attention and cp_size=2"),
        ({"cp_size": 8, "gpus": 8}, r"^model\.num_attention_heads: expected a multiple of cp_size x tp_size = 8"),
        ({"model.n_group": 3}, r"^model\.n_group: expected a divisor of num_experts=8, got 3; use 1"),
        ({"model.n_group": 2, "model.topk_group": 3}, r"^model\.topk_group: expected at most n_group=2, got 3; use 2"),
        (
            {"model.n_group": 8},
            r"^model\.num_experts_per_tok: expected at most 1, which are in topk_group=1 of n_group=8",
        ),
        (
            {"model.n_group": 8, "model.topk_group": 4, "model.scoring_func": "sigmoid"},
            r"^model\.n_group: expected groups of two experts or more",
        ),
        ({"lora": True, "lora_target_modules": "k_proj"}, r"^lora_target_modules: expected names among q_proj, kv_a_p"),
        (
            {"lora": True, "lora_rank": 513, "lora_target_modules": "kv_b_proj"},
            r"^lora_rank: expected at most 512, the smaller side of self_attn.kv_b_proj",
        ),
    ],
)
def test_settings_that_do_not_go_together(changes, message):
    c = default_config()
    c.model.update({"layer_types": LATENT, "num_experts": 8, "num_experts_per_tok": 2})
    c.update_from_flattened_dict(changes)
    with pytest.raises(ConfigError, match=message):
        check(c)


# --- training ---------------------------------------------------------------------------------------------------------

SMALL = dataclasses.replace(
    CONFIG,
    head_dim=0,
    layer_types=LATENT,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=5,
    rope_scaling=RopeScaling("yarn", factor=8.0, original_max_position_embeddings=8, mscale_all_dim=1.0),
)
WITH_EXPERTS = dataclasses.replace(
    SMALL,
    q_lora_rank=0,
    rope_interleave=False,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    first_k_dense_replace=1,
    n_group=4,
    topk_group=2,
    n_shared_experts=1,
    scoring_func="sigmoid",
    norm_topk_prob=True,
)


OLMO = dataclasses.replace(
    CONFIG,
    num_hidden_layers=4,
    input_norms=False,
    sandwich_norms=True,
    qk_norm_whole=True,
    sliding_window=5,
    sliding_window_pattern=2,
    rope_local_base_freq=100.0,
    rope_scaling=RopeScaling("yarn", factor=8.0, original_max_position_embeddings=8),
)
GEMMA4 = dataclasses.replace(
    CONFIG,
    num_hidden_layers=5,
    num_key_value_heads=4,
    layer_types="sliding_attention,global_attention",
    sliding_window=5,
    global_head_dim=12,
    num_global_key_value_heads=2,
    attention_k_eq_v=True,
    rope_scaling=RopeScaling("proportional", partial_rotary_factor=0.5),
    rope_local_base_freq=100.0,
    sandwich_norms=True,
    qk_norm=True,
    v_norm_weightless=True,
    layer_scalar=True,
    scale_embedding=True,
    query_pre_attn_scalar=1.0,
    final_logit_softcapping=1.0,
    hidden_act="gelu_pytorch_tanh",
    tie_word_embeddings=True,
)
GEMMA4_EXPERTS = dataclasses.replace(
    GEMMA4,
    experts_beside_mlp=True,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    norm_topk_prob=True,
)
GEMMA4_E = dataclasses.replace(
    GEMMA4,
    num_hidden_layers=4,
    attention_k_eq_v=False,
    num_kv_shared_layers=2,
    use_double_wide_mlp=True,
    hidden_size_per_layer_input=16,
    rms_norm_eps=1e-2,
    vocab_size_per_layer_input=80,
)
UNTIED_GEMMA4 = dataclasses.replace(GEMMA4_EXPERTS, tie_word_embeddings=False)
UNTIED_GEMMA4_E = dataclasses.replace(GEMMA4_E, tie_word_embeddings=False)
STAGES_OF_GEMMA4 = dataclasses.replace(GEMMA4, num_hidden_layers=4)
INPUTS_OF_GEMMA4 = dataclasses.replace(STAGES_OF_GEMMA4, hidden_size_per_layer_input=16)
MUSE = dataclasses.replace(
    CONFIG,
    num_hidden_layers=5,
    sliding_window=5,
    sliding_window_pattern=4,
    no_rope_layer_interval=4,
    layers_from_last=True,
    sandwich_norms=True,
    post_norm_eps=0.1,
    norm_plus_one=True,
    plain_final_norm=True,
    qk_norm_weightless=True,
    attn_gate_proj=True,
    embedding_norm=True,
    query_pre_attn_scalar=0.5,
    logits_scaling=2.0,
    final_logit_softcapping=1.0,
)
GRANITE_4 = dataclasses.replace(
    CONFIG,
    num_hidden_layers=4,
    layer_types="mamba2,full_attention",
    mamba_n_heads=8,
    mamba_d_head=6,
    mamba_d_state=5,
    mamba_n_groups=4,
    mamba_dt_min=0.05,
    mlp_joined=True,
    no_rope_layer_interval=1,
    residual_multiplier=0.5,
)
ONE_GROUP, TWO_GROUPS = (dataclasses.replace(GRANITE_4, mamba_n_groups=groups) for groups in (1, 2))
GRANITE_4_EXPERTS = dataclasses.replace(
    GRANITE_4,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    moe_shared_intermediate_size=24,
    norm_topk_prob=True,
)
NEMOTRON = dataclasses.replace(
    GRANITE_4_EXPERTS,
    num_hidden_layers=6,
    layer_types="mamba2,experts,full_attention,mlp,mamba2,experts",
    one_purpose=True,
    hidden_act="relu2",
    scoring_func="sigmoid",
    mlp_joined=False,
    residual_multiplier=1.0,
)

# Both stages have a layer of each purpose, in another order.
STAGES_OF_NEMOTRON = dataclasses.replace(
    NEMOTRON,
    num_hidden_layers=8,
    layer_types="mamba2,experts,full_attention,mlp,experts,mamba2,mlp,full_attention",
)

SHARED_ALONE = dataclasses.replace(
    GEMMA4_E, num_hidden_layers=2, layer_types="global_attention", num_kv_shared_layers=1, use_double_wide_mlp=False
)
MISTRAL4 = dataclasses.replace(
    WITH_EXPERTS,
    first_k_dense_replace=0,
    n_group=1,
    topk_group=1,
    scoring_func="softmax",
    rope_scaling=RopeScaling(
        "yarn", factor=8.0, original_max_position_embeddings=4, mscale_all_dim=1.0, llama_4_scaling_beta=0.5
    ),
)


@needs(8)
@pytest.mark.parametrize(
    "config, devices, placed",
    quick_at(
        [
            (SMALL, 4, {"zero_level": 3, "tp_size": 2, **ALL}),
            (SMALL, 2, {"cp_size": 2}),
            (SMALL, 8, {"zero_level": 3, "cp_size": 2, "tp_size": 2, **ALL}),
            (SMALL, 1, {"sequence_chunks": 2}),
            (SMALL, 4, {"sequence_chunks": 2, "cp_size": 2, "tp_size": 2}),
            (dataclasses.replace(SMALL, num_hidden_layers=2), 4, {"pp_size": 2, "zero_level": 1}),
            (SMALL, 4, {"zero_level": 2, "replicate": 2, "resident_layers": 1, "offload_weights": True}),
            (WITH_EXPERTS, 1, ALL),
            (WITH_EXPERTS, 4, {"zero_level": 3, "ep_size": 2, "tp_size": 2}),
            (WITH_EXPERTS, 4, {"zero_level": 3, "cp_size": 2, **ALL}),
            (OLMO, 8, {"zero_level": 3, "cp_size": 2, "tp_size": 2, **ALL}),
            (OLMO, 1, {"sequence_chunks": 2}),
            (OLMO, 2, {"pp_size": 2}),
            (MUSE, 8, {"zero_level": 3, "cp_size": 2, "tp_size": 2, "shard_outer": True, **ALL}),
            (MUSE, 1, {"sequence_chunks": 2}),
            (MUSE, 4, {"tp_size": 4}),
            (dataclasses.replace(MUSE, num_hidden_layers=4), 2, {"pp_size": 2}),
            (GRANITE_4, 8, {"zero_level": 3, "cp_size": 2, "tp_size": 2, **ALL}),
            (GRANITE_4, 1, {"sequence_chunks": 2}),
            (GRANITE_4, 2, {"pp_size": 2}),
            (ONE_GROUP, 8, {"zero_level": 3, "cp_size": 2, "tp_size": 2, **ALL}),
            (TWO_GROUPS, 4, {"tp_size": 4}),
            (GRANITE_4_EXPERTS, 4, {"zero_level": 3, "ep_size": 2, "tp_size": 2}),
            (NEMOTRON, 8, {"zero_level": 3, "cp_size": 2, "tp_size": 2, **ALL}),
            (NEMOTRON, 1, {"sequence_chunks": 2}),
            (NEMOTRON, 4, {"zero_level": 3, "ep_size": 2, "tp_size": 2}),
            (STAGES_OF_NEMOTRON, 4, {"pp_size": 2, "zero_level": 1, "tp_size": 2}),
            (GEMMA4, 8, {"zero_level": 3, "cp_size": 2, "tp_size": 2, "shard_outer": True, **ALL}),
            (GEMMA4, 4, {"cp_size": 2, "tp_size": 2, "cp_method": "ring"}),
            (GEMMA4, 1, {"sequence_chunks": 2}),
            (GEMMA4, 4, {"sequence_chunks": 2, "cp_size": 2, "tp_size": 2}),
            (GEMMA4, 4, {"zero_level": 2, "replicate": 2, "resident_layers": 3, "offload_weights": True}),
            (GEMMA4_EXPERTS, 4, {"zero_level": 3, "tp_size": 2, **ALL}),
            (GEMMA4_EXPERTS, 2, {"zero_level": 3, "ep_size": 2}),
            (STAGES_OF_GEMMA4, 4, {"pp_size": 2, "zero_level": 1, "tp_size": 2}),
            (GEMMA4_E, 4, {"zero_level": 3, "cp_size": 2, "shard_outer": True, **ALL}),
            (GEMMA4_E, 2, {"cp_size": 2, "cp_method": "ring"}),
            (GEMMA4_E, 2, {"sequence_chunks": 2, "cp_size": 2}),
            (INPUTS_OF_GEMMA4, 2, {"pp_size": 2}),
            (MISTRAL4, 8, {"zero_level": 3, "cp_size": 2, "tp_size": 2, **ALL}),
            (MISTRAL4, 2, {"sequence_chunks": 2, "cp_size": 2}),
            (dataclasses.replace(MISTRAL4, num_hidden_layers=2), 2, {"pp_size": 2}),
            (SHARED_ALONE, 1, ALL),
        ],
        1,
        42,
    ),
)
def test_gradients_equal_reverse_mode(config, devices, placed):
    """Whatever the placement: the heads divided over tp, the latents gathered over cp or carried between chunks."""
    how = {name: placed[name] for name in ("sequence_chunks", "cp_method") if name in placed}
    placed = {name: value for name, value in placed.items() if name not in how}
    model = decoder_model.build(config, Compute(**how))
    small = Small(devices, model=model, microbatches_per_fetch=3, **placed)
    with vectors_drawn():
        params = model.init(0)
    batch = tokens(3, 8, 16)
    expected = jax.jit(jax.value_and_grad(plain_loss(config)))(params, *batch)
    # Gemma 4's own rounding: 5e-6 as users compile, 1.5e-5 on one processor without LLVM's optimisations.
    assert worst_relative(engine_gradients(small, batch), expected) < 2 * ORDER_OF_SUMS


@needs(4)
@pytest.mark.full
@pytest.mark.parametrize("sizes", [{"cp_size": 2, "tp_size": 2}, {"tp_size": 4}])
def test_adapters_have_one_gradient_however_heads_are_divided(sizes):
    """Also that of kv_b_proj, of which a GPU of cp multiplies its own heads' rows."""
    adapted = dataclasses.replace(SMALL, lora=Lora(2, 4.0, target_names("all-linear", SMALL)))
    model, batch = decoder_model.build(adapted), tokens(3, 8, 16)
    assert "latent.wkv_b" in adapted.lora.targets
    alone, divided = Small(model=model), Small(4, model=model, **sizes)
    assert worst_relative(engine_gradients(divided, batch), engine_gradients(alone, batch)) < ORDER_OF_SUMS


@pytest.mark.full
@pytest.mark.parametrize(
    "config", [WITH_EXPERTS, OLMO, MUSE, GRANITE_4, NEMOTRON, UNTIED_GEMMA4, UNTIED_GEMMA4_E, MISTRAL4]
)
def test_trains_alike_under_every_placement(tmp_path, config):
    """To the bit: with everything offloaded, updated under the next forward pass, and in files."""
    model = decoder_model.build(config)
    batches = [tokens(2, 8, 16, seed=i) for i in range(3)]
    losses = Small(model=model).train(batches)
    assert len(set(losses)) == len(losses)
    for number, late in enumerate((False, True)):
        assert Small(model=model, microbatches_per_fetch=2, overlap_update=late, **ALL).train(batches) == losses
        folder = tmp_path / f"{number}"
        folder.mkdir()
        in_files = Small(model=model, batch=(2, 8, 16), nvme_path=str(folder), overlap_update=late, **NVME_ALL)
        assert in_files.train(batches) == losses


@pytest.mark.full
@pytest.mark.parametrize(
    "case", ("glm", "v2_lite", "olmo3", "muse", "granite4", "nemotron", "gemma4", "gemma4_e", "mistral4")
)
def test_documents_in_a_row_are_computed_as_alone(in_float64, case):  # noqa: F811
    """Also a document of one token."""
    layers = ByLayer(model_of(case))
    params, ids = params_of(layers, case), REFERENCE[f"{case}/tokens"][:1]
    borders = [0, 1, 12, ids.shape[1]]
    starts = np.repeat(borders[:-1], np.diff(borders))[None].astype(np.int32)
    packed = np.asarray(layers.logits(params, ids, starts))
    for start, stop in itertools.pairwise(borders):
        alone = np.zeros_like(ids)  # what follows a document is not seen
        alone[:, : stop - start] = ids[:, start:stop]
        expected = np.asarray(layers.logits(params, alone, np.zeros_like(starts)))[:, : stop - start]
        assert_close(packed[:, start:stop], expected, f"document from {start}")


def test_backward_pass_reads_latents_in_place_of_keys_and_values():
    """Of a token and a head n + v numbers less; the expanded keys and values are in no residual."""
    model = decoder_model.build(SMALL)
    (segment,) = model.segments
    weights = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), segment.params)
    x = jax.ShapeDtypeStruct((1, 16, SMALL.hidden_size), jnp.float32)
    saved = jax.tree.leaves(jax.eval_shape(lambda w, x: segment.block_forward(w, x)[1], weights, x))
    found = {x.shape for x in saved}
    assert (1, 16, SMALL.kv_lora_rank) in found and (1, 16, 4, 10) in found  # latents, queries
    assert not {(1, 16, 4, 11), (1, 16, 44), (1, 16, 4, 5)} & found


# --- GGUF -------------------------------------------------------------------------------------------------------------

MSCALES = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 16}
IN_GGUF = {  # what a case's config.json has in place of what no file says
    "v3": {"rope_parameters": MSCALES | {"mscale": 0.7, "mscale_all_dim": 0.7}},
    "v3_tied": {"rms_norm_eps": 1e-6},
    "glm": {"attention_bias": False},
    "glm_groups": {"rope_parameters": MSCALES | {"mscale": 1.0, "mscale_all_dim": 1.0}, "rms_norm_eps": 1e-6},
    "v2": {"topk_method": "greedy", "n_group": None, "topk_group": None},
    "v2_lite": {"attention_bias": False},
    "mistral4": {},
}
NOT_IN_GGUF = {
    "v3": ({}, "rope_attention_factor="),  # mscale is another than mscale_all_dim
    "v3_half": ({"attention_bias": False}, "rope_interleave=False"),
    "v3_tied": ({}, "expected at most 1e-05, which llama.cpp adds in the norms of latents too"),
    "glm": ({}, "attention_bias=True"),
    "v2": (
        {},
        "expected 1 for routers with softmax, whose groups llama.cpp and transformers choose differently, got 3",
    ),
    "muse": ({"layer_rope_theta": [1e4] * 5}, "no_rope_layer_interval=0"),
    "muse_tied": ({}, "post_norm_eps=0.1"),
    "mistral4_half": ({"rope_interleave": True, "attention_bias": False}, "rope_attention_factor="),
    "mistral4_tied": (
        {"rms_norm_eps": 1e-6},
        "expected rope.scaling.type yarn and expert_gating_func 1 (softmax) in files of mistral4, got",
    ),
    "v3_kimi": ({}, "rope_beta_fast=1.0"),  # which llama.cpp reads of no file of deepseek2
    "v2_tied": ({}, "positions stretched by yarn, got 0, which llama.cpp and transformers compute differently"),
}


def folder_for_gguf(folder: Path, case: str, changes: dict[str, Any]) -> Path:
    """A case's folder with float32 weights, without biases if a change takes them away."""
    folder.mkdir()
    said = given(case) | changes
    (folder / "config.json").write_text(json.dumps(said))
    tensors = {name: x.astype(np.float32) for name, x in together(case, "weight").items()}
    kept = {
        name: x for name, x in tensors.items() if said["attention_bias"] or "_proj" not in name or "bias" not in name
    }
    safetensors.numpy.save_file(kept, folder / SINGLE)
    return folder


@pytest.mark.parametrize("case", quick_at([(case,) for case in IN_GGUF], 0, 4))
def test_models_go_to_gguf_and_back(tmp_path, case):
    """In llama.cpp's shapes, worked out head by head: keys are expanded by a transposed matrix, values by another."""
    out = check_gguf_and_back(folder_for_gguf(tmp_path / "in", case, IN_GGUF[case]), tmp_path / "out.gguf")
    contents, config = open_file(out), given(case) | IN_GGUF[case]
    n, v, r, latent = (config[name] for name in ("qk_nope_head_dim", "v_head_dim", "qk_rope_head_dim", "kv_lora_rank"))
    last = config["num_hidden_layers"] - 1
    ours = stored(case, "weight")[f"model.layers.{last}.self_attn.kv_b_proj.weight"]
    keys, values = (read_numbers(contents, f"blk.{last}.attn_{name}_b.weight") for name in "kv")
    for head in range(config["num_attention_heads"]):
        rows = ours[head * (n + v) : (head + 1) * (n + v)].astype(np.float32)
        np.testing.assert_array_equal(keys[head], rows[:n].T)
        np.testing.assert_array_equal(values[head], rows[n:])
    architecture = "mistral4" if case == "mistral4" else "deepseek2"
    sizes = {key.removeprefix(f"{architecture}."): value for key, value in contents.metadata.items()}
    names = ("key_length", "value_length", "key_length_mla", "value_length_mla", "head_count_kv", "kv_lora_rank")
    assert [sizes[f"attention.{name}"] for name in names] == [latent + r, latent, n + r, v, 1, latent]
    assert sizes["rope.dimension_count"] == r and sizes["expert_gating_func"] == (
        1 if case.startswith(("v2", "mistral4")) else 2
    )
    growth = [sizes.get(f"attention.temperature_{name}") for name in ("scale", "length")]
    assert growth == ([pytest.approx(0.7), 10] if case == "mistral4" else [None, None])
    assert sizes.get("attention.q_lora_rank") == config["q_lora_rank"]
    stretch = (config["rope_parameters"] or {}).get("mscale_all_dim")
    assert sizes.get("rope.scaling.yarn_log_multiplier") == (stretch and pytest.approx(0.1 * stretch))


def test_files_with_the_expansion_whole_are_read(tmp_path):
    """As llama.cpp's converter wrote them before 2025-04: a head's real sizes, and as many key heads as heads."""
    out = check_gguf_and_back(folder_for_gguf(tmp_path / "in", "v2_lite", IN_GGUF["v2_lite"]), tmp_path / "out.gguf")
    new, config = GgufTensors(out), given("v2_lite")
    h, heads = config["qk_nope_head_dim"] + config["qk_rope_head_dim"], config["num_attention_heads"]

    def rewritten(path: Path, changes: dict[str, Any], parts: bool = False, whole: bool = False) -> Path:
        reader, writer = gguf_package.GGUFReader(out), gguf_package.GGUFWriter(path, "deepseek2")
        for key, field in reader.fields.items():
            value = changes.get(key.removeprefix("deepseek2.attention."), field.contents())
            if not key.startswith("GGUF.") and key != "general.architecture" and value is not None:
                kinds = [field.types[0], *field.types[1:]]
                writer.add_key_value(key, value, kinds[0], kinds[-1] if len(kinds) > 1 else None)
        for tensor in reader.tensors:
            if parts or not tensor.name.endswith(("attn_k_b.weight", "attn_v_b.weight")):
                writer.add_tensor(tensor.name, tensor.data)
        for l in range(config["num_hidden_layers"] if whole else 0):
            name = f"model.layers.{l}.self_attn.kv_b_proj.weight"
            writer.add_tensor(f"blk.{l}.attn_kv_b.weight", new.read(name))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    before = {"key_length": h, "value_length": config["v_head_dim"], "head_count_kv": heads}
    before |= {"key_length_mla": None, "value_length_mla": None}
    old = GgufTensors(rewritten(tmp_path / "old.gguf", before, whole=True))
    chex.assert_trees_all_equal({x: old.read(x) for x in old.names}, {x: new.read(x) for x in new.names})
    assert model_fields(metadata_config(open_file(old.path))) == model_fields(read_config(tmp_path / "in"))
    with pytest.raises(ConfigError, match=r"kv_b_proj\.weight whole or in parts, got both; fetch the file again$"):
        GgufTensors(rewritten(tmp_path / "both.gguf", {}, parts=True, whole=True))
    with pytest.raises(
        ConfigError, match=r"head_count_kv: expected \(.*, 1\) .*, got \(.*, 2\); fetch the file again$"
    ):
        GgufTensors(rewritten(tmp_path / "heads.gguf", {"head_count_kv": 2}, parts=True))
    with pytest.raises(
        ConfigError, match=r"blk\.0\.attn_k_b\.weight: expected shape .*, got .*; fetch the file again$"
    ):
        length = open_file(out).metadata["deepseek2.attention.key_length_mla"] + 1
        wrong = GgufTensors(rewritten(tmp_path / "n.gguf", {"key_length_mla": length}, parts=True))
        wrong.shape("model.layers.0.self_attn.kv_b_proj.weight")


def test_muse_goes_to_gguf_and_back(tmp_path):
    """As llama.cpp computes it: norms with 1 + w, neighbouring channels, the factor of queries as a norm's weights."""
    folder = folder_for_gguf(tmp_path / "in", "muse", {"post_norm_eps": 1e-8, "output_multiplier": 0.25})
    file = check_gguf_and_back(folder, tmp_path / "out.gguf", rounded="layernorm")
    contents, config = open_file(file), read_config(folder)
    heads, h = config["num_attention_heads"], config["head_dim"]
    ours = stored("muse", "weight")
    read = functools.partial(read_numbers, contents)
    for l in range(config["num_hidden_layers"]):
        np.testing.assert_array_equal(read(f"blk.{l}.attn_q_norm.weight"), np.full(h, config["qk_scale_factor"], "f4"))
        np.testing.assert_array_equal(read(f"blk.{l}.attn_k_norm.weight"), np.ones(h))
        norm = ours[f"model.layers.{l}.post_attention_layernorm.weight"].astype(np.float32)
        np.testing.assert_array_equal(read(f"blk.{l}.post_attention_norm.weight"), 1 + norm)
    rows = ours["model.layers.0.self_attn.q_proj.weight"].astype(np.float32).reshape(heads, 2, h // 2, -1)
    pairs = read("blk.0.attn_q.weight").reshape(heads, h // 2, 2, -1)
    np.testing.assert_array_equal(pairs[:, :, 1], rows[:, 1])
    sizes = {key.removeprefix("muse-glimmer."): value for key, value in contents.metadata.items()}
    assert sizes["attention.sliding_window_pattern"] == [kind == "sliding_attention" for kind in config["layer_types"]]
    assert sizes["logit_scale"] == pytest.approx(config["output_multiplier"])
    assert sizes["final_logit_softcapping"] == config["final_logit_softcapping"]

    def other(name: str) -> np.ndarray:
        return np.arange(1, h + 1, dtype=np.float32) if name == "blk.1.attn_k_norm.weight" else read(name)

    with pytest.raises(ConfigError, match=r"expected ones in every blk\.N\.attn_k_norm\.weight, got others; such"):
        metadata_config(contents, {name: other(name) for name in contents.tensors if "attn_" in name})
    with pytest.raises(ConfigError, match=r"expected blk\.0\.attn_k_norm\.weight in .*, got none; fetch"):
        metadata_config(
            contents._replace(tensors={x: y for x, y in contents.tensors.items() if x != "blk.0.attn_k_norm.weight"})
        )


@pytest.mark.parametrize("case", NOT_IN_GGUF)
def test_what_no_gguf_file_says_is_refused(tmp_path, case):
    changes, message = NOT_IN_GGUF[case]
    with pytest.raises(ConfigError, match=re.escape(message)):
        gguf_metadata(given(case) | changes, tmp_path / "out.gguf")
