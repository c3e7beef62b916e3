"""Timing of compute and copies in the state that training has.

The device is at work without a pause, first untimed with what is timed next, since it clocks higher after a rest; all
ranks measure at once; the host is ahead of the device, so that kernels and not their launches are timed (the host has a
measurement of its own); CUDA events; medians.
Everything is measured twice, the second time in reverse order when all else has been measured: what differs then, or
is noisy, is measured a third time, and flagged if that agrees with neither.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist

from odc_kernels.overlap import product
from odc_kernels.timing import Marks, agree_max, estimate, summarize, synchronize
from odc_sim.fits import steady

Step = Callable[[], None]
"""Enqueues one thing to time."""

PRODUCT_SIZE = {"cuda": 4096, "cpu": 256}
LONG_S = 0.2
"""What takes longer keeps the device busy by itself, and the host ahead: few samples do."""
LONG_LEAD_S = 0.01
"""Of other work before each round of those, or the first step's time would begin before the host has launched it."""
FIRST_S = 4.0
"""What took less the first time, with all that is set up then, is tried once more to learn what it takes."""
MOST_LATE, LONGEST_LEAD_S = 0.2, 0.5
"""In what part of a pass the device may have waited for the host, and the lead beyond which nothing more is tried."""
WARM_S = 0.12
"""Of untimed rounds, with their leads, before the timed ones: a GPU's clock follows what it has been doing."""
HEAT_S = 0.5
"""Of products before a group of measurements."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """How long to measure, and what counts as steady."""

    budget_s: float
    """For one item in one pass."""
    limit_s: float
    """What would take longer, once, is left out."""
    most: int
    """Samples in one pass."""
    spread: float
    """80th over 20th percentile."""
    drift: float
    """Between two passes, as a fraction."""
    resolution_s: float = 5e-6
    """Smaller differences count as none: events are no finer, with the launches between them."""

    def steady(self, a: Sequence[float], b: Sequence[float]) -> bool:
        """Whether two passes are quiet and agree."""
        return steady(a, b, spread=self.spread, drift=self.drift, resolution_s=self.resolution_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """Steps that are timed together, one after another; `make` prepares them anew in each pass."""

    name: str
    make: Callable[[], Sequence[Step]]
    work: float
    """In any unit, the same for all items measured together: it tells how long the next item will take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """Seconds of one step."""

    samples: tuple[float, ...]
    """Of the two passes that agree best."""
    passes_s: tuple[float, float]
    """Their medians."""
    flagged: bool

    @property
    def percentiles(self) -> dict[str, float | int]:
        """p20_s, p50_s, p80_s and samples, as calibration.json has them."""
        found = summarize(self.samples)
        return {"p20_s": found.p20_s, "p50_s": found.p50_s, "p80_s": found.p80_s, "samples": len(self.samples)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How an item is timed in each pass, the same on every rank."""

    untimed: int
    """Rounds before those that are timed."""
    samples: int
    long: bool
    """It keeps the host ahead by itself."""
    lead_s: float
    """Other work that the device gets before each round, for the host to get ahead."""
    clock: Callable[[], float]
    """Of a CPU."""


class Pace:
    """This rank's device, kept at work."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._product = product(PRODUCT_SIZE[device.type], device)
        self.product_s = estimate(lambda _: self._product(), device, calls=20)
        self._work, self._work_s = self._product, self.product_s

    @contextmanager
    def leading_with(self, work: Step | None) -> Iterator[None]:
        """Give the host its lead by `work` in place of products, which clock a GPU down. Collective.

        Layers of 8,192 tokens took 9 % longer behind products than behind layers, as in training
        (reports/validation-h200).
        """
        if work is not None and self.device.type == "cuda":  # pragma: cuda-only
            self._work, self._work_s = work, estimate(lambda _: work(), self.device, calls=3)
        try:
            yield
        finally:
            self._work, self._work_s = self._product, self.product_s

    def heat(self, seconds: float = HEAT_S) -> None:
        """Products for about so long; a CPU is as warm as it gets."""
        if self.device.type == "cuda":  # pragma: cuda-only
            self._lead(seconds)
            torch.cuda.synchronize(self.device)

    def warm_up(self, steps: Sequence[Step]) -> None:
        """Run steps for the first time, with all that is loaded and compiled then, and heat the device."""
        self.once(steps)
        self.heat()

    def once(self, steps: Sequence[Step]) -> tuple[float, float]:
        """(seconds of all steps, seconds the host took to enqueue them), on this rank alone."""
        self._finish()
        start = time.perf_counter()
        for step in steps:
            step()
        enqueued = time.perf_counter()
        self._finish()
        return time.perf_counter() - start, enqueued - start

    def rounds(self, steps: Sequence[Step], plan: "Plan") -> tuple[list[list[float]], float]:
        """Seconds [steps][samples] of this rank, and in what part of them the host was late in spite of its lead."""
        count, late = plan.samples, 0
        synchronize(self.device)
        marks = Marks(self.device, plan.clock)
        for number in range(-plan.untimed, count):
            started = self._lead(plan.lead_s) if self.device.type == "cuda" else None
            for step in steps:
                if number >= 0:
                    marks.mark()
                step()
            if number >= 0:
                marks.mark()
                late += started is not None and started.query()
        synchronize(self.device)
        times, width = marks.times_s(marks), len(steps) + 1
        seconds = [
            [max(times[r * width + i + 1] - times[r * width + i], 1e-9) for r in range(count)]
            for i in range(len(steps))
        ]
        return seconds, late / count

    def lead_s(self, seconds: float) -> float:
        """What a lead of so long takes, in whole pieces of work."""
        return self._lead_calls(seconds) * self._work_s

    def _lead_calls(self, seconds: float) -> int:
        return math.ceil(seconds / self._work_s)

    def _finish(self) -> None:
        if self.device.type == "cuda":  # pragma: cuda-only
            torch.cuda.synchronize(self.device)

    def _lead(self, seconds: float) -> torch.cuda.Event | None:  # pragma: cuda-only
        """Other work; what is returned has happened when the device is through with it. None: there is no such work."""
        if seconds <= 0:
            return None
        for _ in range(self._lead_calls(seconds)):
            self._work()
        end = torch.cuda.Event()
        end.record()
        return end


def over_ranks(own: list[list[float]], how: Literal["mean", "max"]) -> list[list[float]]:
    """[steps][count] of every rank made one, sample by sample; the same on every rank."""
    ranks: list[list[list[float]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(ranks, own)
    merge = statistics.mean if how == "mean" else max
    return [[merge(times) for times in zip(*series, strict=True)] for series in zip(*ranks, strict=True)]


def measure(
    items: Sequence[Item],
    pace: Pace,
    effort: Effort,
    *,
    how: Literal["mean", "max"],
    say: Callable[[str], None],
    communicates: bool = False,
) -> tuple[dict[str, list[Timed]], list[str]]:
    """For each item's name its steps, timed; and in words what was left out. Collective; the same on every rank.

    Items come in order of work. What does not fit into the device's memory, or would take too long by what the item
    before took, is left out. On a CPU the time that this thread was at work counts, whatever other programs there are;
    where steps communicate, the time of day.
    """
    found: dict[str, list[list[list[float]]]] = {}
    plans: dict[str, Plan] = {}
    left_out: list[str] = []
    rate_s = 0.0
    if items:
        pace.warm_up(items[0].make())
    for item in items:
        say(item.name)
        if rate_s * item.work > effort.limit_s:
            left_out.append(f"{item.name}: would take about {rate_s * item.work:.0f} s each time")
            continue
        surveyed = _survey(item, pace)
        if surveyed is None:
            left_out.append(f"{item.name}: out of memory")
            continue
        total_s, lead_s = surveyed
        rate_s = total_s / item.work
        plans[item.name] = _plan(total_s, lead_s, effort, pace.device, communicates)
        found[item.name] = [_one_pass(item, pace, plans[item.name], how)]
    measured = [item for item in items if item.name in found]
    for item in reversed(measured):
        say(f"{item.name}, again")
        found[item.name].append(_one_pass(item, pace, plans[item.name], how))
    for item in measured:
        if any(_timed(series, effort).flagged for series in zip(*found[item.name], strict=True)):
            say(f"{item.name}, a third time")
            found[item.name].append(_one_pass(item, pace, plans[item.name], how))
    timed = {name: [_timed(series, effort) for series in zip(*passes, strict=True)] for name, passes in found.items()}
    return timed, left_out


def _survey(item: Item, pace: Pace) -> tuple[float, float] | None:
    """(seconds, lead the host needs) of the slowest rank, or None where a rank has too little memory.

    Ranks agree after each time, since steps may communicate.
    """
    device = pace.device
    total_s = host_s = 0.0
    steps: Sequence[Step] = ()
    failed = False
    try:
        steps = item.make()
        total_s, _ = pace.once(steps)
    except torch.OutOfMemoryError:  # pragma: cuda-only
        failed = True
    if agree_max(float(failed), device):  # pragma: cuda-only
        torch.cuda.empty_cache()
        return None
    total_s = agree_max(total_s, device)
    if total_s < FIRST_S:
        total_s, host_s = (agree_max(value, device) for value in pace.once(steps))
    behind = device.type == "cuda" and total_s < 3 * host_s
    return max(total_s, 1e-9), pace.lead_s(1.5 * host_s) if behind else 0.0


def _plan(total_s: float, lead_s: float, effort: Effort, device: torch.device, communicates: bool) -> Plan:
    long = total_s >= LONG_S
    # a CPU does not clock higher for having rested
    untimed = min(200, math.ceil(WARM_S / (lead_s + total_s))) if device.type == "cuda" else int(not long)
    return Plan(
        untimed=untimed,
        samples=2 if long else max(3, min(effort.most, int(effort.budget_s / total_s))),
        lead_s=max(lead_s, LONG_LEAD_S) if long else lead_s,
        long=long,
        clock=time.perf_counter if communicates else time.thread_time,
    )


def _one_pass(item: Item, pace: Pace, plan: Plan, how: Literal["mean", "max"]) -> list[list[float]]:
    """Once more with twice the lead, while the device has often been waiting for the host."""
    steps = item.make()
    while True:
        seconds, late = pace.rounds(steps, plan)
        if plan.long or plan.lead_s > LONGEST_LEAD_S or agree_max(late, pace.device) <= MOST_LATE:
            return over_ranks(seconds, how)
        plan = replace(plan, lead_s=2 * plan.lead_s)


def _timed(passes: Sequence[Sequence[float]], effort: Effort) -> Timed:
    """Of the two passes that agree best, since only they can have been undisturbed."""
    medians = [statistics.median(samples) for samples in passes]
    pairs = [(i, j) for i in range(len(passes)) for j in range(i)]
    i, j = min(pairs, key=lambda pair: abs(math.log(medians[pair[0]] / medians[pair[1]])))
    return Timed(
        samples=(*passes[j], *passes[i]),
        passes_s=(medians[j], medians[i]),
        flagged=not effort.steady(passes[j], passes[i]),
    )
