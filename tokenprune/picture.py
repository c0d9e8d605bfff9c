"""A pruned prefill as one picture: what each stage kept of the image, when each patch left, and what it cost.

A pure function of data; matplotlib is imported when the first picture is drawn.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from tokenprune.errors import WriteError
from tokenprune.report import Report, StageRecord
from tokenprune.tokens import TokenSpan

__all__ = ["draw", "first_frame", "kept_cells", "leaving_layers", "shaded"]

CELL = 24  # pixels a token is drawn with, so that small images stay sharp
DIM, GREY = 0.22, 0.65  # how dark and how grey a dropped patch is
MOST_COLUMNS = 5
DENSE, PRUNED, INK = "#9aa5b1", "#1f6f8b", "#222222"


def draw(
    path: str | Path,
    *,
    image: Image.Image,
    spans: Sequence[TokenSpan],
    report: Report,
    row: int = 0,
    question: str = "",
    answers: tuple[str, str] | None = None,
    layers_ms: tuple[Sequence[float], Sequence[float]] | None = None,
) -> Path:
    """Write the picture of one row of the report as PNG and return where.

    image: what the model saw of the first image (or the first frame of the clip). spans: the row's images and clips, of
    which the first is drawn. answers, layers_ms: of the unpruned and the pruned run; ms per decoder layer.
    """
    from matplotlib.figure import Figure

    span, stages = spans[0], report.stages
    cells = first_frame(span)
    backdrop = _backdrop(image, span, cells)
    panels = len(stages) + 2
    columns = min(panels, MOST_COLUMNS)
    lines = math.ceil(panels / columns)
    aspect = backdrop.shape[0] / backdrop.shape[1]
    width = max(3.1 * columns, 9.0)
    tall = lines * (width / columns * min(aspect, 1.6) + 0.75)
    figure: Any = Figure(figsize=(width, tall + 3.9), layout="constrained", facecolor="white")
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08)
    words, top, bottom = figure.subfigures(3, 1, height_ratios=[1.0, tall, 2.9])
    _caption(words, report, row, question, answers, width)
    axes = top.subplots(lines, columns, squeeze=False).flatten()
    _show(axes[0], backdrop, "what the model saw" + _which(spans))
    for stage, axis in zip(stages, axes[1:], strict=False):
        title = f"layer {stage.layer}: {stage.tokens_in[row]} to {stage.tokens_out[row]}"
        _show(axis, shaded(backdrop, kept_cells(span, stage, row), cells.shape), title)
    _show_leaving(
        top, axes[len(stages) + 1], leaving_layers(span, report, row), len(report.entering[row]), backdrop.shape
    )
    for axis in axes[panels:]:
        axis.set_axis_off()
    _bars(bottom, report, row, layers_ms)
    try:
        figure.savefig(path, dpi=110, format="png")
    except OSError as error:
        raise WriteError(f"the picture cannot be written to {str(path)!r}: {error.strerror or error}") from error
    return Path(path)


def first_frame(span: TokenSpan) -> npt.NDArray[np.int64]:
    """Return [rows, columns] prompt positions of the first frame.

    Tokens whose places in the image are not known (a single row) are wrapped into lines of equal length, -1 at the end.
    """
    grid: npt.NDArray[np.int64] = np.asarray(span.positions, dtype=np.int64).reshape(span.grid)[0]
    if _placed(span):
        return grid
    columns = math.ceil(math.sqrt(grid.size))
    padded = np.full(math.ceil(grid.size / columns) * columns, -1, dtype=np.int64)
    padded[: grid.size] = grid.flatten()
    return padded.reshape(-1, columns)


def kept_cells(span: TokenSpan, stage: StageRecord, row: int = 0) -> npt.NDArray[np.bool_]:
    """Return [rows, columns], True where the token of that cell stayed at the stage."""
    return np.isin(first_frame(span), stage.kept[row].cpu().numpy())


def leaving_layers(span: TokenSpan, report: Report, row: int = 0) -> npt.NDArray[np.int64]:
    """Return [rows, columns]: the first layer that each token did not enter; the depth for those that stayed."""
    left = np.full(first_frame(span).shape, len(report.entering[row]), dtype=np.int64)
    for stage in reversed(report.stages):
        left[~kept_cells(span, stage, row)] = stage.layer
    return left


def shaded(
    picture: npt.NDArray[np.uint8], kept: npt.NDArray[np.bool_], shape: tuple[int, ...]
) -> npt.NDArray[np.uint8]:
    """Return the picture with dropped cells dark and grey, kept ones untouched, and thin lines between cells."""
    height, width = picture.shape[0] // shape[0], picture.shape[1] // shape[1]
    mask = np.kron(kept, np.ones((height, width), dtype=bool))
    grey = picture.mean(axis=2, keepdims=True)
    dark = (GREY * grey + (1 - GREY) * picture) * DIM
    made = np.where(mask[..., None], picture, dark)
    made[::height] *= 0.85
    made[:, ::width] *= 0.85
    return made.astype(np.uint8)


def _placed(span: TokenSpan) -> bool:
    """Return whether the grid says where in the image a token lies."""
    return span.grid[1] > 1 or span.grid[2] == 1


def _backdrop(image: Image.Image, span: TokenSpan, cells: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """Return the image with a whole number of pixels per cell; plain cells where tokens have no known place."""
    rows, columns = cells.shape
    if _placed(span):
        cell = max(1, min(CELL, 1600 // max(rows, columns)))
        size = (columns * cell, rows * cell)
        smooth = Image.Resampling.NEAREST if image.width * 2 <= size[0] else Image.Resampling.LANCZOS
        return np.asarray(image.convert("RGB").resize(size, smooth))
    plain = np.where(cells[..., None] >= 0, np.array([120, 170, 190]), 255).astype(np.uint8)
    return np.kron(plain, np.ones((8, 8, 1), dtype=np.uint8))


def _which(spans: Sequence[TokenSpan]) -> str:
    """Say what the picture leaves out."""
    notes = []
    if len(spans) > 1:
        notes.append(f"image 1 of {len(spans)}")
    if spans[0].grid[0] > 1:
        notes.append(f"frame 1 of {spans[0].grid[0]}")
    if not _placed(spans[0]):
        notes.append("tokens in reading order")
    return f" ({', '.join(notes)})" if notes else ""


def _caption(
    figure: Any, report: Report, row: int, question: str, answers: tuple[str, str] | None, width: float
) -> None:
    letters = int(width * 10.5)
    lines = [(report.policy, {"weight": "bold", "size": 14})]
    average, whole = report.average_tokens[row], report.visual_tokens[row]
    lines.append((
        f"on average {average:.1f} of {whole} visual tokens enter a layer; "
        f"prefill FLOPs {report.flops_ratio:.1%}, KV cache {report.kv_ratio:.1%} of unpruned",
        {"size": 10, "color": "#555555"},
    ))  # fmt: skip
    if question:
        lines.append((textwrap.shorten(f"Q: {question}", letters, placeholder=" ..."), {"size": 11}))
    if answers is not None:
        said = [textwrap.shorten(answer, letters // 2 - 12, placeholder=" ...") or "(nothing)" for answer in answers]
        lines.append((f"A: {said[0]}  (unpruned)     {said[1]}  (pruned)", {"size": 11}))
    for number, (text, style) in enumerate(lines):
        figure.text(0.012, 0.90 - number * 0.235, text, va="top", parse_math=False, **{"color": INK, **style})


def _show(axis: Any, picture: npt.NDArray[np.uint8], title: str) -> None:
    axis.imshow(picture, interpolation="nearest")
    _frame(axis, title)


def _frame(axis: Any, title: str) -> None:
    axis.set_title(title, fontsize=10, color=INK)
    axis.set_xticks([])
    axis.set_yticks([])
    for spine in axis.spines.values():
        spine.set_visible(False)


def _show_leaving(figure: Any, axis: Any, left: npt.NDArray[np.int64], depth: int, shape: tuple[int, ...]) -> None:
    extent = (0, shape[1], shape[0], 0)
    shown = axis.imshow(left, cmap="viridis", vmin=0, vmax=depth, extent=extent, interpolation="nearest")
    _frame(axis, "layer at which each patch left")
    bar = figure.colorbar(shown, ax=axis, shrink=0.85, pad=0.02)
    ticks = sorted({*np.unique(left).tolist(), depth})
    bar.set_ticks(ticks, labels=["stayed" if tick == depth else str(tick) for tick in ticks])
    bar.ax.tick_params(labelsize=8, length=2)
    bar.outline.set_visible(False)


def _bars(figure: Any, report: Report, row: int, layers_ms: tuple[Sequence[float], Sequence[float]] | None) -> None:
    """Draw tokens per layer and, if it was measured, milliseconds per layer, unpruned beside pruned."""
    pruned = report.entering[row]
    axes = figure.subplots(1, 2 if layers_ms is not None else 1, squeeze=False)[0]
    _pair(axes[0], [report.visual_tokens[row]] * len(pruned), pruned, "visual tokens entering a layer")
    if layers_ms is not None:
        _pair(axes[1], *layers_ms, "milliseconds in a layer")
    axes[0].legend(frameon=False, fontsize=9, ncols=2, loc="lower right", bbox_to_anchor=(1.0, 0.99), borderaxespad=0)


def _pair(axis: Any, dense: Sequence[float], pruned: Sequence[float], title: str) -> None:
    layers = np.arange(len(pruned))
    axis.bar(layers - 0.2, dense, 0.4, color=DENSE, label="unpruned")
    axis.bar(layers + 0.2, pruned, 0.4, color=PRUNED, label="pruned")
    axis.set_title(title, fontsize=10, color=INK, loc="left")
    axis.set_xlabel("layer", fontsize=9)
    step = max(1, len(pruned) // 12)
    axis.set_xticks(layers[::step])
    axis.tick_params(labelsize=8, length=2)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_axisbelow(True)
    axis.grid(axis="y", color="#e6e6e6", linewidth=0.8)
