"""The exception tree. Every mistake a user can make ends in one of these, with one sentence that says what to do.

::

    TokenpruneError
    ├── PolicyError              a policy file, mapping or name is wrong (all problems of a file at once)
    ├── PluginError              two plugins claim one name, or a plugin cannot be used
    │   └── PluginContractError  a plugin returned something its interface forbids
    ├── UnsupportedModelError    no adapter can serve this model exactly
    ├── UnsupportedCacheError    this kind of KV cache cannot hold a compact sequence yet
    ├── InputError               the tensors given to the model do not fit together (pixels without placeholders ...)
    ├── LoadError                a model, processor or image cannot be read from where the user said it is
    ├── WriteError               a result cannot be written where the user wants it
    └── SessionError             `compress` is used in a way that cannot take effect (nested, compiled model ...)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

__all__ = [
    "InputError",
    "LoadError",
    "PluginContractError",
    "PluginError",
    "PolicyError",
    "Problem",
    "SessionError",
    "TokenpruneError",
    "UnsupportedCacheError",
    "UnsupportedModelError",
    "WriteError",
    "did_you_mean",
    "first_sentence",
]


class TokenpruneError(Exception):
    """Base of all errors raised on purpose; its text is written for the user."""


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a policy: where, and one sentence on what was given and what is possible."""

    message: str
    source: str = ""
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        place = f"{self.source}:{self.line}:{self.column}: " if self.line else f"{self.source}: " if self.source else ""
        return place + self.message


class PolicyError(TokenpruneError, ValueError):
    """A policy that cannot be used; carries every problem found, not just the first."""

    def __init__(self, problems: Sequence[Problem] | str) -> None:
        self.problems: tuple[Problem, ...] = (Problem(problems),) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))


class PluginError(TokenpruneError):
    """A plugin cannot be used; names the distribution it came from."""


class PluginContractError(PluginError):
    """A plugin broke its interface at run time (wrong shape, non-finite, wrong count)."""


class UnsupportedModelError(TokenpruneError):
    """The model cannot be served exactly; says which part of it is in the way."""


class UnsupportedCacheError(TokenpruneError):
    """The KV cache cannot hold a compact sequence; says which kind was given and which works."""


class InputError(TokenpruneError, ValueError):
    """The inputs of a forward pass contradict each other."""


class LoadError(TokenpruneError):
    """A model, processor or image cannot be read from where the user said it is."""


class WriteError(TokenpruneError):
    """A result cannot be written where the user wants it."""


class SessionError(TokenpruneError, RuntimeError):
    """A session cannot take effect as asked."""


def first_sentence(error: BaseException | str) -> str:
    """Return the first sentence of somebody else's message, on one line and without a full stop."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text.split(". ")[0].rstrip(".")


def did_you_mean(given: str, possible: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?`` for the nearest possible word, or an empty string."""
    near = get_close_matches(given, list(possible), n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""
