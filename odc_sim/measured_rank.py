"""One rank's spans of one measured minibatch, by stream, and which of them belong together."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from odc_sim.idle import Span
from odc_sim.measured import DIRECTIONS


class Late(NamedTuple):
    """From `start_s` to `end_s` a rank stood at a collective that a peer had not reached."""

    start_s: float
    end_s: float
    cause: str


@dataclass(slots=True)
class RankSpans:
    """One rank's spans of one minibatch, by stream, in time order."""

    computes: list[Span] = field(default_factory=list)
    unshards: list[Span] = field(default_factory=list)
    reduces: list[Span] = field(default_factory=list)
    hosts: dict[tuple[str, int, int], list[Span]] = field(default_factory=lambda: defaultdict(list))
    """By kind, unit and microbatch: the root has two in the backward, of the head and of the embedding."""
    gathers: dict[tuple[int, int], list[Span]] = field(default_factory=lambda: defaultdict(list))
    """By (unit, microbatch): of its forward, then of its backward."""
    reduction: dict[tuple[int, int], Span] = field(default_factory=dict)
    closing: dict[tuple[int, int], Span] = field(default_factory=dict)
    """The last span of each unit's backward: after it its gradients are there."""
    late: list[Late] = field(default_factory=list)

    @classmethod
    def of(cls, spans: Iterable[Span]) -> "RankSpans":
        """Those of one rank and minibatch, in any order; old waits are left out."""
        rank = cls()
        streams = {"compute": rank.computes, "unshard": rank.unshards, "reduce": rank.reduces}
        for span in sorted(spans, key=lambda span: (span.start_s, span.end_s)):
            if span.stream == "host":
                rank.hosts[span.kind, span.unit, span.microbatch].append(span)
            elif span.kind != "wait":
                streams[span.stream].append(span)
        for span in rank.unshards:
            rank.gathers[span.unit, span.microbatch].append(span)
        rank.closing = {(s.unit, s.microbatch): s for s in rank.works if s.kind in ("backward", "recompute")}
        for span in rank.reduces:
            rank.reduction.setdefault((span.unit, span.microbatch), span)
        return rank

    @property
    def works(self) -> list[Span]:
        """Compute without optimizer and publish."""
        return [span for span in self.computes if span.kind in DIRECTIONS]

    @property
    def start_s(self) -> float:
        """When its first span on any stream began; 0 without one."""
        streams = (self.computes, self.unshards, self.reduces, *self.hosts.values())
        return min((spans[0].start_s for spans in streams if spans), default=0.0)

    @property
    def arrival_s(self) -> float:
        """When all its microbatches are done, their reductions included."""
        ends = [span.end_s for span in (*self.works, *self.reduces) if span.microbatch >= 0]
        return max(ends, default=0.0)

    def gather_of(self, span: Span) -> Span | None:
        """The gather that a compute span awaits; None where its unit was there already."""
        found = self.gathers.get((span.unit, span.microbatch), [])
        if span.kind == "forward":
            return found[0] if found else None
        return found[1] if span.kind != "head_loss" and len(found) > 1 else None

    def host_of(self, span: Span) -> Span | None:
        """When the host enqueued a compute span; that of the unit's backward includes its recompute."""
        kind = "backward" if span.kind == "recompute" else span.kind
        found = self.hosts.get((kind, span.unit, span.microbatch))
        if not found:
            return None
        ends = self.closing.get((span.unit, span.microbatch)) is span
        return found[-1] if ends else found[0]
