"""How close a token is to the middle of something."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import normalize

from tokenprune.groupings import Image
from tokenprune.hookspecs import hookimpl
from tokenprune.interfaces import Grouping, PruneContext, Scorer
from tokenprune.tokens import Signal, Site
from tokenprune_scorers._rows import whole

__all__ = ["AnchorSimilarity"]

_BANDWIDTHS = (0.125, 0.25, 0.5, 1.0, 2.0)


@dataclass(frozen=True)
class AnchorSimilarity(Scorer):
    """Keep the tokens nearest to (or farthest from) the mean of their frame or clip (VidCom2, https://arxiv.org/abs/2505.14454).

    anchor: the grouping whose mean token is the anchor (`image`, `frame`, `frame_group` ...); null is the whole prompt.
    kernel: `cosine`, `dot`, or `gaussian`: sum over a in `bandwidths` of exp(-|x - c|^2 / 2a), for unit vectors x and
        their mean c.
    of: `hidden` states, or the `keys` or `values` of an attention module, mean over heads.
    channels: share of the channels to compare, those of lowest variance over the clip (VidCom2: 0.5); 1 takes all.
    sign: `negative` keeps the farthest. layer: of keys and values, as in `attention`. from: a site to read instead.

    The variance of channels is that of each image or clip by itself, before any division by a norm.
    """

    name: ClassVar[str] = "anchor_similarity"

    anchor: Grouping | None = field(default_factory=Image)
    kernel: Literal["cosine", "dot", "gaussian"] = "cosine"
    bandwidths: tuple[float, ...] = _BANDWIDTHS
    of: Literal["hidden", "keys", "values"] = "hidden"
    channels: Annotated[float, Field(strict=True, gt=0, le=1)] = 1.0
    sign: Literal["positive", "negative"] = "positive"
    layer: Literal["previous", "this"] = "previous"
    from_: Annotated[Site | None, Field(alias="from")] = None

    def __post_init__(self) -> None:
        if not 0 < self.channels <= 1:
            raise ValueError(f"channels is a share of them, in (0, 1], not {self.channels}")
        if not self.bandwidths or min(self.bandwidths) <= 0:
            raise ValueError(f"bandwidths are numbers above 0, not {self.bandwidths}")

    @property
    def _vectors(self) -> Signal:
        return Signal(self.of, at=self.from_, layer=self.layer if self.of != "hidden" else "previous")

    def signals(self) -> tuple[Signal, ...]:
        """Read the vectors; channels are chosen per clip."""
        return (self._vectors, Signal("layout")) if self.channels < 1 else (self._vectors,)

    def score(self, ctx: PruneContext) -> Tensor:
        """Return [B, N] float32."""
        x: Tensor = ctx.read(self._vectors).float()
        if self.of != "hidden":
            x = x.mean(dim=2)
        if self.channels < 1:
            x = self._steady(x, ctx)
        if self.kernel != "dot":
            x = normalize(x, dim=-1)
        inside = ctx if self.anchor is None else ctx.grouped(self.anchor)
        here = x if self.anchor is None else inside.cut(x)
        count = inside.valid.sum(dim=1).clamp(min=1)[:, None, None]
        mean = whole(here, inside.valid.unsqueeze(-1)).sum(dim=1, keepdim=True) / count
        if self.kernel == "gaussian":
            distance = (here - mean).square().sum(dim=-1)
            score = torch.stack([torch.exp(-distance / (2 * a)) for a in self.bandwidths]).sum(dim=0)
        else:
            score = (here * (normalize(mean, dim=-1) if self.kernel == "cosine" else mean)).sum(dim=-1)
        score = score if self.anchor is None else inside.spread(score)
        return -score if self.sign == "negative" else score

    def _steady(self, x: Tensor, ctx: PruneContext) -> Tensor:
        """Return x with 0 in the channels that vary most over the image or clip; sums over channels then leave them out."""
        clip = ctx.grouped(Image())
        here = whole(clip.cut(x), clip.valid.unsqueeze(-1))
        count = clip.valid.sum(dim=1).clamp(min=1)[:, None, None]
        centred = whole(here - here.sum(dim=1, keepdim=True) / count, clip.valid.unsqueeze(-1))
        variance = centred.square().sum(dim=1)
        order = variance.argsort(dim=1, stable=True)
        rank = torch.empty_like(order).scatter_(1, order, torch.arange(x.shape[2], device=x.device).expand_as(order))
        steady = rank < max(int(x.shape[2] * self.channels), 1)
        return clip.spread(here * steady.unsqueeze(1))


@hookimpl
def register_scorers(register: Callable[[type], None]) -> None:
    """Offer this scorer."""
    register(AnchorSimilarity)
