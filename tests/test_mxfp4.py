"""MXFP4: numbers, files of gpt-oss that are stored so, and runs that keep them."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from commands import convert
from small import needs
from test_experts import REFERENCE, config_of
from test_huggingface import config

from surojax import ConfigError, default_config, train
from surojax.assembly.from_config import from_config
from surojax.config.checks import check
from surojax.exchange import compressed, stored_mxfp4
from surojax.exchange.base import DerivedTensors, described_format
from surojax.exchange.export import export
from surojax.exchange.merge import InBaseFormat
from surojax.exchange.model_tensors import SINGLE, Weights, check_tensors, readers
from surojax.exchange.sources import open_weights
from surojax.families.family import BY_EXPERT
from surojax.models import decoder_model
from surojax.numerics import base_formats, mxfp4
from surojax.placement.mesh import make_mesh

MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
D, F, EXPERTS, VOCAB = 64, 32, 7, 257
LORA = {"lora": True, "lora_rank": 2, "lora_target_modules": "q_proj"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_numbers_are_those_of_transformers(dtype):
    """All pairs of codes, and scales from 2^-125 to the largest; to the bit, and exact in bfloat16."""
    stored = {f"w{part}": REFERENCE[f"mxfp4{part}"] for part in ("_blocks", "_scales")}
    q = stored_mxfp4.read_mxfp4("w", lambda x: x, stored.__getitem__)
    found = np.asarray(base_formats.dequantise(jax.tree.map(jnp.asarray, q), dtype), np.float32)
    np.testing.assert_array_equal(found.swapaxes(1, 2).view(np.uint32), REFERENCE[f"mxfp4_{dtype}"].view(np.uint32))


def quantised(w: np.ndarray) -> mxfp4.Mxfp4:
    return jax.jit(lambda w: base_formats.quantise(w, mxfp4.planned(w.shape)))(w)


dequantise = jax.jit(base_formats.dequantise, static_argnums=1)


def test_numbers_are_rounded_to_the_nearest():
    """With the smallest scale that cuts nothing off; NaN and infinity stay in their block; twice is once."""
    w = np.random.default_rng(0).normal(size=(40, 128)).astype(np.float32) * np.logspace(-30, 30, 40)[:, None]
    w = w.astype(np.float32)
    w[0, :32], w[1, 5] = 0, 6 * 2.0**3
    q = quantised(w)
    found = np.asarray(dequantise(q, "float32"))
    scales = 2.0 ** (np.asarray(q.scales, np.int32) - 127)
    largest = np.abs(w.reshape(40, 4, 32)).max(axis=-1)
    assert (largest <= 6 * scales).all() and (largest > 3 * scales)[largest > 0].all()
    ratio = np.abs(w.reshape(40, 4, 32)) / scales[..., None]
    nearest = np.abs(ratio[..., None] - MAGNITUDES).min(axis=-1)
    errors = np.abs(found - w).reshape(40, 4, 32) / scales[..., None]
    np.testing.assert_allclose(errors, nearest, atol=1e-6)
    np.testing.assert_array_equal(dequantise(quantised(found), "float32"), found)
    w[2, 40], w[3, 70] = np.nan, -np.inf
    found = np.isnan(np.asarray(dequantise(quantised(w), "float32")))
    assert found[2, 32:64].all() and found[3, 64:96].all() and found.sum() == 64


@pytest.mark.parametrize("largest", [1e-39, 2.0**-126, 2.0**-125])
def test_blocks_below_the_least_scale_stay_near_their_numbers(largest):
    """Half a step of that scale, and what XLA:CPU flushes to 0: scales below it would wrap around to the largest."""
    w = np.full((32, 128), largest, np.float32) * np.linspace(0, 1, 128, dtype=np.float32)
    found = np.asarray(dequantise(quantised(w), "float32"))
    assert np.abs(found - w).max() <= 2.0**-126


def of_gpt_oss() -> dict[str, np.ndarray]:
    """The tensors of a tiny model whose experts are in MXFP4; everything else in float32."""
    rng = np.random.default_rng(0)
    found = {}
    for name, x in REFERENCE.items():
        if not name.startswith("gpt_oss/weight/"):
            continue
        shape = tuple({24: D, 12: F, 48: VOCAB}.get(n, n) for n in x.shape)
        name = name.removeprefix("gpt_oss/weight/")
        if name.endswith(("gate_up_proj", "gate_up_proj_bias")):
            shape = (*shape[:-1], 2 * F)
        if name.endswith(("gate_up_proj", "down_proj")):
            _, inputs, outputs = shape
            found[f"{name}_blocks"] = rng.integers(0, 256, (EXPERTS, outputs, inputs // 32, 16)).astype(np.uint8)
            found[f"{name}_scales"] = rng.integers(119, 123, (EXPERTS, outputs, inputs // 32)).astype(np.uint8)
        else:
            found[name] = rng.normal(size=shape).astype(np.float32) * 0.3
    return found


def written(folder: Path, tensors: dict[str, np.ndarray]) -> Path:
    folder.mkdir()
    said = json.loads(str(REFERENCE["gpt_oss/config.json"]))
    said |= {
        "hidden_size": D,
        "intermediate_size": F,
        "vocab_size": VOCAB,
        "quantization_config": {"quant_method": "mxfp4"},
    }
    (folder / "config.json").write_text(json.dumps(said))
    safetensors.numpy.save_file(tensors, folder / SINGLE)
    return folder


def numbers(tensors: dict[str, np.ndarray], name: str) -> np.ndarray:
    """A matrix [experts, out, in], in plain numpy."""
    blocks, scales = tensors[f"{name}_blocks"], tensors[f"{name}_scales"]
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, 32)
    values = np.concatenate([MAGNITUDES, -MAGNITUDES])[codes] * 2.0 ** (scales.astype(int)[..., None] - 127)
    return values.reshape(*scales.shape[:2], -1).astype(np.float32)


OF_LAYER = "model.layers.1.mlp.experts."
AXES_OF_ONE = {"blocks": 3, "scales": 2}  # of tensors that have one block of a row


@needs(4)
def test_gpt_oss_is_read_as_it_is_stored(tmp_path):
    """Into numbers, and as codes and scales by a run that keeps them, sharded too; attention stays as it is."""
    tensors = of_gpt_oss()
    folder = written(tmp_path / "model", tensors)
    weights = Weights(folder)
    both, down = (numbers(tensors, f"{OF_LAYER}{name}") for name in ("gate_up_proj", "down_proj"))
    wanted = {"gate_proj": both[:, ::2], "up_proj": both[:, 1::2], "down_proj": down}
    for name, matrix in wanted.items():
        assert weights.format_of(f"{OF_LAYER}{name}.weight") == "mxfp4"
        np.testing.assert_array_equal(weights.read(f"{OF_LAYER}{name}.weight").astype(np.float32), matrix)
    c = config(folder, **LORA, qlora_mxfp4=True, zero_level=3)
    run = from_config(c, make_mesh(jax.devices()[:4]), total_steps=1)
    opened = open_weights(c, run.model)
    assert opened is not None
    check_tensors(opened, run.model)
    assert described_format(opened, run.model, "mxfp4") == ", in mxfp4 as it is stored"
    found = jax.device_get(run.load_state(*readers(opened, run.coded)).weights["blocks"])
    assert found["attention"]["wq"].dtype == np.float32  # in 16 bits where models are
    blocks, scales = (tensors[f"{OF_LAYER}gate_up_proj_{part}"] for part in ("blocks", "scales"))
    blocks = blocks.reshape(EXPERTS, 2 * F, -1)
    np.testing.assert_array_equal(found["mlp"]["w_up"].codes[1], blocks[:, 1::2])
    np.testing.assert_array_equal(found["mlp"]["w_gate"].scales[1], scales[:, ::2])
    np.testing.assert_array_equal(base_formats.dequantise(found["mlp"]["w_down"], "float32")[1], down)
    frozen = InBaseFormat(weights, run.model, "mxfp4", "float32")
    for name in ("model.layers.0.self_attn.q_proj.weight", f"{OF_LAYER}up_proj.weight"):
        np.testing.assert_array_equal(frozen.read(name), weights.read(name).astype(np.float32))


def test_gpt_oss_goes_out_as_it_is_stored(tmp_path):
    """Codes and scales to the bit from such files; from numbers the same numbers; config.json says so."""
    tensors = of_gpt_oss()
    out = convert.convert(written(tmp_path / "model", tensors), tmp_path / "out", dtype="mxfp4")
    found = safetensors.numpy.load_file(out / SINGLE)
    assert found.keys() == tensors.keys()
    for name, x in tensors.items():
        np.testing.assert_array_equal(found[name], x if x.dtype == np.uint8 else x.astype(ml_dtypes.bfloat16))
    said = json.loads((out / "config.json").read_text())
    assert said["quantization_config"]["quant_method"] == "mxfp4" and said["dtype"] == "bfloat16"
    in_numbers = convert.convert(out, tmp_path / "numbers", dtype="bfloat16")
    assert "quantization_config" not in json.loads((in_numbers / "config.json").read_text())
    opened = convert.open_model(tmp_path / "model")
    derived = DerivedTensors(opened.tensors)  # as of a merged adapter, which have numbers alone
    for folder in (
        convert.convert(in_numbers, tmp_path / "again", dtype="mxfp4"),
        export(derived, opened.model, opened.config, {}, tmp_path / "derived", dtype="mxfp4"),
    ):
        again = safetensors.numpy.load_file(folder / SINGLE)
        assert {name: x.shape for name, x in again.items()} == {name: x.shape for name, x in found.items()}
        for name in ("gate_up_proj", "down_proj"):
            np.testing.assert_array_equal(numbers(again, OF_LAYER + name), numbers(tensors, OF_LAYER + name))
    with pytest.raises(ConfigError, match=r"^--dtype: expected a model of gpt-oss for mxfp4, got another one"):
        compressed.check_matrices("mxfp4", decoder_model.build(config_of("olmoe")), BY_EXPERT)


@pytest.mark.full
def test_adapters_train_beside_experts_as_they_are_stored(tmp_path):
    """The same losses as beside their numbers in 32 bits."""
    folder = written(tmp_path / "model", of_gpt_oss())
    losses = []
    for name, kept in (("kept", True), ("numbers", False)):
        c = default_config()
        c.update({"model_path": str(folder), "model_dtype": "float32", "qlora_mxfp4": kept, "max_steps": 3} | LORA)
        c.update({"output_dir": str(tmp_path / name), "data_cache": str(tmp_path / "cache"), "report_to": ""})
        c.update(
            {"sequence_len": 32, "per_device_batch_size": 2, "sample_tokens": 0, "learning_rate": 1e-2, "log_steps": 1}
        )
        text = tmp_path / "text.txt"
        text.write_bytes(bytes(np.random.default_rng(1).integers(0, 48, 4000).astype(np.uint8)))
        c.data = str(text)
        losses.append([(record["loss"], record["norm"]) for record in train(c).history if "norm" in record])
    assert losses[0] == losses[1] and losses[0][-1] < losses[0][0]


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda t: t.update({f"{OF_LAYER}down_proj_scales": np.full((7, D, 1), 253, np.uint8)}),
            r"got the scale 2\^126",
        ),
        (
            lambda t: t.update({f"{OF_LAYER}down_proj_scales": np.full((7, D, 2), 120, np.uint8)}),
            r"down_proj: expected blocks \[experts, out, in / 32, 16\] and their scales, got \[7, 64, 1, 16\] and",
        ),
        (
            lambda t: t.update({f"{OF_LAYER}down_proj_blocks": np.zeros((7, D, 1, 8), np.uint8)}),
            r"down_proj: expected blocks \[experts, out, in / 32, 16\] and their scales, got \[7, 64, 1, 8\] and",
        ),
        (
            lambda t: t.update(
                {f"{OF_LAYER}down_proj_{x}": np.zeros((7, D, 16)[:axes], np.uint8) for x, axes in AXES_OF_ONE.items()}
            ),
            r"down_proj: expected blocks \[experts, out, in / 32, 16\] and their scales, got \[7, 64, 16\] and",
        ),
        (lambda t: t.pop(f"{OF_LAYER}down_proj_scales"), r"down_proj_blocks in a float dtype, got uint8"),
    ],
)
def test_damaged_files_are_refused(tmp_path, change, message):
    tensors = of_gpt_oss()
    change(tensors)
    folder = written(tmp_path / "model", tensors)
    with pytest.raises(ConfigError, match=message):
        weights = Weights(folder)
        weights.shape(f"{OF_LAYER}down_proj.weight")
        weights.read(f"{OF_LAYER}down_proj.weight")


def test_the_largest_scale_is_of_finite_numbers(tmp_path):
    tensors = of_gpt_oss() | {f"{OF_LAYER}down_proj_scales": np.full((7, D, 1), 252, np.uint8)}
    found = Weights(written(tmp_path / "model", tensors)).read(f"{OF_LAYER}down_proj.weight")
    np.testing.assert_array_equal(found.astype(np.float32), numbers(tensors, f"{OF_LAYER}down_proj"))


def test_what_does_not_go_together_is_refused(tmp_path):
    folder = written(tmp_path / "model", of_gpt_oss())
    c = config(folder, **LORA, qlora_fp8=True)
    with pytest.raises(
        ConfigError, match=r"^qlora_fp8: expected a base .* got mxfp4 in .*; set qlora_mxfp4=True in its"
    ):
        open_weights(c, from_config(c, make_mesh(jax.devices()[:1]), 1).model)
    c = default_config()
    c.update({"lora": True, "qlora_mxfp4": True})
    with pytest.raises(ConfigError, match=r"^qlora_mxfp4: expected False with num_experts=0, since it is a format of"):
        check(c)
