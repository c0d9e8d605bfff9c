"""Plugins of strangers: found, reported when broken, refused when they collide, switched off by one variable."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tokenprune import hookspecs
from tokenprune.errors import PluginError
from tokenprune.plugins import Registry, load_registry, registry

SCORER = '''
from dataclasses import dataclass
from typing import ClassVar
from tokenprune import Scorer, hookimpl

@dataclass(frozen=True)
class {cls}(Scorer):
    """A stranger's scorer."""
    name: ClassVar[str] = "{name}"
    def score(self, ctx):
        return ctx.noise()

@hookimpl
def register_scorers(register):
    register({cls})
'''

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Return a function that lays a distribution with modules and entry points on the import path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def lay(distribution: str, target: str, modules: dict[str, str]) -> None:
        for name, text in modules.items():
            file = tmp_path / f"{name.replace('.', '/')}.py"
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)
        info = tmp_path / f"{distribution.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[tokenprune]\nplugin = {target}\n")

    yield lay
    for name in set(sys.modules) - before:
        del sys.modules[name]


def failures(found: Registry) -> list[str]:
    return [str(failure) for failure in found.failures]


def test_builtins_come_in_by_the_entry_points() -> None:
    found = registry()
    assert {name for name, distribution in found.plugins if distribution == "tokenprune-vlm"} >= {
        "tokenprune.selectors", "tokenprune_scorers.variation", "tokenprune_adapters.llava"
    }  # fmt: skip
    assert not found.failures
    assert {entry.distribution for entry in found.of("scorer").values()} == {"tokenprune-vlm"}


def test_a_module_is_a_plugin(install: Install) -> None:
    install("stranger", "stranger_mod", {"stranger_mod": SCORER.format(cls="Mine", name="mine")})
    entry = load_registry().get("scorer", "mine")
    assert (entry.module, entry.distribution, entry.cls.summary()) == (
        "stranger_mod",
        "stranger",
        "A stranger's scorer.",
    )


def test_public_submodules_of_a_package_are_plugins_and_private_ones_are_not(install: Install) -> None:
    install(
        "stranger", "strange",
        {"strange.__init__": "", "strange.one": SCORER.format(cls="One", name="one"),
         "strange.two": SCORER.format(cls="Two", name="two"), "strange._helper": "raise RuntimeError('not a plugin')"},
    )  # fmt: skip
    found = load_registry()
    assert {"one", "two"} <= set(found.of("scorer")) and not found.failures


def test_a_broken_plugin_is_reported_and_the_rest_goes_on(install: Install) -> None:
    install("broken", "broken_mod", {"broken_mod": "import no_such_module"})
    install("fine", "fine_mod", {"fine_mod": SCORER.format(cls="Fine", name="fine")})
    found = load_registry()
    assert failures(found) == ["broken_mod (broken): ModuleNotFoundError: No module named 'no_such_module'"]
    assert "fine" in found.of("scorer")
    with pytest.raises(PluginError) as error:
        found.get("scorer", "variatoin")
    assert str(error.value) == (
        f"no scorer named 'variatoin'; there are {', '.join(sorted(found.of('scorer')))}. Did you mean 'variation'? These "
        "plugins could not be loaded: broken_mod (broken): ModuleNotFoundError: No module named 'no_such_module'."
    )


@pytest.mark.parametrize(("text", "reason"), [
    (SCORER.format(cls="Bad", name="bad").replace("@dataclass(frozen=True)", ""), "Bad is not a frozen dataclass"),
    (SCORER.format(cls="Bad", name="Bad-Name"), "Bad.name is 'Bad-Name'; a scorer is named in lower_snake_case"),
    (SCORER.format(cls="Bad", name="bad").replace("(Scorer)", ""), "register_scorers takes a subclass of tokenprune.Scorer"),
    (SCORER.format(cls="Bad", name="bad").replace("register_scorers", "register_scorer"), "unknown hook 'register_scorer'"),
    ("from tokenprune import hookimpl\n@hookimpl\ndef register_policies(register): register('/no/such')", "is not a directory"),
    ("from tokenprune import hookimpl\n@hookimpl\ndef register_scorers(register): 1 / 0", "ZeroDivisionError"),
], ids=["not-frozen", "name", "base", "misspelt-hook", "directory", "raises"])  # fmt: skip
def test_a_plugin_that_does_not_fit_is_reported(install: Install, text: str, reason: str) -> None:
    install("misfit", "misfit_mod", {"misfit_mod": text})
    found = load_registry()
    assert len(found.failures) == 1 and reason in failures(found)[0]
    assert set(found.of("scorer")) == set(registry().of("scorer"))


def test_two_plugins_with_one_name_are_an_error_naming_both(install: Install) -> None:
    install("stranger", "strange_mod", {"strange_mod": SCORER.format(cls="Variation", name="variation")})
    with pytest.raises(PluginError) as error:
        load_registry()
    assert str(error.value) == (
        "two plugins register a scorer named 'variation': tokenprune_scorers.variation of tokenprune-vlm and strange_mod of "
        "stranger; uninstall one, or leave it out with TOKENPRUNE_PLUGINS"
    )


@pytest.mark.parametrize(
    ("switch", "expected"), [("", set()), ("alpha", {"alpha"}), ("Alpha, beta", {"alpha", "beta"})]
)
def test_the_switch(install: Install, monkeypatch: pytest.MonkeyPatch, switch: str, expected: set[str]) -> None:
    install("alpha", "alpha_mod", {"alpha_mod": SCORER.format(cls="Alpha", name="alpha")})
    install("beta", "beta_mod", {"beta_mod": SCORER.format(cls="Beta", name="beta")})
    monkeypatch.setenv("TOKENPRUNE_PLUGINS", switch)
    found = load_registry()
    assert set(found.of("scorer")) - set(registry().of("scorer")) == expected
    assert set(registry().of("scorer")) <= set(found.of("scorer"))


def test_a_directory_of_policies(install: Install, tmp_path: Path) -> None:
    (tmp_path / "their").mkdir()
    install(
        "policies", "policies_mod",
        {"policies_mod": "from pathlib import Path\nfrom tokenprune import hookimpl\n@hookimpl\n"
        "def register_policies(register): register(Path(__file__).parent / 'their')"},
    )  # fmt: skip
    assert (tmp_path / "their", "policies") in load_registry().policy_dirs


def test_every_hook_is_documented() -> None:
    text = (Path(__file__).parents[1] / "docs" / "plugins.md").read_text()
    hooks = [name for name in vars(hookspecs) if name.startswith("register_")]
    assert len(hooks) == 8
    for name in hooks:
        assert f"`{name}(" in text, f"docs/plugins.md does not describe {name}"
