"""Of tokens that stay alike over time, the first stays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from tokenprune.groupings import dense
from tokenprune.hookspecs import hookimpl
from tokenprune.interfaces import Grouping, Number, PruneContext, Selector
from tokenprune.tokens import Signal, Site
from tokenprune_scorers._clusters import ranked
from tokenprune_scorers._video import LAYOUT, Labelled, likeness, places


@dataclass(frozen=True)
class Runs(Selector):
    """Of alike tokens that follow one another at the same row and column, the first stays (FrameFusion, https://arxiv.org/abs/2501.01986).

    alike: `adjacent`: a token leaves when its cosine to the one before it at its position reaches the threshold (FrameFusion);
        `all`: the tokens of a position leave, but for the first, when all those cosines do (HoliTom,
        https://arxiv.org/abs/2505.21334); `mean`: when the mean cosine of all their pairs does (PruneVid,
        https://arxiv.org/abs/2412.16117).
    threshold: the cosine. within: compare inside each group of a grouping, such as `segments`; a clip as a whole by default.
    at_most: the largest share of the tokens that may leave; beyond it the most alike leave. Goes with `adjacent`.
    from: a site to read instead of the stage's own.

    The count follows from the tokens and a stage needs no budget; the merger `temporal_mean` averages what left into the first.
    Differs from the authors' code: the token before is the last one alive at that position, whatever left before.
    """

    name: ClassVar[str] = "runs"
    uses_scores: ClassVar[bool] = False
    counts_itself: ClassVar[bool] = True

    alike: Literal["adjacent", "all", "mean"] = "adjacent"
    threshold: Annotated[float, Field(strict=True, ge=-1, le=1)] = 0.6
    within: Grouping | None = None
    at_most: Number = 1.0
    from_: Annotated[Site | None, Field(alias="from")] = None

    def __post_init__(self) -> None:
        if not -1 <= self.threshold <= 1:
            raise ValueError(f"threshold is a cosine in [-1, 1], not {self.threshold}")
        if isinstance(self.at_most, int | float) and not 0 <= self.at_most <= 1:
            raise ValueError(f"at_most is a share of the tokens, in [0, 1], not {self.at_most}")
        if self.at_most != 1 and self.alike != "adjacent":
            raise ValueError("at_most takes the most alike tokens one by one and goes with alike 'adjacent'")

    @property
    def _hidden(self) -> Signal:
        return Signal("hidden", at=self.from_)

    def signals(self) -> tuple[Signal, ...]:
        """Read the tokens and where they sit."""
        return (self._hidden, LAYOUT)

    def select(self, scores: Tensor, keep: Tensor, ctx: PruneContext) -> Tensor:
        """Return [B, N] bool."""
        hidden = ctx.read(self._hidden)
        group = torch.zeros_like(ctx.ordinal) if self.within is None else self.within.labels(ctx.only(self.within))
        before = places(ctx.layout, ctx.valid).before()
        before = before.masked_fill(group != group.gather(1, before.clamp(min=0)), -1).masked_fill(~ctx.valid, -1)
        if self.alike == "mean":
            return ctx.valid & ~((before >= 0) & self._static(hidden, group, ctx))
        cosine = likeness(hidden, before)
        same = (cosine >= self.threshold) & (before >= 0)
        if self.alike == "all":
            runs = self._positions(group, ctx)
            broken = runs.cut((~same & (before >= 0)).float()) * runs.valid
            whole = (broken.sum(dim=1, keepdim=True) == 0).expand_as(runs.valid)
            return ctx.valid & ~(same & runs.spread(whole))
        share = ctx.number(self.at_most).double().clamp(0, 1)
        most = (ctx.valid.sum(dim=1) * share + 1e-6).floor()  # a share in float32 is not quite the number written
        best = ranked(cosine.masked_fill(before < 0, -torch.inf)) < most.unsqueeze(1)
        return ctx.valid & ~(same & best)

    def _positions(self, group: Tensor, ctx: PruneContext) -> PruneContext:
        at = ctx.layout
        return ctx.grouped(Labelled(dense(ctx.valid, group, at.image, at.row, at.column)))

    def _static(self, hidden: Tensor, group: Tensor, ctx: PruneContext) -> Tensor:
        """Return [B, N] bool: whether the tokens of its position are alike on average over all pairs."""
        runs = self._positions(group, ctx)
        x = torch.nn.functional.normalize(runs.cut(hidden).float(), dim=-1).masked_fill(~runs.valid.unsqueeze(-1), 0.0)
        count = runs.valid.sum(dim=1)
        pairs = x.sum(dim=1).square().sum(dim=-1) - x.square().sum(dim=(1, 2))
        mean = pairs / (count * (count - 1)).clamp(min=1)
        return runs.spread(((mean >= self.threshold) & (count > 1)).unsqueeze(1).expand_as(runs.valid))


@hookimpl
def register_selectors(register: Callable[[type[Selector]], None]) -> None:
    """Offer this selector."""
    register(Runs)
