"""Whatever the file holds: a policy or a PolicyError, never a traceback; and no unknown key passes."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tokenprune.errors import PolicyError
from tokenprune.policy import Policy, list_policies

FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
REAL = [info.path.read_text() for info in list_policies()]

scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12)
    | st.sampled_from(["variation", "topk", "llm.layers.2", "llm.input", "drop", "l2", 0.5, 64])
)  # fmt: skip
words = st.sampled_from(
    ["name", "stages", "at", "scorer", "budget", "selector", "merger", "seed", "average_tokens", "keep_ratio", "keep_tokens",
     "of", "min_tokens", "metric", "temperature", "paper", "summary"]
)  # fmt: skip
documents = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words | st.text(max_size=6), inner, max_size=5)
)


def read(content: bytes) -> Policy | PolicyError:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "fuzz.yaml"
        file.write_bytes(content)
        try:
            return Policy.load(file)
        except PolicyError as error:
            assert str(error).strip()
            return error


@FUZZ
@given(st.binary(max_size=200))
@example(b"[" * 2000)
@example(b"a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\nd: [*c, *c]\n")
@example(b"? [a]\n: 1\n")
@example(b"--- 1\n--- 2\n")
@example(b"2001-01-01: 3\nx: 2001-99-99\n")
@example(b"x: !!int ''\n")
@example(b"x: !!binary '*'\n")
@example(b"x: !!bool maybe\n")
@example(b"x: !!timestamp x\n")
@example(b"seed: 0x" + b"f" * 5000 + b"\n")  # more digits than Python prints
@example(b"<<: 3\n")
@example(b"\x00")
def test_any_bytes(content: bytes) -> None:
    read(content)


@FUZZ
@given(documents)
def test_any_document(document: Any) -> None:
    read(yaml.safe_dump(document).encode())


@FUZZ
@given(st.dictionaries(words, documents, min_size=1))
def test_any_mapping_given_in_python(document: dict[str, Any]) -> None:
    try:
        policy = Policy.load(document)
    except PolicyError:
        return
    assert Policy.load(policy.to_dict()) == policy


@FUZZ
@given(st.sampled_from(REAL), st.data())
def test_any_mutation_of_a_real_policy(text: str, data: st.DataObject) -> None:
    position = data.draw(st.integers(0, len(text)))
    length = data.draw(st.integers(0, 12))
    insert = data.draw(st.text(max_size=6))
    mutated = text[:position] + insert + text[position + length :]
    policy = read(mutated.encode("utf-8", "surrogatepass"))
    if isinstance(policy, Policy):
        assert Policy.load(policy.to_dict()) == policy


def _mappings(document: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all mappings of a document, and of all components in short form."""
    found = []
    if isinstance(document, dict):
        found.append(at)
        for key, value in document.items():
            found += _mappings(value, (*at, key))
    elif isinstance(document, list):
        for index, value in enumerate(document):
            found += _mappings(value, (*at, index))
    return found


@FUZZ
@given(st.sampled_from(REAL), st.text(min_size=1, max_size=8), scalars, st.data())
def test_an_unknown_key_never_passes(text: str, key: str, value: Any, data: st.DataObject) -> None:
    document = yaml.safe_load(text)
    changed = copy.deepcopy(document)
    inner = changed
    for step in data.draw(st.sampled_from(_mappings(document))):
        inner = inner[step]
    if key in inner or key in {
        "summary",
        "seed",
        "of",
        "selector",
        "merger",
        "budget",
        "query",
        "heads",
        "layer",
        "metric",
    }:
        return  # a real key, not an unknown one
    inner[key] = value
    with pytest.raises(PolicyError):
        Policy.load(changed)
    assert isinstance(read(yaml.safe_dump(changed).encode()), PolicyError)


@FUZZ
@given(st.text(max_size=20), st.text(max_size=20))
@example("stages.\u00b2.at", "llm.input")  # a digit that is no number
@example("stages." + "9" * 5000 + ".at", "llm.input")
@example("seed", "!!int ''")
@example("seed", "!!bool maybe")
@example("seed", "!!timestamp x")
def test_any_override(key: str, value: str) -> None:
    try:
        Policy.load(f"fastv?{key}={value}")
    except PolicyError as error:
        assert str(error).strip()
