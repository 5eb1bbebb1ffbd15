"""A training run, from top to bottom.

    python -m surojax.train --config configs/tiny.py [--config.FIELD=VALUE ...]

`train(config)` is the run: check, data, plan, compile, state, loop, finish. It checks everything that can be checked
before it writes anything. To continue a run that ended for any reason, start the same command again: it resumes from
the last checkpoint.
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
import numpy as np
from tqdm import tqdm

from surojax import convert
from surojax.assembly import Assembly, from_config
from surojax.config import checks, fields as configs
from surojax.config.fields import Config
from surojax.config.flags import parse
from surojax.data import load as data
from surojax.data.batches import batches as training_batches
from surojax.data.cache import Corpus
from surojax.data.samples import check_length
from surojax.data.tokenizer import Tokenizer, load_tokenizer
from surojax.errors import CheckpointError, ConfigError
from surojax.exchange.sources import keeps, open_weights, resolved
from surojax.exchange.weights import describe as describe_weights, readers
from surojax.inference.load import Trained
from surojax.inference.prompts import complete
from surojax.memory import nvme
from surojax.memory.lock import locked
from surojax.models.attention import chosen_here
from surojax.placement.layout import batch_sharding, replicated_matrices
from surojax.placement.mesh import data_parallel, find_devices, make_mesh, shards as number_of_shards
from surojax.planner import gpus, prediction, report as planned, traffic
from surojax.planner.advice import summed
from surojax.planner.check_fit import check_fit, compare, memory_limit
from surojax.planner.footprint import estimate_host, host_temporaries
from surojax.planner.prediction import Prediction
from surojax.run import checkpoint
from surojax.run.checkpoint import Checkpoints
from surojax.run.metrics import (
    METRICS_FILE,
    DeferredMetrics,
    MetricsLog,
    NonFiniteLoss,
    check_finite,
    perplexity,
    read_metrics,
)
from surojax.step import state
from surojax.step.train_step import up_to_date

IDENTITY = ("model", "seed", "sequence_len", "sample_packing")  # fields that a run continues with, unchanged


class Result(NamedTuple):
    """The result of `train`."""

    state: state.TrainState
    history: list[dict[str, Any]]  # the records of metrics.jsonl that this call wrote
    checkpoint: Path | None  # the newest checkpoint
    finished: bool  # False if SIGTERM or Ctrl-C stopped the run


def train(config: Config) -> Result:
    """Train a model as the config says; see `config.default_config` for the fields.

    Raises ConfigError (bad settings or data, or too little memory; nothing was written), CheckpointError (a checkpoint
    cannot be written, read or continued), NonFiniteLoss (the loss is NaN or infinite), OSError (the disk has no room
    for metrics, or the disk of nvme_path fails).
    """
    c = resolved(config)
    started = time.perf_counter()

    # -- Check: everything that can be checked without data -----------------------------------------------------------
    checks.check(c)
    output_dir = checks.check_output_dir(c.output_dir)
    devices = find_devices(c.gpus)
    mesh = make_mesh(devices, **configs.mesh_sizes(c))
    run = from_config(c, mesh, total_steps=1)
    need = check_fit(c, run, devices)
    nvme.check(nvme.store_of(run.plan))
    entries = data.parse_entries(c.datasets, c.validation_datasets)
    newest = checkpoint.find(output_dir / checkpoint.FOLDER)
    continues = newest is not None or c.resume_from_checkpoint not in ("auto", "no")
    initial = None if continues else open_weights(c, run.model)
    checkpoint.check_room(output_dir, run.plan)

    # -- Data, and the checkpoint to continue from --------------------------------------------------------------------
    tokenizer = load_tokenizer(c.tokenizer)
    checks.check_vocabulary(c, tokenizer.vocab_size, tokenizer.name)
    batch_size = c.per_device_batch_size * data_parallel(mesh)
    samples_per_step = batch_size * c.gradient_accumulation_steps
    settings = data.Settings(**{name: c[name] for name in data.SETTINGS})
    found = data.load(entries, settings, tokenizer, eval_batch_size=batch_size, say=say)
    samples = found.train
    check_length(samples.all, samples_per_step)
    identity = {"tokenizer": tokenizer.name, "data": samples.fingerprint}
    resume = find_resume(c, output_dir, identity, samples_per_step)
    meta = checkpoint.read_meta(resume) if resume else {"step": 0, "samples": 0}
    first_step = meta["step"]
    position = meta["samples"]
    total_steps = c.max_steps or first_step + max(c.num_epochs * len(samples) - position, 0) // samples_per_step
    check_schedule(c, total_steps)

    # -- Plan: shapes, shardings, memory ------------------------------------------------------------------------------
    run = from_config(c, mesh, total_steps)
    describe(c, run, devices, need)
    say(found.describe())
    say(f"run: {total_steps} steps of {samples_per_step * c.sequence_len:,} tokens into {output_dir}")

    with contextlib.ExitStack() as until_end:
        if store := nvme.store_of(run.plan):
            say(until_end.enter_context(nvme.claim(store)))
        if resume and first_step >= total_steps:
            say(f"nothing left to train: {resume} is at step {first_step} of {total_steps}; raise max_steps to go on")
            return Result(checkpoint.restore(resume, run.plan), [], resume, True)
        output_dir.mkdir(parents=True, exist_ok=True)
        until_end.enter_context(locked(output_dir / "lock", "output_dir"))
        if checkpoint.find(output_dir / checkpoint.FOLDER) != newest:
            raise CheckpointError(
                f"another run wrote checkpoints into {output_dir} while this one started; start again"
            )
        if c.model_path and not (resume and keeps(output_dir, c.model_path)):
            convert.keep(c)

        # -- Compile; a thread prepares the first batches meanwhile ---------------------------------------------------
        batches = training_batches(
            samples,
            batch_size=batch_size,
            accumulation=c.gradient_accumulation_steps,
            seed=c.seed,
            start_sample=position,
        )
        until_end.enter_context(contextlib.closing(batches))
        compile_start = time.perf_counter()
        options = run.compiler_options(
            devices[0].platform,
            memory_bytes=memory_limit(devices[0]),
            host_temporaries=host_temporaries(run, traffic.batch_of(c)),
        )
        tokens_shape = (c.gradient_accumulation_steps, batch_size, c.sequence_len)
        tokens = jax.ShapeDtypeStruct(tokens_shape, np.int32, sharding=batch_sharding(mesh))
        arrays = run.engine.batch_arrays
        train_step = run.train_step().lower(run.plan, *[tokens] * len(arrays)).compile(options)
        evaluate = Evaluation(c, run, mesh, found.evaluated)
        say(f"compiled in {time.perf_counter() - compile_start:.1f} s")
        predicted = predict(c, run, train_step, devices)

        # -- State: from a checkpoint, from another model's weights, or new -------------------------------------------
        if store and (step := store.interrupted()):
            start = f"continuing from {resume.name}" if resume else "there is no checkpoint, so this starts anew"
            say(f"nvme: the last run ended within the update of step {step}, what it left is not used: {start}")
        if resume:
            train_state = checkpoint.restore(resume, run.plan)
            say(f"continuing from {resume}")
        elif initial:
            train_state = run.load_state(*readers(initial))
            say(f"starting from {describe_weights(initial)}")
        else:
            train_state = run.init_state(c.seed)

        # -- Loop -----------------------------------------------------------------------------------------------------
        checkpoints = until_end.enter_context(Checkpoints(output_dir, save_total_limit=c.save_total_limit))
        log = MetricsLog(
            output_dir,
            total_steps=total_steps,
            tokens_per_step=samples_per_step * c.sequence_len,
            first_step=first_step,
            flops_per_token=sum(traffic.token_flops(run, c.sequence_len).values()),
            peak_flops=peak_flops(devices, run, c.sequence_len),
        )
        until_end.enter_context(log)
        stop = until_end.enter_context(StopSignal())
        history = []
        deferred = DeferredMetrics()
        virtual_devices = devices[0].platform == "cpu" and len(devices) > 1

        def report(done) -> None:
            if done is not None:
                history.append(
                    log.step(done.step, **done.values, duration_s=done.duration_s, data_wait_s=done.data_wait_s)
                )
                check_finite(done.step, done.values["loss"], done.values["grad_norm"], checkpoints.last)

        if initial:  # the loss that fine-tuning starts from
            history += [log.eval(first_step, **scores) for scores in evaluate(train_state.weights)]
            deferred.restart_clock()
        step = first_step
        for step in range(first_step + 1, total_steps + 1):
            asked = time.perf_counter()
            batch = next(batches)
            data_wait_s = time.perf_counter() - asked
            on_devices = jax.device_put([batch[name] for name in arrays], tokens.sharding)
            with jax.transfer_guard("disallow"):
                train_state, metrics = train_step(train_state, *on_devices)
            position += samples_per_step
            report(deferred.push(step, metrics, data_wait_s))
            # On virtual CPU devices, several programs with collectives in flight can block each other. With layers in
            # files, a step has already ended when `train_step` returns.
            if virtual_devices or store:
                report(deferred.flush())
            checkpoints.check()

            stopping = stop.received
            final = step == total_steps
            evaluate_now = final or (c.eval_steps and step % c.eval_steps == 0)
            save_now = final or stopping or (c.save_steps and step % c.save_steps == 0)
            if evaluate_now or save_now:
                report(deferred.flush())  # logs step n and checks that it is finite, before its checkpoint is written
                train_state = up_to_date(train_step, train_state)
                if evaluate_now:
                    history += [log.eval(step, **scores) for scores in evaluate(train_state.weights)]
                if save_now:
                    progress = {"step": step, "samples": position, "samples_per_step": samples_per_step}
                    checkpoints.save(train_state, progress | {"config": c.to_dict(), **identity})
                deferred.restart_clock()
            if stopping and not final:
                say(f"stopped by {stopping} after step {step} of {total_steps}; start again to continue")
                break

        # -- Finish ---------------------------------------------------------------------------------------------------
        checkpoints.wait()
        finished = step == total_steps
        if finished and c.sample_tokens:
            say(sample(c, run, train_state.weights, tokenizer, found.held_out))
        say(f"{step - first_step} steps in {time.perf_counter() - started:.0f} s")
        durations = [record["duration_ms"] / 1e3 for record in history if record["log"] == "step"]
        if compared := prediction.comparison(predicted, durations, samples_per_step * c.sequence_len):
            say(compared)
        if comparison := compare(need, train_step, devices[0]):
            say(comparison)
        say(evaluation_summary(output_dir))
        say(f"checkpoint: {checkpoints.last}")
        return Result(train_state, history, checkpoints.last, finished)


def say(text: str) -> None:
    """Print a line, above the progress bar if there is one. Characters that the terminal cannot show are escaped."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    tqdm.write(text.encode(encoding, "backslashreplace").decode(encoding))
    sys.stdout.flush()


def check_schedule(c: Config, total_steps: int) -> None:
    """Raises ConfigError if warmup and cooldown are longer than the run, whose length may depend on the data."""
    planned = configs.warmup_steps(c, total_steps) + c.cooldown_steps
    if planned > total_steps:
        raise ConfigError(
            f"warmup_steps + cooldown_steps: expected at most the {total_steps} steps of num_epochs={c.num_epochs}, "
            f"got {planned}; shorten them, or raise num_epochs"
        )


def find_resume(c: Config, output_dir: Path, identity: dict[str, str], samples_per_step: int) -> Path | None:
    """Returns the checkpoint to continue from, or None for a new run.

    Raises ConfigError if `resume_from_checkpoint` names no checkpoint or contradicts those in output_dir, and
    CheckpointError if the checkpoint was written with another model, seed, sequence length, tokenizer or data.
    """
    own = checkpoint.find(output_dir / checkpoint.FOLDER)
    wanted = c.resume_from_checkpoint
    if wanted == "no":
        if own:
            raise ConfigError(
                f"resume_from_checkpoint: 'no', but {own} exists; choose another output_dir, delete it, or use 'auto'"
            )
        return None
    found = own
    # A run that started from another run's checkpoint has its own by now: the same command resumes from the newest one.
    if wanted != "auto" and not (own and checkpoint.read_meta(own)["config"]["resume_from_checkpoint"] == wanted):
        found = checkpoint.find(wanted)
        if found is None:
            raise ConfigError(
                f"resume_from_checkpoint: expected 'auto', 'no' or a checkpoint, got {wanted!r}, which holds none"
            )
        if own and found != own:
            raise ConfigError(
                f"resume_from_checkpoint: expected {own}, the newest in output_dir, got {found}; "
                "move the newer ones away, or choose another output_dir"
            )
    if found is None:
        return None
    meta = checkpoint.read_meta(found)
    saved = checks.restored_config(meta["config"], checkpoint.written_by(meta))
    changed = checkpoint.differences(saved.to_dict(), c.to_dict())
    fixed = {k: v for k, v in changed.items() if k.split(".")[0] in IDENTITY}
    fixed |= {k: (meta[k], v) for k, v in identity.items() if meta[k] != v}
    if fixed:
        what = ", ".join(f"{k} is {a!r} there and {b!r} here" for k, (a, b) in fixed.items())
        raise CheckpointError(f"checkpoint {found} is of another run: {what}; use the same, or another output_dir")
    settings = {k: v for k, v in changed.items() if k not in ("output_dir", "resume_from_checkpoint")}
    if settings:
        say("continuing with changed settings: " + ", ".join(f"{k} {a!r} -> {b!r}" for k, (a, b) in settings.items()))
    check_batch(c, found, meta.get("samples_per_step", samples_per_step), samples_per_step, settings)
    return found


def check_batch(c: Config, found: Path, before: int, now: int, changed: dict) -> None:
    """Say that the number of samples per step has changed since the checkpoint.

    before, now: samples per step. changed: the settings that differ. Raises CheckpointError if none of them determines
    the batch size: then only the number of available devices changed, which may be a mistake.
    """
    if before == now:
        return
    sizes = {"gpus", "cp_size", "tp_size", "pp_size", "per_device_batch_size", "gradient_accumulation_steps"}
    if not changed.keys() & sizes:
        groups = now // (c.per_device_batch_size * c.gradient_accumulation_steps)
        devices = groups * configs.gpus_per_sequence(c)
        per_device, rest = divmod(before, groups * c.gradient_accumulation_steps)
        keep = "" if rest else f"per_device_batch_size={per_device} keeps it so, "
        raise CheckpointError(
            f"checkpoint {found} is of a run with {before} samples a step, which with these settings would be {now} on "
            f"the {devices} devices here; {keep}gpus={devices} goes on with {now}"
        )
    say(f"note: a step has {now} samples from here on, it had {before}")


def describe(c: Config, run: Assembly, devices, need: dict[str, int]) -> None:
    """Print the size of the model, the devices, the mesh, and the memory that the run needs."""
    axes = " x ".join(f"{name}={size}" for name, size in run.mesh.shape.items())
    millions = run.model.num_parameters / 1e6
    say(f"surojax: {millions:,.1f}M parameters on {len(devices)} x {devices[0].device_kind} ({axes})")
    # On a CPU, `need` already includes the host memory, since it is also the devices' memory.
    host = {} if devices[0].platform == "cpu" else estimate_host(run, traffic.batch_of(c))
    for memory, needs in (("memory", need), ("host memory", host)):
        if needs:
            say(f"{memory} per device: {summed(needs, digits=2)}")
    if run.engine.packed:
        attention = chosen_here(c.attention, c.model_dtype, configs.head_dim(c), packed=True)
        say(planned.documents(attention, c.cp_method))
    shards = number_of_shards(run.mesh)
    if shards > 1 and (replicated := replicated_matrices(run.params, run.engine.layouts.master)):
        say(f"note: not sharded over {shards} devices, which divide none of their dimensions: {replicated}")


def predict(c: Config, run: Assembly, compiled, devices) -> Prediction:
    """The predicted time of the compiled step, printed if the planner knows the GPU. It never ends a run.

    Half a second at most: a model of 70B parameters takes 0.2 s.
    """
    gpu = gpus.find_gpu(devices[0].device_kind)
    if gpu is None:
        return Prediction(not_predicted="a GPU that is not in surojax/planner/gpus.py")
    batch = traffic.batch_of(c)
    try:
        if nvme.store_of(run.plan):
            return Prediction(not_predicted="state in files, and the drive's speed is not known")
        found = prediction.of_compiled(compiled.as_text(), run, batch, gpu)
    except Exception as error:  # whatever a new version of XLA writes
        say(f"note: no time is predicted: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
        return Prediction(not_predicted="the compiled step cannot be read")
    if found.predicted_step_s is None or found.predicted_range_s is None:
        return found
    low, high = (f"{1e3 * t:,.0f}" for t in found.predicted_range_s)
    rate = len(devices) * (found.tokens_per_s_per_gpu or 0.0)
    say(f"predicted: {1e3 * found.predicted_step_s:,.1f} ms a step ({low} to {high}), {rate:,.0f} tok/s")
    return found


class Evaluation:
    """Computes the loss on text held out from training and on validation datasets, all with one compiled step."""

    def __init__(self, c: Config, run: Assembly, mesh: jax.sharding.Mesh, evaluated: list[data.Evaluated]):
        self.evaluated = evaluated
        self.arrays = run.engine.batch_arrays
        self.sharding = batch_sharding(mesh, accumulated=False)
        shape = (c.per_device_batch_size * data_parallel(mesh), c.sequence_len)
        tokens = jax.ShapeDtypeStruct(shape, np.int32, sharding=self.sharding)
        options = run.compiler_options(mesh.devices.flat[0].platform)
        self.step = run.eval_step().lower(run.plan.weights, *[tokens] * len(self.arrays)).compile(options)

    def __call__(self, weights) -> list[dict[str, Any]]:
        """Returns the arguments of `MetricsLog.eval` for each set."""
        return [self.scores(weights, one) for one in self.evaluated]

    def scores(self, weights, evaluated: data.Evaluated) -> dict[str, Any]:
        """Returns {"name", "loss" (nats per token), "bits_per_byte" (comparable across tokenizers), "duration_s"}."""
        start = time.perf_counter()
        sums = []  # (sum of the losses, number of labels) of each batch
        for batch in evaluated.batches:
            on_devices = jax.device_put([batch[name] for name in self.arrays], self.sharding)
            # One batch at a time: programs with collectives in flight can block each other on virtual CPU devices.
            sums.append(jax.device_get(self.step(weights, *on_devices)))
        loss = float(sum(np.float64(s) for s, _ in sums) / sum(int(n) for _, n in sums))
        per_label = evaluated.bytes_per_label
        bits = None if per_label is None else loss / math.log(2) / per_label
        duration_s = time.perf_counter() - start
        return {"name": evaluated.name, "loss": loss, "bits_per_byte": bits, "duration_s": duration_s}


class StopSignal:
    """Context manager that records SIGTERM and the first Ctrl-C instead of ending the process.

    A second Ctrl-C raises KeyboardInterrupt. received: name of the last recorded signal; "" if there was none.
    """

    received: str = ""

    def __enter__(self):
        self.old = {}
        with contextlib.suppress(ValueError):  # raised outside the main thread, which cannot set signal handlers
            for number in (signal.SIGTERM, signal.SIGINT):
                self.old[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_):
        for number, handler in self.old.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: the old handler was not set from Python

    def _receive(self, number, _frame):
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name


def sample(c: Config, run: Assembly, weights, tokenizer: Tokenizer, held_out: Corpus) -> str:
    """Returns the prompt and the text that the model continues it with; control characters are escaped."""
    prompt = c.sample_prompt or tokenizer.decode(held_out.tokens[:64])
    options = {"max_tokens": c.sample_tokens, "temperature": c.sample_temperature, "seed": c.seed}
    text = complete(Trained(run.model, weights, tokenizer, None), prompt, **options)
    shown = (x if x.isprintable() or x in "\n\t" else x.encode("unicode_escape").decode() for x in text)
    return f"--- prompt\n{prompt}\n--- continuation\n{''.join(shown)}\n---"


def evaluation_summary(output_dir: Path) -> str:
    """Returns the first and the last evaluation of each set in `metrics.jsonl`, over all starts, in a line."""
    evals: dict[str, list[dict[str, Any]]] = {}
    for record in read_metrics(output_dir / METRICS_FILE):
        if record["log"] == "eval":
            evals.setdefault(record.get("name", ""), []).append(record)
    lines = []
    for name, records in evals.items():
        first = records[0]
        last = records[-1]
        text = f"evaluation{name and f' of {name}'}: loss {first['loss']:.4f} -> {last['loss']:.4f}"
        if "bits_per_byte" in first and "bits_per_byte" in last:
            text += f", {first['bits_per_byte']:.4f} -> {last['bits_per_byte']:.4f} bits per byte"
        text += f", perplexity {perplexity(first['loss']):.4g} -> {perplexity(last['loss']):.4g}"
        lines.append(f"{text} (steps {first['step']} -> {last['step']})")
    return "\n".join(lines) or "evaluation: none yet"


def peak_flops(devices, run: Assembly, sequence_len: int) -> float | None:
    """Peak FLOP/s of all devices together for the products of a run, each at the peak of its dtype.

    None if the GPU is unknown.
    """
    gpu = gpus.find_gpu(devices[0].device_kind)
    flops = traffic.token_flops(run, sequence_len)
    return None if gpu is None else len(devices) * sum(flops.values()) / traffic.compute_time(gpu, flops)


def main(argv: list[str] | None = None) -> None:
    """Parse the command line, train, and print how to continue. An error exits with one line and a code above 0."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m surojax.train", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--export", metavar="DIR", help="write the trained model there, as a Hugging Face folder in bfloat16"
    )
    again = shlex.join(["python", "-m", "surojax.train", *argv])
    try:
        c, args = parse(argv, parser)
        if args.export is not None:
            convert.check_exportable(resolved(c), args.export)
        result = train(c)
        if args.export is not None and result.checkpoint:
            say(
                f"exported: {convert.convert(result.checkpoint, args.export)}"
                if result.finished
                else "not exported yet"
            )
    except (ConfigError, CheckpointError, NonFiniteLoss) as error:
        sys.exit(f"surojax.train: error: {'; '.join([str(error), *getattr(error, '__notes__', ())])}")
    except OSError as error:
        sys.exit(f"surojax.train: error: {error}; when that is repaired, continue with: {again}")
    except KeyboardInterrupt:
        print(f"surojax.train: aborted; continue with: {again}", file=sys.stderr)
        sys.exit(130)  # what shells expect after Ctrl-C
    say(f"sample: python -m surojax.generate --checkpoint {shlex.quote(str(c.output_dir))} --prompt TEXT")
    elsewhere = ", and another folder to export to" if args.export is not None and result.finished else ""
    say(
        f"resume: {again}"
        + (f" --config.max_steps={2 * int(result.state.step)}" if result.finished else "")
        + elsewhere
    )


if __name__ == "__main__":
    main()
