"""Compress the visual tokens of large vision-language models.

>>> import tokenprune
>>> tokenprune.Policy.load("v2drop-llava-1.5-7b-192").stages[0].budget.keep_ratio
0.5
"""

from tokenprune.budget import Budget, Quota
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
from tokenprune.interfaces import (
    Adapter,
    Attention,
    Component,
    Grouping,
    Layout,
    Merged,
    Merger,
    Number,
    Options,
    PruneContext,
    Quantity,
    Scorer,
    Selector,
    Statistic,
)
from tokenprune.plan import Plan, plan
from tokenprune.policy import Policy, PolicyInfo, list_policies
from tokenprune.report import Report, StageRecord
from tokenprune.session import NoVisualTokensWarning, Session, compress
from tokenprune.tokens import Signal, Site, TokenSpan

__all__ = [
    "Adapter",
    "Attention",
    "Budget",
    "Component",
    "Grouping",
    "InputError",
    "Layout",
    "Merged",
    "Merger",
    "NoVisualTokensWarning",
    "Number",
    "Options",
    "Plan",
    "PluginContractError",
    "PluginError",
    "Policy",
    "PolicyError",
    "PolicyInfo",
    "PruneContext",
    "Quantity",
    "Quota",
    "Report",
    "Scorer",
    "Selector",
    "Session",
    "SessionError",
    "Signal",
    "Site",
    "StageRecord",
    "Statistic",
    "TokenSpan",
    "TokenpruneError",
    "UnsupportedCacheError",
    "UnsupportedModelError",
    "compress",
    "hookimpl",
    "list_policies",
    "plan",
]
