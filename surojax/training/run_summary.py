"""Prints a run's size and predicted time before it starts; at the end what it took, and a sample of its text."""

import itertools
import shlex
import statistics
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from pallas_kernels import dispatch
from surojax.assembly.assemble import Assembly
from surojax.assembly.from_config import lora, rate_schedule
from surojax.config import fields as configs
from surojax.config.fields import Config
from surojax.data.cache import Corpus
from surojax.data.tokenizer import Tokenizer
from surojax.errors import ConfigError
from surojax.exchange.adapter_config import matrices_without_adapters
from surojax.inference.prompts import continue_ids, text_ids
from surojax.inference.trained_model import Trained
from surojax.memory.nvme import Claimed
from surojax.models.kinds.targets import ALL_LINEAR, adaptable
from surojax.models.model import Model
from surojax.own_files import write_bytes
from surojax.pages import runs
from surojax.placement import cuda_plugin
from surojax.placement.layout import replicated_matrices
from surojax.placement.mesh import shards as number_of_shards
from surojax.planner import (
    expert_time,
    gpus,
    hlo,
    plan_text as planned,
    prediction,
    products,
    seen,
    traffic,
)
from surojax.planner.amounts import gib, summed
from surojax.planner.disks import MEASURED_HERE, Disks
from surojax.planner.footprint import Rows, estimate_host
from surojax.planner.prediction import Prediction
from surojax.run.console import say
from surojax.training.run_programs import compiled_bytes

PAGE, TRACE = "report.html", "trace.json"
LONGEST_PROMPT = 512  # tokens of a prompt that is sampled from at the end
BEGINNING = 64  # tokens of a text that is continued at the end


def describe_run(c: Config, run: Assembly, devices, need: dict[str, int]) -> None:
    """Prints the size of the model, the devices, the mesh, and the memory that the run needs."""
    axes = " x ".join(f"{name}={size}" for name, size in run.mesh.shape.items() if size > 1)
    total = run.model.num_parameters
    trained = run.model.num_trained_parameters
    trained_share = f", of which {trained:,} train ({trained / total:.2%})," if trained < total else ""
    where = f"{len(devices)} x {devices[0].device_kind}{axes and f' ({axes})'}"
    say(f"surojax: {total / 1e6:,.1f}M parameters{trained_share} on {where}")
    layers = configs.kinds(c).values()
    targets = adaptable(layers)
    of_experts = [target for target in targets if target.of_experts]
    if c.lora and run.model.layers_with_experts and not {target.matrix for target in of_experts} & set(lora(c).targets):
        names = ",".join(target.module.rpartition(".")[2] for target in of_experts)
        how = f"lora_target_modules with {names} adapts them too" if names else "there are no adapters of theirs here"
        say(f"note: the experts are frozen; {how}")
    all_linear = c.lora and c.lora_target_modules == ALL_LINEAR
    if all_linear and (left := matrices_without_adapters(run.model, {target.matrix for target in targets})):
        say(f"note: {', '.join(left)} of each layer with one stays frozen: there are no adapters of it here")
    served = dispatch.choose("grouped_matmul", run.model.precision.implementation) == "mosaic"
    if devices[0].platform == "gpu" and run.engine.table.leaves_device and (line := cuda_plugin.copies_slowly()):
        say(line)
    if devices[0].platform == "gpu" and (line := expert_time.multiplied_by(run, served=served)):
        say(line)
    # On a CPU, `need` already includes the host memory, since it is also the devices' memory.
    host = {} if devices[0].platform == "cpu" else estimate_host(run, traffic.batch_of(c))
    for memory, needs in (("memory", need), ("host memory", host)):
        if needs:
            say(f"{memory} per device: {summed(needs, digits=2)}")
    if run.engine.packed and devices[0].platform == "gpu":
        piece = configs.tokens_of_piece(c)
        found = [x.mixer.implementation(c.attention, c.model_dtype, packed=True, piece=piece) for x in layers]
        for attention in dict.fromkeys(filter(None, found)):
            say(planned.documents(attention, c.cp_method))
    shards = number_of_shards(run.mesh)
    if shards > 1 and (replicated := replicated_matrices(run.engine.trained_params, run.engine.layouts.master)):
        say(f"note: not sharded over {shards} devices, which divide none of their dimensions: {replicated}")


def rate_text(c: Config, first_step: int, total_steps: int) -> str:
    """Says the peak of the learning rate; of a run that goes on, also the rates of its next and of its last step."""
    if not 0 < first_step < total_steps:
        return f"learning rate {c.learning_rate:g}"
    rate = rate_schedule(c, c.learning_rate, total_steps)
    now, last = (np.asarray(rate(step)).item() for step in (first_step, total_steps - 1))
    return f"learning rate {now:.2e} in step {first_step + 1}, {last:.2e} in the last (peak {c.learning_rate:g})"


def budget(model: Model, tokens: int, *, is_new: bool) -> str:
    """Formats a run's tokens, for a new model also per parameter (20 are usual), and the FLOPs of its products.

    Far fewer tokens than parameters are not compared with them.

    20 tokens a parameter are the optimum of compute that Hoffmann et al. found (Chinchilla, arXiv:2203.15556). FLOPs: 6
    for each token and trained parameter, 4 for each frozen one, which has no gradient; without those of attention.
    """
    trained = model.num_trained_parameters
    frozen = model.num_parameters - trained
    compared = is_new and tokens >= 0.005 * trained  # else 0.00
    beside = f", {tokens / trained:,.2f} for each parameter (20 for each would be {20 * trained:,})" if compared else ""
    formula = f"6 x {'trained + 4 x frozen ' if frozen else ''}parameters x tokens"
    return f"budget: {tokens:,} tokens{beside}; {(6.0 * trained + 4.0 * frozen) * tokens:.2e} FLOPs ({formula})"


def print_prediction(
    c: Config, run: Assembly, compiled, devices, disk: Claimed, trace: Path | None = None
) -> Prediction:
    """Predicts the compiled step's time, and prints it if the planner has rates of the GPU. It never ends a run.

    disk: what was measured of the run's files; each process has its own. trace: a file for the simulated step
    (`prediction.trace`); an older one is deleted. A few seconds at most: a step is simulated about 20 times, 0.05 s
    each, of a model of 70B parameters 0.2 s.
    """
    if trace:
        trace.unlink(missing_ok=True)
    gpu = gpus.find_gpu(devices[0].device_kind)
    if gpu is None:
        return Prediction(not_predicted=f"{devices[0].device_kind} is no GPU whose facts are known")
    batch = traffic.batch_of(c)
    try:
        gpu = seen.corrected(gpu, c.rates_file, seen.settings_key(c, len(devices)))
    except ConfigError as error:
        say(f"note: {error}")
    try:
        parts = [] if run.store.is_empty else compiled.compiled_programs()
        functions = [part.function for part in parts] or [compiled]
        modules = [hlo.parse_module(function.as_text()) for function in functions]
        disks = Disks(disk.reads, disk.writes, MEASURED_HERE)
        simulated = prediction.simulated_step(modules, run, batch, parts, jax.process_count(), disks)
        predicted = prediction.step_prediction(simulated, run, batch, gpu)
        if trace and not predicted.not_predicted:
            prediction.write_trace(trace, simulated.timeline(gpu, with_events=True), f"{len(devices)} x {gpu.name}")
    except Exception as error:  # whatever a new version of XLA writes
        say(f"note: no time is predicted: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
        return Prediction(not_predicted="the compiled step cannot be read")
    if predicted.predicted_step_s is None or predicted.predicted_range_s is None:
        return predicted
    low, high = map(prediction.milliseconds, predicted.predicted_range_s)
    rate = len(devices) * (predicted.tokens_per_s_per_gpu or 0.0)
    step = f"{1e3 * predicted.predicted_step_s:,.1f} ms a step ({low} to {high}), {rate:,.0f} tok/s"
    say(f"predicted: {step}, by XLA {cuda_plugin.plugin_version_text()}")
    if predicted.launch_bound:
        say(planned.launches(predicted))
    return predicted


def comparison(predicted: Prediction, durations_s: Sequence[float], tokens: int) -> str:
    """A line with measured beside predicted tokens/s of all GPUs; "" if nothing was predicted or measured.

    durations_s: of steps; their median is compared, without the first one if there are others. tokens: of a step.
    """
    if predicted.predicted_step_s is None or predicted.predicted_range_s is None or not durations_s:
        return ""
    seconds = statistics.median(durations_s[1:] or durations_s)
    low, high = (tokens / t for t in reversed(predicted.predicted_range_s))
    expected = tokens / predicted.predicted_step_s
    ratio = tokens / seconds / expected
    return (
        f"tok/s: measured {tokens / seconds:,.0f}, predicted {expected:,.0f} ({low:,.0f} to {high:,.0f}), "
        f"measured / predicted {ratio:.2f}"
    )


def peak_bytes(device) -> int | None:
    """The most bytes of a device's memory that were in use so far; None on CPUs and if the device does not say."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    return (stats or {}).get("peak_bytes_in_use")


def compare(need: dict[str, int], compiled, device) -> str | None:
    """A line that compares the estimate, the bytes that XLA planned for a compiled step, and the device's peak use.

    None on devices that do not report their peak (CPUs). The peak is that of the process, with initialisation and
    evaluation. XLA's bytes are left out for a step of several programs (state in files).
    """
    peak, total, estimated = peak_bytes(device), compiled_bytes(compiled), sum(need.values())
    if peak is None:
        return None
    planned = "" if total is None else f", compiled {gib(total)}"
    line = (
        f"memory per device: estimated {gib(estimated)}{planned}, at most in use {gib(peak)} (initialisation and "
        "evaluation included)"
    )
    low = 0.0 if total is None else total / estimated - 1
    return f"{line}; note: the estimate was {low:.0%} too low" if low > 0.1 else line


def write_page(
    output_dir: Path,
    need: dict[str, int],
    classes: Rows,
    predicted: Prediction,
    num_devices: int,
    lines: Sequence[str] = (),
) -> str:
    """Writes the page of `surojax report`, with the planned step, into a run's folder; returns a line with its path.

    need: bytes per device. classes: of each memory, see `footprint.by_class`. lines: what was measured beside what was
    predicted. The time line is that of the file `TRACE` there, if the run has one. It never ends a run: what prevents
    the page is in the line.
    """
    rate = predicted.tokens_per_s_per_gpu
    plan = runs.Planned("plan", sum(need.values()), None if rate is None else num_devices * rate)
    command = shlex.join(["surojax", "report", str(output_dir)])
    file = output_dir / PAGE
    trace = output_dir / TRACE
    try:
        step = runs.TrainedStep(classes, predicted, lines, prediction.read_trace(trace))
        text = runs.page([runs.read_run(str(output_dir))], plan, command, step)
        write_bytes(file, text.encode())
    except (ValueError, OSError) as error:
        return f"note: no {PAGE} of the run: {error}"
    return f"curves: {file}"


def peak_flops(devices, run: Assembly, sequence_len: int) -> float | None:
    """Returns the peak FLOP/s of all devices together for a run's products, each at the peak of its dtype.

    None if the GPU is unknown.
    """
    gpu = gpus.find_gpu(devices[0].device_kind)
    flops = products.token_flops(run, sequence_len)
    return None if gpu is None else len(devices) * sum(flops.values()) / products.compute_time(gpu, flops)


def sample_text(c: Config, run: Assembly, weights, tokenizer: Tokenizer, held_out: Corpus) -> str:
    """Returns the prompt and the model's continuation, with control characters escaped."""
    prompt = text_ids(tokenizer, c.sample_prompt) if c.sample_prompt else held_out_prompt(held_out, tokenizer)
    options = {"max_tokens": c.sample_tokens, "temperature": c.sample_temperature, "seed": c.seed}
    text = continue_ids(Trained(run.model, weights, tokenizer, None), prompt, **options)
    shown = (x if x.isprintable() or x in "\n\t" else x.encode("unicode_escape").decode() for x in text)
    return f"--- prompt\n{c.sample_prompt or tokenizer.decode(prompt)}\n--- continuation\n{''.join(shown)}\n---"


def held_out_prompt(held_out: Corpus, tokenizer: Tokenizer) -> np.ndarray:
    """Returns the token ids of a held-out example up to its first answer, or the beginning of the held-out text.

    The example is the first one with a prompt of at most `LONGEST_PROMPT` tokens, template included.
    """
    if held_out.trained is not None:
        for start, stop in itertools.pairwise(held_out.bounds):
            answer = int(np.argmax(held_out.trained[start:stop]))
            if 0 < answer <= LONGEST_PROMPT:
                return np.asarray(held_out.tokens[start : start + answer])
    return text_ids(tokenizer, tokenizer.decode(held_out.tokens[:BEGINNING]))
