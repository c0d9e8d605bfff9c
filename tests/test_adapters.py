"""Adapters describe: they find the right modules and the right tokens, and register nothing."""

from __future__ import annotations

import pytest
import torch
import transformers
import zoo
from torch import nn

from tokenprune.errors import UnsupportedModelError
from tokenprune.plan import adapter_for


@pytest.mark.parametrize("family", sorted(zoo.ZOO))
def test_decoder_layers_attention_and_visual_tokens_are_found(family: str) -> None:
    tiny = zoo.ZOO[family]
    model, inputs = tiny.model(), tiny.inputs(2)
    adapter = adapter_for(model.config)
    layers = adapter.layers(model)
    assert len(layers) == zoo.DEPTH == adapter.text_config(model.config).num_hidden_layers
    assert len({type(layer) for layer in layers}) == 1
    names = [type(adapter.attention(layer)).__name__ for layer in layers]
    assert all("Attention" in name for name in names)
    mask = adapter.visual_mask(model, inputs)
    ids = inputs["input_ids"]
    assert mask is not None and torch.equal(mask, (ids == zoo.IMAGE) | (ids == zoo.VIDEO))
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("family", sorted(zoo.ZOO))
def test_spans_cover_the_visual_tokens_in_order(family: str) -> None:
    tiny = zoo.ZOO[family]
    config, inputs = tiny.build().config, tiny.inputs(2)
    for row, spans in enumerate(adapter_for(config).spans(config, inputs)):
        ids = inputs["input_ids"][row]
        covered = [position for span in spans for position in span.positions]
        assert covered == ((ids == zoo.IMAGE) | (ids == zoo.VIDEO)).nonzero().flatten().tolist()


def test_llava_grids_are_square_and_images_are_told_apart() -> None:
    tiny = zoo.ZOO["llava"]
    ids = torch.tensor([[1, *[zoo.IMAGE] * 32, 5], [1, *[zoo.IMAGE] * 16, *[5] * 17]])
    first, second = adapter_for(tiny.build().config).spans(tiny.build().config, {"input_ids": ids})
    assert [(span.grid, span.positions[0]) for span in first] == [((1, 4, 4), 1), ((1, 4, 4), 17)]
    assert [(span.grid, span.positions[0]) for span in second] == [((1, 4, 4), 1)]


@pytest.mark.parametrize("family", ["qwen2_vl_video", "qwen2_5_vl_video"])
def test_qwen_grids_come_from_the_processor(family: str) -> None:
    tiny = zoo.ZOO[family]
    config = tiny.build().config
    rows = adapter_for(config).spans(config, tiny.inputs(2))
    assert [[(span.modality, span.grid) for span in row] for row in rows] == [
        [("video", (2, 4, 4)), ("image", (1, 4, 4))]
    ] * 2


def test_tokens_per_image() -> None:
    def tokens(config: transformers.PretrainedConfig) -> int | None:
        return adapter_for(config).visual_tokens_per_image(config)

    assert tokens(transformers.LlavaConfig()) == 576
    assert tokens(zoo.ZOO["llava_pixtral"].build().config) is None
    assert tokens(zoo.ZOO["internvl"].build().config) == 16
    assert tokens(transformers.Qwen2VLConfig()) is None


def test_a_model_without_a_decoder_or_attention_is_refused_in_one_sentence() -> None:
    config = zoo.ZOO["llava"].build().config
    adapter = adapter_for(config)
    empty = nn.Module()
    empty.config = config
    with pytest.raises(UnsupportedModelError, match="no decoder with 6 layers was found in Module; write an adapter"):
        adapter.decoder(empty)
    with pytest.raises(UnsupportedModelError, match="no attention module was found in Module; write an adapter"):
        adapter.attention(empty)
