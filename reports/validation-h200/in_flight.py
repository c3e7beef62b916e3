"""What transfers and copies in flight cost a layer in training, and what predictions are with and without it.

    python reports/validation-h200/in_flight.py

From the runs on 8K microbatches and their calibration, all of one lease of the machine. The layers that have nothing in
flight are those of collective-deferred: all forwards but a minibatch's first, all backwards but its last.
"""

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from statistics import mean, median
from typing import Any

import pandas as pd

from odc_sim.run_files import read_run
from odc_sim.validate import validate

HERE = Path(__file__).parent
RUNS = HERE / "runs"
CALIBRATION = HERE / "calibration-3.json"
MODEL = "qwen2.5-1.5b"
FITS = {"forward": "forward", "backward": "backward_recompute"}
FULL_TOKENS = 7000
LAYERS = (5, 22)
"""Without the ends: behind the head, whose products clock the device down, layers are up to 2 % slower for a while."""
SETS = {
    "balanced": ("collective-lb-micro", "odc-lb-mini"),
    "short": ("collective-lb-micro", "odc-lb-mini", "collective-deferred-lb-mini"),
}
OPS = {"collective": ("all_gather", "reduce_scatter"), "odc": ("gather", "scatter_accumulate")}


def layers(name: str, fits: dict[str, dict[str, float]]) -> pd.DataFrame:
    """Compute of layers in full microbatches: the microseconds beyond the fit, and where in the minibatch it was."""
    run = read_run(RUNS / name)
    found = pd.DataFrame(asdict(run.timeline))
    found = found[(found.stream == "compute") & (found.cause == "") & found.kind.isin(list(FITS))]
    tokens, squares = (run.plan.padded(part.astype(float)) for part in (run.plan.tokens(), run.plan.squares()))
    where = tuple(found[column] for column in ("minibatch", "microbatch", "rank"))
    found = found.assign(tokens=tokens[where], squares=squares[where])
    found = found[found.unit.between(*LAYERS) & (found.tokens > FULL_TOKENS)]
    fit = pd.DataFrame([fits[FITS[kind]] for kind in found.kind], index=found.index)
    fitted_s = fit.c0_s + fit.c1_s_per_token * found.tokens + fit.c2_s_per_token2 * found.squares
    last = run.plan.counts()[found.minibatch, found["rank"]] - 1
    return found.assign(
        fitted_us=1e6 * fitted_s,
        beyond_us=1e6 * (found.end_s - found.start_s - fitted_s),
        first=found.microbatch == 0,
        last=found.microbatch == last,
    )


def lost_alone_us(calibration: dict[str, Any]) -> dict[str, float]:
    """What a layer lost beside each copy and transfer alone, begun with the layer: compared within rounds."""
    found = {}
    for raw in calibration["environment"]["calibrate"]["beside_layers"]:
        rounds = zip(zip(*raw["alone_s"], strict=True), zip(*raw["beside_s"], strict=True), strict=True)
        lost_s = [mean(b[-1] - a[-1] for a, b in zip(alone, beside, strict=True)) for alone, beside in rounds]
        found[raw["op"]] = 1e6 * median(lost_s)
    return found


def main() -> None:
    """Print what layers lose, and the predictions before and after that is put into a copy of the calibration."""
    calibration = json.loads(CALIBRATION.read_text(encoding="utf-8"))
    fits = {f["direction"]: f for f in calibration["fits"] if (f["model"], f["unit"]) == (MODEL, "layer")}
    deferred = layers("short-collective-deferred-lb-mini", fits)
    free_us = {}
    for kind, mask in (("forward", ~deferred["first"]), ("backward", ~deferred["last"])):
        free = deferred[(deferred.kind == kind) & mask]
        free_us[kind] = free.beyond_us.median()
        factor = 1 + (free.beyond_us / free.fitted_us).median()
        print(f"{kind}, nothing in flight: {free_us[kind]:+.0f} us, {factor:.3f} of the calibration's")

    def lost_of(name: str, table: pd.DataFrame, kind: str, mask: "pd.Series[bool] | bool", beside: str) -> float:
        mine = table[(table.kind == kind) & mask]
        lost = float(mine.beyond_us.median() - free_us[kind])
        print(f"{kind}, {name}: {lost:.0f} us lost beside {beside}, {len(mine)} layers")
        return lost

    first_unshard = lost_of("deferred's first", deferred, "forward", deferred["first"], "copy-in and all_gather")
    last_reduce = lost_of("deferred's last", deferred, "backward", deferred["last"], "reduce_scatter")
    lost: dict[str, tuple[float, float]] = {"collective": (first_unshard, last_reduce)}
    for study, names in SETS.items():
        for name in names[:2]:
            table = layers(f"{study}-{name}", fits)
            one_sided = name.startswith("odc")
            unshard, reduce = OPS["odc" if one_sided else "collective"]
            check = ", and the comparison with what was published" if one_sided else ""
            add = "" if one_sided else " and +="
            lost_of(name, table, "forward", table["first"], f"copy-in and {unshard}{check}")
            again = lost_of(name, table, "forward", ~table["first"], f"copy-in and {unshard}")
            lost_of(name, table, "backward", table["first"], f"copy-in, {unshard} and {reduce}")
            both = lost_of(name, table, "backward", ~table["first"], f"copy-in, {unshard}, {reduce}{add}")
            if one_sided and study == "short":
                lost["odc"] = (again, both - again)

    alone_us = lost_alone_us(calibration)
    print("begun with a layer, alone:", ", ".join(f"{op} {lost_us:.0f} us" for op, lost_us in alone_us.items()))
    for row in calibration["copies"]:
        if row.get("beside_layer") == MODEL:
            row["slowdown_compute"] = 1e6 * row["p50_s"] / (1e6 * row["p50_s"] - alone_us[row["op"]])
    copy_in_us = alone_us["copy_in"]
    for transport, (unshard_us, reduce_us) in lost.items():
        for op, of_op_us in zip(OPS[transport], (unshard_us - copy_in_us, reduce_us), strict=True):
            for row in calibration["transfers"]:
                if row["op"] == op and row.get("beside_layer") == MODEL:
                    took_us = 1e6 * row["overlapped_p50_s"]
                    row["slowdown_compute"] = took_us / (took_us - max(0.0, of_op_us))
                    print(f"{op}: {took_us:.0f} us, costs {alone_us[op]:.0f} alone, {of_op_us:.0f} in training")
    with tempfile.TemporaryDirectory() as folder:
        after = Path(folder) / "after.json"
        after.write_text(json.dumps(calibration), encoding="utf-8")
        for study, names in SETS.items():
            for when, path in (("before", CALIBRATION), ("after", after)):
                found = validate([RUNS / f"{study}-{name}" for name in names], hardware=path)
                for each in found.runs:
                    worst = max(each.idle_causes.items(), key=lambda item: abs(item[1].points or 0.0))
                    print(
                        f"{when}, {each.run.name}: step {each.step.percent:+.1f} %, median minibatch "
                        f"{pd.Series(each.minibatch_percent).median():+.1f} %, largest error of a cause of idle time "
                        f"{worst[1].points:+.1f} points ({worst[0]})"
                    )
                for pair in found.speedups:
                    print(f"{when}, {pair.run}: {pair.predicted:.3f}x predicted, {pair.measured.value:.3f}x measured")


if __name__ == "__main__":
    main()
