"""How much a token's similarities to its neighbourhood differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from tokenprune.groupings import Chunk
from tokenprune.hookspecs import hookimpl
from tokenprune.interfaces import Grouping, PruneContext, Scorer
from tokenprune.tokens import Signal, Site
from tokenprune_scorers._rows import whole

__all__ = ["LocalVariance"]


@dataclass(frozen=True)
class LocalVariance(Scorer):
    """Keep the tokens whose similarity to their chunk varies most: neither background nor outlier (HoloV, https://arxiv.org/abs/2510.02912).

    over: the chunks a token is compared within. from: a site to read the tokens from.
    compat: `official` counts the similarity of a token to itself as a zero among the others, as the authors' code does;
        `clean` takes the other tokens only.

    score_i = sum over j of (cos_ij - mean_i)^2 / (m - 1), m tokens in the chunk; 0 for a token alone.
    """

    name: ClassVar[str] = "local_variance"

    over: Grouping = field(default_factory=Chunk)
    from_: Annotated[Site | None, Field(alias="from")] = None
    compat: Literal["clean", "official"] = "clean"

    def signals(self) -> tuple[Signal, ...]:
        """Read the tokens."""
        return (Signal("hidden", at=self.from_),)

    def score(self, ctx: PruneContext) -> Tensor:
        """Return [B, N] float32."""
        chunk = ctx.grouped(self.over)
        x = torch.nn.functional.normalize(chunk.read(Signal("hidden", at=self.from_)).float(), dim=-1)
        others = chunk.valid.unsqueeze(1) & ~torch.eye(x.shape[1], dtype=torch.bool, device=x.device)
        cosine = whole(x @ x.mT, others)
        count = (chunk.valid.sum(dim=1) - 1).clamp(min=1)[:, None, None]
        mean = cosine.sum(dim=2, keepdim=True) / count
        there = chunk.valid.unsqueeze(1) if self.compat == "official" else others
        return chunk.spread((whole((cosine - mean).square(), there) / count).sum(dim=2))


@hookimpl
def register_scorers(register: Callable[[type], None]) -> None:
    """Offer this scorer."""
    register(LocalVariance)
