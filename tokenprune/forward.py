"""The state of one forward pass of the text model: what is alive, and everything cut to it once for all layers.

It is made when the text model starts and dies after its last layer; nothing of it outlives the pass but what the cache
holds. It registers no hook.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tokenprune import compat
from tokenprune.errors import InputError, UnsupportedModelError
from tokenprune.interfaces import AttentionRows
from tokenprune.report import StageRecord
from tokenprune.sequence import Slots, View, Visuals, cut_mask, take

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
    attention: AttentionRows | None = None
    texts: tuple[int, ...] = ()
    records: list[StageRecord] = field(default_factory=list)
    is_visual: Tensor | None = None
    memo: dict[tuple[Any, ...], tuple[tuple[Any, ...], Any]] = field(default_factory=dict)
    cuts: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    _untap: Callable[[], None] | None = None

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
        self.visuals = self.visuals.narrow(kept, counts, keep)
        self.memo.clear()
        self.cuts.clear()
        return take(states, order, 1)

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

    def extended(self, past: Slots | None, device: torch.device) -> Slots:
        """Return `past` with the alive positions of this chunk, one object for all layers that share `past`."""

        def extend() -> Slots:
            view, before = self.view, past if past is not None else Slots.full(self.rows, 0, device)
            if view is None:
                new = torch.arange(self.length, device=device).expand(self.rows, -1)
                return before.extend(new + before.length, self.length)
            dead = None if view.alive is None else ~view.alive
            return before.extend(view.index + before.length, self.length, dead)

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

    # -- attention

    def tap(self, module: nn.Module, look: Callable[[compat.AttentionCall], None]) -> None:
        """Look at the next kernel call of `module`."""
        self.untap()
        self._untap = compat.attention_taps.set(module, look)

    def untap(self) -> None:
        """Stop looking."""
        if self._untap is not None:
            self._untap()
            self._untap = None

    def read_attention(self, call: compat.AttentionCall, query: str) -> None:
        """Keep the query rows a scorer asked for, and a reference to the keys."""
        assert self.visuals is not None
        rows, valid = self.query_rows(query)
        past = call.key.shape[-2] - call.query.shape[-2]
        self.attention = AttentionRows(
            queries=take(call.query, rows, 2),
            keys=call.key,
            bias=_bias(call, rows, past),
            columns=self.visuals.slots + past,
            rows_valid=valid,
            scaling=call.scaling,
            softcap=call.softcap,
        )

    def query_rows(self, query: str) -> tuple[Tensor, Tensor]:
        """Return ([B, R] slots in the view, [B, R] validity) of the query rows named by `query`."""
        assert self.is_visual is not None
        real = self.padding if self.padding is not None else torch.ones_like(self.is_visual)
        wanted, counts = real & ~self.is_visual, self.texts
        if query == "last":
            wanted, counts = real & (_from_the_right(real) == 1), (1,) * self.rows
        elif query == "after_image":
            wanted = wanted & (_from_the_right(self.is_visual) == 0)
            counts = tuple(wanted.sum(dim=1).tolist())
        if self.view is not None:
            wanted = wanted.gather(1, self.view.index)
            if self.view.alive is not None:
                wanted = wanted & self.view.alive
        found = Visuals.of(wanted, counts)
        return found.slots, found.valid


def _from_the_right(mask: Tensor) -> Tensor:
    """Return [B, Q]: how many are True from each position to the end of the row."""
    return mask.long().flip(1).cumsum(1).flip(1)


def _bias(call: compat.AttentionCall, rows: Tensor, past: int) -> Tensor | None:
    """Return the additive mask [B or 1, 1 or H, R, K] of the query rows, in the kernel's own terms."""
    keys = call.key.shape[-2]
    if call.mask is not None and call.mask.ndim == 4:
        cut = take(call.mask[..., :keys], rows, 2)
        return cut if cut.dtype != torch.bool else _additive(cut)
    if not getattr(call.module, "is_causal", True):
        return None
    allowed = torch.arange(keys, device=rows.device) <= (rows + past).unsqueeze(-1)  # [B, R, K]
    if call.mask is not None:  # the 2-D mask of a flash kernel
        allowed = allowed & call.mask[:, None, :keys].bool()
    return _additive(allowed.unsqueeze(1))


def _additive(allowed: Tensor) -> Tensor:
    # Not -inf: a row that sees nothing must stay finite.
    return torch.zeros(allowed.shape, device=allowed.device).masked_fill(~allowed, torch.finfo(torch.float32).min)
