"""Policies: plain data to frozen objects, with every problem of a file at its place, at once.

Here is everything that can be said without a model; `tokenprune.plan` adds what only a model can tell.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from tokenprune.budget import Budget
from tokenprune.components import Faults, build, check, faults, forms, plain, shown
from tokenprune.document import Document, Location, place
from tokenprune.errors import PluginError, PolicyError, Problem, did_you_mean
from tokenprune.interfaces import Merger, Options, Scorer, Selector
from tokenprune.plugins import KINDS, Registry, registry
from tokenprune.tokens import Signal, Site

__all__ = ["Policy", "PolicyInfo", "Refresh", "Stage", "json_schema", "list_policies"]

_DEFAULTS = {"selector": "topk", "merger": "drop"}
_COMPONENTS = ("scorer", "selector", "merger")
_OPTIONS: dict[str, type[Any]] = {}
_PER_STAGE = (*_COMPONENTS, "budget", "refresh")
_HEAD = ("name", "summary", "paper")


@dataclass(frozen=True)
class Refresh(Options):
    """When a decoding step chooses its view anew.

    similarity_below: it does when the cosine between its scores and those of the step before is lower; otherwise the step
    uses the last view again (`reuse`, as the paper of DyCoke says) or sees everything (`full`, as its code does).
    """

    similarity_below: float = 1.1
    otherwise: Literal["reuse", "full"] = "reuse"


@dataclass(frozen=True)
class WrittenFor(Options):
    """The model that layer numbers are written for: on another one a layer stands at the same share of the depth.

    llm: decoder layers. vision: layers of the vision tower.
    """

    llm: Annotated[int, Field(strict=True, ge=1)] | None = None
    vision: Annotated[int, Field(strict=True, ge=1)] | None = None


_OPTIONS.update(budget=Budget, refresh=Refresh, written_for=WrittenFor)


@dataclass(frozen=True)
class Stage:
    """Where tokens leave, how they are ranked, how many stay, which, and what becomes of the rest.

    budget None: its keep ratio is solved from the policy's `average_tokens` or `prefill_flops`, or its selector counts
    itself. refresh: for `decode` sites. written: where it stands in the file.
    """

    at: Site
    scorer: Scorer | None
    selector: Selector
    budget: Budget | None
    merger: Merger
    refresh: Refresh | None = None
    written: Location = field(default=(), compare=False, repr=False)

    @property
    def is_open(self) -> bool:
        """Whether the planner has to find its budget."""
        return self.budget is None and not self.selector.counts_itself

    def needs(self) -> tuple[Signal, ...]:
        """Return every signal its parts read, each once."""
        parts = (self.scorer, self.selector, self.budget, self.merger)
        return tuple(dict.fromkeys(signal for part in parts if part is not None for signal in part.needs()))


Positions = Literal["keep", "renumber", "renumber_unless_grid"]


@dataclass(frozen=True)
class Policy:
    """A list of stages with a name. Equal policies have equal content, wherever they were read from.

    average_tokens, prefill_flops: what the stages without a budget are solved for. positions: tokens `keep` their position
    ids when others leave, or the sequence is `renumber`ed from 0 after each stage (`renumber_unless_grid`: where they are one
    sequence, and kept where they are a grid of time, row and column). proportional_attention: a merged token
    weighs as much in attention as the tokens it stands for (ToMe, https://arxiv.org/abs/2210.09461). modality: `video` for a
    policy that compares frames, and would do nothing to a prompt without a clip. written_for: the depth of the model that
    layer numbers belong to; without it they are taken as they are, and a model that lacks one is refused.
    """

    name: str
    stages: tuple[Stage, ...]
    summary: str = ""
    paper: str | None = None
    seed: int = 0
    average_tokens: float | None = None
    prefill_flops: float | None = None
    positions: Positions = "keep"
    proportional_attention: bool = False
    modality: Literal["any", "video"] = "any"
    written_for: WrittenFor = WrittenFor()
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
            return _Checker("", {}).policy({"name": "unnamed", **source})
        text, _, query = str(source).partition("?")
        path = Path(text) if isinstance(source, Path) or _is_path(text) else _find(text)
        document = Document(str(path), _PER_STAGE, _DEFAULTS)
        data, marks = document.read(path)
        document.override(data, marks, query)
        return _Checker(str(path), marks).policy(data)

    def problem(self, location: Location, message: str) -> Problem:
        """Return a problem placed where the given part of the policy was written."""
        return place(self._marks, location, message)

    def to_dict(self) -> dict[str, Any]:
        """Return the policy as plain data, defaults left out; `load` reads it back."""
        head: dict[str, Any] = {"name": self.name}
        for item in dataclasses.fields(self):
            if item.name in _PolicyKeys.model_fields and item.name not in ("name", "stages"):
                value = getattr(self, item.name)
                if value != item.default:
                    head[item.name] = plain(value)
        return {**head, "stages": [_stage_dict(stage) for stage in self.stages]}

    def to_yaml(self) -> str:
        """Return the policy as YAML; `load` reads it back."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True, width=120)

    @property
    def digest(self) -> str:
        """12 hex digits of the SHA-256 of everything that has an effect: all but name, summary and paper."""
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


def _stage_dict(stage: Stage) -> dict[str, Any]:
    made: dict[str, Any] = {"at": str(stage.at)}
    for key in (*_COMPONENTS, *_OPTIONS):
        part = getattr(stage, key, None)
        if part is not None and (data := plain(part)) != _DEFAULTS.get(key):
            made[key] = data
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
        data, _ = Document(str(path)).read(path)
    except PolicyError as error:
        return PolicyInfo(path.stem, "", None, path, distribution, str(error))
    name, summary, paper = (value if isinstance(value, str) else None for value in map(data.get, _HEAD))
    return PolicyInfo(name or path.stem, summary or "", paper, path, distribution)


# ---- plain data in ---------------------------------------------------------------------------------------------------


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _PolicyKeys(_Strict):
    name: Annotated[str, Field(min_length=1)]
    stages: Annotated[list[Any], Field(min_length=1)]
    summary: str = ""
    paper: Annotated[str, Field(pattern=r"^https?://")] | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    average_tokens: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    prefill_flops: Annotated[float, Field(gt=0, le=1)] | None = None
    positions: Positions = "keep"
    proportional_attention: bool = False
    modality: Literal["any", "video"] = "any"
    written_for: Any = None


class _StageKeys(_Strict):
    at: str | Annotated[list[str], Field(min_length=1)]
    scorer: Any = None
    selector: Any = "topk"
    budget: Any = None
    merger: Any = "drop"
    refresh: Any = None


_WHAT = {
    "_PolicyKeys": "a policy",
    "_StageKeys": "a stage",
    "budget": "a budget",
    "refresh": "a refresh rule",
    "written_for": "written_for",
}


class _Checker:
    """Makes a policy of plain data and collects what is wrong with it."""

    def __init__(self, source: str, marks: Mapping[Location, Problem]) -> None:
        self.source = source
        self.marks = marks
        self.problems: list[Problem] = []

    def policy(self, data: Mapping[str, Any]) -> Policy:
        """Return the policy, or raise with everything that is wrong."""
        keys = self._checked(_PolicyKeys, data, ())
        stages_data = data.get("stages")
        stages = [
            stage
            for i, item in enumerate(stages_data if isinstance(stages_data, list) else ())
            for stage in self._stages(item, ("stages", i))
        ]
        self._budgets(data, stages)
        written = self._options("written_for", data.get("written_for"), ()) or WrittenFor()
        if self.problems:
            raise PolicyError(sorted(self.problems, key=lambda p: (p.line, p.column)))
        assert keys is not None
        made = tuple(stage for stage in stages if stage is not None)
        head = {name: getattr(keys, name) for name in type(keys).model_fields if name not in ("stages", "written_for")}
        return Policy(stages=made, written_for=written, _marks=dict(self.marks), **head)

    def _budgets(self, data: Mapping[str, Any], stages: Sequence[Stage | None]) -> None:
        goals = [key for key in ("average_tokens", "prefill_flops") if data.get(key) is not None]
        open_stages = [stage for stage in stages if stage is not None and stage.is_open]
        if len(goals) > 1:
            self._at((goals[1],), "average_tokens and prefill_flops are solved by the same budgets; state one of them")
        if goals and not open_stages and stages and None not in stages:
            self._at((goals[0],), "nothing is left to solve: leave the budget of at least one stage out")
        for stage in open_stages if not goals else ():
            self._at(
                stage.written,
                "a stage needs a budget: {keep_ratio: 0.5}, {keep_tokens: 64}, or average_tokens on the policy",
            )

    # -- stages

    def _stages(self, data: Any, at: Location) -> Iterator[Stage | None]:
        """Yield one stage per site: `at` may be a list, and then the numbers of its budget may be lists of that length."""
        before = len(self.problems)
        keys = self._checked(_StageKeys, data, at)
        if not isinstance(data, Mapping):
            yield None
            return
        sites = data.get("at")
        if not isinstance(sites, list):
            sites = [sites]
        made = {kind: self._component(kind, data.get(kind, _DEFAULTS.get(kind)), (*at, kind)) for kind in _COMPONENTS}
        self._scoring(data, made["selector"], at)
        refresh = self._options("refresh", data.get("refresh"), at)
        for number, text in enumerate(sites):
            site_at = (*at, "at", number) if isinstance(data.get("at"), list) else (*at, "at")
            site = self._site(text, site_at) if isinstance(text, str) else None
            budget = self._options("budget", self._of_site(data.get("budget"), number, len(sites), at), at)
            if site is not None:
                self._where(site, refresh, data, at, site_at)
            if len(self.problems) > before or keys is None or site is None:
                yield None
            else:
                yield Stage(site, made["scorer"], made["selector"], budget, made["merger"], refresh, at)

    def _of_site(self, budget: Any, number: int, sites: int, at: Location) -> Any:
        """Return the budget of one of several sites: lists in it give each its number."""
        if not isinstance(budget, dict):
            return budget
        lists = {
            key: value
            for key, value in budget.items()
            if key in ("keep_ratio", "keep_tokens") and isinstance(value, list)
        }
        for key, value in lists.items():
            if len(value) != sites:
                if number == 0:
                    message = f"{key} lists {len(value)} numbers for {sites} sites; both lists have one length"
                    self._at((*at, "budget", key), message)
                return None
        return {**budget, **{key: value[number] for key, value in lists.items()}}

    def _scoring(self, data: Mapping[str, Any], selector: Any, at: Location) -> None:
        if not isinstance(selector, Selector):
            return
        if selector.uses_scores and data.get("scorer") is None:
            there = ", ".join(sorted(registry().of("scorer")))
            self._at(at, f"selector {selector.name!r} needs a scorer; there are {there}")
        if not selector.uses_scores and data.get("scorer") is not None:
            self._at((*at, "scorer"), f"scorer is ignored by selector {selector.name!r}; leave one of them out")

    def _where(
        self, site: Site, refresh: Refresh | None, data: Mapping[str, Any], at: Location, site_at: Location
    ) -> None:
        if site.part == "vision" and site.is_layer:
            self._at(site_at, f"{site} is a place to read a signal ('from'); tokens leave at vision.output or later")
        if refresh is not None and site.part != "decode":
            self._at((*at, "refresh"), f"refresh belongs to decode.layers.<k>, not to {site}")
        if site.part == "decode" and data.get("merger") not in (None, "drop"):
            self._at((*at, "merger"), "nothing is merged while decoding: the cache keeps every token; leave merger out")

    def _site(self, text: str, at: Location) -> Site | None:
        try:
            return Site(text)
        except ValueError as error:
            self._at(at, str(error))
            return None

    # -- parts of a stage

    def _options(self, key: str, data: Any, at: Location) -> Any:
        """Return the budget or refresh rule written at `key` of a stage, or None."""
        if data is None:
            return None
        takes = [item.name for item in dataclasses.fields(_OPTIONS[key])]
        if not isinstance(data, Mapping):
            self._at((*at, key), f"{_WHAT[key]} is a mapping with {', '.join(takes)}, not {shown(data)}")
            return None
        return self._built(lambda: check(_OPTIONS[key], data, f"{_WHAT[key]} has no key"), (*at, key))

    def _component(self, kind: str, data: Any, at: Location) -> Any:
        if data is None and kind == "scorer":
            return None
        return self._built(lambda: build(kind, data), at)

    def _built(self, make: Any, at: Location) -> Any:
        try:
            return make()
        except Faults as error:
            for fault in error.found:
                self._at((*at, *fault.at), fault.message, key=fault.key)
            return None

    def _checked(self, model: type[Any], data: Any, at: Location) -> Any:
        """Return the validated keys of a mapping, or None after noting what is wrong."""
        try:
            return model.model_validate(data)
        except ValidationError as error:
            what = _WHAT[model.__name__]
            takes = list(model.model_fields)
            if not isinstance(data, Mapping):
                self._at(at, f"{what} is a mapping with {', '.join(takes)}, not {shown(data)}")
                return None
            for fault in faults(error, data, takes, f"{what} has no key"):
                self._at((*at, *fault.at), fault.message, key=fault.key)
            return None

    def _at(self, at: Location, message: str, *, key: bool = False) -> None:
        where = (*at, "<key>") if key and (*at, "<key>") in self.marks else at
        problem = place(self.marks, where, message)
        if not problem.source:
            problem = dataclasses.replace(problem, source=self.source)
        if problem not in self.problems:  # one mistake in a stage of several sites
            self.problems.append(problem)


# ---- JSON Schema -----------------------------------------------------------------------------------------------------


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a policy file with the plugins installed here, for editors."""
    stage = _StageKeys.model_json_schema()
    for kind in _COMPONENTS:
        possible = [form for entry in registry().of(kind).values() for form in forms(entry.cls)]
        stage["properties"][kind] = {"anyOf": possible, "description": KINDS[kind].__doc__}
    schema = _PolicyKeys.model_json_schema()
    for key, cls in _OPTIONS.items():
        part = schema if key in schema["properties"] else stage
        part["properties"][key] = {**TypeAdapter(cls).json_schema(), "additionalProperties": False}
    schema["properties"]["stages"]["items"] = {key: value for key, value in stage.items() if key != "title"}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "tokenprune policy"}
