"""Several runs, and a calibration before them, in one start of the ranks: for machines that are lent by the minute.

    python -m odc_kernels.campaign reports/validation-h200/campaign.toml --out runs --budget-s 500

The TOML file, in which paths are relative to its own folder:

    world_size = 2
    [calibration]                          # optional
    quick = true
    models = ["qwen2.5-1.5b"]              # measured into --out/calibration.json, before all runs
    file = "calibration.json"              # or: measured before, and copied into every run

    [[runs]]
    name = "longalign-odc-lb-mini"         # folder in --out
    plan = "plans/longalign-lb-mini.json"  # made beforehand with `odc plan`
    schedule = "odc"
    steps = 40                             # optional: of the plan's minibatches
    estimate_s = 60                        # optional: what it will take, start included

A run whose estimate does not fit into what is left of the budget is skipped. Runs that are there already are left
alone, so the same command goes on where an earlier one stopped.
"""

import argparse
import gc
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from odc_kernels.calibrate import Options, make_options
from odc_kernels.calibrate import run_rank as calibrate_rank
from odc_kernels.ranks import run_ranks
from odc_kernels.train import NO_MULTICAST
from odc_kernels.train import run_rank as train_rank
from odc_kernels.train_job import Job, check
from odc_kernels.train_options import Options as TrainOptions
from odc_kernels.train_options import make_job
from odc_sim.errors import InputError
from odc_sim.plans import read_plan
from odc_sim.run_files import CALIBRATION, STEPS

T = TypeVar("T")


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Calibration(_Table):
    file: str | None = None
    quick: bool = False
    models: list[str] = []


class _Run(_Table):
    name: Annotated[str, Field(min_length=1)]
    plan: str
    schedule: str
    steps: Annotated[int, Field(ge=1)] | None = None
    estimate_s: float = 0.0
    chunked_loss_tokens: Annotated[int, Field(ge=0)] | None = None


class _File(_Table):
    world_size: int
    calibration: _Calibration | None = None
    runs: list[_Run] = []


@dataclass(frozen=True, kw_only=True)
class Campaign:
    """What to do, in order."""

    world_size: int
    calibration: Options | None
    """Measured first, unless its file exists."""
    jobs: tuple[Job, ...]
    estimates_s: tuple[float, ...]
    budget_s: float
    """From the ranks' start on."""


def load(path: Path, out: Path, *, budget_s: float, device: str, command: str) -> Campaign:
    """Read the TOML file and the plans.

    Raises:
        InputError: a field is missing or unknown, or a run cannot be.
    """
    try:
        file = _File.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{path}: cannot be read as TOML: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InputError(f"{path}: {where}: {first['msg']}") from None
    names = [run.name for run in file.runs]
    for name in names:
        if name in (".", "..") or Path(name).name != name:
            raise InputError(f"{path}: runs: name {name!r}, expected the name of a folder in --out")
        if names.count(name) > 1:  # the second one would be taken for a run that is there already
            raise InputError(f"{path}: runs: two are called {name!r}, expected names that differ")
    section = file.calibration
    measured = section is not None and section.file is None
    options = None
    calibration = None
    if section is not None:
        calibration = path.parent / section.file if section.file else out / CALIBRATION
        if measured:
            options = make_options(
                out=calibration,
                models=section.models,
                quick=section.quick,
                device=device,
                backend="auto",
                ranks=file.world_size,
                command=command,
            )
    jobs = tuple(_job(run, path.parent, out, calibration, device, command, measured=measured) for run in file.runs)
    for job in jobs:
        if job.plan.world_size != file.world_size:
            raise InputError(f"{path}: {job.out.name} is planned for {job.plan.world_size} ranks, not world_size")
    return Campaign(
        world_size=file.world_size,
        calibration=options,
        jobs=jobs,
        estimates_s=tuple(run.estimate_s for run in file.runs),
        budget_s=budget_s,
    )


def _job(
    run: _Run, folder: Path, out: Path, calibration: Path | None, device: str, command: str, *, measured: bool
) -> Job:
    """`measured`: the calibration is yet to be made."""
    plan = folder / run.plan
    fields: dict[str, Any] = {"plan": plan, "seed": read_plan(plan).seed or 0}
    if run.chunked_loss_tokens is not None:
        fields["chunked_loss_tokens"] = run.chunked_loss_tokens
    job = make_job(
        TrainOptions(schedule=run.schedule, steps=run.steps, device=device, calibration=calibration),
        fields,
        config=None,
        out=out / run.name,
        resume=False,
        timeline=True,
        command=command,
    )
    check(replace(job, calibration=None) if measured else job)
    return job


def run_rank(rank: int, campaign: Campaign) -> list[str]:
    """One rank's part; what was skipped."""
    start_s = time.monotonic()
    if campaign.calibration is not None and not _agreed(campaign.calibration.out.exists()):
        calibrate_rank(rank, campaign.calibration)
        _clean()
    skipped: list[str] = []
    for job, estimate_s in zip(campaign.jobs, campaign.estimates_s, strict=True):
        spent_s, there = _agreed((time.monotonic() - start_s, (job.out / STEPS).exists()))
        if there:
            continue
        if spent_s + estimate_s > campaign.budget_s:
            skipped.append(job.out.name)
            continue
        if rank == 0:
            print(f"{spent_s:6.1f} s: {job.out.name}", flush=True)
        train_rank(rank, job)
        _clean()
    if rank == 0:
        print(f"{time.monotonic() - start_s:6.1f} s: done; skipped: {', '.join(skipped) or 'nothing'}", flush=True)
    return skipped


def _clean() -> None:
    gc.collect()
    if torch.cuda.is_available():  # pragma: cuda-only
        torch.cuda.empty_cache()
    dist.barrier()


def _agreed(value: T) -> T:
    """Rank 0's value, everywhere."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m odc_kernels.campaign", description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="the TOML file")
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--budget-s", type=float, default=1e6, help="start nothing that would not end by then")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parsed = parser.parse_args(arguments)
    command = " ".join(["python -m odc_kernels.campaign", *(sys.argv[1:] if arguments is None else arguments)])
    parsed.out.mkdir(parents=True, exist_ok=True)
    try:
        campaign = load(parsed.file, parsed.out, budget_s=parsed.budget_s, device=parsed.device, command=command)
    except InputError as error:
        parser.error(str(error))
    run_ranks(
        run_rank,
        campaign.world_size,
        campaign,
        backend="nccl" if parsed.device == "cuda" else "gloo",
        timeout_s=1e6,
        environment=NO_MULTICAST,
    )


if __name__ == "__main__":
    main()
