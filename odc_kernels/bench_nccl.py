"""NCCL at its best: with buffers it registered, and with copy-engine collectives, where the installed version has them.

Both need memory from NCCL's own allocator. NVLink multicast stays as the machine has it (NCCL_NVLS_ENABLE).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from odc_kernels.bench_cases import Buffers

# pragma: cuda-only (the whole file)

VARIANTS = ("nccl-registered", "nccl-symmetric", "nccl-copy-engine")


@contextmanager
def registered(variant: str, capacity: int, device: torch.device) -> Iterator[tuple[Buffers, dist.ProcessGroup]]:
    """Buffers registered with a communicator of their own, and its group.

    nccl-registered: ncclCommRegister. nccl-symmetric: registered as a symmetric window (NCCL 2.27). nccl-copy-engine:
    that, and the policy to use no multiprocessor where a copy engine can do it (NCCL 2.28).

    Raises AttributeError or TypeError where the installed torch cannot ask for it.
    """
    options = dist.ProcessGroupNCCL.Options()
    if variant == "nccl-copy-engine":
        options.config.cta_policy = dist.ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO
    group = dist.new_group(backend="nccl", pg_options=options, device_id=device)
    backend = group._get_backend(device)
    # The communicator must exist before memory is registered with it.
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        buffers = Buffers.allocate(capacity, device)
    if variant == "nccl-registered":
        backend.register_mem_pool(pool)
    else:
        backend.register_mem_pool(pool, symm=True)
    yield buffers, group
    torch.cuda.synchronize(device)
    dist.barrier()
    backend.deregister_mem_pool(pool)
