"""Seconds of transfers and copies: against what two H200s measured, and against cases worked out by hand."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from odc_sim.calibration import load_calibration
from odc_sim.errors import InputError
from odc_sim.hardware import load_cluster
from odc_sim.transfers import TransferCosts, transfer_costs

SMALL = load_calibration(Path(__file__).parent / "data" / "calibration-small.json")
H200 = load_cluster("h200-nvlink")
A100 = load_cluster("a100-nvswitch-roce")
COPIES = ("copy_in_s", "copy_out_s", "pack_s", "add_s", "hold_s")


@dataclass(frozen=True)
class Shape:
    layers: int
    layer_parameters: int
    root_parameters: int

    @property
    def parameters(self):
        return self.layers * self.layer_parameters + self.root_parameters


MEASURED = Shape(layers=8, layer_parameters=93_847_552, root_parameters=93_847_552)


def costs(shape=MEASURED, cluster=H200, world_size=2, one_sided=False, gather_dtype="bf16", **more) -> TransferCosts:
    return transfer_costs(shape, cluster, world_size=world_size, one_sided=one_sided, gather_dtype=gather_dtype, **more)


def test_the_h200_cluster_gives_back_the_copies_measured_on_two_of_them():
    """FSDP2 on 2 x H200, torch 2.11.0, a layer of 93,847,552 elements."""
    c = costs()
    for name, measured_ms in {"copy_in_s": 0.1796, "copy_out_s": 0.1117, "pack_s": 0.2962, "add_s": 0.1356}.items():
        assert getattr(c, name)[1] * 1e3 == pytest.approx(measured_ms, rel=0.03), name


@pytest.mark.parametrize(("one_sided", "gather_ms", "reduce_ms"), [(False, 0.382, 0.801), (True, 0.257, 0.490)])
def test_and_the_transfers(one_sided, gather_ms, reduce_ms):
    c = costs(one_sided=one_sided)
    assert c.gather_s[1] * 1e3 == pytest.approx(gather_ms, rel=0.1)
    assert c.reduce_s[1] * 1e3 == pytest.approx(reduce_ms, rel=0.1)
    assert c.provenance == "analytic"


def test_arrays_are_the_root_and_then_the_layers():
    c = costs(Shape(layers=3, layer_parameters=1_000, root_parameters=5_000))
    for name in ("gather_s", "reduce_s", *COPIES):
        values = getattr(c, name)
        assert values.shape == (4,)
        assert values.dtype == np.float64
        assert values[0] > values[1] == values[2] == values[3] > 0


def test_transfers_inside_a_node_by_hand():
    # 10e6 elements over 8 ranks: shards of 1.25e6; 7 peers; 240e9 bytes/s; 20 us
    c = costs(Shape(layers=1, layer_parameters=10_000_000, root_parameters=1), A100, world_size=8)
    assert c.gather_s[1] == pytest.approx(20e-6 + 7 * 1.25e6 * 2 / 240e9)
    assert c.reduce_s[1] == pytest.approx(20e-6 + 7 * 1.25e6 * 4 / 240e9)


def test_shards_are_rounded_up():
    uneven = costs(Shape(layers=1, layer_parameters=9, root_parameters=8), A100, world_size=8)
    assert uneven.gather_s[1] - uneven.gather_s[0] == pytest.approx(7 * 1 * 2 / 240e9, rel=1e-6)  # ceil(9 / 8) = 2


def test_fp32_gathers_move_twice_the_bytes_and_are_cast_after_it():
    shape = Shape(layers=1, layer_parameters=10_000_000, root_parameters=1)
    bf16, fp32 = (costs(shape, A100, 8, gather_dtype=dtype) for dtype in ("bf16", "fp32"))
    assert fp32.gather_s[1] - 20e-6 == pytest.approx(2 * (bf16.gather_s[1] - 20e-6))
    assert fp32.copy_in_s[1] / bf16.copy_in_s[1] == pytest.approx(8 / 10)
    assert fp32.copy_out_s[1] / bf16.copy_out_s[1] == pytest.approx(14 / 4)
    assert fp32.reduce_s[1] == bf16.reduce_s[1]


def test_bf16_reductions_move_half_the_bytes():
    shape = Shape(layers=1, layer_parameters=10_000_000, root_parameters=1)
    fp32, bf16 = (costs(shape, A100, 8, reduce_dtype=dtype) for dtype in ("fp32", "bf16"))
    assert fp32.reduce_s[1] - 20e-6 == pytest.approx(2 * (bf16.reduce_s[1] - 20e-6))
    assert bf16.pack_s[1] / fp32.pack_s[1] == pytest.approx(4 / 6)
    assert bf16.add_s[1] / fp32.add_s[1] == pytest.approx(10 / 12)


def test_across_nodes_the_ring_wins_and_one_sided_pays_for_every_rank():
    """16 devices, 8 a node, 90e9 bytes/s of network a node (arXiv 2601.19362, appendix D)."""
    shape = Shape(layers=1, layer_parameters=16_000_000, root_parameters=1)  # K = 2e6 bytes
    ring, own = (costs(shape, A100, 16, one_sided=one_sided) for one_sided in (False, True))
    assert ring.gather_s[1] == pytest.approx(20e-6 + 15 * 2e6 / 90e9)
    assert own.gather_s[1] == pytest.approx(20e-6 + 8 * 8 * 2e6 / 90e9)
    amplification = (own.gather_s[1] - 20e-6) / (ring.gather_s[1] - 20e-6)
    assert amplification == pytest.approx(8 * (16 - 8) / (16 - 1))  # 4.3


def test_a_fast_network_leaves_the_links_inside_the_node_to_decide():
    fast = replace(A100, inter=replace(A100.inter, nic_bytes_per_s=1e15, latency_s=0.0))
    shape = Shape(layers=1, layer_parameters=16_000_000, root_parameters=1)
    ring, own = (costs(shape, fast, 16, one_sided=one_sided) for one_sided in (False, True))
    assert ring.gather_s[1] == pytest.approx(20e-6 + 15 * 2e6 / 240e9)
    assert own.gather_s[1] == pytest.approx(20e-6 + 7 * 2e6 / 240e9)


@pytest.mark.parametrize("one_sided", [False, True])
def test_one_rank_moves_nothing_but_fsdp2_copies_all_the_same(one_sided):
    c = costs(world_size=1, one_sided=one_sided)
    for name in ("gather_s", "copy_in_s"):
        assert getattr(c, name).tolist() == [0.0] * 9
    assert c.publish_s == 0
    unit = 93_847_552
    # cast and copied: read 4, write 2, read 2, write 2; packed 4 + 2; copied to be the result 4 + 4; added 4 + 4 + 4
    assert c.copy_out_s[1] == pytest.approx(unit * 10 / (4.8e12 * 0.544))
    assert c.pack_s[1] == pytest.approx(unit * 6 / (4.8e12 * 0.396))
    assert c.reduce_s[1] == pytest.approx(unit * 8 / (4.8e12 * 0.865))
    assert c.add_s[1] == pytest.approx(unit * 12 / (4.8e12 * 0.865))


def test_what_other_ranks_measured_says_nothing_of_one_alone():
    """It moves nothing; the copy in place of a reduction is analytic, whatever two ranks' transfers were."""
    assert calibrated(64 * 1024).provenance != "analytic"
    assert calibrated(64 * 1024, world_size=1).provenance == "analytic"


def test_optimizer_and_publish_by_hand():
    c = costs(one_sided=True)
    shard = 9 * 93_847_552 / 2
    assert c.optimizer_s == pytest.approx(shard * 36 / (4.8e12 * 0.865))
    assert c.publish_s == pytest.approx(shard * 6 / (4.8e12 * 0.544))
    assert c.optimizer_provenance == "analytic"
    assert costs(one_sided=False).publish_s == 0


def calibrated(shard_bytes, *, world_size=4, one_sided=False, cluster=H200, root_bytes=None):
    """Costs from the small calibration, for layers whose fp32 shard has this size (so bf16 gathers have half of it)."""
    root = shard_bytes if root_bytes is None else root_bytes
    shape = Shape(layers=1, layer_parameters=shard_bytes // 4 * world_size, root_parameters=root // 4 * world_size)
    return costs(shape, cluster, world_size, one_sided=one_sided, gather_dtype="fp32", calibration=SMALL)


def test_measured_sizes_give_the_measured_times():
    c = calibrated(16_000_000)
    assert c.gather_s[1] == pytest.approx(8e-4)
    assert c.reduce_s[1] == pytest.approx(16e-4)
    assert c.provenance == "measured"


def test_copies_come_from_the_calibration_by_their_elements():
    shape = Shape(layers=1, layer_parameters=4_000_000, root_parameters=400_000_000)
    c = costs(shape, H200, 4, one_sided=False, calibration=SMALL)
    # seconds = elements / rate; of a unit for copy_out, pack and hold, of a quarter for copy_in and add
    assert [getattr(c, name)[1] for name in COPIES] == pytest.approx([1e-6, 4e-6, 8e-6, 2e-6, 16e-6])
    assert c.copy_out_s[0] == pytest.approx(4e-4)  # beyond the table
    assert c.provenance == "extrapolated"


def test_copies_that_were_not_measured_or_are_noisy_make_transfers_analytic():
    noisy = replace(SMALL, copies=tuple(replace(s, flagged=s.op == "pack") for s in SMALL.copies))
    for calibration in (noisy, replace(SMALL, copies=())):
        shape = Shape(layers=1, layer_parameters=16_000_000, root_parameters=16_000_000)
        c = costs(shape, H200, 4, gather_dtype="fp32", calibration=calibration)
        assert c.gather_s[1] == pytest.approx(8e-4)
        assert c.pack_s[1] == pytest.approx(16e6 * 6 / (4.8e12 * 0.396))
        assert c.provenance == "analytic"


def test_ways_that_training_does_not_use_are_passed_over():
    quick = tuple(replace(s, backend="cuda-copy-overwrite", p50_s=s.p20_s / 2) for s in SMALL.transfers)
    more = replace(SMALL, transfers=SMALL.transfers + quick)
    shape = Shape(layers=1, layer_parameters=16_000_000, root_parameters=16_000_000)
    c = costs(shape, H200, 4, gather_dtype="fp32", one_sided=True, calibration=more)
    assert c.reduce_s[1] == pytest.approx(8e-4)


def test_one_sided_times_come_from_their_own_rows_and_the_fastest_backend():
    c = calibrated(1_000_000, one_sided=True)
    assert c.gather_s[1] == pytest.approx(4e-5)  # the second backend, at this size only
    assert c.reduce_s[1] == pytest.approx(1e-4)  # flagged: its slowdown is not trusted, its time alone is
    assert calibrated(16_000_000, one_sided=True).gather_s[1] == pytest.approx(4e-4)


def test_between_measured_sizes_the_line_is_straight_in_logarithms():
    c = calibrated(4_000_000)  # halfway from 1e6 to 16e6
    assert c.gather_s[1] == pytest.approx(np.sqrt(1e-4 * 8e-4))
    assert c.provenance == "measured"


def test_above_the_table_the_last_rate_holds_and_below_it_the_first_time():
    above, below = calibrated(128_000_000), calibrated(40_000)
    assert above.gather_s[1] == pytest.approx(2 * 32e-4)
    assert below.gather_s[1] == pytest.approx(1e-4)
    assert above.provenance == below.provenance == "extrapolated"


def test_one_unit_outside_the_table_is_enough_to_say_so():
    c = calibrated(16_000_000, root_bytes=128_000_000)
    assert c.gather_s.tolist() == pytest.approx([64e-4, 8e-4])
    assert c.provenance == "extrapolated"


def test_other_world_sizes_scale_with_their_peers():
    c = calibrated(16_000_000, world_size=8)
    assert c.gather_s[1] == pytest.approx(8e-4 * 7 / 3)
    assert c.provenance == "extrapolated"


def test_a_calibration_of_one_node_leaves_the_network_to_the_cluster_file():
    ring = calibrated(16_000_000, world_size=16, cluster=A100)
    own = calibrated(16_000_000, world_size=16, cluster=A100, one_sided=True)
    assert ring.gather_s[1] == pytest.approx(20e-6 + 8e-4 * 15 / 3)  # the links: 4 ms; the network: 2.7 ms
    assert own.gather_s[1] == pytest.approx(20e-6 + 8 * 8 * 16e6 / 90e9)  # the links: 0.93 ms; the network: 11.4 ms
    assert ring.provenance == own.provenance == "extrapolated"


def test_what_was_not_measured_falls_back_to_the_cluster_and_says_so():
    partial = replace(SMALL, transfers=tuple(s for s in SMALL.transfers if s.op == "gather"), optimizer=())
    shape = Shape(layers=1, layer_parameters=16_000_000, root_parameters=16_000_000)
    c = costs(shape, H200, 4, one_sided=True, gather_dtype="fp32", calibration=partial)
    assert c.gather_s[1] == pytest.approx(4e-4)
    assert c.reduce_s[1] == pytest.approx(7e-6 + 3 * 16e6 / 375e9)
    assert c.provenance == c.optimizer_provenance == "analytic"


def test_the_nearest_measured_world_is_used():
    more = tuple(replace(s, world_size=8, p50_s=s.p50_s * 2) for s in SMALL.transfers)
    both = replace(SMALL, transfers=SMALL.transfers + more)
    shape = Shape(layers=1, layer_parameters=4_000_000 * 7, root_parameters=4_000_000 * 7)
    c = costs(shape, H200, 7, gather_dtype="fp32", calibration=both)
    assert c.gather_s[1] == pytest.approx(16e-4 * 6 / 7)


def test_measured_optimizer_times_by_shard_size():
    shape = Shape(layers=1, layer_parameters=20_000_000, root_parameters=20_000_000)
    c = costs(shape, H200, 4, one_sided=True, calibration=SMALL)  # 1e7 elements a rank, between 1e6 and 1e8
    assert c.optimizer_s == pytest.approx(1e-3)
    assert c.publish_s == pytest.approx(2e-4)
    assert c.optimizer_provenance == "measured"
    large = Shape(layers=1, layer_parameters=400_000_000, root_parameters=400_000_000)
    c = costs(large, H200, 4, one_sided=False, calibration=SMALL)  # 2e8 elements
    assert c.optimizer_s == pytest.approx(2e-2)
    assert c.optimizer_provenance == "extrapolated"


def test_flagged_optimizer_steps_are_passed_over():
    noisy = replace(SMALL.optimizer[1], parameters=10_000_000, step_s=1.0, flagged=True)
    shape = Shape(layers=1, layer_parameters=20_000_000, root_parameters=20_000_000)
    c = costs(shape, H200, 4, one_sided=True, calibration=replace(SMALL, optimizer=(*SMALL.optimizer, noisy)))
    assert c.optimizer_s == pytest.approx(1e-3)


@given(
    st.integers(1, 10**9), st.integers(1, 10**9), st.sampled_from([1, 2, 4, 8, 16, 32]), st.booleans(), st.booleans()
)
def test_more_parameters_never_take_less_time(one, other, world_size, one_sided, with_calibration):
    small, large = sorted([one, other])
    shape = Shape(layers=1, layer_parameters=large, root_parameters=small)
    c = costs(shape, A100, world_size, one_sided, calibration=SMALL if with_calibration else None)
    for name in ("gather_s", "reduce_s", *COPIES):
        root_s, layer_s = getattr(c, name)
        assert 0 <= root_s <= layer_s


@pytest.mark.parametrize(
    ("cluster", "world_size", "message"),
    [
        (H200, 0, "got 0 devices, expected at least 1"),
        (
            H200,
            16,
            "got 16 devices, expected at most 8: h200-nvlink describes one node; "
            r"to use more, add an \[inter\] section to its TOML \(odc hardware h200-nvlink --toml > mine.toml; "
            r"odc hardware h100-ib --toml shows one\)",
        ),
        (A100, 12, "got 12 devices, expected a multiple of 8, the devices of one node of a100-nvswitch-roce"),
    ],
)
def test_numbers_of_devices_that_do_not_fit(cluster, world_size, message):
    with pytest.raises(InputError, match=f"^{message}$"):
        costs(cluster=cluster, world_size=world_size)
