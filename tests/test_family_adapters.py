"""Adapters of families with mixers, norms and experts of their own: trained on a quantised base, merged, read by PEFT.

`fixtures/check_exports.py` shows PEFT an adapter of every family; here a run makes one.
"""

import json
from pathlib import Path

import chex
import jax
import numpy as np
import pytest
import safetensors.numpy
from commands import convert
from exports import Case, Drawn, config_of, model_of
from small import paired
from test_adapters import REFERENCE as PEFT, logits, save, theirs
from test_deepseek import in_files, written
from test_export import run_config
from test_huggingface import save_tokenizer

from surojax import read_metrics, train
from surojax.assembly import from_config
from surojax.config.adapters import check_adapters
from surojax.config.fields import kinds
from surojax.exchange import config_json, peft
from surojax.exchange.adapter_config import matrices_without_adapters
from surojax.exchange.export import export
from surojax.exchange.model_tensors import SINGLE
from surojax.exchange.naming import naming_of
from surojax.models.kinds.targets import ALL_LINEAR, adaptable, target_names

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
    "nemotron_h dense",
    "gemma4_text",
    "gemma4_text inputs",
    "mistral4",
)
# Of those in which also the experts have adapters.
EXPERTS_TOO = {"nemotron_h": "in_proj,q_proj,k_proj,v_proj,o_proj,up_proj,down_proj"}
BASES = ("qlora_bnb", "qlora_fp8", "qlora_fp4")


def folder_of(path: Path, family: str) -> Path:
    """A model whose rows are whole blocks of every format, and a tokenizer."""
    config = config_of(Case(family, "together", "nvfp4"))
    _, model = model_of(config)
    export(Drawn(model), model, config_json.completed(config, "float32"), {}, path, dtype="float32")
    save_tokenizer(path / "tokenizer.json")
    return path


OF_MLP, OF_ATTENTION = {"mlp.w_up", "mlp.w_down"}, {f"attention.w{x}" for x in "qkvo"}
OF_EXPERTS = {"mlp.shared.w_up", "mlp.shared.w_down"}
OF_LAYERS: dict[str, dict[str, set[str]]] = {
    "nemotron_h dense": {"mamba2": {"mamba.w_in"}, "mlp": OF_MLP, "blocks": OF_ATTENTION},
    "nemotron_h": {"mamba2": {"mamba.w_in"}, "mlp": OF_MLP, "experts": OF_EXPERTS, "blocks": OF_ATTENTION},
}


@pytest.mark.parametrize("family", OF_LAYERS)
def test_layers_of_each_kind_have_their_adapters(family):
    """In models whose MLPs are layers by themselves, with experts elsewhere in the model, and without any."""
    c, _ = model_of(config_of(Case(family, "apart", "float32")))
    c.lora, c.lora_target_modules = True, ALL_LINEAR
    check_adapters(c)
    names = {segment.name: jax.tree.leaves(segment.params) for segment in from_config.model(c).segments}
    ends = "_lora.a"
    found = {
        name: {p.name.removesuffix(ends) for p in params if p.name.endswith(ends)} for name, params in names.items()
    }
    assert found == OF_LAYERS[family]


@pytest.mark.parametrize("family, left", (("lfm2", ["in_proj"]), ("nemotron_h", ["out_proj"]), ("qwen3_next", [])))
def test_matrices_that_can_have_no_adapters_are_named(family, left):
    """LFM2's in_proj is three matrices here; PEFT refuses Nemotron-H's out_proj."""
    c, model = model_of(config_of(Case(family, "apart", "float32")))
    assert matrices_without_adapters(model, {target.matrix for target in adaptable(kinds(c).values())}) == left


OF_PEFT = {  # cases of fixtures/make_adapter_reference.py: the base's family, and our names of what is adapted
    "latents": {f"latent.{name}" for name in ("wq_a", "wq_b", "wkv_a", "wkv_b", "wo")},
    "granite4": {"mamba.w_in", "mamba.w_out", "attention.wq", "attention.wv", "mlp.w_in", "mlp.w_out"},
}


@pytest.mark.parametrize("case", OF_PEFT)
def test_adapters_of_peft_are_read_merged_and_written(tmp_path, case):
    weights = {name: x.astype(np.float32) for name, x in in_files(str(PEFT[f"{case}/base"]), "weight").items()}
    for name, x in weights.items():
        if name.endswith("mlp.gate.weight"):
            x[6] = -x[5]
    base = written(tmp_path / "base", str(PEFT[f"{case}/base"]), weights)
    opened = convert.open_model(base)
    naming = naming_of(opened.config)
    adapter = peft.read_adapter(save(tmp_path / "theirs", case), opened.model, naming)
    assert {*adapter.lora.targets} == OF_PEFT[case]
    out = convert.merge(base, [tmp_path / "theirs"], tmp_path / "out", dtype="float32", say=lambda line: None)
    expected, before = PEFT[f"{case}/logits"], logits(base, case)
    np.testing.assert_allclose(logits(out, case), expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    assert np.abs(before - expected).max() > 0.1 * np.abs(before).max()
    ours = peft.save_adapter(adapter, opened.model, tmp_path / "ours", naming=naming)
    chex.assert_trees_all_equal(safetensors.numpy.load_file(ours / peft.TENSORS), theirs(case))
    chex.assert_trees_all_equal(peft.read_adapter(ours, opened.model, naming).matrices, adapter.matrices)


@pytest.mark.full
@pytest.mark.parametrize("family, base", paired(FAMILIES, BASES))
def test_all_linear_matrices_are_trained_and_merged(tmp_path, family, base):
    """A run's last evaluation, and the first of a run from what was merged: float32 in another order of sums."""
    folder = folder_of(tmp_path / "base", family)
    names = EXPERTS_TOO.get(family, ALL_LINEAR)
    c = run_config(tmp_path, folder, lora=True, lora_rank=2, lora_target_modules=names, **{base: True})
    c.learning_rate = 5e-2
    train(c)
    config = json.loads((folder / "config.json").read_text())
    said = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    settings, model = model_of(config)
    targets = target_names(names, kinds(settings).values())
    read = peft.read_adapter(tmp_path / "run" / "adapter", model, naming_of(config))
    assert set(read.matrices) == {*targets} and said["r"] == 2
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
