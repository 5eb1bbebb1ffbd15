"""Checks a machine's GPU by computing: kernels, a step against the CPU, offloads, host transfers, times of steps.

All train one small model, as `surojax verify` does: its rows of settings, its bounds and its batches. On a machine
without a GPU the first of 8 virtual CPU devices stands for it, and what only a GPU has is skipped.
"""

import functools
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from pallas_kernels import bench, dispatch, flash_attention, shapes
from surojax.assembly.xla_options import VERIFY_OFFSETS
from surojax.config import Config
from surojax.config.changes import changed
from surojax.config.fields import default_config
from surojax.diagnosis.verdict import Asked, Verdict, attempt, failed, ok, skipped
from surojax.placement.mesh import find_devices
from surojax.planner import costs, hlo, prediction
from surojax.planner.amounts import GiB
from surojax.planner.check_fit import memory_limit
from surojax.planner.gpus import find_gpu
from surojax.planner.prediction import milliseconds
from surojax.planner.traffic import BatchShape
from surojax.training.run_summary import comparison
from surojax.training.safe import OPTIONS, safe
from surojax.verification import rows as verifier
from surojax.verification.bounds import expected_bounds, judge
from surojax.verification.settings import OFFLOADS, Setting
from surojax.verification.training import FirstStates, compiled_step, lowered, on_devices

# Heads and widths that flash attention and every kernel serve, and layers for every row of offloads.
SIZES = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    # With the usual 0.02 all tokens get nearly equal attention, so that scores scaled by 4 change a loss by 3e-4 only.
    "initializer_range": 0.1,
}
# Channels of keys and of values (0: as many) that our kernel computes where cuDNN takes at most 128 (Ada).
WIDE_HEADS = {"256": (256, 0), "192 and 128": (192, 128)}
KERNEL_CASES = {op: module.cases for op, module in bench.OPS.items()} | {"attention": flash_attention.reference_cases}
KERNEL_CASES |= {
    f"attention of {heads}": functools.partial(flash_attention.reference_cases, head_dim=of_keys, value_dim=of_values)
    for heads, (of_keys, of_values) in WIDE_HEADS.items()
}
LARGE_GPU = 30 * GiB  # of memory, from which on kernels are checked with 8192 tokens
STEPS = 3  # of each row of offloads: the third begins with a state that two updates have moved
TIMED_STEPS = 12  # the first is left out
SEVERAL = ("zero_level=3@4", "zero_level=3@8", "memcpy_all_gather@4", "memcpy_send_recv@4")
ROWS_OF_OFFLOADS = (
    *OFFLOADS,
    "offload_all",
    "overlap_update",
    "resident_layers",
    "offload_optimizer=nvme",
    "offload_master=nvme",
    "offload_grads=nvme",
    "offload_residual=nvme",
    "offload_weights=nvme",
)
# Parts of the check of a step: name, row of `surojax verify`, and the options of `training.safe` that it turns on.
TURNED_ON: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("attention", "plain", {"attention": "auto"}),
    ("attention within documents", "sample_packing", {"attention": "auto"}),
    ("kernels", "plain", {"kernels": "mosaic"}),
    ("xla_options", "plain", {"xla_options": "overlap"}),
    ("all of them", "plain", {"attention": "auto", "kernels": "mosaic", "xla_options": "overlap"}),
)
COPYING = ("offload_all", "overlap_update")
NO_GPU = "no GPU"


def small_config(asked: Asked, device) -> Config:
    """Makes the config of the checks' small model, for a device."""
    c = default_config()
    c.model.update(SIZES)
    c.update({"gpus": 1, "sequence_len": 128, "per_device_batch_size": 8, "learning_rate": 1e-3})
    c.update({"nvme_path": asked.nvme_path, "rates_file": asked.rates_file})
    if device.platform == "cpu":
        c.update({"model_dtype": "float32", "sequence_len": 32})  # CPUs have no fast bfloat16
    return c


# -- Kernels ----------------------------------------------------------------------------------------------------------


def kernels(asked: Asked) -> Iterator[Verdict]:
    """Compares every kernel with its reference compiled by XLA, at the shapes of two models."""
    device = find_devices(0)[0]
    if dispatch.automatic(device) != "mosaic":
        major, minor = dispatch.OLDEST
        yield skipped("kernels", "all", f"our Pallas kernels are for NVIDIA GPUs from sm_{major}{minor} on")
        return
    for op in KERNEL_CASES:
        yield from attempt("kernels", op, kernel, op, kernel_shapes(device), options=("kernels",))


def kernel_shapes(device) -> list[tuple[shapes.Sizes, int]]:
    """Sizes of models and numbers of tokens: a 7B model, with fewer tokens on a small GPU, and 128,256 words."""
    tokens = max(shapes.TOKENS) if (memory_limit(device) or 0) > LARGE_GPU else min(shapes.TOKENS)
    return [(shapes.MODELS["llama7b"], tokens), (shapes.MODELS["llama1b"], min(shapes.TOKENS))]


def kernel(op: str, at: Sequence[tuple[shapes.Sizes, int]], implementation: str = "mosaic") -> Verdict:
    """Compares an implementation of an op with XLA's in all of the op's cases, at these sizes and numbers of tokens."""
    cases = [case for sizes, tokens in at for case in KERNEL_CASES[op](sizes, tokens)]
    differences = []
    for case in cases:
        actual, expected = (
            bench.compiled_case(case, how)(*bench.random_arguments(case, 1)) for how in (implementation, "xla")
        )
        if difference := bench.disagreement(actual, expected):
            differences.append(f"{case.name}: {difference}")
    if differences:
        return failed("kernels", op, "; ".join(differences), ("kernels",))
    return ok("kernels", op, f"{len(cases)} calls as their references")


# -- A step on the GPU against the CPU --------------------------------------------------------------------------------


def step(asked: Asked) -> Iterator[Verdict]:
    """Compares a step on the GPU with the same step on the CPU: without optional features, and with each of them."""
    device = find_devices(0)[0]
    c = small_config(asked, device)
    steps = AgainstCpu(safe(c)[0], device)
    yield from attempt("step", "without options", steps.verdict, "without options", "plain", {})
    for part, row, changes in TURNED_ON:
        if device.platform != "gpu":
            yield skipped("step", part, f"{NO_GPU}: on a CPU it is the step without options, or refused")
            continue
        options = tuple(changes)
        yield from attempt("step", part, steps.verdict, part, row, changes, options, options=options)


class AgainstCpu:
    """Compares steps on a device with steps on the CPU, whose results are cached."""

    def __init__(self, reference: Config, device):
        self.reference = reference
        self.device = device
        self.first = FirstStates()  # the same numbers for both
        self.expected: dict[str, list[tuple[float, float]]] = {}
        self.cpu = jax.devices("cpu")[-1]  # without a GPU another virtual device

    def curve(self, c: Config, row: str, device) -> list[tuple[float, float]]:
        """Runs a step of a row of `verification.settings` on a device: [(loss, gradient norm)]."""
        with verifier.Curves(c, 1, [device]) as curves:
            curves.first = self.first
            return curves.of(curves.table[row])

    def verdict(self, part: str, row: str, changes: dict[str, Any], options: tuple[str, ...] = ()) -> Verdict:
        """Compares a row with these changes of the config on the device with the row on the CPU.

        options: see `failed`.
        """
        if row not in self.expected:
            self.expected[row] = self.curve(self.reference, row, self.cpu)
        actual = self.curve(changed(self.reference, changes), row, self.device)
        bound = expected_bounds(self.reference)["order"]
        status, loss, grad_norm, why = judge(actual, self.expected[row], bound)
        allowed = f"{bound.loss:.0e}, {bound.grad_norm:.0e}"
        said = f"{self.device.device_kind} beside the CPU: loss {loss:.1e}, gradient norm {grad_norm:.1e} ({allowed})"
        return ok("step", part, said) if status == "pass" else failed("step", part, f"{said}: {why}", options)


# -- Settings of memory and parallelism -------------------------------------------------------------------------------


def offloads(asked: Asked) -> Iterator[Verdict]:
    """Checks that training with offloaded weights, gradients, residuals and state equals plain training to the bit."""
    yield from claims("offloads", asked, ROWS_OF_OFFLOADS, find_devices(0)[:1])


def several(asked: Asked) -> Iterator[Verdict]:
    """Checks that training on several GPUs, or virtual devices, equals training on one up to the order of sums."""
    yield from claims("several", asked, SEVERAL, find_devices(0))


def claims(check: str, asked: Asked, names: Sequence[str], devices: Sequence) -> Iterator[Verdict]:
    """Yields verdicts on rows of `surojax verify`, each a claim that a setting does not change results."""
    config = verifier.to_the_bit(small_config(asked, devices[0]), devices)
    with verifier.Curves(config, STEPS, devices, VERIFY_OFFSETS) as curves:
        rows = [curves.table[name] for name in names]
        curves.plan(rows)
        for row in rows:
            yield from attempt(check, row.name, row_verdict, check, curves, row, options=options_of(row))


def row_verdict(check: str, curves: verifier.Curves, setting: Setting) -> Verdict:
    """Verifies one row, and makes its verdict."""
    row = verifier.judge_row(curves, setting)
    if row.status == "skipped":
        return skipped(check, setting.name, row.why)
    if row.status == "pass" and not (row.loss or row.grad_norm):
        return ok(check, setting.name, f"{STEPS} steps equal {setting.like!r} to the bit")
    said = f"{STEPS} steps beside {setting.like!r}: loss {row.loss:.1e}, gradient norm {row.grad_norm:.1e} apart"
    if row.status == "FAIL":
        return failed(check, setting.name, f"{said}: {row.why}", options_of(setting))
    return ok(check, setting.name, said)


def options_of(setting: Setting) -> tuple[str, ...]:
    """The options of `training.safe` that a row of `surojax verify` turns on."""
    return tuple(option.name for option in OPTIONS if option.without.keys() & setting.changes.keys())


# -- The compiled step: who copies, and how long it takes -------------------------------------------------------------


def copies(asked: Asked) -> Iterator[Verdict]:
    """Checks that copy engines make the host transfers of steps with offloads, and not kernels on multiprocessors."""
    device = find_devices(0)[0]
    for name in COPYING:
        if device.platform != "gpu":
            yield skipped("copies", name, f"{NO_GPU}: the device memory of a CPU is host memory")
            continue
        with verifier.Curves(small_config(asked, device), 1, [device]) as curves:
            options = (*options_of(curves.table[name]), "xla_options")
            yield from attempt("copies", name, copied_by, curves, curves.table[name], options, options=options)


def copied_by(curves: verifier.Curves, setting: Setting, options: tuple[str, ...]) -> Verdict:
    """Compiles a row's step and judges its host transfers."""
    with curves.built(setting) as row:
        transfers = costs.host_transfers(hlo.parse_module(compiled_step(row, lowered(row)).as_text()))
    return on_transfers(setting.name, transfers, options)


def on_transfers(part: str, transfers: dict[str, int], options: tuple[str, ...]) -> Verdict:
    """Judges a program's host transfers, given their numbers in loops by `costs.host_transfers`."""
    said = f"{transfers['copy_engine']} by copy engines, {transfers['kernel']} by kernels"
    if not sum(transfers.values()):
        return failed("copies", part, "no host transfers in the loops of a step that has offloads", options)
    return failed("copies", part, said, options) if transfers["kernel"] else ok("copies", part, said)


def step_times(asked: Asked) -> Iterator[Verdict]:
    """Compares measured and predicted time of a step. It never fails: the model is small, so most of it is launches."""
    device = find_devices(0)[0]
    with verifier.Curves(small_config(asked, device), 1, [device]) as curves:
        for name in ("plain", "offload_all"):
            yield from attempt("times", name, timed, curves, curves.table[name], options=("xla_options",))


def timed(curves: verifier.Curves, setting: Setting, steps: int = TIMED_STEPS) -> Verdict:
    """Measures a row's step, the median of `steps` runs, and compares it with the predicted time."""
    with curves.built(setting) as row:
        step = compiled_step(row, lowered(row))
        batch = on_devices(row, curves.batches[0])
        state = curves.first.of(row)
        durations = []
        for _ in range(steps):
            started = time.perf_counter()
            state, metrics = step(state, *batch)
            jax.block_until_ready((state, metrics))
            durations.append(time.perf_counter() - started)
        measured = f"measured {milliseconds(statistics.median(durations[1:]))} ms a step"
        gpu = find_gpu(row.devices[0].device_kind)
        if gpu is None:
            return skipped("times", setting.name, f"{measured}; none is predicted: {row.devices[0].device_kind}")
        microbatches, sequences, length = row.shape
        step_batch = BatchShape(sequences, length, microbatches)
        simulated = prediction.simulated_step([hlo.parse_module(step.as_text())], row.run, step_batch)
        predicted = prediction.step_prediction(simulated, row.run, step_batch, gpu)
    if not (line := comparison(predicted, durations, microbatches * step_batch.tokens)):
        return skipped("times", setting.name, f"{measured}; none is predicted: {predicted.not_predicted}")
    return ok("times", setting.name, f"{measured}; {line}")
