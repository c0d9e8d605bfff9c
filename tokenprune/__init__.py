"""Compress the visual tokens of large vision-language models.

>>> import tokenprune
>>> tokenprune.Policy.load("v2drop-llava-1.5-7b-192").stages[0].budget
Budget(keep_ratio=0.5, keep_tokens=None, of='alive', min_tokens=0)
"""

from tokenprune.errors import (
    InputError,
    PluginContractError,
    PluginError,
    PolicyError,
    SessionError,
    TokenpruneError,
    UnsupportedCacheError,
    UnsupportedModelError,
)
from tokenprune.hookspecs import hookimpl
from tokenprune.interfaces import Adapter, Component, Merger, PruneContext, Scorer, Selector
from tokenprune.plan import Plan, plan
from tokenprune.policy import Policy, PolicyInfo, list_policies
from tokenprune.report import Report, StageRecord
from tokenprune.session import NoVisualTokensWarning, Session, compress
from tokenprune.tokens import Budget, Signal, Site, TokenSpan

__all__ = [
    "Adapter",
    "Budget",
    "Component",
    "InputError",
    "Merger",
    "NoVisualTokensWarning",
    "Plan",
    "PluginContractError",
    "PluginError",
    "Policy",
    "PolicyError",
    "PolicyInfo",
    "PruneContext",
    "Report",
    "Scorer",
    "Selector",
    "Session",
    "SessionError",
    "Signal",
    "Site",
    "StageRecord",
    "TokenSpan",
    "TokenpruneError",
    "UnsupportedCacheError",
    "UnsupportedModelError",
    "compress",
    "hookimpl",
    "list_policies",
    "plan",
]
