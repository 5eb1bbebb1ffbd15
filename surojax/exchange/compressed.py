"""Reads and writes blocks' matrices in FP8, NVFP4 or MXFP4 in a model's folder.

The first two are compressed-tensors' formats, which vLLM reads:

| `dtype` | tensors of a matrix NAME.weight [out, in]                                      | `format`             |
|---------|--------------------------------------------------------------------------------|----------------------|
| fp8     | NAME.weight e4m3 [out, in], NAME.weight_scale float32 [out / 128, in / 128]    | float-quantized      |
| nvfp4   | NAME.weight_packed uint8 [out, in / 2], NAME.weight_scale e4m3 [out, in / 16], | nvfp4-pack-quantized |
|         | NAME.weight_global_scale float32 [1], by which scales are divided              |                      |

`quantization_config` of config.json says so: the presets FP8_BLOCK, whose activations are quantised when they are
computed, in groups of 128, and NVFP4A16, whose activations stay in 16 bits. Neither asks for calibration. Embedding,
head, norms and biases stay in bfloat16. Numbers are those of numerics/block_fp8.py and nvfp4.py, which bases of QLoRA
rest in. vLLM multiplies with queries, keys and values as one matrix, with the low-rank projections of both, and with
gate and up; such a matrix has one global scale: `SHARING` have the scale of the largest number of all of them. Each
expert's matrices are stored, and share a scale, by themselves; routers stay in bfloat16, which `ignore` says by the end
of their names.

"mxfp4" is of gpt-oss alone, whose experts OpenAI publishes so (stored_mxfp4.py); all else stays in bfloat16.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from surojax.errors import ConfigError
from surojax.exchange import stored_mxfp4
from surojax.exchange.shards import StoredTensor
from surojax.families.family import TENSOR_NAMES, ExpertFiles
from surojax.models.model import Model, Segment
from surojax.numerics import block_fp8, mxfp4, nvfp4
from surojax.placement.param import EXPERTS, Kind, Param, base

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
FLOAT32 = np.dtype(np.float32)
OTHERS = "bfloat16"  # dtype of all other tensors
METHOD = "compressed-tensors"
FP8_SCALES = "_scale"  # appended to the name of a matrix
PACKED, SCALES, GLOBAL_SCALE = "_packed", "_scale", "_global_scale"  # of NVFP4; no tensor has the matrix' own name
EXPERTS_NOTES = {  # what others do with experts in a format
    "nvfp4": "note: transformers 5.24 drops the global scales of experts in NVFP4 without a word, and computes another "
    "model; surojax reads them",
    "fp8": "note: transformers 5.24 does not load the experts of some models in FP8 (OLMoE, Mixtral); surojax does",
}
SHARING = (  # one global scale, in each expert
    ("attention.wq", "attention.wk", "attention.wv"),
    ("latent.wq_a", "latent.wkv_a"),
    ("mlp.w_gate", "mlp.w_up"),
    ("mlp.shared.w_gate", "mlp.shared.w_up"),
    ("mlp.shared_expert.w_gate", "mlp.shared_expert.w_up"),
)


class CompressedFormat(NamedTuple):
    """A quantised file format of matrices [out, in].

    config: what `quantization_config` says of it. planned: shape -> tensors by what follows the matrix' name without
    "weight". quantise: (float32 matrix, largest magnitude of those that share a global scale) -> these tensors, in the
    same order. block: rows are multiples of it. of_experts: matrices are the experts' alone, [experts, out, in];
    `planned` takes their shape in files, [experts, in, out].
    """

    config: dict[str, Any]
    planned: Callable[[tuple[int, ...]], dict[str, StoredTensor]]
    quantise: Callable[[jax.Array, jax.Array], tuple[jax.Array, ...]]
    block: int
    of_experts: bool = False


def _fp8(shape: tuple[int, ...]) -> dict[str, StoredTensor]:
    blocks = (-(-shape[0] // block_fp8.BLOCK), -(-shape[1] // block_fp8.BLOCK))
    return {"weight": StoredTensor(shape, E4M3), "weight_scale": StoredTensor(blocks, FLOAT32)}


def _in_fp8(w: jax.Array, largest: jax.Array) -> tuple[jax.Array, ...]:
    del largest  # every block has a scale of its own
    return block_fp8.in_blocks(w)


def _nvfp4(shape: tuple[int, ...]) -> dict[str, StoredTensor]:
    rows, columns = shape
    return {
        "weight_packed": StoredTensor((rows, columns // 2), np.dtype(np.uint8)),
        "weight_scale": StoredTensor((rows, columns // nvfp4.BLOCK), E4M3),
        "weight_global_scale": StoredTensor((1,), FLOAT32),
    }


def _in_nvfp4(w: jax.Array, largest: jax.Array) -> tuple[jax.Array, ...]:
    q = nvfp4.quantise(w, largest=largest)
    return q.codes, q.scales, 1 / q.tensor_scale[None]


def _mxfp4(shape: tuple[int, ...]) -> dict[str, StoredTensor]:
    experts, columns, rows = shape
    scales = (experts, rows, columns // mxfp4.BLOCK)
    uint8 = np.dtype(np.uint8)
    return {
        stored_mxfp4.BLOCKS: StoredTensor((*scales, mxfp4.BLOCK // 2), uint8),
        stored_mxfp4.SCALES: StoredTensor(scales, uint8),
    }


def _in_mxfp4(w: jax.Array, largest: jax.Array) -> tuple[jax.Array, ...]:
    del largest  # every block has a scale of its own
    return stored_mxfp4.file_arrays(jax.lax.map(lambda matrix: mxfp4.quantise(matrix, mxfp4.planned(w.shape[1:])), w))


def _config(kind: str, weights: dict[str, Any], activations: dict[str, Any] | None) -> dict[str, Any]:
    """Makes the `quantization_config` of compressed-tensors for all matrices of blocks."""
    common = {"type": "float", "symmetric": True}
    group: dict[str, Any] = {"targets": ["Linear"], "format": kind}
    group["weights"] = common | {"dynamic": False} | weights
    group["input_activations"] = activations and common | {"dynamic": True} | activations
    return {
        "quant_method": METHOD,
        "format": kind,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [TENSOR_NAMES["head"].removesuffix(".weight")],
    }


_BLOCKS = {"num_bits": 8, "strategy": "block", "block_structure": [block_fp8.BLOCK, block_fp8.BLOCK]}
_GROUPS = {"num_bits": 8, "strategy": "group", "group_size": block_fp8.BLOCK}
_OF_16 = {"num_bits": 4, "strategy": "tensor_group", "group_size": nvfp4.BLOCK, "scale_dtype": "torch.float8_e4m3fn"}
FORMATS = {
    "fp8": CompressedFormat(_config("float-quantized", _BLOCKS, _GROUPS), _fp8, _in_fp8, 1),
    "nvfp4": CompressedFormat(_config("nvfp4-pack-quantized", _OF_16, None), _nvfp4, _in_nvfp4, nvfp4.BLOCK),
    "mxfp4": CompressedFormat(stored_mxfp4.CONFIG, _mxfp4, _in_mxfp4, mxfp4.BLOCK, of_experts=True),
}


def config_of(dtype: str, whole: list[str]) -> dict[str, Any]:
    """Returns the `quantization_config` of a format. whole: patterns of the names of modules that are not quantised."""
    config = FORMATS[dtype].config
    if FORMATS[dtype].of_experts:
        return config
    return config | {"ignore": [*config["ignore"], *(f"re:{pattern}" for pattern in whole)]}


def fp8_block(entry: dict[str, Any]) -> tuple[int, int] | None:
    """Reads a `quantization_config`: (rows, columns) of the blocks with one scale for FP8; None for NVFP4.

    Raises ValueError for other formats, and for a config of several groups.
    """
    (group,) = entry["config_groups"].values()
    weights = group["weights"]
    kind = group.get("format") or entry["format"]
    if kind == FORMATS["nvfp4"].config["format"] and weights["num_bits"] == 4 and weights["group_size"] == nvfp4.BLOCK:
        return None
    if kind != FORMATS["fp8"].config["format"] or weights["num_bits"] != 8 or weights["strategy"] != "block":
        raise ValueError(f"{kind} with strategy {weights['strategy']}")
    rows, columns = weights["block_structure"]
    return rows, columns


def packed(names: set[str]) -> set[str]:
    """Selects the names of NVFP4 matrices among names of tensors."""
    matrices = {name.removesuffix(PACKED) for name in names if name.endswith(PACKED)}
    return {name for name in matrices if {name + SCALES, name + GLOBAL_SCALE} <= names}


def parts_of(matrices: set[str]) -> set[str]:
    """The names of the tensors that hold codes and scales of NVFP4 matrices."""
    return {name + part for name in matrices for part in (PACKED, SCALES, GLOBAL_SCALE)}


def packed_shape(name: str, shape_of: Callable[[str], tuple[int, ...]]) -> tuple[int, int]:
    """Returns (out, in) of a stored NVFP4 matrix.

    Raises ConfigError if codes and scales do not have the shapes above.
    """
    codes, scales = shape_of(name + PACKED), shape_of(name + SCALES)
    if len(codes) != 2 or scales != (codes[0], 2 * codes[1] // nvfp4.BLOCK) or shape_of(name + GLOBAL_SCALE) != (1,):
        raise ConfigError(
            f"model_path: {name}: expected codes [out, in / 2], scales [out, in / 16] and one global scale, got "
            f"{[*codes]}, {[*scales]} and {[*shape_of(name + GLOBAL_SCALE)]}; fetch the model again"
        )
    return codes[0], 2 * codes[1]


def read_nvfp4(name: str, read: Callable[[str], np.ndarray]) -> nvfp4.Nvfp4:
    """Reads an NVFP4 matrix without dequantising it. Raises ConfigError for a global scale that is not above 0."""
    global_scale = np.float32(read(name + GLOBAL_SCALE)[0])
    if not global_scale > 0:
        raise ConfigError(
            f"model_path: {name + GLOBAL_SCALE}: expected more than 0, got {global_scale}; fetch the model again"
        )
    return nvfp4.Nvfp4(read(name + PACKED), read(name + SCALES), np.float32(1) / global_scale)


def matrices(dtype: str, segment: Segment) -> list[Param]:
    """Lists the parameters of a segment's layers that the format `dtype` stores quantised."""
    params = (param for param in jax.tree.leaves(base(segment.params)) if param.kind is Kind.MATRIX)
    return [param for param in params if EXPERTS in param.axes or not FORMATS[dtype].of_experts]


def check_matrices(dtype: str, model: Model, files: ExpertFiles, *, together: bool = False) -> None:
    """Raises ConfigError if a model's matrices cannot be stored in this format.

    files: the layout of experts. together: all experts of a layer are asked for in one tensor.
    """
    if FORMATS[dtype].of_experts:
        if not (files.only and files.transposed):
            raise ConfigError(f"--dtype: expected a model of gpt-oss for {dtype}, got another one; use bfloat16")
    elif (together or files.only) and any(segment.statistics is not None for segment in model.segments):
        change = "leave --experts-together out" if together and not files.only else "use bfloat16"
        raise ConfigError(
            f"--dtype: expected a tensor for each expert for {dtype}, got one for all experts of a layer; {change}"
        )
    block = FORMATS[dtype].block
    for segment in model.segments:
        for param in matrices(dtype, segment):
            if param.shape[-1] % block:
                raise ConfigError(
                    f"--dtype: expected rows of multiples of {block} numbers for {dtype}, got {param.shape[-1]} in "
                    f"{param.name}; use {OTHERS if FORMATS[dtype].of_experts else 'fp8'}"
                )


def compressed_matrix(dtype: str, w: np.ndarray, largest: float) -> list[np.ndarray]:
    """Quantises a matrix to its planned tensors. largest: magnitude over all matrices with the same global scale."""
    return [np.asarray(x) for x in _quantise(dtype)(w.astype(np.float32), np.float32(largest))]


@functools.cache
def _quantise(dtype: str) -> Callable:
    return jax.jit(FORMATS[dtype].quantise)


def dequantised(dtype: str, tensors: list[np.ndarray]) -> np.ndarray:
    """Dequantises a matrix to float32 from its tensors: the inverse of `compressed_matrix`, except for rounding."""
    if dtype == "nvfp4":
        codes, scales, global_scale = map(jnp.asarray, tensors)
        return np.asarray(nvfp4.dequantise(nvfp4.Nvfp4(codes, scales, 1 / global_scale[0]), jnp.float32))
    codes, scales = tensors
    like = block_fp8.planned(codes.shape)
    return np.asarray(block_fp8.dequantise(block_fp8.from_blocks(jnp.asarray(codes), scales, like), jnp.float32))
