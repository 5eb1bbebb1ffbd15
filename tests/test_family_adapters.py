"""Adapters of families with mixers, norms and experts of their own: trained on a quantised base, merged, read by PEFT.

`fixtures/check_exports.py` shows PEFT an adapter of every family; here a run makes one.
"""

import json
from pathlib import Path

import chex
import numpy as np
import pytest
import safetensors.numpy
from commands import convert
from exports import Case, Drawn, config_of, model_of
from small import paired
from test_export import run_config
from test_huggingface import save_tokenizer

from surojax import read_metrics, train
from surojax.config.fields import kinds
from surojax.exchange import config_json, peft
from surojax.exchange.export import export
from surojax.exchange.model_tensors import SINGLE
from surojax.exchange.naming import naming_of
from surojax.models.kinds.targets import ALL_LINEAR, adaptable, named

FAMILIES = (
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen3_next",
    "lfm2",
    "lfm2_moe",
    "glm4_moe_lite",
    "deepseek_v2",
    "deepseek_v3",
    "olmo2",
    "olmo3",
    "muse_glimmer_text",
    "granitemoehybrid",
    "nemotron_h",
    "gemma4_text",
    "gemma4_text inputs",
    "mistral4",
)
BASES = ("qlora_bnb", "qlora_fp8", "qlora_fp4")


def folder_of(path: Path, family: str) -> Path:
    """A model whose rows are whole blocks of every format, and a tokenizer."""
    config = config_of(Case(family, "together", "nvfp4"))
    _, model = model_of(config)
    export(Drawn(model), model, config_json.completed(config, "float32"), {}, path, dtype="float32")
    save_tokenizer(path / "tokenizer.json")
    return path


@pytest.mark.full
@pytest.mark.parametrize("family, base", paired(FAMILIES, BASES))
def test_all_linear_matrices_are_trained_and_merged(tmp_path, family, base):
    """A run's last evaluation, and the first of a run from what was merged: float32 in another order of sums."""
    folder = folder_of(tmp_path / "base", family)
    c = run_config(tmp_path, folder, lora=True, lora_rank=2, lora_target_modules=ALL_LINEAR, **{base: True})
    c.learning_rate = 5e-2
    train(c)
    config = json.loads((folder / "config.json").read_text())
    said = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    settings, model = model_of(config)
    targets = named(ALL_LINEAR, adaptable(kinds(settings).values()))
    read = peft.read_adapter(tmp_path / "run" / "adapter", model, naming_of(config))
    assert set(read.matrices) == {target.matrix for target in targets} and said["r"] == 2
    assert all(all(np.any(b) for b in x["b"]) for x in read.matrices.values())

    out = convert.merge(
        folder, [tmp_path / "run" / "adapter"], tmp_path / "out", dtype="float32", say=lambda line: None
    )
    of_run = convert.convert(tmp_path / "run", tmp_path / "of_run", dtype="float32", say=lambda line: None)
    chex.assert_trees_all_equal(*(safetensors.numpy.load_file(x / SINGLE) for x in (of_run, out)))
    after = run_config(tmp_path, out, output_dir=str(tmp_path / "after"))
    train(after)
    first, second = (
        [r["loss"] for r in read_metrics(tmp_path / name / "metrics.jsonl") if r["log"] == "eval"]
        for name in ("run", "after")
    )
    assert abs(first[-1] - first[0]) > 1e-3
    np.testing.assert_allclose(second[0], first[-1], rtol=2e-6)
