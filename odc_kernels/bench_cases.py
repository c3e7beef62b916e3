"""The transfers that `bench` times, each with the check that must pass before.

All work in place as FSDP2 does: the own shard is already in the gathered buffer, so that no case times a local copy
that another one has no need for. scatter_accumulate also adds into the accumulator, which reduce_scatter leaves to a
kernel afterwards.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from odc_kernels import reference
from odc_kernels.copies import copy_batch
from odc_kernels.gather import METHODS as GATHER_METHODS
from odc_kernels.gather import Method as GatherMethod
from odc_kernels.gather import gather
from odc_kernels.scatter_accumulate import NUM_PROGRAMS, drain, scatter_accumulate
from odc_kernels.timing import Call
from odc_kernels.window import Window
from odc_sim.calibration import TransferOp

CPU_CACHE_BYTES = 32 << 20
BF16_BYTES, FP32_BYTES = 2, 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One way to move one size."""

    op: TransferOp
    backend: str
    dtype: str
    """Of what moves."""
    call: Call
    check: Callable[[], None]
    """Raises AssertionError where the result is wrong. Collective."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Buffers:
    """What the cases move, enough of it to rotate through."""

    published: torch.Tensor
    """bf16 [capacity]: this rank's shards."""
    gathered: torch.Tensor
    """bf16 [world_size * capacity]."""
    gradients: torch.Tensor
    """fp32 [world_size * capacity / 2], as many bytes."""
    reduced: torch.Tensor
    """fp32 [capacity / 2]."""

    @classmethod
    def allocate(cls, capacity: int, device: torch.device) -> "Buffers":
        """Filled with random numbers, different on every rank."""
        world_size = dist.get_world_size()
        buffers = cls(
            published=torch.empty(capacity, dtype=torch.bfloat16, device=device),
            gathered=torch.empty(world_size * capacity, dtype=torch.bfloat16, device=device),
            gradients=torch.empty(world_size * capacity // 2, dtype=torch.float32, device=device),
            reduced=torch.empty(capacity // 2, dtype=torch.float32, device=device),
        )
        generator = torch.Generator(device).manual_seed(dist.get_rank())
        buffers.published.normal_(generator=generator)
        buffers.gradients.normal_(generator=generator)
        return buffers


def rotation(num_bytes: int, world_size: int, device: torch.device, *, least: int = 2) -> int:
    """How many places to rotate through: four times the last-level cache in all, at least `least`, at most 512."""
    cache_bytes = CPU_CACHE_BYTES
    if device.type == "cuda":  # pragma: cuda-only
        cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    return min(512, max(least, -(-4 * cache_bytes // (num_bytes * world_size))))


def all_gather_case(
    buffers: Buffers, numel: int, slots: int, *, backend: str, group: dist.ProcessGroup | None = None
) -> Case:
    """all_gather of bf16 shards of numel elements, from `slots` different places."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    wholes = list(buffers.gathered[: slots * world_size * numel].view(slots, world_size * numel))
    shards = list(buffers.published[: slots * numel].view(slots, numel))
    own = [whole.view(world_size, numel)[rank] for whole in wholes]

    def call(number: int) -> None:
        slot = number % slots
        reference.all_gather(wholes[slot], own[slot], group)

    def check() -> None:
        for slot in (0, slots - 1):
            wholes[slot].fill_(torch.nan)
            own[slot].copy_(shards[slot])
            call(slot)
            expect_gathered(wholes[slot], shards[slot])

    return Case(op="all_gather", backend=backend, dtype="bf16", call=call, check=check)


def reduce_scatter_case(
    buffers: Buffers, numel: int, slots: int, *, backend: str, group: dist.ProcessGroup | None = None
) -> Case:
    """reduce_scatter of fp32 shards of numel elements, from `slots` different places."""
    whole_numel = dist.get_world_size() * numel
    wholes = list(buffers.gradients[: slots * whole_numel].view(slots, whole_numel))
    sums = list(buffers.reduced[: slots * numel].view(slots, numel))

    def call(number: int) -> None:
        slot = number % slots
        reference.reduce_scatter(sums[slot], wholes[slot], group)

    def check() -> None:
        for slot in (0, slots - 1):
            sums[slot].fill_(torch.nan)
            call(slot)
            expect_sum(sums[slot], wholes[slot])

    return Case(op="reduce_scatter", backend=backend, dtype="fp32", call=call, check=check)


def gather_cases(buffers: Buffers, window: Window, numel: int, slots: int, *, backend: str) -> list[Case]:
    """gather bf16 by each method from a window that holds `buffers.published`."""
    world_size, rank = window.world_size, window.rank
    wholes = list(buffers.gathered[: slots * world_size * numel].view(slots, world_size * numel))
    shards = list(buffers.published[: slots * numel].view(slots, numel))

    def call(method: GatherMethod, number: int) -> None:
        slot = number % slots
        gather(window, wholes[slot], offset=slot * numel, skip_self=True, method=method)

    def check(method: GatherMethod) -> None:
        for slot in (0, slots - 1):
            wholes[slot].fill_(torch.nan)
            wholes[slot].view(world_size, numel)[rank].copy_(shards[slot])
            call(method, slot)
            expect_gathered(wholes[slot], shards[slot])

    return [
        Case(
            op="gather",
            backend=f"{backend}-{method}",
            dtype="bf16",
            call=partial(call, method),
            check=partial(check, method),
        )
        for method in GATHER_METHODS
        if method != "triton" or window.device.type == "cuda"
    ]


def pieces_case(buffers: Buffers, window: Window, numel: int, slots: int, *, backend: str, pieces: int) -> Case:
    """One peer's shard read in pieces: what launches cost, as if there were more peers."""
    world_size, rank = window.world_size, window.rank
    wholes = list(buffers.gathered[: slots * world_size * numel].view(slots, world_size, numel))
    peer = (rank + 1) % world_size
    starts = [piece * (numel // pieces) for piece in range(pieces)]
    itemsize = window.dtype.itemsize

    def call(number: int) -> None:
        slot = number % slots
        target = wholes[slot][peer].data_ptr()
        source = window.pointers[peer] + slot * numel * itemsize
        num_bytes = numel // pieces * itemsize
        targets = [target + start * itemsize for start in starts]
        sources = [source + start * itemsize for start in starts]
        if not copy_batch(targets, sources, num_bytes, window.device):
            for start in starts:
                window.read(wholes[slot][peer][start : start + numel // pieces], peer, slot * numel + start)

    def check() -> None:
        assert numel % pieces == 0
        call(0)
        assert torch.equal(wholes[0][peer], window.peers[peer][:numel].to(window.device)), (
            "the pieces are not the shard"
        )

    return Case(op="gather", backend=backend, dtype="bf16", call=call, check=check)


def scatter_case(
    buffers: Buffers,
    window: Window,
    numel: int,
    slots: int,
    *,
    backend: str,
    deterministic: bool = False,
    overwrite: bool = False,
    skip_self: bool = False,
    from_bf16: bool = False,
    num_programs: int = NUM_PROGRAMS,
    lean: bool = False,
) -> Case:
    """scatter_accumulate of fp32 or bf16 gradients; fp32 moves either way. With skip_self the own chunk stays."""
    whole_numel = window.world_size * numel
    wholes = list(buffers.gradients[: slots * whole_numel].view(slots, whole_numel))
    if from_bf16:
        wholes = [whole.bfloat16() for whole in wholes]

    def call(number: int) -> None:
        slot = number % slots
        scatter_accumulate(
            window,
            wholes[slot],
            offset=slot * numel,
            deterministic=deterministic,
            overwrite=overwrite,
            skip_self=skip_self,
            num_programs=num_programs,
            lean=lean,
        )

    def check() -> None:
        for slot in (0, slots - 1):
            window.local.zero_()
            window.barrier()
            call(slot)
            if skip_self:
                own = window.local.view(window.world_size, -1)[window.rank, slot * numel : (slot + 1) * numel]
                own.copy_(wholes[slot].view(window.world_size, numel)[window.rank])
            window.barrier()
            expect_sum(drain(window, numel, offset=slot * numel, deterministic=deterministic), wholes[slot])
            window.barrier()  # nobody pushes again before all have compared

    return Case(op="scatter_accumulate", backend=backend, dtype="fp32", call=call, check=check)


def drain_case(buffers: Buffers, window: Window, numel: int, slots: int, *, backend: str) -> Case:
    """What pushes into slots leave to the owner: adding up the senders' slots."""
    pushed = scatter_case(buffers, window, numel, slots, backend=backend, deterministic=True, overwrite=True)

    def call(number: int) -> None:
        drain(window, numel, offset=number % slots * numel, deterministic=True)

    return Case(op="scatter_accumulate", backend=backend, dtype="fp32", call=call, check=pushed.check)


def expect_gathered(whole: torch.Tensor, shard: torch.Tensor) -> None:
    """`whole` must be every rank's `shard`, exactly."""
    wanted = torch.empty_like(whole)
    reference.all_gather(wanted, shard.clone())
    assert torch.equal(whole, wanted), "the gathered shards differ from all_gather's"


def expect_sum(total: torch.Tensor, gradients: torch.Tensor) -> None:
    """`total` must be this rank's chunk of the sum over ranks, to fp32's rounding."""
    wanted = reference.exact_reduce_scatter(gradients)
    error = float((total.double() - wanted).norm() / wanted.norm())
    assert error < 1e-6, f"the sum is off by {error:.1e} of its norm"
