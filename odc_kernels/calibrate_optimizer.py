"""The optimizer's step with clipping, publishing the parameters, and the host's time to enqueue a unit."""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from odc_kernels.calibrate_copies import shards_of
from odc_kernels.calibrate_shapes import layer_tensors, root_tensors
from odc_kernels.calibrate_timing import Effort, Item, Pace, Step, Timed, measure
from odc_kernels.collector import collected_between
from odc_kernels.lm import build_lm, pack, shard
from odc_kernels.optimizer_step import clip_and_step
from odc_kernels.timing import agree_max, synchronize
from odc_sim.calibration import HostSample, OptimizerSample
from odc_sim.models import ModelSpec, load_model

BYTES_EACH = 18
"""Of a parameter: fp32 parameter, gradient and two moments, and some room."""
HOST_LAYERS = (4, 28)
HOST_TOKENS = 64
HOST_WARM, HOST_REPEATS = 2, 6
HOST_MODEL, SMALL_HOST_MODEL = "qwen2.5-1.5b", "tiny"
"""Whatever model is asked for. Of much larger ones the device could be the slower even with few tokens, since their
parameters move all the same. A small stand-in will not do: the host of an H200 took a tenth to a third longer for
1.5B's forwards than for those of `tiny`, up to two fifths for its backwards (2026-11-30, on a GPU alone)."""
HOST_BYTES_EACH = 12
"""Of a parameter: whole in fp32, its shard and the gradient's, and some room."""


def measure_optimizer(
    models: Sequence[ModelSpec], pace: Pace, effort: Effort, *, memory_bytes: int, say: Callable[[str], None]
) -> tuple[list[OptimizerSample], list[str]]:
    """Clipping, AdamW and publishing for one layer, a quarter, and the whole of every model that fits. Collective."""
    world_size = dist.get_world_size()
    mesh = init_device_mesh(pace.device.type, (world_size,))
    sizes: dict[int, list[tuple[int, ...]]] = {}
    left_out: list[str] = []
    for model in models:
        for layers in sorted({1, -(-model.layers // 4), model.layers}):
            shapes = layer_tensors(model) * layers + (root_tensors(model) if layers == model.layers else [])
            local = shards_of(shapes, world_size)
            elements = sum(torch.Size(shape).numel() for shape in local)
            if elements * BYTES_EACH > memory_bytes:
                left_out.append(f"optimizer of {elements / 1e9:.1f}B parameters a rank: out of memory")
            else:
                sizes[elements] = local
    ordered = sorted(sizes.items())
    steps, publishes = (
        [Item(name=f"{what} of {n:,} parameters", make=partial(make, local, mesh), work=n) for n, local in ordered]
        for what, make in (("optimizer", _step), ("publish", _publish))
    )
    # hosts meet ahead of their devices at the end of a minibatch, so both have a lead here as well
    stepped, left = measure(steps, pace, effort, how="max", say=say, communicates=True)
    published, also_left = measure(publishes, pace, effort, how="max", say=say)
    samples = []
    for (elements, _), step, publish in zip(ordered, steps, publishes, strict=True):
        if step.name in stepped:
            samples.append(
                OptimizerSample(
                    parameters=elements,
                    step_s=_median(stepped[step.name]),
                    publish_s=_median(published[publish.name]) if publish.name in published else None,
                    flagged=stepped[step.name][0].flagged,
                )
            )
    return samples, left_out + left + also_left


def _median(timed: list[Timed]) -> float:
    return float(timed[0].percentiles["p50_s"])


def _step(local: Sequence[tuple[int, ...]], mesh: DeviceMesh) -> list[Step]:
    device = _device(mesh)

    def sharded(shape: tuple[int, ...]) -> DTensor:
        return DTensor.from_local(torch.full(shape, 1e-3, device=device), mesh, [Shard(0)], run_check=False)

    parameters = [nn.Parameter(sharded(shape)) for shape in local]
    for parameter, shape in zip(parameters, local, strict=True):
        parameter.grad = sharded(shape)
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=True)

    def step() -> None:
        clip_and_step(parameters, optimizer, 1.0)

    return [step]


def _publish(local: Sequence[tuple[int, ...]], mesh: DeviceMesh) -> list[Step]:
    """Zeroing the accumulators and casting the parameters into the window.

    Both are ordinary memory here, which is written at the same speed.
    """
    device = _device(mesh)
    sizes = [torch.Size(shape).numel() for shape in local]
    parameters, accumulators = (torch.ones(sum(sizes), device=device) for _ in range(2))
    window = torch.empty(sum(sizes), dtype=torch.bfloat16, device=device)
    sources, targets = list(parameters.split(sizes)), list(window.split(sizes))

    def publish() -> None:
        accumulators.zero_()
        torch._foreach_copy_(targets, sources)

    return [publish]


def _device(mesh: DeviceMesh) -> torch.device:
    return torch.device(mesh.device_type, torch.cuda.current_device() if mesh.device_type == "cuda" else None)


def host_model(memory_bytes: float) -> str:
    """The model whose layers a host is measured with, on a device of so much free memory."""
    fits = load_model(HOST_MODEL).parameters * HOST_BYTES_EACH <= memory_bytes
    return HOST_MODEL if fits else SMALL_HOST_MODEL


def measure_host(pace: Pace, model: str = SMALL_HOST_MODEL) -> HostSample:
    """Seconds to enqueue a layer of a sharded model, from the difference between few and many layers. Collective.

    The microbatches are tiny, so that the device is never behind. Gradients are recomputed and added to earlier ones,
    as in every microbatch but the first.
    """
    mesh = init_device_mesh(pace.device.type, (dist.get_world_size(),))
    few, many = (_enqueuing(model, layers, pace.device, mesh) for layers in HOST_LAYERS)
    layers = HOST_LAYERS[1] - HOST_LAYERS[0]
    with collected_between():  # as in training
        for enqueue in (few, many) * HOST_WARM:
            enqueue()
        # in turn, since what else the host's processor does comes and goes
        found = [(few(), many()) for _ in range(HOST_REPEATS)]
    forward_s, backward_s = (
        max(0.0, statistics.median((more[part] - less[part]) / layers for less, more in found)) for part in (0, 1)
    )
    return HostSample(
        seconds_per_unit_forward=agree_max(forward_s, pace.device),
        seconds_per_unit_backward=agree_max(backward_s, pace.device),
    )


def _enqueuing(model: str, layers: int, device: torch.device, mesh: DeviceMesh) -> Callable[[], tuple[float, float]]:
    """What enqueues a microbatch of a model with so many layers: seconds of its forward and of its backward."""
    lm = build_lm(model, device=device, num_layers=layers)
    shard(lm, mesh)
    batch = pack([torch.arange(HOST_TOKENS)], 1.0).to(device)

    def enqueue() -> tuple[float, float]:
        synchronize(device)
        start = time.perf_counter()
        loss = lm(batch)
        middle = time.perf_counter()
        loss.backward()
        end = time.perf_counter()
        return middle - start, end - middle

    return enqueue
