"""Compares our logits with transformers' for the same files: `surojax convert --check FOLDER`.

transformers and torch run in a process of their own, of this interpreter or of another one, which gets a script. They
are never imported here.
"""

import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from surojax.assembly import from_config
from surojax.children import python_command
from surojax.config.checks import check, check_vocabulary
from surojax.config.fields import default_config
from surojax.data.tokenizer import load_tokenizer
from surojax.errors import ConfigError
from surojax.exchange import sources
from surojax.exchange.base import stored_formats
from surojax.exchange.gguf_file import is_gguf
from surojax.exchange.huggingface import read_whole_config
from surojax.exchange.model_tensors import stacks
from surojax.exchange.parts import placeholders
from surojax.inference.forward import hidden
from surojax.models.model import Model
from surojax.placement.mesh import find_devices
from surojax.placement.param import OUTER

LIMIT = 1e-4  # of the largest logit, in float32
TOKENS = 48  # of each text; longer ones are cut. Of the long row, the last so many are compared
LONG = 600  # random tokens of the long row, beyond the windows and unscaled positions of small models
TEXTS = (
    "The capital of France is Paris. The capital of Germany is Berlin, which has 3.7 million inhabitants.",
    "def area(width, height):\n    # in square metres\n    return width * height\n\n\nprint(area(12, 3.5))\n",
    "Größe, naïveté, 中文 and العربية: what is written otherwise, counts as well. 1234567890 = 10 digits!",
    "And then she said: \"If it's raining tomorrow, we'll stay at home\" -- but it was not, and they did not.",
)
INSTALL = "pip install torch transformers (and gguf, accelerate for a GGUF file), or --python INTERPRETER that has them"
THEIRS = """
import json, sys

request = json.load(open(sys.argv[1], encoding="utf-8"))
try:
    import numpy, torch, transformers
except ImportError as error:
    sys.exit(f"MISSING {error.name}")
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

file = {"gguf_file": request["file"]} if request["file"] else {}
config = AutoConfig.from_pretrained(request["folder"], **file)
made_by = AutoModelForCausalLM
if type(config) not in AutoModelForCausalLM._model_mapping:  # e.g. of Mistral 4
    [name] = config.architectures or [type(config).__name__.removesuffix("Config") + "ForCausalLM"]
    made_by = getattr(transformers, name, None) or sys.exit(f"it has no {name}")
tokenizer = AutoTokenizer.from_pretrained(request["folder"], **file) if request["texts"] else None
is_5 = int(transformers.__version__.split(".")[0]) >= 5
how = {"dtype": torch.float32, "experts_implementation": "eager"} if is_5 else {"torch_dtype": torch.float32}
quantised = getattr(config, "quantization_config", None) or {}
if quantised.get("quant_method") == "compressed-tensors":  # the numbers in the file, without rounded activations
    how["quantization_config"] = transformers.CompressedTensorsConfig(run_compressed=False)
model, loaded = made_by.from_pretrained(
    request["folder"], attn_implementation="eager", output_loading_info=True, **how, **file
)
model.eval()
found = {"versions": numpy.array(f"transformers {transformers.__version__}, torch {torch.__version__}")}
found["missing"] = numpy.array(sorted(map(str, [*loaded["missing_keys"], *loaded["mismatched_keys"]])), str)
for i, ids in enumerate(request["ids"]):
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, -request["compared"] :]
        targets = torch.tensor(ids[-request["compared"] :][1:])
        found[f"loss{i}"] = torch.nn.functional.cross_entropy(logits[:-1], targets).numpy()
    found[f"logits{i}"] = logits.numpy()
    if i < len(request["texts"]):
        ids = tokenizer(request["texts"][i], add_special_tokens=False).input_ids[: len(ids)]
    found[f"ids{i}"] = numpy.array(ids)
numpy.savez(sys.argv[2], **found)
"""


class ComparedText(NamedTuple):
    """One compared text: tokens, both losses in nats per token, the largest difference of logits, the largest logit."""

    text: str
    tokens: int
    loss: float
    loss_theirs: float
    difference: float
    largest: float
    same_ids: bool


class ParityReport(NamedTuple):
    """The result of `compare_with_transformers`.

    versions: of transformers and torch. missing: transformers' names of tensors that it did not find, and drew.
    """

    versions: str
    rows: list[ComparedText]
    missing: tuple[str, ...] = ()

    @property
    def worst(self) -> float:
        """The largest difference of logits in any text, relative to the largest logit."""
        difference = np.max([row.difference for row in self.rows])  # NaN if one is NaN, unlike max()
        return float(difference / np.max([row.largest for row in self.rows]))

    @property
    def passed(self) -> bool:
        """True if no tensor is missing, all logits agree within LIMIT and all texts have the same tokens."""
        return not self.missing and self.worst <= LIMIT and all(row.same_ids for row in self.rows)


def compare_with_transformers(source: str | Path, python: str = sys.executable) -> ParityReport:
    """Compares logits and losses of a few texts and a long row of random tokens, in float32.

    Without a tokenizer the texts are random tokens too, none of which stands for images or sounds. Of each row the last
    TOKENS positions are compared.
    source: a Hugging Face folder or name, or a GGUF file. python: an interpreter with transformers and torch. Raises
    ConfigError if it has none, if the model cannot be read, is in NVFP4, or if transformers cannot load it.
    """
    c = default_config()
    c.update({"model_path": str(source), "model_dtype": "float32"})
    c = sources.resolved(c)
    sources.check_has_logits(c)
    check(c)
    model = from_config.model(c)
    weights = sources.open_weights(c, model)
    assert weights is not None
    if "nvfp4" in stored_formats(weights, model):
        raise ConfigError(
            f"--check: expected tensors that transformers has in float32, got NVFP4 in {weights.path}, which "
            "compressed-tensors decodes to bfloat16; check an export of the same model in bfloat16 or fp8"
        )
    texts: list[str] = []
    stand_ins = [] if is_gguf(weights.path) else placeholders(read_whole_config(weights.path))
    drawn = np.setdiff1d(np.arange(model.vocab_size), stand_ins)
    if c.tokenizer == "bytes":
        ids = list(np.random.default_rng(0).choice(drawn, (len(TEXTS), TOKENS)))
    else:
        tokenizer = load_tokenizer(c.tokenizer)
        check_vocabulary(c, tokenizer.vocab_size, tokenizer.name)
        texts = [*TEXTS]
        ids = [tokenizer.encode(text)[:TOKENS] for text in texts]
    ids.append(np.random.default_rng(1).choice(drawn, LONG))
    theirs = _theirs(weights.path, texts, [text_ids.tolist() for text_ids in ids], python)
    sharding = jax.sharding.SingleDeviceSharding(find_devices(1)[0])
    ours = _logits(model, stacks(weights, model, "float32", sharding), ids)
    rows = []
    for i, (text_ids, logits_SV) in enumerate(zip(ids, ours, strict=True)):
        expected_SV = theirs[f"logits{i}"]
        same = np.array_equal(theirs[f"ids{i}"], text_ids)
        difference = float(np.max(np.abs(logits_SV - expected_SV)))
        largest = float(np.max(np.abs(expected_SV)))
        text = texts[i] if i < len(texts) else f"{len(text_ids)} random tokens"
        losses = _loss(logits_SV, text_ids[-TOKENS:]), float(theirs[f"loss{i}"])
        rows.append(ComparedText(text, len(text_ids), *losses, difference, largest, same))
    return ParityReport(str(theirs["versions"]), rows, tuple(map(str, theirs["missing"])))


def _logits(model: Model, weights: dict, ids: list[np.ndarray]) -> list[np.ndarray]:
    """Computes the logits `[S, V]` of the last TOKENS positions of each text."""

    @jax.jit
    def logits(weights, ids_1S):
        return model.logits(weights[OUTER], hidden(model, weights, ids_1S)[0, -TOKENS:])

    with jax.default_matmul_precision("highest"):
        return [np.asarray(logits(weights, text_ids[None])) for text_ids in ids]


def _loss(logits_SV: np.ndarray, ids: np.ndarray) -> float:
    """Returns the mean cross-entropy in nats of all tokens but the first."""
    logits_SV = logits_SV[:-1].astype(np.float64)
    top_S1 = logits_SV.max(axis=1, keepdims=True)
    total_S = top_S1[:, 0] + np.log(np.exp(logits_SV - top_S1).sum(axis=1))
    return float(np.mean(total_S - logits_SV[np.arange(len(logits_SV)), ids[1:]])) if len(ids) > 1 else math.nan


def _theirs(path: Path, texts: list[str], ids: list[list[int]], python: str) -> dict[str, np.ndarray]:
    """Computes token ids, losses and logits with transformers, by the script THEIRS.

    Raises ConfigError if the script cannot run.
    """
    folder, file = (path.parent, path.name) if is_gguf(path) else (path, "")
    request = {"folder": str(folder.absolute()), "file": file, "texts": texts, "ids": ids, "compared": TOKENS}
    with tempfile.TemporaryDirectory() as temporary:
        asked = Path(temporary) / "request.json"
        answered = Path(temporary) / "answer.npz"
        asked.write_text(json.dumps(request))
        try:
            command = python_command(THEIRS, str(asked), str(answered), python=python)
            process = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        except OSError as error:
            raise ConfigError(f"--python: expected an interpreter, got {python!r} ({error.strerror})") from error
        last = (process.stderr.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        if last.startswith("MISSING "):
            name = last.removeprefix("MISSING ")
            raise ConfigError(f"--check: expected transformers with torch, got a Python without {name}; {INSTALL}")
        if process.returncode:
            raise ConfigError(f"--check: transformers cannot compute {path}: {last[:300]}")
        with np.load(answered) as saved:
            return dict(saved)


def comparison_table(report: ParityReport) -> str:
    """Formats the report as lines of text."""
    lines = [
        f"compared with {report.versions}, in float32",
        f"{'text':40} {'tokens':>6} {'loss':>10} {'theirs':>10} {'logits differ':>14}",
    ]
    for row in report.rows:
        text = " ".join(row.text.split()).encode("ascii", "backslashreplace").decode()
        differ = f"{row.difference / row.largest:14.1e}" if row.same_ids else "  other tokens"
        lines.append(f"{text[:40]:40} {row.tokens:6} {row.loss:10.6f} {row.loss_theirs:10.6f} {differ}")
    if report.missing:
        others = len(report.missing) - 1
        names = report.missing[0] + (f" and {others} others" if others else "")
        lines.append(f"transformers does not find {names}, and draws new numbers instead")
    verdict = "passed" if report.passed else "failed"
    return "\n".join([*lines, f"{verdict}: {report.worst:.1e} of the largest logit, at most {LIMIT:.0e} is expected"])
