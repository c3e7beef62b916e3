"""A run as `odc train` would have recorded it, had the event engine been the machine."""

import numpy as np

from odc_sim.engine_event import _World
from odc_sim.header import write_json
from odc_sim.idle import Span
from odc_sim.machine import load_machine
from odc_sim.plans import write_plan
from odc_sim.run_files import RunConfig, StepRow, read_run, write_config, write_environment, write_steps
from odc_sim.timeline import Timeline
from odc_sim.validate_predict import price


def recorded_spans(durations, schedule, minibatch=0):
    """What a trainer sees of one minibatch: no waits, no copies; collectives from when the stream reached them."""
    world = _World(durations, schedule, minibatch)
    spans, arrivals = [], []
    for rank, ops in enumerate(world.programs):
        arrivals.append(max((op.end_s for op in ops if op.stream == "compute"), default=0.0))
        heads = set()
        for op in ops:
            if op.stream in ("unshard", "reduce") and op.kind == op.stream:
                spans.append(Span(rank, op.stream, op.kind, "", op.unit, op.microbatch, op.ready_s, op.end_s))
            elif op.stream == "compute" and op.kind in ("forward", "backward", "head_loss"):
                kind = op.kind
                if kind == "head_loss" and op.microbatch in heads:  # the head's backward
                    kind = "backward"
                elif kind == "head_loss":
                    heads.add(op.microbatch)
                elif (op.kind, op.unit) != ("backward", 0):  # which the host enqueues in no time
                    host_s = durations.host_forward_s if kind == "forward" else durations.host_backward_s
                    # a timeline begins with the device
                    start_s, end_s = (max(moment, 0.0) for moment in (op.issue_s - host_s, op.issue_s))
                    spans.append(Span(rank, "host", kind, "", op.unit, op.microbatch, start_s, end_s))
                spans.append(Span(rank, "compute", kind, "", op.unit, op.microbatch, op.start_s, op.end_s))
    clock_s = max(arrivals)
    if schedule.local_sum:
        pulls_s = float(durations.reduce_s.sum())
        spans += [
            Span(rank, "reduce", "reduce", "", 0, -1, clock_s, clock_s + pulls_s) for rank in range(len(arrivals))
        ]
        clock_s += pulls_s
    for kind, seconds in (("optimizer", durations.optimizer_s), ("publish", durations.publish_s)):
        if seconds > 0.0:
            for rank in range(len(arrivals)):
                spans.append(Span(rank, "compute", kind, "", -1, -1, clock_s, clock_s + seconds))
        clock_s += seconds
    return clock_s, spans


def recorded(durations, schedule):
    """A timeline of all minibatches of `durations`, and their makespans in seconds."""
    found = [recorded_spans(durations, schedule, b) for b in range(durations.num_minibatches)]
    return Timeline.from_spans([(b, spans) for b, (_, spans) in enumerate(found)]), [s for s, _ in found]


def run_config(plan, schedule, **fields):
    """What `odc train` would write for this plan."""
    usual = {
        "schedule": schedule,
        "policy": plan.policy,
        "model": "model.json",
        "device": "cuda",
        "compute": "real",
        "world_size": plan.world_size,
        "steps": plan.num_minibatches,
        "seed": 0,
        "gather_dtype": "bf16",
        "reduce_dtype": "fp32",
        "recompute": True,
        "chunked_loss_tokens": 512,
        "learning_rate": 1e-5,
        "max_grad_norm": 1.0,
        "time_scale": 1.0,
        "warmup_steps": 1,
    }
    return RunConfig(**(usual | fields))


def step_rows(plan, makespans_s, **fields):
    """Rows of steps.csv."""
    tokens, samples = (
        np.bincount(plan.ranks() // plan.world_size, each, plan.num_minibatches)
        for each in (plan.tokens(), plan.samples())
    )
    usual = {"loss": 2.0, "grad_norm": 1.0, "mfu": 0.4, "idle_rate": 0.1, "peak_memory_bytes": 0, "between_s": 0.001}
    return [
        StepRow(minibatch=b, makespan_s=s, tokens=int(tokens[b]), samples=int(samples[b]), **(usual | fields))
        for b, s in enumerate(makespans_s)
    ]


def write_run(folder, plan, schedule, hf_config, machine, /, *, change=None, environment=None, **fields):
    """Simulate `plan` on `machine` with the event engine and leave what a trainer would have; returns the folder.

    `change` is given the durations and returns what was executed instead. `fields` are those of RunConfig.
    """
    folder.mkdir(parents=True)
    write_plan(plan, folder / "plan.json", "odc train")
    write_config(folder, run_config(plan, schedule, **fields), "odc train")
    write_environment(folder, "odc train", 0, environment or {})
    write_json(folder / "model.json", hf_config)
    write_steps(folder, step_rows(plan, [1.0] * plan.num_minibatches))
    priced = price(read_run(folder), load_machine(str(machine)))
    durations = priced.durations()
    timeline, makespans_s = recorded(change(durations) if change else durations, priced.schedule)
    timeline.write_parquet(folder / "timeline.parquet", "odc train", 0)
    write_steps(folder, step_rows(plan, makespans_s))
    return folder
