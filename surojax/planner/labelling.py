"""What labelling with a teacher takes on a GPU: the memory and the time of its forward pass, compiled and simulated.

Weights in device memory, or streamed from host memory, make one program for each batch. Weights in files make programs
of one layer, whose layers are read once for BATCHES_IN_FLIGHT batches (step/layer_evaluation.py): a layer takes as long
as its programs, as its file, or as its copy to the device, whichever takes longest.
"""

import dataclasses
import math

import jax

from surojax.assembly.assemble import Assembly
from surojax.assembly.from_config import from_config
from surojax.assembly.xla_options import compiler_options
from surojax.config import fields as configs
from surojax.config.fields import Config
from surojax.errors import ConfigError
from surojax.objectives.distillation import Labelling
from surojax.placement.home import DEVICE, HOST
from surojax.placement.layout import batch_sharding
from surojax.placement.mesh import data_parallel, make_mesh
from surojax.planner import aot, hlo, run_plan, stages
from surojax.planner.amounts import gib
from surojax.planner.costs import HOST_IN, ProgramOnGpu
from surojax.planner.disks import Disks
from surojax.planner.drives import disks
from surojax.planner.file_time import moved
from surojax.planner.gpus import GB, GPUS, Gpu, gpu_key, with_nodes
from surojax.planner.layer_sizes import size
from surojax.planner.timeline import simulate
from surojax.planner.traffic import BatchShape
from surojax.step.several_programs import Program, SeveralPrograms
from surojax.step.state_plan import bytes_per_device
from surojax.step.train_step import BATCHES_IN_FLIGHT, make_eval_step


@dataclasses.dataclass(frozen=True)
class LabellingPlan:
    """Memory and predicted time of labelling.

    device_bytes, host_bytes: of a GPU. file_bytes: of all weights in files. tokens: of all GPUs in `seconds`.
    resources: busy seconds of a GPU, its host link and the disks, by name.
    """

    gpus: int
    gpu: str
    parameters: int
    device_bytes: int
    host_bytes: int
    file_bytes: int
    tokens: int
    seconds: float
    resources: dict[str, float]

    def __str__(self) -> str:
        files = f", {self.file_bytes / GB:,.0f} GB in files" if self.file_bytes else ""
        busy = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in self.resources.items() if seconds)
        binds = max(self.resources, key=self.resources.__getitem__)
        return (
            f"labelling with {self.parameters / 1e9:,.1f}B parameters on {self.gpus} x {GPUS[self.gpu].label}: "
            f"{gib(self.device_bytes)} of device memory, {gib(self.host_bytes)} of host memory for each{files}\n"
            f"predicted: {self.tokens / self.seconds:,.0f} tokens/s, {self.tokens:,} in {self.seconds:.3g} s; "
            f"{binds} binds ({busy})"
        )


def plan_labelling(config: Config, objective: Labelling, gpu: str, disk: str | None = None) -> LabellingPlan:
    """Plans labelling by the teacher of a checked config. objective: what its pass computes. gpu, disk: see `plan`.

    Raises ConfigError as `run_plan.plan` does, and if no compiler for GPUs is installed.
    """
    gpu, on_disks = gpu_key(gpu), disks(disk, config.rates_file)
    c = run_plan.checked(config, gpu)
    if not aot.available():
        raise ConfigError(f"--plan: expected a compiler for GPUs, got none; {aot.EXTRA}")
    facts = with_nodes(gpu, None)
    mesh = make_mesh(aot.devices(gpu, c.gpus), **configs.mesh_sizes(c))
    run = from_config(c, mesh.abstract_mesh, total_steps=1)
    engine = dataclasses.replace(run.engine, objective=objective)
    sequences = c.per_device_batch_size * data_parallel(mesh)
    sharding = batch_sharding(mesh.abstract_mesh, accumulated=False)
    arrays = engine.planned_batch((sequences, c.sequence_len), sharding)
    step = make_eval_step(engine, run.plan, mesh)
    in_files = isinstance(step, SeveralPrograms)
    programs = step.programs(*arrays) if in_files else [Program(step, (run.plan.weights, *arrays), 1)]
    options = compiler_options(run, "gpu", memory_bytes=facts.pool_bytes)
    compiled = [aot.compile_for(part.function, part.arguments, mesh, options) for part in programs]
    shape = BatchShape(c.per_device_batch_size, c.sequence_len, 1)
    modules = [stages.with_rounds(hlo.parse_module(x.text), run, shape) for x in compiled]
    timelines = [simulate(ProgramOnGpu(module, facts, mesh.shape)) for module in modules]
    batches = BATCHES_IN_FLIGHT if in_files else 1
    other_batches = (batches - 1) * max(x.output_bytes + bytes_per_device(arrays) for x in compiled)
    kernels = batches * sum(part.times * x.seconds for part, x in zip(programs, timelines, strict=True))
    if in_files:
        seconds, resources = _by_layer(programs, kernels, facts, c.gpus, on_disks)
    else:
        copies = timelines[0].busy.get(HOST_IN, 0.0)
        waited = sum(s for (_, kind), s in timelines[0].exposed.items() if kind == HOST_IN)
        seconds, resources = kernels, {"the GPU": kernels - waited, "the host link": copies}
    return LabellingPlan(
        gpus=c.gpus,
        gpu=gpu,
        parameters=_parameters(run),
        device_bytes=run_plan.most_bytes(compiled, programs, "device_bytes", DEVICE) + other_batches,
        host_bytes=run_plan.most_bytes(compiled, programs, "host_bytes", HOST),
        file_bytes=moved(programs)[0],
        tokens=batches * sequences * c.sequence_len,
        seconds=seconds,
        resources=resources,
    )


def _by_layer(
    programs: list[Program], kernels: float, gpu: Gpu, gpus: int, disks: Disks
) -> tuple[float, dict[str, float]]:
    """Returns (seconds of several batches, busy seconds by resource). kernels: seconds of the batches' programs."""
    read, _ = moved(programs)
    put = sum(part.times * size(part.put) for part in programs) / gpus
    resources = {
        "the GPU": kernels,
        "the host link": put / (gpu.pcie_bandwidth * gpu.rates.host),
        "the disk": disks.seconds(read, 0),
    }
    first = disks.seconds(max(part.read.total() for part in programs), 0)
    return max(resources.values()) + first, resources


def _parameters(run: Assembly) -> int:
    """Counts a teacher's parameters, without the adapters of `distill`, which add nothing."""
    return run.model.num_parameters - sum(
        segment.num_layers * math.prod(p.shape)
        for segment in run.model.segments
        for p in jax.tree.leaves(segment.params)
        if p.adapter
    )
