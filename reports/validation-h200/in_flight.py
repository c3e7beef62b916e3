"""How much of what the predictions of `short` and `balanced` miss is explained by what transfers cost layers.

    python reports/validation-h200/in_flight.py

From `short-collective-deferred`: what layers take with nothing in flight. From `balanced`: what they take beside each
transport's transfers. Both go into a copy of the calibration, which predicts `short`, whose other two runs have served
for neither. `odc calibrate` measures the second itself now; the calibration of these runs is older than that.
"""

import json
import tempfile
from pathlib import Path

import pandas as pd

from odc_sim.run_files import read_run
from odc_sim.validate import validate

HERE = Path(__file__).parent
RUNS = HERE / "runs"
CALIBRATION = HERE.parents[1] / "traces" / "calibration" / "h200-nvlink-2gpu.json"
FITS = {"forward": "forward", "backward": "backward_recompute"}
MICROBATCH = ["minibatch", "microbatch", "rank"]
SHORT = ("collective-lb-micro", "odc-lb-mini", "collective-deferred-lb-mini")


def spans(name: str) -> pd.DataFrame:
    """Everything of layers, with seconds, and the tokens and squares of the microbatch."""
    run = read_run(RUNS / name)
    columns = ("minibatch", "microbatch", "rank", "stream", "kind", "cause", "unit", "start_s", "end_s")
    found = pd.DataFrame({column: getattr(run.timeline, column) for column in columns})
    found = found[found.unit > 0]
    tokens, squares = (run.plan.padded(part.astype(float)) for part in (run.plan.tokens(), run.plan.squares()))
    where = tuple(found[column] for column in MICROBATCH)
    return found.assign(s=found.end_s - found.start_s, tokens=tokens[where], squares=squares[where])


def of_layers(table: pd.DataFrame, kind: str) -> pd.DataFrame:
    """The median layer of each microbatch."""
    mine = table[(table.stream == "compute") & (table.kind == kind) & (table.cause == "")]
    return mine.groupby(MICROBATCH)[["s", "tokens", "squares"]].median().reset_index()


def transfer_s(table: pd.DataFrame, kind: str, *, one_sided: bool) -> float:
    """The median transfer of a layer, of unshards the forward's; of collectives on the rank that comes last."""
    mine = table[(table.stream == kind) & (table.kind == kind)].sort_values("start_s")
    meeting = ["minibatch", "microbatch", "unit"]
    first = mine.groupby([*meeting, "rank"]).s.first()
    return float((first if one_sided else first.groupby(meeting).min()).median())


def copy_out_stretch(table: pd.DataFrame) -> float:
    """The median copy-out of layers in backwards, but for the last layer, over that in forwards."""
    waits = table[(table.cause == "exposed_unshard") & (table.unit < table.unit.max())].sort_values("start_s")
    nth = waits.groupby([*MICROBATCH, "unit"]).cumcount()
    return float(waits.s[nth == 1].median() / waits.s[nth == 0].median())


def fitted_s(fit: dict[str, float], table: pd.DataFrame) -> pd.Series:
    """What the calibration says."""
    return fit["c0_s"] + fit["c1_s_per_token"] * table.tokens + fit["c2_s_per_token2"] * table.squares


def main() -> None:
    """Print what is found, and the predictions of `short` before and after."""
    calibration = json.loads(CALIBRATION.read_text(encoding="utf-8"))
    fits = {f["direction"]: f for f in calibration["fits"] if (f["model"], f["unit"]) == ("qwen2.5-1.5b", "layer")}
    deferred = spans("short-collective-deferred-lb-mini")
    last = deferred.groupby(["minibatch", "rank"]).microbatch.transform("max")
    for kind, direction in FITS.items():
        # all_gathers are beside the first forwards, reduce_scatters beside the last backwards
        free = of_layers(deferred[deferred.microbatch > 0 if kind == "forward" else deferred.microbatch < last], kind)
        factor = float((free.s / fitted_s(fits[direction], free)).median())
        print(f"layer {kind}, nothing in flight: {factor:.3f} of the calibration's, {len(free)} microbatches")
        for name in ("c0_s", "c1_s_per_token", "c2_s_per_token2"):
            fits[direction][name] *= factor
    for run, unshard, reduce in (
        ("balanced-collective-lb-micro", "all_gather", "reduce_scatter"),
        ("balanced-odc-lb-mini", "gather", "scatter_accumulate"),
    ):
        table = spans(run)
        lost_s = {}
        for kind, direction in FITS.items():
            beside = of_layers(table, kind)
            lost_s[kind] = float((beside.s - fitted_s(fits[direction], beside)).median())
        lost = {unshard: lost_s["forward"], reduce: lost_s["backward"] - lost_s["forward"]}
        copy_out = copy_out_stretch(table)
        print(f"copy-out beside {reduce}: x{copy_out:.2f}")
        for op, kind in ((unshard, "unshard"), (reduce, "reduce")):
            took_s = transfer_s(table, kind, one_sided=unshard == "gather")
            slowdown = took_s / (took_s - min(max(lost[op], 0.0), 0.95 * took_s))
            print(
                f"{op}: {took_s * 1e6:.0f} us, of which the layer beside it loses {lost[op] * 1e6:.0f}: x{slowdown:.2f}"
            )
            for row in calibration["transfers"]:
                if row["op"] == op and row["overlapped_p50_s"]:
                    row |= {
                        "slowdown_compute": slowdown,
                        "flagged": False,
                        "overlapped_p50_s": max(took_s, row["p50_s"]),
                        "slowdown_copy_out": copy_out if op == reduce else None,
                    }
    with tempfile.TemporaryDirectory() as folder:
        after = Path(folder) / "after.json"
        after.write_text(json.dumps(calibration), encoding="utf-8")
        for when, path in (("before", CALIBRATION), ("after", after)):
            found = validate([RUNS / f"short-{name}" for name in SHORT], hardware=path)
            median = {each.run.name: float(pd.Series(each.minibatch_percent).median()) for each in found.runs}
            for each in found.runs:
                points = each.idle_causes["compute_slowdown"].points
                print(f"{when}, {each.run.name}: step {each.step.percent:+.1f} %, ", end="")
                print(f"median minibatch {median[each.run.name]:+.1f} %, slowdown {points:+.1f} points")
            for pair in found.speedups:
                typical = pair.predicted * (100 + median[pair.baseline]) / (100 + median[pair.run])
                print(
                    f"{when}, {pair.run}: {pair.predicted:.3f}x predicted, {pair.measured.value:.3f}x measured, ",
                    end="",
                )
                print(f"{typical:.3f}x by median minibatches")


if __name__ == "__main__":
    main()
