"""Symmetric windows: each rank owns a tensor that its peers read and add to without its help.

A window is opened by all ranks of a group at once, with the same size, dtype and name:

    with open_window(1 << 20, torch.float32, name="gradients") as window:
        window.peers[1][:4]        # rank 1's memory, from any rank
        window.barrier()           # everyone's work on it is finished

`addresses` is what kernels use: the same pointers as one int64 tensor on the device. Backends:

    cuda     torch symmetric memory over NVLink or PCIe, GPUs of one host (default on GPUs)
    nvshmem  NVSHMEM's heap through nvshmem4py; peers on other hosts are reached with `read` and `write`
    cpu      shared files, ranks of one host (default without a GPU; what CI runs)
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

import torch
import torch.distributed as dist

from odc_kernels.rendezvous import Rendezvous, WindowError
from odc_sim.errors import InputError, unknown_name

BackendName = Literal["cuda", "nvshmem", "cpu"]
BACKENDS: tuple[BackendName, ...] = ("cuda", "nvshmem", "cpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """What a backend allocates for one window."""

    peers: tuple[torch.Tensor | None, ...]
    """[world_size] tensors [numel], this rank's own included; None where loads and stores do not reach."""
    release: Callable[[], None]
    """Frees it; called once, after all ranks have stopped using it and the window has dropped its tensors."""
    lock: Callable[[int], AbstractContextManager[None]] | None = None
    """Excludes all other holders of the same rank's lock; None where additions are atomic in hardware."""
    read_far: Callable[[torch.Tensor, int, int], None] | None = None
    """(output, peer, offset): read from a peer that is None in `peers`."""
    write_far: Callable[[torch.Tensor, int, int], None] | None = None
    """(values, peer, offset): write to such a peer."""


class Window:
    """One rank's end of a symmetric window of `numel` elements a rank. Made by `open_window`; zero when opened."""

    def __init__(self, memory: Memory, meeting: Rendezvous, *, backend: BackendName, title: str) -> None:
        self.rank = meeting.rank
        self.world_size = meeting.world_size
        self.backend: BackendName = backend
        self._title = title
        self._meeting = meeting
        self._memory: Memory | None = memory
        local = memory.peers[self.rank]
        assert local is not None
        self.local = local
        """This rank's own memory [numel]."""
        self.peers = memory.peers
        """Every rank's memory, [world_size] tensors [numel]; the own one is `local`; None: only `read`, `write`."""
        self.reaches_all = all(peer is not None for peer in memory.peers)
        """Whether every peer is in `peers`, so that kernels reach it by its address."""
        self.numel = local.numel()
        self.dtype = local.dtype
        self.device = local.device
        self.lock = memory.lock
        self.pointers = tuple(0 if peer is None else peer.data_ptr() for peer in memory.peers)
        """`addresses` as Python numbers."""
        self.addresses = torch.tensor(self.pointers, dtype=torch.int64, device=local.device)
        """Where each rank's memory begins in this process, int64 [world_size] on the device; 0 where unreachable."""

    def barrier(self, timeout_s: float | None = None) -> None:
        """Finish all work of this rank's device, then return once every rank has done the same.

        Raises:
            WindowError: a rank did not come within `timeout_s` seconds (None: what the window was opened with).
        """
        self._synchronize()
        self._meeting.barrier(f"barrier of {self._title}", timeout_s=timeout_s)

    def read(self, output: torch.Tensor, peer: int, offset: int = 0) -> None:
        """Copy `output.numel()` elements of rank `peer`'s memory, from `offset` on, into `output`, on its stream."""
        source = self.peers[peer]
        if source is not None:
            output.copy_(source[offset : offset + output.numel()], non_blocking=True)
            return
        assert self._memory is not None  # pragma: cuda-only
        assert self._memory.read_far is not None  # pragma: cuda-only
        self._memory.read_far(output, peer, offset)  # pragma: cuda-only

    def write(self, values: torch.Tensor, peer: int, offset: int = 0) -> None:
        """Copy `values` into rank `peer`'s memory, from `offset` on, on the current stream; seen after a barrier."""
        target = self.peers[peer]
        if target is not None:
            target[offset : offset + values.numel()].copy_(values, non_blocking=True)
            return
        assert self._memory is not None  # pragma: cuda-only
        assert self._memory.write_far is not None  # pragma: cuda-only
        self._memory.write_far(values, peer, offset)  # pragma: cuda-only

    def close(self, timeout_s: float | None = None) -> None:
        """Free the memory once every rank has called it. Views of `local` or `peers` must be dropped before.

        Closing twice does nothing.

        Raises:
            WindowError: a rank did not come within `timeout_s` seconds; the memory is then kept.
        """
        if self._memory is None:
            return
        self._synchronize()
        self._meeting.barrier(f"close of {self._title}", timeout_s=timeout_s)
        release = self._drop()
        release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:  # Peers may not come to a barrier any more; waiting for them would hide the error.
            self._memory = None

    def __repr__(self) -> str:
        state = "closed" if self._memory is None else f"{self.numel} x {self.dtype} on {self.device}"
        return f"<Window {self._title}: rank {self.rank} of {self.world_size}, {state}>"

    def _synchronize(self) -> None:
        if self.device.type == "cuda":  # pragma: cuda-only
            torch.cuda.synchronize(self.device)

    def _drop(self) -> Callable[[], None]:
        """Forget the tensors, so that the backend's memory has no user left when the function returned is called."""
        assert self._memory is not None
        release = self._memory.release
        self._memory = None
        self.local = torch.empty(0, dtype=self.dtype)
        self.peers = ()
        self.lock = None
        return release


def open_window(
    numel: int,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None = None,
    *,
    name: str = "window",
    backend: Literal["auto"] | BackendName = "auto",
    timeout_s: float = 60.0,
) -> Window:
    """Open a window of `numel` elements a rank, zeroed. Every rank of `group` (None: all ranks) must call it.

    numel may be 0. `name` is for messages, and tells windows of one size apart. `timeout_s` is the deadline of every
    wait for other ranks, here and later.

    Raises:
        InputError: an argument is wrong on its own.
        WindowError: the ranks disagree, one is missing, or one cannot allocate; every rank raises the same.
    """
    if numel < 0:
        raise InputError(f"window {name!r}: got numel {numel}, expected a number >= 0")
    if backend == "auto":
        backend = "cuda" if torch.cuda.is_available() else "cpu"
    if backend not in BACKENDS:
        raise unknown_name("window backend", backend, BACKENDS)
    if not dist.is_initialized():
        raise InputError(f"window {name!r}: torch.distributed is not initialized; call init_process_group first")
    meeting = Rendezvous(group or dist.group.WORLD, timeout_s=timeout_s)
    title = f"window {meeting.sequence} ({name!r})"
    wanted = {"name": name, "numel": numel, "dtype": str(dtype).removeprefix("torch."), "backend": backend}
    _check_agreement(f"open of {title}", meeting, meeting.exchange(f"open of {title}", wanted))
    memory = _allocate(backend)(numel, dtype, group or dist.group.WORLD, meeting, f"open of {title}")
    return Window(memory, meeting, backend=backend, title=title)


Allocate = Callable[[int, torch.dtype, dist.ProcessGroup, Rendezvous, str], Memory]


def _allocate(backend: BackendName) -> Allocate:
    if backend == "cpu":
        from odc_kernels.window_cpu import allocate
    elif backend == "cuda":  # pragma: cuda-only
        from odc_kernels.window_cuda import allocate
    else:  # pragma: cuda-only
        from odc_kernels.window_nvshmem import allocate
    return allocate


def _check_agreement(what: str, meeting: Rendezvous, wanted: list[dict[str, Any]]) -> None:
    """Refuse ranks that ask for different windows, most often because they open them in different orders."""
    first = wanted[0]
    for rank, other in enumerate(wanted):
        different = [field for field in first if other[field] != first[field]]
        if different:
            asked = [", ".join(f"{field} {window[field]}" for field in different) for window in (other, first)]
            raise WindowError(
                f"{what}: {meeting.name(rank)} asked for {asked[0]}, {meeting.name(0)} for {asked[1]}; "
                "open the same windows in the same order on every rank"
            )


def others_in_turn(window: Window) -> list[int]:
    """All other ranks, from the next one on: no two ranks turn to the same one at the same time."""
    return [(window.rank + step) % window.world_size for step in range(1, window.world_size)]


def check_shards(window: Window, whole: torch.Tensor, offset: int, room: int) -> int:
    """The elements a shard of `whole` [world_size * shard] has, checked to lie within `room` elements from `offset` on.

    Raises:
        InputError: the size, layout, device or offset does not fit the window.
    """
    shard_numel, rest = divmod(whole.numel(), window.world_size)
    if rest or not whole.is_contiguous():
        raise InputError(
            f"got a tensor {list(whole.shape)} with strides {list(whole.stride())}, expected a contiguous one of "
            f"world_size {window.world_size} equal shards"
        )
    if offset < 0 or offset + shard_numel > room:
        raise InputError(f"got shards of {shard_numel} elements at {offset}, expected them within [0, {room})")
    if whole.device != window.device:
        raise InputError(f"got a tensor on {whole.device}, expected one on {window.device}, where the window is")
    return shard_numel
