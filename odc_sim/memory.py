"""Peak memory of one rank, by category: model state by recipe, FSDP's buffers by schedule, activations by tokens.

Full sharding over `world_size` ranks, bf16 compute, fp32 reduction. The estimate is the largest of a microbatch's
moments (`memory_moments` says what is alive at each): adding everything up would count logits and a layer's activations
together, which never meet. What is estimated is what torch's allocator hands out and what it does not count (the
CUDA context, NCCL, windows); room that its cached blocks leave unused between them is not.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from odc_sim.errors import InputError, unknown_name
from odc_sim.memory_moments import BF16_BYTES, FP32_BYTES, Alive, Microbatch, Place
from odc_sim.models import ModelSpec

Recipe = Literal["paper", "mixed"]
GatherDtype = Literal["fp32", "bf16"]
ScheduleName = Literal["collective", "collective-deferred", "odc", "odc-local-sum"]

Division = Callable[[Alive, dict[str, int]], dict[str, int]]
"""The categories of a moment where the state is divided otherwise, from those of full sharding."""

TIGHT, TOO_TIGHT = 0.9, 0.95
"""Of a device's memory: what the allocator leaves unused between its blocks may take the rest, or will."""
DEFAULT_RESERVED_BYTES = 1_750_000_000
"""Measured: what two ranks on one host took besides tensors and windows (the CUDA context with its kernels, NCCL's
buffers, cuBLAS's workspaces), 1.750 to 1.773 GB in five runs of `odc train`; tests/data/memory_peaks_h200.json: H200,
driver 580, CUDA 13.0, torch 2.11, NCCL 2.28.9 without NVLS. More ranks or other versions may take more."""


def fits_well(share: float) -> bool:
    """Whether a peak of this part of a device's memory leaves the allocator some room."""
    return share <= TOO_TIGHT


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeBytes:
    """Bytes a parameter of the sharded state. The unsharded unit is bf16 in either recipe."""

    parameters: int
    gradients: int
    optimizer: int


RECIPES: dict[Recipe, RecipeBytes] = {
    # fp32 master, gradient and two moments: sail-sg/odc, and FSDP2 with a bf16 MixedPrecisionPolicy.
    "paper": RecipeBytes(parameters=4, gradients=4, optimizer=8),
    # bf16 parameter and gradient; fp32 master and two moments: DeepSpeed (arXiv 1910.02054, section 3.1), PaRO.
    "mixed": RecipeBytes(parameters=2, gradients=2, optimizer=12),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """What one rank holds at its peak."""

    categories: dict[str, int]
    """Bytes at the peak moment. Always all of parameters, gradients, optimizer, unsharded, staging, published_window,
    local_gradients, activations, logits, reserved; 0 where nothing is alive then."""
    moment: str
    """Which moment is the peak, as `memory_moments` calls it: "loss", "backward of layer 28", "root reduce" ..."""
    place: Place
    """Which of the rank's microbatches in a minibatch has it."""
    recipe: Recipe

    @property
    def total_bytes(self) -> int:
        """The sum of the categories."""
        return sum(self.categories.values())


def peak_memory(
    model: ModelSpec,
    *,
    world_size: int,
    schedule: str,
    microbatch_tokens: int,
    place: Place | None = None,
    recipe: Recipe = "paper",
    gather_dtype: GatherDtype = "bf16",
    recompute: bool = True,
    chunked_loss_tokens: int | None = 512,
    repeated_keys: bool = False,
    reserved_bytes: int = DEFAULT_RESERVED_BYTES,
    division: Division | None = None,
) -> MemoryEstimate:
    """Peak of a rank in a microbatch of `microbatch_tokens`.

    Shards are rounded up to whole bytes; FSDP's padding of each parameter to a multiple of world_size rows is left out.

    Args:
        model: its shape.
        world_size: ranks that parameters are sharded over.
        schedule: a `ScheduleName`.
        microbatch_tokens: T.
        place: which of the rank's microbatches in a minibatch it is; None: the one that takes most. With one a
            minibatch, gradients do not meet all activations, and local sums never exist.
        recipe: of the sharded state.
        gather_dtype: of gather buffers and, with one-sided schedules, the window of published parameters; compute is
            bf16 with either.
        recompute: only the layers' inputs are saved.
        chunked_loss_tokens: tokens whose logits exist at once; None: all.
        repeated_keys: keys and values are copied for every query head, as where a flash attention knows no grouped
            ones (`odc_kernels.varlen` with torch 2.11).
        reserved_bytes: what is alive besides tensors and windows.
        division: of the state, where it is not full sharding's.

    Raises:
        InputError: unknown names, or counts that make no sense.
    """
    _check(world_size, schedule, recipe, gather_dtype, microbatch_tokens, chunked_loss_tokens, reserved_bytes)
    if place is not None and place not in get_args(Place):
        raise unknown_name("place", place, get_args(Place))
    state = RECIPES[recipe]
    gather_bytes = FP32_BYTES if gather_dtype == "fp32" else BF16_BYTES
    published = gather_bytes if schedule in ("odc", "odc-local-sum") else 0
    if world_size == 1:  # nothing is gathered, and `OnDemand` leaves everything to FSDP2
        gather_bytes = published = 0
        schedule = "collective" if schedule == "odc" else schedule

    def shard(elements: int, bytes_each: int) -> int:
        return -(-elements * bytes_each // world_size)

    def estimate(place: Place, alive: Alive) -> MemoryEstimate:
        categories = {
            "parameters": shard(model.parameters, state.parameters),
            "gradients": shard(alive.gradients, state.gradients),
            "optimizer": shard(model.parameters, state.optimizer),
            "unsharded": alive.unsharded,
            "staging": alive.staging,
            "published_window": shard(model.parameters, published),
            "local_gradients": alive.local_gradients,
            "activations": alive.activations,
            "logits": alive.logits,
            "reserved": reserved_bytes,
        }
        if division is not None:
            categories = division(alive, categories)
        return MemoryEstimate(categories=categories, moment=alive.moment, place=place, recipe=recipe)

    places: tuple[Place, ...] = get_args(Place) if place is None else (place,)
    found = [
        estimate(each, alive)
        for each in places
        for alive in Microbatch(
            model=model,
            world_size=world_size,
            schedule=schedule,
            place=each,
            tokens=microbatch_tokens,
            gather_bytes=gather_bytes,
            recompute=recompute,
            chunked_loss_tokens=chunked_loss_tokens,
            repeated_keys=repeated_keys,
        ).moments()
    ]
    return max(found, key=lambda each: each.total_bytes)


def largest_max_tokens(
    model: ModelSpec,
    *,
    memory_bytes: int,
    world_size: int,
    schedule: str,
    recipe: Recipe = "paper",
    gather_dtype: GatherDtype = "bf16",
    recompute: bool = True,
    chunked_loss_tokens: int | None = 512,
    repeated_keys: bool = False,
    reserved_bytes: int = DEFAULT_RESERVED_BYTES,
) -> int | None:
    """The most tokens a microbatch may have for `peak_memory` to be at most `memory_bytes`; None if not even 0 fit.

    It may come anywhere in a minibatch.

    Exact: the peak never falls with tokens, and a token takes more than a byte, so bisection over 0..memory_bytes finds
    it.
    """
    if memory_bytes < 1:
        raise InputError(f"memory_bytes: got {memory_bytes}, expected at least 1")

    def peak_bytes(tokens: int) -> int:
        return peak_memory(
            model,
            world_size=world_size,
            schedule=schedule,
            microbatch_tokens=tokens,
            recipe=recipe,
            gather_dtype=gather_dtype,
            recompute=recompute,
            chunked_loss_tokens=chunked_loss_tokens,
            repeated_keys=repeated_keys,
            reserved_bytes=reserved_bytes,
        ).total_bytes

    fits, too_many = -1, memory_bytes + 1
    while too_many - fits > 1:
        tokens = (fits + too_many) // 2
        if peak_bytes(tokens) <= memory_bytes:
            fits = tokens
        else:
            too_many = tokens
    return fits if fits >= 0 else None


def _check(
    world_size: int,
    schedule: str,
    recipe: str,
    gather_dtype: str,
    microbatch_tokens: int,
    chunked_loss_tokens: int | None,
    reserved_bytes: int,
) -> None:
    if world_size < 1:
        raise InputError(f"world_size: got {world_size}, expected at least 1")
    if schedule not in get_args(ScheduleName):
        raise unknown_name("schedule", schedule, get_args(ScheduleName))
    if recipe not in RECIPES:
        raise unknown_name("precision recipe", recipe, RECIPES)
    if gather_dtype not in get_args(GatherDtype):
        raise unknown_name("gather_dtype", gather_dtype, get_args(GatherDtype))
    if microbatch_tokens < 0:
        raise InputError(f"microbatch_tokens: got {microbatch_tokens}, expected at least 0")
    if chunked_loss_tokens is not None and chunked_loss_tokens < 1:
        raise InputError(f"chunked_loss_tokens: got {chunked_loss_tokens}, expected at least 1, or None for no chunks")
    if reserved_bytes < 0:
        raise InputError(f"reserved_bytes: got {reserved_bytes}, expected at least 0")
