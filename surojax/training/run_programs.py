"""Compiles a run's step and evaluation."""

from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from surojax.assembly.assemble import Assembly
from surojax.assembly.xla_options import ALL_MEMORY, LESS_MEMORY, may_fit_in_less
from surojax.config.fields import Config
from surojax.data.run_data import Evaluated
from surojax.memory.layer_file import Store
from surojax.parallel.feed import Feed
from surojax.placement.mesh import own_device
from surojax.planner import footprint, traffic
from surojax.planner.amounts import MiB
from surojax.planner.candidate import RESERVE
from surojax.planner.check_fit import memory_limit
from surojax.run.console import working
from surojax.training.evaluation import Evaluation
from surojax.training.program_options import program_options


class RunPrograms(NamedTuple):
    """The compiled programs of a run.

    store: the files of the run. arrays: names of a batch's arrays. one_at_a_time: a step is waited for before the next
    one.
    """

    train_step: Any
    evaluate: Evaluation
    feed: Feed
    store: Store
    arrays: tuple[str, ...]
    one_at_a_time: bool


def least_of_all(own: int | None) -> int | None:
    """The least of all processes' bytes, to a MiB; None if one has none. Every process has to call this."""
    if jax.process_count() == 1:
        return own
    return int(np.min(multihost_utils.process_allgather(np.uint32((own or 0) // MiB)))) * MiB or None


def compile_step(c: Config, run: Assembly, devices: list[Any], lowered, changes: dict[str, Any] | None = None) -> Any:
    """Compiles a lowered step for all memory of its devices, and for less if it does not fit.

    All processes compile for the device with the least memory: of different programs, with collectives in other orders,
    each would wait for the other. changes: options of XLA in place of the run's.
    """
    in_files = run.engine.table.in_files
    own = memory_limit(own_device(devices))  # bytes that XLA plans with
    limit = least_of_all(own)
    part = limit / own if limit and own else 1.0
    batch = traffic.batch_of(c)
    memory: dict[str, Any] = {"memory_bytes": limit and own, "results": footprint.results(run, batch)}
    memory["host_temporaries"] = footprint.host_temporaries(run, batch)

    def compiled_for(share: float) -> Any:
        options = program_options(c, run, devices[0].platform, **memory, share=share * part)
        return lowered.compile(options | (changes or {}))

    compiled = compiled_for(LESS_MEMORY if in_files else ALL_MEMORY)
    needed = compiled_bytes(compiled)
    if in_files or limit is None or needed is None:
        return compiled
    if np.any(multihost_utils.process_allgather(np.array(may_fit_in_less(needed, limit - RESERVE)))):
        compiled = compiled_for(LESS_MEMORY)
    return compiled


def compiled_bytes(compiled) -> int | None:
    """Bytes of device memory that a compiled step needs; None for one of several programs (state in files)."""
    planned = compiled.memory_analysis()
    if planned is None:
        return None
    results = planned.output_size_in_bytes - planned.alias_size_in_bytes
    return planned.argument_size_in_bytes + planned.temp_size_in_bytes + results


def compile_programs(
    c: Config, run: Assembly, mesh: jax.sharding.Mesh, evaluated: list[Evaluated], feed: Feed
) -> RunPrograms:
    """Compiles the step and the evaluation, and prints how long that took."""
    devices = list(mesh.devices.flat)
    tokens_shape = (c.gradient_accumulation_steps, feed.batch_size, c.sequence_len)
    batch = run.engine.planned_batch(tokens_shape, feed.sharding)
    with working("compiling the step and the evaluation", "compiled"):
        train_step = compile_step(c, run, devices, run.train_step().lower(run.plan, *batch))
        evaluate = Evaluation(c, run, mesh, evaluated)
    # On virtual CPU devices, several programs with collectives in flight can block each other. With layers in files, a
    # step has already ended when `train_step` returns.
    one_at_a_time = (devices[0].platform == "cpu" and len(devices) > 1) or not run.store.is_empty
    return RunPrograms(train_step, evaluate, feed, run.store, run.engine.batch_arrays, one_at_a_time)
