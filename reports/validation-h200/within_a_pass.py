"""How layers slow down within a pass over them, on microbatches of more than 16,384 tokens.

    python reports/validation-h200/within_a_pass.py

Percent that layers take longer than their calibration's line, median, by fifths of the way through the forward or the
backward. Under collective-deferred only forwards of later microbatches, which have nothing in flight beside them, and
under odc all: with gathers of 0.13 ms (1.5B) beside layers of 4 to 50 ms. What waits inside NCCL is left out.
"""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd

from odc_sim.run_files import read_run

HERE = Path(__file__).parent
TRACES = HERE.parent.parent / "traces" / "calibration"
RUNS = {
    "runs-2026-11-30/swesmith-odc-lb-mini": TRACES / "h200-nvlink-2gpu-other.json",
    "runs-2026-11-30-14h/swesmith-odc-lb-micro": HERE / "runs-2026-11-30-14h" / "calibration.json",
    "runs-2026-11-30-14h/swesmith-collective-deferred-lb-mini": HERE / "runs-2026-11-30-14h" / "calibration.json",
    "runs/longalign-7b-odc-lb-mini": TRACES / "h200-nvlink-2gpu.json",
    "runs-2026-11-30-14h/longalign-7b-odc-lb-micro": HERE / "runs-2026-11-30-14h" / "calibration.json",
}
FITS = {"forward": "forward", "backward": "backward_recompute"}
MORE_TOKENS = 16_384
PARTS = 5


def layers(name: str, calibration: Path) -> pd.DataFrame:
    """[one row for each layer of a large microbatch] With the percent beyond the line, and the part of its pass."""
    run = read_run(HERE / name)
    assert run.config.model is not None
    fits = {f["direction"]: f for f in json.loads(calibration.read_text(encoding="utf-8"))["fits"] if _of(f, name)}
    found = pd.DataFrame(asdict(run.timeline))
    count = int(found.unit.max()) - 1  # the embedding is unit 0, the head the last
    found = found[(found.stream == "compute") & (found.cause == "") & found.kind.isin(list(FITS))]
    tokens, squares = (run.plan.padded(part.astype(float)) for part in (run.plan.tokens(), run.plan.squares()))
    where = tuple(found[column] for column in ("minibatch", "microbatch", "rank"))
    found = found.assign(tokens=tokens[where], squares=squares[where])
    found = found[found.unit.between(1, count) & (found.tokens > MORE_TOKENS) & (found.minibatch > 0)]
    if run.config.schedule != "odc":
        found = found[(found.kind == "forward") & (found.microbatch > 0)]
    fit = pd.DataFrame([fits[FITS[kind]] for kind in found.kind], index=found.index)
    fitted_s = fit.c0_s + fit.c1_s_per_token * found.tokens + fit.c2_s_per_token2 * found.squares
    passed = np.where(found.kind == "forward", found.unit - 1, count - found.unit) / count
    return found.assign(
        percent=100 * ((found.end_s - found.start_s) / fitted_s - 1),
        fifth=1 + (PARTS * passed).astype(int),
    )


def _of(fit: dict[str, object], name: str) -> bool:
    return fit["unit"] == "layer" and fit["model"] == ("qwen2.5-7b" if "7b" in name else "qwen2.5-1.5b")


def main() -> None:
    """Print one table."""
    rows = []
    for name, calibration in RUNS.items():
        found = layers(name, calibration)
        for kind, part in found.groupby("kind", sort=False):
            medians = part.groupby("fifth").percent.median().round(1).to_dict()
            rows.append({"run": name, "layers": kind, **medians, "count": len(part)})
    print(pd.DataFrame(rows).to_string(index=False))


if __name__ == "__main__":
    main()
