"""Plans, campaign.toml and what to expect of these runs: python reports/validation-h200/prepare.py [HARDWARE]"""

import sys
from pathlib import Path

from odc_sim.campaign_plans import Studies, write_campaign

HERE = Path(__file__).parent
STUDIES = {
    "longalign": {"workload": "longalign"},
    "short": {"workload": "longalign", "max_tokens": 8192, "overlong": "clip"},
    "balanced": {"lengths": HERE / "equal.txt"},
    "swesmith": {"workload": "swesmith"},
    "longalign-7b": {"workload": "longalign", "model": "qwen2.5-7b"},
}
PAIRS = ("collective/lb-micro", "odc/lb-mini", "odc/lb-micro", "collective-deferred/lb-mini")


def main(hardware: str) -> None:
    """Write everything."""
    common = {"devices": 2, "minibatches": 40, "minibatch_size": 2, "model": "qwen2.5-1.5b", "hardware": hardware}
    studies = Studies(studies=STUDIES, pairs=PAIRS, common=common)
    rows = write_campaign(HERE, studies, f"python reports/validation-h200/prepare.py {hardware}")
    print(*rows[0], sep="\t")
    for row in rows:
        print(*row.values(), sep="\t")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "h200-nvlink")
