"""`simulate` and `plan`: a study in, results or a plan out. The command line does nothing else than call these."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from odc_sim.advice import advise
from odc_sim.bounds import bounds_of, longest_sample_binds
from odc_sim.errors import InputError, unknown_name
from odc_sim.execution import Executed, build_durations, execute
from odc_sim.idle import Span
from odc_sim.inputs import Inputs, load_inputs
from odc_sim.length_stats import length_stats
from odc_sim.metrics import idle_rate
from odc_sim.notes import notes_of
from odc_sim.parts import baseline_of, load_of, plan_of, schedule_of, transfers_of
from odc_sim.perturbation import Perturbation
from odc_sim.plans import Plan
from odc_sim.policies import POLICIES
from odc_sim.progress import Progress
from odc_sim.results import Results
from odc_sim.rivals import odc_is_advised, rivals_of
from odc_sim.rows import empty_row, row_of
from odc_sim.schedules import SCHEDULES, Schedule, obstacle
from odc_sim.study import Study
from odc_sim.transfers import TransferCosts

LARGEST_WITH_FLOWS = 16
"""Devices up to which a timeline has every flow between ranks."""


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
        base, own = self.executed[baseline_of(self.inputs.study)], self.executed[schedule, policy]
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
        load = load_of(self.inputs, plan).part(slice(minibatch, minibatch + 1))
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

    `rivals`: also try what does without ODC besides the table's rows.
    """
    simulation = _run(study, progress)
    simulation = replace(simulation, results=_with_advice(simulation, progress, tried=rivals))
    if not study.stability:
        return simulation
    from odc_sim.stability import with_stability

    results = with_stability(simulation.results, study, lambda other, off: _run(other, _silent, off).results, progress)
    return replace(simulation, results=results)


def _with_advice(simulation: Simulation, progress: Progress, *, tried: bool) -> Results:
    results, inputs = simulation.results, simulation.inputs

    def run(other: Study) -> Results:
        what = "padded" if other.pad_microbatches else f"max_tokens {other.max_tokens:,}"
        return _run(other, lambda _, done, total: progress(what, done, total)).results

    found = rivals_of(results, inputs, run) if tried else ()
    untried = ""
    if odc_is_advised(results) and (not tried or inputs.given is not None):
        why = ", since a plan is given" if tried else ""
        untried = f"Larger microbatches, padding and other sharding were not tried{why}."
    advice = advise(
        results.rows,
        results.baseline_row,
        results.bounds.get("speedup"),
        longest_sample_binds(results.bounds),
        found,
        untried,
        longest_tokens=int(inputs.lengths.max(initial=0)),
    )
    return replace(results, rivals=found, advice=advice)


def _run(study: Study, progress: Progress, perturbation: Perturbation | None = None) -> Simulation:
    """One run; with a perturbation, plans are made with the costs as believed and executed with the perturbed ones."""
    inputs = load_inputs(study)
    study = inputs.study
    base_schedule, base_policy = baseline_of(study)
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

    compute = inputs.compute
    transfers = {s.name: transfers_of(inputs, one_sided=s.one_sided, world_size=study.devices) for s, _ in cells}
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
            load_of(inputs, found),
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


def _results(
    inputs: Inputs,
    cells: list[tuple[Schedule, str]],
    plans: Mapping[str, Plan | str],
    executed: Mapping[tuple[str, str], Executed],
    verdicts: Mapping[tuple[str, str], str],
    transfers: Mapping[str, TransferCosts],
) -> Results:
    study = inputs.study
    baseline_s = executed[baseline_of(study)].makespan_s
    rows = []
    for schedule, policy in cells:
        run, made = executed.get((schedule.name, policy)), plans[policy]
        if run is None:
            rows.append(empty_row(inputs, schedule, policy, verdicts[schedule.name, policy]))
        else:
            assert isinstance(made, Plan)  # what was executed was planned
            rows.append(row_of(inputs, schedule, policy, made, run, baseline_s, transfers[schedule.name]))
    bounds = bounds_of(inputs, baseline_s)
    statistics = length_stats(inputs.lengths, inputs.groups)
    return Results(
        rows=tuple(rows),
        bounds=bounds,
        baseline=study.baseline,
        advice="",  # once rivals were tried
        notes=notes_of(inputs, rows, plans),
        study=study.model_dump(mode="json"),
        lengths={"name": inputs.workload_name, "max_tokens": inputs.max_tokens, **statistics.as_dict()},
    )
