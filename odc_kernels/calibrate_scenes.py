"""What compute loses beside work on other streams: the same steps without and with that work, in turn."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from odc_kernels.calibrate_timing import Pace, Step
from odc_kernels.collector import collected_between
from odc_kernels.timing import Call, Marks, agree_max, estimate, summarize, synchronize

ROUNDS = 7
"""So many that one in which something else held a rank up changes neither median nor percentiles."""
PHASE_S = 0.16
LEAST, LEAD = 12, 4
"""Scenes in a round, and those before them, in which the host gets ahead."""
MOST_LOST = 0.95
"""Of the other work's time; a rate of compute beside it cannot express more."""
MOST_LATE = 0.2
"""Of the scenes may begin before the host has enqueued them."""
MOST_NOISE = 0.2
"""Of the other work's time: by how much the median of what rounds say is lost may be off."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """What a stream of its own does from the beginning of a step on."""

    at: int
    """Of the step in `Scene.beside`."""
    calls: Sequence[Call]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """What the compute stream does, in turn, and other streams beside it in every other scene."""

    before: Sequence[Step] = ()
    beside: Sequence[Step]
    """Timed."""
    after: Sequence[Step] = ()
    launches: Sequence[Launch]
    timed: int = 0
    """Of the launched calls, as the host enqueues them, the one whose seconds are wanted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Beside:
    """Means over the scenes of a round."""

    alone_s: tuple[float, ...]
    """Of each step of `Scene.beside`, without launches."""
    beside_s: tuple[float, ...]
    """And with them."""
    calls_s: tuple[tuple[float, float], ...]
    """When each call of each launch starts and ends, after the first step does: what ran beside what."""
    other_s: float
    """Of the call that is timed."""

    @property
    def lost_s(self) -> float:
        """By which the last step is longer beside the launches; below 0 only through noise."""
        return self.beside_s[-1] - self.alone_s[-1]

    @property
    def stretch(self) -> float:
        """How many times longer the first step takes."""
        return self.beside_s[0] / self.alone_s[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A scene, in rounds: medians over these of means over ranks."""

    rounds: tuple[tuple[Beside, ...], ...]
    """[ranks][rounds]."""
    late: float
    """Part of the scenes in which the device was there before the host, on the worst rank."""

    @property
    def lost_s(self) -> float:
        """Compared within a round: between rounds clocks change more than a transfer costs."""
        return statistics.median(self._each(lambda beside: beside.lost_s))

    @property
    def stretch(self) -> float:
        """Of the first step, likewise."""
        return statistics.median(self._each(lambda beside: beside.stretch))

    @property
    def other_s(self) -> float:
        """Of the call that is timed."""
        return statistics.median(self._each(lambda beside: beside.other_s))

    @property
    def step_s(self) -> float:
        """Of the last step, beside the launches."""
        return statistics.median(self._each(lambda beside: beside.beside_s[-1]))

    @property
    def problem(self) -> str | None:
        """Why nothing can be said."""
        return f"the host was late in {self.late:.0%} of them" if self.late > MOST_LATE else None

    @property
    def noisy(self) -> bool:
        """Whether rounds differ so much in what they say is lost that their median may be far off."""
        lost = summarize(self._each(lambda beside: beside.lost_s))
        return lost.p80_s - lost.p20_s > MOST_NOISE * self.other_s * math.sqrt(len(self.rounds[0]))

    def as_dict(self) -> dict[str, Any]:
        """JSON-able, [ranks][rounds] of each field."""
        names = ("alone_s", "beside_s", "calls_s", "other_s")
        return {
            "late": self.late,
            **{name: [[getattr(each, name) for each in rounds] for rounds in self.rounds] for name in names},
        }

    def _each(self, value: Callable[[Beside], float]) -> list[float]:
        """[rounds] of the mean over ranks."""
        return [statistics.mean(map(value, ranks)) for ranks in zip(*self.rounds, strict=True)]


def slowdown(lost_s: float, other_s: float, step_s: float) -> float:
    """How many times slower a step that takes `step_s` beside other work progresses while that lasts, at least 1."""
    both_s = min(other_s, step_s)
    return both_s / (both_s - min(max(lost_s, 0.0), MOST_LOST * both_s))


def measure_scene(scene: Scene, pace: Pace) -> Measured:
    """Scenes in turn without and with the launches. Collective.

    On a CPU launches run before the step that they begin with, and are part of its time.
    """
    device = pace.device
    stage = _Stage(scene, device)
    stage.first_launches()
    count = max(LEAST, 2 * math.ceil(PHASE_S / estimate(lambda _: stage.play(), device, calls=2) / 2))
    pace.heat(0.3)
    own, late = [], 0.0
    with collected_between():
        for number in range(ROUNDS + 1):
            found, late_in_it = stage.round(count)
            if number > 0:  # the first one warms up
                own.append(found)
                late += late_in_it / ROUNDS
    ranks: list[list[Beside]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(ranks, own)
    return Measured(rounds=tuple(map(tuple, ranks)), late=agree_max(late, device))


class _Stage:
    """Where scenes are played: steps, and launches on streams of their own."""

    def __init__(self, scene: Scene, device: torch.device) -> None:
        self._scene = scene
        self._device = device
        self._meeting = torch.zeros(1, device=device)
        # as FSDP2's
        self._streams = [
            torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None for _ in scene.launches
        ]

    def first_launches(self) -> None:
        """With all that is set up then."""
        for launch, stream in zip(self._scene.launches, self._streams, strict=True):
            self._launch(launch, stream, 0, Marks(self._device))

    def play(self) -> None:
        """All steps, without launches."""
        for step in (*self._scene.before, *self._scene.beside, *self._scene.after):
            step()
        dist.all_reduce(self._meeting)

    def round(self, count: int) -> tuple[Beside, float]:
        """Means over `count` scenes, every other one of them with launches; and in what part the host was late."""
        device, scene = self._device, self._scene
        synchronize(device)
        steps, others = Marks(device), Marks(device)
        late = 0
        for number in range(LEAD + count):
            for step in scene.before:
                step()
            for stream in self._streams:
                if stream is not None:  # pragma: cuda-only
                    torch.cuda.current_stream(device).wait_stream(stream)
            # Devices meet: a collective that waits for a slower rank is measured elsewhere, by `calibrate_waiting`.
            dist.all_reduce(self._meeting)
            steps.mark()
            waited = False
            for place, step in enumerate(scene.beside):
                if number % 2:
                    for launch, stream in zip(scene.launches, self._streams, strict=True):
                        if launch.at == place:
                            self._launch(launch, stream, number, others)
                waited = waited or steps.reached()
                step()
                steps.mark()
            late += number >= LEAD and waited
            for step in scene.after:
                step()
        synchronize(device)
        return self._means(steps.times_s(steps), others.times_s(steps)), late / count

    def _means(self, steps_s: list[float], others_s: list[float]) -> Beside:
        """Of the scenes after the lead; the moments of all are given."""
        scenes = np.array(steps_s).reshape(-1, len(self._scene.beside) + 1)
        with_launches = scenes[1::2]
        calls = np.array(others_s).reshape(len(with_launches), -1, 2) - with_launches[:, :1, None]
        calls = calls[LEAD // 2 :].mean(axis=0)
        seconds = np.diff(scenes)
        return Beside(
            alone_s=tuple(seconds[LEAD::2].mean(axis=0).tolist()),
            beside_s=tuple(seconds[LEAD + 1 :: 2].mean(axis=0).tolist()),
            calls_s=tuple((start, end) for start, end in calls.tolist()),
            other_s=float(np.diff(calls[self._scene.timed])[0]),
        )

    def _launch(self, launch: Launch, stream: "torch.cuda.Stream | None", number: int, marks: Marks) -> None:
        if stream is not None:  # pragma: cuda-only
            stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for call in launch.calls:
                marks.mark()
                call(number)
                marks.mark()
