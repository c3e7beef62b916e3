"""From the flags of `odc train` to a job."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from odc_kernels.train_files import MODEL
from odc_kernels.train_job import Job
from odc_sim.api import plan as make_plan
from odc_sim.errors import InputError, unknown_name
from odc_sim.inputs import load_inputs
from odc_sim.models import builtin_models
from odc_sim.plans import Plan
from odc_sim.run_files import CALIBRATION, RunConfig, read_run
from odc_sim.schedules import SCHEDULES
from odc_sim.study import Study, load_study, make_study

CPU_RANKS = 2
ALLOWED_IN_RESUME = ("steps", "data", "checkpoint_every")


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Flags that are not a study's; None: not given."""

    schedule: str | None = None
    steps: int | None = None
    device: str | None = None
    compute: str | None = None
    calibration: Path | None = None
    data: Path | None = None
    checkpoint_every: int | None = None
    learning_rate: float | None = None
    max_grad_norm: float | None = None
    time_scale: float | None = None
    warmup_steps: int | None = None


def make_job(
    options: Options,
    fields: Mapping[str, Any],
    *,
    config: Path | None,
    out: Path,
    resume: bool,
    timeline: bool,
    command: str,
) -> Job:
    """What to run.

    Args:
        options: of the run.
        fields: of the study, those that were given; `plan` names a plan.json, else lengths are drawn and dealt out.
        config: a study TOML, which `fields` override.
        out: the run's folder.
        resume: go on with the run in it, as it was started.
        timeline: whether to record one.
        command: the command line, for the record.

    Raises:
        InputError: whatever is wrong with them.
    """
    if resume:
        return _resumed(options, fields, config, out, timeline, command)
    _check(options)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    schedule = options.schedule or "odc"
    study = _study(options, fields, config, device, schedule)
    plan = _plan(study)
    settings = RunConfig(
        schedule=schedule,
        policy=plan.policy,
        model=study.model if study.model in builtin_models() else MODEL,
        device=device,
        compute=options.compute or "real",
        world_size=plan.world_size,
        steps=plan.num_minibatches if options.steps is None else options.steps,
        seed=study.seed,
        gather_dtype=_gather_dtype(study, device),
        reduce_dtype="fp32",
        recompute=study.recompute,
        chunked_loss_tokens=study.chunked_loss_tokens,
        learning_rate=_or(options.learning_rate, 1e-5),
        max_grad_norm=_or(options.max_grad_norm, 1.0),
        time_scale=_or(options.time_scale, 1.0),
        warmup_steps=_or(options.warmup_steps, 1),
        checkpoint_every=options.checkpoint_every or 0,
        hardware=study.hardware if options.compute == "emulated" and options.calibration is None else "",
        data="" if options.data is None else str(options.data),
    )
    return Job(
        plan=plan,
        config=settings,
        model=study.model,
        out=out,
        command=command,
        calibration=options.calibration,
        data=options.data,
        checkpoint_every=options.checkpoint_every or 0,
        timeline=timeline,
    )


def _study(options: Options, fields: Mapping[str, Any], config: Path | None, device: str, schedule: str) -> Study:
    """The study, with what a run on this machine takes for what was not given."""
    given = load_study(config, dict(fields)) if config else make_study(dict(fields))
    if given.plan is not None:
        model = load_inputs(given).given.model if "model" not in given.model_fields_set else given.model
        return given.model_copy(update={"model": model})
    own: dict[str, Any] = {
        "devices": torch.cuda.device_count() if device == "cuda" else CPU_RANKS,
        "policy": ("lb-micro" if schedule == "collective" else "lb-mini",),
    }
    if options.steps is not None:
        own["minibatches"] = options.steps
    if options.calibration is not None:
        own["hardware"] = str(options.calibration)
    missing = {name: value for name, value in own.items() if name not in given.model_fields_set}
    study = load_study(config, {**fields, **missing}) if config else make_study({**fields, **missing})
    if len(study.policy) != 1:
        raise InputError(f"--policy: got {', '.join(study.policy) or 'none'}, expected one: a run is one plan")
    return study


def _plan(study: Study) -> Plan:
    if study.plan is None:
        return make_plan(study)
    given = load_inputs(study).given
    assert given is not None
    return given


def _gather_dtype(study: Study, device: str) -> Any:
    if "gather_dtype" in study.model_fields_set or device == "cuda":
        return study.gather_dtype
    return "fp32"  # on a CPU gradients are compared, not timed


def _resumed(
    options: Options, fields: Mapping[str, Any], config: Path | None, out: Path, timeline: bool, command: str
) -> Job:
    refused = [name for name, value in asdict(options).items() if value is not None and name not in ALLOWED_IN_RESUME]
    refused += [*fields, *(["config"] if config else [])]
    if refused:
        flag = refused[0].replace("_", "-")
        raise InputError(f"--{flag} with --resume: a run goes on as it was started; leave it out")
    _check(options)
    run = read_run(out)
    model = run.config.model
    if model not in builtin_models():
        model = str(out / model)
    calibration = out / CALIBRATION
    every = _or(options.checkpoint_every, run.config.checkpoint_every)
    data = options.data or (Path(run.config.data) if run.config.data else None)
    return Job(
        plan=run.plan,
        config=replace(
            run.config,
            steps=_or(options.steps, run.config.steps),
            data="" if data is None else str(data),
            checkpoint_every=every,
        ),
        model=model,
        out=out,
        command=command,
        calibration=calibration if calibration.is_file() else None,
        data=data,
        checkpoint_every=every,
        resume=True,
        timeline=timeline,
    )


def _check(options: Options) -> None:
    for name, known in (
        ("schedule", [schedule.name for schedule in SCHEDULES]),
        ("device", ["cuda", "cpu"]),
        ("compute", ["real", "emulated"]),
    ):
        value = getattr(options, name)
        if value is not None and value not in known:
            raise unknown_name(name, value, known)
    for name, least in (
        ("steps", 1),
        ("checkpoint_every", 0),
        ("warmup_steps", 0),
        ("learning_rate", 0),
        ("max_grad_norm", 0),
    ):
        value = getattr(options, name)
        if value is not None and not least <= value < math.inf:
            raise InputError(f"--{name.replace('_', '-')}: got {value}, expected a number of at least {least}")
    if options.time_scale is not None and not 0 < options.time_scale < math.inf:
        raise InputError(f"--time-scale: got {options.time_scale}, expected a number above 0")
    if options.time_scale is not None and options.compute != "emulated":
        raise InputError("--time-scale: only emulated compute has one; add --compute emulated")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: no GPU here; use --device cpu")


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
