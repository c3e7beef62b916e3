"""The body of `odc sweep`: flags in, points run with a progress bar, files and tables out."""

from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand

from odc_sim.errors import InputError
from odc_sim.progress import progress_bar

if TYPE_CHECKING:
    from rich.console import Console


FIELDS_AS_FLAGS = {"ignore_unknown_options": True, "allow_extra_args": True}
"""Click leaves what it does not know, the fields of a study, to `sweep_flags`."""


class StudyHelp(TyperCommand):
    """A command whose help ends with the fields of a study that have no option of their own."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Add the list; imported here because the fields take a moment."""
        from odc_sim.study import Study

        own = {parameter.name for parameter in self.params}
        others = [name for name in Study.model_fields if name not in own]
        _write_flags(formatter, "Every other field of a study file is a flag too, as --field value", others)


class SweepHelp(TyperCommand):
    """A command whose help ends with the fields of a study and the sweeps that are built in."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Add both lists; imported here because they take a moment."""
        from odc_sim.study import Study
        from odc_sim.sweep_file import builtin_sweeps

        _write_flags(formatter, "Fields (a value, or a comma list to vary it)", list(Study.model_fields))
        with formatter.section("Built-in sweeps"):
            formatter.write_text("  ".join(builtin_sweeps()))


def _write_flags(formatter: Any, heading: str, fields: Sequence[str]) -> None:
    from odc_sim.sweep_flags import as_flag

    with formatter.section(heading):
        for line in wrap("  ".join(map(as_flag, fields)), 76, break_on_hyphens=False):
            formatter.write(f"  {line}\n")


def run_command(
    tokens: Sequence[str],
    config: Path | None,
    out: Path | None,
    jobs: int | None,
    backend: str,
    address: str | None,
    one_at_a_time: bool | None,
    *,
    command: str,
    console: "Console",
) -> None:
    """Run the sweep that `tokens` ask for.

    Raises:
        InputError: whatever the user got wrong, a sweep none of whose points can run included.
        typer.Exit: 130 after Ctrl-C; finished points stay.
    """
    from odc_sim.sweep_flags import sweep_from_flags
    from odc_sim.sweep_report import print_sweep, write_sweep
    from odc_sim.sweep_run import run_sweep

    mode = None if one_at_a_time is None else "one-at-a-time" if one_at_a_time else "grid"
    sweep = sweep_from_flags(tokens, config, mode)  # type: ignore[arg-type]
    folder = out or Path("reports") / sweep.name
    try:
        with progress_bar(time_left=True) as progress:
            results = run_sweep(
                sweep,
                folder,
                jobs=jobs,
                backend=backend,
                address=address,
                command=command,
                progress=lambda done, total: progress("points", done, total),
            )
    except KeyboardInterrupt:
        typer.echo(f"interrupted: finished points are in {folder / 'points'}; the same command goes on", err=True)
        raise typer.Exit(130) from None
    failed = [outcome for outcome in results.outcomes if outcome.results is None]
    if len(failed) == len(results.outcomes):
        raise InputError(f"none of {len(failed)} points can run: {failed[0].verdict}")
    print_sweep(results, console)
    written = write_sweep(folder, results, command)
    found = f"{results.reused} of {len(results.outcomes)} points were finished before; " if results.reused else ""
    typer.echo(f"{found}wrote {', '.join(path.name for path in written)} to {folder}", err=True)
