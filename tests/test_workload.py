import json
import math
import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odc_sim.datafiles import data_dir
from odc_sim.errors import InputError
from odc_sim.length_sources import Component, Limits, Mixture
from odc_sim.length_stats import group_correlation, length_stats
from odc_sim.workload import (
    RolloutGroups,
    Workload,
    builtin_workloads,
    describe,
    draw_minibatches,
    load_workload,
    workload_from_lengths,
)


def rng(seed=0):
    return np.random.default_rng(seed)


def lognormal(sigma=0.5, group_sigma=None, size=8, limits=(1, 10**6, "clip"), median=1000.0):
    return Workload(
        name="test",
        description="one lognormal",
        kind="sft" if group_sigma is None else "rl",
        evidence="none",
        source=Mixture(
            components=(Component(weight=1.0, median_tokens=median, sigma=sigma),),
            limits=Limits(min_tokens=limits[0], max_tokens=limits[1], how=limits[2]),
        ),
        rl=None if group_sigma is None else RolloutGroups(group_size=size, group_sigma=group_sigma),
    )


# The built-in workloads have the statistics that were published


def test_longalign_has_the_published_statistics():
    x = load_workload("longalign").sample(200_000, rng()).lengths
    assert x.mean() == pytest.approx(16_500, rel=0.02)
    # Of the data set itself (a survey of 240 rows), and of the published fit.
    assert np.percentile(x, 50) == pytest.approx(11_490, rel=0.02)
    assert np.percentile(x, 90) == pytest.approx(37_719, rel=0.06)
    assert np.percentile(x, 90) == pytest.approx(35_600, rel=0.02)
    assert np.percentile(x, 99) == pytest.approx(58_400, rel=0.02)
    assert (x >= 16_384).mean() == pytest.approx(0.296, rel=0.03)
    assert (x >= 32_768).mean() == pytest.approx(0.121, rel=0.03)
    assert x.min() >= 1000
    assert x.max() <= 65_536


def test_swesmith_has_the_published_statistics():
    x = load_workload("swesmith").sample(200_000, rng()).lengths
    assert x.mean() == pytest.approx(34_724, rel=0.01)
    assert (x == 65_536).mean() == pytest.approx(0.074, rel=0.03)
    assert x.max() == 65_536


def test_aime_paper_has_the_published_mean_and_range():
    x = load_workload("aime-paper").sample(200_000, rng()).lengths
    assert x.mean() == pytest.approx(9_066, rel=0.01)
    assert 24_000 < x.max() <= 25_000


def test_aime_qwen3_has_the_published_statistics():
    workload = load_workload("aime-qwen3")
    x = workload.sample(200_000, rng()).lengths
    assert x.mean() == pytest.approx(20_340, rel=0.01)
    assert x.std() == pytest.approx(11_965, rel=0.01)
    assert np.percentile(x, [50, 75]) == pytest.approx([17_600, 29_400], rel=0.02)
    assert (x == 40_960).mean() == pytest.approx(0.127, rel=0.03)
    assert workload.max_tokens == 40_960


TRACES = [  # rows, mean, p50, p90, p99, max as published beside the files
    ("mooncake-conversation", 12_031, 12_378, 7_255, 27_723, 85_851, 126_527),
    ("swebench-agent", 500, 24_866, 22_268, 37_965, 83_466, 106_539),
    ("agentic-coding", 692, 171_458, 134_392, 338_054, 794_353, 895_166),
    ("deepseek-r1", 20_000, 1_527, 792, 3_431, 12_598, 30_481),
    ("alibaba-offline", 326, 1_950, 1_478, 4_648, 6_144, 6_144),
    ("azure-chat", 19_366, 1_366, 1_412, 2_820, 4_259, 14_089),
    ("wlbllm-docs", 99_519, 3_962, 3_227, 5_784, 26_058, 124_913),
    ("prolong-docs", 77_932, 3_052, 1_914, 6_051, 16_270, 340_149),
]


@pytest.mark.parametrize("row", TRACES, ids=lambda row: row[0])
def test_traces_are_the_published_ones(row):
    workload = load_workload(row[0])
    s = length_stats(workload.source.lengths)
    assert (s.num_samples, *(round(v) for v in (s.mean, s.p50, s.p90, s.p99)), s.max) == row[1:]
    assert workload.max_tokens == row[6]
    table = (data_dir("traces") / "lengths" / "README.md").read_text()
    cells = " | ".join(f"{value:,}" for value in row[1:])
    assert f"| {workload.source.file} | `{row[0]}` | {cells} |" in table


def test_every_builtin_workload_loads_and_explains_itself():
    names = builtin_workloads()
    assert set(names) == {"longalign", "swesmith", "aime-paper", "aime-qwen3"} | {row[0] for row in TRACES}
    readme = (data_dir("workloads") / "README.md").read_text()
    for name in names:
        workload = load_workload(name)
        assert workload.name == name
        assert f"| `{name}` | {workload.kind} |" in readme
        assert f"{workload.max_tokens:,}" in readme
        assert workload.sample(50, rng()).lengths.max() <= workload.max_tokens
        if workload.as_dict()["lengths"]["distribution"] == "trace":
            assert re.search(r"commit\s+[0-9a-f]{40}", workload.evidence)
            assert re.search(r"Apache-2.0|MIT|CC-BY-4.0", workload.evidence)
            assert "Source: " in workload.evidence


def test_every_shipped_file_of_lengths_has_its_licence_and_workload():
    folder = data_dir("traces") / "lengths"
    used = {load_workload(row[0]).source.file for row in TRACES}
    assert {path.name for path in folder.glob("*.txt")} == used
    assert "Apache License" in (folder / "licences" / "Apache-2.0.txt").read_text()
    assert "Kilian A. Lieret" in (folder / "licences" / "MIT-mini-swe-agent.txt").read_text()


# Sampling


@pytest.mark.parametrize("name", ["longalign", "aime-qwen3", "azure-chat"])
def test_a_seed_fixes_the_samples(name):
    workload = load_workload(name)
    first, again, other = (workload.sample(300, rng(seed)).lengths for seed in (1, 1, 2))
    assert first.dtype == np.int64
    assert first.tolist() == again.tolist()
    assert first.tolist() != other.tolist()


def test_one_lognormal_by_hand():
    x = np.log(lognormal(sigma=0.5, median=100_000.0, limits=(1, 2**31, "clip")).sample(100_000, rng()).lengths)
    assert x.mean() == pytest.approx(math.log(100_000), abs=0.01)
    assert x.std() == pytest.approx(0.5, rel=0.01)


def test_limits_clip_and_reject():
    clipped = lognormal(limits=(900, 1100, "clip")).sample(20_000, rng()).lengths
    inside = lognormal(limits=(900, 1100, "reject")).sample(20_000, rng()).lengths
    for x in (clipped, inside):
        assert (x.min(), x.max()) == (900, 1100)
    below = 0.5 * math.erfc(-math.log(0.9) / (0.5 * math.sqrt(2)))
    assert (clipped == 900).mean() == pytest.approx(below, abs=0.01)
    assert (inside == 900).mean() < 0.02


def test_rejection_keeps_the_weights_of_the_components():
    """Half of the long component is refused, yet it stays half of the samples."""
    source = Mixture(
        components=(
            Component(weight=0.5, median_tokens=100.0, sigma=0.1),
            Component(weight=0.5, median_tokens=10_000.0, sigma=0.1),
        ),
        limits=Limits(min_tokens=1, max_tokens=10_000, how="reject"),
    )
    x = source.draw(40_000, rng(), scale=1.0, drop_above=None)
    assert (x > 1000).mean() == pytest.approx(0.5, abs=0.01)
    assert x.max() == 10_000


def test_log_sigma_adds_spread_within_and_between_components():
    parts = (
        Component(weight=0.25, median_tokens=math.exp(1), sigma=0.6),
        Component(weight=0.75, median_tokens=math.exp(5), sigma=0.6),
    )
    source = Mixture(components=parts, limits=Limits(min_tokens=1, max_tokens=10**6, how="clip"))
    assert source.log_sigma == pytest.approx(math.sqrt(0.36 + 0.25 * 0.75 * 16))


# RL: siblings


def test_siblings_share_the_stated_part_of_the_spread():
    """sigma 0.5, shared 0.4: the correlation of ln(length) is 0.16 / 0.25."""
    samples = lognormal(sigma=0.5, group_sigma=0.4, median=1e5, limits=(1, 2**31, "clip")).sample(80_000, rng())
    assert group_correlation(samples.lengths, samples.groups) == pytest.approx(0.64, abs=0.015)
    logs = np.log(samples.lengths).reshape(-1, 8)
    assert np.corrcoef(logs[:, 0], logs[:, 7])[0, 1] == pytest.approx(0.64, abs=0.02)


def test_groups_leave_the_distribution_of_one_rollout_alone():
    limits = (400, 2500, "reject")
    grouped = lognormal(group_sigma=0.45, limits=limits)
    x = np.concatenate([grouped.sample(64, rng(seed)).lengths for seed in range(150)])
    y = lognormal(limits=limits).sample(100_000, rng()).lengths
    for q in (5, 25, 50, 75, 95):
        assert np.percentile(x, q) == pytest.approx(np.percentile(y, q), rel=0.06)


def test_few_prompts_differ_as_much_as_many():
    """Two prompts at a time: their siblings agree with each other, and the two prompts do not."""
    workload = lognormal(sigma=0.5, group_sigma=0.49)
    pairs = [np.log(workload.sample(16, rng(seed)).lengths).reshape(2, 8).mean(axis=1) for seed in range(300)]
    differences = np.array([a - b for a, b in pairs])
    assert differences.std() == pytest.approx(math.sqrt(2) * 0.49, rel=0.12)


def test_group_ids_are_consecutive_prompts():
    samples = lognormal(group_sigma=0.2, size=4).sample(10, rng())
    assert samples.groups.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert lognormal().sample(10, rng()).groups is None


@pytest.mark.parametrize(("size", "group_sigma"), [(8, 0.0), (1, 0.3)])
def test_no_shared_factor_no_correlation(size, group_sigma):
    samples = lognormal(group_sigma=group_sigma, size=size).sample(8000, rng())
    assert group_correlation(samples.lengths, np.arange(8000) // 8) == pytest.approx(0, abs=0.03)


def test_group_correlation_by_hand():
    e = np.exp
    two = np.array([0, 0, 1, 1])
    # Means 1 and 3, within-group variance 0 or 2 (one degree of freedom a group): MSB = 4, MSW = 0 or 2.
    assert group_correlation(e([1.0, 1.0, 3.0, 3.0]), two) == pytest.approx(1)
    assert group_correlation(e([0.0, 2.0, 2.0, 4.0]), two) == pytest.approx((4 - 2) / (4 + 2))
    assert group_correlation(e([0.0, 2.0, 2.0, 4.0]), np.arange(4)) is None
    assert group_correlation(e([0.0, 2.0]), np.array([0, 0])) is None
    assert group_correlation(np.full(4, 7), two) is None
    # Unequal groups, sizes 3 and 1: Donner's average size is 4 - (9 + 1) / 4.
    logs, groups = np.array([0.0, 1.0, 2.0, 5.0]), np.array([0, 0, 0, 1])
    msb = 3 * (1 - 2) ** 2 + (5 - 2) ** 2
    msw = 2 / 2
    size = (4 - (9 + 1) / 4) / 1
    assert group_correlation(e(logs), groups) == pytest.approx((msb - msw) / (msb + (size - 1) * msw))


# Statistics


def test_describe():
    stats = describe(load_workload("aime-qwen3"), rng(), n=20_000)
    assert stats.num_samples == 20_000
    assert stats.group_correlation == pytest.approx((0.5 / 0.756) ** 2, abs=0.04)
    assert stats.histogram_counts.sum() == 20_000
    assert (stats.histogram_edges[0], stats.histogram_edges[-1]) == (stats.min, stats.max)
    assert json.loads(json.dumps(stats.as_dict()))["max"] == 40_960
    assert describe(load_workload("longalign"), rng(), n=100).group_correlation is None


def test_a_recorded_list_is_described_whole():
    stats = describe(load_workload("deepseek-r1"), rng(), n=100)
    assert (stats.num_samples, round(stats.mean)) == (20_000, 1_527)
    assert describe(workload_from_lengths([5, 7], "mine"), rng()).num_samples == 2


def test_length_stats_by_hand():
    stats = length_stats(np.array([1, 10, 100, 1000]), bins=3)
    assert (stats.total_tokens, stats.mean, stats.p50, stats.min, stats.max) == (1111, 277.75, 55, 1, 1000)
    assert stats.histogram_edges == pytest.approx([1, 10, 100, 1000])
    assert stats.histogram_counts.sum() == 4
    same = length_stats(np.array([7, 7]), bins=3)
    assert same.histogram_counts.sum() == 2
    assert (np.diff(same.histogram_edges) > 0).all()


# Minibatches


def test_minibatches_pass_through_when_everything_fits():
    workload = load_workload("longalign")
    drawn = draw_minibatches(workload, 3, 8, rng(), max_tokens=65_536)
    assert drawn.lengths.tolist() == workload.sample(24, rng()).lengths.tolist()
    assert drawn.note == ""


@settings(max_examples=40, deadline=None)
@given(
    num=st.integers(1, 5),
    per=st.integers(1, 20),
    seed=st.integers(0, 99),
    scale=st.sampled_from([0.25, 1.0, 1.7]),
    cap=st.integers(2500, 40_000),
    how=st.sampled_from(["drop", "clip", "scale"]),
    kind=st.sampled_from(["mixture", "groups", "trace", "permute", "in_order"]),
)
def test_minibatches_are_full_and_fit(num, per, seed, scale, cap, how, kind):
    workload = {
        "mixture": lambda: lognormal(median=3000.0, limits=(500, 30_000, "reject")),
        "groups": lambda: lognormal(median=3000.0, limits=(500, 30_000, "reject"), group_sigma=0.4),
        "trace": lambda: load_workload("alibaba-offline"),
        "permute": lambda: workload_from_lengths([10, 2000, 50_000], "x"),
        "in_order": lambda: workload_from_lengths([10, 2000, 50_000], "x", in_order=True),
    }[kind]()
    drawn = draw_minibatches(workload, num, per, rng(seed), scale=scale, max_tokens=cap, overlong=how)
    assert drawn.lengths.size == num * per
    assert drawn.lengths.dtype == np.int64
    assert drawn.lengths.min() >= 1
    assert drawn.lengths.max() <= min(cap, workload.longest(scale))
    assert (drawn.groups is not None) == (workload.rl is not None)
    assert ("scaled by" in drawn.note) == (scale != 1 or (how == "scale" and workload.longest(scale) > cap))


def test_drop_draws_from_what_is_left():
    workload = lognormal(limits=(1, 10_000, "clip"))
    drawn = draw_minibatches(workload, 100, 100, rng(), max_tokens=1000, overlong="drop")
    plain = workload.sample(50_000, rng()).lengths
    assert np.median(drawn.lengths) == pytest.approx(np.median(plain[plain <= 1000]), rel=0.02)
    assert drawn.note == "samples longer than 1000 tokens dropped and drawn again"


def test_clip_and_scale_notes():
    workload = workload_from_lengths([10, 40, 80], "x", in_order=True)
    clip = draw_minibatches(workload, 1, 6, rng(), max_tokens=40, overlong="clip")
    assert clip.lengths.tolist() == [10, 40, 40, 10, 40, 40]
    assert clip.note == "2 of 6 samples clipped to 40 tokens"
    scale = draw_minibatches(workload, 1, 2, rng(), scale=2, max_tokens=40, overlong="scale")
    assert scale.lengths.tolist() == [5, 20]  # the ratio is that of the 160-token sample, which is not drawn
    note = "lengths scaled by 2; all samples scaled by 0.25 so that the longest (160 tokens) fits 40"
    assert scale.note == note


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((0, 4), {}, "0 minibatches: expected at least 1"),
        ((4, 0), {}, "0 samples per minibatch: expected at least 1"),
        ((1, 3), {"max_tokens": 0}, "max_tokens is 0: expected at least 1"),
        ((1, 3), {"scale": -1}, "the scale factor is -1: expected a positive number"),
        ((1, 3), {"overlong": "skip"}, "unknown --overlong choice 'skip': "),
        ((1, 3), {"max_tokens": 40}, "sample 2 has 80 tokens, more than max_tokens 40 (1 of 3 samples do): raise"),
        ((1, 3), {"max_tokens": 5, "overlong": "drop"}, "no sample has at most 5 tokens (the shortest has 10): "),
    ],
)
def test_minibatch_refusals(arguments, options, message):
    workload = workload_from_lengths([10, 40, 80], "x", in_order=True)
    with pytest.raises(InputError, match=f"^{re.escape(message)}"):
        draw_minibatches(workload, *arguments, rng(), **options)


def test_dropping_nearly_everything_is_refused_not_endless():
    with pytest.raises(InputError, match=r"almost none of the samples .* has at most 100 tokens: raise --max-tokens"):
        draw_minibatches(lognormal(), 1, 10, rng(), max_tokens=100, overlong="drop")


# The user's lengths


@given(lengths=st.lists(st.integers(1, 1000), min_size=1, max_size=30), n=st.integers(0, 100), seed=st.integers(0, 9))
def test_user_lengths_are_all_used_before_any_comes_back(lengths, n, seed):
    x = workload_from_lengths(lengths, "mine").sample(n, rng(seed)).lengths
    assert x.size == n
    m = len(lengths)
    for start in range(0, n - m + 1, m):
        assert sorted(x[start : start + m].tolist()) == sorted(lengths)
    for value in set(x[n - n % m :].tolist()):
        assert x[n - n % m :].tolist().count(value) <= lengths.count(value)


def test_user_lengths_in_order_and_their_description():
    workload = workload_from_lengths([5, 6, 7], "mine", in_order=True)
    assert workload.sample(7, rng()).lengths.tolist() == [5, 6, 7, 5, 6, 7, 5]
    assert (workload.max_tokens, workload.kind, workload.name) == (7, "sft", "mine")
    record = workload.as_dict()["lengths"]
    assert (record["order"], record["num_samples"]) == ("in_order", 3)
    other = workload_from_lengths([5, 6, 8], "mine").as_dict()["lengths"]
    assert record["sha256"] != other["sha256"]
    with pytest.raises(InputError, match="sample 1 has length 0"):
        workload_from_lengths([3, 0], "mine")


def test_as_dict_is_json_and_carries_the_parameters():
    record = json.loads(json.dumps(load_workload("aime-paper").as_dict()))
    assert record["lengths"]["component"] == [{"weight": 1.0, "median_tokens": 8250.0, "sigma": 0.5}]
    assert record["lengths"]["limits"] == {"min_tokens": 500, "max_tokens": 25_000, "how": "reject"}
    assert record["rl"] == {"group_size": 8, "group_sigma": 0.4}
    assert (record["kind"], record["max_tokens"]) == ("rl", 25_000)
    trace = json.loads(json.dumps(load_workload("azure-chat").as_dict()))
    assert len(trace["lengths"]["sha256"]) == 64
    assert trace["rl"] is None


# Workload files

MIXTURE = """
[workload]
name = "mine"
description = "a test"
kind = "sft"
evidence = "made up"
[lengths]
distribution = "mixture"
[[lengths.component]]
weight = 1
median_tokens = 1000
sigma = 0.5
[lengths.limits]
min_tokens = 1
max_tokens = 5000
how = "clip"
"""
TRACE = MIXTURE[: MIXTURE.index("[lengths]")] + '[lengths]\ndistribution = "trace"\ntrace = "own.csv"\n'


def save(tmp_path, text):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return path


def test_a_workload_file_of_the_users_own(tmp_path):
    workload = load_workload(save(tmp_path, MIXTURE))
    assert (workload.name, workload.max_tokens, workload.kind) == ("mine", 5000, "sft")


def test_a_trace_is_found_beside_the_file_then_among_the_builtin_ones(tmp_path):
    path = save(tmp_path, TRACE)
    (tmp_path / "own.csv").write_text("length\n10\n20\n30\n")
    workload = load_workload(str(path))
    assert workload.max_tokens == 30
    assert set(workload.sample(100, rng()).lengths.tolist()) == {10, 20, 30}
    builtin = load_workload(save(tmp_path, TRACE.replace("own.csv", "azure_chat_2023.txt")))
    assert builtin.max_tokens == 14_089


@pytest.mark.parametrize(("how", "expected"), [("reject", {20}), ("clip", {15, 20, 25})])
def test_limits_apply_to_traces(tmp_path, how, expected):
    (tmp_path / "own.csv").write_text("length\n10\n20\n30\n")
    limits = f'[lengths.limits]\nmin_tokens = 15\nmax_tokens = 25\nhow = "{how}"\n'
    workload = load_workload(save(tmp_path, TRACE + limits))
    assert set(workload.sample(100, rng()).lengths.tolist()) == expected
    assert workload.max_tokens == max(expected)


def test_siblings_of_a_trace(tmp_path):
    rl = "\n[rl]\ngroup_size = 4\ngroup_sigma = 0.6\n"
    text = TRACE.replace("own.csv", "azure_chat_2023.txt").replace('"sft"', '"rl"') + rl
    samples = load_workload(save(tmp_path, text)).sample(20_000, rng())
    assert 0.3 < group_correlation(samples.lengths, samples.groups) < 0.7


def swap(old, new, text=MIXTURE):
    assert old in text
    return text.replace(old, new)


LIMITS = MIXTURE[MIXTURE.index("[lengths.limits]") :]
COMPONENT = MIXTURE[MIXTURE.index("[[lengths.component]]") : MIXTURE.index("[lengths.limits]")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (swap('name = "mine"\n', ""), "workload.name is missing"),
        (swap('"mine"', '" "'), "workload.name is ' ': string should have at least 1 character"),
        (swap('kind = "sft"', 'kind = "dpo"'), "workload.kind is 'dpo': input should be 'sft' or 'rl'"),
        (swap("kind", "sort"), "workload.kind is missing (and 1 more)"),
        (swap("sigma", "sigma = 0.5\nsigmas"), "unknown field lengths.component[0].sigmas"),
        (MIXTURE + "[lengthy]\n", "unknown field lengthy"),
        (swap("weight = 1", "weight = -1"), "lengths.component[0].weight is -1: input should be greater than 0"),
        (swap("weight = 1", 'weight = "1"'), "lengths.component[0].weight is '1': input should be a valid number"),
        (swap("weight = 1", "weight = 0.4"), "lengths.component: the weights sum to 0.4, expected 1"),
        (swap("sigma = 0.5", "sigma = nan"), "lengths.component[0].sigma is nan: input should be"),
        (swap("5000", "5000.5"), "lengths.limits.max_tokens is 5000.5: input should be a valid integer"),
        (swap("min_tokens = 1", "min_tokens = 9000"), "lengths.limits: min_tokens 9000 and max_tokens 5000: expected"),
        (
            swap('"clip"', '"reject"', swap("1000", "1e9")),
            "lengths.limits reject 100.00% of lengths.component[0]: widen min_tokens 1 .. max_tokens 5000",
        ),
        (swap(LIMITS, ""), "lengths.limits is missing: a lognormal has no longest sample"),
        (swap(COMPONENT, ""), 'lengths.component is missing: distribution = "mixture" needs at least one'),
        (
            swap('"mixture"', '"mixture"\ntrace = "a.txt"'),
            'lengths.trace does not belong to distribution = "mixture"',
        ),
        (swap('"mixture"', '"trace"'), 'lengths.component does not belong to distribution = "trace"'),
        (swap('trace = "own.csv"\n', "", TRACE), 'lengths.trace is missing: distribution = "trace" needs a file'),
        (TRACE, "lengths.trace 'own.csv' found neither as "),
        (swap('"sft"', '"rl"'), 'workload.kind = "rl" needs an [rl] table (group_size = 1 if siblings are unknown)'),
        (MIXTURE + "[rl]\ngroup_size = 8\ngroup_sigma = 0.1\n", 'workload.kind = "sft" has no [rl]'),
        (
            swap('"sft"', '"rl"') + "[rl]\ngroup_size = 8\ngroup_sigma = 0.6\n",
            "rl.group_sigma 0.6 is more than the whole spread of ln(length), 0.5: siblings cannot share more",
        ),
        (
            swap('"sft"', '"rl"') + "[rl]\ngroup_size = 0\ngroup_sigma = 0.6\n",
            "rl.group_size is 0: input should be greater than or equal to 1",
        ),
        ("a = ", "not valid TOML: "),
        ("workload = 3\n", "workload is 3: input should be a valid dictionary"),
    ],
)
def test_mistakes_in_a_workload_file_name_file_and_field(tmp_path, text, message):
    path = save(tmp_path, text)
    with pytest.raises(InputError) as error:
        load_workload(path)
    assert str(error.value).startswith(f"{path}: {message}")
    assert "\n" not in str(error.value)


def test_a_bad_trace_names_both_files(tmp_path):
    path = save(tmp_path, TRACE)
    (tmp_path / "own.csv").write_text("length\n10\n-1\n")
    with pytest.raises(InputError, match=r"mine\.toml: .*own\.csv: line 3 is '-1': lengths must be at least 1"):
        load_workload(path)
    (tmp_path / "own.csv").write_text("length\n10\n")
    limits = '[lengths.limits]\nmin_tokens = 15\nmax_tokens = 25\nhow = "reject"\n'
    with pytest.raises(InputError, match=r"mine\.toml: no sample has from 15 to 25 tokens: widen the limits"):
        load_workload(save(tmp_path, TRACE + limits))


def test_names_and_paths_that_are_no_workload(tmp_path):
    with pytest.raises(InputError, match="unknown workload 'longaling': did you mean 'longalign'"):
        load_workload("longaling")
    with pytest.raises(InputError, match=r"none\.toml: no such workload file"):
        load_workload(tmp_path / "none.toml")
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(InputError, match=r"folder\.toml: is a directory, expected a workload file"):
        load_workload(tmp_path / "folder.toml")
    (tmp_path / "latin.toml").write_bytes(b'a = "\xe9"')
    with pytest.raises(InputError, match=r"latin\.toml: not UTF-8 text"):
        load_workload(tmp_path / "latin.toml")
    with pytest.raises(
        InputError, match=r"a\.csv is not a workload file \(\.toml\): for a list of lengths use --lengths"
    ):
        load_workload(tmp_path / "a.csv")
    with pytest.raises(
        InputError, match=r"a\.csv\.gz is neither a workload file \(\.toml\) nor a list of lengths \(\.txt, "
    ):
        load_workload(tmp_path / "a.csv.gz")


def test_importing_stays_light():
    code = (
        "import sys, odc_sim.workload, odc_sim.lengths;"
        "print([m for m in ('pydantic', 'pandas', 'pyarrow', 'matplotlib', 'numba', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
