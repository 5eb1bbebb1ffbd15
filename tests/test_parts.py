"""Models with an image encoder: their language model is trained alone, and comes out in the whole model.

Its logits are compared in test_parity.py; that transformers loads the export is recorded by fixtures/check_exports.py.
"""

import json
from pathlib import Path

import chex
import numpy as np
import pytest
import safetensors.numpy
from commands import convert
from test_huggingface import before_5, config, rounded, stored
from test_parity import REFERENCE, load_config

from surojax import ConfigError
from surojax.assembly import from_config
from surojax.assembly.from_config import architecture
from surojax.exchange.huggingface import read_config
from surojax.exchange.model_tensors import SINGLE
from surojax.exchange.sources import open_weights

CASES = ("gemma3_images", "ministral3_images")
IN_FILES, IN_MODULES = 0, 1  # the spellings of names


def whole(folder: Path, case: str, spelling: int = IN_FILES, *, more: dict | None = None, **changes) -> Path:
    """The folder of a model with an image encoder. changes: of config.json, "absent" for a key that is not there."""
    folder.mkdir()
    found = json.loads(str(REFERENCE[f"{case}/config.json"])) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in found.items() if v != "absent"}))
    names = json.loads(str(REFERENCE[f"{case}/names.json"]))
    others = {name: np.zeros(shape, np.float32) for name, shape in names.pop("").items()}
    if spelling == IN_MODULES:
        others = {f"model.{name}": tensor for name, tensor in others.items()}
    tensors = {names[name][spelling]: tensor for name, tensor in stored(case).items()}
    safetensors.numpy.save_file(tensors | others | (more or {}), folder / SINGLE)
    return folder


def text_of(case: str) -> dict:
    return json.loads(str(REFERENCE[f"{case}/config.json"]))["text_config"]


@pytest.mark.parametrize("case, spelling", [(CASES[0], IN_FILES), (CASES[1], IN_MODULES)])
def test_the_language_model_goes_in_and_out_to_the_bit(tmp_path, capsys, case, spelling):
    """The export has the image encoder as it was; a line says so."""
    folder = whole(tmp_path / "in", case, spelling)
    c = config(folder)
    assert rounded(architecture(c)) == rounded(load_config(case))
    out = convert.convert(folder, tmp_path / "out", dtype="float32")
    found, given = (safetensors.numpy.load_file(path / SINGLE) for path in (out, folder))
    names = json.loads(str(REFERENCE[f"{case}/names.json"]))
    others = [name if spelling == IN_FILES else f"model.{name}" for name in names.pop("")]
    language_model = {theirs[IN_MODULES]: stored(case)[ours] for ours, theirs in names.items()}
    chex.assert_trees_all_equal(found, language_model | {name: given[name] for name in others})
    said, before = (json.loads((path / "config.json").read_text()) for path in (out, folder))
    assert {key: said[key] for key in before.keys() - {"text_config", "dtype"}} == {
        key: before[key] for key in before.keys() - {"text_config", "dtype"}
    }
    assert said["dtype"] == said["text_config"]["dtype"] == "float32" and config(out).model == c.model
    aside = rf"{len(others)} tensors of multi_modal_projector, vision_tower are kept as they are"
    assert capsys.readouterr().out == f"reading the language model in {folder}; {aside}\n"
    again = convert.convert(out, tmp_path / "again", dtype="float32")
    chex.assert_trees_all_equal(safetensors.numpy.load_file(again / SINGLE), found)


def test_a_config_json_of_transformers_4_is_read(tmp_path):
    """As gemma-3-4b-it's: other names of the rotary embedding's keys, and keys for both parts beside text_config."""
    text = before_5(text_of("gemma3_images"))
    for key in ("tie_word_embeddings", "model_type", "use_bidirectional_attention", "layer_types"):
        del text[key]
    text |= {"sliding_window_pattern": 2, "architectures": None}
    beside = {
        "tie_word_embeddings": "absent",
        "eos_token_id": [1, 106],
        "torch_dtype": "bfloat16",
        "pad_token_id": None,
    }
    folder = whole(tmp_path / "in", "gemma3_images", text_config=text, **beside)
    found = config(folder)
    assert found.model == config(whole(tmp_path / "new", "gemma3_images")).model and found.model.tie_word_embeddings
    said = read_config(folder)
    assert said["eos_token_id"] == [1, 106] and said["torch_dtype"] == "bfloat16" and "architectures" not in said


@pytest.mark.parametrize(
    "outer, inner, tied",
    [
        (True, True, True),
        (False, True, False),
        ("absent", True, True),
        ("absent", "absent", False),
        (True, False, False),
    ],
)
def test_a_head_is_tied_if_both_places_say_so(tmp_path, outer, inner, tied):
    """Mistral 3's text model says no if it says nothing, and its published files then have a head."""
    text = text_of("ministral3_images") | {"tie_word_embeddings": inner}
    text = {key: value for key, value in text.items() if value != "absent"}
    folder = whole(tmp_path / "in", "ministral3_images", text_config=text, tie_word_embeddings=outer)
    assert read_config(folder).get("tie_word_embeddings", False) == tied


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"text_config": {"model_type": "qwen2"}},
            r"expected model_type gemma3_text in text_config of gemma3, got 'qwen2'",
        ),
        ({"text_config": "absent"}, r"expected an object as text_config of gemma3, got None"),
        (
            {"logit_scale": 2.0},
            r"has logit_scale, which may change what the model computes and is not known for gemma3",
        ),
        ({"text_config": {"logit_scale": 2.0}}, r"has logit_scale, which may change .* not known for gemma3_text"),
        (
            {"text_config": {"final_logit_softcapping": 3.0}},
            r"final_logit_softcapping None, got 3\.0, which transformers does not compute for gemma3",
        ),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=rf"^model_path: [^\n]*{message}[^\n]*$"):
        config(whole(tmp_path / "in", "gemma3_images", **changes))


def test_tensors_of_neither_part_are_refused(tmp_path):
    folder = whole(tmp_path / "in", "gemma3_images", more={"tactile_tower.weight": np.zeros(2, np.float32)})
    c = config(folder)
    with pytest.raises(
        ConfigError, match=r"has tactile_tower\.weight, which a model with this config\.json does not use"
    ):
        open_weights(c, from_config.model(c))
