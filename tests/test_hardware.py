"""Cluster files: the built-in ones, the user's own, and every way to get one wrong."""

import re
import tomllib
from dataclasses import replace

import pytest

from odc_sim.errors import InputError
from odc_sim.hardware import ASSUMED_EFFICIENCY, DATA_DIR, Host, Slowdown, builtin_hardware, load_cluster

MINIMAL = """
[cluster]
name = "mine"
devices_per_node = 4
[device]
name = "chip"
peak_flops = 1e14
hbm_bytes_per_s = 1e12
memory_bytes = 16e9
[intra]
bytes_per_s = 50e9
latency_s = 1e-5
"""
RATE = "expected a number in SI units, 1e6 to 1e18 (187.5e9, not 187.5)"


@pytest.fixture
def load(tmp_path):
    def from_text(text):
        path = tmp_path / "mine.toml"
        path.write_text(text, encoding="utf-8")
        return load_cluster(path)

    return from_text


@pytest.fixture
def error_of(load, tmp_path):
    """The message for a cluster file, without the path of the file that starts it."""

    def message(text):
        with pytest.raises(InputError) as caught:
            load(text)
        line = str(caught.value)
        start = f"{tmp_path / 'mine.toml'}: "
        assert line.startswith(start)
        assert "\n" not in line
        return line.removeprefix(start)

    return message


def test_builtin_clusters_state_the_source_of_every_section():
    assert builtin_hardware() == ["a100-nvswitch-roce", "cloud-100g", "generic", "h100-ib", "h200-nvlink"]
    for name in builtin_hardware():
        cluster = load_cluster(name)
        assert cluster.name == name
        raw = tomllib.loads((DATA_DIR / f"{name}.toml").read_text(encoding="utf-8"))
        sections = raw.pop("overlap") | raw
        assert {section for section, fields in sections.items() if not fields.get("source")} == set()
        assert f"| {name} |" in (DATA_DIR / "README.md").read_text(encoding="utf-8")


def test_the_papers_machines():
    cluster = load_cluster("a100-nvswitch-roce")
    assert cluster.devices_per_node == 8
    assert cluster.device.peak_flops == 312e12
    assert cluster.device.memory_bytes == 80 * 2**30
    assert cluster.inter is not None
    assert cluster.inter.node_bytes_per_s * 8 == pytest.approx(0.9 * 800e9)  # 800 Gbps a node, 0.9 of it reached
    # Fig. 11: gather and scatter_accumulate are as fast as NCCL inside a node.
    assert cluster.intra.collective_bytes_per_s == cluster.intra.one_sided_bytes_per_s == 0.8 * 300e9
    assert cluster.overlap["collective"].source == "not measured"


def test_the_papers_efficiencies_follow_from_its_7b_fit():
    # Qwen2.5-7B: 28 layers of 233,057,792 parameters, hidden 3,584, vocabulary 152,064. A parameter costs 2 FLOPs
    # forward, 4 backward, and 2 more in the layers, which are recomputed.
    linear_flops_per_token = 8 * 28 * 233_057_792 + 6 * 152_064 * 3_584
    attention_flops_per_token2 = 8 * 28 * 3_584
    cluster = load_cluster("a100-nvswitch-roce")
    peak = cluster.device.peak_flops
    assert cluster.efficiency.linear == pytest.approx(linear_flops_per_token / (8.768 / 32_000) / peak, rel=1e-3)
    assert cluster.efficiency.attention == pytest.approx(
        attention_flops_per_token2 / (4.348 / 32_000**2) / peak, rel=1e-3
    )


def test_a_minimal_file_fills_in_what_it_leaves_out(load):
    cluster = load(MINIMAL)
    assert cluster.source == "the user's file"
    assert cluster.device.memory_bytes == 16_000_000_000
    assert cluster.inter is None
    assert cluster.intra.collective_bytes_per_s == cluster.intra.one_sided_bytes_per_s == 50e9
    assert cluster.intra.collective_latency_s == cluster.intra.one_sided_latency_s == 1e-5
    assert cluster.overlap["odc"].reduce == Slowdown(transfer=1.0, compute=1.0)
    assert cluster.overlap["odc"].source == "not measured"
    assert cluster.host.seconds_per_unit_forward == 0
    assert cluster.efficiency == ASSUMED_EFFICIENCY


def test_every_optional_field_is_read(load):
    cluster = load(
        MINIMAL
        + """
collective_bytes_per_s = 40e9
one_sided_latency_s = 0
[inter]
nics_per_node = 2
nic_bytes_per_s = 5e9
latency_s = 3e-5
source = "the invoice"
[overlap.odc]
slowdown_copy_out = 3
slowdown_copy_in = 2
slowdown_add = 4
unshard = { slowdown_transfer = 1.5 }
reduce = { slowdown_transfer = 2, slowdown_compute = 1.1 }
[host]
seconds_per_unit_forward = 1e-3
seconds_per_unit_backward = 2e-3
[efficiency]
linear = 0.7
attention = 1
"""
    )
    ours, stock = (cluster.overlap[transport] for transport in ("odc", "collective"))
    assert (ours.copy_out, ours.copy_in, ours.add) == (3.0, 2.0, 4.0)
    assert (stock.copy_out, stock.copy_in, stock.add) == (1.0, 1.0, 1.0)
    assert (cluster.intra.collective_bytes_per_s, cluster.intra.one_sided_bytes_per_s) == (40e9, 50e9)
    assert (cluster.intra.collective_latency_s, cluster.intra.one_sided_latency_s) == (1e-5, 0.0)
    assert cluster.inter is not None
    assert cluster.inter.node_bytes_per_s == 10e9
    assert cluster.inter.source == "the invoice"
    assert cluster.overlap["odc"].unshard == Slowdown(transfer=1.5, compute=1.0)
    assert cluster.overlap["odc"].reduce == Slowdown(transfer=2.0, compute=1.1)
    assert cluster.overlap["collective"].unshard == Slowdown()
    assert cluster.host.seconds_per_unit_backward == 2e-3
    assert (cluster.efficiency.linear, cluster.efficiency.attention) == (0.7, 1.0)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "= 50e9",
            "= -3",
            "[intra] bytes_per_s: got -3, expected a number in SI units, 1e6 to 1e18 (187.5e9, not 187.5)",
        ),
        (
            "= 50e9",
            "= 50",
            "[intra] bytes_per_s: got 50, expected a number in SI units, 1e6 to 1e18 (187.5e9, not 187.5)",
        ),
        (
            "= 50e9",
            "= 0",
            "[intra] bytes_per_s: got 0, expected a number in SI units, 1e6 to 1e18 (187.5e9, not 187.5)",
        ),
        (
            "= 50e9",
            "= inf",
            "[intra] bytes_per_s: got inf, expected a number in SI units, 1e6 to 1e18 (187.5e9, not 187.5)",
        ),
        (
            "= 50e9",
            "= nan",
            "[intra] bytes_per_s: got nan, expected a number in SI units, 1e6 to 1e18 (187.5e9, not 187.5)",
        ),
        (
            "= 50e9",
            '= "fast"',
            "[intra] bytes_per_s: got 'fast', expected a number in SI units, 1e6 to 1e18 (187.5e9, not 187.5)",
        ),
        (
            "= 50e9",
            "= true",
            "[intra] bytes_per_s: got True, expected a number in SI units, 1e6 to 1e18 (187.5e9, not 187.5)",
        ),
        ("= 1e-5", "= -1e-5", "[intra] latency_s: got -1e-05, expected a number of seconds, 0 to 10"),
        (
            "bytes_per_s = 50e9\n",
            "",
            "[intra] bytes_per_s: got nothing, expected a number in SI units, 1e6 to 1e18 (187.5e9, not 187.5)",
        ),
        (
            "per_node = 4",
            "per_node = 0",
            "[cluster] devices_per_node: got 0, expected a whole number from 1 to 1,000,000",
        ),
        (
            "per_node = 4",
            "per_node = 2.5",
            "[cluster] devices_per_node: got 2.5, expected a whole number from 1 to 1,000,000",
        ),
        ('"mine"', '""', "[cluster] name: got '', expected a non-empty text"),
        ("= 50e9", "= 1e19", f"[intra] bytes_per_s: got 1e+19, {RATE}"),
        ("= 50e9", "= 1e-320", f"[intra] bytes_per_s: got 1e-320, {RATE}"),
        ("= 1e12", "= 1e-310", f"[device] hbm_bytes_per_s: got 1e-310, {RATE}"),
        (
            "= 16e9",
            "= 1e19",
            "[device] memory_bytes: got 1e+19, expected a number of bytes, 1e6 to 1e15 (80e9, not 80)",
        ),
        ("= 1e-5", "= 1e308", "[intra] latency_s: got 1e+308, expected a number of seconds, 0 to 10"),
        (
            "per_node = 4",
            "per_node = 1" + 400 * "0",
            "[cluster] devices_per_node: got a whole number of about 401 digits, expected a whole number from 1 to "
            "1,000,000",
        ),
        ("= 16e9", "= 16e9\nsource = 3", "[device] source: got 3, expected a text"),
        ("= 16e9", "= 0\nsource = 3", "[device] source: got 3, expected a text (and 1 more)"),
    ],
)
def test_a_wrong_value_is_one_line_with_place_got_and_expected(error_of, old, new, message):
    assert old in MINIMAL
    assert error_of(MINIMAL.replace(old, new)) == message


@pytest.mark.parametrize(
    ("added", "message"),
    [
        (
            "[overlap.collective]\nunshard = { slowdown_transfer = 0.9 }",
            "[overlap.collective] unshard.slowdown_transfer: got 0.9, expected a number from 1 to 1000",
        ),
        ("[overlap.odc]\nreduce = 2", "[overlap.odc] reduce: got 2, expected a table of slowdowns"),
        ("[overlap]\nodc = 2", "[overlap.odc]: got 2, expected a table"),
        (
            "[overlap.odc]\nreduce = { slowdown_compute = 1e300 }",
            "[overlap.odc] reduce.slowdown_compute: got 1e+300, expected a number from 1 to 1000",
        ),
        (
            "[inter]\nnic_bytes_per_s = 1e10\nlatency_s = 0\nnics_per_node = 10_000_000",
            "[inter] nics_per_node: got 10000000, expected a whole number from 1 to 1,000,000",
        ),
        (
            "[efficiency]\nlinear = 66\nattention = 0.5",
            "[efficiency] linear: got 66, expected a fraction, > 0 and <= 1",
        ),
        (
            "[overlap.odc]\nreduce = { slowdown = 2 }",
            "unknown field of [overlap.odc.reduce] 'slowdown': did you mean 'slowdown_compute'? "
            "known: slowdown_compute, slowdown_transfer",
        ),
        (
            "[intre]",
            "unknown section 'intre': did you mean 'intra'? "
            "known: cluster, device, efficiency, host, inter, intra, overlap",
        ),
    ],
)
def test_sections_and_tables_are_checked_too(error_of, added, message):
    assert error_of(MINIMAL + added) == message


def test_a_missing_section_is_named(error_of):
    assert error_of(MINIMAL.split("[intra]")[0]) == "[intra]: got nothing, expected a table"


def test_an_unknown_name_suggests_the_nearest():
    with pytest.raises(InputError, match=r"^unknown hardware 'h200-nvlnk': did you mean 'h200-nvlink'\? known: a100"):
        load_cluster("h200-nvlnk")


def test_files_that_cannot_be_read(tmp_path, error_of):
    missing = tmp_path / "none.toml"
    with pytest.raises(InputError, match=re.escape(f"{missing}: cannot be read (No such file or directory)")):
        load_cluster(str(missing))
    with pytest.raises(InputError, match=re.escape(f"{tmp_path}: cannot be read (Is a directory)")):
        load_cluster(tmp_path)
    assert error_of("[cluster").startswith("not a TOML file: ")


def test_files_that_no_toml_reader_takes(error_of):
    assert error_of("[intra]\nlatency_s = " + 5000 * "1").startswith("not a TOML file: Exceeds the limit (4300 digits)")
    assert error_of("x = " + 50_000 * "[") == "not a TOML file: maximum recursion depth exceeded"


def test_a_path_beyond_any_file_system(tmp_path):
    path = tmp_path / ("x" * 5000 + ".toml")
    with pytest.raises(InputError, match=r"^/.{59}\.\.\. \(\d{4} characters\): cannot be read \(File name too long\)"):
        load_cluster(path)


def test_the_fastest_network_there_is():
    path = DATA_DIR.parent.parent / "reports" / "paper-longalign" / "network-free.toml"
    cluster = load_cluster(path)
    assert cluster.inter is not None
    assert cluster.inter.nic_bytes_per_s == 1e18


def test_a_hosts_time_depends_on_the_schedule_where_that_is_known():
    host = Host(seconds_per_unit_forward=3.0, seconds_per_unit_backward=6.0, source="test")
    every = [{"one_sided": o, "deferred": d} for o, d in ((False, False), (False, True), (True, False))]
    assert [host.forward_s(**schedule) for schedule in every] == [3.0, 3.0, 3.0]
    known = replace(host, seconds_per_unit_forward_deferred=2.0, seconds_per_unit_forward_one_sided=2.5)
    assert [known.forward_s(**schedule) for schedule in every] == [3.0, 2.0, 2.5]
    assert [known.idle().forward_s(**schedule) for schedule in every] == [0.0, 0.0, 0.0]
