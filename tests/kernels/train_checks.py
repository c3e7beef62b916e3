"""What ranks of `odc train` must do, run in each rank of one group."""

import re
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from odc_kernels.lm import build_lm, pack
from odc_kernels.train import make_worker
from odc_kernels.train_data import Synthetic, minibatch_samples
from odc_kernels.train_job import Job
from odc_sim.api import plan
from odc_sim.errors import RunError
from odc_sim.plans import Plan, pad_microbatches
from odc_sim.policies import POLICIES
from odc_sim.run_files import RunConfig
from odc_sim.schedules import SCHEDULES, make_schedule, obstacle
from odc_sim.study import Study

CPU = torch.device("cpu")
STUDY = Study(
    **{"model": "tiny", "devices": 2, "minibatch_size": 4, "minibatches": 2, "batch_minibatches": 2, "seed": 4},
    **{"scale": 0.004, "max_tokens": 120, "overlong": "clip"},
)
"""With lb-mini ranks run 3 and 2 microbatches, then 4 and 3."""
CASES = [(schedule.name, policy) for schedule in SCHEDULES for policy in POLICIES]


def plan_of(policy: str, schedule: str):
    """With several samples a microbatch; padded where the schedule would hang otherwise."""
    found = plan(STUDY, policy)
    return pad_microbatches(found) if obstacle(make_schedule(schedule), found) else found


def config_of(schedule: str, policy: str = "lb-mini", **fields) -> RunConfig:
    default = {
        **{"model": "tiny", "device": "cpu", "compute": "real", "world_size": 2, "steps": 2, "seed": 0},
        **{"gather_dtype": "fp32", "reduce_dtype": "fp32", "recompute": True, "chunked_loss_tokens": 64},
        **{"learning_rate": 1e-3, "max_grad_norm": 1.0, "time_scale": 1.0, "warmup_steps": 1},
    }
    return RunConfig(schedule=schedule, policy=policy, **{**default, **fields})


def job_of(schedule: str, policy: str = "lb-mini", out: Path = Path("unused"), **fields) -> Job:
    return Job(
        plan=plan_of(policy, schedule), config=config_of(schedule, policy), model="tiny", out=out, command="", **fields
    )


def reference(found, minibatch: int) -> dict[str, torch.Tensor]:
    """Gradients of one process that runs each sample alone, without recomputation or chunks."""
    lm = build_lm("tiny", device=CPU, seed=0, recompute=False, chunked_loss_tokens=0)
    samples = Synthetic(found.lengths, lm.spec.vocab, 0)
    ids = minibatch_samples(found, minibatch).tolist()
    for sample in ids:
        lm(pack([samples.tokens(sample)], 1 / len(ids))).backward()
    return {name: parameter.grad for name, parameter in lm.named_parameters()}


def relative_error(model: torch.nn.Module, expected: dict[str, torch.Tensor]) -> float:
    difference, size = 0.0, 0.0
    for name, parameter in model.named_parameters():
        difference += float((parameter.grad.full_tensor() - expected[name]).double().square().sum())
        size += float(expected[name].double().square().sum())
    return (difference / size) ** 0.5


def run(rank: int) -> dict[str, float | str]:
    """Errors by "schedule/policy"; and what went wrong elsewhere, by its name."""
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
    found: dict[str, float | str] = {}
    expected: dict[tuple[int, ...], dict[str, torch.Tensor]] = {}
    for schedule in SCHEDULES:
        worker = make_worker(rank, job_of(schedule.name), control)
        for policy in POLICIES:
            worker.job = job_of(schedule.name, policy)
            minibatch = 1
            for batch in worker.mode.microbatches(worker.prepare(minibatch)):
                worker.model(batch).backward()
            ids = tuple(sorted(minibatch_samples(worker.job.plan, minibatch).tolist()))
            if ids not in expected:
                expected[ids] = reference(worker.job.plan, minibatch)
            found[f"{schedule.name}/{policy}"] = relative_error(worker.model, expected[ids])
            worker.mode.publish()
        warming_up_changes_nothing(worker)
        if schedule.one_sided:
            a_rank_without_microbatches_takes_part(worker)
        worker.mode.close()
    weights_stay_exact_in_bf16(rank, control)
    worker = make_worker(rank, job_of("collective", "lb-micro"), control)
    running_out_of_memory_names_the_microbatch(worker)
    return found


def weights_stay_exact_in_bf16(rank: int, control: dist.ProcessGroup) -> None:
    job = job_of("collective", "lb-micro")
    worker = make_worker(rank, replace(job, config=replace(job.config, gather_dtype="bf16")), control)
    seen = []

    def chunk_loss(hidden, _labels, weights):
        seen.append((hidden.dtype, weights.dtype))
        return (hidden.float().mean(1) * weights).sum()

    worker.model._chunk_loss = chunk_loss
    worker.model(worker.prepare(0)[0]).backward()
    assert set(seen) == {(torch.bfloat16, torch.float32)}


def warming_up_changes_nothing(worker) -> None:
    before = [parameter.detach().to_local().clone() for parameter in worker.model.parameters()]
    worker.warm_up([1, 0])
    for parameter, old in zip(worker.model.parameters(), before, strict=True):
        assert torch.equal(parameter.detach().to_local(), old)
    for state in worker.optimizer.state.values():
        assert not any(torch.count_nonzero(getattr(value, "_local_tensor", value)) for value in state.values())
    assert worker.optimizer.param_groups[0]["lr"] == 1e-3


def a_rank_without_microbatches_takes_part(worker) -> None:
    """Rank 1 runs nothing in the first minibatch."""
    dealt = Plan.from_nested(
        [[[[0, 1]], []], [[[2]], [[3, 4], [5]]]],
        **{"workload": {}, "model": "tiny", "world_size": 2, "minibatch_size": 1, "max_tokens": 99, "policy": "own"},
        balancing_cost={"name": "", "source": ""},
        lengths=[5, 6, 7, 8, 1, 9],
    )
    worker.job = replace(worker.job, plan=dealt)
    for minibatch in (0, 1):
        settled = worker.settle(worker.run(minibatch, worker.prepare(minibatch)))
        assert 4 < settled.loss < 7
        assert (settled.shares[1].busy_s == 0) == (minibatch == 0)
    spans = worker.collect()
    assert len(spans) == (2 if worker.rank == 0 else 0)
    for _, rows in spans[1][0:1] if worker.rank == 0 else []:
        assert [row.kind for row in rows] == ["optimizer", "publish"]


def running_out_of_memory_names_the_microbatch(worker) -> None:
    def fails(_batch):
        raise torch.OutOfMemoryError("CUDA out of memory")

    batches = worker.prepare(0)
    worker.model = fails
    text = f"out of memory: minibatch 0, rank {worker.rank}, microbatch 0 of {batches[0].num_tokens} tokens"
    with pytest.raises(RunError, match=re.escape(text)):
        worker.run(0, batches)
