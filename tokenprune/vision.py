"""What one prefill shows of the vision tower and the projector, brought from their own order to [B, N] of the prompt.

Towers see images, decoders see prompts. Everything captured here is first made flat, one entry per visual token over all
images of the batch, and then laid out as the placeholders stand in the prompts. It registers no hook.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from tokenprune import compat
from tokenprune.errors import InputError, PluginContractError
from tokenprune.interfaces import Attention, Layout, Tower
from tokenprune.sequence import Visuals, per_row
from tokenprune.tokens import Signal, Site

__all__ = ["FlatDecision", "TowerAttention", "Vision"]


@dataclass(eq=False)
class Vision:
    """One run of the vision tower.

    tower: its shape. grids: (frames, rows, columns) of visual tokens of every image, in the order of the placeholders.
    order: [T] place of every visual token, in that order, among the tower's own tokens; None where they are the same.
    decided: what stages decided here, image by image, in tower order, to be carried out before decoder layer 0.
    """

    tower: Tower
    grids: tuple[tuple[int, int, int], ...]
    order: Tensor | None
    outputs: dict[str, list[Tensor]] = field(default_factory=dict)
    calls: dict[str, list[compat.AttentionCall]] = field(default_factory=dict)
    decided: list[FlatDecision] = field(default_factory=list)
    visuals: Visuals | None = None
    copies: int = 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """Visual tokens of every image."""
        return tuple(math.prod(grid) for grid in self.grids)

    # -- capturing

    def saw_output(self, site: str, output: Tensor) -> None:
        """Keep what a layer or the projector gave; a tower may be called once per image or once for all."""
        self.outputs.setdefault(site, []).append(output)

    def saw_attention(self, site: str, call: compat.AttentionCall) -> None:
        """Keep a call of an attention kernel."""
        self.calls.setdefault(site, []).append(call)

    # -- from the tower to prompts

    def lay(self, visuals: Visuals) -> None:
        """Say where the images stand in the prompts.

        `generate` encodes images once and then repeats prompts for beams and samples: each group of rows shares its images.
        """
        total, there = sum(visuals.original), sum(self.sizes)
        copies = total // there if there else 0
        groups = visuals.original[:: max(copies, 1)]
        if copies * there != total or visuals.original != tuple(n for n in groups for _ in range(copies)):
            raise InputError(
                f"the vision tower gave {there} visual tokens, but the prompts have places for {total}; "
                "pass the images of this prompt and no others"
            )
        self.visuals, self.copies = visuals, copies

    def _first(self) -> Tensor:
        """Return [B, 1]: how many visual tokens stand before those of each row, in the order of the placeholders."""
        assert self.visuals is not None
        counts = per_row(self.visuals.original[:: self.copies], self.visuals.valid.device)
        return (counts.cumsum(0) - counts).repeat_interleave(self.copies).unsqueeze(1)

    def to_rows(self, flat: Tensor) -> Tensor:
        """Return [B, N, ...] of what is known about all visual tokens, [T, ...] in tower order."""
        assert self.visuals is not None
        self._check(flat)
        at = (self._first() + self.visuals.ordinal).clamp(max=max(flat.shape[0] - 1, 0))
        return flat[at if self.order is None else self.order.to(at.device)[at]]

    def _check(self, flat: Tensor) -> None:
        if flat.shape[0] != sum(self.sizes):
            raise InputError(
                f"the vision tower gave {flat.shape[0]} visual tokens where its images have {sum(self.sizes)}; "
                "pass images or clips in one forward pass, not both"
            )

    def layout(self) -> Layout:
        """Return the layout [B, N] of the visual tokens of the prompts."""
        assert self.visuals is not None
        before = [0]
        for size in self.sizes:
            before.append(before[-1] + size)
        table = _cells(self.grids, self.visuals.valid.device)
        at = (self._first() + self.visuals.ordinal).clamp(max=max(before[-1] - 1, 0))
        found = table.map(lambda x: x[at])
        return replace(found, image=found.image - found.image[:, :1])

    # -- image by image

    def images(self) -> tuple[Tensor, Tensor]:
        """Return ([I, M] place of every token of every image in tower order, [I, M] validity)."""
        device = next(iter(self.outputs.values()))[0].device
        sizes = per_row(self.sizes, device)
        place = torch.arange(max(self.sizes), device=device)
        valid = place < sizes.unsqueeze(1)
        at = ((sizes.cumsum(0) - sizes).unsqueeze(1) + place).clamp(max=int(sum(self.sizes)) - 1)
        return (at if self.order is None else self.order.to(device)[at]), valid

    def layout_of_images(self) -> Layout:
        """Return the layout [I, M] of the tokens of every image by itself."""
        at, _ = self.images()
        prompt = at if self.order is None else self.order.to(at.device).argsort()[at]
        return replace(_cells(self.grids, at.device).map(lambda x: x[prompt]), image=torch.zeros_like(at))

    # -- from modules to tokens

    def patches(self, output: Tensor) -> Tensor:
        """Return [P, ...] patches of a tower layer's output [images, S, ...] or [P, ...], without CLS tokens."""
        return output[:, self.tower.cls :].flatten(0, 1) if output.ndim > 2 else output

    def units(self, output: Tensor) -> Tensor:
        """Return [T, merge, ...]: the patches of every visual token."""
        flat = self.patches(output)
        return flat.reshape(-1, self.tower.merge, *flat.shape[1:])

    # -- what a plugin may read

    def read(self, signal: Signal) -> Any:
        """Return a signal of the vision side in tower order: states [T, D], keys or values [T, H, d], or attention."""
        assert signal.at is not None
        site = str(signal.at)
        if signal.name == "attention":
            return TowerAttention(self, tuple(self._calls(signal.at)), signal.query)
        if signal.name in ("keys", "values"):
            read = "key" if signal.name == "keys" else "value"
            parts = [self.units(getattr(call, read).transpose(1, 2)) for call in self._calls(signal.at)]
            return torch.cat(parts).mean(dim=1)
        given = self.outputs.get(site)
        if not given:
            raise _not_run(site)
        if site == "projector.output":
            return torch.cat([part.flatten(0, -2) for part in given])
        if site == "vision.output":
            return torch.cat([self.tokens_of(part).flatten(1) for part in given])
        return torch.cat([self.units(part) for part in given]).mean(dim=1)

    def tokens_of(self, features: Tensor) -> Tensor:
        """Return [T, merge, D]: what enters the projector for every visual token (CLS tokens are gone by then)."""
        flat = features.flatten(0, 1) if features.ndim > 2 else features
        return flat.reshape(-1, self.tower.merge, flat.shape[-1])

    def _calls(self, site: Site) -> list[compat.AttentionCall]:
        found = self.calls.get(str(site))
        if not found:
            raise _not_run(str(site))
        return found


def _not_run(site: str) -> InputError:
    return InputError(
        f"the policy reads {site}, but the vision side did not run in this forward pass; give the images to the model "
        "(pixel_values), not features made before"
    )


def _cells(grids: Sequence[tuple[int, int, int]], device: torch.device) -> Layout:
    """Return the layout [T] of all images, in the order of the placeholders."""
    columns: list[list[Tensor]] = [[] for _ in range(8)]
    for number, (frames, height, width) in enumerate(grids):
        cell = torch.arange(frames * height * width, device=device)
        parts = [
            torch.full_like(cell, number), cell // (height * width), cell // width % height, cell % width,
            *(torch.full_like(cell, size) for size in (frames, height, width)), torch.full_like(cell, int(frames > 1)),
        ]  # fmt: skip
        for column, part in zip(columns, parts, strict=True):
            column.append(part)
    image, frame, line, column_, frames_, lines, widths, video = (torch.cat(part) for part in columns)
    return Layout(image, frame, line, column_, frames_, lines, widths, video.bool())


@dataclass(frozen=True, eq=False)
class FlatDecision:
    """What a stage decided on the vision side, per visual token in tower order.

    kept: [T] bool. scores: [T] or None. sizes: [T] or None.
    """

    number: int
    kept: Tensor
    scores: Tensor | None
    sizes: Tensor | None


@dataclass(frozen=True, eq=False)
class TowerAttention(Attention):
    """Attention inside a vision tower, reduced per image: every image, clip frame or window is a sequence of its own.

    query: the `cls` rows, or `all` rows (what each patch receives). Softmaxes are computed in blocks of query rows beside
    the tower's kernel; where patches are joined into a token, a token has the mean of its patches.
    """

    vision: Vision
    calls: tuple[compat.AttentionCall, ...]
    query: str
    lay: Callable[[Tensor], Tensor] | None = None
    """Brings [T] in tower order to where the plugin wants it."""
    is_joined: bool = False

    def laid(self, lay: Callable[[Tensor], Tensor]) -> TowerAttention:
        """Return the attention with its results brought from tower order to rows by `lay`."""
        return replace(self, lay=lay)

    def joined(self) -> TowerAttention:
        """Return the same rows with all heads taken as one."""
        return replace(self, is_joined=True)

    def blocks(self, rows: int = 64, normalise: Literal["full", "visual"] = "full") -> Iterator[tuple[Tensor, Tensor]]:
        """Refuse: images of one prompt share no query rows; use `reduce`."""
        raise PluginContractError("rows of a vision tower cannot be streamed per prompt; use attention.reduce(...)")

    def reduce(
        self,
        heads: Literal["mean", "max", "sum", "joined"] | int = "mean",
        rows: Literal["mean", "sum", "max"] = "mean",
        *,
        normalise: Literal["full", "visual"] = "full",
        weights: Tensor | None = None,
        prior: Callable[[slice], Tensor] | None = None,
    ) -> Tensor:
        """Return [B, N] float32: heads reduced first, then the query rows of the token's own image."""
        if weights is not None or prior is not None:
            raise PluginContractError("query rows of a vision tower take no weights and no prior")
        if heads == "joined":
            return self.joined().reduce("mean", rows, normalise=normalise)
        columns = torch.cat([self._columns(*part, heads, rows, normalise) for part in self._sequences()])
        found = columns.reshape(-1, self.vision.tower.merge).mean(dim=1)
        return found if self.lay is None else self.lay(found)

    def _sequences(self) -> Iterator[tuple[Tensor, Tensor, float]]:
        """Yield (queries [n, H, S, d], keys [n, H, S, d], scaling) of sequences of one length."""
        for call in self.calls:
            if call.boundaries is None:
                yield call.query, call.key, call.scaling
                continue
            for start, stop in zip(call.boundaries, call.boundaries[1:], strict=False):  # packed sequences
                yield call.query[:, :, start:stop], call.key[:, :, start:stop], call.scaling

    def _columns(
        self, queries: Tensor, keys: Tensor, scaling: float, heads: str | int, rows: str, normalise: str
    ) -> Tensor:
        """Return [n * patches]: what each patch receives from the query rows of its own sequence."""
        cls = self.vision.tower.cls
        if self.is_joined:
            queries, keys = (x.transpose(1, 2).flatten(2).unsqueeze(1) for x in (queries, keys))
            scaling = queries.shape[-1] ** -0.5
        keys = keys.float().transpose(-1, -2)
        wanted = queries[:, :, :cls] if self.query == "cls" else queries
        total = torch.zeros(keys.shape[0], keys.shape[1], keys.shape[3] - cls, device=keys.device)
        if rows == "max":
            total -= torch.inf
        for block in torch.split(wanted, _block(keys.shape[-1]), dim=2):
            logits = (block.float() @ keys) * scaling  # [n, H, r, S]
            visual = normalise == "visual"
            probabilities = logits[..., cls:].softmax(dim=-1) if visual else logits.softmax(dim=-1)[..., cls:]
            if heads in ("mean", "sum", "max"):
                over: Any = {"mean": torch.mean, "sum": torch.sum, "max": torch.amax}[str(heads)]
                probabilities = over(probabilities, dim=1, keepdim=True)
            most = rows == "max"
            total = torch.maximum(total, probabilities.amax(2)) if most else total + probabilities.sum(2)
        if rows == "mean":
            total = total / wanted.shape[2]
        if isinstance(heads, int):
            chosen = total.sum(dim=2).argsort(dim=1, descending=True, stable=True)[:, :heads]
            total = total.gather(1, chosen.unsqueeze(2).expand(-1, -1, total.shape[2])).mean(dim=1, keepdim=True)
        return total[:, 0].flatten()


def _block(keys: int) -> int:
    """Return how many query rows to take at once, so that a block of one head stays near a million numbers."""
    return max(16, min(1024, (1 << 20) // max(keys, 1)))
