"""Writes the tables of the documents from the registry and the policy files: `python docs/tables.py`. A test fails when they
are stale."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenprune.interfaces import Component, Options
from tokenprune.plugins import KINDS, registry
from tokenprune.policy import Policy, PolicyInfo, list_policies

ROOT = Path(__file__).parents[1]


def methods() -> str:
    """Return one row per method (a folder of policy files): policies, papers, what they are made of."""
    rows = ["| method | policies | paper | made of |", "|---|---|---|---|"]
    for folder, infos in _folders():
        names = ", ".join(f"`{info.name}`" for info in infos)
        papers = ", ".join(dict.fromkeys(_paper(info) for info in infos))
        rows.append(f"| {folder} | {names} | {papers} | {_cell(_made_of(infos))} |")
    return "\n".join(rows)


def differences() -> str:
    """Return, per policy file, its summary and what its header says: setting, and differences from the authors' code."""
    parts = []
    for folder, infos in _folders():
        parts.append(f"### {folder}\n")
        for info in infos:
            header = _header(info)
            parts.append(f"**`{info.name}`**: {info.summary}.\n")
            if header not in (text for other in infos[: infos.index(info)] for text in (_header(other),)):
                parts.append(f"> {header}\n")
    return "\n".join(parts).rstrip()


def compat() -> str:
    """Return one row per component that can do as the authors' code does."""
    rows = ["| part | `compat: official` |", "|---|---|"]
    for kind in KINDS:
        for name, entry in sorted(registry().of(kind).items()):
            found = re.search(
                r"compat: `official`(.*?)(?:\n\n|\n[a-z_, ]+: |$)", inspect.cleandoc(entry.cls.__doc__ or ""), re.S
            )
            if found:
                rows.append(f"| {kind} `{name}` | {_cell(' '.join(found[1].split()))} |")
    return "\n".join(rows)


def counts() -> str:
    """Return one sentence on how much there is."""
    folders = list(_folders())
    policies = sum(len(infos) for _, infos in folders)
    kinds = ", ".join(f"{len(registry().of(kind))} {kind}s" for kind in KINDS)
    return f"{policies} policies of {len(folders)} methods and baselines, from {kinds}."


def parts() -> str:
    """Return one section per component: what it does and its options."""
    sections = []
    for kind, interface in KINDS.items():
        sections.append(f"## {kind.capitalize()}s\n")
        for name, entry in sorted(registry().of(kind).items()):
            sections.append(f"### {name}\n")
            sections.append(_described(entry.cls) + "\n")
            if issubclass(interface, Component) and (table := _options(entry.cls)):
                sections.append(table + "\n")
    return "\n".join(sections).rstrip()


def _folders() -> Iterator[tuple[str, list[PolicyInfo]]]:
    found: dict[str, list[PolicyInfo]] = {}
    for info in list_policies():
        found.setdefault(info.path.parent.name, []).append(info)
    yield from sorted(found.items())


def _header(info: PolicyInfo) -> str:
    lines = [line[1:].strip() for line in info.path.read_text().split("name:")[0].splitlines() if line.startswith("#")]
    return " ".join(lines)


def _made_of(infos: list[PolicyInfo]) -> str:
    """Return the sites and the words of every component in the files of a method."""
    sites, words = dict[str, None](), dict[str, None]()
    for info in infos:
        for stage in Policy.load(info.name).stages:
            sites[re.sub(r"layers\..*", "layers.k", str(stage.at))] = None
            for part in (stage.scorer, stage.budget, stage.selector, stage.merger):
                words.update(dict.fromkeys(_words(part)))
    return f"{', '.join(sites)}: {', '.join(words)}"


def _words(part: Any) -> Iterator[str]:
    if isinstance(part, Component):
        yield part.name
    if isinstance(part, Options):
        for child in part.children():
            yield from _words(child)


def _paper(info: PolicyInfo) -> str:
    if not info.paper:
        return "-"
    return f"[{info.paper.removeprefix('https://').removeprefix('arxiv.org/abs/')}]({info.paper})"


def _described(cls: Any) -> str:
    """Return the docstring as Markdown: the lines on options become a list."""
    text = inspect.cleandoc(cls.__doc__ or "")
    return re.sub(r"(?m)^((?:[a-z_]+, )*[a-z_]+): ", r"- `\1`: ", text)


def _options(cls: Any) -> str:
    fields = dataclasses.fields(cls)
    if not fields:
        return ""
    rows = ["| option | default |", "|---|---|"]
    for item in fields:
        default = "required" if item.default is dataclasses.MISSING else f"`{_shown(item.default)}`"
        rows.append(f"| `{item.name.removesuffix('_')}` | {default} |")
    return "\n".join(rows)


def _shown(value: Any) -> str:
    from tokenprune.components import plain

    return _cell(str(plain(value)).replace("None", "null").replace("True", "true").replace("False", "false"))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def rendered(text: str) -> str:
    """Return a document with its tables as the registry has them now."""
    for name, table in (
        ("counts", counts),
        ("methods", methods),
        ("differences", differences),
        ("parts", parts),
        ("compat", compat),
    ):
        start, end = f"<!-- {name} -->\n", f"\n<!-- /{name} -->"
        before, found, rest = text.partition(start)
        if found:
            text = before + start + table() + end + rest.partition(end.strip())[2]
    return text


PAGES = (ROOT / "README.md", ROOT / "docs" / "methods.md", ROOT / "docs" / "parts.md")

if __name__ == "__main__":
    for page in PAGES:
        page.write_text(rendered(page.read_text()))
