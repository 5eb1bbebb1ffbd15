"""The table of settings that do not go together: every row refuses, and every pair of features is decided by it."""

import functools
import itertools
import random
from pathlib import Path

import pytest
from small import quick_at

from surojax.assembly.from_config import from_config
from surojax.config import checks
from surojax.config.fields import DEFAULTS, default_config, flat, mesh_sizes
from surojax.errors import ConfigError
from surojax.objectives.objectives import LABELLING
from surojax.placement.mesh import abstract_mesh, shards
from surojax.refusals.refusal import (
    Feature,
    Refusal,
    about,
    is_above,
    is_on,
    is_set,
    refusals_page,
    refuse,
    refused,
)

DOCS = Path(__file__).parent.parent / "docs" / "refusals.md"
# A model, a batch and a number of GPUs that every axis and every recipe divides.
SIZES = {
    "gpus": 8,
    "sequence_len": 256,
    "per_device_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "model.vocab_size": 512,
    "model.hidden_size": 256,
    "model.intermediate_size": 256,
    "model.num_hidden_layers": 4,
    "model.num_attention_heads": 8,
    "model.num_key_value_heads": 8,
}
# Features that no row is about.
OTHERS = (
    *(is_set("zero_level", level) for level in (2, 3)),
    is_above("dp_replicate_size", 1),
    is_above("lmhead_chunks", 1),
    is_set("optimizer", "adamw8bit"),
    is_set("recipe", "nvfp4"),
    is_set("kernels", "auto"),
    is_set("attention", "xla"),
    is_set("master_dtype", "bfloat16"),
    is_set("accum_dtype", "bfloat16"),
    is_set("z_loss", 1e-4),
    *map(is_on, ("shard_outer", "offload_residual", "offload_optimizer", "offload_weights", "use_all_to_all_reduce")),
    is_on("memcpy_all_gather"),
    is_set("zero_quantized_weights", "int8", {"zero_level": 3}),
    *map(is_on, ("model.attention_bias", "model.qk_norm", "model.scale_embedding")),
    is_set("model.final_logit_softcapping", 30.0),
)


def features() -> list[Feature]:
    """All features that differ from the defaults, once each."""
    rows = (feature for row in checks.REFUSALS for feature in (row.feature, row.other))
    found = {f"{f.name} {f.example}": f for f in (*rows, *OTHERS) if "num_shards" not in f.fields}
    return [f for f in found.values() if any(DEFAULTS.get(name, value) != value for name, value in f.example.items())]


def config(example):
    c = default_config()
    c.update_from_flattened_dict(SIZES | dict(example))
    return c


def both(one: Feature, other: Feature) -> dict | None:
    """Settings that make both choices; None if they are choices of the same field."""
    for example in ({**one.example, **other.example}, {**other.example, **one.example}):
        if "model.layer_types" in example:  # names of attention's matrices alone leave the other layers unadapted
            example.pop("lora_target_modules", None)
        if example.get("model.one_purpose") and example.get("model.num_experts"):  # layers whose purpose they are
            example.setdefault("model.layer_types", "full_attention,experts")
            if example.get("lora"):
                example.setdefault("lora_target_modules", "q_proj,gate_proj,up_proj,down_proj")
        values = DEFAULTS | SIZES | {"num_shards": 1} | example
        if one.holds(values, DEFAULTS) and other.holds(values, DEFAULTS):
            return example
    return None


@functools.cache
def meshes(**sizes):
    return abstract_mesh(8, **sizes)


def assembled(c) -> None:
    """Checks a config and makes the parts of its run, all abstract. Raises ConfigError."""
    checks.check(c)
    from_config(c, meshes(**mesh_sizes(c)), total_steps=100)


def settings_of(c) -> dict:
    """What the table is asked about when the run of a config is placed."""
    return flat(c) | {"num_shards": shards(meshes(**mesh_sizes(c)))}


@pytest.mark.parametrize("row", checks.REFUSALS, ids=lambda row: f"{row.feature.name}-{row.other.name}")
def test_every_row_refuses_and_says_what_to_change(row: Refusal):
    example = both(row.feature, row.other)
    assert example is not None, "no settings make both choices"
    of_fields = {name: value for name, value in example.items() if name in DEFAULTS}  # num_shards follows from the mesh
    c = config(of_fields)
    values = settings_of(c) | {LABELLING: LABELLING in row.fields}
    assert row.holds(values, DEFAULTS) and not row.holds(DEFAULTS | {"num_shards": 1}, DEFAULTS)
    message = row.message(values, DEFAULTS)
    assert message.startswith(f"{row.feature.field}: expected ") and ", got " in message and "\n" not in message
    with pytest.raises(ConfigError) as error:
        refuse(values, DEFAULTS, about(LABELLING, checks.REFUSALS)) if LABELLING in row.fields else assembled(c)
    if row is refused(values, DEFAULTS, checks.REFUSALS, placed=True):  # the first of several
        assert str(error.value) == message


def decided(one: Feature, other: Feature) -> str:
    """ "refused", "accepted", or "exclusive" for two values of a field.

    Fails if the table and the checks disagree, or if what both accept cannot be assembled.
    """
    example = both(one, other)
    if example is None:
        return "exclusive"
    c = config(example)
    values = settings_of(c)
    row = refused(values, DEFAULTS, checks.REFUSALS, placed=True)
    if row is None:
        assembled(c)
        return "accepted"
    with pytest.raises(ConfigError) as error:
        assembled(c)
    assert str(error.value) == row.message(values, DEFAULTS)
    return "refused"


@pytest.mark.parametrize("tried", [checks.check, assembled])
def test_every_feature_is_possible(tried):
    for feature in features():
        values = DEFAULTS | SIZES | dict(feature.example)
        assert feature.holds(values, DEFAULTS), feature.name
        tried(config(feature.example))


PAIRS = list(itertools.combinations(features(), 2))
PARTS = 100


@pytest.mark.parametrize("part", quick_at([(part,) for part in range(PARTS // 5)], 0))
def test_every_pair_is_refused_by_the_table_or_assembled(part, pytestconfig):
    """`pytest` walks one pair in 100, `pytest --all` one in five; which ones, --drawn-by says."""
    shuffled = random.Random(pytestconfig.option.drawn_by).sample(PAIRS, len(PAIRS))
    found = [decided(*pair) for pair in shuffled[part::PARTS]]
    assert {"refused", "accepted"} <= set(found)


def test_docs_have_the_table():
    """If this fails: python -m surojax.config.checks > docs/refusals.md"""
    assert DOCS.read_text() == refusals_page(checks.REFUSALS, DEFAULTS)
