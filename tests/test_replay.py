"""Replaying a timeline with its barriers moved: by hand, against the event engine, and what is refused."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
from builders import make_durations, random_durations
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from cli import app
from odc_sim.durations import CAUSES
from odc_sim.engine_event import play, run_event
from odc_sim.errors import InputError
from odc_sim.idle import Span
from odc_sim.measured import read_measured
from odc_sim.replay import replay
from odc_sim.schedules import BARRIERS, make_schedule
from odc_sim.timeline import Timeline


def spans_of(rank, *pieces, start_s=0.0):
    """Compute spans one after the other from (kind, unit, microbatch, seconds)."""
    found, clock_s = [], start_s
    for kind, unit, microbatch, seconds in pieces:
        found.append(Span(rank, "compute", kind, "", unit, microbatch, clock_s, clock_s + seconds))
        clock_s += seconds
    return found


def microbatch(m, forward_0, forward_1, head, recompute_1, backward_1, backward_0):
    """One microbatch of a model with one layer."""
    return (
        ("forward", 0, m, forward_0),
        ("forward", 1, m, forward_1),
        ("head_loss", 0, m, head / 4),  # forward of the head, then its backward
        ("head_loss", 0, m, head * 3 / 4),
        ("recompute", 1, m, recompute_1),
        ("backward", 1, m, backward_1),
        ("backward", 0, m, backward_0),
    )


# Seconds between layer barriers: embedding | layer and head | recompute, backward and embedding
RANK_0 = [microbatch(0, 1, 2, 1, 1, 2, 1), microbatch(1, 1, 5, 3, 2, 4, 2)]  # 1 | 3 | 4 and 1 | 8 | 8: 25 s
RANK_1 = [microbatch(0, 2, 4, 2, 2, 3, 1), microbatch(1, 1, 1, 1, 1, 0.5, 0.5)]  # 2 | 6 | 6 and 1 | 2 | 2: 19 s


def by_hand(*, optimizer_s=0.0):
    spans = [
        *spans_of(0, *RANK_0[0], *RANK_0[1], ("optimizer", -1, -1, optimizer_s)),
        *spans_of(1, *RANK_1[0], *RANK_1[1], ("optimizer", -1, -1, optimizer_s / 2)),
    ]
    return Timeline.from_spans([(0, spans)])


class TestByHand:
    def test_two_ranks_two_microbatches(self):
        found = replay(by_hand())
        assert (found.ranks, found.layers) == (2, 1)
        assert found.recorded_s == pytest.approx([25.0])
        assert found.busy_s == pytest.approx([44.0])
        # layer: max of 1, 2 | 3, 6 | 4, 6 | 1, 1 | 8, 2 | 8, 2
        assert found.makespan_s("layer") == pytest.approx([2 + 6 + 6 + 1 + 8 + 8])
        assert found.makespan_s("microbatch") == pytest.approx([14 + 17])
        assert found.makespan_s("minibatch") == pytest.approx([25])
        assert found.balanced_s == pytest.approx([22])
        assert found.barriers["layer"].waits_s["imbalance_layer"] == pytest.approx([1 + 3 + 0 + 6])
        assert found.barriers["layer"].waits_s["imbalance_microbatch"] == pytest.approx([2 + 6])
        assert found.barriers["microbatch"].waits_s == {"imbalance_microbatch": pytest.approx([6 + 12])}
        assert found.barriers["minibatch"].waits_s == {"imbalance_minibatch": pytest.approx([6])}
        ceilings = found.ceilings()
        assert ceilings["placement"].value == pytest.approx(31 / 25)
        assert ceilings["balanced"].value == pytest.approx(31 / 22)
        assert ceilings["placement_recorded"].value == pytest.approx(1.0)

    def test_the_slowest_ranks_optimizer_follows_in_every_replay(self):
        found = replay(by_hand(optimizer_s=4.0))
        assert [float(found.makespan_s(b)[0]) for b in BARRIERS] == pytest.approx([35, 35, 29])
        assert found.balanced_s == pytest.approx([26])
        assert found.ceilings()["placement"].value == pytest.approx(35 / 29)

    def test_head_spans_belong_before_the_backward_however_many_they_are(self):
        one = [Span(0, "compute", k, "", u, 0, s, s + 1.0) for s, (k, u) in enumerate(ORDER)]
        two = [Span(1, "compute", k, "", u, 0, s, s + 1.0) for s, (k, u) in enumerate(ORDER[:2] + ORDER[3:])]
        found = replay(Timeline.from_spans([(0, one + two)]))  # rank 1's head came in one piece instead of two
        assert found.makespan_s("layer") == pytest.approx([1 + 3 + 2])

    def test_unequal_counts_hang_at_layers_only(self):
        spans = [*spans_of(0, *RANK_0[0], *RANK_0[1]), *spans_of(1, *RANK_1[0])]
        found = replay(Timeline.from_spans([(7, spans)]))
        assert found.barriers["layer"] == (
            "hangs: rank 0 runs 2 microbatches, rank 1 runs 1 in minibatch 7 (counts differ in 1 of 1 minibatches)"
        )
        assert found.makespan_s("layer") is None
        assert found.makespan_s("microbatch") == pytest.approx([14 + 17])
        assert found.makespan_s("minibatch") == pytest.approx([25])
        assert set(found.ceilings()) == {"placement_recorded", "balanced_recorded"}
        assert found.as_dict()["barriers"]["layer"]["verdict"].startswith("hangs")

    def test_an_empty_microbatch_shows_in_its_transfers(self):
        """A padded microbatch computes nothing, but its rank joins the gathers."""
        spans = [*spans_of(0, *RANK_0[0], *RANK_0[1]), *spans_of(1, *RANK_1[0])]
        spans.append(Span(1, "unshard", "unshard", "", 1, 1, 14.0, 15.0))
        found = replay(Timeline.from_spans([(0, spans)]))
        assert found.makespan_s("layer") == pytest.approx([2 + 6 + 6 + 1 + 8 + 8])

    def test_spans_that_were_lost_are_counted(self):
        timeline = by_hand()
        lost = np.flatnonzero((timeline.kind == "forward") & (timeline.unit == 0))[0]
        columns = {name: np.delete(getattr(timeline, name), lost) for name in Timeline.__dataclass_fields__}
        found = replay(Timeline.from_columns(columns))
        assert found.notes[0] == "1 of 12 units in microbatches have no span: taken as 0 s"
        assert found.busy_s == pytest.approx([43.0])

    def test_a_job_that_layer_barriers_would_slow_down_is_noted(self):
        """Rank 0 is late at the embedding, rank 1 at the layer: at layer barriers both wait."""
        spans = [
            *spans_of(0, ("forward", 0, 0, 3.0), ("forward", 1, 0, 1.0)),
            *spans_of(1, ("forward", 0, 0, 1.0), ("forward", 1, 0, 3.0)),
        ]
        found = replay(Timeline.from_spans([(0, spans)]))
        assert found.makespan_s("layer") == pytest.approx([6.0])
        assert found.notes == (
            "layer barriers would take 50 % longer than the job did, so it was not held at each: "
            "trust the ceilings over the recording",
        )

    def test_rates_are_ratios_of_sums(self):
        short = spans_of(0, *RANK_0[0]) + spans_of(1, *RANK_1[0])
        long = by_hand().spans(0)
        found = replay(Timeline.from_spans([(0, short), (1, long)]))
        assert found.makespan_s("layer") == pytest.approx([14, 31])
        assert found.makespan_s("minibatch") == pytest.approx([14, 25])
        assert found.ceilings()["placement"].value == pytest.approx(45 / 39)
        low, high = found.ceilings()["placement"].low, found.ceilings()["placement"].high
        assert low == pytest.approx(1.0)
        assert high == pytest.approx(31 / 25)


ORDER = [("forward", 0), ("forward", 1), ("head_loss", 0), ("head_loss", 0), ("backward", 1), ("backward", 0)]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    barrier=st.sampled_from(BARRIERS),
    ranks=st.integers(1, 4),
    layers=st.integers(0, 4),
    microbatches=st.integers(1, 3),
    recorded=st.sampled_from(BARRIERS),
)
def test_replays_of_simulated_timelines_are_the_engines_own(seed, barrier, ranks, layers, microbatches, recorded):
    """Recorded with ranks meeting at `recorded`, replayed at `barrier`: exactly what the engine simulates there, to
    rounding."""
    durations = random_durations(
        np.random.default_rng(seed),
        equal_counts="layer" in (barrier, recorded),
        ranks=ranks,
        layers=layers,
        microbatches=microbatches,
        host=False,
        zeros=False,
    )
    nothing = np.zeros(layers + 1)
    free = ("gather_s", "reduce_s", "copy_in_s", "copy_out_s", "pack_s", "add_s", "hold_s")
    durations = replace(durations, **dict.fromkeys(free, nothing))
    makespan_s, spans = play(durations, make_schedule("odc", barrier=recorded), 0)
    found = replay(Timeline.from_spans([(0, spans)]))
    assert found.recorded_s[0] == pytest.approx(makespan_s, rel=1e-12)
    expected = run_event(durations, make_schedule("odc", barrier=barrier))
    assert found.makespan_s(barrier)[0] == pytest.approx(expected.makespan_s[0], rel=1e-12)
    assert found.busy_s[0] == pytest.approx(durations.busy_s.sum(), rel=1e-12)
    idle = dict(zip(CAUSES, expected.idle_s.sum(axis=(0, 1)), strict=True))
    for cause in ("imbalance_layer", "imbalance_microbatch", "imbalance_minibatch"):
        waited_s = found.barriers[barrier].waits_s.get(cause, np.zeros(1))[0]
        assert waited_s == pytest.approx(idle[cause], abs=1e-9 * makespan_s)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), ranks=st.integers(1, 5), microbatches=st.integers(1, 4))
def test_fewer_barriers_never_take_longer_and_balance_is_the_floor(seed, ranks, microbatches):
    durations = random_durations(
        np.random.default_rng(seed), equal_counts=True, ranks=ranks, layers=3, microbatches=microbatches, host=True,
        zeros=False,
    )  # fmt: skip
    makespan_s, spans = play(durations, make_schedule("collective"), 0)
    found = replay(Timeline.from_spans([(0, spans)]))
    layer, *rest = (float(found.makespan_s(barrier)[0]) for barrier in BARRIERS)
    # not the recording itself against layer barriers: FSDP's prefetch lets a rank lead by a unit or two
    for start_s in (makespan_s, layer):
        times = [start_s, *rest, float(found.balanced_s[0])]
        assert all(a >= b * (1 - 1e-12) for a, b in pairwise(times))
    for barrier in BARRIERS:
        waits_s = sum(float(waits_s[0]) for waits_s in found.barriers[barrier].waits_s.values())
        makespan = float(found.makespan_s(barrier)[0]) - float(found.tail_s[0])
        assert found.busy_s[0] + waits_s == pytest.approx(ranks * makespan, rel=1e-9)


def test_equal_ranks_leave_nothing_to_gain():
    durations = make_durations(np.full((2, 4, 3), 1.0), np.full((2, 4, 3), 2.0))
    _, spans = play(durations, make_schedule("collective"), 0)
    ceilings = replay(Timeline.from_spans([(0, spans)])).ceilings()
    assert {name: found.value for name, found in ceilings.items()} == pytest.approx(dict.fromkeys(ceilings, 1.0))


class TestRefused:
    @pytest.mark.parametrize(
        ("spans", "message"),
        [
            ([Span(0, "unshard", "unshard", "", 1, 0, 0.0, 1.0)], "t: no compute spans, expected some of kind forward"),
            ([Span(0, "compute", "forward", "", 1, 0, 1.0, 1.0)], "t: every compute span takes 0 s"),
            ([Span(0, "compute", "forward", "", -1, 0, 0.0, 1.0)], "t: row 0: forward with unit -1, expected the unit"),
            ([Span(0, "compute", "backward", "", 1, -1, 0.0, 1.0)], "t: row 0: backward with microbatch -1, expected"),
            (
                [*spans_of(0, ("forward", 1, 0, 1.0)), *spans_of(0, ("forward", 1, 2, 1.0), start_s=1.0)],
                "t: rank 0 runs microbatch 2 but not 1 in minibatch 0, expected microbatches numbered from 0",
            ),
            (
                [*spans_of(0, ("forward", 1, 0, 1.0), ("forward", 2, 0, 1.0)), *spans_of(3, ("forward", 1, 0, 1.0))],
                "t: rank 3 has no forward of unit 2 although rank 0 has, expected the same units on every rank",
            ),
            (
                [*spans_of(0, ("forward", 1, 0, 1.0)), *spans_of(1, ("forward", 1, 0, 1.0), ("head_loss", 0, 0, 1.0))],
                "t: rank 0 has no head_loss although rank 1 has, expected the same units on every rank",
            ),
            (
                spans_of(0, ("forward", 1, 0, 1.0), ("forward", 2_000_000_000, 0, 1.0)),
                "t: layer 2 has no compute span although layer 2000000000 has, expected all",
            ),
        ],
    )
    def test_in_one_line(self, spans, message):
        with pytest.raises(InputError) as error:
            replay(Timeline.from_spans([(0, spans)]), "t")
        assert message in str(error.value)
        assert "\n" not in str(error.value)

    def test_a_rank_that_is_missing_in_a_minibatch(self):
        spans = by_hand().spans(0)
        with pytest.raises(InputError, match="rank 1 has no spans in minibatch 5, expected every rank in each"):
            replay(Timeline.from_spans([(0, spans), (5, [s for s in spans if s.rank == 0])]), "t")


class TestFiles:
    def frame(self):
        timeline = by_hand()
        return pd.DataFrame({name: getattr(timeline, name) for name in Timeline.__dataclass_fields__})

    def test_own_files(self, tmp_path):
        by_hand().write_parquet(tmp_path / "t.parquet", "odc")
        assert replay(read_measured(tmp_path / "t.parquet")).as_dict() == replay(by_hand()).as_dict()

    def test_other_tools_files(self, tmp_path):
        """No metadata, 64-bit numbers, no cause, another column, times from any zero."""
        frame = self.frame().drop(columns="cause").assign(host="gpu7")
        frame[["start_s", "end_s"]] += 1000.0
        frame["rank"] = frame["rank"].astype("int64")
        frame.to_parquet(tmp_path / "t.parquet")
        frame.to_csv(tmp_path / "t.csv", index=False)
        expected = json.dumps(replay(by_hand()).as_dict()["barriers"])
        for name in ("t.parquet", "t.csv"):
            found = replay(read_measured(tmp_path / name)).as_dict()["barriers"]
            assert found["layer"]["makespan_s"] == pytest.approx(json.loads(expected)["layer"]["makespan_s"])

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda f: f.drop(columns="unit"), "column 'unit' is missing, expected minibatch, rank, stream"),
            (lambda f: f.assign(rank="a"), "column 'rank': got "),
            (lambda f: f.assign(rank=0.5), "column 'rank': row 0 is 0.5, expected a whole number"),
            (lambda f: f.assign(end_s=np.nan), "column 'end_s': row 0 is nan, expected seconds"),
            (lambda f: f.assign(kind="fwd"), "column 'kind': row 0 is 'fwd', expected one of forward, backward"),
            (lambda f: f.assign(stream=None), "column 'stream': "),
            (lambda f: f.assign(start_s=0.0), "overlap on the compute stream of rank 0 in minibatch 0"),
        ],
    )
    @pytest.mark.parametrize("suffix", ["parquet", "csv"])
    def test_mistakes_in_one_line(self, tmp_path, change, message, suffix):
        path = tmp_path / f"t.{suffix}"
        frame = change(self.frame())
        if suffix == "csv":
            frame.to_csv(path, index=False)
        else:
            frame.to_parquet(path)
        with pytest.raises(InputError) as error:
            read_measured(path)
        assert str(error.value).startswith(f"{path}: ")
        assert message in str(error.value)
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize("name", ["none.parquet", "none.csv", "text.parquet", "empty.csv", "."])
    def test_no_such_file(self, tmp_path, name):
        (tmp_path / "text.parquet").write_text("no")
        (tmp_path / "empty.csv").write_text("")
        with pytest.raises(InputError, match=r"no such file|not a Parquet file|not a CSV table|is a directory"):
            read_measured(tmp_path / name)


class TestCommand:
    @pytest.fixture
    def odc(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        by_hand(optimizer_s=4.0).write_parquet(tmp_path / "t.parquet", "odc")
        return lambda *arguments: CliRunner().invoke(app, ["replay", *arguments])

    def test_prints_a_table_its_assumptions_and_the_ceilings(self, odc, tmp_path):
        result = odc("t.parquet", "--out", "out")
        assert result.exit_code == 0, result.output
        assert "t.parquet: 1 minibatch of 2 ranks, 1 layers" in result.stdout
        for name in ("as recorded", "every layer", "every microbatch", "every minibatch", "perfectly balanced"):
            assert name in result.stdout
        assert "assumes: durations stay as recorded" in result.stdout
        assert "ODC gives at most 1.21x over layer barriers; perfectly balanced as well, 1.35x" in result.stdout
        assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["replay.json", "replay.png"]

    def test_json(self, odc):
        data = json.loads(odc("t.parquet", "--json").stdout)
        assert data["schema_version"] == 1
        assert data["barriers"]["minibatch"]["makespan_s"] == pytest.approx(29.0)
        assert data["ceilings"]["placement"]["speedup"] == pytest.approx(35 / 29)
        assert data["optimizer_and_publish_s"] == pytest.approx(4.0)
        assert len(data["assumptions"]) == 3

    def test_hanging_is_an_answer(self, odc, tmp_path):
        spans = [*spans_of(0, *RANK_0[0], *RANK_0[1]), *spans_of(1, *RANK_1[0])]
        Timeline.from_spans([(0, spans)]).write_parquet(tmp_path / "ragged.parquet", "odc")
        result = odc("ragged.parquet", "--out", "out")
        assert result.exit_code == 0, result.output
        assert (
            "every layer            hangs: rank 0 runs 2 microbatches, rank 1 runs 1 in minibatch 0\n" in result.stdout
        )
        assert "over the job as recorded" in result.stdout
        assert "over layer barriers" not in result.stdout

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [(["none.parquet"], "error: none.parquet: no such file"), (["t.parquet", "--out", "t.parquet"], "is a file")],
    )
    def test_mistakes(self, odc, arguments, message):
        result = odc(*arguments)
        assert result.exit_code == 2
        assert message in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1


def test_the_simulators_own_idle_breakdown_is_read_back():
    rng = np.random.default_rng(3)
    durations = random_durations(rng, equal_counts=True, ranks=3, layers=3, microbatches=2, host=True, zeros=False)
    schedule = make_schedule("collective")
    makespan_s, spans = play(durations, schedule, 0)
    found = replay(Timeline.from_spans([(0, spans)]))
    idle = dict(zip(CAUSES, run_event(durations, schedule).idle_s.sum(axis=(0, 1)), strict=True))
    assert found.recorded_waits_s == pytest.approx({cause: s for cause, s in idle.items() if s > 0.0})
    waits_s = sum(found.recorded_waits_s.values())
    assert found.busy_s[0] + waits_s == pytest.approx(found.ranks * makespan_s)
    assert found.as_dict()["recorded"]["idle_rate"] == pytest.approx(waits_s / (3 * makespan_s))
