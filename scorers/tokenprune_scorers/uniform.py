"""Even coverage of the prompt's visual tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tokenprune.hookspecs import hookimpl
from tokenprune.interfaces import PruneContext, Scorer

_BITS = 20  # about a million visual tokens; exact in float32


@dataclass(frozen=True)
class Uniform(Scorer):
    """Van der Corput order: the top k are spread evenly over the image for any k (baseline, no paper).

    score = 1 - the bits of the token's ordinal read backwards as a binary fraction: 0, 1/2, 1/4, 3/4, 1/8 ... of the
    numbering leave last. A later stage keeps a subset of what an earlier one kept.
    """

    name: ClassVar[str] = "uniform"

    def score(self, ctx: PruneContext) -> Tensor:
        """Return [B, N] in (0, 1]."""
        shifts = torch.arange(_BITS, device=ctx.ordinal.device)
        bits = (ctx.ordinal.unsqueeze(-1) >> shifts) & 1
        return 1 - (bits.float() * 0.5 ** (shifts + 1)).sum(dim=-1)


@hookimpl
def register_scorers(register: Callable[[type], None]) -> None:
    """Offer this scorer."""
    register(Uniform)
