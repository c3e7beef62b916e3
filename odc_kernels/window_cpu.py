"""Windows in shared files: each rank owns one file, all ranks of the host map all files.

The files lie in /dev/shm, or in the temporary folder where that is too small (containers often get 64 MB). They are
unlinked as soon as every rank has mapped them, so nothing is left behind however a rank ends.
"""

import contextlib
import fcntl
import os
import socket
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from odc_kernels.rendezvous import Rendezvous
from odc_kernels.window import Memory


def allocate(numel: int, dtype: torch.dtype, group: dist.ProcessGroup, meeting: Rendezvous, what: str) -> Memory:
    """One file a rank, mapped by every rank.

    Raises:
        WindowError: a rank has no room for its file, or cannot map the file of another (another host or container).
    """
    num_bytes = max(numel * dtype.itemsize, 1)  # an empty file cannot be mapped
    path, problem = None, None
    try:
        path = _create(num_bytes, folders())
    except OSError as error:
        problem = error.strerror
    descriptors: list[int] = []
    peers: list[torch.Tensor] = []
    try:
        paths = meeting.exchange(what, str(path), problem=problem)
        for rank, theirs in enumerate(paths):
            try:
                descriptors.append(os.open(theirs, os.O_RDWR))
                mapped = torch.from_file(theirs, shared=True, size=num_bytes, dtype=torch.uint8)
            except (OSError, RuntimeError):
                problem = f"cannot map the file of {meeting.name(rank)} ({theirs}): not the same host or container"
                break
            peers.append(mapped[: numel * dtype.itemsize].view(dtype))
        meeting.exchange(what, None, problem=problem)
    except BaseException:
        _close(descriptors)
        raise
    finally:
        if path is not None:
            path.unlink(missing_ok=True)
    locks = _Locks(descriptors)
    return Memory(peers=tuple(peers), release=locks.close, lock=locks.hold)


def folders() -> list[Path]:
    """Where the files may lie, the fastest first."""
    return [folder for folder in (Path("/dev/shm"), Path(tempfile.gettempdir())) if folder.is_dir()]


def _create(num_bytes: int, choices: Sequence[Path]) -> Path:
    """A new file of this many zero bytes, all of them backed, in the first folder with room.

    Raises OSError whose strerror says what was needed and what is free.
    """
    free = []
    for folder in choices:
        free_bytes = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
        free.append(f"{free_bytes} are free in {folder}")
        if free_bytes < num_bytes:
            continue
        descriptor, path = tempfile.mkstemp(prefix="odc-", dir=folder)
        try:
            # Truncating would do, but then a full file system shows as a crash at the first write.
            os.posix_fallocate(descriptor, 0, num_bytes)
        except OSError:  # another rank was faster
            os.unlink(path)
            continue
        finally:
            os.close(descriptor)
        return Path(path)
    raise OSError(0, f"needs {num_bytes} bytes of shared files on {socket.gethostname()}, " + ", ".join(free))


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class _Locks:
    """A lock per rank, held across processes by flock on the window's file and across threads by a mutex.

    flock alone does not exclude two threads: they share the open file.
    """

    def __init__(self, descriptors: Sequence[int]) -> None:
        self._descriptors = descriptors
        self._mutexes = [threading.Lock() for _ in descriptors]

    @contextlib.contextmanager
    def hold(self, rank: int) -> Iterator[None]:
        with self._mutexes[rank]:
            fcntl.flock(self._descriptors[rank], fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._descriptors[rank], fcntl.LOCK_UN)

    def close(self) -> None:
        _close(self._descriptors)
