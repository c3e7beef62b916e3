"""calibration.json: what `odc calibrate` measured on one machine, typed, and refused where it is not understood.

Times are seconds, sizes bytes. A *shard* is what one rank holds of a unit; `TransferSample.bytes` is its size.
"""

import dataclasses
import math
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from odc_sim.errors import InputError
from odc_sim.header import check_header, read_json, show, write_json

TransferOp = Literal["all_gather", "reduce_scatter", "gather", "scatter_accumulate"]
ComputeUnit = Literal["layer", "head_loss", "embedding"]
Direction = Literal["forward", "backward", "backward_recompute"]
CopyOp = Literal["copy_in", "copy_out", "pack", "add", "hold"]


class _Check(NamedTuple):
    """A range, and how an error message describes it."""

    expected: str
    holds: Callable[[Any], bool]


# The bounds hold whatever a machine could do, and keep every product of two such numbers a number.
Positive = Annotated[float, _Check("a number > 0, 1e-12 to 1e18", lambda value: 1e-12 <= value <= 1e18)]
NotNegative = Annotated[float, _Check("a number >= 0, at most 1e18", lambda value: 0 <= value <= 1e18)]
Speed = Annotated[float, _Check("a number, 0.001 to 1000", lambda value: 1e-3 <= value <= 1e3)]
Seconds = Annotated[float, _Check("a number > 0, 1e-12 to 1e6", lambda value: 1e-12 <= value <= 1e6)]
SecondsOrZero = Annotated[float, _Check("a number >= 0, at most 1e6", lambda value: 0 <= value <= 1e6)]
Count = Annotated[int, _Check("a whole number >= 1, at most 10^6", lambda value: 1 <= value <= 10**6)]
Size = Annotated[int, _Check("a whole number >= 1, at most 10^15", lambda value: 1 <= value <= 10**15)]
TokenCount = Annotated[int, _Check("a whole number >= 0, at most 2^31", lambda value: 0 <= value <= 2**31)]
Length = Annotated[int, _Check("a whole number >= 1, at most 2^31", lambda value: 1 <= value <= 2**31)]
Lengths = Annotated[tuple[Length, ...], _Check("at least one length", lambda value: len(value) > 0)]


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferSample:
    """One transfer, timed alone and, where the last two fields are given, beside compute."""

    op: TransferOp
    backend: str
    world_size: Count
    bytes: Size
    dtype: str
    p20_s: Seconds
    p50_s: Seconds
    p80_s: Seconds
    samples: Count
    flagged: bool
    """The pair alone / overlapped is not to be trusted, as when a slowdown came out below 1."""
    overlapped_p50_s: Seconds | None = None
    slowdown_compute: Positive | None = None
    beside_gemm_s: Seconds | None = None
    """Of one of the matrix products beside it, alone: a kernel that moves data may have to wait for one to end."""
    beside_layer: str | None = None
    """The model whose layer it was timed beside, at the start of a forward or backward as in training."""
    slowdown_waiting: Positive | None = None
    """How many times longer compute took on a rank beside this collective while it waited for another rank."""
    slowdown_copy_out: Positive | None = None
    """How many times longer the copy of gathered parameters took that began right after this reduce."""

    @property
    def slowdown_transfer(self) -> float | None:
        """How many times longer it took beside compute; None where that was not measured."""
        return None if self.overlapped_p50_s is None else self.overlapped_p50_s / self.p50_s

    @property
    def lost_s(self) -> float | None:
        """What compute lost beside it; None where that was not measured."""
        return _lost_s(self.overlapped_p50_s, self.slowdown_compute)


@dataclass(frozen=True, kw_only=True, slots=True)
class CopySample:
    """One of FSDP2's own copies, bf16 parameters and fp32 gradients: see `transfers.TransferCosts` for each."""

    op: CopyOp
    elements: Size
    """Of the rank's shard for copy_in and add, of the whole unit for copy_out, pack and hold."""
    dtype: str
    """Of what is gathered."""
    p20_s: Seconds
    p50_s: Seconds
    p80_s: Seconds
    samples: Count
    flagged: bool
    """Noisy: not to be used."""
    slowdown_compute: Positive | None = None
    """How many times slower a layer progressed while this copy, begun with it on another stream, would last alone."""
    beside_layer: str | None = None
    """The model whose layer that was."""

    @property
    def lost_s(self) -> float | None:
        """What that layer lost; None where that was not measured."""
        return _lost_s(self.p50_s, self.slowdown_compute)


def _lost_s(other_s: float | None, slowdown: float | None) -> float | None:
    return None if other_s is None or slowdown is None else other_s * (1 - 1 / slowdown)


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeSample:
    """One unit of one model on one microbatch with these sample lengths."""

    model: str
    unit: ComputeUnit
    direction: Direction
    lengths: Lengths
    tokens: Size
    p20_s: Seconds
    p50_s: Seconds
    p80_s: Seconds
    samples: Count
    flagged: bool = False
    """Noisy, or different when repeated: not used in a fit."""
    heldout: bool = False
    """Kept out of the fit, to check it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """seconds = c0_s + c1_s_per_token * sum(s) + c2_s_per_token2 * sum(s^2), never below floor_s.

    The floor is the shortest time there is: many kernels, each with a least duration, or launched one by one by a host
    that is not ahead. `odc calibrate` lets the host get ahead, and has its own time in HostSample.
    Relative errors are fractions; the second is on microbatches the fit did not see.
    """

    model: str
    unit: ComputeUnit
    direction: Direction
    c0_s: SecondsOrZero
    c1_s_per_token: SecondsOrZero
    c2_s_per_token2: SecondsOrZero
    floor_s: SecondsOrZero
    valid_tokens: tuple[TokenCount, TokenCount]
    max_rel_error: NotNegative
    heldout_max_rel_error: NotNegative | None = None
    """None: nothing was held out."""
    repeat_rel_spread: NotNegative | None = None
    """How far two fits, each of one of the two times that everything was measured, are apart at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSample:
    """Clipping and AdamW over a rank's shard of `parameters` elements, and publishing it as bf16 where measured."""

    parameters: Size
    step_s: Seconds
    publish_s: SecondsOrZero | None = None
    flagged: bool = False
    """The step is not to be used: noisy, or the device had to wait for the host."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostSample:
    """Host time to enqueue one unit."""

    seconds_per_unit_forward: SecondsOrZero
    seconds_per_unit_backward: SecondsOrZero
    seconds_per_unit_forward_deferred: SecondsOrZero | None = None
    """Under collective-deferred, which sets no parameters back to shards; None: as under the others."""
    seconds_per_unit_forward_one_sided: SecondsOrZero | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceilings:
    """The best that plain kernels reached: a large matrix product, a device copy, a peer copy (None: no peer)."""

    gemm_flops: Positive
    hbm_bytes_per_s: Positive
    p2p_bytes_per_s: Positive | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """The whole file. `Calibration(**header(command, seed), transfers=...)` makes one to write."""

    schema_version: int
    toolkit_version: str
    command: str
    created: str
    seed: int | None
    environment: dict[str, Any]
    transfers: tuple[TransferSample, ...] = ()
    copies: tuple[CopySample, ...] = ()
    compute: tuple[ComputeSample, ...] = ()
    fits: tuple[Fit, ...] = ()
    optimizer: tuple[OptimizerSample, ...] = ()
    host: HostSample | None = None
    ceilings: Ceilings | None = None
    device_speed: tuple[Speed, ...] = ()
    """[ranks] of layers' compute, all ranks at work, relative to the ranks' mean time, which `compute` has. For
    `--device-speed`: ranks of another machine, or another order, differ otherwise."""


def load_calibration(path: str | Path) -> Calibration:
    """Read a calibration file.

    Raises InputError naming the field that is missing, unknown, mistyped, out of range or inconsistent.
    """
    data = read_json(path)
    check_header(data, path, kind="a calibration (odc calibrate)")
    calibration: Calibration = _decode(Calibration, data, "", path)
    _check_consistency(calibration, path)
    return calibration


def write_calibration(path: str | Path, calibration: Calibration) -> None:
    """Write a calibration file that `load_calibration` accepts.

    Raises InputError where the measurements are inconsistent or the path cannot be written.
    """
    _check_consistency(calibration, path)
    write_json(path, dataclasses.asdict(calibration))


def _check_consistency(calibration: Calibration, path: str | Path) -> None:
    for i, sample in enumerate(calibration.transfers):
        where = f"{path}: transfers[{i}]"
        _check_order(where, sample)
        if sample.flagged:
            continue
        for name in ("slowdown_transfer", "slowdown_compute"):
            slowdown = getattr(sample, name)
            if slowdown is not None and slowdown < 1:
                raise InputError(
                    f"{where}.{name}: got {slowdown:.3g}, expected >= 1 or flagged = true: "
                    "a slowdown below 1 is a measuring error; measure again"
                )
    for i, copy in enumerate(calibration.copies):
        _check_order(f"{path}: copies[{i}]", copy)
    for i, compute in enumerate(calibration.compute):
        _check_order(f"{path}: compute[{i}]", compute)
        total = sum(compute.lengths)
        if compute.tokens != total:
            raise InputError(f"{path}: compute[{i}].tokens: got {compute.tokens}, expected the sum of lengths, {total}")
    for i, fit in enumerate(calibration.fits):
        low, high = fit.valid_tokens
        if low > high:
            raise InputError(f"{path}: fits[{i}].valid_tokens: got [{low}, {high}], expected [least, most]")


def _check_order(where: str, sample: TransferSample | CopySample | ComputeSample) -> None:
    if not sample.p20_s <= sample.p50_s <= sample.p80_s:
        raise InputError(
            f"{where}: got p20_s {sample.p20_s:g}, p50_s {sample.p50_s:g}, p80_s {sample.p80_s:g}, "
            "expected p20_s <= p50_s <= p80_s"
        )


def _decode(hint: Any, value: Any, where: str, path: str | Path) -> Any:
    """`value`, parsed from JSON, as the type `hint`; `where` is its place in the file."""

    def refuse(expected: str) -> InputError:
        return InputError(f"{path}: {where}: got {show(value)}, expected {expected}")

    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if not isinstance(value, dict):
            raise refuse("an object")
        return _decode_object(hint, value, where, path)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        decoded = _decode(arguments[0], value, where, path)
        check: _Check = arguments[1]
        if not check.holds(decoded):
            raise refuse(check.expected)
        return decoded
    if origin in (Union, types.UnionType):  # only ever "X | None"
        return None if value is None else _decode(arguments[0], value, where, path)
    if origin is Literal:
        if value not in arguments:
            raise refuse("one of " + ", ".join(arguments))
        return value
    if origin is tuple:
        variadic = arguments[-1] is Ellipsis
        if not isinstance(value, list) or not (variadic or len(value) == len(arguments)):
            raise refuse("a list" if variadic else f"a list of {len(arguments)}")
        return tuple(_decode(arguments[0], item, f"{where}[{i}]", path) for i, item in enumerate(value))
    if hint is float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise refuse("a number")
        try:
            number = float(value)
        except OverflowError:  # an integer of hundreds of digits
            number = math.inf
        if not math.isfinite(number):
            raise refuse("a number")
        return number
    plain = dict if origin is dict else hint
    if not isinstance(value, plain) or (plain is int and isinstance(value, bool)):
        raise refuse({str: "a text", int: "a whole number", bool: "true or false", dict: "an object"}[plain])
    return value


def _decode_object(kind: Any, value: dict[str, Any], where: str, path: str | Path) -> Any:
    hints = get_type_hints(kind, include_extras=True)
    prefix = f"{where}." if where else ""
    for name in value:
        if name not in hints:
            raise InputError(f"{path}: {prefix}{name}: unknown field, expected one of {', '.join(hints)}")
    for field in dataclasses.fields(kind):
        if field.default is dataclasses.MISSING and field.name not in value:
            raise InputError(f"{path}: {prefix}{field.name}: missing")
    return kind(**{name: _decode(hints[name], item, prefix + name, path) for name, item in value.items()})
