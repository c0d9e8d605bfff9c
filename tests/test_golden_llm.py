"""Methods inside the LLM against the numbers of their authors' code: the shipped policies' own parts on the golden inputs.

The decoder layers of the golden files are stand-ins, so queries and keys are computed here, with plain tensor code.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from golden_files import cases
from test_golden import Decoder, GoldenAdapter
from tokenprune_scorers.attention import raters, rope_prior
from tokenprune_scorers.blend import Product
from tokenprune_scorers.pivots import Pivots, sweep
from torch import Tensor
from torch.nn.functional import normalize

from tokenprune.budget import exact_floor
from tokenprune.decision import Decision, decide
from tokenprune.interfaces import AttentionRows, GivenAttention, Layout, PruneContext, Text
from tokenprune.policy import Policy, Stage
from tokenprune.session import compress
from tokenprune.testing import Signals, grid_layout
from tokenprune.tokens import Signal, Site

Hyper = dict[str, Any]
Given = dict[str, Tensor]


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def stage_of(name: str, number: int = 0, **changes: Any) -> Stage:
    """Return a stage of a shipped policy, with what the golden case states put in the place of the paper's setting."""
    data = Policy.load(name).to_dict()["stages"][number]
    for path, value in changes.items():
        inner, keys = data, [int(key) if key.isdigit() else key for key in path.split("__")]
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = value
    return Policy.load({"name": "golden", "stages": [data]}).stages[0]


def decided(
    stage: Stage, signals: Mapping[Any, Any], valid: Tensor, original: Tensor, hidden: Tensor | None = None
) -> Decision:
    ordinal = torch.arange(valid.shape[1]).expand(valid.shape)
    ctx = PruneContext(valid, ordinal, signals=Signals(signals))
    return decide(stage, ctx, original=original, hidden=hidden)


def alone(stage: Stage, signals: Mapping[Any, Any], count: int, hidden: Tensor | None = None) -> Decision:
    valid = torch.ones(1, count, dtype=torch.bool)
    return decided(stage, signals, valid, torch.tensor([count]), hidden)


def indices(kept: Tensor) -> Tensor:
    return kept.nonzero().flatten()


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + 1e-6) * weight


def heads_of(x: Tensor, weight: Tensor, width: int) -> Tensor:
    """Return [B, H, S, d] projections of [B, S, D]."""
    y = x @ weight.T
    return y.unflatten(-1, (-1, width)).transpose(1, 2)


def rotated(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """Return [B, H, S, d] after the rotary embedding of Llama; positions [B, S]."""
    half = x.shape[-1] // 2
    angles = positions[:, None, :, None] * base ** (-torch.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
    )


def causal(rows: Tensor, length: int) -> Tensor:
    """Return the additive mask [B, 1, R, S] of query rows at the positions [B, R]."""
    hidden = torch.arange(length) > rows[:, None, :, None]
    return torch.zeros(hidden.shape).masked_fill(hidden, -math.inf)


# ---- PyramidDrop -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("hyper", "given"), cases("pyramiddrop"))
def test_pyramiddrop(hyper: Hyper, given: Given) -> None:
    hidden, counts = given["hidden"], list(hyper["image_tokens"])
    batch, start = len(counts), hyper["image_token_posi"]
    length = [text + images for text, images in zip(hyper["prompt_len"], counts, strict=True)]
    if "attention_mask" in given:
        length = given["attention_mask"].sum(dim=1).tolist()
    original = torch.tensor(counts)
    positions = torch.arange(hidden.shape[1]).expand(batch, -1)
    assert Policy.load("pyramiddrop").positions == "renumber_unless_grid"
    for number, ratio in enumerate(hyper["image_token_ratio_list"][1:]):
        x = rms_norm(hidden, given[f"stage{number}/ln_weight"])
        queries, keys = (
            rotated(heads_of(x, given[f"stage{number}/{name}"], hyper["head_dim"]), positions, hyper["rope_base"])
            for name in ("wq", "wk")
        )
        row = torch.tensor([[text + count - 1] for text, count in zip(hyper["prompt_len"], counts, strict=True)])
        most = max(counts)
        valid = torch.arange(most) < torch.tensor(counts).unsqueeze(1)
        columns = (torch.tensor(start).clamp(min=0).unsqueeze(1) + torch.arange(most)).clamp(max=hidden.shape[1] - 1)
        rows = AttentionRows(
            queries=queries.gather(2, row[:, None, :, None].expand(-1, queries.shape[1], -1, queries.shape[3])),
            keys=keys,
            bias=causal(row, hidden.shape[1]),
            columns=columns,
            rows_valid=torch.ones(batch, 1, dtype=torch.bool),
            scaling=hyper["head_dim"] ** -0.5,
            columns_valid=valid,
        )
        share = float(ratio)
        if any(int(n * share) < exact_floor(n, share) for n in hyper["image_tokens"]):
            share -= 1e-9  # the authors floor a binary float, which may lie just below the whole number
        stage = stage_of("pyramiddrop", budget__keep_ratio=share)
        made = decided(stage, {"attention": rows}, valid, original)
        sequences = []
        for sample, count in enumerate(counts):
            mine = hidden[sample, : length[sample]]
            if count:
                expected = f"expected/stage{number}/sample{sample}"
                assert made.scores is not None
                close(made.scores[sample, :count], given[f"{expected}/scores"])
                assert torch.equal(indices(made.kept[sample]), given[f"{expected}/kept_of_current"])
                alive = torch.ones(length[sample], dtype=torch.bool)
                alive[start[sample] : start[sample] + count] = made.kept[sample, :count]
                mine = mine[alive]
            assert made.kept[sample].sum() == made.counts[sample]
            sequences.append(mine)
        counts, length = list(made.counts), [len(sequence) for sequence in sequences]
        hidden = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
        positions = torch.nn.utils.rnn.pad_sequence([torch.arange(size) for size in length], batch_first=True)
        close(hidden, given[f"expected/stage{number}/hidden"])
        assert torch.equal(positions, given[f"expected/stage{number}/position_ids"])


# ---- SparseVLM -------------------------------------------------------------------------------------------------------


def words_of(states: Tensor) -> Text:
    there = torch.ones(states.shape[:2], dtype=torch.bool)
    return Text(states, there, there)


def rater_signals(visual: Tensor, text: Tensor) -> dict[Signal, Any]:
    at = Site("llm.input")
    return {Signal("hidden", at=at): visual[None], Signal("hidden", at=at, of="text"): words_of(text[None])}


@pytest.mark.parametrize(("hyper", "given"), cases("sparsevlm"))
def test_sparsevlm(hyper: Hyper, given: Given) -> None:
    probabilities = given["attn_text_to_vision"][None]
    count, at = probabilities.shape[-1], [2, 6, 15, 19].index(hyper["layer"])
    if hyper["version"] == "1.0":
        line = {"budget__keep_tokens__times": float(hyper["scale"]), "budget__keep_tokens__plus": float(hyper["bias"])}
        stage = stage_of("sparsevlm-rank-128", at, **line)
    elif "retain" in hyper:
        stage = stage_of(f"sparsevlm-{hyper['retain']}", at)
    else:
        stage = stage_of("sparsevlm-192", at, budget__keep_tokens=hyper["table"][at])
    assert stage.at.text == f"llm.layers.{hyper['layer'] + 1}"  # tokens leave after the layer that scores
    hidden = given["hidden_vision"][None]
    signals = {
        **rater_signals(given["vision_embeds"], given["text_embeds"]),
        "hidden": hidden,
        "attention": GivenAttention(probabilities),
    }
    made = alone(stage, signals, count, hidden)
    ctx = PruneContext(torch.ones(1, count, dtype=torch.bool), torch.arange(count)[None], signals=Signals(signals))
    assert torch.equal(indices(raters(ctx)[0]), given["expected/rater_text_index"])
    assert made.scores is not None and made.states is not None
    close(made.scores[0], given["expected/scores"])
    assert torch.equal(indices(made.selected[0]), given["expected/kept_vision_index"])
    close(made.states[0][made.kept[0]], given["expected/vision_block_after"])
    after = hyper["text_before"] + made.counts[0] + len(given["text_embeds"])
    assert Policy.load("sparsevlm-192").positions == "renumber"
    assert torch.equal(torch.arange(after), given["expected/position_ids_after"])


class GivenRows(AttentionRows):
    """Rows that know where they stand, with probabilities that are given."""

    probabilities: Tensor

    def blocks(self, rows: int = 64, normalise: Literal["full", "visual"] = "full") -> Iterator[tuple[Tensor, Tensor]]:
        yield from GivenAttention(self.probabilities).blocks(rows, normalise)


@pytest.mark.parametrize(("hyper", "given"), cases("sparsevlm_plus"))
def test_sparsevlm_plus(hyper: Hyper, given: Given) -> None:
    probabilities = given["attn_text_to_vision"][None]
    count, texts, width = hyper["vision_len"], hyper["text_after"], hyper["head_dim"]
    at = [2, 6, 15].index(hyper["layer"])
    rows = GivenRows(
        queries=torch.zeros(1, hyper["heads"], texts, width),
        keys=torch.zeros(1, hyper["heads"], count, width),
        bias=None,
        columns=torch.arange(count)[None],
        rows_valid=torch.ones(1, texts, dtype=torch.bool),
        scaling=1.0,
        row_positions=hyper["text_before"] + count + torch.arange(texts)[None],
        column_positions=hyper["text_before"] + torch.arange(count)[None],
        rope_base=float(hyper["rope_base"]),
    )
    object.__setattr__(rows, "probabilities", probabilities)
    close(rope_prior(rows)(slice(0, texts))[0, 0], given["expected/rope_prior"])
    # The file gives the raters and no embeddings: these make exactly them look at the image.
    text = torch.zeros(texts, 2)
    text[given["rater_text_index"], 0] = 1.0
    visual = torch.tensor([1.0, 0.0]).expand(count, -1)
    stage = stage_of("sparsevlm-plus-192", at, budget__keep_tokens=hyper["table"][at])
    made = alone(stage, {**rater_signals(visual, text), "attention": rows}, count)
    assert made.scores is not None
    close(made.scores[0], given["expected/scores"])
    corrected = probabilities[0] / given["expected/rope_prior"]
    best = corrected[given["expected/selected_heads"]].mean(dim=0)[given["rater_text_index"]].mean(dim=0)
    close(made.scores[0], best)  # the same heads, not only the same scores
    assert torch.equal(indices(made.kept[0]), given["expected/kept_vision_index"])
    assert Policy.load("sparsevlm-plus-192").positions == "keep"
    alive = torch.ones(hyper["text_before"] + count + texts, dtype=torch.bool)
    alive[hyper["text_before"] : hyper["text_before"] + count] = made.kept[0]
    assert torch.equal(indices(alive), given["expected/position_ids_after"])


# ---- FEATHER ---------------------------------------------------------------------------------------------------------


def share_of(count: int, keep: float) -> float:
    """Return a ratio whose exact product with `count` rounds down to what int(count * keep) gives in floating point."""
    ratio = round(keep, 9)
    return ratio if int(count * ratio + 1e-9) == int(count * keep) else (int(count * keep) + 0.5) / count


def feather_stage(number: int, hyper: Hyper, count: int) -> Stage:
    keep = 1 - hyper["pruned_ratio"]
    if hyper["stride"] is None:
        return stage_of("feather-no-rope", number, budget__keep_ratio=share_of(count, keep))
    if number == 1:
        return stage_of("feather", 1, budget__keep_ratio=share_of(count, keep**2))
    grid = {"name": "grid", "step": hyper["stride"]}
    parts = {"selector__parts__0__share": share_of(count, keep), "selector__parts__1__selector": grid}
    return stage_of("feather", 0, **parts)


@pytest.mark.parametrize(("hyper", "given"), cases("feather"))
def test_feather(hyper: Hyper, given: Given) -> None:
    x, start, count = given["hidden_in"], hyper["vision_start"], hyper["vision_len"]
    side = math.isqrt(count)
    layout = grid_layout(torch.arange(count)[None], (1, side, side))
    before = x
    alive = torch.arange(len(x))
    for layer, updates in enumerate(given["layer_updates"]):
        if layer in hyper["prune_layers"]:
            number = hyper["prune_layers"].index(layer)
            visual = (alive >= start) & (alive < start + count)
            # What the layer before saw, its input, gives the queries and keys.
            entered = rms_norm(before[None], given[f"stage{number}/ln_weight"])
            queries, keys = (
                heads_of(entered, given[f"stage{number}/{name}"], hyper["head_dim"]) for name in ("wq", "wk")
            )
            rows = AttentionRows(
                queries=queries[:, :, -1:], keys=keys, bias=None, columns=indices(visual)[None],
                rows_valid=torch.ones(1, 1, dtype=torch.bool), scaling=hyper["head_dim"] ** -0.5,
            )  # fmt: skip
            mine = alive[visual] - start
            here: Layout = layout.map(lambda part, mine=mine: part[:, mine])
            made = alone(feather_stage(number, hyper, len(mine)), {"attention": rows, "layout": here}, len(mine))
            assert made.scores is not None
            close(made.scores[0], given[f"expected/stage{number}/scores"])
            assert torch.equal(mine[made.kept[0]], given[f"expected/stage{number}/kept_vision_index"])
            stay = torch.ones(len(alive), dtype=torch.bool)
            stay[visual] = made.kept[0]
            x, alive = x[stay], alive[stay]
        before, x = x, x + updates[alive]
    close(x, given["expected/hidden_out"])


# ---- FitPrune --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("hyper", "given"), cases("fitprune"))
def test_fitprune(hyper: Hyper, given: Given) -> None:
    start, count, texts = hyper["vision_start"], hyper["vision_len"], hyper["text_len"]
    queries, keys = given["q"][None], given["k"][None]
    length = keys.shape[2]
    assert length == start + count + texts

    def rows(first: int, last: int) -> AttentionRows:
        return AttentionRows(
            queries=queries[:, :, first:last], keys=keys, bias=causal(torch.arange(first, last)[None], length),
            columns=torch.arange(start, start + count)[None], rows_valid=torch.ones(1, last - first, dtype=torch.bool),
            scaling=queries.shape[-1] ** -0.5,
        )  # fmt: skip

    where = {"after_image": rows(start + count, length), "visual": rows(start, start + count)}
    stage = stage_of("fitprune-60", budget={"keep_tokens": count - hyper["delete_count"]})
    signals = {signal: where[signal.query] for signal in stage.needs()}
    assert len(signals) == 2
    made = alone(stage, signals, count)
    ctx = PruneContext(torch.ones(1, count, dtype=torch.bool), torch.arange(count)[None], signals=signals)
    assert isinstance(stage.scorer, Product) and made.scores is not None
    cross, own = (ctx.score(part.scorer) for part in stage.scorer.parts)
    close(cross[0], given["expected/cross_score"])
    close(own[0], given["expected/self_score"])
    close(made.scores[0], given["expected/scores"])
    assert torch.equal(indices(made.kept[0]), given["expected/kept_vision_index"])
    assert torch.equal(indices(~made.kept[0]), given["expected/deleted_vision_index"])
    alive = torch.ones(length, dtype=torch.bool)
    alive[start : start + count] = made.kept[0]
    assert torch.equal(indices(alive), given["expected/kept_sequence_index"])


# ---- VTW -------------------------------------------------------------------------------------------------------------


class RenumberingAdapter(GoldenAdapter):
    """The stand-in has plain position ids, so nothing stands against counting them anew."""

    def renumbers(self, config: Any) -> str:
        return ""


@pytest.mark.parametrize(("hyper", "given"), cases("vtw"))
def test_vtw(hyper: Hyper, given: Given) -> None:
    """The whole engine: a position rule that is wrong changes what the stand-in layers add."""
    data = Policy.load("vtw").to_dict()
    del data["written_for"]  # the stand-ins have few layers, and K is a number of theirs
    data["stages"][0]["at"] = f"llm.layers.{hyper['K']}"
    data["positions"] = hyper["pe_type"]
    hidden, start, count = given["hidden_in"][None], hyper["vision_start"], hyper["vision_len"]
    visual = torch.zeros(hidden.shape[:2], dtype=torch.bool)
    visual[:, start : start + count] = True
    decoder = Decoder(given["layer_updates"])
    seen: list[Tensor] = []
    with torch.no_grad(), compress(decoder, data, adapter=RenumberingAdapter()):
        decoder.layers[-1].register_forward_pre_hook(  # after the engine's own hooks, so that it sees what they made
            lambda _, args, kwargs: seen.append(kwargs["position_ids"][0]), with_kwargs=True
        )
        out = decoder(inputs_embeds=hidden, visual=visual)[0]
    close(out[~visual[0]] if len(out) == visual.shape[1] else out, given["expected/hidden_out"])
    assert torch.equal(seen[0], given["expected/position_ids_from_K"])


# ---- DART ------------------------------------------------------------------------------------------------------------


def picks(hyper: Hyper) -> int:
    """Return how many tokens each pivot takes, as the authors' two models count them."""
    pivots = hyper["pivot_image"] + hyper["pivot_text"]
    if hyper["variant"] == "llava":
        return int(hyper["max_num"] // pivots)
    return int(hyper["vision_len"] * (1 - hyper["reduction_ratio"]) / pivots)


@pytest.mark.parametrize(("hyper", "given"), cases("dart"))
def test_dart(hyper: Hyper, given: Given) -> None:
    start, count = hyper["vision_start"], hyper["vision_len"]
    hidden, keys = given["hidden"][None], given["keys"].transpose(0, 1)[None]  # [1, S, D], [1, S, Hkv, d]
    place = torch.arange(hidden.shape[1])
    text = (place < start) | (place >= start + count)
    visual = slice(start, start + count)
    there, after = torch.ones(1, int(text.sum()), dtype=torch.bool), (place[text] >= start + count)[None]
    signals = {
        "hidden": hidden[:, visual],
        "keys": keys[:, visual],
        "text_hidden": Text(hidden[:, text], there, after),
        "text_keys": Text(keys[:, text], there, after),
    }
    number = hyper["pivot_image"] + hyper["pivot_text"]
    keep = hyper["pivot_image"] + number * picks(hyper)
    selector = {"name": "pivots", "image": hyper["pivot_image"], "text": hyper["pivot_text"]}
    stage = stage_of("dart-128", selector=selector, budget={"keep_tokens": keep})
    made = alone(stage, signals, count)
    assert made.scores is not None and isinstance(stage.selector, Pivots)
    close(made.scores[0], given["expected/key_l1_norm"][visual])

    ctx = PruneContext(torch.ones(1, count, dtype=torch.bool), torch.arange(count)[None], signals=Signals(signals))
    cosine, exists, own = stage.selector.pivots(made.scores, torch.tensor([keep]), ctx)
    assert exists.all()
    assert torch.equal(indices(own[0]) + start, given["expected/pivot_image"])
    pivots = torch.cat([given["expected/pivot_image"], given["expected/pivot_text"]])
    close(cosine[0], normalize(given["hidden"], dim=-1)[pivots] @ normalize(given["hidden"][visual], dim=-1).T)
    # The authors visit pivots in the order of a Python set, which the file states; ours is image, then text, each ascending.
    order = [pivots.tolist().index(pivot) for pivot in given["expected/pivot_visit_order"].tolist()]
    theirs = sweep(cosine, exists, own, torch.tensor([keep]), ctx.valid, order)
    assert torch.equal(indices(theirs[0]), given["expected/kept_vision_index"])
    assert made.counts == (len(given["expected/kept_vision_index"]),)
    same = torch.equal(indices(made.kept[0]), given["expected/kept_vision_index"])
    assert same == hyper["same_for_sorted_order"]


# ---- G-Prune ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("hyper", "given"), cases("gprune"))
def test_gprune(hyper: Hyper, given: Given) -> None:
    base, rows, columns = hyper["base_tokens"], hyper["rows"], hyper["cols"]
    place = torch.arange(len(given["tokens"]))
    row_end = (place >= base) & ((place - base) % (columns + 1) == columns)
    image = (place[~row_end] >= base).long()[None]
    layout = replace(grid_layout(torch.arange(image.shape[1])[None], (1, 1, image.shape[1])), image=image)
    hidden = given["tokens"][~row_end][None]
    stage = stage_of("gprune", budget__keep_ratio=float(hyper["keep_ratio"]))
    made = alone(stage, {"hidden": hidden, "layout": layout}, hidden.shape[1])
    assert made.scores is not None and (rows * (columns + 1) + base) == len(place)
    close(made.scores[0, :base], given["expected/base_scores"])
    close(made.scores[0, base:], given["expected/grid_scores"])
    alive = row_end.clone()
    alive[~row_end] = made.kept[0]
    assert torch.equal(indices(alive), given["expected/kept_index"])
