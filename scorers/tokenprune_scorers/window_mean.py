"""Kept tokens become the mean of their surroundings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from tokenprune.groupings import Window
from tokenprune.hookspecs import hookimpl
from tokenprune.interfaces import Grouping, Merged, Merger, PruneContext
from tokenprune_scorers._clusters import sizes_of


@dataclass(frozen=True)
class WindowMean(Merger):
    """Each kept token becomes the mean of itself and the dropped tokens of its window (average pooling).

    over: the windows, any grouping; rectangles of 2 x 2 tokens by default, `position` is a mean over time.

    One kept token per window makes it average pooling; a window in which nothing is kept is gone. Tokens that already stand
    for several count so often.
    """

    name: ClassVar[str] = "window_mean"

    over: Grouping = field(default_factory=lambda: Window(rows=2, columns=2))

    def merge(self, hidden: Tensor, kept: Tensor, ctx: PruneContext) -> Merged:
        """Return the kept tokens as means, and how many each stands for."""
        windows = ctx.grouped(self.over)
        inside, stays = windows.cut(hidden), windows.cut(kept) & windows.valid
        sizes = sizes_of(windows)
        leaves = torch.where(windows.valid & ~stays, sizes, 0.0)
        number = sizes + leaves.sum(dim=1, keepdim=True)
        total = inside.float() * sizes.unsqueeze(2)
        total = total + leaves.unsqueeze(1) @ inside.float().masked_fill(~windows.valid.unsqueeze(2), 0.0)
        changed = stays & leaves.any(dim=1, keepdim=True)
        mean = torch.where(changed.unsqueeze(2), total / number.clamp(min=1).unsqueeze(2), inside.float())
        spread = windows.spread(torch.where(stays, number, sizes))
        return Merged(windows.spread(mean, into=hidden), kept, torch.where(ctx.valid, spread, 1.0))


@hookimpl
def register_mergers(register: Callable[[type[Merger]], None]) -> None:
    """Offer this merger."""
    register(WindowMean)
