"""Several selectors that share one budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from tokenprune.budget import Budget, Rounding
from tokenprune.decision import select_exactly
from tokenprune.hookspecs import hookimpl
from tokenprune.interfaces import Grouping, Number, Options, PruneContext, Scorer, Selector
from tokenprune.selectors import Stride, TopK
from tokenprune_scorers._rows import best

__all__ = ["Part", "Union"]


@dataclass(frozen=True)
class Part(Options):
    """One selector of a union and how many tokens it chooses.

    selector: which rule. scorer: whose scores it sees; the stage's own when left out.
    share: of the budget of the union; tokens: a number. A part with neither takes what is left of the budget.
    rounding: of the share: `floor` of the decimal number as written, `half_even`, `half_up` or `ceil`.
    per: the count is divided equally over the groups of a grouping, rounded down; what that leaves goes to later parts.
    """

    selector: Selector = field(default_factory=TopK)
    scorer: Scorer | None = None
    share: Number | None = None
    tokens: Number | None = None
    rounding: Rounding = "floor"
    per: Grouping | None = None

    def __post_init__(self) -> None:
        if self.share is not None and self.tokens is not None:
            raise ValueError("a part states its share or its tokens, not both")
        if isinstance(self.share, int | float) and not 0 <= self.share <= 1:
            raise ValueError(f"share is a share of the budget, in [0, 1], not {self.share}")
        if isinstance(self.tokens, float) or (isinstance(self.tokens, int) and self.tokens < 0):
            raise ValueError(f"tokens is a number of tokens, not {self.tokens}")

    @property
    def takes_rest(self) -> bool:
        """Whether its count is what the others left."""
        return self.share is None and self.tokens is None and not self.selector.counts_itself

    def count(self, ctx: PruneContext, keep: Tensor) -> Tensor:
        """Return [B] int64, how many tokens it asks for out of a budget of `keep` [B]."""
        if self.tokens is not None:
            return Budget(keep_tokens=self.tokens).counts(ctx, keep)
        if self.share is None:
            return keep
        return Budget(keep_ratio=self.share, of="original", rounding=self.rounding).counts(ctx, keep)


@dataclass(frozen=True)
class Union(Selector):
    """Several selectors choose in turn, each its share of the budget (VisPruner, VisionZip, VScan: https://arxiv.org/abs/2505.22654).

    parts: each a `selector`, its `scorer` (the stage's own when left out), and how many it chooses: a `share` of the budget,
        a number of `tokens`, or, with neither, all that is left of the budget. `rounding` says how a share is rounded;
        `per` divides the count equally over groups.

    A part chooses among the tokens no part before it chose. One whose selector counts itself (a grid, a threshold, dilated
    seeds) sees all tokens and adds what it finds; its share is then what it starts from.

    When a part takes the rest, exactly the budget stays, and a part that finds more than is left of it keeps the highest of
    its scores. When none does (FEATHER: 30 % by attention and a grid), everything found stays; a stage that has a budget all
    the same makes it exact by its own scores.
    """

    name: ClassVar[str] = "union"

    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("parts names at least one selector")
        if any(part.takes_rest for part in self.parts[:-1]):
            raise ValueError("only the last part can take the rest; give the others a share or a number of tokens")

    @classmethod
    def example(cls) -> Union:
        """Return half by score, half evenly spaced."""
        return cls((Part(TopK(), share=0.5), Part(Stride())))

    @property
    def counts_itself(self) -> bool:  # type: ignore[override]  # the only selector whose options decide it
        """Whether no part takes the rest."""
        return not self.parts[-1].takes_rest

    def select(self, scores: Tensor, keep: Tensor, ctx: PruneContext) -> Tensor:
        """Return [B, N] bool."""
        chosen = torch.zeros_like(ctx.valid)
        for part in self.parts:
            own = scores if part.scorer is None else ctx.score(part.scorer)
            left = (keep - chosen.sum(dim=1)).clamp(min=0)
            inside = replace(ctx, scores=own)
            if part.selector.counts_itself:
                found = _found(part, inside, keep) & ~chosen
                chosen = chosen | (found if self.counts_itself else best(own, left, found))
            else:
                wanted = left if part.takes_rest else torch.minimum(part.count(ctx, keep), left)
                chosen = chosen | _chosen(part, inside, wanted, chosen)
        return chosen


def _found(part: Part, ctx: PruneContext, keep: Tensor) -> Tensor:
    """Return [B, N] bool: what a selector that counts itself finds among all tokens."""
    group = _split(ctx, part.per)
    count = part.count(ctx, keep)
    if part.per is not None:
        count = count // torch.bincount(group.row_of_group, minlength=len(count)).clamp(min=1)
    wanted = torch.minimum(count[group.row_of_group], group.valid.sum(dim=1))
    return group.spread(select_exactly(part.selector, wanted, group, exact=False))


def _chosen(part: Part, ctx: PruneContext, wanted: Tensor, taken: Tensor) -> Tensor:
    """Return [B, N] bool: `wanted[b]` tokens of each row that are not taken (fewer where groups are short of them)."""
    if part.per is not None:
        groups = _split(ctx, part.per)
        wanted = wanted // torch.bincount(groups.row_of_group, minlength=len(wanted)).clamp(min=1)
    group = _split(ctx, part.per, taken)
    free = ~group.cut(taken)
    # Taken tokens make groups of their own, of which none stays: a selector never sees both kinds at once.
    count = torch.minimum(wanted[group.row_of_group], (free & group.valid).sum(dim=1))
    return group.spread(select_exactly(part.selector, count, group))


def _split(ctx: PruneContext, per: Grouping | None, taken: Tensor | None = None) -> PruneContext:
    """Return the context of the groups of `per` (whole rows without it), each cut in two where some of it is taken."""
    labels = torch.zeros_like(ctx.ordinal) if per is None else per.labels(ctx.only(per))
    return ctx.grouped(_Given(labels if taken is None else 2 * labels + taken))


@dataclass(frozen=True, eq=False)
class _Given(Grouping):
    """Groups whose labels are known."""

    given: Tensor

    def labels(self, ctx: PruneContext) -> Tensor:
        """Return [B, N] int64."""
        return self.given


@hookimpl
def register_selectors(register: Callable[[type], None]) -> None:
    """Offer this selector."""
    register(Union)
