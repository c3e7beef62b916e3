"""Changing sequence lengths on purpose: scaling them, and what to do with samples longer than the token cap."""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from odc_sim.errors import InputError, unknown_name

OverlongChoice = Literal["error", "drop", "clip", "scale"]
OVERLONG_CHOICES: tuple[OverlongChoice, ...] = ("error", "drop", "clip", "scale")

# The longest length any part of the toolkit accepts; products of two lengths then stay inside int64.
LARGEST_LENGTH_TOKENS = 2**31


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Overlong:
    """What `apply_overlong` did.

    lengths: int64 [n], none above the cap. kept: int64 [n], the index each had in the input (all unless dropped).
    changed: how many samples were dropped, clipped or scaled. note: one line for the results, empty if nothing changed.
    """

    lengths: npt.NDArray[np.int64]
    kept: npt.NDArray[np.int64]
    changed: int
    note: str


def scale_lengths(lengths: npt.ArrayLike, factor: float) -> npt.NDArray[np.int64]:
    """Every length times `factor`, rounded, at least one token: int64 [n].

    One ratio for all keeps the distribution's shape, which is how the ODC paper varies the maximum length
    (arXiv 2601.19362, section on the parametric study).

    Raises:
        InputError: the factor is not a positive finite number, or a length would pass 2^31 tokens.
    """
    tokens = np.asarray(lengths, dtype=np.int64)
    if not math.isfinite(factor) or factor <= 0:
        raise InputError(f"the scale factor is {factor}: expected a positive number, for example 0.5")
    if factor == 1 or tokens.size == 0:
        return tokens
    scaled = np.rint(tokens * float(factor))
    if scaled.max() > LARGEST_LENGTH_TOKENS:
        raise InputError(f"scaling by {factor} makes a sample of {scaled.max():.3g} tokens: the limit is 2^31")
    at_least_one: npt.NDArray[np.int64] = np.maximum(scaled, 1).astype(np.int64)
    return at_least_one


def apply_overlong(
    lengths: npt.ArrayLike, max_tokens: int, how: OverlongChoice = "error", *, longest: int | None = None
) -> Overlong:
    """Make every one of `lengths` [n] fit `max_tokens`.

    error: refuse. drop: leave the long samples out. clip: cut them to the cap. scale: multiply ALL samples by one
    ratio, max_tokens / longest, rounded down, so that the longest fits and the shape stays.
    `longest` is the longest sample of the whole set where `lengths` is only a part of it (default: their maximum).

    Raises:
        InputError: a sample does not fit and how is "error"; dropping leaves nothing; unknown `how`; cap below 1.
    """
    tokens = np.asarray(lengths, dtype=np.int64)
    if how not in OVERLONG_CHOICES:
        raise unknown_name("--overlong choice", how, OVERLONG_CHOICES)
    if max_tokens < 1:
        raise InputError(f"max_tokens is {max_tokens}: expected at least 1")
    everything = np.arange(tokens.size)
    if how == "scale":
        top = max(int(tokens.max(initial=1)), longest or 1)
        if top <= max_tokens:
            return Overlong(lengths=tokens, kept=everything, changed=0, note="")
        # Integer arithmetic: exact, monotone, and the longest becomes max_tokens itself.
        scaled = np.maximum(tokens * max_tokens // top, 1)
        note = f"all samples scaled by {max_tokens / top:.4g} so that the longest ({top} tokens) fits {max_tokens}"
        return Overlong(lengths=scaled, kept=everything, changed=int((scaled != tokens).sum()), note=note)

    long = tokens > max_tokens
    count = int(long.sum())
    if count == 0:
        return Overlong(lengths=tokens, kept=everything, changed=0, note="")
    if how == "error":
        first = int(long.argmax())
        raise InputError(
            f"sample {first} has {tokens[first]} tokens, more than max_tokens {max_tokens} "
            f"({count} of {tokens.size} samples do): raise --max-tokens or choose --overlong drop|clip|scale"
        )
    if how == "clip":
        note = f"{count} of {tokens.size} samples clipped to {max_tokens} tokens"
        return Overlong(lengths=np.minimum(tokens, max_tokens), kept=everything, changed=count, note=note)
    if count == tokens.size:
        raise InputError(
            f"--overlong drop leaves no sample: all {count} are longer than max_tokens {max_tokens} "
            f"(the shortest has {tokens.min()}); raise --max-tokens or choose --overlong clip|scale"
        )
    note = f"{count} of {tokens.size} samples dropped (longer than {max_tokens} tokens)"
    return Overlong(lengths=tokens[~long], kept=everything[~long], changed=count, note=note)


def check_lengths(lengths: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """`lengths` as a read-only int64 [n] copy.

    Raises:
        InputError: empty, not one-dimensional, or an entry that is not a whole number in 1..2^31.
    """
    values = np.asarray(lengths)
    if values.ndim != 1 or values.size == 0:
        raise InputError(f"lengths have shape {list(values.shape)}: expected a non-empty list of token counts")
    if values.dtype.kind not in "iuf":
        raise InputError(f"lengths are of type {values.dtype}: expected whole numbers of tokens")
    bad = ~((values >= 1) & (values <= LARGEST_LENGTH_TOKENS))
    if values.dtype.kind == "f":
        bad |= values != np.rint(values)
    if bad.any():
        first = int(bad.argmax())
        raise InputError(f"sample {first} has length {values[first]}: expected a whole number from 1 to 2^31")
    tokens = values.astype(np.int64)
    tokens.setflags(write=False)
    return tokens
