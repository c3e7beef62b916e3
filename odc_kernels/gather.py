"""gather: read every peer's shard, without the peers' help. The one-sided all_gather.

Two ways. `copy` hands all copies to the copy engines in one call: no multiprocessor works, so it neither waits for
compute nor slows it. `triton` is one kernel for all peers, which also casts to another dtype. reports/kernels-h200 has
both by size.
"""

from typing import Literal

import torch

from odc_kernels import launch
from odc_kernels.copies import Batch, copy_batch
from odc_kernels.window import Window, check_shards, others_in_turn
from odc_sim.errors import InputError, unknown_name

Method = Literal["auto", "copy", "triton"]
METHODS: tuple[Method, ...] = ("auto", "copy", "triton")

# Measured: reports/kernels-h200, two H200s, NVLink 4, torch 2.11.0, triton 3.6.0, 2026-11-29. Host seconds of a call at
# 64 KiB (cuda-copy@1 to @8, and cuda-triton), and bytes per second at 256 MiB.
COPY_CALL_S = 11.3e-6
COPY_EACH_S = 1.0e-6  # for each peer
TRITON_CALL_S = 16.1e-6
COPY_BYTES_PER_S = 371e9
TRITON_BYTES_PER_S = 333e9

BLOCK = 8192  # elements a tile
NUM_WARPS = 16
NUM_PROGRAMS = 132  # one a multiprocessor of an H100 or H200: the link needs most of them


def gather(
    window: Window, output: torch.Tensor, *, offset: int = 0, skip_self: bool = False, method: Method = "auto"
) -> None:
    """output[r] = rank r's window [offset : offset + shard], for every rank r; on the current stream.

    Args:
        window: what the ranks published; nobody may write this part of it meanwhile.
        output: [world_size * shard], contiguous, on the window's device. Another dtype than the window's is cast.
        offset: where the shard begins in every rank's window; a multiple of 16 is fastest.
        skip_self: leave the own shard of `output` alone (as FSDP's buffers already hold it).
        method: `auto` takes the faster one by the measurements above.

    Raises:
        InputError: a size, dtype or device does not fit the window, or the method is unknown or not possible here.
    """
    shard_numel = check_shards(window, output, offset, window.numel)
    if method == "auto":
        method = choose_method(window, output)
    elif method not in METHODS:
        raise unknown_name("gather method", method, METHODS)
    if shard_numel == 0:
        return
    if method == "triton":
        _pull(window, output, shard_numel, offset, skip_self)
        return
    peers = others_in_turn(window) + [window.rank] * (not skip_self)
    if window.reaches_all and output.dtype == window.dtype:
        num_bytes = shard_numel * output.element_size()
        start_bytes, target = offset * output.element_size(), output.data_ptr()
        targets = [target + peer * num_bytes for peer in peers]
        sources = [window.pointers[peer] + start_bytes for peer in peers]
        if copy_batch(targets, sources, num_bytes, window.device):
            return  # pragma: cuda-only
    shards = output.view(window.world_size, shard_numel)
    for peer in peers:
        window.read(shards[peer], peer, offset)


def prepare(window: Window, shard_numel: int, offset: int) -> Batch | None:
    """What `gather` with skip_self does, to be called often: `Batch.read` of the output's address.

    None where it would not be copies in one batch.
    """
    num_peers = window.world_size - 1
    num_bytes = shard_numel * window.dtype.itemsize
    if window.device.type == "cpu" or not window.reaches_all or num_peers == 0 or num_bytes == 0:
        return None
    if faster(num_peers, num_peers * num_bytes) == "triton":
        return None
    peers = others_in_turn(window)
    addresses = [window.pointers[peer] + offset * window.dtype.itemsize for peer in peers]
    return Batch(peers, addresses, num_bytes, window.device)


def choose_method(window: Window, output: torch.Tensor) -> Method:
    """The way that the measured constants say is faster."""
    if window.device.type == "cpu" or not window.reaches_all:
        return "copy"
    if output.dtype != window.dtype:  # pragma: cuda-only
        return "triton"  # a copy that casts is a kernel per peer, and not a copy engine's
    num_peers = window.world_size - 1  # pragma: cuda-only
    return faster(num_peers, num_peers * output.nbytes // window.world_size)  # pragma: cuda-only


def faster(num_peers: int, num_bytes: int) -> Literal["copy", "triton"]:
    """The faster way to read this many bytes in all: bound by the host where small, by the link where large.

    So for up to four peers always `copy`; for seven, `triton` below about 0.9 MB a shard.
    """
    copy_s = max(COPY_CALL_S + num_peers * COPY_EACH_S, num_bytes / COPY_BYTES_PER_S)
    triton_s = max(TRITON_CALL_S, num_bytes / TRITON_BYTES_PER_S)
    return "copy" if copy_s <= triton_s else "triton"


def _pull(window: Window, output: torch.Tensor, shard_numel: int, offset: int, skip_self: bool) -> None:
    if not window.reaches_all:  # pragma: cuda-only
        raise InputError("gather with method 'triton': a peer is on another host, where loads do not reach; use 'copy'")
    if skip_self and window.world_size == 1:
        return
    kernels = launch.kernels()
    window_dtype = kernels.DTYPES.get(window.dtype)
    if window_dtype is None:
        raise InputError(f"gather with method 'triton': got a window of {window.dtype}, expected fp32, bf16 or fp16")
    kernels.pull_kernel[(launch.programs(window.device, NUM_PROGRAMS),)](
        window.addresses,
        output,
        shard_numel,
        offset,
        window.rank,
        window.world_size,
        int(skip_self),
        window_dtype=window_dtype,
        block=BLOCK,
        num_warps=NUM_WARPS,
    )
