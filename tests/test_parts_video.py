"""Parts for clips, against the obvious slow way, on rows of different length from which tokens have left already."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from tokenprune.components import build
from tokenprune.groupings import Frame, Image
from tokenprune.interfaces import Layout, PruneContext
from tokenprune.testing import Signals
from tokenprune.tokens import Signal

HIDDEN, LAYOUT = Signal("hidden"), Signal("layout")
ROWS = 4


def clips(seed: int, width: int = 6, alike: float = 0.5) -> PruneContext:
    """Return rows of a 5 x 2 x 3 clip and a 3 x 2 x 2 one, some of whose tokens have left; the last row has none at all."""
    generator = torch.Generator().manual_seed(seed)
    cells = [(0, f, r, c) for f in range(5) for r in range(2) for c in range(3)]
    cells += [(1, f, r, c) for f in range(3) for r in range(2) for c in range(2)]
    at = torch.tensor(cells)
    size = torch.tensor([(5, 2, 3), (3, 2, 2)])[at[:, 0]]
    still = torch.randn(2, 2, 3, width, generator=generator)
    states = alike * torch.randn(len(cells), width, generator=generator) + still[at[:, 0], at[:, 2], at[:, 3]]
    rows = [(torch.rand(len(cells), generator=generator) > 0.2 * row).nonzero().flatten() for row in range(ROWS - 1)]
    rows.append(torch.empty(0, dtype=torch.int64))
    ordinal = torch.zeros(ROWS, len(cells), dtype=torch.int64)
    valid = torch.zeros_like(ordinal, dtype=torch.bool)
    for number, row in enumerate(rows):
        ordinal[number, : len(row)] = row
        valid[number, : len(row)] = True
    grid = [at[ordinal, i] for i in range(4)] + [size[ordinal, i] for i in range(3)]
    layout = Layout(*grid, video=torch.ones_like(valid))
    hidden = states[ordinal].masked_fill(~valid.unsqueeze(-1), 99.0)
    sizes = torch.randint(1, 4, ordinal.shape, generator=generator).float()
    scores = torch.rand(ordinal.shape, generator=generator).masked_fill(~valid, -torch.inf)
    return PruneContext(
        valid, ordinal, signals=Signals({"hidden": hidden, "layout": layout}), sizes=sizes, scores=scores
    )


def alone(ctx: PruneContext, row: int) -> PruneContext:
    """Return one row without its padding."""
    cut = lambda x: x[row : row + 1, ctx.valid[row]]  # noqa: E731
    signals = Signals({"hidden": cut(ctx.read(HIDDEN)), "layout": ctx.read(LAYOUT).map(cut)})
    assert ctx.sizes is not None and ctx.scores is not None
    return replace(
        ctx,
        valid=cut(ctx.valid),
        ordinal=cut(ctx.ordinal),
        signals=signals,
        sizes=cut(ctx.sizes),
        scores=cut(ctx.scores),
    )


def cells(ctx: PruneContext, row: int) -> list[tuple[int, int, int, int]]:
    """Return (image, frame, row, column) of the tokens of a row."""
    at, n = ctx.read(LAYOUT), int(ctx.valid[row].sum())
    return list(zip(*(x[row, :n].tolist() for x in (at.image, at.frame, at.row, at.column)), strict=True))


def vectors(ctx: PruneContext, row: int) -> Tensor:
    return ctx.read(HIDDEN)[row, ctx.valid[row]].double()


def cosine(x: Tensor, i: int, j: int) -> float:
    return float(normalize(x[i], dim=0) @ normalize(x[j], dim=0))


def before(places: list[tuple[int, int, int, int]], i: int, lag: int = 1) -> int | None:
    """Return which token was the last at the position of token i."""
    image, frame, r, c = places[i]
    earlier = sorted((p[1], j) for j, p in enumerate(places) if (p[0], p[2], p[3]) == (image, r, c) and p[1] < frame)
    return earlier[-lag][1] if len(earlier) >= lag else None


def partition(labels: Tensor, n: int) -> list[int]:
    """Return the labels of a row, numbered in the order they come up."""
    seen: dict[int, int] = {}
    return [seen.setdefault(label, len(seen)) for label in labels[:n].tolist()]


# ---- temporal_similarity ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("reference", "lag"), [("previous", 1), ("previous", 2), ("first", 1), ("pairs", 1)], ids=lambda x: str(x)
)
def test_similarity_to_an_earlier_token(seed: int, reference: str, lag: int) -> None:
    ctx = clips(seed)
    options: dict[str, Any] = {"name": "temporal_similarity", "reference": reference, "lag": lag, "first": 7.0}
    scores = ctx.score(build("scorer", options))
    similar = ctx.score(build("scorer", {**options, "keep": "similar"}))
    for row in range(ROWS):
        places, x = cells(ctx, row), vectors(ctx, row)
        for i, (image, frame, r, c) in enumerate(places):
            if reference == "previous":
                other = before(places, i, lag)
            else:
                target = {0: None, 1: 0, 2: 0, 3: 2 if reference == "pairs" else 0}[frame % 4]
                wanted = (image, frame - frame % 4 + (target or 0), r, c)
                other = places.index(wanted) if target is not None and wanted in places else None
            expected = 7.0 if other is None else 1 - cosine(x, i, other)
            assert scores[row, i] == pytest.approx(expected, abs=1e-5)
            assert similar[row, i] == pytest.approx(-7.0 if other is None else 1 - expected, abs=1e-5)


def test_the_accidents_of_dycoke() -> None:
    ctx = clips(0)
    at = ctx.read(LAYOUT)
    clean, official = (
        ctx.score(build("scorer", {"name": "temporal_similarity", "reference": "pairs", "compat": compat}))
        for compat in ("clean", "official")
    )
    # Clips of 5 and 3 frames: the last frame is lost, and frame 2 has a reference in the clip of 5 only.
    lost = ctx.valid & (at.frame == at.frames - 1)
    whole = ctx.valid & (at.frame == 2) & (at.frames == 3) & ~lost
    assert lost.any() and (official[lost] == -255).all() and (official[whole] == 255).all()
    assert torch.equal(official[ctx.valid & ~lost & ~whole], clean[ctx.valid & ~lost & ~whole])


def test_mean_score() -> None:
    ctx = clips(1)
    scorer = {"name": "temporal_similarity", "first": 5.0}
    mean = build("statistic", {"name": "mean_score", "scorer": scorer}).compute(ctx)
    share = build("statistic", {"name": "mean_score", "scorer": scorer, "above": 4.0}).compute(ctx)
    for row in range(ROWS):
        scores = ctx.score(build("scorer", scorer))[row, ctx.valid[row]].double()
        assert mean[row] == pytest.approx(float(scores.mean()) if len(scores) else 0.0, rel=1e-6)
        assert share[row] == pytest.approx(float((scores > 4).double().mean()) if len(scores) else 0.0)


# ---- segments --------------------------------------------------------------------------------------------------------


def scenes(ctx: PruneContext, row: int, cut: Any) -> list[int]:
    """Return the segment of each token of a row, given a function from a clip's frames [F, tokens] to its segments."""
    places, found = cells(ctx, row), []
    for image in (0, 1):
        frames = sorted({p[1] for p in places if p[0] == image})
        inside = [[i for i, p in enumerate(places) if p[0] == image and p[1] == frame] for frame in frames]
        segment = dict(zip(frames, cut(inside) if inside else [], strict=True))
        found += [(image, segment[p[1]]) for p in places if p[0] == image]
    return [sorted(set(found)).index(label) for label in found]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("count", "threshold"), [(1, 0.8), (3, -1.0), (2, 0.7), (99, -1.0)])
def test_segments_by_cuts(seed: int, count: int, threshold: float) -> None:
    ctx = clips(seed, alike=2.0)
    labels = build("grouping", {"name": "segments", "count": count, "threshold": threshold}).labels(ctx)
    for row in range(ROWS):
        x = vectors(ctx, row)

        def cut(frames: list[list[int]], x: Tensor = x) -> list[int]:
            mean = torch.stack([x[frame].mean(dim=0) for frame in frames])
            similar = [cosine(mean, f, f + 1) for f in range(len(frames) - 1)]
            lowest = sorted(range(len(similar)), key=lambda f: similar[f])[: count - 1]
            cuts = [f in lowest or similar[f] < threshold for f in range(len(similar))]
            return [sum(cuts[:f]) for f in range(len(frames))]

        assert partition(labels[row], len(x)) == scenes(ctx, row, cut)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("threshold", [0.7, 0.9])
def test_segments_with_most_static_tokens(seed: int, threshold: float) -> None:
    ctx = clips(seed, alike=0.4)
    labels = build("grouping", {"name": "segments", "by": "static", "threshold": threshold}).labels(ctx)
    for row in range(ROWS):
        places, x = cells(ctx, row), vectors(ctx, row)
        for image in sorted({place[0] for place in places}):
            numbers = sorted({place[1] for place in places if place[0] == image})
            frames = [[i for i, place in enumerate(places) if place[:2] == (image, number)] for number in numbers]
            same = [_static(places, x, frames, f, threshold) for f in range(len(frames))]
            every = [c for k in range(len(frames)) for c in combinations(range(1, len(frames)), k)]
            mine = [int(labels[row, frame[0]]) for frame in frames]
            cuts = tuple(f for f in range(1, len(mine)) if mine[f] != mine[f - 1])
            most = max(_gain(same, c) for c in every)
            assert _gain(same, cuts) == most
            assert len(cuts) == min(len(c) for c in every if _gain(same, c) == most)
            assert all(len({int(labels[row, i]) for i in frame}) == 1 for frame in frames)


def _static(places: list[Any], x: Tensor, frames: list[list[int]], f: int, threshold: float) -> set[Any]:
    """Return the positions of a frame whose token is like that of the frame before."""
    by_position = {places[i][2:]: i for i in frames[f - 1]} if f else {}
    pairs = [(places[i][2:], i, by_position.get(places[i][2:])) for i in frames[f]]
    return {at for at, i, j in pairs if j is not None and cosine(x, i, j) >= threshold}


def _gain(same: list[set[Any]], cuts: tuple[int, ...]) -> int:
    """Return the sum over segments of static positions x (frames - 1)."""
    inner = [same[a + 1 : b] for a, b in pairwise((0, *cuts, len(same)))]
    return sum(len(set.intersection(*sets)) * len(sets) for sets in inner if sets)


def test_segments_by_density_peaks() -> None:
    """Scenes made of far apart frames are found, and a single frame that returns to an earlier one joins its neighbour."""
    pattern = [0, 0, 0, 0, 1, 1, 0, 1, 1, 2, 2, 2]
    states = torch.eye(3)[pattern] * 10 + 0.01 * torch.arange(12.0).unsqueeze(1)
    at = torch.arange(12).unsqueeze(0)
    zero, one = torch.zeros_like(at), torch.ones_like(at)
    layout = Layout(zero, at, zero, zero, 12 * one, one, one, video=one.bool())
    ctx = PruneContext(one.bool(), at, signals=Signals({"hidden": states.unsqueeze(0), "layout": layout}))
    labels = build("grouping", {"name": "segments", "by": "peaks", "share": 0.25, "neighbours": 3}).labels(ctx)
    # Cluster 1 has two runs of two frames, so both stay; the single 0 between them joins the first.
    assert labels.tolist() == [[0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 3]]


@pytest.mark.parametrize(
    ("owner", "segments"),
    [
        ([1, 2, 3], [3]),
        ([1], [1]),
        ([1, 1, 2, 3, 3, 3], [2, 4]),
        ([1, 1, 1, 2, 1, 3, 3], [5, 2]),
        ([4, 1, 1, 4, 4, 4], [3, 3]),
    ],
)
def test_runs_of_clusters_become_segments(owner: list[int], segments: list[int]) -> None:
    from tokenprune_scorers.segments import _joined

    labels = _joined(owner)
    assert [labels.count(number) for number in sorted(set(labels))] == segments and labels == sorted(labels)


# ---- runs and static -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("alike", ["adjacent", "all", "mean"])
@pytest.mark.parametrize("within", [None, "frame_group"])
def test_runs(seed: int, alike: str, within: str | None) -> None:
    ctx = clips(seed)
    grouping = {"name": "frame_group", "frames": 2} if within else None
    selector = build("selector", {"name": "runs", "alike": alike, "threshold": 0.8, "within": grouping})
    kept = selector.select(ctx.scores, ctx.valid.sum(dim=1), ctx)
    assert not (kept & ~ctx.valid).any()
    for row in range(ROWS):
        places, x = cells(ctx, row), vectors(ctx, row)
        positions: dict[Any, list[int]] = {}
        for i, (image, frame, r, c) in enumerate(places):
            positions.setdefault((image, frame // 2 if within else 0, r, c), []).append(i)
        expected = set()
        for run in positions.values():
            steps = [cosine(x, i, j) >= 0.8 for i, j in pairwise(run)]
            pairs = [cosine(x, i, j) for i, j in combinations(run, 2)]
            if alike == "adjacent":
                expected |= {i for i, same in zip(run[1:], steps, strict=True) if same}
            elif all(steps) if alike == "all" else pairs and sum(pairs) / len(pairs) >= 0.8:
                expected |= set(run[1:])
        assert set(range(len(places))) - set(kept[row].nonzero().flatten().tolist()) == expected


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 1.0])
def test_runs_stop_at_a_share(share: float) -> None:
    ctx = clips(2)
    free = build("selector", {"name": "runs", "threshold": 0.5})
    bound = build("selector", {"name": "runs", "threshold": 0.5, "at_most": share})
    every, some = (s.select(ctx.scores, ctx.valid.sum(dim=1), ctx) for s in (free, bound))
    for row in range(ROWS):
        places, x = cells(ctx, row), vectors(ctx, row)
        leave = [i for i in range(len(places)) if not every[row, i]]
        by_likeness = sorted(leave, key=lambda i: -cosine(x, i, before(places, i) or 0))
        most = int(len(places) * share + 1e-9)
        assert {i for i in range(len(places)) if not some[row, i]} == set(by_likeness[:most])


def test_static_parts_frames_by_size() -> None:
    ctx = clips(3)
    labels = build("grouping", "static").labels(ctx)
    assert ctx.sizes is not None
    for row in range(ROWS):
        n = int(ctx.valid[row].sum())
        keys = [(p[0], p[1], bool(ctx.sizes[row, i] > 1)) for i, p in enumerate(cells(ctx, row))]
        assert partition(labels[row], n) == [list(dict.fromkeys(keys)).index(key) for key in keys]
    frames = build("grouping", "static").labels(replace(ctx, sizes=None))
    assert torch.equal(frames[ctx.valid], Frame().labels(ctx)[ctx.valid])


# ---- mergers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("weighted", [False, True])
def test_temporal_mean(seed: int, weighted: bool) -> None:
    ctx = clips(seed)
    kept = ctx.valid & (torch.rand(ctx.valid.shape, generator=torch.Generator().manual_seed(seed)) > 0.5)
    merged = build("merger", {"name": "temporal_mean", "weighted": weighted}).merge(ctx.read(HIDDEN), kept, ctx)
    assert torch.equal(merged.kept, kept) and merged.sizes is not None and ctx.sizes is not None
    for row in range(ROWS):
        places, x = cells(ctx, row), vectors(ctx, row)
        runs: dict[int, list[int]] = {i: [i] for i in range(len(places)) if kept[row, i]}
        for i in range(len(places)):
            j: int | None = i
            while j is not None and j not in runs:
                j = before(places, j)
            if j is not None and i != j:
                runs[j].append(i)
        for i, run in runs.items():
            size = ctx.sizes[row, run].double()
            weight = size if weighted else torch.ones_like(size)
            expected = (x[run] * weight.unsqueeze(1)).sum(dim=0) / weight.sum()
            torch.testing.assert_close(merged.states[row, i].double(), expected, rtol=1e-5, atol=1e-6)
            assert merged.sizes[row, i] == size.sum()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("spared", [0, 2])
@pytest.mark.parametrize("each", [None, "frame"])
@pytest.mark.parametrize("beta", [0.0, 0.6])
def test_blend_to_nearest(seed: int, spared: int, each: str | None, beta: float) -> None:
    ctx = clips(seed)
    among = {"among": {"after": spared}, "over": "frame"} if spared else {}
    merger = build("merger", {"name": "blend_to_nearest", "beta": beta, "each": each, **among})
    kept = ctx.valid & (torch.rand(ctx.valid.shape, generator=torch.Generator().manual_seed(seed)) > 0.6)
    merged = merger.merge(ctx.read(HIDDEN), kept, ctx)
    assert torch.equal(merged.kept, kept) and merged.sizes is not None and ctx.sizes is not None
    for row in range(ROWS):
        places, x = cells(ctx, row), vectors(ctx, row)
        frames: dict[Any, list[int]] = {}
        for i, place in enumerate(places):
            frames.setdefault(place[:2], []).append(i)
        scores = ctx.scores[row]  # type: ignore[index]
        best = {i for frame in frames.values() for i in sorted(frame, key=lambda i: -float(scores[i]))[:spared]}
        pool = [i for i in range(len(places)) if i not in best]
        anchors = [i for i in pool if kept[row, i]]
        turns: dict[Any, list[int]] = {}
        for a in anchors:
            turns.setdefault(places[a][:2] if each else 0, []).append(a)
        total = 0.0
        for mine in turns.values():
            owner = {i: i if i in mine else max(mine, key=lambda a: cosine(x, i, a)) for i in pool}
            for a in mine:
                group = [i for i in pool if owner[i] == a]
                weight = max(1 / (len(group) + 1), beta)
                expected = weight * x[a] + (1 - weight) * x[group].mean(dim=0)
                torch.testing.assert_close(merged.states[row, a].double(), expected, rtol=1e-5, atol=1e-5)
                total += float(merged.sizes[row, a])
        if anchors:
            assert total == pytest.approx(float(ctx.sizes[row, pool].sum()), rel=1e-5)
        for i in set(range(len(places))) - set(anchors):
            assert torch.equal(merged.states[row, i], ctx.read(HIDDEN)[row, i])


# ---- all of them -----------------------------------------------------------------------------------------------------

PARTS: list[tuple[str, dict[str, Any]]] = [
    ("scorer", {"name": "temporal_similarity", "reference": "pairs"}),
    ("scorer", {"name": "temporal_similarity", "lag": 2}),
    ("statistic", {"name": "mean_score", "scorer": "temporal_similarity"}),
    ("grouping", {"name": "segments", "by": "cuts", "count": 2}),
    ("grouping", {"name": "segments", "by": "peaks", "share": 0.5, "neighbours": 2}),
    ("grouping", {"name": "segments", "by": "static"}),
    ("grouping", {"name": "static"}),
    ("selector", {"name": "runs", "at_most": 0.2}),
    ("selector", {"name": "runs", "alike": "mean", "within": {"name": "segments", "count": 2}}),
    ("merger", {"name": "temporal_mean", "weighted": True}),
    ("merger", {"name": "blend_to_nearest", "each": "frame"}),
]


def outcome(kind: str, part: Any, ctx: PruneContext) -> Tensor:
    """Return what a part makes of a context, a number per token or per row."""
    if kind == "scorer":
        return part.score(ctx)
    if kind == "statistic":
        return part.compute(ctx).unsqueeze(1)
    if kind == "grouping":
        return part.labels(ctx)
    if kind == "selector":
        return part.select(ctx.scores, ctx.valid.sum(dim=1), ctx)
    assert ctx.scores is not None
    return part.merge(ctx.read(HIDDEN), ctx.valid & (ctx.scores > 0.6), ctx).states


@pytest.mark.parametrize(("kind", "options"), PARTS, ids=lambda x: x if isinstance(x, str) else x["name"])
def test_a_row_is_the_same_alone(kind: str, options: dict[str, Any]) -> None:
    ctx, part = clips(5), build(kind, options)
    together = outcome(kind, part, ctx)
    for row in range(ROWS):
        own, n = outcome(kind, part, alone(ctx, row)), int(ctx.valid[row].sum())
        if kind == "grouping":
            assert partition(own[0], n) == partition(together[row], n)
        elif kind == "statistic":
            torch.testing.assert_close(own[0], together[row])
        else:
            assert torch.equal(own[0], together[row, :n])


@pytest.mark.parametrize(("kind", "options"), PARTS, ids=lambda x: x if isinstance(x, str) else x["name"])
def test_equal_tokens_and_half_precision(kind: str, options: dict[str, Any]) -> None:
    ctx = clips(6)
    part = build(kind, options)
    for states in (torch.ones_like(ctx.read(HIDDEN)), torch.zeros_like(ctx.read(HIDDEN)), ctx.read(HIDDEN).bfloat16()):
        same = replace(ctx, signals=Signals({"hidden": states, "layout": ctx.read(LAYOUT)}))
        made = outcome(kind, part, same)
        assert made.isfinite().all()
        if kind == "merger":
            assert made.dtype == states.dtype
    image = replace(ctx, signals=Signals({"hidden": ctx.read(HIDDEN), "layout": ctx.read(LAYOUT)}))
    assert torch.equal(outcome(kind, part, image), outcome(kind, part, ctx))


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("scorer", {"name": "temporal_similarity", "reference": "first", "lag": 2}, "lag counts from"),
        ("scorer", {"name": "temporal_similarity", "compat": "official"}, "concerns reference 'pairs'"),
        ("selector", {"name": "runs", "at_most": 1.5}, "at_most is a share"),
        ("selector", {"name": "runs", "alike": "all", "at_most": 0.5}, "goes with alike 'adjacent'"),
        ("merger", {"name": "blend_to_nearest", "over": "frame"}, "over says where"),
    ],
)
def test_options_that_make_no_sense(kind: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(kind, options)


def test_an_image_is_one_segment() -> None:
    ctx = clips(0)
    at = ctx.read(LAYOUT)
    still = replace(at, frame=torch.zeros_like(at.frame), frames=torch.ones_like(at.frames))
    ctx = replace(ctx, signals=Signals({"hidden": ctx.read(HIDDEN), "layout": still}))
    for by in ("cuts", "peaks", "static"):
        labels = build("grouping", {"name": "segments", "by": by}).labels(ctx)
        for row in range(ROWS):
            n = int(ctx.valid[row].sum())
            assert partition(labels[row], n) == partition(Image().labels(ctx)[row], n)
