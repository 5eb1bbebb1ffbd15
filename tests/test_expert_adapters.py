"""Adapters of experts: against PEFT and its files, merged, and what a step computes of them.

`fixtures/make_adapter_reference.py` has how the reference was made; its --check has PEFT load what is written here.
"""

import dataclasses
import json
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from commands import convert
from exports import Case, adapter_of, config_of, model_of, of_each
from small import CONFIG, Small, needs, plain_loss, plain_model, quick_at, target_names, tokens, worst_relative
from test_adapters import REFERENCE, logits, save, theirs
from test_deepseek import in_files as of_modules, written as written_in_float64
from test_engine import ORDER_OF_SUMS, engine_gradients
from test_experts import TIED, apart, in_files, stored, written
from test_export import run_config
from test_huggingface import config, save_tokenizer

from surojax import ConfigError, default_config, read_metrics, train
from surojax.assembly.from_config import architecture, from_config
from surojax.config import checks
from surojax.exchange import model_tensors, peft
from surojax.exchange.merge import there_and_back
from surojax.exchange.naming import naming_of
from surojax.models import decoder_model
from surojax.models.lora import Lora
from surojax.numerics import base_formats, nf4
from surojax.placement.mesh import make_mesh
from surojax.placement.param import part_of, with_part
from surojax.training.run_summary import describe_run

CASES = ("experts", "experts_gate_up", "experts_apart", "experts_gpt_oss", "experts_granite")
OF_EXPERTS = target_names("gate_proj,up_proj,down_proj")
SEVEN = dataclasses.replace(CONFIG, num_experts=7, num_experts_per_tok=3, moe_intermediate_size=24)
OF_RANK_4 = Lora(4, 8.0, target_names("q_proj,gate_proj,up_proj,down_proj"))
ADAPTED = dataclasses.replace(SEVEN, lora=OF_RANK_4)
UNUSED = 4


def base_of(folder: Path, case: str, *, each: bool = False) -> Path:
    """The base of a case, with one tensor of all experts or with one of each."""
    base = str(REFERENCE[f"{case}/base"])
    tensors = {name: x.copy() for name, x in stored(base, "weight").items()}
    for name, x in tensors.items():
        if name.endswith(("mlp.gate.weight", ".router.weight")):
            x[TIED[1]] = -x[TIED[0]]
    return written(folder / "base", base, apart(tensors, base) if each else in_files(tensors, base))


def close(found: np.ndarray, case: str) -> None:
    expected = REFERENCE[f"{case}/logits"]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("case", quick_at([(case,) for case in CASES]))
def test_logits_are_those_of_peft(tmp_path, case):
    """With adapters beside the experts, which a run reads from PEFT's files, and merged into them."""
    base = base_of(tmp_path, case, each=case == "experts")
    adapter = save(tmp_path / "adapter", case)
    opened = convert.open_model(base)
    found = peft.read_adapter(adapter, opened.model, naming_of(opened.config))
    names = ["gate_proj", "up_proj"] if case == "experts_gate_up" else ["gate_proj", "up_proj", "down_proj"]
    names += {"experts": ["q_proj", "v_proj"], "experts_apart": ["q_proj"]}.get(case, [])
    assert set(found.lora.targets) == set(target_names(",".join(names)))
    c = config(base, lora=True, lora_target_modules=",".join(names), lora_rank=found.lora.rank)
    c.update({"lora_alpha": found.lora.alpha, "use_rslora": found.lora.rank_stabilised})
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    weights = model_tensors.stacks(opened.tensors, opened.model, "float32", device)
    for matrix, factors in found.matrices.items():
        module, name = matrix.split(".")
        weights = with_part(weights, {"blocks": {module: {f"{name}_lora": factors}}})
    plain = plain_model(architecture(c))
    close(np.concatenate([plain(weights, row[None]) for row in REFERENCE[f"{case}/tokens"]]), case)
    out = convert.merge(base, [adapter], tmp_path / "out", dtype="float32", say=lambda line: None)
    close(logits(out, case), case)
    before = logits(base, case)
    assert np.abs(before - REFERENCE[f"{case}/logits"]).max() > 0.1 * np.abs(before).max()


@pytest.mark.parametrize("case", CASES)
def test_what_is_written_is_what_was_read(tmp_path, case):
    """In the names of transformers 5, with twice the rank for gate and up together."""
    opened = convert.open_model(base_of(tmp_path, case))
    naming = naming_of(opened.config)
    adapter = peft.read_adapter(save(tmp_path / "theirs", case), opened.model, naming)
    out = peft.save_adapter(adapter, opened.model, tmp_path / "ours", naming=naming)
    again = peft.read_adapter(out, opened.model, naming)
    assert again.lora == dataclasses.replace(adapter.lora, targets=again.lora.targets)
    chex.assert_trees_all_equal(again.matrices, adapter.matrices)
    said = json.loads((out / "adapter_config.json").read_text())
    rank = adapter.lora.rank
    assert said["rank_pattern"] == {r".*\.gate_up_proj": 2 * rank}
    both = case != "experts_gate_up"
    mlp = "block_sparse_moe" if case == "experts_granite" else "mlp"
    wanted = [f"{mlp}.experts.gate_up_proj", f"{mlp}.experts.down_proj"]
    assert said["target_parameters"] == wanted[: 1 + both]
    of_modules = {"experts": ["q_proj", "v_proj"], "experts_apart": ["q_proj"]}
    assert said["target_modules"] == of_modules.get(case)
    tensors = safetensors.numpy.load_file(out / peft.TENSORS)
    module = f"base_model.model.model.layers.1.{mlp}.experts"
    assert tensors[f"{module}{'.base_layer' * both}.lora_A.weight"].shape == (7 * 2 * rank, 24)
    assert tensors[f"{module}{'.base_layer' * both}.lora_B.weight"].shape == (24, 7 * 2 * rank)


WITHOUT_GATE = {
    "experts_without_gate": ({"mamba.w_in", "mlp.w_up", "mlp.w_down"}, ["up_proj", "down_proj"]),
    "experts_without_gate_down": ({"attention.wq", "mlp.w_down"}, ["down_proj"]),
}


def base_without_gate(folder: Path) -> Path:
    weights = {name: x.astype(np.float32) for name, x in of_modules("nemotron", "weight").items()}
    return written_in_float64(folder / "base", "nemotron", of_each(weights))


@pytest.mark.parametrize("case", WITHOUT_GATE)
def test_experts_without_a_gate_are_those_of_peft(tmp_path, case):
    """Nemotron-H's, merged and written again; names of modules are of the MLPs beside them."""
    base = base_without_gate(tmp_path)
    opened = convert.open_model(base)
    naming = naming_of(opened.config)
    adapter = peft.read_adapter(save(tmp_path / "theirs", case), opened.model, naming)
    targets, parameters = WITHOUT_GATE[case]
    assert {*adapter.lora.targets} == targets | {"mlp.shared.w_up", "without_experts.mlp.w_up"}
    out = convert.merge(base, [tmp_path / "theirs"], tmp_path / "out", dtype="float32", say=lambda line: None)
    close(logits(out, case), case)
    before = logits(base, case)
    assert np.abs(before - REFERENCE[f"{case}/logits"]).max() > 0.1 * np.abs(before).max()

    ours = peft.save_adapter(adapter, opened.model, tmp_path / "ours", naming=naming)
    said = json.loads((ours / "adapter_config.json").read_text())
    others = ["shared_experts.up_proj.weight", "mixer.up_proj.weight"]
    assert said["target_parameters"] == [*(f"mixer.experts.{name}" for name in parameters), *others]
    assert said["rank_pattern"] == said["alpha_pattern"] == {}
    assert safetensors.numpy.load_file(ours / peft.TENSORS).keys() == theirs(case).keys()
    again = peft.read_adapter(ours, opened.model, naming)
    assert {*again.lora.targets} == {*adapter.lora.targets}
    chex.assert_trees_all_equal(again.matrices, adapter.matrices)


def test_experts_without_a_gate_have_adapters_each(tmp_path):
    """As files of transformers 4 have them: the same numbers as of all experts together."""
    case = "experts_without_gate"
    opened = convert.open_model(base_without_gate(tmp_path))
    naming = naming_of(opened.config)
    tensors = {}
    for name, x in theirs(case).items():
        before, of_experts, factor = name.rpartition(".experts.")
        matrix = "up_proj" if factor.startswith("base_layer.") else "down_proj"
        factor = factor.removeprefix("base_layer.")
        stacked = x.reshape(5, 2, -1) if factor == "lora_A.weight" else np.moveaxis(x.reshape(len(x), 2, -1), 2, 0)
        each = {f"{before}.experts.{e}.{matrix}.{factor}": np.ascontiguousarray(w) for e, w in enumerate(stacked)}
        tensors |= each if of_experts else {name: x}
    said = {"target_modules": ["in_proj", "up_proj", "experts.down_proj"], "target_parameters": None}
    expected = peft.read_adapter(save(tmp_path / "together", case), opened.model, naming)
    found = peft.read_adapter(save(tmp_path / "each", case, tensors, **said), opened.model, naming)
    chex.assert_trees_all_equal(found.matrices, expected.matrices)


# --- a step -----------------------------------------------------------------------------------------------------------


def without_expert(params: dict) -> dict:
    """Parameters by which nobody chooses an expert: the first channel of all tokens is positive."""
    router, norm = params["blocks"]["mlp"]["router"].copy(), params["blocks"]["mlp_norm"].copy()
    embed = params["outer"]["embed"].copy()
    embed[:, 0] = 6.0
    norm[:, 0] = 1.0
    router[:, UNUSED] = 0.0
    router[:, UNUSED, 0] = -100.0
    return with_part(params, {"blocks": {"mlp": {"router": router}, "mlp_norm": norm}, "outer": {"embed": embed}})


@pytest.mark.full
def test_gradients_follow_from_those_of_the_merged_matrices():
    """dL/da = scale b^T dL/dw and dL/db = scale dL/dw a^T, where w = base + scale b a; zeros for an unused expert."""
    of_two = {"num_hidden_layers": 2}
    small = Small(config=dataclasses.replace(ADAPTED, **of_two))
    small.state = small.state._replace(weights=without_expert(jax.device_get(small.state.weights)))
    adapted = small.state.weights
    inputs, labels = tokens(1, 4, 16)
    _, found = engine_gradients(small, (inputs, labels))
    scale = OF_RANK_4.scale
    merged = part_of(adapted, decoder_model.build(SEVEN).params)
    mlp = adapted["blocks"]["mlp"]
    for name in ("w_gate", "w_up", "w_down"):
        factors = mlp[f"{name}_lora"]
        assert np.abs(factors["b"]).max() > 0
        merged = with_part(merged, {"blocks": {"mlp": {name: mlp[name] + scale * factors["b"] @ factors["a"]}}})
    q = adapted["blocks"]["attention"]
    wq = q["wq"] + scale * q["wq_lora"]["b"] @ q["wq_lora"]["a"]
    merged = with_part(merged, {"blocks": {"attention": {"wq": wq}}})
    expected = jax.jit(jax.grad(plain_loss(dataclasses.replace(SEVEN, **of_two))))(merged, inputs, labels)["blocks"][
        "mlp"
    ]
    for name in ("w_gate", "w_up", "w_down"):
        dw = np.asarray(expected[name])
        factors, gradients = mlp[f"{name}_lora"], found["blocks"]["mlp"][f"{name}_lora"]
        wanted = {
            "a": scale * factors["b"].transpose(0, 1, 3, 2) @ dw,
            "b": scale * dw @ factors["a"].transpose(0, 1, 3, 2),
        }
        assert worst_relative(gradients, wanted) < 1e-4
        for x in gradients.values():
            touched = np.abs(x).max(axis=(2, 3)) > 0
            assert not touched[:, UNUSED].any() and touched.sum() >= 2 * 3


@pytest.mark.full
def test_state_of_adapters_in_host_memory_changes_no_bit():
    """Master weights too: those of experts' adapters are no small part of a card."""
    batches = [tokens(2, 8, 16, seed=i) for i in range(2)]
    in_host_memory = {f"offload_{name}": True for name in ("optimizer", "grads", "master")}
    small = Small(config=ADAPTED, **in_host_memory)
    assert small.train(batches) == Small(config=ADAPTED).train(batches)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(small.state.master["blocks"])} == {"pinned_host"}


@needs(8)
@pytest.mark.parametrize(
    "devices, placed",
    quick_at(
        [
            (4, {"tp_size": 2, "zero_level": 3}),  # others are rows of verify
        ]
    ),
)
def test_placements_change_nothing(devices, placed):
    batches = [tokens(2, 8, 16, seed=i) for i in range(2)]
    expected = Small(config=ADAPTED).train(batches)
    np.testing.assert_allclose(Small(devices, config=ADAPTED, **placed).train(batches), expected, rtol=ORDER_OF_SUMS)


def test_adapters_of_experts_are_sharded_over_experts():
    eight = Small(4, config=dataclasses.replace(ADAPTED, num_experts=8), zero_level=3)
    factors = eight.run.engine.layouts.master["blocks"]["mlp"]["w_up_lora"]
    assert all(layout.stored == jax.P("dp_shard") for layout in factors.values())
    params = eight.run.params["blocks"]["mlp"]
    assert params["w_up_lora"]["a"].shape == (8, 4, 32) and params["w_up_lora"]["b"].used == 3 / 8
    assert not params["w_up"].trainable and not params["router"].trainable


# --- a base in few bits -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base_format", quick_at([("nf4",), ("fp8",), ("nvfp4",)], 0))
def test_merging_adds_to_what_was_multiplied(tmp_path, base_format):
    """The experts of a base in few bits are dequantised, each with its own scales, before the adapter is added."""
    case = "experts_apart"
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64, "head_dim": 16}
    base = base_of(tmp_path, case)
    (base / "config.json").write_text(json.dumps(json.loads((base / "config.json").read_text()) | sizes))
    model = decoder_model.build(architecture(config(base)))
    random = np.random.RandomState(0)
    shapes = model_tensors.shapes(model)
    scales = {name: 1000.0 ** (np.arange(7) == 1) for name in shapes if ".experts." in name}
    tensors = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    tensors |= {name: tensors[name] * of_each[:, None, None].astype(np.float32) for name, of_each in scales.items()}
    in_files = {}
    for name, x in tensors.items():
        before, is_of_experts, last = name.rpartition(".experts.")
        in_files |= {f"{before}.experts.{e}.{last}": w for e, w in enumerate(x)} if is_of_experts else {name: x}
    safetensors.numpy.save_file(in_files, base / model_tensors.SINGLE)
    made = Lora(4, 8.0, OF_EXPERTS)
    factors = {
        ours: {
            "a": random.standard_normal((2, 7, 4, 64)).astype(np.float32),
            "b": random.standard_normal((2, 7, 64, 4)).astype(np.float32),
        }
        for ours in OF_EXPERTS
    }
    adapter = peft.AdapterArrays(made, factors, {}, base_format=f"{base_format} float32")
    folder = peft.save_adapter(adapter, model, tmp_path / "adapter")
    out = convert.merge(base, [folder], tmp_path / "out", dtype="float32", say=lambda line: None)
    found = convert.open_model(out).tensors
    for part, ours in zip(("gate", "up", "down"), OF_EXPERTS, strict=True):
        name = f"model.layers.1.mlp.experts.{part}_proj.weight"
        for e in (0, 1, 6):
            numbers = there_and_back(tensors[name][e], base_format, "float32")
            assert np.abs(numbers - tensors[name][e]).max() > 1e-3
            product = factors[ours]["b"][1, e].astype(np.float64) @ factors[ours]["a"][1, e]
            np.testing.assert_allclose(found.read(name)[e], numbers + 2 * product, rtol=1e-5, atol=1e-3)
    untouched = "model.layers.0.mlp.gate.weight"
    np.testing.assert_array_equal(found.read(untouched), tensors[untouched])


@pytest.mark.full
def test_experts_in_nf4_train_their_adapters():
    """The step is that of a base with the dequantised numbers."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64, "head_dim": 16, "num_hidden_layers": 2}
    cut = dataclasses.replace(ADAPTED, **sizes, lora=Lora(4, 8.0, OF_EXPERTS))
    in_nf4 = Small(config=cut, qlora_bnb=True)
    state = in_nf4.init()

    def numbers(x):
        if isinstance(x, nf4.Nf4):
            return jax.jit(jax.vmap(lambda q: base_formats.dequantise(q, "float32")))(x)
        return jnp.array(x)

    weights = jax.tree.map(numbers, state.weights, is_leaf=lambda x: isinstance(x, nf4.Nf4))
    plain = Small(config=cut)
    plain.state = plain.init()._replace(weights=weights)
    in_nf4.state = state
    batches = [tokens(2, 4, 16, seed=i) for i in range(2)]
    assert isinstance(state.weights["blocks"]["mlp"]["w_up"], nf4.Nf4)
    np.testing.assert_allclose(in_nf4.train(batches), plain.train(batches), rtol=ORDER_OF_SUMS)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"lora_target_modules": "up_proj"},
            "lora_target_modules: expected gate_proj and up_proj together, since PEFT has one adapter of both, got",
        ),
        ({"lora_dropout": 0.1}, "lora_dropout: expected 0.0 with adapters of the MLPs of a model with experts, as in"),
        ({"use_dora": True}, "use_dora: expected False with adapters of the MLPs of a model with experts, as in"),
        ({"lora_rank": 65}, "lora_rank: expected at most 64, the smaller side of mlp.experts.gate_proj, got"),
    ],
)
def test_what_peft_has_not_is_refused(changes, message):
    c = default_config()
    experts = {"model.num_experts": 4, "model.num_experts_per_tok": 2, "model.moe_intermediate_size": 64}
    adapters = {"lora": True, "lora_target_modules": "gate_proj,up_proj,down_proj"}
    c.update_from_flattened_dict(experts | adapters)
    checks.check(c)
    c.update_from_flattened_dict(changes)
    with pytest.raises(ConfigError) as error:
        checks.check(c)
    assert str(error.value).startswith(message)
    c.update_from_flattened_dict({"lora_target_modules": "all-linear", "lora_rank": 16})
    checks.check(c)  # of the attention alone


def test_a_file_that_lost_its_experts_is_refused(tmp_path):
    """Beside experts alone a name of a module is of experts: their tensors have to be there."""
    opened = convert.open_model(base_of(tmp_path, "experts_apart"))
    tensors = {name: x for name, x in theirs("experts_apart").items() if ".experts." not in name}
    assert tensors
    adapter = save(tmp_path / "adapter", "experts_apart", tensors)
    with pytest.raises(ConfigError, match=r"experts\.down_proj\.lora_A\.weight, got no such tensor among .*; save"):
        peft.read_adapter(adapter, opened.model, naming_of(opened.config))


A = "base_model.model.model.layers.1.mlp.experts.base_layer.lora_A.weight"
B = A.replace("lora_A", "lora_B")


@pytest.mark.parametrize(
    "changes, tensors, message",
    [
        ({"target_parameters": ["router.weight"]}, {}, "target_parameters: expected modules among "),
        ({"target_parameters": ["router"]}, {}, "target_parameters: expected names among mlp.experts.gate_up_"),
        ({"target_parameters": "gate_up_proj"}, {}, "target_parameters: expected names of parameters, got 'gate_up_"),
        ({"target_parameters": [1]}, {}, "target_parameters: expected names of parameters, got [1]"),
        (
            {"target_parameters": ["layers.1.mlp.experts.down_proj"]},
            {},
            "target_parameters: expected down_proj in every layer or in none, got",
        ),
        ({"rank_pattern": {"q_proj": 2}}, {}, "rank_pattern: expected gate_up_proj alone in it, got {'q_proj': 2}"),
        ({"rank_pattern": ["gate_up_proj"]}, {}, "rank_pattern: expected gate_up_proj alone in it, got ['gate_up_proj"),
        (
            {"target_parameters": ["mlp.experts.down_proj"], "rank_pattern": {"gate_up_proj": 6}},
            {},
            "rank_pattern: expected it off, got {'gate_up_proj': 6}; nothing else is computed here",
        ),
        (
            {"rank_pattern": {"gate_up_proj": 6, "experts.gate_up_proj": 6}},
            {},
            "rank_pattern: expected gate_up_proj alone in it, got",
        ),
        ({"rank_pattern": {"gate_up_proj": 9}}, {}, "rank_pattern: expected 3 or 6, got {'gate_up_proj': 9}; nothing"),
        (
            {"rank_pattern": {"gate_up_proj": 6}},
            {},
            "alpha_pattern: expected 10 for gate_up_proj, the scale of the others, got {}",
        ),
        (
            {"rank_pattern": {"gate_up_proj": 6}, "alpha_pattern": {"gate_up_proj": "10"}},
            {},
            "alpha_pattern: expected 10 for gate_up_proj, the scale of the others, got {'gate_up_proj': '10'}",
        ),
        (
            {"rank_pattern": {"gate_up_proj": 6}, "alpha_pattern": {"gate_up_proj": 10}},
            {},
            "experts.base_layer.lora_A.weight: expected [42, 24], got [21, 24]; give an adapter of this model",
        ),
        (
            {"rank_pattern": {"gate_up_proj": 6}, "alpha_pattern": {"gate_up_proj": 10}},
            {A: (42, 24), B: (24, 42)},
            "expected adapters of gate and up apart, as gate_up_proj's rank says, got some that share columns",
        ),
        ({}, {A: (18, 24)}, "experts.base_layer.lora_A.weight: expected [21, 24], got [18, 24]; give an adapter"),
        ({}, {A: None}, "expected base_model.model.model.layers.1.mlp.experts.gate_proj.lora_A.weight, got no such"),
    ],
)
def test_adapters_of_experts_that_are_not_computed_are_refused(tmp_path, changes, tensors, message):
    model = convert.open_model(base_of(tmp_path, "experts")).model
    changed = dict(theirs("experts"))
    for name, shape in tensors.items():
        for of_layer in (name, name.replace("layers.1.", "layers.0.")) if len(tensors) > 1 else (name,):
            changed |= {of_layer: np.ones(shape or (1,), np.float32)}
            changed = changed if shape else {key: x for key, x in changed.items() if key != name}
    with pytest.raises(ConfigError) as error:
        peft.read_adapter(save(tmp_path / "adapter", "experts", changed, **changes), model)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_files_without_one_expert_are_refused(tmp_path):
    model = convert.open_model(base_of(tmp_path, "experts_apart")).model
    name = "base_model.model.model.layers.1.mlp.experts.3.up_proj.lora_B.weight"
    tensors = {key: x for key, x in theirs("experts_apart").items() if key != name}
    with pytest.raises(ConfigError, match=rf"^adapter: expected {name} beside that of expert 6, got no such tensor"):
        peft.read_adapter(save(tmp_path / "adapter", "experts_apart", tensors), model)


# --- a run ------------------------------------------------------------------------------------------------------------


def test_a_run_that_freezes_experts_says_so(capsys):
    c = default_config()
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
    c.model.update(sizes | {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1})
    c.update({"lora": True, "model_dtype": "float32", "lora_rank": 4})
    frozen = "note: the experts are frozen; "
    note = frozen + "lora_target_modules with gate_proj,up_proj,down_proj adapts them too\n"
    of_none = frozen + "there are no adapters of theirs here\n"
    beside_mlp = {"experts_beside_mlp": True, "sandwich_norms": True}
    for sizes, names, said in (
        ({}, "all-linear", note),
        ({}, "q_proj,down_proj", ""),
        (beside_mlp, "all-linear", of_none),
        (beside_mlp, "down_proj", of_none),
    ):
        c.model.update(sizes)
        c.lora_target_modules = names
        devices = jax.devices()[:1]
        describe_run(c, from_config(c, make_mesh(devices), total_steps=1), devices, {})
        printed = capsys.readouterr().out
        assert said in printed and (frozen in printed) == bool(said)


def test_adapters_of_experts_beside_an_mlp_are_refused(tmp_path):
    """PEFT names experts of Gemma 4 26B-A4B as it does others', of which there are adapters."""
    config = config_of(Case("gemma4_text experts", "together", "float32"))
    _, model = model_of(config)
    adapter = peft.save_adapter(adapter_of(config), model, tmp_path, naming=naming_of(config))
    said = json.loads((adapter / "adapter_config.json").read_text())
    assert not any("experts" in name for name in [*said["target_modules"], *said.get("target_parameters", [])])
    peft.read_adapter(adapter, model, naming_of(config))
    (adapter / "adapter_config.json").write_text(json.dumps(said | {"target_parameters": ["experts.down_proj"]}))
    with pytest.raises(ConfigError, match=r"expected none in a model without adapters of experts, got \['experts.down"):
        peft.read_adapter(adapter, model, naming_of(config))


@pytest.mark.full
@pytest.mark.parametrize("base_format", ["", "qlora_bnb"])
def test_a_merged_model_has_the_loss_of_the_run(tmp_path, base_format):
    """A run's last evaluation, and the first of a run from what was merged: float32 in another order of sums."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64, "head_dim": 16, "vocab_size": 260}
    folder = base_of(tmp_path, "experts")
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | sizes))
    shapes = model_tensors.shapes(decoder_model.build(architecture(config(folder))))
    random = np.random.RandomState(0)
    tensors = {}
    for name, shape in shapes.items():
        before, is_of_experts, last = name.rpartition(".experts.")
        w = (0.1 * random.standard_normal(shape)).astype(np.float32)
        tensors |= {f"{before}.experts.{e}.{last}": x for e, x in enumerate(w)} if is_of_experts else {name: w}
    safetensors.numpy.save_file(tensors, folder / model_tensors.SINGLE)
    save_tokenizer(folder / "tokenizer.json")
    c = run_config(tmp_path, folder)
    c.update({"lora": True, "lora_rank": 4, "lora_target_modules": "q_proj,gate_proj,up_proj,down_proj"})
    c.update({"learning_rate": 5e-2} | ({base_format: True} if base_format else {}))
    train(c)
    adapter = tmp_path / "run" / "adapter"
    out = convert.merge(folder, [adapter], tmp_path / "out", dtype="float32", say=lambda line: None)
    after = run_config(tmp_path, out)
    after.output_dir = str(tmp_path / "after")
    train(after)
    first, second = (
        [r["loss"] for r in read_metrics(tmp_path / name / "metrics.jsonl") if r["log"] == "eval"]
        for name in ("run", "after")
    )
    assert abs(first[-1] - first[0]) > 1e-3
    np.testing.assert_allclose(second[0], first[-1], rtol=2e-6)
