"""The shipped model is worth measuring with: it answers, it needs its visual tokens, and it needs the right ones.

On the packaged test-split samples only; `training/evaluate.py` measures other ones (`embedded/metrics.json`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from PIL import Image
from torch import Tensor

from tokenprune.interfaces import PruneContext, Scorer
from tokenprune.loading import EMBEDDED, Loaded, load, prepare
from tokenprune.session import Session, compress

SAMPLES = json.loads((EMBEDDED / "samples" / "samples.json").read_text())["samples"]
METRICS = json.loads((EMBEDDED / "metrics.json").read_text())


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return load(None, device="cpu")


@dataclass(frozen=True)
class Keys(Scorer):
    """Knows which patches the question is about; an oracle, so it lives in a test."""

    name: ClassVar[str] = "keys"

    patches: tuple[int, ...] = ()

    def score(self, ctx: PruneContext) -> Tensor:
        return torch.isin(ctx.ordinal, torch.tensor(self.patches)).float()


def questions() -> Iterator[tuple[Image.Image, dict[str, Any]]]:
    for sample in SAMPLES:
        with Image.open(EMBEDDED / "samples" / sample["file"]) as image:
            for question in sample["questions"]:
                yield image.convert("RGB"), question


def accuracy(loaded: Loaded, policy: dict[str, Any] | None, oracle: bool = False) -> float:
    """Share of packaged questions whose first answer word is right."""
    right = []
    for image, question in questions():
        inputs = prepare(loaded, image, question["question"])
        with torch.no_grad():
            if policy is None:
                logits = loaded.model(**inputs).logits
            else:
                session = compress(loaded.model, policy)
                if oracle:
                    _rank_by(session, Keys(tuple(question["key_patches"])))
                with session:
                    logits = loaded.model(**inputs).logits
        word = loaded.processor.tokenizer.convert_ids_to_tokens(int(logits[0, -1].argmax()))
        right.append(word == question["answer"])
    return sum(right) / len(right)


def _rank_by(session: Session, scorer: Scorer) -> None:
    session.plan = replace(
        session.plan, stages=tuple(replace(stage, scorer=scorer, signals=()) for stage in session.plan.stages)
    )


def at_input(scorer: str, **budget: float) -> dict[str, Any]:
    return {"name": "probe", "stages": [{"at": "llm.input", "scorer": scorer, "budget": budget}]}


def test_it_answers_and_needs_the_right_tokens(loaded: Loaded) -> None:
    full = accuracy(loaded, None)
    assert full >= 0.85
    assert accuracy(loaded, at_input("uniform", keep_tokens=0)) <= 0.45
    assert accuracy(loaded, at_input("random", keep_ratio=0.11)) <= full - 0.15
    assert accuracy(loaded, at_input("uniform", keep_tokens=28), oracle=True) >= full - 0.05


def test_what_was_measured_on_held_out_collages() -> None:
    """The numbers of the model card, against what a benchmark model must do."""
    scores, prior = METRICS["accuracy"], METRICS["prior_most_frequent_answer"]
    full = scores["all_576"]
    assert full["all"] >= 0.85
    assert scores["none"]["all"] <= 0.45
    assert scores["random_64"]["all"] <= full["all"] - 0.15  # 64 of 576 tokens are 11 %
    assert scores["oracle_64"]["all"] >= full["all"] - 0.03
    for kind, best_guess in prior.items():
        assert full[kind] >= best_guess + 0.3, f"{kind} is not clearly above its prior"
    assert METRICS["pipeline"]["accuracy"] >= 0.85


def test_the_file_is_small_and_the_first_sample_is_answered_right() -> None:
    assert (EMBEDDED / "model.safetensors").stat().st_size <= 12 * 2**20
    first = SAMPLES[0]["questions"][0]
    assert first["model_answer"] == first["answer"]
    assert len(SAMPLES) >= 6 and {q["kind"] for s in SAMPLES for q in s["questions"]} >= {"shape_at", "exists", "count"}
