"""Makes the parts of a run from a model, a placement, an optimizer and a mesh. No array is created.

`assemble` takes frozen dataclasses and needs no config: tests, benchmarks and notebooks call it. The mesh can be
abstract.
"""

import dataclasses
from collections.abc import Callable

import jax

from surojax.errors import ConfigError
from surojax.memory.host import parts
from surojax.memory.in_file import own_layers
from surojax.memory.layer_file import Store
from surojax.models.model import Model, Segment
from surojax.numerics import fp8
from surojax.numerics.base_formats import Coded, is_coded
from surojax.optim import optimizer as optim
from surojax.placement.home import DEVICE
from surojax.placement.layout import layouts
from surojax.placement.mesh import pipeline_stages
from surojax.placement.param import Param
from surojax.placement.table import Mesh, Placement
from surojax.step import complete, train_step as step
from surojax.step.first_state import init_state, load_state
from surojax.step.layer_gradients import StacksInFiles, planned_files
from surojax.step.spec import Engine, StepSettings
from surojax.step.stage_layers import of_stage
from surojax.step.state import TrainState
from surojax.step.state_plan import state_plan, with_device_memory

DEFAULT = StepSettings()


@dataclasses.dataclass(frozen=True)
class Assembly:
    """The parts of a run: model, optimizer, plan of the state, engine, mesh and files.

    plan: of its training state. store: the file of the classes that are in one; an empty store if none is. files: what
    a step keeps there.
    """

    model: Model
    optimizer: optim.Optimizer
    plan: TrainState
    engine: Engine
    mesh: Mesh
    store: Store
    files: StacksInFiles

    @property
    def params(self) -> dict:
        """The model's `Param`s by section."""
        return self.model.params

    @property
    def layers(self) -> dict[str, int]:
        """The number of layers in each segment, without the padding of stacks (step/padding.py)."""
        return {segment.name: segment.num_layers for segment in self.model.segments}

    def init_state(self, seed: int) -> TrainState:
        """Makes a new random state, each array created in its planned sharding and memory tier."""
        return init_state(self.model, self.plan, self.optimizer, seed)

    def load_state(
        self, layer: Callable, outer: Callable, seed: int = 0, *, reads_adapters: bool = False
    ) -> TrainState:
        """Makes a state before the first step with weights read layer by layer; see `first_state.load_state`."""
        run_parts = self.model, self.plan, self.optimizer
        return load_state(*run_parts, layer, outer, seed, reads_adapters=reads_adapters)

    def coded(self, segment: Segment, param: Param) -> Coded | None:
        """The planned stack of a parameter that is stored quantised in the base's format; None for other parameters."""
        if not self.engine.table.base_format:
            return None
        planned = parts(self.plan.weights[segment.name])[0].stack
        for key in param.name.split("."):
            planned = planned[key]
        return planned if is_coded(planned) else None

    def train_step(self):
        """Makes the training step, see `step.make_train_step`."""
        return step.make_train_step(self.engine, self.optimizer, self.plan, self.mesh, self.files)

    def gradients(self):
        """Makes the function of loss and gradients, see `step.make_gradients`."""
        return step.make_gradients(self.engine, self.optimizer, self.plan, self.mesh)

    def eval_step(self):
        """Makes the evaluation step, see `step.make_eval_step`."""
        return step.make_eval_step(self.engine, self.plan, self.mesh)


def assemble(
    model: Model,
    table: Placement,
    optimizer: optim.Optimizer,
    mesh: Mesh,
    settings: StepSettings = DEFAULT,
    batch: tuple[int, int, int] | None = None,
) -> Assembly:
    """Assembles the parts of a run from a model, a placement, an optimizer and a mesh. No array is made.

    Raises ConfigError if the table does not fit the model or the mesh.

    batch: (microbatches, sequences of a microbatch on all devices, sequence length) of a step, which residuals in files
    are planned for.
    """
    if pipeline_stages(mesh) > 1:
        of_stage(model, pipeline_stages(mesh))  # raises
    only_state_in_files = table.in_files and not table.by_layer
    if settings.overlap_update and (table.grads.home == DEVICE or only_state_in_files or pipeline_stages(mesh) > 1):
        raise ConfigError(
            "overlap_update: expected offload_grads, not only state in files, and pp_size=1 with it, got True without; "
            "leave it out"
        )
    if table.by_layer and jax.process_count() > 1:
        raise ConfigError(
            "offload_weights, offload_grads, offload_residual: expected true or false with several processes, got "
            "'nvme', which is not built for them; set them to true"
        )
    if table.slots > 1 and jax.process_count() > 1:
        raise ConfigError(
            f"nvme_slots: expected 1 with several processes, whose files would have to agree on a step, got "
            f"{table.slots}; leave it out"
        )
    own = own_layers(mesh, model.num_layers)
    store = Store(table.folder, model.num_layers, own, in_memory=table.files_in_memory, slots=table.slots)
    class_layouts = layouts(model.params, table, mesh)
    class_layouts = with_device_memory(model, table, class_layouts, optimizer, mesh, store)
    of_step = {field.name: getattr(settings, field.name) for field in dataclasses.fields(StepSettings)}
    engine = Engine(model=model, table=table, layouts=class_layouts, **of_step)
    precision = model.precision
    history = None
    if precision.delayed:
        history = fp8.history_shape(model.num_layers, model.sites, precision.amax_history)
    plan = state_plan(model, table, class_layouts, optimizer, mesh, store, history=history)
    complete.reserve(plan, store)
    files = planned_files(step.make_step_parts(engine, optimizer, plan, mesh), store, batch)
    return Assembly(model, optimizer, plan, engine, mesh, store, files)
