"""Qwen2.5-VL."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from tokenprune.hookspecs import hookimpl
from tokenprune_adapters._qwen_vl import QwenVLAdapter


class Qwen2_5VLAdapter(QwenVLAdapter):
    """Qwen2.5-VL (https://arxiv.org/abs/2502.13923): images and videos of any size, M-RoPE."""

    name: ClassVar[str] = "qwen2_5_vl"
    model_types: ClassVar[frozenset[str]] = frozenset({"qwen2_5_vl"})


@hookimpl
def register_adapters(register: Callable[[type], None]) -> None:
    """Offer this adapter."""
    register(Qwen2_5VLAdapter)
