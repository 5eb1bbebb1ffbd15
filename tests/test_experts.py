"""A mixture of experts: against transformers, whatever its files look like, and under every placement.

`fixtures/make_experts_reference.py` has how the reference was made. `MISTAKES` at the end are mistakes that other
trainers made without an error, each made here in our source, with the test that notices.
"""

import builtins
import dataclasses
import dis
import inspect
import json
import re
import tempfile
import types
from collections.abc import Set
from pathlib import Path

import chex
import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from commands import convert
from flax import nnx
from small import CONFIG, Small, needs, normal, plain_loss, quick_at, tokens, worst_relative
from test_engine import engine_gradients
from test_gguf import opened
from test_gguf_export import tokenizer_json
from test_parity import close
from test_pipeline import without_padding

from surojax import ConfigError, default_config, train
from surojax.assembly.from_config import architecture
from surojax.config import flags
from surojax.config.checks import check
from surojax.exchange import config_json
from surojax.exchange.gguf_file import open_file
from surojax.exchange.huggingface import model_fields, read_config
from surojax.exchange.model_tensors import SINGLE, Weights, check_tensors, stacks, tensors_by_name
from surojax.models import decoder, decoder_config, decoder_model, grouped, operations, router_losses
from surojax.models.grouped import blocks_of, number_of_blocks, rows_of_block, sum_of_experts
from surojax.models.kinds import experts
from surojax.models.linear_fp8 import InFloat8
from surojax.models.model import Compute
from surojax.models.operations import Operations
from surojax.models.router_losses import RouterLosses, RouterStatistics
from surojax.numerics import base_formats
from surojax.numerics.recipes import Precision
from surojax.optim.normuon import normuon
from surojax.optim.optimizer import TensorContext
from surojax.placement.layout import Layout
from surojax.planner import aot, candidate, choices
from surojax.planner.gpus import GPUS
from surojax.planner.run_plan import checked, plan_in_subprocess
from surojax.run.metrics import MetricsLog
from surojax.run.routing import Usage
from surojax.step.residuals import recomputing_segment

with np.load(Path(__file__).parent / "fixtures" / "experts_reference.npz") as arrays:
    REFERENCE = dict(arrays)
CASES = sorted({name.split("/")[0] for name in REFERENCE if "/" in name})
PARTS = ("gate", "up", "down")
UNUSED, TIED = 4, (5, 6)
LOSSES = RouterLosses(1.0, 0.1)  # those of the reference
FOUR = {"model.num_experts": 4, "model.num_experts_per_tok": 2}
ONLY_TOGETHER = ("gpt_oss", "granitemoe")  # whose files have no tensor for each expert
FILES = [(case, files) for case in CASES for files in ("together", "apart")[: 1 if case in ONLY_TOGETHER else 2]]
ALL = {f"offload_{name}": True for name in ("residual", "optimizer", "master", "grads", "weights")}


def stored(case: str, what: str) -> dict[str, np.ndarray]:
    """The arrays of a case, by name."""
    start = f"{case}/{what}/"
    return {name.removeprefix(start): x for name, x in REFERENCE.items() if name.startswith(start)}


MIXTRAL = {".mlp.gate.": ".gate.", ".gate_proj.": ".w1.", ".up_proj.": ".w3.", ".down_proj.": ".w2."}


def apart(weights: dict[str, np.ndarray], case: str = "") -> dict[str, np.ndarray]:
    """Tensors as published files have them: of each expert, under the family's names."""
    found = {}
    for name, x in weights.items():
        before, is_of_experts, last = name.rpartition(".experts.")
        if not is_of_experts:
            found[name] = x
            continue
        halves = np.split(x, 2, axis=1) if last == "gate_up_proj" else [x]
        names = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
        for half, of_all in zip(names, halves, strict=True):
            found |= {f"{before}.experts.{e}.{half}.weight": np.ascontiguousarray(w) for e, w in enumerate(of_all)}
    if case != "mixtral":
        return found
    named_so = {}
    for name, x in found.items():
        for ours, theirs in MIXTRAL.items():
            name = name.replace(ours, f".mlp{theirs}" if ours == ".mlp.gate." else theirs)
        named_so[name.replace(".mlp.", ".block_sparse_moe.")] = x
    return named_so


# Parts of names of granitemoe: in its modules, in its files, and of most families in modules.
GRANITE = {
    "block_sparse_moe.router.weight": ("block_sparse_moe.router.layer.weight", "mlp.gate.weight"),
    "block_sparse_moe.experts.gate_up_proj": ("block_sparse_moe.input_linear.weight", "mlp.experts.gate_up_proj"),
    "block_sparse_moe.experts.down_proj": ("block_sparse_moe.output_linear.weight", "mlp.experts.down_proj"),
}


def in_files(weights: dict[str, np.ndarray], case: str) -> dict[str, np.ndarray]:
    """Tensors with the names that published files have, of a family with all experts in one."""
    renamed = {module: of_file for module, (of_file, _) in GRANITE.items()} if case == "granitemoe" else {}
    found = {}
    for name, x in weights.items():
        for module, of_file in renamed.items():
            name = name.replace(module, of_file)
        found[name] = x
    return found


def written(folder: Path, case: str, weights: dict[str, np.ndarray]) -> Path:
    """A model's folder."""
    folder.mkdir()
    (folder / "config.json").write_text(str(REFERENCE[f"{case}/config.json"]))
    safetensors.numpy.save_file(weights, folder / SINGLE)
    return folder


def config_of(case: str) -> decoder_config.DecoderConfig:
    c = default_config()
    c.model.update(model_fields(json.loads(str(REFERENCE[f"{case}/config.json"]))))
    return architecture(c)


def in_names(tree, model, case: str) -> dict[str, np.ndarray]:
    """Arrays of a tree like the weights, as the modules of transformers 5 have them."""
    found = tensors_by_name(jax.tree.map(np.asarray, tree), model)
    for name in [name for name in found if ".experts.gate_proj." in name]:
        before, kind = name.split("gate_proj.")
        gate, up, down = (found.pop(f"{before}{part}_proj.{kind}") for part in PARTS)
        both = np.concatenate([gate, up], axis=1)
        if case == "gpt_oss":
            both[:, ::2], both[:, 1::2] = gate, up
            both, down = both.swapaxes(1, -1), down.swapaxes(1, -1)
        end = "_bias" if kind == "bias" else ""
        found |= {f"{before}gate_up_proj{end}": both, f"{before}down_proj{end}": down}
    for module, (_, of_most) in GRANITE.items() if case == "granitemoe" else ():
        for name in [name for name in found if name.endswith(of_most)]:
            found[name.replace(of_most, module)] = found.pop(name)
    return found


def without_ties(name: str, x: np.ndarray) -> np.ndarray:
    """A gradient in which that of the two equal experts is their sum: which of them is chosen, nobody says."""
    if not (name.endswith("mlp.gate.weight") or ".router." in name or ".experts." in name):
        return x
    return np.concatenate([x[: TIED[0]], x[TIED[0] :].sum(axis=0, keepdims=True)])


@pytest.mark.parametrize("case, files", quick_at(FILES, FILES.index(("mixtral", "apart"))))
def test_equals_transformers(tmp_path, case, files):
    """Logits, loss, all gradients, the routers' losses and their gradients, through the engine."""
    weights = stored(case, "weight")
    of_files = apart(weights, case) if files == "apart" else in_files(weights, case)
    folder = written(tmp_path / "model", case, of_files)
    config = config_of(case)
    model = decoder_model.build(config)
    tensors = Weights(folder)
    check_tensors(tensors, model)
    params = stacks(tensors, model, "float32", jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    for name, x in in_names(params, model, case).items():
        assert np.array_equal(x, weights[name]), name
    if files == "apart":
        return
    check_equal_to_transformers(case, params)


@pytest.mark.parametrize("files", ["together", "apart"])
def test_mixtral_may_have_either_name_of_the_module_in_either_layout(tmp_path, files):
    """transformers 5 renames block_sparse_moe to mlp before anything else, and so reads all four."""
    weights = stored("mixtral", "weight")
    config = config_of("mixtral")
    model = decoder_model.build(config)
    renamed = {}
    for name, x in (apart(weights, "mixtral") if files == "apart" else weights).items():
        one, other = ("mlp.", "block_sparse_moe.")[:: 1 if files == "together" else -1]
        renamed[name.replace(one, other) if ".experts." in name or ".gate." in name else name] = x
    tensors = Weights(written(tmp_path / "model", "mixtral", renamed))
    check_tensors(tensors, model)
    read = stacks(tensors, model, "float32", jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    for name, x in in_names(read, model, "mixtral").items():
        assert np.array_equal(x, weights[name]), name


def check_equal_to_transformers(case: str, params) -> None:
    """Raises AssertionError unless logits, losses and all gradients are those of the reference, the routers' too."""
    config = config_of(case)
    inputs, labels = REFERENCE[f"{case}/tokens"], REFERENCE[f"{case}/labels"]
    small = Small(config=config)
    small.state = small.state._replace(weights=params)
    model = small.run.model
    graph = nnx.graphdef(nnx.eval_shape(lambda: decoder.Decoder(config, rngs=nnx.Rngs(0))))
    logits = jax.jit(lambda w: nnx.merge(graph, w)(inputs))(params)
    close(logits, REFERENCE[f"{case}/logits"], "logits")
    batch = inputs[None], labels[None]
    loss, grads = engine_gradients(small, batch)
    close(loss, REFERENCE[f"{case}/loss"], "loss")
    expected = stored(case, "grad")
    found = in_names(grads, model, case)
    assert found.keys() == expected.keys()
    for name, x in found.items():
        close(without_ties(name, x), without_ties(name, expected[name]), f"gradient of {name}")
    with_losses = Small(config=config, auxiliary=LOSSES)
    with_losses.state = small.state
    _, of_both = engine_gradients(with_losses, batch)
    auxiliary = in_names(jax.tree.map(np.subtract, of_both, grads), model, case)
    for name, x in stored(case, "aux_grad").items():
        close(without_ties(name, auxiliary[name]), without_ties(name, x), f"gradient of the routers' losses of {name}")
    with_losses.state = jax.tree.map(jnp.array, with_losses.state)  # the step uses it up
    _, metrics = with_losses.step(with_losses.state, *with_losses.put(batch))
    wanted_loss = np.mean(REFERENCE[f"{case}/balance"] + 0.1 * REFERENCE[f"{case}/z"])
    close(metrics["auxiliary_loss"], wanted_loss, "routers' losses")
    chosen = np.asarray(metrics["statistics"]["blocks"].chosen_E)
    of_each, wanted = (without_ties("mlp.gate.weight", x.T) for x in (chosen, REFERENCE[f"{case}/chosen"]))
    assert np.array_equal(of_each, wanted)
    assert not chosen[:, UNUSED].any()


# --- the sum over chosen experts --------------------------------------------------------------------------------------


def dense(w, x_ND, weights_Nk, chosen_Nk):
    """Every choice by itself."""
    total = jnp.zeros_like(x_ND)
    for j in range(chosen_Nk.shape[1]):
        h_NF = jnp.tanh(jnp.einsum("nd,nfd->nf", x_ND, w["up"][chosen_Nk[:, j]])) * weights_Nk[:, j : j + 1]
        total = total + jnp.einsum("nf,ndf->nd", h_NF, w["down"][chosen_Nk[:, j]])
    return total


def two_products(trained, fixed, x_RD, weight_R, number):
    w = trained | fixed
    return (jnp.tanh(x_RD @ w["up"].T) * weight_R[:, None]) @ w["down"].T


@pytest.mark.full(after=1)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    "chosen",
    [
        "spread",  # over all experts but one
        "one",  # expert for all tokens
        "first",  # few tokens, fewer than experts
    ],
)
def test_every_choice_is_computed(chosen, frozen):
    """Forward and all gradients; an expert without a token has exact zeros."""
    N, k, E, D, F = {"spread": 300, "one": 40, "first": 3}[chosen], 2, 7, 16, 8
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    x, weights, w = draw(N, D), draw(N, k), {"up": draw(E, F, D), "down": draw(E, D, F)}
    used = {"spread": [0, 1, 2, 3, 5, 6], "one": [6, 2], "first": [0, 1]}[chosen]
    numbers = jnp.asarray(np.stack([rng.permutation(used)[:k] for _ in range(N)]), jnp.uint8)

    def ours(w, x, weights):
        trained, fixed = ({}, w) if frozen else (w, {})
        return jnp.sin(sum_of_experts(two_products, trained, fixed, x, weights, blocks_of(numbers, E))).sum()

    def expected(w, x, weights):
        return jnp.sin(dense(jax.lax.stop_gradient(w) if frozen else w, x, weights, numbers)).sum()

    found, wanted = (jax.jit(jax.value_and_grad(f, (0, 1, 2)))(w, x, weights) for f in (ours, expected))
    assert worst_relative(found[1][1:], wanted[1][1:]) < 1e-5 and worst_relative(found[0], wanted[0]) < 1e-5
    for name, gradient in found[1][0].items():
        close_to_zero = np.setdiff1d(np.arange(E), used)
        assert not np.asarray(gradient)[close_to_zero].any()
        np.testing.assert_allclose(gradient, wanted[1][0][name], atol=1e-4)


@pytest.mark.full(after=2)
@pytest.mark.parametrize("choices, experts", [(1, 8), (8, 128), (4096, 8), (5, 3), (1024, 1), (32768, 128), (700, 7)])
def test_blocks_have_room_however_choices_fall(choices, experts):
    """The most uneven ways to fall: all to one expert, one to each and the rest to the last, one more than a block."""
    rows = rows_of_block(choices, experts)
    M = number_of_blocks(choices, experts, rows)
    each = np.arange(choices) % experts
    uneven = np.minimum(np.arange(choices), experts - 1)
    just_over = np.minimum(np.arange(choices) // (rows + 1), experts - 1)
    for numbers in (each, uneven, just_over, np.zeros(choices, int)):
        found = blocks_of(jnp.asarray(numbers)[:, None], experts)
        assert found.choice_MR.shape == (M, rows)
        real = np.asarray(found.choice_MR) < choices
        assert sorted(np.asarray(found.choice_MR)[real]) == list(range(choices))
        owner = np.broadcast_to(np.asarray(found.expert_M)[:, None], real.shape)
        assert np.array_equal(owner[real], numbers[np.asarray(found.choice_MR)[real]])
        assert np.array_equal(np.asarray(found.choice_MR).reshape(-1)[np.asarray(found.place_Nk)[:, 0]], range(choices))


@pytest.mark.parametrize(
    "precision, recipe_enabled, dtype, how, why",
    [
        ({}, True, "bfloat16", {}, "kernels='xla'"),
        ({"kernels": "auto"}, True, "bfloat16", {}, ""),
        ({"kernels": "auto"}, True, "bfloat16", {"sent": True}, "tokens are sent to them (ep_size)"),
        ({"kernels": "auto"}, True, "bfloat16", {"adapted": True}, "they have adapters"),
        ({"kernels": "auto", "recipe": "mxfp8"}, True, "bfloat16", {}, "recipe='mxfp8'"),
        ({"kernels": "auto", "recipe": "mxfp8"}, False, "bfloat16", {}, ""),
        ({"kernels": "auto", "matmul_dtype": "float32"}, True, "bfloat16", {}, "their products have another dtype"),
        ({"kernels": "auto", "gradient_dtype": "float32"}, True, "bfloat16", {}, "their products have another dtype"),
        ({"kernels": "auto", "recipe": "fp8_current", "matmul_dtype": "float32"}, True, "float32", {}, ""),
        ({"kernels": "auto", "recipe": "fp8_current"}, False, "float32", {}, "takes 16-bit matrices of multiples of"),
        ({"kernels": "auto"}, True, "float32", {}, "these are float32 64 x 96 on a GPU"),
    ],
)
def test_why_no_kernel_computes_experts(precision, recipe_enabled, dtype, how, why):
    found = grouped.why_by_loop(Precision(**precision), recipe_enabled, dtype, (4, 64, 96), **how)
    assert why in found and bool(why) == bool(found)


# --- the engine -------------------------------------------------------------------------------------------------------

SEVEN = dataclasses.replace(CONFIG, num_experts=7, num_experts_per_tok=3, moe_intermediate_size=24)
BOTH = RouterLosses(0.1, 0.01)
ORDER_OF_SUMS = 2e-5


def reference_losses(config, params, inputs, labels):
    """(loss + router losses, loss) of the plain model, in one piece: all tokens of a step together."""
    loss = plain_loss(config)(params, inputs, labels)
    graph = nnx.graphdef(nnx.eval_shape(lambda: decoder.Block(config, rngs=nnx.Rngs(0))))
    x = params["outer"]["embed"][inputs.reshape(-1, inputs.shape[-1])]
    counted = (labels >= 0).reshape(-1, labels.shape[-1])
    found = []
    for l in range(config.num_hidden_layers):
        block = nnx.merge(graph, jax.tree.map(lambda w, l=l: w[l], params["blocks"]))
        x, _, routed = block(x, decoder.Operations(), routing=decoder.Routing(counted))
        found.append(routed.statistics)
    statistics = jax.tree.map(lambda *layers: jnp.stack(layers), *found)
    return loss + BOTH({"blocks": statistics}, counted.sum()), loss


@needs(8)
@pytest.mark.parametrize(
    "devices, placed",
    quick_at(
        [
            (4, {"zero_level": 3, **ALL}),
            (4, {"tp_size": 2, "zero_level": 3, "compute": Compute(sequence_chunks=2)}),
            (1, {"packed": True}),
            (4, {"pp_size": 2, "cp_size": 2, "compute": Compute(cp_method="allgather"), "recompute_block": False}),
        ],
    ),
)
def test_losses_of_routers_are_of_a_whole_step(devices, placed):
    """Loss, routers' losses and all gradients of two microbatches are those of all tokens in one piece."""
    fetched_together = 1 if "pp_size" in placed else 2
    small = Small(devices, config=SEVEN, auxiliary=BOTH, microbatches_per_fetch=fetched_together, **placed)
    inputs, labels = tokens(2, 8, 32)
    starts = (np.zeros_like(inputs),) if placed.get("packed") else ()
    params = jax.tree.map(np.asarray, Small(config=SEVEN).state.weights)
    both = jax.jit(jax.value_and_grad(lambda p: reference_losses(SEVEN, p, inputs, labels), has_aux=True))
    (_, loss), grads = both(params)
    found, found_grads = engine_gradients(small, (inputs, labels, *starts))
    assert found == pytest.approx(float(loss), rel=ORDER_OF_SUMS)
    assert worst_relative(without_padding(found_grads, SEVEN), grads) < ORDER_OF_SUMS


@pytest.mark.full
@needs(4)
def test_statistics_are_sums_over_tokens_that_count():
    """Not doubled by recomputation; the same whatever the microbatches and devices; none of them in an evaluation."""
    inputs, labels = tokens(4, 8, 16)
    found = []
    for devices, shape, placed in (
        (1, (4, 8), {}),
        (4, (2, 16), {"zero_level": 3, "tp_size": 2, "microbatches_per_fetch": 2}),
    ):
        small = Small(devices, config=SEVEN, **placed)
        batch = inputs.reshape(*shape, 16), labels.reshape(*shape, 16)
        _, metrics = small.step(small.state, *small.put(batch))
        statistics = jax.device_get(metrics["statistics"]["blocks"])
        assert np.array_equal(statistics.chosen_E.sum(axis=1), np.full(3, 3 * (labels >= 0).sum()))
        np.testing.assert_allclose(statistics.probability_E.sum(axis=1), (labels >= 0).sum(), rtol=1e-5)
        found.append(statistics)
    for other in found[1:]:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), found[0], other)
    of_losses = Small(config=SEVEN, auxiliary=RouterLosses(100.0, 100.0))
    batch = inputs[0], labels[0]
    without = Small(config=SEVEN).run.eval_step()(of_losses.state.weights, *batch)
    assert jax.device_get(of_losses.run.eval_step()(of_losses.state.weights, *batch)) == jax.device_get(without)


FP8_EXPERTS = dataclasses.replace(CONFIG, hidden_size=64, intermediate_size=32, num_experts=3, num_experts_per_tok=1)


@pytest.mark.full
def test_no_two_experts_share_a_scale_in_float8():
    """Matrices of an expert that are 2^20 times smaller give results, and gradients, that are exactly as much smaller,
    where another expert's scale would make them 0; an expert without a token has gradients of 0."""
    module = experts.Experts(FP8_EXPERTS, rngs=nnx.Rngs(0))
    graph, w = nnx.split(module)
    w = nnx.to_pure_dict(w)
    smaller = w | {"w_down": w["w_down"].at[1].multiply(2.0**-20)}
    x_BSD, dy_BSD = (normal(i, (2, 16, 64)) for i in (1, 2))
    chosen = jnp.asarray(np.arange(32).reshape(2, 16, 1) % 2, jnp.int32)
    ops = Operations(Compute(precision=Precision("fp8_current")), in_float8=InFloat8({}))

    @jax.jit
    def results(w):
        def mixed(w, x_BSD):
            return nnx.merge(graph, w).mix(x_BSD, chosen, jnp.ones((2, 16, 1)), ops)

        y_BSD, vjp = jax.vjp(mixed, w, x_BSD)
        return y_BSD, *vjp(dy_BSD)

    (y, dw, dx), (small_y, small_dw, small_dx) = results(w), results(smaller)
    of_smaller = np.asarray(chosen == 1)
    for big, small in ((y, small_y), (dx, small_dx)):
        assert np.abs(big).max() > 0
        np.testing.assert_array_equal(np.where(of_smaller, np.float32(2.0**-20) * big, big), small)
    for name, factor in {"w_gate": 2.0**-20, "w_up": 2.0**-20, "w_down": 1.0}.items():
        np.testing.assert_array_equal(small_dw[name][0], dw[name][0])
        np.testing.assert_array_equal(small_dw[name][1], factor * dw[name][1])
        assert np.abs(dw[name][1]).max() > 0 and np.abs(dw[name][2]).max() == 0


@needs(2)
@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_hybrid"])
@pytest.mark.full
def test_experts_train_in_float8(recipe):
    """As in bf16 within float8's error; in a tensor-parallel group, too, whose devices have parts of every expert."""
    config = dataclasses.replace(FP8_EXPERTS, num_experts_per_tok=2, n_shared_experts=1)
    how = {"config": config, "compute": Compute(precision=Precision(recipe))}
    batches = [tokens(2, 4, 16, seed=i) for i in range(3)]
    expected = Small(config=config).train(batches)
    losses = Small(**how).train(batches)
    np.testing.assert_allclose(losses, expected, rtol=0.05)
    assert losses != expected
    np.testing.assert_allclose(Small(2, tp_size=2, **how).train(batches), losses, rtol=0.02)


@pytest.mark.full
@pytest.mark.parametrize("chunks", quick_at([(1,), (2,)], 0))
def test_recomputation_takes_the_experts_that_were_chosen(chunks):
    """The choice is among what is saved, one byte each; experts put in its place get the gradients."""
    (segment,) = decoder_model.build(SEVEN, Compute(sequence_chunks=chunks)).segments
    layer = jax.tree.map(lambda x: x[0], Small(config=SEVEN).state.weights["blocks"])
    x = np.random.default_rng(0).normal(size=(2, 8, 32)).astype(np.float32)
    of_block = recomputing_segment(segment)
    forward = jax.jit(lambda w, x: of_block.block_forward(w, x, None, segment.variants[0]))
    _, (saved_x, decided) = forward(layer, x)
    assert decided.dtype == jnp.uint8 and decided.shape == (2, 8, 3)
    others = jnp.broadcast_to(jnp.uint8([1, 2, 4]), decided.shape)
    backward = jax.jit(lambda w, saved: of_block.block_backward(w, saved, (x, None), None, segment.variants[0], None))
    dw, _, _ = backward(layer, (saved_x, others))
    touched = np.asarray(jnp.abs(dw["mlp"]["w_down"]).max(axis=(1, 2)) > 0)
    assert touched.tolist() == [False, True, True, False, True, False, False]


@pytest.mark.parametrize("fields", [{}, {"norm_topk_prob": True, "expert_bias": True}])
def test_a_router_saves_nothing_for_each_choice_and_expert(fields):
    """Without recomputation: of 3 choices of 7 experts, and of biases that are summed by choices."""
    (segment,) = decoder_model.build(dataclasses.replace(SEVEN, **fields)).segments
    layer = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), segment.params)
    x = jax.ShapeDtypeStruct((2, 8, 32), jnp.float32)
    _, saved = jax.eval_shape(lambda w, x: segment.block_forward(w, x, None, segment.variants[0]), layer, x)
    shapes = {saved.shape for saved in jax.tree.leaves(saved)}
    assert (2, 8, 7) in shapes and not any(shape[-2:] == (3, 7) for shape in shapes)


@pytest.mark.full
@needs(4)
def test_devices_whose_experts_have_no_token():
    """Experts are sharded over four devices, each token is the same, so all choose the experts of three at most."""
    eight = dataclasses.replace(SEVEN, num_experts=8, num_experts_per_tok=3)
    same = np.full((1, 4, 16), 7, np.int32)
    expected_loss, expected = engine_gradients(Small(config=eight), (same, same))
    used = (np.abs(expected["blocks"]["mlp"]["w_down"]).max(axis=(2, 3)) > 0).reshape(-1, 4, 2)
    assert (used.sum(axis=(1, 2)) == 3).all() and not used.any(axis=2).all()
    loss, grads = engine_gradients(Small(4, config=eight, zero_level=3), (same, same))
    assert loss == pytest.approx(expected_loss, rel=ORDER_OF_SUMS)
    of_mlp = [x["blocks"]["mlp"] for x in (grads, expected)]  # attention's weights, over equal values, have none
    assert worst_relative(*of_mlp) < ORDER_OF_SUMS
    assert not np.abs(grads["blocks"]["mlp"]["w_down"][~used.reshape(-1, 8)]).any()


def test_layers_with_experts_are_sharded_over_experts():
    """Where their number divides; else over their width, as any matrix."""
    eight = Small(4, config=dataclasses.replace(SEVEN, num_experts=8), zero_level=3)
    of_mlp = eight.run.engine.layouts.master["blocks"]["mlp"]
    assert all(of_mlp[name].stored[0] == "dp_shard" for name in ("w_gate", "w_up", "w_down", "router"))
    seven = Small(4, config=SEVEN, zero_level=3).run.engine.layouts.master["blocks"]["mlp"]
    assert seven["w_gate"].stored == jax.P(None, "dp_shard") and seven["router"].stored == jax.P(None, "dp_shard")


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["olmoe_normed", "qwen3_moe_tied", "qwen3_moe_dense", "mixtral"])
def test_models_come_out_as_they_went_in(tmp_path, case):
    """To safetensors of each expert or of all, to the bit, from either kind of files; the same config.json."""
    weights = stored(case, "weight")
    folders = [
        written(tmp_path / "together", case, weights),
        written(tmp_path / "apart", case, apart(weights, case)),
    ]
    for folder in folders:
        out = convert.convert(folder, tmp_path / f"from_{folder.name}", dtype="float32")
        found = safetensors.numpy.load_file(out / SINGLE)
        assert found.keys() == apart(weights, case).keys()
        chex.assert_trees_all_equal(found, apart(weights, case))
        assert model_fields(read_config(out)) == model_fields(read_config(folder))
        how = {"dtype": "float32", "experts_together": True}
        out = convert.convert(folder, tmp_path / f"together_from_{folder.name}", **how)
        found = safetensors.numpy.load_file(out / SINGLE)
        assert len(found) == len(weights)
        back = Weights(out)
        chex.assert_trees_all_equal(
            {name: back.read(name) for name in back.names}, {name: Weights(folder).read(name) for name in back.names}
        )
        assert case == "mixtral" or found.keys() == weights.keys()  # else the router's name is that of its files
    with pytest.raises(
        ConfigError, match=r"^--experts-together: expected a folder of a model with experts, got a \.gguf"
    ):
        convert.convert(folders[0], tmp_path / "x.gguf", experts_together=True)


@pytest.mark.parametrize("case", ONLY_TOGETHER)
def test_models_whose_files_have_all_experts_in_one_tensor_come_out_as_they_went_in(tmp_path, case):
    """To the bit, asked for or not; the same config.json; and a config.json made from the fields is that model's."""
    weights = in_files(stored(case, "weight"), case)
    folder = written(tmp_path / "model", case, weights)
    for together in (False, True):
        out = convert.convert(folder, tmp_path / f"out_{together}", dtype="float32", experts_together=together)
        chex.assert_trees_all_equal(safetensors.numpy.load_file(out / SINGLE), weights)
        assert model_fields(read_config(out)) == model_fields(read_config(folder))
    fields = model_fields(read_config(folder))
    made = config_json.made(fields, 64, {})
    assert made["model_type"] == case and config_json.agrees(made, fields)


UP = "model.layers.1.mlp.experts.{}.up_proj.weight"


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda t: t.pop("model.layers.1.mlp.experts.3.up_proj.weight"),
            r"expected model\.layers\.1\.mlp\.experts\.3\.up",
        ),
        (
            lambda t: t.pop("model.layers.1.mlp.experts.6.up_proj.weight"),
            r"\[7, 12, 24\], as config\.json says, got \[6, ",
        ),
        (
            lambda t: t.update({"model.layers.0.mlp.experts.2.up_proj.weight": np.zeros((3, 24), np.float32)}),
            r"model\.layers\.0\.mlp\.experts\.2\.up_proj\.weight: expected \[12, 24\], as expert 0, got \[3, 24\]",
        ),
        (lambda t: t.pop("model.layers.0.mlp.gate.weight"), r"expected model\.layers\.0\.mlp\.gate\.weight in"),
        # Numbers that are none: with zeros before them, in other scripts' digits, of 5,000 digits.
        *(
            (
                lambda t, number=number: t.update({UP.format(number): t[UP.format(3)]}),
                r"has model\.layers\.1\.mlp\.experts\.\S+, which a model with this config\.json does not use",
            )
            for number in ("03", "003", "٣", "-3", "3" * 5000)
        ),
        (
            lambda t: t.update({UP.format(10): t[UP.format(3)]}),
            r"expected model\.layers\.1\.mlp\.experts\.7\.up_proj\.weight beside that of expert 10",
        ),
        (
            lambda t: t.update({UP.format(3).replace("layers.1", "layers.01"): t[UP.format(3)]}),
            r"expected model\.layers\.01\.mlp\.experts\.0\.up",
        ),
        (
            lambda t: t.update({"model.layers.1.mlp.experts.gate_up_proj": np.zeros((7, 24, 24), np.float32)}),
            r"expected each expert's tensor or one of all, got \S+experts\.0\.\S+ and \S+gate_up_proj",
        ),
        (
            lambda t: t.update({f"language_model.{UP.format(3)}": t[UP.format(3)]}),
            r"expected one tensor for 'model\.layers\.1\.mlp\.experts\.3\.up_proj\.weight', got 'lang\S+' and 'mod",
        ),
    ],
)
def test_files_without_all_experts_are_refused(tmp_path, change, message):
    tensors = apart(stored("olmoe", "weight"))
    change(tensors)
    folder = written(tmp_path / "model", "olmoe", tensors)
    with pytest.raises(ConfigError, match=message):
        check_tensors(Weights(folder), decoder_model.build(config_of("olmoe")))


def test_names_of_modules_are_read_too(tmp_path):
    """Granite-MoE as transformers 5 has it in memory, which is neither its files' nor most families'."""
    in_modules = stored("granitemoe", "weight")
    of_modules = Weights(written(tmp_path / "modules", "granitemoe", in_modules))
    of_files = Weights(written(tmp_path / "files", "granitemoe", in_files(in_modules, "granitemoe")))
    check_tensors(of_modules, decoder_model.build(config_of("granitemoe")))
    assert in_modules.keys() != in_files(in_modules, "granitemoe").keys() and of_modules.names == of_files.names
    for name in of_files.names:
        np.testing.assert_array_equal(of_modules.read(name), of_files.read(name))
    both = in_modules | in_files(in_modules, "granitemoe")
    with pytest.raises(ConfigError, match=r"expected one tensor for \S+, got \S+ and \S+; remove one of them"):
        Weights(written(tmp_path / "both", "granitemoe", both))


def check_gguf_and_back(folder: Path, out: Path, *, rounded: str = "NONE", also_known: Set[str] = frozenset()) -> Path:
    """Raises AssertionError unless a model comes back from a GGUF file to the bit, with llama.cpp's names and shapes.

    rounded: part of the names of vectors to which 1 is added in the file, or of which it has the exponential.
    also_known: names that llama.cpp has in addition to those that the package lists for the architecture.

    folder: a model with few tokens, which gets as many as the tokenizer of these tests has.
    """
    given = json.loads((folder / "config.json").read_text())
    given |= {"vocab_size": 7 * given["vocab_size"], "pad_token_id": 0}
    if given.get("hidden_size_per_layer_input"):
        given["vocab_size_per_layer_input"] = given["vocab_size"]
    (folder / "config.json").write_text(json.dumps(given))
    weights = safetensors.numpy.load_file(folder / SINGLE)
    outer = ["model.embed_tokens.weight", "backbone.embeddings.weight", "lm_head.weight"]
    outer += ["model.embed_tokens_per_layer.weight"]
    more = {name: np.tile(x, (7, 1)) if name in outer else x for name, x in weights.items()}
    safetensors.numpy.save_file(more, folder / SINGLE)
    (folder / "tokenizer.json").write_text(tokenizer_json())
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|start|>", "eos_token": "<|end|>"}))
    out = convert.convert(folder, out, dtype="float32")
    c, _, tensors = opened(out)
    of_folder = Weights(folder)
    assert tensors.names == of_folder.names
    for name in tensors.names:
        limit = 1.2e-7 if rounded in name else 0
        np.testing.assert_allclose(tensors.read(name), of_folder.read(name), rtol=0, atol=limit, err_msg=name)
    assert config_json.normal(c.model.to_dict()) == config_json.normal(model_fields(given))
    contents = open_file(out)
    names = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    architecture = contents.metadata["general.architecture"]
    if architecture not in names:  # muse-glimmer is newer than the package
        return out
    known = {gguf.TENSOR_NAMES[x] for x in gguf.MODEL_TENSORS[names[architecture]]}
    for name in contents.tensors:
        theirs = re.sub(r"^blk\.\d+\.", "blk.{bid}.", name)
        assert {theirs, theirs.rpartition(".")[0]} & (known | also_known), name
    for dtype, kind in {"bfloat16": gguf.GGMLQuantizationType.BF16, "float16": gguf.GGMLQuantizationType.F16}.items():
        in_16_bits = open_file(convert.convert(folder, out.with_name(f"{dtype}.gguf"), dtype=dtype)).tensors
        for name, stored_as in in_16_bits.items():  # ggml has no other products with vectors, and routers are exact
            whole = name.endswith((".bias", "norm.weight", "sinks.weight", ".conv.weight", "scale", "_scale.weight"))
            whole = whole or any(
                part in name for part in ("ffn_gate_inp", "_norm_", ".ssm_", "rope_freqs", "per_layer_model")
            )
            whole = whole and not name.endswith(("ssm_in.weight", "ssm_out.weight"))
            assert stored_as.kind == (gguf.GGMLQuantizationType.F32 if whole else kind), name
    return out


@pytest.mark.parametrize("case", ["olmoe", "qwen3_moe", "gpt_oss", "granitemoe"])
def test_models_go_to_gguf_and_back(tmp_path, case):
    """Every tensor to the bit. What llama.cpp takes for granted of a family (norm_topk_prob) has to be so."""
    weights = stored(case, "weight")
    folder = written(tmp_path / "in", case, in_files(weights, case) if case in ONLY_TOGETHER else apart(weights))
    out = check_gguf_and_back(folder, tmp_path / "out.gguf")
    given = json.loads((folder / "config.json").read_text())
    if case == "gpt_oss":
        assert open_file(out).tensors["blk.0.attn_sinks.weight"].shape == (4,)
    if case in ONLY_TOGETHER:
        return
    given |= {"norm_topk_prob": not given["norm_topk_prob"]}
    (folder / "config.json").write_text(json.dumps(given))
    with pytest.raises(ConfigError, match=r"^export: .*norm_topk_prob=.*; export a folder"):
        convert.convert(folder, tmp_path / "other.gguf", dtype="float32")


# --- what else knows of experts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", quick_at([(name,) for name in base_formats.FORMATS]))
def test_experts_are_quantised_each_by_itself(name):
    """No scale is shared: an expert whose numbers are a thousand times larger changes no other."""
    w = np.random.default_rng(0).normal(size=(3, 64, 128)).astype(np.float32)
    w[1] *= 1000
    chosen_format = base_formats.FORMATS[name]
    together = base_formats.quantise(jnp.asarray(w), chosen_format.planned(w.shape, (1, 1)))
    for e in range(3):
        alone = base_formats.quantise(jnp.asarray(w[e]), chosen_format.planned(w[e].shape, (1, 1)))
        jax.tree.map(lambda x, y, e=e: np.testing.assert_array_equal(x[e], y), together, alone)
        numbers = base_formats.dequantise(together, "float32")[e]
        np.testing.assert_array_equal(numbers, base_formats.dequantise(alone, "float32"))


@pytest.mark.full
def test_each_expert_is_a_matrix_to_normuon():
    """An update of all experts is that of every expert alone."""
    optimizer = normuon(lambda step: 0.1)
    rng = np.random.default_rng(0)
    p, g = (jnp.asarray(rng.normal(size=(3, 24, 16)), jnp.float32) for _ in range(2))
    scalars = optimizer.scalars(jnp.int32(0), jnp.float32(1))

    def updated(p, g):
        context = TensorContext(scalars, Layout(jax.P(), jax.P()), jnp.zeros(2, jnp.uint32))
        return optimizer.matrices.apply(p, g, optimizer.matrices.init(p.shape, 1), context, jnp.dtype("float32"))

    together = updated(p, g)
    for e in range(3):
        alone = updated(p[e], g[e])
        jax.tree.map(lambda x, y, e=e: np.testing.assert_allclose(x[e], y, atol=1e-6), together, alone)


def test_a_layer_that_uses_too_few_experts_is_said_once(tmp_path, capsys):
    even = np.full((2, 16), 50.0)
    few = even.copy()
    few[1] = 0
    few[1, [3, 7]] = 400
    dense_first = dataclasses.replace(CONFIG, num_experts=16, num_experts_per_tok=2, first_k_dense_replace=2)
    numbers = decoder_model.build(dataclasses.replace(dense_first, num_hidden_layers=4)).layers_with_experts
    of_run = {"total_steps": 9, "tokens_per_step": 400, "flops_per_token": 1.0, "layers_with_experts": numbers}
    with MetricsLog(tmp_path, log_steps=2, quiet=True, **of_run) as log:
        for step, tokens_LE in enumerate((even, few, few), start=1):
            record = log.step(step, loss=1.0, grad_norm=1.0, lr=1.0, duration_s=1.0, usage=Usage(tokens_LE, 2))
            assert record["largest_expert_share"] == ([0.0625, 0.0625] if step == 1 else [0.0625, 0.5])
            assert ("expert_tokens" in record) == (step == 2)
    said = capsys.readouterr().out
    assert said.count("layer 3: nearly all tokens choose the same 2.0 of 16 experts; router_aux_loss_coef spreads") == 1
    statistics = {"blocks": RouterStatistics(few, few / 2, np.zeros(2))}
    assert Usage.of(statistics).chosen == 2
    # The loss of such a step is NaN, which is said after its record is written.
    not_finite = {"blocks": RouterStatistics(few, np.full((2, 16), np.nan), np.zeros(2))}
    assert Usage.of(not_finite).chosen == 0 and not Usage.of(not_finite).collapsed


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model.num_experts": 4}, r"^model\.num_experts_per_tok: expected 1 to num_experts=4, got 0"),
        ({"model.num_experts": 4, "model.num_experts_per_tok": 5}, r"expected 1 to num_experts=4, got 5"),
        (
            {"router_aux_loss_coef": 0.01},
            r"^router_aux_loss_coef: expected 0\.0 with num_experts=0, which does not use",
        ),
        ({"model.norm_topk_prob": True}, r"^model\.norm_topk_prob: expected False with num_experts=0"),
        (
            FOUR | {"recipe": "fp8_hybrid", "persistent_quants": True, "zero_level": 3},
            r"^persistent_quants: expected False with num_experts=4 and recipe='fp8_hybrid'",
        ),
        (
            FOUR | {"router_z_loss_coef": 0.1, "gradient_accumulation_steps": 4},
            r"^microbatches_per_fetch: expected gradient_accumulation_steps with router_z_loss_coef=0.1, which",
        ),
        (
            FOUR | {"router_aux_loss_coef": 0.1, "pp_size": 2, "pp_schedule": "1f1b", "gpus": 2},
            r"^router_aux_loss_coef: expected 0\.0 with pp_schedule='1f1b', which goes backward before it has seen all",
        ),
        ({"model.expert_bias": True}, r"^model\.expert_bias: expected False with num_experts=0, which does not use"),
        (FOUR | {"lora": True, "lora_target_modules": "up_proj"}, r"^lora_target_modules: expected gate_proj and up_p"),
        (
            FOUR | {"model.qk_norm_whole": True, "model.qk_norm": True},
            r"^model\.qk_norm_whole: expected False with qk_",
        ),
    ],
)
def test_what_is_not_built_is_refused(changes, message):
    c = default_config()
    c.update_from_flattened_dict(changes)
    with pytest.raises(ConfigError, match=message):
        check(c)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"clip_qkv": 8.0}, r"clip_qkv: expected None, got 8\.0"),
        ({"num_experts": 2**17}, r"num_experts: expected at most 65,536"),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, r"decoder_sparse_step: expected 1, got 2"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0, 2]}, r"mlp_only_layers: expected the first layers, such"),
        ({"shared_expert_intermediate_size": 8}, r"config\.json has shared_expert_intermediate_size, which may change"),
        ({"model_type": "gpt_oss", "swiglu_limit": 5.0}, r"swiglu_limit: expected 7\.0, got 5\.0"),
        ({"model_type": "gpt_oss", "attention_bias": False}, r"attention_bias: expected True, got False"),
    ],
)
def test_models_that_are_not_computed_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        model_fields({"model_type": "olmoe"} | changes)


@pytest.mark.parametrize("number, dtype", [(1, "uint8"), (256, "uint8"), (257, "uint16"), (65536, "uint16")])
def test_numbers_of_experts_fit_their_dtype(number, dtype):
    assert jnp.dtype(experts.smallest_dtype(number)) == dtype and number - 1 <= jnp.iinfo(dtype).max


def test_the_first_layers_without_experts_are_a_set():
    """transformers asks whether a layer's number is in the list."""
    config = {"model_type": "qwen3_moe", "mlp_only_layers": [1, 0]}
    assert model_fields(config)["first_k_dense_replace"] == 2
    assert model_fields(config | {"mlp_only_layers": None})["first_k_dense_replace"] == 0


@pytest.mark.full
@pytest.mark.skipif(not aot.available(), reason="needs the planner's extra")
def test_thirty_billion_parameters_train_on_one_card():
    """Compiled for an RTX 4090: at most 22 GiB and at least 1,000 tokens/s, and `fit` estimates so.

    As many parameters as Qwen3-30B-A3B has, and those of the adapters.
    """
    c = flags.load_config(str(Path(__file__).parent.parent / "configs" / "qwen3_30b_a3b.py"))
    c.gpus = 1
    found = plan_in_subprocess(c, "rtx4090")
    assert found.parameters == 30_532_122_624 + 13_369_344 and found.fits and found.device_bytes < 22 * 2**30
    assert found.tokens_per_s_per_gpu and found.tokens_per_s_per_gpu > 1000
    c = checked(c, "rtx4090")
    estimate = candidate.estimated(c, GPUS["rtx4090"])
    assert estimate.seconds == pytest.approx(found.predicted_step_s, rel=0.05)
    assert estimate.need[0] == pytest.approx(found.device_bytes, rel=0.05)
    # The kernel has the rows of all experts in memory at once, and copies no matrix. From 7 sequences on XLA is at its
    # limit of memory and recomputes, 6 % of a step, which no estimate knows.
    c.update({"kernels": "mosaic", "per_device_batch_size": 6})
    by_kernel = plan_in_subprocess(c, "rtx4090")
    assert by_kernel.fits and by_kernel.tokens_per_s_per_gpu > found.tokens_per_s_per_gpu / 0.7
    estimate = candidate.estimated(c, GPUS["rtx4090"])
    assert estimate.seconds == pytest.approx(by_kernel.predicted_step_s, rel=0.05)
    assert estimate.need[0] == pytest.approx(by_kernel.device_bytes, rel=0.05)


@pytest.mark.full
@pytest.mark.skipif(not aot.available(), reason="needs the planner's extra")
@pytest.mark.parametrize("ep_size", [1, 8])
def test_experts_of_eight_gpus_are_estimated_as_compiled(ep_size):
    """Time of OLMoE's layers on 8 H100 within 5 %, gathered or with tokens sent to them; memory at most 7 % too high,
    since the accumulators of embedding and head are not both in memory while a layer's experts are."""
    c = flags.load_config(str(Path(__file__).parent.parent / "configs" / "olmoe.py"))
    c.update(dict.fromkeys(choices.OFFLOADS.values(), False))
    c.update({"gpus": 8, "zero_level": 3, "ep_size": ep_size})
    c.update({"gradient_accumulation_steps": 2, "microbatches_per_fetch": 2})
    c.model.num_hidden_layers = 4
    found = plan_in_subprocess(c, "h100", advise=False)
    estimate = candidate.estimated(checked(c, "h100"), GPUS["h100"])
    assert estimate.seconds == pytest.approx(found.predicted_step_s, rel=0.05)
    assert found.device_bytes <= estimate.need.device <= 1.07 * found.device_bytes


# --- mistakes ---------------------------------------------------------------------------------------------------------


def reference_params(case: str):
    """A case's weights as the engine has them."""
    with tempfile.TemporaryDirectory() as folder:
        tensors = Weights(written(Path(folder) / "model", case, stored(case, "weight")))
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        return stacks(tensors, decoder_model.build(config_of(case)), "float32", device)


# What is replaced in which file, and what notices. Others have tests of their own above: recomputation that chooses
# other experts, losses of routers in an evaluation, of each microbatch or of each device, counts doubled by
# recomputation, a gradient norm without experts (`engine_gradients` compares it), files of the other layout.
REFERENCE_NOTICES = "olmoe_normed"
MISTAKES = {
    "softmax twice in the balance loss": (
        experts,
        "probability_E=jnp.sum(counted_BS1 * probability_BSE,",
        "probability_E=jnp.sum(counted_BS1 * jax.nn.softmax(probability_BSE),",
    ),
    "a balance loss without a gradient": (
        experts,
        "probability_E=jnp.sum(counted_BS1 * probability_BSE,",
        "probability_E=jnp.sum(counted_BS1 * jax.lax.stop_gradient(probability_BSE),",
    ),
    "tokens without a label are counted": (experts, "if routing.counted is None else", "if True else"),
    "weights are not divided by their sum": (experts, "if c.norm_topk_prob:", "if not c.norm_topk_prob:"),
    "a loss without the number of experts": (router_losses, "chosen_LE.shape[1] * jnp.sum(", "jnp.sum("),
    "a loss that is the sum over layers": (router_losses, "jnp.mean(jnp.concatenate(", "jnp.sum(jnp.concatenate("),
    "gate and up are interchanged": (
        experts,
        'gated(product(x_RD, "w_gate"), product(x_RD, "w_up")',
        'gated(product(x_RD, "w_up"), product(x_RD, "w_gate")',
    ),
    "weights of the choice have no gradient": (
        experts,
        "h_RF * weight_R[:, None]",
        "h_RF * jax.lax.stop_gradient(weight_R[:, None])",
    ),
    "the least likely experts": (experts, "jax.lax.stop_gradient(ranked_BSE)", "jax.lax.stop_gradient(-ranked_BSE)"),
    "rows of an expert begin where the last one's end": (grouped, "-(-counts_E // R) * R", "counts_E"),
    "a gradient goes on into the next expert": (grouped, "continues = expert == before", "continues = True"),
    "one row too few": (grouped, "return (choices + chosen * (rows - 1)) // rows", "return -(-choices // rows)"),
    "rows that pad a block are some token's": (
        grouped,
        "jnp.full(M * R, C, jnp.int32)",
        "jnp.full(M * R, 0, jnp.int32)",
    ),
}


def global_names(code: types.CodeType) -> set[str]:
    """Returns the names that a module's code and its functions read from the module."""
    names = {i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"}
    return names.union(*(global_names(c) for c in code.co_consts if isinstance(c, types.CodeType)))


@pytest.fixture
def remade(monkeypatch):
    """(module, old, new): replaces text of a module's source, and what was made of it everywhere."""

    def make(module, old: str, new: str) -> None:
        source = Path(module.__file__).read_text()
        assert source.count(old) == 1
        namespace = {"__name__": module.__name__, "__file__": module.__file__}
        code = compile(source.replace(old, new), module.__file__, "exec")
        exec(code, namespace)
        unknown = global_names(code) - namespace.keys() - vars(builtins).keys()
        assert not unknown, f"{new!r} has names that {module.__name__} lacks: {unknown}"
        if module is grouped:
            for name in ("blocks_of", "sum_of_experts"):
                monkeypatch.setattr(experts, name, namespace[name])
            return
        if module is router_losses:
            monkeypatch.setattr(RouterLosses, "__call__", namespace["RouterLosses"].__call__)
            return
        for name in ("route", "mix", "sum_by_loop", "_mlp"):
            monkeypatch.setattr(experts.Experts, name, getattr(namespace["Experts"], name))

    return make


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_can_be_made(remade, mistake):
    """Here, since whether it is noticed is asked among the full tests, which take turns."""
    remade(*MISTAKES[mistake])


@pytest.mark.full
def test_the_source_as_it_is_makes_no_mistake(remade):
    """Else each of the next tests would pass."""
    params = reference_params(REFERENCE_NOTICES)
    for module, old in ((experts, "if c.norm_topk_prob:"), (grouped, "continues = expert == before")):
        remade(module, old, old)
        check_equal_to_transformers(REFERENCE_NOTICES, params)


@pytest.mark.full
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed(remade, mistake):
    remade(*MISTAKES[mistake])
    with pytest.raises((AssertionError, TypeError)):
        check_equal_to_transformers(REFERENCE_NOTICES, reference_params(REFERENCE_NOTICES))


def without(name: str, value: float = 0.0):
    """Parameters of which one of every layer is this number."""
    part, leaf = name.split(".")

    def changed(params):
        of_part = params["blocks"][part]
        with_number = of_part | {leaf: jnp.full_like(of_part[leaf], value)}
        return params | {"blocks": params["blocks"] | {part: with_number}}

    return changed


def exchanged(params):
    """Gate and up as they are if the tensor of both had gate before up."""
    mlp = params["blocks"]["mlp"]
    both = jnp.stack([mlp["w_gate"], mlp["w_up"]], axis=3).reshape(*mlp["w_gate"].shape[:2], -1, mlp["w_gate"].shape[3])
    gate, up = jnp.split(both, 2, axis=2)
    return params | {"blocks": params["blocks"] | {"mlp": mlp | {"w_gate": gate, "w_up": up}}}


# What is computed in place of clamped_swiglu, or the parameters that are computed with.
GPT_OSS_MISTAKES = {
    "no limit of the gate": lambda gate, up: (jnp.clip(up, -7, 7) + 1) * gate * jax.nn.sigmoid(1.702 * gate),
    "no limit of up": lambda gate, up: (up + 1) * jnp.minimum(gate, 7) * jax.nn.sigmoid(1.702 * jnp.minimum(gate, 7)),
    "a gate like silu": lambda gate, up: (jnp.clip(up, -7, 7) + 1) * jax.nn.silu(jnp.minimum(gate, 7)),
    "up without 1": lambda gate, up: jnp.clip(up, -7, 7) * operations.clamped_swiglu(gate, jnp.zeros_like(up)),
    "gate before up in files": exchanged,
    "no sinks": without("attention.sinks", -1e30),
    "no bias of the output": without("attention.bo"),
    "no bias of the router": without("mlp.b_router"),
    "no bias of gate": without("mlp.b_gate"),
    "no bias of the last product": without("mlp.b_down"),
}


@pytest.mark.full
def test_a_mistake_with_gpt_oss_is_noticed(tmp_path, monkeypatch):
    """Each moves logits by far more than the comparison with transformers allows, and none does not."""
    tensors = Weights(written(tmp_path / "model", "gpt_oss", stored("gpt_oss", "weight")))
    config = config_of("gpt_oss")
    params = stacks(
        tensors, decoder_model.build(config), "float32", jax.sharding.SingleDeviceSharding(jax.devices()[0])
    )
    graph = nnx.graphdef(nnx.eval_shape(lambda: decoder.Decoder(config, rngs=nnx.Rngs(0))))
    wanted = REFERENCE["gpt_oss/logits"]
    close(nnx.merge(graph, params)(REFERENCE["gpt_oss/tokens"]), wanted, "logits")
    for name, mistake in GPT_OSS_MISTAKES.items():
        changed = params
        with monkeypatch.context() as patch:
            if "gate" in inspect.signature(mistake).parameters:
                patch.setitem(operations.ACTIVATIONS, "clamped_swiglu", mistake)
            else:
                changed = mistake(params)
            jax.clear_caches()
            found = nnx.merge(graph, changed)(REFERENCE["gpt_oss/tokens"])
        assert np.abs(found - wanted).max() > 1e-2 * np.abs(wanted).max(), name


# --- a run ------------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_model_with_experts_learns_more_than_one_without(tmp_path):
    """configs/tiny_moe.py beside configs/tiny.py: as many parameters compute, on the same tokens."""
    scores = {}
    for name in ("tiny", "tiny_moe"):
        c = flags.load_config(str(Path(__file__).parent.parent / "configs" / f"{name}.py"))
        c.update({"max_steps": 150, "output_dir": str(tmp_path / name), "report_to": ""})
        c.update({"data_cache": str(tmp_path / "cache"), "sample_tokens": 0, "eval_steps": 0, "save_steps": 0})
        scores[name] = train(c).history[-1]["bits_per_byte"]
    assert scores["tiny_moe"] < scores["tiny"] - 0.1


@pytest.mark.full
def test_a_run_with_experts_goes_on_to_the_bit(tmp_path):
    """Trained, evaluated, saved, stopped and resumed, sampled from, and converted."""
    c = flags.load_config(str(Path(__file__).parent.parent / "configs" / "tiny_moe.py"))
    c.update({"max_steps": 6, "save_steps": 3, "eval_steps": 3, "eval_batches": 1, "sequence_len": 32, "report_to": ""})
    c.update({"per_device_batch_size": 4, "data_cache": str(tmp_path / "cache"), "sample_tokens": 4, "log_steps": 2})
    c.model.update({"hidden_size": 32, "num_hidden_layers": 2, "moe_intermediate_size": 16})
    c.output_dir = str(tmp_path / "whole")
    whole = train(c).history
    c.output_dir = str(tmp_path / "parts")
    assert not train(c, max_minutes=0).finished
    resumed = train(c).history
    kept = ("step", "loss", "norm", "auxiliary_loss", "largest_expert_share", "perplexity")
    records = [{key: record.get(key) for key in kept} for record in whole]
    assert [{key: record.get(key) for key in kept} for record in resumed] == records[1:]
    assert records[0]["auxiliary_loss"] > 0 and len(records[0]["largest_expert_share"]) == 2
    out = convert.convert(tmp_path / "parts", tmp_path / "out", dtype="float32")
    assert Weights(out).shape("model.layers.1.mlp.experts.up_proj.weight") == (8, 16, 32)
