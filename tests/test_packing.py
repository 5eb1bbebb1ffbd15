"""Several documents in a row train as if each were in a row of its own, in every recipe and placement."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import CONFIG, Small, drawn_params, normal, plain_loss, quick_at, tokens, worst_relative
from test_engine import GEMMA as GEMMA_3, MINISTRAL, ORDER_OF_SUMS

from surojax.models import attention, decoder_model
from surojax.models.attention import attend
from surojax.models.model import PLAIN, Compute, RecipeInputs, Recompute, Segment, Variant
from surojax.models.operations import Operations
from surojax.models.rotary import RopeScaling, positions_of
from surojax.numerics import fp8
from surojax.numerics.recipes import Precision
from surojax.step.weights import quantise_with_one_scale

WIDE = dataclasses.replace(CONFIG, hidden_size=64, intermediate_size=160, head_dim=16)
GEMMA = dataclasses.replace(CONFIG, sliding_window=3, sliding_window_pattern=2)
RECIPES = ("bf16", "fp8_hybrid", "fp8_current", "mxfp8", "nvfp4")
LENGTHS = [(5, 6, 5), (16,), (1, 9, 6), (7, 9), (2, 2, 12), (8, 8), (3, 13), (15, 1)]  # of the documents of each row


def starts_of(lengths) -> np.ndarray:
    """int32 `[S]`: the index at which each token's document starts, for the lengths of a row's documents."""
    ends = np.cumsum(lengths)
    return np.repeat(ends - lengths, lengths).astype(np.int32)


@functools.cache
def batch(microbatches: int = 2, seed: int = 0):
    """(inputs, labels, starts) `[A, 4, 16]` of packed documents. A document's last label is ignored, since it would be
    the next one's first token."""
    inputs, labels = tokens(microbatches, 8 // microbatches, 16, seed=seed)
    starts = np.stack([starts_of(lengths) for lengths in LENGTHS]).reshape(inputs.shape)
    last = np.roll(starts, -1, axis=-1) != starts
    last[..., -1] = True
    return inputs, np.where(last, np.int32(-1), labels), starts


def unpacked(packed):
    """(inputs, labels, starts) of the same documents, each in a row of its own with padding after it, `[A, rows, 16]`.

    All starts are 0, which is to the bit what a program for whole rows computes, as a test below says.
    """
    inputs, labels, starts = (x.reshape(-1, 16) for x in packed)
    rows = []
    for i, l, s in zip(inputs, labels, starts, strict=True):
        for start in np.unique(s):
            length = int((s == start).sum())
            padded = lambda x, fill, start=start, length=length: np.pad(
                x[start : start + length], (0, 16 - length), constant_values=fill
            )
            rows.append((padded(i, 0), padded(l, -1)))
    rows += [(np.zeros(16, np.int32), np.full(16, -1, np.int32))] * (-len(rows) % 8)
    inputs, labels = (np.stack(x).reshape(len(packed[0]), -1, 16) for x in zip(*rows, strict=True))
    return inputs, labels, np.zeros_like(inputs)


def as_many_rows(packed, like):
    """A packed batch with rows that count nothing, so that one program takes both it and the batch `like`."""
    more = [(0, 0), (0, like[0].shape[1] - packed[0].shape[1]), (0, 0)]
    return tuple(np.pad(x, more, constant_values=fill) for x, fill in zip(packed, (0, -1, 0), strict=True))


def relative(found, expected) -> float:
    return abs(found - expected) / abs(expected)


# --- against separate rows --------------------------------------------------------------------------------------------


def test_the_documents_of_the_tests():
    """The two batches have the same labels, after the same tokens."""
    inputs, labels, _ = batch()
    alone, alone_labels, _ = unpacked(batch())
    pairs = lambda i, l: sorted(zip(i[l >= 0].tolist(), l[l >= 0].tolist(), strict=True))
    assert pairs(inputs, labels) == pairs(alone, alone_labels) and len(pairs(inputs, labels)) > 80
    np.testing.assert_array_equal(starts_of((2, 3, 1)), [0, 0, 2, 2, 2, 5])


@pytest.mark.parametrize(
    "config",
    quick_at(
        [
            (GEMMA,),
            (GEMMA_3,),
            (MINISTRAL,),
        ],
        0,
    ),
)
def test_loss_and_gradients_are_those_of_separate_rows(config):
    params = drawn_params(config, 0)
    f = jax.jit(jax.value_and_grad(plain_loss(config)))
    alone = unpacked(batch())
    inputs, labels, starts = as_many_rows(batch(), alone)
    loss, grads = f(params, inputs, labels, starts)
    expected, expected_grads = f(params, *alone)
    assert relative(loss, expected) < ORDER_OF_SUMS
    assert worst_relative(grads, expected_grads) < ORDER_OF_SUMS
    _, whole = f(params, inputs, labels, np.zeros_like(starts))
    assert worst_relative(whole, expected_grads) > 1e-2  # documents that see each other are noticed


@functools.cache
def reference(config):
    """Loss and gradients of the plain model on the packed batch."""
    params = jax.tree.map(np.asarray, Small(config=config).state.weights)
    loss, grads = jax.jit(jax.value_and_grad(plain_loss(config)))(params, *batch())
    return float(loss), jax.tree.map(np.asarray, grads)


@pytest.mark.parametrize("recipe, bound", quick_at([("fp8_hybrid", 1e-3), ("mxfp8", 1e-6)]))
def test_recipes_give_the_loss_of_separate_rows(recipe, bound):
    """mxfp8 scales the channels of a token; fp8_hybrid's scales are known before the first step, and a sum in another
    order may round a few numbers to their neighbours, an eighth away. So the first loss is the same."""
    options = {"config": WIDE, "compute": Compute(precision=Precision(recipe=recipe))}
    alone = unpacked(batch())
    (loss, norm), (second, _) = Small(packed=True, **options).train([as_many_rows(batch(), alone)] * 2)
    (expected, expected_norm), _ = Small(packed=True, **options).train([alone] * 2)
    assert relative(loss, expected) < bound and relative(norm, expected_norm) < 5e-2
    assert second < loss


# --- documents do not see each other ----------------------------------------------------------------------------------

HALVES = starts_of((7, 9))[None]  # one row of two documents


def gradients_between_documents(segment: Segment, weights, recipe_inputs, variant: Variant) -> list[np.ndarray]:
    """The gradient with respect to each document's inputs of a sum over the other's outputs, through one block."""
    x = normal(1, (1, 16, 64))

    @jax.jit
    def gradient(w, x, starts, dy):
        _, saved = segment.block_forward(w, x, recipe_inputs, variant, starts)
        return segment.block_backward(w, saved, (dy, None), recipe_inputs, variant, starts)[1]

    found = []
    for document in (0, 7):
        dy = jnp.where(HALVES[..., None] == document, normal(2, x.shape), 0.0)
        found.append(np.asarray(gradient(weights, x, HALVES, dy))[document != HALVES])
    return found


def block_in(recipe: str, kernels: str = "xla"):
    """(segment, weights of a layer, recipe_inputs) of a wide model in a recipe."""
    compute = Compute(precision=Precision(recipe=recipe, kernels=kernels))
    model = decoder_model.build(dataclasses.replace(WIDE, num_hidden_layers=1, qk_norm=True), compute)
    (segment,) = model.segments
    w = jax.tree.map(lambda x: x[0], drawn_params(dataclasses.replace(WIDE, qk_norm=True), 0)["blocks"])
    if model.precision.fp8:
        w = jax.jit(lambda w: quantise_with_one_scale(segment.params, w, fp8.E4M3))(w)
    scales = None
    if model.precision.delayed:
        history = jnp.zeros(fp8.history_shape(1, model.sites, 4))
        scales = fp8.delayed_scales(history, model.sites, 0, jnp.float32(1.0))[0]
    return segment, w, RecipeInputs(scales, jnp.uint32(3) if recipe == "nvfp4" else None)


@pytest.mark.parametrize(
    "recipe, kernels, window",
    quick_at([(r, k, w) for r in RECIPES for k, w in (("xla", 12), ("auto", 0)) if r in ("fp8_hybrid", "nvfp4")]),
)
def test_no_gradient_crosses_documents(recipe, kernels, window):
    """Exactly zero, in both directions; windows are longer than a document."""
    segment, weights, recipe_inputs = block_in(recipe, kernels)
    for between in gradients_between_documents(segment, weights, recipe_inputs, Variant(window=window)):
        np.testing.assert_array_equal(between, 0)


@pytest.mark.full
def test_a_mask_that_is_off_by_one_is_noticed(monkeypatch):
    """The test above fails if a query sees the last token of the document before its own."""
    monkeypatch.setattr(attention, "same_document", lambda starts, keys: right(starts - 1, keys))
    with pytest.raises(AssertionError):
        test_no_gradient_crosses_documents("bf16", "xla", 0)


right = attention.same_document


@pytest.mark.full
@pytest.mark.parametrize("config", [CONFIG, GEMMA], ids=["llama", "gemma"])
def test_no_gradient_reaches_another_documents_embeddings(config):
    """Of the whole plain model: the loss of one document, with respect to the embeddings of all tokens of the row."""
    params = drawn_params(config, 0)
    inputs = np.arange(16)[None]  # each token has an embedding of its own
    labels = np.where(HALVES == 7, 3, -1)
    (grad,) = jax.tree.leaves(jax.jit(jax.grad(plain_loss(config)))(params, inputs, labels, HALVES)["outer"]["embed"])
    np.testing.assert_array_equal(grad[:7], 0)
    assert (np.abs(grad[7:15]).max(axis=1) > 0).all()


@pytest.mark.full
@pytest.mark.parametrize("window", [0, 4])
def test_attention_against_each_document_alone(window):
    q, k, v = (normal(i, (2, 16, heads, 8)) for i, heads in enumerate((4, 2, 2)))
    starts = np.stack([starts_of((5, 6, 5)), starts_of((15, 1))])
    found = attend(q, k, v, starts=starts, window=window)
    for row, column, length in ((0, 0, 5), (0, 5, 6), (0, 11, 5), (1, 0, 15), (1, 15, 1)):
        part = np.s_[row : row + 1, column : column + length]
        np.testing.assert_allclose(found[part], attend(q[part], k[part], v[part], window=window), atol=1e-6)


@pytest.mark.parametrize("kernels", ["xla", "auto"])
def test_positions_begin_anew(kernels):
    """Bit for bit the rotation of each document alone. Attention would not tell: its scores are relative."""
    q, k = (np.asarray(normal(i, (2, 16, heads, 8))) for i, heads in enumerate((4, 2)))
    starts = np.stack([starts_of((5, 6, 5)), starts_of((15, 1))])
    compute = Compute(precision=Precision(kernels=kernels))

    def rotated(q, k, starts=None):
        return Operations(compute, starts=starts).rotate(q, k, 0, 1e4, RopeScaling())

    found = jax.tree.map(np.asarray, jax.jit(rotated)(q, k, starts))
    for row, column, length in ((0, 0, 5), (0, 5, 6), (0, 11, 5), (1, 0, 15), (1, 15, 1)):
        part = np.s_[row : row + 1, column : column + length]
        for got, expected in zip(found, jax.jit(rotated)(q[part], k[part]), strict=True):
            np.testing.assert_array_equal(got[part], expected)
    np.testing.assert_array_equal(positions_of(16, jnp.asarray(starts))[0], [*range(5), *range(6), *range(5)])


# --- what is saved, and where -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "recipe, recompute",
    quick_at([(r, parts) for r in RECIPES for parts in (Recompute(), Recompute(True, True, True, True))], 0, 2),
)
def test_nothing_about_documents_is_saved_for_each_layer(recipe, recompute):
    """The residuals of a block are those without documents, or fewer: its positions are made again."""
    compute = Compute(recompute=recompute, precision=Precision(recipe=recipe, kernels="auto"))
    model = decoder_model.build(dataclasses.replace(WIDE, sliding_window=4), compute)
    (segment,) = model.segments
    w = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, "float32"), segment.params)
    if model.precision.fp8:
        w = jax.eval_shape(lambda w: quantise_with_one_scale(segment.params, w, fp8.E4M3), w)
    x = jax.ShapeDtypeStruct((2, 16, 64), "float32")

    def residuals(*starts):
        forward = lambda w, x, *starts: segment.block_forward(w, x, None, PLAIN, *starts)[1]
        saved = jax.tree.leaves(jax.eval_shape(forward, w, x, *starts))
        return [(x.shape, x.dtype) for x in saved]

    packed = residuals(jax.ShapeDtypeStruct((2, 16), "int32"))
    assert packed and set(packed) <= set(residuals())
    assert all(dtype != jnp.int32 for _, dtype in packed)


@pytest.mark.full
def test_a_row_that_is_one_document_is_a_row_without_documents():
    """Bit for bit, over three steps."""
    batches = [tokens(2, 4, 16, seed=seed) for seed in range(3)]
    expected = Small().train(batches)
    assert Small(packed=True).train([(*b, np.zeros_like(b[0])) for b in batches]) == expected


@pytest.mark.full
def test_evaluation_counts_and_sums_the_documents():
    small = Small(4, config=GEMMA, packed=True, zero_level=3, offload_weights=True)
    inputs, labels, starts = (x.reshape(-1, 16) for x in batch())
    sums, count = small.run.eval_step()(small.state.weights, inputs, labels, starts)
    expected, _ = reference(GEMMA)
    assert count == (labels >= 0).sum()
    assert relative(float(sums["loss"]) / int(count), expected) < ORDER_OF_SUMS
