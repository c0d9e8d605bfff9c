"""Qwen2.5-VL."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tokenprune.hookspecs import hookimpl
from tokenprune_adapters._qwen_vl import QwenVLAdapter


class Qwen2_5VLAdapter(QwenVLAdapter):
    """Qwen2.5-VL (https://arxiv.org/abs/2502.13923): images and videos of any size, M-RoPE."""

    name: ClassVar[str] = "qwen2_5_vl"
    model_types: ClassVar[frozenset[str]] = frozenset({"qwen2_5_vl"})

    def tower_order(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor | None:
        """Return where each token stands in the tower, which goes window by window, each in raster order."""
        config: Any = model.config
        vision, orders, start = config.vision_config, [], 0
        side = vision.window_size // vision.spatial_merge_size // vision.patch_size
        for frames, rows, columns in self.tower_grids(model, inputs):
            frame, row, column = torch.meshgrid(*map(torch.arange, (frames, rows, columns)), indexing="ij")
            window = (frame * rows + row // side) * columns + column // side
            in_window = window.flatten().argsort(stable=True)  # tower place -> token; raster order inside a window
            orders.append(in_window.argsort() + start)
            start += frames * rows * columns
        return torch.cat(orders)


@hookimpl
def register_adapters(register: Callable[[type], None]) -> None:
    """Offer this adapter."""
    register(Qwen2_5VLAdapter)
