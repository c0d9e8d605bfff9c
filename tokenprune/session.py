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
from tokenprune.decision import Decision, decide
from tokenprune.decoding import Decoding
from tokenprune.errors import (
    InputError,
    PluginContractError,
    SessionError,
    UnsupportedModelError,
)
from tokenprune.eyes import Eyes
from tokenprune.forward import Forward
from tokenprune.interfaces import Adapter, Paired, PruneContext
from tokenprune.layout import layout_of
from tokenprune.plan import Plan, PlannedStage, plan
from tokenprune.policy import Policy
from tokenprune.reading import from_call, text_of, visual_of
from tokenprune.report import Report, StageRecord
from tokenprune.sequence import Slots, View, per_row, take
from tokenprune.text_tower import TextTower
from tokenprune.tokens import Signal, Site
from tokenprune.vision import TowerAttention

__all__ = ["LayerTimes", "NoVisualTokensWarning", "Session", "compress", "time_layers"]


def compress(
    model: nn.Module,
    policy: str | Path | Mapping[str, Any] | Policy,
    *,
    adapter: Adapter | None = None,
    text_tower: TextTower | None = None,
) -> Session:
    """Run `model` with its visual tokens compressed by `policy` inside a `with` block.

    policy: a name (`tokenprune list` shows them, `?key=value` overrides parts), a path to a YAML file, a mapping, or a
    Policy. adapter: for a model that no registered adapter serves, or to try one out. text_tower: for policies that compare
    images with text in a tower that aligns them (`tokenprune.text_tower.ClipText`).

    The model and its attention kernel stay as they are, and leaving the block restores everything. Raises PolicyError,
    UnsupportedModelError or SessionError before anything runs.
    """
    return Session(model, plan(policy, model, adapter), text_tower)


class NoVisualTokensWarning(UserWarning):
    """A prompt held no visual token, so there was nothing to compress and it ran unpruned."""


_OF_A_KERNEL = ("attention", "keys", "values")
_active: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_active_lock = threading.Lock()


class Session:
    """A plan on a model. Use as a context manager; `report` tells about the last prefill."""

    def __init__(self, model: nn.Module, plan: Plan, text_tower: TextTower | None = None) -> None:
        self.model = model
        self.plan = plan
        self.text_tower = text_tower
        self._decoder = plan.adapter.decoder(model)
        self._layers = plan.adapter.layers(model)
        self._rope_base = compat.rope_base(plan.adapter.text_config(plan.config))
        self._handles: list[Any] = []
        self._taps: list[Callable[[], None]] = []
        self._inputs: dict[str, Any] = {}
        self._mask: Tensor | None = None
        self._eyes = Eyes(model, plan, self._require)
        self._run: Forward | None = None
        self._decoding = Decoding.of(plan)
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
        return self._report if self._decoding is None else replace(self._report, decoding=self._decoding.record)

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
        for module in path:
            self._hook(module.register_forward_pre_hook(self._see_inputs, with_kwargs=True))
        self._hook(self._decoder.register_forward_pre_hook(self._begin, with_kwargs=True))
        for index, layer in enumerate(self._layers):
            self._hook(layer.register_forward_pre_hook(self._before_layer(index), with_kwargs=True))
        self._hook(self._layers[-1].register_forward_hook(self._after_last_layer))
        for index in self._tapped_layers():
            self._hook(self._layers[index].register_forward_hook(self._untap, always_call=True))
        if self.plan.sees_vision:
            self._register_vision()

    def _register_vision(self) -> None:
        adapter, eyes = self.plan.adapter, self._eyes
        self._hook(adapter.tower_module(self.model).register_forward_pre_hook(eyes.open, with_kwargs=True))
        for index, sites in self.plan.tower_layers().items():
            layer = adapter.tower_layers(self.model)[index]
            before, after = eyes.on_layer(adapter.attention(layer), sites)
            self._hook(layer.register_forward_pre_hook(before))
            self._hook(layer.register_forward_hook(after, always_call=True))
        projector = adapter.projector(self.model)
        self._hook(projector.register_forward_pre_hook(eyes.before_projector))
        self._hook(projector.register_forward_hook(eyes.after_projector))

    def _leave(self) -> None:
        """Take off everything that was put on."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._untap()
        self._eyes.close()
        self._run, self._mask, self._inputs = None, None, {}
        with _active_lock:
            _active.discard(self._decoder)

    def _hook(self, handle: Any) -> None:
        self._handles.append(handle)

    def _tapped_layers(self) -> set[int]:
        found = set()
        for stage in self.plan.stages:
            ahead = any(s.is_here and s.name in _OF_A_KERNEL and s.layer == "previous" for s in stage.signals)
            if ahead or stage.decodes:
                found.add(stage.layer - 1)
        return found

    def _refuse_what_cannot_work(self, path: Sequence[nn.Module]) -> None:
        if any(compat.is_compiled(module) for module in (*path, self._decoder, *self._layers)):
            raise SessionError(
                "this model was compiled before compress and would ignore it; compile the decoder layers' forward "
                "methods instead (layer.forward = torch.compile(layer.forward, dynamic=True))"
            )
        if self.plan.needs("paired") and self.text_tower is None:
            raise SessionError(
                f"policy {self.policy.name!r} compares images with text in a tower that aligns them; give one: "
                "--text-tower on the command line, compress(model, policy, text_tower=ClipText.from_pretrained(...)) in "
                "Python; or score with the prompt's own embeddings, 'of: tokens'"
            )
        form = compat.mask_form(self._decoder.config)
        if form == "flash" and self.policy.proportional_attention:
            raise SessionError(
                "proportional_attention adds a number to attention logits, which FlashAttention kernels cannot; "
                "load the model with attn_implementation='sdpa'"
            )
        if form == "block":
            raise UnsupportedModelError(
                "flex_attention masks cannot be cut yet; load the model with attn_implementation='sdpa'"
            )

    # ---- one forward pass -------------------------------------------------------------------------------------------

    def _see_inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Remember what the caller gave; the decoder itself no longer sees the token ids, nor the tower the prompts."""
        given = {name: value for name, value in _named(module, args, kwargs).items() if value is not None}
        if module is self.model:
            self._inputs, self._mask = {}, None  # what a pass that failed on the way may have left
            if any(name.startswith("pixel_values") for name in given):
                self._eyes.close()  # the tower is about to run on these pixels
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

    def _forward(self, rows: int, length: int, mask: Tensor | None, inputs: Mapping[str, Any]) -> Forward:
        """Return the state of a pass with the visual tokens that `mask` [B, Q] marks."""
        run = Forward(rows, length, compat.mask_form(self._decoder.config))
        run.renumbers = self.plan.renumbers
        run.weighs = self.policy.proportional_attention
        run.prompts = inputs.get("input_ids")
        run.find_visuals(mask, inputs.get("attention_mask"))
        vision = self._eyes.taken() if run.visuals is not None else None
        if run.visuals is not None and vision is not None and _brings_images(inputs):
            try:
                vision.lay(run.visuals)
                run.vision = vision
            except InputError:
                if self.plan.reads_vision:  # where tokens sit can be told from the prompt, what they look like cannot
                    raise
        if run.visuals is not None and self.plan.needs_layout:
            if run.vision is not None:
                run.layout = run.vision.layout()
            elif inputs.get("input_ids") is None:
                raise InputError(
                    "where the visual tokens sit cannot be found: give the images to the model (pixel_values), or input_ids"
                )
            else:
                run.layout = layout_of(self.plan.adapter.spans(self.plan.config, inputs), run.visuals, length)
            if self.policy.modality == "video" and not bool((run.layout.video & run.visuals.valid).any()):
                raise InputError(
                    f"policy {self.policy.name!r} is for video: it compares frames, and this prompt holds no clip of several"
                )
        return run

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
        if length == 1:  # a single token is a decoding step: whatever its id, there is nothing to drop
            self._run = Forward(rows, length, compat.mask_form(self._decoder.config))
            self._run.renumbers = self.plan.renumbers
            return
        if mask is None:
            mask = self.plan.adapter.visual_mask(self.model, inputs)
        run = self._run = self._forward(rows, length, mask, inputs)
        seen = compat.tokens_seen(inputs)
        self._refuse_split_image(run, seen)
        if run.visuals is not None and not self.plan.prefill_stages:
            self._prefills += 1
            self._report = self._finished(run)
        if run.visuals is None and not seen:
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

    def _before_layer(self, index: int) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]] | None]:
        """Return the hook of a layer: some stages act before it, others will act before the next one."""
        names = tuple(inspect.signature(self._layers[index].forward).parameters)
        stages, followers = self.plan.stages_at(index), self.plan.stages_at(index + 1)
        decoding = self._decoding

        def hook(
            layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
            run = self._run
            if run is None:
                return None
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            states = given["hidden_states"]
            if run.visuals is not None:
                if index == 0:
                    self._take_input(run, states)
                    states = self._carry_out(run, given, states)
                for stage in stages:
                    if stage.at.text != "vision.output":
                        states = self._act(run, stage, layer, index, {**given, "hidden_states": states})
                if stages:
                    run.forget()
            if decoding is not None:
                decoding.before_layer(run, index, given)
            cut = self._cut(run, index, given, states)
            if followers and run.visuals is not None:
                self._watch(run, followers, layer, index, given if cut is None else cut)
            if decoding is not None:
                decoding.watch(run, index, self.plan.adapter.attention(layer), self._taps)
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

    # ---- before decoder layer 0 -------------------------------------------------------------------------------------

    def _take_input(self, run: Forward, states: Tensor) -> None:
        """Keep the input embeddings where a later stage compares with them."""
        for stage in self.plan.prefill_stages:
            for signal in stage.signals:
                if str(signal.at) == "llm.input" and signal not in run.captured:
                    read = visual_of if signal.of == "visual" else text_of
                    run.captured[signal] = read(run, states)

    def _carry_out(self, run: Forward, given: dict[str, Any], states: Tensor) -> Tensor:
        """Drop before decoder layer 0 what stages decided on the vision side; return the states that are left."""
        wanted = [stage for stage in self.plan.prefill_stages if stage.at.text == "vision.output"]
        decided = run.vision.decided if run.vision is not None else []
        if len(decided) != len(wanted):
            raise InputError(
                "the policy acts at vision.output, but the projector did not run in this forward pass; give the images "
                "to the model (pixel_values), not features made before"
            )
        past = compat.tokens_seen(given, 0)
        for stage, decision in zip(wanted, decided, strict=True):
            assert run.visuals is not None and run.vision is not None
            before = run.positions(run.visuals, past)
            ordinal, valid = run.visuals.ordinal, run.visuals.valid
            kept = take(run.vision.to_rows(decision.kept), ordinal, 1) & valid
            scores = None if decision.scores is None else take(run.vision.to_rows(decision.scores), ordinal, 1)
            if decision.sizes is not None:
                run.sizes = take(run.vision.to_rows(decision.sizes), ordinal, 1)
            counts = tuple(kept.sum(dim=1).tolist())
            if counts != run.visuals.counts:
                states = run.narrow(states, kept, counts)
            run.left.append(counts)
            self._record(run, stage, before, run.positions(run.visuals, past), scores)
        return states

    # ---- a stage ----------------------------------------------------------------------------------------------------

    def _act(self, run: Forward, stage: PlannedStage, layer: nn.Module, index: int, given: dict[str, Any]) -> Tensor:
        """Drop tokens before this layer; return the physical states it continues with."""
        states: Tensor = given["hidden_states"]
        visuals = run.visuals
        assert visuals is not None
        past = compat.tokens_seen(given, index)
        before, scores = run.positions(visuals, past), None
        if not stage.is_planned or stage.merger.changes_states or self._keeps(run, stage) != visuals.counts:
            context = self._context(run, stage, layer, index, given)
            hidden = visual_of(run, states) if stage.merger.changes_states else None
            decision = self._decided(run, stage, context, visuals.counts, hidden)
            scores = decision.scores
            if decision.states is not None:
                view = View(visuals.slots, None if min(visuals.counts) == max(visuals.counts) else visuals.valid, (), 0)
                states = view.put_back(states, decision.states.to(states.dtype))
            if decision.sizes is not None:
                run.sizes = decision.sizes
            if decision.counts != visuals.counts or decision.sizes is not None:
                states = run.narrow(states, decision.kept, decision.counts)
        assert run.visuals is not None
        run.left.append(run.visuals.counts)
        self._record(run, stage, before, run.positions(run.visuals, past), scores)
        return states

    def _keeps(self, run: Forward, stage: PlannedStage) -> tuple[int, ...]:
        """Return how many tokens of each row the selector of a planned stage keeps."""
        assert run.visuals is not None
        known = [tuple(row) for row in zip(*run.left, strict=True)] if self.plan.depends_on_data and run.left else None
        return tuple(
            self.plan.keeps(visual, text, known[row] if known else ())[stage.number]
            for row, (visual, text) in enumerate(zip(run.visuals.original, run.texts, strict=True))
        )

    def _decided(
        self, run: Forward, stage: PlannedStage, context: PruneContext, alive: Sequence[int], hidden: Tensor | None
    ) -> Decision:
        """Decide a stage on its context; counts that a planner knows never wait for the device."""
        assert run.visuals is not None
        device = context.valid.device
        keep = (
            [min(wanted, n) for wanted, n in zip(self._keeps(run, stage), alive, strict=True)]
            if stage.is_planned
            else None
        )
        return decide(
            stage,
            context,
            original=per_row(run.visuals.original, device),
            keep=None if keep is None else per_row(keep, device),
            counts=keep,
            hidden=hidden,
            require=self._require,
            where=stage.site,
        )

    def _context(
        self, run: Forward, stage: PlannedStage, layer: nn.Module, index: int, given: dict[str, Any]
    ) -> PruneContext:
        """Return what the parts of a stage may see: the signals they declared."""
        visuals, states = run.visuals, given["hidden_states"]
        assert visuals is not None
        probed = [s for s in stage.signals if s.is_here and s.name in _OF_A_KERNEL and s.layer == "this"]
        found: dict[Signal, Any] = {}
        if probed:
            found = self._probe(run, layer, index, self._cut(run, index, given, states) or given, probed)
        signals: dict[Any, Any] = {}
        for signal in stage.signals:
            if signal in found:
                signals[signal] = found[signal]
            elif signal in run.captured:
                signals[signal] = run.captured[signal]
            elif not signal.is_here or signal.name in ("layout", "paired"):
                signals[signal] = self._read(run, signal, visuals.ordinal)
            elif signal.name == "previous_hidden":
                assert run.previous is not None
                signals[signal] = visual_of(run, run.previous)
            else:
                seen = self.plan.adapter.final_norm(self.model)(states) if signal.norm else states
                signals[signal] = visual_of(run, seen) if signal.of == "visual" else text_of(run, seen)
        return PruneContext(visuals.valid, visuals.ordinal, self.policy.seed, stage.number, signals, sizes=run.sizes)

    def _read(self, run: Forward, signal: Signal, ordinal: Tensor) -> Any:
        """Return a signal that is known for all visual tokens, for those named by `ordinal` [B, N]."""
        if signal.name == "layout":
            assert run.layout is not None
            return run.layout.map(lambda x: take(x, ordinal, 1))
        if signal.name == "paired":
            return self._paired(run, ordinal)
        if run.vision is None:
            raise InputError(
                f"the policy reads {signal.at}, but the vision side did not run in this forward pass; give the images to "
                "the model (pixel_values), not features made before"
            )
        vision, value = run.vision, run.vision.read(signal)
        if isinstance(value, TowerAttention):
            return value.laid(lambda flat: take(vision.to_rows(flat), ordinal, 1))
        return take(vision.to_rows(value), ordinal, 1)

    def _paired(self, run: Forward, ordinal: Tensor) -> Paired:
        """Return embeddings of the user's aligned tower, for the visual tokens named by `ordinal`."""
        assert self.text_tower is not None
        if run.vision is None or run.prompts is None:
            raise InputError(
                "a policy that compares images with text needs pixel_values and input_ids in this forward pass"
            )
        features = run.vision.to_rows(run.vision.read(Signal("hidden", at=Site("vision.output"))))
        paired = self.text_tower.pair(features, run.prompts)
        return replace(paired, image=take(paired.image, ordinal, 1))

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

    # ---- signals of a kernel ----------------------------------------------------------------------------------------

    def _watch(
        self, run: Forward, followers: Sequence[PlannedStage], layer: nn.Module, index: int, arguments: dict[str, Any]
    ) -> None:
        """Before the layer ahead of some stages: keep what their parts will ask for."""
        wanted = [signal for stage in followers for signal in stage.signals if signal.is_here]
        if any(signal.name == "previous_hidden" for signal in wanted):
            run.previous = arguments["hidden_states"]
        ahead = [s for s in dict.fromkeys(wanted) if s.name in _OF_A_KERNEL and s.layer == "previous"]
        run.captured.update(self._probe(run, layer, index, arguments, [s for s in ahead if not s.rope]))
        tapped = [s for s in ahead if s.rope]
        if tapped:

            def look(call: compat.AttentionCall) -> None:
                for signal in tapped:
                    run.captured[signal] = from_call(run, call, signal, self._rope_base)

            self._taps.append(compat.attention_taps.set(self.plan.adapter.attention(layer), look))

    def _untap(self, *_: Any) -> None:
        while self._taps:
            self._taps.pop()()

    def _probe(
        self, run: Forward, layer: nn.Module, index: int, arguments: dict[str, Any], signals: Sequence[Signal]
    ) -> dict[Signal, Any]:
        """Run a layer up to its attention kernel, on states before the cut, to see its queries and keys."""
        found: dict[Signal, Any] = {}
        for rope in (True, False):
            wanted = [signal for signal in signals if signal.rope == rope]
            if not wanted:
                continue
            given = dict(arguments)
            name = compat.cache_argument(given)
            if name is not None:
                given[name] = _PeekingCache(given[name])
            if not rope:
                given["position_embeddings"] = self._no_rotation(given.get("position_embeddings"))

            def look(call: compat.AttentionCall, wanted: Sequence[Signal] = wanted) -> None:
                found.update({signal: from_call(run, call, signal, self._rope_base) for signal in wanted})
                raise _Seen

            untap = compat.attention_taps.set(self.plan.adapter.attention(layer), look)
            try:
                with torch.no_grad():
                    layer.forward(**given)
            except _Seen:
                pass
            finally:
                untap()
        return found

    def _no_rotation(self, rotary: Any) -> tuple[Tensor, Tensor]:
        """Return (cos, sin) that turn nothing, in the shape of the model's own."""
        if not (isinstance(rotary, tuple) and len(rotary) == 2):
            raise UnsupportedModelError(
                f"{type(self.model).__name__} does not hand (cos, sin) to its layers, so attention before the rotary "
                "embedding (rope: false) cannot be read"
            )
        return torch.ones_like(rotary[0]), torch.zeros_like(rotary[1])

    # ---- cutting ----------------------------------------------------------------------------------------------------

    def _cut(self, run: Forward, index: int, given: dict[str, Any], states: Tensor) -> dict[str, Any] | None:
        """Return the layer's arguments on its compact view, or None when it may run untouched."""
        name = compat.cache_argument(given)
        cache = given[name] if name is not None else None
        past = caches.slots_of(cache, index) if cache is not None else None
        decodes = self._decoding is not None and self._decoding.has_view(index) and cache is not None
        if run.view is None and past is None and not decodes:
            return None
        arguments = {**run.on_view(given), "hidden_states": states}
        if run.renumbers and (run.view is not None or (past is not None and past.next_id is not None)):
            arguments = self._renumbered(run, past, arguments, states)
        keys, seen = self._keys(run, cache, index, states.device)
        if self._decoding is not None:
            keys = self._decoding.visible(run, index, keys)
        window = getattr(cache.layers[index], "sliding_window", None) if cache is not None else None
        if run.form == "flash":
            self._refuse_long_window(window, keys.length)
            # Flash kernels read gaps in position ids as several packed prompts; the rotary embedding is applied already.
            arguments["position_ids"] = None
        if "attention_mask" in given:
            arguments["attention_mask"] = run.mask(given["attention_mask"], states.dtype, keys, seen, window)
        return arguments

    def _renumbered(
        self, run: Forward, past: Slots | None, arguments: dict[str, Any], states: Tensor
    ) -> dict[str, Any]:
        """Return the arguments with position ids counted over what is alive, and the rotary embedding made anew from them."""
        ids = run.new_ids(past)
        changed = {**arguments, "position_ids": ids} if arguments.get("position_ids") is not None else dict(arguments)
        rotary = self.plan.adapter.rotary(self.model)
        if rotary is not None and "position_embeddings" in arguments:
            changed["position_embeddings"] = run.once(lambda: rotary(states, ids), "rotary anew", ids)
        return changed

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
        if stage.number == len(self.plan.prefill_stages) - 1:
            self._prefills += 1
            self._report = self._finished(run)

    def _finished(self, run: Forward) -> Report:
        assert run.visuals is not None
        left = [tuple(row) for row in zip(*run.left, strict=True)] or [()] * run.rows
        costs = [
            (self.plan.cost(visual, text, left[row]), self.plan.dense_cost(visual, text))
            for row, (visual, text) in enumerate(zip(run.visuals.original, run.texts, strict=True))
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


def _brings_images(inputs: Mapping[str, Any]) -> bool:
    """Return whether a forward pass was given images, or what the tower made of them a moment ago (`generate`)."""
    return any(name.startswith("pixel_values") or name == compat.ENCODED_IMAGES for name in inputs)


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
