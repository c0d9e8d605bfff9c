"""From plain data to components and back: a word, or a mapping with `name` and options, nested as deep as a policy likes.

All problems of a component are found at once, each with its place inside it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError, core_schema

from tokenprune.errors import PluginError, did_you_mean
from tokenprune.interfaces import _INTERFACES, Component, Options
from tokenprune.plugins import KINDS, registry
from tokenprune.tokens import Site

__all__ = ["Fault", "Faults", "build", "check", "faults", "forms", "plain", "shown"]

Location = tuple[str | int, ...]
OPTION_KINDS = tuple(kind for kind, cls in KINDS.items() if issubclass(cls, Component))


@dataclass(frozen=True)
class Fault:
    """One thing wrong inside a component. at: where, from its own top. key: the key itself is wrong, not its value."""

    at: Location
    message: str
    key: bool = False


class Faults(ValueError):
    """Everything wrong with a component."""

    def __init__(self, found: Sequence[Fault]) -> None:
        self.found = tuple(found)
        super().__init__("; ".join(fault.message for fault in found))


# ---- plain data in ---------------------------------------------------------------------------------------------------


def build(kind: str, data: Any) -> Any:
    """Return the component of a kind that `data` names: a word, or a mapping with `name` and options.

    Raises Faults with everything that is wrong.
    """
    options: dict[str, Any] = {"name": data} if isinstance(data, str) else data
    if not isinstance(options, dict) or not isinstance(options.get("name"), str):
        there = ", ".join(sorted(registry().of(kind)))
        given = shown(data) + _bare_word(data)
        raise Faults(
            [Fault((), f"a {kind} is a word or {{name: word, option: value}}, not {given}; there are {there}")]
        )
    options = dict(options)
    try:
        entry = registry().get(kind, options.pop("name"))
    except PluginError as error:
        raise Faults([Fault(("name",) if isinstance(data, dict) else (), str(error))]) from None
    return check(entry.cls, options, f"{entry.name!r} has no option")


def check(cls: Any, data: Mapping[str, Any], unknown: str) -> Any:
    """Return the dataclass `cls` made from its options as plain data; raise Faults. unknown: begins the message on a key."""
    try:
        written = json.dumps(data)
    except (TypeError, ValueError, RecursionError):  # dates, bytes, a list in itself, an endless number
        raise Faults([Fault((), f"options are words, numbers, lists and mappings, not {shown(data)}")]) from None
    try:
        # By way of JSON, because pydantic's strict mode takes a dataclass from plain data there only; without it an
        # option of a plugin that forgot to say strict turns '64' into 64 and true into 1.
        return _reader(cls).validate_json(written, strict=True)
    except ValidationError as error:
        takes = [_key(item.name) for item in dataclasses.fields(cls)]
        raise Faults(list(faults(error, data, takes, unknown))) from None


@cache
def _reader(cls: Any) -> TypeAdapter[Any]:
    return TypeAdapter(cls)


def faults(error: ValidationError, data: Any, takes: Sequence[str], unknown: str) -> Iterator[Fault]:
    """Yield what pydantic found wrong with `data`, in our words. takes: the keys possible at the top."""
    seen: set[Location] = set()
    for item in error.errors():
        at, rest = _follow(data, item["loc"])
        if item["type"] == "tokenprune":
            for fault in item["ctx"]["faults"]:
                yield Fault((*at, *fault.at), fault.message, fault.key)
        elif item["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            word = str(item["loc"][-1])
            inside = takes if len(at) <= 1 else ()
            listed = f"; it takes {', '.join(sorted(inside))}" if inside else "; it takes none" if len(at) <= 1 else ""
            yield Fault(at, f"{unknown} {word!r}{listed}.{did_you_mean(word, inside)}", key=True)
        elif item["type"] == "missing":
            yield Fault(at, f"{rest[-1] if rest else item['loc'][-1]!r} is missing")
        elif item["type"] == "value_error":
            message = str(item["ctx"]["error"])
            word = message.partition(" ")[0]  # a check of the whole that begins with the name of the option it is about
            inside = _at(data, at)
            yield Fault((*at, word) if isinstance(inside, Mapping) and word in inside else at, message)
        elif at not in seen:  # a field that takes several types names every one of them
            seen.add(at)
            text = item["msg"]
            hint = _bare_word(item["input"]) if item["type"] in ("string_type", "literal_error") else ""
            yield Fault(at, f"{text[0].lower()}{text[1:]}, not {shown(item['input'])}{hint}")


def _follow(data: Any, loc: tuple[str | int, ...]) -> tuple[Location, Location]:
    """Return the steps of `loc` that lead through `data`, and the last ones that do not; pydantic names types in between."""
    at: list[str | int] = []
    rest: list[str | int] = []
    for step in loc:
        inside = step in data if isinstance(data, Mapping) else False
        if isinstance(step, int) and isinstance(data, list | tuple):
            inside = step < len(data)
        if inside:
            data, rest = data[step], []
            at.append(step)
        else:
            rest.append(step)
    return tuple(at), tuple(rest)


def _at(data: Any, at: Location) -> Any:
    for step in at:
        data = data[step]
    return data


def _nested(kind: str) -> Any:
    """Return how pydantic reads a field annotated with the interface of `kind`."""

    def read(value: Any) -> Any:
        if isinstance(value, KINDS[kind]):
            return value
        try:
            return build(kind, value)
        except Faults as error:
            raise PydanticCustomError("tokenprune", "see its faults", {"faults": error.found}) from None

    written = core_schema.union_schema([core_schema.str_schema(), core_schema.dict_schema()])
    return core_schema.no_info_plain_validator_function(read, json_schema_input_schema=written)


_INTERFACES.update({KINDS[kind]: partial(_nested, kind) for kind in OPTION_KINDS})


# ---- plain data out --------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """Return an option, a component or anything inside it as plain data; what has its default is left out."""
    if isinstance(value, Component):
        options = _options(value)
        return {"name": value.name, **options} if options else value.name
    if isinstance(value, Options):
        return _options(value)
    if isinstance(value, Site):
        return str(value)
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return value


def _options(item: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that differ from their defaults."""
    made = {}
    for spec in dataclasses.fields(item):
        value = getattr(item, spec.name)
        default = spec.default_factory() if spec.default_factory is not dataclasses.MISSING else spec.default
        if value != default:
            made[_key(spec.name)] = plain(value)
    return made


def _key(name: str) -> str:
    """Return the YAML key of a field: `from_` is written `from`."""
    return name.removesuffix("_")


# ---- for readers -----------------------------------------------------------------------------------------------------


def forms(cls: Any) -> list[dict[str, Any]]:
    """Return JSON Schemas of the short and the long form of a component class."""
    options = _reader(cls).json_schema()
    name = {"const": cls.name, "description": cls.summary()}
    inner = options.pop("$defs", None)
    long = {**_bare(options), "additionalProperties": False, "required": ["name", *options.get("required", ())]}
    long["properties"] = {"name": name, **options.get("properties", {})}
    if inner:
        long["$defs"] = inner
    return [long] if options.get("required") else [name, long]


def _bare(schema: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value for key, value in schema.items() if not (key in ("title", "description") and isinstance(value, str))
    }


def shown(value: Any) -> str:
    """Return a value as a message shows it."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # Python refuses to print integers of more than 4300 digits
        return "a value too long to show"
    return text if len(text) <= 60 else text[:57] + "..."


def _bare_word(value: Any) -> str:
    """Return a hint for YAML 1.1's bare words that are no words."""
    return " (a bare on, off, yes or no is read as true or false: quote it)" if isinstance(value, bool) else ""
