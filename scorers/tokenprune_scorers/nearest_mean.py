"""Tokens that leave are averaged into the kept token they are closest to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from tokenprune.hookspecs import hookimpl
from tokenprune.interfaces import Merged, Merger, PruneContext
from tokenprune_scorers._clusters import (
    MergedFeatures,
    Pairs,
    Ranks,
    compact,
    nearest,
    put,
    sizes_of,
    take,
    totals,
)


@dataclass(frozen=True)
class NearestMean(Merger, MergedFeatures):
    """Each dropped token goes into the kept one it is closest to, which becomes their mean (ToMe, https://arxiv.org/abs/2210.09461).

    mean: `joint` is the mean of the kept token and all that go into it (ToMe, VScan, TokenCarve, PACT); `add` is the kept
        token plus the mean of the others (VisionZip, https://arxiv.org/abs/2412.04467).
    targets: which kept tokens take others in: `all`, those at `even` or `odd` places of the row (ToMe's half: odd where the
        first token is a source), or a range of ranks by score (VisionZip spares its best, TokenCarve takes the better half).
    sources: dropped tokens that rank outside these by score are gone; null merges all.
    within: tokens further than this from every target are gone (PACT, https://arxiv.org/abs/2504.08966: 1.5 x its cutoff).
    by_size: a token that already stands for several counts so often in the mean; sizes are added up in any case.
    features, heads, layer, from, metric: what is compared, and how.
    """

    name: ClassVar[str] = "nearest_mean"

    mean: Literal["joint", "add"] = "joint"
    targets: Literal["all", "even", "odd"] | Ranks = "all"
    sources: Ranks | None = None
    within: Annotated[float, Field(strict=True, ge=0)] | None = None
    by_size: Annotated[bool, Field(strict=True)] = True

    def __post_init__(self) -> None:
        if self.within is not None and not self.within >= 0:
            raise ValueError(f"within is a distance >= 0, not {self.within}")

    def merge(self, hidden: Tensor, kept: Tensor, ctx: PruneContext) -> Merged:
        """Return the kept tokens with the others in them, and how many each stands for."""
        index, there = compact(kept & self._able(ctx))
        source = ctx.valid & ~kept & there.any(dim=1, keepdim=True)
        if self.sources is not None:
            source = source & self.sources.of(ctx)
        x = self.of(hidden, ctx)
        owner, gap = nearest(Pairs(x, take(x, index), self.metric), there)
        if self.within is not None:
            source = source & (gap <= self.within)
        sizes = sizes_of(ctx)
        weight = sizes if self.by_size else torch.ones_like(sizes)
        total, mass = totals(hidden, owner, source, index.shape[1], weight)
        own = take(hidden, index).float()
        if self.mean == "add":
            made = own + total / torch.where(mass > 0, mass, 1.0).unsqueeze(2)
        else:
            before = take(weight, index)
            made = (own * before.unsqueeze(2) + total) / (before + mass).clamp(min=1).unsqueeze(2)
        changed = there & (mass > 0)  # a token that takes nothing in stays bit for bit
        joined = mass if self.by_size else totals(hidden, owner, source, index.shape[1], sizes)[1]
        return Merged(put(hidden, index, changed, made), kept, put(sizes, index, there, take(sizes, index) + joined))

    def _able(self, ctx: PruneContext) -> Tensor:
        if isinstance(self.targets, Ranks):
            return self.targets.of(ctx)
        if self.targets == "all":
            return ctx.valid
        return ctx.valid & ((ctx.valid.cumsum(dim=1) - 1) % 2 == (0 if self.targets == "even" else 1))


@hookimpl
def register_mergers(register: Callable[[type[Merger]], None]) -> None:
    """Offer this merger."""
    register(NearestMean)
