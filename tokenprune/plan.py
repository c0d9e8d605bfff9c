"""A policy laid on a model: layers instead of sites, counts instead of ratios. The last place where a user error may arise.

A plan needs a configuration, not weights, so it can be printed for a model nobody has loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from tokenprune.budget import Budget
from tokenprune.errors import PolicyError, Problem, UnsupportedModelError, first_sentence
from tokenprune.flops import LayerShape, kv_bytes, layer_flops, paper_macs
from tokenprune.interfaces import Adapter, Merger, Scorer, Selector, Tower
from tokenprune.plugins import Registry, registry
from tokenprune.policy import Policy, Refresh, Stage
from tokenprune.tokens import Signal, Site

Solver = Callable[[int, int, tuple[int, ...]], tuple[tuple[int, int], ...]]

__all__ = ["Cost", "Plan", "PlannedStage", "adapter_for", "plan"]


@dataclass(frozen=True)
class PlannedStage:
    """One stage on a given model: it acts on the tokens entering decoder layer `layer` (0-based)."""

    number: int
    site: str
    layer: int
    at: Site
    scorer: Scorer | None
    selector: Selector
    merger: Merger
    budget: Budget | None
    refresh: Refresh | None
    signals: tuple[Signal, ...]

    @property
    def is_planned(self) -> bool:
        """Whether its count follows from the number of tokens alone."""
        return not self.selector.counts_itself and (self.budget is None or self.budget.is_plain)

    @property
    def decided_by(self) -> str:
        """What its count follows from: `the plan`, the number of tokens of `each image`, or `the data`."""
        if self.is_planned:
            return "the plan"
        budget = self.budget
        whole = budget is not None and budget.per is not None and budget.per.whole_images
        plain = budget is not None and replace(budget, per=None).is_plain and not self.selector.counts_itself
        return "each image" if whole and plain else "the data"

    @property
    def decodes(self) -> bool:
        """Whether it acts while decoding and not in the prefill."""
        return self.at.part == "decode"

    def keep(self, alive: int, original: int, ratio: float) -> int:
        """Return how many tokens its selector keeps; what only the data decides counts as kept."""
        if self.selector.counts_itself and self.budget is None:
            return alive
        return (self.budget or Budget(keep_ratio=ratio)).count(alive, original)

    def left(self, alive: int, keep: int) -> int:
        """Return how many tokens it leaves, its merger's own included."""
        made = int(self.merger.extra(torch.tensor([alive]), torch.tensor([keep])))
        return min(keep + made, alive)


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
    tower: Tower | None
    renumbers: bool
    """Whether position ids are counted anew after each stage."""
    solver: Solver

    def counts(self, visual: int, text: int = 0, known: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Return how many of `visual` tokens are left after each prefill stage; `known`: what is known of the first ones.

        What only the data decides counts as kept, so the numbers are then upper bounds.
        """
        return tuple(left for _, left in self.solver(visual, text, known))

    def keeps(self, visual: int, text: int = 0, known: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Return how many tokens the selector of each prefill stage keeps: `counts` without what mergers add."""
        return tuple(keep for keep, _ in self.solver(visual, text, known))

    @property
    def prefill_stages(self) -> tuple[PlannedStage, ...]:
        """The stages that act in the prefill."""
        return tuple(stage for stage in self.stages if not stage.decodes)

    @property
    def depends_on_data(self) -> bool:
        """Whether a count is known only when the tokens are."""
        return any(not stage.is_planned for stage in self.prefill_stages)

    def tower_layers(self) -> Mapping[int, list[str]]:
        """Return the layers of the vision tower that some stage reads, with the names they are read under."""
        found: dict[int, list[str]] = {}
        for signal in (signal for stage in self.stages for signal in stage.signals):
            if signal.at is not None and signal.at.part == "vision" and signal.at.is_layer and self.tower is not None:
                names = found.setdefault(signal.at.layer(self.tower.depth, self.policy.written_for.vision), [])
                if signal.at.text not in names:
                    names.append(signal.at.text)
        return found

    @property
    def sees_vision(self) -> bool:
        """Whether the vision side must be watched: it is read, or it tells where tokens sit."""
        return self.tower is not None and (self.reads_vision or self.needs_layout)

    @property
    def reads_vision(self) -> bool:
        """Whether a stage acts on the vision side or reads it."""
        sites = [signal.at for stage in self.stages for signal in stage.signals if signal.at is not None]
        acts = any(stage.at.text == "vision.output" for stage in self.stages)
        return acts or any(site.part != "llm" for site in sites) or self.needs("paired")

    @property
    def needs_layout(self) -> bool:
        """Whether anything depends on where tokens sit."""
        return self.policy.modality == "video" or self.needs("layout")

    def needs(self, name: str) -> bool:
        """Return whether any stage reads a signal of that name."""
        return any(signal.name == name for stage in self.stages for signal in stage.signals)

    def entering(self, visual: int, left: tuple[int, ...] | None = None, text: int = 0) -> tuple[int, ...]:
        """Return how many of `visual` tokens enter each decoder layer; `left`: known counts after each prefill stage."""
        left = self.counts(visual, text) if left is None else left
        return _entering(self.depth, self.prefill_stages, visual, left)

    def cost(self, visual: int, text: int = 0, left: tuple[int, ...] | None = None) -> Cost:
        """Return the cost of a prefill with `visual` visual and `text` other tokens."""
        return Cost(self.shape, self.entering(visual, left, text), text)

    def dense_cost(self, visual: int, text: int = 0) -> Cost:
        """Return the cost of the same prefill without a policy."""
        return Cost(self.shape, (visual,) * self.depth, text)

    def stages_at(self, layer: int) -> tuple[PlannedStage, ...]:
        """Return the prefill stages that act before a decoder layer, in order."""
        return tuple(stage for stage in self.prefill_stages if stage.layer == layer)


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
    depth, shape, tower = text.num_hidden_layers, _shape(config, text), adapter.tower(config)
    problems: list[Problem] = []
    stages = tuple(_planned(policy, adapter, config, depth, problems))
    problems += _order(policy, stages)
    reason = adapter.renumbers(config)
    renumbers = policy.positions == "renumber" or (policy.positions == "renumber_unless_grid" and not reason)
    if policy.positions == "renumber" and reason:
        problems.append(policy.problem(("positions",), f"positions cannot be renumbered in this model: {reason}"))
    problems += () if renumbers else _moved(policy)
    if problems:
        raise PolicyError(problems)
    solver = _solver(policy, depth, shape, tuple(stage for stage in stages if not stage.decodes))
    visual = adapter.visual_tokens_per_image(config)
    if visual is not None:
        solver(visual, 0, ())  # an unreachable average is a user error, and must not wait for the first image
    return Plan(policy, adapter, config, depth, shape, stages, visual, tower, renumbers, solver)


def _shape(config: Any, text: Any) -> LayerShape:
    try:
        return LayerShape.of(text)
    except (AttributeError, RuntimeError) as error:  # transformers raises on sizes that differ between layers
        raise UnsupportedModelError(
            f"{config.model_type}: the size of its decoder layers cannot be read: {first_sentence(error)}"
        ) from None


def _planned(
    policy: Policy, adapter: Adapter, config: Any, depth: int, problems: list[Problem]
) -> Iterator[PlannedStage]:
    for number, stage in enumerate(policy.stages):
        try:
            layer = stage.at.layer(depth, policy.written_for.llm)
        except ValueError as error:
            problems.append(policy.problem((*stage.written, "at"), str(error)))
            continue
        signals = stage.needs()
        reasons = [_misplaced(stage, layer, adapter, config)]
        reasons += [_unmet(signal, stage.at, layer, adapter, config, policy) for signal in signals]
        for reason in dict.fromkeys(filter(None, reasons)):
            where = "scorer" if stage.scorer is not None else "at"
            problems.append(policy.problem((*stage.written, where), f"{_reader(stage)} {reason}"))
        yield PlannedStage(
            number, str(stage.at), layer, stage.at, stage.scorer, stage.selector, stage.merger, stage.budget,
            stage.refresh, signals,
        )  # fmt: skip


def _reader(stage: Stage) -> str:
    """Name the part of a stage that a signal is read for."""
    parts = [part.name for part in (stage.scorer, stage.selector, stage.merger) if part is not None and part.needs()]
    return repr(parts[0]) if parts else "this stage"


def _misplaced(stage: Stage, layer: int, adapter: Adapter, config: Any) -> str:
    """Return why the stage cannot act at this site of this model, or an empty string."""
    at = stage.at
    if at.text == "vision.output":
        tower = adapter.tower(config)
        if tower is None:
            return f"cannot act at {at}: adapter {adapter.name!r} does not know the vision side; use projector.output"
        if not tower.tokenwise:
            return f"cannot act at {at}: the projector of this model mixes tokens; use projector.output"
        if not stage.selector.counts_itself and (stage.budget is None or stage.budget.per is None):
            return (
                f"acts at {at}, where images are not in prompts yet: its budget holds for each of them ('per: image')"
            )
    if at.part == "decode" and layer == 0:
        return "cannot act while decoding before layer 1: the layer before it tells what is looked at"
    return ""


_IN_DECODER = ("previous_hidden", "attention", "keys", "values")


def _unmet(signal: Signal, at: Site, layer: int, adapter: Adapter, config: Any, policy: Policy) -> str:
    """Return why the signal cannot be had by a stage at this site, or an empty string."""
    if signal.name not in adapter.signals:
        return f"needs {signal.name}; adapter {adapter.name!r} provides {', '.join(sorted(adapter.signals))}"
    if at.part == "decode" and signal != Signal("attention"):
        return f"needs {signal.name}; while decoding there is the attention of the token being decoded and nothing else"
    if signal.name == "paired" and at.text == "vision.output":
        return f"compares images with text, and at {at} images are not in prompts yet; use projector.output"
    if signal.at is not None:
        return _unmet_elsewhere(signal, signal.at, at, adapter, config, policy)
    before_text = at.text in ("vision.output", "projector.output")
    if before_text and (signal.name in _IN_DECODER or signal.of == "text"):
        return (
            f"needs {signal.name} of the decoder, which has not run at {at}; use llm.layers.<k>, or 'from' another site"
        )
    previous = signal.name == "previous_hidden" or (signal.name in _IN_DECODER and signal.layer == "previous")
    if previous and layer == 0:
        return "compares with the layer before, and no decoder layer comes before layer 0; use llm.layers.1 or later"
    return ""


def _unmet_elsewhere(signal: Signal, there: Site, at: Site, adapter: Adapter, config: Any, policy: Policy) -> str:
    tower = adapter.tower(config)
    if there.part in ("vision", "projector"):
        if tower is None:
            return f"reads {there}, and adapter {adapter.name!r} does not know the vision side of this model"
        if there.is_layer:
            try:
                there.layer(tower.depth, policy.written_for.vision)
            except ValueError as error:
                return f"reads {there}: {error}"
        if signal.query == "cls" and signal.name == "attention" and not tower.cls:
            return "reads the CLS rows of the vision tower, and this tower has no CLS token; use query: all"
        if at.text == "vision.output" and there.part == "projector":
            return f"reads {there}, which comes after {at}"
        if signal.name == "hidden" or there.is_layer:
            return ""
        return f"reads {signal.name} of {there}; it has hidden states and nothing else"
    if there.text != "llm.input":
        return f"reads {there}; signals are read from vision.layers.<k>, vision.output, projector.output or llm.input"
    if signal.name != "hidden":
        return f"reads {signal.name} of {there}; it has hidden states and nothing else"
    return f"reads {there}, which comes after {at}" if at.text == "vision.output" else ""


def _moved(policy: Policy) -> Iterator[Problem]:
    for stage in policy.stages:
        if stage.merger.moves_states and stage.at.before_decoder == 3:
            yield policy.problem(
                (*stage.written, "merger"),
                f"merger {stage.merger.name!r} moves kept tokens to other places, which is right only where positions are "
                "renumbered; set positions: renumber on the policy (a model whose positions are a grid cannot), or leave "
                "'place: append' out",
            )


def _order(policy: Policy, stages: tuple[PlannedStage, ...]) -> Iterator[Problem]:
    for before, stage in pairwise(stages):
        first, second = ((s.decodes, s.layer, s.at.before_decoder) for s in (before, stage))
        if second < first or (stage.decodes and before.decodes):
            yield policy.problem(
                (*policy.stages[stage.number].written, "at"),
                f"{stage.site} is decoder layer {stage.layer}, but stages[{before.number}] already acts at layer "
                f"{before.layer} ({before.site}); stages go forward, and one of them acts while decoding",
            )
        left, wanted = (s.budget.keep_tokens if s.budget and s.budget.is_plain else None for s in (before, stage))
        if isinstance(left, int) and isinstance(wanted, int) and wanted >= left and not before.merger.changes_states:
            yield policy.problem(
                (*policy.stages[stage.number].written, "budget"),
                f"keep_tokens: {wanted} cannot take effect, stages[{before.number}] already leaves {left}",
            )


def _entering(depth: int, stages: tuple[PlannedStage, ...], visual: int, left: tuple[int, ...]) -> tuple[int, ...]:
    sizes, alive = [], visual
    after = {stage.layer: count for stage, count in zip(stages, left, strict=True)}
    for layer in range(depth):
        alive = after.get(layer, alive)
        sizes.append(alive)
    return tuple(sizes)


def _solver(policy: Policy, depth: int, shape: LayerShape, stages: tuple[PlannedStage, ...]) -> Solver:
    """Return the function from tokens to (kept, left) of each stage, solving the policy's goal if it has one."""

    def counts_at(visual: int, known: tuple[int, ...], ratio: float) -> tuple[tuple[int, int], ...]:
        alive, found = visual, []
        for number, stage in enumerate(stages):
            keep = stage.keep(alive, visual, ratio)
            alive = known[number] if number < len(known) else stage.left(alive, keep)
            found.append((keep, alive))
        return tuple(found)

    def reached(visual: int, text: int, known: tuple[int, ...], ratio: float) -> float:
        left = tuple(left for _, left in counts_at(visual, known, ratio))
        entering = _entering(depth, stages, visual, left)
        if policy.prefill_flops is None:
            return sum(entering) / depth
        dense = layer_flops(shape, visual + text) * depth
        return sum(layer_flops(shape, n + text) for n in entering) / max(dense, 1)

    @cache
    def solve(visual: int, text: int, known: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        goal = policy.average_tokens if policy.prefill_flops is None else policy.prefill_flops
        if goal is None or reached(visual, text, known, 1.0) <= goal:
            return counts_at(visual, known, 1.0)
        least = reached(visual, text, known, 0.0)
        if least > goal and not known:  # with known counts the data has decided; the least is the best there is
            key = "average_tokens" if policy.prefill_flops is None else "prefill_flops"
            raise PolicyError(
                [
                    policy.problem(
                        (key,),
                        f"{goal:g} cannot be reached with {visual} visual tokens: keeping none at the open stages still "
                        f"gives {least:.3g}; move the first stage to an earlier layer",
                    )
                ]
            )
        low, high = 0.0, 1.0  # counts only grow with the ratio, so bisection finds the largest that fits
        while high - low > 1e-9:
            middle = (low + high) / 2
            low, high = (middle, high) if reached(visual, text, known, middle) <= goal else (low, middle)
        return counts_at(visual, known, low)

    return solve
