"""The search for the fastest settings: its estimates against compiled steps, its rules against trying everything."""

import argparse
import collections
import dataclasses
import itertools
import json
import math
import shlex
import types
from pathlib import Path
from typing import Any

import jax
import pytest
from commands import fit as command
from small import quick_at

from surojax.assembly.from_config import from_config
from surojax.config import checks, flags, write
from surojax.config.changes import changed, differing, flags as flags_of
from surojax.config.fields import default_config, flat, mesh_sizes
from surojax.errors import ConfigError
from surojax.models.kinds.sublayer import OnGpu
from surojax.offloads import TO_DEVICE
from surojax.placement.mesh import make_mesh
from surojax.planner import (
    aot,
    candidate,
    choices,
    expert_time,
    fastest,
    file_time,
    footprint,
    layer_sizes,
    remedies,
    roofline,
    search,
    step_collectives,
    traffic,
)
from surojax.planner.amounts import GiB, Memory, gib
from surojax.planner.costs import product_time
from surojax.planner.disks import Disks
from surojax.planner.gpus import GPUS, POOL
from surojax.planner.products import Seconds
from surojax.planner.roofline import StorageTiers
from surojax.planner.run_plan import checked, plan, programs
from surojax.planner.search import Space
from surojax.planner.traffic import batch_of
from surojax.step import passes
from surojax.step.passes import LaneAction

CONFIGS = Path(__file__).parents[1] / "configs"
needs_compiler = pytest.mark.skipif(not aot.available(), reason=f"no compiler for GPUs here: {aot.EXTRA}")
GPU = "rtx4090"
SMALL = {
    "model.hidden_size": 512,
    "model.intermediate_size": 1536,
    "model.num_hidden_layers": 8,
    "model.num_attention_heads": 8,
    "model.num_key_value_heads": 8,
    "model.vocab_size": 1024,
    "sequence_len": 256,
    "per_device_batch_size": 1,
    "gradient_accumulation_steps": 2,
}

SLOW = Disks(read=0.5e9, write=0.25e9)
IN_FILES = dict.fromkeys(choices.OFFLOADS.values(), "nvme") | {"nvme_path": "x", "overlap_update": False}
BLOCK = ("recompute_block", "per_device_batch_size")  # kept, where a search of fewer settings is enough


def config(name: str = "llama7b", **changes):
    c = flags.load_config(str(CONFIGS / f"{name}.py"))
    for field, value in changes.items():
        owner = c.model if field.startswith("model.") else c
        owner[field.removeprefix("model.")] = value
    return c


GATHERED = step_collectives.LaneStage("weights", LaneAction.GATHER, "arriving")
REDUCED = step_collectives.LaneStage("grads", LaneAction.REDUCE, "leaving")
ONCE = step_collectives.LaneStage("grads", LaneAction.REDUCE_REPLICAS, "last")


def work_of(c) -> roofline.StepWork:
    """The work of a checked config's step."""
    run = footprint.assembly(c)
    return roofline.step_work(run, batch_of(c), GPUS[GPU], footprint.by_class(run, batch_of(c), "gpu"))


def everything(c, limits: Memory) -> list[tuple[float, Memory]]:
    """(estimated seconds, need) of every setting of a space without rules: placement, recomputation, microbatches."""
    found = []
    homes = [dict(zip(choices.OFFLOADS.values(), on, strict=True)) for on in itertools.product((False, True), repeat=5)]
    splits = [(1, 2), (2, 1)]
    for home, again, (size, count) in itertools.product(homes, choices.recomputations(c), splits):
        change = home | again
        change |= {"per_device_batch_size": size, "gradient_accumulation_steps": count, "lmhead_chunks": 1}
        tried = candidate.estimated(changed(c, change), GPUS[GPU])
        if tried.need.fits(limits):
            found.append((tried.seconds, tried.need))
    return found


def test_resident_layers_cut_no_round_of_a_pattern():
    """In a cut round each layer is a loop with prefetched weights of its own. Layers of one kind have no rounds."""
    of_kinds, of_one = (footprint.assembly(config(name, gpus=1)).model for name in ("qwen3_5_9b", "llama7b"))
    assert [layer_sizes.resident_in_rounds(of_kinds, 1, n) for n in (0, 5, 6, 14, 15, 24)] == [0, 0, 6, 12, 15, 24]
    assert [layer_sizes.resident_in_rounds(of_one, 1, n) for n in (0, 5, 14)] == [0, 5, 14]


@pytest.mark.parametrize("part, host", [(0.4, None), (0.7, None), (0.75, 0.45)], ids=["tight", "roomy", "host"])
@pytest.mark.full
def test_the_rules_lose_nothing(part, host):
    """Trying everything finds nothing faster that fits; resident layers only add to what the search can do."""
    c = checked(config(**SMALL), GPU)
    whole = candidate.estimated(c, GPUS[GPU]).need
    limits = Memory(part * whole.device, float("inf") if host is None else host * whole.device)
    shown: list[str] = []
    found = search.search(Space(c, GPUS[GPU], limits), status=shown.append)
    assert shown[-1].startswith("estimating settings: kind ") and shown[-1].endswith(f"of {found.families} at most")
    best = min(seconds for seconds, _ in everything(c, limits))
    assert found.candidates[0].seconds <= best * (1 + 1e-9)
    assert all(x.need.fits(limits) for x in found.candidates)
    assert [x.seconds for x in found.candidates] == sorted(x.seconds for x in found.candidates)
    for x in found.candidates[:3]:  # what is said of it is what an estimate of its config says
        tried = candidate.estimated(x.config, GPUS[GPU])
        assert tried.need == x.need and tried.seconds == pytest.approx(x.seconds)
        checks.check(x.config)
        assert x.config.per_device_batch_size * x.config.gradient_accumulation_steps == 2


def test_only_allowed_settings_change_numbers():
    c = checked(config(**SMALL), GPU)
    limits = Memory(candidate.device_limit(GPUS[GPU]))
    numbers = {name for change in choices.NUMBERS.values() for name in change} | {"model_dtype", "accum_dtype"}
    for allow in ((), ("adamw8bit",)):
        found = search.search(Space(c, GPUS[GPU], limits, allow=allow, keep=BLOCK)).candidates
        changed_fields = {name for x in found for name in numbers if x.config[name] != c[name]}
        assert changed_fields == ({"optimizer"} if allow else set())


@pytest.mark.parametrize("kept", [{"offload_master": False}, {"offload_master": True, "recompute_norm": True}], ids=str)
def test_what_is_kept_is_not_changed(kept):
    """Also values that the search would not try by itself; a placement that has to stay is part of every other one."""
    again = {"recompute_block": not kept.get("recompute_norm"), "validation_datasets": ({"path": "x"},)}
    c = checked(config(**SMALL | again, **kept), GPU)
    keep = ("recompute_block", "recompute_norm", "per_device_batch_size", "offload_master")
    found = search.search(Space(c, GPUS[GPU], Memory(2**40), keep=keep)).candidates
    assert found and all(x.config[name] == c[name] for x in found for name in keep)


@pytest.mark.full
def test_files_are_for_what_does_not_fit_otherwise():
    """Nothing in files while host memory is enough; then the fewest bytes that do, within the room for files."""
    c = checked(config(**SMALL), GPU)
    whole = candidate.estimated(c, GPUS[GPU]).need.device
    roomy = search.search(Space(c, GPUS[GPU], Memory(0.4 * whole, files=2**40), keep=BLOCK)).candidates
    assert roomy and not any(x.need.files for x in roomy)
    scarce = Memory(0.4 * whole, 0.45 * whole, files=2**40)
    assert not search.search(Space(c, GPUS[GPU], scarce._replace(files=0), keep=BLOCK)).candidates
    found = search.search(Space(c, GPUS[GPU], scarce, keep=BLOCK)).candidates
    assert found and all(x.need.files and x.config.nvme_path for x in found)


def test_a_phase_takes_as_long_as_its_busiest_resource():
    """By hand, for a step whose update waits for the host and whose forward pass computes."""
    c = checked(config(**SMALL), GPU)
    gpu = GPUS[GPU]
    work = work_of(c)
    plain, offloaded = (roofline.phases(work, StorageTiers(rows)) for rows in ((), ("master", "moments")))
    parameters = 8 * (4 * 512**2 + 3 * 512 * 1536 + 2 * 512) + 2 * 1024 * 512 + 512
    moved = parameters * (4 + 2 + 2)  # float32 master weights, two bfloat16 moments: there and back
    host = gpu.pcie_bandwidth * gpu.rates.host * gpu.rates.duplex
    ends = 2 * moved / 8 / (gpu.pcie_bandwidth * gpu.rates.host)  # a layer is read before, and written after
    assert offloaded["update"] == pytest.approx(moved / host + ends, rel=1e-6)
    assert plain["update"] < offloaded["update"] and plain["forward"] == offloaded["forward"]
    products = (
        2
        * 8
        * sum(
            product_time(gpu, 256, n, k) + gpu.rates.launch
            for n, k in [(512, 512)] * 4 + [(1536, 512)] * 2 + [(512, 1536)]
        )
    )
    assert products < plain["forward"] < 3 * products


def test_a_pass_fetches_the_first_layers_of_its_loops():
    """Nemotron-3 Nano: five rounds of seven layers, three of two, a layer of each kind, four rounds of two.

    Loops of all rounds of Qwen3.5 have one end each.
    """
    of_one, of_several = (footprint.assembly(checked(config(x), GPU)) for x in ("qwen3_5_9b", "nemotron3_nano"))
    assert layer_sizes.fetched_again(of_one) == 0
    sizes = {segment.name: layer_sizes.fetched_bytes(of_several, segment) for segment in of_several.model.segments}
    again = 3 * sizes["mamba2"] + 3 * sizes["experts"] + sizes["blocks"]
    assert layer_sizes.fetched_again(of_several) == again
    work = work_of(checked(config("nemotron3_nano"), GPU))
    one = dataclasses.replace(work, fetched_again=0)
    later = [roofline.phases(x, StorageTiers(("weights",))) for x in (one, work)]
    rate = GPUS[GPU].pcie_bandwidth * GPUS[GPU].rates.host
    for name in ("forward", "backward"):
        assert later[1][name] - later[0][name] == pytest.approx(again / rate)


@pytest.mark.parametrize("name, kind", [("qwen3_5_9b", "linear_attention"), ("nemotron3_nano", "mamba2")])
def test_bytes_of_a_recurrence_are_those_of_its_tokens_and_heads(name, kind):
    """A recomputed block computes a group's maps again, unless a row has one group, which XLA computes once."""
    model = footprint.assembly(checked(config(name), GPU)).model
    mixer = next(segment.mixer for segment in model.segments if segment.name == kind)
    moved = lambda *x: mixer.space(model.compute, OnGpu(*x), gpu=True, packed=False, window=False).moved
    one, long = moved(1, 2048, "bfloat16", 1, 1, 1), moved(1, 4096, "bfloat16", 1, 1, 1)
    assert one.again == 0 and long == (2 * one.forward, 2 * one.forward, 2 * one.backward)
    assert moved(3, 4096, "bfloat16", 1, 1, 1) == tuple(3 * size for size in long)
    assert moved(1, 2048, "bfloat16", 2, 2, 1).forward == one.forward  # half of the heads, all tokens of both GPUs


def test_microbatches_of_one_fetch_share_its_transfers():
    """By hand: weights are read twice a fetch, residuals written and read for each microbatch.

    Accumulators are written for each fetch, and read for each but the first.
    """
    gpu = GPUS[GPU]
    rate = gpu.pcie_bandwidth * gpu.rates.host
    for group, fetches in ((1, 8), (4, 2), (8, 1)):
        c = checked(config(**SMALL | {"gradient_accumulation_steps": 8, "microbatches_per_fetch": group}), GPU)
        work = work_of(c)
        assert work.fetches == fetches
        work = dataclasses.replace(work, blocks=Seconds(), layer_bytes=0)
        grads = 1 + (fetches - 1) / gpu.rates.duplex
        for name, times in (("weights", 2 * fetches), ("grads", grads), ("residuals", 2 * fetches)):
            found = roofline.phases(work, StorageTiers((name,)))
            moved = times * work.sizes[name] / rate
            assert found["forward"] + found["backward"] == pytest.approx(moved), (group, name)


def test_microbatches_of_one_fetch_share_its_gathers():
    """By hand: three quarters of the blocks' weights for a pass, and as much to reduce each microbatch's gradients.

    Each of eight gathers, and of 56 reductions, takes three hops more.
    """
    blocks = 8 * (4 * 512**2 + 3 * 512 * 1536 + 2 * 512)
    gpu = GPUS[GPU]
    seconds = 3 / 4 * 2 * blocks / (gpu.link_bandwidth * gpu.rates.link)
    for group in (1, 4, 8):
        changes = {"gradient_accumulation_steps": 8, "microbatches_per_fetch": group, "gpus": 4, "zero_level": 3}
        sent = work_of(checked(config(**SMALL | changes), GPU)).sent
        assert sent[GATHERED] == pytest.approx(seconds + 8 * 3 * gpu.rates.hop), group
        assert sent[REDUCED] == pytest.approx(seconds + 56 * 3 * gpu.rates.hop), group


def layer_of(work: roofline.StepWork, *, recomputed: bool) -> roofline.StepWork:
    """A step of one microbatch with 8 s of a forward pass, repeated in whole, and 20 s of gradients, the first in 4."""
    blocks = Seconds(forward=8.0, again=8.0, backward=20.0, first=4.0)
    gpu = dataclasses.replace(work.gpu, rates=dataclasses.replace(work.rates, collective_sms=0.0))
    engine = dataclasses.replace(work.engine, recompute_block=recomputed)
    of_one = {"microbatches": 1, "rounds": 1, "layer_bytes": 0, "head": 0.0, "smallest": 0.1}
    return dataclasses.replace(work, gpu=gpu, engine=engine, blocks=blocks, **of_one)


@pytest.mark.parametrize(
    "sent, recomputed, forward, backward",
    [
        ({}, True, 8, 28),
        ({GATHERED: 10.0}, True, 10, 28),
        ({GATHERED: 10.0}, False, 10, 38),  # nothing is left to hide behind
        ({GATHERED: 15.0, REDUCED: 10.0}, True, 15, 15 + 16 + 1),
        ({GATHERED: 15.0, REDUCED: 20.0}, True, 15, 15 + 20 + 2),
        ({ONCE: 20.0}, True, 8, 28 + 20),
        ({"forward": 4.0, "again": 3.0, "backward": 4.0}, True, 12, 12 + 3 + 16 + 4),
        ({"forward": 4.0, "again": 3.0, "backward": 4.0, REDUCED: 20.0}, True, 12, 12 + 3 + 20 + 2 + 4),
        ({GATHERED: 10.0, "forward": 4.0, "again": 3.0}, True, 0.6 * 8 + 10 + 4, 0.6 * 8 + 10 + 3 + 16),
    ],
    ids=str,
)
def test_what_a_collective_hides_behind(sent, recomputed, forward, backward):
    """By hand, in seconds."""
    work = layer_of(work_of(checked(config(**SMALL | {"gpus": 2, "zero_level": 3}), GPU)), recomputed=recomputed)
    found = roofline.phases(dataclasses.replace(work, sent=collections.Counter(sent)))
    assert (found["forward"], found["backward"]) == (pytest.approx(forward), pytest.approx(backward))


def test_a_class_that_is_gathered_is_read_from_its_lane(monkeypatch):
    """Master weights that an update would gather: three quarters of their bytes, which it waits for."""
    c = checked(config(**SMALL | {"gpus": 4, "zero_level": 3}), GPU)
    run = footprint.assembly(c)

    def planned() -> tuple[int, float]:
        """Bytes that are gathered, and seconds of the update."""
        sent = step_collectives.collective_bytes(run, batch_of(c))
        return sent["all-gather", "dp_shard"], roofline.phases(work_of(c))["update"]

    def gathers(engine, declared=passes.update):
        lanes = declared(engine).lanes
        arriving = {"master": (LaneAction.GATHER,)}
        return passes.Pass("update", tuple(x._replace(arriving=arriving.get(x.row, ())) for x in lanes), updates=True)

    before = planned()
    monkeypatch.setattr(passes, "update", gathers)
    more, longer = (after - x for after, x in zip(planned(), before, strict=True))
    assert more == 3 / 4 * 4 * 8 * (4 * 512**2 + 3 * 512 * 1536 + 2 * 512)
    rate = GPUS[GPU].link_bandwidth * GPUS[GPU].rates.link
    assert longer == pytest.approx(more / rate + 7 * 8 * 3 * GPUS[GPU].rates.hop)


def test_the_gpus_of_a_group_divide_its_attention():
    """What XLA's attention takes longer than a flash attention: half of it on each of two GPUs."""

    def longer(**changes) -> float:
        """Seconds of a forward pass."""
        of = (checked(config(**SMALL | changes, attention=by), GPU) for by in ("xla", "cudnn"))
        xla, flash = (work_of(c).blocks.forward for c in of)
        return xla - flash

    alone = longer(gpus=1)
    for changes in ({"tp_size": 2}, {"cp_size": 2}):
        assert longer(gpus=2, **changes) == pytest.approx(alone / 2)


@pytest.mark.parametrize("method", ["ulysses", "ring"])
def test_a_flash_attention_takes_no_time_for_scores(method):
    """cuDNN's and our kernel, which has copies and sums in memory besides, take the same time; XLA takes longer."""
    changes = {"gpus": 2, "cp_size": 2, "cp_method": method, "sequence_len": 4096}
    c = checked(config(**SMALL | changes), GPU)
    x = jax.ShapeDtypeStruct((1, 2048, 512), "bfloat16")
    cudnn, mosaic, xla = (changed(c, {"attention": by}) for by in ("cudnn", "mosaic", "xla"))
    for flash in (cudnn, mosaic):
        run = footprint.assembly(flash)
        assert footprint.segment_bytes(run, run.model.segments[0], x, "gpu").scores == 0
    forward = {c.attention: work_of(c).blocks.forward for c in (cudnn, mosaic, xla)}
    assert forward["cudnn"] == pytest.approx(forward["mosaic"]) and forward["cudnn"] < forward["xla"]


def test_an_update_hides_the_first_fetchs_forward_pass():
    """By hand: of two passes one is beside the update, whose transfers take longer than it; it reads no weights.

    Beside long passes a layer's state is written before the next one is read. Nothing hides that of the outer layers.
    """
    gpu = GPUS[GPU]
    names = ("master", "moments", "grads", "weights", "residuals")
    c = checked(config(**SMALL | {"gradient_accumulation_steps": 2}), GPU)
    work = work_of(c)
    apart, beside = (roofline.phases(work, StorageTiers(names, overlaps=x)) for x in (False, True))
    assert beside["forward"] == pytest.approx(apart["forward"] / 2)
    rate = gpu.pcie_bandwidth * gpu.rates.host
    outer = 2 * (2 * 1024 * 512 + 512) * (4 + 2 + 2) / 2  # in each direction
    state = work.sizes["master"] + work.sizes["moments"] - outer
    read = state + work.sizes["grads"]
    written = state + work.sizes["weights"] + work.sizes["residuals"]
    both = min(read, written) / gpu.rates.duplex + abs(read - written)
    ends = (read + written) / 8  # of a layer of eight nothing is read and written at once
    ends += outer / gpu.rates.duplex
    assert beside["update"] == pytest.approx((both + ends) / rate) and beside["update"] > work.blocks.forward
    assert not work.in_order and work_of(changed(c, {"per_device_batch_size": 128})).in_order
    in_order = roofline.phases(dataclasses.replace(work, in_order=True), StorageTiers(names, overlaps=True))
    assert in_order["update"] == pytest.approx((read + written + ends) / rate)
    assert {name: apart[name] for name in ("head", "backward", "between")} == {
        name: beside[name] for name in ("head", "backward", "between")
    }


@pytest.mark.full
@pytest.mark.parametrize("keep, expected", [((), True), (("overlap_update",), False)])
def test_an_overlapped_update_is_found_where_state_has_to_be_in_host_memory(keep, expected):
    """Not if the config's own value is kept."""
    c = checked(config(**SMALL | {"model.num_hidden_layers": 32}), GPU)
    offloads = dict.fromkeys(choices.OFFLOADS.values(), True)
    need = candidate.estimated(changed(c, offloads | {"overlap_update": True}), GPUS[GPU]).need
    best = search.search(Space(c, GPUS[GPU], Memory(need.device), keep=keep)).candidates[0]
    assert best.config.overlap_update is expected
    assert candidate.estimated(best.config, GPUS[GPU]).phases == best.phases


def test_a_phase_with_files_takes_as_long_as_its_disk():
    """By hand, with disks so slow that all passes wait for them. With fast ones its programs copy what they read and
    write before and after they compute, beside the weights that the host puts on the device."""
    c = checked(config(**SMALL | IN_FILES), GPU)
    work = work_of(c)
    outer = sum(work.tables.values())  # updated before the layers
    weights, state = work.sizes["weights"], work.sizes["master"] + work.sizes["moments"] - outer
    residuals, grads = work.sizes["residuals"], work.sizes["grads"]
    by_layer = candidate.estimated(c, GPUS[GPU], disks=SLOW).phases
    ends = 1 + 1 / 8  # of eight layers, the first that is read and the last that is written
    expected = SLOW.seconds(weights, residuals) * ends
    assert by_layer["forward"] == pytest.approx(expected)
    assert by_layer["backward"] == pytest.approx(SLOW.seconds(weights + residuals, grads) * ends)
    written = SLOW.seconds(0, state + weights)
    of_outer = SLOW.seconds(outer, outer)
    assert by_layer["update"] == pytest.approx(SLOW.seconds(state + grads, 0) + written * ends + of_outer)
    late = candidate.estimated(changed(c, {"overlap_update": True}), GPUS[GPU], disks=SLOW).phases
    expected = SLOW.seconds(state + grads, state + weights + residuals) * ends
    assert late["update"] == pytest.approx(expected + of_outer)
    assert late["forward"] == 0.0  # weights are not read before it
    copies = {"blocks": Seconds(), "layer_bytes": 0, "update_bytes": 0.0, "disks": Disks(1e15, 1e15)}
    rows = ("master", "moments", "grads", "weights", "residuals")
    fast = roofline.phases(dataclasses.replace(work, **copies), StorageTiers(rows, files=rows))
    rate = GPUS[GPU].pcie_bandwidth * GPUS[GPU].rates.host
    expected = {"forward": max(weights, residuals), "backward": max(weights, residuals + grads)}
    expected |= {"update": 2 * (state + outer) + grads + weights}
    assert {name: fast[name] * rate for name in expected} == pytest.approx(expected, rel=1e-4)


def test_weights_in_files_that_are_the_master_weights_are_written_once():
    """By hand, as above, with master weights in the weights' own 16 bits."""
    c = checked(config(**SMALL | IN_FILES | {"master_dtype": "bfloat16"}), GPU)
    work = work_of(c)
    outer = sum(work.tables.values())
    state, ends = work.sizes["master"] + work.sizes["moments"] - outer, 1 + 1 / 8
    phases = candidate.estimated(c, GPUS[GPU], disks=SLOW).phases
    assert work.as_master == 1.0
    assert phases["forward"] == pytest.approx(SLOW.seconds(work.sizes["weights"], work.sizes["residuals"]) * ends)
    written = SLOW.seconds(0, state) * ends + SLOW.seconds(outer, outer)
    assert phases["update"] == pytest.approx(SLOW.seconds(state + work.sizes["grads"], 0) + written)


@pytest.mark.parametrize("changes", [{}, {"overlap_update": True}, {"offload_weights": True}], ids=str)
def test_an_estimated_step_reads_and_writes_what_its_programs_do(changes):
    c = checked(config(**SMALL | IN_FILES | changes), GPU)
    mesh = make_mesh(jax.devices()[:1], **mesh_sizes(c))
    run = from_config(c, mesh.abstract_mesh, total_steps=10)
    rows = footprint.by_class(run, batch_of(c), "gpu")
    assert traffic.file_bytes(run, batch_of(c), rows) == file_time.moved(programs(run, mesh, batch_of(c)))


def test_host_memory_that_is_left_keeps_a_part_of_files(tmp_path):
    """A candidate needs and takes what an estimate of its own config says, and less time than with all in files."""
    own_files = IN_FILES | {"nvme_path": str(tmp_path), "overlap_update": True}
    c = checked(config(**SMALL | own_files | {"model.num_hidden_layers": 64}), GPU)
    need = candidate.estimated(c, GPUS[GPU]).need
    limits = Memory(1.2 * need.device, (1 + 2 * search.UNCERTAIN) * need.host + GiB, files=2**40)
    keep = (*BLOCK[:1], *own_files)
    best = search.search(Space(c, GPUS[GPU], limits, keep=keep, disks=SLOW)).candidates[0]
    assert best.config.files_in_memory == 1 and best.need.files > 0
    own = candidate.estimated(best.config, GPUS[GPU], disks=SLOW)
    assert own.need == best.need and own.phases == best.phases
    in_files = candidate.estimated(changed(best.config, {"files_in_memory": 0.0}), GPUS[GPU], disks=SLOW)
    assert in_files.need.host + GiB == own.need.host and own.seconds < in_files.seconds
    kept = Space(c, GPUS[GPU], limits, keep=(*keep, "files_in_memory"), disks=SLOW)
    assert search.search(kept).candidates[0].config.files_in_memory == 0
    # Of far more host memory, no more is proposed than the files have.
    plenty = limits._replace(host=limits.host + 1000 * GiB)
    most = search.search(Space(c, GPUS[GPU], plenty, keep=keep, disks=SLOW)).candidates[0]
    assert most.config.files_in_memory == search.in_steps(need.files) >= 1 and 0 <= most.need.files < GiB / search.STEPS


def test_device_memory_that_is_left_keeps_a_part_of_the_state():
    """A candidate needs and takes what an estimate of its own config says, and less than with all in host memory."""
    offloads = {name: True for row, name in choices.OFFLOADS.items() if row != "weights"}
    c = checked(config(**SMALL | offloads | {"model.num_hidden_layers": 64}), GPU)
    need = candidate.estimated(c, GPUS[GPU]).need
    room = 1.5 * GiB  # more than a whole GiB
    limits = Memory(int((1 + 2 * search.UNCERTAIN) * need.device + room), need.host)
    keep = (*BLOCK[:1], *choices.OFFLOADS.values(), "overlap_update")
    best = search.search(Space(c, GPUS[GPU], limits, keep=keep)).candidates[0]
    own = candidate.estimated(best.config, GPUS[GPU])
    assert best.config.device_memory == 1.5 and own.need == best.need and own.phases == best.phases
    in_host = candidate.estimated(changed(best.config, {"device_memory": 0.0}), GPUS[GPU])
    kept = own.need.device - in_host.need.device
    assert 0.8 * room < kept <= room and kept == in_host.need.host - own.need.host
    assert own.seconds < in_host.seconds
    given = Space(c, GPUS[GPU], limits, keep=(*keep, "device_memory"))
    assert search.search(given).candidates[0].config.device_memory == 0
    # Of far more device memory, no more is proposed than these classes have in host memory.
    plenty = limits._replace(device=limits.device + 1000 * GiB)
    most = search.search(Space(c, GPUS[GPU], plenty, keep=keep)).candidates[0].config
    in_host = candidate.estimated(changed(most, {"device_memory": 0.0}), GPUS[GPU]).need.host
    assert 1 < most.device_memory <= in_host / GiB


def test_less_device_memory_that_is_faster_is_taken():
    """Of whole tensors a larger part may be slower: compiled, 3,967 ms with 18.75 GiB and 4,102 with 19. If only the
    larger one leaves enough host memory, that is taken."""
    offloads = dict.fromkeys(choices.OFFLOADS.values(), True)
    c = checked(config(gpus=1, **offloads), GPU)
    fast, large = (candidate.estimated(changed(c, {"device_memory": x}), GPUS[GPU]) for x in (18.75, 19.0))
    assert fast.seconds < 0.98 * large.seconds and fast.need.host > large.need.host
    none = candidate.estimated(c, GPUS[GPU]).need.device
    device = int((1 + search.UNCERTAIN) * none + 19.1 * GiB)
    keep = ("resident_layers", *offloads, "overlap_update", "recompute_block", "lmhead_chunks", "per_device_batch_size")
    for host, expected in ((math.inf, 18.75), (large.need.host, 19.0)):
        space = Space(c, GPUS[GPU], Memory(device, host), keep=keep)
        assert search.best(space).config.device_memory == expected


@pytest.mark.parametrize(
    "changes", [{}, {"offload_grads": False}, {"offload_master": False, "offload_optimizer": False}]
)
def test_an_estimate_moves_what_device_memory_leaves_of_each_class(changes):
    """The tensors that have room are of several classes, whose bytes move in other passes."""
    offloads = {name: True for row, name in choices.OFFLOADS.items() if row in TO_DEVICE}
    c = checked(config(**SMALL | offloads | changes | {"gpus": 1, "device_memory": 0.06}), GPU)
    kept, none = (
        footprint.by_class(footprint.assembly(x), batch_of(x), "gpu") for x in (c, changed(c, {"device_memory": 0.0}))
    )
    of_classes = dict(zip(TO_DEVICE, candidate.kept_on_device(footprint.assembly(c)), strict=True))
    assert of_classes == {row: none[row]["host"] - kept[row]["host"] for row in TO_DEVICE}
    assert sum(of_classes.values()) > 0


def test_products_wait_for_the_residuals_of_stages():
    """Kernels copy them (STAGES in tests/test_plan.py), in every tick."""
    c = checked(config(**SMALL | {"gpus": 2, "pp_size": 2, "gradient_accumulation_steps": 4}), GPU)
    here, in_host = (changed(c, {"offload_residual": offloads}) for offloads in (False, True))
    run = footprint.assembly(in_host)
    size = footprint.by_class(run, batch_of(c), "gpu")["residuals"]["host"] / layer_sizes.slots(run, 4)
    waits = (4 + 2 - 1) * size / (GPUS[GPU].pcie_bandwidth * GPUS[GPU].rates.host)
    before, after = (candidate.estimated(x, GPUS[GPU]).phases for x in (here, in_host))
    assert {name: after[name] - before[name] for name in before} == pytest.approx(
        dict.fromkeys(before, 0.0) | {"forward": waits, "backward": waits}, rel=1e-3, abs=1e-9
    )


@pytest.mark.full
def test_every_class_goes_to_files_where_host_memory_holds_none(tmp_path):
    """What is said of them is what an estimate of their config says, also with slow disks."""
    c = checked(config(**SMALL | {"model.num_hidden_layers": 32, "nvme_path": str(tmp_path)}), GPU)
    need = candidate.estimated(changed(c, IN_FILES | {"overlap_update": True}), GPUS[GPU]).need
    limits = Memory(1.2 * need.device, need.host, files=2**40)
    fastest_of = {}
    for disks in (Disks(), SLOW):
        found = search.search(Space(c, GPUS[GPU], limits, keep=BLOCK[:1], disks=disks)).candidates
        assert len({x.config.gradient_accumulation_steps for x in found}) == 2
        fastest_of[disks] = found[0].seconds
        for x in found:
            assert x.config.offload_weights == x.config.offload_optimizer == "nvme"
            tried = candidate.estimated(x.config, GPUS[GPU], disks=disks)
            assert tried.need == x.need and tried.phases == pytest.approx(x.phases)
            checks.check(x.config)
    assert fastest_of[SLOW] > 2 * fastest_of[Disks()]
    (files,) = (x for x in remedies.proposals(Space(c, GPUS[GPU], limits._replace(files=0))) if "--nvme" in x.lifted)
    assert files.change["offload_grads"] == "nvme" and files.candidate.need.files


def test_other_numbers_that_are_worth_it_are_named_unless_they_are_allowed():
    """Here the update waits for the host, which reads and writes fewer bytes of each number in 16 or 8 bits."""
    in_host = {"offload_master": True, "offload_optimizer": True, "opt_m_dtype": "float32", "opt_v_dtype": "float32"}
    c = checked(config(**SMALL | in_host), GPU)

    def left_out(*allow: str) -> set[str]:
        space = Space(c, GPUS[GPU], Memory(2**40), allow=allow, keep=BLOCK)
        return set(fastest._left_out(space, fastest.Trial(c, {}, space.estimated(c), None, False)))

    assert {"adamw8bit", "bf16_master", "bf16_state"} <= left_out() and "bf16_weights" not in left_out()
    for word in left_out():
        assert left_out(word) == left_out() - {word}


def test_what_has_nothing_more_to_offer_is_not_searched():
    """A word that the config has already, and where all fits, an offload of anything."""
    c = checked(config(**SMALL | {"optimizer": "adamw8bit"}), GPU)
    found = search.search(Space(c, GPUS[GPU], Memory(2**40), allow=("adamw8bit",), keep=BLOCK)).candidates
    assert len({tuple(flat(x.config).items()) for x in found}) == len(found) > 0
    assert not any(x.config[field] for x in found for field in choices.OFFLOADS.values())


def test_layouts_keep_the_effective_batch_and_say_what_was_not_tried():
    """Of two GPUs: alone, tp_size=2 and pp_size=2; the latter is refused with a setting that it is not built for."""
    keep = ("recompute_block", "zero_level", "lmhead_chunks")
    c = checked(config(**SMALL | {"gpus": 2, "lmhead_chunks": 1}), GPU)
    found = search.search(Space(c, GPUS[GPU], Memory(2**40), keep=keep))
    sizes = [tuple(of[axis] for axis in choices.AXES) for of, _ in found.sampled]
    assert sorted(sizes) == [(1, 1, 1), (1, 1, 2), (2, 1, 1)]
    assert found.not_tried == {"cp_size": "sequences of 256 tokens are shorter than 8,192"}
    alone = search.search(Space(changed(c, {"gpus": 1}), GPUS[GPU], Memory(2**40), keep=keep))
    assert not alone.not_tried and not alone.sampled
    for of, _ in found.sampled:
        splits = choices.batches(c, of)
        assert {x["per_device_batch_size"] * x["gradient_accumulation_steps"] for x in splits} == {
            2 * choices.group(of)
        }
    c = checked(
        config(**SMALL | {"gpus": 2, "zero_level": 3, "use_all_to_all_reduce": True, "memcpy_send_recv": True}), GPU
    )
    found = search.search(Space(c, GPUS[GPU], Memory(2**40), keep=("recompute_block", "tp_size")))
    assert found.not_tried["tp_size"] == "kept"
    assert found.not_tried["pp_size"].startswith("memcpy_send_recv: expected False with pp_size=2")


@pytest.mark.parametrize(
    "sizes, changes, expected",
    [
        ((1, 2, 1), {}, "ulysses"),
        ((2, 4, 2), {}, "ulysses"),
        ((2, 8, 1), {}, "ring"),
        ((2, 8, 2), {}, "allgather"),
        ((1, 2, 1), {"model.num_attention_heads": 12, "model.num_key_value_heads": 3, "model.head_dim": 64}, "ring"),
        ((2, 4, 1), {"attention": "xla"}, "ring"),
        ((2, 4, 2), {"attention": "xla"}, "allgather"),
        ((1, 4, 1), {"cp_size": 2, "cp_method": "allgather"}, "allgather"),
        ((1, 4, 2), {"cp_size": 2, "cp_method": "ring"}, "ulysses"),
        ((1, 16, 1), {"cp_size": 2, "cp_method": "ulysses"}, "ring"),
    ],
    ids=str,
)
def test_a_layout_attends_in_a_way_that_its_sizes_allow(sizes, changes, expected):
    c = config(**SMALL | {"gpus": math.prod(sizes), "sequence_len": 8192, "zero_level": 3} | changes)
    of = choices.mesh_change(c, *sizes)
    assert of["cp_method"] == expected
    checks.check(changed(c, of))


@pytest.mark.full
def test_a_ring_is_found_for_a_model_with_windows():
    """cuDNN, which "auto" means for whole sequences, takes no pairs of pieces with a window; ulysses lacks heads."""
    heads = {"model.num_attention_heads": 2, "model.num_key_value_heads": 2, "model.head_dim": 64}
    windows = {"gpus": 4, "model.sliding_window": 1024, "sequence_len": 16384, "zero_level": 3}
    c = checked(config(**SMALL | heads | windows), GPU)
    keep = ("recompute_block", "pp_size", "lmhead_chunks")
    found = search.search(Space(c, GPUS[GPU], Memory(2**40), keep=keep)).sampled
    assert {of["cp_method"]: of["attention"] for of, _ in found if of["cp_size"] == 4} == {"ring": "auto"}
    found = search.search(Space(c, GPUS[GPU], Memory(2**40), keep=(*keep, "attention"))).sampled
    assert found and not any(of["cp_size"] == 4 for of, _ in found)


def test_a_machine_that_is_not_full_counts():
    c = config(**SMALL | {"gpus": 12})
    tried = choices.meshes(c, GPUS[GPU], choices.mesh_change(c, 1, 1, 1), ())
    assert {mesh["dp_replicate_size"] for mesh in tried} == {1, 2}


WIDE = {"num_experts": 16, "num_experts_per_tok": 8, "moe_intermediate_size": 512}
WIDE = {f"model.{name}": size for name, size in WIDE.items()} | {"gpus": 8, "zero_level": 3}


@pytest.mark.full
@pytest.mark.parametrize("sequences, sent", [(1, True), (128, False)])
def test_tokens_are_sent_to_experts_where_a_fetch_has_few(sequences, sent):
    """Few tokens are less than the experts' weights, many are more."""
    c = checked(config(**SMALL | WIDE | {"per_device_batch_size": sequences}), "h100")
    keep = (*BLOCK, *choices.AXES, "zero_level")
    best = search.search(Space(c, GPUS["h100"], Memory(2**40), keep=keep)).candidates[0]
    assert (best.config.ep_size > 1) is sent
    assert best.need == candidate.estimated(best.config, GPUS["h100"]).need


def test_a_plan_says_what_multiplies_experts():
    sizes = WIDE | {"kernels": "mosaic"}

    def said(served: bool = True, **changes) -> str:
        c = checked(config(**SMALL | sizes | changes), "h100")
        return expert_time.multiplied_by(footprint.assembly(c), served=served)

    assert said(gpus=1, zero_level=1, kernels="xla") == ""
    assert "multiplied by the grouped kernel" in said() and "multiplied by the grouped kernel" in said(
        recipe="fp8_current"
    )
    assert "the kernel takes 16-bit matrices" in said(**{"model.moe_intermediate_size": 40})
    assert "recipe='mxfp8'" in said(recipe="mxfp8", block_scaled_products="emulated") and "(ep_size)" in said(ep_size=2)
    assert "none that the kernel is for" in said(served=False)


def test_stages_divide_the_layers_and_idle_in_the_first_and_last_ticks():
    """By hand: two stages have half of the layers each, and take the time of three microbatches for two."""
    c = checked(config(**SMALL | {"gpus": 2, "pp_size": 2}), GPU)
    one, two = (work_of(x) for x in (checked(config(**SMALL | {"gpus": 1}), GPU), c))
    assert two.blocks.forward == pytest.approx(one.blocks.forward / 2)
    assert roofline.phases(two)["forward"] == pytest.approx(3 * two.blocks.forward)


def test_a_mesh_of_one_gpu_can_be_kept():
    c = checked(config(**SMALL | {"zero_level": 3}), GPU)
    found = search.search(Space(c, GPUS[GPU], Memory(2**40), keep=(*BLOCK, "zero_level"))).candidates
    assert found and all(x.config.zero_level == 3 for x in found)


@needs_compiler
@pytest.mark.full
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"offload_residual": True, "offload_optimizer": True, "offload_master": True, "offload_weights": True}
        | {"gpus": 1, "resident_layers": 18, "recompute_block": False, "recompute_norm": True, "recompute_ffn": True}
        | {"lmhead_chunks": 1},
        {"gpus": 4, "zero_level": 3, "offload_master": True},
        {
            "gpus": 8,
            "zero_level": 3,
            "tp_size": 2,
            "pp_size": 2,
            "pp_schedule": "1f1b",
            "gradient_accumulation_steps": 4,
        },
        {"gpus": 4, "pp_size": 4, "pp_schedule": "1f1b", "gradient_accumulation_steps": 8, "offload_residual": True}
        | {"per_device_batch_size": 1, "recompute_block": False, "lmhead_chunks": 1},
        dict.fromkeys(("offload_optimizer", "offload_master", "offload_grads", "offload_weights"), True)
        | {"gpus": 1, "offload_residual": True, "device_memory": 18.75, "lmhead_chunks": 1},
    ],
    ids=["1", "1 with resident layers", "4", "8 of three axes", "stages with offloaded residuals", "1, nearly full"],
)
def test_estimates_are_near_what_is_compiled(changes):
    """Device memory within 10 %, as footprint.py says; time within 10 % of the simulated step."""
    changes = changes or dict.fromkeys(choices.OFFLOADS.values(), True) | {"gpus": 1}
    c = checked(config(**changes), aot.kind() or GPU)
    tried = candidate.estimated(c, GPUS[GPU])
    p = plan(c, GPU)
    assert p.device_bytes / tried.need.device == pytest.approx(1, abs=0.1)
    assert tried.seconds / p.predicted_step_s == pytest.approx(1, abs=0.1)


@needs_compiler
@pytest.mark.full
def test_the_fastest_of_all_is_among_the_compiled(monkeypatch):
    """Compiles every setting of a small space, on a card on which some do not fit, and what the search chooses."""
    c = config(**SMALL, gpus=1, recompute_block=True)
    keep = [name for name in flat(c) if name not in ("offload_master", "offload_optimizer", "nvme_path")]
    whole = candidate.estimated(checked(c, GPU), GPUS[GPU]).need.device
    card = dataclasses.replace(GPUS[GPU], memory_bytes=int((0.8 * whole + candidate.RESERVE) / POOL))
    monkeypatch.setitem(GPUS, GPU, card)
    compiled = {}

    def planned(c, gpu, **_):
        key = tuple(flat(c).items())
        if key not in compiled:
            compiled[key] = plan(c, gpu, advise=False)
        return compiled[key]

    monkeypatch.setattr(fastest, "plan", planned)
    result = fastest.fastest(c, GPU, keep=keep)
    plans = []
    for master, moments in itertools.product((False, True), (False, True)):
        tried = changed(c, {"offload_master": master, "offload_optimizer": moments})
        p = planned(tried, GPU)
        # `train` refuses what does not fit by estimate.
        estimated = candidate.estimated(checked(tried, GPU), card).need.device
        if max(p.device_bytes, estimated) <= candidate.device_limit(card):
            plans.append(p.predicted_step_s)
    assert 0 < len(plans) < 4
    assert result.rows[0].seconds == pytest.approx(min(plans))


@needs_compiler
@pytest.mark.full
def test_the_fastest_layout_is_among_the_compiled():
    """Compiles every layout of two GPUs."""
    c = config(**SMALL | {"gpus": 2, "lmhead_chunks": 1})
    free = (*choices.mesh_change(c, 1, 1, 1), "gradient_accumulation_steps")
    result = fastest.fastest(c, GPU, keep=[name for name in flat(c) if name not in free])
    tried = (choices.mesh_change(c, *of) for of in ((1, 1, 1), (2, 1, 1), (1, 1, 2)))
    of_all = [changed(c, of, {"gradient_accumulation_steps": 2 * choices.group(of)}) for of in tried]
    assert result.rows[0].seconds == pytest.approx(min(plan(x, GPU, advise=False).predicted_step_s for x in of_all))


def test_a_config_file_says_what_differs(tmp_path):
    """It is the config that was written, without any other file, and holds what differs from the defaults."""
    changes = {"zero_level": 3, "gpus": 4, "nvme_path": 'a "b"', "offload_master": "nvme"}
    changes |= {"datasets": ({"path": "it's.jsonl", "weight": 2.0},)}
    c = changed(flags.load_config(str(CONFIGS / "llama7b.py")), changes)
    file = tmp_path / "found.py"
    file.write_text(write.config_file(c, "Found."))
    loaded = flat(flags.load_config(str(file)))
    assert loaded == flat(c)
    assert str(CONFIGS) not in file.read_text() and "import" in file.read_text()
    lines = [line.split()[0] for line in file.read_text().splitlines() if line.startswith("    c.")]
    assert set(lines) == {f"c.{name}" for name, value in flat(default_config()).items() if value != loaded[name]}


@pytest.mark.parametrize(
    "options, said",
    [
        (["--gpu", "rtx409"], "--gpu: expected a GPU whose facts are known, .*; did you mean rtx4090[?]"),
        ([], "no GPU given: pass --gpu NAME"),
        (
            ["--gpu", GPU, "--allow", "adam8bit"],
            "--allow: expected adamw8bit, bf16_master, bf16_state, bf16_weights, fp8, got 'adam8bit'",
        ),
        (["--gpu", "a100", "--allow", "fp8"], "--allow fp8: recipe: expected 'bf16' on a a100"),
        (["--gpu", GPU, "--keep", "zero"], "--keep: expected fields of the config, see --help, got 'zero'"),
        (["--gpu", GPU, "--host-memory", "0"], "--host-memory: expected more than 0, got 0"),
        (["--gpu", GPU, "--nvme=-3"], "--nvme: expected more than 0, got -3"),
        (["--gpu", GPU, "--top", "0"], "--top: expected more than 0, got 0"),
        (
            ["--gpu", GPU, "--effective-batch", "3", "--config.gpus=2"],
            "--effective-batch: expected a multiple of the 2",
        ),
        (["--gpu", GPU, "--out", "nowhere/x.py"], "--out: expected a folder that can be written, got 'nowhere'"),
        (["--gpu", GPU, "--out", "x.txt"], "--out: expected a name that ends with .py, got 'x.txt'"),
        (["--gpu", GPU, "--out", "there.py"], "--out: expected a new file, got 'there.py', which exists"),
        (["--gpu", GPU, "--json", "nowhere/x"], "--json: expected a file that can be written"),
        (["--gpu", GPU, "--config.gpus=0"], "gpus: expected the number of GPUs to plan for, got 0"),
        (["--gpu", GPU, "--config.gpus=0", "--effective-batch", "8"], "gpus: expected the number of GPUs to plan for"),
        (["--gpu", GPU, "--config.tp_size=0", "--effective-batch", "8"], "tp_size: expected "),
        (["--gpu", GPU, "--config.zero_levl=3"], "config has no field 'zero_levl'"),
    ],
    ids=lambda x: x if isinstance(x, str) else " ".join(x),
)
def test_what_is_wrong_is_said_in_one_line(options, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("there.py").write_text("")
    with pytest.raises(SystemExit, match=f"^surojax.fit: error: {said}") as error:
        command.main(["--config", str(CONFIGS / "tiny.py"), *options])
    assert "\n" not in str(error.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["there.py"]


@pytest.mark.full
def test_the_command_without_a_compiler(tmp_path, monkeypatch, capsys):
    """By estimate only, and says so; the file that it writes is the first row, and `train` would take it."""
    monkeypatch.setattr(aot, "available", lambda: False)
    monkeypatch.chdir(tmp_path)
    argv = ["--config", str(CONFIGS / "llama7b.py"), "--gpu", GPU, "--json", "found.json", "--top", "2"]
    keep = "recompute_block,offload_grads"  # then weights have to be in host memory
    command.main([*argv, "--effective-batch", "4", "--keep", keep, "--tokens", "1e9", "--price", "3"])
    text = capsys.readouterr().out
    assert "ESTIMATE from shapes" in text and "the settings as given do not fit" in text
    assert "left out since they change numbers: adamw8bit (" in text and "was not tried" not in text
    assert "a larger step would pay" in text and "--effective-batch 8" in text
    assert max(map(len, text.splitlines())) <= 160
    c = flags.load_config("llama7b_1xrtx4090.py")
    rows = json.loads(Path("found.json").read_text())["rows"]
    assert rows[0]["change"].items() <= flat(c).items() and rows[0]["seconds"] <= rows[1]["seconds"]
    pasted = shlex.split(text[text.index("\n1:\n") : text.index("\n2:\n")].replace("\\\n", " "))[1:]
    given, _ = flags.parse_flags(["--config", str(CONFIGS / "llama7b.py"), *pasted], argparse.ArgumentParser())
    assert flat(given) == flat(c) | {"gpus": given.gpus}
    assert c.per_device_batch_size * c.gradient_accumulation_steps == 4
    hours = 1e9 / (4 * c.sequence_len) * rows[0]["seconds"] / 3600
    assert f"1,000,000,000 tokens: {hours:,.1f} hours on 1 GPU; {3 * hours:,.2f} at 3 per GPU hour" in text
    checks.check(c)
    need = footprint.needs(c, 1, "gpu")
    assert c.offload_weights and c.device_memory and need.device > 0.85 * candidate.device_limit(GPUS[GPU])
    assert need.device <= candidate.device_limit(GPUS[GPU])
    assert f"Needs {gib(need.device)} on each GPU" in Path("llama7b_1xrtx4090.py").read_text()


def test_if_nothing_fits_it_says_by_how_much_and_what_would(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(aot, "available", lambda: False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as code:
        argv = ["--config", str(CONFIGS / "llama7b.py"), "--gpu", GPU, "--host-memory", "20"]
        command.main([*argv, "--keep", "recompute_block,per_device_batch_size,lmhead_chunks"])
    assert code.value.code == 1 and not list(tmp_path.iterdir())
    text = capsys.readouterr().out
    assert "nothing fits 1 x NVIDIA GeForce RTX 4090" in text
    assert "more host memory: " in text and "files on a drive (--nvme): " in text


SLICES_TOO = (*BLOCK, "lmhead_chunks")


def test_it_says_which_resource_is_too_small(monkeypatch):
    """Files; then both memories at once."""
    monkeypatch.setattr(aot, "available", lambda: False)
    monkeypatch.setattr(remedies, "with_limits_lifted", lambda space: [])  # seconds, and other tests are about them
    c = config(**SMALL, gpus=1)
    whole = candidate.estimated(checked(c, GPU), GPUS[GPU]).need.device

    def tried(of_device: float, of_host: float, nvme: float | None, c=c, keep=()) -> fastest.FitResult:
        """On a card and in host memory with these parts of what the settings as given need on the card."""
        memory = int((of_device * whole + candidate.RESERVE) / POOL)
        monkeypatch.setitem(GPUS, GPU, dataclasses.replace(GPUS[GPU], memory_bytes=memory))
        return fastest.fastest(c, GPU, host_memory=of_host * whole / GiB, nvme=nvme, keep=(*SLICES_TOO, "gpus", *keep))

    files = tried(0.6, 1.5, 0.001, changed(c, IN_FILES), tuple(choices.OFFLOADS.values()))
    assert files.nearest and [x > 0 for x in files.nearest.need.beyond(files.limits)] == [False, False, True]
    said = "\n".join(command.nothing_fits(files))
    over = files.nearest.need.files - 1e6
    assert f"too much by {over / 1e9:.1f} GB of files" in said
    both = tried(0.05, 0.1, None)
    assert both.nearest and [x > 0 for x in both.nearest.need.beyond(both.limits)] == [True, True, False]


@pytest.mark.parametrize("kept", quick_at([((),), (("gpus",),)], 1), ids=["free", "kept"])
def test_changes_that_make_it_fit_are_of_the_config_as_given(kept, monkeypatch):
    """As flags beside the given config they lead to the memory that is said; what is kept is not among them."""
    monkeypatch.setattr(aot, "available", lambda: False)
    monkeypatch.setattr(remedies, "MORE_GPUS", (8,))
    c = config("llama70b", gpus=1)
    result = fastest.fastest(c, "rtx5060ti_16gb", keep=(*BLOCK, *kept))
    found = [proposal for proposal in result.proposals if "gpus" in proposal.change]
    assert len(found) == (0 if kept else 1)
    for proposal in found:
        said = proposal.text().partition(": ")[2]
        for flag in shlex.split(flags_of(proposal.change)):
            flags.override(c, *flag.removeprefix("--config.").split("=", 1))
        checks.check(c)
        need = footprint.needs(c, c.gpus, "gpu")
        assert need.device <= result.limits.device and said.startswith(f"{gib(need.device)} on each GPU, ")


def test_a_config_that_uses_files_fits_with_them(monkeypatch):
    """Its own files count as there are, unless --nvme says how much room there is."""
    monkeypatch.setattr(aot, "available", lambda: False)
    home = {"offload_optimizer": "nvme", "offload_master": "nvme", "nvme_path": "x", "offload_grads": True}
    c = config(**home | {"offload_residual": True, "offload_weights": True})
    without, scarce = (fastest.fastest(c, GPU, nvme=nvme, keep=SLICES_TOO) for nvme in (None, 1))
    assert without.as_given and without.as_given.estimate.need.files and "as given" in command.result_table(without)
    assert scarce.as_given is None and "the settings as given do not fit" in command.result_table(scarce)


def faked_rows(monkeypatch, row):
    """Has `row(change)` compile the settings, which takes no compiler."""

    def compiled(config, candidate, space, compiled):
        change = differing(config, candidate.change)
        return fastest.Trial(changed(config, change), change, candidate, None, row(change))

    monkeypatch.setattr(aot, "available", lambda: False)
    monkeypatch.setattr(fastest, "_row", compiled)


def tried(seconds: float, **change) -> candidate.Candidate:
    return candidate.Candidate(config(), change, Memory(10, 20, 0), {"all": seconds})


def test_the_fastest_of_each_kind_is_compiled_first():
    """Kinds differ in more than slices and the split of the batch."""
    a, b, c = tried(2.0, recompute_norm=True), tried(1.0, lmhead_chunks=4), tried(1.5, per_device_batch_size=2)
    d = tried(3.0, recompute_norm=True, lmhead_chunks=2)
    assert fastest.in_order([b, c, a, d]) == [b, a, c, d]
    assert search.but_for_slices([a, d, b, tried(0.5, lmhead_chunks=8), c]) == [tried(0.5, lmhead_chunks=8), c, a]


@pytest.mark.parametrize(
    "least_host, of_families, searched, host",
    [
        # (floor of seconds, least bytes, seconds, host bytes): families are searched in the order of what is sought
        (False, [(2, 0, 2, 5), (1, 0, 3, 7)], 2, 5),
        (False, [(2, 0, 2, 5), (1, 0, 1.5, 7)], 1, 7),
        (False, [(2, 0, 2, 5), (1, 0, 2, 7)], 2, 7),  # as fast at best: searched, and the first is kept
        (True, [(1, 30, 1, 21), (9, 20, 9, 22)], 2, 21),
        (True, [(1, 35, 1, 21), (9, 20, 9, 22)], 1, 22),  # two GPUs have 2 * (35 - 23) bytes too few: more than 22
        (True, [(1, 34, 1, 21), (9, 20, 9, 22)], 2, 21),
    ],
)
def test_a_search_ends_where_no_family_is_better(monkeypatch, least_host, of_families, searched, host):
    """By the least time, or the least memory, that any placement of the family needs."""
    families = [types.SimpleNamespace(floor=x[0], least=x[1], found=x[2:]) for x in of_families]
    asked = []

    def fastest(self, family, in_files):
        asked.append(family)
        return [
            candidate.Candidate(
                config(), {"recompute_norm": family.found}, Memory(1, family.found[1], 0), {"": family.found[0]}
            )
        ]

    monkeypatch.setattr(search._Search, "layouts", lambda self: (({},), {}))
    monkeypatch.setattr(search._Search, "families", lambda self, of, sampled=False: families)
    monkeypatch.setattr(search._Search, "fastest", fastest)
    space = Space(config(gpus=2), GPUS[GPU], Memory(23, 100, 0))
    found = search.search(space, 1, least_host=least_host)
    assert [x.need.host for x in found.candidates] == [host] and len(asked) == searched


@pytest.mark.parametrize(
    "seconds, fits, compiled",
    [
        ([1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0], 4),  # twice as many as asked for, until something fits
        ([1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1], 4),
        ([1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1], 2),
        ([1, 1.1, 1.2], [1, 1, 1], 2),
        ([1, 1.2], [1, 1], 1),  # what is slower than the fastest by more than a tenth of it
        ([1, 1.2], [0, 1], 2),
    ],
)
def test_how_many_candidates_are_compiled(monkeypatch, seconds, fits, compiled):
    """At most two are asked for. A predicted step takes as long as it was estimated."""
    candidates = [tried(s, recompute_norm=bool(i), resident_layers=i) for i, s in enumerate(seconds)]
    done, said = [], []

    def rows(config, candidate, space, compiled):
        done.append(candidate)
        of = types.SimpleNamespace(predicted_step_s=candidate.seconds, need=Memory(2 * GiB, 20, 0))
        yield fastest.Trial(config, candidate.change, candidate, of, bool(fits[len(done) - 1]))

    monkeypatch.setattr(fastest, "_until_it_fits", rows)
    space: object = types.SimpleNamespace(config=config(), limits=Memory(GiB, 20, 0))
    found = types.SimpleNamespace(candidates=candidates)
    kept, refuted = fastest._trials(config(), space, found, plan, 2, said.append, lambda text: None)  # type: ignore[arg-type]
    assert len(done) == compiled == len(kept) + len(refuted) and len(kept) == sum(fits[:compiled])
    verdict = "1,000 ms" if fits[0] else "2.0 GiB on each GPU: does not fit"
    assert said[0] == f"compiled 1 of {min(2, len(seconds))} at most: as given: {verdict}"


@pytest.mark.parametrize(
    "over, budgets, tries, left",
    [
        ({"device": GiB // 2}, {"device_memory": 3.0}, 3, {"device_memory": 1.0}),
        ({"device": 2 * GiB + 1}, {"device_memory": 3.0}, 2, {"device_memory": 0.0}),
        ({"host": GiB}, {"files_in_memory": 2.5}, 3, {"files_in_memory": 0.5}),
        ({"host": GiB}, {"device_memory": 3.0}, 1, {"device_memory": 3.0}),
        ({}, {"device_memory": 3.0}, 1, {"device_memory": 3.0}),
    ],
)
def test_what_does_not_fit_as_compiled_is_tried_with_less_of_its_budget(monkeypatch, over, budgets, tries, left):
    """By so many GiB as it is over the limit, twice at most; nothing is left to try without a budget of that memory."""
    limits = Memory(10 * GiB, 20 * GiB, 0)
    more = {name: getattr(limits, name) + size for name, size in over.items()}
    need = Memory(GiB, GiB, 0)._replace(**more)

    def row(config, candidate, space, compiled):
        return fastest.Trial(candidate.config, {}, candidate, types.SimpleNamespace(need=need), not over)  # type: ignore[arg-type]

    def estimated(c, change):
        return candidate.Candidate(c, change, need, {"all": 1.0})

    monkeypatch.setattr(fastest, "_row", row)
    space: object = types.SimpleNamespace(limits=limits, estimated=estimated)
    rows = list(fastest._until_it_fits(config(), estimated(config(**budgets), {}), space, plan))  # type: ignore[arg-type]
    assert len(rows) == tries and {name: rows[-1].config[name] for name in left} == left
    most = f"{gib(need.device)} on each GPU" if "device" in over else f"{gib(need.host)} of host memory"
    assert fastest._most(rows[0], limits) == most
    exact = dataclasses.replace(rows[0], plan=types.SimpleNamespace(need=limits._replace(host=limits.host + GiB)))  # type: ignore[arg-type]
    assert fastest._most(exact, limits) == "21.0 GiB of host memory"


def test_what_the_compiler_refuses_is_no_row(monkeypatch):
    """All refused: its reason is the error. The given settings refused: the search goes on, and says so."""

    def refused(change: dict) -> bool:
        raise ConfigError("kernels: expected 'xla', got 'mosaic'; leave it out")

    faked_rows(monkeypatch, refused)
    with pytest.raises(ConfigError, match="kernels: expected 'xla'"):
        fastest.fastest(config(**SMALL), GPU, keep=SLICES_TOO)
    faked_rows(monkeypatch, lambda change: bool(change) or refused(change))
    result = fastest.fastest(config(**SMALL), GPU, keep=("per_device_batch_size",))
    assert result.rows and result.as_given and not result.as_given.fits
    assert "the settings as given fit by estimate only" in command.result_table(result)


@pytest.mark.full
def test_settings_that_cannot_run_do_not_end_the_search(monkeypatch):
    """As configs/llama8b_long.py on two GPUs, whose gradients are offloaded but not sharded."""
    monkeypatch.setattr(aot, "available", lambda: False)
    c = config(**SMALL | {"gpus": 2, "lmhead_chunks": 1, "offload_grads": True})
    result = fastest.fastest(c, GPU, keep=("recompute_block", *choices.AXES, "lmhead_chunks"))
    assert result.rows and result.as_given is None
    assert result.refused.startswith("offload_grads: expected False with shard_gradients=False on 2 GPUs")
    assert f"the settings as given cannot run: {result.refused}" in command.result_table(result)


def test_what_does_not_fit_as_compiled_is_tried_with_fewer_resident_layers(monkeypatch):
    """Compiled steps need 5 % of the card more than estimated, which only fewer resident layers make up for."""
    c = config(**SMALL | {"model.num_hidden_layers": 32}, recompute_block=True)
    keep = (*SLICES_TOO, "optimizer", "overlap_update", *choices.OFFLOADS.values())
    c.update(dict.fromkeys(choices.OFFLOADS.values(), True))
    half = candidate.estimated(checked(changed(c, {"resident_layers": 16}), GPU), GPUS[GPU]).need.device
    card = dataclasses.replace(GPUS[GPU], memory_bytes=int((half + candidate.RESERVE) / POOL) + 1)
    monkeypatch.setitem(GPUS, GPU, card)

    def compiled(config, gpu, *, gpus_per_node, host_bandwidth, disk, advise):
        need = candidate.estimated(checked(config, gpu), card).need
        more = need._replace(device=need.device + int(0.05 * card.memory_bytes))
        return types.SimpleNamespace(need=more, predicted_step_s=1.0 - config.resident_layers / 99)

    monkeypatch.setattr(aot, "available", lambda: True)
    monkeypatch.setattr(aot, "usable", lambda gpu: True)
    monkeypatch.setattr(fastest, "plan", compiled)
    result = fastest.fastest(c, GPU, keep=keep)
    first, best = result.refuted[0].config.resident_layers, result.rows[0].config.resident_layers
    one_more = changed(result.rows[0].config, {"resident_layers": best + 1})
    assert 0 < best < first and not result.rows[0].need.device > candidate.device_limit(card)
    assert compiled(
        one_more, GPU, gpus_per_node=None, host_bandwidth=None, disk=None, advise=False
    ).need.device > candidate.device_limit(card)


@pytest.mark.full
def test_host_memory_has_a_reserve_and_the_least_is_asked_for(monkeypatch):
    """Not more than nine tenths are pinned; if that is too little, no placement that fits the GPU needs less."""
    monkeypatch.setattr(aot, "available", lambda: False)
    c = config(**SMALL, gpus=1)
    whole = candidate.estimated(checked(c, GPU), GPUS[GPU]).need.device
    card = dataclasses.replace(GPUS[GPU], memory_bytes=int((0.5 * whole + candidate.RESERVE) / POOL))
    monkeypatch.setitem(GPUS, GPU, card)
    keep = ("lmhead_chunks", "overlap_update")
    found = search.search(
        Space(checked(c, GPU), card, Memory(candidate.device_limit(card)), keep=keep), least_host=True
    )
    least = found.candidates[0].need.host
    tried = everything(checked(c, GPU), Memory(candidate.device_limit(card)))
    assert 0 < least <= min(need.host for _, need in tried)
    enough, scarce = (fastest.fastest(c, GPU, host_memory=x * least / GiB, keep=keep) for x in (1.12, 1.1))
    assert enough.rows and all(row.need.host <= 0.9 * 1.12 * least for row in enough.rows)
    assert not scarce.rows and scarce.proposals[0].text().startswith("more host memory: ")
    assert f"{gib(least)} of host memory" in scarce.proposals[0].text()


def test_settings_as_given_are_compiled_and_shown_once(monkeypatch):
    compiled = []
    faked_rows(monkeypatch, lambda change: compiled.append(change) is None)
    result = fastest.fastest(config(**SMALL), GPU, keep=("recompute_block", "recompute_norm", *SLICES_TOO))
    assert compiled.count({}) == 1 and command.result_table(result, top=99).count("as given") == 1
    assert all(
        result.rows[0].estimate.seconds - s > 0.01 * result.rows[0].estimate.seconds for s in result.left_out.values()
    )


@pytest.mark.parametrize(
    "size, group, sequences, expected",
    [(16, 1, 16, (16, 1, 1)), (4, 4, 24, (4, 6, 3)), (16, 4, 6, (6, 1, 1)), (4, 2, 6, (3, 2, 2))],
)
def test_another_batch_keeps_its_microbatches_where_it_can(size, group, sequences, expected):
    c = config("tiny", per_device_batch_size=size, microbatches_per_fetch=group, gradient_accumulation_steps=4)
    c = choices.with_batch(c, sequences)
    checks.check(c)
    assert (c.per_device_batch_size, c.gradient_accumulation_steps, c.microbatches_per_fetch) == expected


@pytest.mark.parametrize("gpus", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("sizes", [{}, {"tp_size": 2}, {"cp_size": 2, "pp_size": 2}], ids=["dp", "tp", "cp-pp"])
@pytest.mark.parametrize("before", [4, 8])
def test_another_number_of_gpus_has_the_same_sequences_a_step(before, sizes, gpus):
    """If groups of these GPUs divide them, and each group's microbatches are no larger."""
    c = default_config()
    c.update({"gpus": before, "per_device_batch_size": 3, "gradient_accumulation_steps": 8} | sizes)
    in_group = math.prod(sizes.values())
    if gpus % in_group:
        return
    more = choices.with_gpus(c, gpus)
    sequences = 3 * 8 * before // in_group
    assert more.gpus == gpus and more.per_device_batch_size <= 3
    assert more.per_device_batch_size * more.gradient_accumulation_steps * (gpus // in_group) == sequences
    assert {name: more[name] for name in sizes} == sizes
    assert more.zero_level == (3 if gpus > 1 else c.zero_level)


def test_what_the_backward_pass_computes_again_grows_from_nothing_to_a_block():
    """Each choice repeats the parts of the one before; the config's own is another one if it is none of them."""
    norm, swiglu, ffn, att = (f"recompute_{part}" for part in ("norm", "swiglu", "ffn", "att"))
    grows = [set(), {norm, swiglu}, {norm, ffn}, {norm, ffn, att}, {"recompute_block"}]
    for own in (set(), {norm, ffn}, {norm, att}):
        c = default_config()
        c.update({name: name in own for name in (norm, swiglu, ffn, att, "recompute_block")})
        found = choices.recomputations(c)
        on = [{name for name, value in change.items() if value} for change in found]
        assert sorted(map(sorted, on)) == sorted(map(sorted, grows + [own] * (own not in grows)))
        assert [parts for parts in on if parts in grows] == grows
        sampled = [any(kind.items() <= change.items() for kind in choices.SAMPLED) for change in found]
        assert [parts for parts, is_sampled in zip(on, sampled, strict=True) if is_sampled] == [grows[1], grows[-1]]


# -- What fit prints ---------------------------------------------------------------------------------------------------


def trial(change: dict[str, Any], seconds: float = 0.5, *, plan: Any = None, host: float = 0, files: float = 0) -> Any:
    """In place of a row: 1,000 tokens in this time, which 3 GiB of each GPU hold."""
    need = types.SimpleNamespace(device=3 * GiB, host=host * GiB, files=files * GiB)
    estimate = types.SimpleNamespace(seconds=1.1 * seconds, need=need)
    values = {"tokens": 1000, "seconds": seconds, "estimate": estimate, "need": need, "plan": plan, "change": change}
    return types.SimpleNamespace(**values, config=default_config(), fits=True)


def found_by_fit(*rows: Any, **fields: Any) -> Any:
    found = types.SimpleNamespace(sampled=[], not_tried={})
    others = {"refused": "", "as_given": None, "refuted": [], "larger": {}, "left_out": {}, "disks": "the disks"}
    return types.SimpleNamespace(**{"gpu": "h100", "gpus": 2, "rows": rows, "found": found} | others | fields)


@pytest.mark.parametrize(
    "fields, said",
    [
        ({}, "the settings as given do not fit"),
        ({"refused": "a: b"}, "the settings as given cannot run: a: b"),
        ({"as_given": trial({})}, ", as given"),
        (
            {"as_given": types.SimpleNamespace(fits=False)},
            "the settings as given fit by estimate only, not as compiled",
        ),
        ({"refuted": [1, 2]}, "2 more fit by estimate only, not as compiled"),
        ({"larger": {64: 2000.0}}, "1,818 now,\n  with steps of 64 sequences 2,000 (1.1 x); --effective-batch 64"),
        (
            {"left_out": {"fp8": 0.275}},
            "left out since they change numbers: fp8 (50% faster by estimate);\n  --allow fp8",
        ),
        (
            {"found": types.SimpleNamespace(sampled=[], not_tried={"tp_size": "a reason"})},
            "tp_size was not tried: a reason",
        ),
        (
            {
                "found": types.SimpleNamespace(
                    sampled=[
                        (dict.fromkeys(command.AXES, 1), 2.0),
                        (dict.fromkeys(command.AXES, 1) | {"tp_size": 2}, 3.0),
                    ],
                    not_tried={},
                )
            },
            "of the fastest of a few settings of each: none 1.00, tp_size=2 1.50",
        ),
    ],
)
def test_what_fit_says_of_a_search(fields, said):
    table = command.result_table(found_by_fit(trial({"zero_level": 3}), trial({"zero_level": 1}, 1.0), **fields))
    assert said in table and "ESTIMATE from shapes: no compiler" in table
    one, other = (line.split() for line in table.splitlines() if line[:4].strip() in ("1", "2"))
    assert one[:7] == ["1", "2,000", "4,000", "500", "550", "3.0", "3.0"] and other[:3] == ["2", "1,000", "2,000"]
    assert "\n1:\n    --config.zero_level=3" in table
    if said != ", as given":
        assert ", as given" not in table
    assert "nothing fits without files" not in table


def test_what_fit_says_of_rows_with_files_and_without_changes():
    plan = types.SimpleNamespace(experts="of experts", predicted_step_s=1.0, exposed_s={"gather": 0.5}, gpus_per_node=2)
    plan.nvme_write_bytes, plan.drive_tbw = 1e9, 600
    table = command.result_table(found_by_fit(trial({}, plan=plan, files=2), as_given=trial({})), top=1)
    assert "\n1: as given" in table and ", as given" not in table and "ESTIMATE" not in table
    assert "of the first row: of experts" in table and "nothing fits without files; disks: the disks\n" in table
    assert "gather 50%" in table


@pytest.mark.parametrize(
    "plan, said",
    [
        (None, "-"),
        ({"predicted_step_s": None, "exposed_s": {"gather": 1.0}}, "-"),
        ({"predicted_step_s": 1.0, "exposed_s": {}}, "-"),
        ({"predicted_step_s": 1.0, "exposed_s": {"gather": 0.05, "reduce": 0.01}}, "gather 5%"),
        ({"predicted_step_s": 1.0, "exposed_s": {"gather": 0.01, "reduce": 0.049}}, "compute"),
    ],
)
def test_what_compute_waits_for(plan, said):
    assert command.waits_for(trial({}, plan=plan and types.SimpleNamespace(**plan))) == said


def test_what_a_written_config_says_of_itself():
    """Of a row that was compiled or not, with host memory or none, and with more than JAX takes of a GPU by itself."""
    text = lambda row: command.row_docstring(row, found_by_fit(row), "tiny", Path("best.py"))
    assert "Needs 3.0 GiB on each GPU; estimated 500 ms a step, 2,000 tokens/s per GPU." in text(trial({}))
    planned = trial({}, plan=types.SimpleNamespace(predicted_step_s=0.5), host=2)
    assert "Needs 3.0 GiB on each GPU and 2.0 GiB of host memory; predicted 500 ms a step" in text(planned)
    pool = footprint.DEFAULT_POOL * GPUS["h100"].memory_bytes
    for device, is_said in ((pool, False), (pool + 1, True)):
        planned.need.device = device
        assert (f"Set {footprint.POOL_SETTING} in the environment" in text(planned)) == is_said


def test_words_that_fit_does_not_know():
    assert command.words("--keep", " b, a,,b ", "abc") == ("b", "a")
    for known, expected in (
        ("abcdefghi", "a, b, c, d, e, f, g, h, i"),
        ("abcdefghij", "fields of the config, see --h"),
    ):
        with pytest.raises(ConfigError, match=rf"^--keep: expected {expected}"):
            command.words("--keep", "zzz", known)
