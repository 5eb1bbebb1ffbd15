"""Reads rows from files of tables: Parquet, and Arrow's own format, which Feather is too.

Of a struct, a null is a field that the row does not have: all rows of a column have the same fields there.
"""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from surojax.data.data_rows import BadRow, DataRow
from surojax.data.decompression import SMALL, UNFOLDS
from surojax.data.values import plain_scalar
from surojax.errors import ConfigError

LONGEST = 64 << 20  # bytes of a row; with all copies of it, one needs some times as much memory
SHORT = f"rows of at most {LONGEST >> 20} MiB"
SPLIT = "split it, or write a long text into a .txt file, which may have any size"
_ROWS = 16  # converted to Python objects at a time; 256 take as long
_COLUMN_BYTES = 1 << 20  # of each column of a Parquet file, read at a time

type _Convert = Callable[[Any], Any]


def read_parquet(path: Path) -> Iterator[DataRow | BadRow]:
    """Yields the rows of a Parquet file, a few at a time. Raises ConfigError if it cannot be read."""
    import pyarrow.parquet  # imported here, since it takes a while and most runs read text

    def batches() -> Iterator[Any]:
        # Without these two, all row groups that were read stay in memory.
        with pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=_COLUMN_BYTES) as file:
            check_names(file.schema_arrow.names, str(path))
            _check_unfolded(path, file.metadata)
            yield from file.iter_batches(batch_size=_ROWS)

    yield from _rows_of(path, batches(), "Parquet")


def read_arrow(path: Path) -> Iterator[DataRow | BadRow]:
    """Yields the rows of an Arrow file or stream, or of a Feather file. Raises ConfigError if it cannot be read."""
    import pyarrow

    def batches() -> Iterator[Any]:
        with pyarrow.memory_map(str(path)) as file:
            begin = file.read(6)
            file.seek(0)
            if begin.startswith(b"FEA1"):
                raise pyarrow.ArrowInvalid("it is of Feather's first version")
            is_file = begin == b"ARROW1"
            reader = pyarrow.ipc.open_file(file) if is_file else pyarrow.ipc.open_stream(file)
            check_names(reader.schema.names, str(path))
            for batch in map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader:
                if batch.nbytes > max(UNFOLDS * path.stat().st_size, SMALL):
                    raise ConfigError(f"{path}: expected at most {UNFOLDS} times the file's bytes, got more; {SPLIT}")
                batch.validate(full=True)
                yield from (batch.slice(start, _ROWS) for start in range(0, batch.num_rows, _ROWS))

    yield from _rows_of(path, batches(), "Arrow")


def _rows_of(path: Path, batches: Iterator[Any], kind: str) -> Iterator[DataRow | BadRow]:
    """Yields the rows of small batches. kind: the format, for messages."""
    import pyarrow

    number = itertools.count(1)
    try:
        for batch in batches:
            if batch.nbytes > _ROWS * LONGEST:
                raise ConfigError(f"{path}, row {next(number)}: expected {SHORT}, got longer ones; {SPLIT}")
            converts = [(field.name, convert) for field in batch.schema if (convert := _converter(field.type))]
            for record in _records(batch):
                where = f"{path}, row {next(number)}"
                if isinstance(record, Exception):
                    reason = f"expected values that Python has, got others ({_one_line(record)}); correct the row"
                    yield BadRow(where, reason)
                else:
                    for name, convert in converts:
                        record[name] = convert(record[name])
                    yield DataRow(record, where)
    except (pyarrow.ArrowException, OSError, UnicodeError, IndexError) as error:
        if isinstance(error, OSError) and error.errno:  # of the disk; those of a damaged footer have no number
            raise
        article = "an" if kind == "Arrow" else "a"
        raise ConfigError(
            f"{path}: expected {article} {kind} file, got one that cannot be read ({_one_line(error)}); write it again"
        ) from None


def _records(batch: Any) -> list[dict[str, Any] | Exception]:
    """Converts a batch to records; an exception in place of rows with values that Python cannot hold (year 10^6)."""
    try:
        return batch.to_pylist(maps_as_pydicts="strict")
    except (ValueError, ArithmeticError, KeyError) as error:  # KeyError: a map with a key twice
        rows = [batch.slice(i, 1) for i in range(batch.num_rows)]
        return [_records(row)[0] for row in rows] if len(rows) > 1 else [error]


def _converter(kind: Any) -> _Convert | None:
    """Returns the function that converts a Python value of an Arrow type to one of JSON; None: it is one."""
    import pyarrow.types as types

    if isinstance(kind, _extension()):
        return _converter(kind.storage_type)
    if types.is_struct(kind):
        inner = {field.name: _converter(field.type) for field in kind}
        return lambda x: x and {k: _by(inner[k], v) for k, v in x.items() if v is not None}
    if types.is_map(kind):
        values = _converter(kind.item_type)
        return lambda x: x and {plain_scalar(k): _by(values, v) for k, v in x.items()}
    if types.is_dictionary(kind) or types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        values = _converter(kind.value_type)
        return values if values is None or types.is_dictionary(kind) else lambda x: x and [_by(values, v) for v in x]
    if types.is_boolean(kind) or types.is_string(kind) or types.is_large_string(kind) or types.is_integer(kind):
        return None
    return lambda x: x if isinstance(x, float) else plain_scalar(x)  # NaN of a number is one


def _by(convert: _Convert | None, value: Any) -> Any:
    return value if convert is None else convert(value)


def _extension() -> type:
    import pyarrow

    return pyarrow.BaseExtensionType


def _check_unfolded(path: Path, metadata: Any) -> None:
    """Raises ConfigError for a Parquet file that decompresses to implausibly many bytes.

    Equal values are stored once, so some bytes can mean billions of rows.
    """
    size = path.stat().st_size
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    columns = [group.column(i) for group in groups for i in range(group.num_columns)]
    unfolded = sum(column.total_uncompressed_size for column in columns)
    if metadata.num_rows > size or unfolded > max(UNFOLDS * size, SMALL):
        raise ConfigError(
            f"{path}: expected at most a row for each of its {size:,} bytes and {UNFOLDS} times as many "
            f"bytes, got {metadata.num_rows:,} rows of {unfolded:,} bytes; remove rows that repeat"
        )


def check_names(names: list[str], where: str) -> list[str]:
    """Returns the names of a table's columns. Raises ConfigError if two are equal or one is empty."""
    if len(set(names)) < len(names) or not all(names):
        raise ConfigError(f"{where}: expected a header with different names, got {', '.join(names)}; correct it")
    return names


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
