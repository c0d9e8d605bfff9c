"""From YAML to objects and back."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, ClassVar

import pytest
from torch import Tensor

from tokenprune.budget import Budget
from tokenprune.errors import PluginError, PolicyError
from tokenprune.interfaces import PruneContext, Scorer
from tokenprune.plugins import Entry, Registry, registry
from tokenprune.policy import Policy, _listed, json_schema, list_policies
from tokenprune.tokens import Site

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
    assert first.scorer == registry().of("scorer")["variation"].cls(metric="l1")
    assert first.selector == registry().of("selector")["gumbel_topk"].cls(temperature=0.5)
    assert first.budget == Budget(keep_ratio=0.5, of="original")
    assert second.scorer == registry().of("scorer")["variation"].cls()
    assert second.selector == registry().of("selector")["topk"].cls()
    assert second.merger == registry().of("merger")["drop"].cls()


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
        short = {form["const"] for form in forms if "const" in form}
        assert short | {form["properties"]["name"]["const"] for form in forms if "const" not in form} == set(
            registry().of(kind)
        )
        for form in forms:
            if "const" not in form:
                assert form["additionalProperties"] is False
                entry = registry().of(kind)[form["properties"]["name"]["const"]]
                assert set(form["properties"]) == {
                    "name",
                    *(field.name.removesuffix("_") for field in dataclasses.fields(entry.cls)),
                }


def test_listing_shows_every_file_once() -> None:
    infos = list_policies()
    assert len(infos) == len({info.name for info in infos}) >= 25
    assert not [info.error for info in infos if info.error]


@dataclasses.dataclass(frozen=True)
class Loose(Scorer):
    """A stranger's scorer that does not say strict."""

    name: ClassVar[str] = "loose"
    count: int = 3
    share: float = 1.0
    sizes: tuple[int, ...] = ()

    def score(self, ctx: PruneContext) -> Tensor:
        return ctx.noise()


def loose(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(registry().of("scorer"), "loose", Entry("loose", "scorer", Loose, "here", "stranger"))
    scorer = {"name": "loose", **options}
    policy = Policy.load({"stages": [{"at": "llm.input", "scorer": scorer, "budget": {"keep_tokens": 1}}]})
    assert Policy.load(policy.to_dict()) == policy
    return policy.stages[0].scorer


@pytest.mark.parametrize(
    "options", [{"count": "64"}, {"count": True}, {"count": 64.0}, {"share": "1"}, {"share": True}]
)
def test_options_of_a_plugin_that_forgot_to_be_strict_are_not_coerced(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PolicyError, match=r"input should be a valid (integer|number)"):
        loose(options, monkeypatch)


def test_options_arrive_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    for share in (0.1, 1 / 3, 5e-324, 1.7976931348623157e308, 3):
        assert loose({"share": share, "sizes": [1, 2]}, monkeypatch) == Loose(share=share, sizes=(1, 2))


def listing(folder: Path, **files: str) -> list[tuple[str, bool]]:
    for name, text in files.items():
        file = folder / f"{name.replace('__', '/')}.yaml"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    return [(info.name, bool(info.error)) for info in _listed(Registry(policy_dirs=[(folder, "stranger")]))]


def test_broken_files_are_listed_and_claim_no_name(tmp_path: Path) -> None:
    found = listing(tmp_path, a__same="[", b__same="[", fastv="[", good="name: fastv\nsummary: null\npaper: 3\n")
    assert sorted(found) == [("fastv", False), ("fastv", True), ("same", True), ("same", True)]


def test_two_readable_files_of_one_name_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(PluginError) as error:
        listing(tmp_path, one="name: x\n", two="name: x\n")
    assert str(error.value).replace(str(tmp_path), "") == (
        "two files define policy 'x': /one.yaml of stranger and /two.yaml of stranger"
    )
