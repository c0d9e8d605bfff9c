"""A text tower that aligns images with text, for policies that compare them (`paired` signals): CDPruner, TRIM.

A language model's own tower has no text side, so the user gives one. It must be the one whose vision half made the
features: for LLaVA-1.5 `openai/clip-vit-large-patch14-336`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tokenprune.errors import InputError, LoadError, first_sentence
from tokenprune.interfaces import Paired

__all__ = ["ClipText", "TextTower"]


class TextTower(Protocol):
    """What a session asks of a text tower."""

    def pair(self, features: Tensor, prompts: Tensor) -> Paired:
        """Return aligned embeddings: image [B, N, E] of `features` [B, N, D] (what enters the projector), and text
        [B, M, E] of `prompts` [B, Q] token ids of the language model, in M segments."""
        ...


class ClipText:
    """The text half of a CLIP model, with its projection of patches.

    image = W_vision LayerNorm_post(v), text = the pooled embedding of every segment of the question, as many tokens long as
    the tower can read (77 for CLIP; CDPruner, https://arxiv.org/abs/2506.10967, cuts the question likewise).
    """

    def __init__(self, clip: nn.Module, tokenizer: Any, prompt_tokenizer: Any) -> None:
        """clip: a CLIP model of transformers. tokenizer: its own. prompt_tokenizer: of the language model, to read prompts."""
        self.clip: Any = clip
        self.tokenizer = tokenizer
        self.prompt_tokenizer = prompt_tokenizer

    @classmethod
    def from_pretrained(cls, id_or_path: str | Path, processor: Any) -> ClipText:
        """Load a CLIP model and its tokenizer; `processor`: of the language model (or its tokenizer)."""
        from transformers import AutoTokenizer, CLIPModel

        try:
            clip = CLIPModel.from_pretrained(id_or_path)
            tokenizer = AutoTokenizer.from_pretrained(id_or_path)
        except (OSError, ValueError) as error:
            raise LoadError(f"no CLIP model can be read from {id_or_path}: {first_sentence(error)}") from None
        return cls(clip.eval(), tokenizer, getattr(processor, "tokenizer", processor))

    def pair(self, features: Tensor, prompts: Tensor) -> Paired:
        """Return image [B, N, E] and text [B, M, E] embeddings."""
        vision = self.clip.vision_model
        width = vision.post_layernorm.normalized_shape[0]
        if features.shape[-1] != width:
            raise InputError(
                f"the text tower pairs with image features of width {width}, but this model's have {features.shape[-1]}; "
                "give the CLIP model its vision tower comes from"
            )
        with torch.no_grad():
            self.clip.to(features.device)
            states = vision.post_layernorm(features.to(vision.post_layernorm.weight.dtype))
            image = self.clip.visual_projection(states)
            rows = [self._text(row, features.device) for row in prompts]
        most = max(len(row) for row in rows)
        text = torch.stack([nn.functional.pad(row, (0, 0, 0, most - len(row))) for row in rows])
        valid = torch.tensor([[place < len(row) for place in range(most)] for row in rows], device=text.device)
        return Paired(image.float(), text.float(), valid)

    def _text(self, ids: Tensor, device: torch.device) -> Tensor:
        """Return [M, E] of one prompt."""
        words = self.prompt_tokenizer.decode(ids, skip_special_tokens=True)
        plain = self.tokenizer(words, add_special_tokens=False)["input_ids"]
        room = self.clip.config.text_config.max_position_embeddings - 2
        first, last = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        segments = [plain[at : at + room] for at in range(0, max(len(plain), 1), room)]
        embedded = []
        for segment in segments:
            given = torch.tensor([[first, *segment, last]], device=device)
            pooled = self.clip.text_model(input_ids=given).pooler_output
            embedded.append(self.clip.text_projection(pooled)[0])
        return torch.stack(embedded)
