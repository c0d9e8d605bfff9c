"""From YAML to objects and back."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tokenprune.errors import PolicyError
from tokenprune.plugins import registry
from tokenprune.policy import Policy, json_schema, list_policies
from tokenprune.tokens import Budget, Site

TEXT = """\
name: mine
stages:
  - at: llm.layers.25%
    scorer: {name: variation, metric: l1}
    selector: {name: gumbel_topk, temperature: 0.5}
    budget: {keep_ratio: 0.5, of: original}
  - at: llm.layers.-1
    scorer: variation
    budget: {keep_tokens: 3}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "mine.yaml"
    file.write_text(TEXT)
    return file


def test_a_file_becomes_objects(path: Path) -> None:
    policy = Policy.load(path)
    first, second = policy.stages
    assert (policy.name, policy.seed, policy.average_tokens) == ("mine", 0, None)
    assert first.at == Site("llm.layers.25%")
    assert first.scorer == registry().scorers["variation"].cls(metric="l1")
    assert first.selector == registry().selectors["gumbel_topk"].cls(temperature=0.5)
    assert first.budget == Budget(keep_ratio=0.5, of="original")
    assert second.scorer == registry().scorers["variation"].cls()
    assert second.selector == registry().selectors["topk"].cls()
    assert second.merger == registry().mergers["drop"].cls()


def test_path_string_mapping_and_policy_are_the_same(path: Path) -> None:
    import yaml

    policy = Policy.load(path)
    assert Policy.load(str(path)) == policy == Policy.load(yaml.safe_load(TEXT)) == Policy.load(policy)
    assert Policy.load(policy) is policy
    assert hash(Policy.load(str(path))) == hash(policy)


def test_round_trip_leaves_defaults_out(path: Path, tmp_path: Path) -> None:
    policy = Policy.load(path)
    again = tmp_path / "again.yaml"
    again.write_text(policy.to_yaml())
    assert Policy.load(again) == policy
    assert policy.to_dict()["stages"][1] == {
        "at": "llm.layers.-1", "scorer": "variation", "budget": {"keep_tokens": 3}
    }  # fmt: skip


def test_digest_follows_effect_not_words(path: Path) -> None:
    policy = Policy.load(path)
    renamed = Policy.load({**policy.to_dict(), "name": "other", "summary": "s", "paper": "https://x.org"})
    assert renamed.digest == policy.digest
    assert len(policy.digest) == 12
    others = [f"{path}?seed=1", f"{path}?stages.0.budget.keep_ratio=0.4", f"{path}?selector=random&scorer=null"]
    assert len({policy.digest, *(Policy.load(other).digest for other in others)}) == 4


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("scorer=random", {"scorer": ["random", "random"]}),
        ("scorer.metric=cosine", {"scorer": [{"name": "variation", "metric": "cosine"}] * 2}),
        ("selector.name=topk", {"selector": "error"}),  # the old option stays and does not fit
        ("stages.1.budget.keep_tokens=5", {"budget": [{"keep_ratio": 0.5, "of": "original"}, {"keep_tokens": 5}]}),
        ("stages.1.budget.keep_ratio=0.25", {"budget": [{"keep_ratio": 0.5, "of": "original"}, {"keep_ratio": 0.25}]}),
        ("budget={keep_ratio: 0.1}", {"budget": [{"keep_ratio": 0.1}] * 2}),
        ("stages.0.at=llm.input&stages.0.scorer=uniform", {"at": ["llm.input", "llm.layers.-1"]}),
    ],
)
def test_overrides(path: Path, query: str, expected: dict[str, Any]) -> None:
    if "error" in expected.values():
        with pytest.raises(PolicyError, match="'topk' has no option 'temperature'"):
            Policy.load(f"{path}?{query}")
        return
    stages = Policy.load(f"{path}?{query}").to_dict()["stages"]
    for key, values in expected.items():
        assert [stage.get(key) for stage in stages] == values


def test_overrides_work_on_names_and_leave_the_file_alone() -> None:
    swapped = Policy.load("v2drop-llava-1.5-7b-192?scorer=random&seed=7")
    assert swapped.seed == 7
    assert {stage.scorer.name for stage in swapped.stages if stage.scorer} == {"random"}
    assert {s.scorer.name for s in Policy.load("v2drop-llava-1.5-7b-192").stages if s.scorer} == {"variation"}


def test_average_tokens_leaves_a_budget_open() -> None:
    stages = [{"at": "llm.layers.2", "scorer": "variation"}]
    policy = Policy.load({"name": "a", "average_tokens": 192, "stages": stages})
    assert policy.stages[0].budget is None
    assert Policy.load(policy.to_dict()) == policy


def test_a_selector_without_scores_takes_no_scorer() -> None:
    stage = {"at": "llm.layers.2", "selector": "stride", "budget": {"keep_tokens": 4}}
    assert Policy.load({"stages": [stage]}).stages[0].scorer is None


def test_anchors_are_allowed(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(
        "name: a\nstages:\n- {at: llm.layers.1, scorer: &s {name: variation, metric: l1}, budget: {keep_ratio: 0.5}}\n"
        "- {at: llm.layers.2, scorer: *s, budget: {keep_ratio: 0.5}}\n"
    )
    first, second = Policy.load(file).stages
    assert first.scorer == second.scorer


def test_schema_lists_every_component_and_forbids_other_keys() -> None:
    schema = json_schema()
    stage = schema["properties"]["stages"]["items"]
    assert schema["additionalProperties"] is stage["additionalProperties"] is False
    assert schema["required"] == ["name", "stages"] and stage["required"] == ["at"]
    for kind in ("scorer", "selector", "merger"):
        forms = stage["properties"][kind]["anyOf"]
        words = {form["const"] for form in forms if "const" in form}
        assert words == set(registry().of(kind))
        for form in forms:
            if "const" not in form:
                assert form["additionalProperties"] is False
                entry = registry().of(kind)[form["properties"]["name"]["const"]]
                assert set(form["properties"]) == {"name", *(field.name for field in dataclasses.fields(entry.cls))}


def test_listing_shows_every_file_once() -> None:
    infos = list_policies()
    assert len(infos) == len({info.name for info in infos}) >= 25
    assert not [info.error for info in infos if info.error]
