"""Every registered scorer keeps the contract; the built-in ones equal the obvious slow way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenprune.errors import PluginContractError
from tokenprune.interfaces import AttentionRows, Layout, Paired, PruneContext, Scorer, Text
from tokenprune.plugins import registry
from tokenprune.testing import Signals, make_context
from tokenprune.tokens import Signal

SCORERS = sorted(registry().of("scorer"))
COUNTS = (24, 9, 0)


def full(counts: tuple[int, ...] = COUNTS) -> PruneContext:
    return make_context(len(counts), max(counts), counts=counts, grid=(2, 3, 4))


def example(name: str) -> Scorer:
    scorer: Scorer = registry().of("scorer")[name].cls.example()
    return scorer


def with_signals(ctx: PruneContext, change: Callable[[Any], Any]) -> PruneContext:
    assert isinstance(ctx.signals, Signals)
    return replace(ctx, signals=Signals({name: change(value) for name, value in ctx.signals.values_by.items()}))


def one_row(ctx: PruneContext, row: int, tokens: int) -> PruneContext:
    """Return the context of one row without its padding."""

    def cut(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value[row : row + 1, :tokens]
        if isinstance(value, Layout):
            return value.map(cut)
        if isinstance(value, Text):
            return Text(*(getattr(value, part.name)[row : row + 1] for part in fields(value)))
        if isinstance(value, Paired):
            return Paired(cut(value.image), value.text[row : row + 1], value.text_valid[row : row + 1])
        alone = {part.name: getattr(value, part.name) for part in fields(value)}
        for name in ("queries", "keys", "rows_valid", "row_positions"):
            alone[name] = alone[name][row : row + 1]
        for name in ("columns", "columns_valid", "column_positions"):
            alone[name] = cut(alone[name])
        return AttentionRows(**alone)

    return replace(with_signals(ctx, cut), valid=cut(ctx.valid), ordinal=cut(ctx.ordinal))


@pytest.mark.parametrize("name", SCORERS)
def test_shape_finiteness_determinism_and_batch_invariance(name: str) -> None:
    scorer, ctx = example(name), full()
    scores = scorer.score(ctx)
    assert scores.shape == ctx.valid.shape and scores.is_floating_point()
    assert scores[ctx.valid].isfinite().all()
    assert torch.equal(scores, scorer.score(ctx))
    for row, tokens in enumerate(COUNTS):
        if tokens:
            alone = scorer.score(one_row(ctx, row, tokens))
            torch.testing.assert_close(alone[0], scores[row, :tokens], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", SCORERS)
def test_reads_exactly_what_it_declares(name: str) -> None:
    scorer, ctx = example(name), full()
    assert torch.equal(scorer.score(ctx.only(scorer)), scorer.score(ctx))
    for signal in scorer.needs():
        others = frozenset(scorer.needs()) - {signal}
        with pytest.raises(PluginContractError, match=f"the signal '{signal.name}' was read but not declared"):
            replace(ctx, signals={other: ctx.signals[other] for other in others}).score(scorer)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", SCORERS)
def test_half_precision_signals_are_scored_in_float32(name: str, dtype: torch.dtype) -> None:
    scorer, ctx = example(name), full()

    def cast(value: Any, to: torch.dtype) -> Any:
        if isinstance(value, Tensor):
            return value.to(dtype).to(to) if value.is_floating_point() else value
        if isinstance(value, Layout):
            return value
        if isinstance(value, Text):
            return Text(cast(value.states, to), value.valid, value.after_image)
        if isinstance(value, Paired):
            return Paired(cast(value.image, to), cast(value.text, to), value.text_valid)
        return replace(value, queries=cast(value.queries, to), keys=cast(value.keys, to))

    half, single = (with_signals(ctx, partial(cast, to=to)) for to in (dtype, torch.float32))
    assert scorer.score(half).dtype == torch.float32
    assert torch.equal(scorer.score(half), scorer.score(single))


@pytest.mark.parametrize("chunk", [None, 1, 5, 16, 100])
@pytest.mark.parametrize("metric", ["l2", "l1", "cosine"])
def test_variation_equals_loops_in_float64(metric: str, chunk: int | None) -> None:
    ctx = full()
    scores = registry().of("scorer")["variation"].cls(metric=metric, chunk=chunk).score(ctx)
    for row, tokens in enumerate(COUNTS):
        for token in range(tokens):
            now, before = (ctx.signals[Signal(key)][row, token].double() for key in ("hidden", "previous_hidden"))
            expected = {
                "l2": sum((a - b) ** 2 for a, b in zip(now, before, strict=True)) ** 0.5,
                "l1": sum(abs(a - b) for a, b in zip(now, before, strict=True)),
                "cosine": 1 - now @ before / (now.norm() * before.norm()),
            }[metric]
            assert abs(scores[row, token].item() - float(expected)) < 1e-5


def test_variation_guard_turns_overflow_into_the_lowest_score() -> None:
    ctx = full()
    ctx.hidden[0, 3] = torch.inf
    assert not registry().of("scorer")["variation"].cls().score(ctx)[0, 3].isfinite()
    guarded = registry().of("scorer")["variation"].cls(guard=True).score(ctx)
    assert guarded[0, 3] == 0 and guarded.isfinite().all()


@pytest.mark.parametrize("n", [1, 5, 24, 100])
def test_uniform_top_k_is_spread_evenly_for_any_k(n: int) -> None:
    ctx = make_context(1, n)
    scores = registry().of("scorer")["uniform"].cls().score(ctx)[0]
    assert len(set(scores.tolist())) == n
    for k in range(1, n + 1):
        kept = scores.topk(k).indices.sort().values
        gaps = torch.cat([kept, torch.tensor([n])]).diff()
        step = 1 << ((n - 1) // k).bit_length()  # the grid that holds k tokens is a power of two apart
        assert kept[0] == 0 and gaps.max() <= step


def test_random_differs_between_tokens_and_seeds() -> None:
    scorer = registry().of("scorer")["random"].cls()
    a, b = (scorer.score(make_context(1, 50, seed=seed)) for seed in (0, 1))
    assert len(set(a[0].tolist())) == 50 and not torch.equal(a, b)
