"""Distillation: losses and gradients against a textbook and torch, labels against exact ones, and what is refused."""

import contextlib
import dataclasses
import functools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import convert
from small import CONFIG, Small, drawn_params, plain_model, quick_at, tokens, worst_relative
from test_plan import FIRST, needs_compiler

from surojax.config.fields import DEFAULTS, default_config
from surojax.data import run_data
from surojax.data.batches import Mixture, training_batches
from surojax.data.given import NAME, GivenRows
from surojax.data.samples import Samples
from surojax.data.teacher_labels import (
    TEACHER_FILE,
    Labels,
    Teacher,
    claim_folder,
    read_head,
    read_teacher,
    with_teacher_labels,
    write_head,
)
from surojax.data.tokenizer import load_tokenizer
from surojax.distill import distill, labelling, main as distill_main, teacher as teacher_of
from surojax.errors import ConfigError
from surojax.inference.forward import hidden
from surojax.inference.trained_model import load_trained
from surojax.models.decoder_model import build
from surojax.objectives.distillation import NOTHING, Distillation, label, lse
from surojax.objectives.teacher_states import TEACHER_HEAD, StateDistillation, with_teacher_head
from surojax.placement.layout import batch_sharding
from surojax.placement.param import OUTER, with_part
from surojax.planner.gpus import GPUS
from surojax.planner.labelling import plan_labelling
from surojax.step.train_step import make_gradients, make_train_step
from surojax.train import train

A, B, S, V = 2, 8, 16, 64
E = 24  # channels of a teacher
ORDER_OF_SUMS = 1e-5  # float32, in another order
SETTINGS = {
    "forward": Distillation(0.7, 2.0, "forward", V),
    "reverse": Distillation(0.7, 2.0, "reverse", V),
    "forward-8": Distillation(0.3, 1.0, "forward", 8),
    "reverse-8": Distillation(1.0, 0.5, "reverse", 8),
    "states": StateDistillation(0.7, 2.0, "forward", channels=E),
    "states-reverse": StateDistillation(0.3, 0.5, "reverse", channels=E),
}
REFERENCE = json.loads((Path(__file__).parent / "fixtures" / "distillation_reference.json").read_text())
compiled_label = jax.jit(label, static_argnums=(1, 2))


@functools.cache
def teacher() -> tuple[np.ndarray, np.ndarray]:
    """Drawn hidden states `[A, B, S, E]`, and a head `[V, E]`."""
    rng = np.random.default_rng(5)
    states, head = rng.standard_normal((A, B, S, E)), rng.standard_normal((V, E))
    return (2 / E**0.5 * states).astype(np.float32), head.astype(np.float32)


def teacher_logits() -> np.ndarray:
    """The logits `[A, B, S, V]` of these."""
    states, head = teacher()
    return states @ head.T


def batch(objective: Distillation) -> list[np.ndarray]:
    """inputs, labels, and what a teacher with these logits says."""
    if isinstance(objective, StateDistillation):
        return [*tokens(A, B, S), teacher()[0]]
    ids, logprobs = compiled_label(jnp.asarray(teacher_logits().reshape(-1, V)), objective.top_k, objective.temperature)
    return [*tokens(A, B, S), np.asarray(ids).reshape(A, B, S, -1), np.asarray(logprobs).reshape(A, B, S, -1)]


def found(objective: Distillation, whole: list[np.ndarray], devices: int = 1, **options):
    """(loss, gradients) of the engine."""
    of_states = isinstance(objective, StateDistillation)
    model = with_teacher_head(build(CONFIG), E) if of_states else None
    small = Small(devices, model=model, **options)
    engine = dataclasses.replace(small.engine, objective=objective)
    gradients = make_gradients(engine, small.optimizer, small.plan, small.mesh)
    state = small.state
    weights = state.weights
    if of_states:
        head = jax.device_put(teacher()[1], small.plan.weights[OUTER][TEACHER_HEAD].sharding)
        weights = with_part(weights, {OUTER: {TEACHER_HEAD: head}})
    loss, grads = gradients(weights, state.progress, *small.put(whole))
    return float(loss), jax.device_get(grads)


def textbook(objective: Distillation, logits, labels, of_teacher):
    """The loss of one token from whole distributions, whose unlikely tokens for the teacher are added up."""
    p = jax.nn.softmax(of_teacher / objective.temperature)
    s = jax.nn.softmax(logits / objective.temperature)
    order = jnp.argsort(-p)
    k = objective.top_k
    if k < V:
        p, s = (jnp.append(x[order[:k]], jnp.sum(x[order[k:]])) for x in (p, s))
    a, b = (p, s) if objective.kl == "forward" else (s, p)
    kl = jnp.sum(a * (jnp.log(a) - jnp.log(b)))
    nats = -jax.nn.log_softmax(logits)[labels]
    return (1 - objective.weight) * nats + objective.weight * objective.temperature**2 * kl


@pytest.mark.full
@pytest.mark.parametrize("name", quick_at([(name,) for name in SETTINGS], 0))
def test_loss_and_gradients_are_the_textbooks(name):
    """K = V is the exact divergence of whole distributions."""
    objective = SETTINGS[name]
    inputs, labels = (x.reshape(-1, S) for x in tokens(A, B, S))

    def loss(params):
        logits = plain_model(CONFIG)(params, inputs)
        each = jax.vmap(functools.partial(textbook, objective))
        of_tokens = each(logits.reshape(-1, V), jnp.maximum(labels, 0).reshape(-1), teacher_logits().reshape(-1, V))
        return jnp.sum(jnp.where(labels.reshape(-1) >= 0, of_tokens, 0.0)) / np.sum(labels >= 0)

    expected, expected_grads = jax.jit(jax.value_and_grad(loss))(drawn_params(CONFIG, 0))
    of_engine, grads = found(objective, batch(objective))
    assert of_engine == pytest.approx(float(expected), rel=ORDER_OF_SUMS)
    assert worst_relative(grads, jax.device_get(expected_grads)) < ORDER_OF_SUMS


class Head:
    """A model whose logits are its hidden states: the head is the identity."""

    head, logit_softcap, final = "head", 0.0, staticmethod(lambda outer, x: x)


@pytest.mark.parametrize("kl", ["forward", "reverse"])
def test_divergence_and_gradient_are_those_of_torch(kl):
    """Recorded by fixtures/make_distillation_reference.py: torch.nn.functional.kl_div of whole distributions."""
    case = REFERENCE[kl]
    logits, of_teacher = (jnp.asarray(REFERENCE[name], jnp.float32) for name in ("student", "teacher"))
    words = logits.shape[1]
    temperature = REFERENCE["temperature"]
    objective = Distillation(1.0, temperature, kl, words)
    ids, logprobs = compiled_label(of_teacher, words, temperature)

    targets = {"labels": jnp.zeros(len(logits), jnp.int32), "teacher_ids": ids, "teacher": logprobs}
    outer = {"head": jnp.eye(words)}
    both = lambda logits: objective.loss_and_gradients(Head(), outer, (), logits, targets, jnp.float32(1), ())  # pyright: ignore
    loss, _, gradient = jax.jit(both)(logits)
    np.testing.assert_allclose(loss, case["loss"], rtol=1e-5)
    np.testing.assert_allclose(gradient, case["gradient"], rtol=1e-4, atol=1e-6)
    alone = jax.jit(lambda logits: objective.loss(Head(), outer, logits, targets, ()))(logits)  # pyright: ignore
    np.testing.assert_allclose(alone, case["loss"], rtol=1e-5)


@pytest.mark.parametrize("name", ["forward-8", "reverse-8"])
def test_unlikely_tokens_have_the_textbooks_loss_and_gradient(name):
    """Of which the teacher says one number; a token without a label counts in neither."""
    objective = SETTINGS[name]
    logits, of_teacher = teacher_logits()[1, 0], teacher_logits()[0, 0]
    labels = jnp.arange(S) * 4 - 4 * (jnp.arange(S) % 5 == 0)
    ids, logprobs = label(jnp.asarray(of_teacher), objective.top_k, objective.temperature)
    targets = {"labels": labels, "teacher_ids": ids, "teacher": logprobs}
    outer = {"head": jnp.eye(V)}
    both = lambda logits: objective.loss_and_gradients(Head(), outer, (), logits, targets, jnp.float32(1), ())  # pyright: ignore
    loss, _, gradient = jax.jit(both)(logits)

    def of_textbook(logits):
        of_tokens = jax.vmap(functools.partial(textbook, objective))(logits, jnp.maximum(labels, 0), of_teacher)
        return jnp.sum(jnp.where(labels >= 0, of_tokens, 0.0))

    expected, expected_gradient = jax.jit(jax.value_and_grad(of_textbook))(logits)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize(
    "name, axis", [("reverse-8", "tp_size"), ("states-reverse", "tp_size"), ("states-reverse", "pp_size")]
)
def test_a_divided_vocabulary_changes_no_gradient(name, axis):
    """Nor the loss, where the tokens of a label, or the teacher's head, are on two devices."""
    objective = SETTINGS[name]
    loss, grads = found(objective, batch(objective))
    other, other_grads = found(objective, batch(objective), 2, **{axis: 2})
    other_grads = jax.tree.map(lambda x, y: x[: len(y)], other_grads, grads)  # uneven stages are padded
    assert other == pytest.approx(loss, rel=ORDER_OF_SUMS)
    assert worst_relative(other_grads, grads) < ORDER_OF_SUMS


def test_no_array_of_a_step_has_a_number_for_each_token_and_word():
    """With 8 slices of a microbatch's tokens: of a lowered step, the largest array that has the vocabulary's size."""
    small = Small(config=dataclasses.replace(CONFIG, vocab_size=1000), lmhead_chunks=8)
    engine = dataclasses.replace(small.engine, objective=Distillation(top_k=8))
    step = make_train_step(engine, small.optimizer, small.plan, small.mesh)
    planned = engine.planned_batch((A, B, S), batch_sharding(small.mesh))
    assert [x.shape for x in planned] == [(A, B, S), (A, B, S), (A, B, S, 8), (A, B, S, 9)]
    text = step.lower(small.plan, *planned).as_text()
    shapes = [list(map(int, dims.split("x")[:-1])) for dims in re.findall(r"tensor<((?:\d+x)+\w+)>", text)]
    tokens_of_words = [np.prod(shape) // 1000 for shape in shapes if 1000 in shape]
    width = max(CONFIG.hidden_size, B * S // 8)  # the head's matrix; the logits of a slice
    assert max(tokens_of_words) == width < B * S


@pytest.mark.full
def test_accumulation_over_uneven_batches_equals_one():
    """Microbatches with other numbers of labels, and the same rows in one with two that only fill up."""
    objective = SETTINGS["forward-8"]
    whole = batch(objective)
    whole[1][0, :3] = -1
    loss, grads = found(objective, whole)
    fills = (0, -1, 0, 0.0)
    more = [np.full((1, 2, *x.shape[2:]), fill, x.dtype) for x, fill in zip(whole, fills, strict=True)]
    together = [
        np.concatenate([x.reshape(1, A * B, *x.shape[2:]), fill], 1) for x, fill in zip(whole, more, strict=True)
    ]
    other, other_grads = found(objective, together)
    assert other == pytest.approx(loss, rel=ORDER_OF_SUMS)
    assert worst_relative(other_grads, grads) < ORDER_OF_SUMS


def test_labels_are_the_likeliest_tokens_and_the_rest():
    """Of float64; of the whole vocabulary there is no rest, and none of a distribution that is certain is infinite."""
    logits = teacher_logits()[0, 0].astype(np.float64)
    logits[0, 7] = 400.0
    nats = logits / 2 - np.log(np.exp(logits / 2 - logits.max(1, keepdims=True) / 2).sum(1, keepdims=True))
    nats -= logits.max(1, keepdims=True) / 2
    ids, logprobs = compiled_label(jnp.asarray(logits, jnp.float32), 8, 2.0)
    np.testing.assert_array_equal(ids, np.argsort(-logits, axis=1)[:, :8])
    np.testing.assert_allclose(logprobs[:, :8], np.take_along_axis(nats, np.asarray(ids), 1), rtol=1e-5, atol=1e-5)
    rest = np.log(np.exp(np.sort(nats, axis=1)[:, : V - 8]).sum(1))
    np.testing.assert_allclose(logprobs[:, 8], rest, rtol=1e-4)
    assert np.isfinite(logprobs).all()
    assert (compiled_label(jnp.asarray(logits, jnp.float32), V, 2.0)[1][:, -1] < NOTHING / 2).all()


def test_a_teacher_in_16_bits_is_read_in_32():
    logits = jnp.asarray(3 * np.random.default_rng(3).standard_normal((4, V)), jnp.bfloat16)
    for found, expected in zip(*(compiled_label(x, 8, 2.0) for x in (logits, jnp.float32(logits))), strict=True):
        assert found.dtype == expected.dtype and np.array_equal(found, expected)


def test_log_sum_exp_of_a_divided_vocabulary():
    """Of logits far apart on two devices, which one exponent does not hold."""
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("tp",))
    x_MV = np.float32([[0, 1, 200, 2], [300, 3, 4, 5], [-200, -201, -2, -1]])
    over_both = jax.shard_map(lambda x: lse(x, ("tp",)), mesh=mesh, in_specs=jax.P(None, "tp"), out_specs=jax.P())
    np.testing.assert_allclose(jax.jit(over_both)(x_MV), jax.nn.logsumexp(x_MV, axis=1), rtol=1e-6)


# -- Runs -------------------------------------------------------------------------------------------------------------

EXPERTS = {"model.num_experts": 4, "model.num_experts_per_tok": 2, "model.norm_topk_prob": True}
SENT_TO_EXPERTS = EXPERTS | {"gpus": 4, "ep_size": 2, "zero_level": 3}
ROWS = [f"{i} and {i} are {i + i}, and once more {i + i + i}." for i in range(60)]


def config(folder, **fields):
    c = default_config()
    c.output_dir, c.data_cache, c.distill_path = str(folder / "run"), str(folder / "cache"), str(folder / "labels")
    c.model.vocab_size, c.model.hidden_size, c.model.intermediate_size = 320, 32, 64
    c.model.num_hidden_layers, c.model.num_attention_heads, c.model.num_key_value_heads = 2, 2, 1
    c.model_dtype, c.sequence_len, c.per_device_batch_size, c.gpus = "float32", 32, 8, 1
    c.max_steps, c.learning_rate, c.warmup_steps, c.eval_steps, c.eval_batches = 6, 1e-2, 0, 3, 1
    c.save_steps, c.sample_tokens, c.quiet, c.report_to = 3, 0, True, ""
    c.objective, c.distill_top_k, c.distill_weight = "distill", 4, 1.0
    c.update_from_flattened_dict(fields)
    return c


def samples_of(c) -> Samples:
    """The samples of `ROWS`."""
    tokenizer = load_tokenizer(c.tokenizer)
    settings = run_data.Settings(**{name: c[name] for name in run_data.SETTINGS})
    entries = run_data.parse_entries(({"path": NAME},), ())._replace(rows=GivenRows(ROWS))
    (samples,) = run_data.load_data(entries, settings, tokenizer, eval_batch_size=8).train.sources
    return samples


def test_labels_of_other_samples_are_in_other_folders(tmp_path):
    """All below the teacher's, which several datasets share."""
    samples = samples_of(config(tmp_path))
    about = Teacher("a digest", "a teacher", "bytes", 320, 4, 1.0)
    folders = {Labels.of(tmp_path, samples, length, about).folder for length in (8, 16)}
    assert len(folders) == 2 and {folder.parent for folder in folders} == {tmp_path}


def labelled(c) -> Labels:
    """Labels by a teacher that gives the next token 0.9, and three others 0.03 each."""
    samples = samples_of(c)
    about = Teacher("a digest", "a teacher", load_tokenizer(c.tokenizer).name, 320, c.distill_top_k, 1.0)
    labels = Labels.of(claim_folder(c.distill_path, about), samples, c.sequence_len, about)
    for number, rows in enumerate(labels.files):
        next_tokens = np.stack([samples[i]["labels"] for i in rows])[..., None]
        ids = np.concatenate([next_tokens, *((next_tokens + i) % 256 for i in (1, 2, 3))], axis=-1)
        logprobs = np.log(np.array([0.9, 0.03, 0.03, 0.03, 0.01], np.float32))
        labels.write(number, ids, np.broadcast_to(logprobs, (*ids.shape[:2], 5)))
    assert not labels.missing
    return labels


@pytest.mark.full
def test_a_run_learns_from_labels_and_says_what_does_not_fit(tmp_path):
    """Evaluations are cross-entropy, in bits per byte. Each thing that has changed is one line."""
    c = config(tmp_path)
    with pytest.raises(ConfigError, match=r"distill_path: expected a folder with a teacher's labels"):
        train(c, data=ROWS)
    labels = labelled(c)
    result = train(c, data=ROWS)
    losses = [record["loss"] for record in result.history if record["log"] == "step"]
    assert losses[-1] < 0.8 * losses[0]
    assert all(record["bits_per_byte"] > 0 for record in result.history if record["log"] == "eval")

    def refused(expected: str, rows=ROWS, **fields):
        with pytest.raises(ConfigError) as error:
            train(config(tmp_path, output_dir=str(tmp_path / "other"), **fields), data=rows)
        assert expected in str(error.value) and "\n" not in str(error.value)

    refused("distill_top_k: expected 4, that of the teacher a teacher", distill_top_k=8)
    refused("distill_temperature: expected 1.0", distill_temperature=2.0)
    refused("distill_path: expected labels of all", rows=[*ROWS, "changed"])
    refused("distill_path: expected labels of all", sequence_len=16)
    refused("distill_top_k: expected at most model.vocab_size=320", distill_top_k=1000)
    refused("z_loss: expected 0.0 with objective='distill'", z_loss=1e-4)
    (labels.folder / "00000001").unlink()
    refused("of all ")
    about = Teacher("a digest", "a teacher", "other tokenizer", 320, 4, 1.0)
    for name, changed in {"tokenizer": about, "model.vocab_size": about._replace(vocab_size=500)}.items():
        changed = changed._replace(tokenizer=about.tokenizer if name == "tokenizer" else load_tokenizer("bytes").name)
        claim_folder(str(tmp_path / name), changed)
        refused(f"{name}: expected ", distill_path=str(tmp_path / name))
    with pytest.raises(ConfigError, match="name another folder"):
        claim_folder(c.distill_path, about)
    (tmp_path / "a_file").touch()
    for place in ("a_file", "a_file/labels"):
        with pytest.raises(ConfigError, match=r"distill_path: expected a folder that can be written, got "):
            claim_folder(str(tmp_path / place), about)


def place(of: str, value: float):
    """Writes a number into the first label that counts; `of` which array."""

    def damage(file: Path, labels: Labels, first: int) -> None:
        content = bytearray(file.read_bytes())
        per_sample = labels.sequence_len * 4
        at = first * 4 * 4 if of == "ids" else len(labels.files[0]) * per_sample * 4 + first * 5 * 4
        content[at : at + 4] = np.array(value, np.int32 if of == "ids" else np.float32).tobytes()
        file.write_bytes(content)

    return damage


DAMAGED_LABELS = [
    (place("ids", 2**31 - 1), "expected token ids below the teacher's vocab_size 320, got 1 to 2147483647"),
    (place("ids", 320), "expected token ids below the teacher's vocab_size 320"),
    (place("ids", -1), "expected token ids below the teacher's vocab_size 320, got -1"),
    (place("logprobs", np.nan), "expected finite numbers, got nan"),
    (place("logprobs", -np.inf), "expected finite numbers, got -inf"),
    (place("logprobs", np.inf), "expected finite numbers, got inf"),
    (place("logprobs", 0.5), "expected log-probabilities, at most 0, got 0.5"),
    (lambda file, *_: os.truncate(file, 100), "(the file is too short)"),
    (lambda file, *_: (file.unlink(), os.mkfifo(file)), "it is a pipe or a device; save it first"),
    (lambda file, *_: file.unlink(), "No such file"),
]


@pytest.mark.parametrize("damage, said", DAMAGED_LABELS, ids=[said for _, said in DAMAGED_LABELS])
def test_labels_are_checked_when_they_are_read(tmp_path, damage, said):
    """What differs from its sum, or what no teacher gives if there is no sum. Labels of other samples are used."""
    c = config(tmp_path)
    labels = labelled(c)
    samples = samples_of(c)
    tokenizer = load_tokenizer(c.tokenizer).name
    settings = {"sequence_len": c.sequence_len, "tokenizer": tokenizer, "vocab_size": 320, "top_k": 4}
    more = {"temperature": 1.0, "hidden_size": 0, "names": ("ids", "logprobs")}
    train = with_teacher_labels(Mixture([samples]), c.distill_path, **settings, **more)
    row = next(i for i in range(len(labels.files[0])) if (samples[i]["labels"] >= 0).any())
    first = row * c.sequence_len + int(np.argmax(samples[row]["labels"] >= 0))
    assert train.all[row]["ids"].shape == (c.sequence_len, 4) and train.all[len(samples) - 1]
    file = labels.folder / "00000000"
    good = file.read_bytes()
    flipped = bytearray(good)
    flipped[first * 16] ^= 1  # the last bit of an id
    file.write_bytes(flipped)
    with pytest.raises(ConfigError, match=rf"sample {row} in .*00000000 as it was written, got others: their sum"):
        train.all[row]
    assert train.all[len(samples) - 1]
    stream = training_batches(train, batch_size=len(samples), accumulation=1, seed=0)
    with contextlib.closing(stream), pytest.raises(ConfigError, match="their sum differs"):  # of its thread
        next(stream)
    file.write_bytes(good)
    shutil.rmtree(labels.folder / "sums")
    damage(file, labels, first)
    with pytest.raises(ConfigError) as error:
        train.all[row]
    assert said in str(error.value) and str(labels.folder) in str(error.value) and "\n" not in str(error.value)


WRONG_TEACHERS = [
    {"vocab_size": -1}, {"vocab_size": 2**40}, {"top_k": 0}, {"top_k": 321}, {"temperature": float("nan")},
    {"temperature": 0.0}, {"dtype": "float32"}, {"hidden_size": -8}, {"hidden_size": 8}, {"vocab_size": 1.0},
    {"hidden_size": 8, "top_k": 0, "temperature": 0.0, "dtype": "O"},
    {"hidden_size": 8, "top_k": 0, "temperature": 0.0, "dtype": "float33"},
    {"hidden_size": 8, "top_k": 0, "temperature": 0.0, "dtype": "<U5"},
    {"hidden_size": 8, "top_k": 0, "temperature": 0.0, "dtype": "int8"},
]  # fmt: skip


@pytest.mark.parametrize("changes", WRONG_TEACHERS, ids=str)
def test_a_teacher_that_no_folder_has(tmp_path, changes):
    about = Teacher("a digest", "a teacher", "bytes", 320, 4, 1.0)
    (tmp_path / "teacher.json").write_text(json.dumps(about._asdict() | changes))
    with pytest.raises(ConfigError, match=r"expected a folder with a teacher's labels, got .*; docs/dist") as error:
        read_teacher(str(tmp_path))
    said = str(error.value)
    assert f"{next(iter(changes))} is" in said or "dtype is" in said or "a value of another type" in said


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_head_is_checked_when_it_is_read(tmp_path, dtype):
    folder = claim_folder(str(tmp_path), Teacher("a digest", "a teacher", "bytes", 320, 0, 0.0, 8, dtype))
    head = np.ones((320, 8), dtype)
    write_head(folder, head)
    np.testing.assert_array_equal(read_head(str(tmp_path)), head)
    for content, said in {
        np.full((320, 8), 2, dtype).tobytes(): "as it was written, got others: their sum differs",
        np.full((320, 8), np.nan, dtype).tobytes(): "(it has numbers that are not finite)",
        head.tobytes() + b"1": "bytes)",
    }.items():
        (folder / "head").write_bytes(content)
        with pytest.raises(ConfigError) as error:
            read_head(str(tmp_path))
        assert said in str(error.value)
    (folder / "head").write_bytes(head.tobytes())
    (folder / "sums" / "head").write_bytes(b"")
    with pytest.raises(ConfigError, match="as it was written, got others: their sum differs"):
        read_head(str(tmp_path))


@pytest.mark.full
def test_a_run_learns_from_last_hidden_states(tmp_path):
    """Of a teacher whose states are the rows of the next tokens. A checkpoint goes on to the same bits."""
    c = config(tmp_path, distill_hidden_size=E, distill_top_k=64)
    samples = samples_of(c)
    head = np.random.default_rng(0).standard_normal((320, E)).astype(np.float32)
    about = Teacher("a digest", "a teacher", load_tokenizer(c.tokenizer).name, 320, 0, 0.0, E, "float32")
    folder = claim_folder(c.distill_path, about)
    labels = Labels.of(folder, samples, c.sequence_len, about)
    for number, rows in enumerate(labels.files):
        labels.write(number, head[np.stack([samples[i]["labels"] for i in rows])])
    with pytest.raises(ConfigError, match=r"distill_path: expected a matrix \[320, 24\] of float32 in .*head"):
        train(c, data=ROWS)
    write_head(folder, head)
    losses = [record["loss"] for record in train(c, data=ROWS).history if record["log"] == "step"]
    assert losses[-1] < 0.8 * losses[0]
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "6")
    again = [record["loss"] for record in train(c, data=ROWS).history if record["log"] == "step"]
    assert again == losses[3:]
    with pytest.raises(ConfigError, match="distill_hidden_size: expected 24, that of the teacher a teacher"):
        train(config(tmp_path, output_dir=str(tmp_path / "other")), data=ROWS)


def teacher_config(folder, **fields):
    """A run that labels `ROWS` with a trained model in a Hugging Face folder."""
    data = folder / "data.txt"
    if not data.exists():
        data.write_text("\n".join(ROWS))
        of_model = {name: value for name, value in fields.items() if name.startswith("model.")}
        plain: dict = {"objective": "cross_entropy", "distill_path": "", "max_steps": 12, "save_steps": 0}
        of_run = config(folder, data=str(data), **plain, **of_model)
        of_run.distill_top_k, of_run.distill_weight = DEFAULTS["distill_top_k"], DEFAULTS["distill_weight"]
        train(of_run)
        convert.main(["--checkpoint", of_run.output_dir, "--out", str(folder / "teacher")])
    return config(folder, data=str(data), model_path=str(folder / "teacher"), **fields)


@pytest.mark.full
def test_labels_of_a_model_are_of_its_logits_and_a_run_learns_from_them(tmp_path):
    """With K = V, of a model that is streamed from host memory or read from files layer by layer."""
    c = teacher_config(tmp_path, distill_top_k=320)
    folder = distill(c)
    trained = load_trained(tmp_path / "teacher", "bytes")
    (tmp_path / "nvme").mkdir()
    for name, placed in {
        "streamed": {"offload_weights": True},
        "files": {"offload_weights": "nvme", "nvme_path": str(tmp_path / "nvme")},
    }.items():
        other = distill(teacher_config(tmp_path, distill_top_k=320, distill_path=str(tmp_path / name), **placed))
        for file in sorted(folder.glob("*/0*")):
            again = other / file.relative_to(folder)
            words = file.stat().st_size // 4
            np.testing.assert_allclose(
                np.fromfile(again, np.float32, offset=2 * words)[-320:],
                np.fromfile(file, np.float32, offset=2 * words)[-320:],
                rtol=1e-4,
                atol=1e-5,
            )
    student = config(tmp_path, data=c.data, distill_top_k=320, output_dir=str(tmp_path / "student"))
    tokenizer = load_tokenizer(student.tokenizer)
    settings = run_data.Settings(**{name: student[name] for name in run_data.SETTINGS})
    samples = run_data.load_data(run_data.Entries(), settings, tokenizer, eval_batch_size=8).train.sources[0]
    labels = Labels.of(folder, samples, 32, read_teacher(str(folder)))
    assert not labels.missing
    weights = jax.tree.map(lambda x: x.astype(jnp.float32), trained.weights)  # stored in 16 bits
    for i in (0, len(samples) - 1):
        x = hidden(trained.model, weights, jnp.asarray(samples[i]["inputs"])[None])
        ids, logprobs = labels[i]
        exact = jax.nn.log_softmax(trained.model.logits(weights["outer"], x[0]))
        np.testing.assert_allclose(logprobs[:, :-1], np.take_along_axis(np.asarray(exact), ids, 1), atol=1e-4)
    losses = [record["loss"] for record in train(student).history if record["log"] == "step"]
    assert losses[-1] < losses[0]
    # Last hidden states say the same; of adapters, on several GPUs, and what is exported has no head of the teacher.
    of_states = {"distill_path": str(tmp_path / "states"), "distill_hidden_size": 32, "distill_top_k": 64}
    distill(teacher_config(tmp_path, **of_states))
    other = {"gpus": 4, "shard_outer": True, "zero_level": 3, "per_device_batch_size": 2}
    result = train(config(tmp_path, data=c.data, output_dir=str(tmp_path / "of_states"), **of_states, **other))
    losses_of_states = [record["loss"] for record in result.history if record["log"] == "step"]
    np.testing.assert_allclose(losses_of_states, losses, rtol=1e-4)
    convert.main(["--checkpoint", str(tmp_path / "of_states"), "--out", str(tmp_path / "exported")])
    assert "teacher_head" not in (tmp_path / "exported" / "config.json").read_text()
    adapted = config(tmp_path, output_dir=str(tmp_path / "adapters"), lora=True, lora_rank=4, **of_states)
    adapted.update({"data": c.data, "model_path": str(tmp_path / "exported"), "max_steps": 2})
    assert len(train(adapted).history) > 2


@pytest.mark.full
def test_labels_by_several_gpus_are_those_of_one(tmp_path):
    """Of data-parallel ones, and of those that share a teacher's experts: each sample has its own labels."""
    alone = distill(teacher_config(tmp_path, **EXPERTS))
    for name, placed in {"data": EXPERTS | {"gpus": 4}, "experts": SENT_TO_EXPERTS}.items():
        other = distill(teacher_config(tmp_path, distill_path=str(tmp_path / name), **placed))
        files = sorted(file.relative_to(alone) for file in alone.glob("*/0*"))
        assert files == sorted(file.relative_to(other) for file in other.glob("*/0*")) and files
        for file in files:
            logprobs = [np.fromfile(folder / file, np.int32) for folder in (alone, other)]
            of_ids = slice(len(logprobs[0]) * DEFAULTS["distill_top_k"] // (2 * DEFAULTS["distill_top_k"] + 1))
            ids, others = (x[of_ids] for x in logprobs)
            assert np.mean(ids == others) > 0.99  # a few may be as likely as their neighbours
            sums, more = (x[of_ids.stop :].view(np.float32) for x in logprobs)
            np.testing.assert_allclose(more, sums, atol=1e-3)


@pytest.mark.full
def test_labelling_that_is_killed_goes_on_to_the_same_bits(tmp_path):
    """SIGKILL of the command when its second file is there."""
    c = teacher_config(tmp_path)
    whole = distill(c)
    killed = teacher_config(tmp_path, distill_path=str(tmp_path / "killed"))
    code = (
        "import os, sys, json; from surojax import default_config; from surojax.data import teacher_labels as t; "
        "from surojax.distill import distill; write = t.Labels.write; "
        "t.Labels.write = lambda self, n, *x: (write(self, n, *x), n == 1 and os.kill(os.getpid(), 9)); "
        "c = default_config(); c.update(json.load(sys.stdin)); distill(c)"
    )
    settings = json.dumps(killed.to_dict())
    ended = subprocess.run([sys.executable, "-c", code], input=settings, text=True, check=False)
    folder = tmp_path / "killed"
    assert ended.returncode == -9 and len(list(folder.glob("*/0*"))) == 2
    distill(killed)
    files = sorted(file.relative_to(whole) for file in whole.glob("*/0*"))
    assert files == sorted(file.relative_to(folder) for file in folder.glob("*/0*")) and len(files) > 2
    assert all((folder / file).read_bytes() == (whole / file).read_bytes() for file in files)


@pytest.mark.parametrize(
    "types, names",
    [
        ("", "q_proj"),
        ("conv,full_attention", "out_proj,q_proj"),
        ("latent_attention,linear_attention", "q_proj,in_proj_qkv"),
        ("mamba2,experts,full_attention,mlp", "in_proj,mlp.experts.down_proj,q_proj,mlp.down_proj"),
    ],
)
def test_a_teacher_of_any_mixers_is_frozen(types, names):
    c = default_config()
    c.update({"distill_path": "labels"})
    c.model.layer_types, c.model.one_purpose = types, "mlp" in types
    if "experts" in types:
        c.model.num_experts, c.model.num_experts_per_tok = 4, 2
    assert teacher_of(c)[0].lora_target_modules == names


@pytest.mark.full
@needs_compiler
def test_a_plan_of_labelling_says_what_binds(tmp_path):
    """The bytes are those of the weights; a slow disk takes as long as its files, and a GPU as long as its products."""
    sizes = {"model.hidden_size": 512, "model.intermediate_size": 1024, "model.num_hidden_layers": 8}
    c = config(tmp_path, model_dtype="bfloat16", sequence_len=512, distill_weight=0.5, **sizes)
    plans = {}
    for name, placed in {
        "device": {},
        "host": {"offload_weights": True},
        "files": {"offload_weights": "nvme", "nvme_path": str(tmp_path)},
        "tokens are sent to experts": SENT_TO_EXPERTS,
    }.items():
        of_teacher, states = teacher_of(config(tmp_path, **c.to_dict() | placed))
        plans[name] = plan_labelling(of_teacher, labelling(of_teacher, states), FIRST, "0.01/0.01")
    layers = 2 * 8 * (2 * 512 * 512 + 2 * 512 * 256 + 3 * 512 * 1024 + 2 * 512)  # bytes; attention of 2 heads and 1
    layers += 2 * 8 * 2 * 512  # adapters of rank 1, which add nothing
    assert plans["files"].file_bytes == layers
    assert plans["files"].resources["the disk"] == pytest.approx(layers / 1e7)
    assert plans["files"].seconds == pytest.approx(layers / 1e7 * 9 / 8)  # nothing hides the first layer
    assert "the disk binds" in str(plans["files"])
    assert plans["host"].host_bytes == layers
    assert plans["files"].host_bytes < 0.3 * layers
    assert plans["device"].host_bytes == 0
    products = 2 * (layers / 2 + 320 * 512) * plans["device"].tokens / GPUS[FIRST].bf16_flops
    assert products < plans["device"].seconds < 3 * products
    assert plans["tokens are sent to experts"].tokens == 4 * plans["device"].tokens
    assert plans["device"].tokens == 8 * 512 and plans["files"].tokens == 16 * 8 * 512


def test_what_cannot_be_labelled_is_one_line(tmp_path):
    for fields, message in {
        ("distill_path", ""): "distill_path: expected a folder for labels, got ''",
        ("cp_size", 2): "cp_size: expected 1 for labelling, got 2",
        ("model_path", ""): "model_path: expected a teacher",
    }.items():
        with pytest.raises(ConfigError) as error:
            distill(config(tmp_path, **dict([fields])))
        assert message in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(SystemExit) as ended:
        distill_main(["--config", "tiny", "--disk", "7/6"])
    assert "--disk: expected --plan as well" in str(ended.value)
    with pytest.raises(SystemExit) as ended:
        distill_main(
            ["--config", "tiny", "--config.distill_path=x", "--config.gpus=1", "--plan", FIRST, "--disk", "7/6"]
        )
    assert "--disk: expected offload_weights=nvme as well" in str(ended.value)


@pytest.mark.parametrize(
    "change",
    [
        *({"dtype": x, "hidden_size": 32, "top_k": 0} for x in ("", "object", "O8", "U9", "int8", "void", "f4", "\0")),
        *({"dtype": "float32"}, {"vocab_size": 0}, {"top_k": -1}, {"top_k": 2**40}, {"top_k": 0}, {"temperature": 1}),
        *({"hidden_size": -4}, {"vocab_size": True}, {"more": 1}),
    ],
    ids=str,
)
def test_a_teacher_that_cannot_be_is_a_line(tmp_path, change):
    """A dtype that is none, or whose numbers are references; sizes that no labels have."""
    claim_folder(str(tmp_path), Teacher("digest", "model", "bytes", 320, 8, 1.0))
    assert read_teacher(str(tmp_path)).top_k == 8
    values = json.loads((tmp_path / TEACHER_FILE).read_text())
    (tmp_path / TEACHER_FILE).write_text(json.dumps(values | change))
    with pytest.raises(ConfigError, match=r"^distill_path: expected a folder with a teacher's labels, got .*; docs/"):
        read_teacher(str(tmp_path))
