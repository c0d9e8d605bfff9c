"""Composite scorers, statistics and general selectors against the obvious slow way, one row and one token at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tokenprune.components import Faults, build
from tokenprune.decision import decide, select_exactly
from tokenprune.errors import PluginContractError
from tokenprune.interfaces import GivenAttention, Paired, PruneContext, Quantity, Scorer, Selector, Statistic, Text
from tokenprune.policy import Policy
from tokenprune.testing import make_context
from tokenprune.tokens import Signal, Site

COUNTS = (24, 7, 1, 0, 13)
GRID = (2, 3, 4)


def context(counts: tuple[int, ...] = COUNTS, seed: int = 0, **signals: Any) -> PruneContext:
    return make_context(len(counts), 24, counts=counts, grid=GRID, seed=seed, **signals)


def alone(ctx: PruneContext, row: int) -> PruneContext:
    """Return one row of a context without its padding (at least one place)."""
    n = max(int(ctx.valid[row].sum()), 1)

    def cut(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value[row : row + 1, :n]
        if isinstance(value, Text):
            return Text(value.states[row : row + 1], value.valid[row : row + 1], value.after_image[row : row + 1])
        if isinstance(value, Paired):
            return Paired(cut(value.image), value.text[row : row + 1], value.text_valid[row : row + 1])
        if isinstance(value, GivenAttention):
            return GivenAttention(value.probabilities[row : row + 1, ..., :n])
        return value.map(cut) if hasattr(value, "map") else value

    values = {key: cut(value) for key, value in ctx.signals.values_by.items()}  # type: ignore[attr-defined]
    signals = type(ctx.signals)(values)  # type: ignore[call-arg]
    scores = None if ctx.scores is None else cut(ctx.scores)
    return replace(ctx, valid=cut(ctx.valid), ordinal=cut(ctx.ordinal), scores=scores, signals=signals)


def given(counts: tuple[int, ...] = COUNTS, seed: int = 0, hidden: Tensor | None = None) -> PruneContext:
    """Return a context whose attention is given, so that a row can be cut out of it."""
    ctx = context(counts, seed) if hidden is None else context(counts, seed, hidden=hidden)
    rows = torch.rand(len(counts), 4, 3, 24, generator=torch.Generator().manual_seed(seed)) * ctx.valid[:, None, None]
    rows = rows / rows.sum(-1, keepdim=True).clamp(min=1e-9)
    return context(counts, seed, attention=GivenAttention(rows), **({} if hidden is None else {"hidden": hidden}))


def close(found: Tensor, expected: Any, **tolerance: float) -> None:
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(found.double(), expected, **({"rtol": 1e-5, "atol": 1e-6} | tolerance))


SCORERS: list[Any] = [
    *(
        {
            "name": "blend",
            "parts": [
                {"scorer": "attention", "normalise": a},
                {"scorer": "hidden_norm", "weight": -0.5, "normalise": b},
            ],
        }
        for a, b in (("sum", "minmax"), ("zscore", "scale_to_mean"), ("softmax", "max"), ("rank", "none"))
    ),
    {
        "name": "blend",
        "scope": "frame",
        "parts": [
            {"scorer": "hidden_norm", "normalise": "minmax"},
            {"scorer": "uniform", "weight": {"statistic": "count", "times": 0.1}},
        ],
    },
    {"name": "product", "parts": [{"scorer": "attention"}, {"scorer": "hidden_norm", "power": -0.5}]},
    {"name": "rank_fusion", "parts": [{"scorer": "attention", "weight": 0.3}, {"scorer": "hidden_norm"}]},
    "local_variance",
    {"name": "local_variance", "over": "frame", "compat": "official"},
    {"name": "hidden_norm", "of": "values", "heads": "mean", "p": 1},
    {"name": "hidden_norm", "of": "keys", "lowest": True},
    "text_relevance",
    {"name": "text_relevance", "over": "max", "metric": "dot", "sign": "negative", "softmax": True},
    {"name": "text_relevance", "of": "tokens", "over": "centroid"},
    "anchor_similarity",
    {"name": "anchor_similarity", "anchor": "frame", "kernel": "gaussian", "channels": 0.5, "sign": "negative"},
    {"name": "anchor_similarity", "anchor": None, "of": "values", "kernel": "dot"},
]
STATISTICS: list[Any] = [
    "erank",
    {"name": "erank", "centre": False, "l2": True, "spectrum": "eigenvalue"},
    {"name": "erank", "max_tokens": 6},
    {"name": "entropy", "scorer": "attention"},
    {"name": "entropy", "scorer": "hidden_norm", "normalise": True},
    *({"name": "outlier_ratio", "scorer": "attention", "give": give} for give in ("ratio", "count", "every")),
    "mean_similarity",
    "count",
    {"name": "count", "groups": "frame"},
    "rank",
    {"name": "rank", "of": "attention", "query": "text"},
]
_BOUNDS = (("mean", 1.2), ("max", 0.5), ("sum", 0.1), ("one", 0.4), ("outlier", 0.1))
SELECTORS: list[Any] = [
    {"name": "union", "parts": [{"share": 0.4, "rounding": "half_even"}, {"selector": "stride"}]},
    {"name": "union", "parts": [{"share": 0.5, "per": {"name": "window", "rows": 2, "columns": 2}}, {"scorer": "attention"}]},
    {"name": "union", "parts": [{"share": 0.2}, {"selector": {"name": "grid", "step": 2}}]},
    {"name": "union", "parts": [{"selector": "dilate", "share": 0.2, "scorer": "attention"}, {}]},
    {"name": "union", "parts": [{"tokens": {"statistic": "count", "over": 3.0}}, {"selector": "random"}]},
    {"name": "reserve", "share": 0.4, "over": {"name": "window", "rows": 2, "columns": 2}},
    {"name": "reserve", "share": 1.0, "over": "frame", "lowest": False},
    *({"name": "threshold", "of": of, "above": above} for of, above in _BOUNDS),
    {"name": "threshold", "min_tokens": 0, "or_equal": True},
    "cumulative",
    {"name": "cumulative", "mass": 0.3, "min_tokens": 3},
    "dilate",
    {"name": "dilate", "neighbours": 8},
    {"name": "dilate", "compat": "official"},
    "grid",
    {"name": "grid", "step": 2, "offset": "centre"},
    "every",
    {"name": "every", "step": {"statistic": "count", "over": 5.0}, "compat": "official"},
]  # fmt: skip


def scored(ctx: PruneContext, seed: int = 3) -> PruneContext:
    scores = torch.rand(ctx.valid.shape, generator=torch.Generator().manual_seed(seed))
    return replace(ctx, scores=scores.masked_fill(~ctx.valid, -torch.inf))


def selected(selector: Selector, ctx: PruneContext, share: float = 0.5) -> Tensor:
    keep = (ctx.valid.sum(dim=1) * share).ceil().long()
    return select_exactly(selector, keep, ctx, exact=not selector.counts_itself)


def names(items: list[Any]) -> list[str]:
    return [item if isinstance(item, str) else f"{item['name']}-{i}" for i, item in enumerate(items)]


# ---- every part: padding, batches, degenerate rows --------------------------------------------------------------------


@pytest.mark.parametrize("data", SCORERS, ids=names(SCORERS))
def test_a_row_scores_alone_as_in_a_batch(data: Any) -> None:
    scorer: Scorer = build("scorer", data)
    ctx = given()
    together = ctx.score(scorer)
    assert together[ctx.valid].isfinite().all()
    for row, n in enumerate(COUNTS):
        close(alone(ctx, row).score(scorer)[0, :n], together[row, :n])


@pytest.mark.parametrize("data", STATISTICS, ids=names(STATISTICS))
def test_a_row_has_its_statistic_alone_as_in_a_batch(data: Any) -> None:
    statistic: Statistic = build("statistic", data)
    ctx = given()
    together = ctx.number(Quantity(statistic))
    assert together.isfinite().all()
    for row in range(len(COUNTS)):
        close(alone(ctx, row).number(Quantity(statistic)), together[row : row + 1])


@pytest.mark.parametrize("data", SELECTORS, ids=names(SELECTORS))
def test_a_row_is_selected_alone_as_in_a_batch(data: Any) -> None:
    selector: Selector = build("selector", data)
    ctx = scored(given())
    together = selected(selector, ctx)
    assert not (together & ~ctx.valid).any()
    for row, n in enumerate(COUNTS):
        assert torch.equal(selected(selector, alone(ctx, row))[0, :n], together[row, :n])


@pytest.mark.parametrize("kind", ["constant", "zero", "duplicates"])
@pytest.mark.parametrize("data", SCORERS, ids=names(SCORERS))
def test_degenerate_tokens_score_finite(data: Any, kind: str) -> None:
    hidden = torch.randn(len(COUNTS), 24, 16)
    hidden = {"constant": torch.ones_like(hidden), "zero": hidden * 0, "duplicates": hidden[:, :1].expand_as(hidden)}[
        kind
    ]
    ctx = given(hidden=hidden)
    assert ctx.score(build("scorer", data))[ctx.valid].isfinite().all()


@pytest.mark.parametrize("data", STATISTICS, ids=names(STATISTICS))
def test_degenerate_tokens_have_finite_statistics(data: Any) -> None:
    for hidden in (torch.ones(5, 24, 16), torch.zeros(5, 24, 16)):
        assert given(hidden=hidden).number(Quantity(build("statistic", data))).isfinite().all()


@pytest.mark.parametrize("data", SELECTORS, ids=names(SELECTORS))
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_constant_scores_can_be_selected_from(data: Any, share: float) -> None:
    ctx = given()
    ctx = replace(ctx, scores=torch.ones(ctx.valid.shape).masked_fill(~ctx.valid, -torch.inf))
    assert not (selected(build("selector", data), ctx, share) & ~ctx.valid).any()


# ---- blend, product, rank_fusion -------------------------------------------------------------------------------------


def by_hand(kind: str, x: list[float], first: list[float]) -> list[float]:
    mean, high, low = sum(x) / len(x), max(x), min(x)
    deviation = math.sqrt(sum((v - mean) ** 2 for v in x) / len(x))
    size = [sum(map(abs, y)) / len(y) for y in (x, first)]
    return {
        "none": x,
        "minmax": [(v - low) / (high - low) if high > low else 0.0 for v in x],
        "sum": [v / sum(map(abs, x)) for v in x],
        "zscore": [(v - mean) / deviation if deviation else 0.0 for v in x],
        "softmax": [math.exp(v) / sum(map(math.exp, x)) for v in x],
        "rank": [float(sum(u < v for u in x)) for v in x],
        "max": [v / max(map(abs, x)) for v in x],
        "scale_to_mean": [v / size[0] * size[1] for v in x],
    }[kind]


@pytest.mark.parametrize("kind", ["none", "minmax", "sum", "zscore", "softmax", "rank", "max", "scale_to_mean"])
@pytest.mark.parametrize("scope", [None, "frame"])
def test_blend_is_the_weighted_sum(kind: str, scope: str | None) -> None:
    parts = [{"scorer": "uniform"}, {"scorer": "hidden_norm", "weight": -0.7, "normalise": kind}]
    ctx = given((24, 15, 3))
    got = ctx.score(build("scorer", {"name": "blend", "parts": parts, **({"scope": scope} if scope else {})}))
    first, second = (ctx.score(build("scorer", name)).double() for name in ("uniform", "hidden_norm"))
    for row, n in enumerate((24, 15, 3)):
        for part in [range(n)] if scope is None else [range(i, min(i + 12, n)) for i in range(0, n, 12)]:
            a, b = first[row, part].tolist(), second[row, part].tolist()
            expected = [u - 0.7 * v for u, v in zip(a, by_hand(kind, b, a), strict=True)]
            close(got[row, part], expected, rtol=1e-4, atol=1e-5)


def test_a_product_multiplies_powers_and_a_negative_score_counts_as_nothing() -> None:
    ctx = given((24, 7))
    minus = {"scorer": {"name": "blend", "parts": [{"scorer": "hidden_norm", "weight": -1.0}]}}
    parts = [{"scorer": "attention", "power": 0.5}, {"scorer": "hidden_norm", "power": -2.0}]
    got = ctx.score(build("scorer", {"name": "product", "parts": parts}))
    a, b = (ctx.score(build("scorer", name)).double() for name in ("attention", "hidden_norm"))
    close(got[ctx.valid], (a.sqrt() / b**2)[ctx.valid])
    none = ctx.score(build("scorer", {"name": "product", "parts": [minus, *parts]}))
    assert (none[ctx.valid] == 0).all()
    assert (
        ctx.score(build("scorer", {"name": "product", "parts": [{**minus, "power": -1.0}]}))[ctx.valid].isfinite().all()
    )


def test_rank_fusion_counts_points_and_gives_ties_to_the_lower_index() -> None:
    hidden = torch.tensor([3.0, 1.0, 2.0, 2.0, 5.0]).reshape(1, 5, 1)
    ctx = make_context(1, 5, hidden=hidden, values=-hidden.unsqueeze(-1) + 10)
    fusion = {
        "name": "rank_fusion",
        "parts": [
            {"scorer": "hidden_norm", "weight": 0.5},
            {"scorer": {"name": "hidden_norm", "of": "values"}, "weight": 0.25},
        ],
    }
    # norms 3 1 2 2 5: points 4 1 3 2 5; values 7 9 8 8 5: points 2 5 4 3 1
    assert ctx.score(build("scorer", fusion))[0].tolist() == [2.5, 1.75, 2.5, 1.75, 2.75]
    equal = make_context(1, 4, hidden=torch.ones(1, 4, 1))
    assert equal.score(build("scorer", {"name": "rank_fusion", "parts": [{"scorer": "hidden_norm"}]}))[0].tolist() == [
        4,
        3,
        2,
        1,
    ]


# ---- other scorers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compat", ["clean", "official"])
def test_local_variance_by_hand(compat: str) -> None:
    ctx = given((24, 7))
    got = ctx.score(
        build("scorer", {"name": "local_variance", "over": {"name": "chunk", "count": 3}, "compat": compat})
    )
    for row, sizes in enumerate(([8, 8, 8], [3, 2, 2])):
        start = 0
        for m in sizes:
            x = ctx.signals[Signal("hidden")][row, start : start + m].double()
            x = x / x.norm(dim=1, keepdim=True)
            for i in range(m):
                cosine = [float(x[i] @ x[j]) for j in range(m) if j != i]
                mean = sum(cosine) / (m - 1)
                counted = [*cosine, 0.0] if compat == "official" else cosine
                close(got[row, start + i], sum((c - mean) ** 2 for c in counted) / (m - 1))
            start += m


def test_text_relevance_by_hand() -> None:
    ctx = given((24, 7))
    pair: Paired = ctx.signals[Signal("paired")]
    words: Text = ctx.signals[Signal("hidden", at=Site("llm.input"), of="text")]
    visual = ctx.signals[Signal("hidden", at=Site("llm.input"))]
    for of, metric, over, sign in product(
        ("paired", "tokens"), ("cosine", "dot"), ("mean", "max", "centroid"), ("positive", "negative")
    ):
        got = ctx.score(
            build("scorer", {"name": "text_relevance", "of": of, "metric": metric, "over": over, "sign": sign})
        )
        image = pair.image if of == "paired" else visual
        text, there = (pair.text, pair.text_valid) if of == "paired" else (words.states, words.after_image)
        for row, n in enumerate((24, 7)):
            used = text[row][there[row]].double()
            used = used.mean(dim=0, keepdim=True) if over == "centroid" else used
            for i in range(n):
                x = image[row, i].double()
                each = [float(x @ t) / (float(x.norm() * t.norm()) if metric == "cosine" else 1.0) for t in used]
                value = max(each) if over == "max" else sum(each) / len(each)
                close(got[row, i], value if sign == "positive" else -value)


def test_anchor_similarity_by_hand() -> None:
    ctx = given((24, 15))
    whole = ctx.signals[Signal("hidden")].double()
    data = {"name": "anchor_similarity", "anchor": "frame", "kernel": "gaussian", "channels": 0.5, "sign": "negative"}
    got = ctx.score(build("scorer", data))
    for row, n in enumerate((24, 15)):
        x = whole[row, :n]
        steady = x.var(dim=0).argsort()[:8]
        x = x[:, steady] / x[:, steady].norm(dim=1, keepdim=True)
        for start in range(0, n, 12):
            frame = x[start : min(start + 12, n)]
            for i, token in enumerate(frame):
                distance = float(((token - frame.mean(dim=0)) ** 2).sum())
                close(got[row, start + i], -sum(math.exp(-distance / (2 * a)) for a in (0.125, 0.25, 0.5, 1, 2)))
    plain = ctx.score(build("scorer", {"name": "anchor_similarity", "anchor": "image"}))
    for row, n in enumerate((24, 15)):
        x = whole[row, :n] / whole[row, :n].norm(dim=1, keepdim=True)
        mean = x.mean(dim=0)
        close(plain[row, :n], x @ mean / mean.norm())


def test_norms_by_hand() -> None:
    ctx = given((24, 7))
    values = ctx.signals[Signal("values")].double()
    close(
        ctx.score(build("scorer", {"name": "hidden_norm", "of": "values", "heads": "mean", "p": 1}))[ctx.valid],
        values.mean(dim=2).abs().sum(dim=-1)[ctx.valid],
    )
    close(
        ctx.score(build("scorer", {"name": "hidden_norm", "of": "values", "lowest": True}))[ctx.valid],
        -values.square().sum(dim=(2, 3)).sqrt()[ctx.valid],
    )


def test_a_learned_network_is_read_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "net.safetensors"
    net = torch.nn.Sequential(torch.nn.LayerNorm(16), torch.nn.Linear(16, 5), torch.nn.SiLU(), torch.nn.Linear(5, 2))
    names = {"norm": 0, "layers.0": 1, "layers.1": 3}
    tensors = {
        f"{name}.{kind}": getattr(net[at], kind).data for name, at in names.items() for kind in ("weight", "bias")
    }
    save_file(tensors, file, {"activation": "silu"})
    ctx = given((24, 7))
    with torch.no_grad():
        logits = net(ctx.signals[Signal("hidden")])
    close(
        ctx.score(build("scorer", {"name": "learned", "file": str(file)}))[ctx.valid],
        (logits[..., 1] - logits[..., 0])[ctx.valid],
    )


@pytest.mark.parametrize(
    ("tensors", "header", "message"),
    [
        (None, {}, "no such file"),
        ({"layers.0.weight": torch.ones(1, 9)}, {}, "takes tokens of width 9, and here they have 16"),
        ({"layers.0.weight": torch.ones(3, 16)}, {}, "ends in one or two numbers"),
        (
            {"layers.0.weight": torch.ones(3, 16), "layers.1.weight": torch.ones(1, 4)},
            {},
            "layers.1 of .* does not fit",
        ),
        ({"layers.0.weight": torch.ones(1, 16), "head": torch.ones(1)}, {}, "holds 'head'"),
        ({"layers.0.weight": torch.ones(1, 16), "norm.weight": torch.ones(3)}, {}, "norm of .* width"),
        ({"layers.0.weight": torch.ones(1, 16)}, {"activation": "swishy"}, "activation 'swishy'"),
        ({"layers.0.weight": torch.ones(1, 16)}, {"eps": "small"}, "not a number"),
    ],
)
def test_a_wrong_network_is_refused_in_a_sentence(
    tensors: Any, header: dict[str, str], message: str, tmp_path: Path
) -> None:
    file = tmp_path / "net.safetensors"
    if tensors is not None:
        save_file(tensors, file, header)
    with pytest.raises(PluginContractError, match=message):
        given().score(build("scorer", {"name": "learned", "file": str(file)}))
    file.write_bytes(b"no tensors")
    with pytest.raises(PluginContractError, match="not a safetensors file"):
        given(seed=1).score(build("scorer", {"name": "learned", "file": str(Path(file).rename(tmp_path / "other"))}))


# ---- statistics ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("centre", "l2", "spectrum"), list(product((True, False), (True, False), ("singular", "eigenvalue")))
)
def test_erank_agrees_with_a_float64_svd(centre: bool, l2: bool, spectrum: str) -> None:
    ctx = given((24, 7, 2))
    got = ctx.number(Quantity(build("statistic", {"name": "erank", "centre": centre, "l2": l2, "spectrum": spectrum})))
    for row, n in enumerate((24, 7, 2)):
        x = ctx.signals[Signal("hidden")][row, :n].double()
        x = x / x.norm(dim=1, keepdim=True) if l2 else x
        s = torch.linalg.svdvals(x - x.mean(dim=0) if centre else x)
        s = s.square() if spectrum == "eigenvalue" else s
        p = s[s > 1e-9] / s.sum()
        close(got[row], torch.exp(-(p * p.log()).sum()))


def test_erank_of_known_matrices() -> None:
    def erank(x: Tensor, **options: Any) -> float:
        ctx = make_context(1, len(x), hidden=x.unsqueeze(0))
        return float(ctx.number(Quantity(build("statistic", {"name": "erank", **options}))))

    assert erank(torch.eye(16)) == pytest.approx(15, abs=1e-4)
    assert erank(torch.outer(torch.arange(1.0, 17), torch.ones(4))) == pytest.approx(1, abs=1e-5)
    x = torch.tensor([[4.0, 0, 0], [4, 1, 0], [0, 4, 0], [0, 4, 1], [0, 0, 4], [3, 3, 0], [1, 0, 4], [2, 2, 2]])
    assert erank(x) == pytest.approx(2.57937, abs=5e-5)  # null eigenvalues count a little in that number
    many = torch.randn(300, 8, generator=torch.Generator().manual_seed(0))
    assert erank(many, max_tokens=100) == pytest.approx(erank(many[torch.arange(100) * 3 + 1]), abs=1e-5)


def test_entropy_and_similarity_by_hand() -> None:
    ctx = given((24, 7))
    entropy = ctx.number(Quantity(build("statistic", {"name": "entropy", "scorer": "attention"})))
    flat = ctx.number(Quantity(build("statistic", {"name": "entropy", "scorer": "attention", "normalise": True})))
    similar = ctx.number(Quantity(build("statistic", "mean_similarity")))
    scores = ctx.score(build("scorer", "attention")).double()
    for row, n in enumerate((24, 7)):
        p = (scores[row, :n] / scores[row, :n].sum()).tolist()
        expected = -sum(v * math.log(v) for v in p)
        close(entropy[row], expected)
        close(flat[row], expected / math.log(n))
        x = torch.nn.functional.normalize(ctx.signals[Signal("hidden")][row, :n].double(), dim=1)
        pairs = [float(x[i] @ x[j]) for i in range(n) for j in range(n) if i != j]
        close(similar[row], sum(pairs) / len(pairs))


def test_outliers_by_sorting() -> None:
    def percentile(x: list[float], q: float) -> float:
        at = q * (len(x) - 1)
        low = math.floor(at)
        return x[low] + (x[min(low + 1, len(x) - 1)] - x[low]) * (at - low)

    counts = (24, 9, 4)
    hidden = torch.rand(3, 24, 1, generator=torch.Generator().manual_seed(1))
    hidden[:, ::4] *= 9
    ctx = make_context(3, 24, counts=counts, hidden=hidden)
    found = {
        give: ctx.number(Quantity(build("statistic", {"name": "outlier_ratio", "scorer": "hidden_norm", "give": give})))
        for give in ("ratio", "count", "every")
    }
    selector = build("selector", {"name": "threshold", "of": "outlier", "above": 1.5, "min_tokens": 0})
    kept = select_exactly(
        selector, torch.tensor(counts), replace(ctx, scores=ctx.score(build("scorer", "hidden_norm"))), exact=False
    )
    outliers = []
    for row, n in enumerate(counts):
        x = hidden[row, :n, 0].double().tolist()
        low, high = (percentile(sorted(x), q) for q in (0.25, 0.75))
        out = [v > high + 1.5 * (high - low) for v in x]
        outliers.append(sum(out))
        assert kept[row, :n].tolist() == out
        close(found["count"][row], sum(out))
        close(found["ratio"][row], sum(out) / n)
        close(found["every"][row], n / max(sum(out), 1))
    assert len(set(outliers)) > 1


def test_rank_is_that_of_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    low = torch.randn(2, 24, 5, generator=generator) @ torch.randn(2, 5, 16, generator=generator)
    ctx = given((24, 3), hidden=low)
    assert ctx.number(Quantity(build("statistic", "rank"))).tolist() == [5, 3]
    attention = ctx.signals[Signal("attention", query="text")].probabilities.mean(dim=1)
    expected = [int(torch.linalg.matrix_rank(attention[row, :, :n])) for row, n in enumerate((24, 3))]
    assert (
        ctx.number(Quantity(build("statistic", {"name": "rank", "of": "attention", "query": "text"}))).tolist()
        == expected
    )


# ---- selectors -------------------------------------------------------------------------------------------------------


def chosen(data: Any, ctx: PruneContext, keep: tuple[int, ...]) -> list[set[int]]:
    selector = build("selector", data)
    kept = select_exactly(selector, torch.tensor(keep), ctx, exact=not selector.counts_itself)
    return [set(row.nonzero().squeeze(1).tolist()) for row in kept]


def best(scores: list[float], among: set[int], k: int) -> set[int]:
    return set(sorted(among, key=lambda i: (-scores[i], i))[:k])


@pytest.mark.parametrize("rounding", ["floor", "half_even", "half_up", "ceil"])
def test_parts_of_a_union_choose_in_turn_among_the_rest(rounding: str) -> None:
    ctx = scored(given((24, 7)))
    other = ctx.score(build("scorer", "hidden_norm"))
    assert ctx.scores is not None
    rounded: dict[str, Callable[[float], int]] = {
        "floor": math.floor, "half_even": round, "half_up": lambda x: math.floor(x + 0.5), "ceil": math.ceil,
    }  # fmt: skip
    data = {"name": "union", "parts": [{"share": 0.5, "rounding": rounding}, {"tokens": 1}, {"scorer": "hidden_norm"}]}
    for row, (got, n, keep) in enumerate(zip(chosen(data, ctx, (9, 5)), (24, 7), (9, 5), strict=True)):
        own, others = ctx.scores[row].tolist(), other[row].tolist()
        first = best(own, set(range(n)), rounded[rounding](keep / 2) + 1)
        assert got == first | best(others, set(range(n)) - first, keep - len(first))
        assert len(got) == keep


def test_a_part_may_be_shared_equally_over_windows() -> None:
    """VScan: half the budget over the windows, rounded down, the rest over all."""
    ctx = scored(given((24, 15)))
    assert ctx.scores is not None
    windows = {"name": "window", "rows": 3, "columns": 2}
    data = {"name": "union", "parts": [{"share": 0.5, "per": windows}, {"scorer": "hidden_norm"}]}
    other = ctx.score(build("scorer", "hidden_norm"))
    for row, (got, n) in enumerate(zip(chosen(data, ctx, (13, 13)), (24, 15), strict=True)):
        own = ctx.scores[row].tolist()
        groups: dict[tuple[int, int], set[int]] = {}
        for i in range(n):
            groups.setdefault((i // 12, i % 4 // 2), set()).add(i)
        first = set().union(*(best(own, group, 6 // len(groups)) for group in groups.values()))
        assert got == first | best(other[row].tolist(), set(range(n)) - first, 13 - len(first))


def test_a_union_that_takes_no_rest_keeps_all_it_finds() -> None:
    """FEATHER: the best 30 % and a grid, however many that are; with a budget it is exact."""
    data = {"name": "union", "parts": [{"share": 0.3}, {"selector": {"name": "grid", "step": 2}}]}
    stage = {"at": "llm.layers.8", "scorer": "hidden_norm", "selector": data}
    ctx = given((24, 15))
    hidden = ctx.signals[Signal("hidden")]
    (free,) = Policy.load({"stages": [stage]}).stages
    made = decide(free, ctx, original=torch.tensor([24, 15]))
    for row, n in enumerate((24, 15)):
        norms = hidden[row, :n].norm(dim=1).tolist()
        grid = {i for i in range(n) if i % 12 // 4 % 2 == 0 and i % 4 % 2 == 0}
        assert set(made.kept[row].nonzero().squeeze(1).tolist()) == grid | best(norms, set(range(n)), int(n * 0.3))
    (exact,) = Policy.load({"stages": [{**stage, "budget": {"keep_tokens": 6}}]}).stages
    assert decide(exact, ctx, original=torch.tensor([24, 15])).counts == (6, 6)


def test_a_part_that_finds_too_many_keeps_the_best_of_them() -> None:
    ctx = scored(given((24,)))
    assert ctx.scores is not None
    data = {"name": "union", "parts": [{"tokens": 2}, {"selector": "every", "scorer": "hidden_norm"}, {}]}
    norms = ctx.score(build("scorer", "hidden_norm"))[0].tolist()
    first = best(ctx.scores[0].tolist(), set(range(24)), 2)
    assert chosen(data, ctx, (5,)) == [first | best(norms, set(range(0, 24, 3)) - first, 3)]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"name": "union", "parts": []}, "at least one"),
        ({"name": "union", "parts": [{}, {"share": 0.5}]}, "only the last part"),
        ({"name": "union", "parts": [{"share": 0.5, "tokens": 3}]}, "not both"),
        ({"name": "union", "parts": [{"share": 1.5}]}, r"in \[0, 1\]"),
        ({"name": "union", "parts": [{"tokens": 1.5}]}, "number of tokens"),
        ({"name": "dilate", "neighbours": 5}, "4 or 8"),
        ({"name": "dilate", "neighbours": 8, "compat": "official"}, "has 4 neighbours"),
        ({"name": "grid", "step": 2, "offset": 2}, "below the step"),
        ({"name": "every", "step": 0.5}, "at least 1"),
        ({"name": "cumulative", "mass": 2.0}, r"in \[0, 1\]"),
    ],
)
def test_wrong_options_of_selectors_are_refused(data: Any, message: str) -> None:
    with pytest.raises(Faults, match=message):
        build("selector", data)


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("scorer", {"name": "blend", "parts": []}),
        ("scorer", {"name": "blend", "parts": [{"scorer": "uniform", "normalise": "best"}]}),
        ("scorer", {"name": "product", "parts": [{"scorer": "uniform", "weight": 1.0}]}),
        ("scorer", {"name": "hidden_norm", "p": 3}),
        ("scorer", {"name": "anchor_similarity", "channels": 0.0}),
        ("scorer", {"name": "anchor_similarity", "bandwidths": [0.0]}),
        ("scorer", {"name": "learned", "file": ""}),
        ("statistic", {"name": "rank", "of": "attention", "from": "vision.output"}),
        ("statistic", {"name": "erank", "max_tokens": 1}),
        ("statistic", "entropy"),
    ],
)
def test_wrong_options_are_refused(kind: str, data: Any) -> None:
    with pytest.raises(Faults):
        build(kind, data)


def test_reserve_takes_the_lowest_of_every_cell_in_turn() -> None:
    ctx = scored(given((24, 15)))
    assert ctx.scores is not None
    data = {"name": "reserve", "share": 0.6, "over": {"name": "window", "rows": 3, "columns": 2}}
    for row, (got, n) in enumerate(zip(chosen(data, ctx, (10, 10)), (24, 15), strict=True)):
        scores = ctx.scores[row].tolist()
        kept = best(scores, set(range(n)), 4)
        cells: dict[tuple[int, int], list[int]] = {}
        for i in sorted(set(range(n)) - kept, key=lambda i: (scores[i], i)):
            cells.setdefault((i // 12, i % 4 // 2), []).append(i)
        turns = [(turn, scores[i], i) for cell in cells.values() for turn, i in enumerate(cell)]
        assert got == kept | {i for _, _, i in sorted(turns)[:6]}


@pytest.mark.parametrize(("of", "above"), [("mean", 1.2), ("max", 0.5), ("sum", 0.1), ("one", 0.4)])
def test_threshold_by_hand(of: str, above: float) -> None:
    ctx = scored(given((24, 7, 1)))
    assert ctx.scores is not None
    for row, (got, n) in enumerate(
        zip(chosen({"name": "threshold", "of": of, "above": above}, ctx, (24, 7, 1)), (24, 7, 1), strict=True)
    ):
        x = ctx.scores[row, :n].double().tolist()
        bound = above * {"mean": sum(x) / n, "max": max(x), "sum": sum(x), "one": 1.0}[of]
        assert got == ({i for i in range(n) if x[i] > bound} or best(x, set(range(n)), 1))


def test_cumulative_keeps_the_fewest_that_make_up_the_mass() -> None:
    ctx = scored(given((24, 7)))
    assert ctx.scores is not None
    for mass in (0.0, 0.25, 0.9, 1.0):
        for row, (got, n) in enumerate(
            zip(chosen({"name": "cumulative", "mass": mass}, ctx, (24, 7)), (24, 7), strict=True)
        ):
            x = ctx.scores[row, :n].double().tolist()
            k = next(k for k in range(n + 1) if sum(sorted(x)[::-1][:k]) >= mass * sum(x) * (1 - 1e-6))
            assert got == best(x, set(range(n)), max(k, 1))


@pytest.mark.parametrize("neighbours", [4, 8])
@pytest.mark.parametrize("compat", ["clean", "official"])
def test_dilate_adds_neighbours_of_the_same_frame(neighbours: int, compat: str) -> None:
    if (neighbours, compat) == (8, "official"):
        return
    ctx = scored(given((24, 15)))
    assert ctx.scores is not None
    data = {"name": "dilate", "neighbours": neighbours, "compat": compat}
    for row, (got, n) in enumerate(zip(chosen(data, ctx, (3, 2)), (24, 15), strict=True)):
        seeds = best(ctx.scores[row].tolist(), set(range(n)), (3, 2)[row])
        near = set()
        for i in seeds:
            f, r, c = i // 12, i % 12 // 4, i % 4
            if compat == "official":
                near |= {min(max(i + step, 0), 23) for step in (-1, 1, -4, 4)}
                continue
            for dr, dc in product((-1, 0, 1), repeat=2):
                if (neighbours == 8 or 0 in (dr, dc)) and 0 <= r + dr < 3 and 0 <= c + dc < 4:
                    near.add(12 * f + 4 * (r + dr) + c + dc)
        assert got == (seeds | near) & set(range(n))


def test_dilate_finds_no_neighbour_that_has_left() -> None:
    at = context((24,)).signals[Signal("layout")].map(lambda x: x[:, [0, 5, 6, 11]])
    ctx = replace(make_context(1, 4, layout=at), scores=torch.tensor([[0.0, 0.1, 0.9, 0.2]]))
    assert chosen({"name": "dilate"}, ctx, (1,)) == [{1, 2}]  # token 6 has 5 beside it; 2, 7 and 10 have left


def test_position_selectors_by_hand() -> None:
    ctx = scored(given((24, 15)))
    for step, offset in ((1, 0), (2, 0), (2, 1), (3, "centre")):
        first = step // 2 if offset == "centre" else offset
        for got, n in zip(
            chosen({"name": "grid", "step": step, "offset": offset}, ctx, (24, 15)), (24, 15), strict=True
        ):
            assert got == {i for i in range(n) if i % 12 // 4 % step == first and i % 4 % step == first}
    assert chosen({"name": "every", "step": 7}, ctx, (24, 15)) == [{0, 7, 14, 21}, {0, 7, 14}]
    official = {"name": "every", "step": 7, "compat": "official"}
    assert chosen(official, ctx, (24, 15)) == [{0, 7, 14, 21}, {0, 7}]  # 14 is the last of 15
    assert chosen({"name": "every", "step": {"statistic": "count", "over": 8.0}}, ctx, (24, 15))[0] == set(
        range(0, 24, 3)
    )


# ---- policies --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["vscan", "flowcut", "holov", "hiprune-plus", "hired", "attention-only"])
@pytest.mark.parametrize("k", [192, 128, 64])
def test_first_stages_leave_what_they_say(name: str, k: int) -> None:
    stage = Policy.load(f"{name}-{k}").stages[0]
    assert stage.budget is not None
    n = 576
    ctx = make_context(1, n, 8, grid=(1, 24, 24), attention=GivenAttention(torch.rand(1, 2, 3, n)))
    made = decide(stage, ctx, original=torch.tensor([n]), hidden=ctx.signals[Signal("hidden")])
    assert made.counts == (stage.budget.keep_tokens,)


def test_vscan_averages_what_it_says() -> None:
    for k in (192, 128, 64):
        first, second = (stage.budget for stage in Policy.load(f"vscan-{k}").stages)
        assert first is not None and second is not None
        assert (first.keep_tokens + second.keep_tokens) / 2 == k  # type: ignore[operator]


@pytest.mark.parametrize(("k", "size"), [(144, 2), (64, 3)])
def test_downsampling_is_average_pooling(k: int, size: int) -> None:
    (stage,) = Policy.load(f"downsample-{k}").stages
    hidden = torch.randn(1, 576, 8, generator=torch.Generator().manual_seed(0))
    made = decide(
        stage, make_context(1, 576, 8, grid=(1, 24, 24), hidden=hidden), original=torch.tensor([576]), hidden=hidden
    )
    pooled = torch.nn.functional.avg_pool2d(hidden[0].T.reshape(1, 8, 24, 24), size)
    assert made.counts == (k,) and made.states is not None
    close(made.states[made.kept], pooled[0].flatten(1).T)
