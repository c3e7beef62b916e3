"""Reads a workload file (TOML). A module of its own because pydantic is slow to import."""

import os
import tomllib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from odc_sim.datafiles import data_dir
from odc_sim.errors import InputError
from odc_sim.length_sources import Component, Limits, Mixture, Recorded, within_limits
from odc_sim.lengths import read_lengths
from odc_sim.workload import RolloutGroups, Workload

_Text = Annotated[str, StringConstraints(min_length=1, strip_whitespace=True)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class _Head(_Table):
    name: _Text
    description: _Text
    kind: Literal["sft", "rl"]
    evidence: _Text


class _Component(_Table):
    weight: float = Field(gt=0, le=1)
    median_tokens: float = Field(ge=1, le=2**31)
    sigma: float = Field(gt=0, le=5)


class _Limits(_Table):
    min_tokens: int = Field(ge=1)
    max_tokens: int = Field(ge=1)
    how: Literal["reject", "clip"]


class _Lengths(_Table):
    distribution: Literal["mixture", "trace"]
    trace: _Text | None = None
    component: list[_Component] | None = None
    limits: _Limits | None = None


class _Rl(_Table):
    group_size: int = Field(ge=1, le=65_536)
    group_sigma: float = Field(ge=0, le=5)


class _File(_Table):
    workload: _Head
    lengths: _Lengths
    rl: _Rl | None = None


def read_workload(path: Path) -> Workload:
    """The workload described by the TOML file at `path`; a trace is looked up beside it, then among the built-in ones.

    Raises:
        InputError: unreadable file or trace, or a field that is missing, unknown or out of range; names file and field.
    """
    parsed = _parse(path)
    head = parsed.workload
    try:
        return Workload(
            name=head.name,
            description=head.description,
            kind=head.kind,
            evidence=head.evidence,
            source=_source(parsed.lengths, path.parent),
            rl=RolloutGroups(group_size=parsed.rl.group_size, group_sigma=parsed.rl.group_sigma) if parsed.rl else None,
        )
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _parse(path: Path) -> _File:
    try:
        return _File.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise InputError(f"{path}: no such workload file") from None
    except IsADirectoryError:
        raise InputError(f"{path}: is a directory, expected a workload file (.toml)") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: not UTF-8 text, expected a workload file (.toml)") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path}: not valid TOML: {error}") from None
    except ValidationError as error:
        raise InputError(f"{path}: {_first_problem(error)}") from None


def _first_problem(error: ValidationError) -> str:
    """One line for pydantic's first complaint: the field as written in TOML, what is wrong, what was got."""
    problems = error.errors(include_url=False)
    first = problems[0]
    field = ""
    for part in first["loc"]:
        field += f"[{part}]" if isinstance(part, int) else f".{part}" if field else str(part)
    if first["type"] == "extra_forbidden":
        text = f"unknown field {field}"
    elif first["type"] == "missing":
        text = f"{field} is missing"
    else:
        message = first["msg"]
        text = f"{field} is {first['input']!r}: {message[0].lower()}{message[1:]}"
    more = len(problems) - 1
    return f"{text} (and {more} more)" if more else text


def _source(table: _Lengths, folder: Path) -> Mixture | Recorded:
    limits = None
    if table.limits:
        limits = Limits(min_tokens=table.limits.min_tokens, max_tokens=table.limits.max_tokens, how=table.limits.how)
    if table.distribution == "mixture":
        if table.trace is not None:
            raise InputError('lengths.trace does not belong to distribution = "mixture"')
        if not table.component:
            raise InputError('lengths.component is missing: distribution = "mixture" needs at least one')
        if limits is None:
            raise InputError("lengths.limits is missing: a lognormal has no longest sample, so a mixture needs limits")
        components = tuple(
            Component(weight=c.weight, median_tokens=c.median_tokens, sigma=c.sigma) for c in table.component
        )
        return Mixture(components=components, limits=limits)
    if table.component is not None:
        raise InputError('lengths.component does not belong to distribution = "trace"')
    if table.trace is None:
        raise InputError('lengths.trace is missing: distribution = "trace" needs a file')
    lengths = read_lengths(_trace_path(table.trace, folder))
    lengths = within_limits(lengths, limits) if limits else lengths
    lengths.setflags(write=False)
    return Recorded(lengths=lengths, order="resample", file=table.trace, limits=limits)


def _trace_path(trace: str, folder: Path) -> Path:
    beside, builtin = folder / trace, data_dir("traces") / "lengths" / trace
    for path in (beside, builtin):
        if os.path.isfile(path):
            return path
    raise InputError(
        f"lengths.trace {trace!r} found neither as {beside} nor among the built-in traces ({builtin.parent})"
    )
