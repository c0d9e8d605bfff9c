"""A key-value cache layer that stores only the kept tokens and answers with the logical length.

Its state (which logical position sits in which slot) lives here, in the cache the caller owns, so it is reordered, repeated
and cropped together with keys and values, and two requests can never see each other's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokenprune import compat
from tokenprune.errors import SessionError, UnsupportedCacheError
from tokenprune.sequence import Slots

__all__ = ["Watched", "compact", "slots_of"]


@dataclass(frozen=True, eq=False)
class Watched:
    """What a decoding stage remembers from step to step.

    visual: [B, L] bool over logical positions. counts: visual tokens per row. scores: [B, N] of the step before.
    hidden: [B, L] bool, what its view left out.
    """

    visual: Tensor
    counts: tuple[int, ...]
    scores: Tensor | None = None
    hidden: Tensor | None = None

    def rows(self, index: Tensor) -> Watched:
        """Return it for the given rows of the batch."""
        scores, hidden = (None if x is None else x[index] for x in (self.scores, self.hidden))
        return Watched(self.visual[index], tuple(self.counts[row] for row in index.tolist()), scores, hidden)


class _Compact:
    """Mixin over a dynamic cache layer of transformers."""

    slots: Slots | None
    armed: Slots | None
    watched: Watched | None = None
    keys: Any
    values: Any
    cumulative_length: int

    def arm(self, slots: Slots) -> None:
        """Announce the slots as they will be after the next `update`."""
        self.armed = slots

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append the states of the tokens alive in this layer; return what the kernel attends to."""
        if self.armed is None:
            raise SessionError(
                "this KV cache was filled under tokenprune.compress and holds a compact sequence; "
                "continue it inside a compress block, or start with a new cache"
            )
        seen: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)  # type: ignore[misc]
        self.slots, self.armed = self.armed.last(self.keys.shape[-2]), None
        if hasattr(self, "cumulative_length"):  # sliding layers size their mask by it
            self.cumulative_length = self.slots.length
        return seen

    def get_seq_length(self, *args: Any) -> int:
        """Return the logical length: what position ids and masks are made from."""
        return self.slots.length if self.slots is not None else 0

    def reset(self) -> None:
        """Forget everything."""
        super().reset()  # type: ignore[misc]
        self.slots = self.armed = self.watched = None

    def crop(self, tokens: int) -> None:
        """Forget logical positions at the end (assisted decoding); the argument is read as transformers reads it."""
        if self.slots is None:
            return
        self.slots, gone = self.slots.crop(compat.crop_length(tokens, self.slots.length))
        if gone:
            self.keys, self.values = self.keys[..., :-gone, :], self.values[..., :-gone, :]
        if hasattr(self, "cumulative_length"):
            self.cumulative_length = self.slots.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Follow a beam search step."""
        super().reorder_cache(beam_idx)  # type: ignore[misc]
        self._rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        super().batch_repeat_interleave(repeats)  # type: ignore[misc]
        if self.slots is not None:
            rows = torch.arange(self.slots.positions.shape[0], device=self.slots.positions.device)
            self._rows(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows."""
        super().batch_select_indices(indices)  # type: ignore[misc]
        self._rows(indices)

    def _rows(self, index: Tensor) -> None:
        if self.slots is not None:
            self.slots = self.slots.rows(index)
        if self.watched is not None:
            self.watched = self.watched.rows(index.to(self.watched.visual.device))


class CompactLayer(_Compact, compat.DynamicLayer):  # type: ignore[misc]
    """Compact form of a full-attention layer."""


class CompactSlidingLayer(_Compact, compat.DynamicSlidingWindowLayer):  # type: ignore[misc]
    """Compact form of a sliding-window layer; the window is measured in logical positions by the mask."""


_COMPACT_OF = {compat.DynamicLayer: CompactLayer, compat.DynamicSlidingWindowLayer: CompactSlidingLayer}


def slots_of(cache: Any, index: int) -> Slots | None:
    """Return the slots of layer `index`, or None where it is a plain layer (or does not exist yet)."""
    layers = getattr(cache, "layers", None)
    if layers is None:
        raise UnsupportedCacheError(f"{type(cache).__name__} has no layers to compact; use the default DynamicCache")
    return getattr(layers[index], "slots", None) if index < len(layers) else None


def compact(cache: Any, index: int) -> _Compact:
    """Return layer `index` of the cache in compact form, replacing a plain layer in place (what it holds stays).

    Raises UnsupportedCacheError when the cache is of a kind that cannot hold a compact sequence.
    """
    layer = compat.cache_layer(cache, index)
    if isinstance(layer, _Compact):
        return layer
    kind = _COMPACT_OF.get(type(layer))
    if kind is None or getattr(cache, "offloading", False):
        what = "an offloaded cache" if kind is not None else type(layer).__name__
        raise UnsupportedCacheError(
            f"{type(cache).__name__} with {what} cannot hold a pruned sequence yet; "
            "use the default DynamicCache (leave out cache_implementation) or use_cache=False"
        )
    new = kind.__new__(kind)
    new.__dict__ = layer.__dict__  # shared, so that whoever holds the old object sees the same storage
    new.armed = None
    stored = layer.keys.shape[-2] if layer.is_initialized and layer.keys.numel() else 0
    new.slots = Slots.full(layer.keys.shape[0], layer.get_seq_length(), layer.keys.device, stored) if stored else None
    cache.layers[index] = new
    return new
