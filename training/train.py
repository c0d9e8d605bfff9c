"""Train the embedded model: ``python training/train.py --out tokenprune/embedded``."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from align import settle, train_alignment
from export import write_model, write_samples
from language import rehearse, tower_features, train_language
from model import build_model
from pool import Log, load_pool

SEED = 20


def main() -> None:
    """Run the stages that the work folder does not hold yet, then write the model folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--work", type=Path, default=Path("training/work"), help="folder for pools and checkpoints")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    log = Log(args.work / "log.csv")
    train, test = load_pool(args.work, "train", 12000, SEED), load_pool(args.work, "test", 1000, SEED + 1)
    model = build_model(SEED)
    aligned = args.work / "aligned.pt"
    if aligned.exists():
        model.load_state_dict(torch.load(aligned))
    else:
        train_alignment(model, train, test, log, aligned, SEED)
    settled = args.work / "settled.pt"
    if settled.exists():
        model.load_state_dict(torch.load(settled))
    else:
        settle(model, train, test, log, settled, SEED)
    rehearsed = args.work / "rehearsed.pt"
    if rehearsed.exists():
        model.load_state_dict(torch.load(rehearsed))
    else:
        rehearse(model, log, rehearsed, SEED)
    test_features = tower_features(model, test, 100)
    train_language(model, train, (test, test_features), log, args.work / "language.pt", SEED)
    write_model(model, args.out)
    write_samples(model, args.out, SEED + 2)


if __name__ == "__main__":
    main()
