import re
from dataclasses import replace

import numpy as np
import pytest

from odc_sim.costs import fitted_costs
from odc_sim.emulation import default_parameters_scale, emulated_shape, executed_costs, on_one_stream
from odc_sim.errors import InputError
from odc_sim.execution import Load, execute
from odc_sim.hardware import Host, load_cluster
from odc_sim.models import load_model
from odc_sim.plans import Plan
from odc_sim.schedules import make_schedule
from odc_sim.transfers import transfer_costs

QWEN = load_model("qwen2.5-1.5b")
CLUSTER = load_cluster("a100-nvswitch-roce")


def transfers(one_sided):
    return transfer_costs(QWEN, CLUSTER, world_size=2, one_sided=one_sided, gather_dtype="bf16")


def test_shapes():
    assert default_parameters_scale(QWEN, "cuda") == 1
    assert emulated_shape(QWEN, 1).parameters == QWEN.parameters
    small = emulated_shape(QWEN, default_parameters_scale(QWEN, "cpu"))
    assert 0.99 * 65_536 < small.layer_parameters <= 65_536
    assert small.root_parameters == -(-QWEN.root_parameters // 715)
    tiny = emulated_shape(QWEN, 10**12)
    assert (tiny.layer_parameters, tiny.root_parameters) == (1, 2)  # embedding and head
    with pytest.raises(InputError, match="parameters_scale: got 0, expected at least 1"):
        emulated_shape(QWEN, 0)


def test_executed_costs_are_scaled_and_have_no_floor():
    costs = fitted_costs(QWEN)
    costs = replace(costs, layer_forward=replace(costs.layer_forward, floor_s=1.0))
    executed = executed_costs(costs, 0.5)
    assert executed.layer_forward.floor_s == 0.0
    assert executed.sample_cost_s(1000) == pytest.approx(0.5 * costs.sample_cost_s(1000))
    assert executed.source.endswith(", times 0.5")
    for scale in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match=re.escape(f"time_scale: got {scale:g}, expected executed seconds")):
            executed_costs(costs, scale)


@pytest.mark.parametrize("name", ["collective", "odc"])
def test_on_one_stream_a_microbatch_takes_the_sum_of_everything(name):
    schedule = make_schedule(name)
    before = transfers(schedule.one_sided)
    host = Host(seconds_per_unit_forward=1e-3, seconds_per_unit_backward=3e-3, source="test")
    plan = Plan.from_nested(
        [[[[0]], [[1]]]],
        workload={"name": "test"},
        model=QWEN.name,
        world_size=2,
        minibatch_size=1,
        max_tokens=4096,
        policy="local",
        balancing_cost={"name": "tokens", "source": "test"},
        lengths=np.array([3000, 3000]),
        groups=None,
    )
    costs = fitted_costs(QWEN)
    run = execute(Load.of(plan), costs, on_one_stream(before, host), CLUSTER, schedule)
    gather_s = before.copy_in_s + before.gather_s + before.copy_out_s
    reduce_s = before.pack_s + before.reduce_s + before.add_s
    expected_s = float(
        gather_s.sum()
        + gather_s[1:].sum()
        + reduce_s.sum()
        + (QWEN.layers + 1) * (host.seconds_per_unit_forward + host.seconds_per_unit_backward)
        + costs.total()(3000, 3000**2)
        + before.optimizer_s
        + before.publish_s
    )
    assert run.makespan_s[0] == pytest.approx(expected_s, rel=1e-9)
