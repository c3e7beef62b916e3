import sys
import time

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed; `make test-kernels` runs these")

from kernels import conformance  # noqa: E402

import odc_kernels  # noqa: E402
from odc_kernels import launch  # noqa: E402
from odc_kernels.ranks import RankError, run_ranks  # noqa: E402
from odc_kernels.window import open_window  # noqa: E402
from odc_sim.errors import InputError  # noqa: E402

WORLDS = {  # name: world_size, TRITON_INTERPRET, rounds of contention
    "1 rank": (1, "0", 10),
    "2 ranks": (2, "0", 1000),
    "3 ranks": (3, "0", 20),
    "4 ranks": (4, "0", 20),
    "1 rank, interpreted": (1, "1", 3),
    "2 ranks, interpreted": (2, "1", 100),
    "3 ranks, interpreted": (3, "1", 10),
}


@pytest.fixture(scope="module", params=WORLDS)
def outcomes(request):
    world_size, interpret, rounds = WORLDS[request.param]
    environment = {"TRITON_INTERPRET": interpret}
    return run_ranks(conformance.run_checks, world_size, "cpu", rounds, timeout_s=120, environment=environment)


@pytest.mark.parametrize("name", [check.__name__ for check in conformance.CHECKS])
def test_conformance(outcomes, name):
    for rank, outcome in enumerate(outcomes):
        assert name in outcome, f"rank {rank} did not come so far"
        assert outcome[name] is None, f"rank {rank}:\n{outcome[name]}"


def test_nothing_is_left_behind():
    from odc_kernels.window_cpu import folders

    assert not [path for folder in folders() for path in folder.glob("odc-*")]


def test_a_rank_that_stays_away_is_named_within_the_deadline():
    waited_s = run_ranks(conformance.a_rank_that_stays_away, 3, "cpu")
    assert waited_s[2] == 0
    assert all(2 <= waited < 4 for waited in waited_s[:2])


def test_a_lost_store_is_said_so():
    run_ranks(conformance.a_store_that_is_lost, 2, "cpu")


def test_a_window_needs_a_process_group():
    with pytest.raises(InputError, match=r"torch.distributed is not initialized; call init_process_group first"):
        open_window(1, torch.float32)


def test_without_triton_there_is_a_line_that_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "odc_kernels.kernels", raising=False)
    monkeypatch.delattr(odc_kernels, "kernels", raising=False)
    for function in (launch.kernels, launch.interpreted):
        function.cache_clear()
    try:
        assert not launch.interpreted()
        with pytest.raises(InputError, match=r"install odc-toolkit\[kernels\]"):
            launch.kernels()
    finally:
        for function in (launch.kernels, launch.interpreted):
            function.cache_clear()


def test_a_rank_that_raises_fails_the_run_with_its_traceback():
    with pytest.raises(RankError, match=r"rank 1 raised:(.|\n)*ValueError: something of its own"):
        run_ranks(conformance.raises_on_rank_1, 2, timeout_s=15)


def test_a_rank_that_never_ends_is_ended():
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 1 was not finished after 8 s"):
        run_ranks(conformance.never_ends, 2, timeout_s=8)
    assert time.monotonic() - start < 12


def test_a_rank_that_dies_is_named_within_the_deadline(tmp_path):
    messages = tmp_path / "messages"
    environment = {"ODC_TEST_MESSAGES": str(messages)}
    run_ranks(conformance.a_rank_that_dies, 3, "cpu", environment=environment, may_die=True, timeout_s=30)
    lines = sorted(messages.read_text().splitlines())
    assert len(lines) == 2
    for rank, line in zip((0, 2), lines, strict=True):
        assert line.startswith(f"barrier of window 1 ('doomed'): rank {rank} waited 2 s for rank 1: dead")


def test_groups_of_some_ranks():
    run_ranks(conformance.groups_of_some_ranks, 4, "cpu")


def test_a_dead_rank_fails_the_run():
    with pytest.raises(RankError, match="rank 1 died with exit code 7"):
        run_ranks(conformance.a_rank_that_dies, 2, "cpu", environment={"ODC_TEST_MESSAGES": "/dev/null"}, timeout_s=30)
