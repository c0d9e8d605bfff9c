"""A part of the budget for tokens the score passes over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from tokenprune.budget import Budget, Rounding
from tokenprune.decision import select_exactly
from tokenprune.groupings import Window
from tokenprune.hookspecs import hookimpl
from tokenprune.interfaces import Grouping, PruneContext, Selector
from tokenprune.selectors import TopK
from tokenprune_scorers._rows import best, places

__all__ = ["Reserve"]

_CELLS = Window(rows=4, columns=4)


@dataclass(frozen=True)
class Reserve(Selector):
    """Another selector has most of the budget; the rest is for low scores spread over the image (no paper).

    share: of the budget that is reserved. rounding: of that share. selector: chooses the others first.
    over: cells the reserved tokens are spread over; every cell gives its lowest score before any gives its second lowest.
    lowest: false takes the highest scores of each cell instead, which is plain stratified selection at `share: 1`.

    Within a turn, cells go by the score they offer, then by position. Exactly the budget stays.
    """

    name: ClassVar[str] = "reserve"

    share: Annotated[float, Field(strict=True, ge=0, le=1)] = 0.1
    rounding: Rounding = "floor"
    selector: Selector = field(default_factory=TopK)
    over: Grouping = _CELLS
    lowest: Annotated[bool, Field(strict=True)] = True

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"share is a share of the budget, in [0, 1], not {self.share}")

    def select(self, scores: Tensor, keep: Tensor, ctx: PruneContext) -> Tensor:
        """Return [B, N] bool."""
        reserved = Budget(keep_ratio=self.share, of="original", rounding=self.rounding).counts(ctx, keep)
        chosen = select_exactly(self.selector, keep - reserved, ctx)
        wanted = -scores if self.lowest else scores
        free = ctx.valid & ~chosen
        cells = replace(ctx, scores=torch.where(free, wanted, -torch.inf)).grouped(self.over)
        assert cells.scores is not None
        turn = cells.spread(places(cells.scores, cells.valid))
        by_score = places(torch.where(free, wanted, -torch.inf), ctx.valid)
        order = turn * ctx.valid.shape[1] + by_score
        return chosen | best(-order.double().masked_fill(~free, torch.inf), reserved, free)


@hookimpl
def register_selectors(register: Callable[[type], None]) -> None:
    """Offer this selector."""
    register(Reserve)
