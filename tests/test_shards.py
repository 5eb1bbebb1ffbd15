"""Safetensors files, read and written here, against the library's own; float8 with scales; what is damaged."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from commands import convert
from test_huggingface import config, stored, write

from surojax import ConfigError
from surojax.exchange import shards
from surojax.exchange.model_tensors import INDEX, SINGLE, Weights

NAME = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool"])
def test_files_are_those_of_the_library(tmp_path, dtype):
    """Both ways, with a scalar and an empty tensor."""
    rng = np.random.default_rng(0)
    tensors = {"b": rng.integers(0, 2, (3, 5)), "a": rng.integers(0, 2, 7), "c": np.array(1), "d": np.zeros((0, 4))}
    tensors = {name: array.astype(dtype) for name, array in tensors.items()}
    safetensors.numpy.save_file(tensors, tmp_path / "theirs")
    found = shards.Shard(tmp_path / "theirs")
    assert found.entries.keys() == tensors.keys()
    planned = {name: shards.StoredTensor(array.shape, array.dtype) for name, array in tensors.items()}
    shards.write_shard(tmp_path / "ours", planned, tensors.values())
    read = safetensors.numpy.load_file(tmp_path / "ours")
    for name, array in tensors.items():
        for other in (found.read(name), read[name]):
            assert other.dtype == array.dtype and other.shape == array.shape
            assert other.tobytes() == array.tobytes()


@pytest.mark.parametrize("piece", [1, 100, 1 << 20])
def test_parts_are_those_of_the_whole(tmp_path, monkeypatch, piece):
    """Of rows and of columns, which are read in pieces of all rows."""
    monkeypatch.setattr(shards, "PIECE_BYTES", piece)
    rng = np.random.default_rng(0)
    tensors = {"a": rng.random((2, 3)), "b": rng.random((7, 12)).astype(ml_dtypes.bfloat16), "c": rng.random((4, 6, 2))}
    safetensors.numpy.save_file(tensors, tmp_path / "file")
    file = shards.Shard(tmp_path / "file")
    for name, axis, parts in (("b", 1, 4), ("b", 0, 7), ("c", 1, 3), ("c", 0, 2)):
        for i, expected in enumerate(np.split(tensors[name], parts, axis)):
            np.testing.assert_array_equal(file.read_part(name, i, parts, axis), expected)


def header(path: Path, change) -> None:
    """Changes the header of a file in place; it becomes a file with another header of the right length."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    said = json.loads(content[8 : 8 + length])
    change(said)
    encoded = json.dumps(said).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + content[8 + length :])


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda said: said[NAME].update(dtype="F4"), "has the dtype F4, which is not known"),
        (lambda said: said[NAME].update(shape=[80, 33]), "of shape .*80, 33.* in F32 has 10240 bytes"),
        (lambda said: said[NAME].update(shape=[-80, -32]), "of shape"),
        (lambda said: said[NAME].pop("data_offsets"), "nothing useful of"),
        (lambda said: said[NAME].update(data_offsets=[10**6, 10**6 + 10240]), "its header says .* bytes, the file has"),
        (lambda said: said.update({NAME: 3}), "nothing useful of"),
        (lambda said: said[NAME].update(data_offsets=["0", "4"]), "nothing useful of"),
        (lambda said: said[NAME].update(dtype=["F32"]), "nothing useful of"),
        (lambda said: said.update(__metadata__=[1]), "__metadata__ of its header is list, not an object"),
        (lambda said: said.update(__metadata__="pt"), "__metadata__ of its header is str, not an object"),
    ],
)
def test_headers_that_cannot_be_are_refused(tmp_path, change, message):
    folder = write(tmp_path / "model", "llama")
    header(folder / SINGLE, change)
    with pytest.raises(ConfigError, match=rf"^model_path: cannot read .*{message}.*; fetch the model again$"):
        Weights(folder)


@pytest.mark.parametrize(
    "content", [b"", b"\x00" * 8, b"\xff" * 16, b"\x02\x00\x00\x00\x00\x00\x00\x00[]", b"\x04" + b"\x00" * 7 + b"abcd"]
)
def test_what_is_no_such_file_is_refused(tmp_path, content):
    folder = write(tmp_path / "model", "llama")
    (folder / SINGLE).write_bytes(content)
    with pytest.raises(ConfigError, match=r"^model_path: cannot read [^\n]*; fetch the model again$"):
        Weights(folder)


# -- Float8 -----------------------------------------------------------------------------------------------------------

BLOCK = (24, 20)  # divides neither the 80 rows of NAME nor its 32 columns
FLOAT8 = {"quant_method": "fp8", "weight_block_size": [*BLOCK], "activation_scheme": "dynamic", "fmt": "e4m3"}


def quantised(dtype=ml_dtypes.float8_e4m3fn) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(tensors with the layers' matrices in float8 and their scales, what they are by one multiplication a number).

    The last layer's are left as they are, in float16.
    """
    tensors, expected = dict(stored("llama")), dict(stored("llama"))
    for name, array in stored("llama").items():
        if name.startswith("model.layers.1."):
            tensors[name] = array.astype(np.float16)
            expected[name] = tensors[name].astype(np.float32)
        elif name.startswith("model.layers.0.") and array.ndim == 2:
            rows, columns = array.shape
            scales = np.random.default_rng(rows).uniform(0.5, 2, (-(-rows // BLOCK[0]), -(-columns // BLOCK[1])))
            scales = scales.astype(np.float32)
            tensors[name] = (array * 3).astype(dtype)
            tensors[f"{name}_scale_inv"] = scales
            expected[name] = np.zeros_like(array)
            for i in range(rows):
                for j in range(columns):
                    scale = scales[i // BLOCK[0], j // BLOCK[1]]
                    expected[name][i, j] = np.float32(tensors[name][i, j]) * scale
    return tensors, expected


def write_float8(folder: Path, tensors: dict[str, np.ndarray], **changes: Any) -> Path:
    """A folder with these tensors; the library takes float8 as bytes, and the header then says what they are."""
    in_float8 = {name for name, array in tensors.items() if array.dtype.itemsize == 1}
    as_bytes = {name: array.view(np.uint8) if name in in_float8 else array for name, array in tensors.items()}
    write(folder, "llama", tensors=as_bytes, **({"quantization_config": FLOAT8} | changes))

    def say(said: dict) -> None:
        for name in in_float8:
            said[name]["dtype"] = "F8_E4M3" if tensors[name].dtype == ml_dtypes.float8_e4m3fn else "F8_E5M2"

    header(folder / SINGLE, say)
    return folder


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_float8_is_multiplied_with_the_scales_of_its_blocks(tmp_path, dtype):
    """Blocks that divide neither rows nor columns; the last layer is not converted, so it is plain; and out again."""
    tensors, expected = quantised(dtype)
    folder = write_float8(tmp_path / "model", tensors)
    found = Weights(folder)
    assert found.names == expected.keys()
    for name, array in expected.items():
        read = found.read(name)
        assert read.shape == array.shape and read.astype(np.float32).tobytes() == array.tobytes(), name
    out = convert.convert(folder, tmp_path / "out", dtype="float32")
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    assert config(out).model == config(folder).model
    for name, array in safetensors.numpy.load_file(out / SINGLE).items():
        assert array.tobytes() == expected[name].tobytes()


@pytest.mark.parametrize(
    "change, config_changes, message",
    [
        (lambda t: t.pop(f"{NAME}_scale_inv"), {}, rf"has {NAME} in float8 without {NAME}_scale_inv"),
        (
            lambda t: t.update({f"{NAME}_scale_inv": np.ones((5, 3), np.float32)}),
            {},
            rf"{NAME}_scale_inv: expected \[4, 2\] scales of blocks \[24, 20\] for \[80, 32\], got \[5, 3\]",
        ),
        (
            lambda t: t.update({NAME: t[NAME].reshape(80, 4, 8), f"{NAME}_scale_inv": np.ones((4, 1), np.float32)}),
            {},
            rf"{NAME}_scale_inv: expected a matrix to scale in blocks \[24, 20\], got \[80, 4, 8\]",
        ),
        (
            lambda t: None,
            {"quantization_config": None},
            r"in float8, and config\.json no quantization_config that says how it is scaled",
        ),
        (lambda t: t.update({NAME: stored("llama")[NAME]}), {}, rf"has {NAME}_scale_inv, which a model with"),
    ],
)
def test_float8_without_its_scales_is_refused(tmp_path, change, config_changes, message):
    tensors, _ = quantised()
    change(tensors)
    folder = write_float8(tmp_path / "model", tensors, **config_changes)
    with pytest.raises(ConfigError, match=rf"^model_path: .*{message}[^\n]*$"):
        convert.convert(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_experts_of_which_some_are_in_float8_are_read_as_numbers(tmp_path):
    name = "model.layers.0.block_sparse_moe.experts.{}.w1.weight"
    plain = np.random.default_rng(0).normal(size=(48, 40)).astype(np.float32)
    codes = (3 * plain).astype(ml_dtypes.float8_e4m3fn)
    scales = np.full((2, 2), 0.5, np.float32)
    tensors = {name.format(0): codes, f"{name.format(0)}_scale_inv": scales, name.format(1): plain}
    weights = Weights(write_float8(tmp_path / "model", tensors, model_type="mixtral"))
    ours = "model.layers.0.mlp.experts.gate_proj.weight"
    assert weights.format_of(ours) == ""
    np.testing.assert_array_equal(weights.read(ours), np.stack([codes.astype(np.float32) / 2, plain]))


def test_an_index_that_cannot_be_read_is_refused(tmp_path):
    folder = write(tmp_path / "model", "llama", shards=2)
    (folder / INDEX).write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"^model_path: cannot read .*index\.json"):
        Weights(folder)


def test_a_header_names_tensors_in_any_order(tmp_path):
    """As the format allows; their numbers are where the offsets say."""
    arrays = {"b": np.float32([1, 2]), "a": np.float32([3]), "c": np.float32([4, 5, 6])}  # as they lie in the file
    offsets = np.cumsum([0, *(array.nbytes for array in arrays.values())])
    entries = {
        name: {"dtype": "F32", "shape": [array.size], "data_offsets": [int(offsets[i]), int(offsets[i + 1])]}
        for i, (name, array) in enumerate(arrays.items())
    }
    for names in ("abc", "cba", "bca"):
        header = json.dumps({name: entries[name] for name in names}).encode()
        file = tmp_path / f"{names}.safetensors"
        data = b"".join(array.tobytes() for array in arrays.values())
        file.write_bytes(len(header).to_bytes(8, "little") + header + data)
        shard = shards.Shard(file)
        for name, array in arrays.items():
            np.testing.assert_array_equal(shard.read(name), array)
        file.write_bytes(len(header).to_bytes(8, "little") + header.replace(b"[8, 12]", b"[4, 12]") + data)
        with pytest.raises(ValueError):
            shards.Shard(file)
