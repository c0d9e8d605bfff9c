"""The places where a plugin may add something. A plugin implements any of them with `@hookimpl`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    import typer

    from tokenprune.interfaces import Adapter, Grouping, Merger, Scorer, Selector, Statistic

__all__ = ["hookimpl", "hookspec"]

hookspec = pluggy.HookspecMarker("tokenprune")
hookimpl = pluggy.HookimplMarker("tokenprune")


@hookspec
def register_scorers(register: Callable[[type[Scorer]], None]) -> None:
    """Call `register(cls)` for each scorer class; asked once, when the registry is first needed."""


@hookspec
def register_selectors(register: Callable[[type[Selector]], None]) -> None:
    """Call `register(cls)` for each selector class; asked once, when the registry is first needed."""


@hookspec
def register_mergers(register: Callable[[type[Merger]], None]) -> None:
    """Call `register(cls)` for each merger class; asked once, when the registry is first needed."""


@hookspec
def register_statistics(register: Callable[[type[Statistic]], None]) -> None:
    """Call `register(cls)` for each statistic class; asked once, when the registry is first needed."""


@hookspec
def register_groupings(register: Callable[[type[Grouping]], None]) -> None:
    """Call `register(cls)` for each grouping class; asked once, when the registry is first needed."""


@hookspec
def register_adapters(register: Callable[[type[Adapter]], None]) -> None:
    """Call `register(cls)` for each adapter class; asked once, when the registry is first needed."""


@hookspec
def register_policies(register: Callable[[Path], None]) -> None:
    """Call `register(directory)` for each directory of policy files (*.yaml, searched recursively)."""


@hookspec
def register_commands(cli: typer.Typer) -> None:
    """Add commands to the `tokenprune` command line; asked when the command line starts."""
