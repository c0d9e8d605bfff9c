"""Tokens unlike a few pivots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import normalize

from tokenprune.hookspecs import hookimpl
from tokenprune.interfaces import PruneContext, Selector, Text
from tokenprune.tokens import Signal

__all__ = ["Pivots", "sweep"]

_Count = Annotated[int, Field(strict=True, ge=0)]
_TOKENS, _WORDS = Signal("hidden", norm=True), Signal("hidden", of="text", norm=True)
_WORD_KEYS = Signal("keys", of="text")


@dataclass(frozen=True)
class Pivots(Selector):
    """A few pivots stay, and then for each pivot in turn the tokens least similar to it (DART, https://arxiv.org/abs/2502.11494).

    image: how many pivots are visual tokens: those with the highest scores of the stage. They stay themselves.
    text: how many pivots are text after the image: those with the largest L1 norm of their keys. They only repel.

    Similarity is the cosine of the states after the decoder's final norm. What the budget leaves beside the image pivots is
    divided evenly over all pivots, one more for the first of them; so the count is exact, and a prompt with fewer text tokens
    than `text` gives their share to the others. Pivots act in the order of the prompt, image pivots first.

    Differs from the authors' code: they visit pivots in the order of a Python set, and the number kept is image pivots +
    pivots x a rounded share. DART's own image pivots are the scores of `hidden_norm` on keys with an L1 norm.
    """

    name: ClassVar[str] = "pivots"

    image: _Count = 4
    text: _Count = 4

    def __post_init__(self) -> None:
        if min(self.image, self.text) < 0 or self.image + self.text < 1:
            raise ValueError(
                f"image and text are numbers of pivots, at least one together; not {self.image} and {self.text}"
            )

    def signals(self) -> tuple[Signal, ...]:
        """Read the normed states; with text pivots also those of the text, and its keys."""
        return (_TOKENS, _WORDS, _WORD_KEYS) if self.text else (_TOKENS,)

    def select(self, scores: Tensor, keep: Tensor, ctx: PruneContext) -> Tensor:
        """Return [B, N] bool."""
        cosine, there, pivots = self.pivots(scores, keep, ctx)
        return sweep(cosine, there, pivots, keep, ctx.valid)

    def pivots(self, scores: Tensor, keep: Tensor, ctx: PruneContext) -> tuple[Tensor, Tensor, Tensor]:
        """Return the cosine [B, P, N] of each pivot to each token, which pivots exist [B, P], and the visual ones [B, N]."""
        tokens = normalize(ctx.read(_TOKENS).float(), dim=-1)
        at, there = _top(scores, ctx.valid, keep.clamp(max=self.image), self.image)
        states = tokens.gather(1, at.unsqueeze(-1).expand(-1, -1, tokens.shape[-1]))
        own = torch.zeros_like(ctx.valid).scatter_(1, at, there)
        if self.text:
            words, word_there = self._text_pivots(ctx)
            states, there = torch.cat([states, words], dim=1), torch.cat([there, word_there], dim=1)
        return states @ tokens.transpose(1, 2), there, own

    def _text_pivots(self, ctx: PruneContext) -> tuple[Tensor, Tensor]:
        """Return the unit states [B, P, D] of the text pivots and which of them exist."""
        words: Text = ctx.read(_WORDS)
        keys: Text = ctx.read(_WORD_KEYS)
        wanted = words.valid & words.after_image
        norms = keys.states.float().abs().flatten(2).sum(dim=-1).masked_fill(~wanted, -torch.inf)
        at, there = _top(norms, wanted, wanted.sum(dim=1), self.text)
        chosen = words.states.float().gather(1, at.unsqueeze(-1).expand(-1, -1, words.states.shape[-1]))
        return normalize(chosen, dim=-1), there


def _top(values: Tensor, valid: Tensor, count: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return the places [B, P] of the `count[b]` largest values in ascending order, P <= most, and which of them exist."""
    best = values.argsort(dim=1, descending=True, stable=True)[:, :most]
    place = torch.arange(best.shape[1], device=best.device)
    there = (place < count.unsqueeze(1)) & valid.gather(1, best)
    order = best.masked_fill(~there, values.shape[1]).argsort(dim=1, stable=True)
    return best.gather(1, order), there.gather(1, order)


def sweep(
    cosine: Tensor, there: Tensor, pivots: Tensor, keep: Tensor, valid: Tensor, order: list[int] | None = None
) -> Tensor:
    """Return [B, N] bool: `pivots`, and for every pivot in turn the tokens least similar to it, `keep[b]` in all.

    cosine: [B, P, N] of each pivot to each token. there: [B, P] which pivots exist. pivots: [B, N] those that stay themselves.
    keep: [B]. order: in which to visit the P pivots, one after another when left out.
    """
    kept = pivots & valid
    left = (keep - kept.sum(dim=1)).clamp(min=0)
    number = there.sum(dim=1)
    share, more = left // number.clamp(min=1), left % number.clamp(min=1)
    visited = torch.zeros_like(number)
    for pivot in range(cosine.shape[1]) if order is None else order:
        exists = there[:, pivot]
        picks = torch.where(exists, share + (visited < more), 0)
        visited = visited + exists
        pool = valid & ~kept
        by_distance = cosine[:, pivot].masked_fill(~pool, torch.inf).argsort(dim=1, stable=True)
        place = torch.arange(valid.shape[1], device=valid.device).expand_as(by_distance)
        rank = torch.empty_like(by_distance).scatter_(1, by_distance, place)
        kept = kept | (pool & (rank < picks.unsqueeze(1)))
    # Without a single pivot there is nobody to be unlike: the first tokens make the count exact.
    short = (keep - kept.sum(dim=1)).unsqueeze(1)
    pool = valid & ~kept
    return kept | (pool & (pool.cumsum(dim=1) <= short))


@hookimpl
def register_selectors(register: Callable[[type[Selector]], None]) -> None:
    """Offer this selector."""
    register(Pivots)
