"""Activation checkpointing that is cheap for the host: keep a block's input, run the block again in the backward.

`torch.utils.checkpoint` without reentrance sees every tensor that autograd saves, in Python: on small microbatches that
took the host as long as the block itself (benchmark: tests/kernels/test_recompute.py, marker bench). Here the first run
records nothing and the second one is an ordinary backward within the backward, inside of the FSDP unit: its parameters
are gathered before, and its gradients complete after. No random numbers are restored: blocks must have no dropout.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Block = Callable[..., torch.Tensor]


def recompute(block: Block, x: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
    """block(x, *others, **options), keeping `x` only; gradients flow to `x` and to parameters, not to the others."""
    if not torch.is_grad_enabled():
        return block(x, *others, **options)
    # The parameters want gradients also where `x` does not, as after a frozen embedding.
    anchor = torch.empty(0, requires_grad=True)
    result: torch.Tensor = _Recompute.apply(block, others, options, x, anchor)
    return result


def recompute_forward(module: nn.Module) -> None:
    """Make `module` recompute. Its first argument is the tensor that is kept, or the keyword `hidden_states`."""
    forward = module.forward

    def wrapped(*arguments: Any, **options: Any) -> torch.Tensor:
        if arguments:
            return recompute(forward, *arguments, **options)
        return recompute(forward, options.pop("hidden_states"), **options)

    module.forward = wrapped  # type: ignore[method-assign]


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, block: Block, others: tuple[Any, ...], options: dict[str, Any], x: torch.Tensor, anchor: torch.Tensor
    ) -> torch.Tensor:
        ctx.block, ctx.others, ctx.options = block, others, options
        ctx.save_for_backward(x)
        return block(x, *others, **options)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        again = x.detach().requires_grad_(x.requires_grad)
        with torch.enable_grad():
            result = ctx.block(again, *ctx.others, **ctx.options)
        if result.requires_grad:  # else all of it is frozen, and so is what came before
            torch.autograd.backward(result, gradients[0])
        return None, None, None, again.grad, None
