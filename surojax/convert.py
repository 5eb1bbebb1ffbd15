"""Writes a model as a Hugging Face folder or a GGUF file: a run's, a checkpoint's, a folder's, or a GGUF file's.

    surojax convert --checkpoint runs/tiny --out FOLDER [--dtype float32]
    surojax convert --checkpoint runs/chat --out FILE.gguf [--dtype q8_0]
    surojax convert merge BASE ADAPTER [ADAPTER ...] FOLDER [--dtype float32]
    surojax convert --check FOLDER [--python INTERPRETER]

A run's adapters are merged into their base. The third merges adapters in PEFT's format into a model, each onto the
result of those before it. The fourth compares logits and losses with those of transformers, if an interpreter has it
with torch.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from surojax.assembly import from_config
from surojax.config import checks
from surojax.config.fields import Config, default_config
from surojax.data import gguf_tokenizer_export
from surojax.data.modelfile import modelfile as modelfile_text
from surojax.data.tokenizer import load_tokenizer
from surojax.errors import CheckpointError, ConfigError, ending, ends_with_code, in_words_of, refusing, short_exit_codes
from surojax.exchange import compressed, config_json, gguf_export, missing, peft, small_files
from surojax.exchange.adapter_config import labels_of_adapter
from surojax.exchange.beside import Beside, tensors_beside
from surojax.exchange.checkpoint_tensors import CheckpointTensors, stored_adapter
from surojax.exchange.export import DTYPES, check_dtype, check_folder, encoded, export
from surojax.exchange.gguf_export import DTYPES as GGUF_DTYPES, export_gguf
from surojax.exchange.gguf_file import is_gguf
from surojax.exchange.huggingface import read_config, read_whole_config
from surojax.exchange.merge import Merged
from surojax.exchange.model_tensors import Tensors, Weights, describe_source
from surojax.exchange.naming import naming_of
from surojax.exchange.parts import has_parts
from surojax.exchange.small_files import CONFIG, GENERATION, Files
from surojax.exchange.sources import WHOLE, is_model, kept_in, locate, open_weights, resolved, template_of
from surojax.inference import model_folder, parity
from surojax.inference.model_folder import folder_files, trained_files
from surojax.inference.trained_model import check_trained_with
from surojax.models.model import Model
from surojax.numerics.base_formats import chosen_format
from surojax.objectives.objectives import OBJECTIVES, objective_of
from surojax.run import on_disk
from surojax.untrusted import TRAINED, check_there, expanded

DEFAULT_DTYPE = "bfloat16"
OUT_HELP = "the folder to write, new or empty; or a new file that ends in .gguf"
TOGETHER_HELP = "one tensor of all experts of a layer, as transformers 5 has them in memory (default: one each)"
DTYPE_HELP = (
    f"{', '.join(DTYPES)}; of a folder also fp8, nvfp4: matrices of blocks as vLLM reads them; mxfp4: gpt-oss as "
    f"published; of a .gguf file also {', '.join(name for name in GGUF_DTYPES if name not in DTYPES)}"
)


class Opened(NamedTuple):
    """A model that can be exported, with the config.json and small files of its folder.

    beside: what the folder has beside the language model; None: nothing that an export would have. gone: the folder of
    an image-text model that is no longer there, so that its language model is all that is left; "": there is none.
    """

    model: Model
    tensors: Tensors
    config: dict[str, Any]
    files: Files
    beside: Beside | None = None
    gone: str = ""


def convert(
    source: str | Path,
    folder: str | Path,
    *,
    dtype: str = DEFAULT_DTYPE,
    tokenizer: str = "",
    experts_together: bool = False,
    say: Callable[[str], None] = print,
) -> Path:
    """Writes the model of a run, a checkpoint, a Hugging Face folder, a GGUF file or the hub; returns the path.

    folder: to write; a path that ends in .gguf is that of a file, with a Modelfile beside it. dtype: of the export, see
    `gguf_export` for a file; the source's own, such as float32 of master weights, is not looked at. tokenizer: as in a
    config; "": the model's own. experts_together: see `export`. say: is given a line that names the source and what of
    it is left aside.

    Raises ConfigError or CheckpointError; then nothing is written.
    """
    how: Any = {"dtype": dtype, "tokenizer": tokenizer, "experts_together": experts_together}
    return merge(source, (), folder, **how, say=say)


def merge(
    base: str | Path,
    adapter_folders: Sequence[str | Path],
    folder: str | Path,
    *,
    dtype: str = DEFAULT_DTYPE,
    tokenizer: str = "",
    experts_together: bool = False,
    say: Callable[[str], None] = print,
) -> Path:
    """Writes a model as `convert` does, after merging adapters into it in float32, one after another; see merge.py.

    Raises ConfigError too if one of them is an adapter of another model.
    """
    to_gguf = is_gguf(Path(folder))
    (gguf_export.check_dtype if to_gguf else check_dtype)(dtype)
    check_out(folder)
    num_labels = max(map(labels_of_adapter, adapter_folders), default=0)
    opened = open_model(base, tokenizer, num_labels=num_labels)
    has_experts = any(segment.statistics is not None for segment in opened.model.segments)
    if experts_together and (to_gguf or not has_experts):
        got = "a .gguf file, which always has that" if to_gguf else "a model without experts"
        raise ConfigError(f"--experts-together: expected a folder of a model with experts, got {got}; leave it out")
    kept = None if to_gguf else opened.beside
    say(f"reading {describe_source(opened.tensors if kept is None else kept.weights, kept=kept is not None)}")
    if opened.gone:
        say(f"note: {opened.gone} is gone; written is its language model alone, without what images pass through")
    if has_experts and dtype in compressed.EXPERTS_NOTES:
        say(compressed.EXPERTS_NOTES[dtype])
    tensors, files = opened.tensors, opened.files
    for path in adapter_folders:
        tensors = Merged(tensors, peft.read_adapter(path, opened.model, naming_of(opened.config)), opened.model)
        files = model_folder.of_adapter(path, opened.config, files, own_tokenizer=bool(tokenizer))
    if to_gguf:
        said, modelfile = gguf_tokenizer_of(opened.config, files, folder)
        return export_gguf(tensors, opened.model, opened.config, said, folder, dtype=dtype, modelfile=modelfile)
    config = config_json.completed(opened.config, dtype, kept.modules if kept else ())
    if kept:
        config = kept.whole_config(config)
    if kept is None or kept.config is None:
        files = {name: content for name, content in files.items() if name not in small_files.PROCESSORS}
    how: Any = {"dtype": dtype, "experts_together": experts_together, "beside": kept}
    return export(tensors, opened.model, config, files, folder, **how)


def open_model(source: str | Path, tokenizer: str = "", *, num_labels: int = 0) -> Opened:
    """Opens a model for `convert`; reads settings and small files, and tensors only to compare a tied head.

    num_labels: above 0, a language model gets a new head of so many numbers.
    """
    if not is_model(source) and (
        opened := on_disk.read_newest(source, lambda checkpoint: _open_checkpoint(checkpoint, tokenizer))
    ):
        return opened
    if not is_model(source):
        check_there("--checkpoint", source, TRAINED)
        held = missing.held_instead(expanded(source)) or "none"
        raise ConfigError(f"--checkpoint: expected {TRAINED}, got {str(source)!r}, which holds {held}")
    c = default_config()
    c.model_path = str(source)
    c.tokenizer = tokenizer or c.tokenizer
    c["objective"] = objective_of(num_labels)
    c = resolved(c)
    c.objective = objective_of(c.model.num_labels)
    c.per_device_batch_size = OBJECTIVES[c.objective].together
    checks.check(c)
    model = from_config.model(c)
    weights = open_weights(c, model)
    assert weights is not None
    return Opened(model, weights, *folder_files(c, is_trained=False), *_beside(c.model_path, model))


def _beside(source: str, model: Model, kept: Path | None = None) -> tuple[Beside | None, str]:
    """Returns `beside` and `gone` of an `Opened`. source: a run's model_path, or a model. kept: a run's copy of it.

    A model that classifies is of a class of language models alone.
    """
    path = locate(source, weights=True) if source else Path()
    if not source or is_gguf(path) or not model.has_logits:
        return None, ""
    if path.exists():
        return tensors_beside(Weights(path)), ""
    return None, source if kept and (kept / WHOLE).is_file() else ""


def _open_checkpoint(checkpoint: Path, tokenizer: str) -> Opened:
    meta = on_disk.read_meta_of_run(checkpoint)
    c = checks.restored_config(meta["config"], on_disk.written_by(meta))
    if c.lora and (not c.model_path or c.from_scratch):
        raise ConfigError(
            f"--checkpoint: expected adapters of a model that can be read, got {checkpoint}, whose base was drawn at "
            "random; start from a model_path"
        )
    source = c.model_path
    kept = kept_in(checkpoint.parent.parent)
    c.model_path = str(kept) if (kept / CONFIG).is_file() else c.model_path
    c.tokenizer = tokenizer or (str(kept) if (kept / "tokenizer.json").is_file() else c.tokenizer)
    c.chat_template = template_of(c, checkpoint.parent.parent)
    check_trained_with(meta, load_tokenizer(c.tokenizer))
    model = from_config.model(c)
    if not c.lora:
        others = _beside("" if c.from_scratch else source, model, kept)
        return Opened(model, CheckpointTensors(checkpoint, model), *folder_files(c), *others)
    base = open_model(source, tokenizer, num_labels=c.model.num_labels)
    tensors = base.tensors
    if c.lora_base_adapter:
        first = peft.read_adapter(c.lora_base_adapter, base.model, naming_of(base.config))
        tensors = Merged(tensors, first, base.model)
    frozen = chosen_format(c)
    of_base = meta.get("base", ""), f"{frozen} {c.model_dtype}" if frozen else peft.STORED
    adapter = stored_adapter(checkpoint, model, from_config.lora(c), *of_base)
    return Opened(base.model, Merged(tensors, adapter, base.model), *folder_files(c), base.beside)


def check_out(path: str | Path) -> None:
    """Raises ConfigError unless a folder, or a GGUF file if the path ends in .gguf, can be written at the path."""
    (gguf_export.check_gguf_path if is_gguf(Path(path)) else check_folder)(path)


def gguf_tokenizer_of(config: dict[str, Any], files: Files, path: str | Path) -> tuple[dict[str, Any], str]:
    """Makes (a GGUF file's metadata of the tokenizer, its Modelfile) from a model's config.json and other files.

    path: of the GGUF file. Raises ConfigError if there is no tokenizer that such a file has.
    """
    if "tokenizer.json" not in files:
        raise ConfigError(
            "tokenizer: expected a tokenizer.json, of which a .gguf file has tokens and merges, got none (bytes have "
            "no merges); pass --tokenizer, or export a folder"
        )
    tokenizer = model_folder.tokenizer_in(files, config)
    content = files["tokenizer.json"].decode()
    metadata = gguf_tokenizer_export.tokenizer_metadata(tokenizer, content, "tokenizer.json", config["vocab_size"])
    modelfile = modelfile_text(Path(path).name, tokenizer)
    pad = config.get("pad_token_id")
    if isinstance(pad, int) and 0 <= pad < config["vocab_size"]:
        metadata["tokenizer.ggml.padding_token_id"] = pad
    return metadata, modelfile


def check_exportable(c: Config, folder: str | Path) -> None:
    """Raises ConfigError if a resolved config's model cannot be exported to this folder."""
    checks.check(c)
    if c.lora and (not c.model_path or c.from_scratch):
        raise ConfigError("--export: expected adapters of a model_path, got those of a random base; leave it out")
    check_out(folder)
    config, files = folder_files(c)
    if is_gguf(Path(folder)):
        gguf_export.gguf_metadata(config, Path(folder))
        gguf_tokenizer_of(config, files, folder)


def keep_template(c: Config) -> None:
    """Writes the chat template that a config names to a run's output_dir, in place of one there. Raises OSError.

    See `sources.template_of`.
    """
    kept = kept_in(c.output_dir)
    files = small_files.read_tokenizer_files(kept) | small_files.read_small_files(kept, (GENERATION,))
    config = read_config(kept) if (kept / CONFIG).is_file() else {}
    kept.mkdir(parents=True, exist_ok=True)
    small_files.write_small_files(kept, trained_files(c, config, files, load_tokenizer(c.tokenizer)))


def keep(c: Config) -> None:
    """Copies the small files of the model at `model_path` to a run's output_dir; see `sources`. Raises OSError.

    c: a resolved config, whose tokenizer is kept with them.
    """
    kept = kept_in(c.output_dir)
    config, files = folder_files(c)
    kept.mkdir(parents=True, exist_ok=True)
    (kept / missing.SOURCE).unlink(missing_ok=True)  # it is there if the others are
    (kept / WHOLE).unlink(missing_ok=True)
    source = locate(c.model_path, weights=False)
    if not is_gguf(source) and has_parts(whole := read_whole_config(source)):
        small_files.write_small_files(kept, {WHOLE: encoded(whole)})
    small_files.write_small_files(kept, files | {CONFIG: encoded(config)})
    small_files.write_small_files(kept, {missing.SOURCE: encoded({"model_path": c.model_path})})


def parser() -> argparse.ArgumentParser:
    """Makes the parser of the command's options."""
    text = f"{(__doc__ or '').partition(chr(10))[0]} `surojax convert merge --help`: merges adapters into a model."
    arguments = argparse.ArgumentParser(prog="surojax convert", description=text)
    arguments.add_argument(
        "--checkpoint", metavar="MODEL", help="a run, a checkpoint, a Hugging Face folder, a .gguf file"
    )
    arguments.add_argument("--out", metavar="PATH", help=OUT_HELP)
    arguments.add_argument("--dtype", help=f"{DTYPE_HELP} (default {DEFAULT_DTYPE}, whatever the source has)")
    arguments.add_argument(
        "--tokenizer", default="", help="tokenizer.json, if it is no longer where the run's config says"
    )
    arguments.add_argument("--experts-together", action="store_true", help=TOGETHER_HELP)
    arguments.add_argument(
        "--check", metavar="MODEL", help="compare a Hugging Face folder or .gguf file with transformers"
    )
    arguments.add_argument("--python", help="--check: an interpreter with transformers and torch (default: this one)")
    arguments.epilog = short_exit_codes("--check that found a difference")
    return refusing(arguments)


def merge_parser() -> argparse.ArgumentParser:
    """Makes the parser of the options of `convert merge`."""
    arguments = argparse.ArgumentParser(prog="surojax convert merge")
    arguments.add_argument(
        "base", metavar="BASE", help="as for --checkpoint: the model that the adapter was trained on"
    )
    arguments.add_argument("adapters", metavar="ADAPTER", nargs="+", help="a folder that PEFT or a run wrote")
    arguments.add_argument("out", metavar="PATH", help=OUT_HELP)
    arguments.add_argument("--dtype", default=DEFAULT_DTYPE, help=f"{DTYPE_HELP} (default {DEFAULT_DTYPE})")
    return refusing(arguments)


def main(argv: list[str] | None = None) -> None:
    """Parses the command line and converts. An error ends it with one line (`errors.ending`)."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        if argv[:1] == ["merge"]:
            args = merge_parser().parse_args(argv[1:])
            with in_words_of("BASE"):
                print(f"written: {merge(args.base, args.adapters, args.out, dtype=args.dtype)}")
            return
        args = parser().parse_args(argv)
        if args.check is not None:
            for name in ("checkpoint", "out", "dtype", "tokenizer", "experts-together"):
                if getattr(args, name.replace("-", "_")):
                    raise ConfigError(f"--check: expected no --{name}, got one; leave one of them out")
            with in_words_of("--check"):
                report = parity.compare_with_transformers(args.check, args.python or sys.executable)
            print(parity.comparison_table(report))
            sys.exit(not report.passed)
        if args.python is not None:
            raise ConfigError("--python: expected --check with it, got none; leave it out")
        if args.checkpoint is None or args.out is None:
            raise ConfigError("expected --checkpoint MODEL and --out PATH, got one or none of them; see --help")
        dtype = args.dtype or DEFAULT_DTYPE
        how: Any = {"tokenizer": args.tokenizer, "experts_together": args.experts_together}
        with in_words_of("--checkpoint"):
            path = convert(args.checkpoint, args.out, dtype=dtype, **how)
        print(f"written: {path}")
    except (ConfigError, CheckpointError) as error:
        raise ending("convert", error) from error


if __name__ == "__main__":
    ends_with_code(main)
