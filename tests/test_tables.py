"""Tables that translate one kind of name into another: none means the same twice, and none is missing."""

import re

import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import shapes
from surojax.data import decompression, entries, run_data, templates
from surojax.exchange import export, gguf_export, gguf_file, gguf_metadata, missing, peft, shards
from surojax.families import family, gemma
from surojax.models import lora, operations
from surojax.planner import choices, costs, drives, gpus, hlo, products, rates
from surojax.run import trackers

ARCHITECTURES = {name: [x.architecture for x in all_] for name, all_ in gguf_file.OF_FAMILY.items()}
ARCHITECTURES.pop("gemma4_unified_text")  # read as the other Gemma 4


@pytest.mark.parametrize(
    "table",
    [
        decompression.COMPRESSIONS,
        decompression.MARKS,
        entries.DTYPES,
        run_data.OF_ANSWERS,
        templates.CONTROL_TOKENS,
        export.DTYPES,
        {name: all_ for name, all_ in ARCHITECTURES.items() if name not in ("deepseek_v2", "glm4_moe_lite")},
        gguf_metadata.SIZES,
        gguf_export.DTYPES,
        missing.WRAPPERS,
        peft.SUFFIXES,
        peft.CONTINUED,
        shards.NUMPY_DTYPES,
        family.TENSOR_NAMES,
        family.EXPERT_TENSOR_NAMES,
        family.SHARED_EXPERT_TENSOR_NAMES,
        family.GGUF_NAMES,
        family.EXPERT_GGUF_NAMES,
        gemma.TENSORS,
        lora.SAVED,
        operations.ACTIVATIONS,
        choices.OFFLOADS,
        choices.NUMBERS,
        drives.DRIVES,
        gpus.SM_FLOP,
        gpus.SOURCES,
        gpus.REFUSED,
        products.HLO_DTYPES,
        {name: rate.word for name, rate in rates.UNCERTAIN.items()},
        trackers.TRACKERS,
        shapes.MODELS,
    ],
    ids=lambda table: " ".join(list(map(str, table))[:3]),
)
def test_no_two_names_mean_the_same(table):
    values = list(map(str, table.values()))
    assert sorted(set(values)) == sorted(values)


def test_every_rate_has_ends_or_is_taken_as_it_is():
    together = [field for rate in rates.UNCERTAIN.values() for field in rate.fields]
    without_ends = {"beside", "boost"}
    assert sorted([*together, *without_ends]) == sorted(rates.RATES)
    assert set(rates.BANDWIDTHS) & set(rates.LATENCIES) == set()
    assert {*rates.BANDWIDTHS, *rates.LATENCIES} == {*rates.RATES} - {
        "eight_bit",
        "duplex",
        "collective_sms",
        *without_ends,
    }
    slower = gpus.GPUS["h100"].rates.slower(2.0)
    for name in rates.RATES:
        before, after = getattr(gpus.GPUS["h100"].rates, name), getattr(slower, name)
        factor = 0.5 if name in rates.BANDWIDTHS else 2.0 if name in rates.LATENCIES else 1.0
        assert after == pytest.approx(factor * before), name
    assert {rate.span.source for rate in rates.UNCERTAIN.values()} <= set(gpus.SOURCES.values())
    assert {name: span.source for name, span in rates.PRODUCTS.items()} == {name: name for name in rates.PRODUCTS}


def test_rows_that_others_index():
    """A collective, a stream of work, a dtype of products."""
    assert costs.OF_COLLECTIVE.keys() == hlo.WIRE.keys()
    assert set(costs.TRANSFERS) == {costs.GATHER, costs.REDUCE, costs.HOST_IN, costs.HOST_OUT}
    assert set(costs.STREAMS) == {costs.MAIN, costs.SIDE, costs.HOST_IN, costs.HOST_OUT, costs.COLLECTIVES}
    assert {"constant", "after-all", "partition-id", "replica-id", "opt-barrier", "parameter", "tuple"} <= costs.FREE
    assert not costs.FREE & {"custom-call", "while", "conditional", "call", "fusion", "copy"}
    assert {products.HLO_DTYPES[name] for name in products.LOW} == {"f8e4m3fn", "f4e2m1fn"}
    for name in ("bfloat16", "float32"):
        assert np.dtype(getattr(ml_dtypes, name, name)).itemsize == {"bf16": 2, "f32": 4}[products.HLO_DTYPES[name]]
    for name, dtype in export.DTYPES.items():
        assert np.dtype(dtype) == np.dtype(getattr(ml_dtypes, name, name))


@pytest.mark.parametrize("name", gpus.PCIE)
def test_bandwidth_of_pci_express(name):
    """16 or 32 GT/s a lane, in 128b/130b coding."""
    generation, lanes = re.fullmatch(r"(\d)\.0 x(\d+)", name).groups()  # type: ignore[union-attr]
    transfers = {"4": 16e9, "5": 32e9}[generation]
    assert gpus.PCIE[name] == pytest.approx(transfers * int(lanes) * (128 / 130) / 8)
