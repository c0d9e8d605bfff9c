"""How close a token is to the words of the prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import normalize

from tokenprune.hookspecs import hookimpl
from tokenprune.interfaces import Paired, PruneContext, Scorer, Text
from tokenprune.tokens import Signal, Site
from tokenprune_scorers._rows import whole

__all__ = ["TextRelevance"]

_PAIRED = Signal("paired")
_INPUT = Site("llm.input")
_WORDS = Signal("hidden", at=_INPUT, of="text")


@dataclass(frozen=True)
class TextRelevance(Scorer):
    """Keep the tokens that match the text (TRIM; CDPruner, https://arxiv.org/abs/2506.10967).

    of: `paired`, embeddings of a tower that aligns images and text and that the user gives (CLIP: its text is cut into segments
        of 77 tokens), or `tokens`, the text embeddings of the prompt and the visual ones at `from` (`llm.input`).
    metric: `cosine` or `dot` product. over: `mean` or `max` over the text vectors, or similarity to their `centroid`.
    sign: `negative` keeps the least similar: similarities of raw CLIP patches tend to be inverted (TRIM, CDPruner).
    softmax: turn the row into a distribution (TRIM; the same order, but other outliers).
    after_image: with `of: tokens`, use the text after the last visual token only.
    """

    name: ClassVar[str] = "text_relevance"

    of: Literal["paired", "tokens"] = "paired"
    metric: Literal["cosine", "dot"] = "cosine"
    over: Literal["mean", "max", "centroid"] = "mean"
    sign: Literal["positive", "negative"] = "positive"
    softmax: Annotated[bool, Field(strict=True)] = False
    after_image: Annotated[bool, Field(strict=True)] = True
    from_: Annotated[Site, Field(alias="from")] = _INPUT

    @property
    def _visual(self) -> Signal:
        return Signal("hidden", at=self.from_)

    def signals(self) -> tuple[Signal, ...]:
        """Read the paired embeddings, or the tokens of both kinds."""
        return (_PAIRED,) if self.of == "paired" else (self._visual, _WORDS)

    def score(self, ctx: PruneContext) -> Tensor:
        """Return [B, N] float32."""
        if self.of == "paired":
            pair: Paired = ctx.read(_PAIRED)
            image, text, there = pair.image.float(), pair.text.float(), pair.text_valid
        else:
            words: Text = ctx.read(_WORDS)
            image, text, there = ctx.read(self._visual).float(), words.states.float(), words.valid
            late = there & words.after_image
            # A prompt that ends with its image has no text after it.
            there = torch.where(late.any(dim=1, keepdim=True), late, there) if self.after_image else there
        if self.over == "centroid":
            text = (
                whole(text, there.unsqueeze(-1)).sum(dim=1, keepdim=True) / there.sum(dim=1).clamp(min=1)[:, None, None]
            )
            there = there.any(dim=1, keepdim=True)
        if self.metric == "cosine":
            image, text = normalize(image, dim=-1), normalize(text, dim=-1)
        similarity = image @ text.mT  # [B, N, M]
        if self.over == "max":
            score = similarity.masked_fill(~there.unsqueeze(1), -torch.inf).amax(dim=2).nan_to_num(neginf=0.0)
        else:
            score = whole(similarity, there.unsqueeze(1)).sum(dim=2) / there.sum(dim=1, keepdim=True).clamp(min=1)
        score = -score if self.sign == "negative" else score
        return score.masked_fill(~ctx.valid, torch.finfo(score.dtype).min).softmax(dim=1) if self.softmax else score


@hookimpl
def register_scorers(register: Callable[[type], None]) -> None:
    """Offer this scorer."""
    register(TextRelevance)
