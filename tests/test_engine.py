"""What must always hold around a session: identity, restoration, no leaks, caches, beams, turns, gradients."""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor, nn
from transformers import DynamicCache

import policies
from tokenprune import compat
from tokenprune.cache import CompactLayer
from tokenprune.errors import (
    InputError,
    PluginContractError,
    SessionError,
    UnsupportedCacheError,
    UnsupportedModelError,
)
from tokenprune.interfaces import PruneContext, Scorer
from tokenprune.session import NoVisualTokensWarning, compress
from tokenprune.testing import hidden_columns

THREE = policies.STAGED["three"]


def hooks(model: nn.Module) -> list[str]:
    """Names of modules that carry any hook."""
    return [
        name
        for name, module in model.named_modules()
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    ]


def logits(model: Any, inputs: dict[str, Any], **more: Any) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(**inputs, **more).logits
    return result


def cache_name(model: Any) -> str:
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


@pytest.fixture(scope="module")
def llava() -> Any:
    return zoo.ZOO["llava"].model()


@pytest.fixture
def inputs() -> dict[str, Any]:
    return zoo.ZOO["llava"].inputs(3)


# ---- identity and restoration ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", sorted(zoo.ZOO))
def test_keep_all_is_bit_identical_and_leaving_restores(family: str, attention: str) -> None:
    tiny = zoo.ZOO[family]
    model, batch = tiny.model(attention), tiny.inputs(3)
    before = logits(model, batch)
    carried = hooks(model)  # transformers sets some of its own in the first forward pass
    with compress(model, policies.KEEP_ALL):
        assert torch.equal(logits(model, batch), before)
        assert len(hooks(model)) > len(carried)
    assert hooks(model) == carried
    with compress(model, THREE):
        assert not torch.equal(logits(model, batch), before)
    assert hooks(model) == carried
    assert torch.equal(logits(model, batch), before)


class Failing(Scorer):
    name = "failing"

    def score(self, ctx: PruneContext) -> Tensor:
        raise ZeroDivisionError


@pytest.fixture
def failing_session(llava: Any) -> Iterator[Any]:
    from dataclasses import replace

    session = compress(llava, policies.STAGED["two"])
    stages = tuple(replace(stage, scorer=Failing()) for stage in session.plan.stages)
    session.plan = replace(session.plan, stages=stages)
    yield session


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_an_exception_inside_restores_everything(
    llava: Any, inputs: dict[str, Any], failing_session: Any, attention: str
) -> None:
    llava.set_attn_implementation(attention)
    before = logits(llava, inputs)
    carried = hooks(llava)
    module = inspect.getmodule(type(failing_session.plan.adapter.attention(failing_session._layers[0])))
    kernel, table = module.eager_attention_forward, dict(module.ALL_ATTENTION_FUNCTIONS)
    with pytest.raises(ZeroDivisionError), failing_session:
        llava(**inputs)
    assert hooks(llava) == carried
    assert module.eager_attention_forward is kernel
    assert dict(module.ALL_ATTENTION_FUNCTIONS) == table
    assert torch.equal(logits(llava, inputs), before)
    llava.set_attn_implementation("sdpa")


def test_an_exception_in_the_block_restores_everything(llava: Any, inputs: dict[str, Any]) -> None:
    before = logits(llava, inputs)
    carried = hooks(llava)
    with pytest.raises(KeyboardInterrupt), compress(llava, THREE):
        logits(llava, inputs)
        raise KeyboardInterrupt
    assert hooks(llava) == carried
    assert torch.equal(logits(llava, inputs), before)


# ---- no leaks --------------------------------------------------------------------------------------------------------


def test_two_requests_in_a_row_equal_fresh_ones(llava: Any) -> None:
    first, second = zoo.ZOO["llava"].inputs(2), zoo.ZOO["llava"].ragged()
    fresh = []
    for batch in (first, second):
        with compress(llava, THREE):
            fresh.append(llava.generate(**batch, max_new_tokens=6, do_sample=False))
    with compress(llava, THREE) as session:
        again = [llava.generate(**batch, max_new_tokens=6, do_sample=False) for batch in (first, second)]
        assert session.report.prefills == 2
        assert session.report.visual_tokens == [16, 32, 0]
    assert all(torch.equal(a, b) for a, b in zip(fresh, again, strict=True))


def test_two_threads_with_two_models(inputs: dict[str, Any]) -> None:
    models = [zoo.ZOO["llava"].model(seed=seed) for seed in (0, 1)]
    alone = []
    for model in models:
        with compress(model, policies.STAGED["two"]):
            alone.append(logits(model, inputs))
    got: list[list[Tensor]] = [[], []]

    def work(which: int) -> None:
        with compress(models[which], policies.STAGED["two"]):
            got[which] = [logits(models[which], inputs) for _ in range(8)]

    threads = [threading.Thread(target=work, args=(which,)) for which in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for results, expected in zip(got, alone, strict=True):
        assert len(results) == 8
        assert all(torch.equal(result, expected) for result in results)


# ---- caches and decoding ---------------------------------------------------------------------------------------------


def test_each_layer_stores_only_what_entered_it(llava: Any, inputs: dict[str, Any]) -> None:
    with torch.no_grad(), compress(llava, THREE) as session:
        cache = llava(**inputs, use_cache=True)[cache_name(llava)]
    text = inputs["input_ids"].shape[1] - 16
    assert [layer.keys.shape[-2] for layer in cache.layers] == [text + n for n in session.report.entering[0]]
    assert session.report.entering[0] == (16, 12, 12, 6, 6, 1)
    assert all(layer.get_seq_length() == text + 16 for layer in cache.layers)


def test_without_a_cache_greedy_decoding_is_the_same(llava: Any, inputs: dict[str, Any]) -> None:
    generate = dict(max_new_tokens=6, do_sample=False, suppress_tokens=[zoo.IMAGE, zoo.VIDEO])
    with compress(llava, policies.STAGED["one"]):  # variation looks at no later token, so nothing is re-ranked
        cached = llava.generate(**inputs, **generate)
        assert torch.equal(llava.generate(**inputs, use_cache=False, **generate), cached)


@pytest.mark.parametrize("family", ["llava", "gemma3", "qwen2_vl"])
def test_beam_search_equals_masked_dense(family: str) -> None:
    tiny = zoo.ZOO[family]
    model, batch = tiny.model(), tiny.inputs(2)
    generate = dict(
        max_new_tokens=8, do_sample=False, num_beams=3, suppress_tokens=[zoo.IMAGE, zoo.VIDEO],
        return_dict_in_generate=True, output_scores=True, num_return_sequences=2,
    )  # fmt: skip
    with compress(model, THREE) as session:
        pruned = model.generate(**batch, **generate)
        report = session.report
    with hidden_columns(session.plan.adapter.layers(model), report):
        dense = model.generate(**batch, **generate)
    assert torch.equal(pruned.sequences, dense.sequences)
    torch.testing.assert_close(pruned.sequences_scores, dense.sequences_scores, atol=1e-5, rtol=0)


def test_sampling_several_sequences_equals_masked_dense(llava: Any, inputs: dict[str, Any]) -> None:
    generate = dict(max_new_tokens=8, do_sample=True, num_return_sequences=3, suppress_tokens=[zoo.IMAGE, zoo.VIDEO])
    with compress(llava, THREE) as session:
        torch.manual_seed(5)
        pruned = llava.generate(**inputs, **generate)
    with hidden_columns(session.plan.adapter.layers(llava), session.report):
        torch.manual_seed(5)
        assert torch.equal(llava.generate(**inputs, **generate), pruned)


def test_prompt_lookup_rolls_the_cache_back(llava: Any) -> None:
    """Assisted decoding proposes tokens and crops the cache; the answer stays the greedy one."""
    batch = zoo.ZOO["llava"].inputs(1)
    batch["input_ids"][0, -4:] = batch["input_ids"][0, :4]  # something to look up
    generate = dict(max_new_tokens=12, do_sample=False, suppress_tokens=[zoo.IMAGE, zoo.VIDEO])
    crops = []
    original = CompactLayer.crop

    def counting(self: Any, tokens: int) -> None:
        crops.append(tokens)
        original(self, tokens)

    with pytest.MonkeyPatch.context() as patch, compress(llava, policies.STAGED["one"]):
        patch.setattr(CompactLayer, "crop", counting)
        greedy = llava.generate(**batch, **generate)
        assert torch.equal(llava.generate(**batch, prompt_lookup_num_tokens=3, **generate), greedy)
    assert any(crops)


def test_cropping_equals_never_having_seen(llava: Any) -> None:
    tiny = zoo.ZOO["llava"]
    batch, name = tiny.ragged(), cache_name(llava)
    extra = torch.randint(3, 90, (3, 4), generator=torch.Generator().manual_seed(7))
    mask = torch.cat([batch["attention_mask"], torch.ones_like(extra)], dim=1)
    with torch.no_grad(), compress(llava, THREE):
        cache = llava(**batch, use_cache=True)[name]
        kept = copy.deepcopy(cache)
        llava(input_ids=extra + 1, attention_mask=mask, **{name: cache})
        length = batch["input_ids"].shape[1]
        cache.crop(-4 if compat._CROPS_BY_REMOVING else length)
        cropped = llava(input_ids=extra, attention_mask=mask, **{name: cache}).logits
        expected = llava(input_ids=extra, attention_mask=mask, **{name: kept}).logits
    assert torch.equal(cropped, expected)


@pytest.mark.parametrize("family", ["llava", "gemma3", "mistral3_sliding"])
def test_second_turn_with_a_new_image_on_the_same_cache(family: str) -> None:
    tiny = zoo.ZOO[family]
    model, first, second = tiny.model(), tiny.inputs(2), tiny.inputs(2)
    second["attention_mask"] = torch.ones_like(second["attention_mask"])
    second["pixel_values"] = second["pixel_values"].flip(-1)
    mask = torch.cat([first["attention_mask"], second["attention_mask"]], dim=1)
    name = cache_name(model)

    def turns(**first_options: Any) -> Iterator[Tensor]:
        cache = DynamicCache(config=model.config.get_text_config())
        yield model(**first, **{name: cache}).logits
        yield model(**{**second, "attention_mask": mask}, **{name: cache}).logits
        text = {"input_ids": second["input_ids"][:, -5:], "attention_mask": torch.cat([mask, mask[:, -5:]], dim=1)}
        if "token_type_ids" in second:
            text["token_type_ids"] = torch.zeros_like(text["input_ids"])
        yield model(**text, **{name: cache}).logits

    with torch.no_grad(), compress(model, THREE) as session:
        pruned, reports = [], []
        for out in turns():
            pruned.append(out)
            reports.append(session.report)
    assert reports[1].stages[0].kept[0][0] >= first["input_ids"].shape[1]
    assert reports[2] is reports[1]  # a text turn prunes nothing
    with torch.no_grad(), hidden_columns(session.plan.adapter.layers(model), *reports[:2]):
        dense = list(turns())
    for got, want in zip(pruned, dense, strict=True):
        assert (got - want)[:, -5:].abs().max() < 1e-5


def test_one_prefix_serves_several_questions(llava: Any) -> None:
    batch, name = zoo.ZOO["llava"].inputs(2), cache_name(llava)
    questions = torch.randint(3, 90, (3, 2, 4), generator=torch.Generator().manual_seed(9))
    mask = torch.cat([batch["attention_mask"], torch.ones(2, 4, dtype=torch.long)], dim=1)
    with torch.no_grad(), compress(llava, THREE):
        prefix = llava(**batch, use_cache=True)[name]

        def ask(question: Tensor) -> Tensor:
            answer: Tensor = llava(input_ids=question, attention_mask=mask, **{name: copy.deepcopy(prefix)}).logits
            return answer

        answers = [ask(question) for question in questions]
        assert all(torch.equal(ask(question), answer) for question, answer in zip(questions, answers, strict=True))
    assert not torch.equal(answers[0], answers[1])


def test_rows_of_a_compact_cache_can_be_repeated_and_selected(llava: Any) -> None:
    batch, name = zoo.ZOO["llava"].ragged(), cache_name(llava)
    extra = torch.randint(3, 90, (3, 2), generator=torch.Generator().manual_seed(3))
    mask = torch.cat([batch["attention_mask"], torch.ones_like(extra)], dim=1)
    with torch.no_grad(), compress(llava, THREE):
        cache = llava(**batch, use_cache=True)[name]
        expected = llava(input_ids=extra, attention_mask=mask, **{name: copy.deepcopy(cache)}).logits
        cache.batch_repeat_interleave(2)
        rows = torch.tensor([4, 1])
        cache.batch_select_indices(rows)
        got = llava(input_ids=extra[rows // 2], attention_mask=mask[rows // 2], **{name: cache}).logits
    torch.testing.assert_close(got, expected[rows // 2], atol=1e-5, rtol=0)


def test_a_compact_cache_is_refused_outside_the_block(llava: Any, inputs: dict[str, Any]) -> None:
    name = cache_name(llava)
    with torch.no_grad(), compress(llava, THREE):
        cache = llava(**inputs, use_cache=True)[name]
    with pytest.raises(SessionError, match="continue it inside a compress block"):
        llava(input_ids=inputs["input_ids"][:, :1], **{name: cache})


def test_static_cache_is_refused_in_one_sentence(llava: Any, inputs: dict[str, Any]) -> None:
    logits(llava, inputs)
    carried = hooks(llava)
    with compress(llava, THREE), pytest.raises(UnsupportedCacheError) as error:
        llava.generate(**inputs, max_new_tokens=2, cache_implementation="static")
    assert str(error.value) == (
        "StaticCache with StaticLayer cannot hold a pruned sequence yet; "
        "use the default DynamicCache (leave out cache_implementation) or use_cache=False"
    )
    assert hooks(llava) == carried


# ---- gradients -------------------------------------------------------------------------------------------------------


def test_gradients_equal_the_masked_dense_run() -> None:
    tiny = zoo.ZOO["llava"]
    model, batch = tiny.model(dtype=torch.float64), tiny.inputs(2)
    batch["pixel_values"] = batch["pixel_values"].double()

    def gradients(report: Any) -> dict[str, Tensor]:
        labels = batch["input_ids"].clone()
        visual = labels == zoo.IMAGE
        # The first text label after the image is predicted from a visual token that may have left.
        labels[visual | visual.roll(1, dims=1) | (batch["attention_mask"] == 0)] = -100
        model.zero_grad()
        model(**batch, labels=labels).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    with compress(model, THREE) as session:
        pruned = gradients(None)
    with hidden_columns(session.plan.adapter.layers(model), session.report):
        dense = gradients(None)
    assert pruned.keys() == dense.keys()
    assert any("multi_modal_projector" in name and grad.abs().max() > 0 for name, grad in pruned.items())
    for name, grad in pruned.items():
        torch.testing.assert_close(grad, dense[name], atol=1e-9, rtol=1e-6, msg=name)


# ---- misuse ----------------------------------------------------------------------------------------------------------


def test_policies_do_not_nest(llava: Any, inputs: dict[str, Any]) -> None:
    logits(llava, inputs)
    carried = hooks(llava)
    with compress(llava, THREE):
        with pytest.raises(SessionError, match="policies do not nest"), compress(llava, THREE):
            pass
        logits(llava, inputs)
    assert hooks(llava) == carried


def test_a_compiled_model_is_refused(llava: Any, inputs: dict[str, Any]) -> None:
    logits(llava, inputs)
    carried = hooks(llava)
    with pytest.raises(SessionError, match="compiled before compress"), compress(torch.compile(llava), THREE):
        pass
    assert hooks(llava) == carried


def test_compiled_layer_forwards_work(inputs: dict[str, Any]) -> None:
    model = zoo.ZOO["llava"].model()
    with compress(model, THREE):
        expected = logits(model, inputs)
    for layer in model.model.language_model.layers:
        layer.forward = torch.compile(layer.forward, dynamic=True, backend="eager")
    with compress(model, THREE):
        torch.testing.assert_close(logits(model, inputs), expected, atol=1e-6, rtol=0)


def test_pixels_without_placeholder_are_an_error(llava: Any, inputs: dict[str, Any]) -> None:
    inputs["input_ids"][inputs["input_ids"] == zoo.IMAGE] = 5
    with compress(llava, THREE), pytest.raises(InputError, match=r"no image placeholder \(token id 99\)"):
        llava(**inputs)


def test_a_text_only_prompt_runs_unpruned_with_a_notice(llava: Any) -> None:
    ids = torch.randint(3, 90, (1, 12), generator=torch.Generator().manual_seed(0))
    expected = logits(llava, {"input_ids": ids})
    with compress(llava, THREE) as session, pytest.warns(NoVisualTokensWarning, match="no visual token"):
        assert torch.equal(logits(llava, {"input_ids": ids}), expected)
    assert session.report.notes == ("the prompt holds no visual token; it ran unpruned",)


def test_a_block_in_which_nothing_ran_says_so(llava: Any) -> None:
    with pytest.warns(UserWarning, match="had no effect"), compress(llava, THREE):
        pass


def test_a_prefill_in_chunks_that_cuts_an_image_is_refused(llava: Any, inputs: dict[str, Any]) -> None:
    name = cache_name(llava)
    cache = DynamicCache(config=llava.config.get_text_config())
    ids = inputs["input_ids"]
    with torch.no_grad(), compress(llava, THREE), pytest.raises(InputError, match="cuts an image in two"):
        for chunk in ids.split(16, dim=1):
            llava(input_ids=chunk, attention_mask=torch.ones_like(ids), **{name: cache})


@pytest.mark.parametrize("family", ["llava", "gemma3", "qwen2_5_vl"])
def test_embeddings_of_placeholders_are_as_good_as_ids(family: str) -> None:
    tiny = zoo.ZOO[family]
    model, inputs = tiny.model(), tiny.inputs(2)
    with torch.no_grad():
        embeds = model.get_input_embeddings()(inputs["input_ids"])
    others = {name: value for name, value in inputs.items() if name != "input_ids"}
    if family == "qwen2_5_vl":  # its rotary positions are made from ids
        others = {name: value for name, value in others.items() if name != "mm_token_type_ids"}
        others["position_ids"] = torch.arange(embeds.shape[1]).expand(3, 2, -1)
        inputs["position_ids"] = others["position_ids"]
    with torch.no_grad(), compress(model, THREE) as session:
        by_ids, kept = model(**inputs).logits, session.report.stages[-1].kept
        by_embeds = model(**others, inputs_embeds=embeds).logits
        again = session.report.stages[-1].kept
    assert torch.equal(by_ids, by_embeds)
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))


def test_a_failed_pass_leaves_nothing_for_the_next(llava: Any, inputs: dict[str, Any]) -> None:
    ids = torch.randint(3, 90, (1, 12), generator=torch.Generator().manual_seed(0))
    broken = {**inputs, "pixel_values": inputs["pixel_values"][:1]}
    expected = logits(llava, {"input_ids": ids})
    with compress(llava, THREE), pytest.warns(NoVisualTokensWarning):
        with pytest.raises(ValueError, match="Image features and image tokens"):
            logits(llava, broken)
        assert torch.equal(logits(llava, {"input_ids": ids}), expected)


def test_a_non_finite_score_names_the_scorer(llava: Any, inputs: dict[str, Any]) -> None:
    inputs["pixel_values"] = inputs["pixel_values"] * torch.inf
    with (
        compress(llava, policies.STAGED["one"]),
        pytest.raises(PluginContractError, match="'variation' returned a score"),
    ):
        logits(llava, inputs)


def test_flex_attention_is_refused(llava: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "mask_form", lambda config: "block")
    with pytest.raises(UnsupportedModelError, match="attn_implementation='sdpa'"), compress(llava, THREE):
        pass
