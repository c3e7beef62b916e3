"""What ends a run before its last minibatch, in one line each."""

from dataclasses import dataclass

from odc_kernels.varlen import repeats_keys
from odc_sim.memory import largest_max_tokens, peak_memory
from odc_sim.memory_moments import Place as PlaceInMinibatch
from odc_sim.models import ModelSpec
from odc_sim.run_files import RunConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A microbatch of a rank."""

    minibatch: int
    rank: int
    microbatch: int
    tokens: int

    def __str__(self) -> str:
        return f"minibatch {self.minibatch}, rank {self.rank}, microbatch {self.microbatch} of {self.tokens:,} tokens"


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """The most memory a microbatch took that was finished."""

    tokens: int
    place: PlaceInMinibatch
    num_bytes: int


def tokens_that_fit(spec: ModelSpec, config: RunConfig, *, memory_bytes: int, peak: Peak | None) -> int | None:
    """The largest microbatch by the memory model, scaled to an observed `peak`; None: not even an empty one fits."""
    fields = {
        "world_size": config.world_size,
        "schedule": config.schedule,
        "gather_dtype": config.gather_dtype,
        "recompute": config.recompute,
        "chunked_loss_tokens": config.chunked_loss_tokens or None,
        "repeated_keys": config.device == "cuda" and repeats_keys(),
    }
    scale = 1.0
    if peak is not None:
        estimate = peak_memory(spec, microbatch_tokens=peak.tokens, place=peak.place, **fields)  # type: ignore[arg-type]
        scale = peak.num_bytes / estimate.total_bytes
    return largest_max_tokens(spec, memory_bytes=max(1, int(memory_bytes / scale)), **fields)  # type: ignore[arg-type]


def out_of_memory(place: Place, spec: ModelSpec, config: RunConfig, *, memory_bytes: int, peak: Peak | None) -> str:
    """Which microbatch did not fit, and what would."""
    most = tokens_that_fit(spec, config, memory_bytes=memory_bytes, peak=peak)
    if most is not None and most >= place.tokens:  # the model is too hopeful: what failed does not fit
        most = place.tokens * 9 // 10
    seen = f"scaled to the {peak.num_bytes / 1e9:.1f} GB that {peak.tokens:,} took" if peak else "not measured here"
    fits = f"max_tokens {most:,} fits by the memory model ({seen})" if most else "no max_tokens fits"
    return f"out of memory: {place} on a device of {memory_bytes / 1e9:.1f} GB; {fits}: plan with --max-tokens"


def not_finite(minibatch: int, loss: float, norm: float) -> str:
    """Which minibatch went wrong."""
    return (
        f"minibatch {minibatch}: loss {loss:g}, gradient norm {norm:g}: not finite, all ranks stop; "
        "lower --learning-rate, or look at the data of this minibatch"
    )
