"""Runs over several processes: the same numbers as one process with as many devices, and what happens when one fails.

All run under the launcher, over gloo on this machine. One process under the launcher uses gloo too, so that its sums
have the order that the others' have; without it, XLA's sums within a process have another order (docs/clusters.md).
"""

import contextlib
import dataclasses
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from ipaddress import ip_address
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
import small

from surojax import ConfigError, read_metrics
from surojax.cluster import watch
from surojax.cluster.early import STOPPED
from surojax.cluster.watch import Watch
from surojax.data.batches import training_batches
from surojax.data.cache import Corpus
from surojax.data.samples import Windows
from surojax.errors import REFUSED
from surojax.parallel.feed import Feed
from surojax.run import nonfinite, on_disk, shared
from surojax.run.metrics import TIMINGS
from surojax.run.stored import StoredMaster

HERE = Path(__file__).parent
HEARTBEAT_S = 5
NO_EVALUATION = "--config.eval_steps=0"  # a program less to compile, in every process
CONFIG = """
from surojax import default_config

def get_config():
    c = default_config()
    c.data = {data!r}
    c.model.vocab_size, c.model.hidden_size, c.model.intermediate_size = 320, 32, 64
    c.model.num_hidden_layers, c.model.num_attention_heads, c.model.num_key_value_heads = 2, 4, 2
    c.model_dtype, c.sequence_len, c.per_device_batch_size = "float32", 32, 2
    c.max_steps, c.learning_rate, c.warmup_steps = 24, 1e-2, 2
    c.eval_steps, c.eval_batches, c.save_steps, c.save_total_limit = 12, 2, 4, 99
    c.sample_tokens, c.gpus, c.zero_level, c.offload_optimizer, c.log_steps = 0, 0, 3, True, 1
    return c
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("processes")
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefghij"), rng.integers(2, 8))) for _ in range(60)]
    (folder / "text.txt").write_text("\n".join(" ".join(rng.choice(words, 8)) for _ in range(900)))
    (folder / "config.py").write_text(CONFIG.format(data=str(folder / "text.txt")))
    return folder / "config.py"


class Run:
    """A launched run, whose lines can be waited for. options: of the launcher."""

    def __init__(self, options: str, command: list[str]):
        launch = [sys.executable, "-m", "surojax.launch", *options.split(), "--", sys.executable, *command]
        self.process = subprocess.Popen(launch, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.lines: list[str] = []

    def until(self, text: str) -> str:
        """Reads lines up to the first one with this text, and returns it."""
        assert self.process.stdout
        for line in self.process.stdout:
            self.lines.append(line)
            if re.search(text, line):
                return line
        raise AssertionError("".join(self.lines))

    def send(self, process_id: int, number: int) -> int:
        """Sends a signal to one of the processes; returns its pid."""
        for child in psutil.Process(self.process.pid).children():
            words = child.cmdline()
            if words[words.index("--process_id") + 1] == str(process_id):
                child.send_signal(number)
                return child.pid
        raise AssertionError(f"no process {process_id}")

    def end(self) -> tuple[int, str]:
        """(exit code, all lines)."""
        text = self.process.communicate(timeout=400)[0]
        return self.process.returncode, "".join(self.lines) + text


def listening(run: Run) -> set[str]:
    """The addresses on which the coordinator of a run, process 0, listens."""
    (first,) = [p for p in psutil.Process(run.process.pid).children() if p.cmdline()[-1] == "0"]
    words = first.cmdline()
    port = int(words[words.index("--coordinator") + 1].rpartition(":")[2])
    found = [c.laddr for c in first.net_connections() if c.status == psutil.CONN_LISTEN]
    return {address.ip.removeprefix("::ffff:") for address in found if address.port == port}


def training(config: Path, output_dir: Path, options: str, *more: str) -> Run:
    settings = ["--config", str(config), f"--config.output_dir={output_dir}", *more]
    return Run(options, ["-m", "surojax.train", *settings])


def records(folder: Path) -> list[dict]:
    """What metrics.jsonl says, but for timings."""
    return [{k: v for k, v in r.items() if k not in TIMINGS} for r in read_metrics(folder / "metrics.jsonl")]


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory) -> Path:
    """The output folder of a run of one process with 4 devices."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    code, text = training(config, folder, "-n 1 --devices-per-process 4").end()
    assert code == 0, text
    return folder


@pytest.mark.full
def test_every_placement_equals_one_process_to_the_bit():
    """ZeRO-3 with offloaded state, HSDP, CP with TP, PP; and `psum_scatter` of 8 MiB equals numpy's float64 sum."""
    found = []
    for n in (1, 2):
        run = Run(f"-n {n} --devices-per-process {4 // n}", [str(HERE / "many_processes.py")])
        found.append(json.loads(run.until(r"^\[0\] \{").removeprefix("[0] ")))
        assert run.end()[0] == 0
    one, two = found
    assert one == two and len(two) == 5
    assert two["psum_scatter"] < 1e-6  # one rounding of 3 sums in float32, relative to the largest


def test_all_processes_compile_for_the_gpu_with_the_least_memory():
    """A step of 19.8 GiB fits 24 GiB, but not what one process has; GiB that XLA hands out are those of 20 in both."""
    run = Run("-n 2 --devices-per-process 1", [str(HERE / "many_processes.py"), "--limits"])
    one_has_less, equal, one_knows_none = json.loads(run.until(r"^\[0\] \[").removeprefix("[0] "))
    assert run.end()[0] == 0
    first, second = one_has_less
    assert len(first) == 2 and first[1] < first[0] < 20
    assert first == pytest.approx(second, abs=0.01 * 24)  # whole percents
    assert equal[0] == equal[1] and len(equal[0]) == 1
    assert one_knows_none == [[0.0], [0.0]]


@pytest.mark.full
def test_four_processes_that_are_stopped_and_two_with_state_in_files_that_are_killed(whole, config, tmp_path):
    """SIGUSR1 to one of four saves on all: JAX hears of it as SIGTERM. Two continue with master weights and optimizer
    state in a file of each process; the first is killed, they continue from the last whole checkpoint, and end with the
    bits of one process."""
    folder = tmp_path / "run"
    run = training(config, folder, "-n 4 --devices-per-process 1", "--heartbeat", "20")
    run.until(r"^\[0\] step  6/24")
    run.send(2, signal.SIGUSR1)
    code, text = run.end()
    assert code == STOPPED and "surojax.launch: stopped: start again" in text, text
    (stopped,) = re.findall(r"stopped by SIGTERM after step (\d+) of 24", text)
    (again,) = re.findall(r"resume: (.*)\n", text)
    assert shlex.split(again) == ["surojax", "launch", *run.process.args[3:]]  # what starts all of them
    assert "compilation cache: not used" in text
    of_four = StoredMaster(on_disk.find(folder))
    assert of_four.path.name == stopped
    name = "blocks.attention.wq"
    assert of_four.read(name, 0).shape == of_four.read(name, 1).shape  # one process reads it, against its checksum

    (tmp_path / "files").mkdir()
    in_files = [f"--config.offload_{name}=nvme" for name in ("master", "optimizer")]
    in_files.append(f"--config.nvme_path={tmp_path / 'files'}")
    run = training(config, folder, "-n 2 --devices-per-process 2 --restarts 1", *in_files)
    run.until(rf"continuing from {folder}/checkpoints/{stopped}\n")
    run.until(r"^\[0\] step 18/24")
    assert listening(run) and all(ip_address(ip).is_loopback for ip in listening(run))
    run.send(0, signal.SIGKILL)
    assert "process 0 was the first to end (killed by SIGKILL)" in run.until("was the first to end")
    code, text = run.end()
    assert code == 0 and re.search(rf"continuing from {folder}/checkpoints/(16|20)\n", text), text
    assert {p.name for p in (tmp_path / "files").iterdir()} == {"process-0", "process-1"}
    assert records(folder) == records(whole)
    ours, theirs = (StoredMaster(on_disk.find(x)) for x in (folder, whole))
    assert ours.meta["checksums"] == theirs.meta["checksums"]  # of master weights and moments
    for l in range(2):
        np.testing.assert_array_equal(ours.read(name, l), theirs.read(name, l))


@pytest.mark.full
def test_a_process_that_hangs_is_named_and_one_continues_and_then_two(whole, config, tmp_path):
    """One of two hangs: it is named, by the other after the heartbeat and by the supervisor. With `--elastic` one
    continues, with twice the microbatches: the same samples, other sums. Then two again from its checkpoint."""
    folder = tmp_path / "run"
    heartbeat = ("--heartbeat", str(HEARTBEAT_S))
    run = training(config, folder, "-n 2 --devices-per-process 2 --restarts 1 --elastic", *heartbeat)
    run.until(r"^\[0\] step  6/24")
    stopped = run.send(1, signal.SIGSTOP)
    started = time.monotonic()
    run.until(rf"process 1 does not answer: it is stopped \(process {stopped}\)")
    assert time.monotonic() - started < HEARTBEAT_S + 10
    named = rf"\] surojax: error: process 1 \(.*\) has not answered for {HEARTBEAT_S} s: it hangs"
    assert re.search(named, "".join(run.lines)), run.lines
    run.until("start 2 of 2, with 1 process\n")
    assert not psutil.pid_exists(stopped)
    code, text = run.end()
    assert code == 0 and re.search(r"continuing from .*checkpoints/(4|8)\n", text), text
    steps = [[r["loss"] for r in records(x) if r["log"] == "step"] for x in (folder, whole)]
    differences = [abs(a - b) for a, b in zip(*steps, strict=True)]
    print("largest difference of a loss:", max(differences))
    assert max(differences[:4]) == 0  # the steps of the checkpoint
    assert max(differences) < 1e-4  # float32: 24 steps of 1e-7 each, amplified by training

    more = ("--config.max_steps=25", "--config.gradient_accumulation_steps=1")
    code, text = training(config, folder, "-n 2 --devices-per-process 2", *more).end()
    assert code == 0 and records(folder)[-2]["step"] == 25, text


BREAKS = """
import dataclasses
import jax.numpy as jnp
from surojax.parallel.collectives import device_number
from surojax.step import verbs

plain = verbs.recomputing_segment

def breaks(segment):
    segment = plain(segment)

    def block_backward(*arguments):
        dw, dx_BSD, seen = segment.block_backward(*arguments)
        return dw, jnp.where(device_number("dp_shard")[0] == 1, jnp.full_like(dx_BSD, jnp.nan), dx_BSD), seen

    return dataclasses.replace(segment, block_backward=block_backward)

verbs.recomputing_segment = breaks
"""


@pytest.mark.full
def test_a_nan_names_the_process_in_whose_part_it_began(config, tmp_path):
    """A NaN of its backward pass leaves the loss finite; sums make it everyone's in the same step, and all end."""
    broken = tmp_path / "config.py"
    broken.write_text(BREAKS + config.read_text())
    code, text = training(broken, tmp_path / "run", "-n 2 --devices-per-process 1", NO_EVALUATION).end()
    assert code == 1
    expected = (
        r"surojax.train: error: step 1: loss \d\.\d+, gradient norm nan; .*\. It began in the gradients of process 1\. "
    )
    assert re.search(expected + "Try a lower", text), text


STOPS_BEFORE = """
import jax, os, signal, sys

connects = jax.distributed.initialize

def stops_before(*arguments, **options):
    if sys.argv[-2:] == ["--process_id", "0"]:
        os.kill(os.getpid(), signal.SIGTERM)
    connects(*arguments, **options)

jax.distributed.initialize = stops_before
"""


@pytest.mark.full
def test_sigterm_to_one_process_while_all_connect_stops_all_after_the_first_step(config, tmp_path):
    """The other one, which JAX would end with a stack trace if this one left, hears of it."""
    folder = tmp_path / "run"
    asked = tmp_path / "config.py"
    asked.write_text(STOPS_BEFORE + config.read_text())
    code, text = training(asked, folder, "-n 2 --devices-per-process 1", NO_EVALUATION).end()
    assert code == STOPPED and on_disk.find(folder).name == "1", text


WAITS = """
import argparse, os, time
from surojax.cluster import hosts
from surojax.cluster.watch import Watch, failing_together

parser = argparse.ArgumentParser()
hosts.add_flags(parser)
args = parser.parse_args()
place = hosts.detect_flags(args, os.environ)
names = hosts.connect(place, os.environ)
with failing_together(Watch(names, place.process_id, args.heartbeat)):
    print("connected to", place.coordinator, flush=True)
    time.sleep(8)
"""
STRANGER = """
import sys
from jax._src.lib import _jax
client = _jax.get_distributed_runtime_client(sys.argv[1], 1, init_timeout=2)
client.connect()
"""
CERTIFICATE = """
openssl req -x509 -newkey rsa:2048 -nodes -days 2 -keyout ca.key -out ca.pem -subj /CN=runs
openssl req -newkey rsa:2048 -nodes -keyout run.key -out run.csr -subj /CN=run
openssl x509 -req -in run.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -out run.pem -extfile names
"""


@pytest.mark.full
def test_certificates_keep_strangers_out_of_jaxs_coordinator(tmp_path, monkeypatch):
    """A client that says it is process 1, which without them ends the run with SIGABRT, is refused."""
    if shutil.which("openssl") is None:
        pytest.skip("certificates need the command openssl")
    (tmp_path / "names").write_text("subjectAltName=IP:127.0.0.1")
    subprocess.run(["bash", "-ec", CERTIFICATE], cwd=tmp_path, check=True, capture_output=True)
    stranger = [sys.executable, "-c", STRANGER]
    alone = dict(os.environ)
    for name, file in (("CERT", "run.pem"), ("KEY", "run.key"), ("CA", "ca.pem")):
        monkeypatch.setenv(f"JAX_MTLS_{name}_FILE", str(tmp_path / file))
    run = Run("-n 2 --devices-per-process 1", ["-c", WAITS])
    address = run.until(r"^\[0\] connected to").split()[-1]
    refused = subprocess.run([*stranger, address], env=alone, capture_output=True, text=True, timeout=60)
    assert refused.returncode != 0
    code, text = run.end()
    assert code == 0, text


FULL_DISK = """
import shutil, sys
from types import SimpleNamespace

free = [2**40, 2**40, 0]  # at the start, at the first checkpoint, at the second one
if sys.argv[-2:] == ["--process_id", "1"]:
    shutil.disk_usage = lambda _: SimpleNamespace(free=free.pop(0))
"""


@pytest.mark.full
def test_a_full_disk_of_one_process_ends_all_with_its_message(config, tmp_path):
    """The last checkpoint is good: a start with room continues from it."""
    folder = tmp_path / "run"
    full = tmp_path / "config.py"
    full.write_text(FULL_DISK + config.read_text())
    code, text = training(full, folder, "-n 2 --devices-per-process 1", NO_EVALUATION).end()
    assert code == 1
    message = "no room for the checkpoint of step 8 in "
    assert f"[1] surojax.train: error: {message}" in text, text
    assert re.search(rf"\[0\] surojax: error: process 1 \(.*\) ended the run: surojax.train: error: {message}", text), (
        text
    )
    on_disk.read_meta(folder / "checkpoints/4")
    assert on_disk.find(folder).name == "4"


@pytest.mark.full
def test_on_a_local_ray_cluster(config, tmp_path, monkeypatch):
    """Two workers of Ray Train, on this machine: a run that is stopped ends with 75, and the same command continues."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'surojax[ray]'")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=1")
    folder = tmp_path / "run"
    stops = ("--config.max_steps=400", "--max-minutes", "0.0001")
    code, text = training(config, folder, "-n 2 --ray", *stops).end()
    assert code == STOPPED and "surojax.launch: stopped: start again" in text, text
    stopped = int(on_disk.find(folder).name)
    code, text = training(config, folder, "-n 2 --ray", f"--config.max_steps={stopped + 2}").end()
    assert code == 0 and "processes: 2 on 1 host by flags, 1 devices each" in text, text
    assert "continuing from" in text and on_disk.find(folder).name == str(stopped + 2)


# -- Two hosts ----------------------------------------------------------------------------------------------------


@pytest.fixture
def two_hosts():
    """Names of two network namespaces with the addresses 10.77.0.1 and 10.77.0.2, connected by a link."""

    def ip(*words: str) -> bool:
        return subprocess.run(["ip", *words], capture_output=True).returncode == 0

    if shutil.which("ip") is None:
        pytest.skip("network namespaces need the command ip")
    names = [f"surojax{os.getpid()}{x}" for x in "ab"]
    links = [f"sj{os.getpid() % 10**6}{x}" for x in "ab"]
    try:
        made = all([ip("netns", "add", name) for name in names])
        made = made and ip("link", "add", links[0], "type", "veth", "peer", "name", links[1])
        for i, (name, link) in enumerate(zip(names, links, strict=True)):
            made = made and ip("link", "set", link, "netns", name)
            made = made and ip("-n", name, "address", "add", f"10.77.0.{i + 1}/24", "dev", link)
            made = made and ip("-n", name, "link", "set", link, "up") and ip("-n", name, "link", "set", "lo", "up")
        # gloo listens where the host's own name leads; `ip netns exec` puts these files into /etc.
        for i, name in enumerate(names):
            with contextlib.suppress(OSError):
                folder = Path("/etc/netns") / name
                folder.mkdir(parents=True)
                (folder / "hosts").write_text(f"127.0.0.1 localhost\n10.77.0.{i + 1} {socket.gethostname()}\n")
        if not made or not all((Path("/etc/netns") / name / "hosts").exists() for name in names):
            pytest.skip("this machine does not allow network namespaces")
        yield names, links
    finally:
        for name in names:
            ip("netns", "delete", name)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)


@pytest.mark.full
def test_two_hosts_whose_link_is_cut(two_hosts, config, tmp_path):
    """Both sides end within a minute and name the other one; when the link is back, the same command continues."""
    names, links = two_hosts
    folder = tmp_path / "run"
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}

    def both() -> list[subprocess.Popen]:
        place = ["--coordinator", "10.77.0.1:8476", "--num_processes", "2", "--heartbeat", "5"]
        train = [sys.executable, "-u", "-m", "surojax.train", "--config", str(config)]
        train += [f"--config.output_dir={folder}", "--config.max_steps=400"]
        return [
            subprocess.Popen(
                ["ip", "netns", "exec", name, *train, *place, "--process_id", str(i)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for i, name in enumerate(names)
        ]

    processes = both()
    assert processes[0].stdout
    lines = []
    for line in processes[0].stdout:
        lines.append(line)
        if "step  12/400" in line:
            break
    assert lines and "step  12/400" in lines[-1], "".join(lines)
    subprocess.run(["ip", "-n", names[1], "link", "set", links[1], "down"], check=True)
    started = time.monotonic()
    texts = [process.communicate(timeout=90)[0] for process in processes]
    assert time.monotonic() - started < 60
    assert [process.returncode for process in processes] == [1, 1], texts
    for other, text in zip((1, 0), texts, strict=True):
        assert re.search(rf"process {other} \(.*\) has not answered for 5 s|connection to another process", text), text

    subprocess.run(["ip", "-n", names[1], "link", "set", links[1], "up"], check=True)
    processes = both()
    assert processes[0].stdout
    text = ""
    for line in processes[0].stdout:
        text += line
        if "continuing from" in line:
            break
    for process in processes:
        process.kill()
        process.communicate()
    assert re.search(r"continuing from .*checkpoints/(4|8|12)\n", text), text


# -- One process -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [[0, 1], [2, 5], [3]])
def test_the_order_of_samples_does_not_depend_on_who_reads_them(rows):
    """Rows of B are the same rows of the whole batch, also from a sample on where a run continues."""
    tokens = np.arange(3000, dtype=np.uint16)
    samples = Windows(Corpus(tokens, 3000, "fingerprint", "name", np.array([0, 3000])), 8)
    options = {"batch_size": 6, "accumulation": 2, "seed": 3, "start_sample": 24, "prefetch": 0}
    whole = training_batches(samples, **options)
    part = training_batches(samples, **options, rows=np.array(rows))
    for _ in range(40):  # more than an epoch
        expected, found = next(whole), next(part)
        assert found["inputs"].shape == (2, len(rows), 8)
        for name in expected:
            np.testing.assert_array_equal(found[name], expected[name][:, rows])


def test_a_feed_of_one_process_is_all_of_the_batch():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("x",))
    feed = Feed(jax.NamedSharding(mesh, jax.P(None, "x")), 8)
    assert feed.rows is None
    x = np.arange(2 * 8 * 3).reshape(2, 8, 3)
    (found,) = feed.put([x])
    np.testing.assert_array_equal(np.asarray(found), x)
    feed.rows = np.arange(8)  # as with several processes
    (found,) = feed.put([x])
    np.testing.assert_array_equal(np.asarray(found), x)


def test_a_folder_that_others_do_not_see_is_refused(tmp_path, monkeypatch):
    """And other settings; nothing is left in the folder."""
    monkeypatch.setattr(shared.jax, "process_count", lambda: 2)
    monkeypatch.setattr(shared, "SECONDS", 0.1)
    monkeypatch.setattr(shared.multihost_utils, "sync_global_devices", lambda _: None)
    others: dict[str, int] = {"token": 7}

    def gather(mine: np.ndarray) -> np.ndarray:
        """What both processes have said; the other one has written its token."""
        return np.stack([mine, np.array([7, others.get("settings", mine[1])], np.uint32)])

    monkeypatch.setattr(shared.multihost_utils, "process_allgather", gather)
    with pytest.raises(ConfigError, match=r"^output_dir: .* where process 0 does not see what process 1 writes; use"):
        shared.check_shared(tmp_path / "run", "settings")
    assert list((tmp_path / "run").iterdir()) == []
    (tmp_path / "run/.token-of-process-1").write_text("7")
    shared.check_shared(tmp_path / "run", "settings")
    others["settings"] = 1
    with pytest.raises(ConfigError, match=r"^processes: expected the same settings in all, got different ones"):
        shared.check_shared(tmp_path / "run", "settings")


LATE = {"overlap_update": True, "shard_gradients": True, "offload_grads": True}
STAGES = {"pp_size": 2, "config": dataclasses.replace(small.CONFIG, num_hidden_layers=2)}


@pytest.mark.parametrize("placed", [{"shard_gradients": True}, LATE, STAGES])
@pytest.mark.full
def test_the_metrics_say_which_devices_had_finite_values(placed):
    """And no other bit of a step depends on it. One token has an embedding of NaN: a row of device 1 has that token.
    A NaN in a stage's part is in the next stage's too, and in gradients of all."""
    batch_size = 2 if "pp_size" in placed else 4
    inputs, labels = small.tokens(1, batch_size, 16)
    inputs[inputs == 63] = 0
    plain = small.Small(2, **placed).train([(inputs, labels)])
    run = small.Small(2, locates_nonfinite=True, **placed)
    state = run.state
    _, metrics = run.step(jax.tree.map(jnp.copy, state), *run.put((inputs, labels)))
    assert [(float(metrics["loss"]), float(metrics["grad_norm"]))] == plain
    assert metrics["finite"].tolist() == [[True, True], [True, True]]

    outer = state.weights["outer"]
    broken = outer | {"embed": outer["embed"].at[63].set(jnp.nan)}
    inputs[0, -1, 3] = 63
    state = state._replace(weights=state.weights | {"outer": broken})
    _, metrics = run.step(state, *run.put((inputs, labels)))
    assert np.isnan(metrics["loss"])
    well = "pp_size" not in placed
    assert metrics["finite"].tolist() == [[well, well], [False, False]]


@pytest.mark.parametrize(
    "activations, gradients, said",
    [
        ([True, False, True], [False] * 3, "It began in the activations of process 1"),
        ([True] * 3, [True, True, False], "It began in the gradients of process 2"),
        ([False, True, False], [False] * 3, "It began in the activations of processes 0, 2, which share values"),
        ([False] * 3, [False] * 3, "The activations of all .* it began in what they share, as weights, or in activa"),
        (
            [True] * 3,
            [True] * 3,
            "It began in gradients of weights, or in a sum over the processes: activations and the ",
        ),
    ],
)
def test_where_a_nan_began_in_words(monkeypatch, activations, gradients, said):
    """From what each of three processes, with two devices each, tells the others."""
    found = np.array([activations, gradients]).T
    own = np.array([[True, True], found[0]])  # process 0 has a device that is well, and one that is not

    def gather(mine: np.ndarray) -> np.ndarray:
        np.testing.assert_array_equal(mine, found[0])
        return found

    monkeypatch.setattr(nonfinite.multihost_utils, "process_allgather", gather)
    array = jax.device_put(own, jax.NamedSharding(jax.sharding.Mesh(jax.devices()[:2], "x"), jax.P("x")))
    with pytest.raises(nonfinite.NonFiniteLoss, match=rf"there is no checkpoint yet\. {said}.*\. Try a lower"):
        nonfinite.check_finite(3, float("nan"), 1.0, None, array)


class Coordinator:
    """The key-value store of `jax.distributed`, as the watch uses it, for a few processes of which some are mute."""

    def __init__(self):
        self.values: dict[str, str] = {}
        self.answers = True

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        self._answer()
        self.values[key] = value

    def key_value_dir_get(self, folder: str) -> list[tuple[str, str]]:
        self._answer()
        return [(k, v) for k, v in self.values.items() if k.startswith(folder)]

    def _answer(self) -> None:
        if not self.answers:
            raise jax.errors.JaxRuntimeError("UNAVAILABLE")


def watched(monkeypatch, disturb) -> str:
    """What the watch of process 1 of 3 says when it ends its process, after disturb(coordinator)."""
    coordinator = Coordinator()
    left = threading.Event()
    said = []

    def leave(text: str, code: int = 1) -> None:
        said.append(text if code == 1 else f"{text} (exit code {code})")
        left.set()

    monkeypatch.setattr(watch, "_exit", leave)
    monkeypatch.setattr(watch, "PERIOD_S", 0.02)
    monkeypatch.setattr(watch.distributed.global_state, "client", coordinator)
    alive = threading.Event()

    def others() -> None:
        count = 0
        while not alive.wait(0.02):
            count += 1
            for i in (0, 2):
                if f"stopped/{i}" not in coordinator.values:
                    coordinator.values[f"surojax/alive/{i}"] = str(count)

    thread = threading.Thread(target=others)
    thread.start()
    watching = Watch(["a", "b", "c"], 1, heartbeat_s=1.5)
    time.sleep(0.3)
    assert not said  # all is well
    disturb(coordinator)
    found = left.wait(3.5)
    watching._ended.set()
    alive.set()
    thread.join()
    return said[0] if found else ""


@pytest.mark.full
def test_the_watch_names_who_is_silent_or_failed(monkeypatch):
    silent = watched(monkeypatch, lambda c: c.values.update({"stopped/2": ""}))
    assert silent.startswith("surojax: error: process 2 (c) has not answered for 1.5 s: it hangs")
    failed = watched(monkeypatch, lambda c: c.values.update({"surojax/failed/2": f"{REFUSED} no such field"}))
    assert failed == f"surojax: error: process 2 (c) ended the run: no such field (exit code {REFUSED})"
    gone = watched(monkeypatch, lambda c: setattr(c, "answers", False))
    assert gone.startswith("surojax: error: process 0 (a) has not answered")
    finished = watched(monkeypatch, lambda c: c.values.update({"stopped/2": "", "surojax/done/2": ""}))
    assert finished == ""
