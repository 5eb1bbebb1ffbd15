"""Estimates from shapes how long a GPU computes in a microbatch: in the blocks, part by part, and in the head.

Products take what costs.product_time says and flash attention what costs.attention_time says; attention by XLA takes
its products and the passes over its scores. Passes take the bytes of the residuals times a factor.

FORWARD_PASSES and BACKWARD_PASSES are fitted to the timelines of compiled steps: 7B, 1.2B and 134M on RTX 4090 and
H100.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from surojax.assembly import Assembly
from surojax.models.lora import adapters
from surojax.models.model import Segment, Variant
from surojax.placement.mesh import CONTEXT, SHARD, devices_per_sequence, pipeline_stages, tensor_parallel
from surojax.placement.param import Kind, Param
from surojax.planner import shares, textbook, traffic
from surojax.planner.collective_time import IN_A_PASS
from surojax.planner.costs import BACKWARD_FLOPS, attention_time, product_time
from surojax.planner.gpus import Gpu, known_rates
from surojax.planner.segment_bytes import segment_bytes
from surojax.planner.stages import patterns

FORWARD_PASSES = 1.6  # bytes that passes move per byte of residuals of a block with nothing recomputed, forward
BACKWARD_PASSES = 3.2
LOGIT_PASSES = 4  # times that logits are read or written
SCORE_PASSES = 4  # times that attention scores are, forward; twice as often backward
HLO_DTYPES = {"bfloat16": "bf16", "float32": "f32", "float8": "f8e4m3fn", "float4": "f4e2m1fn"}


class Seconds(NamedTuple):
    """Seconds that the blocks of a stage compute in a microbatch.

    again: of the forward pass, what the backward pass repeats. first: of `backward`, until the first gradient of each
    layer is there, that of the matrix whose product comes last. columns: of `backward`, the gradients of matrices whose
    rows tensor parallelism divides. of_mlp, of_attention: parts of `forward`, the products and passes of the MLP, and
    attention itself; mlp_again: of `again`.
    """

    forward: float = 0.0
    again: float = 0.0
    backward: float = 0.0
    first: float = 0.0
    columns: float = 0.0
    of_mlp: float = 0.0
    of_attention: float = 0.0
    mlp_again: float = 0.0

    def plus(self, other: "Seconds") -> "Seconds":
        """The sums of these and others."""
        return Seconds(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, number: float) -> "Seconds":
        """So many times these."""
        return Seconds(*(number * x for x in self))


def of_blocks(run: Assembly, batch: traffic.Batch, gpu: Gpu) -> Seconds:
    """The `Seconds` of all blocks of a full stage."""
    found = Seconds()
    for segment in run.model.segments:
        found = found.plus(_segment(run, segment, batch, gpu))
    return found


def _segment(run: Assembly, segment: Segment, batch: traffic.Batch, gpu: Gpu) -> Seconds:
    """The `Seconds` of a full stage's layers of a segment; of stages with other kinds of layers, of the slowest one."""
    found = [_stage(run, segment, pattern, batch, gpu) for pattern in patterns(run, segment).patterns]
    return max(found, key=lambda x: x.forward + x.again + x.backward)


def _stage(run: Assembly, segment: Segment, variants: tuple[Variant, ...], batch: traffic.Batch, gpu: Gpu) -> Seconds:
    """The `Seconds` of layers of a segment. variants: of each of them."""
    model = run.model
    engine = run.engine
    rates = known_rates(gpu)
    dtype = jnp.dtype(engine.table.weights.dtype)
    length = batch.sequence_len // devices_per_sequence(run.mesh)
    x = jax.ShapeDtypeStruct((batch.sequences, length, model.hidden_size), dtype)
    tokens = batch.tokens // run.mesh.shape.get(CONTEXT, 1)  # of a product: a tensor-parallel group has the same
    whole = model.rebuild(dataclasses.replace(model.compute, sequence_chunks=1))
    sizes = segment_bytes(dataclasses.replace(run, model=whole), segment, x, "gpu")
    passes = sizes.saved / (gpu.memory_bandwidth * rates.memory)
    flops = dataclasses.replace(segment, variants=variants).attention_flops(batch.sequence_len)
    flops *= batch.tokens / len(variants)  # of a layer, for a group
    attended, attended_back = _attention(gpu, flops / devices_per_sequence(run.mesh), sizes.scores)
    again = traffic.attention_again(run)
    lengths = _row_lengths(run, segment, gpu, dtype)
    in_passes = FORWARD_PASSES * passes
    moved = _rearranged(run, batch, gpu)
    repeated = in_passes * (1 - sizes.kept / sizes.saved) + attended * again + lengths * again  # not kept
    repeated += moved * sum(textbook.tensor_again(run, segment))
    of_layer = Seconds(
        forward=in_passes + attended + lengths + IN_A_PASS * moved,
        again=repeated,
        backward=BACKWARD_PASSES * passes + attended_back + IN_A_PASS * moved,
        of_mlp=in_passes / 2,
        of_attention=attended,
        mlp_again=(repeated - attended * again) / 2,
    )
    found = Seconds()
    for variant in variants:
        found = found.plus(of_layer).plus(_products(run, segment, gpu, tokens, variant.recipe_enabled))
    return found


def _products(run: Assembly, segment: Segment, gpu: Gpu, tokens: int, recipe_enabled: bool) -> Seconds:
    """The `Seconds` of a layer's products. recipe_enabled: whether the layer has the recipe's numbers."""
    dtype = jnp.dtype(run.engine.table.weights.dtype)
    bandwidth = gpu.memory_bandwidth * known_rates(gpu).memory
    of_recipe = traffic.operands(run.model.precision, recipe_enabled, str(dtype))
    params, layouts = (jax.tree.leaves(tree) for tree in (segment.params, run.engine.layouts.weights[segment.name]))
    found = Seconds()
    for p, layout in zip(params, layouts, strict=True):
        if p.kind not in (Kind.MATRIX, Kind.FACTOR):
            continue
        rows, columns = jax.NamedSharding(run.mesh, layout.computed).shard_shape(p.shape)
        in_words = (p.dtype or str(dtype),) * 2 if p.kind is Kind.FACTOR else of_recipe
        low, low_back = (HLO_DTYPES[x] for x in in_words)
        ahead = _product(gpu, tokens, rows, columns, low)
        of_weights = p.trainable * _product(gpu, rows, columns, tokens, low_back)
        back = _product(gpu, tokens, columns, rows, low_back) + of_weights
        decoded = 0.0
        if coded := shares.coded_bytes(run, segment, p):  # codes are read and numbers written, in each pass
            decoded = rows * columns * (coded + dtype.itemsize) / bandwidth
        again = ahead * _repeated(run, segment, p)
        in_mlp = "mlp" in p.axes
        found = found.plus(
            Seconds(
                forward=ahead + decoded,
                again=again,
                backward=back + decoded,
                first=back * any(p.name == last.name for last in segment.last_products),
                columns=of_weights * (p.axes[0] in ("mlp", "heads", "kv_heads")),
                of_mlp=(ahead + decoded) * in_mlp,
                mlp_again=again * in_mlp,
            )
        )
    return found


def _rearranged(run: Assembly, batch: traffic.Batch, gpu: Gpu) -> float:
    """Seconds of the pass that brings gathered activations, shard by shard, into the order of the sequences.

    There is one for each collective over `tp`, of what is scattered as well; of one sequence the order is the same.
    """
    if tensor_parallel(run.mesh) == 1 or batch.sequences == 1:
        return 0.0
    tokens = batch.tokens // run.mesh.shape.get(CONTEXT, 1)
    size = tokens * run.model.hidden_size * jnp.dtype(run.engine.table.weights.dtype).itemsize
    return 2 * size / (gpu.memory_bandwidth * known_rates(gpu).memory)


def _row_lengths(run: Assembly, segment: Segment, gpu: Gpu, dtype) -> float:
    """Seconds in which a layer's DoRA adapters compute their lengths of rows: a float32 product and a pass for each."""
    rates = known_rates(gpu)
    by_name = {p.name: p for p in jax.tree.leaves(segment.params)}
    of_device = dict(zip(by_name, jax.tree.leaves(run.engine.layouts.weights[segment.name]), strict=True))
    seconds = 0.0
    for matrix, names in adapters(segment.params):
        if names.magnitude:
            rows, columns = jax.NamedSharding(run.mesh, of_device[matrix].computed).shard_shape(by_name[matrix].shape)
            seconds += _product(gpu, rows, by_name[names.a].shape[0], columns, HLO_DTYPES["float32"])
            seconds += rows * columns * jnp.dtype(dtype).itemsize / (gpu.memory_bandwidth * rates.memory)
    return seconds


def _repeated(run: Assembly, segment: Segment, p: Param) -> bool:
    """True if the backward pass computes the product with a matrix again."""
    if run.engine.recompute_block:
        return all(p.name != last.name for last in segment.last_products)
    recompute = run.model.compute.recompute
    return (recompute.ffn and p.axes[0] == "mlp") or (recompute.att and p.axes[0] in ("heads", "kv_heads"))


def _attention(gpu: Gpu, flops: float, scores: int) -> tuple[float, float]:
    """Seconds of the attention of one layer on one GPU, (forward, backward).

    flops: of its forward pass there. scores: bytes of the scores there; 0: flash attention, which stores none.
    """
    rates = known_rates(gpu)
    if not scores:
        back = attention_time(gpu, rates, BACKWARD_FLOPS * flops, backward=True)
        return attention_time(gpu, rates, flops, backward=False), back
    squares = 2 * flops / (gpu.bf16_flops * rates.products)  # XLA multiplies the masked half too
    moved = SCORE_PASSES * scores / (gpu.memory_bandwidth * rates.memory)
    return squares + moved, BACKWARD_FLOPS * (squares + moved)


def of_head(run: Assembly, batch: traffic.Batch, gpu: Gpu) -> float:
    """Seconds of head and loss in a microbatch: three products and several passes for each slice of tokens."""
    rates = known_rates(gpu)
    model = run.model
    table = run.engine.table
    chunks = run.engine.lmhead_chunks
    shards = run.mesh.shape[SHARD] if table.outer.sharded else 1
    of_group = batch.tokens // run.mesh.shape.get(CONTEXT, 1)
    tokens = of_group * shards // chunks  # sharded: each GPU has a part of the vocabulary, and all tokens
    vocabulary = model.vocab_size // (shards * tensor_parallel(run.mesh) * pipeline_stages(run.mesh))
    dtype = str(jnp.dtype(table.outer.dtype))
    sizes = ((tokens, vocabulary, model.hidden_size), (tokens, model.hidden_size, vocabulary))
    trained = model.outer_params[model.head].trainable
    sizes += ((vocabulary, model.hidden_size, tokens),) * trained
    products = sum(_product(gpu, *size, HLO_DTYPES[dtype]) for size in sizes)
    accumulator = trained * vocabulary * model.hidden_size * jnp.dtype(table.grads.dtype).itemsize
    passes = LOGIT_PASSES * tokens * vocabulary * jnp.dtype(dtype).itemsize + accumulator
    return chunks * (products + passes / (gpu.memory_bandwidth * rates.memory))


@functools.cache
def _product(gpu: Gpu, m: int, n: int, k: int, dtype: str) -> float:
    """Seconds of a product `[m, k] x [k, n]`."""
    rates = known_rates(gpu)
    return product_time(gpu, rates, m, n, k, dtype=dtype) + rates.launch
