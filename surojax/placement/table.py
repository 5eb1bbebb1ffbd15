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

`state_plan` turns the table into a shape, dtype and sharding for every array of the training state, building none.
Initialisation, the step, checkpoint restore and the memory report all read that plan.
"""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np

from surojax.errors import ConfigError
from surojax.memory.host import MEMORY_KIND, Home, joined
from surojax.memory.nvme import InFile, Store
from surojax.numerics import quantize
from surojax.optim.optimizer import Optimizer, init_moments
from surojax.parallel.collectives import WHOLE, Reduce
from surojax.placement.mesh import DATA, SHARD
from surojax.step.state import TrainState, layer_of

Mesh = jax.sharding.Mesh | jax.sharding.AbstractMesh


@dataclasses.dataclass(frozen=True)
class Row:
    """One tensor class: its dtype, whether `dp_shard` divides it, and the memory it rests in, or the folder."""

    dtype: str
    sharded: bool
    home: Home = "device"
    folder: str = ""  # that a home of nvme is in
    resident: int = 0  # layers that stay on the device although the others rest in host memory


@dataclasses.dataclass(frozen=True)
class Placement:
    """The table. The optimizer chooses the dtypes of `moments`, the model those of `residuals`.

    quants: dtype "" when weights are not quantised; home is where they rest if they are persistent.
    one_scale: they have one scale for a matrix, and products take them as they are (recipes fp8_*).
    reduce: how gradients are summed over `dp_shard`, see `collectives.scatter`.
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
    if zero_level not in (1, 2, 3):
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
    home = lambda offloaded: "nvme" if offloaded == "nvme" else "host" if offloaded else "device"
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
    choices = ("none", *quantize.DTYPES)
    if weights not in choices:
        raise ConfigError(f"zero_quantized_weights: expected one of {', '.join(choices)}, got {weights!r}; choose one")
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


def shard_dims(params: dict, mesh: Mesh) -> dict:
    """For each leaf the dimension that `dp_shard` divides: the first one that it can, without counting the layer axis.

    WHOLE when none divides evenly or there is one shard only.

    The first, because sharding the last dimension makes XLA keep a transposed copy of a whole stack.
    """
    n = mesh.shape[SHARD]

    def dim(shape):
        return next((i for i, size in enumerate(shape) if n > 1 and size % n == 0), WHOLE)

    return {
        "blocks": jax.tree.map(lambda p: dim(p.shape[1:]), params["blocks"]),
        "outer": jax.tree.map(lambda p: dim(p.shape), params["outer"]),
    }


def resting_dims(params: dict, dims: dict, placement: Placement) -> dict:
    """Like `dims`, for the work weights as they rest: WHOLE where they are not sharded. Outer vectors never are.

    Raises ConfigError when `shard_outer` cannot cut a vocabulary evenly.
    """

    def outer(p, d):
        if not placement.outer.sharded or p.ndim == 1:
            return WHOLE
        if d != 0:
            raise ConfigError(
                f"shard_outer: expected a vocabulary that dp_shard_size divides, got {p.shape[0]} words; pad it"
            )
        return d

    blocks = dims["blocks"] if placement.weights.sharded else jax.tree.map(lambda _: WHOLE, dims["blocks"])
    return {"blocks": blocks, "outer": jax.tree.map(outer, params["outer"], dims["outer"])}


def kept_whole(params: dict, dims: dict) -> dict[str, tuple[int, ...]]:
    """Matrices kept whole, by name with their shapes: their state costs its whole size on every device."""
    leaves, marks = jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(dims)
    pairs = zip(leaves, marks, strict=True)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): p.shape
        for (path, p), d in pairs
        if d == WHOLE and p.ndim > 1
    }


def specs(dims: dict) -> dict:
    """PartitionSpecs of `{"blocks": [L, ...], "outer": ...}`, split over `dp_shard` along `dims`."""

    def spec(d, lead):
        return jax.P(*[None] * (d + lead), SHARD) if d != WHOLE else jax.P()

    return {
        "blocks": jax.tree.map(lambda d: spec(d, 1), dims["blocks"]),
        "outer": jax.tree.map(lambda d: spec(d, 0), dims["outer"]),
    }


def state_plan(
    params: dict,
    placement: Placement,
    optimizer: Optimizer,
    mesh: Mesh,
    *,
    history: tuple[int, ...] | None = None,
) -> TrainState:
    """A TrainState of `jax.ShapeDtypeStruct`, each with its sharding; `params` are shapes, see `abstract_params`.

    Stacks of layers with home nvme are `InFile`s of one store. history: see `fp8.history_shape`, if there is one.
    The work weights of the blocks are an `offload.Split` where some of their layers stay on the device. Raises
    ConfigError when `resident_layers` leaves no other.
    """
    dims = shard_dims(params, mesh)
    sharded, work = specs(dims), specs(resting_dims(params, dims, placement))

    store = Store(placement.master.folder, jax.tree.leaves(params["blocks"])[0].shape[0])

    def leaf(shape, dtype, spec, home: Home = "device", part: str = "outer"):
        if home == "nvme" and part == "blocks":
            return InFile(store, shape, dtype, jax.NamedSharding(mesh, spec))
        sharding = jax.NamedSharding(mesh, spec, memory_kind=MEMORY_KIND["host" if home == "nvme" else home])
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def tree(row: Row, spec, part: str):
        return jax.tree.map(lambda p, s: leaf(p.shape, row.dtype, s, row.home, part), params[part], spec[part])

    def quants(p, s, whole):
        if p.ndim < 3:  # a vector of each layer
            return whole
        if placement.one_scale:
            values, scales = quantize.planned(p, placement.quants.dtype, 0)
            values = leaf(values.shape, values.dtype, s, placement.quants.home)
            return quantize.Quantized(values, leaf(scales.shape, scales.dtype, jax.P()))
        block = quantize.block_size(jax.NamedSharding(mesh, s).shard_shape(p.shape)[-1])
        q = quantize.planned(p, placement.quants.dtype, block)
        return jax.tree.map(lambda x: leaf(x.shape, x.dtype, s, placement.quants.home), q)

    def stacks(row: Row):
        """Work weights of the blocks, split where some layers are resident."""
        num_layers = jax.tree.leaves(params["blocks"])[0].shape[0]
        if row.resident >= num_layers:
            raise ConfigError(
                f"resident_layers: expected fewer than the {num_layers} layers, got {row.resident}; "
                "leave it out with offload_weights=False to keep all on the device"
            )
        part = lambda n, home: jax.tree.map(
            lambda p, s: leaf((n, *p.shape[1:]), row.dtype, s, home), params["blocks"], work["blocks"]
        )
        sizes = [(row.resident, "device"), (num_layers - row.resident, row.home)]
        return joined([part(n, home) for n, home in sizes if n])

    blocks = stacks(placement.weights)
    if placement.persistent_quants:
        blocks = jax.tree.map(quants, params["blocks"], work["blocks"], blocks)

    master = {part: tree(placement.master, sharded, part) for part in ("blocks", "outer")}
    return TrainState(
        step=leaf((), jnp.int32, jax.P()),
        weights={"blocks": blocks, "outer": tree(placement.outer, work, "outer")},
        master=master,
        moments=_plan_moments(params, master, optimizer, dims, placement.moments.home, leaf),
        history=leaf(history, jnp.float32, jax.P()) if history else None,
    )


def _plan_moments(params: dict, master: dict, optimizer: Optimizer, dims: dict, home: Home, leaf) -> dict:
    """The plan of the moments; `leaf` makes one of its leaves, see `state_plan`.

    What has as many dimensions as its parameter (moments, their scales) rests at `home`, and is divided along the
    dimension that the parameter is divided along, unless it has size 1 there. What has fewer (NorMuon's means of rows)
    is whole in every device's memory.
    """
    rows = {"blocks": layer_of(master["blocks"]), "outer": master["outer"]}
    moments = jax.eval_shape(lambda p: init_moments(optimizer, p, rows), params)

    def of_tensor(part: str):
        def one(p, d, state):
            d = WHOLE if d == WHOLE else d + (part == "blocks")
            spec = lambda m: jax.P(*[None] * d, SHARD) if d != WHOLE and m.shape[d] > 1 else jax.P()
            like_p = lambda m: leaf(m.shape, m.dtype, spec(m), home, part)
            return jax.tree.map(lambda m: like_p(m) if m.ndim == p.ndim else leaf(m.shape, m.dtype, jax.P()), state)

        return one

    return {part: jax.tree.map(of_tensor(part), params[part], dims[part], moments[part]) for part in moments}


def batch_sharding(mesh: Mesh, *, accumulated: bool = True) -> jax.NamedSharding:
    """Of tokens `[accumulation, batch, S]`, or `[batch, S]` in evaluation: the batch is split over all devices."""
    axes = tuple(a for a in DATA if mesh.shape[a] > 1)
    return jax.NamedSharding(mesh, jax.P(None, axes or None) if accumulated else jax.P(axes or None))


def bytes_per_device(plan, home: Home = "device") -> int:
    """Bytes that a plan (any tree of ShapeDtypeStructs with shardings) takes in this memory, per device.

    nvme: an equal part of the files, which hold everything once.
    """
    leaves = jax.tree.leaves(plan)
    if home == "nvme":
        return sum(x.size * x.dtype.itemsize // x.sharding.mesh.size for x in leaves if isinstance(x, InFile))
    return sum(
        leaf_bytes(x) for x in leaves if not isinstance(x, InFile) and x.sharding.memory_kind == MEMORY_KIND[home]
    )


def leaf_bytes(x: jax.ShapeDtypeStruct) -> int:
    """Bytes that one planned array takes on each device."""
    assert x.sharding is not None
    return int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize
