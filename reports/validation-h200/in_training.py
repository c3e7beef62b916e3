"""The built-in calibration with what transfers cost layers of 1.5B in training, not beside a layer played by itself.

    python reports/validation-h200/in_training.py /tmp/in-training.json
    odc validate reports/validation-h200/runs/short-* --calibration /tmp/in-training.json

From the three runs of `balanced`: what forwards lose is the unshard's and its copy-in's, by their times; what a
minibatch's first backward loses beyond that the reduction's; what later ones lose beyond that `+=`. Beside collectives
on the slowest rank, which waits for no other; one-sided on the ranks' mean.
"""

import json
import sys
from pathlib import Path

from in_flight import CALIBRATION, MODEL, layers

from odc_sim.calibration import load_calibration

MOST_LOST = 0.95


def lost_s() -> dict[str, tuple[float, float, float]]:
    """By schedule: seconds in a forward, in a first backward, and in a second one."""
    calibration = json.loads(CALIBRATION.read_text(encoding="utf-8"))
    fits = {f["direction"]: f for f in calibration["fits"] if (f["model"], f["unit"]) == (MODEL, "layer")}
    middle = {
        pair: layers(f"balanced-{pair}", fits).groupby(["kind", "first", "rank"]).beyond_us.median() * 1e-6
        for pair in ("collective-deferred-lb-mini", "collective-lb-micro", "odc-lb-mini")
    }
    alone = middle.pop("collective-deferred-lb-mini")
    nothing = {"forward": alone["forward", False], "backward": alone["backward", True]}  # by rank
    found = {}
    for pair, ranks in (("collective-lb-micro", [1]), ("odc-lb-mini", [0, 1])):
        parts = (("forward", False), ("backward", True), ("backward", False))
        forward_s, first_s, second_s = (float((middle[pair][p] - nothing[p[0]])[ranks].mean()) for p in parts)
        found[pair.split("-")[0]] = (forward_s, first_s, second_s)
    return found


def slowdown(seconds: float, other_s: float) -> float:
    """Of compute beside work of `other_s` that costs it so many seconds."""
    return other_s / (other_s - min(max(seconds, 0.0), MOST_LOST * other_s))


def main(out: Path) -> None:
    """Write the file."""
    data = json.loads(CALIBRATION.read_text(encoding="utf-8"))
    costs = lost_s()
    shard = min(row["elements"] for row in data["copies"] if row.get("beside_layer") == MODEL)
    copies = {row["op"]: row for row in data["copies"] if row["elements"] == shard}
    forward_s, first_s, second_s = costs["collective"]
    rows = {row["op"]: row for row in data["transfers"] if row.get("beside_layer") == MODEL}
    for row in rows.values():
        row["overlapped_p50_s"] = max(row["overlapped_p50_s"], row["p50_s"])
    copy_s = copies["copy_in"]["p50_s"]
    of_copy_s = forward_s * copy_s / (copy_s + rows["all_gather"]["p50_s"])
    copies["copy_in"]["slowdown_compute"] = slowdown(of_copy_s, copy_s)
    copies["add"]["slowdown_compute"] = slowdown(second_s - first_s, copies["add"]["p50_s"])
    one_sided_s = costs["odc"][0], (costs["odc"][1] + costs["odc"][2]) / 2
    for ops, (beside_s, whole_s) in (
        (("all_gather", "reduce_scatter"), (forward_s, first_s)),
        (("gather", "scatter_accumulate"), one_sided_s),
    ):
        for op, cost_s in zip(ops, (beside_s - of_copy_s, whole_s - beside_s), strict=True):
            rows[op]["slowdown_compute"] = slowdown(cost_s, rows[op]["overlapped_p50_s"])
    data["environment"]["calibrate"]["edited"] = "slowdowns beside layers of 1.5B: of training (in_training.py)"
    out.write_text(json.dumps(data), encoding="utf-8")
    load_calibration(out)
    for name, cost in costs.items():
        print(name, *(f"{1e6 * part:.0f} us" for part in cost), "in a forward, first, second backward")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
