"""results.json and results.csv: one row for each schedule and policy, rows that cannot run included with the reason."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from odc_sim.durations import CAUSES
from odc_sim.errors import InputError, unknown_name
from odc_sim.header import check_header, header, read_json, rows_as_csv, write_json
from odc_sim.memory import fits_well


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One schedule with one policy. Rates are fractions; numbers are None where a verdict says why it did not run."""

    workload: str
    model: str
    hardware: str
    devices: int
    minibatch_size: int
    minibatches: int
    schedule: str
    policy: str
    sharding: str
    gather_dtype: str
    seed: int
    max_tokens: int
    memory_recipe: str = "paper"
    """Bytes a parameter behind the memory figures; see odc_sim/memory.py."""
    samples_per_s_per_device: float | None = None
    tokens_per_s_per_device: float | None = None
    speedup: float | None = None
    speedup_ci95: tuple[float, float] | None = None
    best_share: float | None = None
    """Share of the study's repeats in which it is the fastest that fits; None where it was not repeated."""
    bubble_rate: float | None = None
    idle_rate: float | None = None
    idle_causes: dict[str, float] = field(default_factory=dict)
    mfu: float | None = None
    makespan_s: dict[str, float] = field(default_factory=dict)
    """mean, p5, p50, p95 over minibatches"""
    gpu_hours_saved_per_1000_steps: float | None = None
    microbatches: dict[str, float] = field(default_factory=dict)
    """mean and max of a rank in a minibatch"""
    inter_node_bytes_per_minibatch: float | None = None
    """sent between nodes by all ranks, mean over minibatches"""
    peak_memory_bytes: dict[str, int] = field(default_factory=dict)
    """by category, and total"""
    memory_share: float | None = None
    """The peak as a part of the device's memory."""
    fits: bool = False
    largest_max_tokens: int | None = None
    """The largest max_tokens that fits the device's memory; None if not even an empty microbatch does."""
    verdict: str | None = None
    provenance: dict[str, str] = field(default_factory=dict)
    """compute, transfers, optimizer, memory: measured | fitted | analytic | extrapolated"""

    @property
    def runs(self) -> bool:
        """Whether it ran (it may still not fit)."""
        return self.speedup is not None

    @property
    def usable(self) -> bool:
        """Whether it can be recommended: it ran, it fits, and nothing speaks against it."""
        return self.runs and self.fits and self.verdict is None

    @property
    def fits_well(self) -> bool:
        """Whether it leaves the allocator some room."""
        return self.memory_share is None or fits_well(self.memory_share)

    @property
    def label(self) -> str:
        """schedule/policy"""
        return f"{self.schedule}/{self.policy}"


RivalKind = Literal["padded", "larger", "ZeRO-1", "HSDP"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rival:
    """What does without ODC besides the table's rows (`rivals.py`)."""

    kind: RivalKind
    flags: str
    """What the command of the study needs for it."""
    schedule: str
    policy: str
    speedup: float
    """In throughput, over the study's baseline."""
    peak_memory_bytes: int
    memory_share: float
    """The peak as a part of the device's memory."""
    compute: str
    """Where compute times come from: larger microbatches may be beyond what was measured."""

    @property
    def fits(self) -> bool:
        """Whether the device's memory holds it."""
        return self.memory_share <= 1.0

    @property
    def fits_well(self) -> bool:
        """Whether it leaves the allocator some room."""
        return fits_well(self.memory_share)


@dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """What a study found."""

    rows: tuple[Row, ...]
    bounds: dict[str, float]
    """No policy that keeps samples in their minibatch beats these. balanced_share, largest_sample, lower_bound: seconds
    a minibatch; speedup: over the baseline, absent where compute is jittered."""
    baseline: str
    advice: str
    notes: tuple[str, ...]
    """What a reader must know: samples clipped, assumptions, extrapolations."""
    study: dict[str, Any]
    lengths: dict[str, Any]
    """Statistics of the drawn lengths."""
    stability: dict[str, Any] | None = None
    """How the ranking held in repeats with other seeds and costs; None where there were none."""
    rivals: tuple[Rival, ...] = ()
    """What else was tried."""

    @property
    def baseline_row(self) -> Row:
        """What speedups are relative to."""
        return next(row for row in self.rows if row.label == self.baseline)

    def row(self, schedule: str, policy: str) -> Row:
        """The row of a schedule and policy. Raises InputError if the study did not ask for it."""
        for row in self.rows:
            if (row.schedule, row.policy) == (schedule, policy):
                return row
        raise unknown_name("row", f"{schedule}/{policy}", (row.label for row in self.rows))

    def as_dict(self, command: str) -> dict[str, Any]:
        """The content of results.json."""
        return {
            **header(command, self.study.get("seed")),
            "rows": [asdict(row) for row in self.rows],
            "bounds": self.bounds,
            "baseline": self.baseline,
            "advice": self.advice,
            "notes": list(self.notes),
            "study": self.study,
            "lengths": self.lengths,
            "stability": self.stability,
            "rivals": [asdict(rival) for rival in self.rivals],
        }

    def write_json(self, path: str | Path, command: str) -> None:
        """Write results.json whole or not at all."""
        write_json(path, self.as_dict(command))

    def csv_text(self) -> str:
        """results.csv: the rows, flat, one column a number."""
        return rows_as_csv([flat(row) for row in self.rows])


def flat(row: Row) -> dict[str, Any]:
    """A row with its nested fields as columns: idle_imbalance_layer, makespan_s_p50, peak_memory_bytes_total ..."""
    nested = {"idle_causes": "idle", "peak_memory_bytes": "peak_memory_bytes", "makespan_s": "makespan_s"}
    out: dict[str, Any] = {}
    for name, value in asdict(row).items():
        if name == "speedup_ci95":
            out["speedup_ci95_low"], out["speedup_ci95_high"] = value or (None, None)
        elif isinstance(value, dict):
            keys = CAUSES if name == "idle_causes" else tuple(value)
            out.update({f"{nested.get(name, name)}_{key}": value.get(key) for key in keys})
        else:
            out[name] = value
    return out


def read_results(path: str | Path) -> Results:
    """Results from a results.json.

    Raises:
        InputError: missing, broken, or of another schema; the message names the field.
    """
    data = read_json(path)
    check_header(data, path, kind="results (odc simulate)")
    known = set(Row.__dataclass_fields__)
    rows = []
    for number, raw in enumerate(data.get("rows", ())):
        if not isinstance(raw, dict):
            raise InputError(f"{path}: rows[{number}]: got {raw!r}, expected an object")
        extra = sorted(set(raw) - known)
        if extra:
            raise InputError(f"{path}: rows[{number}]: unknown field {extra[0]!r}; written by a newer version?")
        interval = raw.get("speedup_ci95")
        try:
            rows.append(Row(**{**raw, "speedup_ci95": tuple(interval) if interval else None}))
        except TypeError as error:
            raise InputError(f"{path}: rows[{number}]: {str(error).replace('Row.__init__() ', '')}") from None
    try:
        return Results(
            rows=tuple(rows),
            **{name: data[name] for name in ("bounds", "baseline", "advice", "study", "lengths")},
            notes=tuple(data["notes"]),
            stability=data.get("stability"),
            rivals=tuple(Rival(**rival) for rival in data.get("rivals", ())),
        )
    except KeyError as error:
        raise InputError(f"{path}: field {error} is missing") from None
    except TypeError as error:
        raise InputError(f"{path}: {str(error).replace('.__init__()', '')}") from None
