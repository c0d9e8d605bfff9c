"""Signals of the decoder: from a kernel call, or from states, to what a plugin reads. Pure tensors; it registers no hook."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokenprune import compat
from tokenprune.forward import Forward
from tokenprune.interfaces import AttentionRows, Text
from tokenprune.sequence import Visuals, take
from tokenprune.tokens import Query, Signal

__all__ = ["bias_of", "from_call", "text_of", "visual_of"]


def visual_of(run: Forward, states: Tensor) -> Tensor:
    """Return [B, N, ...] of the visual tokens alive, from [B, P, ...] of the view."""
    assert run.visuals is not None
    return take(states, run.visuals.slots, 1)


def text_of(run: Forward, states: Tensor) -> Text:
    """Return the text tokens of the prompt, from [B, P, ...] of the view."""
    slots, valid = query_rows(run, "text")
    after, there = query_rows(run, "after_image")
    first = torch.where(there.any(dim=1), after[:, 0], states.shape[1])  # text comes after the image from here on
    return Text(take(states, slots, 1), valid, valid & (slots >= first.unsqueeze(1)))


def from_call(run: Forward, call: compat.AttentionCall, signal: Signal, rope_base: float | None) -> Any:
    """Return a signal read off the kernel call of a layer that works on the view of `run`: attention, keys or values."""
    assert run.visuals is not None
    past = call.key.shape[-2] - call.query.shape[-2]
    if signal.name == "attention":
        return _rows(run, call, signal, past, rope_base)
    states = call.key if signal.name == "keys" else call.value
    assert states is not None
    states = states[:, :, past:].transpose(1, 2)  # [B, P, Hkv, d]
    return visual_of(run, states) if signal.of == "visual" else text_of(run, states)


def _rows(
    run: Forward, call: compat.AttentionCall, signal: Signal, past: int, rope_base: float | None
) -> AttentionRows:
    """Keep the query rows a scorer asked for, and a reference to the keys."""
    assert run.visuals is not None
    rows, valid = query_rows(run, signal.query)
    if signal.probes:
        rows, valid = _probes(rows, valid, signal.probes)
    at = rows if run.view is None else run.view.index.gather(1, rows)
    columns = run.visuals.slots
    return AttentionRows(
        queries=take(call.query, rows, 2),
        keys=call.key,
        bias=bias_of(call, rows, past),
        columns=columns + past,
        rows_valid=valid,
        scaling=call.scaling,
        softcap=call.softcap,
        columns_valid=run.visuals.valid,
        row_positions=at + past,
        column_positions=(columns if run.view is None else run.view.index.gather(1, columns)) + past,
        rope_base=rope_base,
    )


def query_rows(run: Forward, query: Query) -> tuple[Tensor, Tensor]:
    """Return ([B, R] slots in the view, [B, R] validity) of the query rows named by `query`."""
    assert run.is_visual is not None
    real = run.padding if run.padding is not None else torch.ones_like(run.is_visual)
    wanted, counts = real & ~run.is_visual, run.texts
    if query == "last":
        wanted, counts = real & (_from_the_right(real) == 1), (1,) * run.rows
    elif query == "after_image":
        wanted = wanted & (_from_the_right(run.is_visual) == 0)
        counts = tuple(wanted.sum(dim=1).tolist())
    elif query in ("visual", "through_image", "all"):
        wanted = real if query == "all" else real & run.is_visual
        if query == "through_image":
            wanted = real & (_from_the_right(run.is_visual) > 0)
    if run.view is not None:
        wanted = wanted.gather(1, run.view.index)
        if run.view.alive is not None:
            wanted = wanted & run.view.alive
    if query in ("visual", "through_image", "all"):
        counts = tuple(wanted.sum(dim=1).tolist())
    if not any(counts):  # no such row (an empty question): one that nobody reads keeps the shapes
        none = torch.zeros(run.rows, 1, dtype=torch.long, device=wanted.device)
        return none, none.bool()
    found = Visuals.of(wanted, counts)
    return found.slots, found.valid


def _probes(rows: Tensor, valid: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return at most `most` of the rows: the last half of them, and the rest evenly over the others."""
    if rows.shape[1] <= most:
        return rows, valid
    total = valid.sum(dim=1, keepdim=True)
    recent = min(most - most // 2, rows.shape[1])
    ahead = most - recent
    place = torch.arange(most, device=rows.device).unsqueeze(0)
    older = (total - recent).clamp(min=0)
    spread = torch.div((2 * place + 1) * older, max(2 * ahead, 1), rounding_mode="floor")
    chosen = torch.where(place < ahead, spread, older + place - ahead)
    there = (chosen < total) & ((place >= ahead) | (older > 0))
    chosen = chosen.clamp(max=rows.shape[1] - 1)
    return rows.gather(1, chosen), there & valid.gather(1, chosen)


def _from_the_right(mask: Tensor) -> Tensor:
    """Return [B, Q]: how many are True from each position to the end of the row."""
    return mask.long().flip(1).cumsum(1).flip(1)


def bias_of(call: compat.AttentionCall, rows: Tensor, past: int) -> KernelMask | None:
    """Return the additive mask of the query rows at the slots `rows` [B, R], in the kernel's own terms."""
    if call.mask is not None and call.mask.ndim == 4:
        return KernelMask(call.mask, rows, past, call.key.shape[-2])
    if not getattr(call.module, "is_causal", True):
        return None
    return KernelMask(call.mask, rows, past, call.key.shape[-2])


@dataclass(frozen=True, eq=False)
class KernelMask:
    """The mask a kernel was called with, for some of its query rows, a few at a time.

    mask: 4-D as the model made it, 2-D of a flash kernel, or None for the causal rule alone. slots: [B, R] of the rows.
    """

    mask: Tensor | None
    slots: Tensor
    past: int
    keys: int

    def rows(self, index: Tensor) -> Tensor:
        """Return [B or 1, 1 or H, r, K] additive, of the rows numbered `index` [B, r]."""
        slots = self.slots.gather(1, index)
        if self.mask is not None and self.mask.ndim == 4:
            cut = take(self.mask[..., : self.keys], slots, 2)
            return cut if cut.dtype != torch.bool else _additive(cut)
        allowed = torch.arange(self.keys, device=slots.device) <= (slots + self.past).unsqueeze(-1)  # [B, r, K]
        if self.mask is not None:
            allowed = allowed & self.mask[:, None, : self.keys].bool()
        return _additive(allowed.unsqueeze(1))


def _additive(allowed: Tensor) -> Tensor:
    # Not -inf: a row that sees nothing must stay finite.
    return torch.zeros(allowed.shape, device=allowed.device).masked_fill(~allowed, torch.finfo(torch.float32).min)
