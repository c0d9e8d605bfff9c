"""Where every visual token sits, from the spans an adapter finds to tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tokenprune.interfaces import Layout
from tokenprune.sequence import Visuals
from tokenprune.tokens import TokenSpan

__all__ = ["layout_of"]


def layout_of(spans: Sequence[Sequence[TokenSpan]], visuals: Visuals, length: int) -> Layout:
    """Return the layout [B, N] of the visual tokens, in prompt order.

    spans: per row, its images and clips. A visual token that belongs to no cell (a separator) is an image of its own size.
    """
    device = visuals.slots.device
    rows, most = visuals.slots.shape
    table = torch.zeros(8, rows, length, dtype=torch.long)
    for row, images in enumerate(spans):
        table[0, row] = len(images)  # separators: after all images
        table[4:7, row] = 1
        for number, span in enumerate(images):
            at = torch.tensor(span.positions)
            _, height, width = span.grid
            cell = torch.arange(len(at))
            cells = [cell // (height * width), cell // width % height, cell % width]
            sizes = [torch.full_like(cell, size) for size in span.grid]
            video = torch.full_like(cell, int(span.modality == "video"))
            table[:, row, at] = torch.stack([torch.full_like(cell, number), *cells, *sizes, video])
    found = table.to(device).gather(2, visuals.slots.expand(8, rows, most))
    image, frame, line, column, frames, lines, columns, video = found
    return Layout(image, frame, line, column, frames, lines, columns, video.bool())
