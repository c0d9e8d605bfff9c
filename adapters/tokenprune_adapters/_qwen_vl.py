"""What Qwen2-VL and Qwen2.5-VL share: grids per image and clip, M-RoPE positions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from tokenprune.interfaces import Tower
from tokenprune.tokens import TokenSpan
from tokenprune_adapters._decoder import DecoderAdapter, _runs, layers_in, part_of


class QwenVLAdapter(DecoderAdapter):
    """Images and clips of any size: the processor's `*_grid_thw` says how many tokens each has."""

    def visual_tokens_per_image(self, config: Any) -> int | None:
        """Return None: it depends on the image."""
        return None

    def renumbers(self, config: Any) -> str:
        """Return why not: whatever the configuration says, the family has 3-D positions."""
        return "its positions are grids of time, row and column (M-RoPE), not one sequence"

    def tower(self, config: Any) -> Tower | None:
        """Return the tower, whose merger joins `spatial_merge_size`^2 adjacent patches into a token."""
        vision = config.vision_config
        return Tower(vision.depth, merge=vision.spatial_merge_size**2)

    def tower_module(self, model: nn.Module) -> nn.Module:
        """Return the vision tower; its merger is the projector."""
        return part_of(model, "visual")

    def tower_layers(self, model: nn.Module) -> Sequence[nn.Module]:
        """Return the blocks of the tower."""
        return layers_in(self.tower_module(model))

    def projector(self, model: nn.Module) -> nn.Module:
        """Return the merger."""
        return part_of(self.tower_module(model), "merger")

    def tower_grids(self, model: nn.Module, inputs: Mapping[str, Any]) -> tuple[tuple[int, int, int], ...]:
        """Return one grid per image or clip, after the merger."""
        config: Any = model.config
        return tuple(_grids(inputs["grid_thw"], config.vision_config.spatial_merge_size))

    def spans(self, config: Any, inputs: Mapping[str, Any]) -> list[tuple[TokenSpan, ...]]:
        """Return images and clips, with (frames, rows, columns) after the merger joined `spatial_merge_size`^2 patches."""
        merge = config.vision_config.spatial_merge_size
        grids = {
            "image": _grids(inputs.get("image_grid_thw"), merge),
            "video": _grids(inputs.get("video_grid_thw"), merge),
        }
        ids: Tensor = inputs["input_ids"]
        rows = []
        for row in ids:
            spans: list[TokenSpan] = []
            for run in _runs((row == config.image_token_id) | (row == config.video_token_id)):
                start = run.start
                while start < run.stop:
                    modality = "image" if row[start] == config.image_token_id else "video"
                    grid = next(grids[modality])
                    size = grid[0] * grid[1] * grid[2]
                    spans.append(TokenSpan(tuple(range(start, start + size)), grid, modality))  # type: ignore[arg-type]
                    start += size
            rows.append(tuple(spans))
        return rows


def _grids(grid_thw: Tensor | None, merge: int) -> Iterator[tuple[int, int, int]]:
    for frames, rows, columns in grid_thw.tolist() if grid_thw is not None else ():
        yield frames, rows // merge, columns // merge
