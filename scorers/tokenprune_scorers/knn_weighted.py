"""Kept tokens take in a weighted sum of their neighbours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from tokenprune.hookspecs import hookimpl
from tokenprune.interfaces import Merged, Merger, PruneContext
from tokenprune_scorers._clusters import MergedFeatures, compact, distances, put, ranked, scores_of, take


@dataclass(frozen=True)
class KnnWeighted(Merger, MergedFeatures):
    """Each kept token gets the sum of its nearest neighbours, weighted by score (PruMerge, https://arxiv.org/abs/2403.15388).

    x_i + sum over the neighbours j of w_j x_j, where w is the raw score of the stage (1 where it has none). Neighbours are
    looked for among all tokens but i itself, other kept ones too, so a token may go into several kept ones or into none.

    neighbours: how many each kept token takes in. features, heads, layer, from, metric: what is compared, and how.

    Differs from the authors' code: rows with fewer than 33 tokens work, with the neighbours there are.
    """

    name: ClassVar[str] = "knn_weighted"

    neighbours: Annotated[int, Field(strict=True, ge=1)] = 32

    def __post_init__(self) -> None:
        if self.neighbours < 1:
            raise ValueError(f"neighbours is a number of tokens >= 1, not {self.neighbours}")

    def merge(self, hidden: Tensor, kept: Tensor, ctx: PruneContext) -> Merged:
        """Return the kept tokens with the sums added."""
        index, there = compact(kept)
        x = self.of(hidden, ctx)
        itself = index.unsqueeze(2) == torch.arange(kept.shape[1], device=kept.device)
        able = ctx.valid.unsqueeze(1) & ~itself
        closeness = (-distances(take(x, index), x, self.metric)).masked_fill(~able, -torch.inf)
        near = (ranked(closeness.flatten(0, 1)).view_as(closeness) < self.neighbours) & able
        weight = torch.where(ctx.valid, 1.0 if ctx.scores is None else scores_of(ctx), 0.0)
        taken = (near * weight.unsqueeze(1)) @ hidden.float().masked_fill(~ctx.valid.unsqueeze(2), 0.0)
        return Merged(put(hidden, index, there, take(hidden, index).float() + taken), kept)


@hookimpl
def register_mergers(register: Callable[[type[Merger]], None]) -> None:
    """Offer this merger."""
    register(KnnWeighted)
