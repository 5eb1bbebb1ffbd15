"""Links between machines: which axes cross them, and what that costs."""

import dataclasses

import pytest
from test_plan import config
from test_timeline import GATHERED, GATHERS, GPU, ROUND, program, simulated

from surojax.errors import ConfigError
from surojax.planner import candidate
from surojax.planner.gpus import GPUS, with_nodes
from surojax.planner.links import bandwidth, crossing, hops, rate

H100 = GPUS["h100"]
MESH_64 = {"pp": 2, "dp_replicate": 1, "dp_shard": 8, "cp": 1, "tp": 4, "tp_rep": 1}


@pytest.mark.parametrize(
    "gpus_per_node, expected",
    [(64, []), (32, ["pp"]), (8, ["pp", "dp_shard"]), (2, ["pp", "dp_shard", "tp"]), (6, ["pp", "dp_shard", "tp"])],
)
def test_axes_that_cross_machines(gpus_per_node, expected):
    """The last axes are within a machine; of 6 GPUs, one has a part of a group of 4."""
    assert crossing(dataclasses.replace(H100, gpus_per_node=gpus_per_node), MESH_64) == expected


def test_a_group_sends_over_the_adapters_of_its_gpus():
    """NVLink 450 GB/s within a machine; adapters of 50 GB/s between: one for each GPU of the group in a machine."""
    assert bandwidth(H100, MESH_64, "all-gather", "tp") == 450e9
    assert bandwidth(H100, MESH_64, "all-gather", "dp_shard") == 2 * 50e9  # 8 GPUs, of which 2 are in a machine
    assert bandwidth(H100, MESH_64, "all-reduce", "dp_shard+tp") == 8 * 50e9
    assert bandwidth(H100, MESH_64, "collective-permute", "pp") == 50e9
    assert bandwidth(H100, {"dp_shard": 16}, "collective-permute", "dp_shard") == 50e9  # the slowest of a ring
    assert bandwidth(dataclasses.replace(H100, network_bandwidth=200e9), MESH_64, "all-gather", "dp_shard+tp") == 450e9


def test_the_slowest_group_counts():
    """In machines of 6, GPUs 0 to 3 are in one, 4 and 5 are not with 6 and 7: two adapters of each machine at most."""
    six = dataclasses.replace(H100, gpus_per_node=6)
    assert bandwidth(six, {"dp_shard": 3, "tp": 4}, "all-gather", "tp") == 2 * 50e9
    three = dataclasses.replace(H100, gpus_per_node=3)  # 0 to 3 are in two, with one alone; 4 to 7 are two and two
    assert bandwidth(three, {"dp_shard": 2, "tp": 4}, "all-gather", "tp") == 50e9
    assert bandwidth(six, {"tp": 4}, "all-gather", "tp") == 450e9


@pytest.mark.parametrize(
    "op, axes, expected",
    [
        ("all-gather", "tp", 3),
        ("all-gather", "dp_shard+tp", 31),
        ("collective-permute", "pp", 1),
        ("all-reduce", "tp", 6),
        ("all-reduce", "dp_shard+tp", 2 * (7 + 2)),  # 8 GPUs in each of 4 machines
        ("all-reduce", "dp_shard", 2 * (1 + 2)),
    ],
)
def test_hops_of_rings_and_of_a_tree_between_machines(op, axes, expected):
    assert hops(H100, MESH_64, op, axes) == expected


def test_host_memory_is_that_of_a_machine():
    c = config(gpus=16, zero_level=3, offload_master=True)
    one, two = (candidate.estimated(c, with_nodes("h100", n)).need for n in (16, 8))
    assert one.host == 2 * two.host > 0 and one.device == two.device


def test_what_programs_reach_of_it():
    assert rate(H100, MESH_64, "all-gather", "tp") == pytest.approx(360e9)
    assert rate(H100, MESH_64, "all-gather", "dp_shard") == pytest.approx(90e9)


def test_a_collective_between_machines_takes_longer():
    """Two megabytes: two seconds over a link of a megabyte a second, 20 over adapters of a tenth; and hops."""
    rates = dataclasses.replace(ROUND, network=0.5)
    far = dataclasses.replace(GPU, gpus_per_node=1, network_bandwidth=2e5, rates=rates)
    seconds = [simulated(program(GATHERS, GATHERED), gpu).seconds for gpu in (GPU, far)]
    assert seconds == [pytest.approx(0.5 + 2.0, rel=1e-4), pytest.approx(0.5 + 20.0, rel=1e-4)]


def test_a_search_knows_the_links():
    """By estimate, 16 GPUs of one machine take less time than 16 in machines of 2."""
    c = config(gpus=16, zero_level=3)
    one, eight = (candidate.estimated(c, with_nodes("h100", n)).seconds for n in (16, 2))
    assert one < eight


def test_a_machine_without_gpus_is_refused():
    with pytest.raises(ConfigError, match=r"^--gpus-per-node: expected 1 to 131,072 GPUs in a machine, got 0"):
        with_nodes("h100", 0)
