"""How a transfer and a matrix product slow each other when both go on at once.

Both go back to back, and only what lies within the time in which both were going is counted. Each is also timed alone,
in turn with both together, so that all three see the same clocks, power and temperature.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from odc_kernels.timing import Call, Interval, Marks, agree_max, estimate, plan, synchronize


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


def coinciding(transfers: Sequence[Interval], products: Sequence[Interval]) -> tuple[list[float], list[float]]:
    """Durations of the transfers and products that lie wholly within the time in which both kinds were going."""
    begin = max(transfers[0][0], products[0][0])
    end = min(transfers[-1][1], products[-1][1])

    def inside(intervals: Sequence[Interval]) -> list[float]:
        return [stop - start for start, stop in intervals if start >= begin and stop <= end]

    return inside(transfers), inside(products)


def time_beside(
    call: Call, gemm: Callable[[], None], device: torch.device, *, rounds: int = 5, gemms: int = 20, sample_s: float = 2e-4
) -> Beside:  # pragma: cuda-only
    """Time `call` on a stream of its own and `gemm` on the current one: each alone, then both together, in turn."""
    stream = torch.cuda.Stream(device, priority=-1)  # as FSDP2's own streams for transfers
    gemm_s = estimate(lambda _: gemm(), device)
    with torch.cuda.stream(stream):
        call_s = estimate(call, device)
    calls_each, _ = plan(call_s, sample_s=sample_s, samples=1, total_s=0)
    samples = max(5, math.ceil(gemms * gemm_s / (calls_each * call_s)))

    def sample(number: int) -> None:
        for i in range(calls_each):
            call(number * calls_each + i)

    times: dict[str, list[float]] = {name: [] for name in ("transfer_alone", "transfer_beside", "gemm_alone", "gemm_beside")}
    for _ in range(rounds):
        transfers, _ = _round(sample, samples, gemm, 0, stream, device)
        times["transfer_alone"] += [end - start for start, end in transfers]
        _, products = _round(sample, 0, gemm, gemms, stream, device)
        times["gemm_alone"] += [end - start for start, end in products]
        transfers, products = _round(sample, samples, gemm, gemms, stream, device)
        beside, products_beside = coinciding(transfers, products)
        times["transfer_beside"] += beside
        times["gemm_beside"] += products_beside
    calls = {"transfer_alone": calls_each, "transfer_beside": calls_each, "gemm_alone": 1, "gemm_beside": 1}
    medians = {f"{name}_s": statistics.median(times[name]) / calls[name] for name in times}
    return Beside(**{name: agree_max(value, device) for name, value in medians.items()})


def _round(
    sample: Call, samples: int, gemm: Callable[[], None], gemms: int, stream: torch.cuda.Stream, device: torch.device
) -> tuple[list[Interval], list[Interval]]:  # pragma: cuda-only
    """When each sample and each product ran, the first of each left out: the other kind was not yet under way."""
    transfer_marks, gemm_marks = Marks(device), Marks(device)
    synchronize(device)
    gemm_marks.mark()
    with torch.cuda.stream(stream):
        transfer_marks.mark()
    done = 0
    steps = max(gemms, 1)
    for step in range(1, steps + 1):
        if gemms:
            gemm()
            gemm_marks.mark()
        # Enqueued in turn, so that neither stream runs dry before the host comes back to it.
        with torch.cuda.stream(stream):
            while done < samples * step // steps:
                sample(done)
                transfer_marks.mark()
                done += 1
    synchronize(device)
    return transfer_marks.intervals_s(gemm_marks)[1:], gemm_marks.intervals_s(gemm_marks)[1:]
