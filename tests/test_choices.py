"""The values that a search tries, by hand: sizes of groups, of microbatches and of slices, and their order."""

import dataclasses

import pytest

from surojax.config.changes import changed, differing
from surojax.config.fields import default_config, kinds, sequences_of_step
from surojax.errors import ConfigError
from surojax.planner import choices
from surojax.planner.amounts import Memory
from surojax.planner.gpus import GPUS
from surojax.planner.roofline import StorageTiers
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


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"sequence_len": 8191}, {"cp_size": "sequences of 8,191 tokens are shorter than 8,192"}),
        ({"sequence_len": 8192}, {}),
        ({"sequence_len": 4096, "cp_size": 2}, {}),  # not only long ones may keep their groups
        ({"sequence_len": 8192, "tp_size": 8, "gradient_accumulation_steps": 2}, {}),
        (
            {"sequence_len": 8192, "tp_size": 8},
            {"pp_size": "one sequence a step cannot be divided into microbatches"},
        ),
    ],
)
def test_why_an_axis_is_not_tried(changes, why):
    c = config(**{"gpus": 8, "per_device_batch_size": 1, "gradient_accumulation_steps": 1, "num_attention_heads": 8,
                  "num_key_value_heads": 8} | changes)  # fmt: skip
    assert choices.mesh_layouts(c, H100, ())[1] == why


def test_groups_have_the_same_number_of_sequences():
    """Six sequences a step of four GPUs: of one group or two, not of four."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "sequence_len": 1024}
    c = config(gpus=4, tp_size=4, per_device_batch_size=1, gradient_accumulation_steps=6, **heads)
    found, _ = choices.mesh_layouts(c, H100, ("cp_size", "pp_size"))
    assert [sizes(change) for change in found] == [(4, 1, 1), (2, 1, 1)]


def test_a_schedule_is_the_config_s_own_if_it_has_stages():
    staged = config(gpus=2, pp_size=2, pp_schedule="gpipe", gradient_accumulation_steps=4)
    alone = changed(staged, {"pp_size": 1})
    default = default_config().pp_schedule
    for c, pp, schedule in ((staged, 2, "gpipe"), (staged, 1, default), (alone, 2, "1f1b"), (alone, 1, default)):
        assert choices.mesh_change(c, 1, 1, pp)["pp_schedule"] == schedule


@pytest.mark.parametrize("gpus, replicas", [(4, {1, 2}), (8, {1, 2}), (12, {1, 3})])
def test_replicas_are_whole_machines_or_within_one(gpus, replicas):
    c = config(gpus=gpus)
    found = choices.meshes(c, FOUR_IN_ONE, choices.mesh_change(c, 1, 1, 1), ())
    assert {mesh["dp_replicate_size"] for mesh in found} == replicas


@pytest.mark.parametrize("length, own, expected", [(8192, 1, [1]), (16384, 1, [2, 1]), (32768, 4, [4]), (8192, 2, [2])])
def test_chunks_of_long_sequences(length, own, expected):
    """Of 8,192 tokens on each device; a group of two has half of a sequence on each."""
    c = config(sequence_len=length, sequence_chunks=own)
    found = choices.chunks(c, choices.mesh_change(c, 1, 1, 1))
    assert [change["sequence_chunks"] for change in found] == expected
    on_two = changed(c, {"gpus": 2, "tp_size": 2, "sequence_len": 2 * length})
    assert choices.chunks(on_two, choices.own_layout(on_two)) == found


def test_slices_have_a_token_of_each_gpu_at_least():
    c = changed(config(), {"gpus": 16, "tp_size": 16, "sequence_len": 8, "gradient_accumulation_steps": 4})
    found = choices.batches(c, choices.own_layout(c))
    assert min(change["per_device_batch_size"] for change in found if differing(c, change)) == 2


def test_placements_of_eight_bit_copies_go_with_the_weights():
    """Their fields are tried only if there are copies, and a folder is the config's own."""
    plain = config(nvme_path="/disk")
    quants = changed(plain, {"persistent_quants": True})
    weights = StorageTiers(("weights",))
    assert choices.placement(plain, weights) == {
        "offload_weights": True,
        "resident_layers": 0,
        "overlap_update": False,
    }
    assert choices.placement(quants, weights)["offload_quants"] is True
    assert "offload_quants" not in choices.placement(quants, StorageTiers(("master",)))
    assert choices.nothing_offloaded(quants)["offload_quants"] is False
    assert not any(choices.nothing_offloaded(plain)[field] for field in choices.OFFLOADS.values())
    assert "offload_quants" not in choices.nothing_offloaded(plain)
    in_files = StorageTiers(("master",), ("master",))
    assert choices.placement(plain, in_files)["nvme_path"] == "/disk"
    assert choices.placement(changed(plain, {"nvme_path": ""}), in_files)["nvme_path"] == "FOLDER"


@pytest.mark.parametrize(
    "gpus, tp, sequences, said",
    [
        (4, 1, 0, "expected a multiple of the 4 GPUs, got 0"),
        (4, 1, 6, "expected a multiple of the 4 GPUs, got 6"),
        (4, 2, 3, "expected a multiple of the 2 groups of GPUs, got 3"),
        (2, 4, 4, "expected a multiple of the 0 groups of GPUs, got 4"),
        (1, 1, 2**31, "expected less than 2\\^31 sequences, got 2147483648"),
        (1, 1, 2**31 - 1, None),
        (4, 1, 4, None),
    ],
)
def test_effective_batches(gpus, tp, sequences, said):
    c = changed(config(), {"gpus": gpus, "tp_size": tp, "sequence_len": 8})
    if said is None:
        assert sequences_of_step(choices.with_batch(c, sequences)) == sequences
        return
    with pytest.raises(ConfigError, match=f"^--effective-batch: {said}"):
        choices.with_batch(c, sequences)
