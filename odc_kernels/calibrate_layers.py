"""What a transfer costs the compute beside it, where training has it.

    transfers              | unshard ...               | reduce ....
    compute       copy out | forward     ...  backward | copy out | backward

Matrix products back to back tell something else. A layer begins with small kernels that are bound by memory, as the
transfer is, and kernels launched beside a collective find multiprocessors taken. FSDP2's own copies on other streams
take memory and multiprocessors too: in training a layer lost more beside its copy-in than beside a gather that
followed (reports/validation-h200).
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from odc_kernels.calibrate_compute import layer_steps
from odc_kernels.calibrate_copies import shards_of, steps_of
from odc_kernels.calibrate_shapes import layer_tensors
from odc_kernels.calibrate_timing import Pace, Step
from odc_kernels.calibrate_transfers import Way
from odc_kernels.collector import collected_between
from odc_kernels.timing import Call, Marks, agree_max, estimate, summarize, synchronize
from odc_sim.calibration import CopyOp, CopySample, TransferSample
from odc_sim.models import load_model

Sample = TypeVar("Sample", TransferSample, CopySample)

LAYER_TOKENS = 8192
"""Enough for the device to be slower than the host, few enough for a transfer to be seen in a layer's time."""
UNSHARDS = ("all_gather", "gather")
ROUNDS = 7
"""So many that one in which something else held a rank up changes neither median nor percentiles."""
PHASE_S = 0.16
LEAST, LEAD = 8, 4
"""Scenes in a round, and those before them, in which the host gets ahead."""
MOST_LOST = 0.95
"""Of the transfer's time; a rate of compute beside it cannot express more."""
MOST_LATE = 0.2
"""Of the scenes may begin before the host has enqueued them."""
MOST_NOISE = 0.2
"""Of the transfer's time, between the 20th and the 80th percentile of what rounds say is lost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """What the compute stream does around a transfer, in turn."""

    before: Sequence[Step] = ()
    beside: Sequence[Step]
    """Timed; the transfer starts with the first."""
    after: Sequence[Step] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Beside:
    """Seconds of the steps of `Scene.beside` without and with the transfer, and of the transfer."""

    alone_s: tuple[float, ...]
    beside_s: tuple[float, ...]
    transfer_s: float

    @property
    def lost_s(self) -> float:
        """By which the last step is longer beside the transfer; below 0 only through noise."""
        return self.beside_s[-1] - self.alone_s[-1]

    @property
    def slowdown_compute(self) -> float:
        """How many times slower the last step progresses while the transfer lasts, at least 1."""
        both_s = min(self.transfer_s, self.beside_s[-1])
        return both_s / (both_s - min(max(self.lost_s, 0.0), MOST_LOST * both_s))

    @property
    def slowdown_copy_out(self) -> float | None:
        """How many times longer the first step takes, if it is not the last one."""
        return self.beside_s[0] / self.alone_s[0] if len(self.alone_s) > 1 else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A scene, in rounds."""

    rounds: tuple[tuple[Beside, ...], ...]
    """[ranks][rounds]: means over the scenes of a round."""
    late: float
    """Part of the scenes in which the device was there before the host, on the worst rank."""

    @property
    def typical(self) -> Beside:
        """Medians over rounds, means over ranks."""
        found = {name: np.median(values, axis=1).mean(axis=0).tolist() for name, values in self._seconds().items()}
        return Beside(
            alone_s=tuple(found["alone_s"]), beside_s=tuple(found["beside_s"]), transfer_s=found["transfer_s"]
        )

    @property
    def noisy(self) -> bool:
        """Whether rounds differ in what they say is lost."""
        lost = summarize([statistics.mean(each.lost_s for each in ranks) for ranks in zip(*self.rounds, strict=True)])
        return lost.p80_s - lost.p20_s > MOST_NOISE * self.typical.transfer_s

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {"late": self.late, **self._seconds()}

    def _seconds(self) -> dict[str, list[list[Any]]]:
        """[ranks][rounds] of each field."""
        return {
            name: [[getattr(each, name) for each in rounds] for rounds in self.rounds]
            for name in ("alone_s", "beside_s", "transfer_s")
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class BesideLayers(Generic[Sample]):
    """What `transfers_beside_layer` or `copies_beside_layer` found."""

    samples: tuple[Sample, ...]
    raw: tuple[dict[str, Any], ...]
    left_out: tuple[str, ...]


def transfers_beside_layer(
    ways: Sequence[Way],
    alone: Sequence[TransferSample],
    model: str,
    pace: Pace,
    *,
    say: Callable[[str], None],
    tokens: int = LAYER_TOKENS,
) -> BesideLayers[TransferSample]:
    """For each way its sample in `alone` of a shard of the model's layer, with what it costs that layer. Collective."""
    spec = load_model(model)
    forward, backward = layer_steps(model, (tokens,), pace.device)
    (copy_out,) = steps_of("copy_out", layer_tensors(spec), dist.get_world_size(), pace.device)
    unshard = Scene(beside=[forward], after=[backward])
    reduce = Scene(before=[forward], beside=[copy_out, backward])
    samples, raw, left_out = [], [], []
    for way, before in zip(ways, alone, strict=True):
        say(f"{way.op} beside a layer of {spec.name}")
        scene = unshard if way.op in UNSHARDS else reduce
        measured = measure_scene(way.case(before.bytes, pace.device).call, scene, pace)
        raw.append({"op": before.op, "backend": before.backend, "bytes": before.bytes, "model": spec.name})
        raw[-1] |= measured.as_dict()
        problem = _host_was_late(measured)
        if problem:
            left_out.append(f"{way.op} beside a layer of {spec.name}: {problem}")
            continue
        beside = measured.typical
        samples.append(
            replace(
                before,
                flagged=before.flagged or measured.noisy,
                overlapped_p50_s=max(beside.transfer_s, before.p50_s),
                slowdown_compute=beside.slowdown_compute,
                slowdown_copy_out=beside.slowdown_copy_out,
                beside_layer=spec.name,
            )
        )
    return BesideLayers(samples=tuple(samples), raw=tuple(raw), left_out=tuple(left_out))


def copies_beside_layer(
    copies: Sequence[CopySample],
    model: str,
    pace: Pace,
    *,
    say: Callable[[str], None],
    tokens: int = LAYER_TOKENS,
) -> BesideLayers[CopySample]:
    """Those in `copies` that are copy-in and `+=` of the model's layer, with what they cost that layer. Collective."""
    spec = load_model(model)
    tensors, world_size = layer_tensors(spec), dist.get_world_size()
    shard = sum(math.prod(shape) for shape in shards_of(tensors, world_size))
    forward, backward = layer_steps(model, (tokens,), pace.device)
    scenes: dict[CopyOp, Scene] = {
        "copy_in": Scene(beside=[forward], after=[backward]),
        "add": Scene(before=[forward], beside=[backward]),
    }
    samples, raw, left_out = [], [], []
    for op, scene in scenes.items():
        known = [sample for sample in copies if (sample.op, sample.elements) == (op, shard)]
        if not known:
            left_out.append(f"{op} beside a layer of {spec.name}: its time alone was not measured")
            continue
        say(f"{op} beside a layer of {spec.name}")
        (copy,) = steps_of(op, tensors, world_size, pace.device)
        measured = measure_scene(lambda _, copy=copy: copy(), scene, pace)
        raw.append({"op": op, "elements": shard, "model": spec.name, **measured.as_dict()})
        problem = "rounds do not agree" if measured.noisy else _host_was_late(measured)
        if problem:
            left_out.append(f"{op} beside a layer of {spec.name}: {problem}")
            continue
        # The simulator has copies take what they take alone.
        beside = replace(measured.typical, transfer_s=known[0].p50_s)
        samples.append(replace(known[0], slowdown_compute=beside.slowdown_compute, beside_layer=spec.name))
    return BesideLayers(samples=tuple(samples), raw=tuple(raw), left_out=tuple(left_out))


def _host_was_late(measured: "Measured") -> str | None:
    return f"the host was late in {measured.late:.0%} of them" if measured.late > MOST_LATE else None


def measure_scene(call: Call, scene: Scene, pace: Pace) -> Measured:
    """Scenes in turn without and with the transfer. Collective.

    On a CPU the transfer runs before the first step and is part of its time.
    """
    device = pace.device
    stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None  # as FSDP2's
    stage = _Stage(call, scene, stream, device)
    with torch.cuda.stream(stream):
        call(0)
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
    """Where scenes are played: a transfer, on a stream of its own, and the steps around it."""

    def __init__(self, call: Call, scene: Scene, stream: "torch.cuda.Stream | None", device: torch.device) -> None:
        self._call = call
        self._scene = scene
        self._stream = stream
        self._device = device
        self._meeting = torch.zeros(1, device=device)

    def play(self) -> None:
        """All steps, without the transfer."""
        for step in (*self._scene.before, *self._scene.beside, *self._scene.after):
            step()
        dist.all_reduce(self._meeting)

    def round(self, count: int) -> tuple[Beside, float]:
        """Means over `count` scenes, every other one of them with the transfer; and in what part the host was late."""
        device, scene, stream = self._device, self._scene, self._stream
        synchronize(device)
        steps, transfers = Marks(device), Marks(device)
        late = 0
        for number in range(LEAD + count):
            for step in scene.before:
                step()
            if stream is not None:  # pragma: cuda-only
                torch.cuda.current_stream(device).wait_stream(stream)
            # Devices meet: a collective that waits for a slower rank is measured elsewhere, by `calibrate_waiting`.
            dist.all_reduce(self._meeting)
            steps.mark()
            if number % 2:
                self._transfer(number, transfers)
            late += number >= LEAD and steps.reached()
            for step in scene.beside:
                step()
                steps.mark()
            for step in scene.after:
                step()
        synchronize(device)
        each = len(scene.beside) + 1  # the last interval of these lies between two scenes
        intervals_s = _seconds(steps, steps)
        times = [intervals_s[i::each] for i in range(each - 1)]
        alone, beside = ([statistics.mean(step[LEAD + odd :: 2]) for step in times] for odd in (0, 1))
        transfer_s = statistics.mean(_seconds(transfers, steps)[::2][LEAD // 2 :])
        return Beside(alone_s=tuple(alone), beside_s=tuple(beside), transfer_s=transfer_s), late / count

    def _transfer(self, number: int, marks: Marks) -> None:
        if self._stream is not None:  # pragma: cuda-only
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            marks.mark()
            self._call(number)
            marks.mark()


def _seconds(marks: Marks, origin: Marks) -> list[float]:
    return [end - start for start, end in marks.intervals_s(origin)]
