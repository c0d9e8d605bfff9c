"""Selectors that see positions only: a grid over each frame, every n-th token of a sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from tokenprune.hookspecs import hookimpl
from tokenprune.interfaces import Number, PruneContext, Selector
from tokenprune.tokens import Signal

__all__ = ["Every", "Grid"]


@dataclass(frozen=True)
class Grid(Selector):
    """Tokens of a grid over each frame stay: every n-th row and column (FEATHER, https://arxiv.org/abs/2412.13180).

    step: rows and columns from one to the next. offset: the first row and column; `centre` puts it in the middle of a step, so
        that a grid of step 2 or 3 keeps the middle of each 2x2 or 3x3 cell (the lower right of the middle where it is even).

    Scores are not used. Counts itself.
    """

    name: ClassVar[str] = "grid"
    uses_scores: ClassVar[bool] = False
    counts_itself: ClassVar[bool] = True

    step: Annotated[int, Field(strict=True, ge=1)] = 3
    offset: Annotated[int, Field(strict=True, ge=0)] | Literal["centre"] = 0

    def __post_init__(self) -> None:
        if isinstance(self.offset, int) and self.offset >= self.step:
            raise ValueError(f"offset is below the step of {self.step}, not {self.offset}")

    def signals(self) -> tuple[Signal, ...]:
        """Read where tokens sit."""
        return (Signal("layout"),)

    def select(self, scores: Tensor, keep: Tensor, ctx: PruneContext) -> Tensor:
        """Return [B, N] bool."""
        first = self.step // 2 if self.offset == "centre" else self.offset
        at = ctx.layout
        return (at.row % self.step == first) & (at.column % self.step == first) & ctx.valid


@dataclass(frozen=True)
class Every(Selector):
    """Every n-th token of the sequence stays, from the first (PruMerge+, https://arxiv.org/abs/2403.15388).

    step: from one to the next, rounded down, at least 1. compat: `official` never keeps the last token (PruMerge+ samples up to
        575 of 576, end excluded).

    Scores are not used. Counts itself.
    """

    name: ClassVar[str] = "every"
    uses_scores: ClassVar[bool] = False
    counts_itself: ClassVar[bool] = True

    step: Number = 3
    compat: Literal["clean", "official"] = "clean"

    def __post_init__(self) -> None:
        if isinstance(self.step, int | float) and not 1 <= self.step < 1 << 31:
            raise ValueError(f"step is a number of tokens, at least 1, not {self.step}")

    def select(self, scores: Tensor, keep: Tensor, ctx: PruneContext) -> Tensor:
        """Return [B, N] bool."""
        place = torch.arange(ctx.valid.shape[1], device=ctx.valid.device)
        step = (ctx.number(self.step).double() + 1e-5).floor().long().clamp(min=1).unsqueeze(1)
        kept = (place % step == 0) & ctx.valid
        if self.compat == "official":
            kept = kept & (place < ctx.valid.sum(dim=1, keepdim=True) - 1)
        return kept


@hookimpl
def register_selectors(register: Callable[[type], None]) -> None:
    """Offer these selectors."""
    register(Grid)
    register(Every)
