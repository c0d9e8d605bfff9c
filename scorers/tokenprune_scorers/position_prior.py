"""Where a token sits in its frame, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from tokenprune.hookspecs import hookimpl
from tokenprune.interfaces import PruneContext, Scorer
from tokenprune.tokens import Signal

_LAYOUT = Signal("layout")


@dataclass(frozen=True)
class PositionPrior(Scorer):
    """Keep tokens near a place of the frame, whatever they show: the control for spatial bias (baseline, no paper).

    towards: the `centre`, the `border`, or an edge: `top`, `bottom`, `left`, `right`.
    width: of the Gaussian around the place, in units of half the frame.

    score = exp(-d^2 / 2 width^2), d the distance of the token's centre from the place (border: from the nearest edge).
    """

    name: ClassVar[str] = "position_prior"

    towards: Literal["centre", "border", "top", "bottom", "left", "right"] = "centre"
    width: Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)] = 0.5

    def __post_init__(self) -> None:
        if not self.width > 0:
            raise ValueError(f"width is above 0, not {self.width}")

    def signals(self) -> tuple[Signal, ...]:
        """Read where tokens sit."""
        return (_LAYOUT,)

    def score(self, ctx: PruneContext) -> Tensor:
        """Return [B, N] float32."""
        at = ctx.layout
        y = (2 * at.row.float() + 1) / at.rows - 1  # -1 at the top edge, 1 at the bottom
        x = (2 * at.column.float() + 1) / at.columns - 1
        distance = {
            "centre": lambda: torch.sqrt(x * x + y * y),
            "border": lambda: 1 - torch.maximum(x.abs(), y.abs()),
            "top": lambda: y + 1,
            "bottom": lambda: 1 - y,
            "left": lambda: x + 1,
            "right": lambda: 1 - x,
        }[self.towards]()
        return torch.exp(-distance.square() / (2 * self.width**2))


@hookimpl
def register_scorers(register: Callable[[type], None]) -> None:
    """Offer this scorer."""
    register(PositionPrior)
