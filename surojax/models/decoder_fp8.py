"""A decoder block with all linear layers in float8. Its forward and backward passes are written out by hand.

Written out, the operations between two products are one pass over memory, forward and backward: a fused kernel
(`pallas_kernels`) computes the next product's operand and its largest magnitude, and writes the operand in float8 if
its scale is known before. Reverse mode could not pass these magnitudes, or float8 gradients, between operations.

    attention:  x -> norm -> q, k, v -> rope -> attention -> output product = o
    mlp:        x + o -> norm -> gate, up -> swiglu -> down product, + (x + o)

A linear layer has three products: y = x w^T, dx = dy w, dw = dy^T x. Each is contracted over the last dimension of both
operands (fp8.py). So x and dy are quantised in two forms, as they are and transposed, and w is transposed for dx.

Weights are `Quantized` with one scale each (step/weights.py). The residual stream, attention, scales of norms, biases
and the block's gradients are in the model's dtype; gradients of scales of norms and of biases are in float32.

In a tensor-parallel group (parallel/tensor.py) operands are quantised before they are gathered: inputs of column
products forward, gradients of row products backward. The scale of a tensor that is divided over the group follows from
its largest magnitude on all devices. Keys and values that several devices share get the sum of their gradients before
it is quantised, since that is the tensor which one device would quantise. What the group shares is summed by hand here.

With adapters all else is frozen: the products dw and their transposed operands are left out, and the backward pass
makes the adapters' inputs again from residuals (fp8_adapters.py).

Shape suffixes: N tokens (B x S), n this device's part of them, D hidden size, F intermediate size; T at the end of a
name: transposed.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import quantize, rms_norm, rope, swiglu
from surojax.models.fp8_adapters import Branches
from surojax.models.operations import Operations
from surojax.models.rotary import positions_of, rope_angles
from surojax.numerics.fp8 import E4M3, E5M2, Sites, product, scale_for
from surojax.numerics.quantize import Quantized
from surojax.numerics.recipes import Precision
from surojax.parallel.collectives import add_up, same
from surojax.parallel.tensor import (
    all_gather_tokens,
    in_group,
    largest_of_group,
    of_first_sharer,
    reduce_scatter_tokens,
)
from surojax.placement.mesh import SAME_KV_HEADS, TENSOR

# The tensors of a block that are quantised: operands of products, and gradients of the products' results.
SITES = Sites(
    inputs=("attention_input", "attention_output", "mlp_input", "mlp_hidden"),
    gradients=("d_q", "d_k", "d_v", "d_attention", "d_gate", "d_up", "d_mlp"),
)
SITE_NAMES = (*SITES.inputs, *SITES.gradients)


class AttentionSaved(NamedTuple):
    """Residuals of the attention half of the block."""

    x_nD: jax.Array
    input_T: Quantized | None  # None if matrices are frozen
    q: Any  # before qk_norm; None without qk_norm
    k: Any
    attend_vjp: Any
    output_T: Quantized | None  # None if matrices are frozen
    output: Any  # None unless the output product has an adapter, whose input it is


class MlpSaved(NamedTuple):
    """Residuals of the MLP half of the block."""

    total_nD: jax.Array  # x + o
    input_T: Quantized | None  # None if matrices are frozen
    gate_NF: jax.Array
    up_NF: jax.Array
    hidden_T: Quantized | None  # None if matrices are frozen


class Quantiser:
    """Makes operands of products: chooses their scales, and records the largest magnitude of each site.

    scales: float32 `[sites]`, known before the tensors (delayed scaling); None: each scale is made from its tensor.
    sequences: B. frozen: matrices have no gradients, so that no operand is needed transposed. observed: {site: largest
    magnitude on this device}.
    """

    def __init__(self, precision: Precision, scales: jax.Array | None, sequences: int, *, frozen: bool):
        self.scales = scales
        self.sequences = sequences
        self.frozen = frozen
        self.observed = {}
        self.options: dict[str, Any] = {"implementation": precision.implementation}

    def known(self, site: str) -> jax.Array | None:
        """The scale of a site if it is known before the tensor (delayed scaling), else None."""
        return None if self.scales is None else self.scales[SITE_NAMES.index(site)]

    def scale(self, site: str, dtype, absmax: jax.Array) -> jax.Array:
        """The scale of a site whose tensor has the largest magnitude `absmax`; records it."""
        known = self.known(site)
        self.observed[site] = absmax
        return scale_for(largest_of_group(absmax), dtype) if known is None else known

    def made(self, site: str, kernel) -> tuple[Quantized, tuple]:
        """(the first result of a kernel as a float8 operand, the kernel's results after absmax).

        kernel: a function (out_dtype=, out_scale=, **options) -> (values, absmax, ...).
        """
        known = self.known(site)
        if known is not None:
            values, absmax, *others = kernel(out_dtype=E4M3, out_scale=known, **self.options)
            self.observed[site] = absmax
            return Quantized(values, known), tuple(others)
        y, absmax, *others = kernel(**self.options)
        scale = self.scale(site, E4M3, absmax)
        return Quantized(quantize.cast(y, scale, E4M3, **self.options), scale), tuple(others)

    def both(
        self, site: str, x_Nn: jax.Array, dtype, absmax: jax.Array | None = None
    ) -> tuple[Quantized, Quantized | None]:
        """(operand, transposed operand) of a 16-bit tensor. absmax: its largest magnitude; None: not computed yet.

        There is no transposed operand if matrices are frozen.
        """
        if self.frozen:
            scale = self.scale(site, dtype, quantize.absmax(x_Nn, **self.options) if absmax is None else absmax)
            return Quantized(quantize.cast(x_Nn, scale, dtype, **self.options), scale), None
        known = self.known(site)
        if known is None:
            absmax = quantize.absmax(x_Nn, **self.options) if absmax is None else absmax
            known = scale_for(largest_of_group(absmax), dtype)
        cast = quantize.cast_transpose(x_Nn, known, dtype, **self.options)
        self.observed[site] = cast.absmax
        return Quantized(cast.values, known), Quantized(cast.transposed, known)

    def one(self, site: str, x_Nn: jax.Array) -> Quantized:
        """A tensor as a float8 operand, for a forward pass without gradients; no magnitude is recorded."""
        known = self.known(site)
        if known is None:
            known = scale_for(largest_of_group(quantize.absmax(x_Nn, **self.options)), E4M3)
        return Quantized(quantize.cast(x_Nn, known, E4M3, **self.options), known)

    def gathered(self, x_nD: Quantized) -> Quantized:
        """The operand for whole sequences, from this device's part of them."""
        return x_nD._replace(values=all_gather_tokens(x_nD.values, self.sequences))

    def both_gathered(
        self, site: str, x_nD: jax.Array, dtype, absmax: jax.Array | None = None
    ) -> tuple[Quantized, Quantized | None]:
        """`both` for whole sequences, from this device's part of them."""
        if not in_group():
            return self.both(site, x_nD, dtype, absmax)
        scale = self.scale(site, dtype, quantize.absmax(x_nD, **self.options) if absmax is None else absmax)
        x_ND = self.gathered(Quantized(quantize.cast(x_nD, scale, dtype, **self.options), scale))
        return x_ND, self.input_transposed(x_ND)

    def scattered(self, y_ND: jax.Array) -> jax.Array:
        """This device's part `[n, D]` of a sum over the group."""
        return reduce_scatter_tokens(y_ND, self.sequences)

    def transposed(self, x: Quantized) -> Quantized:
        """A float8 matrix transposed."""
        return Quantized(quantize.transpose(x.values, **self.options), x.scales)

    def input_transposed(self, x: Quantized) -> Quantized | None:
        """An operand transposed, for the gradient of a matrix; None if matrices are frozen."""
        return None if self.frozen else self.transposed(x)

    def vector(self) -> jax.Array:
        """The recorded magnitudes `[sites]`; 0 for a site without one."""
        return jnp.stack([self.observed.get(site, jnp.float32(0)) for site in SITE_NAMES])


def fp8_block(config, ops: Operations, w: dict, x_BSD: jax.Array, scales: jax.Array | None) -> jax.Array:
    """The block's output for activations `[B, S, D]`; no residuals are saved."""
    quantiser = _quantiser(config, ops, scales, len(x_BSD))
    x_ND = x_BSD.reshape(-1, x_BSD.shape[-1])
    o_ND, _ = _attention(config, quantiser, ops, w, x_ND, saving=False)
    return _mlp(config, quantiser, w, x_ND, o_ND, saving=False)[0].reshape(x_BSD.shape)


def fp8_block_forward(config, ops: Operations, w: dict, x_BSD: jax.Array, scales: jax.Array | None):
    """(the block's output for x, residuals for `fp8_block_backward`).

    The residuals are arrays in the model's dtype and in float8, scales, and the recorded magnitudes.
    """
    quantiser = _quantiser(config, ops, scales, len(x_BSD))
    x_ND = x_BSD.reshape(-1, x_BSD.shape[-1])
    o_ND, attention_saved = _attention(config, quantiser, ops, w, x_ND, saving=True)
    y_ND, mlp_saved = _mlp(config, quantiser, w, x_ND, o_ND, saving=True)
    return y_ND.reshape(x_BSD.shape), (attention_saved, mlp_saved, quantiser.observed)


def fp8_block_backward(config, ops: Operations, w: dict, saved, dy_BSD: jax.Array, scales: jax.Array | None):
    """(gradients of the weights, gradient of x, magnitudes `[sites]` of the forward and the backward pass).

    The gradients of the weights are a tree like w, with arrays in place of `Quantized`; of what is frozen, it may have
    None or nothing.
    """
    attention_saved, mlp_saved, observed = saved
    quantiser = _quantiser(config, ops, scales, len(dy_BSD))
    quantiser.observed |= observed
    dy_ND = dy_BSD.reshape(-1, dy_BSD.shape[-1])
    d_mlp, d_mlp_norm, d_total = _mlp_backward(config, quantiser, w, mlp_saved, dy_ND)
    d_attention, d_attention_norm, dx = _attention_backward(config, quantiser, ops, w, attention_saved, d_total)
    dw = {"attention": d_attention, "attention_norm": d_attention_norm, "mlp": d_mlp, "mlp_norm": d_mlp_norm}
    return dw, dx.dx.reshape(dy_BSD.shape), quantiser.vector()


def _quantiser(config, ops: Operations, scales: jax.Array | None, sequences: int) -> Quantiser:
    return Quantiser(ops.compute.precision, scales, sequences, frozen=config.lora is not None)


def _gradient(name: str, d_T: Quantized | None, x_T: Quantized | None, dtype) -> dict[str, jax.Array]:
    """{name of a matrix: its gradient} from transposed operands; nothing if it is frozen."""
    return {} if d_T is None or x_T is None else {name: product(d_T, x_T, dtype)}


# --- attention --------------------------------------------------------------------------------------------------------


def _attention(config, quantiser: Quantiser, ops: Operations, w: dict, x_nD: jax.Array, *, saving: bool):
    """(output of the attention half, not yet added to x; AttentionSaved, or None without `saving`)."""
    a = w["attention"]
    options = quantiser.options
    eps = config.rms_norm_eps
    dtype = x_nD.dtype

    def norm_of_input(**out):
        return rms_norm.forward(x_nD, w["attention_norm"], eps=eps, **out)[:2]

    def split_heads(y):
        return y.reshape(-1, S, y.shape[-1] // config.head_dim, config.head_dim)

    def bias(name: str):
        return a[name][None, :] if name in a else None

    def qk_norm(x, name: str):
        return rms_norm.forward(x, a[name], eps=eps, **options).y if config.qk_norm else x

    def attend(q, k, v, starts):
        return dataclasses.replace(ops, starts=starts).attend(q, k, v)[0]

    def projected(name: str):
        y_matrix = product(y, a[f"w{name}"], dtype, plus=bias(f"b{name}"))
        return split_heads(branches.added(y_matrix, f"w{name}", normed_nD))

    branches = Branches(config.lora, a, quantiser.sequences)
    normed_nD = norm_of_input(**options)[0] if branches.has_any("wq", "wk", "wv") else None
    y = quantiser.gathered(quantiser.made("attention_input", norm_of_input)[0])
    N = len(y.values)
    S = N // quantiser.sequences
    q, k, v = map(projected, "qkv")
    rotated = rope.forward(qk_norm(q, "q_norm"), qk_norm(k, "k_norm"), *_angles(config, ops, S), **options)
    if not saving:
        y_NH = attend(rotated.q, rotated.k, v, ops.starts).reshape(N, -1)
        out = quantiser.one("attention_output", y_NH)
        return branches.added(quantiser.scattered(product(out, a["wo"], dtype)), "wo", y_NH), None
    saveable = (True, True, True, False)
    y_BSHh, attend_vjp = jax.vjp(attend, rotated.q, rotated.k, v, ops.starts, saveable_args=saveable)
    y_NH = y_BSHh.reshape(N, -1)
    out, output_T = quantiser.both("attention_output", y_NH, E4M3)
    before_norm = (q, k) if config.qk_norm else (None, None)
    output = y_NH if branches.has("wo") else None
    saved = AttentionSaved(x_nD, quantiser.input_transposed(y), *before_norm, attend_vjp, output_T, output)
    return branches.added(quantiser.scattered(product(out, a["wo"], dtype)), "wo", y_NH), saved


def _attention_backward(config, quantiser: Quantiser, ops: Operations, w: dict, saved: AttentionSaved, d_total):
    """(gradients of the attention's weights, gradient of its norm's scale, result of the norm's backward pass).

    d_total: gradient of x + o, with its largest magnitude. The last result has the gradient of x and its largest
    magnitude.
    """
    a = w["attention"]
    options = quantiser.options
    eps = config.rms_norm_eps
    dtype = d_total.dx.dtype
    # Residuals come back typed as different on all devices.
    input_T = same(saved.input_T, *TENSOR)
    q, k, v = saved.attend_vjp.args_res[:3]
    saved.attend_vjp.args_res = [q, *same((k, v), SAME_KV_HEADS), ops.starts]
    d_o, d_oT = quantiser.both_gathered("d_attention", d_total.dx, E5M2, d_total.absmax)
    dw = _gradient("wo", d_oT, saved.output_T, dtype)
    branches = Branches(config.lora, a, quantiser.sequences)
    dy = product(d_o, quantiser.transposed(a["wo"]), dtype)
    d_adapter, dy = branches.backward("wo", saved.output, d_total.dx, plus=dy)
    dw |= d_adapter
    N = len(dy)
    dy_BSHh = dy.reshape(quantiser.sequences, -1, dy.shape[-1] // config.head_dim, config.head_dim)
    dq, dk, dv, _ = saved.attend_vjp(dy_BSHh)
    dq, dk, *absmax = rope.forward(dq, dk, *_angles(config, ops, dy_BSHh.shape[1]), inverse=True, **options)
    if config.qk_norm:
        dq, d_q_norm, absmax[0] = rms_norm.backward(dq, saved.q, a["q_norm"], eps=eps, **options)
        before_norm = same(saved.k, SAME_KV_HEADS)
        dk, d_k_norm, absmax[1] = rms_norm.backward(dk, before_norm, a["k_norm"], eps=eps, **options)
        dw |= {} if quantiser.frozen else add_up({"q_norm": d_q_norm, "k_norm": d_k_norm}, *TENSOR)
    normed_nD = None
    if branches.has_any("wq", "wk", "wv"):
        normed_nD = rms_norm.forward(saved.x_nD, w["attention_norm"], eps=eps, **options).y
    d_input = None
    d_normed = None  # by adapters
    for name, d, top in zip("qkv", (dq, dk, dv), (*absmax, None), strict=True):
        d = d.reshape(N, -1)
        if f"b{name}" in a and not quantiser.frozen:
            dw[f"b{name}"] = jnp.sum(d, axis=0, dtype=jnp.float32)
        d8, d8T = quantiser.both(f"d_{name}", d, E5M2, top)
        dw |= _gradient(f"w{name}", d8T, input_T, dtype)
        d_adapter, d_normed = branches.backward(f"w{name}", normed_nD, d, plus=d_normed)
        dw |= d_adapter
        term = d8 if name == "q" else of_first_sharer(d8)
        d_input = product(term, quantiser.transposed(a[f"w{name}"]), dtype, plus=d_input)
    assert d_input is not None
    d_input = quantiser.scattered(d_input)
    d_input = d_input if d_normed is None else d_input + d_normed
    dx = rms_norm.backward(d_input, saved.x_nD, w["attention_norm"], d_total.dx, eps=eps, **options)
    return dw, None if quantiser.frozen else add_up(dx.d_scale, *TENSOR), dx


# --- MLP --------------------------------------------------------------------------------------------------------------


def _mlp(config, quantiser: Quantiser, w: dict, x_nD: jax.Array, o_nD: jax.Array, *, saving: bool):
    """(x + o + mlp(x + o); MlpSaved, or None without `saving`)."""
    m = w["mlp"]
    eps = config.rms_norm_eps

    def norm_of_sum(**out):
        return rms_norm.forward(x_nD, w["mlp_norm"], o_nD, eps=eps, **out)

    def projected(name: str):
        return branches.added(product(y, m[name], x_nD.dtype), name, normed_nD)

    branches = Branches(config.lora, m, quantiser.sequences)
    normed_nD = norm_of_sum(**quantiser.options).y if branches.has_any("w_gate", "w_up") else None
    y, (total_nD,) = quantiser.made("mlp_input", norm_of_sum)
    y = quantiser.gathered(y)
    gate, up = map(projected, ("w_gate", "w_up"))
    hidden, _ = quantiser.made("mlp_hidden", lambda **out: swiglu.forward(gate, up, **out))
    if in_group():
        out_nD = quantiser.scattered(product(hidden, m["w_down"], x_nD.dtype)) + total_nD
    else:
        out_nD = product(hidden, m["w_down"], x_nD.dtype, plus=total_nD)
    if branches.has("w_down"):
        out_nD = branches.added(out_nD, "w_down", swiglu.forward(gate, up, **quantiser.options)[0])
    if not saving:
        return out_nD, None
    return out_nD, MlpSaved(total_nD, quantiser.input_transposed(y), gate, up, quantiser.input_transposed(hidden))


def _mlp_backward(config, quantiser: Quantiser, w: dict, saved: MlpSaved, d_out_nD: jax.Array):
    """(gradients of the MLP's weights, gradient of its norm's scale, result of the norm's backward pass).

    The last result has the gradient of x + o and its largest magnitude.
    """
    m = w["mlp"]
    options = quantiser.options
    dtype = d_out_nD.dtype
    d_out, d_outT = quantiser.both_gathered("d_mlp", d_out_nD, E5M2)
    dw = _gradient("w_down", d_outT, saved.hidden_T, dtype)
    branches = Branches(config.lora, m, quantiser.sequences)
    hidden_NF = swiglu.forward(saved.gate_NF, saved.up_NF, **options)[0] if branches.has("w_down") else None
    d_hidden = product(d_out, quantiser.transposed(m["w_down"]), dtype)
    d_adapter, d_hidden = branches.backward("w_down", hidden_NF, d_out_nD, plus=d_hidden)
    dw |= d_adapter
    d = swiglu.backward(d_hidden, saved.gate_NF, saved.up_NF, **options)
    eps = config.rms_norm_eps
    normed_nD = None
    if branches.has_any("w_gate", "w_up"):
        normed_nD = rms_norm.forward(saved.total_nD, w["mlp_norm"], eps=eps, **options).y
    d_input = None
    d_normed = None  # by adapters
    for name, x, top in (("gate", d.d_gate, d.absmax_gate), ("up", d.d_up, d.absmax_up)):
        x8, x8T = quantiser.both(f"d_{name}", x, E5M2, top)
        dw |= _gradient(f"w_{name}", x8T, same(saved.input_T, *TENSOR), dtype)
        d_adapter, d_normed = branches.backward(f"w_{name}", normed_nD, x, plus=d_normed)
        dw |= d_adapter
        d_input = product(x8, quantiser.transposed(m[f"w_{name}"]), dtype, plus=d_input)
    assert d_input is not None
    d_input = quantiser.scattered(d_input)
    d_input = d_input if d_normed is None else d_input + d_normed
    d_total = rms_norm.backward(d_input, saved.total_nD, w["mlp_norm"], d_out_nD, eps=eps, **options)
    return dw, None if quantiser.frozen else add_up(d_total.d_scale, *TENSOR), d_total


def _angles(config, ops: Operations, S: int) -> tuple[jax.Array, jax.Array]:
    """The angles of rope for positions 0 to S - 1, or for positions within the documents of each row."""
    positions = positions_of(S, ops.starts, cp_method=ops.compute.cp_method)
    return rope_angles(config.head_dim, positions, *config.rotary(ops.variant))
