"""Several mergers after one another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from tokenprune.hookspecs import hookimpl
from tokenprune.interfaces import Merged, Merger, PruneContext
from tokenprune.mergers import Drop


@dataclass(frozen=True)
class AllOf(Merger):
    """Several mergers act after one another, each on what the one before left.

    mergers: in order. Tokens the earlier ones made count as kept for the later ones; one that appends comes last.
    """

    name: ClassVar[str] = "all_of"

    mergers: tuple[Merger, ...]

    def __post_init__(self) -> None:
        if not self.mergers:
            raise ValueError("mergers lists at least one merger")
        if any(merger.moves_states for merger in self.mergers[:-1]):
            raise ValueError("a merger with 'place: append' moves the tokens and comes last")

    @classmethod
    def example(cls) -> AllOf:
        """Return one that drops."""
        return cls((Drop(),))

    def extra(self, alive: Tensor, keep: Tensor) -> Tensor:
        """Return [B]: what they add together."""
        total = keep
        for merger in self.mergers:
            total = total + merger.extra(alive, total)
        return total - keep

    def merge(self, hidden: Tensor, kept: Tensor, ctx: PruneContext) -> Merged:
        """Return what the last one leaves."""
        sizes = ctx.sizes
        for merger in self.mergers:
            made = merger.merge(hidden, kept, replace(ctx, sizes=sizes).only(merger))
            hidden, kept, sizes = made.states, made.kept, made.sizes if made.sizes is not None else sizes
        return Merged(hidden, kept, sizes)


@hookimpl
def register_mergers(register: Callable[[type[Merger]], None]) -> None:
    """Offer this merger."""
    register(AllOf)
