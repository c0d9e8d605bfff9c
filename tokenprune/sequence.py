"""Pure index arithmetic: which logical positions are alive, and how tensors are cut to them and put back.

A *logical* sequence of Q positions never changes. A `View` is the compact, right-aligned list of the positions still
alive in each row; `Slots` is the same for the key-value cache of one layer, over everything seen so far. Rows of a ragged
batch have different counts: the shorter ones carry *dead* slots on the left, which nobody may attend to.

No module, no hook, no transformers here: only tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

__all__ = ["Slots", "View", "Visuals", "cut_mask", "per_row", "take"]


def take(x: Tensor, index: Tensor, seq_dim: int, batch_dim: int = 0) -> Tensor:
    """Gather positions `index` [B, P] from `x` along `seq_dim`, row by row; a batch dimension of 1 serves all rows."""
    if index.shape[0] == 1 and x.shape[batch_dim] == 1:
        return x.index_select(seq_dim, index[0])
    rows, length = index.shape[0], x.shape[seq_dim]
    moved = x.movedim((batch_dim, seq_dim), (0, 1))
    moved = moved.expand(rows, *moved.shape[1:])
    flat = moved.reshape(rows * length, *moved.shape[2:])
    offset = torch.arange(rows, device=index.device).unsqueeze(1) * length
    gathered = flat.index_select(0, (index + offset).flatten())
    return gathered.view(rows, index.shape[1], *moved.shape[2:]).movedim((0, 1), (batch_dim, seq_dim))


def per_row(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Return host numbers as a [B] int64 tensor, without making the host wait for the device."""
    if min(numbers) == max(numbers):
        return torch.full((len(numbers),), numbers[0], device=device)
    if device.type != "cuda":
        return torch.tensor(numbers, device=device)
    return torch.tensor(numbers, pin_memory=True).to(device, non_blocking=True)


def _put(base: Tensor, index: Tensor, alive: Tensor | None, x: Tensor) -> Tensor:
    """Return `base` [B, Q, ...] with `x` [B, P, ...] written at `index` [B, P]; dead slots are not written."""
    rows, length = base.shape[:2]
    if rows == 1 and alive is None:
        return base.index_copy(1, index[0], x)
    flat = base.reshape(rows * length, *base.shape[2:])
    target = index + torch.arange(rows, device=index.device).unsqueeze(1) * length
    if alive is None:
        return flat.index_copy(0, target.flatten(), x.flatten(0, 1)).view_as(base)
    # One scratch row takes what the dead slots hold; out of place, so autograd is safe.
    target = target.masked_fill(~alive, rows * length)
    padded = torch.cat([flat, flat.new_zeros(1, *flat.shape[1:])])
    return padded.index_copy(0, target.flatten(), x.flatten(0, 1))[:-1].view_as(base)


def _right_aligned(counts: Sequence[int], device: torch.device) -> Tensor | None:
    """Return [B, max] bool, True on the last `counts[b]` slots of row b, or None when no slot is dead."""
    longest = max(counts)
    if min(counts) == longest:
        return None
    dead = longest - per_row(counts, device).unsqueeze(1)
    return torch.arange(longest, device=device) >= dead


@dataclass(frozen=True, eq=False)
class View:
    """The compact form of a chunk: per row, the chunk positions still alive, right-aligned and ascending.

    index: [B, P] positions; dead slots hold any valid one. alive: [B, P] bool, or None when no slot is dead.
    counts: alive tokens per row. length: Q, the logical length of the chunk.
    """

    index: Tensor
    alive: Tensor | None
    counts: tuple[int, ...]
    length: int

    @classmethod
    def full(cls, rows: int, length: int, device: torch.device) -> View:
        """Return the view in which everything is alive."""
        return cls(torch.arange(length, device=device).expand(rows, -1), None, (length,) * rows, length)

    def narrow(self, keep: Tensor, counts: Sequence[int]) -> tuple[View, Tensor]:
        """Return the view of the slots marked in `keep` ([B, P] bool, `counts[b]` True in row b), and their slots [B, P'].

        The second tensor gathers physical states of this view into the new one.
        """
        # A stable sort brings the kept slots, in order, to the right end: no loop over tokens, no host round trip.
        order = keep.to(torch.uint8).argsort(dim=1, stable=True)[:, keep.shape[1] - max(counts) :]
        index = self.index.gather(1, order)
        return View(index, _right_aligned(counts, keep.device), tuple(counts), self.length), order

    def put_back(self, base: Tensor, x: Tensor) -> Tensor:
        """Return logical states [B, Q, D]: `base` with the physical states `x` [B, P, D] at their positions."""
        return _put(base, self.index, self.alive, x)


@dataclass(frozen=True, eq=False)
class Slots:
    """Which logical position sits in each slot of one cache layer.

    positions: [B, S], ascending in each row, -1 in dead slots. length: logical length seen so far, dropped tokens
    included. has_dead: whether any slot may be dead (known without reading the tensor).
    next_id: [B] the position id of the next token where positions are renumbered, else None.
    log_sizes: [B, S] logarithm of how many tokens each slot stands for, or None while all stand for one.
    """

    positions: Tensor
    length: int
    has_dead: bool = False
    next_id: Tensor | None = None
    log_sizes: Tensor | None = None

    @classmethod
    def full(cls, rows: int, length: int, device: torch.device, stored: int | None = None) -> Slots:
        """Return the slots of a plain layer that has seen `length` tokens and stores the last `stored` of them."""
        stored = length if stored is None else stored
        positions = torch.arange(length - stored, length, device=device).expand(rows, -1)
        return cls(positions, length)

    def extend(
        self,
        new: Tensor,
        chunk: int,
        dead: Tensor | None = None,
        next_id: Tensor | None = None,
        log_sizes: Tensor | None = None,
    ) -> Slots:
        """Return the slots after a chunk of logical length `chunk` whose alive positions `new` [B, P] were appended.

        next_id: [B] of the slots to come. log_sizes: [B, P] of the new ones.
        """
        if dead is not None:
            new = new.masked_fill(dead, -1)
        positions = torch.cat([self.positions, new], dim=1)
        sizes = None
        if self.log_sizes is not None or log_sizes is not None:
            parts = [
                part if part is not None else torch.zeros(at.shape, device=at.device)
                for part, at in ((self.log_sizes, self.positions), (log_sizes, new))
            ]
            sizes = torch.cat(parts, dim=1)
        return Slots(positions, self.length + chunk, self.has_dead or dead is not None, next_id, sizes)

    def last(self, stored: int) -> Slots:
        """Return the last `stored` slots (what a sliding layer keeps)."""
        gone = self.positions.shape[1] - stored
        if gone == 0:
            return self
        sizes = None if self.log_sizes is None else self.log_sizes[:, gone:]
        return replace(self, positions=self.positions[:, gone:], log_sizes=sizes)

    def rows(self, index: Tensor) -> Slots:
        """Return the slots of the given rows of the batch (beam reorder, repeat, select)."""
        at = index.to(self.positions.device)
        next_id, sizes = (None if x is None else x[at] for x in (self.next_id, self.log_sizes))
        return replace(self, positions=self.positions[at], next_id=next_id, log_sizes=sizes)

    def crop(self, length: int) -> tuple[Slots, int]:
        """Forget positions from `length` on; return the slots and how many of them at the right end are gone in all rows."""
        leaving = self.positions >= length
        positions = self.positions.masked_fill(leaving, -1)
        alive = (positions >= 0).any(dim=0).nonzero()
        stored = int(alive[-1]) + 1 if len(alive) else 0
        kept = positions[:, :stored]
        next_id = None if self.next_id is None else self.next_id - leaving.sum(dim=1)
        sizes = None if self.log_sizes is None else self.log_sizes[:, :stored]
        dead = self.has_dead or bool((kept < 0).any())
        return Slots(kept, length, dead, next_id, sizes), positions.shape[1] - stored

    def hide(self, hidden: Tensor) -> Slots:
        """Return the slots as if those whose logical position is marked in `hidden` [B, L] were dead."""
        at = self.positions.clamp(min=0, max=hidden.shape[1] - 1)
        gone = hidden.gather(1, at) & (self.positions >= 0) & (self.positions < hidden.shape[1])
        return replace(self, positions=self.positions.masked_fill(gone, -1), has_dead=True)


@dataclass(frozen=True, eq=False)
class Visuals:
    """The visual tokens alive in a view: left-aligned, padded on the right.

    slots: [B, N] where each one sits in the view. ordinal: [B, N] which visual token of the prompt it is.
    valid: [B, N] bool. counts: per row, alive now. original: per row, before anything was dropped.
    """

    slots: Tensor
    ordinal: Tensor
    valid: Tensor
    counts: tuple[int, ...]
    original: tuple[int, ...]

    @classmethod
    def of(cls, mask: Tensor, counts: tuple[int, ...]) -> Visuals:
        """Return the tokens of a [B, Q] bool mask whose row counts are known."""
        slots = (~mask).to(torch.uint8).argsort(dim=1, stable=True)[:, : max(counts)]
        ordinal = torch.arange(max(counts), device=mask.device).expand(mask.shape[0], -1)
        return cls(slots, ordinal, _left_aligned(counts, mask.device), counts, counts)

    def narrow(self, kept: Tensor, counts: Sequence[int], keep: Tensor) -> tuple[Visuals, Tensor]:
        """Return the visual tokens marked in `kept` [B, N], at their slots after the view was narrowed by `keep` [B, P].

        The second tensor [B, N'] gathers what is known about the old tokens into the new ones.
        """
        rank = keep.long().cumsum(dim=1) - 1  # rank among the kept slots of the row, from the left
        alive = rank[:, -1:] + 1
        rank = rank + (alive.amax(dim=0, keepdim=True) - alive)  # rows are right-aligned to the longest one
        order = (~kept).to(torch.uint8).argsort(dim=1, stable=True)[:, : max(counts)]
        slots = rank.gather(1, self.slots.gather(1, order)).clamp(min=0)
        ordinal = self.ordinal.gather(1, order)
        valid = _left_aligned(counts, kept.device)
        return Visuals(slots, ordinal, valid, tuple(counts), self.original), order


def _left_aligned(counts: Sequence[int], device: torch.device) -> Tensor:
    return torch.arange(max(counts), device=device) < per_row(counts, device).unsqueeze(1)


def cut_mask(
    mask: Tensor | None,
    *,
    form: str,
    dtype: torch.dtype,
    keys: Slots,
    offset: int,
    queries: int,
    rows: Tensor | None,
    dead_rows: Tensor | None,
    window: int | None = None,
) -> Tensor | None:
    """Return the attention mask of one layer on its compact view.

    mask: what transformers made for the logical sequence: None, [B, K] (flash kernels) or [B or 1, H or 1, Q, K] bool or
        additive float. Its column c stands for logical position c + `offset`.
    form: `flash`, `bool` or `float`: the form to build when there was no mask and one is needed now.
    keys: the slots the kernel will see, the new ones included. queries: P, how many of them, at the right end, are new.
    rows: [B, P] rows of `mask` to take, or None when all stay. dead_rows: [B, P] bool, or None.
    window: sliding window of the layer, used only when there was no mask.

    Where slots stand for more than one token the mask is additive whatever the form.

    Returns None when the kernel's own causal rule says the same (and then it stays free to take its fast path).
    """
    positions = keys.positions
    if mask is None:
        if keys.log_sizes is not None:
            form = "float"
        # transformers leaves the mask out only where nothing is padded: causal order is all there is, besides dead slots.
        plain = not keys.has_dead and dead_rows is None and keys.log_sizes is None
        if plain and (window is None or keys.length <= window):
            return None
        if form == "flash":
            return (positions >= 0).long()
        at = positions[:, positions.shape[1] - queries :, None]
        allowed = (positions[:, None, :] <= at) & (positions >= 0)[:, None, :]
        if window is not None:
            allowed &= positions[:, None, :] > at - window
        cut = allowed.unsqueeze(1)
        if form == "float":
            cut = _float(cut, dtype)
        return _free_dead_rows(_weighed(cut, keys, dtype), dead_rows)
    column = positions - offset
    usable = (positions >= 0) & (column >= 0)
    column = column.clamp(min=0)
    if mask.ndim == 2:
        return take(mask, column, 1) * usable.to(mask.dtype)
    cut = mask if rows is None else take(mask, rows, 2)
    cut = take(cut, column, 3)
    if keys.has_dead or offset:
        fill = False if cut.dtype == torch.bool else torch.finfo(cut.dtype).min
        cut = cut.masked_fill(~usable[:, None, None, :], fill)
    return _free_dead_rows(_weighed(cut, keys, dtype), dead_rows)


def _float(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a boolean mask in additive form."""
    # In place, as below: a mask of n x n numbers is the largest tensor of a layer, and two of them would be the peak.
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, torch.finfo(dtype).min)


def _weighed(cut: Tensor, keys: Slots, dtype: torch.dtype) -> Tensor:
    """Add the logarithm of what each key stands for: it then takes as much attention as the tokens merged into it."""
    if keys.log_sizes is None:
        return cut
    cut = _float(cut, dtype) if cut.dtype == torch.bool else cut
    return cut.add_(keys.log_sizes[:, None, None, :].to(cut.dtype))


def _free_dead_rows(cut: Tensor, dead_rows: Tensor | None) -> Tensor:
    """Let dead query rows see everything: their output is never read, and a fully masked row may be NaN in a kernel."""
    if dead_rows is None:
        return cut
    return cut.masked_fill(dead_rows[:, None, :, None], True if cut.dtype == torch.bool else 0.0)
