"""Models of the depth and the number of tokens that published settings are written for, of tiny width."""

from __future__ import annotations

import inspect
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers as T
import zoo
from safetensors.torch import save_file
from torch import Tensor

from tokenprune.interfaces import Options, Paired
from tokenprune.plan import plan
from tokenprune.policy import Policy

FRAMES = 8


@cache
def llava() -> Any:
    """LLaVA-1.5: 24 tower layers, 576 visual tokens, 32 decoder layers."""
    torch.manual_seed(0)
    config = T.LlavaConfig(
        vision_config=zoo.clip(num_hidden_layers=24, image_size=96, patch_size=4),
        text_config=zoo.text("llama", num_hidden_layers=32, max_position_embeddings=1024), image_token_index=zoo.IMAGE,
    )  # fmt: skip
    return T.LlavaForConditionalGeneration(config).eval()


@cache
def qwen() -> Any:
    """Qwen2-VL: 28 decoder layers, clips of 8 frames of 36 tokens."""
    torch.manual_seed(0)
    config = T.Qwen2VLConfig(
        vision_config=dict(depth=4, embed_dim=32, hidden_size=64, num_heads=2, patch_size=14, mlp_ratio=2),
        text_config={**zoo.TEXT, "num_hidden_layers": 28, "max_position_embeddings": 1024, **zoo.rope(2, 3, 3)},
        image_token_id=zoo.IMAGE, video_token_id=zoo.VIDEO, vision_start_token_id=96, vision_end_token_id=97,
    )  # fmt: skip
    return T.Qwen2VLForConditionalGeneration(config).eval()


def images(rows: int = 1) -> dict[str, Any]:
    return {**zoo.prompt(rows, 576), "pixel_values": zoo.noise(rows, 3, 96, 96)}


def clips(rows: int = 1) -> dict[str, Any]:
    """Clips in which most of the picture stands still: even frames are noisy copies of the one before."""
    tokens = FRAMES * 36
    given: dict[str, Any] = zoo.prompt(rows, tokens, start=6, token=zoo.VIDEO)
    for row in given["input_ids"]:
        first = int((row == zoo.VIDEO).nonzero()[0])
        row[first - 1], row[first + tokens] = 96, 97
    patches = zoo.noise(rows, FRAMES, 144, 3 * 2 * 14 * 14)
    patches[:, 1::2] = patches[:, ::2] + 0.05 * patches[:, 1::2]
    given["pixel_values_videos"] = patches.flatten(0, 2)
    given["video_grid_thw"] = torch.tensor([[FRAMES, 12, 12]] * rows)
    known = inspect.signature(T.Qwen2VLForConditionalGeneration.forward).parameters
    if "mm_token_type_ids" in known:  # newer transformers wants it, older refuses it
        given["mm_token_type_ids"] = 2 * (given["input_ids"] == zoo.VIDEO).int()
    return given


def for_policy(policy: Policy, rows: int = 1) -> tuple[Any, dict[str, Any]]:
    """Return a model and inputs that the policy is meant for."""
    return (qwen(), clips(rows)) if policy.modality == "video" else (llava(), images(rows))


class RandomTower:
    """Stands in for a CLIP: random, but the same every time."""

    def pair(self, features: Tensor, prompts: Tensor) -> Paired:
        g = torch.Generator().manual_seed(0)
        project = torch.randn(features.shape[-1], 8, generator=g)
        text = torch.randn(features.shape[0], 2, 8, generator=g)
        return Paired(features.float() @ project, text, torch.ones(text.shape[:2], dtype=torch.bool))


def resources(policy: Policy, model: Any, folder: Path) -> dict[str, Any]:
    """Write random weights where the policy expects trained ones; return what `compress` needs beside the policy."""
    for options in walk(
        *(part for stage in policy.stages for part in (stage.scorer, stage.selector, stage.merger, stage.budget))
    ):
        file = getattr(options, "file", None)
        if file:
            width = model.config.get_text_config().hidden_size
            g = torch.Generator().manual_seed(0)
            weights = {
                "layers.0.weight": torch.randn(8, width, generator=g),
                "layers.1.weight": torch.randn(1, 8, generator=g),
            }
            save_file(weights, folder / file)
    wants = any(signal.name == "paired" for stage in policy.stages for signal in stage.needs())
    return {"text_tower": RandomTower()} if wants else {}


def walk(*roots: Any) -> list[Options]:
    """Return everything inside the given parts."""
    found = [root for root in roots if isinstance(root, Options)]
    for options in found:
        found.extend(options.children())
    return found


def fits(policy: Policy) -> bool:
    """Whether the planner lays the policy on its model."""
    return bool(plan(policy, for_policy(policy)[0]).stages)
