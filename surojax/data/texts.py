"""Reads texts of any size in parts, splits a text in two, and cuts texts into pieces to tokenise.

A text file is one document, however large it is. Nothing here holds more of it than a few pieces.
"""

import codecs
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from surojax.data.decompression import open_bytes, size_of, skip
from surojax.data.files import NotText, unreadable
from surojax.errors import ConfigError

# A Hugging Face tokenizer needs about 50 times the memory of the text and uses one core per text, so long texts are
# tokenised in pieces.
PIECE_CHARS = 1 << 20
READ = 1 << 20  # bytes of a file, or characters of a string, in one part


class TextFile(NamedTuple):
    """A span of a UTF-8 file. start, stop: byte offsets in the file, decompressed if it is a compressed one."""

    path: Path
    start: int
    stop: int


class TextPiece(NamedTuple):
    """A part of a text that is tokenised separately.

    is_first, is_last: whether the part is the text's first or last.
    """

    text: str
    is_first: bool
    is_last: bool


def open_text(path: Path) -> TextFile:
    """Opens the text of a file, without the byte order mark. A compressed file is read once for its length.

    Raises OSError if it cannot be read.
    """
    with open_bytes(path) as file:
        has_mark = file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8
    return TextFile(path, len(codecs.BOM_UTF8) if has_mark else 0, size_of(path))


def text_parts(text: str | TextFile) -> Iterator[str]:
    """Yields a text in consecutive parts; line ends are unchanged.

    Raises NotText, with the line in the file, if a file's bytes are not UTF-8; ConfigError if it cannot be read.
    """
    if isinstance(text, str):
        yield from (text[start : start + READ] for start in range(0, len(text), READ))
        return
    try:
        yield from _parts_of_file(text)
    except OSError as error:
        raise unreadable(text.path, error) from None


def _parts_of_file(text: TextFile) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    position = text.start
    with open_bytes(text.path) as file:
        skip(file, position)
        while position < text.stop:
            content = file.read(min(READ, text.stop - position))
            if not content:
                raise ConfigError(
                    f"{text.path}: expected {text.stop:,} bytes until it is read, got {position:,}; start again when "
                    "nothing changes the file"
                )
            position += len(content)
            try:
                yield decoder.decode(content, final=position == text.stop)
            except UnicodeDecodeError as error:
                begin = position - len(error.object)  # bytes of an incomplete character precede `content`
                raise NotText(error.object, error.start, begin, _count_lines(text.path, begin)) from None


def _count_lines(path: Path, stop: int) -> int:
    """Returns the number of line ends in the first `stop` bytes."""
    with open_bytes(path) as file:
        return sum(file.read(min(READ, stop - start)).count(b"\n") for start in range(0, stop, READ))


def split(text: str | TextFile) -> tuple[str | TextFile, str | TextFile]:
    """Splits a text at 95 % of its characters, or after the last line end between 90 % and 95 %."""
    length = sum(map(len, text_parts(text)))
    first = int(length * 0.90)
    last = int(length * 0.95)
    chars = 0
    size = 0  # bytes
    at_line = None  # both after the last line end so far
    for part in text_parts(text):
        if chars + len(part) > first:
            line = part.rfind("\n", max(first - chars, 0), last - chars) + 1
            at_line = (chars + line, size + _size(part[:line])) if line else at_line
        if chars + len(part) >= last:
            size += _size(part[: last - chars])
            break
        chars += len(part)
        size += _size(part)
    chars, size = at_line or (last, size)
    if isinstance(text, str):
        return text[:chars], text[chars:]
    middle = text.start + size
    return text._replace(stop=middle), text._replace(start=middle)


def _size(text: str) -> int:
    return len(text.encode("utf-8"))


def text_pieces(
    text: str | TextFile, section_starts: Callable[[str], Sequence[int]] | None = None
) -> Iterator[TextPiece]:
    """Yields the pieces of a text, each of at most PIECE_CHARS characters.

    section_starts: returns where a text can be cut without changing its tokens; None: not known. A piece ends at the
    last such place, or if there is none, after the last line end, or if there is none, where it has to.
    """
    is_first = True
    rest = ""
    for part in text_parts(text):
        rest += part
        while len(rest) >= 2 * PIECE_CHARS:  # so that what begins in a piece is seen to its end
            end = _end(rest, section_starts)
            yield TextPiece(rest[:end], is_first, False)
            rest = rest[end:]
            is_first = False
    while len(rest) > PIECE_CHARS:
        end = _end(rest, section_starts)
        yield TextPiece(rest[:end], is_first, False)
        rest = rest[end:]
        is_first = False
    yield TextPiece(rest, is_first, True)


def _end(text: str, section_starts: Callable[[str], Sequence[int]] | None) -> int:
    """Returns the end of the first piece, in characters, of a text longer than PIECE_CHARS."""
    places = [start for start in section_starts(text) if 0 < start <= PIECE_CHARS] if section_starts else []
    return places[-1] if places else text.rfind("\n", 0, PIECE_CHARS) + 1 or PIECE_CHARS
