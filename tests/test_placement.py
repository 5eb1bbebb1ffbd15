"""The table, the plan it gives, and that arrays are built the way the plan says."""

import dataclasses
import functools
import os
import subprocess
import sys
import textwrap
from typing import Any

import chex
import jax
import numpy as np
import pytest
from flax import nnx
from small import CONFIG, Small, quick_at

from surojax.memory.host import parts
from surojax.models import decoder_model
from surojax.models.decoder import Decoder
from surojax.models.model import Compute
from surojax.numerics.recipes import Precision
from surojax.optim import normuon as muon
from surojax.optim.adamw8bit import adamw8bit
from surojax.placement import table as placement
from surojax.placement.layout import MESH_AXES, batch_sharding
from surojax.placement.mesh import SHARD, find_devices, make_mesh
from surojax.placement.param import Kind
from surojax.step.first_state import layer_function, layer_program
from surojax.step.state import section
from surojax.step.state_plan import bytes_per_device


@pytest.mark.parametrize("level, grads, weights", [(1, False, False), (2, True, False), (3, True, True)])
def test_zero_levels_fill_the_table(level, grads, weights):
    table = placement.place(placement.Storage(zero_level=level), num_shards=4)
    assert (table.grads.sharded, table.weights.sharded) == (grads, weights)
    assert table.master.sharded and not table.outer.sharded
    other = placement.Storage(zero_level=level, shard_gradients=not grads)
    assert placement.place(other, num_shards=4).grads.sharded is not grads


def test_settings_fill_the_table():
    """Nothing is sharded on one device; budgets in GiB; what says more than the level; 8-bit copies, not of a base."""
    table = lambda num_shards=4, **settings: placement.place(placement.Storage(**settings), num_shards=num_shards)
    for shards in (1, 2):
        outer = table(shards, zero_level=3, shard_outer=True, shard_weights=False)
        assert outer.outer.sharded == outer.grads.sharded == (shards > 1) and not outer.weights.sharded
    assert not table(shard_outer=False).outer.sharded and table(zero_level=2, shard_weights=True).weights.sharded
    assert [table(recipe=recipe).one_scale for recipe in ("fp8_hybrid", "fp8_current", "mxfp8")] == [True, True, False]
    reduced = ({}, {"use_all_to_all_reduce": True}, {"zero_quantized_gradients": True})
    assert [table(**how).reduce for how in reduced] == ["reduce_scatter", "all_to_all", "int8"]
    copied = table(memcpy_send_recv=True, use_all_to_all_reduce=True)
    assert copied.copy_engine == ("memcpy_send_recv",)
    files = {"nvme_path": "x", "offload_master": "nvme", "offload_optimizer": "nvme", "nvme_slots": 2}
    budgets = table(**files, files_in_memory=0.5, device_memory=2.0)
    assert (budgets.files_in_memory, budgets.device_memory, budgets.slots) == (2**29, 2**31, 2)
    assert (budgets.folder, budgets.in_files, budgets.by_layer) == ("x", True, False)
    quants = {"zero_level": 3, "zero_quantized_weights": "int8"}
    host = table(**quants, persistent_quants=True, offload_quants=True)
    assert host.quantises_shards and host.streams_weights and host.leaves_device
    assert table(**quants).quants.dtype == "int8" and not table(**quants).streams_weights
    assert table(offload_weights=True).streams_weights and not table(offload_master=True).streams_weights
    assert dataclasses.replace(host, base_format="nf4").quantises_shards is False and not table().quantises_shards


def test_unknown_level_is_refused():
    with pytest.raises(ValueError, match="expected one of 1, 2, 3, got 4"):
        placement.place(placement.Storage(zero_level=4), num_shards=1)


def test_state_is_built_as_planned():
    """Every array of a new state has the plan's shape, dtype and sharding, at ZeRO-3 on a 2 x 4 mesh."""
    small = Small(8, replicate=2, zero_level=3, m_dtype="bfloat16")
    check = lambda x, p: (x.shape, x.dtype, x.sharding) == (p.shape, p.dtype, p.sharding)
    assert all(jax.tree.leaves(jax.tree.map(check, small.state, small.plan)))
    gate = small.state.weights["blocks"]["mlp"]["w_gate"]
    assert gate.addressable_shards[0].data.shape == (3, 20, 32)
    assert small.state.moments["blocks"]["mlp"]["w_gate"][1].m.sharding == gate.sharding


OFFLOADED: dict[str, Any] = dict.fromkeys(("offload_optimizer", "offload_master", "offload_weights"), True)


NEW = [(3, {}), (8, {}), (1, OFFLOADED), (4, {"shard_outer": True, **OFFLOADED})]


@pytest.mark.full
@pytest.mark.parametrize("devices, placed", quick_at(NEW, 3))
def test_new_weights_do_not_depend_on_the_placement(devices, placed):
    """They are the plain model's, drawn layer by layer; nor does any other array of a new state depend on it."""
    found, expected = Small(devices, zero_level=3, **placed).init(), Small().init()
    chex.assert_trees_all_equal(found, expected)
    plain = nnx.to_pure_dict(nnx.state(Decoder(CONFIG, rngs=nnx.Rngs(jax.random.key(0))), nnx.Param))
    for params in (
        found.master,
        decoder_model.build(CONFIG).init(0),
    ):  # compiled as a whole or op by op: 1 unit in the last place
        jax.tree.map(functools.partial(np.testing.assert_array_max_ulp, maxulp=1), params, plain)


@pytest.mark.parametrize("optimizer", quick_at([(adamw8bit,), (muon.normuon,)]))
def test_nor_do_those_of_other_optimizers_and_recipes(optimizer):
    """bfloat16 masters, 8-bit codes, momentum, and a history, in host memory and on other devices."""
    recipe = Compute(precision=Precision(recipe="fp8_hybrid"))
    options = {"compute": recipe, "optimizer": optimizer, "model_dtype": "bfloat16", "master_dtype": "bfloat16"}
    found, expected = (
        Small(n, **options, **placed).init() for n, placed in ((4, {"zero_level": 3, **OFFLOADED}), (1, {}))
    )
    assert found.history is not None
    chex.assert_trees_all_equal(found, expected)


@pytest.mark.parametrize("devices, placed", [(1, OFFLOADED)], ids=["1-offloaded"])
@pytest.mark.full
def test_making_a_state_needs_less_than_a_step(devices, placed):
    """Beside what it returns, initialisation needs no more for 6 layers than for 2, and less than a step needs: what
    footprint.py counts for the step is enough."""
    temporaries = lambda f, *args: f.lower(*args).compile().memory_analysis().temp_size_in_bytes
    init = {}
    for layers in (2, 6):
        config = dataclasses.replace(CONFIG, num_hidden_layers=layers)
        small = Small(devices, config=config, **placed)
        (segment,) = small.run.model.segments
        planned = section(small.plan, segment.name)
        (part,) = parts(planned.weights)
        state = (planned.master, planned.moments)
        layer = layer_function(segment, small.plan, small.optimizer, segment.init)
        stacks = jax.tree.leaves(part.stack), jax.tree.leaves(state)
        init[layers] = temporaries(layer_program(part.stack, state, layer), *stacks, 0, 0, 0)
    batch = jax.ShapeDtypeStruct((1, 8, 24), np.int32, sharding=batch_sharding(small.mesh))
    assert init[6] <= init[2] < temporaries(small.step, small.plan, batch, batch)


def test_bytes_fall_with_the_level():
    """On 4 devices: ZeRO-1 divides master weights and moments by 4, ZeRO-3 the block weights as well."""
    one, level1, level3 = Small().plan, Small(4).plan, Small(4, zero_level=3).plan
    size = bytes_per_device
    assert size(level1.master) * 4 == size(one.master)
    assert size(level1.weights) == size(one.weights)
    assert size(level3.weights["blocks"]) * 4 == size(one.weights["blocks"])
    assert size(level3.weights["outer"]) == size(one.weights["outer"])


def test_leading_dimension_is_sharded_and_odd_ones_stay_whole():
    layouts = Small(5).engine.layouts.master
    stored = lambda part, name: layouts["blocks"][part][name].stored
    assert stored("mlp", "w_gate") == jax.P(SHARD)  # 80 x 32, 5 divides 80
    assert stored("mlp", "w_down") == jax.P(None, SHARD)  # 32 x 80
    assert stored("attention", "wq") == jax.P()
    assert Small(1).engine.layouts.master["blocks"]["mlp"]["w_gate"].stored == jax.P()


def test_parameters_are_declared():
    model = decoder_model.build(CONFIG)
    params = model.params
    wq, embed = params["blocks"]["attention"]["wq"], params["outer"]["embed"]
    assert (wq.name, wq.shape, wq.axes, wq.kind) == ("attention.wq", (32, 32), ("heads", "embed"), Kind.MATRIX)
    assert (embed.axes, embed.kind) == (("vocab", "embed"), Kind.TABLE)
    everything = jax.tree.leaves(params)
    assert all(len(p.axes) == len(p.shape) and set(p.axes) <= MESH_AXES.keys() for p in everything)
    assert {p.name for p in everything if p.kind is Kind.VECTOR} == {"attention_norm", "mlp_norm", "norm"}
    assert len({p.stream for p in everything}) == len(everything)
    shapes = jax.eval_shape(lambda: model.init(0))
    assert jax.tree.map(lambda x: x.shape, model.abstract_params()) == jax.tree.map(lambda x: x.shape, shapes)
    assert model.num_parameters == sum(x.size for x in jax.tree.leaves(shapes))


def test_several_cpu_devices_compile_without_the_cache(tmp_path):
    """The folder keeps programs of a run on one device, and none of a run on two."""
    source = """
        import os, jax, jax.numpy as jnp, numpy as np
        from surojax.placement.mesh import find_devices, make_mesh

        def compiled(x, count):
            sharding = jax.NamedSharding(make_mesh(jax.devices()[:count], dp_shard_size=count), jax.P("dp_shard"))
            jax.jit(jnp.sum).lower(jax.ShapeDtypeStruct((x,), np.float32, sharding=sharding)).compile()
            return len(os.listdir(os.environ["JAX_COMPILATION_CACHE_DIR"]))

        find_devices(1)
        kept = compiled(2, 1)
        assert kept
        find_devices(2)
        assert compiled(4, 2) == kept
    """
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "PYTHONWARNINGS": "always"}
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)], env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert "compilation cache: not used with several CPU devices" in ended.stderr


def test_meshes():
    assert len(find_devices(0)) == 8 and len(find_devices(3)) == 3
    assert dict(make_mesh(jax.devices(), dp_replicate_size=2).shape) == {"dp_replicate": 2, "dp_shard": 4}
    with pytest.raises(ValueError, match="gpus: expected at most 8"):
        find_devices(9)
    with pytest.raises(ValueError, match="divisor"):
        make_mesh(jax.devices(), dp_replicate_size=3)
    with pytest.raises(ValueError, match="expected 8"):
        make_mesh(jax.devices(), dp_replicate_size=2, dp_shard_size=3)
