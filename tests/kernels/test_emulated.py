import json
import os
import re
import time
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed; `make test-kernels` runs these")

from kernels import emulated_runs  # noqa: E402

from odc_kernels.emulated import EmulatedLm  # noqa: E402
from odc_kernels.lm import pack  # noqa: E402
from odc_kernels.ranks import run_ranks  # noqa: E402
from odc_kernels.train_job import Job  # noqa: E402
from odc_kernels.waits import HostClock  # noqa: E402
from odc_sim.api import plan  # noqa: E402
from odc_sim.costs import fitted_costs  # noqa: E402
from odc_sim.emulation import default_parameters_scale, emulated_shape, executed_costs  # noqa: E402
from odc_sim.errors import InputError  # noqa: E402
from odc_sim.execution import Load, execute  # noqa: E402
from odc_sim.hardware import load_cluster  # noqa: E402
from odc_sim.models import load_model  # noqa: E402
from odc_sim.plans import Plan  # noqa: E402
from odc_sim.run_files import RunConfig, read_run  # noqa: E402
from odc_sim.schedules import make_schedule  # noqa: E402
from odc_sim.study import Study  # noqa: E402
from odc_sim.transfers import transfer_costs  # noqa: E402

CPU = torch.device("cpu")
RANKS, MINIBATCHES, MICROBATCHES = 8, 5, 2
HARDWARE = "a100-nvswitch-roce"
TIME_SCALE = 0.8
# Few layers, since a collective of eight ranks takes two cores 10 to 25 ms, and waits are to be longer.
TWO_LAYERS = {
    "model_type": "qwen2",
    "num_hidden_layers": 2,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 16384,
}
QWEN = load_model("qwen2.5-1.5b")


def make(time_scale=1e-4, **options):
    return EmulatedLm(QWEN, fitted_costs(QWEN), time_scale=time_scale, device=CPU, **options)


def batch(*lengths, weight=1.0):
    return pack([torch.zeros(length, dtype=torch.int64) for length in lengths], weight)


@pytest.mark.parametrize("asked_s", [0.005, 0.04])
def test_waits_are_as_long_as_asked(asked_s):
    clock, waited = HostClock(), []
    for _ in range(9):
        start = time.perf_counter()
        clock.note()
        clock.wait([1.0, asked_s], 1)
        waited.append(time.perf_counter() - start)
    assert asked_s <= min(waited) < 1.1 * asked_s  # other processes may hold up some


def test_what_happens_within_a_wait_is_part_of_it_and_waiting_takes_no_core():
    clock = HostClock()
    before = os.times()
    start = time.perf_counter()
    clock.note()
    time.sleep(0.3)
    clock.wait([0.5], 0)
    assert 0.5 <= time.perf_counter() - start < 0.7
    clock.wait([0.3], 0)  # over already
    assert time.perf_counter() - start < 0.7
    after = os.times()
    assert after.user + after.system - before.user - before.system < 0.1


def test_seconds_are_those_of_the_cost_model():
    lm, costs = make(time_scale=0.25), fitted_costs(QWEN)
    lengths = (1000, 30, 7)
    tokens, squares = sum(lengths), sum(length**2 for length in lengths)
    names = [f"{unit}_{way}" for way in ("forward", "backward") for unit in ("embedding", "layer", "head")]
    expected = [0.25 * float(getattr(costs, name)(tokens, squares)) for name in names]
    assert lm.seconds(batch(*lengths)).tolist() == pytest.approx(expected, rel=1e-12)


def test_forward_and_backward_take_their_units_seconds():
    costs = replace(fitted_costs(QWEN), layers=2)
    lm = EmulatedLm(replace(QWEN, layers=2), costs, time_scale=1.0, device=CPU)
    one = batch(20_000, 2_000)
    embedding, layer, head, *_ = seconds = lm.seconds(one).tolist()
    assert min(layer, head) > 0.02
    forward_s = embedding + 2 * layer + head
    backward_s = seconds[3] + 2 * seconds[4] + seconds[5]
    took = []
    for _ in range(4):
        start = time.perf_counter()
        loss = lm(one)
        middle = time.perf_counter()
        loss.backward()
        took.append((middle - start, time.perf_counter() - middle))
    for asked_s, times_s in zip((forward_s, backward_s), zip(*took, strict=True), strict=True):
        assert asked_s <= min(times_s) < 1.1 * asked_s


def test_every_parameter_gets_a_gradient_and_losses_add_up_by_weight():
    lm = make()
    assert len(lm.layers) == QWEN.layers
    loss = lm(batch(5, 9, weight=0.75))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(1.5)
    loss.backward()
    for name, parameter in lm.named_parameters():
        # d/dw of 1.5 * mean^2, the mean of 30 units' means
        assert parameter.grad is not None, name
        expected = torch.full_like(parameter, 2 * 1.5 / (QWEN.layers + 2) / parameter.numel())
        assert torch.allclose(parameter.grad, expected, rtol=1e-5, atol=0), name


def test_on_a_cpu_a_layer_is_small_and_on_request_of_any_size():
    sizes = {name: parameter.numel() for name, parameter in make().named_parameters()}
    assert sizes["blocks.0.weight"] == -(-QWEN.layer_parameters // 715) <= 1 << 16
    assert sizes["embedding.weight"] + sizes["head.weight"] == -(-QWEN.root_parameters // 715)
    assert make(parameters_scale=10**9).blocks[3].weight.numel() == 1


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted in this process")
@pytest.mark.parametrize(("name", "reads"), [("note_kernel", 1), ("wait_kernel", 2)])
def test_on_a_gpu_a_kernel_looks_at_the_clock(name, reads):
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from odc_kernels import wait_kernels

    function = getattr(wait_kernels, name)
    types = {"moment": "*i64", "durations": "*i64", "number": "i32"}
    source = ASTSource(fn=function, signature={argument: types[argument] for argument in function.arg_names})
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1}).asm["ptx"]
    assert ptx.count("%globaltimer") == reads
    loops = re.findall(r"(\$\w+):.*globaltimer.*bra\s+\1;", ptx, re.DOTALL)
    assert len(loops) == reads - 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"time_scale": 0.0}, "time_scale: got 0, expected executed seconds per simulated second, above 0"),
        ({"time_scale": float("inf")}, "time_scale: got inf, expected"),
        ({"parameters_scale": 0}, "parameters_scale: got 0, expected at least 1"),
    ],
)
def test_wrong_arguments_are_refused(options, message):
    with pytest.raises(InputError, match=re.escape(message)):
        make(**options)


def test_costs_of_another_model_are_refused():
    with pytest.raises(InputError, match=re.escape("emulated qwen2.5-1.5b: got costs of 28 layers, expected 2")):
        EmulatedLm(replace(QWEN, layers=2), fitted_costs(QWEN), time_scale=1.0, device=CPU)


SCHEDULES = {"collective": "lb-micro", "odc": "lb-mini"}


@pytest.fixture(scope="module")
def schedules(tmp_path_factory):
    """By schedule: (simulated, makespans executed [B], idle rates executed [B])."""
    folder = tmp_path_factory.mktemp("runs")
    model = folder / "two-layers.json"
    model.write_text(json.dumps(TWO_LAYERS))
    study = Study(model=str(model), hardware=HARDWARE, devices=RANKS, minibatch_size=4, minibatches=MINIBATCHES)
    jobs = {}
    for schedule, policy in SCHEDULES.items():
        dealt = plan(study, policy)
        jobs["balanced", schedule] = make_job(folder, "balanced", schedule, balanced_like(dealt), model)
        jobs["longalign", schedule] = make_job(folder, "longalign", schedule, dealt, model)
    run_ranks(emulated_runs.run_jobs, RANKS, list(jobs.values()), timeout_s=280)

    found = {}
    for schedule in SCHEDULES:
        job, balanced = jobs["longalign", schedule], read_run(jobs["balanced", schedule].out)
        run = read_run(job.out)
        costs = executed_costs(job.costs(), TIME_SCALE)
        transfers = measured_transfers(balanced, emulated_shape(job.spec, default_parameters_scale(job.spec, "cpu")))
        simulated = execute(Load.of(run.plan), costs, transfers, load_cluster(HARDWARE), make_schedule(schedule))
        executed_s, idle = (run.steps[name].to_numpy() for name in ("makespan_s", "idle_rate"))
        found[schedule] = (simulated, executed_s, idle)
        print(
            f"{schedule}: makespans simulated {simulated.makespan_s.round(2)} executed {executed_s.round(2)} s, "
            f"idle simulated {idle_rates(simulated).round(3)} executed {idle.round(3)}"
        )
    return found


def make_job(folder, name, schedule, dealt, model):
    config = RunConfig(
        schedule=schedule,
        policy=dealt.policy,
        model=str(model),
        device="cpu",
        compute="emulated",
        world_size=RANKS,
        steps=dealt.num_minibatches,
        seed=0,
        gather_dtype="bf16",
        reduce_dtype="fp32",
        recompute=True,
        chunked_loss_tokens=512,
        learning_rate=1e-4,
        max_grad_norm=1.0,
        time_scale=TIME_SCALE,
        warmup_steps=1,
        hardware=HARDWARE,
    )
    out = folder / f"{schedule}-{name}"
    return Job(plan=dealt, config=config, model=str(model), out=out, command="pytest")


def balanced_like(dealt):
    """The same number of minibatches, in which every rank has two microbatches of one sample of 6,000 tokens."""
    ids = np.arange(MINIBATCHES * RANKS * MICROBATCHES).reshape(MINIBATCHES, RANKS, MICROBATCHES, 1)
    return Plan.from_nested(
        ids.tolist(),
        workload={"name": "balanced"},
        model=dealt.model,
        world_size=RANKS,
        minibatch_size=MICROBATCHES,
        max_tokens=6000,
        policy="local",
        balancing_cost={"name": "tokens", "source": "all are equal"},
        lengths=np.full(ids.size, 6000),
        groups=None,
    )


def measured_transfers(run, shape):
    """All that a CPU does beside compute, from a run in which no rank has to wait for another.

    It is all on the one stream, so what matters is how long it takes in a microbatch, and after the last one.
    """
    timeline = run.timeline
    in_microbatch = (timeline.microbatch >= 0) & (timeline.kind != "wait")
    beside_s, step_s = [], []
    for row in run.steps.itertuples():
        arrived_s = timeline.end_s[in_microbatch & (timeline.minibatch == row.minibatch)].max()
        busy_s = (1 - row.idle_rate) * row.makespan_s
        beside_s.append((arrived_s - busy_s) / MICROBATCHES)
        step_s.append(row.makespan_s - arrived_s)
    print(f"beside compute {1e3 * np.median(beside_s):.0f} ms a microbatch, step {1e3 * np.median(step_s):.0f} ms")
    piece_s = np.median(beside_s) / (3 * shape.layers + 2)  # copy-outs in forward and in backward, packs
    free = transfer_costs(
        shape, load_cluster(HARDWARE), world_size=RANKS, one_sided=run.config.schedule == "odc", gather_dtype="bf16"
    ).free()
    return replace(
        free,
        copy_out_s=free.copy_out_s + piece_s,
        pack_s=free.pack_s + piece_s,
        optimizer_s=float(np.median(step_s)),
    )


def idle_rates(simulated):
    return 1 - simulated.busy_s / (RANKS * simulated.makespan_s)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_eight_cpu_ranks_take_as_long_and_idle_as_much_as_simulated(schedules, schedule):
    """Medians over minibatches, since other processes of the machine may hold one up."""
    simulated, executed_s, idle = schedules[schedule]
    assert np.median(executed_s / simulated.makespan_s) == pytest.approx(1, abs=0.05)
    assert np.median(idle - idle_rates(simulated)) == pytest.approx(0, abs=0.05)


def test_eight_cpu_ranks_gain_what_is_simulated(schedules):
    (slow, slow_s, _), (fast, fast_s, _) = (schedules[schedule] for schedule in SCHEDULES)
    expected = slow.makespan_s / fast.makespan_s
    assert expected.mean() > 1.25
    assert np.median(slow_s / fast_s / expected) == pytest.approx(1, abs=0.05)
