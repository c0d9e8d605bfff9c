"""Several scores made into one: a weighted sum, a product of powers, or a sum of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tokenprune.hookspecs import hookimpl
from tokenprune.interfaces import Grouping, Number, Options, PruneContext, Scorer
from tokenprune_scorers._rows import mean_size, minmax, places, standardised, to_sum, whole
from tokenprune_scorers.random import Random
from tokenprune_scorers.uniform import Uniform

__all__ = ["Blend", "Factor", "Product", "RankFusion", "Ranked", "Term"]

Normalise = Literal["none", "minmax", "sum", "zscore", "softmax", "rank", "max", "scale_to_mean"]


@dataclass(frozen=True)
class Term(Options):
    """One scorer of a sum, brought to a common scale and weighted; a negative weight prefers its low scores."""

    scorer: Scorer
    weight: Number = 1.0
    normalise: Normalise = "none"


@dataclass(frozen=True)
class Factor(Options):
    """One scorer of a product, brought to a common scale and raised to a power."""

    scorer: Scorer
    power: Number = 1.0
    normalise: Normalise = "none"


@dataclass(frozen=True)
class Ranked(Options):
    """One scorer of a rank fusion."""

    scorer: Scorer
    weight: Number = 1.0


@dataclass(frozen=True)
class Blend(Scorer):
    """Keep the tokens with the highest weighted sum of several scores (HoloV, FlowCut: https://arxiv.org/abs/2510.02912).

    parts: each a `scorer`, a `weight` (a negative one prefers low scores) and `normalise`, what is done to its scores first:
        `none`, `minmax` to [0, 1], `sum` (divided by the sum of absolute values), `zscore`, `softmax`, `rank` (how many
        tokens it is ahead of, ties to the lower index), `max` (divided by the largest absolute value), `scale_to_mean`
        (scaled to the mean absolute value of the first part, as that one is after its own normalisation).
    scope: normalise, and compute weights, inside each group of a grouping instead of the whole prompt.

    score = sum of weight x normalised score, in float32. A part that is constant counts 0 under minmax and zscore.
    """

    name: ClassVar[str] = "blend"

    parts: tuple[Term, ...]
    scope: Grouping | None = None

    def __post_init__(self) -> None:
        _some(self.parts)

    @classmethod
    def example(cls) -> Blend:
        """Return a sum of the two scorers that read nothing."""
        return cls((Term(Uniform(), 1.0, "minmax"), Term(Random(), -0.5, "zscore")))

    def score(self, ctx: PruneContext) -> Tensor:
        """Return [B, N] float32."""
        inside = ctx if self.scope is None else ctx.grouped(self.scope)
        total = torch.zeros(inside.valid.shape, device=inside.valid.device)
        size: Tensor | None = None
        for part in self.parts:
            x, size = _scores(part, inside, size)
            total = total + inside.number(part.weight).unsqueeze(1) * x
        return total if self.scope is None else inside.spread(total)


@dataclass(frozen=True)
class Product(Scorer):
    """Keep the tokens with the highest product of several scores (FitPrune, PACT: https://arxiv.org/abs/2504.08966).

    parts: each a `scorer`, a `power` and `normalise`, as in `blend`.
    scope: normalise, and compute powers, inside each group of a grouping instead of the whole prompt.

    score = product of normalised score ^ power, in float32. The product of two negative numbers would rank high, so a
    negative score counts as 0; what overflows is the largest finite number.
    """

    name: ClassVar[str] = "product"

    parts: tuple[Factor, ...]
    scope: Grouping | None = None

    def __post_init__(self) -> None:
        _some(self.parts)

    @classmethod
    def example(cls) -> Product:
        """Return a product of the two scorers that read nothing."""
        return cls((Factor(Uniform()), Factor(Random(), 0.5)))

    def score(self, ctx: PruneContext) -> Tensor:
        """Return [B, N] float32."""
        inside = ctx if self.scope is None else ctx.grouped(self.scope)
        total = torch.ones(inside.valid.shape, device=inside.valid.device)
        size: Tensor | None = None
        for part in self.parts:
            x, size = _scores(part, inside, size)
            total = total * x.clamp(min=0).pow(inside.number(part.power).unsqueeze(1))
        total = whole(total.nan_to_num(0.0), inside.valid)
        return total if self.scope is None else inside.spread(total)


@dataclass(frozen=True)
class RankFusion(Scorer):
    """Keep the tokens ranked high by several scorers: weighted Borda count (TokenCarve, https://arxiv.org/abs/2503.10501).

    parts: each a `scorer` and a `weight`.

    score = sum of weight x (n - place), places from 0 by descending score, ties to the lower index. Equal sums are common;
    they too go to the lower index, where the authors' top-k leaves them open.
    """

    name: ClassVar[str] = "rank_fusion"

    parts: tuple[Ranked, ...]

    def __post_init__(self) -> None:
        _some(self.parts)

    @classmethod
    def example(cls) -> RankFusion:
        """Return a fusion of the two scorers that read nothing."""
        return cls((Ranked(Uniform(), 0.5), Ranked(Random(), 0.5)))

    def score(self, ctx: PruneContext) -> Tensor:
        """Return [B, N] float32."""
        total = torch.zeros(ctx.valid.shape, device=ctx.valid.device)
        count = ctx.valid.sum(dim=1, keepdim=True)
        for part in self.parts:
            points = count - places(ctx.score(part.scorer), ctx.valid)
            total = total + ctx.number(part.weight).unsqueeze(1) * points
        return total


def _some(parts: tuple[object, ...]) -> None:
    if not parts:
        raise ValueError("parts names at least one scorer")


def _scores(part: Term | Factor, ctx: PruneContext, size: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the normalised scores of a part, 0 on padding, and the mean absolute value of the first part."""
    x = whole(ctx.score(part.scorer), ctx.valid)
    x = x if part.normalise == "none" else whole(_NORMALISE[part.normalise](x, ctx.valid, size), ctx.valid)
    return x, mean_size(x, ctx.valid) if size is None else size


def _softmax(x: Tensor, valid: Tensor, _: Tensor | None) -> Tensor:
    return x.masked_fill(~valid, torch.finfo(x.dtype).min).softmax(dim=1)


def _ahead(x: Tensor, valid: Tensor, _: Tensor | None) -> Tensor:
    return (valid.sum(dim=1, keepdim=True) - 1 - places(x, valid)).float()


def _over(x: Tensor, size: Tensor) -> Tensor:
    return x / torch.where(size > 0, size, 1.0)


def _to_mean(x: Tensor, valid: Tensor, size: Tensor | None) -> Tensor:
    return x if size is None else _over(x, mean_size(x, valid)) * size


_NORMALISE: dict[str, Callable[[Tensor, Tensor, Tensor | None], Tensor]] = {
    "minmax": lambda x, valid, _: minmax(x, valid),
    "sum": lambda x, valid, _: to_sum(x, valid),
    "zscore": lambda x, valid, _: standardised(x, valid),
    "softmax": _softmax,
    "rank": _ahead,
    "max": lambda x, valid, _: _over(x, x.abs().amax(dim=1, keepdim=True)),
    "scale_to_mean": _to_mean,
}


@hookimpl
def register_scorers(register: Callable[[type], None]) -> None:
    """Offer these scorers."""
    for scorer in (Blend, Product, RankFusion):
        register(scorer)
