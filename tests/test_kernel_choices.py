"""Kernels that XLA chose by timing: one folder for all programs of a run, beside its checkpoints, and taken from there.

Nothing is timed here: files stand for what XLA writes on a GPU. It takes a choice from one without a GPU, too.
"""

import importlib
import os
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import CONFIG
from test_plan import FIRST, needs_compiler

from surojax.assembly.assemble import Assembly
from surojax.assembly.from_config import from_config
from surojax.config.fields import default_config
from surojax.placement import cuda_plugin
from surojax.placement.layout import batch_sharding
from surojax.placement.mesh import make_mesh
from surojax.planner import aot
from surojax.training import evaluation, kernel_choices, program_options, reference

distill = importlib.import_module("surojax.distill")  # `surojax.distill` is the function


class Enough(Exception):
    """Raised where a program would be compiled."""


def config(folder: Path):
    c = default_config()
    c.model.vocab_size, c.model.hidden_size, c.model.intermediate_size = CONFIG.vocab_size, 32, 64
    c.model.num_hidden_layers, c.model.num_attention_heads, c.model.num_key_value_heads = 2, 2, 1
    c.data_cache, c.sequence_len, c.gpus = str(folder / "cache"), 16, 1
    return c


def evaluates(c, run, mesh):
    evaluation.Evaluation(c, run, mesh, [])


def refers(c, run, mesh):
    made = reference._Reference.__new__(reference._Reference)
    made.c, made.run, made.batch_size, made.sharding = c, run, 8, batch_sharding(mesh, accumulated=False)
    return made._program


def labels(c, run, mesh):
    distill._Labeller(c, run, mesh, 8, ())


@pytest.mark.parametrize("compiles", [evaluates, refers, labels])
def test_every_program_of_a_run_keeps_its_choices(monkeypatch, tmp_path, compiles):
    """As its step does, for which tests/test_compiled_order.py has it."""
    handed = []

    def compile_with(options):
        handed.append(options)
        raise Enough

    lowered = SimpleNamespace(compile=compile_with)
    monkeypatch.setattr(Assembly, "eval_step", lambda self: SimpleNamespace(lower=lambda *arguments: lowered))
    monkeypatch.setattr(program_options, "kept_choices", lambda c, platform: {"kept on": platform})
    c, mesh = config(tmp_path), make_mesh(jax.devices()[:1])
    with pytest.raises(Enough):
        compiles(c, from_config(c, mesh, total_steps=1), mesh)
    assert handed == [{"kept on": "cpu"}]


def test_the_option_of_xla_is_a_folder_of_the_machine(tmp_path):
    """None where it cannot be written, and none on a CPU."""
    c, folder = config(tmp_path), tmp_path / "cache" / "kernels"
    assert kernel_choices.kept_choices(c, "cpu") == {} and not folder.exists()
    assert kernel_choices.kept_choices(c, "gpu") == {"xla_gpu_per_fusion_autotune_cache_dir": str(folder)}
    assert folder.is_dir()
    c.data_cache = str(tmp_path / "file")
    Path(c.data_cache).write_text("")
    assert kernel_choices.kept_choices(c, "gpu") == {}


def test_a_run_elsewhere_takes_the_choices_that_it_had(tmp_path, capsys):
    """In place of those of the other machine, whose other choices stay; what is stored beside a run never changes."""
    here, there, run = config(tmp_path / "here"), config(tmp_path / "there"), tmp_path / "run"
    machine, other = (Path(c.data_cache) / "kernels" for c in (here, there))
    stored = run / "kernels"
    files = {"H200/1.pb": b"tile 3", "H200/2.pb": b"tile 4", "3.textproto": b"gemm { algorithm: 5 }"}
    for name, content in files.items():
        (machine / name).parent.mkdir(parents=True, exist_ok=True)
        (machine / name).write_bytes(content)
    (machine / "tmp").mkdir()
    for name in ("tmp/4.textproto", "H200/.tmp_5"):  # what XLA is writing
        (machine / name).write_bytes(b"half")
    (machine / "6.pb").symlink_to("/dev/zero")
    (machine / "7.pb").write_bytes(bytes(kernel_choices.LARGEST + 1))
    contents = lambda folder: {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}

    kernel_choices.store_choices(here, run, "cpu")
    assert not run.exists()
    kernel_choices.store_choices(here, run, "gpu")
    assert contents(stored) == files and capsys.readouterr().out == ""

    (other / "H200").mkdir(parents=True)
    (other / "H200/1.pb").write_bytes(b"tile 9")
    (other / "8.pb").write_bytes(b"its own")
    kernel_choices.take_choices(there, None, run, "cpu")
    assert contents(other) == {"H200/1.pb": b"tile 9", "8.pb": b"its own"}
    checkpoint = run / "checkpoints" / "12"
    kernel_choices.take_choices(there, checkpoint, tmp_path / "new", "gpu")
    assert contents(other) == files | {"8.pb": b"its own"}
    assert capsys.readouterr().out == f"kernels: 3 that XLA had chosen in {run} are taken from there\n"
    kernel_choices.take_choices(there, None, run, "gpu")  # by then they are the same
    assert capsys.readouterr().out == ""

    (machine / "H200/1.pb").write_bytes(b"tile 7")
    kernel_choices.store_choices(here, run, "gpu")
    assert contents(stored) == files


def test_the_newest_choices_are_stored(monkeypatch, tmp_path):
    c, run = config(tmp_path), tmp_path / "run"
    folder = Path(c.data_cache) / "kernels"
    folder.mkdir(parents=True)
    for number in range(4):
        (folder / f"{number}.pb").write_bytes(b"x")
        os.utime(folder / f"{number}.pb", (1000 + number, 1000 + number))
    monkeypatch.setattr(kernel_choices, "MOST", 2)
    kernel_choices.store_choices(c, run, "gpu")
    assert {file.name for file in (run / "kernels").iterdir()} == {"2.pb", "3.pb"}


def test_a_folder_that_cannot_be_written_ends_no_run(tmp_path, capsys):
    c, run = config(tmp_path), tmp_path / "run"
    run.write_text("a file")
    folder = Path(c.data_cache) / "kernels"
    folder.mkdir(parents=True)
    (folder / "1.pb").write_bytes(b"x")
    kernel_choices.store_choices(c, run, "gpu")
    assert capsys.readouterr().out.startswith(f"note: the kernels that XLA chose cannot be stored in {run} (")


# -- What XLA takes ----------------------------------------------------------------------------------------------------

# Its name of a product of two bfloat16 matrices of 512 x 512 on the GPU of `aot.target_config(GPUS["rtx4090"])`, which
# has cuBLAS 12.8.0, in 0.11.2 and 0.12.0.1: fingerprints of both.
CHOICE = ("6a87e3ea572a168f", "d80b47d62ce74d55b989876f33adf416")
NAMED_SO = ((0, 11, 2), (0, 12, 0, 1))


def field(number: int, value: bytes | int) -> bytes:
    """A field of a protocol buffer, with a number or less than 128 bytes."""
    wire, content = (0, value) if isinstance(value, int) else (2, value)
    return bytes([number << 3 | wire]) + (
        bytes([content]) if isinstance(content, int) else bytes([len(content)]) + content
    )


def choice(version: str, algorithm: int) -> bytes:
    """XLA's AutotuneEntry: {key {target {device, hlo}}, value {config {backend, config {gemm}}, version}}."""
    device, operation = (text.encode() for text in CHOICE)
    target = field(1, device) + field(3, operation)
    by_cublaslt = field(1, 4) + field(2, field(1, field(1, algorithm)))
    return field(1, field(1, target)) + field(2, field(1, by_cublaslt) + field(2, version.encode()))


@needs_compiler
@pytest.mark.skipif(cuda_plugin.plugin_version() not in NAMED_SO, reason="XLA may name its choices otherwise")
def test_xla_takes_a_choice_that_came_with_a_run(tmp_path):
    """Algorithm 5 of cuBLASLt, from a file that a run elsewhere stored; its default if the file is of another cuBLAS.

    In this order: what XLA has taken once it keeps in memory.
    """
    axis = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.Mesh(np.array(aot.devices(FIRST, 1)), ("one",), axis_types=axis)
    sharding = jax.NamedSharding(mesh.abstract_mesh, jax.P())
    matrix = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16, sharding=sharding)
    for version, algorithm in (("12.9.0", "0"), ("12.8.0", "5")):
        here, there, run = (
            config(tmp_path / version),
            config(tmp_path / f"{version}, there"),
            tmp_path / version / "run",
        )
        file = Path(here.data_cache, "kernels", CHOICE[0], f"{CHOICE[1]}.pb")
        file.parent.mkdir(parents=True)
        file.write_bytes(choice(version, 5))
        kernel_choices.store_choices(here, run, "gpu")
        kernel_choices.take_choices(there, None, run, "gpu")
        options = kernel_choices.kept_choices(there, "gpu") | {"xla_gpu_autotune_level": 4}
        text = aot.compile_for(jax.jit(jnp.matmul), (matrix, matrix), mesh, options).text
        assert re.findall(r'"selected_algorithm":"(\d+)"', text) == [algorithm]
