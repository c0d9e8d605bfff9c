"""All dropped tokens go into one kept token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tokenprune.hookspecs import hookimpl
from tokenprune.interfaces import Merged, Merger, PruneContext
from tokenprune_scorers._clusters import put, ranked, scores_of, sizes_of


@dataclass(frozen=True)
class RankWeighted(Merger):
    """The lowest kept token becomes the mean of itself and all dropped ones, weighted by rank (iLLaVA, https://arxiv.org/abs/2412.06263).

    Of r dropped tokens and the kept token that ranks lowest, the best by score has weight r + 1, the next r, down to 1.

    compat: `official` gives the weights in the opposite order, 1 to the kept token and r + 1 to the least important one, as
        the authors' code does against its own comment.
    """

    name: ClassVar[str] = "rank_weighted"

    compat: Literal["clean", "official"] = "clean"

    def merge(self, hidden: Tensor, kept: Tensor, ctx: PruneContext) -> Merged:
        """Return the states with the one token changed."""
        scores = scores_of(ctx)
        last = kept & (ranked(scores.masked_fill(~kept, -torch.inf)) == kept.sum(dim=1, keepdim=True) - 1)
        dropped = ctx.valid & ~kept
        joined = (dropped | last) & last.any(dim=1, keepdim=True)
        # Whatever the selector did, the kept token ranks before the dropped ones.
        rank = torch.where(last, 0, ranked(scores.masked_fill(~dropped, -torch.inf)) + 1)
        weight = (rank + 1 if self.compat == "official" else joined.sum(dim=1, keepdim=True) - rank) * joined
        total = weight.float().unsqueeze(1) @ hidden.float().masked_fill(~joined.unsqueeze(2), 0.0)
        mean = total / weight.sum(dim=1).clamp(min=1)[:, None, None]
        there = last.any(dim=1, keepdim=True)
        index = last.long().argmax(dim=1, keepdim=True)
        sizes = sizes_of(ctx)
        number = torch.where(joined, sizes, 0.0).sum(dim=1, keepdim=True)
        changed = there & dropped.any(dim=1, keepdim=True)  # with nothing to take in the token stays bit for bit
        return Merged(put(hidden, index, changed, mean), kept, put(sizes, index, there, number))


@hookimpl
def register_mergers(register: Callable[[type[Merger]], None]) -> None:
    """Offer this merger."""
    register(RankWeighted)
