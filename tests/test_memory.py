import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odc_sim.errors import InputError
from odc_sim.memory import MemoryEstimate, ScheduleName, largest_max_tokens, peak_memory
from odc_sim.memory_activations import saved_bytes, transient_bytes
from odc_sim.memory_moments import Place, place_of
from odc_sim.memory_plan import places, plan_peak
from odc_sim.models import load_model
from odc_sim.plans import Plan
from odc_sim.validate_predict import _repeats_keys

TINY = load_model("tiny")
MEASURED = Path(__file__).parent / "data" / "memory_peaks_h200.json"
SCHEDULES = get_args(ScheduleName)
GIB = 2**30
# tiny: 37,120 parameters a layer, 32,832 in the root, 16,384 in the head's weight
N, N0, HEAD, P = 37_120, 32_832, 16_384, 181_312


def tiny_memory(**changes: Any) -> MemoryEstimate:
    settings_: dict[str, Any] = {
        "world_size": 4,
        "schedule": "collective",
        "microbatch_tokens": 10,
        "reserved_bytes": 0,
    }
    return peak_memory(TINY, **(settings_ | changes))


INPUTS = 4 * 16 + 28
SAVED = 16 * 64 + (4 * 64 + 4 * 32 + 4 * 4) + 8 * 128
"""What a layer keeps of a token: norms, attention, MLP."""
DOWN = 64 * 128


def test_tiny_by_hand_collective() -> None:
    estimate = tiny_memory()
    assert (estimate.moment, estimate.place) == ("backward of layer 3", "middle")
    assert estimate.recipe == "paper"
    assert estimate.categories == {
        "parameters": P,  # 4 bytes over 4 ranks
        "gradients": P,
        "optimizer": 2 * P,
        # root; layer, and the next one gathered; gradients of down_proj and head
        "unsharded": 2 * N0 + (2 + 2) * N + 2 * DOWN + 2 * HEAD,
        "staging": 4 * N,  # the reduction of layer 4
        "published_window": 0,
        "local_gradients": 0,
        # the inputs of three layers, what the third saves again, its output, and its MLP's and residual gradients
        "activations": 10 * (INPUTS + 3 * 2 * 64 + SAVED + 2 * 64 + 4 * 128 + 2 * 64),
        "logits": 0,
        "reserved": 0,
    }
    assert estimate.total_bytes == sum(estimate.categories.values())


def test_gradients_of_the_only_microbatch_come_as_activations_go() -> None:
    """A layer's gradient N, 4 bytes over 4 ranks, against its input of 128 bytes a token."""
    for tokens, moment, done in ((280, "backward of layer 2", 2), (1000, "backward of layer 3", 1)):
        estimate = tiny_memory(place="only", microbatch_tokens=tokens)
        assert estimate.moment == moment
        assert estimate.categories["gradients"] == done * N
        layers = 4 - done
        assert estimate.categories["activations"] == tokens * (INPUTS + layers * 128 + SAVED + 6 * 128)
        assert estimate.categories["unsharded"] == 2 * N0 + 4 * N + 2 * DOWN + 2 * HEAD


def test_tiny_by_hand_odc() -> None:
    odc = tiny_memory(schedule="odc", place="only", microbatch_tokens=1000)
    collective = tiny_memory(place="only", microbatch_tokens=1000)
    assert odc.moment == collective.moment == "backward of layer 3"
    # 2 P / 4; the accumulators are the gradients, always there
    assert odc.categories == collective.categories | {"published_window": P // 2, "gradients": P}
    fp32 = tiny_memory(schedule="odc", place="only", microbatch_tokens=1000, gather_dtype="fp32").categories
    assert fp32 == odc.categories | {"published_window": P, "unsharded": odc.categories["unsharded"] + 2 * N}


@pytest.mark.parametrize("tokens", [10, 1000])
def test_of_odc_every_microbatch_takes_as_much(tokens: int) -> None:
    """Its gradients are always there, and nothing is kept from one microbatch to the next."""
    totals = {
        tiny_memory(schedule="odc", place=place, microbatch_tokens=tokens).total_bytes for place in get_args(Place)
    }
    assert len(totals) == 1


def test_local_sums_are_of_several_microbatches() -> None:
    shared = {"microbatch_tokens": 3000}
    for schedule in ("collective-deferred", "odc-local-sum"):
        only, *others = (tiny_memory(schedule=schedule, place=place, **shared) for place in get_args(Place))
        assert only.categories["local_gradients"] == 0
        assert {each.categories["local_gradients"] for each in others if each.place != "first"} == {4 * P}
        assert only.total_bytes < min(each.total_bytes for each in others if each.place != "first")
    deferred = tiny_memory(schedule="collective-deferred", place="middle", **shared)
    assert deferred.moment == "backward of layer 4"
    assert deferred.categories["unsharded"] == 2 * P + 2 * DOWN + 2 * HEAD
    assert deferred.categories["gradients"] == 0


def test_mixed_recipe_moves_bytes_but_has_as_many() -> None:
    paper, mixed = tiny_memory().categories, tiny_memory(recipe="mixed").categories
    assert mixed == paper | {"parameters": P // 2, "gradients": P // 2, "optimizer": 3 * P}
    assert sum(mixed.values()) == sum(paper.values())


def test_loss_is_the_peak_when_all_logits_exist_at_once() -> None:
    wide = replace(TINY, vocab=2_000)

    def memory(chunk: int | None) -> MemoryEstimate:
        return peak_memory(wide, world_size=4, schedule="collective", microbatch_tokens=1000, chunked_loss_tokens=chunk)

    estimate = memory(None)
    assert estimate.moment == "loss"
    assert estimate.categories["logits"] == 1000 * 2_000 * 12
    assert estimate.categories["activations"] == 1000 * (INPUTS + 4 * 2 * 64 + 8 * 64)
    assert estimate.categories["unsharded"] == 2 * wide.root_parameters + 2 * N  # no chunk has made a gradient yet
    chunked = memory(800)
    assert chunked.moment == "loss"
    assert chunked.categories["logits"] == 800 * 2_000 * 12
    assert chunked.categories["unsharded"] == estimate.categories["unsharded"] + 2 * wide.vocab * wide.hidden
    assert chunked.categories["activations"] == estimate.categories["activations"] + 200 * 2 * 64
    assert memory(10).moment.startswith("backward of layer")


def test_the_root_is_the_peak_with_a_large_vocabulary_and_few_tokens() -> None:
    wide = replace(TINY, vocab=100_000)
    head = wide.vocab * wide.hidden
    estimate = peak_memory(wide, world_size=8, schedule="collective", microbatch_tokens=1, reserved_bytes=7)
    assert estimate.moment == "root reduce"
    assert estimate.categories["unsharded"] == 2 * wide.root_parameters
    assert estimate.categories["staging"] == 4 * wide.root_parameters
    assert estimate.categories["activations"] == INPUTS
    assert estimate.categories["reserved"] == 7
    two = peak_memory(wide, world_size=2, schedule="collective", microbatch_tokens=1, place="last")
    assert two.moment == "root reduced"  # the result is as large as the gradients, and the head's is still there
    assert two.categories["staging"] == (4 + 2) * wide.root_parameters
    assert two.categories["unsharded"] == 2 * head
    tied = peak_memory(
        replace(wide, tied_embeddings=True), world_size=2, schedule="collective", microbatch_tokens=1, place="last"
    )
    assert tied.moment in ("root reduce", "root reduced")
    deferred = peak_memory(wide, world_size=8, schedule="collective-deferred", microbatch_tokens=1)
    assert (deferred.moment, deferred.place) == ("root sum", "middle")
    assert deferred.categories["local_gradients"] == 4 * wide.parameters
    assert deferred.categories["unsharded"] == 2 * wide.parameters + 2 * wide.root_parameters
    last = peak_memory(wide, world_size=8, schedule="collective-deferred", microbatch_tokens=1, place="last")
    assert last.moment == "root reduce"
    assert last.categories["local_gradients"] == last.categories["staging"] == 4 * wide.root_parameters


def test_the_first_layer_is_the_peak_while_the_root_is_still_in_its_buffer() -> None:
    wide = replace(TINY, vocab=100_000)
    odc = peak_memory(wide, world_size=8, schedule="odc", microbatch_tokens=1, gather_dtype="fp32")
    assert odc.moment == "first layer"
    assert odc.categories["unsharded"] == (2 + 4) * (wide.root_parameters + N)
    assert odc.categories["staging"] == 0
    assert odc.categories["activations"] == INPUTS + 2 * 64


def test_one_rank_shards_nothing() -> None:
    categories = tiny_memory(world_size=1).categories
    assert (categories["parameters"], categories["gradients"], categories["optimizer"]) == (4 * P, 4 * P, 8 * P)


def test_shards_round_up() -> None:
    assert tiny_memory(world_size=3).categories["parameters"] == -(-4 * P // 3)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_more_ranks_never_take_more_memory(schedule: str) -> None:
    totals = [tiny_memory(schedule=schedule, world_size=ranks).total_bytes for ranks in (1, 2, 3, 8, 64)]
    assert totals == sorted(totals, reverse=True)
    assert totals[0] > totals[-1]


def test_without_recompute_every_layer_keeps_what_one_saves() -> None:
    assert saved_bytes(TINY, recompute=True) == 2 * 64
    assert saved_bytes(TINY, recompute=False) == SAVED
    assert transient_bytes(TINY, recompute=True) - transient_bytes(TINY, recompute=False) == SAVED + 2 * 64
    with_norms = replace(TINY, qk_norm=True)
    assert saved_bytes(with_norms, recompute=False) == SAVED + 6 * (64 + 32)
    wide = replace(TINY, ffn=512)
    estimate = peak_memory(wide, world_size=4, schedule="collective", microbatch_tokens=100_000, recompute=False)
    assert estimate.moment == "backward of layer 4"
    assert estimate.categories["activations"] == 100_000 * (INPUTS + 4 * (SAVED + 8 * 384) + 4 * 512 + 2 * 64)


def test_repeated_keys_are_as_wide_as_queries() -> None:
    assert saved_bytes(TINY, recompute=False, repeated_keys=True) == SAVED + 4 * (64 - 32)
    without, repeated = (
        tiny_memory(microbatch_tokens=1000, repeated_keys=repeated).categories["activations"]
        for repeated in (False, True)
    )
    assert repeated - without == 1000 * 4 * (64 - 32)


@settings(max_examples=60, deadline=None)
@given(
    schedule=st.sampled_from(SCHEDULES),
    ranks=st.integers(1, 64),
    memory_bytes=st.integers(1, 40_000_000),
    recompute=st.booleans(),
    chunk=st.sampled_from([None, 1, 512]),
    recipe=st.sampled_from(["paper", "mixed"]),
    gather_dtype=st.sampled_from(["fp32", "bf16"]),
)
def test_largest_max_tokens_fits_and_one_more_does_not(
    schedule: str, ranks: int, memory_bytes: int, chunk: int | None, **choices: Any
) -> None:
    shared: dict[str, Any] = {
        "world_size": ranks,
        "schedule": schedule,
        "chunked_loss_tokens": chunk,
        "reserved_bytes": 9,
    }

    def peak(tokens: int) -> int:
        return peak_memory(TINY, microbatch_tokens=tokens, **shared, **choices).total_bytes

    tokens = largest_max_tokens(TINY, memory_bytes=memory_bytes, **shared, **choices)
    if tokens is None:
        assert peak(0) > memory_bytes
    else:
        assert peak(tokens) <= memory_bytes < peak(tokens + 1)


def measured() -> Iterator[Any]:
    """(schedule, tokens of a loss chunk, tokens of microbatches of each rank, peak bytes) of each minibatch."""
    for run in json.loads(MEASURED.read_text(encoding="utf-8"))["runs"]:
        for number, minibatch in enumerate(run["minibatches"]):
            name = f"{run['workload']}-{run['schedule']}-{run['policy']}-{number}"
            chunk, ranks = run["chunked_loss_tokens"], minibatch["tokens"]
            yield pytest.param(run["schedule"], chunk, ranks, minibatch["peak_bytes"], id=name)


@pytest.mark.parametrize(("schedule", "chunk", "ranks", "peak_bytes"), list(measured()))
def test_against_measured_peaks(schedule: str, chunk: int, ranks: list[list[int]], peak_bytes: int) -> None:
    """One constant, `DEFAULT_RESERVED_BYTES`, is from these runs; all else follows from shapes."""
    predicted = max(
        peak_memory(
            load_model("qwen2.5-1.5b"),
            world_size=2,
            schedule=schedule,
            microbatch_tokens=tokens,
            place=place_of(number, len(rank)),
            chunked_loss_tokens=chunk,
            repeated_keys=True,
        ).total_bytes
        for rank in ranks
        for number, tokens in enumerate(rank)
    )
    assert predicted == pytest.approx(peak_bytes, rel=0.002)


@pytest.mark.parametrize(
    ("device", "packages", "repeats"),
    [
        ("cuda", {"torch": "2.11.0+cu130"}, True),
        ("cuda", {"torch": "2.13.0"}, False),
        ("cpu", {"torch": "2.11.0"}, False),
        ("cuda", {}, False),
    ],
)
def test_a_run_says_whether_keys_were_repeated(device: str, packages: dict[str, str], repeats: bool) -> None:
    run: Any = SimpleNamespace(
        environment={"environment": {"packages": packages}}, config=SimpleNamespace(device=device)
    )
    assert _repeats_keys(run) is repeats


def test_against_peaks_of_an_earlier_benchmark() -> None:
    """What rank 0's `max_memory_allocated` said for qwen2.5-1.5b on two H200s: 21.5 GiB collective, 22.2 GiB odc.

    torch 2.11, FSDP2 with fp32 masters and bf16 compute, layers checkpointed, loss in chunks of 2,048 tokens; its
    largest microbatch was one sample of 46,049 tokens, each rank's first of a minibatch. Windows were not counted. That
    benchmark checkpointed as torch does, and its odc kept a zero buffer of the root's shard, 0.9 GB, which is gone.
    """
    model = load_model("qwen2.5-1.5b")
    collective, odc = (
        peak_memory(
            model,
            world_size=2,
            schedule=schedule,
            microbatch_tokens=46_049,
            place="first",
            chunked_loss_tokens=2048,
            reserved_bytes=0,
        )
        for schedule in ("collective", "odc")
    )
    windows = odc.categories["gradients"] + odc.categories["published_window"]
    zeros = 4 * model.root_parameters // 2
    assert collective.total_bytes / GIB == pytest.approx(21.5, rel=0.02)
    assert (odc.total_bytes - windows + zeros) / GIB == pytest.approx(22.2, rel=0.02)


def test_the_largest_microbatch_need_not_be_at_the_peak() -> None:
    """1,000 tokens come before any gradient exists, 990 after."""
    plan = Plan.from_nested(
        [[[[0], [1]], [[2]]], [[[3]], [[4], [5], [6]]]],
        workload={},
        model="tiny",
        world_size=2,
        minibatch_size=2,
        max_tokens=1000,
        policy="none",
        balancing_cost={"name": "quadratic", "source": "built in"},
        lengths=np.array([1000, 990, 400, 500, 100, 200, 300]),
    )
    asked = {}

    def peak(tokens: int, place: Place) -> MemoryEstimate:
        asked[place] = tokens
        return tiny_memory(microbatch_tokens=tokens, place=place)

    names = [get_args(Place)[number] for number in places(plan)]
    assert names == ["first", "last", "only", "only", "first", "middle", "last"]
    estimate = plan_peak(plan, peak)
    assert asked == {"only": 500, "first": 1000, "middle": 200, "last": 990}
    assert estimate == tiny_memory(microbatch_tokens=990, place="last")
    asked.clear()
    plan_peak(plan, peak, np.array([False, False, True, False, False, False, True]))
    assert asked == {"only": 400, "last": 300}
    asked.clear()
    plan_peak(plan, peak, np.zeros(7, dtype=bool))
    assert asked == {"only": 0}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("tokens", [0, 1, 300, 5000])
def test_a_place_unknown_is_the_worst_one(schedule: str, tokens: int) -> None:
    known = [
        tiny_memory(schedule=schedule, microbatch_tokens=tokens, place=place).total_bytes for place in get_args(Place)
    ]
    assert tiny_memory(schedule=schedule, microbatch_tokens=tokens).total_bytes == max(known)
    assert [place_of(number, 4) for number in range(4)] == ["first", "middle", "middle", "last"]
    assert place_of(0, 1) == "only"


def test_deferral_costs_six_bytes_a_parameter_a_rank_in_the_limit() -> None:
    model = load_model("qwen2.5-7b")
    deferred, collective = (
        peak_memory(model, world_size=10**6, schedule=schedule, microbatch_tokens=65_536)
        for schedule in ("collective-deferred", "collective")
    )
    # Less what the baseline has at its peak anyway: the root, a layer and the next, and a reduction. That is a layer
    # later, when an input has been freed.
    assert deferred.moment == "backward of layer 28"
    assert collective.moment == "backward of layer 27"
    baseline_bytes = 2 * model.root_parameters + 8 * model.layer_parameters - 65_536 * 2 * model.hidden
    assert deferred.total_bytes - collective.total_bytes == pytest.approx(
        6 * model.parameters - baseline_bytes, rel=1e-4
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"world_size": 0}, "world_size: got 0, expected at least 1"),
        ({"place": "lsat"}, r"unknown place 'lsat': did you mean 'last'\?"),
        ({"schedule": "odcc"}, r"unknown schedule 'odcc': did you mean 'odc'\?"),
        ({"recipe": "fp8"}, "unknown precision recipe 'fp8': known: mixed, paper"),
        ({"gather_dtype": "fp16"}, "unknown gather_dtype 'fp16'"),
        ({"microbatch_tokens": -1}, "microbatch_tokens: got -1, expected at least 0"),
        ({"chunked_loss_tokens": 0}, "chunked_loss_tokens: got 0, expected at least 1, or None for no chunks"),
        ({"reserved_bytes": -1}, "reserved_bytes: got -1, expected at least 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        tiny_memory(**changes)


def test_no_memory_is_refused() -> None:
    with pytest.raises(InputError, match="memory_bytes: got 0, expected at least 1"):
        largest_max_tokens(TINY, memory_bytes=0, world_size=1, schedule="odc")


def test_memory_beyond_any_index_is_still_bisected() -> None:
    tokens = largest_max_tokens(TINY, memory_bytes=10**19, world_size=1, schedule="odc")
    assert tokens is not None
    assert peak_memory(TINY, world_size=1, schedule="odc", microbatch_tokens=tokens).total_bytes <= 10**19
    assert peak_memory(TINY, world_size=1, schedule="odc", microbatch_tokens=tokens + 1).total_bytes > 10**19
