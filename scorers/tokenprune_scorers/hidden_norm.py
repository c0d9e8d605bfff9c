"""Size of the vectors of a token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import Tensor

from tokenprune.hookspecs import hookimpl
from tokenprune.interfaces import PruneContext, Scorer
from tokenprune.tokens import Signal, Site

__all__ = ["HiddenNorm"]


@dataclass(frozen=True)
class HiddenNorm(Scorer):
    """Keep the tokens with the largest states, keys or values (PACT, https://arxiv.org/abs/2504.08966; FlowCut: values).

    of: `hidden` states, or the `keys` or `values` of an attention module. p: 1 or 2, which norm.
    heads: norm of all heads `joined`, or of their `mean` vector (FlowCut); without effect on `hidden`.
    lowest: keep the smallest ones (low key norms draw attention, https://arxiv.org/abs/2406.11430).
    layer: the decoder layer before the site (`previous`) or the one about to be entered (`this`), for keys and values.
    from: a site to read instead: `vision.layers.<k>`, and for `hidden` also `vision.output`, `projector.output`, `llm.input`.
    """

    name: ClassVar[str] = "hidden_norm"

    of: Literal["hidden", "keys", "values"] = "hidden"
    p: Annotated[int, Field(strict=True, ge=1, le=2)] = 2
    heads: Literal["joined", "mean"] = "joined"
    lowest: Annotated[bool, Field(strict=True)] = False
    layer: Literal["previous", "this"] = "previous"
    from_: Annotated[Site | None, Field(alias="from")] = None

    def __post_init__(self) -> None:
        if self.p not in (1, 2):
            raise ValueError(f"p is 1 or 2, not {self.p}")

    @property
    def _vectors(self) -> Signal:
        return Signal(self.of, at=self.from_, layer=self.layer if self.of != "hidden" else "previous")

    def signals(self) -> tuple[Signal, ...]:
        """Read the vectors."""
        return (self._vectors,)

    def score(self, ctx: PruneContext) -> Tensor:
        """Return [B, N] float32."""
        x: Tensor = ctx.read(self._vectors).float()
        if self.of != "hidden":
            x = x.mean(dim=2) if self.heads == "mean" else x.flatten(2)
        norm: Tensor = x.norm(p=self.p, dim=-1)
        return -norm if self.lowest else norm


@hookimpl
def register_scorers(register: Callable[[type], None]) -> None:
    """Offer this scorer."""
    register(HiddenNorm)
