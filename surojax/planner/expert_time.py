"""How long a GPU takes for a layer's experts, kernel by kernel.

A loop goes over blocks of rows that have one expert each (models/grouped.py). Beside its products a block has kernels
that are launched, and that read and write device memory: they copy its rows and its expert's matrices, apply the
activation, and in the backward pass add up gradients in float32. The kernels and their bytes are those of programs that
XLA compiles for OLMoE and Qwen3-MoE (jax 0.12; H100, RTX 4090).

If tokens are sent to experts (parallel/expert_dispatch.py), all-to-alls come in rounds, and each has kernels that bring
tokens into their places. Their bytes on the link are in step_collectives.py.

Shape suffixes: R rows of a block, D hidden size, F width of an expert on a GPU, N tokens of a GPU, T tokens that a GPU
has room for if GPUs share experts.
"""

import dataclasses
import math

from surojax.assembly.assemble import Assembly
from surojax.models.kinds.experts import choices_of
from surojax.models.lora import adapters
from surojax.models.model import Segment
from surojax.parallel import expert_dispatch
from surojax.placement.mesh import EXPERT
from surojax.placement.param import Kind
from surojax.planner import layer_sizes
from surojax.planner.costs import attention_time, pass_time, product_call_time
from surojax.planner.gpus import Gpu
from surojax.planner.layer_sizes import TensorOnGpu, itemsize

FLOAT32 = 4  # bytes
IN_BLOCK = 5  # kernels of a block beside products: the mask of its rows, rows, matrices, activation, counter
IN_ROUND = 4  # kernels of a round beside the all-to-all: the mask of its tokens, tokens, their places, counter


def multiplied_by(run: Assembly, *, served: bool = True) -> str:
    """Returns a line on whether a kernel or a scan multiplies the experts; "" if no kernel was asked for.

    served: whether the GPU is one that the kernel is for.
    """
    if run.model.precision.kernels == "xla":
        return ""
    for segment in run.model.segments:
        for t in layer_sizes.blocks(run, segment):
            if t.param.of_experts and t.is_matrix:
                enabled = any(variant.recipe_enabled for variant in segment.variants)
                reason = layer_sizes.experts_by_loop(run, segment, t, enabled)
                reason = reason or ("" if served else "this GPU is none that the kernel is for")
                how = f"a scan over blocks, whatever `kernels` says: {reason}" if reason else "the grouped kernel"
                return f"experts: multiplied by {how}"
    return ""


@dataclasses.dataclass(frozen=True)
class ExpertWork:
    """A layer's experts on a GPU, and the rows that they compute.

    tensors: matrices and adapters. number: bytes of an activation. tokens: of a GPU. received: token slots that it
    reserves for what all GPUs send to its experts. by_loop: over blocks; else a kernel multiplies all rows at once.
    devices: that share the experts. dtypes: HLO's, of the operands forward and backward. quantised: rows are, for each
    product.
    """

    run: Assembly
    segment: Segment
    gpu: Gpu
    tensors: list[TensorOnGpu]
    tokens: int
    by_loop: bool
    dtypes: tuple[str, str]
    quantised: bool

    @property
    def number(self) -> int:
        return itemsize(self.run, "weights")

    @property
    def hidden(self) -> int:
        return self.run.model.hidden_size

    @property
    def width(self) -> int:
        """The width of an expert's MLP."""
        t = self.tensors[0]
        return t.shape[t.param.axes.index("mlp")]

    @property
    def devices(self) -> int:
        return self.run.mesh.shape.get(EXPERT, 1)

    @property
    def received(self) -> int:
        return self.devices * self.tokens

    def kernels(self, number: int, size: float) -> float:
        """Seconds of so many kernels that read and write so many bytes."""
        return number * self.gpu.rates.launch + pass_time(self.gpu, size)


def expert_seconds(x: ExpertWork) -> tuple[float, float, float]:
    """Seconds of a layer's experts in a microbatch: (forward, what a recomputed block repeats, backward)."""
    rows, times = layer_sizes.expert_rows(x.run, x.segment, x.tokens, by_loop=x.by_loop)
    if not x.by_loop:
        rows, times = rows * times, 1
    iteration = x.gpu.rates.iteration if x.by_loop else 0.0
    ahead, back = (times * (_of_block(x, rows, backward=backward) + iteration) for backward in (False, True))
    trained = sum(t.shape[0] * t.shape[1] * t.shape[2] for t in x.tensors if t.trained)
    back += x.kernels(0, trained * x.number * x.by_loop)  # zeros that gradients are written into
    sent, home = _to_experts(x), _home(x)
    collected = _collected(x, rows * times)
    again = sent * x.run.engine.recompute_block
    return sent + ahead + collected + home, again, sent + back + collected + home


def _of_block(x: ExpertWork, rows: int, *, backward: bool) -> float:
    """Seconds of a block in one direction. The backward pass computes its values again, but for the last product."""
    matrices = [t for t in x.tensors if t.param.kind is Kind.MATRIX]
    size = rows * x.number * (x.hidden * (4 if backward else 2) + x.width * (6 if backward else 3))
    number = IN_BLOCK
    if x.by_loop:
        size += 2 * x.number * sum(t.shape[1] * t.shape[2] for t in x.tensors)
        number += 2 * (len(matrices) < len(x.tensors))
    if backward:  # gradients of weights of choices; whether gradients of matrices go on from the block before
        number += 1 + any(t.trained for t in x.tensors)
    if x.devices > 1:  # results are added up in float32
        size += rows * x.hidden * (x.number + FLOAT32)
        number += backward
    products = sum(_products(x, t, rows, backward=backward) for t in x.tensors)
    return products + x.kernels(number, size)


def _products(x: ExpertWork, t: TensorOnGpu, rows: int, *, backward: bool) -> float:
    """Seconds of a block's products with a tensor in one direction."""
    _, outputs, inputs = t.shape
    forward_dtype, backward_dtype = x.dtypes if t.param.kind is Kind.MATRIX else (x.dtypes[0],) * 2
    ahead = _product(x, rows, outputs, inputs, forward_dtype)
    if x.quantised and t.param.kind is Kind.MATRIX:
        ahead += x.kernels(1, rows * inputs * (x.number + 1))
    last_matrices = {p.name for p in x.segment.last_products}
    last = t.param.name in last_matrices
    if any(names.b == t.param.name and of not in last_matrices for of, names in adapters(x.segment.params)):
        ahead += x.kernels(1, 2 * rows * outputs * x.number)  # before the matrix' product is added to it
    if x.quantised and not x.by_loop and t.param.kind is Kind.MATRIX:  # and the matrices of all experts at once
        ahead += x.kernels(1, math.prod(t.shape) * (x.number + 1))
    if not backward:
        return ahead
    back = _product(x, rows, inputs, outputs, backward_dtype) + (0.0 if last else ahead)
    if x.quantised and t.param.kind is Kind.MATRIX:
        back += x.kernels(1, rows * outputs * (x.number + 1))
    if t.trained:
        back += _product(x, outputs, inputs, rows, backward_dtype)
        # Added up in float32 and written; those of adapters are added up by one kernel.
        if x.by_loop:
            back += x.kernels(1 + (t.param.kind is Kind.MATRIX), outputs * inputs * (3 * FLOAT32 + 3 * x.number))
    return back


def _product(x: ExpertWork, m: int, n: int, k: int, dtype: str) -> float:
    """Seconds of a product; a kernel for all rows is assumed to multiply as fast as attention does."""
    if x.by_loop:
        return product_call_time(x.gpu, m, n, k, dtype)
    return attention_time(x.gpu, 2.0 * m * n * k, backward=False) + x.gpu.rates.launch


def _collected(x: ExpertWork, rows: int) -> float:
    """Seconds in which the results of all blocks, so many rows, become the sums of tokens."""
    if x.devices > 1:  # they were added up: float32 sums that begin with zeros, and end in the dtype of activations
        return x.kernels(2, x.received * x.hidden * (2 * FLOAT32 + x.number))
    zeros = rows * x.hidden * x.by_loop
    _, chosen = choices_of(x.segment)
    return x.kernels(2, x.number * (zeros + (1 + chosen) * x.tokens * x.hidden))


def _to_experts(x: ExpertWork) -> float:
    """Seconds of kernels that send tokens to the GPUs that have their experts."""
    if x.devices == 1:
        return 0.0
    rounds, size = _round(x)
    each = x.kernels(IN_ROUND + 1, 4 * size) + x.gpu.rates.iteration
    return rounds * each + x.kernels(1, x.received * x.hidden * x.number)


def _home(x: ExpertWork) -> float:
    """Seconds of kernels that add up the sums that come back from other GPUs, in float32."""
    if x.devices == 1:
        return 0.0
    rounds, size = _round(x)
    each = x.kernels(IN_ROUND - 1 + x.devices, 2 * size + size / x.number * (x.number + FLOAT32))
    return rounds * (each + x.gpu.rates.iteration) + x.kernels(2, x.tokens * x.hidden * (2 * FLOAT32 + x.number))


def _round(x: ExpertWork) -> tuple[int, int]:
    """(rounds if tokens choose experts evenly, bytes that a round sends and brings)."""
    experts, chosen = choices_of(x.segment)
    rounds = expert_dispatch.even_rounds(experts, chosen, x.devices, x.tokens)
    return rounds, x.devices * expert_dispatch.rows_of_round(x.tokens) * x.hidden * x.number
