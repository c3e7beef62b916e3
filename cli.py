"""The `odc` command. Parses, calls the packages, prints; the only module that may import both odc_sim and odc_kernels.

Everything heavy is imported inside the commands, so that `odc --help` answers at once.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from odc_sim.progress import Progress, progress_bar
from odc_sim.sweep_command import FIELDS_AS_FLAGS, StudyHelp, SweepHelp, run_command

if TYPE_CHECKING:
    from rich.console import Console

    from odc_sim.api import Simulation
    from odc_sim.doctor import Check
    from odc_sim.length_stats import LengthStats
    from odc_sim.study import Study
    from odc_sim.workload import Workload as LoadedWorkload

app = typer.Typer(
    name="odc",
    help="What would on-demand communication and better balancing bring on your lengths, model and cluster?",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
INTERRUPTED = "interrupted; every file that was written is whole"
LARGEST_TIMELINE_SPANS = 200_000

Option = typer.Option
Workload = Annotated[
    str | None,
    Option(help="built-in workload or workload TOML (see: odc workloads)  [default: longalign]", show_default=False),
]
LengthsFile = Annotated[Path | None, Option(help="your own lengths: .txt, .csv, .jsonl or .parquet")]
Column = Annotated[str | None, Option(help="column of --lengths")]
Model = Annotated[
    str | None, Option(help="built-in model or Hugging Face config.json (see: odc models)  [default: qwen2.5-1.5b]")
]
Hardware = Annotated[
    str | None,
    Option(
        help="built-in hardware, cluster TOML or calibration.json (see: odc hardware)  [default: a100-nvswitch-roce]"
    ),
]
Devices = Annotated[int | None, Option(help="GPUs  [default: 8]")]
MinibatchSize = Annotated[int | None, Option(help="samples a GPU between optimizer steps  [default: 4]")]
Minibatches = Annotated[int | None, Option(help="optimizer steps to simulate  [default: 100]")]
MaxTokens = Annotated[int | None, Option(help="token cap of a microbatch  [default: the longest possible sample]")]
Overlong = Annotated[str | None, Option(help="samples over the cap: error, drop, clip or scale  [default: error]")]
Scale = Annotated[float | None, Option(help="multiply every length")]
Policies = Annotated[list[str] | None, Option("--policy", help="balancing policy, repeatable  [default: all]")]
Schedules = Annotated[list[str] | None, Option("--schedule", help="schedule, repeatable  [default: all]")]
Cost = Annotated[str | None, Option(help="what policies balance: calibrated, flops, quadratic or tokens")]
Pad = Annotated[bool | None, Option("--pad-microbatches", help="pad unequal microbatch counts with empty ones")]
Seed = Annotated[int | None, Option(help="seed of lengths, shuffles and jitter  [default: 0]")]
Config = Annotated[Path | None, Option(help="study TOML; a flag of the same name overrides it")]


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """User mistakes end in one line and exit code 2, runs that broke in exit code 1, Ctrl-C in 130; all else is a bug
    and shows itself."""
    from odc_sim.errors import InputError, RunError

    try:
        yield
    except (InputError, RunError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2 if isinstance(error, InputError) else 1) from None
    except (KeyboardInterrupt, SystemError) as error:
        if not _is_interrupt(error):
            raise
        typer.echo(INTERRUPTED, err=True)
        raise typer.Exit(130) from None


def _is_interrupt(error: BaseException | None) -> bool:
    """Compiled code reports an interrupt as a SystemError that was caused by it, sometimes through another one."""
    while isinstance(error, SystemError):
        error = error.__cause__ or error.__context__
    return isinstance(error, KeyboardInterrupt)


def _study(config: Path | None, flags: dict[str, Any], ctx: typer.Context) -> "Study":
    """A study from the flags that were given, those that only `ctx` has included, over those of `config`."""
    from odc_sim.errors import InputError
    from odc_sim.study import load_study, make_study
    from odc_sim.sweep_flags import fields_from_flags

    own = {name for parameter in ctx.command.params for name in parameter.opts}
    given = fields_from_flags(ctx.args, own)
    given |= {name: value for name, value in flags.items() if value is not None and value != []}
    for name in ("policy", "schedule"):
        if name in given:
            names = tuple(part.strip() for value in given[name] for part in value.split(",") if part.strip())
            if not names:
                raise InputError(f"--{name}: got no name; leave it out for all of them")
            given[name] = names
    return load_study(config, given) if config else make_study(given)


def _console() -> "Console":
    """Standard output; 120 columns where nothing says how wide it is."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 120)


def _command() -> str:
    """The command line as typed, for the files it leaves behind."""
    import shlex

    return shlex.join(["odc", *sys.argv[1:]])


@app.command(cls=StudyHelp, context_settings=dict(FIELDS_AS_FLAGS), options_metavar="[OPTIONS] [--FIELD VALUE]")
def simulate(
    ctx: typer.Context,
    workload: Workload = None,
    lengths: LengthsFile = None,
    column: Column = None,
    model: Model = None,
    hardware: Hardware = None,
    devices: Devices = None,
    minibatch_size: MinibatchSize = None,
    minibatches: Minibatches = None,
    max_tokens: MaxTokens = None,
    overlong: Overlong = None,
    scale: Scale = None,
    policy: Policies = None,
    schedule: Schedules = None,
    baseline: Annotated[str | None, Option(help="schedule/policy of speedup 1  [default: collective/lb-micro]")] = None,
    balancing_cost: Cost = None,
    pad_microbatches: Pad = None,
    sharding: Annotated[
        str | None, Option(help="zero3: parameters, gradients and optimizer state over all GPUs")
    ] = None,
    gather_dtype: Annotated[str | None, Option(help="bf16 or fp32 parameters on the wire  [default: bf16]")] = None,
    barrier: Annotated[str | None, Option(help="where odc ranks meet: layer, microbatch or minibatch")] = None,
    jitter: Annotated[float | None, Option(help="spread of a random factor on compute times (0.05 = 5 %)")] = None,
    engine: Annotated[str | None, Option(help="fast, or event (the slow reference)")] = None,
    seed: Seed = None,
    stability: Annotated[
        int | None, Option(help="repeat with this many other seeds and costs: does the best stay best?")
    ] = None,
    calibration_error: Annotated[
        float | None, Option(help="how far off costs are in those repeats  [default: 0.05]")
    ] = None,
    plan: Annotated[Path | None, Option(help="simulate this plan.json instead of drawing lengths")] = None,
    save_plan: Annotated[Path | None, Option(help="write the plan of the single --policy here")] = None,
    out: Annotated[Path | None, Option(help="folder for tables, plots and trace  [default: reports/WORKLOAD]")] = None,
    json_file: Annotated[
        Path | None, Option("--json", help="also write results.json here; - for standard output")
    ] = None,
    config: Config = None,
) -> None:
    """Speedup and idle time of every policy under every schedule.

    Example:  odc simulate --workload longalign --model qwen2.5-7b --minibatch-size 8
    """
    fields = dict(locals())
    for name in ("ctx", "save_plan", "out", "json_file", "config"):
        fields.pop(name)
    with _one_line_errors():
        from odc_sim.api import run_study
        from odc_sim.errors import InputError
        from odc_sim.plans import Plan, write_plan
        from odc_sim.report import make_directory, write_report

        study = _study(config, fields, ctx)
        if save_plan is not None and plan is not None:
            raise InputError("--save-plan with --plan: there is nothing to plan; leave one out")
        if save_plan is not None and len(study.policy) != 1:
            raise InputError(f"--save-plan needs exactly one --policy, got {len(study.policy)}")
        if out is not None and out.exists():
            make_directory(out)  # a wrong --out should not cost a simulation
        with progress_bar() as progress:
            simulation = run_study(study, progress)
            results = simulation.results
            folder = out or Path("reports") / _folder_name(simulation.inputs.workload_name)
            make_directory(folder)
            panels, timelines, note = _panels(simulation, progress)
        if json_file is not None and str(json_file) == "-":
            import json

            typer.echo(json.dumps(results.as_dict(_command()), indent=1))
        else:
            _print(simulation, note)
        if json_file is not None and str(json_file) != "-":
            results.write_json(json_file, _command())
        if save_plan is not None:
            made = simulation.plans[study.policy[0]]
            if not isinstance(made, Plan):
                raise InputError(f"--save-plan: {study.policy[0]} {made}")
            write_plan(made, save_plan, _command())
        written = write_report(folder, results, _command(), panels=panels, timelines=timelines)
        typer.echo(f"wrote {', '.join(path.name for path in written)} to {folder}", err=True)


def _folder_name(workload: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in workload).strip(".") or "study"


def _print(simulation: "Simulation", note: str) -> None:
    from odc_sim.table import print_results

    print_results(simulation.results, _console())
    if note:
        typer.echo(note)


def _panels(simulation: "Simulation", progress: Progress) -> tuple[Any, Any, str]:
    """One typical minibatch under the baseline and under the recommended row, for the timeline picture and trace."""
    from odc_sim.advice import advised_row
    from odc_sim.timeline import Timeline

    study, results = simulation.inputs.study, simulation.results
    base_schedule, base_policy = study.baseline.split("/")
    baseline = results.row(base_schedule, base_policy)
    others = [row for row in results.rows if row.runs and row is not baseline]
    advised = advised_row(results.rows, baseline)
    # what is recommended, or where that is the baseline the best that ODC would do
    best = max(others, key=lambda row: (row is advised, row.schedule == "odc", row.speedup or 0.0), default=None)
    shown = [(base_schedule, base_policy)] + ([(best.schedule, best.policy)] if best else [])
    minibatch = simulation.typical_minibatch(*shown[-1])
    counts = [int(p.counts()[minibatch].sum()) for p in simulation.plans.values() if not isinstance(p, str)]
    spans = max(counts) * (simulation.inputs.model.layers + 1) * 8
    if spans > LARGEST_TIMELINE_SPANS:
        return (
            None,
            None,
            f"no timeline: one minibatch would have about {spans:,} spans (limit {LARGEST_TIMELINE_SPANS:,})",
        )
    panels, timelines = [], {}
    for number, (schedule, policy) in enumerate(shown):
        progress("timeline of one minibatch", number, len(shown))
        makespan_s, found = simulation.play(schedule, policy, minibatch)
        panels.append((f"{schedule} + {policy}, minibatch {minibatch}", makespan_s, found))
        timelines["timeline" if number == len(shown) - 1 else "timeline-baseline"] = Timeline.from_spans(
            [(minibatch, found)]
        )
    return panels, timelines, ""


@app.command(cls=StudyHelp, context_settings=dict(FIELDS_AS_FLAGS), options_metavar="[OPTIONS] [--FIELD VALUE]")
def plan(
    ctx: typer.Context,
    out: Annotated[Path, Option(help="the plan.json to write")],
    workload: Workload = None,
    lengths: LengthsFile = None,
    column: Column = None,
    model: Model = None,
    hardware: Hardware = None,
    devices: Devices = None,
    minibatch_size: MinibatchSize = None,
    minibatches: Minibatches = None,
    max_tokens: MaxTokens = None,
    overlong: Overlong = None,
    scale: Scale = None,
    policy: Annotated[str | None, Option(help="balancing policy  [default: lb-mini]")] = None,
    balancing_cost: Cost = None,
    pad_microbatches: Pad = None,
    seed: Seed = None,
    config: Config = None,
) -> None:
    """Deal samples out to ranks and microbatches; the file is what simulate --plan executes.

    Example:  odc plan --workload swesmith --devices 16 --policy lb-mini --out plan.json
    """
    fields = dict(locals())
    for name in ("ctx", "out", "config"):
        fields.pop(name)
    fields["policy"] = [policy] if policy else None
    with _one_line_errors():
        from odc_sim.errors import InputError

        if policy and "," in policy:
            raise InputError(f"--policy: got {policy!r}, expected one policy: a plan is one policy's")
        from odc_sim.api import PLANNED_WITHOUT
        from odc_sim.api import plan as make_plan
        from odc_sim.plans import unequal_counts, write_plan

        for flag in (argument.partition("=")[0] for argument in ctx.args):
            if flag == "--plan":
                raise InputError("--plan: got a plan to make a plan of; odc simulate --plan FILE says what it takes")
            if flag.removeprefix("--").replace("-", "_") in PLANNED_WITHOUT:
                raise InputError(
                    f"{flag}: samples are dealt the same whatever it is; give it to odc simulate --plan FILE"
                )
        made = make_plan(_study(config, fields, ctx))
        write_plan(made, out, _command())
        counts = made.counts()
        typer.echo(
            f"{out}: {made.num_minibatches} minibatches on {made.world_size} ranks, {made.policy}, "
            f"{counts.mean():.2f} microbatches a rank (most {counts.max()})"
        )
        found = unequal_counts(made)
        if found:
            typer.echo(
                f"rank {found.rank_a} runs {found.count_a} microbatches and rank {found.rank_b} {found.count_b} in "
                f"minibatch {found.minibatch}: needs odc or collective-deferred, or --pad-microbatches"
            )


@app.command(cls=StudyHelp, context_settings=dict(FIELDS_AS_FLAGS), options_metavar="[OPTIONS] [--FIELD VALUE]")
def sharding(
    ctx: typer.Context,
    strategy: Annotated[
        list[str] | None,
        Option(
            help="letters as in IIG, or ddp, zero1, zero2, hsdp, paro; repeatable, always with zero3  [default: all 14]"
        ),
    ] = None,
    out: Annotated[Path | None, Option(help="folder for sharding.csv, .json and .png")] = None,
    json_output: Annotated[bool, Option("--json", help="for machines")] = False,
    workload: Workload = None,
    lengths: LengthsFile = None,
    column: Column = None,
    model: Model = None,
    hardware: Hardware = None,
    devices: Devices = None,
    minibatch_size: MinibatchSize = None,
    minibatches: Minibatches = None,
    max_tokens: MaxTokens = None,
    overlong: Overlong = None,
    scale: Scale = None,
    balancing_cost: Cost = None,
    seed: Seed = None,
    config: Config = None,
) -> None:
    """DDP, ZeRO, HSDP and PaRO's strategies on the same minibatches: memory, traffic, throughput.

    Example:  odc sharding --model qwen2.5-7b --devices 32
    """
    fields = dict(locals())
    for name in ("ctx", "strategy", "out", "json_output", "config"):
        fields.pop(name)
    with _one_line_errors():
        from odc_sim.header import header
        from odc_sim.report import make_directory
        from odc_sim.sharding import chosen_strategies
        from odc_sim.sharding_study import shard
        from odc_sim.table_sharding import advice, print_sharding

        study = _study(config, fields, ctx)
        strategies = chosen_strategies(strategy or ())
        if out is not None:
            make_directory(out)
        with progress_bar() as progress:
            found = shard(study, strategies, progress)
        data = header(_command(), study.seed) | found.as_dict() | {"advice": advice(found)}
        if out is not None:
            from odc_sim.plots_sharding import write_sharding

            written = write_sharding(out, found, data)
        if json_output:
            _echo_json(data)
        else:
            print_sharding(found, _console())
        if out is not None:
            typer.echo(f"wrote {', '.join(path.name for path in written)} to {out}", err=True)


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(help="a results.json or the folder of a study")],
    b: Annotated[Path, typer.Argument(help="another one")],
    json_output: Annotated[bool, Option("--json", help="for machines")] = False,
) -> None:
    """Two studies side by side: what differs in what was asked, then in the answers.

    Example:  odc compare reports/longalign reports/swesmith
    """
    with _one_line_errors():
        from odc_sim.compare import compare as compare_results
        from odc_sim.compare_inputs import load_results
        from odc_sim.table_compare import print_comparison

        found = compare_results(load_results(a), load_results(b))
        if json_output:
            _echo_json(found.as_dict())
        else:
            print_comparison(found, _console())


@app.command()
def replay(
    timeline: Annotated[Path, typer.Argument(help="timeline.parquet of a real job, or a table with its columns")],
    out: Annotated[Path | None, Option(help="folder for replay.json and replay.png")] = None,
    json_output: Annotated[bool, Option("--json", help="for machines")] = False,
) -> None:
    """A recorded job with its barriers moved: what odc could give at most.

    Example:  odc replay run/timeline.parquet
    """
    with _one_line_errors():
        from odc_sim.header import header, write_json
        from odc_sim.measured import read_measured
        from odc_sim.replay import replay as replay_timeline
        from odc_sim.report import make_directory
        from odc_sim.table_replay import print_replay

        found = replay_timeline(read_measured(timeline), str(timeline))
        data = header(_command(), None) | found.as_dict()
        if out is not None:
            from odc_sim.plots_replay import replay_figure
            from odc_sim.plots_style import save_png

            make_directory(out)
            write_json(out / "replay.json", data)
            save_png(replay_figure(found), out / "replay.png")
        if json_output:
            _echo_json(data)
        else:
            print_replay(found, _console(), str(timeline))
        if out is not None:
            typer.echo(f"wrote replay.json, replay.png to {out}", err=True)


@app.command()
def validate(
    runs: Annotated[list[Path], typer.Argument(help="folders that odc train wrote")],
    calibration: Annotated[
        Path | None, Option(help="predict with this calibration.json  [default: the one in each run]")
    ] = None,
    hardware: Annotated[str | None, Option(help="or with built-in hardware or a cluster TOML")] = None,
    tolerance: Annotated[float, Option(help="percent that step times may be off")] = 3.0,
    engine: Annotated[str, Option(help="fast, or event (the slow reference)")] = "fast",
    out: Annotated[Path | None, Option(help="folder for validation.json and validation.png")] = None,
    json_file: Annotated[
        Path | None, Option("--json", help="also write validation.json here; - for standard output")
    ] = None,
) -> None:
    """Runs on hardware beside their prediction. Exit code 3 if step times are off by more than --tolerance, or speedups
    by more than 2 points, as on a CPU they mostly are.

    Example:  odc validate runs/collective runs/odc --out reports/validation

    Example:  odc validate runs/odc --hardware h200-nvlink --tolerance 5
    """
    with _one_line_errors():
        from odc_sim.errors import InputError
        from odc_sim.header import header, write_json
        from odc_sim.report import make_directory
        from odc_sim.table_validate import print_validation, verdict_line
        from odc_sim.validate import validate as compare_runs

        if calibration is not None and hardware is not None:
            raise InputError("--calibration and --hardware: got both, expected one of them")
        if calibration is not None and calibration.suffix != ".json":
            raise InputError(f"--calibration {calibration}: expected a .json file that odc calibrate wrote")
        if out is not None:
            make_directory(out)
        with progress_bar() as progress:
            found = compare_runs(
                runs,
                hardware=calibration or hardware,
                tolerance_percent=tolerance,
                engine=engine,
                progress=progress,
            )
        data = header(_command(), None) | found.as_dict()
        to_output = json_file is not None and str(json_file) == "-"
        if to_output:
            _echo_json(data)
        else:
            print_validation(found, _console())
        if json_file is not None and not to_output:
            write_json(json_file, data)
        if out is not None:
            from odc_sim.plots_style import save_png
            from odc_sim.plots_validate import validation_figure

            write_json(out / "validation.json", data)
            save_png(validation_figure(found), out / "validation.png")
            typer.echo(f"wrote validation.json, validation.png to {out}", err=True)
        if found.failures:
            if to_output:
                typer.echo(verdict_line(found), err=True)
            raise typer.Exit(3)


@app.command()
def refine(
    runs: Annotated[list[Path], typer.Argument(help="three folders that odc train wrote, of equal microbatches")],
    calibration: Annotated[Path, Option(help="of the same machine")],
    out: Annotated[Path, Option(help="the refined calibration.json to write")],
    json_output: Annotated[bool, Option("--json", help="what has changed, for machines")] = False,
) -> None:
    """A calibration with what transfers, copies and the host cost in training, which matters where microbatches are
    short: from one run each under collective-deferred, collective and odc.

    Example:  odc refine runs/deferred runs/collective runs/odc --calibration mine.json --out refined.json
    """
    with _one_line_errors():
        from datetime import UTC, datetime

        from odc_sim.calibration import load_calibration, write_calibration
        from odc_sim.refine import refine as refined_by
        from odc_sim.run_files import read_run
        from odc_sim.table_refine import changes, print_changes

        before = load_calibration(calibration)
        about = {"command": _command(), "created": datetime.now(UTC).isoformat(timespec="seconds")}
        after = refined_by(before, [read_run(run) for run in runs], about)
        write_calibration(out, after)
        rows = changes(before, after)
        if json_output:
            _echo_json(rows)
        else:
            print_changes(rows, _console())
            typer.echo(f"wrote {out}", err=True)


@app.command()
def workloads(
    name: Annotated[str | None, typer.Argument(help="show this workload, or a TOML or lengths file")] = None,
    column: Annotated[str | None, Option(help="of the lengths file, if it has several")] = None,
    json_output: Annotated[bool, Option("--json", help="for machines")] = False,
) -> None:
    """List length distributions, or show the statistics of one.

    Example:  odc workloads longalign
    """
    with _one_line_errors():
        import numpy as np

        from odc_sim.lengths import EXTENSIONS, read_lengths
        from odc_sim.table_lengths import print_lengths, workloads_table
        from odc_sim.workload import builtin_workloads, describe, load_workload, workload_from_lengths

        def statistics(workload: "LoadedWorkload") -> "LengthStats":
            return describe(workload, np.random.default_rng(0))  # the same draw in the list and alone

        if name is None:
            found = [load_workload(known) for known in builtin_workloads()]
            if json_output:
                _echo_json([w.as_dict() for w in found])
            else:
                _console().print(workloads_table([(w, statistics(w)) for w in found]))
                typer.echo("mean, p50, p90: of all lengths of a recorded list, of 10,000 samples drawn of the others")
            return
        is_lengths = column is not None or Path(name).suffix.lower() in EXTENSIONS
        workload = (
            workload_from_lengths(read_lengths(name, column), Path(name).stem) if is_lengths else load_workload(name)
        )
        stats = statistics(workload)
        if json_output:
            _echo_json({**workload.as_dict(), "statistics": stats.as_dict()})
            return
        print_lengths(stats, _console(), workload.name, drawn=workload.recorded is None)
        typer.echo(f"\n{workload.description}\nevidence: {workload.evidence}")


@app.command()
def models(
    name: Annotated[str | None, typer.Argument(help="show this model or config.json")] = None,
    json_output: Annotated[bool, Option("--json", help="for machines")] = False,
) -> None:
    """List models, or show one.

    Example:  odc models qwen2.5-7b
    """
    with _one_line_errors():
        from dataclasses import asdict

        from odc_sim.models import builtin_models, load_model, short_count, source_of

        specs = [load_model(known) for known in ([name] if name else builtin_models())]
        counts = ("parameters", "layer_parameters", "root_parameters", "matmul_parameters")
        if json_output:
            _echo_json([{**asdict(spec), **{count: getattr(spec, count) for count in counts}} for spec in specs])
            return
        for spec in specs:
            typer.echo(
                f"{spec.name:14} {short_count(spec.parameters):>6} parameters  {spec.layers:3} layers of "
                f"{short_count(spec.layer_parameters):>6}  root {short_count(spec.root_parameters):>6}  "
                f"hidden {spec.hidden}"
            )
        if name:
            embeddings = "tied" if specs[0].tied_embeddings else "untied"
            typer.echo(f"embeddings {embeddings}; source: {source_of(specs[0].name, name)}")


@app.command()
def hardware(
    name: Annotated[str | None, typer.Argument(help="show this hardware, a cluster TOML or a calibration.json")] = None,
    toml: Annotated[bool, Option("--toml", help="print the TOML of NAME, to copy and change")] = False,
    json_output: Annotated[bool, Option("--json", help="for machines")] = False,
) -> None:
    """List hardware, or show one with the sources of its numbers.

    Example:  odc hardware a100-nvswitch-roce
    """
    with _one_line_errors():
        from dataclasses import asdict

        from odc_sim.errors import InputError
        from odc_sim.hardware import builtin_hardware, hardware_text
        from odc_sim.machine import load_machine, replaced

        if toml:
            if name is None:
                raise InputError(
                    "--toml needs the name of one hardware, as in: odc hardware h100-ib --toml > mine.toml"
                )
            typer.echo(hardware_text(name), nl=False)
            return

        machines = [load_machine(known) for known in ([name] if name else builtin_hardware())]
        if json_output:
            _echo_json([asdict(machine.cluster) for machine in machines])
            return
        for machine in machines:
            cluster = machine.cluster
            typer.echo(
                f"{cluster.name:20} {cluster.devices_per_node} x {cluster.device.name}  "
                f"{cluster.device.peak_flops / 1e12:.0f} TFLOP/s  {cluster.device.memory_bytes / 1e9:.0f} GB  "
                f"{cluster.intra.bytes_per_s / 1e9:.0f} GB/s inside a node"
            )
            if name:
                instead = replaced(machine.calibration)
                for part in ("device", "intra", "inter", "host", "efficiency"):
                    section = getattr(cluster, part)
                    if section is not None:
                        values = {key: value for key, value in asdict(section).items() if key != "source"}
                        typer.echo(
                            f"  {part}: "
                            + ", ".join(
                                f"{k} = {v:g}" if isinstance(v, float) else f"{k} = {v}" for k, v in values.items()
                            )
                        )
                        typer.echo(f"    source: {section.source}")
                        if part in instead:
                            typer.echo(f"    instead: {instead[part]}")
                if machine.note:
                    typer.echo(machine.note)


@app.command(
    cls=SweepHelp, context_settings=dict(FIELDS_AS_FLAGS), options_metavar="[SWEEP] [--FIELD VALUE,...] [OPTIONS]"
)
def sweep(
    ctx: typer.Context,
    out: Annotated[Path | None, Option(help="folder for points, tables and plots  [default: reports/NAME]")] = None,
    jobs: Annotated[int | None, Option(help="points at once  [default: one a core, or all the cluster has]")] = None,
    backend: Annotated[str, Option(help="loky (this machine), dask or ray")] = "loky",
    address: Annotated[str | None, Option(help="HOST:PORT of the Dask or Ray cluster")] = None,
    one_at_a_time: Annotated[
        bool | None, Option("--one-at-a-time/--grid", help="vary each field alone, or all with all  [default: grid]")
    ] = None,
    config: Config = None,
) -> None:
    """Vary any fields of a study; a sweep that was stopped goes on where it was.

    Example:  odc sweep --workload longalign --minibatch-size 1,2,4,8 --devices 8,16,32 --policy lb-micro,lb-mini

    Example:  odc sweep paper-parametric --minibatches 100
    """
    with _one_line_errors():
        run_command(
            *(ctx.args, config, out, jobs, backend, address, one_at_a_time),
            command=_command(),
            console=_console(),
        )


@app.command()
def calibrate(
    out: Annotated[Path, Option(help="the calibration.json to write; its report goes into a folder beside it")] = Path(
        "calibration.json"
    ),
    model: Annotated[
        list[str] | None,
        Option("--model", help="measure this model's units, repeatable  [default: qwen2.5-1.5b, 7b, 14b, 32b]"),
    ] = None,
    quick: Annotated[bool, Option("--quick", help="fewer sizes, and qwen2.5-1.5b only by default")] = False,
    device: Annotated[str | None, Option(help="cuda, or cpu to try it on a laptop  [default: cuda]")] = None,
    backend: Annotated[str, Option(help="of one-sided transfers: auto, cuda, nvshmem or cpu")] = "auto",
    ranks: Annotated[int | None, Option(help="processes  [default: one a GPU; 2 on a CPU]")] = None,
    report: Annotated[Path | None, Option(help="measure nothing: make the report of this file again")] = None,
) -> None:
    """Measure this machine's GPUs and links for simulate --hardware. Starts a process a GPU, or runs under torchrun.

    Example:  odc calibrate --model qwen2.5-7b --out mine.json && odc simulate --hardware mine.json --model qwen2.5-7b

    Example:  odc calibrate --device cpu --out laptop.json     (the model `tiny`, about a minute, to try the tool)
    """
    with _one_line_errors():
        from odc_sim.calibration_report import failed, summary, write_calibration_report
        from odc_sim.errors import InputError, pip_install

        if report is None:
            import importlib.util

            if importlib.util.find_spec("torch") is None:
                raise InputError(f"calibrate: torch is not installed: {pip_install('train')}")
            from odc_kernels import calibrate as machine

            options = machine.make_options(
                *(out, model or [], quick, device, backend, ranks),
                command=_command(),
            )
            found = machine.calibrate(options)
            if found is None:  # torchrun: the first rank has it
                return
        else:
            from odc_sim.calibration import load_calibration

            found, out = load_calibration(report), report
        written = write_calibration_report(out)
        for line in summary(found):
            typer.echo(line)
        folder = written[0].parent
        typer.echo(f"wrote {out} and {', '.join(path.name for path in written)} in {folder}", err=True)
        if failed(found) and report is None:
            raise typer.Exit(1)


@app.command()
def train(
    plan: Annotated[Path | None, Option(help="run this plan.json instead of drawing lengths")] = None,
    schedule: Annotated[
        str | None, Option(help="collective, collective-deferred, odc or odc-local-sum  [default: odc]")
    ] = None,
    policy: Annotated[str | None, Option(help="balancing policy  [default: lb-mini; collective: lb-micro]")] = None,
    steps: Annotated[int | None, Option(help="minibatches to run  [default: all of the plan]")] = None,
    device: Annotated[str | None, Option(help="cuda or cpu  [default: cuda if there is one]")] = None,
    compute: Annotated[str | None, Option(help="real, or emulated: units wait as long as a cost model says")] = None,
    time_scale: Annotated[
        float | None, Option(help="emulated: executed seconds a simulated second  [default: 1]")
    ] = None,
    calibration: Annotated[Path | None, Option(help="calibration.json of this machine, kept with the run")] = None,
    data: Annotated[
        Path | None, Option(help="tokens: .jsonl or .parquet with a list column input_ids, or a folder of them")
    ] = None,
    out: Annotated[Path, Option(help="folder of the run")] = Path("run"),
    resume: Annotated[bool, Option("--resume", help="go on with the run in --out from its last checkpoint")] = False,
    checkpoint_every: Annotated[int | None, Option(help="minibatches  [default: never]")] = None,
    warmup_steps: Annotated[int | None, Option(help="minibatches before, not recorded  [default: 1]")] = None,
    learning_rate: Annotated[float | None, Option(help="of AdamW  [default: 1e-5]")] = None,
    max_grad_norm: Annotated[float | None, Option(help="gradients are clipped to; 0: not  [default: 1]")] = None,
    gather_dtype: Annotated[str | None, Option(help="bf16 or fp32 compute  [default: bf16; on a CPU fp32]")] = None,
    timeline: Annotated[bool, Option("--timeline/--no-timeline", help="record what every stream does")] = True,
    workload: Workload = None,
    lengths: LengthsFile = None,
    column: Column = None,
    model: Model = None,
    hardware: Hardware = None,
    devices: Annotated[int | None, Option(help="ranks  [default: the GPUs here; on a CPU 2]")] = None,
    minibatch_size: MinibatchSize = None,
    minibatches: Annotated[int | None, Option(help="optimizer steps to plan  [default: --steps, or 100]")] = None,
    max_tokens: MaxTokens = None,
    overlong: Overlong = None,
    scale: Scale = None,
    balancing_cost: Cost = None,
    pad_microbatches: Pad = None,
    seed: Seed = None,
    config: Config = None,
) -> None:
    """Run a plan for real, on GPUs or CPU ranks, and record who waited for what. Several hosts: start it with torchrun.

    Example:  odc train --model tiny --device cpu --scale 0.02 --steps 5 --schedule odc --out run

    Example:  odc train --plan plan.json --schedule odc --calibration mine.json --checkpoint-every 50 --out runs/odc

    Example:  odc train --resume --out runs/odc
    """
    flags = dict(locals())
    own = (
        *("schedule", "steps", "device", "compute", "time_scale", "calibration", "data", "checkpoint_every"),
        *("warmup_steps", "learning_rate", "max_grad_norm"),
    )
    options = {name: flags.pop(name) for name in own}
    for name in ("out", "resume", "timeline", "config"):
        flags.pop(name)
    with _one_line_errors():
        from odc_sim.errors import InputError, pip_install

        try:
            from odc_kernels.train import train as run
            from odc_kernels.train_options import Options, make_job
        except ModuleNotFoundError as error:
            raise InputError(f"odc train: {error.name} is not installed: {pip_install('train')}") from None
        fields = {name: value for name, value in flags.items() if value is not None}
        if policy is not None:
            fields["policy"] = (policy,)
        job = make_job(
            Options(**options),
            fields,
            config=config,
            out=out,
            resume=resume,
            timeline=timeline,
            command=_command(),
        )
        try:
            run(job)
        except KeyboardInterrupt:
            if (out / "checkpoint").is_dir():
                typer.echo(f"go on from the last checkpoint with: odc train --resume --out {out}", err=True)
            raise
        typer.echo(f"wrote {out}", err=True)


@app.command()
def doctor(json_output: Annotated[bool, Option("--json", help="for machines")] = False) -> None:
    """What works on this machine, and what to do about the rest. Exit code 1: something that is needed does not work.

    Example:  odc doctor
    """
    from dataclasses import asdict

    from odc_sim import doctor as simulator
    from odc_sim.header import header

    found = []
    for check in _checks():
        found.append(check)
        if not json_output:
            typer.echo(simulator.line(check))
    code = simulator.exit_code(found)
    if json_output:
        _echo_json({**header(_command(), None), "exit_code": code, "checks": [asdict(check) for check in found]})
    raise typer.Exit(code)


def _checks() -> "Iterator[Check]":
    import importlib.util

    from odc_sim import doctor as simulator

    yield from simulator.simulator_checks()
    absent = importlib.util.find_spec("torch") is None
    problem = None if absent else simulator.importing("torch")
    if absent or problem:
        yield simulator.without_torch(problem)
        return
    from odc_kernels.doctor import machine_checks

    yield from machine_checks()


def _echo_json(data: Any) -> None:
    import json

    typer.echo(json.dumps(data, indent=1, default=float))


@app.callback(invoke_without_command=True)
def _main(version: Annotated[bool, Option("--version", help="print the version")] = False) -> None:
    if version:
        from odc_sim.header import toolkit_version

        typer.echo(toolkit_version())
        raise typer.Exit()


def main() -> None:
    """The console script: `app`, with mistakes in the flags themselves reported in one line too."""
    try:
        sys.exit(app(args=sys.argv[1:] or ["--help"], standalone_mode=False))
    except KeyboardInterrupt:
        typer.echo(INTERRUPTED, err=True)
        sys.exit(130)
    except Exception as error:
        explain = getattr(error, "format_message", None)  # the command-line library's own errors have it
        if explain is None:
            raise
        where = getattr(getattr(error, "ctx", None), "command_path", None) or "odc"
        typer.echo(f"error: {explain()} (see: {where} --help)", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
