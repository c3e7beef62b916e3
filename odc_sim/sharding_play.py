"""One sharding strategy in one transport: how long the minibatches take, what is sent, what memory holds."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from odc_sim.costs import ComputeCosts
from odc_sim.errors import InputError
from odc_sim.execution import Load, execute
from odc_sim.inputs import Inputs, load_inputs
from odc_sim.memory import fits_well
from odc_sim.memory_moments import BF16_BYTES, Alive
from odc_sim.models import ModelSpec
from odc_sim.parts import compute_provenance, load_of, peak_of, plan_of, schedule_of, transfers_of
from odc_sim.plans import Plan
from odc_sim.policies import POLICIES
from odc_sim.sharding import Granularity, Strategy
from odc_sim.sharding_costs import Costs
from odc_sim.study import Study
from odc_sim.topology import make_topology
from odc_sim.transfers import ITEMSIZE_BYTES, Provenance, TransferCosts

Floats = NDArray[np.float64]
Transport = Literal["collective", "collective-deferred", "odc"]

BASE_POLICY = "lb-micro"
"""Of what speedups are relative to."""
TRIED = (BASE_POLICY, "lb-mini", "cost-rows")
"""Policies that a row may have, where a study names none. Where ranks wait for each other in every microbatch, only
those with equal counts."""


SETTLED = ("schedule", "baseline", "pad_microbatches", "batch_minibatches")
"""Fields of a study that strategies settle."""
UNUSED = ("stability", "calibration_error", "plan", "engine", "barrier")
"""Those that are not for this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One strategy in one transport."""

    strategy: str
    transport: Transport
    policy: str
    meets: str
    """Whom a rank waits for in every microbatch."""
    state_bytes: int
    """Parameters, gradients and optimizer state on a rank."""
    peak_bytes: int
    fits: bool
    network_bytes: float
    """What a node sends to others in a minibatch."""
    sync_s: float
    """What making nodes equal takes at the end of a minibatch, beyond what the last backward hides."""
    minibatch_s: float
    samples_per_s_per_device: float
    speedup: float
    """Over ZeRO-3 with collectives, dealt by BASE_POLICY."""
    speedup_ci95: tuple[float, float]
    compute: str
    """Where compute times come from."""
    provenance: Provenance
    """Of transfers; between nodes, once a minibatch, always analytic."""


def prepare(study: Study) -> "Game":
    """Deal the samples and price the transfers.

    Raises:
        InputError: as `shard`.
    """
    _check(study)
    inputs = load_inputs(study)
    model, cluster = inputs.model, inputs.machine.cluster
    topology = make_topology(cluster, study.devices, study.collectives)
    over: dict[Granularity, int] = {"N": 1, "I": topology.group, "G": study.devices}

    def costs_of(one_sided: bool) -> dict[Granularity, TransferCosts]:
        return {
            granularity: transfers_of(inputs, one_sided=one_sided, world_size=world_size)
            for granularity, world_size in over.items()
        }

    costs = Costs(
        collective=costs_of(False),
        one_sided=costs_of(True),
        cluster=cluster,
        topology=topology,
        parameters=model.parameters,
        parameter_bytes=ITEMSIZE_BYTES[study.gather_dtype],
        units=model.layers + 1,
        root_share=model.root_parameters / model.parameters,
        hides=not inputs.machine.one_stream,
    )
    plans = {name: plan_of(inputs, name) for name in dict.fromkeys((BASE_POLICY, *(study.policy or TRIED)))}
    dealt = {name: (plan, load_of(inputs, plan)) for name, plan in plans.items()}
    return Game(inputs=inputs, costs=costs, dealt=dealt)


@dataclass(frozen=True, kw_only=True, slots=True)
class Game:
    """Samples, dealt by each policy, and what transfers cost; `best` and `run` play them."""

    inputs: Inputs
    costs: Costs
    dealt: Mapping[str, tuple[Plan, Load]]

    def best(self, strategy: Strategy, transport: Transport) -> tuple[Row, Floats]:
        """Under the policy that is fastest, of those that fit (well) if any does; and the seconds of each minibatch."""
        alone = transport != "collective" or strategy.meets == "nobody"
        asked = self.inputs.study.policy or TRIED
        able = [name for name in asked if alone or POLICIES[name].equal_counts]
        ran = [self.run(strategy, transport, name) for name in able or [BASE_POLICY]]
        memory_bytes = self.inputs.machine.cluster.device.memory_bytes

        def order(each: tuple[Row, Floats]) -> tuple[bool, bool, float]:
            row, _ = each
            return not row.fits, not fits_well(row.peak_bytes / memory_bytes), row.minibatch_s

        return min(ran, key=order)

    def run(self, strategy: Strategy, transport: Transport, policy: str) -> tuple[Row, Floats]:
        """Under one policy; speedups are yet to be told."""
        return _run(self.inputs, self.costs, *self.dealt[policy], strategy, transport)


def _check(study: Study) -> None:
    for field in study.changed(*SETTLED, *UNUSED):
        settled = ", whose transports have their own" if field == "schedule" else ""
        flag = f"--{field.replace('_', '-')}"
        raise InputError(f"{flag}: not for odc sharding{settled}; leave it out, or use odc simulate")
    if study.devices < 2:
        raise InputError(f"--devices: got {study.devices}, expected at least 2 to divide anything over")


def _run(
    inputs: Inputs, costs: Costs, plan: Plan, load: Load, strategy: Strategy, transport: Transport
) -> tuple[Row, Floats]:
    study, topology, cluster = inputs.study, costs.topology, inputs.machine.cluster
    one_sided, deferred = transport == "odc", transport == "collective-deferred"
    alone = one_sided or strategy.meets == "nobody"
    schedule = schedule_of(study, "odc" if alone else transport)
    copies = strategy.copies("paper", published=one_sided)  # `odc simulate` charges nothing for those of `mixed`
    transfers = costs.of(strategy, one_sided=one_sided, copies=copies)
    size = study.devices if strategy.meets == "all ranks" else topology.group
    run = execute(load.groups(size), inputs.compute, transfers, cluster, schedule)
    slowest_s = run.makespan_s.reshape(study.minibatches, -1).max(axis=1)
    sync, hides = costs.sync(strategy), costs.hides_sync(strategy, one_sided=one_sided)
    in_step = 1 if alone else size
    backward_s = _last_backward_s(load, inputs.compute, together=in_step)
    exposed_s = sync.exposed_s(inputs.model.layers, backward_s, hides=hides)
    makespan_s = slowest_s + exposed_s
    state = strategy.state(
        inputs.model.parameters,
        study.recipe,
        node=topology.group,
        world_size=study.devices,
        window_bytes=costs.parameter_bytes * one_sided,
        copy_bytes=costs.parameter_bytes,
    )
    peak_bytes = peak_of(inputs, plan, transport, partial(_divided, strategy, state, inputs.model)).total_bytes
    network_bytes = costs.microbatches_bytes(strategy, load.counts, schedule)
    row = Row(
        strategy=strategy.name,
        transport=transport,
        policy=plan.policy,
        meets="nobody" if alone or deferred else strategy.meets,
        state_bytes=sum(state.values()),
        peak_bytes=peak_bytes,
        fits=peak_bytes <= cluster.device.memory_bytes,
        network_bytes=network_bytes + sync.gradients_bytes + sync.parameters_bytes,
        sync_s=float(exposed_s.mean()),
        minibatch_s=float(makespan_s.mean()),
        samples_per_s_per_device=study.minibatch_size / float(makespan_s.mean()),
        speedup=1.0,
        speedup_ci95=(1.0, 1.0),
        compute=compute_provenance(inputs, plan),
        provenance=costs.provenance(strategy, one_sided=one_sided),
    )
    return row, makespan_s


def _divided(
    strategy: Strategy, state: Mapping[str, int], model: ModelSpec, alive: Alive, of_full_sharding: dict[str, int]
) -> dict[str, int]:
    """The memory of a moment: parameters that are not divided are not gathered, gradients that are not are not reduced
    in a microbatch, and of gradients there are those that full sharding has by then."""
    found = {**of_full_sharding, **state}
    found["gradients"] = -(-state["gradients"] * alive.gradients // model.parameters)
    if strategy.parameters == "N" and state["parameters"] == BF16_BYTES * model.parameters:  # else they are cast
        found["unsharded"] -= alive.gathered
    if strategy.gradients == "N":
        found["staging"] = 0
    return found


def _last_backward_s(load: Load, compute: ComputeCosts, *, together: int) -> Floats:
    """[B] of a layer, in the last microbatch of whoever ends last, for which all wait: a rank, or (`together` of them)
    ranks that take every microbatch in step, at the pace of the slowest."""
    units = (compute.layer_forward, compute.layer_backward)
    forward, backward = (unit(load.tokens, load.squares) / load.speed for unit in units)
    minibatches, most, ranks = load.tokens.shape
    exists = np.arange(most)[None, :, None] < load.counts[:, None, :]
    shape = (minibatches, most, ranks // together, together)
    both_s, backward_s = (
        np.where(exists, each, 0.0).reshape(shape).max(axis=3) for each in (forward + backward, backward)
    )
    counts = load.counts.reshape(minibatches, -1, together).max(axis=2)
    rows, slowest = np.arange(minibatches), both_s.sum(axis=1).argmax(axis=1)
    last = np.maximum(counts[rows, slowest] - 1, 0)
    found: Floats = backward_s[rows, last, slowest]
    return found
