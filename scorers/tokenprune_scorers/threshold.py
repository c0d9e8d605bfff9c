"""Selectors that find out by the scores themselves how many tokens stay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from tokenprune.hookspecs import hookimpl
from tokenprune.interfaces import Number, PruneContext, Selector
from tokenprune_scorers._rows import best, places, quantile, whole

__all__ = ["Cumulative", "Threshold"]

_Count = Annotated[int, Field(strict=True, ge=0)]


@dataclass(frozen=True)
class Threshold(Selector):
    """Tokens with a score above a bound stay, however many they are (MustDrop, https://arxiv.org/abs/2411.10803).

    above: the bound, or the factor of `of`. of: `one` (the bound is a plain number), the `mean`, `max` or `sum` of the row's
        scores, or `outlier`: the bound is Q3 + above x IQR, linear percentiles (PruMerge takes 1.5).
    or_equal: a score at the bound stays too. min_tokens: where fewer pass, the highest scores stay all the same.

    A budget beside it makes the count exact.
    """

    name: ClassVar[str] = "threshold"
    counts_itself: ClassVar[bool] = True

    above: Number = 1.0
    of: Literal["one", "mean", "max", "sum", "outlier"] = "mean"
    or_equal: Annotated[bool, Field(strict=True)] = False
    min_tokens: _Count = 1

    def select(self, scores: Tensor, keep: Tensor, ctx: PruneContext) -> Tensor:
        """Return [B, N] bool."""
        x = scores.double()
        bound = ctx.number(self.above).double()
        if self.of == "outlier":
            low, high = (quantile(whole(scores, ctx.valid), q, ctx.valid) for q in (0.25, 0.75))
            bound = high + bound * (high - low)
        elif self.of == "max":
            bound = bound * whole(x.masked_fill(~ctx.valid, -torch.inf).amax(dim=1), ctx.valid.any(dim=1))
        elif self.of != "one":
            total = whole(x, ctx.valid).sum(dim=1)
            bound = bound * (total if self.of == "sum" else total / ctx.valid.sum(dim=1).clamp(min=1))
        above = x >= bound.unsqueeze(1) if self.or_equal else x > bound.unsqueeze(1)
        least = ctx.valid.sum(dim=1).clamp(max=self.min_tokens)
        return (above & ctx.valid) | best(scores, least, ctx.valid)


@dataclass(frozen=True)
class Cumulative(Selector):
    """The fewest tokens stay whose scores make up a share of the total (ZipVL, https://arxiv.org/abs/2410.08584).

    mass: the share. min_tokens: never fewer. Negative scores count 0.

    By descending score, ties to the lower index, until the sum reaches mass x total; a budget beside it makes the count exact.
    """

    name: ClassVar[str] = "cumulative"
    counts_itself: ClassVar[bool] = True

    mass: Number = 0.9
    min_tokens: _Count = 1

    def __post_init__(self) -> None:
        if isinstance(self.mass, int | float) and not 0 <= self.mass <= 1:
            raise ValueError(f"mass is a share of the total score, in [0, 1], not {self.mass}")

    def select(self, scores: Tensor, keep: Tensor, ctx: PruneContext) -> Tensor:
        """Return [B, N] bool."""
        x = whole(scores, ctx.valid).clamp(min=0).double()
        place = places(scores, ctx.valid)
        ordered = torch.zeros_like(x).scatter_(1, place, x)
        before = (ordered.cumsum(dim=1) - ordered).gather(1, place)
        wanted = x.sum(dim=1) * ctx.number(self.mass).double().clamp(0, 1)
        needed = before < (wanted * (1 - 1e-6)).unsqueeze(1)  # as exact as float32 scores are
        least = ctx.valid.sum(dim=1).clamp(max=self.min_tokens)
        return (needed | (place < least.unsqueeze(1))) & ctx.valid


@hookimpl
def register_selectors(register: Callable[[type], None]) -> None:
    """Offer these selectors."""
    register(Threshold)
    register(Cumulative)
