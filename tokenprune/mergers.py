"""Built-in mergers: what becomes of the tokens that leave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tokenprune.hookspecs import hookimpl
from tokenprune.interfaces import Merged, Merger, PruneContext

__all__ = ["Drop"]


@dataclass(frozen=True)
class Drop(Merger):
    """Tokens that leave are gone; those that stay are not changed."""

    name: ClassVar[str] = "drop"
    changes_states: ClassVar[bool] = False

    def merge(self, hidden: Tensor, kept: Tensor, ctx: PruneContext) -> Merged:
        """Return `hidden` as it is."""
        return Merged(hidden, kept)


@hookimpl
def register_mergers(register: Callable[[type[Merger]], None]) -> None:
    """Offer the built-in mergers."""
    register(Drop)
