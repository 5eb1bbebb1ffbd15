"""Recipes apart from their numbers: which layers, which GPUs, and the dtypes of recipe bf16."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small import CONFIG, drawn_params

from surojax.errors import ConfigError
from surojax.models import layers
from surojax.models.layers import products, times
from surojax.models.llama import Block, functions, init_params
from surojax.precision import BLOCK_SCALED, Precision, check_recipe


def test_ranges_cover_the_layers_once():
    assert Precision(skip_first=1, skip_last=2).ranges(5) == [(0, 1, False), (1, 3, True), (3, 5, False)]
    assert Precision().ranges(4) == [(0, 4, True)]


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


def test_products_are_computed_in_the_dtypes_of_the_settings():
    """Equal to the bit to the same products written out: operands in matmul_dtype forward, gradient_dtype backward."""
    x, w, dy = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(((6, 16), (8, 16), (6, 8))))
    product = products(Precision(matmul_dtype="bfloat16", gradient_dtype="float32"), None)("wq")
    y, vjp = jax.vjp(product, x, w)
    half = lambda v: v.astype(jnp.bfloat16)
    assert y.dtype == x.dtype and np.array_equal(y, times(half(x), half(w)).astype(jnp.float32))
    _, exact = jax.vjp(times, x, w)
    np.testing.assert_allclose(vjp(dy)[0], exact(dy)[0], rtol=1e-5, atol=1e-5)  # float32, another order of sums
    np.testing.assert_allclose(vjp(dy)[1], exact(dy)[1], rtol=1e-5, atol=1e-5)
    rounded = products(Precision(gradient_dtype="bfloat16"), None)("wq")
    assert not np.array_equal(jax.vjp(rounded, x, w)[1](dy)[1], vjp(dy)[1])


@pytest.mark.parametrize("recipe", BLOCK_SCALED)
def test_blocks_without_the_recipe_are_those_of_bf16(recipe):
    """To the bit: skipped blocks compute nothing else."""
    base = dataclasses.replace(CONFIG, num_hidden_layers=1, num_key_value_heads=4, intermediate_size=96)
    skipped = dataclasses.replace(base, precision=Precision(recipe=recipe, block_scaled_products="emulated"))
    w = jax.tree.map(lambda x: x[0], init_params(base, 0)["blocks"])
    x = jax.random.normal(jax.random.key(1), (2, 16, base.hidden_size))
    block = lambda config, on: jax.jit(lambda w, x: functions(config).block(w, x, None, on))(w, x)
    np.testing.assert_array_equal(block(skipped, False), block(base, True))
    assert not np.array_equal(block(skipped, True), block(base, True))


MATRICES = {"attention": ("wq", "wk", "wv", "wo"), "mlp": ("w_gate", "w_up", "w_down")}


def test_every_matrix_of_a_block_draws_numbers_of_its_own(monkeypatch):
    """nvfp4: one seed for the block, a salt for each matrix."""
    monkeypatch.setattr(layers, "nvfp4_linear", lambda x, w, seed, salt, **_: (int(seed), salt))
    product = products(Precision(recipe="nvfp4"), jnp.uint32(7))
    found = [product(name)(None, None) for names in MATRICES.values() for name in names]
    assert {seed for seed, _ in found} == {7} and len({salt for _, salt in found}) == 7


def test_every_matrix_of_a_block_is_multiplied_under_its_own_name():
    w = jax.tree.map(lambda x: x[0], drawn_params(CONFIG, 0)["blocks"])
    used = {}

    def product(name):
        def multiply(x, matrix):
            used[name] = matrix
            return times(x, matrix)

        return multiply

    nnx.merge(nnx.graphdef(nnx.eval_shape(lambda: Block(CONFIG, rngs=nnx.Rngs(0)))), w)(jnp.ones((1, 2, 32)), product)
    expected = {name: w[part][name] for part, names in MATRICES.items() for name in names}
    jax.tree.map(np.testing.assert_array_equal, used, expected)
