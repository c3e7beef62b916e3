"""Windows in torch symmetric memory, backend "CUDA": every GPU of a host maps every other one's memory.

Only its memory and pointers are used. Its own barriers run on the device and cannot say who is missing.
"""

import socket
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from odc_kernels.rendezvous import Rendezvous
from odc_kernels.window import Memory

# pragma: cuda-only (the whole file)


def allocate(numel: int, dtype: torch.dtype, group: dist.ProcessGroup, meeting: Rendezvous, what: str) -> Memory:
    """Device memory on the current GPU, mapped by all ranks.

    Raises:
        WindowError: a rank cannot allocate, or two ranks are on different hosts, share a GPU, or have no peer access.
    """
    import torch.distributed._symmetric_memory as symmetric_memory

    device = torch.device("cuda", torch.cuda.current_device())
    places = meeting.exchange(what, place(device))
    meeting.exchange(what, None, problem=_unreachable(meeting, places))

    problem, block = None, None
    try:
        if symmetric_memory.get_backend(device) not in (None, "CUDA"):
            problem = f"torch symmetric memory is set to {symmetric_memory.get_backend(device)}, expected CUDA"
        else:
            # Not symmetric_memory.empty: that takes from a pool, which hands a block that one rank still uses (a
            # forgotten view) to no one but gives the other ranks their old one; then rendezvous would hang.
            numel_padded = max(numel, 16)
            block = symmetric_memory._SymmetricMemory.empty_strided_p2p((numel_padded,), (1,), dtype, device)
            block.zero_()
            torch.cuda.synchronize(device)
    except RuntimeError as error:
        problem = allocation_failed(numel * dtype.itemsize, device, error)
    meeting.exchange(what, None, problem=problem)

    assert block is not None
    handle = symmetric_memory.rendezvous(block, group)
    peers = [
        (block if rank == meeting.rank else handle.get_buffer(rank, (block.numel(),), dtype))[:numel]
        for rank in range(meeting.world_size)
    ]
    meeting.exchange(what, None)
    # The memory goes with the last tensor; the handle unmaps the peers'.
    return Memory(peers=tuple(peers), release=handles_of(handle).clear)


def handles_of(*handles: Any) -> list[Any]:
    """A list to clear: what keeps a window's memory alive besides its tensors."""
    return list(handles)


def place(device: torch.device) -> dict[str, str]:
    """Which host and GPU this rank is on, as ranks tell each other."""
    boot = Path("/proc/sys/kernel/random/boot_id")  # two hosts may share a name
    boot_id = boot.read_text().strip() if boot.exists() else ""
    gpu = str(torch.cuda.get_device_properties(device).uuid)
    return {"host": socket.gethostname(), "boot": boot_id, "gpu": gpu}


def allocation_failed(num_bytes: int, device: torch.device, error: Exception) -> str:
    """A problem to tell the other ranks."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return f"cannot allocate {num_bytes} bytes on {device} ({free_bytes} of {total_bytes} are free): {reason}"


def _unreachable(meeting: Rendezvous, places: list[dict[str, str]]) -> str | None:
    own = places[meeting.rank]
    visible = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    for rank, other in enumerate(places):
        if rank == meeting.rank:
            continue
        if (other["host"], other["boot"]) != (own["host"], own["boot"]):
            return f"is on {own['host']}, {meeting.name(rank)} on {other['host']}; across hosts use the backend nvshmem"
        if other["gpu"] == own["gpu"]:
            return f"uses the same GPU as {meeting.name(rank)}; give each rank its own with torch.cuda.set_device"
        # A rank that sees only its own GPU cannot ask; then torch's rendezvous finds out.
        here = torch.cuda.current_device()
        if other["gpu"] in visible and not torch.cuda.can_device_access_peer(here, visible.index(other["gpu"])):
            return f"has no peer access to the GPU of {meeting.name(rank)} (nvidia-smi topo -m shows the links)"
    return None
