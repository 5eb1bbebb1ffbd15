"""Trains a model whose state is larger than memory, on this machine's CPU and disk, and holds each step to its limit.

    python benchmarks/any_size.py [--layers 64] [--hidden 1408] [--rows 1 24] [--steps 5] [--folder FOLDER]

The default has 1.52B parameters with float32 AdamW: 28 GiB of files, and 18 GB more for the checkpoint at the end.
Every class is in files, and updates are under the next forward pass. What is run, one after the other:

* **Products.** The same model with few layers, and with twice as many, all in memory, before and after the run with all
  layers; the difference is the time of the layers between, from which follows the time of all.
* **The same bits**: the smaller of these with every class in files has the same records.
* **All layers in files**, with 128 tokens a step, where the disk takes longest, and with 3,072, where products do:
  seconds a step, beside the larger of the two, which is the limit. Between these each binds in one pass: four fifths of
  the files are read and written in the forward pass, which has a third of the products. The disk's seconds are the
  bytes that the process has moved, by the kernel's count, at the rates of a file in the same folder, which is read and
  written before and after, as a step does. The resident memory of the process and its children together is sampled ten
  times a second; its maximum is reported.
* **Killed twice** with SIGKILL, with two slots of the state, within one of the first steps and one of the last: the
  same records.

Exit code 1: records differ, a step takes more than 1.15 of its limit, or a GB more than 0.15 CPU seconds.
"""

import argparse
import dataclasses
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from surojax import read_metrics
from surojax.config.fields import Config, default_config
from surojax.memory.aligned import Buffers
from surojax.memory.layer_file import Store
from surojax.memory.nvme import CHUNK
from surojax.run.metrics import METRICS_FILE, TIMINGS
from surojax.verification.settings import OFFLOADS

GB, GIB = 1e9, 2**30
LIMIT = 1.15  # of what products or the disk take
CPU_LIMIT = 0.15  # CPU seconds of a GB read or written
FEW = 4  # layers that are in memory
FILE_BYTES = 2 * GIB  # that are written and read to know the disk


def get_config() -> Config:
    """Returns the config of all runs; this file is their `--config`."""
    c = default_config()
    c.data = "stdlib"
    c.model.vocab_size = 320
    c.model.num_attention_heads = 11
    c.model.num_key_value_heads = 11
    c.model_dtype = "float32"
    c.sequence_len = 128
    c.per_device_batch_size = 1
    c.learning_rate = 1e-4
    c.warmup_steps = 0
    c.eval_steps = 0
    c.eval_batches = 1
    c.save_steps = 0
    c.sample_tokens = 0
    c.log_steps = 1
    return c


@dataclasses.dataclass
class Run:
    """A finished run. records: of metrics.jsonl. seconds: of its steps but the first. resident: bytes at most.
    moved: bytes read from and written to disks between the first and the last step, for each step."""

    records: list[dict[str, Any]]
    seconds: float
    resident: int
    moved: tuple[float, float]


def command(folder: Path, fields: dict[str, Any]) -> list[str]:
    """Returns the command that trains with the config of this file, changed by `fields`."""
    options = [f"--config.{name}={value}" for name, value in {"output_dir": folder, **fields}.items()]
    return [sys.executable, "-m", "surojax.train", "--config", __file__, *options]


def in_files(disk: Path, **fields: Any) -> dict[str, Any]:
    """Returns the fields of a run with every class in files."""
    return {**dict.fromkeys(OFFLOADS, "nvme"), "nvme_path": disk, "overlap_update": True, **fields}


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """Returns the records of steps that a run has written until now."""
    file = folder / METRICS_FILE
    return [r for r in read_metrics(file) if r["log"] == "step"] if file.exists() else []


def without_times(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns records without what no two runs have alike."""
    return [{k: v for k, v in r.items() if k not in TIMINGS} for r in records]


def family(process: psutil.Process) -> Iterator[psutil.Process]:
    """Yields a process and its children that still run."""
    yield process
    yield from process.children(recursive=True)


class Watch(threading.Thread):
    """Samples a process: its resident memory with its children at most, and its bytes on disks by recorded step."""

    def __init__(self, pid: int, folder: Path):
        super().__init__(daemon=True)
        self.process = psutil.Process(pid)
        self.folder = folder
        self.resident = 0
        self.moved: dict[int, tuple[int, int]] = {}  # by the number of recorded steps
        self.start()

    def run(self) -> None:
        for sample in itertools.count():
            try:
                self.resident = max(self.resident, sum(p.memory_info().rss for p in family(self.process)))
                if sample % 5 == 0:
                    io = self.process.io_counters()
                    self.moved[len(steps_of(self.folder))] = io.read_bytes, io.write_bytes
            except (psutil.Error, json.JSONDecodeError):
                if not self.process.is_running():
                    return
            time.sleep(0.1)

    def moved_by_step(self, steps: int) -> tuple[float, float]:
        """Returns the bytes of a step: of those between the moments at which the second and the last were recorded."""
        (_, first), (_, last) = ((n, self.moved[n]) for n in (1, steps - 1))
        return (last[0] - first[0]) / (steps - 2), (last[1] - first[1]) / (steps - 2)


def run(folder: Path, fields: dict[str, Any]) -> Run:
    """Trains in a process of its own, which has to succeed."""
    process = subprocess.Popen(command(folder, fields), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    watch = Watch(process.pid, folder)
    text = process.communicate()[0]
    assert process.returncode == 0, text
    steps = steps_of(folder)
    seconds = statistics.median(record["duration_ms"] / 1e3 for record in steps[1:])
    moved = watch.moved_by_step(len(steps)) if "nvme_path" in fields else (0.0, 0.0)
    records = read_metrics(folder / METRICS_FILE)
    shutil.rmtree(folder)
    return Run(without_times(records), seconds, watch.resident, moved)


def killed(folder: Path, fields: dict[str, Any], after: tuple[int, ...], steps: int) -> list[dict[str, Any]]:
    """Trains until so many steps are recorded; kills it while it computes what follows each of the steps `after`.

    Returns the records of these steps.
    """
    for end in (*after, steps):
        process = subprocess.Popen(command(folder, fields), stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
        while len(steps_of(folder)) < end and process.poll() is None:
            time.sleep(0.05)
        assert process.poll() is None, f"exit code {process.returncode}"
        time.sleep(2.0 if end < steps else 0.0)  # within the next step's passes over the files
        process.kill()
        process.wait()
        print(f"  killed after step {end}", flush=True)
    return without_times(steps_of(folder)[:steps])


@dataclasses.dataclass
class Rates:
    """Of a disk: bytes/s read and written, and the CPU seconds of a GB in each direction."""

    read: float
    write: float
    read_cpu: float
    write_cpu: float

    def seconds(self, moved: tuple[float, float]) -> float:
        """Seconds that so many bytes read and written take, one after the other."""
        return moved[0] / self.read + moved[1] / self.write

    def cpu_seconds(self, moved: tuple[float, float]) -> float:
        """CPU seconds of a GB, of so many bytes read and written."""
        return (moved[0] * self.read_cpu + moved[1] * self.write_cpu) / sum(moved)


def rates(folder: Path) -> Rates:
    """Measures the disk of a folder with a file that is written and read as those of a run."""
    folder.mkdir(exist_ok=True)
    store = Store(folder, 1)
    store.places.reserve(FILE_BYTES, "master")
    data = np.frombuffer(np.random.default_rng(0).bytes(CHUNK), np.uint8)
    raw = Buffers().take(CHUNK)

    def timed(move: Any, end: Any) -> tuple[float, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        for at in range(0, FILE_BYTES, CHUNK):
            move(at)
        end()
        return FILE_BYTES / (time.perf_counter() - wall), (time.process_time() - cpu) / (FILE_BYTES / GB)

    store.write_file(data, 0)  # opens it
    write, write_cpu = timed(lambda at: store.write_file(data, at), store.file.sync)
    read, read_cpu = timed(lambda at: store.read_file(raw, at), lambda: None)
    store.close()
    shutil.rmtree(folder)
    return Rates(read, write, read_cpu, write_cpu)


def mean(all_rates: list[Rates]) -> Rates:
    """The mean of rates that were measured before and after a run."""
    return Rates(*(statistics.mean(x) for x in zip(*map(dataclasses.astuple, all_rates), strict=True)))


def interpreter() -> int:
    """Returns the resident bytes of a process that has imported surojax and started JAX."""
    code = "import surojax.train, jax, psutil; jax.numpy.zeros(1) + 1; print(psutil.Process().memory_info().rss)"
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def main() -> None:
    """Parse the command line and run; the exit code is 1 if something does not hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=64, help="layers of the model (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=1408, help="channels (default: %(default)s)")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 24], help="of 128 tokens, in a step (default: 1 24)")
    parser.add_argument("--steps", type=int, default=5, help="steps of each run (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="an empty folder on the disk (default: a temporary one)")
    a = parser.parse_args()
    sizes = {"model.hidden_size": a.hidden, "model.intermediate_size": 8 * a.hidden // 3}

    def fields(layers: int, rows: int, **others: Any) -> dict[str, Any]:
        own = {"model.num_hidden_layers": layers, "per_device_batch_size": rows, "max_steps": a.steps + 1}
        return {**sizes, **own, **others}

    well = True
    with tempfile.TemporaryDirectory() as temporary:
        folder = a.folder or Path(temporary)
        os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled")}
        disk = folder / "disk"
        disk.mkdir(parents=True)
        base = interpreter()
        print(f"{a.layers} layers of {a.hidden}; an idle process has {base / GIB:.2f} GiB resident", flush=True)
        whole: list[dict[str, Any]] = []
        for rows in a.rows:

            def in_memory(rows: int = rows) -> tuple[Run, float]:
                """A run of few layers, and the seconds of all layers' products."""
                few, twice = (run(folder / "memory", fields(n, rows)) for n in (FEW, 2 * FEW))
                return few, few.seconds + (a.layers - FEW) * (twice.seconds - few.seconds) / FEW

            few, before = in_memory()
            same = run(folder / "files", fields(FEW, rows, **in_files(disk))).records == few.records
            rates_before = rates(folder / "rates")
            full = run(folder / "files", fields(a.layers, rows, **in_files(disk)))
            rate = mean([rates_before, rates(folder / "rates")])
            after = in_memory()[1]
            products = (before + after) / 2
            on_disk = rate.seconds(full.moved)
            share = full.seconds / max(products, on_disk)
            cpu = rate.cpu_seconds(full.moved)
            well = well and same and share <= LIMIT and cpu <= CPU_LIMIT
            whole = whole or full.records
            print(
                f"{rows * 128} tokens: {full.seconds:.1f} s a step; products {products:.1f} s ({before:.1f} before, "
                f"{after:.1f} after), disk {on_disk:.1f} s ({full.moved[0] / GB:.1f} GB read at {rate.read / GB:.2f} "
                f"GB/s, {full.moved[1] / GB:.1f} written at {rate.write / GB:.2f}; {rate.read_cpu:.2f} and "
                f"{rate.write_cpu:.2f} CPU-s/GB, {cpu:.3f} of both): {share:.2f} of the limit, "
                f"{(full.resident - base) / GIB:.2f} GiB resident beyond an idle process; "
                f"{FEW} layers in memory and in files: {'the same records' if same else 'OTHER RECORDS'}",
                flush=True,
            )
        slots = in_files(disk, nvme_slots=2)
        records = killed(folder / "killed", fields(a.layers, a.rows[0], **slots), (1, a.steps - 2), a.steps)
        same = records == [r for r in whole if r["log"] == "step"][: a.steps]
        print(f"killed twice: {'the same records' if same else 'OTHER RECORDS'}")
    sys.exit(not (well and same))


if __name__ == "__main__":
    main()
