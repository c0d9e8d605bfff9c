"""Error texts are user interface: asserted whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenprune.errors import PolicyError
from tokenprune.plan import plan
from tokenprune.plugins import registry
from tokenprune.policy import Policy

SCORERS = ", ".join(sorted(registry().of("scorer")))
ATTENTION = "from, heads, layer, normalise, pool_queries, probes, query, rope, rope_prior, rows"
POLICY = (
    "average_tokens, modality, name, paper, positions, prefill_flops, proportional_attention, seed, stages, summary, "
    "written_for"
)
HEAD = "name: mine\nstages:\n"


def errors(tmp_path: Path, text: str | bytes) -> str:
    file = tmp_path / "mine.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(PolicyError) as error:
        Policy.load(file)
    return str(error.value).replace(str(file), "mine.yaml")


CASES = {
    HEAD + "  - at: llm.layers.2\n    scorer: {name: attention, head: max}\n    budget: {keep_ratio: 0.5}\n": (
        "mine.yaml:4:31: stages[0].scorer.head: 'attention' has no option 'head'; "
        f"it takes {ATTENTION}. Did you mean 'heads'?"
    ),
    HEAD + "  - at: llm.layers.2\n    scorer: variatoin\n    budget: {keep_ratio: 0.5}\n": (
        "mine.yaml:4:13: stages[0].scorer: no scorer named 'variatoin'; "
        f"there are {SCORERS}. Did you mean 'variation'?"
    ),
    HEAD + "  - at: llm.layers.two\n    scorer: variation\n    budget: {keep_ratio: 0.5}\n": (
        "mine.yaml:3:9: stages[0].at: 'llm.layers.two' is not a site; possible are 'vision.output', "
        "'projector.output', 'llm.input', 'llm.layers.<k>', 'decode.layers.<k>' and, to read a signal, 'vision.layers.<k>', "
        "with <k> a 0-based layer, a negative one (-1 is the last) or a share of the depth (25%)"
    ),
    HEAD + "  - at: llm.layers.2\n    scorer: variation\n    budget: {keep_ratio: 1.5}\n": (
        "mine.yaml:5:26: stages[0].budget.keep_ratio: keep_ratio is the share that stays, in [0, 1], not 1.5"
    ),
    HEAD + "  - at: llm.layers.2\n    scorer: variation\n    budget: {keep_tokens: '64'}\n": (
        "mine.yaml:5:27: stages[0].budget.keep_tokens: input should be a valid number, not '64'"
    ),
    HEAD + "  - at: llm.layers.2\n    scorer: variation\n    budget: {keep_ratio: .nan}\n": (
        "mine.yaml:5:26: stages[0].budget.keep_ratio: keep_ratio is the share that stays, in [0, 1], not nan"
    ),
    HEAD + "  - at: llm.layers.2\n    scorer: variation\n    budget: {keep_ratio: 0.5, keep_tokens: 3}\n": (
        "mine.yaml:5:13: stages[0].budget: a budget states exactly one of keep_ratio and keep_tokens"
    ),
    HEAD + "  - at: llm.layers.2\n    scorer: on\n    budget: {keep_ratio: 0.5}\n": (
        "mine.yaml:4:13: stages[0].scorer: a scorer is a word or {name: word, option: value}, not True (a bare on, off, yes or "
        "no is read as true or false: quote it); "
        f"there are {SCORERS}"
    ),
    HEAD + "  - at: yes\n    scorer: variation\n    budget: {keep_ratio: 0.5}\n": (
        "mine.yaml:3:9: stages[0].at: input should be a valid string, not True (a bare on, off, yes or no is read as true or "
        "false: quote it)"
    ),
    HEAD + "  - at: llm.layers.2\n    scorer: {name: variation, metric: 2020-01-01}\n    budget: {keep_ratio: 0.5}\n": (
        "mine.yaml:4:13: stages[0].scorer: options are words, numbers, lists and mappings, not {'metric': datetime.date(2020, "
        "1, 1)}"
    ),
    HEAD + "  - at: llm.layers.2\n    scorer: variation\n": (
        "mine.yaml:3:5: stages[0]: a stage needs a budget: {keep_ratio: 0.5}, {keep_tokens: 64}, or average_tokens on the "
        "policy"
    ),
    HEAD + "  - at: llm.layers.2\n    budget: {keep_ratio: 0.5}\n": (
        "mine.yaml:3:5: stages[0]: selector 'topk' needs a scorer; "
        f"there are {SCORERS}"
    ),
    HEAD + "  - at: llm.layers.2\n    scorer: variation\n    selector: stride\n    budget: {keep_ratio: 0.5}\n": (
        "mine.yaml:4:13: stages[0].scorer: scorer is ignored by selector 'stride'; leave one of them out"
    ),
    HEAD + "  - at: llm.layers.2\n    scorer: variation\n    selector: {name: gumbel_topk, temperature: -1}\n"
    "    budget: {keep_ratio: 0.5}\n": (
        "mine.yaml:5:48: stages[0].selector.temperature: input should be greater than or equal to 0, not -1"
    ),
    HEAD + "  - at: llm.layers.2\n    scorer: variation\n    budgets: {keep_ratio: 0.5}\n    budget: {keep_ratio: 0.5}\n": (
        "mine.yaml:5:5: stages[0].budgets: a stage has no key 'budgets'; it takes at, budget, merger, refresh, scorer, "
        "selector. Did you mean 'budget'?"
    ),
    "name: mine\naverage_tokens: 10\n" + HEAD[len("name: mine\n") :]
    + "  - {at: llm.layers.2, scorer: variation, budget: {keep_ratio: 0.5}}\n": (
        "mine.yaml:2:17: average_tokens: nothing is left to solve: leave the budget of at least one stage out"
    ),
    HEAD + "  - at: llm.layers.2\n    at: llm.layers.3\n": "mine.yaml:4:5: the key 'at' stands twice in this mapping",
    "name: mine\nstage:\n  - at: llm.input\n": (
        "mine.yaml:1:1: 'stages' is missing\n"
        "mine.yaml:2:1: stage: a policy has no key 'stage'; "
        f"it takes {POLICY}. Did you mean 'stages'?"
    ),
    "name: mine\non: 3\nstages: []\n": (
        "mine.yaml:2:1: 'on' is not a word and cannot be a key (quote it if it is meant as one)"
    ),
    "name: mine\nstages: []\n": (
        "mine.yaml:2:9: stages: list should have at least 1 item after validation, not 0, not []"
    ),
    "": "mine.yaml: a policy is a mapping with name and stages; this file is empty",
    "- a\n": "mine.yaml: a policy is a mapping with name and stages; this file is a list",
    "a: [\n": (
        "mine.yaml:2:1: not valid YAML: while parsing a flow node expected the node content, but found '<stream end>'"
    ),
    "a: !!python/object:os.system x\n": (
        "mine.yaml:1:4: not valid YAML: could not determine a constructor for the tag "
        "'tag:yaml.org,2002:python/object:os.system'"
    ),
    "a: &x [*x]\n": "mine.yaml:1:4: the document is nested too deeply, too large, or contains itself",
    b"\xff\xfe": "mine.yaml: not UTF-8 text (byte 0)",
}  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), CASES.items(), ids=range(len(CASES)))
def test_text_and_place(tmp_path: Path, text: str | bytes, expected: str) -> None:
    assert errors(tmp_path, text) == expected


def test_all_errors_of_a_file_at_once_in_order(tmp_path: Path) -> None:
    text = (
        "name: mine\nsead: 3\nstages:\n- at: llm.layer.2\n  scorer: l2\n  budget: {keep_tokens: -1}\n"
        "- at: llm.layers.3\n  scorer: {name: variation, metric: l3}\n  budget: 0.5\n"
    )
    lines = errors(tmp_path, text).splitlines()
    places = [line.split(" ")[0] for line in lines]
    assert places == [
        "mine.yaml:2:1:", "mine.yaml:4:7:", "mine.yaml:5:11:", "mine.yaml:6:25:", "mine.yaml:8:37:", "mine.yaml:9:11:"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("v2drop-llava-1.5-7b-19", "no policy named 'v2drop-llava-1.5-7b-19'; `tokenprune list` shows them. "
         "Did you mean 'v2drop-llava-1.5-7b-192'?"),
        ("nowhere/x.yaml", "nowhere/x.yaml: there is no such file"),
        (Path("tests"), "tests: this is a directory; name a policy file in it"),
        ("fastv?sed=3", "?sed=3: sed: a policy has no key 'sed'; "
         f"it takes {POLICY}. Did you mean 'seed'?"),
        ("fastv?seed", "?seed: an override is written key=value, for example seed=3 or scorer=random"),
        ("fastv?stages.4.at=llm.input", "?stages.4.at=llm.input: stages has no 4; it has 1 entries"),
        ("fastv?scorer.query=most", "?scorer.query=most: stages[0].scorer.query: input should be 'last', 'text', "
         "'after_image', 'raters', 'visual', 'through_image', 'all' or 'cls', not 'most'"),
        (3, "no policy named '3'; `tokenprune list` shows them."),
        ("z" * 300, f"no policy named '{'z' * 300}'; `tokenprune list` shows them."),  # longer than a file name can be
    ],
)  # fmt: skip
def test_wrong_sources(source: object, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[1])
    with pytest.raises(PolicyError) as error:
        Policy.load(source)  # type: ignore[arg-type]
    assert str(error.value) == expected


def test_a_file_of_that_name_is_pointed_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "zzz").write_text("")
    with pytest.raises(PolicyError, match=r"There is a file 'zzz' here; write \./zzz for it\."):
        Policy.load("zzz")


def planning_errors(text: str, tmp_path: Path) -> str:
    import transformers

    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(PolicyError) as error:
        plan(file, transformers.LlavaConfig())
    return str(error.value).replace(str(file), "mine.yaml")


PLANNING = {
    HEAD + "  - {at: llm.layers.40, scorer: variation, budget: {keep_ratio: 0.5}}\n": (
        "mine.yaml:3:10: stages[0].at: the model has 32 decoder layers (0 to 31), no layer 40"
    ),
    HEAD + "  - {at: llm.layers.-33, scorer: variation, budget: {keep_ratio: 0.5}}\n": (
        "mine.yaml:3:10: stages[0].at: the model has 32 decoder layers (0 to 31), no layer -33"
    ),
    HEAD + "  - {at: llm.input, scorer: variation, budget: {keep_ratio: 0.5}}\n": (
        "mine.yaml:3:29: stages[0].scorer: 'variation' compares with the layer before, and no decoder layer comes before "
        "layer 0; use llm.layers.1 or later"
    ),
    HEAD + "  - {at: llm.layers.3, scorer: variation, budget: {keep_ratio: 0.5}}\n"
    "  - {at: llm.layers.5%, scorer: variation, budget: {keep_ratio: 0.5}}\n": (
        "mine.yaml:4:10: stages[1].at: llm.layers.5% is decoder layer 2, but stages[0] already acts at layer 3 "
        "(llm.layers.3); stages go forward, and one of them acts while decoding"
    ),
    HEAD + "  - {at: llm.layers.3, scorer: variation, budget: {keep_tokens: 10}}\n"
    "  - {at: llm.layers.4, scorer: variation, budget: {keep_tokens: 10}}\n": (
        "mine.yaml:4:51: stages[1].budget: keep_tokens: 10 cannot take effect, stages[0] already leaves 10"
    ),
    "average_tokens: 20\n" + HEAD + "  - {at: llm.layers.3, scorer: variation}\n": (
        "mine.yaml:1:17: average_tokens: 20 cannot be reached with 576 visual tokens: keeping none at the open stages still "
        "gives 54; move the first stage to an earlier layer"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), PLANNING.items(), ids=range(len(PLANNING)))
def test_planning_text_and_place(tmp_path: Path, text: str, expected: str) -> None:
    assert planning_errors(text, tmp_path) == expected
