"""A Llama block with all of its linear layers in float8, forward and backward written out.

Written out because what lies between two products is one pass over memory, in both directions: a fused kernel
(`pallas_kernels`) makes the next product's operand, in float8 where its scale is known beforehand, and its largest
magnitude on the way. Reverse mode could not hand those magnitudes, or float8 gradients, from one operation to the next.

    attention:  x -> norm -> q, k, v -> rope -> attention -> output product
    mlp:        x + that -> norm -> gate, up -> swiglu -> down product, + x

Every product exists three times: y = x w^T, dx = dy w, dw = dy^T x, each contracted over the last dimension of both
operands (fp8.py), so x and dy are also made transposed, where they are quantised, and w is transposed for dx.

Weights come as `Quantized` with one scale each (step/weights.py). The residual stream, attention, the norms' scales,
biases and all gradients that leave the block are in the model's dtype, gradients of norms' scales in float32.

Shape suffixes: N tokens (B x S), D hidden size, F intermediate size; T at the end of a name: transposed.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import quantize, rms_norm, rope, swiglu
from surojax.models.operations import Operations, rope_angles
from surojax.numerics.fp8 import E4M3, E5M2, Sites, product, scale_for
from surojax.numerics.quantize import Quantized
from surojax.numerics.recipes import Precision

# The tensors of a block that are quantised, each in one place: operands of products, and gradients of their results.
SITES = Sites(
    inputs=("attention_input", "attention_output", "mlp_input", "mlp_hidden"),
    gradients=("d_q", "d_k", "d_v", "d_attention", "d_gate", "d_up", "d_mlp"),
)
SITE_NAMES = (*SITES.inputs, *SITES.gradients)


class AttentionSaved(NamedTuple):
    """What the first half's backward pass reads."""

    x_ND: jax.Array
    input_T: Quantized
    q: Any  # before qk_norm, None if there is none
    k: Any
    attend_vjp: Any
    output_T: Quantized


class MlpSaved(NamedTuple):
    """What the second half's backward pass reads."""

    total_ND: jax.Array
    input_T: Quantized
    gate_NF: jax.Array
    up_NF: jax.Array
    hidden_T: Quantized


class Quantiser:
    """Makes operands: chooses scales, and notes the largest magnitude of each site.

    scales: float32 [sites] known beforehand (delayed scaling), None to take each tensor's own.
    """

    def __init__(self, precision: Precision, scales: jax.Array | None):
        self.scales, self.observed = scales, {}
        self.options: dict[str, Any] = {"implementation": precision.implementation}

    def known(self, site: str) -> jax.Array | None:
        """The scale of a site, where it is known before the tensor is."""
        return None if self.scales is None else self.scales[SITE_NAMES.index(site)]

    def scale(self, site: str, dtype, absmax: jax.Array) -> jax.Array:
        """The scale of a site whose tensor's largest magnitude is `absmax`."""
        known = self.known(site)
        self.observed[site] = absmax
        return scale_for(absmax, dtype) if known is None else known

    def made(self, site: str, kernel) -> tuple[Quantized, tuple]:
        """(operand of what a kernel makes, its other results): kernel(out_dtype=, out_scale=) -> values, absmax, ..."""
        known = self.known(site)
        if known is not None:
            values, absmax, *others = kernel(out_dtype=E4M3, out_scale=known, **self.options)
            self.observed[site] = absmax
            return Quantized(values, known), tuple(others)
        y, absmax, *others = kernel(**self.options)
        scale = self.scale(site, E4M3, absmax)
        return Quantized(quantize.cast(y, scale, E4M3, **self.options), scale), tuple(others)

    def both(self, site: str, x_Nn: jax.Array, dtype, absmax: jax.Array | None = None) -> tuple[Quantized, Quantized]:
        """(operand, the same transposed) of a tensor in 16 bits; its absmax is measured unless it is given."""
        known = self.known(site)
        if known is None:
            absmax = quantize.absmax(x_Nn, **self.options) if absmax is None else absmax
            known = scale_for(absmax, dtype)
        done = quantize.cast_transpose(x_Nn, known, dtype, **self.options)
        self.observed[site] = done.absmax
        return Quantized(done.values, known), Quantized(done.transposed, known)

    def one(self, site: str, x_Nn: jax.Array) -> Quantized:
        """The operand alone, for a pass without gradients; delayed scaling then notes nothing."""
        known = self.known(site)
        known = scale_for(quantize.absmax(x_Nn, **self.options), E4M3) if known is None else known
        return Quantized(quantize.cast(x_Nn, known, E4M3, **self.options), known)

    def transposed(self, x: Quantized) -> Quantized:
        """A float8 matrix transposed."""
        return Quantized(quantize.transpose(x.values, **self.options), x.scales)

    def vector(self) -> jax.Array:
        """What was observed `[sites]`, 0 for a site that was not seen."""
        return jnp.stack([self.observed.get(site, jnp.float32(0)) for site in SITE_NAMES])


def block(config, ops: Operations, w: dict, x_BSD: jax.Array, scales: jax.Array | None) -> jax.Array:
    """The block of activations `[B, S, D]`; nothing is kept for a backward pass."""
    quantiser = Quantiser(ops.compute.precision, scales)
    x_ND = x_BSD.reshape(-1, x_BSD.shape[-1])
    o_ND, _ = _attention(config, quantiser, ops, w, x_ND, x_BSD.shape[1], saving=False)
    return _mlp(config, quantiser, w, x_ND, o_ND, saving=False)[0].reshape(x_BSD.shape)


def forward(config, ops: Operations, w: dict, x_BSD: jax.Array, scales: jax.Array | None):
    """(the block of x, what `backward` needs of it): arrays in the model's dtype and in float8, scales, magnitudes."""
    quantiser = Quantiser(ops.compute.precision, scales)
    x_ND = x_BSD.reshape(-1, x_BSD.shape[-1])
    o_ND, first = _attention(config, quantiser, ops, w, x_ND, x_BSD.shape[1], saving=True)
    y_ND, second = _mlp(config, quantiser, w, x_ND, o_ND, saving=True)
    return y_ND.reshape(x_BSD.shape), (first, second, quantiser.observed)


def backward(config, ops: Operations, w: dict, saved, dy_BSD: jax.Array, scales: jax.Array | None):
    """(gradients of the weights as w has them, matrices as arrays; that of x; magnitudes observed `[sites]`)."""
    first, second, observed = saved
    quantiser = Quantiser(ops.compute.precision, scales)
    quantiser.observed |= observed
    dy_ND = dy_BSD.reshape(-1, dy_BSD.shape[-1])
    d_mlp, d_mlp_norm, d_total = _mlp_backward(config, quantiser, w, second, dy_ND)
    d_attention, d_attention_norm, dx = _attention_backward(config, quantiser, w, first, d_total, dy_BSD.shape)
    dw = {"attention": d_attention, "attention_norm": d_attention_norm, "mlp": d_mlp, "mlp_norm": d_mlp_norm}
    return dw, dx.dx.reshape(dy_BSD.shape), quantiser.vector()


# --- attention --------------------------------------------------------------------------------------------------------


def _attention(config, quantiser: Quantiser, ops: Operations, w: dict, x_ND: jax.Array, S: int, *, saving: bool):
    """(the output product, not yet added to x; AttentionSaved)."""
    a, options, eps = w["attention"], quantiser.options, config.rms_norm_eps
    norm = lambda **out: rms_norm.forward(x_ND, w["attention_norm"], eps=eps, **out)[:2]
    y, _ = quantiser.made("attention_input", norm)
    heads = lambda y: y.reshape(-1, S, y.shape[-1] // config.head_dim, config.head_dim)
    bias = lambda name: a[name][None, :] if name in a else None
    q, k, v = (heads(product(y, a[f"w{x}"], x_ND.dtype, plus=bias(f"b{x}"))) for x in "qkv")
    normed = lambda x, name: rms_norm.forward(x, a[name], eps=eps, **options).y if config.qk_norm else x
    turned = rope.forward(normed(q, "q_norm"), normed(k, "k_norm"), *_angles(config, S), **options)

    def run(q, k, v):
        return ops.attend(q, k, v)[0]

    if not saving:
        out = quantiser.one("attention_output", run(turned.q, turned.k, v).reshape(x_ND.shape[0], -1))
        return product(out, a["wo"], x_ND.dtype), None
    y_BSHh, attend_vjp = jax.vjp(run, turned.q, turned.k, v)
    out, output_T = quantiser.both("attention_output", y_BSHh.reshape(x_ND.shape[0], -1), E4M3)
    before = (q, k) if config.qk_norm else (None, None)
    saved = AttentionSaved(x_ND, quantiser.transposed(y), *before, attend_vjp, output_T)
    return product(out, a["wo"], x_ND.dtype), saved


def _attention_backward(config, quantiser: Quantiser, w: dict, saved: AttentionSaved, d_total, shape):
    """(gradients of the attention's weights, of its norm's scale, those of x with its largest magnitude)."""
    a, options, eps, dtype = w["attention"], quantiser.options, config.rms_norm_eps, d_total.dx.dtype
    d_o, d_oT = quantiser.both("d_attention", d_total.dx, E5M2, d_total.absmax)
    dw = {"wo": product(d_oT, saved.output_T, dtype)}
    dy = product(d_o, quantiser.transposed(a["wo"]), dtype)
    dq, dk, dv = saved.attend_vjp(dy.reshape(*shape[:2], -1, config.head_dim))
    dq, dk, *absmax = rope.forward(dq, dk, *_angles(config, shape[1]), inverse=True, **options)
    if config.qk_norm:
        dq, dw["q_norm"], absmax[0] = rms_norm.backward(dq, saved.q, a["q_norm"], eps=eps, **options)
        dk, dw["k_norm"], absmax[1] = rms_norm.backward(dk, saved.k, a["k_norm"], eps=eps, **options)
    d_input = None
    for name, d, top in zip("qkv", (dq, dk, dv), (*absmax, None), strict=True):
        d = d.reshape(saved.x_ND.shape[0], -1)
        if f"b{name}" in a:
            dw[f"b{name}"] = jnp.sum(d, axis=0, dtype=jnp.float32)
        d8, d8T = quantiser.both(f"d_{name}", d, E5M2, top)
        dw[f"w{name}"] = product(d8T, saved.input_T, dtype)
        d_input = product(d8, quantiser.transposed(a[f"w{name}"]), dtype, plus=d_input)
    assert d_input is not None
    dx = rms_norm.backward(d_input, saved.x_ND, w["attention_norm"], d_total.dx, eps=eps, **options)
    return dw, dx.d_scale, dx


# --- MLP --------------------------------------------------------------------------------------------------------------


def _mlp(config, quantiser: Quantiser, w: dict, x_ND: jax.Array, o_ND: jax.Array, *, saving: bool):
    """(x + o + the MLP of that, MlpSaved)."""
    m, eps = w["mlp"], config.rms_norm_eps
    norm = lambda **out: rms_norm.forward(x_ND, w["mlp_norm"], o_ND, eps=eps, **out)
    y, (total_ND,) = quantiser.made("mlp_input", norm)
    gate, up = (product(y, m[name], x_ND.dtype) for name in ("w_gate", "w_up"))
    hidden, _ = quantiser.made("mlp_hidden", lambda **out: swiglu.forward(gate, up, **out))
    out_ND = product(hidden, m["w_down"], x_ND.dtype, plus=total_ND)
    if not saving:
        return out_ND, None
    return out_ND, MlpSaved(total_ND, quantiser.transposed(y), gate, up, quantiser.transposed(hidden))


def _mlp_backward(config, quantiser: Quantiser, w: dict, saved: MlpSaved, d_out_ND: jax.Array):
    """(gradients of the MLP's weights, of its norm's scale, those of x + o with their largest magnitude)."""
    m, options, dtype = w["mlp"], quantiser.options, d_out_ND.dtype
    d_out, d_outT = quantiser.both("d_mlp", d_out_ND, E5M2)
    dw = {"w_down": product(d_outT, saved.hidden_T, dtype)}
    d_hidden = product(d_out, quantiser.transposed(m["w_down"]), dtype)
    d = swiglu.backward(d_hidden, saved.gate_NF, saved.up_NF, **options)
    d_input = None
    for name, x, top in (("gate", d.d_gate, d.absmax_gate), ("up", d.d_up, d.absmax_up)):
        x8, x8T = quantiser.both(f"d_{name}", x, E5M2, top)
        dw[f"w_{name}"] = product(x8T, saved.input_T, dtype)
        d_input = product(x8, quantiser.transposed(m[f"w_{name}"]), dtype, plus=d_input)
    assert d_input is not None
    eps = config.rms_norm_eps
    d_total = rms_norm.backward(d_input, saved.total_ND, w["mlp_norm"], d_out_ND, eps=eps, **options)
    return dw, d_total.d_scale, d_total


def _angles(config, S: int) -> tuple[jax.Array, jax.Array]:
    return rope_angles(config.head_dim, jnp.arange(S), config.rope_theta, config.rope_scaling)
