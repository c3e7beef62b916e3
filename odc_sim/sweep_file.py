"""Reads a sweep file (TOML): [sweep] says what it is, [study] has the fields that stay, [[factor]] those that vary."""

import tomllib
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from odc_sim.datafiles import data_dir
from odc_sim.errors import InputError, unknown_name
from odc_sim.study import beside
from odc_sim.sweep import Factor, Mode, Sweep, check_field, parse_value

_Text = Annotated[str, StringConstraints(min_length=1, strip_whitespace=True)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Head(_Table):
    name: _Text
    description: str = ""
    evidence: str = ""
    mode: Mode = "grid"


class _Factor(_Table):
    field: _Text
    values: list[Any] = Field(min_length=1)
    label: str = ""
    unit: str = ""
    shown_as: list[int | float | str] = Field(default_factory=list)


class _File(_Table):
    sweep: _Head
    study: dict[str, Any] = Field(default_factory=dict)
    factor: list[_Factor] = Field(min_length=1)


def builtin_sweeps() -> list[str]:
    """Names of the sweeps that come with the toolkit, sorted; they lie beside the workloads."""
    files = data_dir("workloads").glob("*.toml")
    return sorted(path.stem for path in files if "\n[sweep]\n" in "\n" + path.read_text(encoding="utf-8"))


def load_sweep(name_or_path: str | Path) -> Sweep:
    """A built-in sweep by name, or the sweep file at a path; file names in it are relative to its folder.

    Raises:
        InputError: unknown name, unreadable file, or a field that is missing, misspelt or out of range.
    """
    text, path = str(name_or_path), Path(name_or_path)
    if text in builtin_sweeps():
        path = data_dir("workloads") / f"{text}.toml"
    elif path.suffix != ".toml":
        raise unknown_name("sweep", text, builtin_sweeps())
    parsed = _parse(path)
    try:
        study = beside(path.parent, parsed.study)
        base = {check_field(name): parse_value(name, value, f"study.{name}") for name, value in study.items()}
        factors = tuple(_factor(i, raw, path.parent) for i, raw in enumerate(parsed.factor))
        fields = [factor.field for factor in factors]
        twice = next((name for name in fields if fields.count(name) > 1), None)
        if twice:
            raise InputError(f"factor {twice!r} is given twice; give all its values in one [[factor]]")
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    return Sweep(base=base, factors=factors, **parsed.sweep.model_dump())


def _factor(number: int, raw: _Factor, folder: Path) -> Factor:
    where = f"factor[{number}]"
    name = check_field(raw.field)
    if raw.shown_as and len(raw.shown_as) != len(raw.values):
        raise InputError(
            f"{where}.shown_as: got {len(raw.shown_as)} entries, expected one for each of {len(raw.values)}"
        )
    found = [beside(folder, {name: value})[name] for value in raw.values]
    values = tuple(parse_value(name, value, f"{where}.values[{i}]") for i, value in enumerate(found))
    if len(set(values)) < len(values):
        raise InputError(f"{where}.values: a value of {name} is given twice")
    return Factor(field=name, values=values, label=raw.label, unit=raw.unit, shown_as=tuple(raw.shown_as))


def _parse(path: Path) -> _File:
    try:
        return _File.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise InputError(f"{path}: no such sweep file; built in: {', '.join(builtin_sweeps())}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as a sweep file: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path}: not valid TOML: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        what = {
            "missing": f"{where} is missing: a sweep file needs [sweep] name and at least one [[factor]]",
            "extra_forbidden": f"unknown field {where}",
        }.get(first["type"], f"{where}: got {first['input']!r}: {first['msg'].removeprefix('Input ')}")
        raise InputError(f"{path}: {what}") from None
