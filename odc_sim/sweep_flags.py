"""Fields of a study from the command line, for a study or a sweep: `--field value` fixes a field, `--field a,b,c` makes
it a factor of the sweep."""

from collections.abc import Collection, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

from odc_sim.errors import InputError, closest
from odc_sim.study import Study, load_study
from odc_sim.sweep import Factor, Mode, Sweep, check_field, is_list_field, parse_value


def sweep_from_flags(tokens: Sequence[str], config: Path | None = None, mode: Mode | None = None) -> Sweep:
    """The sweep that `tokens` ask for, over a study file or over the sweep file they name.

    A field that holds a list (policy, schedule) keeps the whole comma list at every point. A flag wins over the file: a
    single value also ends the variation of a factor of the file.

    Raises:
        InputError: an unknown field, a value it cannot have, an empty list, or nothing to vary.
    """
    from odc_sim.sweep_file import load_sweep

    name, given = _split(tokens)
    if name and config:
        raise InputError(f"--config with the sweep {name!r}: give one of them; a sweep file has its own [study] table")
    fixed: dict[str, Any] = {}
    varied: dict[str, tuple[Any, ...]] = {}
    for field, text in given.items():
        flag, parts = as_flag(field), [part.strip() for part in text.split(",")]
        if not all(parts):
            raise InputError(f"{flag}: got {text!r}, expected a value or a comma list of values, none of them empty")
        if is_list_field(field):
            fixed[field] = parse_value(field, parts, flag)
        elif len(values := tuple(dict.fromkeys(parse_value(field, part, flag) for part in parts))) == 1:
            fixed[field] = values[0]
        else:
            varied[field] = values
    start = load_sweep(name) if name else _from_study(config, fixed, varied.keys())
    factors = {f.field: f for f in start.factors if f.field not in fixed}
    factors |= {field: _revalued(factors.get(field), field, values) for field, values in varied.items()}
    if not factors:
        raise InputError(
            "nothing to vary: give a field a comma list, as in --minibatch-size 1,2,4,8, or a sweep's name"
        )
    return replace(start, base={**start.base, **fixed}, factors=tuple(factors.values()), mode=mode or start.mode)


def fields_from_flags(tokens: Sequence[str], options: Collection[str]) -> dict[str, Any]:
    """The fields that `tokens` give, for a command that parsed its own `options` (as typed: --out) before.

    Raises:
        InputError: an option that is neither a field nor one of `options`, a value it cannot have, or a stray word.
    """
    known = {*options, *map(as_flag, Study.model_fields)}
    for token in tokens:
        flag = token.partition("=")[0]
        if flag.startswith("--") and flag not in known:
            found = closest(flag, known)
            raise InputError(f"unknown option {flag!r}: " + (f"did you mean {found!r}?" if found else "see --help"))
    stray, given = _split(tokens)
    if stray:
        raise InputError(f"got {stray!r}, expected options only, as --field value")
    fields = {}
    for field, text in given.items():
        raw = [part.strip() for part in text.split(",")] if is_list_field(field) else text
        fields[field] = parse_value(field, raw, as_flag(field))
    return fields


def as_flag(field: str) -> str:
    """How a field is written on the command line: --max-tokens."""
    return f"--{field.replace('_', '-')}"


def _from_study(config: Path | None, fixed: dict[str, Any], varied: Set[str]) -> Sweep:
    base = load_study(config, fixed).model_dump(exclude_unset=True) if config else fixed
    source = base.get("lengths") or base.get("workload") or Study.model_fields["workload"].default
    name = "lengths" if varied & {"lengths", "workload", "plan"} else Path(source).stem
    return Sweep(name=f"sweep-{name}", factors=(), base=base)


def _revalued(known: Factor | None, field: str, values: tuple[Any, ...]) -> Factor:
    """A factor of the file with other values keeps its label only if it shows the field's values themselves."""
    if known is None or known.shown_as:
        return Factor(field=field, values=values)
    return replace(known, values=values)


def _split(tokens: Sequence[str]) -> tuple[str, dict[str, str]]:
    """The name of a sweep, and texts by field. A flag may be repeated, written --field=value, or stand alone for true.

    Raises:
        InputError: a second name, an option with one dash, or a field that does not exist.
    """
    name, given = "", dict[str, list[str]]()
    rest = list(tokens)
    while rest:
        token = rest.pop(0)
        if not token.startswith("-"):
            if name:
                raise InputError(
                    f"got {token!r} after the sweep {name!r}: expected one sweep, and fields as --field value"
                )
            name = token
            continue
        if not token.startswith("--"):
            raise InputError(f"unknown option {token!r}: fields are given as --field value")
        flag, equals, text = token.partition("=")
        field = check_field(flag.removeprefix("--").replace("-", "_"))
        if not equals:
            alone = not rest or rest[0].startswith("--")
            if alone and Study.model_fields[field].annotation is not bool:
                raise InputError(f"{flag}: got no value, expected one value or a comma list of values")
            text = "true" if alone else rest.pop(0)
        given.setdefault(field, []).append(text)
    return name, {field: ",".join(texts) for field, texts in given.items()}
