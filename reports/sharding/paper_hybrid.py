"""ODC over collectives where only the optimizer state crosses nodes, as in appendix E of arXiv 2601.19362.

    python reports/sharding/paper_hybrid.py

Writes paper_hybrid.csv.
"""

import csv
from pathlib import Path

from odc_sim.sharding import chosen_strategies
from odc_sim.sharding_study import shard
from odc_sim.study import Study

HERE = Path(__file__).parent
CASES = (("qwen2.5-14b", 16), ("qwen2.5-32b", 32))
MINIBATCH_SIZES = (1, 2, 4, 8)
POLICIES = ("lb-micro", "lb-mini")
"""The paper's."""
SCALE = 0.125
"""LongAlign to 8K tokens, 2K on average."""


def main() -> None:
    """Print and write a row for each."""
    rows = []
    for model, devices in CASES:
        for size in MINIBATCH_SIZES:
            study = Study(model=model, devices=devices, minibatch_size=size, scale=SCALE, policy=POLICIES)
            found = shard(study, chosen_strategies(["IIG"]))
            on_demand, collective = found.row("IIG", "odc"), found.row("IIG", "collective")
            unhidden_s = collective.minibatch_s - collective.sync_s + on_demand.sync_s
            rows.append(
                {
                    "model": model,
                    "devices": devices,
                    "minibatch_size": size,
                    "IIG odc / IIG collective": round(collective.minibatch_s / on_demand.minibatch_s, 3),
                    "the same, neither hides the sync": round(unhidden_s / on_demand.minibatch_s, 3),
                    "IIG collective / GGG collective": round(collective.speedup, 3),
                    "GGG odc / GGG collective": round(found.row("GGG", "odc").speedup, 3),
                }
            )
            print(*rows[-1].values(), sep="\t", flush=True)
    with (HERE / "paper_hybrid.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
