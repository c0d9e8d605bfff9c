"""What a plugin is: four small interfaces and the context they see.

Shapes use the letters of the whole project: B rows of the batch, N visual tokens (of the row that has most; shorter rows
are padded on the right and `ctx.valid` is False there), D width, H query heads, Hkv key heads, R query rows, d head width.

Plugins are pure: tensors in, tensors out. They hold options, never state, and they never see the model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from tokenprune.errors import PluginContractError
from tokenprune.tokens import Signal, TokenSpan

__all__ = ["Adapter", "AttentionRows", "Component", "Merger", "PruneContext", "Scorer", "Selector"]


class Component:
    """Base of scorers, selectors and mergers: a frozen dataclass whose fields are the options a policy may set.

    `name` is the word used in YAML. The first line of the docstring is what `tokenprune list` shows.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}
    name: ClassVar[str]

    @classmethod
    def summary(cls) -> str:
        """Return the first line of the docstring."""
        return (cls.__doc__ or "").strip().partition("\n")[0]


@dataclass(frozen=True)
class AttentionRows:
    """Attention probabilities of a few query rows, computed beside the model's kernel and never as an n x n matrix.

    queries: [B, H, R, d] and keys [B, Hkv, K, d], both after the rotary embedding, as the kernel received them.
    bias: [B or 1, 1 or H, R, K] additive mask of the same rows (causal, padding, sliding window), or None.
    columns: [B, N] where the visual tokens are among the K keys.
    rows_valid: [B, R] False where a row of the batch has fewer query rows than R.
    scaling: factor applied to q.k, as the model's own kernel uses it. softcap: logit soft cap of the model, or None.
    """

    queries: Tensor
    keys: Tensor
    bias: Tensor | None
    columns: Tensor
    rows_valid: Tensor
    scaling: float
    softcap: float | None = None

    def blocks(self, rows: int = 64) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield ([B, H, r, N] probabilities, [B, r] validity) for r <= `rows` query rows at a time, in float32.

        The softmax runs over the full key row; only then the visual columns are taken.
        """
        batch, heads, total, width = self.queries.shape
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
                logits = logits + self.bias[:, :, block].float().clamp(min=torch.finfo(torch.float32).min)
            probabilities = logits.softmax(dim=-1)
            columns = self.columns[:, None, None, :].expand(-1, heads, block.stop - start, -1)
            yield probabilities.gather(-1, columns), self.rows_valid[:, block]

    def reduce(self, heads: Literal["mean", "max"] = "mean") -> Tensor:
        """Return [B, N]: the mean (or max) over heads, then the mean over the valid query rows."""
        total = torch.zeros(self.columns.shape, dtype=torch.float32, device=self.columns.device)
        for probabilities, valid in self.blocks():
            per_row = probabilities.mean(dim=1) if heads == "mean" else probabilities.amax(dim=1)  # [B, r, N]
            total += (per_row * valid.unsqueeze(-1)).sum(dim=1)
        return total / self.rows_valid.sum(dim=1, keepdim=True).clamp(min=1)


@dataclass(frozen=True)
class PruneContext:
    """What a plugin may see at one stage. Reading a signal that the plugin did not declare raises.

    valid: [B, N] bool, False on the padding of rows that have fewer visual tokens.
    ordinal: [B, N] which visual token of its prompt each one is, counted from 0 before anything was dropped.
    seed, salt: what makes `noise` differ between policies and between stages.
    """

    valid: Tensor
    ordinal: Tensor
    seed: int = 0
    salt: int = 0
    signals: Mapping[str, Any] = field(default_factory=dict)

    def _signal(self, name: str) -> Any:
        if name not in self.signals:
            raise PluginContractError(
                f"the signal {name!r} was read but not declared; return Signal({name!r}) from signals()"
            )
        return self.signals[name]

    @property
    def hidden(self) -> Tensor:
        """[B, N, D] visual tokens as they arrive at the site (residual stream, model dtype)."""
        tensor: Tensor = self._signal("hidden")
        return tensor

    @property
    def previous_hidden(self) -> Tensor:
        """[B, N, D] the same tokens as they entered the layer before the site."""
        tensor: Tensor = self._signal("previous_hidden")
        return tensor

    @property
    def attention(self) -> AttentionRows:
        """Attention of the declared query rows over the visual tokens."""
        rows: AttentionRows = self._signal("attention")
        return rows

    def noise(self, stream: int = 0) -> Tensor:
        """Return [B, N] float32 uniform noise in (0, 1), a pure function of (seed, salt, stream, ordinal).

        Counter-based, so a row gets the same noise alone, in a batch, in a beam, on CPU and on GPU.
        """
        return counter_noise(self.ordinal, self.seed, self.salt, stream)


def _i64(value: int) -> int:
    """Wrap an unsigned 64-bit constant into the signed range torch uses."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def counter_noise(counter: Tensor, seed: int, salt: int = 0, stream: int = 0) -> Tensor:
    """Return float32 uniforms in (0, 1) shaped like `counter` (int64): the SplitMix64 finaliser of the counters.

    Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014).
    """
    key = (seed * 0x9E3779B97F4A7C15 + salt * 0xBF58476D1CE4E5B9 + stream * 0x94D049BB133111EB) % (1 << 64)
    x = counter * _i64(0x9E3779B97F4A7C15) + _i64(key)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        # torch shifts signed integers arithmetically; the mask makes it the logical shift of the algorithm.
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * _i64(factor)
    x = x ^ ((x >> 31) & ((1 << 33) - 1))
    bits = (x >> 41) & ((1 << 23) - 1)  # 23 bits, so that the half step below stays exact in float32
    return (bits.float() + 0.5) / (1 << 23)


class Scorer(Component, ABC):
    """Ranks visual tokens: a higher score stays longer."""

    def signals(self) -> tuple[Signal, ...]:
        """Return what this scorer reads; the planner refuses a model that cannot provide it."""
        return ()

    @abstractmethod
    def score(self, ctx: PruneContext) -> Tensor:
        """Return [B, N] finite scores, higher = keep. Padding (`~ctx.valid`) may hold anything finite."""


class Selector(Component, ABC):
    """Chooses which tokens stay, given scores and how many."""

    uses_scores: ClassVar[bool] = True

    @abstractmethod
    def select(self, scores: Tensor, keep: Tensor, ctx: PruneContext) -> Tensor:
        """Return [B, N] bool with exactly `keep[b]` True among the valid tokens of row b.

        scores: [B, N] float32, -inf on padding. keep: [B] int64, between 0 and the row's number of valid tokens.
        """


class Merger(Component, ABC):
    """Says what becomes of the tokens that leave."""

    changes_states: ClassVar[bool] = True

    @abstractmethod
    def merge(self, hidden: Tensor, kept: Tensor, ctx: PruneContext) -> Tensor:
        """Return [B, N, D]: the states of which the kept rows ([B, N] bool) continue."""


class Adapter(ABC):
    """Describes one model family: names modules and finds visual tokens. It registers no hook and holds no state.

    name: the word shown to users. model_types: `config.model_type` values served. An adapter with no model types is a
    fallback: it is asked for any model that no other adapter names.
    signals: names of the signals (`Signal.name`) the family can provide.
    """

    name: ClassVar[str]
    model_types: ClassVar[frozenset[str]] = frozenset()
    signals: ClassVar[frozenset[str]] = frozenset({"hidden", "previous_hidden", "attention"})

    @abstractmethod
    def check(self, config: Any) -> None:
        """Raise UnsupportedModelError, in one sentence, when this model cannot be served exactly."""

    @abstractmethod
    def text_config(self, config: Any) -> Any:
        """Return the configuration of the language model."""

    @abstractmethod
    def visual_token_ids(self, config: Any) -> frozenset[int]:
        """Return the ids of the placeholder tokens that stand for visual tokens in the prompt."""

    @abstractmethod
    def visual_tokens_per_image(self, config: Any) -> int | None:
        """Return how many visual tokens an image gives, or None when it depends on the image."""

    @abstractmethod
    def decoder(self, model: nn.Module) -> nn.Module:
        """Return the text model: the module that runs the decoder layers."""

    @abstractmethod
    def layers(self, model: nn.Module) -> Sequence[nn.Module]:
        """Return the decoder layers in order."""

    @abstractmethod
    def attention(self, layer: nn.Module) -> nn.Module:
        """Return the self-attention module of a decoder layer (the one that calls the attention kernel)."""

    @abstractmethod
    def visual_mask(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor | None:
        """Return [B, Q] bool, True on visual tokens, from the keyword inputs of a forward pass; None if it cannot tell."""

    @abstractmethod
    def spans(self, config: Any, inputs: Mapping[str, Any]) -> list[tuple[TokenSpan, ...]]:
        """Return, per row of the batch, the images and clips with their token grids (used for pictures and scopes)."""

    @classmethod
    def summary(cls) -> str:
        """Return the first line of the docstring."""
        return (cls.__doc__ or "").strip().partition("\n")[0]
