"""Video methods, against numbers of their authors' code."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from golden_files import cases
from torch import Tensor

from tokenprune.budget import Budget
from tokenprune.decision import Decision, decide
from tokenprune.interfaces import GivenAttention, PruneContext, Quantity, Statistic
from tokenprune.policy import Policy, Stage
from tokenprune.testing import Signals, make_context
from tokenprune.tokens import Signal, Site


def stages(name: str, **overrides: Any) -> tuple[Stage, ...]:
    """Return the stages of a shipped policy; `__` in a key stands for the dot."""
    written = "&".join(f"{key.replace('__', '.')}={value}" for key, value in overrides.items())
    return Policy.load(f"{name}?{written}").stages


def clip(video: Tensor, grid: tuple[int, int, int], **signals: Any) -> PruneContext:
    """Return the context of one prompt that shows one clip."""
    return make_context(1, len(video), grid=grid, hidden=video.unsqueeze(0), **signals)


def run(stage: Stage, ctx: PruneContext) -> Decision:
    return decide(stage, ctx, original=ctx.valid.sum(dim=1), hidden=ctx.read(Signal("hidden")))


def index(kept: Tensor) -> list[int]:
    return kept[0].nonzero().flatten().tolist()


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def after(ctx: PruneContext, made: Decision) -> PruneContext:
    """Return the context of what one prompt has left, for a next stage at the same site."""
    kept = made.kept[0].nonzero().flatten()
    cut = lambda x: x[:, kept]  # noqa: E731
    states = made.states if made.states is not None else ctx.read(Signal("hidden"))
    signals = Signals({"hidden": cut(states), "layout": ctx.read(Signal("layout")).map(cut)})
    sizes = None if made.sizes is None else cut(made.sizes)
    return replace(ctx, valid=cut(ctx.valid), ordinal=cut(ctx.ordinal), sizes=sizes, signals=signals)


@pytest.mark.parametrize(("hyper", "given"), cases("evs"))
def test_evs(hyper: dict[str, Any], given: dict[str, Tensor]) -> None:
    frames, tokens, rate = hyper["num_frames"], hyper["tokens_per_frame"], hyper["pruning_rate"]
    # The reference floors a product of binary numbers; half a token more says the same in any arithmetic.
    least = (int(frames * tokens * (1 - rate)) + 0.5) / (frames * tokens)
    (stage,) = stages("evs-50", budget__keep_ratio__min=least)
    made = run(stage, clip(given["video"], (frames, 1, tokens)))
    assert index(made.kept) == given["expected/kept_index"].tolist()
    assert made.counts == (int(given["expected/num_kept"]),)
    assert made.kept.view(frames, tokens).sum(dim=1).tolist() == given["expected/kept_per_frame"].tolist()


@pytest.mark.parametrize(("hyper", "given"), cases("dycoke_ttm"))
def test_dycoke_ttm(hyper: dict[str, Any], given: dict[str, Tensor]) -> None:
    frames, tokens = hyper["num_frames"], hyper["tokens_per_frame"]
    share = (int((1 - hyper["merging_ratio"]) * tokens) + 0.5) / tokens  # floored in binary, as above
    data = Policy.load("dycoke-ttm").to_dict()
    scorer = {**data["stages"][0]["scorer"], "compat": "official"}
    data["stages"][0]["scorer"] = scorer
    data["stages"][0]["budget"]["keep_ratio"] = {
        "statistic": {"name": "mean_score", "scorer": scorer},
        "steps": [[-1000.0, 0.0], [-10.0, share], [10.0, 1.0]],
    }
    made = run(Policy.load(data).stages[0], clip(given["video"], (frames, 1, tokens)))
    expected = given["expected/kept_index"].tolist()
    assert index(made.kept) == expected
    # The clean policy differs in the third frame of the last group and in an odd last frame only.
    (clean,) = stages("dycoke-ttm", budget__keep_ratio__times=1 - share, budget__keep_ratio__plus=share)
    kept = index(run(clean, clip(given["video"], (frames, 1, tokens))).kept)
    apart = {i // tokens for i in set(kept) ^ set(expected)}
    last = frames - 1 if frames % 2 else None
    assert apart == {f for f in range(frames) if f == last or (f % 4 == 2 and f - 2 >= frames - 4)}
    assert [kept.count(i) for i in kept if i // tokens % 4 == 0] == [1] * (tokens * len(range(0, frames, 4)))


@pytest.mark.parametrize(("hyper", "given"), cases("vidcom2"))
def test_vidcom2(hyper: dict[str, Any], given: dict[str, Tensor]) -> None:
    frames, tokens = hyper["num_frames"], hyper["tokens_per_frame"]
    (stage,) = stages("vidcom2-25", budget__keep_ratio=hyper["base_ratio"])
    ctx = clip(given["video"], (frames, 1, tokens))
    made = run(stage, ctx)
    assert made.scores is not None
    close(-made.scores.view(frames, tokens), given["expected/scores"])
    assert stage.budget is not None and stage.budget.quota is not None and stage.budget.quota.scorer is not None
    close(-ctx.score(stage.budget.quota.scorer).view(frames, tokens), given["expected/video_score"])
    assert made.kept.view(frames, tokens).sum(dim=1).tolist() == given["expected/kept_per_frame"].tolist()
    assert index(made.kept) == given["expected/kept_index"].tolist()
    if "image_with_newline" not in given:
        close(given["video"][made.kept[0]], given["expected/tokens_out"])


@dataclass(frozen=True)
class Divided(Statistic):
    """How many tokens the authors' FastVID keeps of a scene: what does not divide by its anchor frames is lost there."""

    name = "divided"

    tokens: int
    salient: int
    context: int
    every: int

    def compute(self, ctx: PruneContext) -> Tensor:
        frames = torch.div(ctx.valid.sum(dim=1), self.tokens, rounding_mode="floor")
        anchors = -(-frames // self.every)
        return (frames * self.salient + frames * self.context // anchors * anchors).float()


@pytest.mark.parametrize(("hyper", "given"), cases("fastvid"))
def test_fastvid(hyper: dict[str, Any], given: dict[str, Tensor]) -> None:
    frames, tokens, every = hyper["num_frames"], hyper["tokens_per_frame"], hyper["p"]
    count = int(tokens * hyper["retention"])
    context = int(count * hyper["d"])
    salient = count - context
    data = Policy.load("fastvid").to_dict()
    (plain,) = data["stages"]
    plain["budget"]["per"] |= {"count": hyper["c"], "threshold": hyper["tau"]}
    plain["selector"]["parts"][0]["tokens"]["times"] = float(salient)
    plain["selector"]["parts"][1]["selector"]["every"] = every
    plain["merger"]["beta"] = hyper["beta"]
    plain["merger"]["among"]["after"] = salient
    (stage,) = Policy.load(data).stages
    assert stage.budget is not None and stage.budget.per is not None
    kept_per_segment = Quantity(Divided(tokens, salient, context, every))
    stage = replace(stage, budget=Budget(keep_tokens=kept_per_segment, per=stage.budget.per))

    start = hyper["vision_start"]
    visual = given["hidden"][start : start + frames * tokens]
    ctx = clip(
        visual, (frames, 1, tokens), attention=GivenAttention(given["frame_attention"].view(1, 1, 1, frames * tokens))
    )
    values = dict(ctx.signals.values_by)  # type: ignore[attr-defined]
    tower = Signal("hidden", at=Site("vision.layers.-1"))
    values[tower] = given["frame_features"].repeat_interleave(tokens, dim=0).unsqueeze(0)
    ctx = replace(ctx, signals=Signals(values))

    segments = ctx.grouped(stage.budget.per)
    assert (segments.valid.sum(dim=1) // tokens).tolist() == given["expected/segment_sizes"].tolist()
    made = run(stage, ctx)
    assert made.states is not None
    chosen = index(made.selected)
    by_attention = given["frame_attention"].view(frames, tokens).argsort(dim=1, descending=True, stable=True)
    salient_index = (by_attention[:, :salient] + torch.arange(frames).unsqueeze(1) * tokens).flatten().sort().values
    assert salient_index.tolist() == given["expected/salient_index"].tolist()
    placed = torch.tensor(sorted(set(chosen) - set(salient_index.tolist()))) // tokens
    assert torch.bincount(placed, minlength=frames).tolist() == given["expected/context_per_frame"].tolist()
    sequence = torch.cat((given["hidden"][:start], made.states[0], given["hidden"][start + frames * tokens :]))
    alive = torch.ones(len(sequence), dtype=torch.bool)
    alive[start : start + frames * tokens] = made.kept[0]
    assert alive.nonzero().flatten().tolist() == given["expected/kept_sequence_index"].tolist()
    close(sequence[alive], given["expected/sequence_out"])


@pytest.mark.parametrize(("hyper", "given"), cases("prunevid_merge"))
def test_prunevid_merge(hyper: dict[str, Any], given: dict[str, Tensor]) -> None:
    frames, side = hyper["num_frames"], hyper["grid"]
    data = Policy.load("prunevid").to_dict()
    static, cluster = data["stages"][:2]
    static["selector"]["threshold"] = hyper["threshold"]
    within = {"share": hyper["temporal_ratio"], "neighbours": hyper["k"]}
    static["selector"]["within"] |= within
    cluster["selector"]["neighbours"] = hyper["k"]
    cluster["budget"]["keep_ratio"]["steps"][1][1] = hyper["cluster_ratio"]
    static_stage, cluster_stage = Policy.load(data).stages[:2]
    ctx = clip(given["video"], (frames, side, side))
    scenes = ctx.grouped(static_stage.selector.within)  # type: ignore[attr-defined]
    assert (scenes.valid.sum(dim=1) // side**2).tolist() == given["expected/segment_sizes"].tolist()

    first = run(static_stage, ctx)
    inner = after(ctx, first)
    second = run(cluster_stage, inner)
    assert second.states is not None
    out = after(inner, second)
    scene = scenes.spread(torch.arange(len(scenes.valid)).unsqueeze(1).expand_as(scenes.valid))[0, out.ordinal[0]]
    is_static = (inner.sizes > 1)[0, second.kept[0]]  # type: ignore[operator]
    number = len(scenes.valid)
    assert torch.bincount(scene[is_static], minlength=number).tolist() == given["expected/static_sizes"].tolist()
    assert torch.bincount(scene[~is_static], minlength=number).tolist() == given["expected/dynamic_sizes"].tolist()
    # Theirs come in the order of density peaks inside a group; ours in raster order: match them one to one.
    got, expected = out.read(Signal("hidden"))[0], given["expected/tokens_out"]
    gap = torch.cdist(got, expected)
    assert sorted(gap.argmin(dim=1).tolist()) == list(range(len(expected)))
    close(got, expected[gap.argmin(dim=1)])


@pytest.mark.parametrize(("hyper", "given"), cases("framefusion"))
def test_framefusion(hyper: dict[str, Any], given: dict[str, Tensor]) -> None:
    """Layer by layer with the policy's parts; the loop and the cost are the authors', which a policy writes as fixed layers."""
    start, tokens = hyper["vision_start"], hyper["num_frames"] * hyper["patches_per_frame"]
    data = Policy.load("framefusion").to_dict()
    data["stages"][0]["selector"]["threshold"] = hyper["similarity"]
    hidden = given["hidden"]
    alive = torch.arange(len(hidden))
    ctx = clip(hidden[start : start + tokens], (hyper["num_frames"], 1, hyper["patches_per_frame"]))
    shares: list[float] = []
    merging, pruning = True, True
    for layer in range(hyper["layers"]):
        text = (alive < start) | (alive >= start + tokens)
        values = {"hidden": hidden[~text].unsqueeze(0), "layout": ctx.read(Signal("layout"))}
        received = given["attention_received"][alive[~text]]
        ctx = replace(ctx, signals=Signals({**values, "attention": GivenAttention(received.view(1, 1, 1, -1))}))
        before = len(received)
        most = spare(shares, hyper["cost"])
        made = None
        if merging:
            # Theirs floors in float64; half a token less than the next one says the same.
            data["stages"][0]["selector"]["at_most"] = min((int(most * before) + 0.5) / before, 1.0)
            made = run(Policy.load(data).stages[0], ctx)
            # As many as would have merged without the limit tell whether the limit was reached.
            data["stages"][0]["selector"]["at_most"] = 1.0
            merged = before - run(Policy.load(data).stages[0], ctx).counts[0]
            if merged / before < most:
                shares.append(merged / before)
                merging = merged / before >= hyper["ratio_stop"]
            else:
                merging = pruning = False
        elif pruning:
            prune = replace(Policy.load(data).stages[-1], budget=Budget(keep_ratio=1 - most, rounding="half_even"))
            made = run(prune, ctx)
            pruning = False
        if made is not None:
            ctx = after(ctx, made)
            keep = text.clone()
            keep[~text] = made.kept[0]
            states = hidden.clone()
            if made.states is not None:
                states[~text] = made.states[0]
            hidden, alive = states[keep], alive[keep]
        assert alive.tolist() == given[f"expected/layer{layer}/kept_sequence_index"].tolist()
        close(hidden, given[f"expected/layer{layer}/hidden"])
        assert [not merging, not pruning] == given[f"expected/layer{layer}/state"].bool().tolist()
        hidden = hidden + given["layer_updates"][layer][alive]
    torch.testing.assert_close(torch.tensor(shares, dtype=torch.float64), given["expected/sparsity_list"])


def spare(shares: list[float], cost: float, depth: int = 28) -> float:
    """Return the share of the tokens alive that has to leave now, so that all layers together see cost x depth x n tokens."""
    left, spent = 1.0, 0.0
    for share in shares:
        left *= 1 - share
        spent += left
    return max(0.0, 1 - (cost * depth - spent) / ((depth - len(shares)) * left))
