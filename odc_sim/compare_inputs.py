"""What two results were asked differently: study, hardware, model, lengths, versions.

Lengths that were drawn anew differ a little; only what is beyond sampling noise counts as a difference.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from odc_sim.errors import InputError
from odc_sim.header import read_json
from odc_sim.results import Results, read_results
from odc_sim.study import Study

STANDARD_ERRORS = 4.0
"""Length statistics closer than this differ by sampling noise only; strict, as four of them are looked at."""
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
SIBLINGS = 16
"""Rollouts of one prompt resemble each other; they are taken to come in groups of this size (16 in common recipes)."""
AS_RUN = ("devices", "minibatch_size", "minibatches", "seed", "max_tokens")
"""Row fields that say what a study came to, where a plan file or a default decided."""
NAMES = ("workload", "model", "hardware")
_ABSENT = object()


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """A results.json and who wrote it with what."""

    path: str
    results: Results
    toolkit_version: str
    environment: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class InputDifference:
    """One thing that was asked differently."""

    field: str
    a: str
    b: str
    remark: str = ""

    @property
    def line(self) -> str:
        """field: A -> B, and a remark in brackets."""
        return f"{self.field}: {self.a} -> {self.b}" + (f" ({self.remark})" if self.remark else "")


def load_results(path: str | Path) -> Loaded:
    """A results.json, or the one in a folder.

    Raises:
        InputError: there is none, or it is not understood.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "results.json"
        if not file.is_file():
            trained = (Path(path) / "steps.csv").is_file()
            hint = "; it is a run of odc train: use odc validate" if trained else ""
            raise InputError(f"{path}: holds no results.json, expected one or a folder with one{hint}")
    results = read_results(file)
    data = read_json(file)
    return Loaded(
        path=str(path),
        results=results,
        toolkit_version=data["toolkit_version"],
        environment=data["environment"],
    )


def input_differences(a: Loaded, b: Loaded) -> list[InputDifference]:
    """One for each thing that was asked, or drawn, differently."""
    asked_a, asked_b = _asked(a), _asked(b)
    for one, other in ((asked_a, asked_b), (asked_b, asked_a)):
        one |= {f"{name} as run": one[name] for name in NAMES if f"{name} as run" in other.keys() - one and name in one}
    found = [
        InputDifference(field=name, a=_text(asked_a, name), b=_text(asked_b, name))
        for name in dict.fromkeys((*asked_a, *asked_b))
        if asked_a.get(name, _ABSENT) != asked_b.get(name, _ABSENT)
    ]
    return found + _lengths(a.results.lengths, b.results.lengths)


def _asked(loaded: Loaded) -> dict[str, Any]:
    """What determined a result: the study as run, the sources of its numbers, the versions."""
    results = loaded.results
    # a file from before a field existed is taken to mean its default
    asked: dict[str, Any] = Study().model_dump(mode="json") | results.study
    if results.rows:
        row = results.rows[0]
        for name in AS_RUN:
            asked[name] = getattr(row, name)
        for name in NAMES:
            if asked.get(name) != getattr(row, name):
                asked[f"{name} as run"] = getattr(row, name)
    asked["notes"] = "; ".join(results.notes)
    asked["toolkit_version"] = loaded.toolkit_version
    for package in ("python", "numpy"):
        asked[package] = loaded.environment.get(package)
    return asked


def _text(asked: Mapping[str, Any], name: str) -> str:
    if name not in asked:
        return "(not there)"
    value = asked[name]
    if value is None or value == [] or value == "":
        return "(none)"
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) and name != "seed" else str(value)


def _lengths(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[InputDifference]:
    """Statistics that are further apart than draws from one distribution would be."""
    found = []
    for name in ("mean", *QUANTILES):
        if name not in a or name not in b or a[name] == b[name]:
            continue
        apart = _means_apart(a, b) if name == "mean" else _quantiles_apart(a, b, name)
        if apart > STANDARD_ERRORS:
            remark = f"{apart:.0f} standard errors apart" if apart < 1000.0 else "far beyond sampling noise"
            one, other = (f"{stats[name]:,.0f}" for stats in (a, b))
            found.append(InputDifference(field=f"lengths {name}", a=one, b=other, remark=remark))
    return found


def _draws(stats: Mapping[str, Any]) -> float:
    """Independent draws that the samples are worth: n / (1 + (k - 1) * correlation of siblings), Kish's design
    effect."""
    correlation = max(stats.get("group_correlation") or 0.0, 0.0)
    return float(stats["num_samples"]) / (1.0 + (SIBLINGS - 1) * correlation)


def _means_apart(a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
    """Welch's statistic."""
    error = math.hypot(*(stats["sd"] / math.sqrt(_draws(stats)) for stats in (a, b)))
    return abs(a["mean"] - b["mean"]) / error if error > 0.0 else math.inf


def _quantiles_apart(a: Mapping[str, Any], b: Mapping[str, Any], name: str) -> float:
    """How far the one's share of samples below the other's quantile is from where it should be; the nearer of two."""
    q = QUANTILES[name]
    error = math.sqrt(q * (1.0 - q) * (1.0 / _draws(a) + 1.0 / _draws(b)))
    return min(abs(_share_below(one, other[name]) - q) for one, other in ((a, b), (b, a))) / error


def _share_below(stats: Mapping[str, Any], tokens: float) -> float:
    """The share of samples shorter than `tokens`, from the histogram, even inside a bin (whose edges are ratios)."""
    counts, edges = np.asarray(stats["histogram_counts"]), np.log(stats["histogram_edges"])
    cumulative = np.concatenate([[0.0], np.cumsum(counts)]) / counts.sum()
    return float(np.interp(math.log(tokens), edges, cumulative))


def same_samples(a: Results, b: Results) -> bool:
    """Whether both ran the same samples in the same minibatches, as far as their statistics tell."""
    if not a.rows or not b.rows:
        return False
    drawn = [{k: v for k, v in results.lengths.items() if k != "max_tokens"} for results in (a, b)]
    sizes = [(r.devices * r.minibatch_size, r.minibatches, r.seed) for r in (a.rows[0], b.rows[0])]
    return drawn[0] == drawn[1] and sizes[0] == sizes[1]
