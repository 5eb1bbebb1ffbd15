"""Limits of numbers from both sides, of either sign, and texts that are put together from parts."""

import contextlib
import math
import re
import types
from typing import Any

import pytest

from surojax import ConfigError
from surojax.cluster import rendezvous
from surojax.cluster.early import leave_closed_terminal
from surojax.data import conversations, run_data, samples
from surojax.data.data_rows import BadRow, DataRow, NotARow
from surojax.data.datasets import Dataset
from surojax.data.rollouts import RolloutEncoder
from surojax.exchange import huggingface
from surojax.inference.sample import check_options
from surojax.own_files import check_form
from surojax.planner import amounts
from surojax.run import console, metrics, on_disk
from surojax.training import evaluation

STEP, SAMPLES, ANY = 2**31 - 1, 2**63 - 1, 2**32 - 1
META = {"step": 0, "checksums": {}}
OF_A_RUN = {"step": 0, "samples": 0, "config": {"resume_from_checkpoint": ""}, "tokenizer": "", "data": ""}
HELLO = {"id": 0, "of": 1, "host": "", "nonce": ""}
FORMS = [  # (form, a value that has it, a key with a number, its smallest and largest number)
    (on_disk.META, META, "step", 0, STEP),
    (on_disk.META, META, "samples", 0, SAMPLES),
    (on_disk.META, META, "samples_per_step", 1, STEP),
    (on_disk.META, META, "layers.a", 0, STEP),
    (on_disk.META, META, "checksums.a", 0, ANY),
    (on_disk.OF_A_RUN, OF_A_RUN, "step", 0, STEP),
    (on_disk.OF_A_RUN, OF_A_RUN, "samples", 0, SAMPLES),
    (on_disk.OF_A_RUN, OF_A_RUN, "layers.a", 0, STEP),
    (metrics.RECORD, {"log": ""}, "step", 0, STEP),
    (rendezvous.HELLO_BODY, HELLO, "of", 1, STEP),
]


@pytest.mark.parametrize("form, value, key, low, high", FORMS, ids=lambda x: x if isinstance(x, str) else "")
def test_numbers_in_own_files_and_messages(form, value, key, low, high):
    def with_number(number):
        name, _, inner = key.partition(".")
        return value | {name: {inner: number} if inner else number}

    for number in (low, high):
        check_form(with_number(number), form)
    for number in (low - 1, high + 1, True, float(low), str(low), None):
        with pytest.raises(ValueError, match=rf"^{re.escape(key)}: expected a whole number from {low} to {high}, got "):
            check_form(with_number(number), form)


@pytest.mark.parametrize(
    "form, value, texts, optional",
    [
        (on_disk.META, META, "version block base", True),
        (on_disk.OF_A_RUN, OF_A_RUN, "tokenizer data", False),
        (metrics.RECORD, {"log": "", "step": 0}, "log", False),
        (rendezvous.HELLO_BODY, HELLO, "host nonce", False),
        (rendezvous.GREETING, {"hello": "", "nonce": ""}, "hello nonce", False),
        (rendezvous.SEALED, {"run": "", "body": "", "proof": ""}, "run body proof", False),
        (rendezvous.ANSWER_BODY, {}, "error", True),
    ],
)
def test_texts_in_own_files_and_messages(form, value, texts, optional):
    check_form(value, form)
    for name in texts.split():
        check_form(value | {name: "a"}, form)
        with pytest.raises(ValueError, match=f"^{name}: expected a JSON str"):
            check_form(value | {name: 1}, form)
        without = {key: x for key, x in value.items() if key != name}
        if optional:
            check_form(without, form)
            continue
        with pytest.raises(ValueError, match=f"^{name}: expected a value"):
            check_form(without, form)


@pytest.mark.parametrize(
    "name, allowed, refused",
    [
        ("max_tokens", (0, 1, 2**24), (-1, 2**24 + 1)),
        ("temperature", (0, 0.5, 1e30), (-0.1, math.inf, math.nan)),
        ("top_p", (1e-9, 0.5, 1), (0, 1.000001, math.nan)),
        ("seed", (0, 2**31 - 1), (-1, 2**31)),
    ],
)
def test_options_of_sampling(name, allowed, refused):
    plain: dict[str, Any] = {"max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "seed": 0}
    for value in allowed:
        check_options(**plain | {name: value})
    for value in refused:
        with pytest.raises(ConfigError, match=rf"^{name}: expected "):
            check_options(**plain | {name: value})


@pytest.mark.parametrize(
    "size, text",
    [(0, "0.0 MiB"), (2**30 - 1, "1024.0 MiB"), (2**30, "1.0 GiB"), (3 * 2**29, "1.5 GiB"), (2**20, "1.0 MiB")],
)
def test_sizes_as_text(size, text):
    assert amounts.gib(size) == text


def test_amounts_of_memory():
    limits = amounts.Memory(4 * 2**30, 2 * 2**30, 5 * 10**9)
    assert limits.fits(limits) and limits.beyond(limits) == (0, 0, 0)
    for i, one in enumerate(limits):
        more = limits._replace(**{limits._fields[i]: one + 1})
        assert not more.fits(limits) and limits.fits(more)
        assert more.beyond(limits) == tuple(int(j == i) for j in range(3))
    assert amounts.Memory(1).fits(amounts.Memory(1)) and amounts.Memory(1).host == math.inf
    assert limits.text() == "4.0 GiB on each GPU, 2.0 GiB of host memory, 5.0 GB of files"
    assert amounts.Memory(2**20, 0, 0).text("device") == "1.0 MiB on each device"
    assert amounts.Memory(0, 2**20, 0).text() == "1.0 MiB of host memory"
    parts = {"weights": 3 * 2**29, "nothing": 0, "master": 2**29}
    assert amounts.summed(parts, 1) == "2.0 GiB (weights 1.5, master 0.5)"
    assert amounts.summed({"a": 2**19, "b": 2**19}, 2) == "1.00 MiB (a 0.50, b 0.50)"


LARGEST = 3.4028234663852886e38  # float32


def test_numbers_that_float32_holds_are_margins_of_preferences():
    margin = lambda value: conversations.margin({"margin": value}, Dataset("x", type="preference"))
    for value in (0, 1, -2, 0.5, LARGEST, -LARGEST):
        assert margin(value) == value
    assert conversations.margin({}, Dataset("x", type="preference")) == 0.0 == margin(None)
    for bad in (3.5e38, -3.5e38, math.inf, -math.inf, math.nan, True, False, "1", [1]):
        with pytest.raises(NotARow, match=r"^expected a finite number in 'margin', got "):
            margin(bad)


@pytest.mark.parametrize("name", ["logprobs", "rewards", "advantages"])
def test_numbers_that_float32_holds_are_those_of_rollouts(name):
    """Log-probabilities are at most 0, but for rounding."""
    row = {"prompt_ids": [1], "completion_ids": [[2], [3]], "logprobs": [[-1.0], [-2.0]], "advantages": [1.0, -1.0]}
    encoder = RolloutEncoder(8)

    def found(value):
        changes = {name: [[value], [-2.0]] if name == "logprobs" else [value, 0.5]}
        without = {key: x for key, x in row.items() if key != "advantages" or name == "logprobs"}
        return encoder.item(DataRow(without | changes, "row 1")).content

    assert not isinstance(found(-LARGEST), BadRow) and not isinstance(found(0.0), BadRow)
    assert isinstance(found(LARGEST), BadRow) == (name == "logprobs")
    for bad in (-3.5e38, 3.5e38, math.inf, -math.inf, math.nan):
        example = found(bad)
        assert isinstance(example, BadRow) and f"{name}" in example.reason and "finite" in example.reason, bad


@pytest.mark.parametrize("value", [5, -5, 2.5, 2**62, -(2**62), 0])
def test_numbers_of_records(value):
    assert evaluation._number({"loss": value}, "loss") == value


@pytest.mark.parametrize("value", [2**63, -(2**63), True, None, "1", [1]])
def test_numbers_of_records_that_are_none(value):
    assert math.isnan(evaluation._number({"loss": value}, "loss"))


@pytest.mark.parametrize("key", ["initializer_range", "rms_norm_eps"])
def test_the_largest_number_of_a_config(key):
    """Of either sign, a number whose square float32 cannot hold."""
    for value in (1e15, -1e15):
        with contextlib.suppress(ConfigError):  # another check may refuse it, but not this one
            huggingface.model_fields({"model_type": "llama", key: value})
        for beyond in (1.1 * value, 1e300 * math.copysign(1, value)):
            with pytest.raises(ConfigError, match=rf"config\.json: {key}: expected at most 1e\+15, got "):
                huggingface.model_fields({"model_type": "llama", key: beyond})


def test_the_line_about_a_runs_data():
    """Each part of it, by itself."""
    some = [types.SimpleNamespace(name=name) for name in ("a", "b")]
    plain: dict[str, Any] = {"all": types.SimpleNamespace(name="a, b", num_tokens=12345), "sources": some}
    held_out = types.SimpleNamespace(tokens=range(1000))

    def said(names=("",), **changes) -> str:
        train = types.SimpleNamespace(**plain | {"weights": None, "shares": lambda: (0.5, 2.0)} | changes)
        evaluated = [types.SimpleNamespace(name=name) for name in names]
        return run_data.Data(train, evaluated, held_out).describe()  # type: ignore[arg-type]

    line = "data: a, b, 12,345 tokens for training"
    assert said() == f"{line}, 1,000 held out"
    assert said(("x",)) == f"{line}; evaluated on x" and said(("x", "y")) == f"{line}; evaluated on x, y"
    assert said(("", "y")) == f"{line}, 1,000 held out; evaluated on y"
    assert said(("x",), weights=(1, 4)) == f"{line}; evaluated on x; an epoch has a 0.50 times, b 2.00 times"
    windows = [samples.Windows(types.SimpleNamespace(tokens=range(n)), 8) for n in (20, 25)]  # type: ignore[arg-type]
    left_out = " (3 at the end, which fill no row, are left out), 1,000 held out"
    assert said(sources=windows) == line + left_out and said(sources=windows[1:]) == f"{line}, 1,000 held out"


def test_an_open_terminal_is_not_left():
    assert not leave_closed_terminal()
    with pytest.raises(OSError, match="another error"), console._unless_closed():
        raise OSError("another error")


def test_log_probabilities_of_a_reference_in_rollouts_are_refused():
    row = {"prompt_ids": [1], "completion_ids": [[2], [3]], "logprobs": [[-1.0], [-2.0]], "advantages": [1.0, -1.0]}
    for name in ("ref_per_token_logps", "ref_logprobs", "ref_log_prob"):
        for value in ([[-1.0], [-2.0]], -1.5, "-1.5"):
            found = RolloutEncoder(8).item(DataRow(row | {name: value}, "row 1")).content
            assert isinstance(found, BadRow) and f"got '{name}'" in found.reason and "ignored_fields" in found.reason
        assert not isinstance(RolloutEncoder(8).item(DataRow(row | {name: [[], None]}, "row 1")).content, BadRow)
