"""Find a schedule for a model from a handful of samples, and write it as a policy: `tokenprune calibrate`.

Two searches: from which layer on the visual tokens are not needed any more, and how many of them each layer needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
import typer
from torch import Tensor, nn

from tokenprune.errors import InputError, WriteError
from tokenprune.flops import LayerShape, layer_flops
from tokenprune.hookspecs import hookimpl
from tokenprune.interfaces import PruneContext, Selector
from tokenprune.plan import adapter_for
from tokenprune.policy import Policy
from tokenprune.session import compress

__all__ = ["Fit", "Withdrawal", "fit", "smallest_sets", "withdraw"]

Inputs = Mapping[str, Any]
Progress = Callable[[str], None]
CROSS = {"name": "attention", "query": "after_image", "heads": "max", "rows": "sum"}
SELF = {"name": "attention", "query": "visual", "heads": "max", "rows": "mean"}


def _silent(step: str) -> None:
    pass


# ---- from which layer on the image is not needed ---------------------------------------------------------------------


@dataclass(frozen=True)
class Withdrawal:
    """What removing all visual tokens before a layer costs.

    divergence: per layer tried, mean over samples of KL(full || without) of the next-token distribution, in nats.
    layer: the first one at or below `eta`, or None.
    """

    divergence: Mapping[int, float]
    eta: float
    layer: int | None
    depth: int

    def policy(self, name: str) -> Policy:
        """Return the policy that removes them there."""
        assert self.layer is not None
        summary = (
            f"all visual tokens leave before layer {self.layer} (KL {self.divergence[self.layer]:.2g} <= {self.eta:g})"
        )
        return Policy.load(
            {"name": name, "summary": summary, "stages": [_without(self.layer)], "written_for": {"llm": self.depth}}
        )


def withdraw(
    model: nn.Module, samples: Sequence[Inputs], *, eta: float = 3e-3, start: int = 1, progress: Progress = _silent
) -> Withdrawal:
    """Try every decoder layer from `start` on and measure what happens without visual tokens from there on.

    The rule of VTW (https://arxiv.org/abs/2405.05803): the first layer whose mean divergence is at most eta. The authors try
    layers from 5 on, and stop at the first; here all are measured, so that the table shows how sure the choice is.

    Raises InputError when a sample holds no visual token.
    """
    adapter = adapter_for(model.config)
    depth: int = adapter.text_config(model.config).num_hidden_layers
    full = [_next_token(model, sample) for sample in samples]
    table = {}
    for layer in range(start, depth):
        progress(f"without visual tokens from layer {layer} of {depth} on")
        with compress(model, {"stages": [_without(layer)]}) as session:
            gaps = []
            for sample, before in zip(samples, full, strict=True):
                after = _next_token(model, sample)
                _seen(session.report.visual_tokens)
                gaps.append((before.exp() * (before - after)).sum(dim=-1).mean())
        table[layer] = float(torch.stack(gaps).mean())
    chosen = next((layer for layer, gap in table.items() if gap <= eta), None)
    return Withdrawal(table, eta, chosen, depth)


def _without(layer: int) -> dict[str, Any]:
    return {"at": f"llm.layers.{layer}", "selector": "stride", "budget": {"keep_tokens": 0}}


def _next_token(model: nn.Module, sample: Inputs) -> Tensor:
    """Return [B, V] float64 log-probabilities of the token after the prompt (prompts are padded on the left, or not)."""
    with torch.no_grad():
        logits: Tensor = model(**sample).logits[:, -1]
    return logits.double().log_softmax(dim=-1)


def _seen(visual: Sequence[int]) -> None:
    if not visual or not all(visual):
        raise InputError(
            "a sample holds no visual token, so there is nothing to learn from it; give every prompt an image"
        )


# ---- how many tokens each layer needs --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fit:
    """How many visual tokens each layer keeps so that attention changes least at a given cost.

    keep: per decoder layer 1 .. depth - 1, tokens entering it. alpha: share of the attention mass that every layer may lose.
    flops: share of the decoder's FLOPs that is left. visual_tokens: what an image of the samples has.
    """

    keep: tuple[int, ...]
    alpha: float
    flops: float
    visual_tokens: int

    def policy(self, name: str) -> Policy:
        """Return the policy: product of both attentions, largest head, one count per layer."""
        depth = len(self.keep) + 1
        stages = []
        alive = self.visual_tokens
        for layer, count in enumerate(self.keep, start=1):
            if count < alive:
                stages.append((f"llm.layers.{layer}", count))
                alive = count
        stage = {
            "at": [at for at, _ in stages],
            "scorer": {"name": "product", "parts": [{"scorer": CROSS}, {"scorer": SELF}]},
            "budget": {"keep_tokens": [count for _, count in stages]},
        }
        summary = (
            f"counts per layer fitted on samples of {self.visual_tokens} visual tokens, {self.flops:.0%} of the FLOPs"
        )
        return Policy.load({"name": name, "summary": summary, "stages": [stage], "written_for": {"llm": depth}})


@dataclass(frozen=True)
class _KeepAll(Selector):
    """Everything stays, and yet scores are asked for."""

    name: ClassVar[str] = "keep_all"
    counts_itself: ClassVar[bool] = True

    def select(self, scores: Tensor, keep: Tensor, ctx: PruneContext) -> Tensor:
        """Return [B, N] bool."""
        return ctx.valid


def fit(
    model: nn.Module, samples: Sequence[Inputs], *, flops: float, tolerance: float = 0.01, progress: Progress = _silent
) -> Fit:
    """Search the share of attention mass that every layer may lose, until the prefill costs `flops` of the unpruned one.

    The search of FitPrune (https://arxiv.org/abs/2409.10197): per layer the tokens that leave are the intersection of two sets,
    those with least attention from text and those with least from visual tokens (largest head), each holding at most alpha
    of the mass; alpha is bisected to `tolerance`. Counts are averaged over samples and rounded down. Differs from the
    authors' code: FLOPs are those of `tokenprune.flops`, text included, and the statistics stream in blocks of query rows.

    Samples are prompts of one row. Raises InputError when one holds no visual token, or when their numbers differ.
    """
    adapter = adapter_for(model.config)
    text = adapter.text_config(model.config)
    depth, shape = text.num_hidden_layers, LayerShape.of(text)
    measured = []
    for number, sample in enumerate(samples, start=1):
        progress(f"reading attention of sample {number} of {len(samples)}")
        measured.append((_columns(model, sample, depth, CROSS), _columns(model, sample, depth, SELF)))
    visual = {cross.shape[1] for (cross, _), _ in measured}
    if len(visual) != 1:
        raise InputError(
            f"samples have {', '.join(map(str, sorted(visual)))} visual tokens; counts need one number of them"
        )
    (tokens,) = visual
    words = max(prompt for (_, prompt), _ in measured) - tokens

    def at(alpha: float) -> tuple[tuple[int, ...], float]:
        counts = [smallest_sets(cross, own, alpha) for (cross, _), (own, _) in measured]
        keep = tuple(int(n) for n in torch.tensor(counts).double().mean(dim=0).floor().tolist())
        cost = sum(layer_flops(shape, n + words) for n in (tokens, *keep))
        return keep, cost / (depth * layer_flops(shape, tokens + words))

    low, high = 0.0, 1.0
    while high - low > tolerance:
        middle = (low + high) / 2
        low, high = (low, middle) if at(middle)[1] <= flops else (middle, high)
    keep, left = at(high)
    if left > flops:
        raise InputError(
            f"{flops:g} of the FLOPs cannot be reached: with no visual token after layer 0 the prefill still takes {left:.3g}"
        )
    return Fit(keep, high, left, tokens)


def _columns(model: nn.Module, sample: Inputs, depth: int, scorer: Mapping[str, Any]) -> tuple[Tensor, int]:
    """Return ([depth - 1, N] what each visual token gets in layers 0 .. depth - 2 of a dense run, prompt length)."""
    sites = [f"llm.layers.{layer}" for layer in range(1, depth)]
    read = Policy.load({"stages": [{"at": sites, "scorer": scorer, "budget": {"keep_ratio": 1.0}}]})
    stages = tuple(replace(stage, selector=_KeepAll(), budget=None) for stage in read.stages)
    with torch.no_grad(), compress(model, replace(read, stages=stages)) as session:
        model(**sample)
    _seen(session.report.visual_tokens)
    if len(session.report.visual_tokens) != 1:
        raise InputError("samples are prompts of one row; give several samples and not one batch")
    scores = [stage.scores for stage in session.report.stages]
    return torch.stack([row[0] for row in scores if row is not None]).double(), session.report.prompt_tokens[0]


def smallest_sets(cross: Tensor, own: Tensor, alpha: float) -> list[int]:
    """Return how many tokens are left after each of L layers.

    cross, own: [L, N] mass of each token in each layer. In every layer leave the tokens that are in both smallest sets, each
    holding, with what left before, at most alpha of the layer's mass.
    """
    alive = torch.ones(cross.shape[1], dtype=torch.bool)
    left = []
    for masses in zip(cross.cpu(), own.cpu(), strict=True):
        small = alive.clone()
        for mass in masses:
            order = mass.masked_fill(~alive, torch.inf).argsort(stable=True)[: int(alive.sum())]
            room = alpha * mass.sum() - mass[~alive].sum()
            fits = mass[order].cumsum(0) <= room
            small &= torch.zeros_like(alive).scatter_(0, order, fits)
        alive &= ~small
        left.append(int(alive.sum()))
    return left


# ---- the command -----------------------------------------------------------------------------------------------------

Data = Annotated[
    str | None, typer.Option(help='JSONL of {"image": file, "prompt": text}. Default: the packaged pictures.')
]
Model = Annotated[
    str | None, typer.Option(envvar="TOKENPRUNE_MODEL", help="Model folder or Hub id. Default: the small one.")
]
Output = Annotated[Path | None, typer.Option(help="Policy file to write. Default: print it.")]
Limit = Annotated[int, typer.Option(min=1, help="Samples at most.")]

commands = typer.Typer(no_args_is_help=True, help="Find a schedule for a model from a handful of samples.")


def _loaded(model: str | None, data: str | None, limit: int) -> tuple[nn.Module, list[dict[str, Any]]]:
    from tokenprune import loading

    chosen = (loading.samples() if data is None else loading.read_samples(data))[:limit]
    loaded = loading.load(model)
    return loaded.model, [loading.prepare(loaded, loading.open_image(one.image), one.question) for one in chosen]


def _write(policy: Policy, output: Path | None) -> None:
    text = policy.to_yaml()
    if output is None:
        print(text, end="")
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise WriteError(f"{str(output)!r} cannot be written: {error.strerror}") from None
    print(f"wrote {output}")


def _tell(step: str) -> None:
    typer.echo(step, err=True)


@commands.command("withdraw")
def _withdraw(
    model: Model = None,
    data: Data = None,
    eta: Annotated[float, typer.Option(min=0, help="Divergence (nats) that is small enough.")] = 3e-3,
    start: Annotated[int, typer.Option(min=1, help="First layer to try.")] = 1,
    limit: Limit = 20,
    output: Output = None,
) -> None:
    """Find the first layer from which visual tokens are not needed any more (VTW)."""
    loaded, samples = _loaded(model, data, limit)
    found = withdraw(loaded, samples, eta=eta, start=start, progress=_tell)
    for layer, gap in found.divergence.items():
        print(f"# layer {layer:3d}  KL {gap:.3e}{'  <- first at or below eta' if layer == found.layer else ''}")
    if found.layer is None:
        raise InputError(
            f"no layer is at or below eta {eta:g}; the smallest divergence is {min(found.divergence.values()):.2e}"
        )
    _write(found.policy("withdraw"), output)


@commands.command("fit")
def _fit(
    flops: Annotated[float, typer.Option(min=0, max=1, help="Share of the prefill FLOPs that may be left.")],
    model: Model = None,
    data: Data = None,
    limit: Limit = 20,
    output: Output = None,
) -> None:
    """Fit how many visual tokens each layer keeps, so that attention changes least (FitPrune)."""
    loaded, samples = _loaded(model, data, limit)
    found = fit(loaded, samples, flops=flops, progress=_tell)
    print(
        f"# alpha {found.alpha:.3f}, {found.flops:.1%} of the FLOPs left, {found.visual_tokens} visual tokens an image"
    )
    _write(found.policy("fitted"), output)


@hookimpl
def register_commands(cli: typer.Typer) -> None:
    """Add `tokenprune calibrate`."""
    if not any(group.name == "calibrate" for group in cli.registered_groups):
        cli.add_typer(commands, name="calibrate")
