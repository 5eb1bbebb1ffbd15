"""Exports have the names, shapes and settings that transformers accepted, see fixtures/check_exports.py.

A case whose digest differs was changed since: run that script, which asks transformers again.
"""

import json
from pathlib import Path

import pytest
from exports import Case, cases, digest, key, make, refused

from surojax.errors import ConfigError
from surojax.families.registry import FAMILIES

STORED = json.loads((Path(__file__).parent / "fixtures" / "exports_verdict.json").read_text())
VERDICTS = STORED["verdicts"]
# Of the largest logit. Weights are equal to the bit, but for the order of sums; activations in float8 are rounded, as
# those of NVFP4 to bfloat16, by transformers alone.
LIMITS = {"fp8": 0.1, "nvfp4": 0.05}


@pytest.mark.parametrize("case", cases(), ids=key)
def test_names_shapes_and_settings_are_those_that_transformers_accepted(tmp_path, case):
    assert digest(make(case, tmp_path)) == VERDICTS[key(case)]["digest"]


def test_transformers_accepted_every_export():
    """Every family in every layout and kind; no key is missing, unexpected or of another shape; equal logits."""
    assert VERDICTS.keys() == set(map(key, cases()))
    assert {case.family for case in cases()} >= FAMILIES.keys()
    assert tuple(map(int, STORED["versions"]["transformers"].split(".")[:2])) >= (5, 24)
    for name, verdict in VERDICTS.items():
        limit = LIMITS.get(name.split()[-1], 1e-5)
        assert verdict.keys() == {"digest", "difference"} and verdict["difference"] <= limit, (name, verdict)
