"""Makes the state that a run starts with, and writes the adapters of its last state."""

from pathlib import Path

from surojax.assembly.assemble import Assembly
from surojax.assembly.from_config import lora
from surojax.config.fields import Config
from surojax.data.teacher_labels import read_head
from surojax.exchange import peft
from surojax.exchange.base import described_format
from surojax.exchange.model_tensors import Tensors, describe_source as describe_weights, readers
from surojax.exchange.new_head import WithNewHead
from surojax.exchange.small_files import GENERATION, read_small_files, read_tokenizer_files
from surojax.exchange.sources import kept_in, length_of, locate, naming
from surojax.numerics.base_formats import chosen_format
from surojax.objectives.teacher_states import TEACHER_HEAD
from surojax.parallel.feed import from_host, to_host
from surojax.placement.param import OUTER, with_part
from surojax.run.console import say
from surojax.run.restore import restore
from surojax.run.shared import is_first
from surojax.step.complete import complete_state
from surojax.step.state import TrainState
from surojax.training.start import Start

ADAPTER = "adapter"  # folder in the output_dir: the adapters in PEFT's format


def first_state(c: Config, run: Assembly, start: Start, initial: Tensors | None) -> TrainState:
    """Makes a run's first state from files, a checkpoint or another model's weights, or a new one; prints which."""
    resume = start.resume
    if start.in_files:
        base = _untrained(c, run, initial)
        state = complete_state(run.store, run.plan, start.first_step, base)
        say(f"continuing from step {start.first_step}, which {run.store.folder} has complete")
        return state
    if step := run.store.interrupted():
        instead = f"continuing from {resume.name}" if resume else "there is no checkpoint, so this starts anew"
        say(f"nvme: the last run ended within the update of step {step}, what it left is not used: {instead}")
    if resume:
        state = restored(c, run, resume, initial)
        say(f"continuing from {resume}")
        return state
    state = fresh_state(c, run, initial, start.adapter)
    if initial:
        beside = f", with the adapter in {c.lora_adapter}" if start.adapter else ""
        beside += ", with a new head" if isinstance(initial, WithNewHead) and not start.adapter else ""
        frozen = described_format(initial, run.model, chosen_format(c) if c.lora else "")
        say(f"starting from {describe_weights(initial)}{frozen}{beside}")
        length = length_of(locate(c.model_path, weights=False))
        if length and length < c.sequence_len:
            say(
                f"note: rows of sequence_len {c.sequence_len:,} are longer than the {length:,} positions that "
                f"{c.model_path} names (max_position_embeddings): tokens beyond them are at positions new to it, and "
                f"what is exported says {length:,} as well"
            )
    return state


def fresh_state(
    c: Config, run: Assembly, initial: Tensors | None, adapter: peft.AdapterArrays | None = None
) -> TrainState:
    """Makes the state before the first step, with the given weights and adapter, or with random ones."""
    if initial is None:
        state = run.init_state(c.seed)
    elif adapter is None:
        state = run.load_state(*readers(initial, run.coded), c.seed)
    else:
        state = run.load_state(
            *peft.with_adapter(*readers(initial, run.coded), adapter, run.model), reads_adapters=True
        )
    return state._replace(weights=with_part(state.weights, _teacher_head(c, run)))


def restored(c: Config, run: Assembly, resume: Path, initial: Tensors | None) -> TrainState:
    """Reads the state in a checkpoint.

    With adapters, the base is read from its source, as checkpoints do not have it.
    """
    return restore(resume, run.plan, run.layers, base=_untrained(c, run, initial))


def _untrained(c: Config, run: Assembly, initial: Tensors | None) -> dict:
    """Work weights that no checkpoint has: with adapters those of their base, and a teacher's head."""
    return fresh_state(c, run, initial).weights if c.lora else _teacher_head(c, run)


def _teacher_head(c: Config, run: Assembly) -> dict:
    """Work weights: the head of the teacher in distill_path if labels are its last hidden states, else none."""
    if not c.distill_hidden_size:
        return {}
    planned = run.plan.weights[OUTER][TEACHER_HEAD]
    return {OUTER: {TEACHER_HEAD: from_host(read_head(c.distill_path).astype(planned.dtype), planned.sharding)}}


def write_adapter(c: Config, run: Assembly, master: dict, base: str) -> Path:
    """Writes a state's adapters in PEFT's format into the output_dir. base: fingerprint of the base model."""
    folder = Path(c.output_dir).expanduser() / ADAPTER
    frozen = chosen_format(c)
    base_format = f"{frozen} {c.model_dtype}" if frozen else peft.STORED
    adapter = peft.AdapterArrays(lora(c), *peft.of_state(run.model, lora(c), to_host(master)), base, base_format)
    base_name = "" if c.lora_base_adapter else c.model_path  # nobody else merges that one first
    if not is_first():
        return folder
    # A template that the run chose is not in the base model's folder, so it is beside the adapter, and its tokenizer.
    kept = kept_in(c.output_dir)
    of_run = read_tokenizer_files(kept) | read_small_files(kept, (GENERATION,)) if c.chat_template else {}
    return peft.save_adapter(adapter, run.model, folder, base_name=base_name, naming=naming(c), files=of_run)
