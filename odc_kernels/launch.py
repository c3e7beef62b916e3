"""What gather and scatter_accumulate need to launch their kernels, compiled or interpreted."""

import torch
import triton

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


def interpreted() -> bool:
    """Whether the kernels of this process run in Triton's interpreter, on CPU tensors."""
    from odc_kernels.kernels import pull_kernel

    return not isinstance(pull_kernel, triton.JITFunction)
