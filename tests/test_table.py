"""The printed table: what it says at 120 and 80 columns, what it never drops, and lengths as text."""

import io
from dataclasses import replace

import numpy as np
import pytest
from builders import make_results, make_row
from rich.console import Console

from odc_sim.durations import CAUSES
from odc_sim.length_stats import length_stats
from odc_sim.table import CAUSE_WORDS, columns_for, print_results, results_table
from odc_sim.table_lengths import histogram_lines, print_lengths

POLICIES = ("verl-native", "global-sort", "lb-micro", "lb-mini", "lpt")
SCHEDULES = ("odc-local-sum", "odc", "collective-deferred", "collective")  # not the order they are printed in
FITTED = {"compute": "fitted", "transfers": "analytic", "optimizer": "analytic", "memory": "analytic"}
HANG = "hangs: rank 3 runs 4 microbatches, rank 0 runs 5"


def numbered_row(schedule, policy, number):
    return make_row(
        schedule,
        policy,
        samples_per_s_per_device=0.2 + 0.01 * number,
        speedup=0.8 + 0.025 * number,
        speedup_ci95=(0.8 + 0.025 * number - 0.03, 0.8 + 0.025 * number + 0.01),
        bubble_rate=0.251,
        idle_rate=0.263,
        idle_causes={"imbalance_microbatch": 0.214, "exposed_unshard": 0.034, "optimizer": 0.012, "host": 0.003},
        mfu=0.3456,
        microbatches={"mean": 3.26, "max": 5},
        peak_memory_bytes={"parameters": 1, "total": 78_140_000_000 + number * 10**9},
        fits=schedule != "collective-deferred",
        provenance=FITTED,
    )


@pytest.fixture
def results():
    """Rows by schedule, then policy. collective cannot run lb-mini and lpt; the fastest, odc with lpt, fits."""
    rows = {}
    for j, schedule in enumerate(SCHEDULES):
        for i, policy in enumerate(POLICIES):
            rows[schedule, policy] = numbered_row(schedule, policy, 4 * i + (j != 3) + (j == 1))
    base = {"speedup": 1.0, "speedup_ci95": (1.0, 1.0)}
    rows["collective", "lb-micro"] = replace(rows["collective", "lb-micro"], **base)
    for policy in ("lb-mini", "lpt"):
        empty = {"speedup": None, "speedup_ci95": None, "fits": False, "provenance": {}, "verdict": HANG}
        rows["collective", policy] = replace(rows["collective", policy], **empty)
    return make_results(
        rows.values(),
        bounds={"balanced_share": 12.345, "largest_sample": 0.5, "lower_bound": 12.4, "speedup": 1.452},
        advice="Use odc + lpt: [bold]28%[/bold] more.",
        notes=("2 samples were clipped to 65,536 tokens",),
        study={"seed": 0},
    )


def printed(results, width, encoding="utf-8"):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, newline="\n")
    print_results(results, Console(file=stream, width=width))
    stream.flush()
    return raw.getvalue().decode(encoding)


def rows_of(text):
    return [line for line in text.splitlines() if line.split() and line.split()[0] in POLICIES]


def test_at_120_columns_a_row_says_everything(results):
    text = printed(results, 120)
    lines = rows_of(text)
    assert len(lines) == 18
    (line,) = [line for line in lines if line.split()[:2] == ["global-sort", "odc"]]
    words = "global-sort odc 260.0 0.95x ±.02 25.1 26.3 microbatch 21 %, unshard 3 % 34.6 3.3/5 84.1 faaa"
    assert " ".join(line.split()) == words
    assert max(map(len, text.splitlines())) <= 120
    assert "…" not in text
    assert "samples" in text
    assert "/ks/device" in text


def test_rows_are_sorted_by_policy_as_given_then_by_schedule(results):
    order = [tuple(line.split()[:2]) for line in rows_of(printed(results, 120))]
    known = ("collective", "collective-deferred", "odc", "odc-local-sum")
    runs = {(row.policy, row.schedule) for row in results.rows if row.runs}
    assert order == [(p, s) for p in POLICIES for s in known if (p, s) in runs]


def test_marks_of_the_best_the_baseline_and_what_does_not_fit(results):
    lines = rows_of(printed(results, 120))
    starred = [line for line in lines if "*" in line]
    assert [line.split()[:2] for line in starred] == [["lpt", "odc"]]
    assert [line.split()[:2] for line in lines if "base" in line] == [["lb-micro", "collective"]]
    assert all(("✗" in line) == ("collective-deferred" in line) for line in lines)
    table = results_table(results)
    assert [row.style for row in table.rows].count("bold") == 1
    assert [row.style for row in table.rows].count("dim") == 5


def test_the_fastest_is_not_starred_if_it_does_not_fit(results):
    rows = tuple(replace(row, fits=row.schedule == "collective") for row in results.rows)
    starred = [line for line in rows_of(printed(replace(results, rows=rows), 120)) if "*" in line]
    assert [line.split()[:2] for line in starred] == [["lb-micro", "collective"]]


def test_rows_that_cannot_run_share_a_line_below(results):
    below = " ".join(printed(results, 120).split("\n\n")[2].split())
    assert f"cannot run: collective with lb-mini, lpt (lb-mini: {HANG})" in below
    rows = tuple(row for row in results.rows if row.label != "collective/lpt")
    assert f"cannot run: collective with lb-mini ({HANG})" in printed(replace(results, rows=rows), 120)


def test_a_verdict_of_a_row_that_runs_is_printed(results):
    rows = (replace(results.rows[0], verdict="launch-bound: use fewer devices"), *results.rows[1:])
    text = printed(replace(results, rows=rows), 120)
    assert "odc-local-sum with verl-native: launch-bound: use fewer devices\n" in text


def test_notes_bound_and_advice_come_last_and_are_not_read_as_markup(results):
    end = " ".join(printed(results, 120).split("note: ")[1].split())
    assert end == (
        "2 samples were clipped to 65,536 tokens nothing that keeps samples in their minibatch can beat 1.45x: "
        "a minibatch needs 12.4 s at least, the longer "
        "of an even share of its work (12.3 s on average) and its longest sample (500 ms) "
        "memory holds any plan with max_tokens up to: collective none, collective-deferred none, odc none, "
        "odc-local-sum none "
        "Use odc + lpt: [bold]28%[/bold] more."
    )


def test_at_80_columns_columns_go_but_provenance_stays(results):
    text = printed(results, 80)
    lines = rows_of(text)
    assert len(lines) == 18
    (line,) = [line for line in lines if line.split()[:2] == ["global-sort", "odc"]]
    assert " ".join(line.split()) == "global-sort odc 0.95x ±.02 25.1 26.3 microbatch 21 % 84.1"
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    flowing = " ".join(text.split())
    assert "sources: compute fitted, transfers analytic, optimizer analytic, memory analytic" in flowing


def test_columns_are_dropped_in_order(results):
    full = [column.name for column in columns_for(results, 200)]
    assert full[0] == "policy"
    assert len(full) == 11
    dropped = []
    for width in range(120, 50, -1):
        names = [column.name for column in columns_for(results, width)]
        dropped += [name for name in full if name not in names and name not in dropped]
    assert dropped == ["provenance", "microbatches", "samples", "mfu", "bubble", "causes"]


def test_sources_that_differ_are_told_apart(results):
    measured = dict.fromkeys(FITTED, "measured") | {"memory": "extrapolated"}
    rows = tuple(replace(r, provenance=measured) if r.schedule == "odc" and r.runs else r for r in results.rows)
    text = printed(replace(results, rows=rows), 120)
    flowing = " ".join(text.split())
    assert (
        "sources: compute measured, transfers measured, optimizer measured, memory extrapolated (mmmx; odc)" in flowing
    )
    assert "memory analytic (faaa; collective, collective-deferred, odc-local-sum)" in flowing
    assert all(line.endswith("mmmx") == (" odc " in line) for line in map(str.rstrip, rows_of(text)))


def test_throughput_is_per_second_where_that_is_readable(results):
    rows = tuple(replace(row, samples_per_s_per_device=1.2345) for row in results.rows)
    text = printed(replace(results, rows=rows), 120)
    assert "/s/device" in text
    assert all(" 1.234 " in line or " 1.235 " in line for line in rows_of(text))


def test_a_terminal_without_unicode_gets_plain_characters(results):
    text = printed(results, 120, encoding="ascii")
    assert "0.95x +-.02" in text
    assert "! does not fit the device's memory" in text


def test_when_piped_there_are_no_escape_codes(results):
    assert "\x1b" not in printed(results, 120)


def test_nothing_runs(results):
    rows = tuple(
        replace(row, speedup=None, speedup_ci95=None, fits=False, verdict="hangs: x", provenance={})
        for row in results.rows
    )
    text = printed(replace(results, rows=rows, bounds={}), 120)
    assert rows_of(text) == []
    assert text.count("cannot run: ") == 4
    assert text.endswith("more.\n")


def test_every_cause_has_a_short_word():
    assert tuple(CAUSE_WORDS) == CAUSES
    assert max(map(len, CAUSE_WORDS.values())) <= 10


def test_lengths_are_told_by_percentiles_and_bars():
    lengths = np.array([1000] * 60 + [2000] * 30 + [4000] * 10)
    stream = io.StringIO()
    console = Console(file=stream, width=80)
    print_lengths(length_stats(lengths, np.arange(100) // 2), console, "mine")
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("mine: 100 samples, 160,000 tokens, correlation of one prompt's rollouts 1.00")
    assert lines[1].split() == ["mean", "sd", "min", "p10", "p50", "p90", "p99", "max"]
    assert lines[2].split()[4:] == ["1,000", "2,200", "4,000", "4,000"]
    assert max(map(len, lines)) <= 80


def test_the_histogram_joins_bins_and_scales_bars():
    stats = length_stats(np.array([1000] * 60 + [2000] * 30 + [4000] * 10))
    for symbols, full in ((True, "█"), (False, "#")):
        lines = histogram_lines(stats, width=60, symbols=symbols)
        assert len(lines) == 15
        shares = [float(line.split("%")[0].split()[-1]) for line in lines]
        assert sum(shares) == pytest.approx(100.0)
        assert [share for share in shares if share] == [60.0, 30.0, 10.0]
        assert max(map(len, lines)) == 60
        bars = [line.count(full) for line in lines if full in line]
        assert bars[1] == pytest.approx(bars[0] / 2, abs=1)
        assert bars[2] == pytest.approx(bars[0] / 6, abs=1)
    assert histogram_lines(stats, 60, symbols=False)[0].isascii()


def test_the_rarest_lengths_still_show():
    stats = length_stats(np.array([1000] * 99_999 + [4000]))
    assert histogram_lines(stats)[-1].endswith("% ▏")
    assert histogram_lines(stats, symbols=False)[-1].endswith("% #")


def test_equal_lengths_have_one_bar():
    lines = histogram_lines(length_stats(np.array([512] * 7)))
    assert sum("100.0 %" in line for line in lines) == 1
