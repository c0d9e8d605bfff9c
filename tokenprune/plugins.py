"""Finding plugins and keeping what they offer.

Built-ins come in by the same door as everybody's: modules that implement hooks of `tokenprune.hookspecs`. An entry point of
group `tokenprune` names a module or a package; the public submodules of a package are plugins too, so adding a scorer
touches one file.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

import pluggy

from tokenprune import hookspecs
from tokenprune.errors import PluginError, did_you_mean
from tokenprune.interfaces import Adapter, Grouping, Merger, Scorer, Selector, Statistic

__all__ = ["Entry", "Failure", "Registry", "load_registry", "registry"]

DISTRIBUTION = "tokenprune-vlm"
GROUP = "tokenprune"
SWITCH = "TOKENPRUNE_PLUGINS"
CORE = ("tokenprune.selectors", "tokenprune.mergers", "tokenprune.groupings")
KINDS: dict[str, type] = {
    "scorer": Scorer,
    "selector": Selector,
    "merger": Merger,
    "statistic": Statistic,
    "grouping": Grouping,
    "adapter": Adapter,
}
_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


@dataclass(frozen=True)
class Entry:
    """One registered class and where it came from."""

    name: str
    kind: str
    cls: Any
    module: str
    distribution: str


@dataclass(frozen=True)
class Failure:
    """A plugin that could not be used; the rest goes on without it."""

    plugin: str
    distribution: str
    error: str

    def __str__(self) -> str:
        return f"{self.plugin} ({self.distribution}): {self.error}"


@dataclass(eq=False)  # hashable by identity: what is derived from a registry can be cached on it
class Registry:
    """All that plugins offer, by kind and name."""

    entries: dict[str, dict[str, Entry]] = field(default_factory=lambda: {kind: {} for kind in KINDS})
    """By kind, then by name."""
    policy_dirs: list[tuple[Path, str]] = field(default_factory=list)
    """Directories of policy files, with the distribution each came from."""
    plugins: list[tuple[str, str]] = field(default_factory=list)
    """(module, distribution) of every plugin that was loaded."""
    failures: list[Failure] = field(default_factory=list)
    manager: pluggy.PluginManager = field(default_factory=lambda: pluggy.PluginManager(GROUP))

    def of(self, kind: str) -> Mapping[str, Entry]:
        """Return the entries of a kind: scorer, selector, merger, statistic, grouping or adapter."""
        return self.entries[kind]

    def get(self, kind: str, name: str) -> Entry:
        """Return the entry; raise PluginError, naming what there is, when there is none."""
        entries = self.of(kind)
        if name in entries:
            return entries[name]
        broken = f" These plugins could not be loaded: {'; '.join(map(str, self.failures))}." if self.failures else ""
        raise PluginError(
            f"no {kind} named {name!r}; there are {', '.join(sorted(entries))}.{did_you_mean(name, entries)}{broken}"
        )


@cache
def registry() -> Registry:
    """Return the registry of this process, loaded on first use."""
    return load_registry()


def load_registry() -> Registry:
    """Load all plugins anew.

    A plugin that fails to import or to register is recorded in `failures`. Two plugins that claim one name are an error.
    """
    found = Registry()
    found.manager.add_hookspecs(hookspecs)
    found.policy_dirs.append((_builtin_policies(), DISTRIBUTION))
    for name in CORE:
        _add(found, importlib.import_module(name), name, DISTRIBUTION)
    for entry_point, distribution in _entry_points():
        for name, load in _modules(entry_point):
            try:
                module = load()
            except (Exception, SystemExit) as error:  # whatever a stranger's import raises must not take the host down
                found.failures.append(Failure(name, distribution, f"{type(error).__name__}: {error}"))
                continue
            _add(found, module, name, distribution)
    return found


def _builtin_policies() -> Path:
    """Return the packaged policy files, or those of the checkout."""
    package = Path(__file__).parent
    packaged = package / "policies"
    return packaged if packaged.is_dir() else package.parent / "policies"


def _entry_points() -> Iterator[tuple[EntryPoint, str]]:
    """Yield entry points, ours first, as far as the environment switch lets them."""
    switch = os.environ.get(SWITCH)
    allowed = None if switch is None else {_normal(name) for name in switch.split(",")} | {DISTRIBUTION}
    named = [(point, point.dist.name if point.dist else "unknown") for point in entry_points(group=GROUP)]
    seen = set()
    for point, distribution in sorted(named, key=lambda item: (item[1] != DISTRIBUTION, item[1], item[0].name)):
        if (allowed is None or _normal(distribution) in allowed) and (point.value, distribution) not in seen:
            seen.add((point.value, distribution))
            yield point, distribution


def _normal(distribution: str) -> str:
    """Return the name of a distribution as packaging tools compare it."""
    return re.sub(r"[-_.]+", "-", distribution.strip()).lower()


def _modules(point: EntryPoint) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the module of an entry point and, if it is a package, its public submodules; each to be imported by a call."""
    yield point.value, point.load
    try:
        paths = getattr(point.load(), "__path__", None)
    except (Exception, SystemExit):
        return  # reported by the call above
    for info in pkgutil.iter_modules(paths) if paths else ():
        if not info.name.startswith("_"):
            name = f"{point.module}.{info.name}"
            yield name, partial(importlib.import_module, name)


def _add(found: Registry, module: ModuleType, name: str, distribution: str) -> None:
    """Register a module's hooks and run those that offer something."""
    manager = found.manager
    try:
        manager.register(module, name)
        manager.check_pending()
        offered = list(_offers(manager, module, name, distribution))
    except Exception as error:
        if manager.has_plugin(name):
            manager.unregister(name=name)
        found.failures.append(Failure(name, distribution, f"{type(error).__name__}: {error}"))
        return
    for entry in offered:
        if isinstance(entry, Path):
            found.policy_dirs.append((entry, distribution))
            continue
        other = found.of(entry.kind).get(entry.name)
        if other is not None:
            raise PluginError(
                f"two plugins register a {entry.kind} named {entry.name!r}: {other.module} of {other.distribution} and "
                f"{entry.module} of {entry.distribution}; uninstall one, or leave it out with {SWITCH}"
            )
        found.entries[entry.kind][entry.name] = entry
    found.plugins.append((name, distribution))


def _offers(manager: pluggy.PluginManager, module: ModuleType, name: str, distribution: str) -> Iterator[Any]:
    """Yield what one plugin registers: entries and directories. Raises on a class that does not fit its interface."""
    only_this = [plugin for plugin in manager.get_plugins() if plugin is not module]
    for kind, interface in KINDS.items():
        classes: list[Any] = []
        manager.subset_hook_caller(f"register_{kind}s", only_this)(register=classes.append)
        for cls in classes:
            _check_class(cls, kind, interface)
            yield Entry(cls.name, kind, cls, name, distribution)
    directories: list[Any] = []
    manager.subset_hook_caller("register_policies", only_this)(register=directories.append)
    for directory in directories:
        if not Path(directory).is_dir():
            raise PluginError(f"register_policies was given {str(directory)!r}, which is not a directory")
        yield Path(directory)


def _check_class(cls: Any, kind: str, interface: type) -> None:
    if not (isinstance(cls, type) and issubclass(cls, interface)):
        raise PluginError(f"register_{kind}s takes a subclass of tokenprune.{interface.__name__}, not {cls!r}")
    name = getattr(cls, "name", None)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise PluginError(f"{cls.__name__}.name is {name!r}; a {kind} is named in lower_snake_case")
    if kind != "adapter" and not (dataclasses.is_dataclass(cls) and cls.__dataclass_params__.frozen):  # type: ignore[attr-defined]
        raise PluginError(f"{cls.__name__} is not a frozen dataclass; decorate it with @dataclass(frozen=True)")
