"""A measured timeline, written by this toolkit or by whatever tool recorded a job: same columns, fewer formalities."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from odc_sim.errors import InputError
from odc_sim.timeline import COLUMNS, METADATA_KEY, Timeline, read_timeline

if TYPE_CHECKING:
    import pandas as pd

INTEGERS = ("minibatch", "rank", "unit", "microbatch")
TIMES = ("start_s", "end_s")
DIRECTIONS = {"forward": 0, "head_loss": 1, "backward": 2, "recompute": 2}
"""Kinds of compute spans; the value is where in a microbatch they come."""
DIRECTION_WORDS = ("forward", "head_loss", "backward")


def read_measured(path: str | Path) -> Timeline:
    """The timeline of a timeline.parquet, or of another tool's Parquet or .csv file with its columns.

    Files without this toolkit's metadata may lack `cause`, hold more columns, numbers of any width, and times from any
    zero.

    Raises:
        InputError: as `read_timeline`; or a column is missing, or holds something else than it should.
    """
    import pandas as pd
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = Path(path)
    if file.suffix == ".csv" and file.is_file():
        try:
            frame = pd.read_csv(file, keep_default_na=False, na_values={n: [""] for n in (*INTEGERS, *TIMES)})
        except (ValueError, OSError) as error:  # pandas' parser errors are ValueErrors
            raise InputError(f"{path}: not a CSV table: {str(error).splitlines()[0]}") from None
    else:
        try:
            table = pq.ParquetFile(pa.BufferReader(file.read_bytes())).read(use_threads=False)  # see read_timeline
        except (OSError, pa.ArrowException):
            return read_timeline(path)  # fails likewise, and says why
        if METADATA_KEY in (table.schema.metadata or {}):
            return read_timeline(path)
        frame = table.to_pandas(use_threads=False)
    columns: dict[str, Any] = {}
    for name in COLUMNS:
        if name in frame:
            columns[name] = _column(frame, name, path)
        elif name == "cause":
            columns[name] = np.full(len(frame), "")
        else:
            raise InputError(f"{path}: column {name!r} is missing, expected {', '.join(COLUMNS)}")
    return Timeline.from_columns(columns, str(path))


def _column(frame: "pd.DataFrame", name: str, path: str | Path) -> NDArray[Any]:
    """One column as `Timeline` wants it."""
    column = frame[name]
    if name not in (*INTEGERS, *TIMES):
        return column.fillna("").astype(str).to_numpy(dtype=np.str_) if name == "cause" else _words(column, name, path)
    try:
        values = column.to_numpy(dtype=np.float64, na_value=np.nan)
    except (TypeError, ValueError):
        raise InputError(f"{path}: column {name!r}: got {column.dtype}, expected numbers") from None
    limit = float(np.iinfo(np.int32).max)
    odd = ~np.isfinite(values) if name in TIMES else ~(np.abs(values) <= limit) | (values != np.round(values))
    if odd.any():
        row = int(np.flatnonzero(odd)[0])
        what = "seconds" if name in TIMES else "a whole number"
        raise InputError(f"{path}: column {name!r}: row {row} is {values[row]}, expected {what}")
    return values if name in TIMES else values.astype(np.int32)


def _words(column: "pd.Series[Any]", name: str, path: str | Path) -> NDArray[Any]:
    if column.isna().any():
        raise InputError(f"{path}: column {name!r}: has {int(column.isna().sum())} empty values, expected none")
    return column.astype(str).to_numpy(dtype=np.str_)


def compute_spans(timeline: Timeline) -> NDArray[np.bool_]:
    """Which rows [n] are compute."""
    found: NDArray[np.bool_] = (timeline.stream == "compute") & np.isin(timeline.kind, list(DIRECTIONS))
    return found


def running_spans(timeline: Timeline) -> NDArray[np.bool_]:
    """Which rows [n] show that their rank runs their microbatch: compute or transfers; an empty microbatch has only
    these."""
    found: NDArray[np.bool_] = np.isin(timeline.kind, [*DIRECTIONS, "unshard", "reduce"]) & (timeline.microbatch >= 0)
    return found


def check_replayable(timeline: Timeline, where: str) -> int:
    """The number of layers of a timeline that `odc_sim.replay` can replay.

    Raises:
        InputError: no compute spans, or of no duration; a compute span without unit or microbatch; microbatches not
            numbered from 0 in each minibatch; ranks with different units; layers without compute.
    """
    computes = compute_spans(timeline)
    if not computes.any():
        kinds = ", ".join(DIRECTIONS)
        raise InputError(f"{where}: no compute spans, expected some of kind {kinds} on the stream 'compute'")
    if float((timeline.end_s - timeline.start_s)[computes].sum()) <= 0.0:
        raise InputError(f"{where}: every compute span takes 0 s, expected recorded durations")
    for name in ("unit", "microbatch"):
        odd = np.flatnonzero(computes & (getattr(timeline, name) < 0))
        if odd.size:
            kind, got = timeline.kind[odd[0]], getattr(timeline, name)[odd[0]]
            raise InputError(f"{where}: row {odd[0]}: {kind} with {name} {got}, expected the {name} it computed")
    _check_numbered(timeline, where)
    return _layers(timeline, computes, where)


def _check_numbered(timeline: Timeline, where: str) -> None:
    """Each rank's microbatches are 0, 1, 2, ... in a minibatch."""
    runs = running_spans(timeline)
    keys = np.stack([timeline.minibatch[runs], timeline.rank[runs], timeline.microbatch[runs]], axis=1)
    keys = np.unique(keys, axis=0)  # sorted
    first = np.ones(keys.shape[0], dtype=np.bool_)
    first[1:] = (keys[1:, :2] != keys[:-1, :2]).any(axis=1)
    position = np.arange(keys.shape[0])
    wanted = position - np.maximum.accumulate(np.where(first, position, 0))
    odd = np.flatnonzero(keys[:, 2] != wanted)
    if odd.size:
        minibatch, rank, got = keys[odd[0]].tolist()
        raise InputError(
            f"{where}: rank {rank} runs microbatch {got} but not {wanted[odd[0]]} in minibatch {minibatch}, "
            "expected microbatches numbered from 0 in each minibatch"
        )


def _layers(timeline: Timeline, computes: NDArray[np.bool_], where: str) -> int:
    """The number of layers; every rank that computes has the same units in each direction."""
    found: dict[int, set[tuple[int, int]]] = {}
    for rank in np.unique(timeline.rank).tolist():
        rows = np.flatnonzero(computes & (timeline.rank == rank))
        pairs = zip(timeline.kind[rows].tolist(), timeline.unit[rows].tolist(), strict=True)
        units = {(DIRECTIONS[kind], 0 if kind == "head_loss" else unit) for kind, unit in pairs}
        if units:
            found[rank] = units
    one, *others = found
    for other in others:
        for has, lacks in ((one, other), (other, one)):
            missing = sorted(found[has] - found[lacks])
            if missing:
                direction, unit = missing[0]
                what = "head_loss" if direction == 1 else f"{DIRECTION_WORDS[direction]} of unit {unit}"
                raise InputError(
                    f"{where}: rank {lacks} has no {what} although rank {has} has, "
                    "expected the same units on every rank"
                )
    layers = {unit for direction, unit in found[one] if unit > 0}
    if layers and max(layers) != len(layers):
        gap = next(layer for layer in range(1, max(layers)) if layer not in layers)
        raise InputError(f"{where}: layer {gap} has no compute span although layer {max(layers)} has, expected all")
    return len(layers)
