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
    function = _driver()  # pragma: cuda-only
    stream = torch.cuda.current_stream(device).cuda_stream  # pragma: cuda-only
    if function is None or stream == 0:  # pragma: cuda-only
        return False
    count = len(targets)  # pragma: cuda-only
    addresses = ctypes.c_uint64 * count  # pragma: cuda-only
    sizes = (ctypes.c_size_t * count)(*[num_bytes] * count)  # pragma: cuda-only
    attributes, indices = _constants()  # pragma: cuda-only
    error = function(  # pragma: cuda-only
        addresses(*targets), addresses(*sources), sizes, count, attributes, indices, 1, stream
    )
    if error != 0:  # pragma: cuda-only
        raise RuntimeError(f"cuMemcpyBatchAsync of {count} copies of {num_bytes} bytes: CUDA driver error {error}")
    return True  # pragma: cuda-only


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
def _constants() -> tuple[ctypes.Array[_Attributes], ctypes.Array[ctypes.c_size_t]]:  # pragma: cuda-only
    """One set of attributes, from the first copy on."""
    attributes = _Attributes(source_access_order=STREAM_ORDER, flags=PREFER_OVERLAP_WITH_COMPUTE)
    return (_Attributes * 1)(attributes), (ctypes.c_size_t * 1)(0)
