import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed; `make test-kernels` runs these")

from kernels import fsdp_checks, fsdp_dying  # noqa: E402

from odc_kernels import fsdp_bench  # noqa: E402
from odc_kernels.fsdp_faults import Watch, identify  # noqa: E402
from odc_kernels.fsdp_layout import Shard, Unit, _Reading  # noqa: E402
from odc_kernels.ranks import run_ranks  # noqa: E402

RUNS = {  # ranks: checks; those that depend on the number run with each
    1: fsdp_checks.EACH,
    2: fsdp_checks.CHECKS,
    4: [*fsdp_checks.EACH, fsdp_checks.gradients_are_those_of_one_process_with_replicas],
}


@functools.cache
def outcomes(ranks):
    return run_ranks(fsdp_checks.run_checks, ranks, RUNS[ranks], timeout_s=150)


@pytest.mark.parametrize(("ranks", "name"), [(ranks, check.__name__) for ranks, run in RUNS.items() for check in run])
def test_checks(ranks, name):
    for rank, outcome in enumerate(outcomes(ranks)):
        assert name in outcome, f"rank {rank} did not come so far"
        assert outcome[name] is None, f"rank {rank}:\n{outcome[name]}"


def test_a_killed_rank_is_named_wherever_it_dies(tmp_path):
    moments = fsdp_dying.MOMENTS
    run_ranks(fsdp_dying.pairs, 2 * len(moments), str(tmp_path), moments, may_die=True, timeout_s=90)
    meetings = {"forward": "end of minibatch 2", "push": "end of minibatch 2", "end": "end of minibatch 2"}
    for number, moment in enumerate(moments):
        waited_s, message = (tmp_path / moment).read_text().strip().split(" ", 1)
        assert float(waited_s) < fsdp_dying.TIMEOUT_S, moment
        assert message.startswith(meetings.get(moment, "publish after minibatch 2")), message
        name = "rank 1" if number == 0 else f"rank 1 (global rank {2 * number + 1})"
        assert f"{name}, which died" in message, message
    assert_nothing_is_left_behind()


def test_uncaught_every_rank_ends_with_the_message(tmp_path):
    """As a user's own script: nothing catches the error, and rank 0 hosts the store."""
    started = {what: start(what) for what in ("die", "die with the store", "hang", "interrupt")}
    for rank in started["interrupt"]:
        assert rank.stdout.readline() == "ready\n"
    time.sleep(0.5)  # rank 0 has come to the end of the minibatch and waits, rank 1 computes
    for rank in started["interrupt"]:
        rank.send_signal(signal.SIGINT)
    errors = {what: [finish(rank, 20) for rank in ranks] for what, ranks in started.items()}
    codes = {what: [rank.returncode for rank in ranks] for what, ranks in started.items()}
    assert codes == {
        "die": [1, -signal.SIGKILL],
        "die with the store": [-signal.SIGKILL, 1],
        "hang": [1, -signal.SIGKILL],
        "interrupt": [-signal.SIGINT] * 2,
    }, errors
    assert "WindowError: end of minibatch 2: rank 0 waits for rank 1, which died" in errors["die"][0]
    assert "WindowError: end of minibatch 2: rank 0 died, and with it the store" in errors["die with the store"][1]
    assert "optimizer step of minibatch 2: rank 1 died, and this rank was still in it 1.5 s later" in errors["hang"][0]
    assert all("KeyboardInterrupt" in error for error in errors["interrupt"])
    assert_nothing_is_left_behind()


def test_a_buffer_that_is_not_the_parameters_one_after_another_is_refused():
    place = {"owner": None, "attribute": "w", "offset": 0, "numel": 2}
    unit = Unit(
        name="blocks.0",
        modules=(),
        shards=(Shard(name="blocks.0.w", parameter=None, **place),),
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    for local, runs, problem in (
        (torch.ones(2), ((1, 2),), None),
        (torch.ones(2), ((1, 1), (0, 1)), "blocks.0 is not gathered as its parameters one after another"),
        (torch.ones(2), ((1, 2), (0, 1)), "blocks.0 is not gathered as its parameters one after another"),
        (torch.ones(2, device="meta"), ((1, 2),), "blocks.0.w is on meta; offloaded parameters are not supported"),
    ):
        reading = _Reading(runs=runs, dtype=torch.float32, device=torch.device("cpu"), locals=(local,))
        found = reading.mismatch(unit, [0])
        assert found is None if problem is None else found.startswith(problem), found


def test_who_is_gone_before_the_watch_starts_is_not_watched():
    people = [identify(), identify() | {"pid": 1 << 22}, identify() | {"place": "another host", "pid": 1}]
    watch = Watch(people, ["rank 0", "rank 1", "rank 2"], timeout_s=1)
    assert watch.dead() == []
    watch.close()


class Device:
    """What Watch asks of Signals; on a CPU no device waits."""

    through = False
    stays_away = True

    def passed(self):
        return self.through

    def waiting(self):
        return self.stays_away and not self.through

    def missing(self):
        return [1, 2]


def watched(monkeypatch, device, seconds, **options):
    ended = []
    monkeypatch.setattr(Watch, "_end", lambda self, message: ended.append(message))
    watch = Watch([identify()] * 3, ["rank 0", "rank 1", "rank 2"], timeout_s=0.4)
    watch.expose("optimizer step of minibatch 3", device, **options)
    time.sleep(seconds)
    watch.close()
    return ended


def test_a_device_that_waits_too_long_for_others_ends_its_rank(monkeypatch):
    ended = watched(monkeypatch, Device(), 0.3)
    assert not ended
    ended = watched(monkeypatch, Device(), 1.0)
    assert ended[0] == "optimizer step of minibatch 3: the device of this rank waited 0.4 s for that of rank 1, rank 2"
    late = Device()
    late.stays_away = False
    assert not watched(monkeypatch, late, 1.0)
    gone_on = Device()
    gone_on.through = True
    assert not watched(monkeypatch, gone_on, 0.6)
    assert not watched(monkeypatch, gone_on, 0.6, until_passed=True)
    assert not watched(monkeypatch, None, 0.6, until_passed=True)


def test_the_benchmark_runs(tmp_path, capfd):
    fsdp_bench.main(["--tiny", "--ranks", "2", "--out", str(tmp_path)])
    result = json.loads((tmp_path / "fsdp.json").read_text())
    assert len(result["ranks"]) == 2
    first = result["ranks"][0]
    assert first.pop("environment")["packages"]["torch"]
    assert set(first) == set(result["shapes"]) == set(fsdp_bench.SHAPES)
    for shape, modes in first.items():
        assert set(modes) >= {"fsdp2", "odc"}
        assert modes["odc"]["window_bytes"] > modes["fsdp2"]["window_bytes"] == 0
        for mode, found in modes.items():
            samples = found["loss"] if shape == "equal" else found["seconds"]
            repeats = result["shapes"][shape]["repeats"]
            assert len(samples) == repeats * (4 if shape == "host-bound" else 2), (shape, mode)
            assert min(samples) > 0
            assert len(found.get("core_seconds", [])) == (len(samples) if shape == "host-bound" else 0)
            if repeats > 1:
                assert [second for block in found["blocks"] for second in block] == samples
                assert len(found["blocks"]) == repeats
    losses = [found["loss"] for found in first["equal"].values()]
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-3)
    printed = capfd.readouterr().out
    assert "compute-bound   fsdp2                median" in printed
    assert ", 1.0000x the first (1.0000 to 1.0000)" in printed


def start(what):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    tests = Path(__file__).parents[1]
    ranks = []
    for rank in range(2):
        environment = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)]),
            "OMP_NUM_THREADS": "1",
        }
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-m", "kernels.fsdp_dying", what],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return ranks


def finish(rank, timeout_s):
    try:
        return rank.communicate(timeout=timeout_s)[1]
    except subprocess.TimeoutExpired:
        rank.kill()
        return f"was not finished:\n{rank.communicate()[1]}"


def assert_nothing_is_left_behind():
    from odc_kernels.window_cpu import folders

    assert not [path for folder in folders() for path in folder.glob("odc-*")]
