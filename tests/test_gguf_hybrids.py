"""Granite-4, Nemotron-H and Gemma 4 in GGUF files and back: what is of each layer, and in other shapes and numbers.

That llama.cpp computes such files as transformers computes the models is recorded by fixtures/check_gguf.py.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import safetensors.numpy
from small import quick_at
from test_deepseek import given, in_files
from test_experts import check_gguf_and_back

from surojax import ConfigError
from surojax.exchange.gguf import GgufTensors
from surojax.exchange.gguf_export import gguf_metadata
from surojax.exchange.gguf_file import Contents, open_file, read_numbers
from surojax.exchange.gguf_metadata import metadata_config
from surojax.exchange.huggingface import model_fields
from surojax.exchange.model_tensors import SINGLE
from surojax.families.mamba_keys import UNLIMITED

FULL, SLIDING = "full_attention", "sliding_attention"


def rotated(fraction: float) -> dict[str, Any]:
    """A fraction of whole pairs of channels, which comes back as it is."""
    full = {"rope_type": "proportional", "partial_rotary_factor": fraction, "rope_theta": 1000.0}
    return {"rope_parameters": {FULL: full, SLIDING: {"rope_type": "default", "rope_theta": 100.0}}}


BIASED = {"use_conv_bias": True}
DOUBLED = {"gemma4_e": (3,)}  # layers that share keys by a change, whose MLP is twice as wide then
# What a case's config.json has in place of what no file says, and the architecture of its file.
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "granite4": ({}, "granitehybrid"),
    "granite4_moe": ({"time_step_limit": UNLIMITED}, "granitehybrid"),
    "granite4_attention": ({}, "granite"),
    "nemotron_groups": (BIASED, "nemotron_h_moe"),
    "nemotron_dense": ({}, "nemotron_h"),
    "gemma4": (rotated(0.4), "gemma4"),
    "gemma4_plain": (rotated(0.5), "gemma4"),
    "gemma4_moe": (rotated(0.6), "gemma4"),
    "gemma4_moe_two": (rotated(1 / 3), "gemma4"),
    "gemma4_e": (rotated(0.4) | {"num_kv_shared_layers": 4}, "gemma4"),
    "gemma4_e_inputs": (rotated(1 / 3), "gemma4"),
    "gemma4_e_moe": (rotated(0.4), "gemma4"),
}
REFUSED = [
    ("granite4_tied", {}, "mamba_conv_bias=False"),  # llama.cpp ends without a word at such a file
    ("granite4_moe", {}, "mamba_dt_min=0.6"),
    ("granite4_moe_tied", {}, "num_key_value_heads="),  # no layer has any
    (
        "granite4_moe_tied",
        {"layer_types": [FULL] * 2},
        "expected true for granitemoe, whose queries and keys llama.cpp rotates in any case, got false",
    ),
    ("nemotron", {}, "no architecture of nemotron_h has layers of all these kinds"),
    ("nemotron_dense", {"time_step_min": 0.5}, "mamba_dt_min=0.5"),
    ("nemotron_groups", {}, "mamba_conv_bias=False"),
    ("gemma4_plain", {}, "rope_factor=2.0"),
    (
        "gemma4",
        {"max_position_embeddings": None},
        "max_position_embeddings: expected a number for a .gguf file, got No",
    ),
    ("gemma4_full", {}, "expected a layer with a window, without which llama.cpp ends at a file of gemma4, got none"),
    ("gemma4_e", {}, "since llama.cpp gives them those of these two, got 3 of 7 layers"),
    ("gemma4_e_inputs", {"vocab_size_per_layer_input": 50}, "vocab_size_per_layer_input=50"),
]
EXPERTS = {"blk.{bid}.ffn_gate_exps", "blk.{bid}.ffn_up_exps"}  # which llama.cpp reads too, of the package's one


def written(folder: Path, case: str) -> Path:
    """A case's folder in float32, with biases of convolutions if a change adds them."""
    folder.mkdir()
    said = given(case) | CASES[case][0]
    (folder / "config.json").write_text(json.dumps(said))
    tensors = {name: x.astype(np.float32) for name, x in in_files(case, "weight").items()}
    if CASES[case][0] is BIASED:
        taps = [name for name in tensors if name.endswith("conv1d.weight")]
        tensors |= {name.replace("weight", "bias"): tensors[name][:, 0, 0] for name in taps}
    for l in DOUBLED.get(case, ()):
        for name, axis in {"gate": 0, "up": 0, "down": 1}.items():
            name = f"model.layers.{l}.mlp.{name}_proj.weight"
            tensors[name] = np.concatenate([tensors[name], -2 * tensors[name]], axis)
    safetensors.numpy.save_file(tensors, folder / SINGLE)
    return folder


def go_and_back(tmp_path: Path, case: str) -> tuple[Contents, dict[str, Any], dict[str, np.ndarray]]:
    """(the header of the file, its metadata without the architecture, our tensors)."""
    out = check_gguf_and_back(
        written(tmp_path / "in", case), tmp_path / "out.gguf", rounded="A_log", also_known=EXPERTS
    )
    contents = open_file(out)
    architecture = contents.metadata["general.architecture"]
    assert architecture == CASES[case][1]
    said = {key.removeprefix(f"{architecture}."): value for key, value in contents.metadata.items()}
    tensors = GgufTensors(out)
    return contents, said, {name: tensors.read(name) for name in tensors.names}


@pytest.mark.parametrize("case", quick_at([(case,) for case in CASES], 1, 4, 10))
def test_models_go_to_gguf_and_back(tmp_path, case):
    """What llama.cpp has in other shapes and numbers, and what it says of each layer, by hand."""
    contents, said, ours = go_and_back(tmp_path, case)
    config = given(case) | CASES[case][0]
    types = config.get("layers_block_type") or config["layer_types"]
    attends = [l for l, name in enumerate(types) if name == FULL]
    if case.startswith("gemma4"):
        heads = {FULL: config["num_key_value_heads"], SLIDING: config["num_key_value_heads"]}
        of_full = (config.get("per_layer_config") or {}).get(str(attends[0]), {})
        heads[FULL] = of_full.get("num_key_value_heads") or heads[FULL]
        assert said["attention.head_count_kv"] == [heads[name] for name in types]
        assert (
            said["attention.key_length"] == said["rope.dimension_count"] == of_full.get("head_dim", config["head_dim"])
        )
        assert said["attention.key_length_swa"] == said["rope.dimension_count_swa"] == config["head_dim"]
        assert said["attention.sliding_window_pattern"] == [name == SLIDING for name in types]
        assert said["final_logit_softcapping"] == (config["final_logit_softcapping"] or 0)
        own = len(types) - config["num_kv_shared_layers"]
        with_values = [l for l in range(len(types)) if f"blk.{l}.attn_v.weight" in contents.tensors]
        assert with_values == [l for l in range(own) if not config["attention_k_eq_v"] or l not in attends]
        assert said["attention.shared_kv_layers"] == len(types) - own
        assert said["embedding_length_per_layer_input"] == config["hidden_size_per_layer_input"]
        pairs = said["attention.key_length"] // 2
        turned = int(pairs * config["rope_parameters"][FULL]["partial_rotary_factor"])
        expected = [1] * turned + [np.float32(1e30)] * (pairs - turned)
        np.testing.assert_array_equal(read_numbers(contents, "rope_freqs.weight"), expected)
        factor = read_numbers(contents, "blk.1.layer_output_scale.weight")
        np.testing.assert_array_equal(factor, ours["model.layers.1.layer_scalar"])
        if own < len(types):
            width = config["intermediate_size"]
            assert said["feed_forward_length"] == [width] * own + [2 * width] * (len(types) - own)
        if P := config["hidden_size_per_layer_input"]:
            table = read_numbers(contents, "per_layer_token_embd.weight")
            assert table.shape == (said["vocab_size"], len(types) * P)
            layer = ours["model.embed_tokens_per_layer.weight[:, layer 2]"]
            np.testing.assert_array_equal(table[:, 2 * P : 3 * P], layer)
            rows = read_numbers(contents, "per_layer_model_proj.weight")[2 * P : 3 * P]
            np.testing.assert_array_equal(rows, ours["model.per_layer_model_projection.weight[layer 2]"])
        return
    if said["general.architecture"] != "granite":
        heads = config["num_key_value_heads"]
        assert said["attention.head_count_kv"] == [heads if l in attends else 0 for l in range(len(types))]
    if case.startswith("nemotron"):
        width = config["moe_intermediate_size"] if "moe" in types else config["intermediate_size"]
        assert said["feed_forward_length"] == [width if name in ("moe", "mlp") else 0 for name in types]
    else:
        assert said.get("rope.scaling.finetuned", True) == (config["position_embedding_type"] == "rope")
        ours_of = {"embedding_scale": "embedding_multiplier", "residual_scale": "residual_multiplier"}
        ours_of |= {"logit_scale": "logits_scaling", "attention.scale": "attention_multiplier"}
        assert [said[key] for key in ours_of] == pytest.approx([config[key] for key in ours_of.values()])
        width, which = config["shared_intermediate_size"], "shexp" if config["num_local_experts"] else ""
        joined = ours["model.layers.1.shared_mlp.input_linear.weight"]
        for part, name in zip(np.split(joined, 2), ("gate", "up"), strict=True):
            theirs = "_".join(filter(None, ("blk.1.ffn", name, which)))
            np.testing.assert_array_equal(read_numbers(contents, f"{theirs}.weight"), part)
            assert len(part) == width
    for l in (l for l, name in enumerate(types) if name == "linear_attention"):
        start = f"model.layers.{l}.mamba."
        A_log, norm = ours[start + "A_log"], ours[start + "norm.weight"]
        np.testing.assert_allclose(read_numbers(contents, f"blk.{l}.ssm_a"), -np.exp(A_log)[:, None], rtol=2e-7)
        np.testing.assert_array_equal(read_numbers(contents, f"blk.{l}.ssm_d"), ours[start + "D"][:, None])
        by_group = norm.reshape(said["ssm.group_count"], -1)
        np.testing.assert_array_equal(read_numbers(contents, f"blk.{l}.ssm_norm.weight"), by_group)
        taps = ours[start + "conv1d.weight"]
        np.testing.assert_array_equal(read_numbers(contents, f"blk.{l}.ssm_conv1d.weight"), taps[:, 0])
        assert said["ssm.inner_size"] == len(norm) and said["ssm.time_step_rank"] == len(A_log)


@pytest.mark.parametrize("case, changes, message", REFUSED)
def test_what_no_file_says_is_refused(tmp_path, case, changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        gguf_metadata(given(case) | changes, tmp_path / "out.gguf")


def test_of_a_fraction_of_channels_files_say_the_whole_pairs(tmp_path):
    """0.7 of 6 channels are 2 pairs, as transformers computes them."""
    metadata, vectors, _ = gguf_metadata(given("gemma4_unified"), tmp_path / "out.gguf")
    np.testing.assert_array_equal(vectors["rope_freqs.weight"], np.array([1, 1, 1e30], np.float32))
    assert metadata["general.architecture"] == "gemma4"


def contents_of(case: str, path: Path) -> tuple[Contents, dict[str, np.ndarray]]:
    """A file's header without its layers' tensors, and its vectors, of a case."""
    config = given(case) | CASES[case][0]
    metadata, vectors, _ = gguf_metadata(config, path)
    entry: Any = type("Entry", (), {"shape": (config["vocab_size"], config["hidden_size"])})()
    names = ["token_embd.weight", "output_norm.weight", "output.weight", *vectors]
    types = config.get("layer_types", ())
    names += [f"blk.{l}.attn_v.weight" for l, x in enumerate(types) if x == SLIDING or not config["attention_k_eq_v"]]
    return Contents(path, metadata, {name: entry for name in names}), vectors


@pytest.mark.parametrize(
    "case, key, value, message",
    [
        ("nemotron_dense", "attention.head_count_kv", [3, 0, 3, 0, 1], "a whole number from 0 on for each of 4 layers"),
        ("nemotron_dense", "attention.head_count_kv", [0, 0, 3, -1], "a whole number from 0 on for each of 4 layers"),
        ("nemotron_dense", "attention.head_count_kv", [1, 0, 3, 0], "expected the same or 0 in each layer, got 1, 3"),
        ("nemotron_dense", "attention.head_count_kv", [0, 3, 3, 0], "more than 0 of one of them alone in each layer"),
        ("nemotron_dense", "feed_forward_length", [0, 8, 0, 2], "expected the same or 0 in each layer, got 2, 8"),
        ("nemotron_dense", "block_count", 2**31, "at most 2,048, as models have"),
        ("nemotron_groups", "expert_gating_func", 1, "expert_gating_func: expected 2, got 1"),
        ("nemotron_groups", "moe_latent_size", 8, "has moe_latent_size, which may change what the model computes"),
        *(
            (
                "gemma4",
                "attention.sliding_window_pattern",
                value,
                f"true or false for each of {layers} layers, got {got}",
            )
            for value, layers, got in (([True], 7, "[True]"), (0, 7, "0"), (-2, 7, "-2"), (True, 7, "True"))
        ),
        ("gemma4", "attention.value_length", 5, "attention.value_length: expected 10, as of keys, got 5"),
        ("gemma4", "rope.dimension_count_swa", 2, "rope.dimension_count_swa: expected 6, as of keys, got 2"),
        ("gemma4", "attention.shared_kv_layers", 2, "expected a layer with a window and then one without before"),
        ("gemma4_e", "attention.shared_kv_layers", 7, "expected a layer with a window and then one without before"),
        (
            "gemma4_e",
            "feed_forward_length",
            [14] * 3 + [15] * 4,
            "expected 14 or 28 of layers that share keys and values",
        ),
    ],
)
def test_files_that_say_something_else_are_refused(tmp_path, case, key, value, message):
    contents, vectors = contents_of(case, tmp_path / "x.gguf")
    model_fields(metadata_config(contents, vectors))
    metadata = contents.metadata | {f"{contents.metadata['general.architecture']}.{key}": value}
    with pytest.raises(ConfigError, match=re.escape(message)):
        model_fields(metadata_config(contents._replace(metadata=metadata), vectors))


@pytest.mark.parametrize(
    "changes, full",
    [
        ({}, [3]),
        ({"attention.sliding_window_pattern": None}, [3]),  # OLMo 3's, which llama.cpp knows
        ({"attention.sliding_window_pattern": 3}, [2]),
        ({"attention.sliding_window_pattern": 1}, [0, 1, 2, 3]),
        ({"attention.sliding_window": None}, [0, 1, 2, 3]),
    ],
)
def test_layers_without_a_window_are_each_nth(tmp_path, changes, full):
    rope = {"rope_type": "default", "rope_theta": 1e4}
    config = given("olmo3") | {"rope_parameters": {FULL: rope, SLIDING: rope}}
    config |= {"num_hidden_layers": 4, "layer_types": [SLIDING] * 3 + [FULL]}
    metadata, vectors, _ = gguf_metadata(config, tmp_path / "x.gguf")
    metadata |= {f"olmo2.{key}": value for key, value in changes.items()}
    entry: Any = type("Entry", (), {"shape": (config["vocab_size"], config["hidden_size"])})()
    contents = Contents(
        tmp_path / "x.gguf",
        {key: value for key, value in metadata.items() if value is not None},
        dict.fromkeys(("token_embd.weight", "output_norm.weight", "output.weight", *vectors), entry),
    )
    found = metadata_config(contents, vectors)["layer_types"]
    assert found == [FULL if l in full else SLIDING for l in range(4)]


def test_a_file_of_gemma_4_that_says_no_cap_has_the_one_of_llama_cpp(tmp_path):
    contents, vectors = contents_of("gemma4_plain", tmp_path / "x.gguf")
    assert model_fields(metadata_config(contents, vectors))["final_logit_softcapping"] == 0
    without = {key: x for key, x in contents.metadata.items() if "softcapping" not in key}
    assert model_fields(metadata_config(contents._replace(metadata=without), vectors))["final_logit_softcapping"] == 30
    odd = {"rope_freqs.weight": np.array([1, 2, 1e30, 1e30], np.float32)}
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight: expected ones, and 1e30 behind them"):
        metadata_config(contents, vectors | odd)


def rewritten(path: Path, out: Path, changed: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]) -> Path:
    """Writes a file in float32 again, with other tensors."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(out, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            writer.add_key_value(key, field.contents(), field.types[0], field.types[-1] if field.types[1:] else None)
    for name, x in changed({tensor.name: np.array(tensor.data) for tensor in reader.tensors}).items():
        writer.add_tensor(name, x)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def test_gate_and_up_of_all_experts_may_be_one_tensor(tmp_path):
    """As llama.cpp's converter writes Gemma 4's, and other models' if it is asked to."""
    contents, _, ours = go_and_back(tmp_path, "gemma4_moe")

    def joined(stored):
        apart = {name: x for name, x in stored.items() if "ffn_gate_exps" in name}
        both = {name: np.concatenate([x, stored[name.replace("gate", "up")]], axis=1) for name, x in apart.items()}
        others = {name: x for name, x in stored.items() if "ffn_gate_exps" not in name and "ffn_up_exps" not in name}
        return others | {name.replace("gate", "gate_up"): x for name, x in both.items()}

    found = GgufTensors(rewritten(contents.path, tmp_path / "one.gguf", joined))
    assert found.names == ours.keys()
    for name, x in ours.items():
        assert found.shape(name) == x.shape
        np.testing.assert_array_equal(found.read(name), x, err_msg=name)


def test_keys_of_layers_that_share_them_are_left_aside(tmp_path):
    """Published files of E2B and E4B have them, as their safetensors do, and llama.cpp reads them in no layer."""
    contents, _, ours = go_and_back(tmp_path, "gemma4_e")
    names = [f"blk.3.attn_{name}.weight" for name in ("k", "k_norm", "v")]
    more = {name: np.ones((6, 18), np.float32) for name in names}
    found = GgufTensors(rewritten(contents.path, tmp_path / "more.gguf", lambda stored: stored | more))
    assert found.names == ours.keys() and found.left_aside == names
    assert model_fields(metadata_config(open_file(found.path))) == model_fields(metadata_config(contents))


def test_a_layers_columns_of_a_table_are_read_alone(tmp_path):
    """Also of blocks that have numbers of two layers."""
    numbers = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "gemma4")
    kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("table", gguf.quants.quantize(numbers, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    contents = open_file(tmp_path / "x.gguf")
    whole = read_numbers(contents, "table")
    np.testing.assert_allclose(whole, numbers, rtol=0, atol=0.02)
    for parts in (2, 4):
        for i, part in enumerate(np.split(whole, parts, axis=1)):
            np.testing.assert_array_equal(read_numbers(contents, "table", (i, parts)), part)
