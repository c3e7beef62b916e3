"""Ranks are forked from a process that has imported torch already: half the time of these tests was imports."""

import multiprocessing

import pytest

PRELOADED = ["torch", "torch.distributed.fsdp", "transformers"]
"""Not Triton, nor what imports it: some ranks set an environment for it first."""


@pytest.fixture(scope="session", autouse=True)
def forked_ranks():
    ranks = pytest.importorskip("odc_kernels.ranks", reason="torch is not installed")
    multiprocessing.set_forkserver_preload(PRELOADED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "START_METHOD", "forkserver")
        yield


@pytest.fixture(autouse=True)
def output_is_ones_own(request, monkeypatch):
    """Forked ranks write where the process wrote from which they are forked: not where capfd reads."""
    if "capfd" in request.fixturenames:
        monkeypatch.setattr("odc_kernels.ranks.START_METHOD", "spawn")
