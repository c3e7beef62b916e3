"""Progress on standard error: a bar on a terminal; elsewhere, as in the log of a batch job, a line now and then."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, steps done, steps in all)."""
LINE_EVERY_S = 15.0


@contextmanager
def progress_bar(*, time_left: bool = False) -> Iterator[Progress]:
    """Call what it yields with what is done; with `time_left` the bar guesses how long the rest takes."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines()
        return
    columns = [TextColumn("{task.description:36}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    if time_left:
        columns += [TextColumn("left"), TimeRemainingColumn()]
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)


class _Lines:
    """`35 s: 12 of 40, longalign odc/lb-mini`; none in the first seconds, so that short work says nothing."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start_s = self._last_s = clock()

    def __call__(self, what: str, done: int, total: int) -> None:
        now_s = self._clock()
        if now_s - self._last_s >= LINE_EVERY_S:
            self._last_s = now_s
            print(f"{now_s - self._start_s:.0f} s: {done} of {total}, {what}", file=sys.stderr, flush=True)
