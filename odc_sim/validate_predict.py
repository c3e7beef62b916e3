"""What the simulator says of a run: the same plan, schedule and minibatches, priced with a calibration."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from odc_sim.costs import ComputeCosts, choose_costs, provenance_between
from odc_sim.durations import Durations
from odc_sim.emulation import default_parameters_scale, emulated_shape, executed_costs, on_one_stream, uncontended
from odc_sim.errors import InputError
from odc_sim.execution import Load, build_durations, execute
from odc_sim.hardware import Cluster
from odc_sim.machine import Machine, load_machine, of_model
from odc_sim.memory import MemoryEstimate, peak_memory
from odc_sim.memory_moments import Place
from odc_sim.memory_plan import plan_peak
from odc_sim.models import BUILT_IN, ModelSpec, builtin_models, load_model
from odc_sim.plans import Plan
from odc_sim.run_files import CALIBRATION, Run
from odc_sim.schedules import Schedule, make_schedule, obstacle
from odc_sim.transfers import ModelShape, TransferCosts, transfer_costs

Floats = NDArray[np.float64]
UNITS = ("layer forward", "layer backward", "head and loss", "embedding")
"""Of the last two, forward and backward together."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prediction:
    """The run's finished minibatches [B] as simulated; seconds are executed ones, as in the run, ranks summed."""

    model: ModelSpec
    machine: Machine
    compute: ComputeCosts
    makespan_s: Floats
    """[B]"""
    busy_s: Floats
    """[B] rank-seconds of uncontended compute"""
    idle_s: Floats
    """[B, causes] rank-seconds in the order of `CAUSES`"""
    slowdown_s: Floats
    """[B] rank-seconds that compute spans hold because of transfers beside them"""
    floor_s: Floats
    """[B] and because units are launch-bound"""
    unit_s: Floats
    """[B, UNITS] over ranks and microbatches; slowdown and floor included"""
    microbatches: Floats
    """[B] over ranks"""
    host_forward_s: float
    """What the host takes to enqueue a layer's forward; 0 where it is always ahead, or another model's."""
    memory: MemoryEstimate | None
    """None where compute was emulated: nothing like it was allocated."""
    provenance: dict[str, str]

    @property
    def compute_s(self) -> Floats:
        """[B] rank-seconds of compute spans"""
        return self.busy_s + self.slowdown_s + self.floor_s


def load_run_model(run: Run) -> ModelSpec:
    """The model of a run; a config.json in its folder comes before one of the same path elsewhere.

    Raises:
        InputError: it is not there any more, or is no model.
    """
    name = run.config.model
    if name in builtin_models() or not (run.folder / name).exists():
        return load_model(name)
    return as_planned(load_model(str(run.folder / name)), run.plan)


def as_planned(model: ModelSpec, plan: Plan) -> ModelSpec:
    """A model read from a run's folder by the name it had when the plan was made, and in calibrations."""
    named = {built_in.name: built_in for built_in in BUILT_IN}.get(plan.model, model)
    return replace(model, name=plan.model) if named.same_shape(model) else model


def load_run_machine(run: Run, hardware: str | Path | None) -> Machine:
    """The machine to price a run with: `hardware`, else its own calibration, else the one whose costs it took.

    Raises:
        InputError: there is none.
    """
    own = run.folder / CALIBRATION
    if hardware is not None:
        return load_machine(str(hardware))
    if own.is_file():
        return load_machine(str(own))
    if run.config.hardware:
        return load_machine(run.config.hardware)
    raise InputError(
        f"{run.folder}: holds no {CALIBRATION}, so nothing says how fast its machine is; name one with --calibration "
        "FILE (see: odc calibrate) or --hardware NAME"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Priced:
    """What an engine needs to simulate a run."""

    model: ModelSpec
    load: Load
    compute: ComputeCosts
    transfers: TransferCosts
    cluster: Cluster
    schedule: Schedule

    def durations(self) -> Durations:
        """Of all minibatches at once."""
        return build_durations(self.load, self.compute, self.transfers, self.cluster, self.schedule)


def price(run: Run, machine: Machine) -> Priced:
    """Costs of what a run has finished, on `machine`, in executed seconds.

    Raises:
        InputError: no minibatch was finished, the model is not known, or the schedule cannot run the plan.
    """
    if run.steps.empty:
        raise InputError(f"{run.folder}: no minibatch was finished, so there is nothing to compare")
    config = run.config
    schedule = make_schedule(config.schedule)
    reason = obstacle(schedule, run.plan)
    if reason:
        raise InputError(f"{run.folder}: {config.schedule} cannot run its plan: {reason}")
    model = load_run_model(run)
    cluster = of_model(machine, model.name).cluster
    compute = choose_costs(model, cluster, machine.calibration, config.recompute)
    shape: ModelShape = model
    if config.compute == "emulated":
        compute = executed_costs(compute, config.time_scale)
        shape = emulated_shape(model, default_parameters_scale(model, config.device))
        cluster = uncontended(cluster)
    transfers = transfer_costs(
        shape,
        cluster,
        world_size=config.world_size,
        one_sided=schedule.one_sided,
        gather_dtype=config.gather_dtype,
        reduce_dtype=config.reduce_dtype,
        calibration=machine.calibration,
    )
    if config.device == "cpu":  # the host is the device; built-in hardware knows nothing of such a host
        measured_host = machine.calibration is not None and machine.calibration.host is not None
        transfers = on_one_stream(transfers, cluster.host if measured_host else None)
        cluster = replace(cluster, host=cluster.host.idle())
    return Priced(
        model=model,
        load=Load.of(run.plan).part(run_rows(run)),
        compute=compute,
        transfers=transfers,
        cluster=cluster,
        schedule=schedule,
    )


def predict(run: Run, machine: Machine, engine: str = "fast") -> Prediction:
    """Simulate what a run has finished.

    Raises:
        InputError: as `price`.
    """
    priced = price(run, machine)
    done = execute(
        *(priced.load, priced.compute, priced.transfers, priced.cluster, priced.schedule),
        engine=engine,
    )
    durations = priced.durations()
    return Prediction(
        model=priced.model,
        machine=machine,
        compute=priced.compute,
        makespan_s=done.makespan_s,
        busy_s=done.busy_s,
        idle_s=done.idle_s,
        slowdown_s=durations.compute_slowdown_s.sum(axis=1),
        floor_s=durations.floor_s.sum(axis=1),
        unit_s=_unit_s(durations),
        host_forward_s=durations.host_forward_s if run.config.compute == "real" else 0.0,
        microbatches=durations.counts.sum(axis=1).astype(np.float64),
        memory=_memory(run, priced.model) if run.config.compute == "real" else None,
        provenance=_provenance(run, priced.compute, priced.transfers),
    )


def run_rows(run: Run) -> NDArray[np.int64]:
    """The plan's minibatches that were finished [B]."""
    rows: NDArray[np.int64] = run.steps["minibatch"].to_numpy(dtype=np.int64)
    return rows


def run_microbatches(run: Run) -> NDArray[np.bool_]:
    """Which of the plan's microbatches [num_microbatches] were run in a finished minibatch."""
    return np.isin(run.plan.ranks() // run.plan.world_size, run_rows(run))


def _unit_s(durations: Durations) -> Floats:
    forward_s, backward_s = (table.sum(axis=(1, 3)) for table in (durations.forward_s, durations.backward_s))  # [B, 3]
    once = forward_s + backward_s
    return np.stack([forward_s[:, 1], backward_s[:, 1], once[:, 2], once[:, 0]], axis=1)


def _memory(run: Run, model: ModelSpec) -> MemoryEstimate:
    config = run.config

    def peak(tokens: int, place: Place) -> MemoryEstimate:
        return peak_memory(
            model,
            world_size=config.world_size,
            schedule=config.schedule,
            microbatch_tokens=tokens,
            place=place,
            gather_dtype=config.gather_dtype,
            recompute=config.recompute,
            chunked_loss_tokens=config.chunked_loss_tokens or None,
            repeated_keys=_repeats_keys(run),
        )

    return plan_peak(run.plan, peak, run_microbatches(run))


def _repeats_keys(run: Run) -> bool:
    """Whether its torch is one whose varlen_attn has no enable_gqa: 2.11 has none, 2.13 has (2.12 was not looked at).

    `odc_kernels.varlen` then copies keys and values for every query head.
    """
    version = str(run.environment["environment"].get("packages", {}).get("torch", ""))
    numbers = [int(part) for part in version.split("+")[0].split(".")[:2] if part.isdecimal()]
    return run.config.device == "cuda" and len(numbers) == 2 and numbers < [2, 12]


def _provenance(run: Run, compute: ComputeCosts, transfers: TransferCosts) -> dict[str, str]:
    low, high = token_range(run)
    return {
        "compute": provenance_between(compute, low, high),
        "transfers": transfers.provenance,
        "optimizer": transfers.optimizer_provenance,
    }


def token_range(run: Run) -> tuple[int, int]:
    """The smallest and the largest microbatch that was run, in tokens; padding does not count."""
    tokens = run.plan.tokens()[run_microbatches(run) & ~run.plan.padding]
    return (int(tokens.min()), int(tokens.max())) if tokens.size else (0, 0)
