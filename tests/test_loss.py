"""The head: loss and gradients against autodiff of the formula, whole and parallel over the vocabulary, with z-loss."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import CONFIG, normal, vectors_drawn, worst_relative

from surojax.config.checks import check
from surojax.config.fields import default_config
from surojax.errors import ConfigError
from surojax.models import decoder_model
from surojax.models.linear import linear
from surojax.models.loss import cross_entropy
from surojax.objectives import objective as objectives
from surojax.objectives.objective import CrossEntropy
from surojax.parallel.collectives import varying
from surojax.placement.mesh import SHARD, make_mesh
from surojax.step.outer import OuterLayers

MODEL = decoder_model.build(CONFIG)
Z_LOSS = 0.1  # large, so that leaving it out is seen
SCALE = 0.25


def example():
    """(outer parameters, x `[4, 6, D]`, labels, a few of them ignored)."""
    with vectors_drawn():
        weights = jax.tree.map(lambda w: 10 * np.asarray(w), MODEL.init_outer(0))  # logits that are not all alike
    x = normal(1, (4, 6, CONFIG.hidden_size))
    labels = np.random.default_rng(2).integers(-3, CONFIG.vocab_size, (4, 6), np.int32)
    return weights, x, np.maximum(labels, -1)


def formula(z_loss: float):
    """(summed loss in nats, gradients of SCALE x (loss + z_loss lse^2) by weights and x)."""
    weights, x, labels = example()
    used = {name: weights[name] for name in MODEL.head_uses}

    def total(used, x, z_loss):
        logits = linear(MODEL.final(used, x), used[MODEL.head]).reshape(-1, CONFIG.vocab_size)
        lse, flat = jax.nn.logsumexp(logits, axis=-1), labels.reshape(-1)
        nats = lse - jnp.take_along_axis(logits, jnp.maximum(flat, 0)[:, None], 1)[:, 0]
        return SCALE * jnp.sum(jnp.where(flat >= 0, nats + z_loss * lse**2, 0.0))

    both = jax.jit(lambda used, x: (total(used, x, 0.0) / SCALE, jax.grad(total, argnums=(0, 1))(used, x, z_loss)))
    return both(used, x)


def run_head(devices: int, sharded: bool, z_loss: float, chunks: int):
    """(summed loss, gradients of weights, dx) of `OuterLayers.head` on virtual devices, and the loss of its `loss`."""
    weights, x, labels = example()
    mesh, rows = make_mesh(jax.devices()[:devices]), jax.P(SHARD if devices > 1 else None)
    table = {name: rows if sharded and name != "norm" else jax.P() for name in weights}
    objective = CrossEntropy(z_loss)
    sums = {name: rows for name in weights}  # of one device, to be added up unless sharded

    def per_device(weights, x, labels):
        weights = varying(weights)
        zeros = jax.tree.map(jnp.zeros_like, weights)
        layers = OuterLayers(MODEL, objective, chunks, (SHARD,) if sharded else (), weights)
        targets = {"labels": labels}
        evaluated = layers.loss(x, targets)["loss"]
        sums, dx, grads = layers.head(zeros, x, targets, jnp.float32(SCALE))
        return sums["loss"][None], grads, dx, evaluated[None]

    f = jax.shard_map(per_device, mesh=mesh, in_specs=(table, rows, rows), out_specs=(rows, sums, rows, rows))
    total, grads, dx, evaluated = jax.jit(f)(weights, x, labels)
    whole = {name: g.reshape(-1, *weights[name].shape).sum(0) for name, g in grads.items() if name in MODEL.head_uses}
    return total.sum(), (whole, dx), evaluated.sum()


@pytest.mark.full(after=2)
@pytest.mark.parametrize("devices, sharded", [(2, True), (1, False), (2, False)])
@pytest.mark.parametrize("z_loss", [Z_LOSS, 0.0])
def test_head(devices, sharded, z_loss):
    """z_loss is in the gradients and not in the reported losses. Float32 sums in another order: 1e-5."""
    loss, grads = formula(z_loss)
    total, found, evaluated = run_head(devices, sharded, z_loss, chunks=2)
    assert float(total) == pytest.approx(float(loss), rel=1e-5)
    assert float(evaluated) == pytest.approx(float(loss), rel=1e-5)
    assert worst_relative(found, grads) < 1e-5


def test_the_reported_loss_is_that_of_the_plain_model():
    """To the bit: the same operations on the same logits."""
    weights, x, labels = example()
    y = MODEL.final(weights, x.reshape(-1, CONFIG.hidden_size))
    logits, labels = linear(y, weights[MODEL.head]), labels.reshape(-1)
    kernel = functools.partial(objectives.kernel.loss_and_gradient, implementation="xla")
    out = jax.jit(kernel)(logits, labels, SCALE)
    plain, grad = jax.jit(jax.value_and_grad(cross_entropy))(logits, labels)
    np.testing.assert_array_equal(-jnp.sum(out.logprob), plain)
    np.testing.assert_array_equal(out.d_logits, SCALE * grad)  # a power of two rounds nothing


def test_z_loss_is_checked():
    c = default_config()
    c.z_loss = -1e-4
    with pytest.raises(ConfigError, match=r"z_loss: expected 0 or more, got -0\.0001"):
        check(c)


def test_embedding():
    """A table split over two devices: the rows of a lookup are those of the whole one, and so are their gradients."""
    table, dx = (normal(i, shape) for i, shape in enumerate(((64, 8), (4, 6, 8))))
    tokens = jax.random.randint(jax.random.key(2), (4, 6), 0, 64, jnp.int32)

    def per_device(table, tokens, dx):
        grads = {"embed": jnp.zeros_like(table)}
        layers = OuterLayers(MODEL, CrossEntropy(), 1, (SHARD,), {"embed": table})
        return layers.embed(tokens), layers.push_embed(grads, tokens, dx)["embed"]

    rows = jax.P(SHARD)
    f = jax.shard_map(per_device, mesh=make_mesh(jax.devices()[:2]), in_specs=(rows,) * 3, out_specs=(rows, rows))
    x, grad = jax.jit(f)(table, tokens, dx)
    np.testing.assert_array_equal(x, table[tokens])
    whole = jnp.zeros_like(table).at[tokens].add(dx)
    np.testing.assert_allclose(grad, whole, rtol=1e-6, atol=1e-6)  # words that occur often: sums in another order
