"""The best of the dropped tokens come back as a few cluster means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from tokenprune.hookspecs import hookimpl
from tokenprune.interfaces import Merged, Merger, PruneContext
from tokenprune_scorers._clusters import (
    MergedFeatures,
    Metric,
    Pairs,
    Place,
    compact,
    knn_density,
    nearest,
    ranked,
    scores_of,
    share,
    sizes_of,
    take,
    to_denser,
    totals,
    with_extras,
)


@dataclass(frozen=True)
class Recycle(Merger, MergedFeatures):
    """The best dropped tokens are clustered, and the cluster means stay beside the kept tokens (SparseVLM, https://arxiv.org/abs/2410.04417).

    Of the P tokens dropped, the r = floor(share P) + 1 with the highest scores come back as floor(r / per_cluster) + 1 extra
    tokens: DPC-kNN picks the centres (density x distance to the nearest denser token), every token joins the nearest centre,
    and the extra token is their mean. The budget of the stage does not count them.

    share, per_cluster: see above. neighbours: k of the density; null takes the number of clusters, as in the paper's code.
    place: `in_order` leaves each mean at its centre's place; `append` puts them after the kept tokens, densest peaks first
        (as the authors' code; needs `positions: renumber`).
    features, heads, layer, from, metric: what is compared, and how; `euclidean` distance / sqrt(width) by default.

    Differs from the authors' code: no random noise on the density; the first of equally dense tokens counts as denser.
    """

    name: ClassVar[str] = "recycle"

    metric: Metric = "euclidean"
    share: Annotated[float, Field(strict=True, ge=0, le=1)] = 0.3
    per_cluster: Annotated[int, Field(strict=True, ge=1)] = 10
    neighbours: Annotated[int, Field(strict=True, ge=1)] | None = None
    place: Place = "in_order"

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"share is the part of the dropped tokens that comes back, in [0, 1], not {self.share}")
        if self.per_cluster < 1 or (self.neighbours is not None and self.neighbours < 1):
            raise ValueError("per_cluster and neighbours are numbers of tokens >= 1")

    def _numbers(self, dropped: Tensor) -> tuple[Tensor, Tensor]:
        """Return ([B], [B]): how many tokens come back, in how many clusters."""
        back = torch.minimum(share(dropped, self.share) + 1, dropped)
        clusters = torch.div(back, self.per_cluster, rounding_mode="floor") + 1
        return back, torch.minimum(clusters, back)

    @property
    def moves_states(self) -> bool:
        """Whether the extra tokens go to the end, and the kept ones to the first places."""
        return self.place == "append"

    def extra(self, alive: Tensor, keep: Tensor) -> Tensor:
        """Return [B]: the number of clusters."""
        return self._numbers(alive - keep)[1]

    def merge(self, hidden: Tensor, kept: Tensor, ctx: PruneContext) -> Merged:
        """Return the kept tokens and the cluster means."""
        dropped = ctx.valid & ~kept
        back, clusters = self._numbers(dropped.sum(dim=1))
        best = dropped & (ranked(scores_of(ctx).masked_fill(~dropped, -torch.inf)) < back.unsqueeze(1))
        index, there = compact(best)
        x = take(self.of(hidden, ctx), index)
        centre = self._centres(Pairs(x, x, self.metric), there, clusters)  # [B, E] among the tokens that came back
        lives = torch.arange(centre.shape[1], device=centre.device) < clusters.unsqueeze(1)
        owner = nearest(Pairs(x, take(x, centre), self.metric), lives)[0]
        own = torch.where(lives, torch.arange(centre.shape[1], device=centre.device), owner.gather(1, centre))
        owner = owner.scatter(1, centre, own)  # a centre is its own, also where it is a copy of another one
        sizes = sizes_of(ctx)
        total, number = totals(take(hidden, index), owner, there, centre.shape[1], take(sizes, index))
        mean = total / torch.where(number > 0, number, 1.0).unsqueeze(2)
        return with_extras(hidden, kept, sizes, (mean, number, index.gather(1, centre), lives), self.place)

    def _centres(self, distance: Pairs, there: Tensor, clusters: Tensor) -> Tensor:
        k = clusters if self.neighbours is None else torch.full_like(clusters, self.neighbours)
        density = knn_density(distance, there, k)
        score = (density * to_denser(distance, density, there)).masked_fill(~there, -torch.inf)
        most = max(int(clusters.max()) if clusters.numel() else 0, 1)
        return score.argsort(dim=1, descending=True, stable=True)[:, :most]


@hookimpl
def register_mergers(register: Callable[[type[Merger]], None]) -> None:
    """Offer this merger."""
    register(Recycle)
