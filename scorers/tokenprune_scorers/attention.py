"""How much a few query rows look at each visual token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from tokenprune.hookspecs import hookimpl
from tokenprune.interfaces import PruneContext, Scorer
from tokenprune.tokens import Signal


@dataclass(frozen=True)
class Attention(Scorer):
    """Keep the tokens that text attends to: mean over query rows of head-averaged attention (FastV, https://arxiv.org/abs/2403.06764).

    query: rows of the attention matrix: the `last` prompt token (FastV's code; its paper reads as all tokens), all `text`
        tokens, or the text `after_image`, i.e. after the last visual token.
    heads: `mean` or `max` over heads.
    layer: the layer before the site (`previous`: its queries and keys are at hand) or the one the tokens are about to enter
        (`this`, PyramidDrop's choice: its projections run once more).

    The softmax runs over the full causal row, as in the model; only rows asked for are computed, so the model keeps its
    attention kernel. Differs from the authors' code: no layer runs twice, and padding is respected.
    """

    name: ClassVar[str] = "attention"

    query: Literal["last", "text", "after_image"] = "last"
    heads: Literal["mean", "max"] = "mean"
    layer: Literal["previous", "this"] = "previous"

    def signals(self) -> tuple[Signal, ...]:
        """Read the attention of the chosen rows."""
        return (Signal("attention", query=self.query, layer=self.layer),)

    def score(self, ctx: PruneContext) -> Tensor:
        """Return [B, N] float32."""
        return ctx.attention.reduce(heads=self.heads)


@hookimpl
def register_scorers(register: Callable[[type], None]) -> None:
    """Offer this scorer."""
    register(Attention)
