"""Kills a run at random moments, restarts it each time, and compares its losses with those of an uninterrupted run.

    python benchmarks/kills.py [--kills 20] [--seed 0] [--folder FOLDER]

A Llama small enough for two CPU cores trains with master weights and optimizer state in a file (`nvme_path`) and
writes a checkpoint every second step. The process gets SIGKILL at a random moment in the first seconds after it has
compiled: while it restores, fills the file, computes gradients, updates layers, or writes a checkpoint. Every fifth
kill is during the start instead. The last start is not killed. One line per kill says in which state the file was.

Exit code 1: the run did not report an interrupted update at the next start, or its records in metrics.jsonl are not
bit-exact with those of an uninterrupted run in memory.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from surojax import read_metrics
from surojax.config.fields import Config, default_config
from surojax.memory import nvme
from surojax.run import checkpoint
from surojax.run.metrics import METRICS_FILE

STEPS = 300
SECONDS = 10.0  # a kill is at most this long after the compilation
COMPILED = "compiled in"  # printed by a run that has compiled
TIMINGS = ("tokens_per_second", "duration_ms", "data_wait_ms", "mfu")
SAID = "the last run ended within the update"  # printed by a run whose predecessor was killed during an update


def get_config() -> Config:
    """Returns the config of both runs; this file is their `--config`."""
    c = default_config()
    c.model.vocab_size = 320
    c.model.hidden_size = 128
    c.model.intermediate_size = 384
    c.model.num_hidden_layers = 6
    c.model.num_attention_heads = 2
    c.model.num_key_value_heads = 1
    c.model_dtype = "float32"
    c.sequence_len = 32
    c.per_device_batch_size = 4
    c.max_steps = STEPS
    c.learning_rate = 1e-2
    c.warmup_steps = 5
    c.eval_steps = 50
    c.eval_batches = 2
    c.save_steps = 2
    c.save_total_limit = 3
    c.sample_tokens = 0
    return c


def start(output_dir: Path, **fields: Any) -> subprocess.Popen:
    """Starts a `surojax.train` with the config of `get_config`, changed by `fields`."""
    options = [f"--config.{name}={value}" for name, value in {"output_dir": output_dir, **fields}.items()]
    command = [sys.executable, "-m", "surojax.train", "--config", __file__, *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def records(output_dir: Path) -> list[dict[str, Any]]:
    """Returns the records of metrics.jsonl without the times."""
    return [{k: v for k, v in r.items() if k not in TIMINGS} for r in read_metrics(output_dir / METRICS_FILE)]


def state_of(disk: Path) -> dict[str, Any]:
    """Returns what the file's marker says: the last step, and whether its update was complete."""
    marker = disk / nvme.MARKER
    return json.loads(marker.read_text()) if marker.exists() else {"step": 0, "state": "none"}


def lines_until(process: subprocess.Popen, text: str) -> Iterator[str]:
    """Yields the lines that a process prints, up to the first one that contains `text`."""
    assert process.stdout
    for line in process.stdout:
        yield line
        if text in line:
            return


def run(folder: Path, kills: int, seed: int) -> bool:
    """Returns whether every start reported an interrupted update if there was one, and the losses are bit-exact."""
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder / "compiled")  # so that a restart gets further than compiling
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    disk = folder / "disk"
    uninterrupted = folder / "whole"
    killed = folder / "killed"
    disk.mkdir(parents=True)
    on_disk = {"offload_optimizer": "nvme", "offload_master": "nvme", "nvme_path": disk}
    process = start(uninterrupted)
    text = process.communicate()[0]
    assert process.returncode == 0, text
    rng = random.Random(seed)
    all_sound = True
    kills_done = 0
    kills_in_update = 0
    for i in range(kills + 1):
        before = state_of(disk)
        last_written = written_at(disk)
        process = start(killed, **on_disk)
        if i == kills:
            text = process.communicate()[0]
            moment = "left to end"
        else:
            text, moment = killed_at(process, rng.uniform(0, SECONDS), while_starting=i % 5 == 4)
        said = SAID in text
        newest = checkpoint.find(killed / checkpoint.FOLDER)
        updated = written_at(disk) != last_written
        # A process that was killed before it read the marker could not report anything, and changed nothing.
        looked = said or updated or "continuing from" in text
        sound = said == (before["state"] == "updating") or not looked
        all_sound = all_sound and sound
        print(f"{i:3} {moment}: file {state_of(disk)}, newest checkpoint {newest and newest.name}, "
              f"{'said so' if said else '-'}: {'as it should' if sound else 'WRONG'}", flush=True)  # fmt: skip
        if process.returncode == 0:
            break
        kills_done += 1
        kills_in_update += updated and state_of(disk)["state"] == "updating"
    same = records(killed) == records(uninterrupted)
    print(f"{kills_done} kills, {kills_in_update} of them within an update; {len(records(uninterrupted))} records, "
          f"{'the same to the bit' if same else 'NOT the same'}")  # fmt: skip
    return all_sound and same


def killed_at(process: subprocess.Popen, after: float, *, while_starting: bool) -> tuple[str, str]:
    """Kills a process; returns (what it printed, the moment of the kill in words).

    after: seconds after the end of the compilation, or after the start if `while_starting`.
    """
    text = "" if while_starting else "".join(lines_until(process, COMPILED))
    time.sleep(after)
    process.kill()
    text += process.communicate()[0]
    return text, f"killed {after:3.1f} s after {'its start' if while_starting else 'compiling'}"


def written_at(disk: Path) -> int:
    """Returns the time at which the file's marker was last written, in ns; 0 if never."""
    marker = disk / nvme.MARKER
    return marker.stat().st_mtime_ns if marker.exists() else 0


def main() -> None:
    """Parse the command line and run; the exit code is 1 if a kill did damage."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20, help="number of kills (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random moments (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where the runs are kept (default: a temporary folder)")
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        sys.exit(not run(a.folder or Path(temporary) / "kills", a.kills, a.seed))


if __name__ == "__main__":
    main()
