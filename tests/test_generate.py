"""Sampling: the cache equals the plain model, greedy equals argmax, nucleus and vocabulary bounds hold."""

import dataclasses
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import generate
from small import CONFIG, drawn_params, normal, plain_logits, tokens
from test_engine import GEMMA, MINISTRAL, SMOLLM

from surojax import ConfigError, default_config
from surojax.data.data_rows import DataRow
from surojax.data.examples import Example
from surojax.data.rollouts import RolloutEncoder
from surojax.data.tokenizer import ByteTokenizer
from surojax.inference import sample, trained_model
from surojax.inference.forward import cached_logits, each_layer, empty_cache
from surojax.inference.prompts import complete
from surojax.inference.trained_model import Trained
from surojax.memory.host import Split
from surojax.models import decoder_model
from surojax.run import on_disk

MODEL = decoder_model.build(CONFIG)
QWEN = dataclasses.replace(CONFIG, qk_norm=True, tie_word_embeddings=True, attention_bias=True)


MISTRAL = dataclasses.replace(CONFIG, sliding_window=4)
WINDOWS = dataclasses.replace(CONFIG, num_hidden_layers=7, sliding_window=4, sliding_window_pattern=3)
CONFIGS = {
    "llama": CONFIG,
    "qwen": QWEN,
    "mistral": MISTRAL,
    "windows": WINDOWS,
    "gemma": GEMMA,
    "smollm": SMOLLM,
    "ministral": dataclasses.replace(MINISTRAL, sliding_window=4),
}


@pytest.mark.full(after=1)
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(c, id=name, marks=[pytest.mark.full] * (name in ("windows", "mistral", "smollm", "gemma")))
        for name, c in CONFIGS.items()
    ],
)
def test_cache_equals_the_plain_model(config):
    """A prompt of five at once, then token by token: logits as from the whole (1e-5: order of float32 sums)."""
    params, (ids, _) = drawn_params(config, 1), tokens(12)
    model = decoder_model.build(config)
    expected = plain_logits(config, params, ids)
    cache = empty_cache(model, 1, 12, jnp.float32)
    step = jax.jit(lambda t, c, s: cached_logits(model, params, t, c, s))
    logits, cache = step(ids[None, :5], cache, 0)
    np.testing.assert_allclose(logits[0], expected[4], atol=1e-5)
    for i in range(5, 12):
        logits, cache = step(ids[None, i : i + 1], cache, i)
        np.testing.assert_allclose(logits[0], expected[i], atol=1e-5)


def test_greedy_is_the_argmax_of_the_plain_model():
    params = drawn_params(CONFIG, 1, times=3)  # so that a wrong position changes the likeliest
    ids = [3, 1, 4]
    new = list(sample.generate(MODEL, params, np.array(ids), max_tokens=6, temperature=0))
    for token in new:
        assert token == int(np.argmax(plain_logits(CONFIG, params, ids, 9)[-1]))
        ids.append(token)
    assert len(new) == 6


def test_sampling_follows_seed_and_stops_at_eos():
    params, prompt = drawn_params(CONFIG, 1), np.array([3, 1, 4])
    run = lambda seed, **o: list(sample.generate(MODEL, params, prompt, max_tokens=8, seed=seed, **o))
    assert run(0) == run(0) != run(1)
    assert run(0, stop_ids=[run(0)[2]]) == run(0)[:2]


@pytest.mark.full
@pytest.mark.parametrize("config", [MISTRAL, CONFIGS["gemma"]])
def test_a_batch_is_its_prompts_alone(config):
    """Prompts of several lengths, padded on the left: greedily the same tokens, each up to its own end."""
    params = drawn_params(config, 1, times=3)
    model = decoder_model.build(config)
    prompts = [np.array(ids) for ids in ([3, 1, 4, 1, 5, 9, 2, 6, 5], [2], [7, 1, 8, 2])]
    alone = [list(sample.generate(model, params, prompt, max_tokens=6, temperature=0)) for prompt in prompts]
    options = {"max_tokens": 6, "temperature": 0}
    assert sample.generate_batch(model, params, prompts, **options) == alone
    assert sample.generate_batch(model, params, prompts, multiple_of=8, **options) == alone
    stop = alone[0][2]
    cut = [ids[: ids.index(stop)] if stop in ids else ids for ids in alone]
    assert sample.generate_batch(model, params, prompts, stop_ids=[stop], **options) == cut
    asked = []

    def ended(ids):
        asked.append(len(ids))
        return len(ids) == 2

    assert sample.generate_batch(model, params, prompts, ended=ended, **options) == [ids[:2] for ids in alone]
    assert max(asked) == 2


def test_nucleus_keeps_the_smallest_set():
    logits = jnp.log(jnp.array([[0.5, 0.05, 0.3, 0.15]]))
    draw = lambda p: {int(sample.pick(logits, jax.random.key(i), 1.0, p)[0]) for i in range(200)}
    assert draw(0.4) == {0} and draw(0.6) == {0, 2} and draw(0.9) == {0, 2, 3} and draw(1.0) == {0, 1, 2, 3}
    assert int(sample.pick(logits, jax.random.key(0), 0.0, 1.0)[0]) == 0


def test_temperature_divides_the_logits():
    """Four divides without rounding; a quarter as much of the differences draws other tokens."""
    logits = 3 * normal(0, (64, 8))
    key = jax.random.key(1)
    np.testing.assert_array_equal(sample.pick(logits, key, 4.0, 1.0), sample.pick(logits / 4, key, 1.0, 1.0))
    assert not np.array_equal(sample.pick(logits, key, 4.0, 1.0), sample.pick(logits, key, 1.0, 1.0))


def test_padding_of_the_vocabulary_is_never_drawn():
    params, prompt = drawn_params(CONFIG, 1), np.array([1])
    new = list(sample.generate(MODEL, params, prompt, max_tokens=200, temperature=5.0, vocab_size=10))
    assert len(new) == 200 and set(new) == set(range(10))  # at that temperature every word comes sometimes


@pytest.mark.parametrize(
    "options, message",
    [
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"prompt": np.array([])}, "prompt"),
        ({"prompt": np.array([[1]])}, "prompt"),
    ],
)
def test_bad_options_are_refused(options, message):
    prompt = options.pop("prompt", np.array([1]))
    with pytest.raises(ValueError, match=message):
        list(sample.generate(MODEL, {}, prompt, max_tokens=1, **options))


def test_complete_starts_a_document_for_an_empty_prompt():
    config = dataclasses.replace(CONFIG, vocab_size=320)
    text = complete(
        Trained(decoder_model.build(config), drawn_params(config, 0), ByteTokenizer(), None), "", max_tokens=5
    )
    assert isinstance(text, str)


@pytest.mark.full
def test_rollouts_have_the_log_probabilities_of_training_and_are_rows(tmp_path):
    """At temperature 1 and of the whole vocabulary, whatever they are sampled at; the token that ends is among them."""
    config = dataclasses.replace(CONFIG, vocab_size=320)
    params = drawn_params(config, 1, times=3)
    tokenizer = ByteTokenizer()
    trained = Trained(decoder_model.build(config), params, tokenizer, None)
    file = tmp_path / "rollouts.jsonl"
    options = {"chat": False, "system": "", "samples": 3, "seed": 0, "vocab_size": tokenizer.vocab_size}
    options |= {"max_tokens": 5, "temperature": 2.0, "multiple_of": 8, "stop_ids": range(0, 320, 5)}
    generate.write_rollouts(trained, ["ab", "c"], file, **options)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    lengths = [len(ids) for row in rows for ids in row["completion_ids"]]
    assert len(rows) == 2 and min(lengths) < 5 and rows[0]["completion_ids"][0] != rows[0]["completion_ids"][1]
    for row in rows:
        for ids, logprobs in zip(row["completion_ids"], row["logprobs"], strict=True):
            assert all(id % 5 for id in ids[:-1]) and (len(ids) == 5 or ids[-1] % 5 == 0)
            whole = np.array(row["prompt_ids"] + ids)
            nats = jax.nn.log_softmax(plain_logits(config, params, whole, 12))[len(row["prompt_ids"]) - 1 :]
            expected = np.asarray(nats)[np.arange(len(ids)), ids]
            np.testing.assert_allclose(logprobs, expected, rtol=1e-5, atol=1e-5)
        example = RolloutEncoder(320).item(DataRow(row | {"rewards": [1, 0, 0]}, "")).content
        assert isinstance(example, Example) and len(example.ids) == 3 * len(row["prompt_ids"]) + sum(
            map(len, row["completion_ids"])
        )
    with pytest.raises(ConfigError, match="expected a new file, got one that exists"):
        generate.write_rollouts(trained, ["ab"], file, **options)


@pytest.mark.parametrize(
    "words, said",
    [
        ("--rollouts r --samples 0", "--samples: expected 1 to .* of 1 token or more, got 0 of 200 tokens; correct it"),
        ("--rollouts r --max-tokens 0", "--samples: expected 1 to .*, got .* of 0 tokens; correct it"),
        ("--rollouts r --routed-experts", "--routed-experts: expected a model with experts, got one without any"),
    ],
)
def test_options_of_the_command_that_do_not_go_together(monkeypatch, words, said):
    model = SimpleNamespace(segments=[SimpleNamespace(choices=0)])
    monkeypatch.setattr(generate, "load_trained", lambda *_: (model, {}, ByteTokenizer()))
    with pytest.raises(SystemExit, match=said):
        generate.main(["--checkpoint", "x", "--prompt", "y", *words.split()])


@pytest.mark.parametrize("words, printed", [([], "one: 1\n---\ntwo: 2\n"), (["--chat"], " 1\n---\n 2\n")])
def test_what_the_command_prints(monkeypatch, capsys, words, printed):
    """Each prompt with its continuation, or the answers alone."""
    tokenizer = ByteTokenizer()
    answers = [tokenizer.encode(" 1"), tokenizer.encode(" 2")]
    monkeypatch.setattr(generate, "load_trained", lambda *_: (None, {}, tokenizer))
    monkeypatch.setattr(generate, "message_ids", lambda trained, prompt, system: tokenizer.encode(prompt))
    monkeypatch.setattr(generate, "generate_batch", lambda model, weights, ids, **options: answers[: len(ids)])
    generate.main(["--checkpoint", "x", "--prompt", "one:", "--prompt", "two:", *words])
    assert capsys.readouterr().out == printed


def test_command_explains_a_missing_checkpoint(capsys):
    with pytest.raises(SystemExit) as end:
        generate.main(["--checkpoint", "nowhere", "--prompt", "x"])
    assert "nowhere" in str(end.value) and "\n" not in str(end.value)


@pytest.mark.parametrize("resident", [0, 1, 2, 3])
def test_layers_in_two_memories_are_in_their_order(resident):
    """Each layer gets its number and its weights, however many of the stack are in device memory."""
    model, layers = decoder_model.build(CONFIG), CONFIG.num_hidden_layers
    stacks = {"w": jnp.repeat(jnp.arange(1.0, layers + 1)[:, None], 4, axis=1)}
    in_two = jax.tree.map(lambda w: Split(w[:resident], w[resident:]), stacks) if resident % layers else stacks

    def layer(of, l, w, variant, seen):
        return seen.at[l].set(w["w"].sum())

    weights = {model.segments[0].name: in_two}
    run = jax.jit(lambda weights: each_layer(model, weights, jnp.dtype("float32"), layer, jnp.zeros(layers)))
    np.testing.assert_array_equal(run(weights), 4 * np.arange(1.0, layers + 1))


def test_a_checkpoint_is_asked_with_the_tokenizer_that_it_was_trained_with(tmp_path, monkeypatch):
    """And not if it is one of a caller's block; both are refused before weights are read."""
    c = default_config()
    (tmp_path / "checkpoints/3/meta").mkdir(parents=True)
    c.update({"output_dir": str(tmp_path), "tokenizer": "bytes"})
    meta = {"config": c.to_dict(), "tokenizer": ByteTokenizer().name, "version": "0"}

    def unread(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(trained_model, "check_vocabulary", unread)  # comes next
    for changes, error, message in (
        ({}, ZeroDivisionError, None),
        ({"tokenizer": "tokenizer.json:ab"}, ConfigError, "^tokenizer: expected tokenizer.json:ab, which the check"),
        ({on_disk.BLOCK: "mine"}, ConfigError, "^block: expected the standard one, got a checkpoint of mine"),
    ):
        monkeypatch.setattr(on_disk, "read_meta_of_run", lambda _, changes=changes: meta | changes)
        with pytest.raises(error, match=message):
            trained_model.load_trained(tmp_path / "checkpoints/3")
