"""The state of one forward pass: what is alive, what was captured, and everything cut to it once for all layers.

It is made when the text model starts and dies after its last layer; nothing of it outlives the pass but what the cache
holds. It registers no hook.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tokenprune.compat import AttentionCall
from tokenprune.errors import InputError, UnsupportedModelError
from tokenprune.interfaces import AttentionRows, Layout
from tokenprune.report import StageRecord
from tokenprune.sequence import Slots, View, Visuals, cut_mask, take
from tokenprune.tokens import Signal
from tokenprune.vision import Vision

__all__ = ["Forward"]


@dataclass(eq=False)
class Forward:
    """The state of one forward pass of the text model; it dies with the pass."""

    rows: int
    length: int
    form: str
    visuals: Visuals | None = None
    view: View | None = None
    logical: Tensor | None = None
    padding: Tensor | None = None
    previous: Tensor | None = None
    """States as they entered the layer before, in the view, where the next stage compares with them."""
    captured: dict[Signal, Any] = field(default_factory=dict)
    """What was read on the way for the stages to come: per visual token alive, or once for the whole prompt."""
    vision: Vision | None = None
    layout: Layout | None = None
    """[B, N] of the visual tokens before anything was dropped."""
    sizes: Tensor | None = None
    """[B, N] tokens each visual token alive stands for."""
    renumbers: bool = False
    weighs: bool = False
    prompts: Tensor | None = None
    """[B, Q] token ids, where the caller gave them."""
    looked: AttentionCall | None = None
    """The kernel call of a decoding step that tells where the new token looks."""
    hidden: Tensor | None = None
    """[B, L] logical positions that later layers do not see in this decoding step."""
    texts: tuple[int, ...] = ()
    left: list[tuple[int, ...]] = field(default_factory=list)
    """Per stage so far, how many visual tokens each row had left."""
    records: list[StageRecord] = field(default_factory=list)
    is_visual: Tensor | None = None
    memo: dict[tuple[Any, ...], tuple[tuple[Any, ...], Any]] = field(default_factory=dict)
    cuts: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)

    def once(self, compute: Callable[[], Any], what: Any, *objects: Any) -> Any:
        """Return `compute()`, once per value of `what` and set of objects: layers that share a view share what is cut."""
        key = (what, *map(id, objects))
        if key not in self.memo:
            self.memo[key] = (objects, compute())  # the objects are held, so that no id is used twice
        return self.memo[key][1]

    # -- visual tokens

    def find_visuals(self, mask: Tensor | None, padding: Any) -> None:
        """Find the visual tokens of this chunk from `mask` [B, >= Q], if it has any; `padding` is the attention mask.

        The one place where a prefill waits for the device: for the counts of each row.
        """
        if mask is None:
            raise InputError(
                "the visual tokens of this prompt cannot be found: call the model with input_ids (or with inputs_embeds "
                "that still hold the placeholder embeddings)"
            )
        mask = mask[:, -self.length :]
        if isinstance(padding, Tensor) and padding.ndim == 2:
            self.padding = padding[:, -self.length :].bool()
        real = self.padding if self.padding is not None else torch.ones_like(mask)
        counts, lengths = torch.stack([mask.sum(dim=1), real.sum(dim=1)]).tolist()
        if any(counts):
            self.is_visual, self.visuals = mask, Visuals.of(mask, tuple(counts))
            self.texts = tuple(length - count for length, count in zip(lengths, counts, strict=True))

    def positions(self, visuals: Visuals, past: int) -> list[Tensor]:
        """Return, per row, the prompt positions of these visual tokens."""
        slots = visuals.slots if self.view is None else self.view.index.gather(1, visuals.slots)
        return [row[:n] + past for row, n in zip(slots, visuals.counts, strict=True)]

    def narrow(self, states: Tensor, kept: Tensor, counts: Sequence[int]) -> Tensor:
        """Drop the visual tokens not marked in `kept` [B, N]; return the physical states that are left."""
        assert self.visuals is not None
        view = self.view if self.view is not None else View.full(self.rows, self.length, states.device)
        self.logical = states if self.logical is None else view.put_back(self.logical, states)
        keep = torch.ones_like(view.index, dtype=torch.bool) if view.alive is None else view.alive.clone()
        # Added up, not written: the padding of a short row may name a slot that another entry lets go.
        leaving = (self.visuals.valid & ~kept).to(torch.uint8)
        keep &= torch.zeros_like(keep, dtype=torch.uint8).scatter_add_(1, self.visuals.slots, leaving) == 0
        lost = [before - after for before, after in zip(self.visuals.counts, counts, strict=True)]
        self.view, order = view.narrow(keep, [n - less for n, less in zip(view.counts, lost, strict=True)])
        self.visuals, old = self.visuals.narrow(kept, counts, keep)
        self.captured = {signal: _gathered(value, old) for signal, value in self.captured.items()}
        self.sizes = None if self.sizes is None else self.sizes.gather(1, old)
        self.previous = None if self.previous is None else take(self.previous, order, 1)
        self.memo.clear()
        self.cuts.clear()
        return take(states, order, 1)

    def forget(self) -> None:
        """Let go of what was captured for the stages that have just acted."""
        self.previous = None
        self.captured = {signal: value for signal, value in self.captured.items() if not signal.is_here}

    def real(self) -> Tensor:
        """Return [B, P] bool: slots of the view that hold a token which is not padding."""
        assert self.is_visual is not None
        real = self.padding if self.padding is not None else torch.ones_like(self.is_visual)
        if self.view is None:
            return real
        real = real.gather(1, self.view.index)
        return real if self.view.alive is None else real & self.view.alive

    def log_sizes(self) -> Tensor | None:
        """Return [B, P]: logarithm of how many tokens each slot of the view stands for."""
        if self.sizes is None or not self.weighs:
            return None
        assert self.visuals is not None and self.view is not None

        def lay() -> Tensor:
            visuals = self.visuals
            assert visuals is not None and self.view is not None and self.sizes is not None
            rows, slots = self.view.index.shape
            there = torch.zeros(rows, slots + 1, device=visuals.slots.device)
            at = visuals.slots.masked_fill(~visuals.valid, slots)
            return there.scatter_(1, at, self.sizes.clamp(min=1).log())[:, :slots]

        laid: Tensor = self.once(lay, "sizes")
        return laid

    # -- cutting

    def on_view(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return a layer's arguments on the view; states and mask are not its business.

        Most layers are given the very objects the one before was given: comparing identities once serves them all.
        """
        if self.view is None:
            return given
        rest = {name: value for name, value in given.items() if name != "hidden_states"}
        for before, cut in self.cuts:
            if before.keys() == rest.keys() and all(before[name] is value for name, value in rest.items()):
                return {**given, **cut}
        cut = {name: self.cut(name, value) for name, value in rest.items() if name != "attention_mask"}
        self.cuts.append((rest, cut))
        return {**given, **cut}

    def cut(self, name: str, value: Any) -> Any:
        """Return an argument of a decoder layer on the view: rotary embeddings, position ids, anything per token."""
        view = self.view
        assert view is not None
        if name.startswith("position_embeddings"):
            if isinstance(value, tuple):
                return tuple(self.cut(name, part) for part in value)
            if isinstance(value, Tensor):
                return self.once(
                    lambda: take(value, view.index, value.ndim - 2, max(value.ndim - 3, 0)), "rotary", value
                )
        elif isinstance(value, Tensor):
            if name == "position_ids":
                return self.once(lambda: take(value, view.index, value.ndim - 1, max(value.ndim - 2, 0)), "ids", value)
            if value.ndim >= 2 and value.shape[1] == self.length and value.shape[0] in (1, self.rows):
                return self.once(lambda: take(value, view.index, 1), "tokens", value)
        return value

    def new_ids(self, past: Slots | None) -> Tensor:
        """Return [B, P] renumbered position ids of the view: counted on from what the layer's cache holds."""

        def count() -> Tensor:
            if self.is_visual is None:  # a decoding step, or text after the prompt: every token of it is real
                ahead = torch.arange(self.length, device=past.positions.device if past is not None else None)
                ahead = ahead.expand(self.rows, -1)
            else:
                ahead = (self.real().long().cumsum(1) - 1).clamp(min=0)
            start = 0 if past is None or past.next_id is None else past.next_id.unsqueeze(1)
            return ahead + start

        ids: Tensor = self.once(count, "new ids", past)
        return ids

    def extended(self, past: Slots | None, device: torch.device) -> Slots:
        """Return `past` with the alive positions of this chunk, one object for all layers that share `past`."""

        def extend() -> Slots:
            view, before = self.view, past if past is not None else Slots.full(self.rows, 0, device)
            counts = before.next_id is not None or (self.renumbers and view is not None)
            next_id = self.new_ids(past)[:, -1] + 1 if counts else None
            if view is None:
                new = torch.arange(self.length, device=device).expand(self.rows, -1)
                return before.extend(new + before.length, self.length, None, next_id)
            dead = None if view.alive is None else ~view.alive
            return before.extend(view.index + before.length, self.length, dead, next_id, self.log_sizes())

        slots: Slots = self.once(extend, "slots", past)
        return slots

    def mask(self, mask: Any, dtype: torch.dtype, keys: Slots, seen: int, window: int | None) -> Tensor | None:
        """Return the layer's attention mask on its view."""
        if mask is not None and not isinstance(mask, Tensor):
            raise UnsupportedModelError(
                f"an attention mask of type {type(mask).__name__} cannot be cut; load with attn_implementation='sdpa'"
            )

        def build() -> Tensor | None:
            view = self.view
            return cut_mask(
                mask,
                form=self.form,
                dtype=dtype,
                keys=keys,
                offset=seen + self.length - mask.shape[-1] if mask is not None else 0,
                queries=self.length if view is None else view.index.shape[1],
                rows=None if view is None else view.index,
                dead_rows=None if view is None or view.alive is None else ~view.alive,
                window=window,
            )

        cut: Tensor | None = self.once(build, ("mask", window), mask, keys)
        return cut


def _gathered(value: Any, order: Tensor) -> Any:
    """Return what was captured per visual token, for those that `order` [B, N'] names."""
    if isinstance(value, AttentionRows):
        at = value.column_positions
        return replace(
            value,
            columns=value.columns.gather(1, order),
            columns_valid=None if value.columns_valid is None else value.columns_valid.gather(1, order),
            column_positions=None if at is None else at.gather(1, order),
        )
    return take(value, order, 1) if isinstance(value, Tensor) else value
