"""A CLIP text tower from a folder, and a policy that needs it, on a LLaVA that has its vision half."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T
import zoo
from tokenizers import Tokenizer, models, pre_tokenizers

from policies import policy, stage
from tokenprune.errors import InputError, LoadError, SessionError
from tokenprune.session import compress
from tokenprune.text_tower import ClipText

WORDS = ["<pad>", "<s>", "</s>", "<image>", *(f"w{i}" for i in range(96))]
PAIRED = {"name": "text_relevance", "of": "paired"}


def tokenizer(**special: Any) -> Any:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    options = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "w0", **special}
    return T.PreTrainedTokenizerFast(tokenizer_object=words, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CLIP with room for 10 text tokens, saved with its tokenizer."""
    torch.manual_seed(0)
    text = dict(vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                max_position_embeddings=10, bos_token_id=1, eos_token_id=2)  # fmt: skip
    config = T.CLIPConfig(text_config=text, vision_config=zoo.VISION, projection_dim=16)
    place = tmp_path_factory.mktemp("clip")
    T.CLIPModel(config).eval().save_pretrained(place)
    tokenizer().save_pretrained(place)
    return place


def test_image_and_text_are_what_clip_itself_makes_of_them(folder: Path) -> None:
    tower = ClipText.from_pretrained(folder, tokenizer(additional_special_tokens=["<image>"]))
    clip = T.CLIPModel.from_pretrained(folder).eval()
    features = zoo.noise(2, 16, 32)
    prompts = torch.tensor([[1, 3, 3, 10, 11, 12], [0, 1, 3, 3, 20, 21]])
    paired = tower.pair(features, prompts)
    with torch.no_grad():
        image = clip.visual_projection(clip.vision_model.post_layernorm(features))
        text = [clip.get_text_features(torch.tensor([[1, *words, 2]])) for words in ([10, 11, 12], [20, 21])]
    torch.testing.assert_close(paired.image, image)
    for row, want in enumerate(text):
        want = want if isinstance(want, torch.Tensor) else want.pooler_output
        torch.testing.assert_close(paired.text[row], want, atol=1e-5, rtol=1e-4)
    assert paired.text_valid.all()


def test_a_long_question_is_cut_into_segments_the_tower_can_read(folder: Path) -> None:
    tower = ClipText.from_pretrained(folder, tokenizer())
    prompts = torch.zeros(2, 20, dtype=torch.long)
    prompts[0, :], prompts[1, :3] = torch.arange(10, 30), torch.arange(10, 13)
    paired = tower.pair(zoo.noise(2, 16, 32), prompts)
    assert paired.text.shape == (2, 3, 16)  # 8 words a segment, beside the two that mark its ends
    assert paired.text_valid.tolist() == [[True] * 3, [True, False, False]]


def test_a_policy_that_compares_images_with_text(folder: Path) -> None:
    tiny = zoo.ZOO["llava"]
    tower = ClipText.from_pretrained(folder, tokenizer(additional_special_tokens=["<image>"]))
    wanted = policy("paired", stage("projector.output", PAIRED, keep_tokens=5, per="image"))
    model, inputs = tiny.model(), tiny.inputs(2)
    with torch.no_grad(), compress(model, wanted, text_tower=tower) as session:
        model(**inputs)
        first = session.report.stages[0]
        model(**{**inputs, "input_ids": inputs["input_ids"].roll(0)})
    with torch.no_grad():
        states = model.model.vision_tower(inputs["pixel_values"], output_hidden_states=True).hidden_states[-2][:, 1:]
    paired = tower.pair(states, inputs["input_ids"])
    image, text = (torch.nn.functional.normalize(x, dim=-1) for x in (paired.image, paired.text))
    for row in range(2):
        there = text[row][paired.text_valid[row]]
        expected = (image[row] @ there.T).mean(1)
        assert first.scores is not None
        torch.testing.assert_close(first.scores[row], expected, atol=1e-5, rtol=1e-4)


def test_without_a_tower_or_with_a_wrong_one_it_is_refused(folder: Path, tmp_path: Path) -> None:
    tiny = zoo.ZOO["llava"]
    wanted = policy("paired", stage("projector.output", PAIRED, keep_tokens=5, per="image"))
    with pytest.raises(SessionError, match="score with the prompt's own embeddings"), compress(tiny.model(), wanted):
        pass
    tower = ClipText.from_pretrained(folder, tokenizer())
    with pytest.raises(InputError, match="features of width 32, but this model's have 48"):
        tower.pair(zoo.noise(1, 4, 48), torch.ones(1, 3, dtype=torch.long))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "clip"}))
    for place in (tmp_path / "nothing", tmp_path):
        with pytest.raises(LoadError, match="no CLIP model can be read from"):
            ClipText.from_pretrained(place, tokenizer())
