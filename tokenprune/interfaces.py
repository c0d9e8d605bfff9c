"""What a plugin is: small interfaces and the context they see.

Shapes use the letters of the whole project: B rows of the batch, N visual tokens (of the row that has most; shorter rows
are padded on the right and `ctx.valid` is False there), D width, H query heads, Hkv key heads, R query rows, d head width,
T text tokens. Inside a grouping (per image, per frame ...) B counts the groups of all rows, and everything else is the same.

Plugins are pure: tensors in, tensors out. They hold options, never state, and they never see the model.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tokenprune.attention import Attention, AttentionRows, GivenAttention
from tokenprune.errors import PluginContractError
from tokenprune.noise import counter_noise
from tokenprune.tokens import Signal, TokenSpan

__all__ = [
    "Adapter",
    "Attention",
    "AttentionRows",
    "Component",
    "GivenAttention",
    "Grouping",
    "Layout",
    "Merged",
    "Merger",
    "Number",
    "Options",
    "Paired",
    "PruneContext",
    "Quantity",
    "Scorer",
    "Selector",
    "Statistic",
    "Text",
    "Tower",
    "counter_noise",
]


# ---- options ---------------------------------------------------------------------------------------------------------


class Options:
    """Base of everything a policy may write as a mapping: a frozen dataclass whose fields are the keys.

    A field may hold another component (written as a word or a mapping), a tuple of such mappings, or a `Number`. A field
    named with an underscore at its end is written without it, so that `from_` is the key `from`.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    def children(self) -> Iterator[Options]:
        """Yield the options held by the fields of this one."""
        if not dataclasses.is_dataclass(self):
            return
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            for part in value if isinstance(value, tuple) else (value,):
                if isinstance(part, Options):
                    yield part

    def signals(self) -> tuple[Signal, ...]:
        """Return what this one reads itself; the planner refuses a model that cannot provide it."""
        return ()

    def needs(self) -> tuple[Signal, ...]:
        """Return what this one and everything inside it reads, each once."""
        below = (signal for child in self.children() for signal in child.needs())
        return tuple(dict.fromkeys((*self.signals(), *below)))


class Component(Options):
    """Base of scorers, selectors, mergers, statistics and groupings.

    `name` is the word used in YAML. The first line of the docstring is what `tokenprune list` shows.
    """

    name: ClassVar[str]

    @classmethod
    def summary(cls) -> str:
        """Return the first line of the docstring."""
        return (cls.__doc__ or "").strip().partition("\n")[0]

    @classmethod
    def example(cls) -> Any:
        """Return an instance to try in tests and docs; one whose options have no defaults says here what to take."""
        return cls()

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """Let a field annotated `Scorer` (or another interface) take what a policy writes for one."""
        if source in _INTERFACES:
            return _INTERFACES[source]()
        return handler(source)


_INTERFACES: dict[Any, Callable[[], Any]] = {}
"""How pydantic reads a field annotated with an interface; filled by `tokenprune.plugins`, which knows the registry."""


# ---- what a plugin reads ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Layout:
    """Where every visual token sits, all [B, N] int64: number of its image (or clip) in the prompt, frame, row, column.

    frames, rows, columns: size of the grid it belongs to. video: bool, whether its image is a clip.
    """

    image: Tensor
    frame: Tensor
    row: Tensor
    column: Tensor
    frames: Tensor
    rows: Tensor
    columns: Tensor
    video: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> Layout:
        """Return the layout with every tensor changed."""
        return Layout(*(change(getattr(self, item.name)) for item in dataclasses.fields(self)))


@dataclass(frozen=True, eq=False)
class Text:
    """Text tokens of the prompt: states [B, T, ...], valid [B, T], after_image [B, T] (after the last visual token)."""

    states: Tensor
    valid: Tensor
    after_image: Tensor


@dataclass(frozen=True, eq=False)
class Paired:
    """Embeddings of a tower that aligns images and text: image [B, N, E], text [B, M, E], text_valid [B, M]."""

    image: Tensor
    text: Tensor
    text_valid: Tensor


@dataclass(frozen=True)
class PruneContext:
    """What a plugin may see at one stage. Reading a signal that the plugin did not declare raises.

    valid: [B, N] bool, False on the padding of rows that have fewer visual tokens.
    ordinal: [B, N] which visual token of its prompt each one is, counted from 0 before anything was dropped.
    seed, salt: what makes `noise` differ between policies and between stages.
    scores: [B, N] of the stage's scorer, once there are some (-inf on padding).
    sizes: [B, N] how many tokens each one stands for after merging, or None while all stand for one.
    """

    valid: Tensor
    ordinal: Tensor
    seed: int = 0
    salt: int = 0
    signals: Mapping[Any, Any] = field(default_factory=dict)
    scores: Tensor | None = None
    sizes: Tensor | None = None
    allowed: frozenset[Signal] | None = None
    _whole: PruneContext | None = None
    _index: Tensor | None = None

    # -- signals

    def read(self, signal: Signal) -> Any:
        """Return a declared signal (see `Signal`), cut to the groups where this context is one of groups."""
        if (self.allowed is not None and signal not in self.allowed) or not self._has(signal):
            raise PluginContractError(
                f"the signal {signal.name!r} was read but not declared; return {signal} from signals()"
            )
        if self._whole is None:
            return self.signals[signal]
        return self.cut(self._whole.only(signal).read(signal))

    def _has(self, signal: Signal) -> bool:
        return signal in self.signals if self._whole is None else self._whole._has(signal)

    def cut(self, value: Any) -> Any:
        """Return a value of the whole context, cut to the groups."""
        assert self._index is not None and self._whole is not None
        if isinstance(value, Tensor):
            return value.flatten(0, 1)[self._index]
        if isinstance(value, Layout):
            return value.map(self.cut)
        row = torch.div(self._index[:, 0], self._whole.valid.shape[1], rounding_mode="floor")
        if isinstance(value, Text):
            return Text(value.states[row], value.valid[row], value.after_image[row])
        if isinstance(value, Paired):
            return Paired(self.cut(value.image), value.text[row], value.text_valid[row])
        raise PluginContractError(
            "attention cannot be read per group; score the whole prompt and use ctx.score(scorer)"
        )

    def only(self, *what: Options | Signal) -> PruneContext:
        """Return this context as the given options may see it: with the signals they declare and no others."""
        allowed: set[Signal] = set()
        for part in what:
            allowed |= {part} if isinstance(part, Signal) else set(part.needs())
        return replace(self, allowed=frozenset(allowed))

    def _the(self, name: str) -> Any:
        """Return the one declared signal of that name, wherever it is read."""
        there = (
            self.allowed if self.allowed is not None else frozenset(s for s in self.signals if isinstance(s, Signal))
        )
        found = [signal for signal in there if signal.name == name and signal.of == "visual"]
        if len(found) > 1:
            raise PluginContractError(
                f"{len(found)} signals {name!r} were declared; say which with ctx.read(Signal(...))"
            )
        return self.read(found[0] if found else Signal(name))  # type: ignore[arg-type]

    @property
    def hidden(self) -> Tensor:
        """[B, N, D] visual tokens where the declared signal reads them (residual stream, model dtype)."""
        tensor: Tensor = self._the("hidden")
        return tensor

    @property
    def previous_hidden(self) -> Tensor:
        """[B, N, D] the same tokens as they entered the layer before the site."""
        tensor: Tensor = self._the("previous_hidden")
        return tensor

    @property
    def keys(self) -> Tensor:
        """[B, N, H, d] keys of the declared attention module."""
        tensor: Tensor = self._the("keys")
        return tensor

    @property
    def attention(self) -> Attention:
        """Attention of the declared query rows over the visual tokens."""
        rows: Attention = self._the("attention")
        return rows

    @property
    def layout(self) -> Layout:
        """Image, frame, row and column of every token."""
        layout: Layout = self._the("layout")
        return layout

    def noise(self, stream: int = 0) -> Tensor:
        """Return [B, N] float32 uniform noise in (0, 1), a pure function of (seed, salt, stream, ordinal).

        Counter-based, so a row gets the same noise alone, in a batch, in a beam, on CPU and on GPU.
        """
        return counter_noise(self.ordinal, self.seed, self.salt, stream)

    # -- parts

    def score(self, scorer: Scorer) -> Tensor:
        """Return [B, N] float32 scores of another scorer over the whole prompt, -inf on padding."""
        if self._whole is not None:
            scores: Tensor = self.cut(self._whole.score(scorer))
        else:
            scores = scorer.score(self.only(scorer))
            if scores.shape != self.valid.shape:
                raise PluginContractError(
                    f"scorer {scorer.name!r} returned shape {tuple(scores.shape)}, not {tuple(self.valid.shape)}"
                )
            scores = scores.float()
        return scores.masked_fill(~self.valid, -torch.inf)

    def number(self, value: Number) -> Tensor:
        """Return [B] float32: a plain number, or a quantity computed from the tokens of each row."""
        if isinstance(value, Quantity):
            return value.of(self)
        return torch.full(self.valid.shape[:1], float(value), device=self.valid.device)

    def grouped(self, grouping: Grouping) -> PruneContext:
        """Return the context of the groups, one row each; groups without a token are left out, order is kept."""
        labels = grouping.labels(self.only(grouping)).masked_fill(~self.valid, -1)
        batch = labels.shape[0]
        most = int(labels.max()) + 1 if labels.numel() else 0
        row = torch.arange(batch, device=labels.device).unsqueeze(1)
        label = torch.where(self.valid, row * most + labels, batch * most).flatten()
        order = label.argsort(stable=True)
        sizes = torch.bincount(label, minlength=batch * most + 1)[:-1]
        longest = max(int(sizes.max()) if len(sizes) else 0, 1)
        starts = sizes.cumsum(0) - sizes
        there = sizes > 0
        sizes, starts = sizes[there], starts[there]
        place = torch.arange(longest, device=labels.device)
        valid = place < sizes.unsqueeze(1)
        index = order[(starts.unsqueeze(1) + place).clamp(max=max(len(order) - 1, 0))]
        index = torch.where(valid, index, index[:, :1])
        scores = None if self.scores is None else self.scores.flatten()[index]
        return replace(
            self,
            valid=valid,
            ordinal=self.ordinal.flatten()[index],
            scores=None if scores is None else scores.masked_fill(~valid, -torch.inf),
            sizes=None if self.sizes is None else self.sizes.flatten()[index],
            allowed=None,
            _whole=replace(self, allowed=None),
            _index=index,
        )

    def spread(self, values: Tensor, into: Tensor | None = None) -> Tensor:
        """Return values [G, M, ...] of the groups at their places [B, N, ...] in the context they were made from.

        into: what stands where no group has a token (zeros).
        """
        assert self._whole is not None and self._index is not None
        batch, tokens = self._whole.valid.shape
        base = values.new_zeros(batch, tokens, *values.shape[2:]) if into is None else into
        flat = base.flatten(0, 1).index_copy(0, self._index[self.valid], values[self.valid].to(base.dtype))
        return flat.view_as(base)

    @property
    def row_of_group(self) -> Tensor:
        """[G] which row of the context they were made from each group belongs to."""
        assert self._whole is not None and self._index is not None
        return torch.div(self._index[:, 0], self._whole.valid.shape[1], rounding_mode="floor")


class Scorer(Component, ABC):
    """Ranks visual tokens: a higher score stays longer."""

    @abstractmethod
    def score(self, ctx: PruneContext) -> Tensor:
        """Return [B, N] finite scores, higher = keep. Padding (`~ctx.valid`) may hold anything finite."""


class Selector(Component, ABC):
    """Chooses which tokens stay, given scores and how many.

    uses_scores: whether a stage must name a scorer for it. counts_itself: whether it finds out by itself how many stay
    (a threshold, a cluster radius); such a stage needs no budget, and a budget beside it makes the count exact.
    """

    uses_scores: ClassVar[bool] = True
    counts_itself: ClassVar[bool] = False

    @abstractmethod
    def select(self, scores: Tensor, keep: Tensor, ctx: PruneContext) -> Tensor:
        """Return [B, N] bool with exactly `keep[b]` True among the valid tokens of row b.

        scores: [B, N] float32, -inf on padding. keep: [B] int64, between 0 and the row's number of valid tokens.
        A selector that counts itself may return any number of tokens; `keep` is then what the budget allows at most (all
        valid tokens where there is none), and the caller makes the count exact.
        """


@dataclass(frozen=True, eq=False)
class Merged:
    """What a merger leaves: states [B, N, D], which of them continue, and how many tokens each one stands for.

    kept: the kept tokens, and the places of any extra tokens the merger made. sizes: [B, N], or None when it counts none.
    """

    states: Tensor
    kept: Tensor
    sizes: Tensor | None = None


class Merger(Component, ABC):
    """Says what becomes of the tokens that leave."""

    changes_states: ClassVar[bool] = True

    @property
    def moves_states(self) -> bool:
        """Whether it moves kept states to places of other tokens (right only where positions are renumbered)."""
        return any(isinstance(child, Merger) and child.moves_states for child in self.children())

    def extra(self, alive: Tensor, keep: Tensor) -> Tensor:
        """Return [B] int64: how many tokens beside the `keep` of `alive` ones it makes (0 by default)."""
        return torch.zeros_like(keep)

    @abstractmethod
    def merge(self, hidden: Tensor, kept: Tensor, ctx: PruneContext) -> Merged:
        """Return the states [B, N, D] of which those marked in `Merged.kept` ([B, N] bool) continue.

        hidden: [B, N, D] states of all tokens alive here. kept: [B, N] bool, what the selector keeps.
        """


class Statistic(Component, ABC):
    """One number per row, computed from its tokens; any `Number` of a policy may depend on it."""

    @abstractmethod
    def compute(self, ctx: PruneContext) -> Tensor:
        """Return [B] float32."""


class Grouping(Component, ABC):
    """Cuts the tokens of a row into groups that are budgeted, selected and merged apart.

    whole_images: whether every image or clip is one group, so that a plan for one image may count it as a prompt.
    """

    whole_images: ClassVar[bool] = False

    @abstractmethod
    def labels(self, ctx: PruneContext) -> Tensor:
        """Return [B, N] int64, the number >= 0 of each token's group within its row; any number on padding."""


@dataclass(frozen=True)
class Quantity(Options):
    """A number that depends on the tokens: statistic x times / over + plus, within [min, max].

    steps: pairs [bound, value]; the number is the value of the last bound the statistic reaches, and the first value
    below all of them. They replace the line.
    """

    statistic: Statistic
    times: float = 1.0
    over: float = 1.0
    plus: float = 0.0
    min: float | None = None
    max: float | None = None
    steps: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        if self.over == 0:
            raise ValueError("over divides and cannot be 0")
        if self.steps and list(self.steps) != sorted(self.steps, key=lambda step: step[0]):
            raise ValueError(f"steps go from the lowest bound to the highest, not {self.steps}")

    def of(self, ctx: PruneContext) -> Tensor:
        """Return [B] float32."""
        x = self.statistic.compute(ctx.only(self)).float()
        if self.steps:
            value = torch.full_like(x, self.steps[0][1])
            for bound, step in self.steps:
                value = torch.where(x >= bound, step, value)
        else:
            value = x * (self.times / self.over) + self.plus
        return value.clamp(self.min, self.max) if self.min is not None or self.max is not None else value


Number = float | int | Quantity
"""A plain number, or a `Quantity`."""


@dataclass(frozen=True)
class Tower:
    """What a plan must know about a vision tower.

    depth: number of layers. cls: tokens at the start of each image that are no patches. merge: adjacent patches that the
    projector joins into one visual token. tokenwise: whether the projector treats every visual token by itself, so that it
    may run on some of them.
    """

    depth: int
    cls: int = 0
    merge: int = 1
    tokenwise: bool = True


class Adapter(ABC):
    """Describes one model family: names modules and finds visual tokens. It registers no hook and holds no state.

    name: the word shown to users. model_types: `config.model_type` values served. An adapter with no model types is a
    fallback: it is asked for any model that no other adapter names.
    signals: names of the signals (`Signal.name`) the family can provide from its decoder.
    """

    name: ClassVar[str]
    model_types: ClassVar[frozenset[str]] = frozenset()
    signals: ClassVar[frozenset[str]] = frozenset(
        {"hidden", "previous_hidden", "keys", "values", "attention", "layout", "paired"}
    )

    @abstractmethod
    def check(self, config: Any) -> None:
        """Raise UnsupportedModelError, in one sentence, when this model cannot be served exactly."""

    @abstractmethod
    def text_config(self, config: Any) -> Any:
        """Return the configuration of the language model."""

    @abstractmethod
    def visual_token_ids(self, config: Any) -> frozenset[int]:
        """Return the ids of the placeholder tokens that stand for visual tokens in the prompt."""

    @abstractmethod
    def visual_tokens_per_image(self, config: Any) -> int | None:
        """Return how many visual tokens an image gives, or None when it depends on the image."""

    @abstractmethod
    def decoder(self, model: nn.Module) -> nn.Module:
        """Return the text model: the module that runs the decoder layers."""

    @abstractmethod
    def layers(self, model: nn.Module) -> Sequence[nn.Module]:
        """Return the decoder layers in order."""

    @abstractmethod
    def attention(self, layer: nn.Module) -> nn.Module:
        """Return the self-attention module of a decoder layer (the one that calls the attention kernel)."""

    def final_norm(self, model: nn.Module) -> nn.Module:
        """Return the norm after the last decoder layer (for signals with `norm`)."""
        raise NotImplementedError

    @abstractmethod
    def visual_mask(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor | None:
        """Return [B, Q] bool, True on visual tokens, from the keyword inputs of a forward pass; None if it cannot tell."""

    @abstractmethod
    def spans(self, config: Any, inputs: Mapping[str, Any]) -> list[tuple[TokenSpan, ...]]:
        """Return, per row of the batch, the images and clips with their token grids (used for pictures and scopes)."""

    def renumbers(self, config: Any) -> str:
        """Return why `positions: renumber` is impossible in this family, or an empty string."""
        return f"adapter {self.name!r} does not say how its positions are encoded"

    def rotary(self, model: nn.Module) -> nn.Module | None:
        """Return the module that makes (cos, sin) of position ids, called with states and ids; None without one."""
        return None

    # -- the vision side; a family whose tower the engine cannot read leaves these as they are

    def tower(self, config: Any) -> Tower | None:
        """Return the shape of the vision tower, or None when signals of it cannot be read."""
        return None

    def tower_module(self, model: nn.Module) -> nn.Module:
        """Return the vision tower: the module that is called once for all images, or once per image."""
        raise NotImplementedError

    def tower_layers(self, model: nn.Module) -> Sequence[nn.Module]:
        """Return the layers of the vision tower in order."""
        raise NotImplementedError

    def projector(self, model: nn.Module) -> nn.Module:
        """Return the module that takes the tower's features (`vision.output`) to the width of the decoder."""
        raise NotImplementedError

    def tower_grids(self, model: nn.Module, inputs: Mapping[str, Any]) -> tuple[tuple[int, int, int], ...]:
        """Return (frames, rows, columns) of visual tokens of every image, from the named inputs of the tower."""
        raise NotImplementedError

    def tower_order(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor | None:
        """Return [T] the place of every visual token, in the order of the placeholders, among the tower's own.

        None where they are the same. Places count visual tokens (after `Tower.merge`) over all images of the call; a tower
        with windows permutes them. `inputs`: the named inputs of the tower.
        """
        return None

    @classmethod
    def summary(cls) -> str:
        """Return the first line of the docstring."""
        return (cls.__doc__ or "").strip().partition("\n")[0]
