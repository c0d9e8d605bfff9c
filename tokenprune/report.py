"""What a pruned prefill did: which visual tokens stayed at each stage, and what that saves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

__all__ = ["DecodeRecord", "Report", "StageRecord"]


@dataclass(frozen=True, eq=False)
class StageRecord:
    """One stage of one prefill.

    site, layer, scorer: where it acted and by what. tokens_in, tokens_out: visual tokens per row of the batch.
    kept: per row, the prompt positions (indices into that row of `input_ids`, padding and earlier turns included) of the
    visual tokens that stayed, ascending. scores: per row, the score of each token that entered, in prompt order, and
    `positions` theirs; None where nothing had to be scored.
    """

    site: str
    layer: int
    scorer: str
    tokens_in: list[int]
    tokens_out: list[int]
    kept: list[Tensor]
    positions: list[Tensor]
    scores: list[Tensor] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data (lists and numbers)."""
        return {
            "site": self.site,
            "layer": self.layer,
            "scorer": self.scorer,
            "tokens_in": self.tokens_in,
            "tokens_out": self.tokens_out,
            "kept": [row.tolist() for row in self.kept],
        }


@dataclass(eq=False)
class DecodeRecord:
    """The decoding steps since the last prefill, of a policy that acts while decoding.

    similarity: per step, [B] cosine between the scores of this step and of the one before. refreshed: [B] bool, whether the
    view was made anew. hidden: [B, L] bool, the prompt positions the later layers did not see. visual: [B, L] bool.
    """

    site: str = ""
    layer: int = 0
    similarity: list[Tensor] = field(default_factory=list)
    refreshed: list[Tensor] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)
    visual: Tensor | None = None

    def add(self, similarity: Tensor, refreshed: Tensor, hidden: Tensor, visual: Tensor) -> None:
        """Note one step."""
        self.similarity.append(similarity)
        self.refreshed.append(refreshed)
        self.hidden.append(hidden)
        self.visual = visual

    def to_dict(self) -> dict[str, Any]:
        """Return plain data (lists and numbers)."""
        assert self.visual is not None
        return {
            "site": self.site,
            "layer": self.layer,
            "steps": len(self.hidden),
            "refreshed": [row.tolist() for row in self.refreshed],
            "visible": [(self.visual.sum(1) - row.sum(1)).tolist() for row in self.hidden],
        }


@dataclass(frozen=True, eq=False)
class Report:
    """The last prefill of a session; prints as a table.

    visual_tokens, prompt_tokens: per row, before anything was dropped (padding excluded from the second).
    entering: per row, visual tokens entering each decoder layer. flops_ratio, kv_ratio: decoder layers against the
    unpruned run, mean over the batch. prefills: how many prefills with visual tokens the session has seen. notes: what
    the user should know (a text-only prompt ...). decoding: the steps since, of a policy that acts while decoding.
    """

    policy: str
    digest: str
    stages: tuple[StageRecord, ...] = ()
    visual_tokens: list[int] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    entering: list[tuple[int, ...]] = field(default_factory=list)
    flops_ratio: float = 1.0
    kv_ratio: float = 1.0
    prefills: int = 0
    notes: tuple[str, ...] = ()
    decoding: DecodeRecord | None = None

    @property
    def average_tokens(self) -> list[float]:
        """Per row, the mean over decoder layers of the visual tokens entering a layer."""
        return [sum(row) / len(row) for row in self.entering]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data (lists and numbers), ready for JSON."""
        return {
            "policy": self.policy,
            "digest": self.digest,
            "visual_tokens": self.visual_tokens,
            "prompt_tokens": self.prompt_tokens,
            "average_tokens": self.average_tokens,
            "entering": [list(row) for row in self.entering],
            "prefill_flops_ratio": self.flops_ratio,
            "kv_cache_ratio": self.kv_ratio,
            "stages": [stage.to_dict() for stage in self.stages],
            "notes": list(self.notes),
            **({"decoding": self.decoding.to_dict()} if self.decoding is not None and self.decoding.hidden else {}),
        }

    def __str__(self) -> str:
        lines = [f"policy {self.policy} ({self.digest})", *self.notes]
        if not self.visual_tokens:
            return "\n".join([*lines, "no prefill with visual tokens yet"])
        rows = [("site", "layer", "scorer", "tokens in", "tokens out")]
        rows += [
            (stage.site, str(stage.layer), stage.scorer, _row(stage.tokens_in), _row(stage.tokens_out))
            for stage in self.stages
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines += [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
        if self.decoding is not None and self.decoding.hidden:
            fresh = sum(int(row[0]) for row in self.decoding.refreshed)
            lines.append(
                f"{self.decoding.site}: {len(self.decoding.hidden)} decoding steps, {fresh} with a new view, "
                f"{int(self.decoding.hidden[-1][0].sum())} visual tokens out of view at the last"
            )
        average = _row([f"{value:.1f}" for value in self.average_tokens])
        lines.append(
            f"average visual tokens per layer {average} of {_row(self.visual_tokens)}, "
            f"prefill FLOPs {self.flops_ratio:.1%}, KV cache {self.kv_ratio:.1%} of unpruned"
        )
        return "\n".join(lines)


def _row(values: list[Any]) -> str:
    """Print one value once, a ragged batch in full."""
    return str(values[0]) if len(set(values)) == 1 else ", ".join(map(str, values))
