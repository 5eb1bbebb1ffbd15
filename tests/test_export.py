"""Models out: to the bit what came in, and files that the safetensors library and transformers' keys agree with.

That transformers loads the exports with equal logits is recorded by fixtures/check_exports.py.
"""

import collections
import itertools
import json
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import zlib
from pathlib import Path

import chex
import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from commands import convert, generate
from small import quick_at
from test_huggingface import CASES, before_5, config, hf_config, save_tokenizer, stored, write
from test_rewards import Drawn

from surojax import CheckpointError, ConfigError, default_config, train
from surojax.assembly.from_config import from_config
from surojax.exchange import compressed, config_json, export as exporting, sources
from surojax.exchange.huggingface import model_fields
from surojax.exchange.model_tensors import INDEX, SINGLE, Weights, readers
from surojax.exchange.shards import Shard, StoredTensor, write_shard
from surojax.families.family import BY_EXPERT, ExpertFiles
from surojax.families.registry import FAMILIES
from surojax.inference import parity
from surojax.inference.trained_model import load_trained
from surojax.numerics import base_formats
from surojax.placement.mesh import make_mesh


def tensors_in(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a folder, as the safetensors library reads them."""
    found: dict[str, np.ndarray] = {}
    for file in sorted(folder.glob("*.safetensors")):
        part = safetensors.numpy.load_file(file)
        assert not part.keys() & found.keys()
        found |= part
    return found


def fields(folder: Path, **changes):
    """The `model` fields that a run from this folder has."""
    return config(folder, **changes).model.to_dict()


@pytest.mark.parametrize("case", quick_at([(case,) for case in CASES], 1, 5))
def test_in_and_out_is_equal_to_the_bit(tmp_path, case):
    """Names, values, and a config.json that reads back as the same model; and of bfloat16 as well."""
    folder = write(tmp_path / "in", case, shards=2)
    out = convert.convert(folder, tmp_path / "out", dtype="float32")
    found = tensors_in(out)
    chex.assert_trees_all_equal(found, stored(case))
    assert fields(out) == fields(folder)
    said = json.loads((out / "config.json").read_text())
    assert said["dtype"] == said["torch_dtype"] == "float32" and said["architectures"][0].endswith("ForCausalLM")
    halves = {name: array.astype(ml_dtypes.bfloat16) for name, array in stored(case).items()}
    folder = write(tmp_path / "halves", case, tensors=halves)
    chex.assert_trees_all_equal(tensors_in(convert.convert(folder, tmp_path / "out16")), halves)


@pytest.mark.parametrize("dtype", exporting.DTYPES)
def test_the_dtype_is_the_one_that_was_asked_for(tmp_path, dtype):
    """Rounded to the nearest as jax rounds."""
    out = convert.convert(write(tmp_path / "in", "llama"), tmp_path / "out", dtype=dtype)
    expected = {name: np.asarray(jax.numpy.asarray(x).astype(dtype)) for name, x in stored("llama").items()}
    chex.assert_trees_all_equal(tensors_in(out), expected)
    assert json.loads((out / "config.json").read_text())["dtype"] == dtype


@pytest.mark.full(after=1)
@pytest.mark.parametrize("dtype, largest", [("fp8", 2**-4), ("nvfp4", 1 / 6 + 2**-4)])
def test_matrices_of_blocks_are_written_as_vllm_reads_them(tmp_path, dtype, largest):
    """Files of compressed-tensors, whose reader takes them (fixtures/check_compressed.py). No torch is needed here.

    largest: error of a number, relative to the largest magnitude of its block: half a step of e4m3; half the largest
    step of e2m1, which has 6 for that magnitude, and half a step of the block's scale.
    """
    out = convert.convert(write(tmp_path / "in", "llama"), tmp_path / "out", dtype=dtype)
    said = json.loads((out / "config.json").read_text())
    assert said["dtype"] == "bfloat16" and said["quantization_config"]["ignore"] == ["lm_head"]
    group = said["quantization_config"]["config_groups"]["group_0"]
    assert group["format"] == {"fp8": "float-quantized", "nvfp4": "nvfp4-pack-quantized"}[dtype]
    shard = Shard(out / SINGLE)
    parts = list(compressed.FORMATS[dtype].planned((16, 16)))
    names = set(shard.entries)
    for name, tensor in stored("llama").items():
        if "proj" not in name:
            expected = tensor.astype(ml_dtypes.bfloat16)
            assert (shard.read(name) == expected).all() and shard.entries[name].dtype == expected.dtype
            names.remove(name)
            continue
        tensors = [shard.read(name.removesuffix("weight") + part) for part in parts]
        names -= {name.removesuffix("weight") + part for part in parts}
        rows, columns = (128, 128) if dtype == "fp8" else (1, 16)
        errors = np.abs(compressed.dequantised(dtype, tensors) - tensor)
        for i in range(0, tensor.shape[0], rows):
            for j in range(0, tensor.shape[1], columns):
                block = np.abs(tensor[i : i + rows, j : j + columns])
                assert errors[i : i + rows, j : j + columns].max() <= largest * block.max()
    assert not names
    if dtype == "nvfp4":  # vLLM multiplies with them as one matrix
        for group in (("self_attn.q", "self_attn.k", "self_attn.v"), ("mlp.gate", "mlp.up")):
            scales = {float(shard.read(f"model.layers.1.{x}_proj.weight_global_scale")[0]) for x in group}
            most = max(float(np.abs(stored("llama")[f"model.layers.1.{x}_proj.weight"]).max()) for x in group)
            assert len(scales) == 1 and scales.pop() == pytest.approx(448 * 6 / most, rel=1e-6)


@pytest.mark.parametrize("dtype, setting", quick_at([("fp8", "qlora_fp8"), ("nvfp4", "qlora_fp4")], 0))
def test_folders_in_fp8_and_nvfp4_are_read_again(tmp_path, dtype, setting):
    """Their numbers are those that were written; as a base of QLoRA, their codes and scales."""
    out = convert.convert(write(tmp_path / "in", "llama"), tmp_path / "out", dtype=dtype)
    shard = Shard(out / SINGLE)
    parts = list(compressed.FORMATS[dtype].planned((16, 16)))
    c = config(out, lora=True, **{setting: True})
    run = from_config(c, make_mesh(jax.devices()[:1]), 1)
    weights = sources.open_weights(c, run.model)
    assert isinstance(weights, Weights) and weights.names == stored("llama").keys()
    numbers = {name: weights.read(name) for name in weights.names}
    for name, found in numbers.items():
        if "proj" not in name:
            np.testing.assert_array_equal(found, shard.read(name))
            continue
        tensors = [shard.read(name.removesuffix("weight") + part) for part in parts]
        np.testing.assert_array_equal(found, compressed.dequantised(dtype, tensors))
        coded = weights.read_coded(name, base_formats.FORMATS[dtype].planned(found.shape))
        np.testing.assert_array_equal(np.asarray(coded.codes).view(np.uint8), tensors[0].view(np.uint8))
        assert weights.format_of(name) == dtype
    again = tensors_in(convert.convert(out, tmp_path / "again", dtype="float32"))
    chex.assert_trees_all_equal(again, {name: x.astype(np.float32) for name, x in numbers.items()})
    assert "quantization_config" not in json.loads((tmp_path / "again/config.json").read_text())


@pytest.mark.parametrize(
    "dtype, change, message",
    [
        ("fp8", {"strategy": "channel"}, "or in NVFP4, got 'compressed-tensors' of another kind"),
        ("nvfp4", {"num_bits": 8}, "or in NVFP4, got 'compressed-tensors' of another kind"),
        ("fp8", {"block_structure": [16, 16]}, r"weight_scale: expected \[\d, \d\] scales of blocks \[16, 16\] for"),
    ],
)
def test_other_formats_of_compressed_tensors_are_refused(tmp_path, dtype, change, message):
    out = convert.convert(write(tmp_path / "in", "llama"), tmp_path / "out", dtype=dtype)
    said = json.loads((out / "config.json").read_text())
    said["quantization_config"]["config_groups"]["group_0"]["weights"].update(change)
    (out / "config.json").write_text(json.dumps(said))
    with pytest.raises(ConfigError, match=message):
        convert.open_model(out)


def test_a_damaged_scale_of_nvfp4_is_refused(tmp_path):
    out = convert.convert(write(tmp_path / "in", "llama"), tmp_path / "out", dtype="nvfp4")
    name = "model.layers.1.mlp.up_proj.weight"
    for part, value, message in (
        ("_global_scale", np.zeros(1, np.float32), f"{name}_global_scale: expected more than 0, got 0.0; fetch"),
        ("_scale", np.zeros((1, 1), ml_dtypes.float8_e4m3fn), f"{name}: expected codes .* one global scale, got"),
    ):
        shard = Shard(out / SINGLE)
        tensors = {name: shard.read(name) for name in shard.entries} | {name + part: value}
        folder = tmp_path / part
        shutil.copytree(out, folder)
        planned = {name: StoredTensor(x.shape, x.dtype) for name, x in tensors.items()}
        write_shard(folder / SINGLE, planned, iter(tensors.values()))
        with pytest.raises(ConfigError, match=message):
            convert.convert(folder, tmp_path / "again")


FUSED = ExpertFiles(only=True)
NARROW = {"gate": (40, 32), "up": (40, 32), "down": (32, 40)}


def test_what_cannot_be_in_fp8_or_nvfp4_is_refused(tmp_path):
    """Nothing is written."""
    narrow = {f"model.layers.{l}.mlp.{x}_proj.weight": shape for l in range(2) for x, shape in NARROW.items()}
    cut = stored("llama") | {name: stored("llama")[name][:rows, :columns] for name, (rows, columns) in narrow.items()}
    for case, tensors, changes, dtype, message in [
        ("llama", None, {}, "nvfp5", "expected one of bfloat16, float16, float32, fp8, nvfp4, mxfp4, got 'nvfp5'"),
        (
            "llama",
            cut,
            {"intermediate_size": 40},
            "nvfp4",
            "of multiples of 16 numbers for nvfp4, got 40 in mlp.w_down",
        ),
    ]:
        folder = write(tmp_path / dtype, case, tensors=tensors, **changes)
        with pytest.raises(ConfigError, match=message):
            convert.convert(folder, tmp_path / "out", dtype=dtype)
        assert not (tmp_path / "out").exists()
    with_experts = default_config()
    with_experts.model.update({"num_experts": 4, "num_experts_per_tok": 2})
    model = from_config(with_experts, make_mesh(jax.devices()[:1]), 1).model
    for files, together, change in ((BY_EXPERT, True, "leave --experts-together out"), (FUSED, False, "use bfloat16")):
        message = f"--dtype: expected a tensor for each expert for fp8, got one for all experts of a layer; {change}"
        with pytest.raises(ConfigError, match=message):
            compressed.check_matrices("fp8", model, files, together=together)


SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
OF_GLM = {
    "scoring_func": "sigmoid",
    "routed_scaling_factor": 1.5,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
TOGETHER = {
    "q_proj": "qkv",
    "k_proj": "qkv",
    "v_proj": "qkv",
    "gate_proj": "up",
    "up_proj": "up",
    "w1": "up",
    "w3": "up",
}


def scaled_with(name: str) -> tuple[str, str]:
    """What matrices with one global scale have in common: the module that they are in, such as one expert."""
    module, _, last = name.removesuffix(".weight").rpartition(".")
    return module, TOGETHER.get(last, last)


@pytest.mark.parametrize(
    "dtype, family, changes, router",
    quick_at(
        [
            ("nvfp4", "glm4_moe", OF_GLM, r"mlp\.gate"),
            ("fp8", "glm4_moe", OF_GLM, r"mlp\.gate"),
            ("nvfp4", "mixtral", {}, r"block_sparse_moe\.gate"),
        ],
        0,
    ),
)
def test_each_expert_has_scales_of_its_own_in_fp8_and_nvfp4(tmp_path, dtype, family, changes, router):
    """And routers are in bfloat16, which config.json says; what was written is read again."""
    c = default_config()
    c.model.update(SMALL | changes)
    model = from_config(c, make_mesh(jax.devices()[:1]), 1).model
    said = config_json.made(c.model.to_dict(), 64, {}, {family: FAMILIES[family]})
    folder = exporting.export(Drawn(model), model, said, {}, tmp_path / "in", dtype="float32")
    source, out = tensors_in(folder), convert.convert(folder, tmp_path / "out", dtype=dtype)
    ignored = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    assert ignored == ["lm_head", f"re:.*{router}$"]
    largest = collections.defaultdict(float)
    for name, x in source.items():
        largest[scaled_with(name)] = max(largest[scaled_with(name)], np.abs(x).max())
    shard = Shard(out / SINGLE)
    parts = compressed.FORMATS[dtype].planned((16, 16))
    of_experts = 0
    for name, x in source.items():
        stem = name.removesuffix("weight")
        if (
            x.ndim != 2
            or re.search(f"{router}.weight$", name)
            or name in ("model.embed_tokens.weight", "lm_head.weight")
        ):
            in_float32 = name.endswith("e_score_correction_bias")  # as transformers keeps it
            assert shard.read(name).dtype == (np.float32 if in_float32 else ml_dtypes.bfloat16), name
            continue
        expected = compressed.compressed_matrix(dtype, x, largest[scaled_with(name)])
        chex.assert_trees_all_equal([shard.read(stem + part) for part in parts], expected)
        source[name] = compressed.dequantised(dtype, expected)
        of_experts += ".experts." in name
    assert of_experts == (3 * 3 * (2 - changes.get("first_k_dense_replace", 0)))
    again = tensors_in(convert.convert(out, tmp_path / "again", dtype="float32"))
    for name, x in source.items():
        as_it_is = ".experts." in name or "_proj" in name or name.endswith("e_score_correction_bias")
        halved = x if as_it_is else x.astype(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(again[name], halved)


def test_files_are_as_large_as_asked_for(tmp_path):
    """A file ends before it is too large; the index says where each tensor is; one alone may be larger."""
    folder = write(tmp_path / "in", "llama")
    opened = convert.open_model(folder)
    limit = 20_000
    out = exporting.export(opened.tensors, opened.model, {}, {}, tmp_path / "out", dtype="float32", shard_bytes=limit)
    index = json.loads((out / INDEX).read_text())
    assert not (out / SINGLE).exists()
    files = sorted(set(index["weight_map"].values()))
    assert files == sorted(file.name for file in out.glob("*.safetensors")) and len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    sizes = []
    for file in files:
        part = safetensors.numpy.load_file(out / file)
        assert {name for name, at in index["weight_map"].items() if at == file} == part.keys()
        sizes.append(sum(array.nbytes for array in part.values()))
        assert sizes[-1] <= limit or len(part) == 1
    assert index["metadata"]["total_size"] == sum(sizes) == sum(x.nbytes for x in stored("llama").values())
    assert all(a + b > limit for a, b in itertools.pairwise(sizes))  # no file ends early
    chex.assert_trees_all_equal(tensors_in(out), stored("llama"))
    with safetensors.safe_open(out / files[0], framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_tied_head_is_written_once(tmp_path):
    """Also if the folder that came in has it twice."""
    twice = stored("llama3_rope")
    twice["lm_head.weight"] = twice["model.embed_tokens.weight"]
    out = convert.convert(write(tmp_path / "in", "llama3_rope", tensors=twice), tmp_path / "out")
    assert "lm_head.weight" not in tensors_in(out)


def two_heads() -> dict[str, np.ndarray]:
    """The tensors of a model that says its head is tied, with a head that is another matrix."""
    return stored("llama3_rope") | {"lm_head.weight": 2 * stored("llama3_rope")["model.embed_tokens.weight"][::-1]}


def test_a_head_that_is_not_the_embedding_it_is_tied_to_is_refused(tmp_path):
    """transformers computes it as it is, and warns: neither by a run nor by a command is it dropped."""
    folder = write(tmp_path / "in", "llama3_rope", tensors=two_heads())
    message = (
        r"^model_path: .*: expected lm_head\.weight equal to model\.embed_tokens\.weight, .*; set untied_head=True"
    )
    with pytest.raises(ConfigError, match=message):
        convert.convert(folder, tmp_path / "out")
    save_tokenizer(folder / "tokenizer.json")
    with pytest.raises(ConfigError, match=message):
        load_trained(folder)
    with pytest.raises(ConfigError, match=message):
        train(run_config(tmp_path, folder))
    assert not (tmp_path / "out").exists() and not (tmp_path / "run").exists()


def test_a_model_without_a_head_names_the_key_that_ties_it(tmp_path):
    folder = write(tmp_path / "in", "llama3_rope", tie_word_embeddings="absent")
    with pytest.raises(ConfigError, match=r"expected lm_head\.weight .*; set tie_word_embeddings to true there"):
        convert.open_model(folder)


@pytest.mark.parametrize(
    "case, changes, message",
    [
        ("llama", {"untied_head": True}, "expected false for a model whose head is not tied, got True; leave it out"),
        ("", {"untied_head": True}, "expected false without a model_path, got True; leave it out"),
    ],
)
def test_a_head_that_is_not_tied_cannot_be_untied(tmp_path, case, changes, message):
    with pytest.raises(ConfigError, match=f"^untied_head: {message}$"):
        config(write(tmp_path / "in", case) if case else "", **changes)


@pytest.mark.full
def test_a_tied_head_is_trained_apart_if_it_is_asked_for(tmp_path):
    """From the file to the export: the run, its checkpoint as it goes on, and a config.json that says so."""
    folder = write(tmp_path / "in", "llama3_rope", tensors=two_heads(), max_position_embeddings=77)
    save_tokenizer(folder / "tokenizer.json")
    c = run_config(tmp_path, folder, untied_head=True, max_steps=1, learning_rate=1e-30, weight_decay=0.0)
    first = train(c).state.master
    np.testing.assert_array_equal(first["outer"]["head"], two_heads()["lm_head.weight"])
    c.max_steps = 2
    master = train(c).state.master  # goes on
    out = convert.convert(tmp_path / "run", tmp_path / "out", dtype="float32")
    chex.assert_trees_all_equal(tensors_in(out), two_heads())
    said = json.loads((out / "config.json").read_text())
    assert (said["tie_word_embeddings"], said["max_position_embeddings"], said["model_type"]) == (False, 77, "llama")
    assert not config(out).model.tie_word_embeddings
    trained = load_trained(tmp_path / "run")
    assert trained.length == 77 > c.sequence_len
    chex.assert_trees_all_equal(jax.device_get(trained.weights), jax.device_get(master))


@pytest.mark.parametrize("case", CASES)
def test_both_spellings_of_rope_are_written(case):
    """transformers 4 reads rope_theta and rope_scaling, 5 rope_parameters, whichever the source had."""
    new = hf_config(case)
    old = before_5(hf_config(case))
    for source in (new, old):
        out = config_json.completed(source, "bfloat16")
        assert out["rope_parameters"] == new["rope_parameters"]
        for key in ("rope_theta", "rope_scaling", "rope_local_base_freq"):
            assert out.get(key) == old.get(key), key
        assert model_fields(out) == model_fields(source)
    out["rope_scaling"] = {"rope_type": "linear", "factor": 3.0}
    with pytest.raises(ConfigError, match="expected rope_scaling or rope_parameters, got both"):
        model_fields(out)


OTHERS = ("yarn", "yarn_mscale", "ministral3")  # written with all that transformers infers


@pytest.mark.parametrize("case", [case for case in CASES if case not in OTHERS])
def test_a_config_is_made_of_the_fields(case):
    """What transformers' classes would write for the same model, as far as it changes the arithmetic."""
    model = default_config().model.to_dict() | model_fields(hf_config(case))
    made = config_json.made(model, 512, {"bos_token_id": None, "eos_token_id": 7})
    theirs = hf_config(case)
    same = {key for key in theirs if key not in ("dtype", "transformers_version", "use_cache", "pad_token_id")}
    same -= {"bos_token_id", "eos_token_id", "pretraining_tp", "max_window_layers", "layer_types", "head_dim"}
    same -= {"_sliding_window_pattern", "use_bidirectional_attention"}
    if not theirs.get("use_sliding_window", True):
        same -= {"sliding_window", "use_sliding_window"}
    assert {key: made.get(key) for key in same} == {key: theirs[key] for key in same}
    assert made["eos_token_id"] == 7 and made["max_position_embeddings"] == 512
    windows = case in ("qwen3_windows", "smollm3_windows") or case.startswith("gemma")
    assert made.get("layer_types") == (theirs["layer_types"] if windows else None)


def test_a_config_is_made_with_what_transformers_infers():
    """YaRN's factor of attention where mscale said it, and Ministral 3's growing queries."""
    for case in OTHERS:
        model = model_fields(hf_config(case))
        made = config_json.made(model, 512, {})
        assert config_json.agrees(made, model) and made["rope_parameters"]["rope_type"] == "yarn"
    assert made["model_type"] == "ministral3" and made["rope_parameters"]["llama_4_scaling_beta"] == 0.4


def test_gemma_without_windows_has_a_number_for_them():
    """transformers makes a mask of it even if no layer has one."""
    made = config_json.made(
        model_fields(hf_config("gemma2")) | {"sliding_window": 0, "sliding_window_pattern": 0}, 512, {}
    )
    assert made["sliding_window"] == 4096 and made["layer_types"] == ["full_attention"] * 4


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"attention_bias": True, "qk_norm": True}, r"qwen2 does not have qk_norm=True"),
        ({"sandwich_norms": True}, r"llama does not have sandwich_norms=True"),
        ({"sliding_window": 8, "rope_local_base_freq": 5.0}, r"mistral does not have rope_local_base_freq=5\.0"),
        ({"rope_partial_rotary_factor": 0.5}, r"llama does not have rope_partial_rotary_factor=0\.5"),
        ({"attention_bias": True, "head_dim": 16}, r"llama does not have attention_bias=True"),
    ],
)
def test_a_model_of_no_family_is_refused_by_name(changes, message):
    model = default_config().model.to_dict() | changes
    with pytest.raises(ConfigError, match=f"^export: expected fields of a family.*: {message}$"):
        config_json.made(model, 512, {})


# -- Refusals ---------------------------------------------------------------------------------------------------------


def files_under(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_a_folder_that_is_not_empty_is_refused(tmp_path):
    folder = write(tmp_path / "in", "llama")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"^export: expected a folder that is new or empty, got .*; choose another"):
        convert.convert(folder, tmp_path / "out")
    assert files_under(tmp_path / "out") == {"mine.txt"}
    (tmp_path / "out" / "mine.txt").unlink()
    convert.convert(folder, tmp_path / "out")  # an empty one is taken
    assert files_under(tmp_path) == {"in", "in/config.json", f"in/{SINGLE}", "out", "out/config.json", f"out/{SINGLE}"}


def test_a_tokenizer_with_more_ids_than_the_model_is_refused_everywhere(tmp_path):
    """Of generate and evaluate, of convert, and of its --check."""
    folder = write(tmp_path / "in", "llama")
    save_tokenizer(folder / "tokenizer.json", words=97)
    message = (
        r"^tokenizer: expected at most 96 tokens, .*, got 97; give the model's own tokenizer, or add the rows with "
    )
    with pytest.raises(ConfigError, match=message):
        generate.load_trained(folder)
    with pytest.raises(ConfigError, match=message):
        convert.convert(folder, tmp_path / "out")
    with pytest.raises(ConfigError, match=message):
        parity.compare_with_transformers(folder, str(tmp_path / "nowhere"))
    assert not (tmp_path / "out").exists()


def test_a_link_to_an_empty_folder_is_taken(tmp_path):
    folder = write(tmp_path / "in", "llama")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    assert convert.convert(folder, tmp_path / "link") == (tmp_path / "empty").resolve()
    assert (tmp_path / "link").is_symlink() and (tmp_path / "link" / SINGLE).is_file()
    with pytest.raises(ConfigError, match=r"^export: expected a folder that is new or empty"):
        convert.convert(folder, tmp_path / "link")


def test_a_folder_that_cannot_be_made_is_refused(tmp_path, monkeypatch):
    folder = write(tmp_path / "in", "llama")
    (tmp_path / "file").write_text("")
    before = files_under(tmp_path)
    with pytest.raises(ConfigError, match=r"^export: expected a folder that can be made, .*\(it is a file\)"):
        convert.convert(folder, tmp_path / "file")
    with pytest.raises(ConfigError, match=r"^export: expected a folder that can be made, .*file is no folder\)"):
        convert.convert(folder, tmp_path / "file" / "out")
    monkeypatch.setattr(exporting.os, "access", lambda *_: False)  # root may write anywhere
    with pytest.raises(ConfigError, match=r"^export: expected a folder that can be made, .*cannot be written\)"):
        convert.convert(folder, tmp_path / "out")
    monkeypatch.undo()
    monkeypatch.setattr(exporting.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(0, 0, 1000))
    with pytest.raises(ConfigError, match=r"^export: expected 0\.1 MiB free for .*, got 0\.0 MiB"):
        convert.convert(folder, tmp_path / "out")
    assert files_under(tmp_path) == before


def test_unknown_dtypes_and_numbers_beyond_them_are_refused(tmp_path):
    tensors = stored("llama") | {"model.norm.weight": np.full(32, 1e6, np.float32)}
    folder = write(tmp_path / "in", "llama", tensors=tensors)
    with pytest.raises(
        ConfigError, match=r"^--dtype: expected one of bfloat16, float16, float32, fp8, nvfp4, mxfp4, got 'int4'"
    ):
        convert.convert(folder, tmp_path / "out", dtype="int4")
    with pytest.raises(
        ConfigError, match=r"^--dtype: expected numbers within float16, got larger .* model\.norm\.weight"
    ):
        convert.convert(folder, tmp_path / "out", dtype="float16")
    assert files_under(tmp_path) == {"in", "in/config.json", f"in/{SINGLE}"}


def test_what_is_damaged_while_it_is_read_leaves_nothing(tmp_path):
    folder = write(tmp_path / "in", "llama")
    opened = convert.open_model(folder)
    whole = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=r"^model_path: cannot read .*; fetch the model again$"):
        exporting.export(opened.tensors, opened.model, {}, {}, tmp_path / "new" / "parents" / "out", dtype="float32")
    assert files_under(tmp_path) == {"in", "in/config.json", f"in/{SINGLE}"}


def test_a_killed_export_leaves_nothing_that_looks_whole(tmp_path):
    """kill -9 after the third tensor; the same command then writes all of it."""
    folder = write(tmp_path / "in", "llama")
    code = f"""
        import os, signal
        from surojax.convert import main
        from surojax.exchange.model_tensors import Weights
        read, count = Weights.read, [0]
        def killed(self, name):
            count[0] += 1
            if count[0] == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            return read(self, name)
        Weights.read = killed
        main(["--checkpoint", {str(folder)!r}, "--out", {str(tmp_path / "out")!r}])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL
    left = [path for path in tmp_path.iterdir() if path.name != "in"]
    assert len(left) == 1 and left[0].name.endswith(".unfinished") and not (left[0] / "config.json").exists()
    for other in (".out.x.y.unfinished", ".out2.1.unfinished"):  # of other paths
        (tmp_path / other).mkdir()
    (tmp_path / ".out.12345.unfinished").mkdir()  # as earlier versions called it
    convert.convert(folder, tmp_path / "out")
    Weights(tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"in", "out", ".out.x.y.unfinished", ".out2.1.unfinished"}


def test_what_another_process_is_writing_is_not_deleted(tmp_path):
    """And of the two that write to one path the last one is refused, since the path then has a model."""
    folder = write(tmp_path / "in", "llama")
    opened = convert.open_model(folder)
    with (
        pytest.raises(ConfigError, match=r"^export: cannot write .*out \(Directory not empty\); choose another"),
        exporting.unfinished_beside(tmp_path / "out", 0) as unfinished,
    ):
        unfinished.mkdir()
        (unfinished / "config.json").write_text("{}")
        exporting.export(opened.tensors, opened.model, opened.config, {}, tmp_path / "out")
        assert (unfinished / "config.json").is_file()
    assert {path.name for path in tmp_path.iterdir()} == {"in", "out"}
    Weights(tmp_path / "out")


# -- Runs -------------------------------------------------------------------------------------------------------------


def run_config(tmp_path: Path, folder: Path, **changes):
    text = " ".join(f"w{i * i % 60}" for i in range(3000))
    (tmp_path / "text.txt").write_text("\n\n".join([text] * 3))
    c = default_config()
    c.update({"model_path": str(folder), "model_dtype": "float32", "data": str(tmp_path / "text.txt")})
    c.update({"output_dir": str(tmp_path / "run"), "sequence_len": 16, "max_steps": 2, "learning_rate": 1e-2})
    c.update({"sample_tokens": 0, "eval_batches": 1} | changes)
    return c


@pytest.mark.full
def test_a_run_is_exported_and_goes_on_without_its_model(tmp_path):
    """The export has the master weights to the bit and the model's own files; a lost original is not needed again."""
    folder = write(tmp_path / "in", "qwen2")
    save_tokenizer(folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>", "chat_template": "{{ messages }}"}')
    (folder / "generation_config.json").write_text('{"eos_token_id": 0}')
    c = run_config(tmp_path, folder)
    result = train(c)
    folder.rename(tmp_path / "elsewhere")

    out = convert.convert(tmp_path / "run", tmp_path / "out", dtype="float32")
    chex.assert_trees_all_equal(read_master(out), jax.device_get(result.state.master))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (out / name).read_bytes() == (tmp_path / "elsewhere" / name).read_bytes()
    assert fields(out) == result_fields(tmp_path)

    save_tokenizer(tmp_path / "tokenizer.json", words=61)
    for opened in (convert.open_model, generate.load_trained):
        with pytest.raises(ConfigError, match=r"^tokenizer: expected .*, which the checkpoint was trained with, got "):
            opened(tmp_path / "run", str(tmp_path / "tokenizer.json"))
    _, weights, *_ = generate.load_trained(tmp_path / "run")
    chex.assert_trees_all_equal(jax.device_get(weights), jax.device_get(result.state.weights))
    _, weights, *_ = generate.load_trained(out)
    chex.assert_trees_all_equal(jax.device_get(weights), jax.device_get(result.state.weights))
    c.max_steps = 3
    assert int(train(c).state.step) == 3
    c.model_path = str(tmp_path / "another")
    with pytest.raises(ConfigError, match=r"expected a folder with config\.json, got .*another"):
        train(c)


def read_master(folder: Path) -> dict:
    """The weights of an exported folder as a run that starts from it has them."""
    run = from_config(config(folder), make_mesh(jax.devices()[:1]), total_steps=1)
    return jax.device_get(run.load_state(*readers(Weights(folder))).master)


def result_fields(tmp_path: Path) -> dict:
    return fields(tmp_path / "elsewhere")


@pytest.mark.full
def test_the_command_trains_and_exports(tmp_path, capsys, monkeypatch):
    """A model without a source: config.json is made; the folder is refused before training starts."""
    (tmp_path / "config.py").write_text(
        textwrap.dedent(f"""
        from surojax import default_config

        def get_config():
            c = default_config()
            c.model.update({{"vocab_size": 257, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}})
            c.model.update({{"num_attention_heads": 2, "num_key_value_heads": 1, "attention_bias": True}})
            c.update({{"data": {str(tmp_path / "text.txt")!r}, "output_dir": {str(tmp_path / "run")!r}}})
            c.update({{"max_steps": 1, "sequence_len": 16, "sample_tokens": 0, "eval_batches": 1}})
            return c
        """)
    )
    (tmp_path / "text.txt").write_text("\n\n".join("once upon a time " * 20 for _ in range(4)))
    from surojax.train import main

    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    arguments = ["--config", str(tmp_path / "config.py"), "--export"]
    with pytest.raises(SystemExit, match=r"export: expected a folder that is new or empty"):
        main([*arguments, str(tmp_path / "full")])
    with pytest.raises(SystemExit, match=r"export: .*qwen2 does not have qk_norm=True"):
        main([*arguments, str(tmp_path / "out"), "--config.model.qk_norm"])
    with pytest.raises(SystemExit, match=r"tokenizer: expected a tokenizer\.json, of which a \.gguf file has tokens"):
        main([*arguments, str(tmp_path / "out.gguf")])
    assert not (tmp_path / "run").exists()
    main([*arguments, str(tmp_path / "out")])
    assert f"exported: {tmp_path / 'out'}" in capsys.readouterr().out
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (said["model_type"], said["eos_token_id"], said["max_position_embeddings"]) == ("qwen2", 256, 16)
    found = tensors_in(tmp_path / "out")
    assert found["model.layers.1.self_attn.q_proj.bias"].dtype == ml_dtypes.bfloat16
    _, weights, *_ = generate.load_trained(tmp_path / "run")  # bfloat16, cast from the master weights
    expected = np.asarray(weights["blocks"]["mlp"]["w_up"])
    np.testing.assert_array_equal(found["model.layers.1.mlp.up_proj.weight"], expected[1])

    damage(tmp_path / "run" / "checkpoints" / "1" / "master")
    with pytest.raises(CheckpointError, match="cannot be read"):
        convert.convert(tmp_path / "run", tmp_path / "again")
    assert not (tmp_path / "again").exists()


def damage(item: Path) -> None:
    """Flips a bit in the middle of each large file, since not all are read; the list of files agrees afterwards."""
    listed = item.parent / "files.json"
    found = json.loads(listed.read_text())
    large = [path for path in item.rglob("*") if path.is_file() and path.stat().st_size > 1000]
    assert large
    for file in large:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        found[str(file.relative_to(item.parent))]["crc32"] = zlib.crc32(bytes(content))
    listed.write_text(json.dumps(found))


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"^--checkpoint: expected a checkpoint, a run's output_dir, a Hugging Face"):
        convert.convert(tmp_path, tmp_path / "out")
    with pytest.raises(SystemExit, match=r"^surojax\.convert: error: expected --checkpoint MODEL and --out PATH"):
        convert.main([])
    assert sources.is_model("owner/name") and not sources.is_model(tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_folder_is_sampled_from_in_its_own_dtype(tmp_path, dtype):
    """16 bits as bfloat16; without a tokenizer it says what to give."""
    folder = convert.convert(write(tmp_path / "in", "llama"), tmp_path / "out", dtype=dtype)
    with pytest.raises(
        ConfigError,
        match=r"^tokenizer: expected tokenizer\.json in .*out, got none; save a fast .*, or pass --tokenizer",
    ):
        generate.load_trained(folder)
    save_tokenizer(folder / "tokenizer.json")
    _, weights, *_ = generate.load_trained(folder)
    computed = "float32" if dtype == "float32" else "bfloat16"
    found = weights["blocks"]["mlp"]["w_up"]
    assert found.dtype == computed
    expected = np.asarray(jax.numpy.asarray(stored("llama")["model.layers.1.mlp.up_proj.weight"]).astype(dtype))
    np.testing.assert_array_equal(found[1], expected.astype(computed))
