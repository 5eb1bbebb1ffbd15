"""Measurements of this machine's GPUs and disks: the file that `train` and `doctor` write and `plan` and `fit` read.

The file is `rates_file`, JSON: {"version": 1, "entries": [...]}, the newest entry last. Each entry has

* "device_kind": as jax reports it; "gpus": how many there were; "date": YYYY-MM-DD; "versions": {package: version}.
* "rate": "step", or a field of `rates.Rates`. "value": of a step, measured / predicted seconds; of another rate, what
  replaces it, in `Rates`' units.
* of a step: "settings", `settings_key` of the run, "measured_s", "predicted_s", and "replaced": the other rates that
  the prediction had from the file. It corrects predictions with the same ones only.
* of a disk: "rate" is one of `DISK_RATES`, "value" in GB/s, and "device_kind" the absolute path of a folder on it.

A step that was measured with the same settings corrects their prediction by its own value. Other settings are corrected
by the median of the values of that kind of GPU, one for each settings. The factor is part of the rates
(`Rates.slower`), so simulation and estimate share it.
"""

import dataclasses
import datetime
import hashlib
import importlib.metadata
import json
import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from surojax.config.fields import Config, set_fields
from surojax.declared import Facts
from surojax.errors import ConfigError
from surojax.own_files import Optional, read_own, write_whole
from surojax.placement import cuda_plugin
from surojax.planner.gpus import GB, Gpu, find_gpu
from surojax.planner.rates import HERE, LATENCIES, RATES, UNCERTAIN, Seen, Span
from surojax.untrusted import expanded

if TYPE_CHECKING:
    from surojax.planner.prediction import Prediction

VERSION = 1
STEP = "step"
DISK_RATES = ("disk_read", "disk_write")
MOST_BYTES = 2**20
MOST_ENTRIES = 500
LEAST_STEPS = 5  # measured ones, after the first, whose median is written
MEASURED_ENDS = 0.03  # relative, of a single rate
PACKAGES = ("surojax", "jax", "jaxlib")
PLUGIN = "CUDA plugin"  # among the versions of an entry
ENTRY = {
    "device_kind": str,
    "rate": str,
    "date": str,
    "value": float,
    "versions": Optional({str: str}),
    "settings": Optional(str),
    "replaced": Optional([str]),
}
FORM = {"version": range(VERSION, VERSION + 1), "entries": [ENTRY]}  # of the file


def settings_key(c: Config, gpus: int) -> str:
    """A short name of all settings that a step's time depends on. gpus: how many run it.

    c: as `train` takes it: what "auto" and an unset field mean follows from the others and the kind of GPU.
    """
    values = set_fields(c, Facts.TIME) | {"gpus": gpus}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def corrected(gpu: Gpu, path: str, settings: str = "") -> Gpu:
    """A GPU with the rates that were measured on its kind; as it is if none were. path: "" for none.

    settings: `settings_key` of the step to predict. Raises ConfigError for a file that cannot be read.
    """
    of_gpus = [entry for entry in _read(path) if entry["rate"] not in DISK_RATES]
    mine = [entry for entry in of_gpus if find_gpu(entry["device_kind"]) is find_gpu(gpu.name) is not None]
    single = {entry["rate"]: entry["value"] for entry in mine if entry["rate"] != STEP}
    steps = {x["settings"]: x for x in mine if x["rate"] == STEP and set(x["replaced"]) == single.keys()}
    if not single and not steps:
        return gpu
    same = settings in steps
    values = [steps[settings]["value"]] if same else [x["value"] for x in steps.values()]
    factor = statistics.median(values) if values else 1.0
    of_step = (
        f"a step took {factor:.2f} x the predicted time with {'these' if same else f'{len(values)} other'} settings"
    )
    said = [f"{', '.join(single)} measured"] * bool(single) + [of_step] * bool(values)
    note = f"corrected: {' and '.join(said)} here (to {mine[-1]['date']}, {path}){_of_other_plugins(mine)}"
    span = Span(1 - MEASURED_ENDS, 1 + MEASURED_ENDS, HERE)
    ends = {name: span for name, rate in UNCERTAIN.items() if set(rate.fields) <= single.keys()}
    rates = dataclasses.replace(gpu.rates, **single)
    seen = Seen(factor, same, tuple(sorted(single)), note)
    return dataclasses.replace(gpu, rates=rates.slower(factor), ends=dict(gpu.ends) | ends, seen=seen)


def _of_other_plugins(entries: Sequence[dict[str, Any]]) -> str:
    """Returns a remark if steps were measured with another CUDA plugin than the installed one; "" if not."""
    installed = cuda_plugin.plugin_version_text()
    plugins = {x.get("versions", {}).get(PLUGIN) for x in entries if x["rate"] == STEP}
    others = sorted(str(version) for version in plugins - {installed, None})
    return f"; with XLA of the CUDA plugin {', '.join(others)}, while {installed} is installed here" if others else ""


def of_run(c: Config, devices: Sequence[Any], predicted: "Prediction", durations_s: Sequence[float]) -> str:
    """Writes what the steps of a run took, if they ran on a GPU and were predicted; returns a line that says so, or "".

    A step with files says less of a GPU than of its disks, and is left out.

    durations_s: of steps; the median of those after the first is written if there are `LEAST_STEPS`. A file that cannot
    be read or written is left as it is, and the line says why: it never ends a run.
    """
    later = durations_s[1:]
    if devices[0].platform != "gpu" or predicted.uncorrected_s is None or c.nvme_path or len(later) < LEAST_STEPS:
        return ""
    kind = devices[0].device_kind
    measured = statistics.median(later)
    settings = settings_key(c, len(devices))
    return record(
        c.rates_file, kind, predicted.uncorrected_s, measured, settings, len(devices), replaced=predicted.replaced
    )


def record(
    path: str,
    device_kind: str,
    predicted_s: float,
    measured_s: float,
    settings: str,
    gpus: int,
    replaced: Sequence[str] = (),
) -> str:
    """Adds a step of so many GPUs of a kind to the file; returns a line that says so. path: "" writes nothing.

    The newest entry of a kind and settings replaces older ones. See `of_run` for errors.
    """
    value = measured_s / predicted_s
    if not path or not 0 < value < math.inf:
        return ""
    entry = {
        **_entry(device_kind, gpus, STEP, value),
        "settings": settings,
        "measured_s": round(measured_s, 6),
        "predicted_s": round(predicted_s, 6),
        "replaced": sorted(replaced),
    }
    written = f"written: a step took {value:.2f} x the predicted time; plan and fit read {path}"
    return _add(path, entry, ("device_kind", "rate", "settings")) or written


def record_rate(path: str, device_kind: str, rate: str, value: float) -> str:
    """Adds a rate that was measured on one GPU of a kind to the file; returns a line that says so.

    rate: a field of `Rates`, whose units value has. The newest replaces older ones. Steps that were measured before
    correct no predictions with it. path: "" writes nothing. See `of_run` for errors.
    """
    entry = _entry(device_kind, 1, rate, value)
    if not path or not _is_possible(rate, entry["value"]):
        return ""
    return _add(path, entry, ("device_kind", "rate")) or f"written: {value:.2f}; plan and fit read {path}"


class DiskRates(NamedTuple):
    """Bytes/s that a disk reads, and that it writes for long."""

    read: float
    write: float


def record_disk(path: str, folder: str, rates: DiskRates) -> str:
    """Adds the rates of a folder's disk to the file; returns a line that says so. folder: an absolute path.

    path: "" writes nothing. See `of_run` for errors.
    """
    if not path:
        return ""
    entries = [_entry(folder, 0, rate, value / GB) for rate, value in zip(DISK_RATES, rates, strict=True)]
    if not all(_is_possible(x["rate"], x["value"]) for x in entries):  # else the file could not be read
        return "note: what was measured is not written: no disk has such rates"
    for entry in entries:
        if note := _add(path, entry, ("device_kind", "rate")):
            return note
    return f"written; plan and fit read {path} with --disk {folder}"


def rates_of_disk(path: str, folder: str) -> DiskRates | None:
    """The rates of a folder's disk in the file; None if it has none. Raises ConfigError for bad content."""
    by_rate = {x["rate"]: x["value"] * GB for x in _read(path) if x["device_kind"] == folder}
    return DiskRates(*(by_rate[rate] for rate in DISK_RATES)) if by_rate.keys() >= set(DISK_RATES) else None


def _entry(device_kind: str, gpus: int, rate: str, value: float) -> dict[str, Any]:
    """Makes an entry of the file."""
    return {
        "device_kind": device_kind,
        "gpus": gpus,
        "rate": rate,
        "value": round(value, 4),
        "date": datetime.date.today().isoformat(),
        "versions": {name: _version(name) for name in PACKAGES} | {PLUGIN: cuda_plugin.plugin_version_text()},
    }


def _add(path: str, entry: dict[str, Any], this: Sequence[str]) -> str:
    """Adds an entry to the file, in place of those with the same values of `this`; returns why not, or ""."""
    try:
        others = [x for x in _read(path) if any(x.get(name) != entry[name] for name in this)]
        file = expanded(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, {"version": VERSION, "entries": [*others, entry][-MOST_ENTRIES:]}, indent=1)
    except (ConfigError, OSError) as error:
        return f"note: what was measured is not written: {error}"
    return ""


def _version(package: str) -> str:
    """The version of a package; "" if it is not installed, as in a clone."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _read(path: str) -> list[dict[str, Any]]:
    """The entries of a file; none if there is no file. Raises ConfigError for bad content."""
    file = expanded(path)
    if not path or not file.exists():
        return []

    def bad(what: str) -> ConfigError:
        return ConfigError(
            f"rates_file: expected what `train` writes, got {path!r} ({what}); move it away, or leave it out with "
            "--config.rates_file="
        )

    try:
        entries = read_own(file, FORM, MOST_BYTES)["entries"]
    except (OSError, ValueError) as error:
        raise bad(getattr(error, "strerror", None) or str(error)) from error
    for number, entry in enumerate(entries):
        lacks = {"settings", "replaced"} - entry.keys() if entry["rate"] == STEP else set()
        if lacks or not _is_possible(entry["rate"], entry["value"]):
            raise bad(f"entry {number} is none")
    return entries


def _is_possible(rate: str, value: float) -> bool:
    """Returns True if a rate of the file can have this value."""
    if rate == STEP:
        return 0.01 < value < 100
    if rate in DISK_RATES:
        return 0 < value < 1e3
    return rate in RATES and 0 < value < (1 if rate in LATENCIES else 10)
