"""Models as the engine sees them: sliding windows of the Llama family, and a toy of several kinds of layers."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small import (
    CONFIG,
    Small,
    drawn_params,
    needs,
    normal,
    plain_loss,
    quick_at,
    tokens,
    vectors_drawn,
    worst_relative,
)
from test_engine import ORDER_OF_SUMS, engine_gradients

from surojax.assembly.from_config import from_config
from surojax.config.checks import check
from surojax.config.fields import default_config
from surojax.errors import ConfigError
from surojax.inference.forward import cached_logits, empty_cache
from surojax.memory.host import Split
from surojax.models import decoder, decoder_config, decoder_model, rotary
from surojax.models.attention import attend, softmax, visible
from surojax.models.decoder import Decoder
from surojax.models.kinds import sublayer
from surojax.models.layers import parameter
from surojax.models.linear import Product, linear
from surojax.models.lora import Lora
from surojax.models.loss import cross_entropy
from surojax.models.model import (
    DEFAULT,
    PLAIN,
    ROUTES,
    Compute,
    Model,
    Routed,
    Routing,
    Segment,
    Variant,
    collect_params,
)
from surojax.models.operations import Operations
from surojax.models.recompute import with_arguments
from surojax.models.rotary import RopeScaling, scale_by_position
from surojax.numerics.fp8 import E4M3, Sites
from surojax.numerics.recipes import Precision
from surojax.parallel.collectives import varying
from surojax.placement.mesh import abstract_mesh
from surojax.placement.param import OUTER, Kind
from surojax.planner import products
from surojax.run.checkpoint import Checkpoints
from surojax.run.restore import restore
from surojax.step.weights import quantise_with_one_scale
from surojax.verification.settings import NVME_ALL

# --- sliding windows --------------------------------------------------------------------------------------------------

MISTRAL = dataclasses.replace(CONFIG, sliding_window=4)
GEMMA = dataclasses.replace(CONFIG, num_hidden_layers=7, sliding_window=4, sliding_window_pattern=3)
WINDOWS = [MISTRAL, GEMMA]
ALL = dict.fromkeys(
    ("offload_weights", "offload_master", "offload_optimizer", "offload_grads", "offload_residual"), True
)


def test_the_pattern_says_which_layers_have_the_window():
    windows = lambda config: [variant.window for variant in config.variants(Precision())]
    assert windows(CONFIG) == [0] * 3 and windows(MISTRAL) == [4] * 3
    assert windows(GEMMA) == [4, 4, 0, 4, 4, 0, 4]  # transformers' sliding_window_pattern: layer i unless (i + 1) % 3


def test_a_window_hides_what_is_older():
    """Against softmax over a mask written out position by position."""
    q, k, v = (normal(i, (2, 9, heads, 8)) for i, heads in enumerate((4, 2, 2)))
    seen = np.array([[j <= i and j > i - 4 for j in range(9)] for i in range(9)])

    @jax.jit
    def formula(q, k, v):
        scores = jnp.einsum("bshc,bthc->bhst", q, jnp.repeat(k, 2, axis=2)) / np.sqrt(8)
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
        return jnp.einsum("bhst,bthc->bshc", weights, jnp.repeat(v, 2, axis=2))

    expected = np.asarray(formula(q, k, v))
    whole = jax.jit(lambda q, k, v: attend(q, k, v, window=4))
    part = jax.jit(lambda q, k, v: attend(q[:, 5:7], k, v, start=5, window=4))
    np.testing.assert_allclose(whole(q, k, v), expected, atol=1e-6)
    np.testing.assert_allclose(part(q, k, v), expected[:, 5:7], atol=1e-6)
    np.testing.assert_array_equal(visible(5, 2, 9, 4), seen[5:7])
    np.testing.assert_array_equal(visible(5, 2, 9, 0), np.tri(9, dtype=bool)[5:7])


@pytest.mark.full(after=1)
@pytest.mark.parametrize("start", [None, 5])
def test_attention_scores_are_scaled_and_capped(start):
    """Against softmax over scores written out position by position, and its gradients."""
    q, k, v = (normal(i, (2, 9, heads, 8)) for i, heads in enumerate((4, 2, 2)))
    seen = np.array([[j <= i and j > i - 4 for j in range(9)] for i in range(9)])
    rows = slice(None) if start is None else slice(start, start + 2)

    def formula(q, k, v):
        scores = 0.7 * jnp.einsum("bshc,bthc->bhst", q, jnp.repeat(k, 2, axis=2))
        scores = 1.5 * jnp.tanh(scores / 1.5)
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
        return jnp.einsum("bhst,bthc->bshc", weights, jnp.repeat(v, 2, axis=2))[:, rows]

    def ours(q, k, v, **how):
        return attend(q[:, rows], k, v, start=start, window=4, scale=0.7, softcap=1.5, **how)

    expected = jax.jit(formula)(q, k, v)
    np.testing.assert_allclose(jax.jit(ours)(q, k, v), expected, atol=1e-6)
    weight = normal(3, expected.shape)
    weighted = [lambda *x, f=f: jnp.sum(weight * f(*x)) for f in (ours, formula)]
    gradients = [jax.jit(jax.grad(f, argnums=(0, 1, 2)))(q, k, v) for f in weighted]
    for found, gradient in zip(*gradients, strict=True):
        np.testing.assert_allclose(found, gradient, atol=2e-6)
    with pytest.raises(NotImplementedError, match=r"^cudnn attention: expected bfloat16 or float16, got float32; use"):
        ours(q, k, v, implementation="cudnn")
    with pytest.raises(ValueError, match=r"^attention implementation: expected one of .*, got 'flash'"):
        ours(q, k, v, implementation="flash")
    half = (x.astype(jnp.bfloat16) for x in (q, k, v))
    with pytest.raises(NotImplementedError, match=r"^cudnn attention: expected no softcap, got 1\.5"):
        ours(*half, implementation="cudnn")


def test_a_softmax_divides_sums_only():
    """Of two arrays divided by the same sums XLA divides one and multiplies the other, which is which differs."""

    def with_gradient(x):
        y, vjp = jax.vjp(softmax, x)
        return y, vjp(y)[0]

    x = normal(0, (2, 4, 9, 9))
    divided = re.findall(r"stablehlo\.divide.* : tensor<(\w+)xf32>", jax.jit(with_gradient).lower(x).as_text())
    assert set(divided) == {"2x4x9x1"}


@pytest.mark.parametrize("config", quick_at([(config,) for config in WINDOWS]), ids=["mistral", "gemma"])
def test_training_sees_the_window(config):
    """The loss does not change with a token that all windows have left behind, as it does in a model without."""
    params = drawn_params(dataclasses.replace(config, sliding_window_pattern=0), 0)
    reach = config.num_hidden_layers * 3  # a layer sees 3 positions back

    def last_logits(config, first: int):
        graph = nnx.graphdef(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
        ids = np.arange(reach + 2) % 64
        ids[0] = first
        return jax.jit(lambda ids: nnx.merge(graph, params)(ids[None])[0, -1])(ids)

    everywhere = dataclasses.replace(config, sliding_window_pattern=0)
    np.testing.assert_array_equal(last_logits(everywhere, 0), last_logits(everywhere, 1))
    without = dataclasses.replace(config, sliding_window=0, sliding_window_pattern=0)
    assert not np.array_equal(last_logits(without, 0), last_logits(without, 1))
    if config.sliding_window_pattern:
        assert not np.array_equal(last_logits(config, 0), last_logits(config, 1))


@pytest.mark.full
def test_windows_in_float8():
    """Losses of three steps are to the bit those of another placement, whose loops have other layers in one body."""
    wide = dataclasses.replace(
        GEMMA, num_hidden_layers=5, sliding_window_pattern=2, hidden_size=64, intermediate_size=160, head_dim=16
    )
    compute = Compute(precision=Precision(recipe="fp8_hybrid", skip_first=1))
    batches = [tokens(2, 4, 16, seed=i) for i in range(3)]

    def losses(**placed):
        return Small(config=wide, compute=compute, model_dtype="bfloat16", **placed).train(batches)

    assert losses(**ALL, resident_layers=2) == losses()


def test_flops_of_attention_count_the_positions_that_are_seen():
    """Two FLOPs for each channel of a query head, in each of two products. Without a window half of the square, as
    PaLM's appendix B counts, which leaves out half of the diagonal; with one, all positions on average."""
    for config, S in ((CONFIG, 32), (MISTRAL, 32), (GEMMA, 64), (MISTRAL, 3)):
        (segment,) = decoder_model.build(config).segments
        seen = [
            sum(min(i + 1, v.window) for i in range(S)) / S if 0 < v.window < S else S / 2 for v in segment.variants
        ]
        assert segment.mixing_flops(S) == pytest.approx(4 * 4 * 8 * sum(seen), rel=1e-9)


def test_flops_per_token_of_llama_2_7b():
    c = default_config()
    c.model.update(dict(hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32))
    c.model.num_key_value_heads = 32
    params = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008) + 32000 * 4096  # without norms and the embedding
    assert params == pytest.approx(6.6e9, rel=2e-3)
    run = from_config(c, abstract_mesh(1), total_steps=1)
    flops = sum(products.token_flops(run, 4096).values())
    assert flops == 6 * params + 6 * 32 * 4096 * 4096  # 39.6 + 3.2 GFLOP
    assert flops == pytest.approx(42.86e9, rel=1e-3)


@pytest.mark.parametrize(
    "window, pattern, message",
    [
        (0, 2, r"^model.sliding_window_pattern: expected 0 without a window, got 2; set model.sliding_window"),
        (4, 1, r"^model.sliding_window_pattern: expected 2 to num_hidden_layers=12, or 0, got 1; 0 gives all"),
        (4, 13, r"^model.sliding_window_pattern: expected 2 to num_hidden_layers=12, or 0, got 13"),
        (-1, 0, r"^model.sliding_window: expected 0 or more"),
    ],
)
def test_windows_without_effect_are_refused(window, pattern, message):
    c = default_config()
    c.model.sliding_window = window
    c.model.sliding_window_pattern = pattern
    with pytest.raises(ConfigError, match=message):
        check(c)


def test_unknown_families_are_refused():
    c = default_config()
    c.model.model_type = "gpt2"
    with pytest.raises(ConfigError, match=r"^model.model_type: expected one of llama, got 'gpt2'"):
        check(c)


def test_a_pullback_takes_the_arguments_that_it_did_not_save():
    """With the JAX that is installed: `with_arguments` uses a name of it that is not public."""
    w, x = jnp.array([2.0, 3.0]), jnp.array([5.0, 7.0])
    y, pullback = jax.vjp(lambda w, x: w * x**2, w, x, saveable_args=(False, True))
    assert not any(leaf is w for leaf in jax.tree.leaves(pullback))
    dw, dx = with_arguments(pullback, {0: 10 * w})(jnp.ones(2))
    np.testing.assert_array_equal(dw, x**2)
    np.testing.assert_array_equal(dx, 2 * 10 * w * x)
    np.testing.assert_array_equal(y, w * x**2)


# --- a model of several kinds of layers -------------------------------------------------------------------------------


class Mixer(nnx.Module):
    """x + w2 tanh(w1 mean over the last `window` positions of x): a layer without attention."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        normal = nnx.initializers.normal(0.2)
        self.w1 = parameter(rngs, (width, 32), ("mlp", "embed"), normal, product=Product(0))
        self.w2 = parameter(rngs, (32, width), ("embed", "mlp"), normal, product=Product(1))

    def __call__(self, x_BSD: jax.Array, variant: Variant) -> tuple[jax.Array, jax.Array]:
        """(the layer of x, the mean square of each token's hidden values `[B, S]`)."""
        sums_BSD = jnp.cumsum(x_BSD, axis=1)
        late_BSD = jnp.pad(sums_BSD, ((0, 0), (variant.window, 0), (0, 0)))[:, : x_BSD.shape[1]]
        mean_BSD = (sums_BSD - late_BSD) / variant.window
        hidden = jnp.tanh(linear(mean_BSD, self.w1[...]))
        return x_BSD + linear(hidden, self.w2[...]), jnp.mean(jnp.square(hidden), axis=-1)


class WithState(sublayer.Mixer):
    """Declares a state that sampling hands on."""

    def decode_state(self, rows: int, positions: int, dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, positions), dtype)


class Around(nnx.Module):
    """Embedding and head."""

    def __init__(self, *, rngs: nnx.Rngs):
        normal = nnx.initializers.normal(0.2)
        self.embed = parameter(rngs, (64, 32), ("vocab", "embed"), normal, Kind.TABLE)
        self.head = parameter(rngs, (64, 32), ("vocab", "embed"), normal, Kind.TABLE)


LAYERS = {
    "narrow": (16, (2, 3, 3, 2, 3, 3, 2, 3)),
    "wide": (48, (4, 4, 4)),
}  # width, windows; the second has statistics
# The layers by the first letter of their segment: one segment after the other, and a pattern of four layers twice, of
# which three follow.
ORDERS = {"one after another": "nnnnnnnnwww", "alternating": "nnnwnnnwnnw"}


def arrays(module: nnx.Module) -> dict:
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


class SideBySide(decoder.Block):
    """Attention and MLP of one norm, as in PaLM: notebooks/04_your_own.ipynb trains such a block."""

    def __call__(self, x_BSD, ops, cache=None, routing: Routing = ROUTES):
        y_BSD = ops.norm(x_BSD, self.attention_norm[...], self.config.rms_norm_eps)
        attended_BSD, cache = self.attention(y_BSD, ops, None, cache)
        products_BSD, routed = self.mlp(y_BSD, ops, None, routing)
        return x_BSD + attended_BSD + products_BSD, cache, routed


@needs(4)
@pytest.mark.full
def test_a_block_of_ones_own_equals_reverse_mode():
    """With everything offloaded and sharded; the standard block of the same parameters has another loss."""
    model = decoder_model.build(CONFIG, block=SideBySide)
    small = Small(4, model=model, zero_level=3, microbatches_per_fetch=3, **ALL)
    batch = tokens(3, 8, 16)
    inputs, labels = (x.reshape(-1, 16) for x in batch)
    graph = nnx.graphdef(nnx.eval_shape(lambda: SideBySide(CONFIG, rngs=nnx.Rngs(0))))

    def loss(params):
        x_BSD = params[OUTER]["embed"][inputs]
        for l in range(CONFIG.num_hidden_layers):
            w = jax.tree.map(lambda x, l=l: x[l], params[decoder_config.BLOCKS])
            x_BSD = nnx.merge(graph, w)(x_BSD, Operations())[0]
        logits = model.logits(params[OUTER], x_BSD)
        return cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)) / (labels >= 0).sum()

    with vectors_drawn():
        params = model.init(0)
    expected = jax.jit(jax.value_and_grad(loss))(params)
    assert worst_relative(engine_gradients(small, batch), expected) < ORDER_OF_SUMS
    assert abs(float(plain_loss(CONFIG)(params, *batch)) - float(expected[0])) > 1e-5  # rounding is 5e-7


@pytest.mark.full
def test_a_block_of_ones_own_in_float8():
    """Within float8's error of recipe bf16, of which the standard block of the same parameters is its own size away."""

    def result(recipe: str, block) -> jax.Array:
        (segment,) = decoder_model.build(CONFIG, Compute(precision=Precision(recipe)), block=block).segments
        w = jax.tree.map(lambda x: 8 * x[0], drawn_params(CONFIG, 0)[decoder_config.BLOCKS])
        w = quantise_with_one_scale(segment.params, w, E4M3) if recipe == "fp8_current" else w
        return jax.jit(segment.block_forward)(w, x_BSD)[0][0] - x_BSD

    x_BSD = normal(1, (2, 16, CONFIG.hidden_size))
    expected = result("bf16", SideBySide)
    error, other = (
        jnp.linalg.norm(y_BSD - expected) / jnp.linalg.norm(expected)
        for y_BSD in (result("fp8_current", SideBySide), result("bf16", decoder.Block))
    )
    assert 1e-3 < error < 0.1, error
    assert other > 0.2, other


def auxiliary(statistics, tokens):
    """Not linear in what the layers sum up, so that it is the same only if these are sums of a whole step."""
    (squares_L,) = statistics["wide"]
    return 0.3 * jnp.mean((squares_L / tokens) ** 2)


@functools.cache
def toy(compute: Compute = DEFAULT, order: str = "one after another") -> Model:
    """Narrow layers, and wide ones that have statistics."""
    abstract = {
        name: nnx.eval_shape(lambda width=width: Mixer(width, rngs=nnx.Rngs(0))) for name, (width, _) in LAYERS.items()
    }
    params = collect_params(abstract | {OUTER: nnx.eval_shape(lambda: Around(rngs=nnx.Rngs(0)))})

    def segment(name: str, number: int, start: int) -> Segment:
        width, windows = LAYERS[name]
        graph = nnx.graphdef(abstract[name])

        has_statistics = name == "wide"

        def block(w, x_BSD, recipe_inputs=None, variant: Variant = PLAIN, starts_BS=None, routing: Routing = ROUTES):
            x_BSD, square_BS = nnx.merge(graph, w)(x_BSD, variant)
            if not has_statistics:
                return x_BSD, None
            square_BS = square_BS if routing.counted is None else jnp.where(routing.counted, square_BS, 0)
            return x_BSD, Routed((jnp.sum(square_BS, dtype=jnp.float32),))

        def block_forward(
            w, x_BSD, recipe_inputs=None, variant: Variant = PLAIN, starts_BS=None, routing: Routing = ROUTES
        ):
            run = lambda w, x, counted: block(w, x, None, variant, None, Routing(counted))
            return jax.vjp(run, w, x_BSD, routing.counted, saveable_args=(True, True, False))

        def block_backward(
            w, saved, d_result, recipe_inputs=None, variant: Variant = PLAIN, starts_BS=None, routing: Routing = ROUTES
        ):
            saved = with_arguments(saved, {2: routing.counted})
            dx_BSD, d_statistics = d_result
            if has_statistics and d_statistics is None:
                d_statistics = (varying(jnp.float32(0)),)
            return *saved((dx_BSD, Routed(d_statistics) if has_statistics else None))[:2], None

        def init(seed, l):
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), number), l)
            return arrays(Mixer(width, rngs=nnx.Rngs(key)))

        return Segment(
            name=name,
            numbers=tuple(number for number, letter in enumerate(ORDERS[order]) if letter == name[0]),
            start=start,
            params=params[name],
            variants=tuple(Variant(window=window) for window in windows),
            mixer=WithState(),
            init=init,
            block=block,
            block_forward=block_forward,
            block_backward=block_backward,
            cached_block=lambda w, x, cache, variant: (block(w, x, None, variant)[0], cache),
            statistics=(jax.ShapeDtypeStruct((), jnp.float32),) if has_statistics else None,
        )

    return Model(
        vocab_size=64,
        hidden_size=32,
        compute=compute,
        segments=(segment("narrow", 0, 0), segment("wide", 1, len(LAYERS["narrow"][1]))),
        outer_params=params[OUTER],
        head="head",
        head_uses=("head",),
        sites=Sites((), ()),
        init_outer=lambda seed: arrays(Around(rngs=nnx.Rngs(jax.random.key(seed)))),
        final=lambda outer, x: x,
        logits=lambda outer, x: linear(x, outer["head"]).astype(jnp.float32),
        rebuild=functools.partial(toy, order=order),
    )


def toy_loss(params, inputs_ABS, labels_ABS, order: str = "one after another"):
    """(what the toy minimises, its mean loss)."""
    inputs_BS, labels_BS = (x.reshape(-1, x.shape[-1]) for x in (inputs_ABS, labels_ABS))
    squares_L = []
    count = (labels_BS >= 0).sum()
    x_BSD = params[OUTER]["embed"][inputs_BS]
    for number, letter in enumerate(ORDERS[order]):
        name = {"n": "narrow", "w": "wide"}[letter]
        width, windows = LAYERS[name]
        graph = nnx.graphdef(nnx.eval_shape(lambda width=width: Mixer(width, rngs=nnx.Rngs(0))))
        l = ORDERS[order][:number].count(letter)
        w = jax.tree.map(lambda x, l=l: x[l], params[name])
        x_BSD, square_BS = nnx.merge(graph, w)(x_BSD, Variant(window=windows[l]))
        if name == "wide":
            squares_L.append(jnp.sum(jnp.where(labels_BS >= 0, square_BS, 0)))
    logits = linear(x_BSD, params[OUTER]["head"])
    loss = cross_entropy(logits.reshape(-1, 64), labels_BS.reshape(-1)) / count
    return loss + auxiliary({"wide": (jnp.stack(squares_L),)}, count), loss


@needs(8)
@pytest.mark.parametrize(
    "order, devices, placed",
    quick_at(
        [
            ("one after another", 1, {}),
            ("one after another", 8, {"zero_level": 2, "replicate": 2, **ALL}),
            ("one after another", 4, {"zero_level": 3, "offload_weights": True, "resident_layers": 9}),
            ("alternating", 1, ALL),
            ("alternating", 8, {"zero_level": 2, "replicate": 2, **ALL}),
            ("alternating", 4, {"zero_level": 3, "offload_weights": True, "resident_layers": 9}),
        ],
        3,
    ),
)
def test_segments_with_auxiliary_losses_equal_reverse_mode(order, devices, placed):
    """Loss and every gradient, whatever the placement; 9 resident layers are the first segment and one of the next."""
    model = toy(order=order)
    small = Small(devices, model=model, auxiliary=auxiliary, microbatches_per_fetch=3, **placed)
    if placed.get("resident_layers"):
        wide = small.plan.weights["wide"]["w1"]
        assert isinstance(wide, Split) and wide.resident.shape[0] == 1
        assert small.plan.weights["narrow"]["w1"].sharding.memory_kind == "device"
    batch = tokens(3, 8, 16)
    params = model.init(0)
    loss_of = functools.partial(toy_loss, order=order)
    (_, loss), grads = jax.jit(jax.value_and_grad(loss_of, has_aux=True))(params, *batch)
    expected = loss, grads
    found = engine_gradients(small, batch)
    assert worst_relative(found, expected) < ORDER_OF_SUMS


def test_the_norm_is_a_sum_in_the_order_of_the_layers():
    """Where gradients are in host memory, layers of several kinds in turn are squared as the backward pass goes."""
    batches = [tokens(2, 8, 16, seed=i) for i in range(3)]
    losses = Small(model=toy(order="alternating")).train(batches)
    assert Small(model=toy(order="alternating"), offload_grads=True).train(batches) == losses


@pytest.mark.full
@pytest.mark.parametrize("order", ORDERS)
def test_segments_train_alike_under_every_placement(tmp_path, order):
    batches = [tokens(2, 8, 16, seed=i) for i in range(3)]
    losses = Small(model=toy(order=order)).train(batches)
    for late in (False, True):
        offloaded = Small(model=toy(order=order), microbatches_per_fetch=2, overlap_update=late, **ALL)
        assert offloaded.train(batches) == losses
    assert losses[0][0] > losses[-1][0]
    for number, placed in enumerate(({"overlap_update": True}, {"overlap_update": False}, {"nvme_slots": 2})):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        in_files = Small(model=toy(order=order), batch=(2, 8, 16), nvme_path=str(folder), **NVME_ALL, **placed)
        assert in_files.train(batches) == losses
    state = Small(model=toy(order=order), nvme_path=str(tmp_path), offload_optimizer="nvme", offload_master="nvme")
    assert state.train(batches) == losses
    in_memory = Small(model=toy(order=order))
    in_memory.train(batches[:1])
    with Checkpoints(tmp_path, save_total_limit=1) as checkpoints:
        checkpoints.save(in_memory.state, {"step": 1})
        checkpoints.wait()
        assert checkpoints.last
        state.state = restore(checkpoints.last, state.plan)
    assert state.train(batches[1:]) == losses[1:]


@pytest.mark.parametrize(
    "devices, placed", quick_at([(1, {"offload_weights": True}), (4, {"zero_level": 3, "offload_weights": "nvme"})])
)
def test_programs_of_one_layer_have_auxiliary_losses(tmp_path, devices, placed):
    """Of both segments, whose residuals rest in files: losses and norms of the step that is one program."""
    of_steps = [tokens(3, 8, 16, seed=i) for i in range(2)]
    in_memory = Small(
        devices, model=toy(), auxiliary=auxiliary, microbatches_per_fetch=3, **placed | {"offload_weights": True}
    )
    rest: dict = {"offload_residual": "nvme", "nvme_path": str(tmp_path), "batch": (3, 8, 16)}
    in_files = Small(devices, model=toy(), auxiliary=auxiliary, **rest, **placed)
    assert in_files.train(of_steps) == in_memory.train(of_steps)


@pytest.mark.full
def test_segments_are_sampled_from():
    """The caches of both segments come back, whatever the layers do with them."""
    model = toy()
    cache = empty_cache(model, 1, 4, jnp.float32)
    logits, extended = cached_logits(model, model.init(0), jnp.array([[1, 2]]), cache, jnp.int32(0))
    assert logits.shape == (1, 64) and jax.tree.map(jnp.shape, extended) == jax.tree.map(jnp.shape, cache)


def test_queries_are_scaled_by_their_position_in_their_dtype():
    """1 + beta ln(1 + floor(position / original length)), of positions of a row and of each row."""
    scaling = RopeScaling("yarn", factor=4.0, original_max_position_embeddings=4, llama_4_scaling_beta=0.5)
    positions = np.array([0, 3, 4, 11, 12])
    expected = 1 + 0.5 * np.log(1 + np.array([0, 0, 1, 2, 3]))
    for dtype in (jnp.float32, jnp.bfloat16):
        q = jnp.ones((2, 5, 3, 4), dtype)
        for of in (positions, np.stack([positions] * 2)):
            found = jax.jit(lambda q, of: scale_by_position(q, of, scaling))(q, of)
            assert found.dtype == dtype and found.shape == q.shape
            np.testing.assert_allclose(found[1, :, 2, 3].astype(jnp.float32), expected, rtol=1e-2)


def test_a_model_has_the_settings_of_its_config():
    """Of a reward model the head's are left out; random numbers are drawn by dropout, and by a recipe."""
    settings = {"scale_embedding": True, "final_logit_softcapping": 30.0, "tie_word_embeddings": False}
    build = lambda *compute, **others: decoder_model.build(dataclasses.replace(CONFIG, **others), *compute)
    plain, scaled, scores = build(), build(**settings), build(**settings, num_labels=1)
    assert (plain.embedding_scale, plain.logit_softcap, plain.draws) == (1.0, 0.0, False)
    assert (scaled.embedding_scale, scaled.logit_softcap) == (CONFIG.hidden_size**0.5, 30.0)
    assert (scores.embedding_scale, scores.logit_softcap, scores.head) == (CONFIG.hidden_size**0.5, 0.0, "score")
    for dropout in (0.0, 0.1):
        lora = Lora(rank=2, alpha=4.0, targets=("attention.wq",), dropout=dropout)
        assert build(lora=lora).draws == (dropout > 0)
    assert build(Compute(precision=Precision("nvfp4"))).draws and not build(Compute(precision=Precision("mxfp8"))).draws
    assert (scaled.vocab_size, scaled.hidden_size) == (CONFIG.vocab_size, CONFIG.hidden_size)
    assert scaled.head_uses == ("norm", "head") and scaled.rebuild(Compute(attention="xla")).compute.attention == "xla"


def test_yarn_s_range_of_one_channel_has_a_width():
    """An original context so short that no pair makes a turn: nothing is divided by 0."""
    scaling = RopeScaling("yarn", factor=2.0, original_max_position_embeddings=6)
    assert rotary.yarn_bounds(8, 1e4, scaling) == (0, 0.001)
    longer = dataclasses.replace(scaling, original_max_position_embeddings=4096)
    assert rotary.yarn_bounds(64, 1e4, longer) == (10, 23)
    assert rotary.yarn_bounds(4, 1e4, longer) == (0, 2)


def test_latent_scores_grow_with_contexts_that_are_longer():
    scaling = RopeScaling("yarn", factor=4.0, mscale_all_dim=1.0)
    assert scaling.score_factor == pytest.approx((0.1 * math.log(4) + 1) ** 2)
    assert dataclasses.replace(scaling, factor=0.5).score_factor == 1
