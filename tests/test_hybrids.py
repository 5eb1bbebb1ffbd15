"""Models whose layers alternate between mixers: gradients and training, whatever the placement."""

import dataclasses
import re
from typing import Any

import jax
import pytest
import test_lfm2
import test_qwen3_5
from small import Small, needs, plain_loss, tokens, vectors_drawn, worst_relative
from test_engine import ORDER_OF_SUMS, engine_gradients
from test_experts import ALL

from surojax.models import decoder_model
from surojax.verification.settings import NVME_ALL

CONVOLUTIONS, DELTAS = test_lfm2.HYBRID, test_qwen3_5.HYBRID
# Gradients of decays are sums that may cancel: with seed 0 and experts they are 1e-6 beside 4e-3 of other matrices, and
# float32 rounding is 3e-4 of that; with this one they are 9e-5.
SEED = 8
TENSOR_PARALLEL = {"zero_level": 3, "tp_size": 2, **ALL}


@needs(4)
@pytest.mark.full
@pytest.mark.parametrize(
    "config, devices, placed",
    [
        (CONVOLUTIONS, 4, {"zero_level": 3, **ALL}),
        (CONVOLUTIONS, 1, {}),
        (CONVOLUTIONS, 4, TENSOR_PARALLEL),
        (CONVOLUTIONS, 4, {"zero_level": 2, "replicate": 2, "resident_layers": 3, "offload_weights": True}),
        (test_lfm2.WITH_EXPERTS, 1, ALL),
        (test_lfm2.WITH_EXPERTS, 4, {"zero_level": 3, **ALL}),
        (DELTAS, 4, TENSOR_PARALLEL),
        (DELTAS, 1, {}),
        (DELTAS, 4, {"zero_level": 3, **ALL}),
        (DELTAS, 2, {"tp_size": 2}),
        (test_qwen3_5.WITH_EXPERTS, 4, TENSOR_PARALLEL),
        (test_qwen3_5.WITH_EXPERTS, 1, {}),
    ],
)
def test_gradients_equal_reverse_mode(config, devices, placed):
    model = decoder_model.build(config)
    small = Small(devices, model=model, microbatches_per_fetch=3, seed=SEED, **placed)
    with vectors_drawn():
        params = model.init(SEED)
    batch = tokens(3, 8, 16)
    expected = jax.jit(jax.value_and_grad(plain_loss(config)))(params, *batch)
    assert worst_relative(engine_gradients(small, batch), expected) < ORDER_OF_SUMS


@pytest.mark.full
@pytest.mark.parametrize(
    "config", [CONVOLUTIONS, DELTAS, test_qwen3_5.WITH_EXPERTS], ids=["convolutions", "deltas", "experts"]
)
def test_trains_alike_under_every_placement(tmp_path, config):
    """To the bit: with everything offloaded, updated under the next forward pass, and in files."""
    model = decoder_model.build(config)
    batches = [tokens(2, 8, 16, seed=i) for i in range(3)]
    losses = Small(model=model).train(batches)
    assert len(set(losses)) == len(losses)
    for number, late in enumerate((False, True)):
        assert Small(model=model, microbatches_per_fetch=2, overlap_update=late, **ALL).train(batches) == losses
        folder = tmp_path / f"{number}"
        folder.mkdir()
        in_files: dict[str, Any] = {"batch": (2, 8, 16), "nvme_path": str(folder), **NVME_ALL}
        assert Small(model=model, overlap_update=late, **in_files).train(batches) == losses


COLLECTIVE = ("all-gather", "reduce-scatter", "all-to-all", "collective-permute")  # without sums of single numbers


def unordered(text: str) -> list[tuple[str, str]]:
    """(loop, collective behind it) of a compiled program, if the loop has collectives and no data orders the other.

    On a CPU the loop may still run when the other begins: see `collectives.behind`.
    """
    computations: dict[str, list[tuple[str, str, list[str], list[str]]]] = {}
    of_one: list[tuple[str, str, list[str], list[str]]] = []
    for line in text.splitlines():
        if header := re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line):
            of_one = computations.setdefault(header[1], [])
        elif made := re.match(r"\s+(?:ROOT )?%([\w.\-]+) = (?:\(.*?\)|\S+) ([a-z\-]+)\((.*)", line):
            names = re.findall(r"%([\w.\-]+)", made[3].split("metadata=")[0])
            called = re.findall(r"(?:body|to_apply)=%([\w.\-]+)", made[3])
            of_one.append((made[1], made[2], names, called))

    def communicates(op: str, called: list[str]) -> bool:
        inside = op in ("while", "call") and any(communicates(*x[1::2]) for name in called for x in computations[name])
        return op in COLLECTIVE or inside

    found = []
    for instructions in computations.values():
        behind: dict[str, set[str]] = {}  # of each instruction, the loops that it depends on
        loops: list[str] = []
        for name, op, names, called in instructions:
            behind[name] = set().union(*(behind.get(x, set()) for x in names))
            if op in COLLECTIVE:
                found += [(loop, name) for loop in loops if loop not in behind[name]]
            elif communicates(op, called):
                loops.append(name)
                behind[name] |= {name}
    return found


@needs(2)
@pytest.mark.full
def test_on_cpus_data_orders_collectives_behind_a_loop():
    """Without, XLA may run them beside those in it, and exchange tensors: about half of a model's steps were wrong."""
    order = "conv,conv,conv,full_attention"  # a loop over three, and one that is unrolled
    model = decoder_model.build(dataclasses.replace(CONVOLUTIONS, num_hidden_layers=4, layer_types=order))
    placed = {"zero_level": 3, "resident_layers": 0, "microbatches_per_fetch": 1, **ALL}
    small = Small(2, model=model, **placed)
    batch = tokens(3, 8, 16)
    text = small.step.lower(small.plan, *small.put(batch)).compile().as_text()
    assert "all-gather" in text and "while(" in text
    assert not unordered(text)
