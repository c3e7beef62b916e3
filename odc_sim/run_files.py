"""run/: what `odc train` leaves behind, and what `odc validate` reads. A run cut short is readable up to its last
finished minibatch.

| file | holds |
|---|---|
| plan.json | the plan that was executed (`plan_file`) |
| config.toml | `RunConfig`: how it was executed |
| environment.json | the header of every file of the toolkit; `environment` says on which machine |
| steps.csv | one `StepRow` a finished minibatch |
| timeline.parquet | what every stream of every rank did (`timeline`), if it was recorded |
| calibration.json | the calibration that was used, if any |
| model.json | the Hugging Face config of a model that is not built in (`RunConfig.model` = "model.json") |
"""

import csv
import dataclasses
import io
import json
import math
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from odc_sim.calibration import Calibration, load_calibration
from odc_sim.errors import InputError
from odc_sim.header import LARGEST_SEED, check_header, header, read_json, show, show_path, write_bytes, write_json
from odc_sim.plans import Plan, read_plan
from odc_sim.timeline import Timeline, read_timeline

if TYPE_CHECKING:
    import pandas as pd

PLAN, CONFIG, ENVIRONMENT, STEPS = "plan.json", "config.toml", "environment.json", "steps.csv"
TIMELINE, CALIBRATION = "timeline.parquet", "calibration.json"
_CONFIG_HEADER = ("schema_version", "toolkit_version", "command", "created")

Name = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]
CountOrZero = Annotated[int, Field(ge=0, le=1_000_000_000)]
Positive = Annotated[float, Field(gt=0, le=1e18, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, le=1e18, allow_inf_nan=False)]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """How a plan was executed."""

    schedule: Literal["collective", "collective-deferred", "odc", "odc-local-sum"]
    policy: Name
    model: Name
    """A built-in model, or a config.json or directory; a relative path is looked for in the run's folder first."""
    device: Literal["cuda", "cpu"]
    compute: Literal["real", "emulated"]
    world_size: Count
    steps: Count
    """Minibatches that were asked for; `steps.csv` tells how many were finished."""
    seed: Annotated[int, Field(ge=0, le=LARGEST_SEED)]
    gather_dtype: Literal["bf16", "fp32"]
    reduce_dtype: Literal["bf16", "fp32"]
    recompute: bool
    chunked_loss_tokens: CountOrZero
    """0: over all tokens at once."""
    learning_rate: NotNegative
    max_grad_norm: NotNegative
    time_scale: Positive
    """Emulated compute: executed seconds per simulated second; 1 where compute is real."""
    warmup_steps: CountOrZero
    """Minibatches run before the first that was recorded."""
    checkpoint_every: CountOrZero = 0
    """Minibatches; 0: never."""
    hardware: str = ""
    """Whose compute costs an emulated run took, where it used no calibration."""
    data: str = ""
    """Where its tokens came from; empty: random ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRow:
    """One finished minibatch; numbers that were not measured are NaN (or 0 bytes)."""

    minibatch: int
    """Its place in the plan."""
    loss: float
    grad_norm: float
    makespan_s: float
    """From the first start to the last end of any rank, in executed seconds (not divided by the time scale)."""
    tokens: int
    samples: int
    mfu: float
    idle_rate: float
    peak_memory_bytes: int
    """The largest of all ranks; 0 where it was not measured."""
    between_s: float = math.nan
    """From the end of the minibatch before to this one's start: data, logging, checkpoints. Not part of any makespan,
    and not in the simulation."""


STEP_COLUMNS = tuple(field.name for field in dataclasses.fields(StepRow))
_WHOLE = ("minibatch", "tokens", "samples", "peak_memory_bytes")
_OPTIONAL = ("between_s", "checkpoint_every", "hardware", "data")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Run:
    """A folder that `odc train` wrote."""

    folder: Path
    plan: Plan
    config: RunConfig
    environment: dict[str, Any]
    """environment.json: header fields, and `environment` with the machine."""
    steps: "pd.DataFrame"
    """One row a finished minibatch, columns of `StepRow`; none where the first was not finished."""
    timeline: Timeline | None
    """Of finished minibatches only; None where the run recorded none."""
    calibration: Calibration | None

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.folder.resolve().name

    @property
    def label(self) -> str:
        """schedule/policy."""
        return f"{self.config.schedule}/{self.config.policy}"


def write_config(folder: str | Path, config: RunConfig, command: str = "") -> None:
    """Write config.toml, whole or not at all.

    Raises:
        InputError: it cannot be written.
    """
    top = {name: value for name, value in header(command, None).items() if name in _CONFIG_HEADER}
    lines = [f"{name} = {_toml(value)}" for name, value in (top | dataclasses.asdict(config)).items()]
    write_bytes(Path(folder) / CONFIG, ("\n".join(lines) + "\n").encode())


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):  # a JSON string is one of TOML, but for escaped surrogates and a bare DEL
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


def write_environment(folder: str | Path, command: str, seed: int, described: dict[str, Any]) -> None:
    """Write environment.json: the common header, its `environment` with what `described` says of the machine.

    Raises:
        InputError: it cannot be written.
    """
    data = header(command, seed)
    data["environment"] |= described
    write_json(Path(folder) / ENVIRONMENT, data)


def write_steps(folder: str | Path, rows: Iterable[StepRow]) -> None:
    """Write steps.csv anew, whole or not at all.

    Raises:
        InputError: it cannot be written.
    """
    write_bytes(Path(folder) / STEPS, (",".join(STEP_COLUMNS) + "\n" + _lines(rows)).encode())


def append_steps(folder: str | Path, rows: Iterable[StepRow]) -> None:
    """Add finished minibatches to steps.csv, on the disk when this returns; the file is begun where there is none.

    Raises:
        InputError: it cannot be written.
    """
    path = Path(folder) / STEPS
    if not path.is_file():
        write_steps(folder, rows)
        return
    try:
        with path.open("a", encoding="utf-8", newline="") as stream:
            stream.write(_lines(rows))
    except OSError as error:
        raise InputError(f"{show_path(path)}: cannot be written: {error.strerror}; choose another path") from None


def _lines(rows: Iterable[StepRow]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(dataclasses.astuple(row) for row in rows)
    return text.getvalue()


def read_run(folder: str | Path) -> Run:
    """Read and check the folder of a run.

    Raises:
        InputError: there is no such folder, a file of it is missing or not understood, or its files contradict each
            other; the message names the file and the field.
    """
    path = Path(folder)
    if not path.is_dir():
        what = "is a file" if path.exists() else "no such folder"
        raise InputError(f"{show_path(folder)}: {what}, expected the folder that odc train wrote (--out)")
    for name in (PLAN, CONFIG, ENVIRONMENT, STEPS):
        if not (path / name).is_file():
            raise InputError(f"{path}: holds no {name}, expected the folder that odc train wrote (--out)")
    plan, config = read_plan(path / PLAN), _read_config(path / CONFIG)
    if config.world_size != plan.world_size:
        raise InputError(
            f"{path / CONFIG}: field 'world_size': got {config.world_size}, expected {plan.world_size} as in {PLAN}"
        )
    environment = read_json(path / ENVIRONMENT)
    check_header(environment, path / ENVIRONMENT)
    steps = _read_steps(path / STEPS, plan.num_minibatches)
    timeline = read_timeline(path / TIMELINE) if (path / TIMELINE).is_file() else None
    if timeline is not None:
        timeline = _finished(timeline, steps["minibatch"].to_numpy())
        odd = np.flatnonzero((timeline.rank < 0) | (timeline.rank >= plan.world_size))
        if odd.size:
            raise InputError(
                f"{path / TIMELINE}: has rank {timeline.rank[odd[0]]}, expected 0 to {plan.world_size - 1} as in {PLAN}"
            )
        _check_ranks(timeline, plan.world_size, path / TIMELINE)
    return Run(
        folder=path,
        plan=plan,
        config=config,
        environment=environment,
        steps=steps,
        timeline=timeline,
        calibration=load_calibration(path / CALIBRATION) if (path / CALIBRATION).is_file() else None,
    )


def _read_config(path: Path) -> RunConfig:
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{show_path(path)}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # also what is not UTF-8
        raise InputError(f"{path}: not valid TOML: {str(error).partition(';')[0]}") from None
    check_header(data | {"environment": {}, "seed": None}, path)
    hints = get_type_hints(RunConfig, include_extras=True)
    for name in data:
        if name not in hints and name not in _CONFIG_HEADER:
            raise InputError(f"{path}: unknown field {name!r}; written by a newer version?")
    values: dict[str, Any] = {}
    for name, hint in ((n, hint) for n, hint in hints.items() if n in data or n not in _OPTIONAL):
        if name not in data:
            raise InputError(f"{path}: field {name!r} is missing")
        try:
            # strict: a text is no number and a truth value no whole number
            values[name] = TypeAdapter(hint).validate_python(data[name], strict=True)
        except ValidationError as error:
            expected = error.errors()[0]["msg"].removeprefix("Input should be ")
            raise InputError(f"{path}: field {name!r}: got {show(data[name])}, expected {expected}") from None
    return RunConfig(**values)


def _read_steps(path: Path, minibatches: int) -> "pd.DataFrame":
    """Every whole line of steps.csv; a last one without its end was being written when the run was stopped."""
    import pandas as pd

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{show_path(path)}: cannot be read as CSV text: {error}") from None
    lines = [line for line in csv.reader(io.StringIO(text[: text.rfind("\n") + 1])) if line]
    names = lines[0] if lines else []
    for name in STEP_COLUMNS:
        if name not in names and name not in _OPTIONAL:
            raise InputError(f"{path}: column {name!r} is missing, expected {', '.join(STEP_COLUMNS)}")
    extra = [name for name in names if name not in STEP_COLUMNS]
    if extra:
        raise InputError(f"{path}: unknown column {extra[0]!r}; written by a newer version?")
    rows: list[dict[str, float]] = []
    for number, line in enumerate(lines[1:], 2):
        if len(line) != len(names):
            raise InputError(f"{path}: line {number} has {len(line)} values, expected {len(names)}")
        rows.append({name: _number(text, name, number, path) for name, text in zip(names, line, strict=True)})
        last = rows[-2]["minibatch"] if len(rows) > 1 else -1
        if not last < rows[-1]["minibatch"] < minibatches:
            raise InputError(
                f"{path}: line {number}: minibatch {rows[-1]['minibatch']}, "
                f"expected more than the line before and fewer than the {minibatches} of {PLAN}"
            )
        if not 0.0 < rows[-1]["makespan_s"] < math.inf:
            raise InputError(f"{path}: line {number}: makespan_s {rows[-1]['makespan_s']}, expected a number > 0")
    frame = pd.DataFrame(rows, columns=list(STEP_COLUMNS))
    return frame.astype({name: "int64" if name in _WHOLE else "float64" for name in STEP_COLUMNS})


def _number(text: str, name: str, line: int, path: Path) -> float:
    try:
        return int(text) if name in _WHOLE else float(text)
    except ValueError:
        expected = "a whole number" if name in _WHOLE else "a number"
        raise InputError(f"{path}: line {line}: {name} is {show(text)}, expected {expected}") from None


def _check_ranks(timeline: Timeline, world_size: int, path: Path) -> None:
    """Every rank is in every minibatch, if only with the optimizer's step; else shares of their time would be wrong."""
    numbers, place = np.unique(timeline.minibatch, return_inverse=True)
    there = np.zeros((numbers.size, world_size), dtype=np.bool_)
    there[place, timeline.rank] = True
    missing = np.argwhere(~there)
    if missing.size:
        minibatch, rank = numbers[missing[0, 0]], missing[0, 1]
        raise InputError(f"{path}: minibatch {minibatch} has no spans of rank {rank}, expected every rank's")


def _finished(timeline: Timeline, minibatches: "np.typing.NDArray[np.int64]") -> Timeline:
    rows = np.isin(timeline.minibatch, minibatches)
    names = [field.name for field in dataclasses.fields(Timeline)]
    return Timeline(**{name: getattr(timeline, name)[rows] for name in names})
