"""Data preparation: tokens per second, resident memory, and whether training waits for batches.

    python benchmarks/data.py [--megabytes 60] [--pairs 3] [--steps 60]

Compares our preparation, from a .jsonl file to the files of the cache, with `tokenizers` alone: `encode_batch_fast` on
all cores, on texts that are in memory already, whose ids are thrown away. Both take the same documents (this Python's
standard library, several times) and the same byte-level BPE, in processes of their own, one after the other, in pairs.

Then it trains configs/tiny.py for some steps and says how long they waited for data.
"""

import argparse
import contextlib
import importlib
import io
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from surojax.data.corpus import source
from surojax.data.data_rows import BlankRow
from surojax.data.prepare import load_corpora
from surojax.data.run_data import Settings, load_data, parse_entries
from surojax.data.tokenizer import load_tokenizer

ROOT = Path(__file__).parent.parent
VOCABULARY = 16_000
GROUP_BYTES = 4 << 20  # of texts that `tokenizers` alone gets in one call


def write_inputs(folder: Path, megabytes: int) -> None:
    """Writes text.jsonl and a tokenizer.json that was trained on a part of it."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    documents = [str(x.content) for x in source("stdlib", "text").items(False) if not isinstance(x, BlankRow)]
    size = 0
    with (folder / "text.jsonl").open("w", encoding="utf-8") as file:
        while size < megabytes * 10**6:
            for document in documents:
                size += file.write(json.dumps({"text": f"# {size}\n{document}"}) + "\n")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<|endoftext|>"], show_progress=False)
    tokenizer.train_from_iterator(documents[::8], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))


def peak_mib() -> float:
    """Largest resident memory of this process so far (Linux). getrusage would count the process that started it."""
    match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(match[1]) / 2**10 if match else 0.0


def measure_tokenizers(folder: Path) -> dict[str, float]:
    """`tokenizers` alone; reading and parsing are not timed."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    groups = [[]]
    size = 0
    for line in (folder / "text.jsonl").open(encoding="utf-8"):
        groups[-1].append(json.loads(line)["text"])
        size += len(groups[-1][-1])
        if size > GROUP_BYTES:
            groups.append([])
            size = 0
    started = time.perf_counter()
    tokens = 0
    for group in groups:
        tokens += sum(len(encoding) for encoding in tokenizer.encode_batch_fast(group, add_special_tokens=False))
    return {"tokens": tokens, "seconds": time.perf_counter() - started, "added_mib": 0.0}


def measure_text(folder: Path) -> dict[str, float]:
    """Ours, by `--config.data=text.jsonl`."""
    tokenizer = load_tokenizer(str(folder / "tokenizer.json"))
    text = str(folder / "text.jsonl")
    before = peak_mib()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        train, held_out = load_corpora(text, tokenizer=tokenizer, data_cache=cache)
        seconds = time.perf_counter() - started
        again = time.perf_counter()
        load_corpora(text, tokenizer=tokenizer, data_cache=cache)
        reused = time.perf_counter() - again
    tokens = len(train.tokens) + len(held_out.tokens) - train.num_examples - held_out.num_examples
    return {"tokens": tokens, "seconds": seconds, "added_mib": peak_mib() - before, "reused_s": reused}


def measure_dataset(folder: Path) -> dict[str, float]:
    """Ours, by an entry of `datasets`, and the plan that packs it."""
    tokenizer = load_tokenizer(str(folder / "tokenizer.json"))
    entries = parse_entries([{"path": str(folder / "text.jsonl")}], ())
    before = peak_mib()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        settings = Settings(sequence_len=1024, eval_batches=1, sample_packing=True, data_cache=cache)
        loaded = load_data(entries, settings, tokenizer, eval_batch_size=1)
        seconds = time.perf_counter() - started
    tokens = loaded.train.sources[0].num_tokens + len(loaded.held_out.tokens)
    return {"tokens": tokens, "seconds": seconds, "added_mib": peak_mib() - before}


MEASURES = {"tokenizers": measure_tokenizers, "data": measure_text, "datasets": measure_dataset}


def compare(megabytes: int, pairs: int) -> None:
    """Prints tokens per second of each way, the medians of `pairs` processes."""
    with tempfile.TemporaryDirectory() as folder:
        write_inputs(Path(folder), megabytes)
        by_name: dict[str, list[dict[str, float]]] = {name: [] for name in MEASURES}
        for _ in range(pairs):
            for name, results in by_name.items():
                command = [sys.executable, __file__, "--measure", name, "--folder", folder]
                process = subprocess.run(command, capture_output=True, text=True, check=True)
                results.append(json.loads(process.stdout.splitlines()[-1]))
    alone = [run["tokens"] / run["seconds"] for run in by_name["tokenizers"]]
    for name, results in by_name.items():
        speeds = [run["tokens"] / run["seconds"] for run in results]
        ratio = statistics.median(ours / theirs for ours, theirs in zip(speeds, alone, strict=True))
        added = max(run["added_mib"] for run in results)
        reused = f", reused in {max(run['reused_s'] for run in results):.3f} s" if "reused_s" in results[0] else ""
        print(
            f"{name:10}  {statistics.median(speeds):12,.0f} tokens/s  {ratio:6.1%} of tokenizers alone  "
            f"{added:6.0f} MiB added{reused}"
        )


def measure_waiting(steps: int) -> None:
    """Prints the share of a step's time that the tiny run waits for data."""
    from surojax.config import flags

    module = importlib.import_module("surojax.train")
    c = flags.load_config(str(ROOT / "configs" / "tiny.py"))
    with tempfile.TemporaryDirectory() as folder:
        c.max_steps, c.eval_steps, c.save_steps, c.sample_tokens, c.warmup_steps = steps, 0, 0, 0, 0
        c.output_dir = folder
        with contextlib.redirect_stdout(io.StringIO()):
            history = module.train(c).history
    records = [record for record in history if record["log"] == "step"][1:]  # the first one compiles
    step = statistics.median(record["duration_ms"] for record in records)
    wait = statistics.median(record["data_wait_ms"] for record in records)
    share = sum(record["data_wait_ms"] for record in records) / sum(record["duration_ms"] for record in records)
    print(f"tiny: a step takes {step:.1f} ms (median) and waits {wait * 1e3:.0f} us for data; {share:.2%} of all time")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--megabytes", type=int, default=60)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--measure", choices=MEASURES, help="one way, in this process")
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(MEASURES[args.measure](args.folder)))
        return
    compare(args.megabytes, args.pairs)
    measure_waiting(args.steps)


if __name__ == "__main__":
    main()
