"""Tokens of a clip by place and time: which token comes before which at the same position. Shared by the video parts.

Tokens may have left already, so nothing here counts on full frames: tokens find each other by image, row, column and frame.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from tokenprune.groupings import dense
from tokenprune.interfaces import Grouping, Layout, PruneContext
from tokenprune.tokens import Signal

LAYOUT = Signal("layout")


@dataclass(frozen=True, eq=False)
class Labelled(Grouping):
    """Groups whose labels are known already."""

    of: Tensor

    def labels(self, ctx: PruneContext) -> Tensor:
        """Return [B, N] int64."""
        return self.of


@dataclass(frozen=True, eq=False)
class Places:
    """Tokens of each row in the order of position, then frame; padding last.

    order: [B, N] which token is at each place. starts: [B, N] bool, True where a new position begins in that order.
    keys: [B, N] ascending, position * step + frame. position: [B, N] in the order of the tokens.
    """

    order: Tensor
    starts: Tensor
    keys: Tensor
    position: Tensor
    step: int

    def back(self, values: Tensor) -> Tensor:
        """Return values [B, N] of the places at their tokens."""
        return torch.empty_like(values).scatter_(1, self.order, values)

    def before(self, lag: int = 1) -> Tensor:
        """Return [B, N] int64: the `lag`-th token before each one at its position, or -1."""
        place = torch.arange(self.order.shape[1], device=self.order.device).expand_as(self.order)
        first = place.masked_fill(~self.starts, 0).cummax(dim=1).values
        there = place - lag >= first
        return self.back(self.order.gather(1, (place - lag).clamp(min=0)).masked_fill(~there, -1))

    def at(self, frame: Tensor) -> Tensor:
        """Return [B, N] int64: the token at the position of each one in another frame [B, N], or -1 if it is not there."""
        wanted = self.position * self.step + frame
        place = torch.searchsorted(self.keys, wanted).clamp(max=self.keys.shape[1] - 1)
        return self.order.gather(1, place).masked_fill(self.keys.gather(1, place) != wanted, -1)


def places(layout: Layout, valid: Tensor) -> Places:
    """Return the tokens by position and frame."""
    position = dense(valid, layout.image, layout.row, layout.column)
    step = int(layout.frames.max()) + 1 if valid.numel() else 1
    keys = (position * step + layout.frame).masked_fill(~valid, torch.iinfo(torch.int64).max)
    keys, order = keys.sort(dim=1, stable=True)
    place = position.masked_fill(~valid, -1).gather(1, order)
    starts = torch.ones_like(valid)
    starts[:, 1:] = place[:, 1:] != place[:, :-1]
    return Places(order, starts, keys, position, step)


def likeness(hidden: Tensor, other: Tensor) -> Tensor:
    """Return [B, N] float32: the cosine between each token and the token `other` [B, N]; 0 where that is -1."""
    index = other.clamp(min=0).unsqueeze(-1).expand_as(hidden)
    cosine = cosine_similarity(hidden.float(), hidden.gather(1, index).float(), dim=-1)
    return cosine.masked_fill(other < 0, 0.0)
