import pytest

torch = pytest.importorskip("torch", reason="torch is not installed; `make test-kernels` runs these")

from odc_kernels import environment, gather, overlap, timing  # noqa: E402
from odc_kernels.copies import copy_batch  # noqa: E402

CPU = torch.device("cpu")


def test_percentiles():
    result = timing.summarize([float(value) for value in range(101)])
    assert (result.p20_s, result.p50_s, result.p80_s) == (20, 50, 80)
    assert len(result.samples) == 101


@pytest.mark.parametrize(
    ("call_s", "expected"),
    [
        (1e-3, (1, 40)),  # long enough alone; as many samples as asked for
        (1e-5, (30, 40)),  # 30 calls make 0.3 ms
        (0.05, (1, 10)),  # ten of them take the half second
        (1.0, (1, 5)),  # never fewer than five
    ],
)
def test_samples_are_long_enough_for_the_clock_and_end_in_time(call_s, expected):
    assert timing.plan(call_s, sample_s=3e-4, samples=40, total_s=0.5) == expected


def test_marks_measure_what_lies_between_them():
    clock = iter([10.0, 10.5, 12.0, 20.0]).__next__
    marks, later = timing.Marks(CPU, clock), timing.Marks(CPU, clock)
    for _ in range(3):
        marks.mark()
    later.mark()
    assert marks.intervals_s(marks) == [(0, 0.5), (0.5, 2.0)]
    assert later.times_s(marks) == [10.0]


PRODUCTS = [(float(start), float(start + 1)) for start in range(10)]


def test_products_within_the_transfers_are_beside_and_those_outside_alone():
    transfers = [(3.5, 4.5), (4.5, 6.25)]
    products = [(start, end + (0.5 if 4 <= start < 6 else 0)) for start, end in PRODUCTS[:4]]
    products += [(4.0, 5.5), (5.5, 6.0), (6.0, 7.0), (7.0, 8.0)]
    means = overlap.split(transfers, products, guard_s=0)
    assert means.transfer_beside_s == pytest.approx((1 + 1.75) / 2)
    assert means.product_beside_s == pytest.approx((1.5 + 0.5) / 2)  # those from 4.0 and 5.5 on; 3 and 6 overlap half
    assert means.product_alone_s == pytest.approx(1)


def test_products_near_either_end_of_the_transfers_count_as_neither():
    means = overlap.split([(3.0, 7.0)], PRODUCTS, guard_s=0.5)
    assert means.product_beside_s == 1
    slow = [(start, end) if start not in (2.0, 3.0, 6.0, 7.0) else (start, start + 0.9) for start, end in PRODUCTS]
    means = overlap.split([(3.0, 7.0)], slow, guard_s=0.5)
    assert means.product_beside_s == 1
    assert means.product_alone_s == 1


def test_a_steady_drift_of_the_clock_cancels():
    products, at = [], 0.0
    for number in range(30):
        duration = 1 + number * 0.01
        products.append((at, at + duration))
        at += duration
    means = overlap.split([(products[10][0], products[19][1])], products, guard_s=0)
    assert means.product_beside_s == pytest.approx(means.product_alone_s)


def test_nothing_beside_is_none_and_not_a_number():
    means = overlap.split([(20.0, 21.0)], PRODUCTS, guard_s=0)
    assert means.transfer_beside_s is None
    assert means.product_beside_s is None
    assert means.product_alone_s == 1


def test_slowdowns_and_the_compute_that_a_transfer_costs():
    beside = overlap.Beside(transfer_alone_s=2.0, transfer_beside_s=3.0, gemm_alone_s=1.0, gemm_beside_s=1.25)
    assert beside.slowdown_transfer == 1.5
    assert beside.slowdown_compute == 1.25
    # In 3 s beside the transfer, 2.4 products are done instead of 3: 0.6 s are lost.
    assert beside.compute_lost_s == pytest.approx(0.6)
    assert not beside.flagged
    assert overlap.Beside(transfer_alone_s=2.0, transfer_beside_s=1.9, gemm_alone_s=1.0, gemm_beside_s=1.1).flagged
    assert overlap.Beside(transfer_alone_s=2.0, transfer_beside_s=2.1, gemm_alone_s=1.0, gemm_beside_s=0.9).flagged


@pytest.mark.parametrize(
    ("num_peers", "shard_bytes", "expected"),
    [
        (1, 1 << 10, "copy"),
        (1, 1 << 28, "copy"),
        (4, 1 << 10, "copy"),
        (7, 1 << 10, "triton"),
        (7, 4 << 20, "copy"),
        (7, 1 << 28, "copy"),
    ],
)
def test_the_faster_way_to_gather(num_peers, shard_bytes, expected):
    assert gather.faster(num_peers, num_peers * shard_bytes) == expected


def test_copies_in_batches_are_for_gpus():
    assert not copy_batch([0], [0], 1, CPU)


def test_environment_names_the_versions_and_survives_missing_tools():
    facts = environment.describe()
    assert facts["packages"]["torch"] == torch.__version__
    assert environment.run("no-such-tool")[0].startswith("no-such-tool: ")
    assert environment.run("false")[0].startswith("false: ")
    assert environment.run("echo", "two\nlines") == ["two", "lines"]
