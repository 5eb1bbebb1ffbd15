"""Experts that tokens were sent to when they were sampled, written with rollouts and replayed in training."""

import base64
import dataclasses
import json
from typing import Any

import jax
import numpy as np
import pytest
from commands import generate
from small import CONFIG, Small, needs, quick_at
from test_grpo import ORDER_OF_SUMS, ROW, A, B, S, batch, config, engine_of, settings

from surojax import ConfigError, train
from surojax.data.__main__ import prepare
from surojax.data.data_rows import BadRow, DataRow
from surojax.data.examples import Example
from surojax.data.rollouts import ROUTES as IN_EXAMPLE, RolloutEncoder, TokenRoutes
from surojax.data.tokenizer import ByteTokenizer
from surojax.inference.sample import rollout
from surojax.inference.trained_model import Trained
from surojax.models import decoder_model
from surojax.objectives.grpo import Grpo
from surojax.objectives.objective import LABELS, ROUTES
from surojax.step.train_step import make_eval_step

K, E = 2, 6
# The first layer has no router; the bias decides which experts a token is sent to, and weighs nothing.
EXPERTS = dataclasses.replace(
    CONFIG,
    num_hidden_layers=4,
    num_experts=E,
    num_experts_per_tok=K,
    moe_intermediate_size=16,
    scoring_func="sigmoid",
    norm_topk_prob=True,
    first_k_dense_replace=1,
    n_shared_experts=1,
)
L = EXPERTS.num_hidden_layers
CHOSEN = np.array([[0, 0], [4, 1], [0, 5], [3, 2]])  # of all tokens, by layer
OF_RUN = Grpo(dataclasses.replace(settings(), grpo_beta=0.0), L, K)
REPLAYED = dataclasses.replace(OF_RUN, settings=dataclasses.replace(OF_RUN.settings, router_replay=True))


def placed(devices: int = 1, *, replays: bool, chosen=None, **options) -> tuple[Small, list[np.ndarray]]:
    """A step, and the arrays of its batch. chosen: experts that the routers' biases make all tokens choose."""
    small = Small(devices, config=EXPERTS, objective=REPLAYED if replays else OF_RUN, batch=(A, B, S), **options)
    if chosen is not None:
        bias = small.state.weights["blocks"]["mlp"]["b_choice"]
        forced = np.zeros(bias.shape, np.float32)
        np.put_along_axis(forced, chosen[1:], 100.0, axis=1)
        weights = jax.tree.map(lambda x: x, small.state.weights)  # the state is shared with other tests
        weights["blocks"]["mlp"]["b_choice"] = jax.device_put(forced, bias.sharding)
        small.state = small.state._replace(weights=weights)
    arrays = batch() | {ROUTES: np.broadcast_to(np.float32(CHOSEN.ravel()), (A, B, S, L * K))}
    return small, [arrays[name] for name in small.engine.batch_arrays]


def trained(*how, **options) -> dict[str, float]:
    small, arrays = placed(*how, **options)
    metrics = small.step(small.state, *small.put(arrays))[1]
    return {name: float(metrics[name]) for name in ("loss", "grad_norm")}


def evaluated(**options) -> float:
    return loss_of(*placed(**options))


def loss_of(small: Small, arrays: list[np.ndarray]) -> float:
    """The loss by a program that only evaluates."""
    engine = engine_of(small, small.engine.objective)
    sums, terms = make_eval_step(engine, small.plan, small.mesh)(
        small.state.weights, *small.put([x[0] for x in arrays])
    )
    return float(sums["loss"]) / float(terms)


def test_tokens_are_sent_to_the_experts_of_their_layer():
    """As by routers that can choose no others, with the weights of the model's own scores."""
    assert trained(replays=True) == pytest.approx(trained(replays=False, chosen=CHOSEN), rel=1e-6)
    assert trained(replays=True) != pytest.approx(trained(replays=False), rel=1e-4)
    assert evaluated(replays=True) == pytest.approx(evaluated(replays=False, chosen=CHOSEN), rel=1e-6)


NVME = dict.fromkeys([f"offload_{name}" for name in ("residual", "optimizer", "master", "grads", "weights")], "nvme")
PLACED: list[tuple[int, dict[str, Any]]] = [
    (1, {"recompute_block": False}),
    (1, {"microbatches_per_fetch": 2, "offload_residual": True}),
    (1, {"sequence_chunks": 2}),
    (1, NVME),
    (4, {"zero_level": 3, "cp_size": 2}),
    (4, {"zero_level": 3, "tp_size": 2, "ep_size": 2}),
    (4, {"zero_level": 3, "ep_size": 2}),
]


@pytest.mark.parametrize("devices, options", quick_at(PLACED, 0))
def test_on_every_axis_and_in_every_memory(devices, options, tmp_path):
    expected = trained(replays=True)
    options = options | ({"nvme_path": str(tmp_path)} if options is NVME else {})
    if "sequence_chunks" in options:
        compute = decoder_model.Compute(sequence_chunks=options.pop("sequence_chunks"))
        options["compute"] = compute
    assert trained(devices, replays=True, **options) == pytest.approx(expected, rel=ORDER_OF_SUMS)


@needs(2)
@pytest.mark.parametrize("schedule", quick_at([("gpipe",), ("1f1b",)], 1))
def test_every_stage_replays_the_experts_of_its_own_layers(schedule):
    """Which differ by layer, by token and by microbatch."""
    config = dataclasses.replace(EXPERTS, first_k_dense_replace=0)
    random = np.random.default_rng(0)
    chosen = random.permuted(np.broadcast_to(np.arange(E, dtype=np.float32), (A, B, S, L, E)), axis=-1)[..., :K]
    results = []
    for routes in (chosen, chosen[..., ::-1, :]):
        arrays = batch() | {ROUTES: np.ascontiguousarray(routes).reshape(A, B, S, L * K)}
        for devices, options in ((1, {}), (2, {"pp_size": 2, "pp_schedule": schedule})):
            small = Small(devices, config=config, objective=REPLAYED, batch=(A, B, S), **options)
            given = [arrays[name] for name in small.engine.batch_arrays]
            evaluation = loss_of(small, given)
            metrics = small.step(small.state, *small.put(given))[1]
            results.append([float(metrics["loss"]), float(metrics["grad_norm"]), evaluation])
    np.testing.assert_allclose(results[1::2], results[::2], rtol=ORDER_OF_SUMS)
    assert abs(results[0][1] / results[2][1] - 1) > 1e-3


def sampled(prompt=(5, 6, 7)) -> tuple[dict, dict]:
    """(a row of rollouts with experts, the weights of the model that sampled it)."""
    small, _ = placed(replays=False)
    weights = small.state.weights
    model = decoder_model.build(EXPERTS)
    options: dict[str, Any] = {"max_tokens": 6, "temperature": 1.0, "multiple_of": 8, "stop_ids": range(0, 64, 5)}
    return rollout(model, weights, np.int32(prompt), B, routed_experts=True, **options), weights


def test_rollouts_have_the_experts_that_a_step_would_choose():
    """A step with them is the step without, to the bit."""
    row, _ = sampled()
    encoder = RolloutEncoder(64, TokenRoutes(L, K, E, tuple(range(1, L))))
    found = encoder.item(DataRow(row | {"advantages": [1, -1, 0.5, 2]}, "")).content
    assert isinstance(found, Example)
    assert len({len(ids) for ids in row["completion_ids"]}) > 1
    bounds = [0, *found.ends, len(found.ids)]
    arrays = {name: np.zeros_like(x) for name, x in batch().items()} | {
        LABELS: np.full((A, B, S), -1, np.int32),
        ROUTES: np.zeros((A, B, S, L * K), np.float32),
    }
    for b in range(B):
        here = slice(bounds[b], bounds[b + 1] - 1)
        n = here.stop - here.start
        arrays["inputs"][:, b, :n] = found.ids[here]
        arrays[LABELS][:, b, 2:n] = found.ids[bounds[b] + 3 : bounds[b + 1]]
        arrays[ROUTES][:, b, :n] = found.numbers[IN_EXAMPLE][here]
        arrays["advantage"][:, b, 2:n] = b + 1
        arrays["sampled"][:, b, 2:n] = found.numbers["sampled"][bounds[b] + 3 : bounds[b + 1]]
    results = []
    for replays in (True, False):
        small, _ = placed(replays=replays)
        metrics = small.step(small.state, *small.put([arrays[name] for name in small.engine.batch_arrays]))[1]
        results.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    assert results[0] == results[1]
    routes = arrays[ROUTES].reshape(A, B, S, L, K)
    assert len({tuple(x) for x in routes[0, 0, :, 1].tolist()}) > 2  # tokens have other experts


EXPERTS_OF_ROW = [[[[0, 1]] * 2] * 3, [[[2, 1]] * 2] * 4, [[[1, 0]] * 2] * 2]  # [tokens - 1][layers][choices]
IN_BASE64 = [base64.b64encode(np.array(x, "<i4").tobytes()).decode() for x in EXPERTS_OF_ROW]


OF_TWO = TokenRoutes(layers=2, choices=2, experts=3, with_experts=(0, 1))


def read(record, routes: TokenRoutes | None = OF_TWO) -> Example | BadRow:
    return RolloutEncoder(64, routes).item(DataRow(record, "a.jsonl:7")).content


def test_experts_are_lists_or_base64():
    """The last token of a completion has none, since no program reads it."""
    lists, text = (read(ROW | {"routed_experts": x}) for x in (EXPERTS_OF_ROW, IN_BASE64))
    assert isinstance(lists, Example) and isinstance(text, Example)
    expected = [[0, 1, 0, 1]] * 3 + [[0] * 4] + [[2, 1, 2, 1]] * 4 + [[0] * 4] + [[1, 0, 1, 0]] * 2 + [[0] * 4]
    for found in (lists, text):
        np.testing.assert_array_equal(found.numbers[IN_EXAMPLE], expected)


BAD = [
    (None, "expected 'routed_experts', a list for each completion, got 'prompt_ids'"),
    (EXPERTS_OF_ROW[:2], "routed_experts: expected 3 lists, as many as completions, got 2"),
    ([EXPERTS_OF_ROW[0][:2], *EXPERTS_OF_ROW[1:]], "routed_experts[0]: expected numbers of experts [3, 2, 2] (tokens"),
    ([IN_BASE64[0][4:], *IN_BASE64[1:]], "routed_experts[0]: expected numbers of experts [3, 2, 2] (tokens but the"),
    ([IN_BASE64[0], "???", IN_BASE64[2]], "routed_experts[1]: expected numbers of experts [4, 2, 2] (tokens but the"),
    ([[[[0.5, 1]] * 2] * 3, *EXPERTS_OF_ROW[1:]], "routed_experts[0]: expected numbers of experts [3, 2, 2]"),
    ([[[[0, True]] * 2] * 3, *EXPERTS_OF_ROW[1:]], "routed_experts[0]: expected numbers of experts [3, 2, 2]"),
    ([[[[0, 3]] * 2] * 3, *EXPERTS_OF_ROW[1:]], "routed_experts[0]: expected experts 0 to 2, got 0 to 3; replay the"),
    ([[[[0, -1]] * 2] * 3, *EXPERTS_OF_ROW[1:]], "routed_experts[0]: expected experts 0 to 2, got -1 to 0; replay"),
    (
        [EXPERTS_OF_ROW[0], [[[2, 1], [0, 1]]] * 3 + [[[2, 1], [0, 0]]], EXPERTS_OF_ROW[2]],
        "routed_experts[1]: expected 2 different experts of each token, got [0, 0] of token 3 in layer 1; have the",
    ),
]


@pytest.mark.parametrize("value, reason", BAD)
def test_bad_experts_are_one_line(value, reason):
    found = read(ROW | {"routed_experts": value})
    assert isinstance(found, BadRow) and found.reason.startswith(reason) and "\n" not in found.reason


def test_what_is_said_of_layers_without_experts_is_not_read():
    rows = [[[[-1, -1], of_layer] for _, of_layer in x] for x in EXPERTS_OF_ROW]
    found = read(ROW | {"routed_experts": rows}, OF_TWO._replace(with_experts=(1,)))
    assert isinstance(found, Example)
    expected = [[0, 0, *of_layer] for x in EXPERTS_OF_ROW for of_layer in [*(x[1] for x in x), [0, 0]]]
    np.testing.assert_array_equal(found.numbers[IN_EXAMPLE], expected)


def test_experts_that_would_not_be_read_are_refused():
    found = read(ROW | {"routed_experts": EXPERTS_OF_ROW}, None)
    assert isinstance(found, BadRow) and "set router_replay to send tokens to them again" in found.reason
    assert isinstance(read(ROW | {"routed_experts": None}, None), Example)


MIXTURE = {"model.num_experts": 3, "model.num_experts_per_tok": 2, "router_replay": True, "eval_steps": 0}


PACKED = {"sample_packing": True, "sequence_len": 32, "per_device_batch_size": 2}
ONE = {"model.num_hidden_layers": 1, "model.num_experts_per_tok": 1}


@pytest.mark.full
@pytest.mark.parametrize(
    "fields, routes", [({}, EXPERTS_OF_ROW), (PACKED, IN_BASE64), (ONE, [[[[0]]] * 3, [[[2]]] * 4, [[[1]]] * 2])]
)
def test_a_run_reads_them_through_the_cache(fields, routes, tmp_path):
    """Each token's own, in rows of their own and packed, of one layer with one choice too."""
    c = config(tmp_path, max_steps=2)
    c.update_from_flattened_dict(MIXTURE | fields)
    file = tmp_path / "rollouts.jsonl"
    rows = [ROW | {"routed_experts": routes, "prompt_ids": [i + 10, 6]} for i in range(12)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    c.data = str(file)
    numbers = EXPERTS_OF_ROW if routes is IN_BASE64 else routes
    expected = {x: np.ravel(numbers[i][2]).tolist() for i, x in enumerate((7, 8, 3)) if len(numbers[i]) > 2}
    loaded, _ = prepare(c)
    seen = 0
    for sample in map(loaded.train.all.__getitem__, range(len(loaded.train.all))):
        for token, chosen in zip(sample["inputs"].tolist(), sample[IN_EXAMPLE].tolist(), strict=True):
            seen += token in expected
            assert token not in expected or chosen == expected[token]
    assert seen > 10
    losses = [x["loss"] for x in train(c).history if x["log"] == "step"]
    assert len(losses) == 2 and np.isfinite(losses).all()


def test_what_cannot_be_replayed_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="router_replay: expected False with num_experts=0"):
        train(config(tmp_path, router_replay=True), data=[ROW])
    for flags in (["--routed-experts"], ["--routed-experts", "--prompt", "x"]):
        with pytest.raises(SystemExit) as end:
            generate.main(["--checkpoint", "nowhere", *flags])
        assert "--routed-experts: expected --rollouts with it" in str(end.value)


@pytest.mark.full
def test_the_command_writes_rows_that_train_reads(tmp_path):
    small_model = dataclasses.replace(EXPERTS, vocab_size=320)
    model = decoder_model.build(small_model)
    trained = Trained(model, model.init(0), ByteTokenizer(), None)
    file = tmp_path / "rollouts.jsonl"
    options = {"chat": False, "system": "", "samples": 2, "seed": 0, "routed_experts": True, "max_tokens": 3}
    generate.write_rollouts(trained, ["ab", "c"], file, **options)
    encoder = RolloutEncoder(320, TokenRoutes(L, K, E, tuple(range(1, L))))
    for line in file.read_text().splitlines():
        found = encoder.item(DataRow(json.loads(line) | {"rewards": [1, 0]}, "")).content
        assert isinstance(found, Example) and found.numbers[IN_EXAMPLE].shape == (len(found.ids), L * K)
