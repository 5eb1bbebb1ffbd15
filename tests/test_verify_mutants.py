"""Whether rows of `verify` notice that one of their collectives is missing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import removal
import row_mutants
from removal import watching
from row_mutants import AT_TRACE, BY_PARITY, NOT_FOUND, verify_mutants
from test_verify import TRAINED, small_config

from surojax.errors import ConfigError
from surojax.verification import rows
from surojax.verification.training import FirstStates

N = 4
IN_ITS_PLACE = {  # kind: (a collective of 4 devices, what device i has without it, of its rows x `[4, 3]`)
    "psum": (lambda x: jax.lax.psum(x, "d"), lambda i, x: x),
    "pmax": (lambda x: jax.lax.pmax(x, "d"), lambda i, x: x),
    "all-gather": (lambda x: jax.lax.all_gather(x, "d", axis=1, tiled=True), lambda i, x: np.tile(x, (1, N))),
    "all-gather, stacked": (lambda x: jax.lax.all_gather(x, "d"), lambda i, x: np.stack([x] * N)),
    "reduce-scatter": (lambda x: jax.lax.psum_scatter(x, "d", tiled=True), lambda i, x: x[i : i + 1]),
    "reduce-scatter, stacked": (lambda x: jax.lax.psum_scatter(x, "d"), lambda i, x: x[i]),
    "all-to-all": (lambda x: jax.lax.all_to_all(x, "d", 0, 1, tiled=True), lambda i, x: x.reshape(1, -1)),
    "ppermute": (lambda x: jax.lax.ppermute(x, "d", [(i, (i + 1) % N) for i in range(N)]), lambda i, x: x),
}


@pytest.mark.full
@pytest.mark.parametrize("kind", IN_ITS_PLACE)
def test_what_comes_in_the_place_of_a_collective(monkeypatch, kind):
    """Each device has what numpy says, of the collective's shape; outside of the context, nothing has changed."""
    monkeypatch.setattr(removal, "PACKAGES", (__file__,))
    collective, expected = IN_ITS_PLACE[kind]
    mesh = jax.make_mesh((N,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    x = np.random.default_rng(0).standard_normal((N, N, 3)).astype(np.float32)

    def per_device(x):
        return collective(x[0])[None]

    def run():
        out_specs = jax.P("d")
        return np.asarray(jax.jit(jax.shard_map(per_device, mesh=mesh, in_specs=jax.P("d"), out_specs=out_specs))(x))

    seen = []
    with watching(lambda found: bool(seen.append(found)) or True):
        without = run()
    assert [(found.kind, found.axes, found.reverse) for found in seen] == [(kind.partition(",")[0], ("d",), False)]
    np.testing.assert_array_equal(without, np.stack([expected(i, x[i]) for i in range(N)]))
    complete = run()
    assert complete.shape == without.shape and not np.array_equal(complete, without)


def test_reverse_mode_has_collectives_of_its_own(monkeypatch):
    """The gradient of a gathered array is reduce-scattered; that alone can be taken out, and has the line of both."""
    monkeypatch.setattr(removal, "PACKAGES", (__file__,))
    mesh = jax.make_mesh((N,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    def gathered(x):
        return jax.lax.all_gather(x, "d", tiled=True)

    def per_device(x):
        y, vjp = jax.vjp(gathered, x)
        return vjp(y)[0]

    seen = []
    with watching(lambda found: bool(seen.append(found)) or found.reverse):
        step = jax.jit(jax.shard_map(per_device, mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d")))
        x = jnp.arange(8.0)
        np.testing.assert_array_equal(step(x), x)  # its part of its own term; the sum of all would be 4 x
    forward = {(found.kind, found.lines[0]) for found in seen if not found.reverse}
    ((_, line),) = forward
    assert {(found.kind, found.lines[0]) for found in seen if found.reverse} == {("reduce-scatter", line)}
    assert line.endswith("gathered")


def only(collective: str):
    """Lets mutants be those alone of which this is a part of the text."""

    def watching_some(left_out):
        return watching(lambda found: collective in str(found) and left_out(found))

    return watching_some


@pytest.mark.full
def test_both_ways_to_find_one(monkeypatch):
    """A sum that the types ask for, and all-gathers that only numbers show."""
    monkeypatch.setattr(row_mutants, "watching", only("over tp, in reverse mode"))
    found = verify_mutants(small_config(), steps=2, only=["tp@2"])
    assert sorted(outcome.found for outcome in found) == [AT_TRACE, BY_PARITY, BY_PARITY]
    (at_trace,) = [str(outcome.mutant.removed) for outcome in found if outcome.found == AT_TRACE]
    assert "psum over tp, in reverse mode: models/operations.py" in at_trace


def test_a_row_that_fails_by_itself_shows_nothing(monkeypatch):
    """Its mutants would all be found."""
    monkeypatch.setattr(rows, "Started", lambda *_: TRAINED)
    monkeypatch.setattr(row_mutants, "compiled_step", lambda row, step: step)
    monkeypatch.setattr(FirstStates, "of", lambda *_: None)
    monkeypatch.setattr(row_mutants, "training_curve", lambda *_: iter([(2.0, 1.0)]))
    with pytest.raises(ConfigError, match=r"--only: expected rows that pass, got tp@2: loss too far"):
        verify_mutants(small_config(), steps=1, only=["tp@2"])


def test_rows_that_cannot_run_are_said_to_be_skipped(monkeypatch):
    monkeypatch.setattr(rows, "Started", lambda *_: TRAINED)
    skipped = []
    found = verify_mutants(
        small_config(),
        steps=1,
        only=["plain", "tp@2"],
        devices=jax.devices()[:1],
        skipped=lambda s, why: skipped.append((s.name, why)),
    )
    assert found == [] and skipped == [("tp@2", "needs 2 devices, there is 1")]


@pytest.mark.full
@pytest.mark.parametrize("row", ["hsdp_2x2", "tp_2x2_offload_all", "cp_ring_2x2", "pp_2x2"])
def test_every_collective_of_a_row_is_needed(row):
    """Not of `ep`: without the sum that decides how many rounds of tokens are sent, devices wait for each other."""
    found = verify_mutants(small_config(), steps=2, only=[row])
    assert len(found) >= 8
    assert not [str(outcome.mutant.removed) for outcome in found if outcome.found == NOT_FOUND]
