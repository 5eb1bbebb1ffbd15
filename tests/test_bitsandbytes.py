"""A model that bitsandbytes stored in NF4: read as it is for QLoRA, and dequantised for all else."""

import functools
import json
from pathlib import Path

import chex
import jax
import numpy as np
import pytest
import safetensors.numpy
from test_huggingface import config
from test_nf4 import REFERENCE, dequantised, reference

from surojax import ConfigError
from surojax.assembly.from_config import from_config
from surojax.exchange.base import DerivedTensors
from surojax.exchange.merge import InBaseFormat
from surojax.exchange.model_tensors import SINGLE, Weights, readers
from surojax.exchange.sources import open_weights
from surojax.numerics import base_formats, nf4
from surojax.placement.mesh import make_mesh

NAME = "model.layers.0.self_attn.q_proj.weight"
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 96}
CONFIG = SIZES | {
    "model_type": "llama",
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "quantization_config": {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
    },
}
SHAPES = {
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (64, 64),
    "self_attn.v_proj": (64, 64),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (128, 64),
    "mlp.up_proj": (128, 64),
    "mlp.down_proj": (64, 128),
}


@functools.cache
def tensors() -> dict[str, np.ndarray]:
    """The tensors of a tiny model: codes and scales are cut out of what bitsandbytes quantised."""
    random = np.random.RandomState(5)
    found = {"model.embed_tokens.weight": random.standard_normal((96, 64)), "model.norm.weight": np.ones(64)}
    found["lm_head.weight"] = random.standard_normal((96, 64))
    source = {name: REFERENCE[f"wide.weight{name}"] for name in ("", ".absmax", ".nested_absmax")}
    at = 0
    for l in range(2):
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"model.layers.{l}.{name}.weight"] = np.ones(64)
        for name, shape in SHAPES.items():
            key = f"model.layers.{l}.{name}.weight"
            blocks = shape[0] * shape[1] // 64
            state = {
                "quant_type": "nf4",
                "blocksize": 64,
                "dtype": "float32",
                "shape": shape,
                "nested_blocksize": 256,
                "nested_dtype": "float32",
                "nested_offset": 0.05,
            }
            start = at % 100
            found[key] = source[""][32 * start : 32 * (start + blocks)]
            found[f"{key}.absmax"] = source[".absmax"][start : start + blocks]
            found[f"{key}.nested_absmax"] = source[".nested_absmax"][:1]
            found[f"{key}.quant_map"] = REFERENCE["wide.weight.quant_map"]
            found[f"{key}.nested_quant_map"] = REFERENCE["wide.weight.nested_quant_map"]
            found[f"{key}.quant_state.bitsandbytes__nf4"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
            at += 17
    return {name: x.astype(np.float32) if x.dtype == np.float64 else x for name, x in found.items()}


def write(folder: Path, **changed) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    kept = {name: x for name, x in (tensors() | changed).items() if x is not None}
    safetensors.numpy.save_file(kept, folder / SINGLE)
    return folder


def numbers(name: str) -> np.ndarray:
    """A matrix dequantised in float64 from the tables of the paper, element by element."""
    stored = tensors()
    rows, columns = json.loads(stored[f"{name}.quant_state.bitsandbytes__nf4"].tobytes())["shape"]
    codes = np.stack([stored[name] >> 4, stored[name] & 15], axis=-1).reshape(-1, 64)
    absmax = stored[f"{name}.nested_quant_map"][stored[f"{name}.absmax"]].astype(np.float64)
    absmax = absmax * stored[f"{name}.nested_absmax"][0] + 0.05
    return (stored[f"{name}.quant_map"][codes] * absmax[:, None]).reshape(rows, columns)


def test_it_is_dequantised_where_numbers_are_wanted(tmp_path):
    weights = Weights(write(tmp_path / "model"))
    assert weights.names == {name for name in tensors() if name.endswith(".weight")}
    for name in weights.in_nf4:
        found = weights.read(name)
        assert found.shape == weights.shape(name) and found.dtype == np.float32
        np.testing.assert_allclose(found, numbers(name), rtol=1e-6)
    assert len(weights.in_nf4) == 2 * len(SHAPES)
    model = from_config(config(weights.path), make_mesh(jax.devices()[:1]), 1).model
    frozen = InBaseFormat(weights, model, "nf4", "float32")
    for name in weights.names:  # not quantised again, which would round the scales once more
        np.testing.assert_array_equal(frozen.read(name), weights.read(name))


@pytest.mark.full
def test_a_run_in_nf4_has_the_codes_that_are_stored(tmp_path):
    c = config(write(tmp_path / "model"), lora=True, lora_rank=2, qlora_bnb=True, zero_level=3)
    run = from_config(c, make_mesh(jax.devices()[:4]), total_steps=1)
    weights = open_weights(c, run.model)
    assert weights is not None
    state = run.load_state(*readers(weights, run.coded))
    found = jax.device_get(state.weights["blocks"]["mlp"]["w_down"])
    for l in range(2):
        stored = weights.read_coded(f"model.layers.{l}.mlp.down_proj.weight", nf4.planned((64, 128)))
        chex.assert_trees_all_equal(jax.tree.map(lambda x, l=l: x[l], found), stored)


def test_what_is_stored_otherwise_is_refused(tmp_path):
    key = f"{NAME}.quant_state.bitsandbytes__nf4"
    state = json.loads(tensors()[key].tobytes())
    cases = {
        "blocksize: expected 64, got 128; quantise it so": {"blocksize": 128},
        "nested_blocksize: expected 256, got 128; quantise it so": {"nested_blocksize": 128},
        "quant_type: expected 'nf4', got 'fp4'; quantise it so": {"quant_type": "fp4"},
        "got float32 of [32, 96]; fetch the model before it was quantised": {"shape": [32, 96]},
        "got float32 of [1, 64, 64]; fetch the model before it was quantised": {"shape": [1, 64, 64]},
        "got float64 of [64, 64]; fetch the model before it was quantised": {"dtype": "float64"},
        "nested_offset: expected a finite number, got inf; fetch the file again, or quantise it again": {
            "nested_offset": float("inf")
        },
        "nested_offset: expected a value, got None; fetch the file again, or quantise it again": {
            "nested_offset": None
        },
        "shape: expected a list, got 64; fetch the file again, or quantise it again": {"shape": 64},
        "content: expected an object, got [64]; fetch the file again, or quantise it again": [64],
    }
    for i, (message, changes) in enumerate(cases.items()):
        said = changes
        if isinstance(changes, dict):
            said = {name: value for name, value in (state | changes).items() if value is not None}
        changed = np.frombuffer(json.dumps(said).encode(), np.uint8)
        with pytest.raises(ConfigError) as error:
            Weights(write(tmp_path / str(i), **{key: changed}))
        assert str(error.value).endswith(message)
    with pytest.raises(ConfigError, match=r"expected .*nested_absmax beside .*bnb_4bit_use_double_quant=True$"):
        Weights(write(tmp_path / "plain", **{f"{NAME}.nested_absmax": None}))
    changed = np.frombuffer(json.dumps(state | {"shape": [32, 64]}).encode(), np.uint8)
    weights = Weights(write(tmp_path / "size", **{key: changed}))
    with pytest.raises(ConfigError, match=r"expected 1024 bytes and 32 scales, got 2048 and 64; fetch the file again$"):
        weights.read(NAME)
    other = nf4.NUMBERS[::-1].copy()
    weights = Weights(write(tmp_path / "map", **{f"{NAME}.quant_map": other}))
    with pytest.raises(ConfigError, match=r"quant_map: expected the numbers of bitsandbytes' nf4, got others$"):
        weights.read(NAME)


def test_the_fixture_is_read_as_bitsandbytes_reads_it(tmp_path):
    """The names and the JSON that bitsandbytes itself wrote."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    of_case = {name: x for name, x in REFERENCE.items() if name.startswith("crossing.weight")}
    safetensors.numpy.save_file(of_case, tmp_path / SINGLE)
    weights = Weights(tmp_path)
    np.testing.assert_array_equal(weights.read("crossing.weight"), dequantised(reference("crossing")))


@pytest.mark.full
def test_experts_are_read_as_they_are_stored(tmp_path):
    """Each expert's codes and scales, in a run, and its numbers where a trained model is sampled from or merged."""
    of_experts = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    found = {name: x for name, x in tensors().items() if ".mlp." not in name}
    for l in range(2):
        moe = f"model.layers.{l}.block_sparse_moe"
        found[f"{moe}.gate.weight"] = np.random.default_rng(l).normal(size=(2, 64)).astype(np.float32)
        for e in range(2):
            for theirs, ours in of_experts.items():
                start = f"model.layers.{(l + e) % 2}.mlp.{ours}."
                parts = {name.removeprefix(start): x for name, x in tensors().items() if name.startswith(start)}
                found |= {f"{moe}.experts.{e}.{theirs}.{part}": x for part, x in parts.items()}
    folder = tmp_path / "model"
    folder.mkdir()
    given = CONFIG | {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 1}
    (folder / "config.json").write_text(json.dumps(given))
    safetensors.numpy.save_file(found, folder / SINGLE)
    c = config(folder, lora=True, lora_rank=2, qlora_bnb=True, zero_level=3)
    run = from_config(c, make_mesh(jax.devices()[:2]), total_steps=1)
    weights = open_weights(c, run.model)
    assert isinstance(weights, Weights)
    state = run.load_state(*readers(weights, run.coded))
    stored = jax.device_get(state.weights["blocks"]["mlp"]["w_down"])
    frozen = InBaseFormat(weights, run.model, "nf4", "float32")
    for l in range(2):
        name = f"model.layers.{l}.mlp.experts.down_proj.weight"
        expected = np.stack([numbers(f"model.layers.{(l + e) % 2}.mlp.down_proj.weight") for e in range(2)])
        np.testing.assert_allclose(weights.read(name), expected, rtol=1e-6)
        coded = weights.read_coded(name, nf4.planned((2, 64, 128)))
        chex.assert_trees_all_equal(jax.tree.map(lambda x, l=l: x[l], stored), coded)
        np.testing.assert_array_equal(frozen.read(name), weights.read(name))
    in_16_bits = InBaseFormat(Unquantised(weights, "as numbers"), run.model, "nf4", "float32")
    read = in_16_bits.read("model.layers.0.mlp.experts.up_proj.weight")
    again = base_formats.quantise(read, base_formats.FORMATS["nf4"].planned(read.shape))
    np.testing.assert_allclose(base_formats.dequantise(again, "float32"), read, rtol=1e-3)
    assert len(np.unique(read[0].reshape(-1, 64)[0])) <= 16


class Unquantised(DerivedTensors):
    """Tensors of which nobody sees that they are stored in few bits."""

    def read(self, name: str) -> np.ndarray:
        return self.base.read(name) + np.float32(1e-3) * np.random.default_rng(0).normal(size=self.shape(name))
