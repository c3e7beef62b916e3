"""What FSDP2's transfers and copies cost a layer, where training has them.

    unshard stream             | copy in | unshard            | copy in | unshard
    reduce stream                                  | reduce        | +=
    compute           copy out | forward ...         copy out | backward ...

Matrix products back to back tell something else. A layer begins with small kernels that are bound by memory, as copies
and transfers are, and kernels launched beside a collective find multiprocessors taken. So all of it is played as
FSDP2's program has it, over and over (`calibrate_scenes`), and what a transfer costs is what is lost beyond what the
copies cost that come with it.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from odc_kernels.bench_cases import Buffers
from odc_kernels.calibrate_compute import layer_steps
from odc_kernels.calibrate_copies import elements_of, shards_of, steps_of
from odc_kernels.calibrate_file import Draft
from odc_kernels.calibrate_scenes import ROUNDS, Launch, Measured, Scene, measure_scene
from odc_kernels.calibrate_shapes import layer_tensors
from odc_kernels.calibrate_timing import Effort, Pace, Step
from odc_kernels.calibrate_transfers import Way, collectives, measure_alone, one_sided
from odc_kernels.timing import Call
from odc_kernels.window import BackendName
from odc_sim.calibration import CopyOp, CopySample, TransferSample
from odc_sim.models import load_model
from odc_sim.overlap import slowdown

LAYER_TOKENS = 8192
"""Enough for the device to be slower than the host, few enough for a transfer to be seen in a layer's time."""
COPY_OUT, FORWARD, COPY_OUT_AGAIN, BACKWARD = range(4)
"""The steps of a scene."""
ALONE, COPIES_IN, ADDS = "alone", "copies in", "adds"
UNSHARDS, REDUCES, ALL = "unshards in forwards", "reduces", "all"
"""Its variants."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """One layer of a model on one microbatch, and FSDP2's copies of it."""

    model: str
    forward: Step
    backward: Step
    copies: Mapping[CopyOp, Step]
    shard_elements: int

    @classmethod
    def of(cls, model: str, device: torch.device, tokens: int = LAYER_TOKENS) -> "Layer":
        """In memory."""
        spec = load_model(model)
        tensors, world_size = layer_tensors(spec), dist.get_world_size()
        forward, backward = layer_steps(model, (tokens,), device)
        ops: tuple[CopyOp, ...] = ("copy_in", "copy_out", "add")
        return cls(
            model=spec.name,
            forward=forward,
            backward=backward,
            copies={op: steps_of(op, tensors, world_size, device)[0] for op in ops},
            shard_elements=elements_of(shards_of(tensors, world_size)),
        )

    def copy(self, op: CopyOp) -> Call:
        """On any stream."""
        step = self.copies[op]
        return lambda _: step()

    def scene(self, unshard: Call, reduce: Call, *, adds: bool) -> Scene:
        """The layer's part of a minibatch, with nothing in flight, with all, and with some of it.

        Args:
            unshard: the next layer's, beside the forward and again beside the backward.
            reduce: the last layer's, from the copy-out before the backward on.
            adds: the reduce leaves `+=` to FSDP2.
        """
        copy_in, copy_out, add = self.copy("copy_in"), self.copies["copy_out"], self.copy("add")

        def unshards(at: int, until: int, *calls: Call) -> Launch:
            return Launch(at=at, until=until, calls=[copy_in, *calls])

        def reduces(*calls: Call) -> Launch:
            return Launch(at=COPY_OUT_AGAIN, until=COPY_OUT, calls=[*calls, *([add] if adds else [])])

        forward, backward = (FORWARD, COPY_OUT_AGAIN), (BACKWARD, COPY_OUT)
        # alike for all transfers, so measured with those that have both
        copies = {COPIES_IN: [unshards(*forward), unshards(*backward)], ADDS: [reduces()]} if adds else {}
        return Scene(
            steps=[copy_out, self.forward, copy_out, self.backward],
            counted=(FORWARD, BACKWARD),
            variants={
                ALONE: [],
                **copies,
                UNSHARDS: [unshards(*forward, unshard)],
                REDUCES: [reduces(reduce)],
                ALL: [unshards(*forward, unshard), reduces(reduce), unshards(*backward, unshard)],
            },
        )


def measure_beside_layers(
    shards: Mapping[str, int],
    buffers: Buffers,
    backend: BackendName,
    draft: Draft,
    pace: Pace,
    effort: Effort,
    *,
    say: Callable[[str], None],
    rounds: int = ROUNDS,
    tokens: int = LAYER_TOKENS,
) -> None:
    """Of each model, whose layer's shard has so many bytes of fp32, into `draft`. Collective.

    Windows come last: where they cannot be opened, copies and collectives have been measured.
    """
    layers = {name: Layer.of(name, pace.device, tokens) for name in shards}

    def measure(ways: Sequence[Way], name: str, *, adds: bool) -> Measured | None:
        layer = layers[name]
        what = f"{ways[0].op} and {ways[1].op} beside a layer of {layer.model}"
        alone = [measure_alone([way], [way.bytes_of(shards[name])], pace, effort, say=say)[0] for way in ways]
        unshard, reduce = (way.case(sample.bytes, pace.device).call for way, sample in zip(ways, alone, strict=True))
        say(what)
        measured = measure_scene(layer.scene(unshard, reduce, adds=adds), pace, rounds=rounds)
        draft.beside_layers.append({"model": layer.model, "ops": [way.op for way in ways], **measured.as_dict()})
        if measured.problem:
            draft.left_out.append(f"{what}: {measured.problem}")
            return None
        if adds:
            draft.copies = copies_beside(layer, measured, draft.copies)
        mine = [row for row in draft.copies if row.beside_layer == layer.model]
        draft.transfers += transfers_beside(layer, measured, alone, mine, adds=adds)
        return measured

    found: list[Measured | None] = []
    for name in layers:
        found.append(measure(collectives(buffers), name, adds=True))
    with one_sided(buffers, backend) as ours:
        for name in layers:
            found.append(measure(ours, name, adds=False))
    speeds = [measured.speeds for measured in found if measured is not None]
    draft.device_speed = tuple(map(statistics.median, zip(*speeds, strict=True)))


def copies_beside(layer: Layer, measured: Measured, copies: Sequence[CopySample]) -> list[CopySample]:
    """`copies`, those that are copy-in and `+=` of the layer with what they cost it."""
    times: dict[CopyOp, tuple[str, int, int]] = {"copy_in": (COPIES_IN, 2, FORWARD), "add": (ADDS, 1, BACKWARD)}

    def with_cost(row: CopySample) -> CopySample:
        if row.op not in times or row.elements != layer.shard_elements:
            return row
        variant, count, step = times[row.op]
        lost = measured.lost(variant)
        if lost.noisy:
            return row
        # The simulator has copies take what they take alone. What noise makes wrong here, the transfer that comes with
        # the copy is wrong by the other way round.
        slower = slowdown(lost.seconds / count, row.p50_s, measured.step_s(variant, step))
        return replace(row, slowdown_compute=slower, beside_layer=layer.model)

    return [with_cost(row) for row in copies]


def transfers_beside(
    layer: Layer,
    measured: Measured,
    alone: Sequence[TransferSample],
    copies: Sequence[CopySample],
    *,
    adds: bool,
) -> list[TransferSample]:
    """An unshard and a reduce of the layer's size, `alone` with what they cost it.

    The simulator charges a layer for copy-in and unshard, in a forward and in a backward, and a backward for the reduce
    and `+=` as well. Of what is lost beside the unshards in forwards (U), beside the reduces (R), and beside all (A),
    least squares make these two costs u and r, where U = u, R = r and A = 2 u + r.

    Args:
        layer: whose.
        measured: its scene.
        alone: the unshard and the reduce, before.
        copies: those of the layer. Where the cost of one is not known, it counts as the transfer's, which is flagged.
        adds: whether there are `+=`.
    """
    unshards, reduces, everything = (measured.lost(variant) for variant in (UNSHARDS, REDUCES, ALL))
    unshard_s = (unshards.seconds + everything.seconds - reduces.seconds) / 3
    reduce_s = (reduces.seconds + everything.seconds) / 2 - unshard_s
    lost_s = {copy.op: copy.lost_s for copy in copies if copy.lost_s is not None and not copy.flagged}
    copy_in_s, add_s = lost_s.get("copy_in", 0.0), lost_s.get("add", 0.0) if adds else 0.0

    def beside(row: TransferSample, lost_s: float, variant: str, call: int, step: int) -> TransferSample:
        """`row` with its cost."""
        other_s, step_s = max(measured.call_s(variant, call), row.p50_s), measured.step_s(variant, step)
        slower = slowdown(lost_s, other_s, step_s)
        return replace(row, overlapped_p50_s=other_s, slowdown_compute=slower, beside_layer=layer.model)

    # calls are numbered as they are launched: copy-in, unshard, reduce
    unshard = beside(alone[0], unshard_s - copy_in_s, UNSHARDS, 1, FORWARD)
    reduce = beside(alone[1], reduce_s - add_s, ALL, 2, BACKWARD)
    unsure = any(lost.noisy for lost in (unshards, reduces, everything)) or "copy_in" not in lost_s
    return [
        replace(unshard, flagged=alone[0].flagged or unsure),
        replace(
            reduce,
            flagged=alone[1].flagged or unsure or (adds and "add" not in lost_s),
            slowdown_copy_out=measured.step_s(ALL, COPY_OUT_AGAIN) / measured.step_s(ALONE, COPY_OUT_AGAIN),
        ),
    ]
