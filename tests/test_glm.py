"""GLM-4 MoE against transformers (`fixtures/make_glm_reference.py`): sigmoid routers, shared experts, dense layers."""

import dataclasses
import json
from pathlib import Path

import chex
import jax
import numpy as np
import pytest
import safetensors.numpy
from commands import convert
from flax import nnx
from small import CONFIG, Small, needs, plain_loss, plain_model, quick_at, target_names, tokens, worst_relative
from test_adapters import REFERENCE as ADAPTERS, logits, save as save_adapter, theirs as adapter_tensors
from test_engine import ORDER_OF_SUMS, engine_gradients
from test_experts import (
    ALL,
    FOUR,
    TIED,
    UNUSED,
    apart,
    check_gguf_and_back,
    in_names,
    remade,  # noqa: F401
    without_ties,
)
from test_huggingface import config
from test_parity import close

from surojax import ConfigError, default_config
from surojax.assembly.from_config import architecture, from_config, lora
from surojax.config.checks import check
from surojax.exchange import config_json, peft
from surojax.exchange.huggingface import model_fields, read_config
from surojax.exchange.model_tensors import SINGLE, Weights, check_tensors, describe_source, readers, stacks
from surojax.exchange.naming import naming_of
from surojax.models import decoder, decoder_config, decoder_model
from surojax.models.kinds import experts
from surojax.models.lora import Lora
from surojax.models.router_losses import RouterLosses
from surojax.placement.mesh import make_mesh
from surojax.placement.param import part_of

with np.load(Path(__file__).parent / "fixtures" / "glm_reference.npz") as arrays:
    REFERENCE = dict(arrays)
CASES = ("glm4_moe", "glm4_moe_normed")
BIAS = "gate.e_score_correction_bias"
SMALL = dataclasses.replace(
    CONFIG,
    num_experts=7,
    num_experts_per_tok=3,
    moe_intermediate_size=24,
    scoring_func="sigmoid",
    norm_topk_prob=True,
    routed_scaling_factor=1.5,
    n_shared_experts=1,
    first_k_dense_replace=1,
)


def stored(case: str, what: str) -> dict[str, np.ndarray]:
    """The arrays of a case, by name."""
    start = f"{case}/{what}/"
    return {name.removeprefix(start): x for name, x in REFERENCE.items() if name.startswith(start)}


def given(case: str) -> dict:
    return json.loads(str(REFERENCE[f"{case}/config.json"]))


def written(folder: Path, case: str, weights: dict[str, np.ndarray], **changes) -> Path:
    """A model's folder."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(given(case) | changes))
    safetensors.numpy.save_file(weights, folder / SINGLE)
    return folder


def config_of(case: str) -> decoder_config.DecoderConfig:
    c = default_config()
    c.model.update(model_fields(given(case)))
    check(c)
    return architecture(c)


def params_of(folder: Path, case: str) -> dict:
    """A case's weights as the engine has them."""
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    tensors = Weights(written(folder / "model", case, stored(case, "weight")))
    check_tensors(tensors, decoder_model.build(config_of(case)))
    return stacks(tensors, decoder_model.build(config_of(case)), "float32", device)


def check_equal_to_transformers(case: str, params: dict, *, logits_alone: bool = False) -> None:
    """Raises AssertionError unless logits, loss, all gradients and choices are those of the reference."""
    config = config_of(case)
    inputs, labels = REFERENCE[f"{case}/tokens"], REFERENCE[f"{case}/labels"]
    graph = nnx.graphdef(nnx.eval_shape(lambda: decoder.Decoder(config, rngs=nnx.Rngs(0))))
    logits = jax.jit(lambda w: nnx.merge(graph, w)(inputs))(params)
    close(logits, REFERENCE[f"{case}/logits"], "logits")
    if logits_alone:
        return
    small = Small(config=config)
    small.state = small.state._replace(weights=params)
    loss, grads = engine_gradients(small, (inputs[None], labels[None]))
    close(loss, REFERENCE[f"{case}/loss"], "loss")
    expected = stored(case, "grad")
    found = in_names(grads, small.run.model, case)
    biases = {name: found.pop(name) for name in [*found] if name.endswith(BIAS)}
    assert biases and not any(x.any() for x in biases.values())
    assert found.keys() == expected.keys()
    for name, x in found.items():
        close(without_ties(name, x), without_ties(name, expected[name]), f"gradient of {name}")
    small.state = jax.tree.map(lambda x: x.copy(), small.state)
    _, metrics = small.step(small.state, *small.put((inputs[None], labels[None])))
    chosen = np.asarray(metrics["statistics"]["blocks"].chosen_E)
    of_each, wanted = (without_ties("mlp.gate.weight", x.T) for x in (chosen, REFERENCE[f"{case}/chosen"]))
    assert np.array_equal(of_each, wanted) and not chosen[:, UNUSED].any()


@pytest.mark.parametrize("case", quick_at([(case,) for case in CASES], 0))
def test_logits_are_those_of_transformers(tmp_path, case):
    check_equal_to_transformers(case, params_of(tmp_path, case), logits_alone=True)


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_equals_transformers(tmp_path, case):
    """Loss, all gradients and choices, through the engine."""
    check_equal_to_transformers(case, params_of(tmp_path, case))


MISTAKES = {
    "the bias weighs, too": ("scores_of_chosen(score_BSE, chosen_BSk)", "scores_of_chosen(ranked_BSE, chosen_BSk)"),
    "nobody adds the bias": ("ranked_BSE = score_BSE + ", "ranked_BSE = score_BSE + 0 * "),
    "weights are not scaled": ("if c.routed_scaling_factor != 1:", "if False:"),
    "a softmax of the logits": ("score_BSE = jax.nn.sigmoid(logits_BSE)", "score_BSE = jax.nn.softmax(logits_BSE)"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_can_be_made(remade, mistake):  # noqa: F811
    remade(experts, *MISTAKES[mistake])


@pytest.mark.full
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed(tmp_path, remade, mistake):  # noqa: F811
    params = params_of(tmp_path, "glm4_moe")
    remade(experts, *MISTAKES[mistake])
    with pytest.raises(AssertionError):
        check_equal_to_transformers("glm4_moe", params)


@pytest.mark.parametrize("case", CASES)
def test_models_come_out_as_they_went_in(tmp_path, case):
    """To the bit, from files with a tensor for each expert and of all; the same config.json."""
    weights = stored(case, "weight")
    for files in (weights, apart(weights)):
        folder = written(tmp_path / f"in{len(files)}", case, files)
        out = convert.convert(folder, tmp_path / f"out{len(files)}", dtype="float32")
        chex.assert_trees_all_equal(safetensors.numpy.load_file(out / SINGLE), apart(weights))
        assert model_fields(read_config(out)) == model_fields(given(case))
    out = convert.convert(folder, tmp_path / "together", dtype="float32", experts_together=True)
    chex.assert_trees_all_equal(safetensors.numpy.load_file(out / SINGLE), weights)
    fields = model_fields(given(case))
    made = config_json.made(fields, 64, {})
    assert made["model_type"] == "glm4_moe" and config_json.agrees(made, fields)


@pytest.mark.parametrize("case", CASES)
def test_models_go_to_gguf_and_back(tmp_path, case):
    check_gguf_and_back(written(tmp_path / "in", case, stored(case, "weight")), tmp_path / "out.gguf")


def test_layers_that_predict_further_tokens_are_left_aside(tmp_path):
    """Published files have one behind the last layer, which transformers does not read either."""
    weights = stored("glm4_moe", "weight")
    further = {"model.layers.3.eh_proj.weight": np.zeros((24, 48), np.float32)}
    tensors = Weights(written(tmp_path / "model", "glm4_moe", weights | further, num_nextn_predict_layers=1))
    check_tensors(tensors, decoder_model.build(config_of("glm4_moe")))
    assert describe_source(tensors).endswith("1 tensors of layers are left aside")
    without = Weights(written(tmp_path / "without", "glm4_moe", weights | further))
    with pytest.raises(ConfigError, match=r"has model\.layers\.3\.eh_proj\.weight, which a model with this config"):
        check_tensors(without, decoder_model.build(config_of("glm4_moe")))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"n_group": None}, r"n_group: expected a number, got null"),
        ({"scoring_func": "softmax"}, r"config\.json has scoring_func, which may change"),
    ],
)
def test_models_that_are_not_computed_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        model_fields(given("glm4_moe") | changes)


DENSE = FOUR | {"model.first_k_dense_replace": 1}
SIGMOID = FOUR | {"model.scoring_func": "sigmoid"}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model.scoring_func": "sigmoid"}, r"^model\.scoring_func: expected 'softmax' with num_experts=0"),
        ({"model.n_shared_experts": 1}, r"^model\.n_shared_experts: expected 0 with num_experts=0"),
        (
            FOUR | {"model.first_k_dense_replace": 12},
            r"first_k_dense_replace: expected fewer than num_hidden_layers=12",
        ),
        (SIGMOID | {"router_z_loss_coef": 0.1}, r"^router_z_loss_coef: expected 0\.0 with scoring_func='sigmoid'"),
        (SIGMOID | {"master_dtype": "bfloat16"}, r"^master_dtype: expected 'float32' with scoring_func='sigmoid'"),
        (DENSE | {"pp_size": 2, "gpus": 2}, r"^model\.first_k_dense_replace: expected 0 with pp_size=2"),
        (
            DENSE | {"lora": True, "lora_target_modules": "experts.down_proj"},
            r"^lora_target_modules: expected a matrix of every layer, whatever its mixer, .*, got 'exp",
        ),
        (
            FOUR | {"lora": True, "lora_target_modules": "shared_experts.up_proj"},
            r"^lora_target_modules: expected names among q_proj, .*, got 'shared_experts.up_proj'",
        ),
    ],
)
def test_what_is_not_built_is_refused(changes, message):
    c = default_config()
    c.update_from_flattened_dict(changes)
    with pytest.raises(ConfigError, match=message):
        check(c)


@pytest.mark.full
def test_new_parameters_are_those_of_the_plain_model():
    """Layer by layer, of both segments."""
    plain = nnx.to_pure_dict(nnx.state(decoder.Decoder(SMALL, rngs=nnx.Rngs(jax.random.key(3))), nnx.Param))
    chex.assert_trees_all_equal(decoder_model.build(SMALL).init(3), plain)


@needs(8)
@pytest.mark.parametrize(
    "devices, placed",
    quick_at(
        [
            (4, {"zero_level": 3, "tp_size": 2, **ALL}),
            (4, {"zero_level": 3, "offload_weights": True, "resident_layers": 2}),
        ],
    ),
)
def test_placements_change_nothing(devices, placed):
    """Losses, gradients' norms, the router's losses; and no update moves the bias of the choice."""
    losses = RouterLosses(0.1, 0.0)
    expected = Small(config=SMALL, auxiliary=losses, microbatches_per_fetch=2)
    small = Small(devices, config=SMALL, auxiliary=losses, microbatches_per_fetch=2, **placed)
    batches = [tokens(2, 8, 16, seed=i) for i in range(2)]
    starts = (np.zeros((2, 8, 16), np.int32),) * bool(placed.get("packed"))
    before = np.asarray(small.state.master["blocks"]["mlp"]["b_choice"])
    found = small.train([(*batch, *starts) for batch in batches])
    np.testing.assert_allclose(found, expected.train(batches), rtol=ORDER_OF_SUMS)
    assert before.any() and np.array_equal(before, small.state.master["blocks"]["mlp"]["b_choice"])


def test_names_select_matrices_as_in_peft():
    """Ends of modules' names; "all-linear" leaves out experts, which are no modules in transformers 5."""

    def named(targets: str) -> set[str]:
        return set(target_names(targets, SMALL))

    assert named("up_proj") == {"mlp.w_up", "mlp.shared.w_up", "without_experts.mlp.w_up"}
    assert named("mlp.up_proj,shared_experts.up_proj") == {"mlp.shared.w_up", "without_experts.mlp.w_up"}
    assert named("experts.up_proj") == {"mlp.w_up"} and named("proj") == set()
    assert named("all-linear") == named("q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj") - {
        "mlp.w_gate",
        "mlp.w_up",
        "mlp.w_down",
    }


@pytest.mark.full
def test_adapters_are_those_of_peft(tmp_path):
    """Of experts, shared experts and the first layers' MLPs: logits beside them and merged, and what a run writes."""
    weights = {name: x.copy() for name, x in stored("glm4_moe", "weight").items()}
    for name, x in weights.items():
        if name.endswith("mlp.gate.weight"):
            x[TIED[1]] = -x[TIED[0]]
    base = written(tmp_path / "model", "glm4_moe", weights)
    opened = convert.open_model(base)
    names = naming_of(opened.config)
    adapter = peft.read_adapter(save_adapter(tmp_path / "adapter", "shared"), opened.model, names)
    expected = ADAPTERS["shared/logits"]
    assert np.abs(logits(base, "shared") - expected).max() > 0.1 * np.abs(expected).max()
    merged = convert.merge(base, [tmp_path / "adapter"], tmp_path / "merged", dtype="float32", say=lambda line: None)
    close(logits(merged, "shared"), expected, "logits of the merged model")
    of_experts = ",".join(f"experts.{part}_proj" for part in ("gate", "up", "down"))
    targets = f"q_proj,{of_experts},shared_experts.gate_proj,shared_experts.down_proj,mlp.up_proj"
    c = config(base, lora=True, lora_target_modules=targets, lora_rank=2, lora_alpha=3.0)
    run = from_config(c, make_mesh(jax.devices()[:1]), total_steps=1)
    assert set(lora(c).targets) == set(adapter.lora.targets)
    state = run.load_state(*peft.with_adapter(*readers(opened.tensors), adapter, run.model), reads_adapters=True)
    plain = plain_model(architecture(c))
    rows = [plain(state.weights, row[None]) for row in ADAPTERS["shared/tokens"]]
    close(np.concatenate(rows), expected, "logits")
    made = peft.AdapterArrays(lora(c), *peft.of_state(run.model, lora(c), state.master))
    out = peft.save_adapter(made, run.model, tmp_path / "out", naming=names)
    again = peft.read_adapter(out, opened.model, names)
    chex.assert_trees_all_equal(again.matrices, adapter.matrices)
    said = json.loads((out / "adapter_config.json").read_text())
    assert said["target_modules"] == ["q_proj"] and said["target_parameters"] == [
        "mlp.experts.gate_up_proj",
        "mlp.experts.down_proj",
        "shared_experts.gate_proj.weight",
        "shared_experts.down_proj.weight",
        "mlp.up_proj.weight",
    ]
    theirs = safetensors.numpy.load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    ours = safetensors.numpy.load_file(out / "adapter_model.safetensors")
    assert ours.keys() == theirs.keys()
    without = {name: x for name, x in theirs.items() if "base_layer" not in name}  # gate and up have twice the rank
    chex.assert_trees_all_equal({name: ours[name] for name in without}, without)


def test_names_of_modules_select_experts_only_if_the_file_has_them(tmp_path):
    """A list that transformers 4 wrote names all MLPs alike; one of transformers 5 has no modules of experts."""
    opened = convert.open_model(written(tmp_path / "model", "glm4_moe", stored("glm4_moe", "weight")))
    of_shared = "mlp.shared_experts.down_proj"
    tensors = {name: x for name, x in adapter_tensors("shared").items() if "q_proj" in name or of_shared in name}
    first = "base_model.model.model.layers.0.mlp.down_proj.lora_"
    tensors |= {f"{first}A.weight": np.ones((2, 36), np.float32), f"{first}B.weight": np.ones((24, 2), np.float32)}
    changes = {"target_modules": ["q_proj", "down_proj"], "target_parameters": None}
    save_adapter(tmp_path / "adapter", "shared", tensors, **changes)
    found = peft.read_adapter(tmp_path / "adapter", opened.model, naming_of(opened.config))
    assert set(found.lora.targets) == {"attention.wq", "mlp.shared.w_down", "without_experts.mlp.w_down"}
    assert found.matrices["without_experts.mlp.w_down"]["a"].shape == (1, 2, 36)
    named = changes | {"target_parameters": ["experts.down_proj"]}
    save_adapter(tmp_path / "named", "shared", tensors, **named)
    with pytest.raises(ConfigError, match=r"expected \S+mlp.experts.down_proj.lora_A.weight, got no such tensor"):
        peft.read_adapter(tmp_path / "named", opened.model, naming_of(opened.config))


@pytest.mark.parametrize("targets", quick_at([("q_proj,o_proj",), ("all-linear",), ("gate_proj,up_proj,down_proj",)]))
def test_adapters_train_in_both_segments(targets):
    """Of the attention, of shared experts and dense layers, and of all MLPs and experts."""
    adapted = dataclasses.replace(SMALL, lora=Lora(4, 8.0, target_names(targets, SMALL)))
    small = Small(config=adapted)
    inputs, labels = tokens(1, 4, 16)
    weights = jax.device_get(small.state.weights)
    _, found = engine_gradients(small, (inputs, labels))
    expected = jax.jit(jax.grad(plain_loss(adapted)))(weights, inputs, labels)
    assert found.keys() >= {"dense", "blocks"}
    assert ("w_up_lora" in found["dense"].get("mlp", {})) == (targets != "q_proj,o_proj")
    assert ("shared" in found["blocks"].get("mlp", {})) == (targets != "q_proj,o_proj")
    assert ("w_up_lora" in found["blocks"].get("mlp", {})) == ("gate_proj" in targets)
    assert worst_relative(found, part_of(expected, found)) < ORDER_OF_SUMS
