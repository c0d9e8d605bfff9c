"""Neighbours of what another selector keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from tokenprune.decision import select_exactly
from tokenprune.hookspecs import hookimpl
from tokenprune.interfaces import Layout, PruneContext, Selector
from tokenprune.selectors import TopK
from tokenprune.tokens import Signal

__all__ = ["Dilate"]

_CROSS = ((-1, 0), (1, 0), (0, -1), (0, 1))
_CORNERS = ((-1, -1), (-1, 1), (1, -1), (1, 1))


@dataclass(frozen=True)
class Dilate(Selector):
    """What another selector keeps stays, and its neighbours on the grid of the frame (HiPrune, https://arxiv.org/abs/2508.00553).

    selector: chooses the seeds, as many as the stage (or the part of a union) gives. neighbours: 4 or 8 around each seed.
    compat: `official` steps through the flat raster order and clamps at its ends, so that the neighbour of the last token of
        a row is the first of the next one, and seeds near the ends mark the first or the last token (HiPrune's code; 4
        neighbours only); `clean` stays in the frame.

    A neighbour that left at an earlier stage is not there to be kept. Counts itself.
    """

    name: ClassVar[str] = "dilate"
    counts_itself: ClassVar[bool] = True

    selector: Selector = field(default_factory=TopK)
    neighbours: Annotated[int, Field(strict=True)] = 4
    compat: Literal["clean", "official"] = "clean"

    def __post_init__(self) -> None:
        if self.neighbours not in (4, 8):
            raise ValueError(f"neighbours is 4 or 8, not {self.neighbours}")
        if self.compat == "official" and self.neighbours != 4:
            raise ValueError("'compat: official' has 4 neighbours")

    def signals(self) -> tuple[Signal, ...]:
        """Read where tokens sit."""
        return (Signal("layout"),)

    def select(self, scores: Tensor, keep: Tensor, ctx: PruneContext) -> Tensor:
        """Return [B, N] bool."""
        seeds = select_exactly(self.selector, keep, ctx, exact=False)
        at = ctx.layout
        if self.compat == "official":
            flat = (at.frame * at.rows + at.row) * at.columns + at.column
            last = at.frames * at.rows * at.columns - 1
            steps = (torch.ones_like(flat), at.columns)
            near = [torch.minimum((flat + sign * step).clamp(min=0), last) for step in steps for sign in (-1, 1)]
            marked = torch.stack([_cell(at.image, x) for x in near])
            return seeds | torch.isin(_cell(at.image, flat), marked[:, seeds]) & ctx.valid
        offsets = _CROSS if self.neighbours == 4 else _CROSS + _CORNERS
        marked = torch.stack([_moved(at, *offset) for offset in offsets])
        return seeds | torch.isin(_moved(at, 0, 0), marked[:, seeds]) & ctx.valid


def _moved(at: Layout, down: int, right: int) -> Tensor:
    """Return [B, N]: a number for the cell that far from each token, the same for no other cell of the batch; -1 outside."""
    row, column = at.row + down, at.column + right
    inside = (row >= 0) & (row < at.rows) & (column >= 0) & (column < at.columns)
    flat = (at.frame * at.rows + row) * at.columns + column
    return torch.where(inside, _cell(at.image, flat), -1)


def _cell(image: Tensor, flat: Tensor) -> Tensor:
    """Return [B, N] int64 that tells cells of different images, and of different rows of the batch, apart."""
    batch = torch.arange(len(image), device=image.device).unsqueeze(1)
    return (batch << 48) + (image << 32) + flat


@hookimpl
def register_selectors(register: Callable[[type], None]) -> None:
    """Offer this selector."""
    register(Dilate)
