"""Policies the engine tests run: one, two and three stages, every signal, budgets down to nothing."""

from __future__ import annotations

from typing import Any


def stage(at: str, scorer: Any = "variation", selector: Any = "topk", **budget: Any) -> dict[str, Any]:
    return {"at": at, "scorer": scorer, "selector": selector, "budget": budget}


def policy(name: str, *stages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"name": name, "stages": list(stages), **more}


PEEK = {"name": "attention", "query": "after_image", "heads": "max", "layer": "this"}
TEXT = {"name": "attention", "query": "text"}

STAGED: dict[str, dict[str, Any]] = {
    "one": policy("one", stage("llm.layers.2", keep_ratio=0.5)),
    "two": policy("two", stage("llm.input", PEEK, keep_ratio=0.75), stage("llm.layers.4", "attention", keep_tokens=0)),
    "three": policy(
        "three",
        stage("llm.layers.1", TEXT, keep_ratio=0.75),
        stage("llm.layers.50%", keep_ratio=0.5),
        stage("llm.layers.-1", {"name": "variation", "metric": "cosine"}, keep_tokens=1),
    ),
}
KEEP_ALL = policy(
    "keep-all", stage("llm.input", "uniform", keep_ratio=1.0), stage("llm.layers.3", "attention", keep_ratio=1.0)
)
