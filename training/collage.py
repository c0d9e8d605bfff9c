"""Seeded collages of public images with questions about them: the data of the embedded model.

A collage is 144x144 pixels, read by the model as 24x24 patches of 6x6 pixels. It has nine places (3x3, eight patches
square); 4 to 7 of them hold one object of 2x2 patches: a coloured shape cut out of an ``easy-vqa`` image, or a
handwritten digit of scikit-learn in a colour. The rest is a light background with strokes and specks.

Everything is a function of a numpy generator, so a seed names a data set. Train collages are made of train sources
only and test collages of test sources only (easy-vqa's own split; a fixed split of the digits).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image

PATCH = 6  # pixels
GRID = 24  # patches per side
SIDE = PATCH * GRID  # pixels
REGION = 8  # patches per side of a place
OBJECT = 2  # patches per side of an object
SPRITE = OBJECT * PATCH  # pixels per side of an object

PLACES = ("topleft", "top", "topright", "left", "centre", "right", "bottomleft", "bottom", "bottomright")
SHAPES = ("circle", "rectangle", "triangle")
DIGITS = tuple("0123456789")
COLORS: dict[str, tuple[int, int, int]] = {
    "red": (255, 0, 0),
    "green": (0, 255, 0),
    "blue": (0, 0, 255),
    "yellow": (255, 255, 0),
    "teal": (0, 128, 128),
    "brown": (165, 42, 42),
    "black": (0, 0, 0),
    "gray": (128, 128, 128),
}
# A thin black stroke fades to gray at its edge: gray digits would be ambiguous.
DIGIT_COLORS = tuple(c for c in COLORS if c != "gray")
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven")
KINDS = ("shape_at", "digit_at", "color_at", "shape_of", "digit_of", "color_of", "where", "exists", "count")

Split = Literal["train", "test"]


@dataclass(frozen=True)
class Source:
    """One cut-out: what it is, its opacity ``[12, 12]`` in 0..1, and its colour (None: any digit colour)."""

    label: str
    alpha: np.ndarray
    color: str | None


@dataclass(frozen=True)
class Item:
    """One object on a collage; ``row`` and ``col`` are the patch of its top left corner."""

    label: str
    color: str
    place: str
    row: int
    col: int

    @property
    def is_digit(self) -> bool:
        return self.label in DIGITS

    @property
    def patches(self) -> list[int]:
        """Row-major indices of the patches that the object covers."""
        return [(self.row + i) * GRID + self.col + j for i in range(OBJECT) for j in range(OBJECT)]


@dataclass(frozen=True)
class QA:
    """A question with a one-word answer and the patches without which it cannot be answered."""

    kind: str
    question: str
    answer: str
    key_patches: tuple[int, ...]
    focus: tuple[int, ...]  # patches of the objects that match the question's words; none where no object does
    about: tuple[str, str, str] | None = None  # colour, label and place of the one object that is asked about


@dataclass
class Collage:
    """An image, uint8 ``[144, 144, 3]``, and what is on it."""

    image: np.ndarray
    items: list[Item] = field(default_factory=list)

    @property
    def object_patches(self) -> list[int]:
        return [p for item in self.items for p in item.patches]


# ---------------------------------------------------------------------------------------------------------- sources


@lru_cache(maxsize=2)
def load_sources(split: Split) -> tuple[list[Source], list[Source]]:
    """Cut-outs of one split: (shapes, digits)."""
    return _shapes(split), _digits(split)


def _shapes(split: Split) -> list[Source]:
    import easy_vqa

    folder = Path(easy_vqa.__file__).parent / "data" / split
    questions = json.loads((folder / "questions.json").read_text())
    # The data set gives no labels, only questions: an image whose shape some question names is used.
    labels = {index: answer for _, answer, index in questions if answer in SHAPES}
    sources = []
    for index, label in sorted(labels.items()):
        image = np.asarray(Image.open(folder / "images" / f"{index}.png").convert("RGB"))
        sources.append(_cut_out(image, label))
    return sources


def _cut_out(image: np.ndarray, label: str) -> Source:
    """The flat-coloured shape of one easy-vqa image ``[64, 64, 3]``, scaled so that its longer side is 12 pixels."""
    palette = np.array(list(COLORS.values()))
    distance = np.abs(image[:, :, None, :].astype(int) - palette).sum(-1)  # [64, 64, 8]
    counts = (distance == 0).sum((0, 1))
    color = list(COLORS)[int(counts.argmax())]
    background = image[0, 0].astype(float)
    ink = np.array(COLORS[color], float) - background
    alpha = np.clip(((image - background) @ ink) / (ink @ ink), 0, 1)
    ys, xs = np.nonzero(alpha > 0.5)
    crop = alpha[ys.min() : ys.max() + 1, xs.min() : xs.max() + 1]
    height, width = crop.shape
    scale = SPRITE / max(height, width)
    # A sliver would leave some of its four patches empty: the shorter side is at least 8 pixels.
    size = (max(round(width * scale), 8), max(round(height * scale), 8))
    small = Image.fromarray((crop * 255).astype(np.uint8)).resize(size, Image.Resampling.BOX)
    out = np.zeros((SPRITE, SPRITE))
    top, left = (SPRITE - size[1]) // 2, (SPRITE - size[0]) // 2
    out[top : top + size[1], left : left + size[0]] = np.asarray(small) / 255
    return Source(label, out, color)


def _digits(split: Split) -> list[Source]:
    from sklearn.datasets import load_digits

    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    chosen = order[:1347] if split == "train" else order[1347:]
    sources = []
    for index in sorted(chosen):
        image = Image.fromarray((data.images[index] * (255 / 16)).astype(np.uint8))
        image = image.resize((SPRITE, SPRITE), Image.Resampling.BICUBIC)
        # 1347 digits are few: each train digit is there also turned a little to both sides.
        for angle in (-14, -7, 0, 7, 14) if split == "train" else (0,):
            turned = np.asarray(image.rotate(angle, Image.Resampling.BICUBIC)) / 255
            sources.append(Source(str(data.target[index]), np.clip(turned * 1.5 - 0.15, 0, 1), None))
    return sources


# ---------------------------------------------------------------------------------------------------------- collages


def make_collage(rng: np.random.Generator, split: Split) -> Collage:
    """One collage of 4 to 7 objects at different places."""
    shapes, digits = load_sources(split)
    image = _background(rng)
    clean = image.copy()
    _clutter(rng, image)
    items = []
    for place in rng.permutation(9)[: rng.integers(4, 8)]:
        bank = shapes if rng.random() < 0.6 else digits
        source = bank[rng.integers(len(bank))]
        color = source.color or DIGIT_COLORS[rng.integers(len(DIGIT_COLORS))]
        row = place // 3 * REGION + rng.integers(REGION - OBJECT + 1)
        col = place % 3 * REGION + rng.integers(REGION - OBJECT + 1)
        box = np.s_[row * PATCH : row * PATCH + SPRITE, col * PATCH : col * PATCH + SPRITE]
        alpha = source.alpha[:, :, None]
        image[box] = clean[box] * (1 - alpha) + np.array(COLORS[color]) * alpha
        items.append(Item(source.label, color, PLACES[place], int(row), int(col)))
    image += 3 * rng.standard_normal(image.shape, np.float32)
    return Collage(np.clip(image, 0, 255).astype(np.uint8), items)


def make_layout(rng: np.random.Generator) -> Collage:
    """A collage without its image: labels, colours and places only."""
    items = []
    for place in rng.permutation(9)[: rng.integers(4, 8)]:
        labels, colors = (SHAPES, tuple(COLORS)) if rng.random() < 0.6 else (DIGITS, DIGIT_COLORS)
        row = place // 3 * REGION + rng.integers(REGION - OBJECT + 1)
        col = place % 3 * REGION + rng.integers(REGION - OBJECT + 1)
        label, color = labels[rng.integers(len(labels))], colors[rng.integers(len(colors))]
        items.append(Item(label, color, PLACES[place], int(row), int(col)))
    return Collage(np.zeros((0, 0, 3), np.uint8), items)


def _background(rng: np.random.Generator) -> np.ndarray:
    """A light colour with a linear gradient, float ``[144, 144, 3]``."""
    y, x = np.mgrid[-1 : 1 : SIDE * 1j, -1 : 1 : SIDE * 1j]
    slope = rng.uniform(-9, 9, (2, 3))
    return rng.uniform(225, 246, 3) + y[:, :, None] * slope[0] + x[:, :, None] * slope[1]


def _clutter(rng: np.random.Generator, image: np.ndarray) -> None:
    """Draw thin strokes and specks in half-faded random colours on ``image``, in place."""
    for _ in range(rng.integers(12, 28)):
        length = rng.integers(1, 9)
        start, angle = rng.uniform(4, SIDE - 4, 2), rng.uniform(0, 2 * np.pi)
        steps = np.arange(length)[:, None] * np.array([np.sin(angle), np.cos(angle)])
        ys, xs = np.clip((start + steps).astype(int), 0, SIDE - 1).T
        image[ys, xs] = 0.5 * image[ys, xs] + 0.5 * rng.uniform(0, 255, 3)


# ---------------------------------------------------------------------------------------------------------- questions


def make_question(rng: np.random.Generator, collage: Collage, kind: str) -> QA | None:
    """A question of ``kind`` about ``collage``; None when the collage allows none."""
    items = collage.items
    if kind == "exists":
        return _exists(rng, collage)
    if kind == "count":
        return _count(rng, collage)
    colors, labels = [i.color for i in items], [i.label for i in items]
    candidates: list[tuple[Item, str, str]] = []
    for item in items:
        unique_color, unique_label = colors.count(item.color) == 1, labels.count(item.label) == 1
        unique_pair = sum(i.color == item.color and i.label == item.label for i in items) == 1
        what = "digit" if item.is_digit else "shape"
        if kind == f"{what}_at":
            candidates.append((item, f"what {what} is at the {item.place}?", item.label))
        elif kind == f"{what}_of" and unique_color:
            candidates.append((item, f"what {what} is the {item.color} object?", item.label))
        elif kind == "color_at":
            candidates.append((item, f"what color is the object at the {item.place}?", item.color))
        elif kind == "color_of" and unique_label:
            candidates.append((item, f"what color is the {item.label}?", item.color))
        elif kind == "where" and unique_pair:
            candidates.append((item, f"where is the {item.color} {item.label}?", item.place))
    if not candidates:
        return None
    item, question, answer = candidates[rng.integers(len(candidates))]
    patches = tuple(item.patches)
    return QA(kind, question, answer, patches, patches, (item.color, item.label, item.place))


def _exists(rng: np.random.Generator, collage: Collage) -> QA | None:
    """Ask "is there a red circle?", half yes; most no's name a colour and a label that are both there, but apart."""
    pairs = {(i.color, i.label) for i in collage.items}
    if rng.random() < 0.5:
        answer, options = "yes", sorted(pairs)
    else:
        answer, draw = "no", rng.random()
        colors = {i.color for i in collage.items} if draw < 0.85 else set(COLORS)
        labels = {i.label for i in collage.items} if draw < 0.7 or draw >= 0.85 else {*SHAPES, *DIGITS}
        options = sorted({(c, k) for c in colors for k in labels if not (c == "gray" and k in DIGITS)} - pairs)
    if not options:
        return None
    color, label = options[rng.integers(len(options))]
    focus = [p for i in collage.items if (i.color, i.label) == (color, label) for p in i.patches]
    return QA("exists", f"is there a {color} {label}?", answer, tuple(collage.object_patches), tuple(focus))


def _count(rng: np.random.Generator, collage: Collage) -> QA:
    """Ask "how many circles are there?"; the number is drawn first, so that small ones do not prevail."""
    items = collage.items
    matches = {f"{s}s": [i for i in items if i.label == s] for s in SHAPES}
    matches["digits"] = [i for i in items if i.is_digit]
    matches |= {f"{c} objects": [i for i in items if i.color == c] for c in COLORS}
    numbers = sorted({len(found) for found in matches.values() if len(found) <= 4})
    number = numbers[rng.integers(len(numbers))]
    options = [what for what, found in matches.items() if len(found) == number]
    what = options[rng.integers(len(options))]
    focus = [p for i in matches[what] for p in i.patches]
    question = f"how many {what} are there?"
    return QA("count", question, NUMBERS[number], tuple(collage.object_patches), tuple(focus))


def make_questions(rng: np.random.Generator, collage: Collage, number: int, weights: np.ndarray) -> list[QA]:
    """``number`` questions whose kinds are drawn with ``weights [9]`` (kinds the collage cannot answer are redrawn)."""
    out: list[QA] = []
    while len(out) < number:
        qa = make_question(rng, collage, KINDS[rng.choice(len(KINDS), p=weights)])
        if qa is not None:
            out.append(qa)
    return out
