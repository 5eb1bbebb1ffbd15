"""The values that a search tries, by hand: sizes of groups, of microbatches and of slices, and their order."""

import dataclasses

import pytest

from surojax.config.changes import changed
from surojax.config.fields import default_config, kinds
from surojax.planner import choices
from surojax.planner.amounts import Memory
from surojax.planner.gpus import GPUS
from surojax.planner.run_plan import checked
from surojax.sizes import divisors

H100 = GPUS["h100"]
FOUR_IN_ONE = dataclasses.replace(H100, gpus_per_node=4)


def config(**changes):
    c = default_config()
    for name, value in changes.items():
        owner = c.model if name in c.model else c
        owner[name] = value
    return checked(c, "h100")


def sizes(of: dict) -> tuple[int, ...]:
    return tuple(of[axis] for axis in choices.AXES)


@pytest.mark.parametrize(
    "heads, kv, tp, cp, divides",
    [
        (8, 8, 1, 8, True),
        (8, 2, 1, 2, True),
        (8, 2, 1, 4, True),  # four devices share two heads
        (8, 2, 2, 4, True),
        (12, 6, 1, 4, False),  # neither divides the other
        (12, 4, 1, 8, False),
        (8, 8, 2, 8, False),
    ],
)
def test_heads_that_ulysses_divides(heads, kv, tp, cp, divides):
    c = config(num_attention_heads=heads, num_key_value_heads=kv, hidden_size=heads * 16)
    assert all(layer.mixer.exchanges_heads(tp, cp) for layer in kinds(c).values()) == divides


def test_layouts_begin_with_the_config_s_own_and_grow():
    """Groups that divide the GPUs and get the same number of sequences; tp within a machine, cp of long sequences."""
    c = config(
        gpus=8,
        tp_size=2,
        sequence_len=16384,
        per_device_batch_size=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        num_hidden_layers=2,
    )
    found, why = choices.mesh_layouts(c, FOUR_IN_ONE, ())
    of = [sizes(change) for change in found if change["pp_schedule"] != "1f1b" or sizes(change)[2] > 1]
    assert why == {} and of[0] == (2, 1, 1)
    groups = [choices.group(change) for change in found[1:] if sizes(change)[2] == 1]
    assert groups == sorted(groups)
    assert {tp for tp, _, _ in of} == {1, 2, 4} and {cp for _, cp, _ in of} == {1, 2, 4, 8} and max(of)[2] <= 2
    assert all(8 % (tp * cp * pp) == 0 for tp, cp, pp in of)
    kept, why = choices.mesh_layouts(c, FOUR_IN_ONE, ("tp_size", "pp_size"))
    assert {sizes(change)[::2] for change in kept} == {(2, 1)} and why == {"tp_size": "kept", "pp_size": "kept"}


def test_slices_of_a_microbatch_have_the_tokens_of_one_gpu():
    """At most 4,096 or 1,024 each: a group of two has half of them on each."""
    c = config(gpus=2, tp_size=2, sequence_len=4096, per_device_batch_size=4, gradient_accumulation_steps=1)
    of = choices.own_layout(c)
    found = {(x["per_device_batch_size"], x["gradient_accumulation_steps"]): set() for x in choices.batches(c, of)}
    for x in choices.batches(c, of):
        found[x["per_device_batch_size"], x["gradient_accumulation_steps"]].add(x["lmhead_chunks"])
    assert found[1, 4] == {1, 2} and found[2, 2] == {1, 4} and found[4, 1] >= {2, 8}
    alone = choices.batches(c, choices.mesh_change(c, 1, 1, 1))
    assert {x["lmhead_chunks"] for x in alone if x["per_device_batch_size"] == 2} == {2, 8}
    small = choices.smallest(choices.batches(c, of))
    assert (small["per_device_batch_size"], small["lmhead_chunks"], small[choices.FETCH]) == (1, 2, 1)
    few = choices.sample_batches(choices.batches(c, of))
    assert [x["per_device_batch_size"] for x in few] == [1, 2, 4]
    assert [x[choices.FETCH] for x in few] == [4, 2, 1]  # as many a fetch as there can be


def test_gpus_that_share_experts_are_in_one_machine():
    """They divide shards and experts; a setting that refuses `ep_size` leaves 1."""
    c = config(gpus=16, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, gradient_accumulation_steps=1)
    of = choices.mesh_change(c, 1, 1, 1)
    assert choices.expert_groups(c, H100, of, 16) == [1, 2, 4, 8]
    assert choices.expert_groups(c, FOUR_IN_ONE, of, 16) == [1, 2, 4]
    assert choices.expert_groups(c, FOUR_IN_ONE, of, 6) == [1, 2]
    assert choices.expert_groups(c, H100, of, 16, few=True) == [1, 8]
    in_pairs = choices.mesh_change(c, 2, 1, 1)
    assert choices.expert_groups(c, FOUR_IN_ONE, in_pairs, 8) == [1, 2]
    assert choices.expert_groups(config(gpus=16), H100, of, 16) == [1]
    assert choices.expert_groups(changed(c, {"memcpy_send_recv": True}), H100, of, 16) == [1]
    assert {mesh["ep_size"] for mesh in choices.meshes(c, H100, of, ())} == {1, 2, 4, 8}


@pytest.mark.parametrize("n, expected", [(1, [1]), (2, [1, 2]), (12, [1, 2, 3, 4, 6, 12])])
def test_divisors(n, expected):
    assert divisors(n) == expected


def test_choices_of_some_names_are_the_smallest_first():
    assert list(choices.subsets("ab")) == [(), ("a",), ("b",), ("a", "b")]


def test_what_exceeds_a_limit_is_of_its_own_memory():
    need = Memory(10, 20, 30)
    assert need.beyond(Memory(4, 15, 29)) == (6, 5, 1) and not need.fits(Memory(10, 20, 29))
    assert need.fits(Memory(10, 20, 30)) and need.beyond(Memory(10, 20, 30)) == (0, 0, 0)
    for name in Memory._fields:
        assert not need.fits(need._replace(**{name: getattr(need, name) - 1}))
        assert need.fits(Memory(10, 20, 30)._replace(**{name: 100}))
    assert Memory(2**30, 2**21, 3e9).text() == "1.0 GiB on each GPU, 2.0 MiB of host memory, 3.0 GB of files"
    assert Memory(2**30, 0, 0).text("device") == "1.0 GiB on each device"
