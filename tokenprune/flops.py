"""Arithmetic of cost: FLOPs of the decoder layers and bytes of the key-value cache, from a text configuration.

Two conventions stand side by side, because papers use the second and mean the first:

* `layer_flops`: 2 FLOPs per multiply-add, projections with grouped-query heads, attention over the whole prompt (text
  included), gated feed-forward. A causal kernel does about half of the attention part; it is counted in full.
* `paper_macs`: 4 n d^2 + 2 n^2 d + 3 n d m per layer on visual tokens only, as PyramidDrop, SparseVLM and VisionZip print
  it (3.82 "TFLOPs" for LLaVA-1.5-7B with 576 tokens are multiply-adds).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["LayerShape", "layer_flops", "paper_macs"]


@dataclass(frozen=True)
class LayerShape:
    """The sizes of a decoder layer that cost depends on (feed-forward: the width active per token)."""

    width: int
    heads: int
    key_heads: int
    head_width: int
    feed_forward: int
    matrices: int = 3

    @classmethod
    def of(cls, config: Any) -> LayerShape:
        """Read the shape from a text configuration of transformers; mixture models count the active experts."""
        heads = config.num_attention_heads
        width = config.hidden_size
        feed = getattr(config, "intermediate_size", None) or 4 * width
        feed = feed[0] if isinstance(feed, (list, tuple)) else feed
        experts = getattr(config, "num_experts_per_tok", None)
        expert_width = getattr(config, "moe_intermediate_size", None)
        if isinstance(experts, int) and isinstance(expert_width, int):
            feed = experts * expert_width
        return cls(
            width=width,
            heads=heads,
            key_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_width=getattr(config, "head_dim", None) or width // heads,
            feed_forward=feed,
        )


def layer_flops(shape: LayerShape, tokens: int) -> int:
    """Return the FLOPs of one decoder layer over `tokens` tokens of one prompt."""
    inner, key_inner = shape.heads * shape.head_width, shape.key_heads * shape.head_width
    projections = 2 * shape.width * inner + 2 * shape.width * key_inner
    return 2 * (tokens * (projections + shape.matrices * shape.width * shape.feed_forward) + 2 * tokens**2 * inner)


def kv_bytes(shape: LayerShape, tokens: int, bytes_per_number: int = 2) -> int:
    """Return the bytes one layer's keys and values take for `tokens` tokens (default: 16-bit numbers)."""
    return 2 * tokens * shape.key_heads * shape.head_width * bytes_per_number


def paper_macs(shape: LayerShape, visual_tokens: Sequence[int]) -> int:
    """Return what papers print as FLOPs: 4nd^2 + 2n^2d + 3ndm, summed over layers entered by n visual tokens each."""
    d, m = shape.width, shape.feed_forward
    return sum(4 * n * d * d + 2 * n * n * d + 3 * n * d * m for n in visual_tokens)
