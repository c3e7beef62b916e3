"""Print which lines of odc_kernels run on GPUs only, and fail where others ran in no test.

python tests/kernels/cuda_only.py coverage.json

A few lines run only if processes meet in one of two orders, so that a run may miss them: `RACES` of them pass.
"""

import configparser
import json
import sys
from pathlib import Path

RACES = 5


def ranges(lines: list[int]) -> str:
    """3-5, 9."""
    runs: list[list[int]] = []
    for line in sorted(lines):
        if runs and line == runs[-1][1] + 1:
            runs[-1][1] = line
        else:
            runs.append([line, line])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def main(report: Path) -> int:
    files = json.loads(report.read_text())["files"]
    settings = configparser.ConfigParser()
    settings.read(Path(__file__).with_name("coverage.ini"))
    print("CUDA only (run by tests/gpu and the benchmark):")
    for pattern in settings["run"]["omit"].split("\n"):
        if pattern and not pattern.startswith("#"):
            print(f"  {pattern.removeprefix('*/')}: all of it")
    for name, file in sorted(files.items()):
        if file["excluded_lines"]:
            print(f"  {name}: {ranges(file['excluded_lines'])}")
    missing = {name: file["missing_lines"] for name, file in sorted(files.items()) if file["missing_lines"]}
    for name, lines in missing.items():
        print(f"run by no test: {name}: {ranges(lines)}")
    covered = sum(file["summary"]["covered_lines"] for file in files.values())
    missed = sum(map(len, missing.values()))
    print(f"{covered} lines of odc_kernels ran without a GPU; {missed} others did not")
    return 1 if missed > RACES else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
