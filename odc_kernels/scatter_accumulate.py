"""scatter_accumulate: add each chunk of a gradient into its owner's fp32 accumulator. The one-sided reduce_scatter.

The sender adds with atomic instructions that the owner's L2 carries out, and waits for nobody: no helper process, no
staging buffer, no receiver. A rank may push as often as it has microbatches. Two layouts of the accumulator:

    atomic          [numel]: everyone adds to the same elements. fp32 sums depend on who came first in the last bits.
    deterministic   [world_size, numel]: one slot per sender, which `drain` sums in rank order: bitwise repeatable, at
                    world_size times the memory. Pushes of one rank must then be on one stream. The first push of a sum
                    may `overwrite` the slot instead: then copy engines do it, and need not wait for multiprocessors.
"""

from typing import Literal

import torch

from odc_kernels import launch
from odc_kernels.copies import copy_batch
from odc_kernels.window import Window, check_shards
from odc_sim.errors import InputError, unknown_name

Method = Literal["auto", "triton", "torch"]
METHODS: tuple[Method, ...] = ("auto", "triton", "torch")

# Measured: reports/kernels-h200, cuda-atomic@16 to @264 at 64 MiB. Fewer do not fill the link, and cost the compute
# beside them no less, since they take longer.
NUM_PROGRAMS = 132
BLOCK = 8192  # elements a tile
NUM_WARPS = 16


def accumulator_numel(numel: int, world_size: int, *, deterministic: bool) -> int:
    """How large a window to open for `numel` accumulated elements a rank."""
    return numel * world_size if deterministic else numel


def scatter_accumulate(
    window: Window,
    gradients: torch.Tensor,
    *,
    offset: int = 0,
    deterministic: bool = False,
    overwrite: bool = False,
    method: Method = "auto",
    num_programs: int = NUM_PROGRAMS,
) -> None:
    """Rank r's accumulator [offset : offset + shard] += gradients[r], for every rank r; on the current stream.

    Peers see it after a barrier of the window. What is added to must be zeroed, or overwritten, by the first push of a
    sum; a rank that has nothing to push must leave zeros in its slots.

    Args:
        window: fp32, of `accumulator_numel` elements.
        gradients: [world_size * shard], fp32 or bf16, contiguous, on the window's device.
        offset: where the shard begins in every rank's accumulator; a multiple of 16 is fastest.
        deterministic: the window has a slot per sender.
        overwrite: replace what the slots held before; only for the deterministic layout.
        method: `triton` on GPUs; on a CPU `torch`, or `triton` where the kernels are interpreted.
        num_programs: Triton programs to launch, of 512 threads each.

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
        _replace(window, gradients.view(window.world_size, shard_numel), start)
    elif method == "torch":
        _push_torch(window, gradients.view(window.world_size, shard_numel), start, exclusive=not deterministic)
    else:
        _push_triton(window, gradients, shard_numel, start, num_programs)


def drain(window: Window, numel: int, *, offset: int = 0, deterministic: bool = False) -> torch.Tensor:
    """This rank's sum [offset : offset + numel], after a barrier of the window.

    A view of the accumulator in the atomic layout, a new tensor in the deterministic one. Copy what must outlive the
    next push.

    Raises:
        InputError: the range does not fit the accumulator.
    """
    slot_numel = _slot_numel(window, deterministic)
    if not (offset >= 0 and numel >= 0 and offset + numel <= slot_numel):
        raise InputError(f"drain: got [{offset}, {offset + numel}), expected a range within [0, {slot_numel})")
    if not deterministic:
        return window.local[offset : offset + numel]
    slots = window.local.view(window.world_size, slot_numel)[:, offset : offset + numel]
    total = slots[0].clone()
    for slot in slots[1:]:
        total += slot
    return total


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


def _replace(window: Window, chunks: torch.Tensor, start: int) -> None:
    peers = [(window.rank + step) % window.world_size for step in range(1, window.world_size + 1)]
    if window.reaches_all and chunks.dtype == window.dtype:
        num_bytes = chunks.shape[1] * chunks.element_size()
        start_bytes, source = start * chunks.element_size(), chunks.data_ptr()
        sources = [source + peer * num_bytes for peer in peers]
        targets = [window.pointers[peer] + start_bytes for peer in peers]
        if copy_batch(targets, sources, num_bytes, window.device):
            return  # pragma: cuda-only
    for peer in peers:
        window.write(chunks[peer], peer, start)


def _push_torch(window: Window, chunks: torch.Tensor, start: int, *, exclusive: bool) -> None:
    for step in range(1, window.world_size + 1):
        peer = (window.rank + step) % window.world_size
        target = window.peers[peer]
        if target is None or window.lock is None:  # pragma: cuda-only
            raise InputError("scatter_accumulate with method 'torch': only for windows of the backend 'cpu'")
        target = target[start : start + chunks.shape[1]]
        if exclusive:
            with window.lock(peer):
                target += chunks[peer]
        else:
            target += chunks[peer]


def _push_triton(window: Window, gradients: torch.Tensor, shard_numel: int, start: int, num_programs: int) -> None:
    if not window.reaches_all:  # pragma: cuda-only
        raise InputError(
            "scatter_accumulate: a peer is on another host, where atomic additions do not reach; "
            "shard within hosts, or overwrite"
        )
    push_add_kernel = launch.kernels().push_add_kernel
    push_add_kernel[(launch.programs(window.device, num_programs),)](
        gradients,
        window.addresses,
        shard_numel,
        start,
        window.rank,
        window.world_size,
        block=BLOCK,
        num_warps=NUM_WARPS,
    )
