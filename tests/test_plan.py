"""The planner: what compiled steps need and move, for GPUs that are not there.

Plans are cached in files that the test processes share, since most of the time goes into compiling. The steps are those
of configs/*.py at their real sizes: compiling takes as long for a small model.
"""

import dataclasses
import fcntl
import hashlib
import importlib.metadata
import io
import json
import math
import os
import re
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
import transfers
from commands import plan as plan_command
from small import quick_at
from transfers import Transfer

from pallas_kernels import dispatch
from surojax.assembly.from_config import from_config
from surojax.assembly.xla_options import MEMORY_LIMIT, PRODUCTS, compiler_options
from surojax.config import flags
from surojax.config.fields import default_config, mesh_sizes
from surojax.errors import ConfigError
from surojax.memory.nvme import Claimed
from surojax.placement.mesh import DATA, make_mesh
from surojax.planner import (
    aot,
    candidate,
    costs,
    expert_time,
    footprint,
    hlo,
    links,
    plan_text,
    prediction,
    products,
    remedies,
    run_plan as planner,
    step_collectives,
    traffic,
)
from surojax.planner.amounts import GiB
from surojax.planner.gpus import GPUS, with_nodes
from surojax.planner.run_plan import Plan
from surojax.step.several_programs import SeveralPrograms
from surojax.step.state_plan import bytes_per_device
from surojax.training.run_summary import comparison, peak_flops, print_prediction

CONFIGS = Path(__file__).parents[1] / "configs"
needs_compiler = pytest.mark.skipif(not aot.available(), reason=f"no compiler for GPUs here: {aot.EXTRA}")

OFFLOADS = tuple(f"offload_{name}" for name in ("residual", "optimizer", "master", "grads", "weights"))
ALL = dict.fromkeys(OFFLOADS, True)
SHARDED = {"zero_level": 3, "shard_outer": True}
FIRST = "rtx4090"  # the kind that the test processes compile for themselves; others in processes of their own
BLOCKS = {  # a model whose blocks are nearly all of it, with so many layers that one fetch more is less than 1 %
    "model.hidden_size": 256,
    "model.intermediate_size": 512,
    "model.num_hidden_layers": 64,
    "model.num_attention_heads": 4,
    "model.num_key_value_heads": 4,
    "model.vocab_size": 512,
    "sequence_len": 64,
    "lmhead_chunks": 1,
}
TINY = BLOCKS | {"model.num_hidden_layers": 2, "gpus": 1}
UNSERVED = TINY | {"model.intermediate_size": 352, "recipe": "fp8_current"}  # no multiple of 64

MESH = jax.sharding.AbstractMesh((1, 1), DATA)


def config(name: str = "llama7b", **changes):
    """A config of configs/ with changes; two microbatches of a sequence, as the tables of memory have."""
    c = flags.load_config(str(CONFIGS / f"{name}.py"))
    c.per_device_batch_size = 1
    c.gradient_accumulation_steps = 2
    for field, value in changes.items():
        owner = c.model if field.startswith("model.") else c
        owner[field.removeprefix("model.")] = value
    return c


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanWithTransfers(Plan):
    """A plan with the `Transfer`s of its program's loops, if it was compiled by a test process."""

    overlap: list[dict]


def compiled_plan(c, gpu: str = FIRST) -> str:
    """A `PlanWithTransfers` as JSON."""
    with transfers.recorded() as rows:
        found = planner.plan(c, gpu) if gpu == FIRST else planner.plan_in_subprocess(c, gpu)
    return json.dumps(dataclasses.asdict(found) | {"overlap": [dataclasses.asdict(x) for x in rows]})


@pytest.fixture(scope="session")
def planned(tmp_path_factory):
    """(config, GPU) -> its plan, compiled by one of the test processes and read by all."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "plans"
    folder.mkdir(exist_ok=True)

    def get(c, gpu: str = FIRST) -> PlanWithTransfers:
        text = json.dumps([gpu, c.to_dict()], sort_keys=True)
        file = folder / f"{hashlib.sha256(text.encode()).hexdigest()}.json"
        with file.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not file.exists():
                file.write_text(compiled_plan(c, gpu))
        return PlanWithTransfers(**json.loads(file.read_text()))

    return get


@needs_compiler
@pytest.mark.parametrize(
    "name, gpu, changes, most",
    quick_at(
        [
            ("llama7b", "rtx4090", {"gpus": 1} | ALL, 3.6),
            ("llama7b", "rtx4090", {"gpus": 4, "zero_level": 3}, 21.5),
            ("llama70b", "h100", {"gpus": 8} | SHARDED | dict.fromkeys(OFFLOADS[:3], True), 44),
            ("llama70b", "h100", {"gpus": 8} | SHARDED | ALL, 10),
        ],
    ),
    ids=["7b-1-all", "7b-4-none", "70b-8-state", "70b-8-all"],
)
def test_device_memory(planned, name, gpu, changes, most):
    """The table of the issue: fp32 master weights, the rest bf16, sequence 2048, one sequence per GPU and microbatch,
    two microbatches, cuDNN attention, the head in 16 slices."""
    c = config(name, **changes)
    sizes = c.sequence_len, c.per_device_batch_size, c.gradient_accumulation_steps, c.lmhead_chunks
    assert sizes == (2048, 1, 2, 16) and c.attention == "auto"
    dtypes = c.master_dtype, c.model_dtype, c.opt_m_dtype, c.opt_v_dtype, c.accum_dtype
    assert dtypes == ("float32", *["bfloat16"] * 4)
    p = planned(c, gpu)
    assert not p.estimate and p.fits
    assert p.device_bytes <= most * GiB
    # What `train` goes by, which compiles nothing: footprint.py says what was measured.
    assert 0.98 < footprint.needs(c, c.gpus, "gpu").device / p.device_bytes < 1.1
    # Everything that the classes say rests on the device is in the program, and its state is exactly what they say.
    on_device, on_host = (sum(row[home] for row in p.classes.values()) for home in ("device", "host"))
    assert on_device <= p.device_bytes
    assert p.host_bytes == pytest.approx(on_host, rel=0.03)  # the 3 %
    if changes.items() >= ALL.items():  # no second copy of anything on the host
        inside = p.classes["grads"]["host"] + p.classes["residuals"]["host"]
        assert p.host_temp_bytes == pytest.approx(inside, rel=0.03)
        assert (
            p.rematerialised["count"] == 0
        )  # xla_options.MEMORY_LIMIT: the host's memory is not taken for the device's


@needs_compiler
@pytest.mark.full
def test_device_memory_does_not_grow_with_depth(planned):
    """With all offloads 64 layers need what 32 need, within the 3 % of the issue; host memory doubles."""
    one, two = (planned(config(gpus=1, **ALL) if n == 32 else config(**deep(n))) for n in (32, 64))
    assert two.device_bytes == pytest.approx(one.device_bytes, rel=0.03)
    assert 1.8 < two.host_bytes / one.host_bytes < 2
    assert two.host_temp_bytes > two.device_limit_bytes and two.rematerialised["count"] == 0


def test_memory_limit_is_corrected_by_what_is_in_host_memory_and_by_the_state():
    """95 % of the card and twice the temporaries in host memory, five times with layers of several kinds in turn, as a
    part of what XLA starts from; nothing where the card's memory is not known."""
    run = from_config(config(gpus=1), jax.sharding.AbstractMesh((1, 1), DATA), total_steps=10)
    state = bytes_per_device(run.plan)
    assert state > (2 + 4 + 2 + 2) * 6_607_077_376  # work and master weights, two moments
    limit = lambda **known: compiler_options(run, "gpu", **known)[MEMORY_LIMIT]
    card = 2 * state
    assert limit(memory_bytes=card) == math.ceil(100 * (0.95 * 2 - 1))
    assert limit(memory_bytes=card, host_temporaries=state) == math.ceil(100 * (0.95 * 2 + 1))
    assert limit(memory_bytes=card, results=state // 2) == math.ceil(100 * (0.95 * 4 - 3))
    assert limit(memory_bytes=state) == 95  # does not fit anyway
    assert MEMORY_LIMIT not in compiler_options(run, "gpu")
    kinds = {"model.layer_types": "linear_attention,full_attention", "offload_weights": True}
    kinds = from_config(config(gpus=1, **kinds), run.mesh, total_steps=10)
    third = bytes_per_device(kinds.plan) // 3
    in_turn = compiler_options(kinds, "gpu", memory_bytes=6 * third, host_temporaries=third)
    assert in_turn[MEMORY_LIMIT] == math.ceil(100 * (0.95 * 2 - 1 + 5 / 3))
    plain = from_config(config(gpus=1, xla_options="default"), run.mesh, total_steps=10)
    assert compiler_options(plain, "gpu", memory_bytes=card) == PRODUCTS
    assert compiler_options(run, "cpu", memory_bytes=24, host_temporaries=13) == {}


@pytest.mark.parametrize("level, streamed", [(1, False), (3, False), (3, True)])
def test_all_gathers_of_weights_are_in_the_profile_that_xla_schedules_by(level, streamed):
    """Of the compiled step there are fewer than a hundred; nothing else is in it."""
    c = config(gpus=4, zero_level=level, offload_weights=streamed)
    options = compiler_options(from_config(c, jax.sharding.AbstractMesh((1, 4), DATA), total_steps=10), "gpu")
    begins_early = level == 3 and not streamed
    assert ("xla_gpu_pgle_profile_file_or_directory_path" in options) == begins_early
    if begins_early:
        lines = Path(options["xla_gpu_pgle_profile_file_or_directory_path"]).read_text().splitlines()[1:]
        names = ["all-gather-start", *(f"all-gather-start.{i}" for i in range(1, 100))]
        assert lines == [f'costs {{ name: "{name}" cost_us: 8000 }}' for name in names]


def deep(layers: int) -> dict:
    return {"gpus": 1, "model.num_hidden_layers": layers} | ALL


@needs_compiler
@pytest.mark.full
@pytest.mark.parametrize("level", [1, 3])
def test_collectives_are_those_of_the_textbook(planned, level):
    """Bytes within 2 % of the formulas, as the issue asks, on 8 GPUs with 1 and 4 microbatches; below, on 4.

    One fetch more than the 2 k L of the formula is allowed in it: each layer's weights are fetched a layer ahead, and
    the last of them is not used. Scalars are not in the formulas: less than 1 kB.
    """
    plans = [planned(config(gpus=8, zero_level=level, gradient_accumulation_steps=k, **BLOCKS)) for k in (1, 4)]
    for p in plans:
        assert {x["axis"] for x in p.collectives} == {"dp_shard"}
        for x in p.collectives:
            assert x["bytes"] == pytest.approx(x["textbook_bytes"], rel=0.02, abs=1000), x
        assert sum(x["textbook_bytes"] for x in p.collectives) > 50e6
        assert {"all-gather", "reduce-scatter"} <= {x["op"] for x in p.collectives}
    one, four = (p.collectives for p in plans)
    if level == 1:  # nothing inside the loop over microbatches, where it would count four times
        assert one == four
    else:
        scattered = [next(x["bytes"] for x in rows if x["op"] == "reduce-scatter") for rows in (one, four)]
        assert scattered[1] > 3.5 * scattered[0]


@needs_compiler
@pytest.mark.parametrize(
    "changes",
    [
        {"zero_level": 2, "use_all_to_all_reduce": True},
        {"zero_level": 3, "zero_quantized_weights": "int8", "zero_quantized_gradients": True},
    ],
    ids=["all-to-all", "int8"],
)
@pytest.mark.full
def test_other_collectives_are_those_of_the_textbook(planned, changes):
    """Bytes within the same 2 %; in 8 bits about half of what they are in 16."""
    p = planned(config(gpus=4, gradient_accumulation_steps=2, **changes | BLOCKS))
    found = {x["op"]: x for x in p.collectives}
    for x in p.collectives:
        assert x["bytes"] == pytest.approx(x["textbook_bytes"], rel=0.02, abs=1000), x
    assert found["all-gather"]["bytes"] > 10e6 < found["all-to-all"]["bytes"] and "reduce-scatter" not in found
    run = lambda **changes: from_config(config(gpus=4, **BLOCKS | changes), jax.sharding.AbstractMesh((1, 4), DATA), 10)
    plain = step_collectives.collective_bytes(run(zero_level=changes["zero_level"]), traffic.BatchShape(1, 64, 2))
    if "zero_quantized_weights" in changes:
        assert 0.5 < found["all-gather"]["bytes"] / plain["all-gather", "dp_shard"] < 0.54
    reduced = found["all-to-all"]["bytes"] / plain["reduce-scatter", "dp_shard"]
    assert 0.5 < reduced < 0.54 if "zero_quantized_gradients" in changes else reduced == pytest.approx(1, rel=0.02)


@needs_compiler
@pytest.mark.parametrize("changes", [{}, {"persistent_quants": True}], ids=["at-every-fetch", "persistent"])
@pytest.mark.full
def test_weights_of_fp8_recipes_travel_in_8_bits(planned, changes):
    """A byte a number and no scales: those are shared beforehand, one number for each of a layer's seven matrices."""
    p = planned(config(gpus=4, zero_level=3, gradient_accumulation_steps=2, recipe="fp8_hybrid", **changes | BLOCKS))
    found = {x["op"]: x for x in p.collectives}
    gathers, fetches = found["all-gather"], 64 * 2 * 2 + 1
    assert gathers["bytes"] == pytest.approx(gathers["textbook_bytes"], rel=0.02)
    assert gathers["bytes"] == pytest.approx(0.75 * 2 * 2 * 64 * (4 * 256**2 + 3 * 256 * 512), rel=0.02)
    shared = 1.5 * 4 * (7 * (64 if changes else fetches) + 64 * 11)  # maxima of weights; once a step those of 11 sites
    assert found["all-reduce"]["bytes"] == pytest.approx(found["all-reduce"]["textbook_bytes"] + shared, abs=100)


QUANTS_IN_HOST = {"zero_level": 3, "recipe": "fp8_hybrid", "persistent_quants": True, "offload_quants": True}


def test_quants_in_host_memory_travel_as_weights_do():
    """Twice a microbatch to the device and once a step back: a byte for each number of the blocks' matrices."""
    run = from_config(config(gpus=4, **BLOCKS | QUANTS_IN_HOST), jax.sharding.AbstractMesh((1, 4), DATA), 10)
    batch = traffic.BatchShape(1, 64, microbatches=3)
    quants = 64 * (4 * 256**2 + 3 * 256 * 512) // 4
    assert traffic.host_bytes(run, batch, footprint.by_class(run, batch, "gpu")) == (2 * 3 * quants, quants)


@needs_compiler
@pytest.mark.full
def test_quants_in_host_memory_are_compiled_so(planned):
    """The program copies what the formula says; a layer more, fetched ahead of the end of each loop."""
    c = config(gpus=4, gradient_accumulation_steps=2, **BLOCKS | QUANTS_IN_HOST)
    p = planned(c)
    read, written = 2 * 2 * p.classes["quants"]["host"], p.classes["quants"]["host"]
    assert p.h2d_bytes == pytest.approx(read, rel=0.03) and p.d2h_bytes == pytest.approx(written, rel=0.03)


@needs_compiler
@pytest.mark.full
def test_normuon_orthogonalises_each_matrix_on_one_gpu(planned):
    """64 layers on four GPUs take 16 rounds, of three products for each of the five steps; what is sent for them is
    within 2 % of the formula."""
    p = planned(config(gpus=4, optimizer="normuon", **BLOCKS))
    for x in p.collectives:
        assert x["bytes"] == pytest.approx(x["textbook_bytes"], rel=0.02, abs=1000), x
    sent = next(x["bytes"] for x in p.collectives if x["op"] == "all-to-all")
    matrices = 64 * (4 * 256**2 + 3 * 256 * 512)
    assert sent == pytest.approx(0.75 * matrices / 4 * (2 + 4), rel=0.01)
    loops = {(x["products"], x["times"]) for x in p.overlap if x["kind"] == "all-to-all"}
    assert loops == {(15, 16)}


@needs_compiler
@pytest.mark.full
def test_groups_of_gpus_sum_their_shards_once(planned):
    """HSDP: shards are exchanged inside a group, and their gradients are summed over the groups once per step."""
    p = planned(config(gpus=4, dp_replicate_size=2, zero_level=3, gradient_accumulation_steps=2, **BLOCKS))
    found = {(x["op"], x["axis"]): x for x in p.collectives}
    for key in (("all-gather", "dp_shard"), ("reduce-scatter", "dp_shard"), ("all-reduce", "dp_replicate")):
        assert found[key]["bytes"] == pytest.approx(found[key]["textbook_bytes"], rel=0.02), key
        assert found[key]["bytes"] > 10e6


@needs_compiler
@pytest.mark.full
def test_host_copies_are_counted(planned):
    """Moments go to the device and back once a step; nothing else does.

    `host.sweep` asks for a layer ahead: it reads the last layer once more at the end, in place of one that would follow
    it, and writes the first layer once more, which stands in for layer -1.
    """
    p = planned(config(gpus=1, offload_optimizer=True, **BLOCKS))
    moments, per_parameter, vocabulary = p.classes["moments"]["host"], 2 + 2, 2 * 512 * 256
    assert moments == per_parameter * p.parameters and p.host_temp_bytes == 0
    layer = per_parameter * (p.parameters - vocabulary - 256) // 64
    assert (p.h2d_bytes, p.d2h_bytes) == (moments + layer, moments + layer)


@needs_compiler
@pytest.mark.full
def test_groups_of_microbatches_share_transfers(planned):
    """Weights and accumulators cross the host link, and weights the GPUs' link, once for a group of four microbatches.

    The first group reads no accumulators, the update reads all. Of 64 layers a few are transferred once more, at the
    turns of passes and ahead of the end of a loop.
    """
    offloads = {"offload_weights": True, "offload_grads": True}
    changes = BLOCKS | offloads | {"gpus": 4, "zero_level": 3, "gradient_accumulation_steps": 12}
    one, four = (planned(config(**changes, microbatches_per_fetch=group)) for group in (1, 4))
    for p, groups in ((one, 12), (four, 3)):
        weights, grads = (p.classes[name]["host"] for name in ("weights", "grads"))
        assert p.h2d_bytes == pytest.approx((2 * groups) * weights + groups * grads, rel=0.05)
        assert p.d2h_bytes == pytest.approx(weights + groups * grads, rel=0.05)
        for x in p.collectives:
            assert x["bytes"] == pytest.approx(x["textbook_bytes"], rel=0.02, abs=1000), x
    gathered, reduced = ([sent(p, op) for p in (one, four)] for op in ("all-gather", "reduce-scatter"))
    assert gathered[0] > 3.9 * gathered[1] and reduced[0] == reduced[1]


def sent(p: Plan, op: str) -> int:
    """Bytes that a plan's collectives of this kind send."""
    return sum(x["bytes"] for x in p.collectives if x["op"] == op)


@needs_compiler
@pytest.mark.full
def test_layers_in_files(tmp_path):
    """State in files is read and written once a step; beside the program that runs, host memory has what both need."""
    files = {"offload_master": "nvme", "offload_optimizer": "nvme", "nvme_path": "/nowhere"}  # it need not exist
    offloads = dict.fromkeys(("offload_grads", "offload_weights", "offload_residual"), True)
    c = config(gpus=1, **files, **offloads, **BLOCKS)
    p = planner.plan(c, FIRST, trace=str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    rows = {x["tid"]: x["args"]["name"] for x in events if x["name"] == "thread_name"}
    drawn = [x for x in events if x["ph"] == "X"]
    assert p.predicted_step_s == pytest.approx(max(x["ts"] + x["dur"] for x in drawn) / 1e6)
    moved = sum(x["args"]["MB"] for x in drawn if rows[x["tid"]] == "disks")
    assert 1e6 * moved == pytest.approx(p.nvme_read_bytes + p.nvme_write_bytes)
    assert sum(p.exposed_in_files_s.values()) == pytest.approx(p.exposed_s["disks"])
    assert set(p.exposed_in_files_s) == {"master", "moments"}
    in_files = sum(p.classes[name]["nvme"] for name in ("master", "moments"))
    tables, norm = 2 * 512 * 256, 256  # the last norm stays in memory
    assert p.nvme_bytes == in_files == (4 + 2 + 2) * (p.parameters - norm)
    assert p.nvme_read_bytes == p.nvme_write_bytes == in_files
    host = {name: row["host"] for name, row in p.classes.items()}
    assert host["master"] + host["moments"] == (4 + 2 + 2) * norm
    # While gradients are computed: all but one class of state, and a layer that is read ahead. While a layer is
    # updated, its state before and after, the one that is read and the one that is written, but no residuals.
    rest, layer = sum(host.values()) - host["residuals"], (4 + 2 + 2) * (p.parameters - tables - norm) // 64
    assert p.host_bytes == pytest.approx(rest + max(host["residuals"] + layer, 4 * layer), rel=0.01)
    assert p.device_bytes < 10 * layer < p.host_bytes
    run, batch = from_config(c, MESH, 10), traffic.BatchShape(1, 64, 2)
    assert footprint.estimate_host(run, batch)["layers from files"] == 4 * layer
    # The file's part crosses the host link as well, weights and gradients as they do without it.
    read, written = traffic.host_bytes(run, batch, p.classes)
    assert p.h2d_bytes == pytest.approx(read, rel=0.03) and p.d2h_bytes == pytest.approx(written, rel=0.03)
    assert in_files < p.h2d_bytes and "read from NVMe" in plan_text.plan_table(p)


def loop(p: PlanWithTransfers, products: int) -> list[Transfer]:
    """Transfers in the loops that compute so many matrix products and attentions."""
    found = [Transfer(**row) for row in p.overlap]
    return [x for x in found if x.products == products]


FORWARD = 7  # products of a layer: q with k, v, attention, o, gate, up, down
BACKWARD = 20  # six of those again, then 14 for the gradients


def beside(rows: list[Transfer]) -> list[Transfer]:
    """Those that run while something is computed."""
    return [x for x in rows if x.waited > x.started]


def size(rows: list[Transfer]) -> int:
    return sum(x.bytes for x in rows)


def kinds(rows: list[Transfer], *names: str) -> list[Transfer]:
    return [x for x in rows if x.kind in names]


@needs_compiler
@pytest.mark.parametrize("changes", quick_at([({"gpus": 1},), ({"gpus": 4} | SHARDED,)]), ids=["1", "4"])
def test_transfers_overlap_computation(planned, changes):
    """What comes and goes in the layer loops does so while matrix products run, in the order of the compiled program.

    Forward: every copy and the gather of the next layer run beside all 7 products. Backward, of two layers in a body on
    one GPU: as much as is said below. Update: reads and writes at the same time.
    """
    p = planned(config(**changes | ALL))
    layers = 2 if changes["gpus"] == 1 else 1
    forward, backward, update = (loop(p, products) for products in (FORWARD, layers * BACKWARD, 0))
    assert {"h2d", "d2h"} <= {x.kind for x in forward} & {x.kind for x in backward} & {x.kind for x in update}
    assert all(x.asynchronous for x in forward + backward + update)
    assert all(x.both_ways for x in update)
    weights, grads = (p.classes[name]["host"] // 32 for name in ("weights", "grads"))  # of a layer
    large = lambda rows: [x for x in rows if x.bytes > weights // 100]  # the norms' vectors are waited for anywhere

    assert all(x.waited - x.started >= 3 for x in forward)
    assert size([x for x in kinds(forward, "h2d") if (x.started, x.waited) == (0, FORWARD)]) > 0.99 * weights
    # Sums of the layer before leave from the first product on, for longer than the block is computed again.
    leaving = large(kinds(backward, "d2h"))
    assert size(leaving) > 0.98 * layers * grads
    assert all(x.started % BACKWARD == 0 and x.waited - x.started > FORWARD for x in leaving)
    coming = kinds(backward, "h2d")
    if changes["gpus"] == 1:
        assert beside(large(coming)) == large(coming)
        assert size([x for x in coming if x.waited - x.started > FORWARD]) > 0.9 * layers * weights
        return
    assert size(beside(coming)) > 0.6 * size(coming)  # the shards of the layer after next come last
    assert {(x.count, x.started, x.waited) for x in kinds(forward, "all-gather")} == {(1, 0, FORWARD)}
    # The next weights are gathered until the first gradient is reduced, and no product waits for them before that;
    # gradients leave while the block is differentiated, all but two of the attention's four matrices: 17 %.
    reduced = kinds(backward, "reduce-scatter")
    assert min(x.started for x in reduced) == FORWARD + 1
    assert {x.waited for x in kinds(backward, "all-gather")} == {FORWARD + 1}
    assert all(x.started <= FORWARD - 3 for x in kinds(backward, "all-gather"))
    assert size(beside(reduced)) > 0.8 * size(reduced)


@needs_compiler
@pytest.mark.parametrize("level, layers", [(3, 32), (1, 12)], ids=["zero3", "zero1"])
@pytest.mark.full
def test_sums_over_devices_overlap_the_last_backward_pass(planned, level, layers):
    """All blocks' gradients are summed during the last microbatch's backward pass, at ZeRO-1 in it alone; the head's is
    not among them (step/gradients.py). All layers of Llama-7B do not fit four RTX 4090 at that level."""
    p = planned(config(gpus=4, zero_level=level, **{"model.num_hidden_layers": layers}))
    backward = kinds(loop(p, BACKWARD), "reduce-scatter")
    layer = 2 * (p.parameters - 2 * 32000 * 4096 - 4096) // layers
    loops = [[x for x in backward if x.loop == name] for name in dict.fromkeys(x.loop for x in backward)]
    assert [(size(x), {r.times for r in x}) for x in loops][-1] == (layer, {layers})
    assert [size(x) for x in loops[:-1]] == ([layer] if level > 1 else [])
    for rows in loops:  # all but two of the attention's four matrices, the last to be computed: 17 %
        assert size(beside(rows)) > 0.8 * size(rows)
    if level > 1:
        gathers = kinds([Transfer(**row) for row in p.overlap], "all-gather")
        assert len(gathers) >= 4 and all(x.asynchronous for x in gathers) and beside(gathers) == gathers


KEYS = {
    "gpu": str,
    "gpus": int,
    "fits": bool,
    "device_bytes": int,
    "device_temp_bytes": int,
    "host_bytes": int,
    "host_temp_bytes": int,
    "nvme_bytes": int,
    "disks": str,
    "classes": dict,
    "collectives": list,
    "h2d_bytes": int,
    "d2h_bytes": int,
    "exposed_s": dict,
    "exposed_by_loop_s": dict,
    "host_transfers": dict,
    "not_predicted": str,
    "xla": str,
}
PREDICTED = {"predicted_step_s": float, "predicted_range_s": list, "tokens_per_s_per_gpu": float, "mfu": float}


def check_schema(found: dict):
    for key, kind in KEYS.items():
        assert type(found[key]) is kind, key
    for key, kind in PREDICTED.items():
        assert type(found[key]) is (type(None) if found["not_predicted"] else kind), key
    table = {"weights", "outer", "grads", "master", "moments", "residuals"}
    assert found["classes"].keys() >= table
    assert all(row.keys() == {"device", "host", "nvme"} for row in found["classes"].values())
    columns = {"op", "axis", "count", "bytes", "textbook_bytes"}
    assert all(x.keys() == columns for x in found["collectives"])
    assert found["estimate"] == (found["estimated_step_s"] is not None)


def test_programs_of_a_step_with_files_are_traced_as_on_the_gpu_to_plan_for(monkeypatch):
    """What cuDNN takes differs by GPU: heads of 192 and 128 channels are Hopper's alone, and there may be none here."""
    last, devices = jax.devices()[-1], []

    class Traced(SeveralPrograms):
        def programs(self, *batch):
            devices.append(jax.config.jax_default_device)  # pyright: ignore[reportAttributeAccessIssue]
            return []

    monkeypatch.setattr(planner.step, "make_train_step", lambda *_: Traced.__new__(Traced))
    c = config(gpus=1, **BLOCKS)
    planner.programs(from_config(c, make_mesh([last]), 1), make_mesh([last]), traffic.batch_of(c))
    assert devices == [last]


def compiled_step(gpus: int, added_options: dict | None = None, **changes) -> str:
    """The compiled step, for FIRST, of a model with five layers. added_options: of XLA, beside those of a run."""
    c = config(gpus=gpus, **BLOCKS | {"model.num_hidden_layers": 5} | changes)
    mesh = make_mesh(aot.devices(FIRST, gpus), **mesh_sizes(c))
    run = from_config(planner.checked(c, FIRST), mesh.abstract_mesh, total_steps=10)
    (program,) = planner.programs(run, mesh, traffic.BatchShape(1, 64, c.gradient_accumulation_steps))
    options = compiler_options(run, "gpu") | (added_options or {})
    return aot.compile_for(program.function, program.arguments, mesh, options).text


@pytest.mark.full
@needs_compiler
@pytest.mark.parametrize(
    "changes, graphs",
    quick_at(
        [
            ({}, True),
            ({"offload_optimizer": True}, False),
            ({"gpus": 2, "zero_level": 3}, False),
            ({"cuda_graphs": "none"}, False),
            ({"offload_optimizer": True, "cuda_graphs": "small"}, True),
            ({"offload_optimizer": True, "cuda_graphs": "concurrent", "xla_options": "exact"}, True),
        ],
        0,
        1,
        2,
    ),
)
def test_no_graph_orders_copies_after_products(changes, graphs, tmp_path):
    """In a CUDA graph every operation waits for the one before: xla_options.NO_GRAPHS. Read from what XLA runs."""
    compiled_step(**{"gpus": 1} | changes, added_options={"xla_dump_to": str(tmp_path)})
    (file,) = tmp_path.glob("*jit_*thunk_metadata.txt")
    assert ("kCommandBuffer" in file.read_text()) == graphs


def results(text: str) -> dict[hlo.Array, str]:
    """An instruction of a compiled step for each size of array that one makes, fused ones and loops left out."""
    module = hlo.parse_module(text)
    fused = {
        name for c in module.values() for i in c.values() if i.opcode == "fusion" for name in hlo.called(i, "calls")
    }
    passed_on = ("parameter", "get-tuple-element", "tuple", "while", "bitcast", "opt-barrier", "conditional", "call")
    made = [i for name, c in module.items() if name not in fused for i in c.values() if i.opcode not in passed_on]
    return {array: i.name for i in made for array in hlo.arrays(i.shape)}


@needs_compiler
@pytest.mark.full
@pytest.mark.parametrize("offloads", [False, True])
def test_no_temporary_is_larger_than_the_experts_of_two_layers(offloads):
    """Of six layers; state, which is as large as all, is changed in place."""
    sizes = {"num_experts": 64, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "num_hidden_layers": 6}
    fields: dict[str, Any] = {f"model.{name}": size for name, size in sizes.items()}
    text = compiled_step(1, **fields, **dict.fromkeys(ALL, offloads))
    c = config(gpus=1, **BLOCKS)
    of_a_layer = 64 * 3 * c.model.hidden_size * 128 * 2  # bfloat16
    state = {
        array for i in hlo.parse_module(text)[""].values() if i.opcode == "parameter" for array in hlo.arrays(i.shape)
    }
    largest, name = max((array.bytes, name) for array, name in results(text).items() if array not in state)
    assert of_a_layer / 6 < largest < 2 * of_a_layer, (name, largest, of_a_layer)


ALTERNATING = {"model.num_hidden_layers": 6, "model.sliding_window": 32, "model.sliding_window_pattern": 2}


@needs_compiler
@pytest.mark.full
def test_train_predicts_what_the_plan_says(capsys):
    """From a step compiled as `train` has it, on a device that calls itself by the GPU's name."""
    compiled = SimpleNamespace(as_text=lambda: compiled_step(1))
    c = planner.checked(config(gpus=1, **BLOCKS | {"model.num_hidden_layers": 5}), FIRST)
    run = from_config(c, MESH, total_steps=10)
    found = print_prediction(c, run, compiled, [SimpleNamespace(device_kind=GPUS[FIRST].name)], Claimed())
    p = planner.plan(c, FIRST)
    assert found.predicted_step_s == pytest.approx(p.predicted_step_s, rel=0.01)
    assert found.mfu == pytest.approx(p.mfu, rel=0.01)
    assert f"predicted: {1e3 * found.predicted_step_s:,.1f} ms a step" in capsys.readouterr().out
    assert print_prediction(c, run, compiled, [SimpleNamespace(device_kind="cpu")], Claimed()).predicted_step_s is None
    assert capsys.readouterr().out == ""


def test_train_counts_the_tokens_of_a_tensor_parallel_group_once(monkeypatch, capsys):
    """16 sequences of 128 tokens in 2 s on two GPUs that compute them together."""
    c = flags.load_config(str(CONFIGS / "tiny.py"))
    c.gpus, c.tp_size = 2, 2

    def in_two_seconds(step, gpu, *, tokens: int, compute_time: float, has_graphs: bool) -> prediction.Prediction:
        return prediction.Prediction(2.0, [1.8, 2.2], tokens_per_s_per_gpu=tokens / 2.0)

    monkeypatch.setattr(prediction, "predict", in_two_seconds)
    monkeypatch.setattr(hlo, "parse_module", lambda text: None)
    compiled = SimpleNamespace(as_text=lambda: "")
    found = print_prediction(
        c, footprint.assembly(c), compiled, [SimpleNamespace(device_kind=GPUS[FIRST].name)] * 2, Claimed()
    )
    assert " 1,024 tok/s, by XLA " in capsys.readouterr().out
    assert "predicted 1,024 " in comparison(found, [2.0], 16 * 128)


# Residuals of a microbatch are in a slot that is known when the program runs, so they are transferred by kernels.
STAGES = ALL | {"offload_residual": False, "model.num_hidden_layers": 16}
PLACED_IN_HOST = [
    (4, ALL | SHARDED),
    (4, ALL | {"zero_level": 3, "resident_layers": 2}),
    (4, QUANTS_IN_HOST),
    (4, ALL | {"device_memory": 0.005, "zero_level": 3, "overlap_update": True}),
    (4, ALL | {"zero_level": 3} | ALTERNATING),
    (1, ALL | {"overlap_update": True, "model.num_hidden_layers": 6}),
    (4, ALL | {"overlap_update": True, "zero_level": 3, "microbatches_per_fetch": 3}),
    (4, STAGES | {"pp_size": 2, "pp_schedule": "1f1b", "zero_level": 3}),
]


@pytest.mark.full
@needs_compiler
@pytest.mark.parametrize("gpus, changes", quick_at(PLACED_IN_HOST, 0), ids=str)
def test_copy_engines_do_all_host_transfers_in_loops(gpus, changes):
    """No kernel that occupies the multiprocessors, in the layer loops, the update's and the one over microbatches."""
    module = hlo.parse_module(compiled_step(gpus, gradient_accumulation_steps=3, **changes))
    found = costs.host_transfers(hlo.with_rounds(module, lambda body: Fraction(1, 2)))  # of stages, in some ticks
    assert found["kernel"] == 0 < found["copy_engine"]


@needs_compiler
@pytest.mark.full
def test_an_update_under_the_next_forward_pass(planned):
    """The same bytes of host memory: pending gradients are where the accumulators are. The first forward pass has its
    weights from the update; of 64 layers a few are transferred once more, ahead of the end of a loop. XLA computes
    nothing again for host memory that it takes for the device's, and the estimate knows what is in flight."""
    changes = BLOCKS | ALL | {"gradient_accumulation_steps": 2}
    plain, overlapped = (planned(config(gpus=1, **changes, overlap_update=x)) for x in (False, True))
    weights = plain.classes["weights"]["host"]
    state = sum(plain.classes[name]["host"] for name in ("master", "moments", "grads"))
    assert overlapped.host_bytes == plain.host_bytes and overlapped.host_temp_bytes < plain.host_temp_bytes
    assert overlapped.h2d_bytes == pytest.approx(plain.h2d_bytes - weights, abs=3 * state / 64)
    assert overlapped.d2h_bytes == pytest.approx(plain.d2h_bytes, rel=0.02)
    assert overlapped.rematerialised["count"] == 0
    assert overlapped.predicted_step_s < plain.predicted_step_s


@needs_compiler
@pytest.mark.full
def test_two_layers_alone_are_not_unrolled(planned):
    """XLA (jax 0.12) crashed on a backward pass of two layers side by side that are copied in from the host."""
    offloaded = {"offload_weights": True, "offload_grads": True, "gradient_accumulation_steps": 2}
    p = planned(config(gpus=1, **BLOCKS | offloaded | {"model.num_hidden_layers": 2}), "h200")
    assert p.host_transfers["copy_engine"] > 0


@needs_compiler
@pytest.mark.full
def test_layers_that_alternate_are_fetched_one_by_one(planned):
    """With a window in five of six layers a loop's body has six layers: as many gathers as without, and the weights of
    one layer more at most, where without an order all six would be gathered at once."""
    sizes = BLOCKS | {"model.num_hidden_layers": 14, "zero_level": 3}  # two are left of a period
    plain, windowed = (
        planned(config(gpus=4, **sizes, **window), FIRST)
        for window in ({}, {"model.sliding_window": 32, "model.sliding_window_pattern": 6})
    )

    def gathers(p: Plan) -> int:
        return next(x["count"] for x in p.collectives if x["op"] == "all-gather")

    def working_space(p: Plan) -> int:
        return p.device_bytes - sum(row["device"] for row in p.classes.values())

    layer = plain.classes["weights"]["device"] * 4 // 14
    assert gathers(plain) - 2 <= gathers(windowed) <= gathers(plain)  # one of several loops prefetches less
    assert working_space(windowed) < working_space(plain) + layer


@pytest.mark.full
@needs_compiler
@pytest.mark.parametrize("gpus, level", quick_at([(1, 1), (4, 1), (4, 3)], 0))
def test_state_in_device_memory_is_updated_in_one_pass(gpus, level):
    """One fusion writes a stack of master weights, with its moments; nothing copies a layer of it, before or after."""
    text = compiled_step(gpus, zero_level=level)
    stack, layer = (rf"f32\[{n}{512 // gpus},256\]" for n in ("5,", "(1,)?"))
    writers = re.findall(rf"= (\([^=]*{stack}[^=]*\)) fusion\(", text)
    assert len(writers) == 2 and all(w.count("bf16") in (2, 3) for w in writers)  # gate, up: moments, perhaps weights
    assert not re.search(rf"{stack}\S* (dynamic-update-slice|copy)\(", text)
    assert not re.search(rf"ROOT \S+ = {layer}\S* dynamic-slice\(|= {layer}\S* copy\(", text)


@needs_compiler
@pytest.mark.full
@pytest.mark.parametrize("level", [1, 3])
def test_moments_in_8_bits_are_updated_in_place(level):
    """One kernel for each matrix, with all that it writes over its operands, but the work weights where they are kept:
    at ZeRO-1 they are gathered, a layer at a time, from the master weights."""
    text = compiled_step(4, zero_level=level, optimizer="adamw8bit", kernels="auto")
    rows = 5 * 512 * 256 // 256 // 4
    kernels = [line for line in text.splitlines() if re.search(rf"s8\[{rows},256\].* custom-call\(", line)]
    assert len(kernels) == 3, len(kernels)  # gate, up, down
    for line in kernels:
        aliased = re.search(r"output_to_operand_aliasing=\{(.*?)\}, [a-z]", line)
        assert aliased and aliased[1].count("(") == 5, line[:300]
        results = line.split(" custom-call(")[0].count("[")
        assert results == (6 if level == 3 else 5), line[:300]
    assert not re.search(rf"s8\[{rows},256\]\S* copy\(|s8\[(1,)?128,256\]\S* dynamic-slice\(", text)


@needs_compiler
@pytest.mark.full
@pytest.mark.parametrize("gpu", ["a100", "rtx3090", "rtx5060ti_16gb", "b200", "b300"])
def test_every_gpu_is_compiled_for(planned, gpu):
    """Each in a process of its own, with the attention of its cuDNN. RTX 4090, H100 and H200 have other tests here;
    L40S has the architecture of RTX 4090, and RTX 5090 that of RTX 5060 Ti."""
    p = planned(config(**TINY), gpu)
    assert not p.estimate and p.fits and p.gpu == gpu
    check_schema(json.loads(json.dumps(dataclasses.asdict(p))))


@needs_compiler
@pytest.mark.full
def test_unoptimised_kernels_change_nothing_else(planned, monkeypatch):
    """What aot leaves out to be faster shows in no figure of a plan."""
    c = config(gpus=1, offload_optimizer=True, **BLOCKS)
    fast = planned(c)
    monkeypatch.setattr(aot, "XLA_OPTIONS", {"xla_gpu_enable_triton_gemm": False})
    assert PlanWithTransfers(**json.loads(compiled_plan(c))) == fast


@pytest.mark.parametrize("has_driver", [False, True])
def test_versions_of_cuda_are_checked_where_there_is_a_driver(monkeypatch, has_driver):
    """Without one the check fails whatever is installed; with one, it is NVIDIA's to make."""
    monkeypatch.delenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", raising=False)
    monkeypatch.setattr(aot, "has_driver", lambda: has_driver)
    monkeypatch.setattr(aot, "target_config", lambda gpu: "")
    seen: list = []
    monkeypatch.setattr(aot, "expect_no_cuda_without_driver", lambda: seen.append("no CUDA without a driver"))
    monkeypatch.setattr(aot.topologies, "get_topology_desc", lambda **_: seen.append({**os.environ}))
    assert aot.usable(aot.kind() or "h100")
    first, environment = seen
    assert first == "no CUDA without a driver"
    assert environment.get("JAX_SKIP_CUDA_CONSTRAINTS_CHECK") == (None if has_driver else "1")


@pytest.mark.parametrize("place", ["wheel", "path", "cuda", ""])
def test_an_assembler_is_found_in_each_place(place, monkeypatch, tmp_path):
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    if place == "wheel":
        ptxas = tmp_path / "cu13/bin/ptxas"
        ptxas.parent.mkdir(parents=True)
        ptxas.touch()
    monkeypatch.setattr(aot.importlib.util, "find_spec", lambda _: spec)
    monkeypatch.setattr(aot.shutil, "which", lambda _: "/bin/ptxas" if place == "path" else None)
    monkeypatch.setattr(aot, "Path", lambda root: SimpleNamespace(glob=glob) if root == "/usr/local" else Path(root))
    glob = lambda _: iter(["cuda-13/bin/ptxas"] if place == "cuda" else [])
    assert aot._assembler() == bool(place)


@needs_compiler
def test_where_jax_has_not_loaded_its_plugin_another_process_plans(monkeypatch, capsys):
    """As on a machine without a GPU where nobody said JAX_PLATFORMS=cpu."""

    def not_loaded(**_):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(aot.topologies, "get_topology_desc", not_loaded)
    monkeypatch.setattr(planner, "plan_in_subprocess", lambda c, gpu, **options: (gpu, options["host_memory"]))
    assert planner.plan(config(**TINY), FIRST, host_memory=8) == (FIRST, 8)
    # That process asks no other one.
    request = json.dumps({"config": config(**TINY).to_dict(), "gpu": FIRST, "host_memory": None, "trace": None})
    monkeypatch.setattr(planner.sys, "stdin", io.StringIO(request))
    planner.serve_plan()
    assert "JAX does not load its CUDA plugin" in json.loads(capsys.readouterr().out)["error"]


def write_config(tmp_path: Path, **changes) -> str:
    lines = [f"    c.{field} = {value!r}" for field, value in changes.items()]
    head = "from surojax.config.fields import default_config\n\n\ndef get_config():\n    c = default_config()\n"
    file = tmp_path / "config.py"
    file.write_text(head + "\n".join([*lines, "    return c"]) + "\n")
    return str(file)


def command(argv: list[str], capsys) -> str:
    plan_command.main(argv)
    return capsys.readouterr().out


def refused(argv: list[str]) -> str:
    """The one line that the command ends with."""
    with pytest.raises(SystemExit) as error:
        plan_command.main(argv)
    line = str(error.value)
    assert line.startswith("surojax.plan: error: ") and "\n" not in line
    return line


def test_a_plan_that_does_not_fit_is_no_success(monkeypatch, capsys):
    """A script may ask by the exit code."""
    monkeypatch.setattr(aot, "available", lambda: False)
    monkeypatch.setattr(planner, "_changes", lambda *_: [])
    with pytest.raises(SystemExit) as end:
        plan_command.main(["--config", "llama7b", "--gpu", "rtx4060", "--gpus=1"])
    assert end.value.code == 1 and "does not fit: " in capsys.readouterr().out


def test_without_the_compiler_there_is_an_estimate(tmp_path, monkeypatch, capsys):
    """It says so, names the extra, and fills the same fields."""
    monkeypatch.setattr(aot, "available", lambda: False)
    file = write_config(tmp_path, **TINY, zero_level=3, model_dtype="bfloat16", offload_master=True)
    argv = ["--config", file, "--gpu", "rtx4090", "--config.gpus=4", "--json", str(tmp_path / "plan.json")]
    out = command(argv, capsys)
    assert "ESTIMATE" in out and "pip install 'surojax[plan]'" in out and "fits" in out
    found = json.loads((tmp_path / "plan.json").read_text())
    check_schema(found)
    assert found["estimate"] and found["gpus"] == 4 and found["predicted_step_s"] is None
    estimated = found["estimated_step_s"]
    assert "no time is predicted: an estimate" in out and f"estimated from shapes: {1e3 * estimated:,.1f} ms" in out
    assert "nothing was compiled" in refused([*argv, "--trace", str(tmp_path / "trace.json")])
    assert found["h2d_bytes"] == found["d2h_bytes"] == found["classes"]["master"]["host"] > 0
    assert all(x["bytes"] == x["textbook_bytes"] for x in found["collectives"])


def test_programs_are_compiled_for_the_cudnn_that_is_installed(monkeypatch):
    """XLA's description of a GPU has its version: of CUDA 13's wheel or, without it, of CUDA 12's."""
    versions = {"nvidia-cudnn-cu13": "9.28.1.5", "nvidia-cudnn-cu12": "9.11.0.98"}

    def version(wheel: str) -> str:
        if wheel not in versions:
            raise importlib.metadata.PackageNotFoundError(wheel)
        return versions[wheel]

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert "dnn_version_info { major: 9 minor: 28 patch: 1 }" in " ".join(aot.target_config(GPUS["h100"]).split())
    del versions["nvidia-cudnn-cu13"]
    assert aot.cudnn_version() == "9.11.0"


def test_a_plan_has_what_its_parts_say(monkeypatch, tmp_path):
    """Of stages, experts, packed rows and files, on machines of two GPUs."""
    monkeypatch.setattr(aot, "available", lambda: False)
    experts = {"model.num_experts": 8, "model.num_experts_per_tok": 2, "model.moe_intermediate_size": 128}
    c = config("tiny", gpus=4, zero_level=3, sample_packing=True, kernels="mosaic", **experts)
    p = planner.plan(c, FIRST, gpus_per_node=2, host_memory=8, advise=False)
    facts = with_nodes(FIRST, 2, None)
    checked = planner.checked(c, FIRST)
    run = footprint.assembly(checked)
    assert p.experts == expert_time.multiplied_by(run) != ""
    assert p.between_machines == links.crossing(facts, p.mesh) == ["dp_shard"]
    assert (p.gpus, p.gpus_per_node, p.packed, p.cp_method, p.estimate) == (4, 2, True, c.cp_method, True)
    assert p.parameters == run.model.num_parameters and p.mesh == dict(run.mesh.shape)
    assert p.host_limit_bytes == int(0.9 * 8 * GiB) and p.device_limit_bytes == candidate.device_limit(facts)
    assert p.estimated_step_s == candidate.estimated(checked, facts).seconds > 0
    assert (p.disks, p.drive_tbw, p.bubble, p.changes) == ("", 0.0, 0.0, [])
    c = config("tiny", gpus=2, pp_size=2, gradient_accumulation_steps=4)
    assert planner.plan(c, FIRST, advise=False).bubble == pytest.approx(1 / 5)  # one idle tick beside four
    c = config("tiny", offload_optimizer="nvme", offload_master="nvme", nvme_path=str(tmp_path))
    p = planner.plan(c, FIRST, disk="980pro", advise=False)
    assert "980 PRO" in p.disks.upper() or "980pro" in p.disks
    assert p.drive_tbw == 600 and p.nvme_bytes > 0 and p.nvme_read_bytes > 0 < p.nvme_write_bytes


def test_units_follow_the_largest_number(monkeypatch):
    """No column of zeros for a small model: MiB there, GiB for a large one."""
    monkeypatch.setattr(aot, "available", lambda: False)

    def numbers(text: str, row: str) -> list[float]:
        (line,) = [line for line in text.splitlines() if line.startswith(row)]
        return [float(x) for x in re.findall(r"[\d.]+", line)]

    p = planner.plan(config("tiny", gpus=4, offload_master=True), FIRST)
    text = plan_text.plan_table(p)
    assert "\n  MiB per GPU" in text and re.search(r"per step and GPU +count +MiB", text) and "GiB per GPU" not in text
    assert numbers(text, "  weights ") == [round(p.classes["weights"]["device"] / 2**20, 2)] != [0]
    assert numbers(text, "  host to device") == [round(p.h2d_bytes / 2**20, 2)] != [0]
    assert f"\nfits: {p.device_bytes / 2**20:.1f} MiB of 22.0 GiB" in text
    p = planner.plan(config(gpus=4, gradient_accumulation_steps=8), FIRST, advise=False)
    text = plan_text.plan_table(p)
    assert "\n  GiB per GPU" in text and re.search(r"per step and GPU +count +GiB", text) and "MiB per" not in text


@pytest.mark.full
@needs_compiler
def test_flops_of_products_are_those_of_the_compiled_step():
    c = config(gpus=1, recompute_block=False, **BLOCKS | {"model.num_hidden_layers": 5})
    run = from_config(planner.checked(c, FIRST), MESH, total_steps=10)
    attention = 5 * 2 * 64 * 256 * 3  # per token; cuDNN's, not a matrix product
    module = hlo.parse_module(compiled_step(1, recompute_block=False))
    found = 0
    for i, times, computation in hlo.executed(module):
        fused = [(x, module[name]) for name in hlo.called(i, "calls") for x in module[name].values()]
        multiplied = [pair for pair in [(i, computation), *fused] if "__cublas" in pair[0].attributes]
        found += times * sum(2 * math.prod(costs.product_sizes(*pair)) for pair in multiplied)
    assert found == 128 * (sum(products.token_flops(run, 64).values()) - attention)


HEAD = 6 * 32000 * 4096 + 6 * 32 * 4096 * 2048  # of llama7b per token, and attention: in model_dtype
MATRICES = 32 * (4 * 4096**2 + 3 * 4096 * 11008)  # of its blocks


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({}, {"float32": HEAD + 6 * MATRICES}),
        ({"matmul_dtype": "bfloat16"}, {"float32": HEAD, "bfloat16": 6 * MATRICES}),
        ({"gradient_dtype": "bfloat16"}, {"float32": HEAD + 2 * MATRICES, "bfloat16": 4 * MATRICES}),
        ({"model_dtype": "bfloat16", "recipe": "fp8_current"}, {"bfloat16": HEAD, "float8": 6 * MATRICES}),
        (
            {"recipe": "nvfp4", "skip_quant_last_layers": 8, "matmul_dtype": "bfloat16"},
            {"float32": HEAD, "float4": 4.5 * MATRICES, "bfloat16": 1.5 * MATRICES},
        ),
        ({"recipe": "mxfp8", "block_scaled_products": "emulated"}, {"float32": HEAD + 6 * MATRICES}),
    ],
    ids=str,
)
def test_products_count_in_the_numbers_that_they_have(changes, expected):
    c = config(**{"model_dtype": "float32", "gpus": 2} | changes)
    c = planner.checked(c, "b200")
    run = from_config(c, jax.sharding.AbstractMesh((1, 2), DATA), total_steps=10)
    assert products.token_flops(run, 2048) == pytest.approx(expected)
    # The best that MFU can be measured against: the time of these products, each at its own rate.
    rates = {"float32": 1125e12, "bfloat16": 2250e12, "float8": 4500e12, "float4": 9000e12}
    fastest = sum(size / rates[dtype] for dtype, size in expected.items())
    devices = [SimpleNamespace(device_kind="NVIDIA B200")] * 2
    assert peak_flops(devices, run, 2048) == pytest.approx(2 * sum(expected.values()) / fastest)
    assert peak_flops([SimpleNamespace(device_kind="cpu")], run, 2048) is None


@pytest.mark.full
def test_what_does_not_fit_comes_with_what_would(monkeypatch):
    monkeypatch.setattr(aot, "available", lambda: False)
    p = planner.plan(config(gpus=1), "rtx4090", host_memory=64)
    assert (
        not p.fits and len(p.changes) == 3 and all("offload_" in change and "(fits)" in change for change in p.changes)
    )
    times = [
        float(re.search(r"estimated ([\d,]+) ms a step, not compiled:", change)[1].replace(",", ""))
        for change in p.changes
    ]
    assert times == sorted(times)  # the fastest first
    text = plan_text.plan_table(p)
    assert "does not fit: " in text and all(change in text for change in p.changes)
    monkeypatch.setattr(remedies, "MORE_GPUS", (2,))
    nothing = planner.plan(config(gpus=1), "rtx5060ti_16gb", host_memory=1).changes
    assert all(line.removeprefix("or ").startswith("more ") and "(fits)" in line for line in nothing)
    nothing = planner.plan(config("llama405b", gpus=1), "rtx5060ti_16gb", host_memory=1).changes
    assert nothing == [remedies.NOTHING]


@pytest.mark.full
def test_what_would_fit_leaves_room_in_host_memory(monkeypatch):
    monkeypatch.setattr(aot, "available", lambda: False)
    offloaded = config(gpus=1, **ALL)
    assert planner.plan(offloaded, "rtx4090", host_memory=100).fits
    small = planner.plan(offloaded, "rtx4090", host_memory=64)  # the device is not the problem
    assert not small.fits and all("(fits), estimated" in change for change in small.changes)
    assert all(float(re.search(r"([\d.]+) GiB of host memory", x)[1]) <= 0.9 * 64 for x in small.changes)
    text = plan_text.plan_table(small)
    assert "does not fit: 74.8 GiB of 57.6 GiB, which is 90% of host memory" in text and small.changes[0] in text
    in_files = planner.plan(config(gpus=1), "rtx4090", host_memory=30).changes
    (files,) = [change for change in in_files if "files on a drive" in change]
    assert "--config.offload_master=nvme" in files and "--config.nvme_path=FOLDER" in files


@pytest.mark.full
def test_what_fits_leaves_the_driver_its_part(monkeypatch):
    """95 % of a card, less `RESERVE`, is what `fit` and the studio say too: what needs more does not fit."""
    monkeypatch.setattr(aot, "available", lambda: False)
    c = config(**TINY)
    need = planner.plan(c, FIRST).device_bytes

    def on(card: float):
        monkeypatch.setitem(GPUS, FIRST, dataclasses.replace(GPUS[FIRST], memory_bytes=int(card)))
        return planner.plan(c, FIRST)

    whole = need + candidate.RESERVE
    tight, enough, plenty = on(whole / 0.96), on(whole / 0.94), on(whole / 0.5)
    assert not tight.fits and tight.changes and "does not fit: " in plan_text.plan_table(tight)
    assert tight.device_limit_bytes == pytest.approx(0.95 / 0.96 * whole - candidate.RESERVE, rel=1e-3)
    assert enough.fits and not enough.changes and "95% of each" in plan_text.plan_table(enough)
    card = GPUS[FIRST].memory_bytes  # of which JAX takes three quarters by itself
    shares = [dataclasses.replace(plenty, device_bytes=int(x * card), device_limit_bytes=card) for x in (0.7, 0.8)]
    assert ["MEM_FRACTION=0.95" in line for p in shares for line in [" ".join(plan_text.verdict(p))]] == [False, True]


@needs_compiler
@pytest.mark.full
def test_packed_rows_have_flash_attention_and_the_plan_says_so(planned):
    """Compiled with the starts of documents. In float32, which the kernel does not take, XLA has the scores."""
    packed = config(**TINY | {"sample_packing": True})
    p = planned(packed)
    text = plan_text.plan_table(p)
    assert p.attention == "mosaic" and "documents in a row: flash attention within each" in text
    assert p.collectives == planned(config(**TINY)).collectives
    packed.model_dtype = "float32"
    assert planner.checked(packed, FIRST).attention == "xla"
    by_xla = plan_text.plan_table(dataclasses.replace(p, attention="xla"))
    assert "documents in a row: attention by XLA, with S x S scores in memory" in by_xla
    assert "documents in a row" not in plan_text.plan_table(planned(config(**TINY)))


@needs_compiler
@pytest.mark.parametrize(
    "changes, said",
    [
        ({"zero_level": 7}, "^zero_level: expected"),
        ({"gpus": 0}, "^gpus: expected the number of GPUs to plan for, got 0"),
        ({"gpus": 4, "dp_replicate_size": 3}, "^dp_replicate_size: expected"),
        ({"recipe": "nvfp4"}, "^recipe: expected .* got 'nvfp4'"),
    ],
)
def test_a_config_that_cannot_be_planned_is_refused_as_it_is_checked(changes, said):
    c = default_config()
    c.update({"gpus": 1} | changes)
    before = c.to_dict()
    with pytest.raises(ConfigError, match=said):
        planner.checked(c, "h100")
    assert c.to_dict() == before


def test_attention_that_the_gpu_does_not_have_is_refused():
    with pytest.raises(ConfigError, match=r"attention: .* got 'cudnn' \(.*head dim.*; use 'xla'"):
        planner.plan(config(**TINY | {"model.head_dim": 256, "attention": "cudnn"}), aot.kind() or FIRST)


@needs_compiler
@pytest.mark.filterwarnings("ignore:.*using XLA's instead")
@pytest.mark.full
def test_automatic_kernels_are_those_that_serve_the_model(monkeypatch):
    """Chosen for the GPU planned for, not for this machine; shapes that no kernel serves are left to XLA."""
    gpu = aot.kind() or FIRST
    with jax.default_device(aot.devices(gpu, 1)[0]):
        assert dispatch.choose("", None) == "mosaic"
    assert dispatch.choose("", None) == "xla"
    seen, compile_for = [], aot.compile_for

    def watched(*args):
        seen.append(compile_for(*args))
        return seen[-1]

    monkeypatch.setattr(aot, "compile_for", watched)
    planner.plan(config(**UNSERVED | {"kernels": "auto"}), gpu)
    assert ["mosaic_gpu" in compiled.text for compiled in seen] == [True]  # none with "xla": test_block_passes


@needs_compiler
@pytest.mark.parametrize(
    "changes, reason",
    [({}, "quantize.*64"), ({"recipe": "bf16", "optimizer": "adamw8bit", "model.hidden_size": 144}, "adamw8bit.*128")],
    ids=["fp8", "adamw8bit"],
)
def test_kernels_that_do_not_serve_the_model_are_refused(changes, reason):
    with pytest.raises(ConfigError, match=rf"^kernels: expected .*, got 'mosaic', .*{reason}.*; use kernels='auto'$"):
        planner.plan(config(**UNSERVED | {"kernels": "mosaic"} | changes), aot.kind() or FIRST)


@needs_compiler
def test_the_command_prints_and_writes_the_plan(tmp_path, capsys, monkeypatch):
    """What it prints is what it writes; for a second kind of GPU a process of its own does the work."""
    file = write_config(tmp_path, **TINY, model_dtype="bfloat16")
    target = tmp_path / "plan.json"
    monkeypatch.setattr(aot, "_kinds", {FIRST})  # as if this process had compiled for another one
    trace = tmp_path / "trace.json"
    argv = [
        "--config",
        file,
        "--gpu",
        "h200",
        "--config.gpus=2",
        "--json",
        str(target),
        "--host-memory=8",
        "--cuda_graphs=small",
    ]
    out = command([*argv, "--trace", str(trace), "--tokens=1e9", "--price=2.5"], capsys)
    found = json.loads(target.read_text())
    check_schema(found)
    assert not found["estimate"] and "ESTIMATE" not in out
    step, (low, high) = found["predicted_step_s"], found["predicted_range_s"]
    assert low < step < high and 0 < found["mfu"] < 1
    assert found["tokens_per_s_per_gpu"] == pytest.approx(64 / step)
    assert f"predicted: {1000 * step:,.1f} ms a step" in out and f"written: {trace}" in out
    hours = 1e9 / 64 / 2 * step / 3600
    assert f"1,000,000,000 tokens: {hours:,.1f} (" in out and f"; {2 * 2.5 * hours:,.2f} (" in out
    assert "not calibrated: no published row of this GPU" in out and f"most of the range: {found['hangs_on']}" in out
    assert found["exposed_s"].keys() >= {"gather", "reduce", "host in", "host out"}
    for label, row in found["exposed_by_loop_s"].items():
        assert f"\n  {label} " in out and all(seconds <= step for seconds in row.values())
    ends = [x["ts"] + x["dur"] for x in json.loads(trace.read_text())["traceEvents"] if x["ph"] == "X"]
    assert max(ends) == pytest.approx(1e6 * step, rel=1e-6)
    assert "2 x NVIDIA H200" in out
    for name in found["classes"]:
        assert f"\n  {name} " in out
    for x in found["collectives"]:
        assert f"{x['op']} over {x['axis']}" in out
    with pytest.raises(RuntimeError, match="one kind of GPU"):
        aot.devices("h200", 1)


@needs_compiler
@pytest.mark.full
def test_an_error_of_another_process_comes_back_as_one():
    with pytest.raises(ConfigError, match="dp_replicate_size"):
        planner.plan_in_subprocess(config(gpus=4, dp_replicate_size=3), "h200")


def test_bad_input_is_refused_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr(planner, "_compiled", lambda *_: pytest.fail("compiled"))
    monkeypatch.setattr(planner, "_estimated", lambda *_: pytest.fail("estimated"))
    file = write_config(tmp_path, **TINY)
    good = ["--config", file, "--gpu", "rtx4090"]
    assert "did you mean rtx4090?" in refused(["--config", file, "--gpu", "rtx4095"])
    line = refused(["--config", file, "--gpu", "banana"])
    assert all(name in line for name in GPUS)
    assert "no GPU given: pass --gpu NAME; known are a10, a100," in refused(["--config", file])
    assert "--config.gpus=4" in refused([*good, "--config.gpus=0"])
    assert "dp_shard_size" in refused([*good, "--config.gpus=4", "--config.dp_shard_size=3"])
    for path, reason in (
        ("missing/plan.json", "No such file"),
        ("", "folder"),
        ("config.py/plan.json", "ot a directory"),
    ):
        assert reason in refused([*good, "--json", f"{tmp_path}/{path}"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.py"]
    assert "no_such" in refused([*good, "--config.no_such=1"])
    assert "--host-memory" in refused([*good, "--host-memory=much"])
    assert "more than 0" in refused([*good, "--host-memory=-1"])
    for option in ("--tokens=0", "--tokens=nan", "--price=-1", "--host-bandwidth=inf"):
        assert option.partition("=")[0] in refused([*good, "--tokens=1", option])
    assert "--tokens 1e9" in refused([*good, "--price=2"])


def test_default_config_is_planned_without_data():
    """Nothing but shapes is needed; the data of the config need not exist."""
    c = default_config()
    c.data, c.tokenizer = "nowhere/*.jsonl", "nowhere.json"
    assert planner.checked(c, "a100").attention == "cudnn"
    c.model_dtype = "float32"
    assert planner.checked(c, "a100").attention == "xla"


def test_a_collective_that_adds_up_is_in_the_lane_of_gradients():
    """An all-to-all sends gradients in 8 bits, and tokens of experts; all others bring weights."""
    adding = {"reduce-scatter", "all-reduce", "all-to-all"}
    assert {op for op, lane in costs.OF_COLLECTIVE.items() if lane == costs.REDUCE} == adding
    assert {op for op, lane in costs.OF_COLLECTIVE.items() if lane == costs.GATHER} == {
        "all-gather",
        "collective-permute",
    }


@pytest.mark.parametrize(
    "changes, chosen",
    [
        ({}, "cudnn"),
        ({"model.sliding_window": 64}, "cudnn"),
        ({"sample_packing": True}, "mosaic"),
        ({"model.attn_logit_softcapping": 20.0}, "mosaic"),
        ({"model.attention_sinks": True}, "mosaic"),
        ({"attention": "xla", "sample_packing": True}, "xla"),
    ],
    ids=lambda x: ",".join(x) if isinstance(x, dict) else x,
)
def test_a_plan_is_of_the_attention_that_a_gpu_chooses(changes, chosen):
    c = default_config()
    c.update_from_flattened_dict({"model_dtype": "bfloat16", "model.head_dim": 64} | changes)
    assert planner._attention(c, GPUS["rtx4090"]) == [chosen]
