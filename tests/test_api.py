"""The public surface: what is exported, and that importing has no side effect."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import tokenprune


def test_all_is_what_is_public() -> None:
    public = {
        name
        for name, value in vars(tokenprune).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    } - {"plan"}
    assert public | {"plan"} == set(tokenprune.__all__)
    assert tokenprune.__all__ == sorted(tokenprune.__all__)
    assert callable(tokenprune.plan) and callable(tokenprune.compress)


def test_importing_loads_no_plugin_and_no_picture_library() -> None:
    code = (
        "import sys, tokenprune; "
        "print([m for m in ('tokenprune_scorers', 'tokenprune_adapters', 'matplotlib', 'typer') if m in sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


def test_every_export_is_documented() -> None:
    for name in tokenprune.__all__:
        assert (getattr(tokenprune, name).__doc__ or "").strip(), f"{name} has no docstring"
