"""Every registered selector keeps exactly what was asked, per row, whatever the batch."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from test_scorers import one_row
from torch import Tensor

from tokenprune.decision import select_exactly
from tokenprune.interfaces import PruneContext, Selector
from tokenprune.plugins import registry
from tokenprune.selectors import GumbelTopK, Stride, TopK
from tokenprune.testing import make_context

SELECTORS = sorted(registry().of("selector"))


def make(name: str) -> Selector:
    selector: Selector = registry().of("selector")[name].cls.example()
    return selector


def scored(counts: tuple[int, ...], seed: int = 0, ties: bool = False) -> tuple[Tensor, PruneContext]:
    ctx = make_context(
        len(counts), max(counts), counts=counts, seed=seed, grid=(1, 4, 5) if max(counts) == 20 else None
    )
    scores = torch.randn(ctx.valid.shape, generator=torch.Generator().manual_seed(seed))
    if ties:
        scores = (scores * 2).round()
    scores = scores.masked_fill(~ctx.valid, -torch.inf)
    return scores, replace(ctx, scores=scores)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", SELECTORS)
def test_keeps_exactly_the_count_and_never_padding(name: str, seed: int) -> None:
    """Through the door every selector goes: one that counts itself is topped up or trimmed to the budget."""
    rng = random.Random(seed)
    counts = (*(rng.randint(0, 20) for _ in range(4)), 20)
    _, ctx = scored(counts, seed, ties=seed % 2 == 0)
    keep = torch.tensor([rng.randint(0, n) for n in counts])
    kept = select_exactly(make(name), keep, ctx)
    assert kept.dtype == torch.bool and kept.shape == ctx.valid.shape
    assert torch.equal(kept.sum(1), keep)
    assert not (kept & ~ctx.valid).any()


@pytest.mark.parametrize("name", SELECTORS)
def test_keep_none_and_keep_all(name: str) -> None:
    _, ctx = scored((7, 20))
    assert not select_exactly(make(name), torch.tensor([0, 0]), ctx).any()
    assert torch.equal(select_exactly(make(name), torch.tensor([7, 20]), ctx), ctx.valid)


@pytest.mark.parametrize("name", SELECTORS)
def test_a_row_alone_equals_the_row_in_a_batch(name: str) -> None:
    counts = (9, 20, 3)
    scores, ctx = scored(counts)
    keep = torch.tensor([4, 11, 2])
    together = make(name).select(scores, keep, ctx)
    for row, n in enumerate(counts):
        alone = replace(one_row(ctx, row, n), scores=scores[row : row + 1, :n])
        got = make(name).select(scores[row : row + 1, :n], keep[row : row + 1], alone)
        assert torch.equal(got[0], together[row, :n])


@pytest.mark.parametrize("name", SELECTORS)
def test_is_deterministic(name: str) -> None:
    scores, ctx = scored((20, 20))
    keep = torch.tensor([5, 9])
    assert torch.equal(make(name).select(scores, keep, ctx), make(name).select(scores, keep, ctx))


@pytest.mark.parametrize("seed", range(6))
def test_topk_equals_a_stable_python_sort_ties_to_the_lower_index(seed: int) -> None:
    scores, ctx = scored((20, 13), seed, ties=True)
    keep = torch.tensor([8, 5])
    kept = TopK().select(scores, keep, ctx)
    for row in range(2):
        order = sorted(range(20), key=lambda i: (-scores[row, i].item(), i))
        assert kept[row].nonzero().flatten().tolist() == sorted(order[: int(keep[row])])


def test_gumbel_temperature_0_is_topk_bit_for_bit() -> None:
    for seed in range(8):
        scores, ctx = scored((20, 13), seed, ties=True)
        keep = torch.tensor([8, 5])
        assert torch.equal(GumbelTopK(0.0).select(scores, keep, ctx), TopK().select(scores, keep, ctx))


def test_gumbel_goes_to_topk_as_temperature_goes_to_0() -> None:
    scores, ctx = scored((20, 13))
    keep = torch.tensor([8, 5])
    assert torch.equal(GumbelTopK(1e-6).select(scores, keep, ctx), TopK().select(scores, keep, ctx))
    assert not torch.equal(GumbelTopK(5.0).select(scores, keep, ctx), TopK().select(scores, keep, ctx))


def test_gumbel_first_choice_follows_softmax_of_standardised_scores() -> None:
    """3,000 seeds against probabilities computed in plain Python float64."""
    scores, _ = scored((6,))
    temperature, draws = 0.7, 3000
    z = (scores[0].double() - scores[0].double().mean()) / scores[0].double().std(unbiased=False)
    expected = (z / temperature).softmax(0)
    ctx = [PruneContext(torch.ones(1, 6, dtype=torch.bool), torch.arange(6)[None], seed=s) for s in range(draws)]
    seen = Counter(int(GumbelTopK(temperature).select(scores, torch.tensor([1]), one)[0].nonzero()) for one in ctx)
    for token, probability in enumerate(expected.tolist()):
        deviation = (probability * (1 - probability) / draws) ** 0.5
        assert abs(seen[token] / draws - probability) < 5 * deviation


def test_gumbel_does_not_care_about_scale_and_offset_of_scores() -> None:
    scores, ctx = scored((20, 13))
    keep = torch.tensor([8, 5])
    chosen = GumbelTopK(0.8).select(scores, keep, ctx)
    assert torch.equal(GumbelTopK(0.8).select(scores * 1024, keep, ctx), chosen)


def test_gumbel_on_constant_scores_is_finite_and_random() -> None:
    _, ctx = scored((20, 20))
    kept = GumbelTopK(1.0).select(torch.zeros(2, 20), torch.tensor([5, 5]), ctx)
    assert torch.equal(kept.sum(1), torch.tensor([5, 5]))
    assert kept[0].nonzero().flatten().tolist() != [0, 1, 2, 3, 4]


@pytest.mark.parametrize("n", [1, 2, 7, 20])
def test_stride_positions(n: int) -> None:
    ctx = make_context(1, 20, counts=(n,))
    for k in range(n + 1):
        kept = Stride().select(torch.zeros(1, 20), torch.tensor([k]), ctx)
        assert kept[0].nonzero().flatten().tolist() == [(2 * i + 1) * n // (2 * k) for i in range(k)]


def test_noise_is_uniform_and_differs_by_seed_salt_and_stream() -> None:
    ordinal = torch.arange(20_000)[None]
    contexts = [PruneContext(ordinal >= 0, ordinal, seed=s, salt=t) for s, t in ((0, 0), (1, 0), (0, 1))]
    noises = [ctx.noise(stream) for ctx in contexts for stream in (0, 1)]
    for noise in noises:
        assert noise.min() > 0 and noise.max() < 1
        assert abs(noise.mean() - 0.5) < 0.01 and abs(noise.var() - 1 / 12) < 0.003
        histogram = torch.histc(noise, 20, 0, 1) / 1000
        assert (histogram - 1).abs().max() < 0.15
    correlations = torch.corrcoef(torch.cat(noises)).fill_diagonal_(0).abs()
    assert correlations.max() < 0.03
