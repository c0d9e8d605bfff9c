"""LLaVA-1.5: a CLIP tower with a fixed number of patches per image."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from torch import nn

from tokenprune.hookspecs import hookimpl
from tokenprune.interfaces import Tower
from tokenprune_adapters._decoder import DecoderAdapter, layers_in, part_of


class LlavaAdapter(DecoderAdapter):
    """LLaVA-1.5 (https://arxiv.org/abs/2310.03744): one square grid of patch tokens per image, CLS left out."""

    name: ClassVar[str] = "llava"
    model_types: ClassVar[frozenset[str]] = frozenset({"llava"})

    def visual_tokens_per_image(self, config: Any) -> int | None:
        """Return (image size / patch size)^2; None for towers of another kind (Pixtral: as many as the image has)."""
        vision = config.vision_config
        if getattr(vision, "model_type", "") not in ("clip_vision_model", "siglip_vision_model"):
            return None
        cls = getattr(config, "vision_feature_select_strategy", "default") == "full" and "clip" in vision.model_type
        side: int = vision.image_size // vision.patch_size
        return side**2 + int(cls)

    def tower(self, config: Any) -> Tower | None:
        """Return the CLIP or SigLIP tower, as far as the projector takes one of its layers."""
        vision = config.vision_config
        kind = getattr(vision, "model_type", "")
        if kind not in ("clip_vision_model", "siglip_vision_model"):
            return None
        if getattr(config, "vision_feature_select_strategy", "default") == "full" and "clip" in kind:
            return None  # CLS stays among the visual tokens, and has no patch of its own
        return Tower(vision.num_hidden_layers, cls=int("clip" in kind))

    def tower_module(self, model: nn.Module) -> nn.Module:
        """Return the vision tower, called once for all images."""
        return part_of(model, "vision_tower")

    def tower_grids(self, model: nn.Module, inputs: Mapping[str, Any]) -> tuple[tuple[int, int, int], ...]:
        """Return one grid of patches per image."""
        images, _, height, width = inputs["pixel_values"].shape
        config: Any = model.config
        patch = config.vision_config.patch_size
        return tuple((1, height // patch, width // patch) for _ in range(images))

    def tower_layers(self, model: nn.Module) -> Sequence[nn.Module]:
        """Return the layers of the vision tower."""
        return layers_in(self.tower_module(model))

    def projector(self, model: nn.Module) -> nn.Module:
        """Return the two-layer projector, which treats every token by itself."""
        return part_of(model, "multi_modal_projector")


@hookimpl
def register_adapters(register: Callable[[type], None]) -> None:
    """Offer this adapter."""
    register(LlavaAdapter)
