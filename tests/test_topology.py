"""Several nodes: who shares a card, bytes counted and in closed form, when ODC loses, the paper's rows."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from builders import make_durations
from hypothesis import given, settings
from hypothesis import strategies as st

from odc_sim import Study, simulate
from odc_sim.engine_event import run_event
from odc_sim.errors import InputError
from odc_sim.hardware import load_cluster
from odc_sim.models import load_model
from odc_sim.paper import compare, errors, read_published
from odc_sim.schedules import SCHEDULES, make_schedule
from odc_sim.topology import Topology, Traffic, make_topology
from odc_sim.transfers import transfer_costs

REPORT = Path(__file__).parent.parent / "reports" / "paper-longalign"


def traffic(topology, units, gather_bytes, reduce_bytes):
    times = np.full(units, 0.1) * (topology.nodes > 1)
    return Traffic(
        topology=topology,
        gather_bytes=np.full(units, gather_bytes),
        reduce_bytes=np.full(units, reduce_bytes),
        gather_inside_s=np.full(units, 0.05),
        reduce_inside_s=np.full(units, 0.05),
        gather_network_s=times,
        reduce_network_s=times,
    )


@settings(max_examples=80, deadline=None)
@given(
    nodes=st.integers(1, 4),
    group=st.integers(1, 4),
    nics=st.integers(1, 8),
    shard=st.integers(1, 10**9),
    layers=st.integers(1, 3),
    collectives=st.sampled_from(["ring", "two-level"]),
    name=st.sampled_from([s.name for s in SCHEDULES]),
    contention=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_bytes_between_nodes_counted_by_the_event_engine_equal_the_closed_forms(
    nodes, group, nics, shard, layers, collectives, name, contention, seed
):
    """D = nodes * group ranks, G = group, K = shard bytes (gradients twice that)."""
    d, g, n, k = nodes * group, group, nodes, float(shard)
    topology = Topology(world_size=d, group=g, nics_per_node=nics, collectives=collectives)
    schedule = make_schedule(name, port_contention=contention)
    rng = np.random.default_rng(seed)
    counts = np.full(d, 2) if schedule.needs_equal_counts else rng.integers(1, 3, d)
    work = rng.exponential(1.0, (2, layers + 2, d))
    durations = replace(
        make_durations(work, 2 * work, counts=counts, gather_s=0.1, reduce_s=0.1),
        traffic=traffic(topology, layers + 1, k, 2 * k),
    )
    outcome = run_event(durations, schedule)
    closed = topology.minibatch_bytes(
        durations.counts, durations.traffic.gather_bytes, durations.traffic.reduce_bytes, schedule
    )
    assert outcome.inter_node_bytes[0] == pytest.approx(closed[0], rel=1e-12)
    # by hand: a rank's part of one transfer, times how many transfers each rank makes
    per_rank = (
        (d - g) * k if schedule.one_sided else (n - 1) * k if collectives == "two-level" else (d - 1) / g * k * (n > 1)
    )
    microbatches = counts.sum()
    gathers = d * (layers + 1) if schedule.deferred else microbatches * (2 * layers + 1)
    reduces = (d if schedule.deferred or schedule.local_sum else microbatches) * (layers + 1)
    assert closed[0] == pytest.approx(per_rank * (gathers + 2 * reduces), rel=1e-12)
    total = durations.busy_s + outcome.idle_s.sum(axis=2)
    np.testing.assert_allclose(total, np.broadcast_to(outcome.makespan_s[:, None], total.shape), rtol=1e-9)


class TestWhoSharesWhat:
    def test_a_card_for_each_rank(self):
        topology = Topology(world_size=8, group=4, nics_per_node=4)
        assert [topology.nic(rank) for rank in range(8)] == list(range(8))
        assert topology.ranks_per_nic == 1

    def test_ranks_share_scarce_cards(self):
        topology = Topology(world_size=8, group=4, nics_per_node=2)
        assert [topology.nic(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
        assert topology.ranks_per_nic == 2

    def test_peers_start_at_the_next_rank_and_at_the_counterpart(self):
        assert Topology(world_size=6, group=3, nics_per_node=1).peers(1) == ([2, 0], [4, 5, 3])

    def test_one_card_slows_a_node_of_ranks_in_the_event_engine(self):
        def makespan_s(nics):
            topology = Topology(world_size=4, group=2, nics_per_node=nics)
            work = np.full((1, 3, 4), 0.01)
            durations = make_durations(work, work, gather_s=1.0, reduce_s=1.0)
            with_traffic = replace(
                durations,
                traffic=Traffic(
                    topology=topology,
                    **{
                        f"{op}_{part}": np.full(2, s)
                        for op in ("gather", "reduce")
                        for part, s in (("bytes", 1.0), ("inside_s", 0.1), ("network_s", 1.0))
                    },
                ),
            )
            return run_event(with_traffic, make_schedule("odc")).makespan_s[0]

        assert makespan_s(1) > 1.5 * makespan_s(2)

    def test_ranks_that_do_not_fill_nodes_are_refused(self):
        with pytest.raises(InputError, match="got 12 devices, expected a multiple of 8"):
            make_topology(load_cluster("a100-nvswitch-roce"), 12)
        with pytest.raises(
            InputError,
            match=r"expected at most 8: h200-nvlink describes one node; to use more, add an \[inter\] section",
        ):
            make_topology(load_cluster("h200-nvlink"), 16)


class TestTimes:
    """A layer of 14B over 16 ranks: K = 4 * 275,268,608 / 16 bytes in fp32."""

    def seconds(self, **how):
        costs = transfer_costs(
            load_model("qwen2.5-14b"), load_cluster("a100-nvswitch-roce"), gather_dtype="fp32", **how
        )
        return costs.gather_s[1]

    SHARD_BYTES = 4 * 275_268_608 / 16

    def test_ring(self):
        expected = 20e-6 + 15 * self.SHARD_BYTES / 90e9  # one boundary, (D - 1) K over the node's cards
        assert self.seconds(world_size=16, one_sided=False) == pytest.approx(expected)

    def test_two_level(self):
        between, inside = 8 * self.SHARD_BYTES / 90e9, 20e-6 + 14 * self.SHARD_BYTES / 240e9
        got = self.seconds(world_size=16, one_sided=False, collectives="two-level")
        assert got == pytest.approx(20e-6 + between + inside)

    def test_one_sided(self):
        expected = 20e-6 + 8 * self.SHARD_BYTES / 11.25e9  # every rank its own 8 remote shards over its own card
        assert self.seconds(world_size=16, one_sided=True) == pytest.approx(expected)


class TestControls:
    @pytest.fixture
    def equal_lengths(self, tmp_path):
        path = tmp_path / "equal.txt"
        path.write_text("4096\n" * 64)
        return path

    def gain(self, lengths, tmp_path, nic_bytes_per_s, **fields):
        text = (Path(__file__).parent.parent / "odc_sim" / "hardware_data" / "cloud-100g.toml").read_text()
        path = tmp_path / "cluster.toml"
        path.write_text(text.replace("nic_bytes_per_s = 11.25e9", f"nic_bytes_per_s = {nic_bytes_per_s}"))
        study = Study(
            lengths=lengths,
            devices=16,
            minibatches=5,
            hardware=str(path),
            policy=("lb-micro",),
            schedule=("collective", "odc"),
            **fields,
        )
        return simulate(study).row("odc", "lb-micro").speedup

    def test_equal_lengths_over_a_scarce_network_make_odc_lose_and_a_faster_one_narrows_the_gap(
        self, equal_lengths, tmp_path
    ):
        gains = [self.gain(equal_lengths, tmp_path, rate) for rate in (5e9, 10e9, 20e9, 1e12)]
        assert gains[0] < 0.6
        assert gains == sorted(gains)
        assert gains[-1] == pytest.approx(1.0, abs=0.05)

    def test_two_level_collectives_save_bytes(self, equal_lengths):
        def inter_node_bytes(collectives):
            study = Study(
                lengths=equal_lengths, devices=16, minibatches=2, policy=("lb-micro",), collectives=collectives
            )
            return simulate(study).row("collective", "lb-micro").inter_node_bytes_per_minibatch

        assert inter_node_bytes("two-level") / inter_node_bytes("ring") == pytest.approx(16 * 1 / (2 * 15))

    def test_one_node_sends_nothing_between_nodes(self):
        for row in simulate(Study(minibatches=2, policy=("lb-micro",))).rows:
            assert row.inter_node_bytes_per_minibatch == 0


@pytest.fixture(scope="module")
def many_nodes():
    return [row for row in read_published(REPORT / "paper.csv") if row.devices > 8]


def test_the_papers_rows_on_two_and_four_nodes(many_nodes):
    real = errors(compare(many_nodes, minibatches=200))
    free = errors(compare(many_nodes, minibatches=200, hardware=str(REPORT / "network-free.toml")))
    for model in ("14B", "32B"):
        assert real[model]["bubble_points"] <= 3.2
        assert real[model]["speedup_points"] <= 2.5
        assert real[model]["speedup_points"] <= free[model]["speedup_points"] - 0.6  # 0.7 at 1,000 minibatches
