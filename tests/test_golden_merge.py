"""Methods that merge: their policies against the numbers of the authors' own code."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from golden_files import cases
from tokenprune_scorers._clusters import compact, distances, nearest, take
from torch import Tensor

from tokenprune.components import build
from tokenprune.decision import Decision, decide
from tokenprune.interfaces import AttentionRows, GivenAttention, Paired, PruneContext, Text
from tokenprune.policy import Policy, Stage
from tokenprune.testing import make_context

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def stage(policy: str, number: int = 0, **changes: Any) -> Stage:
    """Return a stage of a shipped policy, with values changed at dotted places (`selector__parts__0__tokens`)."""
    data = deepcopy(Policy.load(policy).to_dict())
    for place, value in changes.items():
        *way, last = (int(step) if step.isdigit() else step for step in place.split("__"))
        at = data["stages"][number]
        for step in way:
            at = at[step]
        at[last] = value
    return Policy.load(data).stages[number]


def run(part: Stage, ctx: PruneContext, hidden: Tensor) -> Decision:
    return decide(part, ctx, original=ctx.valid.sum(dim=1), hidden=hidden.unsqueeze(0))


def places(mask: Tensor) -> Tensor:
    return mask[0].nonzero().squeeze(1)


def test_changes_reach_the_stage() -> None:
    changed = stage("visionzip-64", budget__keep_tokens=9, selector__parts__0__tokens=5, merger__targets__after=5)
    assert (
        changed.budget.keep_tokens == 9 and changed.selector.parts[0].tokens == 5 and changed.merger.targets.after == 5
    )


@pytest.mark.parametrize(("hyper", "given"), cases("visionzip"))
def test_visionzip(hyper: dict[str, Any], given: dict[str, Tensor]) -> None:
    # The golden file has the CLS token among the tokens and always keeps it; here it gets the highest score.
    dominant = hyper["dominant"] + 1
    attention = given["attn_cls"].clone()
    attention[:, 0] = 1e3
    n = attention.shape[1]
    ctx = make_context(
        1, n, attention=GivenAttention(attention[None, :, None]), keys=given["keys"].transpose(0, 1).unsqueeze(0)
    )
    part = stage(
        "visionzip-64",
        budget__keep_tokens=dominant + hyper["contextual"],
        selector__parts__0__tokens=dominant,
        merger__targets__after=dominant,
    )
    made = run(part, ctx, given["hidden"])
    torch.testing.assert_close(made.scores[0, 1:], given["expected/scores"], **CLOSE)
    best, contextual = given["expected/dominant_index_with_cls"], given["expected/contextual_target_index_with_cls"]
    assert torch.equal(places(made.kept), torch.cat([best, contextual]).sort().values)
    torch.testing.assert_close(made.states[0, torch.cat([best, contextual])], given["expected/tokens_out"], **CLOSE)

    x = part.merger.compared(ctx)
    able = part.merger._able(replace(ctx, scores=made.scores)) & made.kept
    assert torch.equal(places(able), contextual)
    index, there = compact(able)
    owner = nearest(distances(x, take(x, index), part.merger.metric), there)[0]
    assert torch.equal(owner[0, places(~made.kept)], given["expected/assignment"])


@pytest.mark.parametrize("place", ["append", "in_order"])
@pytest.mark.parametrize(("hyper", "given"), [*cases("prumerge"), *cases("prumerge_plus")])
def test_prumerge(hyper: dict[str, Any], given: dict[str, Tensor], place: str) -> None:
    q, k, hidden = given["q"], given["k"], given["hidden"]
    n, width = hyper["num_patches"], hidden.shape[1]
    rows = AttentionRows(
        q[None, None, :1],
        k[None, None],
        None,
        torch.arange(1, n + 1)[None],
        torch.ones(1, 1, dtype=torch.bool),
        width**-0.5,
    )
    ctx = make_context(1, n, attention=rows, keys=k[None, 1:, None])
    changes: dict[str, Any] = {
        "merger__mergers__0__neighbours": hyper["neighbours"],
        "merger__mergers__1__place": place,
    }
    if not hyper["adaptive"]:
        changes["budget"] = {"keep_ratio": hyper["reduction_ratio"], "per": "image"}
    part = stage("prumerge-plus" if hyper["plus"] else "prumerge", **changes)
    made = run(part, ctx, hidden[1:])
    torch.testing.assert_close(made.scores[0], given["expected/cls_attention"], **CLOSE)
    if hyper["adaptive"]:
        number = part.selector.parts[0].tokens if hyper["plus"] else part.budget.keep_tokens
        count = number.of(replace(ctx, scores=made.scores))
        torch.testing.assert_close(count / n, given["expected/outlier_ratio"], **CLOSE)
    order, out = given["expected/kept_index_output_order"], given["expected/tokens_out"]
    assert torch.equal(places(made.selected), given["expected/kept_index"])
    assert int(made.kept.sum()) == len(out)
    states = made.states[0, made.kept[0]]
    extra = len(out) - 1
    if place == "append":
        assert torch.equal(places(made.kept), torch.arange(len(out)))
    else:
        last = int(places(~made.selected)[-1])
        extra = int(made.kept[0, :last].sum())
        assert torch.equal(places(made.kept & ~made.selected), torch.tensor([last]))
    torch.testing.assert_close(states[extra], out[-1], **CLOSE)
    others = torch.arange(len(out)) != extra
    torch.testing.assert_close(states[others], out[:-1][order.argsort()], **CLOSE)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(("hyper", "given"), cases("tome"))
def test_tome(hyper: dict[str, Any], given: dict[str, Tensor], weighted: bool) -> None:
    # A CLS token is number 0 and always a source, and never leaves: without it the split begins with a target.
    first = int(hyper["class_token"])
    metric, tokens = given["metric"][first:], given["tokens"][first:]
    n = len(tokens)
    leave = min(hyper["r"], hyper["num_tokens"] // 2 if not first else (hyper["num_tokens"] - 1) // 2)
    part = stage(
        "tome-192",
        budget__keep_tokens=n - leave,
        selector__sources="odd" if first else "even",
        merger__targets="even" if first else "odd",
        merger__by_size=weighted,
    )
    sizes = given["size"][None, first:] if "size" in given else None
    ctx = replace(make_context(1, n, keys=metric[None, :, None]), sizes=sizes)
    made = run(part, ctx, tokens)
    group = given["expected/group_of_token"]
    kept = places(made.kept)
    own = group[first:][kept]
    assert torch.equal(torch.cat([group[:first], own]).sort().values, torch.arange(len(given["expected/tokens_out"])))
    expected = given["expected/tokens_out" if weighted else "expected/tokens_plain_mean"]
    torch.testing.assert_close(made.states[0, kept], expected[own], **CLOSE)
    torch.testing.assert_close(made.sizes[0, kept], given["expected/size_out"][own], **CLOSE)
    if first:
        torch.testing.assert_close(given["tokens"][0], expected[group[0]], **CLOSE)


@pytest.mark.parametrize(("hyper", "given"), cases("trim"))
def test_trim(hyper: dict[str, Any], given: dict[str, Tensor]) -> None:
    x = given["tokens"]
    normed = torch.nn.functional.layer_norm(x, x.shape[1:], given["ln_weight"], given["ln_bias"], 1e-5)
    pair = Paired(
        (normed @ given["w_proj"].T)[None], given["text_feature"][None, None], torch.ones(1, 1, dtype=torch.bool)
    )
    changes = {"merger": {"name": "residual", "place": "append"}}
    if hyper["ratio"] != -1:
        changes["budget"] = {"keep_ratio": hyper["ratio"], "per": "image"}
    made = run(stage("trim", **changes), make_context(1, len(x), paired=pair), x)
    torch.testing.assert_close(made.scores[0], given["expected/similarity"], **CLOSE)
    assert torch.equal(places(made.selected), given["expected/kept_index"])
    assert int(made.selected.sum()) == int(given["expected/num_kept"])
    torch.testing.assert_close(made.states[0, made.kept[0]], given["expected/tokens_out"], **CLOSE)


@pytest.mark.parametrize(("hyper", "given"), cases("pact"))
def test_pact(hyper: dict[str, Any], given: dict[str, Tensor]) -> None:
    start, n, total = hyper["vision_start"], hyper["vision_len"], len(given["hidden"])
    end, width = start + n, hyper["head_dim"]

    def heads(x: Tensor, count: int) -> Tensor:
        return x.view(1, total, count, width).transpose(1, 2)

    causal = torch.full((total, total), torch.finfo(torch.float32).min).triu(1)
    rows = AttentionRows(
        queries=heads(given["q_no_rope"], hyper["heads"])[:, :, :end],
        keys=heads(given["k_no_rope"], hyper["kv_heads"]),
        bias=causal[None, None, :end],
        columns=torch.arange(start, end)[None],
        rows_valid=torch.ones(1, end, dtype=torch.bool),
        scaling=width**-0.5,
    )
    hidden = given["hidden"][start:end]
    keys = given["k_rope"][start:end].view(1, n, hyper["kv_heads"], width)
    ctx = make_context(1, n, hidden=hidden[None], attention=rows, keys=keys)
    part = stage(
        "pact",
        selector__among={"until": hyper["keep_ratio"]},
        selector__cutoff=hyper["cutoff"],
        selector__bandwidth=hyper["density_bandwidth"],
        merger__within=hyper["cutoff"] * hyper["coef_pruned"],
    )
    made = run(part, ctx, hidden)
    torch.testing.assert_close(made.scores[0], given["expected/scores"], **CLOSE)
    scored = replace(ctx, scores=made.scores)
    assert torch.equal(places(part.selector.among.of(scored)), given["expected/unpruned_index"])
    assert torch.equal(places(made.kept), given["expected/center_index"])
    torch.testing.assert_close(made.states[0, made.kept[0]], given["expected/tokens_out"], **CLOSE)
    torch.testing.assert_close(made.sizes[0, made.kept[0]], given["expected/cluster_size"], **CLOSE)
    x = part.merger.compared(ctx)
    index, there = compact(made.kept)
    owner, gap = nearest(distances(x, take(x, index), part.merger.metric), there)
    owner = index.gather(1, owner)[0].masked_fill(gap[0] > part.merger.within, -1)
    assert torch.equal(owner, given["expected/center_of_token"])


@pytest.mark.parametrize(("hyper", "given"), cases("tokencarve"))
def test_tokencarve(hyper: dict[str, Any], given: dict[str, Tensor]) -> None:
    start, n, among = hyper["vision_start"], hyper["vision_len"], hyper["rank"]
    hidden = given["hidden"][start : start + n]
    attention = GivenAttention(given["attn_last_row"][None, :, None, start : start + n])
    weight = hyper["attention_weight"]
    changes: dict[str, Any] = {
        "budget__keep_tokens": among - hyper["merge"],
        "selector__among__until": among,
        "merger__sources__until": among,
        "merger__targets__until": among // 2,
    }
    if hyper["mode"] == 0:
        changes |= {"scorer__parts__0__weight": weight, "scorer__parts__1__weight": 1.0 - weight}
    else:
        changes["scorer"] = {1: "leverage", 2: "attention"}[hyper["mode"]]
    part = stage("tokencarve-64", **changes)
    ctx = make_context(1, n, hidden=hidden[None], attention=attention)
    for name, word in (("attention_score", "attention"), ("svd_score", "leverage")):
        torch.testing.assert_close(ctx.score(build("scorer", word))[0], given[f"expected/{name}"], **CLOSE)
    made = run(part, ctx, hidden)
    scored = replace(ctx, scores=made.scores)
    assert torch.equal(places(part.merger.targets.of(scored)), given["expected/set_A_index"])
    assert torch.equal(places(made.kept), given["expected/kept_vision_index"])
    out = torch.cat([given["hidden"][:start], made.states[0, made.kept[0]], given["hidden"][start + n :]])
    torch.testing.assert_close(out, given["expected/sequence_out"], **CLOSE)


@pytest.mark.parametrize("place", ["append", "in_order"])
@pytest.mark.parametrize(("hyper", "given"), cases("sparsevlm"))
def test_sparsevlm_recycles(hyper: dict[str, Any], given: dict[str, Tensor], place: str) -> None:
    n, words = len(given["vision_embeds"]), len(given["text_embeds"])
    everywhere = torch.ones(1, words, dtype=torch.bool)
    ctx = make_context(
        1,
        n,
        hidden=given["vision_embeds"][None],
        text_hidden=Text(given["text_embeds"][None], everywhere, everywhere),
        attention=GivenAttention(given["attn_text_to_vision"][None]),
    )
    kept_index = given["expected/kept_vision_index"]
    part = stage("sparsevlm-192", budget__keep_tokens=len(kept_index), merger={"name": "recycle", "place": place})
    made = run(part, ctx, given["hidden_vision"])
    torch.testing.assert_close(made.scores[0], given["expected/scores"], **CLOSE)
    assert torch.equal(places(made.selected), kept_index)
    back, clusters = part.merger._numbers((~made.selected).sum(dim=1))
    assert int(clusters) == int(given["expected/cluster_count"])
    left = made.scores[0].masked_fill(made.selected[0], -torch.inf)
    best = left.argsort(descending=True, stable=True)[: int(back)].sort().values
    assert torch.equal(best, given["expected/recycled_vision_index"])
    merged, block = given["expected/merged_tokens"], given["expected/vision_block_after"]
    states = made.states[0, made.kept[0]]
    if place == "append":
        assert torch.equal(places(made.kept), torch.arange(len(block)))
        torch.testing.assert_close(states, block, **CLOSE)
        return
    extra = made.kept[0] & ~made.selected[0]
    assert set(extra.nonzero().squeeze(1).tolist()) <= set(best.tolist())
    torch.testing.assert_close(made.states[0, made.selected[0]], block[: len(kept_index)], **CLOSE)
    found = made.states[0, extra]
    pairs = torch.cdist(found, merged).argmin(dim=1)  # the means in raster order of their centres
    assert torch.equal(pairs.sort().values, torch.arange(len(merged)))
    torch.testing.assert_close(found, merged[pairs], **CLOSE)
