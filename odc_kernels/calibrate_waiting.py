"""What a collective that waits for a slower rank costs the compute beside it: its kernel holds multiprocessors.

    late rank    layer layer layer layer layer layer | collective
    others       layer layer | collective, waiting . .
                       layer | layer layer
                       alone   beside

The compute is a model's layer, forward and backward. Square matrix products will not do: they lost 30 % where layers in
training lose 15 %.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from odc_kernels.calibrate_compute import layer_steps
from odc_kernels.calibrate_timing import Pace
from odc_kernels.calibrate_transfers import Way
from odc_kernels.timing import Call, Interval, Marks, agree_max, estimate, synchronize
from odc_sim.calibration import TransferSample

LAYER_TOKENS = 12_288
"""Enough for the device to be slower than the host."""
PHASE_S = 0.04
ROUNDS = 4
FIRST = 2
"""Layers after the collective's launch that may have begun before it."""


def with_waiting(
    samples: Sequence[TransferSample],
    ways: Sequence[Way],
    sizes: Sequence[int],
    model: str,
    pace: Pace,
    *,
    say: Callable[[str], None],
) -> list[TransferSample]:  # pragma: cuda-only
    """`samples` of collectives with `slowdown_waiting` at `sizes`, beside a layer of `model`. Collective."""
    found: dict[tuple[str, int], float] = {}
    forward, backward = layer_steps(model, (LAYER_TOKENS,), pace.device)

    def work() -> None:
        forward()
        backward()

    for way in ways:
        for size in sizes:
            say(f"{way.op} of {size >> 10} KiB that waits for another rank")
            found[way.op, size] = measure_waiting(way.case(size, pace.device).call, work, pace)
    return [replace(s, slowdown_waiting=found[s.op, s.bytes]) if (s.op, s.bytes) in found else s for s in samples]


def measure_waiting(call: Call, work: Callable[[], None], pace: Pace) -> float:  # pragma: cuda-only
    """How many times longer `work` takes beside `call` while it waits: median over rounds, mean over late ranks."""
    device, world_size = pace.device, dist.get_world_size()
    stream = torch.cuda.Stream(device, priority=-1)  # as FSDP2's
    with torch.cuda.stream(stream):
        call(0)
    pace.heat(0.3)
    count = max(FIRST + 4, math.ceil(PHASE_S / estimate(lambda _: work(), device)))
    ratios = []
    for late in {0, world_size - 1}:
        rounds = [_round(call, work, count, stream, device, is_late=dist.get_rank() == late) for _ in range(ROUNDS)]
        ratios.append(statistics.median(rounds))
    # the late rank has nothing to say; it counts as 1, which is never the largest
    return statistics.mean(agree_max(ratio, device) for ratio in ratios)


def slowdown(marks: Sequence[Interval], count: int) -> float:
    """Mean layer beside over mean layer alone, of `count` alone followed by `count` beside."""
    alone, beside = marks[:count], marks[count + FIRST : 2 * count]
    return statistics.mean(b - a for a, b in beside) / statistics.mean(b - a for a, b in alone)


def _round(
    call: Call, work: Callable[[], None], count: int, stream: torch.cuda.Stream, device: torch.device, *, is_late: bool
) -> float:  # pragma: cuda-only
    synchronize(device)
    for _ in range(count * (4 if is_late else 1)):
        work()
    marks = Marks(device)
    if not is_late:
        marks.mark()
        for _ in range(count):
            work()
            marks.mark()
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        call(0)
    for _ in range(0 if is_late else count):
        work()
        marks.mark()
    synchronize(device)
    return 1.0 if is_late else slowdown(marks.intervals_s(marks), count)
