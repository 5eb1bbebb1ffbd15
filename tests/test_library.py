"""surojax as a library: callbacks, rows, optimizers, objectives and blocks of one's own, and a loop of one's own."""

import ast
import importlib.util
import json
import math
import re
import shutil
import types
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import surojax
from surojax import (
    Block,
    CheckpointError,
    ConfigError,
    EarlyStopping,
    Event,
    Guard,
    LossOfLogits,
    OwnLoop,
    default_config,
    train,
)
from surojax.assembly.from_config import Brought, from_config, model as model_of
from surojax.assembly.own_parts import check_objective
from surojax.inference.trained_model import load_trained
from surojax.models.layers import vector
from surojax.objectives.objective import CrossEntropy
from surojax.optim.from_optax import counts
from surojax.placement.mesh import make_mesh
from surojax.run import guard
from surojax.run.callbacks import Callbacks
from surojax.run.metrics import TIMINGS
from surojax.training import resume
from surojax.training.evaluation import early_stopping
from surojax.training.resume import block_identity

PAGE = Path(__file__).parents[1] / "docs/library.md"
TEXTS = [f"{i} and {i} are {i + i}. " * 4 for i in range(64)]


def config(folder, **fields):
    c = default_config()
    c.output_dir = str(folder / "run")
    c.data_cache = str(folder / "cache")
    c.model.vocab_size, c.model.hidden_size, c.model.intermediate_size = 320, 32, 64
    c.model.num_hidden_layers, c.model.num_attention_heads, c.model.num_key_value_heads = 2, 2, 1
    c.model_dtype, c.sequence_len, c.per_device_batch_size, c.gpus = "float32", 32, 4, 1
    c.max_steps, c.learning_rate, c.warmup_steps, c.eval_steps, c.eval_batches = 4, 1e-2, 0, 2, 1
    c.save_steps, c.sample_tokens, c.quiet = 0, 0, True
    c.update(fields)
    return c


def losses(result) -> list[float]:
    return [record["loss"] for record in result.history if record["log"] == "step"]


# -- Callbacks --------------------------------------------------------------------------------------------------------


def test_callbacks_are_told_of_steps_evaluations_and_checkpoints(tmp_path, monkeypatch):
    """With the numbers of metrics.jsonl and a state that belongs to them; the run's numbers stay as they are."""
    guards: list[Guard] = []
    monkeypatch.setattr(Guard, "__call__", lambda guard, event: guards.append(guard))
    told: list[Event] = []
    steps = []

    def keep(event: Event) -> None:
        told.append(event)
        steps.append(int(event.state().step))

    result = train(config(tmp_path), data=TEXTS, callbacks=[keep])
    assert [(event.kind, event.step) for event in told] == [
        ("step", 1),
        ("step", 2),
        ("eval", 2),
        ("step", 3),
        ("step", 4),
        ("eval", 4),
        ("checkpoint", 4),
    ]
    records = [event.metrics for event in told if event.kind != "checkpoint"]
    for record, found in zip(result.history, records, strict=True):
        assert {k: v for k, v in record.items() if k not in ("log", "step", "over")} == found
    assert told[-1].checkpoint == result.checkpoint
    for event, step in zip(told, steps, strict=True):
        assert step - event.step in ((0, 1) if event.kind == "step" else (0,))
    assert len(guards) == len(told) and len(set(map(id, guards))) == 1  # every run has one
    mine = Guard()
    plain = train(config(tmp_path, output_dir=str(tmp_path / "plain")), data=TEXTS, callbacks=[mine])
    assert guards[len(told) :] == [mine] * len(told)  # the caller's in its place
    without_times = lambda r: [{k: v for k, v in x.items() if k not in TIMINGS} for x in r.history]
    assert without_times(plain) == without_times(result)


@pytest.mark.full
def test_a_run_whose_folder_is_removed_saves_its_step_and_can_be_continued(tmp_path):
    def remove(event: Event) -> None:
        if event.kind == "step" and event.step == 2:
            shutil.rmtree(tmp_path / "run", ignore_errors=True)

    c = config(tmp_path, max_steps=6, output_dir=str(tmp_path / "run"))
    with pytest.raises(CheckpointError, match=r"removed by step (\d); that step is saved in .*/run/checkpoints/\1:"):
        train(c, data=TEXTS, callbacks=[remove])
    assert train(c, data=TEXTS).checkpoint == tmp_path / "run/checkpoints/6"


@pytest.mark.full
@pytest.mark.parametrize("kind, last", [("step", (2, 3)), ("eval", (2,))])
def test_a_callback_stops_a_run_which_can_be_continued(tmp_path, kind, last):
    def stop(event: Event) -> None:
        if event.kind == kind and event.step == 2:
            event.stop("enough")

    stopped = train(config(tmp_path, max_steps=6), data=TEXTS, callbacks=[stop])
    assert not stopped.finished and int(stopped.state.step) in last
    assert stopped.checkpoint and stopped.checkpoint.name == str(int(stopped.state.step))
    rest = train(config(tmp_path, max_steps=6), data=list(TEXTS))
    whole = train(config(tmp_path, max_steps=6, output_dir=str(tmp_path / "whole")), data=TEXTS)
    assert losses(stopped) + losses(rest) == losses(whole)


def event(kind: str, step: int, stop=None, **metrics) -> Event:
    return Event(kind, step, 9, metrics, "", None, lambda: None, stop or (lambda reason: None))  # type: ignore[arg-type]


def test_the_first_callback_that_stops_is_the_reason():
    """Each is told of every event, in numbers; early stopping of its own data set alone."""
    events: list[Event] = []
    early = EarlyStopping(1, name="first")
    calls = Callbacks([events.append, early, lambda event: event.stop("a"), lambda event: event.stop("b")], 9)
    for name, loss in (("first", 2.0), ("other", 3.0)):
        calls.tell({"log": "eval", "step": 3, "loss": loss, "name": name, "over": "6 pairs"}, lambda: None)  # type: ignore[arg-type]
    assert calls.stopped_by == "a" and early.waited == 0
    told = [(e.kind, e.step, e.total_steps, dict(e.metrics), e.name) for e in events]
    assert told == [("eval", 3, 9, {"loss": loss}, name) for name, loss in (("first", 2.0), ("other", 3.0))]


def test_early_stopping_waits_for_its_patience():
    reasons: list[str] = []
    early = EarlyStopping(2, min_change=0.1)
    for step, loss in enumerate([3.0, 2.0, 1.95, 1.5, 1.6, 1.5]):
        assert not reasons
        early(event("eval", step, reasons.append, loss=loss))
    assert reasons == ["early stopping (no evaluation below 1.5000 in the last 2)"]


def evaluated(step: int, loss: float | None, name: str = "", log: str = "eval") -> dict:
    return {"log": log, "step": step, "loss": loss} | ({"name": name} if name else {})


COUNTED = [evaluated(2, 3.0), evaluated(4, 2.0), evaluated(6, 2.5)]  # of the dataset that decides
NOT_COUNTED = {
    "other dataset": [evaluated(2, 1.0, "other"), evaluated(4, 9.0, "other"), evaluated(6, 0.5, "other")],
    "training": [evaluated(5, 0.1, log="step")],
    "later": [evaluated(8, 0.1), evaluated(10, 0.2)],  # after the checkpoint of step 7
}


@pytest.mark.parametrize("more", [(), *((name,) for name in NOT_COUNTED), tuple(NOT_COUNTED)], ids=str)
@pytest.mark.parametrize("name", ["", "first"])
def test_early_stopping_after_a_restart_has_seen_what_the_run_had(tmp_path, more, name):
    """Evaluations of the first dataset up to the checkpoint, and nothing else; a loss that was NaN did not improve."""
    c = default_config()
    c.early_stopping_patience = 3
    datasets = [types.SimpleNamespace(name=name), types.SimpleNamespace(name="other")]

    def restarted(first_step: int, evaluations=datasets) -> EarlyStopping:
        start = types.SimpleNamespace(found=types.SimpleNamespace(evaluated=evaluations), first_step=first_step)
        return early_stopping(c, tmp_path, start)  # type: ignore[arg-type]

    file = tmp_path / "metrics.jsonl"
    assert restarted(7).best == math.inf  # a file that somebody removed
    others = [record for kind in more for record in NOT_COUNTED[kind]]
    for counted in (COUNTED, [*COUNTED, evaluated(7, None)]):
        records = [{"name": name} | record if name else record for record in (*counted, *others)]
        file.write_text("".join(json.dumps(record) + "\n" for record in sorted(records, key=lambda r: r["step"])))
        early = restarted(7)
        assert (early.patience, early.name, early.best) == (3, name, 2.0)
        assert early.waited == len(counted) - 2 and not early.is_over
        early.see(2.0)
        assert early.is_over == (len(counted) == 4)
        assert restarted(4).waited == 0 and restarted(3).best == 3.0
        assert (restarted(0).best, restarted(0).waited) == (math.inf, 0)
    c.early_stopping_patience = 0
    assert restarted(7, []).patience == math.inf


def said(losses, norm=1.0, lr=3e-4) -> list[str]:
    """What a guard says of a run with these losses."""
    lines: list[str] = []
    guard = Guard(tell=lines.append)
    for step, loss in enumerate(losses, start=1):
        metrics = {"loss": float(loss), "norm": norm, "lr": lr}
        guard(Event("step", step, len(losses), metrics, "", None, lambda: None, lambda reason: None))  # type: ignore[arg-type]
    return lines


def falling(steps: int, seed: int, noise: float = 0.1) -> np.ndarray:
    """A healthy run: a power law of the steps, noise with heavy tails, and now and then a batch of other data."""
    rng = np.random.default_rng(seed)
    losses = 2 + 8 * np.arange(1, steps + 1) ** -0.3 + noise * rng.standard_t(3, steps)
    losses[rng.integers(0, steps, steps // 50)] += 2
    return losses


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.3])
def test_a_guard_says_nothing_of_a_noisy_run_that_learns(noise):
    for seed in range(3):
        assert not said(falling(4000, seed, noise))


def test_a_guard_says_a_spike_once_as_often_as_there_is_one():
    losses = falling(1000, 0)
    for start in (200, 600):
        losses[start : start + 40] += np.linspace(3, 0, 40)
    lines = said(losses)
    assert len(lines) == 2 and "the loss spikes:" in lines[0] and "at step 205, in 5 steps above" in lines[0]
    assert "at step 605, " in lines[1] and "the median of the last 100 is" in lines[1]
    almost = np.full(200, 1.5)  # a text learned by heart, then a batch that is a little worse
    almost[150:] += 0.09
    assert not said(almost)


def test_a_guard_says_a_loss_that_stands_still():
    """From the beginning, and after a while; not at learning rates of zero, nor if noise hides what is learned."""
    noise = np.random.default_rng(0).normal(0, 0.02, 3000)
    assert said(np.log(32000) + noise[:499]) == []
    (line,) = said(np.log(32000) + noise[:500])
    assert line.startswith("note: the loss stands still: 10.37") and " in steps 376 to 500, at learning" in line
    later = falling(3000, 0, 0.02)
    later[1000:] = later[990] + noise[1000:]
    assert {line[:32] for line in said(later)} == {"note: the loss stands still: 3.0"}
    assert not said(np.log(32000) + noise[:500], lr=0.0) and not said(2 + 50 * noise[:500])


def test_the_rules_of_a_guard_at_their_limits():
    """The spread of normal noise is its standard deviation. A fall counts if it is beyond three errors of a median."""
    noise = np.random.default_rng(1).normal(3, 0.5, 20_001)
    assert guard.noise_deviation(noise.tolist()) == pytest.approx(0.5, rel=0.03)
    level = [2.0] * 8
    assert guard.stands_still(level, [2.0] * 8) and guard.stands_still(level, [1.9901] * 8)
    assert not guard.stands_still(level, [1.9899] * 8)  # 0.5 % less
    spread = [2 + 0.01 * sign for sign in (-1, 1) * 8]
    error = 1.4826 * 0.01 * math.sqrt(math.pi / 2 * 2 / 16)  # of the difference of two medians
    assert 3 * error > 0.005 * 2 and not guard.stands_still(spread, spread)
    wide = [10 + 0.01 * sign for sign in (-1, 1) * 8]
    assert guard.stands_still(wide, [x - (0.05 - 3.01 * error) for x in wide])
    assert not guard.stands_still(wide, [x - (0.05 - 2.99 * error) for x in wide])


def test_a_run_stops_for_the_first_reason():
    told = []

    def stops(event: Event) -> None:
        told.append((event.kind, event.step, event.total_steps, dict(event.metrics), event.name, event.checkpoint))
        event.stop("first")
        event.stop("second")

    callbacks = Callbacks([stops, stops], total_steps=9)
    record = {"log": "eval", "step": 3, "loss": 2, "tokens": 5.0, "name": "held", "text": "no number"}
    assert callbacks.stopped_by == ""
    callbacks.tell(record, lambda: None)  # type: ignore[arg-type]
    assert told == [("eval", 3, 9, {"loss": 2.0, "tokens": 5.0}, "held", None)] * 2
    assert callbacks.stopped_by == "first"
    Callbacks([], total_steps=9).tell({}, lambda: None)  # type: ignore[arg-type]


def test_a_guard_says_gradients_of_zero_once():
    assert said([2.5] * 4, norm=0.0) == [] and len(said([2.5] * 20, norm=0.0)) == 1
    assert "all gradients of 5 steps up to step 5 are zero" in said([2.5] * 5, norm=0.0)[0]


# -- Rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_rows_are_trained_on_as_those_of_a_file(tmp_path):
    """To the bit: texts, records, and the ids that a tokenizer makes of them."""
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    of_file = losses(train(config(tmp_path, datasets=[dict(path=str(file))], output_dir=str(tmp_path / "file"))))
    given = losses(train(config(tmp_path), data=TEXTS))
    records = losses(train(config(tmp_path, output_dir=str(tmp_path / "b")), data=[{"text": text} for text in TEXTS]))
    assert of_file == given == records


@pytest.mark.full
def test_token_ids_are_trained_on(tmp_path):
    ids = np.random.default_rng(0).integers(0, 256, (40, 50))
    result = train(config(tmp_path), data=ids)
    assert result.finished and "bits_per_byte" not in result.history[-1]
    one_row = train(config(tmp_path, output_dir=str(tmp_path / "one")), data=ids.reshape(-1).astype(np.uint16))
    assert one_row.finished
    lists = train(config(tmp_path, output_dir=str(tmp_path / "lists")), data=ids.tolist())
    assert losses(lists) == losses(result)


@pytest.mark.full
def test_conversations_are_rows(tmp_path):
    rows = [
        [{"role": "user", "content": f"{i} + {i}?"}, {"role": "assistant", "content": str(i + i)}] for i in range(40)
    ]
    assert train(config(tmp_path, chat_template="chatml", sequence_len=128), data=rows).finished


class Changing:
    """Other rows each time."""

    def __init__(self):
        self.times = 0

    def __iter__(self):
        self.times += 1
        return iter([f"{text} {self.times}" for text in TEXTS])


@pytest.mark.parametrize(
    "data, said",
    [
        (iter(TEXTS), "data: expected rows that can be read again, got an iterator; give a list"),
        (Changing(), "data: expected the same rows each time they are read, got others"),
        ([*TEXTS, 7], "the rows given, row 65: expected a str, a mapping of fields"),
        ([*TEXTS, []], "the rows given, row 65: expected a str, a mapping of fields"),
        (np.full((40, 50), 9999), "the rows given, row 1: expected ids below the tokenizer's"),
        (np.zeros((40, 50)), "the rows given, row 1: expected token ids, integers"),
        ([[1, 2], [3, "x"]], "the rows given, row 2: expected token ids, integers"),
        ([], "the rows given: expected rows, got none"),
    ],
)
def test_rows_that_cannot_be_used_are_refused_in_a_line(tmp_path, data, said):
    with pytest.raises(ConfigError) as error:
        train(config(tmp_path), data=data)
    assert said in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.full
def test_a_run_is_not_continued_with_other_rows(tmp_path):
    train(config(tmp_path, max_steps=2), data=TEXTS)
    with pytest.raises(CheckpointError, match="is of another run: data is"):
        train(config(tmp_path), data=TEXTS[1:])


# -- Optimizers and objectives ----------------------------------------------------------------------------------------


@pytest.mark.full
def test_adam_of_optax_is_that_of_the_config(tmp_path):
    """With the config's schedule and clipping, and without the decay; its counts are the run's, also when resumed."""
    fields = {"max_steps": 6, "warmup_steps": 2, "max_grad_norm": 0.5}
    adam = lambda rate: optax.adam(rate, b1=0.9, b2=0.95)
    own = train(config(tmp_path, **fields, weight_decay=0.0), data=TEXTS)
    theirs = config(tmp_path, **fields, output_dir=str(tmp_path / "theirs"))

    def stop(event: Event) -> None:
        if event.kind == "eval" and event.step == 2:
            event.stop("enough")

    first = train(theirs, data=TEXTS, optimizer=adam, callbacks=[stop])
    rest = train(theirs, data=TEXTS, optimizer=adam)
    np.testing.assert_allclose(losses(first) + losses(rest), losses(own), rtol=1e-5)
    assert len(jax.tree.leaves(rest.state.moments)) == 2 * len(jax.tree.leaves(rest.state.master))


@pytest.mark.full
@pytest.mark.parametrize(
    "placed", [{"gpus": 2, "zero_level": 3}, {"gpus": 2, "zero_level": 2, "offload_optimizer": True}]
)
def test_an_optimizer_of_optax_is_sharded(tmp_path, placed):
    alone = losses(train(config(tmp_path, per_device_batch_size=8), data=TEXTS, optimizer=optax.lion))
    sharded = config(tmp_path, **placed, output_dir=str(tmp_path / "sharded"))
    np.testing.assert_allclose(losses(train(sharded, data=TEXTS, optimizer=optax.lion)), alone, rtol=1e-4)


@pytest.mark.parametrize(
    "make", [optax.adamw, optax.sgd, optax.lion, optax.nadam, optax.rmsprop, optax.adamax, optax.radam]
)
def test_elementwise_optimizers_of_optax_are_taken(make):
    assert isinstance(counts(make), list)


@pytest.mark.parametrize(
    "make, said",
    [
        (optax.lamb, "expected updates that read one element"),
        (optax.adafactor, "expected "),
        (lambda rate: optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(rate)), "expected updates that read one"),
        (lambda rate: optax.adagrad(rate, initial_accumulator_value=0.1), "expected a state of zeros"),
        (optax.adamw(1e-3), "expected a function of the learning rate, got TypeError"),
    ],
)
def test_optimizers_that_cannot_be_sharded_are_refused_in_a_line(make, said):
    with pytest.raises(ConfigError) as error:
        counts(make)
    assert str(error.value).startswith("optimizer: ") and said in str(error.value) and "\n" not in str(error.value)


def test_an_optimizer_of_optax_has_the_clipping_of_a_config_without_decay(tmp_path):
    """As configs/finetune.py has none, the config of a call that names only a model."""
    c = config(tmp_path, weight_decay=0.0, max_grad_norm=0.5)
    optimizer = from_config(c, make_mesh(jax.devices()[:1]), 1, brought=Brought(optax.lion)).optimizer
    clip = optimizer.scalars(jax.numpy.int32(0), jax.numpy.float32(8))["clip"]
    np.testing.assert_allclose(clip, 0.5 / 8, rtol=1e-6)


def cross_entropy(logits_NV, labels_N):
    return optax.softmax_cross_entropy_with_integer_labels(logits_NV, labels_N)


def smoothed(logits_NV, labels_N):
    return 0.9 * cross_entropy(logits_NV, labels_N) - 0.1 * jax.nn.log_softmax(logits_NV).mean(-1)


@pytest.mark.full
def test_a_loss_of_logits(tmp_path):
    """Cross-entropy as one is cross-entropy; another one trains and is evaluated."""
    plain = train(config(tmp_path), data=TEXTS)
    own = config(tmp_path, output_dir=str(tmp_path / "own"))
    np.testing.assert_allclose(
        losses(train(own, data=TEXTS, objective=LossOfLogits(cross_entropy))), losses(plain), rtol=1e-5
    )
    other = train(config(tmp_path, output_dir=str(tmp_path / "other")), data=TEXTS, objective=LossOfLogits(smoothed))
    assert losses(other)[-1] < losses(other)[0] and losses(other) != losses(plain)


class Two(CrossEntropy):
    """An objective that returns more than a loss."""

    def loss(self, *arguments):
        return super().loss(*arguments), 1


class Half(CrossEntropy):
    """An objective whose loss is of another float type, which is one."""

    def loss(self, *arguments):
        return super().loss(*arguments).astype("bfloat16")


def test_a_loss_may_be_any_float(tmp_path):
    model = model_of(config(tmp_path))
    check_objective(Half(), model, "float32", is_sharded=False)
    check_objective(Summed(), model, "float32", is_sharded=True)  # its axes are those of the run


class Summed(CrossEntropy):
    """An objective that forgets to add up."""

    def loss(self, model, outer, x_ND, targets, axes):
        return x_ND[:, 0]


class FloatCount(CrossEntropy):
    """An objective that counts in floats."""

    def count(self, targets):
        return super().count(targets).astype(jax.numpy.float32)


@pytest.mark.parametrize(
    "fields, brought, said",
    [
        ({"weight_decay": 0.3}, {"optimizer": optax.lion}, "weight_decay: expected 0.1 with an optimizer of optax"),
        ({"adamw_beta1": 0.5}, {"optimizer": optax.lion}, "adamw_beta1: expected 0.9 with an optimizer of optax"),
        ({"z_loss": 1e-4}, {"objective": LossOfLogits(smoothed)}, "z_loss: expected 0 with an objective"),
        ({}, {"objective": LossOfLogits(smoothed, tuple("scores"))}, "among labels, .*, got c, e, o, r, s; train"),
        ({"gpus": 2, "tp_size": 2}, {"objective": LossOfLogits(smoothed)}, "objective: expected a whole vocabulary"),
        ({"data": "stdlib"}, {}, "data: expected none in the config beside rows given"),
        ({}, {"objective": LossOfLogits(lambda z, y: cross_entropy(z, y).mean())}, r"losses \[N\].* got float32 \[\];"),
        ({}, {"objective": LossOfLogits(lambda z, y: z)}, r"losses \[N\].* got float32 \[N, 320\]; return each"),
        ({}, {"objective": LossOfLogits(lambda z, y: y)}, r"losses \[N\].* got int32 \[N\]; return each"),
        ({}, {"objective": LossOfLogits(lambda z: z)}, r"a function that JAX can trace, got TypeError"),
        ({}, {"objective": cross_entropy}, r"expected LossOfLogits\(function\).* got a function, .*; wrap it"),
        ({}, {"objective": 3}, "got int, which has no targets"),
        ({}, {"objective": FloatCount()}, r"objective.count: expected int32 \[\], got float32 \[\]; return that"),
        ({}, {"objective": Two()}, r"objective.loss: expected float32 \[\], got tuple of float32 \[\], "),
        ({}, {"objective": LossOfLogits(3)}, "objective: expected a function in LossOfLogits, got 3; pass one"),
        ({}, {"objective": LossOfLogits(lambda z, y: None)}, r"losses \[N\].* got None; return each token's loss"),
        ({}, {"objective": LossOfLogits(lambda z, y: (z,))}, r"got tuple of float32 \[N, 320\]; return each"),
        (
            {"objective": "orpo"},
            {"objective": LossOfLogits(smoothed)},
            "objective: expected 'cross_entropy' with an obj",
        ),
        ({}, {"objective": Summed()}, r"objective.loss: expected float32 \[\], got float32 \[N\]; return that"),
        ({}, {"optimizer": optax.adam(1e-3)}, "optimizer: .* is not callable"),
        ({}, {"callbacks": print}, "callbacks: expected a list of functions, got print; put it in a list"),
        ({}, {"callbacks": "ab"}, "callbacks: expected a list of functions, got str; put it in a list"),
        ({}, {"callbacks": [lambda: None]}, "callbacks: expected functions of an Event, got <lambda>"),
        ({}, {"max_minutes": -1}, "max_minutes: expected minutes, 0 or more"),
    ],
)
def test_what_does_not_go_with_the_config_is_refused(tmp_path, fields, brought, said):
    with pytest.raises(ConfigError, match=said):
        train(config(tmp_path, **fields), data=TEXTS, **brought)


# -- Blocks -----------------------------------------------------------------------------------------------------------


class SideBySide(Block):
    """Attention and MLP of one norm, and what they add times a factor for each channel, which is a new parameter."""

    def __init__(self, config, *, rngs):
        super().__init__(config, rngs=rngs)
        self.scale = vector(rngs, config.hidden_size, "embed", jax.nn.initializers.constant(0.5))

    def __call__(self, x_BSD, ops, cache, routing):
        """The block of x, with the results of attention's cache and of a router."""
        y_BSD = ops.norm(x_BSD, self.attention_norm[...], self.config.rms_norm_eps)
        attended_BSD, cache = self.attention(y_BSD, ops, None, cache)
        products_BSD, routed = self.mlp(y_BSD, ops, None, routing)
        return x_BSD + self.scale[...][None, None] * (attended_BSD + products_BSD), cache, routed


class Doubled(SideBySide):
    """Another block of the same parameters."""

    factor = 2.0

    def __call__(self, x_BSD, ops, cache, routing):
        y_BSD, cache, routed = super().__call__(x_BSD, ops, cache, routing)
        return x_BSD + self.factor * (y_BSD - x_BSD), cache, routed


@pytest.mark.full
def test_a_block_is_trained_and_continued_with_itself_alone(tmp_path):
    """It samples at its end. Nothing else opens its checkpoints; another block does not continue it."""
    c = config(tmp_path, sample_tokens=4, max_steps=6)

    def stop(event: Event) -> None:
        if event.kind == "eval" and event.step == 2:
            event.stop("enough")

    first = train(c, data=TEXTS, block=SideBySide, callbacks=[stop])
    for block, said in ((Doubled, "'Doubled [0-9a-f]{8}' here"), (None, "None here")):
        with pytest.raises(
            CheckpointError, match=f"of another run: block is 'SideBySide [0-9a-f]{{8}}' there and {said}"
        ):
            train(c, data=TEXTS, block=block)
    with pytest.raises(ConfigError, match=r"block: expected the standard one, got a checkpoint of SideBySide"):
        load_trained(c.output_dir)
    loop = OwnLoop(c, data=TEXTS, block=SideBySide)
    tensors = loop.tensors(loop.first_state())
    assert tensors["model.layers.1.scale"].shape == (32,) and (tensors["model.layers.1.scale"] != 0.5).all()
    rest = train(c, data=TEXTS, block=SideBySide)
    assert losses(rest)[-1] < losses(first)[0]
    assert (np.asarray(rest.state.weights["blocks"]["scale"]) != 0.5).all()


@pytest.mark.full
def test_a_block_is_sharded_and_offloaded_to_the_same_losses(tmp_path):
    plain = config(tmp_path, per_device_batch_size=8)
    placed = dict(gpus=2, zero_level=3, offload_weights=True, offload_grads=True, offload_optimizer=True)
    alone = losses(train(plain, data=TEXTS, block=SideBySide))
    sharded = train(config(tmp_path, **placed, output_dir=str(tmp_path / "sharded")), data=TEXTS, block=SideBySide)
    np.testing.assert_allclose(losses(sharded), alone, rtol=1e-5)
    other = train(config(tmp_path, per_device_batch_size=8, output_dir=str(tmp_path / "b")), data=TEXTS, block=Doubled)
    assert abs(losses(other)[0] - alone[0]) > 1e-4  # they differ from the first step on, where rounding is 1e-6


def returning(result) -> type[Block]:
    """A block with the results of this function of its input and cache."""

    class Returning(Block):
        def __call__(self, x_BSD, ops, cache, routing):
            return result(x_BSD, cache)

    return Returning


class WithoutRngs(Block):
    def __init__(self, config):
        super().__init__(config, rngs=None)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "fields, block, said",
    [
        ({}, dict, "block: expected a subclass of surojax.Block, got <class 'dict'>"),
        ({}, 3, "block: expected a subclass of surojax.Block, got 3; derive it"),
        ({"lora": True}, SideBySide, "lora: expected False with a block of your own"),
        ({}, returning(lambda x, cache: x), r"Returning.__call__: expected \(output, cache, routed\)"),
        ({}, returning(lambda x, cache: (x[..., :8], cache, None)), r"float32 \[2, 32, 32\], got float32 \[2, 32, 8\]"),
        ({}, returning(lambda x, cache: (x.astype("float16"), cache, None)), "expected float32 .*, got float16"),
        ({}, returning(lambda x, cache: (x, cache, x)), "expected None without experts as its third result"),
        ({}, WithoutRngs, r"__init__: expected \(config, \*, rngs\).*, got TypeError"),
    ],
)
def test_blocks_that_cannot_be_trained_are_refused(tmp_path, fields, block, said):
    with pytest.raises(ConfigError, match=said):
        train(config(tmp_path, **fields), data=TEXTS, block=block)


def variant(change: str, tmp_path) -> str:
    """The identity of SideBySide with a line of its source changed, as a module of its own."""
    name = f"block_{abs(hash(change))}"
    (tmp_path / f"{name}.py").write_text(BLOCK_SOURCE.replace("THE_LINE", change))
    spec = importlib.util.spec_from_file_location(name, tmp_path / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return block_identity(module.Mine)


BLOCK_SOURCE = """
from surojax import Block


class Mine(Block):
    factor = 1.0

    def __call__(self, x, ops, cache=None, routing=None):
        THE_LINE
        return super().__call__(self.factor * x, ops, cache, routing)
"""


def test_the_identity_of_a_block_is_what_its_classes_compute(tmp_path):
    """Comments and docstrings are not; where a class has no source, its name is all."""
    plain = variant("# a comment", tmp_path)
    assert plain == variant("# another", tmp_path) and re.fullmatch("Mine [0-9a-f]{8}", plain)
    assert variant('"""A docstring."""', tmp_path) == plain != variant("x = 2 * x", tmp_path)
    assert block_identity(SideBySide) != block_identity(Doubled)
    doubled = type("Doubled", (SideBySide,), {"factor": 3.0, "__call__": Doubled.__call__})
    assert block_identity(doubled) != block_identity(Doubled)
    made = lambda **more: block_identity(type("Doubled", (SideBySide,), {"__call__": Doubled.__call__} | more))
    assert made() == made(_hidden=1) == made(other=object()) == made(helper=cross_entropy) != made(number=1)
    assert made(number=1, other=2) == made(other=2, number=1)
    without = resume._without_docstring
    assert without('def f():\n    """Nothing."""') == without("def f():\n    pass") != without("def f():\n    return 1")
    assert without("double = lambda self, x: 2 * x  # a comment") == "double = lambda self, x: 2 * x"
    names: dict = {}
    exec(BLOCK_SOURCE.replace("THE_LINE", "pass"), names)
    assert block_identity(names["Mine"]) == "Mine"


# -- A loop of one's own ----------------------------------------------------------------------------------------------


@pytest.mark.full
def test_an_own_loop_is_the_run(tmp_path):
    """To the bit, with the losses of its evaluations; its tensors have Hugging Face's names."""
    run = OwnLoop(config(tmp_path), data=TEXTS)
    state = run.first_state()
    found = []
    for _, batch in zip(range(run.total_steps), run.batches(), strict=False):
        state, metrics = run.step(state, batch)
        found.append(float(metrics["loss"]))
    evaluated = run.evaluate(state)
    tensors = run.tensors(state)
    assert not (tmp_path / "run").exists()
    result = train(config(tmp_path), data=TEXTS)
    assert found == losses(result) and evaluated[""] == result.history[-1]["loss"]
    assert tensors["model.layers.1.mlp.up_proj.weight"].shape == (64, 32)
    expected = jax.tree.leaves(result.state.master)
    assert sum(x.size for x in tensors.values()) == sum(x.size for x in expected)


@pytest.mark.full
@pytest.mark.parametrize("placed", [{}, {"gpus": 2, "zero_level": 3, "per_device_batch_size": 2}])
def test_gradients_of_a_batch(tmp_path, placed):
    """They predict the change of the loss that a small step against them makes."""
    run = OwnLoop(config(tmp_path, **placed), data=TEXTS, optimizer=optax.sgd)
    state = run.first_state()
    batch = next(iter(run.batches()))
    loss, gradients = run.loss_and_gradients(state, batch)
    before = run.tensors(state)
    assert gradients.keys() == before.keys()
    state, metrics = run.step(state, batch)
    assert loss == pytest.approx(float(metrics["loss"]), rel=1e-5)
    norm = np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in gradients.values()))
    assert norm == pytest.approx(float(metrics["grad_norm"]), rel=1e-5)
    moved = run.tensors(state)
    clip = min(1.0, 1.0 / norm)
    for name, gradient in gradients.items():
        expected = before[name] - float(metrics["lr"]) * clip * gradient
        np.testing.assert_allclose(moved[name], expected, rtol=1e-4, atol=1e-6)


def test_an_own_loop_refuses_what_needs_the_runs(tmp_path):
    with pytest.raises(ConfigError, match="lora: expected none in a loop of your own"):
        OwnLoop(config(tmp_path, lora=True), data=TEXTS)


@pytest.mark.full
@pytest.mark.parametrize("text", re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL), ids=lambda x: x[:40])
def test_examples_of_the_page_run(text, tmp_path, monkeypatch):
    """As they are, to the end of their training."""
    monkeypatch.chdir(tmp_path)
    exec(text, {})


def test_editors_see_the_public_names():
    """The imports for type checkers in surojax/__init__.py are those that are made."""
    source = Path(surojax.__file__).read_text()
    seen = {
        alias.asname: node.module
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("surojax.")
        for alias in node.names
    }
    assert seen == surojax._HOMES
