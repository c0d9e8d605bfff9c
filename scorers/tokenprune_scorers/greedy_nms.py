"""Tokens in order of score; each one kept takes its near neighbours out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from tokenprune.hookspecs import hookimpl
from tokenprune.interfaces import Number, PruneContext, Quantity
from tokenprune_scorers._greedy import Cosines, Distances, Greedy, ranks


@dataclass(frozen=True)
class GreedyNMS(Greedy):
    """Highest score first, and no token that is too near to one kept before it (AgilePruner, https://arxiv.org/abs/2603.01236).

    radius: how near is too near: strictly nearer than this. A number, or a quantity of the tokens such as their erank.
    grow_with_rank: the radius of a token is radius x its rank, 1 for the highest score. The rank counts all tokens, those
        taken out as well.
    max_radius: the radius is at most this.
    metric: `cosine` distance 1 - cos, `euclidean` distance, or cosine `similarity`, where too near is ABOVE the radius.
    from, centre: site of the features, and whether their mean is subtracted first.

    Where fewer tokens than the budget are left, those taken out come back by score, so the count is exact. Algorithm and eq. 6
    of the paper. The authors' code centres float32 features in place when it computes the erank and then compares the centred
    ones; `centre: true` would do that, the paper does not.
    """

    name: ClassVar[str] = "greedy_nms"

    radius: Number = 0.25
    grow_with_rank: Annotated[bool, Field(strict=True)] = False
    max_radius: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] | None = None
    metric: Literal["cosine", "euclidean", "similarity"] = "cosine"

    def __post_init__(self) -> None:
        if not isinstance(self.radius, Quantity) and not math.isfinite(self.radius):
            raise ValueError(f"radius is a finite number or a quantity, not {self.radius}")

    def radii(self, scores: Tensor, ctx: PruneContext) -> Tensor:
        """Return [B, N] float32: the radius of every token."""
        radius = ctx.number(self.radius).unsqueeze(1)
        grown = ranks(scores, ctx.valid) * radius if self.grow_with_rank else radius.expand_as(scores)
        return grown if self.max_radius is None else grown.clamp(max=self.max_radius)

    def start(self, scores: Tensor, keep: Tensor, ctx: PruneContext) -> _Field:
        """Return the state before the first pick."""
        features = self.features(ctx)
        pairs = Cosines(features) if self.metric == "similarity" else Distances(features, self.metric)
        return _Field(pairs, self.radii(scores, ctx), ranks(scores, ctx.valid), above=self.metric == "similarity")


class _Field:
    """Which tokens are out. Gains are negative ranks, below all others for a token that is out: that is the back-fill."""

    def __init__(self, pairs: Cosines, radii: Tensor, rank: Tensor, above: bool) -> None:
        self.pairs, self.radii, self.rank, self.above = pairs, radii, rank, above
        self.out = torch.zeros_like(rank, dtype=torch.bool)

    def gain(self) -> Tensor:
        return -self.rank - self.out * self.rank.shape[1]

    def take(self, pick: Tensor) -> None:
        radius = self.radii.gather(1, pick.unsqueeze(1))
        near = self.pairs.to(pick)
        self.out = self.out | (near > radius if self.above else near < radius)


@hookimpl
def register_selectors(register: Callable[[type], None]) -> None:
    """Offer this selector."""
    register(GreedyNMS)
