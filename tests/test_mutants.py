"""Mistakes that benchmarks/mutants.py makes: what each operator does to a line, which are chosen, what killed them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import mutants
from mutants import Test as Timed
from mutation import Mutant, mutants_of


@pytest.mark.parametrize(
    "line, expected",
    [
        ("y = a + b * c", {"y = a", "y = (b * c)", "y = a + b", "y = a + c"}),
        ("y = a - 1", {"y = a", "y = (1 - a)", "y = a - 2"}),
        ("y = f(a, *b, axis=i)", {"y = f(a, *b, )"}),
        ("y = f(a, b)", {"y = f(b, a)"}),
        ("y = max(a, b)", {"y = a"}),
        ("y = psum(x, 'tp')", {"y = x", "y = psum('tp', x)"}),
        ("y = x.astype(d)", {"y = x"}),
        ("y = a if b else c", {"y = a", "y = c"}),
        ("y = a < b", {"y = a <= b"}),
        ("y = a is None", {"y = a is not None"}),
        ("y = a and not b", {"y = (a)", "y = ((not b))", "y = a and b"}),
        ("y = True", {"y = False"}),
        ("y += g(x)", {"pass"}),
        ("é = 'é', x[0]", {"é = 'é', x[1]"}),  # positions count bytes
        ("g(x)", {"pass"}),
        # Texts, annotations, errors and barriers decide no result.
        ("y: tuple[int, 3] = f'{a + b}'", set()),
        ("assert a < b, a + b", set()),
        ("y = zip(a, strict=True)", set()),
        ("raise ValueError(a + b)", set()),
        ("y = materialised(a + b)", set()),
    ],
)
def test_the_mistakes_of_a_line(tmp_path, line, expected):
    path = tmp_path / "x.py"
    path.write_text(f'"""Text."""\n{line}\n')
    found = mutants_of(path, "x.py")
    assert {mutant.applied(path.read_text()).splitlines()[1] for mutant in found} == expected
    assert all(mutant.line == 2 for mutant in found)


TABLE = """T = {
    "a": 1.5,
    "b": f(x),
    **more,
}
"""


@pytest.mark.parametrize(
    "text, expected",
    [
        (
            TABLE,
            {
                TABLE.replace('"a": 1.5,\n    ', ""),
                TABLE.replace('"b": f(x),\n    ', ""),
                TABLE.replace("**more,\n", ""),
                TABLE.replace("1.5", "f(x)"),
                TABLE.replace("f(x)", "1.5"),
            },
        ),
        ('T: tuple = ("a", "b", "c")\n', {f"T: tuple = ({two})\n" for two in ('"b", "c"', '"a", "c"', '"a", "b", ')}),
        ('T = frozenset("a bc d".split())\n', {f'T = frozenset("{two}".split())\n' for two in ("bc d", "a d", "a bc")}),
        ('T = ("a", "b")\n', set()),
        ('def f():\n    t = "a", "b", "c"\n', set()),
    ],
    ids=["dict", "tuple", "words", "pair", "local"],
)
def test_the_mistakes_of_a_table(tmp_path, text, expected):
    path = tmp_path / "x.py"
    path.write_text(text)
    assert {mutant.applied(text) for mutant in mutants_of(path, "x.py")} == expected


@pytest.mark.full
def test_a_table_has_the_tests_of_the_lines_that_read_it():
    """In its module and in others; not those of other lines."""
    file = "surojax/data/examples.py"
    lines = (mutants.ROOT / file).read_text().splitlines()
    (table,) = (i for i, text in enumerate(lines, 1) if text.startswith("TRAIN_ON ="))
    (condition,) = (i for i, text in enumerate(lines, 1) if "if train_on not in TRAIN_ON:" in text)
    (other,) = (i for i, text in enumerate(lines, 1) if text.startswith("class Encoder"))
    tests = {condition: "refuses", other: "has no part in it"}
    found = mutants.with_tables({(file, line): [Timed(name, 1, 1)] for line, name in tests.items()})
    assert [test.name for test in found[file, table]] == ["refuses"]
    assert [test.name for test in found[file, condition]] == ["refuses"]


@pytest.mark.full
def test_a_table_has_the_tests_that_read_its_name():
    """Wherever in the function, its decorators included."""
    file = "surojax/data/datasets.py"
    (table,) = (i for i, text in enumerate((mutants.ROOT / file).read_text().splitlines(), 1) if "USES = {" in text)
    names = [
        f"tests/test_datasets.py::{name}" for name in ("test_the_settings_that_a_type_of_rows_reads[a]", "test_entries")
    ]
    found = mutants.with_tables({("surojax/elsewhere.py", 1): [Timed(name, 1, 9) for name in names]})
    assert found[file, table] == [Timed(names[0], 1, 1)]
    through = Timed("tests/test_export_verdicts.py::test_transformers_accepted_every_export", 1, 1)  # by exports.cases
    found = mutants.tests_by_name([through, Timed(names[0], 1, 1)])
    assert found["VARIANTS"] == [through] and "USES" in found


def test_an_if_is_never_taken(tmp_path):
    path = tmp_path / "x.py"
    path.write_text("if a:\n    b = c\n")
    assert [mutant.applied(path.read_text()) for mutant in mutants_of(path, "x.py")] == ["if False:\n    b = c\n"]


def test_every_file_of_the_source_can_be_changed():
    """A mutant of it parses, and differs from it in its own lines only."""
    for file in ("surojax/step/update.py", "pallas_kernels/swiglu.py"):
        text = (mutants.ROOT / file).read_text()
        found = mutants_of(mutants.ROOT / file, file)
        assert len({mutant.kind for mutant in found}) > 5
        for mutant in found:
            assert mutant.applied(text).splitlines()[: mutant.line - 1] == text.splitlines()[: mutant.line - 1]


def mutant(kind: str, line: int) -> Mutant:
    return Mutant("x.py", line, kind, 0, 0, "")


def test_a_sample_has_all_kinds_and_follows_from_the_seed():
    everything = [mutant("many", i) for i in range(50)] + [mutant("few", i) for i in range(3)]
    found = mutants.sampled(everything, 10, seed=1)
    assert found == mutants.sampled(everything, 10, seed=1) != mutants.sampled(everything, 10, seed=2)
    assert len(set(found)) == 10 and sum(m.kind == "few" for m in found) == 3
    assert sorted(mutants.sampled(everything, 99, seed=1)) == sorted(everything)


def test_tests_are_chosen_within_the_limit():
    """One of each function first, of the lowest cost; at least one whatever it takes. The fastest runs first."""
    tests = [Timed("a::x[1]", 1, 1), Timed("a::x[2]", 2, 2), Timed("a::y", 3, 3), Timed("a::z", 9, 9)]
    assert [test.name for test in mutants.within([Timed("a::v", 3, 4), Timed("a::u", 2, 5)], 5)] == ["a::u", "a::v"]
    assert [test.name for test in mutants.within(tests, 5)] == ["a::x[1]", "a::y"]
    assert [test.name for test in mutants.within(tests, 6)] == ["a::x[1]", "a::x[2]", "a::y"]
    assert [test.name for test in mutants.within(tests[3:], 6)] == ["a::z"]


def test_lines_of_a_change():
    diff = "--- a/x.py\n+++ b/x.py\n@@ -3 +3,2 @@ def f\n@@ -9,2 +10 @@\n@@ -20 +20,0 @@\n--- a/y.py\n+++ /dev/null\n"
    assert mutants.lines_of_diff(diff) == {("x.py", 3), ("x.py", 4), ("x.py", 10)}
    with pytest.raises(SystemExit, match=r"^--since: "):
        mutants.changed_lines("no-such-revision")


def test_lines_are_mapped_to_the_tests_that_run_them(tmp_path):
    """The second test runs a line that the first one has run already."""
    (tmp_path / "test_two.py").write_text(
        "from surojax.parallel.schedule import layers_of_stage\n"
        "def test_one():\n    assert layers_of_stage(7, 2) == 4\n"
        "def test_two():\n    assert layers_of_stage(8, 2) == 4\n"
        "def test_none():\n    pass\n"
        "def test_bad():\n    assert layers_of_stage(8, 2) == 5\n"
    )
    command = [*mutants.PYTEST, "-p", "lines_by_test", "--lines", str(tmp_path / "map"), str(tmp_path)]
    paths = os.pathsep.join([str(mutants.ROOT), str(mutants.ROOT / "benchmarks")])
    subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": paths}, capture_output=True)
    (part,) = (tmp_path / "map").glob("*.json")
    seconds, files = json.loads(part.read_text())["test_two.py::test_one"]
    (line,) = files["surojax/parallel/schedule.py"]
    assert (
        seconds < 5 and "return" in (mutants.ROOT / "surojax/parallel/schedule.py").read_text().splitlines()[line - 1]
    )
    found = mutants.read_map(tmp_path / "map")
    tests = found["surojax/parallel/schedule.py", line]
    assert {test.name for test in tests} == {"test_two.py::test_one", "test_two.py::test_two"}
    assert all(test.cost == test.seconds for test in tests)  # they run lines of no other file


def test_the_tests_of_a_file_come_before_faster_ones_that_pass_through_it(tmp_path):
    files = {"through": (1.0, {"x.py": [1], "y.py": list(range(9))}), "of it": (4.0, {"x.py": [1, 2]})}
    (tmp_path / "1.json").write_text(json.dumps(files))
    assert mutants.read_map(tmp_path)["x.py", 1] == [Timed("of it", 4, 4), Timed("through", 1, 10)]


def test_a_map_of_another_source_is_refused(tmp_path):
    assert not mutants.unchanged(tmp_path, "surojax/errors.py")
    (tmp_path / "sources").mkdir()
    known = tmp_path / "sources" / "surojax--errors.py"
    known.write_text(mutants.digest(mutants.ROOT / "surojax/errors.py"))
    assert mutants.unchanged(tmp_path, "surojax/errors.py")
    known.write_text("another")
    assert not mutants.unchanged(tmp_path, "surojax/errors.py")


def test_what_killed_a_mutant_is_said():
    failed = "F\nFAILED tests/test_loss.py::test_head[(1, 2)] - assert 1 == 2\n1 failed in 0.1s"
    assert mutants.verdict(0, "1 passed", 9) == ""
    assert mutants.verdict(1, failed, 9) == "test_loss.py::test_head[(1, 2)]"
    assert mutants.verdict(None, "", 9) == "hang: more than 9 s"
    assert mutants.verdict(-11, "", 9) == "crash: SIGSEGV"
    assert mutants.verdict(4, "ImportError while loading conftest", 9).startswith("pytest ended with 4")


@pytest.mark.full
def test_a_run_ends_with_its_first_failure_or_at_its_limit(tmp_path):
    """Each in a process of its own: what one did to a module is not seen by the next."""
    (tmp_path / "test_x.py").write_text(
        "import json, time\n"
        "def test_good():\n    assert not hasattr(json, 'seen')\n    json.seen = True\n"
        "def test_bad():\n    assert False\n"
        "def test_slow():\n    time.sleep(60)\n"
    )

    def run(*names: str, limit_s: float = 60) -> str:
        tests = [Timed(f"test_x.py::{name}", 0, 0) for name in names]
        return mutants.verdict(*mutants.run_tests(tmp_path, [test.name for test in tests], limit_s), limit_s)

    assert run("test_good") == run("test_good") == ""
    assert run("test_good", "test_bad", "test_slow") == "test_x.py::test_bad"
    assert run("test_slow", limit_s=2) == "hang: more than 2 s"


@pytest.mark.full
@pytest.mark.parametrize(
    "limits, killed_by, left_out",
    [
        (mutants.Limits(1), "", 1),
        (mutants.Limits(1, full_s=60), "test_m.py::test_f[1-2]", 1),
        (mutants.Limits(1, again_s=9), "test_m.py::test_g", 0),
    ],
)
def test_a_survivor_is_tried_again_with_other_tests_and_full_cases(tmp_path, limits, killed_by, left_out):
    (tmp_path / "m.py").write_text("def f(x):\n    return x + 1\n")
    (tmp_path / "conftest.py").write_text(
        "def pytest_addoption(parser):\n    parser.addoption('--all', action='store_true')\n"
        "def pytest_configure(config):\n    config.addinivalue_line('markers', 'full')\n"
    )
    (tmp_path / "test_m.py").write_text(
        "import m, pytest\n"
        "@pytest.mark.parametrize('x, most', [(1, 9), pytest.param(1, 2, marks=pytest.mark.full)])\n"
        "def test_f(x, most):\n    assert x < m.f(x) <= most\n"
        "def test_g():\n    assert m.f(5) == 6\n"
    )
    (off_by_one,) = (mutant for mutant in mutants_of(tmp_path / "m.py", "m.py") if mutant.kind == "off by one")
    tests = [Timed("test_m.py::test_f[1-9]", 1, 1), Timed("test_m.py::test_g", 2, 2)]
    outcome = mutants.try_mutant(off_by_one, tmp_path, tests, limits)
    assert (outcome.killed_by, outcome.left_out) == (killed_by, left_out)
