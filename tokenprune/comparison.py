"""One question asked with and without a policy: both answers, the report, and what each prefill took."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch

from tokenprune.loading import Loaded
from tokenprune.plan import Plan
from tokenprune.report import Report
from tokenprune.session import NoVisualTokensWarning, Session, compress, time_layers
from tokenprune.text_tower import TextTower

__all__ = ["Comparison", "Spread", "Timed", "compare"]


@dataclass(frozen=True)
class Spread:
    """Median of repeated measurements in milliseconds, with the smallest and the largest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """Return the spread of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass
class Timed:
    """What one of the two runs gave: its answer, and of each repeat the time to the first token and in each layer."""

    answer: str = ""
    first_token_ms: list[float] = field(default_factory=list)
    layers_ms: list[list[float]] = field(default_factory=list)

    @property
    def first_token(self) -> Spread:
        """From prepared inputs to the first token: vision tower, prefill and head."""
        return Spread.of(self.first_token_ms)

    @property
    def decoder(self) -> Spread:
        """In the decoder layers of the prefill."""
        return Spread.of([sum(layers) for layers in self.layers_ms])

    @property
    def layers(self) -> list[float]:
        """Median of each decoder layer."""
        return [statistics.median(values) for values in zip(*self.layers_ms, strict=True)]


@dataclass(frozen=True, eq=False)
class Comparison:
    """Both runs of one question. Without visual tokens there is nothing to compare and nothing was timed."""

    plan: Plan
    report: Report
    unpruned: Timed
    pruned: Timed

    @property
    def latency_ratio(self) -> float:
        """Time to the first token, pruned over unpruned, medians."""
        return self.pruned.first_token.median / self.unpruned.first_token.median


def compare(
    loaded: Loaded,
    plan: Plan,
    inputs: Mapping[str, Any],
    *,
    max_new_tokens: int = 32,
    repeat: int = 3,
    progress: Callable[[str], None] = lambda step: None,
    text_tower: TextTower | None = None,
) -> Comparison:
    """Answer without and with the policy (greedy), then time `repeat` prefills of each in turn.

    The answers come first and warm both runs up. progress: told in words what happens next.
    """
    unpruned, pruned = Timed(), Timed()
    progress("answering without a policy")
    unpruned.answer = _answer(loaded, inputs, max_new_tokens)
    progress(f"answering with {plan.policy.name}")
    with _session(loaded, plan, text_tower) as session:
        pruned.answer = _answer(loaded, inputs, max_new_tokens)
        report = session.report
    for number in range(repeat if report.visual_tokens else 0):
        progress(f"timing prefill {number + 1} of {repeat}")
        _time(loaded, plan, inputs, unpruned, nullcontext())
        _time(loaded, plan, inputs, pruned, _session(loaded, plan, text_tower))
    return Comparison(plan, report, unpruned, pruned)


@contextmanager
def _session(loaded: Loaded, plan: Plan, text_tower: TextTower | None) -> Iterator[Session]:
    """Enter the policy; a prompt without visual tokens is told by the report's notes, not by a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NoVisualTokensWarning)
        with compress(loaded.model, plan.policy, adapter=plan.adapter, text_tower=text_tower) as session:
            yield session


def _answer(loaded: Loaded, inputs: Mapping[str, Any], max_new_tokens: int) -> str:
    with torch.no_grad():
        tokens = loaded.model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    new = tokens[0, inputs["input_ids"].shape[1] :]
    answer: str = loaded.processor.tokenizer.decode(new, skip_special_tokens=True)
    return answer.strip()


def _time(
    loaded: Loaded, plan: Plan, inputs: Mapping[str, Any], timed: Timed, policy: AbstractContextManager[Any]
) -> None:
    """Run one prefill and its first token inside `policy`, and note the times."""
    model = loaded.model
    with (
        time_layers(plan.adapter.layers(model)) as times,
        policy,
        torch.no_grad(),
    ):
        started = perf_counter()
        model.generate(**inputs, max_new_tokens=1, do_sample=False)
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
        timed.first_token_ms.append((perf_counter() - started) * 1e3)
    timed.layers_ms.append(times.prefill[-1])
