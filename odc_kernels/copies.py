"""Several device copies in one call to the driver, on copy engines even within a GPU.

`Tensor.copy_` makes a launch of each copy, and copies within a GPU with its multiprocessors, so that they wait for the
compute beside them. cuMemcpyBatchAsync (CUDA 12.8; in the form used here, 13.0) takes all copies at once and a hint to
leave the multiprocessors alone. torch has no binding for it.
"""

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch

STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
PREFER_OVERLAP_WITH_COMPUTE = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes of cuda.h; the location hints are for managed memory only."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("location_hints", ctypes.c_int * 4),
        ("flags", ctypes.c_uint),
    )


def copy_batch(targets: Sequence[int], sources: Sequence[int], num_bytes: int, device: torch.device) -> bool:
    """Copy `num_bytes` from each of the addresses `sources` to its address in `targets`, on the current stream.

    Returns False, with nothing done, where the driver is too old or the current stream is the default one, which the
    driver refuses.

    Raises:
        RuntimeError: the driver refuses the copies.
    """
    if device.type != "cuda":
        return False
    addresses = ctypes.c_uint64 * len(targets)  # pragma: cuda-only
    sizes = (ctypes.c_size_t * len(targets))(*[num_bytes] * len(targets))  # pragma: cuda-only
    return _submit(addresses(*targets), addresses(*sources), sizes, current_stream(device))  # pragma: cuda-only


class Batch:
    """The same copies again and again, between a buffer's equal parts and addresses that stay: most of it is prepared.

    The buffer may be another one each time.
    """

    def __init__(self, parts: Sequence[int], addresses: Sequence[int], num_bytes: int, device: torch.device) -> None:
        """Of `num_bytes` each, between the buffer's part number `parts[i]` and the address `addresses[i]`."""
        count = len(parts)
        self._offsets = [part * num_bytes for part in parts]
        self._array = ctypes.c_uint64 * count
        self._addresses = self._array(*addresses)
        self._sizes = (ctypes.c_size_t * count)(*[num_bytes] * count)
        self._device = device

    def read(self, buffer: int) -> bool:
        """Copy from the addresses into the buffer that begins at `buffer`, as `copy_batch` does."""
        parts = self._array(*[buffer + offset for offset in self._offsets])
        return _submit(parts, self._addresses, self._sizes, current_stream(self._device))

    def write(self, buffer: int) -> bool:
        """Copy the other way round."""
        parts = self._array(*[buffer + offset for offset in self._offsets])
        return _submit(self._addresses, parts, self._sizes, current_stream(self._device))


def current_stream(device: torch.device) -> int:  # pragma: cuda-only
    """The driver's handle of the current stream; 0 for the default one. As Triton's launcher does, without an object
    for it, which takes longer than all the rest of a call."""
    return torch._C._cuda_getCurrentRawStream(device.index)


def _submit(targets: Any, sources: Any, sizes: Any, stream: int) -> bool:
    function = _driver()
    if function is None or stream == 0:
        return False
    attributes, indices = _constants()
    error = function(targets, sources, sizes, len(sizes), attributes, indices, 1, stream)
    if error != 0:
        raise RuntimeError(f"cuMemcpyBatchAsync of {len(sizes)} copies of {sizes[0]} bytes: CUDA driver error {error}")
    return True


def driver_has_batches() -> bool:
    """Whether the driver of this machine knows cuMemcpyBatchAsync in the form used here."""
    return _driver() is not None  # pragma: cuda-only


@functools.cache
def _driver() -> Any:  # pragma: cuda-only
    try:
        function = ctypes.CDLL("libcuda.so.1").cuMemcpyBatchAsync_v2
    except (OSError, AttributeError):
        return None
    size = ctypes.c_size_t
    pointer = ctypes.c_void_p
    function.argtypes = (pointer, pointer, pointer, size, pointer, pointer, size, pointer)
    return function


@functools.cache
def _constants() -> tuple[ctypes.Array[_Attributes], ctypes.Array[ctypes.c_size_t]]:
    """One set of attributes, from the first copy on."""
    attributes = _Attributes(source_access_order=STREAM_ORDER, flags=PREFER_OVERLAP_WITH_COMPUTE)
    return (_Attributes * 1)(attributes), (ctypes.c_size_t * 1)(0)
