"""One greedy engine for selectors that choose token by token, each by what was chosen before it.

A selector gives a state; the engine asks it for the gain of every token, takes the best one of every row at once, and
tells it what was taken. Similarities are float32.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

import torch
from pydantic import Field
from torch import Tensor

from tokenprune.interfaces import PruneContext, Selector
from tokenprune.tokens import Signal, Site
from tokenprune_scorers._rows import places

__all__ = ["Compared", "Cosines", "Distances", "Greedy", "State", "ranks"]

WHOLE = 4096
"""Up to so many tokens a row, all pairs are kept (64 MiB a row); above it they are computed when asked for."""
_BLOCK = 512


class Cosines:
    """Cosine similarity of all pairs of tokens of each row; 0 to a token of zeros, and on padding."""

    def __init__(self, states: Tensor) -> None:
        self.x = self._prepared(states)
        self.whole = None
        if self.x.shape[1] <= WHOLE:
            pairs = self._between(self.x, self.x)
            self.whole = (pairs + pairs.mT) / 2  # i to j as far as j to i to the last bit, so that such a tie is one

    def to(self, pick: Tensor) -> Tensor:
        """Return [B, N]: of all tokens to token `pick[b]` of each row."""
        if self.whole is not None:
            return self.whole[torch.arange(len(pick), device=pick.device), pick]
        every = torch.arange(self.x.shape[1], device=pick.device).expand(len(pick), -1)
        return self.among(pick.unsqueeze(1), every)[:, 0]

    def among(self, some: Tensor, others: Tensor) -> Tensor:
        """Return [B, r, c]: of the tokens `some` [B, r] to `others` [B, c]."""
        row = torch.arange(len(some), device=some.device).unsqueeze(1)
        if self.whole is not None:
            return self.whole[row.unsqueeze(2), some.unsqueeze(2), others.unsqueeze(1)]
        return self._between(self.x[row, some], self.x[row, others])

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield a slice of r tokens and [B, r, N]: of these to all tokens."""
        step = self.x.shape[1] if self.whole is not None else _BLOCK
        for start in range(0, self.x.shape[1], max(step, 1)):
            block = slice(start, min(start + step, self.x.shape[1]))
            yield block, self.whole if self.whole is not None else self._between(self.x[:, block], self.x)

    def _prepared(self, states: Tensor) -> Tensor:
        length = states.square().sum(dim=-1, keepdim=True).sqrt()
        return states / torch.where(length > 0, length, 1.0)

    def _between(self, some: Tensor, others: Tensor) -> Tensor:
        return some @ others.mT


class Distances(Cosines):
    """Distance of all pairs of tokens of each row: 1 - cosine, not below 0, or Euclidean."""

    def __init__(self, states: Tensor, metric: Literal["cosine", "euclidean"] = "cosine") -> None:
        self.metric = metric
        super().__init__(states)

    def _prepared(self, states: Tensor) -> Tensor:
        return states if self.metric == "euclidean" else super()._prepared(states)

    def _between(self, some: Tensor, others: Tensor) -> Tensor:
        if self.metric == "euclidean":  # not by way of the dot product, whose rounding would part equal tokens
            return torch.cdist(some, others, compute_mode="donot_use_mm_for_euclid_dist")
        cosine = super()._between(some, others)
        return (1 - cosine).clamp(min=0)


def ranks(scores: Tensor, valid: Tensor) -> Tensor:
    """Return [B, N] float32: 1 for the highest score of each row, counting up; equal scores in order of position."""
    return places(scores, valid) + 1.0


@dataclass(frozen=True)
class Compared(Selector):
    """Base of selectors that compare tokens with one another.

    from_: site of the features to compare; where the stage acts by default. centre: subtract their mean first.
    """

    from_: Annotated[Site | None, Field(alias="from")] = None
    centre: Annotated[bool, Field(strict=True)] = False

    @property
    def _features(self) -> Signal:
        return Signal("hidden", at=self.from_)

    def signals(self) -> tuple[Signal, ...]:
        """Read the features to compare."""
        return (self._features,)

    def features(self, ctx: PruneContext) -> Tensor:
        """Return [B, N, D] float32, 0 on padding."""
        there = ctx.valid.unsqueeze(-1)
        states: Tensor = ctx.read(self._features).float().masked_fill(~there, 0.0)
        if not self.centre:
            return states
        mean = states.sum(dim=1, keepdim=True) / there.sum(dim=1, keepdim=True).clamp(min=1)
        return (states - mean).masked_fill(~there, 0.0)


class State(Protocol):
    """What a greedy selector remembers of its picks."""

    def gain(self) -> Tensor:
        """Return [B, N], without NaN: what each token is worth now. Those already taken, and padding, are not looked at."""
        ...

    def take(self, pick: Tensor) -> None:
        """Note that token `pick[b]` was taken in each row. A row that has enough is given one all the same."""
        ...


@dataclass(frozen=True)
class Greedy(Compared):
    """Base of selectors that take the token of highest gain, update the gains, and go on."""

    @abstractmethod
    def start(self, scores: Tensor, keep: Tensor, ctx: PruneContext) -> State:
        """Return the state before the first pick."""

    def picks(self, scores: Tensor, keep: Tensor, ctx: PruneContext) -> Tensor:
        """Return [B, K] int64: tokens in the order they were taken, -1 after `keep[b]` of them; ties to the lower index."""
        state, free, order = self.start(scores, keep, ctx), ctx.valid, []
        for _ in range(int(keep.max()) if len(keep) else 0):
            pick = state.gain().masked_fill(~free, -torch.inf).argmax(dim=1)
            free = free.scatter(1, pick.unsqueeze(1), False)
            state.take(pick)
            order.append(pick)
        if not order:
            return keep.new_zeros(len(keep), 0)
        taken = torch.stack(order, dim=1)
        return taken.masked_fill(torch.arange(len(order), device=keep.device) >= keep.unsqueeze(1), -1)

    def select(self, scores: Tensor, keep: Tensor, ctx: PruneContext) -> Tensor:
        """Return [B, N] bool."""
        picks = self.picks(scores, keep, ctx)
        tokens = ctx.valid.shape[1]
        kept = torch.zeros(len(keep), tokens + 1, dtype=torch.bool, device=keep.device)
        return kept.scatter(1, torch.where(picks < 0, tokens, picks), True)[:, :tokens]
