"""run/, written by rank 0 while it runs: readable after every finished minibatch, however the run ends."""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from odc_kernels.train_checkpoint import newest
from odc_kernels.train_job import Job
from odc_kernels.train_loop import Spans
from odc_sim.errors import InputError
from odc_sim.header import write_json
from odc_sim.idle import Span
from odc_sim.measured_idle import attribute
from odc_sim.models import builtin_models
from odc_sim.plans import write_plan
from odc_sim.run_files import (
    CALIBRATION,
    CONFIG,
    PLAN,
    STEPS,
    TIMELINE,
    StepRow,
    append_steps,
    read_run,
    write_config,
    write_environment,
    write_steps,
)
from odc_sim.timeline import COLUMNS, Timeline

MODEL = "model.json"


def check_folder(job: Job) -> None:
    """Refuse to write a run over another one, or to resume what is none.

    Raises:
        InputError: the folder has a run although it is not resumed; or it has none, no checkpoint, or nothing left to
            do although it is; or it cannot be written.
    """
    if job.resume:
        if not (job.out / PLAN).is_file() or not (job.out / CONFIG).is_file():
            raise InputError(f"--resume: {job.out} holds no {PLAN} and {CONFIG}; expected the folder of a run (--out)")
        finished, _ = newest(job.out)
        if finished >= job.config.steps:
            raise InputError(
                f"--resume: the checkpoint holds {finished} minibatches, {job.config.steps} were asked for; "
                "go further with --steps"
            )
    elif (job.out / STEPS).exists() or (job.out / PLAN).exists():
        raise InputError(f"--out {job.out}: holds a run; choose another folder, or go on with it: --resume")
    elif job.out.exists() and not job.out.is_dir():
        raise InputError(f"--out {job.out}: is a file, expected a folder")
    try:
        job.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {job.out}: cannot be made: {error.strerror}; choose another folder") from None
    if not os.access(job.out, os.W_OK | os.X_OK):
        raise InputError(f"--out {job.out}: nothing can be written there; choose another folder, or allow it")


class RunFiles:
    """The folder of a run."""

    def __init__(self, job: Job, described: dict[str, Any], *, finished: int) -> None:
        """Begin the folder; of one that is resumed, keep what belongs to the first `finished` minibatches."""
        self._job = job
        self._folder = job.out
        self._timeline: Timeline | None = None
        if job.resume:
            self._cut(finished)
            write_config(self._folder, job.config, job.command)
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        write_plan(job.plan, self._folder / PLAN, job.command)
        write_config(self._folder, job.config, job.command)
        write_environment(self._folder, job.command, job.config.seed, described)
        if job.calibration is not None:
            shutil.copyfile(job.calibration, self._folder / CALIBRATION)
        if job.model not in builtin_models():
            path = Path(job.model)
            fields = json.loads((path / "config.json" if path.is_dir() else path).read_text(encoding="utf-8"))
            write_json(self._folder / MODEL, fields)
        write_steps(self._folder, [])

    def add(self, row: StepRow) -> None:
        """A finished minibatch."""
        append_steps(self._folder, [row])

    def add_spans(self, ranks: Sequence[Spans], starts_s: Mapping[int, float]) -> None:
        """Every rank's spans of some minibatches, on the clock on which these started at `starts_s`."""
        spans: dict[int, list[Span]] = {number: [] for number in starts_s}
        for rank, minibatches in enumerate(ranks):
            for number, rows in minibatches:
                start_s = starts_s[number]
                spans[number] += (
                    Span(rank, r.stream, r.kind, "", r.unit, r.microbatch, r.start_s - start_s, r.end_s - start_s)
                    for r in rows
                )
        config = self._job.config
        added = attribute(Timeline.from_spans(spans.items()), config.schedule, one_stream=config.device == "cpu")
        self._timeline = _joined([self._timeline, added]) if self._timeline is not None else added
        self._timeline.write_parquet(self._folder / TIMELINE, self._job.command, self._job.config.seed)

    def _cut(self, finished: int) -> None:
        run = read_run(self._folder)
        fields = run.steps.astype({"minibatch": int, "tokens": int, "samples": int, "peak_memory_bytes": int})
        rows = [StepRow(**row) for row in fields.to_dict("records")]
        write_steps(self._folder, [row for row in rows if row.minibatch < finished])
        if run.timeline is not None:
            kept = run.timeline.minibatch < finished
            self._timeline = Timeline(**{name: getattr(run.timeline, name)[kept] for name in COLUMNS})


def _joined(parts: Sequence[Timeline]) -> Timeline:
    return Timeline(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in COLUMNS})
