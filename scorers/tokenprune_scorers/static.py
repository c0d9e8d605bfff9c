"""Tokens that stand for several, apart from the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tokenprune.groupings import dense
from tokenprune.hookspecs import hookimpl
from tokenprune.interfaces import Grouping, PruneContext
from tokenprune.tokens import Signal
from tokenprune_scorers._video import LAYOUT


@dataclass(frozen=True)
class Static(Grouping):
    """Every frame by itself, and in it the static tokens apart from the others (PruneVid, https://arxiv.org/abs/2412.16117).

    A token is static when an earlier stage merged others into it, such as `runs` with `temporal_mean`. Those of a segment stand
    in its first frame, so a group is the static part of a segment or what moves in one frame.
    """

    name: ClassVar[str] = "static"

    def signals(self) -> tuple[Signal, ...]:
        """Read where tokens sit."""
        return (LAYOUT,)

    def labels(self, ctx: PruneContext) -> Tensor:
        """Return [B, N] int64."""
        at = ctx.layout
        merged = ctx.valid.long() * 0 if ctx.sizes is None else (ctx.sizes > 1).long()
        return dense(ctx.valid, at.image, at.frame, merged)


@hookimpl
def register_groupings(register: Callable[[type[Grouping]], None]) -> None:
    """Offer this grouping."""
    register(Static)
