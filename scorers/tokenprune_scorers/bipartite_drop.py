"""Tokens leave a few at a time: those most like another token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from tokenprune.hookspecs import hookimpl
from tokenprune.interfaces import PruneContext
from tokenprune_scorers._greedy import Compared, Cosines


@dataclass(frozen=True)
class BipartiteDrop(Compared):
    """What is left when the most similar half-by-half pairs have lost a token, round by round (VisPruner, https://arxiv.org/abs/2412.01818).

    The tokens stand in a list by descending score. In a round every token at an even place (0, 2, ..) is given its highest
    cosine to one at an odd place, and the `step` highest of them leave; the list goes on with the even ones that stay, by
    descending cosine, and the odd ones after them.

    step: how many tokens leave in a round; the last round takes fewer, and none takes more than the even places hold.
    from, centre: site of the features, and whether their mean is subtracted first.

    The order of the list decides who is even in the next round, so it is that of the authors' code. Their code fails on a list
    of odd length and when a round would take more than half of it; here an odd list has one even place more, and equal cosines
    keep the order of the list.
    """

    name: ClassVar[str] = "bipartite_drop"

    step: Annotated[int, Field(strict=True, ge=1)] = 8

    def __post_init__(self) -> None:
        if self.step < 1:
            raise ValueError(f"step is a number of tokens >= 1, not {self.step}")

    def select(self, scores: Tensor, keep: Tensor, ctx: PruneContext) -> Tensor:
        """Return [B, N] bool."""
        cosines = Cosines(self.features(ctx))
        order = scores.masked_fill(~ctx.valid, -torch.inf).argsort(dim=1, descending=True, stable=True)
        length = ctx.valid.sum(dim=1)
        for longest, leaving in self._rounds(length, keep):
            order = _round(order[:, :longest], length, leaving, cosines)
            length = length - leaving
        stays = torch.arange(order.shape[1], device=keep.device) < length.unsqueeze(1)
        return torch.zeros_like(ctx.valid).scatter(1, order, stays)

    def _rounds(self, length: Tensor, keep: Tensor) -> list[tuple[int, Tensor]]:
        """Return, per round, the length of the longest list before it and how many tokens [B] leave each."""
        lists, wanted, rounds = length.tolist(), keep.tolist(), []
        while lists != wanted:
            leaving = [min(self.step, n - k, (n + 1) // 2) for n, k in zip(lists, wanted, strict=True)]
            rounds.append((max(lists), leaving))
            lists = [n - gone for n, gone in zip(lists, leaving, strict=True)]
        counts = torch.tensor([leaving for _, leaving in rounds], device=keep.device).view(len(rounds), len(keep))
        return [(longest, counts[number]) for number, (longest, _) in enumerate(rounds)]


def _round(order: Tensor, length: Tensor, leaving: Tensor, cosines: Cosines) -> Tensor:
    """Return the lists [B, L] after a round in which `leaving[b]` of the first `length[b]` tokens leave.

    What follows the tokens that stay is of no meaning.
    """
    even, odd = order[:, 0::2], order[:, 1::2]
    place = torch.arange(even.shape[1], device=order.device)
    here, there = place < (length.unsqueeze(1) + 1) // 2, place[: odd.shape[1]] < length.unsqueeze(1) // 2
    # -2 is below every cosine: an even token alone in its list has no odd one, and still ranks before what is no token.
    cosine = cosines.among(even, odd).masked_fill(~there.unsqueeze(1), -2.0)
    nearest = torch.nn.functional.pad(cosine, (0, 1), value=-2.0).amax(dim=2).masked_fill(~here, -torch.inf)
    by_cosine = even.gather(1, nearest.argsort(dim=1, descending=True, stable=True))
    gone = torch.cat([~here | (place < leaving.unsqueeze(1)), ~there], dim=1)
    after = torch.cat([by_cosine, odd], dim=1).gather(1, gone.to(torch.uint8).argsort(dim=1, stable=True))
    return torch.where((leaving > 0).unsqueeze(1), after, order)  # a list that is short enough keeps its order


@hookimpl
def register_selectors(register: Callable[[type], None]) -> None:
    """Offer this selector."""
    register(BipartiteDrop)
