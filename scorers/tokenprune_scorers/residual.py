"""One more token for everything that leaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tokenprune.hookspecs import hookimpl
from tokenprune.interfaces import Merged, Merger, PruneContext
from tokenprune_scorers._clusters import Place, scores_of, sizes_of, with_extras


@dataclass(frozen=True)
class Residual(Merger):
    """One extra token beside the kept ones holds all that were dropped (PruMerge, https://arxiv.org/abs/2403.15388; TRIM, https://arxiv.org/abs/2409.10994).

    weights: dropped tokens count `equal`, or by `score`, raw as the stage gives it. reduce: their weighted `mean` or `sum`;
        TRIM takes the plain mean, PruMerge the sum weighted by attention.
    place: `in_order` puts it at the place of the last dropped token; `append` after the kept tokens, which move up to the
        first places of the row (as the authors' code; meant for a site before the decoder, or with `positions: renumber`).

    Where nothing is dropped there is no extra token.
    """

    name: ClassVar[str] = "residual"

    weights: Literal["equal", "score"] = "equal"
    reduce: Literal["mean", "sum"] = "mean"
    place: Place = "in_order"

    @property
    def moves_states(self) -> bool:
        """Whether the extra tokens go to the end, and the kept ones to the first places."""
        return self.place == "append"

    def extra(self, alive: Tensor, keep: Tensor) -> Tensor:
        """Return [B]: one where anything is dropped."""
        return (alive > keep).long()

    def merge(self, hidden: Tensor, kept: Tensor, ctx: PruneContext) -> Merged:
        """Return the kept tokens and the extra one."""
        dropped = ctx.valid & ~kept
        there = dropped.any(dim=1, keepdim=True)
        weight = torch.where(
            dropped, scores_of(ctx) if self.weights == "score" and ctx.scores is not None else 1.0, 0.0
        )
        total = weight.unsqueeze(1) @ hidden.float().masked_fill(~dropped.unsqueeze(2), 0.0)  # [B, 1, D]
        if self.reduce == "mean":
            mass = weight.sum(dim=1)[:, None, None]
            total = total / torch.where(mass != 0, mass, 1.0)
        sizes = sizes_of(ctx)
        number = torch.where(dropped, sizes, 0.0).sum(dim=1, keepdim=True)
        place = torch.arange(kept.shape[1], device=kept.device).expand_as(kept)
        last = place.masked_fill(~dropped, 0).amax(dim=1, keepdim=True)
        return with_extras(hidden, kept, sizes, (total, number, last, there), self.place)


@hookimpl
def register_mergers(register: Callable[[type[Merger]], None]) -> None:
    """Offer this merger."""
    register(Residual)
