"""Every registered scorer keeps the contract; the built-in ones equal the obvious slow way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tokenprune.errors import PluginContractError
from tokenprune.interfaces import AttentionRows, PruneContext, Scorer
from tokenprune.plugins import registry
from tokenprune.testing import make_context

SCORERS = sorted(registry().of("scorer"))
COUNTS = (24, 9, 0)


def rows(ctx: PruneContext, seed: int = 0) -> AttentionRows:
    """Random attention rows over the tokens of a context."""
    g = torch.Generator().manual_seed(seed)
    batch, tokens = ctx.valid.shape
    keys = tokens + 6
    return AttentionRows(
        queries=torch.randn(batch, 4, 3, 8, generator=g), keys=torch.randn(batch, 2, keys, 8, generator=g), bias=None,
        columns=torch.arange(3, 3 + tokens).expand(batch, -1), rows_valid=torch.ones(batch, 3, dtype=torch.bool), scaling=0.35,
    )  # fmt: skip


def full(counts: tuple[int, ...] = COUNTS) -> PruneContext:
    ctx = make_context(len(counts), max(counts), counts=counts)
    return make_context(len(counts), max(counts), counts=counts, attention=rows(ctx))


def declared_only(scorer: Scorer, ctx: PruneContext) -> PruneContext:
    names = {signal.name for signal in scorer.signals()}
    signals = {name: value for name, value in ctx.signals.items() if name in names}
    return PruneContext(ctx.valid, ctx.ordinal, ctx.seed, ctx.salt, signals)


def one_row(ctx: PruneContext, row: int, tokens: int) -> PruneContext:
    def cut(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value[row : row + 1, :tokens]
        at = slice(row, row + 1)
        return AttentionRows(
            value.queries[at],
            value.keys[at],
            value.bias,
            value.columns[at, :tokens],
            value.rows_valid[at],
            value.scaling,
        )

    signals = {name: cut(value) for name, value in ctx.signals.items()}
    return PruneContext(
        ctx.valid[row : row + 1, :tokens], ctx.ordinal[row : row + 1, :tokens], ctx.seed, ctx.salt, signals
    )


@pytest.mark.parametrize("name", SCORERS)
def test_shape_finiteness_determinism_and_batch_invariance(name: str) -> None:
    scorer: Scorer = registry().of("scorer")[name].cls()
    ctx = full()
    scores = scorer.score(ctx)
    assert scores.shape == ctx.valid.shape and scores.is_floating_point()
    assert scores[ctx.valid].isfinite().all()
    assert torch.equal(scores, scorer.score(ctx))
    for row, tokens in enumerate(COUNTS):
        if tokens:
            alone = scorer.score(one_row(ctx, row, tokens))
            torch.testing.assert_close(alone[0], scores[row, :tokens], atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", SCORERS)
def test_reads_exactly_what_it_declares(name: str) -> None:
    scorer: Scorer = registry().of("scorer")[name].cls()
    ctx = full()
    assert torch.equal(scorer.score(declared_only(scorer, ctx)), scorer.score(ctx))
    for signal in scorer.signals():
        signals = {key: value for key, value in ctx.signals.items() if key != signal.name}
        with pytest.raises(PluginContractError, match=f"the signal '{signal.name}' was read but not declared"):
            scorer.score(PruneContext(ctx.valid, ctx.ordinal, signals=signals))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", SCORERS)
def test_half_precision_signals_are_scored_in_float32(name: str, dtype: torch.dtype) -> None:
    scorer: Scorer = registry().of("scorer")[name].cls()
    ctx = full()

    def cast(value: Any, to: torch.dtype) -> Any:
        if isinstance(value, Tensor):
            return value.to(dtype).to(to)
        queries, keys = value.queries.to(dtype).to(to), value.keys.to(dtype).to(to)
        return AttentionRows(queries, keys, None, value.columns, value.rows_valid, value.scaling)

    half, single = (
        PruneContext(ctx.valid, ctx.ordinal, signals={name: cast(value, to) for name, value in ctx.signals.items()})
        for to in (dtype, torch.float32)
    )
    assert scorer.score(half).dtype == torch.float32
    assert torch.equal(scorer.score(half), scorer.score(single))


@pytest.mark.parametrize("chunk", [None, 1, 5, 16, 100])
@pytest.mark.parametrize("metric", ["l2", "l1", "cosine"])
def test_variation_equals_loops_in_float64(metric: str, chunk: int | None) -> None:
    ctx = full()
    scores = registry().of("scorer")["variation"].cls(metric=metric, chunk=chunk).score(ctx)
    for row, tokens in enumerate(COUNTS):
        for token in range(tokens):
            now, before = (ctx.signals[key][row, token].double() for key in ("hidden", "previous_hidden"))
            expected = {
                "l2": sum((a - b) ** 2 for a, b in zip(now, before, strict=True)) ** 0.5,
                "l1": sum(abs(a - b) for a, b in zip(now, before, strict=True)),
                "cosine": 1 - now @ before / (now.norm() * before.norm()),
            }[metric]
            assert abs(scores[row, token].item() - float(expected)) < 1e-5


def test_variation_guard_turns_overflow_into_the_lowest_score() -> None:
    ctx = full()
    ctx.signals["hidden"][0, 3] = torch.inf
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
