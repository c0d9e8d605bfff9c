"""Shared by the parts that compare tokens with one another: features, distances, density peaks, and where means go."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from tokenprune.interfaces import Merged, Options, PruneContext
from tokenprune.tokens import Signal, Site

Metric = Literal["cosine", "euclidean"]
Place = Literal["in_order", "append"]


@dataclass(frozen=True)
class Features(Options):
    """What tokens are compared by.

    features: their `hidden` states or the `keys` of an attention module. heads: keys of a token as the `mean` over heads or
    `joined` to one long vector. layer: keys of the decoder layer before the site (`previous`) or of the one the tokens are
    about to enter (`this`). from: a site of the vision side to read them at; where the stage acts by default.
    metric: `cosine` distance 1 - cos, or `euclidean` distance / sqrt(width).
    """

    features: Literal["hidden", "keys"] = "hidden"
    heads: Literal["mean", "joined"] = "mean"
    layer: Literal["previous", "this"] = "previous"
    from_: Annotated[Site | None, Field(alias="from")] = None
    metric: Metric = "cosine"

    @property
    def _signal(self) -> Signal:
        return Signal(self.features, at=self.from_, layer=self.layer if self.features == "keys" else "previous")

    def signals(self) -> tuple[Signal, ...]:
        """Read the features."""
        return (self._signal,)

    def compared(self, ctx: PruneContext) -> Tensor:
        """Return [B, N, C] float32."""
        return self._as_rows(ctx.read(self._signal))

    def _as_rows(self, value: Tensor) -> Tensor:
        if self.features == "hidden":
            return value.float()
        return value.float().mean(dim=2) if self.heads == "mean" else value.float().flatten(2)


@dataclass(frozen=True)
class MergedFeatures(Features):
    """The same for a merger, which has the states it merges and asks for nothing to compare those."""

    @property
    def _given(self) -> bool:
        return self.features == "hidden" and self.from_ is None

    def signals(self) -> tuple[Signal, ...]:
        """Read the features, unless they are the states being merged."""
        return () if self._given else (self._signal,)

    def of(self, hidden: Tensor, ctx: PruneContext) -> Tensor:
        """Return [B, N, C] float32."""
        return hidden.float() if self._given else self.compared(ctx)


@dataclass(frozen=True)
class Ranks(Options):
    """The tokens from one rank by score to another; a whole number counts tokens, one with a point is a share of them.

    after: the first so many are left out. until: what ranks lower is left out; nothing by default.
    """

    after: Annotated[int, Field(strict=True, ge=0)] | Annotated[float, Field(strict=True, ge=0, le=1)] = 0
    until: Annotated[int, Field(strict=True, ge=0)] | Annotated[float, Field(strict=True, ge=0, le=1)] | None = None

    def __post_init__(self) -> None:
        for bound in (self.after, self.until):
            if bound is not None and (bound < 0 or (isinstance(bound, float) and not bound <= 1)):
                raise ValueError(f"a rank is a number of tokens (64) or a share of them (0.5), not {bound}")

    def of(self, ctx: PruneContext, at_least: Tensor | None = None) -> Tensor:
        """Return [B, N] bool. at_least: [B], so many tokens are in even where `until` is smaller."""
        rank, count = ranked(scores_of(ctx)), ctx.valid.sum(dim=1)
        inside = ctx.valid & (rank >= _bound(self.after, count).unsqueeze(1))
        if self.until is None:
            return inside
        until = _bound(self.until, count)
        return inside & (rank < (until if at_least is None else torch.maximum(until, at_least)).unsqueeze(1))


def _bound(value: int | float, count: Tensor) -> Tensor:
    return share(count, value) if isinstance(value, float) else torch.full_like(count, value)


def share(count: Tensor, ratio: float) -> Tensor:
    """Return floor(count * ratio) of the decimal number as written."""
    exact = Fraction(repr(ratio))
    return count * exact.numerator // exact.denominator


def scores_of(ctx: PruneContext) -> Tensor:
    """Return the scores of the stage, or where it has none the same for all, so that position decides; -inf on padding."""
    return (
        ctx.scores
        if ctx.scores is not None
        else torch.zeros(ctx.valid.shape, device=ctx.valid.device).masked_fill(~ctx.valid, -torch.inf)
    )


def sizes_of(ctx: PruneContext) -> Tensor:
    """Return [B, N] float32, how many tokens each one stands for."""
    return torch.ones(ctx.valid.shape, device=ctx.valid.device) if ctx.sizes is None else ctx.sizes.float()


def ranked(keys: Tensor) -> Tensor:
    """Return [B, N] int64, the place of each token by descending key, ties to the lower index."""
    order = keys.argsort(dim=1, descending=True, stable=True)
    return torch.empty_like(order).scatter_(1, order, torch.arange(keys.shape[1], device=keys.device).expand_as(order))


def compact(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return ([B, K], [B, K]): the marked columns of each row in order, and which of the K places a row fills."""
    count = mask.sum(dim=1, keepdim=True)
    longest = max(int(count.max()) if count.numel() else 0, 1)
    index = (~mask).to(torch.uint8).argsort(dim=1, stable=True)[:, :longest]
    return index, torch.arange(index.shape[1], device=mask.device) < count


def take(x: Tensor, index: Tensor) -> Tensor:
    """Return the rows [B, K, ...] of x [B, N, ...] at index [B, K]."""
    if x.dim() == 2:
        return x.gather(1, index)
    return x.gather(1, index.unsqueeze(2).expand(-1, -1, x.shape[2]))


def distances(a: Tensor, b: Tensor, metric: Metric) -> Tensor:
    """Return [B, N, M] float32."""
    if metric == "cosine":
        cosine: Tensor = F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).transpose(1, 2)
        return 1 - cosine
    # Not by way of a product of matrices: the same point has distance 0, and a row does not depend on its batch.
    gap: Tensor = torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")
    return gap / math.sqrt(a.shape[-1])


@dataclass(frozen=True, eq=False)
class Pairs:
    """Distances [B, N, M] that are computed a few rows at a time: all of them at once would be the largest tensor of a layer.

    a: [B, N, C]. b: [B, M, C].
    """

    a: Tensor
    b: Tensor
    metric: Metric

    def blocks(self, numbers: int = 1 << 22) -> Iterator[tuple[slice, Tensor]]:
        """Yield ([rows], [B, r, M]) of about `numbers` distances at a time."""
        step = max(1, numbers // max(self.b.shape[0] * self.b.shape[1], 1))
        for start in range(0, self.a.shape[1], step):
            rows = slice(start, min(start + step, self.a.shape[1]))
            yield rows, distances(self.a[:, rows], self.b, self.metric)

    def of(self, row: Tensor) -> Tensor:
        """Return [B, M]: the distances of one token of each row of the batch."""
        one = self.a[torch.arange(len(row), device=row.device), row].unsqueeze(1)
        return distances(one, self.b, self.metric)[:, 0]


def nearest(distance: Pairs | Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
    """Return ([B, N], [B, N]): the nearest of the M targets that are `there` [B, M], ties to the first, and how far it is."""
    if isinstance(distance, Pairs):
        found = [nearest(block, there) for _, block in distance.blocks()]
        return torch.cat([index for index, _ in found], dim=1), torch.cat([gap for _, gap in found], dim=1)
    masked = distance.masked_fill(~there.unsqueeze(1), torch.inf)
    index = masked.argmin(dim=2, keepdim=True)
    return index.squeeze(2), masked.gather(2, index).squeeze(2)


# ---- density peaks ---------------------------------------------------------------------------------------------------


def knn_density(distance: Pairs, valid: Tensor, neighbours: Tensor) -> Tensor:
    """Return [B, N]: exp(-mean squared distance to the nearest `neighbours[b]` tokens, itself included)."""
    neighbours = torch.minimum(neighbours, valid.sum(dim=1)).clamp(min=1)
    most = int(neighbours.max()) if neighbours.numel() else 1
    beyond = torch.arange(most, device=valid.device) >= neighbours[:, None, None]
    means = []
    for _, block in distance.blocks():
        near = block.masked_fill(~valid.unsqueeze(1), torch.inf).topk(most, dim=2, largest=False).values
        means.append(near.square().masked_fill(beyond, 0.0).sum(dim=2) / neighbours.unsqueeze(1))
    return (-torch.cat(means, dim=1).nan_to_num(posinf=0.0)).exp().masked_fill(~valid, 0.0)


def gaussian_density(distance: Pairs, valid: Tensor, bandwidth: float) -> Tensor:
    """Return [B, N]: sum over tokens of exp(-(distance / bandwidth)^2)."""
    sums = [
        (-(block / bandwidth).square()).exp().masked_fill(~valid.unsqueeze(1), 0.0).sum(dim=2)
        for _, block in distance.blocks()
    ]
    return torch.cat(sums, dim=1) * valid


def to_denser(distance: Pairs, density: Tensor, valid: Tensor) -> Tensor:
    """Return [B, N]: distance to the nearest denser token; the densest has the largest distance of its row.

    Of equally dense tokens the first counts as denser, so that of two copies one is no peak.
    """
    place = ranked(density.masked_fill(~valid, -torch.inf))
    near, most = [], torch.zeros(len(valid), device=valid.device)
    for rows, block in distance.blocks():
        both = valid.unsqueeze(1) & valid[:, rows].unsqueeze(2)
        most = torch.maximum(most, block.masked_fill(~both, 0.0).flatten(1).amax(dim=1))
        denser = both & (place.unsqueeze(1) < place[:, rows].unsqueeze(2))
        near.append(block.masked_fill(~denser, torch.inf).amin(dim=2))
    found = torch.cat(near, dim=1)
    return torch.where(found.isfinite(), found, most.unsqueeze(1)).masked_fill(~valid, 0.0)


@dataclass(frozen=True)
class Density(Features):
    """How dense it is around a token: k nearest neighbours, or a Gaussian with a given bandwidth."""

    metric: Metric = "euclidean"
    neighbours: Annotated[int, Field(strict=True, ge=1)] = 5
    bandwidth: Annotated[float, Field(strict=True, gt=0)] | None = None

    def __post_init__(self) -> None:
        if self.neighbours < 1:
            raise ValueError(f"neighbours counts at least the token itself, not {self.neighbours}")
        if self.bandwidth is not None and not self.bandwidth > 0:
            raise ValueError(f"bandwidth is a distance > 0, not {self.bandwidth}")

    def density(self, distance: Pairs, valid: Tensor) -> Tensor:
        """Return [B, N]; 0 on padding."""
        if self.bandwidth is not None:
            return gaussian_density(distance, valid, self.bandwidth)
        return knn_density(distance, valid, torch.full_like(valid[:, 0], self.neighbours, dtype=torch.int64))


# ---- where means go --------------------------------------------------------------------------------------------------


def totals(states: Tensor, owner: Tensor, taken: Tensor, owners: int, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return ([B, K, D], [B, K]): weighted sum of the `taken` tokens of each owner 0..K-1, and the sum of their weights.

    A product with a one-hot matrix, not a scatter, because sums of a scatter depend on the order on a GPU; a block of owners
    at a time, because all of them at once would be [K, N].
    """
    inside = states.float().masked_fill(~taken.unsqueeze(2), 0.0)
    step = max(1, (1 << 22) // max(owner.numel(), 1))
    sums, weights = [], []
    for start in range(0, owners, step):
        block = torch.arange(start, min(start + step, owners), device=owner.device)
        share_of = ((owner.unsqueeze(1) == block[:, None]) & taken.unsqueeze(1)) * weight.unsqueeze(1)
        sums.append(share_of @ inside)
        weights.append(share_of.sum(dim=2))
    return torch.cat(sums, dim=1), torch.cat(weights, dim=1)


def put(states: Tensor, index: Tensor, there: Tensor, rows: Tensor) -> Tensor:
    """Return states [B, N, ...] with rows [B, K, ...] at index [B, K], where they are there."""
    mask = there if rows.dim() == 2 else there.unsqueeze(2)
    index = index if rows.dim() == 2 else index.unsqueeze(2).expand_as(rows)
    return states.scatter(1, index, torch.where(mask, rows.to(states.dtype), states.gather(1, index)))


def with_extras(
    hidden: Tensor,
    kept: Tensor,
    sizes: Tensor,
    extras: tuple[Tensor, Tensor, Tensor, Tensor],
    place: Place,
) -> Merged:
    """Return kept tokens and extra ones.

    extras: states [B, E, D], sizes [B, E], the place in the prompt of each [B, E], and which are there [B, E]. A row has them
    first. place: `in_order` leaves them where they are; `append` moves the kept ones to the first places of the row, and the
    extra ones follow.
    """
    states, number, index, there = extras
    if place == "in_order":
        marked = kept | put(torch.zeros_like(kept), index, there, there)
        return Merged(put(hidden, index, there, states), marked, put(sizes, index, there, number))
    order = (~kept).to(torch.uint8).argsort(dim=1, stable=True)
    count = kept.sum(dim=1, keepdim=True)
    index = (count + torch.arange(there.shape[1], device=kept.device)).clamp(max=kept.shape[1] - 1)
    there_count = there.sum(dim=1, keepdim=True)
    marked = torch.arange(kept.shape[1], device=kept.device) < count + there_count
    return Merged(put(take(hidden, order), index, there, states), marked, put(take(sizes, order), index, there, number))
