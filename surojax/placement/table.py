"""Where everything lives: the one table that the settings fill, and nothing else reads those settings.

| class     | what it is                                   | sharded over dp_shard by          | in host memory by |
|-----------|----------------------------------------------|-----------------------------------|-------------------|
| weights   | work copy of the block weights               | zero_level >= 3 / shard_weights   | offload_weights * |
| quants    | block matrices in 8 bits, if persistent      | as weights                        | offload_quants    |
| outer     | embedding, final norm, head: work copies     | shard_outer                       | never             |
| grads     | gradient accumulators of the blocks          | zero_level >= 2 / shard_gradients | offload_grads     |
| master    | the weights the optimizer updates            | always (ZeRO-1)                   | offload_master    |
| moments   | optimizer state                              | always (ZeRO-1)                   | offload_optimizer |
| residuals | what a forward pass saves for the backward   | by batch                          | offload_residual  |

* but for the first `resident_layers`, which stay on the device.

`offload_master` and `offload_optimizer` may be "nvme" instead: the blocks' part then rests in a file under `nvme_path`
(see nvme.py), and the outer part, which is a few layers' worth and not read layer by layer, in pinned host memory.

Quantised weights (`zero_quantized_weights`, and with the recipes fp8_*, on one device too) are gathered in 8 bits
(quantize.py). By default they are made of `weights` at every fetch. With `persistent_quants` they are made once, after
the update, and rest in the state in place of the 16-bit matrices; of `weights` only the vectors are left, so that is
what `offload_weights` moves then.

`layout.layouts` turns the table into a layout for each parameter and tensor class.
"""

import dataclasses
import inspect
from typing import Literal

import jax

from surojax.errors import ConfigError
from surojax.numerics import quantize
from surojax.placement.home import DEVICE, HOST, NVME, Home

Mesh = jax.sharding.Mesh | jax.sharding.AbstractMesh
ZERO_LEVELS = (1, 2, 3)
WEIGHT_FORMATS = ("none", *quantize.DTYPES)  # that weights are gathered in, in place of 16 bits
Reduce = Literal["reduce_scatter", "all_to_all", "int8"]  # how gradients are summed, see collectives.reduce_scatter


@dataclasses.dataclass(frozen=True)
class Row:
    """One tensor class: its dtype, whether `dp_shard` divides it, and the memory it rests in, or the folder."""

    dtype: str
    sharded: bool
    home: Home = DEVICE
    folder: str = ""  # that a home of nvme is in
    resident: int = 0  # layers that stay on the device although the others rest in host memory


@dataclasses.dataclass(frozen=True)
class Placement:
    """The table. The optimizer chooses the dtypes of `moments`, the model those of `residuals`.

    quants: dtype "" when weights are not quantised; home is where they rest if they are persistent.
    one_scale: they have one scale for a matrix, and products take them as they are (recipes fp8_*).
    reduce: how gradients are summed over `dp_shard`, see `collectives.reduce_scatter`.
    copy_engine: settings of `collectives.COPY_ENGINE` that are on.
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
    reduce: Reduce = "reduce_scatter"
    copy_engine: tuple[str, ...] = ()


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
    num_shards: int,
) -> Placement:
    """The table of these settings, for `num_shards` devices of `dp_shard`.

    Settings of communication are kept for one device, where nothing is communicated: the same config runs on any
    number. Weights are quantised there too, so that they are the same numbers as on several.

    Raises ConfigError for a level other than 1, 2, 3, and for a combination that cannot work, naming the fix.
    """
    if zero_level not in ZERO_LEVELS:
        raise ConfigError(f"zero_level: expected 1, 2 or 3, got {zero_level}; choose one of them")
    # What would shard them: a level does not, where the field itself says that they are not.
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
        reduce="int8" if zero_quantized_gradients else "all_to_all" if use_all_to_all_reduce else "reduce_scatter",
        copy_engine=("memcpy_all_gather",) * memcpy_all_gather + ("memcpy_send_recv",) * memcpy_send_recv,
    )


def _check_quants(weights: str, to_shard: str, persistent: bool, offloaded: bool, in_fp8: bool) -> None:
    """Raises ConfigError for settings of quantised weights that need another one.

    to_shard: the settings that would shard the weights, "" where they are.
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
