"""The only file that knows how versions of transformers differ.

| | 5.0 | 5.24 |
|---|---|---|
| cache argument of a layer | `past_key_values` | `cache` |
| `crop(n)` | n > 0: new length; n < 0: remove | n <= 0: remove |
| eager attention | not in the registry | default of `get_interface` |
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import transformers
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.modeling_layers import GradientCheckpointingLayer

__all__ = [
    "ENCODED_IMAGES",
    "AttentionCall",
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "attention_taps",
    "cache_argument",
    "cache_layer",
    "checkpointing_reruns_hooks",
    "crop_length",
    "is_compiled",
    "mask_form",
    "rope_base",
    "tokens_seen",
    "transformers_version",
]

# Where `generate` of newer versions, which encodes images before the prefill, puts what it got.
ENCODED_IMAGES = "mm_encoder_outputs"
CACHE_NAMES = ("cache", "past_key_values", "past_key_value")
_CROPS_BY_REMOVING = "tokens_to_remove" in inspect.signature(DynamicLayer.crop).parameters


def transformers_version() -> str:
    """Return the version in use."""
    return str(transformers.__version__)


def cache_argument(arguments: Mapping[str, Any]) -> str | None:
    """Return the name under which a decoder layer was given a cache, or None when it was given none."""
    return next((name for name in CACHE_NAMES if arguments.get(name) is not None), None)


def tokens_seen(arguments: Mapping[str, Any], layer: int = 0) -> int:
    """Return the logical length that a decoder layer has seen, from the cache among its arguments (0 without one)."""
    name = cache_argument(arguments)
    return int(arguments[name].get_seq_length(layer)) if name is not None else 0


def cache_layer(cache: Any, index: int) -> Any:
    """Return layer `index`; a cache that grows lazily gets its layers now."""
    while len(cache.layers) <= index:
        cache.layers.append(cache.layer_class_to_replicate())
    return cache.layers[index]


def crop_length(tokens: int, length: int) -> int:
    """Return the logical length that `crop(tokens)` asks for, of a layer that has seen `length` tokens."""
    if tokens > 0 and _CROPS_BY_REMOVING:
        raise ValueError(f"crop takes the number of tokens to remove as a negative number, not {tokens}")
    if tokens < 0 or _CROPS_BY_REMOVING:
        return length + tokens
    return min(tokens, length)


def checkpointing_reruns_hooks() -> bool:
    """Return whether gradient checkpointing wraps `__call__`, so that hooks run again in the backward pass."""
    return "__call__" in vars(GradientCheckpointingLayer)


def mask_form(config: Any) -> str:
    """Return the form of mask the model's kernel takes: `flash` (2-D), `bool` or `float` (4-D), or `block` (flex)."""
    kernel = getattr(config, "_attn_implementation", None) or "eager"
    if "flash" in kernel:
        return "flash"
    return {"eager": "float", "flex_attention": "block"}.get(kernel, "bool")


def rope_base(config: Any) -> float | None:
    """Return the base of the rotary frequencies of a text configuration, if it states one."""
    parameters = getattr(config, "rope_parameters", None)
    found = getattr(config, "rope_theta", None) or (parameters or {}).get("rope_theta")
    return float(found) if isinstance(found, int | float) else None


class AttentionCall:
    """What the attention kernel of one module was called with."""

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names = ("query", "key", "value", "attention_mask")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        self.module = module
        self.query: Tensor = given["query"]
        self.key: Tensor = given["key"]
        self.value: Tensor | None = given.get("value")
        self.mask: Tensor | None = given.get("attention_mask")
        scaling = given.get("scaling")
        self.scaling: float = scaling if scaling is not None else self.query.shape[-1] ** -0.5
        self.softcap: float | None = given.get("softcap")
        self._packed: Tensor | None = given.get("cu_seq_lens_q")

    @property
    def boundaries(self) -> list[int] | None:
        """Where packed sequences begin and end (flash kernels of towers with images of any size), or None."""
        return None if self._packed is None else self._packed.tolist()


Tap = Callable[[AttentionCall], None]


class _AttentionTaps:
    """Lets a function see the arguments of one module's attention kernel, whichever kernel runs.

    The kernel is not switched: the entry under its own name is shadowed by one that looks and then calls it. The shadow
    is process-wide while any tap is set and looks only at tapped modules, so sessions in other threads do not meet.
    """

    def __init__(self) -> None:
        self._taps: dict[nn.Module, Tap] = {}
        self._shadows: dict[tuple[int, str], tuple[Callable[[], None], int]] = {}
        self._lock = threading.Lock()

    def set(self, module: nn.Module, tap: Tap) -> Callable[[], None]:
        """Call `tap` before each kernel call of `module`, until the returned function is called."""
        source = sys.modules[type(module).__module__]
        kernel = getattr(getattr(module, "config", None), "_attn_implementation", None) or "eager"
        # Eager is not in the registry: every modeling file looks its own function up by name. The registry is one
        # object for all files, so it is the holder, not the file, that must be shadowed only once.
        holder = source if kernel == "eager" else source.ALL_ATTENTION_FUNCTIONS
        with self._lock:
            key = (id(holder), kernel)
            restore, users = self._shadows.get(key) or (self._shadow(holder, kernel), 0)
            self._shadows[key] = (restore, users + 1)
            self._taps[module] = tap
        return lambda: self._unset(module, key)

    def _unset(self, module: nn.Module, key: tuple[int, str]) -> None:
        with self._lock:
            if self._taps.pop(module, None) is None:
                return
            restore, users = self._shadows.pop(key)
            if users > 1:
                self._shadows[key] = (restore, users - 1)
            else:
                restore()

    def _shadow(self, holder: Any, kernel: str) -> Callable[[], None]:
        if kernel == "eager":
            original = holder.eager_attention_forward
            holder.eager_attention_forward = self._looking(original)
            return lambda: setattr(holder, "eager_attention_forward", original)
        local = holder._local_mapping
        had, before = kernel in local, holder[kernel]
        holder[kernel] = self._looking(before)
        return lambda: holder.__setitem__(kernel, before) if had else holder.__delitem__(kernel)

    def _looking(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def kernel(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            tap = self._taps.get(module)
            if tap is not None:
                tap(AttentionCall(module, args, kwargs))
            return original(module, *args, **kwargs)

        return kernel


attention_taps = _AttentionTaps()


def is_compiled(module: nn.Module) -> bool:
    """Return whether torch.compile took this module, in which case hooks set now would be ignored without a word."""
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
