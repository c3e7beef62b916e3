"""What compute loses beside work on other streams: the same steps over and over, now with that work and now without.

    alone         step step step step | step step step step | ...
    with a, b     step step step step | step step step step | ...        for 0.2 s each, in turn
    stream of a        a                     a
    stream of b                  b                     b

A GPU at the limit of its power pays for a transfer twice: with what the transfer takes from the step beside it, and
with its energy, for which the clock goes down from then on, in every step (reports/validation-h200). So what counts is
how much longer all steps take together, in a stretch long enough for the clock to settle. Steps that had the other work
every other time showed two thirds of it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from odc_kernels.calibrate_timing import Pace, Step
from odc_kernels.collector import collected_between
from odc_kernels.timing import Call, Marks, agree_max, estimate, summarize, synchronize

Array = NDArray[np.float64]

ROUNDS, QUICK_ROUNDS = 6, 4
"""Stretches of each variant."""
STRETCH_S, LEAD_S = 0.2, 0.06
"""Of a stretch, and of what comes before it, in which the host gets ahead and the clock settles."""
LEAST, LEAST_LEAD = 8, 2
"""Cycles."""
MOST_LATE = 0.2
"""Of the cycles may have a step that begins before the host has enqueued it."""
MOST_NOISE = 0.02
"""Of the steps' time, the 80th over the 20th percentile of what rounds say is lost: half a percent for the median."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """What a stream of its own does from the beginning of a step on."""

    at: int
    """Of the step in `Scene.steps`."""
    until: int
    """The step that waits for it, in this cycle or the next."""
    calls: Sequence[Call]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """What the compute stream does over and over, and other streams beside it."""

    steps: Sequence[Step]
    counted: Sequence[int]
    """Of the steps, those that are to lose something."""
    variants: Mapping[str, Sequence[Launch]]
    """By name; the first has no launches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lost:
    """By which the counted steps of a cycle take longer in a variant; below 0 only through noise."""

    seconds: float
    noisy: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A scene: means over the cycles of each stretch."""

    steps_s: Mapping[str, Array]
    """Variant -> [ranks, rounds, steps]."""
    calls_s: Mapping[str, Array]
    """Variant -> [ranks, rounds, calls, 2]: start and end of each after the cycle's beginning, by launches."""
    counted: tuple[int, ...]
    late: float
    """Part of the cycles in which the device was there before the host, on the worst rank and in the worst variant."""

    def lost(self, variant: str) -> Lost:
        """Compared within a round, since clocks wander; of the slowest rank, which waits for no other."""
        rounds_s = (self._counted_s(variant) - self._counted_s(self.alone))[self.slowest]
        found = summarize(rounds_s.tolist())
        return Lost(seconds=found.p50_s, noisy=found.p80_s - found.p20_s > MOST_NOISE * self._alone_s()[self.slowest])

    def call_s(self, variant: str, call: int) -> float:
        """Of the launched calls the n-th, on that rank: a collective waits for it, and not on it."""
        moments = self.calls_s[variant][self.slowest, :, call]
        return float(np.median(moments[:, 1] - moments[:, 0]))

    def step_s(self, variant: str, step: int) -> float:
        """Of a step, likewise."""
        return float(np.median(self.steps_s[variant][self.slowest, :, step]))

    @property
    def alone(self) -> str:
        """The variant without launches."""
        return next(iter(self.steps_s))

    @property
    def slowest(self) -> int:
        """Of the ranks, without launches."""
        return int(self._alone_s().argmax())

    @property
    def speeds(self) -> tuple[float, ...]:
        """[ranks] without launches, relative to their mean time."""
        alone_s = self._alone_s()
        return tuple((alone_s.mean() / alone_s).tolist())

    @property
    def problem(self) -> str | None:
        """Why nothing can be said."""
        return f"the host was late in {self.late:.0%} of them" if self.late > MOST_LATE else None

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "late": self.late,
            "variants": {
                name: {"steps_s": steps_s.round(9).tolist(), "calls_s": self.calls_s[name].round(9).tolist()}
                for name, steps_s in self.steps_s.items()
            },
        }

    def _counted_s(self, variant: str) -> Array:
        """[ranks, rounds]"""
        return np.asarray(self.steps_s[variant][..., list(self.counted)].sum(axis=-1))

    def _alone_s(self) -> Array:
        """[ranks]"""
        return np.asarray(np.median(self._counted_s(self.alone), axis=1))


def measure_scene(scene: Scene, pace: Pace, *, rounds: int = ROUNDS) -> Measured:
    """Stretches of each variant in turn, every other time in reverse. Collective.

    On a CPU launches run before the step that they begin with, and are part of its time.
    """
    device = pace.device
    stage = _Stage(scene, device)
    cycle_s = estimate(lambda _: stage.play(), device, calls=2)
    lead, count = max(LEAST_LEAD, math.ceil(LEAD_S / cycle_s)), max(LEAST, math.ceil(STRETCH_S / cycle_s))
    pace.heat(0.3)
    names = list(scene.variants)
    steps_s: dict[str, list[Array]] = {name: [] for name in names}
    calls_s: dict[str, list[Array]] = {name: [] for name in names}
    late = dict.fromkeys(names, 0.0)
    with collected_between():
        stage.stretch(scene.variants[names[-1]], lead, count)  # with all that is set up then
        for number in range(rounds):
            for name in names if number % 2 == 0 else reversed(names):
                steps, calls, late_in_it = stage.stretch(scene.variants[name], lead, count)
                steps_s[name].append(steps)
                calls_s[name].append(calls)
                late[name] += late_in_it / rounds
    ranks: list[tuple[dict[str, Array], dict[str, Array]]] = [({}, {})] * dist.get_world_size()
    own = tuple({name: np.stack(found) for name, found in each.items()} for each in (steps_s, calls_s))
    dist.all_gather_object(ranks, own)
    return Measured(
        steps_s={name: np.stack([steps[name] for steps, _ in ranks]) for name in names},
        calls_s={name: np.stack([calls[name] for _, calls in ranks]) for name in names},
        counted=tuple(scene.counted),
        late=agree_max(max(late.values()), device),
    )


class _Stage:
    """Where scenes are played: steps, and launches on streams of their own."""

    def __init__(self, scene: Scene, device: torch.device) -> None:
        self._steps = scene.steps
        self._device = device
        most = max(map(len, scene.variants.values()))
        # as FSDP2's
        self._streams = [torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None for _ in range(most)]

    def play(self) -> None:
        """All steps, without launches."""
        for step in self._steps:
            step()

    def stretch(self, launches: Sequence[Launch], lead: int, count: int) -> tuple[Array, Array, float]:
        """Means over `count` cycles: [steps] seconds, [calls, 2] moments; and in what part the host was late.

        Ranks begin together, and meet no more unless the launches make them: in training they do not either.
        """
        steps, calls = Marks(self._device), Marks(self._device)
        beside = list(zip(launches, self._streams, strict=False))
        late = 0
        synchronize(self._device)
        for number in range(lead + count):
            waited = False
            for place, step in enumerate(self._steps):
                for launch, stream in beside:
                    if launch.until == place and stream is not None:  # pragma: cuda-only
                        torch.cuda.current_stream(self._device).wait_stream(stream)
                steps.mark()
                for launch, stream in beside:
                    if launch.at == place:
                        self._launch(launch, stream, number, calls)
                waited = waited or steps.reached()
                step()
                steps.mark()
            late += number >= lead and waited
        synchronize(self._device)
        moments = np.array(steps.times_s(steps)).reshape(lead + count, len(self._steps), 2)
        called = np.array(calls.times_s(steps)).reshape(lead + count, -1, 2) - moments[:, :1, :1]
        seconds = moments[lead:, :, 1] - moments[lead:, :, 0]
        return seconds.mean(axis=0), called[lead:].mean(axis=0), late / count

    def _launch(self, launch: Launch, stream: "torch.cuda.Stream | None", number: int, marks: Marks) -> None:
        if stream is not None:  # pragma: cuda-only
            stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for call in launch.calls:
                marks.mark()
                call(number)
                marks.mark()
