"""Adapters in PEFT's format against PEFT (fixtures/make_adapter_reference.py), merging, and what is refused.

That PEFT loads what is written here is recorded by that script's --check.
"""

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace

import chex
import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from commands import convert, train as command
from small import CONFIG, Small, needs, plain_model
from test_export import run_config, tensors_in
from test_huggingface import config, save_tokenizer, stored, write

from surojax import ConfigError, read_metrics, train
from surojax.assembly.from_config import architecture, from_config, lora, model as model_of
from surojax.config.fields import default_config
from surojax.exchange import merge, model_tensors, peft
from surojax.exchange.adapter_config import labels_of_adapter
from surojax.exchange.base import fingerprint
from surojax.exchange.merge import Merged, merged_matrix, there_and_back
from surojax.exchange.naming import Naming
from surojax.exchange.sources import open_weights, resolved
from surojax.models.lora import Lora
from surojax.numerics import nf4
from surojax.placement.mesh import make_mesh

REFERENCE = dict(np.load(Path(__file__).parent / "fixtures" / "adapter_reference.npz"))
CASES = ("lora", "dora")


def base_of(folder: Path, case: str) -> convert.Opened:
    """The base model of a case."""
    return convert.open_model(write(folder / "base", str(REFERENCE[f"{case}/base"])))


def theirs(case: str) -> dict[str, np.ndarray]:
    """The tensors that PEFT saved."""
    start = f"{case}/tensor/"
    return {name.removeprefix(start): array for name, array in REFERENCE.items() if name.startswith(start)}


def save(folder: Path, case: str, tensors=None, **changes) -> Path:
    """An adapter's folder as PEFT wrote it, but for these keys and tensors."""
    folder.mkdir(parents=True)
    said = json.loads(str(REFERENCE[f"{case}/adapter_config.json"])) | changes
    (folder / "adapter_config.json").write_text(json.dumps(said))
    safetensors.numpy.save_file(theirs(case) if tensors is None else tensors, folder / "adapter_model.safetensors")
    return folder


def logits(folder: Path, case: str) -> np.ndarray:
    """The plain model's logits of the model in a folder, for the case's tokens."""
    opened = convert.open_model(folder)
    on_cpu = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    tree = model_tensors.stacks(opened.tensors, opened.model, "float32", on_cpu)
    plain = plain_model(architecture(config(folder)))
    return np.concatenate([plain(tree, row[None]) for row in REFERENCE[f"{case}/tokens"]])


@pytest.mark.parametrize("case", CASES)
def test_a_merged_model_has_the_logits_of_peft(tmp_path, case, capsys):
    """DoRA on a model with biases, rsLoRA, embedding and head trained whole; float32 in another order of sums."""
    write(tmp_path / "base", str(REFERENCE[f"{case}/base"]))
    save(tmp_path / "adapter", case)
    convert.main(["merge", *(str(tmp_path / name) for name in ("base", "adapter", "out")), "--dtype", "float32"])
    assert capsys.readouterr().out.endswith(f"written: {tmp_path / 'out'}\n")
    expected = REFERENCE[f"{case}/logits"]
    assert np.abs(logits(tmp_path / "base", case) - expected).max() > 0.1 * np.abs(expected).max()
    np.testing.assert_allclose(logits(tmp_path / "out", case), expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("case", CASES)
def test_what_is_written_is_what_was_read(tmp_path, case):
    """Tensors under PEFT's names, and the keys that PEFT reads."""
    model = base_of(tmp_path, case).model
    adapter = peft.read_adapter(save(tmp_path / "theirs", case), model)
    trained = adapter._replace(
        lora=dataclasses.replace(adapter.lora, dropout=0.1), base="ab12", base_format="nf4 bfloat16"
    )
    out = peft.save_adapter(trained, model, tmp_path / "ours")
    assert {file.name for file in out.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    chex.assert_trees_all_equal(safetensors.numpy.load_file(out / "adapter_model.safetensors"), theirs(case))
    said = json.loads((out / "adapter_config.json").read_text())
    expected = json.loads(str(REFERENCE[f"{case}/adapter_config.json"]))
    differs = {"target_modules", "lora_dropout", "base_model_name_or_path"}
    assert all(said[key] == expected[key] for key in said.keys() - differs) and said["lora_dropout"] == 0.1
    assert {name.split(".")[-1] for name in expected["target_modules"]} == set(said["target_modules"])
    again = peft.read_adapter(out, model)
    assert (again.base, again.base_format, again.lora) == ("ab12", "nf4 bfloat16", adapter.lora)
    chex.assert_trees_all_equal((again.matrices, again.saved), (adapter.matrices, adapter.saved))
    peft.save_adapter(adapter, model, out)  # in place of the other
    assert peft.read_adapter(out, model).base == ""


def test_beside_an_image_encoder_names_are_those_of_the_whole_model(tmp_path):
    """As PEFT 0.21 names them in Gemma3ForConditionalGeneration, whose image encoder has a q_proj too."""
    model = base_of(tmp_path, "lora").model
    adapter = peft.read_adapter(save(tmp_path / "theirs", "lora"), model)
    out = peft.save_adapter(adapter, model, tmp_path / "ours", naming=Naming(in_whole=True))
    tensors = safetensors.numpy.load_file(out / "adapter_model.safetensors")
    of_text = "base_model.model.model.language_model.layers.1.self_attn.q_proj"
    np.testing.assert_array_equal(tensors[f"{of_text}.lora_A.weight"], adapter.matrices["attention.wq"]["a"][1])
    said = json.loads((out / "adapter_config.json").read_text())["target_modules"]
    assert re.fullmatch(said, "model.language_model.layers.1.self_attn.q_proj")
    assert not re.fullmatch(said, "model.vision_tower.encoder.layers.0.self_attn.q_proj")
    again = peft.read_adapter(out, model)
    chex.assert_trees_all_equal((again.matrices, again.lora), (adapter.matrices, adapter.lora))
    tower = f"{of_text}.lora_A.weight".replace("language_model", "vision_tower.encoder")
    safetensors.numpy.save_file(tensors | {tower: tensors[f"{of_text}.lora_A.weight"]}, out / peft.TENSORS)
    with pytest.raises(ConfigError, match=r"got base_model\.model\.model\.vision_tower"):
        peft.read_adapter(out, model)


def test_a_run_says_of_which_class_its_adapter_names_the_modules(tmp_path, monkeypatch):
    """Of Qwen3.5, transformers' AutoModelForCausalLM makes the language model alone, with other names."""
    monkeypatch.setattr(command, "write_adapter", lambda *_: tmp_path / "adapter")
    c = default_config()
    c.model_path = str(write(tmp_path / "base", "llama"))
    line = lambda: command.adapter_line(c, None, SimpleNamespace(identity={}), {})
    assert line() == f"adapter: {tmp_path}/adapter"
    text = json.loads((tmp_path / "base/config.json").read_text()) | {"model_type": "qwen3_5_text"}
    whole = {"model_type": "qwen3_5", "text_config": text, "vision_config": {}}
    (tmp_path / "base/config.json").write_text(json.dumps(whole))
    assert line().startswith(f"adapter: {tmp_path}/adapter, for ") and "AutoModelForImageTextToText" in line()


def test_target_modules_in_every_spelling(tmp_path):
    model = base_of(tmp_path, "lora").model
    spellings = (
        [
            f"model.layers.{l}.{name}"
            for l in (0, 1)
            for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
        ],
        r".*\.(q_proj|v_proj|down_proj)",
        ["self_attn.q_proj", "v_proj", "mlp.down_proj"],
    )
    for i, spelling in enumerate(spellings):
        found = peft.read_adapter(save(tmp_path / str(i), "lora", target_modules=spelling), model)
        assert set(found.lora.targets) == {"attention.wq", "attention.wv", "mlp.w_down"}


def test_merging_one_after_another_adds_up(tmp_path):
    """And numbers are rounded once, when they are written."""
    write(tmp_path / "base", "llama")
    folders = []
    for i, changes in enumerate(({}, {"lora_alpha": 2.5})):
        kept = {name: array for name, array in theirs("lora").items() if "lora_" in name}
        folders.append(save(tmp_path / str(i), "lora", kept, modules_to_save=None, **changes))
    out = convert.merge(tmp_path / "base", folders, tmp_path / "out", dtype="bfloat16", say=lambda line: None)
    name = "model.layers.1.self_attn.v_proj"
    a, b = (theirs("lora")[f"base_model.model.{name}.lora_{x}.weight"].astype(np.float64) for x in "AB")
    expected = stored("llama")[f"{name}.weight"] + (6 / 4 + 2.5 / 4) * (b @ a)
    found = tensors_in(out)[f"{name}.weight"]
    assert found.dtype == ml_dtypes.bfloat16
    np.testing.assert_allclose(found.astype(np.float64), expected, rtol=2**-8, atol=1e-6)
    untouched = "model.layers.1.self_attn.o_proj.weight"
    np.testing.assert_array_equal(tensors_in(out)[untouched], stored("llama")[untouched].astype(ml_dtypes.bfloat16))


def test_a_row_of_zeros_stays_one_under_dora():
    w, a, b = np.eye(4, 8, dtype=np.float32), np.ones((2, 8), np.float32), np.zeros((4, 2), np.float32)
    w[1] = 0
    magnitude = np.array([2.0, 0.0, 1.0, 1.0], np.float32)
    np.testing.assert_array_equal(merged_matrix(w, a, b, magnitude, scale=1.0), magnitude[:, None] * w)


def test_a_base_that_was_frozen_in_nf4_is_merged_in_nf4():
    """The adapter's numbers are added to the dequantised ones, which bitsandbytes' layout determines."""
    random = np.random.RandomState(3)
    w, a, b = (random.standard_normal(shape).astype(np.float32) for shape in ((8, 128), (2, 128), (8, 2)))
    rounded = np.asarray(jax.jit(lambda w: nf4.dequantise(nf4.quantise(w, nf4.planned(w.shape)), "float32"))(w))
    np.testing.assert_array_equal(there_and_back(w, "nf4", "float32"), rounded)
    assert there_and_back(w, "nf4", "bfloat16").dtype == ml_dtypes.bfloat16
    np.testing.assert_allclose(merged_matrix(rounded, a, b, None, 0.5), rounded + 0.5 * b @ a, rtol=1e-5, atol=1e-6)


# -- Refusals ---------------------------------------------------------------------------------------------------------


def test_the_wrong_base_is_refused_by_its_hash(tmp_path):
    """One number of the last layer is enough; another dtype of the same numbers is not."""
    opened = base_of(tmp_path, "lora")
    halves = {name: array.astype(ml_dtypes.bfloat16) for name, array in stored("llama").items()}
    hashes = [fingerprint(opened.tensors, opened.model)]
    for name, change in (("halves", 0), ("doubled", 0), ("other", 1)):
        tensors = dict(halves)
        if name == "doubled":
            tensors = {name: array.astype(np.float32) for name, array in halves.items()}
        tensors["model.layers.1.mlp.down_proj.weight"] = tensors["model.layers.1.mlp.down_proj.weight"] + change
        found = convert.open_model(write(tmp_path / name, "llama", tensors=tensors))
        hashes.append(fingerprint(found.tensors, found.model))
    assert hashes[1] == hashes[2] and len(set(hashes)) == 3
    adapter = peft.read_adapter(save(tmp_path / "adapter", "lora"), opened.model)
    Merged(opened.tensors, adapter._replace(base=hashes[0]), opened.model)
    said = f"^adapter: expected the model.*{hashes[3][:12]}, got .*; give that model, and before this adapter those"
    with pytest.raises(ConfigError, match=said):
        Merged(opened.tensors, adapter._replace(base=hashes[3]), opened.model)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"peft_type": "IA3"}, "peft_type: expected 'LORA', got 'IA3'; give another adapter"),
        ({"bias": "all"}, "bias: expected 'none', got 'all'; nothing else is computed here"),
        ({"layers_to_transform": [0]}, "layers_to_transform: expected it off, got [0]; nothing else is computed here"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern: expected it off, got {'q_proj': 2}; nothing"),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern: expected it off, got {'q_proj': 2}; nothing"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights: expected True, got 'pissa'; nothing"),
        ({"use_qalora": True}, "use_qalora: expected it off, got True; nothing"),
        ({"lora_bias": True}, "lora_bias: expected it off, got True; nothing"),
        ({"something_new": 1}, "something_new: expected it off, got 1; nothing"),
        ({"r": 0}, "r: expected a whole number from 1 to 65,536, got 0; give another adapter"),
        ({"r": True}, "r: expected a whole number from 1 to 65,536, got True; give another adapter"),
        ({"lora_alpha": "8"}, "lora_alpha: expected a number more than 0, got '8'; give another adapter"),
        ({"target_modules": ["c_attn"]}, "target_modules: expected modules among down_proj, gate_proj, k_proj, "),
        ({"target_modules": ["q_proj", "lm_head"]}, "target_modules: expected modules among down_proj, "),
        ({"target_modules": []}, "target_modules: expected modules among down_proj, "),
        ({"target_modules": None}, "target_modules: expected names of modules, got None; give another adapter"),
        (
            {"target_modules": ["layers.0.self_attn.q_proj"]},
            "target_modules: expected attention.wq in every layer or in none, got none for model.layers.1.self_attn.",
        ),
        ({"modules_to_save": ["norm"]}, "modules_to_save: expected names among embed_tokens, lm_head, got ['norm']; "),
        (
            {"modules_to_save": ["classifier"]},
            "modules_to_save: expected names among embed_tokens, lm_head, got ['class",
        ),
    ],
)
def test_what_is_not_computed_is_refused_by_name(tmp_path, changes, message):
    model = base_of(tmp_path, "lora").model
    with pytest.raises(ConfigError) as error:
        peft.read_adapter(save(tmp_path / "adapter", "lora", **changes), model)
    assert f"adapter_config.json: {message}" in str(error.value) and "\n" not in str(error.value)


def test_tensors_that_do_not_belong_to_the_model_are_refused(tmp_path):
    model = base_of(tmp_path, "lora").model
    q = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
    tensors = theirs("lora")
    cases = {
        f"the most similar being {q.replace('.q_', '.v_')!r}; save the adapter again": {q},
        **{
            f"in a model of 2 layers, got {name}; give an adapter of this model": name
            for name in ("base_model.model.model.layers.7.x", q.removeprefix("base_model.model."))
        },
        f"{q}: expected rank 4, as adapter_config.json says, got [2, 32]; save the adapter again": (2, 32),
        f"{q}: expected [4, 32], got [4, 48]; give an adapter of this model": (4, 48),
    }
    for i, (message, change) in enumerate(cases.items()):
        changed = dict(tensors)
        if isinstance(change, set):
            del changed[q]
        elif isinstance(change, str):
            changed[change] = np.zeros(3, np.float32)
        else:
            changed[q] = np.zeros(change, np.float32)
        with pytest.raises(ConfigError) as error:
            peft.read_adapter(save(tmp_path / str(i), "lora", changed), model)
        assert str(error.value).endswith(message)


def test_an_adapter_beside_a_base_in_an_unknown_format_is_refused(tmp_path):
    folder = save(tmp_path / "adapter", "lora")
    safetensors.numpy.save_file(theirs("lora"), folder / peft.TENSORS, {peft.BASE_FORMAT: "nf3"})
    with pytest.raises(ConfigError, match=rf"{peft.BASE_FORMAT}: expected one of .*, got 'nf3'; give another adapter$"):
        peft.read_adapter(folder, base_of(tmp_path, "lora").model)


def test_an_adapter_that_was_saved_without_a_task_type_is_read(tmp_path):
    """PEFT writes the class of the base in its place; and it turns fan_in_fan_out off for linear layers."""
    model = base_of(tmp_path, "lora").model
    base = {"base_model_class": "LlamaForCausalLM", "parent_library": "transformers.models.llama.modeling_llama"}
    changes = {"task_type": None, "auto_mapping": base, "fan_in_fan_out": True}
    found = peft.read_adapter(save(tmp_path / "without", "lora", **changes), model)
    expected = peft.read_adapter(save(tmp_path / "with", "lora"), model)
    chex.assert_trees_all_equal(found.matrices, expected.matrices)
    assert found.lora == expected.lora
    for name, labels in (("without", 0), ("with", 0), ("classifier", 1)):
        if name == "classifier":
            changes["auto_mapping"] = base | {"base_model_class": "LlamaForSequenceClassification"}
            save(tmp_path / name, "lora", **changes)
        assert labels_of_adapter(tmp_path / name) == labels


def test_folders_of_something_else_are_told(tmp_path):
    model = base_of(tmp_path, "lora").model
    save(tmp_path / "outer" / "default", "lora")
    pickled = save(tmp_path / "pickled", "lora")
    (pickled / peft.TENSORS).rename(pickled / "adapter_model.bin")
    for folder, message in (
        (tmp_path / "outer", "give one that PEFT or a run wrote, such as the one in its folder default"),
        (tmp_path / "base", "give one that PEFT or a run wrote; it has a whole model, for model_path"),
        (pickled, "it has adapter_model.bin, which may run code and is not read: load and save it with PEFT"),
    ):
        with pytest.raises(ConfigError, match=rf"^adapter: .*{message}$"):
            peft.read_adapter(folder, model)


def test_a_folder_without_an_adapter_is_refused(tmp_path):
    opened = base_of(tmp_path, "lora")
    for folder in (tmp_path / "base", tmp_path / "nothing"):
        with pytest.raises(
            ConfigError, match=r"^adapter: expected a folder with adapter_config\.json, got .*; give one"
        ):
            peft.read_adapter(folder, opened.model)
    folder = save(tmp_path / "adapter", "lora")
    (folder / "adapter_model.safetensors").write_bytes(b"{}")
    with pytest.raises(ConfigError, match=r"^adapter: cannot read .*; save the adapter again$"):
        peft.read_adapter(folder, opened.model)
    tied = write(tmp_path / "tied", "llama3_rope")
    expected = "modules_to_save: expected none for a model whose head is its embedding"
    with pytest.raises(ConfigError, match=expected):
        peft.read_adapter(save(tmp_path / "saved", "lora"), convert.open_model(tied).model)


def test_the_command_without_enough_is_one_line(tmp_path):
    with pytest.raises(SystemExit, match=r"^surojax\.convert: error: the following arguments are required: "):
        convert.main(["merge", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"^surojax\.convert: error: --dtype: expected one of "):
        convert.main(["merge", *(str(tmp_path / name) for name in ("a", "b", "c")), "--dtype", "int8"])


# -- In a run ---------------------------------------------------------------------------------------------------------

SETTINGS = {"lora": True, "lora_rank": 3, "lora_target_modules": "q_proj,down_proj", "use_dora": True}


@pytest.mark.full
@needs(2)
def test_adapters_of_a_random_base_are_not_exported(tmp_path):
    """Its model_path gives only the sizes: merged into that model's weights they would be another model's."""
    c = run_config(tmp_path, write(tmp_path / "base", "llama"))
    c.update(lora=True, from_scratch=True)
    with pytest.raises(ConfigError, match=r"--export: expected adapters of a model_path, got those of a random base"):
        convert.check_exportable(resolved(c), tmp_path / "out")


def test_padding_of_uneven_stages_is_not_in_an_adapter(tmp_path):
    """Three layers in two stages: the stacks have four, and the file is that of one device to the bit."""
    adapted = Lora(2, 8.0, ("attention.wq",), magnitudes=True)
    files = []
    for stages, stacked in ((1, 3), (2, 4)):
        small = Small(stages, config=dataclasses.replace(CONFIG, lora=adapted), pp_size=stages)
        master = jax.tree.map(lambda p: np.zeros(p.shape, p.dtype), small.plan.master)
        assert len(master["blocks"]["attention"]["wq_lora"]["a"]) == stacked
        for number, layers in enumerate(jax.tree.leaves(master["blocks"])):
            layers[:3] = np.random.default_rng(number).standard_normal(layers[:3].shape)
        found = peft.AdapterArrays(adapted, *peft.of_state(small.run.model, adapted, master))
        assert {len(stack) for stack in found.matrices["attention.wq"].values()} == {3}
        out = peft.save_adapter(found, small.run.model, tmp_path / str(stages))
        files.append((out / peft.TENSORS).read_bytes())
    assert files[0] == files[1]


def test_a_run_begins_with_the_adapter_that_another_wrote(tmp_path):
    """Every array of the state, to the bit; under ZeRO-3 on four devices."""
    c = config(write(tmp_path / "base", "llama"), **SETTINGS, modules_to_save="lm_head", zero_level=3)
    run = from_config(c, make_mesh(jax.devices()[:4]), total_steps=1)
    weights_of_base = open_weights(c, run.model)
    assert weights_of_base is not None
    read = model_tensors.readers(weights_of_base)
    state = run.load_state(*read, 5)
    moved = state._replace(master=jax.tree.map(lambda x: x + 0.25, state.master))
    found = peft.AdapterArrays(lora(c), *peft.of_state(run.model, lora(c), moved.master))
    folder = peft.save_adapter(found, run.model, tmp_path / "adapter")
    again = peft.read_adapter(folder, run.model)
    peft.check_continues(again, lora(c), "", str(folder))
    loaded = run.load_state(*peft.with_adapter(*read, again, run.model), reads_adapters=True)
    chex.assert_trees_all_equal(jax.device_get(loaded.master), jax.device_get(moved.master))
    frozen = state.weights["blocks"]["mlp"]["w_up"]
    chex.assert_trees_all_equal(loaded.weights["blocks"]["mlp"]["w_up"], frozen)


# Another value of each setting that an adapter fixes, and how the message names both.
OTHERS = {
    "lora_rank": (4, "expected 3, as lora_adapter there has it, got 4; set it so"),
    "lora_alpha": (7.0, "expected 32.0, as lora_adapter there has it, got 7.0; set it so"),
    "lora_target_modules": (
        "q_proj",
        "expected attention.wq, mlp.w_down, as lora_adapter there has it, got attention.wq",
    ),
    "modules_to_save": ("lm_head", "expected none, as lora_adapter there has it, got head; set it so"),
    "use_rslora": (True, "expected False, as lora_adapter there has it, got True; set it so"),
    "use_dora": (False, "expected True, as lora_adapter there has it, got False; set it so"),
}


@pytest.mark.parametrize("name", peft.CONTINUED)
def test_an_adapter_with_other_settings_is_refused(tmp_path, name):
    """In both directions: what the run says, and what the adapter has."""
    folder = write(tmp_path / "base", "llama")
    value, message = OTHERS[name]
    own, other = (lora(config(folder, **SETTINGS | change)) for change in ({}, {name: value}))
    assert dataclasses.replace(own, **{peft.CONTINUED[name]: getattr(other, peft.CONTINUED[name])}) == other != own
    peft.check_continues(peft.AdapterArrays(other, {}, {}), other, "cd", "there")
    with pytest.raises(ConfigError) as error:
        peft.check_continues(peft.AdapterArrays(own, {}, {}), other, "cd", "there")
    assert str(error.value).startswith(f"{name}: {message}")
    with pytest.raises(ConfigError, match=f"^{name}: expected"):
        peft.check_continues(peft.AdapterArrays(other, {}, {}), own, "cd", "there")


def test_an_adapter_fixes_every_setting_that_its_numbers_depend_on():
    of_training = {"dtype", "learning_rate_ratio", "dropout"}
    assert {field.name for field in dataclasses.fields(Lora)} == {*peft.CONTINUED.values(), *of_training}


def test_an_adapter_of_another_base_is_refused(tmp_path):
    settings = lora(config(write(tmp_path / "base", "llama"), **SETTINGS))
    message = "^lora_adapter: expected one that was trained on model_path, whose hash begins with cd, got there of ab; "
    with pytest.raises(ConfigError, match=message):
        peft.check_continues(peft.AdapterArrays(settings, {}, {}, base="ab"), settings, "cd", "there")
    peft.check_continues(peft.AdapterArrays(settings, {}, {}), settings, "cd", "there")  # PEFT's own has no hash


def test_a_base_adapter_is_part_of_the_base(tmp_path, monkeypatch):
    """The run's base is the model with it, under its own hash, which no order of sums changes."""
    folder = write(tmp_path / "base", "llama")
    other = save(tmp_path / "adapter", "lora")
    c = config(folder, lora=True, lora_rank=2, lora_base_adapter=str(other))
    opened = convert.open_model(folder)
    found = open_weights(c, opened.model)
    assert found is not None
    merged_by_hand = Merged(opened.tensors, peft.read_adapter(other, opened.model), opened.model)
    for name in ("model.layers.1.mlp.down_proj.weight", "lm_head.weight"):
        np.testing.assert_array_equal(found.read(name), merged_by_hand.read(name))
        assert not np.array_equal(found.read(name), opened.tensors.read(name))
    first = fingerprint(found, opened.model)
    assert first != fingerprint(opened.tensors, opened.model)
    adapter = peft.read_adapter(other, opened.model)
    target, stacks = next(iter(adapter.matrices.items()))
    changed = adapter._replace(matrices=adapter.matrices | {target: stacks | {"b": stacks["b"] * 1.0001}})
    assert fingerprint(Merged(opened.tensors, changed, opened.model), opened.model) != first
    twice = Merged(merged_by_hand, adapter, opened.model)
    assert fingerprint(twice, opened.model) not in (first, fingerprint(opened.tensors, opened.model))
    monkeypatch.setattr(
        merge, "merged_matrix", lambda w, *others: np.nextafter(merged_matrix(w, *others), np.float32(1))
    )
    assert fingerprint(merged_by_hand, opened.model) == first


@pytest.mark.full
@pytest.mark.parametrize("base", ["", "qlora_bnb"])
def test_a_merged_model_has_the_loss_of_the_run(tmp_path, base):
    """A run's last evaluation, and the first of a run from what was merged: float32 in another order of sums."""
    folder = write(tmp_path / "base", "llama", tensors={}, hidden_size=64, head_dim=16, intermediate_size=128)
    random = np.random.RandomState(0)
    shapes = model_tensors.shapes(model_of(config(folder)))
    tensors = {name: (0.1 * random.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}
    safetensors.numpy.save_file(tensors, folder / model_tensors.SINGLE)
    save_tokenizer(folder / "tokenizer.json")
    c = run_config(tmp_path, folder)
    c.update(SETTINGS | ({base: True} if base else {}) | {"learning_rate": 5e-2})
    train(c)
    out = convert.merge(
        folder, [tmp_path / "run" / "adapter"], tmp_path / "out", dtype="float32", say=lambda line: None
    )
    of_run = convert.convert(tmp_path / "run", tmp_path / "of_run", dtype="float32", say=lambda line: None)
    found, expected = (safetensors.numpy.load_file(x / model_tensors.SINGLE) for x in (of_run, out))
    chex.assert_trees_all_equal(found, expected)
    after = run_config(tmp_path, out)
    after.output_dir = str(tmp_path / "after")
    train(after)
    first = [r["loss"] for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if r["log"] == "eval"]
    second = [r["loss"] for r in read_metrics(tmp_path / "after" / "metrics.jsonl") if r["log"] == "eval"]
    assert abs(first[-1] - first[0]) > 1e-3
    np.testing.assert_allclose(second[0], first[-1], rtol=2e-6)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_an_adapter_in_16_bits_is_read_as_float32(tmp_path, dtype):
    rounded = {name: array.astype(dtype) for name, array in theirs("lora").items()}
    model = base_of(tmp_path, "lora").model
    found = peft.read_adapter(save(tmp_path / "adapter", "lora", rounded), model)
    exact = {name: array.astype(np.float32) for name, array in rounded.items()}
    expected = peft.read_adapter(save(tmp_path / "exact", "lora", exact), model)
    chex.assert_trees_all_equal((found.matrices, found.saved), (expected.matrices, expected.saved))
    assert {array.dtype for array in jax.tree.leaves((found.matrices, found.saved))} == {np.dtype(np.float32)}
