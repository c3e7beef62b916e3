"""scatter_accumulate: add each chunk of a gradient into its owner's fp32 accumulator. The one-sided reduce_scatter.

The sender adds with atomic instructions that the owner's L2 carries out, and waits for nobody: no helper process, no
staging buffer, no receiver. A rank may push as often as it has microbatches. Two layouts of the accumulator:

    atomic          [numel]: everyone adds to the same elements. fp32 sums depend on who came first in the last bits.
    deterministic   [world_size, numel]: one slot per sender, which `drain` sums in rank order: bitwise repeatable, at
                    world_size times the memory. Pushes of one rank must then be on one stream. The first push of a sum
                    may `overwrite` the slot instead: then copy engines do it, and need not wait for multiprocessors.
                    Later ones cannot: only the owner could empty the slot before, and a sender that waited for it
                    would wait for the progress of another rank, from which ODC frees it.
"""

from typing import Literal

import torch

from odc_kernels import launch
from odc_kernels.copies import Batch, copy_batch
from odc_kernels.window import Window, check_shards, others_in_turn
from odc_sim.errors import InputError, unknown_name

Method = Literal["auto", "triton", "torch"]
METHODS: tuple[Method, ...] = ("auto", "triton", "torch")

# Measured: reports/kernels-h200, cuda-atomic@16 to @264 at 64 MiB. Fewer do not fill the link, and cost the compute
# beside them no less, since they take longer.
NUM_PROGRAMS = 132
BLOCK = 8192  # elements a tile
NUM_WARPS = 16
# What cuBLAS's products leave of an H200's multiprocessor: reports/kernels-h200/one-gpu.
LEAN_BLOCK = 256
LEAN_SHARED_BYTES = 5120
LEAN_REGISTERS = 32  # a thread, of one warp
LEAN_ALIGNMENT = 16  # elements; where Triton knows of it, loads are of 16 bytes and asynchronous
SUM_BLOCK = 2048  # of drain
SUM_WARPS = 4


def accumulator_numel(numel: int, world_size: int, *, deterministic: bool) -> int:
    """How large a window to open for `numel` accumulated elements a rank."""
    return numel * world_size if deterministic else numel


def scatter_accumulate(
    window: Window,
    gradients: torch.Tensor,
    *,
    offset: int = 0,
    deterministic: bool = False,
    scale: float = 1.0,
    overwrite: bool = False,
    skip_self: bool = False,
    method: Method = "auto",
    num_programs: int = NUM_PROGRAMS,
    lean: bool = False,
) -> None:
    """Rank r's accumulator [offset : offset + shard] += scale * gradients[r], for every rank r; on the current stream.

    Peers see it after a barrier of the window. What is added to must be zeroed, or overwritten, by the first push of a
    sum; a rank that has nothing to push must leave zeros in its slots.

    Args:
        window: fp32, of `accumulator_numel` elements.
        gradients: [world_size * shard], fp32 or bf16, contiguous, on the window's device.
        offset: where the shard begins in every rank's accumulator; a multiple of 16 is fastest.
        deterministic: the window has a slot per sender.
        scale: rounded to fp32, as its product with each gradient is.
        overwrite: replace what the slots held before; only for the deterministic layout, where `drain` can scale.
        skip_self: with overwrite: leave the own slot alone. Copies within a GPU take multiprocessors.
        method: `triton` on GPUs; on a CPU `torch`, or `triton` where the kernels are interpreted.
        num_programs: Triton programs to launch, of 512 threads each, or 32 with `lean`.
        lean: launch the kernel that fits beside matrix products, where the other one waits for one to end: over NVLink
            0.46 to 1.1 times as long beside them as the other one, 1.1 times as long alone
            (reports/kernels-h200/lean). Ignored for shards that are no multiple of 16 elements, whose loads it could
            not keep in flight.

    Raises:
        InputError: a size, dtype or device does not fit the window, or the method is unknown or not possible here.
    """
    if window.dtype != torch.float32:
        raise InputError(f"scatter_accumulate: got a window of {window.dtype}, expected torch.float32")
    if gradients.dtype not in (torch.float32, torch.bfloat16):
        raise InputError(f"scatter_accumulate: got gradients of {gradients.dtype}, expected fp32 or bf16")
    if overwrite and not deterministic:
        raise InputError(
            "scatter_accumulate: overwrite needs the deterministic layout: other ranks' sums would be lost"
        )
    if overwrite and scale != 1:
        raise InputError(
            f"scatter_accumulate: got scale {scale:g} with overwrite, which copies; scale in drain instead"
        )
    if lean and overwrite:
        raise InputError("scatter_accumulate: lean is a way to add, and overwrite does not")
    if skip_self and not overwrite:
        raise InputError("scatter_accumulate: skip_self is only for overwrite")
    slot_numel = _slot_numel(window, deterministic)
    shard_numel = check_shards(window, gradients, offset, slot_numel)
    if method == "auto":
        method = "triton" if window.device.type == "cuda" or launch.interpreted() else "torch"
    elif method not in METHODS:
        raise unknown_name("scatter_accumulate method", method, METHODS)
    if shard_numel == 0:
        return
    start = offset + window.rank * slot_numel * deterministic
    if overwrite:
        _replace(window, gradients.view(window.world_size, shard_numel), start, skip_self=skip_self)
    elif method == "torch":
        chunks = gradients.view(window.world_size, shard_numel)
        _push_torch(window, chunks, start, scale, exclusive=not deterministic)
    else:
        _push_triton(window, gradients, shard_numel, start, scale, num_programs, lean)


def prepare_overwrite(window: Window, shard_numel: int, offset: int) -> Batch | None:
    """What `scatter_accumulate` with overwrite and skip_self does to fp32 gradients, to be called often: `Batch.write`
    of their address. None where it would not be copies in one batch."""
    if window.device.type == "cpu" or not window.reaches_all or window.world_size == 1 or shard_numel == 0:
        return None
    start = offset + window.rank * _slot_numel(window, deterministic=True)
    peers = others_in_turn(window)
    addresses = [window.pointers[peer] + start * window.dtype.itemsize for peer in peers]
    return Batch(peers, addresses, shard_numel * window.dtype.itemsize, window.device)


def drain(
    window: Window,
    numel: int,
    *,
    offset: int = 0,
    deterministic: bool = False,
    scale: float = 1.0,
    in_place: bool = False,
) -> torch.Tensor:
    """This rank's sum [offset : offset + numel], after a barrier of the window.

    A view of the accumulator in the atomic layout. In the deterministic one a new tensor, or (`in_place`) the first
    slot, whose content is lost, times `scale`. Copy what must outlive the next push.

    Raises:
        InputError: the range does not fit the accumulator, or the atomic layout is to be scaled, which pushes do.
    """
    slot_numel = _slot_numel(window, deterministic)
    if not (offset >= 0 and numel >= 0 and offset + numel <= slot_numel):
        raise InputError(f"drain: got [{offset}, {offset + numel}), expected a range within [0, {slot_numel})")
    if not deterministic:
        if scale != 1:
            raise InputError(f"drain: got scale {scale:g} in the atomic layout; give it to scatter_accumulate")
        return window.local[offset : offset + numel]
    slots = window.local.view(window.world_size, slot_numel)[:, offset : offset + numel]
    total = slots[0] if in_place else torch.empty_like(slots[0])
    if numel > 0 and (window.device.type == "cuda" or launch.interpreted()):
        launch.kernels().sum_slots_kernel[(-(-numel // SUM_BLOCK),)](
            slots, total, slot_numel, numel, window.world_size, scale, block=SUM_BLOCK, num_warps=SUM_WARPS
        )
        return total
    if not in_place:
        total.copy_(slots[0])
    for slot in slots[1:]:
        total += slot
    return total.mul_(scale)


def _slot_numel(window: Window, deterministic: bool) -> int:
    if not deterministic:
        return window.numel
    slot_numel, rest = divmod(window.numel, window.world_size)
    if rest:
        raise InputError(
            f"deterministic accumulator: got a window of {window.numel} elements, expected a multiple of world_size "
            f"{window.world_size}; open it with accumulator_numel(...)"
        )
    return slot_numel


def _replace(window: Window, chunks: torch.Tensor, start: int, *, skip_self: bool) -> None:
    peers = others_in_turn(window)
    if not _replace_in_batch(window, chunks, start, peers):
        for peer in peers:
            window.write(chunks[peer], peer, start)
    if not skip_self:  # last, so that the links need not wait for multiprocessors
        window.write(chunks[window.rank], window.rank, start)


def _replace_in_batch(window: Window, chunks: torch.Tensor, start: int, peers: list[int]) -> bool:
    if not peers or not window.reaches_all or chunks.dtype != window.dtype:
        return not peers
    num_bytes = chunks.shape[1] * chunks.element_size()
    start_bytes, source = start * chunks.element_size(), chunks.data_ptr()
    sources = [source + peer * num_bytes for peer in peers]
    targets = [window.pointers[peer] + start_bytes for peer in peers]
    return copy_batch(targets, sources, num_bytes, window.device)


def _push_torch(window: Window, chunks: torch.Tensor, start: int, scale: float, *, exclusive: bool) -> None:
    for peer in (*others_in_turn(window), window.rank):
        target = window.peers[peer]
        if target is None or window.lock is None:  # pragma: cuda-only
            raise InputError("scatter_accumulate with method 'torch': only for windows of the backend 'cpu'")
        target = target[start : start + chunks.shape[1]]
        if exclusive:
            with window.lock(peer):
                target.add_(chunks[peer], alpha=scale)
        else:
            target.add_(chunks[peer], alpha=scale)


def _push_triton(
    window: Window,
    gradients: torch.Tensor,
    shard_numel: int,
    start: int,
    scale: float,
    num_programs: int,
    lean: bool,
) -> None:
    if not window.reaches_all:  # pragma: cuda-only
        raise InputError(
            "scatter_accumulate: a peer is on another host, where atomic additions do not reach; "
            "shard within hosts, or overwrite"
        )
    arguments = (gradients, window.addresses, shard_numel, start, window.rank, window.world_size, scale)
    grid = (launch.programs(window.device, num_programs),)
    if lean and shard_numel % LEAN_ALIGNMENT == 0:
        kernel = launch.kernels().push_add_lean_kernel
        kernel[grid](*arguments, **lean_options(gradients.element_size()))
    else:
        launch.kernels().push_add_kernel[grid](*arguments, block=BLOCK, num_warps=NUM_WARPS)


def lean_options(itemsize: int) -> dict[str, int]:
    """How to launch `push_add_lean_kernel` for gradients of so many bytes each: one tile is added, others are read."""
    stages = 1 + LEAN_SHARED_BYTES // (LEAN_BLOCK * itemsize)
    return {"block": LEAN_BLOCK, "stages": stages, "num_warps": 1, "maxnreg": LEAN_REGISTERS}
