"""Tiny random models of real families, built from configuration classes: no downloads, well under a second each.

Every builder gives a model and the inputs of a batch. Row b has its image 3 b positions later than row 0, and the last row
is left-padded, so a batch of 3 is ragged in every way but the number of visual tokens; `ragged` changes that too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as T
from torch import Tensor
from transformers import CONFIG_MAPPING

IMAGE, VIDEO = 99, 98
DEPTH = 6
TEXT: dict[str, Any] = dict(
    vocab_size=100, hidden_size=64, intermediate_size=96, num_hidden_layers=DEPTH, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
VISION: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=56, patch_size=14
)
ALTERNATING = ["sliding_attention", "full_attention"] * (DEPTH // 2)


def text(kind: str, **options: Any) -> Any:
    return CONFIG_MAPPING[kind](**{**TEXT, **options})


def clip(**options: Any) -> Any:
    return CONFIG_MAPPING["clip_vision_model"](**{**VISION, "projection_dim": 32, **options})


def siglip(**options: Any) -> Any:
    return CONFIG_MAPPING["siglip_vision_model"](**{**VISION, "vision_use_head": False, **options})


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


def prompt(
    rows: int, tokens: int, *, pad: int = 3, start: int = 5, tail: int = 9, token: int = IMAGE
) -> dict[str, Tensor]:
    """Return ids and mask of `rows` prompts with one image of `tokens` placeholders each; the last row is padded."""
    length = start + tokens + tail + 3 * (rows - 1)
    ids = torch.randint(3, 90, (rows, length), generator=torch.Generator().manual_seed(1))
    for row in range(rows):
        ids[row, start + 3 * row : start + 3 * row + tokens] = token
    mask = torch.ones_like(ids)
    if rows > 1 and pad and start + 3 * (rows - 1) >= pad:
        ids[-1, :pad], mask[-1, :pad] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def ragged_prompt(tokens: int) -> dict[str, Tensor]:
    """Return three left-padded prompts: one image; two images with text between; no image at all."""
    g = torch.Generator().manual_seed(3)

    def words(n: int) -> list[int]:
        return torch.randint(3, 90, (n,), generator=g).tolist()

    image = [IMAGE] * tokens
    rows = [words(4) + image + words(7), words(3) + image + words(5) + image + words(6), words(13)]
    length = max(map(len, rows))
    ids = torch.tensor([[0] * (length - len(row)) + row for row in rows])
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


@dataclass(frozen=True)
class Tiny:
    """A family: how to build its model, and how to build inputs for `rows` prompts."""

    build: Callable[[], Any]
    inputs: Callable[[int], dict[str, Any]]
    tokens: int = 16
    ragged: Callable[[], dict[str, Any]] | None = None
    suppress: tuple[int, ...] = (IMAGE, VIDEO)

    def model(self, attention: str = "sdpa", dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
        torch.manual_seed(seed)
        model = self.build().to(dtype).eval()
        model.set_attn_implementation(attention)
        return model


def images(
    model: str,
    config: Callable[[], Any],
    tokens: int = 16,
    pixels: Callable[[int], Tensor] = lambda rows: noise(rows, 3, 56, 56),
    more: Callable[[dict[str, Tensor]], dict[str, Any]] = lambda given: {},
    name: str = "pixel_values",
    **prompt_options: Any,
) -> Tiny:
    def inputs(rows: int) -> dict[str, Any]:
        given = prompt(rows, tokens, **prompt_options)
        return {**given, name: pixels(rows), **more(given)}

    def ragged() -> dict[str, Any]:
        given = ragged_prompt(tokens)
        return {**given, name: pixels(int((given["input_ids"] == IMAGE).sum()) // tokens), **more(given)}

    return Tiny(lambda: getattr(T, model)(config()), inputs, tokens, ragged)


def sizes(side: int) -> Callable[[dict[str, Tensor]], dict[str, Any]]:
    return lambda given: {"image_sizes": torch.tensor([[side, side]] * len(given["input_ids"]))}


def is_image(name: str) -> Callable[[dict[str, Tensor]], dict[str, Any]]:
    return lambda given: {name: (given["input_ids"] == IMAGE).long()}


def qwen(model: str, config: str, vision: dict[str, Any], language: dict[str, Any], **options: Any) -> Tiny:
    """Families of the Qwen-VL kind: patches in one list, grids beside them, 3-D rotary positions."""

    def build() -> Any:
        made = getattr(T, config)(
            vision_config=vision, text_config={**TEXT, **language}, image_token_id=IMAGE, video_token_id=VIDEO,
            **{"vision_start_token_id": 96, "vision_end_token_id": 97, **options},
        )  # fmt: skip
        return getattr(T, model)(made)

    def inputs(rows: int) -> dict[str, Any]:
        given = prompt(rows, 16, start=6)
        ids = given["input_ids"]
        for row in ids:
            first = int((row == IMAGE).nonzero()[0])
            row[first - 1], row[first + 16] = 96, 97
        return {**given, **patches(ids, model)}

    def ragged() -> dict[str, Any]:
        given = ragged_prompt(16)
        return {**given, **patches(given["input_ids"], model)}

    return Tiny(build, inputs, ragged=ragged)


def clips(family: Tiny, model: str) -> Tiny:
    """The same family reading a clip of two temporal patches and an image in every prompt."""

    def inputs(rows: int) -> dict[str, Any]:
        given = prompt(rows, 48, start=6, tail=12)
        ids = given["input_ids"]
        for row in ids:
            first = int((row == IMAGE).nonzero()[0])
            row[first - 1], row[first : first + 32], row[first + 48] = 96, VIDEO, 97
        return {
            **given,
            **patches(ids, model),
            "pixel_values_videos": noise(rows * 2 * 64, 3 * 2 * 14 * 14),
            "video_grid_thw": torch.tensor([[2, 8, 8]] * rows),
        }

    return Tiny(family.build, inputs, tokens=48)


def patches(ids: Tensor, model: str) -> dict[str, Any]:
    """Return pixels and grids for every image (16 tokens, 8 x 8 patches) in `ids`."""
    count = int((ids == IMAGE).sum()) // 16
    types = {
        "mm_token_type_ids": ((ids == IMAGE) + 2 * (ids == VIDEO)).int()
    }  # newer transformers wants it, older refuses it
    known = inspect.signature(getattr(T, model).forward).parameters
    return {
        "pixel_values": noise(count * 64, 3 * 2 * 14 * 14),
        "image_grid_thw": torch.tensor([[1, 8, 8]] * count),
        **{name: value for name, value in types.items() if name in known},
    }


def rope(*sections: int, **options: Any) -> dict[str, Any]:
    parameters = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections), **options}
    return {"rope_parameters": parameters}


def idefics(model: str, config: str, vision: str) -> Tiny:
    def make() -> Any:
        tower = CONFIG_MAPPING[vision](**{**VISION, "patch_size": 7})
        return getattr(T, config)(
            vision_config=tower, text_config=text("llama"), image_token_id=IMAGE, scale_factor=2, pad_token_id=0
        )

    return images(model, make, pixels=lambda rows: noise(rows, 1, 3, 56, 56))


def pixtral() -> Any:
    return CONFIG_MAPPING["pixtral"](**{**VISION, "image_size": 112, "head_dim": 16})


def mistral() -> Any:
    return text("mistral", sliding_window=None, head_dim=16)


def mistral_sliding() -> Any:
    return text("mistral", sliding_window=10, head_dim=16)


def large(rows: int) -> Tensor:
    return noise(rows, 3, 112, 112)


ANYRES = {"image_grid_pinpoints": [[56, 56], [56, 112]], "image_token_index": IMAGE}
GLM = dict(VISION, depth=2, out_hidden_size=64, num_heads=2)
GLM_IDS = {"image_start_token_id": 94, "image_end_token_id": 95, "video_start_token_id": 92, "video_end_token_id": 93}


def video_next() -> Tiny:
    def build() -> Any:
        config = T.LlavaNextVideoConfig(
            vision_config=clip(), text_config=text("llama"), video_token_index=VIDEO, **ANYRES
        )
        return T.LlavaNextVideoForConditionalGeneration(config)

    def inputs(rows: int) -> dict[str, Any]:
        return {**prompt(rows, 16, token=VIDEO), "pixel_values_videos": noise(rows, 4, 3, 56, 56)}

    return Tiny(build, inputs)


ZOO: dict[str, Tiny] = {
    "llava": images("LlavaForConditionalGeneration", lambda: T.LlavaConfig(
        vision_config=clip(), text_config=text("llama"), image_token_index=IMAGE)),
    "llava_pixtral": images("LlavaForConditionalGeneration", lambda: T.LlavaConfig(
        vision_config=CONFIG_MAPPING["pixtral"](**VISION, head_dim=16), text_config=mistral(), image_token_index=IMAGE,
        vision_feature_select_strategy="full", vision_feature_layer=-1), more=sizes(56)),
    "qwen2_vl": qwen("Qwen2VLForConditionalGeneration", "Qwen2VLConfig",
        dict(depth=2, embed_dim=32, hidden_size=64, num_heads=2, patch_size=14, mlp_ratio=2), rope(2, 3, 3)),
    "qwen2_5_vl": qwen("Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLConfig",
        dict(depth=2, hidden_size=32, intermediate_size=64, out_hidden_size=64, num_heads=2, patch_size=14,
             fullatt_block_indexes=[1], window_size=56), rope(2, 3, 3)),
    "vipllava": images("VipLlavaForConditionalGeneration", lambda: T.VipLlavaConfig(
        vision_config=clip(num_hidden_layers=4), text_config=text("llama"), image_token_index=IMAGE,
        vision_feature_layers=[-1, -2])),
    "llava_next": images("LlavaNextForConditionalGeneration", lambda: T.LlavaNextConfig(
        vision_config=clip(), text_config=text("llama"), **ANYRES), 36, lambda rows: noise(rows, 2, 3, 56, 56), sizes(56)),
    "llava_next_video": video_next(),
    "llava_onevision": images("LlavaOnevisionForConditionalGeneration", lambda: T.LlavaOnevisionConfig(
        vision_config=siglip(), text_config=text("qwen2"), video_token_index=VIDEO,
        vision_feature_select_strategy="full", **ANYRES), 36, lambda rows: noise(rows, 2, 3, 56, 56), sizes(56)),
    "video_llava": images("VideoLlavaForConditionalGeneration", lambda: T.VideoLlavaConfig(
        vision_config=clip(), text_config=text("llama"), image_token_index=IMAGE, video_token_index=VIDEO,
        image_seq_length=16, video_seq_length=17 * 8), name="pixel_values_images"),
    "internvl": images("InternVLForConditionalGeneration", lambda: T.InternVLConfig(
        vision_config={**VISION, "image_size": [56, 56], "patch_size": [7, 7]}, text_config=text("qwen2"),
        image_token_id=IMAGE, image_seq_length=16, downsample_ratio=0.5)),
    "ovis2": images("Ovis2ForConditionalGeneration", lambda: T.Ovis2Config(
        vision_config=CONFIG_MAPPING["ovis2_vision"](
            **{**VISION, "patch_size": 7}, vocab_size=60, hidden_stride=2, num_visual_indicator_tokens=5),
        text_config=text("qwen2"), image_token_id=IMAGE, visual_indicator_token_ids=[90, 91, 92, 93, 94],
        vocab_size=100, hidden_size=64)),
    "got_ocr2": images("GotOcr2ForConditionalGeneration", lambda: T.GotOcr2Config(
        vision_config=CONFIG_MAPPING["got_ocr2_vision"](
            hidden_size=32, output_channels=16, num_hidden_layers=2, num_attention_heads=2, image_size=256,
            patch_size=16, mlp_dim=64, window_size=4, global_attn_indexes=[1]),
        text_config=text("qwen2"), image_token_index=IMAGE, image_seq_length=16),
        pixels=lambda rows: noise(rows, 3, 256, 256)),
    "deepseek_vl": images("DeepseekVLForConditionalGeneration", lambda: T.DeepseekVLConfig(
        vision_config=siglip(), text_config=text("llama"), image_token_id=IMAGE)),
    "smolvlm": idefics("SmolVLMForConditionalGeneration", "SmolVLMConfig", "smolvlm_vision"),
    "idefics3": idefics("Idefics3ForConditionalGeneration", "Idefics3Config", "idefics3_vision"),
    "mistral3": images("Mistral3ForConditionalGeneration", lambda: T.Mistral3Config(
        vision_config=pixtral(), text_config=mistral(), image_token_index=IMAGE, spatial_merge_size=2,
        vision_feature_layer=-1), pixels=large, more=sizes(112)),
    "mistral3_sliding": images("Mistral3ForConditionalGeneration", lambda: T.Mistral3Config(
        vision_config=pixtral(), text_config=mistral_sliding(), image_token_index=IMAGE, spatial_merge_size=2,
        vision_feature_layer=-1), pixels=large, more=sizes(112)),
    "paligemma": images("PaliGemmaForConditionalGeneration", lambda: T.PaliGemmaConfig(
        vision_config=siglip(), text_config=text("gemma", head_dim=16), image_token_index=IMAGE, projection_dim=64),
        more=lambda given: {"token_type_ids": torch.zeros_like(given["input_ids"])}, start=0),
    "gemma3": images("Gemma3ForConditionalGeneration", lambda: T.Gemma3Config(
        vision_config=siglip(), text_config=text("gemma3_text", head_dim=16, sliding_window=8, layer_types=ALTERNATING,
        query_pre_attn_scalar=16), image_token_index=IMAGE, mm_tokens_per_image=16, boi_token_index=96,
        eoi_token_index=97), more=is_image("token_type_ids")),
    "aya_vision": images("AyaVisionForConditionalGeneration", lambda: T.AyaVisionConfig(
        vision_config=siglip(image_size=112), text_config=text("cohere2", sliding_window=8, layer_types=ALTERNATING),
        image_token_index=IMAGE, downsample_factor=2, vision_feature_layer=-1), pixels=large),
    "cohere2_vision": images("Cohere2VisionForConditionalGeneration", lambda: T.Cohere2VisionConfig(
        vision_config=siglip(image_size=112), text_config=text("cohere2", sliding_window=8, layer_types=ALTERNATING),
        image_token_id=IMAGE, downsample_factor=2, alignment_intermediate_size=64), pixels=large),
    "glm4v": qwen("Glm4vForConditionalGeneration", "Glm4vConfig", GLM,
        rope(2, 3, 3, partial_rotary_factor=1.0), **GLM_IDS),
    "aria": images("AriaForConditionalGeneration", lambda: T.AriaConfig(
        vision_config=CONFIG_MAPPING["idefics3_vision"](**VISION),
        text_config=text("aria_text", moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1),
        image_token_index=IMAGE, projector_patch_to_query_dict={16: 16})),
}  # fmt: skip
ZOO["qwen2_vl_video"] = clips(ZOO["qwen2_vl"], "Qwen2VLForConditionalGeneration")
ZOO["qwen2_5_vl_video"] = clips(ZOO["qwen2_5_vl"], "Qwen2_5_VLForConditionalGeneration")

# Families that this version of transformers does not have.
KINDS = {"ovis2": "ovis2_vision", "got_ocr2": "got_ocr2_vision", "aria": "aria_text"}
ABSENT = {name for name, kind in KINDS.items() if kind not in CONFIG_MAPPING}
for _name in ABSENT:
    del ZOO[_name]
