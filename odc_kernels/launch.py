"""What gather and scatter_accumulate need to launch their kernels, compiled or interpreted."""

import functools
from types import ModuleType

import torch

from odc_sim.errors import InputError


def programs(device: torch.device, wanted: int) -> int:
    """How many programs to launch on `device`.

    Raises:
        InputError: the device is a CPU and the kernels are not interpreted.
    """
    if device.type == "cuda":  # pragma: cuda-only
        return wanted
    if not interpreted():
        raise InputError("Triton kernels on CPU tensors: set TRITON_INTERPRET=1 before the first import of triton")
    return 2  # the interpreter runs programs one after another; two are enough to go through all the code


@functools.cache
def kernels() -> ModuleType:
    """The module of kernels, imported when first needed: it needs triton. Importing in each launch takes a microsecond.

    Raises:
        InputError: triton is not installed.
    """
    try:
        from odc_kernels import kernels as module
    except ImportError as error:
        raise InputError(f"Triton kernels: {error}; install odc-toolkit[kernels]") from None
    return module


@functools.cache
def interpreted() -> bool:
    """Whether the kernels of this process run in Triton's interpreter, on CPU tensors. False without triton."""
    try:
        import triton
    except ImportError:
        return False
    return not isinstance(kernels().pull_kernel, triton.JITFunction)
