"""Built-in groupings: the parts of a prompt that are budgeted, selected and merged apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from tokenprune.hookspecs import hookimpl
from tokenprune.interfaces import Grouping, PruneContext
from tokenprune.tokens import Signal

__all__ = ["Chunk", "Frame", "FrameGroup", "Image", "Position", "Window"]

_Count = Annotated[int, Field(strict=True, ge=1)]
_LAYOUT = (Signal("layout"),)


@dataclass(frozen=True)
class Image(Grouping):
    """Every image (or clip, or tile that is one) of the prompt by itself."""

    name: ClassVar[str] = "image"
    whole_images: ClassVar[bool] = True

    def signals(self) -> tuple[Signal, ...]:
        """Read where tokens sit."""
        return _LAYOUT

    def labels(self, ctx: PruneContext) -> Tensor:
        """Return [B, N] int64."""
        return ctx.layout.image


@dataclass(frozen=True)
class Frame(Grouping):
    """Every frame by itself; an image is one frame."""

    name: ClassVar[str] = "frame"

    def signals(self) -> tuple[Signal, ...]:
        """Read where tokens sit."""
        return _LAYOUT

    def labels(self, ctx: PruneContext) -> Tensor:
        """Return [B, N] int64."""
        return dense(ctx.valid, ctx.layout.image, ctx.layout.frame)


@dataclass(frozen=True)
class FrameGroup(Grouping):
    """Runs of consecutive frames of one clip.

    frames: how many frames a group has; the last one of a clip may have fewer.
    """

    name: ClassVar[str] = "frame_group"

    frames: _Count = 4

    def signals(self) -> tuple[Signal, ...]:
        """Read where tokens sit."""
        return _LAYOUT

    def labels(self, ctx: PruneContext) -> Tensor:
        """Return [B, N] int64."""
        return dense(ctx.valid, ctx.layout.image, ctx.layout.frame // self.frames)


@dataclass(frozen=True)
class Position(Grouping):
    """The same row and column over all frames of a clip."""

    name: ClassVar[str] = "position"

    def signals(self) -> tuple[Signal, ...]:
        """Read where tokens sit."""
        return _LAYOUT

    def labels(self, ctx: PruneContext) -> Tensor:
        """Return [B, N] int64."""
        return dense(ctx.valid, ctx.layout.image, ctx.layout.row, ctx.layout.column)


@dataclass(frozen=True)
class Window(Grouping):
    """Rectangles of neighbouring tokens inside each frame.

    rows, columns: size of a window in tokens; those at the right and lower edge may be smaller.
    """

    name: ClassVar[str] = "window"

    rows: _Count = 6
    columns: _Count = 6

    def signals(self) -> tuple[Signal, ...]:
        """Read where tokens sit."""
        return _LAYOUT

    def labels(self, ctx: PruneContext) -> Tensor:
        """Return [B, N] int64."""
        at = ctx.layout
        return dense(ctx.valid, at.image, at.frame, at.row // self.rows, at.column // self.columns)


@dataclass(frozen=True)
class Chunk(Grouping):
    """Equal runs of consecutive tokens in raster order (HoloV's crops, https://arxiv.org/abs/2510.02912).

    count: how many chunks; the first n mod count of them get one token more.
    """

    name: ClassVar[str] = "chunk"

    count: _Count = 16

    def labels(self, ctx: PruneContext) -> Tensor:
        """Return [B, N] int64."""
        n = ctx.valid.sum(dim=1, keepdim=True)
        place = torch.arange(ctx.valid.shape[1], device=n.device).expand_as(ctx.valid)
        size, longer = n // self.count, n % self.count
        edge = longer * (size + 1)
        return torch.where(place < edge, place // (size + 1), longer + (place - edge) // size.clamp(min=1))


def dense(valid: Tensor, *labels: Tensor) -> Tensor:
    """Return [B, N] int64: one number from 0 up for every combination of labels that occurs, in their order."""
    combined = torch.zeros_like(labels[0])
    for label in labels:
        inside = label.masked_fill(~valid, 0)
        combined = combined * (inside.max() + 1 if inside.numel() else 1) + inside
    made = torch.zeros_like(combined)
    made[valid] = torch.unique(combined[valid], return_inverse=True)[1]
    return made


@hookimpl
def register_groupings(register: Callable[[type[Grouping]], None]) -> None:
    """Offer the built-in groupings."""
    for grouping in (Image, Frame, FrameGroup, Position, Window, Chunk):
        register(grouping)
