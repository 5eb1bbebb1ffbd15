"""Layers that are fetched once for a group of microbatches: the same numbers to the bit, from fewer transfers."""

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import CONFIG, Small, tokens
from test_models import toy

from surojax.config import checks
from surojax.config.fields import default_config
from surojax.errors import ConfigError
from surojax.models.model import Compute
from surojax.numerics.recipes import Precision
from surojax.parallel.collectives import Squares
from surojax.placement.layout import batch_sharding
from surojax.planner import hlo
from surojax.step import stream, weights
from surojax.step.totals import LayerTotals, Totals

ALL = dict.fromkeys(
    ("offload_weights", "offload_master", "offload_optimizer", "offload_grads", "offload_residual"), True
)
WIDE = dataclasses.replace(CONFIG, hidden_size=64, intermediate_size=160, head_dim=16)
BFLOAT16 = {"model_dtype": "bfloat16", "accum_dtype": "bfloat16"}  # sums that a group must round as often


def in_recipe(recipe: str, **settings) -> dict:
    return {"config": WIDE, "compute": Compute(precision=Precision(recipe=recipe, **settings)), **BFLOAT16}


CASES = {
    "fp8_hybrid": in_recipe("fp8_hybrid") | {"devices": 4, "zero_level": 3, "persistent_quants": True},
    "nvfp4": in_recipe("nvfp4", skip_first=1),
    "toy": {"model": toy(), "devices": 4, "zero_level": 3, **ALL},
}


def trained(batches, **options):
    """(loss and norm of each step, the state's arrays as bytes). Packed rows have a second document from token 7 on."""
    small = Small(**options)
    if options.get("packed"):
        starts = np.where(np.arange(16) < 7, 0, 7).astype(np.int32)
        batches = [(*batch, np.broadcast_to(starts, batch[0].shape).copy()) for batch in batches]
    curve = small.train(batches)
    return curve, [np.asarray(x).tobytes() for x in jax.tree.leaves(small.state)]


@pytest.mark.parametrize(
    "case, group",
    [(case, 4 if case == "4-resident" else 2) for case in CASES],
)
@pytest.mark.full
def test_groups_change_no_bit(case, group):
    """Losses, norms, weights and moments of three steps, with two groups and one; of adamw8bit: tests/test_bits.py."""
    batches = [tokens(4, 8, 16, seed=i) for i in range(3)]
    assert trained(batches, **CASES[case], microbatches_per_fetch=group) == one_by_one(case)


@functools.cache
def one_by_one(case: str):
    return trained([tokens(4, 8, 16, seed=i) for i in range(3)], **CASES[case])


@pytest.mark.full
def test_two_gathered_layers_in_a_body_change_no_bit(monkeypatch):
    """As in passes that are long enough to hide gathers. Of five layers one is left over."""
    bodies = []
    layers_in_body = weights.Fetch.layers_in_body

    def noted(self, tokens: int, *, reverse: bool) -> int:
        bodies.append(layers_in_body(self, tokens, reverse=reverse))
        return bodies[-1]

    monkeypatch.setattr(weights.Fetch, "layers_in_body", noted)
    options = {"config": dataclasses.replace(CONFIG, num_hidden_layers=5), "devices": 4, "zero_level": 3}
    batches = [tokens(2, 8, 16, seed=i) for i in range(3)]
    expected = trained(batches, **options)
    assert {*bodies} == {1}
    bodies.clear()
    monkeypatch.setattr(stream, "HIDING_TOKENS", 2 * 16)  # two sequences of a device, in a microbatch
    assert trained(batches, **options) == expected
    assert {*bodies} == {2}


def gathered_arrays(group: int) -> int:
    """All-gathers in a step of four microbatches of three layers."""
    small = Small(4, zero_level=3, microbatches_per_fetch=group)
    batch = [jax.ShapeDtypeStruct((4, 8, 16), np.int32, sharding=batch_sharding(small.mesh))] * 2
    module = hlo.parse_module(small.step.lower(small.plan, *batch).compile().as_text())
    return sum(times for i, times, _ in hlo.executed(module) if i.opcode == "all-gather")


@pytest.mark.full
def test_a_group_gathers_each_layer_once_a_pass():
    """Nine arrays of three layers, forward and backward, for each group; those of the first layer of a forward pass
    that does not come; once a step the three outer arrays."""
    found = {group: gathered_arrays(group) for group in (1, 4)}
    assert found == {group: 9 * (2 * 3 * 4 // group + 1) + 3 for group in (1, 4)}


def barriers(group: int, slices: int) -> int:
    """Optimization barriers in a step of two microbatches with its head in so many slices."""
    small = Small(microbatches_per_fetch=group, lmhead_chunks=slices)
    batch = [jax.ShapeDtypeStruct((2, 8, 16), np.int32, sharding=batch_sharding(small.mesh))] * 2
    return small.step.lower(small.plan, *batch).as_text().count("optimization_barrier")


def test_heads_of_one_slice_are_done_one_after_the_other():
    """With a barrier after each, or XLA for GPUs has the logits of all microbatches in memory at once."""
    assert barriers(2, 1) == barriers(2, 2) + 2
    assert barriers(1, 1) == barriers(1, 2)


@pytest.mark.parametrize("group, change", [(3, "use 4"), (8, "use 4")])
def test_groups_must_divide_the_microbatches(group, change):
    c = default_config()
    c.gradient_accumulation_steps = 4
    c.microbatches_per_fetch = group
    expected = f"microbatches_per_fetch: expected a divisor of gradient_accumulation_steps = 4, got {group}; {change}"
    with pytest.raises(ConfigError, match=f"^{expected}$"):
        checks.check(c)


def test_totals_of_a_step_by_hand():
    """What layers add, and flags that stay down once something was not finite."""
    segment = SimpleNamespace(name="a", statistics={"n": jax.ShapeDtypeStruct((), jnp.float32)}, num_layers=2)
    delayed = SimpleNamespace(delayed=True)
    model = SimpleNamespace(precision=delayed, num_layers=2, sites=SimpleNamespace(number=3), segments=[segment])
    engine: Any = SimpleNamespace(model=model, sums=("loss", "nats"), locates_nonfinite=True, auxiliary=None)
    totals = Totals.zeros(engine)
    numbers = lambda x: jax.tree.map(lambda y: np.asarray(y).tolist(), x)
    assert numbers(totals.finite) == (True, True) and numbers(totals.observed) == [[0] * 3] * 2
    one = LayerTotals({"n": jnp.float32(2)}, Squares(jnp.float32(1), jnp.float32(4)), jnp.float32([1, 5, 0]))
    both = one.plus(LayerTotals({"n": jnp.float32(3)}, None, jnp.float32([2, 1, 0]))).plus(LayerTotals())
    assert numbers(both) == ({"n": 5}, (1, 4), [2, 5, 0])
    totals = totals.plus(both, "a", 0, 1).plus(both, "a", 0, 1).plus(LayerTotals(), "a", 1, 0)
    assert numbers(totals.statistics) == {"a": {"n": [10, 0]}} and numbers(totals.squares) == (2, 8)
    assert numbers(totals.observed) == [[0] * 3, [2, 5, 0]]
    well, broken = jnp.zeros((2, 3)), jnp.float32([[0, jnp.nan]])
    forward = totals.after_forward([well, broken]).after_forward([well]).after_backward([well])
    backward = totals.after_forward([well]).after_backward([broken, well]).after_backward([well])
    assert numbers(forward.finite) == (False, True) and numbers(backward.finite) == (True, False)
    plain = totals._replace(finite=None, sums={"loss": jnp.float32(6), "nats": jnp.float32(8)})
    assert plain.after_forward([broken]) is plain.after_backward([broken]) is plain
    scale, over = jnp.float32(0.5), lambda reduce, stacks: reduce(stacks)
    batch: Any = None
    found = numbers(plain.metrics(engine, batch, scale, over))
    assert found == {"loss": 3, "nats": 4, "statistics": {"a": {"n": [10, 0]}}}
    assert numbers(forward.metrics(engine, batch, scale, over)["finite"]) == [[False, True]]
