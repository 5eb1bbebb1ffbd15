"""The estimate of memory against what XLA plans for the real step, and that the advice is true."""

import math
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import psutil
import pytest
from small import quick_at

from surojax.assembly.from_config import from_config
from surojax.config import checks, flags
from surojax.config.changes import changed
from surojax.config.fields import default_config
from surojax.errors import ConfigError
from surojax.placement.layout import batch_sharding
from surojax.placement.mesh import DATA, data_parallel, make_mesh
from surojax.planner import aot, candidate, check_fit, choices, footprint, remedies
from surojax.planner.amounts import GiB, Memory, gib, summed
from surojax.planner.gpus import GPUS
from surojax.planner.run_plan import checked, plan_in_subprocess
from surojax.planner.search import Space
from surojax.planner.traffic import BatchShape, batch_of
from surojax.resources import FreeMemory
from surojax.training import run_summary

CONFIGS = Path(__file__).parent.parent / "configs"
SMALL = {
    "model.vocab_size": 512,
    "model.hidden_size": 256,
    "model.intermediate_size": 704,
    "model.num_hidden_layers": 4,
    "model.num_attention_heads": 8,
    "model.num_key_value_heads": 4,
    "model_dtype": "float32",
    "sequence_len": 128,
    "per_device_batch_size": 8,
    "gradient_accumulation_steps": 2,
}


def small(**changes):
    """A config whose activations and logits are as large as its weights; `vocab_size` is the model's."""
    c = default_config()
    if "vocab_size" in changes:
        changes["model.vocab_size"] = changes.pop("vocab_size")
    for name, value in (SMALL | changes).items():
        owner = c.model if name.startswith("model.") else c
        owner[name.removeprefix("model.")] = value
    checks.check(c)
    return c


def mesh(c) -> jax.sharding.Mesh:
    return make_mesh(jax.devices()[: c.gpus], dp_replicate_size=c.dp_replicate_size, cp_size=c.cp_size)


def plan(c):
    return from_config(c, mesh(c), total_steps=100)


def estimate(c, platform: str = "cpu") -> dict[str, int]:
    return footprint.estimate(plan(c), batch_of(c), platform=platform)


@pytest.mark.parametrize(
    "changes",
    quick_at(
        [
            ({"vocab_size": 8000},),  # large logits
            ({"sequence_len": 512, "per_device_batch_size": 2},),  # large attention scores
            ({"recompute_block": False, "recompute_norm": True, "recompute_ffn": True},),
            ({"gpus": 4, "zero_level": 3, "dp_replicate_size": 2, "lmhead_chunks": 8, "model_dtype": "bfloat16"},),
            ({"gpus": 4, "zero_level": 3, "zero_quantized_weights": "int8", "persistent_quants": True},),
            ({"gpus": 4, "zero_level": 3, "optimizer": "adamw8bit"},),
            ({"gpus": 4, "zero_level": 2, "optimizer": "normuon"},),
            ({"microbatches_per_fetch": 2, "recompute_block": False},),
            ({"microbatches_per_fetch": 2, "gpus": 4, "zero_level": 3},),
            ({"sequence_len": 1024, "per_device_batch_size": 2, "sequence_chunks": 4, "lmhead_chunks": 8},),
            ({"gpus": 2, "cp_size": 2, "sequence_len": 1024, "sequence_chunks": 8, "sample_packing": True},),
        ],
        0,
    ),
    ids=str,
)
def test_estimate_is_near_what_xla_plans(changes):
    """At most 10 % below, where a run would be killed, and 40 % above; footprint.py says what was measured."""
    c = small(**changes)
    run, need = plan(c), estimate(c)
    groups = data_parallel(mesh(c))
    shape = (c.gradient_accumulation_steps, c.per_device_batch_size * groups, c.sequence_len)
    arrays = [jax.ShapeDtypeStruct(shape, np.int32, sharding=batch_sharding(mesh(c)))] * len(run.engine.batch_arrays)
    quick = {"xla_backend_optimization_level": 0}  # compiles in half the time and plans the same memory
    real = run.train_step().lower(run.plan, *arrays).compile(quick).memory_analysis()
    state = sum(size for name, size in need.items() if name in ("weights", "quants", "outer", "master", "moments"))
    inputs = len(arrays) * 4 * np.prod(shape) // groups
    assert real.argument_size_in_bytes == pytest.approx(state + inputs, rel=0.001)  # the state is exact
    assert real.temp_size_in_bytes > 0.3 * state  # so that the rest of the estimate counts
    assert 0.9 < sum(need.values()) / (real.argument_size_in_bytes + real.temp_size_in_bytes) < 1.4


def test_what_saves_memory_does_so_in_the_estimate():
    total = lambda **changes: sum(estimate(small(**changes)).values())
    assert total() < total(recompute_block=False)
    assert total() < total(microbatches_per_fetch=2)
    assert total(vocab_size=8000, lmhead_chunks=8) < total(vocab_size=8000)
    assert total(sequence_len=1024, sequence_chunks=8) < total(sequence_len=1024)
    assert total(gpus=4, zero_level=3) < total(gpus=4, zero_level=2) < total(gpus=4) < total()
    assert total(optimizer="adamw8bit") < total(opt_m_dtype="bfloat16", opt_v_dtype="bfloat16") < total()
    assert total(opt_m_dtype="bfloat16") < total() > total(accum_dtype="bfloat16")


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_each_recomputation_saves_less(platform):
    """By what it says: values per token of D = 256, F = 704, 8 query heads and 4 key/value heads of 32, float32."""

    def saved(*parts: str) -> int:
        c = small(recompute_block=False, **{f"recompute_{part}": True for part in parts})
        return estimate(c, platform)["residuals"]

    token = 4 * 8 * 128 * 4  # bytes of one value per token in 4 layers
    assert saved() - saved("norm") == 2 * 256 * token
    assert saved() - saved("swiglu") == 704 * token
    assert saved("swiglu") - saved("ffn") == 2 * 704 * token
    assert saved("ffn", "swiglu") == saved("ffn")
    assert saved() - saved("att") > (256 + 2 * 128 + 256) * token
    every = estimate(small(), platform)["residuals"]
    assert every < saved("norm", "ffn", "att") == 2 * every  # the inputs of both halves of a block


def test_resident_layers_are_counted_where_they_rest():
    table = lambda n: small(offload_weights=True, resident_layers=n, model_dtype="bfloat16")
    device = lambda n: estimate(table(n), "gpu")["weights"]
    host = lambda n: footprint.estimate_host(plan(table(n)), BatchShape(8, 128, 2))["weights"]
    layer = 2 * (256 * (2 * 256 + 2 * 128) + 3 * 256 * 704 + 2 * 256)
    assert device(3) - device(0) == host(0) - host(3) == 3 * layer


def test_host_memory_is_that_of_all_gpus():
    c = small(gpus=4, zero_level=3, offload_optimizer=True, offload_grads=True)
    each = footprint.estimate_host(plan(c), batch_of(c))
    assert each and footprint.needs(c, 4, "gpu").host == 4 * sum(each.values())


def test_flash_attention_has_no_scores():
    c = small(model_dtype="bfloat16", sequence_len=1024, per_device_batch_size=1)
    flash, xla = (estimate(changed(c, {"attention": a}), "gpu")["working space"] for a in ("auto", "xla"))
    assert xla - flash > 8 * 1024 * 1024 * 4
    assert estimate(c, "cpu")["working space"] > xla


MESH = jax.sharding.AbstractMesh((1, 1), DATA)


def refusal(c, n: int, gibs: float, platform: str) -> str:
    """What a user reads who has n devices with so many GiB."""
    devices = [SimpleNamespace(platform=platform, device_kind="NVIDIA GeForce RTX 4090", process_index=0)] * n
    abstract = jax.sharding.AbstractMesh((c.dp_replicate_size, n // c.dp_replicate_size), DATA)
    with pytest.raises(ConfigError) as error:
        check_fit.check_fit(c, from_config(c, abstract, 100), devices, int(gibs * GiB))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_host_memory_of_a_cpu_run_is_counted_once(host):
    """As that of its devices: nothing is left to check, whatever is offloaded."""
    c = small(gpus=1, offload_optimizer=True)
    run = plan(c)
    devices = [SimpleNamespace(platform="cpu", device_kind="cpu", process_index=0)]
    host(0)
    check_fit.check_fit(c, run, devices, 2**40)
    assert footprint.estimate_host(run, batch_of(c))


def test_memory_of_cpu_devices_is_shared_by_those_of_a_process(monkeypatch):
    """Each process has its part already; its own devices share that."""
    asked = []

    def free(processes: int, *, compiles: bool):
        asked.append((processes, compiles))
        return SimpleNamespace(size=1200 // processes)

    monkeypatch.setattr(check_fit, "free_memory", free)
    devices = [SimpleNamespace(platform="cpu", process_index=i // 3) for i in range(6)]
    assert check_fit.available_bytes(devices) == 200 and asked == [(2, True)]
    assert check_fit.available_bytes(devices[:3]) == 400
    stats = {"bytes_limit": 900, "bytes_in_use": 100, "peak_bytes_in_use": 700}
    gpu = SimpleNamespace(platform="gpu", process_index=0, memory_stats=lambda: stats)
    assert check_fit.available_bytes([gpu]) == 800 and run_summary.peak_bytes(gpu) == 700
    del stats["bytes_in_use"]
    assert check_fit.available_bytes([gpu]) == 900
    assert check_fit.memory_limit(devices[0]) is run_summary.peak_bytes(devices[0]) is None


def apply(c, text: str):
    """The config with `name=value name=value`, through the command line's own parser."""
    c = changed(c)
    for flag in text.split():
        flags.override(c, *flag.removeprefix("--config.").split("=", 1))
    checks.check(c)
    return c


@pytest.fixture
def host(monkeypatch):
    """Sets how much host memory is free, in GiB; a TiB until then."""

    def free(gibs: float):
        monkeypatch.setattr(
            psutil,
            "virtual_memory",
            lambda: SimpleNamespace(available=int(gibs * GiB), total=int(gibs * GiB)),
        )

    free(1024)
    return free


@pytest.mark.full(after=1)
@pytest.mark.parametrize(
    "name, changes, n, gibs, platform",
    [
        ("llama125m", "", 1, 2.0, "gpu"),
        ("llama125m", "model_dtype=float32 attention=xla sequence_len=4096 lmhead_chunks=1", 1, 6.0, "gpu"),
        ("llama125m", "recompute_block=false per_device_batch_size=6 lmhead_chunks=3 gpus=2", 2, 2.0, "gpu"),
        ("llama125m", "recompute_block=false recompute_att=true gpus=2", 2, 2.0, "gpu"),
        ("llama125m", "recompute_block=false lmhead_chunks=1", 1, 3.0, "cpu"),
        ("llama7b", "", 1, 22.0, "gpu"),
        ("llama7b", "gpus=4 dp_replicate_size=4 shard_weights=false", 4, 22.0, "gpu"),
        ("llama7b", "", 1, 5.0, "gpu"),  # everything offloaded
        ("llama7b", "gpus=4", 4, 2.0, "gpu"),  # and outer layers cut by words
    ],
)
def test_advice_is_true(name, changes, n, gibs, platform, host):
    """Each proposal is a valid command line, leads to the memory beside it, which fits, and keeps the batch."""
    c = apply(flags.load_config(str(CONFIGS / f"{name}.py")), f"gpus={n} {changes}")
    batch = c.per_device_batch_size * c.gradient_accumulation_steps
    line = refusal(c, n, gibs, platform)
    assert f"needs {gib(footprint.needs(c, n, platform).device)} (" in line and f"{gibs} GiB are free" in line
    found = re.findall(r"[:;] ([\w=.\- ]+) -> ([\d.]+ [GM]iB) on each (\w+)[^;]* \(fits\)", line)
    assert found and len(found) == line.count("(fits)") - line.count("by itself"), line
    for text, number, device in found:
        tried = apply(c, text)
        assert gib(footprint.needs(tried, n, platform).device) == number
        assert footprint.needs(tried, n, platform).device <= gibs * GiB
        assert tried.per_device_batch_size * tried.gradient_accumulation_steps == batch
        assert device == ("GPU" if platform == "gpu" else "device")


def proposed(c, limits: Memory, gpu: str = "rtx4090") -> list[remedies.Proposal]:
    """The proposals for a config, each of which is a config that is accepted and fits."""
    found = remedies.proposals(Space(c, GPUS[gpu], limits))
    for proposal in found:
        tried = changed(c, proposal.change)
        checks.check(tried)
        need = footprint.needs(tried, tried.gpus, "gpu")
        assert need.device == proposal.candidate.need.device and need.device <= limits.device
        assert need.host == proposal.candidate.need.host
    return found


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("nvme_path", ["", "/disk"])
def test_what_advice_may_use(monkeypatch, platform, nvme_path):
    """The host memory of a GPU's machine, which CPU devices have already; any files on a drive that is named."""
    asked = []
    monkeypatch.setattr(remedies, "proposals", lambda space: asked.append(space) or [])
    c = small(**{"nvme_path": nvme_path, "offload_optimizer": "nvme"} if nvme_path else {})
    device = SimpleNamespace(platform=platform, device_kind=GPUS["h100"].name)
    check_fit._advice(c, [device, device], check_fit.Room(5 * GiB, FreeMemory(7 * GiB, ""), 4))
    (space,) = asked
    host = np.inf if platform == "cpu" else 7 * GiB
    assert space.limits == Memory(5 * GiB, host, np.inf if nvme_path else 0)
    assert (space.gpu.gpus_per_node, space.config.gpus, space.platform, space.few) == (4, 2, platform, True)


@pytest.mark.full
def test_the_fewest_gpus_are_advised():
    """70B on cards of 16 GB: two with all in host memory; and with more GPUs outer layers can be cut by words."""
    c = apply(
        flags.load_config(str(CONFIGS / "llama70b.py")), "per_device_batch_size=1 gradient_accumulation_steps=2 gpus=1"
    )
    for size, fields in ((14.7, {"gpus"}), (10.6, {"gpus", "shard_outer"})):
        (found,) = proposed(c, Memory(int(size * GiB)))
        assert found.lifted == "more GPUs" and found.change["gpus"] == 2 and fields <= found.change.keys()
        assert found.candidate.config.gradient_accumulation_steps == 1  # the same two sequences a step


@pytest.mark.full
def test_what_is_not_needed_is_not_advised():
    """Settings that change numbers, where what does not is enough; and tensors in host memory that have room."""
    c = apply(flags.load_config(str(CONFIGS / "llama7b.py")), "opt_m_dtype=float32 opt_v_dtype=float32 gpus=1")
    numbers = {name for change in choices.NUMBERS.values() for name in change}
    found = proposed(c, Memory(16 * GiB))
    assert found and not any(numbers & proposal.change.keys() for proposal in found)
    assert remedies.unlike([x.candidate for x in found]) == [x.candidate for x in found]
    for name in ("residual", "optimizer", "master", "grads", "weights"):
        c[f"offload_{name}"] = True
    homes = [{name: x for name, x in y.change.items() if "offload" in name} for y in proposed(c, Memory(48 * GiB))]
    assert all(home and not any(home.values()) for home in homes)


@pytest.mark.full
def test_each_limit_is_lifted_by_itself():
    """Files, more GPUs, more host memory, each with what it then needs; nothing beyond the other limits."""
    c = apply(flags.load_config(str(CONFIGS / "llama7b.py")), "gpus=1")
    limits = Memory(int(22.5 * GiB), 30 * GiB)
    found = {proposal.lifted.partition(" (")[0]: proposal for proposal in proposed(c, limits)}
    assert {"more host memory", "files on a drive", "more GPUs"} <= found.keys()
    for lifted, proposal in found.items():
        need = proposal.candidate.need
        assert (need.files > 0) == (lifted == "files on a drive")
        assert (need.host > limits.host) == ("more host memory" in lifted or lifted.startswith("more of it"))
    assert found["files on a drive"].change["nvme_path"] == "FOLDER"
    other = {name for name in found if name.startswith("other numbers")}
    assert all(found[name].change.keys() & {"optimizer", "master_dtype", "recipe"} for name in other)


@pytest.mark.full
def test_advice_of_long_sequences_and_of_stages():
    """Chunks of the sequence, and a schedule with fewer microbatches in flight, are among what is tried."""
    long = apply(flags.load_config(str(CONFIGS / "llama8b_long.py")), "gpus=1 sequence_chunks=1")
    assert all(x.change["sequence_chunks"] == 16 for x in proposed(long, Memory(int(22.5 * GiB), 200 * GiB)))
    c = flags.load_config(str(CONFIGS / "llama7b.py"))
    c.update({"gpus": 4, "pp_size": 4, "gradient_accumulation_steps": 64, "offload_optimizer": True})
    before, after = (footprint.needs(changed(c, x), 4, "gpu").device for x in ({}, {"pp_schedule": "1f1b"}))
    found = proposed(c, Memory((before + after) // 2, 200 * GiB))
    assert any(x.change.get("pp_schedule") == "1f1b" for x in found)


@pytest.mark.full
def test_too_little_host_memory_is_refused_with_what_would_fit(host):
    c = flags.load_config(str(CONFIGS / "llama7b.py"))
    for name in ("residual", "optimizer", "master", "grads", "weights"):
        c[f"offload_{name}"] = True
    host(64)
    line = refusal(c, 1, 4.0, "gpu")
    assert "needs 75.3 GiB of host memory for 1 GPUs" in line and "64.0 GiB are free" in line
    assert "; files on a drive" not in line  # the flags come first
    assert re.search(
        r"=nvme .*--config.nvme_path=FOLDER .*-> files on a drive .* GiB of host memory, .* \(fits\)", line
    )
    assert "MEM_FRACTION" not in line
    host(90)
    check_fit.check_fit(
        c,
        from_config(c, MESH, 100),
        [SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", process_index=0)],
        4 * GiB,
    )


def test_host_memory_of_other_machines_is_their_own(host):
    """Two machines of two GPUs: neither the check nor its advice counts what the other one has to hold."""
    c = flags.load_config(str(CONFIGS / "llama7b.py"))
    c.update({"gpus": 4, "zero_level": 3, "offload_optimizer": True, "offload_master": True})
    need = sum(footprint.estimate_host(plan_of_four(c), batch_of(c)).values())
    devices = [
        SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", process_index=index) for index in (0, 0, 1, 1)
    ]
    host(2.1 * need / GiB)
    check_fit.check_fit(c, plan_of_four(c), devices, 40 * GiB)
    host(45)  # enough for what advice moves there of two GPUs, not of four
    with pytest.raises(ConfigError) as error:
        check_fit.check_fit(c, plan_of_four(c), devices, 3 * GiB)
    assert "(fits)" in str(error.value) and "nvme" not in str(error.value)


def plan_of_four(c):
    return from_config(c, jax.sharding.AbstractMesh((1, 4), DATA), 100)


def test_a_machine_without_gpus_is_told_what_gpus_would_need():
    c = flags.load_config(str(CONFIGS / "llama7b.py"))
    line = refusal(c, 1, 22.0, "cpu")
    options = re.findall(r"((?:--config\.[\w=.]+ )+)needs ([\d.]+ GiB) on each", line)
    assert [text.split()[0] for text, _ in options] == [f"--config.gpus={n}" for n in (1, 4, 8)]
    for text, number in options:
        there = apply(c, text)
        assert gib(footprint.needs(there, there.gpus, "gpu").device) == number


@pytest.mark.parametrize("platform, kind", [("gpu", "NVIDIA GeForce RTX 4090"), ("gpu", "another"), ("cpu", "cpu")])
def test_what_is_asked_of_the_search_for_a_run_that_does_not_fit(monkeypatch, platform, kind):
    """A few settings, on as many GPUs as here; an estimated time only of a GPU that is known."""
    asked = []

    class Proposed:
        def line(self, **how):
            return f"proposed {how}"

    def proposals(space):
        asked.append(space)
        return [Proposed()]

    monkeypatch.setattr(remedies, "proposals", proposals)
    monkeypatch.setattr(check_fit, "needs", lambda c, n, platform: Memory(100, 0))
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    devices = [SimpleNamespace(platform=platform, device_kind=kind, process_index=0)] * 2
    room = check_fit.Room(99, SimpleNamespace(size=50, limit=""), 2)  # type: ignore[arg-type]
    lines = check_fit._advice(small(gpus=0), devices, room)
    by_itself = "JAX takes 0.75 of a GPU's memory by itself, so 0.0 MiB (fits)"
    mild = [f"XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 in the environment: {by_itself}"]
    timed, device = kind.startswith("NVIDIA"), "device" if platform == "cpu" else "GPU"
    assert lines == [*mild * (platform == "gpu"), f"proposed {{'timed': {timed}, 'device': '{device}'}}"]
    (space,) = asked
    assert (space.few, space.platform, space.config.gpus, space.gpu.gpus_per_node) == (True, platform, 2, 2)
    assert space.limits == Memory(99, 50 if platform == "gpu" else math.inf, 0)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")  # the user's own
    assert check_fit._advice(small(gpus=0), devices, room) == lines[-1:]
    assert check_fit._advice(small(gpus=0, nvme_path="x"), devices, room) and asked[-1].limits.files == math.inf
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION")
    assert check_fit._advice(small(gpus=0), devices, room._replace(device=100)) == lines[-1:]


def test_sums_and_their_parts_have_one_unit():
    c = small(gpus=1)
    line = refusal(c, 1, 0.01, "cpu")
    found = re.search(r"needs ([\d.]+) MiB \(([^)]+)\)", line)
    assert found and "10.2 MiB are free" in line
    parts = [float(part.split()[-1]) for part in found[2].split(", ")]
    assert min(parts) > 0 and sum(parts) == pytest.approx(float(found[1]), abs=0.4)
    assert summed({"a": 3 * GiB // 2, "b": GiB // 2}, digits=2) == "2.00 GiB (a 1.50, b 0.50)"
    assert [gib(size) for size in (0, 3 * 2**19, GiB)] == ["0.0 MiB", "1.5 MiB", "1.0 GiB"]


def test_share_of_the_gpu_that_jax_takes(monkeypatch):
    """JAX takes 75 % of a GPU by itself; where 95 % would do, that is the mildest change."""
    c = flags.load_config(str(CONFIGS / "llama125m.py"))
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION=0.95" in refusal(c, 1, 2.5, "gpu")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.75")
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in refusal(c, 1, 2.5, "gpu")


@pytest.mark.parametrize(
    "changes, capability, said",
    quick_at(
        [
            (
                {},
                "7.5",
                "'xla' or 'auto' on that GPU, got 'mosaic'; they are for NVIDIA GPUs of compute capability 8.0",
            ),
            ({}, "gfx942", "'xla' or 'auto' on that GPU, got 'mosaic'; they are for NVIDIA GPUs"),
            ({"gpus": 2, "zero_level": 3, "model_dtype": "bfloat16"}, "9.0", ""),
            ({"recipe": "fp8_current"}, "9.0", "'xla' or 'auto', got 'mosaic', but quantize"),
            (
                {"recipe": "mxfp8", "block_scaled_products": "native", "model.num_key_value_heads": 8},
                "10.0",
                "'xla' or 'auto', got 'mosaic', but mx.quantize",
            ),
            ({"optimizer": "adamw8bit"}, "8.0", "'xla' or 'auto', got 'mosaic', but adamw8bit"),
        ],
        0,
        2,
        5,
    ),
    ids=["old", "amd", "served", "fp8", "mxfp8", "adamw8bit"],
)
def test_kernels_that_cannot_run_are_refused(changes, capability, said):
    """In one line before anything is compiled or written, and whatever the microbatch that advice is about."""
    sizes = {"model.intermediate_size": 736, "model.hidden_size": 224} if said else {}  # no multiples of 64 or 128
    c = small(kernels="mosaic", **sizes, **changes)
    devices = [
        SimpleNamespace(platform="gpu", device_kind="that GPU", compute_capability=capability, process_index=0)
    ] * c.gpus
    if not said:
        assert check_fit.check_fit(c, plan(c), devices, 2**40)
        return
    with pytest.raises(ConfigError, match=rf"^kernels: expected {said}.*$"):
        check_fit.check_fit(c, plan(c), devices, 2**40)
    assert footprint.needs(c, c.gpus, "gpu").device


EIGHT_LAYERS = "model.num_hidden_layers=8 gradient_accumulation_steps=2"
RESIDENT = (
    "resident_layers=12 overlap_update=False offload_residual=False offload_master=nvme nvme_path=x lmhead_chunks=1 "
    "microbatches_per_fetch=2 recompute_block=False recompute_norm=True recompute_ffn=True recompute_att=True"
)
ADAPTERS = "lora=True offload_optimizer=False offload_master=False offload_grads=False"


@pytest.mark.parametrize(
    "name, gpu, changes, compiled, tokens",
    [
        ("qwen3_5_9b", "rtx4090", "", 19.71, 1607),
        ("qwen3_5_9b", "rtx4090", f"{EIGHT_LAYERS} microbatches_per_fetch=1", 19.31, 0),
        ("qwen3_5_9b", "rtx4090", f"{EIGHT_LAYERS} microbatches_per_fetch=2", 19.46, 0),
        ("qwen3_5_9b", "rtx4090", f"{EIGHT_LAYERS} microbatches_per_fetch=1 overlap_update=False", 11.30, 0),
        ("qwen3_5_9b", "rtx4090", RESIDENT, 22.69, 0),
        ("qwen3_5_35b_a3b", "rtx4090", "", 13.9, 0),
        ("nemotron3_nano", "rtx4090", "", 9.96, 2081),
        ("mistral_small_4", "rtx4090", "", 19.1, 1424),
        ("gpt_oss_20b", "rtx4090", "", 18.3, 3433),
        ("gemma4_31b", "rtx4090", "", 21.4, 555),
        ("gemma4_e4b", "rtx4070", "", 8.84, 957),
        ("gemma4_e4b", "rtx4060", f"{ADAPTERS} qlora_bnb=True", 6.54, 733),
    ],
)
def test_layers_of_several_kinds_need_what_was_compiled(name, gpu, changes, compiled, tokens):
    """GiB within 5 %, and tokens/s within 10 % (0: not compared), as compiled in November 2026 with XLA 0.12."""
    c = checked(apply(flags.load_config(str(CONFIGS / f"{name}.py")), f"gpus=1 {changes}"), gpu)
    estimate = candidate.estimated(c, GPUS[gpu])
    assert estimate.need.device / GiB == pytest.approx(compiled, rel=0.05)
    batch = batch_of(c)
    if tokens:
        assert batch.tokens * batch.microbatches / tokens == pytest.approx(estimate.seconds, rel=0.1)


OF_WORDS = (
    "model.num_hidden_layers=6 model.vocab_size=128256 lmhead_chunks=1 gradient_accumulation_steps=4 "
    "offload_master=True offload_optimizer=True offload_grads=True offload_weights=True"
)


@pytest.mark.parametrize(
    "changes, compiled",
    [
        ("offload_residual=True", 6.72),
        ("offload_residual=True microbatches_per_fetch=2", 6.81),
        ("microbatches_per_fetch=2 resident_layers=3", 8.26),
    ],
)
def test_weights_are_prefetched_beside_the_head(changes, compiled):
    """GiB of six layers of Llama 7B whose logits are the most, as compiled for an RTX 4090 on 2026-11-29, within 8 %.

    One slice of tokens: with two microbatches a fetch, logits of one at a time.
    """
    given = flags.load_config(str(CONFIGS / "llama7b.py"))
    c = checked(apply(given, f"gpus=1 {OF_WORDS} {changes}"), "rtx4090")
    assert footprint.needs(c, 1, "gpu").device / GiB == pytest.approx(compiled, rel=0.08)


def test_a_run_that_fits_gets_its_estimate():
    c = small()
    run = plan(c)
    assert check_fit.check_fit(c, run, jax.devices()[:1], 2**40) == estimate(c)
    assert check_fit.available_bytes(jax.devices()) < 2**50


def test_plan_and_reality_are_compared_on_a_gpu():
    """By faked statistics; on a CPU there is nothing to compare."""
    sizes = {"argument_size_in_bytes": 10, "temp_size_in_bytes": 5, "output_size_in_bytes": 9, "alias_size_in_bytes": 8}
    planned = SimpleNamespace(**{name: size * GiB for name, size in sizes.items()})
    compiled = SimpleNamespace(memory_analysis=lambda: planned)
    stats = {"peak_bytes_in_use": 17 * GiB}
    gpu = SimpleNamespace(platform="gpu", memory_stats=lambda: stats, process_index=0)
    line = run_summary.compare({"weights": 12 * GiB, "master": 3 * GiB}, compiled, gpu)
    assert line and "estimated 15.0 GiB, compiled 16.0 GiB, at most in use 17.0 GiB" in line and "too low" not in line
    assert "14% too low" in str(run_summary.compare({"weights": 14 * GiB}, compiled, gpu))
    of_files = SimpleNamespace(memory_analysis=lambda: None)
    line = run_summary.compare({"weights": 12 * GiB}, of_files, gpu)
    assert line and "estimated 12.0 GiB, at most in use 17.0 GiB" in line
    stats.clear()
    assert run_summary.compare({"weights": 1}, compiled, gpu) is None
    assert run_summary.compare({"weights": 1}, compiled, jax.devices()[0]) is None


@pytest.mark.full
@pytest.mark.skipif(not aot.available(), reason="needs the planner's extra")
def test_a_sharded_embedding_has_the_activations_of_all_devices():
    """Compiled for 64 H100: the estimate is within 2 %; it was 8 % less without these 16 GiB, and 28 % on 128 GPUs."""
    c = flags.load_config(str(CONFIGS / "llama405b.py"))
    c.update({"gpus": 64, "zero_level": 3, "shard_outer": True, "offload_residual": True})
    c.model.num_hidden_layers = 63
    found = plan_in_subprocess(c, "h100", advise=False)
    estimated = footprint.needs(checked(c, "h100"), 64, "gpu", in_a_machine=8)
    assert estimated.device == pytest.approx(found.device_bytes, rel=0.02)
    assert estimated.host == pytest.approx(8 * found.host_bytes, rel=0.02)
