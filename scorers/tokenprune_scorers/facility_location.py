"""Tokens that together stand for all tokens."""

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


@dataclass(frozen=True)
class FacilityLocation(Greedy):
    """The token that adds most coverage of all tokens, times its score (SCOPE, https://arxiv.org/abs/2510.24214).

    A token u is covered by the highest cosine to a kept one, from 0 up; keeping v adds the sum over u of max(0, cos_uv -
    covered_u).

    power: the score counts as score^power; 0 looks at coverage alone. Scores below 0 count as 0.
    combine: that factor is `multiply`d with the coverage or `add`ed to it.
    from, centre: site of the features, and whether their mean is subtracted first.

    When nothing adds coverage any more, the rest follows by score (in the authors' code, by position).
    """

    name: ClassVar[str] = "facility_location"

    power: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] = 1.0
    combine: Literal["multiply", "add"] = "multiply"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.power) and self.power >= 0):
            raise ValueError(f"power is a finite number >= 0, not {self.power}")

    def start(self, scores: Tensor, keep: Tensor, ctx: PruneContext) -> _Coverage:
        """Return the state before the first pick."""
        factor = scores.clamp(min=0).pow(self.power)
        return _Coverage(Cosines(self.features(ctx)), factor, ranks(scores, ctx.valid), self.combine == "add")


class _Coverage:
    """How well every token is covered by those kept."""

    def __init__(self, cosines: Cosines, factor: Tensor, rank: Tensor, add: bool) -> None:
        self.cosines, self.factor, self.rank, self.add = cosines, factor, rank, add
        self.covered = torch.zeros_like(factor)

    def gain(self) -> Tensor:
        parts = [(part - self.covered.unsqueeze(1)).relu_().sum(dim=2) for _, part in self.cosines.blocks()]
        coverage = torch.cat(parts, dim=1)
        gain = coverage + self.factor if self.add else coverage * self.factor
        return torch.where(gain > 0, gain, -self.rank)

    def take(self, pick: Tensor) -> None:
        self.covered = torch.maximum(self.covered, self.cosines.to(pick))


@hookimpl
def register_selectors(register: Callable[[type], None]) -> None:
    """Offer this selector."""
    register(FacilityLocation)
