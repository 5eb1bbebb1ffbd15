"""benchmarks/scaling.py without its compilations."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import scaling

from surojax.planner.run_plan import checked

ROW = scaling.Row(scaling.GROWING, "70B", "h100", 1024, "zero_level=3")
FOUND = scaling.Result(
    fits=False,
    device_bytes=80 * 2**30,
    host_bytes=2**30,
    seconds=2.5,
    tokens_per_s=1000.0,
    mfu=0.4,
    spent={"collectives": 0.3, "host copies": 0.1, "bubble": 0.0},
    between_machines=["pp", "dp_shard"],
)


def test_all_rows_are_steps_that_train_accepts():
    """And no two rows have the same key."""
    for row in scaling.ROWS:
        c = checked(row.loaded(), row.gpu)
        assert c.gpus == row.gpus
    assert len({row.key for row in scaling.ROWS}) == len(scaling.ROWS)


def test_results_are_there_for_all_rows():
    """docs/scaling.json has what docs/scaling.md shows."""
    results = scaling.load(scaling.RESULTS)
    assert set(results) == {row.key for row in scaling.ROWS}
    page = scaling.RESULTS.with_suffix(".md").read_text()
    assert [row.key for row in scaling.ROWS if scaling.line(row, results[row.key]) not in page] == []


@pytest.mark.parametrize(
    "spent, said", [(0.3, "collectives 12%"), (0.2, "compute")], ids=["a tenth or more", "less than a tenth"]
)
def test_a_line_says_what_binds_it(spent, said):
    found = scaling.dataclasses.replace(FOUND, spent=FOUND.spent | {"collectives": spent})
    cells = f"80.0 (does not fit) | 1 | 2.50 | 1,000 | 0.400 | 278 | {said} | pp, dp_shard |"
    assert scaling.line(ROW, found) == f"| 70B | 1,024 x h100 | `zero_level=3` | {cells}"


def test_a_published_row_has_both_figures():
    row = scaling.dataclasses.replace(ROW, published=800.0, source="a page")
    assert scaling.line(row, FOUND).endswith("| 1,000 | 800 | 1.25 | collectives 12% | a page |")


def test_a_row_with_files_has_the_disks_and_what_is_written():
    row = scaling.dataclasses.replace(ROW, disk="2x7/6")
    found = scaling.dataclasses.replace(FOUND, file_bytes=2**30, written_bytes=10**9, spent={"files": 2.0})
    assert scaling.line(row, found).endswith(
        "| 2x7/6 | 80.0 (does not fit) | 1.0 | 1,024 | 2 | 1,024,000 | 0.400 | 1,024 | files 80% |"
    )


@pytest.mark.full
def test_the_picture_is_small(tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "x.svg"
    scaling.picture((ROW,), {ROW.key: FOUND}, file)
    assert 1000 < file.stat().st_size < 100_000
