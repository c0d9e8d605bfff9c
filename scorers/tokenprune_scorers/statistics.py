"""Numbers about the tokens of a row that a policy may compute with."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from tokenprune.hookspecs import hookimpl
from tokenprune.interfaces import Attention as Rows
from tokenprune.interfaces import Grouping, PruneContext, Scorer, Statistic
from tokenprune.tokens import Signal, Site
from tokenprune_scorers._rows import quantile, to_sum, whole
from tokenprune_scorers.attention import Attention, raters

__all__ = ["Count", "EffectiveRank", "Entropy", "MatrixRank", "MeanSimilarity", "OutlierRatio"]

_From = Annotated[Site | None, Field(alias="from")]
_Switch = Annotated[bool, Field(strict=True)]


@dataclass(frozen=True)
class EffectiveRank(Statistic):
    """Effective rank of the token matrix: exp of the entropy of its spectrum (AgilePruner, https://arxiv.org/abs/2603.01236).

    centre: subtract the mean token first. l2: divide each token by its norm before that.
    spectrum: entropy of the `singular` values, or of the `eigenvalue`s of the covariance (their squares).
    max_tokens: of longer rows, this many evenly spaced tokens are used. from: a site to read the tokens from.

    p = s / sum s, erank = exp(-sum p ln p); 1 for a row of equal tokens. Between 1 and min(n - 1, D) when centred. Computed
    from the smaller Gram matrix in float64, which agrees with a float64 SVD; the authors take eigenvalues of the n x n matrix
    in float32 and let null ones count, which adds 0.01 to 2 %.
    """

    name: ClassVar[str] = "erank"

    centre: _Switch = True
    l2: _Switch = False
    spectrum: Literal["singular", "eigenvalue"] = "singular"
    max_tokens: Annotated[int, Field(strict=True, ge=2)] = 2048
    from_: _From = None

    def signals(self) -> tuple[Signal, ...]:
        """Read the tokens."""
        return (Signal("hidden", at=self.from_),)

    def compute(self, ctx: PruneContext) -> Tensor:
        """Return [B] float32."""
        x, valid = _spaced(ctx.hidden, ctx.valid, self.max_tokens)
        x = whole(x.double(), valid.unsqueeze(-1))
        if self.l2:
            x = x / x.norm(dim=-1, keepdim=True).clamp(min=1e-12)
        if self.centre:
            count = valid.sum(dim=1).clamp(min=1)[:, None, None]
            x = whole(x - x.sum(dim=1, keepdim=True) / count, valid.unsqueeze(-1))
        gram = x @ x.mT if x.shape[1] <= x.shape[2] else x.mT @ x
        power = torch.linalg.eigvalsh(gram)
        floor = power[:, -1:] * max(x.shape[1:]) * torch.finfo(torch.float64).eps  # below it is rounding, not signal
        power = torch.where(power > floor, power, 0.0)
        p = to_sum(power if self.spectrum == "eigenvalue" else power.sqrt(), torch.ones_like(power, dtype=torch.bool))
        entropy: Tensor = torch.special.entr(p).sum(dim=1)
        return entropy.exp().float()


@dataclass(frozen=True)
class Entropy(Statistic):
    """Entropy of scores taken as a distribution over the tokens (FlowCut, https://arxiv.org/abs/2505.19536).

    scorer: whose scores; negative ones count 0. normalise: divide by ln n, so that 1 is a flat distribution.

    H = -sum p ln p with p = score / sum; of a row whose scores are all 0, that of the flat distribution.
    """

    name: ClassVar[str] = "entropy"

    scorer: Scorer
    normalise: _Switch = False

    @classmethod
    def example(cls) -> Entropy:
        """Return the entropy of attention."""
        return cls(Attention())

    def compute(self, ctx: PruneContext) -> Tensor:
        """Return [B] float32."""
        x = whole(ctx.score(self.scorer), ctx.valid).clamp(min=0)
        x = torch.where(x.sum(dim=1, keepdim=True) > 0, x, ctx.valid.float())
        entropy: Tensor = torch.special.entr(to_sum(x, ctx.valid)).sum(dim=1)
        most = ctx.valid.sum(dim=1).clamp(min=2).float().log()
        return entropy / most if self.normalise else entropy


@dataclass(frozen=True)
class OutlierRatio(Statistic):
    """Share of tokens with an outstanding score: above Q3 + 1.5 IQR (PruMerge, https://arxiv.org/abs/2403.15388; TRIM).

    scorer: whose scores. factor: of the interquartile range.
    give: the `ratio`, the `count` of outliers (exact in `keep_tokens`, where a ratio in float32 may lose one), or `every`, the
        tokens per outlier n / count (PruMerge+ samples at a third of it; n where there is none).

    Percentiles are linear, as numpy's.
    """

    name: ClassVar[str] = "outlier_ratio"

    scorer: Scorer
    factor: Annotated[float, Field(strict=True, allow_inf_nan=False)] = 1.5
    give: Literal["ratio", "count", "every"] = "ratio"

    def __post_init__(self) -> None:
        if not math.isfinite(self.factor):
            raise ValueError(f"factor is a finite number, not {self.factor}")

    @classmethod
    def example(cls) -> OutlierRatio:
        """Return the share of outstanding attention."""
        return cls(Attention())

    def compute(self, ctx: PruneContext) -> Tensor:
        """Return [B] float32."""
        x = whole(ctx.score(self.scorer), ctx.valid)
        low, high = quantile(x, 0.25, ctx.valid), quantile(x, 0.75, ctx.valid)
        out = (x > (high + self.factor * (high - low)).unsqueeze(1)) & ctx.valid
        count, n = out.sum(dim=1).float(), ctx.valid.sum(dim=1).float()
        if self.give == "count":
            return count
        return count / n.clamp(min=1) if self.give == "ratio" else n / count.clamp(min=1)


@dataclass(frozen=True)
class MeanSimilarity(Statistic):
    """Mean cosine similarity of the pairs of different tokens; 0 where there is no pair (redundancy of a row).

    from: a site to read the tokens from. Linear in the number of tokens: (|sum of unit vectors|^2 - n) / (n (n - 1)).
    """

    name: ClassVar[str] = "mean_similarity"

    from_: _From = None

    def signals(self) -> tuple[Signal, ...]:
        """Read the tokens."""
        return (Signal("hidden", at=self.from_),)

    def compute(self, ctx: PruneContext) -> Tensor:
        """Return [B] float32."""
        x = whole(ctx.hidden.double(), ctx.valid.unsqueeze(-1))
        size = x.norm(dim=-1, keepdim=True)
        x = x / size.clamp(min=1e-12)
        n = ctx.valid.sum(dim=1)
        pairs = x.sum(dim=1).square().sum(dim=-1) - x.square().sum(dim=(1, 2))
        mean: Tensor = pairs / (n * (n - 1)).clamp(min=1)
        return mean.float()


@dataclass(frozen=True)
class Count(Statistic):
    """Number of tokens, or of groups of them.

    groups: count the groups of this grouping (`image`, `frame` ...) instead.
    """

    name: ClassVar[str] = "count"

    groups: Grouping | None = None

    def compute(self, ctx: PruneContext) -> Tensor:
        """Return [B] float32."""
        if self.groups is None:
            return ctx.valid.sum(dim=1).float()
        return torch.bincount(ctx.grouped(self.groups).row_of_group, minlength=len(ctx.valid)).float()


@dataclass(frozen=True)
class MatrixRank(Statistic):
    """Rank of the token matrix, or of attention from text to tokens (SparseVLM v1.0, https://arxiv.org/abs/2410.04417).

    of: `attention`, query rows x visual tokens, mean over heads; or `hidden`, the states.
    query, layer: rows of attention, and which layer's, as in the scorer `attention`. from: a site to read `hidden` from.

    Singular values above max(rows, columns) x eps x the largest, in float32, as torch.linalg.matrix_rank counts them; padding
    does not raise that bound. Attention has no groups: use it in a budget of the whole prompt.
    """

    name: ClassVar[str] = "rank"

    of: Literal["attention", "hidden"] = "hidden"
    query: Literal["last", "text", "after_image", "raters", "visual", "through_image", "all"] = "raters"
    layer: Literal["previous", "this"] = "previous"
    from_: _From = None

    def __post_init__(self) -> None:
        if self.of == "attention" and self.from_ is not None:
            raise ValueError("'from' goes with 'of: hidden'; attention is read from the decoder")

    def signals(self) -> tuple[Signal, ...]:
        """Read the states, or what the scorer `attention` reads."""
        return (Signal("hidden", at=self.from_),) if self.of == "hidden" else self._attention.signals()

    @property
    def _attention(self) -> Attention:
        return Attention(query=self.query, layer=self.layer)

    def compute(self, ctx: PruneContext) -> Tensor:
        """Return [B] float32."""
        if self.of == "hidden":
            matrix, there = ctx.hidden.float(), ctx.valid
        else:
            rows: Rows = ctx.read(self._attention.signals()[0])
            blocks = [(x.mean(dim=1), valid) for x, valid in rows.blocks()]
            matrix, there = torch.cat([x for x, _ in blocks], dim=1), torch.cat([valid for _, valid in blocks], dim=1)
            if self.query == "raters":
                there = there & raters(ctx)
            matrix = whole(matrix, ctx.valid.unsqueeze(1))
        matrix = whole(matrix, there.unsqueeze(-1))
        values = torch.linalg.svdvals(matrix)
        columns = ctx.valid.sum(dim=1) if self.of == "attention" else torch.full_like(there.sum(dim=1), matrix.shape[2])
        bound = torch.maximum(there.sum(dim=1), columns) * torch.finfo(torch.float32).eps * values.amax(dim=1)
        rank: Tensor = (values > bound.unsqueeze(1)).sum(dim=1)
        return rank.float()


def _spaced(x: Tensor, valid: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return at most `most` tokens of each row, evenly spaced where there are more, and which of them are valid."""
    if x.shape[1] <= most:
        return x, valid
    n = valid.sum(dim=1, keepdim=True)
    place = torch.arange(most, device=x.device).expand(len(x), -1)
    place = torch.where(n > most, (2 * place + 1) * n // (2 * most), place)
    return x.gather(1, place.unsqueeze(-1).expand(-1, -1, x.shape[2])), valid.gather(1, place)


@hookimpl
def register_statistics(register: Callable[[type], None]) -> None:
    """Offer these statistics."""
    for statistic in (EffectiveRank, Entropy, OutlierRatio, MeanSimilarity, Count, MatrixRank):
        register(statistic)
