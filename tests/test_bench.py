"""Speed, printed rather than asserted tightly: machines are noisy. `make bench`."""

import resource
import subprocess
import sys
import time

import numpy as np
import pytest
from builders import make_durations

from odc_sim.durations import Durations, no_stretch
from odc_sim.engine_event import run_event
from odc_sim.engine_fast import run_fast
from odc_sim.schedules import SCHEDULES, make_schedule

pytestmark = pytest.mark.bench


def durations(minibatches, microbatches, ranks, layers):
    rng = np.random.default_rng(0)
    forward_s = rng.exponential(1.0, (minibatches, microbatches, 3, ranks))
    unit = {name: np.full(layers + 1, s) for name, s in (("gather_s", 0.1), ("reduce_s", 0.2))}
    unit |= {name: np.full(layers + 1, 0.01) for name in ("copy_in_s", "copy_out_s", "pack_s", "add_s", "hold_s")}
    ones, zeros = no_stretch(minibatches, microbatches, ranks), np.zeros((minibatches, ranks))
    return Durations(
        counts=np.full((minibatches, ranks), microbatches),
        forward_s=forward_s,
        backward_s=2 * forward_s,
        slot_class=np.array([0, *[1] * layers, 2]),
        **unit,
        gather_forward_stretch=ones,
        gather_backward_stretch=ones,
        reduce_stretch=ones,
        host_forward_s=0.0,
        host_backward_s=0.0,
        optimizer_s=0.0,
        publish_s=0.0,
        busy_s=zeros,
        compute_slowdown_s=zeros,
        floor_s=zeros,
    )


@pytest.mark.parametrize("name", [s.name for s in SCHEDULES])
def test_fast_engine_rate_at_64_devices(name, capsys):
    case, schedule = durations(100, 8, 64, 32), make_schedule(name)
    run_fast(case, schedule)  # compiled or loaded from the cache
    start = time.perf_counter()
    run_fast(case, schedule)
    rate = 100 * 8 * 64 * 2 * 32 / (time.perf_counter() - start)
    with capsys.disabled():
        print(f"\n{name}: {rate:.2e} device-layers/s at 64 devices (aim 5e7)")
    assert rate > 1e7


@pytest.mark.parametrize("name", [s.name for s in SCHEDULES])
def test_a_thousand_devices(name, capsys):
    """1,024 devices x 80 layers x 8 microbatches x 500 minibatches, in the parts that `execute` uses."""
    part, schedule = durations(100, 8, 1024, 80), make_schedule(name)
    run_fast(durations(2, 8, 1024, 80), schedule)
    start = time.perf_counter()
    for _ in range(5):
        run_fast(part, schedule)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    with capsys.disabled():
        print(f"\n{name}: {seconds:.1f} s for 500 minibatches of 1,024 devices (aim 10 s), peak {peak:.2f} of 2 GB")
    assert seconds < 60


def test_event_engine_rate(capsys):
    case = make_durations(np.ones((4, 34, 8)), np.ones((4, 34, 8)), gather_s=0.1, reduce_s=0.2)
    start = time.perf_counter()
    run_event(case, make_schedule("collective"))
    rate = 4 * 8 * 2 * 32 / (time.perf_counter() - start)
    with capsys.disabled():
        print(f"\nevent engine: {rate:.2e} device-layers/s at 8 devices")


@pytest.mark.parametrize(
    ("arguments", "aim_s"),
    [(["--help"], 0.5), (["simulate", "--workload", "longalign", "--out", "{out}"], 5.0)],
)
def test_commands(arguments, aim_s, tmp_path, capsys):
    command = [sys.executable, "-m", "cli", *(a.format(out=tmp_path) for a in arguments)]
    subprocess.run(command, check=True, capture_output=True)
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    seconds = time.perf_counter() - start
    with capsys.disabled():
        print(f"\nodc {' '.join(arguments[:3])}: {seconds:.2f} s from the second run on (aim {aim_s} s)")
    assert seconds < 10 * aim_s
