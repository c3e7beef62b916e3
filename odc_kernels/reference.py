"""The same transfers as collectives of torch.distributed: what tests compare with, and what benchmarks race against."""

import torch
import torch.distributed as dist


def all_gather(output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """output [world_size * shard] = every rank's `shard`, in rank order. In place where shard is a slice of output."""
    dist.all_gather_into_tensor(output, shard, group=group)


def reduce_scatter(output: torch.Tensor, gradients: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """output [shard] = the sum over ranks of their gradients [world_size * shard], this rank's chunk of it."""
    dist.reduce_scatter_tensor(output, gradients, group=group)


def exact_reduce_scatter(gradients: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """This rank's chunk [shard] of the sum in fp64 of all ranks' gradients [world_size * shard].

    Exact for fp32 and bf16 gradients whose exponents lie within 2^29 of each other; else far below fp32's rounding.
    """
    total = gradients.double()
    dist.all_reduce(total, group=group)
    return total.view(dist.get_world_size(group), -1)[dist.get_rank(group)]
