"""A run as `odc train` would have recorded it, had the event engine been the machine."""

from odc_sim.engine_event import _World
from odc_sim.idle import Span
from odc_sim.timeline import Timeline


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
                    start_s = max(op.issue_s - host_s, 0.0)
                    spans.append(Span(rank, "host", kind, "", op.unit, op.microbatch, start_s, op.issue_s))
                if op.end_s > op.start_s:
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
