"""The simulator against the published table: `python -m odc_sim.paper reports/paper-longalign`.

Reads paper.csv from that folder (arXiv 2601.19362, tables 5 and 6, SFT on LongAlign), simulates every cell, and writes
comparison.csv, comparison.json and comparison.png beside it. Nothing is fitted to the cells: lengths are the published
statistics of LongAlign, costs the authors' own fit, transfers the cluster's links and network cards. The models on
several nodes are simulated once more with a network that takes no time (network-free.toml), for comparison.
"""

import argparse
import csv
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from odc_sim.api import simulate
from odc_sim.errors import InputError
from odc_sim.header import header, write_json
from odc_sim.results import Row
from odc_sim.study import Study

MODELS = {"1.5B": "qwen2.5-1.5b", "7B": "qwen2.5-7b", "14B": "qwen2.5-14b", "32B": "qwen2.5-32b"}
HARDWARE = "a100-nvswitch-roce"
BASELINE = ("collective", "lb-micro")


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """One cell of the paper's table."""

    workload: str
    model: str
    devices: int
    minibatch_size: int
    schedule: str
    policy: str
    throughput: float
    """Labelled samples/s/device; only samples per 1,000 s make sense of it. Used in ratios only."""
    bubble_rate: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """Published against simulated. Rates are fractions, speedups ratios to collective + lb-micro of the same
    setting."""

    model: str
    devices: int
    minibatch_size: int
    schedule: str
    policy: str
    paper_bubble_rate: float
    bubble_rate: float
    paper_speedup: float
    speedup: float
    paper_samples_per_ks_per_device: float
    samples_per_ks_per_device: float

    @property
    def is_baseline(self) -> bool:
        """Whether its speedup is 1 by definition."""
        return (self.schedule, self.policy) == BASELINE


def read_published(path: Path) -> list[Published]:
    """The rows of paper.csv. Raises InputError if there is no such file."""
    if not path.is_file():
        raise InputError(f"{path}: no such file; it holds the published table")
    with path.open(encoding="utf-8", newline="") as file:
        return [
            Published(
                workload=row["workload"],
                model=row["model"],
                devices=int(row["devices"]),
                minibatch_size=int(row["minibatch_size"]),
                schedule=row["schedule"],
                policy=row["policy"],
                throughput=float(row["throughput_samples_per_ks_per_device"]),
                bubble_rate=float(row["bubble_rate_percent"]) / 100.0,
            )
            for row in csv.DictReader(file)
        ]


def paper_study(
    model: str, devices: int, minibatch_size: int, *, minibatches: int, seed: int = 0, hardware: str = HARDWARE
) -> Study:
    """The paper's setting: A100 nodes, LongAlign to 64K at packing ratio 1, fp32 parameters on the wire (as the
    reference does)."""
    return Study(
        workload="longalign",
        model=MODELS[model],
        hardware=hardware,
        devices=devices,
        minibatch_size=minibatch_size,
        minibatches=minibatches,
        policy=("local-sort", "lb-micro", "lb-mini"),
        schedule=("collective", "odc"),
        gather_dtype="fp32",
        seed=seed,
    )


def compare(published: Sequence[Published], *, minibatches: int, seed: int = 0, hardware: str = HARDWARE) -> list[Cell]:
    """Simulate each setting once and pair its rows with the published ones."""
    rows: dict[tuple[str, int, int], dict[tuple[str, str], Row]] = {}
    papers = {(p.model, p.devices, p.minibatch_size, p.schedule, p.policy): p for p in published}
    cells = []
    for p in published:
        setting = (p.model, p.devices, p.minibatch_size)
        if setting not in rows:
            study = paper_study(*setting, minibatches=minibatches, seed=seed, hardware=hardware)
            results = simulate(study)
            rows[setting] = {(row.schedule, row.policy): row for row in results.rows}
        row = rows[setting][p.schedule, p.policy]
        assert row.bubble_rate is not None
        assert row.speedup is not None
        assert row.samples_per_s_per_device is not None
        cells.append(
            Cell(
                model=p.model,
                devices=p.devices,
                minibatch_size=p.minibatch_size,
                schedule=p.schedule,
                policy=p.policy,
                paper_bubble_rate=p.bubble_rate,
                bubble_rate=row.bubble_rate,
                paper_speedup=p.throughput / papers[(*setting, *BASELINE)].throughput,
                speedup=row.speedup,
                paper_samples_per_ks_per_device=p.throughput,
                samples_per_ks_per_device=1000.0 * row.samples_per_s_per_device,
            )
        )
    return cells


def errors(cells: Sequence[Cell]) -> dict[str, dict[str, float]]:
    """Mean absolute errors in points, by model: bubble_rate over all cells, speedup over all but the baseline's.

    At minibatch 1 every rank has one sample and nothing can gain, so those cells are easy: speedups are also given for
    the others alone, and at their worst.
    """
    out = {}
    for model in dict.fromkeys(cell.model for cell in cells):
        mine = [cell for cell in cells if cell.model == model]
        compared = [cell for cell in mine if not cell.is_baseline]
        hard = [100.0 * abs(c.speedup - c.paper_speedup) for c in compared if c.minibatch_size > 1]
        out[model] = {
            "bubble_points": 100.0 * float(np.mean([abs(c.bubble_rate - c.paper_bubble_rate) for c in mine])),
            "speedup_points": 100.0 * float(np.mean([abs(c.speedup - c.paper_speedup) for c in compared])),
            "speedup_points_above_minibatch_1": float(np.mean(hard)) if hard else 0.0,
            "speedup_points_worst": max(hard, default=0.0),
            "throughput_ratio": float(
                np.mean([c.samples_per_ks_per_device / c.paper_samples_per_ks_per_device for c in mine])
            ),
        }
    return out


def wrong_order(cells: Sequence[Cell], margin: float = 0.03) -> list[tuple[Cell, Cell]]:
    """Pairs of one setting whose published speedups differ by `margin` or more and which the simulation ranks
    otherwise."""
    wrong = []
    for i, a in enumerate(cells):
        for b in cells[:i]:
            same = (a.model, a.devices, a.minibatch_size) == (b.model, b.devices, b.minibatch_size)
            apart = abs(a.paper_speedup / b.paper_speedup - 1.0) >= margin
            if same and apart and (a.paper_speedup > b.paper_speedup) != (a.speedup > b.speedup):
                wrong.append((a, b))
    return wrong


def figure(cells: Sequence[Cell]) -> Any:
    """Two scatter plots, paper against simulated: bubble rate and speedup."""
    from matplotlib.figure import Figure

    colors = {"local-sort": "#0072B2", "lb-micro": "#E69F00", "lb-mini": "#009E73"}
    picture = Figure(figsize=(9.0, 4.2), layout="constrained")
    left, right = picture.subplots(1, 2)
    models = list(dict.fromkeys(cell.model for cell in cells))
    markers = dict(zip(models, "os^D", strict=False))
    for axes, name, unit in ((left, "bubble_rate", 100.0), (right, "speedup", 1.0)):
        for cell in cells:
            axes.plot(
                unit * getattr(cell, f"paper_{name}"),
                unit * getattr(cell, name),
                markers[cell.model],
                color=colors[cell.policy],
                markerfacecolor=colors[cell.policy] if cell.schedule == "odc" else "white",
                markersize=7,
            )
        low, high = axes.get_xlim()
        axes.plot([low, high], [low, high], color="0.6", linewidth=1, zorder=0)
        axes.set_aspect("equal", adjustable="datalim")
    left.set(title="bubble rate, %", xlabel="paper", ylabel="simulated")
    right.set(title="speedup over collective + lb-micro", xlabel="paper", ylabel="simulated")
    for policy, color in colors.items():
        left.plot([], [], "s", color=color, label=policy)
    for model in models:
        left.plot([], [], markers[model], color="0.3", markerfacecolor="white", label=model)
    left.plot([], [], "o", color="0.3", label="filled: odc")
    left.legend(frameon=False, fontsize=8)
    return picture


def main(folder: Path, minibatches: int = 1000, seed: int = 0) -> dict[str, dict[str, float]]:
    """Write the comparison into `folder`, print and return the errors."""
    published = read_published(folder / "paper.csv")
    cells = compare(published, minibatches=minibatches, seed=seed)
    found = errors(cells)
    with (folder / "comparison.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(asdict(cells[0])), lineterminator="\n")
        writer.writeheader()
        for cell in cells:
            writer.writerow({k: round(v, 5) if isinstance(v, float) else v for k, v in asdict(cell).items()})
    disordered = wrong_order(cells)
    many_nodes = [p for p in published if p.devices > 8]
    free = errors(compare(many_nodes, minibatches=minibatches, seed=seed, hardware=str(folder / "network-free.toml")))
    command = f"python -m odc_sim.paper {folder}"
    summary = {
        "minibatches": minibatches,
        "errors": found,
        "errors_without_network": free,
        "wrong_order": [[asdict(a), asdict(b)] for a, b in disordered],
    }
    write_json(folder / "comparison.json", {**header(command, seed), **summary})
    figure(cells).savefig(folder / "comparison.png", dpi=110)
    for model, error in found.items():
        print(
            f"{model}: mean absolute error of bubble rate {error['bubble_points']:.2f} points, of speedup "
            f"{error['speedup_points']:.2f} points; throughput {error['throughput_ratio']:.2f} of the paper's"
        )
    for model, error in free.items():
        print(f"{model} with a network that takes no time: speedup {error['speedup_points']:.2f} points")
    print(f"pairs of policies in the wrong order (paper apart by 3 % or more): {len(disordered)}")
    return found


def _command_line() -> None:
    parser = argparse.ArgumentParser(prog="python -m odc_sim.paper", description="The simulator and the paper's table.")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="with paper.csv, as reports/paper-longalign")
    try:
        main(parser.parse_args().folder)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    _command_line()
