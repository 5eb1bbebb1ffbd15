"""The short convolution (models/kinds/short_conv.py) against transformers in float64, packed and in pieces.

fixtures/make_short_conv_reference.py has how the reference was made, each document by itself.
"""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small import CONFIG

from surojax.models.kinds.short_conv import TAPS, ShortConv
from surojax.models.model import Cache
from surojax.models.operations import Operations

REFERENCE = dict(np.load(Path(__file__).parent / "fixtures" / "short_conv_reference.npz"))
LENGTHS = REFERENCE["lengths"].tolist()
STARTS = np.repeat(np.cumsum([0, *LENGTHS[:-1]]), LENGTHS)[None].astype(np.int32)
SIZES = dataclasses.replace(CONFIG, hidden_size=REFERENCE["x"].shape[-1])
EXACT = 1e-13  # relative to the largest number; float64 has 1e-16


@pytest.fixture(autouse=True)
def in_float64():
    with jax.enable_x64():
        yield


def ours(before: str = "") -> dict[str, np.ndarray]:
    """The reference's weights, or their gradients, by our names: of `in_proj` the rows of B, C and x."""
    b, c, x = np.split(REFERENCE[f"{before}in_proj.weight"], 3)
    taps = REFERENCE[f"{before}conv.weight"][:, 0]
    return {"wb": b, "wc": c, "wx": x, "wo": REFERENCE[f"{before}out_proj.weight"], "taps": taps}


def computed(weights, x, cache=None, starts: np.ndarray | None = STARTS):
    graph = nnx.graphdef(nnx.eval_shape(lambda: ShortConv(SIZES, rngs=nnx.Rngs(0))))
    ops = Operations(starts=None if starts is None else jnp.asarray(starts))
    return nnx.merge(graph, jax.tree.map(jnp.asarray, weights))(jnp.asarray(x), ops, None, cache)


def assert_close(found, expected) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=EXACT * np.abs(expected).max())


def test_documents_in_a_row_are_those_of_transformers_alone():
    """Outputs, and gradients of inputs and of every weight; a document of one token among them."""
    assert 1 in LENGTHS and len(LENGTHS) == 3
    f = lambda w, x: computed(w, x)[0]
    both = jax.jit(lambda w, x, dy: (f(w, x), jax.vjp(f, w, x)[1](dy)))
    y, (dw, dx) = both(ours(), REFERENCE["x"], REFERENCE["dy"])
    assert_close(y, REFERENCE["y"])
    assert_close(dx, REFERENCE["dx"])
    for name, expected in ours("d_").items():
        assert_close(dw[name], expected)


def test_nothing_passes_a_border():
    """To the bit, whatever stands before; one document in its place differs."""
    other = np.array(REFERENCE["x"])
    other[:, : LENGTHS[0]] = 1e3
    in_row = jax.jit(lambda x: computed(ours(), x)[0])
    np.testing.assert_array_equal(*(in_row(x)[:, LENGTHS[0] :] for x in (REFERENCE["x"], other)))
    as_one = jax.jit(lambda x: computed(ours(), x, starts=None)[0])
    assert np.abs(as_one(REFERENCE["x"]) - REFERENCE["y"]).max() > 0.1


@pytest.mark.full(after=1)
@pytest.mark.parametrize("pieces", [(4, 1, 8), (1,) * sum(LENGTHS), (2, 11)], ids=str)
def test_pieces_hand_on_a_state_of_two_tokens(pieces):
    """As sampling does, token by token or with a longer prompt; the state does not grow."""
    state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), ShortConv(SIZES).decode_state(1, 100, "float64"))
    assert state.shape == (1, TAPS - 1, SIZES.hidden_size)
    found, start = [], 0
    step = jax.jit(lambda x, *cache, starts: computed(ours(), x, Cache(*cache), starts))
    for piece in pieces:
        own = slice(start, start + piece)
        y, cache = step(REFERENCE["x"][:, own], state, np.int32(start), starts=STARTS[:, own])
        assert cache is not None and cache.state.shape == state.shape
        found.append(y)
        state, start = cache.state, start + piece
    assert_close(np.concatenate(found, axis=1), REFERENCE["y"])


def test_padding_on_the_left_is_not_seen():
    """A prompt behind padding, as `Cache.first` says, begins as it does alone."""
    length, padding = LENGTHS[0], 3
    x = np.concatenate([np.full((1, padding, SIZES.hidden_size), 7.0), REFERENCE["x"][:, :length]], axis=1)
    state = jnp.zeros((1, TAPS - 1, SIZES.hidden_size))
    y, _ = computed(ours(), x, Cache(state, 0, jnp.array([padding])), np.full((1, padding + length), padding))
    assert_close(y[:, padding:], REFERENCE["y"][:, :length])
