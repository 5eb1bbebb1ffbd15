"""Loads all data of a run, for training and evaluation, from the settings of its config.

It comes from `data` (files, or the standard library) or from `datasets` (entries, each with settings of its own). It is
evaluated on `eval_data`, or on what is held out of `data` or `datasets`, and on each of `validation_datasets`. Rows of
`data` are of the kind of its first one. Plain text in .txt and .jsonl files is read as documents (`load_corpora`); all
else as if it were an entry of `datasets`.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from surojax.data import corpus, datasets, files, given, templates
from surojax.data.batches import Batch, Mixture, evaluation_batches
from surojax.data.cache import Corpus
from surojax.data.datasets import Dataset
from surojax.data.decompression import stem
from surojax.data.documents import TextEncoder
from surojax.data.examples import Encoder
from surojax.data.given import GivenRows
from surojax.data.prepare import DATA_CACHE, Prepared, load_corpora, load_dataset
from surojax.data.readers import OpenSet, open_set
from surojax.data.rollouts import RolloutEncoder, TokenRoutes
from surojax.data.row_fields import DOCUMENT_TYPES, SEGMENTS
from surojax.data.samples import IGNORED, ExampleRows, Windows, concatenated, windows_or_rows
from surojax.data.token_rows import TokenEncoder
from surojax.data.tokenizer import Tokenizer
from surojax.errors import ConfigError


@dataclass(frozen=True)
class Settings:
    """The fields of a config that determine the data and how samples are made; see `config.sections`."""

    sequence_len: int
    data: str = ""
    eval_data: str = ""
    text_field: str = "text"
    eval_batches: int = 20
    sample_packing: bool = False
    on_long: str = "cut"
    on_bad_row: str = "error"
    train_on: str = "assistant"
    chat_template: str = ""
    system_prompt: str = ""
    data_cache: str = DATA_CACHE


SETTINGS = tuple(field.name for field in fields(Settings))
OF_ANSWERS = {  # types of rows for which there are objectives: their fields, and such an objective
    "preference": ("prompt, chosen, rejected", "'dpo', to 'orpo' or 'simpo', which need no reference, or to 'reward'"),
    "unpaired": ("prompt, completion, label", "'kto'"),
    "rollout": ("prompt_ids, completion_ids, logprobs, rewards or advantages", "'grpo'"),
}


class Entries(NamedTuple):
    """The checked entries of `datasets` and `validation_datasets`.

    weights: of datasets; None: none has one. rows: those of the entry `given.NAME`, if there is one.
    """

    datasets: tuple[Dataset, ...] = ()
    weights: tuple[float, ...] | None = None
    validation: Mapping[str, Dataset] = {}
    rows: GivenRows | None = None

    def open_set(self, name: str, subset: str, split: str) -> Iterable[Any] | GivenRows:
        """Opens the caller's rows, or a set that the `datasets` library finds."""
        return self.rows if self.rows is not None and name == given.NAME else open_set(name, subset, split)

    def resolved(self, open_set: OpenSet, rows: str) -> "Entries":
        """Returns the entries with their types decided. Raises ConfigError if the first row of one fits no type.

        rows: the type that the objective takes, "": any other. Rows that have its fields are of it, whatever else they
        have; "unpaired" also takes rows of prompt and completion.
        """

        def taken(dataset: Dataset) -> Dataset:
            found = _resolved(dataset, open_set, rows)
            is_taken = rows == "unpaired" and found.type == "instruction"
            return dataclasses.replace(found, type=rows) if is_taken else found

        validation = {name: taken(dataset) for name, dataset in self.validation.items()}
        return self._replace(datasets=tuple(map(taken, self.datasets)), validation=validation)


class Evaluated(NamedTuple):
    """The batches of one evaluation dataset. name: of a validation dataset; "": data held out from training.

    bytes_per_label: bytes of plain text for each of its labels, which makes bits per byte of nats per label:
    `loss / log(2) / bytes_per_label`; None: the examples are something else.
    """

    name: str
    batches: list[Batch]
    bytes_per_label: float | None


class Data(NamedTuple):
    """The data of a run. held_out: the first evaluation corpus, whose beginning can be a prompt."""

    train: Mixture
    evaluated: list[Evaluated]
    held_out: Corpus

    def describe(self) -> str:
        """Formats the data's size in one line; with weights, also how often an epoch repeats each source."""
        text = f"data: {self.train.all.name}, {self.train.all.num_tokens:,} tokens for training"
        if rest := sum(x.num_left_out for x in self.train.sources if isinstance(x, Windows)):
            text += f" ({rest:,} at the end, which fill no row, are left out)"
        if not self.evaluated[0].name:
            text += f", {len(self.held_out.tokens):,} held out"
        if names := ", ".join(part.name for part in self.evaluated if part.name):
            text += f"; evaluated on {names}"
        if self.train.weights is not None:
            shares = zip(self.train.sources, self.train.shares(), strict=True)
            text += "; an epoch has " + ", ".join(f"{source.name} {share:.2f} times" for source, share in shares)
        return text


def parse_entries(entries: Sequence[Mapping[str, Any]], validation: Sequence[Mapping[str, Any]]) -> Entries:
    """Parses a config's entries. Raises ConfigError, which names the entry, for a wrong one."""
    with_weight = ["weight" in entry for entry in entries]
    if any(with_weight) and not all(with_weight):
        raise ConfigError(
            f"datasets[{with_weight.index(False)}]: expected a weight, since another entry has one, got none; give one "
            "to each, or to none: then every sample is seen once an epoch"
        )
    parsed = tuple(_parse(entry, f"datasets[{i}]") for i, entry in enumerate(entries))
    weights = tuple(dataset.weight for dataset in parsed) if any(with_weight) else None
    named: dict[str, Dataset] = {}
    for i, entry in enumerate(validation):
        where = f"validation_datasets[{i}]"
        if "weight" in entry:
            raise ConfigError(f"{where}: expected no weight, since each is evaluated by itself, got one; leave it out")
        rest = dict(entry)
        name = rest.pop("name", None)
        dataset = _parse(rest, where)
        name = stem(dataset.path[0]) if name is None else name
        if not isinstance(name, str) or not name.strip() or name in named:
            raise ConfigError(f"{where}: expected a name that no other entry has, got {name!r}; set name='...'")
        named[name] = dataset
    return Entries(parsed, weights, named)


def _parse(entry: Mapping[str, Any], where: str) -> Dataset:
    try:
        return datasets.parse_dataset(entry)
    except ConfigError as error:
        raise ConfigError(f"{where}: {str(error).removeprefix('datasets: ')}") from None


def load_data(
    entries: Entries,
    settings: Settings,
    tokenizer: Tokenizer,
    *,
    eval_batch_size: int,
    rows: str = "",
    together: int = 1,
    is_scored: bool = False,
    routes: TokenRoutes | None = None,
    say: Callable[[str], None] = print,
) -> Data:
    """Returns the samples to train on and the batches to evaluate on.

    `settings.data` is not read if there are `entries.datasets`. eval_batch_size: samples of an evaluation batch.
    rows: the type of rows that the objective takes; "": any other. together: so many documents of a row, which are
    samples, stay next to each other. is_scored: samples say which token is the last, see `samples.ExampleRows.padding`.
    routes: sizes of the experts' choices, which rows of rollouts must have; None: they are not replayed.

    Raises ConfigError for whatever is wrong with files, rows or settings, for a set that is empty, and if neither
    `settings.data` nor an entry says what to train on.
    """
    if not (entries.datasets or settings.data):
        raise ConfigError(files.NO_DATA)
    open_once = functools.cache(entries.open_set)
    for_held_out = "validation_datasets" if entries.datasets else "eval_data"
    entries = _with_data(entries, settings, open_once, rows).resolved(open_once, rows)
    _check_uses(entries, settings)
    _check_rows(entries, settings, rows)
    if _has_rows(entries) and (note := templates.template_note(settings.chat_template, tokenizer)):
        say(note)
    loader = _Loader(settings, tokenizer, open_once, say, together, tokenizer.pad_id if is_scored else None, routes)
    if entries.datasets:
        prepared = [loader.dataset(dataset, holds_out=not entries.validation) for dataset in entries.datasets]
    else:
        corpora = load_corpora(
            settings.data,
            eval_source=settings.eval_data,
            tokenizer=tokenizer,
            text_field=settings.text_field,
            on_bad_row=settings.on_bad_row,
            data_cache=settings.data_cache,
            say=say,
        )
        prepared = [Prepared(*corpora, is_text=True)]
    name = ", ".join(prepared_set.train.name for prepared_set in prepared)
    train = Mixture([loader.samples(x.train, x.is_text) for x in prepared], entries.weights, name)

    sets: dict[str, list[tuple[Corpus, bool]]] = {}
    if held_out := [(x.held_out, x.is_text) for x in prepared if x.held_out is not None]:
        sets[""] = held_out
    for name, dataset in entries.validation.items():
        prepared_set = loader.dataset(dataset, holds_out=False)
        sets[name] = [(prepared_set.train, prepared_set.is_text)]
    evaluated = [
        _evaluated(
            name,
            corpora,
            loader,
            "" if name else for_held_out,
            batch_size=eval_batch_size,
            max_batches=settings.eval_batches,
        )
        for name, corpora in sets.items()
    ]
    return Data(train, evaluated, next(iter(sets.values()))[0][0])


def _resolved(dataset: Dataset, open_set: OpenSet, rows: str) -> Dataset:
    """Decides a dataset's type for an objective that takes `rows`."""
    found = datasets.resolve(dataset, open_set, _wanted(rows))
    if dataset.type == "auto":
        datasets.check_alike(found, open_set)
    return found


def _wanted(rows: str) -> str:
    return "instruction" if rows == "unpaired" else rows


def _with_data(entries: Entries, settings: Settings, open_set: OpenSet, rows: str) -> Entries:
    """Adds an entry for `data`, and one named "" for `eval_data`, unless `data` is read as documents."""
    if (
        entries.datasets
        or settings.data == corpus.STDLIB
        or (found := _rows_of(settings.data, settings, open_set, rows)) is None
    ):
        return entries
    evaluated = {}
    if settings.eval_data:
        evaluated[""] = _entry(settings.eval_data, settings)
    return entries._replace(datasets=(found,), validation=evaluated | dict(entries.validation))


def _rows_of(names: str, settings: Settings, open_set: OpenSet, rows: str) -> Dataset | None:
    """Makes the entry of a comma list of paths, with its type decided; None: documents for `load_corpora`."""
    entry = _entry(names, settings)
    is_text = False
    with contextlib.suppress(ConfigError):  # other kinds of files, or none
        documents = dataclasses.replace(entry, path=tuple(map(str, corpus.expand(names).files)))
        is_text = datasets.resolve(documents, open_set, _wanted(rows)).type == "text"
    found = dataclasses.replace(entry, type="text") if is_text else _resolved(entry, open_set, rows)
    if entry.type == "auto" and is_text:
        datasets.check_alike(found, open_set)
    return None if is_text else found


def _entry(names: str, settings: Settings) -> Dataset:
    """Makes the entry of a comma list of paths; if `text_field` is set, the entry's type is text."""
    is_named = settings.text_field != Settings(settings.sequence_len).text_field
    text_fields = {"type": "text", "text_field": settings.text_field} if is_named else {}
    try:
        return datasets.parse_dataset({"path": files.split_names(names)} | text_fields)
    except ConfigError as error:
        raise ConfigError(str(error).replace("datasets: path:", "data:")) from None


def _has_rows(entries: Entries) -> bool:
    """True if a dataset has rows of instructions or conversations."""
    return bool(_types(entries) - {*DOCUMENT_TYPES, SEGMENTS})


def _types(entries: Entries) -> set[str]:
    return {dataset.type for dataset in (*entries.datasets, *entries.validation.values())}


def _check_uses(entries: Entries, settings: Settings) -> None:
    """Raises ConfigError for a setting that no row reads. entries: with types decided."""
    if _has_rows(entries):
        return
    unused = ["train_on", "chat_template", "system_prompt"]
    unused += [] if settings.sample_packing or _types(entries) & {"rollout", SEGMENTS} else ["on_long"]
    defaults = Settings(settings.sequence_len)
    for name in unused:
        value = getattr(settings, name)
        default = getattr(defaults, name)
        if value != default:
            others = " or sample_packing" if name == "on_long" else ""
            raise ConfigError(
                f"{name}: expected {default!r} without rows of instructions or conversations{others}, got {value!r}; "
                "leave it out, or name the dataset that has such rows, with its type"
            )


def _check_rows(entries: Entries, settings: Settings, rows: str) -> None:
    """Raises ConfigError if rows have another type than the objective takes. entries: with types decided."""
    types = [(dataset.name, dataset.type) for dataset in (*entries.datasets, *entries.validation.values())]
    for name, type_ in types or [(settings.data, "text")]:
        if rows and type_ != rows:
            raise ConfigError(
                f"{name}: expected rows of type {rows} ({OF_ANSWERS[rows][0]}) with this objective, got rows of "
                f"type {type_}; name such rows, with their type if they have other fields too, or set "
                "objective='cross_entropy'"
            )
        if type_ in OF_ANSWERS and not rows:
            raise ConfigError(
                f"{name}: expected an objective for rows of type {type_}, got objective='cross_entropy'; "
                f"set objective={OF_ANSWERS[type_][1]}"
            )


class _Loader(NamedTuple):
    """Loads datasets and makes samples of them, all with the same settings. The datasets' types are decided."""

    settings: Settings
    tokenizer: Tokenizer
    open_set: OpenSet
    say: Callable[[str], None]
    together: int
    padding: int | None
    routes: TokenRoutes | None

    def dataset(self, dataset: Dataset, holds_out: bool) -> Prepared:
        s = self.settings
        encoder = self.encoder(dataset)
        return load_dataset(
            dataset,
            encoder,
            self.tokenizer.vocab_size,
            holds_out=holds_out,
            on_bad_row=s.on_bad_row,
            data_cache=s.data_cache,
            open_set=self.open_set,
            say=self.say,
        )

    def encoder(self, dataset: Dataset) -> Encoder | TextEncoder | TokenEncoder | RolloutEncoder:
        """Makes the encoder of a dataset's rows, and prints notes about its chat template."""
        if dataset.type == "text":
            return TextEncoder(self.tokenizer, cuts_at_special=True)
        if dataset.type == "tokens":
            return TokenEncoder(self.tokenizer.vocab_size)
        if dataset.type == "rollout":
            return RolloutEncoder(self.tokenizer.vocab_size, self.routes)
        s = self.settings
        template = templates.load_template(s.chat_template, self.tokenizer)
        encoder = Encoder(dataset, self.tokenizer, template, train_on=s.train_on, system_prompt=s.system_prompt)
        if encoder.note:
            self.say(encoder.note)
        return encoder

    def samples(self, corpus: Corpus, is_text: bool, instead: str = "") -> Windows | ExampleRows:
        """Makes the samples of a corpus. instead: the setting that can name another corpus, for messages."""
        s = self.settings
        return windows_or_rows(
            corpus,
            s.sequence_len,
            packed=s.sample_packing,
            is_text=is_text,
            together=self.together,
            padding=self.padding,
            on_long=s.on_long,
            instead=instead,
            say=self.say,
        )


def _evaluated(
    name: str, corpora: list[tuple[Corpus, bool]], loader: _Loader, instead: str, *, batch_size: int, max_batches: int
) -> Evaluated:
    sources = [loader.samples(corpus, is_text, instead) for corpus, is_text in corpora]
    sources = [Windows(x.corpus, x.sequence_len, with_rest=True) if isinstance(x, Windows) else x for x in sources]
    samples = concatenated(sources, name)
    batches = list(evaluation_batches(samples, batch_size=batch_size, max_batches=max_batches))
    if not any((batch["labels"] != IGNORED).any() for batch in batches):
        other = f", or name other examples in {instead}" if instead else ""
        raise ConfigError(f"{samples.name}: expected tokens to evaluate the loss on, got none; add rows{other}")
    if not all(is_text and corpus.num_bytes for corpus, is_text in corpora):
        return Evaluated(name, batches, None)
    # Long documents may be left out; what is known is the bytes of all. The first token of a document is no label.
    num_bytes = sum(x.num_tokens / len(x.corpus.tokens) * x.corpus.num_bytes for x in sources)
    return Evaluated(name, batches, num_bytes / sum(x.num_labels for x in sources))
