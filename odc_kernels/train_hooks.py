"""Stamps at the ends of a model's units, through public hooks of modules and tensors.

A layer's forward lies between a pre-hook that comes after FSDP2's, so that it starts when the parameters have been
waited for and copied out, and a forward hook. Its backward lies between a hook on the gradient of its output, after
FSDP2's for the same reason, and an identity on its input, whose backward comes before FSDP2 packs the gradients.
Recomputation is part of it; the forward hooks that it calls once more are ignored.

Of the root (unit 0): embedding, and head with loss, forward and backward. The host is at a unit from FSDP2's first hook
of it to FSDP2's last one.

On a CPU all of it takes 36 us of the host a layer and microbatch, next to 1-4 ms that FSDP2 takes.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from odc_kernels.train_recorder import Recorder

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class Hooks:
    """The hooks of a model, which stay with it. Attach them after `fully_shard`: what comes first depends on it."""

    def __init__(self, recorder: Recorder, root: nn.Module, layers: Sequence[nn.Module]) -> None:
        self._recorder = recorder
        self._backward = False
        self._last = len(layers)
        root.register_forward_pre_hook(self._root_reached, prepend=True)
        root.register_forward_pre_hook(self._root_ready)
        root.register_forward_hook(self._root_done, prepend=True)
        root.register_forward_hook(self._root_left)
        for unit, layer in enumerate(layers, 1):
            layer.register_forward_pre_hook(partial(self._layer_reached, unit), prepend=True, with_kwargs=True)
            layer.register_forward_pre_hook(partial(self._layer_ready, unit), with_kwargs=True)
            layer.register_forward_hook(partial(self._layer_done, unit), prepend=True)
            layer.register_forward_hook(partial(self._layer_left, unit))

    @property
    def _forward(self) -> bool:
        """Whether this is a forward that is recorded, and not recomputation."""
        return self._recorder.on and not self._backward

    # In the order in which a microbatch comes to them.

    def _root_reached(self, _root: nn.Module, _args: Args) -> None:
        self._backward = False
        if self._recorder.on:
            self._recorder.host_starts("forward", 0)

    def _root_ready(self, _root: nn.Module, _args: Args) -> None:
        if self._recorder.on:
            self._recorder.compute_starts()

    def _layer_reached(self, unit: int, _layer: nn.Module, args: Args, kwargs: Kwargs) -> None:
        if not self._forward:
            return
        if unit == 1:
            self._recorder.compute_ends("forward", 0)
            key = _hidden(args, kwargs)
            if key is not None:
                embedded = (args if isinstance(key, int) else kwargs)[key]  # type: ignore[index, call-overload]
                embedded.register_hook(self._embedding_backward_ready)
                embedded.grad_fn.register_hook(self._embedding_backward_done)
        self._recorder.host_starts("forward", unit)

    def _layer_ready(self, unit: int, _layer: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
        if not self._forward:
            return None
        key = _hidden(args, kwargs)
        done = partial(self._layer_backward_done, unit)
        if isinstance(key, int):
            args = (*args[:key], _Mark.apply(args[key], done), *args[key + 1 :])
        elif key is not None:
            kwargs = kwargs | {key: _Mark.apply(kwargs[key], done)}
        self._recorder.compute_starts()
        return args, kwargs

    def _layer_done(self, unit: int, _layer: nn.Module, _args: Args, output: Any) -> None:
        if self._forward:
            self._recorder.compute_ends("forward", unit, another_starts=unit == self._last)
            _first(output).register_hook(partial(self._layer_backward_reached, unit))

    def _layer_left(self, unit: int, _layer: nn.Module, _args: Args, output: Any) -> None:
        if self._forward:
            _first(output).register_hook(self._backward_ready)
            self._recorder.host_ends()
            if unit == self._last:
                self._recorder.host_starts("head_loss", 0)

    def _root_done(self, _root: nn.Module, _args: Args, loss: torch.Tensor) -> None:
        if self._recorder.on:
            self._recorder.compute_ends("head_loss", 0)
            loss.register_hook(self._root_backward_reached)

    def _root_left(self, _root: nn.Module, _args: Args, loss: torch.Tensor) -> None:
        if self._recorder.on:
            loss.register_hook(self._backward_ready)
            self._recorder.host_ends()

    def _root_backward_reached(self, _gradient: torch.Tensor) -> None:
        self._backward = True
        if self._recorder.on:
            self._recorder.host_starts("backward", 0)

    def _backward_ready(self, _gradient: torch.Tensor) -> None:
        if self._recorder.on:
            self._recorder.compute_starts()

    def _layer_backward_reached(self, unit: int, _gradient: torch.Tensor) -> None:
        if self._recorder.on:
            if unit == self._last:
                self._recorder.compute_ends("backward", 0)
            self._recorder.host_starts("backward", unit)

    def _layer_backward_done(self, unit: int) -> None:
        if self._recorder.on:
            self._recorder.compute_ends("backward", unit)

    def _embedding_backward_ready(self, _gradient: torch.Tensor) -> None:
        if self._recorder.on:
            self._recorder.host_starts("backward", 0)
            self._recorder.compute_starts()

    def _embedding_backward_done(self, _inputs: Any, _outputs: Any) -> None:
        if self._recorder.on:
            self._recorder.compute_ends("backward", 0)
            self._recorder.host_ends()


class _Mark(torch.autograd.Function):
    """An identity that calls a function when its backward comes."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
        ctx.call = call
        return value

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        ctx.call()
        return gradient, None


def _hidden(args: Args, kwargs: Kwargs) -> int | str | None:
    """Which input has a gradient: its place among the arguments, or its name."""
    for key, value in (*enumerate(args), *kwargs.items()):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            return key
    return None


def _first(output: Any) -> torch.Tensor:
    first: torch.Tensor = output if isinstance(output, torch.Tensor) else output[0]
    return first
