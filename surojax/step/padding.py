"""Padding: entries at the end of a segment's stacks that are no layers, in the last of several stages.

A stack of layers is divided evenly over the stages of `pp`, so it has as many entries as all stages have room for
(parallel/schedule.py). Entries beyond the last layer hold zeros, in weights, master weights and moments. The last stage
computes their blocks too, in the time in which the other stages compute a layer, and for each of them keeps x and its
gradient as they were; their routers count nothing. Their own gradients are zeros, because the block is given zeros to
differentiate, so neither the norm of all gradients nor an update sees them, and zeros they remain.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from surojax.models.model import RecipeInputs, Segment


def padded(segment: Segment) -> Segment:
    """Returns the segment with blocks that change nothing where `RecipeInputs.computes` is False."""

    def kept_if(computes, new, old):
        return jax.tree.map(lambda new, old: jnp.where(computes, new, old), new, old)

    def block(w, x_BSD, inputs: RecipeInputs, variant, starts=None, *routing):
        y_BSD, routed = segment.block(w, x_BSD, inputs, variant, starts, *routing)
        return kept_if(inputs.computes, y_BSD, x_BSD), routed

    def block_forward(w, x_BSD, inputs: RecipeInputs, variant, starts=None, *routing):
        (y_BSD, routed), saved = segment.block_forward(w, x_BSD, inputs, variant, starts, *routing)
        if routed is not None:
            nothing = jax.tree.map(jnp.zeros_like, routed.statistics)
            routed = routed._replace(statistics=kept_if(inputs.computes, routed.statistics, nothing))
        return (kept_if(inputs.computes, y_BSD, x_BSD), routed), saved

    def block_backward(w, saved, d_result, inputs: RecipeInputs, variant, starts=None, *routing):
        dy_BSD, _ = d_result
        d_outputs = kept_if(inputs.computes, d_result, jax.tree.map(jnp.zeros_like, d_result))
        dw, dx_BSD, observed = segment.block_backward(w, saved, d_outputs, inputs, variant, starts, *routing)
        return dw, kept_if(inputs.computes, dx_BSD, dy_BSD), observed

    return dataclasses.replace(segment, block=block, block_forward=block_forward, block_backward=block_backward)


def zeros_beyond(segment: Segment, l: jax.Array, layer):
    """Returns a layer's arrays, or zeros if the segment has no layer l."""
    return jax.tree.map(lambda x: jnp.where(l < segment.num_layers, x, jnp.zeros_like(x)), layer)


def zeros(params: dict) -> dict:
    """The initial values of these `Param`s in an entry that is no layer, as numpy arrays."""
    return jax.tree.map(lambda param: np.zeros(param.shape, np.float32), params)
