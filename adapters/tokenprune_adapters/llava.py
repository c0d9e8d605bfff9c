"""LLaVA-1.5: a CLIP tower with a fixed number of patches per image."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from tokenprune.hookspecs import hookimpl
from tokenprune_adapters._decoder import DecoderAdapter


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


@hookimpl
def register_adapters(register: Callable[[type], None]) -> None:
    """Offer this adapter."""
    register(LlavaAdapter)
