"""The model that comes with the package, through the command line: `tokenprune run POLICY` with nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from tokenprune import cli
from tokenprune.loading import EMBEDDED, load, open_image, prepare, sample


def test_the_embedded_model_is_a_llava_with_576_tokens() -> None:
    loaded = load(None, device="cpu")
    chosen = sample()
    inputs = prepare(loaded, open_image(chosen.image), chosen.question)
    config = loaded.model.config
    assert int((inputs["input_ids"] == config.image_token_index).sum()) == 576
    assert config.text_config.num_hidden_layers == 12
    unknown = loaded.processor.tokenizer.unk_token_id
    assert unknown not in inputs["input_ids"]


def test_run_with_nothing_but_a_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOKENPRUNE_MODEL", raising=False)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli.app, ["run", "v2drop-generic-66.7", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    first = json.loads((EMBEDDED / "samples" / "samples.json").read_text())["samples"][0]["questions"][0]
    assert found["prompt"] == first["question"]
    assert found["answers"]["unpruned"] == first["answer"]
    assert found["report"]["visual_tokens"] == [576]
    assert all(len(found["timing"][run]["layer_ms"]) == 12 for run in ("pruned", "unpruned"))
    with Image.open(tmp_path / "v2drop-generic-66.7.heatmap.png") as picture:
        assert picture.width > 1000


def test_a_policy_for_32_layers_is_refused_with_alternatives() -> None:
    result = CliRunner().invoke(cli.app, ["run", "v2drop-llava-1.5-7b-192"])
    assert result.exit_code == 1
    assert "the model has 12 decoder layers (0 to 11), no layer 17" in result.stderr
    assert "hint: these policies fit this model: v2drop-generic-66.7" in result.stderr
