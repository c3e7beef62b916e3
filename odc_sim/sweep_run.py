"""Runs a sweep's points through joblib, and keeps each one that is finished: DIR/points/<key>.json, written at once.

The key is a hash of the study, of the content of the files it names and of the toolkit's version, so that a point is
found again exactly as long as its answer holds. Workers only compute; this process writes, so a cluster needs no shared
folder (but the files a study names must be readable where it runs).
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from odc_sim.api import run_study
from odc_sim.errors import InputError, unknown_name
from odc_sim.header import read_json, toolkit_version, write_json
from odc_sim.report import make_directory
from odc_sim.results import Results, read_results
from odc_sim.study import Study
from odc_sim.sweep import Point, Sweep
from odc_sim.sweep_backends import DEFAULT_BACKEND, stream
from odc_sim.sweep_results import Outcome, SweepResults

Progress = Callable[[int, int], None]
"""Called with (points finished, points in all)."""


def run_sweep(
    sweep: Sweep,
    folder: str | Path,
    *,
    jobs: int | None = None,
    backend: str = DEFAULT_BACKEND,
    address: str | None = None,
    command: str = "",
    progress: Progress = lambda done, total: None,
) -> SweepResults:
    """Run every point that `folder`/points does not have yet, on `jobs` workers (default: one a core).

    A point whose study cannot be simulated gets a verdict, ends nothing, and is tried again by the next run.

    Raises:
        InputError: names in the sweep that do not exist, a folder that is a file, a cluster that does not answer.
    """
    points = sweep.points()
    check_names([point.study for point in points if point.study])
    store = make_directory(make_directory(folder) / "points")
    keys = [point_key(point.study) if point.study else "" for point in points]
    done: dict[str, Results | str] = {}
    notes = _not_comparable(sweep)
    for key in dict.fromkeys(filter(None, keys)):
        try:
            found = _read_point(store / f"{key}.json", key)
        except (InputError, AttributeError, KeyError, TypeError, ValueError) as error:
            notes.append(f"damaged, computed again: {error}")
            continue
        if found is not None:
            done[key] = found
    missing = {key: point.study for key, point in zip(keys, points, strict=True) if point.study and key not in done}
    reused, total = len(done), len(done) + len(missing)
    progress(reused, total)
    names, studies = list(missing), list(missing.values())
    for number, answer in stream(_compute, studies, jobs=jobs, backend=backend, address=address):
        if isinstance(answer, Results):
            write_json(store / f"{names[number]}.json", {**answer.as_dict(command), "point": names[number]})
        done[names[number]] = answer
        progress(len(done), total)
    outcomes = tuple(_outcome(point, key, done) for point, key in zip(points, keys, strict=True))
    return SweepResults(sweep=sweep, outcomes=outcomes, reused=reused, notes=tuple(notes))


def _not_comparable(sweep: Sweep) -> list[str]:
    """A warning where a factor changes the samples without looking like it."""
    overlong = sweep.base_value("overlong")
    if overlong == "error" or "max_tokens" not in {factor.field for factor in sweep.factors}:
        return []
    return [f"with --overlong {overlong} points of different max_tokens have different samples"]


def _compute(study: Study) -> Results | str:
    """In a worker: the results of a study, or why it has none."""
    try:
        return run_study(study, rivals=False).results
    except InputError as error:
        return str(error)


def _outcome(point: Point, key: str, done: Mapping[str, Results | str]) -> Outcome:
    answer = done[key] if key else point.verdict
    if isinstance(answer, str):
        return Outcome(point=point, key=key, results=None, verdict=answer)
    return Outcome(point=point, key=key, results=answer)


def check_names(studies: Sequence[Study]) -> None:
    """Refuse workloads, models, hardware, policies and schedules that do not exist, before anything is computed.

    Raises:
        InputError: the first that does not exist.
    """
    from odc_sim.machine import load_machine
    from odc_sim.models import load_model
    from odc_sim.policies import POLICIES
    from odc_sim.schedules import SCHEDULES
    from odc_sim.workload import load_workload

    for machine in dict.fromkeys(study.hardware for study in studies):
        load_machine(machine)
    drawn = [study for study in studies if study.plan is None]
    for workload in dict.fromkeys(study.workload for study in drawn if study.lengths is None):
        load_workload(workload)
    for model in dict.fromkeys(study.model for study in drawn):
        load_model(model)
    schedules = {schedule.name for schedule in SCHEDULES}
    for study in drawn:
        for kind, names, known in (("policy", study.policy, POLICIES), ("schedule", study.schedule, schedules)):
            for name in names:
                if name not in known:
                    raise unknown_name(kind, name, known)


def point_key(study: Study) -> str:
    """24 hexadecimal digits that change with anything the answer depends on."""
    from odc_sim.machine import machine_files

    content = {
        "toolkit_version": toolkit_version(),
        "study": study.model_dump(mode="json"),
        # fields that were given must agree with a plan, those left out follow it
        "given": sorted(study.model_fields_set) if study.plan else [],
        "files": {
            name: hashlib.sha256(path.read_bytes()).hexdigest()
            for name in ("lengths", "plan", "workload", "model")
            if (path := _file(getattr(study, name))) is not None
        },
        "machine": [hashlib.sha256(path.read_bytes()).hexdigest() for path in machine_files(study.hardware)],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:24]


def _file(name: str | Path | None) -> Path | None:
    """The file that a field names, if it is one (a model may be a folder with a config.json)."""
    if name is None:
        return None
    path = Path(name)
    return next((found for found in (path, path / "config.json") if found.is_file()), None)


def _read_point(path: Path, key: str) -> Results | None:
    """What an earlier run found; None if there is no such file.

    Raises:
        InputError, or what broken content causes: the file is damaged, or belongs to another point.
    """
    if not path.is_file():
        return None
    data = read_json(path)
    if not isinstance(data, dict) or data.get("point") != key:
        raise InputError(f"{path}: is not the point its name says")
    return read_results(path)
