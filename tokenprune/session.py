"""`compress(model, policy)`: puts a plan on a model for the length of a `with` block. The only file that registers hooks.

How it works, in one paragraph. The logical sequence never changes: masks, position ids, `generate` and the shapes of the
outputs see the full prompt. Before each decoder layer, a hook cuts what the layer receives (states, rotary embeddings,
mask) to a compact view of the positions still alive, and tells the layer's cache which positions arrive. Where a stage
acts, the hook first asks scorer and selector which visual tokens stay. After the last layer the states are put back to
logical length; a dropped position holds the state it had when it left. The attention kernel is never switched.
"""

from __future__ import annotations

import inspect
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from tokenprune import cache as caches
from tokenprune import compat
from tokenprune.errors import (
    InputError,
    PluginContractError,
    SessionError,
    UnsupportedModelError,
)
from tokenprune.forward import Forward
from tokenprune.interfaces import Adapter, AttentionRows, PruneContext
from tokenprune.plan import Plan, PlannedStage, plan
from tokenprune.policy import Policy
from tokenprune.report import Report, StageRecord
from tokenprune.sequence import Slots, View, Visuals, per_row, take

__all__ = ["LayerTimes", "NoVisualTokensWarning", "Session", "compress", "time_layers"]


def compress(
    model: nn.Module, policy: str | Path | Mapping[str, Any] | Policy, *, adapter: Adapter | None = None
) -> Session:
    """Run `model` with its visual tokens compressed by `policy` inside a `with` block.

    policy: a name (`tokenprune list` shows them, `?key=value` overrides parts), a path to a YAML file, a mapping, or a
    Policy. adapter: for a model that no registered adapter serves, or to try one out.

    The model and its attention kernel stay as they are, and leaving the block restores everything. Raises PolicyError,
    UnsupportedModelError or SessionError before anything runs.
    """
    return Session(model, plan(policy, model, adapter))


class NoVisualTokensWarning(UserWarning):
    """A prompt held no visual token, so there was nothing to compress and it ran unpruned."""


_active: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_active_lock = threading.Lock()


class Session:
    """A plan on a model. Use as a context manager; `report` tells about the last prefill."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self.model = model
        self.plan = plan
        self._decoder = plan.adapter.decoder(model)
        self._layers = plan.adapter.layers(model)
        self._handles: list[Any] = []
        self._inputs: dict[str, Any] = {}
        self._mask: Tensor | None = None
        self._run: Forward | None = None
        self._ran = False
        self._ends_in_image: Tensor | None = None
        self._prefills = 0
        self._report = Report(plan.policy.name, plan.policy.digest)
        self._unchecked: list[tuple[Tensor, str]] = []

    @property
    def policy(self) -> Policy:
        """The policy in force."""
        return self.plan.policy

    @property
    def report(self) -> Report:
        """What the last prefill did."""
        self._check_contracts()
        return self._report

    def __enter__(self) -> Session:
        path = _modules_between(self.model, self._decoder)
        self._refuse_what_cannot_work(path)
        with _active_lock:
            if self._decoder in _active:
                raise SessionError(
                    "this model is already inside a compress block; leave it first, policies do not nest"
                )
            _active.add(self._decoder)
        try:
            self._register(path)
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()
        if kind is None:
            self._check_contracts()
            if not self._ran:
                warnings.warn(
                    f"no forward pass of this model ran inside the compress block, so policy {self.policy.name!r} "
                    "had no effect",
                    stacklevel=2,
                )

    def _register(self, path: Sequence[nn.Module]) -> None:
        stages = self.plan.stage_at()
        for module in path:
            self._hook(module.register_forward_pre_hook(self._see_inputs, with_kwargs=True))
        self._hook(self._decoder.register_forward_pre_hook(self._begin, with_kwargs=True))
        for index, layer in enumerate(self._layers):
            hook = self._before_layer(index, stages.get(index), stages.get(index + 1))
            self._hook(layer.register_forward_pre_hook(hook, with_kwargs=True))
        self._hook(self._layers[-1].register_forward_hook(self._after_last_layer))
        for index in self._tapped_layers():
            self._hook(self._layers[index].register_forward_hook(self._untap, always_call=True))

    def _leave(self) -> None:
        """Take off everything that was put on."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._run is not None:
            self._run.untap()
        self._run, self._inputs, self._mask = None, {}, None
        with _active_lock:
            _active.discard(self._decoder)

    def _hook(self, handle: Any) -> None:
        self._handles.append(handle)

    def _tapped_layers(self) -> set[int]:
        found = set()
        for stage in self.plan.stages:
            signal = stage.signal("attention")
            if signal is not None and signal.layer == "previous":
                found.add(stage.layer - 1)
        return found

    def _refuse_what_cannot_work(self, path: Sequence[nn.Module]) -> None:
        if any(compat.is_compiled(module) for module in (*path, self._decoder, *self._layers)):
            raise SessionError(
                "this model was compiled before compress and would ignore it; compile the decoder layers' forward "
                "methods instead (layer.forward = torch.compile(layer.forward, dynamic=True))"
            )
        if compat.mask_form(self._decoder.config) == "block":
            raise UnsupportedModelError(
                "flex_attention masks cannot be cut yet; load the model with attn_implementation='sdpa'"
            )

    # ---- one forward pass -------------------------------------------------------------------------------------------

    def _see_inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Remember what the caller gave; the decoder itself no longer sees the token ids."""
        given = {name: value for name, value in _named(module, args, kwargs).items() if value is not None}
        if module is self.model:
            self._inputs, self._mask = {}, None  # what a pass that failed on the way may have left
        self._inputs.update(given)
        self._ran = True
        pixels = next((name for name in given if name.startswith("pixel_values")), None)
        if pixels is not None and module is self.model:
            # transformers would complain about this later, in terms of features; the mask is needed anyway.
            mask = self._mask = self.plan.adapter.visual_mask(self.model, given)
            if mask is not None and not mask.any():
                ids = ", ".join(map(str, sorted(self.plan.adapter.visual_token_ids(self.plan.config))))
                raise InputError(
                    f"{pixels} was given, but the prompt holds no image placeholder (token id {ids}); "
                    "put the image token into the prompt, the processor's chat template does it"
                )

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Start the forward pass of the text model."""
        given = _named(module, args, kwargs)
        inputs, mask = {**given, **self._inputs}, self._mask
        self._inputs, self._mask = {}, None
        states = given.get("inputs_embeds")
        rows, length = (states if states is not None else given["input_ids"]).shape[:2]
        self._ran = True
        if compat.checkpointing_reruns_hooks() and module.training and getattr(module, "gradient_checkpointing", False):
            raise SessionError(
                f"gradient checkpointing of transformers {compat.transformers_version()} runs hooks twice; "
                "switch it off or use a newer transformers"
            )
        self._run = Forward(rows, length, compat.mask_form(self._decoder.config))
        if length > 1:  # a single token is a decoding step: whatever its id, there is nothing to drop
            if mask is None:
                mask = self.plan.adapter.visual_mask(self.model, inputs)
            self._run.find_visuals(mask, inputs.get("attention_mask"))
            seen = compat.tokens_seen(inputs)
            self._refuse_split_image(self._run, seen)
            if self._run.visuals is None and not seen:
                note = "the prompt holds no visual token; it ran unpruned"
                warnings.warn(note, NoVisualTokensWarning, stacklevel=2)
                self._report = Report(self.policy.name, self.policy.digest, notes=(note,))

    def _refuse_split_image(self, run: Forward, seen: int) -> None:
        """Refuse a prefill in chunks that cuts an image in two: each part would be ranked and budgeted by itself."""
        before, self._ends_in_image = self._ends_in_image, None if run.is_visual is None else run.is_visual[:, -1]
        if not seen or before is None or run.is_visual is None or len(before) != run.rows:
            return
        if (before & run.is_visual[:, 0]).any():
            raise InputError(
                "this prefill comes in chunks and one of them cuts an image in two; "
                "leave out prefill_chunk_size, or choose one that holds the prompt up to the end of its images"
            )

    def _before_layer(
        self, index: int, stage: PlannedStage | None, follower: PlannedStage | None
    ) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]] | None]:
        """Return the hook of a layer: `stage` acts before it, `follower` will act before the next one."""
        names = tuple(inspect.signature(self._layers[index].forward).parameters)

        def hook(
            layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
            run = self._run
            if run is None:
                return None
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            states = given["hidden_states"]
            if stage is not None and run.visuals is not None:
                states = self._act(run, stage, layer, index, given)
            cut = self._cut(run, index, given, states)
            if follower is not None and run.visuals is not None:
                self._watch(run, follower, layer, states)
            return None if cut is None else ((), cut)

        return hook

    def _after_last_layer(self, layer: nn.Module, args: Any, output: Any) -> Any:
        run, self._run = self._run, None
        if run is None or run.view is None:
            return None
        assert run.logical is not None
        if isinstance(output, tuple):
            return (run.view.put_back(run.logical, output[0]), *output[1:])
        return run.view.put_back(run.logical, output)

    # ---- a stage ----------------------------------------------------------------------------------------------------

    def _act(self, run: Forward, stage: PlannedStage, layer: nn.Module, index: int, given: dict[str, Any]) -> Tensor:
        """Drop tokens before this layer; return the physical states it continues with."""
        states: Tensor = given["hidden_states"]
        visuals = run.visuals
        assert visuals is not None
        keep = [self.plan.counts(n)[stage.number] for n in visuals.original]
        past = compat.tokens_seen(given, index)
        before, scores = run.positions(visuals, past), None
        if tuple(keep) != visuals.counts:
            signal = stage.signal("attention")
            if signal is not None and signal.layer == "this":
                run.attention = self._probe(run, stage, layer, index, given)
            context = self._context(run, stage, states)
            with torch.no_grad():
                kept, scores = self._select(stage, context, visuals, keep)
            if stage.merger.changes_states:
                states = self._merge(stage, context, run, states, kept)
            states = run.narrow(states, kept, keep)
        run.previous = run.attention = None  # also where nothing was dropped: states of a layer are not held for long
        assert run.visuals is not None
        self._record(run, stage, before, run.positions(run.visuals, past), scores)
        return states

    def _context(self, run: Forward, stage: PlannedStage, states: Tensor) -> PruneContext:
        visuals = run.visuals
        assert visuals is not None
        signals: dict[str, Any] = {}
        for signal in stage.signals:
            if signal.name == "hidden":
                signals["hidden"] = take(states, visuals.slots, 1)
            elif signal.name == "previous_hidden":
                assert run.previous is not None
                signals["previous_hidden"] = take(run.previous, visuals.slots, 1)
            else:
                signals["attention"] = run.attention
        return PruneContext(visuals.valid, visuals.ordinal, self.policy.seed, stage.number, signals)

    def _select(
        self, stage: PlannedStage, context: PruneContext, visuals: Visuals, keep: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        """Return [B, N] bool, what stays, and the scores it was chosen by (None for a selector that needs none)."""
        scores = None
        if stage.scorer is not None:
            scores = stage.scorer.score(context)
            if scores.shape != context.valid.shape:
                raise PluginContractError(
                    f"scorer {stage.scorer.name!r} returned shape {tuple(scores.shape)}, not {tuple(context.valid.shape)}"
                )
            finite = (scores.isfinite() | ~context.valid).all()
            self._require(finite, f"scorer {stage.scorer.name!r} returned a score that is not finite at {stage.site}")
            scores = scores.float().masked_fill(~context.valid, -torch.inf)
        wanted = per_row(keep, context.valid.device)
        ranked = scores if scores is not None else context.valid.float()
        kept = stage.selector.select(ranked, wanted, context)
        if kept.shape != context.valid.shape or kept.dtype != torch.bool:
            raise PluginContractError(
                f"selector {stage.selector.name!r} returned {kept.dtype} {tuple(kept.shape)}, "
                f"not bool {tuple(context.valid.shape)}"
            )
        exact = ((kept & context.valid).sum(dim=1) == wanted).all() & ~(kept & ~context.valid).any()
        self._require(
            exact, f"selector {stage.selector.name!r} did not keep exactly the tokens asked for at {stage.site}"
        )
        return kept, scores

    def _merge(self, stage: PlannedStage, context: PruneContext, run: Forward, states: Tensor, kept: Tensor) -> Tensor:
        visuals = run.visuals
        assert visuals is not None
        hidden = take(states, visuals.slots, 1)
        merged = stage.merger.merge(hidden, kept, replace(context, signals={**context.signals, "hidden": hidden}))
        view = View(visuals.slots, None if min(visuals.counts) == max(visuals.counts) else visuals.valid, (), 0)
        return view.put_back(states, merged.to(states.dtype))

    def _require(self, holds: Tensor, message: str) -> None:
        """Check a plugin's result: at once on CPU, at the end elsewhere, so that no stage waits for the device."""
        if holds.device.type == "cpu":
            if not holds:
                raise PluginContractError(message)
        else:
            self._unchecked.append((holds, message))

    def _check_contracts(self) -> None:
        checks, self._unchecked = self._unchecked, []
        for holds, message in checks:
            if not holds:
                raise PluginContractError(message)

    # ---- attention of a few rows ------------------------------------------------------------------------------------

    def _watch(self, run: Forward, follower: PlannedStage, layer: nn.Module, states: Tensor) -> None:
        """Before the layer ahead of a stage: keep what the stage's scorer will ask for."""
        if follower.signal("previous_hidden") is not None:
            run.previous = states
        signal = follower.signal("attention")
        if signal is not None and signal.layer == "previous":
            module = self.plan.adapter.attention(layer)
            run.tap(module, lambda call: run.read_attention(call, signal.query))

    def _untap(self, layer: nn.Module, args: Any, output: Any) -> None:
        if self._run is not None:
            self._run.untap()

    def _probe(
        self, run: Forward, stage: PlannedStage, layer: nn.Module, index: int, given: dict[str, Any]
    ) -> AttentionRows | None:
        """Run the layer up to its attention kernel on the states before the cut, to see its queries and keys."""
        signal = stage.signal("attention")
        assert signal is not None
        arguments = self._cut(run, index, given, given["hidden_states"]) or dict(given)
        name = compat.cache_argument(arguments)
        if name is not None:
            arguments[name] = _PeekingCache(arguments[name])

        def look(call: compat.AttentionCall) -> None:
            run.read_attention(call, signal.query)
            raise _Seen

        run.tap(self.plan.adapter.attention(layer), look)
        try:
            with torch.no_grad():
                layer.forward(**arguments)
        except _Seen:
            pass
        finally:
            run.untap()
        return run.attention

    # ---- cutting ----------------------------------------------------------------------------------------------------

    def _cut(self, run: Forward, index: int, given: dict[str, Any], states: Tensor) -> dict[str, Any] | None:
        """Return the layer's arguments on its compact view, or None when it may run untouched."""
        name = compat.cache_argument(given)
        cache = given[name] if name is not None else None
        past = caches.slots_of(cache, index) if cache is not None else None
        if run.view is None and past is None:
            return None
        arguments = {**run.on_view(given), "hidden_states": states}
        keys, seen = self._keys(run, cache, index, states.device)
        window = getattr(cache.layers[index], "sliding_window", None) if cache is not None else None
        if run.form == "flash":
            self._refuse_long_window(window, keys.length)
            # Flash kernels read gaps in position ids as several packed prompts; the rotary embedding is applied already.
            arguments["position_ids"] = None
        if "attention_mask" in given:
            arguments["attention_mask"] = run.mask(given["attention_mask"], states.dtype, keys, seen, window)
        return arguments

    def _keys(self, run: Forward, cache: Any, index: int, device: torch.device) -> tuple[Slots, int]:
        """Return the slots the kernel will see in this layer, and the logical length seen before this chunk."""
        if cache is None:
            return run.extended(None, device), 0
        layer = caches.compact(cache, index)
        keys = run.extended(layer.slots, device)
        layer.arm(keys)
        return keys, keys.length - run.length

    def _refuse_long_window(self, window: int | None, length: int) -> None:
        if window is not None and length > window:
            raise UnsupportedModelError(
                f"a sliding window of {window} cannot be kept exact under FlashAttention for {length} tokens with gaps; "
                "load the model with attn_implementation='sdpa'"
            )

    # ---- the report -------------------------------------------------------------------------------------------------

    def _record(
        self, run: Forward, stage: PlannedStage, before: list[Tensor], after: list[Tensor], scores: Tensor | None
    ) -> None:
        run.records.append(
            StageRecord(
                site=stage.site,
                layer=stage.layer,
                scorer=stage.scorer.name if stage.scorer is not None else stage.selector.name,
                tokens_in=[len(row) for row in before],
                tokens_out=[len(row) for row in after],
                kept=after,
                positions=before,
                scores=None if scores is None else [row[: len(at)] for row, at in zip(scores, before, strict=True)],
            )
        )
        if stage.number == len(self.plan.stages) - 1:
            self._prefills += 1
            self._report = self._finished(run)

    def _finished(self, run: Forward) -> Report:
        assert run.visuals is not None
        costs = [
            (self.plan.cost(visual, text), self.plan.dense_cost(visual, text))
            for visual, text in zip(run.visuals.original, run.texts, strict=True)
        ]
        return Report(
            policy=self.policy.name,
            digest=self._report.digest,
            stages=tuple(run.records),
            visual_tokens=list(run.visuals.original),
            prompt_tokens=[v + t for v, t in zip(run.visuals.original, run.texts, strict=True)],
            entering=[cost.entering for cost, _ in costs],
            flops_ratio=sum(cost.flops for cost, _ in costs) / sum(dense.flops for _, dense in costs),
            kv_ratio=sum(cost.kv_bytes for cost, _ in costs) / sum(dense.kv_bytes for _, dense in costs),
            prefills=self._prefills,
        )


class _Seen(Exception):
    """Raised inside a probed layer once its queries and keys are known."""


class _PeekingCache:
    """Stands in for a cache while a layer is probed: gives past and new states together and stores nothing."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def update(self, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        stored = compat.cache_layer(self._cache, layer)
        if not stored.is_initialized or not stored.keys.numel():
            return key, value
        return torch.cat([stored.keys, key], dim=-2), torch.cat([stored.values, value], dim=-2)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def _named(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name; some families pass them by position."""
    if not args:
        return kwargs
    return {**dict(zip(inspect.signature(module.forward).parameters, args, strict=False)), **kwargs}


def _modules_between(model: nn.Module, decoder: nn.Module) -> list[nn.Module]:
    """Return the modules from `model` down to the owner of `decoder`: those that see token ids and pixels."""
    name = next((name for name, module in model.named_modules() if module is decoder), None)
    if name is None:
        raise UnsupportedModelError(f"the decoder of {type(model).__name__} is not part of the model that was given")
    path, modules = name.split("."), [model]
    for part in path[:-1]:
        modules.append(getattr(modules[-1], part))
    return modules if name else []


# ---- timing ---------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class LayerTimes:
    """Milliseconds per decoder layer, of each forward pass longer than one token."""

    prefill: list[list[float]] = field(default_factory=list)

    @property
    def total(self) -> float:
        """Milliseconds in the decoder layers of the last prefill."""
        return sum(self.prefill[-1]) if self.prefill else 0.0


@contextmanager
def time_layers(layers: Sequence[nn.Module]) -> Iterator[LayerTimes]:
    """Time the decoder layers, hooks of a session entered inside the block included. Waits for the device: for reports."""
    times = LayerTimes()
    started = [0.0]

    def now(states: Any) -> float:
        if isinstance(states, Tensor) and states.device.type == "cuda":
            torch.cuda.synchronize(states.device)
        return perf_counter()

    def before(index: int) -> Callable[..., None]:
        def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            states = args[0] if args else kwargs["hidden_states"]
            if index == 0 and states.shape[-2] > 1:
                times.prefill.append([])
            started[0] = now(states) if states.shape[-2] > 1 else 0.0

        return hook

    def after(layer: nn.Module, args: Any, output: Any) -> None:
        states = output[0] if isinstance(output, tuple) else output
        if started[0] and states.shape[-2] > 1:
            times.prefill[-1].append((now(states) - started[0]) * 1e3)

    handles = [layer.register_forward_pre_hook(before(i), with_kwargs=True) for i, layer in enumerate(layers)]
    handles += [layer.register_forward_hook(after) for layer in layers]
    try:
        yield times
    finally:
        for handle in handles:
            handle.remove()
