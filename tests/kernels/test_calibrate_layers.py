"""What copies and transfers cost the layer beside them: by hand, in order, and from a run of two ranks."""

import math
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from odc_kernels import calibrate, calibrate_layers, calibrate_scenes  # noqa: E402
from odc_kernels import calibrate_shapes as shapes  # noqa: E402
from odc_kernels.calibrate_file import Draft  # noqa: E402
from odc_kernels.calibrate_layers import Layer, copies_beside_layer, transfers_beside_layer  # noqa: E402
from odc_kernels.calibrate_phases import Lab  # noqa: E402
from odc_kernels.calibrate_scenes import Beside, Launch, Measured, Scene, measure_scene, slowdown  # noqa: E402
from odc_kernels.calibrate_timing import Pace  # noqa: E402
from odc_kernels.ranks import run_ranks  # noqa: E402
from odc_sim.calibration import CopySample, TransferSample  # noqa: E402
from odc_sim.calibration_report import how_measured  # noqa: E402
from odc_sim.models import load_model  # noqa: E402

CPU = torch.device("cpu")
PACE = SimpleNamespace(device=CPU)
SHARD = 1000


def quiet(_):
    """Nobody listens."""


@pytest.mark.parametrize(
    ("lost_s", "other_s", "step_s", "expected"),
    [
        (1.5, 2.0, 11.5, 4.0),  # of 2 s beside each other, compute came as far as in half a second
        (-0.2, 2.0, 9.8, 1.0),
        (89.0, 2.0, 99.0, 20.0),
        (1.0, 9.0, 2.0, 2.0),  # the other outlasts the step, which goes at half speed all the time
    ],
)
def test_slowdown_by_hand(lost_s, other_s, step_s, expected):
    assert slowdown(lost_s, other_s, step_s) == pytest.approx(expected)


def beside(alone_s, lost_s):
    return Beside(
        alone_s=(0.5, alone_s), beside_s=(1.5, alone_s + lost_s), calls_s=((0.1, 0.4), (0.4, 2.4)), other_s=2.0
    )


def measured(*lost_s, late=0.0):
    rounds = tuple(beside(10.0, lost) for lost in lost_s)
    return Measured(rounds=(rounds, rounds), late=late)


def test_rounds_that_do_not_agree_are_noisy():
    one_hiccup = measured(1.0, 1.1, 1.1, 1.1, 1.2, 1.2, 50.0)
    assert one_hiccup.lost_s == pytest.approx(1.1)
    assert (one_hiccup.stretch, one_hiccup.other_s, one_hiccup.step_s) == pytest.approx((3.0, 2.0, 11.1))
    assert not one_hiccup.noisy
    assert measured(1.0, 1.1, 1.1, 1.1, 1.2, 50.0, 50.0).noisy
    assert one_hiccup.as_dict()["beside_s"][1][0] == (1.5, 11.0)
    # the 80th percentile is 1.2 above the 20th: over the root of seven rounds a quarter of the 2 s
    assert measured(1.0, 1.0, 1.0, 1.1, 2.2, 2.2, 2.2).noisy
    assert not measured(1.0, 1.0, 1.0, 1.1, 1.9, 1.9, 1.9).noisy


def test_what_is_lost_is_compared_within_rounds():
    """The layer takes 9, 10 and 12 s as clocks change, and loses 1, 1 and 0.5; the other rank's loses 0.2 more."""
    ranks = [[beside(9.0, 1.0 + more), beside(10.0, 1.0 + more), beside(12.0, 0.5 + more)] for more in (0.0, 0.2)]
    assert Measured(rounds=tuple(map(tuple, ranks)), late=0.0).lost_s == pytest.approx(1.1)


def scenes_rank(rank):
    calibrate_scenes.ROUNDS = 2
    order = []

    def step(name, seconds):
        def run(*_):
            order.append(name)
            time.sleep(seconds)

        return run

    scene = Scene(
        before=[step("before", 0.02 * rank)],
        beside=[step("short", 0.005), step("long", 0.04)],
        after=[step("after", 0.01)],
        launches=[
            Launch(at=0, calls=[step("first", 0.01), step("untimed", 0.002)]),
            Launch(at=1, calls=[step("second", 0.02)]),
        ],
    )
    return measure_scene(scene, Pace(CPU)), order


def test_every_other_scene_has_launches_which_start_with_the_steps_that_they_name():
    (found, order), _ = run_ranks(scenes_rank, 2, timeout_s=60)
    alone = ["before", "short", "long", "after"]
    assert order[-11:] == [*alone, "before", "first", "untimed", "short", "second", "long", "after"]
    # a CPU does one after the other; waiting for the slower rank is not in it
    assert 0.01 <= found.other_s < 0.019
    assert found.lost_s >= 0.015
    for round_ in found.rounds[0]:
        assert 0.005 <= round_.alone_s[0] < 0.014
        assert round_.beside_s[0] >= 0.017
        assert round_.alone_s[1] >= 0.04
        moments = [moment for call in round_.calls_s for moment in call]
        assert moments == sorted(moments)
        first, untimed, second = (end - start for start, end in round_.calls_s)
        assert first == pytest.approx(round_.other_s)
        assert min(first - 0.01, untimed - 0.002, second - 0.02) >= 0
        assert round_.calls_s[0][0] < 0.002
        assert round_.calls_s[2][0] >= 0.017
    assert found.late == 0
    assert [len(rounds) for rounds in found.rounds] == [2, 2]


def layers_rank(rank):
    calibrate_scenes.ROUNDS = 2
    calibrate_scenes.MOST_NOISE = math.inf  # on a CPU that others use too
    lab = Lab(
        calibrate.make_options(Path("c.json"), ["tiny"], True, "cpu", "cpu", 2, command=""),
        CPU,
        Draft.start(None, "", {}),
    )
    lab.copies()
    lab.beside_layers(tokens=64)
    lab._agreed = (4096,)
    lab.beside_layers(tokens=64)
    return lab.draft


def test_copies_and_transfers_of_a_layers_size_are_timed_beside_that_layer():
    draft, _ = run_ranks(layers_rank, 2, timeout_s=120)
    tiny = load_model("tiny")
    shard = shapes.shard_bytes(tiny.layer_parameters, 2)
    assert [(row.op, row.bytes, row.beside_layer) for row in draft.transfers] == [
        ("all_gather", shard // 2, "tiny"),
        ("reduce_scatter", shard, "tiny"),
        ("gather", shard // 2, "tiny"),
        ("scatter_accumulate", shard, "tiny"),
    ]
    assert [row.slowdown_copy_out is not None for row in draft.transfers] == [False, True, False, True]
    slowed = [(row.op, row.elements, row.beside_layer) for row in draft.copies if row.slowdown_compute is not None]
    assert slowed == [("copy_in", shard // 4, "tiny"), ("add", shard // 4, "tiny")]
    assert min(row.slowdown_compute for row in draft.copies if row.slowdown_compute is not None) >= 1
    assert [raw["op"] for raw in draft.beside_layers] == ["copy_in", "add", *(row.op for row in draft.transfers)]
    assert draft.left_out == ["transfers beside a layer of tiny: no memory for its shards"]
    found = draft.calibration()
    assert how_measured(found)["beside_layers"] == draft.beside_layers


def layer():
    names = ("forward", "backward", "copy_in", "copy_out", "add")
    steps = {name: SimpleNamespace(name=name) for name in names}
    return Layer(
        model="small",
        forward=steps["forward"],
        backward=steps["backward"],
        copies={op: steps[op] for op in ("copy_in", "copy_out", "add")},
        shard_elements=SHARD,
    )


def copy_samples(seconds=1.0):
    times = {"p20_s": seconds, "p50_s": seconds, "p80_s": seconds}
    return [
        CopySample(op=op, elements=n, dtype="bf16", samples=5, flagged=False, **times)
        for op in ("copy_in", "copy_out", "add")
        for n in (SHARD, 2 * SHARD)
    ]


def found_in_turn(monkeypatch, *each):
    results = iter(each)
    monkeypatch.setattr(calibrate_layers, "measure_scene", lambda *_: next(results))


def test_what_a_copy_costs_a_layer_is_of_the_time_that_the_copy_takes_alone(monkeypatch):
    known = copy_samples()
    found_in_turn(monkeypatch, measured(0.5, 0.5), measured(0.2, 0.2))
    found = copies_beside_layer(layer(), known, PACE, say=quiet)
    # half a second of one is lost, however long it took beside the layer
    assert [row.op for row in found.samples] == ["copy_in", "add"]
    assert [row.slowdown_compute for row in found.samples] == pytest.approx([2.0, 1.25])
    assert [replace(row, slowdown_compute=None, beside_layer=None) for row in found.samples] == [known[0], known[4]]
    assert found.left_out == ()


def test_a_copy_that_was_not_timed_alone_or_whose_host_was_late_is_left_out(monkeypatch):
    found_in_turn(monkeypatch, measured(0.5, 0.5, late=0.3))
    found = copies_beside_layer(layer(), copy_samples()[:1], PACE, say=quiet)
    assert found.samples == ()
    assert found.left_out == (
        "copy_in beside a layer of small: the host was late in 30% of them",
        "add beside a layer of small: its time alone was not measured",
    )


def pair(one_sided):
    ops = ("gather", "scatter_accumulate") if one_sided else ("all_gather", "reduce_scatter")
    ways = [SimpleNamespace(op=op, case=lambda *_, op=op: SimpleNamespace(call=op)) for op in ops]
    alone = [
        TransferSample(
            op=op, backend="b", world_size=2, bytes=1 << 20, dtype="bf16",
            p20_s=1.0, p50_s=1.0, p80_s=1.0, samples=5, flagged=False,
        )
        for op in ops
    ]  # fmt: skip
    return ways, alone


@pytest.mark.parametrize(("one_sided", "reduce_lost_s"), [(False, 0.5), (True, 0.7)])
def test_a_transfer_costs_what_is_lost_beyond_the_copies_and_the_other_transfer(monkeypatch, one_sided, reduce_lost_s):
    found_in_turn(monkeypatch, measured(0.7, 0.7), measured(1.4, 1.4))
    found = transfers_beside_layer(layer(), *pair(one_sided), known_copies(), PACE, say=quiet)
    # forward: copy-in and the unshard lose 0.7 s; backward: those, the reduce and, of a collective, += lose 1.4 s
    lost = [2.0 * (1 - 1 / row.slowdown_compute) for row in found.samples]
    assert lost == pytest.approx([0.5, reduce_lost_s])
    assert [row.overlapped_p50_s for row in found.samples] == [2.0, 2.0]
    assert [row.slowdown_copy_out for row in found.samples] == [None, pytest.approx(3.0)]
    assert not any(row.flagged for row in found.samples)


def test_where_the_forward_says_nothing_the_backward_does_not_either(monkeypatch):
    found_in_turn(monkeypatch, measured(1.0, 1.0, late=0.3), measured(1.0, 1.0))
    found = transfers_beside_layer(layer(), *pair(one_sided=False), [], PACE, say=quiet)
    assert found.samples == ()
    assert found.left_out == (
        "all_gather beside a layer of small: the host was late in 30% of them",
        "reduce_scatter beside a layer of small: the host was late in 30% of them",
    )
    assert [raw["late"] for raw in found.raw] == [0.3, 0.0]


def known_copies():
    """Of one second, of which a layer loses 0.2."""
    return [replace(sample, slowdown_compute=5 / 4) for sample in copy_samples()[::4]]


def test_a_noisy_forward_makes_both_transfers_unsure(monkeypatch):
    found_in_turn(monkeypatch, measured(0.1, 0.9, 3.0), measured(1.4, 1.4, 1.4))
    found = transfers_beside_layer(layer(), *pair(one_sided=False), known_copies(), PACE, say=quiet)
    assert [row.flagged for row in found.samples] == [True, True]
    found_in_turn(monkeypatch, measured(0.5, 0.5, 0.5), measured(1.4, 0.2, 3.0))
    found = transfers_beside_layer(layer(), *pair(one_sided=False), known_copies(), PACE, say=quiet)
    assert [row.flagged for row in found.samples] == [False, True]


@pytest.mark.parametrize(
    ("one_sided", "missing", "flagged"),
    [
        (False, "copy_in", [True, True]),
        (False, "add", [False, True]),
        (True, "copy_in", [True, True]),
        (True, "add", [False, False]),
    ],
)
def test_a_transfer_is_unsure_where_a_copy_that_comes_with_it_is_unknown(monkeypatch, one_sided, missing, flagged):
    found_in_turn(monkeypatch, measured(0.7, 0.7), measured(1.4, 1.4))
    copies = [copy for copy in known_copies() if copy.op != missing]
    found = transfers_beside_layer(layer(), *pair(one_sided), copies, PACE, say=quiet)
    assert [row.flagged for row in found.samples] == flagged


def test_what_the_simulator_charges_at_the_least_is_not_charged_to_the_reduce_again(monkeypatch):
    """The forward loses 0.1 s beside copy-in and gather, less than copy-in alone did, which is 0.2 s."""
    found_in_turn(monkeypatch, measured(0.1, 0.1), measured(1.0, 1.0))
    found = transfers_beside_layer(layer(), *pair(one_sided=True), known_copies(), PACE, say=quiet)
    lost = [2.0 * (1 - 1 / row.slowdown_compute) for row in found.samples]
    assert lost == pytest.approx([0.0, 0.8])


def test_scenes_are_as_fsdp2s_program():
    small = layer()
    forward, backward = calibrate_layers._transfer_scenes(small, "unshard", "reduce", adds=True)
    assert [step.name for step in forward.beside] == ["copy_out", "forward"]
    assert [(launch.at, launch.calls[1], forward.timed) for launch in forward.launches] == [(1, "unshard", 1)]
    assert [step.name for step in backward.beside] == ["copy_out", "backward"]
    reduce, unshard = backward.launches
    assert (reduce.at, reduce.calls[0], backward.timed, len(reduce.calls)) == (0, "reduce", 0, 2)
    assert (unshard.at, unshard.calls[1]) == (1, "unshard")
    _, backward = calibrate_layers._transfer_scenes(small, "unshard", "reduce", adds=False)
    assert backward.launches[0].calls == ["reduce"]
