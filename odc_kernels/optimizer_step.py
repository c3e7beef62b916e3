"""Clip and step, as `odc train` does and `odc calibrate` times it."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


def clip_and_step(
    parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer, max_norm: float
) -> torch.Tensor:
    """Clip the gradients to `max_norm` (0: not at all) and step; the norm before, fp32 []. Collective.

    The norm is summed over ranks once, before anything is scaled by it: `clip_grad_norm_` leaves it a DTensor of
    partial sums, which every single gradient then sums up anew.
    """
    norm = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if max_norm > 0:
        clip_grads_with_norm_(parameters, max_norm, norm)
    optimizer.step()
    return norm.float()
