"""Where each tensor class is stored: one table, filled from the settings. No other code reads these settings.

| class     | what it is                                   | sharded over dp_shard x cp by     | in host memory by |
|-----------|----------------------------------------------|-----------------------------------|-------------------|
| weights   | work copy of the block weights               | zero_level >= 3 / shard_weights   | offload_weights * |
| quants    | block matrices in 8 bits, if persistent      | as weights                        | offload_quants    |
| outer     | embedding, final norm, head: work copies     | shard_outer                       | never             |
| grads     | gradient accumulators of the blocks          | zero_level >= 2 / shard_gradients | offload_grads     |
| master    | the weights the optimizer updates            | always (ZeRO-1)                   | offload_master    |
| moments   | optimizer state                              | always (ZeRO-1)                   | offload_optimizer |
| residuals | what a forward pass saves for the backward   | by batch                          | offload_residual  |

* except the first `resident_layers`, which stay in device memory. Of grads, master and moments, `device_memory` GiB do:
all layers of some tensors, so that every layer has as much less to move (`state_plan.with_device_memory`). With classes
in files it is room for tensors of the layer that is updated next (`file_step.on_their_way`).

`offload_weights`, `offload_master`, `offload_optimizer`, `offload_grads` and `offload_residual` can also be "nvme".
Then what belongs to the blocks is stored in a file under `nvme_path` (memory/in_file.py), but for `files_in_memory`
GiB of it, which stay in host memory. With `offload_master` and `offload_optimizer` that is the state of embedding and
head, too, which a step reads and writes in pieces of their rows (step/tables.py). Their weights and gradients are on
the device, which needs them whole; the state of the final norm is in pinned host memory.

Quantised weights are all-gathered in 8 bits (numerics/quantized.py). They are used with `zero_quantized_weights`, and
with the recipes fp8_*, also on one device. By default they are made from `weights` whenever a layer is fetched. With
`persistent_quants` they are made once, after the update, and stored in the state instead of the 16-bit matrices. Then
`weights` has vectors only, and `offload_weights` moves these vectors only.

With `qlora_bnb`, `qlora_fp8`, `qlora_fp4` or `qlora_mxfp4` block matrices that are not trained are `weights` in 4 or 8
bits: stored, copied and gathered so.

Tensor parallelism shards what it divides in every class, before and besides `dp_shard` (`layout.MESH_AXES`).

`layout.layouts` turns the table into a layout for each parameter and tensor class.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal

import jax

from surojax.declared import FLOATS, Facts, declare, declared, same_as
from surojax.numerics import quantized
from surojax.numerics.base_formats import FORMATS, chosen_format
from surojax.numerics.recipes import Precision
from surojax.offloads import BY_LAYER, TO_FILES, OffloadOptions, Offloads, Row
from surojax.placement.home import DEVICE, HOST, NVME, Home
from surojax.placement.param import EXPERTS, Kind, Param
from surojax.refusals.pairs import TABLE
from surojax.refusals.refusal import refuse

Mesh = jax.sharding.Mesh | jax.sharding.AbstractMesh
ZERO_LEVELS = (1, 2, 3)
WEIGHT_FORMATS = ("none", *quantized.DTYPES)  # that weights are gathered in, in place of 16 bits
Reduce = Literal["reduce_scatter", "all_to_all", "int8"]  # how gradients are summed, see collectives.reduce_scatter


@dataclasses.dataclass(frozen=True)
class TensorClass:
    """One tensor class."""

    dtype: str
    sharded: bool  # over dp_shard x cp
    home: Home = DEVICE
    resident: int = 0  # number of layers in device memory if the home of the others is host memory


@dataclasses.dataclass(frozen=True)
class Placement:
    """The placement table. The optimizer chooses the dtypes of `moments`, the model the dtypes of `residuals`.

    quants: dtype "" if weights are not quantised; home is used if they are persistent.
    one_scale: quantised weights have one scale per matrix, and are operands of products (recipes fp8_*).
    base_format: that block matrices which are not trained are stored in, in the home of `weights`: a name in
    `base_formats.FORMATS`; "": in 16 or 32 bits.
    reduce: how gradients are summed over `dp_shard x cp`, see `collectives.reduce_scatter`.
    copy_engine: the enabled settings of `collectives.COPY_ENGINE`.
    folder: of the file of the classes whose home is nvme. files_in_memory: bytes of it that are in host memory. slots:
    of the state there, see memory/slots.py. device_memory: bytes of `TO_DEVICE` that are on each device, though their
    home is host memory; if a class is in files, of one layer's.
    """

    weights: TensorClass
    quants: TensorClass
    outer: TensorClass
    grads: TensorClass
    master: TensorClass
    moments: TensorClass
    residuals: TensorClass
    persistent_quants: bool = False
    one_scale: bool = False
    base_format: str = ""
    reduce: Reduce = "reduce_scatter"
    copy_engine: tuple[str, ...] = ()
    folder: str = ""
    files_in_memory: int = 0
    device_memory: int = 0
    slots: int = 1

    @property
    def in_files(self) -> bool:
        """True if a tensor class is stored in files."""
        rows = (getattr(self, field.name) for field in dataclasses.fields(self))
        return any(isinstance(row, TensorClass) and row.home.in_file for row in rows)

    @property
    def leaves_device(self) -> bool:
        """True if a tensor class is stored in host memory or in files, so that a step copies layers of it."""
        rows = (getattr(self, field.name) for field in dataclasses.fields(self))
        return any(isinstance(row, TensorClass) and row.home.streamed for row in rows)

    @property
    def by_layer(self) -> bool:
        """True if weights, gradients or residuals are in files, so that a step's programs compute one layer each."""
        return any(getattr(self, name).home.in_file for name in BY_LAYER)

    @property
    def quantises_shards(self) -> bool:
        """True if matrices are quantised before they are gathered; codes of a base are when their layer begins."""
        return bool(self.quants.dtype) and not self.base_format

    @property
    def streams_weights(self) -> bool:
        """True if a layer's weights, or its quants, are copied in from host memory."""
        return self.weights.home.streamed or self.quants.home.streamed


@dataclasses.dataclass(frozen=True)
class Storage(Offloads, OffloadOptions):
    """The settings that say where each tensor class is stored, and in which format: fields of the config."""

    # shards over dp_shard x cp: 1 = optimizer state, 2 = + gradients, 3 = + block weights
    zero_level: int = declare(1, choices=ZERO_LEVELS, facts=Facts.COST)
    # shard the gradient accumulators; unset = zero_level >= 2
    shard_gradients: bool | None = declare(None, facts=Facts.COST)
    # shard the block weights; unset = zero_level >= 3
    shard_weights: bool | None = declare(None, facts=Facts.COST)
    # shard embedding and head by token id, for large vocabularies; XLA then computes the loss
    shard_outer: bool = declare(False, facts=Facts.COST)
    # all-gather block matrices in 8 bits: none, fp8 or int8; needs zero_level=3
    zero_quantized_weights: str = declare("none", choices=WEIGHT_FORMATS, facts=Facts.COST_AND_NUMBERS)
    # store the 8-bit matrices in place of 16-bit ones; quantised once a step
    persistent_quants: bool = declare(False, facts=Facts.COST)
    # store the 8-bit matrices in pinned host memory; needs persistent_quants
    offload_quants: bool = declare(False, facts=Facts.COST, row=Row("quants", "quantised weights"))
    # reduce gradients by an all-to-all, then a float32 sum on the shard's GPU
    use_all_to_all_reduce: bool = declare(False, facts=Facts.COST)
    # all-to-all reduce, with the blocks' matrices in int8 (one GPU: no effect)
    zero_quantized_gradients: bool = declare(False, facts=Facts.COST)
    # all-gather with the GPUs' copy engines within a machine (NCCL 2.29 or later)
    memcpy_all_gather: bool = declare(False, facts=Facts.COST)
    # all-to-all with the GPUs' copy engines within a machine
    memcpy_send_recv: bool = declare(False, facts=Facts.COST)
    # work weights, activations, products: bfloat16 or float32 (products: TF32 on GPUs)
    model_dtype: str = declare("bfloat16", choices=FLOATS, facts=Facts.COST_AND_NUMBERS)
    # the weights the optimizer updates; bfloat16 is rounded stochastically
    master_dtype: str = declare("float32", choices=FLOATS, facts=Facts.COST_AND_NUMBERS)
    # gradient accumulators
    accum_dtype: str = declare("float32", choices=FLOATS, facts=Facts.COST)
    recipe: str = same_as(Precision, "recipe")
    # frozen matrices in NF4: 4 bits with double quantisation, as bitsandbytes stores them
    qlora_bnb: bool = False
    # frozen matrices in FP8 (e4m3) with a scale for each block of 128 x 128
    qlora_fp8: bool = False
    # frozen matrices in NVFP4: 4 bits with a scale for each 16 neighbours
    qlora_fp4: bool = False
    # frozen experts in MXFP4, as gpt-oss is published: 4 bits with a power of two for each 32 neighbours
    qlora_mxfp4: bool = False

    def __post_init__(self):
        """Raises ConfigError for a value that a field may not have."""
        for field in declared(Storage):
            value = getattr(self, field.name)
            field.check_type(value)
            field.check(value)


def has_format(param: Param, base_format: str) -> bool:
    """True if a parameter that is not trained rests in this base format, a name in `base_formats.FORMATS`."""
    return param.kind is Kind.MATRIX and (EXPERTS in param.axes or not FORMATS[base_format].of_experts)


def place(storage: Storage, *, num_shards: int) -> Placement:
    """Fills the table from settings, for `num_shards` devices of `dp_shard x cp`.

    The same config runs on any number of devices. On one device nothing is communicated, but weights are quantised as
    on several, so that their values are the same. Raises ConfigError for settings that do not go together.
    """
    settings = dataclasses.asdict(storage)
    refuse(settings | {"num_shards": num_shards}, dataclasses.asdict(Storage()), TABLE, placed=True)
    several = num_shards > 1
    level = storage.zero_level
    shard_gradients = level >= 2 if storage.shard_gradients is None else storage.shard_gradients
    shard_weights = level >= 3 if storage.shard_weights is None else storage.shard_weights
    one_scale = storage.recipe.startswith("fp8_")
    quants = quantized.DTYPES["fp8"] if one_scale else quantized.DTYPES.get(storage.zero_quantized_weights, "")
    reduce: Reduce = "reduce_scatter"
    if storage.use_all_to_all_reduce:
        reduce = "all_to_all"
    if storage.zero_quantized_gradients:
        reduce = "int8"

    def home(offloaded: bool | str) -> Home:
        if offloaded == NVME.name:
            return NVME
        return HOST if offloaded else DEVICE

    weights = TensorClass(storage.model_dtype, shard_weights and several, home(storage.offload_weights))
    return Placement(
        weights=dataclasses.replace(weights, resident=storage.resident_layers),
        quants=TensorClass(quants, shard_weights and several, home(storage.offload_quants)),
        outer=TensorClass(storage.model_dtype, storage.shard_outer and several),
        grads=TensorClass(storage.accum_dtype, shard_gradients and several, home(storage.offload_grads)),
        master=TensorClass(storage.master_dtype, True, home(storage.offload_master)),
        moments=TensorClass("", True, home(storage.offload_optimizer)),
        residuals=TensorClass("", False, home(storage.offload_residual)),
        persistent_quants=storage.persistent_quants,
        one_scale=one_scale,
        base_format=chosen_format(settings),
        reduce=reduce,
        copy_engine=tuple(name for name in ("memcpy_all_gather", "memcpy_send_recv") if getattr(storage, name)),
        folder=storage.nvme_path,
        files_in_memory=int(storage.files_in_memory * 2**30),
        device_memory=int(storage.device_memory * 2**30),
        slots=storage.nvme_slots,
    )


def kept_in_memory(budget: float, sizes: Mapping[str, int]) -> dict[str, int]:
    """Bytes of each row in files that are kept in host memory: `budget` in all, the end of `TO_FILES` first.

    sizes: bytes of these rows.
    """
    kept = dict.fromkeys(sizes, 0)
    for row in reversed(TO_FILES):
        if row in sizes:
            kept[row] = int(min(sizes[row], budget))
            budget -= kept[row]
    return kept
