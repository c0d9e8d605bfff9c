"""Parts of methods inside the LLM against the obvious slow way: float64, Python loops, one row at a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenprune_scorers.graph import Graph
from tokenprune_scorers.learned import Learned
from tokenprune_scorers.leverage import Leverage
from tokenprune_scorers.pivots import Pivots, sweep
from torch import Tensor

from tokenprune.decision import decide, select_exactly
from tokenprune.groupings import Image
from tokenprune.interfaces import AttentionRows, PruneContext, Text
from tokenprune.policy import Policy
from tokenprune.testing import Signals, grid_layout, make_context
from tokenprune.tokens import Signal

MINE = [
    "pyramiddrop",
    "sparsevlm",
    "feather",
    "fitprune",
    "vtw",
    "dart",
    "twigvlm",
    "illava",
    "mustdrop",
    "lightvlm",
    "specprune",
    "dynamic_llava",
    "tokencarve",
    "visionselector",
    "vscan_llm",
]
FILES = [path for name in MINE for path in sorted((Path(__file__).parents[1] / "policies" / name).glob("*.yaml"))]


def tokens(count: int, width: int = 6, seed: int = 0) -> Tensor:
    """Return clustered tokens, so that some are alike and some are copies."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(4, width, generator=generator)
    x = centres[torch.arange(count) % 4] + 0.4 * torch.randn(count, width, generator=generator)
    if count > 5:
        x[5] = x[1]
    return x


def padded(*rows: Tensor, junk: float = 7.0) -> tuple[Tensor, tuple[int, ...]]:
    most = max(len(row) for row in rows)
    full = torch.full((len(rows), most, rows[0].shape[1]), junk)
    for number, row in enumerate(rows):
        full[number, : len(row)] = row
    return full, tuple(len(row) for row in rows)


def context(*rows: Tensor, junk: float = 7.0, **signals: Any) -> PruneContext:
    hidden, counts = padded(*rows, junk=junk)
    return make_context(len(rows), hidden.shape[1], counts=counts, hidden=hidden, **signals)


# ---- leverage --------------------------------------------------------------------------------------------------------


def slow_leverage(x: Tensor, scorer: Leverage) -> Tensor:
    x = x.double()
    if scorer.centre:
        x = x - x.mean(dim=0)
    u, s, _ = torch.linalg.svd(x, full_matrices=False)
    there = s > s.amax() * 1e-7 if len(s) else s > 0
    u, s = u[:, there], s[there]
    u, s = u[:, : scorer.rank], s[: scorer.rank]
    mass = {"mass": (u * s).abs(), "energy": (u * s).square(), "leverage": u.square()}[scorer.measure]
    return mass.sum(dim=1).float()


@pytest.mark.parametrize("measure", ["mass", "energy", "leverage"])
@pytest.mark.parametrize("rank", [None, 1, 3, 50])
@pytest.mark.parametrize("centre", [False, True])
def test_leverage_is_that_of_the_svd(measure: Any, rank: int | None, centre: bool) -> None:
    scorer = Leverage(measure=measure, rank=rank, centre=centre)
    rows = [tokens(30), tokens(4, seed=1), tokens(1, seed=2), tokens(6, seed=3)]  # more and fewer tokens than the width
    scores = context(*rows).score(scorer)
    for row, got in zip(rows, scores, strict=True):
        torch.testing.assert_close(got[: len(row)], slow_leverage(row, scorer), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(context(row).score(scorer)[0], got[: len(row)], rtol=1e-5, atol=1e-6)


def test_leverage_knows_what_it_should() -> None:
    x = tokens(20, width=30)
    energy = context(x).score(Leverage(measure="energy"))[0]
    torch.testing.assert_close(energy, x.square().sum(dim=1), rtol=1e-5, atol=1e-5)
    alone = x.clone()
    alone[5] += torch.randn(30, generator=torch.Generator().manual_seed(1))  # no copies: all independent
    torch.testing.assert_close(context(alone).score(Leverage(measure="leverage"))[0], torch.ones(20))
    copies = context(x).score(Leverage(measure="leverage"))[0]
    torch.testing.assert_close(copies[[1, 5]], torch.tensor([0.5, 0.5]))


@pytest.mark.parametrize(
    "scorer", [Leverage(), Leverage(measure="leverage", rank=2), Leverage(centre=True), Graph(), Graph(steps=0)]
)
def test_odd_rows_stay_finite(scorer: Any) -> None:
    ctx = context(torch.zeros(5, 6), torch.ones(3, 6), torch.zeros(0, 6), 1e4 * tokens(8))
    scores = ctx.score(scorer)
    assert scores[ctx.valid].isfinite().all() and scores.shape == ctx.valid.shape
    assert (scores[1, :3] - scores[1, 0]).abs().max() < 1e-4  # equal tokens, equal scores


# ---- graph -----------------------------------------------------------------------------------------------------------


def slow_graph(x: Tensor, scorer: Graph) -> Tensor:
    """The power of the matrix, as the authors take it, in float64."""
    x = x.double()
    unit = x / x.norm(dim=1, keepdim=True)
    n = len(x)
    matrix = torch.zeros(n, n, dtype=torch.float64)
    degree = torch.zeros(n, dtype=torch.float64)
    for i in range(n):
        near = [j for j in range(n) if i == j or float(unit[i] @ unit[j]) >= scorer.threshold]
        weights = torch.stack([unit[i] @ unit[j] for j in near]) / scorer.temperature
        matrix[i, near] = weights.softmax(dim=0)
        degree[i] = len(near)
    start = x.norm(dim=1) if scorer.start == "norm" else torch.ones(n, dtype=torch.float64)
    moved = start @ torch.linalg.matrix_power(matrix, scorer.steps)
    return (moved / degree if scorer.by_degree else moved).float()


@pytest.mark.parametrize(
    "scorer",
    [
        Graph(),
        Graph(steps=0),
        Graph(threshold=0.8, temperature=0.2, steps=2),
        Graph(start="one", by_degree=False),
        Graph(threshold=-1.0),
    ],
)
def test_graph_is_the_power_of_the_matrix(scorer: Graph) -> None:
    rows = [tokens(25), tokens(1, seed=1), tokens(9, seed=2)]
    for junk in (0.0, 7.0):
        scores = context(*rows, junk=junk).score(scorer)
        for row, got in zip(rows, scores, strict=True):
            torch.testing.assert_close(got[: len(row)], slow_graph(row, scorer), rtol=1e-4, atol=1e-5)
            assert torch.allclose(context(row).score(scorer)[0], got[: len(row)], rtol=1e-5, atol=1e-6)


def test_graph_per_image_sees_no_other_image() -> None:
    one, two = tokens(10), tokens(14, seed=4)
    layout = grid_layout(torch.arange(24)[None], (1, 1, 24))
    layout = replace(layout, image=(torch.arange(24) >= 10).long()[None])
    scores = context(torch.cat([one, two]), layout=layout).score(Graph(within=Image()))[0]
    torch.testing.assert_close(
        scores, torch.cat([slow_graph(one, Graph()), slow_graph(two, Graph())]), rtol=1e-4, atol=1e-5
    )
    assert not torch.allclose(scores, context(torch.cat([one, two])).score(Graph())[0], rtol=1e-3)


# ---- pivots ----------------------------------------------------------------------------------------------------------


def slow_pivots(scores: Tensor, x: Tensor, words: Tensor, norms: Tensor, keep: int, selector: Pivots) -> list[int]:
    """scores and norms may hold -inf for what is not there; all of one row."""
    n = len(x)
    images = sorted(sorted(range(n), key=lambda i: (-float(scores[i]), i))[: min(selector.image, keep)])
    there = [t for t in range(len(words)) if norms[t] > -torch.inf]
    texts = sorted(sorted(there, key=lambda t: (-float(norms[t]), t))[: selector.text])
    cosine = torch.nn.functional.cosine_similarity
    pivots = [x[i] for i in images] + [words[t] for t in texts]
    kept = list(images)
    left = keep - len(images)
    for number, pivot in enumerate(pivots):
        share = left // len(pivots) + (number < left % len(pivots))
        pool = [i for i in range(n) if i not in kept]
        distance = {i: float(cosine(pivot, x[i], dim=0)) for i in pool}
        kept += sorted(pool, key=lambda i: (distance[i], i))[:share]
    kept += [i for i in range(n) if i not in kept][: keep - len(kept)]
    return sorted(kept)


@pytest.mark.parametrize(
    "selector", [Pivots(), Pivots(image=2, text=0), Pivots(image=0, text=3), Pivots(image=30, text=2)]
)
def test_pivots_against_loops(selector: Pivots) -> None:
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randn(count, 6, generator=generator) for count in (20, 7, 1)]
    after = torch.tensor([[False, True, True, True, True, True], [True] * 2 + [False] * 4, [False] * 6])
    words = torch.randn(3, 6, 6, generator=generator)
    keys = torch.randn(3, 6, 2, 8, generator=generator)
    there = torch.ones(3, 6, dtype=torch.bool)
    there[0, 5] = False
    ctx = context(*rows, text_hidden=Text(words, there, after), text_keys=Text(keys, there, after))
    scores = torch.randn(ctx.valid.shape, generator=generator).masked_fill(~ctx.valid, -torch.inf)
    ctx = replace(ctx, scores=scores)
    norms = keys.abs().sum(dim=(2, 3)).masked_fill(~(there & after), -torch.inf)
    for keeps in ([0, 0, 0], [1, 1, 1], [3, 2, 0], [9, 5, 1], [13, 6, 1], [20, 7, 1]):
        kept = select_exactly(selector, torch.tensor(keeps), ctx)
        for row, keep in enumerate(keeps):
            count = len(rows[row])
            want = slow_pivots(scores[row, :count], rows[row], words[row], norms[row], keep, selector)
            assert kept[row].nonzero().flatten().tolist() == want
            assert not kept[row, count:].any()


def test_pivots_visit_in_the_order_asked_for() -> None:
    cosine = torch.tensor([[[0.0, 0.1, 0.2, 0.3], [0.0, 0.2, 0.1, 0.3]]])
    valid, nobody = torch.ones(1, 4, dtype=torch.bool), torch.zeros(1, 4, dtype=torch.bool)
    both, keep = torch.ones(1, 2, dtype=torch.bool), torch.tensor([2])
    assert sweep(cosine, both, nobody, keep, valid)[0].tolist() == [True, False, True, False]
    assert sweep(cosine, both, nobody, keep, valid, order=[1, 0])[0].tolist() == [True, True, False, False]


def test_text_pivots_are_read_only_when_wanted() -> None:
    assert {signal.of for signal in Pivots(text=0).needs()} == {"visual"}
    assert Signal("keys", of="text") in Pivots().needs()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Pivots(image=0, text=0),
        lambda: Pivots(image=-1),
        lambda: Leverage(rank=0),
        lambda: Graph(threshold=2.0),
        lambda: Graph(temperature=0.0),
        lambda: Graph(steps=-1),
    ],
)
def test_wrong_options_are_refused(make: Any) -> None:
    with pytest.raises(ValueError, match="not"):
        make()


# ---- policies --------------------------------------------------------------------------------------------------------


def test_there_is_a_policy_for_every_method() -> None:
    assert {path.parent.name for path in FILES} == set(MINE)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_policies_decide_every_stage(path: Path) -> None:
    policy = Policy.load(path)
    assert Policy.load(policy.name) == policy == Policy.load(policy.to_dict())
    counts = (600, 310)
    ctx = make_context(2, 600, counts=counts, grid=(1, 20, 30), width=16)
    hidden = torch.randn(2, 600, 16, generator=torch.Generator().manual_seed(9))
    for stage in policy.stages[:2]:
        if isinstance(stage.scorer, Learned):  # the file is for the user to give
            stage = replace(stage, scorer=Learned.example())
        keep = torch.tensor([20, 20]) if stage.is_open else None
        made = decide(stage, ctx, original=torch.tensor(counts), keep=keep, hidden=hidden)
        assert not (made.kept & ~ctx.valid).any() and made.selected.sum() <= made.kept.sum()
        if stage.budget is not None and stage.budget.is_plain:
            want = [stage.budget.count(count, count) for count in counts]
            assert made.selected.sum(dim=1).tolist() == want
        if made.states is not None:
            assert made.states[made.kept].isfinite().all()


@pytest.mark.parametrize("name", ["mustdrop-192", "mustdrop-64"])
def test_mustdrop_is_the_rule_of_its_code(name: str) -> None:
    """A token leaves iff its summed attention is under a share of the sum over all tokens and its largest under a bound."""
    stage = Policy.load(name).stages[0]
    ctx = make_context(2, 200, counts=(200, 90), seed=5)
    total_share, bound = stage.selector.parts[0].selector.above, stage.selector.parts[1].selector.above  # type: ignore[attr-defined]
    rows: AttentionRows = ctx.attention  # type: ignore[assignment]
    attention = torch.cat([block.mean(dim=1) for block, _ in rows.blocks()], dim=1)  # [B, R, N]
    made = decide(stage, ctx, original=torch.tensor([200, 90]))
    for row, count in enumerate((200, 90)):
        seen = attention[row, :, :count]
        leaves = (seen.sum(dim=0) < total_share * seen.sum()) & (seen.amax(dim=0) < bound)
        assert torch.equal(made.kept[row, :count], ~leaves)
        assert int(leaves.sum()) > 0 or name == "mustdrop-192"


def test_specprune_keeps_what_moves_and_what_is_looked_at() -> None:
    generator = torch.Generator().manual_seed(2)
    still = torch.randn(1, 200, 16, generator=generator)
    now = still.clone()
    now[:, [3, 77]] = torch.randn(1, 2, 16, generator=generator)
    ctx = make_context(1, 400, grid=(2, 10, 20), hidden=torch.cat([still, now], dim=1))
    stage = Policy.load("specprune").stages[0]
    assert stage.scorer is not None
    made = decide(stage, ctx, original=torch.tensor([400]))
    looked_at = ctx.score(stage.scorer)[0].argsort(descending=True)
    want = {203, 277}
    want |= set([int(i) for i in looked_at if int(i) not in want][:84])
    assert set(made.kept[0].nonzero().flatten().tolist()) == want


def test_signals_by_name_answer_the_pivots() -> None:
    """The selector asks for normed states of two kinds; a context that knows them apart must be read as such."""
    x = tokens(8)[None]
    normed = {Signal("hidden", norm=True): x.flip(1), "hidden": x}
    ctx = PruneContext(torch.ones(1, 8, dtype=torch.bool), torch.arange(8)[None], signals=Signals(normed))
    scores = torch.arange(8.0).flip(0)[None]
    kept = select_exactly(Pivots(image=1, text=0), torch.tensor([2]), replace(ctx, scores=scores))
    other = select_exactly(
        Pivots(image=1, text=0), torch.tensor([2]), replace(make_context(1, 8, hidden=x.flip(1)), scores=scores)
    )
    assert torch.equal(kept, other)
