"""Tokens that leave are averaged into an earlier one at the same position."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from tokenprune.hookspecs import hookimpl
from tokenprune.interfaces import Merged, Merger, PruneContext
from tokenprune.tokens import Signal
from tokenprune_scorers._clusters import put, sizes_of, take
from tokenprune_scorers._video import LAYOUT, places


@dataclass(frozen=True)
class TemporalMean(Merger):
    """Each kept token becomes the mean of itself and what left after it at its row and column (FrameFusion, https://arxiv.org/abs/2501.01986).

    weighted: a token counts as often as the tokens it stands for; by default all count once, as in FrameFusion's code.

    A run goes from a kept token to the next kept one at that position of the clip. What left before the first is gone.
    """

    name: ClassVar[str] = "temporal_mean"

    weighted: Annotated[bool, Field(strict=True)] = False

    def signals(self) -> tuple[Signal, ...]:
        """Read where tokens sit."""
        return (LAYOUT,)

    def merge(self, hidden: Tensor, kept: Tensor, ctx: PruneContext) -> Merged:
        """Return the means at the places of the kept tokens."""
        sizes = sizes_of(ctx)
        if hidden.shape[1] == 0:
            return Merged(hidden, kept, sizes)
        by_place = places(ctx.layout, ctx.valid)
        order, stays = by_place.order, kept.gather(1, by_place.order)
        starts = stays | by_place.starts
        count = sizes.masked_fill(~ctx.valid, 0.0) if self.weighted else ctx.valid.float()
        states = hidden.float().masked_fill(~ctx.valid.unsqueeze(-1), 0.0) * count.unsqueeze(-1)
        total, count, number = (
            _sums(take(x, order), starts) for x in (states, count.unsqueeze(-1), sizes.unsqueeze(-1))
        )
        mean = put(hidden, order, stays, total / count.clamp(min=1))
        return Merged(mean, kept, put(sizes, order, stays, number.squeeze(-1)))


def _sums(x: Tensor, starts: Tensor) -> Tensor:
    """Return [B, N, D]: at every place the sum of the run of places that begins there (no use elsewhere).

    Sums run in order, unlike those of a scatter on a GPU, so that a run of the program repeats exactly.
    """
    first = starts.flatten().nonzero().squeeze(1)
    lengths = first.diff(append=first.new_tensor([starts.numel()]))
    sums = torch.segment_reduce(x.flatten(0, 1), "sum", lengths=lengths, axis=0)
    return torch.zeros_like(x).flatten(0, 1).index_copy(0, first, sums).view_as(x)


@hookimpl
def register_mergers(register: Callable[[type[Merger]], None]) -> None:
    """Offer this merger."""
    register(TemporalMean)
