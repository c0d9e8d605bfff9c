"""How important a visual token is in the graph of similar tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from tokenprune.hookspecs import hookimpl
from tokenprune.interfaces import Grouping, PruneContext, Scorer
from tokenprune.tokens import Signal, Site

__all__ = ["Graph"]


@dataclass(frozen=True)
class Graph(Scorer):
    """Keep the tokens that gather most information in a graph of similar tokens (G-Prune, https://arxiv.org/abs/2501.02268).

    Tokens i, j are joined where cos(x_i, x_j) >= threshold, a token always with itself. A = softmax of cos / temperature over
    the neighbours of a row. The start vector is moved `steps` times, v <- v A, and the score is v_j / degree_j.

    threshold: of the cosine. temperature: of the softmax. steps: how often information moves.
    start: `norm` begins with ||x_i|| (the authors' choice), `one` with the same for all.
    by_degree: false leaves out the division, so that tokens with many look-alikes come first.
    within: one graph per group (`image` ...) instead of one over the prompt; memory grows with the square of the largest.
    from: a site to read the tokens at instead of where they leave.

    The authors take the 5th power of the matrix, N^3; moving the vector gives the same numbers in N^2 a step.
    """

    name: ClassVar[str] = "graph"

    threshold: Annotated[float, Field(strict=True, ge=-1, le=1)] = 0.5
    temperature: Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)] = 0.03
    steps: Annotated[int, Field(strict=True, ge=0)] = 5
    start: Literal["norm", "one"] = "norm"
    by_degree: Annotated[bool, Field(strict=True)] = True
    within: Grouping | None = None
    from_: Annotated[Site | None, Field(alias="from")] = None

    def __post_init__(self) -> None:
        if not -1 <= self.threshold <= 1:
            raise ValueError(f"threshold is a cosine, in [-1, 1], not {self.threshold}")
        if not 0 < self.temperature < float("inf"):
            raise ValueError(f"temperature is a finite number > 0, not {self.temperature}")
        if self.steps < 0:
            raise ValueError(f"steps is a number >= 0, not {self.steps}")

    @property
    def _tokens(self) -> Signal:
        return Signal("hidden", at=self.from_)

    def signals(self) -> tuple[Signal, ...]:
        """Read the tokens."""
        return (self._tokens,)

    def score(self, ctx: PruneContext) -> Tensor:
        """Return [B, N] float32."""
        if self.within is None:
            return self._flow(ctx.read(self._tokens), ctx.valid)
        group = ctx.grouped(self.within)
        return group.spread(self._flow(group.read(self._tokens), group.valid))

    def _flow(self, hidden: Tensor, valid: Tensor) -> Tensor:
        x = hidden.float().masked_fill(~valid.unsqueeze(-1), 0.0)
        norm = x.norm(dim=-1)
        unit = x / norm.clamp(min=1e-12).unsqueeze(-1)
        cosine = unit @ unit.transpose(1, 2)
        joined = (cosine >= self.threshold) & valid.unsqueeze(1)
        joined = joined | torch.eye(valid.shape[1], dtype=torch.bool, device=valid.device)  # a zero token has cosine 0
        rows = (cosine / self.temperature).masked_fill(~joined, -torch.inf).softmax(dim=-1)
        value = (norm if self.start == "norm" else torch.ones_like(norm)).masked_fill(~valid, 0.0)
        for _ in range(self.steps):
            value = torch.einsum("bi,bij->bj", value, rows)
        return value / joined.sum(dim=-1) if self.by_degree else value


@hookimpl
def register_scorers(register: Callable[[type], None]) -> None:
    """Offer this scorer."""
    register(Graph)
