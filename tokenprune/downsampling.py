"""The honest baseline: shrink the picture before the processor sees it, until it has as few visual tokens as a policy keeps."""

from __future__ import annotations

from collections.abc import Callable

from PIL import Image

from tokenprune.errors import InputError

__all__ = ["downsample"]


def downsample(image: Image.Image, count: Callable[[Image.Image], int], *, keep_ratio: float) -> Image.Image:
    """Return the picture shrunk, aspect ratio kept, to the largest size with at most `keep_ratio` of its visual tokens.

    count: how many visual tokens the model's processor gives a picture, for example
        `lambda picture: int((processor(text=["<image>"], images=[picture])["input_ids"] == image_token_id).sum())`.
        It is asked about a dozen times.

    Only models of native resolution (Qwen-VL and its kind) have fewer tokens for a smaller picture. Raises InputError for the
    others, whose tokens can be pooled instead (policies `downsample-144`, `downsample-64`), and when the processor enlarges
    small pictures again.
    """
    if not 0 < keep_ratio <= 1:
        raise InputError(f"keep_ratio is the share of the tokens that stays, in (0, 1], not {keep_ratio}")
    before = count(image)
    target = int(before * keep_ratio + 1e-9)
    smallest = _scaled(image, 0.0)
    if before <= target:
        return image
    if count(smallest) == before:
        raise InputError(
            f"this model gives {before} visual tokens to a picture of any size; pool them instead, with the policies "
            "downsample-144 or downsample-64"
        )
    low, high = 0.0, 1.0  # tokens only grow with the size, so bisection finds the largest size that fits
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if count(_scaled(image, middle)) <= target else (low, middle)
    found = _scaled(image, low)
    left = count(found)
    if left > target:
        raise InputError(
            f"{target} visual tokens cannot be reached: the processor gives at least {left} (it enlarges small pictures; "
            "lower its min_pixels)"
        )
    return found


def _scaled(image: Image.Image, scale: float) -> Image.Image:
    """Return the picture with both sides scaled, at least one pixel long."""
    size = tuple(max(round(side * scale), 1) for side in image.size)
    return image.resize((size[0], size[1]), Image.Resampling.BICUBIC)
