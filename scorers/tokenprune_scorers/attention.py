"""How much a few query rows look at each visual token."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from tokenprune.hookspecs import hookimpl
from tokenprune.interfaces import Attention as Rows
from tokenprune.interfaces import AttentionRows, PruneContext, Scorer
from tokenprune.tokens import Signal, Site

_INPUT = Site("llm.input")
_EMBEDS = Signal("hidden", at=_INPUT)
_WORDS = Signal("hidden", at=_INPUT, of="text")


@dataclass(frozen=True)
class Attention(Scorer):
    """Keep the tokens that other tokens attend to: rows of the attention matrix, reduced over heads and rows (FastV, https://arxiv.org/abs/2403.06764).

    query: rows of the attention matrix: the `last` prompt token (FastV's code; its paper reads as all tokens), all `text`
        tokens, the text `after_image`, i.e. after the last visual token, the `raters` among those (SparseVLM,
        https://arxiv.org/abs/2410.04417, eq. 5: text whose softmax similarity to the visual input embeddings, averaged over
        them, is above the mean), the `visual` tokens, everything `through_image`, `all` rows; `cls` in a vision tower.
    heads: `mean`, `max` or `sum` over heads, `joined` (one softmax over the full width), or the number of heads with most
        mass on the image to average (SparseVLM+ takes 14). rows: `mean`, `sum` or `max` over query rows, after the heads.
    normalise: the softmax runs over the `full` causal row, as in the model, or over the `visual` keys alone (FEATHER).
    rope: false scores before the rotary embedding, which favours late tokens (FEATHER, https://arxiv.org/abs/2412.13180).
    rope_prior: divide by what the rotary embedding alone would give, (2 / sqrt(d)) sum_f cos(delta theta_f), floored at 0.05
        so that it stays positive at long distances (SparseVLM+; its code does not floor it).
    pool_queries: average the queries first and take one row (PACT, https://arxiv.org/abs/2504.08966).
    probes: with many rows, take this many of them only: the most recent half, and the rest spread over the others.
    layer: the layer before the site (`previous`: its queries and keys are at hand) or the one the tokens are about to enter
        (`this`, PyramidDrop's choice: its projections run once more).
    from: a layer of the vision tower (`vision.layers.-2`) to read instead of the decoder.

    Only rows asked for are computed, in blocks, so the model keeps its attention kernel. Differs from the authors' code: no
    layer runs twice, and padding is respected.
    """

    name: ClassVar[str] = "attention"

    query: Literal["last", "text", "after_image", "raters", "visual", "through_image", "all", "cls"] = "last"
    heads: Literal["mean", "max", "sum", "joined"] | Annotated[int, Field(strict=True, ge=1)] = "mean"
    rows: Literal["mean", "sum", "max"] = "mean"
    normalise: Literal["full", "visual"] = "full"
    rope: Annotated[bool, Field(strict=True)] = True
    rope_prior: Annotated[bool, Field(strict=True)] = False
    pool_queries: Annotated[bool, Field(strict=True)] = False
    probes: Annotated[int, Field(strict=True, ge=0)] = 0
    layer: Literal["previous", "this"] = "previous"
    from_: Annotated[Site | None, Field(alias="from")] = None

    def __post_init__(self) -> None:
        tower = self.from_ is not None and self.from_.part == "vision" and self.from_.is_layer
        if self.from_ is not None and not tower:
            raise ValueError(
                f"attention is read from vision.layers.<k> or, without 'from', from the decoder; not from {self.from_}"
            )
        if tower and self.query not in ("cls", "all"):
            raise ValueError(f"a vision tower has no {self.query!r} rows; query is 'cls' or 'all' there")
        if not tower and self.query == "cls":
            raise ValueError("query 'cls' needs 'from: vision.layers.<k>'; the decoder has no CLS token")

    @property
    def _rows(self) -> Signal:
        query = "after_image" if self.query == "raters" else self.query
        return Signal("attention", at=self.from_, query=query, layer=self.layer, rope=self.rope, probes=self.probes)

    def signals(self) -> tuple[Signal, ...]:
        """Read the attention of the chosen rows; raters also need the input embeddings."""
        return (self._rows, _EMBEDS, _WORDS) if self.query == "raters" else (self._rows,)

    def score(self, ctx: PruneContext) -> Tensor:
        """Return [B, N] float32."""
        rows: Rows = ctx.read(self._rows)
        if self.pool_queries and isinstance(rows, AttentionRows):
            rows = rows.pooled()
        weights = raters(ctx) if self.query == "raters" else None
        prior = rope_prior(rows) if self.rope_prior and isinstance(rows, AttentionRows) else None
        return rows.reduce(self.heads, self.rows, normalise=self.normalise, weights=weights, prior=prior)


def raters(ctx: PruneContext) -> Tensor:
    """Return [B, R] bool: the rows `after_image` whose text is closer to the image than the average row is.

    R_t = mean over visual tokens v of softmax over t of (v . t), raw input embeddings without scale; raters have R_t > mean R
    (SparseVLM, eq. 5).
    """
    visual, text = ctx.read(_EMBEDS).float(), ctx.read(_WORDS)
    wanted = text.valid & text.after_image
    order = (~wanted).to(torch.uint8).argsort(dim=1, stable=True)[:, : max(int(wanted.sum(dim=1).max()), 1)]
    there = wanted.gather(1, order)
    states = text.states.float().gather(1, order.unsqueeze(-1).expand(-1, -1, text.states.shape[-1]))
    logits = (visual @ states.transpose(1, 2)).masked_fill(~there.unsqueeze(1), torch.finfo(torch.float32).min)
    seen = logits.softmax(dim=-1) * ctx.valid.unsqueeze(-1)
    mean = seen.sum(dim=1) / ctx.valid.sum(dim=1, keepdim=True).clamp(min=1)  # [B, R]
    average = mean.masked_fill(~there, 0.0).sum(dim=1, keepdim=True) / there.sum(dim=1, keepdim=True).clamp(min=1)
    chosen = (mean > average) & there
    return torch.where(chosen.any(dim=1, keepdim=True), chosen, there)  # one row alone is never above its own mean


def rope_prior(rows: AttentionRows, floor: float = 0.05) -> Callable[[slice], Tensor]:
    """Return the function from a slice of query rows to [B, 1, r, N]: attention that the rotary embedding alone would give."""
    assert rows.row_positions is not None and rows.column_positions is not None
    width, base = rows.queries.shape[-1], rows.rope_base or 1e4
    theta = base ** (-torch.arange(0, width, 2, device=rows.queries.device).float() / width)

    def prior(block: slice) -> Tensor:
        assert rows.row_positions is not None and rows.column_positions is not None
        delta = rows.row_positions[:, block, None].float() - rows.column_positions[:, None, :].float()
        waves = torch.zeros_like(delta)
        for frequency in theta:  # one term at a time: [B, r, N, d / 2] would be the largest tensor of the layer
            waves += torch.cos(delta * frequency)
        return (waves * (2 / math.sqrt(width))).clamp(min=floor).unsqueeze(1)

    return prior


@hookimpl
def register_scorers(register: Callable[[type], None]) -> None:
    """Offer this scorer."""
    register(Attention)
