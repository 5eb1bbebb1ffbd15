"""Qwen3.5 and Qwen3-Next against transformers in float64, whose float32 would hide mistakes.

`fixtures/make_qwen3_5_reference.py` says how what transformers computes was stored.
"""

import dataclasses
import functools
import itertools
import json
import re
from pathlib import Path
from typing import Any

import chex
import gguf as gguf_package
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from commands import convert
from small import CONFIG, quick_at
from test_gguf_export import tokenizer_json

from surojax import ConfigError, default_config
from surojax.assembly.from_config import architecture
from surojax.config.checks import check
from surojax.exchange import config_json, expert_tensors, peft
from surojax.exchange.beside import tensors_beside
from surojax.exchange.gguf import GgufTensors
from surojax.exchange.gguf_export import gguf_metadata
from surojax.exchange.gguf_file import open_file, read_numbers
from surojax.exchange.gguf_metadata import metadata_config
from surojax.exchange.huggingface import model_fields, read_config
from surojax.exchange.model_tensors import (
    SINGLE,
    Weights,
    check_tensors,
    describe_source,
    shapes,
    tensor_name,
)
from surojax.exchange.shards import StoredTensor, write_shard
from surojax.families import registry
from surojax.families.family import BY_EXPERT
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
from surojax.step.outer import first_input

REFERENCE: dict[str, np.ndarray] = {}
DEFAULTS: dict[str, dict] = {}
for name in ("qwen3_5_reference", "qwen3_5_experts_reference"):
    with np.load(Path(__file__).parent / "fixtures" / f"{name}.npz") as arrays:
        REFERENCE |= arrays
        DEFAULTS |= json.loads(str(arrays["defaults.json"]))
FAMILIES = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text", "qwen3_next": "qwen3_next"}  # by case's name
QUICK = ("qwen3_5_tied", "qwen3_5_moe", "qwen3_next")
CASES = (*QUICK, "qwen3_5", "qwen3_5_thirds", "qwen3_5_moe_tied", "qwen3_5_moe_thirds")
CASES += ("qwen3_next_tied", "qwen3_next_thirds")
OF_EACH_FAMILY = quick_at([(case,) for case in CASES], *range(len(QUICK)))
OF_ONE_FAMILY = quick_at([(case,) for case in CASES], 0)
GROWN = 1e-9  # likewise, of losses after some steps, from which rounding grows; a wrong formula is off by 1e-4
EXACT = 1e-11  # relative to the largest number of a tensor; found: 2e-12


@pytest.fixture
def in_float64(monkeypatch):
    """Also what our code casts to float32, as the reference's."""
    with jax.enable_x64():
        monkeypatch.setattr(jnp, "float32", jnp.float64)
        yield


def in_modules(case: str, what: str) -> dict[str, np.ndarray]:
    """The arrays of a case, by name in the modules of transformers 5."""
    start = f"{case}/{what}/"
    return {name.removeprefix(start): x for name, x in REFERENCE.items() if name.startswith(start)}


def stored(case: str, what: str) -> dict[str, np.ndarray]:
    """The arrays of a case, by our names."""
    theirs = in_modules(case, what)
    parts = expert_tensors.parts_in(theirs, BY_EXPERT)
    others = {name: x for name, x in theirs.items() if not any(name in part.names for part in parts.values())}
    return others | {name: part.tensor([theirs[part.names[0]]]) for name, part in parts.items()}


def given(case: str) -> dict[str, Any]:
    return json.loads(str(REFERENCE[f"{case}/config.json"]))


@functools.cache
def model_of(case: str) -> Model:
    c = default_config()
    c.model.update(model_fields(given(case)))
    check(c)
    return decoder_model.build(architecture(c))


class ByLayer:
    """A model whose layers are computed one by one, so that one of each segment and variant is compiled.

    order: (number of a layer, its segment, number there). Parameters and gradients are by number of the layer.
    """

    def __init__(self, case: str | Model):
        self.model = model_of(case) if isinstance(case, str) else case
        segments = self.model.segments
        order = sorted((number, i, l) for i, s in enumerate(segments) for l, number in enumerate(s.numbers))
        self.order = [(str(number), i, l) for number, i, l in order]
        self.blocks = [jax.jit(functools.partial(self.block, s), static_argnums=0) for s in segments]
        self.cached = [jax.jit(functools.partial(self.cached_block, s), static_argnums=0) for s in segments]
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

    def block(self, segment, variant, w, x, starts):
        return segment.block(w, x, None, variant, starts)[0]

    def cached_block(self, segment, variant, w, x, cache):
        return segment.cached_block(w, x, cache, variant)

    def logits(self, params, tokens, starts=None):
        x = first_input(self.model, params[OUTER], tokens)
        for number, i, l in self.order:
            x = self.blocks[i](self.model.segments[i].variants[l], params[number], x, starts)
        return self.head(params[OUTER], x)

    def next_logits(self, params, tokens, caches: dict, start, first):
        """Logits after the last token; caches are replaced by those with these tokens."""
        x = first_input(self.model, params[OUTER], tokens)
        for number, i, l in self.order:
            cache = Cache(caches[number], jnp.int32(start), first)
            x, cache = self.cached[i](self.model.segments[i].variants[l], params[number], x, cache)
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


@pytest.mark.parametrize("case", OF_ONE_FAMILY)
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
@pytest.mark.parametrize("case", sorted({*CASES} - {"qwen3_5"}))
def test_steps_of_adamw_are_those_of_torch(in_float64, case):
    """Twenty. With the third case's eps of 1e-6 a gated norm divides by almost 0: there 1e-15 grows to 1e-9 in five."""
    layers = ByLayer(case)
    params, both = layers.named(stored(case, "weight")), loss_and_gradients(layers, case)
    optimizer = adamw(lambda done: jnp.float64(1e-3), max_grad_norm=0, m_dtype="float64", v_dtype="float64")
    declared, structure = jax.tree.flatten(layers.of_each(lambda param, segment, l: param, lambda param: param))
    states = [optimizer.rule(param).init(param.shape, 1) for param in declared]

    @jax.jit
    def update(params, grads, states, step):
        context = TensorContext(
            scalars(optimizer, step, jnp.float64(1)), Layout(jax.P(), jax.P()), jnp.zeros(2, jnp.uint32)
        )
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


@pytest.mark.parametrize("case", quick_at([(case,) for case in CASES], 2))
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


@pytest.mark.parametrize("case", OF_ONE_FAMILY)
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
        "q, *gate = jnp.split(q.reshape(B, S, -1, 2 * c.head_dim), 2, axis=-1)",
        "q, *gate = jnp.split(q, 2, axis=-1)",
    ),
    "silu of the gate": (self_attention, "x * jax.nn.sigmoid(gate)", "x * jax.nn.silu(gate)"),
    "rope on whole heads": (operations, "turned = scaling.channels(h)", "turned = h"),
    "norms of w": (operations, "return 1 + weight.astype(jnp.float32) if plus_one else weight", "return weight"),
}


METHODS = ("__call__", "_projected", "heads", "rotate", "norm", "project", "expand", "scale", "_finished", "of_tokens")


def remade(monkeypatch, module, old: str, new: str) -> None:
    """Replaces text of a module's source, and the functions of its classes that are made of it."""
    source = Path(module.__file__).read_text()
    assert source.count(old) == 1
    namespace = {"__name__": module.__name__, "__file__": module.__file__}
    exec(compile(source.replace(old, new), module.__file__, "exec"), namespace)
    for name, made in vars(module).items():
        if isinstance(made, type) and made.__module__ == module.__name__:
            for method, function in vars(namespace[name]).items():
                if method in METHODS:
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


# As Qwen3-Next: a gated shared expert, and matrices that tensor parallelism divides by key heads.
WITH_EXPERTS = dataclasses.replace(
    HYBRID,
    linear_fused_projections=True,
    num_experts=5,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    shared_expert_intermediate_size=16,
    norm_topk_prob=True,
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


GATED = ("shared_expert.gate_proj", "shared_expert.up_proj", "shared_expert.down_proj", "shared_expert_gate")
OF_NEXT = ("in_proj_qkvz", "in_proj_ba", "out_proj")


@pytest.mark.parametrize("case, rank", [("qwen3_next", 12), ("qwen3_5_moe", 12)])
def test_adapters_with_experts_have_the_names_of_peft(tmp_path, case, rank):
    """All linear layers of PEFT 0.21, of one rank, which is more than the gates have rows."""
    c = default_config()
    c.model.update(model_fields(given(case)))
    c.update({"lora": True, "lora_rank": rank, "lora_target_modules": "all-linear"})
    check(c)
    model = decoder_model.build(architecture(c))
    assert architecture(c).lora is not None
    shapes_of = peft.tensor_shapes(architecture(c).lora, model)
    ends = {name.removeprefix("base_model.model.model.layers.") for name in shapes_of}
    delta = OF_NEXT if case == "qwen3_next" else ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
    modules = [f"{l}.linear_attn.{name}" for l in (0, 2) for name in delta]
    modules += [f"1.self_attn.{name}_proj" for name in "qkvo"] + [f"{l}.mlp.{name}" for l in range(3) for name in GATED]
    assert ends == {f"{module}.lora_{factor}.weight" for module in modules for factor in "AB"}
    gate = shapes_of["base_model.model.model.layers.0.mlp.shared_expert_gate.lora_B.weight"]
    assert gate == (1, rank)
    c.lora_rank = 13
    with pytest.raises(ConfigError, match=r"^lora_rank: expected at most 12, the smaller side of .*, got 13; lower it"):
        check(c)


# --- files ------------------------------------------------------------------------------------------------------------


def written(folder: Path, case: str, config: dict | None = None, **more: np.ndarray) -> Path:
    """A model's folder, in float32, with the tensors of transformers 5."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config or given(case)))
    weights = {name: x.astype(np.float32) for name, x in in_modules(case, "weight").items()}
    safetensors.numpy.save_file(weights | more, folder / SINGLE)
    return folder


@pytest.mark.parametrize("case", OF_EACH_FAMILY)
def test_models_come_out_as_they_went_in(tmp_path, case):
    """To the bit, in either layout of experts; the same config.json."""
    folder = written(tmp_path / "in", case)
    has_experts = "num_experts" in given(case)
    out = convert.convert(folder, tmp_path / "out", dtype="float32", experts_together=has_experts)
    chex.assert_trees_all_equal(safetensors.numpy.load_file(out / SINGLE), safetensors.numpy.load_file(folder / SINGLE))
    fields = model_fields(given(case))
    assert model_fields(read_config(out)) == fields
    if has_experts:
        apart = Weights(convert.convert(folder, tmp_path / "apart", dtype="float32"))
        for name, x in stored(case, "weight").items():
            np.testing.assert_array_equal(apart.read(name), x.astype(np.float32))
    made = config_json.made(fields, 64, {})
    family = FAMILIES[max((start for start in FAMILIES if case.startswith(start)), key=len)]
    assert made["model_type"] == family and config_json.agrees(made, fields)


def test_decays_stay_float32(tmp_path):
    """In files of 16 bits, too."""
    out = convert.convert(written(tmp_path / "in", "qwen3_5_tied"), tmp_path / "out", dtype="bfloat16")
    dtypes = {
        name.rpartition("linear_attn.")[2]: x.dtype for name, x in safetensors.numpy.load_file(out / SINGLE).items()
    }
    assert dtypes["A_log"] == dtypes["dt_bias"] == np.float32 and dtypes["norm.weight"] != np.float32


def test_what_is_beside_the_language_model_is_kept(tmp_path, capsys):
    """To the bit and in its dtype: what images pass through, and heads for further tokens; and said."""
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
    (folder / "preprocessor_config.json").write_text("{}")
    weights = {
        name.replace("model.", "model.language_model.", 1): x.astype(np.float32)
        for name, x in stored("qwen3_5_tied", "weight").items()
    }
    others = {
        "model.visual.blocks.0.norm1.weight": np.arange(4).astype(jnp.bfloat16),
        "mtp.fc.weight": np.linspace(0, 1, 3).astype(np.float16),
    }
    safetensors.numpy.save_file(weights | others, folder / SINGLE)
    tensors = Weights(folder)
    assert tensors.left_aside == sorted(others)
    assert describe_source(tensors).endswith("2 tensors of mtp, visual are left aside")
    check_tensors(tensors, model_of("qwen3_5_tied"))
    out = convert.convert(folder, tmp_path / "out", dtype="float32")
    assert capsys.readouterr().out.endswith("2 tensors of mtp, visual are kept as they are\n")
    chex.assert_trees_all_equal(safetensors.numpy.load_file(out / SINGLE), weights | others)
    said = json.loads((out / "config.json").read_text())
    assert {key: said[key] for key in whole if key != "text_config"} == {
        k: whole[k] for k in whole if k != "text_config"
    }
    assert said["text_config"]["model_type"] == "qwen3_5_text" and (out / "preprocessor_config.json").is_file()
    quantised = json.loads((convert.convert(folder, tmp_path / "fp8", dtype="fp8") / "config.json").read_text())
    ignored = [entry.removeprefix("re:") for entry in quantised["quantization_config"]["ignore"]]
    assert "quantization_config" not in quantised["text_config"]
    for module in ("model.visual.blocks.0.attn.qkv", "mtp.fc"):
        assert any(re.match(pattern, module) for pattern in ignored)
    alone = written(tmp_path / "alone", "qwen3_5_tied", None, **{"mtp.fc.weight": np.ones(3, np.float32)})
    assert "mtp.fc.weight" in safetensors.numpy.load_file(convert.convert(alone, tmp_path / "b") / SINGLE)


def test_a_release_in_fp8_is_read_as_numbers(tmp_path):
    """Blocks of matrices, of each expert too, and of what predicts further tokens, which is written as numbers."""
    numbers = {name: x.astype(np.float32) for name, x in stored("qwen3_5_moe", "weight").items()}
    whole = {"model_type": "qwen3_5_moe", "text_config": given("qwen3_5_moe"), "vision_config": {"depth": 1}}
    whole["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [8, 8], "activation_scheme": "dynamic"}
    tensors: dict[str, np.ndarray] = {"mtp.fc.weight": np.ones((12, 24), np.float32)}
    for name, x in numbers.items():
        in_whole = name.replace("model.", "model.language_model.", 1)
        each = (
            {expert_tensors.of_expert(in_whole, e): y for e, y in enumerate(x)}
            if ".experts." in name
            else {in_whole: x}
        )
        tensors |= each
    expected = {}
    for name, x in list(tensors.items()):
        if x.ndim == 2 and name.endswith(("proj.weight", "in_proj_qkv.weight", "fc.weight")):
            scales = np.full((-(-x.shape[0] // 8), -(-x.shape[1] // 8)), 0.25, np.float32)
            tensors[name] = (x * 4).astype(ml_dtypes.float8_e4m3fn)
            expected[name] = tensors[name].astype(np.float32) * 0.25
            tensors[f"{name}_scale_inv"] = scales
    folder = tmp_path / "fp8"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(whole))
    write_shard(
        folder / SINGLE, {name: StoredTensor(x.shape, x.dtype) for name, x in tensors.items()}, tensors.values()
    )
    out = safetensors.numpy.load_file(convert.convert(folder, tmp_path / "out", dtype="float32") / SINGLE)
    assert len(expected) > 40 and out.keys() == {name for name in tensors if not name.endswith("_scale_inv")}
    for name, x in out.items():
        np.testing.assert_array_equal(x, expected.get(name, tensors[name]), err_msg=name)
    beside = tensors_beside(Weights(folder))
    assert beside is not None and beside.read("mtp.fc.weight", np.dtype(ml_dtypes.bfloat16)).dtype == ml_dtypes.bfloat16
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in said and "quantization_config" not in said["text_config"]


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
    defaults = DEFAULTS["qwen3_5_text"]
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


# --- GGUF -------------------------------------------------------------------------------------------------------------


def in_gguf(tmp_path: Path, case: str) -> tuple[Path, Path]:
    """(a case's folder with rows and a tokenizer that a GGUF file needs, the file made of it)."""
    weights = {name: x.astype(np.float32) for name, x in in_modules(case, "weight").items()}
    for name in weights.keys() & {"model.embed_tokens.weight", "lm_head.weight"}:
        weights[name] = np.tile(weights[name], (10, 1))[:384]
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps(given(case) | {"vocab_size": 384, "pad_token_id": 0} | IN_GGUF[case])
    )
    safetensors.numpy.save_file(weights, folder / SINGLE)
    (folder / "tokenizer.json").write_text(tokenizer_json())
    said = {"bos_token": "<|start|>", "eos_token": "<|end|>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    return folder, convert.convert(folder, tmp_path / "out.gguf", dtype="float32")


# What a case's config.json has in place of what llama.cpp computes otherwise.
IN_GGUF = {case: {"rms_norm_eps": 1e-6} for case in ("qwen3_5_moe_thirds", "qwen3_5_thirds", "qwen3_next_thirds")}


@pytest.mark.parametrize("case", IN_GGUF)
def test_models_go_to_gguf_and_back(tmp_path, case):
    """To the bit, except for decays, which are stored as exp(A_log)."""
    folder, file = in_gguf(tmp_path, case)
    fields = model_fields(read_config(folder))
    back = model_fields(metadata_config(open_file(file)))
    assert config_json.normal(back) == config_json.normal(fields)
    before, after = Weights(folder), GgufTensors(file)
    assert after.names == before.names
    for name in after.names:
        x, y = after.read(name), before.read(name)
        assert x.shape == after.shape(name) == y.shape
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-7 if name.endswith("A_log") else 0, err_msg=name)


def test_files_have_what_llama_cpp_reads(tmp_path):
    """Value heads in its order (worked out here head by head), 1 + w, -exp(A_log), and its names of tensors."""
    folder, file = in_gguf(tmp_path, "qwen3_5_moe_thirds")
    said, ours = read_config(folder), Weights(folder)
    contents = open_file(file)
    read = lambda name: read_numbers(contents, name)
    keys, values, v = said["linear_num_key_heads"], said["linear_num_value_heads"], said["linear_value_head_dim"]
    shared = values // keys
    assert (keys, shared) == (2, 3)
    order = [0, 3, 1, 4, 2, 5]  # the first value head of either key head, then the second
    rows = [head * v + i for head in order for i in range(v)]
    before = 2 * keys * said["linear_key_head_dim"]
    mixed = [*range(before), *(before + row for row in rows)]
    expected = {
        "attn_qkv.weight": ours.read("model.layers.0.linear_attn.in_proj_qkv.weight")[mixed],
        "attn_gate.weight": ours.read("model.layers.0.linear_attn.in_proj_z.weight")[rows],
        "ssm_alpha.weight": ours.read("model.layers.0.linear_attn.in_proj_a.weight")[order],
        "ssm_beta.weight": ours.read("model.layers.0.linear_attn.in_proj_b.weight")[order],
        "ssm_out.weight": ours.read("model.layers.0.linear_attn.out_proj.weight")[:, rows],
        "ssm_conv1d.weight": ours.read("model.layers.0.linear_attn.conv1d.weight")[mixed, 0],
        "ssm_dt.bias": ours.read("model.layers.0.linear_attn.dt_bias")[order],
        "ssm_a": -np.exp(ours.read("model.layers.0.linear_attn.A_log"))[order],
        "ssm_norm.weight": ours.read("model.layers.0.linear_attn.norm.weight"),
        "attn_norm.weight": 1 + ours.read("model.layers.0.input_layernorm.weight"),
        "post_attention_norm.weight": 1 + ours.read("model.layers.0.post_attention_layernorm.weight"),
        "ffn_gate_inp_shexp.weight": ours.read("model.layers.0.mlp.shared_expert_gate.weight")[0],
        "ffn_gate_exps.weight": ours.read("model.layers.0.mlp.experts.gate_proj.weight"),
    }
    for name, array in expected.items():
        np.testing.assert_array_equal(read(f"blk.0.{name}"), array, err_msg=name)
    np.testing.assert_array_equal(
        read("blk.2.attn_q_norm.weight"), 1 + ours.read("model.layers.2.self_attn.q_norm.weight")
    )
    np.testing.assert_array_equal(read("output_norm.weight"), 1 + ours.read("model.norm.weight"))
    sizes = {key.removeprefix("qwen35moe."): value for key, value in contents.metadata.items()}
    assert [sizes[f"ssm.{name}"] for name in ("conv_kernel", "state_size", "group_count", "time_step_rank")] == [
        4,
        4,
        2,
        6,
    ]
    assert (sizes["ssm.inner_size"], sizes["full_attention_interval"], sizes["rope.dimension_count"]) == (24, 3, 4)
    assert sizes["rope.dimension_sections"] == [1, 1, 0, 0] and sizes["nextn_predict_layers"] == 0


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({}, [1, 1, 0, 0]),
        ({"head_dim": 256}, [11, 11, 10, 0]),  # as published
        ({"head_dim": 256, "rope_parameters": {"mrope_section": [24, 20, 20]}}, [11, 11, 10, 0]),
        ({"head_dim": 256, "rope_parameters": {"mrope_section": [28, 2, 2]}}, [28, 2, 2, 0]),
        ({"head_dim": 96}, [4, 4, 4, 0]),
    ],
)
def test_sections_of_a_file_are_the_pairs_that_transformers_turns(tmp_path, changes, expected):
    """Each third pair from the second and the third on, as far as the config says and there are pairs."""
    config = given("qwen3_5_moe_thirds") | {"rms_norm_eps": 1e-6} | changes
    config["rope_parameters"] = given("qwen3_5_moe_thirds")["rope_parameters"] | changes.get("rope_parameters", {})
    metadata, *_ = gguf_metadata(config, tmp_path / "out.gguf")
    assert metadata["qwen35moe.rope.dimension_sections"] == expected


@pytest.mark.parametrize(
    "case, message",
    [
        ("qwen3_5", "expected 18, since llama.cpp has heads of values as large as those of keys, got 12"),
        ("qwen3_next", "expected 36, since llama.cpp has heads of values as large as those of keys, got 24"),
        (
            "qwen3_5_thirds",
            "expected at most 1e-05, which is the least length of queries and keys in llama.cpp, got 0.01",
        ),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused(tmp_path, case, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        gguf_metadata(given(case), tmp_path / "out.gguf")


@pytest.mark.parametrize("family", ("qwen3_5_text", "qwen3_5_moe_text"))
def test_names_are_those_of_the_gguf_package(family):
    """Which has llama.cpp's, by Hugging Face's; its converter calls dt_bias so."""
    declared = registry.FAMILIES[family]
    assert declared.gguf is not None
    architecture = gguf_package.MODEL_ARCH[declared.gguf.architecture.upper()]
    names = gguf_package.get_tensor_name_map(architecture, 2)
    for ours, theirs in declared.gguf.names.items():
        if ours in declared.tensors and ours not in ("delta.wqkvz", "delta.wba"):  # of Qwen3-Next
            name = declared.tensors[ours].format(l=1).replace("dt_bias", "dt_proj.bias")
            assert names.get_name(name, (".weight", ".bias")) == theirs.format(l=1), ours


def test_layers_of_a_file_that_predict_further_tokens_are_left_aside(tmp_path):
    """As llama.cpp's converter writes them: counted in block_count."""
    folder, file = in_gguf(tmp_path, "qwen3_5_moe_thirds")
    reader = gguf_package.GGUFReader(file)
    writer = gguf_package.GGUFWriter(tmp_path / "further.gguf", "qwen35moe")
    changed = {"qwen35moe.block_count": 5, "qwen35moe.nextn_predict_layers": 1}
    for key, field in reader.fields.items():
        if key.startswith(("qwen35moe.", "tokenizer.")):
            value = changed.get(key, field.contents())
            sub_type = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(key, value, field.types[0], sub_type)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.add_tensor("blk.4.nextn.eh_proj.weight", np.ones((16, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    further = GgufTensors(tmp_path / "further.gguf")
    assert further.names == GgufTensors(file).names and further.left_aside == ["blk.4.nextn.eh_proj.weight"]
    assert describe_source(further).endswith("1 tensors of blk are left aside")
    config = metadata_config(open_file(tmp_path / "further.gguf"))
    assert model_fields(config) == model_fields(read_config(folder))
