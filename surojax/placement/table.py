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

* except the first `resident_layers`, which stay in device memory.

`offload_master` and `offload_optimizer` can also be "nvme". Then the state of the blocks is stored in a file under
`nvme_path` (memory/in_file.py). The state of the outer layers is as large as that of a few layers and is not read
layer by layer; it is stored in pinned host memory.

Quantised weights are all-gathered in 8 bits (quantize.py). They are used with `zero_quantized_weights`, and with the
recipes fp8_*, also on one device. By default they are made from `weights` whenever a layer is fetched. With
`persistent_quants` they are made once, after the update, and stored in the state instead of the 16-bit matrices. Then
`weights` has vectors only, and `offload_weights` moves these vectors only.

With `qlora_bnb`, `qlora_fp8` or `qlora_fp4` block matrices that are not trained are `weights` in 4 or 8 bits: stored,
copied and gathered so.

Tensor parallelism shards what it divides in every class, before and besides `dp_shard` (`layout.MESH_AXES`).

`layout.layouts` turns the table into a layout for each parameter and tensor class.
"""

import dataclasses
import inspect
from typing import Literal

import jax

from surojax.errors import ConfigError
from surojax.numerics import quantize
from surojax.numerics.base_formats import chosen
from surojax.placement.home import DEVICE, HOST, NVME, Home

Mesh = jax.sharding.Mesh | jax.sharding.AbstractMesh
ZERO_LEVELS = (1, 2, 3)
WEIGHT_FORMATS = ("none", *quantize.DTYPES)  # that weights are gathered in, in place of 16 bits
Reduce = Literal["reduce_scatter", "all_to_all", "int8"]  # how gradients are summed, see collectives.reduce_scatter


@dataclasses.dataclass(frozen=True)
class Row:
    """One tensor class."""

    dtype: str
    sharded: bool  # over dp_shard x cp
    home: Home = DEVICE
    folder: str = ""  # folder of the file, for a home of nvme
    resident: int = 0  # number of layers in device memory if the home of the others is host memory


@dataclasses.dataclass(frozen=True)
class Placement:
    """The table. The optimizer chooses the dtypes of `moments`, the model those of `residuals`.

    quants: dtype "" if weights are not quantised; home is used if they are persistent.
    one_scale: quantised weights have one scale per matrix, and are operands of products (recipes fp8_*).
    base_format: that block matrices which are not trained are stored in, in the home of `weights`: a name in
    `base_formats.FORMATS`; "": in 16 or 32 bits.
    reduce: how gradients are summed over `dp_shard x cp`, see `collectives.reduce_scatter`.
    copy_engine: the enabled settings of `collectives.COPY_ENGINE`.
    """

    weights: Row
    quants: Row
    outer: Row
    grads: Row
    master: Row
    moments: Row
    residuals: Row
    persistent_quants: bool = False
    one_scale: bool = False
    base_format: str = ""
    reduce: Reduce = "reduce_scatter"
    copy_engine: tuple[str, ...] = ()

    @property
    def streams_weights(self) -> bool:
        """True if a layer's weights, or its quants, are copied in from host memory."""
        return self.weights.home.streamed or self.quants.home.streamed


def place(
    *,
    zero_level: int = 1,
    shard_gradients: bool | None = None,
    shard_weights: bool | None = None,
    shard_outer: bool = False,
    offload_residual: bool = False,
    offload_optimizer: bool | str = False,
    offload_master: bool | str = False,
    offload_grads: bool = False,
    offload_weights: bool = False,
    zero_quantized_weights: str = "none",
    persistent_quants: bool = False,
    offload_quants: bool = False,
    use_all_to_all_reduce: bool = False,
    zero_quantized_gradients: bool = False,
    memcpy_all_gather: bool = False,
    memcpy_send_recv: bool = False,
    resident_layers: int = 0,
    nvme_path: str = "",
    recipe: str = "bf16",
    model_dtype: str = "bfloat16",
    accum_dtype: str = "float32",
    master_dtype: str = "float32",
    qlora_bnb: bool = False,
    qlora_fp8: bool = False,
    qlora_fp4: bool = False,
    num_shards: int,
) -> Placement:
    """The table for these settings and `num_shards` devices of `dp_shard x cp`.

    The same config runs on any number of devices. On one device nothing is communicated, but weights are quantised as
    on several, so that their values are the same.

    Raises ConfigError for a level other than 1, 2, 3, and for a combination of settings that cannot work, with the fix.
    """
    if zero_level not in ZERO_LEVELS:
        raise ConfigError(f"zero_level: expected 1, 2 or 3, got {zero_level}; choose one of them")
    # The settings that would shard them. zero_level does not, if the field itself is False.
    to_shard_gradients = "shard_gradients=True" + (" or zero_level=2" if shard_gradients is None else "")
    to_shard_weights = "shard_weights=True" + (" or zero_level=3" if shard_weights is None else "")
    shard_gradients = zero_level >= 2 if shard_gradients is None else shard_gradients
    shard_weights = zero_level >= 3 if shard_weights is None else shard_weights
    several = num_shards > 1
    if offload_grads and several and not shard_gradients:
        raise ConfigError(
            f"offload_grads: expected sharded gradients on {num_shards} GPUs, got shard_gradients=False, with which "
            f"every GPU would move whole gradients over its host link; set {to_shard_gradients}"
        )
    one_scale = recipe.startswith("fp8_")
    to_shard = "" if shard_weights else to_shard_weights
    _check_quants(zero_quantized_weights, to_shard, persistent_quants, offload_quants, one_scale)
    quants = quantize.DTYPES["fp8"] if one_scale else quantize.DTYPES.get(zero_quantized_weights, "")
    if memcpy_send_recv and not (use_all_to_all_reduce or zero_quantized_gradients):
        raise ConfigError(
            "memcpy_send_recv: expected false with use_all_to_all_reduce=False, got True: only an all-to-all is sent "
            "and received; set use_all_to_all_reduce=True or zero_quantized_gradients=True"
        )
    if resident_layers and not offload_weights:
        raise ConfigError(
            f"resident_layers: expected 0 with offload_weights=False, which keeps all layers on the device, got "
            f"{resident_layers}; leave it out, or set offload_weights=True"
        )
    if resident_layers and persistent_quants:
        raise ConfigError(
            f"resident_layers: expected 0 with persistent_quants=True, which leaves only vectors to offload_weights, "
            f"got {resident_layers}; leave it out, and offload_quants too if the quants are to stay on the device"
        )
    homes = {"offload_master": offload_master, "offload_optimizer": offload_optimizer}
    for name, value in homes.items():
        if value not in (True, False, "nvme"):
            raise ConfigError(f"{name}: expected true, false or 'nvme', got {value!r}; choose one of them")
        if value == "nvme" and not nvme_path:
            raise ConfigError(f"nvme_path: expected a folder with {name}='nvme', got ''; set it to one on an NVMe disk")
    if nvme_path and "nvme" not in homes.values():
        raise ConfigError(
            f"nvme_path: expected '' with nothing to keep there, got {nvme_path!r}; set offload_optimizer='nvme' or "
            "offload_master='nvme', or leave it out"
        )

    def home(offloaded: bool | str) -> Home:
        if offloaded == NVME.name:
            return NVME
        return HOST if offloaded else DEVICE

    return Placement(
        weights=Row(model_dtype, shard_weights and several, home(offload_weights), resident=resident_layers),
        quants=Row(quants, shard_weights and several, home(offload_quants)),
        outer=Row(model_dtype, shard_outer and several),
        grads=Row(accum_dtype, shard_gradients and several, home(offload_grads)),
        master=Row(master_dtype, True, home(offload_master), nvme_path),
        moments=Row("", True, home(offload_optimizer), nvme_path),
        residuals=Row("", False, home(offload_residual)),
        persistent_quants=persistent_quants,
        one_scale=one_scale,
        base_format=chosen({"qlora_bnb": qlora_bnb, "qlora_fp8": qlora_fp8, "qlora_fp4": qlora_fp4}),
        reduce="int8" if zero_quantized_gradients else "all_to_all" if use_all_to_all_reduce else "reduce_scatter",
        copy_engine=("memcpy_all_gather",) * memcpy_all_gather + ("memcpy_send_recv",) * memcpy_send_recv,
    )


def _check_quants(weights: str, to_shard: str, persistent: bool, offloaded: bool, in_fp8: bool) -> None:
    """Raises ConfigError for settings of quantised weights that need another one.

    to_shard: the settings that would shard the weights; "" if the weights are sharded.
    """
    if weights not in WEIGHT_FORMATS:
        raise ConfigError(
            f"zero_quantized_weights: expected one of {', '.join(WEIGHT_FORMATS)}, got {weights!r}; choose one"
        )
    if weights != "none" and to_shard:
        raise ConfigError(
            f"zero_quantized_weights: expected 'none' with shard_weights=False, got {weights!r}, which is for "
            f"sharded weights; set {to_shard}"
        )
    if persistent and to_shard:
        also = "" if in_fp8 else ", and zero_quantized_weights or a recipe in fp8"
        raise ConfigError(f"persistent_quants: expected false with shard_weights=False, got True; set {to_shard}{also}")
    if persistent and weights == "none" and not in_fp8:
        raise ConfigError(
            "persistent_quants: expected false with zero_quantized_weights='none', got True; "
            "set zero_quantized_weights='fp8' or 'int8', or recipe='fp8_current' or 'fp8_hybrid'"
        )
    if offloaded and not persistent:
        raise ConfigError(
            "offload_quants: expected false with persistent_quants=False, got True: nothing quantised rests then; "
            "set persistent_quants=True"
        )


SETTINGS = tuple(name for name in inspect.signature(place).parameters if name != "num_shards")  # fields of the config
