"""Half of the tokens look for their closest match in the other half; those with the closest ones leave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tokenprune.hookspecs import hookimpl
from tokenprune.interfaces import PruneContext, Selector
from tokenprune_scorers._clusters import Features, Pairs, Ranks, compact, nearest, ranked, take


@dataclass(frozen=True)
class Bipartite(Selector, Features):
    """Tokens unlike all others stay: bipartite soft matching (ToMe, https://arxiv.org/abs/2210.09461).

    Tokens are split into sources and targets. The sources closest to any target leave, as many as the budget says; one round
    takes out at most the sources, and the next splits what is left anew.

    sources: every other token, from the first on (`even`, as in ToMe) or from the second on (`odd`, which is ToMe's split of
        a tower whose CLS token counts as number 0), or the `worse` half by score (TokenCarve, https://arxiv.org/abs/2503.10501).
        The merger `nearest_mean` has to be told the same targets.
    among: what ranks outside these by score leaves first, whatever it is like; needs a scorer.
    features, heads, layer, from, metric: what is compared, and how.

    Differs from the authors' code: any number of tokens may leave (theirs takes at most half), and kept tokens stay in order.
    """

    name: ClassVar[str] = "bipartite"

    sources: Literal["even", "odd", "worse"] = "even"
    among: Ranks | None = None

    @property
    def uses_scores(self) -> bool:  # type: ignore[override]
        """Whether tokens are split or ranked by score."""
        return self.among is not None or self.sources == "worse"

    def select(self, scores: Tensor, keep: Tensor, ctx: PruneContext) -> Tensor:
        """Return [B, N] bool."""
        x = self.compared(ctx)
        alive = ctx.valid if self.among is None else self.among.of(ctx, at_least=keep)
        while bool(((excess := alive.sum(dim=1) - keep) > 0).any()):
            target = self._targets(scores, alive)
            source = alive & ~target
            index, there = compact(target)
            gap = nearest(Pairs(x, take(x, index), self.metric), there)[1]
            closeness = (-gap).clamp(
                min=torch.finfo(gap.dtype).min
            )  # a source without a target still ranks before padding
            first = ranked(closeness.masked_fill(~source, -torch.inf))
            alive = alive & ~(source & (first < excess.unsqueeze(1)))
        return alive

    def _targets(self, scores: Tensor, alive: Tensor) -> Tensor:
        """Return [B, N] bool; a token alone is a source, so that it can leave."""
        if self.sources == "worse":
            better = torch.div(alive.sum(dim=1, keepdim=True), 2, rounding_mode="floor")
            return alive & (ranked(scores.masked_fill(~alive, -torch.inf)) < better)
        place = alive.cumsum(dim=1) - 1
        alone = alive.sum(dim=1, keepdim=True) == 1
        return alive & (place % 2 == (1 if self.sources == "even" else 0)) & ~alone


@hookimpl
def register_selectors(register: Callable[[type[Selector]], None]) -> None:
    """Offer this selector."""
    register(Bipartite)
