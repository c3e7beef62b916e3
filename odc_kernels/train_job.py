"""What a run is: everything each of its ranks needs to know, and what refuses it before anything is started."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from odc_kernels.train_data import data_files
from odc_sim.calibration import Calibration, load_calibration
from odc_sim.costs import ComputeCosts, choose_costs
from odc_sim.errors import InputError, unknown_name
from odc_sim.hardware import builtin_hardware, load_cluster
from odc_sim.machine import load_machine
from odc_sim.models import ModelSpec, builtin_models, load_model
from odc_sim.plans import Plan
from odc_sim.run_files import RunConfig
from odc_sim.schedules import SCHEDULES, make_schedule, obstacle
from odc_sim.validate_predict import as_planned

BYTES_A_PARAMETER = 18
"""fp32 parameter, gradient and two moments, and a copy in bf16."""
TIMEOUT_S = 300.0
"""How long a rank waits for another: more than the longest lead of one in a minibatch."""
MANY_CPU_TOKENS = 8192
"""Attention of a longer sample takes CPUs so long that somebody must be told."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run."""

    plan: Plan
    config: RunConfig
    model: str
    """What to build: a built-in model, a config.json, or a directory."""
    out: Path
    command: str
    calibration: Path | None = None
    data: Path | None = None
    checkpoint_every: int = 0
    """Minibatches; 0: never."""
    resume: bool = False
    timeline: bool = True

    @property
    def spec(self) -> ModelSpec:
        """The model's shape."""
        found = load_model(self.model)
        # resumed, a model of one's own is read from the run's folder, where its file has another name
        return as_planned(found, self.plan) if self.resume and self.model not in builtin_models() else found

    def measured(self) -> Calibration | None:
        """The calibration file, if one was given."""
        return load_calibration(self.calibration) if self.calibration else None

    def costs(self) -> ComputeCosts:
        """What emulated compute takes."""
        machine = load_machine(str(self.calibration) if self.calibration else self.config.hardware)
        return choose_costs(self.spec, machine.cluster, machine.calibration, self.config.recompute)


def waits_line(job: Job) -> str:
    """Where the waits of emulated compute come from, for people."""
    line = f"emulated: units wait as on {job.calibration or job.config.hardware} ({job.costs().source})"
    return line if job.calibration or job.resume else f"{line}; --calibration or --hardware: as on another machine"


def slow_line(job: Job) -> str:
    """A warning where CPUs will be at one microbatch for minutes; empty where they will not."""
    longest = int(job.plan.tokens().max(initial=0))
    if job.config.device != "cpu" or job.config.compute != "real" or longest <= MANY_CPU_TOKENS:
        return ""
    return (
        f"microbatches to {longest:,} tokens take CPUs long, minutes from 64K; a smaller --scale makes samples shorter"
    )


def check(job: Job) -> None:
    """Refuse a run that cannot be.

    Raises:
        InputError: an unknown schedule, one that hangs with this plan, another model than the plan's, more minibatches
            than it has, a calibration or data that cannot be read, or a calibration that does not know the model where
            compute is emulated.
    """
    plan, config = job.plan, job.config
    names = [schedule.name for schedule in SCHEDULES]
    if config.schedule not in names:
        raise unknown_name("schedule", config.schedule, names)
    if config.steps > plan.num_minibatches:
        raise InputError(
            f"--steps {config.steps}: the plan has {plan.num_minibatches} minibatches; plan with more --minibatches"
        )
    reason = obstacle(make_schedule(config.schedule), plan)
    if reason:
        raise InputError(
            f"--schedule {config.schedule} cannot run this plan: {reason}; use --schedule odc, or plan with "
            "--pad-microbatches"
        )
    if config.compute == "emulated":
        job.costs()
    else:
        _check_memory(job)
    # Here rather than on a rank, which would have been started for nothing.
    _ = job.spec, job.measured()
    if job.data is not None:
        data_files(job.data)


def _check_memory(job: Job) -> None:
    """On CPUs all ranks share this machine's memory, and the one that has none left is killed without a word."""
    if job.config.device != "cpu":
        return
    need = BYTES_A_PARAMETER * job.spec.parameters
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if need > there:
        raise InputError(
            f"{job.spec.name} takes {need / 1e9:.0f} GB on CPUs for parameters, gradients and AdamW alone, and this "
            f"machine has {there / 1e9:.0f} GB; use --model tiny, --compute emulated, or GPUs"
        )


def peak_flops(gpu: str, calibration: Calibration | None) -> float:
    """The dense bf16 peak of a GPU by its name, as the built-in hardware has it; else what a calibration reached.

    NaN where neither knows.
    """
    known: Mapping[str, float] = {
        cluster.device.name.split("-")[0]: cluster.device.peak_flops
        for cluster in map(load_cluster, builtin_hardware())
        if cluster.name != "generic"
    }
    for name, flops in known.items():
        if name.lower() in gpu.lower():
            return flops
    if calibration is not None and calibration.ceilings is not None:
        return calibration.ceilings.gemm_flops
    return float("nan")


def warmup_minibatches(plan: Plan, count: int, steps: int) -> list[int]:
    """What to warm up with: first the minibatch with the largest microbatch, so that memory has its size from then on,
    then the first ones."""
    if count == 0:
        return []
    largest = int(plan.ranks()[int(np.argmax(plan.tokens()))] // plan.world_size)
    return [largest, *(number % steps for number in range(count - 1))]
