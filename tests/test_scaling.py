"""benchmarks/scaling.py without its compilations."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import scaling

from surojax.planner.plan import Plan, checked


def test_all_rows_are_steps_that_train_accepts():
    """And rows of the same model on the same GPUs differ in their settings."""
    for row in scaling.ROWS:
        c = checked(row.loaded(), row.gpu)
        assert (c.gpus, c.zero_level) == (row.gpus, 3)
    assert len({dataclasses.astuple(row) for row in scaling.ROWS}) == len(scaling.ROWS)


@pytest.mark.parametrize("seconds, cells", [(2.5, "2.50 | 1,000 | 0.400 | 0.30 | 0.10"), (None, "- | - | - | - | -")])
def test_a_line_says_what_is_exposed_and_what_does_not_fit(seconds, cells):
    fields: dict[str, Any] = dict.fromkeys(field.name for field in dataclasses.fields(Plan))
    exposed = {"gather": 0.1, "reduce": 0.2, "host in": 0.1, "host out": 0.0}
    memory = {"device_bytes": 80 * 2**30, "host_bytes": 2**30, "fits": False, "between_machines": ["pp", "dp_shard"]}
    times = {"predicted_step_s": seconds, "tokens_per_s_per_gpu": 1000.0, "mfu": 0.4, "exposed_s": exposed}
    row = scaling.Row("70B", "h100", 1024, "zero_level=3")
    found = row.line(Plan(**fields | memory | times))
    expected = f"| 70B | 1,024 x h100 | `zero_level=3` | 80.0 (does not fit) | 1 | {cells} | pp, dp_shard |"
    assert found == expected
