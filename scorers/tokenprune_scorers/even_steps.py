"""Tokens at a whole step from the first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tokenprune.hookspecs import hookimpl
from tokenprune.interfaces import PruneContext, Selector


@dataclass(frozen=True)
class EvenSteps(Selector):
    """Of n tokens those at 0, s, 2s ... stay, k of them with s = floor(n / k) (VisionZip, https://arxiv.org/abs/2412.04467).

    Unlike `stride` it begins with the first token, and where k does not divide n the end of the row has none. Scores are not
    used.
    """

    name: ClassVar[str] = "even_steps"
    uses_scores: ClassVar[bool] = False

    def select(self, scores: Tensor, keep: Tensor, ctx: PruneContext) -> Tensor:
        """Return [B, N] bool."""
        place = ctx.valid.cumsum(dim=1) - 1
        k = keep.unsqueeze(1)
        step = torch.div(ctx.valid.sum(dim=1, keepdim=True), k.clamp(min=1), rounding_mode="floor").clamp(min=1)
        return ctx.valid & (place % step == 0) & (torch.div(place, step, rounding_mode="floor") < k)


@hookimpl
def register_selectors(register: Callable[[type[Selector]], None]) -> None:
    """Offer this selector."""
    register(EvenSteps)
