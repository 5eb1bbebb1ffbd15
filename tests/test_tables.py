"""Tables that translate one kind of name into another: none means the same twice, and none is missing."""

import pytest

from pallas_kernels import shapes
from surojax.data import decompression, entries, run_data, templates
from surojax.exchange import export, gguf, gguf_export, missing, peft, shards
from surojax.families import family, gemma
from surojax.models import lora, operations
from surojax.planner import choices, drives, gpus, plan_text, products, rates
from surojax.run import trackers


@pytest.mark.parametrize(
    "table",
    [
        decompression.COMPRESSIONS,
        decompression.MARKS,
        entries.DTYPES,
        run_data.OF_ANSWERS,
        templates.CONTROL_TOKENS,
        export.DTYPES,
        gguf.ARCHITECTURE_OF,
        gguf.SIZES,
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
        plan_text.RESOURCES,
        products.HLO_DTYPES,
        rates.WORDS,
        trackers.TRACKERS,
        shapes.MODELS,
    ],
    ids=lambda table: " ".join(list(map(str, table))[:3]),
)
def test_no_two_names_mean_the_same(table):
    values = list(map(str, table.values()))
    assert sorted(set(values)) == sorted(values)
