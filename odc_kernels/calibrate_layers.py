"""What FSDP2's transfers and copies cost a layer, where training has them.

    unshard stream             | copy in | unshard            | copy in | unshard
    reduce stream                                  | reduce        | +=
    compute           copy out | forward ...         copy out | backward ...

Matrix products back to back tell something else. A layer begins with small kernels that are bound by memory, as copies
and transfers are, and kernels launched beside a collective find multiprocessors taken. So all of it is played as
FSDP2's program has it, and what a transfer costs is what is lost beyond what the copies cost that come with it: in
training the sum was twice that of its parts, each measured alone (reports/validation-h200).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from odc_kernels.bench_cases import Buffers
from odc_kernels.calibrate_compute import layer_steps
from odc_kernels.calibrate_copies import elements_of, shards_of, steps_of
from odc_kernels.calibrate_file import Draft
from odc_kernels.calibrate_scenes import Launch, Measured, Scene, measure_scene, slowdown
from odc_kernels.calibrate_shapes import layer_tensors
from odc_kernels.calibrate_timing import Effort, Pace, Step
from odc_kernels.calibrate_transfers import Way, collectives, measure_alone, one_sided
from odc_kernels.timing import Call
from odc_kernels.window import BackendName
from odc_sim.calibration import CopyOp, CopySample, TransferSample
from odc_sim.models import load_model

Sample = TypeVar("Sample", TransferSample, CopySample)

LAYER_TOKENS = 8192
"""Enough for the device to be slower than the host, few enough for a transfer to be seen in a layer's time."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class BesideLayers(Generic[Sample]):
    """What was found."""

    samples: tuple[Sample, ...]
    raw: tuple[dict[str, Any], ...]
    left_out: tuple[str, ...]


def measure_beside_layers(
    shards: Mapping[str, int],
    buffers: Buffers,
    backend: BackendName,
    draft: Draft,
    pace: Pace,
    effort: Effort,
    *,
    say: Callable[[str], None],
    tokens: int = LAYER_TOKENS,
) -> None:
    """Of each model, whose layer's shard has so many bytes of fp32, into `draft`. Collective.

    Windows come last: where they cannot be opened, copies and collectives have been measured.
    """
    layers = {name: Layer.of(name, pace.device, tokens) for name in shards}
    copies: dict[str, tuple[CopySample, ...]] = {}

    def note(found: BesideLayers[Any]) -> None:
        draft.beside_layers += found.raw
        draft.left_out += found.left_out

    def transfers(ways: list[Way], name: str) -> None:
        alone = [measure_alone([way], [way.bytes_of(shards[name])], pace, effort, say=say)[0] for way in ways]
        found = transfers_beside_layer(layers[name], ways, alone, copies[name], pace, say=say)
        draft.transfers += found.samples
        note(found)

    for name, layer in layers.items():
        slowed = copies_beside_layer(layer, draft.copies, pace, say=say)
        known = {(sample.op, sample.elements): sample for sample in slowed.samples}
        draft.copies = [known.get((old.op, old.elements), old) for old in draft.copies]
        note(slowed)
        copies[name] = slowed.samples
        transfers(collectives(buffers), name)
    with one_sided(buffers, backend) as ours:
        for name in layers:
            transfers(ours, name)


def copies_beside_layer(
    layer: Layer, copies: Sequence[CopySample], pace: Pace, *, say: Callable[[str], None]
) -> BesideLayers[CopySample]:
    """Those in `copies` that are copy-in and `+=` of the layer, with what they cost it. Collective."""
    samples, raw, left_out = [], [], []
    for op, scene in _copy_scenes(layer).items():
        name = f"{op} beside a layer of {layer.model}"
        known = [sample for sample in copies if (sample.op, sample.elements) == (op, layer.shard_elements)]
        if not known:
            left_out.append(f"{name}: its time alone was not measured")
            continue
        say(name)
        measured = measure_scene(scene, pace)
        raw.append({"op": op, "elements": layer.shard_elements, "model": layer.model, **measured.as_dict()})
        if measured.problem:
            left_out.append(f"{name}: {measured.problem}")
            continue
        # The simulator has copies take what they take alone. A noisy one counts too: what it is wrong by, the transfer
        # that comes with it is wrong by the other way round.
        slower = slowdown(measured.lost_s, known[0].p50_s, measured.step_s)
        samples.append(replace(known[0], slowdown_compute=slower, beside_layer=layer.model))
    return BesideLayers(samples=tuple(samples), raw=tuple(raw), left_out=tuple(left_out))


def transfers_beside_layer(
    layer: Layer,
    ways: Sequence[Way],
    alone: Sequence[TransferSample],
    copies: Sequence[CopySample],
    pace: Pace,
    *,
    say: Callable[[str], None],
) -> BesideLayers[TransferSample]:
    """An unshard and a reduce of the layer's size, `alone` with what they cost it. Collective.

    `copies`: what they cost, found before. What a transfer costs is flagged without: the simulator may charge for them.
    """
    lost_s = {copy.op: copy.lost_s for copy in copies if copy.lost_s is not None and not copy.flagged}
    unshard, reduce = (way.case(sample.bytes, pace.device) for way, sample in zip(ways, alone, strict=True))
    adds = ways[1].op == "reduce_scatter"
    scenes = _transfer_scenes(layer, unshard.call, reduce.call, adds=adds)
    needed: list[set[CopyOp]] = [{"copy_in"}, {"copy_in", "add"} if adds else {"copy_in"}]
    found: list[Measured] = []
    samples, raw, left_out = [], [], []
    known_s = lost_s.get("copy_in", 0.0)
    for way, before, scene, ops in zip(ways, alone, scenes, needed, strict=True):
        name = f"{way.op} beside a layer of {layer.model}"
        say(name)
        measured = measure_scene(scene, pace)
        found.append(measured)
        raw.append({"op": before.op, "backend": before.backend, "bytes": before.bytes, "model": layer.model})
        raw[-1] |= measured.as_dict()
        problem = next((each.problem for each in found if each.problem), None)
        if problem:
            left_out.append(f"{name}: {problem}")
            continue
        unsure = any(each.noisy for each in found) or not ops <= lost_s.keys()
        samples.append(
            replace(
                before,
                flagged=before.flagged or unsure,
                overlapped_p50_s=max(measured.other_s, before.p50_s),
                slowdown_compute=slowdown(measured.lost_s - known_s, measured.other_s, measured.step_s),
                slowdown_copy_out=measured.stretch if way is ways[1] else None,
                beside_layer=layer.model,
            )
        )
        # What the simulator charges in a forward is part of what is lost in a backward.
        known_s = max(measured.lost_s, known_s) + (lost_s.get("add", 0.0) if adds else 0.0)
    return BesideLayers(samples=tuple(samples), raw=tuple(raw), left_out=tuple(left_out))


def _copy_scenes(layer: Layer) -> dict[CopyOp, Scene]:
    """A copy at a layer's beginning, alone beside it."""
    return {
        "copy_in": Scene(
            beside=[layer.forward],
            after=[layer.backward],
            launches=[Launch(at=0, calls=[layer.copy("copy_in")])],
        ),
        "add": Scene(
            before=[layer.forward],
            beside=[layer.backward],
            launches=[Launch(at=0, calls=[layer.copy("add")])],
        ),
    }


def _transfer_scenes(layer: Layer, unshard: Call, reduce: Call, *, adds: bool) -> tuple[Scene, Scene]:
    """A forward beside the next layer's unshard, and a backward beside that and the last layer's reduce."""
    copy_in, copy_out = layer.copy("copy_in"), layer.copies["copy_out"]
    forward = Scene(
        beside=[copy_out, layer.forward],
        after=[layer.backward],
        launches=[Launch(at=1, calls=[copy_in, unshard])],
        timed=1,
    )
    backward = Scene(
        before=[layer.forward],
        beside=[copy_out, layer.backward],
        launches=[
            Launch(at=0, calls=[reduce, *([layer.copy("add")] if adds else [])]),
            Launch(at=1, calls=[copy_in, unshard]),
        ],
    )
    return forward, backward
