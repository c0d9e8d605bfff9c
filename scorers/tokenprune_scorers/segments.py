"""Runs of frames that show one scene."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from tokenprune.groupings import Frame, dense
from tokenprune.hookspecs import hookimpl
from tokenprune.interfaces import Grouping, PruneContext
from tokenprune.tokens import Signal, Site
from tokenprune_scorers._clusters import Pairs, knn_density, nearest, ranked, share, to_denser
from tokenprune_scorers._video import LAYOUT, likeness, places


@dataclass(frozen=True)
class Segments(Grouping):
    """Scenes: runs of alike frames of each clip (FastVID, https://arxiv.org/abs/2503.11187).

    by: how a clip is cut.
        `cuts`: between frames, at the `count` - 1 lowest cosines of frame means and wherever it is below `threshold` (FastVID).
        `peaks`: frame means are clustered by density peaks into floor(frames x share) clusters, `neighbours` for the density;
            the longest run of each cluster stays, and shorter runs and single frames join the longer segment beside them
            (PruneVid, https://arxiv.org/abs/2412.16117).
        `static`: the cuts that maximise the sum over segments of (positions where every frame has a cosine of at least
            `threshold` to the one before) x (frames - 1), by dynamic programming; fewer cuts when equal (HoliTom,
            https://arxiv.org/abs/2505.21334).
    from: a site to read instead of the stage's own.

    Differs from the authors' code: FastVID compares the pooled output of SigLIP's attention head and not means; no random noise
    breaks ties of density.
    """

    name: ClassVar[str] = "segments"

    by: Literal["cuts", "peaks", "static"] = "cuts"
    count: Annotated[int, Field(strict=True, ge=1)] = 8
    threshold: Annotated[float, Field(strict=True, ge=-1, le=1)] = 0.9
    share: Annotated[float, Field(strict=True, gt=0, le=1)] = 0.25
    neighbours: Annotated[int, Field(strict=True, ge=1)] = 7
    from_: Annotated[Site | None, Field(alias="from")] = None

    def __post_init__(self) -> None:
        if not -1 <= self.threshold <= 1:
            raise ValueError(f"threshold is a cosine in [-1, 1], not {self.threshold}")
        if not 0 < self.share <= 1:
            raise ValueError(f"share of the frames is in (0, 1], not {self.share}")
        if self.count < 1 or self.neighbours < 1:
            raise ValueError("count and neighbours are whole numbers of at least 1")

    @property
    def _hidden(self) -> Signal:
        return Signal("hidden", at=self.from_)

    def signals(self) -> tuple[Signal, ...]:
        """Read the tokens and where they sit."""
        return (self._hidden, LAYOUT)

    def labels(self, ctx: PruneContext) -> Tensor:
        """Return [B, N] int64."""
        frames = ctx.grouped(Frame())
        if not ctx.valid.any():
            return torch.zeros_like(ctx.ordinal)
        hidden = ctx.read(self._hidden)
        inside = frames.cut(hidden).float().masked_fill(~frames.valid.unsqueeze(-1), 0.0)
        mean = inside.sum(dim=1) / frames.valid.sum(dim=1, keepdim=True)
        # One row per clip, its frames side by side.
        image = frames.layout.image[:, 0]
        clip = torch.unique_consecutive(torch.stack((frames.row_of_group, image)), dim=1, return_inverse=True)[1]
        number = torch.arange(len(clip), device=clip.device) - torch.searchsorted(clip, clip)
        there = torch.arange(int(number.max()) + 1, device=clip.device) < torch.bincount(clip).unsqueeze(1)
        means = mean.new_zeros(*there.shape, mean.shape[1])
        means[clip, number] = mean
        if self.by == "cuts":
            segment = self._cut(means, there)
        elif self.by == "peaks":
            segment = self._peaks(means, there)
        else:
            frame = frames.spread((clip * there.shape[1] + number).unsqueeze(1).expand_as(frames.valid))
            segment = _best_cuts(_chains(hidden, ctx, frame, self.threshold), frame, ctx.valid, there)
        of_frame = segment[clip, number].unsqueeze(1).expand_as(frames.valid)
        return dense(ctx.valid, ctx.layout.image, frames.spread(of_frame))

    def _cut(self, means: Tensor, there: Tensor) -> Tensor:
        """Return [C, F] int64."""
        cosine = F.cosine_similarity(means[:, 1:], means[:, :-1], dim=-1).masked_fill(~there[:, 1:], torch.inf)
        low = ranked(-cosine) < self.count - 1
        return _counted((low | (cosine < self.threshold)) & there[:, 1:])

    def _peaks(self, means: Tensor, there: Tensor) -> Tensor:
        """Return [C, F] int64."""
        distance = Pairs(means, means, "euclidean")
        count = there.sum(dim=1)
        density = knn_density(distance, there, torch.full_like(count, self.neighbours))
        score = (density * to_denser(distance, density, there)).masked_fill(~there, -torch.inf)
        place = ranked(score)
        centre = place < share(count, self.share).clamp(min=1).unsqueeze(1)
        owner, _ = nearest(distance, centre)
        owner = torch.where(centre, torch.arange(owner.shape[1], device=owner.device), owner)
        clips = [_joined(row[:n]) + [0] * (len(row) - n) for row, n in zip(owner.tolist(), count.tolist(), strict=True)]
        return torch.tensor(clips, device=owner.device)


def _counted(cuts: Tensor) -> Tensor:
    """Return [C, F] int64: the number of cuts [C, F - 1] before each frame."""
    return F.pad(cuts.long().cumsum(dim=1), (1, 0))


def _joined(owner: list[int]) -> list[int]:
    """Return the segment of each frame, given its cluster.

    The longest runs of each cluster stay, if longer than one frame; the frames of the others join the longer of the segments
    beside them, the earlier of equal ones.
    """
    runs = [(label, len(list(frames))) for label, frames in groupby(owner)]
    longest = {label: max(length for other, length in runs if other == label) for label, _ in runs}
    stays = [length == longest[label] > 1 for label, length in runs]
    segments: list[int] = []
    waiting = 0  # frames that join the next segment
    for i, (_, length) in enumerate(runs):
        after = next((runs[j][1] for j in range(i, len(runs)) if stays[j]), 0)
        if stays[i]:
            segments.append(waiting + length)
            waiting = 0
        elif segments and not waiting and segments[-1] >= after:
            segments[-1] += length
        else:
            waiting += length
    if waiting:
        segments.append(waiting)
    return [number for number, length in enumerate(segments) for _ in range(length)]


def _chains(hidden: Tensor, ctx: PruneContext, frame: Tensor, threshold: float) -> Tensor:
    """Return [B, N] int64: how many times in a row, up to here, a token was like the one a frame before at its position."""
    by_place = places(ctx.layout, ctx.valid)
    before = by_place.before()
    adjacent = frame - frame.gather(1, before.clamp(min=0)) == 1
    same = (likeness(hidden, before) >= threshold) & (before >= 0) & adjacent
    place = torch.arange(same.shape[1], device=same.device).expand_as(frame)
    broken = place.masked_fill(same.gather(1, by_place.order), 0).cummax(dim=1).values
    return by_place.back(place - broken)


def _best_cuts(chains: Tensor, frame: Tensor, valid: Tensor, there: Tensor) -> Tensor:
    """Return [C, F] int64: the segments that maximise the sum of (positions static all through) x (frames - 1).

    chains: [B, N] of `_chains`. frame: [B, N] number of each token's frame, c F + f for frame f of clip c.
    """
    clips, frames = there.shape
    code = (frame * (frames + 1) + chains)[valid]
    exactly = torch.bincount(code, minlength=clips * frames * (frames + 1)).view(clips, frames, frames + 1)
    at_least = exactly.flip(2).cumsum(dim=2).flip(2)  # [C, F, l]: tokens of frame f static over the l frames before it
    best = at_least.new_zeros(clips, frames + 1)
    start = torch.zeros_like(best[:, :-1])
    for last in range(frames):
        length = last - torch.arange(last + 1, device=there.device)
        value = best[:, : last + 1] + at_least[:, last].gather(1, length.expand(clips, -1)) * length
        best[:, last + 1], start[:, last] = value.amax(dim=1), value.argmax(dim=1)
    cuts = torch.zeros_like(there)
    end = there.sum(dim=1, keepdim=True) - 1
    while bool((end >= 0).any()):
        first = start.gather(1, end.clamp(min=0))
        cuts.scatter_(1, first, cuts.gather(1, first) | (end >= 0))
        end = first - 1
    return cuts.long().cumsum(dim=1)


@hookimpl
def register_groupings(register: Callable[[type[Grouping]], None]) -> None:
    """Offer this grouping."""
    register(Segments)
