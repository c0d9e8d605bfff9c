"""A YAML document as plain data, with the place of every part and every problem found; overrides on top of it.

Nothing here knows what a policy means.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from tokenprune.errors import PolicyError, Problem, did_you_mean

__all__ = ["Document", "Location", "dotted", "place"]

Location = tuple[str | int, ...]
# What PyYAML lets through from scalars that are not what their tag says: `!!int ''`, `!!bool maybe`, `!!timestamp x`.
_YAML_ERRORS = (yaml.YAMLError, ValueError, OverflowError, LookupError, AttributeError, RecursionError)
_MAX_NODES, _MAX_DEPTH = 20_000, 40
_INDEX = re.compile(r"[0-9]{1,9}")


class Document:
    """Reads one document and collects what is wrong with it.

    source: its name in messages. per_stage: first keys of overrides that go to every stage. defaults: short forms of
    components that a stage may leave out.
    """

    def __init__(self, source: str, per_stage: Collection[str] = (), defaults: Mapping[str, str] | None = None) -> None:
        self.source = source
        self.per_stage = per_stage
        self.defaults = defaults or {}
        self.problems: list[Problem] = []

    # -- from a file to plain data and the place of every part

    def read(self, path: Path) -> tuple[dict[str, Any], dict[Location, Problem]]:
        """Return the top-level mapping of a file, and where each part was written."""
        try:
            text = path.read_bytes().decode()
        except FileNotFoundError:
            raise PolicyError([Problem("there is no such file", self.source)]) from None
        except IsADirectoryError:
            raise PolicyError([Problem("this is a directory; name a policy file in it", self.source)]) from None
        except UnicodeDecodeError as error:
            raise PolicyError([Problem(f"not UTF-8 text (byte {error.start})", self.source)]) from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise PolicyError([Problem(f"cannot be read: {reason}", self.source)]) from None
        marks: dict[Location, Problem] = {}
        data = self._parse(text, marks)
        self._stop_if_wrong()
        if not isinstance(data, dict):
            kind = "empty" if data is None else f"a {type(data).__name__}"
            raise PolicyError(
                [Problem(f"a policy is a mapping with name and stages; this file is {kind}", self.source)]
            )
        return data, marks

    def _parse(self, text: str, marks: dict[Location, Problem]) -> Any:
        try:
            loader = yaml.SafeLoader(text)
            node = loader.get_single_node()
            return None if node is None else self._build(loader, node, (), marks, [])
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            what = " ".join(filter(None, (error.context, error.problem))).replace("\n", " ")
            line, column = (mark.line + 1, mark.column + 1) if mark else (0, 0)
            self.problems.append(Problem(f"not valid YAML: {what}", self.source, line, column))
        except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
            what = "nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
            self.problems.append(Problem(f"not valid YAML: {what}", self.source))
        return None

    def _build(self, loader: Any, node: Any, at: Location, marks: dict[Location, Problem], above: list[Any]) -> Any:
        """Return the plain data of a YAML node; note where it stands."""
        here = Problem("", self.source, node.start_mark.line + 1, node.start_mark.column + 1)
        marks.setdefault(at, here)
        if node in above or len(above) > _MAX_DEPTH or len(marks) > _MAX_NODES:
            self._wrong(here, "the document is nested too deeply, too large, or contains itself")
            return None
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(loader, node, here)
        if node.tag not in ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"):
            self._wrong(here, f"the tag {node.tag!r} is not allowed; a policy is plain mappings, lists and words")
            return None
        below = [*above, node]
        if isinstance(node, yaml.SequenceNode):
            return [self._build(loader, item, (*at, i), marks, below) for i, item in enumerate(node.value)]
        made: dict[str, Any] = {}
        for key_node, value_node in node.value:
            place = Problem("", self.source, key_node.start_mark.line + 1, key_node.start_mark.column + 1)
            key = self._scalar(loader, key_node, place) if isinstance(key_node, yaml.ScalarNode) else None
            if not isinstance(key, str):
                shown = key_node.value if isinstance(key_node, yaml.ScalarNode) else "a list or mapping"
                self._wrong(place, f"{shown!r} is not a word and cannot be a key (quote it if it is meant as one)")
            elif key in made:
                self._wrong(place, f"the key {key!r} stands twice in this mapping")
            else:
                made[key] = self._build(loader, value_node, (*at, key), marks, below)
                marks[(*at, key, "<key>")] = place
        return made

    def _scalar(self, loader: Any, node: Any, place: Problem) -> Any:
        try:
            return loader.construct_object(node)
        except _YAML_ERRORS as error:
            what = getattr(error, "problem", None) or f"{node.value!r} is not what its tag or form says it is"
            self._wrong(place, f"not valid YAML: {what}")
            return None

    def _wrong(self, place: Problem, message: str) -> None:
        self.problems.append(dataclasses.replace(place, message=message))

    def _stop_if_wrong(self) -> None:
        if self.problems:
            raise PolicyError(sorted(self.problems, key=lambda p: (p.line, p.column)))

    # -- overrides

    def override(self, data: dict[str, Any], marks: dict[Location, Problem], query: str) -> None:
        """Apply `key=value&key=value` to the plain data."""
        for part in filter(None, query.split("&")):
            key, equals, text = part.partition("=")
            place = Problem("", f"?{part}")
            try:
                value = yaml.safe_load(text)
            except _YAML_ERRORS:
                equals, value = "", None
            if not key or not equals:
                self._wrong(place, "an override is written key=value, for example seed=3 or scorer=random")
                continue
            path: Location = tuple(int(word) if _INDEX.fullmatch(word) else word for word in key.split("."))
            stages = data.get("stages")
            if path[0] in self.per_stage and isinstance(stages, list):
                for number in range(len(stages)):
                    self._set(data, marks, ("stages", number, *path), value, place)
            else:
                self._set(data, marks, path, value, place)
        self._stop_if_wrong()

    def _set(self, data: Any, marks: dict[Location, Problem], path: Location, value: Any, place: Problem) -> None:
        inner = data
        for depth, step in enumerate(path[:-1]):
            after = path[depth + 1]
            if isinstance(inner, list) and isinstance(step, int) and step < len(inner):
                if isinstance(inner[step], str) and isinstance(after, str):
                    inner[step] = {"name": inner[step]}
            elif isinstance(inner, dict) and isinstance(step, str):
                short = inner.get(step, self.defaults.get(step) if step in self.defaults else None)
                if isinstance(short, str):  # the short form of a component grows its options
                    inner[step] = {"name": short}
                elif step not in inner and step == "budget":
                    inner[step] = {}
                elif step not in inner:
                    possible = [str(key) for key in inner]
                    self._wrong(
                        place, f"there is no {step!r} here, only {', '.join(possible)}.{did_you_mean(step, possible)}"
                    )
                    return
            else:
                size = f"it has {len(inner)} entries" if isinstance(inner, list) else "it holds a single value"
                self._wrong(place, f"{dotted(path[:depth]) or 'the policy'} has no {step!r}; {size}")
                return
            inner = inner[step]
        last = path[-1]
        if isinstance(inner, dict) and isinstance(last, str):
            if last in ("keep_ratio", "keep_tokens"):  # the other form gives way
                inner.pop("keep_tokens" if last == "keep_ratio" else "keep_ratio", None)
            inner[last] = value
            for known in [known for known in marks if known[: len(path)] == path]:
                del marks[known]
            marks[path] = marks[(*path, "<key>")] = place
        elif isinstance(inner, list) and isinstance(last, int) and last < len(inner):
            inner[last] = value
            marks[path] = place
        else:
            self._wrong(place, f"{dotted(path[:-1])} has no {last!r}")


def place(marks: Mapping[Location, Problem], location: Location, message: str) -> Problem:
    """Return a problem at the innermost part of `location` whose place is known."""
    named = dotted(tuple(step for step in location if step != "<key>"))
    text = f"{named}: {message}" if named else message
    for end in range(len(location), -1, -1):
        if location[:end] in marks:
            return dataclasses.replace(marks[location[:end]], message=text)
    return Problem(text)


def dotted(location: Location) -> str:
    """Return a location as messages show it: `stages[0].budget`."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in location)
    return text.removeprefix(".")
