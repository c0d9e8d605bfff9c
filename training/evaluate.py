"""Measure the shipped folder: ``python training/evaluate.py --model tokenprune/embedded`` writes ``metrics.json``."""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import torch
from collage import KINDS, QA
from language import PATCHES, accuracy, exam, exam_of, predict, tower_features
from PIL import Image
from pool import Pool, load_pool
from torch import Tensor
from train import SEED
from transformers import AutoProcessor, LlavaForConditionalGeneration

IMAGES = 200
BUDGETS = (192, 128, 64, 32)
EXAM_SEED = 7
PIPELINE = 60  # about how many questions go through processor and generate


def main() -> None:
    """Write accuracies per kind of question under every condition, next to what needs no image."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="the model folder")
    parser.add_argument("--work", type=Path, default=Path("training/work"), help="folder of the pools")
    parser.add_argument("--images", type=int, default=IMAGES, help="collages to ask about, one question of each kind")
    parser.add_argument("--threads", type=int, default=1, help="on a busy machine two threads wait for each other")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(args.threads)
    model = LlavaForConditionalGeneration.from_pretrained(args.model, dtype=torch.float32).eval()
    # The first hundred collages chose how often each kind was asked in training: they are left out.
    pool = load_pool(args.work, "test", 1000, SEED + 1)
    test = Pool(pool.collages[100:], pool.words[100:])
    questions = exam(test, args.images, EXAM_SEED)
    flat = [(image, qa) for image, qas in enumerate(questions) for qa in qas]
    features = tower_features(model, test, args.images)
    metrics = {
        "test_images": args.images,
        "questions": dict(Counter(qa.kind for _, qa in flat)) | {"all": len(flat)},
        "visual_tokens": PATCHES,
        "parameters": sum(p.numel() for p in model.parameters()),
        "prior_most_frequent_answer": most_frequent_answer(questions),
        "prior_question_only": question_only(args.work, questions),
        "accuracy": conditions(model, features, test, questions),
        "pipeline": pipeline(model, args.model, test, flat[:: max(1, len(flat) // PIPELINE)]),
    }
    (args.model / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
    write_table(args.model / "README.md", table(metrics))


def conditions(
    model: LlavaForConditionalGeneration, features: Tensor, test: Pool, questions: list[list[QA]]
) -> dict[str, dict[str, float]]:
    """Accuracy per kind by which patches the language model gets; positions are those of the whole grid."""
    generator = torch.Generator().manual_seed(EXAM_SEED)
    states = list(features[: len(questions)])
    everything, nothing = torch.arange(PATCHES), torch.arange(0)

    def score(keep: list[Tensor]) -> dict[str, float]:
        scores = rounded(accuracy(questions, predict(model, states, questions, keep)))
        print(scores, flush=True)
        return scores

    def random(budget: int) -> Tensor:
        return torch.randperm(PATCHES, generator=generator)[:budget].sort().values

    def filled(objects: Tensor, budget: int) -> Tensor:
        chosen = torch.zeros(PATCHES)
        chosen[objects] = 1
        order = chosen + torch.rand(PATCHES, generator=generator)
        return order.topk(budget).indices.sort().values

    objects = [torch.tensor(sorted(c.object_patches)) for c in test.collages[: len(questions)]]
    out = {"all_576": score([everything] * len(questions)), "none": score([nothing] * len(questions))}
    for budget in BUDGETS:
        out[f"random_{budget}"] = score([random(budget) for _ in questions])
    out["oracle_64"] = score([filled(o, 64) for o in objects])
    out["oracle_32"] = score([filled(o, 32) for o in objects])
    out["oracle_objects"] = score(objects)
    # The patches that each question needs, and none else: four for most kinds.
    single = [(image, qa) for image, qas in enumerate(questions) for qa in qas]
    keys = [torch.tensor(sorted(qa.key_patches)) for _, qa in single]
    alone = [[qa] for _, qa in single]
    out["oracle_key"] = rounded(accuracy(alone, predict(model, [states[i] for i, _ in single], alone, keys)))
    return out


def rounded(scores: dict[str, float]) -> dict[str, float]:
    """Accuracies to four digits."""
    return {kind: round(value, 4) for kind, value in scores.items()}


def most_frequent_answer(questions: list[list[QA]]) -> dict[str, float]:
    """The share of each kind's most frequent answer; "all" answers every question with the best word of its kind."""
    answers: dict[str, Counter[str]] = defaultdict(Counter)
    for qas in questions:
        for qa in qas:
            answers[qa.kind][qa.answer] += 1
    best = {kind: counter.most_common(1)[0][1] for kind, counter in answers.items()}
    scores = {kind: best[kind] / sum(answers[kind].values()) for kind in KINDS}
    return rounded({"all": sum(best.values()) / sum(map(len, questions)), **scores})


def question_only(work: Path, questions: list[list[QA]]) -> dict[str, float]:
    """What the words of a question give away: the most frequent answer to the same words on training collages."""
    answers: dict[str, Counter[str]] = defaultdict(Counter)
    rng = np.random.default_rng(EXAM_SEED)
    for collage in load_pool(work, "train", 12000, SEED).collages:
        for qa in exam_of(rng, collage):
            answers[qa.question][qa.answer] += 1
    guesses = [
        [answers[qa.question].most_common(1)[0][0] if answers[qa.question] else "" for qa in q] for q in questions
    ]
    return rounded(accuracy(questions, guesses))


def pipeline(
    model: LlavaForConditionalGeneration, folder: Path, test: Pool, flat: list[tuple[int, QA]]
) -> dict[str, float]:
    """The same through ``AutoProcessor`` and ``generate``, one question at a time, on a part of the questions."""
    processor = AutoProcessor.from_pretrained(folder)
    right = []
    for image, qa in flat:
        content = [{"type": "image"}, {"type": "text", "text": qa.question.capitalize()}]
        text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        inputs = processor(images=Image.fromarray(test.collages[image].image), text=text, return_tensors="pt")
        with torch.no_grad():
            ids = model.generate(**inputs)[0, inputs["input_ids"].shape[1] :]
        right.append(processor.decode(ids, skip_special_tokens=True) == qa.answer)
    return {"questions": len(right), "accuracy": round(float(np.mean(right)), 4)}


def table(metrics: dict) -> str:
    """A Markdown table: a row per condition, a column per kind."""
    rows = {"prior: most frequent answer": metrics["prior_most_frequent_answer"]}
    rows["prior: question only"] = metrics["prior_question_only"]
    rows |= metrics["accuracy"]
    columns = ("all", *KINDS)
    lines = ["| % | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, scores in rows.items():
        lines.append(f"| {name} | " + " | ".join(f"{100 * scores[c]:.1f}" for c in columns) + " |")
    return "\n".join(lines)


def write_table(card: Path, text: str) -> None:
    """Put the table between the model card's markers."""
    before, rest = card.read_text().split("<!-- metrics -->")
    after = rest.split("<!-- /metrics -->")[1]
    card.write_text(f"{before}<!-- metrics -->\n\n{text}\n\n<!-- /metrics -->{after}")


if __name__ == "__main__":
    main()
