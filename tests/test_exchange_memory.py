"""Resident memory of a model that comes in and goes out: a few tensors more than what the placement itself holds.

Each measurement is a process of its own, which resets the kernel's peak (VmHWM) just before. Devices here are the CPU,
so the arrays of the placement are part of the process; what the plan says of them is subtracted.
"""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from surojax.exchange import shards

LAYERS, D, F, V = 40, 384, 1536, 512
CONFIG = {
    "model_type": "llama",
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": F,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
}
LAYER = 4 * D * D + 3 * D * F + 2 * D  # parameters
ALL = LAYERS * LAYER + 2 * V * D + D
SLACK = 24 << 20  # bytes: what libraries and the allocator keep of the small programs that run
COMPILING = 150 << 20  # bytes: what the process keeps of compiling these programs, whatever the model

MEASURE = """
    import json, re, sys
    from pathlib import Path
    import jax
    from surojax import default_config
    from surojax.convert import convert, open_model
    from surojax.assembly.from_config import from_config
    from surojax.exchange import sources
    from surojax.exchange.model_tensors import readers
    from surojax.placement.home import DEVICE, HOST
    from surojax.placement.mesh import make_mesh
    from surojax.step.state_plan import bytes_per_device

    def status(name):
        return 1024 * int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

    def peak_of(work):
        Path("/proc/self/clear_refs").write_text("5")
        before = status("VmRSS")
        result = work()
        return status("VmHWM") - before, result

    def beyond_plan(folder, num_layers, **changes):
        c = default_config()
        c.update({"model_path": folder} | changes)
        c = sources.resolved(c)
        c.model.num_hidden_layers = num_layers
        run = from_config(c, make_mesh(jax.devices()[:1]), 1)
        weights = sources.tensors_of(Path(folder))
        planned = bytes_per_device(run.plan, DEVICE) + bytes_per_device(run.plan, HOST)
        peak, state = peak_of(lambda: run.load_state(*readers(weights)))
        return peak - planned
"""


def measured(code: str) -> int:
    """What a process prints as JSON after the definitions of MEASURE.

    glibc returns what is freed at once. Else each thread keeps some, and a peak is 50 MiB more or less by chance.
    """
    script = textwrap.dedent(MEASURE) + textwrap.dedent(code)
    env = os.environ | {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(128 << 10)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model in bfloat16, much larger than one of its layers."""
    found = tmp_path_factory.mktemp("model")
    (found / "config.json").write_text(json.dumps(CONFIG))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    shapes["lm_head.weight"] = (V, D)
    for l in range(LAYERS):
        for name, shape in {
            "self_attn.q_proj": (D, D),
            "self_attn.k_proj": (D, D),
            "self_attn.v_proj": (D, D),
            "self_attn.o_proj": (D, D),
            "mlp.gate_proj": (F, D),
            "mlp.up_proj": (F, D),
            "mlp.down_proj": (D, F),
            "input_layernorm": (D,),
            "post_attention_layernorm": (D,),
        }.items():
            shapes[f"model.layers.{l}.{name}.weight"] = shape
    bfloat16 = np.dtype(ml_dtypes.bfloat16)
    rng = np.random.default_rng(0)
    tensors = (rng.standard_normal(shape, np.float32).astype(bfloat16) for shape in shapes.values())
    planned = {name: shards.StoredTensor(shape, bfloat16) for name, shape in shapes.items()}
    shards.write_shard(found / "model.safetensors", planned, tensors)
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == ALL
    return found


@pytest.mark.full
@pytest.mark.parametrize("home", ["host", "nvme"])
def test_a_model_comes_in_layer_by_layer(folder, tmp_path, home):
    """Beyond the plan, forty layers need no more than ten, which is a few layers' state and what compiling takes."""
    changes = {
        "host": {"offload_master": True, "offload_optimizer": True, "offload_weights": True},
        "nvme": {"offload_master": "nvme", "offload_optimizer": "nvme", "nvme_path": str(tmp_path)},
    }[home]
    ten, forty = (
        measured(f"print(json.dumps(beyond_plan({str(folder)!r}, {layers}, **{changes!r})))") for layers in (10, LAYERS)
    )
    of_layer = LAYER * (4 + 4 + 4 + 2)  # master weights, two moments, work weights
    assert forty < 3 * of_layer + COMPILING < 0.2 * LAYERS * of_layer
    assert forty - ten < of_layer + SLACK


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_model_goes_out_tensor_by_tensor(folder, tmp_path, dtype):
    """From a folder; a few tensors out of three hundred."""
    out = str(tmp_path / "out")
    code = f"print(json.dumps(peak_of(lambda: str(convert({str(folder)!r}, {out!r}, dtype={dtype!r})))[0]))"
    peak = measured(code)
    assert peak < 4 * 4 * D * F + SLACK < 0.2 * 4 * ALL


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bfloat16", "q8_0"])
def test_a_gguf_file_goes_out_tensor_by_tensor(folder, tmp_path, dtype):
    """As a folder does; what is added is the library's own groups of rows."""
    code = f"""
        from surojax.exchange.gguf_export import export_gguf

        def written():
            opened = open_model({str(folder)!r})
            config = opened.config | {{"max_position_embeddings": 512}}
            out = {str(tmp_path / "out.gguf")!r}
            return str(export_gguf(opened.tensors, opened.model, config, {{}}, out, modelfile="", dtype={dtype!r}))

        print(json.dumps(peak_of(written)[0]))
    """
    peak = measured(code)
    assert peak < 6 * 4 * D * F + SLACK < 0.25 * 4 * ALL
