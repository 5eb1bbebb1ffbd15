"""Every case of every op compiled for five GPU architectures on this machine: what XLA and LLVM made of the kernels.

A process compiles for one kind of GPU (surojax.aot), so each kind is a process of its own, which this file is too:

    python tests/test_kernels_compile.py h200 [OP ...]       one line of JSON per case

bytes of a load or store: PTX has 16-byte instructions only where LLVM sees that the address is a multiple of 16;
elsewhere it silently cuts them down to single elements.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from pallas_kernels.bench import OPS
from pallas_kernels.shapes import MODELS, Case
from surojax.planner import aot

TOKENS = 2048
MODEL = "llama7b"
MORE = {"cross_entropy": ("gpt2",)}  # rows of 50257 bfloat16 begin at any word
# Of a case's bytes: sums and largest magnitudes per row or per program that a last sum is made of. Most are of a norm's
# scale with 2048 tokens: 256 programs of 8 rows, float32 sums of as many numbers as 2 of the 24 rows of bf16 they move.
PARTIALS = 1 / 10
ADDRESS = 8  # XLA keeps a table of results on the device where they are passed on as something else, e.g. reshaped
# Bytes of the widest loads at least, and of the widest stores where a result is LARGE: with 4 a thread a warp moves
# whole lines of 128 bytes (transposed words, 8-bit moments); 2 is left of a vector whose alignment LLVM does not see.
WIDE = 4
LARGE = 2**20
ACCESS = r"\b{}(?:\.global(?:\.\w+)*?)?(?:\.(v\d))?\.[bfus](\d+)"  # of PTX; an address may be of any memory
# Cases whose kernel has been compiled before, so that there is no PTX of it: nvfp4 begins with the same pass.
REPEATED = ["quantize llama7b absmax"]
BY_TRITON = {"gated_delta_chunks"}  # compiled in test_kernel_gated_delta.py
MARK = "case: "


def compile_all(kind: str, ops: list[str]) -> None:
    """Prints what became of each case, after the PTX that Mosaic prints for it (MOSAIC_GPU_DUMP_PTX)."""
    mesh = jax.sharding.Mesh(np.array(aot.devices(kind, 1)), ("one",), axis_types=(jax.sharding.AxisType.Auto,))
    where = jax.NamedSharding(mesh.abstract_mesh, jax.P())
    for op in ops:
        for model in (MODEL, *MORE.get(op, ())):
            for case in OPS[op].cases(MODELS[model], TOKENS):
                if kind == "a100" and case.name.startswith("float8"):
                    continue  # its tensor cores have no float8
                print(MARK + json.dumps({"op": op, "case": f"{model} {case.name}", **compile_case(case, mesh, where)}))


def compile_case(case: Case, mesh, where) -> dict:
    args = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where) for a in case.args]
    f = jax.jit(lambda *args: case.run(*args, implementation="mosaic"), donate_argnums=case.donated)
    compiled, results = aot.compile_for(f, args, mesh), jax.tree.leaves(jax.eval_shape(f, *args))
    sys.stdout.flush()
    return {
        "bytes": case.bytes,
        "donated": len(case.donated),
        "results": len(results),
        "largest_result": max(r.size * r.dtype.itemsize for r in results),
        "kernels": re.findall(r'custom_call_target="([^"]*)"', compiled.text),
        "copies": len(re.findall(r" copy(?:-start)?\(", compiled.text)),
        "temp_bytes": compiled.temp_bytes,
    }


def width(instructions: list[tuple[str, str]]) -> int:
    """Bytes of the widest of PTX's accesses, given as ("v4" or "", "32")."""
    return max((int(vector[1:] or 1) * int(bits) // 8 for vector, bits in instructions), default=0)


def outcome(kind: str, ops: list[str]) -> list[dict]:
    """What a process prints of each case, with the widths of its loads and stores."""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "MOSAIC_GPU_DUMP_PTX": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), env.get("PYTHONPATH", "")])
    ran = subprocess.run([sys.executable, __file__, kind, *ops], env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    cases, ptx = [], ""
    for line in ran.stdout.splitlines():
        if not line.startswith(MARK):
            ptx += line + "\n"
            continue
        access = lambda name, ptx=ptx: width(re.findall(ACCESS.format(name), ptx))
        widths = {"load": access("ld"), "store": access("st"), "repeated": not ptx}
        cases.append(json.loads(line.removeprefix(MARK)) | widths)
        ptx = ""
    return cases


def wrong(case: dict) -> str:
    """What is not as it should be with a compiled case; "" if nothing is."""
    if not any("mosaic" in name for name in case["kernels"]):
        return f"no Mosaic kernel among {case['kernels']}"
    most = ADDRESS * case["results"] if case["donated"] else PARTIALS * case["bytes"]
    if case["temp_bytes"] > most:
        return f"{case['temp_bytes']} bytes of temporaries, at most {most:.0f} expected"
    if case["donated"] and case["copies"]:
        return f"{case['copies']} copies of what is updated in place"
    if case["repeated"]:
        return ""
    if case["load"] < WIDE or (case["store"] < WIDE and case["largest_result"] > LARGE):
        return f"loads of {case['load']} bytes, stores of {case['store']}"
    return ""


@pytest.mark.skipif(not aot.available(), reason=f"no compiler for GPUs here: {aot.EXTRA}")
@pytest.mark.full
@pytest.mark.parametrize("kind", ["a100", "h200", "b200", "rtx5090"])  # test_plan.py compiles steps for an RTX 4090
def test_kernels_compile(kind):
    ops = [op for op in OPS if op not in BY_TRITON]
    cases = outcome(kind, ops)
    assert {case["op"] for case in cases} == set(ops)
    assert not (found := {f"{c['op']} {c['case']}": wrong(c) for c in cases if wrong(c)}), found
    assert [f"{c['op']} {c['case']}" for c in cases if c["repeated"]] == REPEATED


def test_what_would_be_wrong():
    """The judge of the test above."""
    fine = dict(donated=1, results=4, largest_result=2**24, bytes=2**25, copies=0, temp_bytes=0, load=16, store=16)
    case = fine | {"kernels": ["mosaic_gpu_v2"], "repeated": False}
    assert not wrong(case)
    for change, words in (
        ({"kernels": ["__cublas$gemm"]}, "no Mosaic"),
        ({"temp_bytes": 64}, "temporaries"),
        ({"copies": 1}, "copies"),
        ({"load": 2}, "loads of 2 bytes"),
        ({"store": 2}, "stores of 2"),
        ({"donated": 0, "temp_bytes": 2**22}, "temporaries"),
    ):
        assert words in wrong(case | change)
    ptx = "ld.global.v4.b32 {%r1\nld.global.b16\nld.v2.b32 {%r2\nld.shared.v8.b64\nld.param::entry.v8.b64"
    assert re.findall(ACCESS.format("ld"), ptx) == [
        ("v4", "32"),
        ("", "16"),
        ("v2", "32"),
    ]  # device memory, or anywhere
    assert width([("v4", "32"), ("", "16")]) == 16


if __name__ == "__main__":
    compile_all(sys.argv[1], sys.argv[2:] or list(OPS))
