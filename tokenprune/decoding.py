"""The `decode` site: at every decoding step, which visual keys the later layers see. The cache keeps them all.

A view is a mask, not a copy: gathering keys and values anew each step moves about as many bytes as it saves, and the tokens
must be able to return. What is remembered from step to step lives in the cache, so that beams and requests never meet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tokenprune import cache as caches
from tokenprune import compat
from tokenprune.decision import decide
from tokenprune.forward import Forward
from tokenprune.interfaces import AttentionRows, PruneContext
from tokenprune.plan import Plan, PlannedStage
from tokenprune.policy import Refresh
from tokenprune.reading import bias_of
from tokenprune.report import DecodeRecord
from tokenprune.sequence import Slots, Visuals

__all__ = ["Decoding", "choose_view"]


@dataclass(eq=False)
class Decoding:
    """The decoding stage of a plan. Between steps it holds nothing but the record of what happened."""

    stage: PlannedStage
    seed: int
    record: DecodeRecord = field(default_factory=DecodeRecord)

    @classmethod
    def of(cls, plan: Plan) -> Decoding | None:
        """Return the decoding stage of a plan, if it has one."""
        found = [stage for stage in plan.stages if stage.decodes]
        return cls(found[0], plan.policy.seed) if found else None

    def has_view(self, index: int) -> bool:
        """Return whether decoder layer `index` sees a part of the visual tokens only."""
        return index >= self.stage.layer

    def before_layer(self, run: Forward, index: int, given: Mapping[str, Any]) -> None:
        """Note the visual tokens of a prefill; choose what a decoding step sees."""
        name = compat.cache_argument(given)
        if index != self.stage.layer or name is None:
            return
        layer = caches.compact(given[name], index)
        seen = compat.tokens_seen(given, index)
        if run.visuals is not None:
            layer.watched = _noted(run, layer.watched, seen)
            self.record = DecodeRecord(self.stage.site, self.stage.layer)
        elif layer.watched is not None and run.looked is not None and run.length == 1:
            layer.watched, run.hidden = self._step(run.looked, layer.watched, caches.slots_of(given[name], index - 1))
        run.looked = None

    def watch(self, run: Forward, index: int, attention: nn.Module, taps: list[Any]) -> None:
        """Before the layer that tells where the token being decoded looks: look at its kernel call."""
        if index == self.stage.layer - 1 and run.visuals is None and run.length == 1:
            taps.append(compat.attention_taps.set(attention, partial(setattr, run, "looked")))

    def visible(self, run: Forward, index: int, keys: Slots) -> Slots:
        """Return the slots that layer `index` may see in this step."""
        return keys if run.hidden is None or not self.has_view(index) else keys.hide(run.hidden)

    def _step(
        self, call: compat.AttentionCall, watched: caches.Watched, slots: Slots | None
    ) -> tuple[caches.Watched, Tensor | None]:
        """Return what is remembered after this step, and [B, L] bool: logical positions hidden in it."""
        visuals = Visuals.of(watched.visual, watched.counts)  # its slots are logical positions here
        keys = call.key.shape[-2]
        columns = visuals.slots
        if slots is not None:  # the layer before may hold a compact sequence of its own
            place = torch.zeros(columns.shape[0], slots.length, dtype=torch.long, device=columns.device)
            at = torch.arange(keys, device=columns.device).expand(columns.shape[0], -1)
            there = slots.positions[:, -keys:]
            place.scatter_reduce_(1, there.clamp(min=0), at.masked_fill(there < 0, 0), "amax")
            columns = place.gather(1, columns)
        ones = torch.ones(columns.shape[0], 1, dtype=torch.bool, device=columns.device)
        rows = AttentionRows(
            queries=call.query,
            keys=call.key,
            bias=bias_of(call, torch.zeros_like(ones, dtype=torch.long), keys - 1),
            columns=columns,
            rows_valid=ones,
            scaling=call.scaling,
            softcap=call.softcap,
            columns_valid=visuals.valid,
        )
        signals = dict.fromkeys(self.stage.signals, rows)
        ctx = PruneContext(visuals.valid, visuals.ordinal, self.seed, self.stage.number, signals)
        rule = self.stage.refresh or Refresh()
        kept, scores, similarity, refreshed = choose_view(self.stage, ctx, watched.scores, rule)
        hidden = torch.zeros_like(watched.visual).scatter_(1, visuals.slots, ~kept & visuals.valid)
        if watched.hidden is not None:
            last = watched.hidden if rule.otherwise == "reuse" else torch.zeros_like(hidden)
            hidden = torch.where(refreshed.unsqueeze(1), hidden, last)
        self.record.add(similarity, refreshed, hidden, watched.visual)
        return replace(watched, scores=scores, hidden=hidden), hidden


def choose_view(
    stage: PlannedStage, ctx: PruneContext, before: Tensor | None, rule: Refresh
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Return ([B, N] kept, [B, N] scores, [B] similarity to the scores `before`, [B] whether the view is made anew).

    Similarity is the cosine of the two score vectors; a first step has none (0) and makes its view (DyCoke, eq. 6 of
    https://arxiv.org/abs/2411.15024; there the kept number is int(n (1 - p))).
    """
    total = ctx.valid.sum(dim=1)
    decision = decide(stage, ctx, original=total)
    scores = decision.scores
    if before is None or scores is None:
        none = torch.zeros(len(total), device=total.device)
        return decision.kept, scores, none, torch.ones_like(none, dtype=torch.bool)
    now, last = (x.masked_fill(~ctx.valid, 0.0) for x in (scores, before))
    similarity = torch.nn.functional.cosine_similarity(now, last, dim=1)
    return decision.kept, scores, similarity, similarity < rule.similarity_below


def _noted(run: Forward, before: caches.Watched | None, seen: int) -> caches.Watched:
    """Return the visual tokens known after this chunk, by logical position."""
    visuals = run.visuals
    assert visuals is not None
    at = visuals.slots if run.view is None else run.view.index.gather(1, visuals.slots)
    new = torch.zeros(run.rows, run.length + 1, dtype=torch.bool, device=at.device)
    new = new.scatter_(1, at.masked_fill(~visuals.valid, run.length), True)[:, : run.length]
    if before is None:
        earlier, counts = new.new_zeros(run.rows, seen), (0,) * run.rows
    else:
        gap = new.new_zeros(run.rows, max(seen - before.visual.shape[1], 0))
        earlier, counts = torch.cat([before.visual[:, :seen], gap], dim=1), before.counts
    both = tuple(a + b for a, b in zip(counts, visuals.counts, strict=True))
    return caches.Watched(torch.cat([earlier, new], dim=1), both)
