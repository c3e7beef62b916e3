"""What a sharded model consists of, asked of FSDP2 itself.

FSDP2 says nowhere which parameters it gathers together (a unit), in which order it puts them into one buffer, in which
dtype, or over which ranks. But it hands that buffer to a custom all_gather. So each unit is unsharded a few times with
an all_gather that moves nothing and looks, and each parameter's shard holds the parameter's number meanwhile.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from odc_kernels.fsdp_faults import Meeting
from odc_sim.errors import InputError

DIGIT = 200
"""Numbers up to this are exact in every floating-point dtype of 16 bits and more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """The ranks a model is sharded and replicated over."""

    group: dist.ProcessGroup
    """The ranks that hold one copy of the model."""
    replicas: dist.ProcessGroup | None
    """The ranks that hold the same shard of other copies; None without replication."""
    everyone: dist.ProcessGroup

    @property
    def world_size(self) -> int:
        """Over how many ranks a parameter is sharded."""
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """Which shard this rank has."""
        return dist.get_rank(self.group)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """Where a parameter lies in its unit's buffer."""

    name: str
    parameter: DTensor
    owner: nn.Module
    attribute: str
    """`parameter` is the owner's attribute of this name, while the unit is sharded."""
    offset: int
    numel: int
    """The same on every rank; the last ranks' parts may be shorter, or empty, and are padded with zeros."""

    def local(self) -> torch.Tensor:
        """This rank's part, flat. Call it under no_grad."""
        return self.parameter.to_local().view(-1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """Parameters that FSDP gathers and reduces together."""

    name: str
    modules: tuple[FSDPModule, ...]
    shards: tuple[Shard, ...]
    """In the order of the buffer, without gaps."""
    dtype: torch.dtype
    """Of what is gathered (param_dtype)."""
    device: torch.device

    @property
    def numel(self) -> int:
        """Of this rank's part of the buffer."""
        return sum(shard.numel for shard in self.shards)

    @property
    def trained(self) -> tuple[Shard, ...]:
        """Those that get a gradient; reduced in the same order, without the others in between."""
        return tuple(shard for shard in self.shards if shard.parameter.requires_grad)


def find_mesh(model: nn.Module) -> Mesh:
    """The mesh that `fully_shard` was given, the same for every parameter.

    Raises:
        InputError: nothing is sharded, or in a way that one-sided transfers do not cover.
    """
    found: dict[int, tuple[str, DTensor]] = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            found.setdefault(id(parameter.device_mesh), (name, parameter))
    if not found or not any(isinstance(module, FSDPModule) for module in model.modules()):
        raise InputError("OnDemand: got a model without sharded parameters; call fully_shard on it first")
    meshes = {parameter.device_mesh: name for name, parameter in found.values()}
    if len(meshes) > 1:
        raise InputError(f"OnDemand: {' and '.join(meshes.values())} are on different meshes; expected one for all")
    ((name, parameter),) = list(found.values())[:1]
    mesh, placements = parameter.device_mesh, parameter.placements
    kinds = [isinstance(placement, Replicate) for placement in placements]
    if kinds not in ([False], [True, False]):
        raise InputError(
            f"OnDemand: {name} is placed as {list(placements)}; expected a mesh of one dimension (fully sharded), or "
            "of two (replicate, shard), without tensor or pipeline parallelism"
        )
    if len(kinds) == 1:
        return Mesh(group=mesh.get_group(), replicas=None, everyone=mesh.get_group())
    ranks = mesh.mesh.flatten().tolist()
    if len(ranks) == dist.get_world_size():
        everyone = dist.group.WORLD
    else:
        everyone = dist.new_group(ranks, use_local_synchronization=True)
    return Mesh(group=mesh.get_group(1), replicas=mesh.get_group(0), everyone=everyone)


def find_units(model: nn.Module, mesh: Mesh, meeting: Meeting) -> list[Unit]:
    """All units of a model sharded over two or more ranks. The custom all_gather of each is replaced.

    Raises:
        WindowError: FSDP treats a unit in a way that one-sided transfers do not cover, here or on another rank.
    """
    looks: list[_Look] = []
    names = {module: name or "the root" for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    for module in names:
        module.set_custom_all_gather(_Recorder(module, looks))
    # Modules sharded together, fully_shard([a, b]), share the all_gather that was set last.
    together: dict[FSDPModule, list[FSDPModule]] = {}
    for module in names:
        look = _look(module, looks)
        if look is not None:
            together.setdefault(look.asked, []).append(module)
    places = {
        parameter: (f"{prefix}.{attribute}".lstrip("."), owner, attribute)
        for prefix, owner in model.named_modules()
        for attribute, parameter in owner.named_parameters(recurse=False)
    }
    candidates = [list(_own_parameters(modules)) for modules in together.values()]
    readings = [
        _read(modules[0], parameters, looks) for modules, parameters in zip(together.values(), candidates, strict=True)
    ]
    # Rank 0 of a copy has a full part of every parameter; the last ranks may have none of a small one.
    orders = None
    if mesh.rank == 0:
        orders = [
            [(number, parameters[number].to_local().numel()) for number in reading.order()]
            for reading, parameters in zip(readings, candidates, strict=True)
        ]
    answers = meeting.exchange("layout of the model", orders)
    orders = next(answer for answer in answers if answer is not None)

    units, problem = [], None
    for modules, parameters, reading, order in zip(together.values(), candidates, readings, orders, strict=True):
        name = " + ".join(names[module] for module in modules)
        starts = [0, *accumulate(numel for _, numel in order)]
        shards = []
        for (number, numel), start in zip(order, starts, strict=False):
            parameter = parameters[number]
            place, owner, attribute = places[parameter]
            shards.append(
                Shard(name=place, parameter=parameter, owner=owner, attribute=attribute, offset=start, numel=numel)
            )
        unit = Unit(name=name, modules=tuple(modules), shards=tuple(shards), dtype=reading.dtype, device=reading.device)
        problem = problem or reading.mismatch(unit, [number for number, _ in order])
        units.append(unit)
    meeting.exchange("layout of the model", None, problem=problem)
    return units


@dataclass(frozen=True, kw_only=True, slots=True)
class _Look:
    """What FSDP handed to an all_gather."""

    asked: FSDPModule
    shard: torch.Tensor


class _Recorder:
    """An all_gather that moves nothing. Its output is never used: the unit is resharded at once."""

    def __init__(self, module: FSDPModule, looks: list[_Look]) -> None:
        self._module = module
        self._looks = looks

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **_: Any) -> None:
        self._looks.append(_Look(asked=self._module, shard=input_tensor.clone()))


def _look(module: FSDPModule, looks: list[_Look]) -> _Look | None:
    """What FSDP gathers for a module; None if it holds no parameters of its own."""
    looks.clear()
    module.reshard()
    module.unshard()
    module.reshard()
    return looks[0] if looks else None


def _own_parameters(modules: Sequence[FSDPModule]) -> Iterator[DTensor]:
    """The sharded parameters under these modules that no FSDP module further in holds."""
    seen: set[nn.Module | nn.Parameter] = set()

    def walk(module: nn.Module) -> Iterator[DTensor]:
        if module in seen or (isinstance(module, FSDPModule) and module not in modules):
            return
        seen.add(module)
        for parameter in module.parameters(recurse=False):
            if isinstance(parameter, DTensor) and parameter not in seen:
                seen.add(parameter)
                yield parameter
        for child in module.children():
            yield from walk(child)

    for module in modules:
        yield from walk(module)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reading:
    """The buffer of a unit while each element held the number of its parameter, from 1 on; padding held 0."""

    runs: tuple[tuple[int, int], ...]
    """(number, how many elements in a row held it)."""
    dtype: torch.dtype
    device: torch.device
    locals: tuple[torch.Tensor, ...]

    def order(self) -> list[int]:
        """Parameters as they come in the buffer; those without elements on this rank are not seen."""
        return [number - 1 for number, _ in self.runs if 0 < number <= len(self.locals)]

    def mismatch(self, unit: Unit, order: Sequence[int]) -> str | None:
        """Why this rank's buffer is not what `unit` says; None if it is."""
        if self.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"{unit.name} is gathered as {self.dtype}; expected parameters of one floating-point dtype in a unit"
        expected: list[tuple[int, int]] = []
        for shard, number in zip(unit.shards, order, strict=True):
            local = self.locals[number]
            if local.device != self.device:
                return f"{shard.name} is on {local.device}; offloaded parameters are not supported"
            expected += [(number + 1, local.numel()), (0, shard.numel - local.numel())]
        if _merged(expected) != list(self.runs):
            return f"{unit.name} is not gathered as its parameters one after another (an all_gather extension?)"
        return None


def _merged(runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Without empty runs, neighbours of the same number made one."""
    merged: list[tuple[int, int]] = []
    for number, count in runs:
        if count and merged and merged[-1][0] == number:
            merged[-1] = (number, merged[-1][1] + count)
        elif count:
            merged.append((number, count))
    return merged


def _read(module: FSDPModule, parameters: Sequence[DTensor], looks: list[_Look]) -> _Reading:
    """Number the parameters, look, and put their values back."""
    with torch.no_grad():
        local = tuple(parameter.to_local() for parameter in parameters)
        saved = [part.clone() for part in local]
        numbers: torch.Tensor | None = None
        try:
            for digit in range(2 if len(parameters) > DIGIT else 1):
                for number, part in enumerate(local):
                    part.fill_(number // DIGIT if digit else number % DIGIT + 1)
                look = _look(module, looks)
                assert look is not None
                # On the device: a large model's numbers would keep a host busy for many seconds.
                values = look.shard.to(torch.int32)
                numbers = values if numbers is None else numbers + DIGIT * values
        finally:
            for part, values in zip(local, saved, strict=True):
                part.copy_(values)
    assert numbers is not None
    held, counts = torch.unique_consecutive(numbers, return_counts=True)
    runs = tuple(zip(held.tolist(), counts.tolist(), strict=True))
    return _Reading(runs=runs, dtype=look.shard.dtype, device=look.shard.device, locals=local)
