"""What a run did otherwise than its plan and the calibration say, and runs otherwise than each other.

Listed before any error figure: a difference here is the first suspect for every error.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from odc_sim.calibration import Calibration
from odc_sim.calibration_tables import how_measured
from odc_sim.costs import measured_models
from odc_sim.measured import running_spans
from odc_sim.models import BUILT_IN, ModelSpec
from odc_sim.run_files import Run, RunConfig
from odc_sim.schedules import make_schedule
from odc_sim.validate_measure import Measured
from odc_sim.validate_predict import Prediction, run_rows, token_range

MAKESPANS_APART = 0.01
"""Makespans of steps.csv and of the timeline that differ by more are named."""
PLAN, CALIBRATION = "the plan", "the calibration"
ABSENT = "(none)"
LISTED = MappingProxyType({"packages": "package", "variables": "variable"})
"""Parts of an environment, and what each of their entries is called."""
CALIBRATED_LOSS_TOKENS = 512
"""The chunks in which `odc calibrate` measures head and loss where it does not say: the default of `odc_kernels.lm`."""
COMPARED_FIELDS = (
    *("model", "device", "compute", "world_size", "gather_dtype", "reduce_dtype", "recompute", "chunked_loss_tokens"),
    *("time_scale", "seed", "learning_rate", "max_grad_norm", "data"),
)
"""Of RunConfig: what two runs should share for their times to be compared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One thing that is not the same in the run and in what it is compared with."""

    field: str
    run: str
    other: str
    compared_with: str
    """The plan, the calibration, or the name of another run."""
    remark: str = ""

    @property
    def line(self) -> str:
        """field: what the run has, what the other has, and a remark in brackets."""
        text = f"{self.field}: {self.run} in the run, {self.other} in {self.compared_with}"
        return text + (f" ({self.remark})" if self.remark else "")


def differences(run: Run, predicted: Prediction, measured: Measured) -> tuple[Difference, ...]:
    """Every difference between a run and what its prediction rests on."""
    found = [*_plan(run, predicted.model), *_steps(run), *_timeline(run, measured)]
    calibration = predicted.machine.calibration
    if calibration is None:
        remark = (
            "also transfers, copies and the optimizer are its, not this CPU's" if run.config.device == "cpu" else ""
        )
        other = predicted.machine.name
        found.append(
            Difference(field="calibration", run="none", other=other, compared_with="the prediction", remark=remark)
        )
    else:
        found += _calibration(run, predicted, calibration)
        found += _environment(run.environment, _environment_of(calibration), CALIBRATION)
    return tuple(found)


def between_runs(run: Run, first: Run) -> tuple[Difference, ...]:
    """Every difference between two runs but for schedule, policy and plan."""
    found = [
        Difference(field=name, run=str(mine) or ABSENT, other=str(other) or ABSENT, compared_with=first.name)
        for name in COMPARED_FIELDS
        if (mine := getattr(run.config, name)) != (other := getattr(first.config, name))
    ]
    return (*found, *_environment(run.environment, first.environment, first.name))


def _plan(run: Run, model: ModelSpec) -> Iterator[Difference]:
    config, plan = run.config, run.plan
    named = {spec.name: spec for spec in BUILT_IN}.get(plan.model)
    other_shape = named is not None and not model.same_shape(named)
    if other_shape or (named is None and model.name in {spec.name for spec in BUILT_IN}):
        remark = "lengths were balanced for another model"
        yield Difference(field="model", run=model.name, other=plan.model, compared_with=PLAN, remark=remark)
    if config.policy != plan.policy:
        yield Difference(field="policy", run=config.policy, other=plan.policy, compared_with=PLAN)
    finished = len(run.steps)
    if not finished == config.steps == plan.num_minibatches:
        asked = f"{finished:,} finished" + (f" of {config.steps:,} asked for" if config.steps != finished else "")
        remark = "those that were finished are compared"
        other = f"{plan.num_minibatches:,}"
        yield Difference(field="minibatches", run=asked, other=other, compared_with=PLAN, remark=remark)


def _steps(run: Run) -> Iterator[Difference]:
    """Tokens and samples as trained against the plan's."""
    rows, plan = run_rows(run), run.plan
    place = plan.ranks() // plan.world_size
    for field, each in (("tokens", plan.tokens()), ("samples", plan.samples())):
        planned = np.bincount(place, each, plan.num_minibatches)[rows]
        trained = run.steps[field].to_numpy()
        odd = np.flatnonzero(planned != trained)
        if odd.size:
            yield Difference(
                field=f"{field} of minibatch {rows[odd[0]]}",
                run=f"{trained[odd[0]]:,}",
                other=f"{planned[odd[0]]:,.0f}",
                compared_with=PLAN,
                remark=f"{odd.size} of {rows.size} minibatches differ: other lengths than planned were trained",
            )


def _timeline(run: Run, measured: Measured) -> Iterator[Difference]:
    """Microbatches that ran, and how long minibatches took, in timeline.parquet against plan and steps.csv."""
    rows, covered = run_rows(run), measured.covered
    if not covered.all():
        yield Difference(
            field="timeline",
            run=f"{int(covered.sum())} minibatches",
            other=f"{rows.size}",
            compared_with="steps.csv",
            remark="idle time and units are compared in these" if covered.any() else "no idle time, no units",
        )
    timeline = run.timeline
    if timeline is None or not covered.any():
        return
    runs = running_spans(timeline)
    ran = np.zeros((run.plan.num_minibatches, run.plan.world_size), dtype=np.int64)
    np.maximum.at(ran, (timeline.minibatch[runs], timeline.rank[runs]), timeline.microbatch[runs] + 1)
    odd = np.argwhere(ran[rows[covered]] != run.plan.counts()[rows[covered]])
    if odd.size:
        b, rank = int(rows[covered][odd[0][0]]), int(odd[0][1])
        yield Difference(
            field=f"microbatches of rank {rank} in minibatch {b}",
            run=str(ran[b, rank]),
            other=str(run.plan.counts()[b, rank]),
            compared_with=PLAN,
            remark=f"{len(odd)} of {ran[rows[covered]].size} counts differ",
        )
    apart = np.abs(measured.timeline_s / measured.makespan_s - 1.0)
    apart[~covered] = 0.0
    worst = int(apart.argmax())
    if apart[worst] > MAKESPANS_APART:
        yield Difference(
            field=f"makespan of minibatch {rows[worst]}",
            run=f"{measured.timeline_s[worst]:.4g} s in the timeline",
            other=f"{measured.makespan_s[worst]:.4g} s",
            compared_with="steps.csv",
            remark=f"{int((apart > MAKESPANS_APART).sum())} of {int(covered.sum())} differ by more than 1 %; "
            "step times are those of steps.csv, shares of idle time those of the timeline",
        )


def _calibration(run: Run, predicted: Prediction, calibration: Calibration) -> Iterator[Difference]:
    config = run.config

    def differs(field: str, mine: object, other: object, remark: str = "") -> Difference:
        return Difference(field=field, run=str(mine), other=str(other), compared_with=CALIBRATION, remark=remark)

    if not measured_models(predicted.model, calibration):
        known = ", ".join(sorted({fit.model for fit in calibration.fits})) or "none"
        yield differs("model", predicted.model.name, known, f"compute is {predicted.compute.provenance}")
    elif predicted.compute.valid_tokens is not None:
        (low, high), (least, most) = token_range(run), predicted.compute.valid_tokens
        if low < least or high > most:
            yield differs("microbatch tokens", f"{low:,} to {high:,}", f"{least:,} to {most:,}", "extrapolated")
    if config.device == "cpu" and calibration.environment.get("gpu"):
        yield differs("device", "cpu", "a GPU")
    chunk = calibration.environment.get("chunked_loss_tokens", CALIBRATED_LOSS_TOKENS)
    if config.compute == "real" and config.chunked_loss_tokens != chunk:
        yield differs("chunked_loss_tokens", config.chunked_loss_tokens, chunk)
    if config.compute == "emulated":
        yield differs("compute", f"emulated, {config.time_scale:g} s a second", "measured")
    dtype = how_measured(calibration).get("compute_dtype", config.gather_dtype)
    if config.gather_dtype != dtype:
        what = "copies are" if config.compute == "emulated" else "compute is priced in that one, and copies are"
        remark = f"{what} analytic; odc train --gather-dtype {dtype} is like the calibration"
        yield differs("compute dtype", config.gather_dtype, dtype, remark)
    ops = _ops(config) if config.world_size > 1 else ()
    for op, dtype in zip(ops, (config.gather_dtype, config.reduce_dtype), strict=False):
        samples = [sample for sample in calibration.transfers if sample.op == op]
        if not samples:
            yield differs(op, "used", "not measured", "taken from links")
            continue
        worlds, dtypes = {sample.world_size for sample in samples}, {sample.dtype for sample in samples}
        if config.world_size not in worlds:
            yield differs(f"ranks of {op}", config.world_size, ", ".join(map(str, sorted(worlds))), "extrapolated")
        if dtype not in dtypes:
            yield differs(f"dtype of {op}", dtype, ", ".join(sorted(dtypes)), "by its bytes")


def _ops(config: RunConfig) -> tuple[str, str]:
    one_sided = make_schedule(config.schedule).one_sided
    return ("gather", "scatter_accumulate") if one_sided else ("all_gather", "reduce_scatter")


def _environment_of(calibration: Calibration) -> dict[str, Any]:
    return {"environment": calibration.environment, "toolkit_version": calibration.toolkit_version}


def _environment(mine: Mapping[str, Any], other: Mapping[str, Any], compared_with: str) -> list[Difference]:
    """Machine and versions, where both say something about it."""
    one, two = (dict(_facts(file)) for file in (mine, other))
    # a package or a variable that one side lacks is a difference, if that side did look
    looked = [kind for kind in LISTED if all(isinstance(file["environment"].get(kind), dict) for file in (mine, other))]
    return [
        Difference(field=name, run=one.get(name, ABSENT), other=two.get(name, ABSENT), compared_with=compared_with)
        for name in dict.fromkeys((*one, *two))
        if one.get(name) != two.get(name)
        and ((name in one and name in two) or any(name.startswith(f"{LISTED[kind]} ") for kind in looked))
    ]


def _facts(file: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "toolkit_version", str(file["toolkit_version"])
    environment = file["environment"]
    gpu = environment.get("gpu")
    for name in ("name", "count", "memory_bytes"):
        if isinstance(gpu, dict) and name in gpu:
            yield f"gpu {name}", str(gpu[name])
    if isinstance(gpu, str):
        yield "gpu name", gpu
    for name in ("cuda", "nccl", "nvidia_smi", "python", "numpy", "os"):
        if name in environment:
            value = environment[name]
            yield name, "; ".join(map(str, value)) if isinstance(value, list) else str(value)
    for kind, word in LISTED.items():
        for name, value in (environment.get(kind) or {}).items():
            yield f"{word} {name}", str(value)
