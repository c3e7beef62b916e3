"""A schedule under a policy as one row of results."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from odc_sim.execution import Executed
from odc_sim.inputs import BOOTSTRAP_STREAM, Inputs
from odc_sim.metrics import bubble_rate, gpu_hours_saved, idle_causes, idle_rate, mfu, speedup
from odc_sim.models import model_flops
from odc_sim.parts import baseline_of, compute_provenance, largest_of, peak_of, resampled_together
from odc_sim.plans import Plan
from odc_sim.policies import POLICIES
from odc_sim.results import Row
from odc_sim.schedules import Schedule
from odc_sim.transfers import TransferCosts


def empty_row(inputs: Inputs, schedule: Schedule, policy: str, verdict: str | None) -> Row:
    """What could not be executed, and why; or what is told of any row."""
    study = inputs.study
    return Row(
        workload=inputs.workload_name,
        model=inputs.model.name,
        hardware=inputs.machine.name,
        devices=study.devices,
        minibatch_size=study.minibatch_size,
        minibatches=study.minibatches,
        schedule=schedule.name,
        policy=policy,
        sharding=study.sharding,
        gather_dtype=study.gather_dtype,
        seed=study.seed,
        max_tokens=inputs.max_tokens,
        memory_recipe=study.recipe,
        verdict=verdict,
    )


def row_of(
    inputs: Inputs,
    schedule: Schedule,
    policy: str,
    plan: Plan,
    run: Executed,
    baseline_s: NDArray[np.float64],
    transfers: TransferCosts,
) -> Row:
    """What was executed; `baseline_s` [minibatches]: the makespans that it is compared with."""
    study, devices = inputs.study, inputs.study.devices
    used = plan.sample_ids
    seconds = float(run.makespan_s.sum()) * devices
    faster = speedup(
        baseline_s,
        run.makespan_s,
        resampled_together(study, policy, baseline_of(study)[1]),
        np.random.default_rng([study.seed, BOOTSTRAP_STREAM]),
    )
    memory = peak_of(inputs, plan, schedule.name)
    limit = inputs.machine.cluster.device.memory_bytes
    percentiles = np.quantile(run.makespan_s, [0.05, 0.5, 0.95])
    counts = plan.counts()
    return replace(
        empty_row(inputs, schedule, policy, _luck(inputs, schedule, policy)),
        samples_per_s_per_device=used.size / seconds,
        tokens_per_s_per_device=float(plan.lengths[used].sum()) / seconds,
        speedup=faster.value,
        speedup_ci95=(faster.low, faster.high),
        bubble_rate=bubble_rate(run, devices),
        idle_rate=idle_rate(run, devices),
        idle_causes=idle_causes(run, devices),
        mfu=mfu(
            model_flops(inputs.model, plan.lengths[used]),
            run.makespan_s,
            devices,
            inputs.machine.cluster.device.peak_flops,
        ),
        makespan_s=dict(
            zip(("mean", "p5", "p50", "p95"), [float(run.makespan_s.mean()), *map(float, percentiles)], strict=True)
        ),
        gpu_hours_saved_per_1000_steps=gpu_hours_saved(baseline_s, run.makespan_s, devices),
        microbatches={"mean": float(counts.mean()), "max": int(counts.max(initial=0))},
        peak_memory_bytes={**memory.categories, "total": memory.total_bytes},
        inter_node_bytes_per_minibatch=float(run.inter_node_bytes.mean()),
        memory_share=memory.total_bytes / limit,
        fits=memory.total_bytes <= limit,
        largest_max_tokens=largest_of(inputs, schedule.name),
        provenance={
            "compute": compute_provenance(inputs, plan),
            "transfers": transfers.provenance,
            "optimizer": transfers.optimizer_provenance,
            "memory": "analytic",
        },
    )


def _luck(inputs: Inputs, schedule: Schedule, policy: str) -> str | None:
    """A warning for a row that ran although its policy does not promise equal microbatch counts."""
    if not schedule.needs_equal_counts or inputs.study.pad_microbatches:
        return None
    if inputs.given is not None and policy == inputs.given.policy:
        return None  # a plan file is what will be run
    if POLICIES[policy].equal_counts:
        return None
    return (
        f"microbatch counts happened to be equal in these {inputs.study.minibatches} minibatches; nothing promises it, "
        "and where they differ it hangs: use odc, or --pad-microbatches"
    )
