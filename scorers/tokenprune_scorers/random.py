"""The baseline that keeps everybody honest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tokenprune.hookspecs import hookimpl
from tokenprune.interfaces import PruneContext, Scorer


@dataclass(frozen=True)
class Random(Scorer):
    """Uniform noise per token and stage, fixed by the policy's seed (baseline, no paper)."""

    name: ClassVar[str] = "random"

    def score(self, ctx: PruneContext) -> Tensor:
        """Return [B, N] in (0, 1)."""
        return ctx.noise()


@hookimpl
def register_scorers(register: Callable[[type], None]) -> None:
    """Offer this scorer."""
    register(Random)
