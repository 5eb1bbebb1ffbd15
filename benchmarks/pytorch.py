"""Compares a training step on the CPU with PyTorch's: transformers' Llama with 6.5M parameters, eager, fused AdamW.

Both train on 8 sequences of 256 tokens in float32, the same rows, in processes of their own that take turns. PyTorch is
asked of another interpreter, which has torch and transformers. Prints the median seconds of a step of each process, and
the median of the ratios of the pairs (above 1: ours is faster).

On two idle cores ours has 0.65 to 0.93 of PyTorch's speed (docs/log). On one core, or beside other work, a ratio
above 1 means little: PyTorch's threads wait for each other there. Ours gains less from a second core, since XLA:CPU
writes residuals and gradients into their stacks, and copies zeroed stacks and the updated state, on one.

    python benchmarks/pytorch.py --python PATH [--pairs 3] [--steps 12]
"""

import argparse
import importlib
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np

BATCH = 8
SEQUENCE_LEN = 256
# In words that both programs know.
SIZES = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
LEARNING_RATE = 1e-3
UNTIMED = 3  # first steps, in which programs are compiled and memory is allocated


def batches(steps: int) -> np.ndarray:
    """Token ids, int32 `[steps, B, S + 1]`."""
    shape = (steps, BATCH, SEQUENCE_LEN + 1)
    return np.random.default_rng(0).integers(0, SIZES["vocab_size"], shape).astype(np.int32)


def timed(step, rows: np.ndarray) -> dict[str, Any]:
    """{"seconds": median of a step, "losses": all} of a function from a batch to its loss."""
    seconds = []
    losses = []
    for batch in rows:
        start = time.perf_counter()
        losses.append(step(batch))
        seconds.append(time.perf_counter() - start)
    return {"seconds": statistics.median(seconds[UNTIMED:]), "losses": losses}


def torch_step():
    """A function that trains transformers' model on a batch `[B, S + 1]`."""
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, max_position_embeddings=SEQUENCE_LEN, use_cache=False)
    model = transformers.LlamaForCausalLM(config).float().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step(batch: np.ndarray) -> float:
        rows = torch.from_numpy(batch.astype(np.int64))
        logits = model(input_ids=rows[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def our_step():
    """A function that trains surojax' model on a batch `[B, S + 1]`."""
    import jax

    from surojax.assembly.from_config import from_config
    from surojax.assembly.xla_options import compiler_options
    from surojax.config import default_config
    from surojax.config.checks import check
    from surojax.placement.layout import batch_sharding
    from surojax.placement.mesh import make_mesh

    c = default_config()
    c.model.update(SIZES)
    c.model_dtype = "float32"
    c.sequence_len = SEQUENCE_LEN
    c.per_device_batch_size = BATCH
    c.learning_rate = LEARNING_RATE
    c.max_grad_norm = 0.0
    c.recompute_block = False
    check(c)
    mesh = make_mesh(jax.devices()[:1])
    run = from_config(c, mesh, 1000)
    sharding = batch_sharding(mesh)
    arrays = [jax.ShapeDtypeStruct((1, BATCH, SEQUENCE_LEN), np.int32, sharding=sharding)] * 2
    compiled = run.train_step().lower(run.plan, *arrays).compile(compiler_options(run, "cpu"))
    state = run.init_state(0)

    def step(batch: np.ndarray) -> float:
        nonlocal state
        state, metrics = compiled(state, *jax.device_put((batch[None, :, :-1], batch[None, :, 1:]), sharding))
        return float(jax.block_until_ready(metrics)["loss"])

    return step


def measured(python: str, which: str, steps: int) -> dict[str, Any]:
    """`timed` in a process of its own."""
    command = [python, __file__, "--worker", which, "--steps", str(steps)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(output.splitlines()[-1])


def main() -> None:
    """Time both in turn and print the comparison."""
    parser = argparse.ArgumentParser(description="A training step on the CPU against PyTorch's.")
    parser.add_argument("--python", default=sys.executable, help="an interpreter with torch and transformers")
    parser.add_argument("--pairs", type=int, default=3, help="processes of each, in turn")
    parser.add_argument("--steps", type=int, default=12, help="steps in a process")
    parser.add_argument("--worker", choices=("torch", "ours"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        step = torch_step() if args.worker == "torch" else our_step()
        print(json.dumps(timed(step, batches(args.steps))))
        return
    ratios = []
    for _ in range(args.pairs):
        theirs = measured(args.python, "torch", args.steps)
        ours = measured(sys.executable, "ours", args.steps)
        ratios.append(theirs["seconds"] / ours["seconds"])
        for name, timing in (("PyTorch", theirs), ("surojax", ours)):
            first, last = timing["losses"][0], timing["losses"][-1]
            print(f"{name}: {1e3 * timing['seconds']:.0f} ms a step, loss {first:.3f} -> {last:.3f}", flush=True)
    print(f"surojax / PyTorch: {statistics.median(ratios):.3f} of its speed, median of {args.pairs} pairs")


if __name__ == "__main__":
    main()
