"""Recipes apart from their numbers: which layers, which GPUs, and the dtypes of recipe bf16."""

import dataclasses
import functools
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small import CONFIG, drawn_params, normal

from surojax.errors import ConfigError
from surojax.models import decoder_model
from surojax.models.decoder import Block
from surojax.models.linear import recipe_product, times
from surojax.models.lora import ADAPTER, low_rank, row_lengths, with_adapters
from surojax.models.loss import cross_entropy, sharded_cross_entropy, sharded_logprob
from surojax.models.model import Compute, Variant
from surojax.models.operations import Operations, rms_norm, softcapped
from surojax.models.order import RepeatingLayers, repeating
from surojax.models.rotary import RopeScaling, rope, rope_angles
from surojax.numerics.recipes import BLOCK_SCALED, Precision, check_recipe


def test_loops_cover_the_layers_once():
    skipping = Precision(skip_first=1, skip_last=2)
    enabled = [skipping.enabled(l, 5) for l in range(5)]
    assert enabled == [False, True, True, False, False]
    assert repeating([Variant(flag) for flag in enabled]) == [
        RepeatingLayers(0, 1, 1),
        RepeatingLayers(1, 3, 1),
        RepeatingLayers(3, 5, 1),
    ]
    assert all(Precision().enabled(l, 4) for l in range(4))


def test_layers_whose_variants_repeat_are_one_loop():
    """Gemma 3's pattern, five windows and one without, in 34 layers; the last four are what is left of a period."""
    variants = [Variant(window=0 if (l + 1) % 6 == 0 else 8) for l in range(34)]
    assert repeating(variants) == [RepeatingLayers(0, 34, 6)]
    assert repeating(variants[:6]) == [RepeatingLayers(0, 5, 1), RepeatingLayers(5, 6, 1)]  # nothing repeats
    pattern_of_16 = [Variant(window=8)] * 15 + [Variant()]
    assert {run.period for run in repeating(pattern_of_16 * 2)} == {1}  # too long to unroll
    assert repeating([Variant()] * 3) == [RepeatingLayers(0, 3, 1)]
    assert repeating([Variant(window=8), Variant()] * 2 + [Variant()] * 3) == [
        RepeatingLayers(0, 4, 2),
        RepeatingLayers(4, 7, 1),
    ]


@pytest.mark.parametrize(
    "recipe, capability, said",
    (
        ("fp8_current", "8.0", "8.9 or newer"),
        ("fp8_hybrid", "8.9", ""),
        ("mxfp8", "9.0a", "10.0 or newer"),
        ("nvfp4", "12.0a", ""),
        ("bf16", "8.0", ""),
        ("bf16", "gfx942", ""),  # AMD's
        ("fp8_current", "gfx942", "8.9 or newer"),
        ("mxfp8", "gfx942", "10.0 or newer"),
    ),
)
def test_recipes_are_refused_on_gpus_without_their_products(recipe, capability, said):
    device = SimpleNamespace(compute_capability=capability)
    if not said:
        return check_recipe(Precision(recipe=recipe), "a GPU", device)
    with pytest.raises(ConfigError, match=rf"recipe: expected .* on a GPU \(compute capability {capability}\).*{said}"):
        check_recipe(Precision(recipe=recipe), "a GPU", device)


def test_block_scaled_products_are_emulated_off_gpus():
    cpu = jax.devices("cpu")[0]
    check_recipe(Precision(recipe="mxfp8"), "a CPU", cpu)
    with pytest.raises(ConfigError, match="block_scaled_products: expected 'auto' or 'emulated' on a CPU"):
        check_recipe(Precision(recipe="mxfp8", block_scaled_products="native"), "a CPU", cpu)
    amd = SimpleNamespace(compute_capability="gfx942")
    check_recipe(Precision(recipe="nvfp4", block_scaled_products="emulated"), "a GPU", amd)
    check_recipe(Precision(recipe="bf16", block_scaled_products="native"), "a CPU", cpu)


@pytest.mark.parametrize("backend, emulated", [("cpu", [True, False, True]), ("gpu", [True, False, False])])
def test_auto_emulates_block_scaled_products_off_gpus(monkeypatch, backend, emulated):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    assert [Precision(block_scaled_products=x).emulate for x in ("emulated", "native", "auto")] == emulated


def test_products_are_computed_in_the_dtypes_of_the_settings():
    """Equal to the bit to the same products written out: operands in matmul_dtype forward, gradient_dtype backward."""
    x, w, dy = (normal(i, shape) for i, shape in enumerate(((6, 16), (8, 16), (6, 8))))
    product = functools.partial(
        recipe_product(Precision(matmul_dtype="bfloat16", gradient_dtype="float32"), None), number=0, axes=()
    )
    y, vjp = jax.vjp(product, x, w)
    half = lambda v: v.astype(jnp.bfloat16)
    assert y.dtype == x.dtype and np.array_equal(y, times(half(x), half(w)).astype(jnp.float32))
    _, exact = jax.vjp(times, x, w)
    np.testing.assert_allclose(vjp(dy)[0], exact(dy)[0], rtol=1e-5, atol=1e-5)  # float32, another order of sums
    np.testing.assert_allclose(vjp(dy)[1], exact(dy)[1], rtol=1e-5, atol=1e-5)
    rounded = functools.partial(recipe_product(Precision(gradient_dtype="bfloat16"), None), number=0, axes=())
    assert not np.array_equal(jax.vjp(rounded, x, w)[1](dy)[1], vjp(dy)[1])


def test_gradients_have_the_dtype_of_the_products_by_default():
    """And a frozen matrix has none, nor anything saved for one."""
    x, w, dy = (normal(i, shape) for i, shape in enumerate(((6, 16), (8, 16), (6, 8))))
    half = lambda v: v.astype(jnp.bfloat16)
    for frozen in (False, True):
        product = recipe_product(Precision(matmul_dtype="bfloat16"), None, frozen=frozen)
        y, vjp = jax.vjp(lambda x, w, f=product: f(x, w, 0, ()), x, w)
        assert np.array_equal(y, times(half(x), half(w)).astype(jnp.float32))
        dx, dw = vjp(dy)
        assert np.array_equal(dx, (half(dy) @ half(w)).astype(jnp.float32))
        assert np.array_equal(dw, 0 * w if frozen else (half(dy).T @ half(x)).astype(jnp.float32))


def test_adapters_are_multiplied_in_their_own_dtype():
    """Sums of float32 numbers, of activations in 16 bits."""
    x, a, b = (normal(i, shape) for i, shape in enumerate(((6, 16), (4, 16), (8, 4))))
    x = x.astype(jnp.bfloat16)
    expected = 0.5 * (np.float32(x) @ np.asarray(a).T @ np.asarray(b).T)
    found = low_rank(x, a, b, 0.5)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_losses_of_16_bit_logits_are_float32():
    logits = (4 * normal(0, (5, 16))).astype(jnp.bfloat16)
    labels, mine = jnp.int32([1, 0, -1, 15, 3]), jnp.ones(5, bool)
    for of in (sharded_cross_entropy, sharded_logprob):
        found, expected = (of(x, labels, mine, ()) for x in (logits, logits.astype(jnp.float32)))
        chex.assert_trees_all_equal(found, expected)
        assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype("float32")}


MATRICES = {"attention": ("wq", "wk", "wv", "wo"), "mlp": ("w_gate", "w_up", "w_down")}


def test_every_matrix_of_a_block_draws_numbers_of_its_own(monkeypatch):
    """nvfp4: one seed for the block, and as salt the number that the matrix was declared with."""
    w = jax.tree.map(lambda x: x[0], drawn_params(CONFIG, 0)["blocks"])
    used = {}

    def multiply(x, matrix, seed, salt, **_):
        assert int(seed) == 7
        used[salt] = matrix
        return times(x, matrix)

    monkeypatch.setattr("surojax.models.linear.nvfp4_linear", multiply)
    ops = Operations(Compute(precision=Precision(recipe="nvfp4")), seed=jnp.uint32(7))
    nnx.merge(nnx.graphdef(nnx.eval_shape(lambda: Block(CONFIG, rngs=nnx.Rngs(0)))), w)(jnp.ones((1, 2, 32)), ops)
    names = [(part, name) for part, of_part in MATRICES.items() for name in of_part]
    expected = {salt: w[part][name] for salt, (part, name) in enumerate(names)}
    chex.assert_trees_all_equal(used, expected)


@pytest.mark.full
@pytest.mark.parametrize("recipe", BLOCK_SCALED)
def test_blocks_without_the_recipe_are_those_of_bf16(recipe):
    """To the bit: skipped blocks compute nothing else."""
    base = dataclasses.replace(CONFIG, num_hidden_layers=1, num_key_value_heads=4, intermediate_size=96)
    emulated = Compute(precision=Precision(recipe=recipe, block_scaled_products="emulated"))
    w = jax.tree.map(lambda x: x[0], decoder_model.build(base).init(0)["blocks"])
    x = normal(1, (2, 16, base.hidden_size))

    def block(compute: Compute, recipe_enabled: bool):
        segment = decoder_model.build(base, compute).segments[0]
        return jax.jit(lambda w, x: segment.block(w, x, None, Variant(recipe_enabled))[0])(w, x)

    np.testing.assert_array_equal(block(emulated, False), block(Compute(), True))
    assert not np.array_equal(block(emulated, True), block(Compute(), True))


def _norm(x, w, one=0.0):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6) * (one + w)


def _nats(x, w):
    top = x.max(-1, keepdims=True)
    return np.sum(np.log(np.exp(x - top).sum(-1)) + top[:, 0] - x[:, 3])


# What takes numbers in 16 bits and is computed in float32, and its formula: (function, formula, rounds its result)
IN_FLOAT32 = {
    "norm": (lambda x, w: rms_norm(x, w, 1e-6, False), _norm, True),
    "norm plus one": (lambda x, w: rms_norm(x, w, 1e-6, True), lambda x, w: _norm(x, w, 1.0), True),
    "softcap": (lambda x, w: softcapped(4 * x, 3.0), lambda x, w: 3 * np.tanh(4 * x / 3), True),
    "lengths of rows": (lambda x, w: row_lengths(x), lambda x, w: np.sqrt(np.sum(x * x, axis=-1)), False),
    "cross-entropy": (lambda x, w: cross_entropy(8 * x, jnp.full(len(x), 3)), lambda x, w: _nats(8 * x, w), False),
}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", IN_FLOAT32)
def test_what_is_computed_in_float32(name, dtype):
    """Sums of 2,048 numbers around 1 would be off by percents in 16 bits; a result in them is rounded once."""
    function, formula, rounds = IN_FLOAT32[name]
    random = np.random.default_rng(0)
    x, w = (jnp.asarray(random.normal(1.0, 0.3, shape), dtype) for shape in ((4, 2048), (2048,)))
    found = jax.jit(function)(x, w)
    assert found.dtype == (dtype if rounds else jnp.float32)
    exact = formula(np.asarray(x, np.float64), np.asarray(w, np.float64))
    np.testing.assert_allclose(
        np.asarray(found, np.float64), exact, rtol=float(jnp.finfo(dtype).eps) if rounds else 2e-6
    )
    gradient = jax.eval_shape(jax.grad(lambda x: jnp.sum(function(x, w).astype(jnp.float32))), x)
    assert gradient.dtype == dtype


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_rope_and_its_gradient_are_rounded_once(dtype):
    """The gradient is rotated back; two products that are rounded before their sum would be off by more."""
    scaling = RopeScaling()
    x, dy = (normal(i, (1, 64, 2, 32)).astype(dtype) for i in range(2))
    positions = jnp.arange(64)
    f = lambda x: rope(x, positions, 100.0, scaling)
    y, dx = jax.jit(lambda x, dy: (f(x), jax.vjp(f, x)[1](dy)[0]))(x, dy)
    cos, sin = (np.asarray(a, np.float64)[None, :, None, :] for a in rope_angles(32, positions, 100.0, scaling))
    for found, given, sine in ((y, x, sin), (dx, dy, -sin)):
        assert found.dtype == dtype
        first, second = np.split(np.asarray(given, np.float64), 2, axis=-1)
        exact = np.concatenate([first * cos - second * sine, second * cos + first * sine], axis=-1)
        error = np.abs(np.asarray(found, np.float64) - exact)
        assert (error <= float(jnp.finfo(dtype).eps) / 2 * np.abs(exact) + 1e-5).all()


def test_magnitudes_begin_as_the_lengths_of_rows():
    """Of the numbers that products read, which a base in few bits is decoded to."""
    w, a = jnp.float32([[3, 4], [0, 2]]), jnp.zeros((1, 2))
    new = {"mlp": {"w_up" + ADAPTER: {"a": a, "magnitude": jnp.zeros(2)}, "w_down" + ADAPTER: {"a": a}}}
    base = {"mlp": {"w_up": jnp.uint8([7]), "w_down": w}, "norm": w[0]}
    found = with_adapters(base, new, {"mlp": {"w_up": w, "w_down": w}})
    assert found["mlp"]["w_up" + ADAPTER]["magnitude"].tolist() == [5, 2]
    assert found["mlp"]["w_down" + ADAPTER].keys() == {"a"} and found["mlp"]["w_up"] is base["mlp"]["w_up"]
