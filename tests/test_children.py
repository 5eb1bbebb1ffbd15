"""Child processes import what this process does, and nothing from the folder that the user stands in."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import surojax
from surojax import limited
from surojax.children import python_command

PACKAGE = Path(surojax.__file__).parent
NAMES = "json typing jax numpy surojax psutil re os sys subprocess signal ctypes encodings jinja2 sitecustomize".split()
IMPORTS = "import json, typing, re, os, subprocess, signal, ctypes; print(*sys.argv[1:])"


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """Stands in a folder whose files would be imported in place of installed modules."""
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text("raise SystemExit(f'the file of the folder: {__file__}')\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("entries", [[], [""], ["."], ["", "HERE"]], ids=str)
@pytest.mark.parametrize(
    "code, options",
    [
        (f"{IMPORTS}; import numpy, psutil, surojax", {}),
        (f"{IMPORTS}; import numpy", {"python": sys.executable}),
        (f"import sys; {IMPORTS}", {"bare": True}),
    ],
    ids=["own", "another", "bare"],
)
def test_a_child_imports_nothing_from_the_folder(hostile, monkeypatch, entries, code, options):
    """Also if this process would: in a notebook its import path begins with ""."""
    monkeypatch.setattr(sys, "path", [str(hostile) if x == "HERE" else x for x in entries] + sys.path)
    done = subprocess.run(python_command(code, "a b", "c", **options), capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "a b c\n", "")


@pytest.mark.parametrize("entries", [[], [""]], ids=str)
def test_surojax_itself_is_found_where_only_a_finder_knows_it(hostile, monkeypatch, entries):
    """As after `pip install -e`, whose finder Python asks after all folders, the user's included."""
    root = str(PACKAGE.parent)
    others = [x for x in sys.path if x not in (root, "")]
    monkeypatch.setattr(sys, "path", [*entries, *others])
    monkeypatch.delenv("PYTHONPATH", raising=False)
    code = "import surojax; print(surojax.__file__)"
    finder = f"""
import importlib.util, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "surojax":
            return importlib.util.spec_from_file_location(name, {str(PACKAGE / "__init__.py")!r})

sys.meta_path.append(Finder())
"""
    done = subprocess.run(python_command(finder + code), capture_output=True, text=True)
    assert done.stdout.endswith("/surojax/__init__.py\n") and str(hostile) not in done.stdout and not done.stderr


def test_a_module_that_only_the_folder_has_is_found(tmp_path, monkeypatch):
    """A reward function may be there, if this process finds it there."""
    (tmp_path / "mine.py").write_text("print('found')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    done = subprocess.run(python_command("import mine"), capture_output=True, text=True)
    assert done.stdout == "found\n"


def test_the_child_with_limits_imports_nothing_from_the_folder(hostile):
    limited._stop()  # one that another test has started
    assert limited.map_in_child("math", "sqrt", (), [4.0, 9.0]) == [2.0, 3.0]
    limited._stop()


def test_every_child_of_python_is_made_by_one_function():
    """A command with -c, -m or - elsewhere would import from the folder."""
    starts = re.compile(r"""sys\.executable, |python, ["']-|["']-[cm]["'], """)
    found = [str(p.relative_to(PACKAGE)) for p in sorted(PACKAGE.rglob("*.py")) if starts.search(p.read_text())]
    assert found == ["children.py"]


def test_printed_commands_are_verbs():
    """`python -m` would import from the folder in which the printed line is started."""
    printed = re.compile(r"python3? -m surojax\.(?!config\.checks)|[\"']-m[\"'], f?[\"']surojax")
    allowed = {"__init__.py", "launch.py"}  # which say in comments what they accept
    found = {str(p.relative_to(PACKAGE)) for p in PACKAGE.rglob("*.py") if printed.search(p.read_text())}
    assert found <= allowed
    docs = {p.name for p in (PACKAGE.parent / "docs").rglob("*.*") if p.suffix in (".md", ".yaml", ".sbatch")
            and p.parent.name != "log" and p.stem != "getting-started" and printed.search(p.read_text())}  # fmt: skip
    assert not docs


def test_another_interpreter_has_an_import_path_of_its_own():
    other, _, code, argument = python_command("print(1)", "x", python="/a/python")
    assert (other, argument) == ("/a/python", "x") and code.startswith(
        "import sys; sys.path[:] = [x for x in sys.path if"
    )
    ours, _, code, _ = python_command("print(1)", "x")
    assert ours == sys.executable and code.endswith("\nprint(1)") and "for x in" not in code
    assert python_command("print(1)", "x", bare=True) == [sys.executable, "-I", "-S", "-c", "print(1)", "x"]


def test_a_process_that_was_forked_has_a_child_of_its_own(monkeypatch):
    """And leaves that of its parent alone."""
    assert limited.map_in_child("json", "loads", (), ["1", "[2]"]) == [1, [2]]
    of_parent = limited._child
    monkeypatch.setattr(os, "getpid", lambda: of_parent.owner + 1)
    assert limited.map_in_child("json", "loads", (), ["3"]) == [3] and limited._child is not of_parent
    limited._stop()
    limited._child = of_parent
    limited._stop()
    assert limited._child is None and of_parent.process.poll() is None
    monkeypatch.undo()
    limited._child = of_parent
    limited._stop()
    assert of_parent.process.poll() is not None
