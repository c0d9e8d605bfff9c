"""A tiny random LLaVA saved as users have them: config, weights, tokenizer, image processor, chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor, PreTrainedTokenizerFast
from zoo import clip, text

try:  # the class that needs no torchvision has had two names
    from transformers import CLIPImageProcessorPil as ImageProcessor
except ImportError:
    from transformers import CLIPImageProcessor as ImageProcessor

WORDS = ("<pad>", "<s>", "</s>", "<unk>", "<image>", "what", "is", "this", "?", "USER", "ASSISTANT", ":")
VOCABULARY = (*WORDS, *(f"w{i}" for i in range(len(WORDS), 100)))  # every id the model can say is a word
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] | upper }} : {% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<image> {% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %} ASSISTANT :{% endif %}"
)


def processor(template: str | None = TEMPLATE) -> Any:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", bos_token="<s>", eos_token="</s>",
        additional_special_tokens=["<image>"],
    )  # fmt: skip
    images = ImageProcessor(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
    return LlavaProcessor(
        images, words, patch_size=14, vision_feature_select_strategy="default", chat_template=template,
        image_token="<image>", num_additional_image_tokens=1,
    )  # fmt: skip


def save(folder: Path, depth: int = 6, template: str | None = TEMPLATE) -> Path:
    config = LlavaConfig(
        vision_config=clip(),
        text_config=text("llama", num_hidden_layers=depth),
        image_token_index=WORDS.index("<image>"),
        image_seq_length=16,
    )
    torch.manual_seed(0)
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    processor(template).save_pretrained(folder)
    return folder
