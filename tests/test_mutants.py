"""The list of mistakes that tests must notice is about the source as it is: benchmarks/mutants.py makes them."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import mutants
from mutant_list import MUTANTS, Mutant


def test_the_list_is_about_this_source():
    """Every text to change is there once, and so are the tests. Where not: change the list with the source."""
    assert mutants.text_problems(MUTANTS) == []


def test_every_room_of_the_source_has_a_mistake():
    """A new file needs one, or a reason here."""
    files = {str(p.relative_to(mutants.ROOT)) for p in mutants.ROOT.glob("surojax/**/*.py")}
    without = {
        *(
            str(p.relative_to(mutants.ROOT / "surojax").with_suffix(""))
            for p in mutants.ROOT.glob("surojax/**/__init__.py")
        ),
        "errors",  # classes without code
        "models/families",  # one table
        "optim/optimizers",  # one table
        "placement/home",  # declarations
        "placement/param",  # declarations
        "planner/aot",  # the compiler for GPUs, which not every machine has
        "step/spec",  # declarations
    }
    names = {mutants.room(m) for m in MUTANTS}
    assert {f.removeprefix("surojax/").removesuffix(".py") for f in files} - names == without


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"file": "surojax/nowhere.py"}, "expected a file, got surojax/nowhere.py"),
        ({"old": "import"}, "expected 'import' once in surojax/models/loss.py, got"),
        ({"old": "no such text"}, "got 0 times"),
        ({"new": "def local"}, "the new text is the old one"),
        ({"tests": "tests/test_nothing.py"}, "expected a file of tests, got tests/test_nothing.py"),
        ({"tests": "tests/test_loss.py::test_hea"}, "expected a test of tests/test_loss.py, got test_hea"),
    ],
)
def test_what_is_wrong_with_a_list_is_said(changes, said):
    good = Mutant(
        "name", "surojax/models/loss.py", "def sharded_cross_entropy(", "def f(", "tests/test_loss.py::test_head"
    )
    assert mutants.text_problems([good]) == []
    changes = {"old": "def local"} | changes if "new" in changes else changes
    file = {"file": "surojax/step/outer.py"} if changes.get("old") == "def local" else {}
    (problem,) = mutants.text_problems([good._replace(**file, **changes)])
    assert said in problem


def test_tests_are_chosen_by_name_and_by_words():
    ids = ["tests/a.py::test_x[1-saved]", "tests/a.py::test_x[4-saved]", "tests/a.py::test_xy[1]", "tests/b.py::test_z"]
    chosen = lambda tests: mutants.chosen_tests(Mutant("", "", "", "", tests), ids)
    assert chosen("tests/a.py::test_x") == ids[:2] and chosen("tests/a.py") == ids[:3]
    assert chosen("tests/a.py::test_x -k saved and [1-") == ids[:1]
    assert chosen("tests/a.py::test_xy tests/b.py") == ids[2:]


def test_what_killed_a_mutant_is_said():
    failed = "F\nFAILED tests/test_loss.py::test_head[(1, 2)] - assert 1 == 2\n1 failed in 0.1s"
    assert mutants.verdict(0, "1 passed", 9) == ""
    assert mutants.verdict(1, failed, 9) == "test_loss.py::test_head[(1, 2)]"
    assert mutants.verdict(None, "", 9) == "hang: more than 9 s"
    assert mutants.verdict(-11, "", 9) == "crash: SIGSEGV"
    assert mutants.verdict(4, "ImportError while loading conftest", 9).startswith("pytest ended with 4")
