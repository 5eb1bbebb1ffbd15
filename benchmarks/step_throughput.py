"""Compares the tokens per second of the engine's step with a plain step: `jit` of `jax.value_and_grad` over the model.

Both steps start from equal AdamW states and use one batch and one recomputation setting. They alternate (A, B, A, B,
...), so that a drift of the machine's speed affects both equally. Prints the median time of each, and the median of the
pairwise ratios (above 1: the engine is faster). Memory is the size of the temporaries that XLA reports for the compiled
programs, without their arguments.

    python benchmarks/step_throughput.py --config configs/tiny.py [--config.recompute_block=false] [--pairs 15]
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from surojax.assembly import from_config
from surojax.assembly.assemble import assemble
from surojax.config.checks import check
from surojax.config.flags import parse_flags
from surojax.models.decoder import Decoder
from surojax.models.loss import cross_entropy
from surojax.optim.adamw import adamw, adamw_chain
from surojax.optim.learning_rate import learning_rate_schedule
from surojax.placement.layout import batch_sharding
from surojax.placement.mesh import make_mesh
from surojax.placement.table import Storage, place
from surojax.step.spec import StepSettings


def plain_step(config, optimizer, chain, dtype: str, recompute_block: bool):
    """Returns the step that one would write first in JAX.

    It maps (master, moments, count, inputs, labels) to (master, moments, count, loss).
    """
    graph = nnx.graphdef(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))

    def loss(params, inputs, labels):
        logits = nnx.merge(graph, params)(inputs, recompute_block=recompute_block)
        return cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)) / labels.size

    def train(master, moments, count, inputs, labels):
        work = jax.tree.map(lambda p: p.astype(dtype), master)
        value, grads = jax.value_and_grad(loss)(work, inputs, labels)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        scalars = optimizer.scalars(count, optax.tree.norm(grads))
        updates, moments = chain.update(grads, moments, master, scalars=scalars)
        return optax.apply_updates(master, updates), moments, count + 1, value

    return jax.jit(train, donate_argnums=(0, 1, 2))


def main() -> None:
    """Time both steps in turn and print the comparison."""
    parser = argparse.ArgumentParser(description="Engine against plain value_and_grad.")
    parser.add_argument("--pairs", type=int, default=15, help="timed steps of each, in turn")
    c, args = parse_flags(None, parser)
    check(c)
    config = from_config.architecture(c)
    mesh = make_mesh(jax.devices()[:1])
    schedule = learning_rate_schedule("cosine", peak=c.learning_rate, total_steps=1000)
    optimizer = adamw(schedule)
    chain = adamw_chain(mask=lambda params: jax.tree.map(lambda p: p.ndim >= 2, params))
    settings = StepSettings(recompute_block=c.recompute_block, lmhead_chunks=c.lmhead_chunks)
    table = place(Storage(model_dtype=c.model_dtype), num_shards=1)
    run = assemble(from_config.model(c), table, optimizer, mesh, settings)
    ours = run.train_step()
    plain = plain_step(config, optimizer, chain, c.model_dtype, c.recompute_block)

    shape = (1, c.per_device_batch_size, c.sequence_len + 1)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, shape).astype(np.int32)
    inputs, labels = jax.device_put((tokens[..., :-1], tokens[..., 1:]), batch_sharding(mesh))
    state = run.init_state(0)
    master = jax.tree.map(jnp.copy, state.master)
    moments = chain.init(master)
    count = jnp.int32(0)
    compiled = (
        ours.lower(state, inputs, labels).compile(),
        plain.lower(master, moments, count, inputs[0], labels[0]).compile(),
    )
    temp = [(s.temp_size_in_bytes if (s := x.memory_analysis()) else 0) / 2**20 for x in compiled]

    def run_ours():
        nonlocal state
        state, metrics = ours(state, inputs, labels)
        return metrics["loss"]

    def run_plain():
        nonlocal master, moments, count
        master, moments, count, loss = plain(master, moments, count, inputs[0], labels[0])
        return loss

    def timed(run):
        start = time.perf_counter()
        loss = float(run())
        return time.perf_counter() - start, loss

    losses = [(timed(run_ours)[1], timed(run_plain)[1]) for _ in range(2)]
    pairs = [(timed(run_ours)[0], timed(run_plain)[0]) for _ in range(args.pairs)]
    seconds = [statistics.median(t) for t in zip(*pairs, strict=True)]
    size = tokens[..., 1:].size
    print(f"{args.config}: {size} tokens a step, recompute_block={c.recompute_block}")
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}")
    print(f"losses of the first steps (engine, plain): {losses}")
    for name, t, mib in zip(("engine", "plain"), seconds, temp, strict=True):
        print(f"{name:7s} {size / t:10.0f} tokens/s {t * 1e3:9.1f} ms  {mib:8.1f} MiB temporaries")
    print(f"engine / plain throughput, median of {args.pairs} pairs: {statistics.median(p / o for o, p in pairs):.3f}")


if __name__ == "__main__":
    main()
