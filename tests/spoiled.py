"""Values that nobody would write, and valid files with some of their content changed at random.

JSON is changed by structure, safetensors and GGUF files by their tensors and metadata, and any file by its bytes.
"""

import contextlib
import copy
import json
import os
import random
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import safetensors.numpy

DEEP = 100_000
NESTED = "[" * DEEP + "]" * DEEP
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 2**31, 2**32, 2**63, 2**64, 10**9, 10**30, 10**400, -(10**9), 0.0, 0.5, 1e308,
    -1e308, 5e-324, float("nan"), float("inf"), float("-inf"), "", " ", "a", "0", "1", "false", "true", "nan", "auto",
    "none", "../../etc/passwd", "/etc/passwd", "~nobody-here/x", "a\0b", "\ud800", "é", "\n", "%s", "{}", "x" * 5000,
    "(a+)+$", "(.*.*.*.*.*)*x", "(", "*", [], {}, [[]], [None], [1, 2], ["a", "a"], {"a": 1}, {"": None}, [[[[[]]]]],
    "__class__", "{{ 'x' * 10**10 }}", "{% for i in range(9) %}", "config.json", ".", "..", "/", "/dev/zero",
)  # fmt: skip
FLAGS = (
    "", " ", "0", "1", "-1", "2", "1.5", "1e3", "1e9", "1e18", "1e30", "1e308", "1e309", "-1e30", "nan", "inf", "-inf",
    "9" * 5000, "true", "false", "unset", "none", "None", "auto", "a,b", ",", "a" * 5000, "../..", "/", "/dev/null",
    "/proc/self/mem", "~nobody-here/x", "~", ".", "x.py", "x.gguf", "a/b", "é", "\ud800", "\n", "{}", "[]", "*", "**/*",
    "2147483647", "2147483648", "4294967296", "9223372036854775807", "9223372036854775808", "18446744073709551616",
    "--help-me", "-", "'", "(", "%s", "{0}", "nvme", "bytes", "stdlib", "3", "7", "8", "0.1", "1000003",
)  # fmt: skip

NUMBERS = tuple(text for text in FLAGS if re.fullmatch(r"-?[\d.e+]+|nan|-?inf", text))
PARTS = b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\xff", b"\n", b'"', b"{{", b"[" * 5000, b"9" * 5000


def spoiled_json(text: str, r: random.Random) -> str:
    """A JSON text with a few of its values, keys or lengths changed."""
    found = json.loads(text)
    for _ in range(r.choice((1, 1, 1, 2, 3))):
        places = list(places_in(found))
        if not places:
            break
        owner, key = r.choice(places)
        kind = r.randrange(8)
        if kind < 4:
            owner[key] = copy.deepcopy(r.choice(VALUES))
        elif kind == 4:
            del owner[key]
        elif kind == 5 and isinstance(owner, dict):
            owner[str(r.choice(VALUES))[:100]] = owner[key]
        elif kind == 6:
            other, which = r.choice(places)
            with contextlib.suppress(KeyError, IndexError):
                owner[key] = copy.deepcopy(other[which])
        else:
            owner[key] = [owner[key]] if r.random() < 0.5 else {"a": owner[key]}
    written = json.dumps(found)
    if r.random() < 0.05:
        written = written.replace("null", NESTED, 1) if "null" in written else f'{{"a": {NESTED}, {written[1:]}'
    return written


def places_in(found: Any) -> Iterator[tuple[Any, Any]]:
    """(list or object, index or key) of every value in a JSON value."""
    keys = found.keys() if isinstance(found, dict) else range(len(found)) if isinstance(found, list) else ()
    for key in list(keys):
        yield found, key
        yield from places_in(found[key])


def spoiled_bytes(content: bytes, r: random.Random) -> bytes:
    """Bytes with some of them changed, left out, doubled or added."""
    found = bytearray(content)
    for _ in range(r.choice((1, 1, 2, 5, 20))):
        at = r.randrange(len(found) + 1)
        size = r.choice((1, 1, 2, 4, 8, 50, 500))
        kind = r.randrange(7)
        if kind == 0:
            found[at : at + size] = r.randbytes(size)
        elif kind == 1:
            del found[at:]
        elif kind == 2:
            del found[at : at + size]
        elif kind == 3:
            found[at:at] = found[at : at + size] * r.choice((1, 2, 100))
        elif kind == 4:
            found[at:at] = r.choice(PARTS)
        elif kind == 5:
            number = r.choice((0, 1, 2**16, 2**31 - 1, 2**32 - 1, 2**62, 2**63, 2**64 - 1))
            found[at : at + 8] = number.to_bytes(8, "little")
        else:
            found[at : at + 1] = bytes([r.randrange(256)])
    return bytes(found)


def spoil(file: Path, r: random.Random, known: dict[str, dict[str, Any]]) -> None:
    """Changes a file, or puts something else in its place. known: by name of a file, keys that it may have."""
    if file.name in known and r.random() < 0.8:
        found = contradicted(json.loads(file.read_text()), known[file.name], r)
        file.write_text(json.dumps(found), "utf-8", "surrogatepass")
        return
    if file.suffix in TENSORS and r.random() < 0.7:
        TENSORS[file.suffix](file, r)
        return
    content = file.read_bytes()
    kind = r.randrange(30)
    if kind < 4:
        file.unlink()
        if kind == 0:
            os.mkfifo(file)
        elif kind == 1:
            file.mkdir()
        elif kind == 2:
            file.symlink_to(file.name)
        return
    if kind == 4:
        file.write_bytes(r.choice((b"", b"{}", b"[]", b"null", b"0", b"\0" * 4096, NESTED.encode(), b'{"a":' * DEEP)))
    elif kind < 22 and file.suffix == ".json":
        file.write_text(spoiled_json(content.decode(), r), "utf-8", "surrogatepass")
    elif kind < 22 and file.suffix == ".safetensors":
        size = int.from_bytes(content[:8], "little")
        header = spoiled_json(content[8 : 8 + size].decode(), r).encode("utf-8", "surrogatepass")
        file.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + size :])
    elif kind < 22 and file.suffix == ".jsonl":
        lines = content.decode().splitlines()
        number = r.randrange(len(lines))
        lines[number] = spoiled_json(lines[number], r)
        file.write_text("\n".join(lines), "utf-8", "surrogatepass")
    else:
        file.write_bytes(spoiled_bytes(content, r))


# -- Values of the right kind, which contradict others ----------------------------------------------------------------

HUGE = (2**31 - 1, 2**32 - 1, 2**62, 2**63 - 1)


def near(value: Any, r: random.Random) -> Any:
    """A value like this one, of the same type if there is one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return r.choice((0, -1, 1, value + 1, max(value - 1, 0), 2 * value, value // 2, -value, *HUGE))
    if isinstance(value, float):
        return r.choice((0.0, -value, 1.0, 2 * value, value / 3, 1e30, -1e30, 1e-30, float("nan"), float("inf")))
    if isinstance(value, str):
        return r.choice(
            (value.upper(), value[:-1], value + value, "linear", "default", "full_attention", "mamba", "*M")
        )
    if isinstance(value, list):
        found = list(value)
        kind = r.randrange(6)
        if kind == 0 or not found:
            return found * 2 or [0]
        if kind == 1:
            return found[:-1]
        if kind == 2:
            return found[::-1]
        place = r.randrange(len(found))
        found[place] = near(found[place], r) if kind < 5 else copy.deepcopy(r.choice(VALUES))
        return found
    if isinstance(value, dict) and value:
        key = r.choice(sorted(value))
        return value | {key: near(value[key], r)} if r.random() < 0.8 else {k: v for k, v in value.items() if k != key}
    return r.choice((0, 1, -1, 4, 0.5, True, "default", [1], [[]], {"rope_type": "default"}, {"0": {"a": 1}}))


def contradicted(found: dict[str, Any], known: dict[str, Any], r: random.Random) -> dict[str, Any]:
    """An object with some of its keys, or of those that are known (with a value of each), like what they were."""
    found = dict(found)
    for _ in range(r.choice((1, 1, 1, 2, 3))):
        key = r.choice(sorted({*found, *known}))
        kind = r.random()
        if kind < 0.1:
            found.pop(key, None)
        elif kind < 0.25:
            found[key] = copy.deepcopy(r.choice(VALUES))
        elif kind < 0.35:
            found[key] = copy.deepcopy(r.choice(list(found.values())))
        else:
            found[key] = near(found.get(key, known.get(key)), r)
    return found


# -- Tensors and metadata ---------------------------------------------------------------------------------------------


def spoiled_shape(shape: list[int], r: random.Random) -> list[int]:
    """Another shape, with as many elements or not."""
    kind = r.randrange(7)
    if kind == 0:
        return shape[::-1]
    if kind == 1:
        return [*shape, 1]
    if kind == 2:
        return [int(np.prod(shape, dtype=object))]
    if kind == 3:
        return []
    if not shape:
        return [r.choice((0, 1, 2))]
    found = list(shape)
    place = r.randrange(len(found))
    found[place] = r.choice((0, 1, found[place] + 1, found[place] - 1, 2 * found[place], *HUGE[:2]))
    return found


def spoiled_tensors(file: Path, r: random.Random) -> None:
    """Leaves out, adds, renames, reshapes or retypes tensors of a safetensors file."""
    tensors = safetensors.numpy.load_file(file)
    for _ in range(r.choice((1, 1, 1, 2))):
        name = r.choice(sorted(tensors))
        other = r.choice(sorted(tensors))
        x = tensors[name]
        kind = r.randrange(9)
        if kind == 0:
            del tensors[name]
        elif kind == 1:
            tensors[r.choice(("lm_head.weight", f"{name}.bias", f"{name}_scale_inv", "model.extra.weight"))] = x
        elif kind == 2:
            tensors[re.sub(r"\d+", lambda m: r.choice(("7", "00", "9" * 30, "-1", m[0] + "0")), name)] = tensors.pop(
                name
            )
        elif kind == 3:
            tensors[name], tensors[other] = tensors[other], x
        elif kind == 4:
            shape = spoiled_shape([*x.shape], r)
            shape = shape if np.prod(shape, dtype=object) < 1e6 else [2, 3]
            tensors[name] = np.resize(x, shape).astype(x.dtype)
        elif kind == 5:
            dtype = r.choice((np.float64, np.int8, np.uint8, np.bool_, np.int64, np.float16, np.complex64, np.uint16))
            with np.errstate(all="ignore"):
                tensors[name] = x.astype(dtype)
        elif kind == 6:
            tensors[name] = np.full_like(x, r.choice((np.nan, np.inf, -np.inf, 3e38)))
        elif kind == 7:
            tensors[f"{r.choice(('module.', 'model.', 'base_model.model.', ' '))}{name}"] = tensors.pop(name)
        else:
            tensors[name] = 1 + x
        if not tensors:
            break
    with contextlib.suppress(Exception):  # of a dtype that the library does not write
        safetensors.numpy.save_file(tensors, file)


class OfGguf(NamedTuple):
    """The content of a GGUF file.

    metadata: (key, (type, type of the elements of an array), value). tensors: (name, sizes as in the file, type,
    bytes).
    """

    metadata: list[tuple[str, tuple[int, int | None], Any]]
    tensors: list[tuple[str, list[int], int, bytes]]


def read_gguf(file: Path) -> OfGguf:
    """Reads a valid file."""
    reader = gguf.GGUFReader(file)
    fields = [(key, field) for key, field in reader.fields.items() if not key.startswith("GGUF.")]
    metadata = [
        (key, (int(x.types[0]), int(x.types[-1]) if len(x.types) > 1 else None), x.contents()) for key, x in fields
    ]
    tensors = [(x.name, [int(n) for n in x.shape], int(x.tensor_type), x.data.tobytes()) for x in reader.tensors]
    return OfGguf(metadata, tensors)


NUMBERS_OF_GGUF = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9


def encoded_value(kind: int, of_elements: int | None, value: Any) -> bytes:
    """A value of the metadata, changed to its type as far as it can be."""
    if kind == ARRAY:
        kind_of_each = of_elements if of_elements is not None else STRING
        elements = value if isinstance(value, list) else [value]
        return struct.pack("<IQ", kind_of_each, len(elements)) + b"".join(
            encoded_value(kind_of_each, None, x) for x in elements
        )
    if kind == STRING:
        text = value if isinstance(value, str) else json.dumps(value)
        encoded = text.encode("utf-8", "surrogatepass")
        return struct.pack("<Q", len(encoded)) + encoded
    letter = NUMBERS_OF_GGUF[kind]
    number = value if isinstance(value, int | float) and abs(value) < 1e300 else 1
    if letter in "fd":
        return struct.pack(f"<{letter}", min(max(number, -3e38), 3e38) if letter == "f" else number)
    size = 8 * struct.calcsize(letter)
    number = int(number)
    return (number % 2**size).to_bytes(size // 8, "little") if letter != "?" else bytes([bool(number)])


def write_gguf(content: OfGguf, file: Path, counts: tuple[int, int] | None = None) -> None:
    """Writes a file, whatever its content. counts: of tensors and of metadata, instead of their numbers."""
    text = lambda name: (
        struct.pack("<Q", len(name.encode("utf-8", "surrogatepass"))) + name.encode("utf-8", "surrogatepass")
    )
    numbers = counts or (len(content.tensors), len(content.metadata))
    found = b"GGUF" + struct.pack("<IQQ", 3, *(n % 2**64 for n in numbers))
    for key, (kind, of_elements), value in content.metadata:
        found += text(key) + struct.pack("<I", kind) + encoded_value(kind, of_elements, value)
    data = b""
    for name, sizes, kind, raw in content.tensors:
        found += text(name) + struct.pack("<I", len(sizes)) + b"".join(struct.pack("<Q", n % 2**64) for n in sizes)
        found += struct.pack("<IQ", kind, len(data))
        data += raw + bytes(-len(raw) % 32)
    file.write_bytes(found + bytes(-len(found) % 32) + data)


def spoiled_gguf(file: Path, r: random.Random) -> None:
    """Changes some of a GGUF file's metadata and tensors."""
    metadata, tensors = read_gguf(file)
    counts = None
    for _ in range(r.choice((1, 1, 1, 2, 3))):
        if r.random() < 0.6:
            # Lists of tokens and what belongs to them are a few keys of many.
            places = [i for i, (key, *_) in enumerate(metadata) if not key.startswith("tokenizer.")]
            place = r.choice(places if r.random() < 0.8 and places else range(len(metadata)))
            key, (kind, of_elements), value = metadata[place]
            change = r.randrange(9)
            if change < 4:
                metadata[place] = key, (kind, of_elements), near(value, r)
            elif change == 4:
                del metadata[place]
            elif change == 5:
                metadata.append((key, (kind, of_elements), near(value, r)))
            elif change == 6:
                kind = r.choice((*NUMBERS_OF_GGUF, STRING, ARRAY))
                metadata[place] = key, (kind, r.choice((*NUMBERS_OF_GGUF, STRING))), value
            elif change == 7:
                metadata[place] = key, (kind, of_elements), copy.deepcopy(r.choice(VALUES))
            else:
                metadata[place] = key.replace(".", r.choice((".", "..", ".x")), 1), (kind, of_elements), value
        else:
            place = r.randrange(len(tensors))
            name, sizes, kind, raw = tensors[place]
            change = r.randrange(9)
            if change == 0:
                del tensors[place]
            elif change == 1:
                tensors.append(tensors[place])
            elif change == 2:
                number = r.choice(("9" * 30, "00", "-1", "7"))
                tensors[place] = re.sub(r"\d+", number, name), sizes, kind, raw
            elif change == 3:
                tensors[place] = r.choice(tensors)[0], sizes, kind, raw
            elif change < 6:
                tensors[place] = name, spoiled_shape(sizes, r), kind, raw
            elif change == 6:
                tensors[place] = name, sizes, r.choice((*range(40), 255, 2**31)), raw
            elif change == 7:
                tensors[place] = (
                    name,
                    sizes,
                    kind,
                    np.full(len(raw) // 4, r.choice((np.nan, np.inf, -1.0)), "<f4").tobytes(),
                )
            else:
                tensors.append((f"{name}.extra", sizes, kind, raw))
        if not tensors or not metadata:
            break
    if r.random() < 0.05:
        counts = r.choice(((2**63, len(metadata)), (len(tensors), 2**40), (0, 0), (len(tensors) + 1, len(metadata))))
    write_gguf(OfGguf(metadata, tensors), file, counts)


TENSORS = {".safetensors": spoiled_tensors, ".gguf": spoiled_gguf}
