"""What Gemma, SmolLM3 and Ministral 3 add to the Llama family: in kernels, recipes, evaluation and the estimate.

Their logits and gradients are compared with transformers in test_parity.py, the engine with reverse mode in
test_engine.py, sampling in test_generate.py.
"""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import CONFIG, Small, drawn_params, normal, plain_loss, plain_model, quick_at, tokens, worst_relative
from test_engine import GEMMA, MINISTRAL, ORDER_OF_SUMS, SMOLLM
from test_footprint import plan as planned, small as settings

from surojax.models import decoder_model
from surojax.models.model import Compute
from surojax.numerics.recipes import Precision
from surojax.objectives.objective import CrossEntropy
from surojax.placement.layout import batch_sharding
from surojax.planner import footprint
from surojax.planner.traffic import batch_of
from surojax.step.engine import evaluate
from surojax.step.outer import OuterLayers


def test_layers_say_which_rotary_embedding_they_have():
    rotary = lambda config: [variant.rotary for variant in config.variants(Precision())]
    assert rotary(CONFIG) == ["global"] * 3
    assert rotary(SMOLLM) == ["global", "none"] * 2 + ["global"]  # transformers: layer i unless (i + 1) % 2
    assert rotary(GEMMA) == ["local", "global"] * 2 + ["local"]
    one_base = dataclasses.replace(GEMMA, rope_local_base_freq=0.0)
    assert rotary(one_base) == ["global"] * 5
    of_gemma_4 = dataclasses.replace(one_base, layer_types="sliding_attention,global_attention")
    assert rotary(of_gemma_4) == ["global"] * 5
    local = dataclasses.replace(of_gemma_4, rope_local_base_freq=1e4)
    assert rotary(local) == ["local", "global"] * 2 + ["local"]


def test_scores_are_divided_by_the_root_of_a_number_of_the_model():
    """In place of the root of head_dim = 8: the same as longer queries."""
    plain = dataclasses.replace(CONFIG, num_hidden_layers=1)
    params = drawn_params(plain, 0)
    attention = params["blocks"]["attention"]
    with_queries = lambda wq: params | {"blocks": params["blocks"] | {"attention": attention | {"wq": wq}}}
    inputs, _ = tokens(2, 8)
    divided = plain_model(dataclasses.replace(plain, query_pre_attn_scalar=5.0))
    wq = 3000 * attention["wq"]  # scores that differ
    expected = plain_model(plain)(with_queries(wq), inputs)
    assert worst_relative(divided(with_queries(wq * np.sqrt(5 / 8)), inputs), expected) < ORDER_OF_SUMS
    assert worst_relative(divided(with_queries(wq), inputs), expected) > 100 * ORDER_OF_SUMS


@pytest.mark.full
@pytest.mark.parametrize("config", quick_at([(GEMMA,), (MINISTRAL,)], 0), ids=["gemma", "ministral"])
def test_kernels_compute_the_same_block(config):
    """Through the kernels' functions, which on CPUs are their references."""
    params = drawn_params(config, 0)
    w = jax.tree.map(lambda x: x[1], params["blocks"])
    x, dx = (normal(i, (2, 12, 32)) for i in (1, 2))

    def both(kernels: str):
        (segment,) = decoder_model.build(config, Compute(precision=Precision(kernels=kernels))).segments
        (y, _), saved = segment.block_forward(w, x, None, segment.variants[1])
        return y, segment.block_backward(w, saved, (dx, None), None, segment.variants[1])[:2]

    found, expected = jax.jit(lambda: (both("auto"), both("xla")))()
    assert worst_relative(found, expected) < ORDER_OF_SUMS


@pytest.mark.parametrize(
    "config, placed",
    quick_at(
        [
            (GEMMA, {"zero_level": 3, "lmhead_chunks": 2}),
            (dataclasses.replace(GEMMA, tie_word_embeddings=False), {"shard_outer": True}),
            (SMOLLM, {"zero_level": 3}),
        ]
    ),
    ids=["gemma", "gemma-shard_outer", "smollm"],
)
def test_evaluation_is_the_loss_of_the_plain_model(config, placed):
    small = Small(4, config=config, **placed)
    inputs, labels = tokens(8, 24)
    expected = jax.jit(plain_loss(config))(drawn_params(config, 0), inputs, labels)
    where = batch_sharding(small.mesh, accumulated=False)
    f = jax.shard_map(
        lambda w, i, l: evaluate(small.engine, w, i, l),
        mesh=small.mesh,
        in_specs=(jax.tree.map(lambda x: x.sharding.spec, small.plan.weights), where.spec, where.spec),
        out_specs=jax.P(),
    )
    sums, count = jax.jit(f)(small.state.weights, *jax.device_put((inputs, labels), where))
    assert float(sums["loss"]) / int(count) == pytest.approx(float(expected), rel=ORDER_OF_SUMS)


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["nvfp4"])
def test_block_scaled_recipes_compute_gemma(recipe):
    """The loss of the first step differs from bf16's by the recipe's rounding only, and it falls."""
    wide = dataclasses.replace(GEMMA, num_hidden_layers=2, hidden_size=64, intermediate_size=160, head_dim=16)
    batches = [tokens(2, 4, 16)] * 4
    plain = Small(config=wide, model_dtype="bfloat16").train(batches[:1])
    low = Small(config=wide, compute=Compute(precision=Precision(recipe=recipe)), model_dtype="bfloat16").train(batches)
    assert low[0][0] == pytest.approx(plain[0][0], rel=0.02) and low[0][0] != plain[0][0]
    assert low[-1][0] < low[0][0]


def test_the_embedding_is_scaled_by_a_rounded_root():
    """sqrt(32) = 5.657 is 5.65625 in bfloat16, as in transformers, which published models were trained with."""
    table = normal(0, (64, 32)).astype("bfloat16")
    ids = jnp.arange(6).reshape(2, 3)
    how = {"embedding_scale": GEMMA.embedding_scale, "embedding_norm_eps": None, "channels": GEMMA.channels}
    model = SimpleNamespace(**how)
    outer = OuterLayers(model, CrossEntropy(), 1, (), {"embed": table})  # type: ignore[arg-type]
    found = outer.embed(ids)
    np.testing.assert_array_equal(found, table[ids] * table.dtype.type(5.65625))
    grads = outer.push_embed({"embed": 0 * table}, ids, found)
    np.testing.assert_array_equal(grads["embed"][:6], found.reshape(6, 32) * table.dtype.type(5.65625))


def test_the_estimate_counts_what_a_softcap_keeps_in_memory():
    """Transposed copies of heads for our flash attention, scores for heads that it does not take, uncapped logits."""
    large = {"sequence_len": 2048, "per_device_batch_size": 4, "model_dtype": "bfloat16", "lmhead_chunks": 64}
    large["model.head_dim"] = 32

    def space(**changes) -> int:
        c = settings(**large | changes)
        return footprint.estimate(planned(c), batch_of(c))["working space"]

    scores = 4 * 8 * 2048 * 2048 * 4  # of 4 sequences and 8 heads, float32
    capped = {"model.attn_logit_softcapping": 50.0}
    assert space() < space(**capped) < scores < space(**capped | {"model.head_dim": 144})
    assert space(**{"model.head_dim": 144}) > scores  # nor has cuDNN heads of more than 128 channels
    assert space(**{"model.head_dim": 160}) < scores  # halves of a multiple of 16 channels
    logits = {"vocab_size": 32000, "lmhead_chunks": 1}
    assert space(**logits, **{"model.final_logit_softcapping": 30.0}) - space(**logits) == 4 * 2048 * 32000 * 2
