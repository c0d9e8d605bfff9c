"""Maximal marginal relevance: a high score, and little like those kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from tokenprune.hookspecs import hookimpl
from tokenprune.interfaces import PruneContext
from tokenprune_scorers._greedy import Cosines, Greedy
from tokenprune_scorers._rows import minmax, whole


@dataclass(frozen=True)
class MMR(Greedy):
    """The highest lambda x score - (1 - lambda) x highest cosine to a kept token (MMR, https://doi.org/10.1145/290941.291025).

    lambda: 1 is the order of scores, 0 looks at similarity alone. The first token has the highest score.
    normalise: the score is scaled to [0, 1] over the tokens first (`minmax`), or taken as it is (`none`).
    from, centre: site of the features of the cosine, and whether their mean is subtracted first.
    """

    name: ClassVar[str] = "mmr"

    lambda_: Annotated[float, Field(alias="lambda", strict=True, ge=0, le=1)] = 0.5
    normalise: Literal["minmax", "none"] = "minmax"

    def __post_init__(self) -> None:
        if not 0 <= self.lambda_ <= 1:
            raise ValueError(f"lambda is in [0, 1], not {self.lambda_}")

    def start(self, scores: Tensor, keep: Tensor, ctx: PruneContext) -> _Relevance:
        """Return the state before the first pick."""
        score = minmax(scores, ctx.valid) if self.normalise == "minmax" else whole(scores, ctx.valid)
        return _Relevance(Cosines(self.features(ctx)), score, self.lambda_)


class _Relevance:
    """The highest cosine of every token to one kept."""

    def __init__(self, cosines: Cosines, score: Tensor, weight: float) -> None:
        self.cosines, self.score, self.weight = cosines, score, weight
        self.nearest: Tensor | None = None

    def gain(self) -> Tensor:
        if self.nearest is None:  # with lambda 0 too, something has to come first
            return self.score
        return self.weight * self.score - (1 - self.weight) * self.nearest

    def take(self, pick: Tensor) -> None:
        cosine = self.cosines.to(pick)
        self.nearest = cosine if self.nearest is None else torch.maximum(self.nearest, cosine)


@hookimpl
def register_selectors(register: Callable[[type], None]) -> None:
    """Offer this selector."""
    register(MMR)
