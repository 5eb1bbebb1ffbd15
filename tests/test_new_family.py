"""A family of models is one file: a made-up one, with keys and names of its own, goes in, trains and comes out.

Nothing but its row is added to the package, so that this is also the example of docs/extending.md.
"""

import ast
import json
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import pytest
import safetensors.numpy
from commands import convert
from test_rooms import FILES, PACKAGE, parsed, room_of

from surojax import ConfigError, default_config, train
from surojax.assembly import from_config
from surojax.exchange import config_json, peft, sources
from surojax.exchange.huggingface import model_fields
from surojax.exchange.model_tensors import SINGLE, Weights, shapes
from surojax.exchange.naming import naming_of
from surojax.families import rope_keys, window_keys
from surojax.families.family import LLAMA_DEFAULTS, ModelFamily
from surojax.families.registry import FAMILIES, IMAGE_TEXT_FAMILIES

# --- the file of a family ---------------------------------------------------------------------------------------------


def read(given: dict[str, Any]) -> dict[str, Any]:
    """Every global_every-th layer is without the window; logits are capped, 0: not."""
    if given["global_every"] < 2:
        raise ConfigError(f"model_path: config.json: global_every: expected 2 or more, got {given['global_every']}")
    window = window_keys.said_window(given)
    types = window_keys.every_nth_full(given["num_hidden_layers"], given["global_every"])
    cap = {"final_logit_softcapping": given["logit_cap"]}
    return window_keys.window_fields(given, window, types) | rope_keys.read_rope(given) | cap


def write(fields: dict[str, Any]) -> dict[str, Any]:
    own = {"global_every": fields["sliding_window_pattern"], "logit_cap": fields["final_logit_softcapping"]}
    return {"sliding_window": fields["sliding_window"] or None} | own | rope_keys.write_rope(fields)


LAYER = "decoder.layer.{l}."
NOVA = ModelFamily(
    model_type="nova",
    transformers_class="NovaForCausalLM",
    defaults=LLAMA_DEFAULTS | {"sliding_window": 8, "global_every": 2, "logit_cap": 0.0},
    required={"norm_type": ("rms",)},
    options={"qk_norm": True, "scale_embedding": True},
    read=read,
    write=write,
    tensors={
        "embed": "embeddings.weight",
        "norm": "decoder.last_norm.weight",
        "head": "head.weight",
        "attention_norm": LAYER + "norm_1.weight",
        "mlp_norm": LAYER + "norm_2.weight",
        "attention.wq": LAYER + "attention.q.weight",
        "attention.wk": LAYER + "attention.k.weight",
        "attention.wv": LAYER + "attention.v.weight",
        "attention.wo": LAYER + "attention.out.weight",
        "attention.q_norm": LAYER + "attention.q.norm.weight",
        "attention.k_norm": LAYER + "attention.k.norm.weight",
        "mlp.w_gate": LAYER + "mlp.gate.weight",
        "mlp.w_up": LAYER + "mlp.up.weight",
        "mlp.w_down": LAYER + "mlp.out.weight",
    },
)

# ----------------------------------------------------------------------------------------------------------------------

CONFIG = {
    "model_type": "nova",
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "global_every": 4,
    "logit_cap": 20.0,
    "norm_type": "rms",
    "max_position_embeddings": 64,
}
OPTIONS = {"qk_norm": True, "scale_embedding": True, "sliding_window": 8, "sliding_window_pattern": 4}


@pytest.fixture(autouse=True)
def nova(monkeypatch):
    monkeypatch.setitem(FAMILIES, NOVA.model_type, NOVA)


def folder_of_nova(path: Path) -> dict[str, np.ndarray]:
    """Writes a model's folder, and returns its tensors under the family's names."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    c = default_config()
    c.model.update(model_fields(CONFIG))
    ours = shapes(from_config.model(c))
    rng = np.random.default_rng(0)
    names = {naming_of(CONFIG).in_files(name): shape for name, shape in ours.items()}
    tensors = {name: 0.05 * rng.standard_normal(shape, np.float32) for name, shape in names.items()}
    safetensors.numpy.save_file(tensors, path / SINGLE)
    return tensors


def config_of_run(tmp_path: Path, **changes):
    c = default_config()
    c.update({"model_path": str(tmp_path / "model"), "output_dir": str(tmp_path / "run"), "data": "stdlib"})
    c.update({"sequence_len": 32, "max_steps": 2, "eval_batches": 1, "sample_tokens": 4, "data_cache": str(tmp_path)})
    c.update(changes)
    return c


@pytest.mark.full
def test_it_goes_in_trains_and_comes_out(tmp_path):
    theirs = folder_of_nova(tmp_path / "model")
    assert {"decoder.layer.3.attention.q.norm.weight", "head.weight", "embeddings.weight"} <= theirs.keys()
    out = convert.convert(tmp_path / "model", tmp_path / "copy", dtype="float32")
    chex.assert_trees_all_equal(safetensors.numpy.load_file(out / SINGLE), theirs)
    said = json.loads((out / "config.json").read_text())
    assert CONFIG.items() <= said.items() and said["architectures"] == ["NovaForCausalLM"]

    result = train(config_of_run(tmp_path))
    assert int(result.state.step) == 2
    trained = convert.convert(tmp_path / "run", tmp_path / "trained", dtype="float32")
    found = safetensors.numpy.load_file(trained / SINGLE)
    assert found.keys() == theirs.keys() and not np.array_equal(found["head.weight"], theirs["head.weight"])
    norm = np.asarray(jax.device_get(result.state.master["blocks"]["attention"]["q_norm"]))
    np.testing.assert_array_equal(found["decoder.layer.3.attention.q.norm.weight"], norm[3])


@pytest.mark.full
def test_its_adapters_have_its_names(tmp_path):
    folder_of_nova(tmp_path / "model")
    train(config_of_run(tmp_path, lora=True, lora_rank=2, model_dtype="float32"))
    folder = tmp_path / "run" / "adapter"
    found = safetensors.numpy.load_file(folder / peft.TENSORS)
    assert found["base_model.model.decoder.layer.2.mlp.out.lora_A.weight"].shape == (2, 48)
    endings = json.loads((folder / "adapter_config.json").read_text())["target_modules"]
    assert endings == ["q", "k", "v", "attention.out", "gate", "up", "mlp.out"]  # two modules are called out
    merged = convert.merge(tmp_path / "model", [folder], tmp_path / "merged", dtype="float32")
    name = "decoder.layer.2.mlp.out.weight"
    before, after = (safetensors.numpy.load_file(path / SINGLE)[name] for path in (tmp_path / "model", merged))
    assert not np.array_equal(before, after)


def test_fields_that_it_alone_computes_become_its_config_json():
    c = default_config()
    c.model.update(OPTIONS)
    made = config_json.made(c.model.to_dict(), 64, {})
    assert (made["model_type"], made["global_every"], made["logit_cap"]) == ("nova", 4, 0.0)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"norm_type": "layer"}, r"norm_type: expected 'rms', got 'layer'; nothing else is computed for nova$"),
        ({"global_every": 1}, r"global_every: expected 2 or more, got 1$"),
        ({"max_window_size": 3}, r"config\.json has max_window_size, which may change"),
    ],
)
def test_what_it_does_not_compute_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        model_fields(CONFIG | changes)


def test_names_of_tensors_that_it_does_not_have_are_refused(tmp_path):
    tensors = folder_of_nova(tmp_path / "model")
    tensors["decoder.layer.0.attention.gate.weight"] = np.zeros(3, np.float32)
    safetensors.numpy.save_file(tensors, tmp_path / "model" / SINGLE)
    assert "decoder.layer.0.attention.gate.weight" in Weights(tmp_path / "model").names
    c = sources.resolved(config_of_run(tmp_path))
    with pytest.raises(ConfigError, match=r"has decoder\.layer\.0\.attention\.gate\.weight, which a model with"):
        sources.open_weights(c, from_config.model(c))


def test_no_other_file_knows_a_family_by_its_name():
    """As a text of its own in the syntax tree. Chat templates and tokenizers have names like those of families."""
    names = {*FAMILIES, *IMAGE_TEXT_FAMILIES}
    architectures = {"models/decoder_model.py", "config/sections.py"}  # whose only one is called like the first family
    for file in FILES:
        path = file.relative_to(PACKAGE)
        if room_of(path.with_suffix("").parts) in ("families", "data") or str(path) in architectures:
            continue
        texts = {x.value for x in ast.walk(parsed(file)) if isinstance(x, ast.Constant)}
        assert not names & {text for text in texts if isinstance(text, str)}, path
