"""What every stream of a rank does when: stamps while it runs, seconds after the minibatch.

`train_hooks` puts the stamps where a model's units begin and end.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from odc_kernels.fsdp_comm import Transfer
from odc_kernels.train_clock import Stamp, Stamps

COMPUTE_KINDS = ("forward", "backward", "head_loss")


class Record(NamedTuple):
    """A span whose ends are stamps; fields as in a timeline."""

    stream: str
    kind: str
    unit: int
    microbatch: int
    start: Stamp
    end: Stamp


class Row(NamedTuple):
    """A span in seconds of rank 0's clock."""

    stream: str
    kind: str
    unit: int
    microbatch: int
    start_s: float
    end_s: float


@dataclass(kw_only=True, slots=True)
class Recorded:
    """A minibatch of one rank."""

    start: Stamp
    end: Stamp
    device: list[Record] = field(default_factory=list)
    host: list[Record] = field(default_factory=list)
    """Stamps are seconds of the host's clock."""


class Recorder:
    """Spans of one rank, one minibatch at a time; nothing before `begin` and after `end`."""

    def __init__(self, device: torch.device, *, offset_s: float = 0.0, spans: bool = True) -> None:
        """`offset_s` is added to the host's clock. Without `spans` only a minibatch's ends are recorded."""
        self._stamps = Stamps(device)
        self._host = Stamps(torch.device("cpu"))
        self._offset_s = offset_s
        self._spans = spans
        self._recorded: Recorded | None = None
        self._microbatch = -1
        self._compute_start: Stamp | None = None
        self._host_at: tuple[str, int, Stamp] | None = None

    @property
    def on(self) -> bool:
        """Whether spans are recorded now."""
        return self._spans and self._recorded is not None

    def begin(self) -> None:
        """A minibatch starts now."""
        start = self._stamps.take()
        self._recorded = Recorded(start=start, end=start)

    def microbatch(self, number: int) -> None:
        """The forward of a microbatch comes next."""
        self._microbatch = number

    @contextmanager
    def span(self, kind: str) -> Iterator[None]:
        """The optimizer's step, or publish."""
        if not self.on:
            yield
            return
        start = self._stamps.take()
        yield
        self._add(Record("compute", kind, -1, -1, start, self._stamps.take()))

    def end(self) -> Recorded:
        """The minibatch ends when the work enqueued so far is done."""
        assert self._recorded is not None
        recorded, self._recorded = self._recorded, None
        recorded.end = self._stamps.take()
        return recorded

    def observe(self, kind: str, unit: int, transfer: Transfer) -> Transfer:
        """`transfer` with its spans recorded; `kind` is unshard or reduce."""
        return _Observed(self, kind, unit, transfer) if self._spans else transfer

    def resolve(self, recorded: Recorded) -> tuple[float, float, list[Row]]:
        """(start_s, end_s, spans) of a minibatch on rank 0's clock. Waits until the device has finished it."""
        stamps = [stamp for record in recorded.device for stamp in (record.start, record.end)]
        start_s, times_s = self._stamps.times_s(recorded.start, [*stamps, recorded.end], recorded.end)
        start_s += self._offset_s
        rows = [
            Row(*record[:4], start_s + times_s[2 * number], start_s + times_s[2 * number + 1])
            for number, record in enumerate(recorded.device)
        ]
        for *fields, begun_s, ended_s in recorded.host:
            rows.append(Row(*fields, begun_s + self._offset_s, ended_s + self._offset_s))
        return start_s, start_s + times_s[-1], rows

    # What hooks call, while it is on.

    def compute_starts(self) -> None:
        """The next kernel of the compute stream is a unit's own."""
        self._compute_start = self._stamps.take()

    def compute_ends(self, kind: str, unit: int, *, another_starts: bool = False) -> None:
        """The last one was; with `another_starts` the next one belongs to the next unit."""
        end = self._stamps.take()
        assert self._compute_start is not None
        self._add(Record("compute", kind, unit, self._microbatch, self._compute_start, end))
        self._compute_start = end if another_starts else None

    def host_starts(self, kind: str, unit: int) -> None:
        """The host begins to enqueue a unit, and is done with the one before."""
        self.host_ends()
        self._host_at = (kind, unit, self._host.take())

    def host_ends(self) -> None:
        """The host has enqueued a unit."""
        if self._host_at is not None:
            assert self._recorded is not None
            kind, unit, start = self._host_at
            self._recorded.host.append(Record("host", kind, unit, self._microbatch, start, self._host.take()))
            self._host_at = None

    def transfer(self, kind: str, unit: int, transfer: Transfer, *args: Any, **kwargs: Any) -> Any:
        """Call it between two stamps of the current stream."""
        start = self._stamps.take()
        result = transfer(*args, **kwargs)
        self._add(Record(kind, kind, unit, self._microbatch, start, self._stamps.take()))
        return result

    def _add(self, record: Record) -> None:
        assert self._recorded is not None
        self._recorded.device.append(record)


class _Observed:
    """A transfer that is recorded."""

    def __init__(self, recorder: Recorder, kind: str, unit: int, transfer: Transfer) -> None:
        self._recorder = recorder
        self._kind = kind
        self._unit = unit
        self._transfer = transfer

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The transfer's."""
        return self._transfer.allocate(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, **rest: Any
    ) -> Any:
        """The transfer, on the stream that FSDP2 runs it on."""
        arguments = {"output_tensor": output_tensor, "input_tensor": input_tensor, "group": group, **rest}
        if not self._recorder.on:
            return self._transfer(**arguments)
        return self._recorder.transfer(self._kind, self._unit, self._transfer, **arguments)
