"""What `--out DIR` receives: results, figures and timelines, each file whole or not at all."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from odc_sim.errors import InputError
from odc_sim.header import header, write_bytes, write_json
from odc_sim.plots import Panel, idle_figure, lengths_figure, save_png, speedup_figure, timeline_figure
from odc_sim.results import Results
from odc_sim.timeline import Timeline, chrome_trace

TIMELINE_FILES = (
    "timeline.png",
    *(f"{name}.{kind}" for name in ("timeline", "timeline-baseline") for kind in ("json", "parquet")),
)
TRACE_MINIBATCHES = 2
"""timeline.json holds no more minibatches than this; timeline.parquet holds all."""


def write_report(
    out_dir: str | Path,
    results: Results,
    command: str,
    *,
    panels: Sequence[Panel] | None = None,
    timelines: Mapping[str, Timeline] | None = None,
) -> list[Path]:
    """Write a study's files into `out_dir`, which is created; returns them in the order written.

    Always results.csv, results.json, speedup.png, idle.png and lengths.png; timeline.png with `panels` (title, makespan
    in seconds, spans); NAME.json and NAME.parquet for each of `timelines`. Timelines of an earlier study that this one
    does not replace are removed, as they would be taken for its own; other files are left alone.

    Raises:
        InputError: `out_dir` is a file, or cannot be created or written.
    """
    out = make_directory(out_dir)
    seed = results.study.get("seed")
    written: list[Path] = []

    def place(name: str) -> Path:
        written.append(out / name)
        return written[-1]

    write_bytes(place("results.csv"), results.csv_text().encode())
    results.write_json(place("results.json"), command)
    save_png(speedup_figure(results), place("speedup.png"))
    save_png(idle_figure(results), place("idle.png"))
    save_png(lengths_figure(results.lengths), place("lengths.png"))
    if panels:
        save_png(timeline_figure(panels), place("timeline.png"))
    for name, timeline in (timelines or {}).items():
        trace = header(command, seed) | chrome_trace(timeline, TRACE_MINIBATCHES)
        write_json(place(f"{name}.json"), trace, indent=None)
        timeline.write_parquet(place(f"{name}.parquet"), command, seed)
    for stale in {out / name for name in TIMELINE_FILES} - set(written):
        if stale.is_file():
            stale.unlink()
    return written


def make_directory(out_dir: str | Path) -> Path:
    """`out_dir`, existing.

    Raises:
        InputError: it is a file, or cannot be created.
    """
    out = Path(out_dir)
    if out.exists() and not out.is_dir():
        raise InputError(f"{out_dir}: is a file, expected a directory for the report; choose another with --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{out_dir}: cannot be created: {error.strerror}; choose another directory with --out"
        ) from None
    return out
