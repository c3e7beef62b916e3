"""Definitions that a run must keep to, each at a place where a plausible slip would leave most answers as they were."""

import json
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from builders import make_row

from odc_sim import Study, plan, shard, simulate
from odc_sim.advice import advise, advised_row
from odc_sim.api import run_study
from odc_sim.costs import ComputeCosts, UnitCost
from odc_sim.errors import InputError
from odc_sim.execution import Executed, Load, build_durations
from odc_sim.hardware import Overlap, Slowdown, hardware_text, load_cluster
from odc_sim.inputs import BOOTSTRAP_STREAM, LENGTHS_STREAM, SHUFFLE_STREAM
from odc_sim.machine import load_machine
from odc_sim.metrics import speedup
from odc_sim.models import load_model
from odc_sim.plans import write_plan
from odc_sim.results import Rival, read_results
from odc_sim.schedules import make_schedule
from odc_sim.sharding import Strategy
from odc_sim.transfers import transfer_costs

SMALL = Path(__file__).parent / "data" / "calibration-small.json"
JITTER_STREAM = 1


@pytest.fixture(scope="module")
def simulation():
    return run_study(
        Study(minibatches=24, policy=("lb-micro", "lb-mini", "verl-native"), schedule=("collective", "odc"))
    )


class TestIntervals:
    def interval(self, simulation, policy, block):
        base, own = (simulation.executed[key].makespan_s for key in (("collective", "lb-micro"), ("odc", policy)))
        found = speedup(base, own, block, np.random.default_rng([0, BOOTSTRAP_STREAM]))
        return found.low, found.high

    def test_a_policy_that_moves_samples_between_minibatches_is_resampled_in_whole_batches(self, simulation):
        row = simulation.results.row("odc", "verl-native")
        assert row.speedup_ci95 == self.interval(simulation, "verl-native", 4)
        assert row.speedup_ci95 != self.interval(simulation, "verl-native", 1)

    def test_other_policies_by_minibatch(self, simulation):
        assert simulation.results.row("odc", "lb-mini").speedup_ci95 == self.interval(simulation, "lb-mini", 1)


class TestBounds:
    def bounds(self, **fields):
        return simulate(Study(minibatches=4, policy=("lb-micro",), schedule=("collective",), **fields)).bounds

    def test_they_count_the_speed_of_each_device(self):
        equal, mixed = self.bounds(), self.bounds(device_speed=(2.0, *[1.0] * 7))
        assert mixed["balanced_share"] == pytest.approx(equal["balanced_share"] * 8 / 9)
        assert mixed["largest_sample"] == pytest.approx(equal["largest_sample"] / 2)  # on the fastest device
        slow = self.bounds(device_speed=(0.5,) * 8)
        assert slow["lower_bound"] == pytest.approx(equal["lower_bound"] * 2)

    def test_nothing_beats_them_on_unequal_devices(self):
        results = simulate(Study(minibatches=4, policy=("lb-micro", "lb-mini"), device_speed=(2.0, *[1.0] * 7)))
        for row in (row for row in results.rows if row.runs):
            assert row.makespan_s["mean"] >= results.bounds["lower_bound"] * (1 - 1e-9)


def test_the_recipe_moves_memory():
    study = Study(minibatches=2, policy=("lb-micro",), schedule=("collective", "collective-deferred"))
    paper, mixed = simulate(study), simulate(study.model_copy(update={"recipe": "mixed"}))
    for schedule in ("collective", "collective-deferred"):
        one, other = (results.row(schedule, "lb-micro").peak_memory_bytes for results in (paper, mixed))
        assert other["parameters"] == pytest.approx(one["parameters"] / 2, abs=1)
        assert other["optimizer"] == pytest.approx(one["optimizer"] * 3 / 2, abs=1)
    # Deferred, gradients are not sharded at the peak: 4 + 8 bytes a parameter against 2 + 12.
    one, other = (results.row("collective-deferred", "lb-micro") for results in (paper, mixed))
    assert other.peak_memory_bytes["total"] > one.peak_memory_bytes["total"]
    assert other.largest_max_tokens < one.largest_max_tokens


def test_host_time_is_no_bubble(tmp_path):
    text = hardware_text("a100-nvswitch-roce")
    assert "[host]" not in text
    (tmp_path / "ahead.toml").write_text(text)
    slow = "\n[host]\nseconds_per_unit_forward = 0.5\nseconds_per_unit_backward = 0.5\n"
    (tmp_path / "slow.toml").write_text(text + slow)
    ahead, slow = (
        simulate(Study(minibatches=3, policy=("lb-micro",), hardware=str(tmp_path / f"{name}.toml")))
        for name in ("ahead", "slow")
    )
    for one, other in zip(ahead.rows, slow.rows, strict=True):
        assert other.idle_rate > one.idle_rate + 0.1
        assert other.bubble_rate == one.bubble_rate


class TestJitter:
    def test_it_leaves_the_lengths_alone(self):
        quiet, noisy = (plan(Study(minibatches=4, jitter=jitter, seed=5)) for jitter in (0.0, 0.3))
        assert quiet.lengths.tolist() == noisy.lengths.tolist()
        assert quiet.sample_ids.tolist() == noisy.sample_ids.tolist()

    def test_it_has_a_stream_of_its_own(self):
        made = plan(Study(minibatches=4))
        found = np.log(Load.of(made, jitter=0.3, seed=5).speed)

        def drawn(stream):
            noise = np.random.default_rng([5, stream]).standard_normal(found.shape)
            return -0.3 * noise + 0.5 * 0.3**2

        assert found == pytest.approx(drawn(JITTER_STREAM))
        for other in (LENGTHS_STREAM, SHUFFLE_STREAM, BOOTSTRAP_STREAM):
            assert other != JITTER_STREAM
            assert not np.allclose(found, drawn(other))

    def test_the_seed_of_the_study_decides_it(self, tmp_path):
        write_plan(plan(Study(minibatches=4)), tmp_path / "plan.json", "test")
        one, other = (
            simulate(Study(plan=tmp_path / "plan.json", jitter=0.1, seed=seed)).row("odc", "lb-mini").makespan_s
            for seed in (1, 2)
        )
        assert one != other


class TestReduction:
    """Two layers on four ranks; rank 0 has two microbatches, rank 1 three."""

    LAYERS = 2
    COUNTS = ((2, 3, 2, 2),)

    def built(self, schedule, copy_out=1.0, copies=(1.0, 1.0), **reduce):
        model = replace(load_model("qwen2.5-1.5b"), layers=self.LAYERS)
        cluster = load_cluster("generic")
        beside_copies = {"copy_in": copies[0], "add": copies[1]}
        slow = Overlap(
            unshard=Slowdown(), reduce=Slowdown(**reduce), source="a test", copy_out=copy_out, **beside_copies
        )
        cluster = replace(cluster, overlap={"collective": slow, "odc": slow})
        unit = UnitCost(c1_s_per_token=1e-5)
        parts = (f"{name}_{way}" for name in ("embedding", "layer", "head") for way in ("forward", "backward"))
        compute = ComputeCosts(
            layers=self.LAYERS, provenance="analytic", valid_tokens=None, source="", **dict.fromkeys(parts, unit)
        )
        counts = np.array(self.COUNTS)
        exists = np.arange(3)[None, :, None] < counts[:, None, :]
        tokens = np.where(exists, 1000.0, 0.0)
        load = Load(counts=counts, tokens=tokens, squares=tokens**2, speed=np.ones_like(tokens))
        rules = make_schedule(schedule)
        costs = transfer_costs(model, cluster, world_size=4, one_sided=rules.one_sided, gather_dtype="bf16")
        return build_durations(load, compute, costs, cluster, rules), exists

    def test_a_copy_beside_it_goes_slower_while_it_lasts(self):
        assert self.built("odc")[0].copy_out_stretch == 1.0
        durations, _ = self.built("odc", copy_out=3.0)
        copy_s, reduce_s = durations.copy_out_s[1], durations.reduce_s[1]
        # the reduction outlasts the copy, or ends before it has gone on for a third of its bytes
        expected = 3.0 if reduce_s >= 3.0 * copy_s else 1 + 2 / 3 * reduce_s / copy_s
        assert durations.copy_out_stretch == pytest.approx(expected)
        assert durations.copy_out_stretch > 1.0

    def test_the_host_begins_the_next_minibatch_while_the_device_is_at_the_optimizer(self):
        durations, _ = self.built("odc")
        assert durations.host_lead_s == durations.optimizer_s + durations.publish_s > 0

    @pytest.mark.parametrize("schedule", ["collective", "odc", "collective-deferred", "odc-local-sum"])
    def test_copies_on_other_streams_slow_compute_where_they_run(self, schedule):
        plain, exists = self.built(schedule)
        durations, _ = self.built(schedule, copies=(2.0, 4.0))
        index = np.arange(3)[None, :, None]
        unshards = exists & (index == 0) if schedule == "collective-deferred" else exists
        again = (exists & (index > 0)) * (schedule == "collective")  # one-sided, a push adds
        copy_in_s, add_s = 0.5 * durations.copy_in_s[1], 0.75 * durations.add_s[1]
        lost_s = durations.forward_s[:, :, 1] - plain.forward_s[:, :, 1]
        assert lost_s == pytest.approx(copy_in_s * unshards)
        lost_s = durations.backward_s[:, :, 1] - plain.backward_s[:, :, 1]
        assert lost_s == pytest.approx(copy_in_s * unshards * (schedule != "collective-deferred") + add_s * again)
        assert (add_s > 0) == (not make_schedule(schedule).one_sided)

    def test_it_slows_the_compute_beside_it(self):
        durations, exists = self.built("odc", compute=2.0)
        gather_s, reduce_s, alone_s = durations.gather_s[1], durations.reduce_s[1], 1e-2
        # While both run the layer goes at half speed: it loses half of the time the reduction takes, in what the gather
        # leaves of the layer.
        free_s = alone_s - gather_s
        assert 0 < reduce_s < 2 * free_s
        slowed_s = alone_s + 0.5 * reduce_s
        assert durations.backward_s[:, :, 1] == pytest.approx(np.where(exists, slowed_s, 0.0))
        assert durations.forward_s[:, :, 1] == pytest.approx(np.where(exists, alone_s, 0.0))
        lost_s = self.LAYERS * 0.5 * reduce_s * np.array(self.COUNTS)
        assert durations.compute_slowdown_s == pytest.approx(lost_s)

    @pytest.mark.parametrize(
        ("schedule", "reducing"),
        [("collective", "all"), ("odc", "all"), ("collective-deferred", "last"), ("odc-local-sum", "none")],
    )
    def test_it_slows_and_is_slowed_in_the_microbatches_that_reduce(self, schedule, reducing):
        durations, exists = self.built(schedule, compute=2.0, transfer=3.0)
        last = np.arange(3)[None, :, None] == np.array(self.COUNTS)[:, None, :] - 1
        expected = {"all": exists, "last": last, "none": np.zeros_like(exists)}[reducing]
        assert ((durations.reduce_stretch > 1.0) == expected).all()
        assert ((durations.backward_s[:, :, 1] > 1e-2 + 1e-9) == expected).all()


def test_flagged_measurements_say_nothing_about_slowdowns(tmp_path):
    data = json.loads(SMALL.read_text())
    rows = [row for row in data["transfers"] if row["op"] == "gather" and row["bytes"] > 1 << 20]
    sane = rows[0] | {"overlapped_p50_s": 1.5 * rows[0]["p50_s"], "slowdown_compute": 1.25, "flagged": False}
    wild = rows[0] | {"overlapped_p50_s": 40 * rows[0]["p50_s"], "slowdown_compute": 9.0, "flagged": True}
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(data | {"transfers": [sane, wild, wild, wild]}))
    found = load_machine(str(path)).cluster.overlap["odc"].unshard
    assert (found.transfer, found.compute) == pytest.approx((1.5, 1.25))


def test_whole_batch_policies_see_as_many_minibatches_as_the_study_says():
    one, four = (plan(Study(minibatches=8, policy=("verl-native",), batch_minibatches=batch)) for batch in (1, 4))
    by_minibatch = [
        [sorted(i for rank in ranks for ids in rank for i in ids) for ranks in made.nested()] for made in (one, four)
    ]
    drawn = [list(range(32 * b, 32 * b + 32)) for b in range(8)]
    assert by_minibatch[0] == drawn  # alone, a minibatch keeps its samples
    assert by_minibatch[1] != drawn
    for first in (0, 4):
        assert sorted(chain(*by_minibatch[1][first : first + 4])) == list(chain(*drawn[first : first + 4]))


class TestTypicalMinibatch:
    def typical(self, simulation, base_s, own_s, own_busy):
        def run(makespan_s, busy):
            makespan_s = np.array(makespan_s)
            none = np.zeros_like(makespan_s)
            return Executed(
                makespan_s=makespan_s,
                busy_s=8 * makespan_s * np.array(busy),
                idle_s=none[:, None],
                bubble_makespan_s=none,
                bubble_busy_s=none,
                inter_node_bytes=none,
            )

        runs = {("collective", "lb-micro"): run(base_s, 0.5), ("odc", "lb-mini"): run(own_s, own_busy)}
        return replace(simulation, executed=runs).typical_minibatch("odc", "lb-mini")

    def test_it_has_the_speedup_of_all(self, simulation):
        assert self.typical(simulation, [3.0, 1.0, 2.0], [1.0, 1.0, 1.0], 0.5) == 2
        assert self.typical(simulation, [3.0, 2.0, 1.0], [1.0, 1.0, 1.0], 0.5) == 1

    def test_and_their_idle_rate(self, simulation):
        assert self.typical(simulation, [2.0, 2.0, 2.0], [1.0, 1.0, 1.0], [0.9, 0.5, 0.7]) == 2


class TestAdvice:
    BASE = make_row("collective", "lb-micro", speedup=1.0)

    def rows(self, behind):
        """odc at +50 %, and collective-deferred, which is simpler, by a fraction `behind` it."""
        return (
            self.BASE,
            make_row("odc", "lb-mini", speedup=1.5),
            make_row("collective-deferred", "lb-mini", speedup=1.5 * (1 - behind)),
        )

    def test_stock_fsdp2_less_than_two_percent_behind_is_chosen(self):
        rows = self.rows(0.008)
        assert advised_row(rows, self.BASE) is rows[2]
        assert "Use collective-deferred + lb-mini: 49% more throughput than collective + lb-micro" in advise(
            rows, self.BASE, 2.0, False
        )
        assert "within 2 % of the fastest, odc + lb-mini, and simpler." in advise(rows, self.BASE, 2.0, False)
        assert advised_row(self.rows(0.019), self.BASE).schedule == "collective-deferred"

    def test_of_stock_rows_the_simpler_within_one_percent(self):
        rows = (*self.rows(0.0), make_row("collective", "cost-rows", speedup=1.49))
        assert advised_row(rows, self.BASE) is rows[3]
        rows = (*self.rows(0.0), make_row("collective", "cost-rows", speedup=1.48))
        assert advised_row(rows, self.BASE) is rows[2]

    def test_what_is_further_behind_is_not(self):
        rows = self.rows(0.021)
        assert advised_row(rows, self.BASE) is rows[1]
        assert advise(rows, self.BASE, 2.0, False).startswith("Use odc + lb-mini: 50% more throughput")

    def test_a_baseline_that_fits_but_runs_by_chance_is_not_said_not_to_fit(self):
        base = replace(make_row("collective", "lb-mini", speedup=1.0), verdict="counts happen to be equal")
        rows = (base, make_row("odc", "lb-mini", speedup=1.1))
        assert "collective + lb-mini, the baseline, runs here only by chance; 10% more" in advise(
            rows, base, 2.0, False
        )
        heavy = replace(base, fits=False)
        assert "the baseline, does not fit the device's memory; 10% more" in advise((heavy, rows[1]), heavy, 2.0, False)

    @pytest.mark.parametrize(
        ("shorter", "ratio", "binds"), [(1.0, 1.0, False), (0.93, 1.04, False), (0.9, 1.06, True), (0.5, 1.38, True)]
    )
    def test_the_longest_sample_is_named_where_it_alone_costs_five_percent(self, tmp_path, shorter, ratio, binds):
        path = tmp_path / "pair.txt"
        path.write_text(f"10000\n{int(10_000 * shorter)}\n")  # both in every minibatch, one for each device
        study = Study(lengths=path, devices=2, minibatch_size=1, minibatches=3, policy=("lb-micro",))
        results = simulate(study)
        found = results.bounds["lower_bound"] / results.bounds["balanced_share"]
        assert found == pytest.approx(ratio, abs=0.008)
        assert ("The longest sample of a minibatch alone caps any policy" in results.advice) == binds


class TestMemory:
    """Advice keeps to what leaves the allocator some room, if anything does, and says what does not."""

    BASE = replace(make_row("collective", "lb-micro", speedup=1.0), memory_share=0.5)

    def row(self, speedup, share, schedule="odc"):
        return replace(make_row(schedule, "lb-mini", speedup=speedup), memory_share=share)

    def told(self, *rows):
        return advise((self.BASE, *rows), self.BASE, 2.0, False)

    def test_what_hardly_fits_is_told_but_not_advised(self):
        full = self.row(1.25, 0.951)
        assert advised_row((self.BASE, full), self.BASE) is self.BASE
        assert self.told(full) == (
            "Keep collective + lb-micro: nothing that fits gains 2% here. odc + lb-mini reaches +25%, but takes 95% of "
            "a device's memory, too much to count on."
        )
        assert "reaches +25%" not in self.told(full, self.row(1.24, 0.8, "collective-deferred"))

    def test_what_is_tight_is_said_to_be(self):
        assert "It takes 95% of a device's memory." in self.told(self.row(1.25, 0.949))
        assert "It takes" not in self.told(self.row(1.25, 0.89))

    def test_where_nothing_fits_better_it_is_advised(self):
        base = replace(self.BASE, memory_share=0.99)
        row = self.row(1.25, 0.98)
        assert advised_row((base, row), base) is row
        assert advise((base, row), base, 2.0, False).startswith("Use odc + lb-mini: 25% more throughput")

    def test_results_know_the_share(self):
        row = simulate(Study(minibatches=3, policy=("lb-micro",))).row("odc", "lb-micro")
        assert row.memory_share == pytest.approx(row.peak_memory_bytes["total"] / (80 << 30))


class TestAnOdcBaseline:
    def test_stock_rows_as_fast_as_it_come_first(self):
        base = make_row("odc", "lb-mini", speedup=1.0)
        rows = (base, make_row("collective-deferred", "lb-mini", speedup=0.99))
        assert advised_row(rows, base) is rows[1]
        assert advise(rows, base, 2.0, False).startswith(
            "Use collective-deferred + lb-mini: 1% less throughput than odc"
        )
        rows = (base, make_row("collective-deferred", "lb-mini", speedup=0.97))
        assert advised_row(rows, base) is base

    def test_equals_are_said_to_be(self):
        base = make_row("odc", "lb-mini", speedup=1.0)
        rows = (base, make_row("collective", "lb-mini", speedup=1.001))
        assert advise(rows, base, 2.0, False).startswith(
            "Use collective + lb-mini: as much throughput as odc + lb-mini."
        )


class TestRivals:
    """What does without ODC: padding, larger microbatches, ZeRO-1, HSDP."""

    STUDY = Study(workload="longalign", minibatches=20, policy=("lb-micro", "lb-mini"))
    BASE = make_row("collective", "lb-micro", speedup=1.0)
    ODC = make_row("odc", "lb-mini", speedup=1.5)
    LARGER = Rival(
        kind="larger",
        flags="--max-tokens 9",
        schedule="collective",
        policy="lb-mini",
        speedup=1.48,
        peak_memory_bytes=33 * 10**9,
        memory_share=0.5,
        compute="fitted",
    )

    def of(self, results, kind):
        found = [rival for rival in results.rivals if rival.kind == kind]
        return found[0] if found else None

    def told(self, *rivals, rows=None):
        return advise(rows or (self.BASE, self.ODC), self.BASE, 2.0, False, rivals)

    def test_larger_microbatches_are_tried_and_told(self):
        results = simulate(self.STUDY)
        larger = self.of(results, "larger")
        tokens = int(larger.flags.removeprefix("--max-tokens "))
        assert tokens == 2 * results.rows[0].max_tokens  # of those about as fast the smallest
        assert larger.peak_memory_bytes == pytest.approx(larger.memory_share * 85.9e9, rel=1e-3)
        # the same, simulated by itself, in samples over the baseline's at its own max_tokens
        alone = simulate(self.STUDY.model_copy(update={"max_tokens": tokens, "schedule": (larger.schedule,)}))
        row, base = alone.row(larger.schedule, larger.policy), results.row("collective", "lb-micro")
        assert larger.speedup == pytest.approx(row.samples_per_s_per_device / base.samples_per_s_per_device)
        assert larger.speedup > max(row.speedup for row in results.rows if row.usable and "odc" not in row.schedule)
        assert larger.compute == "extrapolated"
        assert results.advice.startswith(
            f"No ODC needed: stock FSDP2 with {larger.flags}, {larger.schedule} + {larger.policy}, reaches "
            f"+{larger.speedup - 1:.0%} in {larger.peak_memory_bytes / 1e9:.0f} GB a device (compute extrapolated), "
            "if microbatches may be that large; "
        )
        assert results.as_dict("test")["rivals"][0]["policy"] == larger.policy

    def test_so_is_what_memory_holds_between_the_multiples(self):
        study = Study(model="qwen2.5-14b", workload="aime-qwen3", devices=8, minibatch_size=2, minibatches=20)
        larger = self.of(simulate(study), "larger")
        tokens = int(larger.flags.removeprefix("--max-tokens "))
        assert 1.25 * 40_960 < tokens < 2 * 40_960
        assert 0.8 < larger.memory_share <= 0.95

    @pytest.mark.parametrize(
        "changes",
        [
            {"schedule": ("collective", "collective-deferred")},  # odc is not advised
            {"overlong": "clip", "max_tokens": 30_000},  # other max_tokens are other lengths
            {"max_tokens": 300_000},  # nothing larger fits
        ],
    )
    def test_larger_microbatches_are_not_tried(self, changes):
        assert self.of(simulate(self.STUDY.model_copy(update=changes)), "larger") is None

    def test_clipping_that_clips_nothing_is_no_reason(self):
        clipped = self.STUDY.model_copy(update={"overlong": "clip", "max_tokens": 65_536})
        assert simulate(clipped).rivals == simulate(self.STUDY).rivals

    def test_padding_is_tried_wherever_it_may_help(self):
        study = self.STUDY.model_copy(
            update={"workload": "mooncake-conversation", "devices": 2, "schedule": ("collective", "odc")}
        )
        results = simulate(study)
        padded = self.of(results, "padded")
        alone = simulate(study.model_copy(update={"pad_microbatches": True})).row("collective", "lb-mini")
        assert padded.speedup == pytest.approx(alone.speedup)
        assert (padded.flags, padded.policy) == ("--pad-microbatches", "lb-mini")
        assert padded.speedup > results.row("collective", "lb-micro").speedup
        assert self.of(simulate(self.STUDY), "padded") is None  # there it is slower than a row of the table
        assert self.of(simulate(study.model_copy(update={"pad_microbatches": True})), "padded") is None

    def test_zero1_is_tried_and_told(self):
        """As odc sharding has it, which has the same baseline."""
        results = simulate(self.STUDY)
        row = shard(Study(workload="longalign", minibatches=20), (Strategy("N", "N", "G"),)).row("NNG", "collective")
        zero1 = self.of(results, "ZeRO-1")
        assert zero1.speedup == pytest.approx(row.speedup)
        assert (zero1.peak_memory_bytes, zero1.fits, zero1.policy) == (row.peak_bytes, True, row.policy)
        assert f"ZeRO-1 (odc sharding), lb-mini, reaches +{row.speedup - 1:.0%} in 28 GB a device" in results.advice
        assert "Of this table use odc + lb-mini: " in results.advice
        large = simulate(self.STUDY.model_copy(update={"model": "qwen2.5-14b", "devices": 16}))
        assert "ZeRO-1 would need 140 GB a device, which does not fit." in large.advice
        assert large.advice.startswith("Use odc + lb-mini: ")
        # how often a study is repeated, and by which engine, is nothing to ZeRO-1
        other = self.STUDY.model_copy(update={"calibration_error": 0.1, "engine": "event", "minibatches": 3})
        plain = self.STUDY.model_copy(update={"minibatches": 3})
        assert self.of(simulate(other), "ZeRO-1") == self.of(simulate(plain), "ZeRO-1")

    def test_hsdp_is_tried_on_several_nodes_whatever_is_advised(self):
        study = Study(
            model="qwen2.5-32b",
            workload="azure-chat",
            hardware="h100-ib",
            devices=16,
            minibatches=10,
            scale=0.125,
            collectives="two-level",
            gather_dtype="fp32",
        )
        results = simulate(study)
        hsdp = self.of(results, "HSDP")
        assert hsdp.speedup > 1.2
        assert results.advice.startswith(
            "Keep collective + lb-micro: nothing in this table gains 2% here. But HSDP (odc sharding), "
            f"{hsdp.policy}, reaches +{hsdp.speedup - 1:.0%} in "
        )
        assert self.of(simulate(self.STUDY), "HSDP") is None  # on one node it is full sharding

    def test_an_odc_baseline_that_is_kept_is_compared_as_well(self):
        advice = simulate(self.STUDY.model_copy(update={"baseline": "odc/lb-mini"})).advice
        assert advice.startswith("No ODC needed: stock FSDP2 with --max-tokens 131072, ")
        assert "ZeRO-1 (odc sharding), lb-mini, reaches +0% in 28 GB a device. Of this table keep odc + lb-" in advice

    def test_without_stock_rows_they_are_told_too(self):
        advice = simulate(self.STUDY.model_copy(update={"schedule": ("odc",), "baseline": "odc/local-sort"})).advice
        assert "stock FSDP2 with --max-tokens 131072, " in advice

    def test_where_they_are_not_tried_the_advice_says_so(self, tmp_path):
        write_plan(plan(self.STUDY, "lb-mini"), tmp_path / "plan.json", "test")
        advice = simulate(Study(plan=tmp_path / "plan.json")).advice
        assert advice.startswith("Use odc + lb-mini: ")
        told = "Larger microbatches, padding and other sharding were not tried"
        assert f"{told}, since a plan is given." in advice
        assert f"{told}." in run_study(self.STUDY, rivals=False).results.advice

    def test_what_falls_short_is_not_said_to_be_enough(self):
        assert self.told(replace(self.LARGER, speedup=1.46)) == (
            "Use odc + lb-mini: 50% more throughput than collective + lb-micro. The best stock FSDP2 among the rows "
            "simulated here is +0%, collective + lb-micro. Without ODC stock FSDP2 with --max-tokens 9, collective + "
            "lb-mini, reaches +46% in 33 GB a device, if microbatches may be that large."
        )
        assert self.told(self.LARGER).startswith(
            "No ODC needed: stock FSDP2 with --max-tokens 9, collective + lb-mini,"
        )

    def test_nor_is_what_hardly_fits_or_does_not(self):
        text = self.told(replace(self.LARGER, memory_share=0.96))
        assert text.startswith("Use odc + lb-mini")
        assert "reaches +48% in 33 GB a device, 96% of it, if" in text
        text = self.told(replace(self.LARGER, kind="HSDP", flags="", memory_share=1.01))
        assert text.endswith("HSDP would need 33 GB a device, which does not fit.")

    def test_stock_rows_are_told_of_what_gains_more(self):
        padded = replace(self.LARGER, kind="padded", flags="--pad-microbatches", speedup=1.04)
        told = "stock FSDP2 with --pad-microbatches, collective + lb-mini, reaches +4% in 33 GB a device"
        assert self.told(padded, rows=(self.BASE,)) == (
            f"Keep collective + lb-micro: nothing in this table gains 2% here. But {told}."
        )
        stock = make_row("collective", "cost-rows", speedup=1.03)
        assert "But" not in self.told(padded, rows=(self.BASE, stock))
        assert self.told(replace(padded, speedup=1.06), rows=(self.BASE, stock)).startswith("Of this table use")

    def test_results_can_be_read_back(self, tmp_path):
        results = simulate(self.STUDY)
        results.write_json(tmp_path / "results.json", "test")
        assert read_results(tmp_path / "results.json").rivals == results.rivals
        data = json.loads((tmp_path / "results.json").read_text())
        data["rivals"][0]["unknown"] = 1
        (tmp_path / "results.json").write_text(json.dumps(data))
        with pytest.raises(InputError, match=r"results\.json: Rival got an unexpected keyword argument 'unknown'"):
            read_results(tmp_path / "results.json")


class TestByChance:
    def test_what_runs_only_by_chance_is_not_said_not_to_fit(self):
        lucky = replace(make_row("collective", "lb-mini", speedup=1.0), verdict="counts happened to be equal")
        assert advise((lucky,), lucky, None, False) == (
            "What fits here runs only by chance, nothing to count on: use --pad-microbatches, or odc."
        )
        padded = replace(TestRivals.LARGER, kind="padded", flags="--pad-microbatches", speedup=1.0)
        assert advise((lucky,), lucky, None, False, [padded]).endswith(
            "But stock FSDP2 with --pad-microbatches, collective + lb-mini, reaches +0% in 33 GB a device."
        )


class TestNothingFits:
    ROW = replace(make_row("collective", "lb-micro", speedup=1.0), fits=False, largest_max_tokens=80_486)

    def told(self, longest, row=ROW):
        return advise((row,), row, None, False, longest_tokens=longest)

    def test_fewer_tokens_help_if_samples_are_that_short(self):
        assert self.told(80_000) == (
            "Nothing fits the device's memory: lower --max-tokens to 80,486 or use more devices."
        )

    def test_else_they_do_not(self):
        assert self.told(100_000) == (
            "Nothing fits the device's memory: the longest sample has 100,000 tokens, and memory holds 80,486 a "
            "microbatch. Use context parallelism, a smaller model or more devices, or --max-tokens 80486 with "
            "--overlong clip or drop."
        )
        assert "use more devices or a smaller model" in self.told(9, replace(self.ROW, largest_max_tokens=None))
