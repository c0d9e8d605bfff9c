"""Dropping tokens before layer k equals hiding those key columns in all layers >= k, for every family, prefill and decode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo

import policies
from tokenprune.plugins import registry
from tokenprune.session import compress
from tokenprune.testing import check_policy

FAMILIES = sorted(zoo.ZOO)
RAGGED = sorted(name for name, tiny in zoo.ZOO.items() if tiny.ragged is not None)
# transformers itself is not exact in float64 here: experts run a float32 kernel.
NO_FLOAT64 = {"aria"}


def cast(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}


@pytest.mark.parametrize("policy", policies.STAGED.values(), ids=policies.STAGED)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_pruned_equals_masked_dense(family: str, attention: str, policy: dict[str, Any]) -> None:
    tiny = zoo.ZOO[family]
    report = check_policy(
        tiny.model(attention), tiny.inputs(3), policy, steps=20, atol=1e-5, forbidden_tokens=tiny.suppress
    )
    assert report.visual_tokens == [tiny.tokens] * 3
    assert all(stage.tokens_out[0] < stage.tokens_in[0] for stage in report.stages)


@pytest.mark.parametrize("policy", policies.STAGED.values(), ids=policies.STAGED)
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - NO_FLOAT64))
def test_pruned_equals_masked_dense_to_float64(family: str, policy: dict[str, Any]) -> None:
    tiny = zoo.ZOO[family]
    model, inputs = tiny.model("sdpa", torch.float64), cast(tiny.inputs(3), torch.float64)
    check_policy(model, inputs, policy, steps=20, atol=1e-9, forbidden_tokens=tiny.suppress)


@pytest.mark.parametrize("policy", policies.STAGED.values(), ids=policies.STAGED)
@pytest.mark.parametrize("family", RAGGED)
def test_rows_with_one_two_and_no_image(family: str, policy: dict[str, Any]) -> None:
    tiny = zoo.ZOO[family]
    assert tiny.ragged is not None
    report = check_policy(tiny.model(), tiny.ragged(), policy, steps=20, forbidden_tokens=tiny.suppress)
    assert report.visual_tokens == [tiny.tokens, 2 * tiny.tokens, 0]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", RAGGED)
def test_row_in_a_ragged_batch_equals_row_alone(family: str, attention: str) -> None:
    tiny = zoo.ZOO[family]
    assert tiny.ragged is not None
    model, batch = tiny.model(attention), tiny.ragged()
    for policy in policies.STAGED.values():
        with torch.no_grad(), compress(model, policy) as session:
            together = model(**batch).logits
            kept = session.report.stages[-1].kept
            row = batch["attention_mask"][0].bool()
            alone = {
                name: value[:1, row] if name in ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
                else value[:1] if name in ("image_grid_thw", "image_sizes")
                else value[: len(value) // 3]
                for name, value in batch.items()
            }  # fmt: skip
            logits = model(**alone).logits
            assert torch.equal(session.report.stages[-1].kept[0], kept[0] - int((~row).sum()))
        gap = (together[0, row] - logits[0])[_text(alone["input_ids"][0])].abs().max()
        assert gap < 1e-5


def _text(ids: torch.Tensor) -> torch.Tensor:
    return (ids != zoo.IMAGE) & (ids != zoo.VIDEO)


def test_the_oracle_can_fail() -> None:
    """Hiding other columns than the dropped ones is seen."""
    from tokenprune.testing import hidden_columns

    tiny = zoo.ZOO["llava"]
    model, inputs = tiny.model(), tiny.inputs(2)
    with torch.no_grad(), compress(model, policies.STAGED["one"]) as session:
        pruned = model(**inputs).logits
    stage = session.report.stages[0]
    stage.kept[0][0] = stage.positions[0][-1]  # claim that another token stayed
    with torch.no_grad(), hidden_columns(session.plan.adapter.layers(model), session.report):
        masked = model(**inputs).logits
    assert (pruned - masked)[0, -1].abs().max() > 1e-3


def test_every_adapter_has_a_tiny_model() -> None:
    types = {zoo.ZOO[name].build().config.model_type for name in zoo.ZOO}
    for entry in registry().of("adapter").values():
        if entry.distribution == "tokenprune-vlm":
            assert not entry.cls.model_types or entry.cls.model_types & types, f"no tiny model for adapter {entry.name}"


def test_the_generic_adapter_serves_twelve_families_and_more() -> None:
    from tokenprune.plan import adapter_for

    served = {
        config.model_type
        for config in (tiny.build().config for tiny in zoo.ZOO.values())
        if adapter_for(config).name == "generic"
    }
    assert len(served) >= 12, sorted(served)
