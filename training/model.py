"""The embedded model's architecture, tokenizer and processor: everything that is shipped except the trained weights."""

from __future__ import annotations

import math

import torch
from collage import COLORS, DIGITS, GRID, NUMBERS, PATCH, PLACES, SHAPES, SIDE
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

try:  # The class that needs no torchvision has had two names.
    from transformers import CLIPImageProcessorPil as ImageProcessor
except ImportError:
    from transformers import CLIPImageProcessor as ImageProcessor

SPECIAL = ("<pad>", "<s>", "</s>", "<unk>", "<image>")
TYPES = ("shape", "digit")
NOTHING = "nothing"
# Groups of words that describe one patch: the alignment stage makes a visual token the sum of its words' embeddings.
GROUPS: tuple[tuple[str, ...], ...] = (tuple(COLORS), SHAPES + DIGITS, PLACES, TYPES)
WORDS: tuple[str, ...] = (*GROUPS[0], *GROUPS[1], *GROUPS[2], *GROUPS[3], NOTHING)
FUNCTION_WORDS = (
    *("user", "assistant", ":", "?", ".", ",", "what", "color", "is", "at", "the", "object", "objects", "of", "there"),
    *("a", "an", "how", "many", "are", "where", "which", "in", "on", "image", "it", "and"),
    *(f"{s}s" for s in SHAPES),
    *("digits", "shapes", "yes", "no"),
)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '' if loop.first else ' ' }}{{ message['role'] | upper }}: "
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}"
    "{% for part in message['content'] if part['type'] == 'image' %}{{ '<image>\\n' }}{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'text' %}"
    "{{ part['text'] }}{{ '' if loop.last else ' ' }}{% endfor %}"
    "{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ ' ASSISTANT:' }}{% endif %}"
)


def vocabulary() -> list[str]:
    """All words, special ones first, padded with reserved ones to a multiple of eight."""
    words = list(dict.fromkeys([*SPECIAL, *WORDS, *NUMBERS, *FUNCTION_WORDS]))
    return words + [f"<reserved{i}>" for i in range(-len(words) % 8)]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer; case and the space in "top left" do not matter."""
    words = vocabulary()
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    spaced = [normalizers.Replace(f"{a} {b}", f"{a}{b}") for a in ("top", "bottom") for b in ("left", "right")]
    core.normalizer = normalizers.Sequence([normalizers.Lowercase(), *spaced])
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", words.index("<s>"))])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=["<image>"],
        padding_side="left",
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


def build_processor() -> LlavaProcessor:
    """Turns an image into pixels ``[1, 3, 144, 144]`` and ``<image>`` into 576 placeholders."""
    image_processor = ImageProcessor(
        size={"height": SIDE, "width": SIDE},
        do_center_crop=False,
        do_resize=True,
        do_rescale=True,
        do_normalize=True,
        do_convert_rgb=True,
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )
    return LlavaProcessor(
        image_processor,
        build_tokenizer(),
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        chat_template=CHAT_TEMPLATE,
        image_token="<image>",
        num_additional_image_tokens=1,
    )


def build_model(seed: int) -> LlavaForConditionalGeneration:
    """The untrained model, float32."""
    words = vocabulary()
    vision = CLIPVisionConfig(
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=5,
        num_attention_heads=4,
        image_size=SIDE,
        patch_size=PATCH,
        projection_dim=128,
        hidden_act="gelu",
    )
    text = LlamaConfig(
        vocab_size=len(words),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        initializer_range=0.05,
        pad_token_id=words.index("<pad>"),
        bos_token_id=words.index("<s>"),
        eos_token_id=words.index("</s>"),
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=words.index("<image>"),
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        image_seq_length=GRID * GRID,
        projector_hidden_act="gelu",
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    model = LlavaForConditionalGeneration(config)
    model.tie_weights()
    _initialise(model)
    return model


@torch.no_grad()
def _initialise(model: LlavaForConditionalGeneration) -> None:
    """Word embeddings of length one, and two-dimensional sines as the tower's first guess of where patches are."""
    weight = model.get_input_embeddings().weight
    weight.normal_(0, 1 / math.sqrt(weight.shape[1]))
    weight[0] = 0  # <pad>
    position = model.model.vision_tower.embeddings.position_embedding.weight
    width = position.shape[1] // 4
    rates = torch.pi / GRID * 2 ** torch.linspace(0, math.log2(GRID / 2), width)
    angle = torch.arange(GRID)[:, None] * rates
    wave = torch.cat([angle.sin(), angle.cos()], -1)  # [24, 2 * width]
    rows, cols = wave[:, None].expand(-1, GRID, -1), wave[None].expand(GRID, -1, -1)
    position[1:] = 0.5 * torch.cat([rows, cols], -1).reshape(GRID * GRID, -1)
    for module in model.model.multi_modal_projector.modules():
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.xavier_uniform_(module.weight)
            torch.nn.init.zeros_(module.bias)
    for layer in model.model.vision_tower.encoder.layers:
        for module in layer.modules():
            if isinstance(module, torch.nn.Linear):
                torch.nn.init.xavier_uniform_(module.weight)
    torch.nn.init.xavier_uniform_(model.model.vision_tower.embeddings.patch_embedding.weight.view(128, -1))
    _initialise_language(model)


def _initialise_language(model: LlavaForConditionalGeneration) -> None:
    """Attention starts as "look at what resembles me and take some of it over" (mimetic initialisation).

    Queries start near keys and the output projection as a small transpose of the values', so that a question's word
    finds the visual tokens it is part of from the first step. Every layer adds little to embeddings of length one:
    ordinary weights drown them in the first layers, and training stayed near the prior for hundreds of steps.
    """
    config = model.config.text_config
    repeat = config.num_attention_heads // config.num_key_value_heads

    def per_query_head(weight: torch.Tensor) -> torch.Tensor:
        heads = weight.view(config.num_key_value_heads, config.head_dim, -1)
        return heads.repeat_interleave(repeat, 0).flatten(0, 1)

    for layer in model.model.language_model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        torch.nn.init.orthogonal_(attention.k_proj.weight)
        torch.nn.init.orthogonal_(attention.v_proj.weight)
        query = per_query_head(attention.k_proj.weight)
        attention.q_proj.weight.copy_(query + 0.03 * torch.randn_like(query))
        value = per_query_head(attention.v_proj.weight)
        attention.o_proj.weight.copy_(0.04 * (value + 0.03 * torch.randn_like(value)).T)
        for linear in (mlp.gate_proj, mlp.up_proj):
            linear.weight.normal_(0, 1 / math.sqrt(config.hidden_size))
        mlp.down_proj.weight.normal_(0, 0.01)
