"""The predicted time of a step with files: of programs that overlap with what their layers read and write."""

import itertools
import math
import re
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from small import quick_at

from surojax.config import flags
from surojax.errors import ConfigError
from surojax.planner import file_time, footprint, seen, traffic
from surojax.planner.costs import MAIN
from surojax.planner.disks import SAID, Disks, wear
from surojax.planner.drives import DRIVES, disks
from surojax.planner.file_time import SimulatedStep
from surojax.planner.gpus import GPUS
from surojax.planner.rates import DISKS
from surojax.planner.timeline import WAITS, Timeline, TimelineEvent
from surojax.planner.traffic import batch_of
from surojax.step.several_programs import Program

CONFIGS = Path(__file__).parents[1] / "configs"
GPU = GPUS["rtx4090"]
GIGABYTE = 10**9
PRODUCT = TimelineEvent("product", "product", MAIN, "layer", 0.0, 0.9, 0.0)
WAIT = TimelineEvent("wait", "host in", WAITS, "layer", 0.9, 1.0, 0.0)
ONE = Disks(read=1e9, write=0.5e9)


@pytest.fixture
def a_second_each(monkeypatch):
    """Every program takes a second."""
    monkeypatch.setattr(
        file_time,
        "simulate",
        lambda _, events: Timeline(1.0, {"product": 0.9}, {("loop", "host in"): 0.1}, [PRODUCT, WAIT]),
    )


def seconds(*parts: Program, disks: Disks = ONE, gpus: int = 1, machines: int = 1) -> Timeline:
    step = SimulatedStep([{}] * len(parts), {"dp_shard": gpus}, parts, machines, disks)
    return step.timeline(GPU)


def waited(events: list[TimelineEvent]) -> Counter[str]:
    """Seconds of the row of waits by what is waited for."""
    return sum((Counter({x.kind: x.end - x.begin}) for x in events if x.stream == WAITS), Counter())


def exposed(found: Timeline) -> Counter[str]:
    """Exposed seconds by kind, as tables have them."""
    return sum((Counter({kind: seconds}) for (_, kind), seconds in found.exposed.items()), Counter())


def layers(name: str, read: int = 0, written: int = 0, put=(), *, row: str = "weights") -> Program:
    return Program(None, (), 10, (), name, Counter({row: read}), Counter({row: written}), put)


@pytest.mark.usefixtures("a_second_each")
def test_a_layer_takes_as_long_as_its_program_or_its_files():
    hidden = seconds(layers("forward", read=GIGABYTE), disks=Disks(read=4e9, write=4e9))
    assert hidden.seconds == pytest.approx(10 + 0.25)  # the first layer is waited for
    assert hidden.exposed["forward", DISKS] == pytest.approx(0.25)
    bound = seconds(layers("backward", read=GIGABYTE, written=GIGABYTE))
    assert bound.seconds == pytest.approx(10 * 3 + 3) and bound.busy[DISKS] == pytest.approx(30)
    assert bound.exposed["backward", DISKS] == pytest.approx(23)


@pytest.mark.usefixtures("a_second_each")
def test_what_no_program_hides_is_said_by_class():
    """Of each pass in proportion to the seconds of a class, which for the same bytes are twice as many when written."""
    forward = layers("forward", read=GIGABYTE)
    update = layers("update", GIGABYTE, GIGABYTE, row="moments")
    update = update._replace(read=update.read + Counter(master=GIGABYTE))
    hidden = layers("backward", read=GIGABYTE // 100, row="residuals")
    found = seconds(forward, update, hidden)
    assert found.exposed_rows == pytest.approx(
        {"weights": 1, "moments": 32 * 3 / 4, "master": 32 / 4, "residuals": 0.01}
    )
    assert sum(found.exposed_rows.values()) == pytest.approx(
        sum(s for (_, kind), s in found.exposed.items() if kind == DISKS)
    )


@pytest.mark.usefixtures("a_second_each")
def test_what_hides_the_ends_of_a_pass():
    update = layers("update", read=GIGABYTE, written=GIGABYTE)
    assert seconds(update).seconds == pytest.approx(30 + 2)  # its first layer is read meanwhile
    of_two_parts = seconds(layers("forward", read=GIGABYTE), layers("forward", read=GIGABYTE))
    assert of_two_parts.seconds == pytest.approx(20 + 1)  # once for a pass, however many programs it has
    writes_last = seconds(layers("update"), layers("update", written=GIGABYTE))
    assert writes_last.seconds == pytest.approx(20 + 2)  # whichever of its programs it is
    assert seconds(Program(None, (), 1)).seconds == 1


@pytest.mark.usefixtures("a_second_each")
def test_machines_share_the_bytes_and_gpus_those_that_the_host_puts():
    read = layers("forward", read=GIGABYTE)
    assert seconds(read, disks=Disks(0.25e9, 1e9), gpus=16, machines=2).seconds == pytest.approx(20 + 2)
    link = GPU.pcie_bandwidth * GPU.rates.host
    slow = jax.ShapeDtypeStruct((1, int(8 * link)), jnp.int8)
    of_link = seconds(layers("forward", put=slow), gpus=4)
    assert of_link.seconds == pytest.approx(20) and of_link.exposed["forward", "host in"] == pytest.approx(10 + 1)


@pytest.mark.usefixtures("a_second_each")
@pytest.mark.parametrize("disks", [ONE, Disks(read=1e10, write=1e10)])
def test_the_events_of_a_step_with_files(disks):
    """They take as long as the step, the disk does one thing at a time, and what waits is what is exposed."""
    turns = layers("forward", read=GIGABYTE, written=GIGABYTE // 2)
    parts = Program(None, (), 1), turns, turns, layers("backward", read=GIGABYTE), layers("update", GIGABYTE, GIGABYTE)
    step = SimulatedStep([{}] * len(parts), {"dp_shard": 1}, parts, 1, disks)
    found = step.timeline(GPU, with_events=True)
    without = step.timeline(GPU)
    assert not without.events and (without.seconds, without.exposed) == (found.seconds, found.exposed)
    by_row = {row: [x for x in found.events if x.stream == row] for row in (MAIN, WAITS, DISKS)}
    on_disk = sorted(by_row[DISKS], key=lambda x: x.begin)
    assert all(before.end <= after.begin + 1e-9 for before, after in itertools.pairwise(on_disk))
    assert max(x.end for x in found.events) == pytest.approx(found.seconds)
    assert sum(x.end - x.begin for x in on_disk) == pytest.approx(found.busy[DISKS])
    assert waited(found.events) == pytest.approx(Counter(exposed(found)))
    assert len([x for x in by_row[MAIN] if x.name == "product"]) == len(parts)  # drawn once of each program
    assert len(by_row[MAIN]) == 1 + 2 * len(parts[1:])  # and all other layers of it as one event


def test_the_option(tmp_path):
    assert disks("7.4/6.9") == Disks(7.4e9, 6.9e9, SAID, 1200, "as given")
    assert disks("2x7/6") == Disks(14e9, 12e9, SAID, 2400, "as given")
    assert "assumed" in str(disks(None)) and "as given" in str(disks("7/6"))
    for wrong in ("", "7", "7/0", "-7/6", "0x7/6", "7/6x2", "nan/6", "7/99999", "7/6 ", "sn850", "sn850x:0", "t500:"):
        with pytest.raises(ConfigError, match=r"^--disk: expected GB/s read and written, .*" + re.escape(repr(wrong))):
            disks(wrong)


def test_drives_by_name_and_folders_that_were_measured(tmp_path):
    for name, drive in DRIVES.items():
        two = disks(f"{name}:2")
        assert (two.read, two.write, two.tbw) == (2e9 * drive.read, 2e9 * drive.write, 2 * drive.tbw)
        assert disks(name).read == two.read / 2 and name in str(two)
    rates = str(tmp_path / "rates.json")
    one, other = str(tmp_path / "a"), str(tmp_path / "b")
    assert f"--disk {one}" in seen.record_disk(rates, one, seen.DiskRates(3e9, 2e9))
    with pytest.raises(ConfigError, match=f"^--disk: expected a folder that was measured, got '{other}'"):
        disks(f"{one},{other}", rates)
    seen.record_disk(rates, other, seen.DiskRates(1e9, 0.5e9))
    both = disks(f"{one},{other}", rates)
    assert (both.read, both.write, both.tbw) == (4e9, 2.5e9, 2400)
    for bad in (0.0, 1e12, float("nan")):
        assert "is not written" in seen.record_disk(rates, other, seen.DiskRates(bad, 1e9))
    seen.record_disk(rates, other, seen.DiskRates(2e9, 1e9))  # the newest counts
    assert disks(other, rates).read == 2e9 and seen.corrected(GPU, rates) == GPU


def test_the_endurance_of_drives():
    assert wear(1.2e12, 2400).startswith("1,200.0 GB written to files a step: the 2,400 TB ")
    assert wear(1.2e12, 2400).endswith("after 2,000 steps") and "nothing" in wear(0, 1200)


FP32 = {"opt_m_dtype": "float32", "opt_v_dtype": "float32"}
BF16_MASTER = {"master_dtype": "bfloat16"}
# Bytes that a block's parameter is read and written a step: of master weights and moments 12, 6 or 4, and 2 each of
# gradients and work weights, which embedding and head have on the GPU. Master and work weights in bfloat16 are the same
# numbers, written once.
DISK_BYTES = [
    ("llama7b", FP32, 16, 16),
    ("llama70b", FP32, 16, 16),
    ("qwen32b", FP32, 16, 16),
    ("llama405b", FP32, 16, 16),
    ("llama70b", BF16_MASTER, 10, 8),
    ("llama70b", BF16_MASTER | {"optimizer": "adamw8bit"}, 8, 6),
]


@pytest.mark.parametrize("name, numbers, read, written", quick_at(DISK_BYTES, 0, 5))
def test_bytes_that_disks_move_are_those_of_the_textbook(name, numbers, read, written):
    """State, gradients and weights in files, updated under the next forward pass: weights are read backward only."""
    c = flags.load_config(str(CONFIGS / f"{name}.py"))
    classes = ("offload_optimizer", "offload_master", "offload_grads", "offload_weights")
    c.update(dict.fromkeys(classes, "nvme") | {"nvme_path": "FOLDER", "overlap_update": True, "gpus": 1} | numbers)
    c.update({"offload_residual": True, "zero_level": 1, "shard_outer": False, "accum_dtype": "bfloat16"})
    c.update({"opt_m_dtype": "bfloat16", "opt_v_dtype": "bfloat16"} | numbers | {"gradient_accumulation_steps": 4})
    run = footprint.assembly(c)
    parameters = sum(
        math.prod(p.shape) * segment.num_layers
        for segment in run.model.segments
        for p in jax.tree.leaves(segment.params)
    )
    outer = sum(math.prod(p.shape) for p in jax.tree.leaves(run.model.outer_params))
    moved = traffic.file_bytes(run, batch_of(c), footprint.by_class(run, batch_of(c), "gpu"))
    of_outer = (read - 4) * outer  # state alone: their weights and gradients are on the GPU
    assert moved == pytest.approx((read * parameters + of_outer, written * parameters + of_outer), rel=0.02)
