from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tokenprune.errors import WriteError
from tokenprune.picture import draw, first_frame, kept_cells, leaving_layers, shaded
from tokenprune.report import Report, StageRecord
from tokenprune.tokens import TokenSpan

DEPTH, START = 6, 5
SQUARE = TokenSpan(tuple(range(START, START + 16)), (1, 4, 4))


def stage(layer: int, arriving: list[int], kept: list[int]) -> StageRecord:
    """A stage over token numbers of the first image, counted from 0."""
    kept_at, arriving_at = (torch.tensor([START + n for n in numbers]) for numbers in (kept, arriving))
    return StageRecord(f"llm.layers.{layer}", layer, "x", [len(arriving)], [len(kept)], [kept_at], [arriving_at])


def report(*stages: StageRecord, tokens: int = 16) -> Report:
    sizes, alive = [], tokens
    for layer in range(DEPTH):
        alive = next((s.tokens_out[0] for s in stages if s.layer == layer), alive)
        sizes.append(alive)
    return Report("a-policy", "0" * 12, stages, [tokens], [tokens + 8], [tuple(sizes)], 0.5, 0.5, 1)


FIRST = stage(1, list(range(16)), [0, 5, 10, 15])
SECOND = stage(4, [0, 5, 10, 15], [5])


def test_kept_cells_are_where_the_kept_tokens_lie() -> None:
    assert kept_cells(SQUARE, FIRST).tolist() == np.eye(4, dtype=bool).tolist()


def test_leaving_layers_tells_stage_or_depth() -> None:
    left = leaving_layers(SQUARE, report(FIRST, SECOND))
    assert left.diagonal().tolist() == [4, DEPTH, 4, 4]
    assert (left[~np.eye(4, dtype=bool)] == 1).all()


def test_shaded_keeps_kept_patches_and_darkens_dropped_ones() -> None:
    picture = np.full((40, 40, 3), (200, 100, 50), dtype=np.uint8)
    made = shaded(picture, kept_cells(SQUARE, FIRST), (4, 4))
    assert made[15, 15].tolist() == [200, 100, 50]  # cell (1, 1) stayed
    assert made[15, 25].max() < 60  # cell (1, 2) left
    assert np.ptp(made[15, 25].astype(int)) < np.ptp([200, 100, 50]) * 0.22  # and is nearly grey


def test_a_clip_is_drawn_by_its_first_frame() -> None:
    clip = TokenSpan(tuple(range(START, START + 12)), (3, 2, 2), "video")
    assert first_frame(clip).tolist() == [[5, 6], [7, 8]]


def test_tokens_without_a_place_are_wrapped_in_reading_order() -> None:
    strip = TokenSpan(tuple(range(START, START + 7)), (1, 1, 7))
    assert first_frame(strip).tolist() == [[5, 6, 7], [8, 9, 10], [11, -1, -1]]


@pytest.mark.parametrize(
    ("spans", "tokens"),
    [
        ((SQUARE,), 16),
        ((SQUARE, TokenSpan(tuple(range(30, 46)), (1, 4, 4))), 32),
        ((TokenSpan(SQUARE.positions, (4, 2, 2), "video"),), 16),
        ((TokenSpan(SQUARE.positions, (1, 1, 16)),), 16),
        ((TokenSpan(SQUARE.positions, (1, 2, 8)),), 16),
    ],
)
def test_draw_writes_a_picture(tmp_path: Path, spans: tuple[TokenSpan, ...], tokens: int) -> None:
    image = Image.new("RGB", (30, 30), (250, 10, 10))
    path = draw(
        tmp_path / "a.png",
        image=image,
        spans=spans,
        report=report(FIRST, SECOND, tokens=tokens),
        question="how much is $5 in $ [b]? " * 20,
        answers=("", "much"),
        layers_ms=([1.0] * DEPTH, [0.5] * DEPTH),
    )
    with Image.open(path) as made:
        assert made.format == "PNG"
        assert made.width >= 900 and made.height >= 500


def drawn(path: Path, kept: list[int]) -> np.ndarray:
    """Draw one stage over a plain red image and return the pixels of its panel: those that lie between others' edges."""
    first = stage(1, list(range(16)), kept)
    draw(path, image=Image.new("RGB", (40, 40), (250, 10, 10)), spans=[SQUARE], report=report(first))
    with Image.open(path) as made:
        return np.asarray(made.convert("RGB")).astype(int)


def test_kept_patches_are_bright_and_dropped_ones_dark_in_the_file(tmp_path: Path) -> None:
    pixels = drawn(tmp_path / "left.png", [0, 1, 4, 5, 8, 9, 12, 13])  # the left half stays
    red = (abs(pixels - (250, 10, 10)).sum(axis=2) < 10).any(axis=0)
    edges = np.flatnonzero(np.diff(red.astype(int)))
    original, kept = edges[1] - edges[0], edges[-1] - edges[2]
    assert 0.46 < kept / original < 0.54, "the second panel is red on half of its width"
    row = np.flatnonzero(abs(pixels[:, edges[0] + 20] - (250, 10, 10)).sum(axis=1) < 10)
    dark = pixels[row[len(row) // 3] + 3, edges[-1] + 40]
    assert dark.max() < 80, "and dark right of it"


def test_another_choice_gives_another_picture(tmp_path: Path) -> None:
    left, right = drawn(tmp_path / "a.png", [0, 1, 2, 3]), drawn(tmp_path / "b.png", [12, 13, 14, 15])
    assert left.shape == right.shape and (left != right).any()


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(WriteError) as caught:
        drawn(tmp_path / "no" / "a.png", [0])
    place = str(tmp_path / "no" / "a.png")
    assert str(caught.value) == f"the picture cannot be written to {place!r}: No such file or directory"
