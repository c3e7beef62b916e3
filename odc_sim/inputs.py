"""From a study's names to what they mean: workload, model, machine, costs, and the minibatches every policy deals
out."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from odc_sim.costs import ComputeCosts, choose_costs, measured_models
from odc_sim.errors import InputError
from odc_sim.length_sources import Recorded
from odc_sim.lengths import read_lengths
from odc_sim.machine import Machine, load_machine, of_model
from odc_sim.models import ModelSpec, load_model
from odc_sim.plans import Plan, read_plan
from odc_sim.study import Study
from odc_sim.workload import Workload, draw_minibatches, load_workload, workload_from_lengths

Lengths = NDArray[np.int64]
# Independent random streams of one seed: lengths, jitter (execution.Load), the shuffles of policies, bootstrap.
BALANCING_COSTS = ("calibrated", "flops", "quadratic", "tokens")
LENGTHS_STREAM, SHUFFLE_STREAM, BOOTSTRAP_STREAM = 0, 2, 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """Everything that the rows of one study share."""

    study: Study
    workload_name: str
    workload: dict[str, Any]
    model: ModelSpec
    machine: Machine
    compute: ComputeCosts
    max_tokens: int
    lengths: Lengths
    groups: Lengths | None
    minibatches: tuple[Lengths, ...]
    """Sample indices of each minibatch."""
    given: Plan | None
    """The plan file, if the study names one."""
    notes: tuple[str, ...]

    def sample_cost_s(self, lengths: Lengths) -> NDArray[np.float64]:
        """What policies balance, for samples of these lengths [n]."""
        return balancing_cost(self.study.balancing_cost, self.model, self.compute)(lengths)


def load_inputs(study: Study) -> Inputs:
    """Read and draw what `study` names.

    Raises:
        InputError: anything in it that does not exist or does not fit together.
    """
    machine = load_machine(study.hardware)
    given = read_plan(study.plan) if study.plan else None
    model = load_model(given.model if given and "model" not in study.model_fields_set else study.model)
    _check_cpu(machine, model)
    machine = of_model(machine, model.name)
    compute = choose_costs(model, machine.cluster, machine.calibration, study.recompute)
    if given is not None:
        return _from_plan(study, given, model, machine, compute)
    workload = _workload(study)
    rng = np.random.default_rng([study.seed, LENGTHS_STREAM])
    per_minibatch = study.devices * study.minibatch_size
    samples = draw_minibatches(
        workload,
        study.minibatches,
        per_minibatch,
        rng,
        scale=study.scale,
        max_tokens=study.max_tokens,
        overlong=study.overlong,
    )
    longest = workload.longest(study.scale)
    ids = np.arange(samples.lengths.size)
    return Inputs(
        study=study,
        workload_name=workload.name,
        workload=workload.as_dict(),
        model=model,
        machine=machine,
        compute=compute,
        max_tokens=study.max_tokens or longest,
        lengths=samples.lengths,
        groups=samples.groups,
        minibatches=tuple(np.split(ids, study.minibatches)),
        given=None,
        notes=tuple(note for note in (samples.note, _drawing_note(study, workload, samples.lengths.size)) if note),
    )


def _check_cpu(machine: Machine, model: ModelSpec) -> None:
    """A CPU's transfers beside the FLOPs of a GPU would be a machine that does not exist."""
    calibration = machine.calibration
    if calibration is None or not machine.one_stream or measured_models(model, calibration):
        return
    names = sorted({fit.model for fit in calibration.fits})
    instead = f", or use --model {' or '.join(names)}" if names else ""
    raise InputError(
        f"{machine.name} is a calibration of a CPU, which knows {', '.join(names) or 'no model'}, not {model.name}; "
        f"measure it: odc calibrate --device cpu --model {model.name}{instead}"
    )


def _workload(study: Study) -> Workload:
    if study.lengths is None:
        return load_workload(study.workload)
    lengths = read_lengths(study.lengths, study.column)
    if lengths.size < study.devices:
        raise InputError(
            f"{study.lengths}: got {lengths.size} samples, expected at least one for each of {study.devices} devices; "
            "add samples or lower --devices"
        )
    return workload_from_lengths(lengths, study.lengths.stem)


def _drawing_note(study: Study, workload: Workload, drawn: int) -> str:
    if study.lengths is None or not isinstance(workload.source, Recorded):
        return ""
    there = workload.source.lengths.size
    return f"{drawn:,} samples drawn from {study.lengths}, which has {there:,}: each once before any repeats"


# What a plan file settles; a flag that says otherwise would be ignored, so it is refused.
SETTLED_BY_PLAN = (
    *("workload", "lengths", "column", "scale", "overlong", "devices", "minibatch_size", "minibatches", "max_tokens"),
    *("policy", "balancing_cost", "batch_minibatches", "pad_microbatches"),
)


def _from_plan(study: Study, plan: Plan, model: ModelSpec, machine: Machine, compute: ComputeCosts) -> Inputs:
    settled: dict[str, Any] = {
        "devices": plan.world_size,
        "minibatch_size": plan.minibatch_size,
        "minibatches": plan.num_minibatches,
        "max_tokens": plan.max_tokens,
        "policy": (plan.policy,),
        "workload": str(plan.workload.get("name", "plan")),
        "model": model.name,
    }
    cost = plan.balancing_cost.get("name")
    if cost in BALANCING_COSTS:  # other policies, the baseline's, are balanced as this one was
        settled["balancing_cost"] = cost
    for name in SETTLED_BY_PLAN:
        if name in study.model_fields_set and getattr(study, name) != settled.get(
            name, Study.model_fields[name].default
        ):
            asked, own = (_as_typed(value) for value in (getattr(study, name), settled.get(name, "its own")))
            raise InputError(
                f"--{name.replace('_', '-')} {asked} contradicts {study.plan}, which is for {own}; leave it out"
            )
    if study.device_speed and len(study.device_speed) != plan.world_size:
        raise InputError(
            f"device_speed: got {len(study.device_speed)} values, "
            f"expected one for each of the plan's {plan.world_size} ranks"
        )
    if "seed" not in study.model_fields_set and plan.seed is not None:
        settled["seed"] = plan.seed
    edges = plan.microbatch_start[plan.rank_start[:: plan.world_size]]
    return Inputs(
        study=study.model_copy(update=settled),
        workload_name=str(plan.workload.get("name", "plan")),
        workload=dict(plan.workload),
        model=model,
        machine=machine,
        compute=compute,
        max_tokens=plan.max_tokens,
        lengths=plan.lengths,
        groups=plan.groups,
        minibatches=tuple(np.sort(part) for part in np.split(plan.sample_ids, edges[1:-1])),
        given=plan,
        notes=tuple(
            note
            for note in (f"plan {study.plan}: other policies are planned on its minibatches", _hardware_note(study))
            if note
        ),
    )


def _hardware_note(study: Study) -> str:
    """A plan says nothing of the machine that it is for."""
    return "" if "hardware" in study.model_fields_set else f"hardware: {study.hardware}, unless --hardware says another"


def _as_typed(value: Any) -> Any:
    return ",".join(map(str, value)) if isinstance(value, tuple) else value


def balancing_cost(name: str, model: ModelSpec, compute: ComputeCosts) -> Callable[[Lengths], NDArray[np.float64]]:
    """lengths [n] -> what a policy balances [n]; only ratios matter.

    tokens: s. quadratic: s^2. flops: forward matrix FLOPs 2 * parameters * s + causal attention 2 * heads * head_dim
    * layers * s^2.
    calibrated: the seconds of the cost model that the simulation itself uses.
    """

    def tokens(lengths: Lengths) -> NDArray[np.float64]:
        return lengths.astype(np.float64)

    def quadratic(lengths: Lengths) -> NDArray[np.float64]:
        return tokens(lengths) ** 2

    def flops(lengths: Lengths) -> NDArray[np.float64]:
        linear, square = 2.0 * model.matmul_parameters, 2.0 * model.query_width * model.layers
        # integer_costs counts in 1e-9, so FLOPs are given in units of 1e15: about seconds of a GPU
        return (linear * tokens(lengths) + square * quadratic(lengths)) / 1e15

    costs = (compute.sample_cost_s, flops, quadratic, tokens)
    return dict(zip(BALANCING_COSTS, costs, strict=True))[name]
