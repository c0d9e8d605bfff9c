"""Policies: YAML to frozen objects, with every problem of a file at its place, at once.

Here is syntax and everything that can be said without a model; `tokenprune.plan` adds what only a model can tell.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from tokenprune.errors import PluginError, PolicyError, Problem, did_you_mean
from tokenprune.interfaces import Component, Merger, Scorer, Selector
from tokenprune.plugins import KINDS, Registry, registry
from tokenprune.tokens import Budget, Site

__all__ = ["Policy", "PolicyInfo", "Stage", "json_schema", "list_policies"]

Location = tuple[str | int, ...]
_DEFAULTS = {"selector": "topk", "merger": "drop"}
_COMPONENTS = ("scorer", "selector", "merger")
_PER_STAGE = (*_COMPONENTS, "budget")
_HEAD = ("name", "summary", "paper")
# What PyYAML lets through from scalars that are not what their tag says: `!!int ''`, `!!bool maybe`, `!!timestamp x`.
_YAML_ERRORS = (yaml.YAMLError, ValueError, OverflowError, LookupError, AttributeError, RecursionError)


@dataclass(frozen=True)
class Stage:
    """Where tokens leave, how they are ranked, how many stay, which, and what becomes of the rest.

    budget None: its keep ratio is solved from the policy's `average_tokens`.
    """

    at: Site
    scorer: Scorer | None
    selector: Selector
    budget: Budget | None
    merger: Merger


@dataclass(frozen=True)
class Policy:
    """A list of stages with a name. Equal policies have equal content, wherever they were read from."""

    name: str
    stages: tuple[Stage, ...]
    summary: str = ""
    paper: str | None = None
    seed: int = 0
    average_tokens: float | None = None
    _marks: Mapping[Location, Problem] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def load(cls, source: str | Path | Mapping[str, Any] | Policy) -> Policy:
        """Read a policy: a registered name, a path to a YAML file, a mapping, or a policy (returned as it is).

        A name or path may carry overrides: `fastv?scorer=random&seed=3`. A key is a dotted path into the file
        (`stages.0.budget.keep_ratio=0.4`); one that starts with scorer, selector, budget or merger goes to every stage.

        Raises PolicyError with all problems found.
        """
        if isinstance(source, Policy):
            return source
        if isinstance(source, Mapping):
            return _Reader("").policy({"name": "unnamed", **source}, {})
        text, _, query = str(source).partition("?")
        path = Path(text) if isinstance(source, Path) or _is_path(text) else _find(text)
        reader = _Reader(str(path))
        data, marks = reader.read(path)
        reader.override(data, marks, query)
        return reader.policy(data, marks)

    def problem(self, location: Location, message: str) -> Problem:
        """Return a problem placed where the given part of the policy was written."""
        return _place(self._marks, location, message)

    def to_dict(self) -> dict[str, Any]:
        """Return the policy as plain data, defaults left out; `load` reads it back."""
        head: dict[str, Any] = {"name": self.name}
        for key in ("summary", "paper", "seed", "average_tokens"):
            if getattr(self, key) != _default(Policy, key):
                head[key] = getattr(self, key)
        return {**head, "stages": [_stage_dict(stage) for stage in self.stages]}

    def to_yaml(self) -> str:
        """Return the policy as YAML; `load` reads it back."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True, width=120)

    @property
    def digest(self) -> str:
        """12 hex digits of the SHA-256 of everything that has an effect: stages, seed, average_tokens."""
        effect = {key: value for key, value in self.to_dict().items() if key not in _HEAD}
        return hashlib.sha256(json.dumps(effect, sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class PolicyInfo:
    """One policy file as `tokenprune list` shows it; `error` tells why it cannot be read."""

    name: str
    summary: str
    paper: str | None
    path: Path
    distribution: str
    error: str = ""


# ---- plain data out --------------------------------------------------------------------------------------------------


def _default(cls: type, name: str) -> Any:
    return next(item.default for item in dataclasses.fields(cls) if item.name == name)


def _options(item: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that differ from their defaults."""
    values = {f.name: getattr(item, f.name) for f in dataclasses.fields(item)}
    return {name: value for name, value in values.items() if value != _default(type(item), name)}


def _stage_dict(stage: Stage) -> dict[str, Any]:
    made: dict[str, Any] = {"at": str(stage.at)}
    for key in _COMPONENTS:
        component: Component | None = getattr(stage, key)
        if component is not None and (options := _options(component)):
            made[key] = {"name": component.name, **options}
        elif component is not None and component.name != _DEFAULTS.get(key):
            made[key] = component.name
    if stage.budget is not None:
        made["budget"] = _options(stage.budget)
    return made


# ---- finding files ---------------------------------------------------------------------------------------------------


def _is_path(text: str) -> bool:
    return text.endswith((".yaml", ".yml")) or "/" in text or "\\" in text


def _find(name: str) -> Path:
    """Return the file of a registered policy."""
    infos = {info.name: info for info in sorted(list_policies(), key=lambda info: not info.error)}  # readable files win
    if name in infos:
        return infos[name].path
    here = f" There is a file {name!r} here; write ./{name} for it." if _is_file(name) else ""
    raise PolicyError(f"no policy named {name!r}; `tokenprune list` shows them.{did_you_mean(name, infos)}{here}")


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except (OSError, ValueError):  # longer than a file name can be, or with a null byte
        return False


def list_policies() -> list[PolicyInfo]:
    """Return all policy files of all plugins, by name. A file that cannot be read is listed with its error."""
    return list(_listed(registry()))


@cache
def _listed(plugins: Registry) -> tuple[PolicyInfo, ...]:
    infos = [
        _info(path, distribution)
        for directory, distribution in plugins.policy_dirs
        for path in sorted(directory.rglob("*.yaml"))
    ]
    infos.sort(key=lambda info: info.name)
    # A file that cannot be read goes by its stem, which is a guess and claims no name.
    for info, other in pairwise(info for info in infos if not info.error):
        if info.name == other.name:
            raise PluginError(
                f"two files define policy {info.name!r}: {info.path} of {info.distribution} and {other.path} of "
                f"{other.distribution}"
            )
    return tuple(infos)


def _info(path: Path, distribution: str) -> PolicyInfo:
    try:
        data, _ = _Reader(str(path)).read(path)
    except PolicyError as error:
        return PolicyInfo(path.stem, "", None, path, distribution, str(error))
    name, summary, paper = (value if isinstance(value, str) else None for value in map(data.get, _HEAD))
    return PolicyInfo(name or path.stem, summary or "", paper, path, distribution)


# ---- YAML in ---------------------------------------------------------------------------------------------------------


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _PolicyKeys(_Strict):
    name: Annotated[str, Field(min_length=1)]
    stages: Annotated[list[Any], Field(min_length=1)]
    summary: str = ""
    paper: Annotated[str, Field(pattern=r"^https?://")] | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    average_tokens: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


class _StageKeys(_Strict):
    at: str
    scorer: Any = None
    selector: Any = "topk"
    budget: Any = None
    merger: Any = "drop"


class _BudgetKeys(_Strict):
    keep_ratio: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    keep_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    of: Literal["alive", "original"] = "alive"
    min_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] = 0


_WHAT = {"_PolicyKeys": "a policy", "_StageKeys": "a stage", "_BudgetKeys": "a budget"}
_MAX_NODES, _MAX_DEPTH = 20_000, 40
_INDEX = re.compile(r"[0-9]{1,9}")


class _Reader:
    """Reads one document and collects what is wrong with it."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.problems: list[Problem] = []
        self.marks: Mapping[Location, Problem] = {}

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
            if path[0] in _PER_STAGE and isinstance(stages, list):
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
                short = inner.get(step, _DEFAULTS.get(step) if step in _DEFAULTS else None)
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
                self._wrong(place, f"{_dotted(path[:depth]) or 'the policy'} has no {step!r}; {size}")
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
            self._wrong(place, f"{_dotted(path[:-1])} has no {last!r}")

    # -- from plain data to a policy

    def policy(self, data: Mapping[str, Any], marks: Mapping[Location, Problem]) -> Policy:
        """Return the policy, or raise with everything that is wrong."""
        self.marks = marks
        keys = self._checked(_PolicyKeys, data, ())
        stages_data = data.get("stages")
        stages = [
            self._stage(item, ("stages", i))
            for i, item in enumerate(stages_data if isinstance(stages_data, list) else ())
        ]
        self._budgets(data, stages)
        self._stop_if_wrong()
        assert keys is not None
        made = tuple(stage for stage in stages if stage is not None)
        return Policy(keys.name, made, keys.summary, keys.paper, keys.seed, keys.average_tokens, dict(marks))

    def _budgets(self, data: Mapping[str, Any], stages: Sequence[Stage | None]) -> None:
        average = data.get("average_tokens")
        open_stages = [i for i, stage in enumerate(stages) if stage is not None and stage.budget is None]
        if average is not None and not open_stages and stages and None not in stages:
            self._at(("average_tokens",), "nothing is left to solve: leave the budget of at least one stage out")
        for number in open_stages if average is None else ():
            self._at(
                ("stages", number),
                "a stage needs a budget: {keep_ratio: 0.5}, {keep_tokens: 64}, or average_tokens on the policy",
            )

    def _stage(self, data: Any, at: Location) -> Stage | None:
        before = len(self.problems)
        keys = self._checked(_StageKeys, data, at)
        if not isinstance(data, Mapping):
            return None
        text = data.get("at")
        site = self._site(text, (*at, "at")) if isinstance(text, str) else None
        made = {kind: self._component(kind, data.get(kind, _DEFAULTS.get(kind)), (*at, kind)) for kind in _COMPONENTS}
        budget = self._budget(data["budget"], (*at, "budget")) if "budget" in data else None
        selector = made["selector"]
        if isinstance(selector, Selector):
            if selector.uses_scores and data.get("scorer") is None:
                there = ", ".join(sorted(registry().scorers))
                self._at(at, f"selector {selector.name!r} needs a scorer; there are {there}")
            if not selector.uses_scores and data.get("scorer") is not None:
                self._at((*at, "scorer"), f"scorer is ignored by selector {selector.name!r}; leave one of them out")
        if len(self.problems) > before or keys is None or site is None:
            return None
        return Stage(site, made["scorer"], made["selector"], budget, made["merger"])

    def _site(self, text: str, at: Location) -> Site | None:
        try:
            return Site(text)
        except ValueError as error:
            self._at(at, str(error))
            return None

    def _budget(self, data: Any, at: Location) -> Budget | None:
        keys = self._checked(_BudgetKeys, data, at)
        if keys is None:
            return None
        try:
            return Budget(**keys.model_dump())
        except ValueError as error:
            self._at(at, str(error))
            return None

    def _component(self, kind: str, data: Any, at: Location) -> Any:
        """Return the scorer, selector or merger that `data` names: a word, or a mapping with `name` and options."""
        if data is None and kind == "scorer":
            return None
        options: dict[str, Any] = {"name": data} if isinstance(data, str) else data
        if not isinstance(options, dict) or not isinstance(options.get("name"), str):
            there = ", ".join(sorted(registry().of(kind)))
            given = _shown(data) + _bare_word(data)
            self._at(at, f"a {kind} is a word or {{name: word, option: value}}, not {given}; there are {there}")
            return None
        options = dict(options)
        try:
            entry = registry().get(kind, options.pop("name"))
        except PluginError as error:
            self._at((*at, "name") if isinstance(data, dict) else at, str(error))
            return None
        try:
            written = json.dumps(options)
        except (TypeError, ValueError, RecursionError):  # dates, bytes, a list in itself, an endless number
            self._at(at, f"options are words, numbers, lists and mappings, not {_shown(options)}")
            return None
        try:
            # By way of JSON, because pydantic's strict mode takes a dataclass from plain data there only; without it an
            # option of a plugin that forgot to say strict turns '64' into 64 and true into 1.
            return TypeAdapter(entry.cls).validate_json(written, strict=True)
        except ValidationError as error:
            takes = [item.name for item in dataclasses.fields(entry.cls)]
            self._errors(error, at, takes, f"{entry.name!r} has no option")
            return None

    def _checked(self, model: type[Any], data: Any, at: Location) -> Any:
        """Return the validated keys of a mapping, or None after noting what is wrong."""
        try:
            return model.model_validate(data)
        except ValidationError as error:
            what = _WHAT[model.__name__]
            if not isinstance(data, Mapping):
                self._at(at, f"{what} is a mapping with {', '.join(model.model_fields)}, not {_shown(data)}")
            else:
                self._errors(error, at, list(model.model_fields), f"{what} has no key")
            return None

    def _errors(self, error: ValidationError, at: Location, takes: Sequence[str], unknown: str) -> None:
        for item in error.errors():
            place = (*at, *(step for step in item["loc"] if step in takes or item["type"] == "extra_forbidden"))
            if item["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
                word = str(item["loc"][-1])
                listed = f"it takes {', '.join(sorted(takes))}" if takes else "it takes none"
                self._at((*at, word), f"{unknown} {word!r}; {listed}.{did_you_mean(word, takes)}", key=True)
            elif item["type"] == "missing":
                self._at(at, f"{item['loc'][-1]!r} is missing")
            elif item["type"] == "value_error":
                self._at(place, str(item["ctx"]["error"]))
            else:
                text = item["msg"]
                hint = _bare_word(item["input"]) if item["type"] in ("string_type", "literal_error") else ""
                self._at(place, f"{text[0].lower()}{text[1:]}, not {_shown(item['input'])}{hint}")

    def _at(self, at: Location, message: str, *, key: bool = False) -> None:
        place = (*at, "<key>") if key and (*at, "<key>") in self.marks else at
        problem = _place(self.marks, place, message)
        if not problem.source:
            problem = dataclasses.replace(problem, source=self.source)
        self.problems.append(problem)


def _place(marks: Mapping[Location, Problem], location: Location, message: str) -> Problem:
    """Return a problem at the innermost part of `location` whose place is known."""
    named = _dotted(tuple(step for step in location if step != "<key>"))
    text = f"{named}: {message}" if named else message
    for end in range(len(location), -1, -1):
        if location[:end] in marks:
            return dataclasses.replace(marks[location[:end]], message=text)
    return Problem(text)


def _dotted(location: Location) -> str:
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in location)
    return text.removeprefix(".")


def _bare_word(value: Any) -> str:
    """Return a hint for YAML 1.1's bare words that are no words."""
    return " (a bare on, off, yes or no is read as true or false: quote it)" if isinstance(value, bool) else ""


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # Python refuses to print integers of more than 4300 digits
        return "a value too long to show"
    return text if len(text) <= 60 else text[:57] + "..."


# ---- JSON Schema -----------------------------------------------------------------------------------------------------


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a policy file with the plugins installed here, for editors."""
    stage = _StageKeys.model_json_schema()
    for kind in _COMPONENTS:
        forms = [form for entry in registry().of(kind).values() for form in _forms(entry.cls)]
        stage["properties"][kind] = {"anyOf": forms, "description": KINDS[kind].__doc__}
    stage["properties"]["budget"] = _plain(_BudgetKeys.model_json_schema())
    schema = _PolicyKeys.model_json_schema()
    schema["properties"]["stages"]["items"] = _plain(stage)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "tokenprune policy"}


def _forms(cls: Any) -> list[dict[str, Any]]:
    """Return the short and the long form of a component."""
    options = TypeAdapter(cls).json_schema()
    name = {"const": cls.name, "description": cls.summary()}
    long = {**_plain(options), "additionalProperties": False, "required": ["name"]}
    long["properties"] = {"name": name, **options.get("properties", {})}
    return [name, long]


def _plain(schema: dict[str, Any]) -> dict[str, Any]:
    drop: Callable[[str], bool] = lambda key: key in ("title", "description") and isinstance(schema[key], str)  # noqa: E731
    return {key: value for key, value in schema.items() if not drop(key)}
