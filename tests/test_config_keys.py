"""Keys of config.json: those that change nothing pass, and the others compute what transformers computes.

`fixtures/owned_keys.json` and `fixtures/config_keys.npz` are transformers' word, see the scripts beside them.
"""

import contextlib
import json
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from exports import of_each
from small import quick_at

from surojax import ConfigError, default_config
from surojax.assembly.from_config import architecture
from surojax.config.checks import check
from surojax.exchange.huggingface import LISTS, model_fields
from surojax.exchange.model_tensors import SINGLE, Weights, readers
from surojax.exchange.parts import text_config
from surojax.families import neutral
from surojax.families.family import REQUIRED
from surojax.families.registry import FAMILIES
from surojax.models import decoder_model
from surojax.models.decoder_config import DecoderConfig
from surojax.step.outer import first_input

FIXTURES = Path(__file__).parent / "fixtures"
OWNED = json.loads((FIXTURES / "owned_keys.json").read_text())

# Attributes of the classes that files do not have, and keys that every family declares by itself.
NO_KEYS = set(
    "_auto_class _post_init_done attribute_map base_config_key base_model_ep_plan base_model_pp_plan "
    "base_model_tp_plan has_no_defaults_at_init is_composition sub_configs _bos_token_tensor _eos_token_tensor "
    "_decoder_start_token_tensor _pad_token_tensor _mask_length _original_object_hash".split()
)
DECLARED = {"rope_theta", "tie_word_embeddings"}
MAY_COMPUTE = {"per_layer_config": {"0": {"sliding_window": 3}}, "pruned_heads": {"0": [1]}}


def test_keys_that_transformers_owns_are_known():
    """Of five versions: neutral, off with a value, or refused because they may compute."""
    owned = {key for version in OWNED.values() for keys in version.values() for key in keys}
    assert len(OWNED) == 5 and len(owned) > 120
    known = neutral.NEUTRAL | neutral.OFF.keys() | NO_KEYS | DECLARED | MAY_COMPUTE.keys()
    assert owned - known == set()


PUBLISHED: dict[str, Any] = {  # of SmolLM2-135M and others, and what tools write
    "is_llama_config": True,
    "rope_interleaved": False,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
    "cross_attention_hidden_size": None,
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    "pruned_heads": {},
    "neftune_noise_alpha": 5.0,
    "unsloth_version": "2025.3.19",
    "unsloth_fixed": True,
    "model_name": "a/b",
    "tokenizer_padding_side": "left",
    "tokenizer_model_max_length": 2048,
    "model_max_length": 2048,
    "pretraining_tp": 2,
    "tie_last_hidden_states": False,
    "_attn_implementation_autoset": True,
    "_flash_attn_2_enabled": True,
    "_experts_implementation_internal": "eager",
    "_attn_implementation": "flash_attention_2",
    "per_layer_config": None,
    "some_later_key": None,
    "another": [],
    **{key: 1 for key in ("max_length", "do_sample", "temperature", "torchscript", "num_beams", "top_p", "prefix")},
}


# What config.json has to say of a family's models that are computed; and keys that say something there.
LEAST: dict[str, dict[str, Any]] = {"gemma4_text": {"hidden_size_per_layer_input": 0}}
SAID = {"gemma4_text": ("per_layer_config",), "gemma4_unified_text": ("per_layer_config",)}


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_that_change_nothing_pass(family):
    least = {"model_type": family} | LEAST.get(family, {})
    plain = model_fields(least)
    published = {key: value for key, value in PUBLISHED.items() if key not in SAID.get(family, ())}
    assert model_fields(least | published) == plain
    assert model_fields(least | dict.fromkeys(neutral.UNREAD - {"model_type"})) == plain
    for key, values in neutral.OFF.items():
        for value in (*values, None):
            assert model_fields(least | {key: value}) == plain
        expected = [*values, None][0]
        with pytest.raises(ConfigError, match=rf"{key}: expected {expected!r}, got 'on'; nothing else is computed"):
            model_fields(least | {key: "on"})
    for key, value in MAY_COMPUTE.items():
        with pytest.raises(
            ConfigError,
            match=f"config.json: {key}"
            if key in SAID.get(family, ())
            else f"config.json has {key}, which may change what the model computes",
        ):
            model_fields(least | {key: value})


OF_TYPES = {bool: (0, 1, "true", [True]), float: (True, False, "1.5", [1.5], {"a": 1}), int: (True, "1", 2.5, 4.0, [1])}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_has_a_value_of_its_type(family):
    """True is no 1, and 0 no false, also in lists and in a rotary embedding's numbers."""
    declared = FAMILIES[family]
    values = {key: allowed[0] for key, allowed in (REQUIRED | neutral.OFF | declared.required).items() if allowed}
    values |= declared.defaults | {"max_position_embeddings": 64, "max_window_layers": 2, "use_sliding_window": False}
    kinds = {key: float if value is None else type(value) for key, value in values.items()}
    lists = [key for key in LISTS if key in declared.defaults or key in neutral.NEUTRAL]
    kinds |= dict.fromkeys(lists, list)
    cases = [(key, bad) for key, kind in kinds.items() for bad in OF_TYPES.get(kind, ())]
    cases += [(key, bad) for key in lists for bad in (False, {}, 1, "a", [True])]
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    for name, bad in (("factor", True), ("factor", "4"), ("attention_factor", True), ("truncate", 1)):
        cases += [(key, yarn | {name: bad}) for key in ("rope_parameters", "rope_scaling")]
    cases += [("rope_parameters", {"full_attention": yarn | {"factor": True}})]
    assert len(cases) > 80
    for key, bad in cases:
        with pytest.raises(ConfigError, match=rf"config.json: {key}[\w.]*: expected "):
            model_fields({"model_type": family, key: bad})


def test_what_yarn_leaves_out_follows_from_the_lengths():
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 1024}
    given = {"model_type": "llama", "max_position_embeddings": 8192}
    found = model_fields(given | {"rope_parameters": rope})
    assert (found["rope_factor"], found["rope_beta_fast"], found["rope_beta_slow"]) == (8.0, 32.0, 1.0)
    assert found["rope_attention_factor"] == 0.0 and found["rope_truncate"] is True
    scaled = model_fields(given | {"rope_parameters": rope | {"mscale": 2.0, "mscale_all_dim": 1.0}})
    stretch = 0.1 * np.log(8)
    assert scaled["rope_attention_factor"] == pytest.approx((2 * stretch + 1) / (stretch + 1))


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("window", [None, 8])
def test_layers_of_a_family_whose_layers_are_alike(window, full):
    """Layers without the window are refused only where there is one, and layers with it where there is none."""
    types = ["full_attention" if full else "sliding_attention"] * 2
    given = {"model_type": "mixtral", "sliding_window": window, "num_hidden_layers": 2}
    plain = model_fields(given)
    assert plain["sliding_window"] == (window or 0)
    if full == (window is None):
        assert model_fields(given | {"layer_types": types}) == plain
    else:
        with pytest.raises(ConfigError, match=r"layer_types|sliding_window"):
            model_fields(given | {"layer_types": types})


def test_keys_beside_the_text_of_an_image_model():
    whole = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}
    assert text_config(whole | PUBLISHED) == text_config(whole)
    for key, value in {**MAY_COMPUTE, "rope_interleaved": True, "layer_types": ["full_attention"]}.items():
        with pytest.raises(ConfigError, match=f"config.json has {key}, which may change"):
            text_config(whole | {key: value})


# --- transformers' own logits -----------------------------------------------------------------------------------------

with np.load(FIXTURES / "config_keys.npz") as arrays:
    BASE, CHANGES, ERRORS, SHAPES, OTHER = (
        json.loads(str(arrays[f"{name}.json"])) for name in ("base", "changes", "errors", "shapes", "other")
    )
    ROWS, LOGITS = arrays["rows"], arrays["logits"]
TOKENS = np.array([[3, 7, 1, 12, 5, 9, 2, 14, 6, 11, 4, 8]])
# Of the largest logit. Sums in another order are off by up to 1.3e-4 (Granite-MoE, whose scores nothing divides);
# changes of windows and rotary embeddings differ by 2e-3 at least.
TOLERANCE = 2e-4


LOCAL = "num_local_experts"


class Verdict(NamedTuple):
    """What transformers makes of a change: logits [S, V], or None and the error that it raises."""

    logits: np.ndarray | None
    error: str


def verdicts(family: str) -> list[Verdict]:
    rows = ROWS[[*BASE].index(family)]
    of_rows = (Verdict(None, ERRORS[-1 - row]) if row < 0 else Verdict(LOGITS[row], "") for row in rows)
    return [Verdict(None, "NaN") if x.logits is not None and np.isnan(x.logits).any() else x for x in of_rows]


def architecture_of(config: dict[str, Any]) -> DecoderConfig:
    """As `sources.resolved` makes it. Raises ConfigError."""
    return made_of(model_fields(config))


def made_of(fields: dict[str, Any]) -> DecoderConfig:
    """The architecture with these fields of `model`. Raises ConfigError."""
    c = default_config()
    try:
        c.model.update(c.model.to_dict() | fields)
    except TypeError as error:
        raise ConfigError(str(error)) from error
    check(c)
    return architecture(c)


def read_as(family: str) -> dict[DecoderConfig, list[int]]:
    """The changes that are read, by what they are read as."""
    same_fields: dict[str, tuple[dict[str, Any], list[int]]] = {}
    for i, change in enumerate(CHANGES):
        with contextlib.suppress(ConfigError):
            fields = model_fields(BASE[family] | change)
            same_fields.setdefault(repr(fields), (fields, []))[1].append(i)
    found: dict[DecoderConfig, list[int]] = {}
    for fields, numbers in same_fields.values():
        with contextlib.suppress(ConfigError):
            found.setdefault(made_of(fields), []).extend(numbers)
    return found


def is_more_than_transformers(change: dict[str, Any], error: str) -> bool:
    """True for what transformers 5 refuses and earlier versions, or other spellings of it, compute."""
    rope = change.get("rope_scaling") or change.get("rope_parameters") or {}
    is_inferred = rope.get("rope_type") == "yarn" and "factor" not in rope  # from the two lengths, as in transformers 4
    # A whole number for a float, null for a switch; and null for what the class has no default of, or does not expect.
    is_of_type = error.startswith("StrictDataclassFieldValidationError")
    none = [{key: None} for key in ("head_dim", "num_experts", "layer_types", "rope_scaling", LOCAL)]
    return is_inferred or is_of_type or change in none


@pytest.mark.parametrize("family", BASE)
def test_what_transformers_refuses_is_refused_and_one_architecture_has_one_result(family):
    """A key that transformers reads and the family's reader does not would make two logits of one architecture."""
    assert [*BASE] == [*FAMILIES] and len(CHANGES) > 400
    of_all = verdicts(family)
    accepted = read_as(family)
    assert len(accepted) > 10 and of_all[0].logits is not None
    for numbers in accepted.values():
        results = {i: logits for i in numbers if (logits := of_all[i].logits) is not None}
        first = next(iter(results), 0)
        for i, logits in results.items():
            assert np.array_equal(logits, results[first]), (CHANGES[first], CHANGES[i])
        for i in set(numbers) - results.keys():
            assert is_more_than_transformers(CHANGES[i], of_all[i].error), (CHANGES[i], of_all[i].error)


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """As fixtures/make_config_keys.py draws it."""
    drawn = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape).astype(np.float32)
    return 1 + 0.2 * drawn if "norm" in name else 0.4 * drawn


def computed(config: DecoderConfig, weights: Weights) -> np.ndarray:
    """The logits [S, V], operation by operation: a program for each architecture would take a second to compile."""
    model = decoder_model.build(config)
    layer, outer = readers(weights)
    outer_weights = jax.tree.map(jnp.asarray, outer(model))
    x_BSD = first_input(model, outer_weights, jnp.asarray(TOKENS))
    places = {number: (segment, l) for segment in model.segments for l, number in enumerate(segment.numbers)}
    for number in sorted(places):
        segment, l = places[number]
        x_BSD = segment.block(jax.tree.map(jnp.asarray, layer(segment, l)), x_BSD, None, segment.variants[l])[0]
    return np.asarray(model.logits(outer_weights, x_BSD))[0]


def written(folder: Path, family: str, change: int) -> Weights:
    """The tensors of a family's models with this change, in the layout of transformers 5's modules."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(BASE[family] | CHANGES[change]))
    shapes = SHAPES[family] | OTHER.get(f"{family} {change}", {})
    tensors = {name: weight(name, tuple(x)) for name, x in shapes.items()}
    safetensors.numpy.save_file(in_files(family, tensors), folder / SINGLE)
    return Weights(folder)


def in_files(family: str, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors of transformers 5's modules by names in files, where these differ: experts without a gate are apart."""
    if family != "nemotron_h":
        return tensors
    of_all = ("experts.up_proj", "experts.down_proj")
    return of_each({f"{n}.weight" if n.endswith(of_all) else n: x for n, x in tensors.items()})


# All changes take 4 to 20 seconds of each family; for `pytest`, the windows of the one that is unlike its neighbours.
OF_KEYS = [("qwen3_moe", "sliding_window"), *((family, "") for family in BASE)]


@pytest.mark.full
@pytest.mark.parametrize("family, key", quick_at(OF_KEYS, 0))
def test_what_is_read_has_the_logits_of_transformers(tmp_path, family, key):
    """Of every change, or of those with this key."""
    of_all = verdicts(family)
    unchanged = of_all[0].logits
    assert unchanged is not None
    folders: dict[str, Weights] = {}
    for config, numbers in read_as(family).items():
        numbers = [i for i in numbers if key in (*CHANGES[i], "")]
        results = {i: logits for i in numbers if (logits := of_all[i].logits) is not None}
        for i, expected in [*results.items()][:1]:  # the others are equal to it
            shapes = json.dumps(OTHER.get(f"{family} {i}"))
            if shapes not in folders:
                folders[shapes] = written(tmp_path / str(i), family, i)
            # A cap makes logits smaller, and not what the sums before it are off by.
            scale = max(np.abs(expected).max(), np.abs(unchanged).max())
            worst = np.abs(computed(config, folders[shapes]) - expected).max() / scale
            assert worst < TOLERANCE, (CHANGES[i], worst)
