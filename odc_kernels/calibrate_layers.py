"""What a transfer costs a layer's compute beside it, where training has it: at the start of a forward or backward.

    transfers            | unshard            | reduce
    compute      forward | forward | backward | backward | ...

Matrix products back to back tell something else. A layer begins with small kernels that are bound by memory, as the
transfer is, and kernels launched beside a collective find multiprocessors taken: in training a layer lost most of the
time that a collective took, where products of 1.7 ms lost nothing (reports/validation-h200).
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from odc_kernels.calibrate_compute import layer_steps
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
"""Layers in a round, and those before them, in which the host gets ahead."""
MOST_LOST = 0.95
"""Of the transfer's time; a rate of compute beside it cannot express more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BesideLayer:
    """Seconds of a layer's forward or backward without and with a transfer that starts when it does."""

    layer_alone_s: float
    layer_s: float
    transfer_s: float

    @property
    def slowdown_compute(self) -> float:
        """How many times slower compute progresses while the transfer lasts; below 1 only through noise."""
        lost_s = min(self.layer_s - self.layer_alone_s, MOST_LOST * self.transfer_s)
        return self.transfer_s / (self.transfer_s - lost_s)


def beside_layers(
    ways: Sequence[Way],
    alone: Sequence[TransferSample],
    model: str,
    pace: Pace,
    *,
    say: Callable[[str], None],
) -> list[TransferSample]:  # pragma: cuda-only
    """For each way its sample in `alone` of a shard of the model's layer, with what it costs that layer. Collective."""
    forward, backward = layer_steps(model, (LAYER_TOKENS,), pace.device)
    name = load_model(model).name
    found = []
    for way, before in zip(ways, alone, strict=True):
        say(f"{way.op} beside a layer of {name}")
        call = way.case(before.bytes, pace.device).call
        beside = measure_beside_layer(call, forward, backward, pace, in_forward=way.op in UNSHARDS)
        found.append(
            replace(
                before,
                flagged=before.flagged or beside.slowdown_compute < 1,
                overlapped_p50_s=max(beside.transfer_s, before.p50_s),
                slowdown_compute=beside.slowdown_compute,
                beside_layer=name,
            )
        )
    return found


def measure_beside_layer(call: Call, forward: Step, backward: Step, pace: Pace, *, in_forward: bool) -> BesideLayer:
    """`call` starts with each forward, or with each backward; medians over rounds, means over ranks. Collective.

    On a CPU the transfer runs before the layer and not beside it.
    """
    device = pace.device
    stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None  # as FSDP2's
    with torch.cuda.stream(stream):
        call(0)

    def layer(_: int = 0) -> None:
        forward()
        backward()

    count = max(LEAST, math.ceil(PHASE_S / estimate(layer, device, calls=2)))
    pace.heat(0.3)
    rounds: list[list[float]] = []
    for number in range(ROUNDS + 1):
        without, _ = _round(None, forward, backward, count, stream, device, in_forward=in_forward)
        layers, transfers = _round(call, forward, backward, count, stream, device, in_forward=in_forward)
        if number > 0:  # the first one warms up
            rounds.append([statistics.mean(part) for part in (without, layers, transfers)])
    medians = [[statistics.median(part)] for part in zip(*rounds, strict=True)]
    (alone_s,), (layer_s,), (transfer_s,) = over_ranks(medians, "mean")
    return BesideLayer(layer_alone_s=alone_s, layer_s=layer_s, transfer_s=transfer_s)


def _round(
    call: Call | None,
    forward: Step,
    backward: Step,
    count: int,
    stream: "torch.cuda.Stream | None",
    device: torch.device,
    *,
    in_forward: bool,
) -> tuple[list[float], list[float]]:
    """Seconds of each forward (or backward), and of each transfer."""
    synchronize(device)
    layers, transfers = Marks(device), Marks(device)

    def timed(step: Step, number: int) -> None:
        layers.mark()
        if call is not None:
            if stream is not None:  # pragma: cuda-only
                stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                transfers.mark()
                call(number)
                transfers.mark()
        step()
        layers.mark()

    for number in range(LEAD + count):
        if in_forward:
            timed(forward, number)
            backward()
        else:
            forward()
            timed(backward, number)
    synchronize(device)
    return _seconds(layers, layers), _seconds(transfers, layers)


def _seconds(marks: Marks, origin: Marks) -> list[float]:
    """Of every other interval: the rest lies between two layers, or two transfers. Not of those in the lead."""
    return [end - start for start, end in marks.intervals_s(origin)[::2][LEAD:]]
