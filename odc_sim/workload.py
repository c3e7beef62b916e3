"""Workloads: named distributions of sequence lengths, and the samples drawn from them.

    workload = load_workload("longalign")
    samples = draw_minibatches(workload, 100, 32, np.random.default_rng(0))     # samples.lengths: int64 [3200]

Everything random comes from the numpy Generator passed in, so a seed fixes the result.
"""

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from odc_sim.datafiles import data_dir
from odc_sim.errors import InputError, unknown_name
from odc_sim.length_sources import Lengths, Mixture, Recorded
from odc_sim.length_stats import LengthStats, length_stats
from odc_sim.overlong import OVERLONG_CHOICES, OverlongChoice, apply_overlong, check_lengths, scale_lengths

# Rollouts are given their prompts in a pool at least this large (see `Workload.sample`).
_LEAST_POOL = 8192


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Samples:
    """Drawn samples: lengths in tokens, int64 [n]; the prompt of each, int64 [n], or None without groups.

    note: what was done to the lengths (scaling, samples over the cap), for the results; empty if nothing.
    """

    lengths: Lengths
    groups: npt.NDArray[np.int64] | None
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutGroups:
    """RL: each run of `group_size` rollouts shares a prompt and, with it, a lognormal factor of sigma `group_sigma`."""

    group_size: int
    group_sigma: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Workload:
    """A named distribution of sequence lengths. `evidence` says where its numbers come from."""

    name: str
    description: str
    kind: Literal["sft", "rl"]
    evidence: str
    source: Mixture | Recorded
    rl: RolloutGroups | None = None

    def __post_init__(self) -> None:
        """Raise InputError if kind and groups disagree or siblings would share more spread than there is."""
        if (self.kind == "rl") != (self.rl is not None):
            wanted = (
                "needs an [rl] table (group_size = 1 if siblings are unknown)" if self.rl is None else "has no [rl]"
            )
            raise InputError(f'workload.kind = "{self.kind}" {wanted}')
        if self.rl and self.rl.group_sigma > self.source.log_sigma:
            raise InputError(
                f"rl.group_sigma {self.rl.group_sigma:g} is more than the whole spread of ln(length), "
                f"{self.source.log_sigma:.3g}: siblings cannot share more than that"
            )

    @property
    def max_tokens(self) -> int:
        """The longest sample it can produce, in tokens."""
        return self.source.max_tokens

    @property
    def recorded(self) -> Lengths | None:
        """The list of lengths it draws from; None for a mixture."""
        return self.source.lengths if isinstance(self.source, Recorded) else None

    def longest(self, scale: float = 1.0) -> int:
        """`max_tokens` after `scale_lengths` by `scale`."""
        return int(scale_lengths([self.max_tokens], scale)[0])

    def sample(self, n: int, rng: np.random.Generator) -> Samples:
        """`n` samples as the distribution gives them, neither scaled nor capped.

        Rollouts of one prompt resemble each other, yet a single rollout follows the very distribution the workload
        describes (limits, clipping and all): lengths are drawn independently, then dealt to the rollouts by rank of a
        latent normal a * g + sqrt(1 - a^2) * e with one g a prompt, one e a rollout, and a = group_sigma / (standard
        deviation of ln(length)): a Gaussian copula. For one lognormal of spread sigma without limits this is
        median * exp(group_sigma * g + sqrt(sigma^2 - group_sigma^2) * e), a factor shared by the siblings.
        The deal is made over at least 8,192 rollouts, of which the first `n` are returned, so that few prompts differ
        from each other as much as many.
        """
        return self._draw(n, rng, scale=1.0, drop_above=None)

    def _draw(self, n: int, rng: np.random.Generator, *, scale: float, drop_above: int | None) -> Samples:
        if self.rl is None:
            return Samples(lengths=self.source.draw(n, rng, scale=scale, drop_above=drop_above), groups=None)
        size = self.rl.group_size
        groups = np.arange(n, dtype=np.int64) // size
        if size == 1 or self.rl.group_sigma == 0:
            return Samples(lengths=self.source.draw(n, rng, scale=scale, drop_above=drop_above), groups=groups)
        prompts = math.ceil(max(n, _LEAST_POOL) / size)
        drawn = np.sort(self.source.draw(prompts * size, rng, scale=scale, drop_above=drop_above))
        shared = self.rl.group_sigma / self.source.log_sigma
        own = math.sqrt(max(0.0, 1 - shared**2))
        latent = shared * np.repeat(rng.standard_normal(prompts), size) + own * rng.standard_normal(prompts * size)
        lengths = np.empty_like(drawn)
        lengths[np.argsort(latent, kind="stable")] = drawn
        return Samples(lengths=lengths[:n].copy(), groups=groups)

    def as_dict(self) -> dict[str, Any]:
        """JSON-able description for plan.json: the parameters of a mixture, or the size and SHA-256 of a list."""
        rl = {"group_size": self.rl.group_size, "group_sigma": self.rl.group_sigma} if self.rl else None
        return {
            "name": self.name,
            "description": self.description,
            "kind": self.kind,
            "evidence": self.evidence,
            "max_tokens": self.max_tokens,
            "lengths": self.source.as_dict(),
            "rl": rl,
        }


def draw_minibatches(
    workload: Workload,
    num_minibatches: int,
    samples_per_minibatch: int,
    rng: np.random.Generator,
    *,
    scale: float = 1.0,
    max_tokens: int | None = None,
    overlong: OverlongChoice = "error",
) -> Samples:
    """Exactly num_minibatches * samples_per_minibatch samples, minibatch after minibatch.

    Lengths are scaled first, then made to fit `max_tokens` (default: they already do): "drop" draws again instead of
    leaving a minibatch short; "scale" takes its ratio from the longest sample the workload can produce, so that it does
    not depend on the seed; see `apply_overlong`. Groups may continue across minibatches.

    Raises:
        InputError: a count below 1, a bad scale, a sample over the cap with "error", or "drop" that keeps almost none.
    """
    for what, count in (("minibatches", num_minibatches), ("samples per minibatch", samples_per_minibatch)):
        if count < 1:
            raise InputError(f"{count} {what}: expected at least 1")
    if overlong not in OVERLONG_CHOICES:
        raise unknown_name("--overlong choice", overlong, OVERLONG_CHOICES)
    if max_tokens is not None and max_tokens < 1:
        raise InputError(f"max_tokens is {max_tokens}: expected at least 1")
    n = num_minibatches * samples_per_minibatch
    longest = workload.longest(scale)
    over = max_tokens is not None and longest > max_tokens
    notes = [] if scale == 1 else [f"lengths scaled by {scale:g}"]

    drop_above = max_tokens if over and overlong == "drop" else None
    drawn = workload._draw(n, rng, scale=scale, drop_above=drop_above)
    lengths = drawn.lengths
    if drop_above is not None:
        notes.append(f"samples longer than {drop_above} tokens dropped and drawn again")
    elif over and max_tokens is not None:
        fitted = apply_overlong(lengths, max_tokens, overlong, longest=longest)
        lengths = fitted.lengths
        notes += [fitted.note] if fitted.note else []
    return Samples(lengths=lengths, groups=drawn.groups, note="; ".join(notes))


def builtin_workloads() -> list[str]:
    """Names of the workloads that come with the toolkit, sorted; sweep files (table [sweep]) lie beside them."""
    files = data_dir("workloads").glob("*.toml")
    return sorted(path.stem for path in files if "\n[workload]\n" in "\n" + path.read_text(encoding="utf-8"))


def load_workload(name_or_path: str | Path) -> Workload:
    """A built-in workload by name, or the workload file (TOML, see workloads/README.md) at a path.

    Raises:
        InputError: unknown name, unreadable file, or a field that is missing, misspelt or out of range.
    """
    from odc_sim.lengths import EXTENSIONS
    from odc_sim.workload_file import read_workload  # pydantic is slow to import

    text = str(name_or_path)
    path = Path(name_or_path)
    if text in builtin_workloads():
        return read_workload(data_dir("workloads") / f"{text}.toml")
    if path.suffix == ".toml":
        return read_workload(path)
    if os.path.isfile(path) or len(path.parts) > 1:
        if path.suffix.lower() in EXTENSIONS:
            raise InputError(f"{text} is not a workload file (.toml): for a list of lengths use --lengths {text}")
        raise InputError(f"{text} is neither a workload file (.toml) nor a list of lengths ({', '.join(EXTENSIONS)})")
    raise unknown_name("workload", text, builtin_workloads())


def workload_from_lengths(lengths: npt.ArrayLike, name: str, in_order: bool = False) -> Workload:
    """A workload of the user's own lengths [m] in tokens.

    Samples are drawn without replacement: every one is used once before any is used again, in a new random order each
    time round (as in epochs of training), within one call of `sample` or `draw_minibatches`. With `in_order` they keep
    their order and start over at the end.

    Raises:
        InputError: empty, or an entry that is not a whole number from 1 to 2^31.
    """
    tokens = check_lengths(lengths)
    return Workload(
        name=name,
        description=f"{tokens.size} lengths supplied by the user",
        kind="sft",
        evidence="supplied by the user",
        source=Recorded(lengths=tokens, order="in_order" if in_order else "permute"),
    )


def describe(workload: Workload, rng: np.random.Generator, n: int = 10_000) -> LengthStats:
    """Statistics of all lengths of a list, else of `n` samples; for RL also the correlation between drawn siblings."""
    samples = workload.sample(n, rng)
    drawn = length_stats(samples.lengths, samples.groups)
    if workload.recorded is None:
        return drawn
    return replace(length_stats(workload.recorded), group_correlation=drawn.group_correlation)
