"""Built-in selectors: which tokens stay, given scores and how many.

All act on [B, N] at once: rank every token of every row, keep the first `keep[b]`. Padding ranks last.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from tokenprune.hookspecs import hookimpl
from tokenprune.interfaces import PruneContext, Selector

__all__ = ["GumbelTopK", "Random", "Stride", "TopK"]


def _first(keys: Tensor, keep: Tensor) -> Tensor:
    """Return [B, N] bool, the `keep[b]` largest keys of each row; equal keys in order of position."""
    order = keys.argsort(dim=1, descending=True, stable=True)
    place = torch.arange(keys.shape[1], device=keys.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(1, order, place)
    return rank < keep.unsqueeze(1)


@dataclass(frozen=True)
class TopK(Selector):
    """The highest scores stay; ties go to the lower position. Deterministic, in float32."""

    name: ClassVar[str] = "topk"

    def select(self, scores: Tensor, keep: Tensor, ctx: PruneContext) -> Tensor:
        """Return [B, N] bool."""
        return _first(scores, keep)


@dataclass(frozen=True)
class GumbelTopK(Selector):
    """Sampling without replacement from softmax(score / temperature), by Gumbel noise (https://arxiv.org/abs/1903.06059).

    Scores are standardised over the valid tokens of the row first (mean 0, variance 1; constant scores become 0), so that
    temperature has no unit. keys = score + temperature * Gumbel(0, 1); the largest stay. Temperature 0 is `topk`, bit for
    bit. The noise is a function of the policy's seed, the stage and the token, so a run repeats exactly.
    """

    name: ClassVar[str] = "gumbel_topk"

    temperature: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature is a finite number >= 0, not {self.temperature}")

    def select(self, scores: Tensor, keep: Tensor, ctx: PruneContext) -> Tensor:
        """Return [B, N] bool."""
        if self.temperature == 0:
            return _first(scores, keep)
        gumbel = -torch.log(-torch.log(ctx.noise(stream=1)))
        keys = _standardised(scores, ctx.valid) + self.temperature * gumbel
        return _first(keys.masked_fill(~ctx.valid, -torch.inf), keep)


def _standardised(scores: Tensor, valid: Tensor) -> Tensor:
    """Return (score - mean) / standard deviation over the valid tokens of each row; 0 where all are equal."""
    count = valid.sum(dim=1, keepdim=True).clamp(min=1)
    centred = torch.where(valid, scores, 0.0)
    centred = torch.where(valid, centred - centred.sum(dim=1, keepdim=True) / count, 0.0)
    deviation = (centred.square().sum(dim=1, keepdim=True) / count).sqrt()
    return torch.where(deviation > 0, centred / deviation, 0.0)


@dataclass(frozen=True)
class Random(Selector):
    """A uniformly random set stays; scores are not used. The policy's seed fixes it."""

    name: ClassVar[str] = "random"
    uses_scores: ClassVar[bool] = False

    def select(self, scores: Tensor, keep: Tensor, ctx: PruneContext) -> Tensor:
        """Return [B, N] bool."""
        return _first(ctx.noise(stream=2).masked_fill(~ctx.valid, -1.0), keep)


@dataclass(frozen=True)
class Stride(Selector):
    """Evenly spaced tokens stay: of n, those at floor((i + 1/2) n / k) for i < k; scores are not used."""

    name: ClassVar[str] = "stride"
    uses_scores: ClassVar[bool] = False

    def select(self, scores: Tensor, keep: Tensor, ctx: PruneContext) -> Tensor:
        """Return [B, N] bool."""
        # Position j is taken when some i falls in it: the number of (2i + 1) n < 2 k (j + 1) grows from j - 1 to j.
        n = ctx.valid.sum(dim=1, keepdim=True)
        k = keep.unsqueeze(1)
        edge = torch.arange(ctx.valid.shape[1] + 1, device=keep.device)
        taken_before = (torch.div(2 * k * edge - 1, n.clamp(min=1), rounding_mode="floor") + 1) // 2
        return (taken_before[:, 1:] > taken_before[:, :-1]) & ctx.valid


@hookimpl
def register_selectors(register: Callable[[type[Selector]], None]) -> None:
    """Offer the built-in selectors."""
    for selector in (TopK, GumbelTopK, Random, Stride):
        register(selector)
