"""The small files of a model's folder: settings, tokenizer, chat template, generation config."""

from pathlib import Path

from surojax.errors import ConfigError
from surojax.untrusted import read_bytes

CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
SMALL_FILES = (CONFIG, GENERATION, *TOKENIZER_FILES)

LARGEST = 256 << 20  # bytes of one; a tokenizer.json with 262,144 tokens has 33 MB

type Files = dict[str, bytes]  # contents by name


def read_small_files(folder: Path, names: tuple[str, ...]) -> Files:
    """Reads the files with these names that exist in a folder: {name: content}.

    Raises ConfigError if one cannot be read.
    """
    contents = {}
    for name in names:
        file = folder / name
        if file.is_file():
            try:
                contents[name] = read_bytes(file, LARGEST)
            except OSError as error:
                raise ConfigError(f"cannot read {file} ({error.strerror}); check its permissions") from error
    return contents


def write_small_files(folder: Path, files: Files) -> None:
    """Writes files into a folder that exists. Raises OSError."""
    for name, content in files.items():
        (folder / name).write_bytes(content)
