"""Schedules found from samples: against the obvious slow way, and the policies they write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from tokenprune_scorers.calibrate import fit, smallest_sets, withdraw
from typer.testing import CliRunner

from tokenprune import cli
from tokenprune.errors import InputError
from tokenprune.flops import LayerShape, layer_flops
from tokenprune.plan import plan
from tokenprune.policy import Policy
from tokenprune.session import compress

TINY = zoo.ZOO["llava"]


def samples(count: int) -> list[dict[str, Any]]:
    together = TINY.inputs(3)
    del together["attention_mask"]
    return [{name: value[row : row + 1] for name, value in together.items()} for row in range(count)]


def masked(model: Any, inputs: dict[str, Any], layer: int) -> torch.Tensor:
    """Return next-token logits of a dense run in which visual keys are hidden from a layer on, without the engine."""
    visual = inputs["input_ids"][0] == zoo.IMAGE

    def hide(index: int) -> Any:
        def hook(module: Any, args: Any, kwargs: Any) -> Any:
            length = kwargs["hidden_states"].shape[1] if not args else args[0].shape[1]
            allowed = torch.tril(torch.ones(length, length, dtype=torch.bool))
            if index >= layer:
                allowed = allowed & ~visual | torch.eye(length, dtype=torch.bool)
            kwargs["attention_mask"] = allowed[None, None]
            return args, kwargs

        return hook

    layers = model.model.language_model.layers
    handles = [one.register_forward_pre_hook(hide(index), with_kwargs=True) for index, one in enumerate(layers)]
    with torch.no_grad():
        logits = model(**inputs).logits[:, -1]
    for handle in handles:
        handle.remove()
    return logits.double()


def test_withdraw_measures_what_masking_by_hand_measures() -> None:
    model, given = TINY.model(), samples(3)
    found = withdraw(model, given, eta=1e-6)
    assert list(found.divergence) == list(range(1, zoo.DEPTH))
    for layer, gap in found.divergence.items():
        total = 0.0
        for one in given:
            p, q = masked(model, one, zoo.DEPTH).softmax(-1), masked(model, one, layer).softmax(-1)
            total += float((p * (p / q).log()).sum())
        assert gap == pytest.approx(total / 3, rel=1e-3, abs=1e-10)
    expected = [layer for layer, gap in found.divergence.items() if gap <= 1e-6]
    assert found.layer == (expected[0] if expected else None)


def test_withdraw_writes_a_policy_that_runs() -> None:
    model, given = TINY.model(), samples(2)
    found = withdraw(model, given, eta=10.0, start=3)
    assert found.layer == 3
    policy = found.policy("gone")
    assert Policy.load(policy.to_dict()) == policy
    with torch.no_grad(), compress(model, policy) as session:
        model(**given[0])
    assert session.report.entering[0] == (16, 16, 16, 0, 0, 0)


@pytest.mark.parametrize("seed", range(5))
def test_smallest_sets_equal_loops_in_plain_python(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    cross, own = (torch.rand(4, 12, generator=g, dtype=torch.float64) ** 3 for _ in range(2))
    for alpha in (0.0, 0.1, 0.35, 0.8, 0.95):
        alive, expected = set(range(12)), []
        for layer in range(4):
            small = set(alive)
            for mass in (cross[layer].tolist(), own[layer].tolist()):
                lost, chosen = sum(mass[i] for i in range(12) if i not in alive), set()
                for token in sorted(alive, key=lambda i: (mass[i], i)):
                    lost += mass[token]
                    if lost > alpha * sum(mass) + 1e-12:
                        break
                    chosen.add(token)
                small &= chosen
            alive -= small
            expected.append(len(alive))
        got = smallest_sets(cross, own, alpha)
        assert got == expected
    assert smallest_sets(cross, own, 0.0) == [12] * 4


def test_fit_reads_the_attention_of_a_dense_run_and_meets_the_budget() -> None:
    model, given = TINY.model(), samples(3)
    found = fit(model, given, flops=0.7, tolerance=1e-3)
    shape, text = LayerShape.of(model.config.text_config), given[0]["input_ids"].shape[1] - 16
    dense = layer_flops(shape, 16 + text) * zoo.DEPTH
    assert sum(layer_flops(shape, n + text) for n in (16, *found.keep)) / dense == pytest.approx(found.flops)
    assert found.flops <= 0.7 and list(found.keep) == sorted(found.keep, reverse=True)
    with torch.no_grad():
        eager = TINY.model("eager")
        counts = []
        for one in given:
            visual = one["input_ids"][0] == zoo.IMAGE
            after = torch.arange(len(visual)) > visual.nonzero()[-1]
            tops = [layer[0].amax(0) for layer in eager(**one, output_attentions=True).attentions[:-1]]
            cross = torch.stack([top[after][:, visual].sum(0) for top in tops]).double()
            own = torch.stack([top[visual][:, visual].mean(0) for top in tops]).double()
            counts.append(smallest_sets(cross, own, found.alpha))
    assert found.keep == tuple(int(n) for n in torch.tensor(counts).double().mean(0).floor().tolist())
    policy = found.policy("fitted")
    assert Policy.load(policy.to_dict()) == policy
    assert plan(policy, model).entering(16)[1:] == found.keep


def test_what_cannot_be_learned_from_is_refused() -> None:
    model = TINY.model()
    words = {"input_ids": torch.randint(3, 90, (1, 9))}
    for search in (lambda: withdraw(model, [words]), lambda: fit(model, [words], flops=0.5)):
        with pytest.warns(UserWarning), pytest.raises(InputError, match="holds no visual token"):
            search()
    with pytest.raises(InputError, match="cannot be reached"):
        fit(model, samples(1), flops=0.01)
    with pytest.raises(InputError, match="prompts of one row"):
        fit(model, [TINY.inputs(2)], flops=0.5)


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(cli.build(), ["calibrate", *arguments])
    assert result.exit_code == code, result.output
    return result.output


def test_the_commands_write_policies_for_the_embedded_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOKENPRUNE_MODEL", raising=False)
    file = tmp_path / "mine.yaml"
    run("withdraw", "--limit", "1", "--start", "9", "--eta", "100", "--output", str(file))
    assert str(Policy.load(file).stages[0].at) == "llm.layers.9"
    run("fit", "--flops", "0.6", "--limit", "1", "--output", str(file))
    assert len(Policy.load(file).stages) > 3


def test_a_users_mistakes_are_one_sentence(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    assert "cannot be read: No such file" in run("withdraw", "--data", str(data), code=1)
    data.write_text('{"image": "a.png", "prompt": "what?"}\n{"picture": 3}\n')
    assert f"{data}:2: a line is" in run("withdraw", "--data", str(data), code=1)
    data.write_text(json.dumps({"image": "a.png", "prompt": "what?"}))
    assert "there is no image file" in run("fit", "--flops", "0.5", "--data", str(data), code=1)
    data.write_text("\n")
    assert "holds no sample" in run("fit", "--flops", "0.5", "--data", str(data), code=1)
