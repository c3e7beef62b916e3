"""What copies and transfers cost the layer beside them: by hand, in order, and from a run of two ranks."""

import math
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from odc_kernels import calibrate, calibrate_layers, calibrate_scenes  # noqa: E402
from odc_kernels import calibrate_shapes as shapes  # noqa: E402
from odc_kernels.calibrate_file import Draft  # noqa: E402
from odc_kernels.calibrate_layers import Layer, copies_beside, transfers_beside  # noqa: E402
from odc_kernels.calibrate_phases import Lab  # noqa: E402
from odc_kernels.calibrate_scenes import Launch, Measured, Scene, measure_scene  # noqa: E402
from odc_kernels.calibrate_timing import Pace  # noqa: E402
from odc_kernels.ranks import run_ranks  # noqa: E402
from odc_sim.calibration import CopySample, TransferSample  # noqa: E402
from odc_sim.calibration_report import how_measured  # noqa: E402
from odc_sim.models import load_model  # noqa: E402

CPU = torch.device("cpu")
SHARD = 1000


def measured(late=0.0, ranks=((10.0, 10.0),), **lost_s):
    """A scene whose counted steps take `ranks` [ranks][rounds] seconds alone, and `lost_s` more in each variant.

    A fifth of it the forward, a copy-out of 0.5 s before each; calls take 2 s each, one after the other.
    """
    alone_s = np.array(ranks)
    words = {"copies_in": "copies in", "unshards": "unshards in forwards"}
    steps_s = {}
    for name, lost in {"alone": 0.0, **{words.get(key, key): value for key, value in lost_s.items()}}.items():
        total_s = alone_s + np.array(lost)
        half = np.full_like(total_s, 0.5)
        steps_s[name] = np.stack([half, total_s / 5, half * (3 if name == "all" else 1), total_s * 4 / 5], axis=-1)
    starts = np.arange(0.0, 14.0, 2.0)
    calls_s = np.broadcast_to(np.stack([starts, starts + 2.0], axis=-1), (*alone_s.shape, 7, 2))
    return Measured(steps_s=steps_s, calls_s=dict.fromkeys(steps_s, calls_s), counted=(1, 3), late=late)


def test_rounds_that_do_not_agree_are_noisy():
    rounds = ([10.0] * 7,)
    one_hiccup = measured(ranks=rounds, all=[1.0, 1.1, 1.1, 1.1, 1.1, 1.2, 50.0]).lost("all")
    assert one_hiccup.seconds == pytest.approx(1.1)
    assert not one_hiccup.noisy
    # the 80th percentile is 0.21 s above the 20th, 2 % of the steps' 10 s
    assert measured(ranks=rounds, all=[1.0, 1.0, 1.0, 1.1, 1.21, 1.21, 1.21]).lost("all").noisy
    assert not measured(ranks=rounds, all=[1.0, 1.0, 1.0, 1.1, 1.19, 1.19, 1.19]).lost("all").noisy


def test_what_is_lost_is_compared_within_rounds_on_the_slowest_rank():
    """Rank 1 takes 9, 11 and 12 s as clocks change, and loses 1, 1 and 0.5; rank 0 loses more while it waits."""
    found = measured(ranks=((9.0, 10.0, 9.0), (9.0, 11.0, 12.0)), all=[[3.0, 3.0, 3.0], [1.0, 1.0, 0.5]])
    assert found.slowest == 1
    assert found.lost("all").seconds == pytest.approx(1.0)
    assert found.speeds == pytest.approx((10.0 / 9.0, 10.0 / 11.0))
    assert found.step_s("all", 1) == pytest.approx(12.0 / 5)
    assert found.call_s("all", 2) == pytest.approx(2.0)
    assert found.as_dict()["variants"]["all"]["steps_s"][1][0] == pytest.approx([0.5, 2.0, 1.5, 8.0])


def scenes_rank(rank):
    calibrate_scenes.LEAST, calibrate_scenes.STRETCH_S = 4, 0.1
    calibrate_scenes.LEAD_S = 0.05
    order = []

    def step(name, seconds):
        def run(*_):
            order.append(name)
            time.sleep(seconds)

        return run

    scene = Scene(
        steps=[step("short", 0.005), step("long", 0.04)],
        counted=(1,),
        variants={
            "alone": (),
            "both": [
                Launch(at=0, until=1, calls=[step("first", 0.01), step("untimed", 0.002)]),
                Launch(at=1, until=0, calls=[step("second", 0.02)]),
            ],
        },
    )
    return measure_scene(scene, Pace(CPU), rounds=2), order


def test_variants_take_turns_and_launches_start_with_the_steps_that_they_name():
    (found, order), _ = run_ranks(scenes_rank, 2, timeout_s=60)
    alone, both = ["short", "long"], ["first", "untimed", "short", "second", "long"]
    # two to estimate with, a warm-up of the last variant, and two rounds: of two cycles and four in each stretch
    assert order[-12 - 60 : -12] == both * 12
    assert order[-12:] == alone * 6
    stretches = "".join("a" if name == "short" else "b" if name == "first" else "" for name in order)
    cycles = stretches.replace("ba", "b")
    assert cycles == "a" * (len(cycles) - 30) + "b" * 6 + "a" * 6 + "b" * 12 + "a" * 6
    # a CPU does one after the other
    assert 0.01 <= found.call_s("both", 0) < 0.019
    assert found.lost("both").seconds >= 0.015
    assert found.slowest in (0, 1)
    for rank in (0, 1):
        for round_ in (0, 1):
            assert 0.005 <= found.steps_s["alone"][rank, round_, 0] < 0.014
            assert found.steps_s["both"][rank, round_, 0] >= 0.017
            assert found.steps_s["alone"][rank, round_, 1] >= 0.04
            moments = found.calls_s["both"][rank, round_]
            assert moments.ravel().tolist() == sorted(moments.ravel())
            assert np.all(moments[:, 1] - moments[:, 0] >= [0.01, 0.002, 0.02])
            assert moments[0, 0] < 0.002
            assert moments[2, 0] >= 0.017
    assert found.calls_s["alone"].shape == (2, 2, 0, 2)
    assert found.late == 0


def late_rank(rank):
    scene = Scene(steps=[lambda: None], counted=(0,), variants=dict.fromkeys("abcde", ()))
    lateness = iter([0.0] * 5 + [0.4] + [0.0] * 4 + [1.0])  # a warm-up, then a to e and back: the last is a
    calibrate_scenes._Stage.stretch = lambda *_: (np.ones(1), np.ones((0, 2)), next(lateness))
    return measure_scene(scene, Pace(CPU), rounds=2).problem


def test_the_worst_variant_tells_whether_the_host_was_late():
    assert run_ranks(late_rank, 1, timeout_s=60) == ["the host was late in 50% of them"]


def tiny_lab():
    options = calibrate.make_options(Path("c.json"), ["tiny"], True, "cpu", "cpu", 2, command="")
    return Lab(options, CPU, Draft.start(None, "", {}))


def late_layers_rank(rank):
    late = measured(late=0.3, copies_in=0.1, adds=0.1, unshards=0.1, reduces=0.1, all=0.1)
    calibrate_layers.measure_scene = lambda *_, **__: late
    lab = tiny_lab()
    lab.beside_layers(tokens=64)
    return lab.draft


def test_where_the_host_was_late_nothing_is_said_of_layers():
    draft, _ = run_ranks(late_layers_rank, 2, timeout_s=60)
    late = "beside a layer of tiny: the host was late in 30% of them"
    assert draft.left_out == [f"all_gather and reduce_scatter {late}", f"gather and scatter_accumulate {late}"]
    assert (draft.transfers, draft.copies, draft.device_speed) == ([], [], ())
    assert [raw["late"] for raw in draft.beside_layers] == [0.3, 0.3]


def layers_rank(rank):
    calibrate_scenes.STRETCH_S = 0.05
    calibrate_scenes.MOST_NOISE = math.inf  # on a CPU that others use too
    lab = tiny_lab()
    lab.copies()
    lab.beside_layers(tokens=64, rounds=2)
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
    assert [(raw["model"], raw["ops"]) for raw in draft.beside_layers] == [
        ("tiny", ["all_gather", "reduce_scatter"]),
        ("tiny", ["gather", "scatter_accumulate"]),
    ]
    assert len(draft.device_speed) == 2
    assert sum(1 / speed for speed in draft.device_speed) == pytest.approx(2.0, rel=0.05)
    assert draft.left_out == ["transfers beside a layer of tiny: no memory for its shards"]
    found = draft.calibration()
    assert how_measured(found)["beside_layers"] == draft.beside_layers
    assert found.device_speed == draft.device_speed


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


def with_costs():
    """Of one second, of which a layer loses 0.2."""
    return [replace(sample, slowdown_compute=5 / 4, beside_layer="small") for sample in copy_samples()[::4]]


def test_what_a_copy_costs_a_layer_is_of_the_time_that_the_copy_takes_alone():
    known = copy_samples()
    found = copies_beside(layer(), measured(copies_in=1.0, adds=0.2), known)
    # copy-ins lose half a second each, of the second that one takes alone, however long it took beside the layer
    slowed = [row for row in found if row.slowdown_compute is not None]
    assert [(row.op, row.elements, row.beside_layer) for row in slowed] == [
        ("copy_in", SHARD, "small"),
        ("add", SHARD, "small"),
    ]
    assert [row.slowdown_compute for row in slowed] == pytest.approx([2.0, 1.25])
    assert [replace(row, slowdown_compute=None, beside_layer=None) for row in found] == known


def test_a_copy_whose_cost_is_noise_has_none():
    known = copy_samples()
    noisy = measured(ranks=([10.0] * 3,), copies_in=[[0.1, 0.9, 3.0]], adds=0.2)
    found = copies_beside(layer(), noisy, known)
    assert [row.op for row in found if row.slowdown_compute is not None] == ["add"]


def pair(one_sided):
    ops = ("gather", "scatter_accumulate") if one_sided else ("all_gather", "reduce_scatter")
    return [
        TransferSample(
            op=op, backend="b", world_size=2, bytes=1 << 20, dtype="bf16",
            p20_s=1.0, p50_s=1.0, p80_s=1.0, samples=5, flagged=False,
        )
        for op in ops
    ]  # fmt: skip


def lost_s(rows):
    return [row.lost_s for row in rows]


@pytest.mark.parametrize(("one_sided", "reduce_lost_s"), [(False, 0.3), (True, 0.5)])
def test_a_transfer_costs_what_is_lost_beyond_the_copies_and_the_other_transfer(one_sided, reduce_lost_s):
    """0.5 s are lost beside copy-in and unshard, 0.5 s beside reduce and +=, in all 1.5 s: two of those and one."""
    adds = not one_sided
    lost = measured(unshards=0.5, reduces=0.5, all=1.5)
    found = transfers_beside(layer(), lost, pair(one_sided), with_costs(), adds=adds)
    assert lost_s(found) == pytest.approx([0.3, reduce_lost_s])
    assert [row.overlapped_p50_s for row in found] == [2.0, 2.0]
    assert [row.slowdown_copy_out for row in found] == [None, pytest.approx(3.0)]
    assert [row.beside_layer for row in found] == ["small", "small"]
    assert not any(row.flagged for row in found)


@pytest.mark.parametrize(
    ("unshards", "reduces", "everything", "expected"),
    [
        (0.9, 0.6, 1.2, [0.3, 0.2]),  # 0.5 for a copy-in and unshard, 0.4 for reduce and +=
        (0.1, 0.2, 0.3, [0.0, 0.0]),  # less than the copies
        (-0.1, -0.3, -0.2, [0.0, 0.0]),
        (5.0, 6.0, 16.0, [1.9, 1.9]),  # no transfer costs more than it lasts; the forward takes 3 s
    ],
)
def test_where_parts_do_not_sum_up_all_give_way(unshards, reduces, everything, expected):
    lost = measured(unshards=unshards, reduces=reduces, all=everything)
    found = transfers_beside(layer(), lost, pair(one_sided=False), with_costs(), adds=True)
    assert lost_s(found) == pytest.approx(expected)


def test_noise_makes_both_transfers_unsure():
    steady = {"unshards": 0.5, "reduces": 0.5, "all": 1.5}
    for name in steady:
        lost = measured(ranks=([10.0] * 3,), **steady | {name: [[0.1, 0.9, 3.0]]})
        found = transfers_beside(layer(), lost, pair(one_sided=False), with_costs(), adds=True)
        assert [row.flagged for row in found] == [True, True]


@pytest.mark.parametrize(
    ("adds", "missing", "flagged"),
    [
        (True, "copy_in", [True, True]),
        (True, "add", [False, True]),
        (False, "copy_in", [True, True]),
        (False, "add", [False, False]),
    ],
)
def test_a_transfer_is_unsure_where_a_copy_that_comes_with_it_is_unknown(adds, missing, flagged):
    copies = [copy for copy in with_costs() if copy.op != missing]
    lost = measured(unshards=0.5, reduces=0.5, all=1.5)
    found = transfers_beside(layer(), lost, pair(not adds), copies, adds=adds)
    assert [row.flagged for row in found] == flagged


def test_scenes_are_as_fsdp2s_program():
    scene = layer().scene("unshard", "reduce", adds=True)
    assert [step.name for step in scene.steps] == ["copy_out", "forward", "copy_out", "backward"]
    assert scene.counted == (1, 3)
    assert scene.variants["alone"] == []
    forward, reduce, backward = scene.variants["all"]
    assert (forward.at, forward.until, forward.calls[1]) == (1, 2, "unshard")
    assert (reduce.at, reduce.until, reduce.calls[0], len(reduce.calls)) == (2, 0, "reduce", 2)
    assert (backward.at, backward.until, backward.calls[1]) == (3, 0, "unshard")
    assert [len(launch.calls) for launch in scene.variants["copies in"]] == [1, 1]
    assert [launch.at for launch in scene.variants["adds"]] == [2]
    assert [launch.calls[1] for launch in scene.variants["unshards in forwards"]] == ["unshard"]
    assert [(launch.at, len(launch.calls)) for launch in scene.variants["reduces"]] == [(2, 2)]
    one_sided = layer().scene("unshard", "reduce", adds=False)
    assert list(one_sided.variants) == ["alone", "unshards in forwards", "reduces", "all"]
    assert one_sided.variants["all"][1].calls == ["reduce"]
