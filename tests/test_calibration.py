"""calibration.json: what is accepted, what is refused and how that is said."""

import copy
import json
from pathlib import Path

import pytest

from odc_sim.calibration import Calibration, TransferSample, load_calibration, write_calibration
from odc_sim.errors import InputError
from odc_sim.header import header

SMALL = Path(__file__).parent / "data" / "calibration-small.json"


@pytest.fixture
def error_of(tmp_path):
    """The message for the small file after `change(data)`, without the path that starts it."""

    def message(change):
        data = copy.deepcopy(json.loads(SMALL.read_text(encoding="utf-8")))
        change(data)
        path = tmp_path / "changed.json"
        path.write_text(json.dumps(data), encoding="utf-8")
        with pytest.raises(InputError) as caught:
            load_calibration(path)
        line = str(caught.value)
        assert line.startswith(f"{path}: ")
        assert "\n" not in line
        return line.removeprefix(f"{path}: ")

    return message


def setter(*place_and_value):
    """A change that sets data[place...] = value."""

    def change(data):
        *place, last, value = place_and_value
        for step in place:
            data = data[step]
        data[last] = value

    return change


def remover(*place):
    def change(data):
        for step in place[:-1]:
            data = data[step]
        del data[place[-1]]

    return change


def test_the_small_file_is_read_whole():
    calibration = load_calibration(SMALL)
    assert len(calibration.transfers) == 13
    first = calibration.transfers[0]
    assert (first.op, first.world_size, first.bytes, first.p50_s) == ("all_gather", 4, 1_000_000, 1e-4)
    assert first.slowdown_transfer == 2.0
    assert calibration.transfers[-1].slowdown_transfer is None
    assert calibration.compute[0].lengths == (512, 512)
    assert calibration.fits[0].valid_tokens == (256, 65_536)
    assert calibration.optimizer[1].step_s == 1e-2
    assert calibration.host is not None
    assert calibration.host.seconds_per_unit_backward == 2e-4
    assert calibration.ceilings is not None
    assert calibration.ceilings.gemm_flops == 1e14


def test_what_is_written_reads_back_equal(tmp_path):
    calibration = load_calibration(SMALL)
    write_calibration(tmp_path / "again.json", calibration)
    assert load_calibration(tmp_path / "again.json") == calibration


def test_a_new_file_needs_only_the_header(tmp_path):
    calibration = Calibration(**header("odc calibrate --quick", None))
    write_calibration(tmp_path / "new.json", calibration)
    assert load_calibration(tmp_path / "new.json") == calibration
    assert calibration.transfers == ()
    assert calibration.host is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            setter("transfers", 3, "speed", 1),
            "transfers[3].speed: unknown field, expected one of op, backend, world_size,",
        ),
        (setter("gpus", 2), "gpus: unknown field, expected one of schema_version, toolkit_version,"),
        (remover("transfers", 3, "p50_s"), "transfers[3].p50_s: missing"),
        (setter("transfers", 3, 7), "transfers[3]: got 7, expected an object"),
        (setter("transfers", {}), "transfers: got {}, expected a list"),
        (setter("transfers", 0, "op", "broadcast"), "transfers[0].op: got 'broadcast', expected one of all_gather,"),
        (setter("transfers", 0, "p50_s", 0), "transfers[0].p50_s: got 0, expected a number > 0"),
        (setter("transfers", 0, "p50_s", "1"), "transfers[0].p50_s: got '1', expected a number"),
        (
            setter("transfers", 0, "p50_s", float("nan")),
            "not valid JSON at line 1, column 346: got NaN, expected a finite",
        ),
        (
            setter("transfers", 0, "p50_s", 10**400),
            "transfers[0].p50_s: got a whole number of about 401 digits, expected a number",
        ),
        (
            setter("transfers", 0, "p20_s", 1e-320),
            "transfers[0].p20_s: got 1e-320, expected a number > 0, 1e-12 to 1e6",
        ),
        (
            setter("transfers", 0, "bytes", 10**30),
            f"transfers[0].bytes: got {10**30}, expected a whole number >= 1, at most 10^15",
        ),
        (
            setter("transfers", 0, "world_size", 10**400),
            "transfers[0].world_size: got a whole number of about 401 digits, expected a whole number >= 1, at most",
        ),
        (
            setter("compute", 0, "lengths", [2**32]),
            "compute[0].lengths[0]: got 4294967296, expected a whole number >= 1, at most 2^31",
        ),
        (
            setter("ceilings", "gemm_flops", 1e19),
            "ceilings.gemm_flops: got 1e+19, expected a number > 0, 1e-12 to 1e18",
        ),
        (setter("fits", 0, "c0_s", 1e7), "fits[0].c0_s: got 10000000.0, expected a number >= 0, at most 1e6"),
        (setter("transfers", 0, "bytes", 1.5), "transfers[0].bytes: got 1.5, expected a whole number"),
        (setter("transfers", 0, "bytes", True), "transfers[0].bytes: got True, expected a whole number"),
        (setter("transfers", 0, "flagged", 0), "transfers[0].flagged: got 0, expected true or false"),
        (setter("transfers", 0, "backend", None), "transfers[0].backend: got None, expected a text"),
        (
            setter("transfers", 0, "p50_s", 2.0),
            "transfers[0]: got p20_s 9.5e-05, p50_s 2, p80_s 0.000105, expected p20_s <= p50_s <= p80_s",
        ),
        (
            setter("transfers", 0, "overlapped_p50_s", 9.9e-5),
            "transfers[0].slowdown_transfer: got 0.99, expected >= 1 or flagged = true: "
            "a slowdown below 1 is a measuring error; measure again",
        ),
        (
            setter("transfers", 0, "slowdown_compute", 0.96),
            "transfers[0].slowdown_compute: got 0.96, expected >= 1 or flagged = true: ",
        ),
        (setter("compute", 0, "tokens", 1000), "compute[0].tokens: got 1000, expected the sum of lengths, 1024"),
        (setter("compute", 0, "lengths", []), "compute[0].lengths: got [], expected at least one length"),
        (setter("compute", 0, "lengths", [512, 0]), "compute[0].lengths[1]: got 0, expected a whole number >= 1"),
        (
            setter("compute", 0, "unit", "root"),
            "compute[0].unit: got 'root', expected one of layer, head_loss, embedding",
        ),
        (setter("compute", 0, "p20_s", 1.0), "compute[0]: got p20_s 1, p50_s 0.001, p80_s 0.0011, expected p20_s"),
        (setter("fits", 0, "valid_tokens", [1]), "fits[0].valid_tokens: got [1], expected a list of 2"),
        (setter("fits", 0, "valid_tokens", [9, 1]), "fits[0].valid_tokens: got [9, 1], expected [least, most]"),
        (setter("fits", 0, "c1_s_per_token", -1), "fits[0].c1_s_per_token: got -1, expected a number >= 0"),
        (setter("host", {"seconds": 1}), "host.seconds: unknown field, expected one of seconds_per_unit_forward,"),
        (
            setter("ceilings", "gemm_flops", "x" * 80),
            "ceilings.gemm_flops: got a str of 82 characters, expected a number",
        ),
        (setter("schema_version", 2), "field 'schema_version': got 2, expected 1"),
    ],
)
def test_what_is_refused_names_its_place(error_of, change, message):
    assert error_of(change).startswith(message)


def test_a_flagged_slowdown_below_one_is_kept():
    slowdowns = [sample.slowdown_transfer for sample in load_calibration(SMALL).transfers if sample.flagged]
    assert slowdowns == pytest.approx([0.99] * 3)


def test_inconsistent_measurements_are_not_written(tmp_path):
    sample = TransferSample(
        op="gather",
        backend="cuda",
        world_size=2,
        bytes=1,
        dtype="bf16",
        p20_s=1.0,
        p50_s=1.0,
        p80_s=1.0,
        samples=1,
        flagged=False,
        overlapped_p50_s=0.5,
    )
    path = tmp_path / "bad.json"
    with pytest.raises(InputError, match=r"slowdown_transfer: got 0\.5, expected >= 1"):
        write_calibration(path, Calibration(**header("test", None), transfers=(sample,)))
    assert not path.exists()
