"""What a stage decides: pure tensors in, pure tensors out. The engine gives the context and carries the decision out.

The order is always the same: scores over the whole prompt; groups, if the budget is per group; how many stay in each; which;
and what the rest leaves behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from tokenprune.budget import Budget
from tokenprune.errors import PluginContractError
from tokenprune.interfaces import Merger, PruneContext, Scorer, Selector

__all__ = ["Decision", "Parts", "decide", "select_exactly"]

Require = Callable[[Tensor, str], None]


class Parts(Protocol):
    """What a decision needs of a stage."""

    @property
    def scorer(self) -> Scorer | None:
        """How tokens are ranked."""

    @property
    def selector(self) -> Selector:
        """Which stay."""

    @property
    def merger(self) -> Merger:
        """What becomes of the rest."""

    @property
    def budget(self) -> Budget | None:
        """How many stay."""


@dataclass(frozen=True, eq=False)
class Decision:
    """What becomes of the visual tokens at a stage.

    kept: [B, N] bool, which of them continue, extra tokens of the merger included. counts: per row.
    selected: [B, N] bool, what the selector kept. scores: [B, N], or None for a selector that needs none.
    states: [B, N, D] new states, or None where no state changed. sizes: [B, N], or None while no merger counts.
    """

    kept: Tensor
    counts: tuple[int, ...]
    selected: Tensor
    scores: Tensor | None
    states: Tensor | None = None
    sizes: Tensor | None = None


def decide(
    parts: Parts,
    ctx: PruneContext,
    *,
    original: Tensor,
    keep: Tensor | None = None,
    counts: Sequence[int] | None = None,
    hidden: Tensor | None = None,
    require: Require | None = None,
    where: str = "this stage",
) -> Decision:
    """Decide a stage.

    ctx: context over whole prompts. original: [B] tokens before anything was dropped. keep: [B] how many stay, where the
    planner knows (then the budget is not read); counts: the same numbers on the host, so that nobody waits for the device.
    hidden: [B, N, D] states for the merger; without them nothing is merged. require: called with a condition and what it
    means that it does not hold; the default checks at once. where: names the stage in messages.
    """
    require = require or _at_once
    budget = parts.budget
    # Scores are float32 whatever the caller's autocast says: a threshold or a tie must not depend on it.
    with torch.no_grad(), torch.autocast(ctx.valid.device.type, enabled=False):
        if parts.scorer is not None:
            scores = ctx.score(parts.scorer)
            finite = (scores.isfinite() | ~ctx.valid).all()
            require(finite, f"scorer {parts.scorer.name!r} returned a score that is not finite at {where}")
            ctx = replace(ctx, scores=scores)
        group = ctx.grouped(budget.per) if budget is not None and budget.per is not None else ctx
        if keep is None:
            keep = _budgeted(budget, group, original)
        selected = _select(parts, group, budget, keep, original, require, where)
    kept, states, sizes = selected, None, None
    if hidden is not None and parts.merger.changes_states:  # with gradients: a merged state is part of the model
        kept, states, sizes = _merge(parts.merger, group, ctx, selected, hidden, require, where)
    elif group is not ctx:
        kept = group.spread(selected)
    if group is not ctx:
        selected = group.spread(selected)
    known = counts is not None and states is None and not parts.selector.counts_itself
    left = tuple(counts) if known and counts is not None else tuple(kept.sum(dim=1).tolist())
    return Decision(kept, left, selected, ctx.scores, states, sizes)


def _at_once(holds: Tensor, message: str) -> None:
    if not holds:
        raise PluginContractError(message)


def _budgeted(budget: Budget | None, group: PruneContext, original: Tensor) -> Tensor:
    if budget is None:  # a selector that counts itself
        return group.valid.sum(dim=1)
    return budget.counts(group, original)


def _select(
    parts: Parts,
    group: PruneContext,
    budget: Budget | None,
    keep: Tensor,
    original: Tensor,
    require: Require,
    where: str,
) -> Tensor:
    quota = budget.quota if budget is not None else None
    if budget is not None and quota is not None:
        inner = group.grouped(quota.over)
        keep = quota.divide(keep, budget.amount(group, original), inner)
        return inner.spread(select_exactly(parts.selector, keep, inner, True, require, where))
    return select_exactly(parts.selector, keep, group, budget is not None, require, where)


def select_exactly(
    selector: Selector,
    keep: Tensor,
    ctx: PruneContext,
    exact: bool = True,
    require: Require | None = None,
    where: str = "this stage",
) -> Tensor:
    """Return [B, N] bool, what `selector` keeps of each row of `ctx`, with its contract checked.

    exact: whether a selector that counts itself is topped up, or trimmed, to exactly `keep` by score (by position where
    there are no scores).
    """
    require = require or _at_once
    scores = ctx.scores if ctx.scores is not None else ctx.valid.float().masked_fill(~ctx.valid, -torch.inf)
    kept = selector.select(scores, keep, ctx.only(selector))
    if kept.shape != ctx.valid.shape or kept.dtype != torch.bool:
        raise PluginContractError(
            f"selector {selector.name!r} returned {kept.dtype} {tuple(kept.shape)}, not bool {tuple(ctx.valid.shape)}"
        )
    if selector.counts_itself:
        kept = kept & ctx.valid
        return _reconciled(kept, scores, keep) if exact else kept
    right = ((kept & ctx.valid).sum(dim=1) == keep).all() & ~(kept & ~ctx.valid).any()
    require(right, f"selector {selector.name!r} did not keep exactly the tokens asked for at {where}")
    return kept


def _reconciled(kept: Tensor, scores: Tensor, keep: Tensor) -> Tensor:
    """Return exactly `keep` tokens a row: chosen ones first, each part by descending score."""
    by_score = scores.argsort(dim=1, descending=True, stable=True)
    order = by_score.gather(1, (~kept).gather(1, by_score).to(torch.uint8).argsort(dim=1, stable=True))
    rank = torch.empty_like(order).scatter_(1, order, torch.arange(kept.shape[1], device=kept.device).expand_as(order))
    return rank < keep.unsqueeze(1)


def _merge(
    merger: Merger,
    group: PruneContext,
    ctx: PruneContext,
    selected: Tensor,
    hidden: Tensor,
    require: Require,
    where: str,
) -> tuple[Tensor, Tensor, Tensor | None]:
    inside = hidden if group is ctx else group.cut(hidden)
    merged = merger.merge(inside, selected, group.only(merger))
    alive, keep = group.valid.sum(dim=1), selected.sum(dim=1)
    right = (merged.kept.sum(dim=1) == keep + merger.extra(alive, keep)).all() & ~(merged.kept & ~group.valid).any()
    require(right, f"merger {merger.name!r} did not leave the number of tokens it announced at {where}")
    if group is ctx:
        return merged.kept, merged.states, merged.sizes
    sizes = None if merged.sizes is None else group.spread(merged.sizes)
    return group.spread(merged.kept), group.spread(merged.states, into=hidden), sizes
