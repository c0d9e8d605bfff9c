"""Writes the tables of README.md from the registry: `python docs/tables.py`. A test fails when they are stale."""

from __future__ import annotations

from pathlib import Path

from tokenprune.plugins import registry
from tokenprune.policy import PolicyInfo, list_policies

README = Path(__file__).parents[1] / "README.md"


def methods() -> str:
    """Return one row per policy: name, what it does, paper."""
    rows = ["| policy | what it does | paper |", "|---|---|---|"]
    return "\n".join([*rows, *(f"| `{info.name}` | {info.summary} | {_paper(info)} |" for info in list_policies())])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _paper(info: PolicyInfo) -> str:
    return (
        f"[{info.paper.removeprefix('https://').removeprefix('arxiv.org/abs/')}]({info.paper})" if info.paper else "-"
    )


def parts() -> str:
    """Return one row per scorer, selector, merger and adapter."""
    rows = ["| kind | name | |", "|---|---|---|"]
    for kind in ("scorer", "selector", "merger", "adapter"):
        rows += [
            f"| {kind} | `{name}` | {_cell(entry.cls.summary())} |"
            for name, entry in sorted(registry().of(kind).items())
        ]
    return "\n".join(rows)


def rendered(text: str) -> str:
    """Return the README with both tables as the registry has them now."""
    for name, table in (("methods", methods()), ("parts", parts())):
        start, end = f"<!-- {name} -->\n", f"\n<!-- /{name} -->"
        before, _, rest = text.partition(start)
        text = before + start + table + end + rest.partition(end.strip())[2]
    return text


if __name__ == "__main__":
    README.write_text(rendered(README.read_text()))
