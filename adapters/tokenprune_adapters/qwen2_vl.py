"""Qwen2-VL."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from tokenprune.hookspecs import hookimpl
from tokenprune_adapters._qwen_vl import QwenVLAdapter


class Qwen2VLAdapter(QwenVLAdapter):
    """Qwen2-VL (https://arxiv.org/abs/2409.12191): images and videos of any size, M-RoPE."""

    name: ClassVar[str] = "qwen2_vl"
    model_types: ClassVar[frozenset[str]] = frozenset({"qwen2_vl"})


@hookimpl
def register_adapters(register: Callable[[type], None]) -> None:
    """Offer this adapter."""
    register(Qwen2VLAdapter)
