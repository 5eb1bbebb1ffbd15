"""What the kinds of mixers and MLPs declare (models/kinds), and that those who ask get it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small import CONFIG, normal
from test_kernel_dispatch import operations

from surojax import ConfigError, default_config
from surojax.config.checks import check
from surojax.config.fields import kinds
from surojax.models import decoder, decoder_model
from surojax.models.kinds import gated_delta
from surojax.models.kinds.experts import Experts, choices_of
from surojax.models.kinds.gated_delta import GatedDelta
from surojax.models.kinds.gated_mlp import SwiGLU
from surojax.models.kinds.joined_mlp import JoinedMlp
from surojax.models.kinds.latent_attention import LatentAttention
from surojax.models.kinds.mamba2 import Mamba2
from surojax.models.kinds.relu_mlp import ReluMlp
from surojax.models.kinds.self_attention import Attention
from surojax.models.kinds.short_conv import ShortConv
from surojax.models.kinds.sublayer import ContextNumbers, OnGpu, Width
from surojax.models.linear import Product
from surojax.models.model import Cache, Compute, Recompute, Variant
from surojax.models.operations import Operations
from surojax.numerics.fp8 import Sites

EXPERTS = dataclasses.replace(CONFIG, num_experts=4, num_experts_per_tok=2, n_shared_experts=1, scoring_func="sigmoid")
OPTIONS = dataclasses.replace(CONFIG, attention_bias=True, qk_norm=True, attn_output_gate=True)
DELTA = dataclasses.replace(
    CONFIG,
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=4,
    linear_value_head_dim=3,
)
MAMBA = dataclasses.replace(
    CONFIG, mamba_n_heads=6, mamba_d_head=3, mamba_d_state=4, mamba_n_groups=2, mamba_d_conv=3, mamba_dt_min=0.01
)
LATENT = dataclasses.replace(
    CONFIG,
    q_lora_rank=12,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=6,
)


@pytest.mark.parametrize(
    "parts, shared, gpus, is_divided, part",
    [(4, False, 2, True, 16), (4, False, 8, False, 8), (2, True, 8, True, 16), (6, True, 4, False, 5)],
)
def test_a_width_is_divided_by_its_parts_or_shared(parts, shared, gpus, is_divided, part):
    """Of six shared parts, four GPUs neither have a whole number each nor the same one several times."""
    width = Width("a x b", 32 if parts != 6 else 30, "a", parts, shared)
    assert width.is_divided(gpus) == is_divided
    assert width.part(gpus).size == part


def test_gpus_may_compute_the_same_part_whatever_the_mesh_says():
    assert Width("a x b", 32, "a", 2, copied=True).is_divided(8) and not Width("a x b", 32, "a", 2).is_divided(8)


@pytest.mark.parametrize("experts, chosen", [(49, 1), (49, 47), (7, 3), (128, 8)])
def test_how_many_experts_a_token_has(experts, chosen):
    """It is read from the fraction of tokens that a matrix multiplies, of which 1/49 times 49 is less than 1."""
    config = dataclasses.replace(CONFIG, num_experts=experts, num_experts_per_tok=chosen, moe_intermediate_size=8)
    assert choices_of(decoder_model.build(config).segments[0]) == (experts, chosen)


def test_pieces_that_cudnn_takes():
    """Heads of at most 128 channels, an even number of tokens on each of twice as many pieces as GPUs."""
    c = default_config()
    c.update({"cp_size": 2, "cp_method": "ring", "attention": "cudnn", "sequence_len": 24})
    Attention(dataclasses.replace(CONFIG, head_dim=128)).check_context(c)
    with pytest.raises(ConfigError, match=r"^model.head_dim: expected at most 128 with cp_method='ring'"):
        Attention(dataclasses.replace(CONFIG, head_dim=136)).check_context(c)
    c.sequence_len = 20
    with pytest.raises(ConfigError, match=r"^sequence_len / \(2 x cp_size\): expected an even number .*, got 5; use"):
        Attention(dataclasses.replace(CONFIG, head_dim=128)).check_context(c)


def test_ulysses_divides_heads_once_more():
    """Four query heads and two of keys: what each GPU of tp has is divided over cp, keys may be shared."""
    (layer,) = decoder.declarations(CONFIG).values()
    assert [layer.mixer.exchanges_heads(tp, cp) for tp, cp in ((1, 2), (1, 4), (2, 2), (4, 1), (2, 4))] == [
        *(True, True, True, True, False)
    ]
    three = Attention(dataclasses.replace(CONFIG, num_attention_heads=12, num_key_value_heads=3))
    assert three.exchanges_heads(1, 6) and not three.exchanges_heads(1, 2)


def test_float8_has_the_sites_of_the_products_in_their_order():
    """Checkpoints have histories in this order."""
    sites = Sites(
        ("attention_input", "attention_output", "mlp_input", "mlp_hidden"),
        ("d_q", "d_k", "d_v", "d_attention", "d_gate", "d_up", "d_mlp"),
    )
    assert decoder_model.build(CONFIG).sites == sites
    dense_first = dataclasses.replace(EXPERTS, first_k_dense_replace=1)
    assert decoder_model.build(dense_first).sites == sites


JOINED = dataclasses.replace(EXPERTS, n_shared_experts=0, moe_shared_intermediate_size=20, mlp_joined=True)
RELU = dataclasses.replace(JOINED, mlp_joined=False, hidden_act="relu2", one_purpose=True)
GATED = dataclasses.replace(EXPERTS, n_shared_experts=0, shared_expert_intermediate_size=20)
GATE_OF_ITS_OWN = dataclasses.replace(OPTIONS, attn_output_gate=False, attn_gate_proj=True)
FUSED = dataclasses.replace(DELTA, linear_fused_projections=True)


def shapes_of(kind, config) -> dict[str, tuple[int, ...]]:
    module = nnx.eval_shape(lambda: kind(config, rngs=nnx.Rngs(0)))
    leaves = jax.tree_util.tree_flatten_with_path(nnx.to_pure_dict(nnx.state(module, nnx.Param)))[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): x.shape for path, x in leaves}


def products_of(kind, config) -> list[Product]:
    module = nnx.eval_shape(lambda: kind(config, rngs=nnx.Rngs(0)))
    declared = nnx.to_pure_dict(nnx.state(module, nnx.Param), extract_fn=lambda x: x.get_metadata("product"))
    return jax.tree.leaves(declared)


@pytest.mark.parametrize(
    "kind, configs",
    [
        (Attention, [OPTIONS, GATE_OF_ITS_OWN]),
        (SwiGLU, [CONFIG]),
        (JoinedMlp, [JOINED]),
        (ReluMlp, [RELU]),
        (Experts, [EXPERTS, GATED, JOINED]),
        (GatedDelta, [DELTA, FUSED]),
        (Mamba2, [MAMBA]),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_every_parameter_has_names_in_files(kind, configs):
    assert {name for config in configs for name in shapes_of(kind, config)} == kind.tensors.keys()


@pytest.mark.parametrize(
    "kind, config",
    [
        *(
            (Attention, OPTIONS),
            (LatentAttention, LATENT),
            (LatentAttention, dataclasses.replace(LATENT, q_lora_rank=0)),
        ),
        *((GatedDelta, DELTA), (GatedDelta, FUSED), (ShortConv, CONFIG), (Mamba2, MAMBA)),
    ],
)
def test_no_two_products_of_a_block_share_random_numbers_or_a_site(kind, config):
    """A mixer's with each other and with those of the experts behind it, which have the same as a shared one's."""
    products = [*products_of(kind, config), *dict.fromkeys(products_of(Experts, GATED))]
    assert len({product.number for product in products}) == len(products)
    gradients = [product.gradient for product in products if product.gradient]
    assert len(set(gradients)) == len(gradients)


@pytest.mark.parametrize(
    "kind, config",
    [
        (Attention, OPTIONS),
        (SwiGLU, CONFIG),
        (Experts, EXPERTS),
        (Experts, GATED),
        (Experts, JOINED),
        (JoinedMlp, JOINED),
        (ReluMlp, RELU),
        (GatedDelta, DELTA),
        (GatedDelta, FUSED),
        (Mamba2, MAMBA),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_every_matrix_may_have_an_adapter(kind, config):
    shapes = shapes_of(kind, config)
    targets = kind(config).targets()
    matrices = {name for name, shape in shapes.items() if len(shape) > 1 and name not in ("router", "taps")}
    assert {target.matrix for target in targets} == {f"{kind.name}.{name}" for name in matrices}
    for target in targets:
        shape = shapes[target.matrix.removeprefix(f"{kind.name}.")]
        assert sorted(shape[-2:]) == sorted((config.hidden_size, target.width))
        assert target.of_experts == (len(shape) > 2)


@pytest.mark.parametrize(
    "config",
    [
        OPTIONS,
        dataclasses.replace(LATENT, layer_types="latent_attention"),
        dataclasses.replace(DELTA, layer_types="linear_attention"),
        dataclasses.replace(MAMBA, layer_types="mamba2"),
        dataclasses.replace(CONFIG, layer_types="conv"),
        EXPERTS,
        GATED,
        pytest.param(JOINED, marks=pytest.mark.full),
        pytest.param(dataclasses.replace(RELU, layer_types="experts"), marks=pytest.mark.full),
        dataclasses.replace(CONFIG, hidden_act="relu2", one_purpose=True, layer_types="mlp"),
    ],
    ids=["attention", "latent", "delta", "mamba", "conv", "experts", "gated", "joined", "no gate", "one MLP"],
)
def test_products_in_16_bits_have_operands_of_one_type(config):
    """Forward and backward; JAX multiplies in float32 if one operand is, in silence and at half the speed.

    Routers are in float32, and products of attention that have a precision of their own say so.
    """
    segment = decoder_model.build(config).segments[0]
    w = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype or jnp.bfloat16), segment.params)
    x = jax.ShapeDtypeStruct((2, 16, config.hidden_size), jnp.bfloat16)

    def both(w, x):
        (y, _), saved = segment.block_forward(w, x, None, segment.variants[0])
        return y, segment.block_backward(w, saved, (y, None), None, segment.variants[0])[:2]

    program = jax.make_jaxpr(both)(w, x)
    products = [x for x, _ in operations(program.jaxpr) if x.primitive.name in ("dot_general", "ragged_dot_general")]
    assert len(products) >= 6
    for product in products:
        left, right = (operand.aval.dtype for operand in product.invars[:2])
        shapes = {x.aval.shape for x in (*product.invars, *product.outvars)}
        of_a_router = not shapes.isdisjoint({(config.num_experts, config.hidden_size), (1, config.hidden_size)})
        assert left == right or of_a_router or product.params["precision"] is not None, product
    assert program.out_avals[0].dtype == jnp.bfloat16


def expert_config(**changes):
    c = default_config()
    c.gpus, c.tp_size = 2, 2
    c.model.update({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64} | changes)
    return c


def test_tp_divides_the_widths_that_layers_have():
    """A width that no layer has is not refused: with experts in all layers, intermediate_size."""
    check(expert_config(intermediate_size=81))
    for changes, field in (
        ({"moe_intermediate_size": 81}, "model.moe_intermediate_size"),
        ({"intermediate_size": 81, "first_k_dense_replace": 1}, "model.intermediate_size"),
    ):
        with pytest.raises(ConfigError, match=rf"^{field}: expected a multiple of tp_size=2, whose .*, got 81; lower"):
            check(expert_config(**changes))


def test_a_config_with_other_sizes_has_other_kinds():
    """They are cached by the `model` fields."""
    c = expert_config()
    before = kinds(c)["blocks"].mlp
    c.model.moe_intermediate_size = 128
    assert before.widths()[0].size == 64 and kinds(c)["blocks"].mlp.widths()[0].size == 128


def test_a_state_that_does_not_grow_is_declared_so():
    conv = ShortConv(CONFIG)
    assert conv.decode_state(2, 10, "float32").shape == conv.decode_state(2, 10_000, "float32").shape == (2, 2, 32)
    delta = GatedDelta(DELTA)
    state, inputs = delta.decode_state(2, 10, "bfloat16")
    assert (state.shape, state.dtype) == ((2, 2, 3, 4, 3), "float32")
    assert (inputs.shape, inputs.dtype) == ((2, 3, 2 * 8 + 18), "bfloat16")
    assert delta.decode_state(2, 10_000, "bfloat16") == (state, inputs)
    state, inputs = Mamba2(MAMBA).decode_state(2, 10_000, "bfloat16")
    assert (state.shape, state.dtype, inputs.shape) == ((2, 2, 3, 4, 3), "float32", (2, 2, 18 + 2 * 8))


def test_chunks_and_devices_hand_on_what_a_kind_declares():
    """Keys and values of all tokens, or a state for each chunk but the last; pieces send a halo, and maps of states."""
    x = OnGpu(rows=3, tokens=8, dtype="bfloat16", tensor=1, per_sequence=1, chunks=4)
    attention, conv, delta = Attention(CONFIG), ShortConv(CONFIG), GatedDelta(DELTA)
    assert attention.bytes_between_chunks(x) == 2 * 3 * 32 * 2 * (2 * 8)
    assert conv.bytes_between_chunks(x) == 3 * 3 * 2 * 32 * 2
    state, inputs = 2 * 3 * 4 * 3 * 4, 3 * (2 * 8 + 18) * 2
    assert delta.bytes_between_chunks(x) == 3 * 3 * (state + inputs)
    assert delta.bytes_between_chunks(x._replace(tensor=2)) == 3 * 3 * (state + inputs) // 2
    assert conv.context_numbers(2, 4) == ContextNumbers(halo=2 * 16)
    assert delta.context_numbers(2, 4) == ContextNumbers(halo=3 * 17, maps=3 * 4 * (4 + 3))
    mamba = Mamba2(MAMBA)
    assert mamba.context_numbers(2, 4) == ContextNumbers(halo=2 * 17, maps=3 * 4 * (1 + 3))
    assert [kind.appends for kind in (attention, conv, delta, mamba)] == [True, False, False, False]


WIDE = dataclasses.replace(CONFIG, head_dim=64)  # 4 heads of queries, 2 of keys
WIDE_LATENT = dataclasses.replace(LATENT, qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=64)
OURS = (64 + 3 * 128) / (2.5 * 128)  # FLOPs of our backward kernels, which compute scores twice, beside five products
SAVED_BY_FLASH = 3 * 64 * 4 * (64 * 2 + 4)  # results in 16 bits, and a float32 sum, of 192 tokens with 4 heads


@pytest.mark.parametrize(
    "kind, how, x, options, saved, working, scores, repeated",
    [
        # Scores in float32: two arrays of them on a GPU, four on a processor, of a chunk's queries and all keys.
        (Attention(WIDE), {"attention": "xla"}, (64, 1, 1, 2), {}, 0, 2 * 768 * 128 * 4, 2 * 768 * 128 * 4, 1),
        (Attention(WIDE), {}, (64, 1, 1, 2), {"gpu": False}, 0, 4 * 768 * 128 * 4, 4 * 768 * 128 * 4, 1),
        (Attention(WIDE), {"attention": "xla"}, (64, 2, 8, 1), {}, 0, 2 * 768 * 512 * 4, 2 * 768 * 512 * 4, 1),
        # Of four pairs of pieces, each half of a GPU's tokens.
        (Attention(WIDE), {"attention": "xla", "cp_method": "ring"}, (64, 2, 8, 1), {}, 0, *[2 * 768 * 256 * 4] * 2, 1),
        # cuDNN saves its results; ours reads transposed copies of queries, keys and the gradient.
        (Attention(WIDE), {}, (64, 1, 1, 1), {}, SAVED_BY_FLASH, 0, 0, 1),
        (Attention(WIDE), {"recompute": Recompute(att=True)}, (64, 1, 1, 1), {}, 0, 0, 0, 1),
        (Attention(WIDE), {}, (64, 1, 1, 1), {"packed": True}, SAVED_BY_FLASH, 192 * (8 + 2) * 64 * 2, 0, OURS),
        (Attention(WIDE), {}, (64, 4, 8, 1), {"packed": True}, SAVED_BY_FLASH, 192 * (8 + 4) * 64 * 2, 0, OURS),
        (Attention(WIDE), {}, (64, 4, 8, 2), {"packed": True}, SAVED_BY_FLASH, 192 * (8 + 16) * 64 * 2, 0, OURS),
        # Pairs of pieces: float32 sums of results and gradients, and a block of keys and values. Ours takes pieces of
        # 64 tokens.
        (Attention(WIDE), {"cp_method": "ring"}, (64, 4, 8, 1), {}, 0, 192 * (2 * 4 * 4 + 4 * 4 * 6) * 64, 0, 1),
        (
            Attention(WIDE),
            {"cp_method": "ring"},
            (64, 2, 4, 1),
            {"packed": True},
            0,
            192 * (2 * 4 * 4 + 4 * 2 * 6 + 2 * (4 + 2) * 6) * 64,
            0,
            OURS,
        ),
        (Attention(WIDE), {"cp_method": "ring"}, (32, 2, 4, 1), {"packed": True}, 0, *[2 * 384 * 128 * 4] * 2, 1),
        # Latents: expanded keys of 128 channels and values of 64 of all tokens, and their gradients.
        (LatentAttention(WIDE_LATENT), {}, (64, 1, 1, 2), {"gpu": False}, 0, 1179648 + 1572864, 4 * 768 * 128 * 4, 1),
        (LatentAttention(WIDE_LATENT), {"attention": "xla"}, (64, 2, 4, 1), {}, 0, 589824 + 1572864, 1572864, 1),
        (LatentAttention(WIDE_LATENT), {}, (64, 1, 1, 2), {}, 0, 1179648 + 768 * (256 + 4 + 640), 0, 704 / 480),
        (LatentAttention(WIDE_LATENT), {"attention": "cudnn"}, (64, 1, 1, 2), {}, 0, 1179648 + 768 * (256 + 4), 0, 1),
    ],
)
def test_memory_of_attention_by_hand(kind, how, x, options, saved, working, scores, repeated):
    """Three rows in bfloat16. x: tokens, GPUs of a tensor-parallel group and of a sequence, chunks."""
    where = OnGpu(3, x[0], "bfloat16", *x[1:])
    space = kind.space(Compute(**how), where, **{"gpu": True, "packed": False, "window": False} | options)
    assert space[:3] == (saved, working, scores)
    assert space.repeated == pytest.approx((1, repeated))


@pytest.mark.parametrize(
    "kind, of_decoding, flops, in_window",
    [
        (Attention(CONFIG), 4 * 3 * 10 * 8, 4 * 4 * 8 * 50, 4 * 4 * 8 * (1 + 2 + 3 + 4 + 5 + 6 + 94 * 7) / 100),
        (LatentAttention(LATENT), 4 * (3 * 10 * 8 + 4 * 10 * (12 + 14)), 4 * (12 + 6) * 100, None),
        (ShortConv(CONFIG), 0, 2 * 3 * 32, None),
        # Pairs of a token with those of its chunk of 128, beside a state.
        (Mamba2(MAMBA), 3 * 4 * (128 + 4 + 3) * 6 * 3, 6 * (2 * 128 * 3 + 4 * 4 * 3) + 2 * 2 * 128 * 4, None),
        (
            GatedDelta(DELTA),
            6 * 4 * (128 + 4 + 3) * 6 * 3,
            6 * (4 * 128 * 7 + 2 * 4 * 7 + 2 * 4 * 3 + 2 * 4 * 4 * 3 / 128 + 128 * 128) + 2 * 4 * 128 * 4,
            None,
        ),
    ],
    ids=lambda x: type(x).__name__,
)
def test_work_of_a_mixer_by_hand(kind, of_decoding, flops, in_window):
    """Sampling of three new positions of 10; FLOPs per token of sequences of 100, with a window of 7 and without."""
    assert kind.decode_bytes(3, 10) == of_decoding
    assert kind.flops(100, 0) == kind.flops(100, 100) == flops
    assert kind.flops(100, 7) == pytest.approx(flops if in_window is None else in_window)


@pytest.mark.parametrize("tokens, again", [(2048, 0), (4096, 1)])
@pytest.mark.parametrize("cp_method, pieces", [("ulysses", 1), ("ring", 2)])
def test_memory_of_a_recurrence_by_hand(tokens, again, cp_method, pieces):
    """Two rows, whose pieces compute groups of 2,048 tokens; over `cp` the float32 maps of all pieces are known."""
    x = OnGpu(2, tokens, "float32", 1, 1, 1)
    over_cp = x._replace(tokens=tokens * pieces // 2, tensor=2, per_sequence=8)  # 4 GPUs of cp, with half of the heads
    compute = Compute(cp_method=cp_method)
    how = {"gpu": True, "packed": False, "window": False}
    for kind, times, of_map, moved in (
        (Mamba2(MAMBA), 3, 4 * (1 + 3), (6, 19)),
        (GatedDelta(DELTA), 6, 4 * (4 + 3), (20, 51)),
    ):
        token = 4 * (128 + 4 + 3)
        alone = kind.space(compute, x, **how)
        assert alone.working == 2 * times * token * 6 * 2048
        size = 2 * tokens * 6 * token
        assert alone.moved == (moved[0] * size, moved[0] * size * again, moved[1] * size)
        divided = kind.space(compute, over_cp, **how)
        assert divided.working == 2 * pieces * (times * token * 3 * 2048 + 4 * 4 * 3 * of_map)
        assert divided.moved[0] == moved[0] * 2 * pieces * tokens * 3 * token


@pytest.mark.parametrize("kind, config", [(LatentAttention, LATENT), (Mamba2, MAMBA)], ids=["latent", "mamba2"])
def test_a_mixer_goes_on_from_its_cache(kind, config):
    """Four tokens, of which latents are expanded, and then one more, to which they are one head of all queries."""
    mixer = kind(config, rngs=nnx.Rngs(0))
    graph, params = nnx.split(mixer)
    params = jax.tree.map(lambda w: w + 0.3 * normal(w.size, w.shape), params)
    x, ops = normal(1, (2, 5, 32)), Operations(Compute(attention="xla"), Variant())

    @functools.partial(jax.jit, static_argnums=2)
    def computed(x, state, start):
        cache = None if state is None else Cache(state, start)
        y, after = nnx.merge(graph, params)(x, ops, None, cache)
        return y, None if after is None else after.state

    whole, _ = computed(x, None, 0)
    state = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), mixer.decode_state(2, 5, jnp.float32))
    first, state = computed(x[:, :4], state, 0)
    last, _ = computed(x[:, 4:], state, 4)
    np.testing.assert_allclose(jnp.concatenate([first, last], axis=1), whole, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize(
    "number, own", [(0, [0, 1, 8, 9]), (1, [2, 3, 8, 9]), (2, [4, 5, 10, 11]), (3, [6, 7, 10, 11])]
)
def test_gpus_that_are_more_than_groups_have_the_same_channels(monkeypatch, number, own):
    """Four GPUs, eight groups of one part and two of the next."""
    monkeypatch.setattr(gated_delta, "device_number", lambda *axis: (number, 4))
    channels = gated_delta.own_channels(jnp.arange(12), [8, 4], 0, [8, 2])
    assert channels.tolist() == own
