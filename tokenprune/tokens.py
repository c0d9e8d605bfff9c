"""Frozen data about visual tokens: where they are (`TokenSpan`), where they are cut (`Site`), what can be read (`Signal`).

Nothing here knows transformers, a method or a model family.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

__all__ = ["Query", "Signal", "Site", "TokenSpan"]

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


_SITE = re.compile(r"(?P<part>vision|llm|decode)\.layers\.(?:(?P<index>-?\d+)|(?P<percent>\d+(?:\.\d+)?)%)")
_ORDER = {"vision.output": 0, "projector.output": 1, "llm.input": 2}


@dataclass(frozen=True)
class Site:
    """A place in the model: where tokens leave, or where a signal is read.

    | site | tokens leave | signal read there |
    |---|---|---|
    | `vision.layers.<k>` | never | what layer k of the vision tower computes: its attention, keys, values and its output |
    | `vision.output` | before the projector, which then runs on the kept ones only | what enters the projector |
    | `projector.output` | before decoder layer 0 | what leaves the projector |
    | `llm.input` | before decoder layer 0, text visible | the merged text and vision sequence |
    | `llm.layers.<k>` | those that ENTER decoder layer k | tokens entering layer k |
    | `decode.layers.<k>` | at every decoding step, from the view of decoder layers >= k; the cache keeps them | |

    `<k>` counts from 0, negative from the end, and `25%` is a share of the depth, so that one policy serves models of
    different depth.
    """

    text: str

    def __post_init__(self) -> None:
        match = _SITE.fullmatch(self.text)
        if self.text not in _ORDER and not match:
            raise ValueError(
                f"{self.text!r} is not a site; possible are 'vision.output', 'projector.output', 'llm.input', "
                "'llm.layers.<k>', 'decode.layers.<k>' and, to read a signal, 'vision.layers.<k>', "
                "with <k> a 0-based layer, a negative one (-1 is the last) or a share of the depth (25%)"
            )
        if match and match["percent"] is not None and float(match["percent"]) >= 100:
            raise ValueError(f"{self.text!r}: a share of the depth is below 100%")

    @property
    def part(self) -> str:
        """The part of the model it belongs to: `vision`, `projector`, `llm` or `decode`."""
        return self.text.partition(".")[0]

    @property
    def is_layer(self) -> bool:
        """Whether it names a layer of its part."""
        return self.text not in _ORDER

    @property
    def before_decoder(self) -> int:
        """Order of the sites before decoder layer 0; 3 for sites at decoder layers."""
        return _ORDER.get(self.text, 3)

    def layer(self, depth: int, written_for: int | None = None) -> int:
        """Return the 0-based layer of its part, which has `depth` layers; 0 for sites before the decoder.

        written_for: the depth of the model that a number was written for; it is then a share of that depth. A share is
        rounded to the nearest layer, halves up; a layer after the first stays after the first.

        Raises ValueError when there is no such layer.
        """
        match = _SITE.fullmatch(self.text)
        if match is None:
            return 0
        if match["percent"] is not None:
            return min(math.floor(Fraction(match["percent"]) / 100 * depth + Fraction(1, 2)), depth - 1)
        index = int(match["index"])
        if index > 0 and written_for is not None and index < written_for:
            return max(1, min((2 * index * depth + written_for) // (2 * written_for), depth - 1))
        layer = index + depth if index < 0 else index
        if not 0 <= layer < depth:
            depth = written_for if written_for is not None and index >= 0 else depth
            kind = "vision" if self.part == "vision" else "decoder"
            raise ValueError(f"the model has {depth} {kind} layers (0 to {depth - 1}), no layer {index}")
        return layer

    def __str__(self) -> str:
        return self.text

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """Read an option of this type from its text."""
        from pydantic_core import core_schema

        return core_schema.no_info_after_validator_function(cls, core_schema.str_schema(strict=True))


Query = Literal["last", "text", "after_image", "visual", "through_image", "all", "cls"]


@dataclass(frozen=True)
class Signal:
    """Something a plugin reads from the model, computed by the engine only when a plugin declares it.

    name: one of

        | name | what `ctx.read(signal)` returns |
        |---|---|
        | `hidden` | [B, N, D] token states |
        | `previous_hidden` | [B, N, D] the same tokens as they entered the layer before |
        | `keys`, `values` | [B, N, H, d] of an attention module, as its kernel received them |
        | `attention` | an `Attention`: probabilities of query rows over visual keys |
        | `layout` | a `Layout`: image, frame, row and column of every token |
        | `paired` | a `Paired`: image and text embeddings of a tower that aligns them (CLIP), given by the user |

    at: where it is read; None is where the stage acts. Only `vision.layers.<k>`, `vision.output`, `projector.output` and
        `llm.input` can be read from elsewhere.
    of: `visual` tokens, or the `text` ones (`hidden` and `keys`: then a `Text`).
    query: rows of `attention`: the `last` prompt token, all `text`, text `after_image`, the `visual` ones, everything
        `through_image` (up to the last visual token), `all`; in a vision tower `cls` or `all`.
    layer: for `attention`, `keys` and `values` of the decoder: the `previous` layer (already computed) or `this` one, which
        the tokens are about to enter (its projections run once more for it).
    rope: False reads queries and keys as they are before the rotary embedding (the projections run once more for it).
    norm: True passes `hidden` through the final norm of the decoder.
    probes: 0, or how many query rows to take at most: the most recent half, and the rest spread over the others.
    """

    name: Literal["hidden", "previous_hidden", "keys", "values", "attention", "layout", "paired"]
    at: Site | None = None
    of: Literal["visual", "text"] = "visual"
    query: Query = "last"
    layer: Literal["previous", "this"] = "previous"
    rope: bool = True
    norm: bool = False
    probes: int = 0

    @property
    def is_here(self) -> bool:
        """Whether it is read where the stage acts."""
        return self.at is None
