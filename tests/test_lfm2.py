"""LFM2 and LFM2-MoE against transformers (`fixtures/make_lfm2_reference.py`): convolutions and attention in turn."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from commands import convert
from flax import nnx
from small import CONFIG, Small, quick_at, tokens
from test_engine import engine_gradients
from test_experts import check_gguf_and_back
from test_parity import close

from surojax import ConfigError, default_config
from surojax.assembly.from_config import architecture
from surojax.config.checks import check
from surojax.exchange import config_json
from surojax.exchange.export import in_files
from surojax.exchange.gguf_export import gguf_metadata
from surojax.exchange.huggingface import model_fields
from surojax.exchange.model_tensors import SINGLE, Weights, check_tensors, stacks, tensors_by_name
from surojax.exchange.naming import naming_of
from surojax.families import mixer_keys
from surojax.inference.forward import cached_logits, empty_cache
from surojax.models import decoder, decoder_config, decoder_model

with np.load(Path(__file__).parent / "fixtures" / "lfm2_reference.npz") as arrays:
    REFERENCE = dict(arrays)
CASES = ("lfm2", "lfm2_untied", "lfm2_moe")
PROMPT = 8
HYBRID = dataclasses.replace(
    CONFIG, num_hidden_layers=7, qk_norm=True, layer_types="conv,conv,full_attention,conv,full_attention"
)
WITH_EXPERTS = dataclasses.replace(
    HYBRID, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=16, first_k_dense_replace=2
)


def stored(case: str, what: str) -> dict[str, np.ndarray]:
    """The arrays of a case, by name."""
    start = f"{case}/{what}/"
    return {name.removeprefix(start): x for name, x in REFERENCE.items() if name.startswith(start)}


def given(case: str) -> dict:
    return json.loads(str(REFERENCE[f"{case}/config.json"]))


def config_of(case: str, **changes) -> decoder_config.DecoderConfig:
    c = default_config()
    c.model.update(model_fields(given(case) | changes))
    check(c)
    return architecture(c)


def written(folder: Path, case: str) -> Path:
    """A model's folder."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(given(case)))
    safetensors.numpy.save_file(stored(case, "weight"), folder / SINGLE)
    return folder


def params_of(folder: Path, case: str) -> dict:
    """A case's weights as the engine has them."""
    tensors = Weights(written(folder / "model", case))
    model = decoder_model.build(config_of(case))
    check_tensors(tensors, model)
    return stacks(tensors, model, "float32", jax.sharding.SingleDeviceSharding(jax.devices()[0]))


def of_tree(tree: dict, model, case: str) -> dict[str, np.ndarray]:
    """Arrays of a tree like the weights, under the names of the files."""
    return in_files(tensors_by_name(jax.tree.map(np.asarray, tree), model), model, naming_of(given(case)))


@pytest.mark.parametrize("case", quick_at([(case,) for case in CASES], 2))
def test_logits_and_answers_are_those_of_transformers(tmp_path, case):
    """Of whole rows, and of a token at a time with a cache."""
    params, model = params_of(tmp_path, case), decoder_model.build(config_of(case))
    graph = nnx.graphdef(nnx.eval_shape(lambda: decoder.Decoder(config_of(case), rngs=nnx.Rngs(0))))
    inputs = REFERENCE[f"{case}/tokens"]
    close(jax.jit(lambda w: nnx.merge(graph, w)(inputs))(params), REFERENCE[f"{case}/logits"], "logits")
    answer = REFERENCE[f"{case}/answer"]
    cache = empty_cache(model, 1, PROMPT + len(answer), jnp.float32)
    step = jax.jit(lambda ids, cache, start: cached_logits(model, params, ids, cache, start))
    ids, start, found = inputs[:1, :PROMPT], 0, []
    for _ in answer:
        logits, cache = step(ids, cache, jnp.int32(start))
        start += ids.shape[1]
        found.append(int(logits[0].argmax()))
        ids = np.array([[found[-1]]], np.int32)
    assert found == answer.tolist()


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_those_of_transformers(tmp_path, case):
    small = Small(config=config_of(case))
    small.state = SimpleNamespace(weights=params_of(tmp_path, case))
    loss, grads = engine_gradients(small, (REFERENCE[f"{case}/tokens"][None], REFERENCE[f"{case}/labels"][None]))
    close(loss, REFERENCE[f"{case}/loss"], "loss")
    found, expected = of_tree(grads, small.run.model, case), stored(case, "grad")
    assert found.keys() == expected.keys()
    for name, x in found.items():
        if name.endswith("expert_bias"):
            assert not x.any() and not expected[name].any()
        else:
            close(x.reshape(expected[name].shape), expected[name], f"gradient of {name}")


@pytest.mark.parametrize("case", CASES)
def test_a_folder_comes_back_to_the_bit(tmp_path, case):
    """Names, shapes and numbers; the config is made anew from the fields, and reads back as the same."""
    out = convert.convert(written(tmp_path / "in", case), tmp_path / "out", dtype="float32")
    found, expected = safetensors.numpy.load_file(out / SINGLE), stored(case, "weight")
    assert found.keys() == expected.keys()
    for name, x in found.items():
        np.testing.assert_array_equal(x, expected[name], name)
    made = config_json.made(model_fields(given(case)), 64, {})
    assert made["model_type"] == given(case)["model_type"]
    assert config_json.normal(model_fields(made)) == config_json.normal(model_fields(given(case)))


@pytest.mark.parametrize("case", quick_at([("lfm2",), ("lfm2_moe",)], 0))
def test_models_go_to_gguf_and_back(tmp_path, case):
    """Layers without heads are those of convolutions; files have no factor of the chosen experts' weights."""
    folder = written(tmp_path / "in", case)
    if case == "lfm2_moe":
        with pytest.raises(ConfigError, match=r"lfm2_moe does not have routed_scaling_factor=1\.5"):
            gguf_metadata(given(case), tmp_path / "out.gguf")
        (folder / "config.json").write_text(json.dumps(given(case) | {"routed_scaling_factor": 1.0}))
    check_gguf_and_back(folder, tmp_path / "out.gguf")


def test_parts_of_a_matrix_in_float8_are_multiplied_with_its_scales(tmp_path):
    """`in_proj` has three of ours, whose rows the blocks need not divide."""
    name, numbers = "model.layers.0.conv.in_proj.weight", stored("lfm2", "weight")
    rows, columns = numbers[name].shape
    scales = np.linspace(0.5, 2, -(-rows // 20), dtype=np.float32)[:, None]
    tensors = {name: numbers[name].astype(ml_dtypes.float8_e4m3fn), f"{name}_scale_inv": scales}
    quantised = {"quant_method": "fp8", "weight_block_size": [20, columns]}
    (tmp_path / "config.json").write_text(json.dumps(given("lfm2") | {"quantization_config": quantised}))
    safetensors.numpy.save_file(numbers | tensors, tmp_path / SINGLE)
    expected = tensors[name].astype(np.float32) * np.repeat(scales, 20, axis=0)[:rows]
    weights = Weights(tmp_path)
    for i, part in enumerate(np.split(expected, 3)):
        np.testing.assert_array_equal(weights.read(f"{name}[{i}/3]"), part)


def test_quantised_folders_are_refused_by_the_matrix_that_is_a_part(tmp_path):
    with pytest.raises(ConfigError, match=r"--dtype: .* got model.layers.0.conv.conv.weight\[0/1\], a part of one"):
        convert.convert(written(tmp_path / "in", "lfm2"), tmp_path / "out", dtype="fp8")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"conv_bias": True}, "conv_bias: expected False"),
        ({"conv_L_cache": 4}, "conv_L_cache: expected 3"),
        ({"layer_types": ["conv"] * 6}, "layer_types: expected full_attention or conv for each of 7 layers"),
        ({"layer_types": ["conv"] * 6 + ["mamba"]}, "layer_types: expected full_attention or conv"),
        ({"sliding_window": 4}, "sliding_window"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps: expected norm_eps=0.001, which transformers reads in its place"),
        ({"attention_bias": True}, "attention_bias"),
    ],
)
def test_what_is_not_computed_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        model_fields(given("lfm2") | changes)


def test_experts_without_a_bias_for_the_choice_are_refused():
    with pytest.raises(ConfigError, match="use_expert_bias: expected true, got false"):
        model_fields(given("lfm2_moe") | {"use_expert_bias": False})


@pytest.mark.parametrize(
    "changes, width",
    [
        ({}, 48),  # 2/3 of 50 is 33; 1.25 of it 41, rounded up to a multiple of 12
        ({"block_ffn_dim_multiplier": None}, 33),
        ({"block_auto_adjust_ff_dim": False}, 50),
        ({"block_ff_dim": 40}, 36),
    ],
)
def test_the_width_of_the_mlp_follows_from_the_keys(changes, width):
    assert model_fields(given("lfm2") | changes)["intermediate_size"] == width


@pytest.mark.parametrize(
    "types, field",
    [
        (["full_attention"] * 3, ""),
        (["conv"] * 3, "conv"),
        (["conv", "full_attention"] * 3, "conv,full_attention"),
        (["conv", "conv", "full_attention", "conv", "conv"], "conv,conv,full_attention"),
        (["conv", "conv", "full_attention", "full_attention"], "conv,conv,full_attention,full_attention"),
    ],
)
def test_layer_types_are_their_shortest_pattern(types, field):
    assert mixer_keys.as_field(types) == field
    assert mixer_keys.types_of({"layer_types": field, "num_hidden_layers": len(types)}) == types


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"pp_size": 2, "gpus": 2, "model.layer_types": "conv,conv,full_attention", "model.num_hidden_layers": 10},
            r"^pp_size: expected stages with as many layers of each kind, got 2 stages, of which some have 4 of conv "
            r"and 1 of full_attention, others 3 of conv and 2 of full_attention; use 1$",
        ),
        (
            {"pp_size": 4, "gpus": 4, "model.num_hidden_layers": 12},
            r"got 4 stages, of which some have 2 of conv and 1 of full_attention, others 1 of "
            r"conv and 2 of full_attention; use 3$",
        ),
        ({"pp_size": 3, "gpus": 3, "offload_residual": True}, r"offload_residual: expected False with pp_size=3"),
        (
            {"lora": True, "lora_target_modules": "q_proj"},
            "a matrix of every layer, .* got 'q_proj'; add one of out_proj, gate_proj, up_proj, down_proj$",
        ),
        (
            {"lora": True, "lora_target_modules": "all-linear,q_proj"},
            "got 'all-linear'; use it alone, or leave it out$",
        ),
        (
            {"lora": True, "model.one_purpose": True, "model.layer_types": "full_attention,experts"}
            | {"model.num_experts": 4, "model.num_experts_per_tok": 2},
            "got 'all-linear'; name all matrices: q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj$",
        ),
        ({"model.layer_types": "conv,mamba"}, "model.layer_types: expected mixers .* got 'mamba'"),
        ({"model.layer_types": ",".join(["conv"] * 13)}, "at most num_hidden_layers=12 mixers"),
    ],
)
def test_settings_that_are_not_built_for_it_are_refused(changes, message):
    c = default_config()
    c.model.layer_types = "conv,full_attention"
    c.update_from_flattened_dict(changes)
    with pytest.raises(ConfigError, match=message):
        check(c)


def test_adapters_are_of_each_mixers_matrices():
    c = default_config()
    c.model.layer_types = "conv,full_attention"
    c.update({"lora": True, "lora_target_modules": "q_proj,out_proj"})
    check(c)
    segments = decoder_model.build(architecture(c)).segments
    assert {s.name: [param.name for param in jax.tree.leaves(s.trained_params)] for s in segments} == {
        "conv": ["conv.wo_lora.a", "conv.wo_lora.b"],
        "blocks": ["attention.wq_lora.a", "attention.wq_lora.b"],
    }


@pytest.mark.full
def test_documents_in_a_row_are_as_alone():
    """Two documents packed into one row have the logits that each has in a row of its own."""
    params = decoder_model.build(HYBRID).init(0)
    graph = nnx.graphdef(nnx.eval_shape(lambda: decoder.Decoder(HYBRID, rngs=nnx.Rngs(0))))
    run = jax.jit(lambda ids, starts: nnx.merge(graph, params)(ids, starts))
    ids, first = tokens(1, 16)[0], 7
    starts = np.where(np.arange(16) < first, 0, first)[None].astype(np.int32)
    packed = run(ids, starts)
    for begin, end in ((0, first), (first, 16)):
        alone = np.zeros_like(ids)
        alone[:, : end - begin] = ids[:, begin:end]
        close(packed[:, begin:end], run(alone, np.zeros_like(starts))[:, : end - begin], "logits")
