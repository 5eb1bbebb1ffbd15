"""A training run, from top to bottom.

    python -m surojax.train --config configs/tiny.py [--config.FIELD=VALUE ...]

`train(config)` is the run: check, data, plan, compile, state, loop, finish. It checks everything that can be checked
before it writes anything. To continue a run that ended for any reason, start the same command again: it resumes from
the last checkpoint.
"""

import argparse
import contextlib
import json
import math
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from tqdm import tqdm

from surojax import convert
from surojax.assembly import Assembly, from_config, lora
from surojax.config import checks, fields as configs
from surojax.config.adapters import FIELDS
from surojax.config.fields import Config
from surojax.config.flags import parse
from surojax.data import load as data
from surojax.data.batches import batches as training_batches
from surojax.data.cache import Corpus
from surojax.data.samples import check_length
from surojax.data.tokenizer import Tokenizer, load_tokenizer
from surojax.errors import CheckpointError, ConfigError
from surojax.exchange import adapters
from surojax.exchange.base import described_format, fingerprint
from surojax.exchange.sources import has_parts, keeps, open_weights, resolved
from surojax.exchange.weights import Tensors, describe as describe_weights, readers
from surojax.inference.load import Trained
from surojax.inference.prompts import complete
from surojax.memory import nvme
from surojax.memory.lock import locked
from surojax.models.attention import chosen_here
from surojax.numerics.base_formats import chosen
from surojax.parallel import hosts
from surojax.parallel.feed import Feed, from_host, to_host
from surojax.parallel.watch import STOPPED, Watch, leave, together
from surojax.placement.layout import batch_sharding, replicated_matrices
from surojax.placement.mesh import data_parallel, find_devices, make_mesh, own_device, shards as number_of_shards
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
from surojax.run.shared import check_shared, is_first
from surojax.run.stop import StopSignal
from surojax.step import state
from surojax.step.train_step import up_to_date

ADAPTER = "adapter"  # folder in the output_dir: the adapters in PEFT's format

# Fields that a run continues with, unchanged.
OF_ADAPTERS = (name for name in FIELDS if name not in ("lora_dtype", "lora_plus_ratio", "lora_dropout"))
IDENTITY = ("model", "seed", "sequence_len", "sample_packing", "lora", *OF_ADAPTERS)


class Result(NamedTuple):
    """The result of `train`."""

    state: state.TrainState
    history: list[dict[str, Any]]  # the records of metrics.jsonl that this call wrote
    checkpoint: Path | None  # the newest checkpoint
    finished: bool  # False if SIGTERM, Ctrl-C or the time limit stopped the run


def train(config: Config, *, max_minutes: float | None = None) -> Result:
    """Train a model as the config says; see `config.default_config` for the fields.

    max_minutes: the run saves and stops after the step in which so many minutes have passed. With several processes,
    all call this function, after `hosts.connect`; the first one prints and writes metrics.

    Raises ConfigError (bad settings or data, or too little memory; nothing was written), CheckpointError (a checkpoint
    cannot be written, read or continued), NonFiniteLoss (the loss is NaN or infinite), OSError (the disk has no room
    for metrics, or the disk of nvme_path fails).
    """
    c = resolved(config)
    started = time.perf_counter()
    until = None if max_minutes is None else time.monotonic() + 60 * max_minutes

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
    initial = None if continues and not c.lora else open_weights(c, run.model)
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
    if c.lora and initial:
        identity["base"] = fingerprint(initial, run.model)
    adapter = None
    if c.lora_adapter and not continues:
        adapter = adapters.read(c.lora_adapter, run.model)
        adapters.check_continues(adapter, lora(c), identity["base"], c.lora_adapter)
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
        check_shared(output_dir, json.dumps(c.to_dict() | meta | identity, sort_keys=True, default=str))
        if resume and first_step >= total_steps:
            say(f"nothing left to train: {resume} is at step {first_step} of {total_steps}; raise max_steps to go on")
            trained = restored(c, run, resume, initial)
            if c.lora:
                say(f"adapter: {write_adapter(c, run, trained.master, identity.get('base', ''))}")
            return Result(trained, [], resume, True)
        output_dir.mkdir(parents=True, exist_ok=True)
        if is_first():
            until_end.enter_context(locked(output_dir / "lock", "output_dir"))
        if checkpoint.find(output_dir / checkpoint.FOLDER) != newest:
            raise CheckpointError(
                f"another run wrote checkpoints into {output_dir} while this one started; start again"
            )
        if is_first() and c.model_path and not (resume and keeps(output_dir, c.model_path)):
            convert.keep(c)

        # -- Compile; a thread prepares the first batches meanwhile ---------------------------------------------------
        feed = Feed(batch_sharding(mesh), batch_size)
        batches = training_batches(
            samples,
            batch_size=batch_size,
            accumulation=c.gradient_accumulation_steps,
            seed=c.seed,
            start_sample=position,
            rows=feed.rows,
        )
        until_end.enter_context(contextlib.closing(batches))
        compile_start = time.perf_counter()
        options = run.compiler_options(
            devices[0].platform,
            memory_bytes=memory_limit(own_device(devices)),
            host_temporaries=host_temporaries(run, traffic.batch_of(c)),
        )
        tokens_shape = (c.gradient_accumulation_steps, batch_size, c.sequence_len)
        tokens = jax.ShapeDtypeStruct(tokens_shape, np.int32, sharding=feed.sharding)
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
            train_state = restored(c, run, resume, initial)
            say(f"continuing from {resume}")
        else:
            train_state = new_state(c, run, initial, adapter)
            if initial:
                beside = f", with the adapter in {c.lora_adapter}" if adapter else ""
                frozen = described_format(initial, run.model, chosen(c) if c.lora else "")
                say(f"starting from {describe_weights(initial)}{frozen}{beside}")

        # -- Loop -----------------------------------------------------------------------------------------------------
        checkpoints = until_end.enter_context(Checkpoints(output_dir, save_total_limit=c.save_total_limit))
        log = MetricsLog(
            output_dir,
            total_steps=total_steps,
            tokens_per_step=samples_per_step * c.sequence_len,
            first_step=first_step,
            flops_per_token=sum(traffic.token_flops(run, c.sequence_len).values()),
            peak_flops=peak_flops(devices, run, c.sequence_len),
            writes=is_first(),
        )
        until_end.enter_context(log)
        stop = until_end.enter_context(StopSignal(until))
        history = []
        deferred = DeferredMetrics()
        virtual_devices = devices[0].platform == "cpu" and len(devices) > 1

        def report(done) -> None:
            if done is not None:
                history.append(
                    log.step(done.step, **done.values, duration_s=done.duration_s, data_wait_s=done.data_wait_s)
                )
                check_finite(done.step, done.values["loss"], done.values["grad_norm"], checkpoints.last)

        if initial and not resume:  # the loss that fine-tuning starts from
            history += [log.eval(first_step, **scores) for scores in evaluate(train_state.weights)]
            deferred.restart_clock()
        step = first_step
        for step in range(first_step + 1, total_steps + 1):
            asked = time.perf_counter()
            batch = next(batches)
            data_wait_s = time.perf_counter() - asked
            on_devices = feed.put([batch[name] for name in arrays])
            with jax.transfer_guard("disallow"):
                train_state, metrics = train_step(train_state, *on_devices)
            position += samples_per_step
            report(deferred.push(step, metrics, data_wait_s))
            # On virtual CPU devices, several programs with collectives in flight can block each other. With layers in
            # files, a step has already ended when `train_step` returns.
            if virtual_devices or store:
                report(deferred.flush())
            checkpoints.check()

            stopping = stop.after(step)
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
                    progress["layers"] = run.layers
                    checkpoints.save(train_state, progress | {"config": c.to_dict(), **identity})
                deferred.restart_clock()
            if stopping and not final:
                say(f"stopped by {stopping} after step {step} of {total_steps}; start again to continue")
                break

        # -- Finish ---------------------------------------------------------------------------------------------------
        checkpoints.wait()
        finished = step == total_steps
        if finished and c.sample_tokens and jax.process_count() > 1:
            say("no text is sampled with several processes: python -m surojax.generate does it from the checkpoint")
        elif finished and c.sample_tokens:
            say(sample(c, run, train_state.weights, tokenizer, found.held_out))
        say(f"{step - first_step} steps in {time.perf_counter() - started:.0f} s")
        durations = [record["duration_ms"] / 1e3 for record in history if record["log"] == "step"]
        if compared := prediction.comparison(predicted, durations, samples_per_step * c.sequence_len):
            say(compared)
        if comparison := compare(need, train_step, own_device(devices)):
            say(comparison)
        if is_first():
            say(evaluation_summary(output_dir))
        say(f"checkpoint: {checkpoints.last}")
        if c.lora:
            say(f"adapter: {write_adapter(c, run, train_state.master, identity.get('base', ''))}")
        return Result(train_state, history, checkpoints.last, finished)


def new_state(
    c: Config, run: Assembly, initial: Tensors | None, adapter: adapters.Adapter | None = None
) -> state.TrainState:
    """The state before the first step, with these weights and this adapter, or with new ones."""
    if initial is None:
        return run.init_state(c.seed)
    read = readers(initial, run.coded)
    if adapter is None:
        return run.load_state(*read, c.seed)
    return run.load_state(*adapters.with_adapter(*read, adapter), reads_adapters=True)


def write_adapter(c: Config, run: Assembly, master: dict, base: str) -> Path:
    """Writes the adapters of a state in PEFT's format into the output_dir; base: fingerprint of what they adapt."""
    folder = Path(c.output_dir).expanduser() / ADAPTER
    frozen = chosen(c)
    base_format = f"{frozen} {c.model_dtype}" if frozen else adapters.STORED
    found = adapters.Adapter(lora(c), *adapters.of_state(run.model, lora(c), to_host(master)), base, base_format)
    base_name = "" if c.lora_base_adapter else c.model_path  # nobody else merges that one first
    if not is_first():
        return folder
    return adapters.write(found, run.model, folder, base_name=base_name, has_parts=has_parts(c))


def restored(c: Config, run: Assembly, resume: Path, initial: Tensors | None) -> state.TrainState:
    """The state in a checkpoint. With adapters, the base is not in it, but where the run took it from."""
    base = new_state(c, run, initial).weights if c.lora else None
    return checkpoint.restore(resume, run.plan, run.layers, base=base)


def say(text: str) -> None:
    """Print a line, above the progress bar if there is one; of several processes, the first one does.

    Characters that the terminal cannot show are escaped.
    """
    if not is_first():
        return
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
    fixed |= {k: (meta.get(k), v) for k, v in identity.items() if meta.get(k) != v}
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
    if shards > 1 and (replicated := replicated_matrices(run.engine.trained_params, run.engine.layouts.master)):
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
            on_devices = [from_host(batch[name], self.sharding) for name in self.arrays]
            # One batch at a time: programs with collectives in flight can block each other on virtual CPU devices.
            sums.append(jax.device_get(self.step(weights, *on_devices)))
        loss = float(sum(np.float64(s) for s, _ in sums) / sum(int(n) for _, n in sums))
        per_label = evaluated.bytes_per_label
        bits = None if per_label is None else loss / math.log(2) / per_label
        duration_s = time.perf_counter() - start
        return {"name": evaluated.name, "loss": loss, "bits_per_byte": bits, "duration_s": duration_s}


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
    """Parse the command line, connect to the other processes if there are any, and run.

    An error exits with one line and a code above 0; a run that was asked to stop, and saved, with STOPPED.
    """
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m surojax.train", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--export", metavar="DIR", help="write the trained model there, as a Hugging Face folder in bfloat16"
    )
    parser.add_argument("--max-minutes", type=float, metavar="M", help="save and stop after so many minutes")
    hosts.add_flags(parser)
    watch = None
    try:
        c, args = parse(argv, parser)
        if args.export is not None:
            convert.check_exportable(resolved(c), args.export)
        if place := hosts.detect_flags(args, os.environ):
            names = hosts.connect(place, os.environ, heartbeat_s=args.heartbeat, say=say)
            watch = Watch(names, place.process_id, args.heartbeat)
    except ConfigError as error:
        leave(f"surojax.train: error: {error}")
    with together(watch):
        run_command(c, args, argv)


def run_command(c: Config, args: argparse.Namespace, argv: list[str]) -> None:
    """Train, export, and print how to continue; errors exit as `main` says."""
    again = shlex.join(["python", "-m", "surojax.train", *argv])
    try:
        result = train(c, max_minutes=args.max_minutes)
        if args.export is not None and result.checkpoint and is_first():
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
    more = f" --config.max_steps={2 * int(result.state.step)}" if result.finished else ""
    say(f"resume: {again}{more}{elsewhere}")
    if not result.finished:
        sys.exit(STOPPED)


if __name__ == "__main__":
    main()
