"""Fallback for every decoder-only LVLM whose layers and placeholders can be found from its configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from tokenprune.hookspecs import hookimpl
from tokenprune_adapters._decoder import DecoderAdapter


class GenericAdapter(DecoderAdapter):
    """Any decoder-only LVLM of transformers that names its placeholder ids; refuses what it cannot keep exact."""

    name: ClassVar[str] = "generic"


@hookimpl
def register_adapters(register: Callable[[type], None]) -> None:
    """Offer this adapter."""
    register(GenericAdapter)
