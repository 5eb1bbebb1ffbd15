"""Trains the model of any_size.py with DeepSpeed: ZeRO-3 on the CPU, weights and optimizer state on an NVMe disk.

    <python with torch, deepspeed> benchmarks/any_size_deepspeed.py [--layers 64] [--hidden 1408] [--rows 1] [--steps 4]

The same sizes, tokens of a step, float32, AdamW and clipping as `any_size.py`, to be run beside it on an idle machine.
Gradients are in host memory: DeepSpeed has no place for them in files. Prints the parameters, and of each step its
seconds, the bytes that the kernel counts, and the most memory that was resident. DeepSpeed builds its asynchronous IO
and its AdamW when they are first used, for which it needs libaio's headers and a C++ compiler.

DeepSpeed 0.19.8 with `--prefetch 25000000` stops in the second step of 64 layers ("already assigned swap buffer"), but
did not with the same layers as attributes of a block in place of lists (docs/log, 2026-11-27).
"""

import argparse
import importlib
import json
import os
import resource
import tempfile
import time
from typing import Any

ROW = 128  # tokens
VOCABULARY = 320
HEADS = 11
SUB_GROUP = 24_000_000  # parameters that are updated at a time: a layer
ONE_PROCESS = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}


def config(folder: str, rows: int, largest: int, prefetch: int) -> dict[str, Any]:
    """Returns DeepSpeed's settings. largest: parameters of the largest tensor; prefetch: those that it reads early."""
    file = {"device": "nvme", "nvme_path": folder, "pin_memory": False}
    return {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {**file, "buffer_count": 40, "buffer_size": largest},
            "offload_optimizer": {**file, "buffer_count": 8},
            # No parameter stays: what stays takes a buffer, and a second step finds none.
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_max_live_parameters": 30_000_000,
            "stage3_prefetch_bucket_size": prefetch,
            "reduce_bucket_size": 25_000_000,
            "sub_group_size": SUB_GROUP,
        },
        "aio": {"block_size": 1 << 20, "queue_depth": 16, "intra_op_parallelism": 2, "overlap_events": True},
    }


def model(torch: Any, layers: int, hidden: int) -> Any:
    """Returns a Llama without rotary positions, whose forward pass takes tokens `[B, S + 1]` and returns the loss."""
    nn, functional = torch.nn, torch.nn.functional

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(2))
            self.attention = nn.ModuleList(nn.Linear(hidden, hidden, bias=False) for _ in range(4))
            inner = 8 * hidden // 3
            self.mlp = nn.ModuleList(
                nn.Linear(*size, bias=False) for size in ((hidden, inner), (hidden, inner), (inner, hidden))
            )

        def forward(self, x):
            heads = (*x.shape[:2], HEADS, hidden // HEADS)
            *projections, output = self.attention
            q, k, v = (linear(self.norms[0](x)).view(heads).transpose(1, 2) for linear in projections)
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + output(mixed.transpose(1, 2).reshape(x.shape))
            gate, up, down = self.mlp
            normed = self.norms[1](x)
            return x + down(functional.silu(gate(normed)) * up(normed))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, hidden)
            self.blocks = nn.ModuleList(Block() for _ in range(layers))
            self.head = nn.Linear(hidden, VOCABULARY, bias=False)

        def forward(self, tokens):
            x = self.embedding(tokens[:, :-1])
            for block in self.blocks:
                x = block(x)
            return functional.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())

    return Model()


def moved() -> dict[str, int]:
    """Returns the bytes that this process has read from disks and written to them, by "read_bytes", "write_bytes"."""
    with open("/proc/self/io") as file:
        counters = dict(line.split(": ") for line in file.read().splitlines())
    return {name: int(counters[name]) for name in ("read_bytes", "write_bytes")}


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=64, help="layers of the model (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=1408, help="channels (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=1, help=f"of {ROW} tokens, in a step (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="steps; the first one allocates (default: %(default)s)")
    parser.add_argument("--prefetch", type=int, default=0, help="parameters read early (default: %(default)s)")
    parser.add_argument("--folder", help="a folder on the disk (default: a temporary one)")
    a = parser.parse_args()
    os.environ |= {"DS_ACCELERATOR": "cpu", **ONE_PROCESS}
    torch, deepspeed = importlib.import_module("torch"), importlib.import_module("deepspeed")
    with tempfile.TemporaryDirectory(dir=a.folder) as folder:
        settings = config(folder, a.rows, max(8 * a.hidden // 3, VOCABULARY) * a.hidden, a.prefetch)
        with deepspeed.zero.Init(config_dict_or_path=settings):
            net = model(torch, a.layers, a.hidden)
        engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=settings)
        print(f"{sum(x.ds_numel for x in net.parameters()) / 1e9:.3f}B parameters", flush=True)
        for step in range(a.steps):
            began, before = time.perf_counter(), moved()
            loss = engine(torch.randint(0, VOCABULARY, (a.rows, ROW + 1)))
            engine.backward(loss)
            engine.step()
            record = {"step": step, "loss": loss.item(), "seconds": time.perf_counter() - began}
            record |= {name: after - before[name] for name, after in moved().items()}
            record["peak_resident_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
            print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
