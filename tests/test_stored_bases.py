"""Bases that are stored in FP8 or NF4: read as they are by the run that freezes them so, refused by another."""

import functools
import json
from pathlib import Path

import chex
import jax
import ml_dtypes
import numpy as np
import pytest
from exports import Case, config_of, drawn, model_of as exported_model, of_each
from small import needs
from test_bitsandbytes import SHAPES, write as write_nf4
from test_huggingface import config
from test_shards import FLOAT8, write_float8

from surojax import ConfigError
from surojax.assembly.from_config import from_config
from surojax.exchange import compressed, config_json, model_tensors
from surojax.exchange.base import described_format
from surojax.exchange.merge import InBaseFormat
from surojax.exchange.model_tensors import Weights, readers
from surojax.exchange.sources import open_weights
from surojax.models.model import Model
from surojax.numerics import base_formats
from surojax.placement.mesh import make_mesh

SIZES = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "vocab_size": 96}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
LORA = {"lora": True, "lora_rank": 2}


@functools.cache
def tensors(block: int = 128) -> dict[str, np.ndarray]:
    """A tiny model with its blocks' matrices in FP8; those of down_proj have two blocks of 128 x 128."""
    random = np.random.RandomState(5)
    outer = {"model.embed_tokens.weight": (96, 64), "model.norm.weight": (64,), "lm_head.weight": (96, 64)}
    found = {name: random.standard_normal(shape).astype(np.float32) for name, shape in outer.items()}
    for l in range(2):
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"model.layers.{l}.{name}.weight"] = np.ones(64, np.float32)
        for name in SHAPES:
            rows = 192 if name in ("mlp.gate_proj", "mlp.up_proj") else 64
            columns = 192 if name == "mlp.down_proj" else 64
            key = f"model.layers.{l}.{name}.weight"
            found[key] = random.standard_normal((rows, columns)).astype(ml_dtypes.float8_e4m3fn)
            scales = random.uniform(0.01, 0.02, (-(-rows // block), -(-columns // block)))
            found[f"{key}_scale_inv"] = scales.astype(np.float32)
    return found


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
@pytest.mark.parametrize("block", [(128, 128), (128, 64), (64, 128), (64, 64)])
def test_only_e4m3_in_square_blocks_of_128_is_fp8(tmp_path, dtype, block):
    """Bytes of e5m2 that were read as e4m3 would be other numbers."""
    name = "model.layers.0.mlp.down_proj.weight"
    numbers = np.linspace(-3, 3, 64 * 192, dtype=np.float32).reshape(64, 192).astype(dtype)
    scales = np.full((1, -(-192 // block[1])), 0.5, np.float32)
    said = FLOAT8 | {"weight_block_size": [*block]}
    folder = write_float8(tmp_path / "model", {name: numbers, f"{name}_scale_inv": scales}, quantization_config=said)
    weights = Weights(folder)
    is_fp8 = dtype == ml_dtypes.float8_e4m3fn and block == (128, 128)
    described = f"{np.dtype(dtype)} in blocks of {block[0]} x {block[1]}"
    assert weights.format_of(name) == ("fp8" if is_fp8 else described)
    np.testing.assert_array_equal(weights.read(name), 0.5 * numbers.astype(np.float32))


def write_fp8(folder: Path, block: int = 128) -> Path:
    said = FLOAT8 | {"weight_block_size": [block, block]}
    return write_float8(folder, tensors(block), quantization_config=said, **SIZES)


def model_of(folder: Path) -> Model:
    return from_config(config(folder), make_mesh(jax.devices()[:1]), 1).model


@pytest.mark.full
@needs(4)
def test_a_run_in_fp8_has_the_codes_and_scales_that_are_stored(tmp_path):
    c = config(write_fp8(tmp_path / "model"), **LORA, qlora_fp8=True, zero_level=3)
    run = from_config(c, make_mesh(jax.devices()[:4]), total_steps=1)
    weights = open_weights(c, run.model)
    assert weights is not None
    found = jax.device_get(run.load_state(*readers(weights, run.coded)).weights["blocks"])
    assert found["mlp"]["w_down"].scales.shape == (2, 4, 3)  # tiles of 16 x 64: rows of a device, what divides 192
    for l in range(2):
        for ours, name in (("w_down", "down_proj"), ("w_gate", "gate_proj")):
            name = f"model.layers.{l}.mlp.{name}.weight"
            q = jax.tree.map(lambda x, l=l: x[l], found["mlp"][ours])
            np.testing.assert_array_equal(q.codes.view(np.uint8), tensors()[name].view(np.uint8))
            rows, columns = tensors()[name].shape
            scales = tensors()[f"{name}_scale_inv"]
            numbers = tensors()[name].astype(np.float32) * np.kron(scales, np.ones((128, 128)))[:rows, :columns]
            np.testing.assert_array_equal(base_formats.dequantise(q, "float32"), numbers.astype(np.float32))


def deepseek(folder: Path) -> dict[str, np.ndarray]:
    """Writes a DeepSeek-V3 as it is published: all matrices of layers but routers in FP8, each expert's by itself."""
    sizes = {"hidden_size": 192, "intermediate_size": 192, "moe_intermediate_size": 64}
    sizes["quantization_config"] = FLOAT8 | {"weight_block_size": [128, 128]}
    ranks = {"q_lora_rank": 64, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64}
    given = config_of(Case("deepseek_v3", "apart", "float32")) | sizes | ranks
    model = exported_model(given)[1]
    found = {}
    for name, x in of_each({name: drawn(name, shape) for name, shape in model_tensors.shapes(model).items()}).items():
        is_coded = name.startswith("model.layers.") and x.ndim == 2 and not name.endswith("mlp.gate.weight")
        found[name] = x.astype(ml_dtypes.float8_e4m3fn) if is_coded else x
        if is_coded:
            scales = np.random.default_rng(len(found)).uniform(0.01, 0.02, [-(-n // 128) for n in x.shape])
            found[f"{name}_scale_inv"] = scales.astype(np.float32)
    write_float8(folder, found)
    (folder / "config.json").write_text(json.dumps(config_json.completed(given, "float32") | sizes))
    return found


@needs(4)
def test_a_deepseek_in_fp8_has_the_codes_and_scales_that_are_stored(tmp_path):
    """Latents' matrices, whose rows are no whole blocks, a first layer without experts, and every expert."""
    folder = tmp_path / "model"
    files = deepseek(folder)
    c = config(folder, **LORA, qlora_fp8=True, zero_level=3)
    run = from_config(c, make_mesh(jax.devices()[:4]), total_steps=1)
    weights = open_weights(c, run.model)
    assert weights is not None
    state = jax.device_get(run.load_state(*readers(weights, run.coded)).weights)
    seen = set()
    for segment in run.model.segments:
        for param, q in zip(
            jax.tree.leaves(segment.params), jax.tree.leaves(state[segment.name], is_leaf=is_coded), strict=True
        ):
            for l in range(segment.num_layers if is_coded(q) else 0):
                name = model_tensors.tensor_name(param, segment, l)
                stored = of_each({name: np.zeros(param.shape, np.int8)})
                of_layer = jax.tree.map(lambda x, l=l: x[l], q)
                codes = of_layer.codes.view(np.uint8).reshape(-1, *of_layer.codes.shape[-2:])
                numbers = base_formats.dequantise(of_layer, "float32").reshape(codes.shape)
                for e, file in enumerate(stored):
                    rows, columns = files[file].shape
                    np.testing.assert_array_equal(codes[e], files[file].view(np.uint8))
                    factors = np.kron(files[f"{file}_scale_inv"], np.ones((128, 128), np.float32))[:rows, :columns]
                    np.testing.assert_array_equal(numbers[e], files[file].astype(np.float32) * factors)
                seen |= stored.keys()
    assert seen == {name for name, x in files.items() if x.dtype.itemsize == 1} and len(seen) == 40


def is_coded(x) -> bool:
    return hasattr(x, "codes")


def test_what_is_merged_onto_is_what_is_stored(tmp_path):
    """Not quantised again: scales of a checkpoint need not be those of the largest numbers."""
    weights = Weights(write_fp8(tmp_path / "model"))
    frozen = InBaseFormat(weights, model_of(weights.path), "fp8", "bfloat16")
    for name in weights.names:
        found = frozen.read(name)
        np.testing.assert_array_equal(found, weights.read(name).astype(found.dtype))
    assert frozen.read("model.layers.1.mlp.up_proj.weight").dtype == ml_dtypes.bfloat16


def test_another_format_is_refused_in_one_line(tmp_path):
    nf4 = write_nf4(tmp_path / "nf4")
    fp8 = write_fp8(tmp_path / "fp8")
    small = write_fp8(tmp_path / "small", 32)
    cases = [
        (nf4, "qlora_fp8", rf"in fp8, got nf4 in {nf4}; set qlora_bnb=True in its place"),
        (fp8, "qlora_bnb", rf"in nf4, got fp8 in {fp8}; set qlora_fp8=True in its place"),
        (fp8, "qlora_fp4", rf"in nvfp4, got fp8 in {fp8}; set qlora_fp8=True in its place"),
        (small, "qlora_fp8", rf"in fp8, got float8_e4m3fn in blocks of 32 x 32 in {small}; fetch it in 16 bits"),
    ]
    for folder, setting, message in cases:
        with pytest.raises(ConfigError, match=rf"^{setting}: expected a base in 16 or 32 bits or {message}$"):
            open_weights(config(folder, **LORA, **{setting: True}), model_of(folder))


def test_how_a_base_comes_in_is_said(tmp_path):
    folder = write_fp8(tmp_path / "fp8")
    weights, model = Weights(folder), model_of(folder)
    assert described_format(weights, model, "fp8") == ", in fp8 as it is stored"
    assert described_format(weights, model, "") == ", dequantised from fp8"
    numbers = InBaseFormat(weights, model, "fp8", "float32")
    assert described_format(numbers, model, "fp8") == ", quantised to fp8 after an adapter is merged into it"
    assert described_format(numbers, model, "") == ""
    chex.assert_trees_all_equal(numbers.names, weights.names)


FP8 = {"num_bits": 8, "strategy": "block", "block_structure": [128, 64]}
FP4 = {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}
OF_FP8, OF_FP4 = "float-quantized", "nvfp4-pack-quantized"


@pytest.mark.parametrize(
    "format, weights, expected",
    [
        (OF_FP8, FP8, (128, 64)),
        (OF_FP4, FP4, None),
        (OF_FP8, FP8 | {"num_bits": 4}, "float-quantized with strategy block"),
        (OF_FP8, FP8 | {"strategy": "channel"}, "float-quantized with strategy channel"),
        ("int-quantized", FP8, "int-quantized with strategy block"),
        (OF_FP4, FP4 | {"num_bits": 8}, "nvfp4-pack-quantized with strategy tensor_group"),
        (OF_FP4, FP4 | {"group_size": 32}, "nvfp4-pack-quantized with strategy tensor_group"),
        ("pack-quantized", FP4, "pack-quantized with strategy tensor_group"),
    ],
)
def test_a_format_of_compressed_tensors(format, weights, expected):
    """Said of the group, or of all; of several groups none is read."""
    for entry in (
        {"format": format, "config_groups": {"group_0": {"weights": weights}}},
        {"format": "mixed-precision", "config_groups": {"group_0": {"weights": weights, "format": format}}},
    ):
        if isinstance(expected, str):
            with pytest.raises(ValueError, match=expected):
                compressed.fp8_block(entry)
        else:
            assert compressed.fp8_block(entry) == expected
    with pytest.raises(ValueError):
        compressed.fp8_block({"format": format, "config_groups": {key: {"weights": weights} for key in "ab"}})


@pytest.mark.parametrize(
    "codes, scales, of_all", [((8, 4, 8), (8, 0), (1,)), ((8, 16), (8, 4), (1,)), ((8, 16), (8, 2), (8,))]
)
def test_matrices_in_nvfp4_have_shapes_that_belong_together(codes, scales, of_all):
    """One scale of 16 numbers, and one of the matrix."""
    good = {"w_packed": (8, 16), "w_scale": (8, 2), "w_global_scale": (1,)}
    assert compressed.packed_shape("w", good.__getitem__) == (8, 32)
    stored = dict(zip(good, (codes, scales, of_all), strict=True))
    with pytest.raises(
        ConfigError, match=r"^model_path: w: expected codes \[out, in / 2\], .*; fetch the model again$"
    ):
        compressed.packed_shape("w", stored.__getitem__)


def test_matrices_in_nvfp4_have_three_tensors():
    parts = {"w_packed", "w_scale", "w_global_scale"}
    assert compressed.packed(parts | {"x_packed", "x_scale", "y_packed", "y_global_scale", "z_scale"}) == {"w"}
    assert compressed.packed(parts - {"w_packed"}) == set() and compressed.parts_of({"w"}) == parts
