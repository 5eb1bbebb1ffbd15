"""FLOPs of a step, and how long a GPU computes in a microbatch: in the blocks, part by part, and in the head.

Products take what costs.product_time says and flash attention what costs.attention_time says; attention by XLA takes
its products and the passes over its scores. Passes over activations take the bytes of the residuals times a factor:
FORWARD_PASSES and BACKWARD_PASSES are fitted to the timelines of compiled steps of 7B, 1.2B and 134M on RTX 4090 and
H100.
"""

import collections
import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from surojax.assembly.assemble import Assembly
from surojax.models.lora import adapters
from surojax.models.model import Segment, Variant
from surojax.numerics.recipes import BLOCK_SCALED, Precision
from surojax.objectives.objective import OfLogProbabilities
from surojax.objectives.teacher_states import TEACHER_HEAD
from surojax.placement.mesh import CONTEXT, EXPERT, SHARD, devices_per_sequence, pipeline_stages, tensor_parallel
from surojax.placement.param import Kind, Param
from surojax.planner import expert_time, layer_sizes, step_collectives
from surojax.planner.costs import BACKWARD_FLOPS, attention_time, pass_time, product_call_time
from surojax.planner.gpus import Gpu
from surojax.planner.layer_sizes import itemsize, segment_bytes
from surojax.planner.traffic import BatchShape

FORWARD_PASSES = 1.6  # bytes that passes move per byte of residuals of a block with nothing recomputed, forward
BACKWARD_PASSES = 3.2
LOGIT_PASSES = 4  # times that logits are read or written
LOGPROB_PASSES = 2  # likewise for log-probabilities alone
SCORE_PASSES = 4  # times that attention scores are, forward; twice as often backward
IN_A_PASS = 4  # collectives over tp: attention and MLP each gather their inputs and scatter their results
HLO_DTYPES = {"bfloat16": "bf16", "float32": "f32", "float8": "f8e4m3fn", "float4": "f4e2m1fn"}
LOW = ("float8", "float4")  # that operands are quantised to


def token_flops(run: Assembly, sequence_len: int) -> dict[str, float]:
    """FLOPs of training on one token, by the dtype that is multiplied: "bfloat16", "float32", "float8" or "float4".

    Products with the blocks' matrices have the recipe's dtypes in the layers with the recipe; attention, head, routers
    and adapters have model_dtype. What a recomputed block repeats is left out.
    """
    model = run.model
    work_dtype = run.engine.table.weights.dtype
    in_model_dtype = (work_dtype, work_dtype)
    flops = collections.defaultdict[str, float](float)

    def add(elements: int, trained: bool, dtypes: tuple[str, str]) -> None:
        """Adds a product: once forward, backward for the gradient of its input, and of a matrix that is trained."""
        flops[dtypes[0]] += 2 * elements
        flops[dtypes[1]] += 2 * elements * (1 + trained)

    for segment in model.segments:
        flops[work_dtype] += 3 * segment.mixing_flops(sequence_len)
        for p in jax.tree.leaves(segment.params):
            if p.kind in (Kind.VECTOR, Kind.TABLE):  # rows of a table are read
                continue
            elements = round(math.prod(p.shape) * p.used)
            for variant in segment.variants:
                dtypes = operands(model.precision, variant.recipe_enabled, work_dtype)
                dtypes = dtypes if p.kind is Kind.MATRIX else in_model_dtype
                add(elements, p.trainable, dtypes)
    add(model.head_rows * model.hidden_size, model.outer_params[model.head].trainable, in_model_dtype)
    if teacher := model.outer_params.get(TEACHER_HEAD):
        flops[work_dtype] += 2 * math.prod(teacher.shape)
    return dict(flops)


def operands(precision: Precision, recipe_enabled: bool, dtype: str) -> tuple[str, str]:
    """Dtypes of the operands of a block's matrix products, (forward, backward). dtype: the work weights' dtype."""
    if not recipe_enabled or precision.recipe == "bf16":
        forward = precision.matmul_dtype or dtype
        return forward, precision.gradient_dtype or forward
    emulated = precision.recipe in BLOCK_SCALED and precision.emulate
    low = "float32" if emulated else "float4" if precision.recipe == "nvfp4" else "float8"
    return low, low


def compute_time(gpu: Gpu, flops: dict[str, float]) -> float:
    """Seconds that FLOPs take at the peak rate of their dtype."""
    return sum(size / gpu.peak(dtype) for dtype, size in flops.items())


class Seconds(NamedTuple):
    """Seconds that the blocks of a stage compute in a microbatch.

    again: of the forward pass, what the backward pass repeats. first: of `backward`, until the first gradient of each
    layer is there, that of the matrix whose product comes last.
    """

    forward: float = 0.0
    again: float = 0.0
    backward: float = 0.0
    first: float = 0.0

    def plus(self, other: "Seconds") -> "Seconds":
        """Adds two `Seconds` field by field."""
        return Seconds(*(a + b for a, b in zip(self, other, strict=True)))


def of_blocks(run: Assembly, batch: BatchShape, gpu: Gpu) -> Seconds:
    """The `Seconds` of all blocks of a full stage; of stages with other kinds of layers, of the slowest one."""
    total = Seconds()
    for segment in run.model.segments:
        stages = [_stage(run, segment, pattern, batch, gpu) for pattern in layer_sizes.patterns(run, segment).patterns]
        total = total.plus(max(stages, key=lambda x: x.forward + x.again + x.backward))
    return total


def _stage(run: Assembly, segment: Segment, variants: tuple[Variant, ...], batch: BatchShape, gpu: Gpu) -> Seconds:
    """The `Seconds` of layers of a segment. variants: of each of them."""
    model = run.model
    length = batch.sequence_len // devices_per_sequence(run.mesh)
    x = jax.ShapeDtypeStruct((batch.sequences, length, model.channels.all), jnp.dtype(run.engine.table.weights.dtype))
    whole = model.rebuild(dataclasses.replace(model.compute, sequence_chunks=1))
    layer = segment_bytes(dataclasses.replace(run, model=whole), segment, x, "gpu")
    passes = pass_time(gpu, layer.saved - layer.received)
    flops = dataclasses.replace(segment, variants=variants).mixing_flops(batch.sequence_len)
    flops *= batch.tokens / len(variants)  # of a layer, for a group
    kernels = layer_sizes.kernel_bytes(run, whole, segment, x, "gpu", run.engine.packed)
    again = layer_sizes.attention_again(run)
    if kernels.moved is None:
        flops /= devices_per_sequence(run.mesh)
        attended, attended_back = _attention(gpu, flops, layer.scores, kernels.repeated)
        attended_again = attended * again
    else:
        attended, attended_again, attended_back = (pass_time(gpu, size) for size in kernels.moved)
        attended_again *= again
    lengths = _row_lengths(run, segment, gpu)
    moved = _rearranged(run, batch, gpu)
    in_passes = FORWARD_PASSES * passes
    in_passes_again = in_passes * (1 - layer.kept / layer.saved)  # of what is not kept
    in_passes_again += lengths * again + moved * sum(step_collectives.tensor_again(run, segment))
    of_layer = Seconds(
        forward=in_passes + attended + lengths + IN_A_PASS * moved,
        again=in_passes_again + attended_again,
        backward=BACKWARD_PASSES * passes + attended_back + IN_A_PASS * moved,
    )
    kinds = {variant.recipe_enabled for variant in variants}
    in_products = {enabled: _products(run, segment, gpu, batch, enabled) for enabled in kinds}
    total = Seconds()
    for variant in variants:
        total = total.plus(of_layer).plus(in_products[variant.recipe_enabled])
    return total


def _products(run: Assembly, segment: Segment, gpu: Gpu, batch: BatchShape, recipe_enabled: bool) -> Seconds:
    """The `Seconds` of a layer's products. recipe_enabled: whether the layer has the recipe's numbers."""
    dtype = run.engine.table.weights.dtype
    tokens = batch.tokens // run.mesh.shape.get(CONTEXT, 1)  # a tensor-parallel group has the same ones
    total = Seconds()
    for t in layer_sizes.blocks(run, segment):
        p = t.param
        if p.kind not in (Kind.MATRIX, Kind.FACTOR):
            continue
        if t.coded:  # codes are read and numbers written, in each pass
            decoded = pass_time(gpu, math.prod(t.shape) * (t.coded + itemsize(run, "weights")))
            total = total.plus(Seconds(forward=decoded, backward=decoded))
        *experts, rows, columns = t.shape
        if experts:  # see below
            continue
        in_words = (p.dtype or dtype,) * 2
        if p.kind is Kind.MATRIX:
            in_words = operands(run.model.precision, recipe_enabled, dtype)
        low, low_back = (HLO_DTYPES[x] for x in in_words)
        ahead = product_call_time(gpu, tokens, rows, columns, low)
        back = product_call_time(gpu, tokens, columns, rows, low_back)
        back += p.trainable * product_call_time(gpu, rows, columns, tokens, low_back)
        if in_words[0] in LOW:  # activations and their gradients are read, and written in 8 bits
            ahead += pass_time(gpu, tokens * columns * (itemsize(run, "weights") + 1))
            back += pass_time(gpu, tokens * rows * (itemsize(run, "weights") + 1))
        total = total.plus(
            Seconds(
                forward=ahead,
                again=ahead * _repeated(run, segment, p),
                backward=back,
                first=back * any(p.name == last.name for last in segment.last_products),
            )
        )
    return total.plus(_experts(run, segment, gpu, tokens, recipe_enabled))


def _experts(run: Assembly, segment: Segment, gpu: Gpu, tokens: int, recipe_enabled: bool) -> Seconds:
    """The `Seconds` of a layer's experts; zeros if it has none.

    The gradients of all of them come out of one loop, so the first one is there at its end.
    """
    matrices = layer_sizes.expert_tensors(run, segment)
    if not matrices:
        return Seconds()
    low, low_back = operands(run.model.precision, recipe_enabled, run.engine.table.weights.dtype)
    chunks = run.model.compute.sequence_chunks  # one after another
    experts = expert_time.ExpertWork(
        run=run,
        segment=segment,
        gpu=gpu,
        tensors=matrices,
        tokens=tokens // chunks,
        by_loop=bool(layer_sizes.experts_by_loop(run, segment, matrices[0], recipe_enabled)),
        dtypes=(HLO_DTYPES[low], HLO_DTYPES[low_back]),
        quantised=low in LOW,
    )
    forward, again, backward = (chunks * seconds for seconds in expert_time.expert_seconds(experts))
    return Seconds(forward=forward, again=again, backward=backward, first=backward)


def _rearranged(run: Assembly, batch: BatchShape, gpu: Gpu) -> float:
    """Seconds of the pass that brings gathered activations, shard by shard, into the order of the sequences.

    There is one for each collective over `tp`, of what is scattered as well; of one sequence the order is the same.
    """
    if tensor_parallel(run.mesh) == 1 or batch.sequences == 1:
        return 0.0
    tokens = batch.tokens // run.mesh.shape.get(CONTEXT, 1)
    return pass_time(gpu, 2 * tokens * run.model.hidden_size * itemsize(run, "weights"))


def _row_lengths(run: Assembly, segment: Segment, gpu: Gpu) -> float:
    """Seconds in which a layer's DoRA adapters compute their lengths of rows: a float32 product and a pass for each."""
    tensors = {t.param.name: t for t in layer_sizes.blocks(run, segment)}
    seconds = 0.0
    for matrix, names in adapters(segment.params):
        if names.magnitude:
            rows, columns = tensors[matrix].shape
            seconds += product_call_time(gpu, rows, tensors[names.a].param.shape[0], columns, HLO_DTYPES["float32"])
            seconds += pass_time(gpu, rows * columns * itemsize(run, "weights"))
    return seconds


def _repeated(run: Assembly, segment: Segment, p: Param) -> bool:
    """True if the backward pass computes the product with a matrix again."""
    if run.engine.recompute_block:
        return all(p.name != last.name for last in segment.last_products)
    recompute = run.model.compute.recompute
    return (recompute.ffn and p.axes[0] == "mlp") or (recompute.att and p.axes[0] in ("heads", "kv_heads"))


def _attention(gpu: Gpu, flops: float, scores: int, repeated: tuple[float, float]) -> tuple[float, float]:
    """Seconds of the attention of one layer on one GPU, (forward, backward).

    flops: of its forward pass there. scores: bytes of the scores there; 0: flash attention, which stores none.
    repeated: see `KernelBytes`.
    """
    if not scores:
        forward, back = repeated
        in_backward = attention_time(gpu, back * BACKWARD_FLOPS * flops, backward=True)
        return attention_time(gpu, forward * flops, backward=False), in_backward
    squares = 2 * flops / (gpu.bf16_flops * gpu.rates.products)  # XLA multiplies the masked half too
    forward = squares + pass_time(gpu, SCORE_PASSES * scores)
    return forward, BACKWARD_FLOPS * forward


def of_head(run: Assembly, batch: BatchShape, gpu: Gpu) -> float:
    """Seconds of head and loss in a microbatch: three products and several passes for each slice of tokens.

    An `OfLogProbabilities` computes the logits once more, for their log-probabilities; a teacher's last hidden states
    need the teacher's.
    """
    model = run.model
    table = run.engine.table
    chunks = run.engine.lmhead_chunks
    is_sharded = table.outer.sharded and model.has_logits
    shards = layer_sizes.devices(run, run.mesh.shape.keys() & {SHARD, EXPERT}) if is_sharded else 1
    of_group = batch.tokens // run.mesh.shape.get(CONTEXT, 1)
    tokens = of_group * shards // chunks  # sharded: each GPU has a part of the vocabulary, and all tokens
    words = model.head_rows
    if model.has_logits:
        words //= shards * tensor_parallel(run.mesh) * pipeline_stages(run.mesh)
    width = model.hidden_size
    trained = model.outer_params[model.head].trainable
    shapes = [(tokens, words, width), (tokens, width, words), (words, width, tokens)][: 2 + trained]
    passes = LOGIT_PASSES
    if isinstance(run.engine.objective, OfLogProbabilities):
        shapes.append(shapes[0])
        passes += LOGPROB_PASSES
    if teacher := model.outer_params.get(TEACHER_HEAD):
        shapes.append((tokens, words, teacher.shape[1]))
        passes += LOGIT_PASSES
    products = sum(product_call_time(gpu, *shape, HLO_DTYPES[table.outer.dtype]) for shape in shapes)
    accumulator = trained * words * width * itemsize(run, "grads")
    return chunks * (products + pass_time(gpu, passes * tokens * words * itemsize(run, "outer") + accumulator))
