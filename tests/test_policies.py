"""Every policy file says what it is, reads back, plans, and keeps the counts the paper prints."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import bed
import pytest
import torch
import transformers
import zoo

from tokenprune.errors import PolicyError
from tokenprune.loading import load, open_image, prepare, sample
from tokenprune.plan import adapter_for, plan
from tokenprune.policy import Policy, PolicyInfo, list_policies
from tokenprune.session import compress
from tokenprune.testing import check_policy

INFOS = list_policies()
IDS = [info.name for info in INFOS]


@pytest.mark.parametrize("info", INFOS, ids=IDS)
def test_file_is_complete_and_reads_back(info: PolicyInfo) -> None:
    assert not info.error
    assert info.summary
    assert info.paper or "no paper" in info.summary
    head = info.path.read_text().split("name:")[0]
    assert head.startswith("# ") and len(head) > 60
    policy = Policy.load(info.name)
    assert policy.name == info.name
    assert Policy.load(policy.to_dict()) == policy
    assert Policy.load(info.path) == policy


@pytest.mark.parametrize("info", INFOS, ids=IDS)
def test_runs_in_a_batch_on_a_model_of_the_depth_it_is_written_for(
    info: PolicyInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two prompts, the second one padded and later: what is kept of the first is what is kept of it alone."""
    monkeypatch.chdir(tmp_path)
    policy = Policy.load(info.name)
    model, inputs = bed.for_policy(policy, rows=2)
    extra = bed.resources(policy, model, tmp_path)
    with torch.no_grad(), compress(model, policy, **extra) as session:
        logits = model(**inputs).logits
        together = session.report
        model(**{name: value[: len(value) // 2] for name, value in inputs.items()})
        alone = session.report
    assert logits.isfinite().all()
    visual = together.visual_tokens[0]
    left = [stage.tokens_out[0] for stage in together.stages]
    for number, planned in enumerate(session.plan.prefill_stages):
        known = tuple(left[:number]) if session.plan.depends_on_data else ()
        expected = session.plan.counts(visual, together.prompt_tokens[0] - visual, known)[number]
        if planned.is_planned:
            assert left[number] == expected
        assert 0 <= left[number] <= (left[number - 1] if number else visual)
    for row, single in zip(together.stages, alone.stages, strict=True):
        assert row.kept[0].tolist() == single.kept[0].tolist()


@pytest.mark.parametrize("info", INFOS, ids=IDS)
def test_plans_on_every_family_that_has_its_signals_and_is_refused_with_the_reason_elsewhere(info: PolicyInfo) -> None:
    """A plan, or sentences that name what is missing; a signal that the family has is never the reason."""
    policy, planned, shallow = Policy.load(info.name), 0, False
    signals = [signal for stage in policy.stages for signal in stage.needs()]
    sees = any(signal.name == "paired" or (signal.at is not None and signal.at.part != "llm") for signal in signals)
    acts = any(stage.at.part == "vision" for stage in policy.stages)
    for family, config in configs().items():
        adapter = adapter_for(config)
        try:
            planned += bool(plan(policy, config).stages)
        except PolicyError as error:
            depth = max(
                (int(stage.at.text.rpartition(".")[2]) for stage in policy.stages if stage.at.text[-1:].isdigit()),
                default=0,
            )
            tower = adapter.tower(config)
            reasons = {
                "does not know the vision side": (sees or acts) and tower is None,
                "no CLS token": tower is not None and not tower.cls,
                "decoder layers (0 to": policy.written_for.llm is None and depth >= 6,
                "vision layers (0 to": tower is not None,
                "M-RoPE": policy.positions == "renumber",
                "renumber on the policy": any(stage.merger.moves_states for stage in policy.stages),
                "rotary embeddings of different kinds": policy.positions == "renumber",
                "cannot be reached": policy.average_tokens is not None or policy.prefill_flops is not None,
            }
            shallow |= "vision layers (0 to" in str(error)  # the towers of these models have two
            for problem in error.problems:
                assert any(text in problem.message and holds for text, holds in reasons.items()), (family, str(problem))
    if policy.written_for.llm is not None or not any(stage.at.text.startswith("llm.layers") for stage in policy.stages):
        assert planned or shallow


def firsts() -> list[PolicyInfo]:
    """Return one policy of every method that only drops: what merges has no masked dense run to be equal to."""
    found: dict[str, PolicyInfo] = {}
    for info in INFOS:
        if not any(stage.merger.changes_states for stage in Policy.load(info.name).stages):
            found.setdefault(info.path.parent.name, info)
    return list(found.values())


@pytest.mark.parametrize("info", firsts(), ids=lambda info: info.name)
def test_one_policy_of_every_dropping_method_equals_the_masked_dense_run(
    info: PolicyInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    policy = Policy.load(info.name)
    model, inputs = bed.for_policy(policy)
    extra = bed.resources(policy, model, tmp_path)
    never = (zoo.IMAGE, zoo.VIDEO, 96, 97)
    report = check_policy(model, inputs, policy, steps=3, forbidden_tokens=never, **extra)
    assert report.stages or report.decoding


def test_there_are_as_many_as_the_field_has() -> None:
    assert len(INFOS) >= 60
    methods = {info.path.parent.name for info in INFOS if info.paper}
    assert len(methods) >= 35


@cache
def configs() -> dict[str, Any]:
    return {name: tiny.build().config for name, tiny in zoo.ZOO.items()}


@pytest.mark.parametrize(
    "info", [info for info in INFOS if Policy.load(info.name).modality == "any"], ids=lambda info: info.name
)
def test_runs_on_the_embedded_lvlm(info: PolicyInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve layers: a file whose layer numbers are those of one model, and says so by its name, is refused."""
    monkeypatch.chdir(tmp_path)
    policy, (model, inputs) = Policy.load(info.name), embedded()
    try:
        session = compress(model, policy, **bed.resources(policy, model, tmp_path))
    except PolicyError as error:
        assert any(text in info.name for text in ("llava-1.5-7b", "press", "qwen2-vl")) and "decoder layers" in str(
            error
        )
        return
    with torch.no_grad(), session:
        logits = model(**inputs).logits
    assert logits.isfinite().all()
    assert len(session.report.stages) == len(session.plan.prefill_stages)


@cache
def embedded() -> tuple[Any, dict[str, Any]]:
    loaded, chosen = load(None, device="cpu"), sample()
    return loaded.model, prepare(loaded, open_image(chosen.image), chosen.question)


PUBLISHED = {
    "v2drop-llava-1.5-7b-192": ((288, 86, 0), 193.4),
    "v2drop-llava-1.5-7b-128": ((161, 40, 0), 130.7),
    "v2drop-llava-1.5-7b-64": ((28, 1, 0), 66.4),
    "v2drop-llava-1.5-7b-code": ((288, 144, 1), 202.8),
    "fastv": ((288,), 306.0),
    "v2drop-press-image": ((403, 201, 60), 245.5),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_counts_and_averages(name: str) -> None:
    counts, average = PUBLISHED[name]
    planned = plan(name, transformers.LlavaConfig())
    assert planned.counts(576) == counts
    assert round(planned.cost(576).average_entering, 1) == average


def test_qwen_settings_average_what_their_headers_say() -> None:
    config = transformers.Qwen2VLConfig(text_config={"num_hidden_layers": 28})
    assert plan("v2drop-qwen2-vl-7b-77.8", config).counts(1024) == (256, 12, 0)
    shares = {name: plan(name, config).cost(10_000).average_entering / 10_000 for name in IDS if "qwen2-vl" in name}
    assert round(shares["v2drop-qwen2-vl-7b-77.8"], 3) == 0.226
    assert round(shares["v2drop-qwen2-vl-7b-66.7"], 3) == 0.333


@pytest.mark.parametrize("share", ["66.7", "77.8", "88.9"])
def test_generic_policies_give_the_published_layers_at_32(share: str) -> None:
    stages = plan(f"v2drop-generic-{share}", transformers.LlavaConfig()).stages
    assert [stage.layer for stage in stages] == [3, 17, 22]


@pytest.mark.parametrize(
    "info", [info for info in INFOS if info.name.startswith(("random-", "uniform-"))], ids=lambda i: i.name
)
def test_baselines_cost_what_the_method_costs(info: PolicyInfo) -> None:
    kind, _, rest = info.name.partition("-")
    method, baseline = Policy.load(f"v2drop-{rest}"), Policy.load(info.name)
    assert [(s.at, s.budget) for s in baseline.stages] == [(s.at, s.budget) for s in method.stages]
    assert {s.scorer.name for s in baseline.stages if s.scorer} == {kind}
