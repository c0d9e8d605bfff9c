"""Index arithmetic against plain Python lists."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from tokenprune.sequence import Slots, View, Visuals, cut_mask, take

SEEDS = range(8)


def random_mask(rng: random.Random, rows: int, length: int, share: float = 0.5) -> Tensor:
    return torch.tensor([[rng.random() < share for _ in range(length)] for _ in range(rows)])


def found(mask: Tensor) -> Visuals:
    return Visuals.of(mask, tuple(mask.sum(dim=1).tolist()))


def listed(index: Tensor, alive: Tensor | None) -> list[list[int]]:
    """Alive positions per row."""
    alive = torch.ones_like(index, dtype=torch.bool) if alive is None else alive
    return [row[flag].tolist() for row, flag in zip(index, alive, strict=True)]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dims", [(0, 1), (0, 2), (1, 2)])
def test_take_equals_a_loop(rows: int, shared: bool, dims: tuple[int, int]) -> None:
    batch_dim, seq_dim = dims
    shape = [2, 4, 5, 3]
    shape[batch_dim], shape[seq_dim] = (1 if shared else rows), 7
    x, index = torch.randn(shape), torch.randint(0, 7, (rows, 4))
    got = take(x, index, seq_dim, batch_dim)
    for row in range(rows):
        source = x.select(batch_dim, 0 if shared else row)
        dim = seq_dim - (seq_dim > batch_dim)
        assert torch.equal(got.select(batch_dim, row), source.index_select(dim, index[row]))


@pytest.mark.parametrize("seed", SEEDS)
def test_narrowing_twice_and_putting_back_equals_lists(seed: int) -> None:
    rng = random.Random(seed)
    rows, length = rng.choice([1, 2, 4]), 11
    view, expected = View.full(rows, length, torch.device("cpu")), [list(range(length))] * rows
    states = torch.randn(rows, length, 3)
    base = states.clone()
    for _ in range(2):
        keep = random_mask(rng, rows, view.index.shape[1])
        keep[:, -1] = True
        if view.alive is not None:
            keep &= view.alive
        kept = [
            [p for p, k in zip(listed(view.index[b : b + 1], None)[0], keep[b], strict=True) if k] for b in range(rows)
        ]
        counts = [len(row) for row in kept]
        new, order = view.narrow(keep, counts)
        states = take(states, order, 1) + 1
        for row, positions in enumerate(kept):
            base[row, positions] += 1
        view, expected = new, kept
        assert listed(view.index, view.alive) == expected
        assert view.counts == tuple(counts)
        if view.alive is not None:  # right-aligned
            assert torch.equal(view.alive, view.alive.sort(dim=1).values)
    put = view.put_back(base.clone() * 0 + 7, states)
    for row, positions in enumerate(expected):
        torch.testing.assert_close(put[row, positions], base[row, positions])
        others = sorted(set(range(length)) - set(positions))
        assert (put[row, others] == 7).all()


def test_put_back_passes_gradients_only_to_alive_slots() -> None:
    keep = torch.tensor([[True, True, False, True], [False, False, False, True]])
    view, _ = View.full(2, 4, torch.device("cpu")).narrow(keep, [3, 1])
    states = torch.randn(2, 3, 2, requires_grad=True)
    view.put_back(torch.zeros(2, 4, 2), states).sum().backward()
    assert states.grad is not None
    assert torch.equal(states.grad[..., 0], torch.tensor([[1.0, 1, 1], [0, 0, 1]]))


@pytest.mark.parametrize("seed", SEEDS)
def test_visuals_follow_the_view(seed: int) -> None:
    rng = random.Random(seed)
    rows, length = 3, 14
    mask = random_mask(rng, rows, length)
    visuals, view = found(mask), View.full(rows, length, torch.device("cpu"))
    assert listed(visuals.slots, visuals.valid) == [row.nonzero().flatten().tolist() for row in mask]
    originals = [row.nonzero().flatten().tolist() for row in mask]
    for _ in range(2):
        kept = random_mask(rng, rows, visuals.slots.shape[1], 0.6) & visuals.valid
        counts = [int(n) for n in kept.sum(1)]
        keep = view.alive.clone() if view.alive is not None else torch.ones_like(view.index, dtype=torch.bool)
        for row in range(rows):
            for slot, valid, stays in zip(visuals.slots[row], visuals.valid[row], kept[row], strict=True):
                if valid and not stays:
                    keep[row, slot] = False
        expected = [
            [p for p, k in zip(view.index[b, visuals.slots[b]].tolist(), kept[b], strict=True) if k]
            for b in range(rows)
        ]
        (visuals, _), (view, _) = visuals.narrow(kept, counts, keep), view.narrow(keep, [int(n) for n in keep.sum(1)])
        assert listed(view.index.gather(1, visuals.slots), visuals.valid) == expected
        ordinals = [[originals[b].index(p) for p in row] for b, row in enumerate(expected)]
        assert listed(visuals.ordinal, visuals.valid) == ordinals


def test_slots_follow_rows_window_and_crop() -> None:
    slots = Slots.full(2, 3, torch.device("cpu")).extend(
        torch.tensor([[3, 5], [0, 4]]), 3, torch.tensor([[False] * 2, [True, False]])
    )
    assert slots.length == 6 and slots.has_dead
    assert slots.positions.tolist() == [[0, 1, 2, 3, 5], [0, 1, 2, -1, 4]]
    assert slots.rows(torch.tensor([1, 1, 0])).positions[:, 3].tolist() == [-1, -1, 3]
    assert slots.last(2).positions.tolist() == [[3, 5], [-1, 4]] and slots.last(2).length == 6
    cropped, gone = slots.crop(5)
    assert cropped.length == 5 and gone == 0 and cropped.positions.tolist() == [[0, 1, 2, 3, -1], [0, 1, 2, -1, 4]]
    cropped, gone = slots.crop(3)
    assert gone == 2 and cropped.positions.tolist() == [[0, 1, 2]] * 2


@pytest.mark.parametrize("form", ["bool", "float", "flash"])
@pytest.mark.parametrize("given", ["none", "bool", "float", "flash"])
@pytest.mark.parametrize("seed", SEEDS)
def test_cut_mask_equals_a_loop_over_positions(seed: int, given: str, form: str) -> None:
    """A chunk of 5 after 6 seen positions, some dropped earlier; two ragged rows."""
    rng = random.Random(seed)
    seen, chunk, rows = 6, 5, 2
    past = [[p for p in range(seen) if rng.random() < 0.7] for _ in range(rows)]
    new = [[p for p in range(chunk) if rng.random() < 0.6] or [chunk - 1] for _ in range(rows)]
    longest = max(map(len, past))
    before = Slots(torch.tensor([[-1] * (longest - len(row)) + row for row in past]), seen, True)
    keep = torch.tensor([[p in row for p in range(chunk)] for row in new])
    view, _ = View.full(rows, chunk, torch.device("cpu")).narrow(keep, [len(row) for row in new])
    dead = None if view.alive is None else ~view.alive
    keys = before.extend(view.index + seen, chunk, dead)
    visible = torch.rand(rows, 1, chunk, seen + chunk) < 0.6
    padding = torch.rand(rows, seen + chunk) < 0.7
    mask = {
        "none": None, "bool": visible, "flash": padding.long(),
        "float": torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min),
    }[given]  # fmt: skip
    cut = cut_mask(
        mask,
        form=form,
        dtype=torch.float32,
        keys=keys,
        offset=0,
        queries=view.index.shape[1],
        rows=view.index,
        dead_rows=dead,
    )
    assert cut is not None
    for row in range(rows):
        for slot, key in enumerate(keys.positions[row].tolist()):
            if cut.ndim == 2:
                assert bool(cut[row, slot]) == (key >= 0 and (given == "none" or bool(padding[row, key])))
                continue
            for line, query in enumerate(view.index[row].tolist()):
                if dead is not None and dead[row, line]:
                    continue
                allowed = key >= 0 and (key <= query + seen if given == "none" else bool(visible[row, 0, query, key]))
                value = cut[row, 0, line, slot]
                assert bool(value if cut.dtype == torch.bool else value == 0) == allowed


def test_no_mask_stays_no_mask_where_nothing_is_dead() -> None:
    keys = Slots.full(1, 0, torch.device("cpu")).extend(torch.tensor([[0, 3, 4]]), 5)
    options = dict(
        form="bool", dtype=torch.float32, keys=keys, offset=0, queries=3, rows=torch.tensor([[0, 3, 4]]), dead_rows=None
    )
    assert cut_mask(None, **options) is None
    assert cut_mask(None, **options, window=5) is None
    windowed = cut_mask(None, **options, window=4)
    assert windowed is not None and windowed[0, 0].tolist() == [
        [True, False, False],
        [True, True, False],
        [False, True, True],
    ]
