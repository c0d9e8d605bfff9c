"""The most probable subset of a determinantal point process, found greedily."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from tokenprune.hookspecs import hookimpl
from tokenprune.interfaces import PruneContext
from tokenprune_scorers._greedy import Cosines, Greedy, ranks

_EXHAUSTED = 1e-5
"""A token whose share outside the span of those kept is below this is a copy of them, up to float32 rounding."""


@dataclass(frozen=True)
class DPP(Greedy):
    """High scores that differ: greedy MAP of the kernel r_i cos_ij r_j (CDPruner, https://arxiv.org/abs/2506.10967).

    quality: r is the score scaled to [0, 1] over the tokens (`minmax`), or the `score` itself, negative ones counting as 0.
    plus: added before minmax divides, so that the lowest score keeps a chance.
    relevance_weight: how much r counts: it becomes exp(w / (2 (1 - w)) r), so that 0 looks at diversity alone; null leaves r
        as it is.
    from, centre: site of the features of the cosine, and whether their mean is subtracted first.

    Incremental Cholesky (Chen et al., https://arxiv.org/abs/1709.05135) of the cosines: det of the kernel of S is that of the
    cosines times the product of r^2, so a pick has the highest r_i^2 x variance of i that S does not explain. Tokens that S
    explains fully, and all of them once the rank is exhausted, follow by score; the authors' code divides by the square root of
    rounding noise there. Differs also in that minimum and maximum are those of the row, not of the batch.
    """

    name: ClassVar[str] = "dpp"

    quality: Literal["minmax", "score"] = "minmax"
    plus: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] = 1e-6
    relevance_weight: Annotated[float, Field(strict=True, ge=0, lt=1)] | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.plus) and self.plus >= 0):
            raise ValueError(f"plus is a finite number >= 0, not {self.plus}")
        if self.relevance_weight is not None and not 0 <= self.relevance_weight < 1:
            raise ValueError(f"relevance_weight is in [0, 1), not {self.relevance_weight}")

    def qualities(self, scores: Tensor, valid: Tensor) -> Tensor:
        """Return [B, N] float32: r of every token."""
        quality = min_max(scores, valid, self.plus) if self.quality == "minmax" else scores.clamp(min=0)
        if self.relevance_weight is None:
            return quality
        power = self.relevance_weight / (2 * (1 - self.relevance_weight)) * quality
        return (power - power.amax(dim=1, keepdim=True)).exp()  # a common factor changes no pick, and keeps it finite

    def start(self, scores: Tensor, keep: Tensor, ctx: PruneContext) -> _Cholesky:
        """Return the state before the first pick."""
        quality = self.qualities(scores, ctx.valid)
        highest = quality.amax(dim=1, keepdim=True)
        quality = quality / torch.where(highest > 0, highest, 1.0)
        return _Cholesky(
            Cosines(self.features(ctx)), quality, ranks(scores, ctx.valid), int(keep.max()) if len(keep) else 0
        )


def min_max(scores: Tensor, valid: Tensor, plus: float) -> Tensor:
    """Return [B, N]: (score - lowest + plus) / (highest - lowest) of each row; 1 where all are equal, 0 on padding."""
    low = scores.masked_fill(~valid, torch.inf).amin(dim=1, keepdim=True)
    span = scores.masked_fill(~valid, -torch.inf).amax(dim=1, keepdim=True) - low
    scaled = torch.where(span > 0, (scores - low + plus) / torch.where(span > 0, span, 1.0), 1.0)
    return torch.where(valid, scaled, 0.0)


class _Cholesky:
    """Rows of the Cholesky factor so far, and the variance of every token that they leave."""

    def __init__(self, cosines: Cosines, quality: Tensor, rank: Tensor, steps: int) -> None:
        self.cosines, self.worth, self.rank = cosines, quality.square(), rank
        self.left = cosines.x.any(dim=-1).float()  # exactly 1, so that equal qualities are a tie
        self.factor = quality.new_zeros(len(quality), steps, quality.shape[1])
        self.step = 0

    def gain(self) -> Tensor:
        gain = self.worth * self.left
        return torch.where((self.left > _EXHAUSTED) & (gain > 0), gain, -self.rank)

    def take(self, pick: Tensor) -> None:
        at = pick.unsqueeze(1)
        variance = self.left.gather(1, at)
        before = self.factor[:, : self.step]
        own = before.gather(2, at.unsqueeze(1).expand(-1, self.step, 1))  # [B, t, 1]
        row = self.cosines.to(pick) - (own * before).sum(dim=1)
        new = torch.where(variance > _EXHAUSTED, row / variance.clamp(min=_EXHAUSTED).sqrt(), 0.0)
        self.factor[:, self.step] = new
        self.left = (self.left - new.square()).clamp(min=0)
        self.step += 1


@hookimpl
def register_selectors(register: Callable[[type], None]) -> None:
    """Offer this selector."""
    register(DPP)
