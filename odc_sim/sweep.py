"""Sweeps: a study, the fields of it that vary, and the points this makes.

    sweep = Sweep(name="mine", base={"minibatches": 50}, factors=(Factor(field="devices", values=(4, 8, 16)),))
    [point.study for point in sweep.points()]

Where sweeps come from: `sweep_file.py` (TOML) and `sweep_flags.py` (the command line). Who runs them: `sweep_run.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args

from odc_sim.errors import InputError, unknown_name
from odc_sim.results import Row
from odc_sim.study import Study, make_study

Mode = Literal["grid", "one-at-a-time"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Factor:
    """A field of `Study` and the values it takes, as a Study holds them.

    label, unit: how tables and plots call it (default: the field's name). shown_as: what they print instead of each
    value, such as 8, 16, 32 (thousand tokens) for scale = 0.125, 0.25, 0.5.
    """

    field: str
    values: tuple[Any, ...]
    label: str = ""
    unit: str = ""
    shown_as: tuple[float | int | str, ...] = ()

    @property
    def title(self) -> str:
        """The label with its unit."""
        return (self.label or self.field.replace("_", " ")) + (f" ({self.unit})" if self.unit else "")

    @property
    def column(self) -> str:
        """The label as a name of columns and files: packing_ratio."""
        return "".join(c if c.isalnum() else "_" for c in self.label or self.field)

    def show(self, value: Any) -> Any:
        """What stands for `value` in tables and on axes: a number, a text, or None for a field left to its default."""
        if self.shown_as and value in self.values:
            return self.shown_as[self.values.index(value)]
        if isinstance(value, tuple):
            return " ".join(map(str, value))
        return value if value is None or isinstance(value, int | float) else str(value)


def value_text(shown: float | int | str | None) -> str:
    """What `Factor.show` gave, for people: "default" where the field is left to it."""
    if shown is None:
        return "default"
    return f"{shown:g}" if isinstance(shown, float) else str(shown)


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One combination of factor values. `study` is None where the fields contradict each other; `verdict` says how."""

    settings: Mapping[str, Any]
    """Every factor's value, by field."""
    fields: Mapping[str, Any]
    """All fields given: those of the base with `settings` over them."""
    study: Study | None
    verdict: str = ""

    def failed_row(self, verdict: str) -> Row:
        """The row of a point that has no results."""

        def value(name: str) -> Any:
            return self.fields.get(name, Study.model_fields[name].default)

        names = ("model", "hardware", "devices", "minibatch_size", "minibatches", "sharding", "gather_dtype", "seed")
        return Row(
            workload=str(value("lengths") or value("workload")),
            schedule=" ".join(value("schedule")) or "all",
            policy=" ".join(value("policy")) or "all",
            max_tokens=value("max_tokens") or 0,
            verdict=verdict,
            **{name: value(name) for name in names},
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """A base study, factors, and how they combine: all with all ("grid"), or each alone from the base."""

    name: str
    factors: tuple[Factor, ...]
    base: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Fields of `Study`; the others have their defaults."""
    mode: Mode = "grid"
    description: str = ""
    evidence: str = ""

    def points(self) -> list[Point]:
        """Every combination once, the last factor varying fastest; the base itself appears once when alone varies."""
        names = [factor.field for factor in self.factors]
        if self.mode == "grid":
            rows = [tuple(row) for row in product(*(factor.values for factor in self.factors))]
        else:
            centre = tuple(self.base_value(name) for name in names)
            rows = [
                (*centre[:i], value, *centre[i + 1 :])
                for i, factor in enumerate(self.factors)
                for value in factor.values
            ]
        return [self._point(dict(zip(names, row, strict=True))) for row in dict.fromkeys(rows)]

    def _point(self, settings: dict[str, Any]) -> Point:
        fields = {**self.base, **settings}
        try:
            return Point(settings=settings, fields=fields, study=make_study(fields))
        except InputError as error:
            return Point(settings=settings, fields=fields, study=None, verdict=str(error))

    def base_value(self, name: str) -> Any:
        """What a field is when nothing varies it."""
        return self.base.get(name, Study.model_fields[name].default)

    def reference(self, factor: Factor) -> Any:
        """The value a factor is held at while another is looked at: the base's, or the first where a grid lacks it."""
        base = self.base_value(factor.field)
        return base if self.mode == "one-at-a-time" or base in factor.values else factor.values[0]

    def along(self, factor: Factor) -> list[dict[str, Any]]:
        """The settings of the points that differ in `factor` alone, all others at their reference, in its order."""
        held = {other.field: self.reference(other) for other in self.factors}
        return [{**held, factor.field: value} for value in factor.values]


def is_list_field(name: str) -> bool:
    """Whether a field holds a list (policy, schedule, ...), so that a comma list is one value of it."""
    return isinstance(Study.model_fields[name].default, tuple)


def check_field(name: str) -> str:
    """`name`, which must be a field of `Study`.

    Raises:
        InputError: it is none; the closest is suggested.
    """
    if name not in Study.model_fields:
        raise unknown_name("field", name, Study.model_fields)
    return name


def parse_value(name: str, raw: Any, where: str) -> Any:
    """`raw` (a text, or a value from TOML) as a Study holds it; "none" stands for the default of an optional field.

    Raises:
        InputError: not a value of this field; the message starts with `where`.
    """
    from pydantic import TypeAdapter, ValidationError

    info = Study.model_fields[name]
    if raw == "none" and type(None) in get_args(info.annotation):
        return None
    kind: Any = Annotated[info.annotation, info]
    try:
        return TypeAdapter[Any](kind).validate_python(raw)
    except ValidationError as error:
        first = error.errors()[0]
        expected = first["msg"].removeprefix("Input should be ").split(", unable")[0]
        raise InputError(f"{where}: got {first['input']!r}, expected {expected}") from None
