"""Routers and their losses against formulas in numpy and float64, which share no code with them.

The placements' tests compare a divided batch with the same module in one piece (test_experts.py), and see no mistake
that both make.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small import CONFIG, quick_at

from surojax.models.kinds import experts
from surojax.models.model import Routing
from surojax.models.router_losses import RouterLosses, RouterStatistics

B, S, D, E, K = 2, 6, 32, 7, 3
BALANCE, Z = 0.3, 0.07
FIXED = {"num_experts": E, "num_experts_per_tok": K, "moe_intermediate_size": 8}
COUNTED = {
    "all": None,
    "some": np.arange(B * S).reshape(B, S) % 3 != 1,
    "one": np.arange(B * S).reshape(B, S) == 4,
    "none": np.zeros((B, S), bool),
}
SWITCHES = [dict(zip(("norm_topk_prob", "expert_bias"), on, strict=True)) for on in itertools.product((0, 1), repeat=2)]
CASES = [(scoring, counted, number) for scoring in experts.SCORING for counted in COUNTED for number in range(4)]


def drawn(sigmoid: bool, biased: bool) -> dict[str, np.ndarray]:
    """A router's arrays and its input, float64 numbers that float32 holds. Logits are about 2 in size."""
    rng = np.random.default_rng(0)
    arrays = {"x": rng.normal(size=(B, S, D)), "router": rng.normal(size=(E, D)) * 0.4}
    if biased:
        arrays["b_router"] = rng.normal(size=E)
    if sigmoid:
        arrays["b_choice"] = rng.normal(size=E) * 0.3
    return {name: array.astype(np.float32).astype(np.float64) for name, array in arrays.items()}


def log_sum_exp(logits: np.ndarray) -> np.ndarray:
    top = logits.max(axis=-1, keepdims=True)
    return np.log(np.exp(logits - top).sum(axis=-1, keepdims=True)) + top


def formulas(config, arrays: dict, counted: np.ndarray, chosen: np.ndarray | None = None) -> dict:
    """Everything that a router decides of each token, one token and one choice after the other."""
    logits = np.einsum("bsd,ed->bse", arrays["x"], arrays["router"]) + arrays.get("b_router", 0)
    if config.scoring_func == "sigmoid":
        scores = 1 / (1 + np.exp(-logits))
        ranked = scores + arrays["b_choice"]
        probabilities = scores / scores.sum(axis=-1, keepdims=True)
    else:
        scores = probabilities = np.exp(logits - log_sum_exp(logits))
        ranked = logits
    chosen = np.argsort(-ranked, axis=-1, kind="stable")[..., :K] if chosen is None else chosen
    weights = np.take_along_axis(scores, chosen, axis=-1)
    if config.norm_topk_prob:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    weights = weights * config.routed_scaling_factor
    times, probability, squared = np.zeros(E), np.zeros(E), 0.0
    for b, s in zip(*np.nonzero(counted), strict=True):
        for e in chosen[b, s]:
            times[e] += 1
        probability += probabilities[b, s]
        squared += log_sum_exp(logits[b, s])[0] ** 2
    n = max(counted.sum(), 1)
    loss = BALANCE * E * sum(times[e] / n * probability[e] / n for e in range(E)) + Z * squared / n
    return {"chosen": chosen, "weights": weights, "sums": (times, probability, squared), "loss": loss}


@pytest.mark.parametrize("scoring, counted, number", quick_at(CASES, *range(0, len(CASES), 3)))
def test_a_router_is_its_formulas(scoring, counted, number):
    """Choices, weights, sums over the tokens that count, losses, and the gradients of weights and losses."""
    factor = 2.5 if number % 3 else 1.0
    fields = FIXED | SWITCHES[number] | {"scoring_func": scoring, "routed_scaling_factor": factor}
    config = dataclasses.replace(CONFIG, **fields)
    arrays = drawn(scoring == "sigmoid", bool(fields["expert_bias"]))
    mask = np.ones((B, S), bool) if COUNTED[counted] is None else COUNTED[counted]
    graph, drawn_arrays = nnx.split(experts.Experts(config, rngs=nnx.Rngs(0)))
    others = nnx.to_pure_dict(drawn_arrays)
    cotangent = np.random.default_rng(1).normal(size=(B, S, K))

    def ours(operands):
        module = nnx.merge(graph, others | {name: array for name, array in operands.items() if name != "x"})
        given = None if COUNTED[counted] is None else jnp.asarray(mask)
        chosen, weights, statistics = module.route(operands["x"], Routing(given))
        stacked = jax.tree.map(lambda sums: sums[None], statistics)
        loss = RouterLosses(BALANCE, Z)({"blocks": stacked}, jnp.int32(mask.sum()))
        total = loss + jnp.sum(weights * jnp.asarray(cotangent, jnp.float32))
        return total, (chosen, weights, statistics, loss)

    operands = {name: jnp.asarray(array, jnp.float32) for name, array in arrays.items()}
    (_, (chosen, weights, statistics, loss)), grads = jax.value_and_grad(ours, has_aux=True)(operands)
    wanted = formulas(config, arrays, mask)
    assert np.array_equal(chosen, wanted["chosen"])
    np.testing.assert_allclose(weights, wanted["weights"], rtol=1e-5)
    for found, of_formulas in zip(statistics, wanted["sums"], strict=True):
        np.testing.assert_allclose(found, of_formulas, rtol=1e-5)
    np.testing.assert_allclose(loss, wanted["loss"], rtol=1e-5)

    def total(changed):
        found = formulas(config, changed, mask, wanted["chosen"])
        return found["loss"] + np.sum(found["weights"] * cotangent)

    rng = np.random.default_rng(2)
    for name, array in arrays.items():
        for direction in rng.normal(size=(3, *array.shape)):
            step = 1e-6 * direction
            slope = (total(arrays | {name: array + step}) - total(arrays | {name: array - step})) / 2e-6
            scale = np.linalg.norm(grads[name]) * np.linalg.norm(direction)
            assert abs(np.sum(np.float64(grads[name]) * direction) - slope) <= 1e-5 * scale, name


def test_losses_are_means_over_the_layers_of_all_segments():
    """Each weight alone, of segments of several sizes: the mean over layers, not over segments."""
    rng = np.random.default_rng(0)
    tokens = 50
    layers = [(rng.integers(0, 40, E), rng.random(E) * 9, rng.random() * 100) for _ in range(3)]
    of = lambda part: RouterStatistics(*(jnp.asarray(np.stack(x), jnp.float32) for x in zip(*part, strict=True)))
    statistics = {"dense": of(layers[:1]), "blocks": of(layers[1:])}
    balance = np.mean([E * np.sum(chosen / tokens * (p / tokens)) for chosen, p, _ in layers])
    z = np.mean([squared / tokens for *_, squared in layers])
    for weights in ((0.3, 0.0), (0.0, 0.07), (0.3, 0.07)):
        found = RouterLosses(*weights)(statistics, jnp.int32(tokens))
        np.testing.assert_allclose(found, weights[0] * balance + weights[1] * z, rtol=1e-6)
