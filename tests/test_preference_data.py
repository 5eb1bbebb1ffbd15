"""Rows with a chosen and a rejected answer: read, tokenised, kept together, refused; and runs on them."""

import dataclasses
import itertools
import json

import numpy as np
import pytest

from surojax import ConfigError, default_config, read_metrics, train
from surojax.data import docstrings
from surojax.data.batches import evaluation_batches, training_batches
from surojax.data.cache import Corpus
from surojax.data.data_rows import BadRow, DataRow
from surojax.data.datasets import Dataset, read_dataset, resolve
from surojax.data.examples import Encoder, Example
from surojax.data.prepare import load_dataset
from surojax.data.samples import IGNORED, WithNumbers, windows_or_rows
from surojax.data.templates import load_template
from surojax.data.tokenizer import ByteTokenizer
from surojax.run.metrics import TIMINGS
from surojax.training import reference

BYTES = ByteTokenizer()
CHATML = load_template("chatml", BYTES)
PAIRS = Dataset(("pairs",), type="preference")
TEXT = {"prompt": "2+2=", "chosen": "4", "rejected": "five"}
ASK = [{"role": "user", "content": "2+2="}]


def says(content: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": content}]


def encoded(record, template=CHATML, dataset=PAIRS) -> Example | BadRow:
    (found,) = Encoder(dataset, BYTES, template).encode([DataRow(record, "a.jsonl:7")])
    return found


def two(record, template=CHATML) -> list[tuple[str, str]]:
    """(whole text, trained text) of both documents of a row."""
    found = encoded(record, template)
    assert isinstance(found, Example), found
    assert found.trained is not None
    (end,) = found.ends
    parts = [(found.ids[:end], found.trained[:end]), (found.ids[end:], found.trained[end:])]
    return [(BYTES.decode(ids), BYTES.decode(ids[trained])) for ids, trained in parts]


def test_a_text_is_a_prompt_and_two_answers():
    (chosen, trained), (rejected, other) = two(TEXT, None)
    assert chosen.startswith("2+2=4") and rejected.startswith("2+2=five")
    assert trained.startswith("4") and other.startswith("five")


@pytest.mark.parametrize(
    "record",
    [
        TEXT,
        {"prompt": ASK, "chosen": "4", "rejected": "five"},
        {"prompt": ASK, "chosen": says("4"), "rejected": says("five")},
        {"prompt": "2+2=", "chosen": says("4"), "rejected": says("five")},
        {"chosen": ASK + says("4"), "rejected": ASK + says("five")},  # TRL's implicit prompt
        {"prompt": "2+2=", "chosen": ASK + says("4"), "rejected": ASK + says("five")},  # ultrafeedback_binarized
        {"prompt": ASK, "chosen": ASK + says("4"), "rejected": ASK + says("five")},
    ],
)
def test_every_form_of_a_row_gives_the_same_conversations(record):
    (chosen, trained), (rejected, other) = two(record)
    assert chosen == "<|im_start|>user\n2+2=<|im_end|>\n<|im_start|>assistant\n" + trained
    assert trained.startswith("4<|im_end|>") and other == trained.replace("4", "five", 1)
    assert rejected.removesuffix(other) == chosen.removesuffix(trained)


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"rejected": "4"}, "expected two answers of which one is better, got the same text for both; remove the row"),
        ({"chosen": ""}, "expected the chosen answer in 'chosen', got an empty one"),
        ({"rejected": None}, "expected the rejected answer in 'rejected' as a string, got a NoneType"),
        ({"prompt": " "}, "expected the prompt in 'prompt', got an empty one"),
        ({"chosen": says("4")}, "expected both answers as texts or both as lists of messages, got a list in 'chosen'"),
        ({"rejected": says("4")}, "expected both answers as texts or both as lists of messages, got a str in 'chosen'"),
        ({"chosen": says(""), "rejected": says("b")}, "expected an answer as message 1, got an empty one"),
        ({"chosen": says("4"), "rejected": says("4")}, "expected two answers of which one is better"),
        ({"chosen": ASK, "rejected": ASK + says("b")}, "expected two conversations that differ in the last message"),
        ({"chosen": [], "rejected": says("b")}, "expected messages, got an empty list"),
        ({"chosen": "\ud800", "rejected": "b"}, "expected text, got half a surrogate pair"),
    ],
)
def test_a_bad_row_is_one_line(changes, reason):
    record = TEXT | changes
    if record["chosen"] in ([], ASK):
        record = {name: x for name, x in record.items() if name != "prompt"}
    found = encoded(record)
    assert isinstance(found, BadRow) and found.reason.startswith(reason) and "\n" not in found.reason


def test_conversations_need_a_template():
    found = encoded({"chosen": ASK + says("a"), "rejected": ASK + says("b")}, None)
    assert isinstance(found, BadRow) and "set chat_template" in found.reason


# -- Answers that are rated alone -------------------------------------------------------------------------------------

RATED = [
    {"prompt": f"{i}+{i}=", "completion": f"{i + i} yes" if i % 2 else f"{i} no", "label": i % 2 == 1}
    for i in range(100)
]


def test_a_rated_answer_has_its_prompt_with_another_answer_behind_it():
    """The other one is of a row half of the rows away; a sign of every token says which rows are desirable."""
    rows = [DataRow(record, f"a.jsonl:{i}") for i, record in enumerate(RATED[:6])]
    rows.insert(2, DataRow({"prompt": "a", "completion": "b", "label": 2}, "a.jsonl:9"))
    dataset = Dataset(("rated",), type="unpaired")
    found = Encoder(dataset, BYTES, None).encode(rows)
    bad = found.pop(2)
    assert isinstance(bad, BadRow) and "false, or 1 or 0, in 'label', got 2" in bad.reason
    for i, example in enumerate(found):
        assert isinstance(example, Example)
        texts = [BYTES.decode(part) for part in np.split(example.ids, example.ends)]
        own, other = (RATED[j]["completion"] for j in (i, (i + 3) % 6))
        assert texts[0].startswith(f"{i}+{i}={own}") and texts[1].startswith(f"{i}+{i}={other}")
        np.testing.assert_array_equal(example.numbers["desirable"], np.full(len(example.ids), 1.0 if i % 2 else -1.0))


# -- Pairs stay together ----------------------------------------------------------------------------------------------


@pytest.mark.full
def test_more_is_held_out_of_the_small_sets_of_the_standard_library(tmp_path, monkeypatch):
    numbered = [DataRow(TEXT | {"prompt": f"question {i}"}, f"row {i}") for i in range(2000)]
    monkeypatch.setitem(docstrings.SETS, docstrings.PREFERENCES, lambda: numbered)
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row.record) + "\n" for row in numbered))

    def held_out(path: str) -> int:
        dataset = Dataset((path,), type="preference")
        encoder = Encoder(dataset, BYTES, CHATML)
        corpus = load_dataset(dataset, encoder, BYTES.vocab_size, holds_out=True, data_cache=str(tmp_path)).held_out
        assert corpus is not None
        return corpus.num_examples // 2  # answers

    assert 80 <= held_out(docstrings.PREFERENCES) <= 120
    assert 10 <= held_out(str(tmp_path / "pairs.jsonl")) <= 30


def corpus_of(lengths: list[tuple[int, int]]):
    """A corpus with two examples of so many tokens a row; the first two tokens are a prompt."""
    flat = [n for pair in lengths for n in pair]
    offsets = np.cumsum([0, *flat])
    tokens = np.arange(offsets[-1], dtype=np.uint16)
    trained = np.concatenate([np.arange(n) >= 2 for n in flat])
    return Corpus(tokens, 0, "fingerprint", "pairs", offsets, trained)


def samples_of(lengths, *, packed=False, **options):
    return windows_or_rows(corpus_of(lengths), 8, packed=packed, is_text=False, together=2, say=print, **options)


def test_packed_answers_of_a_pair_are_at_the_same_positions(capsys):
    """A shorter answer has padding behind it, a document of its own; the two rows stay next to each other."""
    samples = samples_of([(3, 4), (8, 2), (4, 3), (1, 5)], packed=True)
    assert "8 examples in 6 rows of 8 tokens, 37.5% padding" in capsys.readouterr().out
    rows = [(samples[i]["inputs"].tolist(), samples[i]["starts"].tolist()) for i in range(len(samples))]
    assert rows == [
        ([7, 8, 9, 10, 11, 12, 13, 14], [0] * 8),
        ([15, 16, 0, 0, 0, 0, 0, 0], [0, 0, 2, 2, 2, 2, 2, 2]),
        ([24, 0, 0, 0, 0, 0, 0, 0], [0, 1, 1, 1, 1, 5, 5, 5]),
        ([25, 26, 27, 28, 29, 0, 0, 0], [0] * 5 + [5] * 3),
        ([0, 1, 2, 0, 17, 18, 19, 20], [0, 0, 0, 3, 4, 4, 4, 4]),
        ([3, 4, 5, 6, 21, 22, 23, 0], [0, 0, 0, 0, 4, 4, 4, 7]),
    ]
    batch = next(training_batches(samples, batch_size=4, accumulation=1, seed=0, prefetch=0))
    firsts = batch["inputs"][0, :, 0].tolist()
    assert all(pair in ([0, 3], [7, 15], [24, 25]) for pair in (firsts[:2], firsts[2:]))


def test_a_batch_has_both_answers_next_to_each_other():
    """In every order, over two epochs, wherever it begins; and a microbatch of two processes' rows."""
    lengths = [(4 + i % 3, 5 + i % 2) for i in range(7)]
    samples = samples_of(lengths)
    assert len(samples) == 14 and samples.together == 2
    firsts = {int(samples[i]["inputs"][0]): i for i in range(14)}

    def numbers(**options):
        stream = training_batches(samples, batch_size=4, accumulation=1, seed=3, num_epochs=2, prefetch=0, **options)
        return [firsts[int(row[0])] for batch in stream for row in batch["inputs"][0]]

    order = numbers()
    assert len(order) == 28 and sorted(order[:14]) == list(range(14)) and order[:14] != sorted(order[:14])
    assert all(a % 2 == 0 and b == a + 1 for a, b in itertools.batched(order, 2))
    assert numbers(start_sample=4) == order[4:]
    of_rows = numbers(rows=np.array([2, 3]))
    assert of_rows == [n for four in itertools.batched(order, 4) for n in four[2:]]
    batches = list(evaluation_batches(samples, batch_size=4, max_batches=2))
    evaluated = [firsts[int(row[0])] for batch in batches for row in batch["inputs"]]
    assert len(evaluated) == 8 and all(b == a + 1 for a, b in itertools.batched(evaluated, 2))


def test_a_pair_is_left_out_whole():
    """If one answer is too long to drop, or none of its tokens is left by a cut."""
    lengths = [(4, 5), (4, 30), (5, 4)]
    assert len(samples_of(lengths)) == 6  # the long answer is cut at its end
    assert len(samples_of(lengths, on_long="drop")) == 4
    long_prompt = corpus_of([(4, 5), (12, 12)])
    assert long_prompt.trained is not None
    long_prompt.trained[9:21] = False
    long_prompt.trained[20] = True  # of the first answer only the last token
    found = windows_or_rows(long_prompt, 8, packed=False, is_text=False, together=2, say=print)
    assert len(found) == 2


def test_a_number_of_each_sample_is_at_its_first_label():
    samples = WithNumbers(samples_of([(4, 5)]), "reference", np.array([[-3.5], [-4.5]], np.float32))
    for i, number in enumerate((-3.5, -4.5)):
        sample = samples[i]
        assert sample["reference"].sum() == number
        assert np.flatnonzero(sample["reference"])[0] == np.flatnonzero(sample["labels"] != IGNORED)[0]


# -- Runs -------------------------------------------------------------------------------------------------------------

ROWS = [{"prompt": f"{i}+{i}=", "chosen": f"{i + i} yes", "rejected": f"{i} no no"} for i in range(100)]


def config(folder, **fields):
    c = default_config()
    c.output_dir, c.data_cache = str(folder / "run"), str(folder / "cache")
    c.model.vocab_size, c.model.hidden_size, c.model.intermediate_size = 320, 32, 64
    c.model.num_hidden_layers, c.model.num_attention_heads, c.model.num_key_value_heads = 2, 2, 1
    c.model_dtype, c.sequence_len, c.per_device_batch_size, c.gpus = "float32", 32, 8, 1
    c.max_steps, c.learning_rate, c.warmup_steps, c.eval_steps, c.eval_batches = 6, 1e-2, 0, 3, 1
    c.save_steps, c.sample_tokens, c.quiet, c.report_to, c.objective = 3, 0, True, "", "dpo"
    c.update(fields)
    return c


def records(folder) -> list[dict]:
    return [
        {name: x for name, x in record.items() if name not in TIMINGS}
        for record in read_metrics(folder / "run" / "metrics.jsonl")
    ]


@pytest.mark.full
def test_dpo_learns_and_goes_on_after_a_kill_to_the_same_bits(tmp_path, monkeypatch, capsys):
    """Its first loss is log 2, with no margin; a killed labelling and a killed run go on to the same records."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    result = train(config(whole), data=ROWS)
    first, *_, last = [record for record in result.history if record["log"] == "step"]
    assert first["loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert first["rewards/margins"] == pytest.approx(0, abs=1e-5)
    assert last["loss"] < 0.5 and last["rewards/accuracies"] == 1 and last["rewards/margins"] > 0.5
    evaluated = [record for record in result.history if record["log"] == "eval"]
    assert all("rewards/accuracies" in record and "perplexity" not in record for record in evaluated)

    original = reference._Reference._computed
    batches = iter(range(99))

    def cut(self, given):
        for numbers in original(self, given):
            if next(batches) == 5:
                raise KeyboardInterrupt
            yield numbers

    monkeypatch.setattr(reference._Reference, "_computed", cut)
    with pytest.raises(KeyboardInterrupt):
        train(config(killed), data=ROWS)
    capsys.readouterr()
    train(config(killed), max_minutes=1e-9, data=ROWS)
    assert "; 40 more are in the cache" in capsys.readouterr().out
    train(config(killed), data=ROWS)
    assert "reference:" not in capsys.readouterr().out
    assert records(killed) == records(whole)


@pytest.mark.full
@pytest.mark.parametrize("objective", ["orpo", "simpo"])
def test_objectives_without_a_reference_need_no_labelling(objective, tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    result = train(config(tmp_path, objective=objective, data=str(file), datasets=()))
    losses = [record["loss"] for record in result.history if record["log"] == "step"]
    assert losses[-1] < losses[0] and "reference:" not in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.parametrize(
    "fields, below",
    [({}, 0.45), ({"sample_packing": True}, 0.45), ({"lora": True, "learning_rate": 5e-2}, 0.49)],
)
def test_kto_learns(fields, below, tmp_path):
    """Its first loss is 1/2, without a divergence; rows are a file's, whose type the objective decides.

    Adapters of so small a model learn less in 12 steps.
    """
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in RATED))
    result = train(config(tmp_path, objective="kto", data=str(file), datasets=(), max_steps=12, **fields))
    first, *_, last = [record for record in result.history if record["log"] == "step"]
    assert first["loss"] == pytest.approx(0.5, abs=1e-5) and first["kl"] == 0
    assert last["loss"] < below and last["rewards/margins"] > 0 and last["rewards/accuracies"] > 0.7


@pytest.mark.parametrize(
    "fields, rows, message",
    [
        ({"objective": "kto"}, ROWS, "expected rows of type unpaired (prompt, completion, label) with this objective"),
        ({}, ["a text"] * 4, "expected rows of type preference"),
        ({"objective": "cross_entropy"}, ROWS, "expected an objective for rows of type preference"),
        ({"per_device_batch_size": 3}, ROWS, "per_device_batch_size: expected an even number with objective='dpo'"),
        ({"z_loss": 1e-4}, ROWS, "z_loss: expected 0.0 with objective='dpo'"),
        ({"simpo_gamma": 1.0}, ROWS, "simpo_gamma: expected 0.5 with objective='dpo'"),
        ({}, [TEXT, TEXT | {"rejected": "4"}], "the rows given, row 2: expected two answers of which one is better"),
    ],
)
def test_what_cannot_be_trained_is_one_line(fields, rows, message, tmp_path):
    with pytest.raises(ConfigError) as error:
        train(config(tmp_path, **fields), data=rows)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.full
@pytest.mark.parametrize("packed", [False, True])
def test_dpo_with_adapters_computes_its_reference_in_each_step(packed, tmp_path, capsys):
    """Nothing is computed before training, and the first loss is log 2; so it is with a reference from the cache."""
    found = {}
    for name, fields in (("step", {}), ("cache", {"precompute_ref_log_probs": True})):
        fields |= {"lora": True, "max_steps": 3, "eval_steps": 0, "sample_packing": packed}
        result = train(config(tmp_path / name, **fields), data=ROWS)
        found[name] = [(x["loss"], x["rewards/margins"]) for x in result.history]
        assert ("reference:" in capsys.readouterr().out) == (name == "cache")
    assert found["step"][0][0] == pytest.approx(np.log(2), abs=1e-5)
    np.testing.assert_allclose(found["step"], found["cache"], atol=1e-5)


# -- OpenAI's format of pairs -----------------------------------------------------------------------------------------

OPENAI = {
    "input": {"messages": ASK, "tools": [], "parallel_tool_calls": True},
    "preferred_output": says("4"),
    "non_preferred_output": says("five"),
}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


def ours(record, dataset=PAIRS) -> dict | str:
    """Fields of a row of `read_dataset`, or why it is left out."""
    (row,) = read_dataset(dataclasses.replace(dataset, path=("given",)), lambda *names: [record])
    return row.record if isinstance(row, DataRow) else row.reason


def test_openais_pairs_are_preferences(tmp_path):
    """From JSON lines, and with objects as JSON in cells of a table."""
    pair = {"prompt": ASK, "chosen": says("4"), "rejected": says("five"), "parallel_tool_calls": True}
    assert ours(OPENAI) == pair == ours({name: json.dumps(value) for name, value in OPENAI.items()})
    assert two(pair) == two({"prompt": ASK, "chosen": says("4"), "rejected": says("five")})
    with_tools = OPENAI | {"input": {"messages": ASK, "tools": TOOLS}, "source": "x"}
    del pair["parallel_tool_calls"]
    assert ours(with_tools) == pair | {"tools": TOOLS, "source": "x"}
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps(OPENAI) + "\n")
    dataset = resolve(Dataset((str(file),)))
    assert dataset.type == "preference"
    (row,) = read_dataset(dataset)
    assert isinstance(row, DataRow) and two(row.record) == two(pair)
    own = Dataset(("-",), type="preference", prompt_field="input", chosen_field="preferred_output", tools_field="")
    found = ours(with_tools, own)
    assert found == {"input": ASK, "preferred_output": says("4"), "rejected": says("five"), "source": "x"}


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"input": "2+2="}, "expected an object with messages in 'input' beside 'preferred_output', got '2+2='; "),
        ({"input": {"text": "a"}}, "expected an object with messages in 'input'"),
        ({"input": ASK}, "expected an object with messages in 'input'"),
        ({"chosen": "other"}, "expected no 'chosen' beside 'input' and 'preferred_output', which say the same, got 'o"),
        ({"prompt": ASK, "chosen": None, "tools": []}, None),
        ({"tools": TOOLS}, None),
    ],
)
def test_openais_pairs_with_something_else(changes, reason):
    found = ours(OPENAI | changes)
    assert isinstance(found, dict) if reason is None else (isinstance(found, str) and found.startswith(reason)), found


@pytest.mark.parametrize("kind", ["conversation", "instruction", "text"])
def test_openais_pairs_are_left_alone_in_other_types(kind):
    assert ours(OPENAI, Dataset(("-",), type=kind)) == OPENAI
    part = {name: OPENAI[name] for name in ("input", "preferred_output")}
    assert ours(part) == part
