"""How a transfer and a matrix product slow each other when both go on at once.

Products run back to back without a pause through three phases; in the middle one, transfers run back to back on another
stream. Products of the first and last phase are "alone", those within the transfers' time "beside". Timing the products
alone in a run of their own will not do: after a pause a GPU clocks higher for a while, and whatever is timed second
looks slowed (by 9 % on an H200).
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from odc_kernels.timing import Call, Interval, Marks, agree_max, estimate, synchronize


@dataclass(frozen=True, kw_only=True, slots=True)
class Beside:
    """Seconds of one transfer and one product, alone and beside each other: medians of the slowest rank."""

    transfer_alone_s: float
    transfer_beside_s: float
    gemm_alone_s: float
    gemm_beside_s: float

    @property
    def slowdown_transfer(self) -> float:
        """How many times longer the transfer takes beside the product."""
        return self.transfer_beside_s / self.transfer_alone_s

    @property
    def slowdown_compute(self) -> float:
        """How many times longer the product takes beside the transfer."""
        return self.gemm_beside_s / self.gemm_alone_s

    @property
    def flagged(self) -> bool:
        """A slowdown below 1 is a measuring error: nothing gets faster from sharing."""
        return self.slowdown_transfer < 1 or self.slowdown_compute < 1


class Durations(NamedTuple):
    """Seconds each."""

    transfers_beside: list[float]
    products_beside: list[float]
    products_alone: list[float]


def split(transfers: Sequence[Interval], products: Sequence[Interval]) -> Durations:
    """What ran beside what. Beside: wholly within the time in which both kinds were going; alone: wholly outside it.

    The product next to either end of that time is neither: other ranks begin and end a little earlier or later.
    """
    begin = max(transfers[0][0], products[0][0])
    end = min(transfers[-1][1], products[-1][1])
    before = [stop - start for start, stop in products if stop <= transfers[0][0]][:-1]
    after = [stop - start for start, stop in products if start >= transfers[-1][1]][1:]

    def inside(intervals: Sequence[Interval]) -> list[float]:
        return [stop - start for start, stop in intervals if start >= begin and stop <= end]

    return Durations(inside(transfers), inside(products), before + after)


def time_beside(
    call: Call, gemm: Callable[[], None], device: torch.device, *, rounds: int = 4, phase_s: float = 0.03
) -> Beside:  # pragma: cuda-only
    """Time `call` on a stream of its own and `gemm` on the current one, in phases of about `phase_s` seconds."""
    stream = torch.cuda.Stream(device, priority=-1)  # as FSDP2's own streams for transfers
    gemms = math.ceil(phase_s / estimate(lambda _: gemm(), device))
    with torch.cuda.stream(stream):
        call_s = estimate(call, device)
    alone: list[float] = []
    beside = Durations([], [], [])
    for number in range(rounds + 1):
        calls = max(8, math.ceil(phase_s / call_s))
        transfers, _ = _run(call, calls, gemm, 0, stream, device)
        alone += [stop - start for start, stop in transfers[1:]]
        found = split(*_run(call, calls, gemm, gemms, stream, device))
        call_s = agree_max(statistics.median(found.transfers_beside or [call_s]), device)
        if number > 0:  # the first one served to learn how many calls fill a phase
            beside = Durations(*(old + new for old, new in zip(beside, found, strict=True)))
    medians = {
        "transfer_alone_s": statistics.median(alone),
        "transfer_beside_s": statistics.median(beside.transfers_beside),
        "gemm_alone_s": statistics.median(beside.products_alone),
        "gemm_beside_s": statistics.median(beside.products_beside),
    }
    return Beside(**{name: agree_max(seconds, device) for name, seconds in medians.items()})


def _run(
    call: Call, calls: int, gemm: Callable[[], None], gemms: int, stream: torch.cuda.Stream, device: torch.device
) -> tuple[list[Interval], list[Interval]]:  # pragma: cuda-only
    """When each call and each product ran; `gemms` products a phase, the first half of the first phase not counted."""
    transfer_marks, gemm_marks = Marks(device), Marks(device)
    synchronize(device)
    for number in range(gemms):
        if number == gemms // 2:
            gemm_marks.mark()
        gemm()
        if number >= gemms // 2:
            gemm_marks.mark()
    if not gemms:
        gemm_marks.mark()
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        transfer_marks.mark()
    done, steps = 0, max(gemms, 1)
    for step in range(1, 2 * steps + 1):
        if gemms:
            gemm()
            gemm_marks.mark()
        # Enqueued in turn, so that neither stream runs dry before the host comes back to it.
        with torch.cuda.stream(stream):
            while done < min(calls, calls * step // steps):
                call(done)
                transfer_marks.mark()
                done += 1
    synchronize(device)
    return transfer_marks.intervals_s(gemm_marks), gemm_marks.intervals_s(gemm_marks)
