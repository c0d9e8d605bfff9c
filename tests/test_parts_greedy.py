"""Greedy selectors against the obvious slow way: one row, one token at a time, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from tokenprune_scorers import _greedy
from tokenprune_scorers._greedy import Greedy
from tokenprune_scorers.greedy_nms import GreedyNMS
from torch import Tensor

from tokenprune.components import Faults, build, plain
from tokenprune.decision import decide
from tokenprune.interfaces import GivenAttention, PruneContext, Quantity, Selector, Statistic
from tokenprune.policy import Policy
from tokenprune.testing import Signals, make_context
from tokenprune.tokens import Signal, Site

Slow = Callable[[Tensor, Tensor, int], list[int]]
"""From features [n, D] and scores [n], both float64, and a number to the picks in order."""


def cosines(x: Tensor) -> Tensor:
    unit = x / x.norm(dim=1, keepdim=True)
    return (unit @ unit.T).round(decimals=12)  # the same both ways, and 1 to itself


def by_score(scores: Tensor) -> list[int]:
    return sorted(range(len(scores)), key=lambda i: (-scores[i].item(), i))


def best(tokens: Any, worth: Callable[[int], float]) -> int:
    return max(tokens, key=lambda i: (worth(i), -i))


def slow_nms(
    radius: float, grow: bool = False, cap: float | None = None, metric: str = "cosine", centre: bool = False
) -> Slow:
    def pick(x: Tensor, scores: Tensor, k: int) -> list[int]:
        x = x - x.mean(dim=0) if centre else x
        distance = torch.cdist(x, x) if metric == "euclidean" else 1 - cosines(x)
        kept: list[int] = []
        out: set[int] = set()
        for rank, i in enumerate(by_score(scores), start=1):
            own = radius * rank if grow else radius
            own = own if cap is None else min(own, cap)
            if i in out or len(kept) == k:
                continue
            kept.append(i)
            near = 1 - distance[i] > own if metric == "similarity" else distance[i] < own
            out |= set(near.nonzero().flatten().tolist())
        return kept + [i for i in by_score(scores) if i not in kept][: k - len(kept)]

    return pick


def slow_farthest(metric: str = "cosine") -> Slow:
    def pick(x: Tensor, scores: Tensor, k: int) -> list[int]:
        distance = torch.cdist(x, x) if metric == "euclidean" else 1 - cosines(x)
        kept: list[int] = []
        for _ in range(k):
            to = kept or range(len(x))
            left = [i for i in range(len(x)) if i not in kept]
            kept.append(best(left, lambda i: min([distance[i, j].item() for j in to if j != i], default=0.0)))  # noqa: B023
        return kept

    return pick


def slow_dpp(x: Tensor, scores: Tensor, k: int) -> list[int]:
    quality = (
        (scores - scores.min() + 1e-6) / (scores.max() - scores.min())
        if scores.max() > scores.min()
        else scores * 0 + 1
    )
    kernel = quality[:, None] * cosines(x) * quality
    kept: list[int] = []
    for _ in range(k):
        left = [i for i in range(len(x)) if i not in kept]
        kept.append(best(left, lambda i: torch.linalg.det(kernel[[*kept, i]][:, [*kept, i]]).item()))
    return kept


def slow_facility(power: float = 1.0, add: bool = False) -> Slow:
    def pick(x: Tensor, scores: Tensor, k: int) -> list[int]:
        cosine, factor = cosines(x), scores.clamp(min=0).pow(power)
        kept: list[int] = []
        for _ in range(k):
            covered = cosine[:, kept].clamp(min=0).amax(dim=1) if kept else torch.zeros(len(x), dtype=x.dtype)

            def gain(i: int) -> float:
                more = (cosine[:, i] - covered).clamp(min=0).sum()  # noqa: B023
                return (more + factor[i] if add else more * factor[i]).item()

            kept.append(best([i for i in range(len(x)) if i not in kept], gain))
        return kept

    return pick


def slow_mmr(weight: float) -> Slow:
    def pick(x: Tensor, scores: Tensor, k: int) -> list[int]:
        cosine = cosines(x)
        span = scores.max() - scores.min()
        scores = (scores - scores.min()) / span if span > 0 else scores * 0
        kept = by_score(scores)[:1][:k]
        while len(kept) < k:
            left = [i for i in range(len(x)) if i not in kept]
            kept.append(best(left, lambda i: weight * scores[i].item() - (1 - weight) * cosine[i, kept].max().item()))
        return kept

    return pick


def slow_bipartite(step: int) -> Slow:
    def pick(x: Tensor, scores: Tensor, k: int) -> list[int]:
        cosine, listed = cosines(x), by_score(scores)
        while len(listed) > k:
            even, odd = listed[0::2], listed[1::2]
            nearest = {i: max([cosine[i, j].item() for j in odd], default=-1.0) for i in even}
            even.sort(key=lambda i: -nearest[i])
            listed = even[min(step, len(listed) - k, len(even)) :] + odd
        return listed

    return pick


CASES: dict[str, tuple[Any, Slow]] = {
    "nms": ({"name": "greedy_nms", "radius": 0.4}, slow_nms(0.4)),
    "nms by rank": (
        {"name": "greedy_nms", "radius": 0.1, "grow_with_rank": True, "max_radius": 0.7},
        slow_nms(0.1, grow=True, cap=0.7),
    ),
    "nms of all": ({"name": "greedy_nms", "radius": 9}, slow_nms(9.0)),
    "nms euclidean": ({"name": "greedy_nms", "radius": 3.0, "metric": "euclidean"}, slow_nms(3.0, metric="euclidean")),
    "nms similarity": (
        {"name": "greedy_nms", "radius": 0.3, "metric": "similarity"},
        slow_nms(0.3, metric="similarity"),
    ),
    "nms centred": ({"name": "greedy_nms", "radius": 0.4, "centre": True}, slow_nms(0.4, centre=True)),
    "farthest point": ("farthest_point", slow_farthest()),
    "farthest point euclidean": ({"name": "farthest_point", "metric": "euclidean"}, slow_farthest("euclidean")),
    "dpp": ("dpp", slow_dpp),
    "facility location": ("facility_location", slow_facility()),
    "facility location, root": ({"name": "facility_location", "power": 0.5}, slow_facility(0.5)),
    "facility location, sum": ({"name": "facility_location", "combine": "add"}, slow_facility(add=True)),
    "mmr": ("mmr", slow_mmr(0.5)),
    "mmr, mostly score": ({"name": "mmr", "lambda": 0.8}, slow_mmr(0.8)),
    "mmr, similarity alone": ({"name": "mmr", "lambda": 0.0}, slow_mmr(0.0)),
    "bipartite": ({"name": "bipartite_drop", "step": 3}, slow_bipartite(3)),
    "bipartite, steps too long": ({"name": "bipartite_drop", "step": 50}, slow_bipartite(50)),
    "bipartite, one at a time": ({"name": "bipartite_drop", "step": 1}, slow_bipartite(1)),
}
COUNTS = (24, 13, 1, 0, 20, 2)


def given(seed: int, spread: float = 0.7) -> tuple[PruneContext, Tensor]:
    """Return rows of clustered tokens of several lengths, with positive scores; padding holds large numbers."""
    generator = torch.Generator().manual_seed(seed)
    rows, tokens, width = len(COUNTS), max(COUNTS), 16
    centres = torch.randn(rows, 6, width, generator=generator)
    nearest = torch.randint(6, (rows, tokens, 1), generator=generator).expand(-1, -1, width)
    states = centres.gather(1, nearest) + spread * torch.randn(rows, tokens, width, generator=generator)
    ctx = make_context(rows, tokens, width, counts=COUNTS)
    ctx = replace(ctx, signals=Signals({"hidden": states.masked_fill(~ctx.valid.unsqueeze(-1), 1e3)}))
    scores = torch.rand(rows, tokens, generator=generator)
    return ctx, scores.masked_fill(~ctx.valid, -torch.inf)


def indices(kept: Tensor) -> list[int]:
    return kept.nonzero().flatten().tolist()


def row_of(ctx: PruneContext, row: int, n: int) -> PruneContext:
    hidden = ctx.read(Signal("hidden"))[row : row + 1, :n]
    return replace(
        ctx,
        valid=ctx.valid[row : row + 1, :n],
        ordinal=ctx.ordinal[row : row + 1, :n],
        signals=Signals({"hidden": hidden}),
    )


def some(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.tensor([int(torch.randint(n + 1, (), generator=generator)) for n in COUNTS])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("case", CASES)
def test_equals_the_slow_way_row_by_row(case: str, seed: int) -> None:
    data, slow = CASES[case]
    selector: Selector = build("selector", data)
    ctx, scores = given(seed)
    keep = some(seed).clamp(max=12)  # below the width: the determinants of the slow way still differ
    kept = selector.select(scores, keep, ctx.only(selector))
    for row, n in enumerate(COUNTS):
        x, own, k = ctx.hidden[row, :n].double(), scores[row, :n].double(), int(keep[row])
        expected = slow(x, own, k) if n else []
        assert indices(kept[row]) == sorted(expected)
        if isinstance(selector, Greedy):
            assert selector.picks(scores, keep, ctx.only(selector))[row, :k].tolist() == expected


@pytest.mark.parametrize("case", CASES)
def test_a_row_alone_equals_the_row_in_a_batch(case: str) -> None:
    selector: Selector = build("selector", CASES[case][0])
    ctx, scores = given(7)
    keep = some(7)
    kept = selector.select(scores, keep, ctx)
    for row, n in enumerate(max(n, 1) for n in COUNTS):
        alone = selector.select(scores[row : row + 1, :n], keep[row : row + 1], row_of(ctx, row, n))
        assert torch.equal(alone[0], kept[row, :n])
        assert not kept[row, n:].any()


@pytest.mark.parametrize("case", CASES)
def test_pairs_computed_when_asked_for_give_the_same(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    selector: Selector = build("selector", CASES[case][0])
    ctx, scores = given(3)
    keep = some(3)
    kept = selector.select(scores, keep, ctx)
    monkeypatch.setattr(_greedy, "WHOLE", 0)
    monkeypatch.setattr(_greedy, "_BLOCK", 5)
    assert torch.equal(selector.select(scores, keep, ctx), kept)


@pytest.mark.parametrize("states", ["copies", "zeros", "one line"])
@pytest.mark.parametrize("case", CASES)
def test_keeps_exactly_the_count_on_degenerate_tokens_and_scores(case: str, states: str) -> None:
    selector: Selector = build("selector", CASES[case][0])
    ctx, scores = given(1)
    hidden = {
        "copies": ctx.hidden[:, :1].expand_as(ctx.hidden),
        "zeros": torch.zeros_like(ctx.hidden),
        "one line": ctx.hidden[:, :1] * torch.arange(-3, ctx.hidden.shape[1] - 3).view(1, -1, 1),
    }[states]
    ctx = replace(ctx, signals=Signals({"hidden": hidden}))
    for own in (scores, torch.zeros_like(scores), -scores.abs(), scores * 1e30):
        own = own.masked_fill(~ctx.valid, -torch.inf)
        for keep in (some(1), ctx.valid.sum(dim=1), torch.zeros(len(COUNTS), dtype=torch.long)):
            kept = selector.select(own, keep, ctx)
            assert torch.equal(kept.sum(dim=1), keep)
            assert not (kept & ~ctx.valid).any()


@pytest.mark.parametrize("case", ["nms", "dpp", "facility location", "mmr"])
def test_copies_of_one_token_follow_by_score(case: str) -> None:
    selector: Selector = build("selector", CASES[case][0])
    ctx, scores = given(2)
    ctx = replace(ctx, signals=Signals({"hidden": ctx.hidden[:, :1].expand_as(ctx.hidden)}))
    keep = torch.tensor([9, 5, 1, 0, 7, 1])
    kept = selector.select(scores, keep, ctx)
    for row, k in enumerate(keep.tolist()):
        assert indices(kept[row]) == sorted(by_score(scores[row])[:k])


@pytest.mark.parametrize("case", ["farthest point", "dpp", "facility location", "mmr"])
def test_nothing_to_tell_tokens_apart_takes_the_first(case: str) -> None:
    selector: Selector = build("selector", CASES[case][0])
    ctx = make_context(1, 6, hidden=torch.ones(1, 6, 4))
    kept = selector.select(torch.ones(1, 6), torch.tensor([3]), ctx)
    assert indices(kept[0]) == [0, 1, 2]


def test_farthest_point_takes_copies_last() -> None:
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    ctx = make_context(1, 10, hidden=torch.cat([x, x * 2]).unsqueeze(0))
    kept = build("selector", "farthest_point").select(torch.zeros(1, 10), torch.tensor([5]), ctx)
    assert sorted(i % 5 for i in indices(kept[0])) == [0, 1, 2, 3, 4]


def test_dpp_goes_on_by_score_where_the_rank_is_exhausted() -> None:
    """Six dimensions: the first six picks span them, and every other token is explained."""
    generator = torch.Generator().manual_seed(4)
    ctx = make_context(1, 30, hidden=torch.randn(1, 30, 6, generator=generator))
    scores = torch.rand(1, 30, generator=generator)
    picks = build("selector", "dpp").picks(scores, torch.tensor([20]), ctx)[0].tolist()
    spanning, rest = picks[:6], picks[6:]
    assert torch.linalg.matrix_rank(ctx.hidden[0, spanning]) == 6
    assert rest == [i for i in by_score(scores[0]) if i not in spanning][:14]


@pytest.mark.parametrize("weight", [0.0, 0.5, 0.9])
def test_dpp_relevance_weight(weight: float) -> None:
    ctx, scores = given(5)
    selector = build("selector", {"name": "dpp", "relevance_weight": weight})
    keep = torch.tensor([8, 6, 1, 0, 7, 2])
    kept = selector.select(scores, keep, ctx)
    for row, n in enumerate(COUNTS[:2]):
        own = scores[row, :n].double()
        scaled = (own - own.min() + 1e-6) / (own.max() - own.min())
        quality = (weight / (2 * (1 - weight)) * scaled).exp()
        kernel = quality[:, None] * cosines(ctx.hidden[row, :n].double()) * quality
        picks: list[int] = []
        for _ in range(int(keep[row])):
            left = [i for i in range(n) if i not in picks]
            picks.append(best(left, lambda i: torch.linalg.det(kernel[[*picks, i]][:, [*picks, i]]).item()))  # noqa: B023
        assert indices(kept[row]) == sorted(picks)


def test_dpp_takes_scores_as_they_are() -> None:
    """Of two equal directions the one of higher quality; one of quality 0 or below comes after all others."""
    hidden = torch.tensor([[[1.0, 0, 0], [0, 1, 0], [1, 0, 0], [0, 0, 1]]])
    ctx = make_context(1, 4, hidden=hidden)
    selector = build("selector", {"name": "dpp", "quality": "score"})
    assert selector.picks(torch.tensor([[0.2, 0.1, 0.3, -5.0]]), torch.tensor([4]), ctx)[0].tolist() == [2, 1, 0, 3]


@pytest.mark.parametrize(
    ("erank", "k", "expected"),
    [
        (90, 4, [0, 1, 2, 4]),
        (90, 6, [0, 1, 2, 4, 5, 7]),
        (90, 8, [0, 1, 2, 4, 5, 7, 3, 6]),
        (300, 5, [0, 2, 4, 5, 1]),
        (300, 6, [0, 2, 4, 5, 1, 3]),
    ],
)
def test_nms_on_the_worked_example(erank: float, k: int, expected: list[int]) -> None:
    """Eight tokens whose picks were worked out apart from any code here (radius: rank x erank / 90 x 0.01, at most 0.25)."""
    x = [(4, 0, 0), (4, 1, 0), (0, 4, 0), (0, 4, 1), (0, 0, 4), (3, 3, 0), (1, 0, 4), (2, 2, 2)]
    ctx = make_context(1, 8, hidden=torch.tensor([x], dtype=torch.float32))
    scores = torch.tensor([[0.30, 0.22, 0.14, 0.10, 0.08, 0.07, 0.05, 0.04]])
    data = {"name": "greedy_nms", "radius": erank / 90 * 0.01, "grow_with_rank": True, "max_radius": 0.25}
    assert build("selector", data).picks(scores, torch.tensor([k]), ctx)[0].tolist() == expected


def test_nms_radius_is_strict_and_counts_ranks_of_tokens_taken_out() -> None:
    """On a line: 1 is out by 0; 2 has rank 3, so its radius is 3 and takes 4 out, but not 5 at exactly 3."""
    at = torch.tensor([0.0, 0.5, 10.0, 30.0, 12.9, 13.0])
    ctx = make_context(1, 6, hidden=at.view(1, 6, 1))
    scores = torch.tensor([[6.0, 5.0, 4.0, 3.0, 2.0, 1.0]])
    selector = build("selector", {"name": "greedy_nms", "radius": 1, "grow_with_rank": True, "metric": "euclidean"})
    assert selector.picks(scores, torch.tensor([4]), ctx)[0].tolist() == [0, 2, 3, 5]


def test_nms_radius_may_depend_on_the_row() -> None:
    """With the count of tokens as the radius, a long row is thinned and a short one is not."""

    @dataclass(frozen=True)
    class Count(Statistic):
        name = "count_here"

        def compute(self, ctx: PruneContext) -> Tensor:
            return ctx.valid.sum(dim=1).float()

    at = torch.arange(6.0).expand(2, 6).unsqueeze(-1)
    ctx = make_context(2, 6, counts=(6, 2), hidden=at)
    scores = -torch.arange(6.0).expand(2, 6).masked_fill(~ctx.valid, torch.inf)
    selector = GreedyNMS(radius=Quantity(Count(), times=0.5), metric="euclidean")
    assert selector.radii(scores, ctx).tolist() == [[3.0] * 6, [1.0] * 6]
    assert [indices(row) for row in selector.select(scores, torch.tensor([2, 2]), ctx)] == [[0, 3], [0, 1]]


def test_features_are_read_at_the_site_the_option_names() -> None:
    site = Site("vision.output")
    near, far = torch.ones(1, 4, 2), torch.tensor([[[1.0, 0], [1, 0.01], [0, 1], [0.01, 1]]])
    ctx = make_context(1, 4)
    ctx = replace(ctx, signals=Signals({Signal("hidden"): near, Signal("hidden", at=site): far}))
    selector = build("selector", {"name": "farthest_point", "from": "vision.output"})
    assert selector.needs() == (Signal("hidden", at=site),)
    picks = selector.picks(torch.zeros(1, 4), torch.tensor([2]), ctx.only(selector))[0].tolist()
    assert picks[0] // 2 != picks[1] // 2


def test_half_precision_features_are_compared_in_float32() -> None:
    ctx, scores = given(9)
    half = replace(ctx, signals=Signals({"hidden": ctx.hidden.clamp(-9, 9).bfloat16()}))
    same = replace(ctx, signals=Signals({"hidden": half.hidden.float()}))
    for case, (data, _) in CASES.items():
        selector: Selector = build("selector", data)
        assert torch.equal(selector.select(scores, some(9), half), selector.select(scores, some(9), same)), case


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"name": "greedy_nms", "radius": "wide"}, "not 'wide'"),
        ({"name": "greedy_nms", "max_radius": -1.0}, "greater than or equal to 0"),
        ({"name": "greedy_nms", "grow_with_rank": 1}, "not 1"),
        ({"name": "farthest_point", "metric": "l1"}, "not 'l1'"),
        ({"name": "farthest_point", "from": "vision"}, "is not a site"),
        ({"name": "dpp", "relevance_weight": 1.0}, "less than 1"),
        ({"name": "dpp", "plus": -1.0}, "greater than or equal to 0"),
        ({"name": "facility_location", "power": -1.0}, "greater than or equal to 0"),
        ({"name": "mmr", "lambda": 1.5}, "less than or equal to 1"),
        ({"name": "mmr", "lambda_": 0.5}, "no option"),
        ({"name": "bipartite_drop", "step": 0}, "greater than or equal to 1"),
        ({"name": "bipartite_drop", "step": 2.0}, "valid integer"),
    ],
)
def test_wrong_options_are_refused(data: dict[str, Any], message: str) -> None:
    with pytest.raises(Faults, match=message):
        build("selector", data)


@pytest.mark.parametrize("case", CASES)
def test_options_survive_a_round_trip(case: str) -> None:
    selector = build("selector", CASES[case][0])
    assert build("selector", plain(selector)) == selector


def decided(policy: str, states: Tensor, scores: Tensor) -> list[int]:
    (stage,) = Policy.load(policy).stages
    ctx = make_context(1, len(states), hidden=states.unsqueeze(0), attention=GivenAttention(scores[None, None, None]))
    return indices(decide(stage, ctx, original=torch.tensor([len(states)])).kept[0])


def test_adaptive_share_goes_from_attention_to_diversity() -> None:
    """Tokens on one line have erank 1: all by attention. 200 directions have erank 199: all by distance."""
    policy = "agilepruner-ratio-64?budget.keep_tokens=20"
    scores = torch.rand(200, generator=torch.Generator().manual_seed(1))
    line = torch.arange(1.0, 201.0).unsqueeze(1) * torch.ones(200, 8)
    assert decided(policy, line, scores) == sorted(by_score(scores)[:20])
    generator = torch.Generator().manual_seed(2)
    apart = torch.eye(200) + 0.05 * torch.rand(200, 200, generator=generator)
    assert decided(policy, apart, scores) == sorted(slow_farthest()(apart.double(), scores, 20))


@pytest.mark.parametrize(("tokens", "radius"), [(40, 0.05), (91, 0.125), (150, 0.2)])
def test_press_thresholds_follow_erank(tokens: int, radius: float) -> None:
    """n orthogonal tokens have erank n - 1."""
    selector = Policy.load("agilepruner-press-steps-64").stages[0].selector
    assert isinstance(selector, GreedyNMS)
    ctx = make_context(1, tokens, hidden=torch.eye(tokens).unsqueeze(0))
    assert selector.radii(torch.zeros(1, tokens), ctx)[0].tolist() == pytest.approx([radius] * tokens, abs=1e-5)
