"""Clusters: what a device computes, what its links carry, how transfers and compute slow each other.

A cluster is a TOML file, built in (`odc_sim/hardware_data/`, whose README lists every field) or the user's own.
`load_cluster` checks it and returns frozen dataclasses in SI units. Every section states where its numbers come from.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from odc_sim.errors import InputError, unknown_name
from odc_sim.header import show, show_path

DATA_DIR = Path(__file__).parent / "hardware_data"

Transport = Literal["collective", "odc"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One accelerator: dense bf16 peak, vendor memory rate and memory size."""

    name: str
    peak_flops: float
    hbm_bytes_per_s: float
    memory_bytes: int
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """The links inside a node, one way and per device: what a large transfer reaches, and what an empty one takes.

    A file may override `bytes_per_s` and `latency_s` for one transport; here every field is filled in.
    """

    bytes_per_s: float
    latency_s: float
    collective_bytes_per_s: float
    collective_latency_s: float
    one_sided_bytes_per_s: float
    one_sided_latency_s: float
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Inter:
    """The network between nodes."""

    nics_per_node: int
    nic_bytes_per_s: float
    latency_s: float
    source: str

    @property
    def node_bytes_per_s(self) -> float:
        """What all network cards of a node carry together, one way."""
        return self.nics_per_node * self.nic_bytes_per_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Slowdown:
    """How many times longer each takes when a transfer runs beside compute; both at least 1."""

    transfer: float = 1.0
    compute: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """The slowdowns of one transport, for unshards (gathers) and for reduces."""

    unshard: Slowdown
    reduce: Slowdown
    source: str
    waiting: float = 1.0
    """How many times longer compute takes beside a collective that waits for another rank; at least 1."""
    copy_out: float = 1.0
    """How many times longer the copy of gathered parameters takes beside a reduce; at least 1."""
    copy_in: float = 1.0
    """How many times slower compute progresses beside the copy of the next layer's shard; at least 1."""
    add: float = 1.0
    """How many times slower compute progresses beside `+=` after a reduce; at least 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """Time the host needs to launch one unit: the floor under a unit's duration. 0 where not measured."""

    seconds_per_unit_forward: float
    seconds_per_unit_backward: float
    source: str
    seconds_per_unit_forward_deferred: float | None = None
    seconds_per_unit_forward_one_sided: float | None = None

    def forward_s(self, *, one_sided: bool, deferred: bool) -> float:
        """Of a unit under a schedule."""
        own = self.seconds_per_unit_forward_one_sided if one_sided else None
        own = self.seconds_per_unit_forward_deferred if deferred else own
        return self.seconds_per_unit_forward if own is None else own

    def idle(self) -> "Host":
        """One that is always ahead."""
        return Host(seconds_per_unit_forward=0.0, seconds_per_unit_backward=0.0, source=self.source)


@dataclass(frozen=True, kw_only=True, slots=True)
class Efficiency:
    """Fractions of peak_flops reached, counting the backward as two forwards and recompute as one more."""

    linear: float
    attention: float
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Nodes of equal devices. `inter` is None where only one node is described."""

    name: str
    devices_per_node: int
    source: str
    device: Device
    intra: Link
    inter: Inter | None
    overlap: Mapping[Transport, Overlap]
    host: Host
    efficiency: Efficiency
    calibration: str | None = None
    """A file of traces/calibration whose measurements replace these numbers."""


# What a file that does not give [efficiency] gets: the A100 fractions of hardware_data/a100-nvswitch-roce.toml.
ASSUMED_EFFICIENCY = Efficiency(linear=0.649, attention=0.606, source="assumed: what the published A100 fit implies")
NOT_MEASURED = "not measured"

# The description of each type is what error messages say was expected.
Text = Annotated[str, Field(min_length=1, description="a non-empty text")]
# A rate below this is a unit gone wrong (GB/s for bytes/s, TFLOP/s for FLOP/s); the largest stands for "takes no time".
RATE = "a number in SI units, 1e6 to 1e18 (187.5e9, not 187.5)"
Rate = Annotated[float, Field(ge=1e6, le=1e18, description=RATE)]
Memory = Annotated[float, Field(ge=1e6, le=1e15, description="a number of bytes, 1e6 to 1e15 (80e9, not 80)")]
SECONDS = "a number of seconds, 0 to 10"
Seconds = Annotated[float, Field(ge=0, le=10, description=SECONDS)]
Factor = Annotated[float, Field(ge=1, le=1000, description="a number from 1 to 1000")]
Fraction = Annotated[float, Field(gt=0, le=1, description="a fraction, > 0 and <= 1")]
Count = Annotated[int, Field(ge=1, le=1_000_000, description="a whole number from 1 to 1,000,000")]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Section(_Table):
    source: Annotated[str, Field(description="a text")] = "the user's file"


class _ClusterSection(_Section):
    name: Text
    devices_per_node: Count
    calibration: Text | None = Field(default=None, description="the name of a file in traces/calibration")


class _DeviceSection(_Section):
    name: Text
    peak_flops: Rate
    hbm_bytes_per_s: Rate
    memory_bytes: Memory


class _IntraSection(_Section):
    bytes_per_s: Rate
    latency_s: Seconds
    collective_bytes_per_s: Rate | None = Field(default=None, description=RATE)
    collective_latency_s: Seconds | None = Field(default=None, description=SECONDS)
    one_sided_bytes_per_s: Rate | None = Field(default=None, description=RATE)
    one_sided_latency_s: Seconds | None = Field(default=None, description=SECONDS)


class _InterSection(_Section):
    nics_per_node: Count
    nic_bytes_per_s: Rate
    latency_s: Seconds


class _SlowdownTable(_Table):
    slowdown_transfer: Factor = 1.0
    slowdown_compute: Factor = 1.0


class _TransportSection(_Section):
    slowdown_waiting: Factor = 1.0
    slowdown_copy_out: Factor = 1.0
    slowdown_copy_in: Factor = 1.0
    slowdown_add: Factor = 1.0
    unshard: _SlowdownTable = Field(default_factory=_SlowdownTable, description="a table of slowdowns")
    reduce: _SlowdownTable = Field(default_factory=_SlowdownTable, description="a table of slowdowns")


class _OverlapSection(_Table):
    collective: _TransportSection | None = Field(default=None, description="a table")
    odc: _TransportSection | None = Field(default=None, description="a table")


class _HostSection(_Section):
    seconds_per_unit_forward: Seconds
    seconds_per_unit_backward: Seconds


class _EfficiencySection(_Section):
    linear: Fraction
    attention: Fraction


class _ClusterFile(_Table):
    cluster: _ClusterSection = Field(description="a table")
    device: _DeviceSection = Field(description="a table")
    intra: _IntraSection = Field(description="a table")
    inter: _InterSection | None = Field(default=None, description="a table")
    overlap: _OverlapSection = Field(default=_OverlapSection(), description="a table")
    host: _HostSection | None = Field(default=None, description="a table")
    efficiency: _EfficiencySection | None = Field(default=None, description="a table")


def builtin_hardware() -> list[str]:
    """Names of the built-in clusters, sorted."""
    return sorted(path.stem for path in DATA_DIR.glob("*.toml"))


def load_cluster(name_or_path: str | Path) -> Cluster:
    """The built-in cluster of that name, or the one in that TOML file.

    Raises InputError for an unknown name, an unreadable file, and any field that is missing, unknown or out of range.
    """
    text = str(name_or_path)
    if text in builtin_hardware():
        return _read(DATA_DIR / f"{text}.toml")
    path = Path(text)
    if path.suffix or path.name != text:
        return _read(path)
    raise unknown_name("hardware", text, builtin_hardware())


def hardware_file(name_or_path: str | Path) -> Path:
    """The TOML file of a built-in cluster, or the path itself."""
    text = str(name_or_path)
    return DATA_DIR / f"{text}.toml" if text in builtin_hardware() else Path(text)


def hardware_text(name_or_path: str | Path) -> str:
    """The TOML of a built-in cluster or a file, to copy and change.

    Raises InputError for an unknown name or an unreadable file.
    """
    load_cluster(name_or_path)
    return hardware_file(name_or_path).read_text(encoding="utf-8")


def _read(path: Path) -> Cluster:
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"{show_path(path)}: cannot be read ({error.strerror}), expected a cluster TOML file"
        ) from None
    except (ValueError, RecursionError) as error:  # also integers of thousands of digits, and endless brackets
        raise InputError(f"{path}: not a TOML file: {str(error).partition(';')[0]}") from None
    try:
        file = _ClusterFile.model_validate(data)
    except ValidationError as error:
        raise InputError(f"{path}: {_explain(error)}") from None
    return _build(file)


def _explain(error: ValidationError) -> str:
    """The first problem in one line: where, what was got, what was expected; and how many more there are."""
    # an unknown field first: it is usually why another one is missing
    problems = sorted(error.errors(include_url=False), key=lambda problem: problem["type"] != "extra_forbidden")
    first = problems[0]
    where = [str(part) for part in first["loc"]]
    depth = 2 if where[0] == "overlap" else 1
    section, field = ".".join(where[:depth]), ".".join(where[depth:])
    place = f"[{section}] {field}" if field else f"[{section}]"
    if first["type"] == "extra_forbidden":
        known = _model_at(where[:-1]).model_fields
        kind = f"field of [{'.'.join(where[:-1])}]" if len(where) > 1 else "section"
        line = str(unknown_name(kind, where[-1], known))
    else:
        got = "nothing" if first["type"] == "missing" else show(first["input"])
        line = f"{place}: got {got}, expected {_model_at(where[:-1]).model_fields[where[-1]].description}"
    more = len(problems) - 1
    return line + (f" (and {more} more)" if more else "")


def _model_at(where: list[str]) -> type[BaseModel]:
    """The pydantic model that describes the table at this path."""
    model: type[BaseModel] = _ClusterFile
    for part in where:
        annotation: Any = model.model_fields[part].annotation
        options = getattr(annotation, "__args__", (annotation,))
        model = next(option for option in options if isinstance(option, type) and issubclass(option, BaseModel))
    return model


def _build(file: _ClusterFile) -> Cluster:
    intra, device, host = file.intra, file.device, file.host
    return Cluster(
        name=file.cluster.name,
        devices_per_node=file.cluster.devices_per_node,
        source=file.cluster.source,
        calibration=file.cluster.calibration,
        device=Device(**{**device.model_dump(), "memory_bytes": int(device.memory_bytes)}),
        intra=Link(
            bytes_per_s=intra.bytes_per_s,
            latency_s=intra.latency_s,
            collective_bytes_per_s=_first(intra.collective_bytes_per_s, intra.bytes_per_s),
            collective_latency_s=_first(intra.collective_latency_s, intra.latency_s),
            one_sided_bytes_per_s=_first(intra.one_sided_bytes_per_s, intra.bytes_per_s),
            one_sided_latency_s=_first(intra.one_sided_latency_s, intra.latency_s),
            source=intra.source,
        ),
        inter=Inter(**file.inter.model_dump()) if file.inter else None,
        overlap={"collective": _overlap(file.overlap.collective), "odc": _overlap(file.overlap.odc)},
        host=Host(**host.model_dump())
        if host
        else Host(seconds_per_unit_forward=0.0, seconds_per_unit_backward=0.0, source=NOT_MEASURED),
        efficiency=Efficiency(**file.efficiency.model_dump()) if file.efficiency else ASSUMED_EFFICIENCY,
    )


def _first(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value


def _overlap(section: _TransportSection | None) -> Overlap:
    if section is None:
        return Overlap(unshard=Slowdown(), reduce=Slowdown(), source=NOT_MEASURED)
    return Overlap(
        unshard=_slowdown(section.unshard),
        reduce=_slowdown(section.reduce),
        source=section.source,
        waiting=section.slowdown_waiting,
        copy_out=section.slowdown_copy_out,
        copy_in=section.slowdown_copy_in,
        add=section.slowdown_add,
    )


def _slowdown(table: _SlowdownTable) -> Slowdown:
    return Slowdown(transfer=table.slowdown_transfer, compute=table.slowdown_compute)
