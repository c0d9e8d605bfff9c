"""Methods that rank by attention of the encoder, against numbers of their authors' code."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from golden_files import cases
from tokenprune_scorers.union import Union
from torch import Tensor
from torch.nn.functional import layer_norm

from tokenprune.decision import Decision, decide, select_exactly
from tokenprune.groupings import Chunk
from tokenprune.interfaces import GivenAttention, Paired, PruneContext
from tokenprune.policy import Policy, Stage
from tokenprune.testing import Signals, make_context
from tokenprune.tokens import Signal, Site


def stage_of(name: str, **overrides: Any) -> Stage:
    """Return the only stage of a shipped policy; `__` in a key stands for the dot."""
    query = "&".join(f"{key.replace('__', '.')}={value}" for key, value in overrides.items())
    (stage,) = Policy.load(f"{name}?{query}").stages
    return stage


def rows(probabilities: Tensor) -> GivenAttention:
    """Return the attention of one prompt from [H, R, N]."""
    return GivenAttention(probabilities.unsqueeze(0))


def decided(stage: Stage, ctx: PruneContext, hidden: Tensor | None = None) -> Decision:
    return decide(stage, ctx, original=ctx.valid.sum(dim=1), hidden=hidden)


def index(kept: Tensor) -> Tensor:
    return kept[0].nonzero().squeeze(1)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("hyper", "given"), cases("fastervlm"))
def test_fastervlm(hyper: dict[str, Any], given: dict[str, Tensor]) -> None:
    stage = stage_of("fastervlm-64", budget__keep_tokens=hyper["k"])
    made = decided(stage, make_context(1, hyper["num_tokens"], attention=rows(given["cls_attention"].unsqueeze(1))))
    assert made.scores is not None
    close(made.scores[0], given["expected/scores"])
    assert torch.equal(index(made.kept), given["expected/kept_index"])


@pytest.mark.parametrize(("hyper", "given"), cases("holov"))
def test_holov_as_released(hyper: dict[str, Any], given: dict[str, Tensor]) -> None:
    k, n, chunks = hyper["k"], hyper["num_tokens"], hyper["chunks"]
    stage = stage_of("holov-code-64", budget__keep_tokens=k, budget__quota__over__count=chunks)
    hidden = given["tokens"].unsqueeze(0)
    ctx = make_context(1, n, hidden=hidden, attention=rows(given["cls_attention"][None, None]))
    made = decided(stage, ctx, hidden)
    assert torch.equal(index(made.kept), given["expected/kept_index"])
    assert k - made.counts[0] == int(given["expected/num_padding"])

    # Their output is chunk by chunk, inside one by attention unless all of it stays; zero rows stand for what was lost.
    assert made.scores is not None
    group = ctx.grouped(Chunk(chunks))
    kept, scores, places = (group.cut(x) for x in (made.kept, made.scores, torch.arange(n).unsqueeze(0)))
    order: list[int] = []
    for chosen, score, place, valid in zip(kept, scores, places, group.valid, strict=True):
        whole = bool((chosen | ~valid).all())
        by = (
            place[chosen & valid]
            if whole
            else place[
                (chosen & valid).nonzero().squeeze(1)[score[chosen & valid].argsort(descending=True, stable=True)]
            ]
        )
        order += by.tolist()
    order += [-1] * (k - len(order))
    assert order == given["expected/kept_index_output_order"].tolist()
    padded = torch.cat([given["tokens"], torch.zeros_like(given["tokens"][:1])])
    close(padded[order], given["expected/tokens_out"])


@pytest.mark.parametrize(("hyper", "given"), cases("hiprune"))
def test_hiprune(hyper: dict[str, Any], given: dict[str, Tensor]) -> None:
    n, width = hyper["num_patches"], hyper["grid_width"]
    stage = stage_of(
        "hiprune-64",
        budget__keep_tokens=hyper["k"],
        selector__parts__0__share=hyper["alpha"] / 5,
        selector__parts__0__selector__compat="official",
    )
    deep, shallow = (
        Signal("attention", at=Site(site), query="all") for site in ("vision.layers.-2", "vision.layers.8")
    )
    ctx = make_context(1, n, grid=(1, n // width, width))
    assert isinstance(ctx.signals, Signals)
    # The first column is the CLS token, which our towers keep out.
    attentions = {deep: rows(given["attn_deep"][..., 1:]), shallow: rows(given["attn_shallow"][..., 1:])}
    ctx = replace(ctx, signals=Signals({**ctx.signals.values_by, **attentions}))
    made = decided(stage, ctx)
    assert made.scores is not None
    close(made.scores[0], given["expected/received_deep"])
    assert torch.equal(index(made.kept), given["expected/kept_index"])

    assert isinstance(stage.selector, Union)
    anchors, _ = stage.selector.parts
    assert anchors.scorer is not None
    received = ctx.score(anchors.scorer)
    close(received[0], given["expected/received_shallow"])
    seeds = anchors.count(ctx, torch.tensor([hyper["k"]]))
    found = select_exactly(anchors.selector, seeds, replace(ctx, scores=received), exact=False)
    assert torch.equal(index(found), given["expected/anchor_and_buffer_index"])


@pytest.mark.parametrize(("hyper", "given"), cases("trim"))
def test_trim(hyper: dict[str, Any], given: dict[str, Tensor]) -> None:
    tokens, n = given["tokens"], hyper["num_tokens"]
    patches = layer_norm(tokens, tokens.shape[-1:], given["ln_weight"], given["ln_bias"], 1e-5) @ given["w_proj"].T
    stage = stage_of("trim")
    if hyper["ratio"] != -1:
        budget = {"keep_ratio": hyper["ratio"], "per": "image"}
        policy = Policy.load("trim").to_dict()
        (stage,) = Policy.load({**policy, "stages": [{**policy["stages"][0], "budget": budget}]}).stages
    words = Paired(patches.unsqueeze(0), given["text_feature"][None, None], torch.ones(1, 1, dtype=torch.bool))
    hidden = tokens.unsqueeze(0)
    made = decided(stage, make_context(1, n, hidden=hidden, paired=words), hidden)
    assert made.scores is not None and made.states is not None
    close(made.scores[0], given["expected/similarity"])
    assert torch.equal(index(made.selected), given["expected/kept_index"])
    assert int(made.selected.sum()) == int(given["expected/num_kept"])
    extra = index(made.kept & ~made.selected)
    close(made.states[0, torch.cat([index(made.selected), extra])], given["expected/tokens_out"])
