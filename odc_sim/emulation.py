"""Emulated training as the simulator sees it: what is executed in place of the model.

In `odc train --compute emulated` a unit's compute is a wait of the cost model's seconds, while everything that moves
bytes is real. So the simulator predicts such a run from the scaled compute costs and the transfers of the shapes that
are really moved, both of which are here.
"""

from dataclasses import dataclass, replace

import numpy as np

from odc_sim.costs import ComputeCosts, UnitCost
from odc_sim.errors import InputError
from odc_sim.hardware import Cluster, Host, Overlap, Slowdown
from odc_sim.models import ModelSpec
from odc_sim.transfers import TransferCosts

CPU_LAYER_PARAMETERS = 1 << 16
"""Of a layer on a CPU: eight ranks of a real model would neither fit nor move fast enough to be compared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EmulatedShape:
    """The parameters that an emulated model has; what `transfers.transfer_costs` needs of a model."""

    layers: int
    layer_parameters: int
    root_parameters: int

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        return self.layers * self.layer_parameters + self.root_parameters


def default_parameters_scale(spec: ModelSpec, device: str) -> int:
    """How many parameters of the model each emulated one stands for: 1 on a GPU ("cuda")."""
    return 1 if device == "cuda" else max(1, -(-spec.layer_parameters // CPU_LAYER_PARAMETERS))


def emulated_shape(spec: ModelSpec, parameters_scale: int) -> EmulatedShape:
    """`spec` with one of `parameters_scale` parameters, rounded up; the root has at least two.

    Raises:
        InputError: the scale is below 1.
    """
    if parameters_scale < 1:
        raise InputError(f"parameters_scale: got {parameters_scale}, expected at least 1")
    return EmulatedShape(
        layers=spec.layers,
        layer_parameters=-(-spec.layer_parameters // parameters_scale),
        root_parameters=max(2, -(-spec.root_parameters // parameters_scale)),
    )


def executed_costs(costs: ComputeCosts, time_scale: float) -> ComputeCosts:
    """`costs` as an emulated run executes them: `time_scale` seconds for each of theirs.

    Without floors, which are the launch times of kernels that do not run, and without residuals: units wait the line's
    seconds (`odc_kernels.emulated` has only the coefficients on its device), so a simulation must not expect others.

    Raises:
        InputError: the scale is not a number above 0.
    """
    if not 0.0 < time_scale < np.inf:
        raise InputError(f"time_scale: got {time_scale:g}, expected executed seconds per simulated second, above 0")

    def scaled(cost: UnitCost) -> UnitCost:
        return replace(cost.scaled(time_scale), floor_s=0.0, residuals=None)

    return replace(
        costs,
        embedding_forward=scaled(costs.embedding_forward),
        embedding_backward=scaled(costs.embedding_backward),
        layer_forward=scaled(costs.layer_forward),
        layer_backward=scaled(costs.layer_backward),
        head_forward=scaled(costs.head_forward),
        head_backward=scaled(costs.head_backward),
        source=f"{costs.source}, times {time_scale:g}",
    )


def uncontended(cluster: Cluster) -> Cluster:
    """`cluster` where compute is a wait: it takes nothing from the transfers beside it, nor they from it."""
    source = "emulated compute uses no multiprocessors"
    nothing = Overlap(unshard=Slowdown(), reduce=Slowdown(), source=source)
    return replace(cluster, overlap=dict.fromkeys(cluster.overlap, nothing))


def on_one_stream(transfers: TransferCosts, host: Host | None = None) -> TransferCosts:
    """`transfers` where device and host are one, as on a CPU: nothing overlaps, all of it delays the compute stream.

    `fully_shard` enqueues in the same order, but there are no streams to enqueue on: a gather, with its copies and what
    Python takes for it, comes before the compute of a unit, a reduction after it. What is left of a collective is that
    ranks meet there.
    """
    forward_s, backward_s = (host.seconds_per_unit_forward, host.seconds_per_unit_backward) if host else (0.0, 0.0)
    nothing = np.zeros_like(transfers.gather_s)
    # A unit's forward has a copy-out and its backward a copy-out and a pack; the root's backward only a pack.
    pack_host_s = np.full_like(nothing, max(backward_s - forward_s, 0.0))
    pack_host_s[0] = backward_s
    return replace(
        transfers,
        gather_s=nothing,
        reduce_s=nothing,
        copy_in_s=nothing,
        add_s=nothing,
        copy_out_s=transfers.copy_in_s + transfers.gather_s + transfers.copy_out_s + forward_s,
        pack_s=transfers.pack_s + transfers.reduce_s + transfers.add_s + pack_host_s,
    )
