"""What FSDP2 calls in place of all_gather and reduce_scatter: one-sided reads and additions.

Neither waits for another rank. Both run on the streams FSDP2 gives them, so its own events order everything else.
"""

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from odc_kernels.fsdp_layout import Unit
from odc_kernels.gather import gather, prepare
from odc_kernels.scatter_accumulate import prepare_overwrite, scatter_accumulate
from odc_kernels.signals import Signals
from odc_kernels.window import Window
from odc_sim.errors import InputError


class Transfer(Protocol):
    """What FSDP2 calls in place of all_gather or reduce_scatter."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """FSDP2's buffer."""
        ...

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, **rest: Any
    ) -> Any:
        """Enqueue it on the current stream."""
        ...


Observe = Callable[[str, Sequence[FSDPModule], Transfer], Transfer]
"""Given "unshard" or "reduce", a unit's modules and its transfer: what FSDP2 is to call in its place."""


class Drift:
    """Whether what FSDP gathers is what was published: compared in every unit's first gather of a minibatch, and in the
    first one outside of minibatches.

    The results stay on the device until the end of the minibatch, so no gather waits for the host.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        device = units[0].device
        self._differs = torch.zeros(len(units), dtype=torch.bool, device=device)
        self._compared = [False] * len(units)
        self._found: str | None = None
        """In gathers before this minibatch."""
        self._aside = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._last: torch.cuda.Event | None = None
        """Behind the last comparison."""

    def compare(self, number: int, shard: torch.Tensor, published: torch.Tensor) -> None:
        """Check unit `number`, and enqueue the comparison bit by bit, unless done in this minibatch.

        Raises:
            InputError: a module has another parameter than when OnDemand was opened. (FSDP would use the old one.)
        """
        if self._compared[number]:
            return
        for known in self._units[number].shards:
            if known.owner._parameters.get(known.attribute) is not known.parameter:
                raise InputError(
                    f"{known.name} was replaced after OnDemand was opened; close it, and open it again after"
                )
        self._compared[number] = True
        # As integers NaN is equal to itself; wide ones are read at full speed.
        bits = torch.int64
        if shard.nbytes % 8:
            bits = torch.int16 if shard.dtype.itemsize == 2 else torch.int32
        torch.any(shard.view(bits) != published.view(bits), dim=0, out=self._differs[number])
        if self._aside is not None:  # pragma: cuda-only
            self._last = torch.cuda.current_stream(shard.device).record_event()

    def problem(self) -> str | None:
        """Which units differ. Waits for the last comparison, not for what the device does since."""
        if self._found or not any(self._compared):
            return self._found
        if self._aside is not None:  # pragma: cuda-only
            assert self._last is not None
            self._aside.wait_event(self._last)
        with torch.cuda.stream(self._aside):
            differs = self._differs.tolist()
        names = [unit.name for unit, unit_differs in zip(self._units, differs, strict=True) if unit_differs]
        if not names:
            return None
        return (
            f"parameters of {', '.join(names)} are not what was published: replaced, sharded anew, or changed without "
            "publish()"
        )

    def again(self) -> bool:
        """A minibatch begins: forwards for evaluation do not stand for its own. Whether there were any."""
        self._found = self.problem()
        some = any(self._compared)
        self._compared = [False] * len(self._units)
        return some

    def restart(self) -> None:
        """Parameters have been published."""
        self._found = None
        self._compared = [False] * len(self._units)
        self._differs.zero_()


class Gather:
    """The all_gather of one unit: reads the peers' published shards; FSDP has put the own one in place."""

    def __init__(self, unit: Unit, number: int, window: Window, offset: int, drift: Drift, signals: Signals) -> None:
        self._name = unit.name
        self._numel = unit.numel
        self._number = number
        self._window = window
        self._offset = offset
        self.published = window.local[offset : offset + unit.numel]
        """Where this rank shows its own shard."""
        self._drift = drift
        self._signals = signals
        self._copies = prepare(window, unit.numel, offset)
        self.allowed = True
        """Cleared while what is published is out of date."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """FSDP's buffer for the whole unit."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Enqueue the reads on the current stream."""
        if not self.allowed:
            raise InputError(f"{self._name}: got a forward between end_of_minibatch() and publish(); publish first")
        if input_tensor.numel() != self._numel or input_tensor.dtype != self._window.dtype:
            if group.size() != self._window.world_size:
                raise InputError(
                    f"{self._name} is gathered over {group.size()} ranks, expected {self._window.world_size}: "
                    "fully_shard(reshard_after_forward=<int>) is not supported, use True or False"
                )
            raise InputError(
                f"{self._name}: got a shard of {input_tensor.numel()} x {input_tensor.dtype}, expected {self._numel} x "
                f"{self._window.dtype} as published: its parameters were replaced or sharded anew; open OnDemand after"
            )
        self._signals.transfer()
        self._drift.compare(self._number, input_tensor, self.published)
        copies, fits = self._copies, output_tensor.numel() == self._numel * self._window.world_size
        if copies is None or not fits or not copies.read(output_tensor.data_ptr()):
            gather(self._window, output_tensor, offset=self._offset, skip_self=True)


class Push:
    """The reduce_scatter of one unit: adds each rank's part to that rank's accumulator.

    What FSDP takes for the result is a piece of its own input, which nobody reads: gradients come from `OnDemand`.
    """

    def __init__(
        self,
        unit: Unit,
        window: Window,
        offset: int,
        signals: Signals,
        *,
        scale: float,
        deterministic: bool,
        replicated: bool,
    ) -> None:
        """`scale`: of what is added; in the deterministic layout the drain scales."""
        self._name = unit.name
        self._numel = sum(shard.numel for shard in unit.trained)
        self._window = window
        self._offset = offset
        self._signals = signals
        self._scale = 1.0 if deterministic else scale
        self._deterministic = deterministic
        self._replicated = replicated
        self._copies = prepare_overwrite(window, self._numel, offset) if deterministic else None
        self._input: torch.Tensor | None = None
        self._sent: weakref.ref[torch.Tensor] | None = None
        self._stream: torch.cuda.Stream | None = None
        self.pushed = False
        """Whether this rank pushed since it was last cleared."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """FSDP asks for the input, then for the output."""
        numel = math.prod(size)
        whole, self._input = self._input, None
        if whole is not None and whole.numel() == numel * self._window.world_size:
            # FSDP keeps the output of replicated models, and may add to it after close().
            return torch.zeros(1, dtype=dtype, device=device) if self._replicated else whole[:numel]
        self._input = torch.empty(*size, dtype=dtype, device=device)
        return self._input

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Enqueue the additions on the current stream."""
        numel = input_tensor.numel() // self._window.world_size
        if numel != self._numel:
            raise InputError(
                f"{self._name}: got gradients of {numel} elements, expected {self._numel}: a parameter got none (torch "
                "2.13 fills in zeros; before, let the loss depend on each, if only times zero), or requires_grad "
                "changed after OnDemand was opened"
            )
        if input_tensor.dtype not in (torch.float32, torch.bfloat16):
            raise InputError(f"{self._name}: got reduce_dtype {input_tensor.dtype}, expected fp32 or bf16")
        self._stream = self._signals.transfer()
        overwrite = self._deterministic and not self.pushed
        if not (overwrite and self._overwrite(input_tensor)):
            scatter_accumulate(
                self._window,
                input_tensor,
                offset=self._offset,
                scale=self._scale,
                deterministic=self._deterministic,
                overwrite=overwrite,
                lean=not overwrite,  # an addition runs beside the next layer's backward; what overwrites is a copy
            )
        self.pushed = True
        self._sent = weakref.ref(input_tensor)

    def _overwrite(self, gradients: torch.Tensor) -> bool:
        """The first push of a minibatch, prepared; False where it is not."""
        copies, window = self._copies, self._window
        if copies is None or gradients.dtype != window.dtype or not copies.write(gradients.data_ptr()):
            return False
        own = gradients[window.rank * self._numel : (window.rank + 1) * self._numel]
        window.write(own, window.rank, self._offset + window.rank * (window.numel // window.world_size))
        return True

    def forget_input(self) -> None:
        """Give the last input's memory back as soon as it is pushed. FSDP keeps that of the last unit of a backward,
        the root, until the next one if it is not told to wait for it."""
        sent = None if self._sent is None else self._sent()
        self._sent = None
        if sent is None:
            return
        if self._stream is not None:  # pragma: cuda-only
            sent.record_stream(self._stream)  # else it would be reused in the order of the stream that allocated it
        sent.untyped_storage().resize_(0)

    @torch.no_grad()
    def fill_slots(self) -> None:
        """Without a push in this minibatch, replace what the slots hold of an earlier one by zeros."""
        if self.pushed or not self._deterministic:
            return
        window = self._window
        start = self._offset + window.rank * (window.numel // window.world_size)
        for peer in window.peers:
            assert peer is not None
            peer[start : start + self._numel].zero_()


class StockGather:
    """The collective, for modules that go back to it."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """FSDP's buffer for the whole unit."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        """Gather, as FSDP2 does by default."""
        function = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name from torch 2.13 on
        return function(output_tensor, input_tensor, group=group, async_op=async_op)


class StockReduceScatter:
    """The collective, for modules that go back to it."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """FSDP's input or output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Reduce, as FSDP2 does by default."""
        function = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
        return function(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
