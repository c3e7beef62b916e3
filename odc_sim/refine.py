"""`odc refine`: a calibration with what transfers, copies and the host cost in training, from runs of `odc train`.

The simulator charges a layer for copy-in and unshard beside its forward, and again beside its backward, which pays for
the reduction and, from the second one of a minibatch on, for `+=` as well. So what forwards lose is the unshard's, what
a minibatch's first backward loses beyond that the reduction's, and what later ones lose beyond that `+=`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from odc_sim.calibration import Calibration, CopySample, HostSample, TransferSample
from odc_sim.costs_measured import measured_models
from odc_sim.errors import InputError
from odc_sim.in_training import ALONE, State, Trained, read_trained
from odc_sim.machine import OPS, gpu_name
from odc_sim.models import ModelSpec
from odc_sim.overlap import slowdown
from odc_sim.run_files import Run
from odc_sim.validate_predict import load_run_model

Array = NDArray[np.float64]

MOST_LATE = 0.2
"""Of the layers may be enqueued after the device has come to them."""
MOST_NOISE = 0.02
"""Of a layer's time, by which what rounds say is lost may differ: half a percent for the median."""
PADDING = 0.01
"""By which shards may be larger than the model's share, since FSDP2 pads each parameter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lost:
    """Seconds that a layer takes longer, each the median of rounds; below 0 only through noise."""

    unshard_s: float
    """In a forward, beside copy-in and unshard."""
    reduce_s: float
    """In a backward, beside the reduction."""
    add_s: float
    """In later backwards, beside `+=`."""
    noisy: bool


def refine(calibration: Calibration, runs: Sequence[Run], about: dict[str, Any]) -> Calibration:
    """`calibration` with what layers of the runs' model lose, what copies and the host take, and which rank is faster.

    Args:
        calibration: of the same machine.
        runs: as `read_trained` takes them.
        about: of the refinement, for the record: environment.calibrate.refined.

    Raises:
        InputError: the runs do not tell, or the calibration lacks what is to be refined.
    """
    trained = read_trained(runs)
    spec = load_run_model(runs[0])
    gpu = gpu_name(calibration.environment)
    for run in runs:
        trained_on = gpu_name(run.environment["environment"])
        if gpu != trained_on:
            raise InputError(f"{run.folder}: ran on {trained_on or 'no GPU'}, the calibration is of {gpu or 'a CPU'}")
    names = measured_models(spec, calibration)
    if not names:
        raise InputError(f"the calibration has no fits of model {spec.name!r}, so it is not for these runs")
    late = max(float(states["late"].max()) for states in trained.seconds.values())
    if late > MOST_LATE:
        raise InputError(f"the device waited for the host in {late:.0%} of the layers; plan larger microbatches")
    for schedule in OPS:
        if lost(trained, schedule).noisy:
            raise InputError(
                f"what layers lose under {schedule} differs by more than {MOST_NOISE:.0%} of their time from one third "
                "of the run to the next; train longer"
            )
    world_size = runs[0].config.world_size
    alone = {op: _of_layer(calibration, op, spec, world_size) for ops in OPS.values() for op in ops}
    copies = copies_in_training(trained, calibration.copies, alone["all_gather"], spec, world_size)
    if not any(copy.op == "copy_in" and copy.beside_layer == spec.name and not copy.flagged for copy in copies):
        raise InputError(f"the calibration has no steady copy_in of a layer's shard of {spec.name}; calibrate again")
    out = [copy.p50_s for copy in copies if copy.op == "copy_out" and copy.elements == spec.layer_parameters]
    rows = [row for row in calibration.transfers if row.beside_layer not in names]
    for schedule, ops in OPS.items():
        known = [copy for copy in copies if copy.beside_layer == spec.name]
        pair = [alone[op] for op in ops]
        rows += transfers_in_training(trained, schedule, pair, known, spec.name, min(out, default=None))
    how = dict(calibration.environment.get("calibrate", {})) | {"refined": about}
    return replace(
        calibration,
        environment=calibration.environment | {"calibrate": how},
        transfers=tuple(rows),
        copies=tuple(copies),
        host=host_in_training(calibration.host, trained),
        device_speed=speeds(trained),
    )


def lost(trained: Trained, schedule: str) -> Lost:
    """Beside collectives on the slowest rank, which waits for no other; one-sided on all ranks, since none waits."""
    ranks = [_slowest(trained)] if schedule == "collective" else list(range(trained.of(ALONE, "forward").shape[0]))

    def of(which: str, state: State) -> Array:
        found: Array = trained.of(which, state)[ranks].mean(axis=0)
        return found

    alone_s = of(ALONE, "first backward")
    forward_s = of(schedule, "forward") - of(ALONE, "forward")
    first_s = of(schedule, "first backward") - alone_s
    later_s = of(schedule, "later backward") - alone_s
    if schedule == "odc":  # a push adds by itself: all backwards are alike
        first_s = later_s = (first_s + later_s) / 2
    whole_s = float(np.median(of(ALONE, "forward") + alone_s))
    return Lost(
        unshard_s=float(np.median(forward_s)),
        reduce_s=float(np.median(first_s - forward_s)),
        add_s=float(np.median(later_s - first_s)),
        noisy=bool(np.ptp(forward_s + first_s) > MOST_NOISE * whole_s),
    )


def speeds(trained: Trained) -> tuple[float, ...]:
    """[ranks] with nothing in flight, relative to their mean time."""
    alone_s = _alone_s(trained)
    return tuple((alone_s.mean() / alone_s).tolist())


def host_in_training(host: HostSample | None, trained: Trained) -> HostSample:
    """What the host takes in training, stamps included, on the slower rank; backwards, in which it waits for the
    device, as before."""
    times_s = {name: float(np.median(states["host"], axis=1).max()) for name, states in trained.seconds.items()}
    return HostSample(
        seconds_per_unit_forward=times_s["collective"],
        seconds_per_unit_forward_deferred=times_s[ALONE],
        seconds_per_unit_forward_one_sided=times_s["odc"],
        seconds_per_unit_backward=0.0 if host is None else host.seconds_per_unit_backward,
    )


def copies_in_training(
    trained: Trained, copies: Sequence[CopySample], unshard: TransferSample, spec: ModelSpec, world_size: int
) -> list[CopySample]:
    """`copies`, those that are copy-in and `+=` of the layer with what they cost it, and `hold` as it is in training.

    Copy-in and unshard come one after the other and are not told apart: what they cost is divided as their times are.
    Gradients are held right after the backward that wrote them, when part of them is in the cache.
    """
    beside = lost(trained, "collective")
    share = spec.layer_parameters / world_size

    def with_cost(row: CopySample) -> CopySample:
        if row.op == "hold" and row.elements == spec.layer_parameters:
            hold_s = _median(trained.of(ALONE, "hold"))
            return replace(row, p20_s=hold_s, p50_s=hold_s, p80_s=hold_s)
        if row.op not in ("copy_in", "add") or not share <= row.elements <= share * (1 + PADDING):
            return row
        step_s = _median(trained.of("collective", "forward" if row.op == "copy_in" else "first backward"))
        lost_s = beside.add_s
        if row.op == "copy_in":
            lost_s = beside.unshard_s * row.p50_s / (row.p50_s + unshard.p50_s)
        return replace(row, slowdown_compute=slowdown(lost_s, row.p50_s, step_s), beside_layer=spec.name)

    return [with_cost(row) for row in copies]


def transfers_in_training(
    trained: Trained,
    schedule: str,
    alone: Sequence[TransferSample],
    copies: Sequence[CopySample],
    model: str,
    copy_out_s: float | None = None,
) -> list[TransferSample]:
    """An unshard and a reduce of the layer's size, `alone` with what they cost it.

    Args:
        trained: its layers.
        schedule: `collective` or `odc`.
        alone: the unshard and the reduce.
        copies: those of the layer. Where the cost of copy-in is not known, it counts as the unshard's, and is flagged.
        model: whose.
        copy_out_s: what the layer's copy-out takes alone, if that is known.
    """
    beside = lost(trained, schedule)
    known = [copy.lost_s for copy in copies if copy.op == "copy_in" and copy.lost_s is not None and not copy.flagged]
    costs: tuple[tuple[State, State, float], ...] = (
        ("unshard", "forward", beside.unshard_s - sum(known)),
        ("reduce", "first backward", beside.reduce_s),
    )
    slowest = _slowest(trained)
    copy_out = None if copy_out_s is None else max(1.0, _median(trained.of(schedule, "copy out")) / copy_out_s)
    rows = []
    for row, (transfer, state, lost_s) in zip(alone, costs, strict=True):
        other_s = max(_median(trained.of(schedule, transfer)[slowest]), row.p50_s)
        rows.append(
            replace(
                row,
                overlapped_p50_s=other_s,
                slowdown_compute=slowdown(lost_s, other_s, _median(trained.of(schedule, state))),
                beside_layer=model,
                flagged=not known,
                slowdown_copy_out=copy_out if transfer == "reduce" else None,
            )
        )
    return rows


def _of_layer(calibration: Calibration, op: str, spec: ModelSpec, world_size: int) -> TransferSample:
    """The transfer of a layer's shard, as timed alone."""
    share = spec.layer_parameters / world_size
    for row in calibration.transfers:
        itemsize = 4 if row.dtype == "fp32" else 2
        wanted = itemsize == (2 if op in ("all_gather", "gather") else 4)
        fits = share <= row.bytes / itemsize <= share * (1 + PADDING)
        if row.op == op and wanted and fits and row.world_size == world_size:
            return replace(row, overlapped_p50_s=None, slowdown_compute=None, beside_layer=None, slowdown_copy_out=None)
    raise InputError(
        f"the calibration has no {op} of a layer's shard of {spec.name} over {world_size} ranks, which odc calibrate "
        "times beside layers of the first two models; calibrate with --model first"
    )


def _alone_s(trained: Trained) -> Array:
    """[ranks]"""
    found: Array = np.median(trained.of(ALONE, "forward") + trained.of(ALONE, "first backward"), axis=1)
    return found


def _slowest(trained: Trained) -> int:
    return int(_alone_s(trained).argmax())


def _median(values: Array) -> float:
    return float(np.median(values))
