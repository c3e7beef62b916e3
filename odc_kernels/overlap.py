"""How a transfer and a matrix product slow each other when both go on at once.

Products run back to back without a pause through three phases; in the middle one, transfers run back to back on another
stream. Products of the first and last phase are "alone", those within the transfers' time "beside"; taking the phases
before and after cancels a steady drift of the clocks. Timing the products alone in a run of their own will not do:
after a pause a GPU clocks higher for a while, and whatever is timed second looks slowed (by 9 % on an H200). For the
same reason everything starts with a quarter of a second of products that are not counted.

Means, not medians: a kernel beside products runs at once or waits for one to end, and only the mean of such times says
how many go through in a second.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from odc_kernels.timing import Call, Interval, Marks, agree_max, estimate, synchronize


@dataclass(frozen=True, kw_only=True, slots=True)
class Beside:
    """Seconds of one transfer and one product, alone and beside each other, on the slowest rank."""

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
    def compute_lost_s(self) -> float:
        """Compute that one transfer costs: the part of the transfer's time by which the products fell behind."""
        return self.transfer_beside_s * (1 - self.gemm_alone_s / self.gemm_beside_s)

    @property
    def flagged(self) -> bool:
        """A slowdown below 1 is a measuring error: nothing gets faster from sharing."""
        return self.slowdown_transfer < 1 or self.slowdown_compute < 1


class Means(NamedTuple):
    """Mean seconds each; None where there were none."""

    transfer_beside_s: float | None
    product_beside_s: float | None
    product_alone_s: float | None


def split(transfers: Sequence[Interval], products: Sequence[Interval], *, guard_s: float) -> Means:
    """What ran beside what. Beside: wholly within the time in which both kinds were going; alone: wholly outside it.

    Products within `guard_s` of either end of that time are neither: other ranks begin and end earlier or later.
    """
    first, last = transfers[0][0], transfers[-1][1]
    begin, end = max(first, products[0][0]), min(last, products[-1][1])
    beside = [interval for interval in transfers if interval[0] >= begin and interval[1] <= end]
    products_beside = [p for p in products if p[0] >= begin + guard_s and p[1] <= end - guard_s]
    before = _mean([p for p in products if p[1] <= first - guard_s])
    after = _mean([p for p in products if p[0] >= last + guard_s])
    sides = [side for side in (before, after) if side is not None]
    return Means(_mean(beside), _mean(products_beside), statistics.mean(sides) if sides else None)


def _mean(intervals: Sequence[Interval]) -> float | None:
    return statistics.mean(stop - start for start, stop in intervals) if intervals else None


def product(size: int, device: torch.device) -> Callable[[], None]:
    """The compute beside transfers: a square bf16 matrix product of random numbers."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return partial(torch.mm, a, b, out=torch.empty_like(a))


def time_beside(
    call: Call, gemm: Callable[[], None], device: torch.device, *, rounds: int = 5, phase_s: float = 0.03
) -> Beside:  # pragma: cuda-only
    """Time `call` on a stream of its own and `gemm` on the current one, in phases of about `phase_s` seconds."""
    stream = torch.cuda.Stream(device, priority=-1)  # as FSDP2's own streams for transfers
    with torch.cuda.stream(stream):
        call_s = estimate(call, device)
    transfers, _ = _run(call, math.ceil(phase_s / call_s), gemm, 0, stream, device)
    alone_s = agree_max(statistics.median(stop - start for start, stop in transfers), device)
    gemms = math.ceil(phase_s / estimate(lambda _: gemm(), device))
    for _ in range(8 * gemms):
        gemm()
    beside_s = alone_s
    found: list[Means] = []
    for number in range(rounds + 1):
        calls = max(8, math.ceil(phase_s / beside_s))
        means = split(*_run(call, calls, gemm, gemms, stream, device), guard_s=phase_s / 10)
        if number > 0 and None not in means:  # the first round served to learn how many calls fill a phase
            found.append(means)
        beside_s = agree_max(means.transfer_beside_s or beside_s, device)
    # together, or the others would wait for this rank in the next agreement
    if agree_max(float(not found), device):
        raise RuntimeError("no product ran wholly beside transfers: the host enqueues too slowly for both")
    transfer_s, product_s, product_alone_s = (
        agree_max(statistics.median(values), device) for values in zip(*found, strict=True)
    )
    return Beside(
        transfer_alone_s=alone_s,
        transfer_beside_s=transfer_s,
        gemm_alone_s=product_alone_s,
        gemm_beside_s=product_s,
    )


def _run(
    call: Call, calls: int, gemm: Callable[[], None], gemms: int, stream: torch.cuda.Stream, device: torch.device
) -> tuple[list[Interval], list[Interval]]:  # pragma: cuda-only
    """When each call and each product ran; `gemms` products a phase."""
    transfer_marks, gemm_marks = Marks(device), Marks(device)
    synchronize(device)
    gemm_marks.mark()
    for _ in range(gemms):
        gemm()
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
