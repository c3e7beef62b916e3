import statistics
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from kernels import fsdp_checks, fsdp_dying  # noqa: E402

from odc_kernels import fsdp_bench  # noqa: E402
from odc_kernels.ranks import run_ranks  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.fixture(scope="module")
def outcomes():
    return run_ranks(fsdp_checks.run_checks, 2, fsdp_checks.CHECKS, backend="nccl", timeout_s=150)


@pytest.mark.parametrize("name", [check.__name__ for check in fsdp_checks.CHECKS])
def test_checks(outcomes, name):
    for rank, outcome in enumerate(outcomes):
        assert name in outcome, f"rank {rank} did not come so far"
        assert outcome[name] is None, f"rank {rank}:\n{outcome[name]}"


def test_losses_and_norms_are_those_of_fully_shard():
    shapes = {"equal": replace(fsdp_bench.SHAPES["equal"], layers=2, modes=("fsdp2", "odc"))}
    for found in run_ranks(fsdp_bench.bench, 2, shapes, None, backend="nccl", timeout_s=150):
        stock, ours = found["equal"]["fsdp2"], found["equal"]["odc"]
        for kind, most in (("loss", 1e-3), ("norm", 1e-2)):
            differences = [abs(b / a - 1) for a, b in zip(stock[kind], ours[kind], strict=True)]
            assert max(differences) < most
            assert statistics.median(differences) < most / 10


def test_a_killed_rank_is_named(tmp_path):
    run_ranks(fsdp_dying.pairs, 2, str(tmp_path), ["push"], backend="nccl", may_die=True, timeout_s=60)
    assert "end of minibatch 2: rank 0 waits for rank 1, which died" in (tmp_path / "push").read_text()


def test_a_rank_stuck_in_a_collective_with_a_dead_one_is_ended(capfd):
    run_ranks(fsdp_dying.in_the_step, 2, backend="nccl", may_die=True, timeout_s=60)
    assert (
        "optimizer step of minibatch 2: rank 1 died, and this rank was still in it 2 s later" in capfd.readouterr().err
    )


def test_a_rank_whose_device_waits_for_a_stuck_one_is_ended(capfd):
    run_ranks(fsdp_dying.with_a_busy_device, 2, backend="nccl", may_die=True, timeout_s=60)
    assert (
        "optimizer step of minibatch 2: the device of this rank waited 2 s for that of rank 1: ending it"
        in capfd.readouterr().err
    )
