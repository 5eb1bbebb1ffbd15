"""Qwen3.5 against transformers in float64 (`fixtures/make_qwen3_5_reference.py`), whose float32 would hide mistakes."""

import dataclasses
import functools
import itertools
import json
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from commands import convert
from small import CONFIG, quick_at

from surojax import ConfigError, default_config
from surojax.assembly.from_config import architecture
from surojax.config.checks import check
from surojax.exchange import config_json
from surojax.exchange.huggingface import model_fields, read_config
from surojax.exchange.model_tensors import (
    SINGLE,
    Weights,
    check_tensors,
    describe_source,
    shapes,
    tensor_name,
)
from surojax.inference.forward import empty_cache
from surojax.models import decoder_model, operations
from surojax.models.kinds import gated_delta, self_attention
from surojax.models.kinds.gated_delta import GatedDelta
from surojax.models.model import Cache, Model
from surojax.models.rotary import RopeScaling
from surojax.optim.adamw import adamw
from surojax.optim.optimizer import TensorContext, scalars
from surojax.placement.layout import Layout
from surojax.placement.param import OUTER

with np.load(Path(__file__).parent / "fixtures" / "qwen3_5_reference.npz") as arrays:
    REFERENCE = dict(arrays)
CASES = ("qwen3_5_tied", "qwen3_5", "qwen3_5_thirds")
GROWN = 1e-9  # likewise, of losses after some steps, from which rounding grows; a wrong formula is off by 1e-4
EXACT = 1e-11  # relative to the largest number of a tensor; found: 2e-12


@pytest.fixture
def in_float64(monkeypatch):
    """Also what our code casts to float32, as the reference's."""
    with jax.enable_x64():
        monkeypatch.setattr(jnp, "float32", jnp.float64)
        yield


def stored(case: str, what: str) -> dict[str, np.ndarray]:
    """The arrays of a case, by name."""
    start = f"{case}/{what}/"
    return {name.removeprefix(start): x for name, x in REFERENCE.items() if name.startswith(start)}


def given(case: str) -> dict[str, Any]:
    return json.loads(str(REFERENCE[f"{case}/config.json"]))


@functools.cache
def model_of(case: str) -> Model:
    c = default_config()
    c.model.update(model_fields(given(case)))
    check(c)
    return decoder_model.build(architecture(c))


class ByLayer:
    """A model whose layers are computed one by one, so that one of each segment is compiled.

    order: (number of a layer, its segment, number there). Parameters and gradients are by number of the layer.
    """

    def __init__(self, case: str | Model):
        self.model = model_of(case) if isinstance(case, str) else case
        segments = self.model.segments
        order = sorted((number, i, l) for i, s in enumerate(segments) for l, number in enumerate(s.numbers))
        self.order = [(str(number), i, l) for number, i, l in order]
        self.blocks = [jax.jit(functools.partial(self.block, s)) for s in segments]
        self.cached = [jax.jit(functools.partial(self.cached_block, s)) for s in segments]
        self.head = jax.jit(self.model.logits)

    def of_each(self, of_layer, of_outer) -> dict:
        """{number of a layer: of_layer(param, segment, l) of its parameters}, and of_outer of the others."""
        segments = self.model.segments
        found: dict[Any, Any] = {OUTER: jax.tree.map(of_outer, self.model.outer_params)}
        for number, i, l in self.order:
            found[number] = jax.tree.map(lambda p, s=segments[i], l=l: of_layer(p, s, l), segments[i].params)
        return found

    def named(self, tensors: dict[str, np.ndarray]) -> dict:
        """Tensors by name as parameters of the layers."""
        assert tensors.keys() == shapes(self.model).keys()
        of_layer = lambda param, segment, l: jnp.asarray(tensors[tensor_name(param, segment, l)])
        return self.of_each(of_layer, lambda param: jnp.asarray(tensors[tensor_name(param)]))

    def block(self, segment, w, x, starts):
        return segment.block(w, x, None, segment.variants[0], starts)[0]

    def cached_block(self, segment, w, x, cache):
        return segment.cached_block(w, x, cache, segment.variants[0])

    def logits(self, params, tokens, starts=None):
        x = params[OUTER]["embed"][tokens]
        for number, i, _ in self.order:
            x = self.blocks[i](params[number], x, starts)
        return self.head(params[OUTER], x)

    def next_logits(self, params, tokens, caches: dict, start, first):
        """Logits after the last token; caches are replaced by those with these tokens."""
        x = params[OUTER]["embed"][tokens]
        for number, i, _ in self.order:
            x, cache = self.cached[i](params[number], x, Cache(caches[number], jnp.int32(start), first))
            caches[number] = cache.state
        return self.head(params[OUTER], x[:, -1])

    def empty_caches(self, rows: int, length: int) -> dict:
        states = empty_cache(self.model, rows, length, "float64")
        named = {number: self.model.segments[i].name for number, i, _ in self.order}
        return {number: jax.tree.map(lambda x: x[0], states[name]) for number, name in named.items()}


@jax.jit
def mean_loss(logits, labels):
    log = jax.nn.log_softmax(logits)
    found = jnp.take_along_axis(log, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    return -(found * (labels >= 0)).sum() / (labels >= 0).sum()


def assert_close(found, expected, what: str, exact: float = EXACT) -> None:
    assert found.dtype == expected.dtype == np.float64
    assert np.abs(found - expected).max() <= exact * np.abs(expected).max(), what


def loss_and_gradients(layers: ByLayer, case: str):
    """The function of parameters."""
    tokens, labels = (jnp.asarray(REFERENCE[f"{case}/{name}"]) for name in ("tokens", "labels"))
    return jax.value_and_grad(lambda params: mean_loss(layers.logits(params, tokens), labels))


def check_logits(case: str) -> None:
    layers = ByLayer(case)
    found = layers.logits(layers.named(stored(case, "weight")), REFERENCE[f"{case}/tokens"])
    assert_close(np.asarray(found), REFERENCE[f"{case}/logits"], "logits")


@pytest.mark.parametrize("case", quick_at([(case,) for case in CASES], 0))
def test_equals_transformers(in_float64, case):
    """Logits, loss, and gradients of all parameters."""
    layers = ByLayer(case)
    params = layers.named(stored(case, "weight"))
    found = layers.logits(params, jnp.asarray(REFERENCE[f"{case}/tokens"]))
    assert_close(np.asarray(found), REFERENCE[f"{case}/logits"], "logits")
    loss, grads = loss_and_gradients(layers, case)(params)
    assert_close(np.asarray(loss), REFERENCE[f"{case}/loss"], "loss")
    expected = layers.named(stored(case, "grad"))
    names = layers.of_each(lambda param, segment, l: tensor_name(param, segment, l), lambda param: param.name)
    for name, x, y in zip(*map(jax.tree.leaves, (names, grads, expected)), strict=True):
        assert_close(np.asarray(x), np.asarray(y), name)


@pytest.mark.full
@pytest.mark.parametrize("case", ("qwen3_5_tied", "qwen3_5_thirds"))
def test_steps_of_adamw_are_those_of_torch(in_float64, case):
    """Twenty. With the third case's eps of 1e-6 a gated norm divides by almost 0: there 1e-15 grows to 1e-9 in five."""
    layers = ByLayer(case)
    params, both = layers.named(stored(case, "weight")), loss_and_gradients(layers, case)
    optimizer = adamw(lambda done: jnp.float64(1e-3), max_grad_norm=0, m_dtype="float64", v_dtype="float64")
    declared, structure = jax.tree.flatten(layers.of_each(lambda param, segment, l: param, lambda param: param))
    states = [optimizer.rule(param).init(param.shape, 1) for param in declared]

    @jax.jit
    def update(params, grads, states, step):
        context = TensorContext(scalars(optimizer, step, 1.0), Layout(jax.P(), jax.P()), jnp.zeros(2, jnp.uint32))
        arrays = zip(declared, structure.flatten_up_to(params), structure.flatten_up_to(grads), states, strict=True)
        updated = [optimizer.rule(p).apply(x, g, state, context, None)[1:] for p, x, g, state in arrays]
        params, states = zip(*updated, strict=True)
        return structure.unflatten(params), list(states)

    losses = []
    for step in range(len(REFERENCE[f"{case}/losses"])):
        loss, grads = both(params)
        losses.append(loss)
        params, states = update(params, grads, states, jnp.int32(step))
    assert_close(np.asarray(losses), REFERENCE[f"{case}/losses"], "losses of steps", GROWN)


@pytest.mark.parametrize("case", quick_at([(case,) for case in CASES], 0))
def test_answers_are_those_of_transformers(in_float64, case):
    """Token by token with states in place of a cache; one prompt behind padding, which is not seen."""
    layers = ByLayer(case)
    params = layers.named(stored(case, "weight"))
    prompt, answer = REFERENCE[f"{case}/tokens"][:, :5], REFERENCE[f"{case}/answer"]
    padding, length = 2, 7 + answer.shape[1]
    tokens = np.pad(prompt, ((0, 0), (padding, 0)), constant_values=1)
    caches, first = layers.empty_caches(len(prompt), length), jnp.full(len(prompt), padding)
    found = []
    for start in (0, *range(padding + 5, length - 1)):
        tokens = np.asarray(layers.next_logits(params, tokens, caches, start, first)).argmax(axis=-1)[:, None]
        found.append(tokens)
    np.testing.assert_array_equal(np.concatenate(found, axis=1), answer)


@pytest.mark.parametrize("case", quick_at([(case,) for case in CASES], 0))
def test_documents_in_a_row_are_computed_as_alone(in_float64, case):
    """Also a document of one token, and one that is shorter than the convolution."""
    layers = ByLayer(case)
    params = layers.named(stored(case, "weight"))
    tokens = REFERENCE[f"{case}/tokens"][:1]
    borders = [0, 1, 3, 20, tokens.shape[1]]
    starts = np.repeat(borders[:-1], np.diff(borders))[None].astype(np.int32)
    packed = np.asarray(layers.logits(params, tokens, starts))
    for start, stop in itertools.pairwise(borders):
        alone = np.zeros_like(tokens)  # rows of one length are one program; what follows a document is not seen
        alone[:, : stop - start] = tokens[:, start:stop]
        expected = np.asarray(layers.logits(params, alone, np.zeros_like(starts)))[:, : stop - start]
        assert_close(packed[:, start:stop], expected, f"document from {start}")


MISTAKES = {
    "(1 + w) in the gated norm": (gated_delta, "normed * weight[", "normed * (1 + weight)["),
    "the gate before the norm": (
        gated_delta,
        "x, z, weight = (",
        "x_BSVv = x_BSVv * jax.nn.silu(z_BSVv); x, z, weight = (",
    ),
    "no dt_bias": (gated_delta, "softplus(a + dt_bias[None, None])", "softplus(a)"),
    "no exp of A_log": (gated_delta, "-jnp.exp(A_log)", "-(A_log)"),
    "gates of other heads": (gated_delta, '("qkv", "z", "b", "a")', '("qkv", "z", "a", "b")'),
    "a query and a gate as halves": (
        self_attention,
        "q, gate = jnp.split(projected[0].reshape(B, S, -1, 2 * c.head_dim), 2, axis=-1)",
        "q, gate = (x.reshape(B, S, -1, c.head_dim) for x in jnp.split(projected[0], 2, axis=-1))",
    ),
    "silu of the gate": (self_attention, "x * jax.nn.sigmoid(gate)", "x * jax.nn.silu(gate)"),
    "rope on whole heads": (operations, "turned = scaling.channels(h)", "turned = h"),
    "norms of w": (operations, "scale = 1 + scale if plus_one else scale", "scale = scale"),
}


def remade(monkeypatch, module, old: str, new: str) -> None:
    """Replaces text of a module's source, and the functions of its classes that are made of it."""
    source = Path(module.__file__).read_text()
    assert source.count(old) == 1
    namespace = {"__name__": module.__name__, "__file__": module.__file__}
    exec(compile(source.replace(old, new), module.__file__, "exec"), namespace)
    for name, made in vars(module).items():
        if isinstance(made, type) and made.__module__ == module.__name__:
            for method, function in vars(namespace[name]).items():
                if callable(function) and method in ("__call__", "heads", "rotate", "norm"):
                    monkeypatch.setattr(made, method, function)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_can_be_made(monkeypatch, mistake):
    remade(monkeypatch, *MISTAKES[mistake])


@pytest.mark.full
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed(in_float64, monkeypatch, mistake):
    remade(monkeypatch, *MISTAKES[mistake])
    with pytest.raises(AssertionError):
        check_logits("qwen3_5_tied")


# --- training ---------------------------------------------------------------------------------------------------------

HYBRID = dataclasses.replace(
    CONFIG,
    num_hidden_layers=3,
    head_dim=16,
    qk_norm=True,
    norm_plus_one=True,
    attn_output_gate=True,
    rope_scaling=RopeScaling(partial_rotary_factor=0.25),
    layer_types="linear_attention,full_attention",
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=4,
)


def test_adapters_are_of_all_matrices_of_both_mixers():
    """By PEFT's names; one of queries, keys and values together, as files have the matrix."""
    c = default_config()
    c.model.update(model_fields(given("qwen3_5_tied")))
    c.update({"lora": True, "lora_rank": 2, "lora_target_modules": "all-linear"})
    check(c)
    trained = {s.name: s.trained_params for s in decoder_model.build(architecture(c)).segments}
    mlp = ["w_down_lora", "w_gate_lora", "w_up_lora"]
    assert {
        name: jax.tree.map(sorted, x, is_leaf=lambda x: "a" in next(iter(x.values()))) for name, x in trained.items()
    } == {
        "blocks": {"attention": ["wk_lora", "wo_lora", "wq_lora", "wv_lora"], "mlp": mlp},
        "linear_attention": {"delta": ["wa_lora", "wb_lora", "wo_lora", "wqkv_lora", "wz_lora"], "mlp": mlp},
    }
    names = {target.module for target in GatedDelta(HYBRID).targets()}
    assert names == {
        f"linear_attn.{name}" for name in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
    }


# --- files ------------------------------------------------------------------------------------------------------------


def written(folder: Path, case: str, config: dict | None = None, **more: np.ndarray) -> Path:
    """A model's folder, in float32."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config or given(case)))
    weights = {name: x.astype(np.float32) for name, x in stored(case, "weight").items()}
    safetensors.numpy.save_file(weights | more, folder / SINGLE)
    return folder


@pytest.mark.parametrize("case", quick_at([(case,) for case in CASES], 0))
def test_models_come_out_as_they_went_in(tmp_path, case):
    """To the bit; the same config.json."""
    folder = written(tmp_path / "in", case)
    out = convert.convert(folder, tmp_path / "out", dtype="float32")
    chex.assert_trees_all_equal(safetensors.numpy.load_file(out / SINGLE), safetensors.numpy.load_file(folder / SINGLE))
    fields = model_fields(given(case))
    assert model_fields(read_config(out)) == fields
    made = config_json.made(fields, 64, {})
    assert made["model_type"] == "qwen3_5_text" and config_json.agrees(made, fields)


def test_decays_stay_float32(tmp_path):
    """In files of 16 bits, too."""
    out = convert.convert(written(tmp_path / "in", "qwen3_5_tied"), tmp_path / "out", dtype="bfloat16")
    dtypes = {
        name.rpartition("linear_attn.")[2]: x.dtype for name, x in safetensors.numpy.load_file(out / SINGLE).items()
    }
    assert dtypes["A_log"] == dtypes["dt_bias"] == np.float32 and dtypes["norm.weight"] != np.float32


def test_a_model_with_images_is_its_language_model(tmp_path):
    """What images pass through, and heads for further tokens, are left aside, and said."""
    text = given("qwen3_5_tied")
    whole = {
        "model_type": "qwen3_5",
        "text_config": text,
        "vision_config": {"depth": 1},
        "image_token_id": 3,
        "video_token_id": 4,
        "vision_start_token_id": 5,
        "vision_end_token_id": 6,
        "tie_word_embeddings": True,
    }
    folder = tmp_path / "whole"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(whole))
    weights = {
        name.replace("model.", "model.language_model.", 1): x.astype(np.float32)
        for name, x in stored("qwen3_5_tied", "weight").items()
    }
    others = {"model.visual.blocks.0.norm1.weight": np.ones(4, np.float32), "mtp.fc.weight": np.ones(3, np.float32)}
    safetensors.numpy.save_file(weights | others, folder / SINGLE)
    tensors = Weights(folder)
    assert tensors.left_aside == sorted(others)
    assert describe_source(tensors).endswith("2 tensors of mtp, visual are left aside")
    check_tensors(tensors, model_of("qwen3_5_tied"))
    alone = written(tmp_path / "alone", "qwen3_5_tied", **{"mtp.fc.weight": np.ones(3, np.float32)})
    assert Weights(alone).left_aside == ["mtp.fc.weight"]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"attention_bias": True}, r"attention_bias: expected False, got True"),
        ({"attn_output_gate": False}, r"attn_output_gate: expected True, got False"),
        ({"mamba_ssm_dtype": "bfloat16"}, r"mamba_ssm_dtype: expected 'float32', got 'bfloat16'"),
        ({"hidden_act": "gelu"}, r"hidden_act: expected 'silu', got 'gelu'"),
        ({"layer_types": ["sliding_attention"] * 3}, r"layer_types: expected full_attention or linear_attention for"),
        ({"layer_types": None, "full_attention_interval": 0}, r"full_attention_interval: expected 1 or more, got 0"),
        ({"linear_allow_neg_eigval": True}, r"config\.json has linear_allow_neg_eigval, which may change"),
    ],
)
def test_models_that_are_not_computed_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        model_fields(given("qwen3_5_tied") | changes)


def test_keys_that_a_config_leaves_out():
    """As transformers' class reads it: attention in every fourth layer, a quarter of each head rotates."""
    bare = {"model_type": "qwen3_5_text", "num_hidden_layers": 8}
    fields = model_fields(bare)
    assert fields["layer_types"] == "linear_attention,linear_attention,linear_attention,full_attention"
    assert (fields["rope_partial_rotary_factor"], fields["head_dim"], fields["linear_num_value_heads"]) == (
        0.25,
        256,
        32,
    )
    beside = bare | {"partial_rotary_factor": 0.5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    assert model_fields(beside)["rope_partial_rotary_factor"] == 0.5
    within = beside | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 1.0}}
    assert model_fields(within)["rope_partial_rotary_factor"] == 1.0
    defaults = json.loads(str(REFERENCE["defaults.json"]))["qwen3_5_text"]
    assert model_fields({"model_type": "qwen3_5_text"}) == model_fields(defaults)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model.linear_num_value_heads": 3}, r"^model\.linear_num_value_heads: expected 32 with layer_types=''"),
        (
            {"model.layer_types": "linear_attention", "model.linear_num_value_heads": 24},
            r"^model\.linear_num_value_heads: expected a multiple of linear_num_key_heads=16, .*, got 24; use 16$",
        ),
        (
            {"model.layer_types": "linear_attention,full_attention", "cp_size": 2, "gpus": 2},
            r"^cp_size: expected 1 with layer_types='linear_attention,full_attention', whose states",
        ),
        (
            {"model.layer_types": "linear_attention", "master_dtype": "bfloat16"},
            r"^master_dtype: expected 'float32' with layer_types='linear_attention', whose decays are float32",
        ),
    ],
)
def test_settings_that_do_not_go_together(changes, message):
    c = default_config()
    c.update_from_flattened_dict(changes)
    with pytest.raises(ConfigError, match=message):
        check(c)
