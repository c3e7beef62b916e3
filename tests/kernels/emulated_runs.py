"""Several runs of `odc train` in one set of ranks: starting eight takes as long as some of the runs."""

import torch.distributed as dist

from odc_kernels.train import run_rank
from odc_kernels.train_job import Job


def run_jobs(rank: int, jobs: list[Job]) -> None:
    """One after another."""
    for job in jobs:
        run_rank(rank, job)
        dist.barrier()
