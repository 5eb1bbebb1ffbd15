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
LICENSES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE", "NOTICE.txt")  # which a model made of the source keeps
# Of what makes tensors of images and videos for an image-text model.
PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
SMALL_FILES = (CONFIG, GENERATION, *TOKENIZER_FILES, *LICENSES, *PROCESSORS)
NAMED_TEMPLATES = "additional_chat_templates"  # folder of templates for conversations with tools, for example

LARGEST = 256 << 20  # bytes of one; a tokenizer.json with 262,144 tokens has 33 MB

type Files = dict[str, bytes]  # contents by name, or by path in the folder


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


def read_tokenizer_files(folder: Path) -> Files:
    """Reads the tokenizer's files and chat templates in a folder. Raises ConfigError if one cannot be read."""
    named = sorted((folder / NAMED_TEMPLATES).glob("*.jinja"))
    return read_small_files(folder, (*TOKENIZER_FILES, *(f"{NAMED_TEMPLATES}/{path.name}" for path in named)))


def write_small_files(folder: Path, files: Files) -> None:
    """Writes files into a folder that exists. Raises OSError."""
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
