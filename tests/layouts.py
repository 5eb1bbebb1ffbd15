"""Runs and checkpoints that go on under another layout: what tests of several axes share."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from small import Small

from surojax.config.fields import Config, default_config
from surojax.run.checkpoint import Checkpoints
from surojax.run.on_disk import find
from surojax.run.restore import restore
from surojax.train import train


def check_checkpoint_moves(one: Small, other: Small, folder: Path) -> None:
    """Saves the state of `one`, restores it as `other` places it, and back: equal to the bit, and placed as planned."""
    saved = one.state
    with Checkpoints(folder / "one", save_total_limit=1) as checkpoints:
        checkpoints.save(saved, {"step": 1, "layers": one.run.layers})
    there = restore(find(folder / "one"), other.plan, other.run.layers)
    assert jax.tree.map(lambda x: x.sharding, there) == jax.tree.map(lambda x: x.sharding, other.plan)
    with Checkpoints(folder / "other", save_total_limit=1) as checkpoints:
        checkpoints.save(there, {"step": 1, "layers": other.run.layers})
    back = restore(find(folder / "other"), one.plan, one.run.layers)

    def check(found, expected):
        """Equal to the bit, but for padding, which is zeros (step/padding.py)."""
        found, expected = np.asarray(found), np.asarray(expected)
        if not expected.ndim:
            assert found == expected
            return
        np.testing.assert_array_equal(found[: len(expected)], expected)
        assert not found[len(expected) :].any()

    for found in (there, back):
        jax.tree.map(check, found, saved)
    assert jax.tree.map(jnp.shape, back) == jax.tree.map(jnp.shape, saved)


def config_of_a_run(folder: Path) -> Config:
    """A config of two layers that trains on a text in this folder."""
    (folder / "text.txt").write_text("".join(f"line {i} of the text\n" for i in range(2000)))
    c = default_config()
    c.model.update({"vocab_size": 320, "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2})
    c.model.update({"num_attention_heads": 4, "num_key_value_heads": 2})
    c.update({"data": str(folder / "text.txt"), "data_cache": str(folder / "cache"), "model_dtype": "float32"})
    c.update({"sequence_len": 64, "per_device_batch_size": 2, "sample_tokens": 5, "eval_steps": 0, "eval_batches": 2})
    return c


def check_a_run_goes_on(c: Config, folder: Path, other: dict[str, Any]) -> None:
    """Trains in three runs: on one device, with `other` settings, on one device again; and all three on one device.

    Both have the same samples and losses, step by step and in the evaluation at the end of each run.
    """
    alone = {name: default_config()[name] for name in other} | {"gpus": 1}
    losses = []
    for name, second in (("one", alone), ("mixed", other)):
        c.output_dir = str(folder / name)
        records = []
        for steps, settings in zip((2, 4, 6), (alone, second, alone), strict=True):
            c.update({"max_steps": steps, **settings})
            records += train(c).history
        losses.append([record["loss"] for record in records])
    assert len(losses[0]) == 6 + 3
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)
