"""Sharding strategies: the rule, state and traffic by hand, and that full sharding is what `odc simulate` runs."""

import csv
import json
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from cli import app
from odc_sim.api import simulate
from odc_sim.costs import choose_costs
from odc_sim.costs_types import UnitCost
from odc_sim.errors import InputError
from odc_sim.execution import Load
from odc_sim.hardware import load_cluster
from odc_sim.models import load_model
from odc_sim.schedules import make_schedule
from odc_sim.sharding import STRATEGIES, Strategy, chosen_strategies, parse_strategy
from odc_sim.sharding_costs import Costs, Sync
from odc_sim.sharding_play import _last_backward_s
from odc_sim.sharding_study import shard
from odc_sim.study import Study
from odc_sim.table_sharding import advice
from odc_sim.topology import make_topology
from odc_sim.transfers import transfer_costs

GIB = 1 << 30
A100 = load_cluster("a100-nvswitch-roce")
DATA = Path(__file__).parent.parent / "odc_sim" / "hardware_data"
SMALL = {"devices": 16, "minibatches": 4}


def run(*names, **study):
    return shard(Study(**(SMALL | study)), chosen_strategies(names))


# What a strategy is.


def test_the_optimizer_is_divided_at_least_as_finely_as_the_rest():
    """arXiv 2310.06003 counts 14 of 27."""
    assert " ".join(s.name for s in STRATEGIES) == "NNN NNI NNG NII NIG NGG INI ING III IIG IGG GNG GIG GGG"
    with pytest.raises(InputError, match=r"sharding 'nin': the optimizer state \(N\) is divided more coarsely than"):
        parse_strategy("nin")


@pytest.mark.parametrize(("alias", "name"), [("ddp", "NNN"), ("ZeRO2", "NGG"), ("hsdp", "III"), ("iig", "IIG")])
def test_known_names(alias, name):
    assert parse_strategy(alias).name == name


def test_an_unknown_name_is_told_its_neighbour():
    with pytest.raises(InputError, match="unknown sharding 'zero9': did you mean 'zero"):
        parse_strategy("zero9")


def test_what_others_are_compared_with_is_always_among_them():
    assert shard(Study(**SMALL), (parse_strategy("hsdp"),)).row("GGG", "collective").speedup >= 1.0
    found = shard(Study(**SMALL, policy=("lb-micro",)), (parse_strategy("hsdp"),))
    assert found.row("GGG", "collective").speedup == 1.0
    assert [s.name for s in chosen_strategies(["hsdp, IIG"])] == ["III", "IIG", "GGG"]
    assert chosen_strategies([]) == STRATEGIES


@pytest.mark.parametrize(
    ("name", "wanted"), [("NNN", 100.4), ("NNG", 27.5), ("NII", 23.5), ("IIG", 5.5), ("IGG", 4.3), ("GGG", 3.1)]
)
def test_state_in_mixed_precision(name, wanted):
    """LLaMA-7B on four nodes of eight: 2 / p + 2 / g + 12 / os bytes a parameter."""
    found = parse_strategy(name).state(6_738_415_616, "mixed", node=8, world_size=32)
    assert sum(found.values()) / GIB == pytest.approx(wanted, abs=0.05)


def test_state_with_an_fp32_master():
    """FSDP2 casts from the master where parameters are divided alike; else there is a bf16 copy, or the window that
    gathers on demand read."""

    def state(name, **more):
        return sum(parse_strategy(name).state(3200, "paper", node=8, world_size=32, **more).values())

    assert state("GGG") == 16 * 100
    assert state("GGG", window_bytes=2) == 16 * 100 + 2 * 100
    assert state("III") == 16 * 400
    assert state("IIG") == state("IIG", window_bytes=2) == 12 * 100 + 4 * 400 + 2 * 400
    assert state("NNG") == state("NNG", window_bytes=2) == 12 * 100 + 4 * 3200 + 2 * 3200
    assert state("NNN") == 18 * 3200


# What it moves.


def costs(devices=16, collectives="two-level"):
    model, topology = load_model("qwen2.5-1.5b"), make_topology(A100, devices, collectives)
    over = {"N": 1, "I": topology.group, "G": devices}

    def of(one_sided):
        return {
            letter: transfer_costs(
                model, A100, world_size=size, one_sided=one_sided, gather_dtype="bf16", collectives=collectives
            )
            for letter, size in over.items()
        }

    return Costs(
        collective=of(False),
        one_sided=of(True),
        cluster=A100,
        topology=topology,
        parameters=model.parameters,
        parameter_bytes=2,
        units=29,
        root_share=0.25,
        hides=True,
    )


def test_what_is_divided_within_nodes_never_leaves_them_in_a_microbatch():
    found, one_each = costs(), np.ones((1, 16), dtype=np.int64)
    for strategy in STRATEGIES:
        sent = [found.microbatches_bytes(strategy, one_each, make_schedule(name)) for name in ("collective", "odc")]
        assert (sent == [0.0, 0.0]) == (strategy.meets != "all ranks"), strategy


def test_between_two_nodes_each_strategy_syncs_what_the_table_says():
    found = costs()
    half = found.parameters / 2  # of everything one of two nodes sends one half
    fp32, bf16 = 4 * half, 2 * half
    gradients = {"NNN": 2, "NNI": 2, "NNG": 1, "NII": 2, "NIG": 1, "III": 2, "IIG": 1, "ING": 1, "INI": 2}
    for name, times in gradients.items():
        sync = found.sync(parse_strategy(name))
        assert sync.gradients_bytes == pytest.approx(times * fp32, rel=1e-6), name
        assert sync.parameters_bytes == pytest.approx(bf16 if name in ("NNG", "NIG", "ING", "IIG") else 0.0), name
    nothing = Sync(gradients_s=0.0, root_share=0.25, gradients_bytes=0.0, parameters_s=0.0, parameters_bytes=0.0)
    assert found.sync(parse_strategy("GGG")) == nothing


def test_time_between_nodes_by_hand():
    found = costs()
    hybrid, paro = found.sync(parse_strategy("III")), found.sync(parse_strategy("IIG"))
    one_way_s = 29 * A100.inter.latency_s + 4 * found.parameters / 2 / A100.inter.node_bytes_per_s
    assert hybrid.gradients_s == pytest.approx(2 * one_way_s)
    assert paro.gradients_s == pytest.approx(one_way_s)
    assert hybrid.parameters_s == 0
    assert paro.parameters_s == pytest.approx(
        A100.inter.latency_s + 2 * found.parameters / 2 / A100.inter.node_bytes_per_s
    )


@pytest.mark.parametrize(("layer_backward_s", "wanted"), [(2.0, 1.0), (1.0, 1.0), (0.5, 2.5), (0.0, 4.0)])
def test_only_what_the_last_backward_does_not_hide_is_waited_for(layer_backward_s, wanted):
    """Of 4 s the root's quarter always, and whatever four layers are late."""
    sync = Sync(gradients_s=4.0, root_share=0.25, gradients_bytes=0.0, parameters_s=0.5, parameters_bytes=0.0)
    backwards_s = np.array([layer_backward_s, 1.0])
    assert sync.exposed_s(4, backwards_s, hides=True).tolist() == [wanted + 0.5, 1.5]
    assert sync.exposed_s(4, backwards_s, hides=False).tolist() == [4.5, 4.5]


def test_on_demand_nobody_knows_that_a_nodes_sum_is_whole_before_the_end():
    found = costs()

    def hides(name, one_sided):
        return found.hides_sync(parse_strategy(name), one_sided=one_sided)

    assert hides("III", one_sided=False)
    assert not hides("III", one_sided=True)
    assert hides("INI", one_sided=True)  # each rank's own sum
    assert not hides("GIG", one_sided=False)  # gathers have the network


def test_parameters_that_are_there_are_not_copied_and_gradients_that_stay_are_added():
    found = costs()
    plain = found.of(parse_strategy("NNG"), one_sided=False, copies=True)
    for name in ("gather_s", "copy_in_s", "copy_out_s", "reduce_s", "add_s"):
        assert not np.any(getattr(plain, name)), name
    assert plain.pack_s.tolist() == found.collective["N"].hold_s.tolist()
    assert plain.optimizer_s == found.collective["G"].optimizer_s
    assert plain.publish_s == found.one_sided["G"].publish_s > 0  # bf16 parameters are written once a minibatch
    hybrid = found.of(parse_strategy("IIG"), one_sided=True, copies=False)
    assert hybrid.gather_s.tolist() == found.one_sided["I"].gather_s.tolist()
    assert hybrid.optimizer_s < found.of(parse_strategy("III"), one_sided=True, copies=False).optimizer_s


# What comes of it.


@pytest.mark.parametrize(("model", "devices"), [("qwen2.5-14b", 16), ("qwen2.5-32b", 32)])
def test_hybrid_sharding_of_the_paper(model, devices):
    """arXiv 2601.19362, appendix E: with parameters and gradients inside the node and the optimizer across nodes, on
    LongAlign cut to 8K, ODC gains up to 28 % over collectives. More than is simulated, unless its collectives did not
    hide what crosses nodes either; it does not say."""
    policies = ("lb-micro", "lb-mini")  # the paper's
    found = run("IIG", model=model, devices=devices, minibatch_size=4, scale=0.125, minibatches=100, policy=policies)
    on_demand, collective = found.row("IIG", "odc"), found.row("IIG", "collective")
    assert 1.17 < collective.minibatch_s / on_demand.minibatch_s < 1.24
    unhidden_s = collective.minibatch_s - collective.sync_s + on_demand.sync_s
    assert 1.24 < unhidden_s / on_demand.minibatch_s < 1.28


@pytest.mark.parametrize("more", [{}, {"gather_dtype": "fp32"}, {"recipe": "mixed"}, {"devices": 4}])
def test_full_sharding_is_what_simulate_runs(more):
    policies = ("lb-micro", "lb-mini", "cost-rows")
    found, results = run("zero3", **more), simulate(Study(**(SMALL | more), policy=policies))
    for transport in ("collective", "collective-deferred", "odc"):
        row, others = found.row("GGG", transport), [each for each in results.rows if each.schedule == transport]
        wanted = results.row(transport, row.policy)
        assert wanted.speedup == max(each.speedup for each in others if each.usable)
        assert row.samples_per_s_per_device == pytest.approx(wanted.samples_per_s_per_device, rel=1e-9)
        assert row.speedup == pytest.approx(wanted.speedup, rel=1e-9)
        assert row.network_bytes * found.nodes == pytest.approx(wanted.inter_node_bytes_per_minibatch, rel=1e-9)
        assert row.provenance == wanted.provenance["transfers"]
        assert row.peak_bytes == pytest.approx(wanted.peak_memory_bytes["total"], abs=4)  # rounded up together or apart


def test_each_row_has_the_fastest_of_the_policies_that_it_can_run():
    found = run("hsdp,zero1", policy=("lb-mini", "cost-rows"), device_speed=(*[1.0] * 15, 0.5))
    assert found.row("III", "collective").policy == "cost-rows"  # lb-mini does not promise equal counts
    assert found.row("NNG", "collective").policy == "cost-rows"  # which knows of the slow device
    assert run("zero1", policy=("lb-mini", "cost-rows")).row("NNG", "collective").policy == "lb-mini"
    only = run("hsdp", policy=("lb-mini",))
    assert only.row("III", "collective").policy == "lb-micro"  # nothing of what was asked for can run there
    assert (only.row("III", "odc").policy, only.row("GGG", "collective").speedup) == ("lb-mini", 1.0)


def test_minibatches_of_a_batch_are_resampled_together():
    study = {"devices": 8, "minibatches": 24}
    wanted = simulate(Study(**study, policy=("lb-micro", "verl-native"), schedule=("collective",)))
    found = shard(Study(**study, policy=("verl-native",)), (parse_strategy("zero3"),)).row("GGG", "collective")
    assert found.speedup == pytest.approx(wanted.row("collective", "verl-native").speedup)
    width = found.speedup_ci95[1] - found.speedup_ci95[0]
    low, high = wanted.row("collective", "verl-native").speedup_ci95
    assert width == pytest.approx(high - low, rel=0.15)


def test_a_policy_whose_plan_fits_comes_before_a_faster_one():
    more = {"model": "qwen2.5-7b", "minibatches": 100}
    both, fast = run("NNI", **more), run("NNI", **more, policy=("lb-mini",))
    assert (both.row("NNI", "collective").fits, fast.row("NNI", "collective").fits) == (True, False)
    assert both.row("NNI", "collective").speedup < fast.row("NNI", "collective").speedup


def test_ranks_that_wait_for_their_node_only_wait_less():
    found = run()
    for name in ("III", "IIG"):
        assert found.row("GGG", "collective").speedup < found.row(name, "collective").speedup
        assert found.row(name, "collective").speedup < found.row(name, "odc").speedup


def test_over_a_slow_network_traffic_decides():
    """Short samples on 100 Gb/s a node: pulling every shard over it is the worst one can do."""
    found = run(hardware="cloud-100g", model="qwen2.5-7b", scale=0.1)
    slowest = min(found.rows, key=lambda row: row.speedup)
    assert (slowest.strategy, slowest.transport) == ("GGG", "odc")
    assert found.row("GGG", "odc").speedup < 0.5 < 1.3 < found.row("IIG", "collective").speedup
    assert found.row("IIG", "odc").network_bytes < 0.1 * found.row("GGG", "odc").network_bytes


def test_on_one_node_there_is_no_between():
    found = run(devices=8)
    assert {row.strategy for row in found.rows} == {"NNN", "NNG", "NGG", "GNG", "GGG"}
    assert "IIG" in found.left_out
    assert {row.network_bytes for row in found.rows} == {0.0}


def test_on_nodes_of_one_device_there_is_no_inside(tmp_path):
    text = (DATA / "cloud-100g.toml").read_text()
    (tmp_path / "single.toml").write_text(text.replace("devices_per_node = 8", "devices_per_node = 1"))
    found = run(devices=4, hardware=str(tmp_path / "single.toml"))
    assert {row.strategy for row in found.rows} == {"NNN", "NNG", "NGG", "GNG", "GGG"}


@pytest.mark.parametrize("scale", [0.06, 0.125, 1.0])
def test_nothing_is_faster_than_its_network(scale):
    found = run(hardware="cloud-100g", model="qwen2.5-7b", scale=scale)
    bytes_per_s = load_cluster("cloud-100g").inter.node_bytes_per_s
    for row in found.rows:
        assert row.minibatch_s >= row.network_bytes / bytes_per_s, row


def test_a_slow_backward_hides_more():
    study = {"model": "qwen2.5-7b", "hardware": "cloud-100g", "scale": 0.125}
    slow, fast = (run("zero1,hsdp", **study, device_speed=(speed,) * 16) for speed in (0.1, 1.0))
    assert slow.row("NNG", "collective").sync_s < fast.row("NNG", "collective").sync_s
    assert slow.row("III", "odc").sync_s == pytest.approx(fast.row("III", "odc").sync_s)


def test_equal_samples_gain_nothing_from_waiting_less(tmp_path):
    (tmp_path / "equal.txt").write_text("8192\n" * 64)
    found = run("hsdp", lengths=tmp_path / "equal.txt")
    assert found.row("III", "collective").speedup == pytest.approx(1.0, abs=0.03)


def test_the_advice_sends_least_of_what_is_about_as_fast_and_then_takes_least_memory():
    found = run(model="qwen2.5-7b")
    best = found.advised()
    assert best.fits
    near = [row for row in found.rows if row.fits and row.speedup >= 0.98 * found.fastest().speedup]
    assert best.network_bytes == min(row.network_bytes for row in near)
    assert (best.strategy, best.transport) == ("IIG", "odc")
    assert advice(found)[0].startswith("Use NNG (ZeRO-1) with collectives, lb-mini: ")
    assert advice(found)[1].startswith(
        "On-demand transfers are not faster; as fast with less memory is IIG (PaRO) on demand, lb-mini: "
    )
    one_node = run(devices=8)
    assert one_node.advised("odc").strategy == "GGG"  # nothing is sent, and it takes least memory


def test_a_gain_of_two_percent_is_a_gain_whoever_takes_less_memory():
    """What is advised may be a little slower than the fastest; whether there is a gain, the fastest says."""
    found = run("III,IIG")
    speeds = {("III", "collective"): 1.035, ("IIG", "collective"): 1.016}
    rows = tuple(replace(row, speedup=speeds.get((row.strategy, row.transport), 1.0)) for row in found.rows)
    assert advice(replace(found, rows=rows))[0].startswith("Use IIG (PaRO) with collectives")
    speeds = {("III", "odc"): 1.30, ("IIG", "odc"): 1.281, ("III", "collective"): 1.262}
    rows = tuple(replace(row, speedup=speeds.get((row.strategy, row.transport), 1.0)) for row in found.rows)
    assert advice(replace(found, rows=rows))[0].startswith("Use IIG (PaRO) on demand")
    rows = tuple(replace(row, speedup=1.0) for row in found.rows)
    assert advice(replace(found, rows=rows)) == [
        "Keep GGG (ZeRO-3, FSDP) with collectives: nothing of these that fits gains 2 % here."
    ]


def test_ranks_in_step_take_the_last_microbatch_at_the_pace_of_the_slowest():
    """Rank 0 has most to do, rank 1 the longest last microbatch."""
    tokens = np.array([[[9.0, 1.0], [2.0, 5.0]]])
    load = Load(counts=np.array([[2, 2]]), tokens=tokens, squares=np.zeros_like(tokens), speed=np.ones_like(tokens))
    unit = UnitCost(c1_s_per_token=1.0)
    costs = replace(choose_costs(load_model("qwen2.5-1.5b"), A100, None, True), layer_forward=unit, layer_backward=unit)
    assert _last_backward_s(load, costs, together=1).tolist() == [2.0]
    assert _last_backward_s(load, costs, together=2).tolist() == [5.0]


def test_undivided_parameters_are_in_memory_once():
    """What full sharding gathers, the state of ZeRO-1 has already; nor is a gradient reduced in a microbatch."""
    found, model = run(), load_model("qwen2.5-1.5b")
    more = {row.strategy: row.peak_bytes - row.state_bytes for row in found.rows if row.transport == "collective"}
    # the peak of each is in the last layer's backward, with the root, that layer and the one before gathered
    gathered = 2 * (model.root_parameters + 2 * model.layer_parameters)
    assert more["NII"] == more["III"] - gathered
    assert more["NNG"] < more["NII"]


def test_zero1_holds_what_deferred_full_sharding_holds():
    """bf16 parameters and fp32 gradients whole, the rest divided: the two name the same tensors."""
    found = run("zero1", model="qwen2.5-7b", devices=8, policy=("lb-mini",))
    wanted = found.row("GGG", "collective-deferred").peak_bytes
    assert found.row("NNG", "collective").peak_bytes == pytest.approx(wanted, abs=4)


def test_what_hardly_fits_is_told_but_not_advised():
    found = run("zero1,paro", devices=16)
    memory_bytes = found.inputs.machine.cluster.device.memory_bytes
    shares = {("NNG", "collective"): 0.951}
    speeds = {("NNG", "collective"): 1.32, ("IIG", "odc"): 1.3, ("IIG", "collective"): 1.03}
    rows = tuple(
        replace(
            row,
            speedup=speeds.get((row.strategy, row.transport), 1.0),
            peak_bytes=int(shares.get((row.strategy, row.transport), 0.94) * memory_bytes),
        )
        for row in found.rows
    )
    first, second = advice(replace(found, rows=rows))
    assert first.startswith("Use IIG (PaRO) on demand")
    assert first.endswith("(tight: 94% of a device), " + first.split(", ")[-1])
    assert second.startswith("Without on-demand transfers use IIG (PaRO) with collectives")
    assert "It fits, but too tightly to count on: NNG (ZeRO-1) with collectives, lb-mini: 32 % more" in second
    rows = tuple(replace(row, peak_bytes=int(0.96 * memory_bytes)) for row in rows)  # where nothing fits better
    assert advice(replace(found, rows=rows))[0].startswith("Use NNG (ZeRO-1) with collectives")


@pytest.mark.parametrize(
    ("more_bytes", "second"),
    [(0, "On-demand transfers add nothing worth it."), (20e9, "On-demand transfers are not faster; as fast with less")],
)
def test_as_fast_on_demand_with_less_memory_is_told(more_bytes, second):
    found = run("zero1", devices=8)
    least = found.row("GGG", "odc").peak_bytes
    peaks = {("NNG", "collective"): least + int(more_bytes)}
    speeds = {("NNG", "collective"): 1.3, ("GGG", "odc"): 1.3}
    rows = tuple(
        replace(
            row,
            speedup=speeds.get((row.strategy, row.transport), 1.0),
            peak_bytes=peaks.get((row.strategy, row.transport), row.peak_bytes),
        )
        for row in found.rows
    )
    told = advice(replace(found, rows=rows))
    assert told[0].startswith("Use NNG (ZeRO-1) with collectives")
    assert told[1].startswith(second)


def test_what_does_not_fit_is_not_advised():
    found = run(model="qwen2.5-32b")
    assert found.advised() is None
    assert advice(found) == ["No strategy fits: lower --max-tokens, use more devices, or a smaller model."]


class TestCommand:
    def call(self, *arguments):
        return CliRunner().invoke(app, ["sharding", "--minibatches", "3", *map(str, arguments)])

    def test_table_and_files(self, tmp_path):
        out = tmp_path / "out"
        result = self.call("--devices", 16, "--strategy", "hsdp,IIG", "--out", out)
        assert result.exit_code == 0, result.output
        lines = result.stdout.splitlines()
        assert any(line.startswith("IIG      PaRO") for line in lines)
        assert "longalign, qwen2.5-1.5b on 16 devices (2 nodes) of a100-nvswitch-roce" in result.stdout
        rows = list(csv.DictReader((out / "sharding.csv").open()))
        assert [(row["strategy"], row["transport"]) for row in rows[:2]] == [("III", "collective"), ("III", "odc")]
        assert [row["transport"] for row in rows[-3:]] == ["collective", "collective-deferred", "odc"]
        data = json.loads((out / "sharding.json").read_text())
        assert (data["nodes"], len(data["rows"]), data["schema_version"]) == (2, 7, 1)
        assert (out / "sharding.png").read_bytes().startswith(b"\x89PNG")

    def test_json(self):
        data = json.loads(self.call("--json").stdout)
        assert {row["strategy"] for row in data["rows"]} == {"NNN", "NNG", "NGG", "GNG", "GGG"}

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (
                ("--schedule", "odc"),
                "--schedule: not for odc sharding, whose transports have their own; leave it out, or use odc simulate",
            ),
            (("--policy", "lb-mino"), "unknown policy 'lb-mino': did you mean 'lb-mini'?"),
            (("--stability", "5"), "--stability: not for odc sharding"),
            (("--barrier", "layer"), "--barrier: not for odc sharding; leave it out, or use odc simulate"),
            (("--devices", "1"), "--devices: got 1, expected at least 2 to divide anything over"),
            (("--devices", "12"), "got 12 devices, expected a multiple of 8"),
            (("--strategy", "NIN"), "sharding 'NIN': the optimizer state (N) is divided more coarsely"),
        ],
    )
    def test_refused(self, arguments, message):
        result = self.call(*arguments)
        assert result.exit_code == 2
        assert message in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1

    def test_a_study_file_is_no_way_around(self, tmp_path):
        (tmp_path / "study.toml").write_text('engine = "event"\n')
        result = self.call("--config", tmp_path / "study.toml")
        assert result.exit_code == 2
        assert "--engine: not for odc sharding" in result.stderr

    def test_the_policies_of_rows_are_told(self):
        text = self.call("--strategy", "zero1,zero2").stdout
        assert "dealt with collectives: NNG by lb-mini; NGG, GGG by " in text
        assert "dealt on demand: all by lb-mini" in text

    def test_left_out_on_one_node(self):
        assert "left out: III, IIG: on one node I is G" in self.call("--strategy", "hsdp,IIG").stdout


def test_committed_studies_are_what_the_command_says():
    """docs/when-odc-loses.md takes its numbers from them."""
    folder = Path(__file__).parent.parent / "reports" / "sharding"
    numbers = ("speedup", "sync_s", "peak_bytes", "network_bytes", "minibatch_s")
    for name in ("100g-8k-2-nodes", "800g-64k-4-nodes"):
        data = json.loads((folder / name / "sharding.json").read_text())
        arguments = shlex.split(data["command"])[1:-2]
        assert arguments[0] == "sharding"
        again = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
        for row, other in zip(data["rows"], again["rows"], strict=True):
            assert (row["strategy"], row["transport"]) == (other["strategy"], other["transport"])
            assert [row[n] for n in numbers] == pytest.approx([other[n] for n in numbers])
    rows = list(csv.DictReader((folder / "paper_hybrid.csv").open()))
    assert max(float(row["IIG odc / IIG collective"]) for row in rows) == 1.232
    assert max(float(row["the same, neither hides the sync"]) for row in rows) == 1.267


def test_meets():
    assert Strategy("N", "N", "G").meets == "nobody"
    assert Strategy("I", "N", "G").meets == "its node"
    assert Strategy("I", "G", "G").meets == "all ranks"
