"""How much of a visual token lies along the principal directions of the image."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from tokenprune.hookspecs import hookimpl
from tokenprune.interfaces import PruneContext, Scorer
from tokenprune.tokens import Signal, Site

__all__ = ["Leverage"]


@dataclass(frozen=True)
class Leverage(Scorer):
    """Keep the tokens that carry most of the singular directions of the token matrix (TokenCarve, https://arxiv.org/abs/2503.10501).

    X = U S V^T over the valid tokens of the prompt, [N, D].

    measure: `mass` = sum_j |U_ij| s_j, the information contribution of TokenCarve (section 3.2); `energy` = sum_j
        (U_ij s_j)^2, which is ||x_i||^2 unless `rank` cuts it; `leverage` = sum_j U_ij^2, the statistical leverage, which is
        1 for all tokens unless `rank` cuts it or tokens depend on each other.
    rank: only the largest this many directions count; null takes all.
    centre: subtract the mean token first.
    from: a site to read the tokens at instead of where they leave.

    Differs from the authors' code: theirs fails where N > D; here the decomposition is that of the smaller Gram matrix, in
    float64, because squaring the singular values halves the digits that are left.
    """

    name: ClassVar[str] = "leverage"

    measure: Literal["mass", "energy", "leverage"] = "mass"
    rank: Annotated[int, Field(strict=True, ge=1)] | None = None
    centre: Annotated[bool, Field(strict=True)] = False
    from_: Annotated[Site | None, Field(alias="from")] = None

    def __post_init__(self) -> None:
        if self.rank is not None and self.rank < 1:
            raise ValueError(f"rank is a number of directions >= 1, not {self.rank}")

    @property
    def _tokens(self) -> Signal:
        return Signal("hidden", at=self.from_)

    def signals(self) -> tuple[Signal, ...]:
        """Read the tokens."""
        return (self._tokens,)

    def score(self, ctx: PruneContext) -> Tensor:
        """Return [B, N] float32."""
        x = ctx.read(self._tokens).double().masked_fill(~ctx.valid.unsqueeze(-1), 0.0)
        if self.centre:
            mean = x.sum(dim=1, keepdim=True) / ctx.valid.sum(dim=1).clamp(min=1)[:, None, None]
            x = (x - mean).masked_fill(~ctx.valid.unsqueeze(-1), 0.0)
        along, strength = _directions(x)
        if self.rank is not None:
            along, strength = along[..., -self.rank :], strength[..., -self.rank :]
        if self.measure == "mass":
            return along.abs().sum(dim=-1).float()
        if self.measure == "leverage":
            along = along / torch.where(strength > 0, strength, 1.0).unsqueeze(1)
        return along.square().sum(dim=-1).float()


def _directions(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return U S [B, N, K] and S [B, K] of [B, N, D], ascending in S, K = min(N, D); what is rounding error is 0."""
    wide = x.shape[1] <= x.shape[2]
    gram = x @ x.transpose(1, 2) if wide else x.transpose(1, 2) @ x
    power, vectors = torch.linalg.eigh(gram)
    size = max(x.shape[1:]) * torch.finfo(power.dtype).eps
    strength = torch.where(power > power[:, -1:] * size, power, 0.0).sqrt()
    along = vectors * strength.unsqueeze(1) if wide else (x @ vectors) * (strength > 0).unsqueeze(1)
    return along, strength


@hookimpl
def register_scorers(register: Callable[[type], None]) -> None:
    """Offer this scorer."""
    register(Leverage)
