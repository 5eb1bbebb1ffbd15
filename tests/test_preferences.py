"""Objectives of pairs of answers: losses and gradients against textbooks and TRL, on every mesh and placement."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import CONFIG, Small, drawn_params, plain_model, quick_at, target_names, worst_relative

from surojax.models import decoder_model
from surojax.models.lora import Lora, without_adapters
from surojax.objectives.kto import KtoLoss, KtoSettings
from surojax.objectives.objective import STARTS, OfSequences, Sequences, at_tokens, num_groups, of_sequences
from surojax.objectives.objectives import OBJECTIVES
from surojax.objectives.preferences import PairLoss, PreferenceSettings, dpo, ipo, log1mexp, orpo, simpo
from surojax.step.train_step import make_gradients, make_train_step

REFERENCE = json.loads((Path(__file__).parent / "fixtures" / "preference_reference.json").read_text())
A, B, S = 2, 8, 16  # 8 pairs: two of a device's rows are at least one
ORDER_OF_SUMS = 1e-5  # float32, in another order
SETTINGS = {
    "dpo": {"beta": 0.3, "label_smoothing": 0.1, "loss_type": "sigmoid", "reference_free": False},
    "dpo-hinge": {"beta": 0.3, "label_smoothing": 0.0, "loss_type": "hinge", "reference_free": False},
    "dpo-free": {"beta": 0.3, "label_smoothing": 0.0, "loss_type": "sigmoid", "reference_free": True},
    "ipo": {"beta": 0.3, "reference_free": False},
    "orpo": {"beta": 0.3},
    "simpo": {"beta": 2.0, "simpo_gamma": 0.7},
    "kto": {"beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.5, "precompute_ref_log_probs": True},
}


def objective(name: str, **changes) -> OfSequences:
    found = OBJECTIVES[name.partition("-")[0]].make(SETTINGS[name] | changes)
    assert isinstance(found, OfSequences)
    return found


def batch(seed: int = 0, rows: tuple[int, int] = (A, B)) -> list[np.ndarray]:
    """inputs, labels, references: prompts of a pair are alike, answers and padding differ in length."""
    rng = np.random.default_rng(seed)
    inputs = rng.integers(1, 64, (*rows, S)).astype(np.int32)
    labels = np.full((*rows, S), -1, np.int32)
    reference = np.zeros((*rows, S), np.float32)
    for a in range(rows[0]):
        for b in range(0, rows[1], 2):
            start = rng.integers(1, 6)
            inputs[a, b + 1, : start + 1] = inputs[a, b, : start + 1]
            for row in (b, b + 1):
                end = rng.integers(start + 1, S - 1)
                labels[a, row, start:end] = inputs[a, row, start + 1 : end + 1]
                inputs[a, row, end + 1 :] = 0
                reference[a, row, start:end] = -4 + rng.standard_normal(end - start)
    return [inputs, labels, reference]


@pytest.mark.parametrize("case", REFERENCE["cases"])
def test_losses_gradients_and_rewards_are_those_of_trl(case):
    """Recorded by fixtures/make_preference_reference.py. Of ORPO the term of the odds ratio, whose factor is beta."""
    settings = {
        "dpo-smoothed": PreferenceSettings(beta=0.3, label_smoothing=0.1),
        "dpo-hinge": PreferenceSettings(beta=0.3, loss_type="hinge"),
        "simpo": PreferenceSettings(beta=2.0, simpo_gamma=0.7),
    }.get(case, PreferenceSettings(beta=0.3))
    scores = {"dpo-smoothed": dpo, "dpo": dpo, "dpo-hinge": dpo, "ipo": ipo, "simpo": simpo, "orpo-odds": orpo}[case]
    pairs = len(REFERENCE["lengths"]) // 2

    def in_turn(rows: list[float]) -> np.ndarray:
        """Chosen and rejected answers by turns, of TRL's rows, which have all chosen answers first."""
        return np.asarray(rows, np.float32).reshape(2, pairs).T.reshape(-1)

    reference, lengths = in_turn(REFERENCE["reference"]), in_turn(REFERENCE["lengths"])
    loss = PairLoss(scores, settings, ("reference",))

    def mean(logprob):
        sums = loss(Sequences(logprob, lengths, reference))
        of_chosen = jnp.sum((logprob / lengths)[::2]) if case == "orpo-odds" else 0.0
        return (sums["loss"] + of_chosen) / pairs, sums

    (found, sums), gradient = jax.jit(jax.value_and_grad(mean, has_aux=True))(in_turn(REFERENCE["logprob"]))
    expected = REFERENCE["cases"][case]
    np.testing.assert_allclose(found, expected["loss"], rtol=1e-5)
    np.testing.assert_allclose(gradient, in_turn(expected["gradient"]), rtol=1e-4, atol=1e-6)
    for name, value in expected.get("metrics", {}).items():
        np.testing.assert_allclose(sums[name] / pairs, value, rtol=1e-5)


@pytest.mark.parametrize("case", range(len(REFERENCE["kto"])))
def test_kto_is_that_of_trl(case):
    """Loss, gradients (none of mismatched rows) and divergence, which is cut off at 0 in the last case."""
    expected = REFERENCE["kto"][case]
    settings = KtoSettings(*[(1.0, 1.0), (1.5, 0.5), (1.0, 1.0)][case])
    lengths = np.float32(REFERENCE["lengths"])
    n = len(lengths) // 2
    more = np.where(np.arange(2 * n) < n, 0, expected["more"] * lengths)

    def in_turn(rows) -> jax.Array:
        return jnp.asarray(rows, jnp.float32).reshape(2, n).T.reshape(-1)

    desirable = in_turn(2 * [1.0 if good else -1.0 for good in REFERENCE["desirable"]])
    others = in_turn(lengths), in_turn(REFERENCE["reference"]), desirable

    def mean(logprob):
        sums = KtoLoss(0.3, settings)(Sequences(logprob, *others))
        return sums["loss"] / n, sums

    (loss, sums), gradient = jax.value_and_grad(mean, has_aux=True)(in_turn(np.add(REFERENCE["logprob"], more)))
    np.testing.assert_allclose(loss, expected["loss"], rtol=1e-5)
    np.testing.assert_allclose(gradient[::2], expected["gradient"], rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(gradient[1::2], 0)
    np.testing.assert_allclose(sums["kl"] / n, expected["kl"], rtol=1e-5)
    assert (expected["kl"] > 0) == (case < 2)


def with_objective(small: Small, of_run: OfSequences):
    return dataclasses.replace(small.engine, objective=of_run)


def arrays(of_run: OfSequences, whole: list[np.ndarray]) -> list[np.ndarray]:
    """The batch's arrays; every second answer is desirable."""
    desirable = np.zeros((*whole[1].shape[:2], S), np.float32)
    desirable[..., 2] = np.where(np.arange(desirable.shape[1]) % 4 < 2, 1, -1)  # only the sign of the sum is read
    return [*whole, desirable][: 1 + len(of_run.targets)]


def found(of_run: OfSequences, whole: list[np.ndarray], devices: int = 1, **options):
    """(loss, gradients) of the engine."""
    return of_arrays(of_run, arrays(of_run, whole), devices, **options)


def of_arrays(of_run: OfSequences, given: list[np.ndarray], devices: int = 1, **options):
    """(loss, gradients) of the engine for all arrays of a batch."""
    small = Small(devices, **options)
    engine = with_objective(small, of_run)
    gradients = make_gradients(engine, small.optimizer, small.plan, small.mesh)
    state = small.state
    loss, grads = gradients(state.weights, state.progress, *small.put(given))
    return float(loss), jax.device_get(grads)


def log_sigmoid(x):
    return -jnp.logaddexp(0.0, -x)


def textbook(name: str, c, r, n_c, n_r, ref_c, ref_r):
    """The loss of one pair from sums of log-probabilities and numbers of tokens."""
    s = SETTINGS[name]
    beta = s["beta"]
    if name == "dpo-free":
        ref_c = ref_r = 0.0
    margin = (c - ref_c) - (r - ref_r)
    if name == "dpo":
        e = s["label_smoothing"]
        return -(1 - e) * log_sigmoid(beta * margin) - e * log_sigmoid(-beta * margin)
    if name == "dpo-hinge":
        return jnp.maximum(0.0, 1 - beta * margin)
    if name == "dpo-free":
        return -log_sigmoid(beta * margin)
    if name == "ipo":
        return ((c - ref_c) / n_c - (r - ref_r) / n_r - 1 / (2 * beta)) ** 2
    if name == "simpo":
        return -log_sigmoid(beta * (c / n_c - r / n_r) - s["simpo_gamma"])
    p_c, p_r = jnp.exp(c / n_c), jnp.exp(r / n_r)
    odds_c, odds_r = p_c / (1 - p_c), p_r / (1 - p_r)
    return -c / n_c - beta * log_sigmoid(jnp.log(odds_c / odds_r))


def by_hand(name: str, whole: list[np.ndarray], reference_is_policy: bool = False):
    """(loss, gradients) of the plain model with autodiff, one pair at a time."""
    inputs, labels, reference = (x.reshape(-1, S) for x in whole)
    is_label = labels >= 0

    def logprobs(params):
        logits = plain_model(CONFIG)(params, inputs)
        nats = jax.nn.log_softmax(logits, axis=-1)
        of_labels = jnp.take_along_axis(nats, np.maximum(labels, 0)[..., None], axis=-1)[..., 0]
        return jnp.sum(jnp.where(is_label, of_labels, 0.0), axis=1)

    params = drawn_params(CONFIG, 0)
    references = logprobs(params) if reference_is_policy else np.where(is_label, reference, 0).sum(1)
    tokens = is_label.sum(1)

    def kto(rows):
        s = SETTINGS["kto"]
        microbatches = (rows - references).reshape(A, -1, 2)
        total = 0.0
        for microbatch in microbatches:
            kl = jnp.maximum(jax.lax.stop_gradient(microbatch[:, 1].mean()), 0.0)
            for i, r in enumerate(microbatch[:, 0]):
                good = s["desirable_weight"] * (1 - jax.nn.sigmoid(s["beta"] * (r - kl)))
                bad = s["undesirable_weight"] * (1 - jax.nn.sigmoid(s["beta"] * (kl - r)))
                total += good if i % 2 == 0 else bad
        return total / (len(rows) // 2)

    def loss(params):
        rows = logprobs(params)
        if name == "kto":
            return kto(rows)
        pairs = [
            textbook(name, rows[i], rows[i + 1], tokens[i], tokens[i + 1], references[i], references[i + 1])
            for i in range(0, len(tokens), 2)
        ]
        return sum(pairs) / len(pairs)

    value, grads = jax.jit(jax.value_and_grad(loss))(params)
    return float(value), jax.device_get(grads), np.asarray(references)


@pytest.mark.full
@pytest.mark.parametrize("name", quick_at([(name,) for name in SETTINGS], 0))
def test_loss_and_gradients_are_the_textbooks(name):
    whole = batch()
    whole[2] -= np.float32(5 * (whole[1] >= 0)) if name == "kto" else 0  # so that its divergence is not 0
    loss, grads = found(objective(name), whole)
    expected, expected_grads, _ = by_hand(name, whole)
    assert loss == pytest.approx(expected, rel=ORDER_OF_SUMS)
    assert worst_relative(grads, expected_grads) < ORDER_OF_SUMS


@pytest.mark.full
@pytest.mark.parametrize("devices, options", [(4, {"cp_size": 2, "zero_level": 2}), (2, {"pp_size": 2})])
def test_what_pairs_of_several_devices_report_is_that_of_one(devices, options):
    """Loss, gradients, and all that is reported. A pair is on one device of the data-parallel ones."""
    of_run = objective("dpo")
    loss, grads = found(of_run, batch())
    other, other_grads = found(of_run, batch(), devices, **options)
    other_grads = jax.tree.map(lambda x, y: x[: len(y)], other_grads, grads)  # uneven stages are padded
    assert other == pytest.approx(loss, rel=ORDER_OF_SUMS)
    assert worst_relative(other_grads, grads) < ORDER_OF_SUMS
    assert reported(of_run, devices, **options) == pytest.approx(reported(of_run), rel=1e-4)


@pytest.mark.full
@pytest.mark.parametrize(
    "devices, options",
    [
        (4, {"cp_size": 2}),
        (4, {"ep_size": 2}),
    ],
)
def test_the_divergence_of_kto_is_of_all_devices(devices, options):
    """Its mean over a microbatch is that of one device; the reference is below the policy, so that it is not 0."""
    of_run = objective("kto")
    whole = batch()
    whole[2] -= np.float32(5 * (whole[1] >= 0))
    loss, grads = found(of_run, whole)
    other, other_grads = found(of_run, whole, devices, **options)
    assert other == pytest.approx(loss, rel=ORDER_OF_SUMS)
    assert worst_relative(jax.tree.map(lambda x, y: x[: len(y)], other_grads, grads), grads) < ORDER_OF_SUMS


def reported(of_run: OfSequences, devices: int = 1, **options) -> dict[str, float]:
    small = Small(devices, **options)
    step = make_train_step(with_objective(small, of_run), small.optimizer, small.plan, small.mesh)
    _, metrics = step(small.state, *small.put(arrays(of_run, batch())))
    return {name: float(value) for name, value in metrics.items()}


@pytest.mark.full
def test_the_first_loss_is_log_2_and_its_gradients_are_not_zero():
    """A reference that is the policy: the textbook's gradients, among which none is zero."""
    of_run = objective("dpo", label_smoothing=0.0)
    whole = batch()
    references = by_hand("dpo", whole, reference_is_policy=True)[2].reshape(A, B)
    whole[2] = np.zeros_like(whole[2])
    whole[2][..., 3] = references  # only the sum over a sequence is read
    loss, grads = found(of_run, whole)
    assert loss == pytest.approx(np.log(2), rel=1e-6)
    expected = by_hand("dpo", batch(), reference_is_policy=True)[1]
    smoothed = 1 - 2 * SETTINGS["dpo"]["label_smoothing"]  # at a margin of 0, smoothing is a factor of the gradients
    assert worst_relative(grads, jax.tree.map(lambda g: g / smoothed, expected)) < 2 * ORDER_OF_SUMS
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(grads))


@pytest.mark.full
def test_accumulation_padding_and_prompts_change_nothing():
    """16 rows in two microbatches, in one with two rows that only fill up, and with other padding and longer rows."""
    of_run = objective("dpo")
    whole = batch()
    loss, grads = found(of_run, whole)
    fill = [np.zeros((1, 2, S), np.int32), np.full((1, 2, S), -1, np.int32), np.zeros((1, 2, S), np.float32)]
    together = [np.concatenate([x.reshape(1, A * B, S), more], 1) for x, more in zip(whole, fill, strict=True)]
    tails = [np.full((A, B, 8), fill, x.dtype) for x, fill in zip(whole, (7, -1, 0.0), strict=True)]
    longer = [np.concatenate([x, tail], -1) for x, tail in zip(whole, tails, strict=True)]
    for other in (together, longer):
        other_loss, other_grads = found(of_run, other)
        assert other_loss == pytest.approx(loss, rel=ORDER_OF_SUMS)
        assert worst_relative(other_grads, grads) < ORDER_OF_SUMS


@pytest.mark.full
@pytest.mark.parametrize("name", quick_at([("dpo",), ("kto",), ("orpo",)], 0))
def test_several_pairs_in_a_row_are_those_in_rows_of_their_own(name):
    """Two of them, at the same positions of the chosen answers' row and of the rejected ones'; one has no label."""
    of_run = objective(name)
    whole = batch()
    whole[1][0, 2:4] = -1
    whole[2] -= np.float32(5) * (whole[1] >= 0)  # so that the divergence of kto is not 0
    loss, grads = found(of_run, whole)
    starts = np.broadcast_to(np.repeat(np.int32([0, S]), S), (A, B // 2, 2 * S))
    rows = [joined(x) for x in arrays(of_run, whole)]
    other, other_grads = of_arrays(of_run, [*rows, starts], packed=True)
    assert other == pytest.approx(loss, rel=ORDER_OF_SUMS)
    assert worst_relative(other_grads, grads) < ORDER_OF_SUMS


def joined(x: np.ndarray) -> np.ndarray:
    """Rows `[A, B / 2, 2 S]` with two sequences each: of two pairs, both chosen answers, then both rejected ones."""
    return x.reshape(A, B // 4, 2, 2, S).swapaxes(2, 3).reshape(A, B // 2, 2 * S)


@pytest.mark.full
def test_accumulation_over_uneven_numbers_of_pairs_is_one_batch():
    """Four pairs in a microbatch and two in the next, which is filled up, as six in one: a mean over pairs."""
    of_run = objective("dpo")
    whole = batch()
    for x, nothing in zip(whole, (0, -1, 0.0), strict=True):
        x[1, 4:] = nothing
    loss, grads = found(of_run, whole)
    other_loss, other_grads = found(of_run, [x.reshape(1, A * B, S)[:, :12] for x in whole])
    assert other_loss == pytest.approx(loss, rel=ORDER_OF_SUMS)
    assert worst_relative(other_grads, grads) < ORDER_OF_SUMS


def test_the_odds_of_an_answer_that_is_certain_are_finite():
    """log(1 - p) of p near 1 and near 0, against float64; at p = 1, where it has no value, a number and a gradient."""
    x = np.array([-1e-6, -1e-3, -0.5, -0.7, -3.0, -30.0])
    np.testing.assert_allclose(jax.jit(log1mexp)(np.float32(x)), np.log1p(-np.exp(x)), rtol=1e-5)
    value, gradient = jax.jit(jax.value_and_grad(log1mexp))(np.float32(0.0))
    assert np.isfinite(value) and np.isfinite(gradient)


def minus_log_sigmoid(x):
    return np.logaddexp(0.0, -x)


def log_odds(mean):
    return mean - np.log(-np.expm1(mean))


# (objective, options changed, loss of float64 (log-ratios or log-probabilities of both answers, tokens of both)).
FAR = {
    "dpo": ({"label_smoothing": 0.0}, lambda c, r, n, m: minus_log_sigmoid(0.3 * (c - r))),
    "dpo-smoothed": (
        {"label_smoothing": 0.1},
        lambda c, r, n, m: 0.9 * minus_log_sigmoid(0.3 * (c - r)) + 0.1 * minus_log_sigmoid(0.3 * (r - c)),
    ),
    "dpo-hinge": ({}, lambda c, r, n, m: np.maximum(0, 1 - 0.3 * (c - r))),
    "ipo": ({}, lambda c, r, n, m: (c / n - r / m - 1 / 0.6) ** 2),
    "orpo": ({}, lambda c, r, n, m: -c / n + 0.3 * minus_log_sigmoid(log_odds(c / n) - log_odds(r / m))),
    "simpo": ({}, lambda c, r, n, m: minus_log_sigmoid(2.0 * (c / n - r / m) - 0.7)),
}


@pytest.mark.parametrize("case", FAR)
def test_answers_that_are_far_apart(case):
    """Losses and gradients in float64, whichever answer is the likelier one, by far or hardly."""
    changes, textbook = FAR[case]
    name = "dpo" if case == "dpo-smoothed" else case
    pairs = [(-3e4, -2.0), (-2.0, -3e4), (-400.0, -9.0), (-9.0, -400.0), (-7.0, -8.0), (-0.01, -50.0), (-50.0, -0.01)]
    chosen, rejected = np.array(pairs).T
    tokens = np.tile([4.0, 7.0], len(pairs))
    reference = np.tile([-5.0, -6.0], len(pairs)) if "dpo" in name or name == "ipo" else np.zeros(2 * len(pairs))
    loss = objective(name, **changes).loss

    def total(logprob):
        return loss(Sequences(logprob, jnp.float32(tokens), jnp.float32(reference)))["loss"]

    def of_float64(logprob):
        ratio = logprob - reference
        return textbook(ratio[::2], ratio[1::2], tokens[::2], tokens[1::2])

    logprob = np.stack([chosen, rejected], axis=1).reshape(-1)
    logprob = np.float64(np.float32(logprob))
    found, gradient = jax.jit(jax.value_and_grad(total))(np.float32(logprob))
    np.testing.assert_allclose(found, of_float64(logprob).sum(), rtol=1e-5)
    for i in range(logprob.size):
        step = 1e-6 * (np.arange(logprob.size) == i) * np.maximum(1, np.abs(logprob[i]) * 1e-2)
        slope = ((of_float64(logprob + step) - of_float64(logprob - step)).sum()) / (2 * step[i])
        np.testing.assert_allclose(gradient[i], slope, rtol=1e-3, atol=1e-4)


# -- With adapters, the reference is the same fetched layer without them -----------------------------------------------

LORA = Lora(rank=4, alpha=8.0, targets=target_names("all-linear"))


def adapted(devices: int = 1, *, reference: bool, lora: Lora = LORA, **options):
    """(a run of a model with adapters, its engine of DPO)."""
    small = Small(devices, config=dataclasses.replace(CONFIG, lora=lora), **options)
    beside = decoder_model.build(CONFIG, small.run.model.compute) if reference else None
    return small, dataclasses.replace(small.engine, objective=objective("dpo", label_smoothing=0.0), reference=beside)


@pytest.mark.full
@pytest.mark.parametrize(
    "devices, options",
    [
        (1, {}),
        (4, {"zero_level": 3, "offload_weights": True, "microbatches_per_fetch": 2}),
        (2, {"tp_size": 2}),
        (1, {"lora": dataclasses.replace(LORA, magnitudes=True)}),
    ],
)
def test_a_reference_in_the_same_pass_is_the_model_without_adapters(devices, options):
    """Loss and gradients are those with the base's own log-probabilities in the batch; b is not 0, so they differ."""
    lora = options.pop("lora", LORA)
    small, engine = adapted(devices, reference=True, lora=lora, **options)
    whole = batch()
    params = jax.tree.map(np.asarray, small.state.weights)
    base = {"blocks": without_adapters(params["blocks"]), "outer": params["outer"]}
    base = jax.tree.map(lambda x, plan: x[: plan.shape[0]], base, drawn_params(CONFIG, 0))
    rows = [x.reshape(-1, S) for x in whole]
    nats = jax.nn.log_softmax(plain_model(CONFIG)(base, rows[0]), axis=-1)
    of_labels = np.take_along_axis(np.asarray(nats), np.maximum(rows[1], 0)[..., None], axis=-1)[..., 0]
    whole[2] = np.where(rows[1] >= 0, of_labels, 0).astype(np.float32).reshape(A, B, S)
    other, given = adapted(reference=False, lora=lora)
    results = []
    for run, of_run, arrays in ((small, engine, whole[:2]), (other, given, whole)):
        assert len(of_run.batch_arrays) == len(arrays)
        gradients = make_gradients(of_run, run.optimizer, run.plan, run.mesh)
        state = run.state
        loss, grads = gradients(state.weights, state.progress, *run.put(arrays))
        results.append((float(loss), jax.device_get(grads)))
    (loss, grads), (expected, expected_grads) = results
    assert abs(loss - np.log(2)) > 1e-3 and loss == pytest.approx(expected, rel=ORDER_OF_SUMS)
    assert worst_relative(grads, expected_grads) < 2 * ORDER_OF_SUMS


def test_numbers_of_sequences_in_a_row():
    """Rows of two sequences: sums of each at its first token's place, at its tokens, and how many count."""
    targets = {STARTS: jnp.int32([[0, 0, 0, 3, 3], [0, 0, 2, 2, 2]])}
    counted = jnp.bool([[1, 1, 0, 0, 0], [0, 1, 1, 1, 1]])
    sums = [[2, 0, 0, 0, 0], [1, 0, 3, 0, 0]]
    for x in (counted, counted.astype(jnp.float32)):
        found = of_sequences(x, targets)
        assert found.dtype == jnp.float32 and np.array_equal(found, sums)
    assert np.array_equal(at_tokens(found, targets), [[2, 2, 2, 0, 0], [1, 1, 3, 3, 3]])
    rows = of_sequences(counted, {})
    assert rows.dtype == jnp.float32 and np.array_equal(rows, [[2], [4]])
    assert at_tokens(rows, {}) is rows
    assert num_groups(counted, targets, 1) == 3 and num_groups(counted, targets, 2) == 2
    assert num_groups(counted, {}, 1) == 2 and num_groups(counted, {}, 2) == 1


def test_pairs_without_a_reference_have_none_of_its_numbers():
    settings = PreferenceSettings(beta=0.5)
    numbers = [jnp.float32([[-1.0], [-3.0]]), jnp.float32([[2.0], [3.0]])]
    zeros = PairLoss(dpo, settings)(Sequences(*numbers, jnp.zeros((2, 1))))
    assert PairLoss(dpo, settings)(Sequences(*numbers, None)) == zeros
    assert zeros["loss"] == pytest.approx(-np.log(1 / (1 + np.exp(-1.0)))) and zeros["rewards/margins"] == 1
