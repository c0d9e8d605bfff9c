"""How much one decoder layer changed each visual token."""

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

Metric = Literal["l2", "l1", "cosine"]


@dataclass(frozen=True)
class Variation(Scorer):
    """Keep the tokens the layer before changed most: ||H[p] - H[p-1]|| (V2Drop, https://arxiv.org/abs/2509.01552).

    H[p] is the residual stream entering decoder layer p, raw: no norm layer, no division by ||H|| (eq. 3 of the paper).

    metric: `l2`, `l1`, or `cosine` = 1 - cos(H[p], H[p-1]).
    chunk: columns of D reduced at a time, to bound the float32 copies; null takes all at once. Same result up to rounding.
    guard: replace a non-finite score by 0 (a token that overflowed in half precision then leaves first) instead of failing.

    Differs from the authors' code: differences and norms are taken in float32 whatever the model's dtype (theirs uses the
    model's, where ties at the cut are common), and each row of a batch has its own scores (theirs uses row 0 for all).
    """

    name: ClassVar[str] = "variation"

    metric: Metric = "l2"
    chunk: Annotated[int, Field(strict=True, ge=1)] | None = None
    guard: Annotated[bool, Field(strict=True)] = False

    def signals(self) -> tuple[Signal, ...]:
        """Read the tokens at the site and as they entered the layer before."""
        return (Signal("hidden"), Signal("previous_hidden"))

    def score(self, ctx: PruneContext) -> Tensor:
        """Return [B, N] float32."""
        score = _METRICS[self.metric](ctx.hidden, ctx.previous_hidden, self.chunk or ctx.hidden.shape[-1])
        return score.nan_to_num(0.0, 0.0, 0.0) if self.guard else score


def _l2(now: Tensor, before: Tensor, chunk: int) -> Tensor:
    parts = [(a.float() - b.float()).square().sum(dim=-1) for a, b in _columns(now, before, chunk)]
    return torch.stack(parts).sum(dim=0).sqrt()


def _l1(now: Tensor, before: Tensor, chunk: int) -> Tensor:
    return torch.stack([(a.float() - b.float()).abs().sum(dim=-1) for a, b in _columns(now, before, chunk)]).sum(dim=0)


def _cosine(now: Tensor, before: Tensor, chunk: int) -> Tensor:
    pairs = [(a.float(), b.float()) for a, b in _columns(now, before, chunk)]
    dot = sum(((a * b).sum(dim=-1) for a, b in pairs), torch.zeros(()))
    norms = [sum((x[i].square().sum(dim=-1) for x in pairs), torch.zeros(())).sqrt() for i in (0, 1)]
    return 1 - dot / (norms[0] * norms[1]).clamp(min=1e-12)


def _columns(now: Tensor, before: Tensor, chunk: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(torch.split(now, chunk, dim=-1), torch.split(before, chunk, dim=-1), strict=True))


_METRICS: dict[Metric, Callable[[Tensor, Tensor, int], Tensor]] = {"l2": _l2, "l1": _l1, "cosine": _cosine}


@hookimpl
def register_scorers(register: Callable[[type], None]) -> None:
    """Offer this scorer."""
    register(Variation)
