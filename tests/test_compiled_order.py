"""Orders that a GPU would not keep or would get wrong, read from steps compiled for one: sums and host slices.

Atomic additions differ from run to run, and a version of XLA once sliced host memory forward in reverse loops (openxla
issue 46231), which gives wrong gradients without an error.
"""

import functools
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import CONFIG, Small, quick_at
from test_deepseek import GEMMA4_E, GEMMA4_EXPERTS, GRANITE_4, GRANITE_4_EXPERTS, MISTRAL4, NEMOTRON, WITH_EXPERTS
from test_lfm2 import WITH_EXPERTS as LFM2_EXPERTS
from test_plan import ALL, compiled_step, config, needs_compiler
from test_qwen3_5 import HYBRID as QWEN3_5, WITH_EXPERTS as QWEN3_NEXT

from surojax.assembly.xla_options import MEMORY_LIMIT, NO_GRAPHS, compiler_options
from surojax.models.decoder_config import DecoderConfig
from surojax.models.model import DEFAULT, Compute
from surojax.numerics import ordered_sums
from surojax.placement import cuda_plugin
from surojax.placement.layout import batch_sharding
from surojax.planner import aot, costs, footprint, hlo, run_plan as planner, traffic
from surojax.planner.candidate import RESERVE
from surojax.planner.gpus import GPUS
from surojax.step import outer
from surojax.step.state_plan import bytes_per_device
from surojax.training import run_programs

# -- Sums of rows ----------------------------------------------------------------------------------------------------


def sum_in_float64(table, rows, values) -> np.ndarray:
    result = np.array(table, np.float64)
    for row, value in zip(np.array(rows), np.array(values, np.float64), strict=True):
        if 0 <= row < len(result):
            result[row] += value
    return result


@pytest.mark.parametrize("piece_bytes", [1 << 20, 1])
@pytest.mark.parametrize("of_values", ["float32", "bfloat16"])
@pytest.mark.parametrize("add", [ordered_sums.add_rows, ordered_sums._add_sorted], ids=["here", "on a GPU"])
def test_rows_are_added_in_float32_and_rounded_once(monkeypatch, add, of_values, piece_bytes):
    """Rows that occur up to hundreds of times, once, never, and outside of the table."""
    monkeypatch.setattr(ordered_sums, "PIECE_BYTES", piece_bytes)
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.standard_normal((40, 64)), jnp.float32)
    rows = np.concatenate([rng.integers(-5, 50, 200), np.full(300, 7), [39, 0]]).astype(np.int32)
    rng.shuffle(rows)
    values = jnp.asarray(rng.standard_normal((len(rows), 64)), of_values)
    expected = sum_in_float64(table, rows, values)
    found = jax.jit(add)(table, rows, values)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    rounded = jax.jit(add)(table.astype(jnp.bfloat16), rows, values)
    expected = sum_in_float64(table.astype(jnp.bfloat16), rows, values)
    assert rounded.dtype == jnp.bfloat16
    np.testing.assert_allclose(rounded, expected, rtol=2**-8, atol=1e-5)  # of one rounding: hundreds would be 2**-4


def test_one_row_and_none_that_is_in_the_table():
    for rows in ([2], [5], [-1]):
        args = jnp.ones((4, 3)), jnp.asarray(rows, jnp.int32), jnp.ones((1, 3))
        np.testing.assert_array_equal(jax.jit(ordered_sums._add_sorted)(*args), sum_in_float64(*args))


# -- Scatters --------------------------------------------------------------------------------------------------------

EXPERTS = {"model.num_experts": 8, "model.num_experts_per_tok": 2, "model.moe_intermediate_size": 128}
PAIRS = {"objective": "dpo", "per_device_batch_size": 2, "sample_packing": True}
EXACT = {"xla_options": "exact"}  # resident and offloaded, the two steps that `pytest` compiles
STEPS = [
    (1, EXACT),
    (1, EXACT | PAIRS),
    (1, PAIRS),
    (2, EXPERTS | {"ep_size": 2}),
    (1, EXPERTS),
    (1, {"objective": "distill"}),
    (1, {"objective": "grpo", "sample_packing": True}),
    (1, PAIRS | {"objective": "orpo"}),
    (2, {"tp_size": 2}),
    (2, {"zero_level": 3, "shard_outer": True}),
    (2, EXPERTS | {"ep_size": 2, "lora": True}),
    (2, {"pp_size": 2, "gradient_accumulation_steps": 2}),
]


# XLA's option of "exact" would sort what a scatter without `unique_indices` writes, so that none would be left to see.
AS_WRITTEN = {"xla_gpu_exclude_nondeterministic_ops": False}


@functools.cache
def text_of(place: str, number: int) -> str:
    """The compiled text of a step of STEPS or PLACED."""
    gpus, changes = {"resident": STEPS, "offloaded": PLACED}[place][number]
    return compiled_step(gpus, AS_WRITTEN, **changes)


def unordered_scatters(text: str) -> list[str]:
    """The operations of a compiled step that may write one place several times."""
    lines = [line for line in text.splitlines() if re.search(r" (select-and-)?scatter\(", line)]
    assert lines, "the gradient of the embedding is a scatter"
    return [line.strip() for line in lines if "unique_indices=true" not in line]


def dumped(folder: Path) -> dict:
    """XLA options with which the PTX of each kernel is written into a folder."""
    return {"xla_dump_to": str(folder), "xla_gpu_dump_llvmir": True, "xla_dump_emitter_re": ".*"}


def atomics(folder: Path) -> list[str]:
    """The atomic instructions of the kernels whose PTX XLA wrote into a folder."""
    files = list(folder.glob("*.ptx"))
    assert len(files) > 5, "kernels"
    return [
        line.strip() for file in files for line in file.read_text().splitlines() if re.search(r"\b(atom|red)\.", line)
    ]


@needs_compiler
@pytest.mark.parametrize("number", quick_at([(number,) for number in range(len(STEPS))], 0))
def test_no_place_is_written_twice_by_a_scatter(number):
    """A place that is written several times is atomic operations on a GPU, in the order in which blocks run."""
    assert not unordered_scatters(text_of("resident", number))


@needs_compiler
@pytest.mark.full
def test_exact_excludes_nothing_that_a_step_has():
    """With XLA's option, which would sort scatters that may write a place twice, a step is the same program."""
    gpus, changes = STEPS[0]
    assert changes["xla_options"] == "exact"
    assert instructions(compiled_step(gpus, **changes)) == instructions(text_of("resident", 0))


def lowered_scatters(config: DecoderConfig, devices: int = 1, compute: Compute = DEFAULT, **placed) -> list[str]:
    """The attributes of the scatters of a step lowered for a GPU, which needs no compiler for GPUs."""
    small = Small(devices, config=config, compute=compute, **placed)
    batch = small.engine.planned_batch((2, 2 * devices, 16), batch_sharding(small.mesh))
    text = small.step.trace(small.plan, *batch).lower(lowering_platforms=("cuda",)).as_text()
    found = re.findall(r'"stablehlo\.(?:select_and_)?scatter"\([^)]*\) <\{(.*?)\}>', text)
    assert found, "the gradient of the embedding is a scatter"
    return found


@pytest.mark.parametrize(
    "config, devices, compute, placed",
    quick_at(
        [
            (MISTRAL4, 1, DEFAULT, {}),
            (NEMOTRON, 1, DEFAULT, {}),
            (QWEN3_5, 1, DEFAULT, {"packed": True}),
            (QWEN3_NEXT, 1, DEFAULT, {}),
            (LFM2_EXPERTS, 1, DEFAULT, {}),
            (GRANITE_4_EXPERTS, 1, DEFAULT, {}),
            (GRANITE_4, 2, DEFAULT, {"cp_size": 2}),
            (WITH_EXPERTS, 1, DEFAULT, {}),  # DeepSeek-V3
            (WITH_EXPERTS, 1, Compute(sequence_chunks=2), {}),
            (GEMMA4_E, 1, DEFAULT, {}),
            (GEMMA4_EXPERTS, 1, DEFAULT, {}),
        ],
        0,
        1,
    ),
)
def test_no_family_writes_a_place_twice(config, devices, compute, placed):
    """Of every kind of mixer and of MLP."""
    scatters = lowered_scatters(config, devices, compute, **placed)
    assert all("unique_indices = true" in attributes for attributes in scatters)


def test_a_scatter_that_may_write_a_place_twice_is_noticed(monkeypatch):
    """The mutant of `outer` whose compiled form is below, as lowered text."""
    monkeypatch.setattr(outer, "add_rows", lambda table, rows, values: table.at[rows].add(values))
    assert any("unique_indices = false" in attributes for attributes in lowered_scatters(CONFIG))


def instructions(text: str) -> list[str]:
    """The instructions of a compiled program, without the lines of Python that they come from."""
    return [re.sub(r", metadata=\{[^}]*\}", "", line) for line in text.splitlines() if " = " in line]


@needs_compiler
@pytest.mark.full
@pytest.mark.parametrize("gpus, changes", STEPS)
def test_no_kernel_has_an_atomic_instruction(tmp_path, gpus, changes):
    """Of those that XLA makes of a step: their PTX."""
    compiled_step(gpus, dumped(tmp_path), **changes)
    assert not atomics(tmp_path)


@needs_compiler
@pytest.mark.full
def test_rows_that_are_added_one_by_one_are_noticed(tmp_path, monkeypatch):
    """As a scatter that may write a place twice, and as the atomic instruction that it becomes."""
    monkeypatch.setattr(outer, "add_rows", lambda table, rows, values: table.at[rows].add(values))
    text = compiled_step(1, dumped(tmp_path))
    assert unordered_scatters(text)
    assert atomics(tmp_path)


# -- Host slices in loops --------------------------------------------------------------------------------------------


class HostSlice(NamedTuple):
    """A slice of an array in host memory, in a loop. stride: bytes from one round of the loop to the next."""

    scope: str
    stride: int
    layer_bytes: int
    of_layers: bool


def host_slices(text: str) -> list[HostSlice]:
    """The slices and updates of host memory whose offset XLA found linear in the counter of their loop."""
    slices = []
    for computation in hlo.parse_module(text).values():
        for i in computation.values():
            linear = re.search(r'"linear":\{"byte_offset":"-?\d+","byte_stride":"(-?\d+)"', i.attributes)
            if not linear or i.opcode not in ("dynamic-slice", "dynamic-update-slice"):
                continue
            stack, part = (computation[i.operands[0]].shape, i.shape)
            if i.opcode == "dynamic-update-slice":
                part = computation[i.operands[1]].shape
            whole, sliced = (re.search(r"\[([\d,]*)\]", shape)[1].split(",") for shape in (stack, part))
            if "S(5)" in stack:
                scope = re.search(r'op_name="([^"]*)"', i.attributes)[1]
                of_layers = sliced[1:] == whole[1:]
                slices.append(HostSlice(scope, int(linear[1]), hlo.arrays(part)[0].bytes, of_layers))
    return slices


PLACED = [
    (1, EXACT | ALL),
    (1, EXACT | PAIRS | ALL),
    (1, ALL),
    (2, ALL | {"zero_level": 3, "shard_outer": True}),
    (1, ALL | {"overlap_update": True}),
    (1, ALL | {"recompute_block": False, "microbatches_per_fetch": 2}),
    (1, ALL | EXPERTS),
]


@needs_compiler
@pytest.mark.parametrize("number", quick_at([(number,) for number in range(len(PLACED))], 0))
def test_reverse_loops_slice_host_memory_backward(number):
    """By whole layers: those of the backward pass from the last one to the first, those of other loops ascending."""
    slices = host_slices(text_of("offloaded", number))
    backward = [s for s in slices if "/backward/while" in s.scope]
    others = [s for s in slices if "/backward/while" not in s.scope]
    assert len(backward) > 5 < len(others)
    assert all(s.stride < 0 for s in backward), [s for s in backward if s.stride >= 0]
    assert all(s.stride > 0 for s in others), [s for s in others if s.stride <= 0]
    assert all(s.of_layers and s.stride % s.layer_bytes == 0 for s in slices)


def test_a_turned_slice_is_noticed():
    """On the text of a compiled step in which one stride of the backward pass has the other sign."""
    line = (
        '  ROOT %s = bf16[1,8]{1,0} dynamic-slice(%p, %i, %z), metadata={op_name="jit(f)/backward/while/body/x"}, '
        'backend_config={"dynamic_slice_config":{"linear":{"byte_offset":"64","byte_stride":"-16"}}}'
    )
    text = f"%f (p: bf16[5,8]) -> bf16[1,8] {{\n  %p = bf16[5,8]{{1,0:S(5)}} parameter(0)\n{line}\n}}"
    assert host_slices(text) == [HostSlice("jit(f)/backward/while/body/x", -16, 16, True)]
    assert host_slices(text.replace('"-16"', '"16"'))[0].stride == 16


# -- Options of XLA --------------------------------------------------------------------------------------------------


FASTER_TO_COMPILE = {  # what `plan` alone asks for: how much kernels are optimised, and whether products are timed
    "xla_backend_optimization_level",
    "xla_gpu_disable_gpuasm_optimizations",
    "xla_gpu_autotune_level",
}


class Enough(Exception):
    """Raised when a step is compiled."""


def options_of_plan(monkeypatch, c, gpu, needed: int) -> list[dict]:
    """The options that `plan` hands to XLA for a step, each time it compiles it. needed: bytes of the compiled step."""
    handed: list[dict] = []

    def compile_for(function, arguments, mesh, options):
        handed.append(aot.XLA_OPTIONS | options)
        return SimpleNamespace(device_bytes=needed, text="")

    def parse_module(text):
        raise Enough

    monkeypatch.setattr(aot, "compile_for", compile_for)
    monkeypatch.setattr(planner.hlo, "parse_module", parse_module)
    run = footprint.assembly(c)
    with pytest.raises(Enough):
        planner._compiled(c, gpu, run, run.mesh, traffic.batch_of(c), None, None)
    return handed


def options_of_train(monkeypatch, c, gpu, needed: int) -> list[dict]:
    """The options that `train` hands to XLA for a step on a GPU, each time."""
    handed: list[dict] = []
    sizes = {f"{name}_size_in_bytes": 0 for name in ("argument", "output", "alias")}
    memory = SimpleNamespace(temp_size_in_bytes=needed, **sizes)
    compiled = SimpleNamespace(memory_analysis=lambda: memory)
    lowered = SimpleNamespace(compile=lambda options: handed.append(options) or compiled)
    monkeypatch.setattr(run_programs, "memory_limit", lambda device: gpu.pool_bytes)
    monkeypatch.setattr(run_programs, "own_device", lambda devices: devices[0])
    run_programs.compile_step(c, footprint.assembly(c), [SimpleNamespace(platform="gpu")], lowered)
    return handed


@pytest.mark.parametrize("place", [{}, ALL], ids=["resident", "offloaded"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"xla_options": "exact"},
        {"xla_options": "default", "cuda_graphs": "small"},
        {"recipe": "fp8_hybrid", "gpus": 2, "zero_level": 3},
    ],
    ids=["overlap", "exact", "default", "fp8"],
)
def test_plan_and_train_compile_the_same_program(monkeypatch, tmp_path, changes, place):
    """Both hand the same options to XLA, for as much memory, but for those that change no program."""
    c, gpu = config(**{"gpus": 1} | changes | place), GPUS["h200"]
    c.data_cache = str(tmp_path)
    (planned,), (trained,) = (options(monkeypatch, c, gpu, 0) for options in (options_of_plan, options_of_train))
    assert trained["xla_gpu_enable_triton_gemm"] is False
    assert (MEMORY_LIMIT in trained) == (c.xla_options != "default")
    assert trained.pop("xla_gpu_per_fusion_autotune_cache_dir") == str(tmp_path / "kernels")
    assert planned.items() >= trained.items()
    assert planned.keys() - trained.keys() <= FASTER_TO_COMPILE
    described = re.search(r"device_memory_size: (\d+)", aot.target_config(gpu))
    assert described and int(0.8 * int(described[1])) == pytest.approx(gpu.pool_bytes, abs=1)


@pytest.mark.parametrize("needed, shares", [(-0.1, [1.0]), (0.0, [1.0]), (0.1, [1.0, 0.95]), (2.0, [1.0])])
def test_a_step_that_just_does_not_fit_is_compiled_for_less_memory(monkeypatch, tmp_path, needed, shares):
    """needed: GiB more than a step may need. Both compile as often, and hand XLA the same limits."""
    c, gpu = config(gpus=4, zero_level=3, data_cache=str(tmp_path)), GPUS["rtx4090"]
    size = gpu.pool_bytes - RESERVE + int(needed * 2**30)
    state = bytes_per_device(footprint.assembly(c).plan)
    limits = [math.ceil(100 * (x * gpu.pool_bytes - state) / (gpu.pool_bytes - state)) for x in shares]
    for options in (options_of_plan, options_of_train):
        assert [handed[MEMORY_LIMIT] for handed in options(monkeypatch, c, gpu, size)] == limits


@pytest.mark.parametrize("xla_options", ["overlap", "exact", "default"])
def test_cuda_graphs_are_one_setting(xla_options):
    """ "auto": none beside copies, with XLA's own options XLA's own. Any other value holds with all options."""
    chosen = {}
    for graphs in ("auto", "none", "small", "concurrent"):
        for offloads in ({}, {"offload_grads": True}):
            run = footprint.assembly(config(gpus=1, xla_options=xla_options, cuda_graphs=graphs, **offloads))
            options = compiler_options(run, "gpu")
            named = {name: value for name, value in options.items() if "command_buffer" in name}
            assert chosen.setdefault((graphs, len(offloads) if graphs == "auto" else 0), named) == named
    assert chosen["auto", 0] == {} and chosen["none", 0] == NO_GRAPHS
    assert chosen["auto", 1] == ({} if xla_options == "default" else NO_GRAPHS)
    assert "WHILE" not in chosen["small", 0]["xla_gpu_enable_command_buffer"]
    assert "DYNAMIC_SLICE" not in chosen["small", 0]["xla_gpu_enable_command_buffer"]
    assert chosen["concurrent", 0]["xla_gpu_command_buffer_scheduling_mode"] == "CONCURRENT"


def products(text: str) -> set[tuple[str, ...]]:
    """The matrix products of a compiled step: shapes of result and workspace, dimensions, kernel of cuBLASLt."""
    kinds = set()
    for shapes, rest in re.findall(r'= (.*) custom-call\(.*?custom_call_target="__cublas\$lt\$matmul"(.*)', text):
        dimensions = re.search(r'"dot_dimension_numbers":({[^}]*})', rest)[1]
        kernel = re.search(r'"selected_algorithm":"(\d+)"', rest)
        kinds.add((re.sub(r"{[^}]*}", "", shapes), dimensions, kernel[1] if kernel else "by a heuristic"))
    return kinds


@needs_compiler
@pytest.mark.full
@pytest.mark.parametrize("recipe", ["fp8_hybrid", "fp8_current"])
def test_few_products_of_fp8_are_to_be_timed(recipe):
    """Each distinct product by cuBLASLt is timed once on a GPU; XLA's own would be with hundreds of tiles."""
    module = hlo.parse_module(compiled_step(1, recipe=recipe))
    kinds = set()
    for computation in module.values():
        for i in computation.values():
            assert i.opcode != "dot" and "triton_gemm" not in i.attributes, i.name
            if i.opcode == "custom-call" and "__cublas" in i.attributes:
                target = re.search(r'custom_call_target="([^"]*)"', i.attributes)[1]
                dtypes = [computation[name].shape.split("[")[0] for name in i.operands[:2]]
                kinds.add((target, *dtypes, costs.product_sizes(i, computation), i.shape.split("{")[0]))
    assert sum("f8" in kind[1] for kind in kinds) > 4
    assert len(kinds) <= 12, kinds


@needs_compiler
@pytest.mark.parametrize("number", quick_at([(0,), (1,)], 0))
def test_an_offload_changes_no_product_with_exact(number):
    """Each product of a resident step is one of the offloaded step: as many workspace bytes, the same algorithm."""
    resident, offloaded = (products(text_of(place, number)) for place in ("resident", "offloaded"))
    assert len(resident) > 5
    assert resident <= offloaded


def test_slow_copies_are_said_with_the_remedy(monkeypatch):
    """By the version of the CUDA plugin, which need not be jaxlib's."""
    monkeypatch.setattr(cuda_plugin, "plugin_version", lambda: (0, 11, 2))
    assert re.match(r"offloads: the CUDA plugin 0\.11\.2 copies .*pip install -U", cuda_plugin.copies_slowly())
    run = footprint.assembly(config(gpus=1))
    assert compiler_options(run, "gpu")["xla_gpu_enable_dynamic_slice_fusion"] is False
    monkeypatch.setattr(cuda_plugin, "plugin_version", lambda: (0, 12))
    assert cuda_plugin.copies_slowly() == ""
    assert "xla_gpu_enable_dynamic_slice_fusion" not in compiler_options(run, "gpu")
