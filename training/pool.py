"""Fixed pools of collages, made once and kept in the work folder."""

from __future__ import annotations

import csv
import pickle
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from collage import GRID, Collage, Split, make_collage
from model import GROUPS, NOTHING, TYPES, WORDS
from torch import Tensor, nn


@dataclass
class Pool:
    """Collages of one split and, per patch, which words describe it."""

    collages: list[Collage]
    words: Tensor  # bool [images, 576, words]

    def __len__(self) -> int:
        return len(self.collages)

    def pixels(self, index: Tensor) -> Tensor:
        """Normalised pixels ``[batch, 3, 144, 144]``, as the processor makes them."""
        images = np.stack([self.collages[i].image for i in index.tolist()])
        return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1

    def object_mask(self, index: Tensor) -> Tensor:
        """True at patches that belong to an object, ``[batch, 576]``."""
        return ~self.words[index][:, :, WORDS.index(NOTHING)]


def load_pool(work: Path, split: Split, size: int, seed: int) -> Pool:
    """The pool of ``size`` collages that ``seed`` names, from ``work`` or made now."""
    path = work / f"pool-{split}-{size}-{seed}.pkl"
    if not path.exists():
        with ProcessPoolExecutor(2) as executor:
            collages = list(executor.map(partial(_one, seed, split), range(size), chunksize=64))
        path.write_bytes(pickle.dumps(collages))
    collages = pickle.loads(path.read_bytes())
    return Pool(collages, patch_words(collages))


def _one(seed: int, split: Split, index: int) -> Collage:
    return make_collage(np.random.default_rng((seed, index)), split)


def patch_words(collages: list[Collage]) -> Tensor:
    """Bool ``[images, 576, words]``: colour, label, place and type of an object's patches, NOTHING elsewhere."""
    number = {word: i for i, word in enumerate(WORDS)}
    out = torch.zeros(len(collages), GRID * GRID, len(WORDS), dtype=torch.bool)
    out[:, :, number[NOTHING]] = True
    for i, collage in enumerate(collages):
        for item in collage.items:
            kind = TYPES[item.is_digit]
            named = torch.tensor([number[word] for word in (item.color, item.label, item.place, kind)])
            for patch in item.patches:
                out[i, patch, number[NOTHING]] = False
                out[i, patch, named] = True
    return out


def group_slices() -> list[slice]:
    """Where each group of ``GROUPS`` lies in ``WORDS``."""
    slices, start = [], 0
    for group in GROUPS:
        slices.append(slice(start, start + len(group)))
        start += len(group)
    return slices


class Log:
    """The training log: one row per measurement, appended to a CSV file and printed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.start = time.time()

    def row(self, stage: str, step: int, measure: str, value: float) -> None:
        new = not self.path.exists()
        with self.path.open("a", newline="") as file:
            writer = csv.writer(file)
            if new:
                writer.writerow(["seconds", "stage", "step", "measure", "value"])
            writer.writerow([round(time.time() - self.start), stage, step, measure, f"{value:.4f}"])
        print(f"{time.time() - self.start:7.0f}s {stage} {step:6d} {measure:>24} {value:.4f}", flush=True)


class Threads:
    """One thread or two, whichever is the faster now: on a shared machine two wait for the slower one.

    Call ``tick`` before every step: two of every fifty steps are timed with each number of threads.
    """

    def __init__(self, most: int = 2, period: int = 50) -> None:
        self.most, self.period = most, period
        self.count, self.last = 0, time.perf_counter()
        self.spent = [0.0, 0.0]

    def tick(self) -> None:
        now, at = time.perf_counter(), self.count % self.period
        if 1 <= at <= 4:
            self.spent[(at - 1) // 2] += now - self.last
        if at == 0:
            self.spent = [0.0, 0.0]
            torch.set_num_threads(1)
        elif at == 2:
            torch.set_num_threads(self.most)
        elif at == 4:
            torch.set_num_threads(1 if self.spent[0] < self.spent[1] else self.most)
        self.last, self.count = now, self.count + 1


def descend(optimizer: torch.optim.Optimizer, loss: Tensor, rate: float) -> None:
    """One step down the gradient of ``loss``, its norm clipped to one, at this learning rate."""
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()


def learning_rate(step: int, steps: int, peak: float, warmup: int = 50) -> float:
    """Linear warm-up, then a cosine to a fiftieth of the peak."""
    if step < warmup:
        return peak * (step + 1) / warmup
    share = max(0, step - warmup) / max(1, steps - warmup)
    return peak * (0.02 + 0.98 * 0.5 * (1 + np.cos(np.pi * share)))
