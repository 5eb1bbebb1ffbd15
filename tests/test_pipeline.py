"""Pipeline parallelism: the engine equals `jax.grad` of the plain model on one device, whatever the schedule.

The oracle and the bound are those of tests/test_engine.py, with more microbatches than are in flight.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layouts import check_checkpoint_moves, config_of_a_run
from small import CONFIG, Small, plain_loss, tokens, worst_relative
from test_engine import GEMMA, ORDER_OF_SUMS, QWEN, SMOLLM, engine_gradients
from test_models import toy
from test_tensor_parallel import packed

from surojax.assembly.from_config import from_config
from surojax.config import checks
from surojax.config.fields import default_config, mesh_sizes
from surojax.errors import ConfigError
from surojax.memory import host
from surojax.models import decoder_model
from surojax.models.model import RecipeInputs
from surojax.placement.layout import layouts, specs
from surojax.placement.mesh import PIPELINE, SHARD, abstract_mesh, data_parallel, mesh_shape
from surojax.placement.param import OUTER
from surojax.placement.table import Storage, place
from surojax.planner import footprint, hlo, products, stages, step_collectives, traffic
from surojax.planner.gpus import GPUS
from surojax.planner.layer_sizes import patterns
from surojax.step import first_state, state
from surojax.step.padding import padded
from surojax.step.stage_layers import of_stage
from surojax.train import train

OFFLOADS = ("offload_residual", "offload_optimizer", "offload_master", "offload_grads", "offload_weights")
ALL: dict[str, Any] = dict.fromkeys(OFFLOADS, True)
FOUR = dataclasses.replace(CONFIG, num_hidden_layers=4)
FIVE = dataclasses.replace(CONFIG, num_hidden_layers=5)
SEVEN = dataclasses.replace(CONFIG, num_hidden_layers=7)
TIED = dataclasses.replace(QWEN, num_hidden_layers=4)
TWO_KINDS = dataclasses.replace(SMOLLM, num_hidden_layers=2)  # stages of one layer with rotary embedding, or without
WINDOWS = dataclasses.replace(CONFIG, sliding_window=5, sliding_window_pattern=3)  # the third layer sees everything
GEMMA_2 = dataclasses.replace(GEMMA, num_hidden_layers=2)
ONE_BACK: dict[str, Any] = {"pp_schedule": "1f1b"}
PLACED = {
    "uneven-2x2-zero2-saved": (CONFIG, 4, {"pp_size": 2, "zero_level": 2, **ONE_BACK}, False),
    "uneven-4x2-zero3-offloaded": (SEVEN, 8, {"pp_size": 4, "zero_level": 3, **ONE_BACK, **ALL}, True),
    "other-layers-2": (TWO_KINDS, 2, {"pp_size": 2}, False),
    "other-layers-gemma-2x2-offloaded": (GEMMA_2, 4, {"pp_size": 2, "zero_level": 3, **ONE_BACK, **ALL}, True),
    "2x2x2-hsdp-all_to_all": (
        FOUR,
        8,
        {"pp_size": 2, "replicate": 2, "zero_level": 3, "use_all_to_all_reduce": True, **ONE_BACK},
        True,
    ),
}


@functools.cache
def reference(config):
    """Loss and gradients of the plain model on nine microbatches, some labels of which do not count."""
    small, (inputs, labels) = Small(config=config), tokens(9, 4, 24)
    labels[2:4, :, 5:] = -1
    params = jax.tree.map(np.asarray, small.state.weights)
    loss, grads = jax.jit(jax.value_and_grad(plain_loss(config)))(params, inputs, labels)
    return (inputs, labels), float(loss), jax.tree.map(np.asarray, grads)


def without_padding(sections: dict, config) -> dict:
    """The arrays by section with the layers of a model only, behind which there must be zeros."""
    n = config.num_hidden_layers
    assert not any(np.any(np.asarray(x)[n:]) for x in jax.tree.leaves(sections["blocks"]))
    return sections | {"blocks": jax.tree.map(lambda x: np.asarray(x)[:n], sections["blocks"])}


@pytest.mark.parametrize(
    "placed",
    [{"pp_size": 4, "zero_level": 3, **ONE_BACK}],
    ids=["pp4"],
)
@pytest.mark.full
def test_documents_end_at_any_place_of_a_stages_part(placed):
    """Half of the parts of a sequence in the head have no label; documents end at, before and after their edges."""
    config = dataclasses.replace(FOUR, sliding_window=4)
    small = Small(8, config=config, packed=True, **placed)
    params = jax.tree.map(np.asarray, Small(config=config).state.weights)
    loss, grads = jax.jit(jax.value_and_grad(plain_loss(config)))(params, *packed())
    ours, our_grads = engine_gradients(small, packed())
    assert ours == pytest.approx(float(loss), rel=ORDER_OF_SUMS)
    assert worst_relative(our_grads, grads) < ORDER_OF_SUMS


def random_layer(seed: int):
    """Arrays of a layer of CONFIG, none of which is 0."""
    rng = np.random.default_rng(seed)
    params = decoder_model.build(CONFIG).segments[0].params
    return jax.tree.map(lambda param: rng.standard_normal(param.shape).astype(np.float32), params)


@pytest.mark.full
def test_padding_changes_nothing_and_has_no_gradient():
    """Also if its weights were not zeros. Of a layer, block and gradients are those of the segment."""
    (segment,) = decoder_model.build(CONFIG).segments
    w = random_layer(0)
    x, dy = np.random.default_rng(1).standard_normal((2, 1, 8, 32)).astype(np.float32)
    variant = segment.variants[0]

    def passes_over(segment, inputs):
        (y, _), saved = segment.block_forward(w, x, inputs, variant)
        y_alone, _ = segment.block(w, x, inputs, variant)
        dw, dx, _ = segment.block_backward(w, saved, (dy, None), inputs, variant, None)
        return y, y_alone, dx, dw

    y, y_alone, dx, dw = passes_over(padded(segment), RecipeInputs(computes=jnp.bool(False)))
    for found, expected in ((y, x), (y_alone, x), (dx, dy)):
        np.testing.assert_array_equal(found, expected)
    assert not any(np.any(np.asarray(g)) for g in jax.tree.leaves(dw))
    ours, expected = passes_over(padded(segment), RecipeInputs(computes=jnp.bool(True))), passes_over(segment, None)
    jax.tree.map(np.testing.assert_array_equal, ours, expected)


@pytest.mark.full
def test_a_stage_rounds_its_layers_as_one_device_does():
    """Master weights in 16 bits are rounded at random; the numbers follow from a layer's place in the whole model."""
    kind: dict[str, Any] = {"config": FOUR, "master_dtype": "bfloat16"}
    one, four = Small(**kind), Small(4, pp_size=4, **kind)
    for small in (one, four):
        small.train([tokens(1, 4, 24)])

    def equal(a, b) -> list[float]:
        """The fraction of equal numbers in each layer."""
        return np.mean(np.asarray(a) == np.asarray(b), axis=tuple(range(1, a.ndim))).tolist()

    found = jax.tree.leaves(jax.tree.map(equal, one.state.master["blocks"], four.state.master["blocks"]))
    assert min(found) > 0.99


@pytest.mark.full
@pytest.mark.parametrize(
    "config, placed",
    [(TIED, {"pp_size": 2, "tp_size": 2, "zero_level": 3}), (SEVEN, {"pp_size": 4})],
    ids=["even", "uneven"],
)
def test_evaluation_equals_that_of_one_device(config, placed):
    inputs, labels = (x[0] for x in tokens(1, 4, 24))
    labels[1, 3:] = -1
    expected = Small(config=config)
    expected = expected.run.eval_step()(expected.state.weights, inputs, labels)
    small = Small(8, config=config, **placed)
    sums, counted = small.run.eval_step()(small.state.weights, inputs, labels)
    assert int(counted) == int(expected[1])
    np.testing.assert_allclose(sums["loss"], expected[0]["loss"], rtol=ORDER_OF_SUMS)


@pytest.mark.full
@pytest.mark.parametrize("config", [TIED, SEVEN], ids=["even", "uneven"])
def test_a_checkpoint_moves_between_layouts(tmp_path, config):
    """From one device to stages, and back: weights and moments equal to the bit, and as many layers."""
    one, eight = Small(config=config), Small(8, config=config, pp_size=2, tp_size=2, zero_level=3)
    rng = np.random.default_rng(0)
    drawn = lambda x: jax.device_put(rng.random(x.shape, x.dtype), x.sharding)
    one.state = one.state._replace(step=one.state.step + 1, moments=jax.tree.map(drawn, one.state.moments))
    check_checkpoint_moves(one, eight, tmp_path)


@pytest.mark.full
def test_a_run_goes_on_with_stages_and_without(tmp_path):
    """The same samples, evaluations and losses, whether a run has one stage, or two in between."""
    c = config_of_a_run(tmp_path)
    c.update({"gradient_accumulation_steps": 2, "final_lr_fraction": 1.0, "sample_tokens": 0})
    losses = {}
    for name, sizes in {"one": {6: 1}, "mixed": {2: 1, 4: 2, 6: 1}}.items():
        c.update({"output_dir": str(tmp_path / name), "eval_steps": 2 if len(sizes) == 1 else 0})
        losses[name] = []
        for steps, pp_size in sizes.items():
            c.update({"max_steps": steps, "gpus": pp_size, "pp_size": pp_size})
            losses[name] += [x["loss"] for x in train(c).history]
    assert len(losses["one"]) == 6 + 3  # and three evaluations
    np.testing.assert_allclose(losses["mixed"], losses["one"], rtol=1e-4)


def test_layouts():
    """Layers and words are divided over stages, and what a stage has over `dp_shard`; norms of the head are shared."""
    mesh = abstract_mesh(8, pp_size=4)
    found = layouts(decoder_model.build(FOUR).params, place(Storage(zero_level=3), num_shards=2), mesh)
    wq = found.weights["blocks"]["attention"]["wq"]
    assert wq.layers == (PIPELINE,) and PIPELINE not in (*wq.stored_axes, *wq.computed_axes)
    of_weights, of_master = specs(found.weights), specs(found.master)
    assert of_weights["blocks"]["attention"]["wq"] == jax.P(PIPELINE, SHARD)
    assert of_weights["outer"] == {"embed": jax.P(PIPELINE), "head": jax.P(PIPELINE), "norm": jax.P()}
    assert of_master["outer"]["embed"] == jax.P((PIPELINE, SHARD))
    with pytest.raises(ConfigError, match=r"^pp_size: expected a divisor of embed's 64 vocab, got 3; lower it"):
        layouts(decoder_model.build(CONFIG).params, place(Storage(), num_shards=1), abstract_mesh(3, pp_size=3))


def test_meshes():
    """Stages are outermost: their devices send least. Without stages, programs are what they were."""
    assert list(mesh_shape(8, pp_size=2, tp_size=2)) == ["pp", "dp_replicate", "dp_shard", "tp"]
    assert mesh_shape(8, pp_size=4) == {"pp": 4, "dp_replicate": 1, "dp_shard": 2}
    assert "pp" not in mesh_shape(8)
    with pytest.raises(ConfigError, match=r"^dp_replicate_size x pp_size: expected a divisor of the 8 devices in use"):
        mesh_shape(8, pp_size=3)


def test_what_stages_cannot_divide_is_refused():
    with pytest.raises(ConfigError, match=r"^pp_size: expected stages with as many layers of each kind, got"):
        of_stage(toy(), toy().num_layers)
    with pytest.raises(ConfigError, match=r"^resident_layers: expected fewer than the 2 layers of a stage, got 2"):
        Small(2, pp_size=2, offload_weights=True, resident_layers=2)


def test_resident_layers_are_the_first_of_each_stage():
    """Every layer of a new state is in its entry."""
    small = Small(2, config=FIVE, pp_size=2, offload_weights=True, resident_layers=1)
    (segment,) = small.run.model.segments
    planned = state.section(small.plan, segment.name)
    others = (planned.master, planned.moments)

    def layer(inputs, l):
        weights, master = (
            jax.tree.map(lambda x: jnp.full(x.shape, l * (inputs == l), x.dtype), state.layer_of(plan))
            for plan in (host.parts(planned.weights)[0].stack, planned.master)
        )
        return weights, (master, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state.layer_of(planned.moments)))

    weights, (master, _) = first_state.build_stacks(planned.weights, others, layer, lambda l: l)
    numbers = {part.start: np.asarray(part.stack["mlp"]["w_up"])[:, 0, 0].tolist() for part in host.parts(weights)}
    assert numbers == {0: [0, 3], 2: [1, 2, 4, 5]}
    assert np.asarray(master["mlp"]["w_up"])[:, 0, 0].tolist() == [0, 1, 2, 3, 4, 5]


REFUSED = [
    (
        {"cp_size": 2, "gpus": 8, "cp_method": "ring", "attention": "xla"},
        "cp_method: expected 'ulysses' or 'allgather' with pp_size=4, since .*; set cp_method='allgather'",
    ),
    ({"model.num_hidden_layers": 6}, "pp_size: expected at most 3, since so many stages of 2 have all 6 layers, got 4"),
    ({"model.num_hidden_layers": 2}, "pp_size: expected at most 2, since so many stages of 1 have all 2 layers, got 4"),
    (
        {"microbatches_per_fetch": 2, "gradient_accumulation_steps": 2},
        "microbatches_per_fetch: expected 1 with pp_size=4, whose stages",
    ),
    ({"model.vocab_size": 1002}, "model.vocab_size: expected a multiple of pp_size=4.*use 1004"),
    ({"model.vocab_size": 1004, "tp_size": 2, "gpus": 8}, "model.vocab_size: expected a multiple of tp_size x pp_size"),
    ({"sequence_len": 30}, "sequence_len: expected a multiple of pp_size=4.*use 32"),
    ({"lmhead_chunks": 512}, "lmhead_chunks: expected a divisor of .* / pp_size = 128"),
    ({"pp_schedule": "zero_bubble"}, "pp_schedule: expected one of gpipe, 1f1b, got 'zero_bubble'"),
    ({"pp_size": 1, "pp_schedule": "1f1b"}, "pp_schedule: expected 'gpipe' with pp_size=1"),
]


@pytest.mark.parametrize("changes, said", REFUSED, ids=[next(iter(changes)) for changes, _ in REFUSED])
def test_what_is_not_built_is_refused(changes, said):
    c = default_config()
    c.update({"gpus": 4, "pp_size": 4})
    c.update_from_flattened_dict(changes)
    with pytest.raises(ConfigError, match=f"^{said}") as error:
        checks.check(c)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("pp_schedule, tp_size, layers", [("gpipe", 2, 8), ("1f1b", 1, 7)])
@pytest.mark.full
def test_a_compiled_step_moves_what_the_formulas_say(pp_schedule, tp_size, layers):
    """Over every axis, within 2 %; loops whose rounds depend on the stage count as often as they run."""
    kind: dict[str, Any] = {"pp_size": 2, "tp_size": tp_size, "zero_level": 3, "pp_schedule": pp_schedule}
    config = dataclasses.replace(CONFIG, num_hidden_layers=layers)  # XLA unrolls loops of two, and drops a fetch
    small = Small(8, config=config, lmhead_chunks=2, **kind)
    microbatches = 5
    batch = jax.ShapeDtypeStruct((microbatches, data_parallel(small.mesh), 24), np.int32)
    # On CPUs, XLA moves what a loop of one round or none does not change out of it, collectives too; not on GPUs.
    options = {"xla_disable_hlo_passes": "while-loop-invariant-code-motion"}
    compiled = small.step.lower(small.plan, batch, batch).compile(options)
    of_group = traffic.BatchShape(sequences=1, sequence_len=24, microbatches=microbatches)
    module = stages.with_rounds(hlo.parse_module(compiled.as_text()), small.run, of_group)
    found = {(x.op, x.axis): x.bytes for x in hlo.collectives([(module, 1)], small.mesh.shape)}
    expected = step_collectives.collective_bytes(small.run, of_group)
    assert {("collective-permute", "pp"), ("all-gather", "dp_shard"), ("reduce-scatter", "dp_shard")} <= expected.keys()
    for key in expected.keys() | found.keys():
        assert found.get(key, 0) == pytest.approx(expected.get(key, 0), rel=0.02, abs=100), key

    def passes(module: hlo.Module, name: str) -> float:
        """How often the loop over a stage's layers runs in a step."""
        named = f"/{name}/while"
        loops = ((i, times) for i, times, _ in hlo.executed(module) if i.opcode == "while")
        return sum(float(times) for i, times in loops if f'{named}"' in i.attributes)

    for name in ("forward", "backward"):
        assert passes(module, name) == microbatches
        lockstep = stages.with_rounds(hlo.parse_module(compiled.as_text()), small.run, of_group, lockstep=True)
        assert passes(lockstep, name) == microbatches + 1  # as long as both stages need, one after the other
    assert stages.bubble(small.run, microbatches) == pytest.approx(1 / 6)


def test_the_planner_counts_what_a_stage_has():
    """A quarter of the layers, and of the vocabulary; residuals of the microbatches in flight."""

    batch = traffic.BatchShape(sequences=1, sequence_len=512, microbatches=16)

    def on_device(**changes):
        c = default_config()
        c.model.update({"num_hidden_layers": 8})
        c.update({"gpus": 4, "gradient_accumulation_steps": 16})
        c.update_from_flattened_dict(changes)
        run = from_config(c, abstract_mesh(4, **mesh_sizes(c)), total_steps=10)
        return {name: row["device"] for name, row in footprint.by_class(run, batch, "gpu").items()}

    of_one, of_gpipe = on_device(dp_replicate_size=4), on_device(pp_size=4)
    of_1f1b = on_device(pp_size=4, pp_schedule="1f1b")
    for name in ("weights", "master", "moments", "grads"):
        assert of_gpipe[name] == pytest.approx(of_one[name] / 4, rel=1e-3)
    assert of_gpipe["residuals"] == 16 * of_one["residuals"] / 4
    assert of_1f1b["residuals"] == 7 * of_one["residuals"] / 4
    of_seven = on_device(**{"model.num_hidden_layers": 7}, pp_size=4)  # 2 in a stage, as of eight
    assert of_seven == of_gpipe


def planned_run(gpus: int, **changes):
    """The run of a config of eight layers, and its batch of four microbatches."""
    c = default_config()
    c.model.update({"num_hidden_layers": 8})
    c.update({"gpus": gpus, "gradient_accumulation_steps": 4, "zero_level": 3})
    c.update_from_flattened_dict(changes)
    return from_config(c, abstract_mesh(gpus, **mesh_sizes(c)), total_steps=10), traffic.batch_of(c)


def test_the_planner_takes_the_time_of_the_slowest_stage():
    """Of stages with other windows, the one that attends to most; products are those of any stage."""
    windows = {"model.sliding_window": 64, "model.sliding_window_pattern": 8}
    run, batch = planned_run(2, pp_size=2, sequence_len=4096, **windows)
    assert patterns(run, run.model.segments[0]).of_stages == (0, 1)
    assert stages.slowest(run) == 1
    gpu = GPUS["rtx4090"]

    def forward(run) -> float:
        return products.of_blocks(run, batch, gpu).forward

    others = [planned_run(2, pp_size=2, sequence_len=4096, **x)[0] for x in ({"model.sliding_window": 64}, {})]
    local, everything = map(forward, others)
    assert forward(run) == pytest.approx(local + (everything - local) / 4)  # one of its four layers sees everything


@pytest.mark.full
def test_weights_are_read_into_stages_that_are_not_all_full():
    """Each layer once, by its number; zeros behind the last one."""
    expected = jax.device_get(Small(config=FIVE).state.weights)
    asked = []

    def read_layer(segment, l: int):
        asked.append(l)
        assert l < FIVE.num_hidden_layers
        return jax.tree.map(lambda x: x[l], expected[segment.name])

    found = Small(2, config=FIVE, pp_size=2).run.load_state(read_layer, lambda model: expected[OUTER])
    assert asked == list(range(5))
    for part in (found.weights, found.master):
        jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[:5], y), part["blocks"], expected["blocks"])
        assert all(x.shape[0] == 6 and not np.any(np.asarray(x[5:])) for x in jax.tree.leaves(part["blocks"]))


def test_what_is_gathered_after_an_update_is_that_of_a_stage():
    """A quarter of the layers on each of four stages, and a quarter of the vocabulary; by hand for one stage."""
    batch = traffic.BatchShape(sequences=1, sequence_len=512, microbatches=4)
    sent = []
    for stages_ in (1, 4):
        c = default_config()
        c.update({"gpus": 2 * stages_, "pp_size": stages_, "zero_level": 1, "gradient_accumulation_steps": 4})
        run = from_config(c, abstract_mesh(c.gpus, **mesh_sizes(c)), total_steps=10)
        sent.append(step_collectives.collective_bytes(run, batch)["all-gather", "dp_shard"])
    parameters = sum(
        (1 if name == OUTER else run.model.num_layers) * math.prod(p.shape)
        for name, section in run.model.params.items()
        for p in jax.tree.leaves(section)
    )
    itemsize = jnp.dtype(default_config().model_dtype).itemsize
    assert sent[0] == pytest.approx(parameters * itemsize / 2, rel=1e-3)
    assert sent[1] == pytest.approx(sent[0] / 4, rel=1e-3)
