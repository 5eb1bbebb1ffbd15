"""GRPO: rows of rollouts, losses and gradients against a textbook and TRL, on every mesh and placement, and runs."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import CONFIG, Small, drawn_params, plain_model, quick_at, worst_relative

from surojax import ConfigError, default_config, read_metrics, train
from surojax.data.data_rows import BadRow, DataRow
from surojax.data.examples import Example
from surojax.data.rollouts import RolloutEncoder
from surojax.objectives.grpo import Grpo, GrpoSettings
from surojax.objectives.objective import ADVANTAGE, LABELS, REFERENCE, SAMPLED
from surojax.run.metrics import TIMINGS
from surojax.step.train_step import make_gradients, make_train_step
from surojax.training import reference

RECORDED = json.loads((Path(__file__).parent / "fixtures" / "grpo_reference.json").read_text())
A, B, S = 2, 4, 16
ORDER_OF_SUMS = 1e-5  # float32, in another order


@pytest.mark.parametrize("case", RECORDED["cases"], ids=lambda case: "-".join([*map(str, case["settings"].values())]))
def test_loss_gradients_and_metrics_are_those_of_trl(case):
    """Recorded by fixtures/make_grpo_reference.py. Metrics of TRL are means over tokens, ours over the loss's terms."""
    of_run = Grpo(GrpoSettings(**case["settings"]))
    lengths = np.array(RECORDED["lengths"])
    is_label = np.arange(6) < lengths.reshape(-1, 1)
    targets = {
        LABELS: np.where(is_label, 5, -1),
        SAMPLED: np.float32(RECORDED["sampled"]),
        REFERENCE: np.float32(RECORDED["reference"]),
        ADVANTAGE: np.array(RECORDED["advantages"], np.float32).reshape(-1, 1) * is_label.astype(np.float32),
    }
    logprob = np.where(is_label, np.float32(RECORDED["logprob"]), 0)
    sums, weights = jax.jit(of_run.sums_and_weights)(logprob, targets)
    terms = int(of_run.count(targets))
    assert terms == (lengths.sum() if of_run.settings.grpo_loss_type == "dapo" else len(lengths))
    np.testing.assert_allclose(sums["loss"] / terms, case["loss"], rtol=1e-5)
    np.testing.assert_allclose(-weights / terms, case["gradient"], rtol=1e-5, atol=1e-8)
    s = of_run.settings
    alike = {"dapo": {"kl", "clip_ratio/low_mean", "clip_ratio/high_mean"}}.get(s.grpo_loss_type, set())
    if s.importance_sampling_level == "sequence":
        alike = {"clip_ratio/low_mean", "clip_ratio/high_mean"}
    for name in alike & set(of_run.metrics):
        np.testing.assert_allclose(sums[name] / terms, case["metrics"][name], rtol=1e-5)


def test_a_row_that_fills_up_a_batch_counts_nothing():
    """It has no completion, whose length a mean would be divided by."""
    of_run = Grpo(GrpoSettings(grpo_loss_type="grpo", importance_sampling_level="sequence"))
    computed = jax.jit(of_run.sums_and_weights)
    labels = np.int32([[1, 2, -1], [3, 4, 5], [-1, -1, -1]])
    logprob = np.float32([[-1, -2, 0], [-3, -1, -2], [0, 0, 0]])
    targets = {LABELS: labels, SAMPLED: logprob - 0.1, ADVANTAGE: (labels >= 0) * np.float32([[1], [-2], [0]])}
    whole = computed(logprob, targets)
    sums, weights = computed(logprob[:2], {name: x[:2] for name, x in targets.items()})
    for name, x in sums.items():
        assert float(whole[0][name]) == pytest.approx(float(x)), name
    np.testing.assert_allclose(whole[1], [*weights, [0, 0, 0]], rtol=1e-6)
    assert of_run.count(targets) == 2


def batch(seed: int = 0) -> dict[str, np.ndarray]:
    """Prompts and completions of uneven lengths; the sampler and the reference are other models than the policy."""
    rng = np.random.default_rng(seed)
    inputs = rng.integers(1, 64, (A, B, S)).astype(np.int32)
    arrays = {"inputs": inputs, LABELS: np.full((A, B, S), -1, np.int32)}
    arrays |= {name: np.zeros((A, B, S), np.float32) for name in (SAMPLED, ADVANTAGE, REFERENCE)}
    for a, b in np.ndindex(A, B):
        start = rng.integers(1, 6)
        end = rng.integers(start + 1, S - 1)
        arrays[LABELS][a, b, start:end] = inputs[a, b, start + 1 : end + 1]
        inputs[a, b, end + 1 :] = 0
        arrays[SAMPLED][a, b, start:end] = -4.2 + 0.7 * rng.standard_normal(end - start)
        arrays[REFERENCE][a, b, start:end] = -4.2 + 0.7 * rng.standard_normal(end - start)
        arrays[ADVANTAGE][a, b, start:end] = rng.standard_normal()
    return arrays


def settings(loss_type: str = "dapo", level: str = "token") -> GrpoSettings:
    epsilon = 0.03 if level == "sequence" else 0.2  # ratios of sequences are closer to 1
    return GrpoSettings(epsilon, 1.5 * epsilon, 0.1, loss_type, level, 12)


def engine_of(small: Small, of_run: Grpo):
    return dataclasses.replace(small.engine, objective=of_run)


def results(of_run: Grpo, devices: int = 1, **options):
    """(loss, gradients) of the engine."""
    small = Small(devices, **options)
    engine = engine_of(small, of_run)
    arrays = batch()
    on_devices = small.put([arrays[name] for name in engine.batch_arrays])
    gradients = make_gradients(engine, small.optimizer, small.plan, small.mesh)
    loss, grads = gradients(small.state.weights, small.state.progress, *on_devices)
    return float(loss), jax.device_get(grads)


def reported(of_run: Grpo, devices: int = 1, **options) -> dict[str, float]:
    small = Small(devices, **options)
    engine = engine_of(small, of_run)
    step = make_train_step(engine, small.optimizer, small.plan, small.mesh)
    _, metrics = step(small.state, *small.put([batch()[name] for name in engine.batch_arrays]))
    return {name: float(metrics[name]) for name in (*of_run.metrics, "grad_norm")}


def by_hand(s: GrpoSettings):
    """(loss, gradients) of the plain model with autodiff, one completion at a time, in words of the papers."""
    rows = {name: x.reshape(-1, S) for name, x in batch().items()}
    params = drawn_params(CONFIG, 0)
    n_tokens = int((rows[LABELS] >= 0).sum())

    def loss(params):
        nats = jax.nn.log_softmax(plain_model(CONFIG)(params, rows["inputs"]), axis=-1)
        total = 0.0
        for b in range(A * B):
            (places,) = np.nonzero(rows[LABELS][b] >= 0)
            logprob = nats[b, places, rows[LABELS][b, places]]
            ratio = jnp.exp(logprob - rows[SAMPLED][b, places])
            if s.importance_sampling_level == "sequence":
                ratio = jnp.prod(ratio) ** (1 / len(places)) * jnp.ones(len(places))
            advantage = rows[ADVANTAGE][b, places]
            clipped = jnp.clip(ratio, 1 - s.epsilon, 1 + s.epsilon_high)
            d = rows[REFERENCE][b, places] - logprob
            losses = -jnp.minimum(ratio * advantage, clipped * advantage) + s.grpo_beta * (jnp.exp(d) - d - 1)
            of_loss_type = {
                "dapo": losses.sum() / n_tokens,
                "grpo": losses.mean() / (A * B),
                "dr_grpo": losses.sum() / s.max_completion_length / (A * B),
            }
            total += of_loss_type[s.grpo_loss_type]
        return total

    value, grads = jax.jit(jax.value_and_grad(loss))(params)
    return float(value), jax.device_get(grads)


KINDS = [("grpo", "sequence"), ("dapo", "token"), ("dr_grpo", "token")]


@pytest.mark.parametrize("loss_type, level", quick_at(KINDS))
def test_loss_and_gradients_are_the_textbooks(loss_type, level):
    s = settings(loss_type, level)
    loss, grads = results(Grpo(s))
    expected, expected_grads = by_hand(s)
    assert loss == pytest.approx(expected, rel=ORDER_OF_SUMS)
    assert worst_relative(grads, expected_grads) < ORDER_OF_SUMS


@pytest.mark.full
@pytest.mark.parametrize("loss_type, level", KINDS)
def test_several_completions_in_a_row_are_those_in_rows_of_their_own(loss_type, level):
    of_run = Grpo(settings(loss_type, level))
    loss, grads = results(of_run)
    small = Small(1, packed=True)
    engine = engine_of(small, of_run)
    rows = {name: x.reshape(A, B // 2, 2 * S) for name, x in batch().items()}
    rows["starts"] = np.broadcast_to(np.repeat(np.int32([0, S]), S), rows["inputs"].shape)
    gradients = make_gradients(engine, small.optimizer, small.plan, small.mesh)
    arrays = small.put([rows[name] for name in engine.batch_arrays])
    other, other_grads = gradients(small.state.weights, small.state.progress, *arrays)
    assert float(other) == pytest.approx(loss, rel=ORDER_OF_SUMS)
    assert worst_relative(jax.device_get(other_grads), grads) < ORDER_OF_SUMS


@functools.cache
def on_one_device(of_run: Grpo):
    """(loss, gradients, metrics)."""
    return *results(of_run), reported(of_run)


@pytest.mark.full
def test_ratios_of_sequences_whose_tokens_are_on_several_devices():
    """Loss, gradients, and all that is reported, are those of one device."""
    placed: dict[str, Any] = {"devices": 4, "cp_size": 2, "microbatches_per_fetch": 2}
    of_run = Grpo(settings("grpo", "sequence"))
    loss, grads, metrics = on_one_device(of_run)
    other, other_grads = results(of_run, **placed)
    assert other == pytest.approx(loss, rel=ORDER_OF_SUMS)
    assert worst_relative(other_grads, grads) < ORDER_OF_SUMS
    assert 0 < metrics["clip_ratio/low_mean"] < 0.6 and 0 < metrics["clip_ratio/high_mean"] < 0.6
    assert reported(of_run, **placed) == pytest.approx(metrics, rel=1e-4)


# -- Rows -------------------------------------------------------------------------------------------------------------

ROW = {
    "prompt_ids": [5, 6],
    "completion_ids": [[7, 2], [8, 9, 2], [3]],
    "logprobs": [[-0.1, -0.3], [-1.2, -0.4, -0.1], [-2.0]],
    "rewards": [1.0, 0.0, 0.5],
}


def example(record) -> Example | BadRow:
    return RolloutEncoder(64).item(DataRow(record, "a.jsonl:7")).content


@pytest.mark.parametrize("given", [{}, {"advantages": [2.0, -1.0, 0.5]}, {"prompt_ids": np.array([5, 6])}])
def test_a_row_has_a_document_for_each_completion(given):
    found = example(ROW | given)
    assert isinstance(found, Example) and found.trained is not None and found.ends == (4, 9)
    np.testing.assert_array_equal(found.ids, [5, 6, 7, 2, 5, 6, 8, 9, 2, 5, 6, 3])
    np.testing.assert_array_equal(found.trained, [0, 0, 1, 1, 0, 0, 1, 1, 1, 0, 0, 1])
    np.testing.assert_allclose(found.numbers[SAMPLED], [0, 0, -0.1, -0.3, 0, 0, -1.2, -0.4, -0.1, 0, 0, -2], rtol=1e-6)
    advantages = np.array(given.get("advantages", np.array([0.5, -0.5, 0]) / (0.5 + 1e-4)))
    np.testing.assert_allclose(found.numbers[ADVANTAGE], np.repeat(advantages, [4, 5, 3]), rtol=1e-6)


def test_rewards_may_be_true_and_false():
    same = [True, False, True], [True, 0, 1.0], np.asarray([True, False, True]), [1.0, 0.0, 1.0]
    found = [example(ROW | {"rewards": rewards}) for rewards in same]
    advantages = [x.numbers[ADVANTAGE].tolist() for x in found if isinstance(x, Example)]
    assert advantages == [advantages[-1]] * len(same)
    equal = example(ROW | {"rewards": [1.0, 1.0, 1.0]})  # a group that teaches nothing is a row all the same
    assert isinstance(equal, Example) and not equal.numbers[ADVANTAGE].any()


BAD_ROWS = [
    ({"prompt_ids": None}, "expected token ids in 'prompt_ids', got 'prompt_ids', 'completion_ids'"),
    ({"prompt_ids": []}, "prompt_ids: expected token ids, integers [tokens], got none"),
    ({"prompt_ids": [5, True]}, "prompt_ids: expected token ids, integers [tokens], got lists of other lengths, or"),
    ({"logprobs": [[-0.1, False], [-1.2, -0.4, -0.1], [-2]]}, "logprobs[0]: expected a list of numbers, got [-0.1,"),
    ({"prompt_ids": [[5, 6]]}, "prompt_ids: expected token ids, integers [tokens], got int64 [1, 2]"),
    ({"prompt_ids": [-1, 6]}, "prompt_ids: expected ids below the tokenizer's 64, got -1 to 6"),
    ({"prompt_ids": ["a"]}, "prompt_ids: expected token ids, integers [tokens], got <U1 [1]"),
    ({"completion_ids": [[7, 2], [], [3]]}, "completion_ids[1]: expected token ids, integers [tokens], got none"),
    ({"completion_ids": [[7, 2], [8, 64, 2], [3]]}, "completion_ids[1]: expected ids below the tokenizer's 64, got"),
    ({"completion_ids": [[7, 2]]}, "logprobs: expected 1 lists, as many as completions, got 3"),
    ({"completion_ids": []}, "completion_ids: expected a list for each completion, got list without any"),
    ({"completion_ids": 7}, "completion_ids: expected a list for each completion, got int without any"),
    ({"logprobs": None}, "expected 'logprobs', a list for each completion, got 'prompt_ids'"),
    ({"logprobs": [[-0.1], [-1.2, -0.4, -0.1], [-2]]}, "logprobs[0]: expected 2 numbers, as many as tokens, got 1"),
    ({"logprobs": [[-0.1, None], [-1.2, -0.4, -0.1], [-2]]}, "logprobs[0]: expected a list of numbers, got [-0.1,"),
    ({"logprobs": [[-0.1, -np.inf], [-1.2, -0.4, -0.1], [-2]]}, "logprobs[0]: expected finite numbers, which float32"),
    ({"logprobs": [[-0.1, -1e300], [-1.2, -0.4, -0.1], [-2]]}, "logprobs[0]: expected finite numbers, which float32"),
    ({"logprobs": [[-0.1, -4e38], [-1.2, -0.4, -0.1], [-2]]}, "logprobs[0]: expected finite numbers, which float32"),
    ({"logprobs": [[-0.1, 0.9], [-1.2, -0.4, -0.1], [-2]]}, "logprobs[0]: expected log-probabilities, at most 0"),
    ({"logprobs": [[[-0.1], [-0.3]], [-1.2, -0.4, -0.1], [-2]]}, "logprobs[0]: expected a list of numbers, got [["),
    ({"rewards": 1.0}, "rewards: expected a list of numbers, got 1.0"),
    ({"rewards": [1.0, 0.0]}, "rewards: expected 3 numbers, as many as completions, got 2"),
    ({"rewards": None}, "expected 'rewards' or 'advantages' of the completions"),
    ({"rewards": [1.0, 0.0, np.nan]}, "rewards: expected finite numbers, which float32 can hold, got nan"),
    ({"rewards": [1.0, 0.0, 1e300]}, "rewards: expected finite numbers, which float32 can hold, got 1e+300"),
    ({"rewards": [1.0, 0.0, 10**400]}, "rewards: expected a list of numbers, got [1.0, 0.0, 1000"),
    ({"rewards": [1e-60, 0.0, 3e-60]}, "rewards: expected rewards whose differences are above rounding, got [1e-60"),
    ({"rewards": None, "advantages": [1.0, 0.0, -1e39]}, "advantages: expected finite numbers, which float32 can hold"),
    (
        {"completion_ids": [[7, 2]], "logprobs": [[-0.1, -0.3]], "rewards": [1]},
        "rewards: expected those of two or more completions to compare, got one; give 'advantages'",
    ),
]  # fmt: skip


@pytest.mark.parametrize("changes, reason", BAD_ROWS)
def test_a_bad_row_is_one_line(changes, reason):
    found = example(ROW | changes)
    assert isinstance(found, BadRow) and found.where == "a.jsonl:7"
    assert found.reason.startswith(reason) and "\n" not in found.reason
    assert found.reason.endswith("; correct or remove the row") or "; " in reason  # advice of its own


# -- Runs -------------------------------------------------------------------------------------------------------------


def rollouts(prompts: int = 60) -> list[dict]:
    """Completions of an untrained model, about uniform over 320 ids; a 7 as the first token is rewarded."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(prompts):
        completions = [[int(first), *rng.integers(8, 64, rng.integers(1, 5)).tolist()] for first in (7, 9, 7, 11)]
        logprobs = [[-float(np.log(320))] * len(ids) for ids in completions]
        rewards = [float(ids[0] == 7) for ids in completions]
        prompt = rng.integers(8, 64, rng.integers(1, 5)).tolist()
        rows.append(dict(prompt_ids=prompt, completion_ids=completions, logprobs=logprobs, rewards=rewards))
    return rows


def config(folder, **fields):
    c = default_config()
    c.output_dir, c.data_cache = str(folder / "run"), str(folder / "cache")
    c.model.vocab_size, c.model.hidden_size, c.model.intermediate_size = 320, 32, 64
    c.model.num_hidden_layers, c.model.num_attention_heads, c.model.num_key_value_heads = 2, 2, 1
    c.model_dtype, c.sequence_len, c.per_device_batch_size, c.gpus = "float32", 16, 5, 1
    c.max_steps, c.learning_rate, c.warmup_steps, c.eval_steps, c.eval_batches = 6, 1e-2, 0, 3, 1
    c.save_steps, c.sample_tokens, c.quiet, c.report_to, c.objective = 3, 0, True, "", "grpo"
    c.update(fields)
    return c


def records(folder) -> list[dict]:
    found = read_metrics(folder / "run" / "metrics.jsonl")
    return [{name: x for name, x in record.items() if name not in TIMINGS} for record in found]


@pytest.mark.full
def test_grpo_learns_what_is_rewarded_and_goes_on_after_a_kill_to_the_same_bits(tmp_path, monkeypatch, capsys):
    """From a file, with a divergence from the model before training, whose log-probabilities of tokens are cached."""
    file = tmp_path / "rollouts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rollouts()))
    fields = {"data": str(file), "datasets": (), "grpo_beta": 0.05, "max_steps": 24, "eval_steps": 12, "save_steps": 12}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    result = train(config(whole, **fields))
    first, *_, last = steps = [record for record in result.history if record["log"] == "step"]
    assert first["kl"] == pytest.approx(0, abs=1e-6) and last["kl"] > 0
    for name in ("clip_ratio/high_mean", "clip_ratio/low_mean"):  # tokens rose and fell as rewarded
        assert first[name] == 0 and np.mean([record[name] for record in steps[-8:]]) > 0.2
    evaluated = [record for record in result.history if record["log"] == "eval"]
    assert all("clip_ratio/low_mean" in record and "perplexity" not in record for record in evaluated)

    original = reference._Reference._computed
    batches = iter(range(99))

    def cut(self, given):
        for numbers in original(self, given):
            if next(batches) == 3:
                raise KeyboardInterrupt
            yield numbers

    monkeypatch.setattr(reference._Reference, "_computed", cut)
    with pytest.raises(KeyboardInterrupt):
        train(config(killed, **fields))
    capsys.readouterr()
    train(config(killed, **fields), max_minutes=1e-9)
    assert "; 15 more are in the cache" in capsys.readouterr().out
    train(config(killed, **fields))
    assert "reference:" not in capsys.readouterr().out
    assert records(killed) == records(whole)


@pytest.mark.full
@pytest.mark.parametrize("packed", [False, True])
def test_a_reference_in_the_step_is_the_cached_one(packed, tmp_path, capsys):
    """Adapters: the same layer without them, in each step, or computed before, of sequences that are on two devices."""
    found = {}
    mesh = {"gpus": 4, "cp_size": 2, "per_device_batch_size": 4, "sample_packing": packed}
    for name, fields in (("step", {}), ("cache", {"precompute_ref_log_probs": True})):
        fields |= {"lora": True, "max_steps": 3, "eval_steps": 0, "grpo_beta": 0.5, "learning_rate": 0.1}
        result = train(config(tmp_path / name, **fields, **mesh), data=rollouts())
        found[name] = [(x["loss"], x["kl"]) for x in result.history]
        assert ("reference:" in capsys.readouterr().out) == (name == "cache")
    assert found["step"][-1][1] > 1e-4
    np.testing.assert_allclose(found["step"], found["cache"], atol=1e-5)


@pytest.mark.parametrize(
    "fields, rows, message",
    [
        ({"objective": "dpo", "per_device_batch_size": 4}, [ROW], "expected rows of type preference"),
        ({"objective": "cross_entropy"}, [ROW], "set objective='grpo'"),
        ({}, [{"prompt": "a", "completion": "b"}] * 2, "expected rows of type rollout (prompt_ids, completion_ids"),
        ({"beta": 0.2}, [ROW], "beta: expected 0.1 with objective='grpo'"),
        ({"precompute_ref_log_probs": True}, [ROW], "expected False with grpo_beta=0.0, which needs no reference"),
        ({"chat_template": "chatml"}, [ROW], "chat_template: expected '' without rows of instructions"),
        ({}, [ROW, ROW | {"logprobs": [[-1.0]]}], "the rows given, row 2: logprobs: expected 3 lists, as many as"),
    ],
)
def test_what_cannot_be_trained_is_one_line(fields, rows, message, tmp_path):
    with pytest.raises(ConfigError) as error:
        train(config(tmp_path, **fields), data=rows)
    assert message in str(error.value) and "\n" not in str(error.value)
