"""Settings that change no bit, in the program that users run: the command in a process of its own, compiled as theirs.

The other tests compile without most of LLVM's optimisations (conftest.py), so they do not see what these decide: which
products are contracted into multiply-adds, and how sums are vectorised (surojax/numerics/rounding.py). A few processes
with many rows each, since compiling takes nearly all the time.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
SMALLER = ("--config.model.num_hidden_layers=3", "--config.sequence_len=64")
STEPS = "12"  # a multiply-add that is contracted in one program only shows in the norm after a few
# Settings of the config, and rows of the table that must not differ by a bit from those that they are compared with.
CASES = {
    # One device and four, everything in host memory, some layers resident (a loop over one layer is no loop), files,
    # some tensors of the state on the device;
    # in float32 recomputed activations are those that are saved.
    "adamw": (
        ("model_dtype=float32",),
        "offload_saved@4,nvme@4,overlap_update@4,device_memory@4",
    ),
    # A head that is the embedding adds to the table what XLA could add before the tokens' rows, or after them.
    "tied": (
        ("model_dtype=float32", "model.tie_word_embeddings=True"),
        "offload_saved@4,nvme@4,overlap_update@4,device_memory@4",
    ),
    # A softmax divides by the same sum forward and backward; the norm of adapters is a sum over small arrays.
    "saved": (("model_dtype=float32",), "tp_saved@2,lora_offload_all"),
    "adamw8bit": (
        ("optimizer=adamw8bit", "model_dtype=bfloat16", "master_dtype=bfloat16"),
        "offload_all@4,overlap_update@4",
    ),
    "lion": (("optimizer=lion", "model_dtype=float32"), "nvme@4"),
    "fp8_hybrid": (("recipe=fp8_hybrid", "model_dtype=bfloat16"), "resident_layers@4"),
}


def as_users_run_it(*command: str) -> subprocess.CompletedProcess:
    """Runs Python with these arguments, without the compile options of the tests."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = (sys.executable, *command)
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=1200)


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_offloading_changes_no_bit_as_users_compile_it(case):
    changes, rows = CASES[case]
    command = ["-m", "surojax.verify", "--config", "configs/tiny.py", *SMALLER, "--steps", STEPS]
    done = as_users_run_it(*command, "--only", rows, *(f"--config.{change}" for change in changes))
    table = {line.split()[0]: line.split() for line in done.stdout.splitlines() if line.endswith(("pass", "FAIL"))}
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert list(table) and set(table) == set(rows.split(",")), done.stdout
    differences = {name: row[2:4] for name, row in table.items()}
    assert all(found == ["0", "0"] for found in differences.values()), done.stdout


FIRST_STATES = """
import chex, jax
jax.config.update("jax_num_cpu_devices", 8)
from surojax.config import flags
from surojax.verification.rows import Curves

c = flags.load_config("configs/tiny.py")
c.model.update({"num_hidden_layers": 3, "num_attention_heads": 4})
curves = Curves(c, 1, None)

def drawn(name):
    with curves.built(curves.table[name]) as row:
        return jax.device_get(row.run.init_state(row.seed))

plain = drawn("plain")
for name in ("offload_all@4", "hsdp_tp_2x2x2_offload_all", "cp_ulysses_tp_2x2x2_offload_all"):
    chex.assert_trees_all_equal(plain, drawn(name))
staged = drawn("pp_tp_2x2x2_offload_all")  # with padding
staged = jax.tree.map(lambda x, like: x[: len(like)] if like.ndim else x, staged, plain)
chex.assert_trees_all_equal(plain, staged)
print("equal")
"""


@pytest.mark.full
def test_a_placement_draws_the_same_state_as_users_compile_it():
    """The verifier draws one for all rows."""
    done = as_users_run_it("-c", FIRST_STATES)
    assert done.stdout == "equal\n", done.stdout + done.stderr[-2000:]


# A kind with one layer is differentiated in the loop over microbatches, and in straight-line code if gradients are in
# host memory (`starts_in_first_group`). With one row in a microbatch XLA fuses the two in other kernels.
IN_A_LOOP = """
import sys

import jax
import jax.numpy as jnp
import numpy as np

from surojax.models import decoder_model
from surojax.models.decoder_config import DecoderConfig
from surojax.models.model import PLAIN

sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
sizes |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "norm_plus_one": True}
sizes |= {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2}
(segment,) = decoder_model.build(DecoderConfig(layer_types=sys.argv[1], **sizes)).segments
rng = np.random.default_rng(0)
w = jax.tree.map(lambda p: rng.normal(0.5, 0.2, p.shape).astype(np.float32), segment.params)
x, dx = (rng.normal(0, 0.1, (2, 1, 32, 64)).astype(np.float32) for _ in range(2))
starts = np.maximum.accumulate(np.where(rng.random((2, 1, 32)) < 1 / 8, np.arange(32, dtype=np.int32), 0), axis=2)

def backward(w, *of_microbatch):
    w, x, dx, starts = jax.lax.optimization_barrier((w, *of_microbatch))
    saved = segment.block_forward(w, x, None, PLAIN, starts)[1]
    return segment.block_backward(w, saved, (dx, None), None, PLAIN, starts)[:2]

@jax.jit
def straight(w, *batch):
    done = []
    for i in range(2):
        gradients, w = jax.lax.optimization_barrier((backward(w, *(array[i] for array in batch)), w))
        done.append(gradients)
    return jax.tree.map(lambda *arrays: jnp.stack(arrays), *done)

looped = jax.jit(lambda w, *batch: jax.lax.map(lambda each: backward(w, *each), batch))
found = zip(jax.tree.leaves(straight(w, x, dx, starts)), jax.tree.leaves(looped(w, x, dx, starts)), strict=True)
print("equal" if all((a == b).all() for a, b in found) else "not equal")
"""


@pytest.mark.full
@pytest.mark.parametrize("mixer", ["linear_attention", "mamba2", "conv", "full_attention"])
def test_a_layer_is_differentiated_alike_in_a_loop_and_outside_of_one(mixer):
    done = as_users_run_it("-c", IN_A_LOOP, mixer)
    assert done.stdout == "equal\n", done.stdout + done.stderr[-2000:]
