"""timeline.parquet: what every stream of every rank did when, simulated and measured alike.

timeline = Timeline.from_spans([(0, spans)])          # spans: what an engine or a trainer recorded
timeline.write_parquet("timeline.parquet", command)
idle_by_cause(read_timeline("timeline.parquet"))
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from odc_sim.durations import CAUSES
from odc_sim.errors import InputError
from odc_sim.header import check_header, header, write_bytes
from odc_sim.idle import Span

STREAMS = ("compute", "unshard", "reduce", "host")
KINDS = ("forward", "backward", "recompute", "head_loss", "unshard", "reduce", "optimizer", "publish", "wait")
COLUMNS = ("minibatch", "rank", "stream", "kind", "cause", "unit", "microbatch", "start_s", "end_s")
METADATA_KEY = b"odc_timeline"
"""Where the Parquet file's metadata holds the header, as JSON."""
OVERLAP_TOLERANCE = 1e-9
"""Spans may overlap by this part of the timeline's length: rounding, where times were summed up in another order."""

_WORDS = {"stream": STREAMS, "kind": KINDS, "cause": ("", *CAUSES)}
_TYPES = (
    dict.fromkeys(COLUMNS, "int32") | dict.fromkeys(_WORDS, "string") | dict.fromkeys(("start_s", "end_s"), "double")
)

Ints = NDArray[np.int32]
Floats = NDArray[np.float64]
Words = NDArray[np.str_]

# Names from the tracing user interface's palette; viewers that do not know them choose colours by name instead.
_TRACE_COLOURS = {
    "forward": "rail_response",
    "backward": "rail_animation",
    "recompute": "rail_idle",
    "head_loss": "rail_load",
    "optimizer": "good",
    "publish": "good",
    "wait": "grey",
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Timeline:
    """Spans of streams, one row each, every column an array [n]."""

    minibatch: Ints
    rank: Ints
    stream: Words
    """One of STREAMS."""
    kind: Words
    """One of KINDS."""
    cause: Words
    """One of CAUSES for what keeps a compute stream from computing; empty for compute and for the other streams."""
    unit: Ints
    """0 = root, 1..L = layers, -1 = none."""
    microbatch: Ints
    """-1 = none."""
    start_s: Floats
    """Seconds from the minibatch's first start."""
    end_s: Floats

    @classmethod
    def from_spans(cls, minibatches: Iterable[tuple[int, Sequence[Span]]]) -> "Timeline":
        """A timeline of (minibatch, its spans), in the order given.

        Raises:
            InputError: a span's stream, kind or cause has no such name, or what `check` finds.
        """
        rows = [(number, *span) for number, spans in minibatches for span in spans]
        columns = dict(zip(_SPAN_COLUMNS, zip(*rows, strict=True) if rows else [()] * len(COLUMNS), strict=True))
        return _checked(columns, "timeline")

    @classmethod
    def from_columns(cls, columns: dict[str, Any], where: str = "timeline") -> "Timeline":
        """A timeline of one sequence a column of COLUMNS; `where` starts the message of an error.

        Raises:
            InputError: an unknown word, or what `check` finds.
        """
        return _checked(columns, where)

    def __len__(self) -> int:
        return int(self.rank.size)

    def spans(self, minibatch: int) -> list[Span]:
        """The spans of one minibatch, in the order of the rows."""
        rows = self.minibatch == minibatch
        return [Span(*row) for row in zip(*(getattr(self, name)[rows].tolist() for name in Span._fields), strict=True)]

    def check(self, where: str = "timeline") -> None:
        """Refuse times that cannot be: `where` starts the message.

        Raises:
            InputError: a span ends before it starts, is not finite, or overlaps another of its rank and stream.
        """
        odd = np.flatnonzero(~np.isfinite(self.start_s) | ~np.isfinite(self.end_s) | (self.end_s < self.start_s))
        if odd.size:
            raise InputError(
                f"{where}: row {odd[0]}: got start_s {self.start_s[odd[0]]} and end_s {self.end_s[odd[0]]}, "
                "expected finite times and end_s >= start_s"
            )
        if len(self) < 2:
            return
        order = np.lexsort((self.end_s, self.start_s, self.stream, self.rank, self.minibatch))
        one, two = order[:-1], order[1:]
        same = np.ones(len(self) - 1, dtype=np.bool_)
        for column in (self.minibatch, self.rank, self.stream):
            same &= column[one] == column[two]
        slack_s = OVERLAP_TOLERANCE * float(np.abs(self.end_s).max())
        bad = np.flatnonzero(same & (self.start_s[two] < self.end_s[one] - slack_s))
        if bad.size:
            a, b = sorted((int(one[bad[0]]), int(two[bad[0]])))
            raise InputError(
                f"{where}: rows {a} and {b} overlap on the {self.stream[a]} stream of rank {self.rank[a]} in minibatch "
                f"{self.minibatch[a]}, expected one span at a time"
            )

    def write_parquet(self, path: str | Path, command: str, seed: int | None = None) -> None:
        """Write timeline.parquet whole or not at all; its metadata carries the header of every file of the toolkit.

        Raises:
            InputError: the path is a directory, or cannot be written.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        types = {"int32": pa.int32(), "double": pa.float64(), "string": pa.string()}
        arrays = [pa.array(getattr(self, name), types[_TYPES[name]]) for name in COLUMNS]
        metadata = {METADATA_KEY: json.dumps(header(command, seed))}
        table = pa.table(arrays, schema=pa.schema([(n, types[_TYPES[n]]) for n in COLUMNS], metadata=metadata))
        buffer = pa.BufferOutputStream()
        pq.write_table(table, buffer, compression="zstd")
        write_bytes(path, buffer.getvalue().to_pybytes())


_SPAN_COLUMNS = ("minibatch", *Span._fields)


def _checked(columns: dict[str, Any], where: str) -> Timeline:
    """A timeline of columns given as sequences; words and times are checked."""
    arrays: dict[str, NDArray[Any]] = {}
    for name in COLUMNS:
        if name in _WORDS:
            arrays[name] = np.array(columns[name], dtype=f"<U{max(map(len, _WORDS[name]))}")
            found = np.asarray(columns[name], dtype=np.str_)  # not cut to the width of the known words
            odd = np.flatnonzero(~np.isin(found, _WORDS[name]))
            if odd.size:
                known = ", ".join(word or "(empty)" for word in _WORDS[name])
                raise InputError(
                    f"{where}: column {name!r}: row {odd[0]} is {str(found[odd[0]])!r}, expected one of {known}"
                )
        else:
            arrays[name] = np.asarray(columns[name], dtype=np.int32 if _TYPES[name] == "int32" else np.float64)
    timeline = Timeline(**arrays)
    timeline.check(where)
    return timeline


def read_timeline(path: str | Path) -> Timeline:
    """The timeline of a timeline.parquet.

    Raises:
        InputError: the file is missing, no Parquet, of another schema_version, has a column that is missing, unknown or
            of another type, holds an unknown word, or has times that cannot be.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if Path(path).is_dir():
        raise InputError(f"{path}: is a directory, expected a timeline.parquet")
    try:
        # In this thread: arrow's own ones abort a process that ends soon after, as one with a user mistake does.
        table = pq.ParquetFile(pa.BufferReader(Path(path).read_bytes())).read(use_threads=False)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or 'it is cut off or damaged'}") from None
    except pa.ArrowException:
        raise InputError(f"{path}: not a Parquet file, expected a timeline.parquet") from None
    raw = (table.schema.metadata or {}).get(METADATA_KEY)
    if raw is None:
        raise InputError(
            f"{path}: metadata field {METADATA_KEY.decode()!r} is missing, expected a timeline that this toolkit wrote"
        )
    try:
        check_header(json.loads(raw), path)
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: metadata field {METADATA_KEY.decode()!r} is not valid JSON") from None
    for name in COLUMNS:
        if name not in table.column_names:
            raise InputError(f"{path}: column {name!r} is missing, expected {', '.join(COLUMNS)}")
        if str(table.schema.field(name).type) != _TYPES[name]:
            got = table.schema.field(name).type
            raise InputError(f"{path}: column {name!r}: got type {got}, expected {_TYPES[name]}")
        if table.column(name).null_count:
            raise InputError(
                f"{path}: column {name!r}: has {table.column(name).null_count} empty values, expected none"
            )
    extra = sorted(set(table.column_names) - set(COLUMNS))
    if extra:
        raise InputError(f"{path}: unknown column {extra[0]!r}; written by a newer version?")
    return _checked({name: table.column(name).to_numpy() for name in COLUMNS}, str(path))


def idle_by_cause(timeline: Timeline) -> dict[str, float]:
    """Rank-seconds in which compute streams did not compute, by cause, summed over ranks and minibatches.

    `compute_slowdown`, and `host` where a unit is launch-bound, lie inside compute spans and are not part of it.
    """
    rows = (timeline.stream == "compute") & (timeline.cause != "")
    causes, seconds = timeline.cause[rows], (timeline.end_s - timeline.start_s)[rows]
    return {cause: float(seconds[causes == cause].sum()) for cause in CAUSES}


def chrome_trace(timeline: Timeline, minibatches: int = 1) -> dict[str, Any]:
    """The first `minibatches` minibatches, one after the other, for Perfetto (ui.perfetto.dev) or chrome://tracing.

    A process is a rank, a thread a stream; times are microseconds from the first minibatch's start, to the nanosecond.
    Format: "Trace Event Format" of the Chromium project, complete ("X") and metadata ("M") events.
    """
    chosen = np.unique(timeline.minibatch)[:minibatches]
    threads = {stream: number for number, stream in enumerate(STREAMS)}
    events: list[dict[str, Any]] = []
    for rank in np.unique(timeline.rank[np.isin(timeline.minibatch, chosen)]).tolist():
        rows = np.isin(timeline.minibatch, chosen) & (timeline.rank == rank)
        events.append(_name("process_name", rank, 0, name=f"rank {rank}"))
        events.append(_name("process_sort_index", rank, 0, sort_index=rank))
        for stream in (s for s in STREAMS if (timeline.stream[rows] == s).any()):
            events.append(_name("thread_name", rank, threads[stream], name=stream))
            events.append(_name("thread_sort_index", rank, threads[stream], sort_index=threads[stream]))
    offset_s = 0.0
    for minibatch in chosen.tolist():
        spans = timeline.spans(minibatch)
        for span in spans:
            # both ends are rounded, not the duration, so that neighbours still touch and never overlap
            start_us, end_us = round((offset_s + span.start_s) * 1e6, 3), round((offset_s + span.end_s) * 1e6, 3)
            event = {
                "ph": "X",
                "pid": span.rank,
                "tid": threads[span.stream],
                "name": span.cause if span.kind == "wait" else span.kind,
                "ts": start_us,
                "dur": round(end_us - start_us, 3),
                "args": {"minibatch": minibatch, "unit": span.unit, "microbatch": span.microbatch, "cause": span.cause},
            }
            if span.kind in _TRACE_COLOURS:
                event["cname"] = _TRACE_COLOURS[span.kind]
            events.append(event)
        offset_s += max((span.end_s for span in spans), default=0.0)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _name(what: str, rank: int, thread: int, **args: object) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": thread, "name": what, "args": args}
