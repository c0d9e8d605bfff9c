from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import folder as tiny
import numpy as np
import pluggy
import pytest
import typer
from PIL import Image
from typer.testing import CliRunner

from tokenprune import cli, doctor, hookimpl
from tokenprune.plugins import load_registry, registry
from tokenprune.policy import list_policies

GOOD = "name: mine\nstages:\n  - {at: llm.layers.2, scorer: variation, budget: {keep_ratio: 0.5}}\n"
BAD = "name: mine\nstages:\n  - {at: llm.layers.2, scorer: variatoin, budget: {keep: 1}}\n"


def call(*arguments: object, code: int = 0) -> Any:
    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


def data(*arguments: object, code: int = 0) -> Any:
    """Run with --json: stdout is one document and nothing else, stderr is empty."""
    result = call(*arguments, "--json", code=code)
    assert result.stderr == ""
    return json.loads(result.stdout)


@pytest.fixture(autouse=True)
def _no_model_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOKENPRUNE_MODEL", raising=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("image") / "a.png"
    noise = np.random.default_rng(0).integers(0, 255, (56, 56, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    return path


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD)
    return path


# ---- list, plugins, schema, doctor -----------------------------------------------------------------------------------


def test_version() -> None:
    assert call("--version").stdout == f"tokenprune {version('tokenprune-vlm')}\n"


def test_list_shows_every_policy_on_one_line() -> None:
    lines = call("list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["name", *(info.name for info in list_policies())]
    assert data("list") == data("list", "policies")
    assert {row["name"]: row["paper"] for row in data("list")} == {i.name: i.paper for i in list_policies()}


@pytest.mark.parametrize("kind", cli.KINDS[1:])
def test_list_asks_the_registry(kind: str) -> None:
    entries = registry().of(kind.removesuffix("s"))
    rows = data("list", kind)
    assert {row["name"]: row["summary"] for row in rows} == {n: e.cls.summary() for n, e in entries.items()}
    assert all(name in call("list", kind).stdout for name in entries)


def test_list_of_something_else_is_wrong_usage() -> None:
    result = call("list", "polices", code=2)
    assert "Did you mean 'policies'?" in " ".join(result.stderr.replace("│", " ").split())


def test_plugins_and_their_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    found = data("plugins")
    assert [row["plugin"] for row in found["plugins"]] == [name for name, _ in registry().plugins]
    broken = load_registry()
    broken.failures.append(cli.Failure("bad_module", "bad-dist", "ImportError: no"))
    monkeypatch.setattr(cli, "registry", lambda: broken)
    assert data("plugins")["failures"] == [
        {"plugin": "bad_module", "distribution": "bad-dist", "error": "ImportError: no"}
    ]
    assert "failed: bad_module (bad-dist): ImportError: no" in call("plugins").stdout


def test_schema_is_json() -> None:
    assert json.loads(call("schema").stdout)["title"] == "tokenprune policy"


def test_doctor_looks_at_versions_kernels_and_plugins() -> None:
    checks = {check["name"]: check for check in data("doctor")["checks"]}
    assert checks["sdpa math"]["status"] == "ok"
    assert checks["transformers"]["status"] == "ok"
    assert checks["loaded"]["status"] == "ok"
    assert "sdpa flash" in call("doctor").stdout


def test_doctor_fails_on_a_real_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: "0.1" if name == "torch" else "99")
    found = data("doctor", code=1)
    assert not found["ok"]
    torch = next(check for check in found["checks"] if check["name"] == "torch")
    assert (torch["status"], torch["detail"]) == ("fail", "0.1 (supported >=2.4)")


class _Namesake:
    version = "0.9"

    def __init__(self, place: Path) -> None:
        self.place = place

    def locate_file(self, name: str) -> Path:
        return self.place / name


@pytest.mark.parametrize("ours", [True, False])
def test_doctor_sees_the_namesake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ours: bool) -> None:
    place = Path(cli.__file__).parent.parent if ours else tmp_path
    monkeypatch.setattr(doctor, "distribution", lambda name: _Namesake(place))
    (found,) = doctor._namesake()
    assert found.status == ("fail" if ours else "warn")


# ---- plugins' commands -----------------------------------------------------------------------------------------------


class _Commands:
    @hookimpl
    def register_commands(self, cli: typer.Typer) -> None:
        cli.command("hello")(lambda: print("hello from a plugin"))


class _Broken:
    @hookimpl
    def register_commands(self, cli: typer.Typer) -> None:
        raise RuntimeError("no luck")


def test_plugins_add_commands_and_broken_ones_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    found = load_registry()
    manager: pluggy.PluginManager = found.manager
    manager.register(_Commands(), "commands")
    manager.register(_Broken(), "broken")
    monkeypatch.setattr(cli, "registry", lambda: found)
    monkeypatch.setattr(cli.app, "registered_commands", list(cli.app.registered_commands))
    cli.build()
    cli.build()
    assert call("hello").stdout == "hello from a plugin\n"
    assert [str(failure) for failure in found.failures] == [
        "broken (unknown): register_commands: RuntimeError: no luck"
    ]


# ---- show and check --------------------------------------------------------------------------------------------------


def test_show_gives_the_plan_of_the_paper() -> None:
    text = call("show", "v2drop-llava-1.5-7b-192").stdout
    assert "on LLaVA-1.5-7B's shape (default LlavaConfig)" in text
    assert "visual tokens entering each layer: 0-2: 576, 3-16: 288, 17-21: 86, 22-31: 0" in text
    assert "3.82 T" in text  # what papers print for the unpruned model
    path = next(info.path for info in list_policies() if info.name == "v2drop-llava-1.5-7b-192")
    assert text.endswith(path.read_text())


def test_show_as_data_scales_with_the_batch() -> None:
    one, four = data("show", "fastv"), data("show", "fastv", "--batch", 4)
    assert one["entering"] == [576] * 2 + [288] * 30
    assert one["pruned"]["average_tokens_entering"] == 306
    assert one["pruned"]["average_tokens_leaving"] == 297
    assert four["pruned"]["kv_bytes"] == 4 * one["pruned"]["kv_bytes"]
    assert four["unpruned"]["prefill_flops"] == 4 * one["unpruned"]["prefill_flops"]


def test_show_says_when_the_number_of_tokens_depends_on_the_image() -> None:
    text = call("show", "fastv", "--model", "qwen2_vl").stdout
    assert "1024 visual tokens (depends on the image; 1024 assumed, --visual-tokens sets it)" in text
    found = data("show", "fastv", "--model", "qwen2_vl", "--visual-tokens", 300)
    assert (found["visual_tokens"], found["visual_tokens_assumed"]) == (300, False)


def test_show_with_overrides_prints_the_policy_in_force() -> None:
    found = data("show", "fastv?keep_ratio=1", code=1)
    assert "keep_ratio" in found["error"]
    assert "keep_ratio: 0.25" in data("show", "fastv?budget.keep_ratio=0.25")["yaml"]


def test_model_flag_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    monkeypatch.setenv("TOKENPRUNE_MODEL", str(model))
    assert data("show", "fastv")["layers"] == 6
    assert data("show", "fastv", "--model", "llava")["layers"] == 32


def test_check_says_ok(mine: Path) -> None:
    assert call("check", mine).stdout == f"{mine}: ok\n"
    assert data("check", mine) == {"files": [{"file": str(mine), "ok": True, "problems": []}]}


def test_check_gives_every_problem_of_every_file(mine: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text(BAD)
    missing = tmp_path / "missing.yaml"
    result = call("check", tmp_path, missing, code=1)
    assert result.stdout == f"{mine}: ok\n"
    lines = result.stderr.splitlines()
    assert lines[0].startswith(f"{bad}:3:") and "'variatoin'" in lines[0] and "Did you mean 'variation'?" in lines[0]
    assert lines[1].startswith(f"{bad}:3:") and "'keep'" in lines[1]
    assert lines[2] == f"{missing}: there is no such file"
    files = data("check", tmp_path, missing, code=1)["files"]
    assert [entry["ok"] for entry in files] == [False, True, False]
    assert {problem["line"] for problem in files[0]["problems"]} == {3}


def test_check_on_a_model(mine: Path) -> None:
    mine.write_text(GOOD.replace("layers.2", "layers.40"))
    assert call("check", mine).exit_code == 0
    result = call("check", mine, "--model", "llava", code=1)
    assert result.stderr == (f"{mine}:3:10: stages[0].at: the model has 32 decoder layers (0 to 31), no layer 40\n")


def test_check_of_an_empty_directory(tmp_path: Path) -> None:
    assert call("check", tmp_path, code=1).stderr == f"error: {tmp_path}: there is no *.yaml file in this directory\n"


# ---- run -------------------------------------------------------------------------------------------------------------


def test_run_answers_measures_and_draws(model: Path, image: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.png"
    options = ("--model", model, "--image", image, "--prompt", "what is this ?", "--max-new-tokens", 3)
    result = call("run", "fastv", *options, "--out", out)
    assert result.stderr == ""
    assert "llm.layers.2  1      attention  16         8" in result.stdout
    assert f"heat map: {out}" in result.stdout
    with Image.open(out) as picture:
        assert picture.format == "PNG" and picture.width > 900 and picture.height > 700

    other = tmp_path / "b.png"
    found = data("run", "v2drop-generic-66.7", *options, "--out", other, "--repeat", 2)
    assert found["report"]["entering"] == [[16, 8, 8, 2, 0, 0]]
    assert set(found["answers"]) == {"unpruned", "pruned"} and found["answers"]["unpruned"]
    for name in ("unpruned", "pruned"):
        timing = found["timing"][name]
        assert timing["repeats"] == 2 and len(timing["layer_ms"]) == 6 and min(timing["layer_ms"]) > 0
        assert timing["first_token_ms"]["min"] <= timing["first_token_ms"]["median"] <= timing["first_token_ms"]["max"]
        assert timing["decoder_ms"]["median"] < timing["first_token_ms"]["max"]
    assert found["latency_ratio"] > 0
    assert out.read_bytes() != other.read_bytes()


def test_run_without_an_image_runs_unpruned(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = ("run", "fastv", "--model", model, "--image", "none", "--prompt", "what ?", "--max-new-tokens", 2)
    result = call(*options)
    assert result.stderr == "notice: no visual tokens; ran unpruned\n"
    found = data(*options)
    assert found["answers"]["pruned"] == found["answers"]["unpruned"]
    assert (found["timing"], found["heatmap"]) == (None, None)
    assert list(tmp_path.iterdir()) == []


def test_run_names_policies_that_fit(model: Path, image: Path) -> None:
    options = ("run", "v2drop-llava-1.5-7b-192", "--model", model, "--image", image, "--prompt", "what ?")
    lines = call(*options, code=1).stderr.splitlines()
    assert [line.split("stages")[1] for line in lines[:2]] == [
        f"[{number}].at: the model has 6 decoder layers (0 to 5), no layer {layer}"
        for number, layer in ((1, 17), (2, 22))
    ]
    assert lines[2].startswith("hint: these policies fit this model: v2drop-generic-66.7, ")
    assert data(*options, code=1)["hint"] == lines[2].removeprefix("hint: ")


def test_mistakes_end_in_one_sentence(model: Path, image: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.png"
    text.write_text("no image")
    asked = ("--prompt", "what ?")
    on = ("--model", model)
    unknown = "no policy named 'fastvv'; `tokenprune list` shows them. Did you mean 'fastv'?"
    cases: list[tuple[tuple[object, ...], str]] = [
        (("run", "fastvv", "--image", image, *asked), unknown),
        (("run", "./no.yaml", "--image", image, *asked), "no.yaml: there is no such file"),
        (("run", "fastv", *on, "--image", "no.png", *asked), "there is no image file 'no.png'"),
        (("run", "fastv", *on, "--image", tmp_path, *asked), f"{str(tmp_path)!r} is a directory, not an image file"),
        (("run", "fastv", *on, "--image", text, *asked), f"{str(text)!r} is not an image that Pillow can read"),
        (("run", "fastv", *on, "--image", image, "--prompt", " "), "the prompt is empty; ask something about the image"),
        (("run", "fastv", "--model", "./no", "--image", image, *asked), "there is no model folder './no'"),
        (("show", "fastv", "--model", "bert"), "no adapter serves"),
        (("show", "fastv", "--model", "./no"), "there is no model folder './no'"),
    ]  # fmt: skip
    for arguments, message in cases:
        result = call(*arguments, code=1)
        assert result.stdout == ""
        if message == "no adapter serves":  # the sentence is the adapter's
            assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
        else:
            assert result.stderr == f"error: {message}\n"
            assert data(*arguments, code=1)["error"] == message


def test_wrong_usage_is_exit_code_two(image: Path, tmp_path: Path) -> None:
    assert "give --prompt too" in call("run", "fastv", "--image", image, code=2).stderr
    missing = tmp_path / "no" / "a.png"
    assert "there is no directory" in call("run", "fastv", "--out", missing, code=2).stderr
    call("show", "fastv", "--batch", 0, code=2)
    call("nonsense", code=2)


# ---- as a process ----------------------------------------------------------------------------------------------------


def test_the_script_and_the_module_are_the_same_command() -> None:
    script = Path(sys.executable).with_name("tokenprune")
    for command in ([str(script)], [sys.executable, "-m", "tokenprune"]):
        done = subprocess.run([*command, "show", "fastv", "--json"], capture_output=True, text=True, check=True)
        assert json.loads(done.stdout)["policy"] == "fastv" and done.stderr == ""


def test_a_process_is_quiet_about_everything_but_the_mistake(model: Path) -> None:
    command = [sys.executable, "-m", "tokenprune", "run", "fastv", "--model", str(model), "--image", "none"]
    done = subprocess.run([*command, "--prompt", "what ?"], capture_output=True, text=True, check=True)
    assert done.stderr == "notice: no visual tokens; ran unpruned\n"
    done = subprocess.run([*command, "--prompt", ""], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: the prompt is empty; ask something about the image\n"
