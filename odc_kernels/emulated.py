"""A model whose compute is only time, in place of `odc_kernels.lm.CausalLm`.

Each unit waits as long as a cost model says that it takes for the microbatch, in forward and in backward. Its
parameters are real and take part in the loss, so unshards, reductions, barriers and the optimizer are real as well.
What differs from a real model: no activations, no contention between compute and transfers (a waiting unit uses no
multiprocessors), one parameter a layer, two in the root.
"""

from typing import Any

import torch
from torch import nn

from odc_kernels.lm import PackedBatch
from odc_kernels.waits import Clock, make_clock
from odc_sim.costs import ComputeCosts
from odc_sim.emulation import default_parameters_scale, emulated_shape, executed_costs
from odc_sim.errors import InputError
from odc_sim.models import ModelSpec

UNITS = ("embedding", "layer", "head")
"""Rows of the durations: each in forward, then each in backward."""


class EmulatedLm(nn.Module):
    """Units that wait: `layers` (FSDP units 1..L) and the root with embedding and head (0).

    The loss is the square of the mean of all units' mean parameters, 1 at first, times the weights of the batch.

    Args:
        spec: of the model that is emulated.
        costs: its compute on the emulated device.
        time_scale: executed seconds for each second of `costs`.
        device: where the parameters are, and where time passes.
        parameters_scale: parameters of the model for each one here; None: 1 on a GPU, on a CPU as many as give a layer
            no more than 65,536.

    Raises:
        InputError: `costs` are not for this model, or a scale is out of range.
    """

    def __init__(
        self,
        spec: ModelSpec,
        costs: ComputeCosts,
        *,
        time_scale: float,
        device: torch.device,
        parameters_scale: int | None = None,
    ) -> None:
        super().__init__()
        if costs.layers != spec.layers:
            raise InputError(f"emulated {spec.name}: got costs of {costs.layers} layers, expected {spec.layers}")
        self.spec = spec
        self.costs = executed_costs(costs, time_scale)
        """In executed seconds."""
        scale = default_parameters_scale(spec, device.type) if parameters_scale is None else parameters_scale
        self.shape = emulated_shape(spec, scale)
        self._clock = make_clock(device)
        c = self.costs
        rows = (
            *(c.embedding_forward, c.layer_forward, c.head_forward),
            *(c.embedding_backward, c.layer_backward, c.head_backward),
        )
        self._table = torch.tensor(
            [[row.c0_s, row.c1_s_per_token, row.c2_s_per_token2] for row in rows], dtype=torch.float64, device=device
        )
        share = 1 / (spec.layers + 2)
        head = self.shape.root_parameters // 2
        self.embedding = Unit(self.shape.root_parameters - head, share, "embedding", self._clock, device)
        self.blocks = nn.ModuleList(
            Unit(self.shape.layer_parameters, share, "layer", self._clock, device) for _ in range(spec.layers)
        )
        self.head = Unit(head, share, "head", self._clock, device)

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder layers."""
        return list(self.blocks)

    def seconds(self, batch: PackedBatch) -> torch.Tensor:
        """Executed seconds of embedding, a layer and head in forward, then in backward: fp64 [6]."""
        lengths = batch.starts.diff().double()
        features = torch.stack((torch.ones_like(lengths[0]), lengths.sum(), lengths.square().sum()))
        return self._table @ features

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """The loss, fp32 []."""
        durations = self._clock.durations(self.seconds(batch))
        x = self.embedding(batch.weights.new_zeros(1), durations)
        for block in self.blocks:
            x = block(x, durations)
        x = self.head(x, durations)
        return batch.weights.sum() * x.float().square().sum()


class Unit(nn.Module):
    """Parameters, ones at first, and time."""

    def __init__(self, numel: int, share: float, kind: str, clock: Clock, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(numel, device=device))
        self._share = share
        self._number = UNITS.index(kind)
        self._clock = clock

    def forward(self, x: torch.Tensor, durations: Any) -> torch.Tensor:
        """x [1] plus this unit's share of the mean of all units' mean parameters, after its time has passed."""
        result: torch.Tensor = _Compute.apply(x, self.weight, self._share, self._clock, durations, self._number)
        return result


class _Compute(torch.autograd.Function):
    """What a unit really computes happens within its time."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, share: float, clock: Clock, durations: Any, number: int
    ) -> torch.Tensor:
        clock.note()
        y = x + share * weight.mean()
        ctx.weight_like = weight.shape, weight.dtype
        ctx.rest = share, clock, durations, number
        clock.wait(durations, number)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        share, clock, durations, number = ctx.rest
        clock.note()
        shape, dtype = ctx.weight_like
        of_weight = (gradient * (share / shape[0])).to(dtype).expand(shape).contiguous()
        clock.wait(durations, len(UNITS) + number)
        return gradient, of_weight, None, None, None, None
