"""The recurrences of `fully_shard`, compiled: what the event engine plays, as max-plus arithmetic over ranks.

Imported on first use only (numba costs 0.3 s). Letters as in `durations.py`. One minibatch at a time; per microbatch
the loop over units is outside and the loop over ranks inside, since ranks meet at units. `mb[d]` is the microbatch
that rank d runs in the pass at hand, -1 if none: that is how ranks whose last microbatches differ still reduce
together under collective-deferred.

Times per rank are rows of `state`; see the row names below. One file although it is long: numba's cache on disk does
not notice a change in a kernel that is called from another file.
"""

import numpy as np

from odc_sim.compiled import compiled
from odc_sim.durations import Array
from odc_sim.fast_arrays import Inputs, Rules, Scratch

# rows of `state`: when each stream of a rank is free; the `+=` after its last push and what sharing ports added to
# that push
COMPUTE, COPY_IN, UNSHARD, REDUCE, LAST_REDUCE, HOST, PUSH_ADD, PUSH_EXTRA = range(8)
STATE_ROWS = 8
# columns of `ports`: what a rank's ports still have to move
(
    CLOCK,
    PULL_LEFT,
    PULL_START,
    PULL_ALONE,
    PULL_END,
    PULL_UNIT,
    PUSH_LEFT,
    PUSH_START,
    PUSH_ALONE,
    PUSH_END,
    PUSH_PENDING,
) = range(11)
PORT_COLUMNS = 11
# rows of `unit_s`
GATHER, REDUCTION, IN, OUT, PACK, ADD, HOLD = range(7)
# columns of idle_s, in the order of durations.CAUSES
LAYER, MICROBATCH, MINIBATCH, CONTENTION, EXPOSED_UNSHARD, EXPOSED_REDUCE, SLOWDOWN, HOST_CAUSE, OPTIMIZER, PUBLISH = (
    range(10)
)
SHARD_COMMUNICATOR, REDUCE_COMMUNICATOR = range(2)


# ---- ports of one rank: its pull (gather) and its push (scatter_accumulate) each get half while both run


@compiled
def _ports_until(port: Array, until_s: float, until_pull: bool, until_push: bool) -> None:
    """Advance a rank's transfers to `until_s`, or until the pull or the push has ended. port [PORT_COLUMNS]"""
    clock, pull, push = port[CLOCK], port[PULL_LEFT], port[PUSH_LEFT]
    while clock < until_s:
        if (until_pull and pull == 0.0) or (until_push and push == 0.0) or (pull == 0.0 and push == 0.0):
            break
        both = pull > 0.0 and push > 0.0
        first = min(pull, push) if both else max(pull, push)
        step = 2.0 * first if both else first
        if clock + step > until_s:
            step = until_s - clock
            first = 0.5 * step if both else step
        clock += step
        if pull > 0.0:
            pull = max(pull - first, 0.0)
            port[PULL_END] = clock
        if push > 0.0:
            push = max(push - first, 0.0)
            port[PUSH_END] = clock
    if until_s < np.inf:
        clock = max(clock, until_s)
    port[CLOCK], port[PULL_LEFT], port[PUSH_LEFT] = clock, pull, push


@compiled
def _finish_pulls(s: Scratch, rules: Rules) -> None:
    """The ends of the pulls under way are needed: nothing else can start before, so their speed is known.

    Collectives share ports only across two communicators; all ranks are then at the same point and row 0 stands for
    all.
    """
    ports, unshard, gather_end, gather_extra = s.ports, s.state[UNSHARD], s.gather_end, s.gather_extra
    ranks = s.mb.shape[0]
    for d in range(ranks if rules.one_sided else 1):
        port = ports[d]
        if port[PULL_UNIT] < 0.0:
            continue
        u = int(port[PULL_UNIT])
        _ports_until(port, np.inf, True, False)
        end = port[PULL_END]
        for e in range(d if rules.one_sided else 0, d + 1 if rules.one_sided else ranks):
            gather_end[u, e] = end
            gather_extra[u, e] = end - port[PULL_START] - port[PULL_ALONE]
            unshard[e] = max(unshard[e], end)
        if not rules.one_sided:
            s.chain[SHARD_COMMUNICATOR] = end
        port[PULL_UNIT] = -1.0


@compiled
def _finish_pushes(s: Scratch, rules: Rules, needed: Array) -> None:
    """The ends of the pushes under way are needed by ranks whose `needed` [D] is not -inf.

    Others must go on sharing: a push whose end is asked for too early would keep its rank's next pull waiting.
    """
    ports, ranks = s.ports, s.mb.shape[0]
    last_reduce, reduce, add, extra = s.state[LAST_REDUCE], s.state[REDUCE], s.state[PUSH_ADD], s.state[PUSH_EXTRA]
    for d in range(ranks if rules.one_sided else 1):
        port = ports[d]
        if port[PUSH_PENDING] == 0.0 or needed[d] == -np.inf:
            continue
        _ports_until(port, np.inf, False, True)
        end = port[PUSH_END]
        for e in range(d if rules.one_sided else 0, d + 1 if rules.one_sided else ranks):
            last_reduce[e] = end
            reduce[e] = end + add[e]
            extra[e] = end - port[PUSH_START] - port[PUSH_ALONE]
        if not rules.one_sided:
            s.chain[REDUCE_COMMUNICATOR] = end
        port[PUSH_PENDING] = 0.0


@compiled
def _credit(clock: float, start: float, other_start: float) -> float:
    """Seconds of work done before `clock`, to which the ports have been advanced, by a transfer that began at `start`.

    It had the ports to itself until the other one began, and half of them from then on.
    """
    if start >= clock:
        return 0.0
    alone_until = min(max(other_start, start), clock)
    return alone_until - start + 0.5 * (clock - alone_until)


@compiled
def _start_pull(port: Array, u: int, start: float, seconds: float) -> None:
    _ports_until(port, start, False, False)
    done = _credit(port[CLOCK], start, port[PUSH_START])
    port[PULL_LEFT], port[PULL_ALONE], port[PULL_START], port[PULL_UNIT] = max(seconds - done, 0.0), seconds, start, u
    port[PULL_END] = port[CLOCK] if done < seconds else start + seconds


@compiled
def _start_push(port: Array, start: float, seconds: float) -> None:
    _ports_until(port, start, False, False)
    done = _credit(port[CLOCK], start, port[PULL_START])
    port[PUSH_LEFT], port[PUSH_ALONE], port[PUSH_START] = max(seconds - done, 0.0), seconds, start
    port[PUSH_END] = port[CLOCK] if done < seconds else start + seconds
    port[PUSH_PENDING] = 1.0


# ---- idle causes; the rule is that of idle.py


@compiled
def _wait(
    s: Scratch, idle: Array, until: Array, at: int, issue: Array, extra: Array, exposed: int, seconds: float
) -> None:
    """Compute streams wait `until` [D] and then copy for `seconds`.

    The gap was ended by the collective logged `at` (-1: by the rank's own transfer), which the host issued at `issue`
    [D] and sharing ports made `extra` [D] longer.
    """
    mb, compute, log_start, log_free, communicator = s.mb, s.state[COMPUTE], s.log_start, s.log_free, s.log_communicator
    for d in range(mb.shape[0]):
        if mb[d] < 0:
            continue
        gap_start, gap_end = compute[d], until[d]
        if gap_end > gap_start:
            left = gap_end - gap_start
            y = at
            while y >= 0:
                if communicator[y] == communicator[at]:
                    if log_start[y] <= gap_start:
                        break
                    part = min(gap_end, log_start[y]) - max(gap_start, log_free[y, d])
                    if part > 0.0:
                        idle[d, s.log_cause[y]] += part
                        left -= part
                y -= 1
            part = min(max(issue[d] - gap_start, 0.0), left)
            idle[d, HOST_CAUSE] += part
            left -= part
            part = min(max(extra[d], 0.0), left)
            idle[d, CONTENTION] += part
            idle[d, exposed] += left - part + seconds
            compute[d] = gap_end + seconds
        else:
            idle[d, exposed] += seconds
            compute[d] = gap_start + seconds


# ---- operations, each for all ranks that run a microbatch in this pass


@compiled
def _collective(s: Scratch, alone: float, stretch: Array, stretched: bool, cause: int, c: int) -> tuple[float, float]:
    """All ranks meet at a collective of communicator `c`: its (start, seconds) with free ports. `alone`: seconds
    beside nothing."""
    ready, mb, chain, x = s.ready, s.mb, s.chain[c], s.counter[0]
    free = s.log_free[x]
    arrival, longest = 0.0, 1.0
    for d in range(ready.shape[0]):
        arrival = max(arrival, ready[d])
        free[d] = max(ready[d], chain)
        if stretched:
            longest = max(longest, stretch[mb[d], d])
    start, seconds = max(arrival, chain), alone * longest
    s.log_start[x], s.log_cause[x], s.log_communicator[x] = start, cause, c
    s.counter[0] = x + 1
    s.chain[c] = start + seconds
    return start, seconds


@compiled
def _gather(b: int, u: int, backward: bool, inp: Inputs, s: Scratch, rules: Rules) -> None:
    state, mb, gate, ready = s.state, s.mb, s.gate, s.ready
    copy_in, unshard, host, issue, extra, ends = (
        state[COPY_IN],
        state[UNSHARD],
        state[HOST],
        s.gather_issue[u],
        s.gather_extra[u],
        s.gather_end[u],
    )
    ranks, copy_s, alone = mb.shape[0], inp.unit_s[IN, u], inp.unit_s[GATHER, u]
    stretched = backward or u >= 2
    stretch = inp.gather_backward_stretch[b] if backward else inp.gather_forward_stretch[b]
    if rules.share_ports:
        _finish_pulls(s, rules)
    for d in range(ranks):
        if mb[d] >= 0:
            copy_in[d] = max(copy_in[d], gate[d], host[d]) + copy_s
            ready[d] = max(unshard[d], gate[d], copy_in[d])
            issue[d] = host[d]
            extra[d] = 0.0
    if not rules.one_sided:
        s.gather_at[u] = s.counter[0]
        start, seconds = _collective(s, alone, stretch, stretched, LAYER, SHARD_COMMUNICATOR)
        if rules.share_ports:
            _start_pull(s.ports[0], u, start, seconds)
        else:
            ends[:] = start + seconds
            unshard[:] = start + seconds
        return
    s.gather_at[u] = 0
    for d in range(ranks):
        if mb[d] >= 0:
            seconds = alone * (stretch[mb[d], d] if stretched else 1.0)
            if rules.share_ports:
                _start_pull(s.ports[d], u, ready[d], seconds)
            else:
                ends[d] = ready[d] + seconds
                unshard[d] = ends[d]


@compiled
def _copy_out(u: int, stretch: float, inp: Inputs, s: Scratch, rules: Rules, idle: Array) -> None:
    if rules.share_ports:
        _finish_pulls(s, rules)
    at = -1 if rules.one_sided else s.gather_at[u]
    seconds = inp.unit_s[OUT, u] * stretch
    _wait(s, idle, s.gather_end[u], at, s.gather_issue[u], s.gather_extra[u], EXPOSED_UNSHARD, seconds)
    s.copy_outs[u, :] = s.state[COMPUTE]
    s.gather_at[u] = -1


@compiled
def _streams_wait(s: Scratch, times: Array) -> None:
    """copy-in and gather streams wait for `times` [D]."""
    mb, copy_in, unshard = s.mb, s.state[COPY_IN], s.state[UNSHARD]
    for d in range(mb.shape[0]):
        if mb[d] >= 0:
            copy_in[d] = max(copy_in[d], times[d])
            unshard[d] = max(unshard[d], times[d])


@compiled
def _compute(table: Array, k: int, host_s: float, meets: bool, s: Scratch, idle: Array) -> None:
    """table [M, K, D]: every rank computes its microbatch's slot of class k."""
    mb, compute, host = s.mb, s.state[COMPUTE], s.state[HOST]
    latest = 0.0
    if host_s > 0.0 or meets:
        for d in range(mb.shape[0]):
            if mb[d] >= 0:
                host[d] += host_s
                if host[d] > compute[d]:
                    idle[d, HOST_CAUSE] += host[d] - compute[d]
                    compute[d] = host[d]
                latest = max(latest, compute[d])
    for d in range(mb.shape[0]):
        if mb[d] >= 0:
            if meets:
                idle[d, LAYER] += latest - compute[d]
                compute[d] = latest
            compute[d] += table[mb[d], k, d]


@compiled
def _hold(u: int, first_too: bool, inp: Inputs, s: Scratch, idle: Array) -> None:
    """Gradients not reduced yet are cast or added into their sum; with `first_too` false only where there is a sum."""
    mb, compute, seconds = s.mb, s.state[COMPUTE], inp.unit_s[HOLD, u]
    for d in range(mb.shape[0]):
        if mb[d] > 0 or (first_too and mb[d] == 0):
            compute[d] += seconds
            idle[d, EXPOSED_REDUCE] += seconds


@compiled
def _reduce(b: int, u: int, inp: Inputs, s: Scratch, rules: Rules, idle: Array) -> None:
    state, unit_s, mb, ready = s.state, inp.unit_s, s.mb, s.ready
    compute, reduce, last_reduce, add = state[COMPUTE], state[REDUCE], state[LAST_REDUCE], state[PUSH_ADD]
    if rules.share_ports:
        for d in range(mb.shape[0]):
            ready[d] = 0.0 if mb[d] >= 0 else -np.inf
        _finish_pushes(s, rules, ready)
    at = -1 if rules.one_sided else s.counter[1]
    _wait(s, idle, last_reduce, at, s.never, state[PUSH_EXTRA], EXPOSED_REDUCE, unit_s[PACK, u])  # edge 8
    for d in range(mb.shape[0]):
        if mb[d] >= 0:
            ready[d] = max(reduce[d], compute[d])
            add[d] = unit_s[ADD, u] if s.reductions[d] >= unit_s.shape[1] else 0.0
            s.reductions[d] += 1
    if not rules.one_sided:
        cause = MINIBATCH if rules.deferred else (MICROBATCH if u == 0 else LAYER)
        s.counter[1] = s.counter[0]
        c = REDUCE_COMMUNICATOR if rules.separate_reduce else SHARD_COMMUNICATOR
        start, seconds = _collective(s, unit_s[REDUCTION, u], inp.reduce_stretch[b], u >= 2, cause, c)
        if rules.share_ports:
            _start_push(s.ports[0], start, seconds)
        else:
            for d in range(mb.shape[0]):
                last_reduce[d] = start + seconds
                reduce[d] = start + seconds + add[d]
        return
    for d in range(mb.shape[0]):
        if mb[d] >= 0:
            seconds = unit_s[REDUCTION, u] * (inp.reduce_stretch[b, mb[d], d] if u >= 2 else 1.0)
            if rules.share_ports:
                _start_push(s.ports[d], ready[d], seconds)
            else:
                last_reduce[d] = ready[d] + seconds
                reduce[d] = last_reduce[d] + add[d]


@compiled
def _post_backward(b: int, u: int, reduces: bool, inp: Inputs, s: Scratch, rules: Rules, idle: Array) -> None:
    if not reduces or rules.deferred:
        _hold(u, not reduces, inp, s, idle)
    if reduces:
        _reduce(b, u, inp, s, rules, idle)


# ---- passes


@compiled
def _forward(b: int, gathers: bool, inp: Inputs, s: Scratch, rules: Rules, idle: Array) -> None:
    units = inp.unit_s.shape[1]
    if gathers:
        _streams_wait(s, s.state[COMPUTE])  # edge 1
    for u in range(units):
        if gathers:
            for d in range(s.mb.shape[0]):  # edge 2
                s.gate[d] = s.copy_outs[u - rules.forward_prefetch, d] if u >= rules.forward_prefetch else -np.inf
            _gather(b, u, False, inp, s, rules)
            _copy_out(u, 1.0, inp, s, rules, idle)
        _compute(inp.forward_s[b], inp.slot_class[u], rules.host_forward_s, rules.barrier_layer, s, idle)
    _compute(inp.forward_s[b], inp.slot_class[units], 0.0, False, s, idle)
    if gathers:
        _streams_wait(s, s.copy_outs[units - 1])  # edge 5


@compiled
def _backward(b: int, gathers: bool, reduces: bool, inp: Inputs, s: Scratch, rules: Rules, idle: Array) -> None:
    units = inp.unit_s.shape[1]
    s.gate[:] = -np.inf
    if gathers and units > 1:
        _gather(b, units - 1, True, inp, s, rules)  # edge 6
    _compute(inp.backward_s[b], inp.slot_class[units], 0.0, False, s, idle)
    for u in range(units - 1, 0, -1):
        if gathers:
            if s.gather_at[u] < 0:
                _gather(b, u, True, inp, s, rules)
            _copy_out(u, rules.copy_out_stretch if reduces and u < units - 1 else 1.0, inp, s, rules, idle)
            _streams_wait(s, s.copy_outs[u])  # edge 7
            for v in range(u - 1, max(u - 1 - rules.backward_prefetch, 0), -1):
                if s.gather_at[v] < 0:
                    _gather(b, v, True, inp, s, rules)
        _compute(inp.backward_s[b], inp.slot_class[u], rules.host_backward_s, rules.barrier_layer, s, idle)
        _post_backward(b, u, reduces, inp, s, rules, idle)
    _compute(inp.backward_s[b], inp.slot_class[0], 0.0, False, s, idle)
    _post_backward(b, 0, reduces, inp, s, rules, idle)


@compiled
def _finalize(last_only: bool, b: int, inp: Inputs, s: Scratch, rules: Rules, idle: Array) -> None:
    """Edge 12: compute streams wait for every reduction; with `last_only` those of ranks at their last microbatch."""
    mb, until = s.mb, s.ready
    for d in range(mb.shape[0]):
        ends = mb[d] >= 0 and (not last_only or mb[d] == inp.counts[b, d] - 1)
        until[d] = 0.0 if ends else -np.inf
    if rules.share_ports:
        _finish_pushes(s, rules, until)
    for d in range(mb.shape[0]):
        if until[d] != -np.inf:
            until[d] = s.state[REDUCE, d]
            s.state[LAST_REDUCE, d] = -np.inf
    _wait(s, idle, until, -1 if rules.one_sided else s.counter[1], s.never, s.state[PUSH_EXTRA], EXPOSED_REDUCE, 0.0)


@compiled
def _meet(s: Scratch, idle: Array, cause: int) -> float:
    latest = 0.0
    for d in range(s.mb.shape[0]):
        latest = max(latest, s.state[COMPUTE, d])
    for d in range(s.mb.shape[0]):
        idle[d, cause] += latest - s.state[COMPUTE, d]
        s.state[COMPUTE, d] = latest
    return latest


@compiled
def _deferred_minibatch(b: int, most: int, inp: Inputs, s: Scratch, rules: Rules, idle: Array) -> None:
    """All ranks gather in their first forward and reduce in their last backward; in between each is on its own."""
    ranks, counts = s.mb.shape[0], inp.counts[b]
    s.mb[:] = 0
    _forward(b, True, inp, s, rules, idle)
    for m in range(most - 1):
        for d in range(ranks):
            s.mb[d] = m if m < counts[d] - 1 else -1
        _backward(b, False, False, inp, s, rules, idle)
        for d in range(ranks):
            s.mb[d] = m + 1 if m + 1 < counts[d] else -1
        _forward(b, False, inp, s, rules, idle)
    for d in range(ranks):
        s.mb[d] = counts[d] - 1
    _backward(b, False, True, inp, s, rules, idle)
    _finalize(False, b, inp, s, rules, idle)


@compiled
def run_minibatches(
    first: int, last: int, inp: Inputs, s: Scratch, rules: Rules, makespan_s: Array, idle_s: Array
) -> None:
    """Minibatches first..last-1 into makespan_s [B] and idle_s [B, D, causes]."""
    ranks = inp.counts.shape[1]
    for b in range(first, last):
        idle = idle_s[b]
        s.state[:] = 0.0
        s.state[HOST] = -rules.host_lead_s
        s.state[LAST_REDUCE] = -np.inf
        s.ports[:] = 0.0
        s.ports[:, PULL_UNIT] = -1.0
        s.gather_at[:] = -1
        s.chain[:] = 0.0
        s.reductions[:] = 0
        s.counter[:] = 0
        most = inp.counts[b].max()
        if rules.deferred and most > 0:
            _deferred_minibatch(b, most, inp, s, rules, idle)
        else:
            for m in range(most):
                for d in range(ranks):
                    s.mb[d] = m if m < inp.counts[b, d] else -1
                if not rules.one_sided:
                    s.counter[:] = 0  # every collective of an earlier microbatch has ended before this one starts
                _forward(b, True, inp, s, rules, idle)
                _backward(b, True, not rules.local_sum, inp, s, rules, idle)
                _finalize(rules.overlap_tail, b, inp, s, rules, idle)
                if rules.barrier_microbatch:
                    _meet(s, idle, MICROBATCH)
        end = _meet(s, idle, MINIBATCH)
        if rules.local_sum:
            pulls = inp.unit_s[REDUCTION].sum()
            idle[:, EXPOSED_REDUCE] += pulls
            end += pulls
        makespan_s[b] = end + rules.end_s
