"""What a transfer costs the compute beside it, where training has it.

    transfers              | unshard ...               | reduce ....
    compute       copy out | forward     ...  backward | copy out | backward

Matrix products back to back tell something else. A layer begins with small kernels that are bound by memory, as the
transfer is, and kernels launched beside a collective find multiprocessors taken: in training a layer lost most of the
time that a collective took, where products of 1.7 ms lost nothing (reports/validation-h200).
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from odc_kernels.calibrate_compute import layer_steps
from odc_kernels.calibrate_copies import steps_of
from odc_kernels.calibrate_shapes import layer_tensors
from odc_kernels.calibrate_timing import Pace, Step, over_ranks
from odc_kernels.calibrate_transfers import Way
from odc_kernels.timing import Call, Marks, estimate, synchronize
from odc_sim.calibration import TransferSample
from odc_sim.models import load_model

LAYER_TOKENS = 8192
"""Enough for the device to be slower than the host, few enough for a transfer to be seen in a layer's time."""
UNSHARDS = ("all_gather", "gather")
ROUNDS = 5
PHASE_S = 0.08
LEAST, LEAD = 4, 2
"""Scenes in a round, and those before them, in which the host gets ahead."""
MOST_LOST = 0.95
"""Of the transfer's time; a rate of compute beside it cannot express more."""


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
    def slowdown_compute(self) -> float:
        """How many times slower the last step progresses while the transfer lasts; below 1 only through noise."""
        lost_s = min(self.beside_s[-1] - self.alone_s[-1], MOST_LOST * self.transfer_s)
        return self.transfer_s / (self.transfer_s - lost_s)

    @property
    def slowdown_copy_out(self) -> float | None:
        """How many times longer the first step takes, if it is not the last one."""
        return self.beside_s[0] / self.alone_s[0] if len(self.alone_s) > 1 else None


def beside_layers(
    ways: Sequence[Way],
    alone: Sequence[TransferSample],
    model: str,
    pace: Pace,
    *,
    say: Callable[[str], None],
) -> list[TransferSample]:  # pragma: cuda-only
    """For each way its sample in `alone` of a shard of the model's layer, with what it costs that layer. Collective."""
    spec = load_model(model)
    forward, backward = layer_steps(model, (LAYER_TOKENS,), pace.device)
    (copy_out,) = steps_of("copy_out", layer_tensors(spec), dist.get_world_size(), pace.device)
    unshard = Scene(beside=[forward], after=[backward])
    reduce = Scene(before=[forward], beside=[copy_out, backward])
    found = []
    for way, before in zip(ways, alone, strict=True):
        say(f"{way.op} beside a layer of {spec.name}")
        beside = measure_scene(
            way.case(before.bytes, pace.device).call, unshard if way.op in UNSHARDS else reduce, pace
        )
        found.append(
            replace(
                before,
                flagged=before.flagged or beside.slowdown_compute < 1,
                overlapped_p50_s=max(beside.transfer_s, before.p50_s),
                slowdown_compute=beside.slowdown_compute,
                slowdown_copy_out=beside.slowdown_copy_out,
                beside_layer=spec.name,
            )
        )
    return found


def measure_scene(call: Call, scene: Scene, pace: Pace) -> Beside:
    """Means within a round, medians over rounds, means over ranks. Collective.

    On a CPU the transfer runs before the first step and is part of its time.
    """
    device = pace.device
    stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None  # as FSDP2's
    with torch.cuda.stream(stream):
        call(0)

    def once(_: int) -> None:
        for step in (*scene.before, *scene.beside, *scene.after):
            step()

    count = max(LEAST, math.ceil(PHASE_S / estimate(once, device, calls=2)))
    pace.heat(0.3)
    rounds: list[list[float]] = []
    for number in range(ROUNDS + 1):
        without = _round(None, scene, count, stream, device)
        with_it = _round(call, scene, count, stream, device)
        if number > 0:  # the first one warms up
            rounds.append([*without, *with_it])
    medians = [[statistics.median(part)] for part in zip(*rounds, strict=True)]
    seconds = [mean for (mean,) in over_ranks(medians, "mean")]
    steps = len(scene.beside)
    return Beside(
        alone_s=tuple(seconds[:steps]), beside_s=tuple(seconds[steps : 2 * steps]), transfer_s=seconds[2 * steps]
    )


def _round(
    call: Call | None, scene: Scene, count: int, stream: "torch.cuda.Stream | None", device: torch.device
) -> list[float]:
    """Mean seconds of each step beside, and of the transfer if there is one."""
    synchronize(device)
    steps, transfers = Marks(device), Marks(device)
    for number in range(LEAD + count):
        for step in scene.before:
            step()
        steps.mark()
        if call is not None:
            if stream is not None:  # pragma: cuda-only
                stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                transfers.mark()
                call(number)
                transfers.mark()
        for step in scene.beside:
            step()
            steps.mark()
        for step in scene.after:
            step()
    synchronize(device)
    each = len(scene.beside) + 1  # the last interval of these lies between two scenes
    means = [_mean(steps, steps, slice(i, None, each)) for i in range(each - 1)]
    return means if call is None else [*means, _mean(transfers, steps, slice(0, None, 2))]


def _mean(marks: Marks, origin: Marks, which: slice) -> float:
    return statistics.mean(end - start for start, end in marks.intervals_s(origin)[which][LEAD:])
