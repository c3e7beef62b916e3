"""Reads the user's own sequence lengths: .txt (one number a line), .csv, .jsonl or .parquet.

Also exports `apply_overlong` and `scale_lengths`, which change lengths once they are read.
"""

import csv
import difflib
import io
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from odc_sim.errors import InputError, pip
from odc_sim.header import show_path
from odc_sim.overlong import LARGEST_LENGTH_TOKENS, Overlong, apply_overlong, scale_lengths

__all__ = ["EXTENSIONS", "Overlong", "apply_overlong", "read_lengths", "scale_lengths"]

EXTENSIONS = (".txt", ".csv", ".jsonl", ".parquet")

# Names taken for the length column without asking, compared in lower case.
PREFERRED_COLUMNS = ("length", "lengths", "num_tokens", "tokens", "input_length")

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_TABLE_HINT = "choose one with --column"

Lengths = npt.NDArray[np.int64]


def read_lengths(path: str | Path, column: str | None = None) -> Lengths:
    """The lengths in a file, in its order: int64 [n], n >= 1, each from 1 to 2^31.

    `column` names the column of a .csv or .parquet file, or the key of .jsonl objects. Without it: the column called
    length, lengths, num_tokens, tokens or input_length, else the only one that holds whole numbers.
    Whole numbers may be written as 1234.0 or 1.2e3.

    Raises:
        InputError: anything else; the message names the file, the line or row, and what was found there.
    """
    file = Path(path)
    readers: dict[str, Callable[[Path, str | None], Lengths]] = {
        ".txt": _read_txt,
        ".csv": _read_csv,
        ".jsonl": _read_jsonl,
        ".parquet": _read_parquet,
    }
    try:
        if file.is_dir():
            raise InputError(f"{file}: is a directory, expected a file ({', '.join(EXTENSIONS)})")
        if not file.exists():
            raise InputError(f"{file}: no such file")
        reader = readers.get(file.suffix.lower())
        if reader is None:
            raise InputError(f"{file}: unknown extension {file.suffix!r}, expected one of {', '.join(EXTENSIONS)}")
        return reader(file, column)
    except OSError as error:
        raise InputError(f"{show_path(file)}: cannot be read ({error.strerror or error})") from None


def _read_txt(file: Path, column: str | None) -> Lengths:
    if column is not None:
        raise InputError(f"{file}: a .txt file has no columns, so --column {column!r} does not apply")
    lines = _lines(file)
    while lines and not lines[-1].strip():
        lines.pop()
    return _tokens(file, ((f"line {number}", line.strip()) for number, line in enumerate(lines, 1)))


def _read_csv(file: Path, column: str | None) -> Lengths:
    reader = csv.reader(io.StringIO("\n".join(_lines(file))), strict=True)
    try:
        rows = [(reader.line_num, row) for row in reader if any(cell.strip() for cell in row)]
    except csv.Error as error:
        raise InputError(f"{file}: line {reader.line_num}: not valid CSV ({error})") from None
    if not rows:
        raise InputError(f"{file}: is empty")
    header = [cell.strip() for cell in rows[0][1]]
    if all(_NUMBER.fullmatch(name) for name in header):
        if len(header) > 1 or column is not None:
            raise InputError(f"{file}: line 1 holds numbers, expected the names of the columns")
        rows.insert(0, (0, ["length"]))  # one bare column of numbers needs no name
        header = ["length"]
    for line, row in rows[1:]:
        if len(row) != len(header):
            raise InputError(f"{file}: line {line} has {len(row)} cells, the header has {len(header)}")
    first = rows[1][1] if len(rows) > 1 else []
    whole = [i for i, cell in enumerate(first) if _is_whole(cell.strip())]
    index = _choose_column(file, header, whole, column)
    return _tokens(file, ((f"line {line}", row[index].strip()) for line, row in rows[1:]))


def _read_jsonl(file: Path, column: str | None) -> Lengths:
    entries = [(number, _json(file, number, line)) for number, line in enumerate(_lines(file), 1) if line.strip()]
    if not entries:
        raise InputError(f"{file}: is empty")
    line, first = entries[0]
    if not isinstance(first, _Object):
        if column is not None:
            raise InputError(f"{file}: line {line} is not an object, so --column {column!r} does not apply")
        for line, value in entries:
            if isinstance(value, _Object):
                raise InputError(f"{file}: line {line} is an object, the lines before hold bare numbers")
        return _tokens(file, ((f"line {line}", _no_text(value)) for line, value in entries))

    names = [name for name, _ in first.pairs]
    key = names[
        _choose_column(file, names, [i for i, (_, v) in enumerate(first.pairs) if _is_whole(_no_text(v))], column)
    ]
    values: list[tuple[str, object]] = []
    for line, value in entries:
        if not isinstance(value, _Object):
            raise InputError(f"{file}: line {line} is not an object with {key!r}")
        found = [v for name, v in value.pairs if name == key]
        if len(found) != 1:
            raise InputError(f"{file}: line {line} has {'no' if not found else 'more than one'} {key!r}")
        values.append((f"line {line}", _no_text(found[0])))
    return _tokens(file, values)


def _read_parquet(file: Path, column: str | None) -> Lengths:
    if file.stat().st_size == 0:
        raise InputError(f"{file}: is empty")
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise InputError(f"{file}: reading .parquet needs pyarrow: {pip('pyarrow')}, or convert to .csv") from None
    try:
        parquet = pq.ParquetFile(file)
        schema = parquet.schema_arrow
        numeric = [i for i, t in enumerate(schema.types) if pa.types.is_integer(t) or pa.types.is_floating(t)]
        index = _choose_column(file, list(schema.names), numeric, column)
        if index not in numeric:
            raise InputError(
                f"{file}: column {schema.names[index]!r} holds {schema.types[index]}, expected whole numbers"
            )
        # By name, which a column inside a struct may share: the top-level one is picked from what comes back.
        values = parquet.read(columns=[schema.names[index]]).column(schema.names[index])
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the system's complaint; Arrow raises OSError without a number for damaged data
        raise InputError(f"{file}: not a readable parquet file ({str(error).splitlines()[0]})") from None
    if len(values) == 0:
        raise InputError(f"{file}: holds no lengths")
    if values.null_count:
        raise InputError(f"{file}: row {values.is_null().index(True).as_py() + 1} is missing a value")
    array = np.asarray(values.to_numpy())
    with np.errstate(invalid="ignore"):
        bad = ~((array >= 1) & (array <= LARGEST_LENGTH_TOKENS))
        if array.dtype.kind == "f":
            bad |= array != np.rint(array)
    if bad.any():
        row = int(bad.argmax())
        raise InputError(f"{file}: row {row + 1} {_problem(array[row].item())}")
    return array.astype(np.int64)


class _Text(str):
    """Text where JSON should have a number: refused even if it is written like one."""


def _no_text(value: object) -> object:
    return _Text(value) if isinstance(value, str) else value


class _Object:
    """A JSON object as its (key, value) pairs, so that a key given twice is seen."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        self.pairs = pairs


def _json(file: Path, number: int, line: str) -> object:
    try:
        return json.loads(line, object_pairs_hook=_Object)
    except (ValueError, RecursionError) as error:  # also integers of thousands of digits, and endless brackets
        reason = error.msg if isinstance(error, json.JSONDecodeError) else type(error).__name__
        raise InputError(f"{file}: line {number} is not valid JSON ({reason})") from None


def _lines(file: Path) -> list[str]:
    """Lines of a UTF-8 file, any line ends, without a byte order mark; InputError if empty or not UTF-8."""
    raw = file.read_bytes()
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise InputError(f"{file}: line {line} is not UTF-8 text: save the file as UTF-8") from None
    if not text.strip():
        raise InputError(f"{file}: is empty")
    return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")


def _choose_column(file: Path, names: Sequence[str], whole: Sequence[int], column: str | None) -> int:
    """Index of the column to read; `whole` are the indices of those that look like whole numbers."""
    listed = ", ".join(names) or "none"
    if column is not None:
        found = [i for i, name in enumerate(names) if name == column]
        if not found:
            close = difflib.get_close_matches(column, names, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise InputError(f"{file}: no column {column!r}: {hint}columns: {listed}")
    else:
        found = [i for i, name in enumerate(names) if name.lower() in PREFERRED_COLUMNS]
        if not found:
            found = list(whole) if len(names) > 1 else list(range(len(names)))
        if not found:
            raise InputError(f"{file}: no column holds whole numbers: {_TABLE_HINT} (columns: {listed})")
        if len({names[i] for i in found}) > 1:
            candidates = ", ".join(names[i] for i in found)
            raise InputError(f"{file}: several columns could be the lengths ({candidates}): {_TABLE_HINT} of: {listed}")
    if len(found) > 1:
        raise InputError(
            f"{file}: column {names[found[0]]!r} appears {len(found)} times: rename one (columns: {listed})"
        )
    return found[0]


def _is_whole(value: object) -> bool:
    number = _number(value)
    return number is not None and math.isfinite(number) and number == int(number)


def _number(value: object) -> int | float | None:
    """A number from a file: JSON numbers as they are, text if it is written like one (nan and inf included)."""
    if isinstance(value, (bool, _Text)):
        return None
    if isinstance(value, (int, float)):
        return value
    if isinstance(value, str):
        if value.isascii() and value.isdigit() and len(value) < 20:
            return int(value)
        if _NUMBER.fullmatch(value) or value.lower().lstrip("+-") in ("nan", "inf", "infinity"):
            return float(value)
    return None


def _problem(value: object) -> str:
    """Why `value` is not a length: the end of "line 3 ..."."""
    number = _number(value) if not isinstance(value, _Object) else None
    text = "an object" if isinstance(value, _Object) else repr(value)
    shown = text if len(text) <= 40 else f"{text[:37]}..."
    if value is None or value == "":
        return "is missing a value"
    if isinstance(value, _Text):
        return f"is {shown}: text, expected a number"
    if number is None:
        return f"is {shown}: not a number"
    if not math.isfinite(number):
        return f"is {shown}: lengths must be finite"
    if number <= 0:
        return f"is {shown}: lengths must be at least 1 token"
    if number > LARGEST_LENGTH_TOKENS:
        return f"is {shown}: longer than 2^31 tokens, surely not a length"
    return f"is {shown}: lengths must be whole numbers"


def _tokens(file: Path, entries: Iterable[tuple[str, object]]) -> Lengths:
    """int64 [n] from (where, value) pairs; InputError at the first that is not a length."""
    tokens: list[int] = []
    for where, value in entries:
        number = _number(value)
        if number is None or not 1 <= number <= LARGEST_LENGTH_TOKENS or number != int(number):
            raise InputError(f"{file}: {where} {_problem(value)}")
        tokens.append(int(number))
    if not tokens:
        raise InputError(f"{file}: holds no lengths")
    return np.array(tokens, dtype=np.int64)
