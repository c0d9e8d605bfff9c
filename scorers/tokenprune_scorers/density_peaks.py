"""Cluster centres stay: tokens that are dense and far from denser ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from tokenprune.groupings import Frame
from tokenprune.hookspecs import hookimpl
from tokenprune.interfaces import PruneContext, Selector
from tokenprune.tokens import Signal
from tokenprune_scorers import _clusters
from tokenprune_scorers._clusters import Pairs, Ranks, ranked, to_denser

_LAYOUT = Signal("layout")


@dataclass(frozen=True)
class DensityPeaks(_clusters.Density, Selector):
    """Centres of density-peak clusters stay (DPC-kNN, https://doi.org/10.1016/j.knosys.2016.02.001).

    A token ranks by density x distance to the nearest denser token, and the budget says how many centres there are. With
    `cutoff` it counts itself: in order of density, a token is a centre when no centre so far is within the cutoff (DBDPC of
    PACT, https://arxiv.org/abs/2504.08966).

    neighbours: k of the density exp(-mean squared distance to the k nearest, itself included). bandwidth: takes the sum of
        exp(-(distance / bandwidth)^2) instead; PACT fixes it at 2, whatever the cutoff. metric: `euclidean` / sqrt(width), or
        `cosine`.
    among: only these ranks by score can be centres, and the density is of them alone; needs a scorer.
    every: only every s-th frame that the row has, counted back from its last one, has centres; each gets the same number, what
        does not divide goes to the last frames, and each frame is clustered by itself (FastVID, https://arxiv.org/abs/2503.11187).
    features, heads, layer, from: what is compared.

    Differs from the authors' codes: no random noise breaks ties of density; the lower index is denser.
    """

    name: ClassVar[str] = "density_peaks"

    cutoff: Annotated[float, Field(strict=True, ge=0)] | None = None
    among: Ranks | None = None
    every: Annotated[int, Field(strict=True, ge=1)] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cutoff is not None and not self.cutoff >= 0:
            raise ValueError(f"cutoff is a distance >= 0, not {self.cutoff}")
        if self.every is not None and (self.every < 1 or self.cutoff is not None):
            raise ValueError("every is a number of frames >= 1, and goes with a budget and not with a cutoff")

    @property
    def uses_scores(self) -> bool:  # type: ignore[override]
        """Whether `among` ranks tokens by score."""
        return self.among is not None

    @property
    def counts_itself(self) -> bool:  # type: ignore[override]
        """Whether the cutoff says how many there are."""
        return self.cutoff is not None

    def signals(self) -> tuple[Signal, ...]:
        """Read the features, and with `every` where tokens sit."""
        return (self._signal, _LAYOUT) if self.every is not None else (self._signal,)

    def select(self, scores: Tensor, keep: Tensor, ctx: PruneContext) -> Tensor:
        """Return [B, N] bool."""
        if self.every is not None:
            return self._by_frame(keep, ctx)
        x = self.compared(ctx)
        distance = Pairs(x, x, self.metric)
        if self.cutoff is not None:
            able = ctx.valid if self.among is None else self.among.of(ctx)
            return _spaced(distance, self.density(distance, able), able, self.cutoff)
        able = ctx.valid if self.among is None else self.among.of(ctx, at_least=keep)
        return ranked(self._peaks(distance, able)) < keep.unsqueeze(1)

    def _peaks(self, distance: Pairs, able: Tensor) -> Tensor:
        density = self.density(distance, able)
        return (density * to_denser(distance, density, able)).masked_fill(~able, -torch.inf)

    def _by_frame(self, keep: Tensor, ctx: PruneContext) -> Tensor:
        """Take the frames from the last back, in steps; what their tokens cannot hold goes to the frames in between."""
        assert self.every is not None
        frames = ctx.grouped(Frame())
        row = frames.row_of_group
        back = _place_from_end(row)
        x = self.compared(frames)
        able = frames.valid if self.among is None else self.among.of(frames)
        score = self._peaks(Pairs(x, x, self.metric), able)
        room, given = frames.valid.sum(dim=1), torch.zeros_like(row)
        for chosen in (back % self.every == 0, back % self.every != 0):
            left = keep - torch.zeros_like(keep).index_add_(0, row, given)
            given = given + _evenly(left, torch.where(chosen, room, 0), row)
        return frames.spread(ranked(score.masked_fill(~frames.valid, -torch.inf)) < given.unsqueeze(1))


def _spaced(distance: Pairs, density: Tensor, able: Tensor, cutoff: float) -> Tensor:
    """Return [B, N] bool: in order of density, the tokens with no chosen one within the cutoff."""
    key = density.masked_fill(~able, -torch.inf)
    chosen = torch.zeros_like(able)
    alive = able.clone()
    rows = torch.arange(len(able), device=able.device)
    while bool(alive.any()):
        pick = key.masked_fill(~alive, -torch.inf).argmax(dim=1)
        there = alive[rows, pick]
        chosen[rows, pick] |= there
        alive &= ~((distance.of(pick) <= cutoff) & there.unsqueeze(1))
        alive[rows, pick] = False
    return chosen


def _place_from_end(row: Tensor) -> Tensor:
    """Return [G]: 0 for the last group of each row, 1 for the one before it ..., groups of a row being in one run."""
    after = torch.arange(len(row), device=row.device)
    return torch.searchsorted(row.contiguous(), row.contiguous(), right=True) - 1 - after


def _evenly(left: Tensor, room: Tensor, row: Tensor) -> Tensor:
    """Return [G]: `left[b]` shared evenly by the groups of each row, none above its room; what is over goes to the last."""
    given = torch.zeros_like(room)
    while True:  # a round gives every group with room one token
        rest = left - torch.zeros_like(left).index_add_(0, row, given)
        open_ = given < room
        seen = open_.cumsum(0)
        last = torch.zeros_like(left).scatter_reduce_(0, row, seen, "amax")
        gets = open_ & (last[row] - seen < rest[row])
        if not bool(gets.any()):
            return given
        given = given + gets.long()


@hookimpl
def register_selectors(register: Callable[[type[Selector]], None]) -> None:
    """Offer this selector."""
    register(DensityPeaks)
