"""benchmarks/performance.py without its compilations, and what makes compiled steps as fast as it says."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import jax
import performance

from surojax.assembly import xla_options
from surojax.assembly.from_config import from_config
from surojax.assembly.xla_options import compiler_options
from surojax.config import checks
from surojax.placement import cuda_plugin
from surojax.placement.mesh import make_mesh
from surojax.planner import aot, costs, hlo, run_plan as planner, traffic
from surojax.planner.gpus import GPUS

GPU = "rtx4090"  # the kind that the test processes compile for: test_plan.py
TINY = (
    "model.hidden_size=256 model.intermediate_size=512 model.num_hidden_layers=5 model.num_attention_heads=4"
    " model.num_key_value_heads=4 model.vocab_size=512 sequence_len=64 lmhead_chunks=1"
)
needs_compiler = pytest.mark.skipif(not aot.available(), reason="needs the compiler for GPUs: surojax[plan]")


def row(before: float, goal: float, measure: performance.Measure = performance.TIME) -> performance.Row:
    return performance.Row("a row", GPU, measure, before, goal, TINY)


@pytest.mark.parametrize(
    "before, now, goal, measure, code, reached",
    [
        (5, 5, 6, performance.TIME, 0, "yes"),
        (5, 7, 6, performance.TIME, 1, "no"),  # lost
        (8, 7, 6, performance.TIME, 0, "no"),  # not yet reached
        (8, 6, 6, performance.TIME, 0, "yes"),
        (7, 5, 6, performance.SPEED, 1, "no"),
        (5, 7, 6, performance.SPEED, 0, "yes"),
    ],
)
def test_a_goal_that_is_lost_fails(monkeypatch, capsys, before, now, goal, measure, code, reached):
    monkeypatch.setattr(performance, "ROWS", (row(before, goal, measure),))
    monkeypatch.setattr(performance.Row, "figure", lambda self, settings: float(now))
    assert performance.main([]) == code
    (line,) = (x for x in capsys.readouterr().out.splitlines() if x.startswith("| a row |"))
    assert line.startswith(f"| a row | {before} | {now} {measure.unit} | {goal} | {reached} | `--gpu {GPU} --config ")
    assert performance.main(["--only", "another"]) == 0


def test_measured_steps_have_the_errors_of_their_predictions(monkeypatch, capsys):
    """By each version of XLA; the columns of the other one are those of a process with its folder."""
    step = row(0, 0)
    monkeypatch.setattr(performance, "ROWS", (row(5, 6),))
    monkeypatch.setattr(performance, "MEASURED", ((step, 50),))
    monkeypatch.setattr(performance.Row, "figure", lambda self, settings: 49.0)
    assert performance.main(["--figure", step.name]) == 0
    assert capsys.readouterr().out == "49.0\n"
    printed = lambda self, arguments: "0.11.2\n" if "-c" in arguments else "55.0\n"
    monkeypatch.setattr(performance.Compilers, "elsewhere", printed)
    performance.main(["--also", "older"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert (
        lines[2].startswith(f"| a row | 5 | 49 ms | 55 | 6 | no | `--gpu {GPU}") and " by 0.11.2 | goal |" in lines[0]
    )
    assert lines[-1] == "| a row | 50 | 49 | -2.0 % | 55 | +10.0 % |"
    assert len({line.count("|") for line in lines[:3]}) == len({line.count("|") for line in lines[3:]}) == 1


def test_steps_are_compiled_as_those_that_were_measured(monkeypatch, capsys):
    """With XLA's own products, here and by the other version; a step that was not measured has no error."""
    for options in (aot.XLA_OPTIONS, xla_options.PRODUCTS, xla_options.UNFUSED_SLICES):
        for name in options:
            monkeypatch.setitem(options, name, options[name])
    monkeypatch.setattr(performance, "ROWS", ())
    monkeypatch.setattr(performance, "MEASURED", ((row(0, 0), None),))
    monkeypatch.setattr(performance.Row, "figure", lambda self, settings: 49.0)
    asked = []
    monkeypatch.setattr(performance.Compilers, "elsewhere", lambda self, arguments: asked.append(arguments) or "55.0")
    monkeypatch.setattr(cuda_plugin, "plugin_version", lambda: (0, 11, 2))
    performance.main(["--also", "older", "--triton"])
    assert capsys.readouterr().out.splitlines()[-1] == "| a row | - | 49 | - | 55 | - |" and asked[-1][-1] == "--triton"
    options = aot.XLA_OPTIONS | compiler_options(
        from_config(row(0, 0).loaded(TINY), make_mesh(jax.devices()[:1]), 1), "gpu"
    )
    assert options["xla_gpu_enable_triton_gemm"] is True
    assert "xla_gpu_enable_dynamic_slice_fusion" not in options


def test_ratios_are_to_the_other_step(monkeypatch):
    figures = {"with": 30.0, "without": 20.0}
    monkeypatch.setattr(performance.Row, "figure", lambda self, settings: figures[settings])
    assert performance.Row("", GPU, performance.RATIO, 0, 0, "with", base="without").now() == 1.5


def test_all_rows_are_steps_that_train_accepts():
    """Their settings are in the config, and the rows of LLMQ have its tokens in a step."""
    for of in performance.ROWS:
        for settings in filter(None, (of.settings, of.base)):
            c = of.loaded(settings)
            checks.check(c)
            tokens = c.gpus * c.per_device_batch_size * c.gradient_accumulation_steps * c.sequence_len
            assert not of.name.startswith("LLMQ") or tokens == 524_288


def compiled_step(settings: str, rows: int = 1) -> hlo.Module:
    """The compiled step of a model with five layers and so many sequences in a microbatch, which is parsed."""
    c = planner.checked(row(0, 0).loaded(f"{TINY} {settings}"), GPU)
    mesh = make_mesh(aot.devices(GPU, 1))
    run = from_config(c, mesh.abstract_mesh, total_steps=10)
    (program,) = planner.programs(run, mesh, traffic.BatchShape(rows, 64, c.gradient_accumulation_steps))
    return hlo.parse_module(
        aot.compile_for(program.function, program.arguments, mesh, compiler_options(run, "gpu")).text
    )


@needs_compiler
@pytest.mark.full
def test_nothing_holds_the_link_up_in_an_update_from_host_memory():
    """A loop's body has two layers, each with its own memory: no device copy, and as many bytes in as out."""
    steps = costs.ProgramOnGpu(compiled_step(performance.FIVE), GPUS[GPU], {}).steps()
    updates = [step for step in steps if isinstance(step, costs.Loop) and step.label == "update"]
    assert len(updates) == 9 and {loop.trips for loop in updates} == {2}  # seven matrices, two vectors
    for loop in updates:
        works = [step for step in loop.body if isinstance(step, costs.Work)]
        way_in, way_out = (sum(x.bytes for x in works if x.kind == kind) for kind in (costs.HOST_IN, costs.HOST_OUT))
        assert way_in == pytest.approx(way_out, rel=0.01)
        assert not [x for x in works if x.kind == costs.DEVICE_COPY]


@needs_compiler
@pytest.mark.full
def test_products_add_to_accumulators_in_place():
    """A matrix product's result is the stack of accumulators; nothing else writes into it."""
    module = compiled_step("gradient_accumulation_steps=3")
    stack = "bf16[5,256,512]"  # of w_down; XLA merges the products of the other matrices, which are this small
    writers = []
    for i, *_ in hlo.executed(module):
        inside = {x.opcode for name in hlo.called(i, "calls") for x in module[name].values()}
        if i.shape.lstrip("(").startswith(stack) and "dynamic-update-slice" in inside:
            writers.append(inside)
    assert len(writers) == 1 and "custom-call" in writers[0]


@needs_compiler
@pytest.mark.full
@pytest.mark.parametrize("settings, in_place", [("", 1), (" xla_options=exact", 0)])
def test_products_write_saved_activations_in_place(settings, in_place):
    """The residual stream behind the attention; XLA merges the products of gate and up, which are this small."""
    module = compiled_step("gradient_accumulation_steps=2 recompute_block=False" + settings)
    writers = 0
    for i, *_ in hlo.executed(module):
        inside = {x.opcode for name in hlo.called(i, "calls") for x in module[name].values()}
        is_stack = i.shape.lstrip("(").startswith("bf16[5,1,64,256]")
        writers += is_stack and inside >= {"dynamic-update-slice", "custom-call"}
    assert writers == in_place


@needs_compiler
@pytest.mark.full
def test_dpo_with_adapters_moves_no_byte_more_than_cross_entropy():
    """Between host and device in a compiled step: weights, residuals, optimizer state; the layer is fetched once."""
    placed = (
        "lora=True offload_weights=True offload_residual=True offload_optimizer=True per_device_batch_size=2"
        " gradient_accumulation_steps=2 data=rows.jsonl"
    )
    steps = (compiled_step(f"{placed} objective={name}", rows=2) for name in ("cross_entropy", "dpo"))
    moved, of_dpo = (hlo.host_copies(((step, 1),)) for step in steps)
    assert of_dpo == moved and moved["h2d_bytes"] > 0 and moved["d2h_bytes"] > 0
