"""Figures: what is drawn, read back from their axes; how they look is for eyes."""

import sys
from dataclasses import replace

import numpy as np
import pytest
from builders import make_results, make_row

from odc_sim.durations import CAUSES
from odc_sim.errors import InputError
from odc_sim.idle import Span
from odc_sim.length_stats import length_stats
from odc_sim.plots import idle_figure, lengths_figure, save_png, speedup_figure, timeline_figure
from odc_sim.plots_style import CAUSE_COLOURS, SCHEDULE_COLOURS

POLICIES = ("local-sort", "ffd", "lb-micro", "lb-mini", "verl-native")
SCHEDULES = ("collective", "collective-deferred", "odc", "odc-local-sum")


def numbered_row(schedule, policy, number):
    speedup = 0.6 + 0.035 * number
    return make_row(
        schedule,
        policy,
        speedup=speedup,
        speedup_ci95=(speedup - 0.03, speedup + 0.04),
        idle_causes=dict.fromkeys(CAUSES, 0.0) | {"imbalance_layer": 0.3 - 0.01 * number, "exposed_reduce": 0.02},
        fits=schedule != "collective-deferred",
    )


@pytest.fixture
def results():
    """Four schedules, five policies; collective cannot run lb-mini, collective-deferred does not fit."""
    rows = [numbered_row(s, p, 4 * i + j) for i, p in enumerate(POLICIES) for j, s in enumerate(SCHEDULES)]
    hang = "hangs: rank 0 runs 5 microbatches, rank 3 runs 4"
    rows = [
        replace(r, speedup=None, speedup_ci95=None, idle_causes={}, verdict=hang)
        if r.label == "collective/lb-mini"
        else r
        for r in rows
    ]
    return make_results(rows, bounds={"speedup": 1.45})


def texts(axes):
    return [text.get_text() for text in axes.texts]


def write(figure, path):
    from PIL import Image

    save_png(figure, path)
    with Image.open(path) as image:
        assert 900 <= image.width <= 1100
    return path.stat().st_size


def test_speedups_have_a_bar_a_row_with_interval_and_number(results):
    (axes,) = speedup_figure(results).axes
    bars = {container.get_label(): list(container) for container in axes.containers}
    assert list(bars) == list(SCHEDULES)
    assert [len(found) for found in bars.values()] == [4, 5, 5, 5]  # collective hangs with lb-mini
    assert [label.get_text() for label in axes.get_xticklabels()] == list(POLICIES)
    first = bars["odc"][0]
    assert first.get_height() == pytest.approx(0.67)
    assert first.get_x() + first.get_width() / 2 == pytest.approx(0.105)  # third of four bars around 0
    intervals = [segment for c in axes.collections for segment in c.get_segments()]
    assert len(intervals) == 19
    assert any(np.allclose(segment[:, 1], (0.64, 0.71)) for segment in intervals)
    assert sum(text.startswith(("0.", "1.")) for text in texts(axes)) == 19
    assert texts(axes).count("hangs") == 1


def test_speedups_show_what_does_not_fit_the_baseline_and_the_bound(results):
    figure = speedup_figure(results)
    (axes,) = figure.axes
    hatched = {container.get_label() for container in axes.containers if all(bar.get_hatch() for bar in container)}
    assert hatched == {"collective-deferred"}
    assert [line.get_ydata()[0] for line in axes.lines] == [1.0, 1.45]
    assert any("beats 1.45" in text for text in texts(axes))
    assert "baseline\ncollective\nlb-micro" in texts(axes)
    entries = [text.get_text() for text in figure.legends[0].get_texts()]
    assert entries == [*SCHEDULES, "does not fit in memory"]
    assert axes.get_ylim()[1] > 1.45


def test_speedups_of_a_study_in_which_nothing_runs(results):
    rows = tuple(replace(r, speedup=None, speedup_ci95=None, verdict="hangs: x") for r in results.rows)
    (axes,) = speedup_figure(replace(results, rows=rows, bounds={})).axes
    assert texts(axes).count("hangs") == 20
    assert not axes.patches
    assert idle_figure(replace(results, rows=rows)).axes


def test_idle_time_is_stacked_by_cause_in_percent(results):
    figure = idle_figure(results)
    assert [axes.get_title("left") for axes in figure.axes] == list(SCHEDULES)
    entries = [text.get_text() for text in figure.legends[0].get_texts()]
    assert entries == ["imbalance layer", "exposed reduce"]  # what is nowhere 0.1 % is left out
    collective = figure.axes[0]
    widths = [bar.get_width() for bar in collective.patches]
    assert widths == pytest.approx([30, 2, 26, 2, 22, 2, 14, 2])
    starts = [bar.get_x() for bar in collective.patches]
    assert starts == pytest.approx([0, 30, 0, 26, 0, 22, 0, 14])
    assert texts(collective) == ["32 %", "28 %", "24 %", "hangs", "16 %"]
    assert [label.get_text() for label in collective.get_yticklabels()] == list(POLICIES)


def test_a_cause_appears_from_one_tenth_of_a_percent_on(results):
    def legend_with(share):
        row = replace(results.rows[0], idle_causes={"imbalance_layer": 0.2, "host": share})
        figure = idle_figure(replace(results, rows=(row,)))
        return [text.get_text() for text in figure.legends[0].get_texts()]

    assert legend_with(0.0009) == ["imbalance layer"]
    assert legend_with(0.001) == ["imbalance layer", "host"]


def test_every_cause_and_schedule_has_a_colour_of_its_own():
    assert tuple(CAUSE_COLOURS) == CAUSES
    assert len(set(CAUSE_COLOURS.values())) == len(CAUSES)
    assert len(set(SCHEDULE_COLOURS.values())) == 4


def test_lengths_have_bars_and_marks():
    lengths = np.array([1024, 2048, 4096, 65536] * 25)
    stats = length_stats(lengths).as_dict() | {"name": "mine"}
    (axes,) = lengths_figure(stats).axes
    assert sum(bar.get_height() for bar in axes.patches) == 100
    assert len(axes.patches) == 30
    assert axes.get_title("left") == "mine: 100 samples"
    # the mean, 18,176, lies between the median and the 90th percentile; the 99th is the longest itself
    assert texts(axes) == ["p50 3,072", "mean 18,176", "p90 65,536", "p99 65,536", "max 65,536"]
    assert axes.get_xscale() == "log"
    (axes,) = lengths_figure(stats | {"max_tokens": 131072}).axes
    assert texts(axes)[-1] == "max_tokens 131,072"


def spans_of(rank, makespan_s):
    """Two microbatches of two layers, then a wait: 60 % computing where the makespan is 10 s."""
    spans = []
    for m in range(2):
        t = 3.0 * m
        for unit in (1, 2):
            spans.append(Span(rank, "compute", "forward", "", unit, m, t, t + 0.5))
            t += 0.5
        spans.append(Span(rank, "compute", "head_loss", "", 0, m, t, t + 0.5))
        spans.append(Span(rank, "compute", "backward", "", 2, m, t + 0.5, t + 1.5))
        spans.append(Span(rank, "unshard", "unshard", "", 1, m, t, t + 1.5))
        spans.append(Span(rank, "compute", "recompute", "", 1, m, t + 1.5, t + 2.0))
    spans.append(Span(rank, "compute", "wait", "imbalance_minibatch", -1, -1, 6.0, makespan_s - 1.0))
    spans.append(Span(rank, "compute", "optimizer", "optimizer", -1, -1, makespan_s - 1.0, makespan_s))
    return spans


def two_panels():
    slow = [span for rank in range(3) for span in spans_of(rank, 13.1)]
    fast = [span for rank in range(3) for span in spans_of(rank, 10.0)]
    return [("collective + lb-micro", 13.1, slow), ("odc + lb-mini", 10.0, fast)]


def test_a_timeline_has_a_panel_a_schedule_and_merges_neighbours():
    figure = timeline_figure(two_panels(), ranks=[0, 2])
    first, second = figure.axes
    assert [axes.get_title("left") for axes in figure.axes] == ["collective + lb-micro", "odc + lb-mini"]
    assert [label.get_text() for label in second.get_yticklabels()] == ["rank 0", "rank 2"]
    drawn = {}
    for collection in second.collections:
        drawn[collection.get_label()] = drawn.get(collection.get_label(), 0) + len(collection.get_paths())
    # two ranks, two microbatches: forwards of two layers merge, and so do a backward and the recomputation after it
    assert drawn == {"forward": 4, "head": 4, "backward": 4, "imbalance": 2, "optimizer": 2}
    assert second.get_title("right") == "40 % of GPU time not computing"
    assert second.get_xlabel().startswith("time (s)")
    assert first.get_xlim() == second.get_xlim()


def test_microbatches_take_two_shades_by_turns_and_are_numbered():
    _, axes = timeline_figure(two_panels(), ranks=[0]).axes
    shades = {c.get_facecolor()[0].tobytes() for c in axes.collections if c.get_label() == "forward"}
    assert len(shades) == 2
    assert [t for t in texts(axes) if t.isdigit()] == ["0", "0", "1", "1"]


def test_ends_are_compared_with_the_first_panel():
    first, second = timeline_figure(two_panels()).axes
    assert [line.get_xdata()[0] for line in first.lines] == [13.1]
    assert [line.get_xdata()[0] for line in second.lines] == [10.0, 13.1]
    assert not any("1.31" in text for text in texts(first))
    assert any("1.31" in text for text in texts(second))


def test_short_minibatches_are_drawn_in_milliseconds_and_waits_for_transfers_apart():
    spans = [
        Span(0, "compute", "forward", "", 1, 0, 0.0, 0.004),
        Span(0, "compute", "wait", "exposed_unshard", 1, 0, 0.004, 0.006),
        Span(0, "compute", "wait", "host", 1, 0, 0.006, 0.0060001),  # too short to be seen: not in the legend
        Span(0, "compute", "forward", "", 2, 0, 0.0060001, 0.010),
    ]
    figure = timeline_figure([("odc", 0.010, spans)])
    (axes,) = figure.axes
    assert axes.get_xlabel().startswith("time (ms)")
    assert axes.get_xlim()[1] == pytest.approx(10.1)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["forward", "waits for a transfer"]


def test_a_timeline_shows_eight_ranks_unless_told_otherwise():
    spans = [span for rank in range(12) for span in spans_of(rank, 10.0)]
    (axes,) = timeline_figure([("odc", 10.0, spans)]).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [f"rank {rank}" for rank in range(8)]


def test_pictures_are_small_and_as_wide_as_a_readme(results, tmp_path):
    lengths = np.random.default_rng(0).lognormal(9.0, 1.0, 4000).astype(np.int64)
    assert write(speedup_figure(results), tmp_path / "speedup.png") < 80_000
    assert write(idle_figure(results), tmp_path / "idle.png") < 80_000
    assert write(lengths_figure(length_stats(lengths).as_dict()), tmp_path / "lengths.png") < 80_000
    many = []
    for rank in range(8):  # a wait between layers, as under collectives: 2,000 spans a rank, none of which merge
        for i in range(1000):
            many.append(Span(rank, "compute", "backward", "", 1, i // 100, i, i + 0.7))
            many.append(Span(rank, "compute", "wait", "imbalance_layer", 1, i // 100, i + 0.7, i + 1.0))
    assert write(timeline_figure([("collective", 1000.0, many)] * 2), tmp_path / "timeline.png") < 100_000
    assert sorted(p.name for p in tmp_path.iterdir()) == ["idle.png", "lengths.png", "speedup.png", "timeline.png"]


def test_drawing_needs_no_global_state(results, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # an import of it would fail
    assert speedup_figure(results).canvas is not None


def test_a_picture_that_cannot_be_written_is_named(results, tmp_path):
    with pytest.raises(InputError) as caught:
        save_png(speedup_figure(results), tmp_path)
    assert str(caught.value) == f"{tmp_path}: is a directory, expected the name of the file to write"
