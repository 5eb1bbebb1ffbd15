"""A training run, top to bottom.

    python -m surojax.train --config configs/tiny.py [--config.FIELD=VALUE ...]

`train(config)` is the run: check, data, plan, compile, loop, finish. Nothing is written before everything that can be
checked has been. Start the same command again after any kind of end: it continues where the last checkpoint stands.
"""

import argparse
import contextlib
import math
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np

from surojax import checkpoint, config as configs, data, gpus, placement, state
from surojax.blueprint import Blueprint, draw
from surojax.checkpoint import Checkpoints
from surojax.errors import CheckpointError, ConfigError
from surojax.fit import GiB, check_fit
from surojax.generate import complete
from surojax.mesh import find_devices, make_mesh
from surojax.metrics import LateMetrics, MetricsLog, NonFiniteLoss, check_finite, flops_per_token
from surojax.tokenizer import load_tokenizer


class Result(NamedTuple):
    """What `train` returns."""

    state: state.TrainState
    history: list[dict[str, Any]]  # the records of metrics.jsonl that this call wrote
    checkpoint: Path | None  # the newest one
    finished: bool  # False after SIGTERM or Ctrl-C


def train(config: ml_collections.ConfigDict) -> Result:
    """Train as the config says; see `config.default_config` for the fields.

    Raises ConfigError (bad settings or data, too little memory; nothing was written), CheckpointError (a checkpoint that
    cannot be written, read or continued), NonFiniteLoss (the loss is NaN or infinite).
    """
    c, started = config, time.perf_counter()

    # -- Check: everything that can be judged without data ------------------------------------------------------------
    configs.check(c)
    output_dir = configs.check_output_dir(c.output_dir)
    devices = find_devices(c.gpus)
    mesh = make_mesh(devices, dp_replicate_size=c.dp_replicate_size, dp_shard_size=c.dp_shard_size)
    check_fit(c, draw(c, mesh, total_steps=1), devices)

    # -- Data ---------------------------------------------------------------------------------------------------------
    tokenizer = load_tokenizer(c.tokenizer)
    if tokenizer.vocab_size > c.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size: expected at least {tokenizer.vocab_size} (of {tokenizer.name}), got {c.model.vocab_size}; raise it"
        )
    corpus, held_out = data.load_corpora(c.data, eval_source=c.eval_data, tokenizer=tokenizer, text_field=c.text_field)
    batch_size = c.per_device_batch_size * len(devices)
    samples_per_step = batch_size * c.gradient_accumulation_steps
    data.check_length(corpus, c.sequence_len, samples_per_step)
    total_steps = c.max_steps or c.num_epochs * data.samples_per_epoch(corpus, c.sequence_len) // samples_per_step

    # -- Plan: shapes, shardings, memory; and what there is to continue from ------------------------------------------
    run = draw(c, mesh, total_steps)
    need = check_fit(c, run, devices)
    identity = {"tokenizer": tokenizer.name, "data": corpus.fingerprint}
    resume = find_resume(c, output_dir, identity)

    # -- Compile ------------------------------------------------------------------------------------------------------
    say = lambda text: print(text, flush=True)
    parameters = sum(math.prod(p.shape) for p in jax.tree.leaves(run.params))
    say(
        f"surojax: {parameters / 1e6:,.1f}M parameters on {len(devices)} x {devices[0].device_kind} ({' x '.join(f'{a}={n}' for a, n in mesh.shape.items())})"
    )
    say(
        f"data: {corpus.name}, {len(corpus.tokens):,} tokens for training, {len(held_out.tokens):,} held out; {total_steps} steps of {samples_per_step * c.sequence_len:,} tokens"
    )
    say(
        f"memory per device: {sum(need.values()) / GiB:.2f} GiB ({', '.join(f'{k} {v / GiB:.2f}' for k, v in need.items())})"
    )
    if whole := placement.kept_whole(run.params, run.engine.dims) if mesh.shape["dp_shard"] > 1 else {}:
        say(
            f"note: kept whole on every device, since {mesh.shape['dp_shard']} divides none of their dimensions: {whole}"
        )
    compile_start = time.perf_counter()
    tokens_sharding = placement.batch_sharding(mesh)
    tokens = jax.ShapeDtypeStruct(
        (c.gradient_accumulation_steps, batch_size, c.sequence_len), np.int32, sharding=tokens_sharding
    )
    train_step = run.train_step().lower(run.plan, tokens, tokens).compile()
    say(f"compiled the step in {time.perf_counter() - compile_start:.1f} s")

    # -- State: new, or from a checkpoint -----------------------------------------------------------------------------
    if resume:
        train_state, meta = checkpoint.restore(resume, run.plan), checkpoint.read_meta(resume)
        say(f"continuing from {resume}")
    else:
        train_state, meta = state.init_state(run.model, run.plan, run.optimizer, c.seed), {"step": 0, "samples": 0}
    first_step, samples = meta["step"], meta["samples"]

    # -- Loop ---------------------------------------------------------------------------------------------------------
    history, evaluate = [], Evaluation(c, run, held_out, batch_size)
    batches = data.batches(
        corpus,
        sequence_len=c.sequence_len,
        batch_size=batch_size,
        accumulation=c.gradient_accumulation_steps,
        seed=c.seed,
        start_sample=samples,
    )
    log_options = {
        "total_steps": total_steps,
        "tokens_per_step": samples_per_step * c.sequence_len,
        "first_step": first_step,
    }
    log_options |= {"flops_per_token": run_flops(run, c.sequence_len), "peak_flops": peak_flops(devices, c.model_dtype)}
    with (
        contextlib.closing(batches),
        Checkpoints(output_dir, save_total_limit=c.save_total_limit) as checkpoints,
        MetricsLog(output_dir, **log_options) as log,
        StopSignal() as stop,
    ):
        late = LateMetrics()

        def report(done) -> None:
            if done is not None:
                history.append(log.step(done.step, **done.values, duration_s=done.duration_s))
                check_finite(done.step, done.values["loss"], done.values["grad_norm"], checkpoints.last)

        for step in range(first_step + 1, total_steps + 1):
            batch = next(batches)
            inputs, labels = jax.device_put((batch["inputs"], batch["labels"]), tokens_sharding)
            with jax.transfer_guard("disallow"):
                train_state, metrics = train_step(train_state, inputs, labels)
            report(late.push(step, metrics))
            samples += samples_per_step

            last = step == total_steps or bool(stop.received)
            evaluate_now = step == total_steps or (c.eval_steps and step % c.eval_steps == 0)
            save_now = last or (c.save_steps and step % c.save_steps == 0)
            if evaluate_now or save_now:
                report(late.flush())  # a checkpoint of step n is written when n is known to be sound and is in the log
                if evaluate_now:
                    history.append(log.eval(step, **evaluate(train_state.weights)))
                if save_now:
                    checkpoints.save(train_state, {"step": step, "samples": samples, "config": c.to_dict(), **identity})
                late.restart_clock()
            if last:
                break

        # -- Finish ---------------------------------------------------------------------------------------------------
        finished = step == total_steps if total_steps > first_step else True
        if not finished:
            log.message(f"stopped by {stop.received} after step {step}")
        elif c.sample_tokens:
            log.message(sample(c, run, train_state.weights, tokenizer, held_out))
        checkpoints.wait()
        log.message(
            f"{total_steps - first_step if finished else step - first_step} steps in {time.perf_counter() - started:.0f} s"
        )
        log.message(f"checkpoint: {checkpoints.last}")
        return Result(train_state, history, checkpoints.last, finished)


def find_resume(c: ml_collections.ConfigDict, output_dir: Path, identity: dict[str, str]) -> Path | None:
    """The checkpoint to continue from, None for a new run; refused unless it is of the same model, data and seed."""
    own, wanted = checkpoint.find(output_dir / checkpoint.FOLDER), c.resume_from_checkpoint
    if wanted == "no":
        if own:
            raise ConfigError(
                f"resume_from_checkpoint: 'no', but {own} exists; choose another output_dir, delete it, or use 'auto'"
            )
        return None
    found = own if wanted == "auto" else checkpoint.find(wanted)
    if found is None:
        if wanted == "auto":
            return None
        raise ConfigError(
            f"resume_from_checkpoint: expected 'auto', 'no' or a checkpoint, got {wanted!r}, which holds none"
        )
    if own and found != own:
        raise ConfigError(
            f"resume_from_checkpoint: {found} is not the newest in output_dir; delete {own} or choose another output_dir"
        )
    meta = checkpoint.read_meta(found)
    old = meta["config"]
    changed = checkpoint.differences(old, configs.restored_config(old).to_dict() | c.to_dict())
    fixed = {k: v for k, v in changed.items() if k.split(".")[0] in ("model", "seed", "sequence_len")}
    fixed |= {k: (meta[k], v) for k, v in identity.items() if meta[k] != v}
    if fixed:
        what = ", ".join(f"{k} is {a!r} there and {b!r} here" for k, (a, b) in fixed.items())
        raise CheckpointError(f"checkpoint {found} is of another run: {what}; use the same, or another output_dir")
    ignored = ("output_dir", "resume_from_checkpoint")
    if rest := {k: v for k, v in changed.items() if k not in ignored}:
        print("continuing with changed settings: " + ", ".join(f"{k} {a!r} -> {b!r}" for k, (a, b) in rest.items()))
    return found


class Evaluation:
    """Loss on held-out text: nats per token, and bits per byte, which compares across tokenizers."""

    def __init__(self, c: ml_collections.ConfigDict, run: Blueprint, held_out: data.Corpus, batch_size: int):
        options = {"sequence_len": c.sequence_len, "batch_size": batch_size, "max_batches": c.eval_batches}
        self.batches = list(data.evaluation_batches(held_out, **options))
        self.step, self.bytes_per_token = run.eval_step(), held_out.bytes_per_token
        self.sharding = placement.batch_sharding(run.mesh, accumulated=False)

    def __call__(self, weights) -> dict[str, float]:
        start = time.perf_counter()
        put = lambda b: jax.device_put((b["inputs"], b["labels"]), self.sharding)
        sums = jax.device_get([self.step(weights, *put(b)) for b in self.batches])
        loss = float(sum(np.float64(s) for s, _ in sums) / sum(int(n) for _, n in sums))
        bits = loss / math.log(2) / self.bytes_per_token
        return {"loss": loss, "bits_per_byte": bits, "duration_s": time.perf_counter() - start}


class StopSignal:
    """Within it, SIGTERM and the first Ctrl-C are remembered instead of ending the process; a second Ctrl-C ends it."""

    received: str = ""

    def __enter__(self):
        self.old = {}
        with contextlib.suppress(ValueError):  # not in the main thread: signals stay as they are
            for number in (signal.SIGTERM, signal.SIGINT):
                self.old[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_):
        for number, handler in self.old.items():
            signal.signal(number, handler)

    def _receive(self, number, _frame):
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name


def sample(c: ml_collections.ConfigDict, run: Blueprint, weights, tokenizer, held_out: data.Corpus) -> str:
    """The prompt and what the model makes of it."""
    prompt = c.sample_prompt or tokenizer.decode(held_out.tokens[:64])
    text = complete(
        run.model, weights, tokenizer, prompt, max_tokens=c.sample_tokens, temperature=c.sample_temperature, seed=c.seed
    )
    return f"--- prompt\n{prompt}\n--- continuation\n{text}\n---"


def run_flops(run: Blueprint, sequence_len: int) -> float:
    """FLOPs of training on one token."""
    m = run.model
    return flops_per_token(m.num_matmul_params, m.num_hidden_layers, m.num_attention_heads, m.head_dim, sequence_len)


def peak_flops(devices, dtype: str) -> float | None:
    """FLOP/s of all devices together in matrix products of this dtype, None where unknown."""
    gpu = gpus.find_gpu(devices[0].device_kind)
    return None if gpu is None else len(devices) * (gpu.bf16_flops if dtype == "bfloat16" else gpu.tf32_flops)


def main(argv: list[str] | None = None) -> None:
    """Parse the command line, run, and say how to go on; one line and a non-zero exit code for an error."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m surojax.train", description=__doc__.splitlines()[0])
    try:
        c, _ = configs.parse(argv, parser)
        result = train(c)
    except (ConfigError, CheckpointError, NonFiniteLoss) as error:
        sys.exit(f"surojax.train: error: {error}")
    print(f"sample:  python -m surojax.generate --checkpoint {shlex.quote(c.output_dir)} --prompt TEXT")
    again = shlex.join(["python", "-m", "surojax.train", *argv])
    print(f"resume:  {again}" + (f" --config.max_steps={2 * result.state.step}" if result.finished else ""))


if __name__ == "__main__":
    main()
