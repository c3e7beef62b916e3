"""FSDP2's own copies, timed as the torch operations that it runs, on tensors of a model's shapes.

torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, torch 2.11 and 2.13, bf16 parameters and fp32 gradients:

    copy_in     the rank's fp32 shards cast into one flat bf16 tensor, then copied into its slot of the gather's buffer
    copy_out    the gathered buffer split over the parameters
    pack        bf16 gradients, cut into the ranks' chunks, into the reduction's fp32 input
    add         the reduced gradient added to `.grad`, one kernel a parameter
    hold        an unreduced bf16 gradient added to its fp32 sum, one kernel a parameter
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import torch

from odc_kernels.calibrate_shapes import fewer_rows, layer_tensors, root_tensors
from odc_kernels.calibrate_timing import Effort, Item, Pace, Step, measure
from odc_sim.calibration import CopyOp, CopySample
from odc_sim.models import ModelSpec

TensorShapes = list[tuple[int, ...]]

OPS: tuple[CopyOp, ...] = ("copy_in", "copy_out", "pack", "add", "hold")
OF_THE_SHARD = ("copy_in", "add")
PARTS = (64, 8)
"""Smaller units than any requested one are made of the first model's layer with fewer rows: shards on more ranks."""


def measure_copies(
    models: Sequence[ModelSpec],
    pace: Pace,
    effort: Effort,
    *,
    world_size: int,
    parts: Sequence[int],
    say: Callable[[str], None],
) -> tuple[list[CopySample], list[str]]:
    """Every copy of every model's layer and root, and in words what was left out. Collective."""
    units: dict[int, TensorShapes] = {}
    for part in parts:
        shapes = fewer_rows(layer_tensors(models[0]), part)
        units[elements_of(shapes)] = shapes
    for model in models:
        units[model.layer_parameters] = layer_tensors(model)
        units[model.root_parameters] = root_tensors(model)
    samples: list[CopySample] = []
    left_out: list[str] = []
    for op in OPS:
        items = [
            Item(
                name=f"{op} of {elements:,} elements",
                make=partial(steps_of, op, shapes, world_size, pace.device),
                work=elements,
            )
            for elements, shapes in sorted(units.items())
        ]
        timed, left = measure(items, pace, effort, how="max", say=say)
        left_out += left
        for (elements, shapes), item in zip(sorted(units.items()), items, strict=True):
            if item.name not in timed:
                continue
            (step,) = timed[item.name]
            moved = elements_of(shards_of(shapes, world_size)) if op in OF_THE_SHARD else elements
            samples.append(CopySample(op=op, elements=moved, dtype="bf16", flagged=step.flagged, **step.percentiles))
    return samples, left_out


def steps_of(op: CopyOp, shapes: TensorShapes, world_size: int, device: torch.device) -> list[Step]:
    """The one step that is `op` for a unit of these parameters."""
    make = {"copy_in": _copy_in, "copy_out": _copy_out, "pack": _pack, "add": _add, "hold": _hold}[op]
    return [torch.no_grad()(make(shapes, world_size, device))]


def _copy_in(shapes: TensorShapes, world_size: int, device: torch.device) -> Step:
    shards = [torch.ones(shape, device=device).view(-1) for shape in shards_of(shapes, world_size)]
    sizes = [shard.numel() for shard in shards]
    flat = torch.empty(sum(sizes), dtype=torch.bfloat16, device=device)
    gathered = torch.empty(world_size * sum(sizes), dtype=torch.bfloat16, device=device)
    casts, slots = list(flat.split(sizes)), list(gathered[: sum(sizes)].split(sizes))

    def copy_in() -> None:
        torch._foreach_copy_(casts, shards)
        torch._foreach_copy_(slots, casts)

    return copy_in


def _copy_out(shapes: TensorShapes, world_size: int, device: torch.device) -> Step:
    sizes = [math.prod(shape) for shape in shards_of(shapes, world_size)]
    gathered = torch.ones(world_size, sum(sizes), dtype=torch.bfloat16, device=device)
    parameters = [torch.empty(world_size, size, dtype=torch.bfloat16, device=device) for size in sizes]
    return partial(torch.split_with_sizes_copy, gathered, sizes, dim=1, out=parameters)


def _pack(shapes: TensorShapes, world_size: int, device: torch.device) -> Step:
    gradients = [torch.ones(shape, dtype=torch.bfloat16, device=device) for shape in shapes]
    whole = torch.empty(world_size, elements_of(shards_of(shapes, world_size)), device=device)
    return partial(torch._chunk_cat, gradients, dim=0, num_chunks=world_size, out=whole)


def _add(shapes: TensorShapes, world_size: int, device: torch.device) -> Step:
    shards = shards_of(shapes, world_size)
    sizes = [math.prod(shape) for shape in shards]
    sums, reduced = (torch.ones(sum(sizes), device=device) for _ in range(2))
    starts = list(accumulate(sizes, initial=0))
    pairs = [
        (sums[start : start + size].view(shape), reduced[start : start + size].view(shape))
        for start, size, shape in zip(starts, sizes, shards, strict=False)
    ]
    return partial(_add_each, pairs)


def _hold(shapes: TensorShapes, world_size: int, device: torch.device) -> Step:
    pairs = [
        (torch.ones(shape, device=device), torch.ones(shape, dtype=torch.bfloat16, device=device)) for shape in shapes
    ]
    return partial(_add_each, pairs)


def _add_each(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for total, gradient in pairs:
        total += gradient


def shards_of(shapes: TensorShapes, world_size: int) -> TensorShapes:
    """What rank 0 holds of each: FSDP pads every parameter's first dimension to a multiple of the ranks."""
    return [(-(-shape[0] // world_size), *shape[1:]) for shape in shapes]


def elements_of(shapes: TensorShapes) -> int:
    """Of all of them."""
    return sum(math.prod(shape) for shape in shapes)
