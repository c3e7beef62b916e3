"""`simulate` and `plan`: a study in, results or a plan out. The command line does nothing else than call these."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from odc_sim.advice import advise
from odc_sim.beyond import beyond
from odc_sim.costs import extrapolated
from odc_sim.emulation import on_one_stream
from odc_sim.errors import InputError, unknown_name
from odc_sim.execution import Executed, Load, build_durations, execute
from odc_sim.idle import Span
from odc_sim.inputs import BOOTSTRAP_STREAM, SHUFFLE_STREAM, Inputs, load_inputs
from odc_sim.length_stats import length_stats
from odc_sim.memory import GatherDtype, MemoryEstimate, Recipe, largest_max_tokens, peak_memory
from odc_sim.memory_moments import Place
from odc_sim.memory_plan import plan_peak
from odc_sim.metrics import bubble_rate, gpu_hours_saved, idle_causes, idle_rate, mfu, speedup
from odc_sim.models import model_flops
from odc_sim.perturbation import Perturbation
from odc_sim.plans import Plan, pad_microbatches, unequal_counts
from odc_sim.policies import POLICIES, lay_out
from odc_sim.progress import Progress
from odc_sim.results import Results, Row
from odc_sim.rivals import larger_microbatches, odc_is_advised, zero1
from odc_sim.schedules import SCHEDULES, Schedule, make_schedule
from odc_sim.study import Study
from odc_sim.transfers import TransferCosts, transfer_costs

LARGEST_WITH_FLOWS = 16
"""Devices up to which a timeline has every flow between ranks."""
OTHER_STRATEGIES = (
    "not in this table: odc sharding plays DDP and ZeRO-1, which where memory holds them meet once a minibatch without "
    "ODC, and HSDP and PaRO, which send less between nodes"
)
BETWEEN_NODES = "several nodes: odc_kernels has run on the GPUs of one host only, its transfers between hosts have not"
CAP_SHARE = 1.05
"""The longest sample is said to bind when it makes the lower bound this much larger than the balanced share."""


def _silent(what: str, done: int, total: int) -> None:
    """The default progress: none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """A study that has been run: its results, and what is needed to look at one minibatch of it."""

    inputs: Inputs
    plans: Mapping[str, Plan | str]
    """By policy; a text says why there is none."""
    executed: Mapping[tuple[str, str], Executed]
    """By (schedule, policy)."""
    results: Results

    def typical_minibatch(self, schedule: str, policy: str) -> int:
        """The minibatch most like all of them together in speedup over the baseline and in both idle rates."""
        base, own = self.executed[_baseline(self.inputs.study)], self.executed[schedule, policy]
        ratio = base.makespan_s / own.makespan_s
        distance = np.abs(ratio / (base.makespan_s.sum() / own.makespan_s.sum()) - 1.0)
        for run in (base, own):
            available_s = self.inputs.study.devices * run.makespan_s
            distance += np.abs((available_s - run.busy_s) / available_s - idle_rate(run, self.inputs.study.devices))
        return int(distance.argmin())

    def play(self, schedule: str, policy: str, minibatch: int) -> tuple[float, list[Span]]:
        """Makespan in seconds and all spans of one minibatch, from the event engine.

        With more than 16 devices ports are taken as uncontended: every flow between every pair of ranks takes too long.
        """
        from odc_sim.engine_event import play

        plan = self.plans[policy]
        assert isinstance(plan, Plan)
        rules = schedule_of(self.inputs.study, schedule)
        if self.inputs.study.devices > LARGEST_WITH_FLOWS:
            rules = replace(rules, port_contention=False)
        load = _load(self.inputs, plan).part(slice(minibatch, minibatch + 1))
        costs = transfers_of(self.inputs, one_sided=rules.one_sided, world_size=self.inputs.study.devices)
        durations = build_durations(load, self.inputs.compute, costs, self.inputs.machine.cluster, rules)
        return play(durations, rules, 0)


PLANNED_WITHOUT = frozenset(
    {
        *("schedule", "baseline", "engine", "barrier", "forward_prefetch", "backward_prefetch", "collectives"),
        *("separate_reduce", "port_contention", "device_speed", "jitter", "stability", "calibration_error"),
        *("sharding", "gather_dtype", "recipe", "chunked_loss_tokens"),
    }
)
"""Fields of a study that no plan depends on."""


def plan(study: Study, policy: str | None = None) -> Plan:
    """Draw a study's lengths and deal them out by one policy (default: the study's only one, or lb-mini).

    Raises:
        InputError: whatever is wrong with the study, or a policy that cannot deal these samples.
    """
    chosen = policy or (study.policy[0] if len(study.policy) == 1 else "lb-mini")
    return plan_of(load_inputs(study), chosen)


def simulate(study: Study, progress: Progress = _silent) -> Results:
    """Run a study: every policy under every schedule that can run it.

    >>> simulate(Study(minibatches=20, policy=("lb-micro", "lb-mini"))).row("odc", "lb-mini").speedup > 1.1
    True

    Raises:
        InputError: whatever is wrong with the study.
    """
    return run_study(study, progress).results


def run_study(study: Study, progress: Progress = _silent, *, rivals: bool = True) -> Simulation:
    """`simulate`, keeping plans and makespans for a closer look.

    `rivals`: before ODC is advised, also try larger microbatches and ZeRO-1 without it.
    """
    simulation = _run(study, progress)
    if rivals and odc_is_advised(simulation.results):
        simulation = replace(simulation, results=_with_rivals(simulation, progress))
    if not study.stability:
        return simulation
    from odc_sim.stability import with_stability

    results = with_stability(simulation.results, study, lambda other, off: _run(other, _silent, off).results, progress)
    return replace(simulation, results=results)


def _with_rivals(simulation: Simulation, progress: Progress) -> Results:
    results, study = simulation.results, simulation.inputs.study

    def run(other: Study) -> Results:
        return _run(other, lambda _, done, total: progress(f"max_tokens {other.max_tokens:,}", done, total)).results

    found = replace(results, larger=larger_microbatches(results, study, run), zero1=zero1(results, study))
    asked = results.rows, results.baseline_row, results.bounds.get("speedup"), _binds(results.bounds)
    return replace(found, advice=advise(*asked, larger=found.larger, zero1=found.zero1))


def _run(study: Study, progress: Progress, perturbation: Perturbation | None = None) -> Simulation:
    """One run; with a perturbation, plans are made with the costs as believed and executed with the perturbed ones."""
    inputs = load_inputs(study)
    study = inputs.study
    base_schedule, base_policy = _baseline(study)
    schedules = [schedule_of(study, name) for name in dict.fromkeys(study.schedule or (s.name for s in SCHEDULES))]
    own = inputs.given.policy if inputs.given else None
    policies = [own] if own else list(dict.fromkeys(study.policy or POLICIES))
    for name in (*policies, base_policy):
        if name not in POLICIES and name != own:
            raise unknown_name("policy", name, POLICIES)
    cells = [(schedule, policy) for policy in policies for schedule in schedules]
    if not any((s.name, p) == (base_schedule, base_policy) for s, p in cells):
        cells.insert(0, (schedule_of(study, base_schedule), base_policy))

    plans: dict[str, Plan | str] = {}
    wanted = list(dict.fromkeys(policy for _, policy in cells))
    for number, name in enumerate(wanted):
        progress(f"balancing {name}", number, len(wanted) + len(cells))
        try:
            plans[name] = inputs.given if inputs.given and name == own else plan_of(inputs, name)
        except InputError as error:
            if len(wanted) == 1 or name == base_policy:
                raise
            plans[name] = f"cannot be planned: {error}"

    compute, transfers = (
        inputs.compute,
        {s.name: transfers_of(inputs, one_sided=s.one_sided, world_size=inputs.study.devices) for s, _ in cells},
    )
    if perturbation is not None:
        compute = perturbation.compute(compute)
        transfers = {s.name: perturbation.transfers(transfers[s.name], one_sided=s.one_sided) for s, _ in cells}
    executed: dict[tuple[str, str], Executed] = {}
    verdicts: dict[tuple[str, str], str] = {}
    for number, (schedule, name) in enumerate(cells):
        progress(f"{schedule.name} with {name}", len(wanted) + number, len(wanted) + len(cells))
        found = plans[name]
        verdict = found if isinstance(found, str) else obstacle(schedule, found)
        if verdict or isinstance(found, str):
            verdicts[schedule.name, name] = verdict or ""
            continue
        executed[schedule.name, name] = execute(
            _load(inputs, found),
            compute,
            transfers[schedule.name],
            inputs.machine.cluster,
            schedule,
            engine=study.engine,
        )
    if (base_schedule, base_policy) not in executed:
        why = verdicts[base_schedule, base_policy]
        raise InputError(f"the baseline {study.baseline} cannot run: {why}; choose another with --baseline")
    results = _results(inputs, cells, plans, executed, verdicts, transfers)
    return Simulation(inputs=inputs, plans=plans, executed=executed, results=results)


def _baseline(study: Study) -> tuple[str, str]:
    schedule, policy = study.baseline.split("/")
    return schedule, policy


def schedule_of(study: Study, name: str) -> Schedule:
    """A schedule with the settings of a study."""
    return make_schedule(
        name,
        barrier=study.barrier,
        forward_prefetch=study.forward_prefetch,
        backward_prefetch=study.backward_prefetch,
        separate_reduce=study.separate_reduce,
        port_contention=study.port_contention,
    )


def transfers_of(inputs: Inputs, *, one_sided: bool, world_size: int) -> TransferCosts:
    """Of a model divided over so many ranks, as the machine runs them."""
    costs = transfer_costs(
        inputs.model,
        inputs.machine.cluster,
        world_size=world_size,
        one_sided=one_sided,
        gather_dtype=inputs.study.gather_dtype,
        collectives=inputs.study.collectives,
        calibration=inputs.machine.calibration,
    )
    return on_one_stream(costs) if inputs.machine.one_stream else costs


def _load(inputs: Inputs, plan: Plan) -> Load:
    return Load.of(plan, inputs.study.device_speed, inputs.study.jitter, inputs.study.seed)


def plan_of(inputs: Inputs, policy: str) -> Plan:
    """The drawn samples dealt out by a policy.

    Raises:
        InputError: the policy cannot deal them.
    """
    study = inputs.study
    layout = lay_out(
        policy,
        inputs.minibatches,
        inputs.lengths,
        study.devices,
        inputs.max_tokens,
        inputs.sample_cost_s,
        np.random.default_rng([study.seed, SHUFFLE_STREAM]),
        study.batch_minibatches,
    )
    made = Plan(
        workload=inputs.workload,
        model=inputs.model.name,
        world_size=study.devices,
        minibatch_size=study.minibatch_size,
        max_tokens=inputs.max_tokens,
        policy=policy,
        balancing_cost={
            "name": study.balancing_cost,
            "source": inputs.compute.source if study.balancing_cost == "calibrated" else "formula in lengths",
        },
        lengths=inputs.lengths,
        groups=inputs.groups,
        seed=study.seed,
        sample_ids=layout.sample_ids,
        microbatch_start=layout.microbatch_start,
        rank_start=layout.rank_start,
        padding=np.zeros(layout.microbatch_start.size - 1, dtype=np.bool_),
    )
    return pad_microbatches(made) if study.pad_microbatches else made


def peak_of(inputs: Inputs, plan: Plan, schedule: str) -> MemoryEstimate:
    """What a rank holds at most when `schedule` runs `plan`."""
    sizing = _sizing(inputs.study, schedule)

    def peak(tokens: int, place: Place) -> MemoryEstimate:
        return peak_memory(inputs.model, microbatch_tokens=tokens, place=place, **sizing)

    return plan_peak(plan, peak)


class _Sizing(TypedDict):
    world_size: int
    schedule: str
    recipe: Recipe
    gather_dtype: GatherDtype
    recompute: bool
    chunked_loss_tokens: int | None


def _sizing(study: Study, schedule: str) -> _Sizing:
    return {
        "world_size": study.devices,
        "schedule": schedule,
        "recipe": study.recipe,
        "gather_dtype": study.gather_dtype,
        "recompute": study.recompute,
        "chunked_loss_tokens": study.chunked_loss_tokens or None,
    }


def obstacle(schedule: Schedule, plan: Plan) -> str | None:
    """Why `schedule` cannot run `plan`, or None."""
    counts = plan.counts()
    if schedule.deferred and not counts.all():
        b, rank = np.argwhere(counts == 0)[0]
        return f"hangs: rank {rank} runs no microbatch in minibatch {b}, so it never joins the unshard and the reduce"
    if not schedule.needs_equal_counts:
        return None
    found = unequal_counts(plan)
    if found is None:
        return None
    uneven = int((counts.max(axis=1) != counts.min(axis=1)).sum())
    return (
        f"hangs: rank {found.rank_a} runs {found.count_a} microbatches, rank {found.rank_b} runs {found.count_b}"
        f" in minibatch {found.minibatch} (counts differ in {uneven} of {plan.num_minibatches} minibatches)"
    )


def _luck(inputs: Inputs, schedule: Schedule, policy: str) -> str | None:
    """A warning for a row that ran although its policy does not promise equal microbatch counts."""
    if not schedule.needs_equal_counts or inputs.study.pad_microbatches:
        return None
    if inputs.given is not None and policy == inputs.given.policy:
        return None  # a plan file is what will be run
    if POLICIES[policy].equal_counts:
        return None
    return (
        f"microbatch counts happened to be equal in these {inputs.study.minibatches} minibatches; nothing promises it, "
        "and where they differ it hangs: use odc, or --pad-microbatches"
    )


def _results(
    inputs: Inputs,
    cells: list[tuple[Schedule, str]],
    plans: Mapping[str, Plan | str],
    executed: Mapping[tuple[str, str], Executed],
    verdicts: Mapping[tuple[str, str], str],
    transfers: Mapping[str, TransferCosts],
) -> Results:
    study = inputs.study
    baseline_s = executed[_baseline(study)].makespan_s
    rows = tuple(
        _row(
            inputs,
            schedule,
            policy,
            plans[policy],
            executed[schedule.name, policy],
            baseline_s,
            transfers[schedule.name],
        )
        if (schedule.name, policy) in executed
        else _empty_row(inputs, schedule, policy, verdicts[schedule.name, policy])
        for schedule, policy in cells
    )
    bounds = _bounds(inputs, baseline_s)
    baseline = next(row for row in rows if row.label == study.baseline)
    sources = (f"compute: {inputs.compute.source}",)
    statistics = length_stats(inputs.lengths, inputs.groups)
    return Results(
        rows=rows,
        bounds=bounds,
        baseline=study.baseline,
        advice=advise(rows, baseline, bounds.get("speedup"), _binds(bounds)),
        notes=(
            *inputs.notes,
            *sources,
            *((inputs.machine.note,) if inputs.machine.note else ()),
            *beyond(inputs, rows, plans),
            _memory_note(inputs),
            *([OTHER_STRATEGIES] if study.devices > 1 else ()),
            *([BETWEEN_NODES] if study.devices > inputs.machine.cluster.devices_per_node else ()),
            *_unusual(study),
        ),
        study=study.model_dump(mode="json"),
        lengths={"name": inputs.workload_name, "max_tokens": inputs.max_tokens, **statistics.as_dict()},
    )


def _binds(bounds: Mapping[str, float]) -> bool:
    """Whether the longest sample of a minibatch sets what no policy beats."""
    return bounds["lower_bound"] > CAP_SHARE * bounds["balanced_share"]


def _memory_note(inputs: Inputs) -> str:
    study, device = inputs.study, inputs.machine.cluster.device
    chunks = (
        f"loss in chunks of {study.chunked_loss_tokens:,} tokens"
        if study.chunked_loss_tokens
        else "loss over all tokens"
    )
    layers = "layers recomputed" if study.recompute else "no recomputation"
    return f"memory: estimate against {device.memory_bytes / 1e9:.1f} GB, recipe {study.recipe}, {layers}, {chunks}"


def _unusual(study: Study) -> list[str]:
    """What differs from the defaults and is not in the table's title, so that no run passes for an ordinary one."""
    fields = (
        *("overlong", "pad_microbatches", "balancing_cost", "batch_minibatches", "barrier", "forward_prefetch"),
        *("backward_prefetch", "collectives", "separate_reduce", "port_contention", "device_speed", "jitter", "engine"),
    )
    return [f"not the default: {name} = {value}" for name, value in study.changed(*fields).items()]


def _bounds(inputs: Inputs, baseline_s: NDArray[np.float64]) -> dict[str, float]:
    """Seconds a minibatch that no policy beats that keeps samples in their minibatch: what samples add, without what
    microbatches cost whatever is in them, times the least that any microbatch costs relative to that."""
    speed = np.array(inputs.study.device_speed or [1.0] * inputs.study.devices)
    shortest = int(inputs.lengths.min(initial=inputs.max_tokens))
    least = inputs.compute.least_of_added((shortest, inputs.max_tokens))
    costs = [least * inputs.compute.sample_cost_s(inputs.lengths[ids]) for ids in inputs.minibatches]
    shares = np.array([cost.sum() / speed.sum() for cost in costs])
    largest = np.array([cost.max(initial=0.0) / speed.max() for cost in costs])
    lower = np.maximum(shares, largest)
    bound = {}
    if lower.sum() > 0.0 and not inputs.study.jitter:  # jitter is in the makespans, but not in these seconds
        bound = {"speedup": float(baseline_s.sum() / lower.sum())}
    return {
        "balanced_share": float(shares.mean()),
        "largest_sample": float(largest.mean()),
        "lower_bound": float(lower.mean()),
        **bound,
    }


def _empty_row(inputs: Inputs, schedule: Schedule, policy: str, verdict: str | None) -> Row:
    study = inputs.study
    return Row(
        workload=inputs.workload_name,
        model=inputs.model.name,
        hardware=inputs.machine.name,
        devices=study.devices,
        minibatch_size=study.minibatch_size,
        minibatches=study.minibatches,
        schedule=schedule.name,
        policy=policy,
        sharding=study.sharding,
        gather_dtype=study.gather_dtype,
        seed=study.seed,
        max_tokens=inputs.max_tokens,
        memory_recipe=study.recipe,
        verdict=verdict,
    )


def _row(
    inputs: Inputs,
    schedule: Schedule,
    policy: str,
    plan: Plan | str,
    run: Executed,
    baseline_s: NDArray[np.float64],
    transfers: TransferCosts,
) -> Row:
    assert isinstance(plan, Plan)  # what was executed was planned
    study, devices = inputs.study, inputs.study.devices
    used = plan.sample_ids
    seconds = float(run.makespan_s.sum()) * devices
    # policies of a whole batch move samples between its minibatches, so these are resampled together
    whole_batch = any(name in POLICIES and POLICIES[name].whole_batch for name in (policy, _baseline(study)[1]))
    faster = speedup(
        baseline_s,
        run.makespan_s,
        study.batch_minibatches if whole_batch else 1,
        np.random.default_rng([study.seed, BOOTSTRAP_STREAM]),
    )
    tokens = plan.tokens()[~plan.padding]
    longest, shortest = int(tokens.max(initial=0)), int(tokens.min()) if tokens.size else 0
    memory = peak_of(inputs, plan, schedule.name)
    limit = inputs.machine.cluster.device.memory_bytes
    outside = extrapolated(inputs.compute, longest) or extrapolated(inputs.compute, shortest)
    percentiles = np.quantile(run.makespan_s, [0.05, 0.5, 0.95])
    counts = plan.counts()
    return replace(
        _empty_row(inputs, schedule, policy, _luck(inputs, schedule, policy)),
        samples_per_s_per_device=used.size / seconds,
        tokens_per_s_per_device=float(plan.lengths[used].sum()) / seconds,
        speedup=faster.value,
        speedup_ci95=(faster.low, faster.high),
        bubble_rate=bubble_rate(run, devices),
        idle_rate=idle_rate(run, devices),
        idle_causes=idle_causes(run, devices),
        mfu=mfu(
            model_flops(inputs.model, plan.lengths[used]),
            run.makespan_s,
            devices,
            inputs.machine.cluster.device.peak_flops,
        ),
        makespan_s=dict(
            zip(("mean", "p5", "p50", "p95"), [float(run.makespan_s.mean()), *map(float, percentiles)], strict=True)
        ),
        gpu_hours_saved_per_1000_steps=gpu_hours_saved(baseline_s, run.makespan_s, devices),
        microbatches={"mean": float(counts.mean()), "max": int(counts.max(initial=0))},
        peak_memory_bytes={**memory.categories, "total": memory.total_bytes},
        inter_node_bytes_per_minibatch=float(run.inter_node_bytes.mean()),
        fits=memory.total_bytes <= limit,
        largest_max_tokens=largest_max_tokens(inputs.model, memory_bytes=limit, **_sizing(study, schedule.name)),
        provenance={
            "compute": "extrapolated" if outside else inputs.compute.provenance,
            "transfers": transfers.provenance,
            "optimizer": transfers.optimizer_provenance,
            "memory": "analytic",
        },
    )
