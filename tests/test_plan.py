"""Counts, averages and FLOPs against arithmetic done by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from tokenprune.budget import Budget, exact_floor
from tokenprune.errors import PolicyError, UnsupportedModelError
from tokenprune.flops import LayerShape, kv_bytes, layer_flops, paper_macs
from tokenprune.plan import plan
from tokenprune.tokens import Site, TokenSpan

LLAVA = transformers.LlavaConfig()


def solved(average: float, *budgets: dict[str, Any] | None, sites: tuple[str, ...] = ("3", "17", "22")) -> Any:
    stages = [
        {"at": f"llm.layers.{site}", "scorer": "variation", **({"budget": budget} if budget else {})}
        for site, budget in zip(sites, budgets, strict=True)
    ]
    return plan({"name": "solved", "average_tokens": average, "stages": stages}, LLAVA)


def test_the_default_llava_configuration_is_the_7b_model() -> None:
    planned = plan("fastv", LLAVA)
    assert (planned.depth, planned.visual_tokens, planned.adapter.name) == (32, 576, "llava")
    assert planned.shape == LayerShape(4096, 32, 32, 128, 11008)


@pytest.mark.parametrize(("text", "depth", "layer"), [
    ("llm.input", 32, 0), ("llm.layers.0", 32, 0), ("llm.layers.-1", 32, 31), ("llm.layers.-32", 32, 0),
    ("llm.layers.25%", 32, 8), ("llm.layers.10%", 32, 3), ("llm.layers.10%", 12, 1), ("llm.layers.12.5%", 12, 2),
    ("llm.layers.99.9%", 12, 11), ("llm.layers.0%", 12, 0),
])  # fmt: skip
def test_sites(text: str, depth: int, layer: int) -> None:
    assert Site(text).layer(depth) == layer


@pytest.mark.parametrize(
    "text", ["llm", "llm.layers", "llm.layers.1.5", "llm.layers.100%", "llm.layers.-5%", "vision", "vision.input", ""]
)
def test_what_is_not_a_site(text: str) -> None:
    with pytest.raises(ValueError, match=r"site|share of the depth"):
        Site(text)


def test_rounding_is_the_floor_of_the_decimal_number_as_written() -> None:
    assert exact_floor(100, 0.29) == 29  # int(100 * 0.29) is 28
    assert [exact_floor(576, r) for r in (0.5, 0.28, 0.05, 0.7, 1.0, 0.0)] == [288, 161, 28, 403, 576, 0]


def test_budget_counts() -> None:
    assert Budget(keep_ratio=0.3).count(288, 576) == 86
    assert Budget(keep_ratio=0.3, of="original").count(288, 576) == 172
    assert Budget(keep_ratio=0.9, of="original").count(288, 576) == 288
    assert Budget(keep_ratio=0.0, min_tokens=1).count(86, 576) == 1
    assert Budget(keep_ratio=0.0, min_tokens=1).count(0, 576) == 0
    assert Budget(keep_tokens=64).count(40, 576) == 40


@pytest.mark.parametrize("wrong", [
    {}, {"keep_ratio": 2.0}, {"keep_tokens": -1}, {"keep_ratio": 0.5, "keep_tokens": 3}, {"keep_tokens": 3, "of": "original"},
    {"keep_ratio": 0.5, "min_tokens": -1}, {"keep_ratio": float("nan")},
])  # fmt: skip
def test_budgets_that_are_none(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"keep|min_tokens"):
        Budget(**wrong)


@pytest.mark.parametrize("target", [192, 128, 64, 100.5])
def test_average_tokens_is_met_and_no_token_more_would_fit(target: float) -> None:
    planned = solved(target, None, {"keep_ratio": 0.3}, {"keep_tokens": 0})
    first, second, last = planned.counts(576)
    assert last == 0 and second == exact_floor(first, 0.3)
    average = (3 * 576 + 14 * first + 5 * second) / 32
    assert planned.cost(576).average_entering == average <= target
    more = first + 1
    assert (3 * 576 + 14 * more + 5 * exact_floor(more, 0.3)) / 32 > target


def test_several_open_stages_share_one_ratio() -> None:
    first, second, third = solved(200, None, None, None).counts(576)
    assert abs(second / first - first / 576) < 2 / first and abs(third / second - first / 576) < 2 / second
    assert 199 < solved(200, None, None, None).cost(576).average_entering <= 200


def test_a_prompt_with_fewer_tokens_than_the_average_keeps_all() -> None:
    assert solved(192, None, {"keep_ratio": 1.0}, {"keep_ratio": 1.0}).counts(100) == (100, 100, 100)


def test_an_average_out_of_reach_for_this_prompt_is_an_error_at_run_time_too() -> None:
    planned = solved(60, None, {"keep_ratio": 0.3}, {"keep_tokens": 0})
    with pytest.raises(PolicyError, match="cannot be reached with 6000 visual tokens"):
        planned.counts(6000)


def test_entering_and_leaving() -> None:
    cost = plan("v2drop-llava-1.5-7b-192", LLAVA).cost(576)
    assert cost.entering == (576,) * 3 + (288,) * 14 + (86,) * 5 + (0,) * 10
    assert cost.average_entering == 6190 / 32
    assert cost.average_leaving == (6190 - 576) / 32


def test_flops_by_hand() -> None:
    shape = LayerShape(width=8, heads=4, key_heads=2, head_width=3, feed_forward=10)
    tokens, inner, key_inner = 5, 12, 6
    projections = 2 * tokens * (8 * inner + 2 * 8 * key_inner + inner * 8)
    attention = 2 * 2 * tokens * tokens * inner
    feed = 2 * tokens * 3 * 8 * 10
    assert layer_flops(shape, tokens) == projections + attention + feed
    assert kv_bytes(shape, tokens) == 2 * tokens * key_inner * 2


def test_published_flops() -> None:
    """PyramidDrop prints 3.82 T for LLaVA-1.5-7B with 576 tokens, and 1.78 T for its schedule at 8/16/24."""
    shape = LayerShape.of(LLAVA.text_config)
    assert round(paper_macs(shape, [576] * 32) / 1e12, 2) == 3.82
    schedule = [576] * 8 + [288] * 8 + [144] * 8 + [72] * 8
    assert round(paper_macs(shape, schedule) / 1e12, 2) == 1.78


def test_shape_reads_grouped_heads_and_active_experts() -> None:
    config = SimpleNamespace(hidden_size=64, num_attention_heads=8, num_key_value_heads=2, head_dim=16, intermediate_size=999,
                             num_experts_per_tok=2, moe_intermediate_size=32)  # fmt: skip
    assert LayerShape.of(config) == LayerShape(64, 8, 2, 16, 64)


class Uneven(SimpleNamespace):
    """A text model whose layers differ in size, as newer transformers reports it."""

    @property
    def head_dim(self) -> int:
        raise RuntimeError("'head_dim' differs. Ask each layer.")


UNEVEN_TEXT = Uneven(num_hidden_layers=12, num_attention_heads=2, hidden_size=8)
UNEVEN = SimpleNamespace(model_type="uneven", image_token_id=5, get_text_config=lambda decoder: UNEVEN_TEXT)
HYBRID = {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}


@pytest.mark.parametrize(("config", "sentence"), [
    (transformers.Qwen3VLConfig(), "qwen3_vl adds visual features again in early layers (deepstack_visual_indexes), which "
     "cannot be pruned exactly yet"),
    (transformers.Lfm2VlConfig(text_config=HYBRID), "lfm2_vl has conv layers, which cannot be pruned exactly yet"),
    (transformers.LlamaConfig(), "llama: its configuration names no placeholder token (image_token_id, image_token_index, "
     "video_token_id, video_token_index, image_patch_id); is it a vision-language model?"),
    (UNEVEN, "uneven: the size of its decoder layers cannot be read: 'head_dim' differs"),
    (transformers.T5Config(), "t5 is an encoder-decoder model; tokenprune serves decoder-only LVLMs"),
])  # fmt: skip
def test_models_that_are_refused_in_one_sentence(config: Any, sentence: str) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        plan("v2drop-generic-66.7", config)
    assert str(error.value) == sentence


def test_a_span_must_fit_its_grid() -> None:
    assert TokenSpan((1, 2, 3, 4), (1, 2, 2)).modality == "image"
    with pytest.raises(ValueError, match="does not multiply to 3"):
        TokenSpan((1, 2, 3), (1, 2, 2))
