"""What every file the toolkit writes starts with, and how it reaches the disk whole or not at all."""

import contextlib
import csv
import importlib.metadata
import io
import json
import math
import os
import platform
import re
import stat
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from odc_sim.errors import InputError

SCHEMA_VERSION = 1
DISTRIBUTION = "odc-toolkit"
LARGEST_SEED = 2**63 - 1
"""Seeds are written to parquet files, whose integers have 64 bits."""

Kind = Literal[
    "a plan (odc plan)",
    "a calibration (odc calibrate)",
    "results (odc simulate)",
    "sharding strategies (odc sharding)",
    "a validation (odc validate)",
    "a sweep (odc sweep)",
]
KINDS: dict[Kind, tuple[str, str]] = {
    "a plan (odc plan)": ("groups", "minibatches"),
    "a calibration (odc calibrate)": ("transfers", "fits"),
    "results (odc simulate)": ("rows", "bounds"),
    "sharding strategies (odc sharding)": ("left_out", "rows"),
    "a validation (odc validate)": ("runs", "between_runs"),
    "a sweep (odc sweep)": ("sweep", "points"),
}
"""Files that look alike from outside, and fields by which to tell them."""

T = TypeVar("T")


def toolkit_version() -> str:
    """The installed version, or "0+unknown" when the package runs from a checkout that was never installed."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "0+unknown"


def header(command: str, seed: int | None) -> dict[str, Any]:
    """The fields every file carries: schema_version, toolkit_version, command, created (UTC), seed, environment."""
    return {
        "schema_version": SCHEMA_VERSION,
        "toolkit_version": toolkit_version(),
        "command": command,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": seed,
        "environment": {
            "os": platform.platform(),
            "python": platform.python_version(),
            "numpy": np.__version__,
        },
    }


def check_header(data: object, path: str | Path, *, kind: Kind | None = None) -> None:
    """Refuse a file whose header this version of the toolkit does not understand, or one of another kind.

    Args:
        data: what the file holds.
        path: of the file, for the message.
        kind: what it should be.

    Raises:
        InputError: `data` is no JSON object, its schema_version is not ours, a header field is missing, mistyped or
            out of range, or the file is plainly of another kind.
    """
    if not isinstance(data, dict):
        raise InputError(f"{path}: got a JSON {_json_type(data)}, expected an object with the field 'schema_version'")
    version = data.get("schema_version")
    if type(version) is not int or version != SCHEMA_VERSION:
        got = repr(version) if "schema_version" in data else "nothing"
        raise InputError(
            f"{path}: field 'schema_version': got {got}, expected {SCHEMA_VERSION}; "
            f"write the file again with this version ({toolkit_version()})"
        )
    other = next((each for each, marks in KINDS.items() if all(mark in data for mark in marks)), kind)
    if kind is not None and other != kind:
        raise InputError(f"{path}: holds {other}, expected {kind}")
    for name in ("toolkit_version", "command", "created"):
        field(data, name, str, path)
    field(data, "environment", dict, path)
    if data.get("seed") is not None:
        seed = field(data, "seed", int, path)
        if not 0 <= seed <= LARGEST_SEED:
            raise InputError(f"{path}: field 'seed': got {show(seed)}, expected a whole number from 0 to 2^63 - 1")


def field(data: Mapping[str, Any], name: str, kind: type[T], path: str | Path) -> T:
    """`data[name]`, checked to be a `kind` (a bool is no int).

    Raises:
        InputError: the field is missing or of another type; the message names the field.
    """
    if name not in data:
        raise InputError(f"{path}: field {name!r} is missing")
    value = data[name]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise InputError(f"{path}: field {name!r}: got a JSON {_json_type(value)}, expected a JSON {_names[kind]}")
    return value


def read_json(path: str | Path) -> Any:
    """The parsed content of a JSON file. Numbers are finite: NaN, Infinity and 1e400 are refused.

    Raises:
        InputError: the file is missing, unreadable or not JSON; the message names the line.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise InputError(f"{path}: is a directory, expected a JSON file") from None
    except _NotFiniteError as error:
        line, column = _place(text, error.token)
        raise InputError(
            f"{path}: not valid JSON at line {line}, column {column}: got {error.token[:40]}, expected a finite number"
        ) from None
    except json.JSONDecodeError as error:
        raise InputError(f"{path}: not valid JSON at line {error.lineno}, column {error.colno}: {error.msg}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text (byte {error.start}), expected a JSON file") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read as JSON: {str(error).partition(';')[0]}") from None
    except OSError as error:
        raise InputError(f"{show_path(path)}: cannot be read: {error.strerror}") from None


class _NotFiniteError(Exception):
    """A number that is none: `token` is how it is written."""

    def __init__(self, token: str) -> None:
        self.token = token


def _refuse(token: str) -> float:
    raise _NotFiniteError(token)


def _finite(token: str) -> float:
    value = float(token)
    return value if math.isfinite(value) else _refuse(token)


_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|-?Infinity|NaN|-?\d[\d.eE+-]*')


def _place(text: str, token: str) -> tuple[int, int]:
    """Line and column, from 1, of the first `token` that is not inside a string."""
    start = next(match.start() for match in _TOKEN.finditer(text) if match.group() == token)
    return text.count("\n", 0, start) + 1, start - text.rfind("\n", 0, start)


def write_json(path: str | Path, data: Mapping[str, Any], *, indent: int | None = 1) -> None:
    """Write `data` as JSON, whole or not at all (see `write_bytes`).

    Numpy scalars and arrays are written as numbers and lists; NaN and infinity are refused (they are not JSON).

    Raises:
        InputError: the path is a directory, or cannot be written.
    """
    write_bytes(path, (json.dumps(data, indent=indent, allow_nan=False, default=_plain) + "\n").encode())


def rows_as_csv(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None) -> str:
    """Rows as CSV; columns in this order, or as they first appear."""
    names = columns if columns is not None else list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write `data` in one step: a reader sees the old file or the whole new one, never half of it.

    A symbolic link stays one, and what it points to is written. What is no file (a pipe, /dev/null) is written to.

    Raises:
        InputError: the path is a directory, or cannot be written.
    """
    temporary = ""
    try:
        mode = _mode(path)
        if stat.S_ISDIR(mode):
            raise InputError(f"{path}: is a directory, expected the name of the file to write")
        if mode and not stat.S_ISREG(mode):
            with open(path, "wb") as stream:
                stream.write(data)
            return
        target = Path(os.path.realpath(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        # In the same directory, because os.replace is atomic only within one file system.
        descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:40]}.", suffix=".tmp")
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # mkstemp makes files private to their owner
        os.replace(temporary, target)
        temporary = ""
    except OSError as error:
        raise InputError(f"{show_path(path)}: cannot be written: {error.strerror}; choose another path") from None
    finally:
        if temporary:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def _mode(path: str | Path) -> int:
    """The kind of file that `path` leads to; 0 where there is none yet."""
    try:
        return os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0


def show(value: object) -> str:
    """A value in a message: short ones whole, long ones by their type."""
    if isinstance(value, int) and value.bit_length() > 200:
        # beyond some thousand digits Python refuses to write an integer
        return f"a whole number of about {int(value.bit_length() * math.log10(2)) + 1} digits"
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__} of {len(text)} characters"


def show_path(path: str | Path) -> str:
    """A path in a message: one that is too long for a file system, by its start."""
    text = str(path)
    return text if len(text) <= 300 else f"{text[:60]}... ({len(text)} characters)"


def _plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no JSON form")


_names: dict[type, str] = {
    str: "string",
    int: "integer",
    float: "number",
    dict: "object",
    list: "array",
    bool: "boolean",
}


def _json_type(value: object) -> str:
    return "null" if value is None else _names.get(type(value), type(value).__name__)
