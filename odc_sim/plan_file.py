"""plan.json: the file that `odc plan` writes and that simulate, train and validate read."""

from pathlib import Path
from typing import Any

import numpy as np

from odc_sim.errors import InputError
from odc_sim.header import check_header, field, header, read_json, write_json
from odc_sim.partition import IntArray
from odc_sim.plan_check import padding_places, validate
from odc_sim.plans import Plan, nest

_HEADER = ("schema_version", "toolkit_version", "command", "created", "seed", "environment")
_FIELDS = (
    "workload",
    "model",
    "world_size",
    "minibatch_size",
    "max_tokens",
    "policy",
    "balancing_cost",
    "lengths",
    "groups",
    "minibatches",
    "padding",
)


def write_plan(plan: Plan, path: str | Path, command: str) -> None:
    """Write a plan as JSON, in one step.

    Args:
        plan: a valid plan.
        path: the file; an old one is replaced.
        command: the command line that made the plan, for the record.

    Raises:
        InputError: the plan is invalid, or the path cannot be written.
    """
    validate(plan)
    data = header(command, plan.seed) | {
        "workload": dict(plan.workload),
        "model": plan.model,
        "world_size": plan.world_size,
        "minibatch_size": plan.minibatch_size,
        "max_tokens": plan.max_tokens,
        "policy": plan.policy,
        "balancing_cost": dict(plan.balancing_cost),
        "lengths": plan.lengths.tolist(),
        "groups": None if plan.groups is None else plan.groups.tolist(),
        "minibatches": nest(plan.sample_ids, plan.microbatch_start, plan.rank_start, plan.world_size),
        "padding": padding_places(plan),
    }
    write_json(path, data, indent=None)


def read_plan(path: str | Path) -> Plan:
    """Read and check a plan.

    Raises:
        InputError: the file is missing, no JSON, of another schema_version, has a field that is missing, unknown or
            mistyped, or holds a plan that cannot be run; the message names the field or the place in the plan.
    """
    data = read_json(path)
    check_header(data, path, kind="a plan (odc plan)")
    for name in data:
        if name not in _HEADER and name not in _FIELDS:
            raise InputError(f"{path}: unknown field {name!r}: expected {', '.join(_FIELDS)}")
    world_size = field(data, "world_size", int, path)
    minibatches = field(data, "minibatches", list, path)
    _check_nesting(minibatches, path)
    cost = field(data, "balancing_cost", dict, path)
    for name in ("name", "source"):
        field(cost, name, str, f"{path}: field 'balancing_cost'")
    if "groups" not in data:
        raise InputError(f"{path}: field 'groups' is missing")
    try:
        return Plan.from_nested(
            minibatches,
            workload=field(data, "workload", dict, path),
            model=field(data, "model", str, path),
            world_size=world_size,
            minibatch_size=field(data, "minibatch_size", int, path),
            max_tokens=field(data, "max_tokens", int, path),
            policy=field(data, "policy", str, path),
            balancing_cost=cost,
            lengths=_integers(data, "lengths", path),
            groups=None if data["groups"] is None else _integers(data, "groups", path),
            seed=data.get("seed"),
            padding=_padding(field(data, "padding", list, path), path),
            where=str(path),
        )
    except OverflowError:
        raise InputError(f"{path}: field 'minibatches': a sample id is beyond 64 bits") from None


def _integers(data: dict[str, Any], name: str, path: str | Path) -> IntArray:
    values = field(data, name, list, path)
    for i, value in enumerate(values):
        if type(value) is not int:
            raise InputError(f"{path}: field {name!r}: entry {i} is {value!r}, expected an integer")
    try:
        return np.array(values, np.int64)
    except OverflowError:
        raise InputError(f"{path}: field {name!r}: a number is beyond 64 bits") from None


def _padding(places: list[Any], path: str | Path) -> list[tuple[int, int, int]]:
    for i, place in enumerate(places):
        if not isinstance(place, list) or len(place) != 3 or any(type(number) is not int for number in place):
            raise InputError(f"{path}: field 'padding': entry {i} is {place!r}, expected [minibatch, rank, microbatch]")
    return [(minibatch, rank, microbatch) for minibatch, rank, microbatch in places]


def _check_nesting(minibatches: list[Any], path: str | Path) -> None:
    """Lists of lists of lists of integers, nothing else: a string would pass for a list of characters."""
    for m, ranks in enumerate(minibatches):
        if not isinstance(ranks, list):
            raise _not_a_list(path, f"minibatch {m}", ranks, "a list of ranks")
        for r, microbatches in enumerate(ranks):
            if not isinstance(microbatches, list):
                raise _not_a_list(path, f"minibatch {m}, rank {r}", microbatches, "a list of microbatches")
            for i, ids in enumerate(microbatches):
                where = f"minibatch {m}, rank {r}, microbatch {i}"
                if not isinstance(ids, list):
                    raise _not_a_list(path, where, ids, "a list of sample ids")
                for sample in ids:
                    if type(sample) is not int:
                        raise _not_a_list(path, where, sample, "an integer sample id")


def _not_a_list(path: str | Path, where: str, got: object, expected: str) -> InputError:
    return InputError(f"{path}: field 'minibatches': {where}: got {got!r}, expected {expected}")
