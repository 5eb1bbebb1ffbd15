"""What tests/test_processes.py runs in each of several processes: a few steps under several placements.

    python tests/many_processes.py --coordinator HOST:PORT --num_processes N --process_id I

Process 0 prints one line of JSON: {placement: [(loss, gradient norm), ...]} and, under "psum_scatter", the largest
difference to numpy. With --limits: what XLA is handed in each process if process 1 sees less memory, see `limits`.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

PLACEMENTS = {
    "ZeRO-3": {"shard_weights": True, "shard_gradients": True, "offload_optimizer": True},
    "HSDP": {"replicate": 2, "shard_gradients": True},
    "CP x TP": {"cp_size": 2, "tp_size": 2},
    "PP": {"pp_size": 2},
}
SCATTERED = 2 << 20  # float32 of a device's chunk: 8 MiB


def losses(name: str) -> list[tuple[float, float]]:
    """Trains a small model over all devices for 2 steps."""
    import small

    from surojax.models.decoder_config import DecoderConfig
    from surojax.parallel.feed import Feed
    from surojax.placement.layout import batch_sharding
    from surojax.placement.mesh import data_parallel

    config = small.CONFIG if name != "PP" else DecoderConfig(**{**vars(small.CONFIG), "num_hidden_layers": 2})
    run = small.Small(jax.device_count(), config=config, **PLACEMENTS[name])
    state = run.init()
    batch_size = 2 * data_parallel(run.mesh)
    feed = Feed(batch_sharding(run.mesh), batch_size)
    found = []
    for step in range(2):
        batch = small.tokens(2, batch_size, 16, seed=step)
        own = batch if feed.rows is None else [x[:, feed.rows] for x in batch]
        state, metrics = run.step(state, *feed.put(list(own)))
        found.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    return found


def scattered() -> float:
    """Largest difference of `psum_scatter` of large chunks to numpy's sum, relative to the largest sum."""
    n = jax.device_count()
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    sharding = jax.NamedSharding(mesh, jax.P("x"))
    x = np.random.default_rng(0).standard_normal((n, n * SCATTERED), np.float32)
    array = jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])
    specs = {"mesh": mesh, "in_specs": jax.P("x"), "out_specs": jax.P("x")}
    total = jax.jit(jax.shard_map(lambda x: jax.lax.psum_scatter(x[0], "x", tiled=True), **specs))(array)
    expected = x.sum(0, dtype=np.float64)
    parts = [(shard.data, expected[shard.index]) for shard in total.addressable_shards]
    return max(float(np.abs(np.asarray(a, np.float64) - b).max() / np.abs(expected).max()) for a, b in parts)


def limits(of_processes: list[float | None], needed: float) -> list[list[float]]:
    """GiB of temporaries that XLA allows in each process, each time that the step of a run is compiled; 0: no limit.

    of_processes: GiB of a GPU that JAX may use in each process. needed: GiB that the compiled step takes.
    """
    from jax.experimental import multihost_utils

    from surojax.assembly.xla_options import MEMORY_LIMIT
    from surojax.config import default_config
    from surojax.planner import footprint
    from surojax.planner.amounts import GiB
    from surojax.step.state_plan import bytes_per_device
    from surojax.training import run_programs

    c = default_config()
    c.gpus, c.data_cache = 2, "/dev/null"  # in which no kernels are kept
    run = footprint.assembly(c)
    own = of_processes[jax.process_index()]
    handed = []

    def compile_step(options):
        percent = options.get(MEMORY_LIMIT)
        handed.append(percent / 100 * (own - bytes_per_device(run.plan) / GiB) if percent else 0.0)
        sizes = {f"{name}_size_in_bytes": 0 for name in ("argument", "output", "alias")}
        memory = SimpleNamespace(temp_size_in_bytes=int(needed * GiB), **sizes)
        return SimpleNamespace(memory_analysis=lambda: memory)

    run_programs.memory_limit = lambda device: None if own is None else int(own * GiB)
    run_programs.own_device = lambda devices: devices[0]
    run_programs.compile_step(c, run, [SimpleNamespace(platform="gpu")], SimpleNamespace(compile=compile_step))
    of_all = multihost_utils.process_allgather(np.float32([len(handed), *handed, 0][:3]))
    return [of_process[1 : 1 + int(of_process[0])] for of_process in of_all.tolist()]


def main() -> None:
    from surojax.cluster import hosts
    from surojax.cluster.supervised import Supervised
    from surojax.cluster.watch import Watch, failing_together

    parser = argparse.ArgumentParser()
    parser.add_argument("--limits", action="store_true")
    hosts.add_flags(parser)
    args = parser.parse_args()
    place = hosts.detect_flags(args, os.environ)
    assert place
    supervised = Supervised(args.supervisor, args.heartbeat)
    names = hosts.connect(place, os.environ, key=supervised.key, say=lambda _: None)
    with failing_together(Watch(names, place.process_id, args.heartbeat)):
        if args.limits:
            found = [limits(gibs, 19.8) for gibs in ([24.0, 20.0], [24.0, 24.0], [24.0, None])]
        else:
            found = {name: losses(name) for name in PLACEMENTS} | {"psum_scatter": scattered()}
        if place.process_id == 0:
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
