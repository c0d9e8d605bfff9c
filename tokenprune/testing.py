"""Proofs for plugin and model authors: a pruned run against the obvious slow way.

The mask oracle: dropping tokens before layer k must equal a dense run of the same model in which those key columns are
hidden from layer k on. It exercises masks, positions and caches of a family at once and needs no stored numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tokenprune import compat
from tokenprune.interfaces import AttentionRows, Layout, Paired, PruneContext, Text
from tokenprune.policy import Policy
from tokenprune.report import Report
from tokenprune.session import compress
from tokenprune.text_tower import TextTower
from tokenprune.tokens import Signal

__all__ = ["Signals", "check_policy", "grid_layout", "hidden_columns", "make_context"]


@contextmanager
def hidden_columns(
    layers: Sequence[nn.Module], *reports: Report, rotary: nn.Module | None = None, real: Tensor | None = None
) -> Iterator[None]:
    """Run the model densely inside the block, with what the reports say was dropped hidden as keys, in the stage's layer on.

    One report per prefill that shares a cache. Where a row was repeated (beams, samples) after the report was made, row i
    of the report stands for the i-th group of rows. What a decoding stage left out of view is hidden step by step.
    rotary: for policies that renumber positions, makes the rotary embedding of the ids counted over the tokens alive;
    real: [B, Q] the attention mask of the prompt, whose padding is not counted.
    """
    handles = [
        layer.register_forward_pre_hook(_hide(reports, index, rotary, real), with_kwargs=True)
        for index, layer in enumerate(layers)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hide(reports: Sequence[Report], index: int, rotary: nn.Module | None, real: Tensor | None) -> Callable[..., Any]:
    dropped: list[set[int]] = [set() for _ in reports[0].visual_tokens]
    acted = False
    for stage in (stage for report in reports for stage in report.stages if stage.layer <= index):
        acted = True
        for row, before, after in zip(dropped, stage.positions, stage.kept, strict=True):
            row |= set(before.tolist()) - set(after.tolist())
    decoding = reports[-1].decoding
    steps = decoding.hidden if decoding is not None and decoding.layer <= index else []
    done = [0]

    def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        states = args[0] if args else kwargs["hidden_states"]
        length = states.shape[1]
        repeats = states.shape[0] // len(dropped)
        seen = compat.tokens_seen(kwargs, index)
        rows = [set(row) for row in dropped for _ in range(repeats)]
        done[0] = done[0] + 1 if length == 1 else 0
        if steps and length == 1:
            for row, hidden in zip(rows, steps[done[0] - 1], strict=True):
                row |= set(hidden.nonzero().flatten().tolist())
        if any(rows):
            kwargs["attention_mask"] = _without(kwargs["attention_mask"], rows, states, seen)
        if rotary is not None and acted:
            kwargs["position_embeddings"] = rotary(states, _counted(dropped, real, states, seen))
        return args, kwargs

    return hook if any(dropped) or steps or (rotary is not None and acted) else lambda layer, args, kwargs: None


def _counted(dropped: Sequence[set[int]], real: Tensor | None, states: Tensor, seen: int) -> Tensor:
    """Return position ids [B, Q] counted over the tokens alive, one at a time."""
    ids = torch.zeros(states.shape[:2], dtype=torch.long, device=states.device)
    for row, gone in enumerate(dropped):
        number = 0
        for position in range(seen + states.shape[1]):
            if position >= seen:
                ids[row, position - seen] = number
            padding = real is not None and position < real.shape[1] and not real[row, position]
            number += position not in gone and not padding
    return ids


def _without(mask: Tensor | None, dropped: Sequence[set[int]], states: Tensor, seen: int) -> Tensor:
    """Return the mask with the dropped columns hidden; a dropped row still sees itself, so that it stays finite."""
    rows, length = len(dropped), states.shape[1]
    if mask is None:
        at = torch.arange(seen, seen + length, device=states.device).unsqueeze(1)
        mask = (torch.arange(seen + length, device=states.device) <= at)[None, None]
    mask = mask.expand(rows, *mask.shape[1:]).clone()
    offset = seen + length - mask.shape[-1]
    hidden = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    for row, positions in enumerate(dropped):
        for position in positions:
            if offset <= position < seen + length:
                mask[row, :, :, position - offset] = hidden
                if position >= seen:
                    mask[row, :, position - seen, position - offset] = True if mask.dtype == torch.bool else 0.0
    return mask


def check_policy(
    model: Any,
    inputs: Mapping[str, Any],
    policy: str | Path | Mapping[str, Any] | Policy,
    *,
    steps: int = 20,
    atol: float = 1e-5,
    forbidden_tokens: tuple[int, ...] = (),
    text_tower: TextTower | None = None,
) -> Report:
    """Prove that `policy` on `model` equals the dense run with the dropped columns hidden; return the report.

    Compares prefill logits at every position that is alive to the end and not padding, then the logits of `steps` greedy
    decoding steps of `generate` and the tokens themselves. forbidden_tokens: never generated (placeholder ids, which a
    random model may produce). text_tower: as `compress` takes it.
    """
    generate = {
        "max_new_tokens": steps,
        "min_new_tokens": steps,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
        "suppress_tokens": list(forbidden_tokens) or None,
    }
    with torch.no_grad():
        with compress(model, policy, text_tower=text_tower) as session:
            pruned = model(**inputs).logits
            report = session.report
            generated = model.generate(**inputs, **generate)
            report = replace(report, decoding=session.report.decoding)
        adapter, renumbers = session.plan.adapter, session.plan.renumbers
        rotary = adapter.rotary(model) if renumbers else None
        with hidden_columns(adapter.layers(model), report, rotary=rotary, real=inputs.get("attention_mask")):
            dense = model(**inputs).logits
            expected = model.generate(**inputs, **generate)
    alive = _alive(report, inputs)
    gap = (pruned - dense)[alive].abs().max().item()
    assert gap <= atol, f"prefill logits differ from the masked dense run by {gap:.2e} (allowed {atol:.0e})"
    for step, (got, want) in enumerate(zip(generated.logits, expected.logits, strict=True)):
        gap = (got - want).abs().max().item()
        assert gap <= atol, f"logits of decoding step {step} differ from the masked dense run by {gap:.2e}"
    assert torch.equal(generated.sequences, expected.sequences), "greedy tokens differ from the masked dense run"
    return report


def _alive(report: Report, inputs: Mapping[str, Any]) -> Tensor:
    """Return [B, Q] bool: neither padding nor dropped at any stage."""
    ids = inputs["input_ids"]
    mask = inputs.get("attention_mask")
    alive = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool().clone()
    for row in range(ids.shape[0]):
        if report.stages:
            alive[row, report.stages[0].positions[row]] = False
            alive[row, report.stages[-1].kept[row]] = True
    return alive


class Signals(Mapping[Signal, Any]):
    """Answers every signal of a name with the same value, so that a plugin can be tried whatever site it reads.

    values: by name (`hidden`), or by `Signal` where two of one name must differ.
    """

    def __init__(self, values: Mapping[Any, Any]) -> None:
        self.values_by = dict(values)

    def __getitem__(self, signal: Signal) -> Any:
        if signal in self.values_by:
            return self.values_by[signal]
        return self.values_by[signal.name if signal.of == "visual" else f"text_{signal.name}"]

    def __contains__(self, signal: object) -> bool:
        try:
            self[signal]  # type: ignore[index]
        except (KeyError, AttributeError):
            return False
        return True

    def __iter__(self) -> Iterator[Signal]:
        return iter(
            key if isinstance(key, Signal) else Signal(key) for key in self.values_by if "text_" not in str(key)
        )

    def __len__(self) -> int:
        return len(self.values_by)


def make_context(
    rows: int = 2,
    tokens: int = 24,
    width: int = 16,
    *,
    counts: tuple[int, ...] | None = None,
    grid: tuple[int, int, int] | None = None,
    seed: int = 0,
    **signals: Any,
) -> PruneContext:
    """Return a context with random signals of every name (and the given ones instead) to try a plugin on.

    counts: visual tokens per row, at most `tokens`; shorter rows are padded on the right. grid: (frames, rows, columns) of
    the one image or clip that every row shows, in raster order; one line of tokens by default. signals: by name, such as
    `hidden=...`; the text tokens are `text_hidden` and `text_keys`.
    """
    generator = torch.Generator().manual_seed(seed)
    counts = counts or (tokens,) * rows
    valid = torch.arange(tokens) < torch.tensor(counts).unsqueeze(1)
    ordinal = torch.arange(tokens).expand(rows, -1)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    heads, texts = 2, 6
    words = torch.ones(rows, texts, dtype=torch.bool)
    after = torch.arange(texts).expand(rows, -1) >= 2
    start = 3
    made: dict[str, Any] = {
        "hidden": noise(rows, tokens, width),
        "previous_hidden": noise(rows, tokens, width),
        "keys": noise(rows, tokens, heads, 8),
        "values": noise(rows, tokens, heads, 8),
        "layout": grid_layout(ordinal, grid or (1, 1, tokens)),
        "attention": AttentionRows(
            queries=noise(rows, 2 * heads, texts - 2, 8),
            keys=noise(rows, heads, tokens + texts + start, 8),
            bias=None,
            columns=torch.arange(start, start + tokens).expand(rows, -1),
            rows_valid=torch.ones(rows, texts - 2, dtype=torch.bool),
            scaling=8**-0.5,
            columns_valid=valid,
            row_positions=torch.arange(start + tokens, start + tokens + texts - 2).expand(rows, -1),
            column_positions=torch.arange(start, start + tokens).expand(rows, -1),
            rope_base=1e4,
        ),
        "paired": Paired(noise(rows, tokens, 8), noise(rows, 2, 8), torch.ones(rows, 2, dtype=torch.bool)),
        "text_hidden": Text(noise(rows, texts, width), words, after),
        "text_keys": Text(noise(rows, texts, heads, 8), words, after),
    }
    return PruneContext(valid, ordinal, seed=seed, signals=Signals({**made, **signals}))


def grid_layout(ordinal: Tensor, grid: tuple[int, int, int]) -> Layout:
    """Return the layout of one image or clip of `grid` (frames, rows, columns) in raster order; `ordinal`: [B, N]."""
    _, rows, columns = grid
    sizes = [torch.full_like(ordinal, size) for size in grid]
    return Layout(
        image=torch.zeros_like(ordinal),
        frame=ordinal // (rows * columns),
        row=ordinal // columns % rows,
        column=ordinal % columns,
        frames=sizes[0],
        rows=sizes[1],
        columns=sizes[2],
        video=sizes[0] > 1,
    )
