"""Names of models on the hub: found in a cache without a network, by the hub's own library; else one line."""

import shutil
from pathlib import Path

import huggingface_hub
import pytest
from commands import generate
from huggingface_hub import constants
from test_huggingface import save_tokenizer, stored, write

from surojax import ConfigError, default_config
from surojax.exchange import hub
from surojax.exchange.model_tensors import Weights
from surojax.exchange.sources import is_model, keeps, locate, resolved


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and no network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "cache"


def fill(cache, name: str):
    """The cache with a model, as the library lays it out."""
    of_model = cache / f"models--{name.replace('/', '--')}"
    (of_model / "refs").mkdir(parents=True)
    (of_model / "refs" / "main").write_text("0" * 40)
    (of_model / "snapshots").mkdir()
    folder = write(of_model / "snapshots" / ("0" * 40), "llama", shards=2)
    save_tokenizer(folder / "tokenizer.json")
    return folder


def test_a_name_is_found_in_the_cache(cache):
    folder = fill(cache, "owner/tiny-llama")
    assert is_model("owner/tiny-llama") and locate("owner/tiny-llama", weights=True) == folder
    c = default_config()
    c.model_path = "owner/tiny-llama"
    c = resolved(c)
    assert (c.model_path, c.model.vocab_size, c.tokenizer) == ("owner/tiny-llama", 96, str(folder))
    _, weights, tokenizer, *_ = generate.load_trained("owner/tiny-llama")
    expected = stored("llama")["model.layers.1.mlp.up_proj.weight"]
    assert (weights["blocks"]["mlp"]["w_up"][1] == expected).all() and tokenizer.vocab_size == 62
    assert Weights(folder).names == stored("llama").keys()


def test_what_is_no_name_is_asked_of_nobody(tmp_path, monkeypatch):
    """A folder that is there, files, and paths; a folder is a model if it has a config.json."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "download", lambda *_, **__: pytest.fail("the hub was asked"))
    for name in ("owner/model", "owner/other"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "owner/model/config.json").write_text("{}")
    answers = {"owner/model": True, "owner/other": False, "owner/gone.gguf": True, "../gone": False, "a/b/c": False}
    for name, expected in answers.items():
        assert is_model(name) is expected and locate(name, weights=True) == Path(name), name


def test_only_what_is_needed_is_fetched(monkeypatch):
    asked = {}

    def snapshot_download(name, allow_patterns):
        asked[name] = allow_patterns
        return "somewhere"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    hub.download("a/small", weights=False)
    hub.download("a/all", weights=True)
    assert "config.json" in asked["a/small"] and not any("safetensors" in x for x in asked["a/small"])
    assert {*asked["a/all"]} - {*asked["a/small"]} == {"model*.safetensors", "model.safetensors.index.json"}
    assert not any(pattern in asked["a/all"] for pattern in ("*", "*.bin", "*.pth", "*.gguf"))


def test_a_name_that_is_nowhere_is_refused_in_one_line(cache, tmp_path):
    c = default_config()
    c.model_path = "owner/nothing"
    message = (
        r"^model_path: expected a model's folder or its name on the hub, got 'owner/nothing': there is no such folder, "
        r"the cache .*cache does not have it, and the hub said: [^\n]+; fetch it where there is a network, [^\n]*$"
    )
    with pytest.raises(ConfigError, match=message):
        resolved(c)
    c.model_path = str(tmp_path / "no" / "folder")
    with pytest.raises(ConfigError, match=r"^model_path: expected a folder with config\.json, got .*/no/folder"):
        resolved(c)
    shutil.rmtree(fill(cache, "owner/nothing"))
    with pytest.raises(ConfigError, match=r"^model_path: .*'owner/nothing'"):
        c.model_path = "owner/nothing"
        resolved(c)
    assert not keeps(tmp_path, "owner/nothing")
