"""What `odc calibrate` measures, phase by phase."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from odc_kernels.bench_cases import BF16_BYTES, Buffers
from odc_kernels.bench_files import hbm_bytes_per_s
from odc_kernels.calibrate_compute import fits_of, measure_model, samples_of
from odc_kernels.calibrate_copies import PARTS, measure_copies
from odc_kernels.calibrate_file import Draft, Talk
from odc_kernels.calibrate_layers import measure_beside_layers
from odc_kernels.calibrate_optimizer import host_model, measure_host, measure_optimizer
from odc_kernels.calibrate_scenes import QUICK_ROUNDS, ROUNDS
from odc_kernels.calibrate_shapes import (
    MIB,
    layer_shapes,
    plain_shapes,
    root_shapes,
    shard_bytes,
    transfer_sizes,
    unit_shards,
)
from odc_kernels.calibrate_timing import Effort, Pace
from odc_kernels.calibrate_transfers import (
    BESIDE_PRODUCTS,
    Way,
    collectives,
    collectives_fp32,
    interpolation_checks,
    measure_alone,
    measure_beside,
    one_sided,
    one_sided_fp32,
    room_bytes,
    with_beside,
)
from odc_kernels.calibrate_waiting import with_waiting
from odc_kernels.overlap import product
from odc_kernels.timing import agree_max, estimate
from odc_kernels.window import BackendName
from odc_sim.calibration import Ceilings
from odc_sim.models import ModelSpec, load_model

DeviceName = Literal["cuda", "cpu"]

BESIDE_BYTES = (4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
QUICK_BESIDE_BYTES = (16 * MIB, 64 * MIB)
WAITING_BYTES = (16 * MIB, 64 * MIB)
QUICK_WAITING_BYTES = (64 * MIB,)
LAYERS_BESIDE = 2
"""Models whose layers transfers are timed beside."""
FP32_SIZES = (64 << 10, MIB, 64 * MIB)
CEILING_PRODUCT = {"cuda": 8192, "cpu": 512}
MEMORY_SHARE = 0.6
"""Of the free memory, for transfer buffers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What the command line says, with everything filled in."""

    out: Path
    models: tuple[str, ...]
    quick: bool
    device: DeviceName
    backend: BackendName
    ranks: int
    command: str

    @property
    def on_gpu(self) -> bool:
        """Whether GPUs are measured."""
        return self.device == "cuda"


class Lab:
    """What the phases share on one rank."""

    def __init__(self, options: Options, device: torch.device, draft: Draft) -> None:
        self.options = options
        self.device = device
        self.draft = draft
        self.talk = Talk([], loud=False)
        self.specs: list[ModelSpec] = [load_model(name) for name in options.models]
        self.world_size = dist.get_world_size()
        self.pace = Pace(device)
        self.effort = _effort(options)

    def phases(self) -> list[tuple[str, Callable[[], None]]]:
        """Name and function of each; what others do not need last."""
        found: list[tuple[str, Callable[[], None]]] = [("ceilings", self.ceilings)]
        if self.world_size > 1:
            found += [("collectives", self.collectives), ("one-sided transfers", self.one_sided)]
        else:
            self.draft.left_out.append("transfers: there is only one rank")
        found += [(f"compute of {name}", partial(self.compute, name)) for name in self.options.models]
        found.append(("copies", self.copies))
        found.append(("optimizer and publish", self.optimizer))
        if self.options.on_gpu:  # a CPU is its own host, and its transfers run beside nothing
            found.append(("host", self.host))  # pragma: cuda-only
            if self.world_size > 1:  # pragma: cuda-only
                found.append(("transfers beside layers", self.beside_layers))
        return found

    def ceilings(self) -> None:
        """A large product and a large copy. The peer copy comes from the transfers."""
        self.pace.heat()
        size = CEILING_PRODUCT[self.options.device]
        gemm = product(size, self.device)
        gemm_s = estimate(lambda _: gemm(), self.device, calls=20)
        memory = hbm_bytes_per_s() if self.options.on_gpu else _cpu_copy_bytes_per_s()
        self.draft.ceilings = Ceilings(gemm_flops=2 * size**3 / gemm_s, hbm_bytes_per_s=memory)

    def collectives(self) -> None:
        """NCCL's, or gloo's."""
        buffers = self._buffers()
        self._transfers(collectives(buffers))
        self._fp32(collectives_fp32(buffers))
        if self.options.on_gpu:  # pragma: cuda-only
            self.draft.transfers = with_waiting(
                self.draft.transfers,
                collectives(buffers),
                QUICK_WAITING_BYTES if self.options.quick else WAITING_BYTES,
                self.options.models[0],
                self.pace,
                say=self.talk.say,
            )

    def one_sided(self) -> None:
        """Our own."""
        buffers = self._buffers()
        with one_sided(buffers, self.options.backend) as ways:
            self._transfers(ways)
        with one_sided_fp32(buffers, self.options.backend) as ways:
            self._fp32(ways)
        fastest = max((self.world_size - 1) * s.bytes / s.p50_s for s in self.draft.transfers if s.op == "gather")
        if self.draft.ceilings is not None:
            self.draft.ceilings = replace(self.draft.ceilings, p2p_bytes_per_s=fastest)

    def _fp32(self, ways: list[Way]) -> None:
        """A few sizes of fp32 parameters."""
        sizes = [size for size in FP32_SIZES if size in self._agreed_sizes()]
        self.draft.transfers += measure_alone(ways, sizes, self.pace, self.effort["transfers"], say=self.talk.say)

    def compute(self, name: str) -> None:
        """One model's units, and their fits."""
        kind = self.options.quick, self.options.on_gpu
        found, left_out = measure_model(
            name,
            self.pace,
            self.effort["compute"],
            layer=layer_shapes(*kind),
            plain=plain_shapes(*kind),
            root=root_shapes(*kind),
            say=self.talk.say,
        )
        self.draft.left_out += left_out
        model = load_model(name).name
        self.draft.compute += samples_of(model, found)
        fits, problems = fits_of(model, found)
        self.draft.fits += fits
        if problems:
            raise RuntimeError("; ".join(problems))

    def copies(self) -> None:
        """FSDP2's own."""
        samples, left_out = measure_copies(
            self.specs,
            self.pace,
            self.effort["copies"],
            world_size=self.world_size,
            parts=PARTS,
            say=self.talk.say,
        )
        self.draft.copies += samples
        self.draft.left_out += left_out

    def optimizer(self) -> None:
        """Clipping, AdamW, publishing."""
        samples, left_out = measure_optimizer(
            self.specs,
            self.pace,
            self.effort["copies"],
            memory_bytes=int(0.9 * self._agreed_free_bytes()),
            say=self.talk.say,
        )
        self.draft.optimizer += samples
        self.draft.left_out += left_out

    def host(self) -> None:  # pragma: cuda-only
        """Enqueuing a unit."""
        self.draft.host = measure_host(self.pace, host_model(0.9 * self._agreed_free_bytes()))

    def beside_layers(self, **options: Any) -> None:
        """What transfers and copies of a layer's own size cost that layer."""
        shards: dict[str, int] = {}
        for name, spec in zip(self.options.models[:LAYERS_BESIDE], self.specs, strict=False):
            shard = shard_bytes(spec.layer_parameters, self.world_size)
            if shard <= self._agreed_sizes()[-1]:
                shards[name] = shard
            else:
                self.draft.left_out.append(f"transfers beside a layer of {spec.name}: no memory for its shards")
        if not shards:
            return
        buffers = Buffers.allocate(room_bytes(list(shards.values()), self.device) // BF16_BYTES, self.device)
        effort, say = self.effort["transfers"], self.talk.say
        options.setdefault("rounds", QUICK_ROUNDS if self.options.quick else ROUNDS)
        measure_beside_layers(shards, buffers, self.options.backend, self.draft, self.pace, effort, say=say, **options)

    def _sizes(self) -> tuple[int, ...]:
        sizes = transfer_sizes(self.specs, self.world_size, quick=self.options.quick, on_gpu=self.options.on_gpu)
        # published, gathered, gradients, reduced, and the two windows
        most = MEMORY_SHARE * _free_bytes(self.device, self.world_size) / (4 + 2 * self.world_size)
        return tuple(size for size in sizes if size <= most)

    def _buffers(self) -> Buffers:
        return Buffers.allocate(room_bytes(self._agreed_sizes(), self.device) // BF16_BYTES, self.device)

    def _agreed_free_bytes(self) -> float:
        """Of the rank that has least: what one leaves out, none may wait for."""
        return -agree_max(-_free_bytes(self.device, self.world_size), self.device)

    def _agreed_sizes(self) -> tuple[int, ...]:
        """The sizes for which every rank has memory; the same on every call."""
        if not hasattr(self, "_agreed"):
            everyone: list[tuple[int, ...]] = [()] * self.world_size
            dist.all_gather_object(everyone, self._sizes())
            self._agreed = min(everyone, key=len)
        return self._agreed

    def _transfers(self, ways: list[Way]) -> None:
        say, effort, sizes = self.talk.say, self.effort["transfers"], self._agreed_sizes()
        alone = measure_alone(ways, sizes, self.pace, effort, say=say)
        start = len(self.draft.transfers)
        self.draft.transfers += alone
        shards = [n for n in unit_shards(self.specs, self.world_size) if n <= sizes[-1]]
        for way in ways:
            checked = [way.bytes_of(n) for n in shards]
            self.draft.checks += interpolation_checks(
                alone, measure_alone([way], checked, self.pace, effort, say=say) if checked else []
            )
        if self.options.on_gpu:  # pragma: cuda-only
            beside_sizes = QUICK_BESIDE_BYTES if self.options.quick else BESIDE_BYTES
            products = BESIDE_PRODUCTS[:1] if self.options.quick else BESIDE_PRODUCTS
            beside = measure_beside(
                ways, alone, [n for n in beside_sizes if n in sizes], products, self.device, say=say
            )
            self.draft.transfers[start:] = with_beside(alone, beside)


def _effort(options: Options) -> dict[str, Effort]:
    """By what is measured. A CPU shares its time with other programs, so that much less can be asked of it."""
    if not options.on_gpu:
        calm = Effort(budget_s=0.05 if options.quick else 0.15, limit_s=4.0, most=20, spread=10.0, drift=2.0)
        return {"compute": calm, "copies": calm, "transfers": replace(calm, budget_s=0.05)}
    return {
        "compute": Effort(budget_s=0.15, limit_s=30.0, most=8, spread=1.15, drift=0.05),
        "copies": Effort(budget_s=0.05, limit_s=10.0, most=20, spread=1.15, drift=0.05),
        "transfers": Effort(budget_s=0.04 if options.quick else 0.08, limit_s=10.0, most=20, spread=1.3, drift=0.1),
    }


def _free_bytes(device: torch.device, world_size: int) -> float:
    """This rank's share of the free memory."""
    if device.type == "cuda":  # pragma: cuda-only
        torch.cuda.empty_cache()
        return float(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / world_size


def _cpu_copy_bytes_per_s() -> float:
    """Bytes read plus bytes written per second by a large copy."""
    source = torch.ones(16 * MIB)
    target = torch.empty_like(source)
    copies = 5
    target.copy_(source)
    start = time.perf_counter()
    for _ in range(copies):
        target.copy_(source)
    return copies * 2 * source.nbytes / (time.perf_counter() - start)
