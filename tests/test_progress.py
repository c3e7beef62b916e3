import sys

import pytest

from odc_sim import progress
from odc_sim.progress import _Lines, progress_bar


def test_a_log_gets_a_line_now_and_then(capsys):
    seconds = iter([100.0, 101.0, 115.0, 116.0, 131.5])
    lines = _Lines(lambda: next(seconds))
    for done in range(1, 5):
        lines("longalign odc/lb-mini", done, 40)
    assert capsys.readouterr().err.splitlines() == [
        "15 s: 2 of 40, longalign odc/lb-mini",
        "32 s: 4 of 40, longalign odc/lb-mini",
    ]


@pytest.mark.parametrize("terminal", [False, True])
def test_a_bar_is_for_terminals(capsys, monkeypatch, terminal):
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    monkeypatch.setenv("TERM", "xterm")
    with progress_bar(time_left=True) as report:
        report("points", 3, 4)
    said = capsys.readouterr().err
    assert ("3 of 4, points" in said) != terminal
    assert ("left" in said) == terminal
