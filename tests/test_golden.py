"""Numbers of the authors' own code. `TOKENPRUNE_GOLDEN` names another folder of the same layout (held-out cases)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from golden_files import cases
from torch import Tensor, nn

from tokenprune.budget import Budget
from tokenprune.interfaces import Adapter, AttentionRows, PruneContext
from tokenprune.policy import Policy
from tokenprune.selectors import TopK
from tokenprune.session import compress
from tokenprune.testing import Signals


class AddingLayer(nn.Module):
    """The stand-in of the golden files: adds the row of its table that belongs to the token's original position."""

    def __init__(self, updates: Tensor) -> None:
        super().__init__()
        self.updates = updates

    def forward(self, hidden_states: Tensor, position_ids: Tensor) -> Tensor:
        return hidden_states + self.updates[position_ids]


class Decoder(nn.Module):
    def __init__(self, updates: Tensor) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            _attn_implementation="sdpa", num_hidden_layers=len(updates), hidden_size=updates.shape[-1],
            num_attention_heads=1, intermediate_size=1, model_type="golden",
        )  # fmt: skip
        self.layers = nn.ModuleList(AddingLayer(table) for table in updates)

    def forward(self, inputs_embeds: Tensor, visual: Tensor) -> Tensor:
        positions = torch.arange(inputs_embeds.shape[1]).unsqueeze(0)
        for layer in self.layers:
            inputs_embeds = layer(inputs_embeds, position_ids=positions)
        return inputs_embeds


class GoldenAdapter(Adapter):
    """Serves the stand-in: enough of an adapter for any decoder with `layers`."""

    name = "golden"

    def check(self, config: Any) -> None: ...

    def text_config(self, config: Any) -> Any:
        return config

    def visual_token_ids(self, config: Any) -> frozenset[int]:
        return frozenset()

    def visual_tokens_per_image(self, config: Any) -> int | None:
        return None

    def decoder(self, model: nn.Module) -> nn.Module:
        return model

    def layers(self, model: nn.Module) -> Any:
        return list(model.layers)

    def attention(self, layer: nn.Module) -> nn.Module:
        raise NotImplementedError

    def visual_mask(self, model: nn.Module, inputs: Any) -> Tensor:
        return inputs["visual"]

    def spans(self, config: Any, inputs: Any) -> Any:
        raise NotImplementedError


def run(hyper: dict[str, Any], given: dict[str, Tensor]) -> Any:
    """Run the golden stack through the real engine; return (session report, residual stream at the end)."""
    stages = [
        {
            "at": f"llm.layers.{site}",
            "scorer": {"name": "variation", "metric": hyper["metric"]},
            "budget": {"keep_ratio": float(ratio), "min_tokens": 1},  # the authors' code never drops the last token
        }
        for site, ratio in zip(hyper["sites"], hyper["keep_ratios"], strict=True)
    ]
    decoder = Decoder(given["layer_updates"])
    hidden = given["hidden_in"].unsqueeze(0)
    visual = torch.zeros(hidden.shape[:2], dtype=torch.bool)
    visual[:, hyper["vision_start"] : hyper["vision_start"] + hyper["vision_len"]] = True
    with torch.no_grad(), compress(decoder, {"name": "golden", "stages": stages}, adapter=GoldenAdapter()) as session:
        out = decoder(inputs_embeds=hidden, visual=visual)
    return session.report, out[0]


@pytest.mark.parametrize(("hyper", "given"), [*cases("v2drop_l2"), *cases("v2drop_cosine")])
def test_v2drop(hyper: dict[str, Any], given: dict[str, Tensor]) -> None:
    report, out = run(hyper, given)
    start = hyper["vision_start"]
    for number, stage in enumerate(report.stages):
        expected = {name: given[f"expected/stage{number}/{name}"] for name in ("scores", "kept_vision_index")}
        scores = stage.scores[0]
        if hyper["metric"] == "cosine":
            # The authors rank by similarity and keep the LEAST similar; our score is 1 - cos, and higher stays.
            scores = 1 - scores
        torch.testing.assert_close(scores, expected["scores"], rtol=1e-4, atol=1e-5)
        assert torch.equal(stage.kept[0] - start, expected["kept_vision_index"])
    visual = torch.arange(start, start + hyper["vision_len"])
    dropped = set(visual.tolist()) - set(report.stages[-1].kept[0].tolist())
    alive = torch.tensor([position for position in range(len(out)) if position not in dropped])
    assert torch.equal(alive, given[f"expected/stage{len(report.stages) - 1}/kept_sequence_index"])
    torch.testing.assert_close(out[alive], given["expected/hidden_out"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("hyper", "given"), cases("v2drop_lowprec"))
def test_v2drop_in_half_precision(hyper: dict[str, Any], given: dict[str, Tensor]) -> None:
    """The authors score in the model's dtype and break ties at random; in float32 near ties may fall the other way."""
    report, _ = run(hyper, given)
    kept = set((report.stages[0].kept[0] - hyper["vision_start"]).tolist())
    must_keep, must_drop = (set(given[f"expected/must_{what}_vision_index"].tolist()) for what in ("keep", "drop"))
    tied = set(given["expected/tied_at_cut_vision_index"].tolist())
    assert len(kept) == int(given["expected/num_kept"])
    # Beside the tied ones, at most one token in a hundred may change sides through rounding of the authors' scores.
    assert len((must_keep - kept) | (must_drop & kept)) <= max(1, round(0.01 * hyper["vision_len"]))
    assert kept <= must_keep | must_drop | tied
    scores = given["expected/stage0/scores"].float()
    step = 2.0**-8 if hyper["dtype"] == "bfloat16" else 2.0**-11
    torch.testing.assert_close(report.stages[0].scores[0], scores, rtol=2 * step, atol=2 * step)


@pytest.mark.parametrize(("hyper", "given"), cases("fastv"))
def test_fastv(hyper: dict[str, Any], given: dict[str, Tensor]) -> None:
    """The policy's own scorer, selector and rounding on the authors' queries and keys of layer K-1."""
    start, count = hyper["vision_start"], hyper["vision_len"]
    stage = Policy.load("fastv").stages[0]
    keys = given["k"].unsqueeze(0)
    rows = AttentionRows(
        queries=given["q_last"][None, :, None], keys=keys, bias=None, columns=torch.arange(start, start + count)[None],
        rows_valid=torch.ones(1, 1, dtype=torch.bool), scaling=given["q_last"].shape[-1] ** -0.5,
    )  # fmt: skip
    everything = AttentionRows(
        rows.queries, keys, None, torch.arange(keys.shape[-2])[None], rows.rows_valid, rows.scaling
    )
    probabilities = next(everything.blocks())[0][0, :, 0]
    torch.testing.assert_close(probabilities, given["expected/attn_last_row"], rtol=1e-4, atol=1e-5)
    context = PruneContext(
        torch.ones(1, count, dtype=torch.bool), torch.arange(count)[None], signals=Signals({"attention": rows})
    )
    assert stage.scorer is not None
    scores = stage.scorer.score(context)
    torch.testing.assert_close(scores[0], given["expected/scores"], rtol=1e-4, atol=1e-5)
    ratio = hyper.get("pruned_ratio")
    budget = Budget(keep_tokens=hyper["attention_rank"]) if ratio is None else Budget(keep_ratio=1 - ratio)
    kept = TopK().select(scores, torch.tensor([budget.count(count, count)]), context)
    assert torch.equal(kept[0].nonzero().flatten(), given["expected/kept_vision_index"])
    text = torch.ones(keys.shape[-2], dtype=torch.bool)
    text[start : start + count] = kept[0]
    assert torch.equal(text.nonzero().flatten(), given["expected/kept_sequence_index"])
