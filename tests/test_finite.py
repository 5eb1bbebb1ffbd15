"""NaN and infinity in weights, wherever they come from: named by tensor when they are read."""

from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from commands import convert
from test_adapters import save as save_adapter, theirs as adapter_tensors
from test_bitsandbytes import NAME as NF4_NAME, write as write_nf4
from test_checkpoint import plan_of, toy
from test_gguf import write_file as write_gguf
from test_huggingface import config, save_tokenizer, stored, write
from test_shards import FLOAT8, NAME, quantised, write_float8
from test_stored_bases import SIZES as FP8_SIZES, tensors as fp8_tensors

from surojax import CheckpointError, ConfigError
from surojax.assembly.from_config import from_config
from surojax.exchange import peft
from surojax.exchange.finite import PIECE, is_finite
from surojax.exchange.model_tensors import readers
from surojax.exchange.sources import open_weights
from surojax.inference.trained_model import load_trained
from surojax.placement.mesh import make_mesh
from surojax.run import checkpoint
from surojax.run.restore import restore_weights

FORMATS = (
    np.float64,
    np.float32,
    np.float16,
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e5m2,
)


@pytest.mark.parametrize("dtype", FORMATS)
def test_every_pattern_of_bits_is_finite_or_not(dtype):
    """Each of 8 bits; of more, those beside infinity, of both signs. Beside zeros, and in the last piece."""
    bits = 8 * np.dtype(dtype).itemsize
    patterns = np.arange(2**8, dtype=np.uint64)
    if bits > 8:
        infinity = int(np.array(np.inf, dtype).view(f"u{bits // 8}"))
        near = infinity + np.arange(-3, 4)
        patterns = np.array([*near, *(int(x) + 2 ** (bits - 1) for x in near), 0, 1, 2**bits - 1], np.uint64)
    numbers = patterns.astype(f"u{bits // 8}").view(dtype)
    expected = np.isfinite(numbers)
    assert 0 < expected.sum() < expected.size
    assert [is_finite(np.array([0, x], dtype)) for x in numbers] == expected.tolist()
    last = np.zeros(2 * PIECE + 1, dtype)
    assert is_finite(last) and is_finite(np.zeros((0, 3), dtype)) and is_finite(np.array(1, dtype))
    last[-1] = numbers[~expected][0]
    assert not is_finite(last)


def changed(tensors: dict[str, np.ndarray], name: str, value: float) -> dict[str, np.ndarray]:
    """With the last number of one tensor replaced."""
    array = tensors[name].copy()
    array.reshape(-1)[-1] = value
    return tensors | {name: array}


def as_bfloat16() -> dict[str, np.ndarray]:
    return {name: array.astype(ml_dtypes.bfloat16) for name, array in stored("llama").items()}


def load_state(folder: Path, **changes):
    """The state of a run from this folder, as `train` makes it."""
    c = config(folder, **changes)
    run = from_config(c, make_mesh(jax.devices()[:1]), total_steps=1)
    weights = open_weights(c, run.model)
    assert weights is not None
    return run.load_state(*readers(weights, run.coded))


def too_large_a_product() -> dict[str, np.ndarray]:
    """Of a number and a scale that are finite, in float32."""
    return changed(changed(quantised()[0], f"{NAME}_scale_inv", 3e38), NAME, 100.0)


FP8 = FP8_SIZES | {"quantization_config": FLOAT8 | {"weight_block_size": [128, 128]}}
QLORA = {"lora": True, "lora_rank": 2}


@pytest.mark.parametrize(
    "make, named, changes",
    [
        (lambda f: write(f, "llama", tensors=changed(as_bfloat16(), NAME, -np.inf)), NAME, {}),
        (lambda f: write(f, "llama", tensors=changed(stored("llama"), "lm_head.weight", np.nan)), "lm_head.weight", {}),
        (lambda f: write_float8(f, changed(quantised()[0], NAME, np.nan)), NAME, {}),
        (lambda f: write_float8(f, changed(quantised()[0], f"{NAME}_scale_inv", np.inf)), f"{NAME}_scale_inv", {}),
        (
            lambda f: write_float8(f, changed(quantised()[0], f"{NAME}_scale_inv", 3e38)),
            NAME,
            {},
        ),  # too large a product
        (
            lambda f: write_float8(f, changed(fp8_tensors(), f"{NF4_NAME}_scale_inv", np.nan), **FP8),
            f"{NF4_NAME}_scale_inv",
            QLORA | {"qlora_fp8": True},
        ),
        (
            lambda f: write_nf4(f, **{f"{NF4_NAME}.nested_absmax": np.array([np.nan], np.float32)}),
            f"{NF4_NAME}.nested_absmax",
            QLORA | {"qlora_bnb": True},
        ),
        (
            lambda f: write_gguf(f.with_suffix(".gguf"), "llama", tensors=changed(stored("llama"), NAME, np.nan)),
            "blk.0.ffn_up.weight",
            {},
        ),
    ],
    ids=["bfloat16", "float32", "float8", "scale", "product", "read as FP8", "read as NF4", "gguf"],
)
def test_weights_that_are_not_finite_are_named(tmp_path, make, named, changes):
    with pytest.raises(
        ConfigError, match=rf"^model_path: .*: expected finite numbers, got NaN or infinity in {named};"
    ):
        load_state(make(tmp_path / "model"), **changes)


def test_evaluate_and_generate_do_not_open_a_model_that_is_not_finite(tmp_path):
    """Both open models by `load_trained`, which reads another way than a run."""
    folder = write(tmp_path / "model", "llama", tensors=changed(stored("llama"), NAME, np.inf))
    save_tokenizer(folder / "tokenizer.json")
    with pytest.raises(ConfigError, match=rf"expected finite numbers, got NaN or infinity in {NAME}; fetch"):
        load_trained(folder)


def test_an_adapter_that_is_not_finite_is_named(tmp_path):
    base = convert.open_model(write(tmp_path / "base", "llama"))
    for name in adapter_tensors("lora"):
        folder = save_adapter(tmp_path / name, "lora", changed(adapter_tensors("lora"), name, np.nan))
        with pytest.raises(
            ConfigError, match=rf"^adapter: .*: expected finite numbers, got NaN or infinity in {name};"
        ):
            peft.read_adapter(folder, base.model)


def test_a_checkpoint_that_is_not_finite_is_not_restored(tmp_path, monkeypatch):
    """None is written so, but for the sake of one that is: its checksums agree."""
    seen = checkpoint.checksums
    monkeypatch.setattr(checkpoint, "checksums", lambda **trees: (seen(**trees)[0], []))
    state = toy(1)
    for tree in (state.master, state.weights):
        tree["blocks"]["a"] = tree["blocks"]["a"].at[1, 7].set(np.inf)
    with checkpoint.Checkpoints(tmp_path, save_total_limit=2) as checkpoints:
        checkpoints.save(state, {"step": 1})
    with pytest.raises(CheckpointError, match=r"\(weights/blocks/a bfloat16 holds NaN or infinity\)"):
        restore_weights(tmp_path / "checkpoints" / "1", plan_of(state.weights))
