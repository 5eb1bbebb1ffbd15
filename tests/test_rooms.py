"""The rooms of surojax: who may import whom, and what `import surojax` costs."""

import ast
import functools
import graphlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import surojax

PACKAGE = Path(surojax.__file__).parent
# A room imports rooms to its left only.
ORDER = (
    "numerics placement cluster parallel memory models families optim objectives step run exchange config assembly "
    "inference planner pages training verification diagnosis commands"
).split()
COMMANDS = tuple(
    "api train distill launch plan fit studio report verify generate evaluate convert completion new doctor "
    "refused_early".split()
)
ANYWHERE = (
    "declared",
    "command_line",
    "option_names",
    "offloads",
    "errors",
    "refusals",
    "sizes",
    "untrusted",
    "own_files",
    "limited",
    "resources",
    "children",
)
ALONE = {"data"}  # it imports `errors` only


def room_of(parts: tuple[str, ...]) -> str:
    return "commands" if parts[0] in COMMANDS or parts[-1] == "__main__" else parts[0]


@functools.cache
def parsed(file: Path) -> ast.Module:
    """Several tests read all files."""
    return ast.parse(file.read_text())


def imports(file: Path) -> set[tuple[str, ...]]:
    """Modules of surojax that a file imports, as their parts: ("step", "engine")."""
    found = set()
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "surojax":
            parts = tuple((node.module or "").split(".")[1:])
            whole = not parts or (PACKAGE / Path(*parts)).is_dir()
            found |= {(*parts, alias.name) for alias in node.names} if whole else {parts}
        elif isinstance(node, ast.Import):
            found |= {tuple(a.name.split(".")[1:]) for a in node.names if a.name.startswith("surojax.")}
    return found


FILES = [p for p in sorted(PACKAGE.rglob("*.py")) if p != PACKAGE / "__init__.py"]


def test_imports_go_one_way():
    for file in FILES:
        parts = file.relative_to(PACKAGE).with_suffix("").parts
        room = room_of(parts)
        for other in imports(file):
            if other[0] in ANYWHERE or room_of(other) == room:
                continue
            name = ".".join(parts)
            assert not {room, name} & ALONE, f"{name} imports {other}: it may import errors only"
            assert room not in ANYWHERE, f"{name} imports {other}"
            reads_fields = other == ("config", "fields") and room == "exchange"  # the fields that a config.json sets
            below = other[0] == "data" and room in ("inference", "training", "commands")
            assert below or reads_fields or ORDER.index(room_of(other)) < ORDER.index(room), f"{name} imports {other}"


def test_no_files_import_each_other_in_a_circle():
    """Imports inside functions and of types alone count as well: who reads one file of a circle reads all of it."""
    modules = {file.relative_to(PACKAGE).with_suffix("").parts: file for file in FILES}
    list(graphlib.TopologicalSorter({name: imports(file) for name, file in modules.items()}).static_order())


def test_the_rooms_are_those_of_the_order():
    """A new folder needs a place in ORDER."""
    folders = {p.name for p in PACKAGE.iterdir() if (p / "__init__.py").exists()}
    assert folders == {*ORDER, "data", "refusals"} - {"commands"}


def test_importing_surojax_loads_no_heavy_library():
    """Checkpoints, data and TensorBoard come with the first use of `train`; packages of extras with their own use."""
    heavy = ("orbax", "grain", "tensorboardX", "tensorstore")
    extras = (
        "wandb",
        "trackio",
        "mlflow",
        "ray",
        "lm_eval",
        "shtab",
        "mkdocs",
        "matplotlib",
        "playwright",
        "jaxtyping",
    )
    code = f"""
import sys, time
import jax
before = time.process_time()
import surojax
print(time.process_time() - before)
print([name for name in {heavy} if name in sys.modules])
surojax.train, surojax.Decoder, surojax.OwnLoop
print([name for name in {extras} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, heavy_loaded, extras_loaded = done.stdout.splitlines()
    assert heavy_loaded == extras_loaded == "[]"
    assert float(seconds) < 1  # above jax's own, of CPU time, which other programs hardly change; 4 ms measured


@pytest.mark.parametrize(
    "change, said",
    [
        ("sys.platform = 'win32'", "expected Linux or macOS, got Windows"),
        ("sys.version_info = (3, 11, 4)", "expected Python 3.12 or newer, got 3.11"),
        ("sys.modules['jax'] = None", "expected the package jax, got none; pip install -e ."),
    ],
)
def test_what_cannot_run_says_so_in_one_line(change, said):
    """Of a command; an import in a program raises the same as ImportError."""
    start = f"import runpy, sys; {change}; import importlib.util as u; f = u.find_spec; "
    start += "u.find_spec = lambda n, *a: None if sys.modules.get(n, 1) is None else f(n, *a); "
    run = "sys.argv = ['-m']; runpy.run_module('surojax.train', run_name='__main__', alter_sys=True)"
    done = subprocess.run([sys.executable, "-S", "-c", start + run], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.returncode == 1 and done.stderr.startswith(f"surojax: error: {said}") and done.stderr.count("\n") == 1
    done = subprocess.run([sys.executable, "-S", "-c", f"{start}import surojax"], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1].startswith(f"ImportError: surojax: {said}")


def test_every_package_that_is_needed_is_looked_for():
    required = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.split(r"[><=]", line)[0].replace("-", "_") for line in required}
    assert names - {"jaxlib"} == {{"orbax": "orbax_checkpoint"}.get(name, name) for name in surojax._NEEDED.split()}


def test_every_public_name_is_there():
    for name in surojax.__all__:
        assert getattr(surojax, name) is not None
    assert callable(surojax.train)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        getattr(surojax, "trian")  # noqa: B009
