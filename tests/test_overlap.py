"""Updates under the next step's first forward pass (`overlap_update`): the same bits, state by state.

The reference is the step that ends with its update: another program, with other loops.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import CONFIG, Small, quick_at, tokens

from surojax import ConfigError, default_config
from surojax.config import checks
from surojax.models.model import Compute
from surojax.numerics.recipes import Precision
from surojax.step import engine, stream
from surojax.step.overlap import Pending
from surojax.step.train_step import up_to_date

STATE = dict.fromkeys(("offload_master", "offload_optimizer", "offload_grads"), True)
ALL = STATE | {"offload_weights": True, "offload_residual": True}
WIDE = dataclasses.replace(CONFIG, hidden_size=64, intermediate_size=160, head_dim=16)


def recipe(name: str, **settings) -> dict:
    return {"config": WIDE, "compute": Compute(precision=Precision(recipe=name, **settings))}


# Where state rests and what numbers it has; and loops of one layer, of pairs, and over two kinds.
CASES = {
    "all": ALL | {"microbatches_per_fetch": 2},
    "pairs": ALL | {"config": dataclasses.replace(CONFIG, num_hidden_layers=6)},
    "alternating": ALL
    | {"config": dataclasses.replace(CONFIG, sliding_window=4, sliding_window_pattern=2, num_hidden_layers=5)}
    | {"devices": 2, "zero_level": 3, "resident_layers": 1},
    "fp8_quants": recipe("fp8_hybrid")
    | ALL
    | {"devices": 2, "zero_level": 3, "persistent_quants": True, "offload_quants": True, "model_dtype": "bfloat16"},
}


def bits(state) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(state)]


@pytest.mark.parametrize("case", quick_at([(case,) for case in CASES]))
def test_no_bit_changes(case):
    """Losses, norms and learning rates of every step, and the state where it is asked for: in the middle and at the
    end. After that a step begins with nothing pending."""
    plain = Small(**CASES[case])
    overlapped = Small(**CASES[case], overlap_update=True)
    for steps in (2, 1):
        for i in range(steps):
            batch = tokens(2, 8, 16, seed=10 * steps + i)
            expected, found = (step_of(small, batch) for small in (plain, overlapped))
            assert found == expected
        assert isinstance(overlapped.state, Pending)
        before = bits(overlapped.state.state)
        overlapped.state = up_to_date(overlapped.step, overlapped.state)
        assert bits(overlapped.state) == bits(plain.state) != before
    assert up_to_date(overlapped.step, overlapped.state) is overlapped.state


@pytest.mark.full
def test_random_numbers_of_a_step_are_those_of_its_number(monkeypatch):
    """The passes are told how many updates were before, whether the last one is applied in the same program or not."""
    plain = engine.loss_and_gradients

    def told(*arguments, progress, **others):
        found = plain(*arguments, progress=progress, **others)
        return found._replace(metrics=found.metrics | {"loss": jnp.asarray(progress.step, jnp.float32)})

    monkeypatch.setattr(engine, "loss_and_gradients", told)
    one_layer = dataclasses.replace(CONFIG, num_hidden_layers=1)
    for overlap_update in (False, True):
        small = Small(**STATE, config=one_layer, overlap_update=overlap_update)
        batch = tokens(1, 2, 8)
        assert [step_of(small, batch)["loss"] for _ in range(3)] == [0, 1, 2]
        small.state = up_to_date(small.step, small.state)
        assert [step_of(small, batch)["loss"] for _ in range(2)] == [3, 4]


@pytest.mark.full
def test_long_passes_change_no_bit_either(monkeypatch):
    """Those that outlast the transfers have them in another order."""
    monkeypatch.setattr(stream, "HIDING_TOKENS", 0)
    test_no_bit_changes("pairs")


def step_of(small: Small, batch) -> dict[str, float]:
    """The metrics of a step."""
    small.state, metrics = small.step(small.state, *small.put(batch))
    return {name: float(x) for name, x in metrics.items()}


GIVEN = STATE | {"overlap_update": True}


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"offload_grads": False},
            "offload_grads: expected True with overlap_update=True, .* got False; set it, or leave",
        ),
        (
            {"offload_master": "nvme", "nvme_path": "/tmp"},
            "offload_master: expected True or False with overlap_update=True",
        ),
        (
            {"offload_master": False, "offload_optimizer": False},
            "overlap_update: expected False without offload_optimizer and offload_master, whose tr",
        ),
        ({"pp_size": 2, "gpus": 2}, "pp_size: expected 1 with overlap_update=True, .* got 2; leave one of them out"),
    ],
)
def test_what_it_is_not_built_for_is_refused(changes, message):
    c = default_config()
    c.update(GIVEN)
    checks.check(c)
    c.update(changes)
    with pytest.raises(ConfigError, match=f"^{message}"):
        checks.check(c)


def test_assembled_without_a_config_it_is_refused_too():
    with pytest.raises(ConfigError, match=r"^overlap_update: expected offload_grads"):
        Small(offload_master=True, overlap_update=True)
