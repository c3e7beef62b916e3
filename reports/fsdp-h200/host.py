"""The host's time for a unit under fully_shard and under OnDemand, from the raw samples.

    python reports/fsdp-h200/host.py

From the last run of runs.json that has the shape "host-bound", and from the training runs of reports/validation-h200.
"""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd

from odc_sim.run_files import read_run

HERE = Path(__file__).parent
RUNS = HERE.parent / "validation-h200" / "runs"
PAIRS = (
    ("balanced-collective-lb-micro", "balanced-odc-lb-mini"),
    ("short-collective-lb-micro", "short-odc-lb-mini"),
)
DRAWN = 20_000


def benchmark() -> None:
    """One line for each rank: medians, and their ratio with an interval from rounds drawn anew."""
    runs = json.loads((HERE / "runs.json").read_text(encoding="utf-8"))["runs"]
    run = [run for run in runs if "host-bound" in run["shapes"]][-1]
    rng = np.random.default_rng(0)
    for rank in ("rank0", "rank1"):
        for seconds in ("seconds", "core_seconds"):
            samples = [run[rank]["host-bound"][mode] for mode in ("fsdp2", "odc")]
            rounds = len(samples[0]["blocks"])
            stock, ours = (1e3 * np.array(each[seconds]).reshape(rounds, -1) for each in samples)
            drawn = rng.integers(0, rounds, (DRAWN, rounds))
            ratios = np.median(stock[drawn].reshape(DRAWN, -1), 1) / np.median(ours[drawn].reshape(DRAWN, -1), 1)
            low, high = np.percentile(ratios, (2.5, 97.5))
            print(
                f"{rank}, {seconds}: {np.median(stock):.2f} and {np.median(ours):.2f} ms, fastest fifth under "
                f"{np.percentile(stock, 20):.2f} and {np.percentile(ours, 20):.2f}; ratio of medians "
                f"{np.median(stock) / np.median(ours):.3f} ({low:.3f} to {high:.3f})"
            )


def training(name: str) -> pd.Series:
    """Median milliseconds to enqueue a layer, by kind, over ranks, layers and all minibatches but the first two."""
    spans = pd.DataFrame(asdict(read_run(RUNS / name).timeline))
    spans = spans[(spans.stream == "host") & (spans.unit > 0) & (spans.minibatch > 1)]
    return 1e3 * (spans.end_s - spans.start_s).groupby(spans.kind).median()


def main() -> None:
    """Print both."""
    benchmark()
    for pair in PAIRS:
        stock, ours = (training(name) for name in pair)
        for kind in ("forward", "backward"):
            print(f"{pair[1]}, layer {kind}: {stock[kind]:.2f} and {ours[kind]:.2f} ms")


if __name__ == "__main__":
    main()
