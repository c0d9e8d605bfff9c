"""The documents cannot rot: their examples run, their tables are the registry's, their links lead somewhere."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo

from tokenprune import compress, plugins, policy
from tokenprune.cli import main
from tokenprune.testing import check_policy

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])


def blocks(page: str, language: str) -> list[str]:
    """Return the fenced blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.S)


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that installs a module, as a stranger's package would be, and makes the registry anew."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(name: str, text: str) -> None:
        (tmp_path / f"{name}.py").write_text(text)
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[tokenprune]\n{name} = {name}\n")
        plugins.registry.cache_clear()

    yield install
    plugins.registry.cache_clear()
    for name in ("my_scorers", "my_selectors", "my_adapter"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("page", ["README.md", "docs/methods.md", "docs/parts.md"])
def test_tables_of_the_documents_are_the_registry(page: str) -> None:
    spec = importlib.util.spec_from_file_location("tables", ROOT / "docs" / "tables.py")
    assert spec and spec.loader
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    assert ROOT / page in tables.PAGES
    text = (ROOT / page).read_text()
    assert tables.rendered(text) == text, "run: python docs/tables.py"


def test_the_python_of_the_readme_runs() -> None:
    code = blocks("README.md", "python")[0].replace("v2drop-llava-1.5-7b-192", "v2drop-generic-66.7")
    scope: dict[str, Any] = {"model": zoo.ZOO["llava"].model(), "inputs": zoo.ZOO["llava"].inputs(2)}
    exec(code, scope)
    assert [len(kept) for kept in scope["session"].report.stages[0].kept] == [8, 8]
    assert scope["out"].shape[0] == 2


YAML = [(page, i) for page in map(str, PAGES) for i in range(len(blocks(page, "yaml")))]


@pytest.mark.parametrize(("page", "index"), YAML, ids=str)
def test_every_yaml_block_is_a_policy(page: str, index: int, tmp_path: Path) -> None:
    file = tmp_path / "doc.yaml"
    file.write_text(blocks(page, "yaml")[index])
    assert policy.Policy.load(file).stages


def test_the_yaml_of_the_readme_is_the_file_it_names() -> None:
    text = blocks("README.md", "yaml")[0]
    path = text.splitlines()[0].removeprefix("# ")
    assert policy.Policy.load(ROOT / path).digest == policy.Policy.load(_yaml(text)).digest


def _yaml(text: str) -> Any:
    import yaml

    return yaml.safe_load(text)


CHEAP = [
    (str(page.relative_to(ROOT)), line[2:].split("#")[0].strip())
    for page in PAGES
    for block in re.findall(r"```console\n(.*?)```", page.read_text(), re.S)
    for line in block.splitlines()
    if line.startswith(("$ tokenprune show", "$ tokenprune check", "$ tokenprune list"))
]


@pytest.mark.parametrize(("page", "command"), CHEAP)
def test_commands_of_the_documents_run(
    page: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import shlex

    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-policy.yaml").write_text(blocks("docs/policies.md", "yaml")[0])
    monkeypatch.setattr(sys, "argv", shlex.split(command))
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code in (0, None), capsys.readouterr().err


def test_the_error_texts_shown_in_the_documents_are_the_real_ones(tmp_path: Path) -> None:
    from test_policy_errors import CASES, PLANNING

    real = {text.partition(":")[2] for text in (*CASES.values(), *PLANNING.values())}
    shown = [line for line in blocks("docs/policies.md", "text")[0].splitlines() if line]
    assert len(shown) == 2
    for line in shown:
        assert line.partition(":")[2] in real


def test_the_scorer_of_the_docs_can_be_installed_and_used(stranger: Any) -> None:
    stranger("my_scorers", blocks("docs/scorers.md", "python")[0])
    tiny = zoo.ZOO["llava"]
    report = check_policy(tiny.model(), tiny.inputs(2), "v2drop-generic-66.7?scorer=spread&scorer.power=1.0", steps=4,
                          forbidden_tokens=tiny.suppress)  # fmt: skip
    assert {stage.scorer for stage in report.stages} == {"spread"}
    plugins.registry.cache_clear()


def test_the_package_of_the_docs_is_installed_found_used_and_uninstalled(tmp_path: Path) -> None:
    """With pip, in an environment of its own that sees this one's packages."""
    package, place = tmp_path / "package", tmp_path / "venv"
    package.mkdir()
    (package / "my_scorers.py").write_text(blocks("docs/scorers.md", "python")[0])
    (package / "pyproject.toml").write_text(blocks("docs/scorers.md", "toml")[0])
    (package / "mine.yaml").write_text(
        "name: mine\nstages:\n  - {at: llm.layers.2, scorer: {name: spread, power: 1.5}, budget: {keep_ratio: 0.5}}\n"
    )
    subprocess.run([sys.executable, "-m", "venv", place], check=True)
    paths = [ROOT, ROOT / "scorers", ROOT / "adapters", sysconfig.get_path("purelib")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}

    def python(*arguments: str, code: int = 0) -> str:
        done = subprocess.run(
            [place / "bin" / "python", "-m", *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    check = ("tokenprune", "check", str(package / "mine.yaml"), "--model", "llava")
    assert "no scorer named 'spread'" in python(*check, code=1)
    python("pip", "install", "--no-deps", "--no-build-isolation", "--no-index", str(package))
    assert "mine.yaml: ok" in python(*check)
    listed = {row["name"]: row["distribution"] for row in json.loads(python("tokenprune", "list", "scorers", "--json"))}
    assert listed["spread"] == "my-scorers"
    python("pip", "uninstall", "-y", "my-scorers")
    assert "no scorer named 'spread'" in python(*check, code=1)


def test_the_selector_of_the_docs_can_be_installed_and_used(stranger: Any) -> None:
    stranger("my_selectors", blocks("docs/scorers.md", "python")[1])
    tiny = zoo.ZOO["llava"]
    stage = {"at": "llm.layers.2", "selector": "front", "budget": {"keep_tokens": 5}}
    with torch.no_grad(), compress(tiny.model(), {"stages": [stage]}) as session:
        session.model(**tiny.inputs(1))
    first = session.report.stages[0]
    assert torch.equal(first.kept[0], first.positions[0][:5])


def test_the_adapter_and_the_proof_of_the_docs_run(stranger: Any, capsys: pytest.CaptureFixture[str]) -> None:
    adapter, proof = blocks("docs/adapters.md", "python")
    stranger("my_adapter", adapter.replace('{"my_model"}', '{"internvl"}'))
    tiny = zoo.ZOO["internvl"]
    exec(proof, {"model": tiny.model(), "inputs": {k: v[:1] for k, v in tiny.inputs(1).items()}})
    assert "v2drop-generic-66.7" in capsys.readouterr().out
    from tokenprune.plan import adapter_for

    assert adapter_for(tiny.build().config).name == "my_model"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("path", re.findall(r"`(tests/\w+\.py)`", (ROOT / "docs" / "how-it-works.md").read_text()))
def test_files_named_as_proof_exist(path: str) -> None:
    assert (ROOT / path).is_file()
