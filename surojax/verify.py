"""Checks that memory and parallelism settings do not change the result of training.

    python -m surojax.verify --config configs/tiny.py [--steps N] [--only NAME,...] [--list]

Each row of SETTINGS is one setting. It trains the config's model for a few steps with the config's dtypes, recipe and
optimizer; all rows start from equal weights and use equal batches. The losses and gradient norms of a row are compared
with those of a reference row. They must be bit-exact if the setting changes no arithmetic, and otherwise within a bound
whose reason is stated. A machine without GPUs uses 8 virtual CPU devices.

An 8-bit or 4-bit recipe is compared with itself, not with bf16. Rows that the recipe does not allow are skipped, with
the reason. Rows that change the order of sums have wider bounds, since two almost equal numbers may be rounded to
different neighbours.

A row does not take everything from the config. It uses:

* its own memory and mesh settings; the row "as_configured" has those of the config,
* random tokens, frequent and rare ones, with 5 % of the labels ignored; with sample_packing documents of 16 on average,
* at least 2 microbatches, so that accumulators are read,
* a learning rate that starts at its peak, so that every update is large enough to show.

Each row compiles its own program and then trains, which takes seconds for configs/tiny.py. For a large model, set fewer
layers and keep the width, since the settings work layer by layer.

`verify(config)` is the function behind this command; the tests call it.
"""

import argparse
import collections
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
from surojax.exchange.sources import resolved
from surojax.memory import nvme
from surojax.placement import table as placement
from surojax.placement.layout import batch_sharding
from surojax.placement.mesh import find_devices, make_mesh
from surojax.planner.check_fit import check_fit

type Curve = list[tuple[float, float]]  # (loss, gradient norm) of each step


class Bound(NamedTuple):
    """The largest allowed difference between a row and its reference: relative, over all steps; and the reason for it.

    approximate: the setting computes with rounded numbers, so no difference at all means that it had no effect.
    first_norm: gradient norms are compared in the first step only. Rounding to 8 bits may change the sign of small
      gradients. AdamW turns them into updates of full size, so from the second step on the weights differ, and near a
      minimum the gradient norm depends on that difference more than on the error of the rounding.
    """

    loss: float
    grad_norm: float
    reason: str
    approximate: bool = False
    first_norm: bool = False


class Setting(NamedTuple):
    """A row of the table: a setting, and the row that it is compared with."""

    name: str
    changes: dict[str, Any]  # {field of the config: value}
    devices: int = 1
    like: str = "plain"  # name of the reference row
    expect: str = "same"  # name of the bound, see `bounds`
    split: int = 1  # factor on the number of microbatches


class Row(NamedTuple):
    """The result of a row."""

    setting: Setting
    status: str  # "pass", "FAIL" or "skipped"
    loss: float | None  # largest relative difference over the steps; None if skipped
    grad_norm: float | None  # as `loss`, over the steps that the bound compares
    bound: Bound
    why: str  # reason if it failed or was skipped, else ""
    seconds: float


OFFLOADS = ("offload_residual", "offload_optimizer", "offload_master", "offload_grads", "offload_weights")
ALL: dict[str, Any] = dict.fromkeys(OFFLOADS, True)
NVME: dict[str, Any] = {"offload_optimizer": "nvme", "offload_master": "nvme"}
SAVED: dict[str, Any] = {"recompute_block": False}
PACKED: dict[str, Any] = {"sample_packing": True}
PARTS: dict[str, Any] = dict.fromkeys(configs.RECOMPUTE_PARTS, True)
GROUPED: dict[str, Any] = {"microbatches_per_fetch": 2}
OVERLAPPED: dict[str, Any] = ALL | {"overlap_update": True}
CHUNKS: dict[str, Any] = {"sequence_chunks": 4}
ZERO3: dict[str, Any] = {"zero_level": 3}
TP: dict[str, Any] = {"tp_size": 2}
ZERO3_TP: dict[str, Any] = ZERO3 | TP
CP: dict[str, dict[str, Any]] = {
    "ulysses": {"cp_size": 2},
    "allgather": {"cp_size": 2, "cp_method": "allgather", "attention": "xla"},
    "ring": {"cp_size": 2, "cp_method": "ring", "attention": "xla"},
}
PP: dict[str, Any] = {"pp_size": 2}
PP_1F1B: dict[str, Any] = PP | {"pp_schedule": "1f1b"}
FP8: dict[str, Any] = {"zero_level": 3, "zero_quantized_weights": "fp8"}
INT8: dict[str, Any] = {"zero_level": 3, "zero_quantized_weights": "int8"}
QUANTS: dict[str, Any] = {"persistent_quants": True, "offload_quants": True}

# To add a setting, add a line. @n in a name: on n devices.
SETTINGS: tuple[Setting, ...] = (
    Setting("plain", {}),
    # Activations
    Setting("recompute_block=false", SAVED, expect="saved"),
    *(Setting(part, SAVED | {part: True}, expect="saved") for part in PARTS),
    Setting("recompute_parts", SAVED | PARTS, expect="saved"),
    Setting("sequence_chunks", CHUNKS, expect="order"),
    Setting("sequence_chunks_packed", CHUNKS | PACKED, like="sample_packing", expect="order"),
    Setting("lmhead_chunks", {"lmhead_chunks": 8}, expect="order"),
    Setting("gradient_accumulation_steps", {}, expect="order", split=2),
    Setting("microbatches_per_fetch", GROUPED, like="gradient_accumulation_steps", expect="grouped", split=2),
    Setting("sample_packing", PACKED, expect="documents"),
    # Host memory
    Setting("offload_grouped", ALL | GROUPED, like="gradient_accumulation_steps", expect="grouped", split=2),
    *(Setting(name, {name: True}) for name in OFFLOADS),
    Setting("offload_all", ALL),
    Setting("overlap_update", OVERLAPPED),
    Setting("sequence_chunks_offload_all", CHUNKS | ALL, like="sequence_chunks"),
    Setting("resident_layers", {"offload_weights": True, "resident_layers": 1}),
    Setting("offload_saved", SAVED | ALL, like="recompute_block=false"),
    *(Setting(f"{name}@4", ZERO3 | {name: True}, 4, like="zero_level=3@4") for name in OFFLOADS),
    Setting("offload_all@4", ZERO3 | ALL, 4, like="zero_level=3@4"),
    Setting("offload_grouped@4", ZERO3 | ALL | GROUPED, 4, like="zero_level=3@4", expect="grouped"),
    Setting("overlap_update@4", ZERO3 | OVERLAPPED, 4, like="zero_level=3@4"),
    Setting("resident_layers@4", ZERO3 | ALL | {"resident_layers": 1}, 4, like="zero_level=3@4"),
    Setting("offload_saved@4", ZERO3 | SAVED | ALL, 4, like="zero_level=3@4", expect="saved"),
    # Disk
    Setting("offload_optimizer=nvme", {"offload_optimizer": "nvme"}),
    Setting("offload_master=nvme", {"offload_master": "nvme"}),
    Setting("nvme@4", ZERO3 | ALL | NVME, 4, like="zero_level=3@4"),
    # Mesh
    *(Setting(f"zero_level={n}@4", {"zero_level": n}, 4, expect="order") for n in (1, 2, 3)),
    Setting("shard_gradients@4", {"shard_gradients": True}, 4, expect="order"),
    Setting("shard_weights@4", {"shard_weights": True}, 4, expect="order"),
    Setting("shard_outer@4", ZERO3 | {"shard_outer": True}, 4, expect="order"),
    Setting("shard_outer_offload_all@4", ZERO3 | ALL | {"shard_outer": True}, 4, like="shard_outer@4"),
    Setting("zero_level=3@8", ZERO3, 8, expect="order"),
    Setting("sequence_chunks@4", ZERO3 | CHUNKS, 4, expect="order"),
    Setting("hsdp_2x2", ZERO3 | {"dp_replicate_size": 2}, 4, expect="order"),
    Setting("hsdp_2x4", ZERO3 | {"dp_replicate_size": 2}, 8, expect="order"),
    Setting("hsdp_2x4_offload_all", ZERO3 | ALL | {"dp_replicate_size": 2, "shard_outer": True}, 8, expect="order"),
    # Tensor parallelism: dp_shard_size x tp_size, or dp_replicate_size x dp_shard_size x tp_size
    Setting("tp@2", TP, 2, expect="order"),
    Setting("tp_saved@2", TP | SAVED, 2, like="tp@2", expect="saved"),
    Setting("tp_offload_all@2", TP | ALL, 2, like="tp@2"),
    *(Setting(f"zero_level={n}_tp_2x2", {"zero_level": n} | TP, 4, expect="order") for n in (1, 2, 3)),
    *(Setting(f"{name}_tp_2x2", ZERO3_TP | {name: True}, 4, like="zero_level=3_tp_2x2") for name in OFFLOADS),
    Setting("offload_all_tp_2x2", ZERO3_TP | ALL, 4, like="zero_level=3_tp_2x2"),
    Setting("offload_saved_tp_2x2", ZERO3_TP | SAVED | ALL, 4, like="zero_level=3_tp_2x2", expect="saved"),
    Setting("resident_layers_tp_2x2", ZERO3_TP | ALL | {"resident_layers": 1}, 4, like="zero_level=3_tp_2x2"),
    Setting("sample_packing_tp_2x2", ZERO3_TP | PACKED, 4, like="sample_packing", expect="order"),
    Setting("shard_outer_tp_2x2", ZERO3_TP | {"shard_outer": True}, 4, expect="order"),
    Setting("lmhead_chunks_tp_2x2", ZERO3_TP | {"lmhead_chunks": 4}, 4, expect="order"),
    Setting("use_all_to_all_reduce_tp_2x2", ZERO3_TP | {"use_all_to_all_reduce": True}, 4, expect="order"),
    Setting("offload_grouped_tp_2x2", ZERO3_TP | ALL | GROUPED, 4, like="zero_level=3_tp_2x2", expect="grouped"),
    Setting("nvme_tp_2x2", ZERO3_TP | ALL | NVME, 4, like="zero_level=3_tp_2x2"),
    Setting(
        "zero_quantized_gradients_tp_2x2",
        ZERO3_TP | {"zero_quantized_gradients": True},
        4,
        like="zero_level=3_tp_2x2",
        expect="sent_int8",
    ),
    Setting("zero_quantized_weights=fp8_tp_2x2", FP8 | TP, 4, like="zero_level=3_tp_2x2", expect="fp8"),
    Setting("zero_quantized_weights=int8_tp_2x2", INT8 | TP, 4, like="zero_level=3_tp_2x2", expect="int8"),
    Setting("offload_quants_tp_2x2", FP8 | QUANTS | ALL | TP, 4, like="zero_quantized_weights=fp8_tp_2x2"),
    Setting("hsdp_tp_2x2x2", ZERO3_TP | {"dp_replicate_size": 2}, 8, expect="order"),
    Setting("hsdp_tp_2x2x2_offload_all", ZERO3_TP | ALL | {"dp_replicate_size": 2}, 8, like="hsdp_tp_2x2x2"),
    # Context parallelism: dp_shard_size x cp_size, with dp_replicate_size before it or tp_size behind it
    *(Setting(f"cp_{name}_2x2", ZERO3 | of_method, 4, expect="order") for name, of_method in CP.items()),
    *(
        Setting(f"cp_{name}_2x4", ZERO3 | of_method | {"cp_size": 4}, 8, expect="order")
        for name, of_method in CP.items()
    ),
    *(
        Setting(f"cp_{name}_{part}_2x2", ZERO3 | of_method | changes, 4, like=f"cp_{name}_2x2", expect=expect)
        for name, of_method in CP.items()
        for part, changes, expect in (
            ("saved", SAVED, "saved"),
            ("offload_all", ALL, "same"),
            ("offload_saved", SAVED | ALL, "saved"),
        )
    ),
    *(
        Setting(f"cp_{name}_sample_packing_2x2", ZERO3 | of_method | PACKED, 4, like="sample_packing", expect="order")
        for name, of_method in CP.items()
    ),
    *(Setting(f"zero_level={n}_cp_2x2", {"zero_level": n} | CP["ulysses"], 4, expect="order") for n in (1, 2)),
    Setting("shard_outer_cp_2x2", ZERO3 | CP["ulysses"] | {"shard_outer": True}, 4, expect="order"),
    Setting("use_all_to_all_reduce_cp_2x2", ZERO3 | CP["ulysses"] | {"use_all_to_all_reduce": True}, 4, expect="order"),
    Setting("resident_layers_cp_2x2", ZERO3 | CP["ring"] | ALL | {"resident_layers": 1}, 4, like="cp_ring_2x2"),
    Setting("hsdp_cp_2x2x2", ZERO3 | CP["ulysses"] | {"dp_replicate_size": 2}, 8, expect="order"),
    Setting(
        "hsdp_cp_2x2x2_offload_all", ZERO3 | ALL | CP["ulysses"] | {"dp_replicate_size": 2}, 8, like="hsdp_cp_2x2x2"
    ),
    *(Setting(f"cp_{name}_tp_2x2", of_method | TP, 4, expect="order") for name, of_method in CP.items()),
    *(Setting(f"cp_{name}_tp_2x2x2", ZERO3_TP | of_method, 8, expect="order") for name, of_method in CP.items()),
    *(
        Setting(f"cp_{name}_tp_offload_all_2x2x2", ZERO3_TP | ALL | of_method, 8, like=f"cp_{name}_tp_2x2x2")
        for name, of_method in CP.items()
    ),
    # Pipeline parallelism: pp_size x dp_shard_size, x tp_size or with dp_replicate_size before dp_shard_size
    Setting("pp@2", PP, 2, expect="order"),
    Setting("pp_1f1b@2", PP_1F1B, 2, like="pp@2", expect="grouped"),
    Setting("pp_saved@2", PP | SAVED, 2, like="pp@2", expect="saved"),
    *(Setting(f"zero_level={n}_pp_2x2", {"zero_level": n} | PP, 4, expect="order") for n in (1, 2, 3)),
    Setting("zero_level=3_pp_1f1b_2x2", ZERO3 | PP_1F1B, 4, like="zero_level=3_pp_2x2", expect="grouped"),
    *(Setting(f"{name}_pp_2x2", ZERO3 | PP | {name: True}, 4, like="zero_level=3_pp_2x2") for name in OFFLOADS),
    Setting("offload_all_pp_1f1b_2x2", ZERO3 | PP_1F1B | ALL, 4, like="zero_level=3_pp_1f1b_2x2"),
    Setting("offload_saved_pp@2", PP | SAVED | ALL, 2, like="pp_saved@2"),
    Setting("sample_packing_pp_2x2", ZERO3 | PP | PACKED, 4, like="sample_packing", expect="order"),
    Setting("shard_outer_pp_2x2", ZERO3 | PP | {"shard_outer": True}, 4, expect="order"),
    Setting("lmhead_chunks_pp_2x2", ZERO3 | PP | {"lmhead_chunks": 4}, 4, expect="order"),
    Setting("use_all_to_all_reduce_pp_2x2", ZERO3 | PP | {"use_all_to_all_reduce": True}, 4, expect="order"),
    Setting("hsdp_pp_2x2x2", ZERO3 | PP | {"dp_replicate_size": 2}, 8, expect="order"),
    Setting("pp_tp_2x2", PP | TP, 4, expect="order"),
    Setting("zero_level=3_pp_tp_2x2x2", ZERO3 | PP | TP, 8, expect="order"),
    Setting("offload_all_pp_tp_2x2x2", ZERO3 | PP | TP | ALL, 8, like="zero_level=3_pp_tp_2x2x2"),
    # Communication
    Setting("use_all_to_all_reduce@4", ZERO3 | {"use_all_to_all_reduce": True}, 4, expect="order"),
    Setting(
        "zero_quantized_gradients@4",
        ZERO3 | {"zero_quantized_gradients": True},
        4,
        like="zero_level=3@4",
        expect="sent_int8",
    ),
    Setting("zero_quantized_weights=fp8@4", FP8, 4, like="zero_level=3@4", expect="fp8"),
    Setting("zero_quantized_weights=int8@4", INT8, 4, like="zero_level=3@4", expect="int8"),
    Setting("persistent_quants=fp8@4", FP8 | {"persistent_quants": True}, 4, like="zero_quantized_weights=fp8@4"),
    Setting("persistent_quants=int8@4", INT8 | {"persistent_quants": True}, 4, like="zero_quantized_weights=int8@4"),
    Setting("offload_quants@4", FP8 | QUANTS, 4, like="zero_quantized_weights=fp8@4"),
    Setting("offload_quants_all@4", FP8 | QUANTS | ALL, 4, like="zero_quantized_weights=fp8@4"),
    Setting("memcpy_all_gather@4", ZERO3 | {"memcpy_all_gather": True}, 4, like="zero_level=3@4"),
    Setting(
        "memcpy_send_recv@4",
        ZERO3 | {"use_all_to_all_reduce": True, "memcpy_send_recv": True},
        4,
        like="use_all_to_all_reduce@4",
    ),
)

OWN = "as_configured"
NUMBERS = ("recipe", "model_dtype", "accum_dtype", "master_dtype")  # settings of `place` that rows take from the config
RESET = (  # fields that have their defaults in every row that does not change them
    *(name for name in placement.SETTINGS if name not in NUMBERS),
    *("recompute_block", *configs.RECOMPUTE_PARTS, "lmhead_chunks", "dp_replicate_size", "dp_shard_size"),
    *("sample_packing", "sequence_chunks", "microbatches_per_fetch", "cp_size", "cp_method", "tp_size"),
    *("pp_size", "pp_schedule", "overlap_update"),
)


def bounds(c: Config) -> dict[str, Bound]:
    """Returns {name in `Setting.expect`: bound}, for the dtypes and the recipe of a config."""
    same = Bound(0.0, 0.0, "no arithmetic changes, so the results must be bit-exact")
    mean = "; the errors are independent and average out (gradient norm: first step only)"
    amplified = "AdamW divides by the root of the second moment, which is tiny in the first steps and amplifies this"
    exact = c.model_dtype == c.accum_dtype == "float32"
    if c.recipe != "bf16":
        order = _quantised_again(c.recipe, amplified)
    elif exact:
        sums = "sums are in another order: float32 rounds them by 6e-8, so gradients differ by 2e-6 at most"
        order = Bound(1e-4, 1e-4, f"{sums}; {amplified}")
    else:
        sums = "sums are in another order: bfloat16 rounds each number of a gradient by 2e-3"
        order = Bound(1e-3, 5e-2, f"{sums}; {amplified} (measured: 6e-5 and 8e-3)")
    rounded = "saved residuals are rounded to bfloat16, recomputed ones XLA may keep in float32"
    rounded += "" if c.recipe == "bf16" else f"; {order.reason}"
    # With an 8-bit or 4-bit recipe, any difference grows as much as one from another order of sums.
    drift = order if order.first_norm else same

    def approximate(loss: float, grad_norm: float, error: str) -> Bound:
        return Bound(loss + drift.loss, grad_norm + drift.grad_norm, error + mean, approximate=True, first_norm=True)

    return {
        "same": same,
        "saved": same if exact else order._replace(reason=rounded),
        # A head that is also the embedding gets the gradients of a group's heads before those of its embeddings, and
        # with stages in the order of their schedule.
        "grouped": order if c.model.tie_word_embeddings else same,
        "order": order,
        "documents": Bound(1.0, 1.0, "no token sees the documents before its own", approximate=True),
        "sent_int8": approximate(1e-2, 1e-2, "gradients sent in int8, each off by up to 1/254 of its block's largest"),
        "int8": approximate(1e-2, 1e-2, "weights in int8, each off by up to 1/254 of its block's largest"),
        "fp8": approximate(2e-2, 3e-2, "weights in fp8, each off by up to 1/16 of itself"),
    }


def _quantised_again(recipe: str, amplified: str) -> Bound:
    """Returns the bound of rows that change the order of sums, with a recipe that rounds to 8 or 4 bits.

    Another order of a sum changes its last bit, and rounding to 8 or 4 bits may then give the neighbouring number. This
    happens to few numbers in the first step. From then on the weights differ, and it happens to more in every step.
    """
    borders = "sums are in another order: a few of the changed operands are rounded to the neighbouring number of"
    if recipe == "nvfp4":
        random = "random numbers depend on the number of microbatches and devices, and change the gradients"
        reason = f"{borders} 4 bits, a quarter away; {random}; {amplified} (measured: 6e-3 and 1e-2)"
        return Bound(2e-2, 5e-2, f"{reason}; gradient norm: first step only", first_norm=True)
    reason = f"{borders} 8 bits, an eighth or a quarter away; {amplified} (measured: 8e-4 and 6e-4)"
    return Bound(5e-3, 5e-3, f"{reason}; gradient norm: first step only", first_norm=True)


def verify(
    config: Config,
    *,
    steps: int = 5,
    only: Sequence[str] | None = None,
    devices: Sequence | None = None,
    report: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Trains under each setting in turn and returns the rows.

    steps: optimizer steps of each row.
    only: names of rows, or patterns such as `offload_*`; None: all rows.
    devices: the devices to use; None: all devices of JAX. A row that needs more devices is skipped, and so is a row
      that the config does not allow.
    report: called with each row as soon as it is done.

    Raises ConfigError for settings that `train` would refuse, an unknown name, a missing nvme_path, or a plain run that
    does not fit on one device. Raises OSError if a disk fails.
    """
    if steps < 1:
        raise ConfigError(f"--steps: expected 1 or more, got {steps}; raise it")
    config = resolved(config)
    checks.check(config)
    devices = find_devices(0) if devices is None else devices
    if config.nvme_path and not os.path.isdir(config.nvme_path):
        raise ConfigError(f"nvme_path: expected a folder, got {config.nvme_path!r}; create it, or choose another")
    table = {s.name: s for s in settings(config, len(devices))}
    batches, microbatches = make_batches(config, len(devices), steps)
    curves: dict[str, Curve | ConfigError] = {}

    def curve(s: Setting) -> Curve:
        """Returns the curve of a row, computed once. Raises ConfigError, in every call, if the row cannot run."""
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
        started = time.perf_counter()
        bound = bounds(config)[s.expect]
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
    """Returns the rows for a config: SETTINGS, and a row with the config's own settings unless they equal "plain"."""
    defaults = default_config()
    own = {name: c[name] for name in RESET if c[name] != defaults[name]}
    n = c.gpus or devices
    if not own and n == 1:
        return list(SETTINGS)
    quantised = "sent_int8" if c.zero_quantized_gradients else "order"
    expect = quantised if c.zero_quantized_weights == "none" else c.zero_quantized_weights
    if n == 1 and all(name.startswith(("offload_", "resident_", "nvme_", "microbatches_per_fetch")) for name in own):
        expect = "grouped" if "microbatches_per_fetch" in own else "same"
    return [*SETTINGS, Setting(OWN, own, n, expect=expect)]


def chosen(table: dict[str, Setting], only: Sequence[str] | None) -> list[Setting]:
    """Returns the rows that `only` names or matches; None: all. Raises ConfigError for a name that matches no row."""
    wanted = set(table if only is None else ())
    for name in only or ():
        found = fnmatch.filter(table, name)
        if not found:
            near = difflib.get_close_matches(name, table, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(f"--only: expected names of settings, got {name!r}; {hint}--list shows them all")
        wanted.update(found)
    return [s for name, s in table.items() if name in wanted]


def make_batches(c: Config, devices: int, steps: int) -> tuple[list[tuple[np.ndarray, ...]], int]:
    """Returns ([(inputs, labels, starts) of each step, int32 `[B, S]`], number of microbatches), used by every row.

    B is the config's sequences per step, rounded up so that each microbatch divides evenly over 8 devices, over the
    config's own groups of GPUs with the same sequences, and on one device into two.
    """
    own_groups = max(1, (c.gpus or devices) // configs.gpus_per_sequence(c))
    microbatches = max(2, c.gradient_accumulation_steps)
    multiple = math.lcm(8, own_groups) * microbatches
    sequences = -(-c.per_device_batch_size * c.gradient_accumulation_steps * own_groups // multiple) * multiple
    rng, of_documents = np.random.default_rng(c.seed), np.random.default_rng((c.seed, 1))
    shape = (sequences, c.sequence_len)

    def batch():
        # Some tokens are frequent. The model learns their frequencies in the first steps, so every update shows.
        inputs = (c.model.vocab_size * rng.random(shape) ** 3).astype(np.int32)
        labels = np.where(rng.random(shape) < 0.05, np.int32(-1), np.roll(inputs, -1, axis=-1))
        begins = np.where(of_documents.random(shape) < 1 / 16, np.arange(c.sequence_len, dtype=np.int32), 0)
        return inputs, labels, np.maximum.accumulate(begins, axis=1, dtype=np.int32)

    return [batch() for _ in range(steps)], microbatches


def changed(c: Config, s: Setting, steps: int, sequences: int, microbatches: int) -> Config:
    """Returns the config of a row. Raises ConfigError if its fields contradict each other."""
    new = checks.restored_config(c.to_dict())
    defaults = default_config()
    new.update({name: defaults[name] for name in RESET})
    new.update({"lr_scheduler_type": "cosine", "warmup_steps": 0, "warmup_ratio": 0.0, "cooldown_steps": 0})
    new.update({"max_steps": steps, "num_epochs": 1, "gpus": s.devices})
    new.gradient_accumulation_steps = microbatches
    new.update(s.changes)
    new.per_device_batch_size = sequences * configs.gpus_per_sequence(new) // (microbatches * s.devices)
    checks.check(new)
    return new


def trained(c: Config, s: Setting, batches: list, microbatches: int, devices: Sequence) -> Curve:
    """Trains a row and returns its losses and gradient norms. Raises ConfigError if it cannot run here."""
    if s.devices > len(devices):
        raise ConfigError(f"needs {s.devices} devices, there {'is' if len(devices) == 1 else 'are'} {len(devices)}")
    sequences = batches[0][0].shape[0]
    devices = devices[: s.devices]
    with contextlib.ExitStack() as until_end:
        if "nvme" in s.changes.values():  # in a folder of its own: another run may be using nvme_path
            folder = until_end.enter_context(tempfile.TemporaryDirectory(prefix="verify", dir=c.nvme_path or None))
            s = s._replace(changes=s.changes | {"nvme_path": folder})
        c = changed(c, s, len(batches), sequences, microbatches)
        mesh = make_mesh(devices, **configs.mesh_sizes(c))
        run = from_config(c, mesh, total_steps=len(batches))
        check_fit(c, run, devices)
        if store := nvme.store_of(run.plan):
            until_end.enter_context(nvme.claim(store))
        sharding = batch_sharding(mesh)
        shape = (microbatches, sequences // microbatches, c.sequence_len)
        tokens = jax.ShapeDtypeStruct(shape, np.int32, sharding=sharding)
        arrays = [tokens for _ in run.engine.batch_arrays]
        step = run.train_step().lower(run.plan, *arrays).compile(run.compiler_options(devices[0].platform))
        state = run.init_state(c.seed)
        curve = []
        for batch in batches:
            # One step at a time: programs with collectives in flight can block each other on virtual CPU devices.
            arrays = jax.block_until_ready(jax.device_put([x.reshape(shape) for x in batch[: len(arrays)]], sharding))
            state, metrics = jax.block_until_ready(step(state, *arrays))
            curve.append((float(metrics["loss"]), float(metrics["grad_norm"])))
        return curve


def judge(found: Curve, expected: Curve, bound: Bound) -> tuple[str, float, float, str]:
    """Returns (status, largest relative difference of the loss, of the gradient norm, reason of a failure or "")."""
    a = np.array(found)
    b = np.array(expected)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return "FAIL", math.nan, math.nan, "a loss or gradient norm is not finite"
    differences = np.abs(a - b) / np.maximum(np.abs(b), 1e-30)
    if bound.approximate and not differences.any():
        return "FAIL", 0.0, 0.0, "no difference at all: the setting did nothing"
    loss = float(differences[:, 0].max())
    grad_norm = float(differences[: 1 if bound.first_norm else None, 1].max())
    compared = (("loss", loss, bound.loss), ("gradient norm", grad_norm, bound.grad_norm))
    too_far = [name for name, x, most in compared if x > most]
    first = next((i for i, same in enumerate((a == b).all(axis=1)) if not same), 0)
    why = f"{' and '.join(too_far)} too far; the first difference is in step {first + 1}" if too_far else ""
    return "FAIL" if too_far else "pass", loss, grad_norm, why


WIDTH = max(len(s.name) for s in SETTINGS) + 2


def heading() -> str:
    """Returns the first line of the table."""
    return f"{'setting':<{WIDTH}}{'compared with':<{WIDTH}}{'loss':>9}{'grad norm':>11}  {'expected':<20}{'s':>6}"


def line(row: Row) -> str:
    """Returns one line of the table, and a second line with the reason if the row did not pass."""
    s = row.setting
    b = row.bound

    def cell(difference: float | None) -> str:
        return "-" if difference is None else f"{difference:.1e}" if difference else "0"

    limits = f"{b.loss:.0e} {b.grad_norm:.0e} ({s.expect})" if b.loss else "0"
    text = f"{s.name:<{WIDTH}}{s.like:<{WIDTH}}{cell(row.loss):>9}{cell(row.grad_norm):>11}  {limits:<20}"
    return f"{text}{row.seconds:>6.1f}  {row.status}" + (f"\n  {row.why}" if row.why else "")


def summary(rows: list[Row]) -> str:
    """Returns the reason of each bound, once, and the numbers of rows that passed, failed and were skipped."""
    reasons = dict.fromkeys(f"{row.setting.expect}: {row.bound.reason}" for row in rows if row.bound.loss)
    count = collections.Counter(row.status for row in rows)
    skipped = f", {count['skipped']} skipped, which shows nothing about them" if count["skipped"] else ""
    return "\n".join([*reasons, f"{count['pass']} passed, {count['FAIL']} failed{skipped}"])


def listing() -> str:
    """Returns the names of all rows with the fields that they change."""

    def changes(s: Setting) -> str:
        return ", ".join(f"{k}={v}" for k, v in s.changes.items()) or ("more microbatches" if s.split > 1 else "")

    return "\n".join(f"{s.name:<{WIDTH}}{changes(s)}" for s in SETTINGS)


def main(argv: list[str] | None = None) -> None:
    """Parse the command line, verify, and print the table. Exits with 1 if a row fails, with one line for an error."""
    description = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m surojax.verify", description=description)
    parser.add_argument("--steps", metavar="N", type=int, default=5, help="optimizer steps of each row (5)")
    parser.add_argument("--only", metavar="NAME,...", help="only these rows; names or patterns such as offload_*")
    parser.add_argument("--list", action="version", version=listing(), help="print the names of the rows, and exit")
    try:
        c, args = parse(argv, parser)
        only = None if args.only is None else [name.strip() for name in args.only.split(",")]
        if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
            with contextlib.suppress(RuntimeError):  # JAX has started: its number of devices is fixed
                jax.config.update("jax_num_cpu_devices", 8)
        c = resolved(c)
        checks.check(c)
        devices = find_devices(0)
        batches, microbatches = make_batches(c, len(devices), 1)
        kind = devices[0].device_kind
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
