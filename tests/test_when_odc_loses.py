"""What docs/when-odc-loses.md says, held with few minibatches, and that its sweeps and its CSV files still fit the
code."""

import csv
from pathlib import Path

import pytest

from odc_sim import Study, simulate
from odc_sim.hardware import load_cluster
from odc_sim.sweep_file import load_sweep

REPORT = Path(__file__).parent.parent / "reports" / "when-odc-loses"
EQUAL = str(REPORT / "equal-lengths.toml")
BOTH = {"policy": ("lb-micro", "lb-mini"), "schedule": ("collective", "collective-deferred", "odc")}


def run(**fields):
    return simulate(Study(**{"minibatches": 10, **BOTH, **fields}))


@pytest.mark.parametrize("scale", [0.125, 0.25])
def test_over_several_nodes_the_network_decides_whether_odc_wins(scale):
    networks = ("cloud-100g", str(REPORT / "a100-400g.toml"), "a100-nvswitch-roce", str(REPORT / "a100-3200g.toml"))
    gains = [
        run(model="qwen2.5-7b", devices=16, scale=scale, hardware=network).row("odc", "lb-mini").speedup
        for network in networks
    ]
    assert gains == sorted(gains)
    assert gains[0] < 0.5
    assert gains[-1] > 1.1


def test_microbatches_far_beyond_the_closed_form_hide_the_network():
    """G (1 - 1 / N) F / B tokens: 9.0K here, against a cap of 4K and of 64K."""
    cluster = load_cluster("a100-nvswitch-roce")
    tokens = 8 * 0.5 * cluster.efficiency.linear * cluster.device.peak_flops / cluster.inter.node_bytes_per_s
    assert tokens == pytest.approx(9.0e3, rel=0.01)
    short, long = (run(model="qwen2.5-7b", devices=16, scale=scale).row("odc", "lb-mini") for scale in (1 / 16, 1.0))
    assert short.max_tokens < 0.5 * tokens < tokens < long.max_tokens
    assert short.speedup < 1.0 < 1.2 < long.speedup


def test_short_equal_lengths_are_for_deferred_transfers():
    results = run(workload=EQUAL, scale=1 / 64, hardware="h100-ib")
    deferred, odc = (results.row(schedule, "lb-micro") for schedule in ("collective-deferred", "odc"))
    assert deferred.fits
    assert deferred.speedup > 1.1 * odc.speedup > 1.1


def test_equal_long_lengths_leave_nothing_to_win():
    for row in run(workload=EQUAL, scale=0.25, minibatches=2).rows:
        assert row.speedup == pytest.approx(1.0, abs=0.01)


def test_one_long_sample_rules_a_heavy_tail():
    results = run(workload="deepseek-r1", model="qwen2.5-7b", devices=32)
    assert results.bounds["largest_sample"] > 2.0 * results.bounds["balanced_share"]
    best = {
        schedule: max(row.speedup for row in results.rows if row.schedule == schedule) for schedule in BOTH["schedule"]
    }
    assert best["odc"] < best["collective"] <= results.bounds["speedup"]


@pytest.mark.parametrize(
    "path", sorted(p for p in REPORT.glob("*.toml") if (REPORT / p.stem).is_dir()), ids=lambda p: p.stem
)
def test_every_sweep_file_makes_the_points_of_its_csv(path):
    points = load_sweep(path).points()
    with (REPORT / path.stem / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert all(point.study for point in points)
    assert len({row["point"] for row in rows}) == len(points)


def test_the_committed_rows_are_what_the_simulator_says():
    with (REPORT / "length" / "sweep.csv").open() as file:
        wanted = [row for row in csv.DictReader(file) if (row["nodes"], row["longest_sample"]) == ("A100 800G", "8")]
    now = run(model="qwen2.5-7b", devices=16, scale=0.125, minibatches=100)
    for schedule, policy in (("odc", "lb-mini"), ("odc", "lb-micro"), ("collective-deferred", "lb-mini")):
        row = next(row for row in wanted if (row["schedule"], row["policy"]) == (schedule, policy))
        assert now.row(schedule, policy).speedup == pytest.approx(float(row["speedup"]), abs=0.005)
        assert_memory(now.row(schedule, policy), row)


def assert_memory(now, row):
    assert now.peak_memory_bytes["total"] == pytest.approx(float(row["peak_memory_bytes_total"]), rel=0.005)
    assert str(now.fits) == row["fits"]
    assert now.largest_max_tokens == pytest.approx(float(row["largest_max_tokens"]), rel=0.005)


@pytest.mark.parametrize(("size", "policy"), [("1", "lb-mini"), ("8", "lb-micro")])
def test_whether_deferred_transfers_fit_is_committed_as_the_simulator_says(size, policy):
    with (REPORT / "minibatch" / "sweep.csv").open() as file:
        row = next(
            row
            for row in csv.DictReader(file)
            if tuple(row[k] for k in ("workload", "minibatch_size", "schedule", "policy"))
            == ("longalign", size, "collective-deferred", policy)
        )
    now = run(model="qwen2.5-7b", devices=32, minibatch_size=int(size), minibatches=int(row["minibatches"]))
    assert_memory(now.row("collective-deferred", policy), row)


def test_the_committed_rows_of_the_event_engine_are_what_it_says_and_the_fast_engine_nearly():
    with (REPORT / "engines-one-node" / "sweep.csv").open() as file:
        wanted = next(
            row
            for row in csv.DictReader(file)
            if tuple(row[k] for k in ("engine", "workload", "longest_sample", "schedule", "policy"))
            == ("event", "longalign", "1", "odc", "lb-mini")
        )
    event, fast = (
        run(scale=1 / 64, hardware="h100-ib", minibatches=3, engine=engine).row("odc", "lb-mini").speedup
        for engine in ("event", "fast")
    )
    assert event == pytest.approx(float(wanted["speedup"]), abs=0.005)
    assert event == pytest.approx(fast, rel=0.03)
