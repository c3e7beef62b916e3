import os
import re
import time
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed; `make test-kernels` runs these")

from odc_kernels.emulated import EmulatedLm  # noqa: E402
from odc_kernels.lm import pack  # noqa: E402
from odc_kernels.waits import HostClock  # noqa: E402
from odc_sim.costs import fitted_costs  # noqa: E402
from odc_sim.errors import InputError  # noqa: E402
from odc_sim.models import load_model  # noqa: E402

CPU = torch.device("cpu")
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
    lm = EmulatedLm(replace(QWEN, layers=2), costs, time_scale=0.3, device=CPU)
    one = batch(20_000, 2_000)
    embedding, layer, head, *_ = seconds = lm.seconds(one).tolist()
    assert min(layer, head) > 0.005
    forward_s = embedding + 2 * layer + head
    backward_s = seconds[3] + 2 * seconds[4] + seconds[5]
    took = []
    for _ in range(7):
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
