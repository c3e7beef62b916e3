"""What transfers and copies in flight cost a layer: in the calibration's stretches, and in training.

    python reports/validation-h200/in_flight.py

From the runs on 8K microbatches and their calibration, all of one lease of the machine. The layers that have nothing in
flight in training are those of collective-deferred: all forwards but a minibatch's first, all backwards but its last.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from odc_sim.run_files import read_run

HERE = Path(__file__).parent
RUNS = HERE / "runs"
CALIBRATION = HERE.parent.parent / "traces" / "calibration" / "h200-nvlink-2gpu.json"
MODEL = "qwen2.5-1.5b"
FITS = {"forward": "forward", "backward": "backward_recompute"}
FULL_TOKENS = 7000
LAYERS = (5, 22)
"""Without the ends: behind the head, whose products clock the device down, layers are up to 2 % slower for a while."""
FORWARD, BACKWARD = 1, 3
"""Of the steps of a stretch's cycle: copy-out, forward, copy-out, backward."""
NAMES = tuple(
    f"{study}-{pair}"
    for pair in ("collective-deferred-lb-mini", "collective-lb-micro", "odc-lb-mini")
    for study in ("balanced", "short")
)


def stretches(calibration: dict[str, Any]) -> pd.DataFrame:
    """Microseconds by which forward and backward are longer than with nothing in flight, median over rounds."""
    rows = []
    for scene in calibration["environment"]["calibrate"]["beside_layers"]:
        alone_s = np.array(scene["variants"]["alone"]["steps_s"])
        for name, variant in scene["variants"].items():
            more_us = np.median(1e6 * (np.array(variant["steps_s"]) - alone_s), axis=1)  # [ranks, steps]
            for rank, steps in enumerate(more_us):
                row = {"model": scene["model"], "beside": scene["ops"][0], "in flight": name, "rank": rank}
                alone_us = 1e6 * np.median(alone_s[rank], axis=0)
                rows.append(row | {"forward": steps[FORWARD], "backward": steps[BACKWARD], "of": alone_us[BACKWARD]})
    return pd.DataFrame(rows).round(0)


def layers(name: str, fits: dict[str, dict[str, float]]) -> pd.DataFrame:
    """Compute of layers in full microbatches: the microseconds beyond the fit, and where in the minibatch it was."""
    run = read_run(RUNS / name)
    found = pd.DataFrame(asdict(run.timeline))
    found = found[(found.stream == "compute") & (found.cause == "") & found.kind.isin(list(FITS))]
    tokens, squares = (run.plan.padded(part.astype(float)) for part in (run.plan.tokens(), run.plan.squares()))
    where = tuple(found[column] for column in ("minibatch", "microbatch", "rank"))
    found = found.assign(tokens=tokens[where], squares=squares[where])
    found = found[found.unit.between(*LAYERS) & (found.tokens > FULL_TOKENS) & (found.minibatch > 0)]
    fit = pd.DataFrame([fits[FITS[kind]] for kind in found.kind], index=found.index)
    fitted_s = fit.c0_s + fit.c1_s_per_token * found.tokens + fit.c2_s_per_token2 * found.squares
    last = run.plan.counts()[found.minibatch, found["rank"]] - 1
    return found.assign(
        beyond_us=1e6 * (found.end_s - found.start_s - fitted_s),
        beyond_percent=100 * ((found.end_s - found.start_s) / fitted_s - 1),
        first=found.microbatch == 0,
        last=found.microbatch == last,
    )


def by_time_in_flight(name: str, fits: dict[str, dict[str, float]]) -> pd.DataFrame:
    """Backwards of a run: microseconds beyond the fit by the microseconds in which a transfer was in flight."""
    found = layers(name, fits)
    spans = pd.DataFrame(asdict(read_run(RUNS / name).timeline))
    spans = spans[spans.kind.isin(["unshard", "reduce"])]
    of_rank = {
        key: (part.start_s.to_numpy(), part.end_s.to_numpy()) for key, part in spans.groupby(["minibatch", "rank"])
    }
    rows = []
    for layer in found[found.kind == "backward"].itertuples():
        starts, ends = of_rank[layer.minibatch, layer.rank]
        pieces = sorted(zip(np.maximum(starts, layer.start_s), np.minimum(ends, layer.end_s), strict=True))
        flight_s, until = 0.0, layer.start_s
        for start, end in pieces:
            flight_s += max(0.0, end - max(start, until))
            until = max(until, end)
        rows.append((layer.rank, 1e6 * flight_s, layer.beyond_us))
    table = pd.DataFrame(rows, columns=["rank", "in flight, us", "beyond_us"])
    cut = pd.cut(table["in flight, us"], [0, 600, 700, 800, 1000, 1300, 1700, 2500, 1e5])
    return table.groupby(["rank", cut], observed=True).beyond_us.agg(["median", "count"]).round(0)


def main() -> None:
    """Print all."""
    calibration = json.loads(CALIBRATION.read_text(encoding="utf-8"))
    print("in the calibration: microseconds of a layer beyond those with nothing in flight")
    print(stretches(calibration).to_string(index=False))
    fits = {f["direction"]: f for f in calibration["fits"] if (f["model"], f["unit"]) == (MODEL, "layer")}
    for name in NAMES:
        found = layers(name, fits)
        by = ["kind", "first", "last", "rank"]
        print(f"{name}: microseconds beyond the fit")
        print(found.groupby(by)[["beyond_us", "beyond_percent"]].median().round(1).to_string())
    print("balanced-collective-lb-micro: backwards by how long transfers are in flight beside them")
    print(by_time_in_flight("balanced-collective-lb-micro", fits).to_string())


if __name__ == "__main__":
    main()
