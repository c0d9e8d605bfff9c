"""How close a token's neighbours are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from tokenprune.hookspecs import hookimpl
from tokenprune.interfaces import Grouping, PruneContext, Scorer
from tokenprune_scorers import _clusters
from tokenprune_scorers._clusters import Pairs, to_denser


@dataclass(frozen=True)
class Density(_clusters.Density, Scorer):
    """Keep tokens with close neighbours: density of DPC-kNN (https://doi.org/10.1016/j.knosys.2016.02.001), or of a Gaussian.

    neighbours: k; density is exp(-mean squared distance to the k nearest tokens, itself included). bandwidth: takes the sum of
        exp(-(distance / bandwidth)^2) over all tokens instead. metric: `euclidean` distance / sqrt(width), or `cosine`.
    peaks: multiply by the distance to the nearest denser token, so that one token per cluster ranks high.
    over: groups (`frame` ...) that are looked at apart. features, heads, layer, from: what is compared.
    """

    name: ClassVar[str] = "density"

    peaks: Annotated[bool, Field(strict=True)] = False
    over: Grouping | None = None

    def score(self, ctx: PruneContext) -> Tensor:
        """Return [B, N] float32."""
        inside = ctx if self.over is None else ctx.grouped(self.over)
        x = self.compared(inside)
        distance = Pairs(x, x, self.metric)
        density = self.density(distance, inside.valid)
        score = density * to_denser(distance, density, inside.valid) if self.peaks else density
        return score if inside is ctx else inside.spread(score)


@hookimpl
def register_scorers(register: Callable[[type], None]) -> None:
    """Offer this scorer."""
    register(Density)
