"""Windows in NVSHMEM's symmetric heap, through nvshmem4py: GPUs of one host or of many.

Peers of the same host are ordinary tensors. Those of other hosts are None, and read and written through NVSHMEM's
network, on one stream at a time. Atomic additions do not reach them.

NVSHMEM is started once per process, by the first window, and spans all ranks of the job; `finalize` ends it. Do not
use it in a process where torch symmetric memory has the backend "NVSHMEM": both would own the library.
"""

import base64
import os
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from odc_kernels.rendezvous import Rendezvous
from odc_kernels.window import Memory
from odc_kernels.window_cuda import allocation_failed, place
from odc_sim.errors import InputError

# pragma: cuda-only (the whole file)

STAGING_BYTES = 16 << 20
"""Networks touch only the heap: what is read from or written to another host passes through this much of it."""


def allocate(numel: int, dtype: torch.dtype, group: dist.ProcessGroup, meeting: Rendezvous, what: str) -> Memory:
    """Memory of the symmetric heap on the current GPU.

    Raises:
        InputError: nvshmem4py is not installed, or the group is not all ranks of the job.
        WindowError: a rank has not enough free memory.
    """
    try:
        import nvshmem.core as nvshmem
        from nvshmem.core.interop import torch as interop
    except ImportError as error:
        raise InputError(f"backend nvshmem: {error}; install odc-toolkit[kernels]") from None
    if meeting.world_size != dist.get_world_size():
        raise InputError("backend nvshmem: got a group of some ranks; its allocations need all ranks of the job")
    device = torch.device("cuda", torch.cuda.current_device())
    places = meeting.exchange(what, place(device))
    num_bytes = max(numel, 16) * dtype.itemsize
    free_bytes, _ = torch.cuda.mem_get_info(device)
    problem = None
    if free_bytes < num_bytes:  # NVSHMEM itself would end the process
        problem = allocation_failed(num_bytes, device, MemoryError("not enough memory"))
    meeting.exchange(what, None, problem=problem)
    _start(nvshmem, device, meeting, what, one_host=len({(p["host"], p["boot"]) for p in places}) == 1)

    block = _tensor(interop, max(numel, 16), dtype, device, meeting, what)
    block.zero_()
    torch.cuda.synchronize(device)
    # Never ask for the own one: nvshmem4py would count a second user of the block, and then not free it.
    peers = [
        block[:numel] if pe == meeting.rank else _reach(interop, block, pe, numel) for pe in range(meeting.world_size)
    ]
    far = any(meeting.exchange(what, any(peer is None for peer in peers)))
    blocks = [block]
    read_far = write_far = None
    if far:
        staging = _tensor(interop, STAGING_BYTES // dtype.itemsize, dtype, device, meeting, what)
        blocks.append(staging)
        read_far, write_far = _far(block, staging)
    meeting.exchange(what, None)

    def release() -> None:
        while blocks:  # in the order they were allocated in, on every rank
            interop.free_tensor(blocks.pop(0))

    return Memory(peers=tuple(peers), release=release, read_far=read_far, write_far=write_far)


def finalize() -> None:
    """End NVSHMEM in this process; call it on every rank after all windows are closed, before destroy_process_group."""
    import nvshmem.core as nvshmem

    torch.cuda.synchronize()
    nvshmem.finalize()


def _start(nvshmem: Any, device: torch.device, meeting: Rendezvous, what: str, *, one_host: bool) -> None:
    nvshmem.get_version()  # loads the library, without which asking for the status crashes
    # Memory and transports start with the first allocation; until then the status is "bootstrapped".
    running = nvshmem.init_status() >= nvshmem.InitStatus.STATUS_IS_BOOTSTRAPPED
    if all(meeting.exchange(what, running)):
        return
    from cuda.core import Device

    if one_host:  # no network is needed, and looking for one can take long or fail
        os.environ.setdefault("NVSHMEM_REMOTE_TRANSPORT", "none")
        os.environ.setdefault("NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", "lo")
    first = meeting.rank == 0
    unique_id = nvshmem.get_unique_id(empty=not first)
    sent = base64.b64encode(pickle.dumps(unique_id)).decode() if first else None
    received = meeting.exchange(what, sent)[0]
    if not first:
        unique_id = pickle.loads(base64.b64decode(received))
    current = Device(device.index)
    current.set_current()
    nvshmem.init(device=current, uid=unique_id, rank=meeting.rank, nranks=meeting.world_size, initializer_method="uid")


def _tensor(
    interop: Any, numel: int, dtype: torch.dtype, device: torch.device, meeting: Rendezvous, what: str
) -> torch.Tensor:
    problem, block = None, None
    try:
        block = interop.tensor((numel,), dtype=dtype)
    except Exception as error:  # nvshmem4py's own classes
        problem = allocation_failed(numel * dtype.itemsize, device, error)
    meeting.exchange(what, None, problem=problem)
    assert block is not None
    return block


def _reach(interop: Any, block: torch.Tensor, pe: int, numel: int) -> torch.Tensor | None:
    """Rank `pe`'s block as a tensor, or None where loads do not reach it."""
    from nvshmem.core import NvshmemError

    try:
        return interop.get_peer_tensor(block, pe)[:numel]
    except NvshmemError:
        return None


FarCopy = Callable[[torch.Tensor, int, int], None]


def _far(block: torch.Tensor, staging: torch.Tensor) -> tuple[FarCopy, FarCopy]:
    """(read, write) of ranges of the peers' blocks.

    By address: nvshmem4py's own `get` and `put` move whole allocations, whatever view they are given.
    """
    from nvshmem import bindings

    itemsize, base = block.element_size(), block.data_ptr()

    def pieces(whole: torch.Tensor, offset: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
        for start in range(0, whole.numel(), staging.numel()):
            piece = whole.view(-1)[start : start + staging.numel()]
            yield piece, staging[: piece.numel()], base + (offset + start) * itemsize

    def read(output: torch.Tensor, peer: int, offset: int) -> None:
        stream = torch.cuda.current_stream(output.device).cuda_stream
        for piece, staged, address in pieces(output, offset):
            bindings.getmem_on_stream(staged.data_ptr(), address, piece.numel() * itemsize, peer, stream)
            piece.copy_(staged)

    def write(values: torch.Tensor, peer: int, offset: int) -> None:
        stream = torch.cuda.current_stream(values.device).cuda_stream
        for piece, staged, address in pieces(values, offset):
            staged.copy_(piece)
            bindings.putmem_on_stream(address, staged.data_ptr(), piece.numel() * itemsize, peer, stream)
        bindings.quiet_on_stream(stream)  # else only the staging buffer is known to be free again

    return read, write
