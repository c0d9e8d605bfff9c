"""The most different tokens: each next one is the farthest from those kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tokenprune.hookspecs import hookimpl
from tokenprune.interfaces import PruneContext
from tokenprune_scorers._greedy import Distances, Greedy


@dataclass(frozen=True)
class FarthestPoint(Greedy):
    """The token farthest from those kept, over and over; scores are not used (DivPrune, https://arxiv.org/abs/2503.02175).

    The first is the most isolated one: that with the farthest nearest neighbour (eq. 4 and algorithm 1, max-min diversity).

    metric: `cosine` distance 1 - cos, or `euclidean`.
    from, centre: site of the features, and whether their mean is subtracted first.

    Differs from the authors' code: a token that is kept is not looked at again, so copies of kept tokens come in order of
    position and none is taken twice.
    """

    name: ClassVar[str] = "farthest_point"
    uses_scores: ClassVar[bool] = False

    metric: Literal["cosine", "euclidean"] = "cosine"

    def start(self, scores: Tensor, keep: Tensor, ctx: PruneContext) -> _Spread:
        """Return the state before the first pick."""
        return _Spread(Distances(self.features(ctx), self.metric), ctx.valid)


class _Spread:
    """Distance of every token to the nearest one kept."""

    def __init__(self, distances: Distances, valid: Tensor) -> None:
        self.distances = distances
        self.nearest: Tensor | None = None
        parts = [_isolation(part, block, valid) for block, part in distances.blocks()]
        self.first = torch.cat(parts, dim=1) if parts else valid.float()

    def gain(self) -> Tensor:
        return self.first if self.nearest is None else self.nearest

    def take(self, pick: Tensor) -> None:
        distance = self.distances.to(pick)
        self.nearest = distance if self.nearest is None else torch.minimum(self.nearest, distance)


def _isolation(distance: Tensor, block: slice, valid: Tensor) -> Tensor:
    """Return [B, r]: distance of the tokens of a block to the nearest other token of their row."""
    place = torch.arange(valid.shape[1], device=valid.device)
    others = valid.unsqueeze(1) & (place[block].unsqueeze(1) != place)
    return distance.masked_fill(~others, torch.inf).amin(dim=2)


@hookimpl
def register_selectors(register: Callable[[type], None]) -> None:
    """Offer this selector."""
    register(FarthestPoint)
