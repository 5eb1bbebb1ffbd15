"""Kill a run at random moments, start it again each time, and compare its losses with those of a run that was not.

    python benchmarks/kills.py [--kills 20] [--seed 0] [--folder FOLDER]

A Llama small enough for two CPU cores trains with master weights and optimizer state in a file (`nvme_path`), a
checkpoint every second step. The process gets SIGKILL at a random moment of the seconds after it has compiled: while it
restores, fills the file, computes gradients, updates layers, or writes a checkpoint; every fifth time while it starts.
The last start is left to end. A line per kill says what the file was at; exit code 1: a kill within an update was not
said at the next start, or the records of metrics.jsonl are not those of the run in memory, to the bit.
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
SECONDS = 10.0  # after compiling within which a kill falls
COMPILED = "compiled in"
TIMINGS = ("tokens_per_second", "duration_ms", "mfu")
SAID = "the last run ended within the update"


def get_config() -> Config:
    """Of both runs; a config file for `--config`."""
    c = default_config()
    c.model.vocab_size, c.model.hidden_size, c.model.intermediate_size = 320, 128, 384
    c.model.num_hidden_layers, c.model.num_attention_heads, c.model.num_key_value_heads = 6, 2, 1
    c.model_dtype, c.sequence_len, c.per_device_batch_size = "float32", 32, 4
    c.max_steps, c.learning_rate, c.warmup_steps = STEPS, 1e-2, 5
    c.eval_steps, c.eval_batches, c.save_steps, c.save_total_limit = 50, 2, 2, 3
    c.sample_tokens = 0
    return c


def start(output_dir: Path, **fields: Any) -> subprocess.Popen:
    """A `surojax.train` with these fields beside `get_config`'s."""
    options = [f"--config.{name}={value}" for name, value in {"output_dir": output_dir, **fields}.items()]
    command = [sys.executable, "-m", "surojax.train", "--config", __file__, *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def records(output_dir: Path) -> list[dict[str, Any]]:
    """What metrics.jsonl says, but for times."""
    return [{k: v for k, v in r.items() if k not in TIMINGS} for r in read_metrics(output_dir / METRICS_FILE)]


def state_of(disk: Path) -> dict[str, Any]:
    """What the file was at when the last process ended."""
    marker = disk / nvme.MARKER
    return json.loads(marker.read_text()) if marker.exists() else {"step": 0, "state": "none"}


def lines_until(process: subprocess.Popen, text: str) -> Iterator[str]:
    """What a process prints, up to the first line with this in it."""
    assert process.stdout
    for line in process.stdout:
        yield line
        if text in line:
            return


def run(folder: Path, kills: int, seed: int) -> bool:
    """Whether every start said what it had to and the losses are the same."""
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder / "compiled")  # starts that only compile would reach nothing
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    disk, whole, killed = (folder / name for name in ("disk", "whole", "killed"))
    disk.mkdir(parents=True)
    on_disk = {"offload_optimizer": "nvme", "offload_master": "nvme", "nvme_path": disk}
    process = start(whole)
    text = process.communicate()[0]
    assert process.returncode == 0, text
    rng, good, within, done = random.Random(seed), True, 0, 0
    for i in range(kills + 1):
        before, last_written, process = state_of(disk), written_at(disk), start(killed, **on_disk)
        if i == kills:
            text, moment = process.communicate()[0], "left to end"
        else:
            text, moment = killed_at(process, rng.uniform(0, SECONDS), while_starting=i % 5 == 4)
        said, newest = SAID in text, checkpoint.find(killed / checkpoint.FOLDER)
        updated = written_at(disk) != last_written
        # A process that was killed before it looked at the file has said nothing yet, and changed nothing.
        looked = said or updated or "continuing from" in text
        sound = said == (before["state"] == "updating") or not looked
        good = good and sound
        print(f"{i:3} {moment}: file {state_of(disk)}, newest checkpoint {newest and newest.name}, "
              f"{'said so' if said else '-'}: {'as it should' if sound else 'WRONG'}", flush=True)  # fmt: skip
        if process.returncode == 0:
            break
        done += 1
        within += updated and state_of(disk)["state"] == "updating"
    same = records(killed) == records(whole)
    print(f"{done} kills, {within} of them within an update; {len(records(whole))} records, "
          f"{'the same to the bit' if same else 'NOT the same'}")  # fmt: skip
    return good and same


def killed_at(process: subprocess.Popen, after: float, *, while_starting: bool) -> tuple[str, str]:
    """(what a process printed that is killed so many seconds after it has started or compiled, when that was)."""
    text = "" if while_starting else "".join(lines_until(process, COMPILED))
    time.sleep(after)
    process.kill()
    text += process.communicate()[0]
    return text, f"killed {after:3.1f} s after {'its start' if while_starting else 'compiling'}"


def written_at(disk: Path) -> int:
    """When the marker of the file was last written, in ns; 0: never."""
    marker = disk / nvme.MARKER
    return marker.stat().st_mtime_ns if marker.exists() else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where the runs are kept (default: a temporary folder)")
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        sys.exit(not run(a.folder or Path(temporary) / "kills", a.kills, a.seed))


if __name__ == "__main__":
    main()
