"""What a session sees of the vision side: callbacks around the tower, its layers and the projector.

The session registers them. Images are encoded before anybody knows the prompts (`generate` does it first of all), so what is
seen waits here until the text model starts and takes it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tokenprune import compat
from tokenprune.decision import Require, decide
from tokenprune.interfaces import PruneContext
from tokenprune.plan import Plan, PlannedStage
from tokenprune.vision import FlatDecision, TowerAttention, Vision

__all__ = ["Eyes"]


class Eyes:
    """Keeps what the vision side shows, and lets the stages at `vision.output` act on it, image by image."""

    def __init__(self, model: nn.Module, plan: Plan, require: Require) -> None:
        self.model = model
        self.plan = plan
        self.require = require
        self.stages = [stage for stage in plan.prefill_stages if stage.at.text == "vision.output"]
        self._vision: Vision | None = None
        self._kept: Tensor | None = None
        self._taps: list[Callable[[], None]] = []

    def taken(self) -> Vision | None:
        """Return what was seen since the last time, and forget it."""
        vision, self._vision = self._vision, None
        return vision

    def close(self) -> None:
        """Forget everything and look no longer."""
        self._vision = self._kept = None
        self._untap()

    def _untap(self) -> None:
        while self._taps:
            self._taps.pop()()

    # -- callbacks

    def open(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Prepare for what the tower is about to show; `generate` runs it before it runs the model."""
        assert self.plan.tower is not None
        names, adapter = inspect.signature(module.forward).parameters, self.plan.adapter
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        self._vision = Vision(
            self.plan.tower, adapter.tower_grids(self.model, given), adapter.tower_order(self.model, given)
        )

    def on_layer(self, attention: nn.Module, sites: Sequence[str]) -> tuple[Callable[..., None], Callable[..., None]]:
        """Return the callbacks before and after a layer of the tower that is read under these names."""
        signals = [signal for stage in self.plan.stages for signal in stage.signals if str(signal.at) in sites]
        attends = any(signal.name in ("attention", "keys", "values") for signal in signals)

        def before(layer: nn.Module, args: Any) -> None:
            if self._vision is not None and attends:
                look = partial(self._saw, sites)
                self._taps.append(compat.attention_taps.set(attention, look))

        def after(layer: nn.Module, args: Any, output: Any) -> None:
            self._untap()
            if self._vision is not None and output is not None:
                for site in sites:
                    self._vision.saw_output(site, output[0] if isinstance(output, tuple) else output)

        return before, after

    def _saw(self, sites: Sequence[str], call: compat.AttentionCall) -> None:
        for site in sites if self._vision is not None else ():
            assert self._vision is not None
            self._vision.saw_attention(site, call)

    def before_projector(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Keep what enters the projector; where a stage acts here, let the projector run on what stays."""
        vision, features = self._vision, args[0]
        if vision is None:
            return None
        vision.saw_output("vision.output", features)
        if not self.stages:
            return None
        tokens = vision.tokens_of(features)  # [T, merge, D]
        flat = tokens.flatten(1)
        for stage in self.stages:
            flat = self._decide(vision, stage, flat)
        self._kept = vision.decided[-1].kept
        kept = flat.view_as(tokens)[self._kept].flatten(0, 1)
        return (kept.unsqueeze(0) if features.ndim > 2 else kept, *args[1:])

    def _decide(self, vision: Vision, stage: PlannedStage, flat: Tensor) -> Tensor:
        """Decide a stage image by image, over features [T, D] in tower order; return the features as they are after it."""
        place, valid = vision.images()
        before = vision.decided[-1] if vision.decided else None
        if before is not None:  # what an earlier stage dropped must not be seen
            valid = valid & before.kept[place]
            most = max(int(valid.sum(dim=1).max()), 1)
            order = (~valid).to(torch.uint8).argsort(dim=1, stable=True)[:, :most]
            place, valid = place.gather(1, order), valid.gather(1, order)
        ordinal = torch.arange(place.shape[1], device=place.device).expand_as(place) if before is None else order
        features = flat[place]
        signals: dict[Any, Any] = {}
        for signal in stage.signals:
            if signal.name == "hidden" and (signal.is_here or str(signal.at) == "vision.output"):
                signals[signal] = features
            elif signal.name == "layout":
                layout = vision.layout_of_images()
                signals[signal] = layout if before is None else layout.map(lambda x: x.gather(1, ordinal))
            else:
                value = vision.read(signal)
                signals[signal] = value.laid(lambda x: x[place]) if isinstance(value, TowerAttention) else value[place]
        sizes = before.sizes[place] if before is not None and before.sizes is not None else None
        context = PruneContext(valid, ordinal, self.plan.policy.seed, stage.number, signals, sizes=sizes)
        size = valid.sum(dim=1)
        decision = decide(
            stage, context, original=size, hidden=features if stage.merger.changes_states else None,
            require=self.require, where=stage.site,
        )  # fmt: skip

        def spread(values: Tensor | None, empty: float) -> Tensor | None:
            if values is None:
                return None
            out = torch.full((flat.shape[0],), empty, dtype=values.dtype, device=flat.device)
            out[place[valid]] = values[valid]
            return out

        kept, scores = spread(decision.kept, False), spread(decision.scores, -torch.inf)
        assert kept is not None
        vision.decided.append(FlatDecision(stage.number, kept, scores, spread(decision.sizes, 1.0)))
        if decision.states is not None:
            flat = flat.index_copy(0, place[valid], decision.states[valid].to(flat.dtype))
        return flat

    def after_projector(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Keep what left the projector, and put it back where the model expects it."""
        vision, kept = self._vision, self._kept
        self._kept = None
        if vision is None:
            return None
        if kept is not None:
            flat = output.flatten(0, 1) if output.ndim > 2 else output
            output = flat.new_zeros(kept.shape[0], flat.shape[-1]).masked_scatter(kept.unsqueeze(-1), flat)
        vision.saw_output("projector.output", output)
        if kept is None:
            return None
        features = vision.outputs["vision.output"][-1]
        return output if features.ndim <= 2 else output.view(features.shape[0], -1, output.shape[-1])
