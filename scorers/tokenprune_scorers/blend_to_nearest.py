"""Tokens that leave are blended into the most alike one that stays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from tokenprune.hookspecs import hookimpl
from tokenprune.interfaces import Grouping, Merged, Merger, PruneContext
from tokenprune_scorers._clusters import (
    MergedFeatures,
    Ranks,
    compact,
    distances,
    nearest,
    put,
    sizes_of,
    take,
    totals,
)


@dataclass(frozen=True)
class BlendToNearest(MergedFeatures, Merger):
    """Each kept token becomes w x itself + (1 - w) x the mean of the tokens nearest to it (FastVID, https://arxiv.org/abs/2503.11187).

    beta: w = max(1 / (n + 1), beta) for n tokens, the kept one among them.
    among: only tokens of these ranks by score take part, to give and to take; the others stay as they are, or are gone. FastVID
        leaves its salient tokens out this way. Needs a scorer. over: rank inside each group of a grouping (`frame`).
    each: the kept tokens of each group of a grouping take in all tokens by themselves, so that a token goes into one of every
        group; FastVID lets each anchor frame take in the whole scene.
    features, heads, layer, from, metric: how near tokens are; cosine of the states by default.

    Inside a budget `per` group tokens go to kept ones of their own group only.
    """

    name: ClassVar[str] = "blend_to_nearest"

    beta: Annotated[float, Field(strict=True, ge=0, le=1)] = 0.6
    among: Ranks | None = None
    over: Grouping | None = None
    each: Grouping | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.beta <= 1:
            raise ValueError(f"beta is the least weight of the kept token, in [0, 1], not {self.beta}")
        if self.over is not None and self.among is None:
            raise ValueError("over says where 'among' ranks tokens; leave it out, or state both")

    def merge(self, hidden: Tensor, kept: Tensor, ctx: PruneContext) -> Merged:
        """Return the blends at the places of the kept tokens."""
        sizes = sizes_of(ctx)
        if hidden.shape[1] == 0:
            return Merged(hidden, kept, sizes)
        pool = self._pool(ctx)
        index, there = compact(kept & pool)
        turn = self._turns(index, there, ctx)
        turns = turn.masked_fill(~there, -1).amax(dim=1) + 1
        x = self.of(hidden, ctx)
        distance = distances(x, take(x, index), self.metric)
        place = torch.arange(index.shape[1], device=index.device).expand_as(index)
        portion = sizes / turns.clamp(min=1).unsqueeze(1)  # of a token that goes into several
        total = torch.zeros_like(take(hidden, index), dtype=torch.float32)
        count, number = torch.zeros_like(total[..., 0]), torch.zeros_like(total[..., 0])
        for now in range(int(turns.max())):
            able = there & (turn == now)
            # A kept token is its own, even when another one is equal to it.
            owner = put(nearest(distance, able)[0], index, able, place)
            taken = pool & able.any(dim=1, keepdim=True)
            more, times = totals(hidden, owner, taken, index.shape[1], torch.ones_like(sizes))
            total, count = total + more, count + times
            number = number + totals(hidden[..., :0], owner, taken, index.shape[1], portion)[1]
        weight = (1 / (count + 1)).clamp(min=self.beta).unsqueeze(-1)
        blend = weight * take(hidden, index).float() + (1 - weight) * total / count.clamp(min=1).unsqueeze(-1)
        return Merged(put(hidden, index, there, blend), kept, put(sizes, index, there, number))

    def _turns(self, index: Tensor, there: Tensor, ctx: PruneContext) -> Tensor:
        """Return [B, K] int64: the number in its row of the group of `each` that a kept token belongs to."""
        if self.each is None:
            return torch.zeros_like(index)
        label = self.each.labels(ctx.only(self.each)).gather(1, index).masked_fill(~there, -1)
        first = (label.unsqueeze(2) == label.unsqueeze(1)).to(torch.uint8).argmax(dim=2)
        begins = first == torch.arange(index.shape[1], device=index.device)
        return (begins.cumsum(dim=1) - 1).gather(1, first)

    def _pool(self, ctx: PruneContext) -> Tensor:
        if self.among is None:
            return ctx.valid
        if self.over is None:
            return self.among.of(ctx)
        inside = ctx.grouped(self.over)
        return inside.spread(self.among.of(inside))


@hookimpl
def register_mergers(register: Callable[[type[Merger]], None]) -> None:
    """Offer this merger."""
    register(BlendToNearest)
