"""Mistakes in Mamba2, latent attention and Gemma 4's layers, which logits of transformers notice."""

import pytest
from test_deepseek import check_logits
from test_qwen3_5 import in_float64, remade  # noqa: F401

from surojax.models import decoder
from surojax.models.kinds import latent_attention, layer_input, mamba2, self_attention, shared_attention

MISTAKES = {  # (module, its text, another, a model with it)
    "the norm before the gate": (
        mamba2,
        "squares = mean_of_group(jnp.mean(total * total,",
        "plain = total / jax.nn.silu(z); squares = mean_of_group(jnp.mean(plain * plain,",
        "nemotron_dense",
    ),
    "a norm of all groups": (mamba2, "total * total, axis=-1", "total * total, axis=(-2, -1)", "nemotron_dense"),
    "no bias of the convolution": (mamba2, "before, starts, bias_C)", "before, starts, 0 * bias_C)", "nemotron_dense"),
    "no D": (mamba2, "(out + D.reshape(1, 1, G, r, 1) * x)", "out", "nemotron_dense"),
    "no least time step": (mamba2, "None, None]), least)", "None, None]), 0)", "granite4_tied"),
    "no most time step": (mamba2, "jnp.minimum(dt, most) if most else dt", "dt", "granite4_tied"),
    "the decay of an unlimited time step": (
        mamba2,
        "-jnp.exp(A_log)[None, None] * dt, dt",
        "-jnp.exp(A_log)[None, None] * jax.nn.softplus(d + dt_bias[None, None]), dt",
        "granite4_tied",
    ),
    "no mscale": (latent_attention, " * self.config.rope_scaling.score_factor", "", "glm_groups"),
    "the model's eps in the norm of a latent": (
        latent_attention,
        "self.kv_norm[...], EPS",
        "self.kv_norm[...], c.rms_norm_eps",
        "v3_tied",
    ),
    "halves that rotate": (latent_attention, "if c.rope_interleave:", "if not c.rope_interleave:", "v3_tied"),
    "values before keys": (
        latent_attention,
        "kv_BTHx[..., :n], k_BTHr], axis=-1), kv_BTHx[..., n:]",
        "kv_BTHx[..., -n:], k_BTHr], axis=-1), kv_BTHx[..., :-n]",
        "v3_tied",
    ),
    "no norm of values": (self_attention, "if c.v_norm_weightless:", "if False:", "gemma4_full"),
    "values of normed keys": (self_attention, "v = ops.norm(v, ", "v = ops.norm(k, ", "gemma4_full"),
    "no factor of a layer": (decoder, "if not c.layer_scalar:", "if True:", "gemma4_full"),
    "shared keys as values": (
        shared_attention,
        "names_of_keys(self.kept_as))",
        "names_of_keys(self.kept_as)[::-1])",
        "gemma4_e_shared",
    ),
    "a layer's input not halved": (layer_input, "jnp.asarray(2**-0.5, ", "jnp.asarray(1, ", "gemma4_e_shared"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed(in_float64, monkeypatch, mistake):  # noqa: F811
    *texts, case = MISTAKES[mistake]
    remade(monkeypatch, *texts)
    with pytest.raises(AssertionError, match="logits"):
        check_logits(case)


def test_the_source_as_it_is_makes_no_mistake(in_float64, monkeypatch):  # noqa: F811
    for module, old, _, _ in MISTAKES.values():
        remade(monkeypatch, module, old, old)
    for case in dict.fromkeys(case for *_, case in MISTAKES.values()):
        check_logits(case)
