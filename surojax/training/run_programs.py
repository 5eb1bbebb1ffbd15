"""Compiles a run's step and evaluation."""

from typing import Any, NamedTuple

import jax

from surojax.assembly.assemble import Assembly
from surojax.assembly.xla_options import compiler_options
from surojax.config.fields import Config
from surojax.data.run_data import Evaluated
from surojax.memory.layer_file import Store
from surojax.parallel.feed import Feed
from surojax.placement.mesh import own_device
from surojax.planner import traffic
from surojax.planner.check_fit import memory_limit
from surojax.planner.footprint import host_temporaries
from surojax.run.console import working
from surojax.training.evaluation import Evaluation
from surojax.untrusted import expanded


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


def kept_choices(c: Config, platform: str) -> dict[str, str]:
    """Returns the XLA option that keeps the kernels that XLA chose by timing, in a folder of this machine.

    A program of another run, or of this run resumed, then takes the same kernel for the same product. XLA's entries
    name the GPU and the operation. Without a folder that can be written, each program chooses by itself.
    """
    if platform != "gpu":
        return {}
    folder = expanded(c.data_cache) / "kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return {}
    return {"xla_gpu_per_fusion_autotune_cache_dir": str(folder)}


def step_options(c: Config, run: Assembly, devices: list[Any]) -> dict[str, Any]:
    """Returns the XLA options that a run's step is compiled with on these devices."""
    platform = devices[0].platform
    options = compiler_options(
        run,
        platform,
        memory_bytes=memory_limit(own_device(devices)),
        host_temporaries=host_temporaries(run, traffic.batch_of(c)),
    )
    return options | kept_choices(c, platform)


def compile_programs(
    c: Config, run: Assembly, mesh: jax.sharding.Mesh, evaluated: list[Evaluated], feed: Feed
) -> RunPrograms:
    """Compiles the step and the evaluation, and prints how long that took."""
    devices = list(mesh.devices.flat)
    options = step_options(c, run, devices)
    tokens_shape = (c.gradient_accumulation_steps, feed.batch_size, c.sequence_len)
    batch = run.engine.planned_batch(tokens_shape, feed.sharding)
    with working("compiling the step and the evaluation", "compiled"):
        train_step = run.train_step().lower(run.plan, *batch).compile(options)
        evaluate = Evaluation(c, run, mesh, evaluated)
    # On virtual CPU devices, several programs with collectives in flight can block each other. With layers in files, a
    # step has already ended when `train_step` returns.
    one_at_a_time = (devices[0].platform == "cpu" and len(devices) > 1) or not run.store.is_empty
    return RunPrograms(train_step, evaluate, feed, run.store, run.engine.batch_arrays, one_at_a_time)
