"""Finds the checkpoint that a run continues from, and checks that the run may continue from it."""

import ast
import hashlib
import inspect
import os
import textwrap
from pathlib import Path
from typing import Any

from surojax.config import checks, fields as configs
from surojax.config.fields import Config
from surojax.config.sections import BatchSettings
from surojax.declared import Facts, names_of
from surojax.errors import CheckpointError, ConfigError
from surojax.memory.layer_file import Store
from surojax.memory.slots import TABLE, read_slot_table
from surojax.models.decoder_model import ARCHITECTURE
from surojax.own_files import check_form
from surojax.run import on_disk
from surojax.run.console import say
from surojax.run.metrics import METRICS_FILE, read_metrics
from surojax.run.on_disk import BLOCK
from surojax.untrusted import expanded

IDENTITY = configs.names_with(Facts.IDENTITY)  # fields that a run continues with, unchanged
# Fields that say how many samples a step has.
SAMPLES = {"gpus", *configs.SHARE_SEQUENCES, *names_of(BatchSettings)}
NEWEST = ("latest", "last")  # other tools' words for the newest checkpoint


def find_resume(c: Config, output_dir: Path, identity: dict[str, str], samples_per_step: int) -> Path | None:
    """Returns the checkpoint to continue from, or None for a new run.

    Raises ConfigError if `resume_from_checkpoint` names no checkpoint or contradicts those in output_dir, and
    CheckpointError if the checkpoint was written with another model, block, seed, sequence length, tokenizer or data.
    """
    own = on_disk.find(output_dir / on_disk.FOLDER)
    wanted = _place(c.resume_from_checkpoint, output_dir)
    if wanted == "no":
        if own:
            raise ConfigError(
                f"resume_from_checkpoint: 'no', but {own} exists; choose another output_dir, delete it, or use 'auto'"
            )
        return None
    checkpoint = own
    # A run that started from another run's checkpoint has its own by now: the same command resumes from the newest one.
    if wanted != "auto" and not (own and _began_from(on_disk.read_meta_of_run(own), output_dir) == wanted):
        checkpoint = on_disk.find(wanted)
        if checkpoint is None:
            raise ConfigError(
                f"resume_from_checkpoint: expected 'auto', 'no' or a checkpoint, got {c.resume_from_checkpoint!r}, "
                f"which holds none ({wanted}); correct it"
            )
        if own and not _is_same(checkpoint, own):
            raise ConfigError(
                f"resume_from_checkpoint: expected {own}, the newest in output_dir, got {checkpoint}; "
                "move the newer ones away, or choose another output_dir"
            )
    if checkpoint is not None:
        check_same(c, f"checkpoint {checkpoint}", on_disk.read_meta_of_run(checkpoint), identity, samples_per_step)
    return checkpoint


def goes_on_in_files(c: Config, output_dir: Path, progress: dict[str, Any] | None, newest: int) -> bool:
    """Returns True if a run continues from the complete state in its files, and not from a checkpoint.

    progress: of that state, None if there is none. newest: step of the checkpoint. The state has to be newer, and this
    run's, which has the record of its step.
    """
    if progress is None or not _is_of_a_run(progress):
        return False
    if progress["step"] <= newest or not _is_same(progress["output_dir"], output_dir):
        return False
    wanted = _place(c.resume_from_checkpoint, output_dir)
    return wanted in ("auto", _began_from(progress, output_dir)) and _has_record(output_dir, progress)


def _place(wanted: str, output_dir: Path) -> str:
    """Returns "auto", "no", or the path of the folder that a value of `resume_from_checkpoint` means, without links.

    A step, or "latest", is of the checkpoints in output_dir, unless there is such a path.
    """
    if wanted in ("auto", "no"):
        return wanted
    path = expanded(wanted)
    if not path.exists():
        folder = output_dir / on_disk.FOLDER
        path = folder / wanted if on_disk.STEP.fullmatch(wanted) else folder if wanted in NEWEST else path
    return os.path.realpath(path)


def _began_from(progress: dict[str, Any], output_dir: Path) -> str:
    return _place(progress["config"]["resume_from_checkpoint"], output_dir)


def check_unfinished(store: Store, output_dir: Path) -> None:
    """Raises ConfigError if a store's files have another run's state that is newer than all its checkpoints."""
    table = None if store.is_empty else read_slot_table(store.folder)
    if table is None or not _is_of_a_run(table["progress"]):
        return
    progress = table["progress"]
    run, step = Path(progress["output_dir"]), progress["step"]
    if _is_same(run, output_dir):
        return
    try:
        has_record = _has_record(run, progress)
        saved = on_disk.find(run / on_disk.FOLDER)
    except OSError as error:
        raise ConfigError(
            f"nvme_path: {store.folder} has step {step} of the run in {run}, which cannot be read "
            f"({error.strerror or error}); choose another folder, or delete {store.folder / TABLE}"
        ) from error
    if has_record and (saved is None or int(saved.name) < step):
        raise ConfigError(
            f"nvme_path: {store.folder} has step {step} of the run in {run}, whose last checkpoint is "
            f"{saved.name if saved else 'none'}; choose another folder, continue that run, or delete "
            f"{store.folder / TABLE}"
        )


def _is_of_a_run(progress: dict[str, Any]) -> bool:
    """Returns True if the progress in a table has what `on_disk.OF_A_RUN` says, and the absolute path of its run."""
    try:
        check_form(progress, on_disk.OF_A_RUN | {"output_dir": str})
        return Path(progress["output_dir"]).is_absolute()
    except ValueError:
        return False


def _is_same(a: str | Path, b: Path) -> bool:
    """Returns True if two paths are of one folder."""
    return os.path.realpath(a) == os.path.realpath(b)


def _has_record(output_dir: Path, progress: dict[str, Any]) -> bool:
    """Returns True if metrics.jsonl has the record of this step: the run was neither deleted nor started anew."""
    file = output_dir / METRICS_FILE
    records = read_metrics(file) if file.exists() else ()
    return any(record["log"] == "step" and record["step"] == progress["step"] for record in records)


def check_same(c: Config, source: str, meta: dict[str, Any], identity: dict[str, str], samples_per_step: int) -> None:
    """Prints which settings differ from a checkpoint's, or those of a state in files, that a run continues from.

    source, meta: name and meta of the checkpoint.

    Raises CheckpointError if it was written with another model, block, seed, sequence length, tokenizer or data.
    """
    saved = checks.restored_config(meta["config"], on_disk.written_by(meta))
    changed = differences(saved.to_dict(), c.to_dict())
    fixed = {k: v for k, v in changed.items() if k in IDENTITY}
    fixed |= {k: (meta.get(k), identity.get(k)) for k in (*identity, BLOCK) if meta.get(k) != identity.get(k)}
    if fixed:
        what = ", ".join(f"{k} is {a!r} there and {b!r} here" for k, (a, b) in fixed.items())
        raise CheckpointError(f"{source} is of another run: {what}; use the same, or another output_dir")
    settings = {k: v for k, v in changed.items() if k not in ("output_dir", "resume_from_checkpoint")}
    if settings:
        say("continuing with changed settings: " + ", ".join(f"{k} {a!r} -> {b!r}" for k, (a, b) in settings.items()))
    check_batch(c, source, meta.get("samples_per_step", samples_per_step), samples_per_step, settings)


def block_identity(block: type) -> str:
    """Returns the identity of a caller's block for checkpoints: its name, and a hash of its classes' source.

    Comments, layout and docstrings are not in the hash, nor functions that a method calls. Where Python finds no source
    (code typed into an interpreter), the name is all.
    """
    definitions = []
    for cls in block.__mro__[: block.__mro__.index(ARCHITECTURE.block)]:
        for name, value in sorted(vars(cls).items()):
            if inspect.isfunction(value) and value.__qualname__.startswith(cls.__qualname__):
                try:
                    definitions.append(_without_docstring(textwrap.dedent(inspect.getsource(value))))
                except (OSError, SyntaxError):
                    return block.__qualname__
            elif not name.startswith("_") and isinstance(value, int | float | str):
                definitions.append(f"{name} = {value!r}")
    return f"{block.__qualname__} {hashlib.sha256(chr(10).join(definitions).encode()).hexdigest()[:8]}"


def _without_docstring(source: str) -> str:
    """Returns a function's source as `ast.unparse` formats it, without the docstring."""
    tree = ast.parse(source)
    (function,) = tree.body
    if isinstance(function, ast.FunctionDef) and ast.get_docstring(function) is not None:
        function.body = function.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def check_batch(c: Config, source: str, before: int, now: int, changed: dict) -> None:
    """Prints that the number of samples per step has changed since the checkpoint.

    before, now: samples per step. changed: the settings that differ. Raises CheckpointError if none of them determines
    the batch size: then only the number of available devices changed, which may be a mistake.
    """
    if before == now:
        return
    if not changed.keys() & SAMPLES:
        groups = now // (c.per_device_batch_size * c.gradient_accumulation_steps)
        devices = groups * configs.gpus_per_sequence(c)
        per_device, rest = divmod(before, groups * c.gradient_accumulation_steps)
        keep = "" if rest else f"per_device_batch_size={per_device} keeps it so, "
        raise CheckpointError(
            f"{source} is of a run with {before} samples a step, which with these settings would be {now} on "
            f"the {devices} devices here; {keep}gpus={devices} goes on with {now}"
        )
    say(f"note: a step has {now} samples from here on, it had {before}")


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Returns the fields in which two nested dicts differ, as {dotted name: (old value, new value)}."""
    changed = {}
    for key in sorted(old.keys() | new.keys()):
        a = old.get(key)
        b = new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            changed |= differences(a, b, f"{prefix}{key}.")
        elif a != b:
            changed[prefix + key] = (a, b)
    return changed
