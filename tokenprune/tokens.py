"""Frozen data about visual tokens: where they are cut (`Site`), how many stay (`Budget`), what the model can tell about them.

Nothing here knows transformers, a method or a model family.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

__all__ = ["Budget", "Signal", "Site", "TokenSpan", "exact_floor"]

Modality = Literal["image", "video"]


@dataclass(frozen=True)
class TokenSpan:
    """One image or clip inside one prompt.

    `positions` are the prompt positions of its tokens in raster order, `grid` is (frames, rows, columns) and multiplies
    to their number; a token that belongs to no cell (separators, newlines) is not listed.
    """

    positions: tuple[int, ...]
    grid: tuple[int, int, int]
    modality: Modality = "image"

    def __post_init__(self) -> None:
        if math.prod(self.grid) != len(self.positions):
            raise ValueError(f"grid {self.grid} does not multiply to {len(self.positions)} tokens")


_SITE = re.compile(r"llm\.layers\.(?:(?P<index>-?\d+)|(?P<percent>\d+(?:\.\d+)?)%)")


@dataclass(frozen=True)
class Site:
    """A place where tokens leave: they are the tokens that ENTER this decoder layer.

    `llm.layers.<k>` counts from 0, negative from the end, and `25%` is a share of the depth, so that one policy serves
    models of different depth. `llm.input` is the merged text and vision sequence before layer 0.
    """

    text: str

    def __post_init__(self) -> None:
        if self.text != "llm.input" and not _SITE.fullmatch(self.text):
            raise ValueError(
                f"{self.text!r} is not a site; possible are 'llm.input' and 'llm.layers.<k>' "
                "with <k> a 0-based layer, a negative one (-1 is the last) or a share of the depth (25%)"
            )
        match = _SITE.fullmatch(self.text)
        if match and match["percent"] is not None and float(match["percent"]) >= 100:
            raise ValueError(f"{self.text!r}: a share of the depth is below 100%")

    def layer(self, depth: int) -> int:
        """Return the 0-based decoder layer this site stands before, in a model of `depth` layers.

        Raises ValueError when the model has no such layer. A share is rounded to the nearest layer, halves up.
        """
        match = _SITE.fullmatch(self.text)
        if match is None:
            return 0
        if match["percent"] is not None:
            return min(math.floor(Fraction(match["percent"]) / 100 * depth + Fraction(1, 2)), depth - 1)
        index = int(match["index"])
        layer = index + depth if index < 0 else index
        if not 0 <= layer < depth:
            raise ValueError(f"the model has {depth} decoder layers (0 to {depth - 1}), no layer {index}")
        return layer

    def __str__(self) -> str:
        return self.text


def exact_floor(n: int, ratio: float) -> int:
    """Return floor(n * ratio) on the decimal number as written: the one rounding rule of the project.

    Binary floats would make 100 * 0.29 one too small; published counts (288, 86, 161, 40, 28) are exact floors.
    """
    return math.floor(n * Fraction(repr(ratio)))


@dataclass(frozen=True)
class Budget:
    """How many visual tokens of one prompt stay at a stage: exactly one of `keep_ratio` and `keep_tokens`.

    keep_ratio: share that stays, in [0, 1], of the tokens `alive` at the site or of the `original` ones.
    keep_tokens: number that stays. A prompt with fewer keeps all it has.
    min_tokens: never fewer than this (the released V2Drop code keeps one token even at ratio 0).
    """

    keep_ratio: float | None = None
    keep_tokens: int | None = None
    of: Literal["alive", "original"] = "alive"
    min_tokens: int = 0

    def __post_init__(self) -> None:
        if (self.keep_ratio is None) == (self.keep_tokens is None):
            raise ValueError("a budget states exactly one of keep_ratio and keep_tokens")
        if self.keep_ratio is not None and not 0 <= self.keep_ratio <= 1:
            raise ValueError(f"keep_ratio is the share that stays, in [0, 1], not {self.keep_ratio}")
        if self.keep_tokens is not None and self.keep_tokens < 0:
            raise ValueError(f"keep_tokens is a number of tokens, not {self.keep_tokens}")
        if self.min_tokens < 0:
            raise ValueError(f"min_tokens is a number of tokens, not {self.min_tokens}")
        if self.keep_tokens is not None and self.of == "original":
            raise ValueError("'of: original' belongs to keep_ratio; keep_tokens is a number and takes no base")

    def count(self, alive: int, original: int) -> int:
        """Return how many of `alive` tokens stay, out of `original` that entered the model."""
        if self.keep_tokens is not None:
            wanted = self.keep_tokens
        else:
            assert self.keep_ratio is not None
            wanted = exact_floor(original if self.of == "original" else alive, self.keep_ratio)
        return min(max(wanted, self.min_tokens), alive)


@dataclass(frozen=True)
class Signal:
    """Something a scorer reads from the model, computed by the engine only when a scorer asks for it.

    name: `hidden` (tokens at the site), `previous_hidden` (the same tokens entering the layer before) or `attention`
        (probabilities of query rows over visual keys). An adapter lists the names it can provide.
    query: rows of `attention`: `last` prompt token, all `text` tokens, or the `after_image` ones.
    layer: whose queries and keys: the `previous` layer (already computed) or `this` one, which the tokens are about to
        enter (its projections run once more for it).
    """

    name: Literal["hidden", "previous_hidden", "attention"]
    query: Literal["last", "text", "after_image"] = "last"
    layer: Literal["previous", "this"] = "previous"
