"""Notebooks are executed from the first cell to the last, as a reader would."""

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


@pytest.mark.filterwarnings("default")  # the Jupyter client's own, not ours
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
@pytest.mark.full
def test_notebook_runs(path, monkeypatch):
    for name in ("XLA_FLAGS", "JAX_PLATFORMS"):  # the reader's environment, not that of the tests
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MPLBACKEND", "agg")
    notebook = nbformat.read(path, as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "commit notebooks without outputs"
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": os.fspath(path.parent)}}).execute()
    printed = "".join(o.get("text", "") for cell in notebook.cells for o in cell.get("outputs", []))
    assert "bits per byte on held-out files" in printed and "def main(" not in printed
