"""Datasets: the settings of an entry of `datasets`, and the rows of its files.

A row is a record of named fields, with the place it comes from for messages. A row that cannot be read is a `BadRow`,
in its place among the others: whether it ends the run or is counted is the caller's decision. What makes a whole
dataset unusable (a path that does not exist, a damaged Parquet file) is a ConfigError.
"""

import contextlib
import dataclasses
import difflib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from surojax.data import docstrings, files, given, openai_pairs, readers
from surojax.data.data_rows import BadRow, DataRow, NotARow
from surojax.data.readers import OpenSet, open_set
from surojax.data.row_fields import SEGMENTS
from surojax.data.values import is_missing
from surojax.errors import ConfigError, shown

TYPES = ("auto", "text", "instruction", "conversation", "preference", "unpaired", "segments", "rollout")
MESSAGES = ("messages", "conversations")  # fields of a conversation, unless a dataset says another
PROMPT_FIELDS = ("prompt_field", "completion_field")
INSTRUCTION_FIELDS = ("instruction_field", "input_field", "output_field")
ROLES = ("system", "user", "assistant", "tool")
PROMPT_AS = ("auto", "chat", "plain")
PROMPT = "prompt_ids"  # fields of a rollout, which no setting renames
COMPLETIONS = "completion_ids"
CHATS = ("instruction", "conversation", "preference", "unpaired")  # types of rows with prompts and answers
# The types of rows that read a setting; the others read every row.
USES = {
    "text_field": ("text",),
    "prompt_field": ("instruction", "preference", "unpaired"),
    "prompt_as": ("instruction", "preference", "unpaired"),
    "completion_field": ("instruction", "unpaired"),
    "label_field": ("unpaired",),
    "instruction_field": ("instruction",),
    "input_field": ("instruction",),
    "output_field": ("instruction",),
    "chosen_field": ("preference",),
    "rejected_field": ("preference",),
    "margin_field": ("preference",),
    "messages_field": ("conversation",),
    "role_field": CHATS,
    "content_field": CHATS,
    "tools_field": CHATS,
    "roles": CHATS,
    "system_field": CHATS,
    "system_prompt": CHATS,
}
# Names of settings in Axolotl's configs and in those of Surogate, where ours is another.
OTHER_NAMES = {
    "field": "text_field",
    "field_system": "system_field",
    "field_instruction": "instruction_field",
    "field_input": "input_field",
    "field_output": "output_field",
    "field_messages": "messages_field",
    "field_tools": "tools_field",
    "system_prompt_field": "system_field",
    "message_field_role": "role_field",
    "message_field_content": "content_field",
    "name": "subset",
}


@dataclass(frozen=True)
class Dataset:
    """One entry of `datasets`. Settings that end in `_field` name the fields of its rows.

    path: files, folders, globs, "stdlib_docstrings" (questions about Python, with no download), "stdlib_preferences"
      (the same with a wrong answer too), or one name of a set that the `datasets` library finds.
    type: what a row is, one of TYPES; "auto": the fields of the first row decide, which may be "tokens" as well.
    split: of a folder (see splits.py), or of a set that the `datasets` library finds; "": its training split.
    subset: of such a set; "": its only configuration.
    samples: number of rows to read, from the first on; 0: all.
    weight: relative share in a mixture of datasets.
    prompt_field, completion_field: of an instruction, in one form.
    instruction_field, input_field (may be missing or empty), output_field: of an instruction, in another form. A row
      that has both is read in the form whose fields are named here, else in the first.
    chosen_field, rejected_field: of a preference, beside its prompt_field, which conversations need not have.
    margin_field: of a preference, by how much the chosen answer is better; may be missing.
    label_field: of an answer that is rated (unpaired), true or false, beside its prompt_field and completion_field.
    messages_field: of a conversation; "": "messages", else "conversations".
    role_field, content_field: of a message; "": "role", else "from"; "content", else "value".
    roles: (another name, one of ROLES) for each role that messages have under another name. In an entry, a mapping from
      each of our roles to the other name, or to a list of them.
    system_field: system prompt of an instruction or conversation; may be missing.
    tools_field: tools that a conversation's system prompt describes; may be missing.
    system_prompt: for rows without one of their own; "": none.
    prompt_as: prompts and answers that are texts: "chat", messages of a chat template; "plain", joined as they are;
      "auto": "chat" if there is a chat template.
    ignored_fields: fields of rows and messages that are left out, although they mean something (`row_fields`).
    """

    path: tuple[str, ...]
    type: str = "auto"
    split: str = ""
    subset: str = ""
    samples: int = 0
    weight: float = 1.0
    text_field: str = "text"
    prompt_field: str = "prompt"
    completion_field: str = "completion"
    instruction_field: str = "instruction"
    input_field: str = "input"
    output_field: str = "output"
    chosen_field: str = "chosen"
    rejected_field: str = "rejected"
    margin_field: str = "margin"
    label_field: str = "label"
    messages_field: str = ""
    role_field: str = ""
    content_field: str = ""
    system_field: str = "system"
    roles: tuple[tuple[str, str], ...] = ()
    tools_field: str = "tools"
    system_prompt: str = ""
    prompt_as: str = "auto"
    ignored_fields: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The paths, for messages."""
        return ", ".join(self.path)

    def differing(self, *names: str) -> list[str]:
        """Returns the names of settings, among `names`, that differ from their defaults."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        return [name for name in names if getattr(self, name) != defaults[name]]


def parse_dataset(entry: Mapping[str, Any]) -> Dataset:
    """Makes the `Dataset` of an entry of `datasets`.

    Axolotl's and Surogate's names of settings are understood as well, `message_property_mappings` among them. A path
    is a string or a list of strings. Raises ConfigError for unknown settings or values.
    """
    if not hasattr(entry, "items"):
        raise ConfigError(f"datasets: expected entries like dict(path=...), got {entry!r}; write dict(path={entry!r})")
    settings: dict[str, Any] = {}
    for name, value in entry.items():
        for ours, theirs in _settings_of(name, value):
            if ours in settings:
                raise ConfigError(f"datasets: {ours}: expected one value, got two, one as {name}; remove one of them")
            settings[ours] = theirs
    paths = settings.get("path")
    paths = (paths,) if isinstance(paths, str) else paths
    if not isinstance(paths, list | tuple) or not paths or not all(isinstance(p, str) and p.strip() for p in paths):
        raise ConfigError(
            f"datasets: path: expected a file, folder, glob or name, or a list of them, got {settings.get('path')!r}; "
            "name the data"
        )
    settings["path"] = tuple(paths)
    for name, value in settings.items():
        settings[name] = _parsed(name, value)
    dataset = Dataset(**settings)
    named = dataset.differing(*PROMPT_FIELDS), dataset.differing(*INSTRUCTION_FIELDS)
    if all(named):
        raise ConfigError(
            f"datasets: expected names for a prompt and its completion, or for an instruction, got {named[0][0]} and "
            f"{named[1][0]}; remove those that the rows do not have"
        )
    if dataset.type != "auto":
        _check_uses(dataset, "datasets")
    return dataset


def _check_uses(dataset: Dataset, where: str) -> None:
    """Raises ConfigError if a setting is set that rows of the dataset's type do not read."""
    for name in dataset.differing(*USES):
        if dataset.type not in USES[name]:
            raise ConfigError(
                f"{where}: {name}: expected rows of type {' or '.join(USES[name])}, which read it, got "
                f"{getattr(dataset, name)!r} for rows of type {dataset.type}; correct the type or remove the setting"
            )


def _settings_of(name: str, value: Any) -> list[tuple[str, Any]]:
    """Returns (our name, value) of each setting that a key of an entry sets. Raises ConfigError for an unknown key."""
    if name == "message_property_mappings":
        fields = dict(value) if hasattr(value, "items") else {"": value}
        if unknown := set(fields) - {"role", "content"}:
            raise ConfigError(
                f"datasets: {name}: expected names for role and content, got {sorted(unknown)}; remove the others"
            )
        return [(f"{ours}_field", theirs) for ours, theirs in fields.items()]
    ours = OTHER_NAMES.get(name, name)
    known = [field.name for field in dataclasses.fields(Dataset)]
    if ours not in known:
        close = difflib.get_close_matches(name, [*known, *OTHER_NAMES], n=1)
        hint = f"did you mean {close[0]}?" if close else "remove it"
        raise ConfigError(f"datasets: expected settings {', '.join(known)}, got {name!r}; {hint}")
    return [(ours, value)]


def _parsed(name: str, value: Any) -> Any:
    """Returns the value of a setting as `Dataset` has it. Raises ConfigError if it is not one that it takes."""
    if name == "path":
        return value
    if name == "roles":
        return _parsed_roles(value)
    if name == "ignored_fields":
        names = (value,) if isinstance(value, str) else value
        if isinstance(names, list | tuple) and all(isinstance(x, str) and x for x in names):
            return tuple(names)
        raise ConfigError(f"datasets: {name}: expected names of fields, got {shown(value)}; correct it")
    if name == "samples":
        expected = "a number of rows below 2^48, 0 for all"
        fits = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**48
    elif name == "weight":
        expected = "a number above 0"
        fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
    elif name == "type":
        expected = f"one of {', '.join(TYPES)}"
        fits = value in TYPES
    elif name == "prompt_as":
        expected = f"one of {', '.join(PROMPT_AS)}"
        fits = value in PROMPT_AS
    else:
        expected = "a string"
        fits = isinstance(value, str)
    if not fits:
        raise ConfigError(f"datasets: {name}: expected {expected}, got {shown(value)}; correct it")
    return value


def _parsed_roles(value: Any) -> tuple[tuple[str, str], ...]:
    """Returns (their name, ours) of a mapping from our roles to another name or several."""
    if not hasattr(value, "items"):
        raise ConfigError(f"datasets: roles: expected a mapping, got {shown(value)}; write dict(assistant='bot')")
    roles: dict[str, str] = {}
    for ours, names in value.items():
        names = (names,) if isinstance(names, str) else names
        if ours not in ROLES:
            raise ConfigError(
                f"datasets: roles: expected {', '.join(ROLES)} as keys, got {shown(ours)}; write our role first, as in "
                "dict(assistant='bot')"
            )
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) and name for name in names):
            raise ConfigError(f"datasets: roles: expected names for {ours}, got {shown(names)}; correct them")
        for name in names:
            if roles.setdefault(name, ours) != ours:
                raise ConfigError(
                    f"datasets: roles: expected one role for {name!r}, got {roles[name]} and {ours}; remove one"
                )
    return tuple(roles.items())


def fields_read(dataset: Dataset, *others: str) -> set[str]:
    """Returns the names of the fields that a dataset's settings read of its rows, and `others`."""
    settings = (name for name, types in USES.items() if name.endswith("_field") and dataset.type in types)
    names = {getattr(dataset, name) for name in settings}
    is_chat = dataset.type == "conversation" and not dataset.messages_field
    return names | set(others) | (set(MESSAGES) if is_chat else set())


def resolve(dataset: Dataset, open_set: OpenSet = open_set, wanted: str = "") -> Dataset:
    """Returns the dataset with its type decided, if "auto" from the first readable row.

    wanted: the type that is taken if the row has the fields of several. Raises ConfigError if that row's fields fit no
    type, or there is none.
    """
    if dataset.type != "auto":
        return dataset
    bad = None
    for row in read_dataset(dataset, open_set):
        if isinstance(row, DataRow):
            resolved = dataclasses.replace(dataset, type=_type_of_filled(row, dataset, wanted))
            _check_uses(resolved, row.where)
            return resolved
        bad = bad or row
    assert bad is not None, "read raises if there is no row"
    raise ConfigError(f"{bad.where}: {bad.reason}")


def check_alike(dataset: Dataset, open_set: OpenSet = open_set) -> None:
    """Raises ConfigError if the first row of one of a dataset's paths has another type than the dataset.

    Paths that cannot be read are passed over here; reading their rows reports them.
    """
    if len(dataset.path) < 2:
        return
    types = {}
    for path, found in _paths(dataset):
        if found and found.files:
            with contextlib.suppress(ConfigError):
                one = dataclasses.replace(dataset, path=(path,), type="auto")
                types[path] = resolve(one, open_set, dataset.type).type
    for path, type_ in types.items():
        if type_ != dataset.type:
            others = ", ".join(name for name in dataset.path if types.get(name) == dataset.type)
            raise ConfigError(
                f"{path}: expected rows of type {dataset.type}, as in {others}, got rows of type {type_}; give it an "
                "entry of its own in datasets"
            )


def _type_of_filled(row: DataRow, dataset: Dataset, wanted: str) -> str:
    """Returns the type of a row by the fields that have a value: a table has all fields in each row."""
    filled = {
        name: value
        for name, value in row.record.items()
        if not (is_missing(value) or (isinstance(value, str) and not value))
    }
    with contextlib.suppress(ConfigError):
        return _type_of(row._replace(record=filled), dataset, wanted)
    return _type_of(row, dataset, wanted)


def _type_of(row: DataRow, dataset: Dataset, wanted: str) -> str:
    messages = (dataset.messages_field,) if dataset.messages_field else MESSAGES
    fields = row.record.keys()
    needed = [("conversation", {name}) for name in messages]
    needed += [
        ("instruction", {dataset.prompt_field, dataset.completion_field}),
        ("instruction", {dataset.instruction_field, dataset.output_field}),
        ("preference", {dataset.chosen_field, dataset.rejected_field}),
        ("rollout", {PROMPT, COMPLETIONS}),
        ("text", {dataset.text_field}),
        (SEGMENTS, {SEGMENTS}),
        ("tokens", {given.TOKENS}),
    ]
    if found := [type_ for type_, names in needed if names <= fields]:
        return wanted if wanted in found else found[0]
    conversation = " or ".join(messages)
    instruction = f"{dataset.prompt_field} and {dataset.completion_field}"
    other_instruction = f"{dataset.instruction_field} and {dataset.output_field}"
    preference = f"{dataset.chosen_field} and {dataset.rejected_field}"
    raise ConfigError(
        f"{row.where}: expected a field {conversation} (a conversation), {instruction}, or {other_instruction} (an "
        f"instruction), {preference} (a preference), {PROMPT} and {COMPLETIONS} (a rollout), {SEGMENTS} (texts with "
        f"labels), or {dataset.text_field} (text), got {field_names(row.record)}; "
        "set text_field to the field that holds the text, or the dataset's type and the names of its fields in an "
        "entry of datasets"
    )


def field_names(record: Mapping[str, Any]) -> str:
    """Returns the first names of a record's fields, for messages."""
    names = [repr(name) for name in record]
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") if names else "no fields"


def read_dataset(dataset: Dataset, open_set: OpenSet = open_set) -> Iterator[DataRow | BadRow]:
    """Yields the dataset's rows: paths in the given order, each path's files sorted, no file twice.

    A .txt file is one row, whose field `text_field` is a `TextFile`; a .jsonl file has a row in each line that is not
    blank, a .json file the same or one list of rows, a .csv file a header and a row in each
    further line. Files of tables are read in batches. Hidden files are skipped.

    open_set: loads a set of the `datasets` library. Raises ConfigError if something is missing or unreadable, or there
    is no row at all.
    """
    has_rows = False
    for row in islice(_rows(dataset, open_set), dataset.samples or None):
        has_rows = True
        yield _named(_without(row, dataset.ignored_fields), dataset)
    if not has_rows:
        raise ConfigError(f"{dataset.name}: expected rows, got none; add some, or leave the dataset out")


def _without(row: DataRow | BadRow, names: tuple[str, ...]) -> DataRow | BadRow:
    """Returns a row without fields of these names."""
    if isinstance(row, BadRow) or not any(name in row.record for name in names):
        return row
    return row._replace(record={name: value for name, value in row.record.items() if name not in names})


def _named(row: DataRow | BadRow, dataset: Dataset) -> DataRow | BadRow:
    """Gives a preference in OpenAI's format the dataset's names of fields."""
    if isinstance(row, BadRow) or dataset.type not in ("auto", "preference") or not openai_pairs.is_pair(row.record):
        return row
    names = (dataset.prompt_field, dataset.chosen_field, dataset.rejected_field, dataset.tools_field)
    try:
        return row._replace(record=openai_pairs.as_pair(row.record, *names))
    except NotARow as error:
        return BadRow(row.where, str(error))


def files_of(dataset: Dataset) -> files.FoundFiles:
    """Lists the files that the rows are read from, without those of sets of the `datasets` library."""
    found = [found for _, found in _paths(dataset) if found]
    return files.FoundFiles([path for x in found for path in x.files], [name for x in found for name in x.other_splits])


def fingerprints_of_sets(dataset: Dataset, open_set: OpenSet) -> list[list[str]]:
    """Lists [name, fingerprint of its rows] for each path that is a set, not a file; "": the name determines them."""
    fingerprints = []
    for item, found in _paths(dataset):
        if item in docstrings.SETS:
            fingerprints.append([item, ""])
        elif found is None:
            rows = open_set(item, dataset.subset, _split_of(dataset))
            fingerprints.append([item, str(getattr(rows, "_fingerprint", ""))])
    return fingerprints


def _split_of(dataset: Dataset) -> str:
    return dataset.split or "train"


def _paths(dataset: Dataset) -> Iterator[tuple[str, files.FoundFiles | None]]:
    """Yields (path, its files without those of earlier paths); None for a path that names no file."""
    seen: set[Path] = set()
    for item in dataset.path:
        if item == given.NAME:
            yield item, None
            continue
        is_made = item in docstrings.SETS
        found = (
            files.FoundFiles(files.stdlib_files(), [])
            if is_made
            else files.find_with_splits(item, readers.SUFFIXES, dataset.split)
        )
        yield item, found and found._replace(files=files.unseen(found.files, seen))


def _rows(dataset: Dataset, open_set: OpenSet) -> Iterator[DataRow | BadRow]:
    for item, found in _paths(dataset):
        if item in docstrings.SETS:
            yield from docstrings.SETS[item]()
            continue
        if found is None:
            split = _split_of(dataset)
            yield from readers.read_set(open_set(item, dataset.subset, split), f"{item} ({split})")
            continue
        if dataset.subset:
            raise ConfigError(
                f"{item}: expected no subset, which files do not have, got {dataset.subset!r}; name the files in path"
            )
        for path in found.files:
            yield from readers.read_file(path, dataset.text_field)
