"""The parts of a run for a user's own training loop: state, batches, step, evaluation, gradients, tensors by name."""

import functools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from surojax.assembly.from_config import Brought, from_config
from surojax.config.fields import Config
from surojax.data.batches import training_batches
from surojax.errors import ConfigError
from surojax.exchange import config_json
from surojax.exchange.export import in_files
from surojax.exchange.gguf_file import is_gguf
from surojax.exchange.model_tensors import tensors_by_name
from surojax.exchange.naming import Naming, naming_of
from surojax.exchange.sources import naming, resolved
from surojax.models.decoder import Block
from surojax.objectives.objective import Objective
from surojax.optim.from_optax import MakeTransformation
from surojax.parallel.feed import Feed, to_host
from surojax.placement.layout import batch_sharding
from surojax.step.state import TrainState
from surojax.training.initial_state import first_state
from surojax.training.kernel_choices import take_choices
from surojax.training.reference import with_reference
from surojax.training.run_programs import compile_programs
from surojax.training.setup import naming_rows, set_up
from surojax.training.start import find_start


class OwnLoop:
    """The parts of a run for a loop of your own: state, batches, step, evaluation, gradients, tensors by name.

    The config is checked, planned and compiled as by `train`, whose arguments it takes; only the data's cache is
    written. It begins at the checkpoint in the config's output_dir, if there is one. total_steps: of the learning
    rate's schedule. first_step: steps done in that checkpoint. tokenizer: of the data.

    Raises what `train` does, and ConfigError for settings that need its loop: state in files, overlap_update, adapters.
    """

    def __init__(
        self,
        config: Config,
        *,
        data: Iterable[Any] | None = None,
        optimizer: MakeTransformation | None = None,
        objective: Objective | None = None,
        block: type[Block] | None = None,
    ):
        c = naming_rows(resolved(config), data)
        brought = Brought(optimizer, objective, block)
        setup = set_up(c, brought, data)
        start = find_start(c, setup)
        c = start.config
        run = from_config(c, setup.mesh, start.total_steps, brought=brought)
        has_files = run.engine.table.in_files
        for name, value in {"nvme_path": has_files, "overlap_update": c.overlap_update, "lora": c.lora}.items():
            if value:
                raise ConfigError(f"{name}: expected none in a loop of your own, got it; leave it out, or use train()")
        take_choices(c, start.resume, setup.output_dir, setup.devices[0].platform)
        start = with_reference(c, run, setup, start)
        self.total_steps = start.total_steps
        self.first_step = start.first_step
        self.tokenizer = start.tokenizer
        self._config = c
        self._setup = setup
        self._start = start
        self._run = run
        self._feed = Feed(batch_sharding(setup.mesh), start.batch_size)
        self._programs = compile_programs(c, run, setup.mesh, start.found.evaluated, self._feed)
        self._gradients = None

    def first_state(self) -> TrainState:
        """Makes the first state, a pytree: from the checkpoint, from another model's weights, or at random."""
        return first_state(self._config, self._run, self._start, self._setup.initial)

    def batches(self) -> Iterator[dict[str, np.ndarray]]:
        """Yields the data's batches without end, from the first step on: `inputs` and others, int32 [A, B, S].

        A step takes A microbatches of B rows. Batches of your own need the same shapes.
        """
        return training_batches(
            self._start.found.train,
            batch_size=self._start.batch_size,
            accumulation=self._config.gradient_accumulation_steps,
            seed=self._config.seed,
            start_sample=self._start.position,
            rows=self._feed.rows,
        )

    def step(self, state: TrainState, batch: dict[str, np.ndarray]) -> tuple[TrainState, dict[str, jax.Array]]:
        """Returns (the next state, {"loss" in nats per token, "grad_norm", "lr"}); the arrays of `state` are donated.

        Does not wait for the devices; `float(metrics["loss"])` does.
        """
        state, metrics = self._programs.train_step(state, *self._put(batch))
        if self._programs.one_at_a_time:
            jax.block_until_ready(metrics)
        return state, metrics

    def evaluate(self, state: TrainState) -> dict[str, float]:
        """Computes the loss, in nats per token, of each validation dataset by its name; "": of held-out data."""
        return {scores["name"]: scores["loss"] for scores in self._programs.evaluate(state.weights)}

    def loss_and_gradients(
        self, state: TrainState, batch: dict[str, np.ndarray]
    ) -> tuple[float, dict[str, np.ndarray]]:
        """Returns (loss of a batch, unclipped gradients by Hugging Face's names); compiles when first called."""
        if self._gradients is None:
            self._gradients = self._run.gradients()
        loss, grads = self._gradients(state.weights, state.progress, *self._put(batch))
        return float(loss), self._in_files(grads)

    def tensors(self, state: TrainState) -> dict[str, np.ndarray]:
        """Copies the master weights to host memory, by Hugging Face's names, as safetensors' `save_file` takes them."""
        return self._in_files(state.master)

    def _in_files(self, tree: dict) -> dict[str, np.ndarray]:
        """Makes the tensors of the model's files of a tree like the master weights."""
        model = self._run.model
        return in_files(tensors_by_name(to_host(tree), model), model, self._naming)

    @functools.cached_property
    def _naming(self) -> Naming:
        c = self._config
        if c.model_path and not is_gguf(Path(c.model_path)):
            return naming(c)
        try:
            return naming_of(config_json.made(c.model.to_dict(), c.sequence_len, {}))
        except ConfigError:  # no family computes this model: most families' names
            return Naming()

    def _put(self, batch: dict[str, np.ndarray]) -> list[jax.Array]:
        """Copies a batch's arrays to the devices. Raises ConfigError if they are not as `batches` yields them."""
        shape = self._config.gradient_accumulation_steps, self._start.batch_size, self._config.sequence_len
        names = self._programs.arrays
        for name, planned in zip(names, self._run.engine.planned_batch(shape, None), strict=True):
            if name not in batch:
                raise ConfigError(f"batch: expected the arrays {', '.join(names)}, got no {name}; add it")
            got = np.asarray(batch[name])
            if got.shape != planned.shape or got.dtype != planned.dtype:
                expected = f"{planned.dtype} {[*planned.shape]}"
                raise ConfigError(f"batch: expected {name} {expected}, got {got.dtype} {[*got.shape]}; correct it")
        return self._feed.put([batch[name] for name in self._programs.arrays])
