import importlib.util

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from kernels import conformance  # noqa: E402

from odc_kernels.ranks import run_ranks  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
WORLD_SIZE = 2
needs_nvshmem = pytest.mark.skipif(importlib.util.find_spec("nvshmem") is None, reason="nvshmem4py is not installed")


@pytest.fixture(scope="module", params=["cuda", pytest.param("nvshmem", marks=needs_nvshmem)])
def outcomes(request):
    return run_ranks(conformance.run_checks, WORLD_SIZE, request.param, 1000, backend="nccl", timeout_s=200)


@pytest.mark.parametrize("name", [check.__name__ for check in conformance.CHECKS])
def test_conformance(outcomes, name):
    for rank, outcome in enumerate(outcomes):
        assert name in outcome, f"rank {rank} did not come so far"
        assert outcome[name] is None, f"rank {rank}:\n{outcome[name]}"


def test_a_rank_that_stays_away_is_named_within_the_deadline():
    waited_s = run_ranks(conformance.a_rank_that_stays_away, WORLD_SIZE, "cuda", backend="nccl")
    assert 2 <= waited_s[0] < 4


def test_a_rank_that_dies_is_named_within_the_deadline(tmp_path):
    messages = tmp_path / "messages"
    run_ranks(
        conformance.a_rank_that_dies,
        WORLD_SIZE,
        "cuda",
        backend="nccl",
        environment={"ODC_TEST_MESSAGES": str(messages)},
        may_die=True,
    )
    (line,) = messages.read_text().splitlines()
    assert line.startswith("barrier of window 1 ('doomed'): rank 0 waited 2 s for rank 1: dead")


@needs_nvshmem
def test_reads_from_other_hosts():
    run_ranks(conformance.reads_from_other_hosts, WORLD_SIZE, backend="nccl")
