"""Mixers that compute one token after another, over parts of a sequence: chunks, and the devices of `cp`.

In float64, for rows of one document and of two with the border at each position.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small import CONFIG, needs, quick_at
from test_delta_rule import drawn as drawn_rule, recurrence, starts_of
from test_kinds import DELTA, MAMBA

from surojax.models import chunked, decoder_model, delta_pieces
from surojax.models.delta_rule import ChunkSizes
from surojax.models.kinds.gated_delta import GatedDelta
from surojax.models.kinds.mamba2 import Mamba2
from surojax.models.kinds.short_conv import ShortConv
from surojax.models.model import Cache, Compute
from surojax.models.operations import Operations
from surojax.models.row_pieces import RowPieces
from surojax.parallel import context
from surojax.placement.mesh import CONTEXT, make_mesh

S = 16  # tokens: of four devices in zig-zag order pieces of two, shorter than what both convolutions read before them
STARTS = np.stack([np.where(np.arange(S) < b, 0, b) for b in range(S)]).astype(np.int32)
EXACT = 1e-11  # relative to the largest number; float64 has 1e-16
KINDS = {"conv": (ShortConv, CONFIG), "delta": (GatedDelta, DELTA), "mamba": (Mamba2, MAMBA)}
CONTEXTS = [(kind, *over) for kind in KINDS for over in ((4, "ring"), (2, "ulysses"), (2, "ring"), (4, "ulysses"))]


@pytest.fixture(autouse=True)
def in_float64():
    with jax.enable_x64():
        yield


@functools.cache
def drawn(kind: str):
    """(weights of a mixer, x, dy) of rows with the borders of `STARTS`."""
    mixer, config = KINDS[kind]
    normal = np.random.default_rng(0).standard_normal
    graph, params = nnx.split(nnx.eval_shape(lambda: mixer(config, rngs=nnx.Rngs(0))))
    weights = jax.tree.map(lambda p: 0.4 * normal(p.shape), nnx.to_pure_dict(params))
    x = normal((len(STARTS), S, config.hidden_size))
    return graph, weights, x, normal(x.shape)


def whole(kind: str, weights, x, starts, method="ulysses"):
    """The mixer of x: all tokens, or this device's."""
    ops = Operations(Compute(cp_method=method), starts=starts)
    return nnx.merge(drawn(kind)[0], weights)(x, ops)[0]


def over_devices(kind: str, devices: int, method):
    """The same function of whole rows, which it cuts and joins again."""

    def per_device(weights, x, starts):
        y = whole(kind, weights, context.own_tokens(x, method), starts, method)
        index = context.own_index(y.shape[1], method)
        nothing = jax.lax.pcast(jnp.zeros_like(x), CONTEXT, to="varying")
        return jax.lax.psum(nothing.at[:, index].set(y), CONTEXT)

    mesh = make_mesh(jax.devices()[:devices], cp_size=devices)
    return jax.shard_map(per_device, mesh=mesh, in_specs=jax.P(), out_specs=jax.P())


def with_gradients(mixer):
    @jax.jit
    def both(weights, x, starts, dy):
        y, pullback = jax.vjp(lambda weights, x: mixer(weights, x, starts), weights, x)
        return y, pullback(dy)

    return both


@functools.cache
def expected(kind: str, packed: bool = True):
    _, weights, x, dy = drawn(kind)
    return with_gradients(functools.partial(whole, kind))(weights, x, STARTS if packed else None, dy)


def assert_close(found, wanted) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=EXACT * max(np.abs(b).max(), 1e-3))


# --- devices ----------------------------------------------------------------------------------------------------------


@needs(4)
@pytest.mark.parametrize("kind, devices, method", quick_at(CONTEXTS, 0))
def test_devices_go_on_from_each_other(kind, devices, method):
    """Outputs, and gradients of inputs and weights: of rows with a border anywhere, and of rows without."""
    _, weights, x, dy = drawn(kind)
    both = with_gradients(over_devices(kind, devices, method))
    assert_close(both(weights, x, STARTS, dy), expected(kind))
    if kind == "conv":
        assert_close(both(weights, x, None, dy), expected(kind, packed=False))


def no_halo(real, pieces, tails, earlier, before):
    own, latest = real(pieces, tails, earlier, before)
    return jnp.zeros_like(own), latest


def from_the_row(real, pieces, starts):
    """Where documents start, from the row's first token."""
    return pieces.split(context.own_tokens(starts, pieces.method))


def as_consecutive(real, x, method):
    return context.all_gather(x).reshape(-1, *x.shape[1:])


def no_state(real, *arguments):
    before, after = real(*arguments)
    return jnp.zeros_like(before), after


MISTAKES = {
    "no halo": (RowPieces, "halo", no_halo, "conv"),
    "a halo over a border": (RowPieces, "starts", lambda real, pieces, starts: None, "conv"),
    "borders counted from the row": (RowPieces, "starts", from_the_row, "conv"),
    "zig-zag read as consecutive": (context, "all_pieces", as_consecutive, "conv"),
    "no state of other pieces": (delta_pieces, "states_between", no_state, "delta"),
    "a state over a border": (RowPieces, "starts", from_the_row, "delta"),
}


@functools.cache
def expected_outputs(kind: str):
    _, weights, x, _ = drawn(kind)
    return jax.jit(functools.partial(whole, kind))(weights, x, STARTS)


@needs(2)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed(monkeypatch, mistake):
    where, name, wrong, kind = MISTAKES[mistake]
    wanted = expected_outputs(kind)
    real = getattr(where, name)
    monkeypatch.setattr(where, name, lambda *arguments, **named: wrong(real, *arguments, **named))
    _, weights, x, _ = drawn(kind)
    found = jax.jit(over_devices(kind, 2, "ring"))(weights, x, STARTS)
    with pytest.raises(AssertionError):
        assert_close(found, wanted)


@needs(4)
@pytest.mark.full
@pytest.mark.parametrize("kernel, corrects", [(False, True), (True, True), (False, False)])
@pytest.mark.parametrize("devices, method", [over[1:] for over in CONTEXTS if over[0] == "delta"])
def test_a_state_before_all_pieces_and_after_them(devices, method, kernel, corrects):
    """As chunks hand it on: every device has it and the whole of its gradient. With strong decays and odd chunks."""
    length, rule_sizes = 24, ChunkSizes(chunk=4, chunks=2, kernel=kernel, interpret=kernel, corrects=corrects)
    tokens, state = drawn_rule(3, length=length)
    g = np.array(tokens.g)
    g[1] *= 100.0
    g[2, 7] = -25.0
    tokens = tokens._replace(g=jnp.asarray(g))
    starts = np.stack([starts_of(borders, length) for borders in ([], [6, 7], [0, 11, 12, 13])])
    results, pullback = jax.vjp(
        lambda *arguments: recurrence(arguments[0], starts, arguments[1], corrects), tokens, state
    )
    normal = np.random.default_rng(9).standard_normal
    d_results = jax.tree.map(lambda x: normal(x.shape), results)

    def per_device(tokens, state, d_out, d_after):
        own = RowPieces(method, 0)

        def rule(tokens, state):
            out, after = delta_pieces.rule_of_pieces(method, tokens, own.starts(starts), state, rule_sizes)
            return own.join(out), after

        cut = jax.tree.map(lambda x: own.split(context.own_tokens(x, method)), tokens)
        state, d_after = jax.lax.pcast((state, d_after), CONTEXT, to="varying")
        results, pullback = jax.vjp(rule, cut, state)
        d_tokens, d_state = pullback((context.own_tokens(d_out, method), d_after))
        index = context.own_index(length // devices, method)
        by_token = results[0], jax.tree.map(own.join, d_tokens)
        nothing = lambda x: jax.lax.pcast(jnp.zeros((x.shape[0], length, *x.shape[2:])), CONTEXT, to="varying")
        joined = jax.tree.map(lambda x: jax.lax.psum(nothing(x).at[:, index].set(x), CONTEXT), by_token)
        return joined, (results[1][None], d_state[None])

    mesh = make_mesh(jax.devices()[:devices], cp_size=devices)
    specs = {"in_specs": jax.P(), "out_specs": (jax.P(), jax.P(CONTEXT))}
    (out, d_tokens), (after, d_state) = jax.jit(jax.shard_map(per_device, mesh=mesh, **specs))(
        tokens, state, *d_results
    )
    wanted = pullback(d_results)
    assert_close((out, d_tokens), (results[0], wanted[0]))
    for of_device in range(devices):
        assert_close((after[of_device], d_state[of_device]), (results[1], wanted[1]))


# --- chunks -----------------------------------------------------------------------------------------------------------


def state_of(weights, x, before: Cache, variant, starts):
    """Of a recurrence that forgets half of its state with each chunk."""
    state = 0.0 if before.state is None else before.state
    return before._replace(state=0.5 * state + weights * x.sum(axis=1, keepdims=True))


def body(weights, x, before: Cache, variant, starts, routing):
    state = 0.0 if before.state is None else before.state
    return weights * x * (1 + state), state_of(weights, x, before, variant, starts), None


def in_chunks(between=chunked.Replaced):
    """(dw, dx) of four chunks of a token."""
    _, _, backward = chunked.block_functions(body, state_of, 4, None, between)
    weights, x, dy = np.float64(0.7)[None, None, None], *np.random.default_rng(1).standard_normal((2, 1, 4, 1))
    return weights, x, dy, backward(jnp.asarray(weights), (jnp.asarray(x), None), (jnp.asarray(dy), None))[:2]


class NothingHandedOn(chunked.Replaced):
    after = staticmethod(lambda state, own: None)


class NoGradient(chunked.Replaced):
    d_own = staticmethod(lambda d_later, own, row: jax.tree.map(jnp.zeros_like, d_later))


def test_chunks_hand_on_a_state_and_get_its_gradient():
    weights, x, dy, found = in_chunks()

    def one_after_another(weights, x):
        state, y = 0.0, []
        for t in range(4):
            y.append(weights * x[:, t : t + 1] * (1 + state))
            state = 0.5 * state + weights * x[:, t : t + 1]
        return jnp.concatenate(y, axis=1)

    wanted = jax.jit(lambda weights, x, dy: jax.vjp(one_after_another, weights, x)[1](dy))(weights, x, dy)
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)  # sums of chunks' gradients of weights are float32
    for wrong in (NothingHandedOn, NoGradient):
        assert np.abs(in_chunks(wrong)[-1][1] - wanted[1]).max() > 0.1


@pytest.mark.full
@pytest.mark.parametrize("kind", ["conv", "linear_attention", "mamba2"])
@pytest.mark.parametrize("number", [2, 8])
def test_a_block_in_chunks_is_that_in_one_piece(monkeypatch, kind, number):
    """Outputs and all gradients."""
    monkeypatch.setattr(jnp, "float32", jnp.float64)  # in which sums over chunks are
    of_kind = MAMBA if kind == "mamba2" else DELTA
    config = dataclasses.replace(of_kind, num_hidden_layers=1, layer_types=kind)
    normal = np.random.default_rng(0).standard_normal

    def both(chunks: int, weights=None):
        (segment,) = decoder_model.build(config, Compute(sequence_chunks=chunks)).segments

        @jax.jit
        def passes(weights, x, dy):
            y, saved = segment.block_forward(weights, x, None, segment.variants[0], jnp.asarray(STARTS))
            rest = (dy, None), None, segment.variants[0], jnp.asarray(STARTS)
            return y[0], segment.block_backward(weights, saved, *rest)[:2]

        return segment, passes

    segment, in_one = both(1)
    weights = jax.tree.map(lambda p: 0.4 * normal(p.shape), segment.params)
    x, dy = normal((2, len(STARTS), S, config.hidden_size))
    assert_close(both(number)[1](weights, x, dy), in_one(weights, x, dy))
