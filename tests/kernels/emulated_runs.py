"""Emulated minibatches on CPU ranks, under both schedules in one set of ranks."""

import time
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from odc_kernels import emulated
from odc_kernels.fsdp import OnDemand
from odc_kernels.lm import pack, shard
from odc_kernels.waits import HostClock
from odc_sim.costs import fitted_costs
from odc_sim.models import load_model

LAYERS = 2
"""The 28 of qwen2.5-1.5b in two units, since a collective of eight ranks takes two cores 10 to 25 ms."""
SPEC = replace(load_model("qwen2.5-1.5b"), layers=LAYERS)
TIME_SCALE = 0.16

Minibatch = list[list[list[int]]]
"""Sample lengths of each microbatch of each rank."""


def costs():
    whole = fitted_costs(load_model("qwen2.5-1.5b"))
    factor = whole.layers / LAYERS
    return replace(
        whole,
        layers=LAYERS,
        layer_forward=whole.layer_forward.scaled(factor),
        layer_backward=whole.layer_backward.scaled(factor),
    )


@dataclass(frozen=True, kw_only=True)
class Executed:
    """Seconds of one rank's minibatches, [B] each, on a clock that all ranks share."""

    start_s: list[float]
    computed_s: list[float]
    """When gradients were complete."""
    end_s: list[float]
    busy_s: list[float]
    """As measured, in all units."""


class Watched(HostClock):
    """Adds up how long units took."""

    total_s = 0.0

    def wait(self, durations, number):
        super().wait(durations, number)
        self.total_s += time.perf_counter() - self._moment_s


def execute(rank: int, minibatches: dict[str, list[Minibatch]]) -> dict[str, Executed]:
    """By schedule."""
    return {schedule: _execute(rank, schedule, part) for schedule, part in minibatches.items()}


def _execute(rank: int, schedule: str, minibatches: list[Minibatch]) -> Executed:
    clock = Watched()
    emulated.make_clock = lambda device: clock
    lm = emulated.EmulatedLm(SPEC, costs(), time_scale=TIME_SCALE, device=torch.device("cpu"))
    shard(lm, init_device_mesh("cpu", (dist.get_world_size(),)))
    odc = OnDemand(lm) if schedule == "odc" else None
    optimizer = torch.optim.AdamW(lm.parameters())
    rows = []
    for ranks in minibatches:
        batches = [pack([torch.zeros(n, dtype=torch.int64) for n in lengths], 1.0) for lengths in ranks[rank]]
        start_s, busy_before_s = time.perf_counter(), clock.total_s
        for batch in batches if odc is None else odc.minibatch(batches):
            lm(batch).backward()
        computed_s = time.perf_counter()
        torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
        optimizer.step()
        if odc is None:
            optimizer.zero_grad()
        else:
            odc.publish()
        rows.append((start_s, computed_s, time.perf_counter(), clock.total_s - busy_before_s))
    if odc is not None:
        odc.close()
    start, computed, end, busy = (list(column) for column in np.array(rows).T)
    return Executed(start_s=start, computed_s=computed, end_s=end, busy_s=busy)
