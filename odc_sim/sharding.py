"""How finely parameters, gradients and optimizer state are divided: the 14 strategies of PaRO (arXiv 2310.06003).

A strategy has one letter each for parameters, gradients and optimizer state: N not divided, I divided over the ranks
of a node ("intra"), G over all of them ("global"). The optimizer is divided at least as finely as the other two, or a
rank would hold state for what it cannot update; of 27 names that leaves 14. Known ones: NNN is DDP, NNG ZeRO-1, NGG
ZeRO-2, GGG ZeRO-3 and FSDP, III MiCS and FSDP2's hybrid sharding (HSDP); IIG is what PaRO adds to III: the optimizer
state of a node divided further, over all nodes.

What is divided within a node never crosses the network in a microbatch. What differs then between nodes is made equal
once a minibatch:

| gradients, for an optimizer state in | N | I | G |
|---|---|---|---|
| N | all_reduce | reduce_scatter within the node, all_reduce between nodes | reduce_scatter |
| I | | all_reduce between nodes | reduce_scatter between nodes |
| G | | | nothing |

| parameters, from an optimizer state in | N | I | G |
|---|---|---|---|
| N | nothing | all_gather within the node | all_gather |
| I | | nothing | all_gather between nodes |
| G | | | nothing |

Between nodes: each rank with its counterparts, who hold the same part; all ranks of a node at once, over all its cards.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from odc_sim.errors import InputError, unknown_name
from odc_sim.memory import RECIPES, Recipe
from odc_sim.memory_moments import BF16_BYTES

Granularity = Literal["N", "I", "G"]
GRANULARITIES: tuple[Granularity, ...] = get_args(Granularity)
ALIASES = {
    **{"ddp": "NNN", "zero1": "NNG", "zero2": "NGG", "zero3": "GGG", "fsdp": "GGG"},
    **{"mics": "III", "hsdp": "III", "paro": "IIG"},
}
SHOWN = {"NNN": "DDP", "NNG": "ZeRO-1", "NGG": "ZeRO-2", "GGG": "ZeRO-3, FSDP", "III": "HSDP, MiCS", "IIG": "PaRO"}
"""What tables call some of them besides."""

Meets = Literal["all ranks", "its node", "nobody"]


@dataclass(frozen=True, slots=True)
class Strategy:
    """How finely each of the three is divided."""

    parameters: Granularity
    gradients: Granularity
    optimizer: Granularity

    @property
    def letters(self) -> tuple[Granularity, Granularity, Granularity]:
        """All three."""
        return self.parameters, self.gradients, self.optimizer

    @property
    def name(self) -> str:
        """Its letters."""
        return "".join(self.letters)

    @property
    def meets(self) -> Meets:
        """Whom a rank waits for in every microbatch where transfers are collectives."""
        in_microbatches = (self.parameters, self.gradients)
        return "all ranks" if "G" in in_microbatches else "its node" if "I" in in_microbatches else "nobody"

    def differs(self, *, node: int, nodes: int) -> bool:
        """Whether no other strategy is the same: on one node I is G, and on nodes of one rank it is N."""
        return "I" not in self.name or (node > 1 and nodes > 1)

    def copies(self, recipe: Recipe, *, published: bool) -> bool:
        """Whether bf16 parameters are kept beside the fp32 master ones, besides a window that one-sided gathers read.

        In the recipe `mixed` always; in `paper` where they are divided otherwise or not at all, unless gathers read
        that window.
        """
        apart = self.parameters != self.optimizer or self.parameters == "N"
        return recipe == "mixed" or (apart and not published)

    def state(
        self,
        parameters: int,
        recipe: Recipe,
        *,
        node: int,
        world_size: int,
        window_bytes: int = 0,
        copy_bytes: int = BF16_BYTES,
    ) -> dict[str, int]:
        """Bytes of parameters, gradients, optimizer and published_window on one rank.

        The fp32 master parameters, whichever recipe counts them where, are divided as the optimizer state is, so that
        an update needs nobody else.

        Args:
            parameters: of the model.
            recipe: bytes of each.
            node: ranks in a node.
            world_size: ranks in all.
            window_bytes: of a parameter in the window that one-sided gathers read; 0: there is none.
            copy_bytes: of a parameter as it is gathered, where such ones are kept; `mixed` keeps bf16.

        Returns:
            Under "optimizer" its own state and the master parameters, under "parameters" copies of those.
        """
        over = {"N": 1, "I": node, "G": world_size}
        state = RECIPES[recipe]
        master = 0 if recipe == "mixed" else state.parameters  # `mixed` counts it with the optimizer
        window_bytes = window_bytes if self.parameters != "N" else 0
        copy_bytes = BF16_BYTES if recipe == "mixed" else copy_bytes
        copied = self.copies(recipe, published=window_bytes > 0)
        parts = {
            "parameters": (copy_bytes * copied, self.parameters),
            "gradients": (state.gradients, self.gradients),
            "optimizer": (master + state.optimizer, self.optimizer),
            "published_window": (window_bytes, self.parameters),
        }
        return {name: -(-each * parameters // over[granularity]) for name, (each, granularity) in parts.items()}


def _sensible(strategy: Strategy) -> bool:
    at = GRANULARITIES.index
    return at(strategy.optimizer) >= max(at(strategy.parameters), at(strategy.gradients))


STRATEGIES = tuple(filter(_sensible, itertools.starmap(Strategy, itertools.product(GRANULARITIES, repeat=3))))


def chosen_strategies(names: Sequence[str]) -> tuple[Strategy, ...]:
    """Those of these names (comma lists too) and GGG, which they are compared with; all of them for no names.

    Raises:
        InputError: as `parse_strategy`.
    """
    texts = [part.strip() for name in names for part in name.split(",") if part.strip()]
    wanted = {parse_strategy(text) for text in texts} | {parse_strategy("zero3")}
    return tuple(strategy for strategy in STRATEGIES if strategy in wanted) if texts else STRATEGIES


def parse_strategy(text: str) -> Strategy:
    """A strategy by its letters or a known name.

    Raises:
        InputError: there is none of that name, or the optimizer would be divided more coarsely than the rest.
    """
    name = ALIASES.get(text.lower().replace("-", ""), text.upper())
    found = {strategy.name: strategy for strategy in STRATEGIES}
    if name in found:
        return found[name]
    if len(name) == 3 and set(name) <= set(GRANULARITIES):
        raise InputError(
            f"sharding {text!r}: the optimizer state ({name[2]}) is divided more coarsely than parameters ({name[0]}) "
            f"or gradients ({name[1]}), so a rank would hold state for what it cannot update; N is coarsest, G finest"
        )
    raise unknown_name("sharding", text, [*found, *ALIASES])
