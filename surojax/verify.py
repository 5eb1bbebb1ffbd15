"""Whether settings of memory and parallelism leave the result alone: a few steps plain, then under each of them.

    python -m surojax.verify --config configs/tiny.py [--steps N] [--only NAME,...] [--list]

Every row of SETTINGS trains the config's model, with its numbers and its optimizer, from the same weights on the same
batches, and its losses and gradient norms are compared with those of another row: equal to the bit where no arithmetic
changes, else within a bound that has a reason. On a machine without GPUs there are 8 virtual CPU devices.

A recipe in 8 or 4 bits is verified in itself: rows that it refuses are skipped, with the reason, and those that change
the order of sums have bounds of their own, since numbers that hardly differ may be rounded to two neighbours.

What is not the config's: memory and mesh settings (a row "as_configured" has the config's own), the data (random
tokens, frequent and rare ones, 5 % of the labels ignored), the number of microbatches (2 at least, so that accumulators
are read), and the learning rate, which starts at its peak so that every update counts. A row compiles a program of its
own and then trains; that takes seconds for configs/tiny.py. For a large model set fewer layers, not another width:
settings work layer by layer.

`verify(config)` is the same as a function; the tests call it.
"""

import argparse
import contextlib
import difflib
import fnmatch
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from surojax.assembly import from_config
from surojax.config import Config, checks, default_config, fields as configs
from surojax.config.flags import parse
from surojax.errors import ConfigError
from surojax.memory import nvme
from surojax.placement import table as placement
from surojax.placement.layout import batch_sharding
from surojax.placement.mesh import find_devices, make_mesh
from surojax.planner.fit import check_fit

type Curve = list[tuple[float, float]]  # (loss, gradient norm) of each step


class Bound(NamedTuple):
    """How far a row may be from its reference: largest relative difference over all steps, and the reason for it.

    approximate: the setting computes with other numbers. No difference at all would say that it did nothing.
    first_norm: gradient norms are compared in the first step only. From then on weights differ by what AdamW makes of
    small gradients, whose signs 8 bits may change, and near a minimum norms follow that, not the error of 8 bits.
    """

    loss: float
    grad_norm: float
    reason: str
    approximate: bool = False
    first_norm: bool = False


class Setting(NamedTuple):
    """A row: what it changes, on how many devices, which row it must equal, and how closely (a name of `bounds`)."""

    name: str
    changes: dict[str, Any]
    devices: int = 1
    like: str = "plain"
    expect: str = "same"
    split: int = 1  # microbatches, times so many


class Row(NamedTuple):
    """What came out. Differences are relative, the largest over the steps compared; None when it was skipped."""

    setting: Setting
    status: str  # "pass", "FAIL" or "skipped"
    loss: float | None
    grad_norm: float | None
    bound: Bound
    why: str  # it failed or was skipped
    seconds: float


OFFLOADS = ("offload_residual", "offload_optimizer", "offload_master", "offload_grads", "offload_weights")
ALL: dict[str, Any] = dict.fromkeys(OFFLOADS, True)
NVME: dict[str, Any] = {"offload_optimizer": "nvme", "offload_master": "nvme"}
SAVED: dict[str, Any] = {"recompute_block": False}
PARTS: dict[str, Any] = dict.fromkeys(configs.RECOMPUTE_PARTS, True)
ZERO3: dict[str, Any] = {"zero_level": 3}
FP8: dict[str, Any] = {"zero_level": 3, "zero_quantized_weights": "fp8"}
INT8: dict[str, Any] = {"zero_level": 3, "zero_quantized_weights": "int8"}
QUANTS: dict[str, Any] = {"persistent_quants": True, "offload_quants": True}

# A new setting is a new line. @n: on n devices.
SETTINGS: tuple[Setting, ...] = (
    Setting("plain", {}),
    # Activations
    Setting("recompute_block=false", SAVED, expect="saved"),
    *(Setting(part, SAVED | {part: True}, expect="saved") for part in PARTS),
    Setting("recompute_parts", SAVED | PARTS, expect="saved"),
    Setting("lmhead_chunks", {"lmhead_chunks": 8}, expect="order"),
    Setting("gradient_accumulation_steps", {}, expect="order", split=2),
    # Host memory
    *(Setting(name, {name: True}) for name in OFFLOADS),
    Setting("offload_all", ALL),
    Setting("resident_layers", {"offload_weights": True, "resident_layers": 1}),
    Setting("offload_saved", SAVED | ALL, like="recompute_block=false"),
    *(Setting(f"{name}@4", ZERO3 | {name: True}, 4, "zero_level=3@4") for name in OFFLOADS),
    Setting("offload_all@4", ZERO3 | ALL, 4, "zero_level=3@4"),
    Setting("resident_layers@4", ZERO3 | ALL | {"resident_layers": 1}, 4, "zero_level=3@4"),
    Setting("offload_saved@4", ZERO3 | SAVED | ALL, 4, "zero_level=3@4", "saved"),
    # Disk
    Setting("offload_optimizer=nvme", {"offload_optimizer": "nvme"}),
    Setting("offload_master=nvme", {"offload_master": "nvme"}),
    Setting("nvme@4", ZERO3 | ALL | NVME, 4, "zero_level=3@4"),
    # Mesh
    *(Setting(f"zero_level={n}@4", {"zero_level": n}, 4, expect="order") for n in (1, 2, 3)),
    Setting("shard_gradients@4", {"shard_gradients": True}, 4, expect="order"),
    Setting("shard_weights@4", {"shard_weights": True}, 4, expect="order"),
    Setting("shard_outer@4", ZERO3 | {"shard_outer": True}, 4, expect="order"),
    Setting("shard_outer_offload_all@4", ZERO3 | ALL | {"shard_outer": True}, 4, "shard_outer@4"),
    Setting("zero_level=3@8", ZERO3, 8, expect="order"),
    Setting("hsdp_2x2", ZERO3 | {"dp_replicate_size": 2}, 4, expect="order"),
    Setting("hsdp_2x4", ZERO3 | {"dp_replicate_size": 2}, 8, expect="order"),
    Setting("hsdp_2x4_offload_all", ZERO3 | ALL | {"dp_replicate_size": 2, "shard_outer": True}, 8, expect="order"),
    # Communication
    Setting("use_all_to_all_reduce@4", ZERO3 | {"use_all_to_all_reduce": True}, 4, expect="order"),
    Setting("zero_quantized_gradients@4", ZERO3 | {"zero_quantized_gradients": True}, 4, "zero_level=3@4", "sent_int8"),
    Setting("zero_quantized_weights=fp8@4", FP8, 4, "zero_level=3@4", "fp8"),
    Setting("zero_quantized_weights=int8@4", INT8, 4, "zero_level=3@4", "int8"),
    Setting("persistent_quants=fp8@4", FP8 | {"persistent_quants": True}, 4, "zero_quantized_weights=fp8@4"),
    Setting("persistent_quants=int8@4", INT8 | {"persistent_quants": True}, 4, "zero_quantized_weights=int8@4"),
    Setting("offload_quants@4", FP8 | QUANTS, 4, "zero_quantized_weights=fp8@4"),
    Setting("offload_quants_all@4", FP8 | QUANTS | ALL, 4, "zero_quantized_weights=fp8@4"),
    Setting("memcpy_all_gather@4", ZERO3 | {"memcpy_all_gather": True}, 4, "zero_level=3@4"),
    Setting(
        "memcpy_send_recv@4",
        ZERO3 | {"use_all_to_all_reduce": True, "memcpy_send_recv": True},
        4,
        "use_all_to_all_reduce@4",
    ),
)

OWN = "as_configured"
NUMBERS = ("recipe", "model_dtype", "accum_dtype", "master_dtype")  # of `place`, but the config's in every row
RESET = (  # fields that a row sets, and that are otherwise at their defaults
    *(name for name in placement.SETTINGS if name not in NUMBERS),
    *("recompute_block", *configs.RECOMPUTE_PARTS, "lmhead_chunks", "dp_replicate_size", "dp_shard_size"),
)


def bounds(c: Config) -> dict[str, Bound]:
    """What rows are held to, by the names in `expect`, for the numbers that this config computes in."""
    same = Bound(0.0, 0.0, "no arithmetic changes, so no bit may")
    mean = "; the errors are independent and average out (gradient norm: of the first step)"
    amplified = "AdamW divides by the root of a second moment that is tiny in the first steps, which amplifies it"
    exact = c.model_dtype == c.accum_dtype == "float32"
    if c.recipe != "bf16":
        order = _quantised_again(c.recipe, amplified)
    elif exact:
        sums = "the same sums in another order: float32 rounds them by 6e-8, gradients differ by 2e-6 at most"
        order = Bound(1e-4, 1e-4, f"{sums}; {amplified}")
    else:
        sums = "the same sums in another order: bfloat16 rounds each number of a gradient by 2e-3"
        order = Bound(1e-3, 5e-2, f"{sums}; {amplified} (measured: 6e-5 and 8e-3)")
    wider = "what is saved is rounded to bfloat16, what is computed again XLA may keep wider"
    wider += "" if c.recipe == "bf16" else f"; {order.reason}"
    more = order if order.first_norm else same  # two runs drift apart as those of another order do, whatever began it

    def approximate(loss: float, grad_norm: float, what: str) -> Bound:
        return Bound(loss + more.loss, grad_norm + more.grad_norm, what + mean, approximate=True, first_norm=True)

    return {
        "same": same,
        "saved": same if exact else order._replace(reason=wider),
        "order": order,
        "sent_int8": approximate(1e-2, 1e-2, "gradients sent in int8, each off by up to 1/254 of its block's largest"),
        "int8": approximate(1e-2, 1e-2, "weights in int8, each off by up to 1/254 of its block's largest"),
        "fp8": approximate(2e-2, 3e-2, "weights in fp8, each off by up to 1/16 of itself"),
    }


def _quantised_again(recipe: str, amplified: str) -> Bound:
    """For rows that compute the same numbers but for rounding, in a recipe that rounds those again, to fewer bits.

    What a sum in another order moves by a last bit may cross the border between two numbers of the format. Few do, in
    the first step; from then on weights differ, and every step moves more of them.
    """
    borders = "the same sums in another order: few of the operands that they move are rounded to the next number of"
    if recipe == "nvfp4":
        random = "random numbers are others for another number of microbatches or devices, which gradients show"
        reason = f"{borders} 4 bits, a quarter away; {random}; {amplified} (measured: 6e-3 and 1e-2)"
        return Bound(2e-2, 5e-2, f"{reason}; gradient norm: of the first step", first_norm=True)
    reason = f"{borders} 8 bits, an eighth or a quarter away; {amplified} (measured: 8e-4 and 6e-4)"
    return Bound(5e-3, 5e-3, f"{reason}; gradient norm: of the first step", first_norm=True)


def verify(
    config: Config,
    *,
    steps: int = 5,
    only: Sequence[str] | None = None,
    devices: Sequence | None = None,
    report: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Train under each setting that `only` names or matches (`offload_*`; None: under all), one after the other.

    devices: those to use, by default all of JAX's; a row that needs more is skipped, and so is one that the config
    cannot have. `report` is called with each row as it is done. Raises ConfigError for settings that `train` would
    refuse, an unknown name, a missing nvme_path, and a plain run that does not fit on one device; OSError when a disk
    fails.
    """
    if steps < 1:
        raise ConfigError(f"--steps: expected 1 or more, got {steps}; raise it")
    checks.check(config)
    devices = find_devices(0) if devices is None else devices
    if config.nvme_path and not os.path.isdir(config.nvme_path):
        raise ConfigError(f"nvme_path: expected a folder, got {config.nvme_path!r}; create it, or choose another")
    table = {s.name: s for s in settings(config, len(devices))}
    batches, microbatches = make_batches(config, len(devices), steps)
    curves: dict[str, Curve | ConfigError] = {}

    def curve(s: Setting) -> Curve:
        """Of the row, which may be the reference of several. Raises ConfigError, each time, when it cannot run."""
        if s.name not in curves:
            try:
                curves[s.name] = trained(config, s, batches, microbatches * s.split, devices)
            except ConfigError as error:
                curves[s.name] = error
        found = curves[s.name]
        if isinstance(found, ConfigError):
            raise found
        return found

    try:
        curve(table["plain"])
    except ConfigError as error:
        raise ConfigError(f"{error}; or verify a smaller model: --config.model.num_hidden_layers=2") from error
    rows = []
    for s in chosen(table, only):
        started, bound = time.perf_counter(), bounds(config)[s.expect]
        try:
            judged = judge(curve(s), curve(table[s.like]), bound)
        except ConfigError as error:
            if s.name == OWN and s.devices <= len(devices):
                raise
            judged = "skipped", None, None, str(error)
        status, loss, grad_norm, why = judged
        rows.append(Row(s, status, loss, grad_norm, bound, why, time.perf_counter() - started))
        report(rows[-1])
    return rows


def settings(c: Config, devices: int) -> list[Setting]:
    """The rows for a config: SETTINGS, and the config's own settings where they are others than plain."""
    defaults = default_config()
    own = {name: c[name] for name in RESET if c[name] != defaults[name]}
    n = c.gpus or devices
    if not own and n == 1:
        return list(SETTINGS)
    quantised = "sent_int8" if c.zero_quantized_gradients else "order"
    expect = quantised if c.zero_quantized_weights == "none" else c.zero_quantized_weights
    if n == 1 and all(name.startswith(("offload_", "resident_", "nvme_")) for name in own):
        expect = "same"
    return [*SETTINGS, Setting(OWN, own, n, expect=expect)]


def chosen(table: dict[str, Setting], only: Sequence[str] | None) -> list[Setting]:
    """Those rows whose names are given, or match a pattern that is. Raises ConfigError for one that none matches."""
    wanted = set(table if only is None else ())
    for name in only or ():
        found = fnmatch.filter(table, name)
        if not found:
            near = difflib.get_close_matches(name, table, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(f"--only: expected names of settings, got {name!r}; {hint}--list shows them all")
        wanted.update(found)
    return [s for name, s in table.items() if name in wanted]


def make_batches(c: Config, devices: int, steps: int) -> tuple[list[tuple[np.ndarray, np.ndarray]], int]:
    """([(inputs `[B, S]`, labels) of each step], microbatches), the same for every row.

    B is the config's sequences per step, rounded up to what 8 devices and twice as many microbatches can share.
    """
    own, microbatches = c.gpus or devices, max(2, c.gradient_accumulation_steps)
    share = math.lcm(8, own) * microbatches
    sequences = -(-c.per_device_batch_size * c.gradient_accumulation_steps * own // share) * share
    rng, shape = np.random.default_rng(c.seed), (sequences, c.sequence_len)

    def batch():
        # Some tokens are frequent, so that there is something to learn at once, and the loss shows each update.
        inputs = (c.model.vocab_size * rng.random(shape) ** 3).astype(np.int32)
        return inputs, np.where(rng.random(shape) < 0.05, np.int32(-1), np.roll(inputs, -1, axis=-1))

    return [batch() for _ in range(steps)], microbatches


def changed(c: Config, s: Setting, steps: int, sequences: int, microbatches: int) -> Config:
    """The config of a row. Raises ConfigError when there is no such combination."""
    new, defaults = checks.restored_config(c.to_dict()), default_config()
    new.update({name: defaults[name] for name in RESET})
    new.update({"lr_scheduler_type": "cosine", "warmup_steps": 0, "warmup_ratio": 0.0, "cooldown_steps": 0})
    new.update({"max_steps": steps, "num_epochs": 1, "gpus": s.devices})
    new.gradient_accumulation_steps = microbatches
    new.per_device_batch_size = sequences // (microbatches * s.devices)
    new.update(s.changes)
    checks.check(new)
    return new


def trained(c: Config, s: Setting, batches: list, microbatches: int, devices: Sequence) -> Curve:
    """Losses and gradient norms of a row. Raises ConfigError when it cannot run here; see `verify`."""
    if s.devices > len(devices):
        raise ConfigError(f"needs {s.devices} devices, there {'is' if len(devices) == 1 else 'are'} {len(devices)}")
    sequences, devices = batches[0][0].shape[0], devices[: s.devices]
    with contextlib.ExitStack() as until_end:
        if "nvme" in s.changes.values():  # nothing of a run that uses the config's folder is touched
            folder = until_end.enter_context(tempfile.TemporaryDirectory(prefix="verify", dir=c.nvme_path or None))
            s = s._replace(changes=s.changes | {"nvme_path": folder})
        c = changed(c, s, len(batches), sequences, microbatches)
        mesh = make_mesh(devices, dp_replicate_size=c.dp_replicate_size, dp_shard_size=c.dp_shard_size)
        run = from_config(c, mesh, total_steps=len(batches))
        check_fit(c, run, devices)
        if store := nvme.store_of(run.plan):
            until_end.enter_context(nvme.claim(store))
        where, shape = batch_sharding(mesh), (microbatches, sequences // microbatches, c.sequence_len)
        tokens = jax.ShapeDtypeStruct(shape, np.int32, sharding=where)
        step = run.train_step().lower(run.plan, tokens, tokens).compile(run.compiler_options(devices[0].platform))
        state, found = run.init_state(c.seed), []
        for batch in batches:
            # One at a time: several programs with collectives in flight can block each other on virtual CPU devices.
            inputs, labels = jax.block_until_ready(jax.device_put([x.reshape(shape) for x in batch], where))
            state, metrics = jax.block_until_ready(step(state, inputs, labels))
            found.append((float(metrics["loss"]), float(metrics["grad_norm"])))
        return found


def judge(found: Curve, expected: Curve, bound: Bound) -> tuple[str, float, float, str]:
    """(status, largest relative differences of loss and gradient norm, why it failed)."""
    a, b = np.array(found), np.array(expected)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return "FAIL", math.nan, math.nan, "a loss or gradient norm is not finite"
    differences = np.abs(a - b) / np.maximum(np.abs(b), 1e-30)
    if bound.approximate and not differences.any():
        return "FAIL", 0.0, 0.0, "no difference at all: the setting did nothing"
    loss, grad_norm = float(differences[:, 0].max()), float(differences[: 1 if bound.first_norm else None, 1].max())
    compared = (("loss", loss, bound.loss), ("gradient norm", grad_norm, bound.grad_norm))
    too_far = [name for name, x, most in compared if x > most]
    first = next((i for i, same in enumerate((a == b).all(axis=1)) if not same), 0)
    why = f"{' and '.join(too_far)} too far; the first difference is in step {first + 1}" if too_far else ""
    return "FAIL" if too_far else "pass", loss, grad_norm, why


WIDTH = max(len(s.name) for s in SETTINGS) + 2


def heading() -> str:
    """The first line of the table."""
    return f"{'setting':<{WIDTH}}{'compared with':<{WIDTH}}{'loss':>9}{'grad norm':>11}  {'expected':<20}{'s':>6}"


def line(row: Row) -> str:
    """One line of the table, and a second one with the reason if it did not pass."""
    s, b = row.setting, row.bound
    cell = lambda x: "-" if x is None else f"{x:.1e}" if x else "0"
    most = f"{b.loss:.0e} {b.grad_norm:.0e} ({s.expect})" if b.loss else "0"
    text = f"{s.name:<{WIDTH}}{s.like:<{WIDTH}}{cell(row.loss):>9}{cell(row.grad_norm):>11}  {most:<20}"
    return f"{text}{row.seconds:>6.1f}  {row.status}" + (f"\n  {row.why}" if row.why else "")


def summary(rows: list[Row]) -> str:
    """What the bounds mean, and how many rows passed."""
    reasons = {f"{row.setting.expect}: {row.bound.reason}": None for row in rows if row.bound.loss}
    count = lambda status: sum(row.status == status for row in rows)
    skipped = f", {count('skipped')} skipped, which shows nothing about them" if count("skipped") else ""
    return "\n".join([*reasons, f"{count('pass')} passed, {count('FAIL')} failed{skipped}"])


def listing() -> str:
    """Names of all rows, and what they change."""
    what = lambda s: ", ".join(f"{k}={v}" for k, v in s.changes.items()) or ("more microbatches" if s.split > 1 else "")
    return "\n".join(f"{s.name:<{WIDTH}}{what(s)}" for s in SETTINGS)


def main(argv: list[str] | None = None) -> None:
    """Parse the command line, verify, print; exit code 1 when a row fails, and with one line for an error."""
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m surojax.verify", description=about)
    parser.add_argument("--steps", metavar="N", type=int, default=5, help="optimizer steps of each row (5)")
    parser.add_argument("--only", metavar="NAME,...", help="these rows only; offload_* for all that begin so")
    parser.add_argument("--list", action="version", version=listing(), help="print the names of the rows, and exit")
    try:
        c, args = parse(argv, parser)
        only = None if args.only is None else [name.strip() for name in args.only.split(",")]
        if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
            with contextlib.suppress(RuntimeError):  # JAX is in use already: there are as many as there are
                jax.config.update("jax_num_cpu_devices", 8)
        checks.check(c)
        devices = find_devices(0)
        (batches, microbatches), kind = make_batches(c, len(devices), 1), devices[0].device_kind
        size = f"{len(batches[0][0])} sequences of {c.sequence_len} random tokens in {microbatches} microbatches"
        numbers = f"{c.model_dtype}, recipe {c.recipe}"
        print(f"verify: {args.steps} steps of {size}, {numbers}, on up to {len(devices)} x {kind}")
        print(heading(), flush=True)
        rows = verify(c, steps=args.steps, only=only, report=lambda row: print(line(row), flush=True))
        print(summary(rows))
    except (ConfigError, OSError) as error:
        sys.exit(f"surojax.verify: error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    passed = [row for row in rows if row.status == "pass"]
    sys.exit(not passed or any(row.status == "FAIL" for row in rows))


if __name__ == "__main__":
    main()
