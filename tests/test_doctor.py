"""`surojax doctor`: every check ends with a verdict, and what fails names the settings to leave off."""

import importlib
import json
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from pallas_kernels import bench, shapes
from surojax import doctor
from surojax.assembly.xla_options import VERIFY_OFFSETS, compiler_options
from surojax.config import checks as config_checks
from surojax.config.changes import changed
from surojax.config.fields import FIELDS, default_config
from surojax.diagnosis import doctor_checks, machine, steps
from surojax.diagnosis.verdict import FAILED, OK, SKIPPED, Asked, failed, ok, skipped
from surojax.errors import ConfigError, Refused, StepError
from surojax.placement import cuda_plugin
from surojax.planner import footprint, seen
from surojax.planner.gpus import GPUS
from surojax.training import safe as options
from surojax.verification import rows as verifier
from surojax.verification.bounds import Bound
from surojax.verification.settings import OFFLOADS, SETTINGS
from surojax.verification.training import compiled_step

CHECKS = {  # name: what runs, and the limit of its seconds, written again
    "installation": (machine.installation, 120),
    "host_memory": (machine.host_memory, 120),
    "disk": (machine.disk, 120),
    "rates": (machine.rates, 300),
    "kernels": (steps.kernels, 600),
    "step": (steps.step, 600),
    "offloads": (steps.offloads, 1200),
    "several": (steps.several, 900),
    "copies": (steps.copies, 300),
    "times": (steps.step_times, 300),
}


def test_the_table_of_checks():
    assert {name: (check.run, check.seconds) for name, check in doctor_checks.CHECKS.items()} == CHECKS
    helped = {option for check in doctor_checks.CHECKS.values() for option in check.options}
    assert helped == {*OFFLOADS, "attention", "kernels", "xla_options", "copy_engines"}


PAGE = (Path(__file__).parents[1] / "docs" / "doctor.md").read_text()
ASKED = Asked("", "")
GPU = GPUS["h100"]
SMALL = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 2}


# -- The table of options ---------------------------------------------------------------------------------------------


def test_what_to_leave_off_are_fields_with_values_that_they_may_have():
    """And the page lists them in the same order."""
    for option in options.OPTIONS:
        for name, value in option.without.items():
            FIELDS[name].check_type(value)
            FIELDS[name].check(value)
    rows = re.findall(r"^\| (.+) \| `(--config.+)` \| (yes|no) \|$", PAGE, re.MULTILINE)
    assert rows == [(x.does, x.flags, "yes" if x.in_safe else "no") for x in options.OPTIONS]


@pytest.mark.parametrize(
    "changes, message, begins",
    [
        (
            {},
            "INTERNAL: something",
            "most likely flash attention, which may be at fault: go on without it by --config.a",
        ),
        ({}, "no cuDNN plan", "most likely flash attention, which the message names: go on without it by --config.att"),
        (
            {"kernels": "mosaic"},
            "failed to load Mosaic GPU module",
            "most likely our Pallas kernels, which the message",
        ),
        ({}, "Unknown option xla_gpu_x", "most likely XLA's options that overlap copies with products, which the mess"),
        (
            {"offload_grads": True},
            "cannot allocate pinned host memory",
            "most likely gradients in host memory or files, which",
        ),
        ({}, "Unsupported: mosaic", "most likely flash attention, which may be at fault"),  # not in use: not blamed
        ({}, "RESOURCE_EXHAUSTED: 3 GiB", "out of memory: XLA_PYTHON_CLIENT_MEM_FRACTION=0.95"),
        (
            {"attention": "xla", "xla_options": "default", "offload_grads": True},
            "INTERNAL: something",
            "most likely gradients in host memory or files, which may be at fault",
        ),
        (  # one that --safe leaves off is tried first
            {"attention": "xla", "offload_grads": True, "offload_weights": True},
            "INTERNAL: something",
            "most likely XLA's options that overlap copies with products, which may be at fault",
        ),
        (
            {"attention": "xla", "xla_options": "default"},
            "mosaic",
            "none of the options that can be left off is in use",
        ),
    ],
)
def test_an_error_names_the_option_in_use_that_is_likely_at_fault(changes, message, begins):
    c = default_config()
    c.update(changes)
    found = options.advice(c, message)
    assert found.startswith(begins)
    if c.offload_grads and c.offload_weights:
        assert "--config.kernels" not in found and "offload" not in found.partition("; --safe")[0]


def test_only_errors_of_xla_on_a_gpu_end_with_that_line():
    """What the compiler raises besides gets it as a note; a CPU's errors and those that say what to do stay."""
    c, error = default_config(), jax.errors.JaxRuntimeError("INTERNAL: no cuDNN\nplan")
    for compiles in (False, True):
        line = "no cuDNN plan; most likely flash attention"
        with pytest.raises(StepError, match=line), options.advised(c, "gpu", compiles=compiles):
            raise error
    for platform, raised in (("cpu", error), ("gpu", ConfigError("a: b")), ("gpu", KeyError("a callback's"))):
        with pytest.raises(type(raised)) as ended, options.advised(c, platform):
            raise raised
        assert ended.value is raised and not getattr(raised, "__notes__", ())
    with pytest.raises(NotImplementedError) as ended, options.advised(c, "gpu", compiles=True):
        raise NotImplementedError("pallas")
    assert ended.value.__notes__[0].startswith("most likely flash attention")


def test_safe_changes_the_config_that_is_trained_and_written(monkeypatch, capsys):
    """To settings that go together, for every recipe; a config that uses none of them is trained as it is."""
    for recipe in FIELDS["recipe"].choices:
        c = default_config()
        c.update({"recipe": recipe, "kernels": "auto", "memcpy_send_recv": True})
        changed, said = options.safe(c)
        assert not [x.name for x in options.OPTIONS if x.in_safe and x.in_use(changed)]
        assert "--config.kernels=xla" in said and ("emulated" in said) == (recipe in ("mxfp8", "nvfp4"))
        assert options.safe(changed)[1] == "" and c.kernels == "auto"
    trained = []

    def stop(c, **_):
        config_checks.check(c)
        trained.append(c)
        raise StepError("no more")

    train = importlib.import_module("surojax.train")  # surojax.train is the function
    monkeypatch.setattr(train, "train", stop)
    with pytest.raises(SystemExit, match=r"^surojax\.train: error: no more$"):
        train.main(["--config", "tiny", "--safe", "--config.attention=xla"])
    assert "--safe: --config.xla_options=default\n" in capsys.readouterr().out
    assert (trained[0].attention, trained[0].xla_options) == ("xla", "default")


def test_train_ends_so_and_mentions_doctor(monkeypatch, tmp_path, capsys):
    """In place of a GPU: a step that cannot be compiled, of which the platform is said to be one."""
    train = importlib.import_module("surojax.train")

    def fails(*_):
        raise jax.errors.JaxRuntimeError("INTERNAL: latency hiding")

    monkeypatch.setattr(train, "compile_programs", fails)
    monkeypatch.setattr(train, "advised", lambda c, platform, **how: options.advised(c, "gpu", **how))
    monkeypatch.setattr(train, "mention_of_doctor", lambda platform: f"doctor on a {platform}")
    c = default_config()
    c.model.update(SMALL)
    c.update({"gpus": 1, "sequence_len": 16, "max_steps": 1, "output_dir": str(tmp_path)})
    with pytest.raises(StepError, match="latency hiding; most likely XLA's options"):
        train.train(c, data=[f"text {i} of a few words" for i in range(200)])
    assert "doctor on a cpu\n" in capsys.readouterr().out


def test_the_first_runs_on_a_gpu_mention_doctor(tmp_path, monkeypatch):
    monkeypatch.setattr(options, "DOCTORS_REPORT", tmp_path / "doctor.json")
    assert "`surojax doctor` checks" in options.mention_of_doctor("gpu") and not options.mention_of_doctor("cpu")
    (tmp_path / "doctor.json").touch()
    assert not options.mention_of_doctor("gpu")


# -- Verdicts ---------------------------------------------------------------------------------------------------------


def test_a_check_that_raises_is_a_verdict_and_the_report_goes_on(monkeypatch, tmp_path, capsys):
    """Also one that never ends. The exit code is 1, and what failed names what to leave off."""

    def stops(asked):
        yield ok("disk", ".", "fine")
        raise ZeroDivisionError("by | zero")

    monkeypatch.setitem(doctor_checks.CHECKS, "disk", doctor_checks.Check(stops, 9, ("offload_master",)))
    monkeypatch.setitem(doctor_checks.CHECKS, "kernels", doctor_checks.CHECKS["kernels"]._replace(seconds=0.01))
    in_process = doctor_checks.in_process
    here = lambda name, asked: doctor_checks.check_verdicts(name, asked) if name == "disk" else in_process(name, asked)
    monkeypatch.setattr(doctor, "in_process", here)
    monkeypatch.setattr(doctor, "DOCTORS_REPORT", tmp_path / "cache" / "doctor.json")
    with pytest.raises(SystemExit) as ended:
        doctor.main(["--only", "kernels,disk", "--output", str(tmp_path / "a.md"), "--json", str(tmp_path / "a.json")])
    assert ended.value.code == 1
    out = capsys.readouterr().out
    assert "1 ok, 2 failed, 0 skipped" in out and "ZeroDivisionError: by | zero" in out
    assert "leave off: --config.offload_master=False --config.kernels=xla" in out
    report = json.loads((tmp_path / "a.json").read_text())
    assert json.loads((tmp_path / "cache" / "doctor.json").read_text()) == report
    assert [(x["check"], x["part"], x["status"]) for x in report["verdicts"]] == [
        ("disk", ".", OK), ("disk", "all", FAILED), ("kernels", "its process", FAILED)
    ]  # fmt: skip
    assert report["verdicts"][-1]["said"].startswith("no end within 0.01 s")
    rows = [line for line in (tmp_path / "a.md").read_text().splitlines() if line.startswith("| ")]
    assert len(rows) == 4 and all(len(re.split(r"(?<!\\)\|", row)) == 7 for row in rows)


def test_the_status_counts_checks_and_says_how_much_time_is_left(monkeypatch):
    """Checks with limits of 120, 600 and 300 s: after 12 s for the first, 90 s are left, then 30."""
    clock, shown = iter([0.0, 0.0, 12.0, 72.0]), []
    monkeypatch.setattr(doctor.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(doctor, "in_process", lambda name, asked: iter(()))
    monkeypatch.setattr(doctor.CONSOLE, "status", shown.append)
    list(doctor.examine(["installation", "step", "copies"], ASKED))
    expected = ["installation ... 1 of 3", "step ... 2 of 3, 01:30 left", "copies ... 3 of 3, 00:30 left"]
    assert [text for text in shown if text] == expected


def test_without_devices_nothing_else_is_tried(monkeypatch):
    monkeypatch.setattr(doctor, "in_process", lambda name, asked: iter([failed(name, "devices", "no driver")]))
    found = list(doctor.examine(["installation", "step"], ASKED))
    assert [verdict.status for verdict in found] == [FAILED, SKIPPED]


@pytest.mark.parametrize(
    "words, said",
    [
        (["--only", "kernel"], r"--only: expected names of installation, .*, got 'kernel'"),
        (["--output", "/nowhere/doctor.md"], "--output: expected a file that can be written"),
        (["--nvme-path", "/nowhere"], "--nvme-path: expected a folder, got '/nowhere'; create it, or choose another"),
        (["now"], "unrecognized arguments: now"),
    ],
)
def test_a_command_line_that_is_refused(words, said):
    with pytest.raises(Refused, match=said):
        doctor.main(words)


def test_a_process_that_crashes_is_a_verdict_after_those_that_it_wrote(monkeypatch, tmp_path):
    """In place of Python, a program that gets what the process would get: -c CODE NAME VERDICTS ASKED."""
    program = tmp_path / "python"
    program.write_text("""#!/bin/sh
echo '["step", "plain", "ok", "fine", ""]' >> "$4"; echo "last words"; kill -SEGV $$
""")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    first, crash = doctor_checks.in_process("step", ASKED)
    assert first == ok("step", "plain", "fine")
    assert (crash.part, crash.said) == ("its process", "ended by SIGSEGV; last: last words")
    assert crash.without.startswith("--config.attention=xla --config.kernels=xla")
    assert [doctor_checks.how_it_ended(code) for code in (0, 1)] == ["", "exit code 1"]


def test_what_a_step_turns_on_are_options_that_can_be_left_off():
    for _, row, changes in steps.TURNED_ON:
        assert row in {setting.name for setting in SETTINGS}
        for name, value in changes.items():
            FIELDS[name].check(value)
            assert options.BY_NAME[name].without.keys() == {name} and options.BY_NAME[name].without[name] != value


# -- What fails -------------------------------------------------------------------------------------------------------


def test_a_kernel_apart_from_its_reference_names_the_kernels(monkeypatch):
    """In place of kernels: what returns its arguments, exactly, with rounding, or further apart than that."""
    small = [(shapes.Sizes(64, 64, 2, 1, 32, 64), 128)]
    numbers = lambda case, seed: [np.linspace(-1, 1, 64, dtype=a.dtype) for a in case.args[:1]]
    monkeypatch.setattr(bench, "random_arguments", numbers)

    def off_by(more: float):
        return lambda case, how: lambda x: x + np.asarray(more * (how == "mosaic"), x.dtype)

    for more, status in ((0, OK), (2**-8, OK), (2**-5, FAILED), (np.nan, FAILED)):
        monkeypatch.setattr(bench, "compiled_case", off_by(more))
        verdict = steps.kernel("rope", small)
        assert (verdict.status, verdict.without) == (status, "--config.kernels=xla" * (status == FAILED))
    monkeypatch.setattr(bench, "compiled_case", off_by(2**-5))
    said = steps.kernel("rope", small).said
    assert "rope.forward: 3.15e-02 apart, where 7.81e-03 is rounding (bfloat16); rope" in said


def test_a_row_of_offloads_that_fails_names_its_fields(monkeypatch):
    """And each of the rows is about fields that can be left off."""
    table = {setting.name: setting for setting in SETTINGS}
    moved = {*OFFLOADS, "overlap_update", "resident_layers"}
    of_one = {s.name for s in SETTINGS if s.devices == 1 and s.changes and not s.changes.keys() - moved}
    assert {*steps.ROWS_OF_OFFLOADS} == of_one
    for name in steps.ROWS_OF_OFFLOADS:
        row = verifier.VerifiedSetting(table[name], "FAIL", 0.5, 0.1, Bound(0, 0, ""), "loss too far", 1.0)
        monkeypatch.setattr(verifier, "judge_row", lambda curves, setting, row=row: row)
        verdict = steps.row_verdict("offloads", None, table[name])
        assert verdict.status == FAILED and "loss 5.0e-01" in verdict.said and "loss too far" in verdict.said
        turned_off = set(re.findall(r"--config\.(\w+)=False", verdict.without))
        assert turned_off == table[name].changes.keys() - {"resident_layers"}
    assert steps.options_of(table["memcpy_send_recv@4"]) == ("copy_engines",)


@pytest.mark.parametrize(
    "status, loss, norm, verdict, said",
    [
        ("skipped", None, None, SKIPPED, "the reason"),
        ("pass", 0.0, 0.0, OK, "3 steps equal 'plain' to the bit"),
        ("pass", 1e-6, 0.0, OK, "3 steps beside 'plain': loss 1.0e-06, gradient norm 0.0e+00 apart"),
        ("pass", 0.0, 1e-6, OK, "3 steps beside 'plain': loss 0.0e+00, gradient norm 1.0e-06 apart"),
        ("FAIL", 0.0, 0.0, FAILED, "3 steps beside 'plain': loss 0.0e+00, gradient norm 0.0e+00 apart: the reason"),
    ],
)
def test_verdicts_on_rows(monkeypatch, status, loss, norm, verdict, said):
    row = verifier.VerifiedSetting(SETTINGS[1], status, loss, norm, Bound(0, 0, ""), "the reason", 1.0)
    monkeypatch.setattr(verifier, "judge_row", lambda *_: row)
    found = steps.row_verdict("offloads", None, SETTINGS[1])  # type: ignore[arg-type]
    assert (found.status, found.part, found.said) == (verdict, SETTINGS[1].name, said)


def test_transfers_by_kernels_and_none_at_all_fail():
    count = lambda engines, kernels: {"copy_engine": engines, "kernel": kernels}
    judged = [steps.on_transfers("a", count(*n), ("xla_options",)) for n in ((3, 0), (3, 1), (0, 0))]
    assert [verdict.status for verdict in judged] == [OK, FAILED, FAILED]
    assert judged[1].without == "--config.xla_options=default" and judged[1].said == "3 by copy engines, 1 by kernels"


def test_rates_stand_beside_those_of_the_planner_and_are_written_for_it(monkeypatch, tmp_path):
    """Measured with small arrays on this CPU, as on a GPU; below the slow end of what is assumed they fail."""
    monkeypatch.setattr(bench, "TURN_SECONDS", 1e-3)
    monkeypatch.setattr(bench, "COPY_BYTES", 2**12)
    monkeypatch.setattr(machine, "COPIED_BYTES", 2**12)
    monkeypatch.setattr(machine, "PRODUCT", 64)
    measured = {}
    link = machine.host_link(jax.devices()[0], GPU, measured)
    memory = machine.device_memory(GPU, measured)
    products = machine.matrix_products(GPU, measured)
    assert (link.status, memory.status, products.status) == (FAILED, FAILED, FAILED)
    assert link.without == " ".join(f"--config.{name}=False" for name in OFFLOADS)
    assert "the planner assumes 0.85 (0.62 to 0.94, measured by others): slower than that" in link.said
    assert measured.keys() == {"host", "memory", "products"} and all(value > 0 for value in measured.values())
    assert machine.beside("link", GPU, "host", 50e9, GPU.pcie_bandwidth, "50 GB/s", measured).status == OK

    file = str(tmp_path / "rates.json")
    assert file in seen.record_rate(file, GPU.name, "host", measured["host"])
    assert seen.corrected(GPU, file).rates.host == pytest.approx(50e9 / GPU.pcie_bandwidth, abs=1e-4)
    for bad in (0.0, 11.0, float("nan")):
        assert seen.record_rate(file, GPU.name, "host", bad) == "" == seen.record_rate("", GPU.name, "host", 0.5)


def test_a_slow_disk_fails_if_it_was_named(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "DISK_BYTES", 2**16)
    judged = lambda path: next(iter(machine.disk(Asked(path, ""))))
    assert min(machine.disk_rates(tmp_path, 2**16)) > 0 and not list(tmp_path.iterdir())
    rates = str(tmp_path / "rates.json")
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 2**22}))
    sustained = next(iter(machine.disk(Asked(str(tmp_path), rates, 0.05))))
    assert "for 0.05 s, read at" in sustained.said and rates in sustained.said
    measured = seen.rates_of_disk(rates, str(tmp_path))
    assert measured and min(measured) > 0 and [x.name for x in tmp_path.iterdir()] == ["rates.json"]
    monkeypatch.setattr(machine, "disk_rates", lambda folder, size, sustained_s: (1e7, 1e9))
    assert judged("").status == OK
    assert judged(str(tmp_path)).without == " ".join(f"--config.{name}=False" for name in OFFLOADS)


def test_what_only_a_gpu_gets_is_asked_of_it(monkeypatch, tmp_path):
    """Of a stand-in that has a GPU's names, and nothing that runs: what would, is replaced."""
    facts = {"platform": "gpu", "device_kind": GPU.name, "compute_capability": "9.0"}
    device = type("Device", (), facts | {"memory_stats": lambda self: {"bytes_limit": 60 * 2**30}})()
    for module in (machine, steps):
        monkeypatch.setattr(module, "find_devices", lambda n: [device])
    _, devices, planner, plugin = machine.installation(ASKED)
    assert plugin.status == OK
    assert f"1 x {GPU.name}, of whose memory JAX has 60.0 GiB" in devices.said and planner.status == OK
    device.device_kind = "NVIDIA Unheard"
    assert machine.known_to_planner(device).status == FAILED and "no rates" in next(machine.rates(ASKED)).said
    device.device_kind = GPU.name

    monkeypatch.setattr(machine, "size_per_s", lambda device, to, size: 40e9)
    monkeypatch.setattr(machine, "both_ways_per_s", lambda device, size: 36e9)
    monkeypatch.setattr(machine, "product_seconds", lambda n: 2 * n**3 / 600e12)
    monkeypatch.setattr(bench, "copier", lambda: None)
    monkeypatch.setattr(bench, "call_seconds", lambda callers, turns: {"copy": 2 * bench.COPY_BYTES / 3e12})
    file = str(tmp_path / "rates.json")
    link, both_ways, memory, products, *written = machine.rates(Asked("", file))
    assert [v.status for v in (link, both_ways, memory, products)] == [OK] * 4, (link, both_ways, memory, products)
    names = ("host", "duplex", "memory", "products")
    assert [v.part for v in written] == [f"{name} for the planner" for name in names]
    corrected = seen.corrected(GPU, file).rates
    assert "0.90 of one way" in both_ways.said and corrected.duplex == pytest.approx(0.9)
    assert corrected.memory == pytest.approx(3e12 / GPU.memory_bandwidth, abs=1e-4)
    assert corrected.products == pytest.approx(600e12 / GPU.bf16_flops, rel=0.05)

    monkeypatch.setattr(steps, "kernel", lambda op, at: ok("kernels", op, str([tokens for _, tokens in at])))
    checked = {verdict.part: verdict.said for verdict in steps.kernels(ASKED)}
    wide = ["attention of 256", "attention of 192 and 128"]
    assert list(checked) == [*bench.OPS, "attention", *wide] and set(checked.values()) == {"[8192, 2048]"}
    monkeypatch.setattr(steps, "memory_limit", lambda device: 16 * 2**30)
    assert {verdict.said for verdict in steps.kernels(ASKED)} == {"[2048, 2048]"}

    def stepped(self, part, row, changes, options=()):
        raise jax.errors.JaxRuntimeError("INTERNAL: a\nb")

    monkeypatch.setattr(steps.AgainstCpu, "verdict", stepped)
    without, *turned_on = steps.step(ASKED)
    assert (without.status, without.said, without.without) == (FAILED, "JaxRuntimeError: INTERNAL: a b", "")
    flags = ["attention=xla", "attention=xla", "kernels=xla", "xla_options=default"]
    assert [v.without for v in turned_on[:-1]] == [f"--config.{flag}" for flag in flags]
    monkeypatch.setattr(steps, "copied_by", lambda curves, setting, options: ok("copies", setting.name, *options[-1:]))
    assert [(v.part, v.said) for v in steps.copies(ASKED)] == [(name, "xla_options") for name in steps.COPYING]


@pytest.mark.parametrize(
    "part, of_keys, of_values",
    [("", 128, 128), (" of 256", 256, 256), (" of 192 and 128", 192, 128)],
)
def test_attention_is_compared_at_the_heads_that_our_kernel_gets(part, of_keys, of_values):
    """Queries, keys, values and the result's gradient of a 7B model, in rows of 2048 tokens."""
    forward, backward = steps.KERNEL_CASES[f"attention{part}"](shapes.MODELS["llama7b"], 8192)
    expected = [(4, 2048, 32, channels) for channels in (of_keys, of_keys, of_values, of_values)]
    assert [x.shape for x in backward.args] == expected and forward.args == backward.args[:3]
    assert forward.bytes == 2 * sum(map(math.prod, expected))


@pytest.mark.parametrize("version, status", [((0, 11, 2), FAILED), ((0, 12, 0, 1), OK)])
def test_a_plugin_that_copies_in_turn_fails(monkeypatch, version, status):
    """With the line that installs the other one; on a GPU alone."""
    monkeypatch.setattr(cuda_plugin, "plugin_version", lambda: version)
    verdict = machine.judge_plugin(SimpleNamespace(platform="gpu"))
    assert (verdict.check, verdict.part, verdict.status) == ("installation", "CUDA plugin", status)
    assert ("pip install -U" in verdict.said) == (status == FAILED) and ".".join(map(str, version)) in verdict.said
    assert machine.judge_plugin(SimpleNamespace(platform="cpu")).status == SKIPPED


def test_offsets_of_host_slices_are_verified_on_a_gpu(monkeypatch):
    """By XLA, in every step that doctor's offloads compile; a CPU's compiler has no such option."""
    asked = []
    monkeypatch.setattr(verifier, "Curves", lambda *given: asked.append(given) or pytest.fail("enough"))
    with pytest.raises(pytest.fail.Exception, match="enough"):
        next(steps.offloads(ASKED))
    assert asked[0][-1] == VERIFY_OFFSETS and asked[0][0].xla_options == "overlap"
    on_gpu = [SimpleNamespace(platform="gpu")]  # where programs have the same kernels with "exact" only
    assert verifier.to_the_bit(asked[0][0], on_gpu).xla_options == "exact"
    assert verifier.to_the_bit(changed(asked[0][0], {"xla_options": "default"}), on_gpu).xla_options == "default"
    run, step = footprint.assembly(default_config()), SimpleNamespace(compile=lambda options: options)
    on = lambda platform: SimpleNamespace(run=run, devices=[SimpleNamespace(platform=platform)])
    assert VERIFY_OFFSETS.items() <= compiled_step(on("gpu"), step, VERIFY_OFFSETS).items()
    assert compiled_step(on("gpu"), step) == compiler_options(run, "gpu")
    assert compiled_step(on("cpu"), step, VERIFY_OFFSETS) == {}


def test_rates_are_measured_of_what_runs():
    """The programs whose rates a GPU is asked for, on a virtual device: to its end, and faster than a floppy disk."""
    device = jax.devices()[0]
    assert machine.both_ways_per_s(device, 2**20) > 1e6
    assert machine.size_per_s(device, machine.HOST, 2**20) > 1e6
    assert 0 < machine.product_seconds(64, warm_s=0.01) < 1


# -- All of it --------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_step_apart_from_the_cpus_names_the_options_that_were_on():
    """On another virtual device; then with attention scores that are a quarter of what they should be."""
    device = jax.devices()[0]
    against = steps.AgainstCpu(options.safe(steps.small_config(ASKED, device))[0], device)
    assert against.verdict("plain", "plain", {}).status == OK
    wrong = {"model": {"query_pre_attn_scalar": 16.0 * steps.SIZES["head_dim"]}}
    verdict = against.verdict("attention", "plain", wrong, ("attention",))
    assert (verdict.status, verdict.without) == (FAILED, "--config.attention=xla") and "too far" in verdict.said


@pytest.mark.full
def test_on_a_cpu_all_checks_end_and_say_what_was_not_checked(tmp_path, monkeypatch, capsys):
    """Installation in a process of its own; the others here, with a few rows of offloads."""
    in_process, rows = doctor_checks.in_process, ("offload_all", "offload_master=nvme")
    here = lambda name, asked: (in_process if name == "installation" else doctor_checks.check_verdicts)(name, asked)
    monkeypatch.setattr(doctor, "in_process", here)
    monkeypatch.setattr(steps, "ROWS_OF_OFFLOADS", rows)
    monkeypatch.setattr(doctor, "DOCTORS_REPORT", tmp_path / "doctor.json")
    with pytest.raises(SystemExit) as ended:
        doctor.main(["--output", str(tmp_path / "doctor.md"), "--rates-file", str(tmp_path / "rates.json")])
    out = capsys.readouterr().out
    assert ended.value.code == 0, out
    verdicts = json.loads((tmp_path / "doctor.json").read_text())["verdicts"]
    of = lambda name: {x["part"]: x["status"] for x in verdicts if x["check"] == name}
    assert {x["check"] for x in verdicts} == doctor_checks.CHECKS.keys()
    assert of("installation") == {"versions": OK, "devices": OK, "planner": SKIPPED, "CUDA plugin": SKIPPED}
    assert of("offloads") == dict.fromkeys(rows, OK)
    assert of("several")["zero_level=3@8"] == of("step")["without options"] == of("host_memory")["pinned"] == OK
    assert {SKIPPED} == {status for name in ("kernels", "rates", "copies", "times") for status in of(name).values()}
    assert "not checked: " in out and "our Pallas kernels are for NVIDIA GPUs from sm_80 on" in out
    assert "measured" in next(x["said"] for x in verdicts if x["check"] == "times")
    assert not (tmp_path / "rates.json").exists()


def test_skipped_is_said():
    assert "not checked: copies (no GPU)" in doctor.summary([skipped("copies", "all", "no GPU")])
