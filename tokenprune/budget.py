"""How many tokens stay: plain numbers a planner can add up, or quantities known only when the tokens are."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, overload

import torch
from torch import Tensor

from tokenprune.interfaces import Grouping, Number, Options, PruneContext, Quantity, Scorer

__all__ = ["Budget", "Quota", "Rounding", "exact_floor"]

Rounding = Literal["floor", "half_even", "half_up", "ceil"]


@overload
def _rounded(count: int, ratio: Fraction, rounding: Rounding) -> int: ...
@overload
def _rounded(count: Tensor, ratio: Fraction, rounding: Rounding) -> Tensor: ...
def _rounded(count: Any, ratio: Fraction, rounding: Rounding) -> Any:
    """Return count * ratio, rounded in whole numbers: exact for a decimal ratio, the same on host and device."""
    p, q = ratio.numerator, ratio.denominator
    scaled = count * p
    if rounding == "ceil":
        return -(-scaled // q)
    down, rest = scaled // q, scaled % q
    if rounding == "half_up":
        return down + (2 * rest >= q)
    if rounding == "half_even":
        return down + ((2 * rest > q) | ((2 * rest == q) & (down % 2 == 1)))
    return down


def exact_floor(n: int, ratio: float) -> int:
    """Return floor(n * ratio) on the decimal number as written: the default rounding rule of the project."""
    return _rounded(n, _ratio(ratio), "floor")


def _ratio(value: float) -> Fraction:
    """Return the decimal number as written: binary floats would make 100 * 0.29 one too small."""
    return Fraction(repr(value))


@dataclass(frozen=True)
class Quota(Options):
    """How the tokens of a budget are divided over the groups of a finer grouping.

    over: the groups. weight: `mean` or `sum` of the scores of a group, `size` (its number of tokens), `softmax` of the
        mean scores / temperature, or `surplus`: group size x (1 + softmax - mean softmax), VidCom2's frame budget.
    scorer: whose scores; the stage's own when left out. temperature: of the softmax.
    rounding: `largest_remainder` and `top_weights` (what the floors leave goes to the heaviest groups) give exactly the
        budget; `half_even` rounds each group by itself, so that the total is near it.
    min_tokens: never fewer in a group that has them. overflow: a quota above the size of its group is handed on to the
        others (`redistribute`) or `lost`.
    """

    over: Grouping
    weight: Literal["mean", "sum", "size", "softmax", "surplus"] = "mean"
    scorer: Scorer | None = None
    temperature: float = 1.0
    rounding: Literal["largest_remainder", "top_weights", "half_even"] = "largest_remainder"
    min_tokens: int = 0
    overflow: Literal["redistribute", "lost"] = "redistribute"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ValueError(f"temperature is a finite number > 0, not {self.temperature}")
        if self.min_tokens < 0:
            raise ValueError(f"min_tokens is a number of tokens, not {self.min_tokens}")

    @property
    def is_exact(self) -> bool:
        """Whether the groups together get exactly the budget."""
        return self.rounding != "half_even" and self.overflow == "redistribute"

    def divide(self, keep: Tensor, amount: Tensor, inner: PruneContext) -> Tensor:
        """Return [G] int64, how many tokens each group of `inner` keeps.

        keep: [B] int64 budget of the rows the groups were made from. amount: [B] float64, the same before rounding.
        """
        row, rows = inner.row_of_group, len(keep)
        size = inner.valid.sum(dim=1)
        share = self._weights(inner, row, rows).double()
        total = torch.zeros(rows, dtype=torch.float64, device=size.device).index_add_(0, row, share)
        even = size.double() / torch.zeros_like(total).index_add_(0, row, size.double()).clamp(min=1)[row]
        share = torch.where(total[row] > 0, share / torch.where(total > 0, total, 1.0)[row], even)
        if self.rounding == "half_even":
            return torch.minimum((share * amount[row]).round().long().clamp(min=self.min_tokens), size)
        wanted = share * keep[row]
        return self._exactly(wanted, share, keep, size, row)

    def _weights(self, inner: PruneContext, row: Tensor, rows: int) -> Tensor:
        size = inner.valid.sum(dim=1).float()
        if self.weight == "size":
            return size
        scores = inner.score(self.scorer) if self.scorer is not None else inner.scores
        assert scores is not None
        total = scores.masked_fill(~inner.valid, 0.0).sum(dim=1)
        if self.weight == "sum":
            return total.clamp(min=0)
        mean = total / size.clamp(min=1)
        if self.weight == "mean":
            return mean.clamp(min=0)
        top = torch.full((rows,), -torch.inf, device=mean.device).scatter_reduce_(0, row, mean, "amax")
        power = ((mean - top[row]) / self.temperature).exp()
        groups = torch.zeros(rows, device=mean.device).index_add_(0, row, torch.ones_like(power))
        power = power / torch.zeros(rows, device=mean.device).index_add_(0, row, power)[row]
        if self.weight == "softmax":
            return power
        return size * (1 + power - 1 / groups[row])

    def _exactly(self, wanted: Tensor, share: Tensor, keep: Tensor, size: Tensor, row: Tensor) -> Tensor:
        """Round down, then hand out what is left one token a group at a time, in the order the rounding rule gives."""
        rows = len(keep)
        given = torch.minimum(wanted.floor().long().clamp(min=self.min_tokens), size)
        given = self._within(given, keep, row)
        first = wanted - wanted.floor() if self.rounding == "largest_remainder" else share
        if self.overflow == "lost":
            left = keep - torch.zeros_like(keep).index_add_(0, row, wanted.floor().long())
            return torch.minimum(wanted.floor().long() + self._next(first, left.clamp(min=0), row), size)
        order = first
        while (
            True
        ):  # a round gives every group with room one token, so it ends after as many rounds as the largest group
            left = keep - torch.zeros_like(keep).index_add_(0, row, given)
            room = given < size
            there = torch.zeros(rows, dtype=torch.long, device=row.device).index_add_(0, row, room.long())
            if not bool(((left > 0) & (there > 0)).any()):
                return given
            given = given + (self._next(order.masked_fill(~room, -torch.inf), left.clamp(min=0), row) & room)
            order = share

    def _within(self, given: Tensor, keep: Tensor, row: Tensor) -> Tensor:
        """Take minimums back from the last groups of a row whose budget is smaller than their sum."""
        before = given.cumsum(0) - given
        first = torch.zeros_like(keep).scatter_reduce_(0, row, before, "amin", include_self=False)
        return torch.minimum(given, (keep[row] - (before - first[row])).clamp(min=0))

    def _next(self, order: Tensor, left: Tensor, row: Tensor) -> Tensor:
        """Return [G] 0 or 1: the `left[b]` first groups of each row by descending `order`, ties to the earlier group."""
        by_order = order.argsort(descending=True, stable=True)
        by_row = by_order[row[by_order].argsort(stable=True)]
        start = torch.searchsorted(row[by_row].contiguous(), row[by_row].contiguous())
        rank = torch.empty_like(row)
        rank[by_row] = torch.arange(len(row), device=row.device) - start
        return (rank < left[row]).long()


@dataclass(frozen=True)
class Budget(Options):
    """How many visual tokens stay at a stage: exactly one of `keep_ratio` and `keep_tokens`.

    keep_ratio: share that stays, in [0, 1], of the tokens `alive` at the site or of the `original` ones.
    keep_tokens: number that stays. Where there are fewer, all stay.
    of: what keep_ratio is a share of.
    rounding: of the share: `floor` of the decimal number as written (0.29 of 100 is 29), `half_even` (Python's round),
        `half_up` or `ceil`.
    min_tokens, max_tokens: never fewer, never more (the released V2Drop code keeps one token even at ratio 0).
    multiple_of: kept counts are rounded down to a multiple, so that they fill hardware tiles (not below one multiple).
    per: the budget holds for each group by itself (`image`, `frame` ...) and not for the prompt as a whole.
    quota: divides it over finer groups.
    """

    keep_ratio: Number | None = None
    keep_tokens: Number | None = None
    of: Literal["alive", "original"] = "alive"
    rounding: Rounding = "floor"
    min_tokens: int = 0
    max_tokens: int | None = None
    multiple_of: int = 1
    per: Grouping | None = None
    quota: Quota | None = None

    def __post_init__(self) -> None:
        if (self.keep_ratio is None) == (self.keep_tokens is None):
            raise ValueError("a budget states exactly one of keep_ratio and keep_tokens")
        ratio, tokens = self.keep_ratio, self.keep_tokens
        if isinstance(ratio, int | float) and not 0 <= ratio <= 1:
            raise ValueError(f"keep_ratio is the share that stays, in [0, 1], not {ratio}")
        if isinstance(tokens, float) or (isinstance(tokens, int) and not 0 <= tokens < 1 << 31):
            raise ValueError(f"keep_tokens is a number of tokens, not {tokens}")
        if self.min_tokens < 0:
            raise ValueError(f"min_tokens is a number of tokens, not {self.min_tokens}")
        if self.max_tokens is not None and self.max_tokens < self.min_tokens:
            raise ValueError(f"max_tokens is at least min_tokens, not {self.max_tokens}")
        if self.multiple_of < 1:
            raise ValueError(f"multiple_of is at least 1, not {self.multiple_of}")
        if self.of == "original" and tokens is not None:
            raise ValueError("'of: original' belongs to keep_ratio; keep_tokens is a number and takes no base")
        if self.of == "original" and self.per is not None:
            raise ValueError("'of: original' counts the whole prompt and does not go with 'per'")

    @property
    def is_plain(self) -> bool:
        """Whether the count follows from the number of tokens alone, so that a planner can add it up."""
        depends = isinstance(self.keep_ratio, Quantity) or isinstance(self.keep_tokens, Quantity)
        return self.per is None and not depends and (self.quota is None or self.quota.is_exact)

    def count(self, alive: int, original: int) -> int:
        """Return how many of `alive` tokens stay, out of `original` that entered the model; an image counts as a prompt.

        A quantity is not known here, nor how many frames or windows there are: then all tokens may stay.
        """
        if isinstance(self.keep_tokens, Quantity) or isinstance(self.keep_ratio, Quantity):
            return alive
        if self.keep_tokens is not None and self.per is not None and not self.per.whole_images:
            return alive
        if self.keep_tokens is not None:
            wanted = int(self.keep_tokens)
        else:
            assert self.keep_ratio is not None
            wanted = _rounded(original if self.of == "original" else alive, _ratio(self.keep_ratio), self.rounding)
        if self.multiple_of > 1:
            wanted = max(wanted // self.multiple_of * self.multiple_of, min(self.multiple_of, wanted))
        if self.max_tokens is not None:
            wanted = min(wanted, self.max_tokens)
        return min(max(wanted, self.min_tokens), alive)

    def amount(self, ctx: PruneContext, original: Tensor) -> Tensor:
        """Return [B] float64: the budget of each row before any rounding."""
        if self.keep_tokens is not None:
            return ctx.number(self.keep_tokens).double()
        assert self.keep_ratio is not None
        base = original if self.of == "original" else ctx.valid.sum(dim=1)
        return base * ctx.number(self.keep_ratio).double()

    def counts(self, ctx: PruneContext, original: Tensor) -> Tensor:
        """Return [B] int64: how many tokens of each row of the context stay; `original`: [B], before anything left."""
        alive = ctx.valid.sum(dim=1)
        base = original if self.of == "original" else alive
        if self.keep_tokens is not None:
            wanted = (ctx.number(self.keep_tokens).double() + 1e-4).floor().long()  # statistics are float32
        elif isinstance(self.keep_ratio, Quantity):
            ratio = ctx.number(self.keep_ratio).double().clamp(0, 1)
            # Statistics are float32: a share of exactly 0.7 must still be 56 of 80.
            wanted = _ROUND[self.rounding](base * ratio + 1e-6 * base).long()
        else:
            assert self.keep_ratio is not None
            wanted = _rounded(base, _ratio(self.keep_ratio), self.rounding)
        if self.multiple_of > 1:
            wanted = (wanted // self.multiple_of * self.multiple_of).maximum(wanted.clamp(max=self.multiple_of))
        return torch.minimum(wanted.clamp(min=self.min_tokens, max=self.max_tokens), alive)


_ROUND: dict[str, Callable[[Tensor], Tensor]] = {
    "floor": torch.floor,
    "half_even": torch.round,
    "half_up": lambda x: torch.floor(x + 0.5),
    "ceil": lambda x: torch.ceil(x - 2e-6 * x.abs()),
}
