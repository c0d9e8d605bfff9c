"""Attention probabilities of a few query rows, computed in blocks: an n x n matrix never exists."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from tokenprune.errors import PluginContractError

__all__ = ["Attention", "AttentionRows", "GivenAttention", "RowMask"]


class Attention(ABC):
    """Attention probabilities of a few query rows over the visual tokens, never an n x n matrix."""

    @abstractmethod
    def blocks(self, rows: int = 64, normalise: Literal["full", "visual"] = "full") -> Iterator[tuple[Tensor, Tensor]]:
        """Yield ([B, H, r, N] float32 probabilities, [B, r] validity) for r <= `rows` query rows at a time.

        normalise: the softmax runs over the `full` key row, of which the visual columns are taken, or over the `visual`
        columns alone.
        """

    @abstractmethod
    def joined(self) -> Attention:
        """Return the same rows with all heads taken as one wide head (softmax of the full-width dot product)."""

    def reduce(
        self,
        heads: Literal["mean", "max", "sum", "joined"] | int = "mean",
        rows: Literal["mean", "sum", "max"] = "mean",
        *,
        normalise: Literal["full", "visual"] = "full",
        weights: Tensor | None = None,
        prior: Callable[[slice], Tensor] | None = None,
    ) -> Tensor:
        """Return [B, N]: heads reduced first, then query rows.

        heads: `joined` is one softmax over all heads together; a number m takes the mean of the m heads with most mass on
            the visual tokens (chosen after the rows were reduced).
        weights: [B, R] weight of each query row; a weighted mean divides by their sum.
        prior: gives [B or 1, 1, r, N] for a slice of the query rows; probabilities are divided by it.
        """
        if heads == "joined":
            return self.joined().reduce("mean", rows, normalise=normalise, weights=weights, prior=prior)
        total: Tensor | None = None
        mass: Tensor | None = None
        start = 0
        for probabilities, valid in self.blocks(normalise=normalise):
            block = slice(start, start + valid.shape[1])
            start = block.stop
            if prior is not None:
                probabilities = probabilities / prior(block)
            weight = valid.float() if weights is None else valid * weights[:, block].float()
            by_row = _over_heads(probabilities, heads)  # [B, H' or 1, r, N]
            if rows == "max":
                there = (weight > 0)[:, None, :, None]
                part = by_row.masked_fill(~there, -torch.inf).amax(dim=2)
                total = part if total is None else torch.maximum(total, part)
            else:
                part = (by_row * weight[:, None, :, None]).sum(dim=2)
                total = part if total is None else total + part
            mass = weight.sum(dim=1) if mass is None else mass + weight.sum(dim=1)
        assert total is not None and mass is not None
        if rows == "mean":
            total = total / torch.where(mass > 0, mass, 1.0)[:, None, None]
        total = total.nan_to_num(neginf=0.0)
        if isinstance(heads, int):
            chosen = total.sum(dim=2).argsort(dim=1, descending=True, stable=True)[:, :heads]
            total = total.gather(1, chosen.unsqueeze(2).expand(-1, -1, total.shape[2])).mean(dim=1, keepdim=True)
        return total[:, 0]


def _over_heads(probabilities: Tensor, heads: str | int) -> Tensor:
    if isinstance(heads, int):
        return probabilities
    if heads == "max":
        return probabilities.amax(dim=1, keepdim=True)
    return probabilities.mean(dim=1, keepdim=True) if heads == "mean" else probabilities.sum(dim=1, keepdim=True)


class RowMask(Protocol):
    """The additive mask of many query rows, made a few rows at a time: all of them would be an n x n matrix."""

    def rows(self, index: Tensor) -> Tensor:
        """Return [B or 1, 1 or H, r, K] of the query rows numbered `index` [B, r] among the R rows."""


@dataclass(frozen=True, eq=False)
class AttentionRows(Attention):
    """Rows computed beside the model's kernel from its own queries and keys.

    queries: [B, H, R, d] and keys [B, Hkv, K, d], as the kernel received them (or before the rotary embedding).
    bias: additive mask of the same rows (causal, padding, sliding window): [B or 1, 1 or H, R, K], a `RowMask`, or None.
    columns: [B, N] where the visual tokens are among the K keys. columns_valid: [B, N], False on the padding of shorter rows.
    rows_valid: [B, R] False where a row of the batch has fewer query rows than R.
    scaling: factor applied to q.k, as the model's own kernel uses it. softcap: logit soft cap of the model, or None.
    row_positions, column_positions: [B, R] and [B, N] prompt positions; rope_base: base of the rotary frequencies.
    """

    queries: Tensor
    keys: Tensor
    bias: Tensor | RowMask | None
    columns: Tensor
    rows_valid: Tensor
    scaling: float
    softcap: float | None = None
    columns_valid: Tensor | None = None
    row_positions: Tensor | None = None
    column_positions: Tensor | None = None
    rope_base: float | None = None

    def blocks(self, rows: int = 64, normalise: Literal["full", "visual"] = "full") -> Iterator[tuple[Tensor, Tensor]]:
        """Yield ([B, H, r, N] probabilities, [B, r] validity) for r <= `rows` query rows at a time, in float32."""
        _, heads, total, width = self.queries.shape
        batch = self.columns.shape[0]
        groups = heads // self.keys.shape[1]
        keys = self.keys.float().unsqueeze(2).transpose(-1, -2)  # [B, Hkv, 1, d, K]
        for start in range(0, total, rows):
            block = slice(start, min(start + rows, total))
            queries = self.queries[:, :, block].float().reshape(batch, -1, groups, block.stop - start, width)
            logits = (queries @ keys).flatten(1, 2) * self.scaling  # [B, H, r, K]
            if self.softcap is not None:
                logits = self.softcap * torch.tanh(logits / self.softcap)
            if self.bias is not None:
                # Masks hold the lowest number of the model's dtype; in float64 that is -inf here, and a padded row NaN.
                logits += self._mask(block).float().clamp(min=torch.finfo(torch.float32).min)
            columns = self.columns[:, None, None, :].expand(-1, heads, block.stop - start, -1)
            if normalise == "visual":
                logits = logits.gather(-1, columns)
                if self.columns_valid is not None:
                    logits = logits.masked_fill(~self.columns_valid[:, None, None, :], torch.finfo(torch.float32).min)
                probabilities = logits.softmax(dim=-1)
            else:
                probabilities = logits.softmax(dim=-1).gather(-1, columns)
            yield probabilities, self.rows_valid[:, block]

    def _mask(self, block: slice) -> Tensor:
        assert self.bias is not None
        if isinstance(self.bias, Tensor):
            return self.bias[:, :, block]
        index = torch.arange(block.start, block.stop, device=self.columns.device)
        return self.bias.rows(index.expand(self.columns.shape[0], -1))

    def joined(self) -> AttentionRows:
        """Return the rows with heads joined; keys of grouped heads are repeated to the width of the queries."""
        groups = self.queries.shape[1] // self.keys.shape[1]
        keys = self.keys.repeat_interleave(groups, dim=1)
        queries, keys = (x.transpose(1, 2).flatten(2).unsqueeze(1) for x in (self.queries, keys))
        bias = self.bias[:, :1] if isinstance(self.bias, Tensor) else self.bias
        return replace(self, queries=queries, keys=keys, bias=bias, scaling=queries.shape[-1] ** -0.5)

    def pooled(self) -> AttentionRows:
        """Return one row: the mean of the valid queries, under the mask of the last of them."""
        weight = self.rows_valid.float()[:, None, :, None]
        mean = (self.queries.float() * weight).sum(dim=2, keepdim=True) / weight.sum(dim=2, keepdim=True).clamp(min=1)
        last = (self.rows_valid.sum(dim=1) - 1).clamp(min=0)
        bias = self.bias
        if bias is not None and not isinstance(bias, Tensor):
            bias = bias.rows(last.unsqueeze(1))
        elif bias is not None:
            rows = last[:, None, None, None].expand(-1, bias.shape[1], 1, bias.shape[3])
            bias = bias.expand(len(last), -1, -1, -1).gather(2, rows)
        return replace(
            self,
            queries=mean.to(self.queries.dtype),
            bias=bias,
            rows_valid=self.rows_valid.any(dim=1, keepdim=True),
            row_positions=None if self.row_positions is None else self.row_positions.gather(1, last[:, None]),
        )


@dataclass(frozen=True, eq=False)
class GivenAttention(Attention):
    """Rows whose probabilities are known: [B, H, R, N] and, where rows of the batch differ, [B, R] validity."""

    probabilities: Tensor
    rows_valid: Tensor | None = None

    def blocks(self, rows: int = 64, normalise: Literal["full", "visual"] = "full") -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the rows in blocks; normalised over the visual columns on demand."""
        batch, _, total, _ = self.probabilities.shape
        valid = self.rows_valid
        if valid is None:
            valid = torch.ones(batch, total, dtype=torch.bool, device=self.probabilities.device)
        for start in range(0, total, rows):
            part = self.probabilities[:, :, start : start + rows].float()
            if normalise == "visual":
                part = part / part.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
            yield part, valid[:, start : start + rows]

    def joined(self) -> Attention:
        """Return the rows as they are when there is one head; heads cannot be joined after the softmax."""
        if self.probabilities.shape[1] != 1:
            raise PluginContractError("heads can only be joined before the softmax; these probabilities are given")
        return self
