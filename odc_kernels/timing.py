"""Timing of transfers as the field does it.

Results are checked before anything is timed (bench.py); warm up; rotate the buffers past the L2; a barrier before each
round; on GPUs CUDA events, never the host's clock; ranks agree on every count, since each deriving its own from its own
clock makes them issue different numbers of collectives and hang; p20, p50, p80; the slowest rank counts.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist

Call = Callable[[int], None]
"""Enqueues one transfer on the current stream; the number says which of the rotated buffers to use."""

Interval = tuple[float, float]
"""(start_s, end_s)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Seconds of one call, over the samples of the slowest rank."""

    p20_s: float
    p50_s: float
    p80_s: float
    samples: tuple[float, ...]


class Marks:
    """Moments on the current stream of a device; on a CPU, of the host, by its `clock`."""

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._device = device
        self._clock = clock
        self._marks: list[torch.cuda.Event | float] = []

    def mark(self) -> None:
        """Note the moment at which the work enqueued so far is done."""
        if self._device.type == "cuda":  # pragma: cuda-only
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(self._clock())

    def reached(self) -> bool:
        """Whether the device has already come to the last mark; a CPU, which is its own host, never has."""
        last = self._marks[-1]
        return not isinstance(last, float) and last.query()

    def times_s(self, origin: "Marks") -> list[float]:
        """Seconds of each mark after the first one of `origin`. Synchronize the device before."""
        first = origin._marks[0]
        if isinstance(first, float):
            return [mark - first for mark in self._marks if isinstance(mark, float)]
        return [first.elapsed_time(mark) * 1e-3 for mark in self._marks]  # pragma: cuda-only

    def intervals_s(self, origin: "Marks") -> list[Interval]:
        """The stretches between one mark and the next."""
        return list(pairwise(self.times_s(origin)))


def agree_max(value: float, device: torch.device) -> float:
    """The largest of all ranks' values, the same on every rank."""
    box = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(box, op=dist.ReduceOp.MAX)
    return float(box.item())


def synchronize(device: torch.device) -> None:
    """Finish the device's work, come together, and finish the barrier's own."""
    for step in (lambda: None, dist.barrier):
        step()
        if device.type == "cuda":  # pragma: cuda-only
            torch.cuda.synchronize(device)


def time_alone(
    call: Call, device: torch.device, *, samples: int = 100, sample_s: float = 3e-4, total_s: float = 0.5
) -> Timing:
    """Time `call` back to back, each sample long enough (`sample_s`) for the clock, about `total_s` in all."""
    calls_each, samples = plan(estimate(call, device), sample_s=sample_s, samples=samples, total_s=total_s)
    for number in range(samples * calls_each):  # an untimed pass, which touches all the memory that the timed one does
        call(number)
    marks = Marks(device)
    synchronize(device)
    marks.mark()
    for number in range(samples * calls_each):
        call(number)
        if (number + 1) % calls_each == 0:
            marks.mark()
    synchronize(device)
    own = [(end - start) / calls_each for start, end in marks.intervals_s(marks)]
    ranks: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(ranks, own)
    return summarize([max(times) for times in zip(*ranks, strict=True)])


def estimate(call: Call, device: torch.device, *, calls: int = 5) -> float:
    """Seconds of one call on the slowest rank, after a warm-up, the same number on every rank."""
    for number in range(calls):
        call(number)
    marks = Marks(device)
    synchronize(device)
    marks.mark()
    for number in range(calls):
        call(number)
    marks.mark()
    synchronize(device)
    ((start, end),) = marks.intervals_s(marks)
    return agree_max((end - start) / calls, device)


def plan(call_s: float, *, sample_s: float, samples: int, total_s: float) -> tuple[int, int]:
    """(calls in a sample, samples): samples of at least `sample_s`, as many as fit into `total_s`, at least 5."""
    calls_each = max(1, math.ceil(sample_s / call_s))
    return calls_each, max(5, min(samples, int(total_s / (calls_each * call_s))))


def summarize(samples: Sequence[float]) -> Timing:
    """Percentiles by linear interpolation."""
    cuts = statistics.quantiles(samples, n=10, method="inclusive")
    return Timing(p20_s=cuts[1], p50_s=cuts[4], p80_s=cuts[7], samples=tuple(samples))
