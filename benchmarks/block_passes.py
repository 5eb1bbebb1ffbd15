"""Counts what one transformer block launches on a GPU: products, attention, and the passes over memory between them.

    python benchmarks/block_passes.py --gpu h200 --recipe fp8_hybrid --kernels mosaic

This compiles the block of `--model` (a config file with the sizes) for that GPU, on a machine with or without one. It
prints a table with the number of launches and the bytes that they read and write, by kind, for the forward and the
backward pass; `--json` prints the counts as JSON for the tests. Launches that move less than a megabyte (scales, sums
of partial sums, tables of angles) are the kind "small". The backward pass includes recomputing the block's forward
pass, as `recompute_block` does.
"""

import argparse
import json
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from surojax.assembly import from_config, xla_options
from surojax.config import flags
from surojax.config.checks import check
from surojax.models.model import Model, RecipeInputs
from surojax.numerics.fp8 import E4M3
from surojax.placement.mesh import make_mesh
from surojax.planner import aot
from surojax.planner.hlo import Instruction, Module, arrays, executed, parse_module
from surojax.step.weights import quantise_with_one_scale

KINDS = ("float8 product", "block-scaled product", "other product", "attention", "fused kernel", "pass by XLA", "small")
SMALL = 1 << 20  # bytes
# Instructions that launch nothing.
NOTHING = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "call", "conditional", "iota")


def compile_block(model: Model, gpu: str, tokens: int) -> dict[str, aot.Compiled]:
    """Compiles the forward and the backward pass of a block over one sequence, for a GPU."""
    mesh = make_mesh(aot.devices(gpu, 1))
    (segment,) = model.segments
    replicated = jax.NamedSharding(mesh.abstract_mesh, jax.P())
    w = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.bfloat16), segment.params)
    if model.precision.fp8:
        w = jax.eval_shape(lambda w: quantise_with_one_scale(segment.params, w, E4M3), w)
    x = jax.ShapeDtypeStruct((1, tokens, model.hidden_size), jnp.bfloat16)
    shapes: dict[str, Any] = {
        "fp8_hybrid": {"scales": jax.ShapeDtypeStruct((model.sites.number,), jnp.float32)},
        "nvfp4": {"seed": jax.ShapeDtypeStruct((), "uint32")},
    }
    recipe_inputs = {name: RecipeInputs(**inputs) for name, inputs in shapes.items()}.get(model.precision.recipe)

    def backward(w, x, dy, recipe_inputs):
        _, saved = segment.block_forward(w, x, recipe_inputs)
        return segment.block_backward(w, saved, (dy, None), recipe_inputs)

    def compiled(f, *arguments):
        run = jax.shard_map(f, mesh=mesh, in_specs=jax.P(), out_specs=jax.P())
        inputs = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=replicated), arguments)
        return aot.compile_for(jax.jit(run), inputs, mesh, xla_options.schedule_options(model))

    return {
        "forward": compiled(segment.block, w, x, recipe_inputs),
        "backward": compiled(backward, w, x, x, recipe_inputs),
    }


def launches(module: Module) -> Iterator[tuple[str, int, Instruction]]:
    """Yields (kind, bytes read and written, instruction) of each launch of a program."""
    for i, times, computation in executed(module):
        if i.opcode in NOTHING or i.opcode.endswith("-done"):
            continue
        results = [a.bytes for a in arrays(i.shape)]
        custom_call = re.search(r'custom_call_target="([^"]*)"', i.attributes)
        target = custom_call[1] if custom_call else ""
        if target.startswith("__cu"):
            results = results[:-1]  # the last result is a workspace
        moved = sum(results) + sum(a.bytes for name in i.operands for a in arrays(computation[name].shape))
        kind = _kind(module, i, target, moved)
        for _ in range(times):
            yield kind, moved, i


def _kind(module: Module, i: Instruction, target: str, moved: int) -> str:
    """Returns the kind (of KINDS) of an instruction. target: of a custom call, else "". moved: bytes."""
    called = re.search(r"calls=%?([\w.\-]+)", i.attributes)
    inside = " ".join(x.opcode + x.attributes for x in module.get(called[1], {}).values()) if called else ""
    if "matmul$f8" in target or "matmul$f8" in inside:
        return "float8 product"
    if "lockScaled" in target or "scaled-dot" in i.opcode:
        return "block-scaled product"
    if target.startswith("__cudnn$fmha"):
        return "attention"
    if target.startswith("__cu") or i.opcode == "dot" or "__cublas" in inside or "dot" in inside.split():
        return "other product"
    if moved < SMALL:
        return "small"
    return "fused kernel" if "mosaic" in target or "triton" in target else "pass by XLA"


def product_flops(module: Module) -> int:
    """FLOPs of the float8 products: 2 x number of results x contracted dimension, the last one of both operands."""
    total = 0
    for kind, _, i in launches(module):
        if kind == "float8 product":
            computation = next(c for c in module.values() if i.name in c)
            rows, columns = _dimensions(i.shape)
            total += 2 * rows * columns * _dimensions(computation[i.operands[0]].shape)[-1]
    return total


def added_up_in_float32(module: Module) -> bool:
    """Whether all float8 products accumulate in float32; cuBLASLt does only if their precision is HIGHEST."""
    return all("HIGHEST" in i.attributes for kind, _, i in launches(module) if kind == "float8 product")


def _dimensions(shape: str) -> list[int]:
    """Returns the dimensions of the first array in a shape."""
    match = re.search(r"\[([\d,]*)\]", shape)
    return [int(d) for d in match[1].split(",")] if match else []


def count(module: Module) -> dict[str, dict[str, int]]:
    """Returns {kind: {"launches", "bytes"}} of a program."""
    counts = {kind: {"launches": 0, "bytes": 0} for kind in KINDS}
    for kind, moved, _ in launches(module):
        counts[kind]["launches"] += 1
        counts[kind]["bytes"] += moved
    return counts


def main() -> None:
    """Compile the block, and print the table, JSON, or the list of launches."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gpu", default="rtx4090", help="a GPU of surojax/planner/gpus.csv (default: %(default)s)")
    parser.add_argument("--model", default="configs/llama7b.py", help="config file with the sizes (%(default)s)")
    parser.add_argument("--recipe", default="fp8_current", help="see surojax/numerics/recipes.py (%(default)s)")
    parser.add_argument("--kernels", default="mosaic", choices=("mosaic", "xla"), help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=2048, help="length of the sequence (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--list", action="store_true", help="print every launch")
    args = parser.parse_args()
    c = flags.load_config(args.model)
    c.recipe = args.recipe
    c.kernels = args.kernels
    c.attention = "cudnn"
    if args.recipe in ("mxfp8", "nvfp4"):
        c.block_scaled_products = "native"
    check(c)
    c.model.num_hidden_layers = 1
    model = from_config.model(c)
    modules = {name: parse_module(x.text) for name, x in compile_block(model, args.gpu, args.tokens).items()}
    if args.list:
        for name, module in modules.items():
            for kind, moved, i in launches(module):
                print(f"{name:9} {kind:20} {moved / 2**20:8.1f} MiB  {i.opcode} {i.shape[:90]}  {i.name}")
        return
    counts = {name: count(module) for name, module in modules.items()}
    if args.json:
        flops = {name: product_flops(module) for name, module in modules.items()}
        exact = all(map(added_up_in_float32, modules.values()))
        print(json.dumps({"launches": counts, "float8_flops": flops, "added_up_in_float32": exact}))
        return
    print(f"{args.model}, {args.tokens} tokens, {args.gpu}, recipe {args.recipe}, kernels {args.kernels}\n")
    print("| | forward: launches | MiB | backward: launches | MiB |\n|---|---|---|---|---|")
    for kind in KINDS:
        cells = [f"{x[kind]['launches']} | {x[kind]['bytes'] / 2**20:.0f}" for x in counts.values()]
        print(f"| {kind} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
