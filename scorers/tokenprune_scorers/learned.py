"""Scores of a small network that somebody trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from tokenprune.errors import PluginContractError
from tokenprune.hookspecs import hookimpl
from tokenprune.interfaces import PruneContext, Scorer
from tokenprune.tokens import Signal, Site

__all__ = ["Learned"]

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "relu": functional.relu,
    "silu": functional.silu,
    "tanh": torch.tanh,
}


@dataclass(frozen=True)
class Learned(Scorer):
    """Keep the tokens a trained network scores highest (Dynamic-LLaVA, https://arxiv.org/abs/2412.00876).

    file: safetensors with a network from the token's state to one number: `layers.0.weight` [H, D], `layers.0.bias` [H],
        `layers.1.weight` ... (biases may be missing), the last with one output, or two, whose difference second - first is the
        score (a keep and drop classifier). `norm.weight` and `norm.bias` [D] before it make it begin with a LayerNorm.
        Header metadata: `activation` (gelu, relu, silu, tanh; default gelu) and `eps` of the norm (default 1e-5).
    from: a site to read the tokens from instead of the stage's own.

    Only such a network is read: a scorer that looks at other tokens too needs its own plugin. Computed in float32.
    """

    name: ClassVar[str] = "learned"

    file: Annotated[str, Field(min_length=1)]
    from_: Annotated[Site | None, Field(alias="from")] = None

    def __post_init__(self) -> None:
        if not self.file:
            raise ValueError("file names the safetensors file of the network")

    @classmethod
    def example(cls) -> Learned:
        """Return one with a network made for width 16, kept beside the temporary files."""
        return cls(str(_example_file()))

    def signals(self) -> tuple[Signal, ...]:
        """Read the tokens."""
        return (Signal("hidden", at=self.from_),)

    def score(self, ctx: PruneContext) -> Tensor:
        """Return [B, N] float32."""
        path = Path(self.file).expanduser().resolve()
        if not path.is_file():
            raise PluginContractError(f"scorer 'learned' reads its network from {self.file}, and there is no such file")
        network = _load(path, path.stat().st_mtime_ns)
        x = ctx.hidden.float()
        if x.shape[-1] != network.width:
            raise PluginContractError(
                f"the network in {self.file} takes tokens of width {network.width}, and here they have {x.shape[-1]}"
            )
        return network(x)


@dataclass(frozen=True, eq=False)
class _Network:
    """Weights as read from a file. norm: weight and bias, or None."""

    layers: tuple[tuple[Tensor, Tensor | None], ...]
    norm: tuple[Tensor, Tensor | None] | None
    activation: str
    eps: float

    @property
    def width(self) -> int:
        """Width of the tokens it takes."""
        return self.layers[0][0].shape[1]

    def __call__(self, x: Tensor) -> Tensor:
        """Return one number for each vector of the last dimension."""
        if self.norm is not None:
            weight, bias = self.norm
            x = functional.layer_norm(x, (self.width,), weight.to(x.device), _on(bias, x), self.eps)
        for number, (weight, bias) in enumerate(self.layers):
            x = x if number == 0 else _ACTIVATIONS[self.activation](x)
            x = functional.linear(x, weight.to(x.device), _on(bias, x))
        return x[..., -1] - x[..., 0] if x.shape[-1] == 2 else x[..., 0]


def _on(tensor: Tensor | None, like: Tensor) -> Tensor | None:
    return None if tensor is None else tensor.to(like.device)


@lru_cache(maxsize=8)
def _load(path: Path, changed: int) -> _Network:
    """Return the network in a file as it was when it `changed`; raise PluginContractError, in one sentence, when it is none."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as opened:
            header = opened.metadata() or {}
            tensors = {key: opened.get_tensor(key).float() for key in opened.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError) as error:
        raise PluginContractError(f"{path} is not a safetensors file: {error}") from None
    activation = header.get("activation", "gelu")
    if activation not in _ACTIVATIONS:
        raise PluginContractError(f"{path} names the activation {activation!r}; possible are {', '.join(_ACTIVATIONS)}")
    try:
        eps = float(header.get("eps", "1e-5"))
    except ValueError:
        raise PluginContractError(f"{path} gives eps as {header['eps']!r}, which is not a number") from None
    return _Network(_layers(path, tensors), _norm(path, tensors), activation, eps)


def _layers(path: Path, tensors: dict[str, Tensor]) -> tuple[tuple[Tensor, Tensor | None], ...]:
    layers: list[tuple[Tensor, Tensor | None]] = []
    while (weight := tensors.get(f"layers.{len(layers)}.weight")) is not None:
        bias = tensors.get(f"layers.{len(layers)}.bias")
        before = layers[-1][0].shape[0] if layers else weight.shape[-1]
        if weight.dim() != 2 or weight.shape[1] != before or (bias is not None and bias.shape != weight.shape[:1]):
            raise PluginContractError(f"layers.{len(layers)} of {path} does not fit what comes before it")
        layers.append((weight, bias))
    if not layers or layers[-1][0].shape[0] not in (1, 2):
        raise PluginContractError(
            f"{path} holds no network that ends in one or two numbers (layers.0.weight, layers.0.bias ...)"
        )
    known = {f"layers.{i}.{kind}" for i in range(len(layers)) for kind in ("weight", "bias")} | {
        "norm.weight",
        "norm.bias",
    }
    if unknown := sorted(set(tensors) - known):
        raise PluginContractError(f"{path} holds {unknown[0]!r}, which is no part of such a network")
    return tuple(layers)


def _norm(path: Path, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor | None] | None:
    weight, bias = tensors.get("norm.weight"), tensors.get("norm.bias")
    if weight is None:
        if bias is not None:
            raise PluginContractError(f"{path} holds norm.bias without norm.weight")
        return None
    if any(x is not None and x.shape != tensors["layers.0.weight"].shape[1:] for x in (weight, bias)):
        raise PluginContractError(f"norm of {path} does not have the width of layers.0.weight")
    return weight, bias


@lru_cache(maxsize=1)
def _example_file() -> Path:
    """Return a file with a network of width 16 and fixed weights, written once."""
    import tempfile

    from safetensors.torch import save_file

    path = Path(tempfile.mkdtemp(prefix="tokenprune-")) / "example.safetensors"
    save_file({"layers.0.weight": torch.linspace(-1, 1, 16).reshape(1, 16)}, path, {"activation": "relu"})
    return path


@hookimpl
def register_scorers(register: Callable[[type], None]) -> None:
    """Offer this scorer."""
    register(Learned)
