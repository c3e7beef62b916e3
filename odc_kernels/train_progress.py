"""What a run tells while it runs: a bar on a terminal, else a line a minibatch."""

import sys

from odc_sim.run_files import StepRow


class Progress:
    """Rank 0's."""

    def __init__(self, steps: int, done: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        self._bar = Progress(
            *(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()),
            console=console,
            disable=not console.is_terminal,
            auto_refresh=False,  # a thread of its own would take time from the one that enqueues
        )
        self._task = self._bar.add_task("warming up", total=steps, completed=done)

    def start(self) -> None:
        """Show it."""
        self._bar.start()

    def stop(self) -> None:
        """Leave the last state on the screen."""
        self._bar.stop()

    def show(self, row: StepRow) -> None:
        """A minibatch has been finished."""
        text = line(row)
        if self._bar.disable:
            print(text, file=sys.stderr, flush=True)
        self._bar.update(self._task, description=text, advance=1, refresh=True)


def line(row: StepRow) -> str:
    """One line about a minibatch; numbers that were not measured are left out."""
    parts = [
        f"minibatch {row.minibatch}",
        f"loss {row.loss:.4f}",
        f"norm {row.grad_norm:.3f}",
        f"{row.makespan_s:.3f} s",
        f"{row.tokens / row.makespan_s:,.0f} tokens/s",
    ]
    parts += [f"MFU {row.mfu:.1%}"] if row.mfu == row.mfu else []
    parts += [f"idle {row.idle_rate:.1%}"] if row.idle_rate == row.idle_rate else []
    return "  ".join(parts)
