"""Mergers and clustering against the obvious slow way: one row, one token at a time, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import exp
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, normalize

from tokenprune.components import Faults, build
from tokenprune.decision import decide, select_exactly
from tokenprune.interfaces import Merged, Merger, PruneContext, Selector
from tokenprune.policy import Policy, list_policies
from tokenprune.testing import make_context

COUNTS = (23, 9, 1, 16)
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
MERGERS: dict[str, dict[str, Any]] = {
    "nearest_mean": {"name": "nearest_mean"},
    "added": {"name": "nearest_mean", "mean": "add", "metric": "euclidean"},
    "odd": {"name": "nearest_mean", "targets": "odd", "features": "keys"},
    "even": {"name": "nearest_mean", "targets": "even", "by_size": False},
    "near": {"name": "nearest_mean", "within": 0.8, "features": "keys", "heads": "joined"},
    "ranks": {"name": "nearest_mean", "targets": {"after": 2, "until": 0.6}, "sources": {"until": 0.8}},
    "knn_weighted": {"name": "knn_weighted", "neighbours": 4},
    "knn_weighted, all": {"name": "knn_weighted", "features": "keys", "metric": "euclidean"},
    "residual": {"name": "residual"},
    "residual, weighted": {"name": "residual", "weights": "score", "reduce": "sum"},
    "recycle": {"name": "recycle", "share": 0.5, "per_cluster": 3},
    "recycle, neighbours": {"name": "recycle", "share": 0.9, "per_cluster": 2, "neighbours": 3, "metric": "cosine"},
    "rank_weighted": {"name": "rank_weighted"},
    "rank_weighted, official": {"name": "rank_weighted", "compat": "official"},
    "window_mean": {"name": "window_mean"},
    "all_of": {"name": "all_of", "mergers": [{"name": "knn_weighted", "neighbours": 3}, "residual"]},
}


def context(counts: tuple[int, ...] = COUNTS, sized: bool = True, **signals: Any) -> tuple[PruneContext, Tensor]:
    """Return a context with scores and sizes, and the states to merge; padding is large, so that a leak shows."""
    tokens = max(counts)
    ctx = make_context(len(counts), tokens, counts=counts, grid=(1, tokens // 4 + 1, 4), **signals)
    generator = torch.Generator().manual_seed(7)
    scores = torch.rand(len(counts), tokens, generator=generator).masked_fill(~ctx.valid, -torch.inf)
    sizes = torch.randint(1, 4, scores.shape, generator=generator).float() if sized else None
    hidden = torch.randn(len(counts), tokens, 16, generator=generator).masked_fill(~ctx.valid.unsqueeze(-1), 1e6)
    return replace(ctx, scores=scores, sizes=sizes), hidden


def chosen(ctx: PruneContext, share: float) -> Tensor:
    """Return [B, N] bool: a scattered part of the valid tokens, whatever their scores."""
    keep = (ctx.valid.sum(dim=1) * share).long()
    order = ctx.noise(stream=9).masked_fill(~ctx.valid, -1).argsort(dim=1, descending=True)
    return torch.zeros_like(ctx.valid).scatter(1, order, torch.arange(ctx.valid.shape[1]) < keep.unsqueeze(1))


def merged(merger: Merger, ctx: PruneContext, hidden: Tensor, kept: Tensor) -> Merged:
    made = merger.merge(hidden, kept, ctx.only(merger))
    alive, keep = ctx.valid.sum(dim=1), kept.sum(dim=1)
    assert torch.equal(made.kept.sum(dim=1), keep + merger.extra(alive, keep))
    assert not (made.kept & ~ctx.valid).any()
    return made


# ---- the slow way ----------------------------------------------------------------------------------------------------


def gaps(x: Tensor, metric: str) -> list[list[float]]:
    if metric == "cosine":
        unit = normalize(x, dim=-1)
        return (1 - unit @ unit.T).tolist()
    return ((x[:, None] - x[None]).norm(dim=-1) / x.shape[1] ** 0.5).tolist()


def ranking(scores: Tensor) -> list[int]:
    """Return the place of each token by descending score."""
    order = sorted(range(len(scores)), key=lambda i: (-scores[i].item(), i))
    return [order.index(i) for i in range(len(scores))]


def inside(ranks: Any, scores: Tensor) -> list[bool]:
    if ranks is None:
        return [True] * len(scores)
    n = len(scores)
    bounds = [
        int(v * n + 1e-9) if isinstance(v, float) else v
        for v in (ranks.after, n if ranks.until is None else ranks.until)
    ]
    return [bounds[0] <= place < bounds[1] for place in ranking(scores)]


def slow_nearest_mean(merger: Any, x: Tensor, hidden: Tensor, kept: list[bool], scores: Tensor, sizes: Tensor) -> Any:
    n = len(kept)
    parity = {"all": (0, 1), "even": (0,), "odd": (1,)}
    if isinstance(merger.targets, str):
        able = [i % 2 in parity[merger.targets] for i in range(n)]
    else:
        able = inside(merger.targets, scores)
    targets = [i for i in range(n) if kept[i] and able[i]]
    sources = inside(merger.sources, scores)
    gap, members = gaps(x, merger.metric), {i: [] for i in targets}
    for i in range(n):
        if not kept[i] and sources[i] and targets:
            to = min(targets, key=lambda j: gap[i][j])
            if merger.within is None or gap[i][to] <= merger.within:
                members[to].append(i)
    states, numbers = hidden.clone(), sizes.clone()
    for to, group in members.items():
        weight = sizes if merger.by_size else torch.ones_like(sizes)
        numbers[to] += sizes[group].sum()
        if group and merger.mean == "add":
            states[to] += (hidden[group] * weight[group, None]).sum(0) / weight[group].sum()
        elif group:
            group = [to, *group]
            states[to] = (hidden[group] * weight[group, None]).sum(0) / weight[group].sum()
    return states, list(kept), numbers


def slow_knn_weighted(merger: Any, x: Tensor, hidden: Tensor, kept: list[bool], scores: Tensor, sizes: Tensor) -> Any:
    states, gap = hidden.clone(), gaps(x, merger.metric)
    for i in range(len(kept)):
        near = sorted((j for j in range(len(kept)) if j != i), key=lambda j: gap[i][j])[: merger.neighbours]
        if kept[i]:
            states[i] += sum(scores[j] * hidden[j] for j in near)
    return states, list(kept), None


def slow_residual(merger: Any, x: Tensor, hidden: Tensor, kept: list[bool], scores: Tensor, sizes: Tensor) -> Any:
    dropped = [i for i in range(len(kept)) if not kept[i]]
    if not dropped:
        return hidden, list(kept), sizes
    weight = scores[dropped] if merger.weights == "score" else torch.ones(len(dropped)).double()
    total = (hidden[dropped] * weight[:, None]).sum(0)
    states, numbers, left = hidden.clone(), sizes.clone(), list(kept)
    states[dropped[-1]] = total / weight.sum() if merger.reduce == "mean" else total
    numbers[dropped[-1]] = sizes[dropped].sum()
    left[dropped[-1]] = True
    return states, left, numbers


def slow_density(gap: list[list[float]], able: list[int], i: int, k: int) -> float:
    near = sorted(gap[i][j] for j in able)[:k]
    return exp(-sum(g * g for g in near) / len(near))


def slow_peaks(gap: list[list[float]], able: list[int], density: dict[int, float]) -> list[int]:
    """Return the tokens by descending density x distance to a denser one."""
    most = max(gap[i][j] for i in able for j in able)
    before = lambda i: [j for j in able if (-density[j], j) < (-density[i], i)]  # noqa: E731
    worth = {i: density[i] * min((gap[i][j] for j in before(i)), default=most) for i in able}
    return sorted(able, key=lambda i: (-worth[i], i))


def slow_recycle(merger: Any, x: Tensor, hidden: Tensor, kept: list[bool], scores: Tensor, sizes: Tensor) -> Any:
    dropped = [i for i in range(len(kept)) if not kept[i]]
    states, numbers, left = hidden.clone(), sizes.clone(), list(kept)
    if not dropped:
        return states, left, numbers
    back = sorted(dropped, key=lambda i: (-scores[i].item(), i))[: int(merger.share * len(dropped) + 1e-9) + 1]
    back.sort()
    clusters = min(len(back) // merger.per_cluster + 1, len(back))
    gap, k = gaps(x, merger.metric), merger.neighbours or clusters
    density = {i: slow_density(gap, back, i, k) for i in back}
    centres = slow_peaks(gap, back, density)[:clusters]
    members = {c: [c] for c in centres}
    for i in back:
        if i not in centres:
            members[min(centres, key=lambda c: gap[i][c])].append(i)
    for centre, group in members.items():
        states[centre] = (hidden[group] * sizes[group, None]).sum(0) / sizes[group].sum()
        numbers[centre], left[centre] = sizes[group].sum(), True
    return states, left, numbers


def slow_rank_weighted(merger: Any, x: Tensor, hidden: Tensor, kept: list[bool], scores: Tensor, sizes: Tensor) -> Any:
    states, numbers, rank = hidden.clone(), sizes.clone(), ranking(scores)
    stays = [i for i in range(len(kept)) if kept[i]]
    if stays:
        last = max(stays, key=lambda i: rank[i])
        group = [last, *sorted((i for i in range(len(kept)) if not kept[i]), key=lambda i: rank[i])]
        weight = torch.arange(1, len(group) + 1).double()
        weight = weight if merger.compat == "official" else weight.flip(0)
        states[last] = (hidden[group] * weight[:, None]).sum(0) / weight.sum()
        numbers[last] = sizes[group].sum()
    return states, list(kept), numbers


def slow_window_mean(merger: Any, x: Tensor, hidden: Tensor, kept: list[bool], scores: Tensor, sizes: Tensor) -> Any:
    states, numbers = hidden.clone(), sizes.clone()
    window = [(i // 4 // merger.over.rows, i % 4 // merger.over.columns) for i in range(len(kept))]
    for i in range(len(kept)):
        group = [i] + [j for j in range(len(kept)) if window[j] == window[i] and not kept[j]]
        if kept[i]:
            states[i] = (hidden[group] * sizes[group, None]).sum(0) / sizes[group].sum()
            numbers[i] = sizes[group].sum()
    return states, list(kept), numbers


def slow_all_of(merger: Any, x: Tensor, hidden: Tensor, kept: list[bool], scores: Tensor, sizes: Tensor) -> Any:
    for part in merger.mergers:
        hidden, kept, made = SLOW[part.name](part, hidden, hidden, kept, scores, sizes)
        sizes = sizes if made is None else made
    return hidden, kept, sizes


SLOW: dict[str, Callable[..., Any]] = {
    "nearest_mean": slow_nearest_mean,
    "knn_weighted": slow_knn_weighted,
    "residual": slow_residual,
    "recycle": slow_recycle,
    "rank_weighted": slow_rank_weighted,
    "window_mean": slow_window_mean,
    "all_of": slow_all_of,
}


def features(part: Any, ctx: PruneContext, hidden: Tensor) -> Tensor:
    if getattr(part, "features", "hidden") == "hidden":
        return hidden
    return ctx.keys.mean(dim=2) if part.heads == "mean" else ctx.keys.flatten(2)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("sized", [True, False])
@pytest.mark.parametrize("data", MERGERS.values(), ids=MERGERS)
def test_mergers(data: dict[str, Any], sized: bool, share: float) -> None:
    ctx, hidden = context(sized=sized)
    merger = build("merger", data)
    kept = chosen(ctx, share)
    made = merged(merger, ctx, hidden, kept)
    x = features(merger, ctx, hidden)
    for row, n in enumerate(COUNTS):
        sizes = torch.ones(n) if ctx.sizes is None else ctx.sizes[row, :n]
        given = (item[row, :n].double() for item in (x, hidden))
        states, left, numbers = SLOW[merger.name](
            merger, *given, kept[row, :n].tolist(), ctx.scores[row, :n].double(), sizes.double()
        )
        assert made.kept[row, :n].tolist() == left
        torch.testing.assert_close(made.states[row, :n][left].double(), states[left], **CLOSE)
        if numbers is not None:
            torch.testing.assert_close(made.sizes[row, :n][left].double(), numbers[left], **CLOSE)


@pytest.mark.parametrize("data", MERGERS.values(), ids=MERGERS)
def test_a_row_alone_is_the_row_of_a_batch(data: dict[str, Any]) -> None:
    ctx, hidden = context()
    merger = build("merger", data)
    kept = chosen(ctx, 0.4)
    made = merged(merger, ctx, hidden, kept)
    for row, n in enumerate(COUNTS):
        signals = {
            name: value[row : row + 1, :n] for name, value in ctx.signals.values_by.items() if isinstance(value, Tensor)
        }
        alone = make_context(1, n, grid=(1, n // 4 + 1, 4), **signals)
        alone = replace(
            alone,
            ordinal=ctx.ordinal[row : row + 1, :n],
            scores=ctx.scores[row : row + 1, :n],
            sizes=ctx.sizes[row : row + 1, :n],
        )
        one = merged(merger, alone, hidden[row : row + 1, :n], kept[row : row + 1, :n])
        assert torch.equal(one.kept[0], made.kept[row, :n])
        torch.testing.assert_close(one.states[0][one.kept[0]], made.states[row, :n][made.kept[row, :n]])


@pytest.mark.parametrize("data", MERGERS.values(), ids=MERGERS)
def test_copies_and_equal_scores_give_finite_states(data: dict[str, Any]) -> None:
    ctx, hidden = context(keys=torch.ones(len(COUNTS), max(COUNTS), 2, 8))
    ctx = replace(ctx, scores=torch.ones_like(ctx.scores).masked_fill(~ctx.valid, -torch.inf))
    for same in (torch.ones_like(hidden), torch.zeros_like(hidden)):
        made = merged(build("merger", data), ctx, same, chosen(ctx, 0.4))
        assert made.states.isfinite().all()
        assert made.sizes is None or made.sizes.isfinite().all()


@pytest.mark.parametrize("data", MERGERS.values(), ids=MERGERS)
def test_mergers_keep_the_dtype_and_pass_gradients(data: dict[str, Any]) -> None:
    ctx, hidden = context((12, 12), sized=False)
    kept = chosen(ctx, 0.5)
    half = merged(build("merger", data), ctx, hidden.bfloat16(), kept)
    assert half.states.dtype == torch.bfloat16
    hidden.requires_grad_()
    made = merged(build("merger", data), ctx, hidden, kept)
    made.states[made.kept].sum().backward()
    dropped = hidden.grad[ctx.valid & ~kept]
    assert hidden.grad.isfinite().all() and (dropped != 0).any()  # what was dropped has a part in what is left


@pytest.mark.parametrize("name", ["residual", "recycle"])
def test_extra_tokens_append(name: str) -> None:
    ctx, hidden = context()
    kept = chosen(ctx, 0.5)
    in_order = merged(build("merger", name), ctx, hidden, kept)
    appended = merged(build("merger", {"name": name, "place": "append"}), ctx, hidden, kept)
    for row in range(len(COUNTS)):
        keep, total = int(kept[row].sum()), int(in_order.kept[row].sum())
        assert appended.kept[row].tolist() == [i < total for i in range(kept.shape[1])]
        assert torch.equal(appended.states[row, :keep], hidden[row, kept[row]])
        assert torch.equal(appended.sizes[row, :keep], ctx.sizes[row, kept[row]])
        extra = in_order.kept[row] & ~kept[row]
        for part in ("states", "sizes"):
            mine, theirs = getattr(appended, part)[row, keep:total], getattr(in_order, part)[row, extra]
            assert sorted(mine.flatten().tolist()) == sorted(theirs.flatten().tolist())


def test_window_mean_with_one_kept_each_is_average_pooling() -> None:
    ctx = make_context(2, 48, grid=(1, 6, 8))
    hidden = torch.randn(2, 48, 5)
    kept = (ctx.layout.row % 3 == 0) & (ctx.layout.column % 2 == 0)
    merger = build("merger", {"name": "window_mean", "over": {"name": "window", "rows": 3, "columns": 2}})
    made = merged(merger, ctx, hidden, kept)
    pooled = avg_pool2d(hidden.view(2, 6, 8, 5).permute(0, 3, 1, 2), (3, 2)).flatten(2).transpose(1, 2)
    torch.testing.assert_close(made.states[kept].view(2, -1, 5), pooled)
    assert (made.sizes[kept] == 6).all()


def test_mergers_act_inside_the_groups_of_a_budget() -> None:
    ctx = make_context(1, 12, grid=(3, 1, 4))
    part = Policy.load(
        {
            "stages": [
                {
                    "at": "llm.layers.1",
                    "scorer": "uniform",
                    "budget": {"keep_tokens": 1, "per": "frame"},
                    "merger": {"name": "all_of", "mergers": ["nearest_mean", "residual"]},
                }
            ]
        }
    ).stages[0]
    hidden = torch.arange(12.0).view(1, 12, 1) + 1
    made = decide(part, ctx, original=torch.tensor([12]), hidden=hidden)
    for frame in range(3):
        own = slice(4 * frame, 4 * frame + 4)
        kept = made.selected[0, own]
        assert made.sizes[0, own][kept].tolist() == [4.0]
        torch.testing.assert_close(made.states[0, own][kept][0, 0], hidden[0, own].mean())
        extra = made.kept[0, own] & ~kept
        torch.testing.assert_close(made.states[0, own][extra][0, 0], hidden[0, own][~kept].mean())


# ---- scorer and selectors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("peaks", [False, True])
@pytest.mark.parametrize("bandwidth", [None, 0.7])
@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
def test_density(metric: str, bandwidth: float | None, peaks: bool) -> None:
    ctx, _ = context()
    scorer = build(
        "scorer", {"name": "density", "metric": metric, "neighbours": 4, "bandwidth": bandwidth, "peaks": peaks}
    )
    score = ctx.score(scorer)
    for row, n in enumerate(COUNTS):
        gap, all_ = gaps(ctx.hidden[row, :n].double(), metric), list(range(n))
        if bandwidth is None:
            density = {i: slow_density(gap, all_, i, 4) for i in all_}
        else:
            density = {i: sum(exp(-((g / bandwidth) ** 2)) for g in gap[i]) for i in all_}
        if peaks:
            assert score[row].argsort(descending=True, stable=True)[:n].tolist() == slow_peaks(gap, all_, density)
        else:
            expected = torch.tensor([density[i] for i in all_])
            torch.testing.assert_close(score[row, :n], expected, **CLOSE)


def test_density_inside_groups() -> None:
    ctx = make_context(1, 12, grid=(3, 1, 4))
    whole = build("scorer", {"name": "density", "neighbours": 2, "over": "frame"})
    score = ctx.score(whole)
    for frame in range(3):
        own = slice(4 * frame, 4 * frame + 4)
        alone = make_context(1, 4, hidden=ctx.hidden[:, own])
        torch.testing.assert_close(score[:, own], alone.score(replace(whole, over=None)))


@pytest.mark.parametrize("among", [None, 0.6])
def test_density_peaks(among: float | None) -> None:
    ctx, _ = context()
    selector = build("selector", {"name": "density_peaks", "neighbours": 3, "among": among and {"until": among}})
    keep = torch.tensor([7, 4, 1, 0])
    kept = select_exactly(selector, keep, ctx)
    for row, n in enumerate(COUNTS):
        able = [i for i in range(n) if inside(selector.among, ctx.scores[row, :n])[i]]
        able = able or sorted(range(n), key=lambda i: -ctx.scores[row, i])[: int(keep[row])]
        gap = gaps(ctx.hidden[row, :n].double(), "euclidean")
        density = {i: slow_density(gap, able, i, 3) for i in able}
        assert set(kept[row].nonzero().flatten().tolist()) == set(slow_peaks(gap, able, density)[: int(keep[row])])


@pytest.mark.parametrize("cutoff", [0.0, 0.4, 1.0, 2.0])
def test_density_peaks_with_a_cutoff(cutoff: float) -> None:
    ctx, _ = context()
    data = {"name": "density_peaks", "cutoff": cutoff, "metric": "cosine", "bandwidth": 2.0, "among": {"until": 0.7}}
    selector = build("selector", data)
    assert selector.counts_itself and selector.uses_scores
    kept = select_exactly(selector, ctx.valid.sum(dim=1), ctx, exact=False)
    for row, n in enumerate(COUNTS):
        able = [i for i in range(n) if inside(selector.among, ctx.scores[row, :n])[i]]
        gap = gaps(ctx.hidden[row, :n].double(), "cosine")
        density = {i: sum(exp(-((gap[i][j] / 2) ** 2)) for j in able) for i in able}
        centres: list[int] = []
        for i in sorted(able, key=lambda i: (-density[i], i)):
            if all(gap[i][c] > cutoff for c in centres):
                centres.append(i)
        assert kept[row].nonzero().flatten().tolist() == sorted(centres)


def test_density_peaks_on_every_few_frames() -> None:
    ctx = make_context(2, 28, counts=(28, 20), grid=(7, 2, 2))
    selector = build("selector", {"name": "density_peaks", "every": 3, "neighbours": 2})

    def by_frame(keep: int) -> list[list[int]]:
        kept = select_exactly(selector, torch.tensor([keep, keep]), ctx)
        return [row.tolist() for row in kept.view(2, 7, 4).sum(dim=2)]

    assert by_frame(6) == [[2, 0, 0, 2, 0, 0, 2], [0, 3, 0, 0, 3, 0, 0]]  # the second row has five frames
    assert by_frame(7) == [[2, 0, 0, 2, 0, 0, 3], [0, 3, 0, 0, 4, 0, 0]]
    assert by_frame(14) == [[4, 0, 0, 4, 1, 1, 4], [2, 4, 2, 2, 4, 0, 0]]
    one = replace(selector, every=None)
    frame = make_context(1, 4, hidden=ctx.hidden[:1, 24:])
    alone = select_exactly(one, torch.tensor([2]), frame)
    assert torch.equal(select_exactly(selector, torch.tensor([6, 6]), ctx)[0, 24:], alone[0])


@pytest.mark.parametrize("keep", [20, 15, 12, 5, 1, 0])
@pytest.mark.parametrize(
    "options", [{}, {"sources": "odd"}, {"sources": "worse"}, {"sources": "worse", "among": {"until": 14}}]
)
def test_bipartite(options: dict[str, Any], keep: int) -> None:
    ctx, _ = context()
    selector = build("selector", {"name": "bipartite", **options})
    wanted = torch.tensor([min(keep, n) for n in COUNTS])
    kept = select_exactly(selector, wanted, ctx)
    for row, n in enumerate(COUNTS):
        assert kept[row].nonzero().flatten().tolist() == slow_bipartite(
            selector, ctx.hidden[row, :n].double(), ctx.scores[row, :n], int(wanted[row])
        )


def slow_bipartite(selector: Any, x: Tensor, scores: Tensor, keep: int) -> list[int]:
    gap, rank = gaps(x, "cosine"), ranking(scores)
    alive = [i for i in range(len(x)) if selector.among is None or rank[i] < max(selector.among.until, keep)]
    while len(alive) > keep:
        if selector.sources == "worse":
            targets = sorted(alive, key=lambda i: rank[i])[: len(alive) // 2]
        else:
            targets = alive[1::2] if selector.sources == "even" else alive[0::2]
        targets = [] if len(alive) == 1 else targets
        sources = [i for i in alive if i not in targets]
        nearest = {i: min((gap[i][j] for j in targets), default=9.0) for i in sources}
        leave = sorted(sources, key=lambda i: (nearest[i], i))[: len(alive) - keep]
        alive = [i for i in alive if i not in leave]
    return alive


def test_even_steps() -> None:
    ctx, _ = context()
    selector = build("selector", "even_steps")
    for keep in range(max(COUNTS) + 1):
        wanted = torch.tensor([min(keep, n) for n in COUNTS])
        kept = select_exactly(selector, wanted, ctx)
        for row, n in enumerate(COUNTS):
            k = int(wanted[row])
            assert kept[row].nonzero().flatten().tolist() == list(range(0, n, max(1, n // max(k, 1))))[:k]


@pytest.mark.parametrize("name", ["density_peaks", "bipartite", "even_steps"])
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_selectors_on_copies_keep_what_was_asked(name: str, value: float) -> None:
    ctx = make_context(len(COUNTS), max(COUNTS), counts=COUNTS, hidden=torch.full((len(COUNTS), max(COUNTS), 8), value))
    selector: Selector = build("selector", name)
    for keep in range(max(COUNTS) + 1):
        wanted = torch.tensor([min(keep, n) for n in COUNTS])
        assert torch.equal(select_exactly(selector, wanted, ctx).sum(dim=1), wanted)


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("merger", {"name": "nearest_mean", "within": -0.1}),
        ("merger", {"name": "nearest_mean", "targets": "some"}),
        ("merger", {"name": "nearest_mean", "targets": {"until": 1.5}}),
        ("merger", {"name": "nearest_mean", "targets": {"after": -1}}),
        ("merger", {"name": "knn_weighted", "neighbours": 0}),
        ("merger", {"name": "recycle", "share": 1.2}),
        ("merger", {"name": "recycle", "per_cluster": "10"}),
        ("merger", {"name": "residual", "reduce": "max"}),
        ("merger", {"name": "all_of", "mergers": []}),
        ("merger", {"name": "all_of", "mergers": [{"name": "residual", "place": "append"}, "nearest_mean"]}),
        ("selector", {"name": "density_peaks", "cutoff": -1.0}),
        ("selector", {"name": "density_peaks", "cutoff": 0.2, "every": 2}),
        ("selector", {"name": "density_peaks", "bandwidth": 0.0}),
        ("selector", {"name": "bipartite", "from": "nowhere"}),
        ("scorer", {"name": "density", "neighbours": 0}),
    ],
)
def test_what_is_refused(kind: str, data: dict[str, Any]) -> None:
    with pytest.raises(Faults):
        build(kind, data)


@pytest.mark.parametrize("method", ["visionzip", "prumerge", "tome", "trim", "pact", "gprune"])
def test_policies_load(method: str) -> None:
    names = [info.name for info in list_policies() if info.path.parent.name == method]
    assert names
    for name in names:
        policy = Policy.load(name)
        assert policy.summary and policy.paper
        assert Policy.load(policy.to_dict()) == policy
