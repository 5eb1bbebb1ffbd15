"""Reward models: the loss and its gradients against a textbook and TRL, on meshes and placements; data, files, runs."""

import dataclasses
import hashlib
import json
import re
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import convert
from small import CONFIG, Small, drawn_params, plain_model, target_names, worst_relative

from surojax import ConfigError, default_config
from surojax.assembly import from_config
from surojax.config import checks
from surojax.config.fields import Config
from surojax.data.cache import Corpus
from surojax.data.data_rows import BadRow, DataRow
from surojax.data.datasets import Dataset
from surojax.data.examples import Encoder, Example
from surojax.data.samples import windows_or_rows
from surojax.data.tokenizer import ByteTokenizer
from surojax.exchange import config_json, peft
from surojax.exchange.export import export
from surojax.exchange.model_tensors import Tensors, shapes, stacks
from surojax.exchange.sources import open_weights, resolved
from surojax.inference.parity import compare_with_transformers
from surojax.inference.trained_model import load_trained
from surojax.models import decoder_model
from surojax.models.lora import Lora, saved_names
from surojax.models.model import Model
from surojax.objectives.objectives import OBJECTIVES
from surojax.objectives.rewards import REWARD, Reward, RewardSettings
from surojax.planner import hlo, step_collectives, traffic
from surojax.step.train_step import make_gradients, make_train_step

FIXTURE = Path(__file__).parent / "fixtures" / "reward_reference.json"
RECORDED: dict[str, Any] = json.loads(FIXTURE.read_text()) if FIXTURE.exists() else {"losses": {}}  # made of `written`
A, B, S = 2, 8, 16  # 8 pairs: two of a device's rows are at least one
ORDER_OF_SUMS = 1e-5  # float32, in another order
SCORER = dataclasses.replace(CONFIG, num_labels=1)
LORA = Lora(rank=4, alpha=8.0, targets=target_names("q_proj,down_proj"), saved=saved_names("", num_labels=1))
ADAPTED = dataclasses.replace(SCORER, lora=LORA)
OBJECTIVE = Reward(RewardSettings(center_rewards_coefficient=0.3))


def batch(seed: int = 0, rows: tuple[int, int] = (A, B)) -> list[np.ndarray]:
    """inputs, labels, scored, margin: rows of different lengths, of which the last token may be no label."""
    rng = np.random.default_rng(seed)
    inputs = rng.integers(1, 64, (*rows, S)).astype(np.int32)
    labels = np.full((*rows, S), -1, np.int32)
    scored = np.zeros((*rows, S), np.int32)
    margin = np.zeros((*rows, S), np.float32)
    for index in np.ndindex(*rows):
        start, end = int(rng.integers(2, 5)), int(rng.integers(7, S))
        labels[index][start:end] = inputs[index][start + 1 : end + 1]
        scored[index][min(end + index[1] % 2, S - 1)] = 1
        margin[index][start] = rng.standard_normal() if index[1] % 2 == 0 else 0.0
    return [inputs, labels, scored, margin]


def found(whole: list[np.ndarray], devices: int = 1, *, config=SCORER, **options):
    """(loss, gradients) of the engine."""
    small = Small(devices, config=config, **options)
    engine = dataclasses.replace(small.engine, objective=OBJECTIVE)
    gradients = make_gradients(engine, small.optimizer, small.plan, small.mesh)
    state = small.state
    loss, grads = gradients(state.weights, state.progress, *small.put(whole))
    return float(loss), jax.device_get(grads)


def by_hand(whole: list[np.ndarray]):
    """(loss, gradients) of the plain model with autodiff: -log sigmoid(r - r' - margin) + 0.3 (r + r')^2 of a pair."""
    inputs, _, scored, margin = (x.reshape(-1, S) for x in whole)

    def loss(params):
        scores = plain_model(SCORER)(params, inputs)[..., 0]
        rewards = jnp.take_along_axis(scores, scored.argmax(1)[:, None], axis=1)[:, 0]
        chosen, rejected = rewards[::2], rewards[1::2]
        losses = jnp.logaddexp(0.0, -(chosen - rejected - margin.sum(1)[::2]))
        return jnp.mean(losses + 0.3 * (chosen + rejected) ** 2)

    value, grads = jax.jit(jax.value_and_grad(loss))(drawn_params(SCORER, 0))
    return float(value), jax.device_get(grads)


@pytest.mark.full
def test_loss_and_gradients_are_the_textbooks():
    loss, grads = found(batch())
    expected, expected_grads = by_hand(batch())
    assert loss == pytest.approx(expected, rel=ORDER_OF_SUMS)
    assert worst_relative(grads, expected_grads) < ORDER_OF_SUMS
    assert np.abs(grads["outer"]["score"]).max() > 0 and "head" not in grads["outer"]


PLACED = [  # (devices, placement); tests/test_drawn.py has others
    (4, {"cp_size": 2, "zero_level": 2}),
    (2, {"pp_size": 2}),
    (2, {"tp_size": 2, "config": ADAPTED}),
    (4, {"zero_level": 3, "offload_weights": True, "config": ADAPTED}),
]


@pytest.mark.full
@pytest.mark.parametrize("devices, options", PLACED)
def test_what_several_devices_report_is_that_of_one(devices, options):
    """Loss, gradients, and all that is reported. With adapters, the head is trained beside them."""
    config = options.get("config", SCORER)
    loss, grads = found(batch(), config=config)
    assert np.abs(grads["outer"]["score"]).max() > 0 and (config is SCORER or [*grads["outer"]] == ["score"])
    other, other_grads = found(batch(), devices, **options)
    other_grads = jax.tree.map(lambda x, y: x[: len(y)], other_grads, grads)  # uneven stages are padded
    assert other == pytest.approx(loss, rel=ORDER_OF_SUMS)
    assert worst_relative(other_grads, grads) < ORDER_OF_SUMS
    assert reported(devices, **options) == pytest.approx(reported(config=config), rel=1e-4)


@pytest.mark.full
def test_offloads_change_no_bit():
    loss, grads = found(batch())
    other, other_grads = found(batch(), offload_weights=True, offload_grads=True, offload_residual=True, zero_level=2)
    assert other == loss
    jax.tree.map(np.testing.assert_array_equal, other_grads, grads)


@pytest.mark.full
def test_a_group_sends_what_the_planner_says():
    """Of a compiled step, with a head that is on every device: its activations are not gathered."""
    small = Small(2, tp_size=2, config=SCORER)
    run = dataclasses.replace(small.run, engine=dataclasses.replace(small.engine, objective=OBJECTIVE))
    text = run.train_step().lower(run.plan, *small.put(batch())).compile().as_text()
    found = {(x.op, x.axis): x.bytes for x in hlo.collectives([(hlo.parse_module(text), 1)], small.mesh.shape)}
    expected = step_collectives.collective_bytes(run, traffic.BatchShape(sequences=B, sequence_len=S, microbatches=A))
    assert found.pop(("all-reduce", "tp")) == pytest.approx(expected.pop(("all-reduce", "tp")), abs=4 * 64)  # scalars
    assert found == expected


def reported(devices: int = 1, *, config=SCORER, **options) -> dict[str, float]:
    small = Small(devices, config=config, **options)
    engine = dataclasses.replace(small.engine, objective=OBJECTIVE)
    _, metrics = make_train_step(engine, small.optimizer, small.plan, small.mesh)(small.state, *small.put(batch()))
    return {name: float(value) for name, value in metrics.items()}


@pytest.mark.full
def test_several_pairs_in_a_row_are_those_in_rows_of_their_own():
    """Two of them, at the same positions of the chosen answers' row and of the rejected ones'."""
    loss, grads = found(batch())
    rows = [x.reshape(A, B // 4, 2, 2, S).swapaxes(2, 3).reshape(A, B // 2, 2 * S) for x in batch()]
    starts = np.broadcast_to(np.repeat(np.int32([0, S]), S), rows[0].shape)
    other, other_grads = found([*rows, starts], packed=True)
    assert other == pytest.approx(loss, rel=ORDER_OF_SUMS)
    assert worst_relative(other_grads, grads) < ORDER_OF_SUMS


@pytest.mark.full
def test_accumulation_over_uneven_pairs_is_one_batch_and_padding_changes_nothing():
    """Four pairs and two in the next microbatch, which is filled up, as six in one row, with longer rows."""
    whole = batch()
    for x, nothing in zip(whole, (0, -1, 0, 0.0), strict=True):
        x[1, 4:] = nothing
    loss, grads = found(whole)
    together = [x.reshape(1, A * B, S)[:, :12] for x in whole]
    tails = [np.full((1, 12, 8), fill, x.dtype) for x, fill in zip(whole, (7, -1, 0, 0.0), strict=True)]
    other_loss, other_grads = found([np.concatenate([x, tail], -1) for x, tail in zip(together, tails, strict=True)])
    assert other_loss == pytest.approx(loss, rel=ORDER_OF_SUMS)
    assert worst_relative(other_grads, grads) < ORDER_OF_SUMS


@pytest.mark.parametrize("case", RECORDED["losses"])
def test_losses_gradients_and_rewards_are_those_of_trl(case):
    """Recorded by fixtures/make_reward_reference.py, with all chosen answers first."""
    expected = RECORDED["losses"][case]
    objective = OBJECTIVES[REWARD].make({"center_rewards_coefficient": expected["center"]})
    assert isinstance(objective, Reward)
    pairs = len(RECORDED["rewards"]) // 2
    scored = np.zeros((2 * pairs, 4), np.int32)
    scored[:, 1] = 1
    margin = np.zeros((2 * pairs, 4), np.float32)
    margin[::2, 0] = expected["margin"]
    targets = {"labels": np.ones_like(scored), "scored": scored, "margin": margin}

    def in_turn(rows: list[float]) -> np.ndarray:
        return np.asarray(rows, np.float32).reshape(2, pairs).T.reshape(-1)

    def mean(rewards):
        sums = objective.sums(jnp.full(scored.shape, 7.0).at[:, 1].set(rewards), targets)
        return sums["loss"] / pairs, sums

    (loss, sums), gradient = jax.jit(jax.value_and_grad(mean, has_aux=True))(in_turn(RECORDED["rewards"]))
    np.testing.assert_allclose(loss, expected["loss"], rtol=1e-5)
    np.testing.assert_allclose(gradient, in_turn(expected["gradient"]), rtol=1e-4, atol=1e-6)
    for name, value in expected["metrics"].items():
        np.testing.assert_allclose(sums[name] / pairs, value, rtol=1e-5)


# -- Files -------------------------------------------------------------------------------------------------------------

FILES = dataclasses.replace(CONFIG, vocab_size=257)
PAD = 256  # of bytes, which is their end of text too


class Drawn:
    """Tensors of a model that numpy draws, by their names."""

    path = Path("drawn")

    def __init__(self, model: Model):
        self.shapes = shapes(model)

    @property
    def names(self) -> set[str]:
        return set(self.shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    def read(self, name: str) -> np.ndarray:
        return drawn(name, self.shapes[name])


def drawn(name: str, shape: tuple[int, ...]) -> np.ndarray:
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    return 0.2 * rng.standard_normal(shape).astype(np.float32) + ("norm" in name)


def texts() -> tuple[list[np.ndarray], np.ndarray]:
    """(texts, the same `[B, S]`, padded): one ends with the end of text, which transformers takes for padding."""
    rng = np.random.default_rng(1)
    rows = [rng.integers(0, 256, n) for n in (3, 9, 6)]
    rows[2][-1] = PAD
    return rows, np.stack([np.pad(row, (0, 9 - len(row)), constant_values=PAD) for row in rows]).astype(np.int32)


def of_folder(folder: Path, **settings) -> tuple[Config, Model]:
    """The config of a reward model that begins with the model in a folder, and this model."""
    c = default_config()
    settings = {"objective": REWARD, "model_dtype": "float32", "per_device_batch_size": 2} | settings
    c.update({"model_path": str(folder)} | settings)
    c = resolved(c)
    checks.check(c)
    return c, from_config.model(c)


def written(folder: Path) -> tuple[Path, Path, Path]:
    """Writes a language model, an adapter of rewards for it, and a reward model; `make_reward_reference.py` reads them.

    The reward model is exported twice: what is exported of an exported one is the same.
    """
    fields = {x.name: getattr(FILES, x.name) for x in dataclasses.fields(FILES)}
    settings = {name: value for name, value in fields.items() if name in default_config().model}
    settings |= {"rope_scaling": "none"}
    said = config_json.made(settings, 64, {"bos_token_id": None, "eos_token_id": PAD})
    language = decoder_model.build(FILES)
    base = export(
        Drawn(language), language, config_json.completed(said, "float32"), {}, folder / "base", dtype="float32"
    )
    c, model = of_folder(base)
    matrices = {
        target: {"a": drawn(f"{target}.a", (3, 4, columns)), "b": drawn(f"{target}.b", (3, rows, 4))}
        for target, (rows, columns) in {"attention.wq": (32, 32), "mlp.w_down": (32, 80)}.items()
    }
    adapter = peft.AdapterArrays(LORA, matrices, {"score": drawn("adapted", (1, 32))})
    peft.save_adapter(adapter, model, folder / "adapter", base_name=str(base))
    config = config_json.completed(convert.folder_files(c)[0], "float32")
    exported = export(Drawn(model), model, config, {}, folder / "once", dtype="float32")
    return base, folder / "adapter", convert.convert(exported, folder / "scorer", dtype="float32", say=lambda _: None)


def scores(model: Model, tensors: Tensors) -> list[float]:
    """The reward of each text, where `ExampleRows` has its last token."""
    rows, padded = texts()
    ids = np.concatenate(rows).astype(np.uint16)
    offsets = np.cumsum([0, *map(len, rows)])
    corpus = Corpus(ids, 0, "", "texts", offsets, np.ones(len(ids), bool))
    samples = windows_or_rows(corpus, 9, packed=False, is_text=False, padding=PAD, say=lambda _: None)
    scored = np.stack([samples[i]["scored"] for i in range(len(rows))])
    weights = stacks(tensors, model, "float32", jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    of_tokens = plain_model(dataclasses.replace(FILES, num_labels=1))(weights, padded)[..., 0]
    return np.sum(np.asarray(of_tokens) * scored, axis=1).tolist()


def close(found: list[float], expected: list[float]) -> None:
    """Other orders of sums, of which a score near 0 has terms as large as the others."""
    np.testing.assert_allclose(found, expected, rtol=0, atol=ORDER_OF_SUMS * np.abs(expected).max())


def test_transformers_scores_with_what_is_exported_and_peft_with_adapters(tmp_path):
    """Of the folders of which transformers and PEFT computed the recorded scores, with all rows in a padded batch."""
    base, adapter, scorer = written(tmp_path)
    for folder in (base, adapter, scorer):
        for file in sorted(folder.iterdir()):
            text = file.read_bytes().replace(str(tmp_path).encode(), b"")
            assert hashlib.sha256(text).hexdigest() == RECORDED["files"][f"{folder.name}/{file.name}"], file
    c, model = of_folder(scorer)
    assert c.model.num_labels == 1
    tensors = open_weights(c, model)
    assert tensors is not None
    close(scores(model, tensors), RECORDED["scores"]["scorer"])
    merged = convert.merge(base, [adapter], tmp_path / "merged", dtype="float32", say=lambda _: None)
    c, model = of_folder(merged)
    tensors = open_weights(c, model)
    assert tensors is not None
    close(scores(model, tensors), RECORDED["scores"]["adapter"])


def test_peft_names_two_heads_of_which_one_is_there(tmp_path):
    """It writes "classifier" beside "score" for every model for sequence classification."""
    base, folder, _ = written(tmp_path)
    _, model = of_folder(base)
    file = folder / "adapter_config.json"
    file.write_text(file.read_text().replace('"score"', '"classifier", "score"'))
    assert peft.read_adapter(folder, model).lora == LORA


@pytest.mark.parametrize(
    "source, settings, reason",
    [
        ("scorer", {"objective": "dpo"}, "model.num_labels: expected 0 with objective='dpo'"),
        (
            "base",
            {"lora": True, "modules_to_save": "lm_head"},
            "modules_to_save: expected others with num_labels=1",
        ),
        ("base", {"untied_head": True}, "untied_head: expected false for a model whose head is not tied"),
        ("olmoe", {}, "model.num_labels: expected 0 for a olmoe, of which transformers has no models for sequence"),
        ("two", {}, "model.num_labels: expected one of 0, 1, got 2"),
        ("unnamed", {}, "model_path: expected no score.weight in"),
        ("headless", {}, "model_path: expected score.weight in"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path, source, settings, reason):
    written(tmp_path)
    said = json.loads((tmp_path / "scorer" / "config.json").read_text())
    said_of = {
        "olmoe": json.loads((tmp_path / "base" / "config.json").read_text()) | {"model_type": "olmoe"},
        "two": said | {"id2label": {"0": "bad", "1": "good"}},
        "headless": said,
    }
    if source in said_of:  # with the tensors of the language model
        (tmp_path / "base" / "config.json").write_text(json.dumps(said_of[source]))
    if source == "unnamed":
        (tmp_path / "scorer" / "config.json").write_text((tmp_path / "base" / "config.json").read_text())
        source = "scorer"
    folder = tmp_path / (source if source in ("base", "scorer") else "base")
    with pytest.raises(ConfigError, match=re.escape(reason)):
        c, model = of_folder(folder, **settings)
        open_weights(c, model)


@pytest.mark.parametrize("command", [lambda path: load_trained(path, "bytes"), compare_with_transformers])
def test_a_reward_model_writes_no_text(tmp_path, command):
    with pytest.raises(ConfigError, match="got a reward model"):
        command(written(tmp_path)[2])


# -- Rows --------------------------------------------------------------------------------------------------------------


def test_the_last_token_is_scored_and_a_margin_is_the_rows():
    """A pair's arrays: the last token that is no padding, which bytes pad with, and the margin at one label."""
    rows = [
        DataRow({"prompt": "2+2=", "chosen": "4", "rejected": "five", "margin": 1.5}, "a.jsonl:1"),
        DataRow({"prompt": "2+2=", "chosen": "four", "rejected": "5"}, "a.jsonl:2"),
        DataRow({"prompt": "2+2=", "chosen": "four", "rejected": "5", "margin": float("nan")}, "a.jsonl:3"),
    ]
    *encoded, bad = Encoder(Dataset(("pairs",), type="preference"), ByteTokenizer()).encode(rows)
    good = [x for x in encoded if isinstance(x, Example)]
    assert isinstance(bad, BadRow) and "expected a finite number in 'margin', got nan" in bad.reason
    ids, trained, margins = (
        np.concatenate(x) for x in zip(*((x.ids, x.trained, x.numbers["margin"]) for x in good), strict=True)
    )
    lengths = [n for x in good for n in (x.ends[0], len(x.ids) - x.ends[0])]
    offsets = np.cumsum([0, *lengths])
    corpus = Corpus(ids.astype(np.uint16), 0, "", "pairs", offsets, trained, numbers={"margin": margins})
    samples = windows_or_rows(corpus, 8, packed=False, is_text=False, together=2, padding=PAD, say=lambda _: None)
    found = [samples[i] for i in range(4)]
    assert [chr(x["inputs"][x["scored"].argmax()]) for x in found] == ["4", "e", "r", "5"]
    assert all(x["scored"].sum() == 1 for x in found)
    assert [x["margin"].sum() for x in found] == [1.5, 0, 0, 0]
    assert not any((x["margin"] != 0)[x["labels"] < 0].any() for x in found)
