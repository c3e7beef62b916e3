"""What a study says of schedules, transfers, plans and memory, as the engines and the estimates take it."""

from typing import TypedDict

import numpy as np

from odc_sim.costs import provenance_between
from odc_sim.emulation import on_one_stream
from odc_sim.execution import Load
from odc_sim.inputs import SHUFFLE_STREAM, Inputs
from odc_sim.memory import Division, GatherDtype, MemoryEstimate, Recipe, largest_max_tokens, peak_memory
from odc_sim.memory_moments import Place
from odc_sim.memory_plan import plan_peak
from odc_sim.plans import Plan, pad_microbatches
from odc_sim.policies import POLICIES, lay_out
from odc_sim.schedules import Schedule, make_schedule
from odc_sim.study import Study
from odc_sim.transfers import TransferCosts, transfer_costs


def baseline_of(study: Study) -> tuple[str, str]:
    """Schedule and policy that speedups are relative to."""
    schedule, policy = study.baseline.split("/")
    return schedule, policy


def resampled_together(study: Study, *policies: str) -> int:
    """Minibatches that a bootstrap must draw as one: policies of a whole batch move samples between its minibatches."""
    whole_batch = any(name in POLICIES and POLICIES[name].whole_batch for name in policies)
    return study.batch_minibatches if whole_batch else 1


def schedule_of(study: Study, name: str) -> Schedule:
    """A schedule with the settings of a study."""
    return make_schedule(
        name,
        barrier=study.barrier,
        forward_prefetch=study.forward_prefetch,
        backward_prefetch=study.backward_prefetch,
        separate_reduce=study.separate_reduce,
        port_contention=study.port_contention,
    )


def transfers_of(inputs: Inputs, *, one_sided: bool, world_size: int) -> TransferCosts:
    """Of a model divided over so many ranks, as the machine runs them."""
    costs = transfer_costs(
        inputs.model,
        inputs.machine.cluster,
        world_size=world_size,
        one_sided=one_sided,
        gather_dtype=inputs.study.gather_dtype,
        collectives=inputs.study.collectives,
        calibration=inputs.machine.calibration,
    )
    return on_one_stream(costs) if inputs.machine.one_stream else costs


def load_of(inputs: Inputs, plan: Plan) -> Load:
    """What ranks compute, with a study's device speeds and jitter."""
    return Load.of(plan, inputs.study.device_speed, inputs.study.jitter, inputs.study.seed)


def plan_of(inputs: Inputs, policy: str) -> Plan:
    """The drawn samples dealt out by a policy.

    Raises:
        InputError: the policy cannot deal them.
    """
    study = inputs.study
    layout = lay_out(
        policy,
        inputs.minibatches,
        inputs.lengths,
        study.devices,
        inputs.max_tokens,
        inputs.sample_cost_s,
        np.random.default_rng([study.seed, SHUFFLE_STREAM]),
        study.batch_minibatches,
    )
    made = Plan(
        workload=inputs.workload,
        model=inputs.model.name,
        world_size=study.devices,
        minibatch_size=study.minibatch_size,
        max_tokens=inputs.max_tokens,
        policy=policy,
        balancing_cost={
            "name": study.balancing_cost,
            "source": inputs.compute.source if study.balancing_cost == "calibrated" else "formula in lengths",
        },
        lengths=inputs.lengths,
        groups=inputs.groups,
        seed=study.seed,
        sample_ids=layout.sample_ids,
        microbatch_start=layout.microbatch_start,
        rank_start=layout.rank_start,
        padding=np.zeros(layout.microbatch_start.size - 1, dtype=np.bool_),
    )
    return pad_microbatches(made) if study.pad_microbatches else made


def peak_of(inputs: Inputs, plan: Plan, schedule: str, division: Division | None = None) -> MemoryEstimate:
    """What a rank holds at most when `schedule` runs `plan`; `division`: of the state, if not full sharding's."""
    sizing = _sizing(inputs.study, schedule)

    def peak(tokens: int, place: Place) -> MemoryEstimate:
        return peak_memory(inputs.model, microbatch_tokens=tokens, place=place, division=division, **sizing)

    return plan_peak(plan, peak)


def largest_of(inputs: Inputs, schedule: str, share: float = 1.0) -> int | None:
    """The largest max_tokens with which a share of memory holds any plan; None if there is none."""
    memory_bytes = int(share * inputs.machine.cluster.device.memory_bytes)
    return largest_max_tokens(inputs.model, memory_bytes=memory_bytes, **_sizing(inputs.study, schedule))


class _Sizing(TypedDict):
    world_size: int
    schedule: str
    recipe: Recipe
    gather_dtype: GatherDtype
    recompute: bool
    chunked_loss_tokens: int | None


def _sizing(study: Study, schedule: str) -> _Sizing:
    return {
        "world_size": study.devices,
        "schedule": schedule,
        "recipe": study.recipe,
        "gather_dtype": study.gather_dtype,
        "recompute": study.recompute,
        "chunked_loss_tokens": study.chunked_loss_tokens or None,
    }


def compute_provenance(inputs: Inputs, plan: Plan) -> str:
    """Where a plan's compute times come from: "extrapolated" where a microbatch is beyond what was measured."""
    tokens = plan.tokens()[~plan.padding]
    low, high = (int(tokens.min()), int(tokens.max())) if tokens.size else (0, 0)
    return provenance_between(inputs.compute, low, high)
