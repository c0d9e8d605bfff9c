"""A policy laid on a model: layers instead of sites, counts instead of ratios. The last place where a user error may arise.

A plan needs a configuration, not weights, so it can be printed for a model nobody has loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenprune.errors import PolicyError, Problem, UnsupportedModelError, first_sentence
from tokenprune.flops import LayerShape, kv_bytes, layer_flops, paper_macs
from tokenprune.interfaces import Adapter, Merger, Scorer, Selector
from tokenprune.plugins import Registry, registry
from tokenprune.policy import Policy
from tokenprune.budget import Budget
from tokenprune.tokens import Signal

__all__ = ["Cost", "Plan", "PlannedStage", "adapter_for", "plan"]


@dataclass(frozen=True)
class PlannedStage:
    """One stage on a given model: it acts on the tokens entering decoder layer `layer` (0-based)."""

    number: int
    site: str
    layer: int
    scorer: Scorer | None
    selector: Selector
    merger: Merger
    budget: Budget | None
    signals: tuple[Signal, ...]

    def signal(self, name: str) -> Signal | None:
        """Return the declared signal of that name."""
        return next((signal for signal in self.signals if signal.name == name), None)


@dataclass(frozen=True)
class Cost:
    """What a prefill costs, given how many visual tokens enter each decoder layer and how many text tokens stay."""

    shape: LayerShape
    entering: tuple[int, ...]
    text: int

    @property
    def average_entering(self) -> float:
        """Mean over layers of the visual tokens ENTERING a layer (V2Drop, FastV users)."""
        return sum(self.entering) / len(self.entering)

    @property
    def average_leaving(self) -> float:
        """Mean over layers of the visual tokens LEAVING a layer, the cut before the next one included (SparseVLM)."""
        return (sum(self.entering[1:]) + self.entering[-1]) / len(self.entering)

    @property
    def flops(self) -> int:
        """FLOPs of the decoder layers over the whole prompt (see `tokenprune.flops`)."""
        return sum(layer_flops(self.shape, n + self.text) for n in self.entering)

    @property
    def macs_as_papers_print(self) -> int:
        """4nd^2 + 2n^2d + 3ndm over visual tokens only."""
        return paper_macs(self.shape, self.entering)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the key-value cache after prefill, in 16-bit numbers."""
        return sum(kv_bytes(self.shape, n + self.text) for n in self.entering)


@dataclass(frozen=True, eq=False)
class Plan:
    """A policy compiled for one model configuration."""

    policy: Policy
    adapter: Adapter
    config: Any
    depth: int
    shape: LayerShape
    stages: tuple[PlannedStage, ...]
    visual_tokens: int | None
    counts: Callable[[int], tuple[int, ...]]
    """`counts(n)`: how many of n visual tokens are left after each stage."""

    def entering(self, visual: int) -> tuple[int, ...]:
        """Return how many of `visual` tokens enter each decoder layer."""
        return _entering(self.depth, self.stages, visual, self.counts(visual))

    def cost(self, visual: int, text: int = 0) -> Cost:
        """Return the cost of a prefill with `visual` visual and `text` other tokens."""
        return Cost(self.shape, self.entering(visual), text)

    def dense_cost(self, visual: int, text: int = 0) -> Cost:
        """Return the cost of the same prefill without a policy."""
        return Cost(self.shape, (visual,) * self.depth, text)

    def stage_at(self) -> Mapping[int, PlannedStage]:
        """Return the stages by layer."""
        return {stage.layer: stage for stage in self.stages}


def adapter_for(config: Any, plugins: Registry | None = None) -> Adapter:
    """Return the adapter that serves this configuration: the one naming its model type, else a fallback that accepts it.

    Raises UnsupportedModelError with the reason when none does.
    """
    entries = (plugins or registry()).of("adapter").values()
    model_type = getattr(config, "model_type", "") or type(config).__name__
    named: list[Adapter] = [entry.cls() for entry in entries if model_type in entry.cls.model_types]
    fallback: list[Adapter] = [entry.cls() for entry in entries if not entry.cls.model_types]
    candidates = named or fallback
    if not candidates:
        raise UnsupportedModelError(
            f"no adapter serves model type {model_type!r}; `tokenprune list adapters` shows them"
        )
    for adapter in candidates[:-1]:
        try:
            adapter.check(config)
            return adapter
        except UnsupportedModelError:
            continue
    candidates[-1].check(config)
    return candidates[-1]


def plan(policy: str | Path | Mapping[str, Any] | Policy, model_or_config: Any, adapter: Adapter | None = None) -> Plan:
    """Lay a policy on a model (or on its configuration alone) and return the plan.

    adapter: used instead of the registered one that serves the model.

    Raises PolicyError, all problems at once and each at its place in the file, when a layer or a signal is missing or a
    stage cannot take effect; UnsupportedModelError when no adapter serves the model.
    """
    policy = Policy.load(policy)
    config = getattr(model_or_config, "config", model_or_config)
    if adapter is None:
        adapter = adapter_for(config)
    text = adapter.text_config(config)
    depth, shape = text.num_hidden_layers, _shape(config, text)
    problems: list[Problem] = []
    stages = tuple(_planned(policy, adapter, depth, problems))
    problems += _order(policy, stages)
    if problems:
        raise PolicyError(problems)
    counts = _counter(policy, depth, stages)
    visual = adapter.visual_tokens_per_image(config)
    if visual is not None:
        counts(visual)  # an unreachable average is a user error, and must not wait for the first image
    return Plan(policy, adapter, config, depth, shape, stages, visual, counts)


def _shape(config: Any, text: Any) -> LayerShape:
    try:
        return LayerShape.of(text)
    except (AttributeError, RuntimeError) as error:  # transformers raises on sizes that differ between layers
        raise UnsupportedModelError(
            f"{config.model_type}: the size of its decoder layers cannot be read: {first_sentence(error)}"
        ) from None


def _planned(policy: Policy, adapter: Adapter, depth: int, problems: list[Problem]) -> Iterator[PlannedStage]:
    for number, stage in enumerate(policy.stages):
        try:
            layer = stage.at.layer(depth)
        except ValueError as error:
            problems.append(policy.problem(("stages", number, "at"), str(error)))
            continue
        signals = stage.scorer.signals() if stage.scorer is not None else ()
        for signal in signals:
            reason = _unmet(signal, layer, adapter)
            if reason:
                assert stage.scorer is not None
                message = f"{stage.scorer.name!r} {reason}"
                problems.append(policy.problem(("stages", number, "scorer"), message))
        yield PlannedStage(
            number, str(stage.at), layer, stage.scorer, stage.selector, stage.merger, stage.budget, signals
        )


def _unmet(signal: Signal, layer: int, adapter: Adapter) -> str:
    """Return why the signal cannot be had at this layer, or an empty string."""
    if signal.name not in adapter.signals:
        return f"needs {signal.name}; adapter {adapter.name!r} provides {', '.join(sorted(adapter.signals))}"
    needs_before = signal.name == "previous_hidden" or (signal.name == "attention" and signal.layer == "previous")
    if needs_before and layer == 0:
        return "compares with the layer before, and no decoder layer comes before layer 0; use llm.layers.1 or later"
    return ""


def _order(policy: Policy, stages: tuple[PlannedStage, ...]) -> Iterator[Problem]:
    for before, stage in pairwise(stages):
        if stage.layer <= before.layer:
            yield policy.problem(
                ("stages", stage.number, "at"),
                f"{stage.site} is decoder layer {stage.layer}, but stages[{before.number}] already acts at layer "
                f"{before.layer} ({before.site}); stages go forward, one per layer",
            )
        first, second = (s.budget.keep_tokens if s.budget else None for s in (before, stage))
        if first is not None and second is not None and second >= first:
            yield policy.problem(
                ("stages", stage.number, "budget"),
                f"keep_tokens: {second} cannot take effect, stages[{before.number}] already leaves {first}",
            )


def _entering(depth: int, stages: tuple[PlannedStage, ...], visual: int, left: tuple[int, ...]) -> tuple[int, ...]:
    sizes, alive = [], visual
    after = {stage.layer: count for stage, count in zip(stages, left, strict=True)}
    for layer in range(depth):
        alive = after.get(layer, alive)
        sizes.append(alive)
    return tuple(sizes)


def _counter(policy: Policy, depth: int, stages: tuple[PlannedStage, ...]) -> Callable[[int], tuple[int, ...]]:
    """Return the function from visual tokens to tokens left after each stage, solving `average_tokens` if it is set."""

    def counts_at(visual: int, ratio: float) -> tuple[int, ...]:
        alive, left = visual, []
        for stage in stages:
            budget = stage.budget or Budget(keep_ratio=ratio)
            alive = budget.count(alive, visual)
            left.append(alive)
        return tuple(left)

    def average(visual: int, ratio: float) -> float:
        return sum(_entering(depth, stages, visual, counts_at(visual, ratio))) / depth

    @cache
    def counts(visual: int) -> tuple[int, ...]:
        target = policy.average_tokens
        if target is None or average(visual, 1.0) <= target:
            return counts_at(visual, 1.0)
        if average(visual, 0.0) > target:
            raise PolicyError(
                [
                    policy.problem(
                        ("average_tokens",),
                        f"{target:g} cannot be reached with {visual} visual tokens: keeping none at the open stages still "
                        f"averages {average(visual, 0.0):.1f}; move the first stage to an earlier layer",
                    )
                ]
            )
        low, high = 0.0, 1.0  # counts only grow with the ratio, so bisection finds the largest that fits
        while high - low > 1e-9:
            middle = (low + high) / 2
            low, high = (middle, high) if average(visual, middle) <= target else (low, middle)
        return counts_at(visual, low)

    return counts
