"""The planner's numbers are those the papers, their logs and their users print (LLaVA-1.5-7B: 576 visual tokens, 32 layers)."""

from __future__ import annotations

import pytest
import transformers

from tokenprune.flops import LayerShape, paper_macs
from tokenprune.plan import Plan, plan

LLAVA = transformers.LlavaConfig()
SHAPE = LayerShape.of(LLAVA.text_config)


def planned(policy: str) -> Plan:
    return plan(policy, LLAVA)


def tera(policy: str) -> float:
    return planned(policy).cost(576).macs_as_papers_print / 1e12


def test_the_ubiquitous_3_82_and_what_pyramiddrop_makes_of_it() -> None:
    assert round(planned("fastv").dense_cost(576).macs_as_papers_print / 1e12, 3) == 3.817
    assert planned("pyramiddrop").cost(576).average_entering == 270
    assert round(tera("pyramiddrop"), 3) == 1.777


ENTERING = {
    "v2drop-llava-1.5-7b-192": 193.4,
    "dart-128": 159.75,
    "sparsevlm-192": 206.5,
    "sparsevlm-128": 145.4,
    "sparsevlm-96": 114.1,
    "sparsevlm-64": 82.25,
    "fastv?budget.keep_tokens=144": 171.0,
    "vscan-64": 64.0,
    "divprune-64": 64.0,
}


@pytest.mark.parametrize("policy", ENTERING)
def test_average_tokens_entering_a_layer(policy: str) -> None:
    assert planned(policy).cost(576).average_entering == pytest.approx(ENTERING[policy], abs=0.06)


LEAVING = {"sparsevlm-192": 192.03, "sparsevlm-128": 128.6, "sparsevlm-96": 96.9, "sparsevlm-64": 64.8}


@pytest.mark.parametrize("policy", LEAVING)
def test_sparsevlm_counts_tokens_leaving_a_layer(policy: str) -> None:
    """Its log prints 192.03125 for the setting it calls 192; a cut after layer c is made on what leaves c."""
    assert planned(policy).cost(576).average_leaving == pytest.approx(LEAVING[policy], abs=0.06)


@pytest.mark.parametrize(("k", "kept"), [(2, {192: 166, 128: 98, 64: 30}), (3, {192: 152, 128: 82, 64: 11})])
def test_what_fastv_keeps_at_an_equal_average(k: int, kept: dict[int, int]) -> None:
    """The published conversions are rounded to the nearest token; the planner never goes above the average asked for."""
    for average, tokens in kept.items():
        over = (k * 576 + (32 - k) * tokens) / 32 > average
        stages = [{"at": f"llm.layers.{k}", "scorer": "attention"}]
        assert plan({"average_tokens": average, "stages": stages}, LLAVA).counts(576) == (tokens - over,)


def test_fastv_readme_ratio_and_vtw() -> None:
    """57 % at K = 3, R = 50 % counts 611 tokens (35 of text) and an ungated feed-forward, 4nd^2 + 2n^2d + 2ndm."""
    d, m = SHAPE.width, SHAPE.feed_forward

    def layer(n: float) -> float:
        return 4 * n * d * d + 2 * n * n * d + 2 * n * d * m

    assert round((3 * layer(611) + 29 * layer(35 + 288)) / (32 * layer(611)), 3) == 0.566
    assert planned("vtw").entering(576) == (576,) * 15 + (0,) * 17
    assert round(tera("vtw") / 3.817, 3) == 0.469


@pytest.mark.parametrize(("average", "kept"), [(192, 227), (128, 134), (64, 41)])
def test_twigvlm_solves_its_budget(average: int, kept: int) -> None:
    assert planned(f"twigvlm-{average}").counts(576)[0] == kept


def test_prefill_flops_is_met_and_no_token_more_would_fit() -> None:
    stages = [{"at": "llm.layers.4", "scorer": "attention"}]
    made = plan({"prefill_flops": 0.4, "stages": stages}, LLAVA)
    (kept,) = made.counts(576, 64)
    dense = made.dense_cost(576, 64).flops
    assert made.cost(576, 64).flops <= 0.4 * dense < made.cost(576, 64, left=(kept + 1,)).flops


def test_paper_macs_by_hand() -> None:
    d, m = SHAPE.width, SHAPE.feed_forward
    assert paper_macs(SHAPE, [10]) == 40 * d * d + 200 * d + 30 * d * m
