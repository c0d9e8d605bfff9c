"""Pictures shrunk before the processor, with processors of transformers themselves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from PIL import Image
from transformers import CLIPImageProcessor
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

from tokenprune.downsampling import downsample
from tokenprune.errors import InputError


def qwen(min_pixels: int) -> Callable[[Image.Image], int]:
    """Count as Qwen2-VL does: patches of 14, joined two by two."""
    names = IMAGE_PROCESSOR_MAPPING_NAMES["qwen2_vl"]
    kinds = list(names.values()) if isinstance(names, dict) else [name for name in names if name]
    import transformers

    for name in kinds:
        try:
            processor = getattr(transformers, name)(min_pixels=min_pixels, max_pixels=10**6)
            break
        except ImportError:  # the fast one needs torchvision
            continue
    else:
        pytest.fail(f"none of {kinds} can be made here")
    return lambda picture: int(torch.as_tensor(processor(images=[picture])["image_grid_thw"]).prod()) // 4


def picture(width: int, height: int) -> Image.Image:
    return Image.effect_noise((width, height), 60).convert("RGB")


@pytest.mark.parametrize("ratio", [0.5, 1 / 3, 2 / 9, 1 / 9])
@pytest.mark.parametrize("size", [(560, 560), (700, 420), (336, 672)])
def test_tokens_match_the_budget_and_the_shape_stays(size: tuple[int, int], ratio: float) -> None:
    count, image = qwen(28 * 28), picture(*size)
    small = downsample(image, count, keep_ratio=ratio)
    target = int(count(image) * ratio + 1e-9)
    assert 0.7 * target <= count(small) <= target  # sides are whole tokens, so not every number has a shape
    assert small.width / small.height == pytest.approx(size[0] / size[1], rel=0.05)


def test_a_picture_that_fits_is_returned_as_it_is() -> None:
    image = picture(280, 280)
    assert downsample(image, qwen(28 * 28), keep_ratio=1.0) is image


def test_models_of_a_fixed_number_of_tokens_say_so() -> None:
    processor = CLIPImageProcessor(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})

    def count(image: Image.Image) -> int:
        pixels = torch.as_tensor(processor(images=[image], return_tensors="pt")["pixel_values"])
        return (pixels.shape[-1] // 14) * (pixels.shape[-2] // 14)

    with pytest.raises(InputError, match="16 visual tokens to a picture of any size; pool them"):
        downsample(picture(200, 100), count, keep_ratio=0.5)


def test_a_processor_that_enlarges_small_pictures_is_named() -> None:
    with pytest.raises(InputError, match="the processor gives at least 100"):
        downsample(picture(560, 560), qwen(280 * 280), keep_ratio=0.1)
    with pytest.raises(InputError, match="keep_ratio"):
        downsample(picture(10, 10), qwen(1), keep_ratio=0.0)
