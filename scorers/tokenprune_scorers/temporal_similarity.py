"""How much a token of a clip differs from an earlier token at the same position."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from tokenprune.hookspecs import hookimpl
from tokenprune.interfaces import PruneContext, Scorer, Statistic
from tokenprune.tokens import Signal, Site
from tokenprune_scorers._video import LAYOUT, likeness, places


@dataclass(frozen=True)
class TemporalSimilarity(Scorer):
    """Keep what changed: 1 - cosine to an earlier token at the same row and column (EVS, https://arxiv.org/abs/2510.14624).

    reference: which earlier token: the `previous` one at that position (in the frame before, unless it has left), the one in
        the `first` frame of its group of frames, or `pairs` (DyCoke, https://arxiv.org/abs/2411.15024): in a group, frame 1 is
        compared with 0, 3 with 2, then 2 with 0, so that every frame has one reference and half of them are references.
    lag: how many tokens back the previous one is. frames: size of a group of frames for `first` and `pairs`.
    first: score of a token that has no reference, such as those of the first frame; EVS keeps that frame whole.
    keep: what scores high: `changed` tokens (1 - cosine) or `similar` ones (cosine; `first` then counts negative).
    from: a site to read instead of the stage's own.
    compat: `official` repeats two accidents of DyCoke's code with `pairs`: frame 2 of the last group has no reference (the
        loop over groups ends one early), and the last frame of an odd number scores -first (it is lost there).

    Differs from the authors' code: tokens meet by row, column and frame, so earlier pruning does no harm.
    """

    name: ClassVar[str] = "temporal_similarity"

    reference: Literal["previous", "first", "pairs"] = "previous"
    lag: Annotated[int, Field(strict=True, ge=1)] = 1
    frames: Annotated[int, Field(strict=True, ge=2)] = 4
    first: Annotated[float, Field(strict=True, allow_inf_nan=False)] = 255.0
    keep: Literal["changed", "similar"] = "changed"
    from_: Annotated[Site | None, Field(alias="from")] = None
    compat: Literal["clean", "official"] = "clean"

    def __post_init__(self) -> None:
        if not math.isfinite(self.first):
            raise ValueError(f"first is a finite score, not {self.first}")
        if self.lag != 1 and self.reference != "previous":
            raise ValueError(f"lag counts from the previous token and does not go with reference {self.reference!r}")
        if self.compat == "official" and self.reference != "pairs":
            raise ValueError("compat: official concerns reference 'pairs' only")

    @property
    def _hidden(self) -> Signal:
        return Signal("hidden", at=self.from_)

    def signals(self) -> tuple[Signal, ...]:
        """Read the tokens and where they sit."""
        return (self._hidden, LAYOUT)

    def score(self, ctx: PruneContext) -> Tensor:
        """Return [B, N] float32."""
        at = ctx.layout
        by_place = places(at, ctx.valid)
        in_group = at.frame % self.frames
        if self.reference == "previous":
            other = by_place.before(self.lag)
        elif self.reference == "first":
            other = by_place.at(at.frame - in_group).masked_fill(in_group == 0, -1)
        else:  # the number of the frame in its group without its lowest bit
            other = by_place.at(at.frame - (in_group & -in_group)).masked_fill(in_group == 0, -1)
        if self.compat == "official":
            # The third frame of a window is reduced while its window starts before F - 4.
            other = other.masked_fill((in_group == 2) & (at.frame - in_group >= at.frames - self.frames), -1)
        cosine = likeness(ctx.read(self._hidden), other)
        score = torch.where(other < 0, self.first, 1 - cosine)
        if self.compat == "official":
            lost = (at.frames % 2 == 1) & (at.frame == at.frames - 1)
            score = score.masked_fill(lost, -self.first)
        return score if self.keep == "changed" else torch.where(other < 0, -score, cosine)


@dataclass(frozen=True)
class MeanScore(Statistic):
    """Mean of a scorer's scores over the tokens, or the share of tokens with a high one; lets a budget depend on them.

    scorer: whose scores. above: give the share of tokens that score higher than this instead. With `temporal_similarity` it
    tells which frames have no reference (DyCoke keeps those whole), or the share of the first frame (the least EVS keeps).
    """

    name: ClassVar[str] = "mean_score"

    scorer: Scorer
    above: Annotated[float, Field(strict=True, allow_inf_nan=False)] | None = None

    @classmethod
    def example(cls) -> MeanScore:
        """Return the share of tokens in the first frame."""
        return cls(TemporalSimilarity(), above=254.0)

    def compute(self, ctx: PruneContext) -> Tensor:
        """Return [B] float32; 0 for a row without tokens."""
        scores = ctx.score(self.scorer).masked_fill(~ctx.valid, 0.0)
        if self.above is not None:
            scores = ((scores > self.above) & ctx.valid).float()
        return scores.sum(dim=1) / ctx.valid.sum(dim=1).clamp(min=1)


@hookimpl
def register_scorers(register: Callable[[type], None]) -> None:
    """Offer this scorer."""
    register(TemporalSimilarity)


@hookimpl
def register_statistics(register: Callable[[type], None]) -> None:
    """Offer this statistic."""
    register(MeanScore)
