"""Attention scores come from a few rows beside the kernel: equal to an eager run's, and the kernel is never switched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bed
import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

import policies
from tokenprune.interfaces import AttentionRows
from tokenprune.policy import Policy, list_policies
from tokenprune.session import compress

# Families whose eager run hands out attention probabilities of every layer.
FAMILIES = ["llava", "qwen2_vl", "qwen2_5_vl", "gemma3", "mistral3_sliding", "glm4v", "smolvlm", "internvl", "aria"]
FAMILIES = [name for name in FAMILIES if name in zoo.ZOO]


def rows_of(inputs: dict[str, Any], row: int, query: str) -> Tensor:
    ids, real = inputs["input_ids"][row], inputs["attention_mask"][row].bool()
    visual = ids == zoo.IMAGE
    if query == "last":
        return real.nonzero()[-1]
    text = real & ~visual
    if query == "after_image" and visual.any():
        text &= torch.arange(len(ids)) > visual.nonzero()[-1]
    return text.nonzero().flatten()


@pytest.mark.parametrize("layer", ["previous", "this"])
@pytest.mark.parametrize("heads", ["mean", "max"])
@pytest.mark.parametrize("query", ["last", "text", "after_image"])
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_equal_an_eager_run_with_output_attentions(family: str, query: str, heads: str, layer: str) -> None:
    tiny = zoo.ZOO[family]
    inputs = tiny.ragged() if tiny.ragged is not None else tiny.inputs(3)
    scorer = {"name": "attention", "query": query, "heads": heads, "layer": layer}
    with torch.no_grad():
        attentions = tiny.model("eager")(**inputs, output_attentions=True).attentions
        model = tiny.model("sdpa")
        with compress(model, policies.policy("p", policies.stage("llm.layers.2", scorer, keep_ratio=0.5))) as session:
            model(**inputs)
    stage = session.report.stages[0]
    weights = attentions[1 if layer == "previous" else 2]
    assert stage.scores is not None
    for row, score in enumerate(stage.scores):
        per_row = weights[row][:, rows_of(inputs, row, query)][..., stage.positions[row]]  # [H, R, N]
        expected = (per_row.mean(0) if heads == "mean" else per_row.amax(0)).mean(0)
        torch.testing.assert_close(score, expected, atol=1e-5, rtol=0)


class CountSdpa(TorchFunctionMode):
    """Counts calls of the fused attention function by query length."""

    def __init__(self) -> None:
        super().__init__()
        self.queries: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            self.queries.append((args[0] if args else kwargs["query"]).shape[-2])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", [info.name for info in list_policies()])
def test_every_policy_runs_on_the_flash_kernel_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside the context any other kernel raises, so each layer's attention really ran on the flash kernel."""
    monkeypatch.chdir(tmp_path)
    policy = Policy.load(name)
    model, inputs = bed.for_policy(policy)
    extra = bed.resources(policy, model, tmp_path)
    flash = sdpa_kernel(SDPBackend.FLASH_ATTENTION)
    with torch.no_grad(), flash, CountSdpa() as calls, compress(model, policy, **extra) as session:
        model(**inputs)
    entering = session.report.entering[0]
    text = inputs["input_ids"].shape[1] - session.report.visual_tokens[0]
    assert calls.queries[-len(entering) :] == [n + text for n in entering]
    assert len(session.report.stages) == len(session.plan.prefill_stages)


def test_the_flash_context_refuses_other_kernels() -> None:
    q = torch.randn(1, 1, 4, 8)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(q, q, torch.randn(1, 1, 4, 16))


def test_attention_rows_equal_the_full_matrix_in_float64() -> None:
    g = torch.Generator().manual_seed(0)
    queries, keys = torch.randn(2, 6, 150, 8, generator=g), torch.randn(2, 2, 40, 8, generator=g)
    bias = torch.zeros(2, 1, 150, 40).masked_fill(torch.rand(2, 1, 150, 40, generator=g) < 0.3, -1e9)
    columns = torch.randperm(40, generator=g)[:10].expand(2, -1)
    valid = torch.rand(2, 150, generator=g) < 0.5
    rows = AttentionRows(queries, keys, bias, columns, valid, scaling=0.3, softcap=5.0)
    logits = queries.double() @ keys.double().repeat_interleave(3, dim=1).transpose(-1, -2) * 0.3
    full = (5.0 * torch.tanh(logits / 5.0) + bias.double()).softmax(-1)[..., columns[0]]  # [B, H, R, N]
    mean = torch.stack([full[b, :, valid[b]].mean(1).mean(0) for b in range(2)])
    peak = torch.stack([full[b, :, valid[b]].amax(0).mean(0) for b in range(2)])
    torch.testing.assert_close(rows.reduce("mean").double(), mean, atol=1e-6, rtol=0)
    torch.testing.assert_close(rows.reduce("max").double(), peak, atol=1e-6, rtol=0)
