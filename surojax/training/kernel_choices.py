"""Keeps the kernels that XLA chooses by timing, in a folder of the machine and beside a run's checkpoints.

Other kernels round differently, so a resumed run uses the kernels that it had, on another machine too. XLA (0.11.2,
0.12.0.1) stores each choice in a file, named by GPU and operation, in `xla_gpu_per_fusion_autotune_cache_dir`. The file
names the library of the kernel and its version; a process with that version uses the choice.

XLA's other way, one file of all choices (`xla_gpu_dump_autotune_results_to`, `xla_gpu_load_autotune_results_from`), is
not taken: XLA writes it anew at each compilation and reads it once in a process (the options' help texts), ends the
compilation if it is missing, and does not promise that it works beside the folder (docs/persisted_autotuning.md there).
"""

import os
from pathlib import Path

import jax

from surojax.config.fields import Config
from surojax.run.console import say
from surojax.untrusted import expanded

FOLDER = "kernels"  # in data_cache and in output_dir
MOST = 4096  # files; a program has some 20 choices, of a few hundred bytes
LARGEST = 1 << 16  # bytes of a file


def kept_choices(c: Config, platform: str) -> dict[str, str]:
    """Returns the XLA option that keeps the kernels that XLA chose by timing, in a folder of this machine.

    A program of another run, or of this run resumed, then takes the same kernel for the same product. Without a folder
    that can be written, each program chooses by itself.
    """
    if platform != "gpu":
        return {}
    folder = _of_machine(c)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return {}
    return {"xla_gpu_per_fusion_autotune_cache_dir": str(folder)}


def take_choices(c: Config, checkpoint: Path | None, output_dir: Path, platform: str) -> None:
    """Copies a run's choices into the machine's folder before the run compiles, and prints how many were new there.

    checkpoint: the checkpoint that the run continues from, RUN/checkpoints/STEP, whose RUN may be another output_dir;
    None: there is none.
    """
    if platform != "gpu":
        return
    run = checkpoint.parent.parent if checkpoint else output_dir
    try:
        if taken := _copy(run / FOLDER, _of_machine(c), replaces=True):
            say(f"kernels: {taken} that XLA had chosen in {run} are taken from there")
    except OSError as error:
        say(f"note: the kernels that XLA had chosen in {run} cannot be taken from there ({error.strerror or error})")


def store_choices(c: Config, output_dir: Path, platform: str) -> None:
    """Copies the machine's choices beside a run's checkpoints after it has compiled; existing files there stay."""
    if platform != "gpu":
        return
    try:
        _copy(_of_machine(c), output_dir / FOLDER, replaces=False)
    except OSError as error:
        say(f"note: the kernels that XLA chose cannot be stored in {output_dir} ({error.strerror or error})")


def _of_machine(c: Config) -> Path:
    return expanded(c.data_cache) / FOLDER


def _copy(source: Path, target: Path, *, replaces: bool) -> int:
    """Copies files that the target lacks, each atomically; returns how many. replaces: also files that differ."""
    copied = 0
    for file in _choices(source):
        place, content = target / file.relative_to(source), file.read_bytes()
        if place.exists() and (not replaces or place.read_bytes() == content):
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        new = place.with_name(f".tmp_{place.name}.{jax.process_index()}.{os.getpid()}")  # hosts may share the folder
        new.write_bytes(content)
        new.replace(place)
        copied += 1
    return copied


def _choices(folder: Path) -> list[Path]:
    """Lists the newest files of choices, without links and without files that XLA is still writing."""
    found = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "tmp"]
        files = [Path(parent, name) for name in names if not name.startswith(".")]
        found += [(file.lstat(), file) for file in files if file.is_file() and not file.is_symlink()]
    small = [(stat.st_mtime_ns, file) for stat, file in found if stat.st_size <= LARGEST]
    return [file for _, file in sorted(small, reverse=True)[:MOST]]
