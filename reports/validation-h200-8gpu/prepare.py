"""What 8 GPUs (or as many as there are) should take, and the runs that show it.

python reports/validation-h200-8gpu/prepare.py [DEVICES] [HARDWARE]      8: into this folder; else into runs-DEVICES
"""

import sys
from pathlib import Path

from odc_sim.campaign_plans import Studies, write_campaign

HERE = Path(__file__).parent
STUDIES = {
    "longalign-2": {"workload": "longalign", "minibatch_size": 2},
    "longalign-4": {"workload": "longalign", "minibatch_size": 4},
    "balanced": {"lengths": HERE.parent / "validation-h200" / "equal.txt", "minibatch_size": 4},
    "swesmith-4": {"workload": "swesmith", "minibatch_size": 4, "minibatches": 3},
    "longalign-8": {"workload": "longalign", "minibatch_size": 8},
}
PAIRS = ("collective/lb-micro", "odc/lb-micro", "odc/lb-mini")


def main(devices: int, hardware: str) -> None:
    """Write everything."""
    common = {"devices": devices, "minibatches": 5, "model": "qwen2.5-1.5b", "hardware": hardware}
    measured = 'quick = true\nmodels = ["qwen2.5-1.5b"]'
    studies = Studies(studies=STUDIES, pairs=PAIRS, common=common, calibration=measured)
    command = f"python reports/validation-h200-8gpu/prepare.py {devices} {hardware}"
    rows = write_campaign(HERE if devices == 8 else HERE / f"runs-{devices}", studies, command)
    print(*rows[0], sep="\t")
    for row in rows:
        print(*row.values(), sep="\t")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 8, sys.argv[2] if len(sys.argv) > 2 else "h200-nvlink")
