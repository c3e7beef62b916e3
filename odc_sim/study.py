"""A study: everything a simulation depends on. The flags of `odc simulate` and the keys of a study TOML are its
fields."""

import os.path
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

from odc_sim.errors import InputError, unknown_name
from odc_sim.header import LARGEST_SEED, show, show_path
from odc_sim.models import builtin_models
from odc_sim.overlong import LARGEST_LENGTH_TOKENS

LARGEST_STUDY_SAMPLES = 200_000_000
"""A study draws no more: some gigabytes, and hours."""


def _is_number(value: object) -> object:
    if isinstance(value, bool):
        raise PydanticCustomError("number", "Input should be a number")
    return value


def _is_whole(value: object) -> object:
    # Text passes: a sweep's values are text.
    if isinstance(value, bool | float):
        raise PydanticCustomError("whole_number", "Input should be a whole number")
    return value


Whole = Annotated[int, BeforeValidator(_is_whole)]
Number = Annotated[float, BeforeValidator(_is_number)]
Count = Annotated[Whole, Field(ge=1, le=1_000_000)]
Tokens = Annotated[Whole, Field(ge=1, le=LARGEST_LENGTH_TOKENS)]
LARGEST_PREFETCH = 10_000


class Study(BaseModel):
    """What to simulate. Every field has a default: `Study()` is LongAlign, 1.5B, 8 A100s, minibatch 4.

    Raises `InputError` (through `make_study` and `load_study`) naming the field, what was got and what was expected.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    workload: str = "longalign"
    """A built-in workload or a workload TOML."""
    lengths: Path | None = None
    """A file of one's own sequence lengths (.txt, .csv, .jsonl, .parquet), instead of a workload."""
    column: str | None = None
    """Its column, if it has several."""
    model: str = "qwen2.5-1.5b"
    """A built-in model or a Hugging Face config.json."""
    hardware: str = "a100-nvswitch-roce"
    """Built-in hardware, a cluster TOML or a calibration.json."""
    devices: Count = 8
    minibatch_size: Count = 4
    """Samples a device between two optimizer steps."""
    minibatches: Annotated[Whole, Field(ge=1, le=10_000_000)] = 100
    max_tokens: Tokens | None = None
    """Token cap of a microbatch; default: the longest sample the workload can produce."""
    overlong: Literal["error", "drop", "clip", "scale"] = "error"
    scale: Annotated[Number, Field(gt=0, le=1e6)] = 1.0
    """Multiplies every length."""
    policy: tuple[str, ...] = ()
    """Balancing policies; none named: all."""
    schedule: tuple[str, ...] = ()
    """Schedules; none named: all."""
    baseline: str = "collective/lb-micro"
    """schedule/policy that speedups are relative to."""
    balancing_cost: Literal["calibrated", "flops", "quadratic", "tokens"] = "calibrated"
    batch_minibatches: Count = 4
    """Minibatches in one PPO batch, for policies that balance a whole batch (verl-native)."""
    pad_microbatches: bool = False
    """Give ranks with fewer microbatches empty ones, so that collectives can run unequal plans."""
    sharding: Literal["zero3"] = "zero3"
    gather_dtype: Literal["bf16", "fp32"] = "bf16"
    recipe: Literal["paper", "mixed"] = "paper"
    """Precision recipe for memory: paper = fp32 master, gradient and moments; mixed = 2 + 2 + 12 bytes."""
    chunked_loss_tokens: Annotated[Whole, Field(ge=0, le=LARGEST_LENGTH_TOKENS)] = 512
    """The loss is computed in chunks of so many tokens, so that full logits never exist; 0: over all tokens at once."""
    recompute: bool = True
    """Activation checkpointing of every layer."""
    engine: Literal["fast", "event"] = "fast"
    barrier: Literal["layer", "microbatch", "minibatch"] = "minibatch"
    """Where ranks of the one-sided schedules meet."""
    forward_prefetch: Annotated[Whole, Field(ge=1, le=LARGEST_PREFETCH)] = 2
    backward_prefetch: Annotated[Whole, Field(ge=0, le=LARGEST_PREFETCH)] = 1
    collectives: Literal["ring", "two-level"] = "ring"
    """How all_gather and reduce_scatter cross nodes."""
    separate_reduce: bool = False
    """reduce_scatter on a communicator of its own."""
    port_contention: bool = True
    device_speed: tuple[Annotated[Number, Field(ge=1e-3, le=1e3)], ...] = ()
    """Relative speed of each device; none named: all 1."""
    jitter: Annotated[Number, Field(ge=0, le=2)] = 0.0
    """Standard deviation of the log of a random factor on each microbatch's compute."""
    seed: Annotated[Whole, Field(ge=0, le=LARGEST_SEED)] = 0
    stability: Annotated[Whole, Field(ge=0, le=1_000_000)] = 0
    """How often to repeat the study with other seeds and perturbed costs, to see whether the best stays best."""
    calibration_error: Annotated[Number, Field(ge=0, le=1)] = 0.05
    """Standard deviation of the log of the factors by which costs are perturbed in those repeats."""
    plan: Path | None = None
    """A plan.json to simulate instead of drawing and balancing lengths."""

    @field_validator("policy", "schedule", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        names = tuple(part.strip() for part in value.split(",") if part.strip())
        if not names:
            raise ValueError("got no name, expected one or several with commas between; leave it out for all")
        return names

    @model_validator(mode="after")
    def _consistent(self) -> "Study":
        samples = self.devices * self.minibatch_size * self.minibatches
        if samples > LARGEST_STUDY_SAMPLES:
            raise ValueError(
                f"devices * minibatch_size * minibatches: got {self.devices} * {self.minibatch_size} * "
                f"{self.minibatches} = {samples:,} samples, expected at most {LARGEST_STUDY_SAMPLES:,}; "
                "lower minibatches"
            )
        if self.device_speed and not self.plan and len(self.device_speed) != self.devices:
            raise ValueError(
                f"device_speed: got {len(self.device_speed)} values, expected one for each of {self.devices} devices"
            )
        if self.lengths and "workload" in self.model_fields_set:
            raise ValueError("lengths and workload: got both, expected one of them")
        if self.column and not self.lengths:
            raise ValueError("column: given without a lengths file")
        if self.baseline.count("/") != 1:
            raise ValueError(f"baseline: got {self.baseline!r}, expected schedule/policy, as in collective/lb-micro")
        return self

    def changed(self, *names: str) -> dict[str, Any]:
        """Of these fields, those that are not the default, with their values."""
        default = Study()
        return {name: getattr(self, name) for name in names if getattr(self, name) != getattr(default, name)}


def make_study(fields: dict[str, Any], where: str = "") -> Study:
    """A study from field values; `where` (a file name) starts the message of an error.

    Raises:
        InputError: an unknown field or a value out of range; the first problem, in one line.
    """
    prefix = f"{where}: " if where else ""
    for name in fields:
        if name not in Study.model_fields:
            raise InputError(f"{prefix}{unknown_name('field', name, Study.model_fields)}")
    try:
        return Study(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        if first["type"] == "value_error":
            text = first["msg"].removeprefix("Value error, ")
            raise InputError(f"{prefix}{place}: {text}" if place else f"{prefix}{text}") from None
        message = first["msg"].removeprefix("Input should be ")
        elsewhere = "; odc sharding plays the others" if place == "sharding" else ""
        raise InputError(f"{prefix}{place}: got {show(first['input'])}, expected {message}{elsewhere}") from None


def load_study(path: str | Path, overrides: dict[str, Any] | None = None) -> Study:
    """The study of a TOML file; `overrides` (flags) win over the file. File names in it are relative to its folder.

    Raises:
        InputError: the file is missing, is no TOML, or holds something a study does not have.
    """
    file = Path(path)
    try:
        fields = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such study file") from None
    except OSError as error:
        raise InputError(f"{show_path(path)}: cannot be read as a study file: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: cannot be read as a study file: {error}") from None
    except (ValueError, RecursionError) as error:  # also integers of thousands of digits, and endless brackets
        raise InputError(f"{path}: not valid TOML: {str(error).partition(';')[0]}") from None
    return make_study({**beside(file.parent, fields), **(overrides or {})}, where=str(path))


def beside(folder: Path, fields: dict[str, Any]) -> dict[str, Any]:
    """`fields` of a file in `folder`, with the file names among them made relative to that folder."""
    found = dict(fields)
    for name in ("lengths", "plan"):
        if isinstance(found.get(name), str):
            found[name] = folder / found[name]
    for name in ("workload", "model", "hardware"):
        value = found.get(name)
        if isinstance(value, str) and _is_beside(folder / value, directory=name == "model"):
            found[name] = str(folder / value)
    return found


def _is_beside(path: Path, *, directory: bool) -> bool:
    """Whether there is such a file or, if `directory`, such a folder that has not the name of a built-in model."""
    # os.path: False for what cannot be a path, such as a name of thousands of characters
    return os.path.isfile(path) or (directory and os.path.isdir(path) and path.name not in builtin_models())
