"""The plan of a run: the memory and the traffic of the compiled step, and a prediction of its time.

The real step is compiled for the named GPU on this machine, which needs no GPU (`aot`). Memory, collectives and host
copies are read from the compiled program (`hlo`), which is simulated to predict its time (`prediction`). Each
collective is reported with its textbook bytes (`step_collectives`). If the compiler for GPUs is not installed, memory
is estimated by `footprint`, traffic by `step_collectives` and `traffic`, time by `roofline`, and `Plan.estimate` is
True.
"""

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

from pallas_kernels.dispatch import Unserved
from surojax.assembly.assemble import Assembly
from surojax.assembly.from_config import compute, from_config, updates_late
from surojax.assembly.xla_options import ALL_MEMORY, LESS_MEMORY, compiler_options, may_fit_in_less
from surojax.children import python_command
from surojax.config import checks, fields as configs
from surojax.config.changes import changed
from surojax.config.fields import Config
from surojax.errors import ConfigError
from surojax.exchange.sources import resolved
from surojax.numerics.recipes import BLOCK_SCALED, check_recipe
from surojax.placement import cuda_plugin
from surojax.placement.home import DEVICE, HOST, Home
from surojax.placement.mesh import make_mesh, mesh_shape
from surojax.planner import (
    aot,
    candidate,
    check_fit,
    expert_time,
    file_time,
    footprint,
    hlo,
    links,
    prediction,
    remedies,
    search,
    seen,
    stages,
    step_collectives,
    traffic,
)
from surojax.planner.amounts import GiB, Memory
from surojax.planner.disks import Disks
from surojax.planner.drives import disks
from surojax.planner.gpus import GPUS, Gpu, gpu_key, with_nodes
from surojax.planner.prediction import Prediction
from surojax.step import train_step as step
from surojax.step.several_programs import Program, SeveralPrograms
from surojax.step.state_plan import bytes_per_device


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(Prediction):
    """Bytes and seconds per GPU and step. Written as JSON with these field names, after those of `Prediction`."""

    gpu: str
    gpus: int
    gpus_per_node: int  # of these, in one machine
    parameters: int
    attention: str  # its implementation: "cudnn", "mosaic" or "xla"; of layers with several, "mosaic, xla"
    packed: bool  # rows hold several documents
    cp_method: str  # how sequences are divided over `cp`
    experts: str = ""  # what multiplies them, see `expert_time.multiplied_by`
    mesh: dict[str, int]  # size of each axis
    between_machines: list[str]  # axes whose groups have GPUs in several machines
    estimate: bool = True  # nothing was compiled
    xla: str = ""  # version of the CUDA plugin whose XLA compiled the step
    fits: bool
    device_bytes: int  # everything that the program needs in device memory
    device_temp_bytes: int  # of device_bytes, those that are not arguments: accumulators, residuals, working space
    host_bytes: int
    host_temp_bytes: int
    nvme_bytes: int
    classes: dict[str, dict[str, int]]  # rows of the placement table: {"device", "host", "nvme"}
    collectives: list[dict[str, Any]]  # {"op", "axis", "count", "bytes", "textbook_bytes"}
    h2d_bytes: int
    d2h_bytes: int
    within_host_bytes: int = 0  # copies from host memory to host memory
    nvme_read_bytes: int
    nvme_write_bytes: int
    disks: str  # of a machine, that hold files; "" without files
    drive_tbw: float = 0.0  # TB that these disks are made for, together
    bubble: float  # fraction of a step in which a stage of `pp` idles, see `stages.bubble`; 0 without stages
    # {"count", "bytes", "largest"}: operations that XLA recomputes to save memory
    rematerialised: dict[str, Any] = dataclasses.field(default_factory=lambda: hlo.rematerialised([]))
    estimated_step_s: float | None = None  # by roofline.py, if nothing was compiled
    device_limit_bytes: int  # bytes of this GPU's memory that a step may need, see `candidate.device_limit`
    host_limit_bytes: int | None  # of a machine, that a run can use, see `candidate.memory_limits`; None if unknown
    changes: list[str]  # changes of settings that would make it fit

    @property
    def need(self) -> Memory:
        """The bytes that the run needs: of each GPU, of a machine's host memory, and of all files."""
        return Memory(self.device_bytes, self.gpus_per_node * self.host_bytes, self.gpus * self.nvme_bytes)

    def __repr__(self) -> str:
        fits = "fits" if self.fits else "does not fit"
        device = f"{self.device_bytes / GiB:.1f} of {self.device_limit_bytes / GiB:.1f} GiB on each GPU"
        figures = [device, f"{self.host_bytes / GiB:.1f} GiB of host memory for each"]
        if self.predicted_step_s and self.tokens_per_s_per_gpu:
            rate = f"{self.gpus * self.tokens_per_s_per_gpu:,.0f} tokens/s"
            figures.append(f"{self.predicted_step_s:.3g} s a step, {rate}, predicted")
        return f"Plan({self.gpus} x {GPUS[self.gpu].label}, {fits}: {', '.join(figures)})"


def plan(
    config: Config,
    gpu: str,
    *,
    host_memory: float | None = None,
    gpus_per_node: int | None = None,
    host_bandwidth: float | None = None,
    trace: str | None = None,
    disk: str | None = None,
    advise: bool = True,
) -> Plan:
    """Plans a run on `config.gpus` GPUs of this kind. host_memory: of the machine, in GiB; None: no limit is checked.

    gpu: what `gpus.gpu_key` takes. gpus_per_node: GPUs in a machine; None: as usual. host_bandwidth: GB/s that a
    machine's host memory moves, both ways; None: see `Gpu.host_memory`. trace: a file for a trace of the simulated step
    (`prediction.trace`), written if its time is predicted. disk: the disks of a machine that hold files, as
    `drives.disks` takes them; None: assumed.
    advise: look for `changes` if it does not fit.

    A process can compile for one kind of GPU only. A kind that this process cannot compile for (`aot.usable`) is
    planned in a new process. Raises ConfigError for settings that `train` refuses, an unknown GPU, and `gpus=0`.
    """
    gpu = gpu_key(gpu)
    c = checked(config, gpu)
    if aot.available() and not aot.usable(gpu):
        return plan_in_subprocess(
            config,
            gpu,
            host_memory=host_memory,
            gpus_per_node=gpus_per_node,
            host_bandwidth=host_bandwidth,
            trace=trace,
            disk=disk,
            advise=advise,
        )
    n = c.gpus
    settings = seen.settings_key(resolved(config), n)
    facts = seen.corrected(with_nodes(gpu, gpus_per_node, host_bandwidth), c.rates_file, settings)
    batch = traffic.batch_of(c)
    mesh = make_mesh(aot.devices(gpu, n), **configs.mesh_sizes(c)) if aot.available() else None
    run = from_config(c, mesh.abstract_mesh, total_steps=1000) if mesh else footprint.assembly(c)
    rows = footprint.by_class(run, batch, "gpu")
    on_disks = disks(disk, c.rates_file)
    if mesh:
        measured = _compiled(c, facts, run, mesh, batch, trace, on_disks)
    else:
        measured = _estimated(run, batch, rows)
        measured["estimated_step_s"] = candidate.estimated(c, facts, disks=on_disks).seconds
    shape = dict(run.mesh.shape)
    collectives = _with_textbook(measured.pop("collectives", []), step_collectives.collective_bytes(run, batch))
    in_table = {name: row for name, row in rows.items() if hasattr(run.engine.table, name)}
    in_files = sum(row["nvme"] for row in in_table.values())
    limits = candidate.memory_limits(facts, host_memory, math.inf if c.nvme_path else 0.0)
    need = Memory(measured["device_bytes"], facts.in_a_machine(n) * measured["host_bytes"])
    fits = need.fits(limits)
    return Plan(
        gpu=gpu,
        gpus=n,
        gpus_per_node=facts.in_a_machine(n),
        parameters=run.model.num_parameters,
        attention=", ".join(_attention(c, facts)),
        packed=c.sample_packing,
        cp_method=c.cp_method,
        experts=expert_time.multiplied_by(run),
        mesh=shape,
        between_machines=links.crossing(facts, shape),
        fits=fits,
        classes=in_table,
        collectives=collectives,
        bubble=stages.bubble(run, batch.microbatches),
        nvme_bytes=in_files,
        disks=str(on_disks) if in_files else "",
        drive_tbw=on_disks.tbw if in_files else 0.0,
        device_limit_bytes=limits.device,
        host_limit_bytes=None if host_memory is None else int(limits.host),
        changes=_changes(c, facts, need, limits) if advise and not fits else [],
        **measured,
    )


def checked(config: Config, gpu: str) -> Config:
    """A copy of the config with each "auto", and an unset overlap_update, replaced by its meaning on this GPU.

    Raises ConfigError: see `plan`.
    """
    gpu = gpu_key(gpu)
    config = resolved(config)
    checks.check(config)
    if config.gpus == 0:
        raise ConfigError(
            "gpus: expected the number of GPUs to plan for, got 0, which is all GPUs of this machine; "
            "set --config.gpus=4, for example"
        )
    mesh_shape(config.gpus, **configs.mesh_sizes(config))
    c = changed(config)
    implementations = _attention(c, GPUS[gpu])
    # Else the compiled program chooses for each layer, by its window and its heads.
    if not configs.tokens_of_piece(c) and len(implementations) == 1:
        (c["attention"],) = implementations
    if c.recipe in BLOCK_SCALED and c.block_scaled_products == "auto":
        c.block_scaled_products = "native"
    c.overlap_update = updates_late(c)
    check_recipe(compute(c).precision, f"a {gpu}", GPUS[gpu])
    return c


def _attention(c: Config, gpu: Gpu) -> list[str]:
    """The implementations of attention on a GPU: with pairs of pieces of layers with a window, if there are any."""
    how: Any = {"gpu": True, "packed": c.sample_packing, "piece": configs.tokens_of_piece(c)}
    how |= {"window": c.model.sliding_window > 0, "hopper": gpu.compute_capability.startswith("9.")}
    found = (layer.mixer.implementation(c.attention, c.model_dtype, **how) for layer in configs.kinds(c).values())
    return list(dict.fromkeys(filter(None, found)))


def _compiled(
    c: Config,
    gpu: Gpu,
    run: Assembly,
    mesh: jax.sharding.Mesh,
    batch: traffic.BatchShape,
    trace: str | None,
    on_disks: Disks,
) -> dict[str, Any]:
    """Fields of the `Plan`, read from the step that XLA compiles for this GPU. trace: see `plan`."""
    memory: dict[str, Any] = {"memory_bytes": gpu.pool_bytes, "results": footprint.results(run, batch)}
    memory["host_temporaries"] = footprint.host_temporaries(run, batch)
    parts = programs(run, mesh, batch)

    def compile_parts(share: float) -> list[aot.Compiled]:
        options = compiler_options(run, "gpu", **memory, share=share)
        return [aot.compile_for(part.function, part.arguments, mesh, options) for part in parts]

    in_files = run.engine.table.in_files
    try:
        compiled = compile_parts(LESS_MEMORY if in_files else ALL_MEMORY)
        needed = most_bytes(compiled, parts, "device_bytes", DEVICE)
        if not in_files and may_fit_in_less(needed, candidate.device_limit(gpu)):
            compiled = compile_parts(LESS_MEMORY)
    except Unserved as error:
        raise check_fit.unserved(error) from error
    except NotImplementedError as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"attention: expected one that takes this model on a {gpu.name}, got {c.attention!r} ({reason}); use 'xla'"
        ) from error
    parsed = [hlo.parse_module(x.text) for x in compiled]
    modules = [(stages.with_rounds(module, run, batch), part.times) for module, part in zip(parsed, parts, strict=True)]

    machines = -(-c.gpus // gpu.in_a_machine(c.gpus))
    of_files = parts if in_files else ()
    simulated = prediction.simulated_step(parsed, run, batch, of_files, machines, on_disks)
    predicted = prediction.step_prediction(simulated, run, batch, gpu)
    if trace is not None and not predicted.not_predicted:
        prediction.write_trace(Path(trace), simulated.timeline(gpu, with_events=True), f"{c.gpus} x {gpu.name}")
    read, written = file_time.moved(parts)
    copies = hlo.host_copies(modules)
    copies["h2d_bytes"] += sum(part.times * bytes_per_device(part.put, HOST) for part in parts)

    return {
        "estimate": False,
        "xla": cuda_plugin.plugin_version_text(),
        "device_bytes": most_bytes(compiled, parts, "device_bytes", DEVICE),
        "device_temp_bytes": max(x.temp_bytes + x.output_bytes for x in compiled),
        "host_bytes": most_bytes(compiled, parts, "host_bytes", HOST) + run.store.places.kept // run.mesh.size,
        "host_temp_bytes": max(x.host_temp_bytes + x.host_output_bytes for x in compiled),
        "collectives": hlo.collectives(modules, mesh.shape),
        **copies,
        "rematerialised": hlo.rematerialised(modules),
        "nvme_read_bytes": read // run.mesh.size,
        "nvme_write_bytes": written // run.mesh.size,
        **dataclasses.asdict(predicted),
    }


def most_bytes(compiled: list[aot.Compiled], parts: list[Program], name: str, home: Home) -> int:
    """The largest of the programs' bytes in a memory, each with the state that is no argument of the program."""
    pairs = zip(compiled, parts, strict=True)
    return max(getattr(x, name) + bytes_per_device(part.others, home) for x, part in pairs)


def programs(run: Assembly, mesh: jax.sharding.Mesh, batch: traffic.BatchShape) -> list[Program]:
    """The programs that make up a step. Several are traced here, as on a device of the mesh (`aot.compile_for`)."""
    train_step = step.make_train_step(run.engine, run.optimizer, run.plan, mesh, run.files)
    arrays = traffic.batch_arrays(run, batch)
    if isinstance(train_step, SeveralPrograms):
        with jax.default_device(mesh.devices.flat[0]):
            return [program for program in train_step.programs(*arrays) if program.times]
    return [Program(train_step, (run.plan, *arrays), 1)]


def _estimated(run: Assembly, batch: traffic.BatchShape, rows: footprint.Rows) -> dict[str, Any]:
    """The fields that `_compiled` returns, estimated from shapes. rows: `footprint.by_class` of the run."""
    temporaries = {name: rows[name] for name in ("grads", "residuals", "working space")}
    need, temporary = (footprint.memory(x, 1, 1, "gpu") for x in (rows, temporaries))
    h2d, d2h = traffic.host_bytes(run, batch, rows)
    read, written = traffic.file_bytes(run, batch, rows)
    return {
        "device_bytes": need.device,
        "device_temp_bytes": temporary.device,
        "host_bytes": need.host,
        "host_temp_bytes": temporary.host,
        "h2d_bytes": h2d,
        "d2h_bytes": d2h,
        "nvme_read_bytes": read,
        "nvme_write_bytes": written,
        "not_predicted": "an estimate: nothing was compiled",
    }


def _with_textbook(found: list[hlo.CollectiveTotal], textbook: dict[tuple[str, str], int]) -> list[dict[str, Any]]:
    """Rows of collectives, each with its textbook bytes. If nothing was compiled, these are also the row's bytes."""
    rows = [dataclasses.asdict(x) | {"textbook_bytes": textbook.get((x.op, x.axis), 0)} for x in found]
    listed = {(x.op, x.axis) for x in found}
    missing = {key: size for key, size in textbook.items() if key not in listed}
    for (op, axis), size in missing.items():
        rows.append({"op": op, "axis": axis, "count": 0, "bytes": 0 if found else size, "textbook_bytes": size})
    return rows


def _changes(c: Config, gpu: Gpu, need: Memory, limits: Memory) -> list[str]:
    """Changes of settings that would make it fit, by estimate.

    If the estimate for this config is below `need`, the difference is subtracted from what there is.
    """
    estimated = footprint.needs(c, c.gpus, "gpu", in_a_machine=gpu.in_a_machine(c.gpus))
    device = limits.device - max(0, need.device - estimated.device)
    host = limits.host - max(0, need.host - estimated.host)
    found = remedies.proposals(search.Space(c, gpu, Memory(device, host, limits.files)))
    lines = ["\n".join(proposal.lines()) for proposal in found]
    return [f"{'or ' if i else ''}{line}" for i, line in enumerate(lines)] or [remedies.NOTHING]


def plan_in_subprocess(config: Config, gpu: str, **options: Any) -> Plan:
    """`plan` in a new process. options: keywords of `plan`.

    Raises ConfigError as `plan` does, and RuntimeError if that process fails.
    """
    code = "from surojax.planner.run_plan import serve_plan; serve_plan()"
    request = json.dumps({"config": config.to_dict(), "gpu": gpu, "options": options})
    done = subprocess.run(python_command(code), input=request, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"planning for {gpu} in a process of its own failed: {done.stderr.strip()[-2000:]}")
    answer = json.loads(done.stdout)
    if "error" in answer:
        raise ConfigError(answer["error"])
    return Plan(**answer)


def serve_plan() -> None:
    """Answers one request of `plan_in_subprocess`: reads it from standard input, writes to standard output."""
    jax.config.update("jax_platforms", "cpu")
    request = json.load(sys.stdin)
    try:
        gpu = request["gpu"]
        c = checks.restored_config(request["config"])
        if aot.available() and not aot.usable(gpu):
            raise ConfigError(f"--gpu: cannot compile for {gpu}: JAX does not load its CUDA plugin; {aot.EXTRA}")
        answer = dataclasses.asdict(plan(c, gpu, **request["options"]))
    except ConfigError as error:
        answer = {"error": str(error)}
    json.dump(answer, sys.stdout)
