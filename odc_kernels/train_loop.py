"""One rank's minibatches, one after another without a stop: numbers of a minibatch are read while the next one runs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from odc_kernels.lm import PackedBatch
from odc_kernels.optimizer_step import clip_and_step
from odc_kernels.train_data import Samples, microbatches
from odc_kernels.train_faults import Peak, Place, not_finite, out_of_memory
from odc_kernels.train_job import Job
from odc_kernels.train_modes import Mode
from odc_kernels.train_recorder import COMPUTE_KINDS, Recorded, Recorder, Row
from odc_sim.errors import RunError
from odc_sim.memory_moments import Place as PlaceInMinibatch
from odc_sim.memory_moments import place_of
from odc_sim.models import ModelSpec

Spans = list[tuple[int, list[Row]]]
"""Of a rank: minibatches and their spans."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ran:
    """A minibatch whose work has been enqueued."""

    number: int
    recorded: Recorded
    numbers: torch.Tensor
    """fp32 [2] on the host, once the device has finished: sum of this rank's losses, norm of the gradient."""
    memory_bytes: int
    batches: Sequence[PackedBatch]
    """Kept until then: they were made on another stream than the one that reads them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What a rank says of a minibatch, on rank 0's clock."""

    start_s: float
    end_s: float
    busy_s: float
    loss: float
    norm: float
    memory_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Settled:
    """A finished minibatch."""

    number: int
    loss: float
    norm: float
    shares: Sequence[Share]
    """Of every rank."""


@dataclass(kw_only=True)
class Worker:
    """A rank at work."""

    rank: int
    job: Job
    device: torch.device
    model: nn.Module
    spec: ModelSpec
    optimizer: torch.optim.Optimizer
    mode: Mode
    recorder: Recorder
    samples: Samples
    control: dist.ProcessGroup
    """All ranks, over the hosts' network: what is said there keeps no device waiting."""
    other_bytes: int = 0
    """Memory of the device that torch's allocator does not count."""
    _peak: Peak | None = None
    _unsent: Spans = field(default_factory=list)

    def __post_init__(self) -> None:
        self._cuda = self.device.type == "cuda"
        self._copies = torch.cuda.Stream(self.device) if self._cuda else None
        self._parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        if self._cuda:  # pragma: cuda-only
            self.other_bytes = self._other_bytes()
        # Numbers of a minibatch are read before those of the one after the next are written.
        self._numbers = [torch.zeros(2, pin_memory=self._cuda) for _ in range(2)]

    def prepare(self, number: int) -> list[PackedBatch]:
        """The microbatches of a minibatch, on the device when its work begins."""
        batches = microbatches(self.job.plan, self.samples, number, self.rank)
        if self._copies is not None:  # pragma: cuda-only
            # On the compute stream the copies would wait for the minibatch that runs now, and the host with them.
            with torch.cuda.stream(self._copies):
                moved = [batch.to(self.device) for batch in batches]
            torch.cuda.current_stream().wait_stream(self._copies)
            return moved
        return list(batches)

    def run(self, number: int, batches: Sequence[PackedBatch]) -> Ran:
        """Enqueue a minibatch.

        Raises:
            RunError: out of memory; the line says where, and what would fit.
        """
        total = torch.zeros((), device=self.device)
        self.recorder.begin()
        peak_bytes = 0
        for place, batch in enumerate(self.mode.microbatches(batches)):
            self.recorder.microbatch(place)
            try:
                loss = self.model(batch)
                loss.backward()
            except torch.OutOfMemoryError:
                raise RunError(self._out_of_memory(number, place, batch)) from None
            total += loss.detach()
            peak_bytes = max(peak_bytes, self._take_peak(batch.num_tokens, place_of(place, len(batches))))
        with self.recorder.span("optimizer"):
            norm = clip_and_step(self._parameters, self.optimizer, self.job.config.max_grad_norm)
            numbers = self._numbers[number % 2]
            numbers.copy_(torch.stack([total, norm]), non_blocking=True)
        peak_bytes = max(peak_bytes, self._take_peak())
        if self.mode.publishes:
            with self.recorder.span("publish"):
                self.mode.publish()
        else:
            self.mode.publish()
        return Ran(
            number=number,
            recorded=self.recorder.end(),
            numbers=numbers,
            memory_bytes=peak_bytes,
            batches=batches,
        )

    def settle(self, ran: Ran) -> Settled:
        """Wait until all ranks have finished a minibatch, and share its numbers.

        Raises:
            RunError: the loss or the gradient is not finite; on all ranks.
        """
        start_s, end_s, rows = self.recorder.resolve(ran.recorded)
        loss, norm = ran.numbers.tolist()
        busy_s = sum(row.end_s - row.start_s for row in rows if row.kind in COMPUTE_KINDS and row.stream == "compute")
        own = Share(
            start_s=start_s,
            end_s=end_s,
            busy_s=busy_s if self.job.timeline else math.nan,
            loss=loss,
            norm=norm,
            memory_bytes=ran.memory_bytes,
        )
        self._unsent.append((ran.number, rows))
        shares: list[Any] = [None] * self.job.plan.world_size
        dist.all_gather_object(shares, own, group=self.control)
        # FSDP2 divides gradients by the number of ranks, so the sum over ranks is that many times the mean.
        mean = sum(share.loss for share in shares) / len(shares)
        if not (math.isfinite(mean) and math.isfinite(norm)):
            raise RunError(not_finite(ran.number, mean, norm))
        return Settled(number=ran.number, loss=mean, norm=norm, shares=shares)

    def collect(self) -> list[Spans]:
        """Every rank's spans since the last call, on rank 0; nothing elsewhere. Collective."""
        unsent, self._unsent = self._unsent, []
        gathered: list[Any] | None = [None] * self.job.plan.world_size if self.rank == 0 else None
        dist.gather_object(unsent, gathered, dst=0, group=self.control)
        return gathered or []

    def warm_up(self, numbers: Sequence[int]) -> None:
        """Run minibatches that change nothing: without learning, and the optimizer forgets them."""
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        for number in numbers:
            self.recorder.resolve(self.run(number, self.prepare(number)).recorded)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for state in self.optimizer.state.values():
            for value in state.values():
                value.zero_()
        if self._cuda:  # pragma: cuda-only
            torch.cuda.synchronize(self.device)
            self.other_bytes = self._other_bytes()

    def _take_peak(self, tokens: int = 0, place: PlaceInMinibatch = "only") -> int:
        """The most memory since the last call; of a microbatch of so many tokens, remember it."""
        num_bytes = 0
        if self._cuda:  # pragma: cuda-only
            num_bytes = torch.cuda.max_memory_allocated(self.device) + self.other_bytes
            torch.cuda.reset_peak_memory_stats(self.device)
            if tokens and (self._peak is None or tokens > self._peak.tokens):
                self._peak = Peak(tokens=tokens, place=place, num_bytes=num_bytes)
        return num_bytes

    def _other_bytes(self) -> int:  # pragma: cuda-only
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free - torch.cuda.memory_reserved(self.device)

    def _out_of_memory(self, number: int, microbatch: int, batch: PackedBatch) -> str:
        place = Place(minibatch=number, rank=self.rank, microbatch=microbatch, tokens=batch.num_tokens)
        total = torch.cuda.mem_get_info(self.device)[1] if self._cuda else 0
        return out_of_memory(place, self.spec, self.job.config, memory_bytes=total, peak=self._peak)
